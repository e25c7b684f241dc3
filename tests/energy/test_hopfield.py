"""The Hopfield energy against NumPy, its descent under every reference and memory, and what it refuses."""

import re
import warnings
from itertools import cycle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import cdist
from scipy.special import logsumexp, softmax
from tests.energy.cases import F64, MEMORIES, REFERENCES, attend, draw, hopfield_energy
from tests.support.rows import every_row, one_in, some_slow
from torch import Tensor

from massieu import measures
from massieu.energy import Energy, HopfieldEnergy, activations, boosting_energy, bounds, ood_score
from massieu.energy.activations import MeasureActivation
from massieu.errors import OverlapWarning
from massieu.papers.theory import LogSumReLU

EPS = torch.finfo(F64).eps


# --- patterns that overlap -------------------------------------------------------------------------------------------


MAKE = {"by product": HopfieldEnergy.create, "by distance": HopfieldEnergy.euclidean}


def _named_scale(make, patterns, scale):
    with pytest.warns(OverlapWarning, match="overlap too much to be retrieved surely") as told:
        make(patterns, scale=scale)
    return float(re.search("a scale of ([^ ]+) is enough", str(told[0].message))[1])


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
@given(
    number=st.integers(2, 40), size=st.integers(2, 12), unit=st.sampled_from([1e-3, 1.0, 16.0]), seed=st.integers(0, 99)
)
def test_at_the_scale_that_is_named_descent_stays_at_every_pattern(make, number, size, unit, seed):
    """Steps written out here: from each pattern they end nearer to it than to any other, and nothing is warned of."""
    patterns = torch.nn.functional.normalize(draw(number, size, seed=seed), dim=-1) * unit
    scale = _named_scale(make, patterns, 1e-3 / unit**2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(patterns, scale=scale)
        make(patterns.to(torch.float32), scale=1.01 * scale)
    states = patterns.numpy()
    for _ in range(200):
        states = softmax(scale * states @ patterns.numpy().T, -1) @ patterns.numpy()
    assert cdist(states, patterns.numpy()).argmin(-1).tolist() == list(range(number))


def test_patterns_that_merge_are_warned_of():
    """Two patterns r apart have a state of their own each if and only if scale·r²/4 > 1; others weigh little long before."""
    patterns = torch.tensor([[1.0, 0.0], [-1.0, 0.0]]).double()  # r = 2
    for make in MAKE.values():
        assert _named_scale(make, patterns, 0.99) >= 1
        assert make(patterns, scale=0.99).retrieve(patterns[0], max_steps=10_000, tol=1e-4).state[0] < 0.1


def test_by_distance_the_scale_has_the_unit_of_one_over_patterns_squared():
    patterns = draw(9, 12)
    first, second = (_named_scale(HopfieldEnergy.euclidean, unit * patterns, 1e-6) for unit in (1.0, 16.0))
    assert first == pytest.approx(256 * second, rel=0.02)  # each is rounded up to three digits
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HopfieldEnergy.euclidean(patterns, torch.zeros(9).double(), scale=1e-6)  # log-weights are the user's own rule


def test_patterns_that_no_scale_retrieves():
    patterns = torch.tensor([[1.0, 0.0], [3.0, 0.1], [0.0, 1.0]])  # 1·3 > 1·1
    with pytest.warns(
        OverlapWarning, match="1 of 3 patterns have at least as large a product with another one as with themselves"
    ):
        memory = HopfieldEnergy.create(patterns, scale=100.0)
    assert not torch.allclose(memory.retrieve(patterns[0]).state, patterns[0], atol=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HopfieldEnergy.euclidean(patterns, scale=100.0)
        HopfieldEnergy.create(measures.Atoms.create(patterns), scale=100.0)
        HopfieldEnergy.create(patterns.clone().requires_grad_(), scale=100.0)
        HopfieldEnergy.create(torch.eye(3).repeat(2, 1), scale=100.0)  # equal patterns are one pattern


def test_patterns_that_are_stored_twice_still_overlap_with_others():
    """The first two differ in one of 64 signs: at scale ½ a step from one weighs the other by e^-1, and e^-½ at half way."""
    patterns = torch.sign(draw(10, 64))
    patterns[1] = patterns[0]
    patterns[1, 0] *= -1
    with pytest.warns(OverlapWarning, match="4 of 20 patterns overlap too much"):
        HopfieldEnergy.create(patterns.repeat(2, 1), scale=0.5)


def test_a_pattern_as_long_as_its_shadow_on_another():
    patterns = torch.tensor([[1.0, 0.0], [1.0, 1.0]])  # both products with the first are 1
    with pytest.warns(OverlapWarning, match="1 of 2 patterns have at least as large a product"):
        memory = HopfieldEnergy.create(patterns, scale=1000.0)
    assert not torch.allclose(memory.retrieve(patterns[0]).state, patterns[0], atol=0.4)


# --- against NumPy ---------------------------------------------------------------------------------------------------


@one_in(2, {"scale": [0.3, 1, 7.0, torch.tensor([0.5, 1.0, 4.0], dtype=F64)], "masked": [False, True]})
def test_energy_and_step_of_heads_masks_and_weights(scale, masked: bool):
    patterns, state = draw(2, 3, 6, 4), draw(2, 3, 5, 4, seed=1)
    log_weight = draw(2, 3, 6, seed=2)
    if masked:
        log_weight[:, 1, 2:5] = -torch.inf
    energy = HopfieldEnergy.create(measures.Atoms.create(patterns, log_weight), scale=scale)
    rate = torch.as_tensor(scale, dtype=F64).expand(2, 3)
    found, moved = energy(state), energy.step(state)
    assert found.shape == (2, 3, 5)
    for batch, head, query in np.ndindex(2, 3, 5):
        one = (
            patterns[batch, head].numpy(),
            state[batch, head, query].numpy(),
            float(rate[batch, head]),
            log_weight[batch, head].numpy(),
        )
        np.testing.assert_allclose(found[batch, head, query], hopfield_energy(*one), rtol=1e-12)
        np.testing.assert_allclose(moved[batch, head, query], attend(*one), rtol=1e-11, atol=1e-13)


def test_one_query_of_one_memory_and_many():
    patterns, state = draw(6, 4), draw(4, seed=1)
    energy = HopfieldEnergy.create(patterns, scale=2.0)
    expected = hopfield_energy(patterns.numpy(), state.numpy(), 2.0)
    assert energy(state).shape == ()
    np.testing.assert_allclose(energy(state), expected, rtol=1e-13)
    np.testing.assert_allclose(energy(state.expand(3, 2, 4)), np.full((3, 2), expected), rtol=1e-13)


def test_what_a_mask_leaves_out_counts_for_nothing():
    patterns, state = draw(6, 4), draw(5, 4, seed=1)
    kept = torch.tensor([True, True, False, True, False, False])
    patterns[~kept] = 1e6
    masked = HopfieldEnergy.create(measures.Atoms.create(patterns, kept), scale=1.5)
    without = HopfieldEnergy.create(patterns[kept], scale=1.5)
    torch.testing.assert_close(masked(state), without(state), rtol=1e-13, atol=0)
    torch.testing.assert_close(masked.step(state), without.step(state), rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(masked.force(state), without.force(state), rtol=1e-12, atol=1e-14)


@pytest.mark.medium
@pytest.mark.parametrize("name", REFERENCES)
def test_a_memory_that_is_masked_altogether_remembers_nothing(name: str):
    reference = REFERENCES[name](4)
    keep = torch.ones(2, 6, dtype=torch.bool)
    keep[1] = False
    energy = HopfieldEnergy.create(measures.Atoms.create(draw(2, 6, 4), keep), reference=reference, scale=2.0)
    start = energy.step(draw(2, 3, 4, seed=1))
    state = start.clone().requires_grad_()
    value = energy(state)
    assert value.isfinite().all()
    torch.testing.assert_close(
        energy.step(state)[1], MeasureActivation.of("reference", reference)(torch.zeros(3, 4, dtype=F64))
    )
    (slope,) = torch.autograd.grad(energy.step(state).sum(), state)
    assert (slope[1] == 0).all()
    assert slope.isfinite().all()


def test_force_and_hessian_by_their_formulas():
    patterns, state, scale = draw(6, 4), draw(5, 4, seed=1), 1.7
    energy = HopfieldEnergy.create(patterns, scale=scale)
    for query in range(5):
        x = state[query].numpy()
        scores = scale * patterns.numpy() @ x
        p = np.exp(scores - logsumexp(scores))
        mean = p @ patterns.numpy()
        centred = patterns.numpy() - mean
        covariance = (p[:, None] * centred).T @ centred
        np.testing.assert_allclose(energy.force(state)[query], mean - x, rtol=1e-11, atol=1e-13)
        np.testing.assert_allclose(energy.hessian(state)[query], np.eye(4) - scale * covariance, atol=1e-12)


def test_without_the_factor_of_one_over_scale_the_gradient_is_not_attention():
    patterns, scale = draw(6, 4), 0.5
    state = draw(4, seed=1).requires_grad_()
    published = 0.5 * state @ state - torch.logsumexp(scale * patterns @ state, 0)
    (slope,) = torch.autograd.grad(published, state)
    attention = torch.as_tensor(attend(patterns.numpy(), state.detach().numpy(), scale))
    torch.testing.assert_close(state.detach() - slope, scale * attention)  # half of attention
    torch.testing.assert_close(
        HopfieldEnergy.create(patterns, scale=scale).force(state.detach()), attention - state.detach()
    )


# --- descent ---------------------------------------------------------------------------------------------------------


def _rounding(energy: Energy, state: Tensor, *values: Tensor) -> Tensor:
    """How far E's terms may be off: each is a sum of numbers up to the size of the largest."""
    assert isinstance(energy, HopfieldEnergy)
    scale = energy.scale.reshape(*energy.scale.shape, *[1] * (state.ndim - energy.scale.ndim))
    size = energy.memory.log_partition(state * scale).abs() / scale.squeeze(-1)
    size = torch.where(size.isfinite(), size, 0.0) + 0.5 * state.square().sum(-1) + 10 / scale.squeeze(-1)
    for value in values:
        size = size + torch.where(value.isfinite(), value.abs(), 0.0)
    return 100 * EPS * size


def _descends(energy: HopfieldEnergy, state: Tensor, damping: float) -> None:
    """Along two steps, no rise beyond rounding; +inf may fall to a number, never the other way."""
    before = energy(state)
    for _ in range(2):
        after_state = energy.step(state, damping=damping)
        after = energy(after_state)
        assert not after.isnan().any()
        slack = _rounding(energy, state, before, after) + _rounding(energy, after_state)
        assert (after <= before + slack).all(), (after - before - slack).max()
        state, before = after_state, after


scenes = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**16),
        "batch": st.sampled_from([(), (2,), (2, 3)]),
        "count": st.integers(1, 6),
        "size": st.sampled_from([0.0, 1e-3, 1.0, 10.0]),
        "scale": st.sampled_from([0.05, 0.5, 1.0, 4.0, 32.0]),
        "masked": st.booleans(),
        "start": st.sampled_from([0.0, 0.5, 20.0]),
        "inside": st.booleans(),
    }
)


