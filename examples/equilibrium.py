"""The equilibrium theorem of residual attention, and its limits, in six pictures (S13, X7, S15, N5).

Hidden states η ~ N(Σ⁻¹μ, Σ⁻¹) with keys Ση keep their law under a layer η + γ∇A(η) followed by a renormalisation of the
whole population to its own mean and covariance. What the theorem says, and what it does not:

(a) without the renormalisation the population spreads, by the entropy that the closed form gives; finitely many particles fall
    behind as soon as each would need more keys than there are;
(b) with it nothing moves at all; where covariances do not commute, the law returns and its particles turn;
(c) holding one number, the trace, ends in one direction;
(d) what is not Gaussian grows at a rate that is known for every cumulant;
(e) a sample of keys errs as N^(−1/2), with a factor that grows like exp(½ηᵀΣη);
(f) under RMSNorm the uniform law on the sphere is the equilibrium, and its fluctuations grow until all tokens are one cluster.

Run: python examples/equilibrium.py [--picture FILE]. Seconds.
"""

import argparse
import math
import sys
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from rich.console import Console
from rich.progress import track
from torch import Tensor

from massieu import ops
from massieu.measures import Atoms, Gaussian
from massieu.papers.theory import (
    after_layer,
    cumulant_growth,
    equilibrium,
    harmonic_growth,
    key_law,
    measured_cumulant_growth,
    sample_error,
    whitened_map,
)
from massieu.population import Renormalisation, TraceRenormalisation

F64 = torch.float64
SIGMA = torch.tensor([[1.0, 0.3], [0.3, 0.5]], dtype=F64)
MU = torch.tensor([0.3, -0.2], dtype=F64)
BLUE, RED, GREY = "#2a6f97", "#c8553d", "#8a8a8a"


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def attend(points: Tensor, keys: Tensor, scale: float = 1.0) -> Tensor:
    """∇A of the keys as atoms, at every point."""
    return ops.attention(points[None, None], keys[None, None], keys[None, None], scale=scale).output[0, 0]


def entropy(covariance: Tensor) -> float:
    """Of a Gaussian, less the constant of its dimension, in nats."""
    return 0.5 * float(torch.linalg.slogdet(covariance).logabsdet)


def spread(axes: Axes, step: float = 0.2, layers: int = 6, count: int = 2000) -> None:
    """(a) The entropy of the Gaussian with the population's covariance, with and without the renormalisation."""
    start = equilibrium(MU, SIGMA)
    renormalise = Renormalisation.create(start.location, start.covariance)
    particles = renormalise(draws(count, 2))
    kinds = {"no renormalisation": (lambda x: x, lambda law: law), "renormalised": (renormalise, renormalise.gaussian)}
    for (name, (on_particles, on_laws)), colour in zip(kinds.items(), (RED, BLUE), strict=True):
        law, cloud = start, particles
        exact, found = [0.0], [0.0]
        for _ in range(layers):
            law = on_laws(after_layer(law, key_law(law, SIGMA), step))
            cloud = on_particles(cloud + step * attend(cloud, cloud @ SIGMA))
            exact.append(entropy(law.fisher(torch.zeros(2, dtype=F64))) - entropy(start.covariance))
            found.append(entropy(torch.cov(cloud.T, correction=0)) - entropy(start.covariance))
        print(f"(a) {name}: entropy after {layers} layers {exact[-1]:+.3f} nats, of {count} particles {found[-1]:+.3f}")
        axes.plot(exact, color=colour, label=f"{name}, the law")
        axes.plot(found, "o", color=colour, mfc="white", label=f"{name}, {count} particles")
    axes.set(title="(a) the cloud spreads unless it is renormalised", xlabel="layer", ylabel="entropy gained (nats)")
    axes.legend()


def pointwise(axes: Axes, step: float = 1.0, layers: int = 8) -> None:
    """(b) Paths of single particles under layer and renormalisation."""
    still = equilibrium(torch.zeros(2, dtype=F64), SIGMA)
    turned = Gaussian.create(torch.zeros(2, dtype=F64), torch.tensor([[0.4, 0.0], [0.0, 2.0]], dtype=F64))
    for name, law, colour in (("Σ⁻¹", still, BLUE), ("that does not commute with Σ", turned, RED)):
        keys = Gaussian.create(torch.zeros(2, dtype=F64), SIGMA)
        renormalise = Renormalisation.create(law.location, law.covariance)
        cloud = renormalise(draws(400, 2, seed=2))
        paths = [cloud]
        for _ in range(layers):
            paths.append(renormalise(paths[-1] + step * keys.mean(paths[-1])))
        change = (paths[1] - paths[0]).norm(dim=-1).max()
        size = (whitened_map(law, keys, step) - torch.eye(2, dtype=F64)).norm() / math.sqrt(2)
        print(f"(b) covariance {name}: farthest move in a layer {change:.1e}; whitened map off the identity {size:.1e}")
        shown = torch.stack(paths)[:, :40]
        axes.plot(shown[..., 0], shown[..., 1], color=colour, lw=1, alpha=0.7)
        axes.plot(shown[0, :, 0], shown[0, :, 1], "o", ms=3, color=colour, label=f"covariance {name}")
    axes.set(title=f"(b) {layers} layers, renormalised: still, or turning", aspect="equal", xticks=[], yticks=[])
    axes.set(xlim=(-5.2, 5.2), ylim=(-3.6, 4.8))
    axes.legend(loc="upper center")


