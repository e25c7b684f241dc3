"""Does the model's state depend on its context only through the counts of the tokens? (claim Z2)

If tokens are exchangeable, the counts of the context's tokens are a sufficient statistic of the latent, and so the posterior is
a function of the counts. A model whose state is that posterior gives one state to all contexts with equal counts.

The last tokens of a window, the readers, keep their places. The tokens before them, the context, are changed in two ways:
they are put in another order, which leaves the counts as they are, or drawn from the context with replacement, which changes
the counts as another sample of this length would, and the order too. The states of the readers are compared with those in the
window as it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from massieu.foundation.patches import num_patches, rearranged_patches
from massieu.probing.capture.sites import SiteInfo
from massieu.probing.model.precision import tolerance
from massieu.probing.statistics.registry import SUFFICIENCY, ZHANG, Register
from massieu.probing.statistics.rerun import (
    FEWEST,
    ControlledSums,
    RerunGroup,
    image_pixels,
    rearranged_text,
    stream_states,
    text_ids,
    without_padding,
)

READERS = 8
"""Tokens whose states are compared."""


@dataclass(frozen=True, eq=False)
class ReaderStates:
    """The readers' states after one step of the stream.

    Attributes:
        window: in the window as it is.
        equal_counts: with the context in another order.
        other_counts: with another sample of the context's tokens.
    """

    window: Float[Tensor, "readers D"]
    equal_counts: Float[Tensor, "readers D"]
    other_counts: Float[Tensor, "readers D"]

    @property
    def order_change(self) -> Float[Tensor, ""]:
        """Squared change where the counts stay."""
        return (self.window - self.equal_counts).square().sum()

    @property
    def counts_change(self) -> Float[Tensor, ""]:
        """Squared change where the counts change."""
        return (self.window - self.other_counts).square().sum()

    @property
    def spread(self) -> Float[Tensor, ""]:
        """Squared distance of each reader from the next one, the last from the first."""
        return (self.window - self.window.roll(1, 0)).square().sum()


REGISTER = Register[Callable[[ReaderStates], tuple[Tensor, Tensor]]](SUFFICIENCY)


@REGISTER.statistic(
    "Sufficiency gap",
    formula="Σ‖x_i − x'_i‖² / Σ‖x_i − x''_i‖², x' with the context in another order, x'' with a resample of it",
    claim="Z2",
    paper=ZHANG,
    scope="layer",
    caveat="Random weights, whose attention is nearly uniform, have a small gap too. Counts are sufficient if tokens are "
    "exchangeable, which words of a text are not.",
    scale="positive",
)
def sufficiency_gap(states: ReaderStates) -> tuple[Tensor, Tensor]:
    """How far does a state move if the context's counts stay, relative to a context with other counts?"""
    return states.order_change, states.counts_change


@REGISTER.statistic(
    "Move under equal counts",
    formula="Σ‖x_i − x'_i‖² / Σ‖x_i − x_j‖², x' with the context in another order, j another of the last tokens",
    claim="Z2",
    paper=ZHANG,
    scope="layer",
    caveat="A few tokens of huge norm can decide it.",
    scale="positive",
)
def equal_counts_move(states: ReaderStates) -> tuple[Tensor, Tensor]:
    """How far does a state move if the context is reordered, relative to how much states differ?"""
    return states.order_change, states.spread


@REGISTER.statistic(
    "Move under other counts",
    formula="Σ‖x_i − x''_i‖² / Σ‖x_i − x_j‖², x'' with a resample of the context, j another of the last tokens",
    claim="Z2",
    paper=ZHANG,
    scope="layer",
    caveat="The resample also changes the order; a few tokens of huge norm can decide it.",
    scale="positive",
)
def other_counts_move(states: ReaderStates) -> tuple[Tensor, Tensor]:
    """How far does a state move if the context is drawn anew from its own tokens, relative to how much states differ?"""
    return states.counts_change, states.spread


@dataclass(frozen=True, eq=False)
class ContextPair:
    """A window with two other contexts.

    Attributes:
        equal_counts: inputs of the model with the context in another order.
        other_counts: inputs of the model with a resample of the context.
        num_tokens: how many tokens the window has; these are the last ones of the stream.
        readers: their places among these tokens.
    """

    equal_counts: dict[str, Any]
    other_counts: dict[str, Any]
    num_tokens: int
    readers: Int[Tensor, " readers"]

    def reader_states(self, states: Float[Tensor, "L D"]) -> Float[Tensor, "readers D"] | None:
        """The readers' states; None where the stream has too few tokens."""
        num_before = len(states) - self.num_tokens
        if num_before < 0:
            return None
        return states[num_before + self.readers.to(states.device)]