def _scene(scene: dict, reference) -> tuple[HopfieldEnergy, Tensor]:
    generator = torch.Generator().manual_seed(scene["seed"])
    batch, width = scene["batch"], 3
    patterns = scene["size"] * torch.randn(*batch, scene["count"], width, generator=generator, dtype=F64)
    keep = torch.rand(*batch, scene["count"], generator=generator) < (0.5 if scene["masked"] else 1.1)
    memory = measures.Atoms.create(patterns, keep)
    energy = HopfieldEnergy.create(memory, reference=reference, scale=scene["scale"])
    state = scene["start"] * torch.randn(*batch, 4, width, generator=generator, dtype=F64)
    return energy, energy.step(state) if scene["inside"] else state


OTHER_THAN_ATOMS = [name for name in REFERENCES if name != "Atoms"]


@pytest.mark.medium
@one_in(2, {"name": OTHER_THAN_ATOMS, "damping": [1.0, 0.3]})
def test_energy_never_rises(name: str, damping: float):
    scene = {"seed": 0, "batch": (2,), "count": 5, "size": 1.0, "scale": 4.0, "masked": True, "start": 0.5}
    energy, state = _scene({**scene, "inside": damping < 1}, REFERENCES[name](3))
    _descends(energy, state, damping)


@pytest.mark.medium
@given(name=st.sampled_from(OTHER_THAN_ATOMS), scene=scenes, damping=st.sampled_from([1.0, 0.3]))
def test_energy_never_rises_however_drawn(name: str, scene: dict, damping: float):
    energy, state = _scene(scene, REFERENCES[name](3))
    _descends(energy, state, damping)


