"""S12: residual attention climbs and spreads; which entropy rises."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from massieu import ops
from massieu.measures import Atoms, Bernoulli, Gaussian, Measure, Sphere, Spin, mixture
from massieu.papers.claims.claim import (
    CLOSED_FORM,
    GRADIENT_BY_DIFFERENCES,
    HESSIAN_BY_DIFFERENCES,
    SHIM,
    Check,
    as_published,
    at_least,
    at_most,
    close,
)
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.oracles import differences
from massieu.papers.claims.registry import claim
from massieu.papers.theory import after_layer, entropy_gain, equilibrium, expansion, key_law

_ROUNDING = 1e-12
_STEPS = (0.1, 1.0, 20.0)
_LAYERS = 5


@claim(
    "S12",
    title="Residual attention expands",
    statement="With fixed keys, T = id + γ∇A raises A by at least γ‖∇A‖² for every γ > 0, brings no two points "
    "closer together, and adds E log det(1 + γ∇²A) ≥ 0 to the differential entropy of the population. The entropy "
    "of the attention weights changes by −γηᵀ∇²A∇A to first order, and mostly falls. Without the residual "
    "connection, or with values that are not aligned, nothing expands.",
    source=f"{SHIM}, §3.3; the exact statements are derived",
    status="quoted",
    published="“Our log normalizer ascent should result in increased entropy, resulting in an expansion of the hidden states” "
    "(§3.3). Of the hidden states' differential entropy that is true; of the attention distribution's entropy it is not.",
    standing="ambiguous",
    corrected="What increases is the differential entropy of the population of hidden states.",
)
def residual_attention_expands(pairs: int = 2000, dimensions: int = 4, seed: int = 0) -> Iterator[Check]:
    check_at_least(2, pairs=pairs, dimensions=dimensions)
    normal = normal_draws(seed)
    for name, measure in _measures(normal, dimensions).items():
        for step in _STEPS:
            yield from _expands(f"{name}, γ = {step:g}", normal, measure, step, pairs)
        yield from _volume(name, normal, measure)
    yield from _population(normal, dimensions)
    yield from _attention_entropy(normal)
    yield from _without_residual(normal, dimensions)
    yield from _other_values(normal, dimensions)


def _measures(normal: Normal, width: int) -> dict[str, Measure]:
    zeros = torch.zeros(width, dtype=torch.float64)
    parts = [Gaussian.create(zeros + sign, torch.full_like(zeros, 0.2)) for sign in (-1, 1)]
    return {
        "keys": Atoms.create(normal(9, width), normal(9)),
        "Gaussian": Gaussian.create(normal(width), normal(width).square()),
        "sphere": Sphere.create(torch.tensor(1.5, dtype=torch.float64), dim=width),
        "spins": Spin.create(dim=width),
        "bits": Bernoulli.create(torch.sigmoid(normal(width))),
        "two Gaussians": mixture(normal(2), parts),
    }


def _expands(name: str, normal: Normal, measure: Measure, step: float, pairs: int) -> Iterator[Check]:
    """A rises, and no two points come closer together."""
    x, y = normal(2, pairs, *measure.event_shape)
    mean = measure.mean(x)
    gain = measure.log_partition(x + step * mean) - measure.log_partition(x)
    surplus = (gain - step * mean.square().sum(-1)) / (1 + gain.abs())
    yield at_least(f"{name}: A(T(η)) − A(η) − γ‖∇A‖², relative", surplus, -_ROUNDING)
    change = mean - measure.mean(y)
    squared_distance = (x - y + step * change).square().sum(-1)
    bound = (x - y).square().sum(-1) + step**2 * change.square().sum(-1)
    surplus = (squared_distance - bound) / squared_distance
    yield at_least(f"{name}: ‖T(x) − T(y)‖² less its bound, relative", surplus, -_ROUNDING)


def _volume(name: str, normal: Normal, measure: Measure) -> Iterator[Check]:
    """log det ∂T/∂η by differences, and that no volume shrinks."""
    points = normal(40, *measure.event_shape)
    for step in _STEPS:
        gain = expansion(measure, points, step).entropy_gain
        jacobian = differences(lambda eta, step=step: eta + step * measure.mean(eta), points)
        log_volume = torch.linalg.slogdet(jacobian).logabsdet
        label = f"{name}, γ = {step:g}: log det(1 + γ∇²A) and of T's slopes"
        yield close(label, gain, log_volume, GRADIENT_BY_DIFFERENCES)
        yield at_least(f"{name}, γ = {step:g}: log det(1 + γ∇²A)", gain, -_ROUNDING)


def _population(normal: Normal, width: int) -> Iterator[Check]:
    """A Gaussian population's entropies in closed form."""
    mixing = normal(width, width)
    sigma = mixing @ mixing.T + torch.eye(width, dtype=torch.float64)
    hidden = equilibrium(normal(width), sigma)
    keys = key_law(hidden, sigma)
    for step in _STEPS:
        name = f"Gaussian population, γ = {step:g}"
        after = after_layer(hidden, keys, step)
        entropy_before = 0.5 * torch.linalg.slogdet(hidden.covariance).logabsdet
        entropy_after = 0.5 * torch.linalg.slogdet(after.covariance).logabsdet
        gain = expansion(keys, normal(3, width), step).entropy_gain
        yield close(f"{name}: its gain and ½ log det's", gain, entropy_after - entropy_before)
        yield close(f"{name}: entropy_gain", entropy_gain(keys, step), gain[0])


