"""The contract of all that is measured: the events that a group receives while a model is read, and the rows that it returns.

A group holds running results of its statistics. It is begun once, receives the events that it names, and returns its rows at
the end. The code that reads the model knows no group by its name.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor, nn

from massieu.errors import InputError
from massieu.foundation.arguments import described
from massieu.foundation.doors import any_of, input_door, text
from massieu.probing.capture.attention_call import AttentionCall, AttentionSite
from massieu.probing.capture.sites import SiteInfo
from massieu.probing.capture.tokens import Tokens
from massieu.probing.model.model import LoadedModel
from massieu.probing.model.model_inputs import model_inputs
from massieu.probing.model.unexpected import unexpected
from massieu.probing.statistics.extremes import Places
from massieu.probing.statistics.own import OwnStatistic
from massieu.probing.statistics.query_means import Functions, QueryResult
from massieu.probing.stream.replay import HeadMaps, Replay
from massieu.probing.stream.wiring import Step
from massieu.probing.sums.accumulate import Ratio
from massieu.probing.sums.running import RunningParts
from massieu.probing.sums.units import FEWEST_UNITS, Estimate, Units
from massieu.storage.record import Statistic, Sublayer

Half = Literal["first_half", "second_half"]
HALVES: tuple[Half, Half] = ("first_half", "second_half")


class Event(Enum):
    """What a group may receive. An event that no group names is not produced.

    Example:
        >>> from massieu.probing import Event
        >>> [event.name for event in Event]
        ['CALLS', 'QUERIES', 'STEPS', 'WEIGHTS', 'WINDOWS']
    """

    CALLS = auto()
    """Each attention call of the model, with all rows of the batch."""
    QUERIES = auto()
    """The per-query statistics of each call; which ones, `ModelReading.query_functions` says."""
    STEPS = auto()
    """Each step of the stream, for each sampled window."""
    WEIGHTS = auto()
    """Each attention site once, when its maps between stream and head can be read."""
    WINDOWS = auto()
    """Each sampled window after the forward pass; it may be run again."""


@dataclass(frozen=True, eq=False)
class Source:
    """Where the text comes from, for groups that generate a text of their own.

    Attributes:
        around: tokens with which rows of text begin and end; None where the first batch shows them.
    """

    loaded: LoadedModel
    tokenizer: Any
    around: tuple[Sequence[int], Sequence[int]] | None


@dataclass(frozen=True, eq=False)
class ModelReading:
    """One model that is about to be read.

    Attributes:
        sublayers: steps of the stream, in its order; filled by the first pass if some group names `Event.STEPS`,
            `Event.WEIGHTS` or `Event.WINDOWS`.
        units: over which errors are computed; those of the sampled windows are `sampled_units`.
        max_length: number of tokens of a full window.
        query_sample: largest number of queries of a sequence that are read; None for all.
        sampled_queries: number of queries of a sampled window.
        names: the statistics to measure; None for all.
        inputs: the first batch.
        source: where the text comes from; None where that is not known.
        query_functions: the statistics of queries that are computed for groups that name `Event.QUERIES`, by name.
        own: functions of the user's own, by name.
        is_draw: the model is a draw of the re-initialised control. Of a draw only a group's own numbers are read, so that
            a group may leave out its controls, halves and places.
    """

    model: nn.Module
    sites: Sequence[SiteInfo]
    sublayers: Sequence[Sublayer]
    units: Units
    max_length: int
    seed: int = 0
    query_sample: int | None = None
    sampled_queries: int = 64
    names: frozenset[str] | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict)
    source: Source | None = None
    query_functions: Functions = field(default_factory=dict)
    own: Mapping[str, OwnStatistic] = field(default_factory=dict)
    is_draw: bool = False

    @cached_property
    def one_item(self) -> dict[str, Any]:
        """One item of the first batch, as the model is called with it."""
        return model_inputs(self.model, dict(self.inputs), items=1)

    @property
    def sampled_units(self) -> Units:
        """The units of results that are measured on the sampled windows alone."""
        return replace(self.units, sampled=True)

    def site(self, call: AttentionCall) -> SiteInfo:
        """The site of a call that is read."""
        return self._by_site[call.site]

    @cached_property
    def _by_site(self) -> dict[AttentionSite, SiteInfo]:
        return {info.site: info for info in self.sites}

    def wants(self, name: str) -> bool:
        """Whether a statistic is to be measured."""
        return self.names is None or name in self.names


class UnsuitableInputsError(Exception):
    """The group's question does not fit these inputs or this model; the message says why."""


