"""What the papers ask, and what a run answers: a card for each group of statistics that was measured for it.

A card is drawn from the two tables alone. Its verdict says no more than the tests allow: heads, or layers, whose number differs
from random models and from their own control, at a false discovery rate of 5 % over all that the question asked, and by more
than the statistic's smallest effect.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool

from massieu.foundation.numbers import counted, number
from massieu.report.tables import CONTROLS, Column, catalogue_of, head_columns, layer_columns, sites_of, sublayers_of

if TYPE_CHECKING:
    import polars

    from massieu.storage.record import RunRecord, Statistic

QUESTIONS = {
    "flow": (
        "How does the law of the tokens change with depth, and is a Gaussian its equilibrium?",
        "stream_gaussian_distance",
    ),
    "metric": (
        "Does a head compare tokens through the precision (inverse covariance) of its keys?",
        "precision_cosine",
    ),
    "feed_forward": ("Is a feed-forward layer near the identity, linear, or a gradient?", "feed_forward_linear_share"),
    "residual": ("Is the residual connection a starting point or a quadratic term?", "update_stream_coefficient"),
    "key_density": ("Which distribution do a head's keys follow?", "key_mixture_gain"),
    "joint": ("Do the heads of a layer act as one mixture?", "gating_information"),
    "memory": ("Does a head act as an associative memory, and how many patterns does it retrieve?", "keys_in_use"),
    "conditional_mean": ("Does a head compute a conditional mean?", "output_along_conditional_mean"),
    "uncertainty": (
        "On how many tokens does a head's output depend, and how does it change with the query?",
        "output_effective_tokens",
    ),
    "tap": ("Does a feed-forward layer add the Onsager reaction of a mean field?", "reaction_gain"),
    "response": ("Does a token respond to other tokens one by one, or collectively?", "response_by_weights"),
    "symmetry": ("How much does the order of the tokens matter to the model?", "permutation_gap"),
}
"""By group, the question of the papers and the statistic that stands in front, in the order of the cards."""
LEVEL = 0.05
UNCOMPARED = "not compared with an untrained model"
_ONE_SIDED = 0.9


@dataclass(frozen=True)
class Answer:
    """One statistic over all heads or layers that have it.

    Attributes:
        name: of the statistic.
        places: "heads" or "layers".
        count: how many of them have a number.
        middle, lowest, highest: of the numbers.
        control: median of the control's numbers; None where there is none.
        control_name: in words.
        named: how many differ from random models and from their control, significantly and by the smallest effect.
        tested: how many were tested.
        verdict: what the test shows, in a few words.
    """

    name: str
    title: str
    question: str
    unit: str
    caveat: str
    places: str
    count: int
    middle: float
    lowest: float
    highest: float
    control: float | None
    control_name: str
    named: int
    tested: int
    verdict: str

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        sentence = f"{self.title}: median {number(self.middle)}{unit} ({number(self.lowest)} to {number(self.highest)})"
        if self.control is not None:
            sentence += f"; {self.control_name} {number(self.control)}"
        return f"{sentence}; {self.verdict}"


@dataclass(frozen=True)
class Question:
    """A card: a question of the papers and the statistics that answer it, the main one first."""

    group: str
    question: str
    answers: Sequence[Answer]


def questions(
    columns: Mapping[str, Column],
    moved: Mapping[str, Column],
    catalogues: Sequence[Sequence[dict[str, Any]]],
    statistics: Sequence["Statistic"] = (),
) -> list[Question]:
    """The cards of a run, in the order of `QUESTIONS`.

    Args:
        columns, moved: the heads' table and the layers' as arrays.
        catalogues: what is known of the statistics of heads, and of those of layers.
        statistics: their records, which say the smallest effects.
    """
    by_name = {each.name: each for each in statistics}
    found: dict[str, list[Answer]] = {group: [] for group in QUESTIONS}
    for place, catalogue, known in zip(("head", "layer"), catalogues, (columns, moved), strict=True):
        for entry in catalogue:
            if entry["group"] in found and (answer := _answer(entry, known, place, by_name)) is not None:
                found[entry["group"]].append(answer)
    for group, answers in found.items():
        answers.sort(key=lambda answer, first=QUESTIONS[group][1]: answer.name != first)
    return [Question(group, QUESTIONS[group][0], answers) for group, answers in found.items() if answers]


def questions_of(run: "RunRecord", heads: "polars.DataFrame", layers: "polars.DataFrame") -> list[Question]:
    """`questions` from the two tables."""
    columns = head_columns(sites_of(run, heads), heads)
    moved = layer_columns(sublayers_of(run, layers), layers)
    return questions(
        columns, moved, (catalogue_of(run, columns, "head"), catalogue_of(run, moved, "layer")), run.statistics
    )


def _answer(
    entry: dict[str, Any], columns: Mapping[str, Column], place: str, statistics: Mapping[str, "Statistic"]
) -> Answer | None:
    name, control = entry["name"], entry["control"]
    own = columns.get(name)
    if own is None or not np.isfinite(own.value).any():
        return None
    known = np.isfinite(own.value)
    null, tested = columns.get(f"{name}/{control}"), columns.get(f"{name}/q_value")
    random = columns.get(f"{name}/reinitialised")
    beside = null is not None and np.isfinite(null.value).any()
    q_values = np.full(len(own.value), np.nan) if tested is None else tested.value
    judged = known & np.isfinite(q_values) & (random is not None)
    outside = judged & (q_values < LEVEL)
    said = statistics.get(name)
    for each in (null, random):
        if each is not None and said is not None:
            outside &= said.matters(own.value, each.value)
    above = outside & (own.value > (null.value if beside and null is not None else 0.0))
    places = "sublayers" if place == "layer" else "heads"
    return Answer(
        name,
        entry["title"],
        entry["question"] or "",
        entry["unit"] or "",
        entry["caveat"] or "",
        places,
        int(known.sum()),
        float(np.median(own.value[known])),
        float(own.value[known].min()),
        float(own.value[known].max()),
        float(np.nanmedian(null.value)) if beside and null is not None else None,
        CONTROLS.get(control or "", (control or "").replace("_", " ")),
        int(outside.sum()),
        int(judged.sum()),
        verdict(judged, outside, above, places) if random is not None else UNCOMPARED,
    )


def verdict(
    judged: Bool[np.ndarray, " cells"],
    outside: Bool[np.ndarray, " cells"],
    above: Bool[np.ndarray, " cells"],
    places: str,
) -> str:
    """What the tests allow: which way the numbers differ from their control, and in how many places."""
    tested, named, higher = int(judged.sum()), int(outside.sum()), int(above.sum())
    if not tested:
        return "too little text to test it"
    if not named:
        return f"no difference from untrained models in any of {counted(tested, places[:-1])}"
    share = higher / named
    side = "above" if share >= _ONE_SIDED else "below" if share <= 1 - _ONE_SIDED else "above or below"
    return f"{side} its control and untrained models in {named} of {counted(tested, places[:-1])}"
