"""Does a whole model that learned in context beat the floor of one softmax head? (E18, Z6, Z7)"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64
from torch import Tensor

from massieu.papers.experiments.criterion import Criterion
from massieu.papers.experiments.descriptions import described
from massieu.papers.experiments.in_context import Pairs, predicted, trained
from massieu.papers.experiments.input_size import DEGREE, DIMENSION, FIXED, NOISE, POWER
from massieu.papers.experiments.study import Numbers, experiment
from massieu.papers.experiments.transformer import VectorTransformer
from massieu.papers.theory import optimal_scale, smoothing_error, smoothing_floor, zonal_harmonics
from massieu.regression import ExponentialKernel, conditional_mean_attention

LENGTHS = (4, 16, 64, 128)
"""The last is longer than any that is trained on."""
LONGEST, POLES = 64, 4000
_CONTEXTS, _STEPS = 32, 3000


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
    drawn = torch.Generator().manual_seed(seed)
    steps = 30 if quick else _STEPS
    batch = lambda: sample(_CONTEXTS, LONGEST + 1, drawn)[0]  # noqa: E731
    model = trained(batch, drawn, steps=steps, depth=2, step_size=3e-3)
    without = trained(batch, drawn, steps=steps // 10, depth=2, step_size=3e-3, with_attention=False)
    found = _by_length(model, 64 if quick else 1024, drawn)
    floor = float(smoothing_floor(POWER, DIMENSION, FIXED).error)
    (keys, values), function = sample(512 if quick else 8192, LONGEST + 1, drawn)
    own = error(model, (keys, values), function)
    longer = sample(512 if quick else 8192, LENGTHS[-1] + 1, drawn)
    return found | {
        "floor": floor,
        "over_fixed": own / floor,
        "over_tuned": own / found[f"tuned_{LONGEST}"],
        "longer": error(model, *longer) / found[f"tuned_{LENGTHS[-1]}"],
        "shuffled": error(model, (keys, values.roll(1, 0)), function) / floor,
        "without": error(without, (keys, values), function) / floor,
    }


def sample(contexts: int, length: int, drawn: torch.Generator) -> tuple[Pairs, Float[Tensor, "B L"]]:
    """Keys and values, and the function at the keys."""
    keys = F.normalize(torch.randn(contexts, length, DIMENSION, generator=drawn), dim=-1)
    pole = F.normalize(torch.randn(contexts, 1, DIMENSION, generator=drawn), dim=-1)
    function = _function((keys * pole).sum(-1))
    return (keys, function + NOISE * torch.randn(contexts, length, generator=drawn)), function


def _function(cosine: Tensor) -> Tensor:
    """P₁ + P₂, as in `input_size`."""
    return zonal_harmonics(cosine, DEGREE, DIMENSION)[..., 1:].sum(-1).to(cosine.dtype)


def exact(pairs: Pairs) -> Float64[Tensor, "B L"]:
    """The mean of each value given its key and the pairs before it, over poles along a spiral of equal areas."""
    place = torch.arange(POLES, dtype=torch.float64) + 0.5
    height, angle = 1 - 2 * place / POLES, math.pi * (1 + math.sqrt(5)) * place
    across = (1 - height.square()).sqrt()
    poles = torch.stack([across * angle.cos(), across * angle.sin(), height])
    means = []
    for keys, values in zip(pairs[0].double(), pairs[1].double(), strict=True):
        functions = _function(keys @ poles)  # (L, poles)
        log_likelihood = -(values.unsqueeze(-1) - functions).square() / (2 * NOISE**2)
        before = F.pad(log_likelihood[:-1].cumsum(0), (0, 0, 1, 0))
        means.append((before.softmax(-1) * functions).sum(-1))
    return torch.stack(means)


def error(model: VectorTransformer, pairs: Pairs, function: Float[Tensor, "B L"]) -> float:
    """Root mean square at the last place."""
    with torch.no_grad():
        return float((predicted(model, pairs) - function)[:, -1].square().mean().sqrt())


def _by_length(model: VectorTransformer, contexts: int, drawn: torch.Generator) -> Numbers:
    """By how many tokens were seen; the model, the exact mean and ridge regression are on the same contexts."""
    pairs, function = sample(contexts, LENGTHS[-1] + 1, drawn)
    mean = exact(pairs)
    with torch.no_grad():
        found = predicted(model, pairs)
    apart, left = ((by - mean)[:, LONGEST].square().mean() for by in (found, function))
    numbers = {"excess_risk": float(apart / (2 * (left + NOISE**2)))}
    for length in LENGTHS:
        here = function[:, length].double()
        told = {"model": found[:, length], "exact": mean[:, length], "ridge": _ridge(pairs, length)}
        numbers |= {f"{name}_{length}": float((by - here).square().mean().sqrt()) for name, by in told.items()}
        best = float(optimal_scale(float(length), POWER, NOISE**2, DIMENSION))
        squared = smoothing_error(float(length), POWER, NOISE**2, DIMENSION, best).total
        numbers[f"tuned_{length}"] = math.sqrt(float(squared))
    return numbers


def _ridge(pairs: Pairs, length: int) -> Float64[Tensor, " B"]:
    """Of the values on the keys, with softmax's kernel, at the key after these tokens."""
    keys, values = (tensor.double().unsqueeze(1) for tensor in pairs)  # of one head
    found = conditional_mean_attention(
        keys[..., length : length + 1, :],
        keys[..., :length, :],
        values[..., :length].unsqueeze(-1),
        kernel=ExponentialKernel.create(1.0),
        ridge=NOISE**2,
    )
    return found.output[:, 0, 0, 0]
