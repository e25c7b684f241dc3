"""B8: the conditional laws of a Boltzmann machine, block Gibbs sampling, contrastive divergence."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from massieu.energy import BoltzmannMachine
from massieu.inference import contrastive_divergence, gibbs_init, gibbs_step
from massieu.measures import Measure, Spin, product
from massieu.papers.claims.bal.priors import Prior, priors
from massieu.papers.claims.claim import (
    BAL,
    CLOSED_FORM,
    GRADIENT_BY_DIFFERENCES,
    Check,
    at_least,
    at_most,
    close,
    mean_of_draws,
    near_in_standard_errors,
)
from massieu.papers.claims.inputs import check_at_least, normal_draws
from massieu.papers.claims.oracles import differences, spin_states
from massieu.papers.claims.registry import claim

_ROUNDING = 1e-14
"""Of sums of a few probabilities."""

_SEEN = 4
_HIDDEN = 2


@dataclass(frozen=True)
class _Machine:
    """Four visible spins and two hidden units of one prior.

    Attributes:
        prior: Of the hidden units.
        field: a, of the spins.
        weight: W, so small that every field stays in the prior's domain.
        states: All of the spins.
    """

    prior: Prior
    field: Float[Tensor, "V"]
    weight: Float[Tensor, "V H"]
    states: Float[Tensor, "S V"]

    @property
    def hidden(self) -> Measure:
        return product(*[self.prior.measure] * _HIDDEN)

    @property
    def library(self) -> BoltzmannMachine:
        return BoltzmannMachine.create(Spin.create(self.field), self.hidden, self.weight)

    def level(self, weight: Float[Tensor, "... V H"], field: Float[Tensor, "... V"]) -> Float[Tensor, "... S"]:
        """log p(v) up to its constant, with the prior's K in closed form."""
        fields = self.states @ weight
        return (self.states @ field.unsqueeze(-1)).squeeze(-1) + self.prior.log_mean_exp(fields).sum(-1)

    @property
    def probability(self) -> Float[Tensor, "S"]:
        return torch.softmax(self.level(self.weight, self.field), -1)

    def means(self, visible: Float[Tensor, "items V"]) -> Float[Tensor, "items H"]:
        """K′(Wᵀv) in closed form."""
        return self.prior.slope((visible @ self.weight).to(torch.complex128)).real


@claim(
    "B8",
    title="Conditional laws and contrastive divergence",
    statement="Given v, a hidden unit follows its prior tilted by t = (Wᵀv)_μ, with mean K′(t). Block Gibbs "
    "sampling is reversible for p(v). The likelihood's gradient is ⟨vK′(Wᵀv)ᵀ⟩ over the data minus that over the "
    "model. CD-k replaces the model by k sweeps from the data; its error is at most λ₂ᵏ·√χ²(data, "
    "p)·√Var_p(vᵢK′_μ), with λ₂ the second eigenvalue of a sweep.",
    source=f"{BAL}, §2.2; formulas derived",
    status="quoted",
)
def learning_of_a_machine(chains: int = 20_000, sweeps: int = 40, seed: int = 0) -> Iterator[Check]:
    # Fewer chains have no normal law of their means to speak of; fewer sweeps remember their start.
    check_at_least(2_000, chains=chains)
    check_at_least(20, sweeps=sweeps)
    normal = normal_draws(seed)
    generator = torch.Generator().manual_seed(seed)
    for prior in priors(normal):
        # Half of the way to the end of the domain at most, where differences of K are still small.
        reach = min(2 / 3 * prior.reach, 1.0)
        weight = reach * F.normalize(normal(_SEEN, _HIDDEN), p=1, dim=0)
        machine = _Machine(prior, 0.5 * normal(_SEEN), weight, spin_states(_SEEN))
        yield from _chains(machine, chains, sweeps, generator)
        yield from _gradient(machine)
        if prior.name in ("Bernoulli", "spin"):
            strong = replace(machine, weight=0.5 * normal(_SEEN, _HIDDEN))
            yield from _divergence(strong, _transition(strong), chains, generator)


def _chains(machine: _Machine, chains: int, sweeps: int, generator: torch.Generator) -> Iterator[Check]:
    """(i), from one state far from the law."""
    library = machine.library
    start = gibbs_init(torch.ones(chains, _SEEN, dtype=torch.float64), library.sample_hidden, generator)
    visible, hidden = gibbs_step(start, library.sample_visible, library.sample_hidden, generator, steps=sweeps)
    name = machine.prior.name
    p = machine.probability
    states = machine.states
    first, second = torch.triu_indices(_SEEN, _SEEN, 1)
    values = [visible, visible[:, first] * visible[:, second]]
    wanted = [p @ states, p @ (states[:, first] * states[:, second])]
    if name != "constant":  # which has no spread
        values += [hidden, (visible.unsqueeze(-1) * hidden.unsqueeze(-2)).flatten(1)]
        wanted += [p @ machine.means(states), (states.T * p @ machine.means(states)).flatten()]
    yield mean_of_draws(f"{name}: moments of v and h over chains", torch.cat(values, -1), torch.cat(wanted))


