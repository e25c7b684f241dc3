"""Does a whole model that learned in context beat the floor of one softmax head? (E18, Z6, Z7)"""

import math
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64
from torch import Tensor

from massieu.papers.experiments.criterion import Criterion
from massieu.papers.experiments.descriptions import described
from massieu.papers.experiments.in_context import Pairs, predict, train_in_context
from massieu.papers.experiments.input_size import DEGREE, DIMENSION, FIXED, NOISE, POWER
from massieu.papers.experiments.study import Numbers, experiment
from massieu.papers.experiments.transformer import VectorTransformer
from massieu.papers.theory import optimal_scale, smoothing_error, smoothing_floor, zonal_harmonics
from massieu.regression import ExponentialKernel, conditional_mean_attention

LENGTHS = (4, 16, 64, 128)
"""The numbers of tokens at which errors are read; the last is longer than any in training."""
LONGEST = 64
"""The most tokens in training."""
POLES = 4000
_CONTEXTS = 32
_STEPS = 3000


@experiment(
    "whole-model",
    question="Does a whole model that learns functions of the sphere in context beat the floor of one softmax head?",
    claims="E18, Z6, Z7",
    minutes=8,
    criteria=[
        Criterion("over_fixed", "error of the model at 64 tokens / floor of one head at a fixed scale", most=0.9),
        Criterion("over_tuned", "error of the model at 64 tokens / error of one head at the best scale", most=0.9),
        Criterion("longer", "the same at 128 tokens, twice the most in training", most=0.9),
        Criterion(
            "excess_risk",
            "KL of the model's mean from the exact mean at 64 tokens, nats",
            most=0.05,
            role="optimisation",
        ),
        Criterion(
            "shuffled",
            "error with the values of other contexts / floor of one head at a fixed scale",
            most=0.9,
            role="control",
        ),
        Criterion("without", "error without attention / floor of one head at a fixed scale", most=0.9, role="control"),
        *described({f"model_{tokens}": f"error of the model, {tokens} tokens" for tokens in LENGTHS}),
        *described({f"exact_{tokens}": f"error of the exact mean, {tokens} tokens" for tokens in LENGTHS}),
        *described({f"ridge_{tokens}": f"error of ridge regression, {tokens} tokens" for tokens in LENGTHS}),
        *described({f"tuned_{tokens}": f"error of one head at the best scale, {tokens} tokens" for tokens in LENGTHS}),
        *described({"floor": "floor of one head at a fixed scale, with any number of tokens"}),
    ],
)
def whole_model(seed: int, quick: bool) -> Numbers:
    """Keys are uniform on the sphere in 3 dimensions. Values are a function of the key, with parts of degree 1 and 2 about a
    pole, and noise of standard deviation ½. The pole is uniform and each context's own. A causal transformer of two layers, 4
    heads and width 32, without positions, sees up to 64 pairs and a new key. It predicts the value there by squared error, in
    3,000 steps of 32 contexts. Errors are root mean squares against the function. One head's are exact, from the theory of
    smoothing: the floor of scale 4, and the error of the best scale at this number of tokens. Ridge regression has softmax's
    own kernel. The exact mean is over 4,000 poles, spread evenly and weighed by their likelihood. The KL is distance² of the
    two means over twice the variance, as for Gaussian laws.
    """
    generator = torch.Generator().manual_seed(seed)
    steps = 30 if quick else _STEPS

    def training_sample() -> Pairs:
        return sample(_CONTEXTS, LONGEST + 1, generator).pairs

    train = partial(train_in_context, training_sample, generator, depth=2, step_size=3e-3)
    model = train(steps=steps)
    without_attention = train(steps=steps // 10, with_attention=False)
    numbers = _errors_by_length(model, 64 if quick else 1024, generator)
    floor = float(smoothing_floor(POWER, DIMENSION, FIXED).error)
    test = sample(512 if quick else 8192, LONGEST + 1, generator)
    longer_test = sample(512 if quick else 8192, LENGTHS[-1] + 1, generator)
    keys, values = test.pairs
    shuffled_test = _Sample((keys, values.roll(1, 0)), test.function)
    model_error = error(model, test)
    return numbers | {
        "floor": floor,
        "over_fixed": model_error / floor,
        "over_tuned": model_error / numbers[f"tuned_{LONGEST}"],
        "longer": error(model, longer_test) / numbers[f"tuned_{LENGTHS[-1]}"],
        "shuffled": error(model, shuffled_test) / floor,
        "without": error(without_attention, test) / floor,
    }


class _Sample(NamedTuple):
    pairs: Pairs
    """Keys and values."""
    function: Float[Tensor, "B L"]
    """The values without noise."""


def sample(contexts: int, length: int, generator: torch.Generator) -> _Sample:
    """Contexts, each with its own pole."""
    keys = F.normalize(torch.randn(contexts, length, DIMENSION, generator=generator), dim=-1)
    poles = F.normalize(torch.randn(contexts, 1, DIMENSION, generator=generator), dim=-1)
    function = _function((keys * poles).sum(-1))
    values = function + NOISE * torch.randn(contexts, length, generator=generator)
    return _Sample((keys, values), function)


def _function(cosine: Tensor) -> Tensor:
    """P₁ + P₂, as in `input_size`."""
    return zonal_harmonics(cosine, DEGREE, DIMENSION)[..., 1:].sum(-1).to(cosine.dtype)


def _spiral() -> Float64[Tensor, "3 poles"]:
    """Points spread evenly over the sphere: equal steps of height, so equal areas, at golden angles."""
    number = torch.arange(POLES, dtype=torch.float64) + 0.5
    height = 1 - 2 * number / POLES
    angle = math.pi * (1 + math.sqrt(5)) * number
    radius = (1 - height.square()).sqrt()
    return torch.stack([radius * angle.cos(), radius * angle.sin(), height])


def exact(pairs: Pairs) -> Float64[Tensor, "B L"]:
    """The mean of each value given its key and the pairs before it, over poles along a spiral of equal areas."""
    poles = _spiral()
    keys_of_all, values_of_all = pairs
    means = []
    for keys, values in zip(keys_of_all.double(), values_of_all.double(), strict=True):
        functions = _function(keys @ poles)  # (L, poles)
        log_likelihood = -(values.unsqueeze(-1) - functions).square() / (2 * NOISE**2)
        # Of the pairs before each position: none before the first.
        log_likelihood_before = F.pad(log_likelihood[:-1].cumsum(0), (0, 0, 1, 0))
        means.append((log_likelihood_before.softmax(-1) * functions).sum(-1))
    return torch.stack(means)


def error(model: VectorTransformer, test: _Sample) -> float:
    """Root mean square error against the function at the last position."""
    with torch.no_grad():
        return float((predict(model, test.pairs) - test.function)[:, -1].square().mean().sqrt())


def _errors_by_length(model: VectorTransformer, contexts: int, generator: torch.Generator) -> Numbers:
    """Errors at each number of tokens; the model, the exact mean and ridge regression are on the same contexts."""
    pairs, function = sample(contexts, LENGTHS[-1] + 1, generator)
    exact_mean = exact(pairs)
    with torch.no_grad():
        prediction = predict(model, pairs)
    squared_distance = (prediction - exact_mean)[:, LONGEST].square().mean()
    posterior_variance = (function - exact_mean)[:, LONGEST].square().mean()
    numbers = {"excess_risk": float(squared_distance / (2 * (posterior_variance + NOISE**2)))}
    for length in LENGTHS:
        target = function[:, length].double()
        estimates = {
            "model": prediction[:, length],
            "exact": exact_mean[:, length],
            "ridge": _ridge(pairs, length),
        }
        for name, estimate in estimates.items():
            numbers[f"{name}_{length}"] = float((estimate - target).square().mean().sqrt())
        best_scale = float(optimal_scale(float(length), POWER, NOISE**2, DIMENSION))
        squared_error = smoothing_error(float(length), POWER, NOISE**2, DIMENSION, best_scale).total
        numbers[f"tuned_{length}"] = math.sqrt(float(squared_error))
    return numbers


def _ridge(pairs: Pairs, length: int) -> Float64[Tensor, " B"]:
    """Ridge regression with softmax's kernel on the first tokens, as many as `length`, at the next key."""
    keys, values = (tensor.double().unsqueeze(1) for tensor in pairs)  # of one head
    result = conditional_mean_attention(
        keys[..., length : length + 1, :],
        keys[..., :length, :],
        values[..., :length].unsqueeze(-1),
        kernel=ExponentialKernel.create(1.0),
        ridge=NOISE**2,
    )
    return result.output[:, 0, 0, 0]
