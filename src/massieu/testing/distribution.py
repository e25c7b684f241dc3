"""Sampler, density and support, compared with the derivatives of A.

Five standard errors are allowed. For moments of the draws the standard error is the larger of the exact one and that of the
draws, since values too rare to be drawn enter the exact one alone.
"""

import math

import torch
from torch import Tensor

from massieu.measures.base import Measure
from massieu.measures.moments import moments_of_cumulants
from massieu.testing.checks import EXACT, agree, at_most, expand
from massieu.testing.subject import Subject

_ERRORS = 5
"""Standard errors that are allowed."""
_EXPECTED = 25
"""The frequency of a value is compared if it is expected at least this often among the draws."""
_FAR = 1e6
"""At this many standard deviations the mean counts as the end of the support."""


def check_draws(subject: Subject) -> None:
    """Draws have the requested shape, and one seed gives the same draws again."""
    eta = subject.eta
    for shape, actual in (((len(subject.draws),), subject.draws), ((2, 3), subject.draw(2, 3)), ((), subject.draw())):
        if actual.shape != (*shape, *eta.shape):
            raise AssertionError(f"samples: got shape {tuple(actual.shape)}, expected {(*shape, *eta.shape)}")
    agree("samples: one seed, one set of draws", eta, subject.draw(2, 3)[0, 0], subject.draw(2, 3)[0, 0], 0.0)


def _deviation(subject: Subject) -> Tensor:
    mean = subject.measure.mean(subject.eta)
    return (subject.draws - mean).flatten(subject.queries + 2)


def check_samples(subject: Subject) -> None:
    """Mean, covariance and third moment of the draws are those of the law."""
    eta = subject.eta
    count = len(subject.draws)
    deviation = _deviation(subject)
    mean = subject.measure.mean(eta).flatten(subject.queries + 1)
    fisher = subject.fisher(eta)
    products = deviation.unsqueeze(-1) * deviation.unsqueeze(-2)
    variance = fisher.diagonal(dim1=-2, dim2=-1).clamp_min(0)
    error = torch.maximum(variance.sqrt(), deviation.std(0)) / math.sqrt(count)
    allowed = _ERRORS * error + EXACT * (1 + mean.abs())
    agree("mean of samples", eta, deviation.mean(0), torch.zeros_like(mean), allowed)
    error = torch.maximum(_variance_of_products(subject).sqrt(), products.std(0)) / math.sqrt(count)
    allowed = _ERRORS * error + 1e-6 * (1 + fisher.abs())
    agree("covariance of samples", eta, products.mean(0), fisher, allowed)

    cumulants = subject.measure.cumulants(eta, subject.direction, 6)
    moments = moments_of_cumulants(torch.cat([torch.zeros_like(cumulants[..., :1]), cumulants[..., 1:]], -1))
    projected = (deviation * subject.direction.flatten(subject.queries + 1)).sum(-1)
    exact = (moments[..., 5] - moments[..., 2].square()).clamp_min(0).sqrt()
    error = torch.maximum(exact, (projected**3).std(0)) / math.sqrt(count)
    size = 1 + moments[..., 1].clamp_min(0) ** 1.5
    agree("third moment of samples", eta, (projected**3).mean(0), moments[..., 2], _ERRORS * error + 1e-6 * size)


def check_independence(subject: Subject) -> None:
    """The product of two independent centred draws has mean 0, and as its variance the product of theirs."""
    eta = subject.eta
    queries = subject.queries
    direction = subject.direction
    projected = (_deviation(subject) * direction.flatten(queries + 1)).sum(-1)
    variance = subject.measure._dot(subject.measure.fisher_vp(eta, direction), direction).clamp_min(0)
    spread = torch.maximum(variance, projected.square().mean(0))
    for name, other in (("draws", projected.roll(1, 0)), ("queries", projected.roll(1, queries + 1))):
        if name == "queries" and eta.shape[queries] == 1:
            continue
        both = spread if name == "draws" else (spread * spread.roll(1, queries)).sqrt()
        allowed = 2 * _ERRORS * both / math.sqrt(len(projected)) + EXACT
        law = f"independence of {name}: mean product of neighbouring samples"
        agree(law, eta, (projected * other).mean(0), torch.zeros_like(both), allowed)


def _variance_of_products(subject: Subject) -> Tensor:
    """A bound on Var[(x_i − x̄_i)(x_j − x̄_j)] from the fourth central moments κ_iiii + 3 F_ii² (Cauchy–Schwarz)."""
    fourth = [subject.measure.cumulants(subject.eta, direction, 4) for direction in subject.basis()]
    root = torch.stack([k[..., 3] + 3 * k[..., 1].square() for k in fourth], -1).clamp_min(0).sqrt()
    return root.unsqueeze(-1) * root.unsqueeze(-2)


