"""Does a monitor of attention warn of trouble before the loss shows it? A small study, with its rules written first.

A character model of 4 layers learns Python's own manual. Each of three architectures has a reference run at its usual
learning rate; held-out seeds then run at that rate and at one that is too high. The rules were fixed before the runs:

- a quantity is in alarm where it is outside a factor of three of the reference's value at the same step, in two
  measurements running (for the least entropy and the rank: below a third);
- the loss is in alarm where its mean over 10 steps is more than 0.5 nats above the reference's, in two measurements running;
- a lead is by how many steps a quantity's first alarm is before the loss's first one.

Alarms of runs at the usual rate count as "for nothing". Alarms of a run at a high rate whose loss is never in alarm
count as "alone". Nothing here predicts a divergence: the numbers are those of few small runs, and the table keeps the
rows in which a quantity is late or silent. Finished runs are kept in the folder: an interrupted study continues where
it stopped.
Run: python examples/watch_training.py [--quick] [--folder DIR] [--picture FILE]
"""

import argparse
import json
import math
import pydoc_data.topics
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter
from torch import Tensor, nn
from torch.nn import functional as F

import massieu

LAYERS, WIDTH, HEADS, CONTEXT, BATCH = 4, 64, 4, 64, 16
USUAL = {"pre-norm": 2e-3, "post-norm": 1e-3, "normalised queries and keys": 2e-3}
TOO_HIGH = {"pre-norm": 3e-2, "post-norm": 3e-2, "normalised queries and keys": 6e-2}
FACTOR, EXCESS, RUNNING = 3.0, 0.5, 2
QUANTITIES = {
    "selective_log_partition_mean": "selective log Z, mean",
    "selective_log_partition_max": "selective log Z, max",
    "largest_logit_max": "largest logit",
    "entropy_min": "least entropy",
    "gradient_norm": "gradient norm",
    "weight_first_mean": "weight on the first token",
    "effective_rank_min": "rank of the stream",
}
AXES = {
    "loss": "loss (nats)",
    "largest_logit_max": "largest logit (nats)",
    "selective_log_partition_mean": "selective log Z (nats)",
    "entropy_min": "least entropy (nats)",
    "gradient_norm": "gradient norm",
}
ONLY_BELOW = {"entropy_min", "effective_rank_min"}


class Setting(NamedTuple):
    """One run: architecture, whether the learning rate is too high, seed; seed 0 at the usual rate is the reference."""

    architecture: str
    hot: bool
    seed: int

    @property
    def name(self) -> str:
        return f"{self.architecture}, {'too high' if self.hot else 'usual'}, seed {self.seed}".replace(" ", "_")


