"""The Hopfield energy of any memory: its descent map is attention over what is stored."""

from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils import _pytree as pytree

from massieu import duality
from massieu.energy.base import Energy, Potential, promoted
from massieu.energy.contraction import Contraction, Identity
from massieu.energy.contraction.base import align, positive
from massieu.energy.rise import log_partition, rise
from massieu.measures import Atoms, Gaussian, Measure
from massieu.solve.arguments import floating


class HopfieldEnergy(Energy):
    """E(x) = R*(x) − (A(scale·x) − A(0))/scale + max_n R(x_n), with descent map T(x) = ∇R(∇A(scale·x)).

    A is the log-partition of the memory, R that of the reference, R* its conjugate. Stored patterns and the identity make it
    the modern Hopfield energy ½‖x‖² − lse(scale·Xx)/scale + log(N)/scale + ½ max‖x_n‖², and T softmax attention with keys =
    values (B5, B11). With a normalisation as reference, T is attention followed by it.

    T is the convex–concave procedure: −A lies below its tangents, and T minimises R* − x·∇A. So E falls by at least the
    Bregman divergence of R* from T(x) to x; ½‖x − T(x)‖² for the identity. For stored patterns E is never negative; for a
    memory without points the last constant, whose purpose that is, is left out.

    The difference of the log-partitions keeps its digits at every scale (`massieu.energy.rise`), and so do its derivatives.

    Masks, padding and multiplicities are log-weights of the memory, heads its batch dimensions. A memory that is masked
    altogether remembers nothing: E = R*(x), T(x) = ∇R(0). Use `create`, which checks.

    Attributes:
        memory: What is stored.
        reference: Where ∇R maps to is where states live; E is +inf elsewhere.
        scale: The inverse temperature β, shape of the memory's batch.
    """

    memory: Any
    reference: Any
    scale: Float[Tensor, "*batch"]

    @classmethod
    def create(
        cls,
        memory: Potential | Float[Tensor, "*batch N d"],
        *,
        reference: Measure | Contraction | None = None,
        scale: Float[Tensor, "..."] | float = 1.0,
    ) -> Self:
        """The energy of a memory.

        Args:
            memory: Any potential; a tensor stands for patterns of weight one, `Atoms.create(memory)`.
            reference: A measure or a contraction; the identity by default.
            scale: The inverse temperature, positive; a tensor broadcasts against the memory's batch, as one for each head
                does. Gradients flow to it.

        Raises:
            ValueError: no pattern, a NaN, a scale that is not positive or does not broadcast, a reference on another space.
            TypeError: the memory or the reference is no potential.
        """
        if isinstance(memory, Tensor):
            memory = Atoms.create(floating("memory", memory))
        if not (hasattr(memory, "log_partition") and hasattr(memory, "mean")):
            raise TypeError(f"memory must be a tensor of patterns or a potential, got {type(memory).__name__}")
        if reference is None:
            reference = Identity()
        if not isinstance(reference, Measure | Contraction):
            raise TypeError(f"reference must be a measure or a contraction, got {type(reference).__name__}")
        batch = tuple(getattr(memory, "batch_shape", ()))
        if isinstance(reference, Measure):
            _check_reference(reference, memory, batch)
        scale = _like(memory, scale)
        scale = positive("scale", scale)
        paired = zip(reversed(scale.shape), reversed(batch), strict=False)
        if scale.ndim > len(batch) or any(own not in (1, size) for own, size in paired):
            raise ValueError(f"scale of shape {tuple(scale.shape)} does not broadcast to the memory's batch {batch}")
        return cls(memory, reference, scale.expand(batch))

    @property
    def batch_shape(self) -> torch.Size:
        """Shape of the batch of memories, such as (batch, heads)."""
        return self.scale.shape

    @property
    def _event_dims(self) -> int:
        return len(getattr(self.memory, "event_shape", (1,)))

    @property
    def _dampings(self) -> str:
        quadratic = isinstance(self.reference, Gaussian) or getattr(self.reference, "quadratic", False)
        return "(0, 2)" if quadratic else "(0, 1]"

    def _step(self, state: Tensor) -> Tensor:
        return self.reference.mean(self.memory.mean(self._eta(state)))

    def _energy(self, state: Tensor) -> Tensor:
        self._check_shape(state)
        # The reference is told the state's own dtype, of which roundings may lie outside its range.
        own = conjugate(self.reference, state)
        own = own - rise(self.memory, promoted(state), promoted(self.scale), self._event_dims)
        return own + align(self._ceiling, own.ndim)

    def _force(self, state: Tensor) -> Tensor:
        slope = torch.func.grad(lambda point: conjugate(self.reference, point).sum())(state)
        return self.memory.mean(self._eta(state)).to(slope.dtype) - slope

    def _eta(self, state: Tensor) -> Tensor:
        """The memory's natural parameter."""
        self._check_shape(state)
        return promoted(state) * align(self.scale, state.ndim)

    def _check_shape(self, state: Tensor) -> None:
        batch, shape = tuple(self.batch_shape), tuple(state.shape)
        event = tuple(getattr(self.memory, "event_shape", ("d",)))
        known = hasattr(self.memory, "event_shape")
        fits = len(shape) >= len(batch) + len(event) and shape[: len(batch)] == batch
        if not fits or (known and shape[len(shape) - len(event) :] != event):
            raise ValueError(f"Hopfield needs a state of shape {batch} + queries + {event}, got {shape}")

    @property
    def constant(self) -> Float[Tensor, "*batch"]:
        """A(0)/scale + max_n R(x_n): what the energy has beside R* − A/scale."""
        event: torch.Size | None = getattr(self.memory, "event_shape", None)
        if event is None:
            return self._ceiling
        origin = self.scale.new_zeros((*self.scale.shape, *event))
        return log_partition(self.memory, origin) / self.scale + self._ceiling

    @property
    def _ceiling(self) -> Float[Tensor, "*batch"]:
        """max_n R(x_n) over the patterns that no mask leaves out; 0 without any."""
        points: Tensor | None = getattr(self.memory, "points", None)
        if points is None:
            return torch.zeros_like(promoted(self.scale))
        kept = self.memory.log_weight > -torch.inf
        ceiling = self.reference.log_partition(points).masked_fill(~kept, -torch.inf).amax(-1)
        return torch.where(kept.any(-1), ceiling, 0.0)


