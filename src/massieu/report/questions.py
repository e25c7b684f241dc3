"""The questions of the papers and a run's answers: a card for each group of statistics that was measured.

A card is drawn from the two tables alone. Its verdict says no more than the tests allow: it counts heads, or layers, whose
number differs from random models and from their own control by more than the statistic's smallest effect, at a false
discovery rate of 5 % over the whole question.
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
    "sufficiency": (
        "Does a state depend on its context only through the counts of its tokens, as a posterior does?",
        "sufficiency_gap",
    ),
}
"""By group, the question of the papers and the main statistic, in the order of the cards."""
LEVEL = 0.05
"""The false discovery rate."""
UNCOMPARED = "not compared with an untrained model"
_ONE_SIDED = 0.9
"""The share of differences in one direction from which on the verdict names it."""


@dataclass(frozen=True)
class Answer:
    """One statistic over all heads or sublayers that have it.

    Attributes:
        name: Name of the statistic.
        places: "heads" or "sublayers".
        count: Number of places that have a number.
        middle, lowest, highest: Median, smallest and largest of the numbers.
        control: Median of the control's numbers; None without a control.
        control_name: The control in words.
        named: Number of places that differ from random models and from their control, significantly and by the smallest
            effect.
        tested: Number of places that were tested.
        verdict: The result of the test, in a few words.
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
    """A card: a question of the papers and the statistics that answer it, with the main one first."""

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
        columns, moved: The tables of heads and of layers as arrays.
        catalogues: The entries of the statistics of heads, and of those of layers (`catalogue_of`).
        statistics: Their records, which have the smallest effects.
    """
    records = {record.name: record for record in statistics}
    answers_of: dict[str, list[Answer]] = {group: [] for group in QUESTIONS}
    for scope, catalogue, of_scope in zip(("head", "layer"), catalogues, (columns, moved), strict=True):
        for entry in catalogue:
            if entry["group"] not in answers_of:
                continue
            answer = _answer(entry, of_scope, scope, records)
            if answer is not None:
                answers_of[entry["group"]].append(answer)
    cards = []
    for group, answers in answers_of.items():
        question, main_statistic = QUESTIONS[group]
        answers.sort(key=lambda answer, first=main_statistic: answer.name != first)
        if answers:
            cards.append(Question(group, question, answers))
    return cards


def questions_of(run: "RunRecord", heads: "polars.DataFrame", layers: "polars.DataFrame") -> list[Question]:
    """`questions` from the two tables."""
    columns = head_columns(sites_of(run, heads), heads)
    moved = layer_columns(sublayers_of(run, layers), layers)
    return questions(
        columns, moved, (catalogue_of(run, columns, "head"), catalogue_of(run, moved, "layer")), run.statistics
    )


def _answer(
    entry: dict[str, Any], columns: Mapping[str, Column], scope: str, records: Mapping[str, "Statistic"]
) -> Answer | None:
    """The answer of a statistic; None if it has no number."""
    name = entry["name"]
    control = entry["control"]
    column = columns.get(name)
    if column is None or not np.isfinite(column.value).any():
        return None
    is_finite = np.isfinite(column.value)
    null = columns.get(f"{name}/{control}")
    random = columns.get(f"{name}/reinitialised")
    tests = columns.get(f"{name}/q_value")
    q_values = np.full(len(column.value), np.nan) if tests is None else tests.value
    is_tested = is_finite & np.isfinite(q_values) & (random is not None)
    differs = is_tested & (q_values < LEVEL)
    record = records.get(name)
    for other in (null, random):
        if other is not None and record is not None:
            differs &= record.matters(column.value, other.value)
    # A control without a number is none: its place is taken by zero.
    has_null = null is not None and np.isfinite(null.value).any()
    is_above = differs & (column.value > (null.value if has_null and null is not None else 0.0))
    places = "sublayers" if scope == "layer" else "heads"
    values = column.value[is_finite]
    return Answer(
        name=name,
        title=entry["title"],
        question=entry["question"] or "",
        unit=entry["unit"] or "",
        caveat=entry["caveat"] or "",
        places=places,
        count=int(is_finite.sum()),
        middle=float(np.median(values)),
        lowest=float(values.min()),
        highest=float(values.max()),
        control=float(np.nanmedian(null.value)) if has_null and null is not None else None,
        control_name=CONTROLS.get(control or "", (control or "").replace("_", " ")),
        named=int(differs.sum()),
        tested=int(is_tested.sum()),
        verdict=verdict(is_tested, differs, is_above, places) if random is not None else UNCOMPARED,
    )


def verdict(
    is_tested: Bool[np.ndarray, " cells"],
    differs: Bool[np.ndarray, " cells"],
    is_above: Bool[np.ndarray, " cells"],
    places: str,
) -> str:
    """What the tests allow to say: in which direction the numbers differ from their control, and in how many places."""
    num_tested = int(is_tested.sum())
    num_different = int(differs.sum())
    if not num_tested:
        return "too little text to test it"
    if not num_different:
        return f"no difference from untrained models in any of {counted(num_tested, places[:-1])}"
    share_above = int(is_above.sum()) / num_different
    side = "above or below"
    if share_above >= _ONE_SIDED:
        side = "above"
    elif share_above <= 1 - _ONE_SIDED:
        side = "below"
    return f"{side} its control and untrained models in {num_different} of {counted(num_tested, places[:-1])}"
