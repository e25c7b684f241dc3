"""Laws of every measure and composition at drawn points."""

import math

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from numpy.polynomial.legendre import leggauss
from tests.support.measures.strategies import Numbers, Scene, scenes
from torch import Tensor
from torch.utils import _pytree as pytree

from massieu.measures import Atoms, Constant, Measure, Poisson, Spin, affine, convolve, mixture, power, product

F64 = torch.float64
EPS = torch.finfo(F64).eps


def close(actual: Tensor, expected: Tensor, size: Tensor | float, factor: float = 1e4) -> None:
    """Equal to `factor` float64 roundings of `size`; equal infinities are equal."""
    gap = torch.where(actual == expected, 0.0, (actual - expected).abs())
    allowed = factor * EPS * (torch.as_tensor(size) + expected.abs() + 1e-200)
    assert bool((gap <= allowed).all()), (
        f"got {actual.tolist()}, expected {expected.tolist()}, allowed {allowed.tolist()}"
    )


def norm(vector: Tensor) -> Tensor:
    return vector.norm(dim=-1)


def reach(measure: Measure, *points: Tensor) -> Tensor:
    """How large the numbers that A is a difference of are at these points."""
    sizes = [measure.log_partition(x).abs() + (x * measure.mean(x)).abs().sum(-1) for x in points]
    # What overflows obeys no law.
    assume(all(bool((size < 1e30).all()) for size in sizes))
    # What is cancelled inside: parameters of size 1e3 against each other.
    return (
        1
        + sum(sizes[1:], sizes[0])
        + sum(leaf.abs().nan_to_num(posinf=0, neginf=0).sum() for leaf in pytree.tree_leaves(measure))
    )


def sight(measure: Measure) -> float:
    """The least variance that is told from rounding of the measure's points."""
    sizes = [float(leaf.abs().nan_to_num(posinf=0, neginf=0).sum()) for leaf in pytree.tree_leaves(measure)]
    return (64 * EPS * (1 + max(sizes))) ** 2


def convexity(scene: Scene) -> None:
    measure, eta, other, _ = scene.build()
    size = reach(measure, eta, other)
    chord = (measure.log_partition(eta) + measure.log_partition(other)) / 2
    middle = measure.log_partition((eta + other) / 2)
    assert bool((middle <= chord + 1e2 * EPS * size).all())


def fenchel_young(scene: Scene) -> None:
    measure, eta, other, _ = scene.build()
    size = reach(measure, eta, other)
    entropy = measure.entropy(eta)
    mean = measure.mean(eta)
    close(entropy, measure.log_partition(eta) - (eta * mean).sum(-1), size)
    loose = measure.log_partition(other) - (other * mean).sum(-1)
    assert bool((entropy <= loose + 1e3 * EPS * (size + (other * mean).abs().sum(-1))).all())


def divergence(scene: Scene) -> None:
    measure, eta, other, _ = scene.build()
    size = reach(measure, eta, other)
    value = measure.kl(eta, other)
    assert bool((value >= 0).all()), value
    assert bool((measure.kl(eta, eta) == 0).all())
    slope = (measure.mean(eta) * (other - eta)).abs().sum(-1)
    bregman = measure.log_partition(other) - measure.log_partition(eta) - (measure.mean(eta) * (other - eta)).sum(-1)
    close(value, bregman, size + slope)


def divergence_in_float32(scene: Scene) -> None:
    """To 1e-5, against the float64 integral of the Fisher information, or the Bregman difference where that has six digits."""
    measure, eta, _, direction = scene.build()
    distance = 10.0 ** -(1 + scene.seed % 6)
    step = Numbers.exact(eta + distance * direction / norm(direction).unsqueeze(-1))
    held = measure._in_domain(step + (step - eta))
    assume(held is None or bool(held.all()))
    single = measure.to(torch.float32)
    delta = step - eta
    nodes, weights = GAUSS
    fisher = measure.fisher(eta.unsqueeze(-2) + nodes.unsqueeze(-1) * delta.unsqueeze(-2))
    curvature = torch.einsum("...i,...nij,...j->...n", delta, fisher, delta)
    expected = (curvature * (1 - nodes) * weights).sum(-1)
    rounding = 4e-7 * norm(delta) ** 2 * measure.fisher(eta).diagonal(dim1=-2, dim2=-1).sum(-1)
    bregman = measure.log_partition(step) - measure.log_partition(eta) - (measure.mean(eta) * delta).sum(-1)
    noise = 1e2 * EPS * reach(measure, eta, step)
    exact = noise < 1e-6 * bregman
    expected, rounding = torch.where(exact, bregman, expected), rounding + torch.where(exact, noise, 0.0)
    actual = single.kl(eta.float(), step.float()).double()
    # Scores of size 100 have roundings of 1e-5 in float32.
    relative = 1e-5 + 2 * torch.finfo(torch.float32).eps * reach(measure, eta)
    allowed = relative * expected + rounding + 1e-35
    assert bool(((actual - expected).abs() <= allowed).all()), f"{actual.tolist()} {expected.tolist()} {distance}"


