"""How foreign a state is to a memory: out-of-distribution scores that are free energies (N14)."""

import math
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from massieu.energy.base import promoted
from massieu.energy.hopfield import HopfieldEnergy
from massieu.energy.rise import rise
from massieu.foundation.arguments import check_one_device, check_shape, choice, floating, instance, integers, positive
from massieu.foundation.transforms import all_true, unwrapped
from massieu.foundation.values import align
from massieu.measures import Atoms, Measure

_NEEDED = {"energy": (), "she": ("memory",), "hopfield_boosting": ("memory", "outliers")}
"""The arguments that each kind of score needs, of memory, outliers and label."""
_OPTIONAL = {"energy": (), "she": ("label",), "hopfield_boosting": ()}
"""The arguments that each kind of score can use but does not need."""


def ood_score(
    state: Float[Tensor, "*batch_query d"],
    *,
    kind: Literal["energy", "she", "hopfield_boosting"] = "energy",
    memory: Measure | Float[Tensor, "*batch N d"] | None = None,
    outliers: Measure | Float[Tensor, "*batch O d"] | None = None,
    label: Int[Tensor, "*batch_query"] | None = None,
    scale: Float[Tensor, "*batch"] | float | None = None,
) -> Float[Tensor, "*batch_query"]:
    """Out-of-distribution score of states against a memory: larger is more foreign; +inf where the whole memory is masked.

    - "energy", of a classifier's logits f: −T·lse(f/T), T = 1/scale (Liu et al., arXiv 2010.03759). No memory.
    - "she", of features x: −A(scale·x)/scale, the simplified Hopfield energy of stored features (Zhang et al., ICLR 2023).
      With `label`, the class which the classifier chose, the memory holds one mean feature for each class, and the score is
      −x·x_label. With the keys of an attention layer as memory it is −log Z/scale: how foreign a token is to its context.
    - "hopfield_boosting", of features: (A_outliers(scale·x) − A(scale·x))/scale (arXiv 2405.08766).

    Args:
        state: Logits or features.
        kind: Which score.
        memory: Familiar states: a measure, or patterns of weight one.
        outliers: Foreign states: a measure, or patterns of weight one.
        label: Indices of patterns.
        scale: The inverse temperature, one for each batch item or one for all; by default 1 for logits, d^-½ for features.

    Raises:
        ValueError: the kind is unknown, an argument that it needs is missing, one that it does not use is given, or shapes
            do not fit.
        TypeError: the memory is not a measure or, with `label`, not a set of patterns.

    Example:
        >>> import torch
        >>> from massieu.energy import ood_score
        >>> near, far = ood_score(torch.eye(2), kind="she", memory=torch.tensor([[1.0, 0.0]]))
        >>> bool(far > near)
        True
    """
    floating("state", state)
    choice("kind", kind, *_NEEDED)
    arguments = {"memory": memory, "outliers": outliers, "label": label}
    for name, value in arguments.items():
        if value is None and name in _NEEDED[kind]:
            raise ValueError(f"ood_score of kind {kind!r} needs {name}")
        if value is not None and name not in (*_NEEDED[kind], *_OPTIONAL[kind]):
            raise ValueError(f"ood_score of kind {kind!r} does not use {name}")
    if memory is None:
        return _energy_of_logits(state, scale)
    if label is not None:
        return -_score_at_label(state, memory, label)
    if outliers is not None:
        return _difference(state, outliers, memory, scale)
    free = _scaled_log_partition(state, memory, scale)
    return -(free.rise + free.at_origin)


def _energy_of_logits(state: Tensor, scale: Tensor | float | None) -> Tensor:
    """−lse(scale·f)/scale of logits f."""
    logits = promoted(state)
    scale = positive("scale", 1.0 if scale is None else scale)
    if logits.ndim == 0 or scale.shape != logits.shape[: scale.ndim] or scale.ndim >= logits.ndim:
        raise ValueError(
            f"scale must be one number or have the batch's shape, the first dimensions of the state's "
            f"{tuple(logits.shape)} but for the last, got {tuple(scale.shape)}"
        )
    check_one_device(scale=scale, state=logits)
    scale = align(scale.to(logits), logits.ndim - 1)
    return -torch.logsumexp(logits * scale.unsqueeze(-1), -1) / scale


