"""Groups for which some sampled windows are run again, alone: in another order of their tokens, or with gradients."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from massieu.foundation.patches import patch_size
from massieu.probing.capture.routes import capturing
from massieu.probing.capture.sites import SiteInfo
from massieu.probing.model.forward import output_tensor, run
from massieu.probing.model.signature import forward_signature
from massieu.probing.statistics.group import Event, SampledWindow, UnsuitableInputsError
from massieu.probing.statistics.layer_groups import SublayerGroup
from massieu.probing.stream.wiring import Step, StreamTracer

FEWEST = 8
"""Tokens that must be able to change their places, or that a token must see besides itself."""
PURPOSE = 300_000
"""Of the random numbers."""
ControlledSums = tuple[Float[Tensor, "statistics 2"], Float[Tensor, "statistics 2"]]
"""Totals and what they are divided by, of the model and of the control."""


class RerunGroup(SublayerGroup):
    """A group for which the first sampled windows are run again.

    Attributes:
        windows: how many of them.
    """

    events = frozenset({Event.WINDOWS})
    windows: ClassVar[int]
    _unsuitable: str | None = None

    @abstractmethod
    def measured(self, inputs: dict[str, Any], drawn: torch.Generator) -> dict[int, ControlledSums]:
        """The sums of one window at every sublayer.

        Args:
            inputs: of this window alone, as the model is called with them.
            drawn: random numbers that belong to the window.

        Raises:
            UnsuitableInputsError: the group's question does not fit them.
        """

    def on_window(self, window: SampledWindow) -> None:
        """Measure one window."""
        if window.number is not None and window.number >= self.windows:
            return
        try:
            sums = self.measured(window.alone(), window.drawn(PURPOSE))
        except UnsuitableInputsError as reason:
            self._unsuitable = str(reason)
            return
        for index, (total, count) in sums.items():
            self.means.add(index, total, count, window.number)

    def why_no_numbers(self) -> str:
        """Why the last unsuitable window gave no numbers; if none was, the usual reason."""
        return self._unsuitable or super().why_no_numbers()


def without_padding(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of one text without its padding, and with a mask of ones if the model takes masks.

    Without a mask, a model may take position numbers that start again for the beginning of another document.
    """
    ids = inputs.get("input_ids")
    mask = inputs.get("attention_mask")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or "pixel_values" in inputs:
        return inputs
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        real = mask[0].bool()
        return {
            name: value[:, real] if isinstance(value, Tensor) and value.shape == ids.shape else value
            for name, value in inputs.items()
        }
    if mask is None and "attention_mask" in forward_signature(model).parameters:
        return inputs | {"attention_mask": torch.ones_like(ids)}
    return inputs


def text_ids(inputs: dict[str, Any]) -> Int[Tensor, "B L"]:
    """The ids of a text.

    Raises:
        UnsuitableInputsError: the inputs are not the ids of one text.
    """
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or any(name.startswith("decoder_") for name in inputs):
        raise UnsuitableInputsError(
            "tokens can be reordered only if they are the ids of one text, or patches of an image"
        )
    return ids


def rearranged_text(inputs: dict[str, Any], source: Int[Tensor, " L"]) -> dict[str, Any]:
    """The inputs of a text with other tokens at its places: ``source`` says which of its tokens stands at each."""
    ids = text_ids(inputs)
    return inputs | {"input_ids": ids[:, source.to(ids.device)]}


def image_pixels(model: nn.Module, inputs: dict[str, Any]) -> tuple[Float[Tensor, "B channels height width"], int]:
    """The pixels of images, and the side of the model's patches.

    Raises:
        UnsuitableInputsError: the inputs are not images alone, or the model has no square patches of one size.
    """
    pixels = inputs["pixel_values"]
    size = patch_size(model)
    if "input_ids" in inputs or not isinstance(pixels, Tensor) or pixels.dim() != 4 or size is None:
        raise UnsuitableInputsError(
            "patches can be reordered only if a batch is of images alone, in square patches of one size"
        )
    return pixels, size


def stream_states(
    model: nn.Module, sites: Sequence[SiteInfo], inputs: dict[str, Any]
) -> tuple[Tensor, dict[int, Float[Tensor, "L D"]]]:
    """The model's output, and the stream after each of its steps by the sublayer's index, in float64."""
    states: dict[int, Tensor] = {}

    def collect(step: Step) -> None:
        if step.after.dim() == 3 and step.after.shape[0] == 1:
            states[step.sublayer.index] = step.after[0].detach().double()

    with torch.no_grad(), watching(model, sites, collect):
        return output_tensor(model, run(model, inputs)), states


@contextmanager
def watching(model: nn.Module, sites: Sequence[SiteInfo], observer: Callable[[Step], None]) -> Iterator[None]:
    """Call ``observer`` with every step of the stream of what runs inside."""
    tracer = StreamTracer(model, list(sites), observer)
    with capturing(model, tracer.attention), tracer.watching():
        yield