def _gradient(machine: _Machine) -> Iterator[Check]:
    """(ii), of the exact likelihood of six states."""
    name = machine.prior.name
    states = machine.states
    p = machine.probability
    chosen = torch.tensor([0, 3, 3, 6, 9, 15])

    def likelihood(parameters: Float[Tensor, "P"]) -> Float[Tensor, ""]:
        weight, field = parameters.split([_SEEN * _HIDDEN, _SEEN])
        return machine.level(weight.reshape(_SEEN, _HIDDEN), field).log_softmax(-1)[chosen].mean()

    found = differences(likelihood, torch.cat([machine.weight.flatten(), machine.field]))
    library = machine.library
    means = library.hidden.mean(library.hidden_field(states))
    yield close(f"{name}: mean of h given v, and K′(Wᵀv)", means, machine.means(states))
    data = F.one_hot(chosen, len(states)).double().mean(0)
    formula = torch.cat([(states.T * (data - p) @ means).flatten(), states.T @ (data - p)])
    yield close(f"{name}: likelihood's gradient and its differences", formula, found, GRADIENT_BY_DIFFERENCES)
    weight = machine.weight.clone().requires_grad_()
    moving = BoltzmannMachine(library.visible, library.hidden, weight)
    loss = contrastive_divergence(moving.effective_energy, states[chosen], states)
    (slope,) = torch.autograd.grad(loss, weight)
    even = torch.full_like(data, 1 / len(states))
    yield close(f"{name}: gradient of contrastive divergence", -slope, states.T * (data - even) @ machine.means(states))


def _transition(machine: _Machine) -> Float[Tensor, "S S"]:
    """T(v, v′) of the library's conditional laws, over all hidden states."""
    library = machine.library
    states = machine.states
    hidden = spin_states(_HIDDEN) if machine.prior.name == "spin" else 0.5 * (1 + spin_states(_HIDDEN))
    shape = len(states), len(hidden), -1
    down = library.hidden.log_prob(library.hidden_field(states).unsqueeze(1).expand(shape), hidden.expand(shape))
    shape = len(hidden), len(states), -1
    up = library.visible.log_prob(library.visible_field(hidden).unsqueeze(1).expand(shape), states.expand(shape))
    return down.exp() @ up.exp()


def _divergence(
    machine: _Machine, transition: Float[Tensor, "S S"], chains: int, generator: torch.Generator
) -> Iterator[Check]:
    """(iii) and (iv). In the norm of L²(1/p) a reversible chain contracts by λ₂ a step."""
    name = machine.prior.name
    p = machine.probability
    states = machine.states
    flow = p.unsqueeze(-1) * transition
    yield close(f"{name}: p(v)T(v, v′) and p(v′)T(v′, v)", flow, flow.T, _ROUNDING)
    yield close(f"{name}: pT and p", p @ transition, p, _ROUNDING)
    even = p.sqrt().unsqueeze(-1) * transition / p.sqrt()
    second = torch.linalg.eigvalsh(0.5 * (even + even.T))[-2]

    chosen = torch.tensor([0, 3, 6, 9])
    data = F.one_hot(chosen, len(states)).double().mean(0)
    statistics = (states.unsqueeze(-1) * machine.means(states).unsqueeze(-2)).flatten(1)
    spread = (p @ (statistics - p @ statistics).square()).sqrt()
    apart = ((data - p).square() / p).sum().sqrt()
    for k in (1, 2, 5, 20):
        law = data @ torch.linalg.matrix_power(transition, k)
        bias = (law - p) @ statistics
        bound = second**k * apart * spread
        detail = f"largest entry {bias.abs().max():.2g}, λ₂ = {second:.2g}"
        # What is far below the rounding of sums of order 1 is not told from 0.
        over = (bias.abs() - _ROUNDING).clamp_min(0) / bound
        yield at_most(f"{name}: |CD-{k} less the gradient| by its bound", over, 1.0, detail)
    bias = (data @ transition - p) @ statistics
    yield at_least(f"{name}: |CD-1 less the gradient|", bias.abs().max(), 1e4 * CLOSED_FORM)

    weight = machine.weight.clone().requires_grad_()
    moving = BoltzmannMachine(Spin.create(machine.field), machine.hidden, weight)
    start = states[chosen].repeat(chains // len(chosen), 1)
    state = gibbs_init(start, moving.sample_hidden, generator)
    after = gibbs_step(state, moving.sample_visible, moving.sample_hidden, generator).visible
    (slope,) = torch.autograd.grad(contrastive_divergence(moving.effective_energy, start, after), weight)
    each = (after.unsqueeze(-1) * machine.means(after).unsqueeze(-2)).flatten(1)
    wanted = (data - data @ transition) @ statistics
    error = each.std(0) / math.sqrt(len(start))
    # The starts are an equal number of each state, so that the mean spreads less than this says.
    yield near_in_standard_errors(f"{name}: CD-1 by sampling and by T", -slope.flatten(), wanted, error)
