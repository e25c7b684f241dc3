"""The four findings at the top of the page: a sentence each, with its number, error, control, count and limits.

Heads and sublayers are picked on one half of the text and their numbers printed from the other half, so that the
largest of many noisy numbers is not taken at its word. Maps and tables show the whole text's number, which stands in
brackets. A finding is announced where its number differs from the law of
random models, and from a control of its own where it has one: adjusted for all heads that were looked at, jointly for the four
findings at 5 % (Holm), and by more than the statistic's smallest effect. Otherwise the finding has no value, and its sentence
says what is largest and why it is not announced.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from massieu.foundation.numbers import MINUS, counted, number, with_error
from massieu.probing.statistics.registry import STATISTICS
from massieu.probing.sums.significance import holm, student_p
from massieu.probing.sums.units import FEWEST_UNITS
from massieu.storage.record import Finding

Place = tuple[str, int | None]
Cell = tuple[float, float, int]
_MISSING: Cell = (float("nan"), float("nan"), 0)
_ZERO: Cell = (0.0, 0.0, 0)
MOSTLY = 0.5
SIGNIFICANT = 0.05


@dataclass(frozen=True)
class _Kind:
    """One of the four findings.

    Attributes:
        needed: statistics of which it can be made, the first one for preference.
        of_layers: it is made from the layers' table, else from the heads'.
        sampled: its numbers come from the sampled windows, else from the whole text.
    """

    id: str
    title: str
    needed: tuple[str, ...]
    of_layers: bool = False
    sampled: bool = False


SINK = _Kind("sink", "Attention on the first token", ("weight_first",))
SHARPNESS = _Kind("sharpness", "Sharpest and flattest heads", ("entropy_fraction",))
CLIMB = _Kind(
    "climb",
    "Does a head's write sharpen its own attention?",
    ("own_write_step_selective", "update_step_selective"),
    sampled=True,
)
COLLAPSE = _Kind(
    "collapse",
    "Where the tokens of a window come together",
    ("effective_rank_change",),
    of_layers=True,
    sampled=True,
)


class _Lookup:
    """Cells of a long table by (site, head, statistic).

    A table may have a million rows, and a finding asks for a few statistics: their cells are read when they are asked for.

    Attributes:
        layers: the layer of each site.
        order: all places, in the order of the table.
        statistics: those with a row, be it without a number.
    """

    def __init__(self, frame: Any) -> None:
        self.layers: dict[str, int | None] = {}
        self.order: dict[Place, None] = {}
        for site, layer, head in frame.select("site", "layer", "head").unique(maintain_order=True).iter_rows():
            self.layers[site] = layer
            self.order[site, head] = None
        columns = ("site", "head", "value", "standard_error", "count")
        parts = frame.partition_by("statistic", as_dict=True)
        self._rows = {statistic: part.select(columns) for (statistic,), part in parts.items()}
        self._cells: dict[str, dict[Place, Cell]] = {}
        self.statistics = set(self._rows)

    def cells(self, statistic: str) -> dict[Place, Cell]:
        """The cell of each place where the statistic has a number; others are neither counted nor compared."""
        if statistic not in self._cells:
            rows = self._rows[statistic].iter_rows() if statistic in self._rows else ()
            self._cells[statistic] = {
                (site, head): (value, float("nan") if error is None else error, count)
                for site, head, value, error, count in rows
                if value is not None
            }
        return self._cells[statistic]

    def column(self, statistic: str) -> tuple[list[Place], np.ndarray]:
        """All places that have this statistic, and its values there."""
        cells = self.cells(statistic)
        places = [place for place in self.order if place in cells]
        values = np.array([cells[place][0] for place in places])
        return places, values

    def without(self, statistic: str) -> str:
        """How many heads have no number of this statistic, in brackets; empty if each head has one."""
        heads = [place for place in self.order if place[1] is not None]
        places, _ = self.column(statistic)
        missing = len(heads) - len(places)
        return f" ({counted(missing, 'head')} without a number)" if missing else ""

    def get(self, place: Place, statistic: str) -> Cell:
        return self.cells(statistic).get(place, _MISSING)

    def over_all(self, place: Place, statistic: str) -> str:
        """The whole text's number, which maps and tables show; empty where the sentence already quotes that number."""
        value = self.get(place, statistic)[0]
        has_second_half = place in self.cells(f"{statistic}/second_half")
        if not has_second_half or not np.isfinite(value):
            return ""
        return f"{number(value)} over the whole text"

    def step_after(self, place: Place, level: str) -> Place | None:
        """The only sublayer that begins where this one ends, recognised by its level before; None if none or several do.

        Several do where a norm stands in front of attention (pre-norm): both read the same stream, and the norm leaves it
        as it is.
        """
        level_at_end = self.get(place, f"{level}/after")[0]
        following = [
            sublayer
            for sublayer in self.order
            if np.isclose(self.get(sublayer, f"{level}/before")[0], level_at_end, rtol=1e-9)
        ]
        return following[0] if len(following) == 1 else None

    def name(self, place: Place) -> str:
        if place[1] is None:
            return place[0]
        site, head = place
        layer = self.layers[site]
        # A layer with self-attention and cross-attention has two sites; the layer's number alone does not name one.
        sites = {other for other, its_head in self.order if its_head is not None and self.layers[other] == layer}
        where = f"layer {layer}" if len(sites) == 1 else site
        return f"{where} head {head}"

    def pair(self, place: Place) -> tuple[int, int]:
        site, head = place
        layer = self.layers[site]
        return -1 if layer is None else layer, -1 if head is None else head

    def extreme(self, statistic: str, *, largest: bool) -> tuple[Place, Cell] | None:
        """The most extreme place by the first half of the text, with its cell from the second half.

        The second half's noise is independent of the choice, so its number is unbiased. A text too short for a second half
        gives the whole text's number.
        """
        places, first_half = self.column(f"{statistic}/first_half")
        if not places:
            return None
        chosen = np.argmax(first_half) if largest else np.argmin(first_half)
        place = places[int(chosen)]
        second_half = f"{statistic}/second_half"
        has_second_half = place in self.cells(second_half)
        return place, self.get(place, second_half if has_second_half else statistic)


