"""Duality: the inverse of the mean map and the conjugate, against optimisers, the primal problem and closed forms."""

import functools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog, minimize
from tests.support.rows import every_row, some_slow
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from massieu.duality import conjugate, natural, newton
from massieu.errors import ConvergenceError
from massieu.measures import Atoms, Categorical, Gaussian, Measure, Poisson, Spin, affine, mixture, product

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

    def _log_partition(self, eta: Tensor) -> Tensor:
        return (self._align(self.rate, eta) * torch.expm1(eta)).sum(-1)


class HalfLine(Measure):
    """`scale` times Lebesgue measure on the positive half-lines: the domain is eta < 0, and the origin is not in it."""

    scale: Tensor

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
    @every_row("seed", range(3))
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

    @every_row("seed", range(3))
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

    def test_the_last_step_is_taken_where_a_is_near_zero(self):
        # A of a probability is 0 at 0, where its rounding is that of Z, of order one: the step is no rise of A.
        log_weight, location, deviation = draw(3).log_softmax(-1), draw(3, seed=1), draw(3, seed=2).exp()
        measure = mixture(log_weight, Gaussian.create(location[:, None], deviation.square()[:, None]))
        eta = draw(500, 1, seed=3)
        # The tilted mixture's mean in closed form.
        scores = log_weight + eta * location + 0.5 * (eta * deviation).square()
        mean = (scores.softmax(-1) * (location + eta * deviation.square())).sum(-1, keepdim=True)
        close(natural(measure, mean), eta, 1e-11)


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
        eta = torch.atanh(mu) - field
        log_up, log_down = torch.nn.functional.logsigmoid(2 * field), torch.nn.functional.logsigmoid(-2 * field)
        expected = up * (up.log() - log_up) + down * (down.log() - log_down)
        close(natural(Grid(field), mu), eta)
        close(conjugate(Grid(field), mu), expected.sum((-2, -1)))
        flat = Spin.create(field.flatten())
        close(natural(flat, mu.flatten(-2)), eta.flatten(-2))
        close(conjugate(flat, mu.flatten(-2)), expected.sum((-2, -1)))

    def test_counts_with_and_without_their_closed_form(self):
        rate, mu = tensor(0.7, 2.0), torch.tensor([[1e-6, 1.5], [0.3, 1.5], [1e6, 1.5]]).double()
        expected = (mu * (mu / rate).log() - mu + rate).sum(-1)
        for measure in (Counts(rate), Poisson.create(rate)):
            close(natural(measure, mu), (mu / rate).log(), 1e-9)
            close(conjugate(measure, mu), expected)

    @pytest.mark.medium
    def test_a_domain_without_the_origin(self):
        measure, mu = HalfLine(tensor(2.0, 3.0)), torch.tensor([[1e-4, 1.5], [0.3, 1.5], [1e5, 1.5]]).double()
        close(natural(measure, mu), -1 / mu, 1e-9)
        close(conjugate(measure, mu), (-1 - (measure.scale * mu).log()).sum(-1))


