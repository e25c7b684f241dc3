"""Z12 and Z13: what the masked objective's minimiser is, and how well another target is read off it."""

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from massieu.foundation.matrices import least_squares
from massieu.papers.claims.claim import (
    CLOSED_FORM,
    QUADRATURE,
    ZHANG,
    Check,
    at_least,
    at_most,
    close,
    mean_of_draws,
    near_in_standard_errors,
)
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.oracles import quadrature
from massieu.papers.claims.registry import claim
from massieu.papers.theory import (
    excess_risk_bound,
    masked_gaussian_mean,
    masked_mean,
    masked_token_probabilities,
    transfer,
)


@claim(
    "Z12",
    title="Masked objective",
    statement="The masked objective E‖x_m − f(X_obs)‖² is minimised by E[x_m | X_obs] = Gs(X_obs), linear in the posterior s "
    "of the latent: (κ₀m₀ + Σx)/(κ₀ + L) for Gaussian tokens, (α_j + n_j)/(α₀ + L) for categorical ones.",
    source=f"{ZHANG}, abstract (c)",
    status="abstract only",
)
def masked_objective(sequences: int = 100_000, seed: int = 0) -> Iterator[Check]:
    check_at_least(1000, sequences=sequences)
    yield from _finitely_many_latents()
    yield from _gaussian_tokens(normal_draws(seed), sequences)
    yield from _categorical_tokens()


@claim(
    "Z13",
    title="Condition number for transfer",
    statement="A downstream optimum Ds is a linear function Λ = DΠ(GΠ)⁺ of the self-supervised one, Π = I − 11ᵀ/k, "
    "if and only if null(GΠ) ⊂ null(DΠ). Then ‖Ds − Ds′‖ ≤ κ‖Gs − Gs′‖ with κ = ‖Λ‖ ≤ σ_max(DΠ)/σ_min⁺(GΠ). The "
    "probe's excess risk is at most κ²·(density ratio) times the self-supervised one.",
    source=f"{ZHANG}, abstract (c), names a condition number; its definition was not recovered and is derived",
    status="derived",
)
def condition_number(pairs: int = 5000, seed: int = 0) -> Iterator[Check]:
    check_at_least(1000, pairs=pairs)
    normal = normal_draws(seed)
    yield from _inequality(normal, pairs)
    yield from _naive(normal)
    yield from _not_identifiable(normal, pairs)
    yield from _excess_risk(normal, pairs)


def _finitely_many_latents() -> Iterator[Check]:
    """Z12 for four latents: Gs is the best table of predictions, which follows from all sequences of three tokens alone."""
    emission = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5], [0.7, 0.1, 0.2]], dtype=torch.float64)
    prior = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    joint = torch.einsum("z,zi,zj,zk->ijk", prior, emission, emission, emission)
    table = joint / joint.sum(-1, keepdim=True)
    observed = torch.tensor(list(itertools.product(range(3), repeat=2)))
    log_likelihood = emission.log()[:, observed].sum(-1).T
    minimiser = masked_mean(emission.T, log_likelihood, prior.log())
    yield close("four latents: Gs and the best table of predictions", minimiser, table.flatten(0, 1))

    def risk(prediction: Tensor) -> Tensor:
        squared_error = (torch.eye(3) - prediction[:, None]).square().sum(-1)
        return (joint.flatten(0, 1) * squared_error).sum()

    # Any other table is worse by the mean square of its distance: the risk is a quadratic function with that minimum.
    mass = joint.sum(-1).flatten()
    excess = risk(minimiser + 0.1) - risk(minimiser)
    yield close("four latents: excess risk of Gs + 0.1", excess, (mass * 3 * 0.01).sum())


def _gaussian_tokens(normal: Normal, sequences: int, length: int = 5, weight: float = 2.0) -> Iterator[Check]:
    """Z12 for tokens N(z, 1), z ~ N(m₀, 1/κ₀): least squares of a masked token on functions of the others."""
    mean = torch.tensor([0.7], dtype=torch.float64)
    tokens = mean + normal(sequences, 1, 1) / math.sqrt(weight) + normal(sequences, length + 1, 1)
    observed = tokens[:, :-1]
    masked = tokens[:, -1, 0]
    prediction = masked_gaussian_mean(observed, mean, weight)[:, 0]
    numbers = observed[..., 0]
    features = torch.cat([torch.ones(sequences, 1, dtype=torch.float64), numbers], -1)
    slope = least_squares(features, masked[:, None])[:, 0]
    variance = 1 + 1 / (weight + length)
    error = (variance * torch.linalg.inv(features.T @ features).diagonal()).sqrt()
    expected = torch.tensor([weight * 0.7, *[1.0] * length], dtype=torch.float64) / (weight + length)
    yield close("Gaussian tokens: prediction and (κ₀m₀ + Σx)/(κ₀ + L)", prediction, features @ expected)
    yield near_in_standard_errors("Gaussian tokens: least squares and κ₀m₀/(κ₀+L), 1/(κ₀+L)", slope, expected, error)
    # The minimiser's residual has no product with any function of the observed tokens, linear or not.
    residual = masked - prediction
    functions = {
        "1": torch.ones_like(prediction),
        "mean²": numbers.mean(-1).square(),
        "largest": numbers.amax(-1),
    }
    for name, function in functions.items():
        yield mean_of_draws(f"Gaussian tokens: E[residual·{name}] and 0", residual * function, 0.0)
    yield mean_of_draws("Gaussian tokens: least risk and 1 + 1/(κ₀+L)", residual.square(), variance)


