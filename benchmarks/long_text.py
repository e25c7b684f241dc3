"""Whether a probe's memory and its time for a token stay the same over a long text.

    python benchmarks/long_text.py

A BERT of 2 layers with random weights, all statistics, windows of 128 tokens, on one thread: for every 100,000 tokens the
CPU seconds and the largest memory so far, in a process of its own; then the ratio of the last to the first of these
steps, running sums stored every minute. The text is the reference text, again and again. Results go to
``benchmarks/long_text.json``.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
import transformers

import harness
import massieu
from massieu.probing.data.documents import reference_documents
from massieu.probing.model.model import load_model
from massieu.probing.session.session import ProbeProgress

RESULTS = Path(__file__).parent / "long_text.json"


def small_bert(vocabulary: int) -> torch.nn.Module:
    """Two layers of two heads, width 32, with random weights."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=vocabulary
    )
    return transformers.BertModel(config).eval()


def measure(tokens: int, step: int) -> list[dict[str, float]]:
    """CPU seconds and largest memory so far after every ``step`` tokens."""
    torch.set_num_threads(1)
    tokenizer = load_model().tokenizer
    assert tokenizer is not None
    rows: list[dict[str, float]] = []
    begun: list[tuple[int, float]] = []

    def note(state: ProbeProgress) -> None:
        if not state.tokens or state.stage != "reading":
            return
        if not begun:
            begun.append((state.tokens, time.process_time()))
        elif state.tokens >= begun[-1][0] + step:
            now, (before, then) = time.process_time(), begun[-1]
            begun.append((state.tokens, now))
            peak = harness.peak() / 1e6
            each = 1e6 * (now - then) / (state.tokens - before)
            rows.append({"tokens": state.tokens, "microseconds_a_token": each, "peak_megabytes": peak})
            print(f"{state.tokens:10,} tokens {each:8.1f} µs a token {peak:8.1f} MB at most", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "long.txt")
        with text.open("w") as file:
            while file.tell() < 8 * tokens:  # characters; a token has fewer
                file.writelines(f"{document.text}\n" for document in reference_documents())
        massieu.probe(
            small_bert(len(tokenizer)),
            massieu.Text(text, tokenizer, window=128, limit=tokens + 2 * step // 10),
            batch_size=16,
            run=massieu.Run(Path(folder, "running"), store_every=1.0, progress=note),
        )
    return rows


def main(tokens: int, step: int) -> dict[str, float]:
    """Measure, print the ratios and return them."""
    rows = measure(tokens, step)
    first, last = rows[0], rows[-1]
    ratios = {name: last[name] / first[name] for name in ("microseconds_a_token", "peak_megabytes")}
    print(f"last to first step: time {ratios['microseconds_a_token']:.3f}, memory {ratios['peak_megabytes']:.3f}")
    found = {"torch": torch.__version__, "threads": 1, "precision": "float32", "rows": rows, "last_to_first": ratios}
    if tokens >= 1_000_000:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    return ratios


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--step", type=int, default=100_000)
    given = parser.parse_args()
    main(given.tokens, given.step)
