"""Heads, masks and the matrix of attention weights."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from massieu.foundation.arguments import floating
from massieu.foundation.numerics import logsumexp
from massieu.ops import Documents

Mask = Float[Tensor, "..."] | Bool[Tensor, "..."]
"""Booleans of which True *hides*, as in `torch.nn`, or numbers added to the scores."""


def split_heads(tensor: Float[Tensor, "B L HD"], heads: int) -> Float[Tensor, "B H L D"]:
    """The last dimension cut into heads, each head's rows next to each other, which fused kernels read faster."""
    return tensor.unflatten(-1, (heads, -1)).transpose(1, 2).contiguous()


def merge_heads(tensor: Float[Tensor, "B H L D"]) -> Float[Tensor, "B L HD"]:
    """The heads side by side."""
    return tensor.transpose(1, 2).flatten(2)


def per_head(number: float | Tensor) -> float | Tensor:
    """One number a head, (H,), as (H, 1, 1) to meet (B, H, L, N); all else as it is."""
    return number.reshape(-1, 1, 1) if isinstance(number, Tensor) and number.ndim == 1 else number


def log_weight_of(
    key_padding_mask: Mask | None,
    attn_mask: Mask | None,
    query: Float[Tensor, "B H L D"],
    key: Float[Tensor, "B H N D"],
) -> Mask | None:
    """Both masks as one log-weight that broadcasts to (B, H, L, N), in the last dimension already that long.

    Booleans of which True keeps, if both masks are boolean, else numbers.

    Raises:
        TypeError: a mask that is neither boolean nor floating-point.
        ValueError: a mask of another shape than (B, N), or (L, N) or (B·H, L, N).
    """
    batch, heads, length, keys = *query.shape[:3], key.shape[2]
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
    """The product of weights, each given as booleans of which True keeps, or as logarithms."""
    merged = None
    for weight in weights:
        if merged is None or weight is None:
            merged = weight if merged is None else merged
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
    """The log-weight without the keys that their positions hide: n ≤ i is seen if causal, i − left ≤ n ≤ i + right.

    Query i stands at position i + query_offset. Positions are those in a document, if there are documents.
    """
    if not is_causal and window is None and documents is None:
        return log_weight
    if documents is None:
        place, keys = (torch.arange(size, device=query.device) for size in (query.shape[2], key.shape[2]))
        behind = place.unsqueeze(1) - keys
        seen = torch.ones_like(behind, dtype=torch.bool)
    else:
        seen, behind = documents.seen(query.device)
    behind = behind + query_offset
    seen = seen & (behind >= 0) if is_causal else seen
    if window is not None:
        left, right = (window, window) if isinstance(window, int) else window
        seen = seen & (behind <= left) & (behind >= -right)
    return merge_log_weights(log_weight, seen[None, None])


def with_more_keys(log_weight: Mask | None, count: int) -> Mask | None:
    """The log-weight after `count` keys that everybody sees were put behind the others."""
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
    """scale·query·key, D^-½ by default, at least float32."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    return query.to(dtype) @ key.to(dtype).mT * (query.shape[-1] ** -0.5 if scale is None else per_head(scale))


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
        level = torch.as_tensor(sink, dtype=scores.dtype, device=query.device)
        log_partition = torch.logaddexp(log_partition, level.unsqueeze(-1) if level.ndim else level)
    level = log_partition.masked_fill(log_partition == -torch.inf, 0.0)
    return torch.exp(scores - level.unsqueeze(-1)), log_partition
