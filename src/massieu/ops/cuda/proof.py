"""That a kernel is right on this machine: measured once, on a small problem, before it is used.

What PyTorch's CUDA kernels return and read was learnt from their sources; versions, drivers and makes of device differ.
So each is held against the reference in float64, forward and backward with cotangents of both results, once per process,
device, dtype and layout. What fails is not used, and a warning says so once.
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
"""The size of log Z's cotangent beside the output's, at which a kernel that loses it is found out."""

Run = Callable[[AttentionProblem], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Layout:
    """What of a problem changes the way through a kernel."""

    size: int
    value_size: int | None
    group: int
    shape: str
    """Queries beside keys: "square", "wide" (more keys) or "tall"."""
    low: int | None
    """Of the band in the small problem."""
    high: int | None
    mask: str | None
    """One a key or one a pair of a query and a key, boolean or float."""
    learned_weight: bool
    turned: bool
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
            return tensor.transpose(1, -2).contiguous().transpose(1, -2) if self.turned else tensor

        query = draw(2, 2 * self.group, length, self.size).unflatten(1, (2, self.group))
        key = draw(2, 2, keys, self.size)
        value = None if self.value_size is None else draw(2, 2, keys, self.value_size)
        causal = self.low is None and self.high is not None
        return AttentionProblem(
            query,
            key,
            value,
            self._weight(numbers, length, keys, device),
            self.size**-0.5,
            causal,
            tuple(query.shape[:-1]),
            None if self.low is None or self.high is None else (self.low, self.high),
            offset=self.high or 0 if causal else 0,
            softcap=2.0 if self.capped else None,
            documents=Documents.of_lengths(*(_parted(size) for size in (length, keys))) if self.packed else None,
        )

    def _weight(self, numbers: np.random.Generator, length: int, keys: int, device: torch.device) -> Tensor | None:
        if self.mask is None:
            return None
        place, kind = self.mask.split(", ")
        shape = (2, 1, 1, length if place == "pairs" else 1, keys)
        kept = torch.tensor(numbers.random(shape) < 0.8, device=device)
        # Rows that see nothing belong to what is proved: of single queries, of a whole item, and before the first key.
        if place == "pairs":
            kept[0, ..., :3, :] = False
        else:
            kept[0], kept[1, ..., :3] = False, False
        if kind == "bool":
            return kept
        weight = torch.tensor(numbers.standard_normal(shape), dtype=torch.float32, device=device)
        return weight.masked_fill(~kept, -torch.inf).requires_grad_(self.learned_weight)


def _facts(problem: AttentionProblem) -> tuple[Any, ...]:
    """The fields of a problem's layout: constants, as compiled code can hand them on."""
    query, keys, weight = problem.query, problem.key.shape[2], problem.log_weight
    length = query.shape[3]
    low, high = problem.band or (None, None)
    mask = None
    if weight is not None:
        mask = f"{'pairs' if weight.shape[3] > 1 else 'keys'}, {'bool' if weight.dtype == torch.bool else 'float'}"
    return (
        query.shape[4],
        None if problem.value is None else problem.value.shape[3],
        query.shape[2],
        "square" if length == keys else "wide" if length < keys else "tall",
        None if low is None else -20,
        None if high is None else (0 if high == 0 else 9),
        mask,
        weight is not None and weight.requires_grad,
        query.stride(3) > query.stride(1),
        problem.softcap is not None,
        problem.documents is not None,
    )


def _parted(length: int) -> tuple[int, int, int]:
    """The lengths of three documents."""
    return length // 2, 1, length - length // 2 - 1


def _exact(problem: AttentionProblem) -> tuple[Tensor, ...]:
    if problem.documents is None:
        return reference.attention(problem)
    return packed_rows.apply(reference.attention, problem)


class Verdict(Protocol):
    """What was measured of a kernel."""

    def beyond(self, dtype: torch.dtype) -> str | None:
        """Which error is beyond what its dtype explains; None if none is."""
        ...


class Errors(NamedTuple):
    """Relative errors against float64; None where there is no such thing."""

    output: float | None
    log_partition: float
    grad_query: float
    grad_key: float
    grad_value: float | None
    grad_log_weight: float | None
    share_of_log_partition_gradient: float
    """How much of it arrives, for the query, beside a cotangent of the output a hundred times as large."""

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

        level = draw(problem.query.shape[:4])
        grad = None if problem.value is None else draw((*problem.query.shape[:4], problem.value.shape[3])).to(dtype)
        exact = _differentiated(_exact, wide(problem), grad, level)
        found = _differentiated(run, problem, grad, level)
        pairs = [_relative(one, other) for one, other in zip(found, exact, strict=True)]
        weight = pairs.pop() if layout.learned_weight else None
        if grad is None:
            log_z, query, key = pairs
            return Errors(None, log_z, query, key, None, weight, _share(found[1], None, exact[1]))
        # Sums of a function that is linear in the cotangents: what is left is log Z's own.
        alone = _differentiated(_exact, wide(problem), torch.zeros_like(level)[..., None] + 0 * grad, level)
        small = _differentiated(run, problem, grad, SMALL * level)
        without = _differentiated(run, problem, grad, 0 * level)
        share = _share(small[2], without[2], SMALL * alone[2])
        output, log_z, query, key, value = pairs
        return Errors(output, log_z, query, key, value, weight, share)

    def beyond(self, dtype: torch.dtype) -> str | None:
        """Which error is beyond what its dtype explains; None if none is."""
        rounding = torch.finfo(dtype).eps
        # What float32 does to scores, weights and sums. Kernels multiply float32 in three products of ten bits each, which
        # leave out 2^-22 of a product, two roundings of it; and their exponential is off by as much.
        single = 16 * torch.finfo(torch.float32).eps
        # In half precision a result rounds once, and the weights that go into a product; gradients do it twice.
        bars = {"log_partition": single + 0.1 * rounding, "output": single + 4 * rounding}
        for name, error in zip(self._fields[:-1], self[:-1], strict=True):
            bar = bars.get(name, 2 * single + 8 * rounding)
            if error is not None and not error <= bar:
                return f"its {name} is off by {error:.1e} of its size, of which rounding explains {bar:.1e}"
        share, room = self.share_of_log_partition_gradient, min(0.3, 0.01 + 40 * rounding)
        if abs(share - 1) <= room:
            return None
        return f"of the gradient of log_partition {share:.3f} arrives, which ought to be 1 within {room:.2f}"


