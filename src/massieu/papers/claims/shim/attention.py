"""S3, S24, S25: attention as the gradient of a log-partition; kernels of distance; the key origin as a gauge."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from massieu.measures import Atoms, Gaussian, Measure
from massieu.papers.claims.claim import GRADIENT_BY_DIFFERENCES, SHIM, Check, at_least, close
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.oracles import differences
from massieu.papers.claims.registry import claim

_CLEARLY_APART = 1e4 * GRADIENT_BY_DIFFERENCES
"""Four orders beyond the error of the differences: far from equal."""


# --- S3 --------------------------------------------------------------------------------------------------------------


@claim(
    "S3",
    title="Attention is the gradient of log Z",
    statement="With the keys as values, attention is the gradient of the log-partition of the weighted sum of point "
    "masses at the keys. With other values it is a gradient in an auxiliary field, and in general not in the query.",
    source=f"{SHIM}, §3.1, Proposition 1(a), eq. (3)–(5); its five extensions are derived",
    status="quoted",
    corrected="δ(x = xₙ) in the proposition is a Dirac measure, and the integral of its part (b) needs a dx.",
)
def attention_is_a_gradient(atoms: int = 12, dimensions: int = 4, draws: int = 20, seed: int = 0) -> Iterator[Check]:
    check_at_least(2, atoms=atoms, dimensions=dimensions)
    normal = normal_draws(seed)
    beta = dimensions**-0.5
    keys = normal(atoms, dimensions)
    values = normal(atoms, dimensions)
    log_weight = normal(atoms)
    query = normal(draws, dimensions)
    measure = Atoms.create(keys, log_weight)

    def weights(query: Tensor) -> Tensor:
        return torch.softmax(beta * query @ keys.T + log_weight, -1)

    def write(query: Tensor) -> Tensor:
        return measure.expectation(beta * query, values)

    attended = weights(query) @ keys
    yield close("∇A(βq) and Σ pₙxₙ", measure.mean(beta * query), attended)
    gradient = differences(lambda q: measure.log_partition(beta * q) / beta, query)
    yield close("differences of A_β and Σ pₙxₙ", gradient, attended, GRADIENT_BY_DIFFERENCES)
    yield from _other_values(measure, values, beta * query, weights(query) @ values)

    slope = differences(lambda q: measure.mean(beta * q), query)
    yield close("∂(Σ pₙxₙ)/∂q and its transpose", slope, slope.mT, GRADIENT_BY_DIFFERENCES)
    slope = differences(write, query)
    covariance = _covariance(weights(query), values, keys)
    yield close("∂(Σ pₙvₙ)/∂q and β Cov(v, k)", slope, beta * covariance, GRADIENT_BY_DIFFERENCES)
    yield at_least("∂(Σ pₙvₙ)/∂q less its transpose, values not keys", (slope - slope.mT).abs().max(), _CLEARLY_APART)

    yield from _weight_matrices(normal, normal(atoms, dimensions))
    yield from _self_attention(normal(atoms, dimensions), beta)
    yield from _biases_and_masks(normal, normal(atoms, dimensions), beta)


def _other_values(measure: Atoms, values: Tensor, eta: Tensor, expected: Tensor) -> Iterator[Check]:
    """Extension 1: Σ pₙvₙ is the gradient of log Σ wₙ exp(kₙ·η + θ·vₙ) in θ at 0."""
    pairs = Atoms.create(torch.cat([measure.points, values], -1), measure.log_weight)

    def log_partition(field: Tensor) -> Tensor:
        return pairs.log_partition(torch.cat([eta, field], -1))

    at_zero = torch.zeros_like(expected)
    by_autograd = torch.func.grad(lambda field: log_partition(field).sum())(at_zero)
    yield close("Σ pₙvₙ of the library and by the softmax", measure.expectation(eta, values), expected)
    yield close("∂A(q, θ)/∂θ at θ = 0 and Σ pₙvₙ", by_autograd, expected)
    by_differences = differences(log_partition, at_zero)
    yield close("differences of A(q, θ) in θ and Σ pₙvₙ", by_differences, expected, GRADIENT_BY_DIFFERENCES)


def _weight_matrices(normal: Normal, tokens: Tensor) -> Iterator[Check]:
    """Extension 2: through W_Q and W_K, and the condition for a head's write to be its own gradient."""
    width = tokens.shape[-1]
    head = (width + 1) // 2
    beta = head**-0.5
    # Entries of size 1/√width keep scores of size 1.
    to_query = normal(head, width) * width**-0.5
    to_key = normal(head, width) * width**-0.5
    stream = normal(1, width)

    def log_partition(stream: Tensor) -> Tensor:
        return Atoms.create(tokens @ to_key.T).log_partition(beta * stream @ to_query.T) / beta

    weights = torch.softmax(beta * stream @ to_query.T @ to_key @ tokens.T, -1)
    expected = weights @ tokens @ to_key.T @ to_query
    by_autograd = torch.func.grad(lambda x: log_partition(x).sum())(stream)
    yield close("∇ₓ log Z through W_Q, W_K and W_QᵀW_K Σ pₙxₙ", by_autograd, expected)
    by_differences = differences(log_partition, stream)
    yield close("differences in x and W_QᵀW_K Σ pₙxₙ", by_differences, expected, GRADIENT_BY_DIFFERENCES)

    tied = weights @ (tokens @ (2 * to_query.T @ to_key).T)
    yield close("write with W_O W_V = 2 W_QᵀW_K and 2 ∇ₓ log Z", tied, 2 * by_autograd)
    free = weights @ (tokens @ normal(width, width).T)
    across = free - by_autograd * (free * by_autograd).sum() / by_autograd.square().sum()
    yield at_least("write with a free W_O W_V, its part across ∇ₓ log Z", across.abs().max(), _CLEARLY_APART)


