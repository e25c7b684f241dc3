"""One log-partition, three readings: the same ten patterns as attention, as a Hopfield memory and as hidden units.

The patterns are the mean images of the ten digits; the query is a digit with its lower half erased. With A the
log-partition of the patterns as atoms, A(eta) = log Σ exp(x_n·eta), and β an inverse temperature:

- attention with the patterns as keys and values returns ∇A(β query), and its log-partition is A(β query);
- a Hopfield memory has the energy ½‖x‖² − A(βx)/β + constants, and one step of its descent is ∇A(βx);
- a Boltzmann machine with one hidden unit of ten states and Gaussian visible units of variance 1/β has A (less log 10,
  for its states are a probability) in its effective energy; the probability of a state is an attention weight, and the
  mean of the visible units, after one round of hidden and visible, is ∇A(βx).

These agree to rounding. Two similar models give different answers, and the picture shows by how much: ten independent
binary hidden units, which do not compete for the query (A is a sum of softplus there), and the mixture of equally weighted
Gaussians at the patterns, which drops the weights exp(½β‖x_n‖²) that attention implies. The computation is about the mean
of all images; the picture has the mean put back.

Run: python examples/one_log_partition.py [--picture FILE]
"""

import argparse
import math
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from sklearn.datasets import load_digits
from torch import Tensor

from massieu import ops
from massieu.energy import HopfieldEnergy
from massieu.measures import Bernoulli, Categorical, affine

SCALE = 5.0


def patterns_and_query() -> tuple[Tensor, Tensor, Tensor]:
    """The mean image of each digit, (10, 64), and one image without its lower half, (64,), both about the mean; the mean."""
    digits = load_digits()
    images = torch.tensor(digits.data / 16.0)
    middle = images.mean(0)
    images = images - middle
    labels = torch.tensor(digits.target)
    patterns = torch.stack([images[labels == digit].mean(0) for digit in range(10)])
    query = images[labels == 3][0].clone()
    query[32:] = 0.0
    return patterns, query, middle


def readings(patterns: Tensor, query: Tensor) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """For each reading: the weights of the patterns (10,), the image that is returned (64,), and A."""
    eta = SCALE * query
    found = {}

    keys, queries = patterns[None, None], query[None, None, None]
    output, log_z = ops.attention(queries, keys, keys, scale=SCALE)
    weights = ops.attention(queries, keys, torch.eye(10, dtype=keys.dtype)[None, None], scale=SCALE).output
    found["attention"] = weights.flatten(), output.flatten(), log_z.squeeze()

    memory = HopfieldEnergy.create(patterns, scale=SCALE)
    constants = math.log(10) / SCALE + 0.5 * patterns.square().sum(-1).max()
    step = memory.step(query)
    # The step says nothing of weights; they are what makes it of the patterns, with sum 1.
    ones = torch.ones(10, 1, dtype=patterns.dtype)
    system, sums = torch.cat([patterns, ones], -1).mT, torch.cat([step, ones[0]])
    weights = torch.linalg.lstsq(system, sums.unsqueeze(-1), driver="gelsd").solution.flatten()
    found["one Hopfield step"] = weights, step, SCALE * (0.5 * query.square().sum() + constants - memory(query))

    state = Categorical.create(logits=torch.zeros(10, dtype=patterns.dtype))
    hidden = affine(state, patterns.mT)  # its log-partition is the state's, of the patterns' scores
    chances = state.mean(patterns @ eta)
    found["one hidden unit\nof ten states"] = chances, chances @ patterns, hidden.log_partition(eta) + math.log(10)

    units = Bernoulli.create(torch.full((10,), 0.5, dtype=patterns.dtype))
    chances = units.mean(patterns @ eta)
    found["ten binary\nhidden units"] = chances, chances @ patterns, affine(units, patterns.mT).log_partition(eta)

    squared_distance = (query - patterns).square().sum(-1)
    log_density = torch.logsumexp(-0.5 * SCALE * squared_distance, -1)
    weights = torch.softmax(-0.5 * SCALE * squared_distance, -1)
    found["Gaussians of\nequal weight"] = weights, weights @ patterns, log_density + 0.5 * SCALE * query.square().sum()
    return found


def draw(
    patterns: Tensor, query: Tensor, middle: Tensor, found: dict[str, tuple[Tensor, Tensor, Tensor]], path: Path
) -> None:
    """Patterns above; below, one column a reading: its weights of the patterns, and the image that it returns."""
    figure = plt.figure(figsize=(9.5, 6.2), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1, 2.8))
    images = above.subplots(1, 11)
    erased = torch.arange(64) >= 32
    show(images[0], (query + middle).masked_fill(erased, torch.nan), "query")
    for digit, (axes, pattern) in enumerate(zip(images[1:], patterns, strict=True)):
        show(axes, pattern + middle, str(digit))
    above.suptitle("The query, its lower half erased, and ten patterns")
    rows = below.subplots(2, len(found), height_ratios=(1.3, 1), sharey="row")
    for column, (name, (weights, output, log_z)) in enumerate(found.items()):
        rows[0, column].bar(range(10), weights, color="#2a6f97" if column < 3 else "#c8553d")
        rows[0, column].set_title(f"{name}\nA = {log_z:.4f} nats", fontsize=10)
        rows[0, column].set_xticks(range(10))
        rows[0, column].set_xlabel("pattern")
        show(rows[1, column], output + middle, "")
    rows[0, 0].set_ylabel("weight of the pattern")
    rows[1, 0].set_ylabel("what is returned")
    below.suptitle("Equal where theory says equal (blue), and two similar models that differ (red)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"picture: {path}")


def show(axes: Axes, image: Tensor, title: str) -> None:
    colours = plt.get_cmap("gray_r").with_extremes(bad="#cfe2f3")  # what is erased
    axes.imshow(image.reshape(8, 8), cmap=colours, vmin=0, vmax=1)
    axes.set_title(title, fontsize=10)
    axes.set_xticks([])
    axes.set_yticks([])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, default=Path("massieu-results/one_log_partition.png"), metavar="FILE")
    path = parser.parse_args().picture
    patterns, query, middle = patterns_and_query()
    found = readings(patterns, query)
    _, image, level = found["attention"]
    for name, (_, output, log_z) in found.items():
        difference = (output - image).abs().max()
        print(
            f"{name.replace(chr(10), ' '):>32}: A = {log_z:9.6f}, {log_z - level:+.1e}; image off by {difference:.1e}"
        )
    draw(patterns, query, middle, found, path)


if __name__ == "__main__":
    main()
