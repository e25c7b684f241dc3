"""Bounds on the descent of a Hopfield memory: parts (2) to (5) of B5."""

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.energy.base import promoted
from massieu.energy.bounds import largest_norm, stored
from massieu.energy.hopfield import HopfieldEnergy
from massieu.foundation.arguments import floating, number, whole_number
from massieu.foundation.doors import count, door


@door
def energy_range(hopfield: HopfieldEnergy) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    """Bounds of the Hopfield energy: 0 and 2M² for ‖ξ‖ ≤ M, where all minima are; E is at least 0 everywhere (B5.2).

    Raises:
        TypeError: as `stored`.

    Example:
        >>> import torch
        >>> from massieu.energy import HopfieldEnergy
        >>> from massieu.papers.theory import energy_range
        >>> low, high = energy_range(HopfieldEnergy.create(torch.tensor([[3.0, 4.0]])))
        >>> low.item(), round(high.item(), 3)
        (0.0, 50.0)
    """
    stored(hopfield)
    top = 2 * largest_norm(hopfield).square()
    return torch.zeros_like(top), top


def least_descent(
    state: Float[Tensor, "*batch_query d"], after: Float[Tensor, "*batch_query d"]
) -> Float[Tensor, "*batch_query"]:
    """Lower bound on the descent of a full step from `state` to `after`: ½‖state − after‖² (B5.3).

    Example:
        >>> import torch
        >>> from massieu.papers.theory import least_descent
        >>> least_descent(torch.tensor([3.0, 4.0]), torch.zeros(2)).item()
        12.5
    """
    if floating("state", state).shape != floating("after", after).shape or state.ndim == 0:
        raise ValueError(
            f"state and after must have one shape (*lead, d), got {tuple(state.shape)} and {tuple(after.shape)}"
        )
    return 0.5 * promoted(state - after).square().sum(-1)


@door(steps=count)
def smallest_move(drop: Float[Tensor, "*lead"], steps: int) -> Float[Tensor, "*lead"]:
    """Upper bound on the shortest of a number of full steps: √(2·drop/steps), if E fell by `drop` in total (B5.3).

    With drop = E(start), the most that E can fall, it is a bound before the first step.

    Raises:
        ValueError: `steps` is less than 1.

    Example:
        >>> import torch
        >>> from massieu.papers.theory import smallest_move
        >>> smallest_move(torch.tensor(2.0), steps=4).item()
        1.0
    """
    whole_number("steps", steps, least=1)
    return (2 * promoted(floating("drop", drop)) / steps).sqrt()


@door
def damped_descent(force: Float[Tensor, "*batch_query d"], damping: float) -> Float[Tensor, "*batch_query"]:
    """Lower bound on the descent of a damped step: γ(1 − γ/2)‖∇E‖², for damping γ in (0, 2) (B5.4).

    Example:
        >>> import torch
        >>> from massieu.papers.theory import damped_descent
        >>> round(damped_descent(torch.tensor([3.0, 4.0]), damping=1.0).item(), 3)  # half of 25
        12.5
    """
    number("damping", damping, above=0, below=2)
    if floating("force", force).ndim == 0:
        raise ValueError("force must have shape (*lead, d), got a scalar")
    return damping * (1 - damping / 2) * promoted(force).square().sum(-1)


def path_length(first_move: Float[Tensor, "*lead"], lipschitz: Float[Tensor, "*lead"]) -> Float[Tensor, "*lead"]:
    """Upper bound on the path of a contraction from x to its fixed point: ‖T(x) − x‖/(1 − L), for a factor L < 1.

    The fixed point is at most this far, too. For L ≥ 1 the path of a Hopfield memory is still of finite length, and has
    one end (B5.5), but no bound is known: +inf. NaN where a number is NaN.

    Example:
        >>> import torch
        >>> from massieu.papers.theory import path_length
        >>> path_length(torch.tensor(1.0), torch.tensor(0.5)).item()
        2.0
    """
    first_move = promoted(floating("first_move", first_move))
    gap = 1 - promoted(floating("lipschitz", lipschitz))
    is_unbounded = gap <= 0
    length = first_move / torch.where(is_unbounded, 1.0, gap)
    return torch.where(is_unbounded & ~first_move.isnan(), torch.inf, length)