@dataclass(frozen=True, eq=False)
class SampledWindow:
    """A sampled window of the text: one row of the batch that is read.

    Attributes:
        row: of the batch.
        number: its place among the sampled ones; None where windows come in the order of the text.
        positions: sampled positions of real tokens in a step's stream.
        cloud: the same, with each token at most once.
        drawn: random numbers that belong to the window and to a purpose.
        replay: the queries of an attention step of this row as functions of the stream, at some positions. If they cannot be
            replayed, a sentence that says why.
        alone: the inputs of this window alone, as the model is called with them.
    """

    row: int
    number: int | None
    positions: Callable[[Step], Int[Tensor, " S"]]
    cloud: Callable[[Step], Int[Tensor, " S"]]
    drawn: Callable[[int], torch.Generator]
    replay: Callable[[Step, Int[Tensor, " S"]], Replay | str]
    alone: Callable[[], dict[str, Any]]

    @property
    def numbers(self) -> list[int] | None:
        """The window's number as an argument of `Ratio.update`."""
        return None if self.number is None else [self.number]


@dataclass(frozen=True, eq=False)
class CallTokens:
    """The tokens of one attention call.

    Attributes:
        queries, keys: tokens that attend, and tokens that are attended to.
        rows: number of items of the batch.
        numbers: the rows' numbers in the text; None where they follow those before.
        windows: numbers of the rows' windows.
        sampled: the sampled rows.
        drawn: random numbers for a row and a purpose.
    """

    info: SiteInfo
    queries: Tokens
    keys: Tokens
    rows: int
    numbers: Sequence[int] | None
    windows: Sequence[int]
    sampled: Sequence[SampledWindow]
    drawn: Callable[[int, int], torch.Generator]


@dataclass(frozen=True, eq=False)
class CallQueries:
    """Per-query statistics of one attention call, or of some of its queries.

    Attributes:
        rows: number of items of the batch.
        numbers: the rows' numbers in the text; None where they follow those before.
        places: where the queries are; None where that differs from row to row.
        call: of these queries alone.
        real: queries that are not padding.
        length: number of queries of the whole call.
        joined: the sites whose heads stand one after the other in the result and the call, the first of which is `info`.
            Empty for one site. Groups whose `takes_joined` is False never get such.
    """

    info: SiteInfo
    result: QueryResult
    rows: int
    numbers: Sequence[int] | None
    places: Places | None = None
    call: AttentionCall | None = None
    real: Bool[Tensor, "B L"] | None = None
    length: int = 0
    joined: tuple[SiteInfo, ...] = ()


@dataclass(frozen=True, eq=False)
class SiteWeights:
    """The weights of one attention site.

    Attributes:
        maps: the linear maps from stream to query, key and value, and from value to stream. If they are not known, one
            sentence that says why.
        writes: the value and output maps alone, or such a sentence.
    """

    info: SiteInfo
    maps: Callable[[], HeadMaps | str]
    writes: Callable[[], tuple[Tensor, Tensor] | str]


class RowPlace(NamedTuple):
    """The subject of a row: the heads of an attention site, or a sublayer; `order` is its place in the model.

    Example:
        >>> from massieu.probing import RowPlace
        >>> RowPlace("head", "encoder.layer.0.attention", layer=0, order=0).scope
        'head'
    """

    scope: Literal["head", "layer"]
    name: str
    layer: int | None
    order: int

    @classmethod
    def of_site(cls, info: SiteInfo) -> "RowPlace":
        """The place of an attention site."""
        return cls("head", info.site.name, info.layer, info.index)

    @classmethod
    def of_sublayer(cls, sublayer: Sublayer) -> "RowPlace":
        """The place of a step of the stream."""
        return cls("layer", sublayer.name, sublayer.layer, sublayer.index)


@dataclass(frozen=True, eq=False)
class Row:
    """One statistic at one place: a number for each head, or one for a sublayer.

    Attributes:
        part: empty for the statistic itself; else a half of the text, the name of a control, or a part such as a bin.
        estimate: with the degrees of freedom of its error, which are 0 if no finding may rest on it.
        p_value: of a control, if the group computes its own test; else the two means are compared.
    """

    place: RowPlace
    statistic: str
    part: str
    estimate: Estimate
    p_value: Float64[np.ndarray, " heads"] | None = None

    @property
    def name(self) -> str:
        """The row's name in the tables."""
        return f"{self.statistic}/{self.part}" if self.part else self.statistic


