"""What is drawn, how probable it is, and where it can lie: sampler, density and support against the derivatives of A.

Five standard errors are allowed; where moments of the draws are compared, the standard errors are the exact ones as well
as those of the draws, since values too rare to be drawn show in the exact one alone.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from massieu.measures.hooks import MissingFormError
from massieu.measures.moments import moments_of_cumulants
from massieu.testing.checks import EXACT, agree, at_most, expand
from massieu.testing.subject import Subject

_ERRORS = 5
_EXPECTED = 25
"""How often a value is expected among the draws whose frequency is compared."""
_FAR = 1e6
"""How far out, in spreads, the mean stands for the end of the support."""


def draws_of(subject: Subject, count: int) -> Tensor | None:
    """Draws (count, *batch, query, *event); None for a measure without a sampler."""
    measure, eta = subject.measure, subject.eta

    def draw(*shape: int) -> Tensor:
        generator = torch.Generator(eta.device).manual_seed(subject.generator.initial_seed())
        return measure.sample(eta, shape, generator=generator)

    try:
        draws = draw(count)
    except MissingFormError:
        return None
    for shape, actual in (((count,), draws), ((2, 3), draw(2, 3)), ((), draw())):
        if actual.shape != (*shape, *eta.shape):
            raise AssertionError(f"samples: got shape {tuple(actual.shape)}, expected {(*shape, *eta.shape)}")
    agree("samples: one seed, one set of draws", eta, draw(2, 3)[0, 0], draw(2, 3)[0, 0], 0.0)
    return draws


def check_samples(subject: Subject, draws: Tensor) -> None:
    """Mean, covariance, third moment and independence."""
    measure, eta, queries, count = subject.measure, subject.eta, subject.queries, len(draws)
    mean, fisher = measure.mean(eta).flatten(queries + 1), subject.fisher(eta)
    deviation = draws.flatten(queries + 2) - mean
    products = deviation.unsqueeze(-1) * deviation.unsqueeze(-2)
    variance = fisher.diagonal(dim1=-2, dim2=-1).clamp_min(0)
    error = torch.maximum(variance.sqrt(), deviation.std(0)) / math.sqrt(count)
    allowed = _ERRORS * error + EXACT * (1 + mean.abs())
    agree("mean of samples", eta, deviation.mean(0), torch.zeros_like(mean), allowed)
    error = torch.maximum(_variance_of_products(subject).sqrt(), products.std(0)) / math.sqrt(count)
    allowed = _ERRORS * error + 1e-6 * (1 + fisher.abs())
    agree("covariance of samples", eta, products.mean(0), fisher, allowed)

    line = subject.direction.flatten(queries + 1)
    cumulants = measure.cumulants(eta, subject.direction, 6)
    moments = moments_of_cumulants(torch.cat([torch.zeros_like(cumulants[..., :1]), cumulants[..., 1:]], -1))
    projected = (deviation * line).sum(-1)
    exact = (moments[..., 5] - moments[..., 2].square()).clamp_min(0).sqrt()
    error = torch.maximum(exact, (projected**3).std(0)) / math.sqrt(count)
    size = 1 + moments[..., 1].clamp_min(0) ** 1.5
    agree("third moment of samples", eta, (projected**3).mean(0), moments[..., 2], _ERRORS * error + 1e-6 * size)

    # Products of independent centred draws average to 0, with the product of the variances.
    spread = torch.maximum(moments[..., 1].clamp_min(0), projected.square().mean(0))
    for name, other in (("draws", projected.roll(1, 0)), ("queries", projected.roll(1, queries + 1))):
        if name == "queries" and eta.shape[queries] == 1:
            continue
        both = spread if name == "draws" else (spread * spread.roll(1, queries)).sqrt()
        allowed = 2 * _ERRORS * both / math.sqrt(count) + EXACT
        law = f"independence of {name}: mean product of neighbouring samples"
        agree(law, eta, (projected * other).mean(0), torch.zeros_like(both), allowed)


def _variance_of_products(subject: Subject) -> Tensor:
    """A bound on Var[(x_i − x̄_i)(x_j − x̄_j)] from the fourth central moments κ_iiii + 3 F_ii² (Cauchy–Schwarz)."""
    fourth = [subject.measure.cumulants(subject.eta, direction, 4) for direction in subject.basis()]
    root = torch.stack([k[..., 3] + 3 * k[..., 1].square() for k in fourth], -1).clamp_min(0).sqrt()
    return root.unsqueeze(-1) * root.unsqueeze(-2)


def has_density(subject: Subject) -> bool:
    try:
        subject.measure.log_prob(subject.eta, subject.eta)
    except MissingFormError:
        return False
    return True


def check_log_prob(subject: Subject, draws: Tensor, oracle: Callable[[Tensor, Tensor], Tensor] | None) -> None:
    """Against the oracle, against A at two points, against KL, and against how often values are drawn."""
    measure, eta, other = subject.measure, subject.eta, subject.swapped
    actual, moved = measure.log_prob(eta, draws), measure.log_prob(other, draws)
    if actual.shape != draws.shape[: draws.ndim - len(measure.event_shape)]:
        raise AssertionError(f"shape of log_prob: got {tuple(actual.shape)} for points of {tuple(draws.shape)}")
    possible = (actual > -torch.inf).to(actual).mean(0)
    agree("log_prob: what is drawn is possible", eta, possible, torch.ones_like(possible), 0.0)
    if oracle is not None:
        expected = oracle(eta, draws)
        _agree_for_draws("log_prob = oracle", subject, actual, expected, EXACT * (1 + expected.abs()))
    start, end = measure.log_partition(eta), measure.log_partition(other)
    tilt = measure._dot(draws, eta - other)
    size = 1 + actual.abs() + moved.abs() + tilt.abs() + start.abs() + end.abs()
    _agree_for_draws(
        "log_prob at two eta: x·(p − q) − A(p) + A(q)", subject, actual - moved, tilt - start + end, EXACT * size
    )
    divergence, count = measure.kl(eta, other), len(draws)
    gain = actual - moved
    # The exact variance of x·(p − q) is the Fisher information's.
    exact = measure._dot(measure.fisher_vp(eta, eta - other), eta - other).clamp_min(0).sqrt()
    error = torch.maximum(exact, gain.std(0)) / math.sqrt(count)
    agree(
        "mean of log_prob(p) − log_prob(q) = KL",
        eta,
        gain.mean(0),
        divergence,
        _ERRORS * error + EXACT * (1 + divergence),
    )
    leaf = eta.clone().requires_grad_()
    first = draws[:1]
    total = measure.log_prob(leaf, first).sum()
    score = torch.autograd.grad(total, leaf)[0] if total.requires_grad else torch.zeros_like(eta)
    expected = first[0] - measure.mean(eta)
    law = "gradient of log_prob in eta = x − mean"
    agree(
        law, eta, score, expected, EXACT * (1 + first[0].abs() + expected.abs()) * (1 + expand(subject.norm(eta), eta))
    )
    if measure._reference == "counting":
        _check_frequencies(subject, draws, actual)
    elif measure._reference == "lebesgue":
        _check_normalisation(subject, draws, actual)


def _agree_for_draws(law: str, subject: Subject, actual: Tensor, expected: Tensor, tolerance: Tensor) -> None:
    """`agree` for (count, *batch, query): at the worst draw of each query."""
    if actual.shape != expected.shape:
        raise AssertionError(f"{law}: got shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    excess = torch.where(actual == expected, 0.0, (actual - expected).abs() / tolerance)
    worst = excess.nan_to_num(nan=torch.inf).argmax(0, keepdim=True)
    actual, expected, tolerance = (x.gather(0, worst).squeeze(0) for x in (actual, expected, tolerance))
    agree(law, subject.eta, actual, expected, tolerance)


def _check_frequencies(subject: Subject, draws: Tensor, log_prob: Tensor) -> None:
    """A law on separate values: each is drawn as often as it is probable, and the probabilities add up to at most one."""
    count, queries = len(draws), subject.queries
    lead = subject.eta.shape[: queries + 1]
    flat, columns = draws.reshape(count, lead.numel(), -1), log_prob.reshape(count, -1)
    total, gap, allowed = (torch.zeros(lead.numel(), dtype=torch.float64, device=draws.device) for _ in range(3))
    for i in range(lead.numel()):
        # Draws of one value may differ by rounding, which its probability does not show.
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
    at_most(
        "probabilities of what is drawn add up to at most 1",
        subject.eta,
        total.reshape(lead),
        torch.ones(()).to(total),
        1e-6,
    )
    zero = torch.zeros_like(gap.reshape(lead))
    agree("frequency of a drawn value = its probability", subject.eta, gap.reshape(lead), zero, allowed.reshape(lead))


def _check_normalisation(subject: Subject, draws: Tensor, log_prob: Tensor) -> None:
    """E_p[q/(p + q)] = E_q[p/(p + q)] for a normal q of p's mean and covariance: no weight is above one.

    Holds of a density p and its own draws alone (Meng and Wong 1996). A p that lies in a subspace is left out.
    """
    eta, count, event = subject.eta, len(draws), subject.measure.event_shape
    fisher = subject.fisher(eta)
    eigenvalues = torch.linalg.eigvalsh(fisher)
    if bool((eigenvalues[..., 0] <= EXACT * eigenvalues[..., -1]).any()):
        return
    mean = subject.measure.mean(eta).flatten(subject.queries + 1)
    for width in (1.0, 0.25):
        normal = torch.distributions.MultivariateNormal(mean, covariance_matrix=width * fisher)
        noise = torch.randn(draws.flatten(subject.queries + 2).shape, dtype=torch.float64, generator=subject.generator)
        points = mean + (normal.scale_tril @ noise.to(mean.device).unsqueeze(-1)).squeeze(-1)
        own = torch.sigmoid(normal.log_prob(draws.flatten(subject.queries + 2)) - log_prob)
        ours = subject.measure.log_prob(eta, points.reshape(*points.shape[:-1], *event))
        other = torch.sigmoid(ours - normal.log_prob(points))
        error = (own.var(0) + other.var(0)).sqrt() / math.sqrt(count)
        allowed = _ERRORS * error + 1.0 / count
        agree("log_prob is the normalised density of the samples", eta, own.mean(0), other.mean(0), allowed)


def check_support(subject: Subject, draws: Tensor | None) -> bool:
    """The support function: above means and draws, sublinear, and reached far out. False where it is not known."""
    measure, eta, direction = subject.measure, subject.eta, subject.direction
    bound = measure._support(direction)
    if bound is None:
        return False
    for points in (eta, subject.far):
        line = direction.narrow(subject.queries, 0, 1).expand(points.shape)
        known = measure._support(line)
        assert known is not None
        reached = measure._dot(measure.mean(points), line)
        at_most("mean·v ≤ support(v)", points, reached, known, EXACT * (1 + reached.abs()))
    if draws is not None:
        reached = measure._dot(draws, direction).amax(0)
        at_most("samples·v ≤ support(v)", eta, reached, bound, EXACT * (1 + reached.abs()))
    other = direction.roll(1, subject.queries)
    double, shifted, joint = (measure._support(v) for v in (2 * direction, other, direction + other))
    assert double is not None and shifted is not None and joint is not None
    agree("support(2v) = 2 support(v)", eta, double, 2 * bound, EXACT * (1 + bound.abs()))
    at_most("support(v + w) ≤ support(v) + support(w)", eta, joint, bound + shifted, EXACT * (1 + joint.abs()))

    distance = _FAR / subject.trace(eta).sqrt().clamp_min(EXACT)
    points = eta + distance.reshape(*distance.shape, *[1] * len(measure.event_shape)) * direction
    inside = measure._in_domain(points)
    held = bound.isfinite() if inside is None else bound.isfinite() & inside
    held_points = torch.where(held.reshape(*held.shape, *[1] * len(measure.event_shape)), points, eta)
    reached = measure._dot(measure.mean(held_points), direction)
    size = 1e-3 * (subject.trace(eta).sqrt() + (bound - measure._dot(measure.mean(eta), direction)).abs()) + EXACT * (
        1 + bound.abs()
    )
    reached, bound = (torch.where(held, number, 0.0) for number in (reached, bound))
    agree("support(v) = mean·v far out along v", held_points, reached, bound, size)
    return True
