"""How does the best scale of a head's scores grow with the number of tokens? (E24, X2)"""

import math

import torch
from jaxtyping import Float64
from torch import Tensor

from massieu import ops
from massieu.papers.experiments.criterion import Criterion
from massieu.papers.experiments.study import Numbers, experiment
from massieu.papers.experiments.training import minimise, slope

SIZE = 8
LENGTHS = (16, 64, 256, 1024)
_QUERIES, _NOISE = 32, 0.5


@experiment(
    "temperature",
    question="Does training find the best scale of the scores for each number of tokens?",
    claims="E24, X2",
    minutes=6,
    criteria=[
        Criterion("scale_error", "largest |s − s*|/s* over lengths, s* the best scale in simulation", most=0.03),
        Criterion("slope_difference", "slope of log s on log L − slope of log s*", least=-0.05, most=0.05),
        Criterion("excess_risk", "largest relative excess of the risk over that of s*", most=0.01, role="optimisation"),
        Criterion("wrong_length", "|s at 16 tokens − s* at 1,024|/s*", most=0.03, role="control"),
    ],
)
def temperature(seed: int, quick: bool) -> Numbers:
    """Tokens (k, v) are Gaussian in 8 dimensions, v = k and noise of standard deviation ½. A query is one more key. The
    head returns Σ p_n v_n with p the softmax of s·q·k_n, the best score with infinitely many tokens at s = 1 (X1). The
    scale s is trained, from 0.2, at 16, 64, 256 and 1,024 tokens. s* minimises the risk over one large sample, the same
    for all scales. X2's expansion does not hold for Gaussian queries, so s is not compared with it.
    """
    drawn = torch.Generator().manual_seed(seed)
    lengths = LENGTHS[:2] if quick else LENGTHS
    found: list[tuple[float, float, float]] = []
    for length in lengths:
        contexts = max(2, (2**12 if quick else 2**14) // length)
        scale = _trained(length, contexts, 60 if quick else 600, drawn)
        sample = [_batch(length, contexts, drawn) for _ in range(4 if quick else 40)]
        best = _best(sample)
        found.append((scale, best, float(_risk(sample, scale) / _risk(sample, best) - 1)))
    x = torch.tensor([math.log(length) for length in lengths], dtype=torch.float64)
    ours, exact, excess = (torch.tensor(column, dtype=torch.float64) for column in zip(*found, strict=True))
    numbers = {f"scale_{length}": float(s) for length, s in zip(lengths, ours, strict=True)}
    numbers |= {f"best_{length}": float(s) for length, s in zip(lengths, exact, strict=True)}
    return numbers | {
        "scale_error": float(((ours - exact).abs() / exact).max()),
        "slope_difference": slope(x, ours.log()) - slope(x, exact.log()),
        "slope": slope(x, ours.log()),
        "excess_risk": float(excess.max()),
        "wrong_length": float((ours[0] - exact[-1]).abs() / exact[-1]),
        "logit_variance_over_log_length": float(ours[-1] ** 2 * SIZE / x[-1]),
    }


def _batch(length: int, contexts: int, drawn: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    options = {"generator": drawn, "dtype": torch.float64}
    keys = torch.randn(contexts, 1, length, SIZE, **options)
    values = keys + _NOISE * torch.randn(contexts, 1, length, SIZE, **options)
    return torch.randn(contexts, 1, _QUERIES, SIZE, **options), keys, values


def _missed(scale: Tensor | float, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Mean squared distance from the conditional mean of v given the query, which is the query."""
    query, key, value = batch
    return (ops.attention(scale * query, key, value, scale=1.0).output - query).square().mean()


def _trained(length: int, contexts: int, steps: int, drawn: torch.Generator) -> float:
    scale = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    minimise(
        lambda: _missed(scale, _batch(length, contexts, drawn)), [scale], steps=steps, step_size=0.03, averaged=0.25
    )
    return float(scale.detach())


def _risk(sample: list[tuple[Tensor, Tensor, Tensor]], scale: float) -> Float64[Tensor, ""]:
    return torch.stack([_missed(scale, batch) for batch in sample]).mean()


def _best(sample: list[tuple[Tensor, Tensor, Tensor]]) -> float:
    """By golden section within [0, 1]: on one sample the risk is a function of s alone."""
    low, high, share = 0.0, 1.0, (math.sqrt(5) - 1) / 2
    inner = [high - share * (high - low), low + share * (high - low)]
    risks = [_risk(sample, s) for s in inner]
    for _ in range(22):
        if risks[0] < risks[1]:
            high, inner[1], risks[1] = inner[1], inner[0], risks[0]
            inner[0] = high - share * (high - low)
            risks[0] = _risk(sample, inner[0])
        else:
            low, inner[0], risks[0] = inner[0], inner[1], risks[1]
            inner[1] = low + share * (high - low)
            risks[1] = _risk(sample, inner[1])
    return (low + high) / 2
