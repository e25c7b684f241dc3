"""Heads, masks and the matrix of attention weights."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from massieu.foundation.arguments import floating
from massieu.foundation.numerics import logsumexp
from massieu.ops import Documents
from massieu.ops.shapes import window_sides

Mask = Float[Tensor, "..."] | Bool[Tensor, "..."]
"""Booleans, or numbers that are added to the scores. In arguments of modules True hides a key, in log-weights it keeps it."""


def split_heads(tensor: Float[Tensor, "B L HD"], heads: int) -> Float[Tensor, "B H L D"]:
    """The last dimension split into heads, contiguous in each head, which fused kernels read faster."""
    return tensor.unflatten(-1, (heads, -1)).transpose(1, 2).contiguous()


def merge_heads(tensor: Float[Tensor, "B H L D"]) -> Float[Tensor, "B L HD"]:
    """The heads side by side in the last dimension."""
    return tensor.transpose(1, 2).flatten(2)


def per_head(number: float | Tensor) -> float | Tensor:
    """One number for each head, (H,), as (H, 1, 1) to broadcast with (B, H, L, N); a single number unchanged."""
    if isinstance(number, Tensor) and number.ndim == 1:
        return number.reshape(-1, 1, 1)
    return number


def log_weight_of(
    key_padding_mask: Mask | None,
    attn_mask: Mask | None,
    query: Float[Tensor, "B H L D"],
    key: Float[Tensor, "B H N D"],
) -> Mask | None:
    """Both masks as one log-weight that broadcasts to (B, H, L, N); its last dimension is N already.

    If both masks are boolean it is boolean, and True keeps a key; otherwise it has numbers.

    Raises:
        TypeError: a mask that is neither boolean nor floating-point.
        ValueError: a mask of another shape than (B, N), or (L, N) or (B·H, L, N).
    """
    batch, heads, length = query.shape[:3]
    keys = key.shape[2]
    masks = []
    if key_padding_mask is not None:
        _check_mask("key_padding_mask", key_padding_mask, (batch, keys))
        masks.append(key_padding_mask[:, None, None, :])
    if attn_mask is not None:
        _check_mask("attn_mask", attn_mask, (length, keys), (batch * heads, length, keys))
        masks.append(attn_mask.unflatten(0, (batch, heads)) if attn_mask.ndim == 3 else attn_mask[None, None])
    return merge_log_weights(*(~mask if mask.dtype == torch.bool else mask for mask in masks))


def _check_mask(name: str, mask: object, *shapes: tuple[int, ...]) -> None:
    shape = tuple(floating(f"{name} (True hides, numbers are added)", mask, or_boolean=True).shape)
    if shape not in shapes:
        raise ValueError(f"{name} must have shape {' or '.join(map(str, shapes))}, got {shape}")


def merge_log_weights(*weights: Mask | None) -> Mask | None:
    """The log-weight of a product of weights, each given as booleans (True keeps) or as logarithms; None is weight 1."""
    merged = None
    for weight in weights:
        if weight is None:
            continue
        if merged is None:
            merged = weight
        elif merged.dtype == weight.dtype == torch.bool:
            merged = merged & weight
        elif merged.dtype == torch.bool:
            merged = torch.where(merged, weight, -torch.inf)
        elif weight.dtype == torch.bool:
            merged = torch.where(weight, merged, -torch.inf)
        else:
            merged = merged + weight
    return merged


def with_positions(
    log_weight: Mask | None,
    query: Float[Tensor, "B H L D"],
    key: Float[Tensor, "B H N D"],
    is_causal: bool,
    window: int | tuple[int, int] | None = None,
    query_offset: int = 0,
    documents: Documents | None = None,
) -> Mask | None:
    """The log-weight, with keys hidden by position: a causal query i sees keys n ≤ i, a window i − left ≤ n ≤ i + right.

    Query i stands at position i + query_offset. With documents, positions count within each document.
    """
    if not is_causal and window is None and documents is None:
        return log_weight
    if documents is None:
        query_position = torch.arange(query.shape[2], device=query.device)
        key_position = torch.arange(key.shape[2], device=query.device)
        # How far each key lies behind each query, (L, N).
        distance = query_position.unsqueeze(1) - key_position
        visible = torch.ones_like(distance, dtype=torch.bool)
    else:
        visible, distance = documents.seen(query.device)
    distance = distance + query_offset
    if is_causal:
        visible = visible & (distance >= 0)
    if window is not None:
        left, right = window_sides(window)
        visible = visible & (distance <= left) & (distance >= -right)
    return merge_log_weights(log_weight, visible[None, None])


def with_more_keys(log_weight: Mask | None, count: int) -> Mask | None:
    """The log-weight for `count` more keys at the end, which every query sees."""
    if log_weight is None:
        return None
    return F.pad(log_weight, (0, count), value=True if log_weight.dtype == torch.bool else 0.0)


def added(log_weight: Mask | None, scores: Float[Tensor, "B H L N"]) -> Float[Tensor, "B H L N"]:
    """Scores plus log-weight."""
    if log_weight is None:
        return scores
    if log_weight.dtype == torch.bool:
        return torch.where(log_weight, scores, -torch.inf)
    return scores + log_weight.to(scores.dtype)


def attention_scores(
    query: Float[Tensor, "B H L D"], key: Float[Tensor, "B H N D"], scale: float | Tensor | None
) -> Float[Tensor, "B H L N"]:
    """scale·query·key in at least float32; the scale is D^-½ by default."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    factor = query.shape[-1] ** -0.5 if scale is None else per_head(scale)
    return query.to(dtype) @ key.to(dtype).mT * factor


def attention_weights(
    query: Float[Tensor, "B H L D"],
    key: Float[Tensor, "B H N D"],
    *,
    scale: float | Tensor | None,
    log_weight: Mask | None = None,
    sink: float | Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Float[Tensor, "B H L N"], Float[Tensor, "B H L"]]:
    """The weights under which `massieu.ops.attention` averages values, in memory L×N, and log Z, both at least float32."""
    scores = attention_scores(query, key, scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = added(log_weight, scores)
    log_partition = logsumexp(scores)
    if sink is not None:
        sink_log_weight = torch.as_tensor(sink, dtype=scores.dtype, device=query.device)
        if sink_log_weight.ndim:
            # One for each head: (H, 1), to broadcast with (B, H, L).
            sink_log_weight = sink_log_weight.unsqueeze(-1)
        log_partition = torch.logaddexp(log_partition, sink_log_weight)
    # For a query that sees no key, −∞ − 0 gives weights of 0, where −∞ + ∞ would be NaN.
    subtracted = log_partition.masked_fill(log_partition == -torch.inf, 0.0)
    return torch.exp(scores - subtracted.unsqueeze(-1)), log_partition
