"""B2, B3: hidden units integrated out, and the cumulants of their priors."""

import math
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from massieu.measures import Bernoulli, Categorical, DomainError, Spin, affine, product
from massieu.papers.claims.bal.priors import Prior, one, priors
from massieu.papers.claims.claim import (
    BAL,
    GRADIENT_BY_DIFFERENCES,
    QUADRATURE,
    Check,
    all_raise,
    as_published,
    at_least,
    at_most,
    close,
)
from massieu.papers.claims.inputs import Normal, normal_draws
from massieu.papers.claims.oracles import differences, spin_states
from massieu.papers.claims.registry import claim

_INSIDE = 0.7
"""Where truncated series are tried within their radius, in units of it."""
_OUTSIDE = 1.3
"""The same beyond it."""

_ORDERS = 60
"""How many terms of a series are tried."""


# --- B2 --------------------------------------------------------------------------------------------------------------


@claim(
    "B2",
    title="Integrating out hidden units",
    statement="Integrating out hidden units with priors e^{b(h)}ν(dh)/c leaves E(v) = −Σ aᵢ(vᵢ) − Σ [log c_μ + "
    "K_μ(t_μ)], t = Wᵀv, where t lies in the domains of the K_μ. The series K(t) = Σ κₙtⁿ/n! converges up to the "
    "nearest singularity of K.",
    source=f"{BAL}, §2.3",
    status="quoted",
    published="E(v) = −Σ aᵢ(vᵢ) − Σ K_μ(t_μ) (§2.3). Up to a constant, which the normaliser of p(v) takes in, that is true; "
    "as an equality with −log ∫ e^{−E(v, h)} dh, which defines E(v) there, −Σ log c_μ is missing.",
    standing="ambiguous",
    corrected="−Σ log c_μ, which likelihoods under a joint normaliser need, and the domains and the radii of the series: "
    "√(log²((1 − p)/p) + π²) for Bernoulli, π/2 for spins, λ, 1/b, 1/θ for exponential, Laplace, gamma, none for the "
    "others; with real visible units a Poisson unit is never normalisable.",
)
def hidden_units_integrated_out(draws: int = 20, seed: int = 0) -> Iterator[Check]:
    normal = normal_draws(seed)
    laws = priors(normal)
    for prior in laws:
        t = prior.reach * torch.tanh(normal(draws))
        log_partition = prior.measure.log_partition(t.unsqueeze(-1))
        name = f"{prior.name}: log ∫ e^(b + th) ν(dh) and log c + K(t)"
        yield close(name, prior.log_integral(t), prior.log_constant + log_partition, QUADRATURE)
    yield from _layer(normal, laws, draws)
    yield from _machine(normal)
    for prior in laws:
        if prior.poles:
            yield from _radius(prior)
        else:
            yield _entire_series(prior)
    poisson = next(prior for prior in laws if prior.name == "Poisson")
    yield from _poisson_never_normalises(normal, poisson)


def _layer(normal: Normal, laws: list[Prior], draws: int) -> Iterator[Check]:
    """A layer with one unit of each kind over Gaussian visible units, a(v) = −½v²."""
    visible = 3
    reach = torch.tensor([prior.reach for prior in laws], dtype=torch.float64)
    # For ‖v‖ ≤ 1 every t stays inside its domain.
    weight = reach * F.normalize(normal(visible, len(laws)), dim=0)
    state = F.normalize(normal(draws, visible)) * torch.tanh(normal(draws, 1))
    field = state @ weight
    integrals = sum(prior.log_integral(field[:, index]) for index, prior in enumerate(laws))
    energy = 0.5 * state.square().sum(-1) - integrals
    effective = affine(product(*(prior.measure for prior in laws)), weight)
    # The energy as published, without Σ log c.
    published = 0.5 * state.square().sum(-1) - effective.log_partition(state)
    constants = sum(prior.log_constant for prior in laws)
    yield close("one unit of each kind: E(v) and −log of the integral", published - constants, energy, QUADRATURE)
    yield as_published(close("one unit of each kind: E(v) without log c", published, energy, QUADRATURE))
    yield close("what is missing there, and Σ log c", published - energy, constants, QUADRATURE)
    exponential = next(index for index, prior in enumerate(laws) if prior.name == "exponential")
    beyond = 2 * laws[exponential].top * weight[:, exponential] / weight[:, exponential].square().sum()
    yield all_raise("one t beyond its domain: no energy", DomainError, lambda: effective.log_partition(beyond))


