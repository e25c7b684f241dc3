"""Does a small transformer predict a linear regression in its context as the exact posterior does? (E16, Z2, Z4)"""

from functools import partial

import torch
from jaxtyping import Float64
from torch import Tensor

from massieu.foundation.numbers import counted
from massieu.papers.experiments.criterion import Criterion
from massieu.papers.experiments.descriptions import described
from massieu.papers.experiments.in_context import Pairs, predict, train_in_context
from massieu.papers.experiments.study import Numbers, experiment
from massieu.papers.experiments.transformer import VectorTransformer
from massieu.posteriors import BayesianLinearRegression

FEATURES = 2
LENGTH = 16
NOISE = 0.5
_CONTEXTS = 128
_STEPS = 6000
_MOST = 0.01
"""The threshold of the divergences, in nats."""
_LISTED_PAIRS = (1, 2, 3, 4, 5, 6, 8, 15)
"""The numbers of pairs whose divergence stands among the criteria."""


@experiment(
    "regression",
    question="Does a small transformer predict a linear regression in its context as the exact posterior does?",
    claims="E16, Z2, Z4",
    minutes=14,
    criteria=[
        Criterion(
            "largest", "KL(exact ‖ model) of the mean in nats, at the worst number of pairs, 0 to 15", most=_MOST
        ),
        Criterion(
            "excess_risk",
            "KL(exact ‖ model) of the mean in nats, average over 0 to 15 pairs",
            most=_MOST,
            role="optimisation",
        ),
        Criterion(
            "shuffled",
            "KL at the worst number of pairs, trained on targets of other contexts",
            most=_MOST,
            role="control",
        ),
        Criterion("without", "KL at the worst number of pairs, without attention", most=_MOST, role="control"),
        *described(
            {
                "worst": "the number of pairs at which KL is largest",
                "failing": "how many of the 16 numbers of pairs have a KL above 0.01",
            }
        ),
        *described({f"kl_{pairs}": f"KL after {counted(pairs, 'pair')}" for pairs in _LISTED_PAIRS}),
        *described({"longer": "KL after 31 pairs, about twice the most in training"}),
    ],
)
def regression(seed: int, quick: bool) -> Numbers:
    """A context is pairs (x, y): x is standard normal in 2 dimensions, y = x·z + noise of standard deviation ½, and z is
    standard normal and the context's own. A causal transformer of three layers, 4 heads and width 32, without positions, sees
    up to 15 pairs and a new x. It predicts y by squared error, from samples alone, in 6,000 steps of 128 contexts. The exact
    mean and variance s² are those of Bayesian linear regression. Two Gaussian laws of variance s² whose means are d apart have
    the divergence d²/(2s²). Its mean over 8,192 contexts is taken at each number of pairs.
    """
    generator = torch.Generator().manual_seed(seed)
    steps = 30 if quick else _STEPS

    def training_sample() -> Pairs:
        return sample(_CONTEXTS, LENGTH, generator)

    train = partial(train_in_context, training_sample, generator, depth=3, step_size=4e-3)
    model = train(steps=steps)
    shuffled_model = train(steps=steps // 10, shuffled=True)
    model_without_attention = train(steps=steps // 10, with_attention=False)
    features, targets = sample(1024 if quick else 8192, 2 * LENGTH, generator)
    pairs_as_trained = features[:, :LENGTH], targets[:, :LENGTH]
    kl_by_pairs = divergence(model, (features, targets))
    kl_as_trained = kl_by_pairs[:LENGTH]
    return {
        "largest": float(kl_as_trained.max()),
        "excess_risk": float(kl_as_trained.mean()),
        "worst": float(kl_as_trained.argmax()),
        "failing": float((kl_as_trained > _MOST).sum()),
        "longer": float(kl_by_pairs[-1]),
        "shuffled": float(divergence(shuffled_model, pairs_as_trained).max()),
        "without": float(divergence(model_without_attention, pairs_as_trained).max()),
        **{f"kl_{pairs}": kl for pairs, kl in enumerate(kl_as_trained.tolist())},
    }


def sample(contexts: int, length: int, generator: torch.Generator) -> Pairs:
    """Features and targets of contexts, each with its own latent."""
    features = torch.randn(contexts, length, FEATURES, generator=generator)
    latent = torch.randn(contexts, 1, FEATURES, generator=generator)
    noise = NOISE * torch.randn(contexts, length, generator=generator)
    return features, (features * latent).sum(-1) + noise


def exact(pairs: Pairs) -> tuple[Float64[Tensor, "B L"], Float64[Tensor, "B L"]]:
    """Mean and variance of each target given its features and the pairs before it."""
    features, targets = pairs
    x = features.double()
    y = targets.double().unsqueeze(-1)
    prior_mean = torch.zeros(FEATURES, 1, dtype=torch.float64)
    prior_precision = torch.eye(FEATURES, dtype=torch.float64)
    prior = BayesianLinearRegression.create(prior_mean, prior_precision, noise=NOISE**2)
    laws = [prior.posterior((x[:, :seen], y[:, :seen])).predict(x[:, seen]) for seen in range(x.shape[1])]
    means = torch.stack([law.mean.squeeze(-1) for law in laws], 1)
    variances = torch.stack([law.variance for law in laws], 1)
    return means, variances


def divergence(model: VectorTransformer, pairs: Pairs) -> Float64[Tensor, " L"]:
    """KL of the Gaussian law with the model's mean from the exact one, in nats, after 0 … L − 1 pairs; mean over contexts."""
    mean, variance = exact(pairs)
    with torch.no_grad():
        predictions = predict(model, pairs)
    return ((predictions - mean).square() / (2 * variance)).mean(0)
