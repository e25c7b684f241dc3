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


class _Lookup:
    """Cells of a long table by (site, head, statistic)."""

    def __init__(self, frame: Any) -> None:
        self.cells: dict[tuple[str, int | None, str], Cell] = {}
        self.layers: dict[str, int | None] = {}
        self.order: dict[Place, None] = {}
        for site, layer, head, statistic, value, error, count in frame.iter_rows():
            if value is not None:  # a place without a number is neither counted nor compared
                self.cells[site, head, statistic] = (value, float("nan") if error is None else error, count)
            self.layers[site] = layer
            self.order[site, head] = None

    def column(self, statistic: str) -> tuple[list[Place], np.ndarray]:
        """All places that have this statistic, and its values there."""
        places = [p for p in self.order if (*p, statistic) in self.cells]
        return places, np.array([self.cells[(*p, statistic)][0] for p in places])

    def without(self, statistic: str) -> str:
        """Says how many heads have no number of this statistic, where some have none."""
        heads = [place for place in self.order if place[1] is not None]
        missing = len(heads) - len(self.column(statistic)[0])
        return f" ({counted(missing, 'head')} without a number)" if missing else ""

    def get(self, place: Place, statistic: str) -> Cell:
        return self.cells.get((*place, statistic), _MISSING)

    def over_all(self, place: Place, statistic: str) -> str:
        """Says which number maps and tables show, beside one from the second half of the text; nothing if it is that one."""
        value = self.get(place, statistic)[0]
        if (*place, f"{statistic}/second_half") not in self.cells or not np.isfinite(value):
            return ""
        return f"{number(value)} over the whole text"

    def step_after(self, place: Place, level: str) -> Place | None:
        """The one sublayer that begins where this one ends, told by the level there.

        None if there is none, or several: a norm in front of attention (pre-norm) begins there beside the attention step, and
        leaves the stream as it is.
        """
        end = self.get(place, f"{level}/after")[0]
        starts = [each for each in self.order if np.isclose(self.get(each, f"{level}/before")[0], end, rtol=1e-9)]
        return starts[0] if len(starts) == 1 else None

    def name(self, place: Place) -> str:
        if place[1] is None:
            return place[0]
        sites = {site for site, head in self.order if head is not None and self.layers[site] == self.layers[place[0]]}
        where = f"layer {self.layers[place[0]]}" if len(sites) == 1 else place[0]
        return f"{where} head {place[1]}"

    def pair(self, place: Place) -> tuple[int, int]:
        layer, head = self.layers[place[0]], place[1]
        return layer if layer is not None else -1, head if head is not None else -1

    def extreme(self, statistic: str, *, largest: bool) -> tuple[Place, Cell] | None:
        """The most extreme place by the first half of the text, with its cell from the second half.

        The second half's noise knows nothing of the choice, so that its number is unbiased. A text so short that it has no
        second half gives the whole text's number.
        """
        places, first = self.column(f"{statistic}/first_half")
        if not places:
            return None
        place, second = places[int(np.argmax(first if largest else -first))], f"{statistic}/second_half"
        return place, self.get(place, second if (*place, second) in self.cells else statistic)


def _text(cell: Cell) -> str:
    """Value ± error; where the error is 0 or not known, the value."""
    return with_error(cell[0], cell[1] or None)


def _in_brackets(*parts: str) -> str:
    """What is said of a number in passing; nothing where there is nothing to say."""
    told = ", ".join(part for part in parts if part)
    return f" ({told})" if told else ""


def _signed(value: float) -> str:
    return f"{value:+.2g}".replace("-", MINUS)


def _mean(values: Sequence[float] | np.ndarray) -> float:
    array = np.asarray(values, dtype=float)
    return float(np.nanmean(array)) if np.isfinite(array).any() else float("nan")


