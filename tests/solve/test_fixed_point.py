"""Fixed points against closed forms, mpmath and plain loops; statuses, messages, bad calls."""

import math
from dataclasses import replace

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.rows import every_row, one_in

from massieu.errors import ConvergenceError
from massieu.solve import Anderson, Auto, Implicit, Newton, Picard, Status, Unrolled, fixed_point

METHODS = (Auto(), Picard(), Anderson(), Newton())
DOUBLE = torch.float64


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = DOUBLE) -> torch.Tensor:
    return torch.randn(shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def affine(z, matrix, shift):
    return (matrix @ z.unsqueeze(-1)).squeeze(-1) + shift


def contraction(items: int, size: int, radius: float, symmetric: bool, seed: int) -> torch.Tensor:
    """Matrices of norm `radius`."""
    matrix = normal(items, size, size, seed=seed)
    matrix = matrix + matrix.mT if symmetric else matrix
    return radius * matrix / torch.linalg.matrix_norm(matrix, 2)[:, None, None]


def hopfield(z, memory, scale):
    return torch.softmax(scale * z @ memory.mT, -1) @ memory


# --- closed forms ----------------------------------------------------------------------------------------------------


@given(
    method=st.sampled_from(METHODS),
    size=st.integers(1, 12),
    radius=st.floats(0.0, 0.97),
    symmetric=st.booleans(),
    size_of_shift=st.sampled_from([0.0, 1e-6, 1.0, 1e6]),
    seed=st.integers(0, 1000),
)
def test_a_linear_contraction_has_the_fixed_point_of_linear_algebra(
    method, size, radius, symmetric, size_of_shift, seed
):
    matrix = contraction(5, size, radius, symmetric, seed)
    shift = size_of_shift * normal(5, size, seed=seed + 1)
    found = fixed_point(affine, torch.zeros_like(shift), (matrix, shift), method=method, max_steps=2000)
    expected = torch.linalg.solve(torch.eye(size, dtype=DOUBLE) - matrix, shift)
    residual = (affine(found.value, matrix, shift) - found.value).norm(dim=-1)
    assert found.converged.all()
    assert torch.allclose(residual, found.residual, rtol=1e-6, atol=1e-15)
    # ‖z − z*‖ ≤ ‖f(z) − z‖/(1 − L).
    error = (found.value - expected).norm(dim=-1)
    assert (error <= found.residual / (1 - radius) * (1 + 1e-6) + 1e-13 * expected.norm(dim=-1)).all()
    # A ratio of residuals, the earlier of which is above the tolerance: 1e-10 of z, which 12 roundings know to 1e-4.
    assert (torch.nan_to_num(found.lipschitz_estimate) <= radius + 1e-4).all()


@one_in(
    2,
    {
        "method": METHODS,
        "function, reference, start": [
            (torch.cos, mpmath.cos, 0.3),
            (lambda z: 2 * torch.tanh(z), lambda z: 2 * mpmath.tanh(z), 1.0),
            (lambda z: torch.exp(-z), lambda z: mpmath.exp(-z), 0.0),
            (lambda z: (z + 2 / z) / 2, lambda z: (z + 2 / z) / 2, 3.0),
        ],
    },
)
def test_scalar_maps_agree_with_mpmath(method, function, reference, start):
    found = fixed_point(function, torch.full((1,), start, dtype=DOUBLE), method=method, rtol=1e-13, atol=1e-13)
    expected = mpmath.findroot(lambda z: reference(z) - z, float(found.value))
    assert abs(float(found.value) - float(expected)) < 1e-12


@pytest.mark.medium
@one_in(
    2, {"method": METHODS, "scale, dtype": [(4.0, DOUBLE), (8.0, torch.float32), (16.0, DOUBLE), (32.0, torch.float32)]}
)
def test_hopfield_maps_converge_at_every_temperature(method, scale, dtype):
    memory, query = normal(32, 16, dtype=dtype) / 4, normal(10, 16, seed=1, dtype=dtype) / 4
    found = fixed_point(
        hopfield, query, (memory, scale), method=method, adjoint=Implicit(check_attraction=False), max_steps=1000
    )
    again = hopfield(found.value, memory, scale)
    assert found.converged.all()
    assert ((again - found.value).norm(dim=-1) <= 3e-6 * (1 + found.value.norm(dim=-1))).all()


def test_automatic_iteration_is_plain_where_that_contracts_fast():
    memory, query = normal(64, 16) / 4, normal(20, 16, seed=1) / 4
    plain, chosen = (fixed_point(hopfield, query, (memory, 64.0), method=method) for method in (Picard(), Auto()))
    assert chosen.evaluations.sum() <= 1.2 * plain.evaluations.sum()
    assert torch.allclose(chosen.value, plain.value, atol=1e-9)


@pytest.mark.medium
def test_automatic_iteration_is_accelerated_where_contraction_is_slow():
    matrix, shift = contraction(2, 10, 0.98, True, 3), normal(2, 10, seed=4)
    plain, chosen = (
        fixed_point(affine, shift, (matrix, shift), method=method, max_steps=3000) for method in (Picard(), Auto())
    )
    assert (chosen.evaluations * 10 < plain.evaluations).all()


# --- damping, items, precision ---------------------------------------------------------------------------------------


@every_row("method", METHODS)
def test_damping_changes_the_way_and_not_the_end(method):
    shift = torch.tensor([[1.0, -3.0]], dtype=DOUBLE)
    # z ↦ −1.5z + s expands; its fixed point s/2.5 attracts z + γ(f(z) − z) for γ < 0.8.
    found = fixed_point(lambda z, s: s - 1.5 * z, shift, (shift,), method=replace(method, damping=0.4), max_steps=100)
    assert torch.allclose(found.value, shift / 2.5, atol=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_an_items_result_does_not_depend_on_its_mates(method):
    memory, query = normal(12, 6) / 6**0.5, normal(7, 6, seed=1)
    together = fixed_point(hopfield, query, (memory, 6.0), method=method, throw=False)
    for place in range(7):
        alone = fixed_point(hopfield, query[place], (memory, 6.0), method=method, throw=False)
        assert alone.steps == together.steps[place]
        assert alone.evaluations == together.evaluations[place]
        assert torch.allclose(alone.value, together.value[place], rtol=0, atol=1e-12)


def test_a_mate_that_is_not_finite_changes_nothing():
    start = torch.tensor([[1.0, 2.0], [torch.nan, 1.0], [-0.5, 0.1]], dtype=DOUBLE)
    for method in METHODS:
        found = fixed_point(lambda z: 0.5 * torch.cos(z), start, method=method, throw=False)
        assert found.status.tolist() == [Status.CONVERGED, Status.NOT_FINITE, Status.CONVERGED]
        assert torch.allclose(found.value[0], found.value[2], atol=1e-9)


@every_row("method", METHODS)
def test_the_number_of_dimensions_of_an_item(method):
    weight = 0.2 * normal(6, 6) / 6**0.5
    start, shift = torch.zeros(2, 3, 2, 3, dtype=DOUBLE), normal(2, 3, 2, 3, seed=1)

    def together(z, shift):
        return (z.flatten(-2) @ weight).unflatten(-1, (2, 3)) + shift

    found = fixed_point(together, start, (shift,), item_dims=2, method=method)
    assert found.status.shape == found.residual.shape == (2, 3)
    expected = torch.linalg.solve(torch.eye(6, dtype=DOUBLE) - weight, shift.flatten(-2), left=False)
    assert torch.allclose(found.value.flatten(-2), expected, atol=1e-9)
    numbers = fixed_point(torch.cos, start, item_dims=0, method=method)
    assert numbers.status.shape == start.shape
    assert torch.allclose(numbers.value, torch.full_like(start, 0.7390851332151607), atol=1e-9)
    whole = fixed_point(torch.cos, start, item_dims=4, method=method)
    assert whole.status.shape == ()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_promoted(dtype):
    memory, query = normal(12, 6).to(dtype), normal(3, 6, seed=1).to(dtype)
    found = fixed_point(hopfield, query, (memory, 2.0))
    wide = fixed_point(hopfield, query.double(), (memory.double(), 2.0))
    assert found.value.dtype == found.residual.dtype == torch.float32
    assert torch.allclose(found.value.double(), wide.value, atol=1e-4)


def test_no_items():
    found = fixed_point(torch.cos, torch.zeros(0, 3), method=Auto())
    assert found.value.shape == (0, 3)
    assert found.status.shape == (0,)


def test_parameters_may_be_any_tree():
    tree = ({"shift": torch.ones(3), "rest": [0.5, None]}, "name")
    found = fixed_point(lambda z, first, name: first["rest"][0] * z + first["shift"] * len(name), torch.zeros(3), tree)
    assert torch.allclose(found.value, torch.full((3,), 8.0))


def test_no_step_where_the_start_is_a_fixed_point():
    found = fixed_point(lambda z: z.clone(), torch.ones(2, 3), method=Picard())
    assert found.steps.tolist() == [0, 0]
    assert found.evaluations.tolist() == [1, 1]
    assert found.lipschitz_estimate.isnan().all()


# --- bounds ----------------------------------------------------------------------------------------------------------


def test_truncation_is_bounded_by_the_residual():
    memory, query = 0.5 * normal(20, 8) / 8**0.5, normal(10, 8, seed=1)
    # L ≤ αβD²/4, with D the diameter of the memories.
    lipschitz = 0.5 * 2.0 * float(torch.cdist(memory, memory).max()) ** 2 / 4
    assert lipschitz < 1

    def forced(z):
        return 0.5 * query + 0.5 * hopfield(z, memory, 2.0)

    exact = fixed_point(forced, query, rtol=1e-14, atol=1e-14, max_steps=500, method=Picard()).value
    for moves in (1, 2, 4, 8):
        early = fixed_point(forced, query, method=Picard(), max_steps=moves, rtol=0.0, atol=0.0, throw=False)
        assert (early.steps == moves).all()
        assert (early.lipschitz_estimate <= lipschitz).all()
        error = (early.value - exact).norm(dim=-1)
        assert (error <= early.residual / (1 - lipschitz)).all()
        assert ((forced(early.value) - exact).norm(dim=-1) <= early.residual * lipschitz / (1 - lipschitz)).all()
        assert torch.allclose(early.error_bound, early.residual / (1 - early.lipschitz_estimate))


def test_no_bound_without_contraction():
    found = fixed_point(lambda z: 2 * z + 1, torch.ones(1, 2), method=Picard(), max_steps=3, throw=False)
    assert found.status == Status.MAX_STEPS
    assert found.error_bound == math.inf


# --- failures --------------------------------------------------------------------------------------------------------


@every_row(
    ("function", "start", "status", "said"),
    [
        (
            lambda z: 0.999 * z + 1,
            0.0,
            Status.MAX_STEPS,
            r"ran out of its 20 steps after 20 moves, residual .*; try more max_steps",
        ),
        (
            lambda z: 3 * z + 1,
            0.0,
            Status.DIVERGED,
            r"diverged after .* residual .* Lipschitz constant about 3; try Auto\(damping=0.5\)",
        ),
        (torch.log, 0.5, Status.NOT_FINITE, r"met a value that is not finite"),
    ],
)
def test_what_is_said_where_there_is_no_fixed_point(function, start, status, said):
    start = torch.full((2, 3), start, dtype=DOUBLE)
    found = fixed_point(function, start, method=Picard(), max_steps=20, throw=False)
    assert found.status.tolist() == [status, status]
    residual = (function(found.value) - found.value).norm(dim=-1)
    assert torch.allclose(found.residual, residual, equal_nan=True)
    with pytest.raises(ConvergenceError, match=rf"no fixed point for 2 of 2 items: item \(0,\) {said}"):
        fixed_point(function, start, method=Picard(), max_steps=20)


def test_a_saddle_is_refused():
    memory = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=DOUBLE)
    # Between two memories, β > 1: J = β Cov = β diag(1, 0).
    starts = torch.tensor([[0.0, 0.0], [0.9, 0.0]], dtype=DOUBLE)
    for method in METHODS:
        found = fixed_point(
            hopfield, starts, (memory, 8.0), method=method, adjoint=Implicit(check_attraction=True), throw=False
        )
        assert found.status.tolist() == [Status.NOT_ATTRACTING, Status.CONVERGED]
        weaker = fixed_point(
            hopfield, starts, (memory, 0.9), method=method, adjoint=Implicit(check_attraction=True), max_steps=500
        )
        assert weaker.converged.all()
    with pytest.raises(ConvergenceError, match=r"item \(0,\) came to a saddle.*try another start"):
        fixed_point(hopfield, starts, (memory, 8.0), adjoint=Implicit(check_attraction=True))
    assert fixed_point(hopfield, starts, (memory, 8.0)).converged.all()


@every_row(
    ("changed", "error", "said"),
    [
        ({"start": torch.zeros(2, dtype=torch.int64)}, TypeError, "start must be a floating-point tensor"),
        ({"start": [0.0]}, TypeError, "start must be .* got list"),
        ({"parameters": torch.ones(2)}, TypeError, "parameters must be a tuple"),
        ({"method": "picard"}, TypeError, r"such as Auto\(\), Picard\(\), .* Newton\(\), got 'picard'"),
        ({"adjoint": "implicit"}, TypeError, r"Implicit\(\), OneStep\(\) or Unrolled\(\), got 'implicit'"),
        ({"adjoint": Unrolled()}, ValueError, r"needs method=Picard\(\)"),
        ({"adjoint": Implicit(lost="zero")}, ValueError, "needs throw=False"),
        ({"item_dims": 2}, ValueError, "item_dims must be a whole number, at least 0 and at most 1, got 2"),
        ({"max_steps": -1}, ValueError, "max_steps must be a whole number, at least 0, got -1"),
        ({"max_steps": 1.5}, TypeError, "max_steps must be a whole number, got 1.5"),
        ({"rtol": -1.0}, ValueError, "rtol must be finite and at least 0, got -1"),
        ({"atol": math.nan}, ValueError, "atol must be finite and at least 0, got nan"),
        ({"function": lambda z: z.sum()}, ValueError, r"shape and dtype, \(2,\) and torch.float32, got \(\) and"),
        ({"function": lambda z: (z, z)}, TypeError, "must return a tensor .* got tuple"),
        ({"function": lambda z: z.double()}, ValueError, "torch.float32, got .* torch.float64"),
    ],
)
def test_bad_calls_say_what_is_needed(changed, error, said):
    arguments = {"function": torch.cos, "start": torch.zeros(2)} | changed
    with pytest.raises(error, match=said):
        fixed_point(arguments.pop("function"), arguments.pop("start"), **arguments)


def test_unknown_keywords_raise():
    with pytest.raises(TypeError):
        fixed_point(torch.cos, torch.zeros(2), tolerance=1e-3)  # pyright: ignore[reportCallIssue]


def test_methods_take_their_own_settings():
    matrix, shift = contraction(2, 30, 0.98, False, 0), normal(2, 30, seed=1)
    counts = [
        fixed_point(affine, shift, (matrix, shift), method=method, max_steps=2000).evaluations.sum()
        for method in (Anderson(memory=2), Anderson(memory=20), Auto(memory=20, fast=1.0))
    ]
    assert counts[1] < counts[0]
    # Nothing is slower than 1: it stays plain.
    assert counts[2] > counts[1]
