"""Posterior means that are attention, in six pictures, and the words of Python's own help as a test on text.

Gaussian, Bernoulli and Poisson tokens: the posterior mean, which is attention with a sink, and its standard deviation,
which needs the count that averages lose (Z3). The error of uniform attention without the sink, O(1/L). The share of a
sink beside κ₀/(κ₀ + Z) (X4). The regret of averaging concepts beside log|𝒵| (Z11). A hidden Markov chain, filtered.

Then bags of words: pieces of `pydoc_data.topics`, the 600 commonest words and one for all others. After L words of a held-out
piece, how likely are the words that follow? By a Dirichlet law, which is attention with a sink, and by a mixture of
topics, both fitted to other documents; and by uniform attention over the words seen, which gives unseen words nothing, mixed
with a constant share of the words' overall law: a tuned share, and one of a hundredth.

Run: python examples/posterior_attention.py [--picture FILE]
"""

import argparse
import itertools
import math
import re
import sys
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics

import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from rich.console import Console
from rich.progress import track
from torch import Tensor

from massieu import ops
from massieu.measures import Bernoulli, Poisson
from massieu.posteriors import (
    DirichletMultinomial,
    DiscreteLatent,
    ExponentialFamily,
    GaussianMean,
    HiddenMarkov,
    averaging_regret,
)

SEED, LENGTHS = 0, [2**power for power in range(11)]
BLUE, ORANGE, GREEN, GREY = "#2a6f97", "#d1691f", "#4f8a3d", "#888888"


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def families(axes: Axes, generator: torch.Generator) -> None:
    """Posterior means ± one standard deviation along three sequences."""
    normal = torch.randn(256, 1, dtype=torch.float64, generator=generator)
    coins = (torch.rand(256, 1, dtype=torch.float64, generator=generator) < 0.3).double()
    counts = torch.poisson(number(2.2).expand(256, 1), generator=generator)
    gaussian = GaussianMean.create(number(0.0).reshape(1), number(4.0), number(1.0))
    bernoulli = ExponentialFamily.create(Bernoulli.create(number(0.5).reshape(1)), number(2.0).reshape(1), number(4.0))
    poisson = ExponentialFamily.create(Poisson.create(number(1.0).reshape(1)), number(2.0).reshape(1), number(4.0))
    rows = (
        ("Poisson", poisson, counts, 2.2, GREEN, lambda mean, count: mean / count),
        ("Gaussian", gaussian, 1.2 + normal, 1.2, BLUE, lambda mean, count: 1 / count),
        ("Bernoulli", bernoulli, coins, 0.3, ORANGE, lambda mean, count: mean * (1 - mean) / (count + 1)),
    )
    lengths = range(1, 257)
    for name, prior, tokens, truth, colour, variance in rows:
        # Both numbers from attention alone: its output, and its log-partition.
        attended = [prior.as_attention(tokens[:length]).attend() for length in lengths]
        mean = torch.stack([found.output[0] for found in attended])
        count = torch.stack([found.log_partition.exp() for found in attended])
        spread = variance(mean, count).sqrt()
        axes.axhline(truth, color=colour, linewidth=0.8, linestyle=":")
        axes.plot(lengths, mean, color=colour, label=name)
        axes.fill_between(lengths, mean - spread, mean + spread, color=colour, alpha=0.2, linewidth=0)
        print(f"{name:>9}: truth {truth}, after 256 tokens {mean[-1]:.3f} ± {spread[-1]:.3f}, count {count[-1]:.6g}")
    axes.set_xscale("log", base=2)
    axes.set_ylim(-0.7, 3.6)
    axes.set(title="posterior mean ± deviation", xlabel="tokens L")
    axes.legend(frameon=False, fontsize=8, loc="upper right", ncols=3, handlelength=1, columnspacing=0.8)


