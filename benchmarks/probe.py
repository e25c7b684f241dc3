"""What a probe costs beside the model's own forward pass, and how its memory grows with the text.

    python benchmarks/probe.py

Time: all default statistics against the model's own forward pass (its stock SDPA attention) on the same batches, in
turn, as ratios. Memory: peak of a fresh process that probes 1, 4 and 16 times the same text. Results go to
``benchmarks/results/probe.json``.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

import massieu
from massieu.probing.model import load_model
from massieu.probing.text import TextBatches, reference_documents

RESULTS = Path(__file__).parent / "results" / "probe.json"
BATCH_TOKENS = 2048


def text_batches(tokenizer, length: int, tokens: int) -> list[dict[str, torch.Tensor]]:
    """Full windows of the reference text, 2048 tokens a batch."""
    batches = TextBatches(
        tokenizer, reference_documents, max_length=length, max_tokens=tokens, batch_size=BATCH_TOKENS // length
    )
    return [dict(batch.inputs) for batch in batches]


def gpt2_small(tokenizer) -> torch.nn.Module:
    """The shape of GPT-2 small with random weights: 12 layers, 12 heads, width 768."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0)
    return transformers.GPT2Model(config).eval()


def forward(model: torch.nn.Module, batches: list[dict[str, torch.Tensor]]) -> None:
    options = {"use_cache": False} if hasattr(model.config, "n_positions") else {}
    with torch.no_grad():
        for batch in batches:
            model(**batch, **options)


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def ratio_of(model: torch.nn.Module, batches: list[dict[str, torch.Tensor]], length: int, pairs: int) -> dict:
    """Probe time over forward time, pair by pair; the forward pass is timed before and after each probe."""
    forward(model, batches)
    ratios, probes, forwards = [], [], []
    for _ in range(pairs):
        before = seconds(lambda: forward(model, batches))
        probe = seconds(lambda: massieu.probe(model, batches, max_length=length))
        after = seconds(lambda: forward(model, batches))
        ratios.append(2 * probe / (before + after))
        probes.append(probe)
        forwards.append((before + after) / 2)
    return {
        "ratio_median": statistics.median(ratios), "ratio_lowest": min(ratios), "ratio_highest": max(ratios),
        "probe_seconds": statistics.median(probes), "forward_seconds": statistics.median(forwards), "pairs": pairs,
    }  # fmt: skip


def measure_time(pairs: int) -> list[dict]:
    loaded = load_model()
    rows = []
    cases = [("MiniLM", 256, 128_000), ("MiniLM", 512, 128_000), ("GPT-2 small, random weights", 512, 30_000)]
    for name, length, tokens in cases:
        model = loaded.module if name == "MiniLM" else gpt2_small(loaded.tokenizer)
        batches = text_batches(loaded.tokenizer, length, tokens)
        row = {"model": name, "length": length, "tokens": sum(b["input_ids"].numel() for b in batches)}
        rows.append(row | ratio_of(model, batches, length, pairs))
        print(f"{name:30} {length:5} tokens a window: {rows[-1]['ratio_median']:.2f}× the forward pass", flush=True)
    return rows


def measure_memory() -> list[dict]:
    rows = []
    for times in (1, 4, 16):
        found = subprocess.run(
            [sys.executable, __file__, "--peak", str(times)], capture_output=True, text=True, check=True
        )
        rows.append(json.loads(found.stdout.splitlines()[-1]))
        print(f"text × {times:2}: peak {rows[-1]['peak_mib']:.0f} MiB over {rows[-1]['tokens']} tokens", flush=True)
    return rows


def peak(times: int) -> None:
    """In a process of its own: probe the same text several times over, streamed."""
    loaded = load_model()

    def documents():
        for _ in range(times):
            yield from reference_documents()

    batches = TextBatches(loaded.tokenizer, documents, max_length=256, max_tokens=16_000 * times, batch_size=8)
    result = massieu.probe(loaded.module, (b.inputs for b in batches))
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"times": times, "tokens": result.run["text"]["tokens"], "peak_mib": kib / 1024}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()
    if options.peak:
        peak(options.peak)
        return
    RESULTS.parent.mkdir(exist_ok=True)
    result = {
        "torch": torch.__version__, "transformers": transformers.__version__, "threads": torch.get_num_threads(),
        "command": "python benchmarks/probe.py", "time": measure_time(options.pairs), "memory": measure_memory(),
    }  # fmt: skip
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
