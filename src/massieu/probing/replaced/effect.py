"""What a model loses when its attention is replaced: paired, on the same windows, with intervals.

A model that predicts the next token is judged by its loss, in nats a token. Any other by how far its last hidden states
move: ‖Δ‖² beside their mean squared distance from their mean over the window.
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
from massieu.probing.model.model import LoadedModel, model_inputs
from massieu.probing.replaced.context import replaced
from massieu.probing.replaced.replacement import Replacement
from massieu.probing.replaced.rules import MEAN, AtRest, Off, Resampled, Rule, made_of
from massieu.probing.statistics.group import CallTokens, Event, Group, Row, RowPlace
from massieu.probing.statistics.registry import REPLACEMENT
from massieu.probing.statistics.replacement import loss_without_head, output_without_head
from massieu.probing.sums.accumulate import Ratio
from massieu.probing.sums.units import Estimate
from massieu.storage.record import ReplacementRecord

LOSS, CHANGE = "loss", "output"
_NUMBERS = 2**26  # logits that are held at a time


@dataclass(frozen=True, eq=False)
class ReplacementTarget:
    """One replacement: the rule, and where it is put in place; None is everywhere."""

    asked: Replacement
    rule: Rule
    info: SiteInfo | None = None
    head: int | None = None

    @property
    def sites(self) -> Any:
        """As `replaced` takes them."""
        if self.info is None:
            return None
        return [self.info.site.name] if self.head is None else {self.info.site.name: [self.head]}


@dataclass(eq=False)
class Effects:
    """A sample of windows, and what becomes of the model on them.

    Attributes:
        means: sums of each site's outputs over all real tokens of the text (H, Dv), and how many there were.
        complete: False where an interruption left some windows out.
        lost: by rule, how many changes of tokens were not finite and are left out.
        failed: rules that ended with an error on the way, with the reason; nothing of them is measured.
        seed: of rules that draw.
        unsettled: by rule, for how many queries of a head no fixed point was found.
    """

    loaded: LoadedModel
    asked: Sequence[Replacement]
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
        part = {k: v[:1] if isinstance(v, Tensor) and v.dim() else v for k, v in inputs.items()}
        self.rows = [(part, 0)]  # which tells what is measured
        stock, real = self._values(part)
        if self.measure == CHANGE and stock.dim() != 3:
            raise InputError(
                f"replace needs a model whose output has shape (batch, tokens, width), and that of "
                f"{type(self.loaded.module).__name__} has shape {tuple(stock.shape)}"
            )
        for each in self.asked:
            with replaced(self.loaded.module, "off" if each.rule == MEAN else each.rule):
                other, _ = self._values(part)
            self._difference(other, stock, real)
        self.rows = []

    def keep(self, inputs: dict[str, Any], numbers: Sequence[int]) -> None:
        """Sample some rows of a batch, each of whose tensors has a row for each."""
        most = max((each.windows for each in self.asked), default=0)
        for row, number in enumerate(numbers):
            if len(self.rows) == most:
                return
            part = {k: v[row : row + 1] if isinstance(v, Tensor) and v.dim() else v for k, v in inputs.items()}
            self.rows.append((part, number))

    def add(self, name: str, output: Float[Tensor, "B L H Dv"], real: Bool[Tensor, "B L"]) -> None:
        """Add outputs of one site to their mean."""
        if real.shape != output.shape[:2]:
            real = real.new_ones(output.shape[:2])
        total, count = self.sums.get(name, (0, 0))
        kept = torch.where(real[..., None, None], output, 0.0)  # padding may hold NaN
        self.sums[name] = total + kept.sum((0, 1), dtype=torch.float64), count + int(real.sum())

    @property
    def measure(self) -> str:
        """ "loss" where the model predicts the next token, else "output"."""
        whole = self.loaded.whole
        head = getattr(whole, "get_output_embeddings", lambda: None)()
        causal = bool(self.sites) and all(info.kind == "causal" for info in self.sites)
        words = all(isinstance(part.get("input_ids"), Tensor) for part, _ in self.rows)
        return LOSS if head is not None and causal and words and whole is not self.loaded.module else CHANGE

    def targets(self) -> Iterator[ReplacementTarget]:
        """Every replacement."""
        means = {name: total / max(count, 1) for name, (total, count) in self.sums.items()}
        for asked in self.asked:
            rule = Off(means) if asked.rule == MEAN else made_of(asked.rule)
            if isinstance(rule, Resampled):
                rule.generator.manual_seed(self.seed)
            if asked.per == "all":
                yield ReplacementTarget(asked, rule)
            for info in self.sites if asked.per != "all" else ():
                for head in range(info.heads) if asked.per == "head" else (None,):
                    yield ReplacementTarget(asked, rule, info, head)

    def measured(self, interrupted: Callable[[], bool], tell: Callable[[int, int], None]) -> list[ReplacementRecord]:
        """Run every replacement on the windows that were kept, as many as it asks for.

        Args:
            interrupted: whether to end; what is measured then is of fewer windows.
            tell: is told how many forward passes were made, and how many there will be.
        """
        targets = list(self.targets())
        found = [Ratio((1,)) for _ in targets]
        chunks = list(self._chunks())
        passes, windows = itertools.count(1), 0
        for inputs in chunks:
            pairs = []
            stock, real = self._values(inputs)
            for target in targets:
                if interrupted():
                    self.complete = False
                    return self._records(targets, found, windows)
                left = max(target.asked.windows - windows, 0)
                pairs.append(self._change(target, inputs, stock[:left], real[:left]) if left else None)
                tell(next(passes), len(chunks) * len(targets))
            for ratio, change in zip(found, pairs, strict=True):
                if change is not None:
                    ratio.update(*change)
            windows += len(real)
        rules = {id(each.rule): (each.asked.name, each.rule) for each in targets}
        self.unsettled = {text: rule.lost for text, rule in rules.values() if isinstance(rule, AtRest) and rule.lost}
        return self._records(targets, found, windows)

    def _change(
        self, target: ReplacementTarget, inputs: dict[str, Any], stock: Tensor, real: Tensor
    ) -> tuple[np.ndarray, np.ndarray]:
        """Totals and counts of the first windows, as many as ``stock`` has; zeros where the rule failed, which is noted."""
        name = target.asked.name
        if name not in self.failed:
            try:
                with replaced(self.loaded.module, target.rule, sites=target.sites):
                    other, _ = self._values(inputs)
            except Exception as error:  # of whatever class a rule raises: the text was read, and is not lost
                self.failed[name] = sentence(error)
            else:
                total, count = self._difference(other[: len(real)], stock, real)
                self.lost[name] = self.lost.get(name, 0) + int(real.sum()) - int(count.sum())
                return total, count
        return np.zeros((len(real), 1)), np.zeros((len(real), 1))

    def warnings(self) -> list[str]:
        """A sentence for each rule that failed, or of which some of the changes are not what they should be."""
        said = [
            f"attention replaced by {text} could not be measured and is left out ({reason})"
            for text, reason in self.failed.items()
        ]
        said += [
            f"with attention replaced by {text}, {count:,} of the tokens' changes are not finite, and are left out"
            for text, count in self.lost.items()
            if count and text not in self.failed
        ]
        return said + [
            f"with attention replaced by {text}, {count:,} fixed points were not found, and the last state was taken"
            for text, count in self.unsettled.items()
        ]

    def _chunks(self) -> Iterator[dict[str, Any]]:
        """Windows of one form together, as many as their logits allow."""

        def form(row: tuple[dict[str, Any], int]) -> Any:
            return [(k, tuple(v.shape), str(v.dtype)) for k, v in row[0].items() if isinstance(v, Tensor)]

        words = getattr(getattr(self.loaded.whole, "config", None), "vocab_size", None) or 1
        for _, group in itertools.groupby(self.rows, key=form):
            rows = [part for part, _ in group]
            length = max((v.shape[1] for v in rows[0].values() if isinstance(v, Tensor) and v.dim() > 1), default=1)
            size = max(1, _NUMBERS // (length * words)) if self.measure == LOSS else 8
            for start in range(0, len(rows), size):
                part = rows[start : start + size]
                yield {
                    k: torch.cat([each[k] for each in part]) if isinstance(v, Tensor) and v.dim() else v
                    for k, v in part[0].items()
                }

    def _values(self, inputs: dict[str, Any]) -> tuple[Tensor, Bool[Tensor, "R L"]]:
        """What is compared: losses (R, L − 1), or hidden states (R, L, D); and which of them are of real tokens."""
        module: nn.Module = self.loaded.module
        ready = model_inputs(module, inputs)
        decoder = decoder_given(ready)
        with torch.no_grad():
            if self.measure == CHANGE:
                output = output_tensor(module, run(module, ready)).float()
                audio = None if decoder else frames_of(module, ready)
                masks = BatchTokens(ready).mask(decoder=decoder), None if audio is None else audio.real
                real = (mask for mask in masks if mask is not None and mask.shape == output.shape[:2])
                return output, next(real, torch.ones(output.shape[:2], dtype=torch.bool, device=output.device))
            logits = run(self.loaded.whole, ready).logits[:, :-1].float()
            ids, mask = ready["input_ids"].to(logits.device), BatchTokens(ready).mask(decoder=False)
            loss = nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
            mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.to(logits.device)
            return loss, mask[:, 1:] & mask[:, :-1]

    def _difference(self, other: Tensor, stock: Tensor, real: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Totals and counts of each window."""
        if self.measure == LOSS:
            values = loss_without_head(other, stock)
        else:
            values = output_without_head(other, stock, real)
        valid = real & values.isfinite()
        total = torch.where(valid, values, 0.0).sum(1, dtype=torch.float64)
        return total.cpu().numpy()[:, None], valid.sum(1).double().cpu().numpy()[:, None]

    def _records(
        self, targets: Sequence[ReplacementTarget], found: Sequence[Ratio], windows: int
    ) -> list[ReplacementRecord]:
        student = require_extra("scipy.stats", "probe").t
        records = []
        for target, ratio in zip(targets, found, strict=True):
            name, info = target.asked.name, target.info
            if name in self.failed:
                continue
            estimate = ratio.estimate()
            value, error, count = (float(each[0]) for each in estimate)
            wide = float(student.ppf(0.975, np.maximum(estimate.degrees, 1)[0])) * error
            records.append(
                ReplacementRecord(
                    rule=name,
                    measure=self.measure,
                    site=info and info.site.name,
                    layer=info and info.layer,
                    head=target.head,
                    value=value,
                    standard_error=error,
                    low=value - wide,
                    high=value + wide,
                    tokens=int(count),
                    windows=min(windows, target.asked.windows),
                )
            )
        return records


