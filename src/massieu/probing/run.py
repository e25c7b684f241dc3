"""`probe`: a model and text in, a result out; and `describe`: what would be read, without any text."""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as with_changes
from html import escape
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from massieu.errors import InputError
from massieu.foundation.arguments import described
from massieu.foundation.doors import check_fields, count, sequence
from massieu.foundation.doors import seed as check_seed
from massieu.foundation.printable import visible
from massieu.foundation.short_repr import html_table
from massieu.interruption import Interruption, interruptible
from massieu.probing.data.given import Data, Images, Pairs, given_data
from massieu.probing.model.forward import named_inputs
from massieu.probing.model.given import Checkpoint, Model, given_model
from massieu.probing.model.model_inputs import dummy_inputs
from massieu.probing.reading.options import Options
from massieu.probing.reading.per_token import check_per_token
from massieu.probing.replaced.replacement import Replacement, replacements, with_heads
from massieu.probing.replaced.rules import Rule
from massieu.probing.result.result import ProbeResult
from massieu.probing.session.draws import DRAWS
from massieu.probing.session.progress import ProbeProgress, Tell, telling
from massieu.probing.session.run import Run, course_of, given_run
from massieu.probing.session.session import Input, Session
from massieu.probing.session.sharing import Sharing
from massieu.probing.session.sources import Opening
from massieu.probing.statistics.catalogue import Named, Selection
from massieu.probing.statistics.registry import ATTENTION, CLIMB, MAPS, REPEATED, REPLACEMENT
from massieu.probing.sums.units import Units
from massieu.storage.record import ModelRecord, SiteRecord, Sublayer, json_value

BATCH_SIZE = 8
"""Windows in a batch, unless a probe is told otherwise."""
NO_RULES: tuple[()] = ()
"""What a probe replaces, unless it is told otherwise."""
QUICK = "quick"
"""In place of names of statistics: those of the attention, without control and examples."""
_SHOWN = 4
"""Sentences of each kind that a description prints."""


def probe(
    model: Model = None,
    data: Any = None,
    *,
    statistics: Iterable[Named] | str | None = None,
    replace: str | Rule | Replacement | Sequence[str | Rule | Replacement] = NO_RULES,
    draws: int = DRAWS,
    per_token: bool | Sequence[str] = False,
    query_sample: int | None = None,
    batch_size: int = BATCH_SIZE,
    seed: int = 0,
    run: str | PathLike[str] | Run | None = None,
) -> ProbeResult:
    """Measure every attention head and residual step of a transformer on text: weights, entropy, log Z, controls.

    The model's outputs stay its own (checked on the first batch); statistics are computed beside the forward pass and
    kept as running results, so memory does not grow with the text.

    Args:
        model: a name (a folder, of a model or of an adapter to one, a GGUF file, or a name on the hub), a
            `massieu.Checkpoint`, which also says how it is loaded, any module in memory, or None for the MiniLM sentence
            encoder. What wraps a module is taken off: DDP, ``torch.compile``, PEFT, SentenceTransformer.
        data: a `massieu.Text`, `massieu.Pairs`, `massieu.Images` or `massieu.Batches`. A path, or a list of paths, names
            text; every other iterable holds batches; None is the English reference text that every Python ships. A module in
            memory reads text with a tokenizer that it is given: ``massieu.Text(paths, tokenizer)``.
        statistics: names of statistics or groups, and functions of your own (see `massieu.statistic`) or your own groups; None
            is all of the package's that are cheap. ``"quick"`` is those of the attention with their standard errors alone: no
            re-initialised control, and no examples.
        replace: rules, as for `massieu.replaced`, and ``"off(mean)"``, each head's mean output over the text; or
            `massieu.Replacement`, which also says in what it is put, and on how many windows it is measured. What each changes
            is in ``result.run.replacements``: the loss of a model that predicts the next token, else its output.
        draws: so many re-initialised models are drawn, one at a time, and heads are compared with the law of theirs. With
            fewer than 4 the law's tails cannot be seen, and heads have to differ by twice as much. With 0 nothing is compared.
        per_token: True writes the value of every statistic of the attention at every query, a list of names those alone;
            `massieu.ProbeResult.tokens` reads them. The rows go into the folder of ``run``, else into a temporary one, and
            ``save`` puts them beside the tables. About 4 bytes for each value.
        query_sample: at most this many queries per window for the per-query statistics (long inputs).
        batch_size: windows in a batch; it changes no number beyond rounding.
        seed: of everything that is drawn: samples, directions and the re-initialised copies.
        run: a folder to store running sums in, or a `massieu.Run`, which also goes on from stored ones, shares the text among
            processes, and says how far it is.

    Returns:
        The result; ``complete`` is False when Ctrl-C ended it early.

    Raises:
        InputError: bad input of any kind, named in one sentence; also when the self-check finds that what was captured
            does not reproduce the model's own attention, and where no attention can be read, with the reasons.
        ProcessLostError: another process that shares the text has ended before its time.

    Example:
        Two heads of a small model, each with an entropy below log 8 = 2.08 nats.

        >>> import massieu
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> small = BertConfig(
        ...     hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9
        ... )
        >>> model = BertModel(small).eval()
        >>> result = massieu.probe(model, [{"input_ids": torch.arange(8)[None]}], statistics=["entropy"])
        >>> [0 < row["value"] < 2.08 for row in result.heads.rows(named=True) if row["statistic"] == "entropy"]
        [True, True]
    """
    rules = NO_RULES if replace is NO_RULES else replacements(replace)
    asked = Measurement(statistics, rules, draws, per_token, query_sample, batch_size, seed)
    return measured(given_model(model), given_data(data), asked, given_run(run))


