"""How the backends of attention do on one device: their errors, times and memory beside PyTorch's own attention.

`massieu devices` shows it. Errors are relative, in root mean square, to explicit softmax in float64 on the CPU.
"""

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from massieu.errors import InputError
from massieu.ops.attention import BACKENDS, attention
from massieu.ops.backends import Backend, choose
from massieu.ops.shapes import check_problem

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KINDS = ("plain", "causal", "mask of keys", "mask of pairs", "windowed", "soft-capped", "grouped")
PARTS = ("output", "log_partition", "grad_query", "grad_key", "grad_value")

Work = Callable[[], object]
Attention = Callable[[Tensor, Tensor, Tensor], Any]


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
            progress(f"what auto takes in {dtype}")
            choices += [_choice(kind, dtype, place) for kind in KINDS]
        for dtype in DTYPES:
            progress(f"errors, times and memory in {dtype}")
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
    problem = check_problem(
        *tensors, weight, None, kind == "causal", 32 if kind == "windowed" else None, 30.0 if kind == "soft-capped" else None
    )  # fmt: skip
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
    peers, unavailable = _peers(device, dtype)
    own = {backend.name: backend for backend in BACKENDS if _takes(backend, dtype, device, training=False)}
    learning = [name for name, backend in own.items() if _takes(backend, dtype, device, training=True)]
    runs = {**peers, **{name: _backend(name) for name in own}}
    trained = [*peers, *learning]
    precise = {name: _errors(run, dtype, device, name in own, name in trained) for name, run in runs.items()}
    length = sizes["length"]
    inputs = _inputs(dtype, device, sizes["heads"], sizes["heads"], length, sizes["head_size"])
    forward = _seconds({name: _forward(run, inputs) for name, run in runs.items()}, device, seconds)
    works = {name: _both(runs[name], inputs) for name in trained}
    both = _seconds(works, device, seconds)
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
                mebibytes=_peak(works[name], device) if name in works else None,
            )
        )
    return rows, unavailable


def _inputs(dtype: str, device: torch.device, heads: int, key_heads: int, length: int, size: int) -> tuple[Tensor, ...]:
    """Query, key, value and the cotangent of the output in the dtype, and the cotangent of log Z."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(heads, length, size), (key_heads, length, size), (key_heads, length, size), (heads, length, size)]
    drawn = [torch.randn(1, *shape, generator=generator).to(device, DTYPES[dtype]) for shape in shapes]
    return *drawn, torch.randn(1, heads, length, generator=generator).to(device)


def _backend(name: Any) -> Attention:
    return lambda query, key, value: attention(query, key, value, is_causal=True, backend=name)


def _takes(backend: Backend, dtype: str, device: torch.device, training: bool) -> bool:
    query, key, value, *_ = (one.requires_grad_() for one in _inputs(dtype, device, 2, 2, 16, 64))
    with torch.set_grad_enabled(training):
        return backend.refuses(check_problem(query, key, value, None, None, True)) is None


def _peers(device: torch.device, dtype: str) -> tuple[dict[str, Attention], dict[str, str]]:
    """PyTorch's own attention by kernel, with those that do not run here and their reason."""

    def stock(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        grouped = key.shape[1] != query.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)

    def pinned(kernel: SDPBackend) -> Attention:
        def run(*tensors: Tensor) -> Tensor:
            with sdpa_kernel(kernel):
                return stock(*tensors)

        return run

    if device.type != "cuda":
        return {"SDPA": stock}, {}
    kernels = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cuDNN": "CUDNN_ATTENTION"}
    given = {f"SDPA {name}": pinned(getattr(SDPBackend, kernel)) for name, kernel in kernels.items()}
    given |= {"SDPA": stock, "FlexAttention": _flex_attention()}
    found, lost = {}, {}
    for name, run in given.items():
        query, key, value, grad, _ = _inputs(dtype, device, 2, 2, 256, 64)
        leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
        try:
            torch.autograd.grad(run(*leaves), leaves, grad)
            found[name] = run
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError) as error:
            lost[f"{name}, {dtype}"] = str(error).strip().splitlines()[0]
    return found, lost


def _flex_attention() -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention)
    masks: dict[int, Any] = {}

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        length = query.shape[2]
        if length not in masks:
            masks[length] = create_block_mask(
                lambda b, h, i, j: i >= j, None, None, length, length, device=query.device.type
            )
        return compiled(query, key, value, block_mask=masks[length], enable_gqa=key.shape[1] != query.shape[1])

    return run


def _output(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _errors(
    run: Attention, dtype: str, device: torch.device, own: bool, trained: bool
) -> tuple[dict[str, float], float | None]:
    """Relative errors by part, and the share of log Z's gradient, of grouped causal attention."""
    query, key, value, *cotangents = _inputs(dtype, device, 4, 2, 192, 64)
    cotangents = cotangents if own else cotangents[:1]

    def gradients(function: Attention, *given: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
        leaves = (
            [tensor.double().cpu().detach().requires_grad_() for tensor in leaves] if function is _exact else leaves
        )
        results = _output(function(*leaves))[: len(given)]
        given = tuple(one.to(result) for one, result in zip(given, results, strict=True))
        return results, torch.autograd.grad(results, leaves, given)

    wanted, slopes = gradients(_exact, *cotangents)
    if not trained:
        with torch.no_grad():
            found = _output(run(query, key, value))
        return dict(zip(PARTS, map(_error, found, wanted), strict=False)), None
    found, got = gradients(run, *cotangents)
    errors = dict(zip(PARTS, map(_error, found, wanted), strict=False)) | dict(
        zip(PARTS[2:], map(_error, got, slopes), strict=True)
    )
    if not own:
        return errors, None
    without, none = (
        gradients(run, cotangents[0], 0 * cotangents[1])[1],
        gradients(_exact, cotangents[0], 0 * cotangents[1])[1],
    )
    shares = []
    for full, base, exact, level in list(zip(got, without, slopes, none, strict=True))[:2]:
        added, true = full.double().cpu() - base.double().cpu(), exact - level
        shares.append(float((added * true).sum() / true.square().sum()))
    return errors, max(shares, key=lambda share: abs(share - 1))


def _exact(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    groups, (length, keys) = query.shape[1] // key.shape[1], (query.shape[2], key.shape[2])
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * query.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones(length, keys, dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found.detach().double().cpu() - exact.detach()).norm() / exact.detach().norm())


def _forward(run: Attention, inputs: Sequence[Tensor]) -> Work:
    def work() -> None:
        with torch.no_grad():
            run(*inputs[:3])

    return work


def _both(run: Attention, inputs: Sequence[Tensor]) -> Work:
    def work() -> None:
        leaves = [tensor.detach().requires_grad_() for tensor in inputs[:3]]
        results = _output(run(*leaves))
        torch.autograd.grad(results, leaves, [one.to(result) for one, result in zip(inputs[3:], results, strict=False)])

    return work


def _seconds(works: dict[str, Work], device: torch.device, budget: float) -> dict[str, list[float]]:
    """Each work's seconds in rounds in which all take turns, 3 to 50 of them, after one that is not measured."""
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
        first.record()
        work()
        last.record()
        last.synchronize()
    return first.elapsed_time(last) / 1e3


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(ours) / statistics.median(theirs)


def _peak(work: Work, device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20