def _attention_entropy(normal: Normal) -> Iterator[Check]:
    """Eight keys, five layers: attention sharpens while every point's volume grows."""
    keys = Atoms.create(normal(8, 3))
    state = 0.5 * normal(16, 3)
    small_step = 1e-5
    forward = keys.entropy(state + small_step * keys.mean(state))
    backward = keys.entropy(state - small_step * keys.mean(state))
    slope = (forward - backward) / (2 * small_step)
    expected = expansion(keys, state, 1.0).attention_slope
    yield close("dH/dγ by differences and −ηᵀ∇²A∇A", slope, expected, GRADIENT_BY_DIFFERENCES)
    entropies = [keys.entropy(state).mean()]
    for _ in range(_LAYERS):
        state = expansion(keys, state, 1.0).points
        entropies.append(keys.entropy(state).mean())
    change = torch.stack(entropies).diff()
    detail = " → ".join(f"{entropy:.2f}" for entropy in entropies)
    yield at_most("largest change of the mean attention entropy in a layer", change, 0.0, detail)
    yield as_published(at_least("change of the mean attention entropy in a layer", change, 0.0, detail))


def _without_residual(normal: Normal, width: int) -> Iterator[Check]:
    """X ← PX, scores βx·y, all ‖x‖ ≤ R: the diameter falls by 1 − e^(−2βR²) or more (Dobrushin)."""
    for beta in (0.1, 0.5, 2.0):
        tokens = torch.nn.functional.normalize(normal(50, 12, width), dim=-1)
        heads = tokens.unsqueeze(1)
        after = ops.attention(heads, heads, heads, scale=beta).output[:, 0]
        ratio = _diameter(after) / _diameter(tokens)
        yield at_most(f"β = {beta}: diameter's ratio by its bound", ratio / (1 - math.exp(-2 * beta)), 1.0)


def _diameter(tokens: Tensor) -> Tensor:
    return (tokens.unsqueeze(-2) - tokens.unsqueeze(-3)).norm(dim=-1).amax((-2, -1))


def _other_values(normal: Normal, width: int) -> Iterator[Check]:
    """Values −k: points approach and A falls. Any values Wk: two close points part at the rate δᵀ W Cov_p δ."""
    keys = normal(9, width)
    points = normal(50, width)
    measure = Atoms.create(keys - keys.mean(0))
    mean = measure.mean(points)
    change = measure.log_partition(points - 0.01 * mean) - measure.log_partition(points)
    yield at_most("values −k, γ = 0.01: change of A", change, 0.0)
    other = points.roll(1, 0)
    other_mean = mean.roll(1, 0)
    distance_after = (points - other - 0.01 * (mean - other_mean)).norm(dim=-1)
    change = distance_after - (points - other).norm(dim=-1)
    yield at_most("values −k, γ = 0.01: change of distances", change, 0.0)

    value_weight = normal(width, width)
    direction = torch.nn.functional.normalize(normal(50, width), dim=-1)
    size = 1e-4
    output = measure.mean(points + 0.5 * size * direction) @ value_weight.T
    other_output = measure.mean(points - 0.5 * size * direction) @ value_weight.T
    rate = (direction * (output - other_output)).sum(-1) / size
    jacobian = value_weight @ measure.fisher(points)
    symmetric = 0.5 * (jacobian + jacobian.mT)
    expected = (direction.unsqueeze(-2) @ symmetric @ direction.unsqueeze(-1)).flatten()
    name = "any values W: rate at which close points part, and δᵀ sym(W Cov_p) δ"
    yield close(name, rate, expected, HESSIAN_BY_DIFFERENCES)
    yield at_most("its smallest: some approach", expected.min(), -CLOSED_FORM)
