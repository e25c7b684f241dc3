"""What `massieu.Monitor` adds to training: its time beside a training step, its peak beside a forward pass.

    python benchmarks/monitor.py

float32, one thread, AdamW. A call measures a batch as large as a training step's, gradient norm included. Steps and calls take
turns in one process. A step with its share of a call is compared with a step: a hundredth, or what the monitor's own budget of
1 % makes of it. Two whole loops differ by more than 1 % anyway. Steps that are watched or clipped in their own forward pass are
beside them, and loops of 200 steps, without a bar. Memory is what PyTorch allocates. About half an hour; rows are written as
they are done.
"""

import argparse
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import harness
import massieu
from massieu.probing.monitor.period import Period

EVERY, LOOP = 100, 200
CONTEXTS, TOKENS = (64, 512, 2048), 2048
TIME_BAR, MEMORY_BAR = 1.01, 1.1
CHARACTERS, WORDS = 128, 50257


class Block(nn.Module):
    """Pre-norm attention and a feed-forward layer, written by hand: found in PyTorch's own function."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.first(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.feed(self.second(x))


class CharacterModel(nn.Module):
    def __init__(self, length: int, width: int = 128, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(CHARACTERS, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CHARACTERS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(ids) + self.places.weight[: ids.shape[1]])))


class WordModel(nn.Module):
    """The shape of GPT-2 small with random weights, as transformers builds it: 12 layers, 12 heads, width 768."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.GPT2Config(vocab_size=WORDS, use_cache=False, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
        self.model = transformers.GPT2LMHeadModel(config)

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids).logits


MODELS: dict[str, tuple[Callable[[], nn.Module], int, int, int]] = {
    "character model": (lambda: CharacterModel(128), CHARACTERS, 16, 128),
    "GPT-2 small": (WordModel, WORDS, 2, 256),
}
"""How each is made, its vocabulary, sequences and tokens of each."""
ROUNDS = {"character model": 25, "GPT-2 small": 5}
LOOPED = "character model"
"""Whole loops of the other take hours on one thread."""


def loaded(name: str) -> tuple[nn.Module, Tensor]:
    """A model, and a batch."""
    torch.manual_seed(0)
    make, words, rows, length = MODELS[name]
    return make(), torch.randint(words, (rows, length + 1))


def training(name: str, compiled: bool) -> tuple[harness.Work, massieu.Monitor]:
    """One step of training, and the monitor beside it."""
    module, ids = loaded(name)
    model = torch.compile(module) if compiled else module
    optimizer = torch.optim.AdamW(module.parameters(), 1e-4)

    def step() -> None:
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step, massieu.Monitor(model, ids[:, :-1], every=EVERY)


def beside_a_step(name: str, compiled: bool, rounds: int) -> harness.Comparison:
    """A step with its share of a call beside a step, from rounds of both; and the peak of a call beside a forward pass."""
    step, monitor = training(name, compiled)
    times = harness.take_turns((step, lambda: monitor(0)), rounds)
    times[:, 1] = times[:, 0] + times[:, 1] / EVERY
    timing = harness.paired(times)
    how = "compiled" if compiled else "eager"
    found = timing.reference_seconds, timing.seconds, timing.ratio, timing.interval, TIME_BAR
    title = f"{name}, {how}: a step and a hundredth of a call", "a step"
    return harness.Comparison(*title, *found, rounds=rounds)