def _text(cell: Cell) -> str:
    """Value ± error; the value alone where the error is 0 or unknown."""
    value, error, _ = cell
    return with_error(value, error or None)


def _in_brackets(*remarks: str) -> str:
    """The remarks on a number that are not empty, in brackets; empty if all are."""
    joined = ", ".join(remark for remark in remarks if remark)
    return f" ({joined})" if joined else ""


def _signed(value: float) -> str:
    return f"{value:+.2g}".replace("-", MINUS)


def _mean(values: Sequence[float] | np.ndarray) -> float:
    array = np.asarray(values, dtype=float)
    return float(np.nanmean(array)) if np.isfinite(array).any() else float("nan")


@dataclass(frozen=True)
class _Part:
    """The extreme head or sublayer of one statistic, which one sentence of a card is about.

    Attributes:
        what: the number in words.
        among: how many places it is the extreme of, in words.
        cell: from the second half of the text, of the place that the first half picks.
        nulls: random models, then the statistic's own control if it has one.
        p_value: Bonferroni-adjusted for all places that were looked at; NaN where there is no test.
        of_zero: p-value of "the number is 0"; None for a statistic that is not signed.
        whole: which number maps and tables show, as a remark.
    """

    what: str
    among: str
    statistic: str
    place: Place
    cell: Cell
    nulls: Sequence[Cell]
    p_value: float
    of_zero: float | None = None
    whole: str = ""

    @classmethod
    def of(
        cls,
        table: _Lookup,
        statistic: str,
        what: str,
        *,
        largest: bool,
        half_degrees: float,
        control: str | None = None,
    ) -> "_Part | None":
        """The most extreme place of a statistic; None where it was not measured."""
        extreme = table.extreme(statistic, largest=largest)
        if extreme is None:
            return None
        place, cell = extreme
        controls = ("reinitialised",) if control is None else ("reinitialised", control)
        nulls = [table.get(place, f"{statistic}/{name}") for name in controls]
        # Bonferroni: the first half picks one of all places that have a test.
        tested_places, _ = table.column(f"{statistic}/p_value")
        p_value = table.get(place, f"{statistic}/p_value")[0] * len(tested_places)
        of_zero = None
        if STATISTICS[statistic].signed:
            value, error, _ = cell
            of_zero = float(student_p(np.array(value), np.array(error), np.array(half_degrees)))
        measured_places, _ = table.column(statistic)
        if place[1] is None:
            among = counted(len(measured_places), "sublayer")
        else:
            among = counted(len(measured_places), "head") + table.without(statistic)
        return cls(
            what=what.format(place=table.name(place)),
            among=among,
            statistic=statistic,
            place=place,
            cell=cell,
            nulls=nulls,
            p_value=p_value,
            of_zero=of_zero,
            whole=table.over_all(place, statistic),
        )

    @property
    def large(self) -> bool:
        """Whether it differs from every null, and from 0 if it is signed, by at least its smallest effect."""
        null_values = [null[0] for null in self._nulls() if np.isfinite(null[0])]
        return all(bool(STATISTICS[self.statistic].matters(self.cell[0], null)) for null in null_values)

    def passes(self, level: float) -> bool:
        """Whether it may be announced at this level of significance."""
        value, error, _ = self.cell
        complete = bool(np.isfinite([value, error, *(null[0] for null in self.nulls)]).all())
        differs_from_zero = self.of_zero is None or self.of_zero < SIGNIFICANT
        return complete and differs_from_zero and self.large and self.p_value <= level

    def why_not(self) -> str:
        """Why it is not announced, as the end of a sentence."""
        value, error, _ = self.cell
        if not np.isfinite(value):
            return "it has no number in the second half of the text"
        if not np.isfinite(error):
            return "it comes from one window, so that it has no error"
        if not np.isfinite(self.nulls[0][0]):
            return "it was not compared with an untrained model"
        if any(not np.isfinite(null[0]) for null in self.nulls):
            return "its layer has too few heads to compare it with"
        if not np.isfinite(self.p_value):
            return f"nothing is announced from fewer than {FEWEST_UNITS} windows or documents"
        if not self.large:
            nearest = next(null for null in self._nulls() if not STATISTICS[self.statistic].matters(value, null[0]))
            null_in_words = "0" if nearest == _ZERO else f"its control, {_text(nearest)},"
            return f"it differs from {null_in_words} by less than {STATISTICS[self.statistic].smallest_in_words}"
        if not self.passes(1.0):
            return "its error is too large to tell it from 0"
        own_control = "".join(f" or from its control, {_law(null)}" for null in self.nulls[1:])
        return f"this text does not tell it from heads that have learned nothing, {_law(self.nulls[0])}{own_control}"

    def _nulls(self) -> list[Cell]:
        """The controls, and 0 for a signed number."""
        if self.of_zero is None:
            return [*self.nulls]
        return [*self.nulls, _ZERO]


