"""Does a bag of digits contain a nine? Hopfield pooling against mean and max pooling, at equal numbers of parameters.

A bag holds 12 images of scikit-learn's digits; half of the bags contain exactly one nine, the others none. Images are
encoded one by one, pooled to one vector, and classified linearly. Training and test bags are made of different images.
Five seeds; accuracies with the standard error over seeds.

Run: python examples/bags_of_digits.py [--seeds N] [--picture FILE]
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt
from rich.console import Console
from rich.progress import track
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from massieu.nn import HopfieldPooling

BAG, WIDTH, STEPS, BATCH = 12, 32, 400, 64


class Pooled(nn.Module):
    """An encoder of single images, a pooling over the bag, a linear classifier."""

    def __init__(self, pooling: Callable[[Tensor], Tensor], extra: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64 + extra), nn.GELU(), nn.Linear(64 + extra, WIDTH))
        self.pooling = pooling
        self.classifier = nn.Linear(WIDTH, 1)

    def forward(self, bags: Tensor) -> Tensor:
        return self.classifier(self.pooling(self.encoder(bags))).squeeze(-1)


def make_bags(images: Tensor, labels: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`count` bags (count, BAG, 64), and whether each has a nine."""
    nines, others = images[labels == 9], images[labels != 9]
    bags = others[torch.randint(len(others), (count, BAG), generator=generator)]
    has_nine = torch.rand(count, generator=generator) < 0.5
    chosen = nines[torch.randint(len(nines), (count,), generator=generator)]
    bags[:, 0] = torch.where(has_nine[:, None], chosen, bags[:, 0])
    order = torch.rand(count, BAG, generator=generator).argsort(-1)
    return bags.gather(1, order[..., None].expand_as(bags)), has_nine.float()


def accuracy(model: nn.Module, seed: int) -> float:
    """Of one training run, on bags of images that training has not seen."""
    digits = load_digits()
    images = train_test_split(torch.tensor(digits.data).float() / 16, torch.tensor(digits.target), random_state=seed)
    train_images, test_images, train_labels, test_labels = images
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(STEPS):
        bags, wanted = make_bags(train_images, train_labels, BATCH, generator)
        optimiser.zero_grad()
        F.binary_cross_entropy_with_logits(model(bags), wanted).backward()
        optimiser.step()
    bags, wanted = make_bags(test_images, test_labels, 2000, generator)
    with torch.no_grad():
        return ((model.eval()(bags) > 0).float() == wanted).float().mean().item()


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def models() -> dict[str, Callable[[], Pooled]]:
    """The others get a wider encoder, for what the Hopfield pooling's own parameters are."""

    def hopfield() -> Pooled:
        return Pooled(HopfieldPooling(WIDTH, num_heads=4), extra=0)

    per_unit = parameters(Pooled(torch.nn.Identity(), 1)) - parameters(Pooled(torch.nn.Identity(), 0))
    extra = round((parameters(hopfield()) - parameters(Pooled(torch.nn.Identity(), 0))) / per_unit)
    return {
        "Hopfield pooling": hopfield,
        "mean pooling": lambda: Pooled(lambda bags: bags.mean(-2), extra),
        "max pooling": lambda: Pooled(lambda bags: bags.amax(-2), extra),
    }


def draw(found: dict[str, Tensor], path: Path) -> None:
    """A bag with a nine, which has a red frame; below, a dot for each seed, and the mean."""
    figure = plt.figure(figsize=(7, 3.4), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1, 3.4))
    digits = load_digits()
    images, labels = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    bags, has_nine = make_bags(images, labels, 8, torch.Generator().manual_seed(0))
    bag = bags[has_nine.argmax()]
    is_nine = (torch.cdist(bag, images[labels == 9]) == 0).any(-1)
    for place, image, framed in zip(above.subplots(1, BAG), bag, is_nine, strict=True):
        place.imshow(image.reshape(8, 8), cmap="gray_r", vmin=0, vmax=1)
        place.set(xticks=[], yticks=[])
        place.spines[:].set(color="#c1121f" if framed else "#cccccc", linewidth=2.5 if framed else 1)
    axes = below.subplots()
    for row, scores in enumerate(found.values()):
        axes.plot(scores, [row] * len(scores), "o", alpha=0.5, color="#2a6f97")
        axes.plot(scores.mean(), row, "|", markersize=22, color="#c1121f")
    axes.set_yticks(range(len(found)), list(found))
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.axvline(0.5, color="grey", linestyle=":", linewidth=1)
    axes.set_xlabel("accuracy on held-out bags: a dot for each seed, a bar at their mean")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"picture: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--picture", type=Path, default=Path("massieu-results/bags_of_digits.png"), metavar="FILE")
    arguments = parser.parse_args()
    found, seeds = {}, arguments.seeds
    for name, make in models().items():
        accuracies = []
        for seed in track(range(seeds), name, console=Console(file=sys.stderr), transient=True):
            torch.manual_seed(seed)
            accuracies.append(accuracy(make(), seed))
        scores = found[name] = torch.tensor(accuracies)
        error = scores.std().item() / seeds**0.5 if seeds > 1 else float("nan")
        print(
            f"{name:>16}: accuracy {scores.mean():.3f} ± {error:.3f} ({parameters(make())} parameters, {seeds} seeds)"
        )
    draw(found, arguments.picture)


if __name__ == "__main__":
    main()