def _machine(normal: Normal) -> Iterator[Check]:
    """Visible spins, hidden bits and spins: −E(v) and log p(v), with Σ log c and without, by a sum over every joint state."""
    bits = 3
    spins = 2
    visible = spin_states(4)
    weight = normal(visible.shape[-1], bits + spins)
    bias = normal(bits)
    field = normal(spins)
    signs = spin_states(bits + spins)
    hidden = torch.cat([(1 + signs[:, :bits]) / 2, signs[:, bits:]], -1)
    # −E(v, h), (visible states, hidden states).
    joint = visible @ weight @ hidden.T + hidden @ torch.cat([bias, field])
    effective = affine(product(Bernoulli.create(torch.sigmoid(bias)), Spin.create(field)), weight)
    cumulant_sum = effective.log_partition(visible)
    constant = (1 + bias.exp()).log().sum() + (2 * field.cosh()).log().sum()
    minus_energy = constant + cumulant_sum
    yield close("bits and spins: −E(v) and the joint sum over h", minus_energy, joint.logsumexp(-1))
    log_z = joint.logsumexp((0, 1))
    log_p = joint.logsumexp(-1) - log_z
    yield close("bits and spins: log p(v) and −E(v) − log Z", minus_energy - log_z, log_p)
    normalised = cumulant_sum - cumulant_sum.logsumexp(0)
    yield close("bits and spins: log p(v) from E(v) up to a constant", normalised, log_p)


def _entire_series(prior: Prior) -> Check:
    """Where K has no singularity its series converges everywhere."""
    # Cauchy's circle lies outside ±3.
    scale = 4.0
    t = torch.tensor([-0.75, 0.75], dtype=torch.float64)
    series = _partial_sums(_scaled_cumulants(prior, scale), t)[:, -1]
    log_partition = prior.measure.log_partition(scale * t.unsqueeze(-1))
    return close(f"{prior.name}: {_ORDERS} terms of the series at ±3, and K", series, log_partition)


