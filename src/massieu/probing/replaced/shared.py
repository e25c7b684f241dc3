"""What rules share: a call's attention with something else in its place, and what is known of its queries and keys."""

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
PAIRS = 2**24  # of query and key, whose scores are held at a time


def settings_of(call: AttentionCall) -> dict[str, Any]:
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
    """The call's attention with something else in its place; ``keep`` leaves out more keys."""
    needs_values(call)
    settings = settings_of(call)
    if value is None:
        settings["sink_value"] = call.sink_value
    if scale is not None:
        settings["scale"] = scale
    if keep is not None:
        settings["log_weight"], settings["is_causal"] = narrowed(call, keep), False
    value = call.value if value is None else value
    return ops.attention(call.query if query is None else query, call.key, value, **settings)


def apart(call: AttentionCall) -> AttentionCall:
    """The same call with each query in an item of its own; keys that none of them sees are left out."""
    length, batch = call.query.shape[2], call.query.shape[0]
    visible = call.visible()
    used = int(visible.any(2).any(0).any(0).nonzero().amax()) + 1 if bool(visible.any()) else call.key.shape[2]

    def item(tensor: Tensor) -> Tensor:
        return tensor[:, None].expand(-1, length, *tensor.shape[1:]).flatten(0, 1)

    weight = visible if call.log_weight is None else call.log_weight
    weight = weight.expand(batch, -1, length, -1).transpose(1, 2).flatten(0, 1)[:, :, None, :used]
    query = call.query.transpose(1, 2).flatten(0, 1)[:, :, None]
    key, value = item(call.key[:, :, :used]), item(call.value[:, :, :used])
    output = call.output.flatten(0, 1)[:, None]
    return replace(
        call,
        query=query,
        key=key,
        value=value,
        log_weight=weight,
        is_causal=False,
        output=output,
        weights=None,
        seen=None,
    )


def own_places(call: AttentionCall) -> Int[Tensor, " L"] | None:
    """Where each query's own key is: the last keys are the queries'. None where what they see says that they are not."""
    length, keys = call.query.shape[2], call.key.shape[2]
    if keys < length:
        return None
    places = torch.arange(keys - length, keys, device=call.query.device)
    if keys > length:  # a cache, where no query sees what comes behind it; or another sequence
        visible = call.visible()
        behind = visible & (torch.arange(keys, device=places.device) > places[:, None])
        own = visible[:, :, torch.arange(length, device=places.device), places]
        padding = ~visible[:, :, :, keys - length :].any(2)  # whose own key nobody sees
        if bool(behind.any()) or bool((visible.any(-1) & ~own & ~padding).any()) or not bool(own.any()):
            return None
    return places


def real_queries(visible: Tensor, places: Tensor | None) -> Bool[Tensor, "B H L 1"] | None:
    """Queries whose own key somebody sees, which nobody does of padding; None where all are."""
    real = None if places is None else visible.any(2)[:, :, places, None]
    return None if real is None or bool(real.all()) else real


def narrowed(call: AttentionCall, keep: Bool[Tensor, "..."]) -> Tensor:
    """The call's log-weights, causality included, where ``keep`` holds."""
    weight = call.log_weight
    if weight is None or weight.dtype == torch.bool:
        return call.visible() & keep
    return torch.where(keep, weight, -torch.inf)


def by_weights(
    call: AttentionCall, rule: Any, weights: Callable[[Tensor], Tensor] | None, factor: float = 1.0
) -> Outputs:
    """Outputs of explicit weights, made of scores with their log-weights, for blocks of queries; a sink is the last column."""
    needs_values(call)
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    value = repeated(call.value, call).to(dtype)
    batch, heads, length = call.query.shape[:3]
    rows = max(1, PAIRS // max(batch * heads * call.key.shape[2], 1))
    found = []
    for places in torch.arange(length, device=call.query.device).split(rows):
        some = call.at(places)
        scores, weight = explicit_attention(some, dtype)
        logits = torch.where(weight != -torch.inf, factor * scores + weight, -torch.inf)
        if some.sink_logits is not None:
            sink = some.sink_logits.unsqueeze(-1).expand(*logits.shape[:3], 1)
            logits = torch.cat([logits, sink.to(logits)], -1)
        p = softmax(logits) if weights is None else weights(logits)
        output = p[..., : call.key.shape[2]] @ value
        if some.sink_value is not None:
            output = output + p[..., call.key.shape[2] :] * some.sink_value.to(dtype)
        found.append(output)
    return torch.cat(found, 2).transpose(1, 2)


def softmax(logits: Tensor) -> Tensor:
    """Weights of 0 for a query that sees no key."""
    seen = (logits != -torch.inf).any(-1, keepdim=True)  # NaN is seen, and stays
    return torch.where(seen, torch.softmax(torch.where(seen, logits, 0.0), -1), 0.0)


def repeated(tensor: Tensor, call: AttentionCall) -> Tensor:
    return tensor.repeat_interleave(call.query.shape[1] // tensor.shape[1], 1)


def needs_scores(rule: Any, call: AttentionCall) -> None:
    """Raises:
    InputError: the scores are not the product of queries and keys with a bias that does not depend on them.
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
    """Raises:
    InputError: the output is no average of values that are known.
    """
    if not call.value.shape[-1]:
        raise InputError(f"the attention of {call.site.name} cannot be replaced: the layout of its values is not known")
    if call.no_distribution:
        raise InputError(
            f"the attention of {call.site.name} cannot be replaced by this rule, which averages values: its own weights do "
            "not add up to 1 or are negative; 'off' and functions of your own can take its place"
        )
