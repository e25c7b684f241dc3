"""Operators that move each token by itself, and layers one after the other."""

from collections.abc import Callable, Iterable, Iterator
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.energy.activations import Activation, Identity
from massieu.measures import Gaussian, MissingFormError
from massieu.measures.value import static_field
from massieu.ops.sharded.keys import Processes
from massieu.population.operator import (
    AffineMap,
    Map,
    Operator,
    ParticleMoments,
    Value,
    admit,
    affine_of,
    apply,
    apply_sharded,
    need_law,
    need_map,
    need_sharded,
    pushed,
)


class Normalisation(Value):
    """x ↦ gain ⊙ ∇L(x) + bias: an activation, then a gain and a bias for each coordinate, as models' norms have them.

    With gains that differ it is no gradient, and so no `Activation`. Use `create`.

    Attributes:
        activation: ∇L.
        gain, bias: Shape (d).
    """

    activation: Activation
    gain: Float[Tensor, "d"]
    bias: Float[Tensor, "d"]

    @classmethod
    def create(cls, activation: Activation, gain: Float[Tensor, "d"], bias: Float[Tensor, "d"] | None = None) -> Self:
        """Of no bias by default.

        Raises:
            ValueError: gain and bias are not vectors of one length.
            TypeError: something else than an activation.
        """
        if not isinstance(activation, Activation):
            raise TypeError(f"activation must be an Activation, got {type(activation).__name__}")
        bias = torch.zeros_like(gain) if bias is None else bias
        if gain.ndim != 1 or bias.shape != gain.shape:
            raise ValueError(
                f"gain and bias must be vectors of one length, got {tuple(gain.shape)} and {tuple(bias.shape)}"
            )
        return cls(activation, gain, bias)

    def __call__(self, particles: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """The particles after it, at least float32.

        Raises:
            ValueError, TypeError: another shape, or not floating-point.
        """
        x = admit(self, particles, len(self.gain), self.gain.dtype)
        return self.gain.to(x.dtype) * self.activation(x) + self.bias.to(x.dtype)

    def sharded(
        self, particles: Float[Tensor, "*batch n d"], *, group: Processes = None
    ) -> Float[Tensor, "*batch n d"]:
        """The call: tokens do not meet."""
        return self(particles)

    def affine(self, law: ParticleMoments) -> AffineMap:
        """As an affine map, for a law of that batch.

        Raises:
            MissingFormError: the activation is not affine.
        """
        matrix, offset = affine_of(self.activation, law)
        gain, bias = self.gain.to(matrix.dtype), self.bias.to(matrix.dtype)
        return AffineMap(gain.unsqueeze(-1) * matrix, gain * offset + bias)

    def gaussian(self, law: Gaussian) -> Gaussian:
        """The law after it.

        Raises:
            MissingFormError: the activation is not affine.
            ValueError, TypeError: a law in another number of dimensions, or another measure.
        """
        before = need_law(self, law, len(self.gain), self.gain.dtype)
        return Gaussian.create(*pushed(self.affine(before), before))


class FeedForward(Value):
    """x_i ← contraction(x_i + step_size·function(normalisation(x_i))): every token by itself (S20, S21). Use `create`.

    Attributes:
        function: Any map of (*batch, n, d) to the same shape that treats every token alike, such as a module.
        step_size: Shape ().
        normalisation, contraction: As in `AttentionLayer`.
    """

    function: Callable[[Tensor], Tensor] = static_field()
    step_size: Float[Tensor, ""]
    normalisation: Map
    contraction: Map

    @classmethod
    def create(
        cls,
        function: Callable[[Tensor], Tensor],
        *,
        step_size: Float[Tensor, ""] | float = 1.0,
        normalisation: Map | None = None,
        contraction: Map | None = None,
    ) -> Self:
        """Normalisation and contraction are the identity by default.

        Raises:
            ValueError: `step_size` is not one number.
            TypeError: the function cannot be called; a map of another type.
        """
        if not callable(function):
            raise TypeError(f"function must be callable, got {type(function).__name__}")
        if not isinstance(step_size, Tensor):
            step_size = torch.tensor(step_size, dtype=torch.float64)  # it takes the dtype of what it multiplies
        if step_size.ndim:
            raise ValueError(f"step_size must be one number, got shape {tuple(step_size.shape)}")
        normalisation = Identity() if normalisation is None else normalisation
        contraction = Identity() if contraction is None else contraction
        need_map("normalisation", normalisation)
        need_map("contraction", contraction)
        return cls(function, step_size, normalisation, contraction)

    def __call__(self, particles: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """The particles after it; at least float32, unless the function gives less.

        Raises:
            ValueError, TypeError: another shape, or not floating-point; the function changes the shape.
        """
        x = admit(self, particles, None, torch.float32)
        return apply(self.contraction, self._step(x, apply(self.normalisation, x)))

    def sharded(
        self, particles: Float[Tensor, "*batch n d"], *, group: Processes = None
    ) -> Float[Tensor, "*batch n d"]:
        """The same for this process's particles of a population spread over a group.

        Raises:
            ValueError, TypeError: as the call; a map that needs the whole population.
        """
        need_sharded(self.normalisation, self.contraction)
        x = admit(self, particles, None, torch.float32)
        moved = self._step(x, apply_sharded(self.normalisation, x, group))
        return apply_sharded(self.contraction, moved, group)

    def gaussian(self, law: Gaussian) -> Gaussian:
        """There is none.

        Raises:
            MissingFormError: always: a function of each token, of which nothing is known, keeps no law Gaussian.
        """
        raise MissingFormError("FeedForward is not affine: a Gaussian law does not stay Gaussian under it")

    def _step(self, x: Tensor, z: Tensor) -> Tensor:
        update = self.function(z)
        if not isinstance(update, Tensor):
            raise TypeError(f"function must give a tensor, got {type(update).__name__}")
        if update.shape != x.shape:
            raise ValueError(f"function must keep the shape {tuple(x.shape)} of particles, got {tuple(update.shape)}")
        return x + self.step_size.to(x.device, update.dtype) * update


class Composition(Value):
    """Operators one after the other: untied layers (`create`), or one operator again and again (`repeat`)."""

    operators: tuple[Operator, ...]

    @classmethod
    def create(cls, operators: Iterable[Operator]) -> Self:
        """The first one acts first.

        Raises:
            TypeError: one of them is no operator.
        """
        operators = tuple(operators)
        for each in operators:
            if not isinstance(each, Operator):
                raise TypeError(f"operators must have a call and a method gaussian, got {type(each).__name__}")
        return cls(operators)

    @classmethod
    def repeat(cls, operator: Operator, times: int) -> Self:
        """Tied layers.

        Raises:
            ValueError: `times` is negative.
            TypeError: it is no operator.
        """
        if times < 0:
            raise ValueError(f"times must not be negative, got {times}")
        return cls.create([operator] * times)

    def __call__(self, particles: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """The particles after all of them.

        Raises:
            ValueError, TypeError: as the operators do.
        """
        for operator in self.operators:
            particles = operator(particles)
        return particles

    def path(self, particles: Float[Tensor, "*batch n d"]) -> Iterator[Float[Tensor, "*batch n d"]]:
        """The particles after each of them, one state at a time."""
        for operator in self.operators:
            particles = operator(particles)
            yield particles

    def sharded(
        self, particles: Float[Tensor, "*batch n d"], *, group: Processes = None
    ) -> Float[Tensor, "*batch n d"]:
        """This process's particles, of a population spread over a group, after all of them.

        Raises:
            ValueError, TypeError, RuntimeError: as the operators do; one that needs the whole population.
        """
        need_sharded(*self.operators)
        for operator in self.operators:
            particles = apply_sharded(operator, particles, group)
        return particles

    def gaussian(self, law: Gaussian) -> Gaussian:
        """The law after all of them.

        Raises:
            MissingFormError: one of them keeps no law Gaussian.
        """
        for operator in self.operators:
            law = operator.gaussian(law)
        return law
