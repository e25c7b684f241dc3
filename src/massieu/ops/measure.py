"""An attention's errors, time and memory, beside PyTorch's own kernels: for `massieu devices` and the benchmarks.

An attention here is a function of query, key and value to an output, or to an output and log Z. Errors are relative, in
root mean square, to explicit softmax in float64 on the CPU.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PARTS = ("output", "log_partition", "grad_query", "grad_key", "grad_value")

Work = Callable[[], object]
Attention = Callable[[Tensor, Tensor, Tensor], Any]
Results = tuple[Tensor, ...]


def draw(
    dtype: str, device: torch.device, heads: int, key_heads: int, length: int, size: int = 64, batch: int = 1
) -> Results:
    """Query, key, value and the cotangent of the output in the dtype, and the cotangent of log Z."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(heads, length, size), (key_heads, length, size), (key_heads, length, size), (heads, length, size)]
    drawn = [torch.randn(batch, *shape, generator=generator).to(device, DTYPES[dtype]) for shape in shapes]
    return *drawn, torch.randn(batch, heads, length, generator=generator).to(device)


def stock_attention(
    device: torch.device, dtype: str, is_causal: bool = True, grouped: bool = False, compiled: bool = True
) -> tuple[dict[str, Attention], dict[str, str]]:
    """PyTorch's own attention by kernel, with those that do not run here, grouped where that is asked, and their reason.

    Args:
        compiled: whether FlexAttention is one of them, which takes many seconds to compile.
    """

    def stock(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        shared = key.shape[1] != query.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=shared)

    def pinned(kernel: SDPBackend) -> Attention:
        def run(*tensors: Tensor) -> Tensor:
            with sdpa_kernel(kernel):
                return stock(*tensors)

        return run

    if device.type != "cuda":
        return {"SDPA": stock}, {}
    kernels = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cuDNN": "CUDNN_ATTENTION"}
    given = {f"SDPA {name}": pinned(getattr(SDPBackend, kernel)) for name, kernel in kernels.items()}
    given |= {"SDPA": stock} | ({"FlexAttention": _flex_attention(is_causal)} if compiled else {})
    found, lost = {}, {}
    for name, run in given.items():
        query, key, value, grad, _ = draw(dtype, device, 2, 1 if grouped else 2, 256)
        leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
        try:
            torch.autograd.grad(run(*leaves), leaves, grad)
            found[name] = run
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError) as error:
            lost[f"{name}, {dtype}"] = str(error).strip().splitlines()[0]
    return found, lost


def _flex_attention(is_causal: bool) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention)
    masks: dict[int, Any] = {}

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        length = query.shape[2]
        if is_causal and length not in masks:
            masks[length] = create_block_mask(
                lambda b, h, i, j: i >= j, None, None, length, length, device=query.device.type
            )
        return compiled(query, key, value, block_mask=masks.get(length), enable_gqa=key.shape[1] != query.shape[1])

    return run


def errors_of(
    run: Attention,
    dtype: str,
    device: torch.device,
    trained: bool = True,
    is_causal: bool = True,
    size: int = 64,
    grouped: bool = True,
) -> tuple[dict[str, float], float | None]:
    """Relative errors by part of attention, and the share of log Z's gradient where there is a log Z.

    Args:
        trained: whether it has a gradient. Without one there are the errors of the results alone.
        grouped: whether two heads share keys and values, which not every kernel of PyTorch allows.
    """
    *tensors, grad_output, grad_log_z = draw(dtype, device, 4, 2 if grouped else 4, 192, size)
    wide = [tensor.double().cpu() for tensor in tensors]

    def exact(query: Tensor, key: Tensor, value: Tensor) -> Results:
        return _explicit(query, key, value, is_causal)

    wanted, slopes = _gradients(exact, wide, (grad_output, grad_log_z))
    if not trained:
        with torch.no_grad():
            return _named(PARTS, listed(run(*tensors)), wanted), None
    found, got = _gradients(run, tensors, (grad_output, grad_log_z))
    none = _gradients(exact, wide, (grad_output, 0 * grad_log_z))[1]
    if len(found) == 1:
        return _named(PARTS, found, wanted) | _named(PARTS[2:], got, none), None
    without = _gradients(run, tensors, (grad_output, 0 * grad_log_z))[1]
    shares = []
    for place in range(2):
        added = got[place].double().cpu() - without[place].double().cpu()
        true = slopes[place] - none[place]
        shares.append(float((added * true).sum() / true.square().sum()))
    errors = _named(PARTS, found, wanted) | _named(PARTS[2:], got, slopes)
    return errors, max(shares, key=lambda share: abs(share - 1))


def listed(result: Any) -> Results:
    """An attention's results as a tuple."""
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _gradients(run: Attention, tensors: Sequence[Tensor], cotangents: Sequence[Tensor]) -> tuple[Results, Results]:
    """Results, and gradients for the cotangents of as many results as there are."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    results = listed(run(*leaves))
    given = [one.to(result) for one, result in zip(cotangents, results, strict=False)]
    return results, torch.autograd.grad(results, leaves, given)


def _named(names: Sequence[str], found: Sequence[Tensor], exact: Sequence[Tensor]) -> dict[str, float]:
    errors = {}
    for name, one, true in zip(names, found, exact, strict=False):
        errors[name] = float((one.detach().double().cpu() - true.detach()).norm() / true.detach().norm())
    return errors


def _explicit(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Results:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def forward_work(run: Attention, inputs: Sequence[Tensor]) -> Work:
    """The forward pass, without a gradient, of inputs that `draw` made."""

    def work() -> None:
        with torch.no_grad():
            run(*inputs[:3])

    return work


def both_work(run: Attention, inputs: Sequence[Tensor]) -> Work:
    """Forward and backward, with a cotangent for each result."""

    def work() -> None:
        _gradients(run, inputs[:3], inputs[3:])

    return work


AHEAD = 10_000_000
"""Cycles, a few milliseconds, that a device waits before it is timed: calls are then on their way, as within a model."""


def turns(works: dict[str, Work], device: torch.device, budget: float) -> dict[str, list[float]]:
    """Each work's seconds in rounds in which all take turns, 3 to 50 of them, after one that is not measured.

    On CUDA they are the device's, as where it is busy when a call comes; what a call takes of the host is `host_seconds`.
    """
    for work in works.values():
        work()
    start, found, rounds = time.perf_counter(), {name: [] for name in works}, 0
    while rounds < 3 or (rounds < 50 and time.perf_counter() - start < budget):
        for name, work in works.items():
            found[name].append(_time(work, device))
        rounds += 1
    return found


def _time(work: Work, device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        torch.cuda._sleep(AHEAD)
        first.record()
        work()
        last.record()
        last.synchronize()
    return first.elapsed_time(last) / 1e3


def host_seconds(work: Work, device: torch.device, rounds: int = 50) -> float:
    """The median of what a call takes until it returns, which on CUDA is before the device has done it."""
    work()
    found = []
    for _ in range(rounds):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def peak_memory(work: Work, device: torch.device) -> float | None:
    """Mebibytes that a work allocates at the most beyond what is there; None where it is not measured."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20
