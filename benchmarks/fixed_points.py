"""Evaluations to a fixed point: Hopfield maps and linear attention, against plain iteration and other solvers.

    python benchmarks/fixed_points.py

float64, 24 items a map. An evaluation counts for an item until the first point that the function is evaluated at with
‖f(z) − z‖ ≤ 1e-8 + 1e-6·‖z‖, for every solver alike: what a solver does after that, or thinks of it, does not matter. An
item that needs more than 1,000 did not converge. torchdeq's solvers take part where torchdeq is installed. Two minutes.
"""

import argparse
import contextlib
import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

import harness
from massieu.solve import Anderson, Auto, Method, Newton, fixed_point

ITEMS, LIMIT, RTOL, ATOL, BAR = 24, 1000, 1e-6, 1e-8, 1.2
Function = Callable[[Tensor], Tensor]
Solver = Callable[[Function, Tensor], object]


@dataclass(frozen=True)
class Row:
    """One map: mean evaluations of each solver over the items, None where one of them did not converge."""

    name: str
    evaluations: dict[str, float | None]
    converged: dict[str, int]
    """Of the items."""
    best: str
    ratio: float
    """Ours by the best of the others that converge everywhere some solver does."""
    elsewhere: int
    """Items that "auto" brings to another fixed point than plain iteration does."""
    bar: float = BAR

    @property
    def met(self) -> bool:
        """Whether the ratio is below the bar, and "auto" converges wherever any does."""
        return self.ratio <= self.bar and self.converged["auto"] == max(self.converged.values())


class Counter:
    """A function that notes, for each item, at which evaluation it was first there, and where."""

    def __init__(self, function: Function, start: Tensor) -> None:
        self.function, self.calls = function, 0
        self.first = torch.full(start.shape[:1], LIMIT + 1)
        self.found = torch.full_like(start, torch.nan)

    def __call__(self, z: Tensor) -> Tensor:
        self.calls += 1
        image = self.function(z)
        length = torch.maximum(z.norm(dim=-1), image.norm(dim=-1))
        new = ((image - z).norm(dim=-1) <= ATOL + RTOL * length) & (self.first > self.calls)
        self.first[new], self.found[new] = self.calls, z[new]
        if self.calls >= LIMIT or bool((self.first <= LIMIT).all()):
            raise StopIteration
        return image


# --- maps ------------------------------------------------------------------------------------------------------------


def maps() -> Iterator[tuple[str, Function, Tensor]]:
    """Name, function and start."""
    for beta in (4, 8, 16, 32):
        for keys, size in ((16, 16), (64, 32), (256, 16)):
            generator = torch.Generator().manual_seed(keys)
            memory, query = (_normal(rows, size, generator) / size**0.5 for rows in (keys, ITEMS))
            yield f"Hopfield, β = {beta}, {keys} × {size}", _hopfield(memory, query, beta, 1.0), query
            yield f"Hopfield with injection, β = {beta}, {keys} × {size}", _hopfield(memory, query, beta, 0.8), query
    for radius in (0.5, 0.7, 0.9, 0.95, 0.99):
        for keys, size in ((64, 16), (256, 64)):
            generator = torch.Generator().manual_seed(keys)
            key, value, query = (_normal(rows, size, generator) for rows in (keys, keys, ITEMS))
            for kind, matrix in (("symmetric", key.mT @ key), ("general", value.mT @ key + 0.5 * key.mT @ key)):
                matrix = matrix * (radius / torch.linalg.eigvals(matrix).abs().max())
                yield f"linear attention, ρ = {radius}, {kind}, {keys} × {size}", _linear(matrix, query), 0 * query


def _normal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)


def _hopfield(memory: Tensor, query: Tensor, beta: float, share: float) -> Function:
    return lambda z: (1 - share) * query + share * torch.softmax(beta * z @ memory.mT, -1) @ memory


def _linear(matrix: Tensor, query: Tensor) -> Function:
    return lambda z: query + z @ matrix.mT


# --- solvers ---------------------------------------------------------------------------------------------------------


