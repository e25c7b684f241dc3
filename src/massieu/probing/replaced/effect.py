"""What a model loses when its attention is replaced: paired, on the same windows, with intervals.

A model that predicts the next token is judged by its loss, in nats a token. Any other model is judged by how far its last
hidden states move: ‖Δ‖² over their mean squared distance from their mean over the window.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from massieu.errors import InputError, require_extra
from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.capture.sites import SiteInfo
from massieu.probing.capture.tokens import BatchTokens
from massieu.probing.data.token_names import frames_of
from massieu.probing.model.checkpoint import sentence
from massieu.probing.model.forward import decoder_given, output_tensor, run
from massieu.probing.model.model import LoadedModel
from massieu.probing.model.model_inputs import model_inputs
from massieu.probing.replaced.context import replaced
from massieu.probing.replaced.replacement import Replacement
from massieu.probing.replaced.rules import MEAN, AtRest, Off, Resampled, Rule, rule_of
from massieu.probing.statistics.group import CallTokens, Event, Group, Row, RowPlace
from massieu.probing.statistics.registry import REPLACEMENT
from massieu.probing.statistics.replacement import loss_without_head, output_without_head
from massieu.probing.sums.accumulate import Ratio
from massieu.probing.sums.units import Estimate
from massieu.storage.record import ReplacementRecord

LOSS = "loss"
"""The measure of models that predict the next token."""
CHANGE = "output"
"""The measure of other models."""
_MOST_LOGITS = 2**26
"""Logits that are held at a time."""
_MOST_STATE_WINDOWS = 8
"""Windows that run at a time where no logits are formed."""


@dataclass(frozen=True, eq=False)
class ReplacementTarget:
    """One replacement: the rule, and the site and head that it replaces.

    Attributes:
        info: the site; None for all sites.
        head: the head; None for all heads.
    """

    replacement: Replacement
    rule: Rule
    info: SiteInfo | None = None
    head: int | None = None

    @property
    def sites(self) -> Any:
        """The argument ``sites`` of `replaced`."""
        if self.info is None:
            return None
        if self.head is None:
            return [self.info.site.name]
        return {self.info.site.name: [self.head]}


@dataclass(eq=False)
class Effects:
    """A sample of windows, and the effects of replacements on them.

    Attributes:
        rows: the sampled windows, with their numbers in the text.
        sums: by site, the sum of its outputs over all real tokens of the text (H, Dv), and the number of tokens.
        complete: False if an interruption left out some windows.
        lost: by rule, how many changes of tokens were not finite and are left out.
        failed: by rule, why it ended with an error; it has no numbers.
        seed: of rules that draw.
        unsettled: by rule, for how many queries of a head no fixed point was found.
    """

    loaded: LoadedModel
    replacements: Sequence[Replacement]
    sites: Sequence[SiteInfo] = ()
    rows: list[tuple[dict[str, Any], int]] = field(default_factory=list)
    sums: dict[str, tuple[Tensor, int]] = field(default_factory=dict)
    complete: bool = True
    lost: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    seed: int = 0
    unsettled: dict[str, int] = field(default_factory=dict)

    def check(self, inputs: dict[str, Any]) -> None:
        """Try every rule on one row, before anything is measured.

        Raises:
            InputError: a rule cannot take the place of this model's attention.
        """
        first_row = _rows_of(inputs, slice(0, 1))
        self.rows = [(first_row, 0)]  # `measure` looks at the rows
        stock, real = self._values(first_row)
        if self.measure == CHANGE and stock.dim() != 3:
            raise InputError(
                f"replace needs a model whose output has shape (batch, tokens, width), and that of "
                f"{type(self.loaded.module).__name__} has shape {tuple(stock.shape)}"
            )
        for replacement in self.replacements:
            # The means are not known yet.
            with replaced(self.loaded.module, "off" if replacement.rule == MEAN else replacement.rule):
                changed, _ = self._values(first_row)
            self._difference(changed, stock, real)
        self.rows = []

    def sample(self, inputs: dict[str, Any], numbers: Sequence[int]) -> None:
        """Add the rows of a batch to the sample, until it has as many as the largest replacement needs.

        Args:
            numbers: of the rows in the text.
        """
        most = max((replacement.windows for replacement in self.replacements), default=0)
        for row, number in enumerate(numbers):
            if len(self.rows) == most:
                return
            self.rows.append((_rows_of(inputs, slice(row, row + 1)), number))

    def add(self, name: str, output: Float[Tensor, "B L H Dv"], real: Bool[Tensor, "B L"]) -> None:
        """Add outputs of one site to its sum."""
        if real.shape != output.shape[:2]:  # sequences that are parts of items have no mask of their own
            real = real.new_ones(output.shape[:2])
        total, count = self.sums.get(name, (0, 0))
        unpadded = torch.where(real[..., None, None], output, 0.0)  # padding may hold NaN
        self.sums[name] = (total + unpadded.sum((0, 1), dtype=torch.float64), count + int(real.sum()))

    @property
    def measure(self) -> str:
        """The measure: `LOSS` if the model predicts the next token, else `CHANGE`."""
        whole = self.loaded.whole
        has_head = getattr(whole, "get_output_embeddings", lambda: None)() is not None
        is_causal = bool(self.sites) and all(info.kind == "causal" for info in self.sites)
        reads_tokens = all(isinstance(inputs.get("input_ids"), Tensor) for inputs, _ in self.rows)
        predicts_tokens = has_head and is_causal and reads_tokens and whole is not self.loaded.module
        return LOSS if predicts_tokens else CHANGE

    def targets(self) -> Iterator[ReplacementTarget]:
        """Every replacement, at every site or head that it is measured on by itself."""
        means = {name: total / max(count, 1) for name, (total, count) in self.sums.items()}
        for replacement in self.replacements:
            rule = Off(means) if replacement.rule == MEAN else rule_of(replacement.rule)
            if isinstance(rule, Resampled):
                rule.generator.manual_seed(self.seed)
            if replacement.per == "all":
                yield ReplacementTarget(replacement, rule)
                continue
            for info in self.sites:
                for head in range(info.heads) if replacement.per == "head" else (None,):
                    yield ReplacementTarget(replacement, rule, info, head)

    def measured(
        self, interrupted: Callable[[], bool], report_progress: Callable[[int, int], None]
    ) -> list[ReplacementRecord]:
        """Run every replacement on the sampled windows, on as many as it asks for.

        Args:
            interrupted: whether to end early; the results are then of fewer windows.
            report_progress: called with the number of forward passes so far, and of all.
        """
        targets = list(self.targets())
        ratios = [Ratio((1,)) for _ in targets]
        chunks = list(self._chunks())
        passes = itertools.count(1)
        windows = 0
        for inputs in chunks:
            # All targets of a chunk are added together, so that an interruption leaves every one with the same windows.
            changes = []
            stock, real = self._values(inputs)
            for target in targets:
                if interrupted():
                    self.complete = False
                    return self._records(targets, ratios, windows)
                remaining = max(target.replacement.windows - windows, 0)
                if remaining:
                    changes.append(self._change(target, inputs, stock[:remaining], real[:remaining]))
                else:
                    changes.append(None)
                report_progress(next(passes), len(chunks) * len(targets))
            for ratio, change in zip(ratios, changes, strict=True):
                if change is not None:
                    ratio.update(*change)
            windows += len(real)
        self.unsettled = {
            target.replacement.name: target.rule.lost
            for target in targets
            if isinstance(target.rule, AtRest) and target.rule.lost
        }
        return self._records(targets, ratios, windows)

    def _change(
        self, target: ReplacementTarget, inputs: dict[str, Any], stock: Tensor, real: Tensor
    ) -> tuple[np.ndarray, np.ndarray]:
        """Totals and counts of the first windows, as many as ``stock`` has; zeros if the rule has failed, see `failed`."""
        name = target.replacement.name
        no_change = (np.zeros((len(real), 1)), np.zeros((len(real), 1)))
        if name in self.failed:
            return no_change
        try:
            with replaced(self.loaded.module, target.rule, sites=target.sites):
                changed, _ = self._values(inputs)
        except Exception as error:  # a rule may raise any class; what was measured of the text is not lost
            self.failed[name] = sentence(error)
            return no_change
        total, count = self._difference(changed[: len(real)], stock, real)
        self.lost[name] = self.lost.get(name, 0) + int(real.sum()) - int(count.sum())
        return total, count

    def warnings(self) -> list[str]:
        """A sentence for each rule that failed, has changes that are not finite, or found no fixed points."""
        sentences = [
            f"attention replaced by {rule} could not be measured and is left out ({reason})"
            for rule, reason in self.failed.items()
        ]
        sentences += [
            f"with attention replaced by {rule}, {count:,} of the tokens' changes are not finite, and are left out"
            for rule, count in self.lost.items()
            if count and rule not in self.failed
        ]
        sentences += [
            f"with attention replaced by {rule}, {count:,} fixed points were not found, and the last state was taken"
            for rule, count in self.unsettled.items()
        ]
        return sentences

    def _chunks(self) -> Iterator[dict[str, Any]]:
        """Batches of neighbouring windows whose tensors have equal shapes, with as many windows as their logits allow."""

        def form(row: tuple[dict[str, Any], int]) -> Any:
            inputs, _ = row
            return [
                (name, tuple(value.shape), str(value.dtype))
                for name, value in inputs.items()
                if isinstance(value, Tensor)
            ]

        vocabulary_size = getattr(getattr(self.loaded.whole, "config", None), "vocab_size", None) or 1
        for _, group in itertools.groupby(self.rows, key=form):
            rows = [inputs for inputs, _ in group]
            lengths = (value.shape[1] for value in rows[0].values() if isinstance(value, Tensor) and value.dim() > 1)
            if self.measure == LOSS:
                size = max(1, _MOST_LOGITS // (max(lengths, default=1) * vocabulary_size))
            else:
                size = _MOST_STATE_WINDOWS
            for start in range(0, len(rows), size):
                chunk = rows[start : start + size]
                yield {
                    name: torch.cat([inputs[name] for inputs in chunk])
                    if isinstance(value, Tensor) and value.dim()
                    else value
                    for name, value in chunk[0].items()
                }

    def _values(self, inputs: dict[str, Any]) -> tuple[Tensor, Bool[Tensor, "R L"]]:
        """Losses (R, L − 1), or hidden states (R, L, D), by `measure`; and which of them are of real tokens."""
        prepared = model_inputs(self.loaded.module, inputs)
        with torch.no_grad():
            return self._losses(prepared) if self.measure == LOSS else self._states(prepared)

    def _states(self, prepared: dict[str, Any]) -> tuple[Tensor, Bool[Tensor, "R L"]]:
        """The last hidden states, (R, L, D)."""
        module: nn.Module = self.loaded.module
        decoder = decoder_given(prepared)
        output = output_tensor(module, run(module, prepared)).float()
        # Models of sound are padded in samples, and attend to frames.
        frames = None if decoder else frames_of(module, prepared)
        for mask in (BatchTokens(prepared).mask(decoder=decoder), None if frames is None else frames.real):
            if mask is not None and mask.shape == output.shape[:2]:
                return output, mask
        return output, torch.ones(output.shape[:2], dtype=torch.bool, device=output.device)

    def _losses(self, prepared: dict[str, Any]) -> tuple[Tensor, Bool[Tensor, "R L"]]:
        """The loss at each next token, (R, L − 1), in nats."""
        logits = run(self.loaded.whole, prepared).logits[:, :-1].float()
        ids = prepared["input_ids"].to(logits.device)
        mask = BatchTokens(prepared).mask(decoder=False)
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.to(logits.device)
        # A loss counts if the token and the one from which it is predicted are both real.
        return loss, mask[:, 1:] & mask[:, :-1]

    def _difference(self, changed: Tensor, stock: Tensor, real: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Totals and counts of each window."""
        if self.measure == LOSS:
            values = loss_without_head(changed, stock)
        else:
            values = output_without_head(changed, stock, real)
        valid = real & values.isfinite()
        total = torch.where(valid, values, 0.0).sum(1, dtype=torch.float64)
        return total.cpu().numpy()[:, None], valid.sum(1).double().cpu().numpy()[:, None]

    def _records(
        self, targets: Sequence[ReplacementTarget], ratios: Sequence[Ratio], windows: int
    ) -> list[ReplacementRecord]:
        """Estimates with intervals of 95 %, from Student's law over windows; without the rules that failed."""
        student = require_extra("scipy.stats", "probe").t
        records = []
        for target, ratio in zip(targets, ratios, strict=True):
            name = target.replacement.name
            info = target.info
            if name in self.failed:
                continue
            estimate = ratio.estimate()
            value, error, count = (float(column[0]) for column in estimate)
            half_width = float(student.ppf(0.975, np.maximum(estimate.degrees, 1)[0])) * error
            records.append(
                ReplacementRecord(
                    rule=name,
                    measure=self.measure,
                    site=info and info.site.name,
                    layer=info and info.layer,
                    head=target.head,
                    value=value,
                    standard_error=error,
                    low=value - half_width,
                    high=value + half_width,
                    tokens=int(count),
                    windows=min(windows, target.replacement.windows),
                )
            )
        return records


