"""S21, S22: measures of the feed-forward layer; the residual as initial point or as quadratic term."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from massieu.energy import HopfieldEnergy, activations
from massieu.energy.gradients import is_conservative, jacobian_asymmetry
from massieu.foundation.matrices import least_squares
from massieu.measures import Atoms
from massieu.papers.claims.claim import SHIM, Check, at_least, at_most, close, mean_of_draws
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.registry import claim
from massieu.papers.theory import damped_descent
from massieu.population import FeedForward

_ROUNDING = 1e-12


# --- S21 -------------------------------------------------------------------------------------------------------------


@claim(
    "S21",
    title="The feed-forward layer",
    statement="A feed-forward layer f(x) = Σ φ(k_μ·x) v_μ fits neither theory in general. If v_μ = c_μk_μ it is the "
    "gradient of Σ c_μΦ(k_μ·x) with Φ′ = φ; otherwise its Jacobian is not symmetric. It is then described by its "
    "distance to the identity and to the best affine map.",
    source=f"{SHIM}, §5 and §6; the measures and the condition are derived",
    status="quoted",
)
def feed_forward_layer(units: int = 12, dimensions: int = 5, draws: int = 40_000, seed: int = 0) -> Iterator[Check]:
    check_at_least(2, units=units, dimensions=dimensions)
    check_at_least(400, draws=draws)
    normal = normal_draws(seed)
    keys = normal(units, dimensions)
    values = normal(units, dimensions)
    state = normal(20, dimensions)
    # Where all units of a relu are silent its Jacobian is 0. Either x or −x has half of the units active.
    mostly_silent = (state @ keys.T < 0).double().mean(-1, keepdim=True) > 0.5
    state = torch.where(mostly_silent, -state, state)
    constants = normal(units).unsqueeze(-1)
    yield from _layer("relu", torch.relu, lambda z: 0.5 * torch.relu(z).square(), keys, values, constants, state)
    yield from _layer("tanh", torch.tanh, lambda z: torch.logaddexp(z, -z), keys, values, constants, state)
    yield from _distance_to_maps(normal, dimensions, draws)


def _layer(
    name: str,
    activation: Callable[[Tensor], Tensor],
    integral: Callable[[Tensor], Tensor],
    keys: Tensor,
    values: Tensor,
    constants: Tensor,
    state: Tensor,
) -> Iterator[Check]:
    """A layer with values c·k is a gradient; a layer with other values is not. `integral` is Φ with Φ′ = φ."""

    def tied_layer(x: Tensor) -> Tensor:
        return _update(lambda z: activation(z @ keys.T) @ (constants * keys), x)

    def free_layer(x: Tensor) -> Tensor:
        return _update(lambda z: activation(z @ keys.T) @ values, x)

    def potential(x: Tensor) -> Tensor:
        return (integral(x @ keys.T) @ constants).sum()

    gradient = torch.func.grad(potential)(state)
    yield close(f"{name}, v = ck: layer and ∇ Σ cΦ(k·x)", tied_layer(state), gradient)
    yield at_most(f"{name}, v = ck: ‖J − Jᵀ‖/‖J‖", jacobian_asymmetry(tied_layer, state), _ROUNDING)

    no_potential = (~is_conservative(free_layer, state)).double().mean()
    yield close(f"{name}, v of their own: share of states where no potential is possible", no_potential, 1.0)
    # J = Σ φ′(k·x) v kᵀ, written out.
    derivative = torch.func.vmap(torch.func.vmap(torch.func.grad(activation)))(state @ keys.T)
    jacobian = torch.einsum("bm,md,me->bde", derivative, values, keys)
    expected = torch.linalg.matrix_norm(jacobian - jacobian.mT) / torch.linalg.matrix_norm(jacobian)
    asymmetry = jacobian_asymmetry(free_layer, state)
    yield close(f"{name}, v of their own: ‖J − Jᵀ‖/‖J‖ and of Σ φ′ v kᵀ", asymmetry, expected)


def _update(function: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """What the library's layer adds to tokens (*batch, n, d), or to one token (d)."""
    batch = torch.atleast_2d(tokens)
    return (FeedForward.create(function)(batch) - batch).reshape(tokens.shape)


