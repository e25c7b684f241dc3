"""The equilibrium theorem's items and limits against NumPy, simulation, Gauss–Hermite sums and SciPy's Bessel functions."""

import math

import numpy as np
import pytest
import torch
from scipy.special import ive
from tests.support.rows import every_row
from torch import Tensor

from massieu.energy import activations
from massieu.measures import Atoms, Gaussian
from massieu.papers.theory import (
    after_layer,
    cumulant_growth,
    entropy_gain,
    equilibrium,
    equilibrium_report,
    harmonic_growth,
    key_law,
    measured_cumulant_growth,
    sample_error,
    whitened_map,
)
from massieu.population import Renormalisation, TraceRenormalisation

F64 = torch.float64
SIGMA = torch.tensor([[1.0, 0.3, 0.0], [0.3, 0.5, -0.1], [0.0, -0.1, 2.0]], dtype=F64)
MU = torch.tensor([0.4, -1.0, 0.2], dtype=F64)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def test_the_items_in_numpy():
    sigma, mu, step = SIGMA.numpy(), MU.numpy(), 0.7
    precision = np.linalg.inv(sigma)
    hidden = equilibrium(MU, SIGMA)
    np.testing.assert_allclose(hidden.location, precision @ mu, rtol=1e-13)
    np.testing.assert_allclose(hidden.covariance, precision, rtol=1e-12)
    keys = key_law(hidden, SIGMA)
    np.testing.assert_allclose(keys.location, mu, rtol=1e-13)
    np.testing.assert_allclose(keys.covariance, sigma, rtol=0, atol=1e-14)
    after = after_layer(hidden, keys, step)
    np.testing.assert_allclose(after.location, precision @ mu + 2 * step * mu, rtol=1e-12)
    np.testing.assert_allclose(after.covariance, precision + 2 * step * np.eye(3) + step**2 * sigma, rtol=0, atol=1e-13)
    assert np.linalg.eigvalsh(after.covariance.numpy() - precision).min() > 0
    gain = np.log(np.linalg.det(np.eye(3) + step * sigma))
    assert entropy_gain(keys, step).item() == pytest.approx(gain, rel=1e-13)


def test_the_law_after_a_layer_is_that_of_its_particles():
    hidden = Gaussian.create(draw(3, seed=1), SIGMA)
    keys = key_law(hidden, torch.eye(3, dtype=F64) + 0.2 * draw(3, 3, seed=2))
    particles = hidden.sample(torch.zeros(3, dtype=F64), (50,), generator=torch.Generator().manual_seed(0))
    moved = particles + 0.3 * keys.mean(particles)
    centred = particles - particles.mean(0)
    own = Gaussian.create(particles.mean(0), centred.T @ centred / 50)
    after = after_layer(own, keys, 0.3)
    torch.testing.assert_close(after.location, moved.mean(0), rtol=0, atol=1e-12)
    torch.testing.assert_close(after.covariance, torch.cov(moved.T, correction=0), rtol=0, atol=1e-12)


def test_laws_and_derivatives_in_batches():
    sigma = torch.stack([SIGMA, torch.eye(3, dtype=F64), 2 * SIGMA])
    hidden = equilibrium(MU.expand(3, 3), sigma)
    keys = key_law(hidden, sigma)
    gain, turn = entropy_gain(keys, 0.5), whitened_map(hidden, keys, 0.5)
    for index, matrix in enumerate(sigma):
        one = equilibrium(MU, matrix)
        torch.testing.assert_close(gain[index], entropy_gain(key_law(one, matrix), 0.5))
        torch.testing.assert_close(turn[index], torch.eye(3, dtype=F64))

    def spread(factor: Tensor) -> Tensor:
        matrix = factor @ factor.mT + torch.eye(3, dtype=F64)
        law = equilibrium(MU, matrix)
        return after_layer(law, key_law(law, matrix), 0.5).covariance

    leaf = draw(3, 3, seed=3).requires_grad_()
    assert torch.autograd.gradcheck(spread, leaf)
    assert torch.autograd.gradgradcheck(spread, leaf)


