"""A measure of your own: one hook, the laws it must obey, and attention over it trains.

The memory holds 100 images of digits. A query is one of them with its lower half erased, and with black and white
exchanged half of the time; the answer should be the whole image, in the query's colours. Softmax attention, whose
measure is one atom at each image, has no pattern for the exchanged ones. The measure that fits the task has an atom at
each image and one at its negative:

    A(eta) = log Σ_n 2 cosh(x_n·eta).

This line is all that you write. Run: python examples/own_measure.py [--picture FILE]
"""

import argparse
import sys
from pathlib import Path

import torch
from jaxtyping import Float
from matplotlib import pyplot as plt
from rich.console import Console
from rich.progress import track
from sklearn.datasets import load_digits
from torch import Tensor

from massieu.measures import Atoms, Measure
from massieu.testing import MeasureCase, measure_checks


class MirroredAtoms(Measure):
    """An atom at each point and one at its negative, all of one weight."""

    points: Float[Tensor, "*batch N d"]

    @property
    def batch_shape(self) -> torch.Size:
        return self.points.shape[:-2]

    @property
    def event_shape(self) -> torch.Size:
        return self.points.shape[-1:]

    def _log_partition(self, eta: Tensor) -> Tensor:
        scores = (self._align(self.points, eta, 2) @ eta.unsqueeze(-1)).squeeze(-1)
        return torch.cat([scores, -scores], -1).logsumexp(-1)


def obeys_the_laws() -> None:
    """Mean, Fisher information, KL divergence, … come from the one hook; so do the checks that they are right.

    In a test: ``@pytest.mark.parametrize(("name", "check"), measure_checks(case))``, one item for each law.
    """
    points = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    case = MeasureCase(
        MirroredAtoms(points),
        log_partition=lambda eta: (2 * torch.cosh(eta @ points.mT)).sum(-1).log(),  # an independent oracle, by cosh
        scales=(0.0, 1e-4, 1.0, 15.0),
    )
    for _, check in measure_checks(case):
        check()


def queries_of(wanted: Tensor) -> Tensor:
    """The same without their lower halves."""
    return torch.cat([wanted[:, :32], torch.zeros_like(wanted[:, 32:])], -1)


def trained(name: str, memory: Measure, images: Tensor, steps: int = 300) -> tuple[Tensor, float]:
    """The map from query to eta; and the mean squared error of recall, where 1 is to answer nothing."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.eye(images.shape[-1]).requires_grad_()
    optimiser = torch.optim.Adam([weight], lr=0.02)
    error = torch.tensor(1.0)
    for _ in track(range(steps), name, console=Console(file=sys.stderr), transient=True):
        colour = torch.randint(0, 2, (len(images), 1), generator=generator) * 2.0 - 1.0
        wanted = colour * images
        error = (memory.mean(queries_of(wanted) @ weight) - wanted).square().sum(-1).mean() / images.square().sum(
            -1
        ).mean()
        optimiser.zero_grad()
        error.backward()
        optimiser.step()
    return weight.detach(), float(error.detach())


def draw(
    recalled: dict[str, Tensor], wanted: Tensor, exchanged: Tensor, mean: Tensor, sizes: Tensor, path: Path
) -> None:
    """Queries, what each memory answers, and what is wanted, with the mean put back in the query's colours."""
    middle = torch.where(exchanged, 1 - mean, mean)
    erased = torch.arange(64) >= 32
    rows = {"query": queries_of(wanted), **recalled, "wanted": wanted}
    colours = plt.get_cmap("gray_r").with_extremes(bad="#cfe2f3")  # what is erased
    figure, grid = plt.subplots(len(rows), len(wanted), figsize=(9, 3.8), layout="constrained")
    for line, (name, values) in zip(grid, rows.items(), strict=True):
        shown = middle + values * sizes
        shown = shown.masked_fill(erased, torch.nan) if name == "query" else shown
        for axes, image in zip(line, shown, strict=True):
            axes.imshow(image.reshape(8, 8), cmap=colours, vmin=0, vmax=1)
            axes.set(xticks=[], yticks=[])
        line[0].set_ylabel(name, rotation=0, ha="right", va="center")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"picture: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, default=Path("massieu-results/own_measure.png"), metavar="FILE")
    path = parser.parse_args().picture
    obeys_the_laws()
    print("MirroredAtoms obeys the laws of a measure")
    digits = torch.from_numpy(load_digits().data[:100] / 16).float()
    about_the_mean = digits - digits.mean(0)
    images = torch.nn.functional.normalize(about_the_mean, dim=-1)
    # The first ten, every second one with its colours exchanged.
    exchanged = torch.arange(10).unsqueeze(-1) % 2 == 1
    wanted = torch.where(exchanged, -images[:10], images[:10])
    recalled = {}
    for name, memory in (("softmax attention", Atoms.create(images)), ("mirrored atoms", MirroredAtoms(images))):
        weight, error = trained(name, memory, images)
        print(f"error of recall, {f'{name}:':<18} {error:.3f}")
        recalled[name] = memory.mean(queries_of(wanted) @ weight)
    draw(recalled, wanted, exchanged, digits.mean(0), about_the_mean[:10].norm(dim=-1, keepdim=True), path)


if __name__ == "__main__":
    main()
