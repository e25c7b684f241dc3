"""Boltzmann machines of two layers, of which every unit has any measure one likes.

With visible units v of measure a, hidden units h of measure b and a matrix W,

    p(v, h) ∝ exp(vᵀ W h) a(dv) b(dh),

so given v the hidden units have the law b tilted by Wᵀv, and summed out they leave A_b(Wᵀv), their log-partition (B1,
B2). Binary, Gaussian, spin, Poisson, … units differ by their measure alone; a categorical hidden layer is attention.
"""

import math
from typing import Literal, Self

import torch
from jaxtyping import Float
from torch import Tensor

from massieu import inference
from massieu.energy import sites
from massieu.energy.normalisable import why_not_normalisable
from massieu.foundation.arguments import check_finite, check_shape, choice, floating, instance, whole_number
from massieu.foundation.transforms import any_true, in_functorch, unwrapped, values_are_readable
from massieu.foundation.values import Value
from massieu.inference.annealed import AnnealResult
from massieu.measures import Measure


class BoltzmannMachine(Value):
    """A restricted Boltzmann machine of the measures `visible` and `hidden`, coupled by `weight`; energies in nats.

    Methods raise a ValueError at units of another shape than a layer's, and a TypeError at ones that are not floating-point.

    Attributes:
        visible: A probability on R^V, the law of the visible units at weight 0.
        hidden: A probability on R^H.
        weight: The couplings, (V, H).

    Example:
        >>> import torch
        >>> from massieu.energy import BoltzmannMachine
        >>> from massieu.measures import Spin
        >>> machine = BoltzmannMachine.create(Spin.create(dim=1), Spin.create(dim=1), torch.tensor([[1.0]]))
        >>> round(machine.log_partition().exp().item(), 3)  # cosh 1: the mean of exp(vh) over fair signs
        1.543
    """

    visible: Measure
    hidden: Measure
    weight: Float[Tensor, "V H"]

    @classmethod
    def create(cls, visible: Measure, hidden: Measure, weight: Float[Tensor, "V H"]) -> Self:
        """A machine, checked to have a normaliser (B2).

        Raises:
            TypeError: something is not a measure, or the weight no floating-point tensor.
            ValueError: shapes that do not fit; a weight that is not finite; Σ or ∫ exp(vᵀWh) a b is infinite, as it
                always is for Poisson hidden and Gaussian visible units.
        """
        for name, measure in (("visible", visible), ("hidden", hidden)):
            instance(name, measure, Measure, "a measure")
            if measure.batch_shape or len(measure.event_shape) != 1:
                shapes = f"batch shape {tuple(measure.batch_shape)} and event shape {tuple(measure.event_shape)}"
                raise ValueError(f"{name} must be one measure on vectors, got {shapes}")
        # Visible by hidden units.
        check_shape("weight", floating("weight", weight), (*visible.event_shape, *hidden.event_shape))
        check_finite(weight=weight)
        if values_are_readable(weight) and not in_functorch():
            reason = why_not_normalisable(visible, hidden, weight.detach())
            if reason is not None:
                raise ValueError(f"this machine has no normaliser: {reason}")
        return cls(visible, hidden, weight)

    # Energies.

    def energy(self, visible: Float[Tensor, "*items V"], hidden: Float[Tensor, "*items H"]) -> Float[Tensor, "*items"]:
        """E(v, h) = −vᵀWh − log a(v) − log b(h), with a and b the densities of the two probabilities (B1).

        Raises:
            MissingFormError: one of the measures has no density in closed form.
        """
        self._need_units("hidden", hidden)
        coupling = (self.hidden_field(visible) * hidden).sum(-1)
        return -coupling - _log_density(self.visible, visible) - _log_density(self.hidden, hidden)

    def effective_energy(self, visible: Float[Tensor, "*items V"]) -> Float[Tensor, "*items"]:
        """E(v) = −log ∫ exp(−E(v, h)) dh = −log a(v) − A_b(Wᵀv), all constants included (B2, B10).

        +inf where v is no state of the visible units.

        Raises:
            MissingFormError: the visible units have no density in closed form.
        """
        self._need_units("visible", visible)
        return -_log_density(self.visible, visible) - self._log_partition_of_hidden(visible)

    def _log_partition_of_hidden(self, visible: Tensor) -> Tensor:
        return _rise(self.hidden, _product(visible, self.weight))

    # The laws of one layer given the other.

    def hidden_field(self, visible: Float[Tensor, "*items V"]) -> Float[Tensor, "*items H"]:
        """Wᵀv: the eta of the hidden units, whose law is `hidden.tilt` of it (B8)."""
        self._need_units("visible", visible)
        return _product(visible, self.weight)

    def visible_field(self, hidden: Float[Tensor, "*items H"]) -> Float[Tensor, "*items V"]:
        """Wh: the eta of the visible units."""
        self._need_units("hidden", hidden)
        return _product(hidden, self.weight.mT)

    def sample_hidden(
        self, visible: Float[Tensor, "*items V"], generator: torch.Generator | None = None
    ) -> Float[Tensor, "*items H"]:
        """Exact draws of the hidden units given the visible ones. Raises ValueError at units that are not finite."""
        return self.hidden.sample(_finite("visible", self.hidden_field(visible)), generator=generator)

    def sample_visible(
        self, hidden: Float[Tensor, "*items H"], generator: torch.Generator | None = None
    ) -> Float[Tensor, "*items V"]:
        """Exact draws of the visible units given the hidden ones. Raises ValueError at units that are not finite."""
        return self.visible.sample(_finite("hidden", self.visible_field(hidden)), generator=generator)

    def _need_units(self, name: Literal["visible", "hidden"], state: Tensor) -> None:
        """Raise unless `state` holds units of the layer called `name`."""
        self._check_device(**{name: floating(name, state)})
        num_visible, num_hidden = self.weight.shape
        num_units = num_hidden if name == "hidden" else num_visible
        if state.ndim == 0 or state.shape[-1] != num_units:
            raise ValueError(f"{name} must have shape (*items, {num_units}), got {tuple(state.shape)}")

    # What the hidden units do to the visible ones.

    def couplings(self, order: int) -> list[Float[Tensor, "..."]]:
        """The effective interactions J⁽¹⁾ … of the visible units: −E(v) = log a(v) + Σ_n ⟨J⁽ⁿ⁾, v⊗…⊗v⟩/n! (B10).

        J⁽ⁿ⁾_{i…k} = Σ_μ κ⁽ⁿ⁾_μ W_{iμ}…W_{kμ} with the cumulants of the hidden units: the Taylor series of their
        log-partition, which converges where |Wᵀv| is below its radius (B2).

        Raises a ValueError at other orders, and at hidden units that depend on each other.
        """
        whole_number("order", order, least=1, most=4)
        count = self.hidden.event_shape[0]
        basis = torch.eye(count, dtype=self.weight.dtype, device=self.weight.device)
        zero = torch.zeros_like(basis)
        covariance = self.hidden.fisher(zero[0])
        if any_true(covariance != covariance.diagonal().diag()):
            raise ValueError(
                f"the hidden units of {type(self.hidden).__name__} are not independent, so there are no effective couplings"
            )
        cumulants = self.hidden.cumulants(zero, basis, order)
        interactions = []
        for n in range(1, order + 1):
            # For n = 3: "m,am,bm,cm->abc".
            letters = "abcd"[:n]
            inputs = ",".join(f"{letter}m" for letter in letters)
            interactions.append(torch.einsum(f"m,{inputs}->{letters}", cumulants[:, n - 1], *[self.weight] * n))
        return interactions

    # The normaliser.

    def log_partition(self) -> Float[Tensor, ""]:
        """log Σ exp(vᵀWh) a b, exactly, by going through all states of the layer that has fewer; 0 at weight 0.

        Raises a ValueError where both layers have more than 2^20.
        """
        num_visible = _num_states(self.visible)
        num_hidden = _num_states(self.hidden)
        if min(num_visible, num_hidden) > sites.MAX_STATES:
            raise ValueError(
                f"an exact normaliser needs a layer of at most 2^20 states, got {_in_words(num_visible)} visible and "
                f"{_in_words(num_hidden)} hidden; `estimate_log_partition` has no such bound"
            )
        # The states of one layer are listed; the other layer is integrated out in closed form.
        if num_hidden < num_visible:
            listed = self.hidden
            integrated = self.visible
            weight = self.weight.mT
        else:
            listed = self.visible
            integrated = self.hidden
            weight = self.weight
        block_log_partitions = [
            torch.logsumexp(_log_density(listed, block) + _rise(integrated, block @ weight), 0)
            for block in sites.state_blocks(listed, weight)
        ]
        return torch.stack(block_log_partitions).logsumexp(0)

    def estimate_log_partition(
        self,
        chains: int = 1000,
        *,
        schedule: int = 1000,
        method: Literal["importance", "sequential"] = "importance",
        generator: torch.Generator | None = None,
    ) -> AnnealResult:
        """log Σ exp(vᵀWh) a b with its standard error, from chains whose weight W grows from 0.

        `AnnealResult.position` holds visible units, `AnnealResult.history` a record of each step of the schedule. "importance":
        annealed importance sampling; "sequential": sequential Monte Carlo, chains in 16 groups, within which those that
        have lost their weight are replaced. `chains` is at least 2, for "sequential" a multiple of 16.
        """
        choice("method", method, "importance", "sequential")
        if whole_number("chains", chains) < 2 or (method == "sequential" and chains % 16):
            raise ValueError(f"chains must be at least 2, and a multiple of 16 for 'sequential', got {chains}")
        zero = self.weight.new_zeros(chains, *self.visible.event_shape)

        def machine(t: float) -> BoltzmannMachine:
            return BoltzmannMachine(self.visible, self.hidden, t * self.weight)

        def path(visible: Tensor, t: float) -> Tensor:
            # Relative to a(v), which does not change along the path.
            return machine(t)._log_partition_of_hidden(visible)

        def move(visible: Tensor, t: float, generator: torch.Generator | None) -> Tensor:
            # A sweep of Gibbs sampling, which leaves the law at t as it is.
            annealed = machine(t)
            hidden = annealed.sample_hidden(visible, generator)
            return annealed.sample_visible(hidden, generator)

        with torch.no_grad():
            start = self.visible.sample(zero, generator=generator)
            groups = None if method == "importance" else 16
            return inference.anneal(start, path, move, schedule=schedule, groups=groups, generator=generator)


