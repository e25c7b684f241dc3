"""Binary noise-contrastive estimation beside its published form, its asymptotic variance, and the likelihood."""

import math

import pytest
import torch
from tests.support.rows import every_row
from torch import Tensor

from massieu import ops

LOG_TWO_PI = math.log(2 * math.pi)


def normal(x: Tensor, deviation: float = 1.0) -> Tensor:
    return -0.5 * (x / deviation).square() - 0.5 * LOG_TWO_PI - math.log(deviation)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_it_is_the_published_form_with_its_gradient():
    """Posterior probabilities written out: ratios of densities, no logarithm of them."""
    data, noise = drawn(5), 2 * drawn(5, 3, seed=1)
    slope, level = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (0.7, 1.1))

    def f(x: Tensor) -> Tensor:
        return torch.exp(-slope * x.square() / 2)

    def n(x: Tensor) -> Tensor:
        return normal(x, 2.0).exp()

    posterior = [f(x) / level.exp() / (f(x) / level.exp() + 3 * n(x)) for x in (data, noise)]
    wanted = -posterior[0].log().mean() - 3 * (1 - posterior[1]).log().mean()
    logs = (-slope * data.square() / 2, n(data).log(), -slope * noise.square() / 2, n(noise).log())
    loss = ops.binary_nce(*logs, log_partition=level)
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
    # Gutmann and Hyvärinen's gradient: −mean (1 − P) g over data, plus ν mean P g over noise, for g of log f − c.
    found = torch.autograd.grad(loss, (slope, level))
    for gradient, score in zip(found, (lambda x: -x.square() / 2, lambda x: -torch.ones_like(x)), strict=True):
        explicit = -((1 - posterior[0]) * score(data)).mean() + 3 * (posterior[1] * score(noise)).mean()
        torch.testing.assert_close(gradient, explicit.detach(), rtol=1e-12, atol=1e-14)
    numbers = tuple(log.detach().requires_grad_() for log in logs)
    assert torch.autograd.gradcheck(lambda *given: ops.binary_nce(*given), numbers)
    assert torch.autograd.gradgradcheck(lambda *given: ops.binary_nce(*given), numbers)


def test_the_normaliser_of_a_gaussian_is_recovered():
    """Newton's minimiser lies within five standard errors, by quadrature of the published asymptotic variance."""
    count, ratio, deviation = 2000, 4, 2.0
    data, noise = drawn(count), deviation * drawn(count, ratio, seed=1)
    parameter = torch.tensor([0.5, 0.0], dtype=torch.float64)

    def loss(parameter: Tensor) -> Tensor:
        logs = [-parameter[0] * x.square() / 2 for x in (data, noise)]
        known = [normal(x, deviation) for x in (data, noise)]
        return ops.binary_nce(logs[0], known[0], logs[1], known[1], log_partition=parameter[1])

    for _ in range(8):
        slope, curvature = torch.func.grad(loss)(parameter), torch.func.hessian(loss)(parameter)
        parameter = parameter - torch.linalg.solve(curvature, slope)
    x = torch.linspace(-12, 12, 24001, dtype=torch.float64)
    law, other = normal(x).exp(), normal(x, deviation).exp()
    share = ratio * other / (law + ratio * other) * law * (x[1] - x[0])
    score = torch.stack([-x.square() / 2, -torch.ones_like(x)])
    information, mean = (share * score) @ score.T, (share * score).sum(-1)
    inverse = torch.linalg.inv(information)
    covariance = inverse - (1 + 1 / ratio) * torch.outer(inverse @ mean, inverse @ mean)
    error = (covariance.diagonal() / count).sqrt()
    truth = torch.tensor([1.0, 0.5 * LOG_TWO_PI], dtype=torch.float64)
    assert error[1] < 0.06  # which a wrong sign or a forgotten log ν would miss by log 4
    assert ((parameter - truth).abs() < 5 * error).all(), ((parameter - truth) / error).tolist()


