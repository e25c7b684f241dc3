"""B20: two layers that drive each other, and the Hopfield network that is left of them."""

from collections.abc import Iterator

import torch
from torch import Tensor

from massieu.energy import HopfieldEnergy
from massieu.energy.activations import LayerNorm, Tanh
from massieu.papers.claims.claim import Check, at_least, at_most, close
from massieu.papers.claims.inputs import check_at_least, normal_draws
from massieu.papers.claims.registry import claim
from massieu.papers.theory.two_layer import TwoLayer

_ROUNDING = 1e-12
_DURATION = 5.0
_EPS = 1e-2
"""Of LayerNorm's variance."""


@claim(
    "B20",
    title="Two layers with frozen hidden units",
    statement="Along τ_v v̇ = W g_h − v, τ_h ḣ = Wᵀg_v − h with g = ∇L of convex Lagrangians, ℰ = v·g_v − L_v + "
    "h·g_h − L_h − g_v·W g_h does not rise. With L_v = ½‖v‖², L_h = log Σ exp and h = Wᵀv it is the modern Hopfield "
    "energy. Taking each layer to its limit in turn is attention.",
    source="Bal §2.4, last paragraphs, where Krotov and Hopfield (arXiv 2008.06996) are cited",
    status="quoted",
)
def two_layer_dynamics(
    dimensions: int = 4, memories: int = 6, draws: int = 20, steps: int = 100, seed: int = 0
) -> Iterator[Check]:
    check_at_least(2, dimensions=dimensions, memories=memories)
    normal = normal_draws(seed)
    coupling = normal(dimensions, memories)
    query = normal(draws, dimensions)
    state = torch.cat([query, normal(draws, memories)], -1)
    networks = {
        "½‖v‖² and log Σ exp": TwoLayer.create(coupling, visible_time=0.5, hidden_time=2.0),
        "LayerNorm and log Σ exp": TwoLayer.create(coupling, visible=LayerNorm.create(eps=_EPS), hidden_time=0.5),
        "spins and spins": TwoLayer.create(coupling, visible=Tanh.create(), hidden=Tanh.create()),
    }
    for name, layers in networks.items():
        yield from _falls(name, layers, state, steps)
    yield from _formulas(networks, state)
    yield from _energy_rate(networks["½‖v‖² and log Σ exp"], state)
    yield from _limit(coupling, query)


def _falls(name: str, layers: TwoLayer, state: Tensor, steps: int) -> Iterator[Check]:
    """ℰ does not rise along the flow, nor in split steps of any length, nor in a step of both limits."""
    path = layers.flow(state, _DURATION, steps=steps, method="runge_kutta")
    rise = path.energies.diff(dim=0)
    yield at_most(f"{name}: largest rise of ℰ in a Runge–Kutta step dt, bound dt⁴", rise, (_DURATION / steps) ** 4)
    energy_scale = 1 + path.energies.abs().max().item()
    for duration in (_DURATION, 100 * _DURATION):
        rise = layers.flow(state, duration, steps=10).energies.diff(dim=0)
        yield at_most(f"{name}: largest rise in a split step of {duration / 10:g}", rise, _ROUNDING * energy_scale)
    yield at_most(
        f"{name}: largest rise in a step of both limits",
        layers.descend(state, steps=10).energies.diff(dim=0),
        _ROUNDING * energy_scale,
    )


def _formulas(networks: dict[str, TwoLayer], state: Tensor) -> Iterator[Check]:
    """ℰ = v·g_v − L_v + h·g_h − L_h − g_vᵀ W g_h, with each network's g = ∇L and L written out."""
    width = networks["spins and spins"].coupling.shape[0]
    visible, hidden = state[:, :width], state[:, width:]
    deviation = visible - visible.mean(-1, keepdim=True)
    size = (deviation.square().mean(-1, keepdim=True) + _EPS).sqrt()
    log_sum = (hidden.softmax(-1), hidden.logsumexp(-1))
    parts = {
        "½‖v‖² and log Σ exp": (visible, 0.5 * visible.square().sum(-1), *log_sum),
        "LayerNorm and log Σ exp": (deviation / size, width * size.squeeze(-1), *log_sum),
        "spins and spins": (
            visible.tanh(),
            visible.cosh().log().sum(-1),
            hidden.tanh(),
            hidden.cosh().log().sum(-1),
        ),
    }
    for name, (visible_output, visible_potential, hidden_output, hidden_potential) in parts.items():
        of_visible = (visible * visible_output).sum(-1) - visible_potential
        of_hidden = (hidden * hidden_output).sum(-1) - hidden_potential
        layers = networks[name]
        interaction = (visible_output @ layers.coupling * hidden_output).sum(-1)
        yield close(f"{name}: ℰ and its formula", layers(state), of_visible + of_hidden - interaction)


