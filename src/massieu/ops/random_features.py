"""The log-partition by positive random features: an unbiased estimate of Z whose variance is known."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from massieu.foundation.arguments import described, flag, whole_number
from massieu.foundation.arguments import generator as check_generator
from massieu.foundation.short_repr import fields_html, fields_repr
from massieu.foundation.transforms import uncompiled, without_autocast
from massieu.ops.attention import log_partition
from massieu.ops.shapes import AttentionProblem, check_problem

BLOCK_NUMBERS = 1 << 22
"""Numbers held at once while the variance is computed."""


class RandomFeaturesResult(NamedTuple):
    """What `random_feature_log_partition` returns."""

    log_partition: Float[Tensor, "*query"]
    """log Ẑ in nats, float32 or float64: Ẑ is unbiased for Z, its logarithm lies below log Z in the mean."""
    standard_error: Float[Tensor, "*query"] | None
    """The standard deviation of Ẑ in units of Z, from its formula; None without `standard_error`. To first order it is also
    that of log Ẑ, whose bias is then −½ of its square. Inf beyond the range of the dtype; 0 where no key is visible."""

    __repr__ = fields_repr
    _repr_html_ = fields_html


@uncompiled
def random_feature_log_partition(
    query: Float[Tensor, "*query D"],
    key: Float[Tensor, "*batch Hk N D"],
    *,
    generator: torch.Generator,
    features: int = 256,
    log_weight: Float[Tensor, "..."] | Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    standard_error: bool = True,
) -> RandomFeaturesResult:
    """Estimate log Z of `massieu.ops.log_partition` by positive random features (Performers; B17).

    With q and k scaled by √scale and ω ~ N(0, I), exp(q·k) = E[φ_ω(q) φ_ω(k)], φ_ω(x) = exp(ω·x − ½‖x‖²), so
    Ẑ = 1/m Σ_ω φ_ω(q) Σ_n w_n φ_ω(k_n) needs the keys once for each of m features, and not for each query: time
    (L + N)·m instead of L·N.

    **Where it is of use.** The variance of one feature is Z²·E[exp((q + k)·(q + k′)) − 1] over two keys drawn by the
    attention weights: of the order exp(‖q + k‖²), so m must be of that size. At ‖q + k‖ ≤ 1 some hundred features give
    a few per cent; at ‖q + k‖ = 4, ten million do. Much beyond 1 the draws nearly always miss what makes Z, an error
    estimated from them misses it too, and only the formula tells.

    Args:
        query, key: as in `massieu.ops.log_partition`.
        generator: source of ω; its device may be another than the query's.
        features: m, the number of ω, which all queries and heads share: their errors are not independent.
        log_weight: one a key for all queries of a key head: broadcasts to (B, H, 1, N) alike for the heads that share it.
        scale: inverse temperature, a number; D^-½ by default. Where it is negative, the sign goes to the query.
        standard_error: compute it, in time (L + D)·N² and linear memory. That is more than log Z itself costs, and meant
            for choosing m on a sample of queries; False leaves it out.

    Differentiable any number of times in query, key and a float `log_weight`: the gradient of log Ẑ in the scaled q is
    Σ r_ω ω − q, r_ω the features' shares of Ẑ, which is conservative but has a larger variance than the ratio of
    features that Performers take. The standard error has no gradient. Under `torch.func.vmap` its `randomness` says whether
    items share ω ("same") or have their own ("different"). Autocast changes nothing. `torch.compile` runs this as it is and
    compiles what is around it.

    Raises:
        TypeError: as `massieu.ops.log_partition`; a generator, scale or number of features of another type.
        ValueError: the same; no feature; a log-weight per query.

    Example:
        >>> import torch
        >>> from massieu import ops
        >>> query, key = torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 3, 2)  # nothing is random at 0
        >>> estimate = ops.random_feature_log_partition(query, key, generator=torch.Generator())
        >>> round(estimate.log_partition.exp().item(), 3), round(estimate.standard_error.item(), 3)
        (3.0, 0.0)
    """
    flag("standard_error", standard_error)
    if isinstance(scale, Tensor):
        raise TypeError(f"scale must be a number or None, got {described(scale)}")
    whole_number("features", features, least=1)
    check_generator("generator", generator)
    problem = check_problem(query, key, None, log_weight, scale, False)
    assert isinstance(problem.scale, float)
    with without_autocast(query.device):
        # Queries and keys share the scale, which has the sign of the query's factor.
        root = math.sqrt(abs(problem.scale))
        keys = problem.key.to(problem.dtype) * root
        queries = problem.query.to(problem.dtype) * math.copysign(root, problem.scale)
        weight = _per_key(problem)
        size = keys.shape[-1]
        omega = torch.randn(features, size, generator=generator, device=generator.device, dtype=problem.dtype)
        omega = omega.to(keys.device).expand(*keys.shape[:2], features, size)
        # log Σ_n w_n φ_ω(k_n) for each feature: a log-partition with the features as queries. Then the features are the keys of
        # the queries, with these as log-weights.
        sums = log_partition(omega, keys, log_weight=(weight - keys.square().sum(-1) / 2).unsqueeze(-2), scale=1.0)
        log_z = log_partition(queries, omega, log_weight=sums[:, :, None, None], scale=1.0)
        log_z = problem.restore(log_z - queries.square().sum(-1) / 2 - math.log(features))
        if not standard_error:
            return RandomFeaturesResult(log_z, None)
        with torch.no_grad():
            error = _standard_error(queries.detach(), keys.detach(), weight.detach(), features)
    return RandomFeaturesResult(log_z, problem.restore(error))


def _per_key(problem: AttentionProblem) -> Tensor:
    """Float log-weights (B, Hk, N); a ValueError if they differ between queries or heads of a key head."""
    shape = problem.key.shape[:3]
    weight = problem.log_weight
    if weight is None:
        return problem.key.new_zeros(shape, dtype=problem.dtype)
    if weight.shape[2:4] != (1, 1):
        raise ValueError(
            f"log_weight must be one a key for all queries of a key head: give sizes (1, 1) for the "
            f"{problem.query.shape[2]} query heads of a key head and the {problem.query.shape[3]} queries, "
            f"got {tuple(weight.shape[2:4])}"
        )
    if weight.dtype == torch.bool:
        weight = torch.zeros_like(weight, dtype=problem.dtype).masked_fill(~weight, -torch.inf)
    return weight.to(problem.dtype)[:, :, 0, 0].expand(shape)


def _standard_error(query: Tensor, key: Tensor, weight: Tensor, features: int) -> Tensor:
    """(Var Ẑ)^½ / Z = ((E Ẑ₁² / Z² − 1) / m)^½ with E Ẑ₁² = exp(‖q‖²) Σ_ij b_i b_j exp(−½‖k_i − k_j‖²).

    b = w exp(2q·k + ½‖k‖²): a Gaussian kernel, which cannot overflow, between weights whose largest is taken out.
    """
    dtype = query.dtype
    query = query.double()
    key = key.double()
    weight = weight.double()
    norm = key.square().sum(-1)
    batch, heads, group, length, size = query.shape
    result = query.new_zeros(batch, heads, group * length)
    rows = max(1, BLOCK_NUMBERS // max(1, key.shape[2]))
    for item in range(batch):
        for head in range(heads):
            head_query = query[item, head].reshape(-1, size)
            for first in range(0, len(head_query), rows):
                part = slice(first, first + rows)
                result[item, head, part] = _relative_variance(
                    head_query[part], key[item, head], norm[item, head], weight[item, head], rows
                )
    return (result / features).sqrt().to(dtype).unflatten(-1, (group, length))


def _relative_variance(query: Tensor, key: Tensor, norm: Tensor, weight: Tensor, rows: int) -> Tensor:
    """Var Ẑ₁ / Z² for the queries of one head, in float64.

    Args:
        norm: ‖k‖² of each key.
        weight: log w of each key.
        rows: of the Gaussian kernel at a time.
    """
    if len(key) == 0:
        return query.new_zeros(len(query))
    scores = query @ key.mT
    log_z = torch.logsumexp(scores + weight, -1)
    # log b, and b with its largest taken out.
    log_b = 2 * scores + weight + norm / 2
    top = log_b.amax(-1, keepdim=True)
    share = (log_b - top.masked_fill(top == -torch.inf, 0.0)).exp()
    # Σ_ij b_i b_j exp(−½‖k_i − k_j‖²), a few rows of the kernel at a time.
    total = query.new_zeros(len(query))
    for first in range(0, len(key), rows):
        block = slice(first, first + rows)
        kernel = torch.exp(key[block] @ key.mT - (norm[block, None] + norm) / 2)
        total += torch.einsum("qi,ij,qj->q", share[:, block], kernel, share)
    log_ratio = query.square().sum(-1) + 2 * top.squeeze(-1) + total.log() - 2 * log_z
    # Rounding may take a variance of zero below it.
    return torch.where(log_z == -torch.inf, 0.0, torch.expm1(log_ratio).clamp_min(0.0))