class TestBoundary:
    """The unit square with a fifth point inside."""

    MU = torch.tensor([[0, 0], [1, 1], [0.5, 0], [1, 0.25], [0.5, 1e-6], [1e-6, 1e-6], [0.3, 0.4]], dtype=torch.float64)
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
        edges = [
            half @ (half.log() - weights[[0, 1]]),
            tensor(0.75, 0.25) @ (tensor(0.75, 0.25).log() - weights[[1, 3]]),
        ]
        close(values[:4], torch.stack([-weights[0], -weights[3], *edges]), 1e-9)
        # Continuous up to the boundary, with a slope that grows as a logarithm.
        assert abs(float(values[4] - values[2])) < 3e-5

    def test_each_item_is_as_if_alone(self):
        together = natural(square(), self.MU)
        for place in (0, 3, 5):  # a corner, an edge and the inside
            alone = natural(square(), self.MU[place])
            torch.testing.assert_close(together[place], alone, atol=1e-12, rtol=1e-12)

    @pytest.mark.medium
    def test_outside(self):
        outside = torch.tensor([[0.5, -1e-3], [1.001, 1.001], [7.0, 0.2], [-1e-6, 0.5], [1e9, -1e9]]).double()
        mu = torch.cat([self.MU, outside])
        with pytest.raises(
            ValueError, match=r"outside the convex hull of the support: Atoms, mu = \[.*\] at index \(7,\)"
        ):
            natural(square(), mu)
        values = conjugate(square(), mu)
        assert (values[7:] == INFINITY).all()
        assert values[:7].isfinite().all()
        with pytest.raises(ValueError, match="outside the convex hull of the support: Atoms"):
            torch.func.vmap(lambda point: natural(square(), point))(mu[6:8])
        # Asked not to raise: NaN instead of an error, infinities as before.
        mapped = torch.func.vmap(lambda point: natural(square(), point, throw=False).value)(mu)
        assert mapped[7:].isnan().all()
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

    @pytest.mark.medium
    def test_where_the_support_is_not_known(self):
        counts = Counts(tensor(2.0, 0.5))
        on_it_and_beyond = torch.tensor([[0.0, 1.0], [-1e-3, 1.0]]).double()
        assert (natural(counts, on_it_and_beyond[0]) == INFINITY).all()
        with pytest.raises(ValueError, match="outside"):
            natural(counts, on_it_and_beyond[1])
        values = conjugate(counts, on_it_and_beyond)
        close(values[0], 2 + math.log(2) - 0.5, 1e-9)
        assert values[1] == INFINITY
        # No mass at 0: A* grows without bound.
        assert conjugate(HalfLine(tensor(1.0, 1.0)), tensor(0.0, 1.0)) == INFINITY

    def test_a_slanted_image_of_counts(self):
        """Its support is a cone in a plane: the support function is infinite a rounding beside the face's normal."""
        weight = draw(3, 2)
        measure = affine(Poisson.create(tensor(2.0, 0.1)), weight)
        assert (natural(measure, weight @ tensor(0.0, 0.3)) == INFINITY).all()
        close(conjugate(measure, weight @ tensor(0.0, 0.3)), 2 + 0.3 * math.log(3) - 0.3 + 0.1, 1e-9)
        assert conjugate(measure, weight @ tensor(-1e-3, 0.3)) == INFINITY

    def test_where_the_inverse_is_known(self):
        spins = Spin.create(tensor(0.3, -0.2))
        assert natural(spins, tensor(1.0, 0.5))[0] == INFINITY
        expected = -torch.nn.functional.logsigmoid(tensor(0.6)) + conjugate(Spin.create(tensor(-0.2)), tensor(0.5))
        close(conjugate(spins, tensor(1.0, 0.5)), expected[0], 1e-9)
        assert conjugate(spins, tensor(1.1, 0.5)) == INFINITY
        with pytest.raises(ValueError, match="outside"):
            natural(spins, tensor(1.1, 0.5))
        close(conjugate(Poisson.create(tensor(2.0, 0.5)), tensor(0.0, 1.0)), 2 + math.log(2) - 0.5, 1e-9)


def families() -> list[Measure]:
    """One of each way to an answer: Newton, closed form, without the origin, not minimal, a composition."""
    return [
        Atoms.create(draw(7, 3), draw(7, seed=1)),
        Gaussian.create(draw(3), factor=draw(3, 4, seed=1)),
        Counts(draw(3).exp()),
        HalfLine(draw(3).exp()),
        Atoms.create(draw(3, 3), draw(3, seed=1)),
        affine(Spin.create(draw(4)), draw(3, 4, seed=2), draw(3, seed=3)),
        mixture(draw(2), Gaussian.create(draw(2, 3), tensor(0.5, 2.0))).tilt(draw(3, seed=4)),
        product(Atoms.create(draw(3, 2)), Poisson.create(tensor(2.0))),
    ]


