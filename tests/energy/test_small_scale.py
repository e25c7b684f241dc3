"""Energies at scales from 1e-8 to 1e8, where (A(scale·x) − A(0))/scale cancels: against arithmetic of sixty digits."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from decimal import Context, Decimal, localcontext
from itertools import cycle

import pytest
import torch
from tests.energy.cases import F64, draw
from tests.support.rows import every_row, one_in
from torch import Tensor
from torch.utils import _pytree as pytree

from massieu import measures
from massieu.energy import HopfieldEnergy, SparseAtoms, SpinModel, boosting_energy, bounds, ood_score
from massieu.papers.theory import ScoreDeviation, least_descent

SCALES = [1e-8, 1e-6, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 1.0, 3.0, 1e2, 1e8]
POINTS, LOG_WEIGHT = draw(6, 3, seed=20), 0.5 * draw(6, seed=21)
STATE = draw(4, 3, seed=22)
LOCATION, FIELD, VARIANCE = draw(3, seed=23), draw(3, seed=24), 0.7

Row = list[Decimal]
Potential = Callable[[Row], Decimal]


def exact(values: Tensor) -> Row:
    return [Decimal(float(value)) for value in values]


def dot(left: Row, right: Row) -> Decimal:
    return sum((a * b for a, b in zip(left, right, strict=True)), Decimal(0))


def atoms(rows: list[Row], weights: Row) -> Potential:
    def potential(eta: Row) -> Decimal:
        scores = [dot(row, eta) + weight for row, weight in zip(rows, weights, strict=True)]
        top = max(scores)
        return top + sum(((score - top).exp() for score in scores), Decimal(0)).ln()

    return potential


def of_atoms(points: Tensor, log_weight: Tensor) -> Potential:
    return atoms([exact(point) for point in points], exact(log_weight))


def of_signs(eta: Row) -> Decimal:
    """Σ log cosh(field + eta) − log cosh(field)."""

    def log_cosh(y: Decimal) -> Decimal:
        return abs(y) + (1 + (-2 * abs(y)).exp()).ln()

    return sum((log_cosh(f + y) - log_cosh(f) for f, y in zip(exact(FIELD), eta, strict=True)), Decimal(0))


def of_normal(eta: Row) -> Decimal:
    return dot(exact(LOCATION), eta) + Decimal(VARIANCE) / 2 * dot(eta, eta)


def of_deviation(eta: Row) -> Decimal:
    scores = [dot(exact(point), eta) for point in POINTS]
    mean = sum(scores, Decimal(0)) / len(scores)
    return (sum(((score - mean) ** 2 for score in scores), Decimal(0)) / len(scores) + Decimal("0.5")).sqrt()


def of_sparse(eta: Row) -> Decimal:
    """max over the simplex of p·z + (1 − ‖p‖²)/2, by the support's own threshold."""
    scores = sorted((dot(exact(point), eta) for point in POINTS), reverse=True)
    thresholds = [(sum(scores[:count], Decimal(0)) - 1) / count for count in range(1, len(scores) + 1)]
    threshold = [level for level, score in zip(thresholds, scores, strict=True) if score > level][-1]
    weights = [max(score - threshold, Decimal(0)) for score in scores]
    return dot(weights, scores) + (1 - dot(weights, weights)) / 2


MEMORIES = {
    "patterns": (lambda: measures.Atoms.create(POINTS, LOG_WEIGHT), of_atoms(POINTS, LOG_WEIGHT)),
    "signs": (lambda: measures.Spin.create(FIELD), of_signs),
    "normal": (lambda: measures.Gaussian.create(LOCATION, torch.full((3,), VARIANCE, dtype=F64)), of_normal),
    "sparse patterns": (lambda: SparseAtoms.create(POINTS, 2.0), of_sparse),
    "deviation": (lambda: ScoreDeviation.create(POINTS, eps=0.5), of_deviation),
}


def rise(potential: Potential, state: Row, scale: Decimal) -> Decimal:
    return (potential([scale * x for x in state]) - potential([Decimal(0)] * len(state))) / scale


def precise() -> AbstractContextManager[Context]:
    return localcontext(Context(prec=110))


def rises(potential: Potential, state: Tensor, scale: float) -> Tensor:
    with precise():
        found = [rise(potential, exact(row), Decimal(scale)) for row in state]
    return torch.tensor([float(each) for each in found], dtype=F64)


@pytest.mark.medium
@one_in(3, {"scale, dtype": zip(SCALES, cycle([torch.float32, F64]), strict=False), "name": MEMORIES})
def test_the_energy_of_any_memory_at_any_scale(name: str, scale: float, dtype: torch.dtype):
    make, potential = MEMORIES[name]
    memory = make()
    energy = HopfieldEnergy.create(memory, scale=torch.tensor(scale, dtype=F64))
    narrow = pytree.tree_map(lambda leaf: leaf.to(dtype), energy)
    state = STATE.to(dtype)
    expected = 0.5 * state.double().square().sum(-1) - rises(potential, state, scale)
    if hasattr(memory, "points"):
        expected = expected + POINTS.square().sum(-1).amax() / 2
    # Points, weights and the scale are rounded to the dtype, and scores are as large as the energy at large scales.
    lengths = state.double().abs().sum(-1)
    size = 1 + lengths.square() + (memory.mean(scale * state.double()).abs() * state.abs()).sum(-1)
    assert ((narrow(state) - expected).abs() <= 32 * torch.finfo(dtype).eps * size).all()