@pytest.mark.medium
@given(scene=scenes)
def test_energy_never_rises_where_the_reference_is_other_patterns(scene: dict):
    scene = {**scene, "batch": scene["batch"][:1], "scale": min(scene["scale"], 4.0), "size": min(scene["size"], 1.0)}
    energy, state = _scene({**scene, "inside": True}, REFERENCES["Atoms"](3))
    before, after = energy(state), energy(energy.step(state))
    # On the hull's boundary the conjugate is a limit, right to 1e-9.
    assert (after <= before + 1e-7).all()


@pytest.mark.medium
@given(
    name=st.sampled_from(["identity", "scalar", "whitening", "Gaussian"]),
    scene=scenes,
    damping=st.sampled_from([0.01, 1.5, 1.99]),
)
def test_quadratic_references_allow_a_damping_of_up_to_two(name: str, scene: dict, damping: float):
    energy, state = _scene(scene, REFERENCES[name](3))
    _descends(energy, state, damping)


@pytest.mark.medium
@some_slow("batch", [(2,), ()], 1)
@some_slow("reference", ["spin", "LayerNorm", "identity", "Sphere"], 2)
@pytest.mark.parametrize("name", MEMORIES)
def test_energy_never_rises_for_other_memories(name: str, reference: str, batch: tuple[int, ...]):
    for scale in (0.5, 2.0):
        energy = HopfieldEnergy.create(MEMORIES[name](batch, 3), reference=REFERENCES[reference](3), scale=scale)
        for damping in (1.0, 0.4):
            _descends(energy, 2 * draw(*batch, 6, 3, seed=20), damping)