def _self_attention(tokens: Tensor, beta: float) -> Iterator[Check]:
    """Extension 3: through queries and keys at once there are two terms."""

    def energy(queries: Tensor, keys: Tensor) -> Tensor:
        return Atoms.create(keys).log_partition(beta * queries).sum() / beta

    weights = torch.softmax(beta * tokens @ tokens.T, -1)
    held = torch.func.grad(energy)(tokens, tokens)
    joint = torch.func.grad(lambda both: energy(both, both))(tokens)
    yield close("self-attention, keys held: ∂E/∂X and PX", held, weights @ tokens)
    yield close("self-attention, both move: ∂E/∂X and PX + PᵀX", joint, weights @ tokens + weights.T @ tokens)
    yield at_least("self-attention, both move: ∂E/∂X less PX", (joint - held).abs().max(), _CLEARLY_APART)


def _biases_and_masks(normal: Normal, tokens: Tensor, beta: float) -> Iterator[Check]:
    """Extension 4: query biases, position biases, masks and padding are weights of the measure."""
    count, width = tokens.shape
    query = normal(width)
    query_bias = normal(width)
    key_bias = normal(width)
    direct = torch.softmax(beta * (tokens + key_bias) @ (query + query_bias), -1)
    weighted = Atoms.create(tokens, beta * tokens @ query_bias)
    identity = torch.eye(count, dtype=tokens.dtype)
    yield close(
        "p with both biases and with log w = β b_Q·kₙ alone", weighted.expectation(beta * query, identity), direct
    )

    position = torch.arange(count, dtype=tokens.dtype)
    slope = -0.3 * (position[:, None] - position).abs()
    causal = position[:, None] < position
    log_weight = slope.masked_fill(causal, -torch.inf)
    rows = [torch.softmax(beta * tokens[: i + 1] @ tokens[i] + slope[i, : i + 1], -1) for i in range(count)]
    expected = torch.stack([row @ tokens[: i + 1] for i, row in enumerate(rows)])
    masked = Atoms.create(tokens.expand(count, count, width), log_weight)
    yield close("causal mask and linear bias as log w, and softmax over the past", masked.mean(beta * tokens), expected)

    visible = position < count - 1
    padded = Atoms.create(tokens, visible)
    short = Atoms.create(tokens[:-1])
    yield close("padding w = 0 and no padding: log Z", padded.log_partition(query), short.log_partition(query))
    nothing = Atoms.create(tokens, torch.zeros(count, dtype=torch.bool))
    yield close("no visible key: log Z and −∞", nothing.log_partition(query), -torch.inf)
    yield close("no visible key: the write and 0", nothing.mean(query), 0.0)