@dataclass(frozen=True)
class Measurement:
    """What a probe measures, whatever the model and the text: see `probe`, whose arguments these are.

    Attributes:
        selection: what was asked for by `statistics`.
    """

    statistics: Iterable[Named] | str | None = None
    replace: tuple[Replacement, ...] = NO_RULES
    draws: int = DRAWS
    per_token: bool | Sequence[str] = False
    query_sample: int | None = None
    batch_size: int = BATCH_SIZE
    seed: int = 0
    selection: Selection = field(init=False)

    def __post_init__(self) -> None:
        check_fields(self, draws=count, query_sample=count, batch_size=count, seed=check_seed, statistics=_names)
        if self.draws < 0 or self.draws == 1:
            raise InputError(f"draws must be a whole number, 2 or more, or 0 for no control, got {self.draws}")
        for name in ("query_sample", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} must be at least 1, got {value}")
        if not (self.statistics is None or isinstance(self.statistics, str)):
            object.__setattr__(self, "statistics", list(self.statistics))  # several models may be measured by one
        object.__setattr__(self, "selection", Selection.of([ATTENTION] if self.quick else self.statistics))

    @property
    def quick(self) -> bool:
        """Whether the attention's statistics are measured by themselves, without control and examples."""
        return isinstance(self.statistics, str)

    def settings(self) -> dict[str, Any]:
        """The user's settings, as a result's record holds them."""
        named = None if self.quick else self.selection.requested
        settings: dict[str, Any] = {
            "statistics": named,
            "batch_size": self.batch_size,
            "query_sample": self.query_sample,
            "quick": self.quick,
            "draws": self.draws,
        }
        if own := self.selection.catalogue.digests():
            settings["own_statistics"] = own
        if self.replace:
            settings["replace"] = [f"{replacement.name} for {replacement.per}" for replacement in self.replace]
        return settings