@dataclass(frozen=True)
class _Card:
    """A finding before it is decided whether to announce it.

    Attributes:
        parts: each may be announced; none where the statistics were not measured.
        announce: makes the finding of the parts that are announced.
    """

    id: str
    title: str
    parts: Sequence[_Part]
    announce: Callable[[Sequence[_Part]], Finding]

    @property
    def p_value(self) -> float:
        """The smallest p-value of the parts, adjusted for their number; 1 where none can be announced."""
        adjusted = [part.p_value * len(self.parts) for part in self.parts if part.passes(1.0)]
        return min([1.0, *adjusted])

    def finding(self, level: float) -> Finding:
        """The parts whose p-value, adjusted for their number, is at most the level; else why there are none."""
        announced = [part for part in self.parts if part.passes(level / len(self.parts))]
        if announced or not self.parts:
            return self.announce(announced)
        part = self.parts[0]
        value = f", {_text(part.cell)}{_in_brackets(part.whole)}" if np.isfinite(part.cell[0]) else ""
        reason = part.why_not()
        sentence = f"Nothing to announce. Of {part.among}, the most extreme is {part.what}{value}. "
        sentence += f"{reason[0].upper()}{reason[1:]}."
        return Finding(self.id, self.title, sentence, statistic=part.statistic)


