"""The laws every measure obeys, as a check to run on one's own: `check_measure`.

It needs neither pytest nor SciPy, and it knows the measure by its public methods only.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError
from torch.utils import _pytree as pytree

from massieu.measures.base import Measure, MissingFormError

_EXACT = 1e-9
"""Relative tolerance, in float64, of two exact ways to one number."""

_SCALES = (0.0, 1e-4, 1.0, 15.0, 100.0)
_DERIVED = ("log_partition", "mean", "fisher", "entropy")


def check_measure(
    measure: Measure,
    *,
    log_partition: Callable[[Tensor], Tensor] | None = None,
    kl: Callable[[Tensor, Tensor], Tensor] | None = None,
    eta: Float[Tensor, "*batch_query_event"] | None = None,
    scales: Sequence[float] = _SCALES,
    samples: int = 20_000,
    compile_backend: str | None = None,
    seed: int = 0,
) -> None:
    """Check that `measure` obeys the laws of an exponential family's log-partition, and keeps its digits.

    The laws: shapes; log-partition and KL against the oracles given; mean and Fisher information against automatic and
    finite differences; second derivatives (`gradgradcheck`); convexity; KL ≥ 0, the right way round and accurate to
    1e-5 in float32 down to distance 1e-6; Fenchel–Young; tilting as a group action; samples within five standard
    errors; batched = loop = `vmap`; compiled = eager; float32 against float64; half precision promoted.

    Args:
        measure: The measure; its tensors are converted to each precision that is tried.
        log_partition: Oracle, from eta (*batch, query, *event) in float64 to A(eta): quadrature, enumeration, SciPy.
        kl: Oracle, from eta_p and eta_q of that shape to KL(p_{eta_p} ‖ p_{eta_q}).
        eta: At least two points in the domain's interior, one query dimension. Standard normal draws by default, and
            the origin where it is in the domain.
        scales: Lengths at which float32 is held against float64, along a drawn direction and its opposite; points
            outside the domain, or whose numbers float32 cannot hold, are left out.
        samples: Draws for each eta; the law is skipped for a measure without a sampler.
        compile_backend: Backend of `torch.compile` for compiled = eager, for instance "inductor" (takes a minute) or
            "aot_eager" (seconds); None leaves that law out.
        seed: Of the draws.

    Raises:
        AssertionError: a law is broken; the message names the law, the point and the two numbers.
    """
    subject = _subject(measure, eta, scales, seed)
    _check_shapes(subject)
    if log_partition is not None:
        for points in (subject.eta, subject.far):
            values = subject.measure.log_partition(points)
            _agree("log-partition = oracle", points, values, log_partition(points), _EXACT * (1 + values.abs()))
    _check_mean(subject)
    _check_fisher(subject)
    _check_second_derivatives(subject)
    _check_convexity(subject)
    _check_kl(subject, kl)
    _check_kl_of_close_parameters(subject)
    _check_fenchel_young(subject)
    _check_tilt(subject)
    _check_samples(subject, samples)
    _check_batching(subject)
    if compile_backend is not None:
        _check_compiled(subject, compile_backend)
    _check_precision(subject)


@dataclass(frozen=True)
class _Subject:
    """A measure in float64 and the points it is checked at."""

    measure: Measure
    eta: Tensor  # (*batch, query, *event)
    far: Tensor  # the same, at the scales asked for
    generator: torch.Generator

    @property
    def queries(self) -> int:
        """Which dimension of `eta` counts the queries."""
        return len(self.measure.batch_shape)

    def swapped(self) -> Tensor:
        """Each point's neighbour."""
        return self.eta.roll(1, self.queries)

    def basis(self) -> list[Tensor]:
        """Each coordinate's direction, in the shape of `eta`."""
        event = self.measure.event_shape
        identity = torch.eye(event.numel(), dtype=torch.float64, device=self.eta.device)
        return [row.reshape(event).expand(self.eta.shape) for row in identity]

    def fisher(self, eta: Tensor) -> Tensor:
        """The Fisher information as matrices, (*batch, query, n, n)."""
        size = self.measure.event_shape.numel()
        return self.measure.fisher(eta).reshape(*eta.shape[: self.queries + 1], size, size)

    def trace(self, eta: Tensor) -> Tensor:
        return self.fisher(eta).diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(0)

    def norm(self, vector: Tensor) -> Tensor:
        return self.measure._dot(vector, vector).sqrt()


