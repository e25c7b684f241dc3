"""How far attention may collapse: the least entropy of a row whose scores are bounded (Zhai et al., arXiv 2303.06296; N11)."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from massieu.energy.base import promoted
from massieu.measures.value import values_are_readable
from massieu.solve.arguments import is_floating, told


def least_entropy(score_norm: Float[Tensor, "..."] | float, keys: Int[Tensor, "..."] | int) -> Float[Tensor, "..."]:
    """The least entropy, in nats, of softmax over T scores whose vector has a Euclidean norm of at most σ.

    H ≥ log(1 + (T−1)b) + σ√(T(T−1))·b/(1 + (T−1)b), b = exp(−σ√(T/(T−1))). Attained, by one score of σ√((T−1)/T) among
    others of −σ/√(T(T−1)). Hidden keys do not count; log-weights count as parts of the scores.

    Softmax knows scores up to a constant, so σ may be that of scores about their mean, √(T·variance), with the variance that
    `massieu.ops.attention_moments` calls `prior_score_variance`: the tightest such bound of a head as it is. Before any input
    is seen, σ ≤ scale·‖W_Qx‖·√(Σ‖W_Kx_n‖²), which `massieu.nn.SigmaReparametrization` holds down.

    Args:
        score_norm: σ, at least 0.
        keys: T, at least 1; broadcasts.

    Returns:
        In at least float32: log T for σ = 0, falling in σ; 0 for a single key.

    Raises:
        ValueError: a σ that is negative or not finite, fewer than one key, or shapes that do not broadcast.
        TypeError: σ that is no number and not floating-point, or keys that are not whole numbers.
    """
    sigma, count = _norm(score_norm), _count(keys)
    try:
        shape = torch.broadcast_shapes(sigma.shape, count.shape)
    except RuntimeError as error:
        raise ValueError(
            f"score_norm and keys must broadcast, got {tuple(sigma.shape)} and {tuple(count.shape)}"
        ) from error
    sigma, count = sigma.expand(shape), count.to(sigma.device, sigma.dtype).expand(shape)
    others = (count - 1).clamp_min(1)
    # How far the one score leads, and the log-odds of all others together.
    lead = sigma * (count / others).sqrt()
    odds = others.log() - lead
    return torch.where(count > 1, F.softplus(odds) + lead * torch.sigmoid(odds), 0.0)


def _norm(score_norm: Tensor | float) -> Tensor:
    if isinstance(score_norm, int | float) and not isinstance(score_norm, bool):
        score_norm = torch.tensor(float(score_norm))
    if not isinstance(score_norm, Tensor) or not is_floating(score_norm):
        raise TypeError(f"score_norm must be a number or a floating-point tensor, got {told(score_norm)}")
    if values_are_readable(score_norm) and not bool(((score_norm >= 0) & (score_norm < torch.inf)).all()):
        raise ValueError(f"score_norm must be finite and at least 0, got {score_norm.detach().flatten()[:6].tolist()}")
    return promoted(score_norm)


def _count(keys: Tensor | int) -> Tensor:
    if isinstance(keys, int) and not isinstance(keys, bool):
        keys = torch.tensor(keys)
    if not isinstance(keys, Tensor) or keys.is_floating_point() or keys.is_complex() or keys.dtype == torch.bool:
        kind = f"a tensor of {keys.dtype}" if isinstance(keys, Tensor) else type(keys).__name__
        raise TypeError(f"keys must be a whole number or a tensor of them, got {kind}")
    if values_are_readable(keys) and not bool((keys >= 1).all()):
        raise ValueError(f"keys must be at least 1, got {keys.flatten()[:6].tolist()}")
    return keys
