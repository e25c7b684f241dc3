"""Forward passes that a monitor measures: attention call by call, and the stream behind each layer."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from massieu.probing.capture.attention_call import AttentionCall, AttentionSite
from massieu.probing.capture.capture import recomputing
from massieu.probing.capture.compiled import CompiledPasses
from massieu.probing.capture.routes import capturing
from massieu.probing.capture.sites import SiteInfo
from massieu.probing.capture.tokens import BatchTokens, Tokens, drawn_for, is_sampled
from massieu.probing.checks.check import FirstLook
from massieu.probing.checks.nonfinite import in_call
from massieu.probing.model.forward import called_with, decoder_given
from massieu.probing.model.precision import Cloud, computed_in
from massieu.probing.model.watching import hooked
from massieu.probing.monitor.extreme_activations import extreme_tokens
from massieu.probing.monitor.period import ToldPeriod
from massieu.probing.monitor.processes import BatchShare, MonitorSums, batch_name, head_shard
from massieu.probing.monitor.quantities import StreamNumbers, Sums, stream_numbers
from massieu.probing.statistics.query_means import Functions

CLOUD = 64  # tokens of a window whose spread is measured


class WatchedPasses(ABC):
    """Forward passes whose attention calls are looked at: which known site each is of, and which tokens it has.

    Attributes:
        elsewhere: the model attended at a place that is not known.
    """

    def __init__(self, model: nn.Module, look: FirstLook, inputs: dict[str, Any]) -> None:
        self.model, self.look = model, look
        self.infos = {info.site: info for info in look.sites}
        self.elsewhere = False
        self.begin(inputs)

    def begin(self, inputs: dict[str, Any]) -> None:
        """A forward pass begins, which is given these inputs."""
        self.inputs, self.tokens = inputs, BatchTokens(inputs)

    @contextmanager
    def of_training(self) -> Iterator[None]:
        """Take every call of the model for a forward pass of its own, and learn which tokens its batch has."""
        with capturing(self.model, self.attention) as capture:

            def before(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
                if not recomputing():
                    capture.begin_pass()
                    self._begin_with(arguments, keywords)

            with hooked([self.model], before=before):
                yield

    @contextmanager
    def of_compiled_training(self, passes: CompiledPasses) -> Iterator[None]:
        """The same of a model that is compiled."""
        with passes.reading(self.attention, before=self._begin_with):
            yield
        if passes.elsewhere:
            self.elsewhere = True
            self.forget()

    def _begin_with(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.begin(called_with(self.model, arguments, keywords))

    @torch.no_grad()
    def attention(self, call: AttentionCall) -> None:
        """The observer of a capture."""
        info = self.infos.get(call.site)
        if info is None and call.site.module_name in self.look.refused:
            return
        if info is None or call.query.shape[1] != info.heads:
            self.elsewhere = True
            return
        if not call.repeated:
            self.take(call, info, self.tokens.of(call, decoder=info.in_decoder, cross=info.kind == "cross"))

    @abstractmethod
    def forget(self) -> None:
        """Forget all calls that were taken."""

    @abstractmethod
    def take(self, call: AttentionCall, info: SiteInfo, queries: Tokens) -> None:
        """Look at the call of a known site."""


class MeasuredPass(WatchedPasses):
    """The sums over one forward pass that is measured, or over all those of a training step."""

    def __init__(
        self,
        model: nn.Module,
        look: FirstLook,
        names: Mapping[AttentionSite, str],
        inputs: dict[str, Any],
        functions: Functions,
        share: BatchShare | None = None,
        extreme_activations: bool = False,
    ) -> None:
        self.names = names
        self._functions = functions
        self.share = share
        self.sums: dict[Any, Sums] = {}
        self.clouds: dict[str, list[Cloud]] = {}
        self.extremes: dict[str, StreamNumbers] = {}
        self._extreme_activations = extreme_activations
        self._first_row = 0 if share is None else share.first_row
        self._rows: int | None = None
        super().__init__(model, look, inputs)

    def begin(self, inputs: dict[str, Any]) -> None:
        """A forward pass begins, whose rows follow those of the pass before."""
        super().begin(inputs)
        self._first_row += self._rows or 0
        self._visits = Counter[nn.Module]()
        known = any(isinstance(value, Tensor) for value in inputs.values())
        self._rows = self.look.layout.rows(self.model, inputs) if known else None
        if known:
            self.share = self.share or BatchShare(batch_name(inputs))

    @contextmanager
    def of_training(self) -> Iterator[None]:
        """And listen to what leaves the blocks."""
        with self.hooks(), super().of_training():
            yield

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Listen to what leaves the blocks."""
        blocks = dict(self.model.named_modules())
        self._layers: dict[nn.Module, list[str]] = {}
        self._infos_of_block: dict[nn.Module, list[SiteInfo]] = {}
        for info in self.look.sites:
            if info.block not in blocks:  # of a model that has changed
                continue
            layer = self.names[info.site].partition("layer")[0] + f"layer{info.layer}"
            self._infos_of_block.setdefault(blocks[info.block], []).append(info)
            known = self._layers.setdefault(blocks[info.block], [])
            if layer not in known:
                known.append(layer)
        with hooked(self._layers, after=self._block):
            yield

    def forget(self) -> None:
        """Forget all calls that were taken."""
        self.sums.clear()

    def take(self, call: AttentionCall, info: SiteInfo, queries: Tokens) -> None:
        """Add the queries of a call to the sums of its site."""
        cross = info.kind == "cross"
        keys = self.tokens.of(call, decoder=info.in_decoder and not cross, keys=True, cross=cross)
        positions = torch.arange(call.query.shape[2], device=call.query.device)
        functions = {n: each for n, each in self._functions.items() if info.grade == "full" or not each.needs_scores}
        sums = self.sums.get(call.site)
        if sums is None:
            first = head_shard(call.module) * info.heads
            sums = self.sums[call.site] = Sums(info, self.names[call.site], first, functions)
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
        infos = self._infos_of_block[module]
        if any(info.tokens_first for info in infos):
            state = state.transpose(0, 1)
        if self._rows is None or state.shape[0] != self._rows:
            return
        decoder = any(info.in_decoder for info in infos) and decoder_given(self.inputs)
        dtype = computed_in(state)
        for row in range(self._rows):
            # By the row's number in the whole batch, so that the number of processes changes no record.
            number = self._first_row + row
            if self._extreme_activations:
                # All real positions, in their order: nothing depends on what is drawn.
                real = self.tokens.positions(
                    row, state.shape[1], state.shape[1], decoder, False, drawn_for(0, number, 1)
                )
                tokens = state[row].index_select(0, real.to(state.device))
                counts = StreamNumbers(extreme=extreme_tokens(tokens), tokens=len(tokens))
                self.extremes[layers[visit]] = self.extremes.get(layers[visit], StreamNumbers()) + counts
            if not is_sampled(number):
                continue
            chosen = self.tokens.positions(row, state.shape[1], CLOUD, decoder, True, drawn_for(0, number, 0))
            if len(chosen) > 1:
                cloud = Cloud(state[row].index_select(0, chosen.to(state.device)), dtype)
                self.clouds.setdefault(layers[visit], []).append(cloud)

    def failed(self) -> dict[str, str]:
        """Of the user's own functions, why one could not be computed."""
        return {name: reason for sums in self.sums.values() for name, reason in sums.failed.items()}

    def measured(self, step: int, beside: Mapping[str, float], period: ToldPeriod) -> MonitorSums:
        """What the passes have shown."""
        sites = [self.sums[site].numbers() for site in self.infos if site in self.sums]
        layers = dict.fromkeys([*self.clouds, *self.extremes])
        stream = {
            layer: stream_numbers(self.clouds.get(layer, [])) + self.extremes.get(layer, StreamNumbers())
            for layer in layers
        }
        return MonitorSums(step, sites, stream, self.share or BatchShare(), dict(beside), period)
