"""Which masked pixels teach a model about the digit? The condition number of the mask, tested on real images.

A mixture of twelve kinds of images, each with independent pixels, is fitted to scikit-learn's digits in black and white:
given the kind, pixels are exchangeable tokens with positions. The left half of an image is the context. The self-supervised
task is to predict some pixels of the right half, the downstream task is the digit. G and D are the means of both for each
kind, read off the training images; the condition number κ of the linear probe between them is known before any predictor is
trained (Z13).

Then ridge regressions predict the masked pixels of each task from few images, the probe turns their predictions into
digits, and its error is compared with κ²·(error of the pixels). Run: python examples/transfer.py [--picture FILE]
"""

import argparse
import math
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib import pyplot as plt
from rich.console import Console
from rich.progress import track
from scipy.stats import spearmanr
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

from massieu.papers.theory import excess_risk_bound, transfer
from massieu.papers.theory.transfer import TransferResult

KINDS, STEPS, TASKS, SEEN = 12, 60, 40, 400
COLUMN = torch.arange(64) % 8
CONTEXT, HIDDEN = (COLUMN < 4).nonzero()[:, 0], (COLUMN >= 4).nonzero()[:, 0]


class Mixture(NamedTuple):
    """Kinds of images with independent pixels."""

    log_weight: Tensor  # (KINDS,)
    mean: Tensor  # (KINDS, 64)

    def posterior(self, images: Tensor, pixels: Tensor) -> Tensor:
        """Probabilities of the kinds given these pixels."""
        mean, seen = self.mean[:, pixels], images[:, pixels]
        log_likelihood = seen @ mean.log().T + (1 - seen) @ (1 - mean).log().T
        return torch.softmax(log_likelihood + self.log_weight, -1)


class Task(NamedTuple):
    """One choice of masked pixels, and what came of it."""

    pixels: Tensor
    transfer: TransferResult
    own_excess: float
    downstream_excess: float
    accuracy: float


def fit(images: Tensor) -> Mixture:
    """Expectation maximisation with one pseudo-image of each colour."""
    start = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:KINDS]]
    mixture = Mixture(torch.full((KINDS,), -math.log(KINDS), dtype=torch.float64), 0.25 + 0.5 * start)
    for _ in range(STEPS):
        share = mixture.posterior(images, torch.arange(64))
        mass = share.sum(0)
        mixture = Mixture((mass / mass.sum()).log(), (share.T @ images + 1) / (mass[:, None] + 2))
    return mixture


