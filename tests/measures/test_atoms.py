"""Atoms: attention, masks, the zero measure, KL at all distances, gradients for every tensor."""

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import logsumexp, softmax
from tests.support.rows import every_row
from torch import Tensor

from massieu.measures import Atoms, mixture


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@st.composite
def problems(draw_from):
    """Atoms and eta with repeated, tiny and huge points, and masks of any density, the full one included."""
    seed = draw_from(st.integers(0, 2**32 - 1))
    batch = draw_from(st.sampled_from([(), (2,), (2, 3)]))
    query = draw_from(st.sampled_from([(), (1,), (3,), (2, 2)]))
    count = draw_from(st.integers(1, 9))
    dimension = draw_from(st.integers(1, 5))
    scale = draw_from(st.sampled_from([0.0, 1e-4, 1.0, 30.0]))
    hidden = draw_from(st.sampled_from([0.0, 0.5, 1.0]))
    random = np.random.default_rng(seed)
    points = random.standard_normal((*batch, count, dimension))
    points[..., random.integers(count), :] = points[..., 0, :]
    log_weight = random.standard_normal((*batch, count))
    log_weight[random.random(log_weight.shape) < hidden] = -np.inf
    eta = scale * random.standard_normal((*batch, *query, dimension))
    return points, log_weight, eta