def collapse(axes: Axes, step: float = 0.5, layers: int = 14) -> None:
    """(c) Eigenvalues of the covariance when its trace alone is held."""
    law = Gaussian.create(torch.zeros(3, dtype=F64), torch.tensor([1.2, 1.0, 0.8], dtype=F64))
    levels = [torch.tensor([1.2, 1.0, 0.8], dtype=F64)]
    for _ in range(layers):
        law = TraceRenormalisation.create(3.0).gaussian(after_layer(law, law, step))
        levels.append(law.covariance.diagonal())
    print(f"(c) trace held, {layers} layers: eigenvalues " + ", ".join(f"{level:.4f}" for level in levels[-1]))
    axes.plot(torch.stack(levels), marker=".", color=BLUE)
    axes.set(title="(c) one number held: rank one is left", xlabel="layer", ylabel="eigenvalues of the covariance")


def growth(axes: Axes, step: float = 0.5) -> None:
    """(d) What one layer multiplies a small cumulant by."""
    variances = torch.linspace(0.05, 2, 80, dtype=F64)
    marks = (0.25, 0.5, 1.0, 1.5, 2.0)
    worst = 0.0
    for order, colour in zip((3, 4, 5), (BLUE, RED, GREY), strict=True):
        axes.plot(variances, cumulant_growth(order, step, variances), color=colour, label=f"n = {order}")
        found = torch.stack([measured_cumulant_growth(order, step, variance) for variance in marks])
        worst = max(worst, float((found / cumulant_growth(order, step, torch.tensor(marks)) - 1).abs().max()))
        axes.plot(marks, found, "o", color=colour, mfc="white")
        at_half, at_one = (float(cumulant_growth(order, step, variance)) for variance in (0.5, 1.0))
        print(f"(d) order {order}: growth {at_half:.4f} at b = ½, {at_one:.4f} at b = 1")
    print(f"(d) measured and predicted differ by {worst:.1e} at most, relative")
    axes.axhline(1, color="black", lw=0.8)
    axes.set(
        title="(d) cumulants grow: predicted, and measured (○)", xlabel="b = β · variance", ylabel="growth in a layer"
    )
    axes.set_yscale("log")
    axes.set_yticks([1, 2, 5, 10], ["1", "2", "5", "10"])
    axes.minorticks_off()
    axes.legend()


def samples(axes: Axes, repetitions: int = 60) -> None:
    """(e) Root-mean-square error of ∇A over N keys drawn from the law."""
    keys = Gaussian.create(MU, SIGMA)
    counts = [2**power for power in range(5, 14)]
    for square, colour in ((0.5, BLUE), (3.0, RED)):
        direction = torch.tensor([0.8, 0.6], dtype=F64)
        eta = direction * (square / (direction @ SIGMA @ direction)).sqrt()
        found = []
        for count in counts:
            generator = torch.Generator().manual_seed(count)
            drawn = keys.sample(torch.zeros(2, dtype=F64), (repetitions, count), generator=generator)
            apart = Atoms.create(drawn).mean(eta.expand(repetitions, 2)) - keys.mean(eta)
            found.append(float(apart.square().sum(-1).mean().sqrt()))
        predicted = [float(sample_error(keys, eta, count)) for count in counts]
        label = f"ηᵀΣη = {square:g}, e^ηᵀΣη = {math.exp(square):.1f}"
        print(f"(e) {label}: error {found[0]:.4f} of {counts[0]} keys (limit law {predicted[0]:.4f}), ", end="")
        print(f"{found[-1]:.4f} of {counts[-1]} ({predicted[-1]:.4f})")
        axes.loglog(counts, predicted, color=colour, label=label)
        axes.loglog(counts, found, "o", color=colour, mfc="white")
    axes.set(title="(e) a sample of keys errs as N^(−1/2)", xlabel="keys N", ylabel="error of ∇A (rms)")
    axes.legend()


def clustering(axes: Axes, step: float = 0.5, layers: int = 60, count: int = 1000) -> None:
    """(f) Length of the mean of tokens that start uniform on the sphere, and what the theory of small growth says."""
    start = torch.nn.functional.normalize(draws(count, 3, seed=1), dim=-1)
    for scale, colour in ((0.5, GREY), (1.0, BLUE), (4.0, RED)):
        cloud, lengths = start, [float(start.mean(0).norm())]
        for _ in range(layers):
            cloud = torch.nn.functional.normalize(cloud + step * attend(cloud, cloud, scale), dim=-1)
            lengths.append(float(cloud.mean(0).norm()))
        rate = float(harmonic_growth(1, step, scale, 3))
        first = (lengths[2] / lengths[0]) ** 0.5
        print(
            f"(f) β = {scale:g}: the mean grows by {first:.3f} a layer at first, predicted {rate:.3f}; "
            f"at last {lengths[-1]:.4f}"
        )
        axes.semilogy(lengths, color=colour, label=f"β = {scale:g}")
        early = [lengths[0] * rate**layer for layer in range(layers) if lengths[0] * rate**layer < 1]
        axes.semilogy(early, ":", color=colour)
    axes.set(title="(f) uniform on the sphere, then a cluster", xlabel="layer", ylabel="length of the tokens' mean")
    axes.legend(loc="lower right", title="dotted: predicted")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, default=Path("massieu-results/equilibrium.png"), metavar="FILE")
    path = parser.parse_args().picture
    figure, grid = plt.subplots(3, 2, figsize=(11, 13), layout="constrained")
    panels = list(zip((spread, pointwise, collapse, growth, samples, clustering), grid.flat, strict=True))
    for panel, axes in track(panels, "panels", console=Console(file=sys.stderr), transient=True):
        panel(axes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=72)
    print(f"picture: {path}")


if __name__ == "__main__":
    main()
