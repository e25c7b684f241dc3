"""Does a small transformer predict a linear regression in its context as the exact posterior does? (E16, Z2, Z4)"""

import torch
from jaxtyping import Float64
from torch import Tensor

from massieu.papers.experiments.criterion import Criterion
from massieu.papers.experiments.descriptions import described
from massieu.papers.experiments.in_context import Pairs, predicted, trained
from massieu.papers.experiments.study import Numbers, experiment
from massieu.papers.experiments.transformer import VectorTransformer
from massieu.posteriors import BayesianLinearRegression

FEATURES, LENGTH, NOISE = 2, 16, 0.5
_CONTEXTS, _STEPS, _MOST = 128, 6000, 0.01
_SHOWN = (1, 2, 3, 4, 5, 6, 8, 15)


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
        *described({f"kl_{pairs}": f"KL after {pairs} pair{'s' * (pairs > 1)}" for pairs in _SHOWN}),
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
    drawn = torch.Generator().manual_seed(seed)
    steps = 30 if quick else _STEPS
    batch = lambda: sample(_CONTEXTS, LENGTH, drawn)  # noqa: E731
    options = {"depth": 3, "step_size": 4e-3}
    model = trained(batch, drawn, steps=steps, **options)
    controls = {
        "shuffled": trained(batch, drawn, steps=steps // 10, shuffled=True, **options),
        "without": trained(batch, drawn, steps=steps // 10, with_attention=False, **options),
    }
    features, targets = sample(1024 if quick else 8192, 2 * LENGTH, drawn)
    own = divergence(model, (features, targets))
    shown, trained_lengths = own[:LENGTH], (features[:, :LENGTH], targets[:, :LENGTH])
    return {
        "largest": float(shown.max()),
        "excess_risk": float(shown.mean()),
        "worst": float(shown.argmax()),
        "failing": float((shown > _MOST).sum()),
        "longer": float(own[-1]),
        **{name: float(divergence(control, trained_lengths).max()) for name, control in controls.items()},
        **{f"kl_{pairs}": kl for pairs, kl in enumerate(shown.tolist())},
    }


def sample(contexts: int, length: int, drawn: torch.Generator) -> Pairs:
    """Each context has its own latent."""
    features = torch.randn(contexts, length, FEATURES, generator=drawn)
    latent = torch.randn(contexts, 1, FEATURES, generator=drawn)
    noise = NOISE * torch.randn(contexts, length, generator=drawn)
    return features, (features * latent).sum(-1) + noise


def exact(pairs: Pairs) -> tuple[Float64[Tensor, "B L"], Float64[Tensor, "B L"]]:
    """Mean and variance of each target given its features and the pairs before it."""
    x, y = pairs[0].double(), pairs[1].double().unsqueeze(-1)
    zero, one = torch.zeros(FEATURES, 1, dtype=torch.float64), torch.eye(FEATURES, dtype=torch.float64)
    prior = BayesianLinearRegression.create(zero, one, noise=NOISE**2)
    laws = [prior.posterior((x[:, :seen], y[:, :seen])).predict(x[:, seen]) for seen in range(x.shape[1])]
    return torch.stack([law.mean.squeeze(-1) for law in laws], 1), torch.stack([law.variance for law in laws], 1)


def divergence(model: VectorTransformer, pairs: Pairs) -> Float64[Tensor, " L"]:
    """KL of the Gaussian law with the model's mean from the exact one, in nats, after 0 … L − 1 pairs; mean over contexts."""
    mean, variance = exact(pairs)
    with torch.no_grad():
        found = predicted(model, pairs)
    return ((found - mean).square() / (2 * variance)).mean(0)
