"""The three tasks of the experiment climb: a small transformer, its training with checkpoints, and two held-out halves."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from massieu.papers.experiments import regression
from massieu.papers.experiments.digits import PATCHES, load_digits
from massieu.papers.experiments.in_context import tokens_of
from massieu.papers.experiments.text import ReferenceText
from massieu.papers.experiments.training import minimise
from massieu.papers.experiments.transformer import Transformer, VectorTransformer

WIDTH = 32
HEADS = 4
DEPTH = 3
TASKS = ("characters", "regression", "digits")
HALVES = ("A", "B")
CHECKPOINTS = (0, 1, 3, 10, 30, 100)
"""Per cent of the steps before which the weights are kept."""
_CHARACTERS = 32
"""The length of a window of characters."""
_PAIRS = 16
_CONTEXTS = 1024
"""Contexts of the regression in each half."""

Batch = tuple[Tensor, Tensor]
"""What a model reads, and what it has to predict; both have the batch first."""


@dataclass(frozen=True, eq=False)
class HalvedTask:
    """A task whose model, loss and data are fixed.

    Attributes:
        name: Its name in the numbers.
        make: Makes a model of random weights.
        draw: Draws a batch to train on.
        loss: The mean loss of a batch: nats, or the squared error of the regression.
        excess: From a model and a batch to how far training is from what it has to reach.
        steps: The number of training steps.
        step_size: The step size at the start.
        held_out: The two halves; no window, context or image is in both or in training.
    """

    name: str
    make: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], Float[Tensor, ""]]
    excess: Callable[[nn.Module, Batch], float]
    steps: int
    step_size: float
    held_out: dict[str, Batch]


def task_of(name: str, seed: int) -> HalvedTask:
    """The task of this name; the regression's held-out contexts are drawn by the seed."""
    if name == "characters":
        return _characters()
    if name == "regression":
        return _regression(seed)
    return _digits()


def fresh_model(task: HalvedTask, generator: torch.Generator) -> nn.Module:
    """A model of the task with random weights of its own."""
    with torch.random.fork_rng():
        torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
        return task.make().eval()


def trained_models(task: HalvedTask, generator: torch.Generator, steps: int) -> dict[int, nn.Module]:
    """The model before each per cent of the steps in `CHECKPOINTS`; the last one is the trained model."""
    model = fresh_model(task, generator)
    kept: dict[int, nn.Module] = {}
    wanted = {share: round(steps * share / 100) for share in CHECKPOINTS}
    step_numbers = iter(range(steps))

    def loss() -> Tensor:
        step = next(step_numbers)
        kept.update({share: copy.deepcopy(model) for share, at in wanted.items() if at == step})
        return task.loss(model, task.draw(generator))

    minimise(loss, list(model.parameters()), steps=steps, step_size=task.step_size)
    return kept | {CHECKPOINTS[-1]: model}


# --- characters --------------------------------------------------------------------------------------------------------


def _characters() -> HalvedTask:
    text = ReferenceText(_CHARACTERS)
    middle = len(text.held_out) // 2

    def draw(generator: torch.Generator) -> Batch:
        tokens = text.sample(32, generator)
        return tokens[:, :-1], tokens[:, 1:]

    return HalvedTask(
        name="characters",
        make=partial(Transformer, text.vocabulary, _CHARACTERS, width=WIDTH, heads=HEADS, depth=DEPTH),
        draw=draw,
        loss=_next_token_loss,
        excess=lambda model, batch: float(_next_token_loss(model, batch)) - text.pair_loss(0),
        steps=1500,
        step_size=6e-3,
        held_out={"A": _windows(text.held_out[:middle]), "B": _windows(text.held_out[middle:])},
    )


def _windows(tokens: Tensor) -> Batch:
    """The windows of a part of the text, one after the other."""
    rows = tokens[: len(tokens) // (_CHARACTERS + 1) * (_CHARACTERS + 1)].unflatten(0, (-1, _CHARACTERS + 1))
    return rows[:, :-1], rows[:, 1:]


def _next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    tokens, following = batch
    return F.cross_entropy(model(tokens).transpose(1, 2), following)


# --- regression --------------------------------------------------------------------------------------------------------


def _regression(seed: int) -> HalvedTask:
    pairs = regression.sample(2 * _CONTEXTS, _PAIRS, torch.Generator().manual_seed(2**20 + seed))
    means, _ = regression.exact(pairs)
    least = {
        half: float((means[rows] - pairs[1][rows]).square().mean())
        for half, rows in zip(HALVES, (slice(None, _CONTEXTS), slice(_CONTEXTS, None)), strict=True)
    }
    tokens = tokens_of(pairs)

    def draw(generator: torch.Generator) -> Batch:
        drawn = regression.sample(128, _PAIRS, generator)
        return tokens_of(drawn), drawn[1]

    return HalvedTask(
        name="regression",
        make=partial(VectorTransformer, tokens.shape[-1], 1, width=WIDTH, heads=HEADS, depth=DEPTH),
        draw=draw,
        loss=_squared_error,
        excess=lambda model, batch: float(_squared_error(model, batch)) / least["B"] - 1,
        steps=1200,
        step_size=4e-3,
        held_out={"A": (tokens[:_CONTEXTS], pairs[1][:_CONTEXTS]), "B": (tokens[_CONTEXTS:], pairs[1][_CONTEXTS:])},
    )


def _squared_error(model: nn.Module, batch: Batch) -> Tensor:
    tokens, targets = batch
    return (model(tokens).squeeze(-1) - targets).square().mean()


# --- digits ------------------------------------------------------------------------------------------------------------


def _digits() -> HalvedTask:
    data = load_digits()
    num_training = round(0.8 * len(data.images))
    middle = (num_training + len(data.images)) // 2

    def draw(generator: torch.Generator) -> Batch:
        rows = torch.randint(num_training, (64,), generator=generator)
        return data.images[rows], data.labels[rows]

    return HalvedTask(
        name="digits",
        make=partial(VectorTransformer, 4, 10, length=PATCHES, width=WIDTH, heads=HEADS, depth=DEPTH, is_causal=False),
        draw=draw,
        loss=_label_loss,
        excess=_label_errors,
        steps=800,
        step_size=4e-3,
        held_out={
            "A": (data.images[num_training:middle], data.labels[num_training:middle]),
            "B": (data.images[middle:], data.labels[middle:]),
        },
    )


def _label_logits(model: nn.Module, images: Tensor) -> Float[Tensor, "B 10"]:
    """The mean over the patches of what each one says."""
    return model(images).mean(1)


def _label_loss(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    return F.cross_entropy(_label_logits(model, images), labels)


def _label_errors(model: nn.Module, batch: Batch) -> float:
    images, labels = batch
    return float((_label_logits(model, images).argmax(-1) != labels).double().mean())