def _energy_rate(layers: TwoLayer, state: Tensor) -> Iterator[Check]:
    """dℰ/dt = −τ_v‖v̇‖²_{∇²L_v} − τ_h‖ḣ‖²_{∇²L_h}, by central differences along a Runge–Kutta path, whose error is dt²."""
    time = 1e-3
    path = layers.flow(state, 2 * time, steps=2, method="runge_kutta")
    visible, hidden = layers.split(path.states[1])
    # g_v = v, and g_h is a softmax: ∇²L_h is its covariance.
    hidden_output = layers.hidden(hidden)
    visible_velocity = (hidden_output @ layers.coupling.T - visible) / layers.visible_time
    hidden_velocity = (visible @ layers.coupling - hidden) / layers.hidden_time
    mean_square = (hidden_output * hidden_velocity.square()).sum(-1)
    variance = mean_square - (hidden_output * hidden_velocity).sum(-1).square()
    expected = -layers.visible_time * visible_velocity.square().sum(-1) - layers.hidden_time * variance
    by_differences = (path.energies[2] - path.energies[0]) / (2 * time)
    scale = 1 + expected.abs().max().item()
    tolerance = 100 * time**2 * scale
    yield close("dℰ/dt by differences and −τ_v‖v̇‖² − τ_h Var_{g_h}(ḣ)", by_differences, expected, tolerance)
    yield at_least("−dℰ/dt by differences", -by_differences, -tolerance)


def _limit(coupling: Tensor, query: Tensor) -> Iterator[Check]:
    """At h = Wᵀv, ℰ is the Hopfield energy; each layer taken to its limit in turn is attention."""
    layers = TwoLayer.create(coupling)
    hopfield = HopfieldEnergy.create(coupling.T.contiguous(), scale=1.0)
    state = layers.join(query)
    log_sum = torch.logsumexp(query @ coupling, -1)
    yield close("ℰ at h = Wᵀv and ½‖v‖² − lse(Wᵀv)", layers(state), 0.5 * query.square().sum(-1) - log_sum)
    yield close(
        "ℰ at h = Wᵀv and the Hopfield energy less its constants", layers(state), hopfield(query) - hopfield.constant
    )
    attention = torch.softmax(query @ coupling, -1) @ coupling.T
    yield close("both limits in turn and attention", layers.split(layers.step(state))[0], attention)
    yield _fast_hidden_units(coupling, query)


def _fast_hidden_units(coupling: Tensor, query: Tensor) -> Check:
    """As τ_h → 0 the visible layer follows v̇ = attention(v) − v, with an error of order τ_h."""

    def velocity(v: Tensor) -> Tensor:
        return torch.softmax(v @ coupling, -1) @ coupling.T - v

    duration = 0.5
    steps = 100
    time = duration / steps
    # Runge and Kutta's method, of fourth order.
    limit = query
    for _ in range(steps):
        first = velocity(limit)
        second = velocity(limit + 0.5 * time * first)
        third = velocity(limit + 0.5 * time * second)
        limit = limit + time / 6 * (first + 2 * second + 2 * third + velocity(limit + time * third))
    errors = []
    for hidden_time in (4e-3, 2e-3):
        layers = TwoLayer.create(coupling, hidden_time=hidden_time)
        path = layers.flow(layers.join(query), duration, steps=round(duration / hidden_time), method="runge_kutta")
        errors.append((layers.split(path.states[-1])[0] - limit).norm())
    ratio = errors[0] / errors[1]
    detail = f"errors {errors[0].item():.2g} and {errors[1].item():.2g}"
    return at_most(
        "error of v̇ = attention(v) − v at τ_h over that at τ_h/2, and 2: difference", (ratio - 2).abs(), 0.1, detail
    )
