"""Digits completed by walking down one energy: an Energy Transformer fills in the patches that were taken out.

Images of scikit-learn's digits, cut into 16 patches of 2×2 pixels, lose half of their patches at random. Patches are
tokens; a missing one is a trained token in its place. The layer takes 6 steps down the energy of all tokens (N1), and
the missing ones are then read out linearly. Trained on 1200 images, tested on the other 597: the mean squared error of
a missing pixel with its standard error over images, beside the mean image's and that of ridge regressions of what is
missing on what is there, one for each test image's mask. The energy of every held-out image, step by step, is checked
to fall.

Run: python examples/masked_digits.py [--updates N] [--picture FILE]
"""

import argparse
import sys
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from rich.console import Console
from rich.progress import track
from sklearn.datasets import load_digits
from torch import Tensor, nn

from massieu.nn import EnergyTransformer

TRAINED, PATCHES, HIDDEN, WIDTH, STEPS, BATCH, SEED = 1200, 16, 8, 64, 6, 64, 0


class Completion(nn.Module):
    """Patches to tokens, down the energy, tokens to patches."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 4)
        self.missing = nn.Parameter(torch.zeros(WIDTH))
        self.position = nn.Parameter(0.5 * torch.randn(PATCHES, WIDTH))
        self.layer = EnergyTransformer(WIDTH, 4, steps=STEPS, step_size=0.15)

    def forward(self, patches: Tensor, missing: Tensor) -> Tensor:
        return self.decode(self.layer.normalisation(self.layer(self.tokens(patches, missing))))

    def tokens(self, patches: Tensor, missing: Tensor) -> Tensor:
        return torch.where(missing.unsqueeze(-1), self.missing, self.encode(patches)) + self.position


def to_patches(images: Tensor) -> Tensor:
    """(n, 64) to (n, 16, 4)."""
    return images.unflatten(-1, (4, 2, 4, 2)).transpose(-3, -2).flatten(-4, -3).flatten(-2)


def to_images(patches: Tensor) -> Tensor:
    """(n, 16, 4) to (n, 64)."""
    return patches.unflatten(-2, (4, 4)).unflatten(-1, (2, 2)).transpose(-3, -2).flatten(-4)


def masks(count: int, generator: torch.Generator) -> Tensor:
    """Which patches are missing: half of them, (count, 16)."""
    return torch.rand(count, PATCHES, generator=generator).argsort(-1) < HIDDEN


def train(images: Tensor, updates: int, generator: torch.Generator) -> Completion:
    """The model after so many updates on masks that are drawn anew each time."""
    torch.manual_seed(SEED)
    model, patches = Completion(), to_patches(images)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1.5e-2, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 1.5e-2, total_steps=updates)
    for _ in track(range(updates), "training", console=Console(file=sys.stderr), transient=True):
        chosen = patches[torch.randint(len(patches), (BATCH,), generator=generator)]
        missing = masks(BATCH, generator)
        optimiser.zero_grad()
        (model(chosen, missing) - chosen)[missing].square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    return model


def ridge(images: Tensor, missing: Tensor, train_images: Tensor, penalty: float) -> Tensor:
    """Each image's missing pixels from the others, by the ridge regression for its mask, fitted to the training images."""
    mean = train_images.mean(0)
    covariance = (train_images - mean).T @ (train_images - mean) / len(train_images) + penalty * torch.eye(64)
    completed = images.clone()
    for row, image in enumerate(images):
        out = to_images(missing[row].repeat_interleave(4).reshape(1, PATCHES, 4))[0]
        weights = torch.linalg.solve(covariance[~out][:, ~out], image[~out] - mean[~out])
        completed[row, out] = mean[out] + covariance[out][:, ~out] @ weights
    return completed


def errors(completed: Tensor, images: Tensor, missing: Tensor) -> Tensor:
    """Of each image, the mean squared error of its missing pixels."""
    square = (to_patches(completed) - to_patches(images)).square().mean(-1)
    return (square * missing).sum(-1) / HIDDEN


def energies(model: Completion, patches: Tensor, missing: Tensor) -> Tensor:
    """Of each image, before the first and after every step."""
    return model.layer(model.tokens(patches, missing), need_energies=True)[1]


def draw(images: Tensor, missing: Tensor, completions: dict[str, Tensor], levels: Tensor, path: Path) -> None:
    """Input, completions and truth of ten images; beside them the energies of all."""
    figure = plt.figure(figsize=(11, 3.4), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(2.2, 1))
    gone = to_images(missing.unsqueeze(-1).expand(-1, -1, 4))
    rows = {"input": images.masked_fill(gone, torch.nan), **completions, "truth": images}
    grid = left.subplots(len(rows), 10)
    colours = plt.get_cmap("gray_r").copy()
    colours.set_bad("#9fc5e8")
    for row, (name, shown) in zip(grid, rows.items(), strict=True):
        for axes, image in zip(row, shown, strict=False):
            axes.imshow(image.reshape(8, 8), cmap=colours, vmin=0, vmax=1)
            axes.set_xticks([])
            axes.set_yticks([])
        row[0].set_ylabel(name, rotation=0, ha="right", va="center")
    axes = right.subplots()
    axes.plot(levels - levels[0], color="#2a6f97", alpha=0.1, linewidth=1)
    axes.set_xlabel("step")
    axes.set_ylabel("energy − energy at the start")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"picture: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=2500)
    parser.add_argument("--picture", type=Path, default=Path("massieu-results/masked_digits.png"), metavar="FILE")
    arguments = parser.parse_args()
    generator = torch.Generator().manual_seed(SEED)
    images = (torch.tensor(load_digits().data) / 16).float()
    images = images[torch.randperm(len(images), generator=generator)]
    known, new = images[:TRAINED], images[TRAINED:]
    missing = masks(len(new), generator)

    # The ridge's penalty is chosen on training images that it is then fitted to again.
    held = masks(200, generator)
    tried = {
        p: errors(ridge(known[-200:], held, known[:-200], p), known[-200:], held).mean()
        for p in (1e-4, 1e-3, 1e-2, 0.1)
    }
    penalty = min(tried, key=lambda p: float(tried[p]))

    model = train(known, arguments.updates, generator).eval()
    with torch.no_grad():
        completed = to_images(torch.where(missing.unsqueeze(-1), model(to_patches(new), missing), to_patches(new)))
        levels = energies(model, to_patches(new), missing)
    rises = levels.diff(dim=0)
    assert bool((rises < 0).all()), "the energy of every image falls in every step"
    print(f"energy at steps 0 … {len(levels) - 1}, mean over {len(new)} held-out images:")
    print("  " + " ".join(f"{level:.1f}" for level in levels.mean(1)))
    print(f"largest change of an image's energy in a step: {rises.max():+.2e}")

    completions = {
        "mean image": known.mean(0).expand_as(new),
        "ridge": ridge(new, missing, known, penalty),
        "Energy Transformer": completed,
    }
    found = {name: errors(completion, new, missing) for name, completion in completions.items()}
    for name, error in found.items():
        print(
            f"{name:>18}: mean squared error of a missing pixel {error.mean():.4f} ± {error.std() / len(new) ** 0.5:.4f}"
        )
    less = found["ridge"] - found["Energy Transformer"]
    print(f"ridge − Energy Transformer, image by image: {less.mean():.4f} ± {less.std() / len(new) ** 0.5:.4f}")
    draw(new, missing, {name: completions[name] for name in ("ridge", "Energy Transformer")}, levels, arguments.picture)


if __name__ == "__main__":
    main()
