"""Softmax attention on the sphere as a smoother: its estimate at a fixed temperature, and at the best one (Z7, X9).

Keys k uniform on the unit sphere of R^d, values of conditional mean f(k) = Σ f_n(k), f_n a spherical harmonic of degree n,
a query q on the sphere, weights e^{βk·q}. With infinitely many keys the output is Σ ρ_n(β) f_n(q) (Funk–Hecke) and not f(q).
Functions f enter by the values of their `parts` f_n, or by the `power` E f_n² of each over the sphere; the last axis is
the degree, from 0. Computed in float64 whatever the input. Arguments out of their range, shapes that do not fit each
other and numbers that are not finite raise a ValueError; what is neither a tensor nor numbers a TypeError.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import (
    check_broadcastable,
    check_one_device,
    check_range,
    check_shape,
    check_values,
    doubles,
    number,
    real,
    whole_number,
)
from massieu.foundation.doors import count, door
from massieu.foundation.short_repr import fields_html, fields_repr
from massieu.ops.bessel import bessel_ratios, log_sphere_partition, sphere_slack

_LEAST_SCALE = 1e-3
_LARGEST_SCALE = 1e6
"""The range that `optimal_scale` searches."""
_GRID_POINTS = 65
_REFINEMENTS = 4
"""Grids of log β, each over two intervals of the one before."""


@door
def sphere_multipliers(
    degree: int, dimension: int, scale: Float[Tensor, "*lead"] | float
) -> Float[Tensor, "*lead degree+1"]:
    """The factors ρ_n(β) = I_{d/2−1+n}(β)/I_{d/2−1}(β) by which softmax attention shrinks degree n = 0 … degree (Z7, X9).

    1 − n(n+d−2)/(2β) for large β, (β/2)ⁿ Γ(d/2)/Γ(d/2+n) for small. Relative error below 1e-14·(n + 1) in float64, every
    β ≥ 0 and d from 2 to 4096, where ρ_n is no subnormal; differentiable any number of times in β, at 0 too; works under
    vmap and compile.

    Args:
        degree: The largest n, at least 0.
        dimension: d ≥ 2.
        scale: β ≥ 0.

    Example:
        >>> from massieu.papers.theory import sphere_multipliers
        >>> [round(x, 3) for x in sphere_multipliers(1, dimension=3, scale=1.0).tolist()]  # 1, coth 1 − 1
        [1.0, 0.313]
    """
    scale = _scale(scale, dimension, degree)
    products = [torch.ones_like(scale)]
    if degree:
        for ratio in bessel_ratios(scale, dimension, degree).unbind(-1):
            products.append(products[-1] * ratio)
    return torch.stack(products, -1)


@door(operator_ridge=real)
def ridge_multipliers(
    degree: int, dimension: int, scale: Float[Tensor, "*lead"] | float, operator_ridge: float
) -> Float[Tensor, "*lead degree+1"]:
    """The factor Λρ_n/(Λρ_n + λ) by which conditional mean attention multiplies degree n, Λ = E e^{βk·q} (Z4, Z7, X9).

    Its kernel is softmax's own, e^{βk·k'}, and λ > 0 the ridge of the operator (of the Gram matrix: λ times the number of
    keys). As λ → 0 every degree with ρ_n > 0 comes back: it is the deconvolution that matches softmax.

    Example:
        >>> from massieu.papers.theory import ridge_multipliers
        >>> multipliers = ridge_multipliers(
        ...     1, dimension=3, scale=1.0, operator_ridge=1e-9
        ... )  # a small ridge loses little
        >>> [round(x, 3) for x in multipliers.tolist()]
        [1.0, 1.0]
    """
    number("operator_ridge", operator_ridge, above=0)
    multipliers = sphere_multipliers(degree, dimension, scale)
    scale = _scale(scale, dimension, degree)
    unit = scale.detach().clamp_min(1)
    log_partition = log_sphere_partition((scale / unit).square(), dimension, unit).unsqueeze(-1)
    # Divided by Λ, which itself overflows from β = 700 on.
    return multipliers / (multipliers + operator_ridge * (-log_partition).exp())


@door(cut_off=count)
def deconvolution(multipliers: Float[Tensor, "*lead n"], cut_off: int) -> Float[Tensor, "*lead n"]:
    """Factors that undo `sphere_multipliers`: 1/ρ_n up to degree `cut_off`, and 0 beyond, where noise forbids it (X9).

    Noise of degree n is enlarged by 1/ρ_n, for small β as (2/β)ⁿ Γ(d/2+n)/Γ(d/2): a cut-off is not optional.

    Raises:
        ValueError: `cut_off` is none of the degrees given, or a ρ_n up to it is not positive: nothing is left to enlarge.

    Example:
        >>> import torch
        >>> from massieu.papers.theory import deconvolution
        >>> deconvolution(torch.tensor([1.0, 0.5, 0.25]), cut_off=1).tolist()
        [1.0, 2.0, 0.0]
    """
    multipliers = doubles("multipliers", multipliers)
    if not multipliers.ndim:
        raise ValueError("multipliers must have shape (*lead, degrees), got a single number")
    whole_number("cut_off", cut_off, least=0, most=multipliers.shape[-1] - 1)
    check_range(f"multipliers up to degree {cut_off}", multipliers[..., : cut_off + 1], above=0)
    is_kept = torch.arange(multipliers.shape[-1], device=multipliers.device) <= cut_off
    # Those that are cut off may be 0: without the inner `where` their derivative would be NaN.
    return torch.where(is_kept, torch.where(is_kept, multipliers, 1).reciprocal(), 0)


@door
def zonal_harmonics(cosine: Float[Tensor, "*lead"], degree: int, dimension: int) -> Float[Tensor, "*lead degree+1"]:
    """Zonal harmonics P_n(t) for n = 0 … degree, which depend on t = q·a alone, with P_n(1) = 1.

    Chebyshev's polynomials for d = 2, Legendre's for d = 3. E P_n(q·a)² = 1/`harmonic_count`(n, d) over the sphere.

    Example:
        >>> import torch
        >>> from massieu.papers.theory import zonal_harmonics
        >>> [round(x, 3) for x in zonal_harmonics(torch.tensor(0.5), degree=2, dimension=3).tolist()]  # Legendre's
        [1.0, 0.5, -0.125]
    """
    _check_sphere(degree, dimension)
    cosine = doubles("cosine", cosine)
    values = [torch.ones_like(cosine), cosine]
    for n in range(1, degree):
        values.append(((2 * n + dimension - 2) * cosine * values[n] - n * values[n - 1]) / (n + dimension - 2))
    return torch.stack(values[: degree + 1], -1)


@door
def harmonic_count(degree: int, dimension: int) -> int:
    """The number of linearly independent harmonics of this degree on the unit sphere of R^d.

    Example:
        >>> from massieu.papers.theory import harmonic_count
        >>> [harmonic_count(degree, dimension=3) for degree in range(4)]  # 2n + 1
        [1, 3, 5, 7]
    """
    _check_sphere(degree, dimension)
    polynomials = math.comb(degree + dimension - 1, degree)
    # Those divisible by ‖x‖², which on the sphere are of lower degree.
    divisible = math.comb(degree + dimension - 3, degree - 2) if degree > 1 else 0
    return polynomials - divisible


@door
def spherical_kernel(
    cosine: Float[Tensor, "*lead"], spectrum: Float[Tensor, "n"], dimension: int
) -> Float[Tensor, "*lead"]:
    """The kernel on the sphere with a given spectrum, K(q·k) = Σ N(n, d) spectrum_n P_n(q·k) (Funk–Hecke).

    E_k K(q·k) f(k) = Σ spectrum_n f_n(q) for uniform k. With `sphere_multipliers` as spectrum it is e^{βq·k}/E
    e^{βq·k}, softmax's own weight; with those times `deconvolution`, the weight of deconvolved attention, (1/L) Σ
    K(q·k_j) v_j.

    Raises:
        OverflowError: more harmonics of one degree than float64 can count.

    Example:
        >>> import torch
        >>> from massieu.papers.theory import spherical_kernel
        >>> spherical_kernel(torch.tensor(1.0), torch.tensor([1.0, 1.0]), dimension=3).item()  # 1 + 3
        4.0
    """
    spectrum = doubles("spectrum", spectrum)
    check_shape("spectrum", spectrum, ("degrees",))
    if not len(spectrum):
        raise ValueError("spectrum must have at least one degree, got none")
    check_one_device(cosine=cosine, spectrum=spectrum)
    degree = len(spectrum) - 1
    counts = [float(harmonic_count(n, dimension)) for n in range(degree + 1)]
    weights = torch.tensor(counts, dtype=torch.float64, device=spectrum.device) * spectrum
    return zonal_harmonics(cosine, degree, dimension) @ weights


class SmoothingFloorResult(NamedTuple):
    """Distances of softmax attention over infinitely many keys from the conditional mean: root mean squares over queries."""

    error: Float[Tensor, "*lead"]
    """The error of the output as it is: no number of keys brings it lower."""
    factor: Float[Tensor, "*lead"]
    """The C for which C times the output is nearest to f; 0 where the output is 0 for every query."""
    factor_error: Float[Tensor, "*lead"]
    """The error of C times the output: 0 if and only if f has one degree, so that no C serves every f."""

    __repr__ = fields_repr
    _repr_html_ = fields_html


@door
def smoothing_floor(
    power: Float[Tensor, "*lead n"], dimension: int, scale: Float[Tensor, "*lead"] | float
) -> SmoothingFloorResult:
    """The error of softmax attention over infinitely many keys at a fixed temperature, as it is and rescaled (Z7).

    Args:
        power: E f_n² over the sphere, at least 0.
        dimension, scale: as `sphere_multipliers`.

    Example:
        >>> import torch
        >>> from massieu.papers.theory import smoothing_floor
        >>> power = torch.tensor([0.0, 1.0], dtype=torch.float64)  # linear: one constant undoes the smoothing
        >>> abs(round(smoothing_floor(power, dimension=3, scale=2.0).factor_error.item(), 6))
        0.0
    """
    power = _power(power)
    multipliers = sphere_multipliers(power.shape[-1] - 1, dimension, scale)
    check_broadcastable(power=power[..., 0], scale=multipliers[..., 0])
    check_one_device(power=power, scale=multipliers)
    # C = Σ ρ_n E f_n² / Σ ρ_n² E f_n², in units of the largest ρ_n in use, so that no square underflows.
    used = torch.where(power > 0, multipliers, 0.0)
    largest = used.amax(-1)
    has_output = largest > 0
    unit = torch.where(has_output, largest, 1.0)
    relative = used / unit.unsqueeze(-1)
    squares = torch.where(has_output, (relative.square() * power).sum(-1), 1.0)
    factor = torch.where(has_output, (relative * power).sum(-1) / squares / unit, 0.0)
    factor_error = ((1 - factor.unsqueeze(-1) * used).square() * power).sum(-1).sqrt()
    error = ((1 - multipliers).square() * power).sum(-1).sqrt()
    return SmoothingFloorResult(error, factor, factor_error)


class SmoothingErrorResult(NamedTuple):
    """Mean squared error of softmax attention over L keys, over keys, values and queries."""

    smoothing: Float[Tensor, "*lead"]
    """The error of infinitely many keys: the floor's square."""
    sampling: Float[Tensor, "*lead"]
    """The part that finitely many add: variance, and the product of both biases; proportional to 1/L."""

    __repr__ = fields_repr
    _repr_html_ = fields_html

    @property
    def total(self) -> Float[Tensor, "*lead"]:
        """Their sum."""
        return self.smoothing + self.sampling


