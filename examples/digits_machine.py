"""Boltzmann machines with four kinds of hidden units learn digits, and say how likely an image is.

scikit-learn's digits as 64 bits, 100 hidden units that are bits, spins, Gaussian or Poisson. The log-likelihood of
held-out images comes from annealed importance sampling, with the standard error of log Z: no surrogate bound is used.
scikit-learn's BernoulliRBM, whose parameters make the same machine, is compared. The cumulants of the hidden units give
the effective couplings of the pixels (B10), which are strong between neighbours although no unit knows which pixels are
neighbours. The picture shows samples, reconstructions of noisy images, and the couplings of one pixel.

Run: python examples/digits_machine.py [--picture FILE]. A minute.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import SubFigure
from rich.console import Console
from rich.progress import track
from sklearn.datasets import load_digits
from sklearn.neural_network import BernoulliRBM
from torch import Tensor

from massieu.measures import Bernoulli, Gaussian, Measure, Poisson, Spin
from massieu.nn import RestrictedBoltzmannMachine

HIDDEN, TRAINED, SHOWN, PIXEL = 100, 1500, 8, 27
TEMPERATURES, SWEEPS = 2000, 2000


def bits(number: int) -> Bernoulli:
    return Bernoulli.create(torch.full((number,), 0.5))


def layers() -> dict[str, tuple[Measure, float, int]]:
    """Hidden layer, learning rate, epochs."""
    return {
        "bits": (bits(HIDDEN), 1.0, 60),
        "spins": (Spin.create(dim=HIDDEN), 0.3, 60),
        "Gaussian": (Gaussian.create(torch.zeros(HIDDEN), torch.tensor(1.0)), 0.1, 100),
        "Poisson": (Poisson.create(torch.ones(HIDDEN)), 0.03, 100),
    }


def images() -> tuple[Tensor, Tensor]:
    """Bits of training and held-out images."""
    data = (torch.tensor(load_digits().data) / 16 > 0.5).float()
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    return data[order[:TRAINED]], data[order[TRAINED:]]


def from_scikit_learn(train: Tensor) -> RestrictedBoltzmannMachine:
    """scikit-learn's machine, as one of ours."""
    theirs = BernoulliRBM(HIDDEN, learning_rate=0.1, batch_size=10, n_iter=60, random_state=0).fit(train.numpy())
    ours = RestrictedBoltzmannMachine(bits(64), bits(HIDDEN))
    ours.weight.data = torch.tensor(np.ascontiguousarray(theirs.components_.T), dtype=torch.float32)
    ours.visible_bias.data = torch.tensor(theirs.intercept_visible_, dtype=torch.float32)
    ours.hidden_bias.data = torch.tensor(theirs.intercept_hidden_, dtype=torch.float32)
    return ours


def trained(train: Tensor) -> dict[str, RestrictedBoltzmannMachine]:
    """One machine for each kind of hidden unit."""
    found = {}
    for name, (hidden, rate, epochs) in track(
        layers().items(), "training", console=Console(file=sys.stderr), transient=True
    ):
        generator = torch.Generator().manual_seed(0)
        model = RestrictedBoltzmannMachine(bits(64), hidden, generator=generator)
        found[name] = model.fit(train, epochs=epochs, learning_rate=rate, generator=generator, progress=False)
    return found


def report(models: dict[str, RestrictedBoltzmannMachine], train: Tensor, test: Tensor) -> None:
    for name, model in track(models.items(), "log Z", console=Console(file=sys.stderr), transient=True):
        estimate = model.machine().estimate_log_partition(
            256, schedule=TEMPERATURES, generator=torch.Generator().manual_seed(1)
        )
        scores = [model.score_samples(data, estimate.log_partition).mean().item() for data in (train, test)]
        print(
            f"{name:>13}: log-likelihood {scores[0]:7.2f} trained on, {scores[1]:7.2f} held out "
            f"(± {estimate.standard_error:.2f} from log Z); pseudo {model.pseudo_log_likelihood(test).mean():7.2f}"
        )


def couplings(model: RestrictedBoltzmannMachine) -> Tensor:
    """Of second order, of all pairs of pixels; a pixel's with itself is left out."""
    with torch.no_grad():
        return model.machine().couplings(2)[1].fill_diagonal_(0)


def report_couplings(models: dict[str, RestrictedBoltzmannMachine]) -> None:
    place = torch.cartesian_prod(torch.arange(8), torch.arange(8)).float()
    distance = torch.cdist(place, place)
    for name, model in models.items():
        size = couplings(model).abs()
        near, far = size[distance == 1].mean(), size[distance > 3].mean()
        print(f"{name:>13}: coupling of neighbours {near:.3f}, of pixels more than 3 apart {far:.3f}")


def draw(models: dict[str, RestrictedBoltzmannMachine], test: Tensor, path: Path) -> None:
    """Held-out images and the same with noise; below, a row a machine: samples, reconstructions, couplings."""
    noise = torch.rand(test[:SHOWN].shape, generator=torch.Generator().manual_seed(2)) < 0.1
    noisy = torch.where(noise, 1 - test[:SHOWN], test[:SHOWN])
    figure = plt.figure(figsize=(10.5, 3.9), layout="constrained")
    samples, completed, coupled = figure.subfigures(1, 3, width_ratios=(SHOWN + 1.2, SHOWN, 1.5))
    drawn = [
        model.sample(SHOWN, sweeps=SWEEPS, generator=torch.Generator().manual_seed(3)) for model in models.values()
    ]
    show(samples, "held-out images; samples", [test[:SHOWN], *drawn], ["images", *models])
    restored = [model.reconstruct(noisy) for model in models.values()]
    show(completed, "a tenth of the bits flipped; reconstructions", [noisy, *restored])
    coupled.suptitle("couplings\nof one pixel", fontsize=10)
    places = coupled.subplots(len(models) + 1, 1)
    for axes, model in zip(places[1:], models.values(), strict=True):
        coupling = couplings(model)[PIXEL]
        size = coupling.abs().max().item()
        axes.imshow(coupling.reshape(8, 8), cmap="RdBu", vmin=-size, vmax=size)
    for axes in places:
        axes.set_axis_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    print(f"picture: {path}")


def show(part: SubFigure, title: str, rows: list[Tensor], names: Sequence[str] = ()) -> None:
    """Images row by row, each row with its name."""
    part.suptitle(title, fontsize=10)
    grid = part.subplots(len(rows), SHOWN)
    for axes, image in zip(grid.flat, torch.cat(rows), strict=True):
        axes.imshow(image.reshape(8, 8), cmap="gray_r", vmin=0, vmax=1)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_color("#cccccc")
    for row, name in zip(grid, names, strict=False):
        row[0].set_ylabel(name, rotation=0, ha="right", va="center")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, default=Path("massieu-results/digits_machine.png"), metavar="FILE")
    path = parser.parse_args().picture
    train, test = images()
    models = trained(train)
    report({**models, "scikit-learn": from_scikit_learn(train)}, train, test)
    report_couplings(models)
    draw(models, test, path)


if __name__ == "__main__":
    main()
