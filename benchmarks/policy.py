"""Numbers of policies: two models' divergence beside all logits, and both kinds beside what RL trainers use.

    python benchmarks/policy.py

float32, one thread, each run in a process of its own. About fifteen minutes and 12 GiB, most of both for the logits.
TRL's and verl's functions join where they are installed. Liger's kernels are Triton's and need a GPU.
"""

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cases
import harness
from cases import Case, Sides
from massieu.ops import token_divergence, token_statistics

WIDTH, WORDS = 1024, 50257
CHUNK = 32768
"""Words at a time, as TRL takes them for its divergences; its trainers' own number is private."""
Numbers = tuple[Tensor, Tensor]


def _models(tokens: float) -> list[Tensor]:
    """Hidden states and heads of a policy and of one that is near to it."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(int(tokens), WIDTH), torch.randn(WORDS, WIDTH) / WIDTH**0.5
    return [hidden, weight, hidden + 0.1 * torch.randn_like(hidden), weight + 0.1 * torch.randn_like(weight) / 32]


def _gradients(numbers: Callable[[], Numbers], learned: list[Tensor]) -> harness.Work:
    def once() -> object:
        first, second = numbers()
        return torch.autograd.grad(first.sum() + 0.01 * second.sum(), learned)

    return once


def _divergences(backward: bool) -> Callable[[float], Sides]:
    def prepare(tokens: float) -> Sides:
        models = [tensor.requires_grad_(backward) for tensor in _models(tokens)]

        def logits() -> Numbers:
            log_p = torch.log_softmax(models[0] @ models[1].mT, -1)
            log_q = torch.log_softmax(models[2] @ models[3].mT, -1)
            return (log_p.exp() * (log_p - log_q)).sum(-1), (log_q.exp() * (log_q - log_p)).sum(-1)

        def ours() -> Numbers:
            return token_divergence(*models)

        if not backward:
            return logits, ours
        return _gradients(logits, models), _gradients(ours, models)

    return prepare


def _statistics(peer: Callable[..., Any]) -> Callable[[float], Sides]:
    """Log-probabilities and entropies, and their gradients."""

    def prepare(tokens: float) -> Sides:
        learned = [tensor.requires_grad_() for tensor in _models(tokens)[:2]]
        target = torch.randint(WORDS, (int(tokens),))
        return (
            _gradients(lambda: peer(*learned, target), learned),
            _gradients(lambda: token_statistics(*learned, target)[:2], learned),
        )

    return prepare


def _trl(hidden: Tensor, weight: Tensor, target: Tensor) -> Numbers:
    kernels = importlib.import_module("trl.kernels.chunked_logprob")
    return kernels.ChunkedLogProbFunction.apply(
        hidden, weight, None, target, 1.0, CHUNK, None, 1.0, ("log_probs", "entropy")
    )[:2]


def _verl(hidden: Tensor, weight: Tensor, target: Tensor) -> Numbers:
    return importlib.import_module("verl.utils.experimental.torch_functional").FusedLinearForPPO()(
        hidden, weight, target
    )


def _count(tokens: int, passes: int, exponentials: int) -> harness.Count:
    return harness.Count(flops=2 * tokens * WORDS * WIDTH * passes, exponentials=exponentials * tokens * WORDS)


TOKENS, FEWER = 2048, 1024
WHY = (
    "ours multiplies both models' logits out twice: for the divergences, and again for the gradients. What it holds, "
    "whatever the number of tokens, is the logits of 256 tokens, 104 MiB, and later the gradients of both heads, 393 MiB"
)
PEERS = {"trl": ("TRL's chunks", _trl), "verl": ("verl's fused head", _verl)}
CASES = {
    "divergences, forward and backward": Case(
        "log_softmax of all logits",
        TOKENS,
        _divergences(True),
        1.3,
        0.2,
        3,
        True,
        count=_count(TOKENS, 8, 5),
        why=WHY,
    ),
    "divergences, forward": Case(
        "log_softmax of all logits",
        TOKENS,
        _divergences(False),
        1.3,
        0.1,
        3,
        True,
        count=_count(TOKENS, 2, 2),
        why=WHY,
    ),
} | {
    f"log-probability and entropy beside {name}": Case(
        name, FEWER, _statistics(peer), rounds=3, fresh=True, count=_count(FEWER, 4, 2)
    )
    for package, (name, peer) in PEERS.items()
    if find_spec(package)
}


def _left_out() -> dict[str, str]:
    """Peers without a row, and why."""
    return {name: "not installed" for package, (name, _) in PEERS.items() if not find_spec(package)} | {
        "Liger's kernels": "Triton's, which need a GPU"
    }


if __name__ == "__main__":
    cases.main(Path(__file__), __doc__, CASES, left_out=_left_out)