@pytest.mark.medium
@pytest.mark.parametrize("name", REFERENCES)
def test_energy_over_stored_patterns_is_never_negative(name: str):
    scales = torch.tensor([0.1, 4.0], dtype=F64)
    energy = HopfieldEnergy.create(draw(2, 5, 4), reference=REFERENCES[name](4), scale=scales)
    path = energy.descend(2 * draw(2, 10, 4, seed=1), steps=2)
    assert (path.energies[1:] >= -1e-9).all()
    single = HopfieldEnergy.create(draw(1, 4), reference=REFERENCES[name](4))
    # At the one pattern's own image E is R* + R − x·∇R = 0.
    torch.testing.assert_close(single(single.step(draw(4))), torch.zeros((), dtype=F64), atol=1e-9, rtol=0)


def test_descend_returns_the_path():
    energy = HopfieldEnergy.create(draw(5, 3), scale=2.0)
    state = draw(4, 3, seed=1)
    path = energy.descend(state, steps=3, damping=0.5)
    assert path.states.shape == (4, 4, 3)
    for index in range(3):
        here = path.states[index]
        torch.testing.assert_close(path.states[index + 1], 0.5 * (here + energy.step(here)))
    torch.testing.assert_close(path.energies, energy(path.states))


# --- derivatives, transforms, precision ------------------------------------------------------------------------------


