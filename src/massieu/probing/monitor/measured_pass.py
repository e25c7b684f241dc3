"""Forward passes that a monitor measures: attention call by call, and the stream behind each layer."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from massieu.probing.capture.attention_call import AttentionCall, AttentionSite
from massieu.probing.capture.sites import SiteInfo
from massieu.probing.capture.tokens import Tokens
from massieu.probing.checks.check import FirstLook
from massieu.probing.checks.nonfinite import in_call
from massieu.probing.monitor.measured_stream import MeasuredStream
from massieu.probing.monitor.period import PeriodProposal
from massieu.probing.monitor.processes import BatchShare, MonitorSums, batch_name, head_shard
from massieu.probing.monitor.site_numbers import SiteAccumulator
from massieu.probing.monitor.watched_passes import WatchedPasses
from massieu.probing.statistics.query_means import Functions


class MeasuredPass(WatchedPasses):
    """The sums over one forward pass that is measured, or over all those of a training step.

    Args:
        names: each site's place in records.
        functions: what is measured of queries, by name.
        share: which rows of the whole batch the passes have; None where that follows from their inputs.
        extreme_activations: whether to count tokens with extreme activations.
    """

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
        self._names = names
        self._functions = functions
        self._share = share
        self._stream = MeasuredStream(look, names, extreme_activations, 0 if share is None else share.first_row)
        self.sums: dict[AttentionSite, SiteAccumulator] = {}
        super().__init__(model, look, inputs)

    def begin(self, inputs: dict[str, Any]) -> None:
        """A forward pass begins, whose rows follow those of the pass before."""
        super().begin(inputs)
        has_tensors = any(isinstance(value, Tensor) for value in inputs.values())
        num_rows = self.look.layout.rows(self.model, inputs) if has_tensors else None
        self._stream.begin(inputs, self.tokens, num_rows)
        if has_tensors and self._share is None:
            self._share = BatchShare(batch_name(inputs))

    @contextmanager
    def of_training(self) -> Iterator[None]:
        """Measure what leaves the blocks too."""
        with self.stream_hooks(), super().of_training():
            yield

    @contextmanager
    def stream_hooks(self) -> Iterator[None]:
        """Measure what leaves the blocks inside."""
        with self._stream.hooks(self.model):
            yield

    def forget(self) -> None:
        """Forget all calls that were taken."""
        self.sums.clear()

    def take(self, call: AttentionCall, info: SiteInfo, queries: Tokens) -> None:
        """Add the queries of a call to the sums of its site."""
        cross = info.kind == "cross"
        keys = self.tokens.of(call, decoder=info.in_decoder and not cross, keys=True, cross=cross)
        positions = torch.arange(call.query.shape[2], device=call.query.device)
        if call.site not in self.sums:
            self.sums[call.site] = self._new_sums(call, info)
        sums = self.sums[call.site]
        sums.add(call, queries, keys, positions)
        if in_call(call, queries.real, keys.real):
            sums.note_nonfinite(call)

    def _new_sums(self, call: AttentionCall, info: SiteInfo) -> SiteAccumulator:
        scores_are_known = info.grade == "full"
        functions = {
            name: function
            for name, function in self._functions.items()
            if scores_are_known or not function.needs_scores
        }
        first_head = head_shard(call.module) * info.heads
        return SiteAccumulator(info, self._names[call.site], first_head, functions)

    def failed(self) -> dict[str, str]:
        """Of the user's own functions, why one could not be computed."""
        return {name: reason for sums in self.sums.values() for name, reason in sums.failed.items()}

    def measured(self, step: int, extra: Mapping[str, float], proposal: PeriodProposal) -> MonitorSums:
        """What the passes have shown."""
        sites = [self.sums[site].numbers() for site in self.infos if site in self.sums]
        return MonitorSums(
            step=step,
            sites=sites,
            stream=self._stream.numbers(),
            share=self._share or BatchShare(),
            extra=dict(extra),
            period=proposal,
        )
