"""A few windows recorded token by token, for reading on the page: the only place where the user's text is kept."""

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.probing.attention_call import AttentionCall
from massieu.probing.sites import SiteInfo

STRONGEST = 5
_NUMBERS = 600_000  # numbers recorded in all examples together, so that the page stays small


def example_length(heads: int, examples: int) -> int:
    """How many tokens of a window can be recorded for this many heads (of all sites) and examples."""
    per_token = heads * (2 + 2 * STRONGEST) * examples
    return max(16, min(128, _NUMBERS // max(per_token, 1)))


def explicit_attention(
    call: AttentionCall, dtype: torch.dtype = torch.float32
) -> tuple[Float[Tensor, "B H L N"], Float[Tensor, "B H L N"]]:
    """Scores with hidden keys at −inf (log-weights not added), and log-weights, both formed explicitly."""
    key = call.key.to(dtype).repeat_interleave(call.query.shape[1] // call.key.shape[1], 1)
    scores = call.scale * call.query.to(dtype) @ key.mT
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    hidden = ~call.visible()
    weight = torch.zeros_like(scores)
    if call.log_weight is not None and call.log_weight.dtype != torch.bool:
        weight = call.log_weight.expand_as(scores).to(dtype)
    return scores.masked_fill(hidden, -torch.inf), weight.masked_fill(hidden, -torch.inf)


@dataclass
class ExampleWindow:
    """One window: its tokens, and for each site every query's selective log Z, entropy and five strongest keys.

    Attributes:
        row: of the batch that the window is in.
    """

    title: str
    tokens: dict[str, list[str]]
    length: int
    row: int
    sites: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, info: SiteInfo, call: AttentionCall) -> None:
        """Record one site of the batch."""
        call = call.rows(slice(self.row, self.row + 1))
        if call.query.shape[0] != 1:
            return
        positions = torch.arange(min(self.length, call.query.shape[2]), device=call.query.device)
        call = call.at(positions)
        scores, weight = explicit_attention(call)
        logits = torch.where(weight > -torch.inf, scores + weight, -torch.inf)
        attention, prior = torch.softmax(logits, -1), torch.softmax(weight, -1)
        log_z = torch.logsumexp(logits, -1)
        mean = torch.where(prior > 0, prior * scores, 0.0).sum(-1)
        selective = log_z - torch.logsumexp(weight, -1) - mean
        if call.grade == "scores":  # scores and log-weights are not known apart
            selective = torch.full_like(selective, torch.nan)
        strongest = attention.topk(min(STRONGEST, attention.shape[-1]), dim=-1)
        self.sites[str(info.index)] = {
            # NaN where there is none, as for a query that sees no key; where scores are not known apart from log-weights
            "selective_log_partition": selective[0].tolist(),
            "entropy": torch.special.entr(attention).sum(-1)[0].tolist(),
            "top_keys": strongest.indices[0].tolist(),
            "top_weights": strongest.values[0].tolist(),
        }

    def to_dict(self) -> dict[str, Any]:
        """The window as ``details.json`` holds it."""
        return {"title": self.title, "tokens": self.tokens, "sites": self.sites}