def test_half_precision_is_promoted_and_mixed_precision_is_the_wider():
    hidden = equilibrium(MU.bfloat16(), torch.eye(3).bfloat16())
    keys = key_law(hidden, torch.eye(3).bfloat16())
    assert keys.covariance.dtype == torch.float32
    assert after_layer(hidden, keys, 0.5).covariance.dtype == torch.float32
    wide = Gaussian.create(MU, SIGMA)
    assert after_layer(hidden, wide, 0.5).covariance.dtype == F64
    assert whitened_map(hidden, wide, 0.5).dtype == F64


@pytest.mark.slow
def test_laws_go_through_vmap_and_compilation():
    factors = draw(2, 3, 3, seed=9)

    def spread(factor: Tensor) -> Tensor:
        matrix = factor @ factor.mT + torch.eye(3, dtype=F64)
        law = equilibrium(MU, matrix)
        after = after_layer(law, key_law(law, matrix), 0.5)
        return whitened_map(law, key_law(law, SIGMA), 0.5).sum() + entropy_gain(after, 0.3)

    expected = torch.stack([spread(factor) for factor in factors])
    torch.testing.assert_close(torch.func.vmap(spread)(factors), expected)
    compiled = torch.compile(spread, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(factors[0]), expected[0])
    hessians = torch.func.vmap(torch.func.hessian(spread))(factors)
    torch.testing.assert_close(hessians, torch.stack([torch.func.hessian(spread)(factor) for factor in factors]))


# --- trap 16: it needs the full covariance, is pointwise trivial, unstable, and is not LayerNorm ---------------------


def test_trap_16_at_the_equilibrium_no_particle_moves():
    hidden = equilibrium(MU, SIGMA)
    keys = key_law(hidden, SIGMA)
    renormalise = Renormalisation.create(hidden.location, hidden.covariance)
    particles = renormalise(draw(30, 3))
    moved = renormalise(particles + 0.8 * keys.mean(particles))
    torch.testing.assert_close(moved, particles, rtol=0, atol=1e-12)


def test_trap_16_where_covariances_do_not_commute_the_law_returns_rotated():
    hidden = Gaussian.create(draw(3, seed=1), torch.diag(torch.tensor([2.0, 0.5, 1.0], dtype=F64)))
    keys = Gaussian.create(MU, SIGMA)
    turn = whitened_map(hidden, keys, 0.5)
    torch.testing.assert_close(turn @ turn.T, torch.eye(3, dtype=F64), rtol=0, atol=1e-14)
    assert (turn - torch.eye(3, dtype=F64)).abs().max() > 0.02
    renormalise = Renormalisation.create(hidden.location, hidden.covariance)
    returned = renormalise.gaussian(after_layer(hidden, keys, 0.5))
    torch.testing.assert_close(returned.covariance, hidden.covariance, rtol=0, atol=1e-13)


def test_trap_16_with_the_trace_alone_held_rank_one_is_left():
    law = Gaussian.create(torch.zeros(3, dtype=F64), torch.tensor([1.2, 1.0, 0.8], dtype=F64))
    for _ in range(60):
        law = TraceRenormalisation.create(3.0).gaussian(after_layer(law, law, 0.5))
    expected = torch.diag(torch.tensor([3.0, 0.0, 0.0], dtype=F64))
    torch.testing.assert_close(law.covariance, expected, rtol=0, atol=1e-12)


def test_trap_16_a_norm_of_each_token_has_another_equilibrium():
    """LayerNorm puts every token at one length: N(0, 1) is gone after one layer, and whitening is not what it does."""
    cloud = draw(200, 3)
    after = activations.LayerNorm.create(eps=0.0)(2 * cloud)
    torch.testing.assert_close(after.norm(dim=-1), torch.full((200,), math.sqrt(3), dtype=F64))
    covariance = torch.cov(after.T, correction=0)
    assert torch.linalg.eigvalsh(covariance)[0] < 1e-12  # the mean of the coordinates is lost as well