def _distance_to_maps(normal: Normal, dimensions: int, draws: int) -> Iterator[Check]:
    """Of x + relu(x) for x ~ N(0, 1): E(x + relu x)² = 5/2, E relu² = 1/2; the best affine map leaves (¼ − 1/2π)."""
    batches = 20
    x = normal(batches, draws // batches, dimensions)
    update = _update(torch.relu, x)
    relative_size = update.square().sum((-2, -1)) / x.square().sum((-2, -1))
    yield mean_of_draws("relu: E‖f(x)‖²/E‖x‖² and ½", relative_size, 0.5)
    design = torch.cat([x, torch.ones_like(x[..., :1])], -1)
    residual = update - design @ least_squares(design, update)
    centred = update - update.mean(-2, keepdim=True)
    unexplained = residual.square().sum((-2, -1)) / centred.square().sum((-2, -1))
    # Fitting d + 1 numbers takes away that share of the residual.
    unexplained = unexplained / (1 - (dimensions + 1) / x.shape[-2])
    expected = (0.25 - 0.5 / math.pi) / (0.5 - 0.5 / math.pi)
    yield mean_of_draws("relu: 1 − R² of the best affine map and (¼ − 1/2π)/(½ − 1/2π)", unexplained, expected)


# --- S22 -------------------------------------------------------------------------------------------------------------


@claim(
    "S22",
    title="Residual as start, or as quadratic term",
    statement="The residual as initial point, ξ + γ∇A, and as quadratic term of the Hopfield energy differ only by "
    "a contraction: (ξ + γ∇A)/(1 + γ) = ξ − γ′∇E with γ′ = γ/(1 + γ). With RMSNorm in place of the contraction it "
    "is projected ascent of A on a sphere.",
    source=f"{SHIM}, §6 (the difference); the identity is derived",
    status="quoted",
)
def residual_and_quadratic_term(
    atoms: int = 10, dimensions: int = 6, draws: int = 50, seed: int = 0
) -> Iterator[Check]:
    check_at_least(2, atoms=atoms, dimensions=dimensions)
    normal = normal_draws(seed)
    memory = Atoms.create(normal(atoms, dimensions), normal(atoms))
    energy = HopfieldEnergy.create(memory, scale=1.0)
    state = normal(draws, dimensions)
    for step in (0.1, 1.0, 7.0):
        name = f"γ = {step}"
        contracted = (state + step * memory.mean(state)) / (1 + step)
        damping = step / (1 + step)
        descended = state + damping * energy.force(state)
        yield close(f"{name}: (ξ + γ∇A)/(1 + γ) and ξ − γ′∇E", contracted, descended, _ROUNDING)
        damped_step = energy.step(state, damping=damping)
        yield close(f"{name}: and the damped step", contracted, damped_step, _ROUNDING)
        surplus = energy(state) - energy(contracted) - damped_descent(energy.force(state), damping)
        yield at_least(f"{name}: E falls by γ′(1 − γ′/2)‖∇E‖² or more", surplus, -_ROUNDING)
        yield from _on_the_sphere(memory, state, step)
    yield from _along_the_sphere(memory, state)


def _on_the_sphere(memory: Atoms, state: Tensor, step: float) -> Iterator[Check]:
    """Under RMSNorm(ξ + γ∇A) A never falls."""
    norm = activations.RMSNorm.create(eps=0.0)
    start = norm(state)
    after = norm(start + step * memory.mean(start))
    rise = memory.log_partition(after) - memory.log_partition(start)
    yield at_least(f"γ = {step}: rise of A under RMSNorm", rise, -_ROUNDING)
    yield close(f"γ = {step}: ½‖ξ‖² after RMSNorm and d/2", 0.5 * after.square().sum(-1), 0.5 * start.shape[-1])


def _along_the_sphere(memory: Atoms, state: Tensor) -> Iterator[Check]:
    """A small step moves along the part of ∇A that is tangential to the sphere."""
    norm = activations.RMSNorm.create(eps=0.0)
    start = norm(state)
    gradient = memory.mean(start)
    squared_norm = start.square().sum(-1, keepdim=True)
    tangential = gradient - (start * gradient).sum(-1, keepdim=True) / squared_norm * start
    small_step = 1e-6
    difference = norm(start + small_step * gradient) - norm(start - small_step * gradient)
    direction = difference / (2 * small_step)
    yield close("direction of a small step under RMSNorm and the tangential ∇A", direction, tangential, 1e-8)
