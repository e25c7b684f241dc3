"""Renormalisations of a population against NumPy's roots and their own definition; derivatives, batches, bad calls."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.support import processes
from tests.support.derivatives import check_derivatives
from torch import Tensor
from torch.utils import _pytree as pytree

from massieu.measures import Gaussian
from massieu.population import Renormalisation, TraceRenormalisation

F64 = torch.float64


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def covariance(width: int, seed: int) -> Tensor:
    mixing = draw(width, width, seed=seed)
    return mixing @ mixing.T + 0.3 * torch.eye(width, dtype=F64)


def moments(particles: Tensor) -> tuple[Tensor, Tensor]:
    centred = particles - particles.mean(-2, keepdim=True)
    return particles.mean(-2), centred.mT @ centred / particles.shape[-2]


def symmetric_root(matrix: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.sqrt(values)) @ vectors.T


def test_particles_have_the_wanted_moments_by_the_symmetric_root():
    wanted = draw(4, seed=1)
    target = covariance(4, 2)
    particles = draw(30, 4, seed=3) @ draw(4, 4, seed=4) + 5
    result = Renormalisation.create(wanted, target)(particles)
    mean, own = moments(result)
    torch.testing.assert_close(mean, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(own, target, rtol=0, atol=1e-11)
    root = symmetric_root(target.numpy()) @ np.linalg.inv(symmetric_root(np.cov(particles.numpy().T, bias=True)))
    expected = wanted.numpy() + (particles.numpy() - particles.numpy().mean(0)) @ root.T
    np.testing.assert_allclose(result, expected, atol=1e-10)


def test_laws_go_where_their_particles_go():
    rule = Renormalisation.create(draw(3, seed=1), covariance(3, 2))
    particles = draw(40, 3, seed=3) @ draw(3, 3, seed=4)
    law = Gaussian.create(*moments(particles))
    for rule_ in (rule, TraceRenormalisation.create(2.0), Renormalisation.create(rule.mean, rule.covariance, eps=0.2)):
        mean, own = moments(rule_(particles))
        result = rule_.gaussian(law)
        torch.testing.assert_close(result.location, mean, rtol=0, atol=1e-12)
        torch.testing.assert_close(result.fisher(torch.zeros(3, dtype=F64)), own, rtol=0, atol=1e-11)


def test_what_is_renormalised_stays():
    rule = Renormalisation.create(draw(3, seed=1), covariance(3, 2))
    once = rule(draw(20, 3, seed=3))
    torch.testing.assert_close(rule(once), once, rtol=0, atol=1e-11)


def test_the_trace_is_held_and_ratios_of_eigenvalues_stay():
    particles = draw(25, 4, seed=5) * torch.tensor([3.0, 1.0, 0.2, 0.1], dtype=F64) + 7
    before, after = (
        torch.linalg.eigvalsh(moments(x)[1]) for x in (particles, TraceRenormalisation.create(4.0)(particles))
    )
    assert after.sum().item() == pytest.approx(4.0, rel=1e-12)
    torch.testing.assert_close(after / after.sum(), before / before.sum(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "rule", [Renormalisation.create(draw(2, seed=1), covariance(2, 2)), TraceRenormalisation.create(1.5)]
)
def test_derivatives_of_first_and_second_order(rule):
    # A standard cloud has equal eigenvalues, at which derivatives of eigenvectors do not exist.
    white = Renormalisation.create(torch.zeros(2, dtype=F64), torch.eye(2, dtype=F64))(draw(4, 2, seed=3))
    for cloud in (draw(4, 2, seed=3), white):
        check_derivatives(rule, [cloud])


def test_derivative_in_the_target():
    def renormalised(mean: Tensor, factor: Tensor) -> Tensor:
        target = factor @ factor.mT + torch.eye(2, dtype=F64)
        return Renormalisation(mean, target)(draw(5, 2, seed=3))

    check_derivatives(renormalised, (draw(2, seed=1), draw(2, 2, seed=2)), second=False)


@pytest.mark.medium
def test_batches_and_vmap():
    particles = draw(3, 12, 2, seed=6)
    for rule in (Renormalisation.create(draw(2, seed=1), covariance(2, 2)), TraceRenormalisation.create(2.0)):
        whole = rule(particles)
        torch.testing.assert_close(whole, torch.stack([rule(cloud) for cloud in particles]))
        torch.testing.assert_close(whole, torch.func.vmap(rule)(particles))
        leaves, structure = pytree.tree_flatten(rule)
        torch.testing.assert_close(whole, pytree.tree_unflatten(leaves, structure)(particles))
    batched = Renormalisation.create(draw(3, 2, seed=7), torch.stack([covariance(2, seed) for seed in range(3)]))
    expected = [Renormalisation(m, c)(x) for m, c, x in zip(batched.mean, batched.covariance, particles, strict=True)]
    torch.testing.assert_close(batched(particles), torch.stack(expected))
    laws = Gaussian.create(draw(3, 2, seed=8), torch.stack([covariance(2, seed) for seed in range(3, 6)]))
    torch.testing.assert_close(batched.gaussian(laws).covariance, batched.covariance)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", [Renormalisation.create(draw(2, seed=1), covariance(2, 2)), TraceRenormalisation.create(2.0)]
)
def test_compiled(rule):
    particles = draw(3, 12, 2, seed=6)
    compiled = torch.compile(rule.__call__, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(particles), rule(particles))


def renormalised_in_processes(rank: int, size: int) -> dict[str, Tensor]:
    """Each process's share of 13 particles, and the gradients of one objective."""
    own = draw(13, 2, seed=6).tensor_split(size)[rank].clone().requires_grad_()
    mean = draw(2, seed=1).requires_grad_()
    target = covariance(2, 2).requires_grad_()
    result = {}
    for name, rule in {
        "full": Renormalisation(mean, target),
        "trace": TraceRenormalisation.create(2.0),
    }.items():
        moved = rule.sharded(own, group=dist.group.WORLD)
        result[name] = moved.detach()
        leaves = [own, mean, target] if name == "full" else [own]
        result[f"{name}: gradients"] = torch.autograd.grad(objective(moved).sum(), leaves)
    return result


