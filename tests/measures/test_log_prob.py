"""Log-probabilities where their terms are large, and those of sums, of which the terms do not come back exactly."""

import itertools
import math

import mpmath
import pytest
import torch
from scipy import stats
from tests.measures.cases import CASES
from tests.support.rows import every_row, some_slow

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
    MissingFormError,
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
)

PRECISIONS = (torch.float32, torch.float64)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def sums(dtype: torch.dtype) -> dict:
    """Laws of sums, images and powers, each with lists of the values that its independent parts may have."""
    keys, value, field = (draw(*shape, seed=i, dtype=dtype) for i, shape in enumerate(((5, 2), (2,), (2,))))
    weight = draw(3, 2, seed=4, dtype=dtype)
    bias = draw(3, seed=5, dtype=dtype)
    atoms = Atoms.create(keys)
    constant = Constant.create(value)
    spin = Spin.create(field)
    bits = Bernoulli.create(torch.tensor([0.3, 0.6], dtype=dtype))
    signs = list(itertools.product([-1.0, 1.0], repeat=2))
    pairs = list(itertools.product([0.0, 1.0], repeat=2))

    def chance(points, one):  # log-mass of each point of h, from the law's own definition
        return [math.log(math.prod(one(i, x) for i, x in enumerate(point))) for point in points]

    up = torch.sigmoid(2 * field.double()).tolist()
    odds = bits.probability.double().tolist()
    listed = {
        "atoms": (keys.double(), [0.0] * 5),
        "constant": (value.double()[None], [0.0]),
        "spin": (torch.tensor(signs).double(), chance(signs, lambda i, x: up[i] if x > 0 else 1 - up[i])),
        "bits": (torch.tensor(pairs).double(), chance(pairs, lambda i, x: odds[i] if x > 0 else 1 - odds[i])),
    }
    push = weight.double()
    moved = bias.double()
    image = affine(spin, weight, bias)
    atoms_image = affine(atoms, weight, bias)
    pushed = {name: (points @ push.T + moved, logs) for name, (points, logs) in listed.items()}
    return {
        "atoms + spin": (convolve(atoms, spin), [listed["atoms"], listed["spin"]]),
        "spin + atoms + constant": (
            convolve(spin, atoms, constant),
            [listed["spin"], listed["atoms"], listed["constant"]],
        ),
        "atoms + constant": (convolve(atoms, constant), [listed["atoms"], listed["constant"]]),
        "spin + bits": (convolve(spin, bits), [listed["spin"], listed["bits"]]),
        "a sum of sums": (
            convolve(convolve(atoms, spin), convolve(bits, constant)),
            [listed["atoms"], listed["spin"], listed["bits"], listed["constant"]],
        ),
        "power of atoms": (power(atoms, 3), [listed["atoms"]] * 3),
        "power of spin": (power(spin, 4), [listed["spin"]] * 4),
        "power + spin": (convolve(power(atoms, 2), spin), [listed["atoms"]] * 2 + [listed["spin"]]),
        "image of spins": (image, [pushed["spin"]]),
        "image of spins + image of atoms": (convolve(image, atoms_image), [pushed["spin"], pushed["atoms"]]),
        "tilted sum": (convolve(atoms, spin).tilt(value), [listed["atoms"], listed["spin"]]),
    }


NAMES = list(sums(torch.float64))


@every_row("dtype", PRECISIONS)
def test_what_is_drawn_from_a_sum_is_possible(dtype):
    for name in ("atoms + spin", "atoms + constant"):
        measure, _ = sums(dtype)[name]
        eta = draw(*measure.event_shape, seed=9, dtype=dtype)
        draws = measure.sample(eta, (500,), generator=torch.Generator().manual_seed(0))
        assert measure.log_prob(eta, draws).isfinite().all()


