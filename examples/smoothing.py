"""When is softmax attention the conditional mean? On the sphere, with noise, and for Gaussian keys at finite length.

Left: keys uniform on the sphere of R³, values f(key) + noise with f of two degrees. The error of softmax at a fixed
temperature stops at a floor; at the best temperature it falls as L^(-1/3). Divided by its spectrum up to the degree of
f, softmax's error falls as L^(-1/2). A ridge regression with softmax's own kernel, which does not know the degree, has
no floor either (Z7, X9). Middle: the spectrum, what softmax leaves of each degree. Right: for Gaussian keys, the share
s of the full precision Σ⁻¹ at which L keys estimate best, for a query at the distance √d (X2).

Run: python examples/smoothing.py [--picture FILE]
"""

import argparse
import math
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from rich.console import Console
from rich.progress import track
from torch import Tensor

from massieu import ops
from massieu.papers.theory import (
    GaussianTokens,
    deconvolution,
    optimal_scale,
    smoothing_floor,
    sphere_multipliers,
    spherical_kernel,
    zonal_harmonics,
)

DIMENSION, FIXED, NOISE, DEGREE = 3, 4.0, 0.5, 2
LENGTHS = (64, 128, 256, 512, 1024, 2048)
POWER = torch.tensor([0.0, 1 / 3, 1 / 5], dtype=torch.float64)  # of P₁ + P₂ on the sphere
Estimator = Callable[[Tensor, Tensor, Tensor], Tensor]


def sphere(*shape: int, generator: torch.Generator) -> Tensor:
    vectors = torch.randn(*shape, DIMENSION, dtype=torch.float64, generator=generator)
    return vectors / vectors.norm(dim=-1, keepdim=True)


def conditional_mean(points: Tensor) -> Tensor:
    return zonal_harmonics(points[..., 0], DEGREE, DIMENSION)[..., 1:].sum(-1)


