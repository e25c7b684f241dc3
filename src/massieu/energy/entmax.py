"""α-entmax: weights on the simplex that are exactly zero for low scores, and the potential they are the gradient of.

`entmax` is ∇Ω*, `entmax_conjugate` Ω*, for the Tsallis regulariser Ω(p) = −Σ (p − p^α)/(α(α − 1)): softmax and
log Σ exp at α = 1, sparsemax at α = 2 (Peters et al. 2019, arXiv 1905.05702; Correia et al. 2019, arXiv 1909.00015).

Derivatives are those of the exact solution, written in the weights themselves, so that one formula serves every order
and every way of differentiating; near α = 1 nothing is divided by α − 1.
"""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from massieu.energy.entmax_solver import first_phi, second_phi, solve, solve_differentiably
from massieu.measures import stable
from massieu.measures.value import values_are_readable
from massieu.ops.shapes import in_nested_forward_mode
from massieu.solve.arguments import floating, is_floating, told

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
        ValueError: α < 1 or NaN (a tensor is not read while compiling or inside a transform), or shapes do not fit.
    """
    return _solve(scores, alpha, log_weight, dim).weights.movedim(-1, dim)


def entmax_conjugate(
    scores: Float[Tensor, "..."],
    alpha: Alpha = 1.5,
    *,
    log_weight: Float[Tensor, "..."] | Bool[Tensor, "..."] | None = None,
    dim: int = -1,
) -> Float[Tensor, "..."]:
    """Ω*(z) = max p·z + H_α(p) over the simplex: log Σ exp at α = 1, and the gradient in the scores is `entmax`.

    In nats at α = 1. It lies between the largest score and that plus H_α of the uniform weights; −inf, without gradient,
    where everything is left out. Arguments, precision, derivatives and errors are those of `entmax`; `dim` is gone.
    """
    return _solve(scores, alpha, log_weight, dim).value


def tsallis_entropy(weights: Float[Tensor, "..."], alpha: Alpha = 1.5, *, dim: int = -1) -> Float[Tensor, "..."]:
    """H_α(p) = Σ (p − p^α)/(α(α − 1)) along `dim`: Shannon's in nats at α = 1, (1 − ‖p‖²)/2 at α = 2. At least float32.

    Raises:
        TypeError, ValueError: as `entmax`.
    """
    weights, order, dim = checked(weights, alpha, dim)
    return _entropy(weights.movedim(dim, -1), _moved(order, weights.ndim, dim)).squeeze(-1)


# --- arguments -------------------------------------------------------------------------------------------------------


class _Solved(NamedTuple):
    weights: Float[Tensor, "... N"]
    value: Float[Tensor, "..."]


def _solve(scores: Tensor, alpha: Alpha, log_weight: Tensor | None, dim: int) -> _Solved:
    scores, order, dim = checked(scores, alpha, dim)
    if log_weight is not None:
        scores = _weighted(scores, log_weight)
    scores, order = scores.movedim(dim, -1), _moved(order, scores.ndim, dim)
    if isinstance(order, float) and order == 1:
        log_weights = stable.log_softmax(scores)
        return _Solved(log_weights.exp(), stable.logsumexp(scores))
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    top = torch.where(empty, 0.0, scores.detach().amax(-1, keepdim=True))
    # What is left out stands far below, where weight and gradient are exactly 0.
    distance = torch.where(empty, 0.0, (scores - top).clamp_min(-_FAR))
    weights, excess = _differentiable(distance, order)
    value = torch.where(empty, -torch.inf, top + excess)
    return _Solved(torch.where(empty, 0.0, weights), value.squeeze(-1))


_FAR = 1e15


def checked(scores: Tensor, alpha: Alpha, dim: int) -> tuple[Tensor, float | Tensor, int]:
    """The tensor in at least float32, α as a float or a tensor of its dtype, `dim` as a positive number; or an error."""
    if not is_floating(scores):
        raise TypeError(f"entmax needs a floating-point tensor, got {told(scores)}")
    shape = tuple(scores.shape)
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"dim must be a dimension of a tensor of shape {shape}, got {dim}")
    dim = dim % len(shape)
    if shape[dim] == 0:
        raise ValueError(f"entmax needs at least one entry along dimension {dim}, got shape {shape}")
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if not isinstance(alpha, Tensor):
        if isinstance(alpha, bool) or not isinstance(alpha, int | float):
            raise TypeError(f"alpha must be a number or a tensor, got {type(alpha).__name__}")
        if not 1 <= alpha < math.inf:
            raise ValueError(f"alpha must be finite and at least 1, got {alpha}")
        return scores, float(alpha), dim
    floating("alpha", alpha)
    wanted = (*shape[:dim], 1, *shape[dim + 1 :])
    padded = (1,) * (len(shape) - alpha.ndim) + tuple(alpha.shape)
    if alpha.ndim > len(shape) or any(a not in (1, b) for a, b in zip(padded, wanted, strict=True)):
        raise ValueError(f"alpha must broadcast to {wanted} for scores of shape {shape}, got {tuple(alpha.shape)}")
    if values_are_readable(alpha) and not bool(((alpha >= 1) & (alpha < torch.inf)).all()):
        raise ValueError("alpha must be finite and at least 1 everywhere")
    return scores, alpha.to(scores.dtype).expand(wanted), dim


def _weighted(scores: Tensor, log_weight: Tensor) -> Tensor:
    if not isinstance(log_weight, Tensor):
        raise TypeError(f"log_weight must be a tensor, got {type(log_weight).__name__}")
    shape, own = tuple(scores.shape), tuple(log_weight.shape)
    padded = (1,) * (len(shape) - len(own)) + own
    if len(own) > len(shape) or any(a not in (1, b) for a, b in zip(padded, shape, strict=True)):
        raise ValueError(f"log_weight must broadcast to the scores' shape {shape}, got {own}")
    if log_weight.dtype == torch.bool:
        return torch.where(log_weight, scores, -torch.inf)
    if not log_weight.is_floating_point():
        raise TypeError(f"log_weight must be boolean (True keeps) or floating-point, got {log_weight.dtype}")
    return scores + log_weight


def _moved(order: float | Tensor, ndim: int, dim: int) -> float | Tensor:
    return order.movedim(dim, -1) if isinstance(order, Tensor) else order


# --- derivatives -----------------------------------------------------------------------------------------------------


def _differentiable(distance: Tensor, order: float | Tensor) -> tuple[Tensor, Tensor]:
    """Weights and Ω* (..., 1) of scores whose largest is 0."""
    # A compiled transform differentiates a Function's forward pass in silence; nested forward mode loses its tangent.
    if torch.compiler.is_compiling() or in_nested_forward_mode():
        return solve_differentiably(distance, order - 1.0)
    tensor = order if isinstance(order, Tensor) else distance.new_full((1,) * distance.ndim, order)
    return _Entmax.apply(distance, tensor.expand(*distance.shape[:-1], 1), order if isinstance(order, float) else None)


class _Entmax(torch.autograd.Function):
    """Its derivatives are functions of the weights p and of a = α − 1, and so differentiable themselves.

    With s = p^{1−a} and c = ∂p/∂α at fixed t: dp = s(dz − dt) + c dα, where dt keeps Σ dp = 0, and dΩ* = p·dz + ∂H/∂α dα.
    """

    @staticmethod
    def forward(distance: Tensor, order: Tensor, constant: float | None) -> tuple[Tensor, Tensor]:
        return solve(distance, (order if constant is None else constant) - 1.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _, order, ctx.constant = inputs
        ctx.save_for_backward(output[0], order)
        ctx.save_for_forward(output[0], order)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (weights, order), (along, value) = ctx.saved_tensors, cotangents
        slope = _slope(weights, order - 1)
        along = along - (slope * along).sum(-1, keepdim=True) / slope.sum(-1, keepdim=True)
        if not ctx.needs_input_grad[1]:
            return slope * along + value * weights, None, None
        growth = (_growth(weights, order - 1) * along).sum(-1, keepdim=True)
        return slope * along + value * weights, growth + value * _entropy_growth(weights, order), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, Tensor]:
        (weights, order), (distance, change, _) = ctx.saved_tensors, tangents
        slope = _slope(weights, order - 1)
        moved, value = torch.zeros_like(weights), torch.zeros_like(order)
        if distance is not None:
            moved, value = slope * distance, (weights * distance).sum(-1, keepdim=True)
        if change is not None:
            moved = moved + _growth(weights, order - 1) * change
            value = value + _entropy_growth(weights, order) * change
        return moved - slope * moved.sum(-1, keepdim=True) / slope.sum(-1, keepdim=True), value

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        # It works along the last dimension, whatever is on the left.
        batched = [
            tensor.expand(info.batch_size, *tensor.shape) if at is None else tensor.movedim(at, 0)
            for tensor, at in zip(arguments[:2], in_dims[:2], strict=True)
        ]
        return _Entmax.apply(*batched, arguments[2]), (0, 0)


def _surprise(weights: Tensor) -> tuple[Tensor, Tensor]:
    """−log p, 0 where p is 0; and where it is not."""
    positive = weights >= torch.finfo(weights.dtype).tiny
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
