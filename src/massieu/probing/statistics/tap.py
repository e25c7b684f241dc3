"""Is the feed-forward layer a correction of the mean field? (claims B13, B14, experiment E11)

In the mean field of Thouless, Anderson and Palmer (TAP), each spin feels the field of the others, Σ_j J_ij m_j, and the
others' reaction to itself, −m_i Σ_j J_ij² χ_j. Read on a transformer, J is the attention of the layer, and the reaction is
what the feed-forward layer adds to a token. Spins that are vectors of fixed length have one χ, so the term is m_i Σ_j J_ij²,
and only its coefficient is free. J is the mean of the heads' weights; m is the stream.
"""

from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from massieu.probing.statistics.group import ModelReading, SampledWindow
from massieu.probing.statistics.head_window import HeadWindow
from massieu.probing.statistics.registry import BAL, TAP, Register
from massieu.probing.statistics.regressions import (
    Products,
    RegressionGroup,
    RegressionMeasure,
    WindowSums,
    coefficient,
    explained,
    gain,
)
from massieu.probing.stream.wiring import AttentionRead, Step

UPDATE, STREAM, REACTION = range(3)
"""Rows and columns of the inner products: the vectors of a token."""
REGISTER = Register[RegressionMeasure](TAP)
_of_update = partial(
    REGISTER.statistic,
    claim="B13, B14, E11",
    paper=BAL,
    scope="layer",
    control="permuted_couplings",
    signed=True,
    caveat="The reaction term assumes spins of one susceptibility; for Gaussian spins it cancels, so none is expected (B14).",
)


@_of_update("Gain from the reaction term", formula="held-out R² of f ≈ a m + b m Σ_j J_ij², less that of a m alone")
def reaction_gain(products: Products) -> WindowSums:
    """How much more of the feed-forward update does the Onsager reaction, from squared attention weights, explain?"""
    return gain(products, UPDATE, [STREAM], REACTION)


@_of_update("Coefficient of the reaction term", formula="b of f ≈ a m + b m Σ_j J_ij²")
def reaction_coefficient(products: Products) -> WindowSums:
    """Does the feed-forward update subtract the reaction (below 0), as the TAP mean field does?"""
    return coefficient(products, UPDATE, REACTION, [STREAM])


@_of_update("Share of the feed-forward update along the state", formula="held-out R² of f ≈ a m", control=None)
def feed_forward_stream_share(products: Products) -> WindowSums:
    """How much of the feed-forward update is a multiple of the state itself, with one coefficient for all tokens?"""
    return explained(products, UPDATE, [STREAM])


PURPOSE = 200_000
"""Of the random numbers; each sublayer has its own purpose, this number plus its index."""
OTHER_TOKENS = "the queries are not the stream's tokens one for one, as where attention works in windows of an image"


class _AttentionStep(NamedTuple):
    """The last attention step of one row: its layer, positions of queries, and Σ_j J_ij² at each."""

    layer: int | None
    positions: Int[Tensor, " S"]
    squared_weights: Float[Tensor, " S"]


class TapGroup(RegressionGroup):
    """What a feed-forward layer adds, regressed on the stream and on the reaction from squared attention weights."""

    name = TAP
    register = REGISTER

    def begin(self, model: ModelReading) -> None:
        """No attention step was seen yet."""
        super().begin(model)
        self._attention_steps: dict[int, _AttentionStep] = {}  # by row of the batch
        self._other_tokens = False

    def why_no_numbers(self) -> str:
        """The weights have to be of the stream's tokens, and of the same layer."""
        if self._other_tokens:
            return OTHER_TOKENS
        return "no feed-forward step was seen after an attention step of the same layer"

    def after_pass(self) -> None:
        """Forget the rows of the batch."""
        self._attention_steps.clear()

    def on_step(self, step: Step, window: SampledWindow) -> None:
        """Keep the weights of an attention step, and take the update of the feed-forward step behind it."""
        positions = window.positions(step)
        if step.read is not None and step.sublayer.kind == "attention":
            query = step.read.call.query
            if (query.shape[0], query.shape[2]) != step.before.shape[:2]:
                self._other_tokens = True
                return
            squared_weights = _squared_weights(step.read, window.row, positions)
            self._attention_steps[window.row] = _AttentionStep(step.sublayer.layer, positions, squared_weights)
        attention = self._attention_steps.get(window.row)
        if step.sublayer.kind != "feed_forward" or attention is None or attention.layer != step.sublayer.layer:
            return
        if not len(positions) or not torch.equal(attention.positions, positions):
            return
        stream = step.before[window.row, positions].double()
        update = step.after[window.row, positions].double() - stream
        # The control permutes Σ_j J_ij² among the tokens.
        order = torch.randperm(len(positions), generator=window.drawn(PURPOSE + step.sublayer.index))
        permuted = attention.squared_weights[order.to(attention.squared_weights.device)]
        model_vectors = (update, stream, stream * attention.squared_weights[:, None])
        control_vectors = (update, stream, stream * permuted[:, None])
        self.regressions.collect(step.sublayer.index, window.number, model_vectors, control_vectors)


def _squared_weights(read: AttentionRead, row: int, positions: Int[Tensor, " S"]) -> Float[Tensor, " S"]:
    """Σ_j J_ij² at some positions, J the mean of the heads' weights."""
    call = read.item(row).call
    all_keys = torch.ones(call.key.shape[2], dtype=torch.bool, device=call.key.device)
    return HeadWindow(call, all_keys, positions, 0).weights().mean(0).square().sum(-1).double()
