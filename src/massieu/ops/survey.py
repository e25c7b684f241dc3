"""Errors, times and memory of attention's backends on one device, beside PyTorch's own attention.

`massieu devices` shows it. Errors are relative, in root mean square, to explicit softmax in float64 on the CPU.
"""

import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from massieu.errors import InputError
from massieu.ops.attention import BACKENDS, attention
from massieu.ops.backends import Backend, choose
from massieu.ops.measure import (
    DTYPES,
    Attention,
    both_work,
    draw,
    errors_of,
    forward_work,
    peak_memory,
    stock_attention,
    turns,
)
from massieu.ops.shapes import check_problem

KINDS = ("plain", "causal", "mask of keys", "mask of pairs", "windowed", "soft-capped", "grouped")


@dataclass(frozen=True)
class Choice:
    """What `auto` takes for one kind of problem."""

    kind: str
    dtype: str
    training: str
    """The backend with gradients."""
    inference: str
    """The backend without gradients."""
    refused: dict[str, str]
    """For each backend that is preferred to `training`, the reason why it is not taken."""


@dataclass(frozen=True)
class Measured:
    """One backend, or one kernel of PyTorch (which returns no log Z), with causal attention, forward and backward."""

    name: str
    dtype: str
    own: bool
    """Whether it is a backend of `massieu.ops.attention`."""
    taken: bool
    """Whether `auto` takes it for a kind of problem in this dtype."""
    errors: dict[str, float]
    """Errors by part; without the gradients if the backend has none."""
    bars: dict[str, float]
    """Bounds on the errors: twice that of PyTorch's fastest kernel, plus rounding. For log Z and the share, which PyTorch
    lacks, rounding alone."""
    share: float | None
    """Part of log Z's gradient that arrives beside the output's, by projection on the gradient in float64; 1 is right. The
    worse of query and key."""
    forward_seconds: float
    both_seconds: float | None
    """Forward and backward."""
    forward_ratio: float | None
    """Time relative to PyTorch's fastest kernel in the same rounds."""
    both_ratio: float | None
    mebibytes: float | None
    """Peak of what is allocated beside the inputs, forward and backward; None where it is not measured."""

    @property
    def excess(self) -> list[str]:
        """The parts whose error is beyond its bar; NaN is beyond every bar."""
        missed = [part for part, error in self.errors.items() if not error <= self.bars.get(part, float("inf"))]
        if self.share is not None and not abs(self.share - 1) <= self.bars["share"]:
            missed.append("share")
        return missed


