"""B10: the interactions that hidden units leave between visible ones."""

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from massieu.energy import BoltzmannMachine
from massieu.measures import Spin, product
from massieu.papers.claims.bal.priors import Prior, priors
from massieu.papers.claims.claim import BAL, Check, as_published, at_least, at_most, close
from massieu.papers.claims.inputs import Normal, normal_draws
from massieu.papers.claims.oracles import spin_states
from massieu.papers.claims.registry import claim

_RADIUS = 0.5 * math.pi
"""Of the cumulant series of a spin."""

_SEEN = 4
_HIDDEN = 3


@claim(
    "B10",
    title="Effective interactions",
    statement="Summed out, independent hidden units couple visible ones by the tensors J⁽ⁿ⁾ = Σ_μ κ⁽ⁿ⁾_μ "
    "W_{i₁μ}…W_{iₙμ}: −E(v) = Σ aᵢ(vᵢ) + Σₙ ⟨J⁽ⁿ⁾, v⊗…⊗v⟩/n!. This holds where every |(Wᵀv)_μ| is below the radius "
    "of its prior's series. For spins, the exact interactions are the Walsh coefficients of −E.",
    source=f"{BAL}, §2.3",
    status="quoted",
    published="E(v) is the sum of its cumulants' terms to infinite order (§2.3, which states no condition). Order by order "
    "in W, and where the series converges, that is true; for every W and v it is not.",
    standing="ambiguous",
    corrected="The series has a finite radius for most priors; beyond it more terms make the error worse. The second-order "
    "tensor is not the exact pair coupling of spins, to which all even orders add.",
)
def effective_interactions(seed: int = 0) -> Iterator[Check]:
    normal = normal_draws(seed)
    laws = priors(normal)
    # For ‖v‖∞ ≤ 1 every field stays inside its prior's domain.
    reach = torch.tensor([prior.reach for prior in laws], dtype=torch.float64)
    weight = reach * F.normalize(normal(3, len(laws)), p=1, dim=0)
    machine = BoltzmannMachine.create(Spin.create(normal(3)), product(*(prior.measure for prior in laws)), weight)
    for order, tensor in enumerate(machine.couplings(4), 1):
        cumulants = torch.stack([prior.cumulants[order - 1] for prior in laws])
        yield close(
            f"one unit of each kind: J of order {order} and Σ κ W⊗…⊗W", tensor, _outer(weight, cumulants, order)
        )
    for index, prior in enumerate(laws):
        yield from _derivatives(prior, weight[:, index])
    yield from _on_spins(normal)
    yield from _beyond_the_radius(normal)
    yield from _one_pair(normal)


def _outer(weight: Float[Tensor, "V H"], factor: Float[Tensor, "H"], order: int) -> Tensor:
    """Σ_μ factor_μ W_{iμ}…W_{kμ}."""
    total = weight.new_zeros((weight.shape[0],) * order)
    for column, number in zip(weight.T, factor, strict=True):
        power = number
        for _ in range(order):
            power = power.unsqueeze(-1) * column
        total = total + power
    return total


def _derivatives(prior: Prior, column: Float[Tensor, "V"]) -> Iterator[Check]:
    """J⁽ⁿ⁾ of one unit is the n-th derivative of K(w·v), which is in closed form, at v = 0."""
    machine = BoltzmannMachine.create(Spin.create(dim=len(column)), prior.measure, column.unsqueeze(-1))
    derivative = lambda v: prior.log_mean_exp(v @ column)  # noqa: E731
    errors = []
    for tensor in machine.couplings(4):
        derivative = torch.func.jacfwd(derivative)
        errors.append((tensor - derivative(torch.zeros_like(column))).flatten())
    yield close(f"{prior.name}: J⁽¹⁾ … J⁽⁴⁾ and derivatives of K(w·v) at 0", torch.cat(errors), 0.0)


# --- spins -----------------------------------------------------------------------------------------------------------


def _walsh(values: Float[Tensor, "states"]) -> Float[Tensor, "states"]:
    """Coefficients of a function of spins in the products of subsets of them, which are orthogonal."""
    states = spin_states(_SEEN)
    # Every vector of ±1 also stands for the subset of its −1, (subsets, spins).
    subsets = 0.5 * (1 - states)
    products = torch.where(subsets.unsqueeze(1) > 0, states, 1.0).prod(-1)
    return products @ values / len(states)


