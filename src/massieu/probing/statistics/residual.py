"""The residual connection: a point to start from, or a quadratic term? (claims S12, S22, experiment E8)

An attention layer adds Δ to the stream x. Shim reads it as a step along the gradient g of the heads' log-partitions, of which
x is the starting point; a Hopfield network's descent has the term −x as well. Here Δ is regressed on x and g, with one
coefficient each for all tokens of a layer; g is the gradient with respect to x, through the norm and all queries.
"""

from functools import partial

from massieu.probing.statistics.climb import attention_update, log_partition_gradient
from massieu.probing.statistics.group import SampledWindow
from massieu.probing.statistics.registry import RESIDUAL, SHIM, Register
from massieu.probing.statistics.regressions import (
    Products,
    RegressionGroup,
    RegressionMeasure,
    WindowSums,
    coefficient,
    explained,
    gain,
    random_like,
)
from massieu.probing.stream.wiring import Step

UPDATE, STREAM, GRADIENT = range(3)
"""Rows and columns of the inner products: the vectors of a token."""
REGISTER = Register[RegressionMeasure](RESIDUAL)
_of_update = partial(
    REGISTER.statistic,
    claim="S22, S12, E8",
    paper=SHIM,
    scope="layer",
    control="random",
    caveat="One coefficient is fitted for all tokens; if the step differs from token to token, the share is lower.",
)


@_of_update(
    "Coefficient of the update along the residual stream",
    formula="coefficient a of Δ ≈ a x + b g",
    signed=True,
)
def update_stream_coefficient(products: Products) -> WindowSums:
    """Does the layer subtract part of the state itself (below 0), as a quadratic term in the energy would?"""
    return coefficient(products, UPDATE, STREAM, [GRADIENT])


@_of_update("Share of the update along the residual stream", formula="held-out R² of Δ ≈ a x", signed=True)
def update_stream_share(products: Products) -> WindowSums:
    """How much of what the layer adds is a multiple of the state itself, with one coefficient for all tokens?"""
    return explained(products, UPDATE, [STREAM])


@_of_update(
    "Gain from the gradient of log Z", formula="held-out R² of Δ ≈ a x + b g, less that of a x alone", signed=True
)
def update_gradient_gain(products: Products) -> WindowSums:
    """How much more of the update does the gradient of the heads' log-partitions explain?"""
    return gain(products, UPDATE, [STREAM], GRADIENT)


PURPOSE = 200_000
"""Of the random numbers; each sublayer has its own purpose, this number plus its index."""


class ResidualGroup(RegressionGroup):
    """The update by attention, regressed on the stream itself and on the gradient of the heads' log-partitions."""

    name = RESIDUAL
    register = REGISTER

    def why_no_numbers(self) -> str:
        """Without queries there is no gradient."""
        return "the queries of no attention site could be followed back to the stream"

    def on_step(self, step: Step, window: SampledWindow) -> None:
        """Take the update of an attention step, and the gradient."""
        if step.read is None:
            return
        item = step.item(window.row)
        positions = window.positions(step)
        if item.read is None or not len(positions):
            return
        replay = window.replay(item, positions)
        if isinstance(replay, str):
            self.missing(item.read.call.site.name, RESIDUAL, replay)
            return
        stream = item.before[0, positions].double()
        update = attention_update(item.read, item)[0, positions].double()
        gradient = log_partition_gradient(replay, positions)[0].double()
        generator = window.drawn(PURPOSE + step.sublayer.index)
        control = (update, random_like(stream, generator), random_like(gradient, generator))
        self.regressions.collect(step.sublayer.index, window.number, (update, stream, gradient), control)