@door(noise_variance=real)
def smoothing_error(
    keys: Float[Tensor, "*lead"] | float,
    power: Float[Tensor, "n"],
    noise_variance: float,
    dimension: int,
    scale: Float[Tensor, "*lead"] | float,
) -> SmoothingErrorResult:
    """Mean squared error of softmax attention over L keys, uniform on the sphere, to order 1/L (S15, Z7).

    With weights w = e^{βk·q}/Λ(β): E w² = Λ(2β)/Λ(β)², the variance is E[w²(v − m)²]/L and the self-normalised bias
    −E[w²(v − m)]/L; both are closed forms in ρ_n(β) and ρ_n(2β). It holds where E w² is far below L.

    Args:
        keys: L.
        power: E f_n², at least 0.
        noise_variance: Var(v | k) ≥ 0, the same for all keys.
        dimension, scale: as `sphere_multipliers`.

    Example:
        >>> import torch
        >>> from massieu.papers.theory import smoothing_error
        >>> power = torch.tensor([0.0, 1.0], dtype=torch.float64)
        >>> few, many = smoothing_error(torch.tensor([1e3, 1e5]), power, 1.0, dimension=3, scale=2.0).sampling
        >>> round((few / many).item(), 3)
        100.0
    """
    number("noise_variance", noise_variance, least=0)
    keys = _keys(keys)
    power = _power(power)
    degree = power.shape[-1] - 1
    scale = _scale(scale, dimension, degree)
    check_broadcastable(keys=keys, power=power[..., 0], scale=scale)
    # ρ_n(β), and ρ_n(2β), the multipliers of w².
    at_scale, at_twice = (sphere_multipliers(degree, dimension, factor * scale) for factor in (1, 2))
    # Over E w²: the variance about the output, 1 − 2ρ(β)ρ(2β) + ρ(β)², and twice the product of both biases.
    variance = 1 - 2 * at_scale * at_twice + at_scale.square()
    bias_product = 2 * (1 - at_scale) * (at_twice - at_scale)
    spread = ((variance + bias_product) * power).sum(-1)
    sampling = _log_mean_square(scale, dimension).exp() * (noise_variance + spread) / keys
    smoothing = ((1 - at_scale).square() * power).sum(-1)
    return SmoothingErrorResult(smoothing, sampling)


