"""QK-clip from the training step's own forward passes: the largest logit of each head, and what was done about it."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.capture.sites import SiteInfo
from massieu.probing.capture.tokens import Tokens
from massieu.probing.checks.check import FirstLook
from massieu.probing.monitor.measured_pass import WatchedPasses
from massieu.probing.monitor.processes import gathered, head_shard
from massieu.probing.statistics.query_reading import largest_logits


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
        self._largest: dict[tuple[str, int], Tensor] = {}
        super().__init__(model, look, inputs)

    def forget(self) -> None:
        """Forget all calls that were taken."""
        self._largest.clear()

    def take(self, call: AttentionCall, info: SiteInfo, queries: Tokens) -> None:
        """Keep the largest logits of a call, as the statistic ``largest_score`` defines them."""
        if info.grade != "full":
            return
        largest = largest_logits(call).masked_fill(~queries.real[:, None], -torch.inf).amax((0, 2))
        place = call.site.module_name, head_shard(call.module) * info.heads
        known = self._largest.get(place)
        self._largest[place] = largest if known is None else torch.maximum(known, largest)

    def over_processes(self, step: int) -> dict[str, Tensor]:
        """By module, of all processes, every one of which has to call; float64 on the CPU."""
        places = list(self._largest)
        values = torch.cat([self._largest[place].double() for place in places]).cpu() if places else torch.empty(0)
        own = dict(zip(places, values.split([len(self._largest[place]) for place in places]), strict=True))
        joined: dict[str, dict[int, Tensor]] = {}
        for part in gathered(step, own):
            for (module, first), largest in part.items():
                shards = joined.setdefault(module, {})
                shards[first] = torch.maximum(shards[first], largest) if first in shards else largest
        return {module: torch.cat([shards[first] for first in sorted(shards)]) for module, shards in joined.items()}
