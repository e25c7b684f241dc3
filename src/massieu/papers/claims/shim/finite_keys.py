"""S15: attention over finitely many keys as an estimator of attention over their law."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.measures import Atoms, Gaussian
from massieu.papers.claims.claim import QUADRATURE, Check, close, near_in_standard_errors
from massieu.papers.claims.inputs import check_at_least, normal_draws
from massieu.papers.claims.rates import has_exact_rate, has_rate, rate
from massieu.papers.claims.registry import claim

_NUMBERS_IN_A_BLOCK = 200_000
_MANY_KEYS = 1_000_000
_SIZES = [128, 256, 512, 1024, 2048, 4096]
_REPETITIONS_OF_A_SIZE = 300

# The law of the keys and η = βq: ηᵀΣη = 0.666, so that Ẑ of one key has the relative variance e^0.666 − 1.
_LOCATION = torch.tensor([0.3, -0.2], dtype=torch.float64)
_COVARIANCE = torch.tensor([[1.0, 0.3], [0.3, 0.5]], dtype=torch.float64)
_ETA = torch.tensor([0.9, -0.6], dtype=torch.float64)
_SHIFT = _COVARIANCE @ _ETA
_VARIANCE = (_SHIFT @ _ETA).item()


class _Errors(NamedTuple):
    """What N keys make of attention and of log Z, times N."""

    bias: Float[Tensor, "2"]
    covariance: Float[Tensor, "2 2"]
    log_bias: Float[Tensor, ""]

    def entries(self) -> dict[str, Tensor]:
        """The different numbers among them, by name."""
        first, second = self.bias
        ((a, b), (_, c)) = self.covariance
        bias = {"N·bias, first coordinate": first, "N·bias, second": second}
        covariance = {"N·Cov, first coordinate": a, "N·Cov, both": b, "N·Cov, second": c}
        return {**bias, **covariance, "N·(E log Ẑ − log Z)": self.log_bias}


@claim(
    "S15",
    title="Error of attention to finitely many keys",
    statement="To leading order, attention over N independent keys has the bias −E[e^{2βk·q}(v − m)]/(NZ²) and the "
    "covariance E[e^{2βk·q}(v − m)(v − m)ᵀ]/(NZ²). For Gaussian keys these are −e^{β²qᵀΣq}βΣq/N and e^{β²qᵀΣq}(Σ + "
    "β²ΣqqᵀΣ)/N. (1/N)Σ e^{βk·q} is unbiased for Z; its logarithm is biased by −Var/(2NZ²). Errors fall as N^{−½}, "
    "biases as N^{−1}.",
    source="delta method",
    status="derived",
)
def finitely_many_keys(N: int = 500, repetitions: int = 50_000, seed: int = 0) -> Iterator[Check]:
    # Fewer repetitions have no normal law of their means to speak of.
    check_at_least(1000, repetitions=repetitions)
    deviation, log_ratio = _simulate(N, repetitions, seed)
    simulated, error = _estimate(N, deviation, log_ratio)
    exact = _exact(N).entries()
    for name, value in simulated.entries().items():
        yield near_in_standard_errors(f"{name}: simulated and exact", value, exact[name], error.entries()[name])
    spread = math.sqrt((_power(2) - 1) / (N * repetitions))
    yield near_in_standard_errors("E Ẑ/Z: simulated and 1", log_ratio.exp().mean(), 1.0, spread)

    limit, next_order = _expansion()
    second_moment = _tilted_second_moment()
    yield close("E[e^{2βk·q}(k − m)(k − m)ᵀ]/Z² and its Gaussian form", second_moment, limit.covariance, QUADRATURE)
    # What is left out has order 1/N²: 1e-12 here, times coefficients below 1e3.
    correction = {name: value / _MANY_KEYS for name, value in next_order.entries().items()}
    for name, value in _exact(_MANY_KEYS).entries().items():
        corrected = limit.entries()[name] + correction[name]
        yield close(f"{name}: exact at 10⁶ keys, and limit + next order", value, corrected, QUADRATURE)
    yield from _rates(seed)


def _rates(seed: int) -> Iterator[Check]:
    """Errors by simulation, biases by their exact integrals."""
    errors = [_simulate(size, _REPETITIONS_OF_A_SIZE, seed + 1 + index)[0] for index, size in enumerate(_SIZES)]
    found = rate(_SIZES, torch.stack(errors).norm(dim=-1))
    yield has_rate("size of the error of N keys, in N", found, -0.5)
    exact = [_exact(size) for size in _SIZES]
    for name, bias in {
        "bias of attention": [e.bias.norm() for e in exact],
        "bias of log Ẑ": [e.log_bias for e in exact],
    }.items():
        biases = torch.stack(bias).abs() / torch.tensor(_SIZES, dtype=torch.float64)
        yield has_exact_rate(f"{name} over N keys, in N", _SIZES, biases, -1.0)


def _simulate(
    keys: int, repetitions: int, seed: int
) -> tuple[Float[Tensor, "repetitions 2"], Float[Tensor, "repetitions"]]:
    """Attention less m, and log Ẑ − log Z, of fresh keys in every repetition."""
    normal = normal_draws(seed)
    law = Gaussian.create(_LOCATION, _COVARIANCE)
    mean = law.mean(_ETA)
    log_partition = law.log_partition(_ETA) + math.log(keys)
    root = torch.linalg.cholesky(_COVARIANCE)
    block = max(1, _NUMBERS_IN_A_BLOCK // (2 * keys))
    deviations = []
    log_ratios = []
    for start in range(0, repetitions, block):
        count = min(block, repetitions - start)
        measure = Atoms.create(_LOCATION + normal(count, keys, 2) @ root.T)
        eta = _ETA.expand(count, 2)
        deviations.append(measure.mean(eta) - mean)
        log_ratios.append(measure.log_partition(eta) - log_partition)
    return torch.cat(deviations), torch.cat(log_ratios)


def _estimate(keys: int, deviation: Tensor, log_ratio: Tensor) -> tuple[_Errors, _Errors]:
    """The errors from their repetitions, and the standard errors of these."""
    count = len(deviation)
    bias = deviation.mean(0)
    log_bias = log_ratio.mean()
    apart = deviation - bias
    products = apart.unsqueeze(-1) * apart.unsqueeze(-2)
    covariance = products.mean(0)
    standard = (keys / math.sqrt(count) * spread for spread in (apart.std(0), products.std(0), log_ratio.std()))
    return _Errors(keys * bias, keys * covariance, keys * log_bias), _Errors(*standard)


def _exact(keys: int) -> _Errors:
    """The errors for any N without simulation, from Laplace transforms of one key's weight w = e^{k·η}/Z.

    With S = Σw and x = k − m, 1/S = ∫ e^{−tS} dt gives E[Σwx/S] = N ∫ E[wx e^{−tw}] φᴺ⁻¹ dt, φ = E[e^{−tw}]; in the same
    way 1/S² = ∫ t e^{−tS} dt, and log S = ∫ (e^{−t} − e^{−tS})/t dt. Both integrals are by the trapezoid rule, exact to
    rounding since the integrands are analytic and vanish at both ends; t = u/N, and u = e^τ.
    """
    step = 0.02
    u = torch.arange(-40.0, 40.0, step, dtype=torch.float64).exp()
    share, weight, along = _one_key()
    exponent = -u[:, None] / keys * weight
    kept = exponent.exp()
    change = torch.expm1(exponent)
    # Below e^−600 nothing is left of φ, unless its exponent is 0.
    log_phi = torch.log1p(change @ share).clamp_min(-600)
    # E[wx] = 0, so that e^{−tw} − 1 may stand for e^{−tw}: no digits are lost at small t.
    slope = torch.where(u < keys, change @ (share * weight * along), kept @ (share * weight * along))
    own = torch.exp((keys - 1) * log_phi)
    pair = (keys - 1) * slope.square() * torch.exp((keys - 2) * log_phi)

    bias = (u * slope * own).sum() * step * _SHIFT
    along_shift = (u.square() * ((kept @ (share * weight.square() * along.square())) * own + pair)).sum() * step
    across = (u.square() * (kept @ (share * weight.square())) * own).sum() * step
    square = torch.outer(_SHIFT, _SHIFT)
    second_moment = along_shift * square + across * (_COVARIANCE - square / _VARIANCE)
    log_mean = (torch.exp(-u) - torch.exp(keys * log_phi)).sum() * step
    return _Errors(keys * bias, second_moment - keys * torch.outer(bias, bias), keys * log_mean)


def _one_key() -> tuple[Float[Tensor, "nodes"], Float[Tensor, "nodes"], Float[Tensor, "nodes"]]:
    """Nodes z of k·η = μ·η + √(ηᵀΣη) z: their probabilities, w, and c of the part c·βΣq of x that lies along βΣq."""
    step = 0.05
    z = torch.arange(-14.0, 14.0, step, dtype=torch.float64)
    share = torch.exp(-0.5 * z.square()) * step / math.sqrt(2 * math.pi)
    return share, torch.exp(math.sqrt(_VARIANCE) * z - 0.5 * _VARIANCE), z / math.sqrt(_VARIANCE) - 1


def _tilted_second_moment() -> Float[Tensor, "2 2"]:
    """E[w²xxᵀ] by the trapezoid rule."""
    share, weight, along = _one_key()
    square = torch.outer(_SHIFT, _SHIFT)
    across = (share * weight.square()).sum() * (_COVARIANCE - square / _VARIANCE)
    return (share * weight.square() * along.square()).sum() * square + across


def _power(order: int) -> float:
    """E[wⁿ]."""
    return math.exp(0.5 * order * (order - 1) * _VARIANCE)


def _expansion() -> tuple[_Errors, _Errors]:
    """The limits, and the coefficients of 1/N that follow, from E[wⁿx] = E[wⁿ](n − 1)s and E[wⁿxxᵀ], s = βΣq.

    With D = S/N − 1 and U = Σwx/N, attention less m is U(1 − D + D² − …); a product of n centred sums has the mean
    of its pairings at order N^{−n/2}, and triples one order later.
    """
    square = torch.outer(_SHIFT, _SHIFT)
    second = _power(2)
    third = _power(3)
    variance = second - 1
    skewness = third - 3 * second + 2
    covariance = second * (_COVARIANCE + square)
    with_d = third * (_COVARIANCE + 4 * square) - covariance
    limit = _Errors(-second * _SHIFT, covariance, torch.tensor(-0.5 * variance, dtype=torch.float64))
    next_order = _Errors(
        (2 * third - 2 * second - 3 * second * variance) * _SHIFT,
        3 * variance * covariance - 2 * with_d + 5 * second**2 * square,
        torch.tensor(skewness / 3 - 0.75 * variance**2, dtype=torch.float64),
    )
    return limit, next_order