def test_with_much_noise_the_gradient_is_the_likelihoods():
    """On four states, all listed: the difference falls as 1/ν."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64)
    data = torch.tensor([0, 0, 1, 2, 2, 2, 3])
    likelihood = torch.autograd.functional.jacobian(lambda a: -a.log_softmax(0)[data].mean(), logits)
    level, uniform = logits.logsumexp(0), -math.log(4)

    def gap(copies: int) -> Tensor:
        noise = torch.arange(4).repeat(len(data) * copies)  # each state as often as the uniform noise would have it

        def loss(a: Tensor) -> Tensor:
            logs = (a - level)[data], (a - level)[noise]
            return ops.binary_nce(logs[0], logs[0] * 0 + uniform, logs[1], logs[1] * 0 + uniform)

        # With its normaliser held, the gradient is that of the unnormalised likelihood, Σ p − counts.
        return (torch.func.grad(loss)(logits) - likelihood).abs().max()

    gaps = torch.stack([gap(copies) for copies in (4, 64, 1024)])
    assert gaps[-1] < 2e-3
    slopes = torch.log(gaps[1:] / gaps[:-1]) / math.log(16)
    assert ((slopes + 1).abs() < 0.1).all(), slopes.tolist()


def test_densities_of_zero():
    """log f = −∞ at noise, or log n = −∞ at a datum, adds nothing and has no gradient."""
    f = torch.tensor([0.2, -torch.inf], dtype=torch.float64, requires_grad=True)
    known = torch.zeros(2, dtype=torch.float64)
    loss = ops.binary_nce(f[:1], known[:1], f, known)
    wanted = math.log1p(2 * math.exp(-0.2)) + math.log1p(math.exp(0.2) / 2)
    assert math.isclose(loss.item(), wanted, rel_tol=1e-14)
    loss.backward()
    assert f.grad is not None and f.grad.isfinite().all() and f.grad[1] == 0
    never = ops.binary_nce(known[:1], known[:1] - torch.inf, known[:1] - torch.inf, known[:1])
    assert never == 0
    assert ops.binary_nce(known - torch.inf, known, known, known) == torch.inf
    assert ops.binary_nce(known * torch.nan, known, known, known).isnan()


@every_row("logit", [-700.0, -40.0, -1.0, 0.0, 1.0, 15.0, 40.0, 300.0])
def test_second_derivatives_keep_their_digits(logit):
    """σ(1 − σ) of a datum whose logit is far from 0: e^−|logit|/(1 + e^−|logit|)² in every term."""
    density, none = torch.tensor([logit], dtype=torch.float64, requires_grad=True), torch.zeros(1, dtype=torch.float64)
    for loss in (ops.binary_nce(density, none, none, none), ops.binary_nce(none, none, density, none)):
        (slope,) = torch.autograd.grad(loss, density, create_graph=True)
        (curvature,) = torch.autograd.grad(slope, density)
        tail = math.exp(-abs(logit))
        assert math.isclose(curvature.item(), tail / (1 + tail) ** 2, rel_tol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_half_precision_is_promoted(dtype):
    """Numbers that each dtype holds exactly, far out too: the logits are formed in float32."""
    numbers = [torch.tensor(x, dtype=dtype) for x in ([300.0, -2.5], [1.25, 0.5], [[-300.0, 1.0]], [[0.75, 2.0]])]
    found, wanted = ops.binary_nce(*numbers), ops.binary_nce(*(x.double() for x in numbers))
    assert found.dtype == torch.float32 and wanted.dtype == torch.float64
    torch.testing.assert_close(found.double(), wanted, rtol=4 * torch.finfo(torch.float32).eps, atol=0)


ONE, NONE = torch.zeros(2), torch.zeros(0)


@every_row(
    "given, words, kind",
    [
        (([0.0], ONE, ONE, ONE), "data_log_density", TypeError),
        ((ONE, ONE, ONE, ONE.long()), "noise_log_noise", TypeError),
        ((ONE, ONE[:1], ONE, ONE), "data_log_density and data_log_noise must have one shape", ValueError),
        ((ONE, ONE, ONE[:1], ONE), "noise_log_density and noise_log_noise must have one shape", ValueError),
        ((NONE, NONE, ONE, ONE), "data_log_density must have at least one number", ValueError),
        ((ONE, ONE, NONE, NONE), "noise_log_density must have at least one number", ValueError),
        ((ONE + torch.inf, ONE, ONE, ONE), "data_log_density must be below", ValueError),
        ((ONE, ONE, ONE, ONE - torch.inf), "noise_log_noise must be above", ValueError),
        ((ONE, ONE, ONE, ONE, ONE), "log_partition must be one number", ValueError),
        ((ONE, ONE, ONE, ONE, math.nan), "log_partition must be finite", ValueError),
        ((ONE, ONE, ONE, ONE, torch.tensor(torch.inf)), "log_partition must be finite", ValueError),
        ((ONE, ONE, ONE, ONE, "1"), "log_partition must be a number", TypeError),
    ],
)
def test_bad_calls(given: tuple, words: str, kind: type[Exception]):
    with pytest.raises(kind, match=words):
        ops.binary_nce(*given[:4], log_partition=given[4] if given[4:] else 0.0)
