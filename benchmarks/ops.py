"""Attention with log Z, log Z alone, the moments and what keys receive, against PyTorch's fused attention and the score matrix.

    python benchmarks/ops.py

float32, one thread, batch 1, 8 heads of size 64. About two minutes, and 3 GiB.
"""

from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

import cases
import explicit_attention
import harness
from cases import Case, Sides
from massieu import ops
from massieu.ops import moment_blocks
from massieu.ops.moments import MomentsBackend

HEADS, SIZE = 8, 64
CALLS = 200
"""Of a few tokens, where time is what a call costs by itself."""
PASSES_EAGER = 30
"""Readings and writings of each score, 4 bytes each, by the eighteen eager operations between the two products."""
PASSES_FEW = 13
"""The same by the eight of entropy and largest score alone."""
ENTROPY = ("entropy", "max_score")


def _inputs(length: float, number: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, HEADS, int(length), SIZE, requires_grad=True) for _ in range(number)]


def _without_gradient(work: harness.Work) -> harness.Work:
    return torch.no_grad()(work)


def _forward(length: float) -> Sides:
    query, key, value = _inputs(length, 3)
    fused = lambda: F.scaled_dot_product_attention(query, key, value)  # noqa: E731
    return _without_gradient(fused), _without_gradient(lambda: ops.attention(query, key, value))


def _small_calls(length: float) -> Sides:
    query, key, value = _inputs(length, 3)

    def repeated(function: Callable[..., object]) -> harness.Work:
        def calls() -> None:
            for _ in range(CALLS):
                function(query, key, value)

        return _without_gradient(calls)

    return repeated(F.scaled_dot_product_attention), repeated(ops.attention)


def _forward_flexible(length: float) -> Sides:
    query, key, value = (tensor.detach() for tensor in _inputs(length, 3))
    compiled = _flexible()
    flexible = lambda: compiled(query, key, value)  # noqa: E731
    return _without_gradient(flexible), _without_gradient(lambda: ops.attention(query, key, value))


def _forward_backward(length: float) -> Sides:
    inputs = _inputs(length, 3)
    grad_output, grad_log_partition = torch.randn_like(inputs[0]), torch.randn(1, HEADS, int(length))

    def fused() -> object:
        query, key, value = inputs
        return torch.autograd.grad(F.scaled_dot_product_attention(query, key, value), inputs, grad_output)

    def ours() -> object:
        return torch.autograd.grad(ops.attention(*inputs), inputs, (grad_output, grad_log_partition))

    return fused, ours


def _log_partition(length: float) -> Sides:
    query, key = _inputs(length, 2)
    gradient = torch.randn(1, HEADS, int(length))

    def score_matrix() -> object:
        return torch.autograd.grad(torch.logsumexp(query @ key.mT, -1), (query, key), gradient)

    def ours() -> object:
        return torch.autograd.grad(ops.log_partition(query, key, scale=1.0), (query, key), gradient)

    return score_matrix, ours


def _moments(backend: MomentsBackend, names: Collection[str] | None = None) -> Callable[[float], Sides]:
    def prepare(length: float) -> Sides:
        query, key, value = _inputs(length, 3)
        fused = lambda: F.scaled_dot_product_attention(query, key, value)  # noqa: E731
        ours = lambda: ops.attention_moments(query, key, value, moments=names, backend=backend)  # noqa: E731
        return _without_gradient(fused), _without_gradient(ours)

    return prepare


def _received(length: float) -> Sides:
    query, key, value = _inputs(length, 3)
    fused = lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True)  # noqa: E731
    return _without_gradient(fused), _without_gradient(lambda: ops.attention_received(query, key, is_causal=True))


def _layer(passes: int) -> Callable[[float], Sides]:
    def prepare(length: float) -> Sides:
        first, second = explicit_attention.explicit, explicit_attention.fused
        return explicit_attention.layer(first, int(length), passes), explicit_attention.layer(
            second, int(length), passes
        )

    return prepare


@cache
def _flexible() -> Callable[..., Tensor]:
    return torch.compile(flex_attention)


def _flexible_limits() -> dict[str, str]:
    """What compiled FlexAttention answers here when asked for a log-sum-exp, and for a gradient."""
    query, key, value = _inputs(256, 3)
    fixed = [tensor.detach() for tensor in (query, key, value)]
    works: dict[str, harness.Work] = {
        "log-sum-exp": lambda: _flexible()(*fixed, return_aux=AuxRequest(lse=True)),
        "backward": lambda: _flexible()(query, key, value).sum().backward(),
    }
    answers = {}
    for name, work in works.items():
        try:
            work()
        except Exception as error:  # whatever it raises is the answer
            answers[name] = str(error).splitlines()[0].removeprefix("LoweringException: ")
        else:
            answers[name] = "works"
    return answers