@every_row("variance", [0.5, 1.0, 1.5])
@every_row("order", [3, 4, 5])
def test_trap_16_cumulants_grow(order: int, variance: float):
    """NumPy: a density φ(1 + εHe_n/n!) has A(t) = t²/2 + log(1 + εtⁿ/n!); κ_n of whitened T by a Gauss–Hermite rule."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    weights = weights / weights.sum()
    step, size = 0.5, 1e-4

    def whitened(epsilon: float) -> float:
        share = weights * (1 + epsilon * np.polynomial.hermite_e.HermiteE.basis(order)(nodes) / math.factorial(order))
        t = variance * nodes
        slope = t + epsilon * t ** (order - 1) / math.factorial(order - 1) / (
            1 + epsilon * t**order / math.factorial(order)
        )
        moved = nodes + step * slope
        moved = moved - share @ moved
        m = [share @ moved**power for power in range(6)]
        cumulant = {3: m[3], 4: m[4] - 3 * m[2] ** 2, 5: m[5] - 10 * m[3] * m[2]}[order]
        return cumulant / m[2] ** (order / 2)

    growth = (whitened(size) - whitened(-size)) / (2 * size)
    predicted = cumulant_growth(order, step, variance).item()
    assert predicted > 1
    # Even moves of ε cancel; what is left is of order ε² times moments.
    assert growth == pytest.approx(predicted, rel=1e-3)
    assert measured_cumulant_growth(order, step, variance).item() == pytest.approx(predicted, rel=1e-5)


KNOWN_GROWTH = {
    (1.0, 3): 2.0,
    (1.0, 4): 7 / 3,
    (1.0, 5): 8 / 3,
    (0.5, 3): 1.3,
    (0.5, 4): 1.2,
    (1.5, 3): 2.9286,
    (1.5, 4): 4.857,
}


@every_row("case", KNOWN_GROWTH)
def test_trap_16_the_known_growth_factors(case: tuple[float, int]):
    variance, order = case
    assert cumulant_growth(order, 0.5, variance).item() == pytest.approx(KNOWN_GROWTH[case], rel=1e-4)


@every_row("dim", [2, 3, 7])
@every_row("order", [1, 2, 5])
def test_harmonics_grow_by_bessel_functions(order: int, dim: int):
    scale, step = 1.7, 0.4
    low = dim / 2 - 1
    ratio, length = ive(low + order, scale) / ive(low, scale), ive(low + 1, scale) / ive(low, scale)
    expected = 1 + step * order * (order + dim - 2) * ratio / (scale * (1 + step * length))
    assert harmonic_growth(order, step, scale, dim).item() == pytest.approx(expected, rel=1e-12)
    assert expected > 1


def test_the_error_of_a_sample_of_keys():
    keys = Gaussian.create(MU, SIGMA)
    eta = 0.4 * draw(3, seed=4)
    count, repetitions = 2000, 500
    drawn = keys.sample(torch.zeros(3, dtype=F64), (repetitions, count), generator=torch.Generator().manual_seed(1))
    square = (Atoms.create(drawn).mean(eta.expand(repetitions, 3)) - keys.mean(eta)).square().sum(-1)
    error = square.std() / repetitions**0.5
    assert abs(square.mean() - sample_error(keys, eta, count) ** 2) < 5 * error + 0.02 * square.mean()
    sigma, q = SIGMA.numpy(), eta.numpy()
    explicit = np.exp(q @ sigma @ q) * (np.trace(sigma) + q @ sigma @ sigma @ q) / count
    assert sample_error(keys, eta, count).item() == pytest.approx(explicit**0.5, rel=1e-13)


# --- the report ------------------------------------------------------------------------------------------------------


def test_a_gaussian_cloud_whose_precision_is_the_matrix_meets_every_assumption():
    hidden = equilibrium(torch.zeros(3, dtype=F64), SIGMA)
    cloud = Renormalisation.create(hidden.location, hidden.covariance)(draw(4000, 3))
    result = equilibrium_report(cloud, SIGMA, 0.5)
    assert max(result.mismatch, result.commutator, result.displacement) < 1e-12
    assert result.skewness.abs().max() < 5
    assert result.excess_kurtosis.abs().max() < 5
    # Along an axis of Σ with eigenvalue s, b = 1 and the step is s times as long.
    s = torch.linalg.eigvalsh(SIGMA)
    torch.testing.assert_close(result.growth[:, 0], 1 + 3 * 0.5 * s / (1 + 0.5 * s), rtol=1e-10, atol=0)
    assert result.entropy_gain.item() == pytest.approx(
        math.log(np.linalg.det(np.eye(3) + 0.5 * SIGMA.numpy())), rel=1e-10
    )


def test_the_report_sees_what_is_planted():
    exponential = draw(4000, 3).exp()
    result = equilibrium_report(exponential, torch.diag(torch.tensor([1.0, 0.1, 3.0], dtype=F64)), 0.5)
    assert result.skewness.abs().min() > 5
    mixed = draw(4000, 3) @ draw(3, 3, seed=2)
    turned = equilibrium_report(mixed, torch.diag(torch.tensor([1.0, 0.1, 3.0], dtype=F64)), 0.5)
    assert turned.commutator > 0.05
    assert turned.displacement > 0.05
    sphere = activations.RMSNorm.create(eps=0.0)(draw(2, 400, 3))
    on_it = equilibrium_report(sphere, torch.eye(3, dtype=F64))
    assert on_it.norm_spread.shape == (2,)
    assert on_it.norm_spread.max() < 1e-12
    assert (on_it.excess_kurtosis < -3).all()  # bounded coordinates
    # ‖x‖² of three standard Gaussians has the median 2.366; keys are the tokens.
    plain = equilibrium_report(draw(20_000, 3), torch.eye(3, dtype=F64))
    assert plain.log_keys_needed.item() == pytest.approx(2.366, rel=0.05)


def test_bad_calls():
    hidden = equilibrium(MU, SIGMA)
    with pytest.raises(ValueError, match="positive definite"):
        equilibrium(MU, torch.zeros(3, 3, dtype=F64))
    with pytest.raises(ValueError, match=r"matrix of shape \(\*batch, d, 3\), got \(2, 2\)"):
        key_law(hidden, torch.eye(2, dtype=F64))
    with pytest.raises(ValueError, match="d = 3, got 2"):
        after_layer(hidden, Gaussian.create(torch.zeros(2), torch.ones(2)), 0.5)
    with pytest.raises(ValueError, match="order must be a whole number, at least 3"):
        cumulant_growth(2, 0.5, 1.0)
    with pytest.raises(ValueError, match="order must be a whole number, at least 3 and at most 6"):
        measured_cumulant_growth(7, 0.5, 1.0)
    with pytest.raises(ValueError, match="order must be a whole number, at least 1"):
        harmonic_growth(0, 0.5, 1.0, 3)
    with pytest.raises(ValueError, match="dim must be a whole number, at least 2"):
        harmonic_growth(1, 0.5, 1.0, 1)
    with pytest.raises(ValueError, match=r"n > d, got \(3, 3\)"):
        equilibrium_report(draw(3, 3), SIGMA)
    with pytest.raises(ValueError, match=r"matrix must have shape \(3, 3\)"):
        equilibrium_report(draw(9, 3), torch.eye(2, dtype=F64))


def test_a_layer_without_scores_commutes_with_every_cloud():
    cloud = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    report = equilibrium_report(cloud, torch.zeros(3, 3, dtype=torch.float64))
    assert report.commutator == 0 and report.displacement.item() == pytest.approx(0.0, abs=1e-12)