@pytest.mark.medium
@every_row(("name", "dtype"), itertools.product(NAMES, PRECISIONS))
def test_a_sum_has_the_probability_of_all_its_decompositions(name, dtype):
    """Every combination of the parts' points, with the sum of its log-masses, tilted and normalised."""
    measure, parts = sums(dtype)[name]
    eta = draw(*measure.event_shape, seed=9, dtype=dtype)
    points, logs = zip(
        *(
            (sum(parts[i][0][j] for i, j in enumerate(chosen)), sum(parts[i][1][j] for i, j in enumerate(chosen)))
            for chosen in itertools.product(*(range(len(part[1])) for part in parts))
        ),
        strict=True,
    )
    points = torch.stack(points)
    tilt = (
        sums(dtype)["tilted sum"][0].eta.double() if name == "tilted sum" else torch.zeros(measure.event_shape).double()
    )
    scores = torch.tensor(logs, dtype=torch.float64) + points @ (eta.double() + tilt)
    share = torch.log_softmax(scores, 0)

    # Combinations of one sum, which are of one point.
    scale = points.abs().amax()
    same = (points[:, None] - points[None]).abs().amax(-1) <= 1e-5 * scale
    draws = measure.sample(eta, (300,), generator=torch.Generator().manual_seed(0))
    nearest = (draws.double()[:, None] - points[None]).abs().amax(-1).min(-1)
    expected = torch.logsumexp(torch.where(same[nearest.indices], share, -torch.inf), -1)
    result = measure.log_prob(eta, draws)
    rounding = 64 * torch.finfo(dtype).eps * (1 + scores.abs().amax())
    torch.testing.assert_close(result.double(), expected, atol=float(rounding), rtol=0)

    # Nowhere else: moved by much more than rounding, by much less than the distance of two points.
    apart = torch.where(same, torch.inf, (points[:, None] - points[None]).abs().amax(-1)).amin()
    moved = draws.double() + 0.3 * min(float(apart), 1e-2)
    assert (measure.log_prob(eta.double(), moved) == -torch.inf).all()


@every_row("name", NAMES)
def test_a_draw_that_was_rounded_to_half_precision_is_possible(name):
    measure, _ = sums(torch.float32)[name]
    eta = draw(*measure.event_shape, seed=9).bfloat16()
    draws = measure.sample(eta, (200,), generator=torch.Generator().manual_seed(0))
    assert measure.log_prob(eta, draws).isfinite().all()
    assert measure.log_prob(eta, draws.bfloat16()).isfinite().all()
    assert (measure.log_prob(eta, (draws + 0.37).bfloat16()) == -torch.inf).any()


def test_sums_with_counts_bounds_and_both_kinds_of_mass():
    keys = draw(4, 1, seed=3, dtype=torch.float32)
    eta = torch.tensor([0.2])
    counts = convolve(Atoms.create(keys), Poisson.create([40.0]))
    x = counts.sample(eta, (5000,), generator=torch.Generator().manual_seed(0))
    weights = torch.softmax((keys * eta).double()[:, 0], 0)
    expected = sum(
        w
        * torch.from_numpy(stats.poisson.pmf((x[:, 0].double() - key).round(), 40 * math.exp(float(eta[0]))))
        * (((x[:, 0].double() - key) - (x[:, 0].double() - key).round()).abs() < 1e-4)
        for w, key in zip(weights, keys[:, 0].double(), strict=True)
    )
    torch.testing.assert_close(counts.log_prob(eta, x).double().exp(), expected, atol=1e-6, rtol=1e-4)
    # Draws at the very bound of the box, moved by an atom.
    box = convolve(Constant.create([0.7]), Uniform.create([-0.3], [0.1]))
    ends = torch.tensor([[-0.3], [0.1]]) + torch.tensor([0.7])
    assert box.log_prob(torch.zeros(1), ends).isfinite().all()
    # A probability at the atoms of the sum, a density elsewhere: never the sum of both.
    both = hybrid(Atoms.create(keys), Gaussian.create([0.0], [1.0]), 0.5)
    moved = convolve(Constant.create([0.3]), both)
    at = torch.cat([keys, keys + 0.11])
    torch.testing.assert_close(moved.log_prob(eta, at + 0.3), both.log_prob(eta, at), atol=1e-5, rtol=1e-5)
    smooth = convolve(both, Gaussian.create([0.0], [0.5]))
    weight = torch.log(torch.tensor([1.0] * 4 + [0.5]))
    parts = [Gaussian.create(key, 0.5) for key in keys] + [Gaussian.create([0.0], [1.5])]
    torch.testing.assert_close(smooth.log_prob(eta, at), mixture(weight, parts).log_prob(eta, at), atol=1e-5, rtol=1e-5)


class Unlisted(Measure):
    """A user's discrete law that does not say which of its points is nearest."""

    weight: torch.Tensor

    batch_shape = property(lambda self: self.weight.shape[:-1])
    event_shape = property(lambda self: self.weight.shape[-1:])
    _reference = property(lambda self: "counting")

    def _log_partition(self, eta):
        return (self.weight * eta).sum(-1)

    def _log_density(self, point):
        return torch.where((point == self.weight).all(-1), 0.0, -torch.inf)