def solvers() -> dict[str, Solver]:
    """By name; ours are the first three."""
    found: dict[str, Solver] = {"auto": _ours(Auto()), "anderson": _ours(Anderson()), "newton": _ours(Newton())}
    found["plain iteration"] = _plain
    for ridge in (1e-4, 1e-10):
        found[f"Anderson as in neqnn, ridge {ridge:g}"] = _bordered(ridge)
    if importlib.util.find_spec("torchdeq"):
        from torchdeq.solver import get_solver

        for name in ("anderson", "broyden", "fixed_point_iter"):
            found[f"torchdeq {name}"] = _torchdeq(get_solver(name))
    else:
        print("torchdeq is not installed: pip install torchdeq; going on without it")
    return found


def _ours(method: Method) -> Solver:
    def solve(function: Function, start: Tensor) -> object:
        return fixed_point(function, start, method=method, rtol=RTOL, atol=ATOL, max_steps=LIMIT, throw=False)

    return solve


def _plain(function: Function, start: Tensor) -> None:
    for _ in range(LIMIT):
        start = function(start)


def _bordered(ridge: float, memory: int = 5) -> Solver:
    """Anderson's method with an absolute ridge, from the bordered system of weights that sum to one.

    As in the tutorial on deep equilibrium models (Kolter, Duvenaud & Johnson, NeurIPS 2020), which neqnn follows.
    """

    def solve(function: Function, start: Tensor) -> None:
        items, size = start.shape
        points, images = torch.zeros(2, items, memory, size, dtype=start.dtype)
        points[:, 0], images[:, 0] = start, function(start)
        points[:, 1], images[:, 1] = images[:, 0], function(images[:, 0])
        system = torch.zeros(items, memory + 1, memory + 1, dtype=start.dtype)
        system[:, 0, 1:] = system[:, 1:, 0] = 1
        right = torch.zeros(items, memory + 1, 1, dtype=start.dtype)
        right[:, 0] = 1
        for step in range(2, LIMIT):
            used = min(step, memory)
            residuals = images[:, :used] - points[:, :used]
            gram = residuals @ residuals.mT + ridge * torch.eye(used, dtype=start.dtype)
            system[:, 1 : used + 1, 1 : used + 1] = gram
            weights = torch.linalg.solve(system[:, : used + 1, : used + 1], right[:, : used + 1])[:, 1:]
            points[:, step % memory] = (weights.mT @ images[:, :used]).squeeze(1)
            images[:, step % memory] = function(points[:, step % memory])

    return solve


def _torchdeq(solver: Callable[..., object]) -> Solver:
    def solve(function: Function, start: Tensor) -> object:
        def damped(z: Tensor, tau: float = 1.0) -> Tensor:
            return z + tau * (function(z) - z)

        return solver(damped, start, max_iter=LIMIT, tol=1e-300)

    return solve


# --- rows ------------------------------------------------------------------------------------------------------------


def _row(name: str, function: Function, start: Tensor, solvers: dict[str, Solver]) -> Row:
    counts, found = {}, {}
    for solver, solve in solvers.items():
        counter = Counter(function, start)
        # It is done, or failed in items that stay uncounted.
        with contextlib.suppress(StopIteration, torch.linalg.LinAlgError):
            solve(counter, start.clone())
        counts[solver], found[solver] = counter.first, counter.found
    converged = {solver: int((first <= LIMIT).sum()) for solver, first in counts.items()}
    most = max(converged.values())
    means = {
        solver: first.double().mean().item() if converged[solver] == most else None for solver, first in counts.items()
    }
    others = {solver: mean for solver, mean in means.items() if solver not in ("auto", "newton") and mean is not None}
    best = min(others, key=lambda solver: others[solver], default="none")
    ours = means["auto"]
    ratio = math.inf if ours is None else ours / others[best] if others else 0.0
    far = (found["auto"] - found["plain iteration"]).norm(dim=-1) > 1e-2 * (1 + found["auto"].norm(dim=-1))
    return Row(name, means, converged, best, ratio, int(far.sum()))


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.set_num_threads(1)
    known = solvers()
    rows = []
    for name, function, start in maps():
        row = _row(name, function, start, known)
        rows.append(row)
        shown = ", ".join(
            f"{solver} {'–' if mean is None else f'{mean:.1f}'} ({row.converged[solver]})"
            for solver, mean in row.evaluations.items()
        )
        print(f"{name}: {row.ratio:.3f} of {row.best} (bar {BAR}); met: {row.met}; {shown}", flush=True)
    print(harness.save("fixed_points", rows=[asdict(row) | {"met": row.met} for row in rows]))


if __name__ == "__main__":
    main()
