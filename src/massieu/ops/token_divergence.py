"""The divergence of two language models at each token, over the whole vocabulary and without either's logits.

KL(p ‖ q) is the Bregman divergence of the log-partition between two points (X1), here the two models' logits. It is summed as
Σ_v p_v·φ(−c_v) with c = log p − log q and φ(x) = eˣ − 1 − x. All terms are ≥ 0, so that models that hardly differ keep the
digits of their divergence, which a difference of means loses.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import forward_ad

from massieu.foundation.arguments import check_one_device, flag, number, whole_number
from massieu.foundation.numerics import exp_
from massieu.foundation.short_repr import fields_html, fields_repr
from massieu.foundation.transforms import (
    in_functorch,
    in_nested_forward_mode,
    may_be_differentiated,
    without_autocast,
)
from massieu.ops import reference
from massieu.ops.differentiable import BlockSum, recomputed
from massieu.ops.linear_scores import check_places, index_tensor, values_are_known
from massieu.ops.score_sums import LOWEST
from massieu.ops.score_tiles import ScorePlan, ScoreTile, product, rows_for_product
from massieu.ops.shapes import scores_per_tile, slices, working_dtype
from massieu.ops.vocabulary import check_heads, checked_softcap

BLOCK_PAIRS = 13 << 20
"""Logits of a model that the forward pass holds at once on the CPU; `scores_per_tile` says how many on a device."""
PART_PAIRS = 1 << 17
"""Logits of a model that the passes over a block or a tile go through together on the CPU: 512 KiB in float32."""

Results = tuple[Tensor, ...]


class TokenDivergenceResult(NamedTuple):
    """What `token_divergence` returns, a number for each token, in nats and at least 0."""

    divergence: Float[Tensor, "*lead"]
    """KL(p ‖ q) = Σ_v p_v·(log p_v − log q_v)."""
    reverse_divergence: Float[Tensor, "*lead"]
    """KL(q ‖ p)."""

    __repr__ = fields_repr
    _repr_html_ = fields_html


class MixtureDivergenceResult(NamedTuple):
    """What `token_divergence` returns if a divergence through the mixture, or the total variation, is asked for."""

    divergence: Float[Tensor, "*lead"]
    """KL(p ‖ q)."""
    reverse_divergence: Float[Tensor, "*lead"]
    """KL(q ‖ p)."""
    jensen_shannon: Float[Tensor, "*lead"] | None
    """π·KL(p ‖ m) + (1 − π)·KL(q ‖ m) with m = π·p + (1 − π)·q; None if it was not asked for."""
    total_variation: Float[Tensor, "*lead"] | None
    """½·Σ_v |p_v − q_v|, from 0 to 1; None if it was not asked for."""

    __repr__ = fields_repr
    _repr_html_ = fields_html


@overload
def token_divergence(
    hidden: Tensor,
    weight: Tensor,
    other_hidden: Tensor,
    other_weight: Tensor,
    *,
    bias: Tensor | None = None,
    other_bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    other_softcap: float | None = None,
    target: Tensor | None = None,
    ignore_index: int = -100,
    jensen_shannon: None = None,
    total_variation: Literal[False] = False,
) -> TokenDivergenceResult: ...


@overload
def token_divergence(
    hidden: Tensor,
    weight: Tensor,
    other_hidden: Tensor,
    other_weight: Tensor,
    *,
    bias: Tensor | None = None,
    other_bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    other_softcap: float | None = None,
    target: Tensor | None = None,
    ignore_index: int = -100,
    jensen_shannon: float | None = None,
    total_variation: bool = False,
) -> TokenDivergenceResult | MixtureDivergenceResult: ...


def token_divergence(
    hidden: Float[Tensor, "*lead D"],
    weight: Float[Tensor, "V D"],
    other_hidden: Float[Tensor, "*lead E"],
    other_weight: Float[Tensor, "V E"],
    *,
    bias: Float[Tensor, "V"] | None = None,
    other_bias: Float[Tensor, "V"] | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    other_softcap: float | None = None,
    target: Int[Tensor, "*lead"] | None = None,
    ignore_index: int = -100,
    jensen_shannon: float | None = None,
    total_variation: bool = False,
) -> TokenDivergenceResult | MixtureDivergenceResult:
    """KL(p ‖ q) and KL(q ‖ p) of two models' next words at each token, exact over the vocabulary, without their logits.

    p is the softmax of (hidden·weight_v + bias_v)/temperature, with a soft cap c that of
    c·tanh((hidden·weight_v + bias_v)/c)/temperature; q is that of the other model. This is what policy optimisation
    estimates from the words that were drawn, and what distillation minimises: the Bregman divergence of log Z (X1).

    Args:
        hidden, other_hidden: (*lead, D) and (*lead, E) with the same leading shape, any number of dimensions.
        weight, other_weight, bias, other_bias: over the same V words. A bias of −inf hides a word.
        temperature: of both models, above 0.
        softcap, other_softcap: the bound of the logits, above 0, or None.
        target: *lead, integers in 0 … V − 1, or `ignore_index`. It only says which tokens count: the sums are over all
            words, whichever word a target names.
        ignore_index: tokens with this target, such as a prompt's or padding, get zeros and no gradient.
        jensen_shannon: the weight π of p in the mixture, between 0 and 1: return a `MixtureDivergenceResult` with
            π·KL(p ‖ m) + (1 − π)·KL(q ‖ m) too. It is at most the entropy of (π, 1 − π), also where one model hides a word.
            Divided by π, or by 1 − π, it tends to KL(p ‖ q), or to KL(q ‖ p), as π tends to 0, or to 1.
        total_variation: return a `MixtureDivergenceResult` with ½·Σ_v |p_v − q_v| too. Its derivative is 0 where p_v = q_v.

    Each term of either sum is at least 0, and 0 for equal logits: models that differ by little keep the digits that their
    logits have. If logits are rounded by δ and differ by c, the divergence, near c²/2, has a relative error of 2δ/c beside
    an absolute one of δ². A sum of p·(log p − log q) in the same precision is off by δ, at any c.

    A word that q alone hides makes KL(p ‖ q) infinite and its gradients not finite. To KL(q ‖ p) it adds p_v, the limit of
    its term. Words that both models hide add nothing. A token gets NaN if a model hides all words or if there is a NaN.

    Differentiable in all tensors any number of times, forwards too, under `torch.func` and `torch.compile`. First gradients
    compute tiles of logits again; all other derivatives, and compiled code, use plain operations in blocks of tokens. It takes
    eight matrix products, where keeping all logits takes six, and no memory in tokens × words. `jensen_shannon` and
    `total_variation` are computed by the plain operations, with eight products more. Results are float64 for
    float64 and float32 for every other dtype. On the CPU tokens that are ignored are not computed; elsewhere, and in
    compiled code and transforms, their hidden states count as 0.

    Raises:
        TypeError: not a tensor, not floating-point or not integers; different dtypes within a model; an option of another
            type.
        ValueError: shapes or devices that do not fit (both are named); an option out of range; an `ignore_index` without
            targets; on the CPU a target out of range. Elsewhere, compiled or in a transform, such a target counts.

    Example:
        >>> import torch
        >>> from massieu import ops
        >>> uniform = torch.zeros(4, 1)
        >>> certain = torch.tensor([[0.0], [-99.0], [-99.0], [-99.0]])
        >>> result = ops.token_divergence(torch.ones(1, 1), certain, torch.ones(1, 1), uniform)
        >>> round(result.divergence.exp().item(), 3)  # log 4
        4.0
    """
    check_heads(hidden, weight, bias)
    check_heads(other_hidden, other_weight, other_bias, "other_")
    check_one_device(hidden=hidden, other_hidden=other_hidden)
    lead = tuple(hidden.shape[:-1])
    if tuple(other_hidden.shape[:-1]) != lead:
        raise ValueError(
            f"hidden and other_hidden must have one leading shape, got {lead} and {tuple(other_hidden.shape[:-1])}"
        )
    if len(weight) != len(other_weight):
        raise ValueError(
            f"weight and other_weight must be of the same words, got {len(weight)} and {len(other_weight)} of them"
        )
    whole_number("ignore_index", ignore_index, least=-(1 << 63))
    flag("total_variation", total_variation)
    if jensen_shannon is not None:
        jensen_shannon = float(number("jensen_shannon", jensen_shannon, above=0, below=1))
    if target is None and ignore_index != -100:
        raise ValueError(f"ignore_index is for targets, got {ignore_index} and no target")
    targets = None if target is None else index_tensor("target", target, lead, hidden=hidden).reshape(-1)
    options = _Options(
        dtype=torch.promote_types(working_dtype(hidden), working_dtype(other_hidden)),
        softcap=checked_softcap(softcap, hidden),
        other_softcap=checked_softcap(other_softcap, other_hidden),
        temperature=float(number("temperature", temperature, above=0)),
    )
    rows = hidden.reshape(-1, hidden.shape[-1])
    other_rows = other_hidden.reshape(-1, other_hidden.shape[-1])

    asked = _Asked(jensen_shannon, total_variation)

    def divergences(rows: Tensor, other_rows: Tensor) -> Results:
        tensors = rows, weight, bias, other_rows, other_weight, other_bias
        found = _differentiable(*tensors, options=options)
        return (*found, *_by_reference(options, *tensors, block=asked.block)) if asked.anything else found

    with without_autocast(hidden.device):
        if targets is None:
            results = divergences(rows, other_rows)
        elif values_are_known(targets):
            counts = targets != ignore_index
            check_places("target", targets[counts], len(weight), f" or be ignore_index, {ignore_index}")
            counted = counts.nonzero().squeeze(1)
            results = tuple(
                part.new_zeros(len(targets)).index_copy(0, counted, part)
                for part in divergences(rows[counted], other_rows[counted])
            )
        else:
            # Zeros, so that a NaN of an ignored token reaches no gradient of the weights, which all tokens share.
            ignored = targets == ignore_index
            rows = rows.masked_fill(ignored.unsqueeze(1), 0.0)
            other_rows = other_rows.masked_fill(ignored.unsqueeze(1), 0.0)
            results = tuple(part.masked_fill(ignored, 0.0) for part in divergences(rows, other_rows))
    shaped = [part.reshape(lead) for part in results]
    if not asked.anything:
        return TokenDivergenceResult(*shaped)
    both = shaped[:2]
    others = iter(shaped[2:])
    return MixtureDivergenceResult(
        *both,
        jensen_shannon=None if jensen_shannon is None else next(others),
        total_variation=next(others) if total_variation else None,
    )


class _Asked(NamedTuple):
    """What is asked for beside both divergences."""

    jensen_shannon: float | None
    """The weight of p in the mixture."""
    total_variation: bool

    @property
    def anything(self) -> bool:
        return self.jensen_shannon is not None or self.total_variation

    def block(self, options: "_Options", *tensors: Tensor | None) -> Results:
        """The numbers of some tokens."""
        c, p, q, hidden, other_hidden = _compared(options, *tensors)
        # A model that hides every word has no distribution.
        undefined = hidden.all(1) | other_hidden.all(1)
        terms = []
        if self.jensen_shannon is not None:
            terms.append(_mixture_terms(self.jensen_shannon, c, p, q, hidden, other_hidden))
        if self.total_variation:
            # |p − q| = max(p, q)·(1 − exp(−|c|)) keeps its digits where p and q have most of theirs in common.
            apart = torch.maximum(p, q) * -torch.expm1(-c.abs())
            terms.append(torch.where(hidden | other_hidden, (p - q).abs(), apart) / 2)
        return tuple(each.sum(1).masked_fill(undefined, torch.nan) for each in terms)


class _Options(NamedTuple):
    dtype: torch.dtype
    temperature: float
    softcap: float | None
    other_softcap: float | None

    def plans(self, *tensors: Tensor | None) -> tuple[ScorePlan, ScorePlan]:
        """Both models' logits, divided by the temperature."""
        return self._plan(self.softcap, *tensors[:3]), self._plan(self.other_softcap, *tensors[3:])

    def _plan(self, softcap: float | None, row: Tensor | None, column: Tensor | None, bias: Tensor | None) -> ScorePlan:
        assert row is not None and column is not None
        scale = 1 / self.temperature
        row = rows_for_product(row, column)
        if not row.dtype == column.dtype == torch.bfloat16:
            # The other model may have float64, in which the terms are then computed.
            row = row.to(self.dtype)
        return ScorePlan(
            row=row,
            column=column,
            bias=None if bias is None else bias.to(self.dtype) * scale,
            # All words count alike: a plan needs targets, and nothing reads these.
            target=torch.zeros(len(row), dtype=torch.long, device=row.device),
            bias_in_score=True,
            # c·tanh(s/c)/T = (c/T)·tanh((s/T)/(c/T)).
            softcap=None if softcap is None else softcap * scale,
            scale=scale,
        )