def test_a_law_that_cannot_say_its_nearest_point_has_no_density_in_a_sum():
    own = Unlisted(torch.tensor([0.1]))
    assert own.log_prob(torch.zeros(1), torch.tensor([0.1])) == 0
    with pytest.raises(MissingFormError, match="Unlisted has no `_nearest`"):
        convolve(Atoms.create([[0.3], [0.7]]), own).log_prob(torch.zeros(1), torch.tensor([0.4]))


def _near(mean: float) -> list[float]:
    """Counts about a mean, within and far beyond its spread."""
    spread = math.sqrt(mean)
    return sorted(
        {max(0.0, float(round(mean + k * spread))) for k in (-7, -1, -0.1, 0, 0.3, 2, 9)} | {0.0, round(3 * mean)}
    )


def _condition(terms: list, result: float, dtype: torch.dtype) -> float:
    """Roundings of the arguments move the result by this; and roundings of itself."""
    return 64 * torch.finfo(dtype).eps * (1 + abs(result) + sum(abs(float(term)) for term in terms))


@every_row(("mean", "dtype"), itertools.product([1.0, 15.0, 17.0, 3e3, 24154952.0, 1e12, 1e20, 1e30], PRECISIONS))
def test_counts_keep_their_digits_at_every_size(mean, dtype):
    """Against 60 digits. A rounding of λ moves log p by x − λ times it."""
    rate = torch.tensor([mean], dtype=dtype)
    measure = Poisson.create(rate)
    zero = torch.zeros(1, dtype=dtype)
    counts = torch.tensor(_near(mean), dtype=dtype)
    result = measure.log_prob(zero, counts[:, None])
    with mpmath.workdps(60):
        for count, value in zip(counts.tolist(), result.tolist(), strict=True):
            x = mpmath.mpf(count)
            mu = mpmath.mpf(float(rate[0]))
            exact = float(x * mpmath.log(mu) - mu - mpmath.loggamma(x + 1))
            assert value == pytest.approx(exact, abs=_condition([x - mu], exact, dtype)), (count, dtype)


def test_the_count_of_the_examination():
    eta = torch.tensor([17.0])
    result = Poisson.create(torch.ones(1)).log_prob(eta, torch.tensor([24157308.0]))
    assert float(result) == pytest.approx(float(stats.poisson.logpmf(24157308, math.exp(17))), abs=1e-3)


@every_row(("shape", "dtype"), itertools.product([0.3, 1.0, 20.0, 1e4, 1e8, 1e15], PRECISIONS))
def test_gammas_keep_their_digits_at_every_shape(shape, dtype):
    k = torch.tensor([shape], dtype=dtype)
    scale = torch.tensor([0.7], dtype=dtype)
    measure = Gamma.create(k, scale)
    eta = torch.tensor([-2.5], dtype=dtype)
    with mpmath.workdps(60):
        slack = 1 / mpmath.mpf(float(scale[0])) - mpmath.mpf(float(eta[0]))
        exact_shape = mpmath.mpf(float(k[0]))
        for deviation in (-0.5, -1e-3, 0.0, 1e-4, 0.2, 3.0):
            x = torch.tensor([float(exact_shape / slack) * (1 + deviation)], dtype=dtype)
            point = mpmath.mpf(float(x[0]))
            exact = exact_shape * mpmath.log(slack) + (exact_shape - 1) * mpmath.log(point) - slack * point
            exact = float(exact - mpmath.loggamma(exact_shape))
            moved = [exact_shape - slack * point, mpmath.log(exact_shape)]
            assert float(measure.log_prob(eta, x)) == pytest.approx(exact, abs=_condition(moved, exact, dtype))


