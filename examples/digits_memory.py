"""A memory of digits recalls images from their upper halves, and its energy falls with every step.

60 images of scikit-learn's digits are stored; a query is one of them with its lower half erased. For a low, a middle
and a high inverse temperature, the script counts how many images come back. Where theory gives a bound, it prints the
distance of one step from the stored image and the bound 2M(N − 1) exp(−β·lead). The lead is how far the right
pattern's score exceeds all others' (B5). At low temperatures each query returns to its own image; at high ones all meet
in one point.

Run: python examples/digits_memory.py [--picture FILE]
"""

import argparse
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from torch import Tensor

from massieu.energy import HopfieldEnergy, bounds
from massieu.solve import Status

STORED, STEPS, SCALES = 60, 6, (0.5, 5.0, 50.0)


def stored_and_queries() -> tuple[Tensor, Tensor, Tensor]:
    """Images about their mean, (60, 64), the same without their lower halves, and the mean."""
    images = torch.tensor(load_digits().data[:STORED] / 16.0)
    middle = images.mean(0)
    images = images - middle
    queries = images.clone()
    queries[:, 32:] = 0.0
    return images, queries, middle


def report(memory: HopfieldEnergy, images: Tensor, queries: Tensor) -> Tensor:
    """Print what came back; return the energies along the first steps, (steps + 1, 60)."""
    path = memory.descend(queries, steps=STEPS)
    rise = path.energies.diff(dim=0).amax().item()
    end = memory.retrieve(queries)
    nearest = torch.cdist(end.state, images).argmin(-1)
    recalled = (nearest == torch.arange(STORED)) & (end.status == Status.CONVERGED)
    close = (end.state - images).norm(dim=-1) < 0.1 * images.norm(dim=-1)
    print(
        f"β = {memory.scale.item():4.1f}: {int((recalled & close).sum()):2d} of {STORED} images recalled within a tenth; "
        f"Lipschitz constant ≤ {bounds.lipschitz(memory).item():.1f}; "
        f"largest rise of the energy in a step {rise:+.1e}"
    )
    bound = bounds.retrieval_bound(memory, queries).distance.diagonal()
    error = (memory.step(queries) - images).norm(dim=-1)
    promised = bound < 2 * images.norm(dim=-1).max()  # no two patterns are further apart: else it says nothing
    if promised.any():
        worst = (error - bound)[promised].max().item()
        print(
            f"          for {int(promised.sum())} of them the bound says something: errors of one step up to "
            f"{error[promised].max():.2e}, bounds up to {bound[promised].max():.2e}; error − bound at most {worst:+.1e}"
        )
    return path.energies


def draw(
    memories: list[HopfieldEnergy], images: Tensor, queries: Tensor, middle: Tensor, energies: list[Tensor], path: Path
) -> None:
    """Queries and what the memories return, with the mean put back; below, the energies of all queries, step by step."""
    shown = range(10)
    figure = plt.figure(figsize=(9, 7), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1.9, 1))
    names = ["query", *(f"β = {memory.scale.item():g}" for memory in memories), "stored"]
    erased = torch.arange(64) >= 32
    rows = [queries.masked_fill(erased, torch.nan), *(memory.retrieve(queries).state for memory in memories), images]
    colours = plt.get_cmap("gray_r").with_extremes(bad="#cfe2f3")  # what is erased
    grid = above.subplots(len(rows), len(shown))
    for row, (name, states) in enumerate(zip(names, rows, strict=True)):
        for column in shown:
            axes = grid[row, column]
            axes.imshow((states[column] + middle).reshape(8, 8), cmap=colours, vmin=0, vmax=1)
            axes.set_xticks([])
            axes.set_yticks([])
        grid[row, 0].set_ylabel(name, rotation=0, ha="right", va="center")
    for axes, memory, levels in zip(below.subplots(1, len(memories)), memories, energies, strict=True):
        axes.plot(levels, color="#2a6f97", alpha=0.35, linewidth=1)
        axes.set_title(f"β = {memory.scale.item():g}")
        axes.set_xlabel("step")
        axes.set_ylabel("energy (nats/β)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"picture: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, default=Path("massieu-results/digits_memory.png"), metavar="FILE")
    path = parser.parse_args().picture
    images, queries, middle = stored_and_queries()
    memories = [HopfieldEnergy.create(images, scale=scale) for scale in SCALES]
    energies = [report(memory, images, queries) for memory in memories]
    draw(memories, images, queries, middle, energies, path)


if __name__ == "__main__":
    main()