# --- derivatives ------------------------------------------------------------------------------------------------------

STEP = Decimal(10) ** -25


def derivative(function: Callable[[Decimal], Decimal], order: int = 1) -> float:
    """By central differences, of which fifty digits are right."""
    with precise():
        if order == 1:
            return float((function(STEP) - function(-STEP)) / (2 * STEP))
        return float((function(STEP) - 2 * function(Decimal(0)) + function(-STEP)) / STEP**2)


def rise_moved(scale: float, weight: int | None = None, coordinate: int | None = None) -> Callable[[Decimal], Decimal]:
    """The rise of the patterns' log-partition when a log-weight or a point's coordinate has moved."""

    def function(step: Decimal) -> Decimal:
        rows, logs = [exact(point) for point in POINTS], exact(LOG_WEIGHT)
        if weight is not None:
            logs[weight] += step
        if coordinate is not None:
            rows[coordinate // 3][coordinate % 3] += step
        return rise(atoms(rows, logs), exact(STATE[0]), Decimal(scale))

    return function


@pytest.mark.medium
@every_row("scale", [1e-8, 1e-4, 0.3, 1e4])
def test_derivatives_in_all_that_the_energy_depends_on(scale: float):
    rate = torch.tensor(scale, dtype=F64, requires_grad=True)
    weight, points = LOG_WEIGHT.clone().requires_grad_(), POINTS.clone().requires_grad_()
    energy = HopfieldEnergy.create(measures.Atoms.create(points, weight), scale=rate)
    value = -energy(STATE[0]) + 0.5 * points.square().sum(-1).amax()  # the rise, but for a constant
    slope, of_weights, of_points = torch.autograd.grad(value, [rate, weight, points], create_graph=True)
    (bend,) = torch.autograd.grad(slope, rate)
    slope, of_weights, of_points = (found.detach() for found in (slope, of_weights, of_points))
    size = float(POINTS.norm(dim=-1).max() * STATE[0].norm())  # of the scores, at scale one
    rounding = 64 * torch.finfo(F64).eps

    def scaled(step: Decimal) -> Decimal:
        return rise(of_atoms(POINTS, LOG_WEIGHT), exact(STATE[0]), Decimal(scale) * (1 + step))

    # ∂/∂scale is of the size of a score's square, or at large scales of a score over the scale; so is the next.
    first = min(size**2, 4 * size / scale)
    assert abs(float(slope) - derivative(scaled) / scale) <= rounding * first
    assert abs(float(bend) - (derivative(scaled, 2)) / scale**2) <= 16 * rounding * min(size**3, 4 * size / scale**2)
    for at in range(6):
        assert abs(float(of_weights[at]) - derivative(rise_moved(scale, weight=at))) <= rounding * size
    for at in range(0, 18, 5):
        expected = derivative(rise_moved(scale, coordinate=at))
        assert abs(float(of_points.flatten()[at]) - expected) <= rounding * size * max(1, min(scale * size, 20))


@every_row("scale", [1e-8, 1e-4, 0.3, 1e4])
@every_row("dtype", [torch.float32, F64])
def test_force_and_hessian_at_any_scale(scale: float, dtype: torch.dtype):
    energy = HopfieldEnergy.create(measures.Atoms.create(POINTS, LOG_WEIGHT), scale=scale)
    narrow = pytree.tree_map(lambda leaf: leaf.to(dtype), energy)
    share = torch.softmax(scale * STATE @ POINTS.mT + LOG_WEIGHT, -1)
    mean = share @ POINTS
    centred = POINTS - mean.unsqueeze(-2)
    covariance = (share.unsqueeze(-1) * centred).mT @ centred
    eps = torch.finfo(dtype).eps * (1 + scale * 20)
    torch.testing.assert_close(narrow.force(STATE.to(dtype)).double(), mean - STATE, rtol=0, atol=32 * eps)
    expected = torch.eye(3, dtype=F64) - scale * covariance
    found = narrow.hessian(STATE.to(dtype)).double()
    torch.testing.assert_close(found, expected, rtol=0, atol=64 * eps * max(1.0, scale))


# --- descent ----------------------------------------------------------------------------------------------------------


@pytest.mark.medium
@every_row(("scale", "dtype"), [(1e-8, torch.float32), (1e-4, F64), (1e-3, torch.float32), (1e-2, F64)])
def test_a_step_lowers_the_energy_by_what_it_must(scale: float, dtype: torch.dtype):
    """½‖x − T(x)‖² (B5.3): near the end of a descent some twenty roundings of the energy, which a difference would drown."""
    energy = HopfieldEnergy.create(draw(32, 16, seed=25).to(dtype), scale=scale)
    eps = torch.finfo(dtype).eps
    end = energy.retrieve(torch.zeros(16, dtype=dtype), steps=60).state
    direction = torch.nn.functional.normalize(draw(500, 16, seed=26), dim=-1).to(dtype)
    size = energy(end) + end.square().sum()
    near = end + (40 * eps * size).sqrt() * direction
    after = energy.step(near)
    fall = (energy(near) - energy(after)) - least_descent(near, after)
    assert (fall >= -8 * eps * size).all()
    assert (energy(after) < energy(near)).all()


def test_heads_masks_and_what_needs_no_integral_side_by_side():
    """Items are integrated where they need it: one head at a small scale changes nothing in the next."""
    points, state = draw(2, 3, 6, 4, seed=27), draw(2, 3, 5, 4, seed=28)
    weight = draw(2, 3, 6, seed=29)
    weight[0, :, 3:], weight[1, 2] = -torch.inf, -torch.inf
    scale = torch.tensor([1e-7, 0.4, 50.0], dtype=F64)
    found = HopfieldEnergy.create(measures.Atoms.create(points, weight), scale=scale)(state)
    for batch in range(2):
        for head in range(3):
            memory = measures.Atoms.create(points[batch, head], weight[batch, head])
            alone = HopfieldEnergy.create(memory, scale=scale[head])(state[batch, head])
            torch.testing.assert_close(found[batch, head], alone, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(found[1, 2], 0.5 * state[1, 2].square().sum(-1))


def test_what_is_not_finite_is_not_hidden():
    state = torch.zeros(3, 4, dtype=F64)
    state[1, 2], state[2, 0] = torch.nan, torch.inf
    for scale in (1e-6, 1.0):
        found = HopfieldEnergy.create(measures.Spin.create(torch.zeros(4, dtype=F64)), scale=scale)(state)
        assert found.isfinite().tolist()[0]
        assert not found.isfinite()[1:].any()


def test_within_transforms():
    energy = HopfieldEnergy.create(POINTS, scale=torch.tensor([1e-6], dtype=F64)[0])
    expected, slope = energy(STATE), -energy.force(STATE)
    torch.testing.assert_close(torch.func.vmap(energy)(STATE), expected, rtol=1e-14, atol=0)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(energy))(STATE), slope, rtol=1e-12, atol=1e-14)


