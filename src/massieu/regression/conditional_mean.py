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
from massieu.foundation.transforms import every, in_functorch, unwrapped, values_are_readable, without_autocast
from massieu.regression.exact import Cholesky, exact
from massieu.regression.iterative import iterative
from massieu.regression.kernels import Kernel
from massieu.regression.low_rank import LowRank, low_rank
from massieu.regression.tokens import KeyValuePairs, Ridge, SystemsSolved, check_tokens
from massieu.solve import ConjugateGradients

Method = Cholesky | ConjugateGradients | LowRank | None

LONGEST_GRAM = 4096
"""Keys above which no Gram matrix is formed unless asked for."""


class ConditionalMeanResult(NamedTuple):
    """What `conditional_mean_attention` returns."""

    output: Float[Tensor, "*query E"]
    """Vᵀ(G + λI)⁻¹κ(K, q), in the query's dtype; 0 where no key is visible."""
    variance: Float[Tensor, "*query"] | None
    """κ(q, q) − κ(K, q)ᵀ(G + λI)⁻¹κ(K, q), float32 or float64; κ(q, q) where no key is visible. None if not asked for."""
    error_bound: Float[Tensor, "*query"] | None
    """Of ‖output − exact output‖ in exact arithmetic, from what the method left out; None for `Cholesky`, or without any
    key, where nothing is. It has no gradient."""
    convergence: SystemsSolved | None
    """Of conjugate gradients: what became of the system of each value column; None of the other methods."""

    def predictive_variance(self, *, noise_variance: Ridge, prior_variance: Ridge) -> Float[Tensor, "*query"]:
        """Of a new value at the query: σ² + λ₀·variance, where the ridge was σ²/λ₀ (Z4).

        Args:
            noise_variance, prior_variance: As of `ridge_from`; numbers, or as a ridge one a key head, (Hk,) or (B, Hk).

        Raises:
            ValueError, TypeError: no variance was asked for, a number out of its range, another shape.
        """
        if self.variance is None:
            raise ValueError("there is no variance: ask for it with need_variance=True")
        ridge_from(noise_variance=noise_variance, prior_variance=prior_variance)
        noise = _a_query("noise_variance", noise_variance, self.variance)
        return noise + _a_query("prior_variance", prior_variance, self.variance) * self.variance


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
    for name, value, least, above in (
        ("noise_variance", noise_variance, 0.0, None),
        ("prior_variance", prior_variance, None, 0.0),
    ):
        checked = floating(name, value) if isinstance(value, Tensor) else number(name, value)
        check_range(name, checked, least=least, above=above)
    check_broadcastable(noise_variance=noise_variance, prior_variance=prior_variance)
    return noise_variance / prior_variance


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
        method: How.

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
    how = _method(method, tokens, is_causal)
    whole_number("preconditioner_rank", preconditioner_rank, least=0)
    asked = problem.query.to(problem.dtype)
    layout = asked.shape[2:4]
    with without_autocast(query.device):
        if isinstance(how, ConjugateGradients):
            found = iterative(tokens, asked.flatten(2, 3), how, preconditioner_rank, need_variance, throw)
        elif isinstance(how, LowRank):
            found = low_rank(tokens, asked.flatten(2, 3), how.rank)
        else:
            found = exact(tokens, asked, is_causal, need_variance)

    def restored(number: Tensor | None) -> Tensor | None:
        return None if number is None else problem.restore(number.unflatten(2, layout))

    output = problem.restore(found.output.unflatten(2, layout)).to(problem.query.dtype)
    variance = restored(found.variance) if need_variance else None
    _check_result(output=output, variance=variance)
    return ConditionalMeanResult(output, variance, restored(found.error_bound), found.convergence)


def _check_result(**results: Tensor | None) -> None:
    """Arguments are finite: what is not has left the dtype's range."""
    for name, result in results.items():
        if result is not None and not every(result.isfinite()):
            numbers = unwrapped(result)
            raise ValueError(
                f"the {name} is beyond the range of {result.dtype} for {int((~numbers.isfinite()).sum())} of "
                f"{numbers.numel()} numbers: queries, keys or a kernel's scale of a smaller size are needed, or a wider dtype"
            )


def _a_query(name: str, number: Ridge, variance: Float[Tensor, "*query"]) -> Ridge:
    """Numbers of key heads, to meet (B, H, L) or (B, Hk, G, L)."""
    check_one_device(variance=variance, **{name: number})
    if not isinstance(number, Tensor) or number.ndim == 0:
        return number
    batch, heads = variance.shape[:2]
    count = number.shape[-1]
    fits = count > 0 and heads % count == 0 if variance.ndim == 3 else count in (1, heads)
    if number.ndim > 2 or not fits or number.shape[:-1] not in ((), (batch,)):
        raise ValueError(
            f"{name} must be one number or one a key head, got shape {tuple(number.shape)} for a variance of shape "
            f"{tuple(variance.shape)}"
        )
    if variance.ndim == 3:
        number = number.repeat_interleave(heads // count, -1)
    return number.reshape(*number.shape, *[1] * (variance.ndim - 2))


def check_method(method: Method) -> Cholesky | ConjugateGradients | LowRank:
    """The method; a TypeError if it is none."""
    if not isinstance(method, Cholesky | ConjugateGradients | LowRank):
        wanted = "Cholesky(), ConjugateGradients(), LowRank() or None"
        raise TypeError(f"method must be {wanted}, got {described(method)}")
    return method


def _method(method: Method, tokens: KeyValuePairs, is_causal: bool) -> ConjugateGradients | LowRank | None:
    """None for exact factors."""
    # Iterations decide by values, and pivots too.
    readable = not in_functorch() and values_are_readable(tokens.key, tokens.target, tokens.ridge)
    if method is None:
        long = readable and not is_causal and tokens.key.shape[2] > LONGEST_GRAM and tokens.features() is None
        return ConjugateGradients() if long and bool((tokens.ridge > 0).all()) else None
    how = check_method(method)
    if isinstance(how, Cholesky):
        return None
    if is_causal:
        raise ValueError(f"is_causal goes with method=Cholesky() alone, got {method!r}")
    if not readable:
        raise ValueError("inside torch.func transforms and torch.compile, use method=Cholesky()")
    return how if tokens.key.shape[2] else None