def by_context(length: int, compiled: bool, rounds: int) -> list[harness.Comparison]:
    """Steps of the character model at one context length: with the default's share of a call, watched, and clipped."""
    torch.manual_seed(0)
    module = CharacterModel(length)
    model = torch.compile(module) if compiled else module
    ids = torch.randint(CHARACTERS, (max(TOKENS // length, 1), length + 1))
    optimizer = torch.optim.AdamW(module.parameters(), 1e-4)
    monitor = massieu.Monitor(model, ids[:, :-1], every=1)

    def step() -> None:
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def watched() -> None:
        with monitor.watch(0):
            step()

    def clipped() -> None:
        with monitor.clip(0, 1e9):
            step()

    times = harness.take_turns((step, lambda: monitor(0), watched, clipped), rounds)
    period = Period(None)
    period.add_record(0, float(np.median(times[:, 1])))
    every = period.needed(float(np.median(times[:, 0])))
    times[:, 1] = times[:, 0] + times[:, 1] / every
    rows = []
    name = f"character model, context {length}{', compiled' if compiled else ''}"
    for side, title, bar in (
        (1, f"a step with its share of a call, by default every {every} steps", TIME_BAR),
        (2, "a watched step", None),
        (3, "a step with clip", None),
    ):
        timing = harness.paired(times[:, [0, side]])
        found = timing.reference_seconds, timing.seconds, timing.ratio, timing.interval, bar
        rows.append(harness.Comparison(f"{name}: {title}", "a step", *found, rounds=rounds))
    return rows


def whole_loops(name: str, compiled: bool, rounds: int) -> harness.Comparison:
    """Loops of training with a monitor and without one."""
    step, monitor = training(name, compiled)

    def plain() -> None:
        for _ in range(LOOP):
            step()

    def watched() -> None:
        for number in range(LOOP):
            step()
            monitor(number)

    timing = harness.compare_times(plain, watched, rounds, warm_up=1)
    how = "compiled" if compiled else "eager"
    found = timing.reference_seconds, timing.seconds, timing.ratio, timing.interval, None
    return harness.Comparison(f"{name}, {how}: {LOOP} steps with a monitor", "without one", *found, rounds=rounds)


def peaks(name: str, rounds: int) -> harness.Comparison:
    """Of a call and of a forward pass without gradients on the same batch, each in a process of its own."""
    found = np.array(
        [[harness.run_fresh(Path(__file__), "--fresh", name, side) for side in "01"] for _ in range(rounds)]
    )
    timing, memory = (harness.paired(found[..., place]) for place in (0, 1))
    times = timing.reference_seconds, timing.seconds, timing.ratio, timing.interval, None
    sizes = memory.reference_seconds, memory.seconds, memory.ratio, MEMORY_BAR
    title = f"{name}: a call", "a forward pass without gradients"
    return harness.Comparison(*title, *times, *sizes, memory_interval=memory.interval, rounds=rounds)


def print_peak(name: str, side: int) -> None:
    """What a fresh process runs: seconds of the work, and the highest number of mebibytes that PyTorch has allocated in it.

    Models are made and looked at before, since that happens once in a training run.
    """
    module, ids = loaded(name)
    module.eval()
    monitor = massieu.Monitor(module, ids[:1, :2])
    monitor._batch = {"ids": ids[:, :-1]}
    work = (torch.no_grad()(lambda: module(ids[:, :-1])), lambda: monitor(0))[side]
    start = time.process_time()
    work()
    seconds = time.process_time() - start
    print(seconds, harness.allocated(work))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fresh", nargs=2, metavar=("MODEL", "SIDE"), help="one side once: seconds and peak in MiB")
    parser.add_argument(
        "--only", metavar="PART", help="print only rows of models with this in their name, write nothing"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.fresh:
        print_peak(arguments.fresh[0], int(arguments.fresh[1]))
        return
    chosen = [name for name in MODELS if arguments.only is None or arguments.only in name]
    works: dict[str, Callable[[], list[harness.Comparison]]] = {}
    for length, compiled in product(CONTEXTS if LOOPED in chosen else (), (False, True)):
        works[f"{LOOPED}: context {length}, compiled: {compiled}"] = lambda n=length, c=compiled: by_context(n, c, 15)
    for name, compiled in product(chosen, (False, True)):
        rounds = ROUNDS[name]
        works[f"{name}: calls, compiled: {compiled}"] = lambda n=name, c=compiled, r=rounds: [beside_a_step(n, c, r)]
    works |= {f"{name}: memory": lambda n=name: [peaks(n, 3)] for name in chosen}
    for compiled in (False, True) if LOOPED in chosen else ():
        works[f"{LOOPED}: loops, compiled: {compiled}"] = lambda c=compiled: [whole_loops(LOOPED, c, 3)]
    rows: list[harness.Comparison] = []
    for name in harness.steps(works):
        found = works[name]()
        rows += found
        if arguments.only is None:
            harness.write("monitor", rows)
        for row in found if arguments.only is not None else ():
            print(row, row.met, flush=True)


if __name__ == "__main__":
    main()
