"""Sparse memories: potential and mean by other routes, descent, exact retrieval from the margin on, losses."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.support.derivatives import check_derivatives
from tests.support.rows import every_row
from torch.func import grad, vmap

from massieu.energy import HopfieldEnergy
from massieu.energy.activations import RMSNorm
from massieu.energy.fenchel_young import SparseAtoms, fenchel_young_loss
from massieu.measures import Atoms


def draw(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def nearest_on_simplex(scores):
    """Sparsemax by its definition, the nearest point of the simplex: every size of support is tried."""
    ordered = scores.sort(descending=True).values
    best = None
    for size in range(1, len(scores) + 1):
        threshold = (ordered[:size].sum() - 1) / size
        candidate = (scores - threshold).clamp_min(0)
        if abs(candidate.sum().item() - 1) < 1e-9 and (
            best is None or (candidate - scores).norm() < (best - scores).norm()
        ):
            best = candidate
    return best


def test_sparsemax_memory_is_the_projection_of_the_scores():
    points, eta, bias = draw(7, 3, seed=1), draw(5, 3, seed=2), draw(7, seed=3, scale=0.3)
    memory = SparseAtoms.create(points, 2, bias)
    for row in range(5):
        scores = points @ eta[row] + bias
        weights = nearest_on_simplex(scores)
        assert torch.allclose(memory.weights(eta)[row], weights, atol=1e-14)
        assert torch.allclose(memory.mean(eta)[row], weights @ points, atol=1e-14)
        value = weights @ scores + (1 - weights.square().sum()) / 2
        assert memory.log_partition(eta)[row].item() == pytest.approx(value.item(), abs=1e-14)


def test_alpha_one_is_the_measure():
    points, eta, log_weight = draw(2, 7, 3, seed=4), draw(2, 5, 4, 3, seed=5), draw(2, 7, seed=6)
    measure = Atoms.create(points, log_weight)
    for alpha in (1, torch.ones(2, dtype=torch.float64)):
        memory = SparseAtoms.create(points, alpha, log_weight)
        assert torch.allclose(memory.log_partition(eta), measure.log_partition(eta), atol=1e-14)
        assert torch.allclose(memory.mean(eta), measure.mean(eta), atol=1e-14)
    assert SparseAtoms.create(points, 1).margin == torch.inf


@pytest.mark.medium
@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0, "heads"])
def test_the_mean_is_the_gradient_to_second_order(alpha):
    points, eta = draw(2, 6, 3, seed=7), draw(2, 2, 3, seed=8)
    order = torch.tensor([1.2, 1.6], dtype=torch.float64) if alpha == "heads" else alpha
    memory = SparseAtoms.create(points, order)
    slope = grad(lambda e: memory.log_partition(e).sum())(eta)
    assert torch.allclose(memory.mean(eta), slope, atol=1e-14)
    if alpha == "heads":

        def value(points, eta, order):
            return SparseAtoms.create(points, order).log_partition(eta)

        assert isinstance(order, torch.Tensor)
        check_derivatives(value, (points, eta, order))


@every_row("alpha", [1.25, 1.5, 2.0])
@every_row("dtype", [torch.float32, torch.float64])
def test_one_step_retrieves_exactly_from_the_margin_on(alpha, dtype):
    """The numbers of N2: at α = 3/2 the vertex at a margin of 2, not at 1.9."""
    margin = 1 / (alpha - 1)
    points = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]], dtype=dtype)
    memory = SparseAtoms.create(points, alpha)
    assert memory.margin == pytest.approx(margin)
    at, below = (torch.tensor([lead, 0.0], dtype=dtype) for lead in (margin, 0.95 * margin))
    assert memory.lead(at).item() == pytest.approx(margin)
    assert memory.retrieves_exactly(at) and torch.equal(memory.mean(at), points[0])
    assert not memory.retrieves_exactly(below) and not torch.equal(memory.mean(below), points[0])
    hopfield = HopfieldEnergy.create(memory, scale=2.0)
    assert torch.equal(hopfield.step(at / 2), points[0])
    learned = SparseAtoms.create(points, torch.tensor(alpha, dtype=dtype))
    assert learned.retrieves_exactly(torch.stack([at * (1 + 1e-6), below])).tolist() == [True, False]
    assert SparseAtoms.create(points[:1], alpha).retrieves_exactly(0 * at)
    assert SparseAtoms.create(points, alpha, torch.tensor([True, False, False])).retrieves_exactly(0 * at)


@pytest.mark.medium
@given(
    st.integers(0, 10_000),
    st.sampled_from([1.0, 1.2, 1.5, 2.0]),
    st.floats(0.1, 8),
    st.floats(0.05, 1.95),
    st.integers(0, 3),
)
def test_the_hopfield_energy_falls_by_half_the_square_of_the_step(seed, alpha, scale, damping, masked):
    points, state = draw(2, 5, 3, seed=seed), draw(2, 4, 3, seed=seed + 1, scale=2.0)
    keep = torch.ones(2, 5, dtype=torch.bool)
    keep[0, :masked] = False
    hopfield = HopfieldEnergy.create(SparseAtoms.create(points, alpha, keep), scale=scale)
    energy, later = hopfield(state), hopfield.step(state)
    rounding = 1e-13 * (1 + energy.abs())
    assert (energy - hopfield(later) >= 0.5 * (later - state).square().sum(-1) - rounding).all()
    moved = hopfield.step(state, damping=damping)
    least = (1 / damping - 0.5) * (moved - state).square().sum(-1)
    assert (energy - hopfield(moved) >= least - rounding).all()
    assert (energy >= -1e-13).all()


def test_descent_under_a_normalisation():
    points, state = draw(8, 4, seed=9), draw(6, 4, seed=10)
    hopfield = HopfieldEnergy.create(SparseAtoms.create(points, 1.5), reference=RMSNorm.create(), scale=3.0)
    path = hopfield.descend(hopfield.step(state), steps=8)
    assert (path.energies.diff(dim=0) <= 1e-12).all()


@pytest.mark.slow
def test_masks_heads_vmap_half_precision_and_compilation():
    points, eta = draw(2, 6, 3, seed=11), draw(2, 4, 3, seed=12)
    keep = torch.tensor([[True, False, True, True, False, True], [False] * 6])
    memory = SparseAtoms.create(points, 1.5, keep)
    alone = SparseAtoms.create(points[0][keep[0]], 1.5)
    assert torch.allclose(memory.mean(eta)[0], alone.mean(eta[0]), atol=1e-15)
    assert (memory.mean(eta)[1] == 0).all() and (memory.log_partition(eta)[1] == -torch.inf).all()

    def mean(points, eta):
        return SparseAtoms.create(points, 1.5).mean(eta)

    assert torch.allclose(vmap(mean)(points, eta), mean(points, eta), atol=1e-15)
    rough = SparseAtoms.create(points.bfloat16(), 1.3)
    assert rough.mean(eta.bfloat16()).dtype == torch.float32
    torch._dynamo.reset()
    compiled = torch.compile(mean, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(points, eta), mean(points, eta), atol=1e-14)


# --- losses ----------------------------------------------------------------------------------------------------------


def test_the_loss_at_alpha_one_is_cross_entropy():
    scores, label = draw(5, 4, seed=13, scale=3.0), torch.tensor([0, 3, 1, 2, 2])
    one_hot = F.one_hot(label, 4).double()
    assert torch.allclose(
        fenchel_young_loss(scores, one_hot, 1), F.cross_entropy(scores, label, reduction="none"), atol=1e-14
    )
    soft = torch.softmax(draw(5, 4, seed=14), -1)
    divergence = (soft * (soft.log() - torch.log_softmax(scores, -1))).sum(-1)
    assert torch.allclose(fenchel_young_loss(scores, soft, 1), divergence, atol=1e-14)


@every_row("alpha", [1.2, 1.5, 2.0])
def test_the_loss_is_zero_exactly_at_its_weights_and_from_the_margin_on(alpha):
    memory, eta = SparseAtoms.create(draw(6, 3, seed=15), alpha), draw(5, 3, seed=16)
    assert memory.loss(eta, memory.weights(eta)).abs().max() < 1e-14
    uniform = torch.full((5, 6), 1 / 6, dtype=torch.float64)
    assert (memory.loss(eta, uniform) > 0).all()
    slope = grad(lambda e: memory.loss(e, uniform).sum())(eta)
    assert torch.allclose(slope, memory.mean(eta) - uniform @ memory.points, atol=1e-14)
    margin = 1 / (alpha - 1)
    scores = torch.tensor([[margin, 0.0, -1.0], [0.9 * margin, 0.0, -1.0]], dtype=torch.float64)
    loss = fenchel_young_loss(scores, torch.tensor([[1.0, 0.0, 0.0]] * 2).double(), alpha)
    assert loss[0].abs() < 1e-15 and loss[1] > 1e-8


def test_a_sparsemax_loss_written_out():
    """Martins and Astudillo (2016): ½ Σ_S (z_n² − τ²) + ½ − z_k for the class k."""
    scores = draw(6, 5, seed=17)
    weights = torch.stack([nearest_on_simplex(row) for row in scores])
    for row in range(6):
        support = weights[row] > 0
        threshold = (scores[row][support].sum() - 1) / support.sum()
        for label in range(5):
            expected = 0.5 * (scores[row][support].square() - threshold.square()).sum() + 0.5 - scores[row, label]
            one_hot = F.one_hot(torch.tensor(label), 5).double()
            assert fenchel_young_loss(scores[row], one_hot, 2).item() == pytest.approx(expected.item(), abs=1e-13)


def test_a_target_at_a_score_of_minus_infinity_costs_infinitely_much():
    scores = torch.tensor([[0.0, -torch.inf, 1.0]] * 2, requires_grad=True)
    loss = fenchel_young_loss(scores, torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]))
    assert loss[0] == torch.inf and loss[1].isfinite()
    (slope,) = torch.autograd.grad(loss[1], scores)
    assert slope.isfinite().all() and (slope[:, 1] == 0).all()


def test_small_losses_keep_their_digits_in_float32():
    # At α = 2 a lead of 1 − ε costs ε²/4, however large the scores.
    lead = 1 - 2.0**-7
    scores = torch.tensor([4096.0 + lead, 4096.0])
    assert scores.diff().item() == -lead
    assert fenchel_young_loss(scores, torch.tensor([1.0, 0.0]), 2).item() == pytest.approx(2.0**-16, rel=1e-2)


@every_row(
    ("call", "error", "message"),
    [
        (lambda: SparseAtoms.create(torch.zeros(3, 2), 0.5), ValueError, "at least 1, got 0"),
        (
            lambda: SparseAtoms.create(torch.zeros(3, 2), torch.ones(2)),
            ValueError,
            r"\(2,\) does not broadcast to .* \(\)",
        ),
        (
            lambda: SparseAtoms.create(torch.zeros(2, 3, 2), torch.tensor([1.5, 0.0])),
            ValueError,
            "at least 1, got 0",
        ),
        (lambda: SparseAtoms.create(torch.full((3, 2), torch.nan)), ValueError, "points must be finite"),
        (lambda: SparseAtoms.create(torch.zeros(0, 2)), ValueError, "N, d ≥ 1"),
        (lambda: SparseAtoms.create(torch.zeros(3, 2)).mean(torch.zeros(3)), ValueError, r"got \(3,\)"),
        (lambda: fenchel_young_loss(torch.zeros(3), torch.zeros(2)), ValueError, r"shape \(3,\), got \(2,\)"),
        (lambda: fenchel_young_loss(torch.zeros(3), torch.tensor([0, 1, 0])), TypeError, "target .* of torch.int64"),
    ],
)
def test_bad_input_is_one_clear_sentence(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_the_class_is_final():
    with pytest.raises(TypeError, match="final"):

        class Another(SparseAtoms):
            pass
