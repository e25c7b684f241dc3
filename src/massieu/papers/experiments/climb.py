"""Does training teach heads to climb their own log-partition, and does it matter? (E2, S25)"""

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from massieu.papers.experiments.climb_reading import (
    WINDOWS,
    HeadRises,
    loss_differences,
    pairs_of_equal_norm,
    read_described,
    read_heads,
    write_norms,
)
from massieu.papers.experiments.climb_tasks import (
    CHECKPOINTS,
    HALVES,
    TASKS,
    HalvedTask,
    fresh_model,
    task_of,
    trained_models,
)
from massieu.papers.experiments.criterion import Criterion
from massieu.papers.experiments.descriptions import described
from massieu.papers.experiments.hypotheses import Hypothesis, StudentHolm, power_lines
from massieu.papers.experiments.study import Numbers, experiment

LEAST_CLIMB = 0.01
"""The smallest effect on selective log Z, nats."""
LEAST_LOSS = {"characters": 0.005, "regression": 0.01, "digits": 0.005}
"""The smallest effect on the loss: nats, or a share of the regression's loss."""
FRESH = 8
"""Models of random weights that each seed has for each task."""
REGISTERED = {
    "registered": "cb9dd9a61da589ed7a8ff8fa7b73c77cebf146d4",
    "registration": "61aa9dd9aa6a3e8baa1c566da598f5bdf5d08292ad2a4cd4d2700be247fc0860",
}
"""The commit of the registration in docs/theory/experiments.md, and the SHA-256 of its text."""

_TITLES = {"characters": "characters", "regression": "regression", "digits": "digits"}
_LISTED = {
    "retrieval_slope": "slope of a retrieval step",
    "output_along_conditional_mean": "cosine of output and conditional mean",
}
"""Of the described statistics, those that stand among the criteria."""


def _both(task: str, quantity: str) -> tuple[str, ...]:
    return tuple(f"{task}_{half}_{quantity}" for half in HALVES)


def _climbs(name: str, statement: str, *quantities: str) -> Hypothesis:
    """A hypothesis about numbers that each half of each task has."""
    comparisons = {task: tuple(_both(task, quantity) for quantity in quantities) for task in TASKS}
    names = [each for groups in comparisons.values() for group in groups for each in group]
    return Hypothesis(name, statement, comparisons, dict.fromkeys(names, LEAST_CLIMB))


HYPOTHESES = (
    _climbs(
        "H1",
        "a trained head's own write raises its selective log Z by 0.01 nats more than a random model's does, and than other "
        "heads' writes do.",
        "over_fresh",
        "over_others",
    ),
    _climbs(
        "H2", "a head's own write raises its selective log Z by 0.01 nats more after training than before.", "gain"
    ),
    Hypothesis(
        "H3",
        "the loss without a head that climbs much is larger, by 0.005 nats or 1 %, than without one that climbs little and "
        "whose writes have the same norm.",
        {task: ((f"{task}_loss_apart",),) for task in TASKS},
        {f"{task}_loss_apart": LEAST_LOSS[task] for task in TASKS},
        {task: f"{task}_pairs" for task in TASKS},
    ),
)
"""The registered hypotheses."""
_FINDINGS = {
    "over_fresh": "H1: own write's rise of selective log Z − that in random models, nats",
    "over_others": "H1: own write's rise of selective log Z − that by other heads' writes, nats",
    "gain": "H2: own write's rise of selective log Z after training − before, nats",
}


def _criteria() -> list[Criterion]:
    return [
        *(
            Criterion(f"{task}_{half}_{quantity}", f"{title}; {_TITLES[task]}, {half}", least=LEAST_CLIMB)
            for quantity, title in _FINDINGS.items()
            for task in TASKS
            for half in HALVES
        ),
        *(
            Criterion(
                f"{task}_loss_apart",
                f"H3: loss without a head that climbs − without its partner, {unit}; {_TITLES[task]}",
                least=LEAST_LOSS[task],
            )
            for task, unit in (("characters", "nats"), ("regression", "share of the loss"), ("digits", "nats"))
        ),
        Criterion("characters_excess", "loss − loss of pairs of characters, nats", most=0.0, role="optimisation"),
        Criterion("regression_excess", "loss / least possible loss − 1", most=0.1, role="optimisation"),
        Criterion("digits_excess", "share of digits that are named wrongly", most=0.15, role="optimisation"),
        *(
            Criterion(
                f"{task}_{half}_one_fresh",
                f"a random model in the trained one's place, as in H1; {_TITLES[task]}, {half}",
                least=LEAST_CLIMB,
                role="control",
            )
            for task in TASKS
            for half in HALVES
        ),
        *described(
            {
                f"{task}_pairs": f"pairs of heads with equal norm of their writes, a seed; {_TITLES[task]}"
                for task in TASKS
            }
        ),
        *described(
            {
                f"{task}_{name}_{share}": f"{title}, {'random' if share == 0 else 'trained'}; {_TITLES[task]}"
                for name, title in _LISTED.items()
                for task in TASKS
                for share in (0, 100)
            }
        ),
    ]