GAUSS = tuple(torch.from_numpy(0.5 * (shift + part)) for shift, part in zip((1, 0), leggauss(16), strict=True))


def mean_is_the_gradient(scene: Scene) -> None:
    measure, eta, _, _ = scene.build()
    leaf = eta.requires_grad_()
    (gradient,) = torch.autograd.grad(measure.log_partition(leaf).sum(), leaf)
    mean = measure.mean(eta.detach())
    assume(bool(mean.isfinite().all()))
    close(mean, gradient, 1 + norm(mean).unsqueeze(-1), factor=1e5)


def fisher_is_the_derivative(scene: Scene) -> None:
    measure, eta, _, direction = scene.build()
    fisher = measure.fisher(eta)
    assume(bool((fisher.abs() < 1e30).all()))
    size = fisher.diagonal(dim1=-2, dim2=-1).sum(-1)
    close(fisher, fisher.mT, size[..., None, None])
    smallest = torch.linalg.eigvalsh(fisher)[..., 0]
    assert bool((smallest >= -1e2 * EPS * size - 1e-300).all()), smallest
    image = (fisher @ direction.unsqueeze(-1)).squeeze(-1)
    scale = ((size + sight(measure) / EPS) * norm(direction)).unsqueeze(-1)
    close(measure.fisher_vp(eta, direction), image, scale)
    leaf = eta.requires_grad_()
    mean = measure.mean(leaf)
    derivative = torch.zeros_like(eta)
    if mean.requires_grad:
        (derivative,) = torch.autograd.grad((mean * direction).sum(), leaf, materialize_grads=True)
    # The variance of a law that is all but certain is what rounding leaves of a mean.
    moment = ((1 + norm(mean) ** 2) * norm(direction)).unsqueeze(-1)
    # torch's trigamma is right to 5e-10.
    close(derivative, image, scale + moment, factor=1e7)


def cumulants_are_derivatives(scene: Scene) -> None:
    measure, eta, _, direction = scene.build()
    cumulants = measure.cumulants(eta, direction, 4)
    second = (direction * measure.fisher_vp(eta, direction)).sum(-1)
    close(cumulants[..., 0], (direction * measure.mean(eta)).sum(-1), reach(measure, eta))
    close(cumulants[..., 1], second, sight(measure) / EPS, factor=1e7)
    # The bounds on rounding are moments; a law of rare large values has small cumulants of large parts.
    t = torch.zeros_like(second).requires_grad_()
    line = measure.cumulants(eta + t.unsqueeze(-1) * direction, direction, 3)
    for order in (2, 3):
        slope = torch.zeros_like(second)
        if line.requires_grad:
            (slope,) = torch.autograd.grad(line[..., order - 1].sum(), t, retain_graph=True, materialize_grads=True)
        size = cumulants.abs().amax(-1) + second.abs() ** ((order + 1) / 2)
        close(cumulants[..., order], slope, size, factor=1e7)


def tilting_is_a_group_action(scene: Scene) -> None:
    measure, eta, other, _ = scene.build()
    first = (eta[..., 0, :] + other[..., 0, :]) / 2
    second = (eta[..., 1, :] - other[..., 0, :]) / 4
    total = first + second
    point = (eta[..., 2:, :] - total.unsqueeze(-2)) / 8
    held = [measure._in_domain(x) for x in (first.unsqueeze(-2), total.unsqueeze(-2), point + total.unsqueeze(-2))]
    assume(all(part is None or bool(part.all()) for part in held))
    once = measure.tilt(total)
    twice = measure.tilt(first).tilt(second)
    size = reach(measure, point + total.unsqueeze(-2), total.unsqueeze(-2), first.unsqueeze(-2))
    close(twice.log_partition(point), once.log_partition(point), size)
    close(
        once.log_partition(point),
        measure.log_partition(point + total.unsqueeze(-2)) - measure.log_partition(total.unsqueeze(-2)),
        size,
    )
    close(twice.mean(point), once.mean(point), size.unsqueeze(-1), factor=1e6)


