"""The Hopfield energy of any memory: its descent map is attention over what is stored."""

import warnings
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils import _pytree as pytree

from massieu.energy.activations import Activation, Identity, MeasureActivation
from massieu.energy.base import Energy, Potential, is_potential, promoted
from massieu.energy.rise import log_partition, rise
from massieu.errors import OverlapWarning
from massieu.foundation.arguments import as_tensor, described, expanded, floating, positive
from massieu.foundation.guesses import meant
from massieu.foundation.transforms import in_functorch, may_be_differentiated, values_are_readable
from massieu.foundation.values import align, check_prefix, need_batch, promoted_dtype
from massieu.measures import Atoms, Measure

MOST_PRODUCTS = 1 << 30
"""Products of numbers for which it is tried whether patterns overlap: below a second on one core."""
MOST_PAIRS = 1 << 24
"""Pairs of patterns for which it is tried: several matrices of this size are in memory at once, 64 MiB each in float32."""


class HopfieldEnergy(Energy):
    """The Hopfield energy of any memory under any reference; its descent step is attention followed by ∇L.

    E(x) = L*(x) − (A(scale·x) − A(0))/scale + max_n L(x_n), with descent map T(x) = ∇L(∇A(scale·x)). A is the
    log-partition of the memory, L the Lagrangian of the reference, L* its conjugate. Stored patterns and the identity
    make it the modern Hopfield energy ½‖x‖² − lse(scale·Xx)/scale + log(N)/scale + ½ max‖x_n‖², and T softmax attention
    with keys = values (B5, B11). With a normalisation as reference, T is attention followed by it.

    T is the convex–concave procedure: −A lies below its tangents, and T minimises L* − x·∇A. So E falls by at least the
    Bregman divergence of L* from T(x) to x; ½‖x − T(x)‖² for the identity. The last constant makes E ≥ 0 for stored
    patterns; a memory without points has none.

    The difference of the log-partitions keeps its digits at every scale (`massieu.energy.rise`), and so do its derivatives.

    Masks, padding and multiplicities are log-weights of the memory, heads its batch dimensions. A memory that is masked
    altogether remembers nothing: E = L*(x), T(x) = ∇L(0). Use `create`, which checks.

    Attributes:
        memory: What is stored.
        reference: ∇L, an activation. Where it maps to is where states live; E is +inf elsewhere.
        scale: The inverse temperature β, shape of the memory's batch.

    Example:
        >>> import torch
        >>> from massieu.energy import HopfieldEnergy
        >>> memory = HopfieldEnergy.create(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), scale=20.0)
        >>> [round(x, 3) for x in memory.retrieve(torch.tensor([0.7, 0.2])).state.tolist()]
        [1.0, 0.0]
    """

    memory: Any
    reference: Activation
    scale: Float[Tensor, "*batch"]

    @classmethod
    @meant(beta="`scale` here: the inverse temperature")
    def create(
        cls,
        memory: Potential | Float[Tensor, "*batch N d"],
        *,
        reference: Activation | Measure | None = None,
        scale: Float[Tensor, "..."] | float | None = None,
    ) -> Self:
        """The energy of a memory.

        Args:
            memory: Any potential; a tensor stands for patterns of weight one, `Atoms.create(memory)`.
            reference: An activation, or a measure, whose mean map is one; the identity by default.
            scale: The inverse temperature, positive; d^-½ by default. A tensor broadcasts to the memory's batch, as one for
                each head does. Gradients flow to it.

        Warns:
            OverlapWarning: it is not sure that descent from a pattern stays near it at this scale. The message names a scale
                at which it does, within half the separation Δ of `massieu.energy.bounds` over the distance to another one.
                Tried for tensors of patterns on the CPU that do not train, under the identity, if N² is at most 2²⁴ and N²·d
                at most 2³⁰.

        Raises:
            ValueError: no pattern, a NaN, a scale that is not positive or does not broadcast, a reference on another space.
            TypeError: the memory or the reference is no potential.
        """
        patterns = memory if isinstance(memory, Tensor) else None
        if isinstance(memory, Tensor):
            memory = Atoms.create(floating("memory", memory))
        if not is_potential(memory):
            raise TypeError(f"memory must be a tensor of patterns or a potential, got {described(memory)}")
        if reference is None:
            activation = Identity()
        else:
            activation = MeasureActivation.of("reference", reference)
        if isinstance(activation, MeasureActivation):
            _check_reference(activation.measure, memory)
        inverse_temperature = checked_scale(memory, scale)
        if patterns is not None and reference is None:
            _warn_of_overlap(patterns, inverse_temperature)
        return cls(memory, activation, inverse_temperature)

    @classmethod
    def euclidean(
        cls,
        patterns: Float[Tensor, "*batch N d"],
        log_weight: Float[Tensor, "*batch N"] | None = None,
        *,
        scale: Float[Tensor, "..."] | float | None = None,
    ) -> Self:
        """The energy −log Σ w_n exp(−scale·‖x − x_n‖²/2)/scale, with its constant: retrieval by distance.

        It is that of `create` for the log-weights log w_n − scale·‖x_n‖²/2. Patterns of any length attract alike, where the
        dot product prefers long ones: raw images are retrieved without being normalised. exp(−scale·E) is a mixture of
        Gaussians about the patterns of weights w, and the map its posterior mean: the denoiser of noise of variance
        1/scale (B6).

        Args:
            patterns: Best about their mean: the squares' rounding grows with the distance to the origin.
            log_weight: log w; −∞ hides a pattern. By default all weigh the same.
            scale: As for `create`. It has the unit of 1/patterns²: dividing patterns by 16 asks for 256 times the scale.

        Warns:
            OverlapWarning: as `create`, where all weigh the same.

        Raises:
            TypeError, ValueError: as `create`.

        Example:
            >>> import torch
            >>> from massieu.energy import HopfieldEnergy
            >>> stored = torch.tensor([[1.0, 0.0], [3.0, 0.0]])  # one in the direction of the other
            >>> one, other = (make(stored, scale=9.0) for make in (HopfieldEnergy.create, HopfieldEnergy.euclidean))
            >>> [round(memory.retrieve(torch.tensor([1.2, 0.0])).state[0].item(), 3) for memory in (one, other)]
            [3.0, 1.0]
        """
        atoms = Atoms.create(floating("patterns", patterns), log_weight)
        scale = checked_scale(atoms, scale)
        if log_weight is None:
            _warn_of_overlap(atoms.points, scale, by_distance=True)
        return cls.create(by_distance(atoms, scale), scale=scale)

    @property
    def batch_shape(self) -> torch.Size:
        """Shape of the batch of memories, such as (batch, heads)."""
        return self.scale.shape

    @property
    def _event_dims(self) -> int:
        return len(self.memory.event_shape)

    @property
    def _dampings(self) -> str:
        return "(0, 2)" if self.reference.quadratic else "(0, 1]"

    def _step(self, state: Tensor) -> Tensor:
        return self.reference(self.memory.mean(self._eta(state)))

    def _energy(self, state: Tensor) -> Tensor:
        self._check_shape(state)
        # Not promoted: from the state's dtype the reference knows by how much rounding may have moved it out of the range.
        conjugate = self.reference.conjugate(state)
        energy = conjugate - rise(self.memory, promoted(state), promoted(self.scale))
        return energy + align(self._largest_lagrangian, energy.ndim)

    def _force(self, state: Tensor) -> Tensor:
        slope = torch.func.grad(lambda point: self.reference.conjugate(point).sum())(state)
        return self.memory.mean(self._eta(state)).to(slope.dtype) - slope

    def _eta(self, state: Tensor) -> Tensor:
        """The natural parameter of the memory, scale·state."""
        self._check_shape(state)
        return promoted(state) * align(self.scale, state.ndim)

    def _check_shape(self, state: Tensor) -> None:
        need_batch("HopfieldEnergy", "a state", state.shape, self.batch_shape, self.memory.event_shape)

    @property
    def constant(self) -> Float[Tensor, "*batch"]:
        """A(0)/scale + max_n L(x_n), the constant of the energy: E = L* − A/scale + constant."""
        origin = self.scale.new_zeros((*self.scale.shape, *self.memory.event_shape))
        return log_partition(self.memory, origin) / self.scale + self._largest_lagrangian

    @property
    def _largest_lagrangian(self) -> Float[Tensor, "*batch"]:
        """max_n L(x_n) over the patterns that are not masked; 0 if there are none."""
        points: Tensor | None = getattr(self.memory, "points", None)
        if points is None:
            return torch.zeros_like(promoted(self.scale))
        unmasked = self.memory.log_weight != -torch.inf
        largest = self.reference.lagrangian(points).masked_fill(~unmasked, -torch.inf).amax(-1)
        return torch.where(unmasked.any(-1), largest, 0.0)