def softmax(scale: float) -> Estimator:
    def estimate(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ops.attention(
            query[None, None], key[None, None], value[None, None, :, None], scale=scale
        ).output.flatten()

    return estimate


@cache
def best_scale(length: int) -> float:
    return optimal_scale(length, POWER, NOISE**2, DIMENSION).item()


def tuned(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return softmax(best_scale(len(key)))(query, key, value)


def deconvolved(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Softmax's kernel with each degree of f divided by what softmax leaves of it, and the others dropped."""
    multipliers = sphere_multipliers(DEGREE + 4, DIMENSION, FIXED)
    kernel = spherical_kernel(query @ key.T, multipliers * deconvolution(multipliers, DEGREE), DIMENSION)
    return kernel @ value / len(key)


def ridge(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Conditional mean attention: the kernel e^{β(k·k' − 1)}, which is softmax's own, and the noise's variance as ridge."""
    gram = torch.exp(FIXED * (key @ key.T - 1)) + NOISE**2 * torch.eye(len(key), dtype=torch.float64)
    weights = torch.cholesky_solve(value[:, None], torch.linalg.cholesky(gram))
    return torch.exp(FIXED * (query @ key.T - 1)) @ weights[:, 0]


def errors(estimators: dict[str, Estimator]) -> dict[str, list[float]]:
    """Root-mean-square errors at each length, over fresh keys, values and queries."""
    generator = torch.Generator().manual_seed(0)
    squares: dict[str, list[float]] = {name: [] for name in estimators}
    for length in track(LENGTHS, "numbers of keys", console=Console(file=sys.stderr), transient=True):
        found: dict[str, list[Tensor]] = {name: [] for name in estimators}
        for _ in range(max(8, 8192 // length)):
            key, query = sphere(length, generator=generator), sphere(500, generator=generator)
            value = conditional_mean(key) + NOISE * torch.randn(length, dtype=torch.float64, generator=generator)
            for name, estimate in estimators.items():
                found[name].append((estimate(query, key, value) - conditional_mean(query)).square().mean())
        for name, parts in found.items():
            squares[name].append(torch.stack(parts).mean().sqrt().item())
    return squares


def best_shares() -> dict[int, tuple[Tensor, Tensor]]:
    """For a query at ‖z‖² = d and values equal to keys: lengths, and the best share of the precision."""
    lengths, found = torch.logspace(1, 9, 60, dtype=torch.float64), {}
    for dimension in (2, 8, 32, 128):
        origin, identity = torch.zeros(dimension, dtype=torch.float64), torch.eye(dimension, dtype=torch.float64)
        law = GaussianTokens.create(origin, origin, identity, identity, identity)
        query = torch.ones(len(lengths), dimension, dtype=torch.float64)
        found[dimension] = (lengths, law.optimal_share(query, lengths))
    return found


def draw(found: dict[str, list[float]], floor: float, shares: dict[int, tuple[Tensor, Tensor]], path: Path) -> None:
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.9), layout="constrained")
    colours = ("#c1121f", "#2a6f97", "#6a994e", "#bc6c25")
    for colour, (name, values) in zip(colours, found.items(), strict=True):
        left.loglog(LENGTHS, values, "o-", color=colour, label=name)
    left.axhline(floor, color="grey", linestyle=":", linewidth=1)
    left.annotate("floor", (LENGTHS[-1], floor), xytext=(0, -13), textcoords="offset points", color="grey", ha="right")
    left.set_xticks(LENGTHS, [str(length) for length in LENGTHS])
    left.minorticks_off()
    left.set_yticks((0.02, 0.05, 0.1, 0.2, 0.4), ("0.02", "0.05", "0.1", "0.2", "0.4"))
    left.set(xlabel="keys L", ylabel="error", title="distance from the conditional mean")
    left.legend(fontsize=8, loc="lower left")

    for shade, scale in zip((0.25, 0.5, 0.75, 1.0), (1, 4, 16, 64), strict=True):
        spectrum = sphere_multipliers(12, DIMENSION, float(scale))
        middle.plot(spectrum, "o-", markersize=3, color=plt.get_cmap("Blues")(shade), label=f"β = {scale}")
    middle.set(xlabel="degree n", ylabel="ρ_n(β)", title="what softmax leaves of degree n")
    middle.legend(fontsize=8)

    for shade, (dimension, (lengths, share)) in zip((0.3, 0.5, 0.75, 1.0), shares.items(), strict=True):
        right.semilogx(lengths, share, color=plt.get_cmap("Oranges")(shade), label=f"d = {dimension}")
    right.set(xlabel="keys L", ylabel="best share s of Σ⁻¹", title="under-precision at finite length", ylim=(0, 1.03))
    right.legend(fontsize=8, loc="center right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    print(f"picture: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, default=Path("massieu-results/smoothing.png"), metavar="FILE")
    arguments = parser.parse_args()
    floor = smoothing_floor(POWER, DIMENSION, FIXED)
    print(f"floor of softmax at β = {FIXED:g}: {floor.error:.4f}; with the best constant {floor.factor_error:.4f}")
    found = errors(
        {
            f"softmax, β = {FIXED:g}": softmax(FIXED),
            "softmax, best β": tuned,
            "deconvolved": deconvolved,
            "ridge": ridge,
        }
    )
    for name, values in found.items():
        slope = math.log(values[-1] / values[0]) / math.log(LENGTHS[-1] / LENGTHS[0])
        listed = ", ".join(f"{value:.4f}" for value in values)
        print(f"{name:>16}: errors {listed} at {LENGTHS[0]} to {LENGTHS[-1]} keys, slope {slope:.2f}")
    shares = best_shares()
    print(f"log 10⁴ = {math.log(1e4):.2f}")
    for dimension, (lengths, share) in shares.items():
        at = (lengths - 1e4).abs().argmin()
        variance = (share[at].square() * dimension).item()
        print(f"d = {dimension:>3}: best share at 10⁴ keys {share[at]:.3f}, variance of the logits {variance:.2f}")
    draw(found, floor.error.item(), shares, arguments.picture)


if __name__ == "__main__":
    main()
