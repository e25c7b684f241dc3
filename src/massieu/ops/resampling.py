"""Attention as sequential Monte Carlo: each query draws values by its weights, and attention is the mean of the draws."""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from massieu.foundation.arguments import choice, whole_number
from massieu.foundation.arguments import generator as check_generator
from massieu.foundation.listening import unreadable
from massieu.foundation.short_repr import fields_html, fields_repr
from massieu.foundation.transforms import uncompiled, without_autocast
from massieu.ops import reference
from massieu.ops.shapes import AttentionProblem, Scale, check_problem

Method = Literal["multinomial", "systematic"]


class ResamplingResult(NamedTuple):
    """What `resample_attention` returns; P are the attention weights."""

    sample: Float[Tensor, "*query S E"]
    """value_J of each draw, in the query's dtype; 0 for a query that sees no key, NaN for one whose weights are NaN. It has
    the values' gradient."""
    indices: Int[Tensor, "*query S"]
    """J, which key was drawn; −1 for a query that sees none, or whose weights are NaN."""
    effective_size: Float[Tensor, "*query"]
    """1/Σ_j P_ij², between 1 and the number of visible keys, and at most the perplexity; 0 where there is none."""
    offspring: Float[Tensor, "*head N"]
    """Σ_i P_ij: how often key j is expected to be drawn if each query of a head draws once."""

    __repr__ = fields_repr
    _repr_html_ = fields_html


@uncompiled
@unreadable("it attends by massieu.ops.resample_attention, which draws keys at random", attends=True)
def resample_attention(
    query: Float[Tensor, "*query D"],
    key: Float[Tensor, "*batch Hk N D"],
    value: Float[Tensor, "*batch Hk N E"],
    *,
    generator: torch.Generator,
    draws: int = 1,
    method: Method = "multinomial",
    log_weight: Float[Tensor, "..."] | Bool[Tensor, "..."] | None = None,
    scale: Scale = None,
    is_causal: bool = False,
) -> ResamplingResult:
    """Draw J ~ P_i for each query i and return value_J: what `massieu.ops.attention` is the conditional mean of (S19).

    E[value_J] = Σ_j P_ij value_j and Cov[value_J] = Cov_{P_i}(value), which for value = key is the derivative of attention
    in the query over the scale. So the mean of S draws is unbiased for attention with covariance Cov/S, and attention is
    resampling with its noise averaged out (Rao and Blackwell).

    Args:
        query, key, value, log_weight, scale, is_causal: as in `massieu.ops.attention`.
        generator: source of the draws; its device may be another than the query's.
        draws: S, for each query.
        method: "multinomial": draws are independent. "systematic": those of a head share one uniform number, and lie on a
            grid: every draw still has the probabilities P_i, but of S draws of a query key j gets S·P_ij rounded up or
            down, and if all L queries of a head have the same weights, of all their draws L·S·P_j rounded up or down.

    Weights are held for blocks of queries; memory is linear in queries and keys. Only `sample` has a gradient, that for the
    values: draws have none, and `massieu.ops.attention` is the differentiable mean.

    Under `torch.func.vmap` its `randomness` says whether items share the draws ("same") or have their own ("different").
    Autocast changes nothing. `torch.compile` runs this as it is and compiles what is around it.

    Raises:
        TypeError: as `massieu.ops.attention`; a generator or number of draws of another type.
        ValueError: the same; fewer than 1 draw, an unknown method.

    Example:
        >>> import torch
        >>> from massieu import ops
        >>> query, key, certain = torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 3, 2), torch.arange(3) == 1
        >>> result = ops.resample_attention(query, key, key, generator=torch.Generator(), draws=2, log_weight=certain)
        >>> result.indices.tolist()
        [[[[1, 1]]]]
    """
    check_generator("generator", generator)
    whole_number("draws", draws, least=1)
    choice("method", method, "multinomial", "systematic")
    if value is None:
        raise TypeError("value must be a tensor, got None")
    problem = check_problem(query, key, value, log_weight, scale, is_causal)
    assert problem.value is not None
    with torch.no_grad(), without_autocast(query.device):
        index, size, offspring = _draw(problem, generator, draws, method)
    # Weights with a NaN have no draw: the sample is NaN, as attention is.
    sample = _take(problem.value, index).masked_fill(size.isnan()[..., None, None], torch.nan)
    heads = problem.lead[:-1]
    return ResamplingResult(
        problem.restore(sample).to(query.dtype),
        problem.restore(index),
        problem.restore(size),
        offspring.reshape(*heads, key.shape[-2]),
    )


