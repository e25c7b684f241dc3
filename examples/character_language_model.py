"""Character language models with softmax, sparse and implicit attention, trained side by side.

Python's own reference text, 64 characters of context, two layers. Losses are bits per character on held-out text,
compared with counts of single characters and of pairs. One seed shows that a model trains, no more. A ranking needs
`--seeds 5` and intervals that do not overlap; the script says whether they do.

Run: python examples/character_language_model.py [--seeds N] [--steps N] [--picture FILE]. Four minutes for one seed.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from massieu.nn import Attention, EntmaxHeads, ImplicitHeads, SoftmaxHeads
from massieu.nn.strategy import Heads

CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 64, 64, 4, 2, 16
STUDENT_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""The factor of a standard error in a 95 % interval, by the number of seeds."""

Mixing = Callable[[Tensor], Tensor]


class Causal(nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self, heads: Heads) -> None:
        super().__init__()
        self.attention = Attention(WIDTH, HEADS, batch_first=True, heads=heads)

    def forward(self, tokens: Tensor) -> Tensor:
        output, _ = self.attention(tokens, need_weights=False, is_causal=True)
        return output


class Block(nn.Module):
    def __init__(self, mixing: nn.Module) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.mixing = mixing
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.mixing(self.norms[0](tokens))
        return tokens + self.feed_forward(self.norms[1](tokens))


class LanguageModel(nn.Module):
    def __init__(self, characters: int, mixing: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.blocks = nn.Sequential(*(Block(mixing()) for _ in range(LAYERS)), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, characters)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(text) + self.position[: text.shape[-1]]))


ATTENTION: dict[str, Callable[[], nn.Module]] = {
    "softmax": lambda: Causal(SoftmaxHeads()),
    "1.5-entmax, learned": lambda: Causal(EntmaxHeads(alpha=1.5, learn_alpha=True)),
    # Of the millions of fixed points of a training, without a contraction some are saddles or reached too slowly.
    "implicit": lambda: Causal(ImplicitHeads(alpha=0.5, max_lipschitz=0.8)),
}


def characters_of_python() -> tuple[Tensor, Tensor, int]:
    """Training text and held-out text as indices, and how many characters there are."""
    text = "\n".join(topics[name] for name in sorted(topics))
    letters = sorted(set(text))
    index = torch.tensor([letters.index(letter) for letter in text])
    cut = int(0.9 * len(index))
    return index[:cut], index[cut:], len(letters)


def windows(text: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Stretches of the text, and the same moved on by one character."""
    starts = torch.randint(len(text) - CONTEXT, (count, 1), generator=generator) + torch.arange(CONTEXT)
    return text[starts], text[starts + 1]


def bits(model: nn.Module, text: Tensor, next_text: Tensor) -> Tensor:
    return F.cross_entropy(model(text).flatten(0, 1), next_text.flatten()) / math.log(2)


def trained_bits(name: str, seed: int, steps: int) -> tuple[float, float, list[float]]:
    """Bits a character on held-out text, before and after training, and in training, step by step."""
    train, test, characters = characters_of_python()
    torch.manual_seed(seed)
    model, generator = LanguageModel(characters, ATTENTION[name]), torch.Generator().manual_seed(seed)
    held_out = windows(test, 64, torch.Generator().manual_seed(0))
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=steps)
    with torch.no_grad():
        before = bits(model, *held_out).item()
    course: list[float] = []
    for _ in track(range(steps), f"{name}, seed {seed}", console=Console(file=sys.stderr), transient=True):
        optimiser.zero_grad()
        loss = bits(model, *windows(train, BATCH, generator))
        loss.backward()
        course.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    with torch.no_grad():
        return before, bits(model, *held_out).item(), course


def counted_bits() -> tuple[float, float]:
    """Bits a character on held-out text by counts of single characters and of pairs, each count one more."""
    train, test, characters = characters_of_python()
    single = torch.bincount(train, minlength=characters) + 1.0
    pairs = torch.bincount(train[:-1] * characters + train[1:], minlength=characters**2).reshape(characters, -1) + 1.0
    alone = -(single / single.sum()).log2()[test[1:]].mean()
    paired = -(pairs / pairs.sum(1, keepdim=True)).log2()[test[:-1], test[1:]].mean()
    return alone.item(), paired.item()


def draw(courses: dict[str, list[float]], levels: dict[str, float], path: Path) -> None:
    """The first seed's losses in training, means of twenty steps (of all, where there are fewer)."""
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for name, course in courses.items():
        together = min(20, len(course))
        means = torch.tensor(course[: len(course) // together * together]).unflatten(0, (-1, together)).mean(1)
        axes.plot(together * (torch.arange(len(means)) + 0.5), means, label=name)
    for name, level in levels.items():
        axes.axhline(level, color="grey", linestyle=":", linewidth=1)
        axes.annotate(name, (0, level), color="grey", fontsize=8, va="bottom")
    axes.set_xlabel("step")
    axes.set_ylabel("bits a character, training text")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"picture: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, choices=range(1, 6))
    parser.add_argument("--steps", type=int, default=400)
    picture = Path("massieu-results/character_language_model.png")
    parser.add_argument("--picture", type=Path, default=picture, metavar="FILE")
    arguments = parser.parse_args()
    alone, paired = counted_bits()
    print(f"bits a character on held-out text: {alone:.3f} by counts of characters, {paired:.3f} by counts of pairs")
    intervals, courses = {}, {}
    for name in ATTENTION:
        found = [trained_bits(name, seed, arguments.steps) for seed in range(arguments.seeds)]
        after, courses[name] = torch.tensor([end for _, end, _ in found]), found[0][2]
        spread = (
            after.std().item() / arguments.seeds**0.5 * STUDENT_95[arguments.seeds] if arguments.seeds > 1 else math.inf
        )
        intervals[name] = (after.mean().item() - spread, after.mean().item() + spread)
        error = f" ± {spread:.3f} (95 %, {arguments.seeds} seeds)" if arguments.seeds > 1 else ""
        print(f"{name:>20}: {found[0][0]:.3f} before training, {after.mean():.3f}{error} after {arguments.steps} steps")
    overlap = any(a[0] <= b[1] and b[0] <= a[1] for a, b in itertools.combinations(intervals.values(), 2))
    print("no ranking: intervals overlap" if overlap else "all intervals are apart")
    draw(courses, {"counts of characters": alone, "counts of pairs": paired}, arguments.picture)


if __name__ == "__main__":
    main()
