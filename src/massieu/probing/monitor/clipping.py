"""QK-clip from the training step's own forward passes: the largest logit of each head, and what was done about it."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.capture.sites import SiteInfo
from massieu.probing.capture.tokens import Tokens
from massieu.probing.checks.check import FirstLook
from massieu.probing.monitor.processes import gathered, head_shard
from massieu.probing.monitor.watched_passes import WatchedPasses
from massieu.probing.statistics.query_reading import largest_logits


class HeadShard(NamedTuple):
    """The heads of an attention module that a process computes: all of them without tensor parallelism."""

    module: str
    first_head: int


@dataclass
class Clipping:
    """What `massieu.Monitor.clip` found and did; empty within the block, and where the step was not due.

    Attributes:
        largest_logits: by the name of each attention module the largest logit of each of its heads in the block's forward
            passes, shape (H,), before weights were scaled.
        factors: what `massieu.nn.clip_logits` returned.
    """

    largest_logits: dict[str, Tensor] = field(default_factory=dict)
    factors: dict[str, Tensor] = field(default_factory=dict)


class LargestLogits(WatchedPasses):
    """The largest logit of each head over all real queries of some forward passes, and nothing else."""

    def __init__(self, model: nn.Module, look: FirstLook, inputs: dict[str, Any]) -> None:
        self._largest: dict[HeadShard, Tensor] = {}
        super().__init__(model, look, inputs)

    def forget(self) -> None:
        """Forget all calls that were taken."""
        self._largest.clear()

    def take(self, call: AttentionCall, info: SiteInfo, queries: Tokens) -> None:
        """Keep the largest logits of a call, as the statistic ``largest_score`` defines them."""
        if info.grade != "full":
            return
        logits = largest_logits(call)  # (B, H, L)
        largest = logits.masked_fill(~queries.real[:, None], -torch.inf).amax((0, 2))
        shard = HeadShard(call.site.module_name, head_shard(call.module) * info.heads)
        _keep_largest(self._largest, shard, largest)

    def over_processes(self, step: int) -> dict[str, Tensor]:
        """By module, of all processes, every one of which has to call; float64 on the CPU."""
        largest: dict[HeadShard, Tensor] = {}
        for part in gathered(step, self._on_cpu()):
            for shard, values in part.items():
                _keep_largest(largest, shard, values)
        modules = dict.fromkeys(shard.module for shard in largest)
        return {module: torch.cat(_in_order(largest, module)) for module in modules}

    def _on_cpu(self) -> dict[HeadShard, Tensor]:
        if not self._largest:
            return {}
        # One copy for all modules: each copy from a GPU waits for it.
        values = torch.cat([largest.double() for largest in self._largest.values()]).cpu()
        parts = values.split([len(largest) for largest in self._largest.values()])
        return dict(zip(self._largest, parts, strict=True))


def _keep_largest(largest: dict[HeadShard, Tensor], shard: HeadShard, values: Tensor) -> None:
    before = largest.get(shard)
    largest[shard] = values if before is None else torch.maximum(before, values)


def _in_order(largest: dict[HeadShard, Tensor], module: str) -> list[Tensor]:
    """The largest logits of a module's shards, in the order of their heads."""
    return [largest[shard] for shard in sorted(largest) if shard.module == module]