def points_of(measure: Measure, count: int = 3) -> Tensor:
    """Parameters orthogonal to what A cannot see."""
    eta = draw(count, 3, seed=8)
    eta = -eta.exp() if isinstance(measure, HalfLine) else eta
    return (torch.linalg.pinv(measure.fisher(eta), hermitian=True) @ measure.fisher(eta) @ eta.unsqueeze(-1)).squeeze(
        -1
    )


@dataclass(frozen=True)
class Solved:
    """Parameters of a measure, their means, and what duality makes of these."""

    eta: Tensor
    mu: Tensor
    natural: Tensor
    conjugate: Tensor


@functools.cache
def solved(measure: Measure) -> Solved:
    """Once for all tests of the measure."""
    eta = points_of(measure)
    mu = measure.mean(eta)
    return Solved(eta, mu, natural(measure, mu), conjugate(measure, mu))


FAMILIES = families()
each_family = pytest.mark.parametrize("measure", FAMILIES, ids=lambda measure: type(measure).__name__)
some_families = some_slow("measure", FAMILIES, 4, ids=lambda measure: type(measure).__name__)
"""What is right for one answer by Newton's method is so for the compositions, whose answers are too."""


class TestLaws:
    @each_family
    def test_round_trips(self, measure):
        dual = solved(measure)
        close(dual.natural, dual.eta, 1e-9)
        close(measure.mean(dual.natural), dual.mu, 1e-12)

    @pytest.mark.medium
    @some_families
    def test_conjugate_is_minus_entropy_and_its_derivatives_are_natural_and_the_inverse_fisher_information(
        self, measure
    ):
        dual = solved(measure)
        close(dual.conjugate, -measure.entropy(dual.eta))
        close(torch.func.grad(lambda point: conjugate(measure, point).sum())(dual.mu), dual.eta, 1e-9)
        hessian = torch.func.hessian(lambda point: conjugate(measure, point))(dual.mu[0])
        close(hessian, torch.linalg.pinv(measure.fisher(dual.eta[0]), hermitian=True), 1e-8)

    @each_family
    def test_the_dual_divergence_is_the_divergence_with_its_arguments_exchanged(self, measure):
        dual = solved(measure)
        gap = ((dual.mu - dual.mu.flip(0)) * dual.natural.flip(0)).sum(-1)
        divergence = dual.conjugate - dual.conjugate.flip(0) - gap
        close(divergence, measure.kl(dual.eta, dual.eta.flip(0)), 1e-9)

    @pytest.mark.medium
    @some_families
    def test_vmap_and_single_precision(self, measure):
        dual = solved(measure)
        for function, expected in ((natural, dual.natural), (conjugate, dual.conjugate)):
            mapped = torch.func.vmap(lambda point, f=function: f(measure, point))(dual.mu)
            close(mapped, expected, 1e-9)
            single = function(measure.to(torch.float32), dual.mu.float())
            assert single.dtype == torch.float32
            torch.testing.assert_close(single.double(), expected, atol=1e-3, rtol=1e-3)


