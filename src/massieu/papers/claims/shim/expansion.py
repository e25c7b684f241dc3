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
    x, y = normal(2, pairs, *measure.event_shape)
    level = measure.log_partition(x)
    mean = measure.mean(x)
    gain = measure.log_partition(x + step * mean) - level
    above = (gain - step * mean.square().sum(-1)) / (1 + gain.abs())
    yield at_least(f"{name}: A(T(η)) − A(η) − γ‖∇A‖², relative", above, -_ROUNDING)
    change = mean - measure.mean(y)
    distance = (x - y + step * change).square().sum(-1)
    allowed = (x - y).square().sum(-1) + step**2 * change.square().sum(-1)
    yield at_least(f"{name}: ‖T(x) − T(y)‖² less its bound, relative", (distance - allowed) / distance, -_ROUNDING)


def _volume(name: str, normal: Normal, measure: Measure) -> Iterator[Check]:
    """log det ∂T/∂η by differences, and that no volume shrinks."""
    points = normal(40, *measure.event_shape)
    for step in _STEPS:
        gain = expansion(measure, points, step).entropy_gain
        slope = differences(lambda eta, step=step: eta + step * measure.mean(eta), points)
        volume = torch.linalg.slogdet(slope).logabsdet
        yield close(f"{name}, γ = {step:g}: log det(1 + γ∇²A) and of T's slopes", gain, volume, GRADIENT_BY_DIFFERENCES)
        yield at_least(f"{name}, γ = {step:g}: log det(1 + γ∇²A)", gain, -_ROUNDING)


def _population(normal: Normal, width: int) -> Iterator[Check]:
    """A Gaussian population's entropies in closed form."""
    mixing = normal(width, width)
    sigma = mixing @ mixing.T + torch.eye(width, dtype=torch.float64)
    hidden = equilibrium(normal(width), sigma)
    keys = key_law(hidden, sigma)
    for step in _STEPS:
        after = after_layer(hidden, keys, step)
        entropies = [0.5 * torch.linalg.slogdet(law.covariance).logabsdet for law in (hidden, after)]
        found = expansion(keys, normal(3, width), step).entropy_gain
        yield close(f"Gaussian population, γ = {step:g}: its gain and ½ log det's", found, entropies[1] - entropies[0])
        yield close(f"Gaussian population, γ = {step:g}: entropy_gain", entropy_gain(keys, step), found[0])


def _attention_entropy(normal: Normal) -> Iterator[Check]:
    """Eight keys, five layers: attention sharpens while every point's volume grows."""
    keys = Atoms.create(normal(8, 3))
    state = 0.5 * normal(16, 3)
    small = 1e-5
    ascended = (keys.entropy(state + sign * small * keys.mean(state)) for sign in (1, -1))
    slope = (next(ascended) - next(ascended)) / (2 * small)
    found = expansion(keys, state, 1.0)
    yield close("dH/dγ by differences and −ηᵀ∇²A∇A", slope, found.attention_slope, GRADIENT_BY_DIFFERENCES)
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
    """Values −k: points approach and A falls. Any values Wk: two close ones part as δᵀ W Cov_p δ says."""
    keys = Atoms.create(normal(9, width))
    points = normal(50, width)
    centred = keys.points - keys.points.mean(0)
    keys = Atoms.create(centred)
    slope = Atoms.create(centred).mean(points)
    fall = keys.log_partition(points - 0.01 * slope) - keys.log_partition(points)
    yield at_most("values −k, γ = 0.01: change of A", fall, 0.0)
    other = points.roll(1, 0)
    closer = (points - other - 0.01 * (slope - slope.roll(1, 0))).norm(dim=-1) - (points - other).norm(dim=-1)
    yield at_most("values −k, γ = 0.01: change of distances", closer, 0.0)
    values = normal(width, width)
    direction = torch.nn.functional.normalize(normal(50, width), dim=-1)
    size = 1e-4
    left, right = (keys.mean(points + sign * 0.5 * size * direction) @ values.T for sign in (1, -1))
    parting = (direction * (left - right)).sum(-1) / size
    matrix = values @ keys.fisher(points)
    form = (direction.unsqueeze(-2) @ (0.5 * (matrix + matrix.mT)) @ direction.unsqueeze(-1)).flatten()
    yield close(
        "any values W: rate at which close points part, and δᵀ sym(W Cov_p) δ", parting, form, HESSIAN_BY_DIFFERENCES
    )
    yield at_most("its smallest: some approach", form.min(), -CLOSED_FORM)
