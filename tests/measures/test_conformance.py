"""Every measure of the package obeys the laws of `check_measure`, against oracles that share no code with it."""

import importlib
import inspect
import itertools
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from torch import Tensor

import massieu.measures
from massieu.measures import Affine, Atoms, Gaussian, Measure, Spin, Tilted, affine
from massieu.testing import check_measure


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@dataclass(frozen=True)
class Enumerated:
    """A measure given by all its points and log-weights, batch by batch."""

    points: np.ndarray  # (*batch, N, d)
    log_weight: np.ndarray  # (*batch, N)

    def scores(self, eta: Tensor) -> np.ndarray:
        return (
            np.einsum("...qd,...nd->...qn", eta.detach().double().numpy(), self.points) + self.log_weight[..., None, :]
        )

    def log_partition(self, eta: Tensor) -> Tensor:
        return torch.from_numpy(logsumexp(self.scores(eta), -1))

    def kl(self, eta_p: Tensor, eta_q: Tensor) -> Tensor:
        p, q = self.scores(eta_p), self.scores(eta_q)
        log_p, log_q = (s - logsumexp(s, -1, keepdims=True) for s in (p, q))
        gap = np.subtract(log_p, log_q, out=np.zeros_like(p), where=np.isfinite(log_p))
        return torch.from_numpy((np.exp(log_p) * gap).sum(-1))


def enumerated_spins(field: Tensor) -> Enumerated:
    states = np.array(list(itertools.product([-1.0, 1.0], repeat=field.shape[-1])))
    weights = field.double().numpy() @ states.T
    points = np.broadcast_to(states, (*field.shape[:-1], *states.shape))
    return Enumerated(points, weights - logsumexp(weights, -1, keepdims=True))


@dataclass(frozen=True)
class Normal:
    """N(location, covariance) in NumPy."""

    location: np.ndarray
    covariance: np.ndarray

    def log_partition(self, eta: Tensor) -> Tensor:
        point = eta.detach().double().numpy()
        quadratic = np.einsum("...qi,...ij,...qj->...q", point, self.covariance, point)
        return torch.from_numpy(np.einsum("...qi,...i->...q", point, self.location) + quadratic / 2)

    def kl(self, eta_p: Tensor, eta_q: Tensor) -> Tensor:
        """Between the two normal densities, by torch's general formula."""
        covariance = torch.from_numpy(self.covariance).unsqueeze(-3)
        p, q = (
            torch.distributions.MultivariateNormal(
                torch.from_numpy(self.location).unsqueeze(-2) + (covariance @ eta.unsqueeze(-1)).squeeze(-1), covariance
            )
            for eta in (eta_p, eta_q)
        )
        return torch.distributions.kl_divergence(p, q)


@dataclass(frozen=True)
class Case:
    measure: Measure
    log_partition: Callable[[Tensor], Tensor]
    kl: Callable[[Tensor, Tensor], Tensor] | None = None


def atoms_case(measure: Atoms) -> Case:
    oracle = Enumerated(measure.points.double().numpy(), measure.log_weight.double().numpy())
    return Case(measure, oracle.log_partition, oracle.kl)


def gaussian_case(location: Tensor, covariance: Tensor, matrix: Tensor) -> Case:
    oracle = Normal(location.numpy(), matrix.numpy())
    return Case(Gaussian.create(location, covariance), oracle.log_partition, oracle.kl)


def cases() -> dict[str, Case]:
    masked = draw(2, 7, seed=1)
    masked[0, 2] = masked[1, 0] = masked[1, 6] = -torch.inf
    root = draw(2, 3, 3, seed=2)
    full = root @ root.mT + 0.1 * torch.eye(3, dtype=torch.float64)
    variances = draw(2, 3, seed=3).square() + 0.1
    field = draw(2, 3, seed=4)
    spins, weight, bias = enumerated_spins(field), draw(2, 4, 3, seed=5), draw(4, seed=6)
    pushed = Enumerated(spins.points @ weight.mT.numpy() + bias.numpy(), spins.log_weight)
    tilt = draw(4, seed=7)
    # In one batch: the tilt adds its scores to the log-weights and normalises.
    single = Enumerated(pushed.points[0], pushed.log_weight[0])
    score = single.points @ tilt.numpy() + single.log_weight
    tilted = Enumerated(single.points, score - logsumexp(score))
    rank_one = draw(3, 1, seed=8)
    return {
        "atoms": atoms_case(Atoms.create(draw(6, 3))),
        "atoms, batched and masked": atoms_case(Atoms.create(draw(2, 7, 3), masked)),
        "atoms, far from the origin": atoms_case(Atoms.create(draw(2, 5, 3) + 20.0)),
        "atoms, one point": atoms_case(Atoms.create(draw(1, 2))),
        "atoms, fewer than dimensions": atoms_case(Atoms.create(draw(3, 6), draw(3, seed=1))),
        "atoms, two batch dimensions": atoms_case(Atoms.create(draw(2, 3, 4, 2), draw(2, 3, 4, seed=1))),
        "gaussian, isotropic": gaussian_case(
            draw(2, 3), variances[:, 0], torch.diag_embed(variances[:, :1].expand(2, 3))
        ),
        "gaussian, diagonal": gaussian_case(draw(2, 3), variances, torch.diag_embed(variances)),
        "gaussian, full": gaussian_case(draw(2, 3), full, full),
        "gaussian, rank one": Case(
            Gaussian.create(draw(3), factor=rank_one),
            Normal(draw(3).numpy(), (rank_one @ rank_one.mT).numpy()).log_partition,
        ),
        "spin, fair": Case(
            Spin.create(3), enumerated_spins(torch.zeros(3)).log_partition, enumerated_spins(torch.zeros(3)).kl
        ),
        "spin, in a field": Case(Spin.create(field), spins.log_partition, spins.kl),
        "affine": Case(affine(Spin.create(field), weight, bias), pushed.log_partition, pushed.kl),
        "tilted": Case(affine(Spin.create(field[0]), weight[0], bias).tilt(tilt), tilted.log_partition, tilted.kl),
    }


CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_conforms(name):
    case = CASES[name]
    check_measure(case.measure, log_partition=case.log_partition, kl=case.kl)


COMPILED_CASES = ["atoms, batched and masked", "gaussian, full", "spin, in a field", "affine", "tilted"]
"""One of each class."""


@pytest.mark.parametrize("name", COMPILED_CASES)
def test_conforms_compiled(name):
    check_measure(CASES[name].measure, compile_backend="aot_eager", samples=100)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED_CASES)
def test_conforms_compiled_to_machine_code(name):
    check_measure(CASES[name].measure, compile_backend="inductor", samples=100)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("name", CASES)
def test_conforms_for_other_draws(name, seed):
    case = CASES[name]
    check_measure(case.measure, log_partition=case.log_partition, kl=case.kl, samples=200_000, seed=seed)


def concrete_measures() -> set[type[Measure]]:
    for module in pkgutil.walk_packages(massieu.measures.__path__, "massieu.measures."):
        importlib.import_module(module.name)
    found, queue = set(), [Measure]
    while queue:
        cls = queue.pop()
        queue.extend(cls.__subclasses__())
        if not inspect.isabstract(cls) and cls.__module__.startswith("massieu."):
            found.add(cls)
    return found


def test_every_measure_has_a_case():
    covered = {type(case.measure) for case in CASES.values()}
    missing = concrete_measures() - covered
    assert not missing, f"no conformance case for {sorted(cls.__name__ for cls in missing)}"
    assert covered == {Atoms, Gaussian, Spin, Affine, Tilted}
