"""The record of a probe: what ``run.json`` holds and the page is drawn from, entry by entry.

A field that is `NEEDED` has to be in a file; any other may be missing or null and then has its default. What a file
says beside these fields is kept.
"""

import math
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any

import numpy as np

from massieu.errors import InputError, require_extra

SCHEMA_VERSION = 1


NEEDED = {"needed": True}
"""Metadata of a field that every stored record has, if only as null."""


@dataclass
class Entry:
    """A part of the record.

    Attributes:
        others: what a file says of it that has no field.
    """

    others: dict[str, Any] = field(default_factory=dict, init=False, repr=False)


@dataclass
class ModelRecord(Entry):
    """The model: where it is from, what it is, and what its files lacked; ``hash`` is of its files of weights.

    Most weights in its files are of ``stored_dtype``; they were read in ``dtype``.

    Of a module in memory it is of weights, configuration and plain attributes.
    """

    name: str | None = field(default=None, metadata=NEEDED)
    hash: str | None = None
    revision: str | None = None
    weights: str | None = None
    architecture: str | None = None
    parameters: int | None = None
    dtype: str | None = None
    stored_dtype: str | None = None
    device: str | None = None
    layers: int | None = field(default=None, metadata=NEEDED)
    heads: int | None = field(default=None, metadata=NEEDED)
    hidden_size: Any = None
    missing_weights: str | None = None
    unexpected_weights: str | None = None

    @property
    def dtype_sentence(self) -> str | None:
        """That the weights were read in another type than the checkpoint's; None where they were not."""
        if None in (self.stored_dtype, self.dtype) or self.stored_dtype == self.dtype:
            return None
        return f"the checkpoint's weights are {self.stored_dtype}, and were read and measured in {self.dtype}"


@dataclass
class TextRecord(Entry):
    """What was read; ``unknown_share`` is that of tokens which the tokenizer does not know.

    Attributes:
        dropped: what of the text was not read, as a sentence.
        window: that windows are shorter than the default, and why, as a sentence.
        bos: whether rows begin with the BOS token and who says so, as a sentence.
    """

    source: str | None = field(default=None, metadata=NEEDED)
    max_length: int | None = None
    packing: bool | None = None
    tokens: int | None = field(default=None, metadata=NEEDED)
    windows: int | None = field(default=None, metadata=NEEDED)
    documents: int | None = None
    dropped: str | None = None
    window: str | None = None
    bos: str | None = None
    unknown_share: float | None = None


@dataclass
class ErrorUnitRecord(Entry):
    """What standard errors are over, how many there are, and how many degrees of freedom the errors have."""

    unit: str | None = field(default=None, metadata=NEEDED)
    count: int | None = field(default=None, metadata=NEEDED)
    degrees: float | None = None

    @property
    def interval(self) -> str | None:
        """What a 95 % interval is, in words; None where there is no error."""
        return interval_in_words(self.degrees)


@dataclass
class SelfCheckRecord(Entry):
    """How far the probe's attention and outputs are from the model's own, as `SelfCheck` has it."""

    error: float | None = field(default=None, metadata=NEEDED)
    tolerance: float | None = field(default=None, metadata=NEEDED)
    site: str | None = None
    finite: bool | None = None
    passed: bool | None = None


@dataclass
class CaptureRecord(Entry):
    """How attention was read."""

    route: str | None = None
    attention_sites: int | None = None
    unexplained_keywords: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class SiteRecord(Entry):
    """An attention site.

    Attributes:
        route: how it was read: "interface" (of transformers), "tap" (scores followed to their softmax in any code) or "ops"
            (told by massieu's own attention).
        grade: "full", or "scores" where scores are not known apart from log-weights.
        unavailable: reasons by statistic or group.
    """

    index: int | None = None
    name: str = field(metadata=NEEDED)
    layer: int = field(metadata=NEEDED)
    kind: str | None = None
    heads: int | None = None
    key_heads: int | None = None
    head_size: int | None = None
    query_tokens: str | None = None
    key_tokens: str | None = None
    route: str = "interface"
    grade: str = "full"
    unavailable: dict[str, str] = field(default_factory=dict)


@dataclass
class Sublayer(Entry):
    """One step along the residual stream.

    Attributes:
        name: block (or norm module) and what the step does, such as ``encoder.layer.0 attention``.
        kind: ``attention``, ``cross_attention``, ``feed_forward``, ``attention_and_feed_forward`` or ``norm``.
        layer: index of the block in its stack; None for a step outside every block.
    """

    index: int = field(metadata=NEEDED)
    name: str = field(metadata=NEEDED)
    kind: str = field(metadata=NEEDED)
    layer: int | None = field(metadata=NEEDED)