class Attention(nn.Module):
    def __init__(self, normalised: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        norms = (nn.RMSNorm(WIDTH // HEADS) if normalised else nn.Identity() for _ in range(2))
        self.query_norm, self.key_norm = norms

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        query, key, value = self.query_norm(heads[0]), self.key_norm(heads[1]), heads[2]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, architecture: str) -> None:
        super().__init__()
        self.post = architecture == "post-norm"
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(architecture.startswith("normalised"))
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.post:
            x = self.first(x + self.attention(x))
            return self.second(x + self.feed(x))
        x = x + self.attention(self.first(x))
        return x + self.feed(self.second(x))


class CharacterModel(nn.Module):
    def __init__(self, characters: int, architecture: str) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block(architecture) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def text() -> tuple[Tensor, int]:
    words = "\n".join(pydoc_data.topics.topics.values())
    characters = sorted(set(words))
    numbers = {character: number for number, character in enumerate(characters)}
    return torch.tensor([numbers[character] for character in words]), len(characters)


def train(setting: Setting, steps: int, every: int, folder: Path) -> Path:
    """One run, written as JSON lines; a run that was finished before is not repeated."""
    torch.set_num_threads(1)
    done = folder / f"{setting.name}.jsonl"
    if done.exists():
        return done
    data, characters = text()
    generator = torch.Generator().manual_seed(setting.seed)
    torch.manual_seed(setting.seed)
    model = CharacterModel(characters, setting.architecture)
    rate = (TOO_HIGH if setting.hot else USUAL)[setting.architecture]
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    places = torch.arange(BATCH)[:, None] * (len(data) // BATCH - CONTEXT) + torch.arange(CONTEXT)
    partial = done.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    monitor = massieu.Monitor(model, data[places], every=every, optimizer=optimizer, to=partial, prefix="")
    losses: list[float] = []
    for step in range(steps):
        # A short warm-up, as everybody has; the rate that is too high stays too high.
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 20)
        starts = torch.randint(len(data) - CONTEXT - 1, (BATCH, 1), generator=generator) + torch.arange(CONTEXT)
        loss = F.cross_entropy(model(data[starts]).flatten(0, 1), data[starts + 1].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        monitor(step, loss=sum(losses[-10:]) / len(losses[-10:]))
    monitor.close()
    partial.rename(done)
    return done


def read(path: Path) -> dict[str, dict[int, float]]:
    """Each quantity's numbers by step."""
    curves: dict[str, dict[int, float]] = {}
    for line in path.read_text().splitlines()[1:]:
        record = {name: float(value) for name, value in json.loads(line).items() if not isinstance(value, list | dict)}
        step = int(record.pop("step"))
        ranks = [value for name, value in record.items() if name.endswith("/effective_rank")]
        for name, value in (record | {"effective_rank_min": min(ranks)}).items():
            curves.setdefault(name, {})[step] = value
    return curves


def first_alarm(curve: dict[int, float], reference: dict[int, float], name: str) -> int | None:
    """The second of two measurements running that the rule calls outside."""
    running = 0
    for step, value in curve.items():
        usual = reference[step]
        if name == "loss":
            outside = not value <= usual + EXCESS
        else:
            outside = not value * FACTOR >= usual or (name not in ONLY_BELOW and not value <= FACTOR * usual)
        running = running + 1 if outside else 0
        if running == RUNNING:
            return step
    return None


def tell(found: dict[Setting, dict[str, dict[int, float]]]) -> None:
    """The table: how often each quantity was in alarm before the loss, by how much, and how often for nothing."""
    alarms: dict[str, list[tuple[Setting, int | None, int | None]]] = {name: [] for name in QUANTITIES}
    for setting, curves in found.items():
        reference = found.get(Setting(setting.architecture, False, 0))
        if reference is None or (not setting.hot and setting.seed == 0):
            continue
        of_loss = first_alarm(curves["loss"], reference["loss"], "loss")
        for name in QUANTITIES:
            alarms[name].append((setting, first_alarm(curves[name], reference[name], name), of_loss))
    for architecture in USUAL:
        rows = [row for row in alarms["largest_logit_max"] if row[0].architecture == architecture]
        told = sum(of_loss is not None for setting, _, of_loss in rows if setting.hot)
        false = sum(of_loss is not None for setting, _, of_loss in rows if not setting.hot)
        hot, healthy = (sum(setting.hot is which for setting, *_ in rows) for which in (True, False))
        print(
            f"\n{architecture}: the loss is in alarm in {told} of {hot} runs at a rate that is too high, in {false} of "
            f"{healthy} at the usual one"
        )
        print(f"  {'quantity':<26} {'before the loss':>16} {'median lead':>12} {'alone':>8} {'for nothing':>12}")
        for name, title in QUANTITIES.items():
            own = [row for row in alarms[name] if row[0].architecture == architecture]
            leads = [
                of_loss - at for setting, at, of_loss in own if setting.hot and at is not None and of_loss is not None
            ]
            early = [lead for lead in leads if lead > 0]
            nothing = sum(at is not None for setting, at, _ in own if not setting.hot)
            alone = sum(at is not None and of_loss is None for setting, at, of_loss in own if setting.hot)
            lead = f"{median(early):.0f} steps" if early else "-"
            shares = f"{alone} of {hot - told}", f"{nothing} of {healthy}"
            print(f"  {title:<26} {f'{len(early)} of {told}':>16} {lead:>12} {shares[0]:>8} {shares[1]:>12}")


def draw(found: dict[Setting, dict[str, dict[int, float]]], path: Path) -> None:
    figure, grid = plt.subplots(
        len(AXES), len(USUAL), figsize=(9.5, 9.5), sharex=True, layout="constrained", squeeze=False
    )
    for (row, name), (column, architecture) in product(enumerate(AXES), enumerate(USUAL)):
        axes = grid[row, column]
        for setting, curves in found.items():
            if setting.architecture == architecture:
                is_reference = not setting.hot and setting.seed == 0
                colour = "tab:red" if setting.hot else "black" if is_reference else "tab:blue"
                axes.plot(curves[name].keys(), curves[name].values(), color=colour, linewidth=2 if is_reference else 1)
        if name != "loss":
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
        if column == 0:
            axes.set_ylabel(AXES[name])
        if row == 0:
            axes.set_title(
                f"{architecture}\nusual rate {USUAL[architecture]:g} (blue), {TOO_HIGH[architecture]:g} (red)",
                fontsize=10,
            )
    for axes in grid[-1]:
        axes.set_xlabel("step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    print(f"\npicture: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter runs: a minute in place of fifteen")
    parser.add_argument("--folder", type=Path, default=Path("massieu-results/watch_training"), metavar="DIR")
    parser.add_argument("--picture", type=Path, default=Path("massieu-results/watch_training.png"), metavar="FILE")
    arguments = parser.parse_args()
    steps, every, seeds = (120, 10, (1,)) if arguments.quick else (600, 10, (1, 2, 3, 4))
    folder = arguments.folder / f"{steps}_steps"
    folder.mkdir(parents=True, exist_ok=True)
    settings = [Setting(architecture, False, 0) for architecture in USUAL]
    settings += [Setting(*each) for each in product(USUAL, (True, False), seeds)]
    found: dict[Setting, dict[str, dict[int, float]]] = {}
    with ProcessPoolExecutor(2) as processes:
        runs = {processes.submit(train, setting, steps, every, folder): setting for setting in settings}
        try:
            for run in as_completed(runs):
                found[runs[run]] = curves = read(run.result())
                last = next(reversed(curves["loss"].values()))
                print(
                    f"{len(found):2} of {len(runs)}  {runs[run].name:<48} loss {last if math.isfinite(last) else math.nan:.2f}",
                    flush=True,
                )
        except KeyboardInterrupt:
            processes.shutdown(cancel_futures=True)
            print(f"interrupted: what follows is of the {len(found)} runs that were finished")
    found = {setting: found[setting] for setting in settings if setting in found}
    tell(found)
    if found:
        draw(found, arguments.picture)


if __name__ == "__main__":
    main()
