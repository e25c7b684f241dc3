"""Tokens as particles: a cloud and its Gaussian law, collapse without skip connection, and a trained model's blocks.

A cloud of particles goes through layers of attention beside the Gaussian law that infinitely many of them have (S20). Then
tokens without skip connection, whose diameter falls at least as fast as the bound says (S12, N12), and with it. Then
MiniLM's blocks as operators on the tokens of a text: all of them, and attention alone.

Run: python examples/tokens_as_particles.py [--picture FILE] [--particles N]. Half a minute.
"""

import argparse
import dataclasses
import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from rich.console import Console
from rich.progress import track
from torch import Tensor

import massieu
from massieu.measures import Gaussian
from massieu.population import AttentionLayer, Composition
from massieu.probing.model.model import load_model

LAYERS, DEEP = 8, 4
TEXT = (
    "Attention averages: a token moves towards what it attends to, and a layer moves all of them at once. "
    "Whether a cloud of tokens spreads or collapses is decided by what stands beside attention in a block."
)


def cloud(axes: Axes, count: int) -> None:
    """Particles and the ellipses of their law, before and behind the layers."""
    generator = torch.Generator().manual_seed(0)
    mean, root = torch.tensor([1.0, 0.3]).double(), torch.tensor([[0.5, 0.0], [0.2, 0.3]]).double()
    score = torch.tensor([[0.5, 0.4], [-0.4, 0.3]]).double()
    write = torch.tensor([[0.2, -1.0], [1.0, 0.2]]).double()
    layer = AttentionLayer.from_score(score, write, step_size=0.25)
    particles = mean + torch.randn(count, 2, generator=generator).double() @ root.T
    law = Gaussian.create(mean, factor=root)
    states, laws = [particles, *Composition.repeat(layer, LAYERS).path(particles)], [law]
    for _ in range(LAYERS):
        laws.append(layer.gaussian(laws[-1]))
    for index, colour in ((0, "tab:gray"), (LAYERS // 2, "tab:orange"), (LAYERS, "tab:blue")):
        axes.scatter(*states[index][:400].T, s=4, alpha=0.35, color=colour, linewidths=0)
        axes.plot(*ellipse(laws[index]).T, color=colour, label=f"after {index} layers" if index else "at first")
    axes.plot(
        *torch.stack([each.location for each in laws]).T,
        color="black",
        lw=0.8,
        marker=".",
        ms=3,
        label="mean of the law",
    )
    axes.set(title=f"{min(count, 400)} of {count:,} particles, and their law (2σ)", aspect="equal")
    axes.legend(fontsize=8)
    last, spread = laws[-1], covariance(laws[-1])
    off = (states[-1].mean(0) - last.location).norm() / spread.trace().sqrt()
    differs = (states[-1].T.cov(correction=0) - spread).norm() / spread.norm()
    print(
        f"{count} particles after {LAYERS} layers: mean off by {off:.4f}, covariance by {differs:.4f} of the law's size "
        f"(1/√N = {count**-0.5:.4f})"
    )


def covariance(law: Gaussian) -> Tensor:
    return law.fisher(torch.zeros_like(law.location))


def ellipse(law: Gaussian) -> Tensor:
    angle = torch.linspace(0, 2 * math.pi, 100).double()
    circle = torch.stack([angle.cos(), angle.sin()], -1)
    return law.location + 2 * circle @ torch.linalg.cholesky(covariance(law)).T


def collapse(axes: Axes) -> None:
    """Diameters by layer, beside Dobrushin's bound."""
    scale, same = 0.25, torch.eye(4).double()
    tokens = torch.randn(16, 4, generator=torch.Generator().manual_seed(0)).double()
    plain, skip = (AttentionLayer.from_score(same, same, scale=scale, residual=each) for each in (False, True))
    bare = [tokens, *Composition.repeat(plain, DEEP).path(tokens)]
    skipping = [tokens, *Composition.repeat(skip, DEEP).path(tokens)]
    bounds = [diameter(tokens)]
    for index, (before, after) in enumerate(itertools.pairwise(bare), 1):
        share = -math.expm1(-2 * scale * before.norm(dim=-1).max().item() ** 2)
        bounds.append(share * diameter(before))
        print(
            f"layer {index}: diameter {diameter(after) / diameter(before):.4g} of the last one's, at most {share:.4g}"
        )
    depth = range(DEEP + 1)
    axes.semilogy(depth, [diameter(state) for state in skipping], marker="o", label="with skip connection")
    axes.semilogy(depth, bounds, ls="--", color="black", marker="_", label="bound from the layer before")
    axes.semilogy(depth, [diameter(state) for state in bare], marker="o", label="without")
    axes.set(title="16 tokens under attention", xlabel="layers", ylabel="diameter")
    axes.legend(fontsize=8)


def diameter(state: Tensor) -> float:
    return torch.cdist(state, state).max().item()


def blocks(axes: Axes) -> None:
    """How far the tokens of a text are from one token, by MiniLM's blocks and by parts of them."""
    loaded = load_model()
    whole = massieu.population_layers(loaded.module)
    attention = [block.operators[0] for block in whole.operators]  # each with the norm behind it
    bare = [dataclasses.replace(each, residual=False) for each in attention]
    with torch.no_grad():
        given = loaded.tokenizer([TEXT], return_tensors="pt")
        tokens = loaded.module(**given, output_hidden_states=True).hidden_states[0]
        for name, layers in (
            ("whole blocks", whole),
            ("attention alone", Composition.create(attention)),
            ("attention alone, no skip", Composition.create(bare)),
        ):
            states = [tokens, *layers.path(tokens)]
            shares = [((state - state.mean(-2, keepdim=True)).norm() / state.norm()).item() for state in states]
            print(f"{name}: shares that are not of rank one {' '.join(f'{share:.2g}' for share in shares)}")
            axes.semilogy(range(len(shares)), shares, marker="o", label=name)
    axes.set(title=f"MiniLM, {tokens.shape[1]} tokens of a text", xlabel="blocks", ylabel="‖X − 1x̄ᵀ‖ / ‖X‖")
    axes.legend(fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path("massieu-results/tokens_as_particles.png")
    parser.add_argument("--picture", type=Path, default=default, metavar="FILE")
    parser.add_argument("--particles", type=int, default=4000)
    given = parser.parse_args()
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.2), constrained_layout=True)
    panels: list[Callable[[], None]] = [
        lambda: cloud(axes[0], given.particles),
        lambda: collapse(axes[1]),
        lambda: blocks(axes[2]),
    ]
    for panel in track(panels, "panels", console=Console(file=sys.stderr), transient=True):
        panel()
    given.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(given.picture, dpi=90)
    print(f"picture: {given.picture}")


if __name__ == "__main__":
    main()
