"""The four findings at the top of the page: a sentence each, with its number, error, control, count and limits.

Heads and sublayers are picked on one half of the text and their numbers printed from the other half, so that the
largest of many noisy numbers is not taken at its word. Maps and tables show the whole text's number, which stands in
brackets. A number within two standard errors of its null is not announced: the finding then has no value, and its
sentence gives the reason.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from massieu.foundation.numbers import MINUS, counted, number, with_error
from massieu.report.record import STANDARD_ERRORS, Finding

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


def stands_out(cell: Cell, *nulls: Cell) -> bool:
    """Whether a number is more than two standard errors of the difference from each null that was measured.

    A number without a standard error, as of a text of one error unit, cannot be told from anything.
    """
    value, error, _ = cell
    if not np.isfinite(value) or not np.isfinite(error):
        return False
    known = [null for null in nulls if np.isfinite(null[0])]
    return all(abs(value - null) > STANDARD_ERRORS * np.hypot(error, np.nan_to_num(other)) for null, other, _ in known)


def _unannounced(identity: str, title: str, statistic: str, what: str, cell: Cell, *nulls: Cell, whole: str) -> Finding:
    """A finding that was looked for, but whose number is not significant; ``whole`` is said of the number in passing."""
    near = next((null for null in nulls if not stands_out(cell, null)), nulls[-1])
    if not np.isfinite(cell[0]):
        why = "it has no number in the second half of the text."
    elif not np.isfinite(cell[1]):
        why = "its standard error is not known, since the text has too few windows."
    elif near == _ZERO:
        why = "it is within two standard errors of 0."
    elif stands_out(cell, *nulls):
        why = f"its own test finds no difference from its control, {_text(near)}."
    else:
        why = f"it is within two standard errors of its control, {_text(near)}."
    number_of = f", {_text(cell)}{_in_brackets(whole)}" if np.isfinite(cell[0]) else ""
    return Finding(
        identity, title, f"Nothing significant. The largest is {what}{number_of}: {why}", statistic=statistic
    )


def _sink(heads: _Lookup) -> Finding:
    title = "Attention on the first token"
    places, values = heads.column("weight_first")
    mostly = [p for p, v in zip(places, values, strict=True) if v > MOSTLY]
    best = heads.extreme("weight_first", largest=True)
    if best is None:
        return _absent("sink", title, "weight_first")
    strongest, cell = best
    null = heads.get(strongest, "weight_first/reinitialised")
    if not stands_out(cell, null):
        of = f"of {counted(len(places), 'head')}{heads.without('weight_first')}"
        what, whole = f"the weight of {heads.name(strongest)}, {of}", heads.over_all(strongest, "weight_first")
        return _unannounced("sink", title, "weight_first", what, cell, null, whole=whole)
    norm = heads.get(strongest, "first_value_norm_ratio")
    sentence = (
        f"{len(mostly)} of {counted(len(places), 'head')}{heads.without('weight_first')} put more than half of their "
        "attention on the first token. "
        f"The strongest, {heads.name(strongest)}, puts {_text(cell)} there"
        + _in_brackets(heads.over_all(strongest, "weight_first"))
    )
    if norm[2]:
        sentence += f"; the first token's value has {_text(norm)} times the mean norm"
    fresh = _mean([heads.get(p, "weight_first/reinitialised")[0] for p in places])
    return Finding(
        "sink", title, sentence + ".", cell[0], cell[1], "of the attention",
        f"The heads of the re-initialised copy put {fresh:.2g} there on average." if np.isfinite(fresh) else "No control.",
        cell[2],
        "Weight on a token is not information from it. A head that reads a small value there is a candidate no-op on "
        "this text, never a dead head.",
        "weight_first", [heads.pair(p) for p in (mostly or [strongest])[:12]],
    )  # fmt: skip


def _sharpness(heads: _Lookup) -> Finding:
    title = "Sharpest and flattest heads"
    sharp, flat = (heads.extreme("entropy_fraction", largest=largest) for largest in (False, True))
    if sharp is None or flat is None:
        return _absent("sharpness", title, "entropy_fraction")
    (sharpest, low), (flattest, high) = sharp, flat
    null = heads.get(sharpest, "entropy_fraction/reinitialised")
    if not stands_out(low, null):
        what, whole = f"the sharpness of {heads.name(sharpest)}", heads.over_all(sharpest, "entropy_fraction")
        return _unannounced("sharpness", title, "entropy_fraction", what, low, null, whole=whole)
    keys = heads.get(sharpest, "effective_keys")
    on_average = f"{number(keys[0])} effective keys on average" if keys[2] else ""
    whole_low, whole_high = (heads.over_all(place, "entropy_fraction") for place in (sharpest, flattest))
    sentence = (
        f"The sharpest head, {heads.name(sharpest)}, has {_text(low)} of the largest possible entropy"
        f"{_in_brackets(whole_low, on_average)}; "
        f"the flattest, {heads.name(flattest)}, has {_text(high)}{_in_brackets(whole_high)}."
    )
    above = heads.extreme("largest_score_above_mean", largest=True)
    if above is not None and stands_out(above[1], heads.get(above[0], "largest_score_above_mean/reinitialised")):
        place, cell = above
        raw = heads.get(place, "largest_score")
        whole = heads.over_all(place, "largest_score_above_mean")
        sentence += (
            f" The largest score is {_text(cell)} nats above the mean score{_in_brackets(heads.name(place), whole)}."
        )
        if raw[2]:
            sentence += f" Its raw max logit is {number(raw[0])} on average and depends on the key origin."
    # Next to no entropy, within its own error, is a finding; the number to print is the other head's.
    shown, unit = (low, "of log n") if stands_out(low, _ZERO) else (high, "of log n, the flattest head")
    fresh = _mean([heads.get(p, "entropy_fraction/reinitialised")[0] for p in (sharpest, flattest)])
    return Finding(
        "sharpness", title, sentence, shown[0], shown[1], unit,
        f"The same two heads of the re-initialised copy have {fresh:.2g} on average." if np.isfinite(fresh) else "No control.",
        shown[2],
        "It describes where attention goes on this text. A sharp head need not matter to the model, and a flat one may.",
        "entropy_fraction", [heads.pair(sharpest), heads.pair(flattest)],
    )  # fmt: skip


def _climb(heads: _Lookup) -> Finding:
    title, name = "Does a head's write sharpen its own attention?", "own_write_step_selective"
    if not heads.column(name)[0]:
        name = "update_step_selective"
    places, values = heads.column(name)
    highest, lowest = heads.extreme(name, largest=True), heads.extreme(name, largest=False)
    if highest is None or lowest is None:
        return _absent("climb", title, "own_write_step_selective")
    judged = [(p, v) for p, v in zip(places, values, strict=True) if heads.get(p, f"{name}/q_value")[0] < SIGNIFICANT]
    control = "mismatched" if name.startswith("own") else "random"
    expected = {p: heads.get(p, f"{name}/{control}")[0] for p in places}
    sharpening = [p for p, v in judged if v > expected[p]]
    flattening = [p for p, v in judged if v <= expected[p]]
    told = []
    for verb, (place, cell) in (("Most", highest), ("Least", lowest)):
        null, tested = heads.get(place, f"{name}/{control}"), heads.get(place, f"{name}/q_value")[0]
        differs = tested < SIGNIFICANT if np.isfinite(tested) else stands_out(cell, null)
        if differs and stands_out(cell, _ZERO):
            told.append((verb, place, cell))
    if not told:
        null = heads.get(highest[0], f"{name}/{control}")
        what, whole = f"the effect on {heads.name(highest[0])}", heads.over_all(highest[0], name)
        return _unannounced("climb", title, name, what, highest[1], _ZERO, null, whole=whole)
    shown = told[0][2]
    ends = (
        f"{verb}: {heads.name(place)}, {_text(cell)} nats of selective log Z per step"
        f"{_in_brackets(heads.over_all(place, name))}."
        for verb, place, cell in told
    )
    of = f"{len(sharpening)} of {counted(len(places), 'head')}{heads.without(name)}"
    if control == "mismatched":
        sentence = f"{of} sharpen their own attention more than other heads' writes do, {len(flattening)} less"
    else:
        sentence = (
            f"In {of} the layer's update sharpens attention more than a random step does, in {len(flattening)} less"
        )
    sentence += " (false discovery rate 5 %). " + " ".join(ends)
    middle = _mean(list(expected.values()))
    random = _mean([heads.get(p, f"{name}/random")[0] for p in places])
    share = _mean([heads.get(p, f"{name.replace('_selective', '_sharpens')}/random")[0] for p in places])
    return Finding(
        "climb", title, sentence, shown[0], shown[1], "nats",
        (f"Other heads' writes (mismatched): {_signed(middle)} nats on average. " if control == "mismatched" else "")
        + f"A random step of equal length: {_signed(random)} nats; it sharpens {100 * share:.0f} % of queries.",
        shown[2],
        "Keys and values are held fixed while the query moves. A change common to all scores is left out, since softmax "
        "does not depend on it. No equilibrium is claimed.",
        name, [heads.pair(p) for p in (sharpening + flattening)[:12]],
    )  # fmt: skip


def _given_back(layers: _Lookup, place: Place, statistic: str, fall: Cell, unit: str) -> str:
    """Says that the next step takes most of a fall back, as the norm behind a feed-forward layer does in post-norm models."""
    following = layers.step_after(place, statistic.removesuffix("_change"))
    if following is None or not fall[0] < 0:
        return ""
    second = f"{statistic}/second_half"
    rise = layers.get(following, second if (*following, second) in layers.cells else statistic)
    if not rise[0] > -MOSTLY * fall[0] or not stands_out(rise, _ZERO):
        return ""
    return f" The step behind it, {following[0]}, gives back {_text(rise)} {unit}."


def _collapse(layers: _Lookup) -> Finding:
    title = "Where the tokens of a window come together"
    ranks, volumes = (
        layers.extreme(name, largest=False) for name in ("effective_rank_change", "log_determinant_change")
    )
    if ranks is None:
        return _absent("collapse", title, "effective_rank_change")
    place, cell = ranks
    fresh = layers.get(place, "effective_rank_change/reinitialised")
    before, after = layers.get(place, "effective_rank/before"), layers.get(place, "effective_rank/after")
    told = []
    if stands_out(cell, _ZERO, fresh):
        whole = layers.over_all(place, "effective_rank_change")
        sentence = f"Effective rank falls at no sublayer; it rises least at {place[0]}: {_text(cell)} directions"
        sentence += f"{_in_brackets(whole)}."
        if cell[0] < 0:
            levels = f"from {number(before[0])} to {number(after[0])}" if before[2] else ""
            sentence = (
                f"Effective rank falls most at {place[0]}: {_text(cell)} directions{_in_brackets(whole, levels)}."
            )
            sentence += _given_back(layers, place, "effective_rank_change", cell, "directions")
        told.append((sentence, cell, fresh, "directions", "effective_rank_change"))
    if volumes is not None:
        where, volume = volumes
        same = layers.get(where, "log_determinant_change/reinitialised")
        if stands_out(volume, _ZERO, same):
            whole = layers.over_all(where, "log_determinant_change")
            sentence = (
                f"Volume {'shrinks most' if volume[0] < 0 else 'grows least'} at {where[0]}: {_text(volume)} nats of "
                f"log-determinant per direction{_in_brackets(whole)}."
            )
            sentence += _given_back(layers, where, "log_determinant_change", volume, "nats")
            told.append((sentence, volume, same, "nats per direction", "log_determinant_change"))
    if not told:
        what = f"the change of effective rank at {place[0]}"
        whole = layers.over_all(place, "effective_rank_change")
        return _unannounced("collapse", title, "effective_rank_change", what, cell, _ZERO, fresh, whole=whole)
    _, shown, control, unit, statistic = told[0]
    return Finding(
        "collapse", title, " ".join(sentence for sentence, *_ in told), shown[0], shown[1], unit,
        f"The re-initialised copy changes by {_text(control)} there." if control[2] else "No control.", shown[2],
        "Measured on at most 64 tokens of each window. The distance between tokens does not say what later layers can "
        "still read.",
        statistic, [],
    )  # fmt: skip


def _absent(identity: str, title: str, statistic: str) -> Finding:
    return Finding(identity, title, "Not measured in this run.", caveat=f"It needs the statistic {statistic}.")


def findings(heads: Any, layers: Any) -> list[Finding]:
    """The four findings, made from the two tables alone."""
    by_head, by_layer = _Lookup(heads), _Lookup(layers)
    return [_sink(by_head), _sharpness(by_head), _climb(by_head), _collapse(by_layer)]
