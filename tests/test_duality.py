"""Duality: the inverse of the mean map and the conjugate, against optimisers, the primal problem and closed forms."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog, minimize
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from massieu.duality import conjugate, natural
from massieu.duality.newton import _UNROLLED
from massieu.measures import Atoms, Gaussian, Measure, Poisson, Spin, affine, mixture, product, tilt

INFINITY = math.inf


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), atol=tolerance, rtol=tolerance)


class Counts(Measure):
    """Poisson counts with nothing known but A."""

    rate: Tensor

    @property
    def batch_shape(self) -> torch.Size:
        return self.rate.shape[:-1]

    @property
    def event_shape(self) -> torch.Size:
        return self.rate.shape[-1:]

    def _log_partition(self, eta: Tensor) -> Tensor:
        return (self._align(self.rate, eta) * torch.expm1(eta)).sum(-1)


class HalfLine(Measure):
    """`scale` times Lebesgue measure on the positive half-lines: the domain is eta < 0, and the origin is not in it."""

    scale: Tensor

    @property
    def batch_shape(self) -> torch.Size:
        return self.scale.shape[:-1]

    @property
    def event_shape(self) -> torch.Size:
        return self.scale.shape[-1:]

    def _log_partition(self, eta: Tensor) -> Tensor:
        return (self._align(self.scale, eta).log() - (-eta).log()).sum(-1)

    def _in_domain(self, eta: Tensor) -> Tensor:
        return (eta < 0).all(-1)

    def _domain(self) -> str:
        return "eta < 0"

    def _interior(self) -> Tensor:
        return -torch.ones_like(self.scale)


class Grid(Measure):
    """Signs on a 2 × 2 grid, in a batch: events of two dimensions."""

    field: Tensor

    @property
    def batch_shape(self) -> torch.Size:
        return self.field.shape[:-2]

    @property
    def event_shape(self) -> torch.Size:
        return self.field.shape[-2:]

    def _log_partition(self, eta: Tensor) -> Tensor:
        local = eta + self._align(self.field, eta, 2)
        return (local.cosh().log() - self._align(self.field, eta, 2).cosh().log()).sum((-2, -1))


def square() -> Atoms:
    points = torch.tensor([[0, 0], [1, 0], [0, 1], [1, 1], [0.3, 0.6]], dtype=torch.float64)
    return Atoms.create(points, tensor(0.0, 0.5, -0.3, 0.1, 0.2))


def primal(points: np.ndarray, log_weight: np.ndarray, mu: np.ndarray) -> float:
    """min Σ p log(p/w) over p on the simplex with Σ p x = mu."""

    def objective(p: np.ndarray) -> float:
        return float(np.sum(p * (np.log(p) - log_weight)))

    constraints = [{"type": "eq", "fun": lambda p: p @ points - mu}, {"type": "eq", "fun": lambda p: p.sum() - 1}]
    start = linprog(np.zeros(len(points)), A_eq=np.vstack([points.T, np.ones(len(points))]), b_eq=np.append(mu, 1)).x
    start = 0.5 * start + 0.5 * interior_weights(points, mu)
    result = minimize(
        objective,
        start,
        jac=lambda p: np.log(p) - log_weight + 1,
        method="SLSQP",
        bounds=[(1e-12, 1)] * len(points),
        constraints=constraints,
        options={"ftol": 1e-15, "maxiter": 1000},
    )
    return float(result.fun)


def interior_weights(points: np.ndarray, mu: np.ndarray) -> np.ndarray:
    """Weights p with Σ p x = mu whose smallest is as large as possible."""
    count = len(points)
    equal = np.vstack([np.append(points.T, np.zeros((points.shape[1], 1)), 1), np.append(np.ones(count), 0)])
    above = np.append(-np.eye(count), np.ones((count, 1)), 1)
    cost = np.append(np.zeros(count), -1)
    return linprog(cost, A_ub=above, b_ub=np.zeros(count), A_eq=equal, b_eq=np.append(mu, 1)).x[:-1]


class TestAgainstOptimisers:
    @pytest.mark.parametrize("seed", range(3))
    def test_conjugate_is_the_legendre_transform(self, seed):
        atoms = Atoms.create(draw(9, 3, seed=seed), draw(9, seed=seed + 10))
        mu = torch.from_numpy(np.random.default_rng(seed).dirichlet(np.ones(9)) @ atoms.points.numpy())
        points, log_weight, target = atoms.points.numpy(), atoms.log_weight.numpy(), mu.numpy()

        def objective(eta):
            scores = points @ eta + log_weight
            weights = np.exp(scores - scores.max())
            return scores.max() + np.log(weights.sum()) - eta @ target, weights / weights.sum() @ points - target

        found = minimize(objective, np.zeros(3), jac=True, method="BFGS", options={"gtol": 1e-12, "maxiter": 500})
        close(conjugate(atoms, mu), -found.fun)
        np.testing.assert_allclose(natural(atoms, mu).numpy(), found.x, atol=1e-7, rtol=1e-7)

    @pytest.mark.parametrize("seed", range(3))
    def test_conjugate_is_the_least_relative_entropy_of_weights_with_that_mean(self, seed):
        atoms = Atoms.create(draw(6, 2, seed=seed), draw(6, seed=seed + 10))
        mu = torch.from_numpy(np.random.default_rng(seed).dirichlet(np.ones(6)) @ atoms.points.numpy())
        expected = primal(atoms.points.numpy(), atoms.log_weight.numpy(), mu.numpy())
        close(conjugate(atoms, mu), expected, 1e-7)

    def test_a_mixture_of_gaussians(self):
        means, variance = draw(3, 2), tensor(0.5, 1.0, 2.0)
        measure = mixture(draw(3, seed=1), Gaussian.create(means, variance))
        mu = 3 * draw(2, seed=2)
        eta = natural(measure, mu)
        log_weight = draw(3, seed=1).numpy()

        def objective(point):
            scores = log_weight + means.numpy() @ point + 0.5 * variance.numpy() * (point @ point)
            return scores.max() + np.log(np.exp(scores - scores.max()).sum()) - point @ mu.numpy()

        found = minimize(objective, np.zeros(2), method="BFGS", options={"gtol": 1e-9})
        np.testing.assert_allclose(eta.numpy(), found.x, atol=1e-5)
        close(conjugate(measure, mu), -found.fun)


class TestClosedForms:
    def test_gaussian(self):
        location, root, mu = draw(3), draw(3, 3, seed=1), draw(4, 3, seed=2)
        measure = Gaussian.create(location, root @ root.mT)
        precision = torch.linalg.inv(root @ root.mT)
        close(natural(measure, mu), (mu - location) @ precision)
        close(conjugate(measure, mu), 0.5 * torch.einsum("ni,ij,nj->n", mu - location, precision, mu - location))

    def test_spins_with_and_without_their_closed_form(self):
        field, mu = draw(2, 2), torch.tanh(draw(2, 3, 2, 2, seed=1))
        up, down = (1 + mu) / 2, (1 - mu) / 2
        local = field[:, None] if False else field
        eta = torch.atanh(mu) - local
        log_up, log_down = torch.nn.functional.logsigmoid(2 * local), torch.nn.functional.logsigmoid(-2 * local)
        expected = up * (up.log() - log_up) + down * (down.log() - log_down)
        close(natural(Grid(field), mu), eta)
        close(conjugate(Grid(field), mu), expected.sum((-2, -1)))
        flat = Spin.create(field.flatten())
        close(natural(flat, mu.flatten(-2)), eta.flatten(-2))
        close(conjugate(flat, mu.flatten(-2)), expected.sum((-2, -1)))

    @pytest.mark.parametrize("mean", [1e-6, 0.3, 1.0, 40.0, 1e6])
    def test_counts_with_and_without_their_closed_form(self, mean):
        rate, mu = tensor(0.7, 2.0), tensor(mean, 1.5)
        expected = (mu * (mu / rate).log() - mu + rate).sum()
        for measure in (Counts(rate), Poisson.create(rate)):
            close(natural(measure, mu), (mu / rate).log(), 1e-9)
            close(conjugate(measure, mu), expected)

    @pytest.mark.parametrize("mean", [1e-4, 0.3, 1.0, 1e5])
    def test_a_domain_without_the_origin(self, mean):
        measure, mu = HalfLine(tensor(2.0, 3.0)), tensor(mean, 1.5)
        close(natural(measure, mu), -1 / mu, 1e-9)
        close(conjugate(measure, mu), (-1 - (measure.scale * mu).log()).sum())


class TestBoundary:
    """The unit square with a fifth point inside."""

    MU = torch.tensor(
        [[0, 0], [1, 1], [0.5, 0], [1, 0.25], [0.5, 1e-6], [1e-6, 1e-6], [0.3, 0.4]], dtype=torch.float64
    )
    BOUNDARY = [0, 1, 2, 3]
    INSIDE = [4, 5, 6]

    def test_natural_is_infinite_on_it_and_exact_near_it(self):
        eta = natural(square(), self.MU)
        assert (eta[self.BOUNDARY] == INFINITY).all()
        assert eta[self.INSIDE].isfinite().all()
        torch.testing.assert_close(square().mean(eta[self.INSIDE]), self.MU[self.INSIDE], atol=1e-12, rtol=0)

    def test_conjugate_is_the_value_of_the_face(self):
        weights = square().log_weight
        values = conjugate(square(), self.MU)
        half = tensor(0.5, 0.5)
        edges = [half @ (half.log() - weights[[0, 1]]), tensor(0.75, 0.25) @ (tensor(0.75, 0.25).log() - weights[[1, 3]])]
        close(values[:4], torch.stack([-weights[0], -weights[3], *edges]), 1e-9)
        # Continuous up to the boundary, with a slope that grows as a logarithm.
        assert abs(float(values[4] - values[2])) < 3e-5

    def test_each_item_is_as_if_alone(self):
        together = natural(square(), self.MU)
        alone = torch.stack([natural(square(), mu) for mu in self.MU])
        torch.testing.assert_close(together, alone, atol=1e-12, rtol=1e-12)

    @pytest.mark.parametrize("outside", [(0.5, -1e-3), (1.001, 1.001), (7.0, 0.2), (-1e-6, 0.5), (1e9, -1e9)])
    def test_outside(self, outside):
        mu = torch.cat([self.MU, tensor(*outside)[None]])
        with pytest.raises(ValueError, match=r"outside the convex hull of the support: Atoms, mu = \[.*\] at index \(7,\)"):
            natural(square(), mu)
        values = conjugate(square(), mu)
        assert values[7] == INFINITY
        assert values[:7].isfinite().all()
        # Unreadable values: NaN instead of an error, infinities as before.
        mapped = torch.func.vmap(lambda point: natural(square(), point))(mu)
        assert mapped[7].isnan().all()
        assert (mapped[self.BOUNDARY] == INFINITY).all()
        torch.testing.assert_close(mapped[self.INSIDE], natural(square(), self.MU[self.INSIDE]), atol=1e-9, rtol=1e-12)
        torch.testing.assert_close(torch.func.vmap(lambda point: conjugate(square(), point))(mu), values)

    def test_off_the_affine_hull_is_outside(self):
        line = Atoms.create(torch.tensor([[0.0, 0], [1, 1], [2, 2]], dtype=torch.float64))
        with pytest.raises(ValueError, match="outside"):
            natural(line, tensor(1.0, 1.001))
        assert conjugate(line, tensor(1.0, 1.001)) == INFINITY
        close(natural(line, tensor(1.0, 1.0)), tensor(0.0, 0.0))
        assert (natural(line, tensor(2.0, 2.0)) == INFINITY).all()

    def test_a_slanted_simplex(self):
        points = torch.cat([torch.zeros(1, 4, dtype=torch.float64), draw(4, 4, seed=5)])
        atoms = Atoms.create(points, draw(5, seed=6))
        faces = torch.tensor([[0.2, 0.3, 0.5, 0, 0], [0, 0, 0.5, 0.5, 0], [0.1, 0.2, 0.3, 0.4, 0]], dtype=torch.float64)
        assert (natural(atoms, faces @ points) == INFINITY).all()
        expected = torch.where(faces > 0, faces * (faces.clamp_min(1e-300).log() - atoms.log_weight), 0.0).sum(-1)
        close(conjugate(atoms, faces @ points), expected, 1e-9)
        near = 0.999999 * faces + 0.000001 * tensor(0.2, 0.2, 0.2, 0.2, 0.2)
        torch.testing.assert_close(atoms.mean(natural(atoms, near @ points)), near @ points, atol=1e-12, rtol=1e-12)
        close(conjugate(atoms, near @ points), (near * (near.log() - atoms.log_weight)).sum(-1), 1e-9)

    def test_where_the_support_is_not_known(self):
        counts = Counts(tensor(2.0, 0.5))
        assert (natural(counts, tensor(0.0, 1.0)) == INFINITY).all()
        close(conjugate(counts, tensor(0.0, 1.0)), 2 + math.log(2) - 0.5, 1e-9)
        with pytest.raises(ValueError, match="outside"):
            natural(counts, tensor(-1e-3, 1.0))
        assert conjugate(counts, tensor(-1e-3, 1.0)) == INFINITY
        line = HalfLine(tensor(1.0, 1.0))
        assert (natural(line, tensor(0.0, 1.0)) == INFINITY).all()
        # No mass at 0: A* grows without bound.
        assert conjugate(line, tensor(0.0, 1.0)) == INFINITY

    def test_where_the_inverse_is_known(self):
        spins = Spin.create(tensor(0.3, -0.2))
        assert natural(spins, tensor(1.0, 0.5))[0] == INFINITY
        expected = -torch.nn.functional.logsigmoid(tensor(0.6)) + conjugate(Spin.create(tensor(-0.2)), tensor(0.5))
        close(conjugate(spins, tensor(1.0, 0.5)), expected[0], 1e-9)
        assert conjugate(spins, tensor(1.1, 0.5)) == INFINITY
        with pytest.raises(ValueError, match="outside"):
            natural(spins, tensor(1.1, 0.5))
        close(conjugate(Poisson.create(tensor(2.0, 0.5)), tensor(0.0, 1.0)), 2 + math.log(2) - 0.5, 1e-9)
