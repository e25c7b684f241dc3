"""What does a model do to a cloud of tokens? MiniLM's blocks as operators on the tokens of texts.

Each of three texts (topics of the Python reference) is a population of its own: 512 tokens in 384 dimensions, which a `Flow`
takes through the six blocks. Printed and drawn are

- observables by block, compared with the same number of independent Gaussian tokens, never with 0;
- how near what attention adds to tokens is to its Gaussian closure, attention over the Gaussian law of the same mean and
  covariance (S20); and the variance of the scores over keys, whose exponential is how many keys such a law needs (S15);
- whether the score matrix, summed over heads, is the precision of what attention reads (S11): a cosine, and the same for
  the matrix turned at random.

Run: python examples/model_flow.py [--picture FILE] [--texts N]. Twenty seconds on one core.
"""

import argparse
import dataclasses
import itertools
import sys
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from rich.console import Console
from rich.progress import track
from torch import Tensor

import massieu
from massieu.energy.activations import Identity
from massieu.measures import Gaussian
from massieu.population import AttentionLayer, CloudMoments, CloudShape, Composition, Flow, precision_alignment
from massieu.population.alignment import AlignmentResult
from massieu.population.flow_result import FlowResult
from massieu.probing.data.documents import reference_documents
from massieu.probing.model.model import LoadedModel, load_model

TOKENS, DRAWS = 512, 19
SOFTENING = 0.01
"""Of the covariances, in mean variances: LayerNorm leaves one direction without any."""
PANELS = {
    "length_of_mean": "‖mean‖ / root mean square length",
    "effective_rank": "effective rank",
    "gaussian_distance": "sliced W₂ to a Gaussian",
    "fourth_cumulant": "excess kurtosis, rms over directions",
}
BLUE, GREY = "#0072b2", "0.4"


def model_states(loaded: LoadedModel, count: int) -> list[list[Tensor]]:
    """The tokens (512, 384) before the first block and after each, of as many texts that are long enough."""
    encoded = (
        loaded.tokenizer(document.text, truncation=True, max_length=TOKENS, return_tensors="pt")
        for document in reference_documents()
    )
    long = itertools.islice((each for each in encoded if each["input_ids"].shape[1] == TOKENS), count)
    with torch.no_grad():
        states = [loaded.module(**each, output_hidden_states=True).hidden_states for each in long]
    return [[state[0] for state in each] for each in states]


def observe(blocks: Composition, texts: list[list[Tensor]]) -> list[FlowResult]:
    """A flow of each text, which ends where the model does."""
    flow = Flow(blocks.operators, observables=[CloudMoments(), CloudShape()])
    found = [flow.run(states[0], progress=False) for states in texts]
    ends = [(each.particles, states[-1]) for each, states in zip(found, texts, strict=True)]
    off = max(((end - own).norm() / own.norm()).item() for end, own in ends)
    print(f"the flows end at the model's own last states, up to {off:.1e}")
    for name in ("effective_rank", "gaussian_distance", "fourth_cumulant"):
        values, nulls = torch.stack([each.values(name) for each in found]).mean(0), found[0].nulls(name)
        null = "" if bool(nulls.isnan().all()) else f"; of Gaussian tokens {nulls[0]:.3f}"
        print(f"{name}: {' '.join(f'{value:.3f}' for value in values)}{null}")
    share = torch.stack([each.values("length_of_mean") / each.values("length") for each in found]).mean(0)
    print(f"length_of_mean: {' '.join(f'{value:.3f}' for value in share)} of the root mean square length")
    return found


def attention_layers(blocks: Composition) -> list[AttentionLayer]:
    """Of each block."""
    inside = (part for block in blocks.operators if isinstance(block, Composition) for part in block.operators)
    return [part for part in inside if isinstance(part, AttentionLayer)]


def closure(attention: AttentionLayer, tokens: Tensor) -> tuple[float, float, float]:
    """Of the outputs over tokens and over their Gaussian law: correlation and ratio of sizes; the median variance of scores.

    Both without their means over the tokens, which are most of what is added and no question of the law's shape.
    """
    added = dataclasses.replace(attention, residual=False, activation=Identity())
    law = Gaussian.create(tokens.mean(0), tokens.T.cov(correction=0))
    with torch.no_grad():
        output = added(tokens)
        of_law = dataclasses.replace(added, population=law)(tokens)
        queries = tokens @ attention.query_weight.mT + attention.query_bias.unsqueeze(-2)
        scores = attention.scale[:, None, None] * queries @ (tokens @ attention.key_weight.mT).mT
    one, other = (each - each.mean(0) for each in (output, of_law))
    correlation = (one * other).sum() / (one.norm() * other.norm())
    return correlation.item(), (other.norm() / one.norm()).item(), scores.var(-1, correction=0).median().item()


