"""Hypothesis strategies for any measure of the package, compositions nested twice, and points of its domain."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from massieu.measures import (
    Atoms,
    Bernoulli,
    Categorical,
    ConjugatePrior,
    Constant,
    Exponential,
    Gamma,
    Gaussian,
    Laplace,
    Measure,
    Poisson,
    Sphere,
    Spin,
    Uniform,
    affine,
    convolve,
    mixture,
    power,
    product,
)

BATCHES = ((), (2,), (2, 1))
QUERIES = 3
_HALVINGS = 40


class Numbers:
    """Tensors from one seed, batch by batch; numbers that float32 holds, so that both precisions mean the same."""

    def __init__(self, seed: int, batch: tuple[int, ...], dim: int, scale: float) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.batch, self.dim, self.scale = batch, dim, scale

    def normal(self, *shape: int) -> Tensor:
        return torch.randn((*self.batch, *shape), generator=self.generator).double()

    def scaled(self, *shape: int) -> Tensor:
        """Of the drawn scale: zero, tiny, one or large."""
        return self.exact(self.scale * self.normal(*shape))

    def positive(self, *shape: int) -> Tensor:
        """Within a factor of ten of one."""
        return self.exact(10 ** (2 * torch.rand((*self.batch, *shape), generator=self.generator).double() - 1))

    def share(self, *shape: int) -> Tensor:
        return self.exact(torch.rand((*self.batch, *shape), generator=self.generator).double().clamp(1e-3, 1 - 1e-3))

    def whole(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    @staticmethod
    def exact(numbers: Tensor) -> Tensor:
        return numbers.float().double()


def atoms(n: Numbers) -> Measure:
    points, log_weight = n.scaled(n.whole(1, 5), n.dim), torch.zeros(())
    count = points.shape[-2]
    log_weight = n.scaled(count)
    if count > 2 and n.whole(0, 1):
        log_weight[..., 1] = -torch.inf
    if count > 3 and n.whole(0, 1):
        points[..., 0, :] = points[..., -1, :]
    return Atoms.create(points, log_weight)


def gaussian(n: Numbers) -> Measure:
    location, kind = n.scaled(n.dim), n.whole(0, 3)
    if kind == 0:
        return Gaussian.create(location, n.positive())
    if kind == 1:
        return Gaussian.create(location, n.positive(n.dim) * n.whole(0, 1))
    root = n.exact(n.normal(n.dim, n.dim))
    if kind == 2:
        return Gaussian.create(location, n.exact(root @ root.mT))
    return Gaussian.create(location, n.positive(n.dim), factor=root[..., :1])


def categorical(n: Numbers) -> Measure:
    logits = n.scaled(n.dim)
    if n.dim > 2 and n.whole(0, 1):
        logits[..., 1] = -torch.inf
    return Categorical.create(logits=logits)


def uniform(n: Numbers) -> Measure:
    low = n.scaled(n.dim)
    return Uniform.create(low, n.exact(low + n.positive(n.dim)))


def sphere(n: Numbers) -> Measure:
    return Sphere.create(n.positive(), dim=n.dim) if n.dim > 1 else Spin.create(n.scaled(1))


def conjugate(n: Numbers) -> Measure:
    likelihoods: Sequence[Callable[[], Measure]] = (
        lambda: Bernoulli.create(n.share(n.dim)),
        lambda: Spin.create(n.exact(n.normal(n.dim))),
        lambda: Poisson.create(n.positive(n.dim)),
        lambda: Exponential.create(n.positive(n.dim)),
        lambda: Gamma.create(n.positive(n.dim), n.positive(n.dim)),
        lambda: Gaussian.create(n.normal(n.dim), n.positive(n.dim)),
    )
    return ConjugatePrior.create(likelihoods[n.whole(0, 5)](), n.positive(n.dim))


LEAVES: dict[str, Callable[[Numbers], Measure]] = {
    "atoms": atoms,
    "gaussian": gaussian,
    "spin": lambda n: Spin.create(n.scaled(n.dim)),
    "bernoulli": lambda n: Bernoulli.create(n.share(n.dim)),
    "categorical": categorical,
    "poisson": lambda n: Poisson.create(n.positive(n.dim)),
    "exponential": lambda n: Exponential.create(n.positive(n.dim)),
    "gamma": lambda n: Gamma.create(n.positive(n.dim), n.positive(n.dim)),
    "laplace": lambda n: Laplace.create(n.positive(n.dim)),
    "uniform": uniform,
    "constant": lambda n: Constant.create(n.scaled(n.dim)),
    "sphere": sphere,
    "conjugate": conjugate,
}
SCALES = (1.0, 0.0, 1e-3, 10.0, 1e3)
"""Of points, fields and log-weights."""


@dataclass(frozen=True)
class Plan:
    """What to build: a tree of names, and where its numbers come from. Its repr is the counter-example."""

    kind: str
    parts: tuple["Plan", ...]
    seed: int
    scale: float

    def build(self, batch: tuple[int, ...], dim: int) -> Measure:
        numbers = Numbers(self.seed, batch, dim, self.scale)
        if self.kind in LEAVES:
            return LEAVES[self.kind](numbers)
        return COMPOSITIONS[self.kind](numbers, self.parts)


def _two(n: Numbers, parts: tuple[Plan, ...]) -> list[Measure]:
    return [part.build(n.batch, n.dim) for part in parts]


def tilted(n: Numbers, parts: tuple[Plan, ...]) -> Measure:
    measure = parts[0].build(n.batch, n.dim)
    return measure.tilt(n.exact(inside(measure, n.scaled(1, n.dim))).squeeze(-2))


def pushed(n: Numbers, parts: tuple[Plan, ...]) -> Measure:
    measure = parts[0].build(n.batch, n.whole(1, 3))
    weight = n.exact(n.normal(n.dim, measure.event_shape[0]))
    return affine(measure, weight * n.whole(0, 3), n.scaled(n.dim) if n.whole(0, 1) else None)


def mixed(n: Numbers, parts: tuple[Plan, ...]) -> Measure:
    if n.whole(0, 3) == 0:
        return mixture(n.scaled(3), parts[0].build((*n.batch, 3), n.dim))
    return mixture(n.scaled(2), _two(n, parts))


def joint(n: Numbers, parts: tuple[Plan, ...]) -> Measure:
    first = n.whole(1, n.dim)
    sizes = (first, n.dim - first)
    return product(*[part.build(n.batch, size) for part, size in zip(parts, sizes, strict=True) if size > 0])


COMPOSITIONS: dict[str, Callable[[Numbers, tuple[Plan, ...]], Measure]] = {
    "tilt": tilted,
    "affine": pushed,
    "mixture": mixed,
    "product": joint,
    "convolve": lambda n, parts: convolve(*_two(n, parts)),
    "power": lambda n, parts: power(parts[0].build(n.batch, n.dim), n.whole(2, 3)),
}


def inside(measure: Measure, drawn: Tensor) -> Tensor:
    """`drawn` (*batch, query, d) as offsets from a point of the domain, halved until twice as far is inside too."""
    interior = measure._interior()
    start = torch.zeros_like(drawn) if interior is None else interior.double().unsqueeze(-2).expand_as(drawn)
    held = measure._in_domain(start)
    if held is None:
        return start + drawn
    assume(bool(held.all()))
    for _ in range(_HALVINGS):
        held = measure._in_domain(start + 2 * drawn)
        assert held is not None
        if bool(held.all()):
            return start + drawn
        drawn = torch.where(held.unsqueeze(-1), drawn, drawn / 2)
    assume(False)
    return start


@dataclass(frozen=True)
class Scene:
    """A measure and two sets of points of its domain, in float64 with values that float32 holds."""

    plan: Plan
    batch: tuple[int, ...]
    dim: int
    seed: int
    size: float

    @property
    def numbers(self) -> Numbers:
        return Numbers(self.seed, self.batch, self.dim, 1.0)

    def build(self) -> tuple[Measure, Tensor, Tensor, Tensor]:
        """The measure, eta, another eta, a direction: all (*batch, query, d)."""
        measure, numbers = self.plan.build(self.batch, self.dim), self.numbers
        drawn = numbers.normal(QUERIES, 2 * self.dim)
        drawn[..., 0, :] = drawn[..., 0, :] * (self.seed % 3 > 0)
        first, second = (self.size * drawn).split(self.dim, -1)
        eta, other = (numbers.exact(inside(measure, points)) for points in (first, second))
        found = [measure._in_domain(points) for points in (eta, other)]
        assume(all(part is None or bool(part.all()) for part in found))
        return measure, eta, other, numbers.exact(numbers.normal(QUERIES, self.dim))


_SEEDS = st.integers(0, 2**20)


def plans(depth: int) -> st.SearchStrategy[Plan]:
    leaves = st.builds(Plan, st.sampled_from(sorted(LEAVES)), st.just(()), _SEEDS, st.sampled_from(SCALES))
    if depth == 0:
        return leaves
    parts = plans(depth - 1)
    built = st.builds(
        Plan, st.sampled_from(sorted(COMPOSITIONS)), st.tuples(parts, parts), _SEEDS, st.sampled_from((1.0, 0.0, 3.0))
    )
    return st.one_of(leaves, built)


def scenes(depth: int = 2, sizes: Sequence[float] = (1.0, 0.0, 1e-6, 10.0, 100.0)) -> st.SearchStrategy[Scene]:
    return st.builds(Scene, plans(depth), st.sampled_from(BATCHES), st.integers(1, 3), _SEEDS, st.sampled_from(sizes))