def _law(cell: Cell) -> str:
    """Mean and standard deviation of random heads."""
    mean, deviation, _ = cell
    spread = f" (standard deviation {number(deviation)})" if np.isfinite(deviation) else ""
    return f"{number(mean)} on average{spread}"


def _sink(heads: _Lookup, half_degrees: float) -> _Card:
    """The head with the largest weight on the first token."""
    (name,) = SINK.needed
    part = _Part.of(heads, name, "the weight of {place}", largest=True, half_degrees=half_degrees)

    def announce(parts: Sequence[_Part]) -> Finding:
        places, values = heads.column(name)
        mostly = [place for place, value in zip(places, values, strict=True) if value > MOSTLY]
        (strongest,) = parts
        norm = heads.get(strongest.place, "first_value_norm_ratio")
        sentence = f"The strongest, {heads.name(strongest.place)}, puts {_text(strongest.cell)} there"
        sentence += _in_brackets(strongest.whole)
        if norm[2]:
            sentence += f"; the first token's value has {_text(norm)} times the mean norm"
        verb = "puts more than half of its" if len(mostly) == 1 else "put more than half of their"
        share_of_heads = f"{len(mostly)} of {counted(len(places), 'head')}{heads.without(name)}"
        sentence += f". {share_of_heads} {verb} attention on the first token."
        return Finding(
            SINK.id, SINK.title, sentence, *strongest.cell[:2], "of the attention",
            f"Heads of its layer that have learned nothing put {_law(strongest.nulls[0])} there.",
            strongest.cell[2],
            "Weight on a token is not information from it. A head that reads a small value there is a candidate no-op on "
            "this text, never a dead head.",
            name, [heads.pair(place) for place in (mostly or [strongest.place])[:12]],
        )  # fmt: skip

    return _card(SINK, [part], announce)


def _sharpness(heads: _Lookup, half_degrees: float) -> _Card:
    """The heads with the lowest and the highest entropy, and the one with the largest score."""
    (name,) = SHARPNESS.needed
    above_mean = "largest_score_above_mean"
    sharp = _Part.of(heads, name, "the sharpness of {place}", largest=False, half_degrees=half_degrees)
    flat = _Part.of(heads, name, "the flatness of {place}", largest=True, half_degrees=half_degrees)
    score = _Part.of(heads, above_mean, "the largest score of {place}", largest=True, half_degrees=half_degrees)

    def score_sentence(part: _Part) -> str:
        raw_score, _, count = heads.get(part.place, "largest_score")
        origin = ""
        if count:
            origin = f"its raw max logit is {number(raw_score)} on average and depends on the key origin"
        remarks = _in_brackets(heads.name(part.place), part.whole, origin)
        return f"The largest score is {_text(part.cell)} nats above the mean score{remarks}."

    def entropy_sentence(part: _Part) -> str:
        keys, _, count = heads.get(part.place, "effective_keys")
        effective_keys = f"{number(keys)} effective keys on average" if count and part is sharp else ""
        which = "sharpest" if part is sharp else "flattest"
        return (
            f"The {which} head, {heads.name(part.place)}, has {_text(part.cell)} of the largest possible "
            f"entropy{_in_brackets(part.whole, effective_keys)}."
        )

    def announce(parts: Sequence[_Part]) -> Finding:
        sentences = [score_sentence(part) if part.statistic == above_mean else entropy_sentence(part) for part in parts]
        shown = parts[0]
        unit = "of log n"
        if shown.statistic == above_mean:
            unit = "nats above the mean score"
        elif shown is flat:
            unit = "of log n, the flattest head"
        return Finding(
            SHARPNESS.id, SHARPNESS.title, " ".join(sentences), *shown.cell[:2],
            unit,
            f"Heads of its layer that have learned nothing have {_law(shown.nulls[0])}.",
            shown.cell[2],
            "It describes where attention goes on this text. A sharp head need not matter to the model, and a flat one may.",
            shown.statistic, [heads.pair(part.place) for part in parts],
        )  # fmt: skip

    return _card(SHARPNESS, [sharp, flat, score], announce)


