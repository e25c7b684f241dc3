"""The pictures of the pages on the package's rooms: one function a picture, each from a computation that the page is about.

Run: python -m scripts.pictures [--out DIR] [NAME ...]. Without names: all, into docs/images; `probe` and `capacity` take a
minute each.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from scripts.example_outputs import IMAGES, shrink
from torch import Tensor

import massieu
from massieu import measures, nn, ops
from massieu.energy import BinaryHopfieldEnergy, DenseHopfieldEnergy, Energy, HopfieldEnergy
from massieu.solve import Anderson, Auto, Method, Newton, Picard, fixed_point

BLUE, RED, GREEN, ORANGE, VIOLET, GREY = "#2a6f97", "#c8553d", "#4f8a3d", "#d1891f", "#7b4fa3", "#777777"
COLOURS = (BLUE, RED, GREEN, ORANGE, VIOLET)
F64 = torch.float64
CAPACITY_TRIALS = 21
"""Sets of random patterns for each width."""
CAPACITY_LOADS = (0.03, 0.06, 0.09, 0.11, 0.125, 0.14, 0.155, 0.18, 0.22, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9, 0.99)


def panels(count: int, height: float = 3.4) -> tuple[Figure, list]:
    figure, axes = plt.subplots(1, count, figsize=(8.4, height), layout="constrained")
    return figure, list(axes)


def ops_picture() -> Figure:
    """A query moves along a line: weights of five keys, and log Z above their scores."""
    keys = torch.tensor([[-1.0, 0.4], [-0.45, -0.5], [0.1, 0.9], [0.5, -0.2], [1.0, 0.3]], dtype=F64)
    places = torch.linspace(-5, 5, 201, dtype=F64)
    queries = torch.stack([places, torch.ones_like(places)], -1)
    # Unit vectors as values: the output is the weights.
    found = ops.attention(queries[None, None], keys[None, None], torch.eye(5, dtype=F64)[None, None], scale=1.0)
    figure, (left, right) = panels(2)
    left.stackplot(places, found.output[0, 0].T, colors=COLOURS, alpha=0.85, labels=[f"key {n}" for n in range(1, 6)])
    left.set(xlabel="first coordinate of the query", ylabel="weight", title="attention's weights", ylim=(0, 1))
    left.legend(fontsize=8, loc="center left")
    for scores, colour in zip((queries @ keys.T).T, COLOURS, strict=True):
        right.plot(places, scores, color=colour, linewidth=1)
    right.plot(places, found.log_partition[0, 0], color="black", linewidth=2.2, label="log Z")
    right.set(xlabel="first coordinate of the query", ylabel="nats", title="log Z lies above every key's score")
    right.legend()
    return figure


def nn_picture() -> Figure:
    """What strategies of heads make of the same scores; and log Z of a causal module's heads along a sequence."""
    figure, (left, right) = panels(2)
    strategies = {
        "SoftmaxHeads()": nn.SoftmaxHeads(),
        "EntmaxHeads(alpha=1.5)": nn.EntmaxHeads(alpha=1.5),
        "EntmaxHeads(alpha=2.0)": nn.EntmaxHeads(alpha=2.0),
        "NormalizedHeads()": nn.NormalizedHeads(),
    }
    scores = torch.linspace(-3, 3, 13)
    for (name, heads), colour in zip(strategies.items(), COLOURS, strict=False):
        attention = nn.Attention(1, 1, batch_first=True, heads=heads)
        torch.nn.init.ones_(attention.in_proj_weight)  # a key's score is the key itself, times the query
        with torch.no_grad():
            _, weights = attention(torch.ones(1, 1, 1), scores[None, :, None], scores[None, :, None])
        left.plot(scores, weights[0, 0], "o-", color=colour, markersize=3.5, label=name)
    left.axhline(0, color=GREY, linewidth=0.8)
    left.set(xlabel="score of the key (nats)", ylabel="weight of the key", title="one query, 13 keys, four strategies")
    left.legend(fontsize=8)
    torch.manual_seed(0)
    attention, tokens = nn.Attention(16, 4, batch_first=True), 2 * torch.randn(200, 64, 16)
    with torch.no_grad():
        _, _, level = attention(tokens, need_weights=False, is_causal=True, need_log_partition=True)
    seen = torch.arange(1, 65)
    for head, colour in enumerate(COLOURS[:4]):
        right.plot(seen, level[:, head].mean(0), color=colour, linewidth=1.2, label=f"head {head}")
    right.plot(seen, seen.log(), "--", color="black", label="log n: all scores 0")
    right.set(xlabel="keys n that the query sees", ylabel="mean log Z (nats)", title="a causal module, 200 sequences")
    right.legend(fontsize=8)
    return figure


