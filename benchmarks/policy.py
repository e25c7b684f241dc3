"""What policy optimisation and distillation compute, beside TRL's own function and beside logits kept in full.

    python benchmarks/policy.py

float32, one thread, 1,024 tokens of 1,024 numbers, 50,257 words, forward and backward. TRL's row needs `pip install trl`; it is
left out without. Liger's and cut-cross-entropy's kernels run on CUDA alone. About five minutes.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import cases
from cases import Case, Sides
from massieu import ops

WIDTH, WORDS, TOKENS = 1024, 50257, 1024


def _model(tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(tokens, WIDTH, requires_grad=True), (torch.randn(WORDS, WIDTH) / WIDTH**0.5).requires_grad_()


def _divergence(tokens: float) -> Sides:
    tensors = (*_model(int(tokens), 0), *_model(int(tokens), 1))

    def logits() -> object:
        log_p, log_q = (torch.log_softmax(hidden @ weight.mT, -1) for hidden, weight in (tensors[:2], tensors[2:]))
        both = (log_p.exp() * (log_p - log_q)).sum() + (log_q.exp() * (log_q - log_p)).sum()
        return torch.autograd.grad(both, tensors)

    def ours() -> object:
        found = ops.token_divergence(*tensors)
        return torch.autograd.grad(found.divergence.sum() + found.reverse_divergence.sum(), tensors)

    return logits, ours


def _statistics(tokens: float) -> Sides:
    from trl.trainer import utils

    tensors = _model(int(tokens), 0)
    target = torch.randint(WORDS, (int(tokens),))

    def work(numbers: Callable[[], tuple[Tensor, Tensor]]) -> Callable[[], object]:
        def once() -> object:
            log_probability, entropy = numbers()
            return torch.autograd.grad(log_probability.sum() + 0.01 * entropy.sum(), tensors)

        return once

    def theirs() -> tuple[Tensor, Tensor]:
        options = 1.0, utils._CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ("log_probs", "entropy")
        log_probability, entropy, *_ = utils._ChunkedLogProbFunction.apply(*tensors, None, target, *options)
        return log_probability, entropy

    return work(theirs), work(lambda: ops.token_statistics(*tensors, target)[:2])


CASES = {
    "both divergences of two models": Case(
        "log_softmax of both models' logits",
        TOKENS,
        _divergence,
        rounds=3,
        fresh=True,
        why="ten products to the logits' six: both log Z first, so that close models keep their digits",
    )
}
if importlib.util.find_spec("trl") is not None:
    CASES["log-probability and entropy"] = Case(
        "TRL's chunked log-probabilities", TOKENS, _statistics, rounds=3, fresh=True
    )


if __name__ == "__main__":
    cases.main(Path(__file__), __doc__, CASES)
