"""The implicit gradient of an attention layer iterated to its fixed point, against backpropagation through the iterates.

    python benchmarks/implicit.py

The layer is z = (1 − α)q + α Xᵀsoftmax(β X z) with α = 0.9: 1,024 queries, 256 keys of size 64, plain iteration, one thread.
Memory and CPU time are those of a fresh process, forwards and backwards, float32, with the number of moves prescribed.
Errors are those of gradients at the default tolerances, against backpropagation through 400 moves in float64. A minute.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

import harness
from massieu.solve import Picard, fixed_point

QUERIES, KEYS, SIZE, SHARE, SCALE = 1024, 256, 64, 0.9, 2.0
MOVES = (10, 40, 160)
FLAT, ERROR = 1.1, 1e-5
Layer = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Memory:
    """Peaks of one number of moves."""

    moves: int
    unrolled_mebibytes: float
    implicit_mebibytes: float
    unrolled_seconds: float
    implicit_seconds: float
    growth: float
    """Of the implicit peak over that of the fewest moves."""
    bar: float = FLAT


@dataclass(frozen=True)
class Accuracy:
    """The largest error of a derivative, relative to its largest entry."""

    name: str
    dtype: str
    error: float
    bar: float = ERROR


def layer(z: Tensor, query: Tensor, memory: Tensor) -> Tensor:
    """One attention step, pulled towards the query."""
    return (1 - SHARE) * query + SHARE * torch.softmax(SCALE * z @ memory.mT, -1) @ memory


def inputs(queries: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Queries and keys, of norm about 1."""
    generator = torch.Generator().manual_seed(0)
    query, memory = (
        torch.randn(rows, SIZE, generator=generator, dtype=torch.float64) / SIZE**0.5 for rows in (queries, KEYS)
    )
    return query.to(dtype).requires_grad_(), memory.to(dtype).requires_grad_()


def unrolled(moves: int) -> Layer:
    """As automatic differentiation does it."""

    def solve(query: Tensor, memory: Tensor) -> Tensor:
        z = query
        for _ in range(moves):
            z = layer(z, query, memory)
        return z

    return solve


def implicit(moves: int) -> Layer:
    """Exactly so many moves: a tolerance of 0 is never met."""

    def solve(query: Tensor, memory: Tensor) -> Tensor:
        parameters, start = (query, memory), query.detach()
        return fixed_point(
            layer, start, parameters, method=Picard(), max_steps=moves, rtol=0.0, atol=0.0, throw=False
        ).value

    return solve


def converged(query: Tensor, memory: Tensor) -> Tensor:
    """With the defaults."""
    return fixed_point(layer, query.detach(), (query, memory)).value


def _gradient(solve: Layer, query: Tensor, memory: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(solve(query, memory).square().sum(), (query, memory)))


def _second(solve: Layer, query: Tensor, memory: Tensor) -> list[Tensor]:
    """The Hessian's product with a fixed vector."""
    inner = torch.autograd.grad(solve(query, memory).square().sum(), (query, memory), create_graph=True)
    total = sum((part * torch.cos(torch.arange(part.numel()).view_as(part))).sum() for part in inner)
    assert isinstance(total, Tensor)
    return list(torch.autograd.grad(total, (query, memory)))


def _accuracy() -> list[Accuracy]:
    found = []
    for name, derivative, queries in (("gradient", _gradient, QUERIES), ("second derivative", _second, 64)):
        expected = derivative(unrolled(400), *inputs(queries, torch.float64))
        for dtype in (torch.float64, torch.float32):
            given = derivative(converged, *inputs(queries, dtype))
            errors = [
                (ours - theirs).abs().max() / theirs.abs().max() for ours, theirs in zip(given, expected, strict=True)
            ]
            found.append(Accuracy(name, str(dtype).removeprefix("torch."), max(errors).item()))
    return found


def _memory() -> list[Memory]:
    rows: list[Memory] = []
    for moves in MOVES:
        (their_seconds, theirs), (seconds, ours) = (
            harness.run_fresh(Path(__file__), "--memory", side, str(moves)) for side in ("unrolled", "implicit")
        )
        fewest = rows[0].implicit_mebibytes if rows else ours
        rows.append(Memory(moves, theirs, ours, their_seconds, seconds, ours / fewest))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", nargs=2, metavar=("SIDE", "MOVES"), help="print one side's seconds and peak, MiB")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory:
        side, moves = arguments.memory
        solve = {"unrolled": unrolled, "implicit": implicit}[side](int(moves))

        def prepare(share: float) -> harness.Work:
            given = inputs(int(share * QUERIES), torch.float32)
            return lambda: _gradient(solve, *given)

        harness.print_peak(prepare)
        return
    memory, accuracy = _memory(), _accuracy()
    for row in memory:
        print(
            f"{row.moves} moves: {row.unrolled_mebibytes:.1f} → {row.implicit_mebibytes:.1f} MiB "
            f"(growth {row.growth:.3f}, bar {row.bar}), {row.unrolled_seconds:.2f} → {row.implicit_seconds:.2f} s"
        )
    for row in accuracy:
        print(f"{row.name}, {row.dtype}: error {row.error:.2g} (bar {row.bar:g})")
    print(harness.save("implicit", memory=[asdict(row) for row in memory], accuracy=[asdict(row) for row in accuracy]))


if __name__ == "__main__":
    main()
