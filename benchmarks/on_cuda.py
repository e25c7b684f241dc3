"""Attention with log Z, and losses, on CUDA, beside the best of PyTorch's own kernels and of other libraries.

    python benchmarks/on_cuda.py
    python benchmarks/on_cuda.py --only "bfloat16, causal, L = 4096" --only linear --seconds 1

Half precision, 16 heads. Times are by CUDA events; all sides take turns. About twenty minutes and 60 GiB on the device,
estimated, not measured. What is measured is kept: interrupted, it goes on from there when it is called again. Liger and
cut-cross-entropy take part where they are installed. It is not called cuda.py, because PyTorch imports NVIDIA's `cuda`.
"""

import argparse
import importlib
import json
import statistics
import sys
from collections.abc import Callable
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
from massieu.ops import attention, linear_cross_entropy
from massieu.ops.measure import (
    Attention,
    Work,
    both_work,
    draw,
    errors_of,
    forward_work,
    peak_memory,
    stock_attention,
    turns,
)

OURS = "ours"
HEADS, SECONDS = 16, 3.0
LENGTHS, SIZES = (1024, 4096, 16384, 65536), (64, 128)
TOKENS, WIDTH, VOCABULARIES = 8192, 1024, (50257, 152064)
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
    time_bar: float
    memory_bar: float | None = None


def _ours(is_causal: bool) -> Attention:
    return lambda query, key, value: attention(query, key, value, is_causal=is_causal)


def _attention(
    dtype: str, length: int, size: int, is_causal: bool, key_heads: int, backward: bool, device: torch.device
) -> Sides:
    peers, lost = stock_attention(device, dtype, is_causal, key_heads < HEADS)
    batch = max(1, LENGTHS[-2] // length)
    inputs = draw(dtype, device, HEADS, key_heads, length, size, batch)
    work = both_work if backward else forward_work
    return Sides({name: work(run, inputs) for name, run in {**peers, OURS: _ours(is_causal)}.items()}, lost)


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
    for dtype in ("bfloat16", "float16"):
        for size in SIZES:
            for length in LENGTHS:
                for is_causal in (False, True):
                    for key_heads in (HEADS, HEADS // 4):
                        for backward in (False, True):
                            kind = f"{'causal, ' * is_causal}{'grouped, ' * (key_heads < HEADS)}"
                            name = f"{dtype}, {kind}L = {length}, D = {size}, forward{' and backward' * backward}"
                            prepare = partial(_attention, dtype, length, size, is_causal, key_heads, backward)
                            found[name] = Case(prepare, 1.10 if backward else 1.05, 1.2)
    for words in VOCABULARIES:
        prepare = partial(_losses, torch.bfloat16, TOKENS, WIDTH, words)
        found[f"linear cross-entropy, bfloat16, {TOKENS} × {WIDTH} × {words}"] = Case(prepare, 1.1)
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


def accuracy(device: torch.device) -> list[dict[str, Any]]:
    """Relative errors of ours and of PyTorch's, whose double and one rounding are the bar, by dtype and head size."""
    found = []
    for dtype in ("bfloat16", "float16"):
        for size in SIZES:
            for is_causal in (False, True):
                peers, _ = stock_attention(device, dtype, is_causal)
                ours, share = errors_of(_ours(is_causal), dtype, device, is_causal=is_causal, size=size)
                theirs = [
                    errors_of(run, dtype, device, is_causal=is_causal, size=size, grouped=False)[0]
                    for run in peers.values()
                ]
                rounding = torch.finfo(getattr(torch, dtype)).eps
                bars = {part: 2 * min(errors[part] for errors in theirs) + rounding for part in theirs[0]}
                row = {
                    "dtype": dtype,
                    "size": size,
                    "is_causal": is_causal,
                    "errors": ours,
                    "bars": bars,
                    "share": share,
                }
                found.append(row | {"met": all(ours[part] <= bar for part, bar in bars.items())})
    return found


def training(device: torch.device, seconds: float = SECONDS) -> list[dict[str, Any]]:
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
    times = {name: statistics.median(found) for name, found in turns(works, device, seconds).items()}
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
    before = _earlier(harness.RESULTS / "on_cuda.json", name)
    rows, lost = before.get("rows", []), before.get("lost", {})
    done = {row["name"] for row in rows}

    def save(complete: bool, **more: Any) -> None:
        harness.save("on_cuda", device=name, complete=complete, rows=rows, lost=lost, **more)

    try:
        for case in harness.steps(each for each in chosen if each not in done):
            try:
                row, missing = compare(case, chosen[case], device, seconds)
            except torch.OutOfMemoryError:
                lost[case] = "out of memory"
            else:
                rows.append(asdict(row) | {"met": row.met})
                lost |= missing
            save(complete=False)
        save(complete=whole, accuracy=accuracy(device), training=training(device, seconds))
    except KeyboardInterrupt:
        print(f"interrupted: {len(rows)} of {len(chosen)} cases are kept", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