def without_prior(axes: Axes, generator: torch.Generator) -> None:
    """Uniform attention against the posterior mean, and the posterior mean against z."""
    prior = GaussianMean.create(number(0.0).reshape(1), number(1.0), number(1.0))
    latent = torch.randn(2000, 1, 1, dtype=torch.float64, generator=generator)
    errors, statistical = [], []
    for length in LENGTHS:
        tokens = latent + torch.randn(2000, length, 1, dtype=torch.float64, generator=generator)
        mean = prior.posterior(tokens).mean
        errors.append((tokens.mean(1) - mean).square().mean().sqrt())
        statistical.append((mean - latent[:, 0]).square().mean().sqrt())
    slope = (errors[-1] / errors[4]).log() / math.log(LENGTHS[-1] / LENGTHS[4])
    print(f"uniform attention without the sink: error {errors[4]:.4f} at L = 16, slope {slope:.2f}")
    axes.loglog(LENGTHS, statistical, "o-", color=GREY, markersize=3, label="posterior − z")
    axes.loglog(LENGTHS, errors, "o-", color=BLUE, markersize=3, label="uniform attention − posterior")
    axes.loglog(LENGTHS, [1 / length for length in LENGTHS], ":", color="black", label="1/L")
    axes.set(title="what the sink does", xlabel="tokens L", ylabel="root mean square", ylim=(1e-4, 2))
    axes.legend(frameon=False, fontsize=8)


def sink(axes: Axes, generator: torch.Generator) -> None:
    """The share of sinks of three strengths, over keys of random scores of deviation ½, in the mean of 100 contexts."""
    query = torch.full((100, 1, 1, 4), 0.25, dtype=torch.float64)
    key = torch.randn(100, 1, LENGTHS[-1], 4, dtype=torch.float64, generator=generator)
    size = math.exp(0.125)  # E exp(score)
    nothing = torch.zeros(4, dtype=torch.float64)
    for strength, colour in ((1.0, GREEN), (16.0, ORANGE), (256.0, BLUE)):
        logit = number(strength).log()
        shares = []
        for length in LENGTHS:
            seen = key[:, :, :length]
            found = ops.attention(query, seen, seen, sink=logit, sink_value=nothing, scale=1.0)
            shares.append((logit - found.log_partition).exp().mean())
        expected = [strength / (strength + size * length) for length in LENGTHS]
        off = max(abs(share / value - 1) for share, value in zip(shares, expected, strict=True))
        print(
            f"sink of κ₀ = {strength:g}: share {shares[-1]:.2e} of {LENGTHS[-1]} tokens, off κ₀/(κ₀ + L·E eˢ) by {off:.3f}"
        )
        axes.loglog(LENGTHS, shares, "o", color=colour, markersize=3.5, label=f"κ₀ = {strength:g}")
        axes.loglog(LENGTHS, expected, color=colour, linewidth=1)
    axes.set(title="share of a sink; lines κ₀/(κ₀ + L·E eˢ)", xlabel="tokens L")
    axes.legend(frameon=False, fontsize=8)


def regret(axes: Axes, generator: torch.Generator) -> None:
    """Of averaging 8 concepts, along a sequence of each of them."""
    table = (0.7 * torch.randn(8, 6, dtype=torch.float64, generator=generator)).log_softmax(-1)
    prior = torch.zeros(8, dtype=torch.float64)
    tokens = torch.stack([torch.multinomial(table[k].exp(), 200, True, generator=generator) for k in range(8)])
    law, predictives = DiscreteLatent.create(prior.expand(8, -1), table), []
    for token in tokens.unbind(1):
        predictives.append(law.log_predictive(token))
        law = law.posterior(token.unsqueeze(-1))
    found = averaging_regret(torch.stack(predictives, -1), table[:, tokens].movedim(0, -1), prior)
    steps = range(1, 201)
    axes.plot(steps, (found.loss - found.best).T, color=BLUE, linewidth=0.8, alpha=0.7)
    axes.axhline(math.log(8), color="black", linestyle=":")
    axes.text(1, math.log(8) + 0.04, "log 8", ha="left", va="bottom")
    axes.set(title="regret of averaging 8 concepts", xlabel="tokens", ylabel="nats", ylim=(0, 2.4), xscale="log")
    print(f"regret: at most {(found.loss - found.best).max():.3f}, bound {math.log(8):.3f}")