def objective(particles: Tensor) -> Tensor:
    return particles.sin().cumsum(-1)


@pytest.mark.slow
def test_particles_of_several_processes_have_the_moments_of_all():
    shares: Any = processes.run(renormalised_in_processes, 2)
    particles = draw(13, 2, seed=6).requires_grad_()
    mean = draw(2, seed=1).requires_grad_()
    target = covariance(2, 2).requires_grad_()
    for name, rule in {"full": Renormalisation(mean, target), "trace": TraceRenormalisation.create(2.0)}.items():
        whole = rule(particles)
        torch.testing.assert_close(torch.cat([share[name] for share in shares]), whole.detach())
        leaves = [particles, mean, target] if name == "full" else [particles]
        expected = torch.autograd.grad(objective(whole).sum(), leaves)
        own, *rest = zip(*[share[f"{name}: gradients"] for share in shares], strict=True)
        torch.testing.assert_close(torch.cat(own), expected[0])
        for replicas, gradient in zip(rest, expected[1:], strict=True):
            for replica in replicas:
                torch.testing.assert_close(replica, gradient)


def test_few_particles_need_an_eps():
    rule = Renormalisation.create(torch.zeros(4, dtype=F64), torch.eye(4, dtype=F64))
    with pytest.raises(
        ValueError, match=r"Renormalisation needs a positive definite covariance.*more points or an eps"
    ):
        rule(draw(4, 4))
    softened = Renormalisation.create(rule.mean, rule.covariance, eps=0.1)(draw(4, 4))
    assert softened.isfinite().all()
    with pytest.raises(ValueError, match="more points or an eps"):
        rule.gaussian(Gaussian.create(torch.zeros(4, dtype=F64), factor=draw(4, 2)))


def test_bad_calls():
    mean = torch.zeros(3, dtype=F64)
    target = torch.eye(3, dtype=F64)
    with pytest.raises(ValueError, match=r"covariance must have shape \(3, 3\) .* got \(3,\)"):
        Renormalisation.create(mean, torch.ones(3, dtype=F64))
    with pytest.raises(ValueError, match="positive definite"):
        Renormalisation.create(mean, torch.diag(torch.tensor([1.0, 1.0, 0.0], dtype=F64)))
    with pytest.raises(ValueError, match="symmetric"):
        Renormalisation.create(mean, target + torch.triu(target.roll(1, 1), 1))
    with pytest.raises(ValueError, match="eps must be finite and at least 0"):
        Renormalisation.create(mean, target, eps=-1.0)
    for shape in ((5, 2), (3,)):
        with pytest.raises(ValueError, match=r"Renormalisation needs particles of shape \(\*batch, n, 3\)"):
            Renormalisation.create(mean, target)(torch.zeros(shape, dtype=F64))
    with pytest.raises(ValueError, match=r"Renormalisation\.gaussian needs a law in 3 dimensions"):
        Renormalisation.create(mean, target).gaussian(Gaussian.create(torch.zeros(2), torch.ones(2)))
    with pytest.raises(ValueError, match="trace must be positive"):
        TraceRenormalisation.create(0.0)
    with pytest.raises(ValueError, match="not a single point"):
        TraceRenormalisation.create(1.0)(torch.ones(4, 2))
    with pytest.raises(ValueError, match="particles of shape"):
        TraceRenormalisation.create(1.0)(torch.ones(4))