def _draw(
    problem: AttentionProblem, generator: torch.Generator, draws: int, method: Method
) -> tuple[Tensor, Tensor, Tensor]:
    """Indices (B, Hk, G, L, S), effective sizes (B, Hk, G, L) and column sums (B, Hk, G, N)."""
    shape = problem.query.shape[:4]
    uniform = _uniform(shape, draws, generator, method).to(problem.query.device)
    offspring = problem.query.new_zeros((), dtype=problem.dtype)
    first = 0  # number of the block's first query; blocks come in order

    def weigh(scores: Tensor, log_weight: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor]:
        """Indices and effective sizes of a block of queries, whose weights are added to `offspring`."""
        nonlocal first, offspring
        weights, total, log_z = reference.softmax(scores, log_weight)
        share = weights / total.unsqueeze(-1)
        offspring = offspring + share.sum(3)
        block_uniform = uniform[:, :, :, first : first + share.shape[3]]
        first += share.shape[3]
        sees_no_key = log_z == -torch.inf
        size = torch.where(sees_no_key, 0.0, 1 / share.square().sum(-1))
        return _drawn_keys(weights, block_uniform, sees_no_key), size

    index, size = reference.in_blocks(problem.zero_queries_without_key(), weigh)
    return index, size, offspring


def _uniform(shape: tuple[int, ...], draws: int, generator: torch.Generator, method: Method) -> Tensor:
    """Numbers in [0, 1), one for each draw, at which the cumulative weights are read: (B, Hk, G, L, S), float64."""
    options = {"generator": generator, "device": generator.device, "dtype": torch.float64}
    if method == "multinomial":
        return torch.rand(*shape, draws, **options)
    length = shape[3]
    start = torch.rand(*shape[:3], 1, 1, **options)
    # A query's own draws are 1/S apart, and the queries' grids fill each other's gaps.
    query = torch.arange(length, dtype=torch.float64, device=generator.device).unsqueeze(-1) / max(1, length * draws)
    return (start + query + torch.arange(draws, dtype=torch.float64, device=generator.device) / draws) % 1.0


def _drawn_keys(weights: Tensor, uniform: Tensor, sees_no_key: Tensor) -> Tensor:
    """The first key at which the cumulative weight passes uniform·total; −1 if there is none."""
    if weights.shape[-1] == 0:
        return torch.full(uniform.shape, -1, device=weights.device)
    cumulative = weights.double().cumsum(-1)
    total = cumulative[..., -1:]
    # No key passes a product that is rounded up to the total, so it is kept below.
    place = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, place.contiguous(), right=True)
    has_no_draw = sees_no_key | total.squeeze(-1).isnan()
    return index.masked_fill(has_no_draw.unsqueeze(-1), -1)


def _take(value: Tensor, index: Tensor) -> Tensor:
    """Values (B, Hk, N, E) at (B, Hk, G, L, S); 0 at −1."""
    size = value.shape[-1]
    flat = index.flatten(2).unsqueeze(-1)
    if value.shape[2] == 0:
        return value.sum(2)[:, :, None, None, None].expand(*index.shape, size)
    taken = value.gather(2, flat.clamp_min(0).expand(-1, -1, -1, size)).masked_fill(flat < 0, 0.0)
    return taken.reshape(*index.shape, size)
