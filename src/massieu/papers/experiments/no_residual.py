"""Blocks that keep a part of their input, or none: the effect of an explicit −γx. (E8, S22)"""

from functools import partial

from massieu.papers.experiments.arms import Arms
from massieu.papers.experiments.descriptions import described
from massieu.papers.experiments.study import Numbers, experiment
from massieu.papers.experiments.text import ReferenceText
from massieu.papers.experiments.transformer import Transformer, TransformerBlock

_LENGTH = 48
_WIDTH = 48
_STEPS = 300
_RESIDUAL_SCALES = {"all": 1.0, "nine_tenths": 0.9, "half": 0.5, "none": 0.0, "reversed": -1.0}


@experiment(
    "no-residual",
    question="What does it cost a block to keep only a part of its input, x ↦ (1 − γ)x + write?",
    claims="E8, S22",
    minutes=4,
    criteria=described(
        {f"{name}_loss": f"loss with {scale:g}·x kept, nats" for name, scale in _RESIDUAL_SCALES.items()}
    ),
)
def no_residual(seed: int, quick: bool) -> Numbers:
    """A causal transformer of four layers and width 48 predicts the next character of the reference text that ships
    with Python, from windows of 48, after 300 steps of 32 windows of step size 0.006. Arms differ in what is left of
    the input before a write is added, at both sums of each block. 1 is a transformer, 1 − γ has the explicit term of
    S22, −1 reverses its sign.
    """
    text = ReferenceText(_LENGTH)
    models = {
        name: partial(
            Transformer,
            text.vocabulary,
            _LENGTH,
            width=_WIDTH,
            depth=4,
            block=partial(TransformerBlock, residual_scale=scale),
        )
        for name, scale in _RESIDUAL_SCALES.items()
    }
    losses = Arms(text, models, dict.fromkeys(models, 6e-3), steps=_STEPS).losses(seed, quick)
    return {f"{name}_loss": loss for name, loss in losses.items()}