@dataclass(frozen=True)
class _Part:
    """What one sentence of a card is about.

    Attributes:
        what: the number in words.
        among: of how many places, in words.
        cell: of the place that the first half of the text picks, from its second half.
        nulls: random models, then a control of its own if it has one.
        p_value: for all places that were looked at together; NaN where there is no test.
        of_zero: p-value of "it is 0", of a signed number.
        whole: says which number maps and tables show.
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
        found = table.extreme(statistic, largest=largest)
        if found is None:
            return None
        place, cell = found
        nulls = [table.get(place, f"{statistic}/{each}") for each in ("reinitialised", control) if each is not None]
        tested = len(table.column(f"{statistic}/p_value")[0])
        p_value = table.get(place, f"{statistic}/p_value")[0] * tested
        zero = None
        if STATISTICS[statistic].signed:
            zero = float(student_p(*(np.array(each) for each in (*cell[:2], half_degrees))))
        places = counted(len(table.column(statistic)[0]), "head" if place[1] is not None else "sublayer")
        among = places + (table.without(statistic) if place[1] is not None else "")
        whole = table.over_all(place, statistic)
        return cls(what.format(place=table.name(place)), among, statistic, place, cell, nulls, p_value, zero, whole)

    @property
    def large(self) -> bool:
        """Whether it differs from all that it is compared with, 0 included where it is signed, by its smallest effect."""
        known = [null[0] for null in self._nulls() if np.isfinite(null[0])]
        return all(bool(STATISTICS[self.statistic].matters(self.cell[0], null)) for null in known)

    def passes(self, level: float) -> bool:
        """Whether it may be announced at such a level."""
        known = np.isfinite([*self.cell[:2], *(null[0] for null in self.nulls)]).all()
        clear = self.of_zero is None or self.of_zero < SIGNIFICANT
        return bool(known) and clear and self.large and self.p_value <= level

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
            near = next(null for null in self._nulls() if not STATISTICS[self.statistic].matters(value, null[0]))
            beside = "0" if near == _ZERO else f"its control, {_text(near)},"
            return f"it differs from {beside} by less than {STATISTICS[self.statistic].smallest_in_words}"
        if not self.passes(1.0):
            return "its error is too large to tell it from 0"
        beside = "".join(f" or from its control, {_law(null)}" for null in self.nulls[1:])
        return f"this text does not tell it from heads that have learned nothing, {_law(self.nulls[0])}{beside}"

    def _nulls(self) -> list[Cell]:
        return [*self.nulls, *([] if self.of_zero is None else [_ZERO])]


@dataclass(frozen=True)
class _Card:
    """A finding of which it is not known yet whether it is announced; ``told`` makes it of the parts that are."""

    id: str
    title: str
    parts: Sequence[_Part]
    told: Callable[[Sequence[_Part]], Finding]

    @property
    def p_value(self) -> float:
        """The smallest of its parts, adjusted for their number; 1 where none can be announced."""
        return min([1.0, *(part.p_value * len(self.parts) for part in self.parts if part.passes(1.0))])

    def finding(self, level: float) -> Finding:
        """Announced where a part's p-value, adjusted for their number, is at most the level."""
        told = [part for part in self.parts if part.passes(level / len(self.parts))]
        if told:
            return self.told(told)
        if not self.parts:
            return self.told([])
        part = self.parts[0]
        number_of = f", {_text(part.cell)}{_in_brackets(part.whole)}" if np.isfinite(part.cell[0]) else ""
        reason = part.why_not()
        said = f"Nothing to announce. Of {part.among}, the most extreme is {part.what}{number_of}. "
        said += f"{reason[0].upper()}{reason[1:]}."
        return Finding(self.id, self.title, said, statistic=part.statistic)


def _law(cell: Cell) -> str:
    """Mean and standard deviation of random heads."""
    spread = f" (standard deviation {number(cell[1])})" if np.isfinite(cell[1]) else ""
    return f"{number(cell[0])} on average{spread}"


def _sink(heads: _Lookup, half_degrees: float) -> _Card:
    title, name = "Attention on the first token", "weight_first"
    part = _Part.of(heads, name, "the weight of {place}", largest=True, half_degrees=half_degrees)

    def told(parts: Sequence[_Part]) -> Finding:
        places, values = heads.column(name)
        mostly = [p for p, v in zip(places, values, strict=True) if v > MOSTLY]
        (strongest,) = parts
        norm = heads.get(strongest.place, "first_value_norm_ratio")
        sentence = f"The strongest, {heads.name(strongest.place)}, puts {_text(strongest.cell)} there"
        sentence += _in_brackets(strongest.whole)
        if norm[2]:
            sentence += f"; the first token's value has {_text(norm)} times the mean norm"
        put, their = ("puts", "its") if len(mostly) == 1 else ("put", "their")
        sentence += (
            f". {len(mostly)} of {counted(len(places), 'head')}{heads.without(name)} {put} more than half of {their} "
            "attention on the first token."
        )
        return Finding(
            "sink", title, sentence, *strongest.cell[:2], "of the attention",
            f"Heads of its layer that have learned nothing put {_law(strongest.nulls[0])} there.",
            strongest.cell[2],
            "Weight on a token is not information from it. A head that reads a small value there is a candidate no-op on "
            "this text, never a dead head.",
            name, [heads.pair(p) for p in (mostly or [strongest.place])[:12]],
        )  # fmt: skip

    return _card("sink", title, name, [part], told)


