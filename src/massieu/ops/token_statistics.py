"""What a language model's softmax says of each token: its log-probability, entropy and rank, without the logits."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Literal, NamedTuple, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor

from massieu.foundation.arguments import flag, integers, whole_number
from massieu.foundation.short_repr import fields_html, fields_repr
from massieu.foundation.transforms import without_autocast
from massieu.ops.differentiable import recomputed
from massieu.ops.linear_scores import RowStatistics, check_places, compute, index_tensor, one_number, values_are_known
from massieu.ops.score_tiles import ScorePlan, rows_for_product
from massieu.ops.shapes import slices, working_dtype
from massieu.ops.vocabulary import check_shapes, checked_softcap

GATHERED = 1 << 24
"""Numbers of words' vectors that are gathered at a time."""
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

    __repr__ = fields_repr
    _repr_html_ = fields_html


class WordStatisticsResult(NamedTuple):
    """What `token_statistics` returns if it is asked for several words of a token, or for its most probable one."""

    log_probability: Float[Tensor, "*lead"]
    entropy: Float[Tensor, "*lead"]
    log_partition: Float[Tensor, "*lead"]
    rank: Int[Tensor, "*lead"]
    largest_probability: Float[Tensor, "*lead"]
    word_log_probability: Float[Tensor, "*lead K"] | None
    """Of each of the `words`; None if none were given."""
    largest_word: Int[Tensor, "*lead"] | None
    """The number of the most probable word, of equal ones the first; −1 where that is not known; None if not asked for."""

    __repr__ = fields_repr
    _repr_html_ = fields_html


@overload
def token_statistics(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    words: None = None,
    largest_word: Literal[False] = False,
) -> TokenStatisticsResult: ...


@overload
def token_statistics(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    words: Tensor | None = None,
    largest_word: bool = False,
) -> TokenStatisticsResult | WordStatisticsResult: ...


def token_statistics(
    hidden: Float[Tensor, "*lead D"],
    weight: Float[Tensor, "V D"],
    target: Int[Tensor, "*lead"],
    *,
    bias: Float[Tensor, "V"] | None = None,
    temperature: float | Float[Tensor, ""] = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    words: Int[Tensor, "*lead K"] | None = None,
    largest_word: bool = False,
) -> TokenStatisticsResult | WordStatisticsResult:
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
        words: (*lead, K) integers in 0 … V − 1: return a `WordStatisticsResult` with the log-probability of each of these K
            words of a token too, such as a teacher's most probable ones. It is score − log Z, right to the rounding of
            these; the target's keeps more digits.
        largest_word: return a `WordStatisticsResult` with the number of the most probable word too, the argmax, at the cost of
            one more matrix product. It has no gradient.

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
    targets = check_shapes(hidden, weight, target, bias).reshape(-1)
    check_options(hidden, temperature, softcap, ignore_index)
    flag("largest_word", largest_word)
    several = None if words is None else _checked_words(words, hidden, len(weight))
    with without_autocast(hidden.device):
        counts = targets != ignore_index
        row = hidden.reshape(-1, hidden.shape[-1])
        counted = None
        are_known = values_are_known(target)
        if are_known:
            check_places("target", targets[counts], len(weight), f" or be ignore_index, {ignore_index}")
            if not bool(counts.all()):
                # Tokens that are ignored are not computed.
                counted = counts.nonzero().squeeze(1)
                row = row[counted]
                targets = targets[counted]
                several = None if several is None else several[counted]
        else:
            # Zeros, so that a NaN of an ignored token reaches no gradient of the weights, which all tokens share.
            row = row.masked_fill(~counts.unsqueeze(1), 0.0)
            targets = targets.where(counts, 0)
        plan = logit_plan(row, weight, bias, targets, temperature, checked_softcap(softcap, hidden))
        found = statistics(RowStatistics(*compute(plan._replace(above=tie_level(plan)))))
        of_words = [] if several is None else list((_scores_of(plan, several) - found.log_partition.unsqueeze(1)).mT)
        largest = [_largest_word(plan, found.log_partition)] if largest_word else []
        result: Iterable[Tensor] = (*found, *of_words, *largest)
        if counted is not None:
            ignored = without_ignored((part.new_zeros(len(counts)) for part in result), torch.zeros_like(counts))
            result = [of_ignored.index_copy(0, counted, part) for of_ignored, part in zip(ignored, result, strict=True)]
        elif not are_known:
            result = without_ignored(result, counts)
        shaped = [part.reshape(target.shape) for part in result]
        if words is None and not largest_word:
            return TokenStatisticsResult(*shaped)
        return WordStatisticsResult(
            *shaped[:5],
            word_log_probability=None if words is None else torch.stack(shaped[5 : 5 + len(of_words)], -1),
            largest_word=shaped[-1] if largest_word else None,
        )


