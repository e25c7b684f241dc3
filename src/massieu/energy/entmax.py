"""α-entmax: weights on the simplex that are exactly zero for low scores, and the potential they are the gradient of.

`entmax` is ∇Ω*, `entmax_conjugate` Ω*, for the Tsallis regulariser Ω(p) = −Σ (p − p^α)/(α(α − 1)): softmax and
log Σ exp at α = 1, sparsemax at α = 2 (Peters et al. 2019, arXiv 1905.05702; Correia et al. 2019, arXiv 1909.00015).

Derivatives are those of the exact solution, written in the weights themselves, so that one formula serves every order
and every way of differentiating; near α = 1 nothing is divided by α − 1.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from massieu.energy.entmax_solver import first_phi, second_phi, solve, solve_differentiably
from massieu.foundation.arguments import check_range, expanded, floating, number
from massieu.foundation.numerics import log_softmax, logsumexp
from massieu.foundation.transforms import in_nested_forward_mode
from massieu.foundation.values import promoted_dtype

Alpha = float | int | Tensor


def entmax(
    scores: Float[Tensor, "..."],
    alpha: Alpha = 1.5,
    *,
    log_weight: Float[Tensor, "..."] | Bool[Tensor, "..."] | None = None,
    dim: int = -1,
) -> Float[Tensor, "..."]:
    """Weights argmax p·z + H_α(p) over the simplex, z = scores + log_weight along `dim`: ∇ of `entmax_conjugate`.

    p_n = [1 + (α − 1)(z_n − t)]₊^{1/(α − 1)} with the t that makes them sum to one. A score that is more than
    1/(α − 1) below the largest has weight exactly 0. At least float32. Absolute error a few roundings for α ≤ 2, for
    scores of any size; above α = 2 the map has no bounded slope where a weight reaches zero, and a weight there
    is known to rounding^{1/(α − 1)} only. Differentiable to every order in scores and α, one-sided at the kinks and at
    α = 1; `torch.func`, forward mode and `torch.compile` apply (compiled transforms are right to third order).

    Args:
        scores: Any shape, finite or −inf, which leaves an entry out.
        alpha: At least 1; a tensor broadcasts to the scores' shape with size 1 at `dim`, such as (heads, 1, 1).
        log_weight: Added to the scores, or booleans of which True keeps; broadcasts to the scores' shape.
        dim: Where the weights sum to one. Where everything is left out the weights, and all gradients, are 0.

    Raises:
        TypeError: scores, `alpha` or `log_weight` are of the wrong kind.
        ValueError: α < 1 or NaN (a tensor is not read while compiling), or shapes do not fit.
    """
    return _solve(scores, alpha, log_weight, dim)[0].movedim(-1, dim)


def entmax_conjugate(
    scores: Float[Tensor, "..."],
    alpha: Alpha = 1.5,
    *,
    log_weight: Float[Tensor, "..."] | Bool[Tensor, "..."] | None = None,
    dim: int = -1,
) -> Float[Tensor, "..."]:
    """Ω*(z) = max p·z + H_α(p) over the simplex: log Σ exp at α = 1, and the gradient in the scores is `entmax`.

    In nats at α = 1. It lies between the largest score and that plus H_α of the uniform weights; −inf, without gradient,
    where everything is left out. The result lacks the dimension `dim`. Arguments, precision, derivatives and errors are
    those of `entmax`.
    """
    return _solve(scores, alpha, log_weight, dim)[1]


def tsallis_entropy(weights: Float[Tensor, "..."], alpha: Alpha = 1.5, *, dim: int = -1) -> Float[Tensor, "..."]:
    """H_α(p) = Σ (p − p^α)/(α(α − 1)) along `dim`: Shannon's in nats at α = 1, (1 − ‖p‖²)/2 at α = 2. At least float32.

    Raises:
        TypeError, ValueError: as `entmax`.
    """
    weights, order = checked(weights, alpha, dim)
    return _entropy(weights, order).squeeze(-1)


# --- arguments -------------------------------------------------------------------------------------------------------


def _solve(scores: Tensor, alpha: Alpha, log_weight: Tensor | None, dim: int) -> tuple[Tensor, Tensor]:
    """Weights, along the last dimension, and Ω*."""
    if log_weight is not None:
        scores = _add_log_weight(floating("scores", scores), log_weight)
    scores, order = checked(scores, alpha, dim)
    if isinstance(order, float) and order == 1:
        return log_softmax(scores).exp(), logsumexp(scores)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    top = torch.where(empty, 0.0, scores.detach().amax(-1, keepdim=True))
    # Entries that are left out move to a finite distance at which weight and gradient are exactly 0. `where` lets a NaN
    # through to the gradients; a clamp would give them 0.
    distance = torch.where(empty, 0.0, scores - top)
    distance = torch.where(distance < -_FAR, -_FAR, distance)
    weights, excess = _differentiable(distance, order)
    value = torch.where(empty, -torch.inf, top + excess)
    return torch.where(empty, 0.0, weights), value.squeeze(-1)


_FAR = 1e15


def checked(scores: Tensor, alpha: Alpha, dim: int) -> tuple[Tensor, float | Tensor]:
    """The tensor in at least float32, `dim` its last, and α as a float or a tensor of its dtype; or an error."""
    shape = tuple(floating("scores", scores).shape)
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"dim must be a dimension of a tensor of shape {shape}, got {dim}")
    if shape[dim] == 0:
        raise ValueError(f"entmax needs at least one entry along dimension {dim % len(shape)}, got shape {shape}")
    scores = scores.to(promoted_dtype(scores))
    if not isinstance(alpha, Tensor):
        return scores.movedim(dim, -1), float(number("alpha", alpha, least=1))
    check_range("alpha", floating("alpha", alpha), least=1)
    # One order for each row of weights: size 1 along `dim`.
    rows_shape = list(shape)
    rows_shape[dim] = 1
    order = expanded("alpha", alpha.to(scores.dtype), tuple(rows_shape), f"scores of shape {shape}, by")
    return scores.movedim(dim, -1), order.movedim(dim, -1)


def _add_log_weight(scores: Tensor, log_weight: Tensor) -> Tensor:
    """scores + log_weight; −inf where boolean weights are False."""
    weight = floating("log_weight", log_weight, or_boolean=True)
    weight = expanded("log_weight", weight, scores.shape, "scores of shape")
    if weight.dtype == torch.bool:
        return torch.where(weight, scores, -torch.inf)
    return scores.to(promoted_dtype(scores)) + weight


# --- derivatives -----------------------------------------------------------------------------------------------------


def _differentiable(distance: Tensor, order: float | Tensor) -> tuple[Tensor, Tensor]:
    """Weights and Ω* (..., 1) of scores whose largest is 0."""
    # A compiled transform differentiates a Function's forward pass in silence; nested forward mode loses its tangent.
    if torch.compiler.is_compiling() or in_nested_forward_mode():
        return solve_differentiably(distance, order - 1.0)
    if isinstance(order, Tensor):
        order_tensor = order
        constant = None
    else:
        order_tensor = distance.new_full((1,) * distance.ndim, order)
        constant = order
    return _Entmax.apply(distance, order_tensor.expand(*distance.shape[:-1], 1), constant)


class _Entmax(torch.autograd.Function):
    """Weights and Ω*, with derivatives that are functions of the weights p and of a = α − 1, and so differentiable themselves.

    With s = p^{1−a} and c = ∂p/∂α at fixed t: dp = s(dz − dt) + c dα, where dt keeps Σ dp = 0, and dΩ* = p·dz + ∂H/∂α dα.
    """

    @staticmethod
    def forward(distance: Tensor, order: Tensor, constant: float | None) -> tuple[Tensor, Tensor]:
        # With a number for the order the solver is quickest.
        if constant is not None:
            return solve(distance, constant - 1.0)
        return solve(distance, order - 1.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _, order, ctx.constant = inputs
        ctx.save_for_backward(output[0], order)
        ctx.save_for_forward(output[0], order)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        weights, order = ctx.saved_tensors
        of_weights, of_value = cotangents
        slope = _slope(weights, order - 1)
        # Transposed, the condition Σ dp = 0 takes the mean under s out of the cotangent.
        centred = of_weights - (slope * of_weights).sum(-1, keepdim=True) / slope.sum(-1, keepdim=True)
        of_distance = slope * centred + of_value * weights
        if not ctx.needs_input_grad[1]:
            return of_distance, None, None
        through_weights = (_growth(weights, order - 1) * centred).sum(-1, keepdim=True)
        return of_distance, through_weights + of_value * _entropy_growth(weights, order), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, order = ctx.saved_tensors
        distance_tangent, order_tangent, _ = tangents
        slope = _slope(weights, order - 1)
        # At fixed t, the threshold.
        weights_tangent = torch.zeros_like(weights)
        value_tangent = torch.zeros_like(order)
        if distance_tangent is not None:
            weights_tangent = slope * distance_tangent
            value_tangent = (weights * distance_tangent).sum(-1, keepdim=True)
        if order_tangent is not None:
            weights_tangent = weights_tangent + _growth(weights, order - 1) * order_tangent
            value_tangent = value_tangent + _entropy_growth(weights, order) * order_tangent
        # The threshold moves so that the weights' sum does not.
        threshold_tangent = weights_tangent.sum(-1, keepdim=True)
        return weights_tangent - slope * threshold_tangent / slope.sum(-1, keepdim=True), value_tangent

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        # Only the last dimension has a meaning, so the mapped one goes to the left.
        batched = [
            tensor.expand(info.batch_size, *tensor.shape) if at is None else tensor.movedim(at, 0)
            for tensor, at in zip(arguments[:2], in_dims[:2], strict=True)
        ]
        return _Entmax.apply(*batched, arguments[2]), (0, 0)


def _surprise(weights: Tensor) -> tuple[Tensor, Tensor]:
    """−log p, taken as 0 where p is 0, and a mask of the weights that are not 0."""
    # Negated, so that a NaN counts as positive and reaches the derivatives.
    positive = ~(weights < torch.finfo(weights.dtype).tiny)
    return -torch.log(torch.where(positive, weights, 1.0)), positive


def _slope(weights: Tensor, a: Tensor) -> Tensor:
    """s = ∂p/∂z at fixed t: p^{1−a} on the support."""
    surprise, positive = _surprise(weights)
    return torch.where(positive, torch.exp((a - 1) * surprise), 0.0)


def _growth(weights: Tensor, a: Tensor) -> Tensor:
    """∂p/∂α at fixed t: −p L² φ₂(aL), L = −log p."""
    surprise, _ = _surprise(weights)
    return -weights * surprise.square() * second_phi(a * surprise)


def _entropy(weights: Tensor, order: float | Tensor) -> Tensor:
    """H_α = Σ p L φ₁(−aL)/α, shape (..., 1), with φ₁(y) = (eʸ − 1)/y."""
    surprise, _ = _surprise(weights)
    y = (1 - order) * surprise
    return (weights * surprise * first_phi(y)).sum(-1, keepdim=True) / order


def _entropy_growth(weights: Tensor, order: Tensor) -> Tensor:
    """∂H_α/∂α at fixed p: φ₁′ = φ₁ − φ₂."""
    surprise, _ = _surprise(weights)
    y = (1 - order) * surprise
    derivative = (weights * surprise.square() * (first_phi(y) - second_phi(y))).sum(-1, keepdim=True)
    return -(derivative + _entropy(weights, order)) / order
