"""How a Hopfield memory descends: parts (2) to (5) of B5, as numbers."""

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.energy.base import promoted
from massieu.energy.bounds import largest_norm, stored
from massieu.energy.hopfield import HopfieldEnergy
from massieu.foundation.arguments import floating, number, whole_number


def energy_range(hopfield: HopfieldEnergy) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    """0 and 2M²: between them lies E(ξ) for ‖ξ‖ ≤ M, where all its minima are; nowhere is E below 0 (B5.2).

    Raises:
        TypeError: as `stored`.

    Example:
        >>> import torch
        >>> from massieu.energy import HopfieldEnergy
        >>> from massieu.theory import energy_range
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
    """½‖state − after‖²: a full step from `state` to `after` lowers E by at least this (B5.3).

    Example:
        >>> import torch
        >>> from massieu.theory import least_descent
        >>> least_descent(torch.tensor([3.0, 4.0]), torch.zeros(2)).item()
        12.5
    """
    if floating("state", state).shape != floating("after", after).shape or state.ndim == 0:
        raise ValueError(
            f"state and after must have one shape (*lead, d), got {tuple(state.shape)} and {tuple(after.shape)}"
        )
    return 0.5 * promoted(state - after).square().sum(-1)


def smallest_move(drop: Float[Tensor, "*lead"], steps: int) -> Float[Tensor, "*lead"]:
    """√(2·drop/steps): of so many full steps, the shortest is at most this long, if E fell by `drop` in all (B5.3).

    With drop = E(start), of which nothing more can be lost, it is a bound before the first step.

    Raises:
        ValueError: `steps` is less than 1.

    Example:
        >>> import torch
        >>> from massieu.theory import smallest_move
        >>> smallest_move(torch.tensor(2.0), steps=4).item()
        1.0
    """
    whole_number("steps", steps, least=1)
    return (2 * promoted(floating("drop", drop)) / steps).sqrt()


def damped_descent(force: Float[Tensor, "*batch_query d"], damping: float) -> Float[Tensor, "*batch_query"]:
    """γ(1 − γ/2)‖∇E‖²: a step of damping γ in (0, 2) lowers E by at least this (B5.4).

    Example:
        >>> import torch
        >>> from massieu.theory import damped_descent
        >>> round(damped_descent(torch.tensor([3.0, 4.0]), damping=1.0).item(), 3)  # half of 25
        12.5
    """
    number("damping", damping, above=0, below=2)
    if floating("force", force).ndim == 0:
        raise ValueError("force must have shape (*lead, d), got a scalar")
    return damping * (1 - damping / 2) * promoted(force).square().sum(-1)


def path_length(first_move: Float[Tensor, "*lead"], lipschitz: Float[Tensor, "*lead"]) -> Float[Tensor, "*lead"]:
    """‖T(x) − x‖/(1 − L): the whole path from x is at most this long, the end at most this far, for a factor L < 1.

    For L ≥ 1 the path of a Hopfield memory is still of finite length, and has one end (B5.5), but no bound is known: +inf.

    Example:
        >>> import torch
        >>> from massieu.theory import path_length
        >>> path_length(torch.tensor(1.0), torch.tensor(0.5)).item()
        2.0
    """
    first_move, gap = promoted(floating("first_move", first_move)), 1 - promoted(floating("lipschitz", lipschitz))
    return torch.where(gap > 0, first_move / torch.where(gap > 0, gap, 1.0), torch.inf)
