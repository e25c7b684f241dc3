"""What makes softmax special among the ways from scores to weights? (E12, B18, B19, B22)"""

from collections.abc import Callable
from functools import partial

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
from massieu.papers.experiments.transformer import MakeBlock, Transformer, TransformerBlock

MARGIN = 0.05
_LENGTH = 64
_WIDTH = 64
_TITLES = {
    "sigmoid": "the logistic function of each score",
    "ratio": "ReLU scores divided by their sum",
    "kernel": "the ReLU-feature kernel divided by its sum",
    "entmax": "1.5-entmax",
    "normalised": "standardised scores (mean 0, deviation 1)",
}
"""The arms that are compared with softmax, in words."""
_HEADS: dict[str, Callable[[], Heads]] = {
    "softmax": SoftmaxHeads,
    "uniform": partial(SoftmaxHeads, scale=1e-6),
    "sigmoid": SigmoidHeads,
    "ratio": ReLUHeads,
    "kernel": partial(RandomFeatureHeads, kind="relu", features=32),
    "entmax": EntmaxHeads,
    "normalised": NormalizedHeads,
}


def _block_with(make_heads: Callable[[], Heads]) -> MakeBlock:
    def attention(width: int, heads: int) -> Attention:
        return Attention(width, heads, batch_first=True, heads=make_heads())

    return partial(TransformerBlock, attention=attention)


def _arms(text: ReferenceText) -> Arms:
    models = {
        name: partial(Transformer, text.vocabulary, _LENGTH, width=_WIDTH, block=_block_with(make_heads))
        for name, make_heads in _HEADS.items()
    }
    step_sizes = dict.fromkeys(models, 1.2e-2) | {"ratio": 2.4e-2}
    return Arms(text, models, step_sizes, steps=600)


def _tune(seed: int, quick: bool) -> Numbers:
    return _arms(ReferenceText(_LENGTH)).tune(seed, quick)


@experiment(
    "normaliser",
    question="Are other ways from scores to weights as good as softmax at equal parameters, to within 0.05 nats?",
    claims="E12, B18, B19, B22",
    minutes=18,
    tune=_tune,
    criteria=[
        *(
            Criterion(f"{name}_cost", f"loss with {title} − loss with softmax, nats", most=MARGIN)
            for name, title in _TITLES.items()
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
    losses = _arms(text).losses(seed, quick)
    return {
        **{f"{name}_loss": loss for name, loss in losses.items()},
        **{f"{name}_cost": loss - losses["softmax"] for name, loss in losses.items() if name != "softmax"},
        "softmax_over_pairs": losses["softmax"] - text.pair_loss(seed),
    }