def _climb(heads: _Lookup, half_degrees: float) -> _Card:
    """The heads whose write, or whose layer's update, moves the query most and least towards sharper attention."""
    of_writes, of_updates = CLIMB.needed
    has_own_writes = bool(heads.column(of_writes)[0])
    # Without the heads' writes, the whole layer's update is read; it is compared with a random step of equal length.
    name = of_writes if has_own_writes else of_updates
    control = "mismatched" if has_own_writes else "random"
    what = "the effect on {place}"
    most = _Part.of(heads, name, what, largest=True, half_degrees=half_degrees, control=control)
    least = _Part.of(heads, name, what, largest=False, half_degrees=half_degrees, control=control)

    def announce(parts: Sequence[_Part]) -> Finding:
        places, values = heads.column(name)
        expected = {place: heads.get(place, f"{name}/{control}")[0] for place in places}
        significant = [
            (place, value)
            for place, value in zip(places, values, strict=True)
            if _is_significant(heads, name, place, control)
        ]
        sharpening = [place for place, value in significant if value > expected[place]]
        flattening = [place for place, value in significant if value <= expected[place]]
        extremes = " ".join(
            f"{'Most' if part is most else 'Least'}: {heads.name(part.place)}, {_text(part.cell)} nats of selective log Z "
            f"per step{_in_brackets(part.whole)}."
            for part in parts
        )
        share_of_heads = f"{len(sharpening)} of {counted(len(places), 'head')}{heads.without(name)}"
        if has_own_writes:
            verb = "sharpens its" if len(sharpening) == 1 else "sharpen their"
            count = f"{share_of_heads} {verb} own attention more than other heads' writes do, {len(flattening)} less"
        else:
            count = (
                f"In {share_of_heads} the layer's update sharpens attention more than a random step does, "
                f"in {len(flattening)} less"
            )
        sentence = (
            f"{extremes} {count} (by {STATISTICS[name].smallest_in_words} or more, and more than in untrained "
            "models; false discovery rate 5 %)."
        )
        mismatched = ""
        if has_own_writes:
            mean_of_control = _mean(list(expected.values()))
            mismatched = f"Other heads' writes (mismatched): {_signed(mean_of_control)} nats on average. "
        random = _mean([heads.get(place, f"{name}/random")[0] for place in places])
        sharpens = f"{name.replace('_selective', '_sharpens')}/random"
        share = _mean([heads.get(place, sharpens)[0] for place in places])
        shown = parts[0]
        return Finding(
            CLIMB.id, CLIMB.title, sentence, *shown.cell[:2], "nats",
            f"{mismatched}A random step of equal length: {_signed(random)} nats; it sharpens {100 * share:.0f} % of queries. "
            f"Heads that have learned nothing have {_law(shown.nulls[0])}.",
            shown.cell[2],
            "Keys and values are held fixed while the query moves. A change common to all scores is left out, since softmax "
            "does not depend on it. No equilibrium is claimed.",
            name, [heads.pair(place) for place in (sharpening + flattening)[:12]],
        )  # fmt: skip

    return _card(CLIMB, [most, least], announce)


def _is_significant(heads: _Lookup, statistic: str, place: Place, control: str) -> bool:
    """Whether a head differs from both controls at a false discovery rate of 5 %, and by the smallest effect."""
    value = heads.get(place, statistic)[0]
    nulls = [heads.get(place, f"{statistic}/{name}")[0] for name in ("reinitialised", control)]
    large = all(bool(STATISTICS[statistic].matters(value, null)) for null in nulls)
    return large and heads.get(place, f"{statistic}/q_value")[0] < SIGNIFICANT


def _given_back(layers: _Lookup, fall: _Part, half_degrees: float, unit: str) -> str:
    """A sentence where the next step undoes most of a fall, as the norm behind a feed-forward layer of a post-norm model."""
    following = layers.step_after(fall.place, fall.statistic.removesuffix("_change"))
    if following is None or not fall.cell[0] < 0:
        return ""
    second_half = f"{fall.statistic}/second_half"
    has_second_half = following in layers.cells(second_half)
    rise = layers.get(following, second_half if has_second_half else fall.statistic)
    value, error, _ = rise
    significant = student_p(np.array(value), np.array(error), np.array(half_degrees)) < SIGNIFICANT
    if not significant or not value > -MOSTLY * fall.cell[0]:
        return ""
    return f" The step behind it, {following[0]}, gives back {_text(rise)} {unit}."


