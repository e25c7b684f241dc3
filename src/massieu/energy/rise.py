"""(A(scale·x) − A(0))/scale with all its digits, however small the scale: what a Hopfield energy has of its memory.

Where the scores are small the difference cancels, and its rounding is divided by the scale: in float32 at a scale of 1e-3 two
digits are lost, at 1e-8 all. There it is the integral of the mean along the way, ∫₀¹ ∇A(t·scale·x)·x dt, in which no
numbers are subtracted and none is divided by the scale. Any potential has a mean, so that none needs a form of its own, the
memory of fused attention stays linear, and derivatives in everything that A depends on keep their digits too.
"""

import numpy as np
import torch
from jaxtyping import Float
from numpy.polynomial.legendre import legvander
from torch import Tensor

from massieu.energy.base import Potential
from massieu.foundation.numerics import GAUSS_LEGENDRE
from massieu.foundation.transforms import any_true, values_are_readable
from massieu.foundation.values import align

_CANCELS = 0.25
"""A difference below this share of 1 + |minuend| + |subtrahend| loses digits."""
_AGREE = 64
"""Number of roundings of the difference by which the integral may differ; a mean that changes between nodes exceeds it."""
_NODES = [node for node, _ in GAUSS_LEGENDRE]
_WEIGHTS = [weight for _, weight in GAUSS_LEGENDRE]
_LAST_COEFFICIENTS: list[list[float]] = (
    legvander(2 * np.array(_NODES) - 1, 7)[:, 6:] * np.array(_WEIGHTS)[:, None] * np.array([13.0, 15.0])
).tolist()
"""(8, 2): maps values at the nodes to the last two of their eight Legendre coefficients, (2n + 1)∫ f P_n for n = 6, 7."""


def rise(
    memory: Potential,
    state: Float[Tensor, "*batch_query_event"],
    scale: Float[Tensor, "*batch"],
) -> Float[Tensor, "*batch_query"]:
    """(A(scale·state) − A(0))/scale, and 0 for a memory of mass zero.

    Eager code integrates where an item needs it; compiled code, which cannot look, computes both forms.
    """
    eta = state * align(scale, state.ndim)
    origin = eta.new_zeros((*eta.shape[: scale.ndim], *memory.event_shape))
    at_eta = log_partition(memory, eta)
    at_origin = align(log_partition(memory, origin), at_eta.ndim)
    scale = align(scale, at_eta.ndim)
    difference = at_eta - at_origin
    with torch.no_grad():
        size = 1 + at_eta.abs() + at_origin.abs()
        cancels = difference.abs() < _CANCELS * size
    if values_are_readable(cancels) and not any_true(cancels):
        return difference / scale
    integral, last_coefficient = _integral(memory, state, eta)
    with torch.no_grad():
        rounding = torch.finfo(at_eta.dtype).eps * size / scale
        # Coefficients of an analytic function fall geometrically, so that the rule's error, of order 16, is about the
        # square of the last in units of the largest.
        error = last_coefficient.square() / integral.abs().clamp_min(torch.finfo(at_eta.dtype).tiny)
        agrees = (integral - difference / scale).abs() <= _AGREE * rounding
        integrate = cancels & agrees & (torch.minimum(error, last_coefficient) <= rounding)
    return torch.where(integrate, integral, difference / scale)


def log_partition(memory: Potential, eta: Tensor) -> Tensor:
    """A(eta), and 0 for a memory of mass zero, which remembers nothing."""
    value = memory.log_partition(eta)
    return torch.where(value == -torch.inf, 0.0, value)


def _integral(memory: Potential, state: Tensor, eta: Tensor) -> tuple[Tensor, Tensor]:
    """∫₀¹ ∇A(t·eta)·state dt by Gauss's rule of eight nodes, and the size of its last two Legendre coefficients."""
    event_dims = len(memory.event_shape)
    # The nodes are one more query dimension: (*batch, *query, 8, *event).
    node_dim = eta.ndim - event_dims
    nodes = eta.new_tensor(_NODES).reshape(-1, *[1] * event_dims)
    means = memory.mean(eta.unsqueeze(node_dim) * nodes)
    slopes = (means * state.unsqueeze(node_dim)).sum(tuple(range(-event_dims, 0)))
    last_coefficient = (slopes.detach() @ slopes.new_tensor(_LAST_COEFFICIENTS)).abs().amax(-1)
    return slopes @ slopes.new_tensor(_WEIGHTS), last_coefficient
