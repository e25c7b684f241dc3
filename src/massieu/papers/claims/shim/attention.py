"""S3, S24, S25: attention as the gradient of a log-partition; kernels of distance; the key origin as a gauge."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from massieu.measures import Atoms, Gaussian
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
    weights = torch.softmax(beta * query @ keys.T + log_weight, -1)

    # With the keys as values: the output Σ pₙxₙ is a gradient, so that its Jacobian is symmetric.
    output = weights @ keys
    yield close("∇A(βq) and Σ pₙxₙ", measure.mean(beta * query), output)
    gradient = differences(lambda q: measure.log_partition(beta * q) / beta, query)
    yield close("differences of A_β and Σ pₙxₙ", gradient, output, GRADIENT_BY_DIFFERENCES)
    yield from _other_values(measure, values, beta * query, weights @ values)
    jacobian = differences(lambda q: measure.mean(beta * q), query)
    yield close("∂(Σ pₙxₙ)/∂q and its transpose", jacobian, jacobian.mT, GRADIENT_BY_DIFFERENCES)

    # With other values it is not.
    jacobian = differences(lambda q: measure.expectation(beta * q, values), query)
    covariance = _covariance(weights, values, keys)
    yield close("∂(Σ pₙvₙ)/∂q and β Cov(v, k)", jacobian, beta * covariance, GRADIENT_BY_DIFFERENCES)
    asymmetry = (jacobian - jacobian.mT).abs().max()
    yield at_least("∂(Σ pₙvₙ)/∂q less its transpose, values not keys", asymmetry, _CLEARLY_APART)

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
    head_width = (width + 1) // 2
    beta = head_width**-0.5
    # Entries of size 1/√width keep scores of size 1.
    query_weight = normal(head_width, width) * width**-0.5
    key_weight = normal(head_width, width) * width**-0.5
    hidden_state = normal(1, width)

    def log_partition(hidden_state: Tensor) -> Tensor:
        keys = tokens @ key_weight.T
        eta = beta * hidden_state @ query_weight.T
        return Atoms.create(keys).log_partition(eta) / beta

    weights = torch.softmax(beta * hidden_state @ query_weight.T @ key_weight @ tokens.T, -1)
    expected = weights @ tokens @ key_weight.T @ query_weight
    gradient = torch.func.grad(lambda x: log_partition(x).sum())(hidden_state)
    yield close("∇ₓ log Z through W_Q, W_K and W_QᵀW_K Σ pₙxₙ", gradient, expected)
    by_differences = differences(log_partition, hidden_state)
    yield close("differences in x and W_QᵀW_K Σ pₙxₙ", by_differences, expected, GRADIENT_BY_DIFFERENCES)

    # A head writes its gradient if W_O W_V is a multiple of W_QᵀW_K, and in general not otherwise.
    tied_write = weights @ (tokens @ (2 * query_weight.T @ key_weight).T)
    yield close("write with W_O W_V = 2 W_QᵀW_K and 2 ∇ₓ log Z", tied_write, 2 * gradient)
    free_write = weights @ (tokens @ normal(width, width).T)
    across = free_write - gradient * (free_write * gradient).sum() / gradient.square().sum()
    yield at_least("write with a free W_O W_V, its part across ∇ₓ log Z", across.abs().max(), _CLEARLY_APART)


def _self_attention(tokens: Tensor, beta: float) -> Iterator[Check]:
    """Extension 3: the gradient through queries and keys at once has two terms."""

    def energy(queries: Tensor, keys: Tensor) -> Tensor:
        return Atoms.create(keys).log_partition(beta * queries).sum() / beta

    weights = torch.softmax(beta * tokens @ tokens.T, -1)
    by_queries = torch.func.grad(energy)(tokens, tokens)
    by_both = torch.func.grad(lambda x: energy(x, x))(tokens)
    yield close("self-attention, keys held: ∂E/∂X and PX", by_queries, weights @ tokens)
    yield close("self-attention, both move: ∂E/∂X and PX + PᵀX", by_both, weights @ tokens + weights.T @ tokens)
    yield at_least("self-attention, both move: ∂E/∂X less PX", (by_both - by_queries).abs().max(), _CLEARLY_APART)


def _biases_and_masks(normal: Normal, tokens: Tensor, beta: float) -> Iterator[Check]:
    """Extension 4: query biases, position biases, masks and padding are weights of the measure."""
    count, width = tokens.shape
    query = normal(width)
    query_bias = normal(width)
    key_bias = normal(width)
    # The key bias adds the same to every score, which the softmax does not see.
    expected = torch.softmax(beta * (tokens + key_bias) @ (query + query_bias), -1)
    measure = Atoms.create(tokens, beta * tokens @ query_bias)
    identity = torch.eye(count, dtype=tokens.dtype)
    weights = measure.expectation(beta * query, identity)
    yield close("p with both biases and with log w = β b_Q·kₙ alone", weights, expected)

    position = torch.arange(count, dtype=tokens.dtype)
    position_bias = -0.3 * (position[:, None] - position).abs()
    is_future = position[:, None] < position
    outputs = []
    for i in range(count):
        past = tokens[: i + 1]
        scores = beta * past @ tokens[i] + position_bias[i, : i + 1]
        outputs.append(torch.softmax(scores, -1) @ past)
    # One measure for each query, shape (queries, keys, width).
    measure = Atoms.create(tokens.expand(count, count, width), position_bias.masked_fill(is_future, -torch.inf))
    output = measure.mean(beta * tokens)
    yield close("causal mask and linear bias as log w, and softmax over the past", output, torch.stack(outputs))

    is_token = position < count - 1
    padded = Atoms.create(tokens, is_token)
    unpadded = Atoms.create(tokens[:-1])
    yield close("padding w = 0 and no padding: log Z", padded.log_partition(query), unpadded.log_partition(query))
    all_masked = Atoms.create(tokens, torch.zeros(count, dtype=torch.bool))
    yield close("no visible key: log Z and −∞", all_masked.log_partition(query), -torch.inf)
    yield close("no visible key: the write and 0", all_masked.mean(query), 0.0)


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

    def kernel_weights(keys: Tensor) -> Tensor:
        """The softmax of −½(q − k)ᵀM(q − k)."""
        difference = query[:, None] - keys
        return torch.softmax(-0.5 * (difference @ metric * difference).sum(-1), -1)

    half_norm = 0.5 * (keys @ metric * keys).sum(-1)
    weighted = Atoms.create(keys, -half_norm).expectation(query @ metric, identity)
    # Theory's 1e-12, in units of the largest exponent's rounding.
    tolerance = 1e-12 * (1 + half_norm.max().item())
    yield close("Gaussian kernel and dot product with w = exp(−½kᵀMk)", weighted, kernel_weights(keys), tolerance)

    unweighted = Atoms.create(keys).expectation(query @ metric, identity)
    components = Gaussian.create(keys, torch.linalg.inv(metric).expand(atoms, -1, -1))
    points = query.expand(atoms, draws, dimensions)
    log_density = components.log_prob(torch.zeros_like(points), points).T  # (draws, atoms)
    posterior = torch.softmax(half_norm + log_density, -1)
    yield close("dot product and the mixture's posterior, prior exp(+½kᵀMk)", unweighted, posterior)
    difference = (unweighted - kernel_weights(keys)).abs().max()
    yield at_least("dot product less Gaussian kernel, unequal norms", difference, _CLEARLY_APART)

    equal_norm_keys = keys / (2 * half_norm).sqrt().unsqueeze(-1)
    unweighted = Atoms.create(equal_norm_keys).expectation(query @ metric, identity)
    yield close("dot product and Gaussian kernel, equal norms", unweighted, kernel_weights(equal_norm_keys), 1e-12)


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
    # Rounding grows with the scores; 1 + their largest is its unit.
    unit = 1 + (beta * query @ (keys + bias).T).abs().max().item()
    yield from _shifted_keys(keys, log_weight, bias, beta * query, beta * (query + step), unit)
    yield from _selective_log_partition(keys, log_weight, beta * query, unit)
    yield from _gradient_of_selective(keys, log_weight, query, step, beta)

    measure = Atoms.create(keys, log_weight)
    weights = torch.softmax(beta * query @ keys.T + log_weight, -1)
    prior_weights = torch.softmax(log_weight, -1)
    gradient = beta * (weights @ keys - prior_weights @ keys)
    yield from _sign_is_free(measure, beta, query, gradient / beta)
    # Values 2k + a write, up to a constant, twice the gradient of S, whatever a is.
    values = 2 * keys + normal(dimensions)
    write = weights @ values - prior_weights @ values
    yield close("write of values 2k + a less its mean value, and 2∇S/β", write, 2 * gradient / beta)


def _selective(keys: Tensor, log_weight: Tensor, eta: Tensor) -> Tensor:
    """S = log Z − log Σw − Σ (w/Σw)s."""
    mean_score = eta @ keys.T @ torch.softmax(log_weight, -1)
    return Atoms.create(keys, log_weight).log_partition(eta) - log_weight.logsumexp(-1) - mean_score


def _shifted_keys(
    keys: Tensor, log_weight: Tensor, bias: Tensor, eta: Tensor, other_eta: Tensor, unit: float
) -> Iterator[Check]:
    """A key bias changes log Z and ∇A, and nothing that depends on the weights alone."""
    measure = Atoms.create(keys, log_weight)
    shifted = Atoms.create(keys + bias, log_weight)
    selective = _selective(keys, log_weight, eta)
    yield close("S of keys k and of keys k + b", _selective(keys + bias, log_weight, eta), selective, 1e-12 * unit)
    identity = torch.eye(len(keys), dtype=keys.dtype)
    weights = torch.softmax(eta @ keys.T + log_weight, -1)
    yield close("p of keys k + b and p of keys k", shifted.expectation(eta, identity), weights, 1e-14 * unit)
    yield close("entropy of keys k + b and k", shifted.entropy(eta), measure.entropy(eta), 1e-12 * unit)
    covariance = _covariance(weights, keys, keys)
    yield close("∇²A of keys k + b and the covariance of keys k", shifted.fisher(eta), covariance, 1e-12 * unit**2)
    other_log_weights = torch.log_softmax(other_eta @ keys.T + log_weight, -1)
    divergence = (weights * (weights.log() - other_log_weights)).sum(-1)
    yield close("KL of keys k + b and of keys k", shifted.kl(eta, other_eta), divergence)
    yield close("log Z gains βq·b", shifted.log_partition(eta) - measure.log_partition(eta), eta @ bias)
    yield close("∇A gains b", shifted.mean(eta) - measure.mean(eta), bias.expand(len(eta), -1))


def _selective_log_partition(keys: Tensor, log_weight: Tensor, eta: Tensor, unit: float) -> Iterator[Check]:
    """S is a divergence, and so not negative."""
    selective = _selective(keys, log_weight, eta)
    weights = torch.softmax(eta @ keys.T + log_weight, -1)
    prior_weights = torch.softmax(log_weight, -1)
    divergence = (prior_weights * (prior_weights.log() - weights.log())).sum(-1)
    yield close("S and KL(w/Σw ‖ p)", selective, divergence)
    measure = Atoms.create(keys, log_weight)
    yield close("S and KL(p₀ ‖ p_η) = B_A(η, 0)", measure.kl(torch.zeros_like(eta), eta), divergence)
    yield at_least("S ≥ 0", selective, -1e-12 * unit)
    atoms = len(keys)
    unweighted = Atoms.create(keys).log_partition(eta) - math.log(atoms) - (eta @ keys.T).mean(-1)
    divergence = -torch.log_softmax(eta @ keys.T, -1).mean(-1) - math.log(atoms)
    yield close("unweighted S and KL(uniform ‖ p)", unweighted, divergence)


def _gradient_of_selective(
    keys: Tensor, log_weight: Tensor, query: Tensor, step: Tensor, beta: float
) -> Iterator[Check]:
    """∇S = β(Σ pₙkₙ − k̄), and log Z changes by β k̄·step more than S does."""
    eta = beta * query
    weights = torch.softmax(eta @ keys.T + log_weight, -1)
    mean_key = torch.softmax(log_weight, -1) @ keys
    gradient = beta * (weights @ keys - mean_key)
    by_differences = differences(lambda q: _selective(keys, log_weight, beta * q), query)
    yield close("differences of S and β(Σ pₙkₙ − k̄)", by_differences, gradient, GRADIENT_BY_DIFFERENCES)
    other_eta = beta * (query + step)
    measure = Atoms.create(keys, log_weight)
    change = measure.log_partition(other_eta) - measure.log_partition(eta)
    rise = _selective(keys, log_weight, other_eta) - _selective(keys, log_weight, eta)
    yield close("change of log Z and common part + selective part", change, beta * step @ mean_key + rise)


def _sign_is_free(measure: Atoms, beta: float, query: Tensor, direction: Tensor) -> Iterator[Check]:
    """For a step along ∇S, a key bias makes log Z fall by one nat; S, which is convex, rises with and without it."""
    eta = beta * query
    other_eta = beta * (query + direction)
    change = measure.log_partition(other_eta) - measure.log_partition(eta)
    # A bias b adds β b·direction to the change, one bias for each query.
    bias = -(1 + change).unsqueeze(-1) * direction / (beta * direction.square().sum(-1, keepdim=True))
    shifted = Atoms.create(measure.points + bias.unsqueeze(-2), measure.log_weight.expand(len(query), -1))
    change = shifted.log_partition(other_eta) - shifted.log_partition(eta)
    yield close("a key bias that makes log Z fall by one nat", change, -1.0)
    zero = torch.zeros_like(eta)
    surplus = measure.kl(zero, other_eta) - measure.kl(zero, eta) - beta * direction.square().sum(-1)
    yield at_least("while S rises by ‖∇S‖²/β or more: what is more", surplus, -1e-12)


def _covariance(weights: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Cov_p(left, right) for weights (*lead, N): shape (*lead, d, d)."""
    left_deviation = left - (weights @ left).unsqueeze(-2)
    right_deviation = right - (weights @ right).unsqueeze(-2)
    return (weights.unsqueeze(-1) * left_deviation).mT @ right_deviation