# --- S24 -------------------------------------------------------------------------------------------------------------


@claim(
    "S24",
    title="Dot product against squared distance",
    statement="Attention with a Gaussian kernel of query minus key is dot-product attention with weights "
    "wₙ = exp(−½kₙᵀMkₙ); dot-product attention is the posterior of a Gaussian mixture with prior weights exp(+½kₙᵀMkₙ).",
    source="completing the square",
    status="derived",
)
def distance_is_a_weight(atoms: int = 12, dimensions: int = 4, draws: int = 100, seed: int = 0) -> Iterator[Check]:
    check_at_least(2, atoms=atoms, dimensions=dimensions)
    normal = normal_draws(seed)
    root = normal(dimensions, dimensions) * dimensions**-0.5
    metric = root @ root.T + 0.5 * torch.eye(dimensions, dtype=root.dtype)
    keys = normal(atoms, dimensions)
    query = normal(draws, dimensions)
    identity = torch.eye(atoms, dtype=keys.dtype)

    def kernel(keys: Tensor) -> Tensor:
        """The softmax of −½(q − k)ᵀM(q − k)."""
        apart = query[:, None] - keys
        return torch.softmax(-0.5 * (apart @ metric * apart).sum(-1), -1)

    half_norm = 0.5 * (keys @ metric * keys).sum(-1)
    weighted = Atoms.create(keys, -half_norm).expectation(query @ metric, identity)
    # Theory's 1e-12, in units of the largest exponent's rounding.
    tolerance = 1e-12 * (1 + half_norm.max().item())
    yield close("Gaussian kernel and dot product with w = exp(−½kᵀMk)", weighted, kernel(keys), tolerance)

    plain = Atoms.create(keys).expectation(query @ metric, identity)
    components = Gaussian.create(keys, torch.linalg.inv(metric).expand(atoms, -1, -1))
    points = query.expand(atoms, draws, dimensions)
    log_density = components.log_prob(torch.zeros_like(points), points).T
    posterior = torch.softmax(half_norm + log_density, -1)
    yield close("dot product and the mixture's posterior, prior exp(+½kᵀMk)", plain, posterior)
    yield at_least(
        "dot product less Gaussian kernel, unequal norms", (plain - kernel(keys)).abs().max(), _CLEARLY_APART
    )

    level = keys / (2 * half_norm).sqrt().unsqueeze(-1)
    even = Atoms.create(level).expectation(query @ metric, identity)
    yield close("dot product and Gaussian kernel, equal norms", even, kernel(level), 1e-12)


# --- S25 -------------------------------------------------------------------------------------------------------------


