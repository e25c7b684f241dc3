"""Functions that compute attention by themselves, and functions whose own code is run step by step."""

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.flex_attention import flex_attention as flex_operator

from massieu.probing.capture.capture import Capture
from massieu.probing.capture.follow.calls import FusedCall, Output, read_fused
from massieu.probing.capture.follow.dims import Dims, Label, broadcast, of
from massieu.probing.capture.follow.flex import scores_of
from massieu.probing.capture.follow.scores import Path, as_low_as_a_mask


def _scaled_dot_product(args: Any, kwargs: Any, owner: nn.Module, path: Path, capture: Capture) -> Output | str:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, value = (given[name] for name in names[:3])
    mask, causal, scale = given.get("attn_mask"), bool(given.get("is_causal", False)), given.get("scale")
    dims = _dims_of(query, key, value, bool(given.get("enable_gqa", False)))
    if causal and key.shape[-2] != query.shape[-2]:
        mask, causal = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril(), False
    weight = None if mask is None else _masked(mask, dims)
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    call = FusedCall(query, key, value, *dims[:3], weight, causal, scale)
    return _output(call, dims[3], owner, path, capture)


def _flex(args: Any, kwargs: Any, owner: nn.Module, path: Path, capture: Capture) -> Output | str:
    names = ("query", "key", "value", "score_mod", "block_mask", "scale", "kernel_options")
    names = (*names, "score_mod_other_buffers", "mask_mod_other_buffers")
    given = {names[7]: (), names[8]: (), **dict(zip(names, args, strict=False)), **kwargs}
    query, key, value = (given[name] for name in names[:3])
    if key.shape[0] != query.shape[0]:
        return "its FlexAttention shares keys between sequences"
    weight = scores_of(query, key, given)
    if isinstance(weight, str):
        return weight
    dims = _dims_of(query, key, value, key.shape[1] != query.shape[1])
    call = FusedCall(query, key, value, *dims[:3], _masked(weight, dims), False, float(given["scale"]))
    return _output(call, dims[3], owner, path, capture)


def _output(call: FusedCall, dims: Dims, owner: nn.Module, path: Path, capture: Capture) -> Output:
    queries = tuple(label for label in call.query_dims[-2] if label not in of(call.key_dims))
    return Output(read_fused(call, owner, capture), dims, dims[-1], queries, path)


def _dims_of(query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> tuple[Dims, Dims, Dims, Dims]:
    """What the dimensions of query, key, value and output mean; grouped queries have several heads for one of the keys."""

    def own(size: int) -> tuple[Label, ...]:
        return () if size == 1 else (Label(size),)

    batch: Dims = []
    for place in range(query.dim() - 2):
        sizes = [
            t.shape[place - query.dim() + t.dim()] if place - query.dim() + t.dim() >= 0 else 1 for t in (key, value)
        ]
        size, shared = query.shape[place], max(sizes)
        if grouped and place == query.dim() - 3 and size != shared:
            batch.append((*own(shared), *own(size // shared)))
        else:
            batch.append(own(max(size, shared)))
    length, keys, size, values = own(query.shape[-2]), own(key.shape[-2]), own(query.shape[-1]), own(value.shape[-1])

    def cut(tensor: Tensor, *last: tuple[Label, ...]) -> Dims:
        found: Dims = []
        for place, dim in enumerate(batch[query.dim() - tensor.dim() :]):
            count, part = 1, []
            for label in dim:
                if count * label.size <= tensor.shape[place]:
                    count *= label.size
                    part.append(label)
            found.append(tuple(part))
        return [*found, *last]

    return cut(query, length, size), cut(key, keys, size), cut(value, keys, values), [*batch, length, values]


def _masked(mask: Tensor, dims: tuple[Dims, Dims, Dims, Dims]) -> tuple[Tensor, Dims]:
    """A mask as log-weights, and what its dimensions mean."""
    spelled = [*dims[3][:-1], dims[1][-2]]
    return mask_log_weight(mask), broadcast(spelled, mask.shape)


def mask_log_weight(mask: Tensor) -> Tensor:
    """A mask as log-weights: booleans, or floats with −inf for hidden keys."""
    if mask.dtype == torch.bool:
        return mask
    mask = mask.float() if mask.dtype in (torch.float16, torch.bfloat16) else mask
    hidden = as_low_as_a_mask(mask)
    if not bool(mask.masked_fill(hidden, 0.0).any()):
        return ~hidden
    return mask.masked_fill(hidden, -torch.inf)


def _own_code(function: Any) -> Callable[..., Any]:
    """A function of PyTorch that runs its own code under a function mode, in place of handing itself to it."""
    names = {
        **function.__globals__,
        "has_torch_function": lambda *_: False,
        "has_torch_function_unary": lambda *_: False,
    }
    opened = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


RUN_OPEN: Mapping[Any, Callable[..., Any]] = {F.multi_head_attention_forward: _own_code(F.multi_head_attention_forward)}
"""Functions that contain attention: what to call in their place."""

FUSED: Mapping[Any, Callable[..., Output | str]] = {
    F.scaled_dot_product_attention: _scaled_dot_product,
    flex_operator: _flex,
}
"""Functions that are attention: how to read what they were given."""

FOREIGN = ("flash_attn", "xformers", "transformer_engine", "sageattention")
"""Libraries whose operators attend, and are refused by name."""
