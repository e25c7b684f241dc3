"""Groups for which some sampled windows are run again: in another order of their tokens, or with gradients."""

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from massieu.probing.capture.routes import capturing
from massieu.probing.capture.sites import SiteInfo
from massieu.probing.statistics.group import Event, SampledWindow
from massieu.probing.statistics.layer_groups import SublayerGroup
from massieu.probing.stream.wiring import Step, StreamTracer

FEWEST = 8
"""Tokens that can change their places, or that a token must see beside itself."""
PURPOSE = 300_000
"""Of random numbers."""
Sums = tuple[Float[Tensor, "statistics 2"], Float[Tensor, "statistics 2"]]
"""Totals and what they are divided by, of the model and of the control."""


class UnsuitableInputsError(Exception):
    """The question does not fit these inputs or this model, for the reason that it holds."""


class AgainGroup(SublayerGroup):
    """A group for which the first sampled windows are run again."""

    events = frozenset({Event.WINDOWS})
    windows: ClassVar[int]
    """How many of them."""
    _unsuitable: str | None = None

    @abstractmethod
    def measured(self, inputs: dict[str, Any], drawn: torch.Generator) -> dict[int, Sums]:
        """The sums of one window at every sublayer.

        Args:
            inputs: of this window alone, as the model is called with them.
            drawn: random numbers that belong to the window.

        Raises:
            UnsuitableInputsError: the question does not fit.
        """

    def on_window(self, window: SampledWindow) -> None:
        """Measure one window."""
        if window.number is not None and window.number >= self.windows:
            return
        try:
            found = self.measured(window.alone(), window.drawn(PURPOSE))
        except UnsuitableInputsError as reason:
            self._unsuitable = str(reason)
            return
        for index, (total, count) in found.items():
            self.means.add(index, total, count, window.number)

    def why_no_numbers(self) -> str:
        """Why the last window that did not fit gave no numbers."""
        return self._unsuitable or super().why_no_numbers()


def real_alone(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """One text without its padding, and with a mask of ones: without one, numbers of positions may be read as documents."""
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or "pixel_values" in inputs:
        return inputs
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        real = mask[0].bool()
        along = {k for k, v in inputs.items() if isinstance(v, Tensor) and v.shape == ids.shape}
        return {k: v[:, real] if k in along else v for k, v in inputs.items()}
    if mask is None and "attention_mask" in inspect.signature(model.forward).parameters:
        return inputs | {"attention_mask": torch.ones_like(ids)}
    return inputs


@contextmanager
def watching(model: nn.Module, sites: Sequence[SiteInfo], observer: Callable[[Step], None]) -> Iterator[None]:
    tracer = StreamTracer(model, list(sites), observer)
    with capturing(model, tracer.attention), tracer.watching():
        yield
