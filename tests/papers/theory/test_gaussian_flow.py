"""The flow of a Gaussian law."""

import math

import numpy as np
import pytest
import scipy.integrate
import torch
from tests.population.cases import covariance, draw, law
from tests.support.rows import every_row, some_slow
from torch.nn.functional import pad

from massieu.errors import ConvergenceError
from massieu.measures import Atoms, Gaussian
from massieu.papers.theory import BlowUpError, gaussian_flow

ONE = torch.eye(1).double()


@pytest.mark.medium
def test_one_dimension_has_a_closed_form():
    """ċ = 2c², ṁ = (1 + c)m."""
    start = Gaussian.create(torch.ones(1).double(), 0.5 * ONE)
    result = gaussian_flow(start, value=ONE, score=ONE, time=0.9)
    assert covariance(result).item() == pytest.approx(0.5 / (1 - 0.9), rel=1e-8)
    assert result.location.item() == pytest.approx(math.exp(0.9) / math.sqrt(1 - 0.9), rel=1e-8)
    falling = gaussian_flow(start, value=ONE, score=-ONE, time=5.0)
    assert covariance(falling).item() == pytest.approx(0.5 / (1 + 5.0), rel=1e-8)


@every_row("heads", [1, 2])
@every_row("rank", [1, 3])
def test_any_weights_by_another_solver(heads, rank):
    value, score, start = 0.5 * draw(heads, 3, 3, seed=1), 0.5 * draw(heads, 3, 3, seed=2), law(3, rank=rank)

    def slope(_, state):
        mean, spread = state[:3], state[3:].reshape(3, 3)
        matrix = sum(v.numpy() @ spread @ b.numpy().T for v, b in zip(value, score, strict=True))
        return np.concatenate(
            [value.sum(0).numpy() @ mean + matrix @ mean, (matrix @ spread + spread @ matrix.T).ravel()]
        )

    at_first = np.concatenate([start.location, covariance(start).ravel()])
    expected = scipy.integrate.solve_ivp(slope, (0, 0.25), at_first, rtol=1e-11, atol=1e-12, method="DOP853").y[:, -1]
    result = gaussian_flow(
        start, value=value if heads > 1 else value[0], score=score if heads > 1 else score[0], time=0.25
    )
    np.testing.assert_allclose(result.location, expected[:3], rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(covariance(result), expected[3:].reshape(3, 3), rtol=1e-8, atol=1e-9)
    assert result.factor.shape == (3, rank)
    assert torch.linalg.matrix_rank(covariance(result), hermitian=True) == rank


@every_row("rank", [1, 3])
def test_biases_are_weights_of_a_coordinate_that_is_always_1(rank):
    """ṁ = Σ_h V_h(m + C(B_hᵀm + q_h)) + b, by another solver."""
    heads = 2
    value, score, query_bias, bias = (
        0.5 * draw(*shape, seed=seed) for seed, shape in enumerate([(heads, 3, 3), (heads, 3, 3), (heads, 3), (3,)])
    )
    start = law(3, rank=rank)

    def slope(_, state):
        mean, spread = state[:3], state[3:].reshape(3, 3)
        drift, change = bias.numpy(), np.zeros((3, 3))
        for v, b, q in zip(value.numpy(), score.numpy(), query_bias.numpy(), strict=True):
            drift = drift + v @ (mean + spread @ (b.T @ mean + q))
            change = change + v @ spread @ b.T
        return np.concatenate([drift, (change @ spread + spread @ change.T).ravel()])

    at_first = np.concatenate([start.location, covariance(start).ravel()])
    expected = scipy.integrate.solve_ivp(slope, (0, 0.25), at_first, rtol=1e-11, atol=1e-12, method="DOP853").y[:, -1]
    wide_value = torch.zeros(heads, 4, 4).double()
    wide_value[:, :3, :3] = value
    wide_value[:, :3, 3] = bias / heads
    wide_score = torch.zeros(heads, 4, 4).double()
    wide_score[:, :3, :3] = score
    wide_score[:, 3, :3] = query_bias
    wide_law = Gaussian.create(pad(start.location, (0, 1), value=1.0), factor=pad(start.factor, (0, 0, 0, 1)))
    result = gaussian_flow(wide_law, value=wide_value, score=wide_score, time=0.25)
    np.testing.assert_allclose(result.location, [*expected[:3], 1.0], rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(covariance(result)[:3, :3], expected[3:].reshape(3, 3), rtol=1e-8, atol=1e-9)
    assert (covariance(result)[3] == 0).all()


@pytest.mark.slow
def test_the_blow_up_is_said_with_its_time():
    """V = 1: C(t)⁻¹ = C⁻¹ − t(B + Bᵀ), singular at 1/λmax(C(B + Bᵀ))."""
    start, score = law(3), draw(3, 3, seed=4)
    last = torch.linalg.eigvals(covariance(start) @ (score + score.T)).real.max()
    assert last > 0
    with pytest.raises(BlowUpError, match="becomes infinite at time") as caught:
        gaussian_flow(start, value=torch.eye(3), score=score, time=3 / last.item())
    assert caught.value.time == pytest.approx(1 / last.item(), rel=1e-7)
    before = gaussian_flow(start, value=torch.eye(3), score=score, time=0.9 / last.item())
    inverse = torch.linalg.inv(covariance(start)) - 0.9 / last * (score + score.T)
    torch.testing.assert_close(covariance(before), torch.linalg.inv(inverse), rtol=1e-7, atol=1e-9)


def test_laws_of_a_batch_and_of_no_spread():
    start, value, score = law(2, batch=(3,)), draw(2, 2, seed=1), draw(2, 2, seed=2)
    result = gaussian_flow(start, value=value, score=score, time=0.2)
    for index in range(3):
        one = Gaussian.create(start.location[index], factor=start.factor[index])
        alone = gaussian_flow(one, value=value, score=score, time=0.2)
        torch.testing.assert_close(result.location[index], alone.location, rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(covariance(result)[index], covariance(alone), rtol=1e-8, atol=1e-9)
    point = Gaussian.create(draw(2), torch.zeros(()).double())
    result = gaussian_flow(point, value=value, score=score, time=0.7)
    torch.testing.assert_close(
        result.location, torch.linalg.matrix_exp(0.7 * value) @ point.location, rtol=1e-8, atol=1e-9
    )
    assert result.factor.shape == (2, 0)
    torch.testing.assert_close(gaussian_flow(start, value=value, score=score, time=0.0).location, start.location)


def test_precision():
    start = Gaussian.create(torch.ones(2, dtype=torch.float32), torch.eye(2, dtype=torch.float32))
    result = gaussian_flow(start, value=torch.eye(2), score=-torch.eye(2), time=1.0)
    assert result.location.dtype == torch.float32
    torch.testing.assert_close(covariance(result), torch.eye(2) / 3)
    half = Gaussian(start.location.bfloat16(), start.covariance.bfloat16(), start.factor.bfloat16())
    assert gaussian_flow(half, value=torch.eye(2), score=-torch.eye(2), time=1.0).location.dtype == torch.float32


@pytest.mark.medium
@some_slow("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck], 1)
def test_derivatives(check):
    inputs = [0.3 * draw(2, 2, seed=1), 0.3 * draw(2, 2, seed=2), draw(2, seed=3)]

    def after(value, score, mean):
        start = Gaussian(mean, torch.eye(2).double(), mean.new_zeros(2, 0))
        result = gaussian_flow(start, value=value, score=score, time=0.1)
        return result.location, covariance(result)

    assert check(after, [each.requires_grad_() for each in inputs], fast_mode=True)


@every_row(
    ("changes", "error", "named"),
    [
        ({"time": -1.0}, ValueError, "time must be finite and at least 0, got -1.0"),
        ({"time": math.inf}, ValueError, "finite"),
        ({"value": torch.eye(3)}, ValueError, r"\(2, 2\) or \(H, 2, 2\), got \(3, 3\) and \(2, 2\)"),
        ({"tolerance": 0.0}, ValueError, "tolerance must be positive and finite, got 0.0"),
        ({"law": Atoms.create(draw(3, 2))}, TypeError, "got Atoms"),
        ({"max_steps": 3}, ConvergenceError, "in 3 steps; allow more"),
    ],
)
def test_bad_calls(changes, error, named):
    given = {"law": law(2), "value": torch.eye(2), "score": -torch.eye(2), "time": 1.0} | changes
    with pytest.raises(error, match=named):
        gaussian_flow(given.pop("law"), **given)


@pytest.mark.slow
def test_a_wide_law_that_falls_is_no_blow_up():
    """C = 1/(1/c + 2t) in one dimension: at first it falls within 1/c, in steps far shorter than the whole time."""
    one, spread = torch.ones(1, 1).double(), 1e12
    start = Gaussian.create(torch.zeros(1).double(), spread * one)
    result = gaussian_flow(start, value=one, score=-one, time=1.0)
    assert covariance(result).item() == pytest.approx(1 / (1 / spread + 2), rel=1e-8)
    with pytest.raises(BlowUpError) as caught:
        gaussian_flow(start, value=one, score=one, time=1.0)
    assert 0 <= 0.5 / spread - caught.value.time < 1e-8