def chain(axes: Axes, generator: torch.Generator) -> None:
    """Filtering and smoothing of two states that each stay for 25 tokens on average."""
    stay, states = 0.96, [torch.zeros(300, dtype=torch.long)]
    for moved in (torch.rand(149, 300, generator=generator) > stay).long():
        states.append(states[-1] ^ moved)
    state = torch.stack(states, 1)
    noise = torch.randn(300, 150, 1, dtype=torch.float64, generator=generator)
    tokens = noise + (2.0 * state - 1).unsqueeze(-1)
    centres = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    move = torch.tensor([[stay, 1 - stay], [1 - stay, stay]], dtype=torch.float64).log()
    law = HiddenMarkov.create(torch.tensor([0.0, -torch.inf]), move, lambda x: -0.5 * (x - centres).square())
    path = law.path(tokens)
    guesses = {
        "token alone": tokens[..., 0] > 0,
        "filtered": path.filtered.argmax(-1),
        "smoothed": path.smoothed.argmax(-1),
    }
    wrong = {name: (guess.long() != state).double().mean() for name, guess in guesses.items()}
    print("states named wrongly: " + ", ".join(f"{name} {share:.3f}" for name, share in wrong.items()))
    state, filtered, smoothed = state[0], path.filtered[0, :, 1].exp(), path.smoothed[0, :, 1].exp()
    axes.fill_between(range(150), 0, state, step="mid", color=GREY, alpha=0.25, linewidth=0, label="state")
    axes.plot(filtered, color=ORANGE, linewidth=1, label="filtered")
    axes.plot(smoothed, color=BLUE, linewidth=1.2, label="smoothed")
    axes.set(title="a hidden Markov chain", xlabel="token", ylabel="P(state 1)", ylim=(0, 1.25), yticks=[0, 0.5, 1])
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper center", handlelength=1.2)


def pieces(size: int = 300, known: int = 600) -> tuple[Tensor, Tensor, int]:
    """Pieces of `size` words: of three documents in four to fit, and of the others to test. Words beyond the commonest
    `known` of the first are one."""
    documents = [re.findall(r"[a-z]+", text.lower()) for _, text in sorted(topics.items())]
    fitted = [words for place, words in enumerate(documents) if place % 4]
    index = {word: place + 1 for place, (word, _) in enumerate(Counter(itertools.chain(*fitted)).most_common(known))}

    def cut(group: list[list[str]]) -> Tensor:
        rows = [words[start : start + size] for words in group for start in range(0, len(words) - size + 1, size)]
        return torch.tensor([[index.get(word, 0) for word in row] for row in rows])

    return cut(fitted), cut([words for place, words in enumerate(documents) if place % 4 == 0]), known + 1


def topic_mixture(counts: Tensor, base: Tensor, smoothing: float) -> DiscreteLatent:
    """Expectation maximisation of a mixture of 32 multinomials, each smoothed by so many words of the base law."""
    generator = torch.Generator().manual_seed(SEED)
    share = torch.rand(len(counts), 32, dtype=torch.float64, generator=generator).pow(8)
    for _ in range(60):
        share = share / share.sum(-1, keepdim=True)
        table = share.T @ counts + smoothing * base
        table = (table / table.sum(-1, keepdim=True)).log()
        weight = (share.sum(0) + 1e-3).log()
        share = (weight + counts @ table.T).softmax(-1)
    return DiscreteLatent.create(weight, table)


def attended(seen: Tensor, size: int) -> Tensor:
    """Uniform attention over the words seen, as unit vectors: how often each occurs."""
    shown = torch.nn.functional.one_hot(seen, size).double().unsqueeze(1)
    nothing = shown.new_zeros(len(seen), 1, seen.shape[1], 1)
    return ops.attention(nothing[:, :, :1], nothing, shown).output[:, 0, 0]


