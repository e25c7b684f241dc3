"""Attention, its moments and its covariances from all weights at once, in float64: what the engine is held against.

Nothing here is of the package. Queries are (B, H, L, D), scores (B, H, L, N); any tensor may require a gradient, and a
query that sees no key has output 0, log Z = −inf and no part in any gradient.
"""

import math

import torch
from tests.support.rounding import FAST_EXPONENTIAL


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tilted_scores(
    query, key, log_weight=None, scale=None, is_causal=False, window=None, softcap=None, sink=None, query_offset=0
):
    """Scores, finite log-weights, and which pairs are visible, all (B, H, L, N); N + 1 with the null key of a sink."""
    query, key = query.double(), key.double()
    heads = query.shape[1]
    key = key.repeat_interleave(heads // key.shape[1], 1)
    scale = per_query(query.shape[-1] ** -0.5 if scale is None else scale)
    scores = torch.einsum("bhld,bhnd->bhln", query, key) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    visible = torch.ones_like(scores, dtype=torch.bool)
    weight = torch.zeros_like(scores)
    if log_weight is not None and log_weight.dtype == torch.bool:
        visible = visible & log_weight
    elif log_weight is not None:
        visible = visible & (log_weight > -math.inf)
        weight = weight + log_weight.double().masked_fill(log_weight == -math.inf, 0.0)
    ahead = torch.arange(scores.shape[3]) - torch.arange(scores.shape[2])[:, None] - query_offset
    if is_causal:
        visible = visible & (ahead <= 0)
    if window is not None:
        left, right = window if isinstance(window, tuple) else (window, window)
        visible = visible & (-left <= ahead) & (ahead <= right)
    if sink is None:
        return scores, weight, visible
    sink = per_query(sink).expand(*scores.shape[:3], 1)
    columns = torch.zeros_like(sink), sink.masked_fill(sink == -math.inf, 0.0), sink > -math.inf
    return tuple(torch.cat(pair, -1) for pair in zip((scores, weight, visible), columns, strict=True))


def per_query(number):
    """One number, one a head or one a query, to broadcast with (B, H, L, N)."""
    number = torch.as_tensor(number, dtype=torch.float64)
    return number.view(-1, 1, 1) if number.ndim == 1 else number


def of_heads(tensor, query, options):
    """Keys or values (B, H, N, E) in float64, and the zero of a sink."""
    tensor = tensor.double().repeat_interleave(query.shape[1] // tensor.shape[1], 1)
    return tensor if options.get("sink") is None else torch.nn.functional.pad(tensor, (0, 0, 0, 1))


def normalised(exponent, visible):
    """Weights that sum to 1, or are all 0, and the logarithm of what they were divided by, 0 where nothing is visible."""
    if exponent.shape[-1] == 0:
        return exponent, exponent.sum(-1)
    some = visible.any(-1, keepdim=True)
    level = torch.where(visible, exponent, -math.inf)
    level = torch.logsumexp(torch.where(some, level, 0.0), -1, keepdim=True)
    level = torch.where(some, level, 0.0)
    return torch.where(visible, (torch.where(visible, exponent, 0.0) - level).exp(), 0.0), level.squeeze(-1)


def hide(level, visible):
    return level.masked_fill(~visible.any(-1), -math.inf)


def attention(query, key, value, **options):
    scores, weight, visible = tilted_scores(query, key, **options)
    p, level = normalised(scores + weight, visible)
    return torch.einsum("bhln,bhne->bhle", p, of_heads(value, query, options)), hide(level, visible)


def fisher_vp(query, key, vector, **options):
    scores, weight, visible = tilted_scores(query, key, **options)
    p, _ = normalised(scores + weight, visible)
    key = of_heads(key, query, options)
    deviation = key.unsqueeze(2) - torch.einsum("bhln,bhnd->bhld", p, key).unsqueeze(3)
    return torch.einsum("bhln,bhlni,bhlnj,bhlj->bhli", p, deviation, deviation, vector.double())


def moments(query, key, value, **options):
    """By name; 0 for a query that sees nothing but for what is −inf there."""
    scores, weight, visible = tilted_scores(query, key, **options)
    p, level = normalised(scores + weight, visible)
    prior, prior_level = normalised(weight, visible)
    mean, prior_mean = (p * scores).sum(-1), (prior * scores).sum(-1)
    log_p = scores + weight - level.unsqueeze(-1)
    largest = [p, torch.where(visible, scores, -math.inf)]
    empty = scores.shape[-1] == 0
    place = torch.where(visible, scores, -math.inf)[..., : key.shape[2]].detach()
    most, top = (x.sum(-1) if empty else x.amax(-1) for x in largest)
    return {
        "output": torch.einsum("bhln,bhne->bhle", p, of_heads(value, query, options)),
        "log_partition": hide(level, visible),
        "entropy": -(p * log_p).sum(-1),
        "mean_score": mean,
        "score_variance": (p * (scores - mean.unsqueeze(-1)).square()).sum(-1),
        "max_weight": most,
        "collision": p.square().sum(-1),
        "prior_log_partition": hide(prior_level, visible),
        "prior_mean_score": prior_mean,
        "prior_score_variance": (prior * (scores - prior_mean.unsqueeze(-1)).square()).sum(-1),
        "max_score": hide(top, visible),
        "max_position": torch.full(place.shape[:-1], -1) if place.shape[-1] == 0 else _first_of_largest(place),
    }


def _first_of_largest(scores):
    largest = scores == scores.amax(-1, keepdim=True)
    place = torch.arange(scores.shape[-1]).where(largest, scores.shape[-1]).amin(-1)
    return torch.where((scores > -math.inf).any(-1), place, -1)


def received(query, key, **options):
    """Σ_i p_in of each key, without the null key of a sink."""
    scores, weight, visible = tilted_scores(query, key, **options)
    return normalised(scores + weight, visible)[0].sum(-2)[..., : key.shape[2]]


def log_partition_room(dtype, level):
    """How far log Z may be off from these exact numbers, where PyTorch's CPU attention computes it from this dtype."""
    rounding = 16 * torch.finfo(torch.float32).eps * (1 + float(finite(level.detach()).abs().max()))
    return rounding + (FAST_EXPONENTIAL if dtype in (torch.bfloat16, torch.float16) else 0.0)


def finite(tensor):
    """−inf, of queries that see nothing, as 0 without a gradient."""
    return tensor.where(tensor > -math.inf, 0.0)
