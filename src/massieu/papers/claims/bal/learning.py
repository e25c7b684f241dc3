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

_VISIBLE = 4
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

    def log_unnormalised(
        self, weight: Float[Tensor, "... V H"], field: Float[Tensor, "... V"]
    ) -> Float[Tensor, "... S"]:
        """log p(v) up to its constant, with the prior's K in closed form."""
        fields = self.states @ weight
        return (self.states @ field.unsqueeze(-1)).squeeze(-1) + self.prior.log_mean_exp(fields).sum(-1)

    @property
    def probability(self) -> Float[Tensor, "S"]:
        return torch.softmax(self.log_unnormalised(self.weight, self.field), -1)

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
        weight = reach * F.normalize(normal(_VISIBLE, _HIDDEN), p=1, dim=0)
        machine = _Machine(prior, 0.5 * normal(_VISIBLE), weight, spin_states(_VISIBLE))
        yield from _chains(machine, chains, sweeps, generator)
        yield from _gradient(machine)
        if prior.name in ("Bernoulli", "spin"):
            strong = replace(machine, weight=0.5 * normal(_VISIBLE, _HIDDEN))
            transition = _transition(strong)
            yield from _divergence(strong, transition)
            yield from _sampled_divergence(strong, transition, chains, generator)


def _chains(machine: _Machine, chains: int, sweeps: int, generator: torch.Generator) -> Iterator[Check]:
    """Block Gibbs sampling leads to p(v, h), from one state far from it: test (i) of B8 in docs/theory/bal.md."""
    library = machine.library
    start = gibbs_init(torch.ones(chains, _VISIBLE, dtype=torch.float64), library.sample_hidden, generator)
    visible, hidden = gibbs_step(start, library.sample_visible, library.sample_hidden, generator, steps=sweeps)
    name = machine.prior.name
    p = machine.probability
    states = machine.states
    first, second = torch.triu_indices(_VISIBLE, _VISIBLE, 1)
    draws = [visible, visible[:, first] * visible[:, second]]
    exact = [p @ states, p @ (states[:, first] * states[:, second])]
    # A constant hidden unit has no spread to measure a distance in.
    if name != "constant":
        draws += [hidden, (visible.unsqueeze(-1) * hidden.unsqueeze(-2)).flatten(1)]
        exact += [p @ machine.means(states), (states.T * p @ machine.means(states)).flatten()]
    yield mean_of_draws(f"{name}: moments of v and h over chains", torch.cat(draws, -1), torch.cat(exact))


def _gradient(machine: _Machine) -> Iterator[Check]:
    """The gradient of the exact likelihood of six states is the difference of two averages: test (ii)."""
    name = machine.prior.name
    states = machine.states
    p = machine.probability
    observed = torch.tensor([0, 3, 3, 6, 9, 15])

    def likelihood(parameters: Float[Tensor, "P"]) -> Float[Tensor, ""]:
        flat_weight, field = parameters.split([_VISIBLE * _HIDDEN, _VISIBLE])
        weight = flat_weight.reshape(_VISIBLE, _HIDDEN)
        return machine.log_unnormalised(weight, field).log_softmax(-1)[observed].mean()

    by_differences = differences(likelihood, torch.cat([machine.weight.flatten(), machine.field]))
    library = machine.library
    means = library.hidden.mean(library.hidden_field(states))
    yield close(f"{name}: mean of h given v, and K′(Wᵀv)", means, machine.means(states))
    data = F.one_hot(observed, len(states)).double().mean(0)
    formula = torch.cat([(states.T * (data - p) @ means).flatten(), states.T @ (data - p)])
    yield close(f"{name}: likelihood's gradient and its differences", formula, by_differences, GRADIENT_BY_DIFFERENCES)
    # Contrastive divergence between the six states and every state once.
    weight = machine.weight.clone().requires_grad_()
    trainable = BoltzmannMachine(library.visible, library.hidden, weight)
    loss = contrastive_divergence(trainable.effective_energy, states[observed], states)
    (slope,) = torch.autograd.grad(loss, weight)
    uniform = torch.full_like(data, 1 / len(states))
    closed_form = states.T * (data - uniform) @ machine.means(states)
    yield close(f"{name}: gradient of contrastive divergence", -slope, closed_form)