def check_possible(subject: Subject) -> None:
    """Each draw has a finite log_prob: drawn in double precision, drawn in single precision, and rounded to bfloat16."""
    single = subject.measure.to(torch.float32)
    count = min(50, len(subject.draws))
    eta = subject.kept(single, subject.eta.float())
    draws = single.sample(eta, count, generator=torch.Generator(eta.device).manual_seed(subject.case.seed))
    rounded = {"float32": single.log_prob(eta, draws), "bfloat16": single.log_prob(eta, draws.bfloat16())}
    for name, log_prob in {"float64": subject.log_probs, **rounded}.items():
        possible = log_prob.isfinite().double().mean(0)
        at = subject.eta if name == "float64" else eta
        agree(f"log_prob: what is drawn is possible, rounded to {name}", at, possible, torch.ones_like(possible), 0.0)


def check_log_prob_oracle(subject: Subject) -> None:
    oracle = subject.case.log_prob
    assert oracle is not None
    expected = oracle(subject.eta, subject.draws)
    _agree_for_draws("log_prob = oracle", subject, subject.log_probs, expected, EXACT * (1 + expected.abs()))


def check_log_prob(subject: Subject) -> None:
    """log_prob agrees with A at two points and with KL, and has the right gradient in eta."""
    measure = subject.measure
    eta = subject.eta
    other = subject.swapped
    draws = subject.draws
    actual = subject.log_probs
    moved = measure.log_prob(other, draws)
    if actual.shape != draws.shape[: draws.ndim - len(measure.event_shape)]:
        raise AssertionError(f"shape of log_prob: got {tuple(actual.shape)} for points of {tuple(draws.shape)}")
    start = measure.log_partition(eta)
    end = measure.log_partition(other)
    tilt = measure._dot(draws, eta - other)
    size = 1 + actual.abs() + moved.abs() + tilt.abs() + start.abs() + end.abs()
    _agree_for_draws(
        "log_prob at two eta: x·(p − q) − A(p) + A(q)", subject, actual - moved, tilt - start + end, EXACT * size
    )
    divergence = measure.kl(eta, other)
    gain = actual - moved
    # The exact variance of x·(p − q) is (p − q)ᵀ F (p − q).
    exact = measure._dot(measure.fisher_vp(eta, eta - other), eta - other).clamp_min(0).sqrt()
    error = torch.maximum(exact, gain.std(0)) / math.sqrt(len(draws))
    allowed = _ERRORS * error + EXACT * (1 + divergence)
    agree("mean of log_prob(p) − log_prob(q) = KL", eta, gain.mean(0), divergence, allowed)
    leaf = eta.clone().requires_grad_()
    first = draws[:1]
    total = measure.log_prob(leaf, first).sum()
    score = torch.autograd.grad(total, leaf)[0] if total.requires_grad else torch.zeros_like(eta)
    expected = first[0] - measure.mean(eta)
    allowed = EXACT * (1 + first[0].abs() + expected.abs()) * (1 + expand(subject.norm(eta), eta))
    agree("gradient of log_prob in eta = x − mean", eta, score, expected, allowed)


