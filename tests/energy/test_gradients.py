"""The symmetry of Jacobians, against finite differences, a curl in closed form and line integrals."""

import pytest
import torch
import torch.nn.functional as F
from tests.support.rows import every_row

from massieu.energy.fenchel_young import SparseAtoms
from massieu.energy.gradients import is_conservative, jacobian_asymmetry

KEYS = torch.randn(9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
STATES = 0.7 * torch.randn(20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
RATIOS = {"softplus": F.softplus, "sigmoid": torch.sigmoid, "1 + z²": lambda z: 1 + z.square()}


def ratio(g):
    def attend(query):
        weights = g(query @ KEYS.T)
        return weights @ KEYS / weights.sum(-1, keepdim=True)

    return attend


def loop_integral(function, points=2000):
    """∮ f·dx along an ellipse, off the origin since some maps are even."""
    angle = torch.linspace(0, 2 * torch.pi, points + 1, dtype=torch.float64)[:-1]
    circle, tangent = (
        torch.stack([f * a, 0.6 * g * a, 0.3 * g * a], -1)
        for f, g, a in ((angle.cos(), angle.sin(), 1.0), (-angle.sin(), angle.cos(), 1.0))
    )
    # The trapezoidal rule converges geometrically on a smooth closed curve.
    return (function(circle + 0.3) * tangent).sum().item() * 2 * torch.pi / points


@every_row("name", RATIOS)
def test_weights_normalised_by_their_sum_are_no_gradients(name):
    function = ratio(RATIOS[name])
    found = jacobian_asymmetry(function, STATES)
    step = 1e-5
    columns = [
        (function(STATES + step * unit) - function(STATES - step * unit)) / (2 * step)
        for unit in torch.eye(3, dtype=torch.float64)
    ]
    jacobian = torch.stack(columns, -1)
    expected = (jacobian - jacobian.mT).norm(dim=(-2, -1)) / jacobian.norm(dim=(-2, -1))
    assert torch.allclose(found, expected, atol=1e-8)
    assert found.max() > 1e-3 and not is_conservative(function, STATES).any()
    assert abs(loop_integral(function)) > 1e-4


@every_row("alpha", [1.0, 1.5, 2.0])
def test_entmax_attention_is_a_gradient(alpha):
    function = SparseAtoms.create(KEYS, alpha).mean
    assert is_conservative(function, STATES).all()
    assert abs(loop_integral(function)) < (1e-13 if alpha == 1 else 1e-5)  # kinks slow the rule down


def test_exponentials_and_elementwise_weights_are_gradients():
    assert jacobian_asymmetry(ratio(torch.exp), STATES).max() < 1e-15
    for g in RATIOS.values():
        assert is_conservative(lambda q, g=g: g(q @ KEYS.T) @ KEYS, STATES).all()


def test_known_matrices_and_precision():
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
    assert jacobian_asymmetry(lambda x: x @ turn.T, torch.zeros(2)).item() == pytest.approx(2)
    assert jacobian_asymmetry(lambda x: 0 * x, torch.zeros(4, 2)).tolist() == [0] * 4
    assert jacobian_asymmetry(lambda x: x, torch.zeros(2, dtype=torch.bfloat16)).dtype == torch.float32
    assert is_conservative(lambda x: x @ torch.tensor([[1.0, 0.1], [0.0, 1.0]]), torch.zeros(2), tolerance=0.2)
    assert jacobian_asymmetry(lambda x: x.square(), torch.ones(5, 4, 1)).shape == (5, 4)


@every_row(
    ("call", "error", "message"),
    [
        (lambda: jacobian_asymmetry(lambda x: x.sum(-1), torch.zeros(3)), ValueError, r"shape \(3,\), got \(\)"),
        (lambda: jacobian_asymmetry(lambda x: x, torch.tensor(1.0)), ValueError, "at least one dimension"),
        (lambda: jacobian_asymmetry(lambda x: x, torch.tensor([1])), TypeError, "got a tensor of torch.int64"),
        (lambda: is_conservative(lambda x: x, torch.zeros(2), tolerance=-1.0), ValueError, "at least 0, got -1.0"),
    ],
)
def test_bad_input_is_one_clear_sentence(call, error, message):
    with pytest.raises(error, match=message):
        call()