def affine_maps_compose(scene: Scene) -> None:
    measure, eta, _, _ = scene.build()
    assume(measure._in_domain(eta) is None)
    n = scene.numbers
    one = n.normal(2, scene.dim)
    two = n.normal(3, 2)
    b = n.scaled(2)
    c = n.scaled(3)
    twice = affine(affine(measure, one, b), two, c)
    together = affine(measure, two @ one, (two @ b.unsqueeze(-1)).squeeze(-1) + c)
    point = scene.size * n.normal(2, 3)
    size = reach(together, point)
    close(twice.log_partition(point), together.log_partition(point), size)
    close(twice.mean(point), together.mean(point), size.unsqueeze(-1), factor=1e6)


def compositions_add_up(scene: Scene) -> None:
    """Products and sums add, powers multiply, a mixture is a log-sum-exp."""
    measure, eta, other, _ = scene.build()
    value = measure.log_partition(eta)
    joint = product(measure, measure)
    close(joint.log_partition(torch.cat([eta, other], -1)), value + measure.log_partition(other), 0.0)
    close(convolve(measure, measure, measure).log_partition(eta), 3 * value, 0.0)
    close(power(measure, 3).log_partition(eta), 3 * value, reach(measure, eta))
    count = 1 + scene.seed % 3
    weight = scene.numbers.normal(count)
    times = torch.arange(1.0, count + 1)
    mixed = mixture(weight, [power(measure, k) for k in range(1, count + 1)])
    terms = weight.unsqueeze(-2) + times * value.unsqueeze(-1)
    close(mixed.log_partition(eta), torch.logsumexp(terms, -1), reach(measure, eta))


def lower_bound_gap_is_a_divergence(scene: Scene) -> None:
    measure, eta, _, _ = scene.build()
    size = reach(measure, eta)
    weight = scene.numbers.normal(2)
    mixed = mixture(weight, [measure, convolve(measure, measure)])
    share = torch.softmax(scene.numbers.normal(2).flip(-1), -1)
    gate = mixed.responsibilities(eta)
    gap = mixed.log_partition(eta) - mixed.lower_bound(eta, share)
    close(gate.sum(-1), torch.ones_like(gate[..., 0]), 0.0)
    values = torch.stack([measure.log_partition(eta), 2 * measure.log_partition(eta)], -1) + weight.unsqueeze(-2)
    share = share.unsqueeze(-2)
    expected = (share * (share.log() - torch.log_softmax(values, -1))).sum(-1)
    close(gap, expected, size + values.abs().sum(-1))


def batched_is_one_by_one(scene: Scene) -> None:
    measure, eta, other, direction = scene.build()
    functions = (
        lambda x, y, v: measure.mean(x),
        lambda x, y, v: measure.fisher_vp(x, v),
        lambda x, y, v: measure.kl(x, y),
    )
    size = float(reach(measure, eta, other).amax())
    axis = len(scene.batch)
    for function in functions:
        whole = function(eta, other, direction).select(axis, 1)
        close(
            whole,
            function(*(x.select(axis, 1) for x in (eta, other, direction))),
            size + whole.abs().amax(),
            factor=1e2,
        )


def float32_is_float64(scene: Scene) -> None:
    measure, eta, _, direction = scene.build()
    single = measure.to(torch.float32)
    point = eta.float()
    held = measure._in_domain(eta)
    assert held is None or bool(held.all())
    eps = torch.finfo(torch.float32).eps
    mean = measure.mean(eta)
    trace = measure.fisher(eta).diagonal(dim1=-2, dim2=-1).sum(-1)
    spread = trace.sqrt()
    # A relative change of eta and of the measure's numbers by a few roundings.
    input = 64 * eps * (1 + norm(eta)) * reach(measure, eta)
    for name, wanted, size in (
        ("log_partition", measure.log_partition(eta), 1 + norm(mean)),
        ("mean", mean, 1 + spread + trace),
        ("fisher_vp", measure.fisher_vp(eta, direction), (1 + trace + spread**3) * (1 + norm(direction))),
    ):
        found = (
            single.fisher_vp(point, direction.float()) if name == "fisher_vp" else getattr(single, name)(point)
        ).double()
        allowed = input * size
        allowed = allowed.unsqueeze(-1) if wanted.ndim > allowed.ndim else allowed
        representable = wanted.abs() < 1e37
        gap = torch.where(representable, (found - wanted).abs(), 0.0)
        assert bool((gap <= allowed + 1e-6 * wanted.abs()).all()), (
            f"{name}: {found.tolist()} {wanted.tolist()} {allowed.tolist()}"
        )


