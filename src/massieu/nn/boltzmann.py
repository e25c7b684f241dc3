"""Restricted Boltzmann machines with any units, as modules that train, sample and score."""

import math
import warnings
from typing import Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from massieu.energy.boltzmann import BoltzmannMachine
from massieu.energy.normalisable import untilted, why_not_normalisable
from massieu.foundation.arguments import (
    check_dense,
    check_one_device,
    check_range,
    check_shape,
    floating,
    instance,
    number,
    whole_number,
)
from massieu.foundation.transforms import all_true, any_true, unwrapped, values_are_readable
from massieu.foundation.watching import track
from massieu.inference import gibbs_init, gibbs_step
from massieu.measures import Bernoulli, DomainError, Measure, Spin
from massieu.nn.activation import HeldValue
from massieu.nn.missing_units import complete_by_gibbs, complete_exactly, is_enumerable, missing_units
from massieu.nn.modules import Device, Resettable, device_for
from massieu.nn.training_rows import TrainingRows

_NEWEST_BATCH_WEIGHT = 0.01
"""Weight of the newest batch in the running mean of the hidden units."""


class RestrictedBoltzmannMachine(Resettable):
    """A restricted Boltzmann machine p(v, h) ∝ exp(vᵀWh + a·v + b·h) with units of any two measures (B1).

    The layers are given as measures: `Bernoulli.create(torch.full((64,), 0.5))` for 64 bits, and `Spin`, `Gaussian`,
    `Poisson`, `Categorical`, … for others; the biases a and b tilt them. `machine()` is the `BoltzmannMachine` at the
    current parameters, with its energies, couplings and normaliser.

    Attributes:
        weight: W, (V, H).
        visible_bias: a, (V,).
        hidden_bias: b, (H,).

    Example:
        >>> import torch
        >>> from massieu import measures, nn
        >>> bits, spins = measures.Bernoulli.create(torch.full((6,), 0.5)), measures.Spin.create(dim=4)
        >>> machine = nn.RestrictedBoltzmannMachine(bits, spins)
        >>> torch.nn.init.zeros_(machine.weight)[0, 0].item()  # without couplings, all 64 states are equally likely
        0.0
        >>> machine.score_samples(torch.ones(6)).exp().mul(64).round(decimals=3).item()
        1.0
    """

    chains: Tensor | None
    """Visible units of the persistent chains, after `fit`; a checkpoint holds none, and `fit` starts them at the data."""

    def __init__(
        self,
        visible: Measure,
        hidden: Measure,
        *,
        generator: torch.Generator | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Weights start as small normal numbers, biases as 0, by default of the dtype and on the device of the measures, or,
        where these are on the CPU, on PyTorch's default device.

        Weights between layers that are both bounded from below alone (Poisson, Exponential, Gamma) start negative, as a
        normaliser needs.

        Raises:
            TypeError, ValueError: as `BoltzmannMachine.create`; kinds of units that have no normaliser together.
        """
        super().__init__()
        shape = (_num_units(visible, "visible"), _num_units(hidden, "hidden"))
        like = like_measures(visible, hidden)
        like = like.to(device_for(like, device), dtype)
        place = {"device": like.device, "dtype": like.dtype}
        self.visible = HeldValue(visible, **place)
        self.hidden = HeldValue(hidden, **place)
        BoltzmannMachine.create(self.visible.value(), self.hidden.value(), like.new_zeros(shape))
        self.weight = nn.Parameter(like.new_zeros(shape))
        self.visible_bias = nn.Parameter(like.new_zeros(shape[0]))
        self.hidden_bias = nn.Parameter(like.new_zeros(shape[1]))
        self.register_buffer("chains", None, persistent=False)
        self._draw(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw new weights, set the biases to 0, restore the measures, and drop the chains. Raises as the constructor."""
        super().reset_parameters()
        self.visible_bias.zero_()
        self.hidden_bias.zero_()
        self.chains = None
        self._draw(generator)

    @torch.no_grad()
    def _draw(self, generator: torch.Generator | None) -> None:
        visible = self.visible.value()
        hidden = self.hidden.value()
        device = None if generator is None else generator.device
        weight = (0.01 * torch.randn(self.weight.shape, generator=generator, device=device)).to(self.weight)
        if values_are_readable(weight) and why_not_normalisable(visible, hidden, weight) is not None:
            # Between units bounded from below alone, non-positive couplings always have a normaliser.
            weight = -weight.abs()
        BoltzmannMachine.create(visible, hidden, weight)
        self.weight.copy_(weight)

    def extra_repr(self) -> str:
        layers = (("visible", self.visible, self.visible_bias), ("hidden", self.hidden, self.hidden_bias))
        return ", ".join(f"{name}={_kind(layer.value())} × {len(bias)}" for name, layer, bias in layers)

    def machine(self) -> BoltzmannMachine:
        """The machine at the current parameters, differentiable in them."""
        visible = self.visible.value().tilt(self.visible_bias)
        hidden = self.hidden.value().tilt(self.hidden_bias)
        return BoltzmannMachine(visible, hidden, self.weight)

    def forward(self, visible: Float[Tensor, "*items V"]) -> Float[Tensor, "*items H"]:
        """Mean hidden units given the visible ones. All methods that take data cast it to the dtype of the parameters.

        Raises:
            TypeError: not a tensor; so do all methods that take data.
            ValueError: a shape that does not fit, or a NaN; so do they all.
        """
        return self.hidden.value().mean(self._hidden_field(self._read(visible))).to(self.weight.dtype)

    def energy(self, visible: Float[Tensor, "*items V"]) -> Float[Tensor, "*items"]:
        """The effective energy: −log p(v) up to the normaliser (B2)."""
        return self.machine().effective_energy(self._read(visible))

    @torch.no_grad()
    def transform(self, data: Float[Tensor, "*items V"]) -> Float[Tensor, "*items H"]:
        """Features of the data: mean hidden units, without gradient."""
        return self(data)

    @torch.no_grad()
    def reconstruct(self, data: Float[Tensor, "*items V"]) -> Float[Tensor, "*items V"]:
        """Mean visible units given the mean hidden units of the data."""
        return self.visible.value().mean(self._visible_field(self(data)))

    @torch.no_grad()
    def score_samples(
        self, data: Float[Tensor, "*items V"], log_partition: Float[Tensor, ""] | float | None = None
    ) -> Float[Tensor, "*items"]:
        """log p(v), nats: the log-likelihood of each item.

        Args:
            log_partition: The log-partition, or an estimate: `machine().estimate_log_partition(...).log_partition`. By
                default `machine().log_partition()`, by enumeration.

        Raises:
            ValueError: no `log_partition`, and both layers have too many states to enumerate.
        """
        if log_partition is None:
            log_partition = self.machine().log_partition()
        if isinstance(log_partition, Tensor):
            check_shape("log_partition", log_partition, ())
        return -self.energy(data) - log_partition

    @torch.no_grad()
    def pseudo_log_likelihood(self, data: Float[Tensor, "*items V"]) -> Float[Tensor, "*items"]:
        """Σ_i log p(v_i | all other v), nats: needs no normaliser. For bits and spins only; −inf for other numbers.

        A flip of one unit moves the hidden units' fields by its row of W: the cost is items·V·H.

        Raises:
            ValueError: the visible units take more than two values.
        """
        visible = self.visible.value()
        if not isinstance(visible, Bernoulli | Spin):
            raise ValueError(
                f"the pseudo-likelihood is for Bernoulli or Spin visible units, not {type(visible).__name__}"
            )
        data = self._read(data)
        machine = self.machine()
        field = machine.hidden_field(data)
        log_partition = machine.hidden.log_partition(field)
        # The change of each unit when it flips: between 0 and 1, or between −1 and 1.
        if isinstance(visible, Bernoulli):
            flip = 1 - 2 * data
            unit_field = visible.logit
        else:
            flip = -2 * data
            unit_field = visible.field
        # log p(flipped)/p(v) without the couplings.
        uncoupled_change = flip * unit_field + flip * self.visible_bias
        total = torch.zeros_like(log_partition)
        for unit, coupling in enumerate(machine.weight):
            flipped_field = field + flip[..., unit, None] * coupling
            change = uncoupled_change[..., unit] + machine.hidden.log_partition(flipped_field) - log_partition
            # p(v_i | others) = p(v)/(p(v) + p(flipped)) = σ(−change).
            total += torch.nn.functional.logsigmoid(-change)
        possible = machine.visible.log_prob(torch.zeros_like(data), data) > -torch.inf
        return torch.where(possible, total, -torch.inf)

    @torch.no_grad()
    def impute(
        self, data: Float[Tensor, "*items V"], *, sweeps: int = 1000, generator: torch.Generator | None = None
    ) -> Float[Tensor, "*items V"]:
        """The data with each NaN replaced by the mean of that unit given the item's other units.

        The mean is exact, by a sum over the states of the hidden units, where these have at most 2^16. Otherwise it is the
        average over `sweeps` Gibbs sweeps of a chain for each item, after a tenth as many that are not counted.

        Raises:
            TypeError: not a tensor; `sweeps` not whole.
            ValueError: a shape that does not fit; a part of units that depend on each other is missing, as some states of
                one `Categorical`.
        """
        _check_positive(sweeps=sweeps)
        is_missing = instance("data", data, Tensor, "a tensor").isnan()
        rows = self._read(data.masked_fill(is_missing, 0))
        width = rows.shape[-1]
        rows_of = (rows.reshape(-1, width), is_missing.reshape(-1, width))
        machine = self.machine()
        if is_enumerable(machine):
            completion = complete_exactly(machine, *rows_of)
        else:
            completion = complete_by_gibbs(machine, *rows_of, sweeps=sweeps, generator=generator)
        return completion.visible.reshape(rows.shape)

    @torch.no_grad()
    def sample(
        self, count: int, *, sweeps: int = 1000, generator: torch.Generator | None = None
    ) -> Float[Tensor, "count V"]:
        """Visible units after `sweeps` sweeps of Gibbs sampling, started from the law at weight 0.

        Raises:
            TypeError, ValueError: `count` or `sweeps` is not a positive whole number.
        """
        _check_positive(count=count, sweeps=sweeps)
        start = self.visible.value().sample(self.visible_bias.expand(count, -1), generator=generator)
        return self._sweep(start, sweeps, generator)

    def fit(
        self,
        data: Float[Tensor, "items V"],
        *,
        epochs: int = 40,
        batch_size: int = 100,
        chains: int = 20,
        sweeps: int = 1,
        learning_rate: float = 1.0,
        missing: Bool[Tensor, "items V"] | None = None,
        weight: Float[Tensor, "items"] | None = None,
        generator: torch.Generator | None = None,
        progress: bool = True,
    ) -> Self:
        """Maximise the likelihood by persistent contrastive divergence with centred gradients.

        Chains of the model are kept from one update to the next, and from one call to the next. Gradients are taken
        about the mean of the data and of the hidden units, which the choice of 0 and 1, or ±1, then does not affect
        (Melchior, Fischer and Wiskott, 2016). The learning rate falls to 0 over the epochs. Interrupted, it keeps what
        it has learned and warns.

        Args:
            epochs: Passes over the data.
            batch_size: Items in each update.
            chains: Number of persistent chains.
            sweeps: Gibbs sweeps of the chains in each update.
            learning_rate: 1 suits bits; take 0.01 to 0.1 for unbounded units.
            missing: True where a unit was not observed; the data may hold anything there. The likelihood is then that of the
                observed units: whenever an item is used, a Gibbs sweep draws its missing units anew, from their last draw.
            weight: Not negative, one for each item, by default 1: how often it counts. Only their ratios matter.

        Raises:
            TypeError: data that is no tensor, or a number that is not whole.
            ValueError: data of another shape, with a NaN, or outside the support of the visible units; a number that is
                not positive; parameters of less than single precision; parameters for which the machine has no
                normaliser, which a smaller learning rate avoids.
        """
        options = {"epochs": epochs, "batch_size": batch_size, "chains": chains, "sweeps": sweeps}
        self._train(self._training_rows(data, missing, weight), learning_rate, generator, progress, **options)
        return self

    def _train(
        self,
        data: TrainingRows,
        learning_rate: float,
        generator: torch.Generator | None,
        progress: bool,
        *,
        epochs: int,
        batch_size: int,
        chains: int,
        sweeps: int,
    ) -> bool:
        """`fit`; True if it was not interrupted."""
        _check_positive(epochs=epochs, batch_size=batch_size, chains=chains, sweeps=sweeps)
        self._check_fit(learning_rate)
        trainer = _Training(self, data, chains, generator)
        num_updates = epochs * math.ceil(len(data) / batch_size)
        rounds = track(range(epochs), "training", shown=progress)
        epoch = 0
        finished = False
        try:
            for epoch in rounds:  # noqa: B007
                order = torch.randperm(len(data), generator=generator, device=self.weight.device)
                for batch in order.split(batch_size):
                    # The learning rate falls linearly to 0.
                    trainer.update(batch, learning_rate * (1 - trainer.num_updates / num_updates), sweeps)
                self._check_normaliser(learning_rate)
            finished = True
        except KeyboardInterrupt:
            warnings.warn(
                f"interrupted in epoch {epoch + 1} of {epochs}: the parameters are those so far", stacklevel=3
            )
        except DomainError as error:
            raise ValueError(
                f"training diverged to a machine without a normaliser: {error}{_advice(learning_rate)}"
            ) from error
        self.chains = trainer.visible
        return finished

    def _hidden_field(self, visible: Tensor) -> Tensor:
        return torch.nn.functional.linear(visible, self.weight.mT, self.hidden_bias)

    def _visible_field(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.linear(hidden, self.weight, self.visible_bias)

    def _sweep(self, visible: Tensor, sweeps: int, generator: torch.Generator | None) -> Tensor:
        machine = self.machine()
        state = gibbs_init(visible, machine.sample_hidden, generator)
        return gibbs_step(state, machine.sample_visible, machine.sample_hidden, generator, steps=sweeps).visible

    def _read(self, data: Tensor) -> Tensor:
        """The data as visible units: checked, in the dtype of the parameters."""
        return read_units(data, self.weight, len(self.visible_bias))

    def _training_rows(self, data: Tensor, missing: Tensor | None, weight: Tensor | None) -> TrainingRows:
        """The data, checked."""
        if missing is not None:
            instance("missing", missing, Tensor, "a tensor of booleans")
            check_shape("missing", missing, tuple(instance("data", data, Tensor, "a tensor").shape))
            if missing.dtype != torch.bool:
                raise TypeError(f"missing must be booleans, got a tensor of {missing.dtype}")
            data = data.masked_fill(missing, 0)
        data = self._read(data)
        check_states(self.visible.value(), data, missing)
        if weight is not None:
            weight = floating("weight", weight).to(data)
            check_shape("weight", weight, (len(data),))
            check_range("weight", weight, least=0)
            if not bool(weight.sum() > 0):
                raise ValueError("weight must be positive for at least one item")
            weight = weight / weight.mean()
        return TrainingRows(data, missing, weight)

    def _check_fit(self, learning_rate: float) -> None:
        number("learning_rate", learning_rate, above=0)
        if self.weight.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"training needs parameters of float32 or float64, got {self.weight.dtype}")
        machine = self.machine()
        BoltzmannMachine.create(machine.visible, machine.hidden, machine.weight)

    def _check_normaliser(self, learning_rate: float) -> None:
        if not all(bool(parameter.isfinite().all()) for parameter in self.parameters()):
            raise _diverged(learning_rate)
        reason = why_not_normalisable(self.machine().visible, self.machine().hidden, self.weight.detach())
        if reason is not None:
            raise ValueError(f"training diverged to a machine without a normaliser: {reason}{_advice(learning_rate)}")


def read_units(data: object, weight: Tensor, count: int) -> Float[Tensor, "*items V"]:
    """The data as `count` visible units an item: checked, in the dtype of the weight.

    Raises:
        TypeError: no tensor of real numbers.
        ValueError: another shape, another device, or a NaN.
    """
    data = instance("data", data, Tensor, "a tensor")
    check_dense("data", data)
    if data.is_complex():
        raise TypeError(f"data must be real, got a tensor of {data.dtype}")
    check_one_device(data=data, **{"the machine": weight})
    if data.ndim == 0 or data.shape[-1] != count:
        raise ValueError(f"data must have shape (*items, {count}), got {tuple(data.shape)}")
    if any_true(data.isnan()):
        has_nan = unwrapped(data).isnan().reshape(-1, data.shape[-1]).any(-1)
        raise ValueError(f"data must have no NaN, got them in {_first_of(has_nan)}")
    return data.to(weight.dtype)


def check_states(visible: Measure, data: Float[Tensor, "items V"], missing: Bool[Tensor, "items V"] | None) -> None:
    """Raise a ValueError unless the data are items to learn from, states of the visible units but for what is missing."""
    check_shape("data", data, ("items", visible.event_shape.numel()))
    if len(data) == 0:
        raise ValueError(f"data must have at least one item, got shape {tuple(data.shape)}")
    log_prob = visible._log_prob_of_units(torch.zeros_like(data), data)
    if missing is not None:
        log_prob = log_prob.masked_fill(missing_units(visible, missing), 0.0)
    inside = (log_prob > -torch.inf).all(-1)
    if not all_true(inside):
        raise ValueError(
            f"data must be states of {_kind(visible)} units, got others in {_first_of(~inside)}; values are from "
            f"{data.min():.4g} to {data.max():.4g}"
        )


class _Training:
    """Persistent contrastive divergence with centred gradients, in place."""

    def __init__(
        self, model: RestrictedBoltzmannMachine, rows: TrainingRows, chains: int, generator: torch.Generator | None
    ) -> None:
        self.model = model
        self.rows = rows
        self.generator = generator
        self.num_updates = 0
        self.visible_layer = model.visible.value()
        self.hidden_layer = model.hidden.value()
        # Missing units start at the law of the visible biases.
        rows.fill(lambda index: self.visible_layer.sample(self._biases(len(index)), generator=generator))
        self.centre = rows.mean()
        """The centre of the visible units: their mean over the data."""
        # Drawn in any case, so that the generator's numbers do not depend on whether there are chains.
        drawn = rows.draw(chains, generator)
        has_chains = model.chains is not None and len(model.chains) == chains
        self.visible: Tensor = model.chains if has_chains else rows.take(drawn)  # pyright: ignore[reportAttributeAccessIssue]
        """Visible units of the chains."""
        self.activity = model.transform(self.centre)
        """The centre of the hidden units: the running mean of their means over batches."""

    def _biases(self, count: int) -> Tensor:
        return self.model.visible_bias.detach().expand(count, -1)

    @torch.no_grad()
    def update(self, index: Tensor, learning_rate: float, sweeps: int) -> None:
        """One step along the gradient of the likelihood. The chains are swept with the parameters before the step."""
        model = self.model
        num_chains = len(self.visible)
        batch = self._completed(index, sweeps)
        # Data and chains in one product of matrices.
        field = model._hidden_field(torch.cat([batch, self.visible]))
        data_hidden, chain_hidden = self.hidden_layer.mean(field).split([len(batch), num_chains])
        if self.rows.weight is None:
            total_weight = len(batch)
            data_sum = batch.sum(0)
            hidden_sum = data_hidden.sum(0)
            product = batch.mT @ data_hidden
        else:
            weight = self.rows.weight[index]
            total_weight = weight.sum().item()
            data_sum = weight @ batch
            hidden_sum = weight @ data_hidden
            product = (weight.unsqueeze(1) * batch).mT @ data_hidden
        # Sums over the batch; a chain counts as this many items.
        items_per_chain = total_weight / num_chains
        visible_gradient = data_sum - items_per_chain * self.visible.sum(0)
        hidden_gradient = hidden_sum - items_per_chain * chain_hidden.sum(0)
        if not math.isfinite(hidden_gradient.sum().item()):
            raise _diverged(learning_rate)
        step = learning_rate / len(batch)
        # Σ (v − centre)(h − activity)ᵀ over the data, less the same over the chains, with the product multiplied out: the
        # term centre·activityᵀ cancels.
        gradient = torch.addmm(product, self.visible.mT, chain_hidden, alpha=-items_per_chain)
        gradient.addr_(visible_gradient, self.activity, alpha=-1).addr_(self.centre, hidden_gradient, alpha=-1)
        self._sweep(field[len(batch) :], sweeps)
        model.weight.add_(gradient, alpha=step)
        # The biases of centred units stay while the weight moves, so a + W·activity and b + Wᵀ·centre take the plain steps.
        model.visible_bias.add_(visible_gradient - gradient @ self.activity, alpha=step)
        model.hidden_bias.add_(hidden_gradient - self.centre @ gradient, alpha=step)
        if total_weight > 0:
            self.activity.lerp_(hidden_sum / total_weight, _NEWEST_BATCH_WEIGHT)
        self.num_updates += 1

    def _completed(self, index: Tensor, sweeps: int) -> Tensor:
        """The rows of an index, their missing units drawn by Gibbs sweeps that start at their last draw."""
        batch = self.rows.take(index)
        if self.rows.is_missing is None:
            return batch
        is_missing = self.rows.is_missing[index]
        if not bool(is_missing.any()):
            return batch
        for _ in range(sweeps):
            hidden = self.hidden_layer.sample(self.model._hidden_field(batch), generator=self.generator)
            drawn = self.visible_layer.sample(self.model._visible_field(hidden), generator=self.generator)
            batch = torch.where(is_missing, drawn, batch)
        self.rows.store(index, batch)
        return batch

    def _sweep(self, field: Tensor, sweeps: int) -> None:
        """Gibbs sweeps of the chains; `field` is the hidden units' field of their present state."""
        for sweep in range(sweeps):
            if sweep > 0:
                field = self.model._hidden_field(self.visible)
            hidden = self.hidden_layer.sample(field, generator=self.generator)
            self.visible = self.visible_layer.sample(self.model._visible_field(hidden), generator=self.generator)


def _diverged(learning_rate: float) -> ValueError:
    return ValueError(f"training diverged: a parameter or a mean is not finite{_advice(learning_rate)}")


def _advice(learning_rate: float) -> str:
    return f"; take a smaller learning_rate than {learning_rate:.4g}, or more sweeps"


def _check_positive(**numbers: int) -> None:
    for name, value in numbers.items():
        whole_number(name, value, least=1)


def _first_of(is_wrong: Tensor) -> str:
    """How many items are wrong and which is the first, for an error message."""
    return f"{int(is_wrong.sum())} of {len(is_wrong)} items, item {int(is_wrong.nonzero()[0])} first"


def _kind(measure: Measure) -> str:
    return type(untilted(measure)).__name__


def like_measures(*measures: Measure) -> Tensor:
    """A tensor of the dtype that the measures' parameters promote to, on their device."""
    leaves = [leaf for leaf in pytree.tree_leaves(measures) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not leaves:
        return torch.zeros(())
    return sum((leaf.new_zeros((1,)) for leaf in leaves[1:]), leaves[0].new_zeros((1,)))


def _num_units(measure: Measure, name: str) -> int:
    return instance(name, measure, Measure, "a measure").event_shape.numel()