def _differentiable(*tensors: Tensor | None, options: _Options) -> Results:
    """Both divergences of rows, weight and bias of the one model, then of the other."""
    by_reference = partial(_by_reference, options)
    if torch.compiler.is_compiling() or in_functorch() or in_nested_forward_mode():
        return by_reference(*tensors)
    # No derivative goes through the quick pass: `BlockSum` has them all.
    primals = [None if tensor is None else forward_ad.unpack_dual(tensor).primal for tensor in tensors]
    with torch.no_grad():
        normalisers, results = _forward(options, *primals)
    if not may_be_differentiated(*(tensor for tensor in tensors if tensor is not None)):
        return results
    learned = [any(part is not None and part.requires_grad for part in model) for model in (tensors[:3], tensors[3:])]
    gradient = partial(_backward, options, normalisers, results, learned)
    return BlockSum(by_reference, gradient=gradient)(*tensors, known=results)


# --- by blocks of tokens and by tiles of logits ----------------------------------------------------------------------


class _Normalisers(NamedTuple):
    """log Z of both models, a number for each token, in two parts: their sum would lose digits of the smaller one."""

    peak: Tensor
    """The largest logit; NaN where every word is hidden, as there is no distribution then."""
    other_peak: Tensor
    surplus: Tensor
    """log Z − the largest logit."""
    other_surplus: Tensor