def nothing_is_nan(scene: Scene) -> None:
    """Value, first and second derivative, in both precisions."""
    measure, eta, other, direction = scene.build()
    value = measure.log_partition(eta)
    assert not bool(value.isnan().any())
    # What overflows is infinite, and an infinity less another is nothing: a mixture refuses to tell its mean there.
    assume(bool((value.abs() < 1e30).all()))
    mean = measure.mean(eta)
    fisher = measure.fisher(eta)
    assume(all(bool((number.abs() < 1e30).all() | number.isnan().any()) for number in (value, mean, fisher)))
    for dtype in (F64, torch.float32):
        own = measure.to(dtype)
        point = eta.to(dtype)
        leaf = point.clone().requires_grad_()
        value = own.log_partition(leaf)
        (gradient,) = torch.autograd.grad(value.sum(), leaf, create_graph=True)
        second = torch.zeros_like(point)
        if gradient.requires_grad:
            (second,) = torch.autograd.grad((gradient * direction).sum(), leaf, materialize_grads=True)
        numbers = {"value": value, "gradient": gradient, "second derivative": second, "mean": own.mean(point)}
        numbers |= {"Fisher": own.fisher(point), "entropy": own.entropy(point), "KL": own.kl(point, other.to(dtype))}
        for name, number in numbers.items():
            assert not bool(number.isnan().any()), f"{name} in {dtype}: {number.tolist()}"


def test_divergence_of_a_jump_between_the_nodes_of_the_quadrature():
    """Two far atoms as components: the Fisher information is a spike that eight nodes all miss."""
    apart = mixture(torch.zeros(2, dtype=F64), [Constant.create(torch.tensor([x], dtype=F64)) for x in (0.0, 1e3)])
    start = torch.tensor([-1.0], dtype=F64)
    end = torch.tensor([0.8], dtype=F64)
    # log(1 + e^800) − log(1 + e^−1000), where the mean is 0 to e^−1000.
    assert apart.kl(start, end).item() == pytest.approx(800.0)


def test_divergence_of_atoms_of_which_one_is_all_but_certain():
    atoms = Atoms.create(torch.tensor([[0.0], [-10.0]]))
    start = torch.tensor([6.0])
    end = torch.tensor([6.1])
    # The other has probability p = e^−60, and p·φ(c) for its log-ratio c = −1.
    assert atoms.kl(start, end).item() == pytest.approx(math.exp(-60) * math.exp(-1), rel=1e-5)


def test_a_component_without_a_share_does_not_overflow():
    mixed = mixture(torch.zeros(2), [Spin.create(dim=1), Poisson.create(torch.ones(1))])
    assert mixed.fisher(torch.tensor([64.0])).item() == pytest.approx(math.exp(64.0), rel=1e-5)


LAWS = {
    convexity: scenes(),
    fenchel_young: scenes(),
    divergence: scenes(),
    divergence_in_float32: scenes(sizes=(1.0, 0.0, 1e-6, 10.0)),
    mean_is_the_gradient: scenes(),
    fisher_is_the_derivative: scenes(),
    cumulants_are_derivatives: scenes(depth=1),
    tilting_is_a_group_action: scenes(sizes=(1.0, 0.0, 1e-6, 10.0)),
    affine_maps_compose: scenes(depth=1),
    compositions_add_up: scenes(depth=1),
    lower_bound_gap_is_a_divergence: scenes(depth=1),
    batched_is_one_by_one: scenes(depth=1),
    float32_is_float64: scenes(sizes=(1.0, 0.0, 1e-6, 10.0)),
    nothing_is_nan: scenes(sizes=(1.0, 0.0, 1e-6, 100.0, 1e4)),
}


@pytest.mark.medium
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much], database=None, derandomize=True)
@given(data=st.data())
def test_law(law, data):
    law(data.draw(LAWS[law]))
