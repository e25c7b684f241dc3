"""How far attention may collapse: the least entropy of a row whose scores are bounded (Zhai et al., arXiv 2303.06296; N11)."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from massieu.foundation.arguments import check_broadcastable, check_range, floating, integers, number, whole_number
from massieu.foundation.transforms import all_true
from massieu.foundation.values import promoted_dtype


def least_entropy(score_norm: Float[Tensor, "..."] | float, keys: Int[Tensor, "..."] | int) -> Float[Tensor, "..."]:
    """Lower bound on the entropy of attention: the least, in nats, for T scores whose vector has norm at most σ.

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

    Example:
        >>> from massieu.energy import least_entropy
        >>> round(least_entropy(0.0, 8).exp().item(), 3)  # equal scores: uniform over all keys
        8.0
    """
    if not isinstance(score_norm, Tensor):
        score_norm = torch.tensor(float(number("score_norm", score_norm)))
    sigma = floating("score_norm", score_norm).to(promoted_dtype(score_norm))
    check_range("score_norm", sigma, least=0)
    if isinstance(keys, Tensor):
        count = integers("keys", keys)
    else:
        count = torch.tensor(whole_number("keys", keys))
    if not all_true(count >= 1):
        raise ValueError("keys must be at least 1")
    check_broadcastable(score_norm=sigma, keys=count)
    sigma, count = torch.broadcast_tensors(sigma, count.to(sigma))
    others = (count - 1).clamp_min(1)
    # The lead of the one score over the others, and the log-odds of all others together: H = softplus + lead·(their share).
    lead = sigma * (count / others).sqrt()
    log_odds = others.log() - lead
    return torch.where(count > 1, F.softplus(log_odds) + lead * torch.sigmoid(log_odds), 0.0)
