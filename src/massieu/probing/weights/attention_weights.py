"""`attention_weights`: the exact attention weights of any model that the probe can read, on a prompt or a batch."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from massieu.errors import InputError
from massieu.foundation.doors import count, input_door
from massieu.probing.capture.attention_call import AttentionCall, AttentionSite
from massieu.probing.capture.sites import SiteInfo, stack_of
from massieu.probing.model.given import Model
from massieu.probing.weights.site_weights import SiteAttention
from massieu.probing.weights.weights_reading import WeightsReading, check_inputs, numbers_of
from massieu.probing.weights.weights_result import AttentionWeightsResult

MAX_BYTES = 4_000_000_000
"""Bytes of weights that are held, unless more are allowed."""


@input_door(max_bytes=count)
@torch.inference_mode(False)
def attention_weights(
    model: Model = None,
    inputs: Any = None,
    *,
    layers: int | Iterable[int] | None = None,
    heads: int | Iterable[int] | None = None,
    tokenizer: Any = None,
    max_bytes: int = MAX_BYTES,
) -> AttentionWeightsResult:
    """The attention weights of a model's heads on a prompt or a batch, as the model computes them.

    They are formed from the queries, keys, masks, biases, caps and sinks that the model's own attention was given, so the
    model keeps its implementation, such as ``"sdpa"``, for which transformers gives no weights. The first of two passes
    checks in float64 that this gives the model's own outputs. Weights of heads that are not asked for are never formed.

    Args:
        model: as for `massieu.probe`: a name, a `massieu.Checkpoint`, or any module in memory, in evaluation mode.
        inputs: a prompt; a list of messages, each with its "role" and "content", which the tokenizer's chat template writes;
            or a batch: a tensor, a tuple of arguments, or a mapping of names to tensors.
        layers: numbers of layers, from 0; None is all.
        heads: numbers of heads in each of these layers; None is all.
        tokenizer: of a model in memory that is given a prompt, or in place of a checkpoint's own: a tokenizer, its folder or
            its name. With a batch, it names the tokens.
        max_bytes: of weights that may be held.

    Returns:
        The weights by site, (B, H, L, N) in main memory, with the tokens; `rollout`, `mean_distance`, `strongest`, `plot`.

    Raises:
        InputError: an empty prompt, or one without a tokenizer; no such layer or head; more bytes than allowed; a model that
            is in training mode, on the meta device or cannot be read; several prompts.

    Example:
        >>> import massieu
        >>> import torch
        >>> attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
        >>> tokens = torch.randn(1, 5, 8)
        >>> result = massieu.attention_weights(attention, (tokens, tokens, tokens), heads=1)
        >>> result.of_head(0, 1).shape, bool(torch.allclose(result.of_head(0, 1).sum(-1), torch.ones(1, 5)))
        (torch.Size([1, 5, 5]), True)
    """
    wanted_layers = numbers_of("layers", layers)
    wanted_heads = numbers_of("heads", heads)
    check_inputs(model, inputs)
    reading = WeightsReading.create(model, inputs, tokenizer)
    chosen = reading.chosen(wanted_layers, wanted_heads)
    limit = _Limit(max_bytes, reading.sites, chosen)
    sites: list[SiteAttention] = []
    reading.read(chosen, sites.append, limit.check)
    return AttentionWeightsResult(reading.name, tuple(sites), reading.refused, reading.layers_by_stack())


class _Limit:
    """Raises before more bytes of weights are held than are allowed."""

    def __init__(self, max_bytes: int, sites: list[SiteInfo], chosen: dict[AttentionSite, tuple[int, ...]]) -> None:
        self.max_bytes = max_bytes
        # Sites of one stack and kind have one length; an encoder's may be much longer than its decoder's.
        self.group_of = {info.site: (stack_of(info.block), info.kind) for info in sites}
        self.heads_left = Counter[tuple[str, str]]()
        for site, heads in chosen.items():
            self.heads_left[self.group_of[site]] += len(heads)
        self.held = 0

    def check(self, call: AttentionCall, heads: tuple[int, ...]) -> None:
        """Raises:
        InputError: these weights, and those of the heads of this kind in this stack that follow, would be too many.
        """
        batch, _, length, _ = call.query.shape
        keys = call.key.shape[2]
        bytes_of_number = torch.promote_types(call.query.dtype, torch.float32).itemsize
        bytes_of_head = batch * length * keys * bytes_of_number
        group = self.group_of[call.site]
        needed = self.held + bytes_of_head * self.heads_left[group]
        if needed > self.max_bytes:
            raise InputError(
                f"the weights of {self.heads_left[group]} heads on {length:,} queries and {keys:,} keys, with "
                f"what is held, take {needed:,} bytes, more than max_bytes={self.max_bytes:,}; name fewer layers or heads, or "
                "allow more"
            )
        self.held += bytes_of_head * len(heads)
        self.heads_left[group] -= len(heads)
