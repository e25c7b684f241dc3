"""Errors, time and memory of an attention, beside PyTorch's own kernels: for `massieu devices` and the benchmarks.

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
    """PyTorch's own attention by kernel; and for each kernel that does not run here, the first line of its error.

    Args:
        grouped: whether kernels must run with fewer key heads than query heads.
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
    candidates = {f"SDPA {name}": pinned(getattr(SDPBackend, kernel)) for name, kernel in kernels.items()}
    candidates["SDPA"] = stock
    if compiled:
        candidates["FlexAttention"] = _flex_attention(is_causal)
    available = {}
    unavailable = {}
    for name, run in candidates.items():
        query, key, value, grad, _ = draw(dtype, device, 2, 1 if grouped else 2, 256)
        leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
        # Whether a kernel takes a problem is known only by calling it.
        try:
            torch.autograd.grad(run(*leaves), leaves, grad)
            available[name] = run
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError) as error:
            unavailable[f"{name}, {dtype}"] = str(error).strip().splitlines()[0]
    return available, unavailable


def _flex_attention(is_causal: bool) -> Attention:
    """FlexAttention, compiled at its first call."""
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
    """Relative errors by part of attention; and, if it returns log Z, the part of log Z's gradient that arrives (1 is right).

    Args:
        trained: whether it has a gradient. Without one there are the errors of the results alone.
        grouped: whether two heads share keys and values, which not every kernel of PyTorch allows.
    """
    *tensors, grad_output, grad_log_z = draw(dtype, device, 4, 2 if grouped else 4, 192, size)
    wide = [tensor.double().cpu() for tensor in tensors]

    def exact(query: Tensor, key: Tensor, value: Tensor) -> Results:
        return _explicit(query, key, value, is_causal)

    exact_results, exact_gradients = _gradients(exact, wide, (grad_output, grad_log_z))
    if not trained:
        with torch.no_grad():
            return _relative_errors(PARTS, as_tuple(run(*tensors)), exact_results), None
    results, gradients = _gradients(run, tensors, (grad_output, grad_log_z))
    errors = _relative_errors(PARTS, results, exact_results)
    # The gradients of the output alone, as those of kernels that return no log Z.
    _, exact_of_output = _gradients(exact, wide, (grad_output, 0 * grad_log_z))
    if len(results) == 1:
        return errors | _relative_errors(PARTS[2:], gradients, exact_of_output), None
    _, of_output = _gradients(run, tensors, (grad_output, 0 * grad_log_z))
    shares = []
    # The value has no gradient of log Z.
    for place in range(2):
        of_log_z = gradients[place].double().cpu() - of_output[place].double().cpu()
        exact_of_log_z = exact_gradients[place] - exact_of_output[place]
        shares.append(float((of_log_z * exact_of_log_z).sum() / exact_of_log_z.square().sum()))
    errors |= _relative_errors(PARTS[2:], gradients, exact_gradients)
    return errors, max(shares, key=lambda share: abs(share - 1))


def as_tuple(result: Any) -> Results:
    """An attention's results as a tuple, whether it returns one or several."""
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _gradients(run: Attention, tensors: Sequence[Tensor], cotangents: Sequence[Tensor]) -> tuple[Results, Results]:
    """Results, and gradients for cotangents of these; cotangents beyond the results are not used."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    results = as_tuple(run(*leaves))
    used = [cotangent.to(result) for cotangent, result in zip(cotangents, results, strict=False)]
    return results, torch.autograd.grad(results, leaves, used)


def _relative_errors(names: Sequence[str], tensors: Sequence[Tensor], exact: Sequence[Tensor]) -> dict[str, float]:
    """Errors in root mean square, relative to the exact tensors, by name."""
    errors = {}
    for name, tensor, exact_tensor in zip(names, tensors, exact, strict=False):
        difference = tensor.detach().double().cpu() - exact_tensor.detach()
        errors[name] = float(difference.norm() / exact_tensor.detach().norm())
    return errors


def _explicit(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Results:
    """Output and log Z from the whole matrix of scores."""
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, 1)
    value = value.repeat_interleave(groups, 1)
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
    """Each work's seconds in 3 to 50 rounds, in which all works take turns, after one round that is not measured.

    On CUDA they are the device's time, as if it were busy when the call comes; `host_seconds` measures the host's.
    """
    for work in works.values():
        work()
    start = time.perf_counter()
    seconds = {name: [] for name in works}
    rounds = 0
    while rounds < 3 or (rounds < 50 and time.perf_counter() - start < budget):
        for name, work in works.items():
            seconds[name].append(_time(work, device))
        rounds += 1
    return seconds


def _time(work: Work, device: torch.device) -> float:
    """Seconds of one call."""
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
    """Median seconds until a call returns, which on CUDA is before the device has finished."""
    work()
    seconds = []
    for _ in range(rounds):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def peak_memory(work: Work, device: torch.device) -> float | None:
    """Peak of the mebibytes that a work allocates; None on devices where it is not measured."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20
