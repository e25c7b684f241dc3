"""Layers of many particles: beside attention of the same sizes, and how memory grows with depth.

    python benchmarks/population.py

float32, one thread, particles in 64 dimensions that all attend to each other. About ten minutes, most of them for the flow
of 100,000 particles through twelve layers, which is run once.
"""

from functools import partial
from pathlib import Path

import torch

import cases
import harness
from cases import Case, Sides
from massieu import ops
from massieu.population import AttentionLayer, Flow

WIDTH, PARTICLES, FEW, MANY, LAYERS = 64, 20_000, 10_000, 100_000, 12
ONE_HEAD = f"layer of 1 head, {PARTICLES:,} particles × {WIDTH}"
ATTENTION = "`ops.attention` of the same sizes"
DEEP = f"{LAYERS} layers, {FEW:,} particles × {WIDTH}"
DEEPER = f"{2 * LAYERS} layers, {FEW:,} particles × {WIDTH}"


def _layer(heads: int) -> AttentionLayer:
    return AttentionLayer.random(WIDTH, heads, generator=torch.Generator().manual_seed(0), step_size=0.1)


def _beside_attention(heads: int, particles: float) -> Sides:
    """Attention alone, of queries, keys and values that are there; the layer makes them, and adds what it writes."""
    count, layer = int(particles), _layer(heads)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, count, WIDTH // heads) for _ in range(3))
    x = torch.randn(count, WIDTH)
    return lambda: ops.attention(query, key, value).output, lambda: layer(x)


def _depths(first: int, second: int, particles: float) -> Sides:
    """The same particles through that many layers, with the default observables after each."""
    torch.manual_seed(0)
    x, layer = torch.randn(int(particles), WIDTH), _layer(1)
    shallow, deep = (Flow(layer, depth=depth) for depth in (first, second))
    return lambda: shallow.run(x, progress=False), lambda: deep.run(x, progress=False)


CASES = {
    ONE_HEAD: Case(ATTENTION, PARTICLES, partial(_beside_attention, 1), 1.5, rounds=7, memory_rounds=0),
    f"layer of 4 heads, {PARTICLES:,} particles × {WIDTH}": Case(
        ATTENTION, PARTICLES, partial(_beside_attention, 4), 1.5, rounds=5, memory_rounds=0
    ),
    # What the allocator keeps between layers counts here, and differs between runs.
    DEEP: Case("1 layer", FEW, partial(_depths, 1, LAYERS), rounds=3, fresh=True),
    DEEPER: Case(f"{LAYERS} layers", FEW, partial(_depths, LAYERS, 2 * LAYERS), rounds=5, fresh=True),
}


def _flow() -> dict[str, float]:
    """The deep flow of many particles, once, beside attention alone, and the one score matrix that it never holds."""
    attention, _ = harness.run_fresh(Path(__file__), "--fresh", ONE_HEAD, "0", "--size", str(MANY))
    seconds, mebibytes = harness.run_fresh(Path(__file__), "--fresh", DEEP, "1", "--size", str(MANY))
    return {
        "particles": MANY,
        "width": WIDTH,
        "layers": LAYERS,
        "seconds": seconds,
        "attention_seconds": attention,
        "mebibytes": mebibytes,
        "matrix_mebibytes": 4 * MANY**2 / 2**20,
    }


if __name__ == "__main__":
    cases.main(Path(__file__), __doc__, CASES, flow=_flow)