def wide(problem: AttentionProblem) -> AttentionProblem:
    """A problem in float64."""
    value, weight = problem.value, problem.log_weight
    return replace(
        problem,
        query=problem.query.detach().double(),
        key=problem.key.detach().double(),
        value=None if value is None else value.detach().double(),
        log_weight=weight.double() if weight is not None and weight.is_floating_point() else weight,
    )


def _differentiated(run: Run, problem: AttentionProblem, grad: Tensor | None, level: Tensor) -> tuple[Tensor, ...]:
    """Results, then gradients of query, key, value and log-weights, of those that there are."""
    names = [name for name in ("query", "key", "value") if getattr(problem, name) is not None]
    names += ["log_weight"] * (problem.log_weight is not None and problem.log_weight.requires_grad)
    tensors = [getattr(problem, name).detach().requires_grad_() for name in names]
    results = run(replace(problem, **dict(zip(names, tensors, strict=True))))
    log_z = results[-1]
    seen = log_z != -torch.inf
    cotangents = [torch.where(seen, level, 0.0).to(log_z.dtype)]
    if grad is not None:
        cotangents.insert(0, torch.where(seen.unsqueeze(-1), grad, 0.0).to(results[0].dtype))
    gradients = torch.autograd.grad(results, tensors, cotangents)
    return *(part.detach() for part in results), *gradients


def _relative(found: Tensor, exact: Tensor) -> float:
    """The norm of the error beside that of the exact numbers; infinite where other numbers are infinite or NaN."""
    found, known = found.double(), exact.isfinite()
    if not torch.equal(torch.where(known, 0.0, found), torch.where(known, 0.0, exact)):
        return float("inf")
    error = torch.where(known, found - exact, 0.0).norm() / torch.where(known, exact, 0.0).norm()
    return float(error.nan_to_num(nan=torch.inf))


def _share(found: Tensor, without: Tensor | None, exact: Tensor) -> float:
    added = found.double() if without is None else found.double() - without.double()
    return float((added * exact).sum() / exact.square().sum())


# --- verdicts --------------------------------------------------------------------------------------------------------


_verdicts: dict[tuple[object, ...], str | None] = {}
_said: set[tuple[str, str, torch.dtype]] = set()
_lock = threading.Lock()


def failure(backend: Backend, problem: AttentionProblem) -> str | None:
    """Why a backend is not right for problems of this layout on this machine; None where it is.

    The first call of a layout measures. It does so on a thread of its own, so that no transform, autocast, mode or gradient
    of the caller has a part in it, and with numbers that touch no random state.
    """
    query = problem.query
    if isinstance(query, FakeTensor) and not torch.compiler.is_compiling():
        return "numbers that are not there prove nothing"
    # A compiler that waits for another thread to compile waits for ever.
    possible = not (torch.compiler.is_compiling() and backend.name == "flex")
    return _failure(backend, str(query.device), query.dtype, _facts(problem), possible)


def _failure(backend: Backend, place: str, dtype: torch.dtype, facts: tuple[Any, ...], possible: bool) -> str | None:
    layout = Layout(*facts)

    def check() -> Errors:
        return _measured(backend, place, dtype, layout)

    return proved(backend.name, torch.device(place), dtype, layout, check if possible else None)


# The mark of `torch.compiler.assume_constant_result`, which imports the compiler for it: seconds, for everyone.
_failure._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def proved(
    name: str, device: torch.device, dtype: torch.dtype, layout: Layout, check: Callable[[], Verdict] | None
) -> str | None:
    """The verdict on a kernel: None, or what is wrong with it.

    Args:
        check: measures it if it is the first of its layout; None where it cannot be measured now.
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
            # The one place where an error is a verdict: the kernel says that it cannot do this here.
            reason = f"it failed its proof: {' '.join(str(error).split())[:200]}"
        _verdicts[key] = reason
        new = reason is not None and (name, device.type, dtype) not in _said
        if new:
            _said.add((name, device.type, dtype))
    if new:
        warnings.warn(
            f"the attention kernel {name!r} is not used on {device} in {dtype}, but the next in order: {reason}",
            stacklevel=2,
        )
    return reason


def _measured(backend: Backend, place: str, dtype: torch.dtype, layout: Layout) -> Errors:
    found: list[Errors] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            found.append(Errors.of(backend.forward, torch.device(place), dtype, layout))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work, name="massieu-proof")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]
