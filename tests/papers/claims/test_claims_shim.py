"""The numbers by which the claims on exponential families measure are right themselves."""

import math

import pytest
import torch

from massieu.measures import Atoms
from massieu.papers.claims.inputs import normal_draws
from massieu.papers.claims.run import verify
from massieu.papers.claims.shim import finite_keys
from massieu.papers.claims.shim.catalogue import library

_MEAN = Atoms._mean


@pytest.mark.slow
def test_attention_with_a_bias_of_its_own_fails_s15(monkeypatch: pytest.MonkeyPatch):
    # One percent of the mean, times N = 500, is nineteen standard errors of N·bias.
    monkeypatch.setattr(Atoms, "_mean", lambda self, eta: 1.01 * _MEAN(self, eta))
    assert verify("S15", settings={"repetitions": 20_000})[0].verdict == "fails"


def test_one_key_is_its_own_output():
    # N = 1: attention returns the key, of mean μ and covariance Σ, and log Ẑ = k·η has the mean μ·η.
    exact = finite_keys._exact(1)
    torch.testing.assert_close(exact.bias, -finite_keys._SHIFT, rtol=0, atol=1e-10)
    torch.testing.assert_close(exact.covariance, finite_keys._COVARIANCE, rtol=0, atol=1e-10)
    assert math.isclose(exact.log_bias, -0.5 * finite_keys._VARIANCE, abs_tol=1e-10)


def test_the_weighted_points_have_the_known_moments():
    # Masses, means and variances of h itself, from the textbook.
    members = {member.name: member for member in library(normal_draws(0), 2)}
    moments_of_measures = {
        "exponential": lambda m: (1 / m.rate, 1 / m.rate**2),
        "gamma": lambda m: (m.shape * m.scale, m.shape * m.scale**2),
        "Laplace": lambda m: (torch.zeros(1), 2 * m.scale**2),
        "uniform": lambda m: ((m.low + m.high) / 2, (m.high - m.low) ** 2 / 12),
        "Poisson": lambda m: (m.rate, m.rate),
        "sphere": lambda m: (torch.zeros(3), m.radius**2 / 3 * torch.eye(3).double()),
        "circle": lambda m: (torch.zeros(2), m.radius**2 / 2 * torch.eye(2).double()),
        "Rademacher": lambda m: (torch.zeros(3), torch.eye(3).double()),
    }
    for name, moments in moments_of_measures.items():
        member = members[name]
        zero = torch.zeros_like(member.eta[:1])
        mean, variance = moments(member.measure)
        torch.testing.assert_close(member.log_partition(zero)[0], zero.sum(), rtol=0, atol=1e-12)
        torch.testing.assert_close(member.mean(zero)[0], mean.double(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(
            member.covariance(zero)[0].flatten(), variance.double().flatten(), rtol=1e-11, atol=1e-12
        )


def test_the_least_curvature_bounds_the_variance():
    member = library(normal_draws(1), 10)[0]
    start, end = member.eta, member.eta.flip(0)
    step = (end - start).unsqueeze(-1)
    for share in torch.linspace(0, 1, 11):
        curvature = (step.mT @ member.covariance(torch.lerp(start, end, share.double())) @ step).flatten()
        assert bool((curvature >= member.least_curvature(start, end) - 1e-12).all())


def test_three_conjugate_priors_are_compared_with_closed_forms():
    (claim,) = verify("S16", settings={"draws": 2, "observations": 2})
    checks = {check.name for check in claim.checks}
    for name in ("Bernoulli", "Poisson", "Gaussian"):
        assert {f"{name}: B and its closed form", f"{name}: ∇B and its closed form"} <= checks
