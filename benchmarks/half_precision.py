"""Attention with log Z forward and backward in half precision, beside PyTorch's own, and how much of log Z's gradient arrives.

    python benchmarks/half_precision.py

One thread, batch 1, 8 heads of size 64; the shares with 2 heads over 30 draws. About two minutes.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import cases
from cases import Case, Sides
from massieu import ops

HEADS, SIZE, DRAWS = 8, 64, 30
SCALES = 0.1, 0.01, 0.001
"""Of log Z's cotangent, beside a standard normal one of the output."""


def _sides(dtype: torch.dtype, is_causal: bool) -> Callable[[float], Sides]:
    def prepare(length: float) -> Sides:
        torch.manual_seed(0)
        shape = 1, HEADS, int(length), SIZE
        inputs = [torch.randn(shape).to(dtype).requires_grad_() for _ in range(3)]
        grad_output, grad_log_partition = torch.randn(shape).to(dtype), 0.01 * torch.randn(shape[:-1])

        def stock() -> object:
            query, key, value = inputs
            output = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
            return torch.autograd.grad(output, inputs, grad_output)

        def ours() -> object:
            results = tuple(ops.attention(*inputs, is_causal=is_causal))
            return torch.autograd.grad(results, inputs, (grad_output, grad_log_partition))

        return stock, ours

    return prepare


def _gradients(tensors: list[Tensor], grad_output: Tensor, grad_log_partition: Tensor) -> tuple[Tensor, ...]:
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    results = tuple(ops.attention(*tensors, is_causal=True))
    return torch.autograd.grad(results, tensors, (grad_output, grad_log_partition))


def _shares(dtype: torch.dtype, scale: float, length: int = 1024) -> dict[str, object]:
    """Projections of what log Z's cotangent adds to the gradients on what it adds in float64, for query and key."""
    found = []
    for seed in range(DRAWS):
        torch.manual_seed(seed)
        *tensors, grad = (torch.randn(1, 2, length, SIZE).to(dtype) for _ in range(4))
        level = scale * torch.randn(1, 2, length)
        wide = [tensor.double() for tensor in tensors]
        added = zip(_gradients(tensors, grad, level), _gradients(tensors, grad, 0 * level), strict=True)
        exact = _gradients(wide, torch.zeros_like(wide[0]), level.double())
        pairs = list(zip(added, exact, strict=True))[:2]
        found.append([float(((a.double() - b.double()) * e).sum() / e.square().sum()) for (a, b), e in pairs])
    shares = torch.tensor(found, dtype=torch.float64)
    errors = shares.std(0) / DRAWS**0.5
    return {"dtype": str(dtype).removeprefix("torch."), "scale": scale, "mean": shares.mean(0).tolist()} | {
        "standard_error": errors.tolist(),
        "draws": DRAWS,
        "length": length,
    }


def _all_shares() -> list[dict[str, object]]:
    return [_shares(dtype, scale) for dtype in (torch.bfloat16, torch.float16) for scale in SCALES]


STOCK = "fused attention in the same precision, forward and backward"
CASES = {
    "bfloat16, causal, L = 1024": Case(STOCK, 1024, _sides(torch.bfloat16, True), 1.1, rounds=21),
    "bfloat16, L = 2048": Case(STOCK, 2048, _sides(torch.bfloat16, False), 1.1, rounds=15),
    "float16, causal, L = 1024": Case(STOCK, 1024, _sides(torch.float16, True), 1.1, rounds=7),
}


if __name__ == "__main__":
    cases.main(Path(__file__), __doc__, CASES, shares=_all_shares)
