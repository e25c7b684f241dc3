"""What makes softmax special among the ways from scores to weights? (E12, B18, B19, B22)"""

from collections.abc import Callable

from massieu.nn import (
    Attention,
    EntmaxHeads,
    NormalizedHeads,
    RandomFeatureHeads,
    ReLUHeads,
    SigmoidHeads,
    SoftmaxHeads,
)
from massieu.nn.strategy import Heads
from massieu.papers.experiments.arms import Arms
from massieu.papers.experiments.criterion import Criterion
from massieu.papers.experiments.study import Numbers, experiment
from massieu.papers.experiments.text import ReferenceText
from massieu.papers.experiments.transformer import Transformer, TransformerBlock

MARGIN = 0.05
_LENGTH, _WIDTH = 64, 64
_ARMS = {
    "sigmoid": ("the logistic function of each score", SigmoidHeads),
    "ratio": ("ReLU scores divided by their sum", ReLUHeads),
    "kernel": ("the ReLU-feature kernel divided by its sum", lambda: RandomFeatureHeads(kind="relu", features=32)),
    "entmax": ("1.5-entmax", EntmaxHeads),
    "normalised": ("standardised scores (mean 0, deviation 1)", NormalizedHeads),
}
"""Beside softmax: what each is in words, and its heads."""


_MADE: dict[str, Callable[[], Heads]] = {
    "softmax": SoftmaxHeads,
    "uniform": lambda: SoftmaxHeads(scale=1e-6),
    **{name: made for name, (_, made) in _ARMS.items()},
}


def _with(made: Callable[[], Heads]) -> Callable[[int, int], TransformerBlock]:
    return lambda width, number: TransformerBlock(
        width, number, lambda *_: Attention(width, number, batch_first=True, heads=made())
    )


def _arms(text: ReferenceText) -> Arms:
    models = {
        name: lambda made=made: Transformer(text.vocabulary, _LENGTH, width=_WIDTH, block=_with(made))
        for name, made in _MADE.items()
    }
    return Arms(text, models, dict.fromkeys(models, 1.2e-2) | {"ratio": 2.4e-2}, steps=600)


def _tune(seed: int, quick: bool) -> Numbers:
    return _arms(ReferenceText(_LENGTH)).tuned(seed, quick)


@experiment(
    "normaliser",
    question="Are other ways from scores to weights as good as softmax at equal parameters, to within 0.05 nats?",
    claims="E12, B18, B19, B22",
    minutes=18,
    tune=_tune,
    criteria=[
        *(
            Criterion(f"{name}_cost", f"loss with {words} − loss with softmax, nats", most=MARGIN)
            for name, (words, _) in _ARMS.items()
        ),
        Criterion(
            "softmax_over_pairs", "loss with softmax − loss of a bigram count model", most=-0.2, role="optimisation"
        ),
        Criterion("uniform_cost", "loss with equal weights − loss with softmax", most=MARGIN, role="control"),
    ],
)
def normaliser(seed: int, quick: bool) -> Numbers:
    """A causal transformer of two layers, 4 heads and width 64 (117,000 weights, none tied) predicts the next character
    of the reference text that ships with Python. Windows have 64 characters; training takes 600 steps of 32 windows.
    Arms differ in the map from scores to weights alone, and see the same windows, each with the step size that was best
    for it on seed 0. The comparison is after a short training, not at convergence.
    """
    text = ReferenceText(_LENGTH)
    arms = _arms(text)
    losses = {name: loss for name, (loss, _) in arms.losses(seed, quick).items()}
    return {
        **{f"{name}_loss": loss for name, loss in losses.items()},
        **{f"{name}_cost": losses[name] - losses["softmax"] for name in losses if name != "softmax"},
        "softmax_over_pairs": losses["softmax"] - text.pair_loss(seed),
    }