def _checked_words(words: Tensor, hidden: Tensor, count: int) -> Int[Tensor, "T K"]:
    """Raises:
    TypeError: not integers.
    ValueError: another leading shape than the hidden's, no word, or on the CPU a word out of range.
    """
    lead = tuple(hidden.shape[:-1])
    shape = tuple(integers("words", words).shape)
    if shape[:-1] != lead or len(shape) != len(lead) + 1 or shape[-1] == 0:
        raise ValueError(
            f"words must have shape {(*lead, 'K')} with K at least 1 for hidden of {lead} tokens, got {shape}"
        )
    index = index_tensor("words", words, shape, hidden=hidden).reshape(-1, shape[-1])
    if values_are_known(index):
        check_places("words", index.flatten(), count)
    return index


def _scores_of(plan: ScorePlan, words: Int[Tensor, "T K"]) -> Float[Tensor, "T K"]:
    """The scores of some words of each row, capped; the words' vectors are gathered for some rows at a time."""
    rows_at_once = max(1, GATHERED // max(1, words.shape[1] * plan.row.shape[1]))
    block = partial(_block_scores, plan.softcap, plan.scale, plan.dtype)
    scores = [
        recomputed(block, plan.row[rows], plan.column, plan.bias, words[rows])[0]
        for rows in slices(len(words), rows_at_once)
    ]
    return torch.cat(scores) if scores else plan.row.new_zeros(words.shape, dtype=plan.dtype)


def _block_scores(
    softcap: float | None,
    scale: float,
    dtype: torch.dtype,
    row: Tensor,
    column: Tensor,
    bias: Tensor | None,
    words: Tensor,
) -> tuple[Tensor]:
    scores = torch.einsum("td,tkd->tk", row.to(dtype), column[words].to(dtype)) * scale
    if bias is None:
        return (scores if softcap is None else softcap * torch.tanh(scores / softcap),)
    # A bias of −∞ hides a word under a soft cap too, and its derivative would be NaN there.
    chosen = bias[words].to(dtype)
    is_hidden = chosen == -torch.inf
    scores = scores + chosen.masked_fill(is_hidden, 0.0)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return (scores.masked_fill(is_hidden, -torch.inf),)


@torch.no_grad()
def _largest_word(plan: ScorePlan, log_partition: Tensor) -> Int[Tensor, "T"]:
    """The word with the largest score of each row; a soft cap keeps their order."""
    best = torch.full_like(log_partition.detach(), -torch.inf)
    word = torch.zeros_like(best, dtype=torch.long)
    for tile in plan.tiles():
        scores = tile.scores if plan.bias is None else tile.scores + plan.bias[tile.columns]
        value, place = scores.max(1)
        is_larger = value > best[tile.rows]
        best[tile.rows] = torch.where(is_larger, value, best[tile.rows])
        word[tile.rows] = torch.where(is_larger, place + tile.columns.start, word[tile.rows])
    # Of a token with NaN, or of which every word is hidden, it is not known.
    return word.masked_fill(~log_partition.detach().isfinite(), UNRANKED)


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
