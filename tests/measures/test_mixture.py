"""Mixtures against sums written out, SciPy's densities and the identities of S14 and S18."""

import functools
import math

import mpmath
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import multivariate_normal
from tests.support.rows import every_row
from torch import Tensor
from torch.utils import _pytree as pytree

from massieu.duality import natural
from massieu.measures import Atoms, ConjugatePrior, Gaussian, Poisson, Sphere, Spin, convolve, hybrid, listed, mixture


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def normals(count: int, size: int) -> tuple[Tensor, Tensor]:
    root = draw(count, size, size, seed=1)
    return draw(count, size), root @ root.mT + 0.2 * torch.eye(size, dtype=torch.float64)


def test_a_mixture_of_gaussians_is_the_textbook_one():
    location, covariance = normals(3, 2)
    log_weight = draw(3, seed=2)
    eta = draw(4, 2, seed=3)
    x = draw(7, 4, 2, seed=4)
    measure = mixture(log_weight, [Gaussian.create(location[k], covariance[k]) for k in range(3)])
    quadratic = 0.5 * torch.einsum("qi,kij,qj->qk", eta, covariance, eta)
    terms = (log_weight + eta @ location.mT + quadratic).numpy()
    expected = torch.from_numpy(logsumexp(terms, axis=-1))
    torch.testing.assert_close(measure.log_partition(eta), expected, atol=1e-12, rtol=1e-12)
    share = torch.from_numpy(terms).sub(expected.unsqueeze(-1)).exp()
    means = location + torch.einsum("kij,qj->qki", covariance, eta)
    torch.testing.assert_close(measure.mean(eta), torch.einsum("qk,qki->qi", share, means), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(measure.responsibilities(eta), share, atol=1e-13, rtol=0)
    # The tilted mixture: weights share, means moved, covariances as they were (S2).
    for q in range(4):
        densities = [
            math.log(share[q, k]) + multivariate_normal(means[q, k], covariance[k]).logpdf(x[:, q]) for k in range(3)
        ]
        expected = torch.from_numpy(logsumexp(densities, axis=0))
        torch.testing.assert_close(measure.log_prob(eta, x)[:, q], expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("batch", [(), (2,)])
def test_components_may_be_a_batch_of_one_measure(batch):
    points = draw(*batch, 3, 5, 2)
    weight = draw(*batch, 3, 5, seed=1)
    own = draw(*batch, 3, seed=2)
    eta = draw(*batch, 4, 2, seed=3)
    direction = draw(*batch, 4, 2, seed=4)
    batched = mixture(own, Atoms.create(points, weight))
    listed = mixture(own, [Atoms.create(points[..., k, :, :], weight[..., k, :]) for k in range(3)])
    # All atoms together, each weighted by its component's weight too.
    whole = Atoms.create(points.flatten(-3, -2), (weight + own.unsqueeze(-1)).flatten(-2))
    for measure in (batched, listed):
        for name in ("log_partition", "mean", "fisher", "entropy"):
            torch.testing.assert_close(getattr(measure, name)(eta), getattr(whole, name)(eta), atol=1e-12, rtol=1e-12)
        result = measure.cumulants(eta, direction, 6)
        torch.testing.assert_close(result, whole.cumulants(eta, direction, 6), atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(measure._support(direction), whole._support(direction))
        x = whole.sample(eta, (6,))
        torch.testing.assert_close(measure.log_prob(eta, x), whole.log_prob(eta, x), atol=1e-12, rtol=1e-12)


def test_batches_of_components_are_prefixes_of_the_longest():
    gaussian = Gaussian.create(draw(2), torch.tensor(1.0, dtype=torch.float64))
    atoms = Atoms.create(draw(3, 4, 2))
    measure = mixture(draw(3, 2, seed=2), [gaussian, atoms])
    assert measure.batch_shape == (3,)
    eta = draw(3, 5, 2, seed=3)
    for i in range(3):
        alone = mixture(measure.log_weight[i], [gaussian, Atoms.create(atoms.points[i])])
        torch.testing.assert_close(measure.log_partition(eta)[i], alone.log_partition(eta[i]))
        torch.testing.assert_close(measure.mean(eta)[i], alone.mean(eta[i]))
    assert measure.sample(eta, (6, 2)).shape == (6, 2, 3, 5, 2)


def test_samples_come_from_the_components_in_their_shares():
    measure = mixture(
        torch.tensor([0.0, 1.0], dtype=torch.float64), [Spin.create(dim=2), Poisson.create(torch.tensor([5.0, 9.0]))]
    )
    eta = draw(3, 2).mul(0.3)
    count = 40_000
    draws = measure.sample(eta, (count,), generator=torch.Generator().manual_seed(0))
    fisher = measure.fisher(eta).diagonal(dim1=-2, dim2=-1)
    error = (draws.mean(0) - measure.mean(eta)) / (fisher / count).sqrt()
    assert error.abs().max() < 5
    # Only spins are negative: a quarter of them has both coordinates at −1 at eta = 0.
    share = measure.responsibilities(eta)[..., 0] * torch.sigmoid(-2 * eta).prod(-1)
    result = (draws < 0).all(-1).double().mean(0)
    assert ((result - share).abs() < 5 * (share * (1 - share) / count).sqrt()).all()


def test_the_gap_of_the_lower_bound_is_a_divergence():
    """S14: for any weights r, A − bound = KL(r ‖ responsibilities)."""
    location, covariance = normals(3, 2)
    log_weight = torch.log_softmax(draw(3, seed=2), -1)
    eta = draw(4, 2, seed=3)
    measure = mixture(log_weight, Gaussian.create(location, covariance))
    weights = torch.softmax(draw(3, seed=4), -1)
    share = measure.responsibilities(eta)
    for r, bound in ((weights, measure.lower_bound(eta, weights)), (log_weight.exp(), measure.lower_bound(eta))):
        gap = (r * (r / share).log()).sum(-1)
        torch.testing.assert_close(measure.log_partition(eta) - bound, gap, atol=1e-12, rtol=1e-12)
    # For the mixture's own weights: a quadratic whose gradient adds the heads with fixed weights.
    pi = log_weight.exp()
    quadratic = 0.5 * torch.einsum("qi,kij,qj,k->q", eta, covariance, eta, pi)
    torch.testing.assert_close(measure.lower_bound(eta), eta @ (pi @ location) + quadratic, atol=1e-12, rtol=1e-12)
    exact = measure.lower_bound(eta[0], share[0])
    torch.testing.assert_close(exact, measure.log_partition(eta[0]), atol=1e-13, rtol=0)
    vertex = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    only = measure.lower_bound(eta, vertex)
    torch.testing.assert_close(only, log_weight[1] + Gaussian.create(location[1], covariance[1]).log_partition(eta))


def _one_by_one(batched):
    """The components of a measure whose last batch dimension counts them."""
    own = len(batched.batch_shape) - 1
    count = batched.batch_shape[-1]
    return [pytree.tree_map(lambda leaf, k=k: leaf.select(own, k), batched) for k in range(count)]


BATCHED = {
    "Gaussian per key": lambda: Gaussian.create(draw(3, 2, seed=1), draw(3, 2, seed=2).square() + 0.1),
    "von Mises–Fisher per key": lambda: Sphere.create(1 + draw(3, seed=1).square(), dim=2).tilt(3 * draw(3, 2, seed=2)),
    "Gaussians, in a batch": lambda: Gaussian.create(draw(2, 3, 2, seed=1), draw(2, 3, 2, seed=2).square() + 0.1),
    "signs": lambda: Spin.create(draw(3, 2, seed=1)),
    "atoms": lambda: Atoms.create(draw(3, 4, 2, seed=1), draw(3, 4, seed=2)),
    "conjugate priors": lambda: ConjugatePrior.create(
        Poisson.create(torch.ones(3, 2)), 1 + draw(3, 2, seed=1).square()
    ),
}


@pytest.mark.parametrize("name", BATCHED)
def test_a_batch_of_components_is_the_list_of_them(name):
    components = BATCHED[name]()
    log_weight = draw(3, seed=3)
    together = mixture(log_weight, components)
    listed = mixture(log_weight, _one_by_one(components))
    batch = together.batch_shape
    inside = together._interior()
    eta = 0.5 * draw(*batch, 7, 2, seed=4).tanh()
    other = 0.5 * draw(*batch, 7, 2, seed=5).tanh()
    if inside is not None:
        torch.testing.assert_close(inside, listed._interior())
        eta, other = inside + eta, inside + other
    same = functools.partial(torch.testing.assert_close, atol=1e-11, rtol=1e-11)
    for function in ("log_partition", "mean", "fisher", "entropy", "responsibilities", "lower_bound"):
        same(getattr(together, function)(eta), getattr(listed, function)(eta))
    same(together.kl(eta, other), listed.kl(eta, other))
    same(together.cumulants(eta, other, 4), listed.cumulants(eta, other, 4))
    drawn = listed.sample(eta, 6, generator=torch.Generator().manual_seed(0))
    same(together.log_prob(eta, drawn), listed.log_prob(eta, drawn))
    both, one = (measure._support(other) for measure in (together, listed))
    assert (both is None) == (one is None)
    if both is not None:
        same(both, one)
    gradients = [
        torch.func.grad(lambda measure: measure.log_partition(eta).square().sum() + measure.mean(eta).sin().sum())(m)
        for m in (together, listed)
    ]
    same(gradients[0].log_weight, gradients[1].log_weight)
    own = len(components.batch_shape) - 1
    each = zip(*(pytree.tree_leaves(part) for part in gradients[1].components), strict=True)
    for whole, parts in zip(pytree.tree_leaves(gradients[0].components), each, strict=True):
        same(whole, torch.stack(parts, own))


@pytest.mark.parametrize("name", ["Gaussian per key", "von Mises–Fisher per key"])
def test_samples_of_a_batch_of_components_are_its_own(name):
    measure = mixture(draw(3, seed=3), BATCHED[name]())
    eta = draw(2, 2, seed=4)
    count = 10_000
    drawn = measure.sample(eta, count, generator=torch.Generator().manual_seed(1))
    spread = measure.fisher(eta).diagonal(dim1=-2, dim2=-1).sqrt()
    assert ((drawn.mean(0) - measure.mean(eta)).abs() < 5 * spread / count**0.5).all()


def test_the_batch_of_a_mixture_may_be_longer_than_its_components():
    log_weight = draw(3, 4, seed=1)
    components = Atoms.create(draw(4, 2, 1, seed=2))
    whole = mixture(log_weight, components)
    eta = draw(3, 5, 1, seed=3)
    for i in range(3):
        alone = mixture(log_weight[i], components)
        torch.testing.assert_close(whole.mean(eta)[i], alone.mean(eta[i]))
        point = components.points[2, 1].expand(5, 1)
        result = convolve(whole, Atoms.create(torch.zeros(1, 1).double())).log_prob(eta, point.expand(3, 5, 1))
        torch.testing.assert_close(result[i], alone.log_prob(eta[i], point))


def test_a_component_of_weight_zero_takes_no_part():
    atoms = [Atoms.create(draw(4, 2, seed=s)) for s in range(2)]
    measure = mixture(torch.tensor([0.0, -torch.inf], dtype=torch.float64), atoms)
    eta = draw(5, 2, seed=3)
    torch.testing.assert_close(measure.log_partition(eta), atoms[0].log_partition(eta))
    assert torch.func.grad(lambda e: measure.mean(e).sum())(eta).isfinite().all()
    far = mixture(torch.tensor([0.0, -torch.inf], dtype=torch.float64), [atoms[0], Atoms.create(draw(4, 2) + 1e3)])
    torch.testing.assert_close(far._support(eta), atoms[0]._support(eta))


def test_hybrid_is_attention_with_a_background():
    """S18: the share of the background grows from 0 to 1 with the concentration, and far from the origin."""
    keys = Atoms.create(draw(6, 2))
    centre = Gaussian.create(draw(2, seed=1), torch.tensor([0.5, 1.0], dtype=torch.float64))
    eta = draw(4, 2, seed=2)
    for concentration, limit in ((1e-12, keys), (1e12, centre)):
        torch.testing.assert_close(hybrid(keys, centre, concentration).mean(eta), limit.mean(eta), atol=1e-9, rtol=0)
    measure = hybrid(keys, centre, 2.0)
    z = keys.log_partition(eta).exp() + 2 * centre.log_partition(eta).exp()
    torch.testing.assert_close(measure.log_partition(eta), z.log(), atol=1e-12, rtol=1e-12)
    far = measure.responsibilities(30 * eta / eta.norm(dim=-1, keepdim=True))
    assert (far[..., 1] > 1 - 1e-12).all()
    # A probability at an atom, a density elsewhere.
    at_atom = keys.points[:1].expand(4, 2)
    expected = (keys.points[0] * eta).sum(-1) - z.log()
    torch.testing.assert_close(measure.log_prob(eta, at_atom), expected, atol=1e-12, rtol=1e-12)
    elsewhere = draw(4, 2, seed=5)
    density = multivariate_normal(centre.location, torch.diag(centre.covariance)).logpdf(elsewhere)
    expected = math.log(2) + torch.from_numpy(density) + (elsewhere * eta).sum(-1) - z.log()
    torch.testing.assert_close(measure.log_prob(eta, elsewhere), expected, atol=1e-12, rtol=1e-12)


@every_row(
    ("arguments", "error", "message"),
    [
        ((torch.zeros(2), []), ValueError, "0 components"),
        ((torch.zeros(3), [Spin.create(dim=2)] * 2), ValueError, r"\('\*batch', 2\) for 2 components, got \(3,\)"),
        (
            (torch.zeros(2), [Spin.create(dim=2), Spin.create(dim=3)]),
            ValueError,
            r"one event shape, got \[\(2,\), \(3,\)\]",
        ),
        ((torch.zeros(2), Spin.create(dim=2)), ValueError, "batch dimension that counts"),
        ((torch.tensor([0j, 1]), [Spin.create(dim=2)] * 2), TypeError, "log_weight must be real"),
        ((torch.tensor([0.0, math.nan]), [Spin.create(dim=2)] * 2), ValueError, "NaN"),
        (
            (torch.zeros(4, 2), [Spin.create(dim=2), Atoms.create(torch.ones(3, 5, 2))]),
            ValueError,
            r"\(3,\) is not a prefix of \(4,\)",
        ),
    ],
)
def test_bad_mixtures_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        mixture(*arguments)


def test_an_overflowing_component_gives_infinity_not_nan():
    measure = mixture(torch.zeros(2), [Poisson.create(torch.ones(1)), Spin.create(dim=1)])
    assert measure.log_partition(torch.tensor([1e3])) == torch.inf


def test_a_mixture_whose_domain_leaves_out_the_origin_has_its_inverse():
    strength = torch.tensor([[2.0, 2.0], [5.0, 5.0]], dtype=torch.float64)
    batched = ConjugatePrior.create(Poisson.create(torch.ones_like(strength)), strength)
    listed = [ConjugatePrior.create(Poisson.create(torch.ones_like(row)), row) for row in strength]
    eta = draw(4, 2).abs() + 0.5
    for count, components in ((2, batched), (2, listed), (3, [Spin.create(dim=2), *listed])):
        measure = mixture(torch.zeros(count, dtype=torch.float64), components)
        torch.testing.assert_close(natural(measure, measure.mean(eta)), eta, atol=1e-9, rtol=0)


def _exact_divergence(points, log_weight, eta, other) -> float:
    """KL between the tilts of weighted points, to forty digits."""
    with mpmath.workdps(60):
        start, end = (
            [mpmath.mpf(weight) + mpmath.mpf(at) * point for point, weight in zip(points, log_weight, strict=True)]
            for at in (eta, other)
        )
        levels = [mpmath.log(mpmath.fsum(map(mpmath.exp, terms))) for terms in (start, end)]
        gain = [(x - levels[0]) - (y - levels[1]) for x, y in zip(start, end, strict=True)]
        return float(mpmath.fsum(mpmath.exp(x - levels[0]) * g for x, g in zip(start, gain, strict=True)))


@every_row(
    ("eta", "other"), [(0.0, 1e-6), (0.0, 0.1), (0.176, 0.076), (0.076, 0.176), (-0.7, -0.7001), (1.0, 1.0 + 1e-9)]
)
def test_divergence_keeps_its_digits_however_far_the_components_are_apart(eta, other):
    points = [0.65, 0.55, 0.27, 661.0]
    log_weight = [0.2, -0.4, 0.1, 2.0]
    near = Atoms.create(
        torch.tensor(points[:3], dtype=torch.float64).unsqueeze(-1), torch.tensor(log_weight[:3]).double()
    )
    far = Atoms.create(torch.tensor(points[3:], dtype=torch.float64).unsqueeze(-1))
    measure = mixture(torch.tensor([0.0, log_weight[3]], dtype=torch.float64), [near, far])
    at, to = (torch.tensor([value], dtype=torch.float64) for value in (eta, other))
    weights = [float(torch.tensor(value)) if place < 3 else value for place, value in enumerate(log_weight)]
    expected = _exact_divergence(points, weights, float(at), float(to))
    assert measure.kl(at, to).item() == pytest.approx(expected, rel=1e-8)


def test_a_listed_mixture_is_the_mixture():
    log_weight = draw(3, 4, seed=1)
    points = draw(4, 2, 1, seed=2)
    eta = draw(3, 5, 1, seed=3)
    for components in (Atoms.create(points), [Atoms.create(part) for part in points]):
        measure = mixture(log_weight, components)
        part = measure._listed()
        assert part is not None
        torch.testing.assert_close(listed.as_atoms(part).log_partition(eta), measure.log_partition(eta))
