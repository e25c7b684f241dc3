"""A layer of residual attention over fixed keys: tokens climb, they spread, and attention sharpens (S12, X6)."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation import matrices
from massieu.foundation.arguments import floating, instance, number, real
from massieu.foundation.doors import MEASURE, door
from massieu.foundation.short_repr import fields_html, fields_repr
from massieu.measures import Measure


class ExpansionResult(NamedTuple):
    """Changes under T(η) = η + step·∇A(η). For every measure, point and step ≥ 0 all but the last are at least 0 (nats)."""

    points: Float[Tensor, "*batch n d"]
    """T(η)."""
    gain: Float[Tensor, "*batch n"]
    """A(T(η)) − A(η) = first_order + bregman."""
    first_order: Float[Tensor, "*batch n"]
    """step·‖∇A(η)‖²."""
    bregman: Float[Tensor, "*batch n"]
    """B_A(T(η), η) = KL(p_η ‖ p_T(η))."""
    margin: Float[Tensor, "*batch n n"]
    """‖T(x) − T(y)‖² − ‖x − y‖² − step²·‖∇A(x) − ∇A(y)‖² = 2·step·(x − y)·(∇A(x) − ∇A(y)), of all pairs: no two approach."""
    entropy_gain: Float[Tensor, "*batch n"]
    """log det(1 + step·∇²A(η)): its mean over a population is the gain of the population's differential entropy."""
    attention_slope: Float[Tensor, "*batch n"]
    """−ηᵀ∇²A(η)∇A(η): the slope in the step, at 0, of the entropy of p_η relative to h; mostly negative."""

    __repr__ = fields_repr
    _repr_html_ = fields_html


@door(measure=MEASURE, step=real)
def expansion(measure: Measure, points: Float[Tensor, "*batch n d"], step: float) -> ExpansionResult:
    """How much one layer raises the log-partition A at each point, and how it spreads points.

    Args:
        measure: The law of the keys, each one vector. It is fixed; where tokens are keys as well, they move it.
        points: η.
        step: At least 0; the inequalities hold for large ones, too.

    Raises:
        ValueError: a `step` that is negative or not finite, points without the shape (*batch, n, d), or what the measure
            does not take.
        TypeError: no measure, no floating-point tensor, or a step that is no number.
        DomainError: T(η) leaves the measure's domain, where A is infinite.

    Example:
        >>> import torch
        >>> from massieu.measures import Gaussian
        >>> from massieu.papers.theory import expansion
        >>> unit = Gaussian.create(torch.zeros(1), torch.eye(1))
        >>> result = expansion(unit, torch.tensor([[2.0], [-2.0]]), step=0.5)
        >>> result.points.flatten().tolist(), result.first_order.tolist()
        ([3.0, -3.0], [2.0, 2.0])
    """
    instance("measure", measure, Measure, "a massieu.measures.Measure")
    number("step", step, least=0)
    if floating("points", points).ndim != len(measure.batch_shape) + 2:
        needed = f"{(*measure.batch_shape, 'n', *measure.event_shape)}"
        raise ValueError(f"points must have shape {needed}, got {tuple(points.shape)}")
    mean = measure.mean(points)
    fisher = measure.fisher(points)
    points = points.to(mean.dtype)
    after = points + step * mean
    # (x − y)·(∇A(x) − ∇A(y)) of all pairs, from the products x·∇A(y).
    products = points @ mean.mT  # (*batch, n, n)
    diagonal = products.diagonal(dim1=-2, dim2=-1)
    margin = 2 * step * (diagonal.unsqueeze(-1) + diagonal.unsqueeze(-2) - products - products.mT)
    identity = torch.eye(points.shape[-1], dtype=mean.dtype, device=mean.device)
    return ExpansionResult(
        points=after,
        gain=measure.log_partition(after) - measure.log_partition(points),
        first_order=step * mean.square().sum(-1),
        bregman=measure.kl(points, after),
        margin=margin,
        entropy_gain=matrices.log_determinant(identity + step * fisher),
        attention_slope=-(points * (fisher @ mean.unsqueeze(-1)).squeeze(-1)).sum(-1),
    )
