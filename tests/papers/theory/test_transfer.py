"""Masked targets by enumeration and quadrature; the condition number by directions; what cannot be read."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, stats
from tests.support.rows import every_row
from torch import Tensor
from torch.testing import assert_close as close

from massieu.papers.theory import (
    excess_risk_bound,
    masked_gaussian_mean,
    masked_mean,
    masked_token_probabilities,
    transfer,
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def posteriors(count: int, k: int, seed: int = 1) -> Tensor:
    return torch.softmax(2 * normal(count, k, seed=seed), -1)


def test_finite_latents_by_enumeration_of_all_sequences():
    emission, prior = torch.softmax(normal(3, 4), -1), torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    joint = {}
    for sequence in itertools.product(range(4), repeat=3):
        probability = sum(prior[z] * math.prod(emission[z, x] for x in sequence) for z in range(3))
        joint[sequence] = float(probability)
    for observed in itertools.product(range(4), repeat=2):
        log_likelihood = emission.log()[:, list(observed)].sum(-1)
        result = masked_mean(emission.mT, log_likelihood, prior.log())
        mass = torch.tensor([joint[(*observed, x)] for x in range(4)], dtype=torch.float64)
        close(result, mass / mass.sum(), rtol=1e-13, atol=0)


def test_two_categories_by_quadrature():
    alpha, counts = (1.5, 0.7), (3, 1)
    density = lambda p: p ** (alpha[0] - 1 + counts[0]) * (1 - p) ** (alpha[1] - 1 + counts[1])  # noqa: E731
    mass, first = (integrate.quad(lambda p, m=m: p**m * density(p), 0, 1, epsabs=1e-12)[0] for m in (0, 1))
    result = masked_token_probabilities(torch.tensor(counts).double(), torch.tensor(alpha).double())
    close(result[0], torch.tensor(first / mass, dtype=torch.float64), rtol=1e-7, atol=0)
    close(result.sum(), torch.ones((), dtype=torch.float64))


def test_gaussian_tokens_by_quadrature():
    observed, prior_mean, weight, deviation = np.array([0.3, -1.0, 2.2]), 0.5, 2.0, 0.8
    z = np.linspace(-8, 8, 20001)
    log_density = stats.norm.logpdf(z, prior_mean, deviation / math.sqrt(weight))
    log_density = log_density + stats.norm.logpdf(observed[:, None], z, deviation).sum(0)
    density = np.exp(log_density - log_density.max())
    result = masked_gaussian_mean(
        torch.from_numpy(observed)[:, None], torch.tensor([prior_mean], dtype=torch.float64), weight
    )
    assert abs(result.item() - (z * density).sum() / density.sum()) < 1e-10
    nothing = masked_gaussian_mean(torch.zeros(0, 1).double(), torch.tensor([prior_mean]).double(), weight)
    assert nothing.item() == prior_mean


@every_row(("p", "c", "k"), [(3, 2, 4), (6, 3, 4), (2, 1, 3), (8, 8, 5)])
def test_the_probe_reads_the_optimum_and_the_condition_number_bounds_its_error(p, c, k):
    g, d = normal(p, k), normal(c, k, seed=1)
    result, s, other = transfer(g, d), posteriors(5000, k), posteriors(5000, k, seed=2)
    assert result.identifiable
    assert result.rank == k - 1
    close(result.predict(s @ g.mT), s @ d.mT, rtol=0, atol=1e-10)
    ratio = ((s - other) @ d.mT).norm(dim=-1) / ((s - other) @ g.mT).norm(dim=-1)
    assert ratio.max() <= result.condition_number * (1 + 1e-10)
    assert result.condition_number <= result.ratio_bound * (1 + 1e-12)
    # Largest ratio over tangent directions as a generalised eigenvalue, in a basis of the tangent space.
    basis = torch.from_numpy(np.linalg.svd(np.ones((1, k)))[2][1:].T)
    left, right = (torch.from_numpy((m @ basis).numpy()) for m in (d, g))
    largest = max(np.linalg.eigvals(np.linalg.solve((right.mT @ right).numpy(), (left.mT @ left).numpy())).real)
    assert result.condition_number == pytest.approx(math.sqrt(largest), rel=1e-10)


def test_trap_25_the_condition_number_lives_on_the_tangent_space():
    """Z13: constants in G and D cost nothing on the simplex, and the naive number counts them."""
    g, d = normal(3, 4), normal(2, 4, seed=1)
    shift_g, shift_d = (torch.ones(rows, 4, dtype=torch.float64) for rows in (3, 2))
    result, moved = transfer(g, d), transfer(g + 5 * shift_g, d - 3 * shift_d)
    assert moved.condition_number == pytest.approx(result.condition_number, rel=1e-12)
    close(moved.predict((g + 5 * shift_g) @ posteriors(1, 4)[0]), (d - 3 * shift_d) @ posteriors(1, 4)[0])
    full = normal(4, 4, seed=3)  # the naive one exists where G has full rank
    naive = transfer(full, d, simplex=False).condition_number
    assert naive == pytest.approx(np.linalg.norm(d.numpy() @ np.linalg.pinv(full.numpy()), 2), rel=1e-10)
    for seed in range(20):
        g, d = normal(4, 4, seed=2 * seed), normal(2, 4, seed=2 * seed + 1)
        assert transfer(g, d).condition_number <= transfer(g, d, simplex=False).condition_number * (1 + 1e-12)
    # A constant downstream target needs nothing at all.
    assert transfer(g, shift_d).condition_number < 1e-12
    assert transfer(g, shift_d, simplex=False).condition_number > 0.1


def test_what_is_not_identifiable_is_named():
    # Masked tokens that two latents emit alike cannot tell them apart.
    g = normal(5, 4)
    g[:, 3] = g[:, 2]
    d = normal(2, 4, seed=1)
    result = transfer(g, d)
    assert not result.identifiable
    assert result.condition_number == result.ratio_bound == math.inf
    assert result.rank == 2
    direction = torch.tensor([0, 0, 1, -1], dtype=torch.float64) / math.sqrt(2)
    assert result.lost.shape == (4, 1)
    close(result.lost[:, 0].abs(), direction.abs(), rtol=0, atol=1e-12)
    assert excess_risk_bound(result.condition_number, 0.0) == math.inf
    # A target that does not tell them apart either is read as before.
    d[:, 3] = d[:, 2]
    merged = transfer(g, d)
    assert merged.identifiable
    close(merged.predict(posteriors(9, 4) @ g.mT), posteriors(9, 4) @ d.mT, rtol=0, atol=1e-10)


def test_ranks_are_decided_by_the_tolerance():
    g = torch.tensor([[1.0, 0, 0], [0, 1e-4, 0]], dtype=torch.float64)
    d = torch.tensor([[0.0, 1, 0]], dtype=torch.float64)
    assert transfer(g, d).condition_number > 1e3
    assert transfer(g, d, tolerance=1e-2).condition_number == math.inf
    nothing = transfer(torch.ones(2, 3), torch.ones(1, 3))
    assert (nothing.rank, nothing.condition_number, nothing.identifiable) == (0, 0.0, True)


@pytest.mark.parametrize("least", [1e-2, 1e-4, 1e-6, 1e-8])
def test_rounding_of_an_ill_conditioned_matrix_loses_no_target_and_finds_none(least):
    """Latents 0 and 1 have one G: D is a function of Gs where they have one D, whatever the condition, and else it is not."""
    for seed in range(20):
        drawn = torch.Generator().manual_seed(seed)
        left, right = (
            torch.linalg.qr(torch.randn(9, 9, generator=drawn, dtype=torch.float64)).Q[:, :5] for _ in range(2)
        )
        g = left * torch.tensor([1.0, 0.7, 0.3, 0.1, least], dtype=torch.float64) @ right.mT
        d = torch.randn(3, 9, generator=drawn, dtype=torch.float64) @ right @ right.mT  # of latents and of G's rows
        result = transfer(g, d, simplex=False)
        assert result.identifiable and result.rank == 5
        close(result.probe @ g, d, rtol=0, atol=1e-12 / least)
        other = torch.randn(1, 9, generator=drawn, dtype=torch.float64)
        other = other - other @ right @ right.mT  # what G does not see
        moved = transfer(g, d + 1e-2 * other / other.norm(), simplex=False)
        assert not moved.identifiable and moved.condition_number == math.inf
        assert moved.lost.shape == (9, 1)
        assert (moved.lost.mT @ other.mT).abs().item() == pytest.approx(other.norm().item(), rel=1e-4)


@pytest.mark.parametrize("unit", [1e-20, 1.0, 1e20])
def test_what_is_learned_does_not_depend_on_the_unit_of_the_downstream_task(unit: float):
    """G sees three of five latents: a D of their span is learned, one with a part outside is not, in any unit."""
    g = normal(3, 5, seed=2)
    learned = normal(4, 3, seed=3) @ g
    found = transfer(g, unit * learned, simplex=False)
    expected = np.linalg.norm(learned.numpy() @ np.linalg.pinv(g.numpy()), 2)
    assert found.condition_number == pytest.approx(unit * expected, rel=1e-10)
    assert transfer(g, unit * normal(4, 5, seed=4), simplex=False).condition_number == math.inf


def test_lists_of_numbers_are_read_in_float64():
    # The second row is three times the first, in float64 to rounding; in float32 it is not.
    assert transfer([[0.1, 0.7], [0.3, 2.1]], [[1.0, 0.0]], simplex=False).rank == 1  # pyright: ignore


def test_a_simplex_is_not_always_meant():
    g, d = normal(3, 3), normal(2, 3, seed=1)
    result = transfer(g, d, simplex=False)
    z = normal(10, 3, seed=2)
    close(result.predict(z @ g.mT), z @ d.mT, rtol=0, atol=1e-10)


def test_the_downstream_risk_keeps_its_bound_where_inputs_shift():
    g, d, s = normal(4, 3), normal(2, 3, seed=1), posteriors(400, 3)
    result = transfer(g, d)
    density = torch.softmax(normal(400, seed=7), 0) * 400  # the downstream inputs' relative to these
    for seed in range(20):
        guess = s @ g.mT + 0.1 * normal(400, 4, seed=seed)
        own = (guess - s @ g.mT).square().sum(-1)
        theirs = ((result.predict(guess) - s @ d.mT).square().sum(-1) * density).mean().item()
        bound = excess_risk_bound(result.condition_number, own.mean().item(), density.max().item())
        assert theirs <= bound

    def shortfall(angle: float) -> float:
        error = torch.tensor([math.cos(angle), math.sin(angle), 0, 0], dtype=torch.float64)
        return -(result.probe @ error).norm().item()

    # Within the plane of the first two outputs an error that is as bad as can be is found by search.
    assert -optimize.minimize_scalar(shortfall, bounds=(0, math.pi)).fun <= result.condition_number * (1 + 1e-9)


@every_row(
    ("call", "message"),
    [
        (lambda: transfer(torch.ones(2, 3), torch.ones(2, 4)), r"one number of latents, got shapes \(2, 3\)"),
        (lambda: transfer(torch.ones(3), torch.ones(2, 3)), "self_supervised must have shape"),
        (lambda: transfer(torch.ones(2, 3), torch.full((1, 3), math.nan)), "downstream must be finite"),
        (
            lambda: transfer(torch.ones(2, 3), torch.ones(1, 3), tolerance=1.0),
            r"tolerance must be finite, at least 0 and below 1",
        ),
        (lambda: excess_risk_bound(-1.0, 0.1), "condition_number must be at least 0"),
        (lambda: excess_risk_bound(1.0, -0.1), "self_supervised_excess must be finite"),
        (lambda: excess_risk_bound(1.0, 0.1, 0.5), "density_ratio must be at least 1"),
        (lambda: masked_mean(torch.ones(2, 3), torch.ones(4), torch.ones(3)), "must have shapes"),
        (lambda: masked_gaussian_mean(torch.ones(4, 2), torch.ones(3), 1.0), "prior_mean must have"),
        (lambda: masked_gaussian_mean(torch.ones(4, 2), torch.ones(2), 0.0), "prior_weight must be positive"),
        (lambda: masked_token_probabilities(torch.ones(3), torch.zeros(3)), "concentration must be positive"),
        (lambda: masked_token_probabilities(torch.ones(3), torch.ones(2)), "counts must have"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
