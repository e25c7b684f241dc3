"""Attention with log Z, its moments, losses, a probe and a Monitor on CUDA, beside the best of PyTorch's own kernels.

    python benchmarks/on_cuda.py
    python benchmarks/on_cuda.py --only "bfloat16, causal, L = 4096" --only linear --seconds 1

Every backend is held against float64 (`benchmarks/right.py`). Times of kernels are the device's, by CUDA events behind work
that keeps it busy; all sides take turns. What a call takes of the host is told apart. About six minutes on an H100, and 10 GiB
on the device. What is measured is kept: interrupted, it goes on from there when it is called again. Liger and
cut-cross-entropy take part where they are installed. It is not called cuda.py, because PyTorch imports NVIDIA's `cuda`.
"""

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import harness
import right
from massieu.ops import attention, attention_moments, linear_cross_entropy
from massieu.ops.measure import (
    Attention,
    Work,
    both_work,
    draw,
    forward_work,
    host_seconds,
    peak_memory,
    stock_attention,
    turns,
)

OURS = "ours"
HEADS, TOKENS_AT_ONCE, SECONDS = 16, 16384, 1.0
SMALL = 16
"""Tokens of a call whose time is the host's."""
LOSS_TOKENS, LOSS_WIDTH, VOCABULARIES = 8192, 1024, (50257, 152064)
SIX = ("log_partition", "entropy", "mean_score", "score_variance", "max_weight", "collision")
"""Moments under the attention weights."""
PROBED = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257}
WINDOW, BATCH = 512, 8
PROBES: tuple[tuple[str, dict[str, Any], int], ...] = (
    ("quick", {"statistics": "quick"}, 64),
    ("quick", {"statistics": "quick"}, 2048),
    ("attention, eight re-initialised models", {"statistics": ["attention"]}, 64),
    ("attention, eight re-initialised models", {"statistics": ["attention"]}, 2048),
)
"""Their names, options, and windows."""
TRAINED = 8, 1024
"""Rows and tokens of a training step's batch."""
TRAINED_MODEL = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257}


@dataclass(frozen=True)
class Sides:
    """Works by name, one of which is `OURS`; and what cannot take part, with its reason."""

    works: dict[str, Work]
    lost: dict[str, str]


@dataclass(frozen=True)
class Case:
    """What is compared with the best of the others, and the bars."""

    prepare: Callable[[torch.device], Sides]
    time_bar: float | None
    memory_bar: float | None = None