def _categorical_tokens() -> Iterator[Check]:
    """Z12 for two kinds of tokens: E[z | counts] for a Beta prior by quadrature, z = sin²a."""
    concentration = torch.tensor([1.5, 0.8], dtype=torch.float64)
    angle, log_weight = quadrature(0.0, math.pi / 2)
    for counts in ((0.0, 0.0), (3.0, 1.0), (0.0, 6.0)):
        exponent = 2 * (torch.tensor(counts, dtype=torch.float64) + concentration) - 1
        log_density = exponent[0] * angle.sin().log() + exponent[1] * angle.cos().log() + log_weight
        share = log_density.softmax(0) @ angle.sin().square()
        probabilities = masked_token_probabilities(torch.tensor(counts, dtype=torch.float64), concentration)
        name = f"categorical tokens, counts {counts[0]:g} and {counts[1]:g}"
        # (cos a)^0.6 has no second derivative at the end: the rule's error is about 1e-6 of a panel's share there.
        tolerance = QUADRATURE if counts[1] else 1e-6
        table = torch.stack([share, 1 - share])
        yield close(f"{name}: (α+n)/(α₀+L) and an integral", probabilities, table, tolerance)


def _inequality(normal: Normal, pairs: int) -> Iterator[Check]:
    """Z13 for random G and D: ‖Ds − Ds′‖ ≤ κ‖Gs − Gs′‖, attained, with κ below the ratio of singular values."""
    for p, c, latents in ((3, 2, 4), (6, 3, 4), (2, 3, 3)):
        name = f"G {p}×{latents}, D {c}×{latents}"
        g = normal(p, latents)
        d = normal(c, latents)
        result = transfer(g, d)
        s = _posteriors(normal, pairs, latents)
        other = _posteriors(normal, pairs, latents)
        ratio = ((s - other) @ d.T).norm(dim=-1) / ((s - other) @ g.T).norm(dim=-1)
        kappa = result.condition_number
        # The Gram matrix of a G that hardly tells two latents apart loses digits by the square of its condition.
        condition = torch.linalg.cond(_on_tangent_space(g)).item()
        tolerance = max(CLOSED_FORM, 16 * torch.finfo(g.dtype).eps * condition**2)
        yield at_most(f"{name}: largest ratio of {pairs} pairs over κ", ratio / kappa, 1 + tolerance)
        yield at_most(f"{name}: κ over its bound by singular values", kappa / result.ratio_bound, 1 + tolerance)
        square, direction = _largest_ratio(g, d)
        yield close(f"{name}: κ² and a generalised eigenvalue", kappa**2, square, tolerance)
        attained = (d @ direction).norm() / (g @ direction).norm()
        yield close(f"{name}: ratio of the worst pair, and κ", attained, kappa, tolerance)
        yield close(f"{name}: the probe and Ds", result.predict(s @ g.T), s @ d.T, tolerance)


def _on_tangent_space(matrix: Tensor) -> Tensor:
    """The matrix in coordinates of the directions e_i − e_k, in which posteriors differ."""
    return matrix[:, :-1] - matrix[:, -1:]