@pytest.mark.medium
@given(problems())
def test_agrees_with_explicit_weights(problem):
    points, log_weight, eta = problem
    measure = Atoms.create(torch.from_numpy(points), torch.from_numpy(log_weight))
    lead = eta.shape[:-1]
    batch = points.ndim - 2
    flat = eta.reshape(*points.shape[:-2], -1, eta.shape[-1])
    scores = flat @ np.swapaxes(points, -1, -2) + log_weight[..., None, :]
    empty = np.isneginf(scores).all(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        expected = logsumexp(scores, -1)
        weights = np.where(empty[..., None], 0.0, softmax(np.where(empty[..., None], 0.0, scores), -1))
    mean = weights @ points
    deviations = points[..., None, :, :] - mean[..., None, :]
    fisher = np.einsum("...n,...ni,...nj->...ij", weights, deviations, deviations)
    point = torch.from_numpy(eta)
    assert measure.batch_shape == points.shape[:batch]
    np.testing.assert_allclose(measure.log_partition(point).numpy(), expected.reshape(lead), rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(measure.mean(point).numpy(), mean.reshape(eta.shape), rtol=1e-10, atol=1e-10)
    fisher = fisher.reshape(*eta.shape, eta.shape[-1])
    np.testing.assert_allclose(measure.fisher(point).numpy(), fisher, rtol=1e-9, atol=1e-10)
    values = np.random.default_rng(0).standard_normal((*points.shape[:-1], 4))
    expectation = measure.expectation(point, torch.from_numpy(values))
    np.testing.assert_allclose(expectation.numpy(), (weights @ values).reshape(*lead, 4), rtol=1e-10, atol=1e-10)
    relative = np.where(
        weights > 0, np.log(np.where(weights > 0, weights, 1)) - np.where(weights > 0, log_weight[..., None, :], 0), 0
    )
    entropy = np.where(empty, -np.inf, -(weights * relative).sum(-1)).reshape(lead)
    np.testing.assert_allclose(measure.entropy(point).numpy(), entropy, rtol=1e-9, atol=1e-9)


def test_mean_is_scaled_dot_product_attention():
    query = draw(2, 3, 5, 4, seed=1)
    key = draw(2, 3, 7, 4, seed=2)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, key)
    torch.testing.assert_close(Atoms.create(key).mean(query / 2), expected)
    value = draw(2, 3, 7, 6, seed=3)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(Atoms.create(key).expectation(query / 2, value), expected)


def test_entropy_of_unweighted_atoms_is_shannons():
    points = draw(6, 3)
    weights = torch.softmax(points @ draw(3, seed=1), 0)
    expected = torch.special.entr(weights).sum()
    torch.testing.assert_close(Atoms.create(points).entropy(draw(3, seed=1)), expected)


def test_selective_log_partition_is_a_divergence_and_ignores_the_key_origin():
    """KL(uniform‖p) = log Z − log n − mean score = kl(0, eta), whatever constant is added to the keys (S25)."""
    points = draw(8, 4)
    eta = draw(5, 4, seed=1)
    origin = 3 * draw(4, seed=2)
    measure = Atoms.create(points)
    moved = Atoms.create(points + origin)
    selective = measure.log_partition(eta) - math.log(8) - (eta @ points.T).mean(-1)
    torch.testing.assert_close(measure.kl(torch.zeros_like(eta), eta), selective, atol=1e-12, rtol=0)
    torch.testing.assert_close(moved.kl(torch.zeros_like(eta), eta), selective, atol=1e-12, rtol=0)
    torch.testing.assert_close(moved.log_partition(eta), measure.log_partition(eta) + eta @ origin)


def test_directions_orthogonal_to_all_differences_change_nothing():
    """The map from eta to the mean is one-to-one only modulo their complement (S6)."""
    points = draw(3, 6)
    _, _, directions = torch.linalg.svd(points[1:] - points[:1])
    eta = draw(6, seed=1)
    measure = Atoms.create(points)
    torch.testing.assert_close(measure.mean(eta + 5 * directions[-1]), measure.mean(eta), atol=1e-12, rtol=0)
    assert measure.kl(eta, eta + 5 * directions[-1]) < 1e-15


def exact_kl(points: Tensor, log_weight: Tensor, eta_p: Tensor, eta_q: Tensor) -> float:
    mpmath.mp.dps = 60

    def scores(eta: Tensor) -> list:
        return [
            mpmath.mpf(w) + sum(mpmath.mpf(a) * mpmath.mpf(b) for a, b in zip(x, eta.tolist(), strict=True))
            for x, w in zip(points.tolist(), log_weight.tolist(), strict=True)
            if w > -math.inf
        ]

    p = scores(eta_p)
    q = scores(eta_q)
    log_zp, log_zq = (mpmath.log(sum(mpmath.exp(s) for s in score)) for score in (p, q))
    return float(sum(mpmath.exp(a - log_zp) * (a - log_zp - b + log_zq) for a, b in zip(p, q, strict=True)))


@every_row("distance", [1e-6, 1e-4, 1e-2, 1.0, 10.0, 100.0])
@every_row(("size", "offset"), [(1.0, 0.0), (1.0, 30.0), (5.0, 0.0), (0.01, 1.0)])
def test_kl_keeps_its_digits_in_float32(distance, size, offset):
    points = size * draw(9, 4, seed=0, dtype=torch.float32) + offset
    log_weight = draw(9, seed=10, dtype=torch.float32)
    log_weight[3] = -torch.inf
    eta_p = draw(4, seed=20, dtype=torch.float32)
    direction = draw(4, seed=30, dtype=torch.float32)
    eta_q = eta_p + distance * direction / direction.norm()
    expected = exact_kl(points, log_weight, eta_p, eta_q)
    assert Atoms.create(points, log_weight).kl(eta_p, eta_q).item() == pytest.approx(expected, rel=1e-5)


def test_textbook_difference_would_not():
    points = draw(9, 4, dtype=torch.float32)
    eta = draw(4, seed=1, dtype=torch.float32)
    delta = 1e-5 * draw(4, seed=2, dtype=torch.float32)
    measure = Atoms.create(points)
    difference = measure.log_partition(eta + delta) - measure.log_partition(eta) - measure.mean(eta) @ delta
    exact = exact_kl(points, torch.zeros(9), eta, eta + delta)
    assert abs(difference.item() - exact) > 10 * exact


def test_kl_of_a_rare_atom_far_away():
    """p·eᶜ is moderate although eᶜ alone overflows float32."""
    points = torch.tensor([[0.0], [1.0], [200.0]])
    log_weight = torch.tensor([0.0, 0.0, -195.0])
    eta_p = torch.tensor([0.0])
    eta_q = torch.tensor([0.97])
    expected = exact_kl(points, log_weight, eta_p, eta_q)
    assert Atoms.create(points, log_weight).kl(eta_p, eta_q).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_measure_has_defined_values_and_no_gradient(dtype):
    points = draw(2, 4, 3, dtype=dtype)
    log_weight = torch.zeros(2, 4, dtype=dtype)
    log_weight[1] = -torch.inf
    points, eta = points.requires_grad_(), draw(2, 5, 3, seed=1, dtype=dtype).requires_grad_()
    log_weight = log_weight.requires_grad_()
    measure = Atoms.create(points, log_weight)
    log_partition = measure.log_partition(eta)
    mean = measure.mean(eta)
    fisher = measure.fisher(eta)
    kl = measure.kl(eta, 2 * eta)
    entropy = measure.entropy(eta)
    assert (log_partition[1] == -torch.inf).all()
    assert (entropy[1] == -torch.inf).all()
    for number in (mean[1], fisher[1], kl[1], measure.fisher_vp(eta, eta)[1]):
        assert (number == 0).all()
    for number in (log_partition, mean, fisher, kl, entropy):
        gradients = torch.autograd.grad(number.sum(), (eta, points, log_weight), retain_graph=True)
        for gradient in gradients:
            assert gradient.isfinite().all()
            assert (gradient[1] == 0).all()
        assert (gradients[1][0] != 0).any()
    tilted = measure.tilt(torch.ones(2, 3, dtype=dtype))
    assert (tilted.log_partition(eta)[1] == -torch.inf).all()
    assert tilted.log_partition(eta)[0].isfinite().all()
    with pytest.raises(ValueError, match="zero measure"):
        measure.sample(eta)


def explicit(name: str, points: Tensor, log_weight: Tensor, eta: Tensor, other: Tensor) -> Tensor:
    def scores(point: Tensor) -> Tensor:
        return torch.einsum("bnd,bqd->bqn", points, point) + log_weight[:, None]

    if name == "log_partition":
        return torch.logsumexp(scores(eta), -1)
    p = torch.softmax(scores(eta), -1)
    log_p = torch.log_softmax(scores(eta), -1)
    mean = torch.einsum("bqn,bnd->bqd", p, points)
    if name == "mean":
        return mean
    if name == "fisher":
        return torch.einsum("bqn,bnd,bne->bqde", p, points, points) - mean.unsqueeze(-1) * mean.unsqueeze(-2)
    if name == "entropy":
        return -(p * (log_p - log_weight[:, None])).sum(-1)
    return (p * (log_p - torch.log_softmax(scores(other), -1))).sum(-1)


@every_row("name", ["log_partition", "mean", "fisher", "entropy", "kl"])
def test_gradients_for_every_tensor(name):
    """First and second derivatives, by autograd and by torch.func, against the explicit weights."""
    tensors = draw(2, 4, 3), draw(2, 4, seed=1), draw(2, 3, 3, seed=2), draw(2, 3, 3, seed=3)
    measured_shape = explicit(name, *tensors).shape
    cotangent = draw(*measured_shape, seed=4)

    def ours(points: Tensor, log_weight: Tensor, eta: Tensor, other: Tensor) -> Tensor:
        measure = Atoms.create(points, log_weight)
        value = measure.kl(eta, other) if name == "kl" else getattr(measure, name)(eta)
        return (value * cotangent).sum()

    def theirs(*arguments: Tensor) -> Tensor:
        return (explicit(name, *arguments) * cotangent).sum()

    reference = tuple(range(4 if name == "kl" else 3))
    expected = torch.func.grad(theirs, reference)(*tensors)
    torch.testing.assert_close(torch.func.grad(ours, reference)(*tensors), expected, atol=1e-9, rtol=1e-9)
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    result = torch.autograd.grad(ours(*leaves), [leaves[i] for i in reference], create_graph=True)
    torch.testing.assert_close(result, expected, atol=1e-9, rtol=1e-9)

    def second(function):
        return torch.func.grad(
            lambda *arguments: sum((g * g).sum() for g in torch.func.grad(function, reference)(*arguments)), reference
        )

    curvature = second(theirs)(*tensors)
    torch.testing.assert_close(second(ours)(*tensors), curvature, atol=1e-8, rtol=1e-8)
    total = sum((g * g).sum() for g in result)
    result = torch.autograd.grad(total, [leaves[i] for i in reference])
    torch.testing.assert_close(result, curvature, atol=1e-8, rtol=1e-8)


def test_samples_are_points_drawn_by_weight():
    measure = Atoms.create(torch.tensor([[0.0], [1.0], [5.0]]), torch.tensor([0.0, math.log(3.0), -math.inf]))
    draws = measure.sample(torch.zeros(2, 1), (4, 5000), generator=torch.Generator().manual_seed(0))
    assert draws.shape == (4, 5000, 2, 1)
    assert set(draws.unique().tolist()) == {0.0, 1.0}
    assert draws.mean().item() == pytest.approx(0.75, abs=5 * math.sqrt(0.1875 / draws.numel()))


def test_a_boolean_weight_keeps_where_true():
    points = draw(2, 5, 3)
    keep = torch.tensor([[True, False, True, True, False], [True] * 5])
    eta = draw(2, 4, 3, seed=1)
    expected = Atoms.create(points[0, keep[0]]).log_partition(eta[0])
    torch.testing.assert_close(Atoms.create(points, keep).log_partition(eta)[0], expected)


@every_row(
    ("points", "log_weight", "message"),
    [
        (torch.zeros(3), None, r"points must have shape .*got \(3,\)"),
        (torch.zeros(0, 3), None, r"N, d ≥ 1, got \(0, 3\)"),
        (torch.zeros(2, 3), torch.zeros(3), r"log_weight must have shape \(2,\).*got \(3,\)"),
        (torch.tensor([[math.nan]]), None, "points must be finite"),
        (torch.tensor([[1.0]]), torch.tensor([math.nan]), "NaN or"),
        (torch.tensor([[1.0]]), torch.tensor([math.inf]), r"\+inf"),
    ],
)
def test_bad_atoms_are_refused(points, log_weight, message):
    with pytest.raises(ValueError, match=message):
        Atoms.create(points, log_weight)


def test_bad_values_are_refused():
    with pytest.raises(TypeError, match=r"points must be real, got a tensor of torch\.complex64"):
        Atoms.create(torch.zeros(2, 3, dtype=torch.complex64))
    measure = Atoms.create(torch.zeros(4, 2, 3))
    with pytest.raises(ValueError, match=r"values must have shape \(4, 2, 'v'\).*got \(4, 3, 5\)"):
        measure.expectation(torch.zeros(4, 3), torch.zeros(4, 3, 5))


def test_no_entropy_is_told_of_nan():
    keys = Atoms.create(torch.eye(2))
    unknown = torch.tensor([math.nan, 0.0])
    assert keys.entropy(unknown).isnan()
    assert mixture(torch.zeros(1), [keys]).entropy(unknown).isnan()