@torch.inference_mode(False)  # slopes need derivatives, wherever the caller stands
def measured(
    model: Checkpoint | nn.Module, data: Data, asked: Measurement, run: Run, sharing: Sharing | None = None
) -> ProbeResult:
    """`probe` of what was checked by itself.

    Args:
        sharing: what this probe has in common with others.
    """
    selection = asked.selection
    wanted, groups = selection.names, selection.groups
    rows = () if asked.per_token is False else check_per_token(asked.per_token, selection)
    replacing = with_heads(asked.replace) if REPLACEMENT in groups else asked.replace
    new_tokens = None if isinstance(data, Pairs | Images) else data.continue_for
    if new_tokens is not None:
        wanted, groups = _while_generating(selection), frozenset({ATTENTION})
    _check_together(run, new_tokens is not None, bool(replacing), bool(rows))
    if replacing != asked.replace:
        asked = with_changes(asked, replace=replacing)
    settings = _settings(model, data, asked, rows)
    course = course_of(run, settings, stores=not replacing)  # the windows that are run again are in no running sums
    head = True if new_tokens is not None else "if any" if replacing or REPEATED in groups else False
    with telling(run.progress, silent=course is not None and course.rank > 0) as tell:
        loaded, given = Opening(model, head, asked.batch_size, tell, sharing).input(data)
        units = Units(mode="window" if given.packing else "document")
        options = Options(
            groups, units, given.max_length, asked.query_sample, seed=asked.seed, statistics=wanted,
            examples=not asked.quick, new_tokens=new_tokens, replace=replacing, per_token=rows,
            draws=0 if asked.quick else asked.draws, catalogue=selection.catalogue,
        )  # fmt: skip
        settings["max_length"] = given.max_length
        if course is not None:
            course.settings["max_length"] = given.max_length
        limit = settings["max_tokens"]
        with interruptible() as interruption:
            if run.resume and not (course is not None and course.has_stored_sums()):
                tell(ProbeProgress(f"nothing is stored in {run.folder}: reading from the beginning"))
            session = Session(
                loaded, given, options, _holding(tell, interruption), limit, course=course, sharing=sharing
            )
            complete = session.read_all(interruption.asked) and session.replace_all(interruption.asked)
            tell(ProbeProgress("writing", session.tokens, limit, session.read))
            return session.result(wanted, settings, complete)


def _names(name: str, value: object) -> None:
    """Raises:
    TypeError: neither names of statistics nor `QUICK`.
    """
    if isinstance(value, str) and value != QUICK:
        raise TypeError(f'{name} must be a list of names, or "{QUICK}", got {described(value)}')
    if not isinstance(value, str):
        sequence(name, value)


def _check_together(run: Run, generates: bool, replaces: bool, rows: bool) -> None:
    """Raises:
    InputError: two things were asked for that cannot be had together.
    """
    if generates and rows:
        raise InputError("per_token and continue_for do not work together: give one of them")
    if generates and replaces:
        raise InputError("replace and continue_for do not work together: give one of them")
    if replaces and (run.distributed or run.resume):
        raise InputError("replace needs a single process that reads from the beginning: leave out torchrun and resume")
    if rows and run.distributed and run.folder is None:
        raise InputError(
            "per_token with distributed=True needs a folder that all processes write their rows to: massieu.Run(folder, …)"
        )


def _settings(model: Checkpoint | nn.Module, data: Data, asked: Measurement, rows: Sequence[str]) -> dict[str, Any]:
    """The user's settings, as the record holds them, and as a run that goes on from this one has to repeat them."""
    loading = model if isinstance(model, Checkpoint) else Checkpoint()
    settings = data.settings() | asked.settings() | loading.settings()
    if rows:
        settings["per_token"] = list(rows)
    return settings


def _while_generating(selection: Selection) -> frozenset[str]:
    """The statistics of new tokens: those of attention.

    Raises:
        InputError: another one was named.
    """
    others = selection.others()
    if others and selection.named:
        raise InputError(
            f"while a model generates, only statistics of attention are measured, not {', '.join(sorted(others))}"
        )
    return selection.names - others