@every_row("dtype", PRECISIONS)
def test_laws_far_out_keep_their_digits(dtype):
    """Where x·eta, A(eta) and log h(x) are each of the order of 10^6 or more, and log p is not."""
    near = torch.finfo(dtype).eps ** 0.5

    def tensor(*values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    def check(measure, eta, point, exact, *moved):
        result = float(measure.log_prob(eta, point))
        assert result == pytest.approx(float(exact), abs=_condition(list(moved), float(exact), dtype)), type(measure)

    with mpmath.workdps(60):
        one = mpmath.mpf(1)
        slack = one - mpmath.mpf(float(tensor(1 - near)[0]))
        point = tensor(1.5 / near)
        x = mpmath.mpf(float(point[0]))
        check(Exponential.create(tensor(1.0)), tensor(1 - near), point, mpmath.log(slack) - slack * x)
        check(
            Laplace.create(tensor(1.0)), tensor(1 - near), point, mpmath.log((1 - (one - slack) ** 2) / 2) - slack * x
        )
        eta = mpmath.mpf(1e6)
        exact = mpmath.log(eta) - eta * (one - mpmath.mpf(float(tensor(1 - 1e-6)[0])))
        check(Uniform.create(tensor(-1.0), tensor(1.0)), tensor(1e6), tensor(1 - 1e-6), exact, 1.0)
        check(Spin.create(tensor(-3.0)), tensor(1e6), tensor(1.0), 0.0)
        check(Bernoulli.create(tensor(0.2)), tensor(1e6), tensor(1.0), 0.0)
        check(
            Categorical.create(logits=tensor(0.0, 1.0)), tensor(1e6, 1e6), tensor(1.0, 0.0), -mpmath.log(1 + mpmath.e)
        )
        location = 2.0**20
        variance = 4.0
        shift = location + variance * 2.0**18
        exact = -(mpmath.mpf(1.5) ** 2) / 8 - mpmath.log(8 * mpmath.pi) / 2
        check(Gaussian.create(tensor(location), tensor(variance)), tensor(2.0**18), tensor(shift + 1.5), exact)


@every_row(("kappa", "dtype"), itertools.product([3.0, 1e3, 1e6, 1e12, 1e15], PRECISIONS))
def test_the_sphere_keeps_its_digits_at_large_concentration(kappa, dtype):
    """In three dimensions log p = κ(cos − 1) + log κ − log 2π(1 − e^(−2κ))."""
    eta = torch.tensor([0.0, 0.0, kappa], dtype=dtype)
    angle = 1.3 / math.sqrt(kappa)
    point = torch.tensor([math.sin(angle), 0.0, math.cos(angle)], dtype=torch.float64).to(dtype)
    with mpmath.workdps(60):
        k, (x, _, z) = mpmath.mpf(float(eta[2])), (mpmath.mpf(float(c)) for c in point)
        gap = 1 - z / mpmath.sqrt(x * x + z * z)
        exact = float(-k * gap + mpmath.log(k) - mpmath.log(2 * mpmath.pi * (1 - mpmath.exp(-2 * k))))
    result = float(Sphere.create(dim=3).log_prob(eta, point))
    # The point is that of its dtype, exactly; the rest is in float64.
    assert result == pytest.approx(exact, rel=64 * torch.finfo(dtype).eps, abs=64 * torch.finfo(dtype).eps)


@every_row(
    ("family", "dtype"), itertools.product(["bernoulli", "spin", "poisson", "exponential", "gaussian"], PRECISIONS)
)
def test_conjugate_laws_of_many_observations_keep_their_digits(family, dtype):
    """Strength 10⁸, against 60 digits of χη − ν·A_0(η) − B(χ, ν); and the evidence of many large observations."""
    strength = 1e8
    mean = 0.25
    chi = torch.tensor([strength * mean], dtype=dtype)
    one = torch.ones(1, dtype=dtype)
    likelihood = {
        "bernoulli": Bernoulli.create(0.5 * one),
        "spin": Spin.create(0 * one),
        "poisson": Poisson.create(one),
        "exponential": Exponential.create(one),
        "gaussian": Gaussian.create(0 * one, one),
    }[family]
    prior = ConjugatePrior.create(likelihood, strength * one)
    with mpmath.workdps(60):
        nu = mpmath.mpf(float(prior.strength[0]))
        pseudo = mpmath.mpf(float(chi[0]))
        beta = mpmath.loggamma
        log = mpmath.log
        forms = {
            "bernoulli": (
                lambda e: log((1 + mpmath.exp(e)) / 2),
                nu * log(2) + beta(pseudo) + beta(nu - pseudo) - beta(nu),
            ),
            "spin": (
                lambda e: log(mpmath.cosh(e)),
                (nu - 1) * log(2) + beta((nu + pseudo) / 2) + beta((nu - pseudo) / 2) - beta(nu),
            ),
            "poisson": (lambda e: mpmath.exp(e) - 1, nu - pseudo * log(nu) + beta(pseudo)),
            "exponential": (lambda e: -log(1 - e), pseudo + beta(nu + 1) - (nu + 1) * log(pseudo)),
            "gaussian": (lambda e: e * e / 2, pseudo**2 / (2 * nu) + log(2 * mpmath.pi / nu) / 2),
        }
        partition, mass = forms[family]
        eta = prior.mean(chi)
        point = mpmath.mpf(float(eta[0]))
        exact = float(pseudo * point - nu * partition(point) - mass)
        slope = pseudo - nu * mpmath.diff(partition, point)
        result = float(prior.log_prob(chi, eta))
        # Computed in float64 from these very numbers.
        tolerance = _condition([slope], exact, torch.float64) + 4 * torch.finfo(dtype).eps * (1 + abs(exact))
        assert result == pytest.approx(exact, abs=tolerance)


def test_evidence_of_large_counts_keeps_its_digits():
    """A gamma prior and one count: the negative binomial law."""
    chi = 3.0
    strength = 2.0
    count = 1e12
    prior = ConjugatePrior.create(Poisson.create(torch.ones(1).double()), torch.tensor([strength]).double())
    result = prior.evidence([chi], [[count]])
    with mpmath.workdps(60):
        c = mpmath.mpf(chi)
        n = mpmath.mpf(strength)
        x = mpmath.mpf(count)
        exact = mpmath.loggamma(x + c) - mpmath.loggamma(c) - mpmath.loggamma(x + 1)
        exact = float(exact + c * mpmath.log(n / (n + 1)) - x * mpmath.log(n + 1))
    # The terms of the law itself are x log 3: a rounding of the strength moves that much.
    assert float(result) == pytest.approx(exact, rel=64 * torch.finfo(torch.float64).eps)


@pytest.mark.slow
@every_row("name", ["poisson", "kernel density", "mixture of atoms and spins"])
def test_log_prob_under_transforms(name):
    measure = CASES[name].measure.to(torch.float64)
    eta = 0.1 * draw(*measure.batch_shape, 3, *measure.event_shape, seed=2)
    points = measure.sample(eta, (4,), generator=torch.Generator().manual_seed(0))
    whole = measure.log_prob(eta, points)
    mapped = torch.func.vmap(lambda point: measure.log_prob(eta, point))(points)
    torch.testing.assert_close(mapped, whole, atol=1e-12, rtol=1e-12)
    score = torch.func.grad(lambda e: measure.log_prob(e, points).sum())(eta)
    torch.testing.assert_close(score, (points - measure.mean(eta)).sum(0), atol=1e-9, rtol=1e-9)
    torch.compiler.reset()
    compiled = torch.compile(measure.log_prob, fullgraph=True, backend="aot_eager")(eta, points)
    torch.testing.assert_close(compiled, whole, atol=1e-10, rtol=1e-10)
    assert measure.log_prob(eta[..., :0, :], points[..., :0, :]).numel() == 0


def test_products_and_mixtures_take_each_parts_own_form():
    """A product with one huge count and a mixture of two such laws: as exact as the parts."""
    eta = torch.tensor([17.0, 0.3])
    joint = product(Poisson.create([1.0]), Spin.create(dim=1))
    point = torch.tensor([24157308.0, 1.0])
    exact = stats.poisson.logpmf(24157308, math.exp(17)) + math.log(1 / (1 + math.exp(-0.6)))
    assert float(joint.log_prob(eta, point)) == pytest.approx(exact, abs=1e-3)
    both = mixture(torch.zeros(2), [Poisson.create([1.0]), Poisson.create([1.0])])
    assert float(both.log_prob(eta[:1], point[:1])) == pytest.approx(
        float(stats.poisson.logpmf(24157308, math.exp(17))), abs=1e-3
    )


@pytest.mark.medium
@some_slow("shape", [1.0, 17.0, 0.4, 1.5, 16.0, 40.0], 2)
def test_gamma_densities_have_their_derivatives(shape):
    """At shape 1 too, where x has no exponent, and where the form changes."""
    arguments = [torch.tensor([value], dtype=torch.float64, requires_grad=True) for value in (shape, 0.7, 0.3)]
    point = torch.tensor([0.9 * shape], dtype=torch.float64)

    def log_prob(k, scale, eta):
        return Gamma(k, scale).log_prob(eta, point)

    assert torch.autograd.gradcheck(log_prob, arguments, fast_mode=True)
    assert torch.autograd.gradgradcheck(log_prob, arguments, fast_mode=True)