def _agree_for_draws(law: str, subject: Subject, actual: Tensor, expected: Tensor, tolerance: Tensor) -> None:
    """`agree` for numbers (count, *batch, query) of all draws, at the worst draw of each query."""
    if actual.shape != expected.shape:
        raise AssertionError(f"{law}: got shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    excess = torch.where(actual == expected, 0.0, (actual - expected).abs() / tolerance)
    worst = excess.nan_to_num(nan=torch.inf).argmax(0, keepdim=True)
    actual, expected, tolerance = (x.gather(0, worst).squeeze(0) for x in (actual, expected, tolerance))
    agree(law, subject.eta, actual, expected, tolerance)


def check_frequencies(subject: Subject) -> None:
    """For a law on separate values: frequencies are the probabilities, which add up to at most one."""
    draws = subject.draws
    lead = subject.lead
    count = len(subject.draws)
    flat = draws.reshape(count, lead.numel(), -1)
    columns = subject.log_probs.reshape(count, -1)
    total, gap, allowed = (torch.zeros(lead.numel(), dtype=torch.float64, device=draws.device) for _ in range(3))
    for i in range(lead.numel()):
        # Draws of one value may differ by rounding, so values are told apart in float32.
        values, index = flat[:, i].float().unique(dim=0, return_inverse=True)
        probability = torch.zeros(len(values), dtype=torch.float64, device=draws.device)
        probability[index] = columns[:, i].exp()
        frequency = torch.bincount(index, minlength=len(values)) / count
        total[i] = probability.sum()
        error = (probability * (1 - probability).clamp_min(0) / count).sqrt()
        likely = probability * count >= _EXPECTED
        excess = torch.where(likely, (frequency - probability).abs() / (_ERRORS * error + EXACT), 0.0)
        worst = excess.argmax()
        gap[i] = torch.where(likely, frequency - probability, 0.0)[worst]
        allowed[i] = _ERRORS * error[worst] + EXACT
    total, gap, allowed = (number.reshape(lead) for number in (total, gap, allowed))
    at_most("probabilities of what is drawn add up to at most 1", subject.eta, total, torch.ones_like(total), 1e-6)
    agree("frequency of a drawn value = its probability", subject.eta, gap, torch.zeros_like(gap), allowed)


def check_normalisation(subject: Subject) -> None:
    """E_p[q/(p + q)] = E_q[p/(p + q)] for a normal q with p's mean and covariance.

    This holds only if p is the normalised density of its draws (bridge sampling, Meng and Wong 1996); no weight exceeds one,
    so that the means have finite variance. A p that lies in a subspace is left out.
    """
    eta = subject.eta
    fisher = subject.fisher(subject.eta)
    eigenvalues = torch.linalg.eigvalsh(fisher)
    if bool((eigenvalues[..., 0] <= EXACT * eigenvalues[..., -1]).any()):
        return
    mean = subject.measure.mean(eta).flatten(subject.queries + 1)
    draws = subject.draws.flatten(subject.queries + 2)
    for width in (1.0, 0.25):
        normal = torch.distributions.MultivariateNormal(mean, covariance_matrix=width * fisher)
        points = mean + (normal.scale_tril @ subject.noise(draws).unsqueeze(-1)).squeeze(-1)
        # q/(p + q) = σ(log q − log p) at draws of p, and p/(p + q) at draws of q.
        over_p = torch.sigmoid(normal.log_prob(draws) - subject.log_probs)
        log_prob = subject.measure.log_prob(eta, points.reshape(subject.draws.shape))
        over_q = torch.sigmoid(log_prob - normal.log_prob(points))
        error = (over_p.var(0) + over_q.var(0)).sqrt() / math.sqrt(len(draws))
        allowed = _ERRORS * error + 1.0 / len(draws)
        agree("log_prob is the normalised density of the samples", eta, over_p.mean(0), over_q.mean(0), allowed)


def check_support(subject: Subject) -> None:
    """The support function bounds the means, is sublinear, and is the limit of means far out."""
    measure = subject.measure
    eta = subject.eta
    direction = subject.direction
    for points in (eta, subject.far):
        line = direction.narrow(subject.queries, 0, 1).expand(points.shape)
        reached = measure._dot(measure.mean(points), line)
        at_most("mean·v ≤ support(v)", points, reached, _support(measure, line), EXACT * (1 + reached.abs()))
    other = direction.roll(1, subject.queries)
    bound, double, shifted, joint = (_support(measure, v) for v in (direction, 2 * direction, other, direction + other))
    if len(measure.event_shape) == 1:
        _check_range(measure)
    agree("support(2v) = 2 support(v)", eta, double, 2 * bound, EXACT * (1 + bound.abs()))
    at_most("support(v + w) ≤ support(v) + support(w)", eta, joint, bound + shifted, EXACT * (1 + joint.abs()))

    spread = subject.trace(eta).sqrt()
    points = eta + expand(_FAR / spread.clamp_min(EXACT), eta) * direction
    inside = measure._in_domain(points)
    is_bounded = bound.isfinite() if inside is None else bound.isfinite() & inside
    points = torch.where(expand(is_bounded, points), points, eta)
    reached = measure._dot(measure.mean(points), direction)
    gap = (bound - measure._dot(measure.mean(eta), direction)).abs()
    allowed = 1e-3 * (spread + gap) + EXACT * (1 + bound.abs())
    reached, bound = (torch.where(is_bounded, number, 0.0) for number in (reached, bound))
    agree("support(v) = mean·v far out along v", points, reached, bound, allowed)


def _check_range(measure: Measure) -> None:
    bounds = measure._range()
    assert bounds is not None
    axes = torch.eye(measure.event_shape[0], dtype=bounds[0].dtype, device=bounds[0].device)
    axes = axes.expand(*measure.batch_shape, *axes.shape)
    for name, bound, reached in zip(
        ("least", "greatest"), bounds, (-_support(measure, -axes), _support(measure, axes)), strict=True
    ):
        agree(f"{name} value of a coordinate", axes, bound, reached, EXACT * (1 + reached.abs()))


def check_support_of_samples(subject: Subject) -> None:
    bound = _support(subject.measure, subject.direction)
    reached = subject.measure._dot(subject.draws, subject.direction).amax(0)
    at_most("samples·v ≤ support(v)", subject.eta, reached, bound, EXACT * (1 + reached.abs()))


def _support(measure: Measure, direction: Tensor) -> Tensor:
    bound = measure._support(direction)
    assert bound is not None
    return bound