def _series(field: Tensor, last: int) -> Float[Tensor, "... terms"]:
    """Terms of log cosh t, of order 2, 4, … : (−1)ⁿ⁺¹ λ(2n)/n · (2t/π)²ⁿ with λ(s) = Σ over odd k of k⁻ˢ."""
    n = torch.arange(1, last // 2 + 1, dtype=torch.float64)
    odd = torch.special.zeta(2 * n, torch.ones_like(n)) * (1 - 4.0**-n)
    return -((-1.0) ** n) * odd / n * (field.unsqueeze(-1) / _RADIUS) ** (2 * n)


def _machine(normal: Normal, share: float) -> BoltzmannMachine:
    """Spins whose largest field, over all states, is that share of the radius."""
    weight = share * _RADIUS * F.normalize(normal(_SEEN, _HIDDEN), p=1, dim=0)
    return BoltzmannMachine.create(Spin.create(dim=_SEEN), Spin.create(dim=_HIDDEN), weight)


def _minus_energy(machine: BoltzmannMachine, states: Float[Tensor, "S V"]) -> Float[Tensor, "S"]:
    """−E(v) without its constant."""
    return -machine.effective_energy(states) + _SEEN * math.log(2)


def _on_spins(normal: Normal) -> Iterator[Check]:
    """Inside the radius: |terms of orders above 2n| add up to λ(2) Σ_{m>n} r²ᵐ/m at most, r = |t|/R."""
    machine = _machine(normal, 0.7)
    states = spin_states(_SEEN)
    field = states @ machine.weight
    exact = _minus_energy(machine, states)
    yield close("hidden spins: −E(v) and Σ log cosh", exact, torch.cosh(field).log().sum(-1))
    # Summed over hidden units, then up to each even order: (states, orders).
    partial_sums = _series(field, 40).sum(-2).cumsum(-1)
    series = torch.zeros_like(exact)
    for order, tensor in enumerate(machine.couplings(4), 1):
        # ⟨J⁽ⁿ⁾, v⊗…⊗v⟩ for every state, one index after the other.
        contraction = tensor.expand(len(states), *tensor.shape)
        for _ in range(order):
            contraction = (contraction * states.reshape(-1, *[1] * (contraction.ndim - 2), _SEEN)).sum(-1)
        series = series + contraction / math.factorial(order)
        if order % 2 == 0:
            to_order = partial_sums[:, order // 2 - 1]
            yield close(f"hidden spins: couplings to order {order} and the series", series, to_order)
    interactions = _walsh(exact)
    errors = []
    m = torch.arange(1, 200, dtype=torch.float64)
    for order in (2, 4, 6, 8):
        error = (_walsh(partial_sums[:, order // 2 - 1]) - interactions).abs().max()
        share = (field.abs() / _RADIUS).unsqueeze(-1)
        tail = math.pi**2 / 8 * (share ** (2 * m) / m)[..., order // 2 :].sum((-2, -1)).mean()
        yield at_most(f"order {order}: error of the interactions by its bound", error / tail, 1.0, f"{error:.2g}")
        errors.append(error)
    ratios = torch.stack([later / earlier for earlier, later in pairwise(errors)])
    yield at_most("errors of the interactions at orders 2, 4, 6, 8, each by the one before", ratios, 1.0)


def _beyond_the_radius(normal: Normal) -> Iterator[Check]:
    """The series as published leaves E(v) beyond the radius; inside it converges."""
    machine = _machine(normal, 1.3)
    states = spin_states(_SEEN)
    exact = _minus_energy(machine, states)
    partial_sums = _series(states @ machine.weight, 60).sum(-2).cumsum(-1)
    yield as_published(close("|t| up to 1.3 R: E(v) and its series to order 60", partial_sums[:, -1], exact))
    error = (partial_sums - exact.unsqueeze(-1)).abs().amax(0)
    yield at_least("|t| up to 1.3 R: error at order 60 by that at order 2", error[-1] / error[0], 1.0)
    inside = _machine(normal, 0.4)
    partial_sums = _series(states @ inside.weight, 60).sum(-2).cumsum(-1)
    # 0.4⁶² < 1e-24.
    yield close("|t| up to 0.4 R: E(v) and its series to order 60", partial_sums[:, -1], _minus_energy(inside, states))


def _one_pair(normal: Normal) -> Iterator[Check]:
    """One hidden spin between two: the exact coupling is artanh(tanh a tanh b), below ab."""
    weights = 0.3 + 0.4 * torch.sigmoid(normal(2))
    machine = BoltzmannMachine.create(Spin.create(dim=2), Spin.create(dim=1), weights.unsqueeze(-1))
    states = spin_states(2)
    exact = (states.prod(-1) * -machine.effective_energy(states)).mean()
    yield close("two spins: pair coupling and artanh(tanh a tanh b)", exact, torch.atanh(weights.tanh().prod()))
    second = machine.couplings(2)[1][0, 1]
    yield close("two spins: second-order tensor and ab", second, weights.prod())
    # It is ½∫ tanh from |a − b| to a + b, and tanh u ≤ u − u³/3 + 2u⁵/15 for u ≥ 0.
    total = weights.square().sum()
    lower_bound = weights.prod() * (total / 3 - 8 / 45 * total.square())
    yield at_least("two spins: how far ab is above it, by a lower bound", (second - exact) / lower_bound, 1.0)
