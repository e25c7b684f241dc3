"""Activations as modules: the maps by PyTorch's own formulas, gradients of their Lagrangians, parameters in their domain."""

import pytest
import torch
import torch.nn.functional as F
from tests.support.derivatives import check_derivatives
from tests.support.rows import every_row

from massieu import measures
from massieu.energy import activations as maps
from massieu.nn import Activation

X = torch.randn(3, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
SIGNS = measures.Spin.create(torch.linspace(-1, 1, 6))
CASES = {
    "Tanh": (maps.Tanh.create(), torch.tanh),
    "Scalar": (maps.Scalar.create(0.7), lambda x: 0.7 * x),
    "SphereProjection": (
        maps.SphereProjection.create(2.0, eps=1e-6),
        lambda x: 2 * x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt(),
    ),
    "RMSNorm": (maps.RMSNorm.create(1.5), lambda x: 1.5 * F.rms_norm(x, (6,), eps=1e-6)),
    "LayerNorm": (maps.LayerNorm.create(0.8, torch.zeros(6)), lambda x: 0.8 * F.layer_norm(x, (6,), eps=1e-5)),
    "a measure": (SIGNS, lambda x: torch.tanh(x + torch.linspace(-1, 1, 6))),
    # The mean on a sphere in three dimensions is coth κ − 1/κ.
    "Sphere": (
        measures.Sphere.create(1.0, dim=3),
        lambda x: F.normalize(x, dim=-1) * (1 / torch.tanh(x.norm(dim=-1)) - 1 / x.norm(dim=-1)).unsqueeze(-1),
    ),
}


PARAMETERS = {
    "Tanh": [],
    "Scalar": ["log_factor"],
    "SphereProjection": ["log_radius"],
    "RMSNorm": ["log_gain"],
    "LayerNorm": ["log_gain", "bias"],
    "a measure": [],
    "Sphere": [],
}


@every_row("name", CASES)
def test_maps(name):
    activation, form = CASES[name]
    x = X[..., :3] if name == "Sphere" else X
    torch.testing.assert_close(Activation(activation).double()(x), form(x), rtol=1e-6, atol=1e-7)
    fixed = Activation(activation, trained=False)
    assert not list(fixed.parameters())
    torch.testing.assert_close(fixed.double()(x), form(x), rtol=1e-6, atol=1e-7)


@every_row("name", CASES)
def test_a_map_is_the_gradient_of_its_lagrangian_and_its_parameters_train(name):
    module = Activation(CASES[name][0]).double()
    x = (X[..., :3] if name == "Sphere" else X).clone().requires_grad_()
    (gradient,) = torch.autograd.grad(module.lagrangian(x).sum(), x)
    torch.testing.assert_close(gradient, module(x.detach()), rtol=1e-10, atol=1e-10)
    named = dict(module.named_parameters())
    assert list(named) == PARAMETERS[name]
    check_derivatives(
        lambda x, *p: torch.func.functional_call(module, dict(zip(named, p, strict=True)), (x,)),
        (x[0, :2], *named.values()),
        second=False,
    )


def test_half_precision_comes_back_as_it_was():
    module = Activation(maps.LayerNorm.create(1.0, torch.zeros(6)))
    found = module(X.bfloat16())
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), F.layer_norm(X, (6,)), rtol=0.02, atol=0.02)


def test_something_else_is_refused():
    with pytest.raises(TypeError, match="activation must be an activation or a measure, got builtin_function"):
        Activation(torch.tanh)  # pyright: ignore[reportArgumentType]


def test_a_module_shares_nothing_with_the_activation_and_stays_positive():
    gain = torch.tensor(2.0)
    activation = maps.RMSNorm.create(gain)
    module = Activation(activation)
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
    module(X.float()).square().sum().backward()
    optimiser.step()
    assert float(gain) == 2.0 and float(module.activation().gain) > 0  # pyright: ignore[reportAttributeAccessIssue]


def test_statistics_are_assigned_saved_and_refused():
    cloud = (
        torch.randn(400, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) @ X[0, :1].mT * X[0, :1]
    )
    cloud = cloud + torch.randn(400, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    module = Activation(maps.Whitening.create(torch.zeros(6).double(), torch.eye(6).double()))
    assert not list(module.parameters())
    torch.testing.assert_close(module(cloud), cloud, rtol=0, atol=1e-14)
    white = module.assign(maps.Whitening.of(cloud))(cloud)
    torch.testing.assert_close(white.mean(0), torch.zeros(6, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cov(white.T, correction=0), torch.eye(6, dtype=torch.float64), rtol=0, atol=1e-10)
    assert module(X.bfloat16()).dtype == torch.bfloat16
    other = Activation(maps.Whitening.create(torch.ones(6).double(), torch.eye(6).double()))
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(X), module(X))
    with pytest.raises(ValueError, match=r"must be a Whitening of shapes \[\(6,\).*got a Whitening of shapes \[\(5,\)"):
        module.assign(maps.Whitening.of(cloud[:, :5]))
    with pytest.raises(ValueError, match=r"must be a Whitening.*got a Tanh"):
        module.assign(maps.Tanh.create())
    norm = Activation(maps.RMSNorm.create(2.0)).assign(maps.RMSNorm.create(3.0))
    torch.testing.assert_close(norm.log_gain.detach(), torch.tensor(3.0).log())


@pytest.mark.slow
@every_row("name", ["LayerNorm", "Sphere", "Whitening"])
def test_compiled_is_eager(name):
    activation = maps.Whitening.of(X.reshape(-1, 6)[:12]) if name == "Whitening" else CASES[name][0]
    module = Activation(activation).double()
    x = X[..., :3] if name == "Sphere" else X
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x), rtol=1e-9, atol=1e-9)