@experiment(
    "climb",
    question="Does training teach heads to climb their own log-partition, and does the loss depend on the heads that do?",
    claims="E2, S12, S25",
    minutes=15,
    criteria=_criteria(),
    rule=StudentHolm(HYPOTHESES),
    registration=REGISTERED,
    plan=partial(power_lines, HYPOTHESES),
)
def climb(seed: int, quick: bool) -> Numbers:
    """Three small transformers of three layers, 4 heads and width 32 predict characters of the reference text, a linear
    regression in context, and digits. Held-out data have two halves, A and B. A head climbs if its own write raises the
    selective part of its log Z, with its keys held fixed. Trained models are compared with eight random models of their own a
    seed, with other heads' writes, and with themselves before training. Heads that climb much and little on A are paired where
    their writes have equal norms; then the loss on B is compared without each. The plan was registered before the first run.
    """
    numbers: Numbers = {}
    for place, name in enumerate(TASKS):
        # Each task has random numbers of its own.
        generator = torch.Generator().manual_seed(10 * seed + place)
        task = task_of(name, seed)
        size = Size(steps=30, fresh=2, windows=8) if quick else Size(task.steps, FRESH, WINDOWS)
        found = measure_task(task, generator, size)
        numbers |= {f"{name}_{quantity}": value for quantity, value in found.items()}
    return numbers


class Size(NamedTuple):
    """How much is done: training steps, random models, and windows that are probed of each half."""

    steps: int
    fresh: int
    windows: int


def measure_task(task: HalvedTask, generator: torch.Generator, size: Size) -> Numbers:
    """The numbers of one task and seed."""
    models = trained_models(task, generator, size.steps)
    fresh_models = [fresh_model(task, generator) for _ in range(size.fresh)]

    def read(model: nn.Module, half: str) -> HeadRises:
        return read_heads(model, task.held_out[half][0], size.windows)

    course = {(share, half): read(model, half) for share, model in models.items() for half in HALVES}
    of_fresh = {half: [read(model, half) for model in fresh_models] for half in HALVES}
    trained = models[CHECKPOINTS[-1]]
    return {
        **course_numbers(course),
        **hypotheses_numbers(course, of_fresh),
        **_head_numbers(course, of_fresh),
        **_loss_numbers(task, trained, course[CHECKPOINTS[-1], "A"].own),
        **_described_numbers(task, models[0], trained, size.windows),
    }


def course_numbers(course: dict[tuple[int, str], HeadRises]) -> Numbers:
    """Means over heads at each checkpoint, for own and for other heads' writes."""
    return {
        f"{half}_{name}_{share}": float(numbers.mean())
        for (share, half), heads in course.items()
        for name, numbers in (("own", heads.own), ("others", heads.others))
    }


def hypotheses_numbers(course: dict[tuple[int, str], HeadRises], of_fresh: dict[str, list[HeadRises]]) -> Numbers:
    """The numbers of H1 and H2, and of H1 with a random model in the trained one's place."""
    numbers: Numbers = {}
    for half in HALVES:
        last = course[CHECKPOINTS[-1], half]
        means = np.array([heads.own.mean() for heads in of_fresh[half]])
        own = float(last.own.mean())
        numbers[f"{half}_over_fresh"] = own - float(means.mean())
        numbers[f"{half}_over_others"] = own - float(last.others.mean())
        numbers[f"{half}_gain"] = own - float(course[0, half].own.mean())
        numbers[f"{half}_one_fresh"] = float(means[0] - means[1:].mean())
    return numbers


def _head_numbers(course: dict[tuple[int, str], HeadRises], of_fresh: dict[str, list[HeadRises]]) -> Numbers:
    """Each head of the trained model, and of one random model."""
    numbers: Numbers = {}
    for half in HALVES:
        for name, own in (("head", course[CHECKPOINTS[-1], half].own), ("fresh_head", of_fresh[half][0].own)):
            numbers |= {f"{half}_{name}_{head}": float(value) for head, value in enumerate(own)}
    return numbers


def _loss_numbers(task: HalvedTask, model: nn.Module, own_on_a: np.ndarray) -> Numbers:
    """The loss on B, and how much more of it depends on heads that climb on A."""
    batch = task.held_out["B"]
    with torch.no_grad():
        loss = float(task.loss(model, batch))
        excess = task.excess(model, batch)
    pairs = pairs_of_equal_norm(own_on_a, write_norms(model, task.held_out["A"][0]))
    unit = loss if task.name == "regression" else 1.0
    differences = [difference / unit for difference in loss_differences(task, model, batch, pairs)]
    return {
        "loss": loss,
        "excess": excess,
        "pairs": float(len(pairs)),
        "loss_apart": float(np.mean(differences)) if differences else np.nan,
        **{f"pair_{place}": difference for place, difference in enumerate(differences)},
    }


def _described_numbers(task: HalvedTask, random: nn.Module, trained: nn.Module, windows: int) -> Numbers:
    """Fixed points and conditional means before and after training, on B."""
    inputs = task.held_out["B"][0]
    return {
        f"{name}_{share}": value
        for share, model in ((0, random), (100, trained))
        for name, value in read_described(model, inputs, windows).items()
    }
