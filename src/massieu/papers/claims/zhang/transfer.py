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
    """All sequences of three tokens: the best table of predictions, entry by entry, from the joint law alone."""
    emission = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5], [0.7, 0.1, 0.2]], dtype=torch.float64)
    prior = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    joint = torch.einsum("z,zi,zj,zk->ijk", prior, emission, emission, emission)
    table = joint / joint.sum(-1, keepdim=True)
    observed = torch.tensor(list(itertools.product(range(3), repeat=2)))
    log_likelihood = emission.log()[:, observed].sum(-1).T
    found = masked_mean(emission.T, log_likelihood, prior.log())
    yield close("four latents: Gs and the best table of predictions", found, table.flatten(0, 1))
    # Any other table is worse by the mean square of its distance: the risk is a quadratic function with that minimum.
    mass = joint.sum(-1).flatten()
    risk = [(joint.flatten(0, 1) * (torch.eye(3) - t[:, None]).square().sum(-1)).sum() for t in (found, found + 0.1)]
    yield close("four latents: excess risk of Gs + 0.1", risk[1] - risk[0], (mass * 3 * 0.01).sum())


def _gaussian_tokens(normal: Normal, sequences: int, length: int = 5, weight: float = 2.0) -> Iterator[Check]:
    """Tokens N(z, 1), z ~ N(m₀, 1/κ₀): least squares of a masked token on functions of the others."""
    mean = torch.tensor([0.7], dtype=torch.float64)
    tokens = mean + normal(sequences, 1, 1) / math.sqrt(weight) + normal(sequences, length + 1, 1)
    observed = tokens[:, :-1]
    masked = tokens[:, -1, 0]
    found = masked_gaussian_mean(observed, mean, weight)[:, 0]
    each = observed[..., 0]
    features = torch.cat([torch.ones(sequences, 1, dtype=torch.float64), each], -1)
    slope = least_squares(features, masked[:, None])[:, 0]
    variance = 1 + 1 / (weight + length)
    error = (variance * torch.linalg.inv(features.T @ features).diagonal()).sqrt()
    expected = torch.tensor([weight * 0.7, *[1.0] * length], dtype=torch.float64) / (weight + length)
    yield close("Gaussian tokens: prediction and (κ₀m₀ + Σx)/(κ₀ + L)", found, features @ expected)
    yield near_in_standard_errors("Gaussian tokens: least squares and κ₀m₀/(κ₀+L), 1/(κ₀+L)", slope, expected, error)
    # The minimiser's residual has no product with any function of the observed tokens, linear or not.
    residual = masked - found
    for name, function in (
        ("1", torch.ones_like(found)),
        ("mean²", each.mean(-1).square()),
        ("largest", each.amax(-1)),
    ):
        yield mean_of_draws(f"Gaussian tokens: E[residual·{name}] and 0", residual * function, 0.0)
    yield mean_of_draws("Gaussian tokens: least risk and 1 + 1/(κ₀+L)", residual.square(), variance)


def _categorical_tokens() -> Iterator[Check]:
    """Two kinds of tokens: E[z | counts] for a Beta prior by quadrature, z = sin²a."""
    concentration = torch.tensor([1.5, 0.8], dtype=torch.float64)
    angle, log_weight = quadrature(0.0, math.pi / 2)
    for counts in ((0.0, 0.0), (3.0, 1.0), (0.0, 6.0)):
        exponent = 2 * (torch.tensor(counts, dtype=torch.float64) + concentration) - 1
        log_density = exponent[0] * angle.sin().log() + exponent[1] * angle.cos().log() + log_weight
        share = log_density.softmax(0) @ angle.sin().square()
        found = masked_token_probabilities(torch.tensor(counts, dtype=torch.float64), concentration)
        name = f"categorical tokens, counts {counts[0]:g} and {counts[1]:g}"
        # (cos a)^0.6 has no second derivative at the end: the rule's error is about 1e-6 of a panel's share there.
        tolerance = QUADRATURE if counts[1] else 1e-6
        yield close(f"{name}: (α+n)/(α₀+L) and an integral", found, torch.stack([share, 1 - share]), tolerance)


def _inequality(normal: Normal, pairs: int) -> Iterator[Check]:
    for p, c, k in ((3, 2, 4), (6, 3, 4), (2, 3, 3)):
        name = f"G {p}×{k}, D {c}×{k}"
        g = normal(p, k)
        d = normal(c, k)
        found = transfer(g, d)
        s = _posteriors(normal, pairs, k)
        other = _posteriors(normal, pairs, k)
        ratio = ((s - other) @ d.T).norm(dim=-1) / ((s - other) @ g.T).norm(dim=-1)
        kappa = found.condition_number
        # In coordinates of the tangent directions e_i − e_k the largest ratio is a generalised eigenvalue.
        left = d[:, :-1] - d[:, -1:]
        right = g[:, :-1] - g[:, -1:]
        # The Gram matrix of a G that hardly tells two latents apart loses digits by the square of its condition.
        tolerance = max(CLOSED_FORM, 16 * torch.finfo(g.dtype).eps * torch.linalg.cond(right).item() ** 2)
        yield at_most(f"{name}: largest ratio of {pairs} pairs over κ", ratio / kappa, 1 + tolerance)
        yield at_most(f"{name}: κ over its bound by singular values", kappa / found.ratio_bound, 1 + tolerance)
        root = torch.linalg.cholesky(right.T @ right)
        whitened = torch.linalg.solve_triangular(root, left.T @ left, upper=False)
        whitened = torch.linalg.solve_triangular(root, whitened.T, upper=False)
        values, vectors = torch.linalg.eigh(whitened)
        yield close(f"{name}: κ² and a generalised eigenvalue", kappa**2, values[-1], tolerance)
        worst = torch.linalg.solve_triangular(root.T, vectors[:, -1:], upper=True)[:, 0]
        move = torch.cat([worst, -worst.sum()[None]])
        first = torch.full((k,), 1 / k, dtype=torch.float64)
        second = first + 0.5 / k * move / move.abs().max()
        attained = (d @ (second - first)).norm() / (g @ (second - first)).norm()
        yield close(f"{name}: ratio of the worst pair, and κ", attained, kappa, tolerance)
        yield close(f"{name}: the probe and Ds", found.predict(s @ g.T), s @ d.T, tolerance)