def boosting_energy(
    state: Float[Tensor, "*batch_query d"],
    memory: Measure | Float[Tensor, "*batch N d"],
    outliers: Measure | Float[Tensor, "*batch O d"],
    *,
    scale: Float[Tensor, "*batch"] | float | None = None,
) -> Float[Tensor, "*batch_query"]:
    """log(p(1 − p))/scale, p the memory's share of the attention over both: Hopfield Boosting's energy (arXiv 2405.08766).

    It equals −2 lse(both) + lse(memory) + lse(outliers), is largest, −log(4)/scale, on the boundary between the two, and
    weights the samples near it. Raises as `ood_score`.

    Example:
        >>> import torch
        >>> from massieu.energy import boosting_energy
        >>> inside, outside = torch.tensor([[1.0]]), torch.tensor([[-1.0]])
        >>> round(boosting_energy(torch.tensor([0.0]), inside, outside, scale=1.0).exp().item(), 3)  # ½·½
        0.25
    """
    energy = HopfieldEnergy.create(memory, scale=scale)
    floating("state", state)
    difference = _difference(state, energy.memory, outliers, energy.scale)
    scale = align(promoted(energy.scale), difference.ndim)
    # With p = σ(scale·difference), p(1 − p) = 1/(2 cosh(scale·difference/2))².
    return -2 * (_log_cosh(0.5 * scale * difference) + math.log(2)) / scale


def _log_cosh(y: Tensor) -> Tensor:
    """log cosh y, whose derivative keeps its digits near 0: the form for large y would take it as a difference of halves."""
    near = y.abs() < 1
    inner = torch.where(near, y, 0.0)
    outer = torch.where(near, 1.0, y).abs()
    # cosh² = 1 + sinh²; and cosh y = e^|y| (1 + e^{−2|y|})/2, which does not overflow.
    small = 0.5 * torch.log1p(inner.sinh().square())
    large = outer + torch.log1p((-2 * outer).exp()) - math.log(2)
    return torch.where(near, small, large)


def _difference(
    state: Tensor, first: Measure | Tensor, second: Measure | Tensor, scale: Tensor | float | None
) -> Tensor:
    """(A_first(scale·x) − A_second(scale·x))/scale."""
    minuend = _scaled_log_partition(state, first, scale)
    subtrahend = _scaled_log_partition(state, second, scale)
    # Like parts are subtracted first: the values at 0 may be large, and would swallow a small difference of the rises.
    return (minuend.rise - subtrahend.rise) + (minuend.at_origin - subtrahend.at_origin)


class _ScaledLogPartition(NamedTuple):
    """A(scale·x)/scale as a sum of two parts."""

    rise: Tensor
    """(A(scale·x) − A(0))/scale."""
    at_origin: Tensor
    """A(0)/scale."""


def _scaled_log_partition(state: Tensor, memory: Measure | Tensor, scale: Tensor | float | None) -> _ScaledLogPartition:
    energy = HopfieldEnergy.create(memory, scale=scale)
    energy._check_shape(energy._checked_state(state))
    scale = promoted(energy.scale)
    state = promoted(state)
    above_origin = rise(energy.memory, state, scale)
    origin = state.new_zeros((*state.shape[: scale.ndim], state.shape[-1]))
    at_origin = energy.memory.log_partition(origin) / scale
    return _ScaledLogPartition(above_origin, align(at_origin, above_origin.ndim))


def _score_at_label(state: Tensor, memory: Any, label: Tensor) -> Tensor:
    """x·x_label, (*batch, *query)."""
    if isinstance(memory, Tensor):
        memory = Atoms.create(memory)
    instance("memory", memory, Atoms, "class means as patterns, where a label is given")
    points = promoted(memory.points)
    num_classes = points.shape[-2]
    check_shape("label", integers("label", label), state.shape[:-1])
    if not all_true((label >= 0) & (label < num_classes)):
        numbers = unwrapped(label)
        raise ValueError(f"label must lie in 0 … {num_classes - 1}, got {int(numbers.min())} … {int(numbers.max())}")
    # All query dimensions as one, to pick a pattern of the batch item for each: (*batch, queries, d), then the state's shape.
    flat = label.long().reshape(*memory.batch_shape, -1)
    chosen = points.take_along_dim(flat.unsqueeze(-1), -2).reshape(state.shape)
    return (promoted(state) * chosen).sum(-1)
