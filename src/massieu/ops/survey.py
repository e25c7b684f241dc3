"""How the backends of attention do on one device: their errors, times and memory beside PyTorch's own attention.

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
    """The backend where gradients are wanted."""
    inference: str
    refused: dict[str, str]
    """Why each backend that comes before that of training is not taken."""


@dataclass(frozen=True)
class Measured:
    """One backend, or one of PyTorch's own (then there is no log Z), causal, forward and backward."""

    name: str
    dtype: str
    own: bool
    """Whether it is a backend of `massieu.ops.attention`."""
    taken: bool
    """Whether `auto` takes it for a kind of problem in this dtype."""
    errors: dict[str, float]
    """By part; no gradients where it has none."""
    bars: dict[str, float]
    """Twice the error of PyTorch's fastest, and rounding; of log Z and the share, which PyTorch has not, rounding alone."""
    share: float | None
    """How much of log Z's gradient arrives beside the output's: its projection in float64, the worse of query and key."""
    forward_seconds: float
    both_seconds: float | None
    """Forward and backward."""
    forward_ratio: float | None
    """Beside PyTorch's best in the same rounds, as the next two."""
    both_ratio: float | None
    mebibytes: float | None
    """The most that is allocated beside the inputs, forward and backward; None where it is not measured."""

    @property
    def excess(self) -> list[str]:
        """The parts that miss their bar."""
        missed = [part for part, error in self.errors.items() if not error <= self.bars.get(part, float("inf"))]
        return missed + ["share"] * (self.share is not None and not abs(self.share - 1) <= self.bars["share"])


@dataclass(frozen=True)
class Survey:
    """All that was found on one device."""

    device: str
    name: str
    torch: str
    sizes: dict[str, int]
    choices: tuple[Choice, ...] = ()
    rows: tuple[Measured, ...] = ()
    unavailable: dict[str, str] | None = None
    """Kernels of PyTorch that do not run here, and what they say."""
    complete: bool = False

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
    """Measure every backend on a device; Ctrl-C ends it early with what was found until then.

    Args:
        device: such as "cuda:0"; None for a GPU where there is one.
        quick: Small sizes, which say what is right and little of speed.

    Raises:
        InputError: there is no such device.
    """
    place = _device(device)
    on_cuda = place.type == "cuda"
    length = 256 if quick else 4096 if on_cuda else 1024
    sizes = {"batch": 1, "heads": 2 if quick else 16 if on_cuda else 4, "length": length, "head_size": 64}
    name = torch.cuda.get_device_name(place) if on_cuda else platform.processor() or platform.machine()
    choices: list[Choice] = []
    rows: list[Measured] = []
    lost: dict[str, str] = {}
    complete = True
    try:
        for dtype in (*DTYPES, "float64"):
            progress(f"choosing backends for {dtype}")
            choices += [_choice(kind, dtype, place) for kind in KINDS]
        for dtype in DTYPES:
            progress(f"measuring errors, times and memory in {dtype}")
            taken = {name for each in choices if each.dtype == dtype for name in (each.training, each.inference)}
            found, missing = _measure(dtype, place, sizes, taken, 0.2 if quick else 2.0)
            rows, lost = rows + found, lost | missing
    except KeyboardInterrupt:
        complete = False
    return Survey(str(place), name, torch.__version__, sizes, tuple(choices), tuple(rows), lost, complete)


def _device(name: str | None) -> torch.device:
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
    length, key_heads = 256, 1 if kind == "grouped" else 4
    tensors = [
        torch.zeros(1, heads, length, 64, dtype=getattr(torch, dtype), device=device, requires_grad=True)
        for heads in (4, key_heads, key_heads)
    ]
    mask = {"mask of keys": (1, 1, 1, length), "mask of pairs": (length, length)}.get(kind)
    weight = None if mask is None else torch.ones(mask, dtype=torch.bool, device=device)
    query, key, value = tensors
    window, softcap = 32 if kind == "windowed" else None, 30.0 if kind == "soft-capped" else None
    problem = check_problem(query, key, value, weight, None, is_causal=kind == "causal", window=window, softcap=softcap)
    training = choose("auto", BACKENDS, problem).name
    before = BACKENDS[: [each.name for each in BACKENDS].index(training)]
    refused = {each.name: str(each.refuses(problem)) for each in before}
    with torch.no_grad():
        inference = choose("auto", BACKENDS, problem).name
    return Choice(kind, dtype, training, inference, refused)


# --- errors, times, memory -------------------------------------------------------------------------------------------


def _measure(
    dtype: str, device: torch.device, sizes: dict[str, int], taken: set[str], seconds: float
) -> tuple[list[Measured], dict[str, str]]:
    """Every backend and kernel of PyTorch that runs, and what the others of PyTorch say."""
    peers, unavailable = stock_attention(device, dtype)
    own = {backend.name: backend for backend in BACKENDS if _takes(backend, dtype, device, training=False)}
    learning = [name for name, backend in own.items() if _takes(backend, dtype, device, training=True)]
    runs = {**peers, **{name: _backend(name) for name in own}}
    trained = [*peers, *learning]
    precise = {name: errors_of(run, dtype, device, name in trained, grouped=name in own) for name, run in runs.items()}
    length = sizes["length"]
    inputs = draw(dtype, device, sizes["heads"], sizes["heads"], length, sizes["head_size"])
    forward = turns({name: forward_work(run, inputs) for name, run in runs.items()}, device, seconds)
    works = {name: both_work(runs[name], inputs) for name in trained}
    both = turns(works, device, seconds)
    best = min(peers, key=lambda name: statistics.median(both[name]))
    fast = min(peers, key=lambda name: statistics.median(forward[name]))
    eps = torch.finfo(DTYPES[dtype]).eps
    bars = {part: 2 * error + eps for part, error in precise[best][0].items()}
    bars |= {"log_partition": max(16 * torch.finfo(torch.float32).eps, eps / 64), "share": max(8 * eps, 1e-4)}
    rows = []
    for name in runs:
        errors, share = precise[name]
        rows.append(
            Measured(
                name,
                dtype,
                own=name in own,
                taken=name in taken and name in own,
                errors=errors,
                bars={part: bar for part, bar in bars.items() if part in errors or part == "share"},
                share=share,
                forward_seconds=statistics.median(forward[name]),
                both_seconds=statistics.median(both[name]) if name in both else None,
                forward_ratio=_ratio(forward[name], forward[fast]),
                both_ratio=_ratio(both[name], both[best]) if name in both else None,
                mebibytes=peak_memory(works[name], device) if name in works else None,
            )
        )
    return rows, unavailable


def _backend(name: Any) -> Attention:
    return lambda query, key, value: attention(query, key, value, is_causal=True, backend=name)


def _takes(backend: Backend, dtype: str, device: torch.device, training: bool) -> bool:
    query, key, value, *_ = (one.requires_grad_() for one in draw(dtype, device, 2, 2, 16, 64))
    with torch.set_grad_enabled(training):
        return backend.refuses(check_problem(query, key, value, None, None, is_causal=True)) is None


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(ours) / statistics.median(theirs)