def energy_picture() -> Figure:
    """The energy of six patterns in the plane at two inverse temperatures, and descents from the same starts."""
    angle = torch.arange(6, dtype=F64) * torch.pi / 3 + 0.3
    patterns = torch.stack([angle.cos(), angle.sin()], -1) * torch.tensor([1.0, 0.8], dtype=F64)
    line = torch.linspace(-1.5, 1.5, 121, dtype=F64)
    plane = torch.stack(torch.meshgrid(line, line, indexing="xy"), -1)
    starts = torch.tensor([[-1.3, 1.1], [0.15, 0.2], [1.3, 0.9], [-0.4, -1.3], [1.2, -1.2], [-1.4, -0.2]], dtype=F64)
    figure, axes = panels(2, height=3.9)
    for place, scale in zip(axes, (2.0, 12.0), strict=True):
        memory = HopfieldEnergy.create(patterns, scale=scale)
        level = memory(plane.flatten(0, 1)).reshape(121, 121)
        shown = place.contourf(line, line, level, levels=24, cmap="Blues_r")
        path = memory.descend(starts, steps=40).states
        place.plot(*path.permute(2, 0, 1), "o-", color=RED, markersize=2.5, linewidth=1.2)
        place.plot(*patterns.T, "s", color="black", markersize=6, label="patterns")
        place.plot(*starts.T, "o", color=RED, markersize=6, label="starts")
        place.set(title=f"β = {scale:g}", xlabel="x₁", ylabel="x₂", aspect="equal")
        figure.colorbar(shown, ax=place, label="energy (nats/β)", shrink=0.8)
    axes[0].legend(fontsize=8, loc="lower left")
    return figure


