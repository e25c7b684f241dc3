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
    """Bias and covariance of attention over N keys, and the bias of its log Z, all times N."""

    bias: Float[Tensor, "2"]
    covariance: Float[Tensor, "2 2"]
    log_bias: Float[Tensor, ""]

    def entries(self) -> dict[str, Tensor]:
        """The numbers by name; the covariance is symmetric."""
        return {
            "N·bias, first coordinate": self.bias[0],
            "N·bias, second": self.bias[1],
            "N·Cov, first coordinate": self.covariance[0, 0],
            "N·Cov, both": self.covariance[0, 1],
            "N·Cov, second": self.covariance[1, 1],
            "N·(E log Ẑ − log Z)": self.log_bias,
        }


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
    # Means of fewer repetitions are not near a normal law.
    check_at_least(1000, repetitions=repetitions)
    yield from _simulation(N, repetitions, seed)
    yield from _leading_order()
    yield from _rates(seed)


def _simulation(keys: int, repetitions: int, seed: int) -> Iterator[Check]:
    """Simulated errors of N keys, against their exact values."""
    deviation, log_ratio = _simulate(keys, repetitions, seed)
    estimates, standard_errors = _estimate(keys, deviation, log_ratio)
    exact = _exact(keys).entries()
    error = standard_errors.entries()
    for name, estimate in estimates.entries().items():
        yield near_in_standard_errors(f"{name}: simulated and exact", estimate, exact[name], error[name])
    error_of_mean = math.sqrt((_power(2) - 1) / (keys * repetitions))
    yield near_in_standard_errors("E Ẑ/Z: simulated and 1", log_ratio.exp().mean(), 1.0, error_of_mean)


def _leading_order() -> Iterator[Check]:
    """Exact errors of a million keys, against the formulas of the claim and the order that follows."""
    limit, next_order = _expansion()
    second_moment = _tilted_second_moment()
    yield close("E[e^{2βk·q}(k − m)(k − m)ᵀ]/Z² and its Gaussian form", second_moment, limit.covariance, QUADRATURE)
    # The terms left out have the order 1/N²: 1e-12 here, times coefficients below 1e3.
    leading = limit.entries()
    coefficient = next_order.entries()
    for name, exact in _exact(_MANY_KEYS).entries().items():
        expected = leading[name] + coefficient[name] / _MANY_KEYS
        yield close(f"{name}: exact at 10⁶ keys, and limit + next order", exact, expected, QUADRATURE)


def _rates(seed: int) -> Iterator[Check]:
    """Rates in N: of errors by simulation, of biases by their exact integrals."""
    deviations = []
    for index, size in enumerate(_SIZES):
        deviation, _ = _simulate(size, _REPETITIONS_OF_A_SIZE, seed + 1 + index)
        deviations.append(deviation)
    errors = torch.stack(deviations).norm(dim=-1)  # (sizes, repetitions)
    yield has_rate("size of the error of N keys, in N", rate(_SIZES, errors), -0.5)
    sizes = torch.tensor(_SIZES, dtype=torch.float64)
    exact = [_exact(size) for size in _SIZES]
    biases = torch.stack([errors.bias.norm() for errors in exact]).abs() / sizes
    yield has_exact_rate("bias of attention over N keys, in N", _SIZES, biases, -1.0)
    log_biases = torch.stack([errors.log_bias for errors in exact]).abs() / sizes
    yield has_exact_rate("bias of log Ẑ over N keys, in N", _SIZES, log_biases, -1.0)


def _simulate(
    keys: int, repetitions: int, seed: int
) -> tuple[Float[Tensor, "repetitions 2"], Float[Tensor, "repetitions"]]:
    """Attention less m, and log Ẑ − log Z, of fresh keys in every repetition."""
    normal = normal_draws(seed)
    law = Gaussian.create(_LOCATION, _COVARIANCE)
    mean = law.mean(_ETA)
    # Atoms of weight 1 each: their partition function estimates N·Z.
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
    bias = deviation.mean(0)
    centred = deviation - bias
    products = centred.unsqueeze(-1) * centred.unsqueeze(-2)
    covariance = products.mean(0)
    log_bias = log_ratio.mean()
    estimates = _Errors(keys * bias, keys * covariance, keys * log_bias)
    factor = keys / math.sqrt(len(deviation))
    standard_errors = _Errors(factor * centred.std(0), factor * products.std(0), factor * log_ratio.std())
    return estimates, standard_errors