def _radius(prior: Prior) -> Iterator[Check]:
    """The series converges up to the nearest singularity of K, and no farther.

    κₙRⁿ/(n − 1)! → −Σ ρ(R/t)ⁿ over the poles t of K′ at the distance R, with residues ρ.
    """
    radius = prior.radius
    scaled = _scaled_cumulants(prior, radius)
    order = _orders(_ORDERS)
    places = torch.tensor([place for place, _ in prior.poles], dtype=torch.complex128)
    residues = torch.tensor([residue for _, residue in prior.poles], dtype=torch.float64)
    limit = -(residues * ((radius / places) ** order.unsqueeze(-1)).real).sum(-1)
    late = slice(_ORDERS // 2, None)
    # The next poles of a Bernoulli prior or a spin are 2.7 times as far away or more: 2.7^−30 < 1e-12.
    yield close(f"{prior.name}: κₙRⁿ/(n − 1)! and its limit, n > {_ORDERS // 2}", scaled[late], limit[late])

    error = _truncation(prior, scaled, -_INSIDE, _INSIDE)
    largest = max(scaled.abs().max().item(), residues.abs().sum().item())
    tail = largest * _INSIDE ** (order + 1) / ((order + 1) * (1 - _INSIDE))
    # Later the tail is no larger than rounding.
    early = slice(0, 40)
    yield at_most(f"{prior.name}: error of the series at 0.7 R, by its tail", (error / tail)[:, early], 1.0)
    yield at_most(f"{prior.name}: error at 0.7 R, orders 41–60 by orders 1–20", _growth(error), 1.0)
    yield from _outside(prior, scaled)


def _outside(prior: Prior, scaled: Tensor) -> Iterator[Check]:
    """Where K goes on beyond the radius the series leaves it; elsewhere there is no K."""
    if math.isfinite(prior.top):
        ends = [prior.top, 1.2 * prior.top]
        if prior.two_sided:
            ends += [-prior.top, -1.2 * prior.top]
        calls = [partial(prior.measure.log_partition, one(end)) for end in ends]
        yield all_raise(f"{prior.name}: no K(t) at the end of the domain and beyond", DomainError, *calls)
    if prior.two_sided:
        sums = _partial_sums(scaled, torch.tensor([-_OUTSIDE, _OUTSIDE], dtype=torch.float64)).abs()
        yield at_least(f"{prior.name}: series at 1.3 R, orders 41–60 by orders 1–20", _growth(sums), 1.0)
    else:
        places = [-_OUTSIDE]
        if not math.isfinite(prior.top):
            places.append(_OUTSIDE)
        error = _truncation(prior, scaled, *places)
        yield at_least(f"{prior.name}: error at 1.3 R, orders 41–60 by orders 1–20", _growth(error), 1.0)


def _truncation(prior: Prior, scaled: Tensor, *places: float) -> Float[Tensor, "places order"]:
    """|series up to each order − K| at places given in units of the radius."""
    t = torch.tensor(places, dtype=torch.float64)
    log_partition = prior.measure.log_partition(prior.radius * t.unsqueeze(-1))
    return (_partial_sums(scaled, t) - log_partition.unsqueeze(-1)).abs()


def _growth(error: Float[Tensor, "places order"]) -> Float[Tensor, "places"]:
    """The largest error of the last twenty orders by the largest of the first twenty."""
    return error[:, -20:].amax(-1) / error[:, :20].amax(-1)


def _scaled_cumulants(prior: Prior, radius: float) -> Float[Tensor, "order"]:
    """κₙRⁿ/(n − 1)!, n = 1 … 60: the Taylor coefficients of R·K′(Rt), by Cauchy's integral over |t| = 0.9."""
    nodes = 1024
    circle = 0.9
    angle = 2j * math.pi * torch.arange(nodes, dtype=torch.float64) / nodes
    values = radius * prior.slope(radius * circle * torch.exp(angle))
    # The trapezoidal rule on the circle is a Fourier transform.
    coefficients = torch.fft.fft(values)[:_ORDERS].real / nodes
    return coefficients / circle ** (_orders(_ORDERS) - 1)


def _orders(last: int) -> Float[Tensor, "last"]:
    return torch.arange(1, last + 1, dtype=torch.float64)


def _partial_sums(scaled: Tensor, t: Float[Tensor, "draws"]) -> Float[Tensor, "draws order"]:
    """Σ κₘ(Rt)ᵐ/m! up to each order."""
    order = _orders(len(scaled))
    return (scaled / order * t.unsqueeze(-1) ** order).cumsum(-1)


def _poisson_never_normalises(normal: Normal, poisson: Prior) -> Iterator[Check]:
    """With real visible units e^{−E} has no integral: at wv = 25, λ(e^{wv} − 1) > 5e10 stands against ½v² ≤ ½·250²."""
    slope = normal(10)
    weight = torch.where(slope < 0, -1.0, 1.0).double() * slope.abs().clamp_min(0.1)
    visible = 25 / weight
    exponent = poisson.measure.log_partition((weight * visible).unsqueeze(-1)) - 0.5 * visible.square()
    yield at_least("Poisson unit, Gaussian v: log e^(−E) at wv = 25", exponent, 1e9)


# --- B3 --------------------------------------------------------------------------------------------------------------


@claim(
    "B3",
    title="Cumulant generating functions",
    statement="The cumulants of the priors have the closed forms of the table: (n − 1)!/λⁿ for an exponential, "
    "k(n − 1)!θⁿ for a gamma, 2(n − 1)!bⁿ for even n and 0 for odd n for a Laplace law.",
    source=f"closed forms; the growth by {BAL}, §2.3",
    status="derived",
    published="“Exponential or Laplacian distributions where κ⁽ⁿ⁾ ~ (n − 1)! seems to lead to funky logarithmic interactions” "
    "(§2.3). As growth that is true, of Laplace laws for even n; as an equality it is not.",
    standing="ambiguous",
    corrected="Those of a Laplace law vanish for odd n and have a factor 2 for even n. The categorical prior, from "
    "which attention comes, is a row of the table too.",
)
def cumulants_of_the_priors(draws: int = 20, seed: int = 0) -> Iterator[Check]:
    normal = normal_draws(seed)
    order = _orders(6)
    factorial = torch.lgamma(order).exp()
    for prior in priors(normal):
        t = prior.reach * torch.tanh(normal(draws))
        closed = prior.log_mean_exp(t)
        log_partition = prior.measure.log_partition(t.unsqueeze(-1))
        yield close(f"{prior.name}: A(t) and K(t)", log_partition, closed)
        summed = prior.log_integral(t) - prior.log_integral(torch.zeros_like(t))
        yield close(f"{prior.name}: A(t) and log E e^(th) by summation", log_partition, summed, QUADRATURE)
        cumulants = prior.measure.cumulants(one(0.0), one(1.0), 6)
        yield close(f"{prior.name}: κ₁ … κ₆ and the table", cumulants, prior.cumulants)
        radius = min(prior.radius, 1.0)
        by_cauchy = _scaled_cumulants(prior, radius)[:6] * factorial / radius**order
        yield close(f"{prior.name}: κ₁ … κ₆ and derivatives of K at 0", cumulants, by_cauchy)
        if prior.name == "Laplace":
            scale = 1 / prior.top
            ratio = cumulants / (factorial * scale**order)
            yield as_published(close("Laplace: κₙ/((n − 1)! bⁿ) and 1", ratio, 1.0))
            yield close("Laplace: κₙ/((n − 1)! bⁿ) and 1 + (−1)ⁿ", ratio, 1.0 + (-1.0) ** order)
        if prior.name == "exponential":
            yield close("exponential: κₙλⁿ/(n − 1)! and 1", cumulants * prior.top**order / factorial, 1.0)
    yield from _bernoulli_recursion(normal, draws)
    yield from _categorical(normal, draws)


def _bernoulli_recursion(normal: Normal, draws: int) -> Iterator[Check]:
    """Each cumulant of a Bernoulli law is a derivative of the one before: κₙ₊₁ = p(1 − p) dκₙ/dp."""
    p = torch.sigmoid(1.5 * torch.tanh(normal(draws, 1)))

    def cumulants(p: Float[Tensor, "draws 1"]) -> Float[Tensor, "draws 6"]:
        return Bernoulli.create(p).cumulants(torch.zeros_like(p), torch.ones_like(p), 6)

    slope = p * (1 - p) * differences(cumulants, p).squeeze(-1)
    name = "Bernoulli: κₙ₊₁ and p(1 − p) dκₙ/dp"
    yield close(name, cumulants(p)[:, 1:], slope[:, :-1], GRADIENT_BY_DIFFERENCES)


def _categorical(normal: Normal, draws: int) -> Iterator[Check]:
    """The table's row from which attention comes, with the first four cumulants along t."""
    probability = torch.softmax(normal(5), -1)
    measure = Categorical.create(probability)
    t = normal(draws, 5)
    closed = (probability * t.exp()).sum(-1).log()
    yield close("categorical: A(t) and log Σ πₘe^(tₘ)", measure.log_partition(t), closed)
    origin = torch.zeros_like(t)
    yield close("categorical: κ₁ and π", measure.mean(origin[0]), probability)
    covariance = torch.diag(probability) - torch.outer(probability, probability)
    yield close("categorical: κ₂ and diag π − ππᵀ", measure.fisher(origin[0]), covariance)
    centred = t - (t @ probability).unsqueeze(-1)
    second, third, fourth = (centred**n @ probability for n in (2, 3, 4))
    expected = torch.stack([t @ probability, second, third, fourth - 3 * second.square()], -1)
    yield close("categorical: κ₁ … κ₄ along t and moments", measure.cumulants(origin, t, 4), expected)