class ReplacedAttention(Group):
    """What the model loses when attention is replaced. Mean outputs are measured with the text, the effects after it.

    Attributes:
        records: the effects; filled by the session.
    """

    name = REPLACEMENT
    events = frozenset({Event.CALLS})

    def __init__(self, effects: Effects) -> None:
        super().__init__()
        self.effects = effects
        self.records: list[ReplacementRecord] = []

    def on_call(self, call: AttentionCall, tokens: CallTokens) -> None:
        """Add a site's outputs to their sum."""
        self.effects.add(call.site.name, call.output.detach(), tokens.queries.real)

    def rows(self) -> Iterator[Row]:
        """The effect of each head at its mean."""
        for info in self.model.sites:
            yield from _head_rows(info, self.records)


def _rows_of(inputs: dict[str, Any], rows: slice) -> dict[str, Any]:
    """Some rows of a batch; numbers and tensors without dimensions are of all rows."""
    return {name: value[rows] if isinstance(value, Tensor) and value.dim() else value for name, value in inputs.items()}


def _head_rows(info: SiteInfo, records: Sequence[ReplacementRecord]) -> Iterator[Row]:
    """The row of one site, if every head of it was replaced by its mean."""
    by_head = {
        record.head: record
        for record in records
        if record.rule == MEAN and record.site == info.site.name and record.head is not None
    }
    if set(by_head) != set(range(info.heads)):
        return
    name = loss_without_head.__name__ if by_head[0].measure == LOSS else output_without_head.__name__
    columns = (
        [getattr(by_head[head], attribute) for head in range(info.heads)]
        for attribute in ("value", "standard_error", "tokens")
    )
    estimate = Estimate(*(np.array(column, dtype=np.float64) for column in columns))
    yield Row(RowPlace.of_site(info), name, "", estimate)