def _subject(measure: Measure, eta: Tensor | None, scales: Sequence[float], seed: int) -> _Subject:
    measure = measure._to(torch.float64)
    device = pytree.tree_leaves(measure)[0].device
    generator = torch.Generator().manual_seed(seed)
    batch, event, queries = measure.batch_shape, measure.event_shape, len(measure.batch_shape)
    if eta is None:
        eta = torch.randn(*batch, 4, *event, dtype=torch.float64, generator=generator)
    eta = eta.to(device, torch.float64)
    origin = torch.zeros_like(eta.narrow(queries, 0, 1))
    eta = torch.cat([eta, _inside(measure, origin)], queries)

    directions = torch.randn(*batch, 1, *event, dtype=torch.float64, generator=generator).to(device)
    directions = directions / directions.abs().amax(tuple(range(-len(event), 0)), keepdim=True)
    far = [_inside(measure, sign * scale * directions) for scale in scales for sign in (1, -1)]
    return _Subject(measure, eta, torch.cat(far, queries), generator)


def _inside(measure: Measure, point: Tensor) -> Tensor:
    """The one-query `point`, or no query where some batch member does not have it in its domain."""
    inside = measure._in_domain(point)
    return point if inside is None or bool(inside.all()) else point.narrow(len(measure.batch_shape), 0, 0)


