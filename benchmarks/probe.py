"""What a probe costs beside the model's own forward pass, and how its memory grows with the text.

    python benchmarks/probe.py

Time: all default statistics against the model's own forward pass (its stock SDPA attention) on the same batches, in
turn, as ratios of CPU time on one thread (`benchmarks/harness.py`). Memory: peak of a fresh process that probes 1, 4
and 16 times the same text. Results go to ``benchmarks/results/probe.json``.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

import harness
import massieu
from massieu.probing.data.documents import reference_documents
from massieu.probing.data.text import TextBatches
from massieu.probing.model.model import load_model

RESULTS = Path(__file__).parent / "results" / "probe.json"
BATCH_TOKENS = 2048


def text_batches(tokenizer, length: int, tokens: int) -> list[dict[str, torch.Tensor]]:
    """Full windows of the reference text, 2048 tokens a batch."""
    batches = TextBatches(
        tokenizer, reference_documents, window=length, limit=tokens, batch_size=BATCH_TOKENS // length
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


def measure_time(rounds: int) -> list[dict]:
    """Probe time over forward time, the two in turn."""
    loaded = load_model()
    rows = []
    cases = [("MiniLM", 256, 64_000), ("MiniLM", 512, 64_000), ("GPT-2 small, random weights", 512, 20_000)]
    for name, length, tokens in cases:
        model = loaded.module if name == "MiniLM" else gpt2_small(loaded.tokenizer)
        batches = text_batches(loaded.tokenizer, length, tokens)
        timing = harness.compare_times(
            lambda m=model, b=batches: forward(m, b),
            lambda m=model, b=batches, n=length: massieu.probe(m, massieu.Batches(b, window=n)),
            rounds=rounds,
            warm_up=1,
        )
        row = {"model": name, "length": length, "tokens": sum(b["input_ids"].numel() for b in batches), "bar": 2.0}
        rows.append(row | asdict(timing))
        print(
            f"{name:30} {length:5} tokens a window: {timing.ratio:.2f}× the forward pass {timing.interval}", flush=True
        )
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

    batches = TextBatches(loaded.tokenizer, documents, window=256, limit=16_000 * times, batch_size=8)
    result = massieu.probe(loaded.module, (b.inputs for b in batches))
    print(json.dumps({"times": times, "tokens": result.run.text.tokens, "peak_mib": harness.peak() / 2**20}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    if options.peak:
        peak(options.peak)
        return
    RESULTS.parent.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    memory = measure_memory()  # first: a child process reports its parent's peak where that is larger
    result = {
        "command": "python benchmarks/probe.py",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": 1,
        "time": measure_time(options.rounds),
        "memory": memory,
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
