"""Hypotheses over several tasks: Student's t against SciPy, Holm's levels by hand, and the design's false positives."""

import math

import numpy as np
import pytest
from scipy import stats

from massieu.papers.experiments.climb import HYPOTHESES
from massieu.papers.experiments.criterion import Criterion
from massieu.papers.experiments.hypotheses import Hypothesis, StudentHolm, decide, effect_tests, power_lines, simulated
from massieu.papers.experiments.study import Experiment, Study

NEAR = np.array([-0.2, -0.1, 0.0, 0.1, 0.2])
"""Deviations of five seeds."""


def hypothesis(name: str, *groups: tuple[str, ...], counts: str | None = None) -> Hypothesis:
    """About one task, with the smallest effect 1."""
    least = {quantity: 1.0 for group in groups for quantity in group}
    return Hypothesis(name, "so it is.", {"task": groups}, least, None if counts is None else {"task": counts})


def runs_of(**means: float) -> list[dict[str, float]]:
    """Five seeds whose numbers have these means."""
    return [{name: mean + deviation for name, mean in means.items()} for deviation in NEAR.tolist()]


@pytest.mark.parametrize("mean", [-3.0, 0.9, 1.0, 1.2, 40.0])
def test_p_values_are_scipys(mean: float):
    values = mean + NEAR
    found = effect_tests(values[None], 1.0, may_lack=False)
    for side, p_values in (("greater", found.above), ("less", found.below)):
        expected = stats.ttest_1samp(values, 1.0, alternative=side).pvalue
        assert abs(p_values[0] - expected) <= 1e-9 * expected + 1e-15
    assert found.degrees[0] == 4 and abs(found.error[0] - stats.sem(values)) < 1e-15


def test_seeds_that_are_not_finite_leave_it_open_or_out():
    values = np.array([[3.0, np.nan, 3.1, 2.9, 3.0]])
    assert effect_tests(values, 1.0, may_lack=False).above[0] == 1.0
    left = effect_tests(values, 1.0, may_lack=True)
    expected = stats.ttest_1samp(values[0, [0, 2, 3, 4]], 1.0, alternative="greater").pvalue
    assert left.degrees[0] == 3 and abs(left.above[0] - expected) <= 1e-9 * expected
    for few in (np.full((1, 5), np.nan), np.array([[2.0, np.nan, np.nan, np.nan, np.nan]]), np.zeros((1, 0))):
        lacking = effect_tests(few, 1.0, may_lack=True)
        assert lacking.above[0] == lacking.below[0] == 1.0 and math.isnan(lacking.mean[0])
    equal = effect_tests(np.ones((1, 5)), 1.0, may_lack=False)
    assert equal.above[0] == equal.below[0] == 0.5
    assert effect_tests(np.full((1, 5), 2.0), 1.0, may_lack=False).above[0] == 0.0


@pytest.mark.parametrize(
    ("means", "verdict"),
    [
        ({"a": 2.0, "b": 2.0, "c": 2.0, "d": 2.0}, "confirmed"),
        ({"a": 2.0, "b": 2.0, "c": 2.0, "d": 1.0}, "undecided"),
        ({"a": 0.0, "b": 0.0, "c": 2.0, "d": 2.0}, "refuted"),  # one difference below on both halves
        ({"a": 0.0, "b": 2.0, "c": 0.0, "d": 2.0}, "undecided"),  # each below on one half only
        ({"a": 0.0, "b": 0.0, "c": 0.0, "d": 0.0}, "refuted"),
        ({"a": math.nan, "b": 2.0, "c": 2.0, "d": 2.0}, "undecided"),
        ({}, "undecided"),
    ],
)
def test_a_hypothesis_needs_every_interval(means: dict[str, float], verdict: str):
    rule = StudentHolm((hypothesis("H", ("a", "b"), ("c", "d")),))
    runs = runs_of(**means) if means else [{}] * 5
    assert rule.verdicts(runs) == {"H": verdict}
    assert rule.verdicts(runs[:4]) == {"H": "undecided"}


def test_few_pairs_are_a_missing_control():
    rule = StudentHolm((hypothesis("H", ("a",), counts="pairs"),))
    runs = runs_of(a=2.0)
    for pairs, verdict in [
        ([1, 1, 1, 1, 1], "confirmed"),
        ([1, 1, 0, 0, 0], "undecided: control"),  # two pairs
        ([4, 4, 0, 0, 0], "undecided: control"),  # in two seeds
        ([math.nan] * 5, "undecided: control"),
    ]:
        counted = [numbers | {"pairs": float(count)} for numbers, count in zip(runs, pairs, strict=True)]
        assert rule.verdicts(counted) == {"H": verdict}


