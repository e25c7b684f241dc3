"""How does the error of a head against the conditional mean fall with the number of tokens? (E18, Z6, Z7)"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float64
from torch import Tensor

from massieu import ops
from massieu.papers.experiments.criterion import Criterion
from massieu.papers.experiments.study import Numbers, experiment
from massieu.papers.experiments.training import minimise
from massieu.papers.theory import optimal_scale, smoothing_error, smoothing_floor, zonal_harmonics
from massieu.regression import ExponentialKernel, conditional_mean_attention

DIMENSION = 3
DEGREE = 2
NOISE = 0.5
FIXED = 4.0
"""The scale β of the head that is not tuned."""
LENGTHS = (64, 512, 4096)
POWER = torch.tensor([0.0, 1 / 3, 1 / 5], dtype=torch.float64)
"""Mean squares over the sphere of the conditional mean's harmonics of degree 0, 1, 2."""
_QUERIES = 64
_RIDGE_LENGTH = 512
"""The length at which ridge regression, whose cost is cubic, is compared."""


@experiment(
    "input-size",
    question="How does a head's error against the conditional mean fall with the number of tokens, and what falls faster?",
    claims="E18, Z6, Z7",
    minutes=8,
    criteria=[
        Criterion("fixed_error", "|error of a fixed scale at 4,096 tokens / prediction − 1|", most=0.05),
        Criterion("tuned_error", "|error of the best scale at 4,096 tokens / prediction − 1|", most=0.05),
        Criterion(
            "trained_error", "|error of a trained scale at 4,096 tokens / prediction for the best scale − 1|", most=0.05
        ),
        Criterion("fixed_over_floor", "error of a fixed scale at 4,096 tokens / its floor", least=0.95, most=1.05),
        Criterion("ridge_over_tuned", "error of ridge regression / error of the best scale, at 512 tokens", most=0.9),
        Criterion(
            "excess_risk",
            "relative excess of the trained scale's squared error over the best scale's",
            most=0.01,
            role="optimisation",
        ),
        Criterion(
            "fixed_as_tuned",
            "|error of the fixed scale / prediction for the best scale − 1|",
            most=0.05,
            role="control",
        ),
    ],
)
def input_size(seed: int, quick: bool) -> Numbers:
    """Keys are uniform on the sphere in 3 dimensions. Values are a function of the key with parts of degree 1 and 2,
    and noise of standard deviation ½. A head attends with the score β k·q, β fixed at 4, or the best at this length
    (Z7), or trained at this length. It is compared with ridge regression with softmax's own kernel. Errors are root
    mean squares against the function at the query, on 10,240 queries and more. They are compared with the exact
    smoothing error, not with asymptotic slopes.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = LENGTHS[:2] if quick else LENGTHS
    pole = F.normalize(torch.randn(DIMENSION, generator=generator, dtype=torch.float64), dim=0)
    numbers: Numbers = {}
    for length in lengths:
        numbers |= _errors_at(length, pole, quick, generator)
    last = lengths[-1]

    def relative_error(name: str, prediction: str) -> float:
        return abs(numbers[f"{name}_rmse_{last}"] / numbers[f"{prediction}_predicted_{last}"] - 1)

    floor = float(smoothing_floor(POWER, DIMENSION, FIXED).error)
    return numbers | {
        "fixed_error": relative_error("fixed", "fixed"),
        "tuned_error": relative_error("tuned", "tuned"),
        "trained_error": relative_error("trained", "tuned"),
        "fixed_as_tuned": relative_error("fixed", "tuned"),
        "fixed_over_floor": numbers[f"fixed_rmse_{last}"] / floor,
        "ridge_over_tuned": numbers[f"ridge_rmse_{_RIDGE_LENGTH}"] / numbers[f"tuned_rmse_{_RIDGE_LENGTH}"],
        "excess_risk": (numbers[f"trained_rmse_{last}"] / numbers[f"tuned_rmse_{last}"]) ** 2 - 1,
    }


def _errors_at(length: int, pole: Tensor, quick: bool, generator: torch.Generator) -> Numbers:
    """Scales, errors and predictions at one number of tokens."""
    best_scale = float(optimal_scale(float(length), POWER, NOISE**2, DIMENSION))
    trained_scale = _train_scale(length, pole, 40 if quick else 600, generator)
    batches = [_batch(length, pole, 4, generator) for _ in range(10 if quick else 40)]
    scales = {"fixed": FIXED, "tuned": best_scale, "trained": trained_scale}
    numbers: Numbers = {}
    for name, scale in scales.items():
        numbers[f"{name}_scale_{length}"] = scale
        numbers[f"{name}_rmse_{length}"] = _error(batches, partial(_softmax, scale))
    for name in ("fixed", "tuned"):
        prediction = smoothing_error(float(length), POWER, NOISE**2, DIMENSION, scales[name]).total
        numbers[f"{name}_predicted_{length}"] = math.sqrt(float(prediction))
    if length == _RIDGE_LENGTH:
        numbers[f"ridge_rmse_{length}"] = _error(batches[:10], _ridge)
    return numbers


class _Batch(NamedTuple):
    keys: Float64[Tensor, "B 1 L 3"]
    values: Float64[Tensor, "B 1 L 1"]
    queries: Float64[Tensor, "B 1 Q 3"]
    function: Float64[Tensor, "B 1 Q 1"]
    """The conditional mean at the queries."""


def conditional_mean(points: Float64[Tensor, "*lead 3"], pole: Float64[Tensor, "3"]) -> Float64[Tensor, "*lead"]:
    """P₁ + P₂ of the cosine to a pole."""
    return zonal_harmonics(points @ pole, DEGREE, DIMENSION)[..., 1:].sum(-1)


def _batch(length: int, pole: Tensor, contexts: int, generator: torch.Generator) -> _Batch:
    options = {"generator": generator, "dtype": torch.float64}
    keys = F.normalize(torch.randn(contexts, 1, length, DIMENSION, **options), dim=-1)
    queries = F.normalize(torch.randn(contexts, 1, _QUERIES, DIMENSION, **options), dim=-1)
    values = conditional_mean(keys, pole) + NOISE * torch.randn(contexts, 1, length, **options)
    return _Batch(keys, values.unsqueeze(-1), queries, conditional_mean(queries, pole).unsqueeze(-1))


def _softmax(scale: Tensor | float, batch: _Batch) -> Float64[Tensor, "B 1 Q 1"]:
    return ops.attention(scale * batch.queries, batch.keys, batch.values, scale=1.0).output


def _ridge(batch: _Batch) -> Float64[Tensor, "B 1 Q 1"]:
    kernel = ExponentialKernel.create(1.0)
    return conditional_mean_attention(batch.queries, batch.keys, batch.values, kernel=kernel, ridge=NOISE**2).output


def _error(batches: list[_Batch], estimate: Callable[[_Batch], Tensor]) -> float:
    """Root mean square distance of an estimate from the function."""
    squares = [(estimate(batch) - batch.function).square().mean() for batch in batches]
    return math.sqrt(float(torch.stack(squares).mean()))


def _train_scale(length: int, pole: Tensor, steps: int, generator: torch.Generator) -> float:
    log_scale = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)

    def loss() -> Tensor:
        batch = _batch(length, pole, 16, generator)
        return (_softmax(log_scale.exp(), batch) - batch.function).square().mean()

    minimise(loss, [log_scale], steps=steps, step_size=0.1, averaged_share=0.5)
    return math.exp(float(log_scale.detach()))