@pytest.mark.medium
@pytest.mark.parametrize(
    ("name", "dtype"), list(zip(OTHER_THAN_ATOMS, cycle([torch.bfloat16, torch.float16]), strict=False))
)
def test_low_precision_is_promoted(name: str, dtype: torch.dtype):
    reference = REFERENCES[name](8)
    patterns, state = draw(5, 8).to(dtype), draw(6, 8, seed=1).to(dtype)
    low = HopfieldEnergy.create(patterns, reference=reference, scale=2.0)
    exact = HopfieldEnergy.create(patterns.double(), reference=reference, scale=2.0)
    moved = low.step(state)
    assert torch.finfo(moved.dtype).bits >= 32
    torch.testing.assert_close(moved.double(), exact.step(state.double()), rtol=1e-4, atol=1e-4)
    # A state that was rounded again is still one of the map's range.
    assert low(moved.to(dtype)).isfinite().all()
    assert torch.finfo(low(moved.to(dtype)).dtype).bits >= 32
    torch.testing.assert_close(low(moved).double(), exact(exact.step(state.double())), rtol=2e-3, atol=2e-3)


@every_row("name", REFERENCES)
def test_large_scores_stay_finite(name: str):
    energy = HopfieldEnergy.create(100 * draw(5, 4), reference=REFERENCES[name](4), scale=32.0)
    state = energy.step(1e4 * draw(6, 4, seed=1)).requires_grad_()
    assert state.isfinite().all()
    value = energy.step(state).sum()
    (slope,) = torch.autograd.grad(value, state, create_graph=True)
    assert slope.isfinite().all()


def test_the_inverse_temperature_is_by_default_that_of_attention():
    points, state = draw(2, 7, 16), draw(2, 3, 16, seed=1)
    for energy in (HopfieldEnergy.create(points), LogSumReLU.create(0.1 * points)):
        torch.testing.assert_close(energy.scale, torch.full((2,), 0.25, dtype=F64), rtol=1e-15, atol=0)
    expected = ood_score(state, kind="she", memory=points, scale=0.25)
    torch.testing.assert_close(ood_score(state, kind="she", memory=points), expected)
    expected = boosting_energy(state, points, points + 1, scale=0.25)
    torch.testing.assert_close(boosting_energy(state, points, points + 1), expected)
    torch.testing.assert_close(ood_score(state), -torch.logsumexp(state, -1))
    assert bounds.capacity(16, radius=4.0) == bounds.capacity(16, radius=4.0, scale=0.25)


# --- input -----------------------------------------------------------------------------------------------------------

