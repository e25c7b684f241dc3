"""Operators that move each token by itself, and layers one after the other."""

from collections.abc import Callable, Iterable, Iterator
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.energy.activations import Activation
from massieu.foundation.arguments import floating, instance, whole_number
from massieu.foundation.doors import sequence
from massieu.foundation.values import static_field
from massieu.measures import Gaussian
from massieu.ops.sharded.collectives import Peers
from massieu.population.operator import (
    AffineMap,
    Map,
    Operator,
    ParticleMoments,
    affine_of,
    apply,
    as_map,
    one_number,
)
from massieu.population.reading import Processes


class Normalisation(Operator):
    """A model's norm layer as an operator: an activation, then a gain and a bias for each coordinate.

    With different gains the map is no gradient, and so no `Activation`. It is affine if the activation is. Use `create`.

    Attributes:
        activation: ∇L.
        gain, bias: Shape (d).

    Example:
        >>> import torch
        >>> from massieu.energy.activations import Identity
        >>> from massieu.population import Normalisation
        >>> Normalisation.create(Identity.create(), torch.tensor([1.0, 2.0]))(torch.ones(1, 2)).tolist()
        [[1.0, 2.0]]
    """

    activation: Activation
    gain: Float[Tensor, "d"]
    bias: Float[Tensor, "d"]

    @classmethod
    def create(cls, activation: Activation, gain: Float[Tensor, "d"], bias: Float[Tensor, "d"] | None = None) -> Self:
        """A normalisation with these gains and biases; no bias by default.

        Raises:
            ValueError: gain and bias are not vectors of one length.
            TypeError: activation is not an `Activation`, or gain or bias is not a floating-point tensor.
        """
        instance("activation", activation, Activation, "an Activation")
        floating("gain", gain)
        if bias is None:
            bias = torch.zeros_like(gain)
        floating("bias", bias)
        if gain.ndim != 1 or bias.shape != gain.shape:
            raise ValueError(
                f"gain and bias must be vectors of one length, got {tuple(gain.shape)} and {tuple(bias.shape)}"
            )
        return cls(activation, gain, bias)

    def affine(self, law: ParticleMoments) -> AffineMap:
        matrix, offset = affine_of(self.activation, law)
        gain = self.gain.to(matrix.dtype)
        bias = self.bias.to(matrix.dtype)
        return AffineMap(gain.unsqueeze(-1) * matrix, gain * offset + bias)

    @property
    def _like(self) -> Tensor:
        return self.gain

    def _moved(self, particles: Tensor, group: Peers | None) -> Tensor:
        return self.gain.to(particles.dtype) * self.activation(particles) + self.bias.to(particles.dtype)


class FeedForward(Operator):
    """A feed-forward layer as an operator: x_i ← activation(x_i + step_size·f(normalisation(x_i))) (S20, S21). Use `create`.

    Nothing is known of the function, so no law is known to stay Gaussian. The result is at least float32, unless the function
    returns a narrower dtype. A call raises a ValueError if the function changes the shape, a TypeError if it returns no tensor.

    Attributes:
        function: Any map of (*batch, n, d) to the same shape that treats every token alike, such as a module.
        step_size: Shape ().
        normalisation, activation: As in `AttentionLayer`.

    Example:
        >>> import torch
        >>> from massieu.population import FeedForward
        >>> FeedForward.create(torch.relu, step_size=0.5)(torch.tensor([[-2.0, 2.0]])).tolist()
        [[-2.0, 3.0]]
    """

    function: Callable[[Tensor], Tensor] = static_field()
    step_size: Float[Tensor, ""]
    normalisation: Map
    activation: Map

    @classmethod
    def create(
        cls,
        function: Callable[[Tensor], Tensor],
        *,
        step_size: Float[Tensor, ""] | float = 1.0,
        normalisation: Map | None = None,
        activation: Map | None = None,
    ) -> Self:
        """Normalisation and activation are the identity by default.

        Raises:
            ValueError: `step_size` is not one finite number.
            TypeError: the function cannot be called; a map of another type.
        """
        if not callable(function):
            raise TypeError(f"function must be callable, got {type(function).__name__}")
        # A Python number is kept in float64; `_moved` casts it to the dtype of what it multiplies.
        like = step_size if isinstance(step_size, Tensor) else torch.zeros((), dtype=torch.float64)
        step_size = one_number("step_size", step_size, like)
        return cls(function, step_size, as_map("normalisation", normalisation), as_map("activation", activation))

    def _moved(self, particles: Tensor, group: Peers | None) -> Tensor:
        update = self.function(apply(self.normalisation, particles, group))
        if not isinstance(update, Tensor):
            raise TypeError(f"function must give a tensor, got {type(update).__name__}")
        if update.shape != particles.shape:
            shape = tuple(particles.shape)
            raise ValueError(f"function must keep the shape {shape} of particles, got {tuple(update.shape)}")
        moved = particles + self.step_size.to(particles.device, update.dtype) * update
        return apply(self.activation, moved, group)


class Composition(Operator):
    """Operators one after the other: different layers (`create`), or one operator several times (`repeat`).

    The law after all is Gaussian if it is after each; errors are those of the operators.

    Example:
        >>> import torch
        >>> from massieu.population import Composition, FeedForward
        >>> Composition.repeat(FeedForward.create(torch.relu), 3)(torch.tensor([[-1.0, 1.0]])).tolist()
        [[-1.0, 8.0]]
    """

    operators: tuple[Operator, ...]

    @classmethod
    def create(cls, operators: Iterable[Operator]) -> Self:
        """The first operator acts first; raises a TypeError if one of them is no operator."""
        operators = tuple(sequence("operators", operators))
        for operator in operators:
            instance("each of operators", operator, Operator, "an Operator")
        return cls(operators)

    @classmethod
    def repeat(cls, operator: Operator, times: int) -> Self:
        """One operator applied `times` times: tied layers.

        Raises:
            TypeError: `times` is no whole number, or the operator is none.
            ValueError: `times` is negative.
        """
        return cls.create([operator] * whole_number("times", times, least=0))

    def path(self, particles: Float[Tensor, "*batch n d"]) -> Iterator[Float[Tensor, "*batch n d"]]:
        """The particles after each operator, one state at a time."""
        for operator in self.operators:
            particles = operator(particles)
            yield particles

    def sharded(
        self, particles: Float[Tensor, "*batch n d"], *, group: Processes = None
    ) -> Float[Tensor, "*batch n d"]:
        self.check_shared()
        for operator in self.operators:
            particles = operator.sharded(particles, group=group)
        return particles

    def gaussian(self, law: Gaussian) -> Gaussian:
        for operator in self.operators:
            law = operator.gaussian(law)
        return law

    def _moved(self, particles: Tensor, group: Peers | None) -> Tensor:
        for operator in self.operators:
            particles = apply(operator, particles, group)
        return particles