def measures_picture() -> Figure:
    """A, its slope and its curvature, of five measures on the line."""
    shown: dict[str, measures.Measure] = {
        "Atoms at −1, 0, 2": measures.Atoms.create(torch.tensor([[-1.0], [0.0], [2.0]], dtype=F64)),
        "Gaussian(0, 1)": measures.Gaussian.create(torch.zeros(1, dtype=F64), torch.ones(1, dtype=F64)),
        "Spin()": measures.Spin.create(torch.zeros(1, dtype=F64)),
        "Uniform(−2, 2)": measures.Uniform.create(torch.tensor([-2.0], dtype=F64), torch.tensor([2.0], dtype=F64)),
        "Poisson(½)": measures.Poisson.create(torch.tensor([0.5], dtype=F64)),
    }
    eta = torch.linspace(-3, 3, 121, dtype=F64)
    figure, (first, second, third) = panels(3, height=3.2)
    for (name, measure), colour in zip(shown.items(), COLOURS, strict=True):
        first.plot(eta, measure.log_partition(eta[:, None]), color=colour, label=name)
        second.plot(eta, measure.mean(eta[:, None])[:, 0], color=colour)
        third.plot(eta, measure.fisher(eta[:, None])[:, 0, 0], color=colour)
    first.set(title="A(eta)", ylabel="log-partition (nats)", xlabel="eta", ylim=(-1, 5))
    second.set(title="∇A: the mean", ylabel="mean of x", xlabel="eta", ylim=(-3, 4))
    third.set(title="∇²A: Fisher information", ylabel="variance of x", xlabel="eta", ylim=(0, 4))
    figure.legend(loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    return figure


def residuals(method: Method, steps: int) -> tuple[list[int], list[float]]:
    """Calls of the function and the residual that is left, for growing numbers of steps, on one slow fixed point."""
    torch.manual_seed(0)
    factor = torch.randn(40, 40, dtype=F64)
    matrix = factor @ factor.mT / torch.linalg.matrix_norm(factor, 2) ** 2  # symmetric, its largest eigenvalue 1
    shift, calls = torch.randn(1, 40, dtype=F64), [0]

    def function(z: Tensor) -> Tensor:
        calls[0] += 1
        return torch.tanh(0.98 * z @ matrix.mT + 0.05 * shift)

    made, left = [], []
    for allowed in range(1, steps + 1):
        calls[0] = 0
        found = fixed_point(function, torch.zeros(1, 40, dtype=F64), method=method, max_steps=allowed, throw=False)
        made.append(calls[0])
        left.append(float(found.residual))
    return made, left


def solve_picture() -> Figure:
    """Residuals of four methods by calls of the function; and a fixed point with its implicit derivative."""
    figure, (left, right) = panels(2)
    methods = {"Picard()": Picard(), "Anderson()": Anderson(), "Auto()": Auto(), "Newton()": Newton()}
    for (name, method), colour in zip(methods.items(), COLOURS, strict=False):
        calls, left_over = residuals(method, 80)
        left.semilogy(calls, left_over, "o-", color=colour, markersize=3, linewidth=1, label=name)
    left.set(xlabel="calls of f", ylabel="‖f(z) − z‖", title="one fixed point, four methods", xlim=(0, 100))
    left.legend(fontsize=8)

    def magnetisation(m: Tensor, strength: Tensor) -> Tensor:
        return torch.tanh(strength * m + 0.05)

    strengths = torch.linspace(0, 2, 81, dtype=F64).unsqueeze(-1).requires_grad_()
    found = fixed_point(magnetisation, torch.ones_like(strengths), (strengths,))
    found.value.sum().backward()
    assert strengths.grad is not None
    value, slope, strength = found.value.detach(), strengths.grad, strengths.detach()
    right.plot(strength, value, color=BLUE, label="m = tanh(βm + 0.05)")
    for row in range(8, 80, 12):
        middle, ends = strength[row], torch.tensor([-0.12, 0.12], dtype=F64)
        right.plot(middle + ends, value[row] + slope[row] * ends, color=RED, linewidth=2.5)
    right.plot([], [], color=RED, linewidth=2.5, label="its implicit derivative dm/dβ")
    right.set(xlabel="β", ylabel="m", title="a fixed point, and how it depends on β", ylim=(0, 1.05))
    right.legend(fontsize=8, loc="lower right")
    return figure


def trained_head(z_loss: float) -> tuple[Tensor, Tensor]:
    """Loss and mean log Z by step of a linear head of 1,000 words on fixed hidden states."""
    torch.manual_seed(0)
    hidden, target = torch.randn(512, 64), torch.randint(1000, (512,))
    weight = (0.02 * torch.randn(1000, 64)).requires_grad_()
    bias = torch.full((1000,), 1.0, requires_grad=True)
    optimiser = torch.optim.Adam([weight, bias], lr=0.01)
    losses, levels = [], []
    for _ in range(150):
        optimiser.zero_grad()
        loss, level = ops.linear_cross_entropy(
            hidden, weight, target, bias=bias, z_loss=z_loss, return_log_partition=True
        )
        loss.backward()
        optimiser.step()
        losses.append((loss - z_loss * level.square().mean()).detach())
        levels.append(level.detach().mean())
    return torch.stack(losses), torch.stack(levels)


def losses_picture() -> Figure:
    """The loss is the gap between log Z and the target's score; and what a z-loss does to log Z in training."""
    figure, (left, right) = panels(2)
    words = torch.tensor([[-1.0, 0.2], [-0.3, -0.4], [0.4, 0.5], [1.0, -0.2]], dtype=F64)
    places = torch.linspace(-3, 5, 161, dtype=F64)
    hidden = torch.stack([places, torch.ones_like(places)], -1)
    loss, level = ops.linear_cross_entropy(
        hidden, words, torch.full((161,), 3), reduction="none", return_log_partition=True
    )
    score = hidden @ words[3]
    left.plot(places, level, color="black", linewidth=2, label="log Z of four words")
    left.plot(places, score, color=BLUE, linewidth=2, label="score of the target")
    left.fill_between(places, score, score + loss, color=RED, alpha=0.25, linewidth=0, label="the loss")
    left.set(xlabel="first coordinate of the hidden state", ylabel="nats", title="loss = log Z − score of the target")
    left.legend(fontsize=8)
    for z_loss, colour in ((0.0, BLUE), (1e-2, RED)):
        losses, levels = trained_head(z_loss)
        right.plot(losses, color=colour, label=f"cross-entropy, z_loss={z_loss:g}")
        right.plot(levels, "--", color=colour, label=f"mean log Z, z_loss={z_loss:g}")
    right.set(xlabel="step", ylabel="nats", title="a head of 1,000 words in training")
    right.legend(fontsize=8)
    return figure


def probe_picture() -> Figure:
    """Entropy fractions of MiniLM's heads, and the same of its re-initialised control, from a probe of 4,096 tokens."""
    result = massieu.probe(data=massieu.Text(limit=4096), statistics=["entropy_fraction"])
    figure, axes = panels(2, height=2.9)
    for place, name, title in (
        (axes[0], "entropy_fraction", "MiniLM"),
        (axes[1], "entropy_fraction/reinitialised", "re-initialised: the control"),
    ):
        values = result.matrix(name)
        shown = place.imshow(values, cmap="viridis", vmin=0, vmax=1, aspect="auto")
        for layer, row in enumerate(values):
            for head, value in enumerate(row):
                colour = "white" if value < 0.6 else "black"
                place.text(head, layer, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour)
        place.set(title=title, xlabel="head", ylabel="layer", xticks=range(12), yticks=range(6))
    figure.colorbar(shown, ax=axes, label="entropy / log n")
    return figure


def overlap_of_theory(load: float) -> float:
    """Overlap of Hebb's network with a pattern at temperature 0 (Amit, Gutfreund and Sompolinsky 1985); 0 if there is none.

    The largest root y of erf(y) = y·(√(2·load) + 2/√π·e^(−y²)); the overlap is erf(y).
    """
    y = torch.linspace(0.05, 8, 200_000, dtype=F64)
    is_above = torch.erf(y) > y * ((2 * load) ** 0.5 + 2 / math.pi**0.5 * (-y.square()).exp())
    return float(torch.erf(y[is_above][-1])) if bool(is_above.any()) else 0.0


def all_stored(network: Callable[[Tensor], Energy], patterns: Tensor) -> int:
    """How many of the patterns, in order, a network stores with no unit of any changed: to a twentieth of the number."""
    low, high = 1, 2
    while high < len(patterns) and _stay(network, patterns[:high]):
        low, high = high, 2 * high
    while high - low > max(1, low // 20):
        middle = (low + high) // 2
        low, high = (middle, high) if _stay(network, patterns[:middle]) else (low, middle)
    return low


def _stay(network: Callable[[Tensor], Energy], patterns: Tensor) -> bool:
    return torch.equal(network(patterns).step(patterns), patterns)


def capacity_picture() -> Figure:
    """Overlaps after retrieval by the load, for two rules, beside theory; the numbers stored without error by the width."""
    generator = torch.Generator().manual_seed(0)

    def signs(count: int, width: int) -> Tensor:
        return 2 * torch.randint(0, 2, (count, width), generator=generator).to(F64) - 1

    figure, (left, right) = panels(2)
    for rule, name, colour in (("hebb", "Hebb", RED), ("pseudo_inverse", "pseudo-inverse", BLUE)):
        for flipped, style in ((0.0, "o-"), (0.1, "s--")):
            overlaps = []
            for load in CAPACITY_LOADS:
                patterns = signs(round(load * 200), 200)
                start = torch.where(torch.rand(patterns.shape, generator=generator) < flipped, -patterns, patterns)
                end = BinaryHopfieldEnergy.of_patterns(patterns, rule=rule).retrieve(start, steps=12).state
                overlaps.append((end * patterns).mean())
            label = f"{name}, {flipped:.0%} of units flipped"
            left.plot(CAPACITY_LOADS, overlaps, style, color=colour, markersize=3, linewidth=1, label=label)
    below = torch.linspace(0.005, 0.137, 60).tolist()
    left.plot(below, [overlap_of_theory(load) for load in below], color="black", linewidth=2, label="theory for Hebb")
    left.axvline(0.138, color=GREY, linewidth=0.8, linestyle=":")
    left.set(xlabel="patterns / units (200 units)", ylabel="overlap with the pattern", title="recall by the load")
    left.set_ylim(-0.15, 1.04)
    left.legend(fontsize=7, loc="lower right")
    networks: dict[str, tuple[Callable[[Tensor], Energy], Sequence[int]]] = {
        "Hebb": (BinaryHopfieldEnergy.of_patterns, (8, 16, 32, 64, 128)),
        "degree 3": (partial(DenseHopfieldEnergy.create, degree=3), (8, 12, 16, 24, 32, 48)),
        "degree 4": (partial(DenseHopfieldEnergy.create, degree=4), (8, 12, 16, 24, 32)),
        "exponential": (DenseHopfieldEnergy.create, (8, 10, 12, 14, 16, 18, 20)),
    }
    for (name, (network, widths)), colour in zip(networks.items(), (RED, GREEN, ORANGE, VIOLET), strict=True):
        stored = []
        for width in widths:
            counts = [all_stored(network, signs(4096, width)) for _ in range(CAPACITY_TRIALS)]
            stored.append(statistics.median(counts))
        right.loglog(widths, stored, "o-", color=colour, markersize=3.5, linewidth=1, label=name)
    widths = torch.linspace(8, 130, 200)
    right.loglog(widths, widths, color=BLUE, linewidth=1, label="pseudo-inverse: d")
    right.loglog(widths, widths / (4 * widths.log()), "--", color=RED, linewidth=1, label="d / (4 ln d)")
    exponential_widths = torch.linspace(8, 21, 100)
    right.loglog(exponential_widths, 2 ** (exponential_widths / 2), "--", color=VIOLET, linewidth=1, label="2^(d/2)")
    right.set(
        xlabel="units d",
        ylabel="patterns",
        title=f"stored without any error, median of {CAPACITY_TRIALS}",
        ylim=(0.8, 1e5),
    )
    right.legend(fontsize=7, loc="upper right", ncols=2)
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "ops": ops_picture,
    "nn": nn_picture,
    "energy": energy_picture,
    "capacity": capacity_picture,
    "measures": measures_picture,
    "solve": solve_picture,
    "losses": losses_picture,
    "probe": probe_picture,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PICTURES))
    parser.add_argument("--out", type=Path, default=IMAGES, metavar="DIR")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.names or PICTURES:
        path = arguments.out / f"{name}.png"
        figure = PICTURES[name]()
        figure.savefig(path, dpi=110)
        plt.close(figure)
        shrink(path)
        print(f"picture: {path}")


if __name__ == "__main__":
    main()
