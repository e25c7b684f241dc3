"""S21, S22: what the feed-forward layer is measured by; the residual as initial point or as quadratic term."""

import math
from collections.abc import Callable, Iterator
from functools import partial

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
    # A relu whose units are all silent has no Jacobian to speak of: of x and −x one has half of the units active.
    silent = (state @ keys.T < 0).double().mean(-1, keepdim=True) > 0.5
    state = torch.where(silent, -state, state)
    constants = normal(units).unsqueeze(-1)
    tied = constants * keys
    pairs: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
        "relu": (torch.relu, lambda z: 0.5 * torch.relu(z).square()),
        "tanh": (torch.tanh, lambda z: torch.logaddexp(z, -z)),
    }
    for name, (rate, integral) in pairs.items():

        def layer(x: Tensor, v: Tensor, rate: Callable[[Tensor], Tensor] = rate) -> Tensor:
            return _update(lambda z: rate(z @ keys.T) @ v, x)

        def potential(x: Tensor, integral: Callable[[Tensor], Tensor] = integral) -> Tensor:
            return (integral(x @ keys.T) @ constants).sum()

        yield close(f"{name}, v = ck: layer and ∇ Σ cΦ(k·x)", layer(state, tied), torch.func.grad(potential)(state))
        yield at_most(f"{name}, v = ck: ‖J − Jᵀ‖/‖J‖", jacobian_asymmetry(partial(layer, v=tied), state), _ROUNDING)
        refuted = (~is_conservative(partial(layer, v=values), state)).double().mean()
        yield close(f"{name}, v of their own: share of states where no potential is possible", refuted, 1.0)
        # J = Σ φ′(k·x) v kᵀ, written out.
        slope = torch.func.vmap(torch.func.vmap(torch.func.grad(rate)))(state @ keys.T)
        jacobian = torch.einsum("bm,md,me->bde", slope, values, keys)
        odd = torch.linalg.matrix_norm(jacobian - jacobian.mT) / torch.linalg.matrix_norm(jacobian)
        found = jacobian_asymmetry(partial(layer, v=values), state)
        yield close(f"{name}, v of their own: ‖J − Jᵀ‖/‖J‖ and of Σ φ′ v kᵀ", found, odd)
    yield from _distance_to_maps(normal, dimensions, draws)


def _update(function: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """What the library's layer adds to tokens (*batch, n, d), or to one."""
    whole = tokens if tokens.ndim > 1 else tokens.unsqueeze(0)
    return (FeedForward.create(function)(whole) - whole).reshape(tokens.shape)


def _distance_to_maps(normal: Normal, dimensions: int, draws: int) -> Iterator[Check]:
    """Of x + relu(x) for x ~ N(0, 1): E(x + relu x)² = 5/2, E relu² = 1/2; the best affine map leaves (¼ − 1/2π)."""
    batches = 20
    x = normal(batches, draws // batches, dimensions)
    update = _update(torch.relu, x)
    size = update.square().sum((-2, -1)) / x.square().sum((-2, -1))
    yield mean_of_draws("relu: E‖f(x)‖²/E‖x‖² and ½", size, 0.5)
    design = torch.cat([x, torch.ones_like(x[..., :1])], -1)
    fitted = design @ least_squares(design, update)
    share = (update - fitted).square().sum((-2, -1)) / (update - update.mean(-2, keepdim=True)).square().sum((-2, -1))
    # Fitting d + 1 numbers takes away that share of the residual.
    share = share / (1 - (dimensions + 1) / x.shape[-2])
    unexplained = (0.25 - 0.5 / math.pi) / (0.5 - 0.5 / math.pi)
    yield mean_of_draws("relu: 1 − R² of the best affine map and (¼ − 1/2π)/(½ − 1/2π)", share, unexplained)


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
    for rate in (0.1, 1.0, 7.0):
        ascent = state + rate * memory.mean(state)
        shrunk = ascent / (1 + rate)
        damping = rate / (1 + rate)
        name = f"γ = {rate}: (ξ + γ∇A)/(1 + γ) and ξ − γ′∇E"
        yield close(name, shrunk, state + damping * energy.force(state), _ROUNDING)
        yield close(f"γ = {rate}: and the damped step", shrunk, energy.step(state, damping=damping), _ROUNDING)
        drop = energy(state) - energy(shrunk) - damped_descent(energy.force(state), damping)
        yield at_least(f"γ = {rate}: E falls by γ′(1 − γ′/2)‖∇E‖² or more", drop, -_ROUNDING)
        yield from _on_the_sphere(memory, state, rate)
    yield from _along_the_sphere(memory, state)


def _on_the_sphere(memory: Atoms, state: Tensor, rate: float) -> Iterator[Check]:
    """RMSNorm(ξ + γ∇A): A never falls."""
    norm = activations.RMSNorm.create(eps=0.0)
    start = norm(state)
    gradient = memory.mean(start)
    after = norm(start + rate * gradient)
    yield at_least(
        f"γ = {rate}: rise of A under RMSNorm", memory.log_partition(after) - memory.log_partition(start), -_ROUNDING
    )
    yield close(f"γ = {rate}: ½‖ξ‖² after RMSNorm and d/2", 0.5 * after.square().sum(-1), 0.5 * start.shape[-1])


def _along_the_sphere(memory: Atoms, state: Tensor) -> Iterator[Check]:
    norm = activations.RMSNorm.create(eps=0.0)
    start = norm(state)
    gradient = memory.mean(start)
    square = start.square().sum(-1, keepdim=True)
    tangential = gradient - (start * gradient).sum(-1, keepdim=True) / square * start
    small = 1e-6
    slope = (norm(start + small * gradient) - norm(start - small * gradient)) / (2 * small)
    yield close("direction of a small step under RMSNorm and the tangential ∇A", slope, tangential, 1e-8)