def alignment(attention: AttentionLayer, texts: list[Tensor]) -> AlignmentResult:
    """Of all heads' scores with the precision of the tokens that they read, within texts."""
    covariance = torch.stack([tokens.T.cov().double() for tokens in texts]).mean(0)
    covariance = covariance + SOFTENING * covariance.diagonal().mean() * torch.eye(len(covariance))
    score = (attention.query_weight.mT @ attention.key_weight).sum(0)
    return precision_alignment(score, covariance, draws=DRAWS, generator=torch.Generator().manual_seed(0))


def draw_flows(grid: list[Axes], found: list[FlowResult]) -> None:
    """A panel for each observable, a line for each text."""
    for axes, (panel, title) in zip(grid, PANELS.items(), strict=True):
        for result in found:
            values = result.values(panel)
            if panel == "length_of_mean":
                values = values / result.values("length")
            axes.plot(values, color=BLUE, alpha=0.6, lw=1.2)
        null = found[0].nulls(panel)
        if not bool(null.isnan().any()):
            axes.plot(null, color=GREY, ls="--", label=f"{TOKENS} Gaussian tokens")
            axes.legend(fontsize=8)
        axes.set_ylim(bottom=0)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("blocks")


def draw_attention(gaussian: Axes, aligned: Axes, shares: Tensor, fits: list[AlignmentResult]) -> None:
    """How near closures are by block and text, and cosines by block."""
    places = torch.arange(1, len(shares) + 1)
    gaussian.axhline(0, color=GREY, lw=0.8)
    gaussian.plot(places, shares[..., 0], color=BLUE, marker="o", ms=3, lw=1, alpha=0.6)
    gaussian.set_title("attention and its Gaussian closure, correlation", fontsize=10)
    nulls = torch.stack([each.null for each in fits])
    dots = aligned.plot(places, nulls, color=GREY, marker="o", ms=2, lw=0, alpha=0.5)
    (own,) = aligned.plot(places, [each.cosine for each in fits], color=BLUE, marker="o", lw=0)
    aligned.legend([own, dots[0]], ["scores of all heads", "turned at random"], fontsize=8)
    aligned.axhline(0, color=GREY, lw=0.8)
    aligned.set_title("cosine of scores with the precision of tokens", fontsize=10)
    for axes in (gaussian, aligned):
        axes.set_xlabel("block")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, default=Path("massieu-results/model_flow.png"), metavar="FILE")
    parser.add_argument("--texts", type=int, default=3)
    options = parser.parse_args()
    loaded = load_model()
    blocks = massieu.population_layers(loaded.module)
    texts = model_states(loaded, options.texts)
    found = observe(blocks, texts)

    shares, fits = [], []
    layers = list(zip(attention_layers(blocks), *texts, strict=False))
    shown = track(layers, "blocks", console=Console(file=sys.stderr), transient=True)
    for number, (attention, *states) in enumerate(shown, 1):
        shares.append(torch.tensor([closure(attention, tokens) for tokens in states]))
        fits.append(alignment(attention, states))
        correlation, size, variance = shares[-1].mean(0).tolist()
        print(
            f"block {number}: Gaussian closure correlates {correlation:.3f} with attention's output, {size:.2f} of its size; "
            f"variance of scores {variance:.2f}; cosine with the precision {fits[-1].cosine:+.3f}, turned at random "
            f"{fits[-1].null.min():+.3f} … {fits[-1].null.max():+.3f}"
        )

    figure, grid = plt.subplots(2, 3, figsize=(13, 6.6), layout="constrained")
    draw_flows(list(grid.flat)[:4], found)
    draw_attention(grid[1, 1], grid[1, 2], torch.stack(shares), fits)
    figure.suptitle(f"MiniLM: {len(texts)} texts of {TOKENS} tokens", fontsize=11)
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.picture, dpi=80)
    print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
