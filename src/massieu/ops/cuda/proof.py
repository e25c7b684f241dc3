"""A test that a kernel is right on this machine: run once, on a small problem, before the kernel is used.

How PyTorch's CUDA kernels read their arguments was learnt from their sources, and versions, drivers and devices differ. So
each is compared with the reference in float64, forward and backward with cotangents of both results, once per process,
device, dtype and layout. A kernel that fails is not used, and a warning says so once.
"""

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from massieu.ops import packed_rows, reference
from massieu.ops.backends import Backend
from massieu.ops.documents import Documents
from massieu.ops.shapes import AttentionProblem

LENGTHS = 140, 300
"""Queries and keys of the small problem: no multiples of any block, and more than two of the largest."""
SMALL = 0.01
"""Size of log Z's cotangent relative to the output's, so that a kernel that loses it to rounding fails."""

Run = Callable[[AttentionProblem], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Layout:
    """The properties of a problem that change which code a kernel runs."""

    size: int
    value_size: int | None
    group: int
    shape: str
    """Numbers of queries and keys: "square", "wide" (more keys) or "tall" (more queries)."""
    low: int | None
    """Low end of the band in the small problem."""
    high: int | None
    mask: str | None
    """"keys" or "pairs", then "bool" or "float": a number per key, or per query and key."""
    learned_weight: bool
    heads_adjacent: bool
    """Whether heads are next to each other in memory, ``(B, L, H, D)``."""
    capped: bool = False
    packed: bool = False
    """Whether rows are of several documents."""

    @staticmethod
    def of(problem: AttentionProblem) -> "Layout":
        """The layout of a problem."""
        return Layout(*_facts(problem))

    def problem(self, device: torch.device, dtype: torch.dtype) -> AttentionProblem:
        """A small problem of this layout."""
        short, long = LENGTHS
        length, keys = {"square": (long, long), "wide": (short, long), "tall": (long, short)}[self.shape]
        numbers = np.random.default_rng(0)

        def draw(*shape: int) -> Tensor:
            tensor = torch.tensor(numbers.standard_normal(shape), dtype=dtype, device=device)
            if self.heads_adjacent:
                tensor = tensor.transpose(1, -2).contiguous().transpose(1, -2)
            return tensor

        query = draw(2, 2 * self.group, length, self.size).unflatten(1, (2, self.group))
        key = draw(2, 2, keys, self.size)
        value = None if self.value_size is None else draw(2, 2, keys, self.value_size)
        is_causal = self.low is None and self.high is not None
        window = None if self.low is None or self.high is None else (self.low, self.high)
        documents = None
        if self.packed:
            documents = Documents.of_lengths(_document_lengths(length), _document_lengths(keys))
        return AttentionProblem(
            query,
            key,
            value,
            log_weight=self._weight(numbers, length, keys, device),
            scale=self.size**-0.5,
            is_causal=is_causal,
            lead=tuple(query.shape[:-1]),
            window=window,
            offset=self.high or 0 if is_causal else 0,
            softcap=2.0 if self.capped else None,
            documents=documents,
        )

    def _weight(self, numbers: np.random.Generator, length: int, keys: int, device: torch.device) -> Tensor | None:
        """The log-weights of the small problem."""
        if self.mask is None:
            return None
        place, kind = self.mask.split(", ")
        shape = (2, 1, 1, length if place == "pairs" else 1, keys)
        visible = torch.tensor(numbers.random(shape) < 0.8, device=device)
        # Some queries see no key, which kernels may get wrong: single ones, all of an item, and those before the first key.
        if place == "pairs":
            visible[0, ..., :3, :] = False
        else:
            visible[0] = False
            visible[1, ..., :3] = False
        if kind == "bool":
            return visible
        weight = torch.tensor(numbers.standard_normal(shape), dtype=torch.float32, device=device)
        return weight.masked_fill(~visible, -torch.inf).requires_grad_(self.learned_weight)


def _facts(problem: AttentionProblem) -> tuple[Any, ...]:
    """The fields of a problem's layout, as constants: compiled code can pass these on, and not a `Layout`."""
    query = problem.query
    keys = problem.key.shape[2]
    weight = problem.log_weight
    length = query.shape[3]
    low, high = problem.band or (None, None)
    mask = None
    if weight is not None:
        place = "pairs" if weight.shape[3] > 1 else "keys"
        kind = "bool" if weight.dtype == torch.bool else "float"
        mask = f"{place}, {kind}"
    if length == keys:
        shape = "square"
    elif length < keys:
        shape = "wide"
    else:
        shape = "tall"
    # Causality has kernels of its own; all other bands of the small problem are the same.
    small_high = None
    if high is not None:
        small_high = 0 if high == 0 else 9
    return (
        query.shape[4],
        None if problem.value is None else problem.value.shape[3],
        query.shape[2],
        shape,
        None if low is None else -20,
        small_high,
        mask,
        weight is not None and weight.requires_grad,
        query.stride(3) > query.stride(1),
        problem.softcap is not None,
        problem.documents is not None,
    )


def _document_lengths(length: int) -> tuple[int, int, int]:
    """The lengths of three documents in a row."""
    return length // 2, 1, length - length // 2 - 1


def _exact(problem: AttentionProblem) -> tuple[Tensor, ...]:
    """Attention by the reference."""
    if problem.documents is None:
        return reference.attention(problem)
    return packed_rows.apply(reference.attention, problem)


class Verdict(Protocol):
    """The measured errors of a kernel."""

    def beyond(self, dtype: torch.dtype) -> str | None:
        """A phrase about the first error that is larger than the dtype explains; None if there is none."""
        ...


class Errors(NamedTuple):
    """Relative errors against float64; None for a part that the problem does not have."""

    output: float | None
    log_partition: float
    grad_query: float
    grad_key: float
    grad_value: float | None
    grad_log_weight: float | None
    share_of_log_partition_gradient: float
    """Part of log Z's gradient in the query that arrives beside a cotangent of the output a hundred times as large; 1 is
    right."""

    @staticmethod
    def of(run: Run, device: torch.device, dtype: torch.dtype, layout: Layout) -> "Errors":
        """The errors of a function of problems, on the small problem of a layout.

        Raises:
            What the function raises is raised here.
        """
        problem = layout.problem(device, dtype)
        numbers = np.random.default_rng(1)

        def draw(shape: Sequence[int]) -> Tensor:
            return torch.tensor(numbers.standard_normal(tuple(shape)), device=device)

        grad_log_z = draw(problem.query.shape[:4])
        grad = None if problem.value is None else draw((*problem.query.shape[:4], problem.value.shape[3])).to(dtype)
        exact = _differentiated(_exact, wide(problem), grad, grad_log_z)
        computed = _differentiated(run, problem, grad, grad_log_z)
        errors = [_relative(one, other) for one, other in zip(computed, exact, strict=True)]
        weight = errors.pop() if layout.learned_weight else None
        if grad is None:
            log_z, query, key = errors
            return Errors(None, log_z, query, key, None, weight, _share(computed[1], None, exact[1]))
        # Gradients are linear in the cotangents: the difference with and without log Z's cotangent is its own gradient.
        no_grad_output = torch.zeros_like(grad_log_z)[..., None] + 0 * grad
        exact_of_log_z = _differentiated(_exact, wide(problem), no_grad_output, grad_log_z)
        with_small = _differentiated(run, problem, grad, SMALL * grad_log_z)
        without = _differentiated(run, problem, grad, 0 * grad_log_z)
        share = _share(with_small[2], without[2], SMALL * exact_of_log_z[2])
        output, log_z, query, key, value = errors
        return Errors(output, log_z, query, key, value, weight, share)

    def beyond(self, dtype: torch.dtype) -> str | None:
        """A phrase about the first error that is larger than the dtype explains; None if there is none."""
        rounding = torch.finfo(dtype).eps
        # Rounding of scores, weights and sums in float32. Kernels form float32 products from three products of ten bits, which
        # leave out 2^-22 of a product, as much as two roundings; and their exponential is off by as much.
        single = 16 * torch.finfo(torch.float32).eps
        # In half precision a result rounds once, and the weights that go into a product; gradients do it twice.
        bars = {"log_partition": single + 0.1 * rounding, "output": single + 4 * rounding}
        for name, error in zip(self._fields[:-1], self[:-1], strict=True):
            bar = bars.get(name, 2 * single + 8 * rounding)
            if error is not None and not error <= bar:
                return f"its {name} is off by {error:.1e} of its size, of which rounding explains {bar:.1e}"
        share = self.share_of_log_partition_gradient
        tolerance = min(0.3, 0.01 + 40 * rounding)
        if abs(share - 1) <= tolerance:
            return None
        return f"of the gradient of log_partition {share:.3f} arrives, which ought to be 1 within {tolerance:.2f}"


def wide(problem: AttentionProblem) -> AttentionProblem:
    """A problem in float64."""
    value = problem.value
    weight = problem.log_weight
    if weight is not None and weight.is_floating_point():
        weight = weight.double()
    return replace(
        problem,
        query=problem.query.detach().double(),
        key=problem.key.detach().double(),
        value=None if value is None else value.detach().double(),
        log_weight=weight,
    )


def _differentiated(run: Run, problem: AttentionProblem, grad: Tensor | None, grad_log_z: Tensor) -> tuple[Tensor, ...]:
    """Results, then gradients of query, key, value and log-weights, as far as the problem has them."""
    names = [name for name in ("query", "key", "value") if getattr(problem, name) is not None]
    names += ["log_weight"] * (problem.log_weight is not None and problem.log_weight.requires_grad)
    tensors = [getattr(problem, name).detach().requires_grad_() for name in names]
    results = run(replace(problem, **dict(zip(names, tensors, strict=True))))
    log_z = results[-1]
    # Queries that see no key get no cotangent.
    sees_key = log_z != -torch.inf
    cotangents = [torch.where(sees_key, grad_log_z, 0.0).to(log_z.dtype)]
    if grad is not None:
        cotangents.insert(0, torch.where(sees_key.unsqueeze(-1), grad, 0.0).to(results[0].dtype))
    gradients = torch.autograd.grad(results, tensors, cotangents)
    return *(part.detach() for part in results), *gradients


def _relative(computed: Tensor, exact: Tensor) -> float:
    """Norm of the error relative to that of the exact numbers; infinite if numbers that are not finite differ."""
    computed = computed.double()
    is_finite = exact.isfinite()
    if not torch.equal(torch.where(is_finite, 0.0, computed), torch.where(is_finite, 0.0, exact)):
        return float("inf")
    error = torch.where(is_finite, computed - exact, 0.0).norm() / torch.where(is_finite, exact, 0.0).norm()
    return float(error.nan_to_num(nan=torch.inf))


def _share(gradient: Tensor, without: Tensor | None, exact: Tensor) -> float:
    """The projection of (gradient − without) on the exact gradient, in units of it."""
    difference = gradient.double() if without is None else gradient.double() - without.double()
    return float((difference * exact).sum() / exact.square().sum())


# --- verdicts --------------------------------------------------------------------------------------------------------


_verdicts: dict[tuple[object, ...], str | None] = {}
_warned: set[tuple[str, str, torch.dtype]] = set()
_lock = threading.Lock()


def failure(backend: Backend, problem: AttentionProblem) -> str | None:
    """Why a backend is not right for problems of this layout on this machine; None if it is.

    The first call for a layout measures, on a thread of its own: so the caller's transforms, autocast, modes and gradients do
    not affect it. Its numbers are not drawn from torch's random state.
    """
    query = problem.query
    if isinstance(query, FakeTensor) and not torch.compiler.is_compiling():
        return "numbers that are not there prove nothing"
    # A compiler that waits for another thread to compile waits for ever.
    can_measure = not (torch.compiler.is_compiling() and backend.name == "flex")
    return _failure(backend, str(query.device), query.dtype, _facts(problem), can_measure)


def _failure(backend: Backend, place: str, dtype: torch.dtype, facts: tuple[Any, ...], can_measure: bool) -> str | None:
    """`failure`, of constants: the compiler takes its result for a constant."""
    layout = Layout(*facts)

    def check() -> Errors:
        return _measured(backend, place, dtype, layout)

    return proved(backend.name, torch.device(place), dtype, layout, check if can_measure else None)


# As `torch.compiler.assume_constant_result` marks a function; that decorator would import the compiler, which takes seconds.
_failure._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def proved(
    name: str, device: torch.device, dtype: torch.dtype, layout: Layout, check: Callable[[], Verdict] | None
) -> str | None:
    """The verdict on a kernel: None, or what is wrong with it.

    Args:
        check: measures the kernel, and is called once per layout; None if it cannot be measured now.
    """
    key = (name, device, dtype, layout, torch.are_deterministic_algorithms_enabled())
    with _lock:
        if key in _verdicts:
            return _verdicts[key]
        if check is None:
            reason = "it cannot be proved while a caller of it is compiled: call it once before"
            warnings.warn(
                f"the attention kernel {name!r} is not used in code that is compiled now: {reason}", stacklevel=2
            )
            return reason
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "it was not proved before the capture of a graph: call it once before"
        try:
            reason = check().beyond(dtype)
        except torch.OutOfMemoryError as error:
            return f"there was no memory to prove it: {error}"
        except (RuntimeError, NotImplementedError) as error:
            # An error is a verdict here: the kernel cannot run on this device.
            reason = f"it failed its proof: {' '.join(str(error).split())[:200]}"
        _verdicts[key] = reason
        must_warn = reason is not None and (name, device.type, dtype) not in _warned
        if must_warn:
            _warned.add((name, device.type, dtype))
    if must_warn:
        warnings.warn(
            f"the attention kernel {name!r} is not used on {device} in {dtype}, but the next in order: {reason}",
            stacklevel=2,
        )
    return reason


def _measured(backend: Backend, place: str, dtype: torch.dtype, layout: Layout) -> Errors:
    """The errors of a backend, measured on another thread; what it raises is raised here."""
    results: list[Errors] = []
    raised: list[BaseException] = []

    def work() -> None:
        try:
            results.append(Errors.of(backend.forward, torch.device(place), dtype, layout))
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work, name="massieu-proof")
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return results[0]