@claim(
    "S25",
    title="The key origin is a gauge",
    statement="Adding one vector to all keys changes log Z and its gradient, but no attention weight. It does not "
    "change selective log Z, S = log Z − log Σw − Σ (w/Σw)s = KL(w/Σw ‖ p) ≥ 0, with ∇S = β(Σ pₙkₙ − k̄).",
    source="proved in docs/theory",
    status="derived",
    corrected="A key bias cancels in the attention weights but not in log Z. Whether a step raises log Z, and "
    "whether a head's write is its gradient (S3), therefore depends on the choice of origin.",
)
def key_origin_is_a_gauge(atoms: int = 12, dimensions: int = 4, draws: int = 100, seed: int = 0) -> Iterator[Check]:
    check_at_least(2, atoms=atoms)
    normal = normal_draws(seed)
    beta = dimensions**-0.5
    keys = normal(atoms, dimensions)
    log_weight = normal(atoms)
    bias = normal(dimensions)
    query = normal(draws, dimensions)
    step = normal(draws, dimensions)
    measure = Atoms.create(keys, log_weight)
    shifted = Atoms.create(keys + bias, log_weight)
    share = torch.softmax(log_weight, -1)
    eta = beta * query
    common = share @ keys

    def selective(measure: Measure, keys: Tensor, query: Tensor) -> Tensor:
        return measure.log_partition(beta * query) - log_weight.logsumexp(-1) - beta * query @ keys.T @ share

    value = selective(measure, keys, query)
    # Rounding grows with the scores; 1 + their largest is its unit.
    unit = 1 + (beta * query @ (keys + bias).T).abs().max().item()
    yield close("S of keys k and of keys k + b", selective(shifted, keys + bias, query), value, 1e-12 * unit)
    identity = torch.eye(atoms, dtype=keys.dtype)
    weights = torch.softmax(eta @ keys.T + log_weight, -1)
    yield close("p of keys k + b and p of keys k", shifted.expectation(eta, identity), weights, 1e-14 * unit)
    yield close("entropy of keys k + b and k", shifted.entropy(eta), measure.entropy(eta), 1e-12 * unit)
    centred = _covariance(weights, keys, keys)
    yield close("∇²A of keys k + b and the covariance of keys k", shifted.fisher(eta), centred, 1e-12 * unit**2)
    other = beta * (query + step)
    divergence = (weights * (weights.log() - torch.log_softmax(other @ keys.T + log_weight, -1))).sum(-1)
    yield close("KL of keys k + b and of keys k", shifted.kl(eta, other), divergence)
    yield close("log Z gains βq·b", shifted.log_partition(eta) - measure.log_partition(eta), eta @ bias)
    yield close("∇A gains b", shifted.mean(eta) - measure.mean(eta), bias.expand(draws, -1))

    from_share = (share * (share.log() - weights.log())).sum(-1)
    yield close("S and KL(w/Σw ‖ p)", value, from_share)
    yield close("S and KL(p₀ ‖ p_η) = B_A(η, 0)", measure.kl(torch.zeros_like(eta), eta), from_share)
    yield at_least("S ≥ 0", value, -1e-12 * unit)
    even = Atoms.create(keys).log_partition(eta) - math.log(atoms) - (eta @ keys.T).mean(-1)
    uniform = -torch.log_softmax(eta @ keys.T, -1).mean(-1) - math.log(atoms)
    yield close("unweighted S and KL(uniform ‖ p)", even, uniform)

    gradient = beta * (weights @ keys - common)
    by_differences = differences(lambda q: selective(measure, keys, q), query)
    yield close("differences of S and β(Σ pₙkₙ − k̄)", by_differences, gradient, GRADIENT_BY_DIFFERENCES)
    change = measure.log_partition(other) - measure.log_partition(eta)
    rise = selective(measure, keys, query + step) - value
    yield close("change of log Z and common part + selective part", change, beta * step @ common + rise)
    yield from _sign_is_free(measure, beta, query, gradient / beta)
    yield from _write_modulo_a_constant(normal, keys, share, weights, gradient)


def _sign_is_free(measure: Atoms, beta: float, query: Tensor, direction: Tensor) -> Iterator[Check]:
    """For a step along ∇S, a key bias makes log Z fall by one nat; S rises under either (it is convex)."""
    eta = beta * query
    other = beta * (query + direction)
    change = measure.log_partition(other) - measure.log_partition(eta)
    bias = -(1 + change).unsqueeze(-1) * direction / (beta * direction.square().sum(-1, keepdim=True))
    each = Atoms.create(measure.points + bias.unsqueeze(-2), measure.log_weight.expand(len(query), -1))
    yield close(
        "a key bias that makes log Z fall by one nat", each.log_partition(other) - each.log_partition(eta), -1.0
    )
    zero = torch.zeros_like(eta)
    surplus = measure.kl(zero, other) - measure.kl(zero, eta) - beta * direction.square().sum(-1)
    yield at_least("while S rises by ‖∇S‖²/β or more: what is more", surplus, -1e-12)


def _write_modulo_a_constant(
    normal: Normal, keys: Tensor, share: Tensor, weights: Tensor, gradient: Tensor
) -> Iterator[Check]:
    """Values 2k + a write, up to a constant, twice the gradient of S, whatever a is."""
    beta = keys.shape[-1] ** -0.5
    values = 2 * keys + normal(keys.shape[-1])
    yield close(
        "write of values 2k + a less its mean value, and 2∇S/β", weights @ values - share @ values, 2 * gradient / beta
    )


def _covariance(weights: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Cov_p(left, right) for weights (*lead, N): shape (*lead, d, d)."""
    apart = left - (weights @ left).unsqueeze(-2)
    return (weights.unsqueeze(-1) * apart).mT @ (right - (weights @ right).unsqueeze(-2))
