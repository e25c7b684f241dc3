"""Attention sinks as prior pseudo-observations (X4)."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from massieu import ops
from massieu.foundation.arguments import check_finite, check_one_device, described
from massieu.foundation.transforms import every


class PriorAttention(NamedTuple):
    """What `attention_with_prior` returns."""

    output: Float[Tensor, "*query E"]
    """(Z·attention + κ₀v₀)/(Z + κ₀), in the query's dtype."""
    log_partition: Float[Tensor, "*query"]
    """log(Z + κ₀): the posterior's strength, which averages leave out (trap 24)."""
    prior_share: Float[Tensor, "*query"]
    """κ₀/(Z + κ₀): the sink's share of the attention, which falls as the context grows."""


def attention_with_prior(
    query: Float[Tensor, "B H L D"],
    key: Float[Tensor, "B Hk N D"],
    value: Float[Tensor, "B Hk N E"],
    *,
    prior_value: Float[Tensor, "*head E"],
    log_strength: Float[Tensor, "*head"],
    log_weight: Float[Tensor, "..."] | Bool[Tensor, "..."] | None = None,
    scale: float | Tensor | None = None,
    is_causal: bool = False,
) -> PriorAttention:
    """`ops.attention` with a prior token: key at the origin, logit log κ₀, value v₀ (X4, Z3).

    It is a sink of logit b = log κ₀ that has a value. With v₀ = 0 it is the sink of `ops.attention`, which multiplies the
    output by Z/(Z + e^b). With scores of 0 the output is the conjugate posterior mean of κ₀ tokens of value v₀ and those
    attended to; a query that sees no key has the output v₀. Differentiable in everything, in memory linear in N.

    Args:
        query, key, value, log_weight, scale, is_causal: As of `ops.attention`, the query four-dimensional.
        prior_value: v₀ of each head, (H, E), or one for all, (E,).
        log_strength: log κ₀ of each head, (H,), or one for all, a tensor without dimensions; finite.

    Raises:
        ValueError: shapes that do not fit, or as of `ops.attention`.
        TypeError: as of `ops.attention`.
    """
    if not isinstance(query, Tensor) or query.ndim != 4:
        raise ValueError(
            f"query must have shape (B, H, L, D), got {tuple(query.shape) if isinstance(query, Tensor) else described(query)}"
        )
    for name, tensor in (("value", value), ("prior_value", prior_value), ("log_strength", log_strength)):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise TypeError(f"{name} must be a floating-point tensor, got {described(tensor)}")
    if value.ndim != 4:
        raise ValueError(f"value must have shape (B, Hk, N, E), got {tuple(value.shape)}")
    check_one_device(query=query, value=value, prior_value=prior_value, log_strength=log_strength)
    heads, width = query.shape[1], value.shape[-1]
    if prior_value.shape not in (torch.Size((width,)), torch.Size((heads, width))):
        raise ValueError(f"prior_value must have shape {(width,)} or {(heads, width)}, got {tuple(prior_value.shape)}")
    if log_strength.shape not in (torch.Size(), torch.Size((heads,))):
        raise ValueError(f"log_strength must have shape () or {(heads,)}, got {tuple(log_strength.shape)}")
    check_finite(prior_value=prior_value)
    if not every(log_strength.isfinite()):
        raise ValueError("log_strength must be finite; without a prior token, use massieu.ops.attention")
    found = ops.attention(query, key, value, log_weight=log_weight, scale=scale, is_causal=is_causal, sink=log_strength)
    strength = log_strength.to(found.log_partition.dtype).reshape(-1, 1).expand(heads, 1)
    share = (strength - found.log_partition).exp()
    prior = prior_value.to(share.dtype).expand(heads, width).unsqueeze(-2)
    output = found.output + share.unsqueeze(-1) * prior
    return PriorAttention(output.to(found.output.dtype), found.log_partition, share)