@door(noise_variance=real)
def optimal_scale(
    keys: Float[Tensor, "*#lead"] | float, power: Float[Tensor, "*#lead n"], noise_variance: float, dimension: int
) -> Float[Tensor, "*lead"]:
    """The inverse temperature that minimises `smoothing_error` over L keys, where E w² ≤ L, between 1e-3 and 1e6.

    It grows as L^{2/(d+3)}, and the root of the error falls as L^{−2/(d+3)} (Z7). With very little noise it is the β of
    E w² = L, beyond which less than one key counts and the error's formula does not hold. Not differentiable; right to
    1e-5 of itself.

    Example:
        >>> import torch
        >>> from massieu.papers.theory import optimal_scale
        >>> power = torch.tensor([0.0, 1.0], dtype=torch.float64)
        >>> few, many = optimal_scale(torch.tensor([1e3, 1e5]), power, 1.0, dimension=3)
        >>> bool(many > few)
        True
    """
    number("noise_variance", noise_variance, above=0)
    check_values(keys=keys, power=power)
    power = _power(power)
    keys = _keys(keys).to(power.device)
    keys = keys.expand(torch.broadcast_shapes(keys.shape, power.shape[:-1]))
    low = torch.full_like(keys, math.log(_LEAST_SCALE))
    high = torch.full_like(keys, math.log(_LARGEST_SCALE))
    fractions = torch.linspace(0, 1, _GRID_POINTS, dtype=torch.float64, device=power.device)
    with torch.no_grad():
        for _ in range(_REFINEMENTS):
            log_scale = low.unsqueeze(-1) + (high - low).unsqueeze(-1) * fractions  # (*lead, points)
            scale = log_scale.exp()
            error = smoothing_error(keys.unsqueeze(-1), power.unsqueeze(-2), noise_variance, dimension, scale).total
            is_valid = _log_mean_square(scale, dimension) <= keys.log().unsqueeze(-1)  # E w² ≤ L
            best = torch.where(is_valid, error, torch.inf).argmin(-1, keepdim=True)
            low = log_scale.gather(-1, (best - 1).clamp_min(0)).squeeze(-1)
            high = log_scale.gather(-1, (best + 1).clamp_max(_GRID_POINTS - 1)).squeeze(-1)
    return (0.5 * (low + high)).exp()


