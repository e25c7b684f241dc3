"""Contractions as modules: the maps by PyTorch's own formulas, gradients of their Lagrangians, parameters in their domain."""

import math

import pytest
import torch
import torch.nn.functional as F
from tests.rows import every_row

from massieu import nn

X = torch.randn(3, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
CASES = {
    "Spin": (nn.Spin(), torch.tanh),
    "Scalar": (nn.Scalar(0.7), lambda x: 0.7 * x),
    "SphereProjection": (nn.SphereProjection(2.0), lambda x: 2 * x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()),
    "RMSNorm": (nn.RMSNorm(1.5), lambda x: 1.5 * F.rms_norm(x, (6,), eps=1e-6)),
    "LayerNorm": (nn.LayerNorm(6, 0.8), lambda x: 0.8 * F.layer_norm(x, (6,), eps=1e-5)),
    # The mean on a sphere in three dimensions is coth κ − 1/κ.
    "SoftSphere": (
        nn.SoftSphere(1.0),
        lambda x: F.normalize(x, dim=-1) * (1 / torch.tanh(x.norm(dim=-1)) - 1 / x.norm(dim=-1)).unsqueeze(-1),
    ),
}


@every_row("name", CASES)
def test_maps(name):
    module, form = CASES[name]
    x = X[..., :3] if name == "SoftSphere" else X
    torch.testing.assert_close(module.double()(x), form(x), rtol=1e-6, atol=1e-7)


@every_row("name", CASES)
def test_a_map_is_the_gradient_of_its_lagrangian_and_its_parameters_train(name):
    module = CASES[name][0].double()
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(module.log_partition(x).sum(), x)
    torch.testing.assert_close(gradient, module(X), rtol=1e-10, atol=1e-10)
    names, parameters = zip(*module.named_parameters(), strict=True) if name != "Spin" else ((), ())
    assert torch.autograd.gradcheck(
        lambda x, *p: torch.func.functional_call(module, dict(zip(names, p, strict=True)), (x,)),
        (x[0, :2], *parameters),
    )


def test_half_precision_comes_back_as_it_was():
    module = nn.LayerNorm(6)
    found = module(X.bfloat16())
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), F.layer_norm(X, (6,)), rtol=0.02, atol=0.02)


@every_row("make", [nn.Scalar, nn.RMSNorm, nn.SoftSphere, nn.SphereProjection, lambda g: nn.LayerNorm(6, g)])
@every_row("size", [0.0, -1.0, math.inf, "1"])
def test_numbers_must_be_positive(make, size):
    with pytest.raises(ValueError, match=f"must be a positive number, got {size!r}"):
        make(size)


def test_whitening_is_fitted_saved_and_refuses():
    cloud = (
        torch.randn(400, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) @ X[0, :1].mT * X[0, :1]
    )
    cloud = cloud + torch.randn(400, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    module = nn.Whitening(6).double()
    torch.testing.assert_close(module(cloud), cloud, rtol=0, atol=1e-14)  # not fitted: the identity
    white = module.fit(cloud)(cloud)
    torch.testing.assert_close(white.mean(0), torch.zeros(6, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cov(white.T, correction=0), torch.eye(6, dtype=torch.float64), rtol=0, atol=1e-10)
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(module.log_partition(x).sum(), x)
    torch.testing.assert_close(gradient, module(X), rtol=1e-10, atol=1e-10)
    assert module(X.bfloat16()).dtype == torch.bfloat16
    other = nn.Whitening(6).double()
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(X), module(X))
    with pytest.raises(ValueError, match=r"points must have shape \(N, 6\), got \(400, 5\)"):
        module.fit(cloud[:, :5])
    with pytest.raises(ValueError, match="positive definite covariance"):
        module.fit(cloud[:4])
