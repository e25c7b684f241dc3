"""In which type of numbers a forward pass computed, and what rounding in it explains."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

ONE_POINT_RANK = 1.0
"""Effective rank of tokens that are one point up to rounding. That of their covariance would be of rounding errors, which fill
every direction.
"""

_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
_HALF_TOLERANCE = 3e-2


@dataclass(frozen=True, eq=False)
class Cloud:
    """Some tokens of a row.

    Attributes:
        dtype: in which they were computed.
    """

    points: Float[Tensor, "n d"]
    dtype: torch.dtype


def tolerance(dtype: torch.dtype) -> float:
    """Largest relative difference that rounding explains, for results in ``dtype``."""
    return _TOLERANCE.get(dtype, _HALF_TOLERANCE)


def relative_difference(value: Float[Tensor, "*shape"], expected: Float[Tensor, "*shape"]) -> float:
    """Largest difference over the largest expected size; NaN where a number of either is not finite, 0 where there is none."""
    if not expected.numel():
        return 0.0
    if not bool(expected.isfinite().all() & value.isfinite().all()):
        return float("nan")
    return float((value - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def coarsest(*dtypes: torch.dtype) -> torch.dtype:
    """The floating-point type that rounds most."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def computed_in(*tensors: Tensor) -> torch.dtype:
    """The type that rounds most, of some floating-point tensors and of the autocast that is active where they are.

    A result may be of a finer type than what it was computed from: models under autocast give float32 as well. So the
    question is asked during the forward pass, where the autocast of the model's own code is active.
    """
    dtypes = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    devices = {tensor.device.type for tensor in tensors}
    casting = [d for d in devices if torch.amp.is_autocast_available(d) and torch.is_autocast_enabled(d)]
    return coarsest(*dtypes, *map(torch.get_autocast_dtype, casting))


def is_one_point(points: Float[Tensor, "*batch n d"], dtype: torch.dtype) -> Bool[Tensor, "*batch"]:
    """Whether the tokens of a cloud differ by no more than rounding makes of one token.

    Let u be half the machine epsilon of ``dtype``, and v that of the type in which sums are added up, which is float32 at
    the coarsest. A coordinate x_j of a token is a sum of about d terms, so that three things round it:

    - Stored, it is off by up to u |x_j|.
    - Each term was stored before, and is off by up to u of itself; independent errors of all make up to u ‖x‖/√d, which is u
      times the size of a coordinate.
    - Each addition rounds a partial sum of about the size of a coordinate: d independent errors of v ‖x‖/√d make v ‖x‖ (the
      √d law of rounding errors, Higham and Mary 2019, theorem 2.4).

    So rounding alone gives coordinate j, over the tokens, a variance of up to about

        u² mean x_j² + (u²/d + v²) mean ‖x‖².

    A cloud is a point where the variance is at most that, as a ratio averaged over the coordinates. Each one is compared with
    its own rounding, so that one huge coordinate does not hide how the others vary.

    Args:
        points: in float64, so that their own variance is exact.
        dtype: in which they were computed (`computed_in`), not the type in which they are given.
    """
    size = points.shape[-1]
    mean_square = torch.linalg.vector_norm(points, dim=(-2, -1)).square() / points.shape[-2]
    # The ratios are at least 0, so a few coordinates are enough where they alone exceed the sum of all that is allowed.
    shown = _ratios_to_rounding(points[..., :_SHOWN_FIRST], mean_square, size, dtype).sum(-1) > size
    if bool(shown.all()):
        return ~shown
    return _ratios_to_rounding(points, mean_square, size, dtype).mean(-1) <= 1


_SHOWN_FIRST = 8


def _ratios_to_rounding(
    points: Float[Tensor, "*batch n few"], mean_square: Float[Tensor, "*batch"], size: int, dtype: torch.dtype
) -> Float[Tensor, "*batch few"]:
    """Variances of some coordinates over the tokens, each as a multiple of what rounding alone may give; see `is_one_point`.

    Args:
        mean_square: mean over the tokens of ‖x‖², all coordinates.
        size: number of all coordinates.
    """
    stored = torch.finfo(dtype).eps / 2
    added = torch.finfo(torch.promote_types(dtype, torch.float32)).eps / 2
    squares = points.square().mean(-2)
    mean_square = mean_square[..., None]
    rounding = stored**2 * (squares + mean_square / size) + added**2 * mean_square
    variance = (points - points[..., :1, :]).var(-2, correction=0)
    # Rounding is 0 only where all tokens are 0.
    return variance / rounding.clamp_min(torch.finfo(torch.float64).tiny)
