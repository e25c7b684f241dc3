"""Restricted Boltzmann machines on top of each other, with the log-likelihood of the whole and its lower bound."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from massieu.energy import sites
from massieu.energy.boltzmann import BoltzmannMachine
from massieu.foundation.arguments import flag, instance, whole_number
from massieu.foundation.short_repr import fields_html, fields_repr
from massieu.measures import Measure
from massieu.nn.boltzmann import RestrictedBoltzmannMachine
from massieu.nn.modules import Device, Resettable

_MOST_PAIRS = 1 << 28
"""The most pairs of states of two neighbouring hidden layers that are summed over."""
_PAIRS_PER_BLOCK = 1 << 22
"""The most pairs whose log-probabilities are in memory together."""


class BoundResult(NamedTuple):
    """Bounds and estimates of log p(v) from draws of the hidden layers, in nats."""

    bound: Float[Tensor, "*items"]
    """The mean over draws: unbiased for the variational lower bound of log p(v)."""
    standard_error: Float[Tensor, "*items"]
    """Standard error of `bound`; NaN for one draw."""
    log_likelihood: Float[Tensor, "*items"]
    """The importance-weighted estimate, log of the mean of exp: between `bound` and, on average, log p(v)."""

    __repr__ = fields_repr
    _repr_html_ = fields_html


class StackedBoltzmannMachine(Resettable):
    """Stacked restricted Boltzmann machines: p(v) = Σ p(v|h₁) p(h₁|h₂) … p(h_{K−1}), the last the top machine's law.

    Each `RestrictedBoltzmannMachine` is fitted to draws of the hidden units of the one below (Hinton, Osindero and Teh
    2006). The top two layers are one machine, and what is below is drawn from it downwards. With layers on top, the
    visible units have effective interactions that no single machine of the first hidden layer has (Bal, section 2.3).
    Upwards, h_{k+1} given h_k is each machine's own conditional law: the exact posterior where nothing is stacked.

    Example:
        >>> import torch
        >>> from massieu import measures, nn
        >>> bits = [measures.Bernoulli.create(torch.full((size,), 0.5)) for size in (4, 3, 2)]
        >>> stack = nn.StackedBoltzmannMachine(bits)
        >>> for machine in stack.machines:  # without couplings, all 16 states are equally likely
        ...     _ = torch.nn.init.zeros_(machine.weight)
        >>> stack.score_samples(torch.ones(4)).exp().mul(16).round(decimals=3).item()
        1.0
    """

    machines: nn.ModuleList

    def __init__(
        self,
        layers: Sequence[Measure],
        *,
        generator: torch.Generator | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """A machine between each two neighbouring layers, from the visible units upwards.

        Raises:
            TypeError: layers that are no sequence of measures.
            ValueError: fewer than three layers, for which there is `RestrictedBoltzmannMachine`; else as there.
        """
        super().__init__()
        instance("layers", layers, Sequence, "a sequence of measures")
        if len(layers) < 3:
            raise ValueError(f"layers must be three or more, got {len(layers)}; two make a RestrictedBoltzmannMachine")
        self.machines = nn.ModuleList(
            RestrictedBoltzmannMachine(*pair, generator=generator, device=device, dtype=dtype)
            for pair in itertools.pairwise(layers)
        )

    def forward(self, visible: Float[Tensor, "*items V"]) -> Float[Tensor, "*items H"]:
        """Mean units of the top layer, by the means of each layer below. Raises as `RestrictedBoltzmannMachine`."""
        for machine in self.machines:
            visible = machine(visible)
        return visible

    @torch.no_grad()
    def transform(self, data: Float[Tensor, "*items V"]) -> Float[Tensor, "*items H"]:
        """Features of the data: `forward` without gradient."""
        return self(data)

    def fit(
        self,
        data: Float[Tensor, "items V"],
        *,
        epochs: int = 40,
        batch_size: int = 100,
        chains: int = 20,
        sweeps: int = 1,
        learning_rate: float = 1.0,
        tied_start: bool = False,
        generator: torch.Generator | None = None,
        progress: bool = True,
    ) -> Self:
        """Fit each machine in turn, from the bottom: the lowest to the data, each other to draws of the layer below.

        Interrupted, it keeps what it has learned, warns, and leaves the machines above as they are.

        Args:
            tied_start: Start each machine but the lowest as the one below upside down. The bound is then the log-likelihood
                of the stack without it, which better fitting machines raise. Needs layers with every second alike.
            epochs, batch_size, chains, sweeps, learning_rate, progress: As in `RestrictedBoltzmannMachine.fit`, of each.

        Raises:
            TypeError, ValueError: as there; `tied_start` where a layer's units are not those two layers below.
        """
        if flag("tied_start", tied_start):
            self._check_tied()
        options = {"epochs": epochs, "batch_size": batch_size, "chains": chains, "sweeps": sweeps}
        below: RestrictedBoltzmannMachine | None = None
        for machine in self._each():
            if below is not None:
                with torch.no_grad():
                    data = below.machine().sample_hidden(below._read(data), generator)
                    if tied_start:
                        machine.weight.copy_(below.weight.mT)
                        machine.visible_bias.copy_(below.hidden_bias)
                        machine.hidden_bias.copy_(below.visible_bias)
            rows = machine._training_rows(data, None, None)
            if not machine._train(rows, learning_rate, generator, progress, **options):
                break
            below = machine
        return self

    @torch.no_grad()
    def score_samples(
        self, data: Float[Tensor, "*items V"], log_partition: Float[Tensor, ""] | float | None = None
    ) -> Float[Tensor, "*items"]:
        """log p(v), nats, by a sum over all states of all hidden layers but the top one.

        Args:
            log_partition: That of the top machine, as in `RestrictedBoltzmannMachine.score_samples`.

        Raises:
            ValueError: a layer between with infinitely many states, or two neighbours with more than 2²⁸ pairs of states; for
                these take `bound`. As `RestrictedBoltzmannMachine.score_samples` otherwise.
        """
        machines = self._each()
        data = machines[0]._read(data)
        states = [_states(machine) for machine in machines[:-1]]
        pairs = max((len(low) * len(high) for low, high in itertools.pairwise(states)), default=0)
        if pairs > _MOST_PAIRS:
            raise ValueError(
                f"the exact log-likelihood takes at most 2^28 pairs of states of two neighbours, got {pairs}; take `bound`"
            )
        # From the top down: log p of each state of a hidden layer, then of the layer below it.
        log_prob = machines[-1].score_samples(states[-1], log_partition)
        for layer in range(len(states) - 1, 0, -1):
            log_prob = _log_prob_below(machines[layer].machine(), states[layer - 1], states[layer], log_prob)
        items = data.reshape(-1, data.shape[-1])
        if len(items) == 0:
            return items.new_zeros(data.shape[:-1])
        return _log_prob_below(machines[0].machine(), items, states[0], log_prob).reshape(data.shape[:-1])

    @torch.no_grad()
    def bound(
        self,
        data: Float[Tensor, "*items V"],
        draws: int = 100,
        *,
        log_partition: Float[Tensor, ""] | float | None = None,
        generator: torch.Generator | None = None,
    ) -> BoundResult:
        """The variational lower bound of log p(v), by draws of the hidden layers upwards: for layers of any size.

        Each draw is Σ log p(h_k | h_{k+1}) − log q(h_{k+1} | h_k) plus the top machine's log p. Its mean is the evidence
        bound; the log of the mean of its exponential is nearer to log p(v), and reaches it with many draws.

        Args:
            log_partition: That of the top machine: exact, or `machines[-1].machine().estimate_log_partition().log_partition`.

        Raises:
            TypeError, ValueError: fewer than one draw; as `RestrictedBoltzmannMachine.score_samples`.
        """
        whole_number("draws", draws, least=1)
        machines = self._each()
        data = machines[0]._read(data)
        lower = data.expand(draws, *data.shape)
        log_weight: Tensor | float = 0.0
        for machine in machines[:-1]:
            law = machine.machine()
            upper = law.sample_hidden(lower, generator)
            # log p(lower | upper) − log q(upper | lower).
            log_weight = log_weight + law.visible.log_prob(law.visible_field(upper), lower)
            log_weight = log_weight - law.hidden.log_prob(law.hidden_field(lower), upper)
            lower = upper
        log_weight = log_weight + machines[-1].score_samples(lower, log_partition)
        if draws > 1:
            standard_error = log_weight.std(0) / math.sqrt(draws)
        else:
            standard_error = torch.full_like(log_weight[0], torch.nan)
        return BoundResult(log_weight.mean(0), standard_error, log_weight.logsumexp(0) - math.log(draws))

    @torch.no_grad()
    def sample(
        self, count: int, *, sweeps: int = 1000, generator: torch.Generator | None = None
    ) -> Float[Tensor, "count V"]:
        """Visible units: Gibbs sampling of the top machine, then one draw of each layer below. Raises as the machine's."""
        *below, top = self._each()
        units = top.sample(count, sweeps=sweeps, generator=generator)
        for machine in reversed(below):
            units = machine.machine().sample_visible(units, generator)
        return units

    def _each(self) -> list[RestrictedBoltzmannMachine]:
        return list(self.machines)  # pyright: ignore[reportReturnType]

    def _check_tied(self) -> None:
        machines = self._each()
        for layer, (below, machine) in enumerate(itertools.pairwise(machines)):
            leaves, structure = pytree.tree_flatten(below.visible.value())
            other_leaves, other_structure = pytree.tree_flatten(machine.hidden.value())
            if structure != other_structure or not all(map(torch.equal, leaves, other_leaves)):
                raise ValueError(
                    f"tied_start needs layers with every second alike, and {layer} and {layer + 2} are not"
                )


