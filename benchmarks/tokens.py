"""Log-probabilities and entropies of tokens without logits, against logits kept in full.

    python benchmarks/tokens.py

float32, one thread, each run in a process of its own. About twenty minutes and 11 GiB, most of both for the logits.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import cases
import harness
from cases import Case, Sides
from massieu.ops import token_statistics

WIDTH = 1024
Numbers = tuple[Tensor, Tensor]


def _sides(words: int, backward: bool) -> Callable[[float], Sides]:
    def prepare(tokens: float) -> Sides:
        torch.manual_seed(0)
        hidden = torch.randn(int(tokens), WIDTH, requires_grad=backward)
        weight = (torch.randn(words, WIDTH) / WIDTH**0.5).requires_grad_(backward)
        target = torch.randint(words, (int(tokens),))

        def logits() -> Numbers:
            log_p = torch.log_softmax(hidden @ weight.mT, -1)
            return log_p.gather(-1, target.unsqueeze(-1)), -(log_p.exp() * log_p).sum(-1)

        def ours() -> Numbers:
            return token_statistics(hidden, weight, target)[:2]

        def work(numbers: Callable[[], Numbers]) -> harness.Work:
            def once() -> object:
                log_probability, entropy = numbers()
                objective = log_probability.sum() + 0.01 * entropy.sum()
                return torch.autograd.grad(objective, (hidden, weight)) if backward else objective

            return once

        return work(logits), work(ours)

    return prepare


def _case(tokens: int, words: int, backward: bool, memory_bar: float | None, why: str | None = None) -> Case:
    times = 2 if backward else 1
    # Scores multiplied out, in the backward pass again and both gradients; an exponential of each score in either pass.
    count = harness.Count(
        flops=2 * tokens * words * WIDTH * (4 if backward else 1), exponentials=times * tokens * words
    )
    prepare = _sides(words, backward)
    return Case(
        "log_softmax of all logits", tokens, prepare, 1.2, memory_bar, rounds=3, fresh=True, count=count, why=why
    )


FEWER = (
    "at 8,192 tokens the logits kept in full do not fit the machine that measured. Ours is the weight's gradient, 594 MiB, "
    "and some tiles, whatever the number of tokens"
)
CASES = {
    "forward and backward, 8192 × 1024 × 50257": _case(8192, 50257, True, 0.05),
    "forward, 8192 × 1024 × 50257": _case(8192, 50257, False, 0.02),
    "forward and backward, 4096 × 1024 × 152064": _case(4096, 152064, True, None, FEWER),
    "forward, 4096 × 1024 × 152064": _case(4096, 152064, False, 0.02),
}


if __name__ == "__main__":
    cases.main(Path(__file__), __doc__, CASES)
