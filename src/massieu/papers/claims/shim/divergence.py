"""S7: KL divergence as Bregman divergence."""

from collections.abc import Iterator

from torch import Tensor

from massieu.measures import Measure
from massieu.papers.claims.claim import CLOSED_FORM, QUADRATURE, SHIM, Check, as_published, close
from massieu.papers.claims.inputs import check_at_least, normal_draws
from massieu.papers.claims.registry import claim
from massieu.papers.claims.shim.catalogue import Member, library


@claim(
    "S7",
    title="Bregman divergence and KL divergence",
    statement="KL is the Bregman divergence with its arguments swapped: B_A(η₁, η₂) = KL(p_{η₂} ‖ p_{η₁}) "
    "and B_{A*}(ū₁, ū₂) = KL(p_{η₁} ‖ p_{η₂}).",
    source=f"{SHIM}, §3.2, text before eq. (6)",
    status="quoted",
    published="B_G(η₁, η₂) = KL(p(x|η₁) ‖ p(x|η₂)).",
    corrected="The arguments of the KL divergence must be swapped.",
)
def bregman_is_kl(draws: int = 20, seed: int = 0) -> Iterator[Check]:
    check_at_least(2, draws=draws)
    for member in library(normal_draws(seed), draws):
        yield from _both_divergences(member)
        yield from _three_points(member)


def _both_divergences(member: Member) -> Iterator[Check]:
    """B_A, B_A* and the library's KL, against sums over the points of the measure."""
    name = member.name
    measure = member.measure
    first = member.eta
    second = first.roll(1, 0)
    tolerance = QUADRATURE
    if isinstance(member.log_volume, float):
        # A sum over atoms is exact, one over a quadrature's nodes is not.
        tolerance = CLOSED_FORM
    bregman = _bregman(measure, first, second)
    dual_bregman = _dual_bregman(measure, first, second)
    forward_kl = _kl(member, first, second)
    reverse_kl = _kl(member, second, first)
    yield close(f"{name}: B_A(η₁, η₂) and KL(p₂ ‖ p₁)", bregman, reverse_kl, tolerance)
    yield close(f"{name}: B_A*(ū₁, ū₂) and KL(p₁ ‖ p₂)", dual_bregman, forward_kl, tolerance)
    yield close(f"{name}: kl(η₁, η₂) and KL(p₁ ‖ p₂)", measure.kl(first, second), forward_kl, tolerance)
    if name == "atoms":
        yield as_published(close(f"{name}: B_A(η₁, η₂) and KL(p₁ ‖ p₂)", bregman, forward_kl, tolerance))


def _three_points(member: Member) -> Iterator[Check]:
    """The three-point identity of a Bregman divergence."""
    measure = member.measure
    a = member.eta
    b = a.roll(1, 0)
    c = a.flip(0)
    change_of_mean = measure.mean(c) - measure.mean(b)
    expected = _bregman(measure, a, b) + _bregman(measure, b, c) - (change_of_mean * (a - b)).sum(-1)
    name = f"{member.name}: B(a, c) and B(a, b) + B(b, c) − (∇A(c) − ∇A(b))·(a − b)"
    yield close(name, _bregman(measure, a, c), expected)


def _kl(member: Member, eta_p: Tensor, eta_q: Tensor) -> Tensor:
    """Σ p log(p/q) over the measure's points."""
    log_p = member.log_share(eta_p)
    log_q = member.log_share(eta_q)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def _bregman(measure: Measure, first: Tensor, second: Tensor) -> Tensor:
    """A(η₁) − A(η₂) − ∇A(η₂)·(η₁ − η₂)."""
    slope = (measure.mean(second) * (first - second)).sum(-1)
    return measure.log_partition(first) - measure.log_partition(second) - slope


def _dual_bregman(measure: Measure, first: Tensor, second: Tensor) -> Tensor:
    """A*(ū₁) − A*(ū₂) − η₂·(ū₁ − ū₂), where A* is minus the entropy."""
    slope = (second * (measure.mean(first) - measure.mean(second))).sum(-1)
    return measure.entropy(second) - measure.entropy(first) - slope