@dataclass
class ReplacementRecord(Entry):
    """What changes if attention is replaced: in loss, nats a token, or in output, relative; with a 95 % interval.

    Attributes:
        site, layer, head: where; None is everywhere, or every head of the site.
    """

    rule: str = field(metadata=NEEDED)
    measure: str = field(metadata=NEEDED)
    site: str | None = None
    layer: int | None = None
    head: int | None = None
    value: float | None = None
    standard_error: float | None = None
    low: float | None = None
    high: float | None = None
    tokens: int | None = None
    windows: int | None = None


@dataclass
class PerTokenRecord(Entry):
    """The per-token table: its columns of statistics, its rows, and its bytes on the disk."""

    statistics: list[str] = field(metadata=NEEDED)
    rows: int = field(metadata=NEEDED)
    bytes: int = field(metadata=NEEDED)


@dataclass
class SampleRecord(Entry):
    """What replays and clouds ran on, and how many degrees of freedom their errors have."""

    windows: int | None = None
    queries: int | None = None
    degrees: float | None = None

    @property
    def interval(self) -> str | None:
        """What a 95 % interval is, in words; None where there is no error."""
        return interval_in_words(self.degrees)


def interval_in_words(degrees: float | None) -> str | None:
    """How many standard errors a 95 % interval reaches to either side, by Student's t with so many degrees of freedom."""
    if not degrees:
        return None
    reach = float(require_extra("scipy.special", "probe").stdtrit(degrees, 0.975))
    return f"± {reach:.1f} standard errors ({degrees:.0f} degrees of freedom)"


_IN_WORDS: dict[Any, str] = {
    str: "a string",
    str | None: "a string or None",
    bool: "True or False",
    float: "a number",
}


def _is_of(value: object, kind: Any) -> bool:
    if kind is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    return isinstance(value, kind)


@dataclass
class Statistic(Entry):
    """One number the probe reports, and all that a reader must know about it.

    Example:
        >>> from massieu.probing import Statistic
        >>> said = Statistic("output_norm", "Norm of the output", group="output_norms", scope="head", scale="positive")
        >>> said.name, said.scale
        ('output_norm', 'positive')

    Attributes:
        headline: may be compared between heads; invariant under a constant added to a head's keys.
        gauge_dependent: changes with that constant, which softmax cannot see; never a headline.
        signed: zero or the control is the natural centre of its scale.
        control: the control its map is compared with (a qualifier of the result table), or None.
        cost: of its group.
        sampled: it is measured on the sampled windows alone.
        scale: on which its numbers are compared: "share" by their logit, "positive" by their logarithm, "number" as they are.
        smallest: the smallest difference from a control that is announced; of a positive number in other units than nats,
            a share of the control.
    """

    name: str = field(metadata=NEEDED)
    title: str = ""
    formula: str = ""
    claim: str = ""
    paper: str = ""
    group: str = ""
    question: str = ""
    caveat: str = ""
    unit: str = ""
    scope: str | None = None
    headline: bool = False
    gauge_dependent: bool = False
    signed: bool = False
    control: str | None = None
    cost: str = ""
    scale: str = "number"
    smallest: float = 0.0
    sampled: bool = False

    def __post_init__(self) -> None:
        """Check what is said.

        Raises:
            InputError: a field is of another kind than its annotation says.
        """
        for each in fields(self):
            said = _IN_WORDS.get(each.type)
            value = getattr(self, each.name)
            if said is not None and not _is_of(value, each.type):
                raise InputError(f"{each.name} must be {said}, got {type(value).__name__}")

    @property
    def relative(self) -> bool:
        """Whether the smallest difference is a share of the control."""
        return self.scale == "positive" and self.unit != "nats"

    def matters(self, value: Any, null: Any) -> Any:
        """Whether numbers are so far from a null that somebody would care; of arrays an array."""
        if not self.relative:
            return np.abs(value - null) >= self.smallest
        larger, less = np.maximum(np.abs(value), np.abs(null)), np.minimum(np.abs(value), np.abs(null))
        return larger >= (1 + self.smallest) * less

    @property
    def smallest_in_words(self) -> str:
        """The smallest difference that is announced, with its unit."""
        if self.relative:
            return f"{self.smallest:.0%}"
        unit = self.unit.removesuffix("s") if self.smallest == 1 else self.unit
        return f"{self.smallest:g} {unit}".strip()


