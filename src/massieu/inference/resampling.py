"""Resampling of weighted particles: what turns annealed importance sampling into sequential Monte Carlo (S19)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from massieu.foundation.arguments import check_values, floating
from massieu.foundation.doors import door


def effective_sample_size(log_weight: Float[Tensor, "*groups size"]) -> Float[Tensor, "*groups"]:
    """Effective sample size (Σ w)²/Σ w² of weighted particles: between 1 and their number, 0 where no weight is left.

    Example:
        >>> import torch
        >>> from massieu.inference import effective_sample_size
        >>> round(effective_sample_size(torch.tensor([0.0, 0.0, -torch.inf])).item(), 4)
        2.0
    """
    _check_weights(log_weight)
    total = torch.logsumexp(log_weight, -1)
    return torch.where(total == -torch.inf, 0.0, (2 * total - torch.logsumexp(2 * log_weight, -1)).exp())


@door
@torch.no_grad()
def resample(
    log_weight: Float[Tensor, "*groups size"], generator: torch.Generator | None = None
) -> Int[Tensor, "*groups size"]:
    """Resample weighted particles: indices in which particle j appears `size`·w_j/Σw times, rounded up or down.

    Draws lie on a grid that one uniform number a group shifts (systematic resampling), so the number of copies has that mean
    and nearly always less variance than that of independent draws.

    Args:
        log_weight: Of each particle; −inf for weight 0, which is never drawn.

    Raises:
        ValueError: weights that are NaN or +inf, or all 0 in a group.

    Example:
        >>> import torch
        >>> from massieu.inference import resample
        >>> resample(torch.tensor([0.0, -torch.inf, -torch.inf])).tolist()  # the one that has all the weight
        [0, 0, 0]
    """
    _check_weights(log_weight)
    if not bool(torch.logsumexp(log_weight, -1).isfinite().all()):
        raise ValueError("log_weight must hold a finite number in each group: one is NaN or +inf, or all are −inf")
    share = torch.softmax(log_weight.double(), -1)
    size = share.shape[-1]
    shift = torch.rand((*share.shape[:-1], 1), dtype=share.dtype, device=share.device, generator=generator)
    # Below 1, so that the first sum above it is that of a particle with weight.
    place = ((torch.arange(size, device=share.device) + shift) / size).clamp(max=1 - 2**-53)
    total = share.cumsum(-1)
    return torch.searchsorted(total / total[..., -1:], place, right=True)


def _check_weights(log_weight: Tensor) -> None:
    """Raises TypeError or ValueError unless these are log-weights of particles."""
    if floating("log_weight", log_weight).ndim == 0 or log_weight.shape[-1] == 0:
        raise ValueError(
            f"log_weight must have shape (*groups, size) with a particle or more, got {tuple(log_weight.shape)}"
        )
    check_values(log_weight=log_weight)