def _num_states(measure: Measure) -> float:
    """Number of states of a layer; infinite if it is infinite or not known."""
    number = sites.num_states(measure)
    if number is None:
        return math.inf
    return number


def _in_words(number: float) -> str:
    if number == math.inf:
        return "infinitely many"
    return str(number)


def _product(units: Tensor, weight: Tensor) -> Tensor:
    """units @ weight in the wider of their dtypes: units are data, which need not have the weight's dtype."""
    dtype = torch.promote_types(units.dtype, weight.dtype)
    return units.to(dtype) @ weight.to(dtype)


def _rise(measure: Measure, eta: Tensor) -> Tensor:
    """A(eta) − A(0): the log-partition of the measure, normalised to a probability."""
    # A(0) is the same for all items: one of them is enough, and broadcasts.
    first_item = eta[..., :1, :] if eta.ndim > 1 else eta
    return measure.log_partition(eta) - measure.log_partition(torch.zeros_like(first_item))


def _log_density(measure: Measure, point: Tensor) -> Tensor:
    """The log-density of the measure itself, which is its tilt by 0."""
    return measure.log_prob(torch.zeros_like(point), point)


def _finite(name: str, field: Tensor) -> Tensor:
    """The field of the layer's units, if all of it is finite; or an error."""
    if any_true(~field.isfinite()):
        wrong = int((~unwrapped(field).isfinite()).reshape(-1, field.shape[-1]).any(-1).sum())
        raise ValueError(f"{name} units must be finite and make finite fields; those of {wrong} items do not")
    return field