def tasks() -> list[Tensor]:
    """Sets of hidden pixels: of rows, of columns, and scattered ones, 11 to 24 of them."""
    generator = torch.Generator().manual_seed(1)
    chosen = [HIDDEN[(row <= HIDDEN // 8) & (row + 4 > HIDDEN // 8)] for row in range(5)]
    chosen += [HIDDEN[(COLUMN[HIDDEN] == left) | (COLUMN[HIDDEN] == left + 1)] for left in (4, 5, 6)]
    while len(chosen) < TASKS:
        count = int(torch.randint(11, 25, (1,), generator=generator))
        chosen.append(HIDDEN[torch.randperm(len(HIDDEN), generator=generator)[:count]])
    return chosen


def ridge(features: Tensor, targets: Tensor, strength: float = 5.0) -> Tensor:
    return torch.linalg.solve(
        features.T @ features + strength * torch.eye(features.shape[1], dtype=torch.float64), features.T @ targets
    )


def with_constant(images: Tensor) -> Tensor:
    return torch.cat([images[:, CONTEXT], torch.ones(len(images), 1, dtype=torch.float64)], 1)


def tried(pixels: Tensor, mixture: Mixture, downstream: Tensor, train: Tensor, test: Tensor, labels: Tensor) -> Task:
    """κ from the means; then a predictor of the masked pixels, and the probe on its predictions."""
    g = mixture.mean[:, pixels].T
    link = transfer(g, downstream)
    guess = with_constant(test) @ ridge(with_constant(train[:SEEN]), train[:SEEN, pixels])
    posterior = mixture.posterior(test, CONTEXT)
    own = (guess - posterior @ g.T).square().sum(-1).mean().item()
    read = link.predict(guess)
    theirs = (read - posterior @ downstream.T).square().sum(-1).mean().item()
    return Task(pixels, link, own, theirs, (read.argmax(-1) == labels).double().mean().item())


def draw(found: list[Task], few: Tensor, lost: tuple[Tensor, Tensor], path: Path) -> None:
    figure = plt.figure(figsize=(13, 3.9), layout="constrained")
    left, middle, right = figure.subfigures(1, 3, width_ratios=(1, 1, 0.8))
    kappa = torch.tensor([task.transfer.condition_number for task in found])
    ratio = torch.tensor([task.downstream_excess / task.own_excess for task in found])
    size = [len(task.pixels) for task in found]
    axes = left.subplots()
    axes.loglog(kappa**2, kappa**2, color="grey", linestyle=":", linewidth=1, label="bound κ²")
    dots = axes.scatter(kappa**2, ratio, c=size, cmap="viridis")
    left.colorbar(dots, label="masked pixels")
    axes.set(xlabel="κ² of the mask", ylabel="error of digits / error of pixels", title="known before, measured after")
    axes.legend(fontsize=8)
    axes = middle.subplots()
    axes.scatter(kappa, [task.accuracy for task in found], c=size, cmap="viridis")
    axes.set(
        xscale="log", xlabel="κ of the mask", ylabel="accuracy of the probe", title="digits read off predicted pixels"
    )

    ranked = sorted(found, key=lambda task: task.transfer.condition_number)
    pictures = right.subplots(2, 2)
    for axes, name, task in ((pictures[0, 0], "least", ranked[0]), (pictures[0, 1], "largest", ranked[-1])):
        image = torch.zeros(64)
        image[CONTEXT], image[task.pixels] = 0.25, 0.8
        axes.imshow(image.view(8, 8), cmap="Blues", vmin=0, vmax=1)  # pale: the context; dark: what is predicted
        axes.set_title(f"{name} κ: {task.transfer.condition_number:.0f}", fontsize=9)
    one, other = lost
    pictures[1, 0].imshow(one.view(8, 8), cmap="gray_r", vmin=0, vmax=1)
    pictures[1, 0].set_title("a mixture of kinds", fontsize=9)
    pictures[1, 1].imshow((other - one).view(8, 8), cmap="coolwarm", vmin=-0.2, vmax=0.2)
    pictures[1, 1].plot(few % 8, few // 8, "x", color="black", markersize=7, markeredgewidth=2)
    pictures[1, 1].set_title("what × does not see", fontsize=9)
    for axes in pictures.flat:
        axes.set(xticks=[], yticks=[])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    print(f"picture: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, default=Path("massieu-results/transfer.png"), metavar="FILE")
    arguments = parser.parse_args()
    digits = load_digits()
    images = torch.tensor(digits.data > 7.5).double()
    split = train_test_split(images, torch.tensor(digits.target), random_state=0)
    train, test, train_labels, labels = split
    mixture = fit(train)
    # D: how often each digit is of each kind, among the training images; a column a kind.
    share = mixture.posterior(train, torch.arange(64))
    counts = torch.eye(10, dtype=torch.float64)[train_labels].T @ share
    downstream = counts / counts.sum(0)
    best = (mixture.posterior(test, CONTEXT) @ downstream.T).argmax(-1)
    print(f"accuracy of the mixture from the left half: {(best == labels).double().mean():.3f}")

    masks = track(tasks(), "masks", console=Console(file=sys.stderr), transient=True)
    every = [tried(pixels, mixture, downstream, train, test, labels) for pixels in masks]
    found = [task for task in every if task.transfer.identifiable]
    kappa = torch.tensor([task.transfer.condition_number for task in found])
    ratio = torch.tensor([task.downstream_excess / task.own_excess for task in found])
    accuracy = torch.tensor([task.accuracy for task in found])
    size = torch.tensor([len(task.pixels) for task in found])
    bounds = [excess_risk_bound(task.transfer.condition_number, task.own_excess) for task in found]
    over = max(task.downstream_excess / bound for task, bound in zip(found, bounds, strict=True))
    print(
        f"κ of {len(found)} masks: {kappa.min():.2f} to {kappa.max():.2f}; not identifiable: {len(every) - len(found)}"
    )
    print(f"largest (error of digits)/(κ²·error of pixels): {over:.3f}")
    print(f"rank correlation of κ and the measured ratio: {spearmanr(kappa, ratio).statistic:.2f}")
    print(f"rank correlation of κ and the accuracy: {spearmanr(kappa, accuracy).statistic:.2f}")
    near = (size >= 15) & (size <= 17)
    alike = spearmanr(kappa[near], accuracy[near]).statistic
    print(f"the same among the {int(near.sum())} masks of 15 to 17 pixels: {alike:.2f}")

    # Four pixels cannot hold eleven directions: mixtures of kinds with the same masked pixels and other digits.
    few = HIDDEN[COLUMN[HIDDEN] == 4][2:6]
    narrow = transfer(mixture.mean[:, few].T, downstream)
    print(f"masking four pixels: κ = {narrow.condition_number}, {narrow.lost.shape[1]} directions of the digit lost")
    move = narrow.lost[:, 0]
    centre = torch.full((KINDS,), 1 / KINDS, dtype=torch.float64)
    step = centre.min() / move.abs().max()
    pair = [(centre + sign * step * move) for sign in (1, -1)]
    same, other = ((matrix @ (pair[0] - pair[1])).norm() for matrix in (mixture.mean[:, few].T, downstream))
    print(f"two mixtures of kinds: masked pixels differ by {same:.1e}, digits by {other:.2f}")
    draw(found, few, (pair[0] @ mixture.mean, pair[1] @ mixture.mean), arguments.picture)


if __name__ == "__main__":
    main()
