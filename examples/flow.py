"""A flow of tokens through three kinds of attention, layer by layer, and what is observed of them.

Random tokens, uniform on a sphere, are moved by the same number of layers of tied self-attention with a residual connection:

- residual attention alone, x ← x + γ attention(x);
- the same with each token put back on the sphere;
- doubly stochastic attention in its place (N8), and back on the sphere.

Attention alone expands the cloud and sharpens: the population's entropy rises, that of attention falls (S12, trap 17). On the
sphere the tokens draw together, into one cluster in the end, but groups stay apart for long (N5), and they are far from
Gaussian. Doubly stochastic weights pull without a preference for where most tokens are, and it takes longer. Without residual
and sphere they keep the mean to rounding, which is printed beside what softmax attention makes of it.

Run: python examples/flow.py [--picture FILE] [--page FILE] [--layers N]. Half a minute.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from torch import Tensor

from massieu import ops, report
from massieu.energy.activations import RMSNorm
from massieu.population import CloudMoments, CloudShape, Clusters, DoublyStochasticLayer, Flow, SelfAttention
from massieu.population.flow_result import FlowResult

TOKENS, WIDTH, SCALE, STEP = 300, 16, 0.5, 1.0
PANELS = {
    "length_of_mean": "length of the mean, of √d",
    "effective_rank": "effective rank",
    "log_determinant": "log-determinant, nats per direction",
    "attention_entropy": "entropy of attention, nats",
    "fourth_cumulant": "fourth cumulant, rms",
    "gaussian_distance": "sliced W₂ to a Gaussian",
    "clusters": "clusters",
}
COLOURS = ("#0072b2", "#c04a00", "#00795a")


def sphere(tokens: Tensor) -> Tensor:
    """Each token at the length √d."""
    return WIDTH**0.5 * torch.nn.functional.normalize(tokens, dim=-1)


def attention(tokens: Tensor) -> Tensor:
    """Self-attention with queries, keys and values tied."""
    heads = tokens[None, None]
    return ops.attention(heads, heads, heads, scale=SCALE).output[0, 0]


def kinds() -> dict[str, Callable[[Tensor], Tensor]]:
    return {
        "attention": lambda tokens: tokens + STEP * attention(tokens),
        "attention, sphere": lambda tokens: sphere(tokens + STEP * attention(tokens)),
        "doubly stochastic, sphere": DoublyStochasticLayer.create(
            scale=SCALE, step_size=STEP, residual=True, activation=RMSNorm.create(eps=0.0)
        ),
    }


def observe(layers: int) -> dict[str, FlowResult]:
    generator = torch.Generator().manual_seed(0)
    start = sphere(torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=generator))
    observables = [CloudMoments(), CloudShape(), Clusters(limit=TOKENS), SelfAttention(SCALE)]
    found = {name: Flow(layer, depth=layers, observables=observables).run(start) for name, layer in kinds().items()}
    for name, result in found.items():
        ends = {panel: result.values(panel)[-1].item() for panel in PANELS}
        print(
            f"{name}: log-determinant {ends['log_determinant']:+.3f} nats, effective rank {ends['effective_rank']:.2f}, "
            f"entropy of attention {ends['attention_entropy']:.3f} nats, clusters {ends['clusters']:.0f}"
        )
    mean = start.mean(0)
    drift = (DoublyStochasticLayer.create(scale=SCALE)(start).mean(0) - mean).norm()
    print(
        f"mean moved by softmax attention {(attention(start).mean(0) - mean).norm():.2e}, by doubly stochastic {drift:.1e}"
    )
    return found


def draw(found: dict[str, FlowResult], path: Path) -> None:
    """A panel for each observable with all flows, and one for the spectra."""
    figure, grid = plt.subplots(2, 4, figsize=(15, 6.4), layout="constrained")
    for axes, (panel, title) in zip(grid.flat, PANELS.items(), strict=False):
        for (name, result), colour in zip(found.items(), COLOURS, strict=True):
            values = result.values(panel) / (WIDTH**0.5 if panel == "length_of_mean" else 1)
            axes.plot(values, color=colour, label=name)
        null = next(iter(found.values())).nulls(panel)
        if bool(null.isfinite().all()):
            axes.plot(null, color="0.4", linestyle="--")
            axes.text(
                0.98, 0.2, "dashed: Gaussian tokens", transform=axes.transAxes, ha="right", fontsize=8, color="0.3"
            )
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("layer")
    # Attention alone grows without bound; the others are told apart within these limits.
    grid.flat[0].set_ylim(0, 1.05)
    grid.flat[1].legend(fontsize=8, loc="upper right", bbox_to_anchor=(1, 0.93))
    grid.flat[2].set_ylim(-8, 8)
    axes = grid.flat[len(PANELS)]
    for (name, result), colour in zip(found.items(), COLOURS, strict=True):
        spectrum = result.values("covariance_spectrum")
        layers = range(len(spectrum))
        axes.fill_between(layers, spectrum[:, -1], spectrum[:, 0], color=colour, alpha=0.2, linewidth=0)
        axes.plot(spectrum.median(-1).values, color=colour, label=name)
    axes.set(yscale="log", xlabel="layer", ylim=(1e-5, 1e3))
    axes.set_title("eigenvalues of the covariance", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    print(f"picture: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, default=Path("massieu-results/flow.png"), metavar="FILE")
    parser.add_argument("--page", type=Path, help="the small multiples of the second flow, as a page", metavar="FILE")
    parser.add_argument("--layers", type=int, default=40)
    options = parser.parse_args()
    found = observe(options.layers)
    draw(found, options.picture)
    if options.page is not None:
        drawing = report.draw_flow(found["attention, sphere"], title="Self-attention on a sphere")
        print(f"page: {drawing.save(options.page)}")


if __name__ == "__main__":
    main()
