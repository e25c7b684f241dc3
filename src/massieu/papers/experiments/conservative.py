"""What does it cost to tie a head's maps, so that its write is the gradient of its own log Z? (E12, B19, S3)"""

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from massieu import ops
from massieu.papers.experiments.arms import Arms
from massieu.papers.experiments.criterion import Criterion
from massieu.papers.experiments.study import Numbers, experiment
from massieu.papers.experiments.text import ReferenceText
from massieu.papers.experiments.transformer import MakeBlock, Transformer, TransformerBlock

MARGIN = 0.05
_LENGTH = 64
_WIDTH = 48
_HEAD_SIZE = 16
_NUM_HEADS = {"untied": 3, "values": 4, "outputs": 4, "all": 6}
"""The number of heads for each tie; all arms have the same number of weights."""


def tied_block(tie: str) -> MakeBlock:
    """Makes blocks of `TiedAttention`, whose number of heads follows from the tie."""

    def attention(width: int, heads: int) -> TiedAttention:
        return TiedAttention(width, tie)

    return partial(TransformerBlock, attention=attention)


def _arms(text: ReferenceText) -> Arms:
    blocks = {tie: tied_block(tie) for tie in _NUM_HEADS} | {"absent": partial(TransformerBlock, attention=None)}
    models = {
        name: partial(Transformer, text.vocabulary, _LENGTH, width=_WIDTH, block=block)
        for name, block in blocks.items()
    }
    step_sizes = dict.fromkeys(models, 1.2e-2) | {"all": 2.4e-2}
    return Arms(text, models, step_sizes, steps=800)


def _tune(seed: int, quick: bool) -> Numbers:
    return _arms(ReferenceText(_LENGTH)).tune(seed, quick)


@experiment(
    "conservative",
    question="Can a head's maps be tied, so that its write is the gradient of its log Z, at a cost below 0.05 nats?",
    claims="E12, B19, S3",
    minutes=7,
    tune=_tune,
    criteria=[
        Criterion("all_cost", "loss with both ties (the gradient of log Z) − loss untied, nats", most=MARGIN),
        Criterion("values_cost", "loss with values = keys − loss untied", most=MARGIN),
        Criterion("outputs_cost", "loss with output map = transposed query map − loss untied", most=MARGIN),
        Criterion("untied_over_pairs", "loss untied − loss of a bigram count model", most=-0.2, role="optimisation"),
        Criterion("absent_cost", "loss without attention − loss untied", most=MARGIN, role="control"),
    ],
)
def conservative(seed: int, quick: bool) -> Numbers:
    """A causal transformer of two layers and width 48 predicts the next character of the reference text that ships with
    Python, from windows of 64, after 800 steps of 32 windows. Untied heads have four maps. They have three with values
    = keys, and three with the transposed query map as output map. With both ties they have two, and then the write is ∇
    log Z of its head (S3). Arms have 3, 4, 4 and 6 heads of size 16, and so equally many weights. All arms of a seed
    see the same windows, each with the step size that was best for it on seed 0.
    """
    text = ReferenceText(_LENGTH)
    losses = _arms(text).losses(seed, quick)
    return {
        **{f"{name}_loss": loss for name, loss in losses.items()},
        **{f"{name}_cost": loss - losses["untied"] for name, loss in losses.items() if name != "untied"},
        "untied_over_pairs": losses["untied"] - text.pair_loss(seed),
    }


class TiedAttention(nn.Module):
    """Softmax attention whose values are its keys, or whose outputs go through its queries' map, or both, or neither."""

    def __init__(self, width: int, tie: str) -> None:
        super().__init__()
        inner = _NUM_HEADS[tie] * _HEAD_SIZE
        self.query = nn.Linear(width, inner, bias=False)
        self.key = nn.Linear(width, inner, bias=False)
        self.value = None if tie in ("values", "all") else nn.Linear(width, inner, bias=False)
        self.out = None if tie in ("outputs", "all") else nn.Linear(inner, width, bias=False)
        self.gain = nn.Parameter(torch.ones(_NUM_HEADS[tie], 1, 1))

    def forward(
        self, query: Float[Tensor, "B L D"], key: Tensor, value: Tensor, *, need_weights: bool, is_causal: bool
    ) -> tuple[Tensor, None]:
        queries, keys = self.queries_and_keys(query)
        values = keys if self.value is None else self._split_heads(self.value(value))
        output = ops.attention(queries, keys, values, is_causal=is_causal).output * self.gain
        joined = output.transpose(1, 2).flatten(2)  # (B, L, I)
        if self.out is None:
            return joined @ self.query.weight, None
        return self.out(joined), None

    def queries_and_keys(self, tokens: Float[Tensor, "B L D"]) -> tuple[Tensor, Tensor]:
        """Queries and keys of each head, (B, H, L, d)."""
        return self._split_heads(self.query(tokens)), self._split_heads(self.key(tokens))

    def _split_heads(self, tokens: Float[Tensor, "B L I"]) -> Float[Tensor, "B H L d"]:
        return tokens.unflatten(-1, (-1, _HEAD_SIZE)).transpose(1, 2)
