"""What a language model's softmax says of each token: its log-probability, entropy and rank, without the logits."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from massieu.foundation.arguments import whole_number
from massieu.foundation.transforms import without_autocast
from massieu.ops.linear_scores import RowStatistics, check_places, compute, one_number, values_are_known
from massieu.ops.score_tiles import ScorePlan, rows_for_product
from massieu.ops.shapes import working_dtype
from massieu.ops.vocabulary import check_shapes, checked_softcap

UNRANKED = -1
"""The rank of a token that has none."""


class TokenStatisticsResult(NamedTuple):
    """What `token_statistics` returns, a number for each token; logarithms are in nats."""

    log_probability: Float[Tensor, "*lead"]
    """Of the target; at most 0."""
    entropy: Float[Tensor, "*lead"]
    """Of the next word; at least 0."""
    log_partition: Float[Tensor, "*lead"]
    """log Z, the logarithm of the sum of exp(logit)."""
    rank: Int[Tensor, "*lead"]
    """How many words have a larger logit than the target; −1 where that is not known."""
    largest_probability: Float[Tensor, "*lead"]
    """Of the most probable word; without gradient."""


def token_statistics(
    hidden: Float[Tensor, "*lead D"],
    weight: Float[Tensor, "V D"],
    target: Int[Tensor, "*lead"],
    *,
    bias: Float[Tensor, "V"] | None = None,
    temperature: float | Float[Tensor, ""] = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
) -> TokenStatisticsResult:
    """Log-probability of each target word, entropy, log Z, rank and largest probability, without keeping the logits.

    The logits are s_v = (hidden·weight_v + bias_v)/temperature, with a soft cap c
    s_v = c·tanh((hidden·weight_v + bias_v)/c)/temperature, as Gemma 2 has it. Then log Z = log Σ_v exp s_v, the
    log-probability is s_target − log Z, and the entropy is log Z − E[s]: the conjugate of log Z with its sign turned.

    Args:
        hidden: (*lead, D), any number of leading dimensions, none included: packed rows are as good as a batch.
        weight, bias: of the hidden's dtype and device; under autocast dtypes may differ. A bias of −inf hides a word, under
            a soft cap too.
        target: the hidden's leading shape, integers in 0 … V − 1, or `ignore_index`.
        temperature: above 0, a number, or without a soft cap a tensor of one number, which has its gradient.
        softcap: the bound c of the logits, above 0, or None.
        ignore_index: tokens with this target get zeros, the rank −1, and no gradient.

    All terms of each sum have one sign: a softmax that is nearly all on one word keeps the digits of its entropy and
    log-probability, however small they are. A hidden word adds 0 to the entropy. A hidden target has log-probability
    −inf; a token of which every word is hidden has log Z = −inf, entropy 0 and largest probability 0. A token with a NaN
    gets NaN and rank −1, other tokens their own numbers.

    The rank counts logits before the soft cap. Those that agree with the target's to rounding, ε·‖hidden‖·‖weight_target‖
    with the machine precision ε of the result, are ties and do not count; neither does the target itself.

    Log-probability, entropy and log Z are differentiable any number of times in hidden, weight, bias and temperature,
    forwards too, under `torch.func` and `torch.compile`; beyond first derivatives, and in compiled transforms, by plain
    operations in blocks of tokens. Rank and largest probability have no gradient. Results are float64 for float64 and
    float32 for every other dtype; half-precision inputs are promoted a tile at a time. Tiles of logits are computed in the
    forward pass and again in the backward pass; no memory in tokens × words.

    Raises:
        TypeError: not a tensor, not floating-point or not integers, dtypes that differ, an option of another type.
        ValueError: shapes or devices that do not fit (both are named), an option out of range, a tensor for a temperature
            together with a soft cap; on the CPU a target out of range (elsewhere, compiled, or in a transform such a
            token's log-probability is NaN, its rank −1).

    Example:
        >>> import torch
        >>> from massieu import ops
        >>> statistics = ops.token_statistics(
        ...     torch.ones(1, 1), torch.tensor([[0.0], [0.0], [1.0]]).log1p(), torch.tensor([0])
        ... )
        >>> numbers = statistics.log_probability.exp(), statistics.entropy, statistics.rank
        >>> [round(float(number), 3) for number in numbers]
        [0.25, 1.04, 1.0]
    """
    words = check_shapes(hidden, weight, target, bias).reshape(-1)
    check_options(hidden, temperature, softcap, ignore_index)
    with without_autocast(hidden.device):
        counts = words != ignore_index
        row = hidden.reshape(-1, hidden.shape[-1])
        counted = None
        are_known = values_are_known(target)
        if are_known:
            check_places("target", words[counts], len(weight), f" or be ignore_index, {ignore_index}")
            if not bool(counts.all()):
                # Tokens that are ignored are not computed.
                counted = counts.nonzero().squeeze(1)
                row = row[counted]
                words = words[counted]
        else:
            # Zeros, so that a NaN of an ignored token reaches no gradient of the weights, which all tokens share.
            row = row.masked_fill(~counts.unsqueeze(1), 0.0)
            words = words.where(counts, 0)
        plan = logit_plan(row, weight, bias, words, temperature, checked_softcap(softcap, hidden))
        result: Iterable[Tensor] = statistics(RowStatistics(*compute(plan._replace(above=tie_level(plan)))))
        if counted is not None:
            ignored = without_ignored((part.new_zeros(len(counts)) for part in result), torch.zeros_like(counts))
            result = [of_ignored.index_copy(0, counted, part) for of_ignored, part in zip(ignored, result, strict=True)]
        elif not are_known:
            result = without_ignored(result, counts)
        return TokenStatisticsResult(*(part.reshape(target.shape) for part in result))


def without_ignored(numbers: Iterable[Tensor], counts: Tensor) -> Iterator[Tensor]:
    """Statistics with 0, or the rank −1, for tokens that do not count."""
    return (part.masked_fill(~counts, 0 if part.is_floating_point() else UNRANKED) for part in numbers)


def statistics(rows: RowStatistics) -> TokenStatisticsResult:
    """The statistics of tokens that count."""
    log_z = rows.log_partition.detach()
    rank = rows.larger.detach().masked_fill(rows.excess.detach().isnan(), UNRANKED).long()
    largest_probability = (-rows.surplus.detach()).exp().masked_fill(log_z == -torch.inf, 0.0)
    return TokenStatisticsResult(-rows.excess, rows.entropy, rows.log_partition, rank, largest_probability)


def check_options(hidden: Tensor, temperature: float | Tensor, softcap: float | None, ignore_index: int) -> None:
    one_number("temperature", temperature, hidden.dtype, above=0, hidden=hidden)
    whole_number("ignore_index", ignore_index, least=-(1 << 63))
    checked_softcap(softcap, hidden)
    if softcap is not None and isinstance(temperature, Tensor):
        raise ValueError("temperature must be a number if there is a softcap, got a tensor")


def logit_plan(
    row: Tensor, weight: Tensor, bias: Tensor | None, words: Tensor, temperature: float | Tensor, softcap: float | None
) -> ScorePlan:
    """The plan whose scores are the logits divided by the temperature T.

    c·tanh(s/c)/T = k·tanh((s/T)/k) with k = c/T, so that the soft cap is scaled as the scores are.
    """
    dtype = working_dtype(row)
    scale = 1.0
    if isinstance(temperature, Tensor):
        # Rows and bias are divided, and not the scores, as a plan's scale is a number without a gradient.
        temperature = temperature.reshape(()).to(dtype)
        row = row.to(dtype) / temperature
        if bias is not None:
            bias = _divided(bias.to(dtype), temperature)
    elif temperature != 1:
        scale = 1 / float(temperature)
        if bias is not None:
            bias = bias.to(dtype) * scale
        if softcap is not None:
            softcap = softcap * scale
    row = rows_for_product(row, weight)
    return ScorePlan(row, weight, bias, words, bias_in_score=True, softcap=softcap, scale=scale)


def _divided(bias: Tensor, temperature: Tensor) -> Tensor:
    """bias/temperature, where −∞ stays −∞ as a constant: the derivative of a quotient with it would be NaN."""
    hidden = bias == -torch.inf
    return (bias.masked_fill(hidden, 0.0) / temperature).masked_fill(hidden, -torch.inf)


@torch.no_grad()
def tie_level(plan: ScorePlan) -> Tensor:
    """Each target's score plus a bound on its rounding, above which a score is larger; NaN for a target out of range."""
    inside = (plan.target >= 0) & (plan.target < len(plan.column))
    place = plan.target.where(inside, 0)
    row = plan.row.detach().to(plan.dtype)
    column = plan.column.detach()[place].to(plan.dtype)
    score = plan.scale * torch.linalg.vecdot(row, column)
    # Rounding moves an inner product by about the machine precision times the product of the norms.
    size = plan.scale * row.norm(dim=1) * column.norm(dim=1)
    if plan.bias is not None:
        bias = plan.bias.detach()[place].to(plan.dtype)
        score = score + bias
        size = size + bias.abs().masked_fill(bias == -torch.inf, 0.0)
    return (score + torch.finfo(plan.dtype).eps * size).masked_fill(~inside, torch.nan)