class RunningRatio(NamedTuple):
    """The running ratio of one statistic at one place, and which of its entries."""

    place: RowPlace
    statistic: str
    ratio: Ratio
    index: Any


class RatioParts:
    """The estimates of a running ratio, each computed once.

    Example:
        >>> import numpy as np
        >>> from massieu.probing import Ratio, RatioParts
        >>> mean = Ratio((2,))  # a number for each of two heads
        >>> mean.update(np.array([[1.0, 2.0], [3.0, 4.0]]), np.ones((2, 2)))
        >>> RatioParts(mean).estimate.value.tolist()
        [2.0, 3.0]
    """

    @input_door(ratio=any_of("a massieu.probing.Ratio", Ratio))
    def __init__(self, ratio: Ratio) -> None:
        self.ratio = ratio

    @cached_property
    def estimate(self) -> Estimate:
        """Estimates from the whole text."""
        return self.ratio.estimate()

    @cached_property
    def first_half(self) -> Estimate:
        """Estimates from its first half."""
        return self.ratio.first_half()

    @cached_property
    def second_half(self) -> Estimate:
        """Estimates from its second half."""
        return self.ratio.second_half()

    @cached_property
    def _has_few_units(self) -> bool:
        return self.ratio.error_unit()[1] < FEWEST_UNITS

    def at(self, index: Any, part: Literal["estimate"] | Half = "estimate") -> Estimate:
        """Some entries.

        Raises:
            InputError: the array of statistics has none at ``index``.
        """
        # Checked here and not by a door: there is a call for each row of the tables.
        if not (isinstance(part, str) and part in ("estimate", *HALVES)):
            raise InputError(f"part must be 'estimate', 'first_half' or 'second_half', got {described(part)}")
        estimate: Estimate = getattr(self, part)
        try:
            return Estimate(
                estimate.value[index],
                estimate.standard_error[index],
                estimate.count[index],
                np.asarray(estimate.degrees)[index],
            )
        except (IndexError, TypeError) as error:
            shape = tuple(self.ratio.shape)
            raise InputError(f"index must pick entries of an array of shape {shape}, got {described(index)}") from error

    def tested(self, index: Any) -> Estimate:
        """Some entries for tests; with too few units of text their degrees of freedom are 0, so that nothing is found.

        Raises:
            InputError: as `at`.
        """
        estimate = self.at(index)
        if self._has_few_units:
            no_degrees = np.zeros_like(estimate.value)
            return Estimate(estimate.value, estimate.standard_error, estimate.count, no_degrees)
        return estimate


@input_door(
    place=any_of("a massieu.probing.RowPlace", RowPlace),
    statistic=text,
    parts=any_of("a massieu.probing.RatioParts", RatioParts),
)
def rows_of(place: RowPlace, statistic: str, parts: RatioParts, index: Any) -> Iterator[Row]:
    """A statistic of heads, from the whole text and from its halves.

    Example:
        >>> import numpy as np
        >>> from massieu.probing import Ratio, RatioParts, RowPlace, rows_of
        >>> mean = Ratio((2,))
        >>> mean.update(np.array([[1.0, 2.0], [3.0, 4.0]]), np.ones((2, 2)))
        >>> [row.name for row in rows_of(RowPlace("head", "attention", 0, 0), "size", RatioParts(mean), slice(None))]
        ['size', 'size/first_half', 'size/second_half']
    """
    yield Row(place, statistic, "", parts.tested(index))
    for half in HALVES:
        yield Row(place, statistic, half, parts.at(index, half))