def _collapse(layers: _Lookup, half_degrees: float) -> _Card:
    """The sublayers at which effective rank and volume fall most."""
    (rank,) = COLLAPSE.needed
    volume = "log_determinant_change"
    parts = [
        _Part.of(layers, name, f"the change of {word} at {{place}}", largest=False, half_degrees=half_degrees)
        for name, word in ((rank, "effective rank"), (volume, "volume"))
    ]

    def volume_sentence(part: _Part) -> str:
        sublayer = part.place[0]
        verb = "shrinks most" if part.cell[0] < 0 else "grows least"
        sentence = f"Volume {verb} at {sublayer}: {_text(part.cell)} nats of log-determinant per direction"
        return f"{sentence}{_in_brackets(part.whole)}.{_given_back(layers, part, half_degrees, 'nats')}"

    def rank_sentence(part: _Part) -> str:
        sublayer = part.place[0]
        change = f"{sublayer}: {_text(part.cell)} directions"
        if not part.cell[0] < 0:
            return f"Effective rank falls at no sublayer; it rises least at {change}{_in_brackets(part.whole)}."
        before = layers.get(part.place, "effective_rank/before")
        after = layers.get(part.place, "effective_rank/after")
        levels = f"from {number(before[0])} to {number(after[0])}" if before[2] else ""
        given_back = _given_back(layers, part, half_degrees, "directions")
        return f"Effective rank falls most at {change}{_in_brackets(part.whole, levels)}.{given_back}"

    def announce(parts: Sequence[_Part]) -> Finding:
        sentences = [volume_sentence(part) if part.statistic == volume else rank_sentence(part) for part in parts]
        shown = parts[0]
        return Finding(
            COLLAPSE.id, COLLAPSE.title, " ".join(sentences), *shown.cell[:2], STATISTICS[shown.statistic].unit,
            f"Models that have learned nothing change by {_law(shown.nulls[0])} there.", shown.cell[2],
            "Measured on at most 64 tokens of each window. The distance between tokens does not say what later layers can "
            "still read.",
            shown.statistic, [],
        )  # fmt: skip

    return _card(COLLAPSE, parts, announce)


def _card(kind: _Kind, parts: Sequence[_Part | None], announce: Callable[[Sequence[_Part]], Finding]) -> _Card:
    """The card of the parts that were measured; one without parts if the first was not."""
    if parts[0] is None:
        return _absent(kind)
    return _Card(kind.id, kind.title, [part for part in parts if part is not None], announce)


def _absent(kind: _Kind) -> _Card:
    """The card of a finding whose statistics were not measured: it names the one that is needed."""
    caveat = f"It needs the statistic {kind.needed[0]}."
    finding = Finding(kind.id, kind.title, "Not measured in this run.", caveat=caveat)
    return _Card(kind.id, kind.title, [], lambda _: finding)


MAKERS: dict[_Kind, Callable[[_Lookup, float], _Card]] = {
    SINK: _sink,
    SHARPNESS: _sharpness,
    CLIMB: _climb,
    COLLAPSE: _collapse,
}
"""The four findings, in their order on the page: each is made from a table and from the degrees of freedom of its errors."""


def findings(heads: Any, layers: Any, half_degrees: tuple[float, float] = (1.0, 1.0)) -> list[Finding]:
    """The four findings, made from the two tables alone.

    Args:
        half_degrees: degrees of freedom of an error over half the text, and over half its sample.
    """
    by_head = _Lookup(heads)
    by_layer = _Lookup(layers)
    half_text, half_sample = half_degrees
    cards = []
    for kind, make in MAKERS.items():
        table = by_layer if kind.of_layers else by_head
        if table.statistics.isdisjoint(f"{name}/first_half" for name in kind.needed):
            cards.append(_absent(kind))
        else:
            cards.append(make(table, half_sample if kind.sampled else half_text))
    levels = holm([card.p_value for card in cards], SIGNIFICANT)
    return [card.finding(level) for card, level in zip(cards, levels, strict=True)]
