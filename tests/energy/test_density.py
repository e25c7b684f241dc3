"""The Hopfield density: quadrature, SciPy's Gaussians, autograd of the log-density, moments of samples."""

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import multivariate_normal
from tests.energy.cases import F64, draw, hopfield_energy
from tests.support.derivatives import check_derivatives
from torch import Tensor

from massieu import measures
from massieu.energy import HopfieldDensity, HopfieldEnergy, activations

SCALE = 1.7


def memory(*batch: int, count: int = 5, width: int = 3) -> tuple[HopfieldEnergy, Tensor, Tensor]:
    patterns, log_weight = draw(*batch, count, width), draw(*batch, count, seed=2)
    log_weight[..., 1] = -torch.inf
    return HopfieldEnergy.create(measures.Atoms.create(patterns, log_weight), scale=SCALE), patterns, log_weight


@pytest.mark.medium
def test_the_normaliser_by_quadrature():
    energy, patterns, log_weight = memory(width=2)
    arguments = (patterns.numpy(), log_weight.numpy())

    # The trapezoidal rule is exact to rounding for a mixture of Gaussians of width 0.77 at steps of 0.5.
    ticks = np.arange(-8, 8.01, 0.5)
    values = [hopfield_energy(arguments[0], np.array([x, y]), SCALE, arguments[1]) for x in ticks for y in ticks]
    expected = logsumexp(-SCALE * np.array(values)) + 2 * np.log(0.5)
    np.testing.assert_allclose(HopfieldDensity.create(energy).log_normaliser, expected, rtol=1e-11)


def test_density_is_the_mixture_of_gaussians():
    energy, patterns, log_weight = memory()
    points = draw(20, 3, seed=3)
    weights = log_weight.numpy() + 0.5 * SCALE * np.square(patterns.numpy()).sum(-1)
    weights = weights - logsumexp(weights)
    np.testing.assert_allclose(HopfieldDensity.create(energy).log_pattern_weights, weights, rtol=1e-12)
    each = [
        w + multivariate_normal(x.numpy(), np.eye(3) / SCALE).logpdf(points.numpy())
        for w, x in zip(weights, patterns, strict=True)
    ]
    expected = logsumexp(each, 0)
    np.testing.assert_allclose(HopfieldDensity.create(energy).log_prob(points), expected, rtol=1e-11)
    found = HopfieldDensity.create(energy).measure().log_prob(torch.zeros(3, dtype=F64), points)
    np.testing.assert_allclose(found, expected, rtol=1e-11)
    shares = np.exp(each - expected)
    np.testing.assert_allclose(HopfieldDensity.create(energy).responsibilities(points), shares.T, atol=1e-13)


def test_without_beta_in_the_exponent_it_is_no_mixture_of_those_gaussians():
    energy, patterns, log_weight = memory(width=2)
    grid = torch.cartesian_prod(*[torch.linspace(-7, 7, 141, dtype=F64)] * 2)
    cell = (14 / 140) ** 2
    matched = torch.log_softmax(-SCALE * energy(grid), 0) - np.log(cell)
    bare = torch.log_softmax(-energy(grid), 0) - np.log(cell)
    mixture = HopfieldDensity.create(energy).measure().log_prob(torch.zeros(2, dtype=F64), grid)
    near = mixture > -10
    assert (matched - mixture)[near].abs().max() < 1e-6
    assert (bare - mixture)[near].abs().max() > 0.1


