"""What the attention modules share: heads, masks, and numbers that may be constants, one a head, or trained."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

Mask = Float[Tensor, "..."] | Bool[Tensor, "..."]
"""Booleans of which True *hides*, as in `torch.nn`, or numbers added to the scores."""
Number = float | int | Tensor | None


def split_heads(tensor: Float[Tensor, "B L HD"], heads: int) -> Float[Tensor, "B H L D"]:
    """The last dimension cut into heads, each head's rows next to each other, which fused kernels read faster."""
    return tensor.unflatten(-1, (heads, -1)).transpose(1, 2).contiguous()


def merge_heads(tensor: Float[Tensor, "B H L D"]) -> Float[Tensor, "B L HD"]:
    """The heads side by side."""
    return tensor.transpose(1, 2).flatten(2)


def register_number(module: nn.Module, name: str, value: Number, heads: int) -> None:
    """Keep a number as it is, a tensor as a buffer and a Parameter as a parameter, which trains.

    Raises:
        TypeError: neither number nor floating-point tensor.
        ValueError: not finite, or a tensor that is neither one number nor one a head.
    """
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value}")
        setattr(module, name, None if value is None else float(value))
        return
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name} must be a number, a floating-point tensor, a Parameter or None, got {kind}")
    if tuple(value.shape) not in ((), (heads,)):
        raise ValueError(f"{name} must be one number or one for each of {heads} heads, got shape {tuple(value.shape)}")
    if isinstance(value, nn.Parameter):
        module.register_parameter(name, value)
    else:
        module.register_buffer(name, value)


class Alpha(nn.Module):
    """A number in [low, high), one or one a head; a trained one lies between `low` and low + 1, and its logit is trained."""

    logit: Tensor | None
    alpha: Tensor | float

    def __init__(self, value: float | Tensor, heads: int, low: float, high: float, *, learn: bool) -> None:
        """Raises ValueError outside [low, high), or, to be learned, outside (low, low + 1); TypeError for what is no number."""
        super().__init__()
        if value is None or isinstance(value, nn.Parameter):
            raise TypeError("alpha must be a number or a tensor; learn_alpha=True trains it")
        register_number(self, "alpha", value, heads)
        given = torch.as_tensor(self.alpha)
        inside = (given > low) & (given < low + 1) if learn else (given >= low) & (given < high)
        if not bool(inside.all()):
            interval = f"({low:g}, {low + 1:g}) to be learned" if learn else f"[{low:g}, {high:g})"
            raise ValueError(f"alpha must lie in {interval}, got {given.tolist()}")
        self.low, self.logit = low, None
        if learn:
            start = torch.logit((given - low).to(torch.get_default_dtype()))
            self.logit = nn.Parameter(start.expand(heads).clone())
            del self.alpha

    def forward(self) -> Tensor | float:
        return self.alpha if self.logit is None else self.low + torch.sigmoid(self.logit)


def per_head(number: float | Tensor) -> float | Tensor:
    """One number a head, (H,), as (H, 1, 1) to meet (B, H, L, N); all else as it is."""
    return number.reshape(-1, 1, 1) if isinstance(number, Tensor) and number.ndim == 1 else number


def log_weight_of(key_padding_mask: Mask | None, attn_mask: Mask | None, layout: tuple[int, ...]) -> Mask | None:
    """Both masks as one log-weight that broadcasts to `layout`, (B, H, L, N), in the last dimension already that long.

    Booleans of which True keeps, if both masks are boolean, else numbers.

    Raises:
        TypeError: a mask that is neither boolean nor floating-point.
        ValueError: a mask of another shape than (B, N), or (L, N) or (B·H, L, N).
    """
    batch, heads, length, keys = layout
    masks = []
    if key_padding_mask is not None:
        _check_mask("key_padding_mask", key_padding_mask, ((batch, keys),))
        masks.append(key_padding_mask[:, None, None, :])
    if attn_mask is not None:
        _check_mask("attn_mask", attn_mask, ((length, keys), (batch * heads, length, keys)))
        masks.append(attn_mask.unflatten(0, (batch, heads)) if attn_mask.ndim == 3 else attn_mask[None, None])
    return merge_log_weights(*(~mask if mask.dtype == torch.bool else mask for mask in masks))


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


def position_mask(
    length: int, keys: int, is_causal: bool, window: int | tuple[int, int] | None, device: torch.device
) -> Bool[Tensor, "1 1 L N"] | None:
    """True where query i may see key n for all that their positions say: n ≤ i if causal, i − left ≤ n ≤ i + right."""
    if not is_causal and window is None:
        return None
    behind = torch.arange(length, device=device).unsqueeze(1) - torch.arange(keys, device=device)
    seen = behind >= 0 if is_causal else torch.ones_like(behind, dtype=torch.bool)
    if window is None:
        return seen[None, None]
    left, right = (window, window) if isinstance(window, int) else window
    return (seen & (behind <= left) & (behind >= -right))[None, None]


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


def _check_mask(name: str, mask: object, shapes: tuple[tuple[int, ...], ...]) -> None:
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{name} must be boolean (True hides) or floating-point (added to the scores), got {kind}")
    if tuple(mask.shape) not in shapes:
        raise ValueError(f"{name} must have shape {' or '.join(map(str, shapes))}, got {tuple(mask.shape)}")
