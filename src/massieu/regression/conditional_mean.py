"""Conditional mean attention: the mean of a value given a key, by kernel ridge regression over the tokens."""

from typing import NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor

from massieu.foundation.arguments import (
    check_broadcastable,
    check_one_device,
    check_range,
    described,
    floating,
    number,
    whole_number,
)
from massieu.foundation.doors import door
from massieu.foundation.listening import unreadable
from massieu.foundation.short_repr import fields_html, fields_repr
from massieu.foundation.transforms import all_true, in_functorch, unwrapped, values_are_readable, without_autocast
from massieu.regression.exact import Cholesky, exact
from massieu.regression.iterative import iterative
from massieu.regression.kernels import Kernel
from massieu.regression.low_rank import LowRank, low_rank
from massieu.regression.tokens import KeyValuePairs, Ridge, SystemsSolved, check_tokens
from massieu.solve import ConjugateGradients

Method = Cholesky | ConjugateGradients | LowRank | None

LONGEST_GRAM = 4096
"""The most keys for which the default method forms a Gram matrix."""


class ConditionalMeanResult(NamedTuple):
    """What `conditional_mean_attention` returns."""

    output: Float[Tensor, "*query E"]
    """Vᵀ(G + λI)⁻¹κ(K, q), in the query's dtype; 0 if no key is visible."""
    variance: Float[Tensor, "*query"] | None
    """κ(q, q) − κ(K, q)ᵀ(G + λI)⁻¹κ(K, q), float32 or float64; κ(q, q) if no key is visible. None without need_variance."""
    error_bound: Float[Tensor, "*query"] | None
    """Bound of ‖output − exact output‖ in exact arithmetic. None for `Cholesky`, and if there is no key: both are exact. It
    has no gradient."""
    convergence: SystemsSolved | None
    """For conjugate gradients, how the solution of each value column's system ended; None for the other methods."""

    __repr__ = fields_repr
    _repr_html_ = fields_html

    def predictive_variance(self, *, noise_variance: Ridge, prior_variance: Ridge) -> Float[Tensor, "*query"]:
        """Variance of a new value at the query: σ² + λ₀·variance, where the ridge was σ²/λ₀ (Z4).

        Args:
            noise_variance, prior_variance: σ² and λ₀ as in `ridge_from`: one number, or as a ridge one a key head, (Hk,) or
                (B, Hk).

        Raises:
            ValueError, TypeError: the result has no variance, a number is out of its range, or a shape does not fit.
        """
        if self.variance is None:
            raise ValueError("there is no variance: ask for it with need_variance=True")
        ridge_from(noise_variance=noise_variance, prior_variance=prior_variance)
        noise = _by_query_head("noise_variance", noise_variance, self.variance)
        return noise + _by_query_head("prior_variance", prior_variance, self.variance) * self.variance


def ridge_from(*, noise_variance: Ridge, prior_variance: Ridge) -> Ridge:
    """The ridge λ = σ²/λ₀, noise variance over prior variance, with which the output is the posterior mean (Z4).

    Args:
        noise_variance: σ² of a value around its mean, not negative.
        prior_variance: λ₀ of the coefficients, positive. The follow-up of Zhang writes λ for this too (trap 19).

    Raises:
        ValueError, TypeError: a number out of its range, or no number.

    Example:
        >>> from massieu.regression import ridge_from
        >>> ridge_from(noise_variance=0.5, prior_variance=2.0)
        0.25
    """
    check_range("noise_variance", _number_or_tensor("noise_variance", noise_variance), least=0.0)
    check_range("prior_variance", _number_or_tensor("prior_variance", prior_variance), above=0.0)
    check_broadcastable(noise_variance=noise_variance, prior_variance=prior_variance)
    return noise_variance / prior_variance


def _number_or_tensor(name: str, value: Ridge) -> float | Tensor:
    return floating(name, value) if isinstance(value, Tensor) else number(name, value)


