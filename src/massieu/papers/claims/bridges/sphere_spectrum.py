"""X9: softmax attention on the sphere is a low-pass filter, and conditional mean attention the deconvolution."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from massieu import ops
from massieu.ops.bessel import log_sphere_partition
from massieu.papers.claims.claim import CLOSED_FORM, Check, at_least, at_most, close
from massieu.papers.claims.registry import claim
from massieu.papers.theory import deconvolution, ridge_multipliers, sphere_multipliers, spherical_kernel

_DEGREE = 6


@claim(
    "X9",
    title="Spectrum of softmax attention on the sphere",
    statement="Softmax attention over uniform keys on the sphere is a low-pass filter: it multiplies degree n by "
    "ρ_n(β), which is 1 − n(n+d−2)/(2β) for large β and (β/2)ⁿΓ(d/2)/Γ(d/2+n) for small β. Conditional mean "
    "attention multiplies it by Λρ_n/(Λρ_n + λ), which tends to 1 as λ → 0.",
    source="Z7 and Z4 over uniform keys; Funk–Hecke",
    status="derived",
)
def low_pass_filter() -> Iterator[Check]:
    degree = torch.arange(_DEGREE + 1, dtype=torch.float64)
    for dimension in (2, 3, 4, 64, 4096):
        yield from _asymptotics(degree, dimension)
    yield from _known_numbers()
    yield from _kernels()
    yield from _on_the_circle()


def _asymptotics(degree: Tensor, dimension: int) -> Iterator[Check]:
    """ρ_n falls with n; its leading terms at large and at small β."""
    name = f"d = {dimension}"
    multipliers = sphere_multipliers(_DEGREE, dimension, torch.tensor([0.1, 1.0, 30.0, 1e3]).double())
    yield at_most(f"{name}: ρ_n − ρ_(n−1)", multipliers.diff(dim=-1), 0.0)

    eigenvalue = degree * (degree + dimension - 2)
    # The next order is half a square of the first, and a term of the size of d times the first.
    large_scale = 1e6 * (dimension + eigenvalue[-1].item())
    loss = (1 - sphere_multipliers(_DEGREE, dimension, large_scale)) * 2 * large_scale
    yield close(f"{name}: 2β(1 − ρ_n) at large β, and n(n+d−2)", loss, eigenvalue, 1e-5)

    small_scale = 1e-3
    half = torch.tensor(dimension / 2, dtype=torch.float64)
    log_leading = degree * math.log(small_scale / 2) + torch.lgamma(half) - torch.lgamma(half + degree)
    # In logarithms: lgamma(2048) has a rounding of 2e-12. Relative next order: below β²/(2d).
    log_ratio = sphere_multipliers(_DEGREE, dimension, small_scale).log() - log_leading
    yield at_most(f"{name}: |log ρ_n − log of its leading term| at β = 10⁻³", log_ratio.abs(), small_scale**2)


def _known_numbers() -> Iterator[Check]:
    """d = 3 in elementary functions: ρ₁ = coth β − 1/β, ρ₂ = 1 − 3ρ₁/β."""
    scale = torch.tensor([0.5, 2.0, 40.0], dtype=torch.float64)
    first = 1 / scale.tanh() - 1 / scale
    expected = torch.stack([torch.ones_like(scale), first, 1 - 3 * first / scale], -1)
    yield close("d = 3: ρ₀, ρ₁, ρ₂ and hyperbolic functions", sphere_multipliers(2, 3, scale), expected)


def _kernels() -> Iterator[Check]:
    """e^{βt}/Λ is the sum of its harmonics (Rayleigh's expansion)."""
    cosine = torch.linspace(-1, 1, 41, dtype=torch.float64)
    scale = 3.0
    for dimension in (2, 3, 8):
        squared_scale = torch.tensor(scale**2, dtype=torch.float64)
        expected = torch.exp(scale * cosine - log_sphere_partition(squared_scale, dimension))
        kernel = spherical_kernel(cosine, sphere_multipliers(50, dimension, scale), dimension)
        yield close(f"d = {dimension}: Σ N(n, d) ρ_n P_n(t) and e^(βt)/Λ", kernel, expected)


def _on_the_circle(count: int = 128, scale: float = 3.0) -> Iterator[Check]:
    """A regular grid of the circle stands for all of it: averages over it are exact for frequencies below `count`."""
    angle = 2 * math.pi * torch.arange(count, dtype=torch.float64) / count
    key = torch.stack([angle.cos(), angle.sin()], -1)
    # Harmonics f_n of the degrees 0 to 3, shape (count, 4), and f, their sum.
    harmonics = torch.stack([0.4 + 0 * angle, angle.cos(), (2 * angle + 1).sin(), (3 * angle).cos()], -1)
    value = harmonics.sum(-1)
    heads = key[None, None]
    output = ops.attention(heads, heads, value[None, None, :, None], scale=scale).output.flatten()
    multipliers = sphere_multipliers(3, 2, scale)
    yield close("circle: softmax attention and Σ ρ_n f_n", output, (multipliers * harmonics).sum(-1))

    gram = torch.exp(scale * key @ key.T)
    regression_errors = []
    for ridge in (1.0, 1e-2, 1e-4):
        system = gram + count * ridge * torch.eye(count, dtype=torch.float64)
        regression = gram @ torch.linalg.solve(system, value)
        expected = (ridge_multipliers(3, 2, scale, ridge) * harmonics).sum(-1)
        yield close(f"circle, λ = {ridge:g}: kernel ridge regression and ΣΛρ_n/(Λρ_n + λ) f_n", regression, expected)
        regression_errors.append((regression - value).square().mean().sqrt())
    softmax_error = (output - value).square().mean().sqrt()
    ratio = softmax_error / regression_errors[-1]
    yield at_least("circle: softmax's error over conditional mean attention's at λ = 10⁻⁴", ratio, 1000.0)

    for cut_off in (1, 3):
        kernel = spherical_kernel(key @ key.T, multipliers * deconvolution(multipliers, cut_off), 2)
        expected = harmonics[:, : cut_off + 1].sum(-1)
        name = f"circle: divided by ρ_n up to degree {cut_off}, and those parts of f"
        yield close(name, kernel @ value / count, expected, CLOSED_FORM)