def _sharpness(heads: _Lookup, half_degrees: float) -> _Card:
    title, name, above = "Sharpest and flattest heads", "entropy_fraction", "largest_score_above_mean"
    sharp, flat = (
        _Part.of(heads, name, f"the {word} of {{place}}", largest=largest, half_degrees=half_degrees)
        for word, largest in (("sharpness", False), ("flatness", True))
    )
    score = _Part.of(heads, above, "the largest score of {place}", largest=True, half_degrees=half_degrees)

    def told(parts: Sequence[_Part]) -> Finding:
        said = []
        for part in parts:
            keys = heads.get(part.place, "effective_keys")
            if part.statistic == above:
                raw = heads.get(part.place, "largest_score")
                origin = (
                    f"its raw max logit is {number(raw[0])} on average and depends on the key origin" if raw[2] else ""
                )
                said.append(
                    f"The largest score is {_text(part.cell)} nats above the mean score"
                    f"{_in_brackets(heads.name(part.place), part.whole, origin)}."
                )
            else:
                few = f"{number(keys[0])} effective keys on average" if keys[2] and part is sharp else ""
                which = "sharpest" if part is sharp else "flattest"
                said.append(
                    f"The {which} head, {heads.name(part.place)}, has {_text(part.cell)} of the largest possible "
                    f"entropy{_in_brackets(part.whole, few)}."
                )
        shown = parts[0]
        unit = "nats above the mean score" if shown.statistic == above else "of log n"
        return Finding(
            "sharpness", title, " ".join(said), *shown.cell[:2],
            unit if shown is not flat else "of log n, the flattest head",
            f"Heads of its layer that have learned nothing have {_law(shown.nulls[0])}.",
            shown.cell[2],
            "It describes where attention goes on this text. A sharp head need not matter to the model, and a flat one may.",
            shown.statistic, [heads.pair(part.place) for part in parts],
        )  # fmt: skip

    return _card("sharpness", title, name, [sharp, flat, score], told)


def _climb(heads: _Lookup, half_degrees: float) -> _Card:
    title, name = "Does a head's write sharpen its own attention?", "own_write_step_selective"
    if not heads.column(name)[0]:
        name = "update_step_selective"
    control = "mismatched" if name.startswith("own") else "random"
    most, least = (
        _Part.of(heads, name, "the effect on {place}", largest=largest, half_degrees=half_degrees, control=control)
        for largest in (True, False)
    )

    def told(parts: Sequence[_Part]) -> Finding:
        places, values = heads.column(name)
        expected = {p: heads.get(p, f"{name}/{control}")[0] for p in places}
        judged = [(p, v) for p, v in zip(places, values, strict=True) if _named(heads, name, p, control)]
        sharpening = [p for p, v in judged if v > expected[p]]
        flattening = [p for p, v in judged if v <= expected[p]]
        ends = (
            f"{'Most' if part is most else 'Least'}: {heads.name(part.place)}, {_text(part.cell)} nats of selective log Z "
            f"per step{_in_brackets(part.whole)}."
            for part in parts
        )
        of = f"{len(sharpening)} of {counted(len(places), 'head')}{heads.without(name)}"
        if control == "mismatched":
            verb = "sharpens its" if len(sharpening) == 1 else "sharpen their"
            sentence = f"{of} {verb} own attention more than other heads' writes do, {len(flattening)} less"
        else:
            sentence = (
                f"In {of} the layer's update sharpens attention more than a random step does, in {len(flattening)} less"
            )
        sentence = (
            f"{' '.join(ends)} {sentence} (by {STATISTICS[name].smallest_in_words} or more, and more than in untrained "
            "models; false discovery rate 5 %)."
        )
        middle = _mean(list(expected.values()))
        random = _mean([heads.get(p, f"{name}/random")[0] for p in places])
        share = _mean([heads.get(p, f"{name.replace('_selective', '_sharpens')}/random")[0] for p in places])
        shown = parts[0]
        return Finding(
            "climb", title, sentence, *shown.cell[:2], "nats",
            (f"Other heads' writes (mismatched): {_signed(middle)} nats on average. " if control == "mismatched" else "")
            + f"A random step of equal length: {_signed(random)} nats; it sharpens {100 * share:.0f} % of queries. "
            f"Heads that have learned nothing have {_law(shown.nulls[0])}.",
            shown.cell[2],
            "Keys and values are held fixed while the query moves. A change common to all scores is left out, since softmax "
            "does not depend on it. No equilibrium is claimed.",
            name, [heads.pair(p) for p in (sharpening + flattening)[:12]],
        )  # fmt: skip

    return _card("climb", title, "own_write_step_selective", [most, least], told)