class ReplacedAttention(Group):
    """What the model loses when attention is replaced: outputs' means while the text is read, the effects after it.

    Attributes:
        records: what was found.
    """

    name = REPLACEMENT
    events = frozenset({Event.CALLS})

    def __init__(self, effects: Effects) -> None:
        super().__init__()
        self.effects = effects
        self.records: list[ReplacementRecord] = []

    def on_call(self, call: AttentionCall, tokens: CallTokens) -> None:
        """Add a site's outputs to their mean."""
        self.effects.add(call.site.name, call.output.detach(), tokens.queries.real)

    def rows(self) -> Iterator[Row]:
        """The change with one head at its mean."""
        for info in self.model.sites:
            yield from _head_rows(info, self.records)


def _head_rows(info: SiteInfo, records: Sequence[ReplacementRecord]) -> Iterator[Row]:
    of = {
        each.head: each
        for each in records
        if each.rule == MEAN and each.site == info.site.name and each.head is not None
    }
    if set(of) != set(range(info.heads)):
        return
    name = loss_without_head.__name__ if of[0].measure == LOSS else output_without_head.__name__
    columns = ([getattr(of[h], each) for h in range(info.heads)] for each in ("value", "standard_error", "tokens"))
    found = Estimate(*(np.array(column, dtype=np.float64) for column in columns))
    yield Row(RowPlace.of_site(info), name, "", found)
