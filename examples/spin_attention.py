"""Attention whose tokens are spins, compared with softmax attention, on scikit-learn's digits read row by row.

An image is a sequence of eight rows. One layer mixes them, of the same number of parameters each time: softmax attention, or
spins in the fields of their drives, coupled by attention, after one step or at rest, to first order or to second, with the
echo that a spin meets of itself (B16). Accuracies are on images that training has not seen, with the standard error over
seeds; the task is small, and they are no ranking.

Then one trained layer as a spin system: the lengths of its magnetisations, how a row answers to another row's field
(susceptibility), the entropy that asymmetric couplings produce, and what the echo changes in each. Where theory says that
it can change nothing: the means of Gaussian sites (B14), beside two-valued ones.

Run: python examples/spin_attention.py [--picture FILE] [--seeds N] [--steps N]. Three minutes.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt
from rich.console import Console
from rich.progress import track
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from massieu.energy import KineticSpins, SpinModel
from massieu.energy.kinetic import Order
from massieu.measures import Gaussian, Spin
from massieu.nn import Attention, SpinAttention

ROWS, WIDTH, HEADS, BATCH = 8, 32, 4, 64
STRENGTHS = (0.05, 0.1, 0.2, 0.4, 0.8)
SOFTMAX = "softmax attention"
SPINS: dict[str, tuple[Order, int | None]] = {
    "spins, first order, one step": ("first", 1),
    "spins, first order, at rest": ("first", None),
    "spins, second order, one step": ("second", 1),
    "spins, second order, at rest": ("second", None),
}


class SelfAttention(nn.Module):
    """Softmax attention of a sequence to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(WIDTH, HEADS, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.attention(tokens, tokens, tokens, need_weights=False)[0]


class Classifier(nn.Module):
    """Rows to tokens, one layer that mixes them, the mean over them, a linear map to ten digits."""

    def __init__(self, mixing: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Linear(8, WIDTH)
        self.position = nn.Parameter(0.1 * torch.randn(ROWS, WIDTH))
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.mixing = mixing
        self.head = nn.Linear(WIDTH, 10)

    def tokens(self, images: Tensor) -> Tensor:
        return self.embedding(images) + self.position

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.tokens(images)
        mixed = tokens + self.mixing(self.norms[0](tokens))
        return self.head(self.norms[1](mixed).mean(-2))


def layer(name: str) -> nn.Module:
    if name == SOFTMAX:
        return SelfAttention()
    order, steps = SPINS[name]
    return SpinAttention(WIDTH, HEADS, order=order, steps=steps)


def digits(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test images, (·, 8, 8), and their labels."""
    data = load_digits()
    images = torch.tensor(data.images).float() / 16
    train, test, train_labels, test_labels = train_test_split(images, torch.tensor(data.target), random_state=seed)
    return train, test, train_labels, test_labels


def trained(name: str, seed: int, steps: int) -> tuple[Classifier, float]:
    """A classifier, and its accuracy on images that training has not seen."""
    train, test, train_labels, test_labels = digits(seed)
    torch.manual_seed(seed)
    model = Classifier(layer(name))
    optimiser = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for _ in range(steps):
        chosen = torch.randint(len(train), (BATCH,))
        optimiser.zero_grad()
        F.cross_entropy(model(train[chosen]), train_labels[chosen]).backward()
        optimiser.step()
    with torch.no_grad():
        return model, (model(test).argmax(-1) == test_labels).float().mean().item()


class Response(NamedTuple):
    """What the spins of one head do at rest."""

    lengths: Tensor  # ‖m_i‖/R, (8,)
    susceptibility: Tensor  # ‖∂m_i/∂x_j‖, Frobenius, (8, 8)
    entropy: float


def response(model: KineticSpins, order: Order) -> Response:
    """Of a model without batch."""

    def means(drive: Tensor) -> Tensor:
        moved = KineticSpins.create(drive, model.coupling, scale=model.scale)
        return moved.mean(moved.stationary(order).value)

    state = model.stationary(order).value
    susceptibility = torch.func.jacrev(means)(model.drive).permute(0, 2, 1, 3).flatten(2).norm(dim=-1)
    lengths = model.mean(state).norm(dim=-1) / model.radius
    return Response(lengths, susceptibility, model.entropy_production(state).item())


def look_inside(classifier: Classifier, image: Tensor) -> tuple[Tensor, dict[Order, Response]]:
    """The couplings of the first head, and its responses to both orders with the same weights."""
    mixing = classifier.mixing
    assert isinstance(mixing, SpinAttention)
    with torch.no_grad():
        spins = mixing.model(classifier.norms[0](classifier.tokens(image[None])))
    head = KineticSpins.create(spins.drive[0, 0].double(), spins.coupling[0, 0].double(), scale=spins.scale.double())
    orders: tuple[Order, Order] = ("first", "second")
    found: dict[Order, Response] = {order: response(head, order) for order in orders}
    for order, each in found.items():
        own = each.susceptibility.diagonal().mean().item()
        others = (each.susceptibility.sum() - each.susceptibility.diagonal().sum()).item() / (ROWS * (ROWS - 1))
        print(
            f"{order} order: magnetisation {each.lengths.mean():.4f} of the radius; susceptibility to the own field {own:.4f}, "
            f"to another row's {others:.4f}; entropy production {each.entropy:.4f} nats"
        )
    print(f"a step contracts by {head.lipschitz.item():.3f} or less: one state of rest")
    return head.coupling, found


def echoes() -> dict[str, tuple[list[float], list[float]]]:
    """Errors of the means, without and with the echo, as symmetric couplings grow; exact for both kinds of site."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(8, 8, generator=generator, dtype=torch.float64)
    coupling = (drawn + drawn.T) / 8 * (1 - torch.eye(8, dtype=torch.float64))
    field = 0.5 * torch.randn(8, generator=generator, dtype=torch.float64)
    sites = {
        "Gaussian": Gaussian.create(field.unsqueeze(-1), torch.ones(8, 1, 1, dtype=torch.float64)),
        "two-valued": Spin.create(field),
    }
    found = {}
    for name, site in sites.items():
        errors: tuple[list[float], list[float]] = ([], [])
        for strength in STRENGTHS:
            model = SpinModel.create(site, strength * coupling)
            exact = model.exact().mean
            for kept, approximate in zip(errors, (model.mean_field(), model.tap()), strict=True):
                kept.append((approximate.mean - exact).abs().max().item())
        found[name] = errors
        print(
            f"{name} sites, couplings of {STRENGTHS[-1]:g}: error of the means {errors[0][-1]:.1e} without the echo, "
            f"{errors[1][-1]:.1e} with it"
        )
    return found


def draw(
    image: Tensor,
    coupling: Tensor,
    responses: dict[Order, Response],
    errors: dict[str, tuple[list[float], list[float]]],
    accuracies: dict[str, Tensor],
    path: Path,
) -> None:
    """The image, its couplings and magnetisations; susceptibilities; errors of means; accuracies."""
    figure, grid = plt.subplots(2, 4, figsize=(12, 5.6), layout="constrained")
    grid[0, 0].imshow(image, cmap="gray_r", vmin=0, vmax=1)
    grid[0, 0].set_title("eight rows, eight spins")
    shown = grid[0, 1].imshow(coupling, cmap="magma", vmin=0)
    grid[0, 1].set(title="couplings J, first head", xlabel="row j", ylabel="row i")
    figure.colorbar(shown, ax=grid[0, 1])
    largest = max(each.susceptibility.max().item() for each in responses.values())
    for axes, (order, each) in zip(grid[0, 2:], responses.items(), strict=True):
        shown = axes.imshow(each.susceptibility, cmap="viridis", vmin=0, vmax=largest)
        axes.set(title=f"‖∂mᵢ/∂xⱼ‖, {order} order", xlabel="row j")
    figure.colorbar(shown, ax=grid[0, 3])
    for order, each in responses.items():
        grid[1, 0].plot(range(1, ROWS + 1), each.lengths, marker="o", label=f"{order} order")
    grid[1, 0].set(title="magnetisation ‖m‖/R", xlabel="row", ylim=(0, 1))
    grid[1, 0].legend()
    for axes, (name, both) in zip(grid[1, 1:3], errors.items(), strict=True):
        for label, kept in zip(("mean field", "with the echo"), both, strict=True):
            axes.loglog(STRENGTHS, [max(error, 1e-17) for error in kept], marker="o", label=label)
        axes.set(title=f"error, {name} sites", xlabel="strength of the couplings", ylim=(1e-17, 1))
        axes.set_xticks(STRENGTHS, [f"{strength:g}" for strength in STRENGTHS])
        axes.minorticks_off()
        axes.legend(loc="center right")
    scores = torch.stack(list(accuracies.values()))
    error = scores.std(-1) / math.sqrt(scores.shape[-1]) if scores.shape[-1] > 1 else torch.zeros(len(scores))
    grid[1, 3].errorbar(scores.mean(-1), range(len(scores)), xerr=error, fmt="o")
    # One of the names a line: they stand inside the panel, above their points.
    for row, name in enumerate(accuracies):
        grid[1, 3].annotate(name, (scores.mean(), row + 0.15), ha="center", fontsize=8)
    grid[1, 3].set(yticks=[], ylim=(-0.5, len(scores) - 0.3), xlim=(scores.min() - 0.01, scores.max() + 0.01))
    grid[1, 3].set(title="accuracy", xlabel="± standard error over seeds")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"picture: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, default=Path("massieu-results/spin_attention.png"), metavar="FILE")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    accuracies, classifier = {}, None
    for name in (SOFTMAX, *SPINS):
        found = []
        for seed in track(range(options.seeds), name, console=Console(file=sys.stderr), transient=True):
            classifier, score = trained(name, seed, options.steps)
            found.append(score)
        accuracies[name] = scores = torch.tensor(found)
        error = scores.std().item() / math.sqrt(len(found)) if len(found) > 1 else math.nan
        size = sum(parameter.numel() for parameter in layer(name).parameters())
        print(f"{name:>29}: accuracy {scores.mean():.3f} ± {error:.3f} ({size} parameters in the layer)")
    print("equal budgets of steps and parameters on one small task: no ranking")
    assert classifier is not None
    image = digits(0)[1][0]
    coupling, responses = look_inside(classifier, image)
    draw(image, coupling, responses, echoes(), accuracies, options.picture)


if __name__ == "__main__":
    main()