@dataclass(frozen=True)
class Survey:
    """All results on one device."""

    device: str
    name: str
    torch: str
    sizes: dict[str, int]
    choices: tuple[Choice, ...] = ()
    rows: tuple[Measured, ...] = ()
    unavailable: dict[str, str] | None = None
    """Kernels of PyTorch that do not run here, with the first line of their error."""
    complete: bool = False
    """False if Ctrl-C ended the survey."""

    @property
    def ok(self) -> bool:
        """Whether every backend that `auto` would take is within its bars."""
        return not any(row.taken and row.excess for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """As ``massieu devices --json`` prints it."""
        rows = [asdict(row) | {"excess": row.excess} for row in self.rows]
        return asdict(self) | {"rows": rows, "ok": self.ok}


def survey(
    device: str | None = None, quick: bool = False, progress: Callable[[str], None] = lambda stage: None
) -> Survey:
    """Measure every backend on a device; Ctrl-C ends it early, with the results so far.

    Args:
        device: such as "cuda:0"; None for a GPU if there is one, else the CPU.
        quick: small sizes, which show errors, but little of speed.
        progress: called with the name of each stage as it begins.

    Raises:
        InputError: there is no such device.
    """
    place = _device(device)
    on_cuda = place.type == "cuda"
    sizes = {"batch": 1, "heads": 4, "length": 1024, "head_size": 64}
    if quick:
        sizes |= {"heads": 2, "length": 256}
    elif on_cuda:
        sizes |= {"heads": 16, "length": 4096}
    name = torch.cuda.get_device_name(place) if on_cuda else platform.processor() or platform.machine()
    choices: list[Choice] = []
    rows: list[Measured] = []
    unavailable: dict[str, str] = {}
    complete = True
    try:
        for dtype in (*DTYPES, "float64"):
            progress(f"choosing backends for {dtype}")
            choices += [_choice(kind, dtype, place) for kind in KINDS]
        for dtype in DTYPES:
            progress(f"measuring errors, times and memory in {dtype}")
            dtype_choices = [choice for choice in choices if choice.dtype == dtype]
            taken = {name for choice in dtype_choices for name in (choice.training, choice.inference)}
            dtype_rows, dtype_unavailable = _measure(dtype, place, sizes, taken, 0.2 if quick else 2.0)
            rows += dtype_rows
            unavailable |= dtype_unavailable
    except KeyboardInterrupt:
        complete = False
    return Survey(str(place), name, torch.__version__, sizes, tuple(choices), tuple(rows), unavailable, complete)


def _device(name: str | None) -> torch.device:
    """The device of that name, by default a GPU if there is one; an `InputError` if there is none."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"device {name!r} is not there: {str(error).splitlines()[0]}") from error
    place = torch.device(name)
    if place.type not in ("cpu", "cuda"):
        raise InputError(f"device must be the CPU or CUDA, got {name!r}")
    return place


# --- what is taken ---------------------------------------------------------------------------------------------------


def _choice(kind: str, dtype: str, device: torch.device) -> Choice:
    """What `auto` takes for a small problem of this kind, with and without gradients."""
    length = 256
    key_heads = 1 if kind == "grouped" else 4
    query, key, value = (
        torch.zeros(1, heads, length, 64, dtype=getattr(torch, dtype), device=device, requires_grad=True)
        for heads in (4, key_heads, key_heads)
    )
    mask_shape = {"mask of keys": (1, 1, 1, length), "mask of pairs": (length, length)}.get(kind)
    mask = None if mask_shape is None else torch.ones(mask_shape, dtype=torch.bool, device=device)
    problem = check_problem(
        query,
        key,
        value,
        log_weight=mask,
        scale=None,
        is_causal=kind == "causal",
        window=32 if kind == "windowed" else None,
        softcap=30.0 if kind == "soft-capped" else None,
    )
    training = choose("auto", BACKENDS, problem).name
    names = [backend.name for backend in BACKENDS]
    preferred = BACKENDS[: names.index(training)]
    refused = {backend.name: str(backend.refuses(problem)) for backend in preferred}
    with torch.no_grad():
        inference = choose("auto", BACKENDS, problem).name
    return Choice(kind, dtype, training, inference, refused)


# --- errors, times, memory -------------------------------------------------------------------------------------------


def _measure(
    dtype: str, device: torch.device, sizes: dict[str, int], taken: set[str], seconds: float
) -> tuple[list[Measured], dict[str, str]]:
    """Measure all backends and all kernels of PyTorch that run here.

    Args:
        taken: backends that `auto` takes for some problem in this dtype.
        seconds: budget for the rounds of either pass.

    Returns:
        A row for each, and the kernels of PyTorch that do not run, with their reasons.
    """
    peers, unavailable = stock_attention(device, dtype)
    backends = {backend.name: backend for backend in BACKENDS if _takes(backend, dtype, device, training=False)}
    differentiable = [name for name, backend in backends.items() if _takes(backend, dtype, device, training=True)]
    runs = {**peers, **{name: _backend(name) for name in backends}}
    trained = [*peers, *differentiable]
    errors_and_shares = {
        name: errors_of(run, dtype, device, name in trained, grouped=name in backends) for name, run in runs.items()
    }
    inputs = draw(dtype, device, sizes["heads"], sizes["heads"], sizes["length"], sizes["head_size"])
    forward = turns({name: forward_work(run, inputs) for name, run in runs.items()}, device, seconds)
    works = {name: both_work(runs[name], inputs) for name in trained}
    both = turns(works, device, seconds)
    fastest = min(peers, key=lambda name: statistics.median(both[name]))
    fastest_forward = min(peers, key=lambda name: statistics.median(forward[name]))
    eps = torch.finfo(DTYPES[dtype]).eps
    peer_errors, _ = errors_and_shares[fastest]
    bars = {part: 2 * error + eps for part, error in peer_errors.items()}
    bars["log_partition"] = max(16 * torch.finfo(torch.float32).eps, eps / 64)
    bars["share"] = max(8 * eps, 1e-4)
    rows = []
    for name in runs:
        errors, share = errors_and_shares[name]
        rows.append(
            Measured(
                name,
                dtype,
                own=name in backends,
                taken=name in taken and name in backends,
                errors=errors,
                bars={part: bar for part, bar in bars.items() if part in errors or part == "share"},
                share=share,
                forward_seconds=statistics.median(forward[name]),
                both_seconds=statistics.median(both[name]) if name in both else None,
                forward_ratio=_ratio(forward[name], forward[fastest_forward]),
                both_ratio=_ratio(both[name], both[fastest]) if name in both else None,
                mebibytes=peak_memory(works[name], device) if name in works else None,
            )
        )
    return rows, unavailable


def _backend(name: Any) -> Attention:
    """Causal attention by that backend."""
    return lambda query, key, value: attention(query, key, value, is_causal=True, backend=name)


def _takes(backend: Backend, dtype: str, device: torch.device, training: bool) -> bool:
    """Whether a backend takes a small causal problem, with gradients or without."""
    query, key, value, *_ = (tensor.requires_grad_() for tensor in draw(dtype, device, 2, 2, 16, 64))
    with torch.set_grad_enabled(training):
        return backend.refuses(check_problem(query, key, value, None, None, is_causal=True)) is None


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Ratio of median times."""
    return statistics.median(ours) / statistics.median(theirs)