def words(axes: Axes, generator: torch.Generator) -> None:
    """Held-out log-probabilities by context length. What is tuned is tuned on the last third of the documents to fit."""
    fitted, held_out, size = pieces()
    counts = torch.nn.functional.one_hot(fitted, size).sum(1).double()
    base = (counts.sum(0) + 1) / (counts.sum() + size)
    lengths, first = LENGTHS[:9], 2 * len(fitted) // 3

    def score(predict, rows: Tensor) -> Tensor:
        """The mean log-probability of a piece's last 44 words after the first words of it: (lengths, pieces)."""
        return torch.stack([predict(rows[:, :length], rows[:, 256:]).mean(-1) for length in lengths])

    def by_posterior(prior):
        return lambda seen, targets: prior.posterior(seen).log_predictive(targets)

    def by_attention(share: float):
        return lambda seen, targets: ((1 - share) * attended(seen, size) + share * base).gather(-1, targets).log()

    strengths = [2.0**power for power in range(3, 12)]
    evidence = [DirichletMultinomial.create(s * base).posterior(fitted).log_evidence.sum() for s in strengths]
    strength = strengths[int(torch.stack(evidence).argmax())]
    share = max((0.1, 0.3, 0.5, 0.7, 0.8, 0.9), key=lambda s: float(score(by_attention(s), fitted[first:]).mean()))
    smoothing = max(
        (50.0, 500.0, 3000.0, 10000.0),
        key=lambda s: float(score(by_posterior(topic_mixture(counts[:first], base, s)), fitted[first:]).mean()),
    )
    print(
        f"{len(fitted)} pieces to fit, {len(held_out)} held out; a Dirichlet prior of {strength:g} words has most evidence"
    )
    print(f"tuned: share of the overall law {share:g}, smoothing of topics {smoothing:g} words")
    predictors = {
        "Dirichlet (sink)": by_posterior(DirichletMultinomial.create(strength * base)),
        "mixture of 32 topics": by_posterior(topic_mixture(counts, base, smoothing)),
        f"uniform, {share:.0%} overall law": by_attention(share),
        "uniform, 1% overall law": by_attention(0.01),
    }
    for (name, predict), colour in zip(predictors.items(), (BLUE, GREEN, GREY, ORANGE), strict=True):
        found = score(predict, held_out)
        mean, error = found.mean(-1), found.std(-1) / len(held_out) ** 0.5
        axes.plot(lengths, mean, "o-", color=colour, label=name, markersize=3)
        numbers = ", ".join(f"{mean[place]:.3f} ± {error[place]:.3f}" for place in (2, 5, 8))
        print(f"{name:>24}: log-probability of a held-out word after 4, 32, 256 words {numbers}")
        if "sink" in name:
            best = found
        else:
            less = (best - found).mean(0)
            print(f"{'':>24}  less than the Dirichlet's by {less.mean():.3f} ± {less.std() / len(less) ** 0.5:.3f}")
    axes.set_xscale("log", base=2)
    axes.set(title="held-out words of Python's help", xlabel="words seen", ylabel="nats a word", ylim=(-5.4, -4.3))
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, default=Path("massieu-results/posterior_attention.png"), metavar="FILE")
    picture = parser.parse_args().picture
    generator = torch.Generator().manual_seed(SEED)
    figure, grid = plt.subplots(2, 3, figsize=(11, 6.2), layout="constrained")
    panels = (families, without_prior, sink, regret, chain, words)
    pairs = list(zip(grid.flat, panels, strict=True))
    for axes, panel in track(pairs, "panels", console=Console(file=sys.stderr), transient=True):
        panel(axes, generator)
        axes.title.set_fontsize(10)
        axes.spines[["top", "right"]].set_visible(False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=80)
    print(f"picture: {picture}")


if __name__ == "__main__":
    main()