def conjugate(
    reference: Measure | Contraction, state: Float[Tensor, "*batch_query d"]
) -> Float[Tensor, "*batch_query"]:
    """R*(state) of a measure or a contraction: +inf outside the closure of its mean domain.

    Raises:
        ValueError: the state has another shape, or is not finite.
    """
    return duality.conjugate(reference, state) if isinstance(reference, Measure) else reference.conjugate(state)


def _like(memory: Any, scale: Tensor | float) -> Tensor | float:
    """A number as a tensor of the memory's dtype and device."""
    if isinstance(scale, Tensor | bool) or not isinstance(scale, int | float):
        return scale
    leaves = [leaf for leaf in pytree.tree_leaves(memory) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not leaves:
        return float(scale)
    return torch.tensor(
        float(scale), dtype=torch.promote_types(leaves[0].dtype, torch.float32), device=leaves[0].device
    )


def _check_reference(reference: Measure, memory: Any, batch: tuple[int, ...]) -> None:
    event = tuple(getattr(memory, "event_shape", reference.event_shape))
    if tuple(reference.event_shape) != event:
        raise ValueError(f"reference is on vectors of shape {tuple(reference.event_shape)}, the memory on {event}")
    own = tuple(reference.batch_shape)
    if batch[: len(own)] != own:
        raise ValueError(f"the reference's batch {own} is not a prefix of the memory's {batch}")