def test_score_and_tweedie():
    energy, patterns, log_weight = memory()
    points = draw(20, 3, seed=3).requires_grad_()
    each = torch.stack(
        [
            w + SCALE * 0.5 * x.square().sum() - 0.5 * SCALE * (points - x).square().sum(-1)
            for w, x in zip(log_weight, patterns, strict=True)
        ]
    )
    (slope,) = torch.autograd.grad(torch.logsumexp(each, 0).sum(), points)
    torch.testing.assert_close(HopfieldDensity.create(energy).score(points.detach()), slope, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(HopfieldDensity.create(energy).denoise(points.detach()), points.detach() + slope / SCALE)


def test_denoising_is_the_best_guess_of_the_pattern():
    """The mean square error of any other guess is larger: the posterior mean's error is orthogonal to functions of the data."""
    energy, patterns, _ = memory()
    generator = torch.Generator().manual_seed(0)
    weights = HopfieldDensity.create(energy).log_pattern_weights.exp()
    clean = patterns[torch.multinomial(weights, 40_000, replacement=True, generator=generator)]
    noisy = clean + torch.randn(clean.shape, generator=generator, dtype=F64) / SCALE**0.5
    error = clean - HopfieldDensity.create(energy).denoise(noisy)
    for test in (noisy, noisy.tanh(), torch.ones_like(noisy)):
        product = (error * test).sum(-1)
        assert abs(float(product.mean() / (product.std() / len(product) ** 0.5))) < 5


def test_samples_have_the_mixtures_moments():
    energy, patterns, _ = memory(2)
    drawn = (
        HopfieldDensity.create(energy).sample((200, 100), generator=torch.Generator().manual_seed(0)).reshape(-1, 2, 3)
    )
    weights = HopfieldDensity.create(energy).log_pattern_weights.exp().unsqueeze(-1)
    mean = (weights * patterns).sum(-2)
    second = (weights * patterns.square()).sum(-2) + 1 / SCALE
    for value, expected in ((drawn, mean), (drawn.square(), second)):
        error = value.std(0) / len(drawn) ** 0.5
        assert ((value.mean(0) - expected).abs() <= 5 * error).all()


def test_the_likelihoods_gradient_in_the_patterns():
    """∇_X L = −β·mean[softmax(βXξ) ξᵀ] + β·diag(softmax(½β‖x_n‖²))·X, rows as patterns (B7)."""
    patterns, data = draw(5, 3).requires_grad_(), draw(40, 3, seed=4)
    loss = -HopfieldDensity.create(HopfieldEnergy.create(patterns, scale=SCALE)).log_prob(data).mean()
    (slope,) = torch.autograd.grad(loss, patterns)
    x, xi = patterns.detach().numpy(), data.numpy()
    scores = SCALE * xi @ x.T
    share = np.exp(scores - logsumexp(scores, -1, keepdims=True))
    prior = 0.5 * SCALE * np.square(x).sum(-1)
    prior = np.exp(prior - logsumexp(prior))
    np.testing.assert_allclose(slope, SCALE * (prior[:, None] * x - share.T @ xi / 40), atol=1e-13)


@pytest.mark.medium
def test_likelihood_in_patterns_weights_and_scale():
    def loss(patterns: Tensor, log_weight: Tensor, scale: Tensor, data: Tensor) -> Tensor:
        memory = HopfieldEnergy.create(measures.Atoms.create(patterns, log_weight), scale=scale)
        return -HopfieldDensity.create(memory).log_prob(data)

    inputs = (draw(3, 2), draw(3, seed=1), torch.tensor(1.3, dtype=F64), draw(2, 2, seed=2))
    check_derivatives(loss, inputs)


def test_maximum_likelihood_finds_the_patterns():
    """Data from two memories: the learned density is as good as the true one, to what 2000 samples tell."""
    truth = HopfieldEnergy.create(torch.tensor([[2.0, 0.0], [-1.0, 1.5], [0.0, -2.0]], dtype=F64), scale=4.0)
    data = HopfieldDensity.create(truth).sample((2000,), generator=torch.Generator().manual_seed(0))
    patterns = (0.5 * draw(3, 2, seed=1)).requires_grad_()
    optimiser = torch.optim.LBFGS([patterns], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = -HopfieldDensity.create(HopfieldEnergy.create(patterns, scale=4.0)).log_prob(data).mean()
        loss.backward()
        return loss

    optimiser.step(closure)
    learned = -HopfieldDensity.create(HopfieldEnergy.create(patterns.detach(), scale=4.0)).log_prob(data)
    true = -HopfieldDensity.create(truth).log_prob(data)
    assert learned.mean() < true.mean() + 1e-9
    # 6 parameters: twice the likelihood ratio is about χ² of 6 degrees of freedom; beyond 40 with probability 5e-7.
    assert 2 * len(data) * (true.mean() - learned.mean()) < 40


def test_batches_are_separate():
    energy, patterns, log_weight = memory(2)
    points = draw(2, 7, 3, seed=3)
    for item in range(2):
        alone = HopfieldEnergy.create(measures.Atoms.create(patterns[item], log_weight[item]), scale=SCALE)
        both, one = HopfieldDensity.create(energy), HopfieldDensity.create(alone)
        for method in ("log_prob", "responsibilities", "score"):
            torch.testing.assert_close(getattr(both, method)(points)[item], getattr(one, method)(points[item]))
        torch.testing.assert_close(both.log_normaliser[item], one.log_normaliser)


def test_what_has_no_density_is_refused():
    masked = measures.Atoms.create(draw(2, 3, 4), torch.tensor([[True] * 3, [False] * 3]))
    with pytest.raises(ValueError, match="masked altogether"):
        HopfieldDensity.create(HopfieldEnergy.create(masked))
    with pytest.raises(TypeError, match="identity"):
        HopfieldDensity.create(HopfieldEnergy.create(draw(3, 4), reference=activations.Tanh.create()))
    with pytest.raises(TypeError, match="Spin"):
        HopfieldDensity.create(HopfieldEnergy.create(measures.Spin.create(dim=3)))
