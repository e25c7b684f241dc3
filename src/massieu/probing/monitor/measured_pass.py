"""Forward passes that a monitor measures: attention call by call, and the stream behind each layer."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from massieu.probing.attention_call import AttentionCall, AttentionSite
from massieu.probing.capture import Capture, recomputing
from massieu.probing.check import FirstLook
from massieu.probing.forward import called_with, decoder_given
from massieu.probing.monitor.processes import BatchShare, MonitorSums, batch_name, head_shard
from massieu.probing.monitor.quantities import QUANTITIES, SPLIT, Sums, stream_numbers
from massieu.probing.nonfinite import in_call
from massieu.probing.precision import Cloud, computed_in
from massieu.probing.tokens import BatchTokens, drawn_for, is_sampled
from massieu.probing.watching import hooked

CLOUD = 64  # tokens of a window whose spread is measured


class MeasuredPass:
    """The sums over one forward pass that is measured, or over all those of a training step."""

    def __init__(
        self,
        model: nn.Module,
        look: FirstLook,
        names: Mapping[AttentionSite, str],
        inputs: dict[str, Any],
        share: BatchShare | None = None,
    ) -> None:
        self.model, self.look, self.names = model, look, names
        self.share = share
        self._first_row = 0 if share is None else share.first_row
        self._rows: int | None = None
        self.infos = {info.site: info for info in self.look.sites}
        self.sums: dict[Any, Sums] = {}
        self.clouds: dict[str, list[Cloud]] = {}
        self.elsewhere = False
        self._begin(inputs)

    def _begin(self, inputs: dict[str, Any]) -> None:
        """What a forward pass of the model is given, whose rows follow those of the pass before."""
        self._first_row += self._rows or 0
        self.inputs, self.tokens = inputs, BatchTokens(inputs)
        self._visits = Counter[nn.Module]()
        known = any(isinstance(value, Tensor) for value in inputs.values())
        self._rows = self.look.layout.rows(self.model, inputs) if known else None

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Listen to what leaves the blocks."""
        blocks = dict(self.model.named_modules())
        self._layers: dict[nn.Module, list[str]] = {}
        for info in self.look.sites:
            if info.block not in blocks:  # of a model that has changed
                continue
            layer = self.names[info.site].partition("layer")[0] + f"layer{info.layer}"
            known = self._layers.setdefault(blocks[info.block], [])
            if layer not in known:
                known.append(layer)
        with hooked(self._layers, after=self._block):
            yield

    @contextmanager
    def of_training(self, capture: Capture) -> Iterator[None]:
        """Take every call of the model for a forward pass of its own, and learn which tokens its batch has."""

        def begin(model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            if not recomputing():
                capture.begin_pass()
                self._begin(called_with(model, arguments, keywords))
                self.share = self.share or BatchShare(batch_name(self.inputs))

        with self.hooks(), hooked([self.model], before=begin):
            yield

    @torch.no_grad()
    def attention(self, call: AttentionCall) -> None:
        info = self.infos.get(call.site)
        if info is None and call.site.module_name in self.look.refused:
            return
        if info is None or call.query.shape[1] != info.heads:
            self.elsewhere = True
            return
        if call.repeated:
            return
        queries = self.tokens.of(call, decoder=info.in_decoder)
        keys = self.tokens.of(call, decoder=info.in_decoder and info.kind != "cross", keys=True)
        positions = torch.arange(call.query.shape[2], device=call.query.device)
        names = tuple(name for name in QUANTITIES if info.grade == "full" or name not in SPLIT)
        place = self.names[call.site]
        sums = self.sums.get(call.site)
        if sums is None:
            first = head_shard(call.module) * info.heads
            sums = self.sums[call.site] = Sums(info, place, first, names)
        sums.add(call, queries, keys, positions)
        if in_call(call, queries.real, keys.real):
            sums.look_for_trouble(call)

    @torch.no_grad()
    def _block(self, module: nn.Module, _: Any, __: Any, output: Any) -> None:
        if recomputing():
            return
        visit, layers = self._visits[module], self._layers[module]
        self._visits[module] += 1
        state = output[0] if isinstance(output, tuple) else output
        if not isinstance(state, Tensor) or state.dim() != 3 or visit >= len(layers):
            return
        blocks = dict(self.model.named_modules())
        infos = [info for info in self.look.sites if blocks.get(info.block) is module]
        if any(info.tokens_first for info in infos):
            state = state.transpose(0, 1)
        if self._rows is None or state.shape[0] != self._rows:
            return
        decoder = any(info.in_decoder for info in infos) and decoder_given(self.inputs)
        dtype = computed_in(state)
        for row in range(self._rows):
            # By the row's number in the whole batch, so that the number of processes changes no record.
            number = self._first_row + row
            if not is_sampled(number):
                continue
            chosen = self.tokens.positions(row, state.shape[1], CLOUD, decoder, True, drawn_for(0, number, 0))
            if len(chosen) > 1:
                cloud = Cloud(state[row].index_select(0, chosen.to(state.device)), dtype)
                self.clouds.setdefault(layers[visit], []).append(cloud)

    def measured(self, step: int, beside: Mapping[str, float] | None = None) -> MonitorSums:
        sites = [self.sums[site].numbers() for site in self.infos if site in self.sums]
        stream = {layer: stream_numbers(clouds) for layer, clouds in self.clouds.items()}
        return MonitorSums(step, sites, stream, self.share or BatchShare(), dict(beside or {}))
