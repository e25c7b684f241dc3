"""Attention as regression: patients are the tokens, and a new patient's query asks for the course of the disease.

scikit-learn's diabetes data, 442 patients with 10 measurements each. Keys are measurements, values the disease's progression
after a year, about its mean. No parameter is trained: everything is read from the tokens in the context. Conditional mean
attention (Z4) with a Gaussian kernel, its lengthscale and ridge chosen by leave-one-out within the context, and with the
linear one, which is ridge regression; softmax attention on dot products and on distances, their temperatures chosen by
leave-one-out too. For contexts of several
sizes: the root-mean-square error on patients held out, over random splits, and how often 90 % intervals hold the truth.

Run: python examples/in_context_regression.py [--splits 20] [--picture FILE]
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
from sklearn.datasets import load_diabetes
from torch import Tensor

from massieu import ops
from massieu.regression import GaussianKernel, LinearKernel, choose_ridge, conditional_mean_attention, leave_one_out

SIZES, HELD_OUT = (20, 40, 80, 160, 300), 142
WIDTHS = torch.tensor([2.0, 4.0, 8.0, 16.0, 32.0], dtype=torch.float64)
RIDGES = [10.0**power for power in torch.linspace(-4, 2, 13).tolist()]
SCALES = torch.tensor([2.0**power for power in range(-6, 5)], dtype=torch.float64)
COLOURS = {
    "conditional mean attention": "#2a6f97",
    "conditional mean attention, linear": "#7b2cbf",
    "softmax attention, distances": "#e07a5f",
    "softmax attention, dot products": "#81b29a",
}


class Context(NamedTuple):
    """Keys, centred values, and the queries to answer, as attention takes them."""

    key: Tensor
    value: Tensor
    query: Tensor
    truth: Tensor


def context(data: Tensor, target: Tensor, order: Tensor, size: int) -> Context:
    """The first patients of the order as tokens, and the last as queries, in units of the tokens' spread."""
    tokens, asked = order[:size], order[-HELD_OUT:]
    location, spread = data[tokens].mean(0), data[tokens].std(0)
    key, query = ((data[rows] - location) / spread for rows in (tokens, asked))
    mean = target[tokens].mean()
    return Context(
        key[None, None], (target[tokens] - mean)[None, None, :, None], query[None, None], target[asked] - mean
    )


def conditional_mean(given: Context) -> tuple[Tensor, Tensor]:
    """Predictions and their standard deviations. Each lengthscale is a head, and the best head answers."""
    key, value = (tensor.expand(-1, len(WIDTHS), -1, -1) for tensor in (given.key, given.value))
    choice = choose_ridge(key, value, RIDGES, kernel=GaussianKernel.create(WIDTHS))
    head = int(choice.mean_squared_error.amin(0).argmin())
    kernel, ridge = GaussianKernel.create(WIDTHS[head]), choice.ridge[0, head]
    found = conditional_mean_attention(
        given.query, given.key, given.value, kernel=kernel, ridge=ridge, need_variance=True
    )
    # The prior variance of most likelihood for this ridge: vᵀ(G + λI)⁻¹v/N, by values and their own fit.
    fitted = conditional_mean_attention(given.key, given.key, given.value, kernel=kernel, ridge=ridge).output
    prior = (given.value * (given.value - fitted)).mean() / ridge
    deviation = found.predictive_variance(noise_variance=ridge * prior, prior_variance=prior).sqrt()
    return found.output.flatten(), deviation.flatten()


def linear(given: Context) -> Tensor:
    """Ridge regression."""
    ridge = choose_ridge(given.key, given.value, [1e3 * each for each in RIDGES], kernel=LinearKernel.create()).ridge
    return conditional_mean_attention(
        given.query, given.key, given.value, kernel=LinearKernel.create(), ridge=ridge
    ).output.flatten()


def softmax(given: Context, *, distances: bool) -> Tensor:
    """Softmax attention at the temperature of the least leave-one-out error."""
    size = given.key.shape[2]
    norms = -0.5 * given.key.square().sum(-1)[:, :, None] * SCALES[:, None, None] if distances else 0.0
    others = torch.zeros(size, size, dtype=torch.float64).fill_diagonal_(-torch.inf)
    key, value = (tensor.expand(-1, len(SCALES), -1, -1) for tensor in (given.key, given.value))
    alone = ops.attention(key, key, value, scale=SCALES, log_weight=others + norms).output
    head = int((alone - value).square().mean((0, 2, 3)).argmin())
    weight = norms[:, [head]] if isinstance(norms, Tensor) else None
    answer = ops.attention(given.query, given.key, given.value, scale=SCALES[head], log_weight=weight)
    return answer.output.flatten()


