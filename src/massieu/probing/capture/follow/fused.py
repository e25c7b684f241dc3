"""Functions that compute attention by themselves, and functions whose own code is run step by step."""

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention as flex_operator

from massieu.probing.capture.follow.calls import CallPlace, FusedCall, FusedDims, Output, read_fused
from massieu.probing.capture.follow.dims import Dim, Dims, Label, LabelledTensor, broadcast, labels_of
from massieu.probing.capture.follow.flex import scores_of
from massieu.probing.capture.follow.scores import as_low_as_a_mask

_SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_FLEX_BUFFERS = ("score_mod_other_buffers", "mask_mod_other_buffers")
_FLEX_ARGUMENTS = ("query", "key", "value", "score_mod", "block_mask", "scale", "kernel_options", *_FLEX_BUFFERS)


def _scaled_dot_product(args: Any, kwargs: Any, place: CallPlace) -> Output:
    """``F.scaled_dot_product_attention``."""
    inputs = {**dict(zip(_SDPA_ARGUMENTS, args, strict=False)), **kwargs}
    query = inputs["query"]
    key = inputs["key"]
    value = inputs["value"]
    mask = inputs.get("attn_mask")
    is_causal = bool(inputs.get("is_causal", False))
    scale = inputs.get("scale")
    length = query.shape[-2]
    num_keys = key.shape[-2]
    if is_causal and num_keys != length:
        # PyTorch counts queries and keys from the first, whatever their numbers.
        mask = torch.ones(length, num_keys, dtype=torch.bool, device=query.device).tril()
        is_causal = False
    dims = _dims_of(query, key, value, is_grouped=bool(inputs.get("enable_gqa", False)))
    call = FusedCall(
        query,
        key,
        value,
        dims,
        log_weight=None if mask is None else _masked(mask, dims),
        is_causal=is_causal,
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
    )
    return _output(call, place)


def _flex(args: Any, kwargs: Any, place: CallPlace) -> Output | str:
    """FlexAttention's operator; or why it cannot be read."""
    no_buffers = dict.fromkeys(_FLEX_BUFFERS, ())
    inputs = {**no_buffers, **dict(zip(_FLEX_ARGUMENTS, args, strict=False)), **kwargs}
    query = inputs["query"]
    key = inputs["key"]
    value = inputs["value"]
    if key.shape[0] != query.shape[0]:
        return "its FlexAttention shares keys between sequences"
    log_weight = scores_of(query, key, inputs)
    if isinstance(log_weight, str):
        return log_weight
    dims = _dims_of(query, key, value, is_grouped=key.shape[1] != query.shape[1])
    call = FusedCall(
        query,
        key,
        value,
        dims,
        log_weight=_masked(log_weight, dims),
        is_causal=False,
        scale=float(inputs["scale"]),
    )
    return _output(call, place)


def _output(call: FusedCall, place: CallPlace) -> Output:
    dims = call.dims
    key_labels = labels_of(dims.key)
    queries = tuple(label for label in dims.query[-2] if label not in key_labels)
    return Output(read_fused(call, place), dims.output, values=dims.output[-1], queries=queries, path=place.path)


def _dims_of(query: Tensor, key: Tensor, value: Tensor, *, is_grouped: bool) -> FusedDims:
    """What the dimensions mean; grouped queries have several heads for one of the keys."""
    num_dims = query.dim()
    batch: Dims = []
    for place in range(num_dims - 2):
        size = query.shape[place]
        shared = max(_aligned_size(tensor, place, num_dims) for tensor in (key, value))
        is_heads = place == num_dims - 3
        if is_grouped and is_heads and size != shared:
            batch.append((*_new_dim(shared), *_new_dim(size // shared)))
        else:
            batch.append(_new_dim(max(size, shared)))
    length = _new_dim(query.shape[-2])
    keys = _new_dim(key.shape[-2])
    size = _new_dim(query.shape[-1])
    values = _new_dim(value.shape[-1])
    return FusedDims(
        query=[*_batch_of(query, batch), length, size],
        key=[*_batch_of(key, batch), keys, size],
        value=[*_batch_of(value, batch), keys, values],
        output=[*batch, length, values],
    )


def _new_dim(size: int) -> Dim:
    return () if size == 1 else (Label(size),)


def _aligned_size(tensor: Tensor, place: int, num_dims: int) -> int:
    """A tensor's size at a place of one with ``num_dims`` dimensions, with which it broadcasts: 1 where it has no such."""
    own_place = place - num_dims + tensor.dim()
    return tensor.shape[own_place] if own_place >= 0 else 1


def _batch_of(tensor: Tensor, batch: Dims) -> Dims:
    """The dimensions before the last two; of grouped heads the keys have the first labels alone."""
    dims: Dims = []
    first = len(batch) + 2 - tensor.dim()
    for place, dim in enumerate(batch[first:]):
        size = 1
        labels = []
        for label in dim:
            if size * label.size <= tensor.shape[place]:
                size *= label.size
                labels.append(label)
        dims.append(tuple(labels))
    return dims


def _masked(mask: Tensor, dims: FusedDims) -> LabelledTensor:
    """A mask as log-weights."""
    score_dims = [*dims.output[:-1], dims.key[-2]]
    return LabelledTensor(mask_log_weight(mask), broadcast(score_dims, mask.shape))


def mask_log_weight(mask: Tensor) -> Tensor:
    """A mask as log-weights: booleans, or floats with −inf for hidden keys."""
    if mask.dtype == torch.bool:
        return mask
    if mask.dtype in (torch.float16, torch.bfloat16):
        mask = mask.float()
    hidden = as_low_as_a_mask(mask)
    if not bool(mask.masked_fill(hidden, 0.0).any()):
        return ~hidden
    return mask.masked_fill(hidden, -torch.inf)


def _with_open_code(function: Any) -> Callable[..., Any]:
    """A function of PyTorch that runs its own code under a function mode, in place of handing itself to it."""
    names = {
        **function.__globals__,
        "has_torch_function": lambda *_: False,
        "has_torch_function_unary": lambda *_: False,
    }
    opened = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


RUN_OPEN: Mapping[Any, Callable[..., Any]] = {
    F.multi_head_attention_forward: _with_open_code(F.multi_head_attention_forward)
}
"""Functions that contain attention: what to call in their place."""

FUSED: Mapping[Any, Callable[[Any, Any, CallPlace], Output | str]] = {
    F.scaled_dot_product_attention: _scaled_dot_product,
    flex_operator: _flex,
}
"""Functions that are attention: how to read what they were given."""

FOREIGN = ("flash_attn", "xformers", "transformer_engine", "sageattention")
"""Libraries whose operators attend, and are refused by name."""
