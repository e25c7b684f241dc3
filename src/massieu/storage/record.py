"""The record of a probe, which ``run.json`` holds and from which the page is drawn, entry by entry.

A field that is `NEEDED` has to be in a file; any other may be missing or null and then has its default. Entries of a file
that have no field are kept.
"""

import math
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any

import numpy as np

from massieu.errors import InputError, require_extra
from massieu.foundation.printable import visible

SCHEMA_VERSION = 1


NEEDED = {"needed": True}
"""Metadata of a field that every stored record must have; it may be null."""


@dataclass
class Entry:
    """A part of the record.

    Attributes:
        others: Entries of a file that have no field.
    """

    others: dict[str, Any] = field(default_factory=dict, init=False, repr=False)


@dataclass
class ModelRecord(Entry):
    """The model: where it is from, what it is, and which weights its files lacked.

    ``hash`` is that of its files of weights; of a module in memory that of weights, configuration and plain attributes. Most
    weights in its files are of ``stored_dtype``; they were read in ``dtype``.
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
        """A sentence if the weights were read in another type than the checkpoint's; else None."""
        if None in (self.stored_dtype, self.dtype) or self.stored_dtype == self.dtype:
            return None
        return f"the checkpoint's weights are {self.stored_dtype}, and were read and measured in {self.dtype}"


@dataclass
class TextRecord(Entry):
    """The text that was read; ``unknown_share`` is the share of tokens that the tokenizer does not know.

    Attributes:
        dropped: A sentence about the part of the text that was not read.
        window: A sentence that says why windows are shorter than the default.
        bos: A sentence that says whether rows begin with the BOS token, and by which setting.
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
    """The units over which standard errors are taken, their number, and the errors' degrees of freedom."""

    unit: str | None = field(default=None, metadata=NEEDED)
    count: int | None = field(default=None, metadata=NEEDED)
    degrees: float | None = None

    @property
    def interval(self) -> str | None:
        """What a 95 % interval is, in words; None where there is no error."""
        return interval_in_words(self.degrees)