def _agree(law: str, eta: Tensor, actual: Tensor, expected: Tensor, tolerance: Tensor | float) -> None:
    """Fail at the worst entry; `eta` and the numbers share their leading (batch and query) dimensions."""
    if actual.shape != expected.shape:
        raise AssertionError(f"{law}: got shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    actual, expected = actual.detach().double(), expected.detach().double()
    error = (actual - expected).abs()
    # NaN is an error, equal infinities are not.
    broken = ~(error <= tolerance) & (actual != expected)
    if not bool(broken.any()):
        return
    excess = torch.where(broken, (error / tolerance).nan_to_num(nan=torch.inf), -1.0)
    index = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
    allowed = torch.as_tensor(tolerance, dtype=error.dtype, device=error.device).expand_as(error)[index]
    point = eta.detach()[index[: eta.ndim - 1]]
    raise AssertionError(
        f"{law}: broken at eta = {point.tolist()} (entry {index}): got {actual[index]:.12g}, "
        f"expected {expected[index]:.12g}, tolerance {allowed:.2g}"
    )


def _expand(scalar: Tensor, like: Tensor) -> Tensor:
    """A number per query, with singleton dimensions up to those of `like`."""
    return scalar.reshape((*scalar.shape, *[1] * (like.ndim - scalar.ndim)))


def _derivative(function: Callable[[Tensor], Tensor], eta: Tensor, direction: Tensor) -> Tensor:
    """Central five-point difference of `function` along `direction`; error h⁴."""
    step = 1e-3
    near = function(eta + step * direction) - function(eta - step * direction)
    far = function(eta + 2 * step * direction) - function(eta - 2 * step * direction)
    return (8 * near - far) / (12 * step)


def _check_shapes(subject: _Subject) -> None:
    measure, eta = subject.measure, subject.eta
    lead, event = eta.shape[: subject.queries + 1], measure.event_shape
    for name, shape in zip(_DERIVED, (lead, eta.shape, (*eta.shape, *event), lead), strict=True):
        actual = tuple(getattr(measure, name)(eta).shape)
        if actual != tuple(shape):
            raise AssertionError(f"shape of {name}: got {actual}, expected {tuple(shape)}")
    try:
        measure.log_partition(torch.cat([eta, eta], -1))
    except ValueError:
        return
    raise AssertionError(f"shapes: eta with an event shape other than {tuple(event)} did not raise ValueError")


def _check_mean(subject: _Subject) -> None:
    measure, eta = subject.measure, subject.eta
    for points in (eta, subject.far):
        leaf = points.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(measure.log_partition(leaf).sum(), leaf)
        mean = measure.mean(points)
        tolerance = _EXACT * (1 + mean.abs()) * (1 + _expand(subject.norm(points), mean))
        _agree("mean = gradient of the log-partition", points, mean, gradient, tolerance)
    mean = measure.mean(eta)
    for direction in subject.basis():
        difference = _derivative(measure.log_partition, eta, direction)
        slope = measure._dot(mean, direction)
        _agree("mean = finite difference of the log-partition", eta, slope, difference, 1e-6 * (1 + slope.abs()))


def _check_fisher(subject: _Subject) -> None:
    measure, eta = subject.measure, subject.eta
    fisher = subject.fisher(eta)
    size = 1 + fisher.abs().amax((-2, -1))
    pullback = torch.func.vjp(torch.func.grad(lambda point: measure.log_partition(point).sum()), eta)[1]
    for index, direction in enumerate(subject.basis()):
        column = fisher[..., index].reshape(eta.shape)
        scale = _expand(size, column)
        _agree("Fisher = second derivative of the log-partition", eta, column, pullback(direction)[0], _EXACT * scale)
        difference = _derivative(measure.mean, eta, direction)
        _agree("Fisher = finite difference of the mean", eta, column, difference, 1e-6 * scale)
        _agree("fisher_vp = Fisher times vector", eta, measure.fisher_vp(eta, direction), column, _EXACT * scale)
    smallest = torch.linalg.eigvalsh(fisher).amin(-1)
    # The measure's own tensors may have been rounded to float32.
    _agree("Fisher is positive semi-definite", eta, smallest.clamp_max(0), torch.zeros_like(size), 1e-6 * size)


def _check_second_derivatives(subject: _Subject) -> None:
    # The first point and the last, by default the origin: the check's cost is quadratic.
    ends = torch.cat([subject.eta.narrow(subject.queries, i, 1) for i in (0, -1)], subject.queries).requires_grad_()
    try:
        torch.autograd.gradgradcheck(subject.measure.log_partition, (ends,))
    except GradcheckError as error:
        raise AssertionError(f"gradgradcheck of the log-partition: {error}") from error


def _check_convexity(subject: _Subject) -> None:
    measure, eta, other = subject.measure, subject.eta, subject.swapped()
    middle = measure.log_partition((eta + other) / 2)
    chord = (measure.log_partition(eta) + measure.log_partition(other)) / 2
    _agree("midpoint convexity", eta, (middle - chord).clamp_min(0), torch.zeros_like(chord), 1e-12 * (1 + chord.abs()))


def _check_kl(subject: _Subject, oracle: Callable[[Tensor, Tensor], Tensor] | None) -> None:
    measure, eta, other = subject.measure, subject.eta, subject.swapped()
    divergence = measure.kl(eta, other)
    zero = torch.zeros_like(divergence)
    _agree("KL ≥ 0", eta, divergence.clamp_max(0), zero, 0.0)
    _agree("KL of equal parameters = 0", eta, measure.kl(eta, eta), zero, 0.0)
    bregman, tolerance = _bregman(measure, eta, other)
    _agree("KL(p‖q) = A(q) − A(p) − mean(p)·(q − p)", eta, divergence, bregman, 1e5 * tolerance)
    if oracle is not None:
        _agree("KL = oracle", eta, divergence, oracle(eta, other), _EXACT * (1 + divergence))


def _bregman(measure: Measure, eta_p: Tensor, eta_q: Tensor) -> tuple[Tensor, Tensor]:
    """The textbook difference, and the rounding error of its float64."""
    start, end = measure.log_partition(eta_p), measure.log_partition(eta_q)
    slope = measure._dot(measure.mean(eta_p), eta_q - eta_p)
    return end - start - slope, 1e-15 * (1 + start.abs() + end.abs() + slope.abs())


def _check_kl_of_close_parameters(subject: _Subject) -> None:
    single, eta_p = subject.measure._to(torch.float32), subject.eta.float()
    measure = single._to(torch.float64)
    direction = torch.randn(eta_p.shape, generator=subject.generator).to(eta_p)
    direction = direction / _expand(subject.norm(direction), direction)
    for distance in (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6):
        eta_q = eta_p + distance * direction
        exact_p, exact_q = eta_p.double(), eta_q.double()
        delta = exact_q - exact_p
        if distance >= 1e-2:
            expected, rounding = _bregman(measure, exact_p, exact_q)
        else:
            # ∫₀¹ (1 − t) deltaᵀ F(p + t·delta) delta dt by Gauss's three points.
            nodes = ((0.5 - math.sqrt(0.15), 5 / 18), (0.5, 4 / 9), (0.5 + math.sqrt(0.15), 5 / 18))
            terms = [w * (1 - t) * measure._dot(delta, measure.fisher_vp(exact_p + t * delta, delta)) for t, w in nodes]
            expected, rounding = sum(terms, torch.zeros_like(terms[0])), torch.zeros_like(terms[0])
        # A direction that hardly varies under p has a small KL, of which the rounding of F is a larger part.
        rounding = rounding + 4e-7 * measure._dot(delta, delta) * subject.trace(exact_p)
        law = f"KL to 1e-5 relative in float32 at distance {distance:g}"
        _agree(law, eta_p, single.kl(eta_p, eta_q), expected, 1e-5 * expected + rounding)


def _check_fenchel_young(subject: _Subject) -> None:
    measure, eta, other = subject.measure, subject.eta, subject.swapped()
    mean, entropy = measure.mean(eta), measure.entropy(eta)
    tight = measure.log_partition(eta) - measure._dot(eta, mean)
    tolerance = _EXACT * (1 + measure.log_partition(eta).abs())
    _agree("Fenchel–Young: entropy = A(eta) − eta·mean", eta, entropy, tight, tolerance)
    loose = measure.log_partition(other) - measure._dot(other, mean)
    excess = (entropy - loose).clamp_min(0)
    _agree("Fenchel–Young: entropy ≤ A(other) − other·mean", eta, excess, torch.zeros_like(excess), tolerance)


def _check_tilt(subject: _Subject) -> None:
    """All points used are convex combinations of those given, so they stay in the domain."""
    measure, eta, queries = subject.measure, subject.eta, subject.queries
    first, second = eta.select(queries, 0), eta.select(queries, 1)
    step = (second - first) / 2
    total = (first + step).unsqueeze(queries)
    point = (eta - total) / 2
    tilted = measure.tilt(first + step)
    start, moved = measure.log_partition(total), measure.log_partition(point + total)
    tolerance = _EXACT * (1 + start.abs() + moved.abs())
    _agree("tilt(a): A(a + eta) − A(a)", point, tilted.log_partition(point), moved - start, tolerance)
    mean = measure.mean(point + total)
    _agree("tilt(a): mean(a + eta)", point, tilted.mean(point), mean, _EXACT * (1 + mean.abs()))
    twice = measure.tilt(first).tilt(step)
    _agree("tilt(a).tilt(b) = tilt(a + b)", point, twice.log_partition(point), moved - start, tolerance)
    _agree("tilt(a).tilt(b) = tilt(a + b), mean", point, twice.mean(point), mean, _EXACT * (1 + mean.abs()))


def _check_samples(subject: _Subject, count: int) -> None:
    measure, eta, queries = subject.measure, subject.eta, subject.queries
    generator = torch.Generator(eta.device).manual_seed(subject.generator.initial_seed())
    try:
        draws = measure.sample(eta, (count,), generator=generator)
    except MissingFormError:  # a measure may have no sampler
        return
    if draws.shape != (count, *eta.shape):
        raise AssertionError(f"samples: got shape {tuple(draws.shape)}, expected {(count, *eta.shape)}")
    mean, fisher = measure.mean(eta).flatten(queries + 1), subject.fisher(eta)
    deviation = draws.flatten(queries + 2) - mean
    products = deviation.unsqueeze(-1) * deviation.unsqueeze(-2)
    variance = fisher.diagonal(dim1=-2, dim2=-1).clamp_min(0)
    # Rare values: drawn, they show in the empirical error; not drawn, only in the exact one.
    error = torch.maximum(variance.sqrt(), deviation.std(0)) / math.sqrt(count)
    _agree("mean of samples", eta, deviation.mean(0), torch.zeros_like(mean), 5 * error + _EXACT * (1 + mean.abs()))
    error = torch.maximum(_variance_of_products(subject).sqrt(), products.std(0)) / math.sqrt(count)
    _agree("covariance of samples", eta, products.mean(0), fisher, 5 * error + 1e-6 * (1 + fisher.abs()))


def _variance_of_products(subject: _Subject) -> Tensor:
    """A bound on Var[(x_i − x̄_i)(x_j − x̄_j)] from the fourth central moments κ_iiii + 3 F_ii² (Cauchy–Schwarz)."""
    variance = subject.fisher(subject.eta).diagonal(dim1=-2, dim2=-1)
    moments = 3 * variance.square()
    for i, direction in enumerate(subject.basis()):
        third = partial(_derivative, subject.fisher, direction=direction)
        moments[..., i] += _derivative(third, subject.eta, direction)[..., i, i]
    root = moments.clamp_min(0).sqrt()
    return root.unsqueeze(-1) * root.unsqueeze(-2)


def _check_batching(subject: _Subject) -> None:
    measure, eta, queries = subject.measure, subject.eta, subject.queries
    for name in _DERIVED:
        whole = getattr(measure, name)(eta)
        tolerance = 1e-12 * (1 + whole.abs())
        alone = [getattr(measure, name)(point) for point in eta.unbind(queries)]
        _agree(f"{name}: all queries at once = one by one", eta, whole, torch.stack(alone, queries), tolerance)
        # Out at 0 and moved: vmap with another out_dims fails on results that do not depend on eta.
        mapped = torch.func.vmap(getattr(measure, name), queries)(eta).movedim(0, queries)
        _agree(f"{name}: vmap over queries", eta, whole, mapped, tolerance)
        if not _can_be_sliced(measure):
            continue

        def one(part: Measure, point: Tensor, name: str = name) -> Tensor:
            return getattr(part, name)(point)

        parts = [pytree.tree_map(lambda leaf, i=i: leaf[i], measure) for i in range(len(eta))]
        alone = [one(part, point) for part, point in zip(parts, eta, strict=True)]
        _agree(f"{name}: whole batch = one by one", eta, whole, torch.stack(alone), tolerance)
        mapped = torch.func.vmap(one)(measure, eta)
        _agree(f"{name}: vmap over the batch", eta, whole, mapped, tolerance)


def _can_be_sliced(measure: Measure) -> bool:
    """Whether every tensor of the measure carries its first batch dimension (in compositions some may not)."""
    batch = measure.batch_shape
    return len(batch) > 0 and all(leaf.shape[: len(batch)] == batch for leaf in pytree.tree_leaves(measure))


def _check_compiled(subject: _Subject, backend: str) -> None:
    measure, eta = subject.measure, subject.eta
    functions = {name: getattr(measure, name) for name in _DERIVED}
    functions["kl"] = lambda point: measure.kl(point, 0.5 * point)
    functions["gradient"] = torch.func.grad(lambda point: measure.log_partition(point).sum())
    functions["gradient of the mean"] = torch.func.grad(lambda point: measure._dot(point, measure.mean(point)).sum())
    for name, function in functions.items():
        expected = function(eta)
        torch.compiler.reset()
        actual = torch.compile(function, fullgraph=True, backend=backend)(eta)
        _agree(f"{name}: compiled = eager", eta, actual, expected, 1e-10 * (1 + expected.abs()))


def _check_precision(subject: _Subject) -> None:
    single = subject.measure._to(torch.float32)
    measure, eta = single._to(torch.float64), subject.far.float()
    exact = eta.double()
    wanted = {name: getattr(measure, name)(exact) for name in _DERIVED[:3]}
    lead = exact.shape[: subject.queries + 1]
    largest = torch.stack([number.abs().reshape(*lead, -1).amax(-1) for number in wanted.values()]).amax(0)
    held = largest < torch.finfo(torch.float32).max
    spread = subject.trace(exact).sqrt()
    # What a relative perturbation of eta and of the measure by a few float32 roundings does to each number.
    rounding = 64 * torch.finfo(torch.float32).eps * (1 + subject.norm(exact)) * (1 + subject.norm(wanted["mean"]))
    sensitivity = (torch.ones_like(spread), 1 + spread + spread**2, 1 + spread**2 + spread**3)
    for (name, expected), size in zip(wanted.items(), sensitivity, strict=True):
        actual = getattr(single, name)(eta)
        if actual.dtype != torch.float32:
            raise AssertionError(f"{name}: float32 in, {actual.dtype} out")
        actual, expected = (torch.where(_expand(held, number), number, 0.0) for number in (actual, expected))
        tolerance = _expand(rounding * size, expected) + 1e-6 * expected.abs()
        _agree(f"{name}: float32 = float64", exact, actual, expected, tolerance)
    half = subject.eta.bfloat16()
    for name in _DERIVED:
        expected = getattr(single, name)(half.float())
        _agree(f"{name}: half precision is promoted", half, getattr(single, name)(half), expected, 0.0)