def sufficiency_sums(
    model: nn.Module, sites: Sequence[SiteInfo], inputs: dict[str, Any], drawn: torch.Generator
) -> dict[int, ControlledSums]:
    """The sums of the three statistics at every sublayer whose readers the context moves.

    Raises:
        UnsuitableInputsError: the tokens cannot be put in another order.
    """
    inputs = without_padding(model, inputs)
    if "pixel_values" in inputs:
        pair = _image_contexts(model, inputs, drawn)
    else:
        pair = _text_contexts(inputs, drawn)
    if pair is None:
        return {}
    window_states = stream_states(model, sites, inputs)[1]
    equal_states = stream_states(model, sites, pair.equal_counts)[1]
    other_states = stream_states(model, sites, pair.other_counts)[1]
    rounding = tolerance(_dtype(model))
    sums: dict[int, ControlledSums] = {}
    for index in window_states:
        of_readers = [pair.reader_states(states[index]) for states in (window_states, equal_states, other_states)]
        window, equal_counts, other_counts = of_readers
        if window is None or equal_counts is None or other_counts is None:
            continue
        states = ReaderStates(window, equal_counts, other_counts)
        # Before the first attention, readers see no context: they move by rounding, or not at all.
        # A NaN is no small move: it is counted, and shows.
        if bool(states.counts_change <= rounding**2 * window.square().sum()):
            continue
        total, count = torch.zeros(2, len(REGISTER.functions), 2, dtype=torch.float64)
        for place, statistic in enumerate(REGISTER.functions.values()):
            total[place, 0], count[place, 0] = statistic(states)
        sums[index] = total, count
    return sums


def _text_contexts(inputs: dict[str, Any], drawn: torch.Generator) -> ContextPair | None:
    """Contexts between the first token, which may be special, and the last ones; None if there are too few tokens."""
    ids = text_ids(inputs)
    length = ids.shape[1]
    context = torch.arange(1, max(length - READERS, 1))
    sources = _sources(length, context, drawn)
    if sources is None:
        return None
    reordered, resampled = sources
    readers = torch.arange(length - READERS, length)
    return ContextPair(rearranged_text(inputs, reordered), rearranged_text(inputs, resampled), length, readers)


def _image_contexts(model: nn.Module, inputs: dict[str, Any], drawn: torch.Generator) -> ContextPair | None:
    """Readers are patches at random places, since the last ones are a corner; None if there are too few patches."""
    pixels, size = image_pixels(model, inputs)
    length = num_patches(pixels, size)
    places = torch.randperm(length, generator=drawn)
    readers = places[:READERS].sort().values
    context = places[READERS:].sort().values
    sources = _sources(length, context, drawn)
    if sources is None:
        return None
    reordered, resampled = (
        inputs | {"pixel_values": rearranged_patches(pixels, size, source.to(pixels.device))} for source in sources
    )
    return ContextPair(reordered, resampled, length, readers)


def _sources(
    length: int, context: Int[Tensor, " C"], drawn: torch.Generator
) -> tuple[Int[Tensor, " L"], Int[Tensor, " L"]] | None:
    """For each place the token that is put there: the context in another order, and drawn with replacement."""
    if len(context) < FEWEST:
        return None
    reordered = torch.arange(length)
    reordered[context] = context[torch.randperm(len(context), generator=drawn)]
    resampled = torch.arange(length)
    resampled[context] = context[torch.randint(len(context), (len(context),), generator=drawn)]
    return reordered, resampled


def _dtype(model: nn.Module) -> torch.dtype:
    """The type in which the model computes: that of its first weight."""
    return next((each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32)


class SufficiencyGroup(RerunGroup):
    """How far states move under contexts with equal counts, beside contexts with other counts."""

    name = SUFFICIENCY
    register = REGISTER
    windows = 16

    def measured(self, inputs: dict[str, Any], drawn: torch.Generator) -> dict[int, ControlledSums]:
        """The sums of one window, with the context in another order and with a resample of it."""
        return sufficiency_sums(self.model.model, self.model.sites, inputs, drawn)
