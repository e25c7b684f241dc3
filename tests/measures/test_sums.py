"""Products, convolutions and powers against enumeration, SciPy's densities and one another."""

import itertools
import math

import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import binom, gamma, multivariate_normal, poisson
from tests.support.rows import every_row
from torch import Tensor

from massieu.duality import natural
from massieu.measures import (
    Atoms,
    Bernoulli,
    ConjugatePrior,
    Exponential,
    Gamma,
    Gaussian,
    MissingFormError,
    Poisson,
    Spin,
    affine,
    convolve,
    power,
    product,
)
from massieu.measures.convolution import Convolution
from massieu.measures.sums import Power

DERIVED = ("log_partition", "mean", "fisher", "entropy")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_same(left, right, eta):
    for name in DERIVED:
        torch.testing.assert_close(getattr(left, name)(eta), getattr(right, name)(eta), atol=1e-11, rtol=1e-11)
    torch.testing.assert_close(left.kl(eta, 0.5 * eta), right.kl(eta, 0.5 * eta), atol=1e-11, rtol=1e-11)
    result = left.cumulants(eta, 0.3 * eta, 6)
    expected = right.cumulants(eta, 0.3 * eta, 6)
    torch.testing.assert_close(result, expected, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(left._support(eta), right._support(eta))


def sums(*sets: Atoms) -> Atoms:
    """Every sum of one atom from each, with the sum of the log-weights."""
    pairs = list(itertools.product(*(zip(s.points, s.log_weight, strict=True) for s in sets)))
    points = torch.stack([sum(p for p, _ in pair) for pair in pairs])
    return Atoms.create(points, torch.stack([sum(w for _, w in pair) for pair in pairs]))


def test_a_convolution_of_atoms_is_atoms_at_every_sum():
    parts = [Atoms.create(draw(n, 2, seed=n), draw(n, seed=n + 1)) for n in (2, 3, 4)]
    together = convolve(*parts)
    expected = sums(*parts)
    eta = draw(5, 2, seed=9)
    assert_same(together, expected, eta)
    x = expected.sample(eta, (7,))
    torch.testing.assert_close(together.log_prob(eta, x), expected.log_prob(eta, x), atol=1e-11, rtol=1e-11)
    assert (together.log_prob(eta, x + 0.1) == -torch.inf).all()


def test_a_convolution_of_gaussians_is_a_gaussian():
    root = draw(2, 2, seed=1)
    one = Gaussian.create(draw(2), root @ root.mT)
    two = Gaussian.create(draw(2, seed=2), torch.tensor([0.5, 2.0]))
    expected = Gaussian.create(one.location + two.location, one.covariance + torch.diag(two.covariance.double()))
    eta = draw(5, 2, seed=3)
    assert_same(convolve(one, two), expected, eta)
    x = draw(4, 5, 2, seed=4)
    torch.testing.assert_close(convolve(one, two).log_prob(eta, x), expected.log_prob(eta, x), atol=1e-11, rtol=1e-11)


def test_smoothed_keys_are_a_kernel_density_estimate():
    """S14's remark: A = lse(keys·eta) + ½ etaᵀ S eta, and the gradient is attention + S eta."""
    keys = draw(6, 2)
    variance = torch.tensor(0.3, dtype=torch.float64)
    measure = convolve(Atoms.create(keys), Gaussian.create(torch.zeros(2).double(), variance))
    eta = draw(4, 2, seed=1)
    x = draw(9, 4, 2, seed=2)
    attention = torch.softmax(eta @ keys.mT, -1) @ keys
    torch.testing.assert_close(measure.mean(eta), attention + 0.3 * eta, atol=1e-12, rtol=0)
    kernels = [multivariate_normal(key, 0.3 * torch.eye(2, dtype=torch.float64)).logpdf(x) for key in keys]
    density = torch.from_numpy(logsumexp(kernels, axis=0))
    result = measure.log_prob(torch.zeros_like(eta), x)
    torch.testing.assert_close(result, density - math.log(6), atol=1e-11, rtol=0)
    slanted = density + (x * eta).sum(-1) - measure.log_partition(eta)
    torch.testing.assert_close(measure.log_prob(eta, x), slanted, atol=1e-11, rtol=1e-11)


def test_samples_of_sums_have_their_mean_and_covariance():
    spins = affine(Spin.create(draw(3)), draw(2, 3, seed=1))
    eta = draw(2, 2, seed=3).mul(0.3)
    count = 40_000
    for measure in (convolve(spins, Gaussian.create(draw(2), torch.tensor(1.0, dtype=torch.float64))), power(spins, 3)):
        draws = measure.sample(eta, (count,), generator=torch.Generator().manual_seed(0))
        error = (draws.mean(0) - measure.mean(eta)) / (draws.std(0) / count**0.5)
        assert error.abs().max() < 5
        fisher = measure.fisher(eta)
        products = (draws - measure.mean(eta)).unsqueeze(-1) * (draws - measure.mean(eta)).unsqueeze(-2)
        assert ((products.mean(0) - fisher).abs() < 5 * products.std(0) / count**0.5).all()


def test_a_product_acts_on_its_coordinates():
    atoms = Atoms.create(draw(3, 2))
    gaussian = Gaussian.create(draw(1), torch.tensor([2.0], dtype=torch.float64))
    measure = product(atoms, gaussian, Spin.create(dim=2))
    eta = draw(4, 5, seed=1)
    pieces = eta[:, :2], eta[:, 2:3], eta[:, 3:]
    total = sum(part.log_partition(x) for part, x in zip(measure.measures, pieces, strict=True))
    torch.testing.assert_close(measure.log_partition(eta), total)
    fisher = measure.fisher(eta)
    torch.testing.assert_close(fisher[:, :2, :2], atoms.fisher(pieces[0]))
    assert (fisher[:, :2, 2:] == 0).all()
    x = measure.sample(eta, (7,))
    expected = sum(
        part.log_prob(e, y) for part, e, y in zip(measure.measures, pieces, x.split([2, 1, 2], -1), strict=True)
    )
    torch.testing.assert_close(measure.log_prob(eta, x), expected, atol=1e-11, rtol=1e-11)
    signs = product(Spin.create(draw(2, 1)), Spin.create(draw(2, 1, seed=1)))
    together = Spin.create(torch.cat([draw(2, 1), draw(2, 1, seed=1)], -1))
    assert_same(signs, together, draw(2, 3, 2, seed=2))


def test_whole_powers_are_sums_of_draws():
    atoms = Atoms.create(draw(3, 2), draw(3, seed=1))
    eta = draw(5, 2, seed=2)
    cubed = power(atoms, 3)
    assert_same(cubed, sums(atoms, atoms, atoms), eta)
    assert power(atoms, 1) is atoms
    sixth = power(cubed, 2)
    assert isinstance(sixth, Power)
    assert sixth.count == 6
    # Ten coins: the binomial's log-partition.
    coins = power(Bernoulli.create(torch.tensor([0.3], dtype=torch.float64)), 10)
    heads = torch.arange(11).double()
    mass = torch.from_numpy(binom(10, 0.3).logpmf(heads))
    for value in (-2.0, 0.0, 1.5):
        expected = torch.logsumexp(mass + value * heads, -1)
        torch.testing.assert_close(coins.log_partition(torch.tensor([value], dtype=torch.float64)), expected)


def test_infinitely_divisible_measures_have_fractional_powers():
    rate = torch.tensor([0.7], dtype=torch.float64)
    eta = torch.tensor([0.2], dtype=torch.float64)
    counts = torch.arange(30).double().unsqueeze(-1)
    result = power(Poisson.create(rate), 0.5).log_prob(torch.zeros(1).double(), counts)
    torch.testing.assert_close(result, torch.from_numpy(poisson(0.35).logpmf(counts[:, 0])), atol=1e-12, rtol=1e-12)
    half = power(Exponential.create(rate), 2.5)
    times = torch.linspace(0.1, 9, 20).double().unsqueeze(-1)
    result = half.log_prob(torch.zeros(1).double(), times)
    torch.testing.assert_close(
        result, torch.from_numpy(gamma(2.5, scale=1 / 0.7).logpdf(times[:, 0])), atol=1e-12, rtol=0
    )
    for measure in (
        Gaussian.create(draw(1), factor=draw(1, 2)),
        Gamma.create(torch.tensor([2.0], dtype=torch.float64), rate),
        product(Poisson.create(rate)),
        convolve(Poisson.create(rate), Gaussian.create(rate, rate)),
    ):
        torch.testing.assert_close(power(measure, 1.7).log_partition(eta), 1.7 * measure.log_partition(eta))


def test_batches_are_prefixes():
    wide = Atoms.create(draw(3, 4, 2))
    narrow = Spin.create(dim=2)
    eta = draw(3, 5, 2)
    assert convolve(narrow, wide).batch_shape == product(narrow, wide).batch_shape == (3,)
    total = narrow.log_partition(eta) + wide.log_partition(eta)
    torch.testing.assert_close(convolve(narrow, wide).log_partition(eta), total)
    assert convolve(narrow, wide).sample(eta, (7,)).shape == (7, 3, 5, 2)
    bounded = product(Exponential.create(torch.ones(3, 1)), narrow)
    interior = bounded._interior()
    assert interior is None or interior.shape == (3, 3)


@every_row(
    ("make", "error", "message"),
    [
        (lambda: product(), ValueError, "at least one measure, got none"),
        (lambda: convolve(Spin.create(dim=2), Spin.create(dim=3)), ValueError, r"vectors of sizes \[2, 3\]"),
        (lambda: power(Spin.create(dim=2), 1.5), ValueError, "whole exponent for Spin.*got 1.5"),
        (lambda: power(Spin.create(dim=2), 0), ValueError, "exponent must be positive and finite, got 0"),
        (lambda: power(Spin.create(dim=2), math.nan), ValueError, "got nan"),
        (lambda: product(Spin.create(draw(2, 2)), Spin.create(draw(3, 2))), ValueError, "not a prefix"),
        (
            lambda: convolve(Spin.create(dim=20), Spin.create(dim=20)).log_prob(torch.zeros(20), torch.zeros(20)),
            MissingFormError,
            "sum of Spin and Spin",
        ),
        (
            lambda: power(Spin.create(dim=20), 2).log_prob(torch.zeros(20), torch.zeros(20)),
            MissingFormError,
            "sum of 2 draws from Spin",
        ),
    ],
)
def test_bad_arguments_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_domains_of_the_parts_are_kept():
    rates = torch.tensor([1.0]), torch.tensor([3.0])
    both = convolve(*(Exponential.create(rate) for rate in rates))
    assert isinstance(both, Convolution)
    with pytest.raises(ValueError, match=r"Convolution: eta is outside the domain.*1.*3"):
        both.log_partition(torch.tensor([2.0]))
    joined = product(Spin.create(dim=1), Exponential.create(rates[1]))
    with pytest.raises(ValueError, match=r"coordinates 1 to 1: .*3"):
        joined.mean(torch.tensor([9.0, 4.0]))
    assert joined.mean(torch.tensor([9.0, 2.0]))[1] == 1


def test_a_sums_interior_point_lies_in_the_domains_of_all_terms():
    # Domains (0, 10) and (0, 1), in either order: the middle of the wider one is outside the other.
    bits = Bernoulli.create(torch.full((2, 1), 0.5, dtype=torch.float64))
    wide, narrow = (torch.tensor(strengths, dtype=torch.float64).unsqueeze(-1) for strengths in ((10, 1), (1, 10)))
    both = convolve(ConjugatePrior.create(bits, wide), ConjugatePrior.create(bits, narrow))
    eta = torch.tensor([[0.3], [0.7]], dtype=torch.float64)
    torch.testing.assert_close(natural(both, both.mean(eta)), eta)
