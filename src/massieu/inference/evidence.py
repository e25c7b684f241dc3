"""Lower bounds of an evidence: the ELBO and the importance-weighted bound of any joint density and proposal."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import check_shape, floating, whole_number
from massieu.foundation.doors import door, function
from massieu.foundation.short_repr import fields_html, fields_repr
from massieu.foundation.transforms import any_true
from massieu.inference.resampling import effective_sample_size

LogDensity = Callable[[Tensor], Tensor]
"""latent (draws, *items, *event) ↦ log-density (draws, *items)."""


class EvidenceResult(NamedTuple):
    """Bounds and an estimate of log Z = log ∫ joint(z) dz for each item, in nats, each with its standard error.

    An error is NaN where its number rests on one draw or group, or is −inf.
    """

    elbo: Float[Tensor, "*items"]
    """The mean of log joint − log proposal: unbiased for the evidence lower bound, log Z − KL(proposal ‖ posterior)."""
    elbo_error: Float[Tensor, "*items"]
    importance_bound: Float[Tensor, "*items"]
    """Unbiased for the importance-weighted bound of `samples` draws: between the ELBO and log Z, and nearer to log Z the
    more samples."""
    importance_error: Float[Tensor, "*items"]
    log_partition: Float[Tensor, "*items"]
    """log of the mean of all weights. exp of it is unbiased for Z; it itself is biased down."""
    log_partition_error: Float[Tensor, "*items"]
    """The relative standard error of Z; not to be trusted if the effective sample size is a few draws."""
    effective_sample_size: Float[Tensor, "*items"]
    """(Σ w)²/Σ w² of all draws."""

    __repr__ = fields_repr
    _repr_html_ = fields_html


@door(log_joint=function, log_proposal=function, samples=whole_number)
def evidence_bounds(
    log_joint: LogDensity, log_proposal: LogDensity, latent: Float[Tensor, "draws *items_event"], *, samples: int = 1
) -> EvidenceResult:
    """The ELBO and the importance-weighted bound of log Z, from draws of the proposal (Shim §2.4).

    With w = joint(z)/proposal(z) for z drawn from the proposal, the ELBO is E log w, and the importance-weighted bound of K
    samples (Burda, Grosse and Salakhutdinov, 2016) is E log of the mean of K weights. In the data x of a model,
    joint(z) = p(x, z), and Z = p(x). If z is a differentiable function of the proposal's parameters, so are the bounds.

    Args:
        log_joint: log of the joint density, as a function of the latent alone; unnormalised in z.
        log_proposal: log of the proposal's density, normalised.
        latent: Independent draws from the proposal, one after the other in the first dimension.
        samples: K: how many draws one importance-weighted estimate takes; divides the number of draws.

    Raises:
        TypeError: a function that returns no floating-point tensor.
        ValueError: log-densities of different shapes, or without the draws; NaN, +inf, or a draw to which the proposal
            itself gives no density; `samples` does not divide the draws.

    Example:
        >>> import torch
        >>> from massieu.inference import evidence_bounds
        >>> proposal = torch.distributions.Normal(0.0, 1.0)
        >>> joint = lambda z: proposal.log_prob(z) + 2.0  # Z = e², and the proposal is the posterior
        >>> bounds = evidence_bounds(joint, proposal.log_prob, proposal.sample((8,)), samples=4)
        >>> round(bounds.elbo.item(), 4), round(bounds.importance_bound.item(), 4)
        (2.0, 2.0)
    """
    draws = floating("latent", latent).shape[0] if latent.ndim else 0
    whole_number("samples", samples, least=1)
    if draws == 0 or draws % samples:
        raise ValueError(f"samples must divide the number of draws, a positive one, got {samples} and {draws}")
    log_weight = _log_weights(log_joint, log_proposal, latent)
    log_mean = torch.logsumexp(log_weight.unflatten(0, (-1, samples)), 1) - math.log(samples)
    log_partition = torch.logsumexp(log_weight, 0) - math.log(draws)
    # Weights relative to their mean: their standard deviation is the relative error of one draw.
    relative = (log_weight - log_partition).exp()
    elbo, elbo_error = _mean_and_error(log_weight)
    importance_bound, importance_error = _mean_and_error(log_mean)
    return EvidenceResult(
        elbo=elbo,
        elbo_error=elbo_error,
        importance_bound=importance_bound,
        importance_error=importance_error,
        log_partition=log_partition,
        log_partition_error=_mean_and_error(relative)[1],
        effective_sample_size=effective_sample_size(log_weight.movedim(0, -1)),
    )


def _log_weights(log_joint: LogDensity, log_proposal: LogDensity, latent: Tensor) -> Float[Tensor, "draws *items"]:
    """log joint − log proposal of each draw, in at least float32; checked."""
    joint = floating("log_joint(latent)", log_joint(latent))
    proposal = floating("log_proposal(latent)", log_proposal(latent))
    if joint.ndim == 0 or len(joint) != len(latent) or joint.ndim > latent.ndim:
        raise ValueError(
            f"log_joint must return one number for each draw, (draws, *items) with {len(latent)} draws, "
            f"got shape {tuple(joint.shape)}"
        )
    check_shape("log_proposal(latent)", proposal, joint.shape)
    for name, value in (("log_joint(latent)", joint), ("log_proposal(latent)", proposal)):
        if any_true(value.isnan()):
            raise ValueError(f"{name} must not be NaN, which it is for {int(value.isnan().sum())} draws and items")
    if any_true(proposal == -torch.inf):
        raise ValueError("latent must be drawn from the proposal, which gives one of the draws the density 0")
    if any_true(joint == torch.inf) or any_true(proposal == torch.inf):
        raise ValueError("log-densities must be below +inf at every draw")
    dtype = torch.promote_types(torch.promote_types(joint.dtype, proposal.dtype), torch.float32)
    return joint.to(dtype) - proposal.to(dtype)


def _mean_and_error(values: Float[Tensor, "n *items"]) -> tuple[Float[Tensor, "*items"], Float[Tensor, "*items"]]:
    """The mean and its standard error, without derivative; NaN for one value."""
    count = len(values)
    constant = values.detach()
    error = constant.std(0) / math.sqrt(count) if count > 1 else torch.full_like(constant[0], torch.nan)
    return values.mean(0), error