class TestDerivatives:
    @pytest.mark.medium
    @some_slow("count", [1, 3, 7], 1, ids=lambda count: f"{count} points in 3 dimensions")
    def test_in_the_points_their_weights_and_the_mean_twice(self, count):
        """With 3 points or fewer the family is not minimal, and what A cannot see turns with the points."""

        def mean(points: Tensor, share: Tensor) -> Tensor:
            return share.softmax(0) @ points

        def eta(points: Tensor, log_weight: Tensor, share: Tensor) -> Tensor:
            return natural(Atoms(points, log_weight), mean(points, share))

        def value(points: Tensor, log_weight: Tensor, share: Tensor) -> Tensor:
            return conjugate(Atoms(points, log_weight), mean(points, share))

        inputs = tuple(x.requires_grad_() for x in (draw(count, 3), draw(count, seed=1), draw(count, seed=2)))
        assert gradcheck(eta, inputs, fast_mode=True)
        assert gradcheck(value, inputs, fast_mode=True)
        assert gradgradcheck(eta, inputs, fast_mode=True)

    def test_least_norm_and_its_derivative_against_a_basis_of_the_span(self):
        points, log_weight, mu = draw(3, 5), draw(3, seed=1), tensor(0.2, 0.3, 0.5) @ draw(3, 5)

        def inside(points: Tensor) -> Tensor:
            # eta = differencesᵀ c, with the weights of mu known: log p − log w = x·eta + constant.
            differences = points[1:] - points[0]
            log_ratio = tensor(0.2, 0.3, 0.5).log() - log_weight
            coefficients = torch.linalg.solve(differences @ differences.T, log_ratio[1:] - log_ratio[0])
            return differences.T @ coefficients

        def found(points: Tensor) -> Tensor:
            return natural(Atoms(points, log_weight), tensor(0.2, 0.3, 0.5) @ points)

        close(natural(Atoms(points, log_weight), mu), inside(points))
        close(torch.func.jacrev(found)(points), torch.func.jacrev(inside)(points), 1e-9)

    @pytest.mark.medium
    def test_third_and_fourth_order_in_both_modes_nested(self):
        """Spins without their closed form: d³ atanh(m)/dm³ = (2 + 6m²)/(1 − m²)³, and then 24(m + m³)/(1 − m²)⁴."""
        measure, m = Grid(draw(2, 2)), 0.4

        def along(t: Tensor) -> Tensor:
            return natural(measure, t.expand(2, 2))[0, 0]

        reverse, forward = torch.func.grad, lambda f: lambda t: torch.func.jvp(f, (t,), (torch.ones_like(t),))[1]
        third = (2 + 6 * m**2) / (1 - m**2) ** 3
        t = torch.tensor(m, dtype=torch.float64)
        for derivative in (forward(reverse(forward(along))), reverse(forward(reverse(along)))):
            close(derivative(t), third)
        fourth = 24 * (m + m**3) / (1 - m**2) ** 4
        for derivative in (forward(reverse(forward(reverse(along)))), forward(forward(forward(forward(along))))):
            close(derivative(t), fourth)
        mapped = torch.func.vmap(reverse(reverse(along)))(tensor(m, -0.3))
        close(mapped, 2 * tensor(m, -0.3) / (1 - tensor(m, -0.3) ** 2) ** 2)

    def test_no_gradient_flows_from_the_boundary_to_others(self):
        mu = TestBoundary.MU.clone().requires_grad_()
        values = conjugate(square(), mu)
        (slope,) = torch.autograd.grad(values.sum(), mu)
        close(slope[TestBoundary.INSIDE], natural(square(), mu)[TestBoundary.INSIDE].detach(), 1e-7)
        assert (slope[TestBoundary.BOUNDARY] == 0).all()
        bits = Spin.create(tensor(0.1, 0.2)).field.requires_grad_()
        conjugate(Spin(bits), torch.tensor([[1.0, 0.5], [0.2, 0.3]], dtype=torch.float64)).sum().backward()
        assert bits.grad is not None
        assert bits.grad.isfinite().all()


class TestCompile:
    @pytest.mark.slow
    def test_values_and_gradients(self):
        """Of the conjugate, which solves for the natural parameters; their own derivative is in the next test."""
        torch.compiler.reset()
        mu, inside = TestBoundary.MU.clone().requires_grad_(), TestBoundary.INSIDE
        expected, actual = (
            call(square(), mu) for call in (conjugate, torch.compile(conjugate, fullgraph=True, backend="aot_eager"))
        )
        torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)
        slopes = [torch.autograd.grad(values[inside].sum(), mu)[0] for values in (actual, expected)]
        torch.testing.assert_close(*slopes, atol=1e-9, rtol=1e-9)

    @pytest.mark.slow
    def test_transforms_inside(self, monkeypatch):
        # A transform makes as many copies of a Newton step as may be needed; from here few are.
        monkeypatch.setattr(newton, "_UNROLLED", 4)
        torch.compiler.reset()
        measure = Atoms.create(draw(5, 2))
        mu = measure.mean(0.3 * draw(2, 2, seed=1))
        gradient = torch.func.grad(lambda point: natural(measure, point).sum())
        compiled = torch.compile(gradient, fullgraph=True, backend="aot_eager")(mu)
        torch.testing.assert_close(compiled, gradient(mu), atol=1e-9, rtol=1e-9)


