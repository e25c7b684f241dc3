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
from massieu.measures import Measure
from massieu.nn.boltzmann import RestrictedBoltzmannMachine
from massieu.nn.modules import Device, Resettable

_MOST_PAIRS = 1 << 28
"""Of states of two neighbouring hidden layers, which are gone through together."""
_PAIRS_AT_ONCE = 1 << 22


class BoundResult(NamedTuple):
    """What draws of the hidden layers tell of log p(v), nats."""

    bound: Float[Tensor, "*items"]
    """The mean over draws: unbiased for the variational lower bound of log p(v)."""
    standard_error: Float[Tensor, "*items"]
    """Of `bound`; NaN for one draw."""
    log_likelihood: Float[Tensor, "*items"]
    """The importance-weighted estimate, log of the mean of exp: between `bound` and, on average, log p(v)."""


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
            if not machine._train(data, learning_rate, generator, progress, **options):
                break
            below = machine
        return self

    @torch.no_grad()
    def score_samples(
        self, data: Float[Tensor, "*items V"], log_partition: Float[Tensor, ""] | float | None = None
    ) -> Float[Tensor, "*items"]:
        """log p(v), nats, by going through all states of all hidden layers but the top one.

        Args:
            log_partition: Of the top machine, as in `RestrictedBoltzmannMachine.score_samples`.

        Raises:
            ValueError: layers between with infinitely many states, or two neighbours with more than 2²⁸ pairs of them; for
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
        level = machines[-1].score_samples(states[-1], log_partition)
        for place in range(len(states) - 1, 0, -1):
            level = _below(machines[place].machine(), states[place - 1], states[place], level)
        items = data.reshape(-1, data.shape[-1])
        if len(items) == 0:
            return items.new_zeros(data.shape[:-1])
        return _below(machines[0].machine(), items, states[0], level).reshape(data.shape[:-1])

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
            log_partition: Of the top machine: exact, or `machines[-1].machine().estimate_log_partition().log_partition`.

        Raises:
            TypeError, ValueError: fewer than one draw; as `RestrictedBoltzmannMachine.score_samples`.
        """
        whole_number("draws", draws, least=1)
        machines = self._each()
        data = machines[0]._read(data)
        low = data.expand(draws, *data.shape)
        total: Tensor | float = 0.0
        for machine in machines[:-1]:
            law = machine.machine()
            high = law.sample_hidden(low, generator)
            down = law.visible.log_prob(law.visible_field(high), low)
            total, low = total + down - law.hidden.log_prob(law.hidden_field(low), high), high
        each = total + machines[-1].score_samples(low, log_partition)
        error = each.std(0) / math.sqrt(draws) if draws > 1 else torch.full_like(each[0], torch.nan)
        return BoundResult(each.mean(0), error, each.logsumexp(0) - math.log(draws))

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
        for place, (below, machine) in enumerate(itertools.pairwise(machines)):
            leaves, kind = pytree.tree_flatten(below.visible.value())
            others, other = pytree.tree_flatten(machine.hidden.value())
            if kind != other or not all(map(torch.equal, leaves, others)):
                raise ValueError(
                    f"tied_start needs layers with every second alike, and {place} and {place + 2} are not"
                )


def _states(machine: RestrictedBoltzmannMachine) -> Float[Tensor, "states H"]:
    """All states of the hidden layer."""
    measure = machine.hidden.value()
    number = sites.num_states(measure)
    if number is None or number > sites.MAX_STATES:
        told = "infinitely many" if number is None else str(number)
        raise ValueError(
            f"the exact log-likelihood needs hidden layers of at most 2^20 states, got {told}; take `bound`"
        )
    return torch.cat(list(sites.state_blocks(measure, machine.weight)))


def _below(machine: BoltzmannMachine, visible: Tensor, hidden: Tensor, level: Tensor) -> Float[Tensor, " items"]:
    """log Σ_h p(v|h) p(h), of the log p(h) in `level`: p(v|h) as one product of matrices, in blocks of visible units."""
    field, origin = machine.visible_field(hidden), torch.zeros_like(visible)
    rise = machine.visible.log_partition(field) - machine.visible.log_partition(origin[:1])
    block = max(1, _PAIRS_AT_ONCE // len(hidden))
    found = [torch.logsumexp(part @ field.mT + (level - rise), -1) for part in visible.split(block)]
    return torch.cat(found) + machine.visible.log_prob(origin, visible)