def measure(splits: int) -> tuple[dict[str, Tensor], Tensor]:
    """Errors, (sizes, splits) by method, and the share of held-out patients in their 90 % intervals."""
    data, target = (torch.tensor(part) for part in load_diabetes(return_X_y=True, scaled=False))
    errors = {name: torch.empty(len(SIZES), splits) for name in COLOURS}
    inside = torch.empty(len(SIZES), splits)
    for split in track(range(splits), "splits", console=Console(file=sys.stderr), transient=True):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(split))
        for row, size in enumerate(SIZES):
            given = context(data, target, order, size)
            mean, deviation = conditional_mean(given)
            answers = (mean, linear(given), softmax(given, distances=True), softmax(given, distances=False))
            for name, answer in zip(COLOURS, answers, strict=True):
                errors[name][row, split] = (answer - given.truth).square().mean().sqrt()
            inside[row, split] = ((mean - given.truth).abs() < 1.6449 * deviation).double().mean()
    return errors, inside


def report(errors: dict[str, Tensor], inside: Tensor) -> None:
    ours = errors["conditional mean attention"]
    splits = ours.shape[1]
    for name, error in errors.items():
        levels = ", ".join(f"{level:.1f}" for level in error.mean(1))
        print(f"{name}: error {levels} with {', '.join(map(str, SIZES))} patients")
        if error is not ours:
            gap = (error - ours)[-1]
            print(f"  more by {gap.mean():.2f} ± {gap.std() / math.sqrt(splits):.2f} with {SIZES[-1]}")
    print(f"90 % intervals hold {', '.join(f'{100 * share:.1f} %' for share in inside.mean(1))}")


def draw(errors: dict[str, Tensor], path: Path) -> None:
    """Errors by the size of the context; and for one context, leave-one-out and held-out errors by ridge."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, error in errors.items():
        middle, spread = error.mean(1), 2 * error.std(1) / math.sqrt(error.shape[1])
        left.plot(SIZES, middle, "o-", color=COLOURS[name], label=name, markersize=4)
        left.fill_between(SIZES, middle - spread, middle + spread, color=COLOURS[name], alpha=0.2, linewidth=0)
    left.set(xscale="log", xlabel="patients in the context", ylabel="error on patients held out", title="no training")
    left.set_xticks(SIZES, [str(size) for size in SIZES])
    left.minorticks_off()
    left.legend(frameon=False)
    data, target = (torch.tensor(part) for part in load_diabetes(return_X_y=True, scaled=False))
    given = context(data, target, torch.randperm(len(data), generator=torch.Generator().manual_seed(0)), 300)
    for width, colour in zip(WIDTHS[1:4], ("#a9d6e5", "#468faf", "#01497c"), strict=True):
        kernel = GaussianKernel.create(width)
        alone = [
            leave_one_out(given.key, given.value, kernel=kernel, ridge=ridge).mean_squared_error for ridge in RIDGES
        ]
        answers = [
            conditional_mean_attention(given.query, given.key, given.value, kernel=kernel, ridge=ridge).output
            for ridge in RIDGES
        ]
        held = [(answer.flatten() - given.truth).square().mean().sqrt() for answer in answers]
        right.plot(RIDGES, torch.cat(alone).sqrt(), color=colour, label=f"lengthscale {width:g}")
        right.plot(RIDGES, held, "--", color=colour)
    right.set(
        xscale="log", xlabel="ridge", ylabel="error", title="left out (lines) and held out (dashes), 300 patients"
    )
    right.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"picture: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--splits", type=int, default=20)
    default = Path("massieu-results/in_context_regression.png")
    parser.add_argument("--picture", type=Path, default=default, metavar="FILE")
    arguments = parser.parse_args()
    errors, inside = measure(arguments.splits)
    report(errors, inside)
    draw(errors, arguments.picture)


if __name__ == "__main__":
    main()