def by_distance(atoms: Atoms, scale: Float[Tensor, "*batch"]) -> Atoms:
    """The patterns as a memory that retrieves by distance, of weights w_n exp(−scale·‖x_n‖²/2)."""
    # −½β‖x − x_n‖² = β x·x_n − ½β‖x_n‖² − ½β‖x‖²: the pattern's part of the square becomes a log-weight.
    square = promoted(atoms.points).square().sum(-1)
    return Atoms.create(atoms.points, atoms.log_weight - 0.5 * scale.unsqueeze(-1) * square)


def checked_scale(memory: Potential, scale: Tensor | float | None) -> Float[Tensor, "*batch"]:
    """The inverse temperature of a memory, d^-½ by default, positive and finite, expanded to its batch; or an error."""
    if scale is None:
        scale = memory.event_shape.numel() ** -0.5
    like = next((leaf for leaf in pytree.tree_leaves(memory) if leaf.is_floating_point()), None)
    if like is not None and not isinstance(scale, Tensor):
        # A number takes the memory's dtype and device.
        scale = as_tensor("scale", scale, like, promoted_dtype(like))
    return expanded("scale", positive("scale", scale), memory.batch_shape, "the memory's batch")


def _warn_of_overlap(
    patterns: Float[Tensor, "*batch N d"], scale: Float[Tensor, "*batch"], *, by_distance: bool = False
) -> None:
    """Warn if a pattern is not sure to be retrieved, where that can be known at little cost; see `HopfieldEnergy.create`.

    The separation Δ_ij of pattern i from j is x_i·x_i − x_i·x_j; `by_distance`, half the square of their distance r_ij. Within
    ρ of x_i, the weight of j is at most exp(−scale·(Δ_ij − r_ij·ρ)), and a step ends within Σ_j r_ij times that of x_i. So a
    ball keeps its states if that sum is at most ρ. Tried with ρ = min_j Δ_ij/(2r_ij), where no exponent is below half its Δ.
    """
    number, size = patterns.shape[-2:]
    pairs = patterns.shape[:-1].numel() * number
    is_cheap = patterns.device.type == "cpu" and pairs <= MOST_PAIRS and pairs * size <= MOST_PRODUCTS
    if number < 2 or not size or not is_cheap or in_functorch() or not values_are_readable(patterns, scale):
        return
    if may_be_differentiated(patterns, scale):
        return
    points = promoted(patterns)
    products = points @ points.mT
    own = products.diagonal(0, -2, -1).unsqueeze(-1)
    # Equal patterns are one up to rounding: retrieving either retrieves the other.
    rounding = 4 * size * torch.finfo(points.dtype).eps * own.abs().amax()
    square = own + own.mT - 2 * products
    is_equal = square <= 4 * rounding
    distance = square.clamp(min=0).sqrt().masked_fill(is_equal, 0)
    separations = (square / 2 if by_distance else own - products).masked_fill(is_equal, torch.inf)
    separation = separations.amin(-1)
    is_covered = separation <= rounding
    radius = (separations / (2 * distance)).amin(-1)
    exponent = scale[..., None, None] * (separations - distance * radius.unsqueeze(-1))
    is_blurred = (distance * torch.exp(-exponent)).masked_fill(is_equal, 0).sum(-1) > radius
    of_all = f"of {separation.numel():,} patterns"
    if bool(is_covered.any()):
        warnings.warn(
            f"{int(is_covered.sum()):,} {of_all} have at least as large a product with another one as with themselves, so that "
            "no scale retrieves them; normalise the patterns, or use HopfieldEnergy.euclidean",
            OverlapWarning,
            stacklevel=4,
        )
    elif bool(is_blurred.any()):
        needed = 2 * torch.log(distance.sum(-1) / radius) / separation
        warnings.warn(
            f"{int(is_blurred.sum()):,} {of_all} overlap too much to be retrieved surely at scale {float(scale.min()):.3g}; a "
            f"scale of {_rounded_up(float(needed[is_blurred].max()))} is enough for each of them",
            OverlapWarning,
            stacklevel=4,
        )


def _rounded_up(number: float) -> str:
    """Three digits, none of them lost: what is enough stays enough."""
    digits = f"{number:.3g}"
    return digits if float(digits) >= number else f"{number * 1.01:.3g}"


def _check_reference(reference: Any, memory: Potential) -> None:
    """Raise unless `reference` is a measure on the memory's space, of a batch that fits the memory's."""
    if not isinstance(reference, Measure):
        raise TypeError(f"reference must be an activation or a measure, got {described(reference)}")
    if reference.event_shape != memory.event_shape:
        raise ValueError(
            f"reference is on vectors of shape {tuple(reference.event_shape)}, "
            f"the memory on {tuple(memory.event_shape)}"
        )
    check_prefix("the reference of a memory", reference.batch_shape, memory.batch_shape)
