"""Boltzmann machines of several layers that are one energy and are trained jointly."""

import itertools
import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from massieu.energy import sites
from massieu.energy.boltzmann import BoltzmannMachine
from massieu.energy.normalisable import is_bounded
from massieu.foundation.arguments import check_shape, instance, number, whole_number
from massieu.foundation.transforms import values_are_readable
from massieu.foundation.watching import track
from massieu.inference import gibbs_init, gibbs_step
from massieu.measures import Measure, product
from massieu.nn.activation import HeldValue
from massieu.nn.boltzmann import check_states, like_measures, read_units
from massieu.nn.modules import Device, Resettable, device_for

_NEWEST_BATCH_WEIGHT = 0.01
"""Weight of the newest batch in the running means of the hidden units."""
_MOST_TERMS = 1 << 22
"""The most pairs of an item and a state of hidden layers that are in memory together."""


class DeepBoltzmannMachine(Resettable):
    """A deep Boltzmann machine: p(v, h₁, …, h_K) ∝ exp(vᵀW₀h₁ + h₁ᵀW₁h₂ + … + Σ biases), units of any measure by layer.

    One energy of all layers, without directions (Salakhutdinov and Hinton 2009; Bal, section 2.3), in contrast to
    `StackedBoltzmannMachine`. Given the layers of odd number, those of even number are independent of each other, and the
    other way round: `machine()` is that `BoltzmannMachine` of two layers. Of what hidden layers do given the data a mean field
    is known, each layer in the mean of its neighbours; its bound on the likelihood holds for every number of steps.

    Example:
        >>> import torch
        >>> from massieu import measures, nn
        >>> bits = [measures.Bernoulli.create(torch.full((size,), 0.5)) for size in (4, 3, 2)]
        >>> deep = nn.DeepBoltzmannMachine(bits)
        >>> for weight in deep.weights:  # without couplings, all 16 states are equally likely
        ...     _ = torch.nn.init.zeros_(weight)
        >>> deep.score_samples(torch.ones(4)).exp().mul(16).round(decimals=3).item()
        1.0
    """

    chains: Tensor | None
    """Units of the even layers of the persistent chains, after `fit`; a checkpoint holds none."""

    def __init__(
        self,
        layers: Sequence[Measure],
        *,
        generator: torch.Generator | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Layers from the visible units upwards. Weights start as small normal numbers, biases as 0.

        Raises:
            TypeError: layers that are no sequence of measures.
            ValueError: fewer than three layers, for which there is `RestrictedBoltzmannMachine`; a measure that is not one
                measure on vectors; neither all even nor all odd layers bounded, so that a normaliser is not certain.
        """
        super().__init__()
        instance("layers", layers, Sequence, "a sequence of measures")
        if len(layers) < 3:
            raise ValueError(f"layers must be three or more, got {len(layers)}; two make a RestrictedBoltzmannMachine")
        for layer in layers:
            instance("each of layers", layer, Measure, "a measure")
        like = like_measures(*layers)
        like = like.to(device_for(like, device), dtype)
        place = {"device": like.device, "dtype": like.dtype}
        self.layers = nn.ModuleList(HeldValue(layer, **place) for layer in layers)
        sizes = [layer.event_shape.numel() for layer in layers]
        self.weights = nn.ParameterList(like.new_zeros(low, high) for low, high in itertools.pairwise(sizes))
        self.biases = nn.ParameterList(like.new_zeros(size) for size in sizes)
        self.register_buffer("chains", None, persistent=False)
        machine = self.machine()
        is_readable = values_are_readable(like)
        if is_readable and not (is_bounded(machine.visible) or is_bounded(machine.hidden)):
            raise ValueError(
                "all even or all odd layers must be bounded (Bernoulli, Spin, Categorical), so that there is a normaliser"
            )
        BoltzmannMachine.create(machine.visible, machine.hidden, machine.weight.detach())
        self._draw(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw new weights, set the biases to 0, restore the measures, and drop the chains."""
        super().reset_parameters()
        for bias in self.biases:
            bias.zero_()
        self.chains = None
        self._draw(generator)

    @torch.no_grad()
    def _draw(self, generator: torch.Generator | None) -> None:
        device = None if generator is None else generator.device
        for weight in self.weights:
            weight.copy_((0.01 * torch.randn(weight.shape, generator=generator, device=device)).to(weight))

    def extra_repr(self) -> str:
        return "layers=" + " – ".join(str(len(bias)) for bias in self.biases)

    # The machine of two layers.

    def machine(self) -> BoltzmannMachine:
        """The even layers as visible and the odd ones as hidden units, differentiable in the parameters.

        `energy`, `log_partition`, `estimate_log_partition` and the samplers are those of this machine.
        """
        laws = [layer.value().tilt(bias) for layer, bias in zip(self.layers, self.biases, strict=True)]  # pyright: ignore[reportCallIssue]
        sizes = [len(bias) for bias in self.biases]
        rows = []
        for even in range(0, len(sizes), 2):
            # The weights between neighbours, and zeros between the others.
            blocks = [self._block(even, odd) for odd in range(1, len(sizes), 2)]
            rows.append(torch.cat(blocks, 1))
        return BoltzmannMachine(product(*laws[::2]), product(*laws[1::2]), torch.cat(rows))

    def _block(self, even: int, odd: int) -> Tensor:
        """Couplings of an even layer with an odd one, (even units, odd units)."""
        if odd == even + 1:
            return self.weights[even]
        if odd == even - 1:
            return self.weights[odd].mT
        return self.weights[0].new_zeros(len(self.biases[even]), len(self.biases[odd]))

    # The hidden layers given the data.

    def forward(self, visible: Float[Tensor, "*items V"], *, steps: int = 20) -> Float[Tensor, "*items H"]:
        """Mean units of the top layer in the mean field, differentiable through its steps.

        Raises:
            TypeError: not a tensor, or steps that are not whole; so do all methods that take them.
            ValueError: a shape that does not fit, a NaN, or no step; so do they all.
        """
        field = self._mean_field(self._read(visible), steps)
        top = field.odd if len(self.layers) % 2 == 0 else field.even
        return top[..., -len(self.biases[-1]) :].to(self.weights[0].dtype)

    @torch.no_grad()
    def transform(self, data: Float[Tensor, "*items V"], *, steps: int = 20) -> Float[Tensor, "*items H"]:
        """Features of the data: `forward` without gradient."""
        return self(data, steps=steps)

    def bound(
        self,
        data: Float[Tensor, "*items V"],
        *,
        steps: int = 20,
        log_partition: Float[Tensor, ""] | float | None = None,
    ) -> Float[Tensor, "*items"]:
        """The mean field's lower bound of log p(v), nats; more steps never lower it.

        log a(v) + ⟨couplings⟩ − Σ KL of the hidden layers' laws from their own − log Z.

        Args:
            log_partition: That of `machine()`, exact by default; or an estimate of it.
        """
        data = self._read(data)
        field = self._mean_field(data, steps)
        machine = field.machine
        couplings = (field.odd * (field.even @ machine.weight.to(field.even.dtype))).sum(-1)
        width = data.shape[-1]
        upper = product(*(layer.value().tilt(bias) for layer, bias in self._upper_even()))
        even_field = field.even_field[..., width:]
        divergence = machine.hidden.kl(field.odd_field, torch.zeros_like(field.odd_field))
        divergence = divergence + upper.kl(even_field, torch.zeros_like(even_field))
        log_z = self._log_partition(log_partition)
        return self._log_density_of_visible(data) + couplings - divergence - log_z

    def _upper_even(self) -> list[tuple[HeldValue, Tensor]]:
        return list(zip(self.layers, self.biases, strict=True))[2::2]  # pyright: ignore[reportReturnType]

    def _log_density_of_visible(self, data: Tensor) -> Tensor:
        law = self.layers[0].value().tilt(self.biases[0])  # pyright: ignore[reportCallIssue]
        return law.log_prob(torch.zeros_like(data), data)

    def _log_partition(self, log_partition: Tensor | float | None) -> Tensor | float:
        if log_partition is None:
            return self.machine().log_partition()
        if isinstance(log_partition, Tensor):
            check_shape("log_partition", log_partition, ())
        return log_partition

    def _mean_field(self, visible: Tensor, steps: int) -> "_MeanField":
        """Odd layers in the mean of the even ones, then even ones in that of the odd ones: each is the best given the other."""
        whole_number("steps", steps, least=1)
        machine = self.machine()
        # Means are at least float32, in half precision too.
        weight = machine.weight.to(torch.promote_types(machine.weight.dtype, torch.float32))
        visible = visible.to(weight.dtype)
        width = visible.shape[-1]
        even_field = visible.new_zeros(*visible.shape[:-1], len(weight))
        for _ in range(steps):
            even = torch.cat([visible, machine.visible.mean(even_field)[..., width:]], -1)
            odd_field = even @ weight
            odd = machine.hidden.mean(odd_field)
            even_field = odd @ weight.mT
        even = torch.cat([visible, machine.visible.mean(even_field)[..., width:]], -1)
        return _MeanField(machine, even, even_field, odd, odd_field)  # pyright: ignore[reportPossiblyUnboundVariable]

    @torch.no_grad()
    def score_samples(
        self, data: Float[Tensor, "*items V"], log_partition: Float[Tensor, ""] | float | None = None
    ) -> Float[Tensor, "*items"]:
        """log p(v), nats, by a sum over all states of the hidden layers of even number.

        Args:
            log_partition: As for `bound`.

        Raises:
            ValueError: these layers have more than 2^20 states; take `bound`. No `log_partition`, and neither all even nor all
                odd layers can be enumerated.
        """
        data = self._read(data)
        machine = self.machine()
        upper = product(*(layer.value() for layer, _ in self._upper_even()))
        count = sites.num_states(upper)
        if count is None or count > sites.MAX_STATES:
            found = "infinitely many" if count is None else str(count)
            raise ValueError(
                f"the exact log-likelihood needs even hidden layers of at most 2^20 states, got {found}; take `bound`"
            )
        states = torch.cat(list(sites.state_blocks(upper, data)))
        items = data.reshape(-1, data.shape[-1])
        sums = [data.new_zeros(0)]
        for block in items.split(max(1, _MOST_TERMS // len(states))):
            # Every item beside every state, (items, states, even units).
            pairs = torch.cat(
                [
                    block.unsqueeze(1).expand(-1, len(states), -1),
                    states.expand(len(block), -1, -1),
                ],
                -1,
            )
            sums.append(torch.logsumexp(-machine.effective_energy(pairs), -1))
        return torch.cat(sums).reshape(data.shape[:-1]) - self._log_partition(log_partition)

    @torch.no_grad()
    def sample(
        self, count: int, *, sweeps: int = 1000, generator: torch.Generator | None = None
    ) -> Float[Tensor, "count V"]:
        """Visible units after `sweeps` sweeps of Gibbs sampling over all layers, started from the law at weight 0."""
        whole_number("count", count, least=1)
        whole_number("sweeps", sweeps, least=1)
        machine = self.machine()
        start = machine.visible.sample(machine.weight.new_zeros(count, len(machine.weight)), generator=generator)
        state = gibbs_init(start, machine.sample_hidden, generator)
        state = gibbs_step(state, machine.sample_visible, machine.sample_hidden, generator, steps=sweeps)
        return state.visible[:, : len(self.biases[0])]

    # Training.

    def fit(
        self,
        data: Float[Tensor, "items V"],
        *,
        epochs: int = 40,
        batch_size: int = 100,
        chains: int = 100,
        sweeps: int = 5,
        steps: int = 10,
        learning_rate: float = 1.0,
        generator: torch.Generator | None = None,
        progress: bool = True,
    ) -> Self:
        """Train all layers at once: the mean field given the data, less persistent chains of the whole machine.

        Gradients are taken about the means of all layers, without which joint training stays in its start (Montavon and
        Müller 2012). The learning rate falls to 0 over the epochs. Interrupted, it keeps what it has learned and warns.

        Args:
            epochs: Passes over the data.
            batch_size: Items in each update.
            chains: Number of persistent chains, kept from one call to the next.
            sweeps: Gibbs sweeps of the chains in each update.
            steps: Steps of the mean field for each batch.
            learning_rate: 1 suits bits; take less for unbounded units.

        Raises:
            TypeError: data that is no tensor, or a number that is not whole.
            ValueError: data of another shape, with a NaN, or no states of the visible units; a number that is not positive; a
                parameter that is no longer finite, which a smaller learning rate avoids.
        """
        for name, value in {"epochs": epochs, "batch_size": batch_size, "chains": chains, "sweeps": sweeps}.items():
            whole_number(name, value, least=1)
        whole_number("steps", steps, least=1)
        number("learning_rate", learning_rate, above=0)
        data = self._read(data)
        check_states(self.layers[0].value(), data, None)  # pyright: ignore[reportCallIssue]
        trainer = _Training(self, data, chains, generator)
        num_updates = epochs * math.ceil(len(data) / batch_size)
        rounds = track(range(epochs), "training", shown=progress)
        epoch = 0
        try:
            for epoch in rounds:  # noqa: B007
                order = torch.randperm(len(data), generator=generator).to(data.device)
                for batch in order.split(batch_size):
                    # The learning rate falls linearly to 0.
                    trainer.update(data[batch], learning_rate * (1 - trainer.num_updates / num_updates), sweeps, steps)
                if not all(bool(parameter.isfinite().all()) for parameter in self.parameters()):
                    raise ValueError(
                        f"training diverged: a parameter is not finite; take a smaller learning_rate than {learning_rate:.4g}"
                    )
        except KeyboardInterrupt:
            warnings.warn(
                f"interrupted in epoch {epoch + 1} of {epochs}: the parameters are those so far", stacklevel=2
            )
        self.chains = trainer.even
        return self

    def _read(self, data: Tensor) -> Tensor:
        """The data as visible units: checked, in the dtype of the parameters."""
        return read_units(data, self.weights[0], len(self.biases[0]))


class _MeanField(NamedTuple):
    """Means of the even layers, visible units included, and of the odd ones, with the fields whose means they are."""

    machine: BoltzmannMachine
    even: Float[Tensor, "*items E"]
    even_field: Float[Tensor, "*items E"]
    odd: Float[Tensor, "*items O"]
    odd_field: Float[Tensor, "*items O"]


class _Training:
    """Persistent contrastive divergence of all layers with centred gradients, in place."""

    def __init__(
        self, model: DeepBoltzmannMachine, data: Tensor, chains: int, generator: torch.Generator | None
    ) -> None:
        self.model = model
        self.generator = generator
        self.num_updates = 0
        with torch.no_grad():
            field = model._mean_field(data.mean(0), 1)
        self.even_centre = field.even
        """Means of the even layers: of the visible units over the data, of the others over batches."""
        self.odd_centre = field.odd
        self.even = self._start(data, chains)
        """Even layers of the chains."""

    @torch.no_grad()
    def _start(self, data: Tensor, chains: int) -> Tensor:
        """The chains of the call before if there are as many, else rows of the data and draws of the layers above."""
        machine = self.model.machine()
        rows = torch.randint(len(data), (chains,), generator=self.generator).to(data.device)
        above = machine.visible.sample(data.new_zeros(chains, len(machine.weight)), generator=self.generator)
        if self.model.chains is not None and len(self.model.chains) == chains:
            return self.model.chains
        return torch.cat([data[rows], above[:, data.shape[-1] :]], -1)

    @torch.no_grad()
    def update(self, batch: Tensor, learning_rate: float, sweeps: int, steps: int) -> None:
        """One step along the gradient of the bound. The chains are swept with the parameters before the step."""
        field = self.model._mean_field(batch, steps)
        machine = field.machine
        state = gibbs_init(self.even, machine.sample_hidden, self.generator)
        state = gibbs_step(state, machine.sample_visible, machine.sample_hidden, self.generator, steps=sweeps)
        self.even = state.visible
        # Given the even layers the mean of the odd ones is exact: less noise than their draws.
        chain_odd = machine.hidden.mean(self.even @ machine.weight)
        even_gradient = field.even.mean(0) - self.even.mean(0)
        odd_gradient = field.odd.mean(0) - chain_odd.mean(0)
        # Mean of (x − centre)(y − centre)ᵀ under the data less that of the chains: centre·centreᵀ cancels.
        gradient = field.even.mT @ field.odd / len(batch) - self.even.mT @ chain_odd / len(self.even)
        gradient = gradient - torch.outer(even_gradient, self.odd_centre) - torch.outer(self.even_centre, odd_gradient)
        self._step(gradient, even_gradient, odd_gradient, learning_rate)
        width = batch.shape[-1]
        self.even_centre[width:].lerp_(field.even.mean(0)[width:], _NEWEST_BATCH_WEIGHT)
        self.odd_centre.lerp_(field.odd.mean(0), _NEWEST_BATCH_WEIGHT)
        self.num_updates += 1

    def _step(self, gradient: Tensor, even_gradient: Tensor, odd_gradient: Tensor, learning_rate: float) -> None:
        """Move the weights between neighbours, and the biases so that those of centred units take the plain steps."""
        model = self.model
        sizes = [len(bias) for bias in model.biases]
        rows = dict(zip(range(0, len(sizes), 2), gradient.split(sizes[::2]), strict=True))
        even_steps = list(even_gradient.split(sizes[::2]))
        odd_steps = list(odd_gradient.split(sizes[1::2]))
        even_centres = self.even_centre.split(sizes[::2])
        odd_centres = self.odd_centre.split(sizes[1::2])
        for low, weight in enumerate(model.weights):
            even, odd = (low, low + 1) if low % 2 == 0 else (low + 1, low)
            block = rows[even].split(sizes[1::2], 1)[odd // 2]
            weight.add_(block if low == even else block.mT, alpha=learning_rate)
            even_steps[even // 2] = even_steps[even // 2] - block @ odd_centres[odd // 2]
            odd_steps[odd // 2] = odd_steps[odd // 2] - even_centres[even // 2] @ block
        for layer, bias in enumerate(model.biases):
            step = even_steps[layer // 2] if layer % 2 == 0 else odd_steps[layer // 2]
            bias.add_(step, alpha=learning_rate)