def _holding(tell: Tell, interruption: Interruption) -> Tell:
    """Once a batch was measured, an interruption waits for what can be kept of it."""

    def tell_and_hold(state: ProbeProgress) -> None:
        if state.windows:
            interruption.hold()
        tell(state)

    return tell_and_hold


@dataclass(frozen=True, eq=False)
class Description:
    """What a probe would read in a model."""

    model: ModelRecord
    route: str
    sites: list[SiteRecord]
    sublayers: list[Sublayer]
    unavailable: list[str]
    warnings: list[str]

    def __repr__(self) -> str:
        kinds = Counter(site.kind for site in self.sites)
        sites = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        lines = [
            f"Description of {self.model.name}: {self.model.architecture}, {self.model.layers} layers",
            f"  attention modules: {sites}; read by {self.route}",
            f"  sublayers: {len(self.sublayers)}",
        ]
        lines += [f"  left out: {each}" for each in self.unavailable[:_SHOWN]]
        lines += [f"  warning: {each}" for each in self.warnings[:_SHOWN]]
        return visible("\n".join(lines))

    def _repr_html_(self) -> str:
        columns = ("layer", "name", "kind", "heads", "key_heads", "head_size", "route", "grade")
        rows = [[_cell(getattr(site, column)) for column in columns] for site in self.sites]
        sites = html_table([column.replace("_", " ") for column in columns], rows)
        return f"<pre>{escape(repr(self))}</pre>{sites}"

    def to_dict(self) -> dict[str, Any]:
        """The description as JSON can hold it."""
        return json_value(vars(self))


def _cell(value: object) -> object:
    """A table's cell: a dash for what is not known."""
    return "–" if value is None else value


@torch.inference_mode(False)
def describe(model: Model = None, data: Tensor | tuple[Any, ...] | Mapping[str, Any] | None = None) -> Description:
    """Find the attention layers, heads and residual steps of a model from one tiny made-up input; needs no text.

    Args:
        model: as for `probe`.
        data: one batch, in any form that a model's forward takes it; needed where the model does not say what it reads.

    Raises:
        InputError: as for `probe`; also when the model reads neither tokens nor images and no batch is given.

    Example:
        A model of `transformers`, then one attention of PyTorch's own.

        >>> import massieu
        >>> from transformers import BertConfig, BertModel
        >>> small = BertConfig(
        ...     hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9
        ... )
        >>> model = BertModel(small).eval()
        >>> [(site.kind, site.heads, site.head_size) for site in massieu.describe(model).sites]
        [('self', 2, 4)]
        >>> import torch
        >>> tokens = torch.ones(1, 5, 8)
        >>> attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
        >>> [(site.kind, site.heads, site.route) for site in massieu.describe(attention, (tokens,) * 3).sites]
        [('self', 2, 'tap')]
    """
    if isinstance(data, Data):
        raise InputError(
            f"describe reads one batch, as a model's forward takes it, and no massieu.{type(data).__name__}"
        )
    loaded = Opening(given_model(model), False, 1, lambda _: None).loaded()
    ready = dummy_inputs(loaded.module) if data is None else named_inputs(loaded.module, data)
    options = Options(frozenset({CLIMB, MAPS}), Units(), 256, climb_queries=4)
    given = Input([ready], "made-up input", True, 256, None)
    session = Session(loaded, given, options, lambda _: None, None)
    session.begin(ready)
    session.read_all(threading.Event())
    sites = [session.site_record(info) for info in session.reading.sites]
    reasons = sorted({f"{k}: {reason}" for site in sites for k, reason in site.unavailable.items()})
    sublayers = session.reading.sublayers
    trouble = session.trouble()
    warnings = [*([] if trouble is None else [trouble.sentence]), *session.all_warnings()]
    return Description(session.model_record(), session.route(), sites, sublayers, reasons, warnings)
