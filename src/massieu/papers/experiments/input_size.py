"""How does the error of a head against the conditional mean fall with the number of tokens? (E18, Z6, Z7)"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float64
from torch import Tensor

from massieu import ops
from massieu.papers.experiments.criterion import Criterion
from massieu.papers.experiments.study import Numbers, experiment
from massieu.papers.experiments.training import minimise
from massieu.papers.theory import optimal_scale, smoothing_error, smoothing_floor, zonal_harmonics
from massieu.regression import ExponentialKernel, conditional_mean_attention

DIMENSION, DEGREE, NOISE, FIXED = 3, 2, 0.5, 4.0
LENGTHS = (64, 512, 4096)
POWER = torch.tensor([0.0, 1 / 3, 1 / 5], dtype=torch.float64)
"""Mean squares over the sphere of the harmonics of degree 0, 1, 2 that the conditional mean has."""
_QUERIES, _RIDGE_LENGTH = 64, 512
_Batch = tuple[Tensor, Tensor, Tensor, Tensor]


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
    drawn = torch.Generator().manual_seed(seed)
    lengths = LENGTHS[:2] if quick else LENGTHS
    pole = torch.nn.functional.normalize(torch.randn(DIMENSION, generator=drawn, dtype=torch.float64), dim=0)
    numbers: Numbers = {}
    for length in lengths:
        best = float(optimal_scale(float(length), POWER, NOISE**2, DIMENSION))
        trained = _trained(length, pole, 40 if quick else 600, drawn)
        sample = [_batch(length, pole, 4, drawn) for _ in range(10 if quick else 40)]
        scales = {"fixed": FIXED, "tuned": best, "trained": trained}
        for name, scale in scales.items():
            numbers[f"{name}_scale_{length}"] = scale
            numbers[f"{name}_rmse_{length}"] = _error(sample, lambda batch, s=scale: _softmax(s, batch))
        for name in ("fixed", "tuned"):
            predicted = smoothing_error(float(length), POWER, NOISE**2, DIMENSION, scales[name]).total
            numbers[f"{name}_predicted_{length}"] = math.sqrt(float(predicted))
        if length == _RIDGE_LENGTH:
            numbers[f"ridge_rmse_{length}"] = _error(sample[:10], _ridge)
    last = lengths[-1]

    def off(name: str, from_what: str) -> float:
        return abs(numbers[f"{name}_rmse_{last}"] / numbers[f"{from_what}_predicted_{last}"] - 1)

    floor = float(smoothing_floor(POWER, DIMENSION, FIXED).error)
    return numbers | {
        "fixed_error": off("fixed", "fixed"),
        "tuned_error": off("tuned", "tuned"),
        "trained_error": off("trained", "tuned"),
        "fixed_as_tuned": off("fixed", "tuned"),
        "fixed_over_floor": numbers[f"fixed_rmse_{last}"] / floor,
        "ridge_over_tuned": numbers[f"ridge_rmse_{_RIDGE_LENGTH}"] / numbers[f"tuned_rmse_{_RIDGE_LENGTH}"],
        "excess_risk": (numbers[f"trained_rmse_{last}"] / numbers[f"tuned_rmse_{last}"]) ** 2 - 1,
    }


def conditional_mean(points: Float64[Tensor, "*lead 3"], pole: Float64[Tensor, "3"]) -> Float64[Tensor, "*lead"]:
    """P₁ + P₂ of the cosine to a pole."""
    return zonal_harmonics(points @ pole, DEGREE, DIMENSION)[..., 1:].sum(-1)


def _batch(length: int, pole: Tensor, contexts: int, drawn: torch.Generator) -> _Batch:
    """Keys, values, queries, and the function there."""
    options = {"generator": drawn, "dtype": torch.float64}
    keys, queries = (
        torch.nn.functional.normalize(torch.randn(contexts, 1, count, DIMENSION, **options), dim=-1)
        for count in (length, _QUERIES)
    )
    values = conditional_mean(keys, pole) + NOISE * torch.randn(contexts, 1, length, **options)
    return keys, values.unsqueeze(-1), queries, conditional_mean(queries, pole).unsqueeze(-1)


def _softmax(scale: Tensor | float, batch: _Batch) -> Tensor:
    keys, values, queries, _ = batch
    return ops.attention(scale * queries, keys, values, scale=1.0).output


def _ridge(batch: _Batch) -> Tensor:
    keys, values, queries, _ = batch
    return conditional_mean_attention(
        queries, keys, values, kernel=ExponentialKernel.create(1.0), ridge=NOISE**2
    ).output


def _error(sample: list[_Batch], estimate: Callable[[_Batch], Tensor]) -> float:
    """Root mean square distance from the function."""
    return math.sqrt(float(torch.stack([(estimate(batch) - batch[3]).square().mean() for batch in sample]).mean()))


def _trained(length: int, pole: Tensor, steps: int, drawn: torch.Generator) -> float:
    log_scale = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)

    def loss() -> Tensor:
        batch = _batch(length, pole, 16, drawn)
        return (_softmax(log_scale.exp(), batch) - batch[3]).square().mean()

    minimise(loss, [log_scale], steps=steps, step_size=0.1, averaged=0.5)
    return math.exp(float(log_scale.detach()))