@dataclass
class SelfCheckRecord(Entry):
    """The difference of the probe's attention and outputs from the model's own, as in `SelfCheck`."""

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
        route: How it was read: "interface" (of transformers), "tap" (scores followed to their softmax in any code) or "ops"
            (reported by massieu's own attention).
        grade: "full", or "scores" if scores and log-weights are known only as their sum.
        unavailable: Reasons by statistic or group.
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
        name: The block (or norm module) and the kind of step, such as ``encoder.layer.0 attention``.
        kind: ``attention``, ``cross_attention``, ``feed_forward``, ``attention_and_feed_forward`` or ``norm``.
        layer: Index of the block in its stack; None for a step outside every block.
    """

    index: int = field(metadata=NEEDED)
    name: str = field(metadata=NEEDED)
    kind: str = field(metadata=NEEDED)
    layer: int | None = field(metadata=NEEDED)


@dataclass
class ReplacementRecord(Entry):
    """The change if attention is replaced, with a 95 % interval: of the loss in nats a token, or of the output, relative.

    Attributes:
        site, layer, head: The place; None stands for all sites and layers, or for all heads of the site.
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
    """The windows and queries of replays and clouds, and the degrees of freedom of their errors."""

    windows: int | None = None
    queries: int | None = None
    degrees: float | None = None

    @property
    def interval(self) -> str | None:
        """What a 95 % interval is, in words; None where there is no error."""
        return interval_in_words(self.degrees)


def interval_in_words(degrees: float | None) -> str | None:
    """The half-width of a 95 % interval in standard errors, by Student's t; None without degrees of freedom."""
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
    """One number that the probe reports, and all that a reader must know about it.

    Example:
        >>> from massieu.probing import Statistic
        >>> norm = Statistic("output_norm", "Norm of the output", group="output_norms", scope="head", scale="positive")
        >>> norm.name, norm.scale
        ('output_norm', 'positive')

    Attributes:
        headline: It may be compared between heads, and does not change if a constant is added to a head's keys.
        gauge_dependent: It changes with that constant, which softmax cannot see, and is never a headline.
        signed: Zero or the control is the natural centre of its scale.
        control: The control with which its map is compared (a qualifier of the result table), or None.
        cost: The cost of its group.
        sampled: It is measured on the sampled windows alone.
        scale: How its numbers are compared: "share" by their logit, "positive" by their logarithm, "number" as they are.
        smallest: The smallest difference from a control that is announced; for a positive number in other units than nats,
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
        """Check the types of the fields.

        Raises:
            InputError: a field is of another type than its annotation says.
        """
        for entry in fields(self):
            type_in_words = _IN_WORDS.get(entry.type)
            value = getattr(self, entry.name)
            if type_in_words is not None and not _is_of(value, entry.type):
                raise InputError(f"{entry.name} must be {type_in_words}, got {type(value).__name__}")

    @property
    def relative(self) -> bool:
        """Whether the smallest difference is a share of the control."""
        return self.scale == "positive" and self.unit != "nats"

    def matters(self, value: Any, null: Any) -> Any:
        """Whether a number differs from its null by at least `smallest`; for arrays an array."""
        if not self.relative:
            return np.abs(value - null) >= self.smallest
        larger = np.maximum(np.abs(value), np.abs(null))
        smaller = np.minimum(np.abs(value), np.abs(null))
        return larger >= (1 + self.smallest) * smaller

    @property
    def smallest_in_words(self) -> str:
        """The smallest difference that is announced, with its unit."""
        if self.relative:
            return f"{self.smallest:.0%}"
        unit = self.unit.removesuffix("s") if self.smallest == 1 else self.unit
        return f"{self.smallest:g} {unit}".strip()


@dataclass
class Finding(Entry):
    """One card: a finding, and all that is needed to read it rightly; ``heads`` are pairs of layer and head.

    A finding without a ``value`` is not announced, and its sentence says why.
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
    """The number of queries of a head that were left out, as their numbers are not finite."""

    site: str = field(metadata=NEEDED)
    layer: int | None = field(metadata=NEEDED)
    head: int | None = field(metadata=NEEDED)
    count: int = field(metadata=NEEDED)


@dataclass
class Trouble(Entry):
    """Numbers of the model that are not finite, for which reason numbers of the result are missing.

    Attributes:
        sentence: The whole reason, for the top of the page and the terminal.
        what: "NaN" or "infinity".
        first: The first place of such a number: a weight, a module or an input of the model.
    """

    sentence: str = field(metadata=NEEDED)
    what: str | None = None
    first: str | None = None


@dataclass(kw_only=True)
class RunRecord(Entry):
    """All that is needed to judge the numbers of a run; ``complete`` is False if it was interrupted."""

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

    def __repr__(self) -> str:
        state = "" if self.complete else ", interrupted"
        return visible(
            f"RunRecord of {self.model.name}{state}: {len(self.sites)} attention modules, {len(self.statistics)} statistics, "
            f"{len(self.findings)} findings; to_dict() has all of it"
        )

    def to_dict(self) -> dict[str, Any]:
        """The record as ``run.json`` holds it: plain lists, dictionaries and finite numbers."""
        return json_value(self)


def json_value(value: Any, digits: int | None = None) -> Any:
    """The value as JSON can hold it: without numpy, NaN and infinity; floats are rounded to `digits` significant digits."""
    if isinstance(value, Entry):
        entries = {entry.name: getattr(value, entry.name) for entry in fields(value) if entry.name != "others"}
        value = entries | value.others
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return float(value) if digits is None else _rounded(value, digits)
    if isinstance(value, list | tuple):
        return [json_value(item, digits) for item in value]
    if isinstance(value, dict):
        return {str(key): json_value(item, digits) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return _listed(value, digits)
    return json_value(value.item(), digits) if isinstance(value, np.generic) else value


def _rounded(number: float, digits: int) -> float:
    """The number to so many significant digits; as it is, if that would be beyond the largest float."""
    rounded = float(f"{number:.{digits}g}")
    return rounded if math.isfinite(rounded) else float(number)


def _listed(array: np.ndarray, digits: int | None) -> Any:
    """An array's numbers as nested lists: each as `json_value` rounds it by itself, up to ties of rounding."""
    if array.dtype.kind != "f":
        return array.tolist()
    array = array.astype(np.float64)
    finite = np.isfinite(array)
    if digits is not None:
        size = np.abs(array, where=finite & (array != 0), out=np.ones_like(array))
        places = digits - 1 - np.floor(np.log10(size))
        # Whole numbers below 10^digits and powers of ten up to 10^22 are exact in float64, so that their quotient is the
        # float nearest to the decimal number. Other sizes are rounded as text.
        is_exact = np.abs(places) <= 22
        power = 10.0 ** np.where(is_exact, np.abs(places), 0)
        up = np.where(places > 0, power, 1.0)
        down = np.where(places > 0, 1.0, power)
        rounded = np.rint(array * up / down) / up * down
        as_text = finite & ~is_exact
        rounded[as_text] = [_rounded(number, digits) for number in array[as_text].tolist()]
        array = rounded
    if finite.all():
        return array.tolist()
    listed = array.astype(object)
    listed[~finite] = None
    return listed.tolist()