@door(noise_variance=real)
def asymptotic_scale(
    keys: Float[Tensor, "*lead"] | float, power: Float[Tensor, "n"], noise_variance: float, dimension: int
) -> Float[Tensor, "*lead"]:
    """The limit of `optimal_scale` for many keys: β^{(d+3)/2} = E(Δf)² L/((d−1) c σ²), c = 2√π·4^{−(d−1)/2}/Γ(d/2).

    Δf has the parts −n(n+d−2) f_n. From 1 − ρ_n ≈ n(n+d−2)/(2β) and E w² ≈ c β^{(d−1)/2}. Needs noise; arguments as
    `smoothing_error`.

    Example:
        >>> import torch
        >>> from massieu.papers.theory import asymptotic_scale
        >>> power = torch.tensor([0.0, 1.0], dtype=torch.float64)
        >>> few, many = asymptotic_scale(torch.tensor([1e4, 1e8]), power, 1.0, dimension=3)
        >>> bool(many > few)
        True
    """
    number("noise_variance", noise_variance, above=0)
    check_values(keys=keys, power=power)
    power = _power(power)
    _check_sphere(power.shape[-1] - 1, dimension)
    n = torch.arange(power.shape[-1], dtype=torch.float64, device=power.device)
    roughness = ((n * (n + dimension - 2)).square() * power).sum()
    log_c = math.log(2) + 0.5 * math.log(math.pi) - (dimension - 1) * math.log(2) - math.lgamma(dimension / 2)
    ratio = roughness * _keys(keys).to(power.device) / ((dimension - 1) * noise_variance)
    return ((ratio.log() - log_c) * 2 / (dimension + 3)).exp()