def _transition(machine: _Machine) -> Float[Tensor, "S S"]:
    """T(v, v′) of the library's conditional laws, over all hidden states."""
    library = machine.library
    states = machine.states
    hidden = spin_states(_HIDDEN)
    if machine.prior.name == "Bernoulli":
        hidden = 0.5 * (1 + hidden)
    # log p(h | v) for every pair, (states, hidden states), then log p(v′ | h), (hidden states, states).
    shape = len(states), len(hidden), -1
    hidden_field = library.hidden_field(states).unsqueeze(1).expand(shape)
    log_hidden = library.hidden.log_prob(hidden_field, hidden.expand(shape))
    shape = len(hidden), len(states), -1
    visible_field = library.visible_field(hidden).unsqueeze(1).expand(shape)
    log_visible = library.visible.log_prob(visible_field, states.expand(shape))
    return log_hidden.exp() @ log_visible.exp()


_STARTS = torch.tensor([0, 3, 6, 9])
"""The states from which contrastive divergence starts, an equal share of the data each."""


def _start_law(states: Float[Tensor, "S V"]) -> Float[Tensor, "S"]:
    return F.one_hot(_STARTS, len(states)).double().mean(0)


def _pair_statistics(machine: _Machine, visible: Float[Tensor, "items V"]) -> Float[Tensor, "items V*H"]:
    """vᵢK′_μ(Wᵀv), whose averages are the gradients."""
    return (visible.unsqueeze(-1) * machine.means(visible).unsqueeze(-2)).flatten(1)


def _divergence(machine: _Machine, transition: Float[Tensor, "S S"]) -> Iterator[Check]:
    """Reversibility of a sweep, test (iii), and the error of CD-k by its bound, test (iv).

    In the norm of L²(1/p) a reversible chain contracts by λ₂ a step.
    """
    name = machine.prior.name
    p = machine.probability
    states = machine.states
    flow = p.unsqueeze(-1) * transition
    yield close(f"{name}: p(v)T(v, v′) and p(v′)T(v′, v)", flow, flow.T, _ROUNDING)
    yield close(f"{name}: pT and p", p @ transition, p, _ROUNDING)
    # T is similar to a symmetric matrix, as the chain is reversible.
    symmetric = p.sqrt().unsqueeze(-1) * transition / p.sqrt()
    second_eigenvalue = torch.linalg.eigvalsh(0.5 * (symmetric + symmetric.T))[-2]

    data = _start_law(states)
    statistics = _pair_statistics(machine, states)
    deviation = (p @ (statistics - p @ statistics).square()).sqrt()
    chi = ((data - p).square() / p).sum().sqrt()
    for k in (1, 2, 5, 20):
        law = data @ torch.linalg.matrix_power(transition, k)
        bias = (law - p) @ statistics
        bound = second_eigenvalue**k * chi * deviation
        detail = f"largest entry {bias.abs().max():.2g}, λ₂ = {second_eigenvalue:.2g}"
        # What is far below the rounding of sums of order 1 is not told from 0.
        share = (bias.abs() - _ROUNDING).clamp_min(0) / bound
        yield at_most(f"{name}: |CD-{k} less the gradient| by its bound", share, 1.0, detail)
    bias = (data @ transition - p) @ statistics
    yield at_least(f"{name}: |CD-1 less the gradient|", bias.abs().max(), 1e4 * CLOSED_FORM)


def _sampled_divergence(
    machine: _Machine, transition: Float[Tensor, "S S"], chains: int, generator: torch.Generator
) -> Iterator[Check]:
    """The gradient of CD-1 by sampling has the expectation that T gives."""
    states = machine.states
    weight = machine.weight.clone().requires_grad_()
    trainable = BoltzmannMachine(Spin.create(machine.field), machine.hidden, weight)
    start = states[_STARTS].repeat(chains // len(_STARTS), 1)
    chain = gibbs_init(start, trainable.sample_hidden, generator)
    after = gibbs_step(chain, trainable.sample_visible, trainable.sample_hidden, generator).visible
    (slope,) = torch.autograd.grad(contrastive_divergence(trainable.effective_energy, start, after), weight)
    data = _start_law(states)
    expected = (data - data @ transition) @ _pair_statistics(machine, states)
    # The starts are an equal number of each state, so that the mean spreads less than this says.
    error = _pair_statistics(machine, after).std(0) / math.sqrt(len(start))
    name = f"{machine.prior.name}: CD-1 by sampling and by T"
    yield near_in_standard_errors(name, -slope.flatten(), expected, error)