@dataclass
class Finding(Entry):
    """One card: what was found, and all that is needed to read it rightly; ``heads`` are pairs of layer and head.

    Without a ``value`` it is not announced, and the sentence says why.
    """

    id: str = field(metadata=NEEDED)
    title: str = field(metadata=NEEDED)
    sentence: str = field(metadata=NEEDED)
    value: float | None = None
    standard_error: float | None = None
    unit: str | None = ""
    control: str | None = ""
    count: int | None = 0
    caveat: str | None = ""
    statistic: str | None = None
    heads: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class UnavailableRecord(Entry):
    """A group or statistic that failed, of the model or of its re-initialised control."""

    of: str = field(metadata=NEEDED)
    statistic: str = field(metadata=NEEDED)
    reason: str = field(metadata=NEEDED)


@dataclass
class NonfiniteRecord(Entry):
    """How many queries of a head were left out."""

    site: str = field(metadata=NEEDED)
    layer: int | None = field(metadata=NEEDED)
    head: int | None = field(metadata=NEEDED)
    count: int = field(metadata=NEEDED)


@dataclass
class Trouble(Entry):
    """Why numbers are missing: what the model's own numbers are, and where that begins.

    Attributes:
        sentence: all of it, for the top of the page and the terminal.
        what: "NaN" or "infinity".
        first: a weight, a module or an input of the model: the first place.
    """

    sentence: str = field(metadata=NEEDED)
    what: str | None = None
    first: str | None = None


@dataclass(kw_only=True)
class RunRecord(Entry):
    """All that is needed to judge the numbers of a run; ``complete`` is False when it was interrupted."""

    schema_version: int = SCHEMA_VERSION
    massieu_version: str | None = None
    date: str | None = None
    complete: bool = field(metadata=NEEDED)
    model: ModelRecord = field(default_factory=ModelRecord)
    text: TextRecord = field(default_factory=TextRecord)
    error_unit: ErrorUnitRecord = field(default_factory=ErrorUnitRecord)
    self_check: SelfCheckRecord = field(default_factory=SelfCheckRecord)
    capture: CaptureRecord = field(default_factory=CaptureRecord)
    sites: list[SiteRecord] = field(default_factory=list)
    sublayers: list[Sublayer] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    seed: Any = None
    versions: dict[str, Any] = field(default_factory=dict)
    timing: dict[str, Any] = field(default_factory=dict)
    sample: SampleRecord = field(default_factory=SampleRecord)
    statistics: list[Statistic] = field(default_factory=list)
    findings: list[Finding] = field(metadata=NEEDED)
    warnings: list[str] = field(default_factory=list)
    unavailable: list[UnavailableRecord] = field(default_factory=list)
    nonfinite: list[NonfiniteRecord] = field(default_factory=list)
    trouble: Trouble | None = None
    replacements: list[ReplacementRecord] = field(default_factory=list)
    per_token: PerTokenRecord | None = None

    def to_dict(self) -> dict[str, Any]:
        """The record as ``run.json`` holds it: plain lists, dictionaries and finite numbers."""
        return json_value(self)


def json_value(value: Any, digits: int | None = None) -> Any:
    """The value as JSON can hold it: no numpy, no NaN or infinity, floats rounded to so many significant digits."""
    if isinstance(value, Entry):
        value = {each.name: getattr(value, each.name) for each in fields(value) if each.name != "others"} | value.others
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return float(value) if digits is None else float(f"{value:.{digits}g}")
    if isinstance(value, list | tuple):
        return [json_value(item, digits) for item in value]
    if isinstance(value, dict):
        return {str(key): json_value(item, digits) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return _listed(value, digits)
    return json_value(value.item(), digits) if isinstance(value, np.generic) else value


def _listed(array: np.ndarray, digits: int | None) -> Any:
    """An array's numbers as nested lists: each as `json_value` rounds it by itself, up to ties of rounding."""
    if array.dtype.kind != "f":
        return array.tolist()
    array = array.astype(np.float64)
    finite = np.isfinite(array)
    if digits is not None:
        size = np.abs(array, where=finite & (array != 0), out=np.ones_like(array))
        places = digits - 1 - np.floor(np.log10(size))
        # Whole numbers below 10^digits and powers of ten up to 10^22 are exact, so a quotient is the nearest number to
        # the decimal one; beyond them text is the way.
        usual = np.abs(places) <= 22
        power = 10.0 ** np.where(usual, np.abs(places), 0)
        up, down = np.where(places > 0, power, 1.0), np.where(places > 0, 1.0, power)
        rounded = np.rint(array * up / down) / up * down
        rare = finite & ~usual
        rounded[rare] = [float(f"{number:.{digits}g}") for number in array[rare].tolist()]
        array = rounded
    if finite.all():
        return array.tolist()
    listed = array.astype(object)
    listed[~finite] = None
    return listed.tolist()
