"""A measure of each class, with an oracle that shares no code with it."""

from itertools import pairwise

import numpy as np
import torch
from scipy import stats
from scipy.special import logsumexp
from tests.support.measures.oracles import (
    TAIL,
    AtomsAndDensity,
    Enumerated,
    Image,
    Joint,
    Line,
    Normal,
    Oracle,
    UniformSphere,
    about_zero,
    exponential,
    gamma_pieces,
    joined,
    laplace,
    mixed_normals,
    normal,
    numpy,
    product_of_values,
    uniform,
)
from torch import Tensor

from massieu.measures import (
    Atoms,
    Bernoulli,
    Categorical,
    ConjugatePrior,
    Constant,
    Exponential,
    Gamma,
    Gaussian,
    Laplace,
    Measure,
    Poisson,
    Sphere,
    Spin,
    Uniform,
    affine,
    convolve,
    hybrid,
    mixture,
    power,
    product,
    switched,
)
from massieu.testing import MeasureCase

F64 = torch.float64
_BITS = [(0, 0), (0, 1), (1, 0), (1, 1)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def positive(*shape: int, seed: int = 0, low: float = 0.5, high: float = 2.0) -> Tensor:
    return low + (high - low) * torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def case_of(
    measure: Measure,
    oracle: Oracle,
    eta: Tensor | None = None,
    density: bool = True,
    divergence: bool = True,
    **options,
) -> MeasureCase:
    """With the oracles that are asked for; draws for the quick run, which the slow one multiplies."""
    return MeasureCase(
        measure,
        log_partition=oracle.log_partition,
        kl=oracle.kl if divergence else None,
        log_prob=oracle.log_prob if density else None,
        eta=eta,
        **{"samples": 2_000, **options},
    )


def atoms_case(measure: Atoms) -> MeasureCase:
    return case_of(measure, Enumerated(numpy(measure.points), numpy(measure.log_weight)))


def gaussian_case(location: Tensor, matrix: Tensor, **covariance: Tensor) -> MeasureCase:
    return case_of(Gaussian.create(location, **covariance), Normal(numpy(location), numpy(matrix)))


def spins(field: Tensor) -> Enumerated:
    f = numpy(field)[..., None] * np.array([-1.0, 1.0])
    return product_of_values([-1.0, 1.0], f - logsumexp(f, -1, keepdims=True))


def bits(probability: Tensor) -> Enumerated:
    return product_of_values([0.0, 1.0], np.log(np.stack([1 - numpy(probability), numpy(probability)], -1)))


def conjugate_cases(times: float = 1.0) -> dict[str, MeasureCase]:
    """Priors as strong as some observations, and some times stronger."""
    strength = times * positive(2, seed=20, low=3.0, high=6.0)
    nu = (numpy(strength),)
    chance = positive(2, seed=21, low=0.2, high=0.8)
    field = draw(2, seed=22)
    rate = positive(2, seed=23)
    shape = positive(2, seed=24)
    location = draw(2, seed=25)
    variance = positive(2, seed=26)
    inside = torch.tensor([[0.25, 0.4], [0.5, 0.5], [0.7, 0.3], [0.4, 0.8]], dtype=F64) * strength
    above = times * torch.tensor([[1.0, 4.0], [3.0, 2.0], [6.0, 0.7]], dtype=F64)

    def logistic(x, n, p):
        return -n * np.logaddexp(np.log1p(-p), np.log(p) + x)

    def shifted(chi, n, p):  # the mode is near χ/ν, the decay χ to the left and ν − χ to the right
        centre = np.log(chi / (n - chi)) - np.log(p / (1 - p))
        return [(centre - 2 * TAIL / chi, centre), (centre, centre + 2 * TAIL / (n - chi))]

    def log_cosh(x, n, f):
        return -n * (np.logaddexp(x + f, -x - f) - np.logaddexp(f, -f))

    def signs(chi, n, f):
        return [(-f - 2 * TAIL / (n + chi), -f), (-f, -f + 2 * TAIL / (n - chi))]

    def counts(chi, n, r):
        centre = np.log(chi / (n * r))
        return [(centre - 2 * TAIL / chi, centre), (centre, centre + np.log(TAIL / np.minimum(chi, 1)) + 2)]

    def waiting(x, n, k, r):  # x = r − η > 0 in the argument's place
        return n * k * np.log(np.maximum(r - x, 1e-300) / r)

    def below(chi, n, k, r):
        return [(r - (TAIL + 4 * n * k) / chi, r)]

    def square(x, n, m, v):
        return -n * (m * x + 0.5 * v * x**2)

    def around(chi, n, m, v):
        centre = (chi - n * m) / (n * v)
        spread = 1 / np.sqrt(n * v)
        return [(centre - 12 * spread, centre + 12 * spread)]

    def case(likelihood: Measure, density, pieces, eta, *parameters: Tensor) -> MeasureCase:
        line = Line(density, (*nu, *(numpy(p) for p in parameters)), pieces)
        # The quadrature of stronger ones has digits for A alone.
        law = ConjugatePrior.create(likelihood, strength)
        exact = times == 1
        return case_of(law, line, eta, density=exact, divergence=exact, scales=(0.0, 1e-4, 0.5))

    one = torch.ones_like(rate)
    return {
        "conjugate to bernoulli": case(Bernoulli.create(chance), logistic, shifted, inside, chance),
        "conjugate to spin": case(Spin.create(field), log_cosh, signs, 2 * inside - strength, field),
        "conjugate to poisson": case(Poisson.create(rate), lambda x, n, r: -n * r * np.expm1(x), counts, above, rate),
        "conjugate to exponential": case(Exponential.create(rate), waiting, below, above, one, rate),
        "conjugate to gamma": case(Gamma.create(shape, 1 / rate), waiting, below, above, shape, rate),
        "conjugate to gaussian": case(
            Gaussian.create(location, variance), square, around, draw(3, 2, seed=27), location, variance
        ),
    }


def single_cases() -> dict[str, MeasureCase]:
    masked = draw(2, 7, seed=1)
    masked[0, 2] = masked[1, 0] = masked[1, 6] = -torch.inf
    root = draw(2, 3, 3, seed=2)
    thin = draw(2, 3, 1, seed=8)
    full = root @ root.mT + 0.1 * torch.eye(3, dtype=F64)
    variances = draw(2, 3, seed=3).square() + 0.1
    location = draw(2, 3)
    field = draw(2, 3, seed=4)
    rate = positive(2, 2)
    chance = positive(2, 3, low=0.1, high=0.9)
    rates = positive(2, 2, seed=5)
    shape = positive(2, 2, seed=6, low=0.3, high=3.0)
    scale = positive(2, 2, seed=7)
    logits = draw(2, 4, seed=9)
    logits[1, 2] = -torch.inf
    shares = torch.log_softmax(logits, -1)
    low = -positive(2, 2, seed=10)
    high = positive(2, 2, seed=11)
    radius = positive(3, seed=12)
    value = draw(2, 3, seed=13)
    return {
        "atoms": atoms_case(Atoms.create(draw(6, 3))),
        "atoms, batched and masked": atoms_case(Atoms.create(draw(2, 7, 3), masked)),
        "atoms, far from the origin": atoms_case(Atoms.create(draw(2, 5, 3) + 20.0)),
        "atoms, one point": atoms_case(Atoms.create(draw(1, 2))),
        "atoms, fewer than dimensions": atoms_case(Atoms.create(draw(3, 6), draw(3, seed=1))),
        "atoms, two batch dimensions": atoms_case(Atoms.create(draw(2, 3, 4, 2), draw(2, 3, 4, seed=1))),
        "gaussian, isotropic": gaussian_case(
            location, torch.diag_embed(variances[:, :1].expand(2, 3)), covariance=variances[:, 0]
        ),
        "gaussian, diagonal": gaussian_case(location, torch.diag_embed(variances), covariance=variances),
        "gaussian, full": gaussian_case(location, full, covariance=full),
        "gaussian, low rank plus diagonal": gaussian_case(
            location, thin @ thin.mT + torch.diag_embed(variances), covariance=variances, factor=thin
        ),
        "gaussian, rank one": case_of(
            Gaussian.create(draw(3), factor=thin[0]),
            Normal(numpy(draw(3)), numpy(thin[0] @ thin[0].mT)),
            density=False,
            divergence=False,
        ),
        "spin, fair": case_of(Spin.create(dim=3), spins(torch.zeros(3))),
        "spin, in a field": case_of(Spin.create(field), spins(field)),
        "bernoulli": case_of(Bernoulli.create(chance), bits(chance)),
        "categorical": case_of(
            Categorical.create(logits=logits), Enumerated(np.broadcast_to(np.eye(4), (2, 4, 4)), numpy(shares))
        ),
        "poisson": case_of(
            Poisson.create(rate),
            Line(lambda x, r: stats.poisson.logpmf(x, r), (numpy(rate),), values=np.arange(800.0)),
            scales=(0.0, 1e-4, 1.0, 4.0),
        ),
        "exponential": case_of(Exponential.create(rates), exponential(rates)),
        "gamma": case_of(
            Gamma.create(shape, scale),
            Line(
                lambda x, k, s: stats.gamma.logpdf(x, k, scale=s),
                (numpy(shape), numpy(scale)),
                lambda eta, k, s: gamma_pieces(1 / s - eta, k),
                logarithmic=True,
            ),
        ),
        "laplace": case_of(Laplace.create(scale), laplace(scale)),
        "uniform": case_of(Uniform.create(low, high), uniform(low, high)),
        "constant": case_of(Constant.create(value), Enumerated(numpy(value)[:, None], np.zeros((2, 1)))),
        "circle": case_of(Sphere.create(radius[0], dim=2), UniformSphere(2, numpy(radius[0]))),
        "sphere": case_of(Sphere.create(radius, dim=3), UniformSphere(3, numpy(radius))),
        "sphere in five dimensions": case_of(Sphere.create(radius[:2], dim=5), UniformSphere(5, numpy(radius[:2]))),
        **wide_cases(),
    }


def wide_cases() -> dict[str, MeasureCase]:
    """Three coordinates, whose domains reach far enough for large eta."""
    rate = 3 * positive(2, 3, low=2.0)
    shape = positive(2, 3, low=0.2)
    scale = positive(2, 3, low=0.05, high=0.2)
    low = -positive(2, 3)
    high = positive(2, 3, seed=1)
    chance = torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.0, 0.5]], dtype=F64)
    options = {"scales": (0.0, 1e-4, 1.0, 4.0, 15.0, 100.0)}
    return {
        "exponential, wide": case_of(Exponential.create(rate), exponential(rate), **options),
        "gamma, wide": MeasureCase(Gamma.create(shape, scale), **options),
        "laplace, wide": case_of(Laplace.create(scale), laplace(scale), **options),
        "uniform, wide": case_of(Uniform.create(low, high), uniform(low, high), **options),
        "categorical, of probabilities": case_of(
            Categorical.create(chance),
            Enumerated(np.broadcast_to(np.eye(3), (2, 3, 3)), np.log(np.maximum(numpy(chance), 1e-300))),
        ),
        "sphere in eight dimensions": case_of(Sphere.create(rate[0], dim=8), UniformSphere(8, numpy(rate[0]))),
    }


