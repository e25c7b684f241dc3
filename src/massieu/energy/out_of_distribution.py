"""How foreign a state is to a memory: out-of-distribution scores that are free energies (N14)."""

import math
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from massieu.energy.base import promoted
from massieu.energy.hopfield import HopfieldEnergy
from massieu.energy.rise import rise
from massieu.foundation.arguments import check_one_device, check_shape, choice, floating, instance, integers, positive
from massieu.foundation.transforms import every, unwrapped
from massieu.foundation.values import align
from massieu.measures import Atoms, Measure

_NEEDS = {"energy": ((), ()), "she": (("memory",), ("label",)), "hopfield_boosting": (("memory", "outliers"), ())}
"""What each kind needs of memory, outliers and label, and what it can use."""


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
        memory: What is familiar: a measure, or patterns of weight one.
        outliers: A memory of what is known to be foreign.
        label: Indices of patterns.
        scale: The inverse temperature, one for each batch item or one for all; by default 1 for logits, d^-½ for features.

    Raises:
        ValueError: no such kind; what it needs is missing, or something it does not use is given; shapes that do not fit.
        TypeError: the memory is no measure; beside a label, no set of patterns.

    Example:
        >>> import torch
        >>> from massieu.energy import ood_score
        >>> near, far = ood_score(torch.eye(2), kind="she", memory=torch.tensor([[1.0, 0.0]]))
        >>> bool(far > near)
        True
    """
    floating("state", state)
    choice("kind", kind, *_NEEDS)
    given = {"memory": memory, "outliers": outliers, "label": label}
    needed, optional = _NEEDS[kind]
    for name, value in given.items():
        if value is None and name in needed:
            raise ValueError(f"ood_score of kind {kind!r} needs {name}")
        if value is not None and name not in (*needed, *optional):
            raise ValueError(f"ood_score of kind {kind!r} does not use {name}")
    if memory is None:
        logits = promoted(state)
        rate = positive("scale", 1.0 if scale is None else scale)
        if logits.ndim == 0 or rate.shape != logits.shape[: rate.ndim] or rate.ndim >= logits.ndim:
            raise ValueError(
                f"scale must be one number or have the batch's shape, the first dimensions of the state's "
                f"{tuple(logits.shape)} but for the last, got {tuple(rate.shape)}"
            )
        check_one_device(scale=rate, state=logits)
        rate = align(rate.to(logits), logits.ndim - 1)
        return -torch.logsumexp(logits * rate.unsqueeze(-1), -1) / rate
    if label is not None:
        return -_familiarity(state, memory, label)
    if outliers is not None:
        return _excess(state, outliers, memory, scale)
    above, ground = _free(state, memory, scale)
    return -(above + ground)


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
    gap = _excess(state, energy.memory, outliers, energy.scale)
    rate = align(promoted(energy.scale), gap.ndim)
    return -2 * (_log_cosh(0.5 * rate * gap) + math.log(2)) / rate


def _log_cosh(y: Tensor) -> Tensor:
    """log cosh y, with a slope that keeps its digits near 0: it would be a difference of halves."""
    near = y.abs() < 1
    inner, outer = torch.where(near, y, 0.0), torch.where(near, 1.0, y).abs()
    return torch.where(
        near, 0.5 * torch.log1p(inner.sinh().square()), outer + torch.log1p((-2 * outer).exp()) - math.log(2)
    )


def _excess(state: Tensor, first: Measure | Tensor, second: Measure | Tensor, scale: Tensor | float | None) -> Tensor:
    """(A_first(scale·x) − A_second(scale·x))/scale: what both have at 0 goes first, so that a small rest keeps its digits."""
    (own, ground), (other, level) = (_free(state, memory, scale) for memory in (first, second))
    return (own - other) + (ground - level)


def _free(state: Tensor, memory: Measure | Tensor, scale: Tensor | float | None) -> tuple[Tensor, Tensor]:
    """The parts of A(scale·x)/scale: what it is above that at 0, and that."""
    energy = HopfieldEnergy.create(memory, scale=scale)
    energy._check_shape(energy._given(state))
    rate, state = promoted(energy.scale), promoted(state)
    above = rise(energy.memory, state, rate)
    origin = state.new_zeros((*state.shape[: rate.ndim], state.shape[-1]))
    return above, align(energy.memory.log_partition(origin) / rate, above.ndim)


def _familiarity(state: Tensor, memory: Any, label: Tensor) -> Tensor:
    """x·x_label."""
    memory = Atoms.create(memory) if isinstance(memory, Tensor) else memory
    instance("memory", memory, Atoms, "class means as patterns, where a label is given")
    batch, points = memory.batch_shape, promoted(memory.points)
    count = points.shape[-2]
    check_shape("label", integers("label", label), state.shape[:-1])
    if not every((label >= 0) & (label < count)):
        numbers = unwrapped(label)
        raise ValueError(f"label must lie in 0 … {count - 1}, got {int(numbers.min())} … {int(numbers.max())}")
    flat = label.long().reshape(*batch, -1)
    chosen = points.take_along_dim(flat.unsqueeze(-1), -2).reshape(state.shape)
    return (promoted(state) * chosen).sum(-1)
