"""A* and eta where the mean is on the boundary of its domain, beyond it, or there to rounding; and what is said of each."""

import itertools
import math

import pytest
import torch
from tests.support.rows import every_row

from massieu.duality import conjugate, natural
from massieu.duality.maps import DualResult
from massieu.errors import ConvergenceError
from massieu.measures import (
    Atoms,
    Bernoulli,
    Categorical,
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
    mixture,
    power,
    product,
)
from massieu.solve import Status

PRECISIONS = (torch.float32, torch.float64)
FIELDS = (0.0, 0.5, 1.0, 2.0, 3.0, 5.0, 9.0, 20.0, 50.0, 300.0)


def tensor(*values: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def surprise(log_odds: float) -> float:
    """−log of the probability of something of these log-odds, exact for large ones too."""
    return math.log1p(math.exp(-log_odds)) if log_odds > -30 else -log_odds + math.exp(log_odds)


@every_row(("field", "dtype"), itertools.product(FIELDS, PRECISIONS))
def test_certain_signs_and_bits_have_the_conjugate_of_their_probability(field, dtype):
    """A*(±1) = −log P(±1), and so at the law's own mean, where that has saturated."""
    spin = Spin.create(tensor(field, dtype=dtype))
    eps = torch.finfo(dtype).eps
    for sign in (1.0, -1.0):
        found = float(conjugate(spin, tensor(sign, dtype=dtype)))
        assert found == pytest.approx(surprise(sign * 2 * field), rel=8 * eps)
    mean = spin.mean(torch.zeros(1, dtype=dtype))
    # A mean that is off by a rounding has a conjugate as small as that, or that of the certain sign.
    assert 0 <= float(conjugate(spin, mean)) <= 4 * eps * (1 + field) + 1e-30
    bit = Bernoulli.create(torch.sigmoid(tensor(min(field, 9.0), dtype=dtype)))
    for one in (1.0, 0.0):
        exact = surprise((2 * one - 1) * float(bit.logit[0]))
        assert float(conjugate(bit, tensor(one, dtype=dtype))) == pytest.approx(exact, rel=8 * eps)


@pytest.mark.medium
@every_row(
    ("measure", "mu", "value"),
    [
        (Poisson.create(tensor(0.7)), tensor(0.0), 0.7),
        (Poisson.create(tensor(0.7, 2.0)), tensor(0.0, 2.0), 0.7),
        (Poisson.create(tensor(0.7)), tensor(-0.1), math.inf),
        (power(Spin.create(tensor(3.0)), 4), tensor(4.0), 4 * surprise(6.0)),
        (product(Spin.create(tensor(3.0)), Poisson.create(tensor(0.7))), tensor(1.0, 0.0), surprise(6.0) + 0.7),
        (product(Spin.create(tensor(3.0)), Exponential.create(tensor(0.7))), tensor(1.0, 0.0), math.inf),
        (Spin.create(tensor(3.0, 0.0)), tensor(1.0, 0.0), surprise(6.0)),
        (Spin.create(tensor(3.0)), tensor(1.0001), math.inf),
        (Constant.create(tensor(0.3)), tensor(0.3), 0.0),
        (Constant.create(tensor(0.3)), tensor(0.4), math.inf),
        (Exponential.create(tensor(2.0)), tensor(0.0), math.inf),
        (Gamma.create(tensor(0.5), tensor(2.0)), tensor(0.0), math.inf),
        (Uniform.create(tensor(-1.0), tensor(2.0)), tensor(2.0), math.inf),
        # eta is the end of the domain to rounding.
        (Laplace.create(tensor(2.0)), tensor(1e30), 5e29),
        (Exponential.create(tensor(2.0)), tensor(1e30), 2e30),
        (Gamma.create(tensor(3.0), tensor(2.0)), tensor(1e30), 5e29),
        (Sphere.create(2.0, dim=3), tensor(0.0, 2.0, 0.0), math.inf),
        (Sphere.create(2.0, dim=3), tensor(0.0, 2.5, 0.0), math.inf),
        (Gaussian.create(tensor(1.0, 1.0), tensor(1.0, 0.0)), tensor(3.0, 1.0), 2.0),
        (Gaussian.create(tensor(1.0, 1.0), tensor(1.0, 0.0)), tensor(3.0, 1.5), math.inf),
        (Categorical.create(tensor(0.2, 0.3, 0.5)), tensor(1.0, 0.0, 0.0), -math.log(0.2)),
        (
            Categorical.create(tensor(0.2, 0.3, 0.5)),
            tensor(0.0, 0.25, 0.75),
            0.25 * math.log(0.25 / 0.3) + 0.75 * math.log(0.75 / 0.5),
        ),
        (Categorical.create(tensor(0.0, 0.4, 0.6)), tensor(0.1, 0.4, 0.5), math.inf),
        # By Newton's method: a corner of an image of two signs, extreme atoms of a mixture.
        (
            affine(Spin.create(tensor(3.0, 0.2)), torch.eye(2).double()),
            tensor(1.0, -1.0),
            surprise(6.0) + surprise(-0.4),
        ),
        (
            mixture(tensor(0.0, 1.0), [Atoms.create(tensor(3.0)[None]), Spin.create(tensor(0.2))]),
            tensor(3.0),
            0.0,
        ),
        (
            mixture(tensor(0.0, 1.0), [Atoms.create(tensor(3.0)[None]), Spin.create(tensor(0.2))]),
            tensor(-1.0),
            surprise(-0.4) - 1.0,
        ),
    ],
)
def test_values_on_the_boundary_and_beyond_it(measure, mu, value):
    found = conjugate(measure, mu)
    assert not found.isnan().any()
    assert float(found) == pytest.approx(value, rel=1e-9, abs=1e-9)
    single = measure.to(torch.float32)
    assert not conjugate(single, mu.float()).isnan().any()


@pytest.mark.medium
@every_row(("scale", "dtype"), [(1.0, torch.float64), (15.0, torch.float32), (100.0, torch.float64)])
def test_saturated_means_of_laws_without_a_closed_form(scale, dtype):
    """Five atoms: A* = Σ p log p of the weights at eta, however little rounding has left of the smaller ones."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(3, 5, 2, dtype=torch.float64, generator=generator).to(dtype)
    eta = (scale * torch.randn(3, 8, 2, dtype=torch.float64, generator=generator)).to(dtype)
    atoms = Atoms.create(points)
    found = conjugate(atoms, atoms.mean(eta)).double()
    log_share = torch.log_softmax(eta.double() @ points.double().mT, -1)
    expected = (log_share.exp() * log_share).sum(-1)
    # The mean's rounding moves A* by ‖eta‖ times it, or, at most, by what a weight as small as it may add.
    rounding = 16 * torch.finfo(dtype).eps * (1 + eta.double().norm(dim=-1)) * (1 + points.double().abs().amax())
    assert ((found - expected).abs() <= rounding + 4 * torch.finfo(dtype).eps ** 0.5).all()


class OwnSigns(Measure):
    """A user's law with an inverse of its mean, and no word on its boundary."""

    field: torch.Tensor
    batch_shape = property(lambda self: self.field.shape[:-1])
    event_shape = property(lambda self: self.field.shape[-1:])

    def _log_partition(self, eta):
        local = eta + self.field
        return (torch.logaddexp(local, -local) - torch.logaddexp(self.field, -self.field)).sum(-1)

    def _natural(self, mu):
        return torch.where(mu.abs() <= 1, torch.atanh(mu) - self.field, torch.nan)


@pytest.mark.medium
@every_row(("field", "dtype"), itertools.product([0.0, 1.0, 3.0, 6.0], PRECISIONS))
def test_a_users_boundary_is_extrapolated(field, dtype):
    own = OwnSigns(tensor(field, dtype=dtype))
    # To the first order in the distance of the last point inside, which is that of float64's own resolution there.
    assert float(conjugate(own, tensor(1.0, dtype=dtype))) == pytest.approx(surprise(2 * field), rel=1e-3)


def test_a_users_boundary_that_rounding_hides_is_refused():
    own = OwnSigns(tensor(30.0))
    with pytest.raises(
        ConvergenceError, match=r"A\* was not found: OwnSigns, mu = \[1\]\. Give the measure `_conjugate`"
    ):
        conjugate(own, tensor(1.0))
    found = conjugate(own, tensor(1.0), throw=False)
    assert isinstance(found, DualResult)
    assert int(found.status) == Status.MAX_STEPS


@pytest.mark.medium
def test_the_status_says_what_became_of_each_item():
    atoms = Atoms.create(tensor(0.0, 1.0, 3.0)[:, None])
    mu = tensor(0.5, 3.0, 4.0, math.nan, math.inf)[:, None]
    for function in (natural, conjugate):
        with pytest.raises(ValueError, match="mu must be finite: Atoms"):
            function(atoms, mu)
        found = function(atoms, mu, throw=False)
        assert isinstance(found, DualResult)
        expected = [Status.CONVERGED, Status.CONVERGED, Status.DIVERGED, Status.NOT_FINITE, Status.NOT_FINITE]
        assert found.status.tolist() == [int(status) for status in expected]
        assert found.residual.shape == (5,)
    eta = natural(atoms, mu, throw=False)
    assert isinstance(eta, DualResult)
    torch.testing.assert_close(atoms.mean(eta.value[:1]), mu[:1], atol=1e-12, rtol=0)
    assert eta.value[1] == math.inf and eta.value[2:].isnan().all()
    value = conjugate(atoms, mu, throw=False)
    assert isinstance(value, DualResult)
    assert value.value[1:3].tolist() == [pytest.approx(0.0, abs=1e-9), math.inf] and value.value[3:].isnan().all()
    # In closed form too.
    spin = natural(Spin.create(dim=1), mu, throw=False)
    assert isinstance(spin, DualResult)
    assert spin.status.tolist() == [0, *[int(Status.DIVERGED)] * 2, *[int(Status.NOT_FINITE)] * 2]
    torch.testing.assert_close(natural(atoms, mu[:1]), eta.value[:1])


@pytest.mark.medium
def test_under_transforms_errors_are_raised_unless_asked_not_to():
    atoms = Atoms.create(tensor(0.0, 1.0, 3.0)[:, None])
    with pytest.raises(ValueError, match="outside the convex hull"):
        torch.func.vmap(lambda mu: natural(atoms, mu))(tensor(0.5, 4.0)[:, None])
    mapped = torch.func.vmap(lambda mu: natural(atoms, mu, throw=False).value)(tensor(0.5, 4.0)[:, None])
    assert mapped[0].isfinite() and mapped[1].isnan()
    both = torch.func.vmap(lambda mu: natural(atoms, mu, throw=False))(tensor(0.5, 4.0)[:, None])
    assert both.status.tolist() == [int(Status.CONVERGED), int(Status.DIVERGED)]
    # In closed form too.
    for measure, boundary in ((Spin.create(tensor(3.0)), 1.0), (Poisson.create(tensor(0.7)), 0.0)):
        mu = tensor(boundary, 0.5, -2.0)[:, None]
        found = torch.func.vmap(lambda point, measure=measure: conjugate(measure, point))(mu)
        torch.testing.assert_close(found, conjugate(measure, mu))
        assert found[2] == math.inf
