"""The KL divergence between laws of two families, estimated from draws."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import real_tensor
from massieu.foundation.doors import MEASURE, door
from massieu.foundation.short_repr import fields_html, fields_repr
from massieu.measures.base import Measure


class SampledKLResult(NamedTuple):
    """An estimate of a KL divergence, in nats, and its standard error."""

    value: Float[Tensor, "*batch_query"]
    standard_error: Float[Tensor, "*batch_query"]

    __repr__ = fields_repr
    _repr_html_ = fields_html


def _parameter(name: str, value: object) -> object:
    """The value, if it is no measure; else a TypeError that shows the order of the arguments."""
    if isinstance(value, Measure):
        raise TypeError(
            f"{name} must be a parameter of the measure before it, got the measure {type(value).__name__}: "
            "sampled_kl(p, eta_p, q, eta_q)"
        )
    return value


@door(p=MEASURE, q=MEASURE, eta_p=_parameter, eta_q=_parameter)
def sampled_kl(
    p: Measure,
    eta_p: Float[Tensor, "*batch_query_event"],
    q: Measure,
    eta_q: Float[Tensor, "*batch_query_event"],
    *,
    draws: int = 4096,
    generator: torch.Generator | None = None,
) -> SampledKLResult:
    """KL(p_{eta_p} ‖ q_{eta_q}) between laws of two families: the mean of log p − log q over draws from p, with its error.

    Unbiased, without a gradient. Within one family ``p.kl(eta_p, eta_q)`` is exact. Of a tail of log p − log q that the draws
    do not show, the standard error says nothing. +inf if a draw lies outside q's support.

    Args:
        p, q: Measures on one space, both discrete or both with densities.
        eta_p, eta_q: Their natural parameters.
        draws: How many, for each parameter; at least 2.

    Raises:
        ValueError: measures on different spaces, a discrete one and one with a density, fewer than 2 draws.
        MissingFormError: p has no sampler, or one of them no density.

    Example:
        >>> import torch
        >>> from massieu import measures
        >>> normal = measures.Gaussian.create([0.0], 1.0)
        >>> wide = measures.Gaussian.create([0.0], 2.0)
        >>> zero = torch.zeros(1)
        >>> found = measures.sampled_kl(normal, zero, wide, zero, generator=torch.Generator().manual_seed(0))
        >>> bool((found.value - 0.0966).abs() < 5 * found.standard_error)  # ½(log 2 + ½ − 1) = 0.0966
        True
    """
    if draws < 2:
        raise ValueError(f"draws must be at least 2, got {draws}")
    if p.event_shape != q.event_shape:
        raise ValueError(
            f"both measures must be on one space, got {tuple(p.event_shape)} for p and {tuple(q.event_shape)} for q"
        )
    if p._reference != q._reference:
        kinds = {"counting": "is discrete", "lebesgue": "has a density"}
        said = [
            kinds.get(measure._reference, f"has a density of the kind {measure._reference!r}") for measure in (p, q)
        ]
        raise ValueError(f"the divergence between these laws is infinite: p {said[0]}, and q {said[1]}")
    eta_p = real_tensor("eta_p", eta_p)
    with torch.no_grad():
        points = p.sample(eta_p, draws, generator=generator)
        ratio = p.log_prob(eta_p, points) - q.log_prob(eta_q, points)
    value = ratio.mean(0)
    error = ratio.std(0) / draws**0.5
    return SampledKLResult(value, error.where(value.isfinite(), torch.nan))