@contextmanager
def fenced(failed: dict[str, str], *names: str) -> Iterator[None]:
    """A failure inside makes these groups or statistics unavailable, with the reason, and nothing else.

    An `InputError` still ends the reading: then the input or the capture itself is wrong.

    Args:
        failed: the dictionary into which the reason is written, by name.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        failed.update(dict.fromkeys(names, unexpected(error)))


class Group(RunningParts):
    """Running results of some statistics on one model, and how they are made.

    Attributes that are running results are stored and merged without further code (`RunningParts`).

    Example:
        How many calls of attention does the model make on the text?

        >>> import massieu
        >>> import numpy as np
        >>> import torch
        >>> from massieu.probing import Event, Ratio, RatioParts, RowPlace, Statistic, rows_of
        >>> class Calls(massieu.Group):
        ...     name, events = "calls", frozenset({Event.CALLS})
        ...     statistics = (Statistic("calls_a_row", group="calls", scope="head"),)
        ...
        ...     def begin(self, model):
        ...         super().begin(model)
        ...         self.means = [Ratio((info.heads,), model.units) for info in model.sites]
        ...
        ...     def on_call(self, call, tokens):
        ...         ones = np.ones((tokens.rows, tokens.info.heads))
        ...         self.means[tokens.info.index].update(ones, ones, tokens.numbers)
        ...
        ...     def rows(self):
        ...         for info, mean in zip(self.model.sites, self.means):
        ...             yield from rows_of(RowPlace.of_site(info), "calls_a_row", RatioParts(mean), slice(None))
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
        >>> result = massieu.probe(model, [torch.randn(2, 5, 8)] * 3, statistics=[Calls])
        >>> result.heads["value"].to_list()[:2]
        [1.0, 1.0]

    Attributes:
        name: of the group.
        events: those that it receives.
        statistics: their metadata; those of the package's own groups are registered where they are computed.
        takes_joined: it takes the queries of several sites at once; see `CallQueries.joined`.
        model: the model that it was begun for.
        beginning: the progress message while it begins, if that takes long.
        sampled_queries: how many queries of the first site were sampled, if the group counts them.
        failed: reasons why statistics, or the whole group, could not be computed, by name.
        unavailable: reasons why they could not be computed at one place, by ``"PLACE NAME"``.
    """

    NOTES = ("failed", "unavailable")
    name: ClassVar[str]
    events: ClassVar[frozenset[Event]] = frozenset()
    statistics: ClassVar[tuple[Statistic, ...]] = ()
    takes_joined: ClassVar[bool] = False
    beginning: ClassVar[str | None] = None
    sampled_queries = 0

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}
        self.unavailable: dict[str, str] = {}

    @input_door(model=any_of("what a group is begun with", ModelReading))
    def begin(self, model: ModelReading) -> None:
        """Prepare for a model; called once, before the model is read."""
        self.model = model

    def on_call(self, call: AttentionCall, tokens: CallTokens) -> None:
        """Take an attention call."""

    def on_queries(self, queries: CallQueries) -> None:
        """Take the numbers of some queries of a call."""

    def on_step(self, step: Step, window: SampledWindow) -> None:
        """Take a step of the stream of one sampled window."""

    def on_weights(self, weights: SiteWeights) -> None:
        """Take the weights of an attention site."""

    def on_window(self, window: SampledWindow) -> None:
        """Take a sampled window after the pass."""

    def after_pass(self) -> None:
        """A forward pass has ended: tensors of it may be dropped."""

    def finish(self) -> None:
        """Measure what was collected, once the text was read."""

    def rows(self) -> Iterator[Row]:
        """All rows of the tables."""
        yield from ()

    def ratios(self) -> Iterator[RunningRatio]:
        """Running ratios by which two results on one text may be paired; the first one tells the number of text units."""
        yield from ()

    def nonfinite(self) -> Iterator[tuple[SiteInfo, int, int]]:
        """Site, head, and how many of its queries had scores that are not finite, where a group counts them."""
        yield from ()

    def details(self) -> dict[str, Any]:
        """What the page shows besides the tables, by name."""
        return {}

    # What could not be computed ---------------------------------------------------------------------------------------

    def fence(self, *names: str) -> AbstractContextManager[None]:
        """A failure inside makes only these statistics of the group unavailable; see `fenced`."""
        return fenced(self.failed, *names)

    @input_door(name=text)
    def measures(self, name: str) -> bool:
        """Whether a statistic is to be measured, and has not failed."""
        return self.model.wants(name) and name not in self.failed

    @input_door(place=text, name=text, reason=text)
    def missing(self, place: str, name: str, reason: str) -> None:
        """Record why a statistic, or the group, cannot be computed at one place."""
        self.unavailable[f"{place} {name}"] = reason

    @input_door(place=text, name=text)
    def is_missing(self, place: str, name: str) -> bool:
        """Whether such a reason was recorded."""
        return f"{place} {name}" in self.unavailable

    @input_door(place=text)
    def missing_at(self, place: str) -> dict[str, str]:
        """The reasons that were recorded for one place, by name."""
        reasons: dict[str, str] = {}
        for key, reason in self.unavailable.items():
            place_of_key, _, name = key.rpartition(" ")  # names of places may hold spaces
            if place_of_key == place:
                reasons[name] = reason
        return reasons