class TestPrecision:
    def test_half_precision_is_promoted(self):
        measure = Atoms.create(draw(6, 2).bfloat16())
        mu = measure.mean(draw(4, 2, seed=1).bfloat16()).bfloat16()
        eta, value = natural(measure, mu), conjugate(measure, mu)
        assert eta.dtype == value.dtype == torch.float32
        exact = Atoms.create(measure.points.double())
        torch.testing.assert_close(eta.double(), natural(exact, mu.double()), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(value.double(), conjugate(exact, mu.double()), atol=1e-5, rtol=1e-5)

    def test_rounding_of_a_mean_in_an_affine_subspace_is_forgiven(self):
        """In float32 a mean of three points in five dimensions is off their plane by 1e-8."""
        measure = Atoms.create(draw(3, 5).float() + 3)
        eta = torch.linalg.pinv(measure.fisher(torch.zeros(5))) @ draw(5, seed=1).float()
        torch.testing.assert_close(natural(measure, measure.mean(eta)), eta, atol=1e-3, rtol=1e-3)


@st.composite
def problems(draw_from):
    """Atoms of any number, scale along the axes, offset and weight, some twice, and a mean of theirs."""
    random = np.random.default_rng(draw_from(st.integers(0, 2**32 - 1)))
    count, dimension = draw_from(st.integers(1, 12)), draw_from(st.integers(1, 5))
    points = random.standard_normal((count, dimension))
    points *= 10.0 ** (draw_from(st.sampled_from([0, 0, 3])) * random.uniform(-1, 1, dimension))
    points *= draw_from(st.sampled_from([1e-6, 1.0, 1.0, 1e6]))
    points[random.integers(count)] = points[0]
    offset = draw_from(st.sampled_from([0.0, 0.0, 1e3])) * np.ptp(points, 0) * random.standard_normal(dimension)
    log_weight = draw_from(st.sampled_from([0.0, 1.0, 50.0])) * random.choice([-1.0, 0.0, 1.0], count)
    if draw_from(st.booleans()) and count > 1:
        log_weight[1] = -np.inf
    share = random.dirichlet(np.full(count, draw_from(st.sampled_from([0.3, 1.0, 5.0])))) + 1e-7
    share = np.where(np.isinf(log_weight), 0, share)
    return points + offset, log_weight, share / share.sum()


@pytest.mark.medium
@given(problems())
def test_converges_from_anywhere(problem):
    points, log_weight, share = (torch.from_numpy(part) for part in problem)
    measure, mu = Atoms.create(points, log_weight), share @ points
    eta = natural(measure, mu)
    assert eta.isfinite().all()
    kept = points[log_weight > -INFINITY]
    spread, size = kept.amax(0) - kept.amin(0), kept.abs().amax(0)
    assert ((measure.mean(eta) - mu).abs() <= 1e-9 * spread + 1e-14 * size).all()
    # Any weights of that mean bound A* from above, any eta from below.
    value, scale = conjugate(measure, mu), 1 + log_weight[log_weight > -INFINITY].abs().amax()
    upper = torch.where(share > 0, share * ((share + 1e-300).log() - log_weight), 0.0).sum()
    noise = 1e-9 * scale + 1e-13 * (eta.abs() * size).sum()
    assert value <= upper + noise
    assert value >= (0.9 * eta) @ mu - measure.log_partition(0.9 * eta) - noise


class TestErrors:
    def test_shapes(self):
        for function in (natural, conjugate):
            with pytest.raises(ValueError, match=r"Atoms needs mu of shape \(\) \+ queries \+ \(2,\).*got \(4, 3\)"):
                function(square(), draw(4, 3))
            with pytest.raises(TypeError, match=r"mu must be real, got a tensor of torch\.complex64"):
                function(square(), torch.zeros(2, dtype=torch.complex64))

    @pytest.mark.medium
    @pytest.mark.parametrize("measure", [square(), Spin.create(dim=2)], ids=["Atoms", "Spin"])
    def test_means_that_are_not_finite(self, measure):
        for function in (natural, conjugate):
            for bad in (math.nan, math.inf):
                with pytest.raises(ValueError, match="mu must be finite"):
                    function(measure, tensor(0.0, bad))
            with pytest.raises(ValueError, match="mu must be finite"):
                torch.func.vmap(lambda point, f=function: f(measure, point))(tensor(0.1, math.nan)[None])
            mapped = torch.func.vmap(lambda point, f=function: f(measure, point, throw=False))(
                tensor(0.1, math.nan)[None]
            )
            assert mapped.value.isnan().any()

    @pytest.mark.medium
    def test_the_zero_measure_has_no_mean(self):
        empty = Atoms.create(draw(4, 2), torch.zeros(4, dtype=torch.bool))
        for function in (natural, conjugate):
            with pytest.raises(ValueError, match="A is not finite where Newton's method starts"):
                function(empty, tensor(0.0, 0.0))
            mapped = torch.func.vmap(lambda point, f=function: f(empty, point, throw=False))(draw(1, 2))
            assert mapped.value.isnan().all()

    def test_a_point_left_out_is_no_part_of_the_hull(self):
        atoms = Atoms.create(square().points, tensor(0, 0, 0, -INFINITY, 0))
        assert natural(atoms, tensor(0.4, 0.4)).isfinite().all()
        assert (natural(atoms, tensor(0.5, 0.5)) == INFINITY).all()
        close(conjugate(atoms, tensor(0.5, 0.5)), -math.log(2), 1e-9)
        with pytest.raises(ValueError, match="outside"):
            natural(atoms, tensor(0.5, 0.501))

    def test_no_convergence_is_said(self):
        with pytest.raises(ConvergenceError, match=r"no convergence in 100 Newton steps: Cliff, mu = \[5\]; residual"):
            natural(Cliff(tensor(1.0)), tensor(5.0))


class Cliff(Measure):
    """Not steep: the domain is eta ≤ 0 and the mean is at most 2 on it, though the support has no end."""

    scale: Tensor

    def _log_partition(self, eta: Tensor) -> Tensor:
        return (2 * eta + eta.square()).sum(-1)

    def _in_domain(self, eta: Tensor) -> Tensor:
        return (eta <= 0).all(-1)

    def _domain(self) -> str:
        return "eta ≤ 0"


def test_a_mean_in_half_precision_beside_a_flat_support_is_not_outside():
    measure = Categorical.create(torch.tensor([0.2, 0.3, 0.5]))
    mean = torch.tensor([0.1, 0.3, 0.6]).bfloat16()  # sums to 1.001
    found = natural(measure, mean)
    assert (measure.mean(found) - torch.tensor([0.1, 0.3, 0.6])).abs().max() < 4e-3
    value = conjugate(measure, mean)
    expected = (torch.tensor([0.1, 0.3, 0.6]) * (torch.tensor([0.1, 0.3, 0.6]) / measure.probability).log()).sum()
    assert abs(value - expected) < 1e-2
    with pytest.raises(ValueError, match="outside"):
        natural(measure, mean.float() + 0.01)


def test_the_hessian_of_categorical_entropy_is_the_pseudo_inverse():
    measure = Categorical.create(torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64))
    mean = torch.tensor([0.1, 0.3, 0.6], dtype=torch.float64)
    hessian = torch.func.hessian(lambda m: conjugate(measure, m))(mean)
    expected = torch.linalg.pinv(torch.diag(mean) - mean.outer(mean))
    torch.testing.assert_close(hessian, expected, atol=1e-9, rtol=0)
