"""One forward pass that a monitor measures: attention call by call, and the stream behind each layer."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from massieu.probing.attention_call import AttentionCall, AttentionSite
from massieu.probing.check import FirstLook
from massieu.probing.forward import decoder_given, named_inputs
from massieu.probing.monitor.processes import BatchShare, MonitorSums, head_shard
from massieu.probing.monitor.quantities import QUANTITIES, SPLIT, Sums, stream_numbers
from massieu.probing.nonfinite import in_call
from massieu.probing.precision import Cloud, computed_in
from massieu.probing.tokens import BatchTokens, drawn_for, is_sampled
from massieu.probing.watching import hooked

CLOUD = 64  # tokens of a window whose spread is measured


class MeasuredPass:
    """One forward pass that is measured."""

    def __init__(
        self,
        model: nn.Module,
        look: FirstLook,
        names: Mapping[AttentionSite, str],
        inputs: dict[str, Any],
        sampled: int | None = None,
        share: BatchShare | None = None,
    ) -> None:
        self.model, self.look, self.names, self.sampled = model, look, names, sampled
        self.share = share or BatchShare()
        self.inputs, self.tokens = inputs, BatchTokens(inputs)
        self.infos = {info.site: info for info in self.look.sites}
        self.sums: dict[Any, Sums] = {}
        self.clouds: dict[str, list[Cloud]] = {}
        self.elsewhere = False
        self._visits = Counter[nn.Module]()

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Listen to what leaves the blocks."""
        model = self.model
        self._layers: dict[nn.Module, list[str]] = {}
        for info in self.look.sites:
            layer = self.names[info.site].partition("layer")[0] + f"layer{info.layer}"
            known = self._layers.setdefault(model.get_submodule(info.block), [])
            if layer not in known:
                known.append(layer)
        self._rows = self.look.layout.rows(model, self.inputs)
        with hooked(self._layers, after=self._block):
            yield

    @contextmanager
    def first_call(self) -> Iterator[None]:
        """Learn from the model's first call which tokens its batch has."""
        model = self.model

        def learn(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            if not self.inputs:
                given = dict(named_inputs(model, arguments)) if arguments else {}
                self.inputs = given | keywords
                self.tokens = BatchTokens(self.inputs)

        with hooked([model], before=learn):
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
        length = call.query.shape[2]
        positions = torch.arange(length, device=call.query.device)
        if self.sampled is not None and self.sampled < length:
            positions = torch.linspace(0, length - 1, self.sampled, device=positions.device).long()
            call = call.at(positions)
            queries = type(queries)(queries.real[:, positions], None)
        names = tuple(name for name in QUANTITIES if info.grade == "full" or name not in SPLIT)
        place = self.names[call.site]
        sums = self.sums.get(call.site)
        if sums is None:
            first = head_shard(call.module) * info.heads
            sums = self.sums[call.site] = Sums(info, place, first, names)
        sums.add(call, queries, keys, positions)
        if in_call(call, queries.real, keys.real):
            sums.look_for_trouble(call)

    def _block(self, module: nn.Module, _: Any, __: Any, output: Any) -> None:
        visit, layers = self._visits[module], self._layers[module]
        self._visits[module] += 1
        state = output[0] if isinstance(output, tuple) else output
        if not isinstance(state, Tensor) or state.dim() != 3 or visit >= len(layers):
            return
        infos = [info for info in self.look.sites if self.model.get_submodule(info.block) is module]
        if any(info.tokens_first for info in infos):
            state = state.transpose(0, 1)
        if state.shape[0] != self._rows:
            return
        decoder = any(info.in_decoder for info in infos) and decoder_given(self.inputs)
        dtype = computed_in(state)
        for row in range(self._rows):
            # By the row's number in the whole batch, so that the number of processes changes no record.
            number = self.share.first_row + row
            if not is_sampled(number):
                continue
            chosen = self.tokens.positions(row, state.shape[1], CLOUD, decoder, True, drawn_for(0, number, 0))
            if len(chosen) > 1:
                cloud = Cloud(state[row].index_select(0, chosen.to(state.device)), dtype)
                self.clouds.setdefault(layers[visit], []).append(cloud)

    def measured(self, step: int, beside: Mapping[str, float] | None = None) -> MonitorSums:
        sites = [self.sums[site].numbers() for site in self.infos if site in self.sums]
        stream = {layer: stream_numbers(clouds) for layer, clouds in self.clouds.items()}
        return MonitorSums(step, sites, stream, self.share, dict(beside or {}))
