"""What the experiments hold their models against: the truth of each task by another route."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from massieu.papers.experiments import denoiser, input_size, length_free, precision, sink, sufficiency, temperature
from massieu.papers.experiments.run import run
from massieu.papers.experiments.study import experiments
from massieu.posteriors import GaussianMean


def test_the_precision_is_the_best_score_and_the_best_scale_beats_its_neighbours():
    task = precision._Task(torch.Generator().manual_seed(0), 1024)
    scale, exact = task.best_scale(), task.precision
    torch.testing.assert_close(exact @ task.covariance, torch.eye(precision.SIZE, dtype=torch.float64))
    # One sample for all: the risk at the best scale is below that at scales 10 % off, and at a turned matrix.
    rotation = torch.linalg.matrix_exp(torch.block_diag(*[torch.tensor([[0.0, 0.3], [-0.3, 0.0]]).double()] * 2))
    rotated = rotation @ exact
    matrices = torch.stack([scale * exact, 0.9 * scale * exact, 1.1 * scale * exact, scale * rotated])
    risks = task.risk(matrices)
    assert int(risks.argmin()) == 0
    batch = task.batch(2)
    assert (torch.linalg.solve(task.root, batch.queries.mT).norm(dim=-2) - 1).abs().max() < 1e-9


@pytest.mark.medium
def test_the_best_denoiser_is_a_regression_and_no_multiple_of_the_best_matrix_has_less_risk():
    task = denoiser._Task(torch.Generator().manual_seed(0), 1024)
    batch = task.batch(200, clean=True)
    queries, targets = batch.queries.flatten(0, 2).numpy(), batch.tokens.flatten(0, 2).numpy()
    fitted, *_ = np.linalg.lstsq(queries, targets, rcond=None)
    assert np.abs(fitted.T - task.best.numpy()).max() < 5 / math.sqrt(len(queries))
    for clean in (True, False):
        context = task.batch(20, clean=clean).context
        noise = torch.zeros(4) if clean else torch.full((4,), denoiser.NOISE**2)
        expected = (task.covariance + noise.double().diag()).numpy()
        assert np.abs(np.cov(context.flatten(0, 2).mT) - expected).max() < 0.1
        # Attention over many tokens returns their covariance times M x (X1): with this M it is the best output.
        best = torch.linalg.inv(torch.from_numpy(expected)) @ task.best
        assert task.excess_risk(best, best, clean) == 0
        assert task.excess_risk(0.7 * best, best, clean) > 0.01
        assert task.excess_risk(1.3 * best, best, clean) > 0.01
        assert task.excess_risk(best.new_zeros(4, 4), best, clean) > 0.2


def test_golden_section_finds_what_scipy_finds():
    import scipy.optimize

    drawn = torch.Generator().manual_seed(1)
    batches = [temperature._batch(32, 8, drawn) for _ in range(3)]
    expected: Any = scipy.optimize.minimize_scalar(
        lambda s: float(temperature._risk(batches, s)), bounds=(0, 1), method="bounded", options={"xatol": 1e-9}
    )
    assert temperature._best_scale(batches) == pytest.approx(expected.x, abs=1e-4)


def test_the_posterior_mean_is_the_posteriors_rooms_and_a_sink_of_that_weight_has_it():
    task = sink._Task(torch.Generator().manual_seed(2))
    batch = task.batch(6)
    exact = task.posterior_mean(batch)
    prior = GaussianMean.create(task.mean, strength=task.weight, variance=1.0)
    for row, length in enumerate(batch.lengths.tolist()):
        mean = prior.posterior(batch.tokens[row, :length]).mean
        torch.testing.assert_close(mean, exact[row], rtol=1e-9, atol=1e-9)
    zero = torch.zeros((), dtype=torch.float64)
    layer = sink._Layer(torch.zeros(sink.SIZE, dtype=torch.float64), zero + math.log(task.weight), task.mean, zero)
    torch.testing.assert_close(sink._with_sink(layer, batch), exact, rtol=1e-9, atol=1e-9)
    gate = sink._Layer(layer.direction, -layer.logit, task.mean, zero + 1)
    torch.testing.assert_close(sink._with_gate(gate, batch), exact, rtol=1e-9, atol=1e-9)
    assert task.sink_weight(layer) == pytest.approx(task.weight)


def test_a_constant_in_all_logits_moves_no_weight_that_is_read_off():
    task = sink._Task(torch.Generator().manual_seed(2))
    direction = torch.randn(sink.SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    zero = torch.zeros((), dtype=torch.float64)
    shifted = sink._Layer(direction, direction @ task.mean + math.log(task.weight), task.mean, zero)
    assert task.sink_weight(shifted) == pytest.approx(task.weight)


def test_the_function_on_the_sphere_has_the_mean_squares_that_predictions_take():
    drawn = torch.Generator().manual_seed(0)
    points = torch.nn.functional.normalize(torch.randn(200_000, 3, generator=drawn, dtype=torch.float64), dim=-1)
    pole = torch.tensor([0.0, 0.6, 0.8], dtype=torch.float64)
    squares = input_size.conditional_mean(points, pole).square()
    error = float(squares.std() / len(squares) ** 0.5)
    assert float(squares.mean()) == pytest.approx(float(input_size.POWER.sum()), abs=5 * error)
    cosine = points @ pole
    expected = cosine + (3 * cosine**2 - 1) / 2
    torch.testing.assert_close(input_size.conditional_mean(points, pole), expected)


def test_contexts_are_of_the_prior_and_the_exact_prediction_has_no_divergence():
    task = sufficiency._Task(torch.Generator().manual_seed(1))
    tokens, real, targets = task.batch(4000, length=8)
    share = torch.nn.functional.one_hot(tokens, sufficiency.SYMBOLS).double().mean((0, 1))
    expected = task.concentration.double() / task.concentration.sum()
    # Tokens of one context are alike: the variance of a context's share is at most p(1 − p).
    assert ((share - expected).abs() < 5 * (expected * (1 - expected) / 4000).sqrt()).all()
    assert real.all() and targets.shape == (4000, 16)

    def exact(tokens: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        counts = (torch.nn.functional.one_hot(tokens, sufficiency.SYMBOLS) * real.unsqueeze(-1)).sum(1)
        return (task.concentration.double() + counts).log()

    layer: Any = exact
    assert abs(task.divergence(layer, [task.batch(50)])) < 1e-9
    uniform: Any = lambda tokens, real: torch.zeros(len(tokens), sufficiency.SYMBOLS)  # noqa: E731
    assert task.divergence(uniform, [task.batch(50)]) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", list(experiments()))
def test_quick_runs_end_with_every_quantity_that_is_judged(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(length_free, "_REFERENCE_TOKENS", 2**14)  # No judged number needs more.
    first, complete = run(name, quick=True)
    assert complete and len(first.runs) == 1
    expected = {criterion.quantity for criterion in first.experiment.criteria}
    assert expected <= set(first.runs[5]) and all(math.isfinite(first.runs[5][quantity]) for quantity in expected)
    if name == "temperature":  # all draw and train by the same functions
        again, _ = run(name, quick=True)
        assert first.runs == again.runs, "the same seed gave other numbers"
