"""Scores on their way from a product of two activations to a softmax: every step that keeps them an affine function of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from massieu.probing.capture.attention_call import above_gap
from massieu.probing.capture.follow.dims import Dim, Dims, Label, LabelledTensor, broadcast, merged
from massieu.probing.capture.follow.paths import Path

HIDES = -1e4
"""An additive mask of this or less hides a key."""
HIDES_ALONE = -100.0
"""So does one of this or less where it is the mask's only value beside 0, as Swin's."""


@dataclass(frozen=True, eq=False)
class ScoreProduct:
    """The product of two activations that scores come from.

    Attributes:
        summed: labels that are summed over.
    """

    left: LabelledTensor
    right: LabelledTensor
    summed: Dim
    path: Path


@dataclass(frozen=True, eq=False)
class ScoreStep:
    """One step from products to scores: ``kind`` is "mul", "add", "hide" or "tanh"."""

    kind: str
    value: Tensor | float = 0.0
    dims: Dims | None = None


@dataclass(frozen=True, eq=False)
class Scores:
    """What is known of a tensor of scores.

    Attributes:
        affine: the steps say how the scores follow from the product; else the scores have to be taken as they are.
        moving: a log-weight was computed from the queries or the keys.
        broken: why these are no scores that can be read; None where they can be.
        sink: a score without a value that stands behind the keys.
        extended: the dimension in which keys and sink stand together.
    """

    product: ScoreProduct
    dims: Dims
    steps: tuple[ScoreStep, ...] = ()
    affine: bool = True
    moving: bool = False
    broken: str | None = None
    sink: LabelledTensor | None = None
    extended: "ExtendedKeys | None" = None

    def then(self, kind: str, value: Tensor | float = 0.0, *, moving: bool = False) -> "Scores":
        """With one more step; a tensor is one that is combined elementwise with the scores."""
        dims = None
        if isinstance(value, Tensor) and value.numel() == 1:
            value = bool(value) if kind == "hide" else float(value.detach())
        elif isinstance(value, Tensor):
            while value.dim() > len(self.dims) and value.shape[0] == 1:
                value = value[0]
            if value.dim() > len(self.dims):
                return replace(self, broken="its scores are broadcast to more dimensions")
            dims = broadcast(self.dims, value.shape)
        return replace(self, steps=(*self.steps, ScoreStep(kind, value, dims)), moving=self.moving or moving)


@dataclass(frozen=True, eq=False)
class ExtendedKeys:
    """A dimension of keys with a sink behind them.

    Attributes:
        label: of keys and sink together.
        keys: the dimension as it is without the sink.
    """

    label: Label
    keys: Dim


@dataclass(frozen=True, eq=False)
class Weights:
    """The softmax of scores over the labels ``keys``.

    Attributes:
        token: number of what is open until the weights meet values.
        taken: the scores themselves, where they are no known affine function of the product.
        original: the weights as the softmax gave them, where the scores are taken as they are.
    """

    scores: Scores
    dims: Dims
    keys: Dim
    path: Path
    token: int
    taken: Tensor | None = None
    original: LabelledTensor | None = None
    broken: str | None = None


@dataclass(frozen=True, eq=False)
class Reduction:
    """A largest score, which a softmax cannot see."""

    scores: Scores


@dataclass(frozen=True, eq=False)
class AffineScores:
    """scores = softcap·tanh(coefficient · product / softcap) + log-weight, laid out as (batch, head, query, key)."""

    coefficient: float | Tensor
    log_weight: Tensor | None
    softcap: float | None


def affine(scores: Scores, groups: Sequence[Dim]) -> AffineScores | None:
    """All steps together; None where the scores are no affine function of the product after all."""
    coefficient: float | Tensor = 1.0
    bias: float | Tensor = 0.0
    hidden: Tensor | None = None
    coefficient_in_cap: float | None = None
    for step in scores.steps:
        value = _laid_out(step, groups)
        if step.kind == "mul":
            coefficient = coefficient * value
            bias = bias * value
        elif step.kind == "add":
            bias = bias + value
            hidden = _either(hidden, _hides(value))
        elif step.kind == "hide":
            hidden = _either(hidden, value if isinstance(value, Tensor) else torch.tensor(bool(value)))
        elif isinstance(coefficient, Tensor) or isinstance(bias, Tensor):
            return None
        elif bias or hidden is not None or coefficient_in_cap:
            return None  # a cap is known of the product times one number alone
        else:
            coefficient_in_cap = coefficient
            coefficient = 1.0
    if isinstance(coefficient, Tensor):
        shared = _without_keys(coefficient, hidden)
        if shared is None or coefficient_in_cap is not None:
            return None
        coefficient = shared
    log_weight = _log_weight(bias, hidden)
    if coefficient_in_cap is not None:
        assert isinstance(coefficient, float)
        # c · tanh(a · product) = c · tanh((a · c) · product / c), so that the cap is c.
        return AffineScores(coefficient_in_cap * coefficient, log_weight, softcap=coefficient)
    return AffineScores(coefficient, log_weight, softcap=None)


def _laid_out(step: ScoreStep, groups: Sequence[Dim]) -> Tensor | float:
    """The value of a step, a tensor with one dimension for each group of labels; integers become float32."""
    if not isinstance(step.value, Tensor):
        return step.value
    assert step.dims is not None
    value = merged(LabelledTensor(step.value, step.dims), groups, expand=False)
    return value if value.dtype in (torch.bool, torch.float64) else value.float()


def _either(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """Where one of two masks, or both, are true; None where there is neither."""
    if left is None:
        return right
    return left if right is None else left | right


def _hides(value: Tensor | float) -> Tensor | None:
    """Where an additive mask hides keys; None where it hides none."""
    if not isinstance(value, Tensor):
        return None
    least = float(value.min()) if value.numel() else 0.0
    if least <= HIDES:
        return as_low_as_a_mask(value)
    if least <= HIDES_ALONE and bool(((value == 0) | (value == least)).all()):
        return value == least
    return None


def as_low_as_a_mask(log_weight: Tensor) -> Tensor:
    """Which log-weights of rows of keys hide a key; not those to which a bias by position falls in small steps."""
    hidden = log_weight <= HIDES
    falls_in_steps = above_gap(log_weight) & (log_weight.amax(-1, keepdim=True) > HIDES)
    return hidden & ~falls_in_steps


def _without_keys(coefficient: Tensor, hidden: Tensor | None) -> Tensor | None:
    """A coefficient that visible keys share, with one entry in place of the keys; None where they do not share it."""
    if coefficient.shape[-1] == 1:
        return coefficient
    visible = torch.ones_like(coefficient, dtype=torch.bool) if hidden is None else ~hidden
    coefficient, visible = torch.broadcast_tensors(coefficient, visible)
    largest = coefficient.masked_fill(~visible, -torch.inf).amax(-1, keepdim=True)
    if not bool(((coefficient == largest) | ~visible).all()):
        return None
    return torch.where(largest > -torch.inf, largest, 1.0)


def _log_weight(bias: Tensor | float, hidden: Tensor | None) -> Tensor | None:
    """Boolean where that says everything, else float with −inf for hidden keys; a constant is no weight."""
    if isinstance(bias, Tensor):
        shown = bias if hidden is None else bias.masked_fill(hidden, 0.0)
        if bool(shown.any()):
            return shown if hidden is None else shown.masked_fill(hidden, -torch.inf)
    return None if hidden is None else ~hidden
