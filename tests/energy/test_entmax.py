"""α-entmax against thresholds found by bisection in many digits, quadratic programs, and finite differences."""

import math
from functools import partial
from itertools import cycle

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from tests.support.derivatives import check_derivatives
from tests.support.rows import every_row, some_slow
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from massieu.energy import entmax_solver
from massieu.energy.entmax import entmax, entmax_conjugate, tsallis_entropy

ALPHAS = [1.0, 1 + 1e-12, 1.001, 1.2, 1.5, 1.75, 2.0]


def draw(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_bisection(scores, alpha):
    """Weights and Ω* of one row, from the threshold τ of the textbook form [(α − 1)z − τ]₊^{1/(α − 1)}, in 60 digits."""
    with mpmath.workdps(60):
        z = [mpmath.mpf(score) for score in scores.tolist()]
        a = mpmath.mpf(alpha) - 1
        if a == 0:
            total = mpmath.fsum(mpmath.exp(x) for x in z)
            return [float(mpmath.exp(x) / total) for x in z], float(mpmath.log(total))

        def weights(tau):
            return [max(a * x - tau, 0) ** (1 / a) for x in z]

        low, high = a * max(z) - 1, a * max(z)
        for _ in range(190):
            middle = (low + high) / 2
            low, high = (middle, high) if mpmath.fsum(weights(middle)) > 1 else (low, middle)
        p = weights(low)
        entropy = mpmath.fsum(x - x ** (a + 1) for x in p) / (a * (a + 1))
        return [float(x) for x in p], float(mpmath.fsum(x * y for x, y in zip(p, z, strict=True)) + entropy)


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.medium
@every_row(
    "alpha, scale", [*zip(ALPHAS, cycle([1e-3, 1.0, 30.0, 1e4]), strict=False), (2.5, 1.0), (4.0, 30.0), (2.0, 1.0)]
)
def test_weights_and_potential_are_those_of_sixty_digits(alpha, scale):
    scores = draw(6, seed=1, scale=scale)
    weights, value = by_bisection(scores, alpha)
    # Above α = 2 a weight near zero is known to rounding^{1/(α − 1)} only.
    tolerance = 1e-13 if alpha <= 2 else 10 * 2.0 ** (-52 / (alpha - 1))
    for order in (alpha, torch.tensor(alpha, dtype=torch.float64)):
        assert entmax(scores, order).tolist() == pytest.approx(weights, abs=tolerance)
        assert entmax_conjugate(scores, order).item() == pytest.approx(value, rel=1e-13)
    exact = torch.tensor(weights, dtype=torch.float64)
    assert tsallis_entropy(exact, alpha).item() == pytest.approx(
        value - (exact @ scores).item(), abs=1e-12 * scale + 1e-13
    )


@pytest.mark.medium
@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
def test_float32_keeps_its_digits_at_scores_of_ten_thousand(alpha):
    # Neighbouring scores differ by 0.5 and are exact in float32.
    scores = 1e4 - 0.5 * torch.arange(12.0)
    for sign in (1, -1):
        weights, value = by_bisection(sign * scores, alpha)
        assert entmax(sign * scores, alpha).tolist() == pytest.approx(weights, abs=1e-6)
        assert entmax_conjugate(sign * scores, alpha).item() == pytest.approx(value, rel=1e-7)
        scores_ = (sign * scores).requires_grad_()
        (slope,) = torch.autograd.grad(entmax_conjugate(scores_, alpha), scores_, create_graph=True)
        (second,) = torch.autograd.grad(slope[0], scores_)
        assert slope.isfinite().all() and second.isfinite().all()


@every_row("alpha", [1.0, 1.5, 2.0])
def test_the_weights_solve_the_program(alpha):
    """max p·z + H_α(p) over the simplex, by sequential quadratic programming (a quadratic program at α = 2)."""
    scores = draw(5, seed=3)

    def objective(p):
        return -float(torch.from_numpy(p) @ scores + tsallis_entropy(torch.from_numpy(p).clamp_min(0), alpha))

    constraint = {"type": "eq", "fun": lambda p: p.sum() - 1}
    found = minimize(objective, [0.2] * 5, method="SLSQP", bounds=[(1e-15, 1)] * 5, constraints=[constraint], tol=1e-14)
    assert entmax_conjugate(scores, alpha).item() == pytest.approx(-found.fun, abs=1e-8)
    # The objective is strongly concave, so its error bounds that of the weights.
    assert entmax(scores, alpha).tolist() == pytest.approx(found.x.tolist(), abs=1e-4)


def test_known_rows():
    pair = torch.tensor([[0.3, 0.0], [2.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    assert torch.allclose(entmax(pair, 2.0)[:, 0], torch.tensor([0.65, 1.0, 1.0], dtype=torch.float64), atol=1e-15)
    # 1.5: √p₁ − √p₂ = ½ and p₁ + p₂ = 1.
    root = (1 + math.sqrt(7)) / 4
    assert entmax(pair[2], 1.5)[0].item() == pytest.approx(root**2, abs=1e-15)
    assert entmax(torch.zeros(3, 7), 1.5).unique().item() == pytest.approx(1 / 7)
    assert entmax(torch.tensor([5.0]), 1.7).item() == 1


@every_row("alpha", [1.25, 1.5, 2.0, 3.0])
def test_the_vertex_is_exact_from_the_margin_on(alpha):
    margin = 1 / (alpha - 1)
    at, below = torch.tensor([[0.0, -margin, -margin - 1], [0.0, -margin + 0.05, -margin - 1]], dtype=torch.float64)
    assert entmax(at, alpha).tolist() == [1, 0, 0]
    assert entmax(below, alpha)[1] > 0
    assert entmax_conjugate(at, alpha) == 0


def test_alpha_to_one_is_softmax_in_value_and_every_first_derivative():
    scores = draw(4, 6, seed=4, scale=2.0)
    soft = torch.softmax(scores, -1)
    assert torch.equal(entmax(scores, 1), entmax(scores, 1.0)) and torch.allclose(entmax(scores, 1.0), soft, atol=1e-15)
    near = torch.tensor(1 + 1e-9, dtype=torch.float64)
    for alpha in (torch.tensor(1.0, dtype=torch.float64), near):
        assert torch.allclose(entmax(scores, alpha), soft, atol=2e-8)
        jacobian = jacrev(entmax)(scores[0], alpha)
        assert torch.allclose(jacobian, torch.diag(soft[0]) - torch.outer(soft[0], soft[0]), atol=2e-8)
        # dp/dα at 1 is −½ p (L² − E L²), L = −log p: the second-order term of (1 + au)^{1/a}, renormalised.
        surprise = -soft[0].log()
        expected = -0.5 * soft[0] * (surprise.square() - (soft[0] * surprise.square()).sum())
        assert torch.allclose(jacrev(entmax, argnums=1)(scores[0], alpha), expected, atol=1e-7)


@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=9),
    st.floats(1, 6, width=32),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_weights_are_on_the_simplex_and_ordered_as_the_scores(scores, alpha, dtype):
    scores = torch.tensor(scores, dtype=dtype)
    weights, value = entmax(scores, alpha), entmax_conjugate(scores, alpha)
    eps = torch.finfo(dtype).eps
    assert weights.sum().item() == pytest.approx(1, abs=8 * eps)
    order = scores.argsort()
    assert (weights[order].diff() >= -8 * eps).all() and weights.min() >= 0
    uniform = torch.full_like(scores, 1 / len(scores))
    rounding = 8 * eps * (1 + scores.abs().max().item())
    assert -rounding <= (value - scores.max()).item() <= tsallis_entropy(uniform, alpha).item() + rounding
    # Fenchel–Young: equality at the weights.
    assert (value - weights @ scores - tsallis_entropy(weights, alpha)).abs() <= 4 * rounding + 4 * eps


# --- masks and shapes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0, 3.0])
def test_what_is_left_out_is_as_if_it_were_not_there(alpha):
    scores, keep = draw(5, 8, seed=5), torch.rand(5, 8, generator=torch.Generator().manual_seed(6)) < 0.6
    keep[0], keep[1] = True, torch.arange(8) == 3
    scores_ = scores.clone().requires_grad_()
    for mask in (keep, torch.where(keep, 0.0, -torch.inf).double()):
        weights, value = entmax(scores_, alpha, log_weight=mask), entmax_conjugate(scores_, alpha, log_weight=mask)
        for row in range(5):
            kept = scores[row][keep[row]]
            assert torch.allclose(weights[row][keep[row]], entmax(kept, alpha), atol=1e-15)
            assert value[row].item() == pytest.approx(entmax_conjugate(kept, alpha).item(), abs=1e-14)
        assert (weights[~keep] == 0).all()
        (slope,) = torch.autograd.grad(value.sum() + weights.square().sum(), scores_)
        assert (slope[~keep] == 0).all() and slope.isfinite().all()


@every_row("alpha", [1.0, 1.3, 1.5, 2.0, 3.0, "tensor"])
def test_a_row_without_entries_has_weight_and_gradients_zero(alpha):
    order = torch.full((2, 1), 1.4, dtype=torch.float64, requires_grad=True) if alpha == "tensor" else alpha
    scores = draw(2, 3, seed=7, scale=0.3).requires_grad_()
    keep = torch.tensor([[False] * 3, [True] * 3])
    weights, value = (f(scores, order, log_weight=keep) for f in (entmax, entmax_conjugate))
    assert (weights[0] == 0).all() and value[0] == -torch.inf
    total = weights.square().sum() + value[1:].sum() + torch.where(keep[:, 0], value, 0.0).sum()
    inputs = (scores, order) if isinstance(order, torch.Tensor) else (scores,)
    first = torch.autograd.grad(total, inputs, create_graph=True)
    assert all((slope[0] == 0).all() and (slope[1] != 0).any() for slope in first)
    (second,) = torch.autograd.grad(sum(slope.square().sum() for slope in first), scores, allow_unused=True)
    assert second.isfinite().all() and (second[0] == 0).all()


def test_dimensions_dtypes_and_heads():
    scores = draw(2, 3, 4, 5, seed=8)
    along = entmax(scores, 1.5, dim=1)
    assert torch.equal(along, entmax(scores.movedim(1, -1), 1.5).movedim(-1, 1))
    assert entmax_conjugate(scores, 1.5, dim=1).shape == (2, 4, 5)
    alpha = torch.tensor([1.0, 1.5, 2.0], dtype=torch.float64)
    heads = entmax(scores, alpha.reshape(3, 1, 1))
    for head in range(3):
        assert torch.allclose(heads[:, head], entmax(scores[:, head], alpha[head].item()), atol=1e-15)
    for dtype in (torch.bfloat16, torch.float16):
        rough = scores.to(dtype)
        assert entmax(rough).dtype == entmax_conjugate(rough).dtype == torch.float32
        assert torch.allclose(entmax(rough).double(), entmax(rough.double()), atol=1e-6)


@every_row("alpha", [1.3, 1.5, 3.0])
def test_a_row_does_not_depend_on_its_batch_mates(alpha):
    scores = torch.cat([draw(3, 40, seed=9), draw(3, 40, seed=10, scale=1e-3), draw(3, 40, seed=11, scale=50)])
    assert torch.equal(entmax(scores, alpha), torch.cat([entmax(row[None], alpha) for row in scores]))


# --- derivatives -----------------------------------------------------------------------------------------------------


@pytest.mark.medium
@some_slow(
    ("alpha", "function"),
    [(1.0, entmax), (1.8, entmax_conjugate), (1.8, entmax), (1.5, entmax), (2.0, entmax_conjugate), (2.5, entmax)],
    2,
)
def test_first_and_second_derivatives(alpha, function):
    # Seed 12 has no weight within 1e-3 of a kink at these α.
    scores = draw(2, 4, seed=12)
    constant = partial(function, alpha=alpha)
    check_derivatives(constant, [scores], forward=True)
    # One-sided at α = 1, so a hair inside.
    order = torch.tensor(max(alpha, 1 + 1e-4), dtype=torch.float64)
    check_derivatives(function, (scores, order), forward=True)


def test_derivatives_of_the_potential_are_the_weights():
    scores = draw(4, 7, seed=13)
    for alpha in ALPHAS:
        slope = grad(lambda z, alpha=alpha: entmax_conjugate(z, alpha).sum())(scores)
        assert torch.allclose(slope, entmax(scores, alpha), atol=1e-15)


@pytest.mark.medium
def test_transforms_agree_to_third_order():
    scores, alpha = draw(3, seed=14), torch.tensor(1.4, dtype=torch.float64)
    both = (0, 1)
    reverse = jacrev(jacrev(entmax_conjugate, argnums=both), argnums=both)(scores, alpha)
    for found in (
        hessian(entmax_conjugate, argnums=both)(scores, alpha),
        jacfwd(jacfwd(entmax_conjugate, argnums=both), argnums=both)(scores, alpha),
    ):
        for i in range(2):
            for j in range(2):
                assert torch.allclose(found[i][j], reverse[i][j], atol=1e-13)
    third = jacrev(jacrev(jacrev(entmax_conjugate)))(scores, alpha)
    assert torch.allclose(jacfwd(jacfwd(jacfwd(entmax_conjugate)))(scores, alpha), third, atol=1e-12)


@pytest.mark.slow
def test_fourth_order_of_two_scores_by_forward_mode():
    """At α = 3/2 the larger of two weights is (1 + d√(2 − d²))/2, where 2d is the difference of the scores."""

    def larger(score):
        half = score / 2
        return 0.5 + 0.5 * half * (2 - half.square()).sqrt()

    def fourth(function):
        return jacfwd(jacfwd(jacfwd(jacfwd(function))))(torch.tensor(0.3, dtype=torch.float64))

    found = fourth(lambda score: entmax(torch.stack([score, 0 * score]), 1.5)[0])
    assert torch.allclose(found, fourth(larger), rtol=1e-10)


@pytest.mark.medium
def test_plain_operations_have_the_same_derivatives_also_at_alpha_one():
    """Nested forward mode leaves the custom function; one level keeps it."""
    scores = draw(5, seed=15)
    for alpha in (1.0, 1.5):
        order = torch.tensor(alpha, dtype=torch.float64)
        one = jacfwd(entmax, argnums=(0, 1))(scores, order)
        zeros, tangent = torch.zeros_like(scores), torch.zeros(())

        def nested(z, order, zeros=zeros, tangent=tangent):
            return jvp(lambda shift: entmax(z + shift * zeros, order), (tangent.double(),), (tangent.double(),))[0]

        for left, right in zip(one, jacfwd(nested, argnums=(0, 1))(scores, order), strict=True):
            assert torch.allclose(left, right, atol=1e-13)


def test_vmap_is_the_loop():
    scores, alpha = draw(3, 4, 6, seed=16), torch.tensor([1.0, 1.3, 2.0, 1.5], dtype=torch.float64)
    assert torch.equal(vmap(entmax, in_dims=(1, 0), out_dims=1)(scores, alpha), entmax(scores, alpha[:, None]))

    def loss(z, order):
        return entmax(z, order).square().sum()

    rows = vmap(vmap(grad(loss, argnums=(0, 1))), in_dims=(0, None))(scores, alpha)
    inputs = scores.clone().requires_grad_(), alpha.clone().requires_grad_()
    slopes = torch.autograd.grad(entmax(inputs[0], inputs[1][:, None]).square().sum(), inputs)
    assert torch.allclose(rows[0], slopes[0], atol=1e-14) and torch.allclose(rows[1].sum(0), slopes[1], atol=1e-14)


def _potential(scores):
    return entmax_conjugate(scores, 1.5)


def _masked(scores):
    return entmax(scores, 1.3, log_weight=scores > -0.5)


def _learned(scores):
    return entmax(scores, 1 + torch.sigmoid(scores[..., :1]))


@pytest.mark.slow
@pytest.mark.parametrize("function", [_potential, _masked, _learned])
def test_compiled_is_eager(function):
    torch._dynamo.reset()
    scores = draw(3, 6, seed=17).requires_grad_()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found, expected = compiled(scores), function(scores)
    assert torch.allclose(found, expected, atol=1e-14)
    first, second = (torch.autograd.grad(out.square().sum(), scores)[0] for out in (found, expected))
    assert torch.allclose(first, second, atol=1e-13)


@pytest.mark.slow
def test_a_compiled_transform_differentiates_in_alpha(monkeypatch):
    # A transform makes as many copies of a step as may be needed; of these scores few are.
    monkeypatch.setattr(entmax_solver, "_STEPS", 10)
    scores, alpha = draw(2, 5, seed=18), torch.tensor([[1.0], [1.6]], dtype=torch.float64)

    def slope(scores, alpha):
        return grad(lambda z, order: entmax_conjugate(z, order).sum(), argnums=1)(scores, alpha)

    torch._dynamo.reset()
    compiled = torch.compile(slope, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(scores, alpha), slope(scores, alpha), atol=1e-13)


# --- errors ----------------------------------------------------------------------------------------------------------


@every_row(
    ("arguments", "error", "message"),
    [
        ({"alpha": 0.99}, ValueError, "at least 1, got 0.99"),
        ({"alpha": math.nan}, ValueError, "at least 1, got nan"),
        ({"alpha": math.inf}, ValueError, "finite"),
        ({"alpha": True}, TypeError, "number, got True"),
        ({"alpha": "1.5"}, TypeError, "number, got '1.5'"),
        ({"alpha": torch.tensor([2])}, TypeError, "floating-point tensor, got a tensor of torch.int64"),
        ({"alpha": torch.tensor([1.5, 0.5]).reshape(2, 1)}, ValueError, "at least 1, got 0"),
        (
            {"alpha": torch.full((3,), 1.5)},
            ValueError,
            r"\(3,\) does not broadcast to scores of shape \(2, 3\), by \(2, 1\)",
        ),
        ({"log_weight": torch.zeros(2)}, ValueError, r"\(2,\) does not broadcast to scores of shape \(2, 3\)"),
        (
            {"log_weight": torch.zeros(3, dtype=torch.int64)},
            TypeError,
            "or floating-point tensor, got a tensor of torch.int64",
        ),
        ({"log_weight": 0.0}, TypeError, "log_weight must be a boolean or floating-point tensor, got 0.0"),
        ({"dim": 2}, ValueError, r"dimension of a tensor of shape \(2, 3\), got 2"),
        ({"scores": torch.zeros(2, 0)}, ValueError, "at least one entry along dimension 1"),
        (
            {"scores": torch.zeros(2, 3, dtype=torch.int64)},
            TypeError,
            "floating-point tensor, got a tensor of torch.int64",
        ),
        ({"scores": [1.0]}, TypeError, "floating-point tensor, got list"),
    ],
)
def test_bad_input_is_one_clear_sentence(arguments, error, message):
    arguments = {"scores": torch.zeros(2, 3)} | arguments
    for function in (entmax, entmax_conjugate):
        with pytest.raises(error, match=message):
            function(**arguments)
