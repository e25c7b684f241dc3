"""Z7: softmax attention and the conditional mean on the sphere, at a fixed temperature and at the best."""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from massieu import ops
from massieu.papers.claims.claim import (
    CLOSED_FORM,
    FOLLOW_UP,
    QUADRATURE,
    Check,
    as_published,
    at_least,
    at_most,
    close,
    near_in_standard_errors,
    not_below,
)
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.oracles import quadrature
from massieu.papers.claims.rates import has_rate, rate
from massieu.papers.claims.registry import claim
from massieu.papers.theory import (
    asymptotic_scale,
    harmonic_count,
    optimal_scale,
    smoothing_floor,
    sphere_multipliers,
    zonal_harmonics,
)

_DIMENSION = 4
_SCALE = 2.0
_POWER = torch.tensor([0.0, 1 / 4, 4 / 24], dtype=torch.float64)
"""E f_n² for f = q₁ + 2·q₁q₂ on the unit sphere of R⁴: E q₁² = 1/4, E q₁²q₂² = 1/24."""
_NOISE = 0.5
"""Standard deviation of a value given its key, where temperatures are tuned."""


class Task(NamedTuple):
    """Keys uniform on a sphere, values f(key) + noise, f the zonal harmonic of degree 1 about the first axis."""

    dimension: int
    sizes: list[int]
    noise: float = _NOISE

    def errors(
        self, normal: Normal, scales: Tensor, repetitions: int, queries: int
    ) -> Float[Tensor, "sizes repetitions"]:
        """Root-mean-square distance from f over fresh queries, in each repetition of each size."""
        rows = []
        for size, scale in zip(self.sizes, scales.tolist(), strict=True):
            blocks = []
            # So many repetitions at once that the keys have some 2^18 numbers.
            block_size = max(1, 2**18 // (size * self.dimension))
            for start in range(0, repetitions, block_size):
                count = min(block_size, repetitions - start)
                key = F.normalize(normal(count, 1, size, self.dimension), dim=-1)
                query = F.normalize(normal(count, 1, queries, self.dimension), dim=-1)
                value = key[..., :1] + self.noise * normal(count, 1, size, 1)
                output = ops.attention(query, key, value, scale=scale).output
                blocks.append((output - query[..., :1]).square().mean((1, 2, 3)).sqrt())
            rows.append(torch.cat(blocks))
        return torch.stack(rows)


@claim(
    "Z7",
    title="Softmax against conditional mean attention",
    statement="Over keys uniform on the sphere, softmax attention tends to Σ ρ_n(β) f_n(q), ρ_n = "
    "I_{d/2−1+n}/I_{d/2−1}, and not to f(q) = E[v | k = q]. At a fixed temperature its error has a floor that more "
    "keys do not lower, and that no constant factor removes unless f has one degree. With β ~ L^{2/(d+3)} the error "
    "falls as L^{−2/(d+3)}.",
    source=f"reconstructed from Proposition 4.3 of {FOLLOW_UP}; Funk–Hecke",
    status="reconstructed",
    published="The limit of conditional mean attention is one absolute constant times that of softmax attention.",
    standing="ambiguous",
    corrected="The proof takes a density estimate of fixed bandwidth for a consistent one. A constant C exists if and only "
    "if f has one degree, and depends on the degree.",
)
def softmax_and_the_conditional_mean(keys: int = 100_000, repetitions: int = 400, seed: int = 0) -> Iterator[Check]:
    check_at_least(1000, keys=keys)
    check_at_least(100, repetitions=repetitions)
    normal = normal_draws(seed)
    yield from _funk_hecke(normal, keys)
    yield from _one_constant()
    yield from _floor(normal, repetitions)
    for dimension in (2, 3):
        task = Task(dimension, [2**exponent for exponent in range(6, 13, 2)])
        yield from _tuned(normal, task, max(20, repetitions // 4))


def _multipliers_by_quadrature(degree: int, dimension: int, scale: float) -> Tensor:
    """ρ₀ … ρ_n: means of zonal harmonics under e^{β cos a} on the sphere, whose angles have the density sin^{d−2} a."""
    angle, log_weight = quadrature(0.0, math.pi)
    tilted = (log_weight + (dimension - 2) * angle.sin().log() + scale * angle.cos()).softmax(0)
    return tilted @ zonal_harmonics(angle.cos(), degree, dimension)


def _funk_hecke(normal: Normal, keys: int) -> Iterator[Check]:
    """The limit's multipliers ρ_n by quadrature, and by uniform keys."""
    for dimension, scale in ((2, 3.0), (3, 5.0), (4, 2.0), (9, 4.0)):
        closed_form = sphere_multipliers(4, dimension, scale)
        integrals = _multipliers_by_quadrature(4, dimension, scale)
        yield close(f"d = {dimension}, β = {scale:g}: ρ₀ … ρ₄ and their integrals", closed_form, integrals, QUADRATURE)
    point = F.normalize(normal(keys, _DIMENSION), dim=-1)
    weight = torch.softmax(_SCALE * point[:, 0], 0)
    harmonics = zonal_harmonics(point[:, 0], 2, _DIMENSION)[:, 1:]
    mean = weight @ harmonics
    # The delta method's standard error of a self-normalised mean.
    error = (weight.square() @ (harmonics - mean).square()).sqrt()
    expected = sphere_multipliers(2, _DIMENSION, _SCALE)[1:]
    for n in (1, 2):
        yield near_in_standard_errors(f"ρ_{n} by {keys} uniform keys", mean[n - 1], expected[n - 1], error[n - 1])


def _one_constant() -> Iterator[Check]:
    """The error that the best constant leaves: 0 for one degree, two fifths of f for two."""
    _, first, second = torch.eye(3, dtype=torch.float64)
    for name, power in (("f₁", first), ("f₂", second)):
        floor = smoothing_floor(power, _DIMENSION, _SCALE)
        yield at_most(f"{name}: relative error with its own constant", floor.factor_error, CLOSED_FORM)
    both = smoothing_floor(_POWER, _DIMENSION, _SCALE)
    ratio = smoothing_floor(second, _DIMENSION, _SCALE).factor / smoothing_floor(first, _DIMENSION, _SCALE).factor
    yield at_least("the constant of degree 2 over that of degree 1", ratio, 3.0)
    relative = both.factor_error / _POWER.sum().sqrt()
    # In closed form: |f₁||f₂||ρ₁ − ρ₂|/‖ρf‖, by Lagrange's identity.
    rho = sphere_multipliers(2, _DIMENSION, _SCALE)
    closed_form = (_POWER[1] * _POWER[2]).sqrt() * (rho[1] - rho[2]) / (rho.square() * _POWER).sum().sqrt()
    yield close("f₁ + 2f₂: what the best constant leaves", both.factor_error, closed_form)
    yield at_least("f₁ + 2f₂: relative error with the best constant", relative, 0.4)
    yield as_published(at_most("f₁ + 2f₂: relative error with the best constant, and none", relative, CLOSED_FORM))


def _floor(normal: Normal, repetitions: int) -> Iterator[Check]:
    """At β = 2 more keys do not help: the mean squared error stays the floor's square."""
    floor = smoothing_floor(_POWER, _DIMENSION, _SCALE).error
    lost = 1 - _multipliers_by_quadrature(2, _DIMENSION, _SCALE)
    yield close("f₁ + 2f₂: the floor, and by integrals of ρ_n", floor, (lost.square() @ _POWER).sqrt(), QUADRATURE)
    vertices = _vertices()
    square = (_limit(vertices) - _target(vertices)).square().mean()
    yield close("f₁ + 2f₂: the floor's square, by the vertices of the 24-cell", square, floor.square())
    count = max(20, repetitions // 20)
    query = F.normalize(normal(count, 1, 64, _DIMENSION), dim=-1)
    truth = _target(query)
    limit = _limit(query)
    for size in (64, 512, 4096):
        key = F.normalize(normal(count, 1, size, _DIMENSION), dim=-1)
        value = _target(key)
        error = (ops.attention(query, key, value, scale=_SCALE).output - truth).square()
        # Beside the limit's error at these very queries, of which the mean over the sphere is the floor's square.
        excess = (error - (limit - truth).square()).mean((1, 2, 3))
        yield not_below(f"{size} keys: mean squared error less the floor's, in standard errors", excess, 0.0)
    reached = (floor.square() + excess.mean()).sqrt() / floor
    yield at_most("4096 keys: root-mean-square error over the floor", reached, 1.05)


def _target(point: Tensor) -> Tensor:
    """f₁ + 2f₂ = x₁ + 2x₁x₂, of the power `_POWER`."""
    return point[..., :1] * (1 + 2 * point[..., 1:2])


def _limit(point: Tensor) -> Tensor:
    """What attention to infinitely many keys makes of it: ρ₁f₁ + 2ρ₂f₂."""
    rho = sphere_multipliers(2, _DIMENSION, _SCALE)
    return point[..., :1] * (rho[1] + 2 * rho[2] * point[..., 1:2])


def _vertices() -> Tensor:
    """Of the 24-cell, (24, 4): the mean of a polynomial of degree 5 over them is that over the sphere of R⁴."""
    vertices = []
    for first, second in itertools.combinations(range(_DIMENSION), 2):
        for signs in itertools.product((-1.0, 1.0), repeat=2):
            vertex = torch.zeros(_DIMENSION, dtype=torch.float64)
            vertex[[first, second]] = torch.tensor(signs, dtype=torch.float64) / math.sqrt(2)
            vertices.append(vertex)
    return torch.stack(vertices)


def _tuned(normal: Normal, task: Task, repetitions: int) -> Iterator[Check]:
    """With β ~ L^{2/(d+3)} the error falls as L^{−2/(d+3)}, and below the floor of a fixed temperature."""
    dimension = task.dimension
    power = torch.tensor([0.0, 1 / harmonic_count(1, dimension)], dtype=torch.float64)
    scales = optimal_scale(torch.tensor(task.sizes, dtype=torch.float64), power, task.noise**2, dimension)
    errors = task.errors(normal, scales, repetitions, 32)
    yield has_rate(f"d = {dimension}: rate at the best temperature", rate(task.sizes, errors), -2 / (dimension + 3))
    fixed = smoothing_floor(power, dimension, scales[0]).error
    yield at_most(
        f"d = {dimension}: tuned error over the floor of the first temperature", errors[-1].mean() / fixed, 0.7
    )
    large_sizes = torch.tensor([1e8, 1e9], dtype=torch.float64)
    best = optimal_scale(large_sizes, power, task.noise**2, dimension)
    limit = asymptotic_scale(large_sizes, power, task.noise**2, dimension)
    # The next order is 1/β, and an order of it is above 1/100 here.
    yield close(f"d = {dimension}: best β and (E(Δf)² L/((d−1)cσ²))^(2/(d+3))", best / limit, torch.ones(2), 0.02)