def _forward(options: _Options, *tensors: Tensor | None) -> tuple[_Normalisers, Results]:
    """Both divergences of every token, from one matrix product with each model's words.

    A block holds both models' logits of some tokens over all words: the terms need log Z, which needs all words.
    """
    plans = options.plans(*tensors)
    plan, other_plan = plans
    length = len(plan.row)
    count = len(plan.column)
    device = plan.row.device
    numbers = torch.zeros(6, length, dtype=options.dtype, device=device)  # `_Normalisers`, then both divergences
    # Blocks of about one height: each reads both models' words, which costs too much for a few tokens.
    most_rows = max(1, scores_per_tile(BLOCK_PAIRS, device) // count)
    height = math.ceil(length / max(1, math.ceil(length / most_rows)))
    block = torch.empty(2, height, count, dtype=options.dtype, device=device)
    for rows in slices(length, max(1, height)):
        scores = block[:, : rows.stop - rows.start]
        for model_plan, model_scores in zip(plans, scores, strict=True):
            for tile in model_plan._replace(row=model_plan.row[rows]).tiles():
                model_scores[tile.rows, tile.columns] = _logits_(model_plan, tile.scores, tile.columns)
        for part in _parts(scores[0]):
            numbers[:, rows][:, part] = _divergences_(*scores[:, part])
    *normalisers, divergence, reverse_divergence = numbers
    # `LOWEST` stands for −∞ in the logits, so that the infinite terms were left out of the sums.
    hidden = _hidden_words(plan)
    other_hidden = _hidden_words(other_plan)
    divergence += _infinite_if(other_hidden & ~hidden, divergence)
    reverse_divergence += _infinite_if(hidden & ~other_hidden, divergence)
    return _Normalisers(*normalisers), (divergence, reverse_divergence)


def _parts(scores: Tensor) -> Iterator[slice]:
    """Slices of rows whose numbers stay in the caches during the many passes over them."""
    return slices(len(scores), max(1, scores_per_tile(PART_PAIRS, scores.device) // scores.shape[1]))


def _logits_(plan: ScorePlan, scores: Tensor, columns: slice) -> Tensor:
    """Turn a tile of products into logits, in place; `LOWEST` where a word is hidden, so that no difference of two is NaN."""
    if plan.bias is not None:
        scores += plan.bias[columns]
    plan.cap_(scores, columns)
    return scores.clamp_min_(LOWEST)


def _hidden_words(plan: ScorePlan) -> Tensor:
    """True for words with a bias of −∞, (V,)."""
    if plan.bias is None:
        return torch.zeros(len(plan.column), dtype=torch.bool, device=plan.row.device)
    return plan.bias == -torch.inf


def _infinite_if(words: Tensor, like: Tensor) -> Tensor:
    """Infinity if there is such a word, else 0."""
    return torch.where(words.any(), like.new_full((), torch.inf), 0.0)


def _divergences_(scores: Tensor, other_scores: Tensor) -> Tensor:
    """`_Normalisers`, KL(p ‖ q) and KL(q ‖ p) as (6, rows), from the logits (rows, V) of both models, which are overwritten.

    With c = log p − log q the terms are p·φ(−c) and q·φ(c). Where |c| ≤ 1 they are p·c²·u and p·c²·(1 − u·(1 + c)) with
    φ(−c) = c²·u, since q = p·(1 − c + c²·u); beyond, p·c − p + q and p − q − q·c lose no digits. Both are computed and
    multiplied by 1 or 0, as `torch.where` costs many times as much.
    """
    peak = _peak(scores)
    other_peak = _peak(other_scores)
    # c, up to the difference of the two log-sums, which is subtracted last: it is small, and takes no digits from c.
    c = scores.sub_(peak.unsqueeze(1)) - other_scores.sub_(other_peak.unsqueeze(1))
    p = exp_(scores)
    q = exp_(other_scores)
    total = p.sum(1)
    other_total = q.sum(1)
    surplus = total.log()
    other_surplus = other_total.log()
    p.div_(total.unsqueeze(1))
    q.div_(other_total.unsqueeze(1))
    c.sub_((surplus - other_surplus).unsqueeze(1))
    near_c = c.clamp(-1, 1)
    is_near = torch.eq(c, near_c, out=torch.empty_like(c))
    # p and q on the words with |c| ≤ 1, and on the others.
    near_p = p * is_near
    far_p = p.sub_(near_p)
    far_q = q.sub_(is_near.mul_(q))
    # (p·c²)·u, and (p·c²)·(1 − u·(1 + c)).
    square = near_p.mul_(near_c).mul_(near_c)
    forward = square * _phi_over_square(-near_c)
    backward = square.sub_(forward).sub_(near_c.mul_(forward))
    excess = far_p - far_q
    forward.add_(far_p.mul_(c)).sub_(excess)
    backward.add_(excess).sub_(far_q.mul_(c))
    return torch.stack([peak, other_peak, surplus, other_surplus, forward.sum(1), backward.sum(1)])


def _peak(scores: Tensor) -> Tensor:
    """The largest logit of each row; NaN where every word is hidden."""
    peak = scores.amax(1)
    return peak.masked_fill(peak <= LOWEST, torch.nan)


@torch.no_grad()
def _backward(
    options: _Options,
    normalisers: _Normalisers,
    divergences: Results,
    learned: Sequence[bool],
    *arguments: Tensor | None,
) -> Results:
    """Gradients from the cotangents g of KL(p ‖ q) and h of KL(q ‖ p).

    p's logits get g·p·(c − KL(p ‖ q)) + h·(p − q), and q's the same with both models' roles exchanged. A model that is
    not learned, such as a reference policy, gets zeros.
    """
    tensors = arguments[:6]
    cotangents = arguments[6:]
    plans = options.plans(*tensors)
    grads = [torch.zeros_like(normalisers.peak) if grad is None else grad for grad in cotangents]
    # 0·∞ is NaN: an infinite divergence whose cotangent is 0 must not enter the gradient.
    means = [mean.masked_fill(grad == 0, 0.0) for mean, grad in zip(divergences, grads, strict=True)]
    per_token = torch.stack([*normalisers, *means, *grads]).unsqueeze(2)
    sums = [_GradientSums.zeros(plan, is_learned, per_token) for plan, is_learned in zip(plans, learned, strict=True)]
    for tiles in zip(*(plan.tiles() for plan in plans), strict=True):
        tile, other_tile = tiles
        for part in _parts(tile.scores):
            token_numbers = per_token[:, tile.rows][:, part]
            _score_gradients_(plans, tile.columns, tile.scores[part], other_tile.scores[part], token_numbers)
        for plan, model_tile, model_sums, is_learned in zip(plans, tiles, sums, learned, strict=True):
            if is_learned:
                model_sums.add(plan, model_tile)
    gradients: list[Tensor | None] = []
    for model_sums, plan in zip(sums, plans, strict=True):
        # The plan's bias is bias·scale.
        grad_bias = None if model_sums.bias is None else model_sums.bias * plan.scale
        gradients += [model_sums.row, model_sums.column, grad_bias]
    return tuple(
        gradient.to(tensor.dtype)
        for gradient, tensor in zip(gradients, tensors, strict=True)
        if tensor is not None and gradient is not None
    )


class _GradientSums(NamedTuple):
    """Gradients of one model's `ScorePlan`, to which each tile adds."""

    row: Tensor
    column: Tensor
    bias: Tensor | None

    @staticmethod
    def zeros(plan: ScorePlan, is_learned: bool, like: Tensor) -> "_GradientSums":
        """Zeros with the dtype and device of `like`; one number, expanded, in each for a model that is not learned."""

        def zeros(tensor: Tensor) -> Tensor:
            shape = tensor.shape if is_learned else (1,) * tensor.ndim
            return like.new_zeros(shape).expand_as(tensor)

        return _GradientSums(zeros(plan.row), zeros(plan.column), None if plan.bias is None else zeros(plan.bias))

    def add(self, plan: ScorePlan, tile: ScoreTile) -> None:
        """Add a tile that holds the gradients of its scores; it is overwritten."""
        gradient = tile.scores
        if self.bias is not None:
            self.bias[tile.columns] += gradient.sum(0)
        if plan.scale != 1:
            gradient.mul_(plan.scale)
        gradient = gradient.to(plan.row.dtype)
        _add_product_(self.row[tile.rows], gradient, tile.column)
        _add_product_(self.column[tile.columns], gradient.mT, plan.row[tile.rows])


def _score_gradients_(
    plans: tuple[ScorePlan, ScorePlan], columns: slice, scores: Tensor, other_scores: Tensor, per_token: Tensor
) -> None:
    """Replace a tile of both models' products by the gradients of the logits before their soft cap.

    Args:
        per_token: (8, rows, 1): `_Normalisers`, KL(p ‖ q) and KL(q ‖ p), and the cotangents of these.
    """
    plan, other_plan = plans
    peak, other_peak, surplus, other_surplus, mean, other_mean, grad, other_grad = per_token
    _logits_(plan, scores, columns)
    _logits_(other_plan, other_scores, columns)
    cap_slope = plan.cap_slope(scores)
    other_cap_slope = other_plan.cap_slope(other_scores)
    c = (scores.sub_(peak) - other_scores.sub_(other_peak)).sub_(surplus - other_surplus)
    p = exp_(scores.sub_(surplus))
    q = exp_(other_scores.sub_(other_surplus))
    # p − q = ±max(p, q)·(1 − exp(−|c|)) keeps its digits where p and q have most of theirs in common.
    difference = c.abs().neg_().expm1_().copysign_(c).mul_(torch.maximum(p, q))
    p.mul_((c - mean).mul_(grad)).add_(difference * other_grad)
    q.mul_(c.add_(other_mean).mul_(-other_grad)).sub_(difference.mul_(grad))
    if cap_slope is not None:
        p.mul_(cap_slope)
    if other_cap_slope is not None:
        q.mul_(other_cap_slope)


def _add_product_(total: Tensor, one: Tensor, other: Tensor) -> None:
    """total += one·other, where total has the results' dtype."""
    if one.dtype == total.dtype:
        total.addmm_(one, other)
    else:
        total += product(one, other)


# --- the terms -------------------------------------------------------------------------------------------------------


def _terms(c: Tensor, p: Tensor, q: Tensor, hidden: Tensor, other_hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The terms of KL(p ‖ q) and of KL(q ‖ p), one for each word.

    Args:
        c: log p − log q, 0 for words that either model hides.
        hidden, other_hidden: True for words that p hides, and that q hides.
    """
    is_near = c.abs() < 1
    near_c = c.clamp(-1, 1)
    forward = torch.where(is_near, p * _phi(-near_c), p * c - p + q)
    backward = torch.where(is_near, q * _phi(near_c), p - q - q * c)
    # A word that p alone hides: p·log(p/q) − p + q → q, and q·log(q/p) − q + p → ∞.
    forward = torch.where(hidden, q, forward).masked_fill(other_hidden & ~hidden, torch.inf)
    backward = torch.where(other_hidden, p, backward).masked_fill(hidden & ~other_hidden, torch.inf)
    return forward, backward


def _mixture_terms(share: float, c: Tensor, p: Tensor, q: Tensor, hidden: Tensor, other_hidden: Tensor) -> Tensor:
    """The terms π·p·φ(log m/p) + (1 − π)·q·φ(log m/q) of the divergence through m = π·p + (1 − π)·q, each at least 0.

    Args:
        share: π.
        c, p, q, hidden, other_hidden: as in `_terms`.
    """
    rest = 1 - share
    log_share = math.log(share)
    log_rest = math.log1p(-share)
    is_near = c.abs() < 1
    near_c = c.clamp(-1, 1)
    near_p = p * _phi(torch.log1p(rest * torch.expm1(-near_c)))
    near_q = q * _phi(torch.log1p(share * torch.expm1(near_c)))
    # p·φ(log m/p) = m − p − p·log(m/p), in which nothing overflows however large c is.
    far_p = rest * (q - p) - p * torch.logaddexp(c.new_full((), log_share), log_rest - c)
    far_q = share * (p - q) - q * torch.logaddexp(c.new_full((), log_rest), log_share + c)
    of_p = torch.where(is_near, near_p, far_p)
    of_q = torch.where(is_near, near_q, far_q)
    # Of a word that p alone hides m = (1 − π)·q, and of one that q alone hides m = π·p.
    of_p = torch.where(hidden, rest * q, torch.where(other_hidden, p * (share - 1 - log_share), of_p))
    of_q = torch.where(other_hidden, share * p, torch.where(hidden, q * (rest - 1 - log_rest), of_q))
    return share * of_p + rest * of_q


def _phi(x: Tensor) -> Tensor:
    """φ(x) = eˣ − 1 − x for |x| ≤ 1."""
    return x * x * _phi_over_square(x)


def _phi_over_square(x: Tensor) -> Tensor:
    """φ(x)/x² = 1/2·(1 + x/3·(1 + x/4·(1 + …))) for |x| ≤ 1, to the last digits of the dtype."""
    half = x.new_full((), 0.5)
    series = half
    # The first term that is left out is at most 2/last! of the first: below the dtype's rounding.
    last = 18 if x.dtype == torch.float64 else 11
    for order in range(last, 2, -1):
        series = torch.addcmul(half, series, x, value=1 / order)
    return series


# --- in plain operations ---------------------------------------------------------------------------------------------


def _by_reference(options: _Options, *tensors: Tensor | None, block: Callable[..., Results] | None = None) -> Results:
    """The definition, in blocks of tokens that are computed again for each derivative.

    Args:
        block: what is computed of some tokens; None is both divergences.
    """
    row, weight, bias, other_row, other_weight, other_bias = tensors
    assert row is not None and weight is not None and other_row is not None
    size = max(1, scores_per_tile(reference.BLOCK_PAIRS, row.device) // len(weight))
    of_block = partial(_reference_block if block is None else block, options)
    # Without tokens one empty block gives results of the right dtype.
    parts = [
        recomputed(of_block, row[rows], weight, bias, other_row[rows], other_weight, other_bias)
        for rows in list(slices(len(row), size)) or [slice(0, 0)]
    ]
    return tuple(torch.cat(results) for results in zip(*parts, strict=True))


def _reference_block(options: _Options, *tensors: Tensor | None) -> Results:
    """Both divergences of some tokens."""
    forward, backward = _terms(*_compared(options, *tensors))
    return forward.sum(1), backward.sum(1)


def _compared(options: _Options, *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The arguments of `_terms` for some tokens."""
    plan, other_plan = options.plans(*tensors)
    log_p, hidden = _log_probabilities(plan, options.dtype)
    log_q, other_hidden = _log_probabilities(other_plan, options.dtype)
    c = torch.where(hidden | other_hidden, 0.0, log_p - log_q)
    p = torch.where(hidden, 0.0, log_p.exp())
    q = torch.where(other_hidden, 0.0, log_q.exp())
    return c, p, q, hidden, other_hidden


def _log_probabilities(plan: ScorePlan, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """log p of each word, and True for the hidden words, whose log p is finite here and means nothing: both (rows, V)."""
    scores = plan.row.to(dtype) @ plan.column.to(dtype).mT * plan.scale
    hidden = torch.zeros_like(scores, dtype=torch.bool)
    if plan.bias is not None:
        # A bias of −∞ must not enter the scores: the derivatives of what is masked later would be NaN.
        hidden = (plan.bias == -torch.inf).expand_as(scores)
        scores = scores + plan.bias.masked_fill(plan.bias == -torch.inf, 0.0)
    if plan.softcap is not None:
        scores = plan.softcap * torch.tanh(scores / plan.softcap)
    log_z = reference.softmax(scores, torch.where(hidden, -torch.inf, 0.0))[2]
    log_z = log_z.masked_fill(log_z == -torch.inf, torch.nan)
    return scores - log_z.unsqueeze(1), hidden