# The density of the sum of uniform laws on [−0.8, 0.8] and [−0.3, 0.6] is a trapezium.
_CORNERS = [-1.1, -0.2, 0.5, 1.4]
_HEIGHTS = [0.0, 1 / 1.6, 1 / 1.6, 0.0]


def composed_cases() -> dict[str, MeasureCase]:
    field = draw(2, 3, seed=4)
    weight = draw(2, 4, 3, seed=5)
    bias = draw(4, seed=6)
    pushed = spins(field).pushed(numpy(weight), numpy(bias))
    single = Enumerated(pushed.points[0], pushed.log_weight[0])
    tilt = draw(4, seed=7)
    root = draw(2, 3, 3, seed=1)
    full = root @ root.mT + 0.2 * torch.eye(3, dtype=F64)
    scale = positive(2, seed=7, low=0.2, high=0.5)
    square = draw(2, 2, seed=8)
    shift = draw(2, seed=9)
    slope = torch.tensor([0.4, -0.7], dtype=F64)
    moved = laplace(scale)
    start = moved.log_partition(slope[None]).numpy() / 2
    tilted_laplace = Line(
        lambda x, s, a: stats.laplace.logpdf(x, scale=s) + x * a - start,
        (numpy(scale), numpy(slope)),
        lambda eta, s, a: about_zero(1 / s + eta + a, 1 / s - eta - a),
    )
    points = draw(3, 2, seed=14)
    logs = draw(3, seed=15)
    keys = draw(4, 1, seed=16)
    together = joined(
        Enumerated(numpy(points), np.full(3, float(logs[0]))),
        Enumerated(spins(field[0, :2]).points, spins(field[0, :2]).log_weight + float(logs[1])),
    )
    batched = Enumerated(numpy(draw(6, 2, seed=17)), np.repeat(numpy(draw(2, seed=18)), 3))
    components = Atoms.create(torch.from_numpy(batched.points).reshape(2, 3, 2))
    unit = torch.tensor([0.3], dtype=F64), torch.tensor([0.8], dtype=F64)
    chance = torch.tensor([0.3, 0.6], dtype=F64)
    binomial = stats.binom.logpmf(np.arange(4), 3, numpy(chance)[:, None])
    rate = positive(2, 1, seed=19)
    return {
        "affine": case_of(affine(Spin.create(field), weight, bias), pushed),
        "affine, of a density": case_of(affine(Laplace.create(scale), square, shift), Image(moved, square, shift)),
        "affine, of atoms": case_of(
            affine(Atoms.create(points), weight[0, :2, :2], bias[:2]),
            Enumerated(numpy(points), np.zeros(3)).pushed(numpy(weight[0, :2, :2]), numpy(bias[:2])),
        ),
        "tilted": case_of(
            affine(Spin.create(field[0]), weight[0], bias).tilt(tilt),
            single.tilted(numpy(tilt)),
        ),
        "tilted density": case_of(Laplace.create(scale).tilt(slope), tilted_laplace),
        "mixture of atoms and spins": case_of(
            mixture(logs[:2], [Atoms.create(points), Spin.create(field[0, :2])]), together
        ),
        "mixture of a batch": case_of(mixture(draw(2, seed=18), components), batched),
        "mixture of spins and a Gaussian, in a batch": MeasureCase(
            mixture(draw(2, 3), [Spin.create(dim=3), Gaussian.create(field, full), Spin.create(draw(3))])
        ),
        "switched bits": case_of(
            switched(Bernoulli.create(torch.tensor([0.3, 0.8], dtype=F64)), 2),
            # Either copy of two bits is on, the other 0; then which: no prior weight of the copies.
            Enumerated(
                np.array(
                    [[*first, 0, 0, 1, 0] for first in _BITS] + [[0, 0, *second, 0, 1] for second in _BITS], float
                ),
                np.log([[0.7, 0.3][a] * [0.2, 0.8][b] for a, b in _BITS] * 2),
            ),
        ),
        "hybrid of atoms and a Gaussian": case_of(
            hybrid(Atoms.create(keys), Gaussian.create(unit[0], unit[1]), 0.7),
            AtomsAndDensity(
                Enumerated(numpy(keys), np.zeros(4)),
                normal(*unit, mass=0.7),
            ),
        ),
        "product": case_of(
            product(Spin.create(field[:, :2]), Exponential.create(rate)),
            Joint([(2, spins(field[:, :2])), (1, exponential(rate))]),
        ),
        "kernel density": case_of(
            convolve(Atoms.create(keys, logs.new_tensor([0.1, -0.4, 0.6, 0.0])), Gaussian.create(unit[0], unit[1])),
            mixed_normals(keys.squeeze(-1) + 0.3, logs.new_tensor([0.1, -0.4, 0.6, 0.0]), 0.8),
        ),
        "sum of uniforms": case_of(
            convolve(Uniform.create(-unit[1], unit[1]), Uniform.create(-unit[0], 2 * unit[0])),
            Line(
                lambda x, _: np.log(np.interp(x, _CORNERS, _HEIGHTS)),
                (np.zeros(1),),
                lambda eta, _: [(np.full_like(eta, a), np.full_like(eta, b)) for a, b in pairwise(_CORNERS)],
            ),
            density=False,
        ),
        "power": case_of(
            power(Bernoulli.create(chance), 3),
            product_of_values([0.0, 1.0, 2.0, 3.0], binomial),
        ),
    }


CONJUGATE = conjugate_cases()
_STRONG = {f"{name}, strong": case for name, case in conjugate_cases(16.0).items()}
CASES: dict[str, MeasureCase] = {**single_cases(), **CONJUGATE, **composed_cases(), **_STRONG}

VARIANTS = {
    "atoms",
    "atoms, fewer than dimensions",
    "atoms, far from the origin",
    "atoms, one point",
    "atoms, two batch dimensions",
    "gaussian, isotropic",
    "gaussian, diagonal",
    "gaussian, rank one",
    "spin, fair",
    "circle",
    "sphere in five dimensions",
    "conjugate to exponential",
    "conjugate to gamma",
    "conjugate to poisson",
    *wide_cases(),
    "affine, of atoms",
    "mixture of a batch",
    "mixture of spins and a Gaussian, in a batch",
    "hybrid of atoms and a Gaussian",
    "sum of uniforms",
    *_STRONG,
}
"""Near relatives of other cases: checked in the slow run."""