def _states(machine: RestrictedBoltzmannMachine) -> Float[Tensor, "states H"]:
    """All states of the hidden layer."""
    measure = machine.hidden.value()
    number = sites.num_states(measure)
    if number is None or number > sites.MAX_STATES:
        num_states = "infinitely many" if number is None else str(number)
        raise ValueError(
            f"the exact log-likelihood needs hidden layers of at most 2^20 states, got {num_states}; take `bound`"
        )
    return torch.cat(list(sites.state_blocks(measure, machine.weight)))


def _log_prob_below(
    machine: BoltzmannMachine, visible: Tensor, hidden: Tensor, log_prob: Float[Tensor, " states"]
) -> Float[Tensor, " items"]:
    """log Σ_h p(v|h) p(h), with the log p(h) in `log_prob`.

    log p(v|h) = v·field(h) − A(field(h)) + A(0) + log p(v|0): one product of matrices for all pairs, in blocks of items.
    """
    field = machine.visible_field(hidden)
    origin = torch.zeros_like(visible)
    normaliser = machine.visible.log_partition(field) - machine.visible.log_partition(origin[:1])
    items_per_block = max(1, _PAIRS_PER_BLOCK // len(hidden))
    sums = [torch.logsumexp(items @ field.mT + (log_prob - normaliser), -1) for items in visible.split(items_per_block)]
    return torch.cat(sums) + machine.visible.log_prob(origin, visible)
