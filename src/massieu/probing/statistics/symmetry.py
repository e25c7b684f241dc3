"""How far is the model from treating its tokens as a set? (claim Z14)

A transformer is a function of the set of pairs (token, position) as far as its masks allow. The tokens of a window are put in
another order, while positions stay where they are. A token's state in one order is compared with its state in the other, in
units of how much the states of different tokens differ. The gap is 0 where the order does not matter, and 1 where a token in
the other order is like any other token. In the control the position numbers move with their tokens. A model whose tokens all
see each other must then give the same states, and what is left shows its mask.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from massieu.foundation.patches import num_patches, rearranged_patches
from massieu.probing.capture.sites import SiteInfo
from massieu.probing.model.precision import relative_difference, tolerance
from massieu.probing.model.signature import forward_signature
from massieu.probing.statistics.registry import SYMMETRY, ZHANG, Register
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

_POSITIONS = "position_ids"
REGISTER = Register[Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]](SYMMETRY)


@REGISTER.statistic(
    "Permutation gap",
    formula="Σ‖x_i − x'_i‖² / Σ‖x_i − x_j‖², x' the states in another order, j another token of the window",
    claim="Z14",
    paper=ZHANG,
    scope="layer",
    control="moved_positions",
    caveat="One random order of each window is tried; a few tokens of huge norm can decide it.",
    scale="positive",
)
def permutation_gap(
    states: Float[Tensor, "T D"], reordered: Float[Tensor, "T D"], other_token: Int[Tensor, " T"]
) -> tuple[Tensor, Tensor]:
    """How much do the states change when the tokens are reordered, relative to how much tokens differ?"""
    return (states - reordered).square().sum(), (states - states[other_token]).square().sum()


@dataclass(frozen=True, eq=False)
class Reordered:
    """A window whose tokens stand in another order.

    Attributes:
        inputs: of the model, with the tokens moved.
        order: the token at each place, among the tokens that can be moved; these are the last ones of the stream.
        most_before: how many other tokens may stand before them, such as one for the class.
    """

    inputs: dict[str, Any]
    order: Int[Tensor, " T"]
    most_before: int

    def in_first_order(self, states: Float[Tensor, "L D"], moved: bool) -> Float[Tensor, "T D"] | None:
        """The movable tokens' states in the first order; None where the stream has other tokens.

        Args:
            moved: whether the states are of the reordered window.
        """
        before = len(states) - len(self.order)
        if not 0 <= before <= self.most_before:
            return None
        return states[before:][self.order.argsort()] if moved else states[before:]


def permutation_gaps(
    model: nn.Module, sites: Sequence[SiteInfo], inputs: dict[str, Any], drawn: torch.Generator
) -> dict[int, ControlledSums]:
    """The sums of the permutation gap at every sublayer.

    Raises:
        UnsuitableInputsError: the tokens cannot be put in another order.
    """
    inputs = without_padding(model, inputs)
    if "pixel_values" in inputs:
        reordered = _reordered_images(model, inputs, drawn)
    else:
        reordered = _reordered_text(inputs, drawn)
    if len(reordered.order) < FEWEST:
        return {}
    output, states = stream_states(model, sites, inputs)
    # With positions that stay, and for the control with positions that move along.
    reordered_states = [stream_states(model, sites, reordered.inputs)[1]]
    positions = _positions(model, sites, inputs, output) if "input_ids" in inputs else None
    if positions is not None:
        with_positions = reordered.inputs | {_POSITIONS: positions[:, reordered.order]}
        reordered_states.append(stream_states(model, sites, with_positions)[1])
    # One and the same shift pairs each token with another one.
    shift = int(torch.randint(1, len(reordered.order), (), generator=drawn))
    other_token = torch.arange(len(reordered.order)).roll(shift)
    sums: dict[int, ControlledSums] = {}
    for index, layer_states in states.items():
        total, count = torch.zeros(2, 1, 2, dtype=torch.float64)
        first = reordered.in_first_order(layer_states, moved=False)
        for side, moved_states in enumerate(reordered_states):
            second = reordered.in_first_order(moved_states[index], moved=True)
            if first is not None and second is not None:
                total[0, side], count[0, side] = permutation_gap(first, second, other_token.to(first.device))
        if bool((count > 0).any()):
            sums[index] = total, count
    return sums


def _reordered_text(inputs: dict[str, Any], drawn: torch.Generator) -> Reordered:
    length = text_ids(inputs).shape[1]
    order = torch.arange(length)
    order[1:-1] = 1 + torch.randperm(max(length - 2, 0), generator=drawn)  # special tokens stay at both ends
    return Reordered(rearranged_text(inputs, order), order.to(inputs["input_ids"].device), 0)


def _reordered_images(model: nn.Module, inputs: dict[str, Any], drawn: torch.Generator) -> Reordered:
    pixels, size = image_pixels(model, inputs)
    order = torch.randperm(num_patches(pixels, size), generator=drawn).to(pixels.device)
    return Reordered(inputs | {"pixel_values": rearranged_patches(pixels, size, order)}, order, FEWEST)


def _positions(
    model: nn.Module, sites: Sequence[SiteInfo], inputs: dict[str, Any], model_output: Tensor
) -> Int[Tensor, "1 L"] | None:
    """The position numbers that the model gives by itself; None where it takes none, or they are not found.

    Models count from 0, or from the padding token's id plus 1: the numbers that reproduce the model's output are right.
    """
    if _POSITIONS in inputs:
        return inputs[_POSITIONS]
    if _POSITIONS not in forward_signature(model).parameters:
        return None
    ids = inputs["input_ids"]
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    for first in (0, *([] if padding is None else [int(padding) + 1])):
        numbers = torch.arange(ids.shape[1], device=ids.device)[None] + first
        try:
            output, _ = stream_states(model, sites, inputs | {_POSITIONS: numbers})
        except IndexError:  # more positions than there are vectors
            continue
        if relative_difference(output, model_output) <= tolerance(model_output.dtype):
            return numbers
    return None


class SymmetryGroup(RerunGroup):
    """How much the states change when a window's tokens stand in another order."""

    name = SYMMETRY
    register = REGISTER
    windows = 16

    def measured(self, inputs: dict[str, Any], drawn: torch.Generator) -> dict[int, ControlledSums]:
        """The sums with the tokens in another order: with positions that stay, and with positions that move along."""
        return permutation_gaps(self.model.model, self.model.sites, inputs, drawn)