def test_levels_are_holms():
    """The smallest p-value is held against 5/3 %, the next against 2.5 %, the last against 5 %, until one fails."""

    def levels(*means: float) -> list[float]:
        names = ("a", "b", "c")
        rows = {name: (mean + NEAR)[None] for name, mean in zip(names, means, strict=True)}
        decisions = decide([hypothesis(name, (name,)) for name in names], rows)
        return [float(decision.level[0]) for decision in decisions]

    # The error is √0.025/√5 = 0.0707: p = 0.05 (two-sided) at 2.776 of them, 0.0205 at 3.66, below 1e-4 at 14.
    assert levels(2.0, 1.0 + 3.66 * 0.0707, 1.0 + 2.9 * 0.0707) == pytest.approx([0.05 / 3, 0.025, 0.05])
    assert levels(1.0 + 2.9 * 0.0707, 2.0, 1.0) == pytest.approx(
        [0.025, 0.05 / 3, 0.025]
    )  # 0.044 fails, and all after it
    assert levels(1.0, 1.0, 1.0 + 3.0 * 0.0707) == pytest.approx([0.05 / 3] * 3)


def test_the_study_follows_its_hypotheses():
    criteria = (
        Criterion("a", "the effect", least=1.0),
        Criterion("risk", "the risk", most=0.5, role="optimisation"),
        Criterion("null", "the effect without it", least=1.0, role="control"),
        Criterion("size", "the size", role="description"),
    )
    rule = StudentHolm((hypothesis("H", ("a",)),))
    experiment = Experiment("made-up", "Is it so?", "E0", "Nothing.", criteria, 1, lambda seed, quick: {}, rule=rule)

    def verdict(**changed: float) -> str:
        numbers = runs_of(**{"a": 2.0, "risk": 0.1, "null": 0.0, "size": 7.0} | changed)
        return Study(experiment, runs=dict(enumerate(numbers))).verdict

    assert [verdict(), verdict(a=0.0), verdict(a=1.0)] == ["confirmed", "refuted", "undecided"]
    assert [verdict(risk=0.5), verdict(a=0.0, null=1.0)] == ["undecided: optimisation", "undecided: control"]
    study = Study(experiment, runs=dict(enumerate(runs_of(a=2.0, risk=0.1, null=0.0, size=7.0))))
    first, *others = study.judgements
    for judgement, value in ((first, 2.0), (others[-1], 7.0)):
        low, high = stats.t.interval(0.95, 4, value, stats.sem(NEAR))
        assert (judgement.low, judgement.high) == pytest.approx((low, high), rel=1e-9)
    assert [each.outcome for each in study.judgements] == ["met", "met", "missed", "described"]
    assert study.lines == ["H confirmed: so it is. Its p-value 1.5e−4 is held against 0.0500."]
    assert Study(experiment, quick=True, runs=study.runs).lines == []


def quantities() -> list[tuple[str, str, str]]:
    """Hypothesis, task and name of every registered quantity."""
    return [
        (hypothesis.name, task, quantity)
        for hypothesis in HYPOTHESES
        for task, groups in hypothesis.comparisons.items()
        for group in groups
        for quantity in group
    ]


ONE = ("digits_A_over_others", "digits_A_gain", "digits_loss_apart")


@pytest.mark.medium
@pytest.mark.parametrize("judged", ["H1", "H2", "H3"])
@pytest.mark.parametrize("rest", [21.0, -19.0])
def test_false_positives_of_the_registered_design(judged: str, rest: float):
    """One task, or one quantity, at the smallest effect, and all else far from it: any verdict is false."""
    effects = {}
    for name, task, quantity in quantities():
        at_least = quantity in ONE if rest > 0 else task == "digits"
        effects[quantity] = 21.0 if name != judged else 1.0 if at_least else rest
    decisions = simulated(HYPOTHESES, effects, 1.0, generator=np.random.default_rng(3))
    decision = decisions[int(judged[1]) - 1]
    false = (decision.confirmed | decision.refuted).mean()
    assert false <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 2000)
    others = [each for place, each in enumerate(decisions) if place != int(judged[1]) - 1]
    assert all(other.confirmed.mean() > 0.99 for other in others)  # so Holm's level is the largest


def test_power_is_what_the_registration_says():
    quarter, half, whole = power_lines(HYPOTHESES)
    assert quarter.endswith("H1 1.00, H2 1.00, H3 1.00") and half.endswith("H1 0.10, H2 0.20, H3 0.35")
    assert whole.endswith("H1 0.00, H2 0.00, H3 0.01")
