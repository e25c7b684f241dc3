"""How does the best scale of a head's scores grow with the number of tokens? (E24, X2)"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from massieu import ops
from massieu.papers.experiments.criterion import Criterion
from massieu.papers.experiments.study import Numbers, experiment
from massieu.papers.experiments.training import minimise, slope

SIZE = 8
LENGTHS = (16, 64, 256, 1024)
_QUERIES = 32
_NOISE = 0.5
_GOLDEN_SHARE = (math.sqrt(5) - 1) / 2
_GOLDEN_STEPS = 22
"""Steps of golden section, which leave an interval of 0.618²², 3·10⁻⁵."""


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
    generator = torch.Generator().manual_seed(seed)
    lengths = LENGTHS[:2] if quick else LENGTHS
    trained_scales = []
    best_scales = []
    excess_risks = []
    for length in lengths:
        contexts = max(2, (2**12 if quick else 2**14) // length)
        trained_scale = _train_scale(length, contexts, 60 if quick else 600, generator)
        batches = [_batch(length, contexts, generator) for _ in range(4 if quick else 40)]
        best_scale = _best_scale(batches)
        trained_scales.append(trained_scale)
        best_scales.append(best_scale)
        excess_risks.append(float(_risk(batches, trained_scale) / _risk(batches, best_scale) - 1))
    log_lengths = torch.tensor([math.log(length) for length in lengths], dtype=torch.float64)
    trained = torch.tensor(trained_scales, dtype=torch.float64)
    best = torch.tensor(best_scales, dtype=torch.float64)
    trained_slope = slope(log_lengths, trained.log())
    return {
        **{f"scale_{length}": scale for length, scale in zip(lengths, trained_scales, strict=True)},
        **{f"best_{length}": scale for length, scale in zip(lengths, best_scales, strict=True)},
        "scale_error": float(((trained - best).abs() / best).max()),
        "slope_difference": trained_slope - slope(log_lengths, best.log()),
        "slope": trained_slope,
        "excess_risk": float(torch.tensor(excess_risks, dtype=torch.float64).max()),
        "wrong_length": float((trained[0] - best[-1]).abs() / best[-1]),
        "logit_variance_over_log_length": float(trained[-1] ** 2 * SIZE / log_lengths[-1]),
    }


class _Batch(NamedTuple):
    queries: Float64[Tensor, "B 1 Q d"]
    keys: Float64[Tensor, "B 1 L d"]
    values: Float64[Tensor, "B 1 L d"]


def _batch(length: int, contexts: int, generator: torch.Generator) -> _Batch:
    options = {"generator": generator, "dtype": torch.float64}
    keys = torch.randn(contexts, 1, length, SIZE, **options)
    values = keys + _NOISE * torch.randn(contexts, 1, length, SIZE, **options)
    queries = torch.randn(contexts, 1, _QUERIES, SIZE, **options)
    return _Batch(queries, keys, values)


def _loss(scale: Tensor | float, batch: _Batch) -> Float64[Tensor, ""]:
    """Mean squared distance from the conditional mean of v given the query, which is the query."""
    output = ops.attention(scale * batch.queries, batch.keys, batch.values, scale=1.0).output
    return (output - batch.queries).square().mean()


def _train_scale(length: int, contexts: int, steps: int, generator: torch.Generator) -> float:
    scale = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)

    def loss() -> Tensor:
        return _loss(scale, _batch(length, contexts, generator))

    minimise(loss, [scale], steps=steps, step_size=0.03, averaged_share=0.25)
    return float(scale.detach())


def _risk(batches: list[_Batch], scale: float) -> Float64[Tensor, ""]:
    return torch.stack([_loss(scale, batch) for batch in batches]).mean()


def _best_scale(batches: list[_Batch]) -> float:
    """The scale in [0, 1] of least risk, by golden section: on fixed batches the risk is a function of it alone."""
    low = 0.0
    high = 1.0
    left = high - _GOLDEN_SHARE * (high - low)
    right = low + _GOLDEN_SHARE * (high - low)
    left_risk = _risk(batches, left)
    right_risk = _risk(batches, right)
    for _ in range(_GOLDEN_STEPS):
        # The inner point that stays is an inner point of the smaller interval, too.
        if left_risk < right_risk:
            high = right
            right = left
            right_risk = left_risk
            left = high - _GOLDEN_SHARE * (high - low)
            left_risk = _risk(batches, left)
        else:
            low = left
            left = right
            left_risk = right_risk
            right = low + _GOLDEN_SHARE * (high - low)
            right_risk = _risk(batches, right)
    return (low + high) / 2