@door
@unreadable(
    "it attends by massieu.regression.conditional_mean_attention; massieu.nn.ConditionalMeanHeads shows its weights",
    attends=True,
)
def conditional_mean_attention(
    query: Float[Tensor, "*query D"],
    key: Float[Tensor, "B Hk N D"],
    value: Float[Tensor, "B Hk N E"],
    *,
    kernel: Kernel,
    ridge: Ridge | None = None,
    operator_ridge: Ridge | None = None,
    log_weight: Float[Tensor, "..."] | Bool[Tensor, "..."] | None = None,
    is_causal: bool = False,
    need_variance: bool = False,
    method: Method = None,
    preconditioner_rank: int = 256,
    throw: bool = True,
) -> ConditionalMeanResult:
    """Kernel ridge regression within a sequence, Vᵀ(G + λI)⁻¹κ(K, q): an estimate of E[value | key = q] (Z4, Z5).

    It is the posterior mean where value = zφ(key) + noise of variance σ², coefficients z have prior variance λ₀, κ(a, b) =
    φ(a)·φ(b) and λ = σ²/λ₀ (`ridge_from`): Gaussian process regression, kernel ridge regression. Weights may be negative
    and do not sum to one. Unlike softmax attention at a fixed temperature it converges to the conditional mean (Z7).

    Args:
        query: (B, H, L, D) with H a multiple of the key's Hk heads, query head h on key head h // (H / Hk); or the same
            spelt out, (B, Hk, G, L, D).
        key, value: (B, Hk, N, D) and (B, Hk, N, E), of the query's dtype and device.
        kernel: `LinearKernel`, `ExponentialKernel`, `GaussianKernel`, `FeatureKernel`, or one's own; its numbers are
            one a key head, or one.
        ridge: λ, which the Gram matrix's diagonal gets: a number or a tensor of one number, (Hk,) or (B, Hk). Not
            negative; 0 interpolates, where G allows it.
        operator_ridge: In its place λ/L, the ridge of the empirical operator (1/L)Σφφᵀ (Z5), L the number of visible
            keys (the sum of their weights). Not causal. Exactly one of the two is given (trap 19).
        log_weight: One a key, for all queries and query heads: broadcasting to (B, Hk, 1, N). Booleans of which True
            keeps a key, or log w < +inf: the precision of value n is wₙ/σ², so that λ becomes λ/wₙ. −inf hides a key,
            which may then hold anything.
        is_causal: Query i sees keys 0 … i.
        need_variance: Return the posterior variance, in units of λ₀, too.
        method: How the equations are solved.

            - `Cholesky`: exact, in time N³ or N·F².
            - `massieu.solve.ConjugateGradients`: to a residual, in time steps·N² and memory linear in N and L, the gradient
              too; not causal. The variance costs a solve a query.
            - `LowRank`: the kernel seen from few centres, in memory linear in N and L; not causal.
            - None: `Cholesky`, but without features, beyond 4096 keys and where conjugate gradients can, these.
        preconditioner_rank: Of the pivoted Cholesky decomposition of the Gram matrix that preconditions conjugate
            gradients; 0 for none. A preconditioner that `ConjugateGradients` has is used in its place, on vectors of shape
            (B, Hk, columns, N).
        throw: Raise where conjugate gradients have not converged. Without it their last iterate is used, in the derivative
            too; `convergence` says what became of each system, `error_bound` how far off the output may be.

    All but the error bound are differentiable any number of times in query, key, value, weights, ridge and the kernel's
    numbers; `Cholesky` alone takes transforms and compiled code, where values are not checked. Half precision is computed in
    float32. Rounding is amplified by up to (largest eigenvalue of G)/λ; a matrix singular to rounding is refused.

    Raises:
        TypeError: not a tensor, a dtype or an option of another type.
        ValueError: shapes or devices that do not fit (both are named), a ridge that is negative or NaN, both or none of
            the ridges, a singular matrix, numbers that are not finite, what a method does not do.
        ConvergenceError: conjugate gradients stopped above their tolerance, and `throw`.

    Example:
        >>> import torch
        >>> from massieu.regression import LinearKernel, conditional_mean_attention
        >>> key = torch.tensor([[[[1.0], [2.0]]]])
        >>> how = {"kernel": LinearKernel.create(), "ridge": 0.0}
        >>> round(conditional_mean_attention(3 * key[:, :, :1], key, 2 * key, **how).output.item(), 4)  # at 3
        6.0
    """
    problem, tokens = check_tokens(query, key, value, kernel, ridge, operator_ridge, log_weight, is_causal)
    approximate_method = _approximate_method(method, tokens, is_causal)
    whole_number("preconditioner_rank", preconditioner_rank, least=0)
    # (B, Hk, G, L, D): the G query heads of a key head are solved for side by side, as G·L queries.
    grouped_query = problem.query.to(problem.dtype)
    group_and_length = grouped_query.shape[2:4]
    with without_autocast(query.device):
        if isinstance(approximate_method, ConjugateGradients):
            flat_query = grouped_query.flatten(2, 3)
            prediction = iterative(tokens, flat_query, approximate_method, preconditioner_rank, need_variance, throw)
        elif isinstance(approximate_method, LowRank):
            prediction = low_rank(tokens, grouped_query.flatten(2, 3), approximate_method.rank)
        else:
            prediction = exact(tokens, grouped_query, is_causal, need_variance)

    def restored(by_query: Tensor | None) -> Tensor | None:
        """Numbers of (B, Hk, G·L) queries, or None, in the layout of the caller's query."""
        return None if by_query is None else problem.restore(by_query.unflatten(2, group_and_length))

    output = problem.restore(prediction.output.unflatten(2, group_and_length)).to(problem.query.dtype)
    variance = restored(prediction.variance) if need_variance else None
    _check_result(output=output, variance=variance)
    return ConditionalMeanResult(output, variance, restored(prediction.error_bound), prediction.convergence)