# --- what is made of the same difference ------------------------------------------------------------------------------


@every_row("scale", [1e-6, 1e-3, 1.0, 30.0])
def test_two_memories_of_one_mass_compared_at_small_scales(scale: float):
    """(A_outliers − A)/scale, and the loss's slope along it, tanh(gap/2) of the gap in nats."""
    inner, outer = POINTS, draw(6, 3, seed=30)
    expected = rises(of_atoms(outer, torch.zeros(6)), STATE, scale) - rises(
        of_atoms(inner, torch.zeros(6)), STATE, scale
    )
    found = ood_score(
        STATE.float(), kind="hopfield_boosting", memory=inner.float(), outliers=outer.float(), scale=scale
    )
    eps = torch.finfo(torch.float32).eps
    assert (found - expected).abs().max() <= 32 * eps * (1 + STATE.norm(dim=-1).max() * 4)
    state = STATE.float().requires_grad_()
    (slope,) = torch.autograd.grad(boosting_energy(state, inner.float(), outer.float(), scale=scale).sum(), state)
    means = [torch.softmax(scale * STATE @ memory.mT, -1) @ memory for memory in (outer, inner)]
    pull = torch.tanh(0.5 * scale * expected).unsqueeze(-1) * (means[0] - means[1])
    assert (slope + pull).abs().max() <= 64 * eps * min(1.0, scale) * 10


def test_how_far_a_pattern_leads_whatever_all_weights_have_in_common():
    points, scale = draw(8, 4, seed=31).float(), 1e-8
    plain = HopfieldEnergy.create(points, scale=scale)
    weighted = HopfieldEnergy.create(measures.Atoms.create(points, torch.full((8,), -2.3)), scale=scale)
    assert torch.equal(bounds.separation(weighted), bounds.separation(plain))
    assert torch.equal(bounds.separation(weighted, points), bounds.separation(plain, points))


@every_row("strength", [1e-5, 1e-3, 0.1])
def test_the_evidence_of_weak_couplings(strength: float):
    """log E exp(J S₁S₂) = log cosh J without fields, of which the mean field keeps 0; with equal fields it is J tanh² + …"""
    coupling = strength * torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    model = SpinModel.create(measures.Spin.create(torch.full((2,), 0.6)), coupling)
    found = model.tap().log_partition.double()
    tanh2 = torch.tanh(torch.tensor(0.6, dtype=F64)) ** 2
    exact_value = torch.log(
        torch.cosh(torch.tensor(strength, dtype=F64)) * (1 + tanh2 * torch.tanh(torch.tensor(strength)))
    )
    assert abs(found - exact_value) <= 4 * strength**3 + 16 * torch.finfo(torch.float32).eps * strength