@dataclass(frozen=True)
class Shape:
    """Of an attention with `HEADS` heads and `TOKENS_AT_ONCE` tokens in all rows together."""

    length: int
    size: int
    dtype: str = "bfloat16"
    is_causal: bool = True
    key_heads: int = HEADS

    @property
    def name(self) -> str:
        kind = f"{'causal, ' * self.is_causal}{'grouped, ' * (self.key_heads < HEADS)}"
        return f"{self.dtype}, {kind}L = {self.length}, D = {self.size}"

    def drawn(self, device: torch.device) -> tuple[Tensor, ...]:
        batch = max(1, TOKENS_AT_ONCE // self.length)
        return draw(self.dtype, device, HEADS, self.key_heads, self.length, self.size, batch)

    def peers(self, device: torch.device) -> tuple[dict[str, Attention], dict[str, str]]:
        return stock_attention(device, self.dtype, self.is_causal, self.key_heads < HEADS, compiled=False)


SHAPES = (
    Shape(1024, 64),
    Shape(4096, 64),
    Shape(16384, 64),
    Shape(4096, 128),
    Shape(16384, 128),
    Shape(4096, 128, is_causal=False),
    Shape(16384, 128, key_heads=HEADS // 4),
    Shape(4096, 64, "float16"),
    Shape(4096, 64, "float32"),
)
MOMENT_SHAPES = Shape(4096, 64), Shape(4096, 128), Shape(512, 64, "float32")


def _ours(is_causal: bool) -> Attention:
    return lambda query, key, value: attention(query, key, value, is_causal=is_causal)


def _attention(shape: Shape, backward: bool, device: torch.device) -> Sides:
    peers, lost = shape.peers(device)
    inputs, work = shape.drawn(device), both_work if backward else forward_work
    runs = {**peers, OURS: _ours(shape.is_causal)}
    return Sides({name: work(run, inputs) for name, run in runs.items()}, lost)


def _moments(shape: Shape, names: tuple[str, ...] | None, device: torch.device) -> Sides:
    """With the output, beside attention that gives the output alone."""
    peers, lost = shape.peers(device)
    backend = "triton" if device.type == "cuda" else "blocks"

    def ours(query: Tensor, key: Tensor, value: Tensor) -> object:
        return attention_moments(query, key, value, is_causal=shape.is_causal, moments=names, backend=backend)  # pyright: ignore[reportCallIssue, reportArgumentType]

    inputs = shape.drawn(device)
    return Sides({name: forward_work(run, inputs) for name, run in {**peers, OURS: ours}.items()}, lost)


def _losses(dtype: torch.dtype, tokens: int, width: int, words: int, device: torch.device) -> Sides:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).to(device, dtype).requires_grad_()
    weight = (torch.randn(words, width, generator=generator) / width**0.5).to(device, dtype).requires_grad_()
    target = torch.randint(words, (tokens,), generator=generator).to(device)
    found: dict[str, Callable[..., Any]] = {
        "F.cross_entropy of the logits": lambda h, w, y: F.cross_entropy(h @ w.mT, y)
    }
    lost = {}
    if hasattr(F, "linear_cross_entropy"):
        found["F.linear_cross_entropy"] = F.linear_cross_entropy
        options = importlib.import_module("torch.nn.modules.linear_cross_entropy_options").LinearCrossEntropyOptions()
        found["F.linear_cross_entropy in chunks"] = partial(F.linear_cross_entropy, options=options)
    else:
        lost["F.linear_cross_entropy"] = f"not in PyTorch {torch.__version__}"
    for package, module, function in (
        ("liger_kernel", "liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy"),
        ("cut_cross_entropy", "cut_cross_entropy", "linear_cross_entropy"),
    ):
        if find_spec(package) is None:
            lost[package] = "not installed"
        else:
            found[package] = getattr(importlib.import_module(module), function)

    def work(loss: Callable[..., Any]) -> Work:
        return lambda: torch.autograd.grad(_first(loss(hidden, weight, target)), (hidden, weight))

    return Sides({name: work(loss) for name, loss in {**found, OURS: linear_cross_entropy}.items()}, lost)


def _first(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def cases() -> dict[str, Case]:
    """By name."""
    found = {}
    for shape in SHAPES:
        for backward in (False, True):
            name = f"{shape.name}, forward{' and backward' * backward}"
            found[name] = Case(partial(_attention, shape, backward), 1.10 if backward else 1.05, 1.2)
    for shape in MOMENT_SHAPES:
        found[f"{shape.name}, six moments"] = Case(partial(_moments, shape, SIX), 1.7)
    found[f"{MOMENT_SHAPES[0].name}, all moments"] = Case(partial(_moments, MOMENT_SHAPES[0], None), None)
    for words in VOCABULARIES:
        prepare = partial(_losses, torch.bfloat16, LOSS_TOKENS, LOSS_WIDTH, words)
        found[f"linear cross-entropy, bfloat16, {LOSS_TOKENS} × {LOSS_WIDTH} × {words}"] = Case(prepare, 1.1)
    return found


def compare(
    name: str, case: Case, device: torch.device, seconds: float = SECONDS
) -> tuple[harness.Comparison, dict[str, str]]:
    """Ours beside the fastest of the others, whose memory counts too; and what did not take part."""
    sides = case.prepare(device)
    times = turns(sides.works, device, seconds)
    best = min((side for side in times if side != OURS), key=lambda side: statistics.median(times[side]))
    timing = harness.paired(np.array([times[best], times[OURS]]).T)
    before, ours = (peak_memory(sides.works[side], device) for side in (best, OURS))
    return harness.Comparison(
        name,
        best,
        timing.reference_seconds,
        timing.seconds,
        timing.ratio,
        timing.interval,
        case.time_bar,
        before,
        ours,
        None if not before or ours is None else ours / before,
        case.memory_bar,
        rounds=len(times[OURS]),
    ), sides.lost


def fixed_costs(device: torch.device) -> list[dict[str, Any]]:
    """Seconds that a call of a few tokens takes of the host, with and without a gradient, PyTorch's and ours."""
    rows = []
    inputs = draw("bfloat16", device, HEADS, HEADS, SMALL)
    stock = stock_attention(device, "bfloat16", compiled=False)[0]["SDPA"]
    for backward in (False, True):
        work = both_work if backward else forward_work
        reference, ours = (host_seconds(work(run, inputs), device) for run in (stock, _ours(True)))
        rows.append({"backward": backward, "reference_seconds": reference, "seconds": ours})
    return rows


def walls(works: dict[str, Work], device: torch.device, rounds: int) -> dict[str, float]:
    """The median seconds of each on the clock on the wall, in turns, until the device is done."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            start = _waited(device)
            work()
            found[name].append(_waited(device) - start)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def _waited(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def probes(device: torch.device) -> Iterator[dict[str, Any]]:
    """Forward passes of the shape of GPT-2 small, and probes of the same windows."""
    import transformers

    import massieu

    torch.manual_seed(0)
    config = transformers.GPT2Config(**PROBED)
    model = transformers.GPT2Model(config).eval().to(device)
    most = max(number for *_, number in PROBES)
    windows = torch.randint(config.vocab_size, (most, WINDOW))  # in main memory, as a loader of text gives them
    for _, options, _ in PROBES:  # the first of a process loads and compiles what it needs
        massieu.probe(model, windows[: 8 * BATCH].split(BATCH), **options)
    for name, options, number in PROBES:
        batches = list(windows[:number].split(BATCH))

        def forward(given: list[Tensor] = batches) -> None:
            with torch.no_grad():
                for batch in given:
                    model(batch.to(device), use_cache=False)

        def probe(given: list[Tensor] = batches, chosen: dict[str, Any] = options) -> None:
            massieu.probe(model, given, **chosen)

        rounds = 3 if number <= 64 else 1
        plain = walls({"forward": forward}, device, rounds)["forward"]
        ours = walls({"probe": probe}, device, rounds)["probe"]
        yield {"name": name, "windows": number, "forward_seconds": plain, "seconds": ours}


def training(device: torch.device) -> list[dict[str, Any]]:
    """A monitor's call, a watched step and a clipped step, each beside a training step of the shape of GPT-2 small."""
    import transformers

    import massieu

    torch.manual_seed(0)
    config = transformers.GPT2Config(use_cache=False, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **TRAINED_MODEL)
    model = transformers.GPT2LMHeadModel(config).to(device)
    ids = torch.randint(config.vocab_size, TRAINED, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    monitor = massieu.Monitor(model, ids, every=1)

    def called() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            monitor(0)

    def watched() -> None:
        with monitor.watch(0):
            step()

    def clipped() -> None:
        with monitor.clip(0, 1e9):
            step()

    works = {"a step": step, "a call of the monitor": called, "a watched step": watched, "a clipped step": clipped}
    walls(works, device, 1)
    times = walls(works, device, 5)
    return [{"name": name, "seconds": found, "steps": found / times["a step"]} for name, found in times.items()]


def _earlier(path: Path, device: str) -> dict[str, Any]:
    """What an interrupted run on the same device and release of PyTorch has left."""
    content = json.loads(path.read_text()) if path.exists() else {}
    same = content.get("device") == device and content.get("machine", {}).get("torch") == torch.__version__
    return content if same and not content["complete"] else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="PART", action="append", help="only cases with this in their name; several")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for a case (default: %(default)s)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/on_cuda.py needs a CUDA device, and PyTorch finds none here", file=sys.stderr)
        return 2
    device, name = torch.device("cuda"), torch.cuda.get_device_name()
    chosen = {each: case for each, case in cases().items() if any(part in each for part in arguments.only or [""])}
    return measure(device, name, chosen, arguments.seconds, whole=not arguments.only)


def measure(
    device: torch.device, name: str, chosen: dict[str, Case], seconds: float = SECONDS, whole: bool = True
) -> int:
    """Measure what an earlier run has not, and write after each case; 130 if it is interrupted.

    Args:
        whole: whether no case is missing once these are measured.
    """
    content: dict[str, Any] = {
        "rows": [],
        "lost": {},
        "finished": [],  # parts beside the rows that need not be measured again
        "accuracy": [],
        "fixed": [],
        "probes": [],
        "training": [],
    }
    content |= {
        part: found for part, found in _earlier(harness.RESULTS / "on_cuda.json", name).items() if part in content
    }

    def save(complete: bool) -> None:
        harness.save("on_cuda", device=name, complete=complete, **content)

    try:
        _measure_cases(device, chosen, seconds, content, save)
        for part, rows in (
            ("fixed", lambda: fixed_costs(device)),
            ("training", lambda: training(device)),
            ("probes", lambda: probes(device)),
            ("accuracy", lambda: right.accuracy(device)),
        ):
            if part not in content["finished"] and whole:
                print(part, flush=True)
                found = []
                for row in rows():
                    found.append(row)
                    harness.save("on_cuda", device=name, complete=False, **content | {part: found})
                content[part] = found
                content["finished"].append(part)
        save(complete=whole)
    except KeyboardInterrupt:
        print(f"interrupted: {len(content['rows'])} of {len(chosen)} cases are kept", file=sys.stderr)
        return 130
    return 0


def _measure_cases(
    device: torch.device,
    chosen: dict[str, Case],
    seconds: float,
    content: dict[str, Any],
    save: Callable[[bool], None],
) -> None:
    done = {row["name"] for row in content["rows"]}
    places = {case: place for place, case in enumerate(chosen)}
    for case in harness.steps(each for each in chosen if each not in done):
        try:
            row, missing = compare(case, chosen[case], device, seconds)
        except torch.OutOfMemoryError:
            content["lost"][case] = "out of memory"
        else:
            content["rows"].append(asdict(row) | {"met": row.met})
            content["rows"].sort(key=lambda each: places.get(each["name"], -1))
            content["lost"] |= missing
        save(False)


if __name__ == "__main__":
    sys.exit(main())