def _check_result(**results: Tensor | None) -> None:
    """Raise a ValueError at NaN and infinities: since all arguments are finite, something overflowed."""
    for name, result in results.items():
        if result is not None and not all_true(result.isfinite()):
            numbers = unwrapped(result)
            raise ValueError(
                f"the {name} is beyond the range of {result.dtype} for {int((~numbers.isfinite()).sum())} of "
                f"{numbers.numel()} numbers: queries, keys or a kernel's scale of a smaller size are needed, or a wider dtype"
            )


def _by_query_head(name: str, value: Ridge, variance: Float[Tensor, "*query"]) -> Ridge:
    """One number a key head, to broadcast against a variance (B, H, L) or (B, Hk, G, L)."""
    check_one_device(variance=variance, **{name: value})
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value
    batch, heads = variance.shape[:2]
    key_heads = value.shape[-1]
    if variance.ndim == 3:
        fits = key_heads > 0 and heads % key_heads == 0
    else:
        fits = key_heads in (1, heads)
    if value.ndim > 2 or not fits or value.shape[:-1] not in ((), (batch,)):
        raise ValueError(
            f"{name} must be one number or one a key head, got shape {tuple(value.shape)} for a variance of shape "
            f"{tuple(variance.shape)}"
        )
    if variance.ndim == 3:
        value = value.repeat_interleave(heads // key_heads, -1)
    return value.reshape(*value.shape, *[1] * (variance.ndim - 2))


def check_method(method: Method) -> Cholesky | ConjugateGradients | LowRank:
    """The method, if it is one; else a TypeError."""
    if not isinstance(method, Cholesky | ConjugateGradients | LowRank):
        raise TypeError(f"method must be Cholesky(), ConjugateGradients(), LowRank() or None, got {described(method)}")
    return method


def _approximate_method(method: Method, tokens: KeyValuePairs, is_causal: bool) -> ConjugateGradients | LowRank | None:
    """The approximate method, or None if the factor is exact."""
    # Iterations stop, and pivots are chosen, by values.
    is_readable = not in_functorch() and values_are_readable(tokens.key, tokens.target, tokens.ridge)
    if method is None:
        # First what asks for no size: in compiled code a comparison would limit the lengths that it serves.
        if not is_readable or is_causal:
            return None
        is_long = tokens.key.shape[2] > LONGEST_GRAM and tokens.features() is None
        return ConjugateGradients() if is_long and bool((tokens.ridge > 0).all()) else None
    checked = check_method(method)
    if isinstance(checked, Cholesky):
        return None
    if is_causal:
        raise ValueError(f"is_causal goes with method=Cholesky() alone, got {method!r}")
    if not is_readable:
        raise ValueError("inside torch.func transforms and torch.compile, use method=Cholesky()")
    return checked if tokens.key.shape[2] else None