def _largest_ratio(g: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """The largest ‖Dx‖²/‖Gx‖² over differences x of posteriors, a generalised eigenvalue, and an x that attains it."""
    tangent_g = _on_tangent_space(g)
    tangent_d = _on_tangent_space(d)
    root = torch.linalg.cholesky(tangent_g.T @ tangent_g)
    whitened = torch.linalg.solve_triangular(root, tangent_d.T @ tangent_d, upper=False)
    whitened = torch.linalg.solve_triangular(root, whitened.T, upper=False)
    values, vectors = torch.linalg.eigh(whitened)
    coordinates = torch.linalg.solve_triangular(root.T, vectors[:, -1:], upper=True)[:, 0]
    direction = torch.cat([coordinates, -coordinates.sum()[None]])
    # From the uniform posterior to another one that is as far away as half of the way to an edge.
    latents = g.shape[1]
    uniform = torch.full((latents,), 1 / latents, dtype=torch.float64)
    other = uniform + 0.5 / latents * direction / direction.abs().max()
    return values[-1], other - uniform


def _naive(normal: Normal) -> Iterator[Check]:
    """Without Π the number counts directions that no two posteriors differ in."""
    g = normal(4, 4)
    d = normal(3, 4)
    kappa = transfer(g, d, simplex=True).condition_number
    naive = transfer(g, d, simplex=False).condition_number
    tolerance = max(CLOSED_FORM, 64 * torch.finfo(g.dtype).eps * torch.linalg.cond(g).item())
    yield close("naive number and ‖DG⁻¹‖", naive, torch.linalg.matrix_norm(d @ torch.linalg.inv(g), 2), tolerance)
    yield at_most("κ over the naive number", kappa / naive, 1 + tolerance)
    # Large enough for four times κ by the triangle inequality.
    constant = (4 * kappa + naive) / torch.linalg.matrix_norm(torch.ones_like(d) @ torch.linalg.inv(g), 2)
    shifted = transfer(g, d + constant, simplex=False).condition_number
    yield at_least("a constant added to D: the naive number over κ", shifted / kappa, 2.0)
    yield close("a constant added to D: κ", transfer(g, d + constant).condition_number, kappa, tolerance)


def _not_identifiable(normal: Normal, pairs: int) -> Iterator[Check]:
    """No κ where null(GΠ) ⊄ null(DΠ): two latents emit masked tokens alike, so that one Gs has several Ds."""
    g = normal(3, 4)
    d = normal(2, 4)
    g[:, 3] = g[:, 2]
    result = transfer(g, d)
    yield at_least("two latents alike in G: κ", result.condition_number, math.inf)
    s = _posteriors(normal, pairs, 4)
    other = s + 0.5 * torch.minimum(s[:, 2], s[:, 3])[:, None] * torch.tensor([0.0, 0.0, 1.0, -1.0])
    difference = ((s - other) @ g.T).abs()
    yield at_most("two latents alike in G: ‖Gs − Gs′‖ of posteriors that differ there", difference, CLOSED_FORM)
    largest = ((s - other) @ d.T).norm(dim=-1).max() / (d[:, 2] - d[:, 3]).norm()
    yield at_least("two latents alike in G: largest ‖Ds − Ds′‖, by ‖d₃ − d₄‖", largest, 0.05)
    direction = torch.tensor([0.0, 0.0, 1.0, -1.0], dtype=torch.float64) / math.sqrt(2)
    yield close("the lost direction", result.lost[:, 0].abs(), direction.abs())
    d[:, 3] = d[:, 2]
    merged = transfer(g, d)
    yield close("alike in D too: the probe and Ds", merged.predict(s @ g.T), s @ d.T)


def _excess_risk(normal: Normal, count: int) -> Iterator[Check]:
    """The probe's excess risk by its bound κ²·(density ratio)·(excess risk of Gs + error).

    The errors are random, or lie in the direction that κ is attained in, where the bound is attained too.
    """
    g = normal(4, 3)
    d = normal(2, 3)
    s = _posteriors(normal, count, 3)
    result = transfer(g, d)
    kappa = result.condition_number
    # Of the downstream inputs relative to the self-supervised ones.
    density = normal(count).exp()
    density = density / density.mean()
    worst_direction = torch.linalg.svd(result.probe).Vh[0]
    random_error = 0.1 * normal(count, 4)
    worst_error = 0.1 * normal(count, 1) * worst_direction
    for name, error in (("random", random_error), ("the worst", worst_error)):
        upstream = error.square().sum(-1)
        downstream = (result.predict(s @ g.T + error) - s @ d.T).square().sum(-1)
        bound = excess_risk_bound(kappa, upstream.mean().item())
        bound_shifted = excess_risk_bound(kappa, upstream.mean().item(), density.max().item())
        yield at_most(f"{name} errors: downstream excess over its bound", downstream.mean() / bound, 1 + CLOSED_FORM)
        shifted_excess = (density * downstream).mean()
        yield at_most(f"{name} errors, inputs shifted: the same", shifted_excess / bound_shifted, 1 + CLOSED_FORM)
    # The loop's last errors are the worst ones.
    yield at_least("the worst errors: downstream excess over its bound", downstream.mean() / bound, 1 - CLOSED_FORM)
    # All of the error where the shifted inputs are densest: the whole of the density ratio.
    is_densest = density == density.max()
    upstream_at_densest = torch.where(is_densest, upstream, 0.0).mean().item()
    bound_shifted = excess_risk_bound(kappa, upstream_at_densest, density.max().item())
    downstream_at_densest = torch.where(is_densest, downstream, 0.0)
    name = "the worst errors at the densest input alone: downstream excess over its bound"
    yield close(name, (density * downstream_at_densest).mean() / bound_shifted, 1.0)


def _posteriors(normal: Normal, count: int, latents: int) -> Tensor:
    return torch.softmax(2 * normal(count, latents), -1)