def _exact(keys: int) -> _Errors:
    """The errors for any N without simulation, from Laplace transforms of one key's weight w = e^{k·η}/Z.

    With S = Σw and x = k − m, 1/S = ∫ e^{−tS} dt gives E[Σwx/S] = N ∫ E[wx e^{−tw}] φᴺ⁻¹ dt, φ = E[e^{−tw}]; in the same
    way 1/S² = ∫ t e^{−tS} dt, and log S = ∫ (e^{−t} − e^{−tS})/t dt. Both integrals are by the trapezoid rule, exact to
    rounding since the integrands are analytic and vanish at both ends; t = u/N, and u = e^τ.
    """
    step = 0.02
    u = torch.arange(-40.0, 40.0, step, dtype=torch.float64).exp()
    key = _one_key()
    exponent = -u[:, None] / keys * key.weight  # (u, nodes)
    laplace = exponent.exp()  # e^{−tw}
    laplace_less_1 = torch.expm1(exponent)
    # Below e^−600 nothing is left of φ, unless its exponent is 0.
    log_phi = torch.log1p(laplace_less_1 @ key.probability).clamp_min(-600)
    # E[wx] = 0, so that e^{−tw} − 1 may stand for e^{−tw}: no digits are lost at small t.
    weighted_along = key.probability * key.weight * key.along
    slope = torch.where(u < keys, laplace_less_1 @ weighted_along, laplace @ weighted_along)
    other_keys = torch.exp((keys - 1) * log_phi)  # φᴺ⁻¹
    pairs = (keys - 1) * slope.square() * torch.exp((keys - 2) * log_phi)

    # du = u dτ; in 1/S² the factor t makes it u².
    bias = (u * slope * other_keys).sum() * step * _SHIFT
    square_along = laplace @ (key.probability * key.weight.square() * key.along.square())
    along_shift = (u.square() * (square_along * other_keys + pairs)).sum() * step
    square = laplace @ (key.probability * key.weight.square())
    across_shift = (u.square() * square * other_keys).sum() * step
    shift_square = torch.outer(_SHIFT, _SHIFT)
    second_moment = along_shift * shift_square + across_shift * (_COVARIANCE - shift_square / _VARIANCE)
    log_mean = (torch.exp(-u) - torch.exp(keys * log_phi)).sum() * step
    return _Errors(keys * bias, second_moment - keys * torch.outer(bias, bias), keys * log_mean)


class _Key(NamedTuple):
    """One key k by nodes z of k·η = μ·η + √(ηᵀΣη) z, in the trapezoid rule.

    Attributes:
        probability: Of the nodes.
        weight: w = e^{k·η}/Z.
        along: The number c in the part c·βΣq of x = k − m that lies along βΣq.
    """

    probability: Float[Tensor, "nodes"]
    weight: Float[Tensor, "nodes"]
    along: Float[Tensor, "nodes"]


def _one_key() -> _Key:
    step = 0.05
    z = torch.arange(-14.0, 14.0, step, dtype=torch.float64)
    probability = torch.exp(-0.5 * z.square()) * step / math.sqrt(2 * math.pi)
    weight = torch.exp(math.sqrt(_VARIANCE) * z - 0.5 * _VARIANCE)
    along = z / math.sqrt(_VARIANCE) - 1
    return _Key(probability, weight, along)


def _tilted_second_moment() -> Float[Tensor, "2 2"]:
    """E[w²xxᵀ] by the trapezoid rule."""
    probability, weight, along = _one_key()
    shift_square = torch.outer(_SHIFT, _SHIFT)
    across_shift = (probability * weight.square()).sum() * (_COVARIANCE - shift_square / _VARIANCE)
    return (probability * weight.square() * along.square()).sum() * shift_square + across_shift


def _power(order: int) -> float:
    """E[wⁿ]."""
    return math.exp(0.5 * order * (order - 1) * _VARIANCE)


def _expansion() -> tuple[_Errors, _Errors]:
    """The limits, and the coefficients of 1/N that follow, from E[wⁿx] = E[wⁿ](n − 1)s and E[wⁿxxᵀ], s = βΣq.

    With D = S/N − 1 and U = Σwx/N, attention less m is U(1 − D + D² − …); a product of n centred sums has the mean
    of its pairings at order N^{−n/2}, and triples one order later.
    """
    shift_square = torch.outer(_SHIFT, _SHIFT)
    second = _power(2)
    third = _power(3)
    variance = second - 1
    third_cumulant = third - 3 * second + 2
    covariance = second * (_COVARIANCE + shift_square)  # E[w²xxᵀ]
    covariance_with_d = third * (_COVARIANCE + 4 * shift_square) - covariance  # E[(w − 1)w²xxᵀ]
    limit = _Errors(
        bias=-second * _SHIFT,
        covariance=covariance,
        log_bias=torch.tensor(-0.5 * variance, dtype=torch.float64),
    )
    next_order = _Errors(
        bias=(2 * third - 2 * second - 3 * second * variance) * _SHIFT,
        covariance=3 * variance * covariance - 2 * covariance_with_d + 5 * second**2 * shift_square,
        log_bias=torch.tensor(third_cumulant / 3 - 0.75 * variance**2, dtype=torch.float64),
    )
    return limit, next_order
