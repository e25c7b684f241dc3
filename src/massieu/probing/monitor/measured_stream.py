"""The residual stream behind each layer, measured as it leaves the layer's block."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from massieu.probing.capture.attention_call import AttentionSite
from massieu.probing.capture.capture import recomputing
from massieu.probing.capture.sites import SiteInfo
from massieu.probing.capture.tokens import BatchTokens, drawn_for, is_sampled
from massieu.probing.checks.check import FirstLook
from massieu.probing.model.forward import decoder_given
from massieu.probing.model.precision import Cloud, computed_in
from massieu.probing.model.watching import hooked
from massieu.probing.monitor.extreme_activations import extreme_tokens
from massieu.probing.monitor.places import layer_place
from massieu.probing.monitor.stream_numbers import StreamNumbers, stream_numbers

CLOUD = 64  # tokens of a window whose spread is measured
_FOR_CLOUD = 0
_FOR_EXTREMES = 1
"""Purposes for which positions are drawn."""


@dataclass(eq=False)
class _Block:
    """A module behind which the stream is measured, with what attends in it.

    Attributes:
        layers: names of the layers that the module is, one for each of its calls in a pass.
        sites: its attention.
    """

    layers: list[str] = field(default_factory=list)
    sites: list[SiteInfo] = field(default_factory=list)


class MeasuredStream:
    """The stream behind each layer: clouds of tokens of sampled windows, and how many tokens have extreme activations.

    Args:
        names: each site's place in records.
        extreme_activations: whether to count tokens with extreme activations.
        first_row: number of the first pass's first row in the whole batch.
    """

    def __init__(
        self, look: FirstLook, names: Mapping[AttentionSite, str], extreme_activations: bool, first_row: int
    ) -> None:
        self._look = look
        self._names = names
        self._extreme_activations = extreme_activations
        self._first_row = first_row
        self._num_rows: int | None = None
        self._clouds: dict[str, list[Cloud]] = {}  # by layer
        self._extremes: dict[str, StreamNumbers] = {}

    def begin(self, inputs: dict[str, Any], tokens: BatchTokens, num_rows: int | None) -> None:
        """A forward pass begins, whose rows follow those of the pass before; None where it is not known how many."""
        self._first_row += self._num_rows or 0
        self._num_rows = num_rows
        self._tokens = tokens
        self._decoder_given = decoder_given(inputs)
        self._visits = Counter[nn.Module]()

    @contextmanager
    def hooks(self, model: nn.Module) -> Iterator[None]:
        """Measure what leaves the blocks inside."""
        self._blocks = self._blocks_of(model)
        with hooked(self._blocks, after=self._leave_block):
            yield

    def _blocks_of(self, model: nn.Module) -> dict[nn.Module, _Block]:
        modules = dict(model.named_modules())
        blocks: dict[nn.Module, _Block] = {}
        for info in self._look.sites:
            if info.block not in modules:  # of a model that has changed
                continue
            block = blocks.setdefault(modules[info.block], _Block())
            block.sites.append(info)
            layer = layer_place(self._names[info.site], info)
            if layer not in block.layers:
                block.layers.append(layer)
        return blocks

    @torch.no_grad()
    def _leave_block(self, module: nn.Module, _: Any, __: Any, output: Any) -> None:
        if recomputing():
            return
        block = self._blocks[module]
        visit = self._visits[module]
        self._visits[module] += 1
        state = output[0] if isinstance(output, tuple) else output
        if not isinstance(state, Tensor) or state.dim() != 3 or visit >= len(block.layers):
            return
        if any(info.tokens_first for info in block.sites):
            state = state.transpose(0, 1)
        if self._num_rows is None or state.shape[0] != self._num_rows:
            return
        in_decoder = any(info.in_decoder for info in block.sites) and self._decoder_given
        for row in range(self._num_rows):
            self._measure_row(block.layers[visit], state[row], row, in_decoder)

    def _measure_row(self, layer: str, state: Float[Tensor, "L D"], row: int, in_decoder: bool) -> None:
        # The row's number in the whole batch decides what is drawn, so that the number of processes changes no record.
        number = self._first_row + row
        length = len(state)
        if self._extreme_activations:
            # All real positions, in their order: nothing depends on what is drawn.
            generator = drawn_for(0, number, _FOR_EXTREMES)
            positions = self._tokens.positions(row, length, length, in_decoder, False, generator)
            tokens = state.index_select(0, positions.to(state.device))
            counts = StreamNumbers(extreme=extreme_tokens(tokens), tokens=len(tokens))
            self._extremes[layer] = self._extremes.get(layer, StreamNumbers()) + counts
        if is_sampled(number):
            generator = drawn_for(0, number, _FOR_CLOUD)
            positions = self._tokens.positions(row, length, CLOUD, in_decoder, True, generator)
            if len(positions) > 1:
                cloud = Cloud(state.index_select(0, positions.to(state.device)), computed_in(state))
                self._clouds.setdefault(layer, []).append(cloud)

    def numbers(self) -> dict[str, StreamNumbers]:
        """What the passes have shown, by layer."""
        layers = dict.fromkeys([*self._clouds, *self._extremes])
        return {
            layer: stream_numbers(self._clouds.get(layer, [])) + self._extremes.get(layer, StreamNumbers())
            for layer in layers
        }
