"""Shared by rules: a call's attention with some inputs changed, and which of its queries and keys belong together."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from massieu import ops
from massieu.errors import InputError
from massieu.ops.attention import AttentionResult
from massieu.probing.capture.attention_call import AttentionCall, explicit_attention

Outputs = Float[Tensor, "B L H Dv"]
PAIRS = 2**24
"""Pairs of query and key whose scores are held at a time."""


def settings_of(call: AttentionCall) -> dict[str, Any]:
    """The arguments of `massieu.ops.attention` other than query, key and value."""
    return {
        "log_weight": call.log_weight,
        "scale": call.scale,
        "is_causal": call.is_causal,
        "softcap": call.softcap,
        "sink": call.sink if call.sink is None or call.sink.dim() == 1 else call.sink.unsqueeze(-1),
    }


def attention_of(
    call: AttentionCall,
    query: Tensor | None = None,
    value: Tensor | None = None,
    *,
    scale: float | None = None,
    keep: Bool[Tensor, "..."] | None = None,
) -> AttentionResult:
    """The call's attention with some inputs changed.

    Args:
        keep: keys that are used, of those that each query sees; None for all.
    """
    needs_values(call)
    settings = settings_of(call)
    if value is None:  # a sink's value belongs to the call's own values
        settings["sink_value"] = call.sink_value
    if scale is not None:
        settings["scale"] = scale
    if keep is not None:
        settings["log_weight"] = narrowed(call, keep)
        settings["is_causal"] = False  # the log-weight holds it
    value = call.value if value is None else value
    return ops.attention(call.query if query is None else query, call.key, value, **settings)


def one_query_per_item(call: AttentionCall) -> AttentionCall:
    """The same call with each query in an item of its own; keys behind the last visible one are dropped."""
    batch, _, length, _ = call.query.shape
    visible = call.visible()
    used = int(visible.any(2).any(0).any(0).nonzero().amax()) + 1 if bool(visible.any()) else call.key.shape[2]

    def for_each_query(tensor: Tensor) -> Tensor:
        return tensor[:, None].expand(-1, length, *tensor.shape[1:]).flatten(0, 1)

    log_weight = visible if call.log_weight is None else call.log_weight
    log_weight = log_weight.expand(batch, -1, length, -1).transpose(1, 2).flatten(0, 1)  # (B·L, H or 1, N)
    return replace(
        call,
        query=call.query.transpose(1, 2).flatten(0, 1)[:, :, None],
        key=for_each_query(call.key[:, :, :used]),
        value=for_each_query(call.value[:, :, :used]),
        log_weight=log_weight[:, :, None, :used],
        is_causal=False,
        output=call.output.flatten(0, 1)[:, None],
        weights=None,
        seen=None,
    )


def query_positions(call: AttentionCall) -> Int[Tensor, " L"] | None:
    """Positions among the keys of the queries' own tokens; None if what the queries see shows that they have none.

    The last keys are the queries' own, as with a cache: no query sees a key behind its own, and each sees its own.
    """
    length = call.query.shape[2]
    keys = call.key.shape[2]
    if keys < length:
        return None
    positions = torch.arange(keys - length, keys, device=call.query.device)
    if keys > length:  # a cache; or the keys are of another sequence
        visible = call.visible()
        sees_later = visible & (torch.arange(keys, device=positions.device) > positions[:, None])
        sees_itself = visible[:, :, torch.arange(length, device=positions.device), positions]
        padding = ~visible[:, :, :, keys - length :].any(2)  # no query sees the key of padding
        blind_to_itself = visible.any(-1) & ~sees_itself & ~padding
        if bool(sees_later.any()) or bool(blind_to_itself.any()) or not bool(sees_itself.any()):
            return None
    return positions


def real_queries(visible: Tensor, positions: Tensor | None) -> Bool[Tensor, "B H L 1"] | None:
    """True for queries that are not padding, whose own key some query sees; None if none is padding, or it is not known."""
    if positions is None:
        return None
    real = visible.any(2)[:, :, positions, None]
    return None if bool(real.all()) else real


def narrowed(call: AttentionCall, keep: Bool[Tensor, "..."]) -> Tensor:
    """The call's log-weights, causality included, with −∞ or False where ``keep`` is False."""
    log_weight = call.log_weight
    if log_weight is None or log_weight.dtype == torch.bool:
        return call.visible() & keep
    return torch.where(keep, log_weight, -torch.inf)


def by_weights(
    call: AttentionCall, rule: Any, weights: Callable[[Tensor], Tensor] | None, factor: float = 1.0
) -> Outputs:
    """Outputs of explicit attention weights, formed for some queries at a time.

    Args:
        weights: computes weights from logits (scores plus log-weights; the last column is a learned sink's); None for softmax.
        factor: of the scores.
    """
    needs_values(call)
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    value = of_query_heads(call.value, call).to(dtype)
    batch, heads, length = call.query.shape[:3]
    keys = call.key.shape[2]
    queries_per_piece = max(1, PAIRS // max(batch * heads * keys, 1))
    outputs = []
    for places in torch.arange(length, device=call.query.device).split(queries_per_piece):
        piece = call.at(places)
        scores, log_weight = explicit_attention(piece, dtype)
        # A hidden key's score may be NaN or infinite.
        logits = torch.where(log_weight != -torch.inf, factor * scores + log_weight, -torch.inf)
        if piece.sink_logits is not None:
            sink = piece.sink_logits.unsqueeze(-1).expand(*logits.shape[:3], 1)
            logits = torch.cat([logits, sink.to(logits)], -1)
        attention = softmax(logits) if weights is None else weights(logits)
        output = attention[..., :keys] @ value
        if piece.sink_value is not None:
            output = output + attention[..., keys:] * piece.sink_value.to(dtype)
        outputs.append(output)
    return torch.cat(outputs, 2).transpose(1, 2)


def softmax(logits: Tensor) -> Tensor:
    """Softmax over the last dimension; weights of 0 for a query that sees no key."""
    sees_a_key = (logits != -torch.inf).any(-1, keepdim=True)  # NaN counts, and stays
    return torch.where(sees_a_key, torch.softmax(torch.where(sees_a_key, logits, 0.0), -1), 0.0)


def of_query_heads(tensor: Tensor, call: AttentionCall) -> Tensor:
    """Keys or values of every query head: those of grouped heads are repeated."""
    return tensor.repeat_interleave(call.query.shape[1] // tensor.shape[1], 1)


def needs_scores(rule: Any, call: AttentionCall) -> None:
    """Check that the rule can compute the call's scores from other queries and keys.

    Raises:
        InputError: the scores are not the product of queries and keys plus a bias that does not depend on them.
    """
    if call.moving and call.grade == "full":
        raise InputError(
            f"{rule.name} needs scores that depend on queries and keys by their product alone, and those of {call.site.name} "
            "have further terms computed from them, as of relative positions"
        )
    if call.grade == "scores":
        raise InputError(
            f"{rule.name} needs the queries and keys of {call.site.name}, of which only the scores are known"
        )


def needs_values(call: AttentionCall) -> None:
    """Check that the call's output is an average of known values.

    Raises:
        InputError: it is not.
    """
    if not call.value.shape[-1]:
        raise InputError(f"the attention of {call.site.name} cannot be replaced: the layout of its values is not known")
    if call.no_distribution:
        raise InputError(
            f"the attention of {call.site.name} cannot be replaced by this rule, which averages values: its own weights do "
            "not add up to 1 or are negative; 'off' and functions of your own can take its place"
        )