PATTERNS = draw(2, 5, 4)
REFUSED = {
    "scale 0": (lambda: HopfieldEnergy.create(PATTERNS, scale=0.0), ValueError, "positive"),
    "negative scale": (lambda: HopfieldEnergy.create(PATTERNS, scale=-1), ValueError, "positive"),
    "NaN scale": (lambda: HopfieldEnergy.create(PATTERNS, scale=float("nan")), ValueError, "positive"),
    "scale of another batch": (
        lambda: HopfieldEnergy.create(PATTERNS, scale=torch.ones(3)),
        ValueError,
        r"\(3,\).*\(2,\)",
    ),
    "scale of more dimensions": (
        lambda: HopfieldEnergy.create(PATTERNS[0], scale=torch.ones(2)),
        ValueError,
        "broadcast",
    ),
    "scale a bool": (lambda: HopfieldEnergy.create(PATTERNS, scale=True), TypeError, "True"),
    "scale whole numbers": (lambda: HopfieldEnergy.create(PATTERNS, scale=torch.ones(2).long()), TypeError, "int64"),
    "NaN patterns": (lambda: HopfieldEnergy.create(PATTERNS * torch.nan), ValueError, "finite"),
    "no patterns": (lambda: HopfieldEnergy.create(PATTERNS[:, :0]), ValueError, r"\(2, 0, 4\)"),
    "complex numbers": (lambda: HopfieldEnergy.create(PATTERNS.to(torch.complex64)), TypeError, "complex64"),
    "no potential": (lambda: HopfieldEnergy.create([1.0]), TypeError, "list"),
    "no reference": (lambda: HopfieldEnergy.create(PATTERNS, reference=torch.tanh), TypeError, "builtin"),
    "reference on another space": (
        lambda: HopfieldEnergy.create(PATTERNS, reference=measures.Spin.create(dim=3)),
        ValueError,
        r"\(3,\).*\(4,\)",
    ),
    "reference of another batch": (
        lambda: HopfieldEnergy.create(PATTERNS, reference=measures.Spin.create(torch.zeros(3, 4))),
        ValueError,
        r"\(3,\).*\(2,\)",
    ),
    "state of another width": (lambda: HopfieldEnergy.create(PATTERNS)(draw(2, 3)), ValueError, r"\(2, 3\)"),
    "state of another batch": (lambda: HopfieldEnergy.create(PATTERNS).step(draw(3, 4)), ValueError, r"\(3, 4\)"),
    "state whole numbers": (lambda: HopfieldEnergy.create(PATTERNS)(torch.ones(2, 4).long()), TypeError, "int64"),
    "damping 0": (lambda: HopfieldEnergy.create(PATTERNS).step(draw(2, 4), damping=0.0), ValueError, r"\(0, 2\)"),
    "damping 2": (lambda: HopfieldEnergy.create(PATTERNS).step(draw(2, 4), damping=2.0), ValueError, r"\(0, 2\)"),
    "damping beyond 1": (
        lambda: HopfieldEnergy.create(PATTERNS, reference=activations.Tanh.create()).step(draw(2, 4), damping=1.1),
        ValueError,
        r"\(0, 1\]",
    ),
    "damping NaN": (
        lambda: HopfieldEnergy.create(PATTERNS).step(draw(2, 4), damping=float("nan")),
        ValueError,
        "damping",
    ),
    "steps": (lambda: HopfieldEnergy.create(PATTERNS).descend(draw(2, 4), steps=-1), ValueError, "-1"),
    "unknown keyword": (lambda: HopfieldEnergy.create(PATTERNS, beta=2.0), TypeError, "beta"),  # pyright: ignore
}


@every_row("name", REFUSED)
def test_bad_input_is_one_clear_error(name: str):
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()


def test_an_energy_is_final():
    with pytest.raises(TypeError, match="final"):

        class Other(HopfieldEnergy):
            pass


@every_row("kind", ["int", "float", "tensor", "parameter"])
def test_scale_of_every_kind_and_it_trains(kind: str):
    parameter = torch.nn.Parameter(torch.tensor(2.0, dtype=F64))
    scale = {"int": 2, "float": 2.0, "tensor": torch.tensor(2.0, dtype=F64), "parameter": parameter}[kind]
    energy = HopfieldEnergy.create(PATTERNS, scale=scale)
    torch.testing.assert_close(energy(draw(2, 4)), HopfieldEnergy.create(PATTERNS, scale=2.0)(draw(2, 4)))
    if kind == "parameter":
        (slope,) = torch.autograd.grad(energy(draw(2, 4)).sum(), parameter)
        size = 1e-6
        above, below = (HopfieldEnergy.create(PATTERNS, scale=2.0 + shift)(draw(2, 4)).sum() for shift in (size, -size))
        torch.testing.assert_close(slope, (above - below) / (2 * size), rtol=1e-7, atol=1e-9)