def _log_mean_square(scale: Tensor, dimension: int) -> Tensor:
    """log E w² for w = e^{βk·q}/Λ(β): log Λ(2β) − 2 log Λ(β)."""
    is_large = scale > 1
    small_scale = torch.where(is_large, 1.0, scale)
    large_scale = torch.where(is_large, scale, 1.0)
    # Both at β and at 2β.
    log_partition, log_partition_at_twice = (
        log_sphere_partition((factor * small_scale).square(), dimension) for factor in (1, 2)
    )
    # For large β both terms are nearly 2β. The slacks β − log Λ(β) are computed without it, so that no digits are lost.
    unit = large_scale.detach()
    slack, slack_at_twice = (sphere_slack((factor * large_scale / unit).square(), dimension, unit) for factor in (1, 2))
    return torch.where(is_large, 2 * slack - slack_at_twice, log_partition_at_twice - 2 * log_partition)


def _keys(keys: Tensor | float) -> Tensor:
    keys = doubles("keys", keys)
    check_range("keys", keys, least=1)
    return keys


def _check_sphere(degree: int, dimension: int) -> None:
    whole_number("degree", degree, least=0)
    whole_number("the sphere's dimension", dimension, least=2)


def _scale(scale: Tensor | float, dimension: int, degree: int) -> Tensor:
    _check_sphere(degree, dimension)
    scale = doubles("scale", scale)
    check_range("scale", scale, least=0)
    return scale


def _power(power: Tensor) -> Tensor:
    power = doubles("power", power)
    if not power.ndim or not power.shape[-1]:
        raise ValueError(f"power must have shape (*lead, degrees), got {tuple(power.shape)}")
    check_range("power", power, least=0)
    return power