def _naive(normal: Normal) -> Iterator[Check]:
    """Without Π the number counts directions that no two posteriors differ in."""
    g = normal(4, 4)
    d = normal(3, 4)
    kappa, naive = (transfer(g, d, simplex=simplex).condition_number for simplex in (True, False))
    tolerance = max(CLOSED_FORM, 64 * torch.finfo(g.dtype).eps * torch.linalg.cond(g).item())
    yield close("naive number and ‖DG⁻¹‖", naive, torch.linalg.matrix_norm(d @ torch.linalg.inv(g), 2), tolerance)
    yield at_most("κ over the naive number", kappa / naive, 1 + tolerance)
    # Large enough for four times κ by the triangle inequality.
    constant = (4 * kappa + naive) / torch.linalg.matrix_norm(torch.ones_like(d) @ torch.linalg.inv(g), 2)
    shifted = transfer(g, d + constant, simplex=False).condition_number
    yield at_least("a constant added to D: the naive number over κ", shifted / kappa, 2.0)
    yield close("a constant added to D: κ", transfer(g, d + constant).condition_number, kappa, tolerance)


def _not_identifiable(normal: Normal, pairs: int) -> Iterator[Check]:
    """Masked tokens that two latents emit alike: posteriors with one Gs and several Ds."""
    g = normal(3, 4)
    d = normal(2, 4)
    g[:, 3] = g[:, 2]
    found = transfer(g, d)
    yield at_least("two latents alike in G: κ", found.condition_number, math.inf)
    s = _posteriors(normal, pairs, 4)
    other = s + 0.5 * torch.minimum(s[:, 2], s[:, 3])[:, None] * torch.tensor([0.0, 0.0, 1.0, -1.0])
    yield at_most(
        "two latents alike in G: ‖Gs − Gs′‖ of posteriors that differ there", ((s - other) @ g.T).abs(), CLOSED_FORM
    )
    apart = ((s - other) @ d.T).norm(dim=-1).max() / (d[:, 2] - d[:, 3]).norm()
    yield at_least("two latents alike in G: largest ‖Ds − Ds′‖, by ‖d₃ − d₄‖", apart, 0.05)
    direction = torch.tensor([0.0, 0.0, 1.0, -1.0], dtype=torch.float64) / math.sqrt(2)
    yield close("the lost direction", found.lost[:, 0].abs(), direction.abs())
    d[:, 3] = d[:, 2]
    merged = transfer(g, d)
    yield close("alike in D too: the probe and Ds", merged.predict(s @ g.T), s @ d.T)


def _excess_risk(normal: Normal, count: int) -> Iterator[Check]:
    """Imperfect predictions Gs + error, of random and of the worst kind, on inputs of another density."""
    g = normal(4, 3)
    d = normal(2, 3)
    s = _posteriors(normal, count, 3)
    found = transfer(g, d)
    density = normal(count).exp()
    density = density / density.mean()
    worst = torch.linalg.svd(found.probe).Vh[0]
    for name, error in (("random", 0.1 * normal(count, 4)), ("the worst", 0.1 * normal(count, 1) * worst)):
        guess = s @ g.T + error
        own = error.square().sum(-1)
        squares = (found.predict(guess) - s @ d.T).square().sum(-1)
        plain = excess_risk_bound(found.condition_number, own.mean().item())
        shifted = excess_risk_bound(found.condition_number, own.mean().item(), density.max().item())
        yield at_most(f"{name} errors: downstream excess over its bound", squares.mean() / plain, 1 + CLOSED_FORM)
        yield at_most(f"{name} errors, inputs shifted: the same", (density * squares).mean() / shifted, 1 + CLOSED_FORM)
    yield at_least("the worst errors: downstream excess over its bound", squares.mean() / plain, 1 - CLOSED_FORM)
    # All of the error where the shifted inputs are densest: the whole of the density ratio.
    own = torch.where(density == density.max(), own, 0.0).mean().item()
    shifted = excess_risk_bound(found.condition_number, own, density.max().item())
    squares = torch.where(density == density.max(), squares, 0.0)
    name = "the worst errors at the densest input alone: downstream excess over its bound"
    yield close(name, (density * squares).mean() / shifted, 1.0)


def _posteriors(normal: Normal, count: int, latents: int) -> Tensor:
    return torch.softmax(2 * normal(count, latents), -1)