def _named(heads: _Lookup, name: str, place: Place, control: str) -> bool:
    """Whether a head differs at its false discovery rate, and by the smallest effect."""
    value = heads.get(place, name)[0]
    nulls = [heads.get(place, f"{name}/{each}")[0] for each in ("reinitialised", control)]
    large = all(bool(STATISTICS[name].matters(value, null)) for null in nulls)
    return large and heads.get(place, f"{name}/q_value")[0] < SIGNIFICANT


def _given_back(layers: _Lookup, fall: _Part, half_degrees: float, unit: str) -> str:
    """Says that the next step takes most of a fall back, as the norm behind a feed-forward layer does in post-norm models."""
    following = layers.step_after(fall.place, fall.statistic.removesuffix("_change"))
    if following is None or not fall.cell[0] < 0:
        return ""
    second = f"{fall.statistic}/second_half"
    rise = layers.get(following, second if (*following, second) in layers.cells else fall.statistic)
    known = student_p(*(np.array(each) for each in (*rise[:2], half_degrees))) < SIGNIFICANT
    if not known or not rise[0] > -MOSTLY * fall.cell[0]:
        return ""
    return f" The step behind it, {following[0]}, gives back {_text(rise)} {unit}."


def _collapse(layers: _Lookup, half_degrees: float) -> _Card:
    title, rank, volume = (
        "Where the tokens of a window come together", "effective_rank_change", "log_determinant_change"
    )  # fmt: skip
    parts = [
        _Part.of(layers, name, f"the change of {word} at {{place}}", largest=False, half_degrees=half_degrees)
        for name, word in ((rank, "effective rank"), (volume, "volume"))
    ]

    def told(parts: Sequence[_Part]) -> Finding:
        said = []
        for part in parts:
            place, cell = part.place, part.cell
            if part.statistic == volume:
                verb = "shrinks most" if cell[0] < 0 else "grows least"
                sentence = f"Volume {verb} at {place[0]}: {_text(cell)} nats of log-determinant per direction"
                sentence += f"{_in_brackets(part.whole)}.{_given_back(layers, part, half_degrees, 'nats')}"
                said.append(sentence)
                continue
            sentence = f"Effective rank falls at no sublayer; it rises least at {place[0]}: {_text(cell)} directions"
            sentence += f"{_in_brackets(part.whole)}."
            if cell[0] < 0:
                before, after = (layers.get(place, f"effective_rank/{when}") for when in ("before", "after"))
                levels = f"from {number(before[0])} to {number(after[0])}" if before[2] else ""
                sentence = f"Effective rank falls most at {place[0]}: {_text(cell)} directions"
                sentence += (
                    f"{_in_brackets(part.whole, levels)}.{_given_back(layers, part, half_degrees, 'directions')}"
                )
            said.append(sentence)
        shown = parts[0]
        return Finding(
            "collapse", title, " ".join(said), *shown.cell[:2], STATISTICS[shown.statistic].unit,
            f"Models that have learned nothing change by {_law(shown.nulls[0])} there.", shown.cell[2],
            "Measured on at most 64 tokens of each window. The distance between tokens does not say what later layers can "
            "still read.",
            shown.statistic, [],
        )  # fmt: skip

    return _card("collapse", title, rank, parts, told)


def _card(
    identity: str, title: str, needed: str, parts: Sequence[_Part | None], told: Callable[[Sequence[_Part]], Finding]
) -> _Card:
    """The card of the parts that were measured; without its first one, what it would need."""
    if parts[0] is None:
        absent = Finding(identity, title, "Not measured in this run.", caveat=f"It needs the statistic {needed}.")
        return _Card(identity, title, [], lambda _: absent)
    return _Card(identity, title, [part for part in parts if part is not None], told)


def findings(heads: Any, layers: Any, half_degrees: tuple[float, float] = (1.0, 1.0)) -> list[Finding]:
    """The four findings, made from the two tables alone.

    Args:
        half_degrees: degrees of freedom of an error over half the text, and over half its sample.
    """
    by_head, by_layer = _Lookup(heads), _Lookup(layers)
    whole, sample = half_degrees
    cards = [_sink(by_head, whole), _sharpness(by_head, whole), _climb(by_head, sample), _collapse(by_layer, sample)]
    levels = holm([card.p_value for card in cards], SIGNIFICANT)
    return [card.finding(level) for card, level in zip(cards, levels, strict=True)]