def _eager_operations(length: int = 2048) -> dict[str, object]:
    """Seconds of the moments' operations, each timed by itself on one tile, and how often it is done to a tile."""
    rows, keys = moment_blocks.ROWS, moment_blocks.KEYS
    scores, weights, sums = torch.randn(1, rows, keys), torch.rand(1, rows, keys), torch.zeros(1, rows, 1)
    query, key, value = torch.randn(1, rows, SIZE), torch.randn(1, SIZE, keys), torch.randn(1, keys, SIZE)
    product = torch.empty(1, rows, SIZE)
    works: dict[str, tuple[int, harness.Work]] = {
        "scores": (1, lambda: torch.baddbmm(scores, query, key, beta=0, alpha=0.1, out=scores)),
        "sum": (4, lambda: torch.sum(scores, -1, keepdim=True, out=sums)),
        "subtraction": (2, lambda: scores.sub_(sums)),
        "norm": (2, lambda: torch.linalg.vector_norm(scores, dim=-1, keepdim=True, out=sums)),
        "maximum": (2, lambda: torch.amax(scores, -1, keepdim=True, out=sums)),
        "scaling": (1, lambda: torch.mul(scores, 1.44, out=weights)),
        "lower limit": (1, lambda: weights.clamp_min_(-126.0)),
        "exponential": (1, lambda: torch.exp2(scores, out=weights)),
        "whole numbers and places": (2, lambda: torch.floor(scores, out=weights)),
        "multiplication": (2, lambda: scores.mul_(weights)),
        "values": (1, lambda: torch.bmm(weights, value, out=product)),
    }
    seconds = {}
    for name, (_, work) in works.items():
        scores.normal_()
        weights.uniform_()
        seconds[name] = 1 / harness.rate(1, work, 21)
    tiles = HEADS * length**2 / (rows * keys)
    total = tiles * sum(times * seconds[name] for name, (times, _) in works.items())
    return {"length": length, "seconds": seconds, "times": {name: works[name][0] for name in works}, "total": total}


def _count(length: int, products: int, exponentials: int = 1, cache_passes: int = 0) -> harness.Count:
    pairs = HEADS * length**2
    return harness.Count(2 * products * SIZE * pairs, exponentials * pairs, 0, 4 * cache_passes * pairs)


EAGER = "each operation on a tile goes through it once more, in the cache"


def _compiled_case(length: int, rounds: int, bar: float, names: Collection[str] | None = None) -> Case:
    count = _count(length, 2)
    return Case(FUSED, length, _moments("compiled", names), bar, rounds=rounds, memory_rounds=0, count=count)


def _eager_case(
    length: int, rounds: int, cache_passes: int, why: str | None = None, names: Collection[str] | None = None
) -> Case:
    """Without a C compiler: no bar."""
    count = _count(length, 2, 1, cache_passes)
    return Case(FUSED, length, _moments("blocks", names), rounds=rounds, memory_rounds=0, count=count, why=why)


FUSED, FUSED_BACKWARD = "fused attention", "fused attention, forward and backward"
EXPLICIT = "explicit attention, forward and backward"
CASES = {
    "attention and log Z, forward": Case(FUSED, 2048, _forward, 1.05, 1.1, 61, count=_count(2048, 2)),
    f"attention and log Z, {CALLS} calls of 16 tokens, forward": Case(
        FUSED, 16, _small_calls, rounds=41, memory_rounds=0
    ),
    "attention and log Z, forward and backward": Case(
        FUSED_BACKWARD, 2048, _forward_backward, 1.1, 1.2, 41, memory_rounds=5, count=_count(2048, 7, 2)
    ),
    "log Z alone, L = 4096, forward and backward": Case(
        "logsumexp(q @ k.mT)", 4096, _log_partition, 0.4, 0.1, 5, count=_count(4096, 4, 2)
    ),
    **{
        f"moments and output, L = {length}, compiled": _compiled_case(length, rounds, 1.7)
        for length, rounds in ((512, 41), (2048, 61))
    },
    **{
        f"output, entropy and largest score, L = {length}, compiled": _compiled_case(length, rounds, 1.3, ENTROPY)
        for length, rounds in ((512, 41), (2048, 61))
    },
    **{
        f"moments and output, L = {length}, blocks": _eager_case(length, rounds, PASSES_EAGER, EAGER)
        for length, rounds in ((512, 41), (2048, 15))
    },
    **{
        f"output, entropy and largest score, L = {length}, blocks": _eager_case(
            length, rounds, PASSES_FEW, names=ENTROPY
        )
        for length, rounds in ((512, 41), (2048, 15))
    },
    **{
        f"attention received, causal, L = {length}": Case(
            "fused attention, causal", length, _received, 2.5, rounds=rounds, memory_rounds=0, count=_count(length, 2)
        )
        for length, rounds in ((512, 41), (2048, 41))
    },
    "attention and log Z beside FlexAttention, forward": Case(
        "FlexAttention, compiled (output only)",
        2048,
        _forward_flexible,
        rounds=9,
        memory_rounds=0,
        count=_count(2048, 2),
    ),
    "attention layer with its projections, L = 2048": Case(
        EXPLICIT,
        2048,
        _layer(1),
        rounds=7,
        count=explicit_attention.count(2048, 1),
    ),
    "the same with four Hopfield steps": Case(
        EXPLICIT,
        2048,
        _layer(4),
        rounds=3,
        fresh=True,
        count=explicit_attention.count(2048, 4),
    ),
}


if __name__ == "__main__":
    cases.main(Path(__file__), __doc__, CASES, eager_operations=_eager_operations, flex_attention=_flexible_limits)
