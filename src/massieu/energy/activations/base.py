"""What every activation offers, what its author writes, and measures as activations."""

from abc import abstractmethod
from typing import Any, ClassVar, Self, final

import torch
from jaxtyping import Float
from torch import Tensor

from massieu import duality
from massieu.energy.base import is_potential
from massieu.foundation.arguments import check_one_device, described, floating
from massieu.foundation.doors import door, text
from massieu.foundation.values import Value, need_batch
from massieu.measures import Gaussian, Measure, MissingFormError, Sphere, Spin

_ROUNDINGS = 16
"""Number of roundings by which a point may lie outside the range of a map and still count as inside."""


class Activation(Value):
    """A map ∇L. Authors write `_activate` (∇L), `_lagrangian` (L) and `_conjugate` (L*); hooks get float32 or wider.

    Example:
        >>> import torch
        >>> from massieu.energy.activations import Activation
        >>> class Square(Activation):
        ...     def _activate(self, x):
        ...         return 2 * x
        ...
        ...     def _lagrangian(self, x):
        ...         return x.square().sum(-1)
        ...
        ...     def _conjugate(self, y, rounding):
        ...         return y.square().sum(-1) / 4
        ...
        ...     lipschitz = torch.tensor(2.0)
        >>> Square().conjugate(Square()(torch.tensor([3.0]))).item()
        9.0
    """

    _family = "activations"

    trained: ClassVar[dict[str, bool]] = {}
    """The fields that `massieu.nn.Activation` trains, and whether they must stay positive; others are statistics."""

    @final
    def __call__(self, x: Float[Tensor, "*batch_query d"]) -> Float[Tensor, "*batch_query d"]:
        """∇L(x), at least float32.

        Raises:
            ValueError: `x` has not the shape (*batch, *query, d).
            TypeError: it is not floating-point.
        """
        activation, x, _ = self._admit(x)
        return activation._activate(x)

    @final
    def lagrangian(self, x: Float[Tensor, "*batch_query d"]) -> Float[Tensor, "*batch_query"]:
        """L(x), convex and twice differentiable. Raises as the call."""
        activation, x, _ = self._admit(x)
        return activation._lagrangian(x)

    @final
    def conjugate(self, y: Float[Tensor, "*batch_query d"]) -> Float[Tensor, "*batch_query"]:
        """L*(y) = sup x·y − L(x): finite on the closed range of the map; +inf elsewhere.

        A point that lies outside by roundings counts as inside: of float32 in float64 too, since what a map gave in
        float32 may have been widened. Raises as the call.
        """
        activation, y, rounding = self._admit(y)
        return activation._conjugate(y, rounding)

    @property
    @abstractmethod
    def lipschitz(self) -> Float[Tensor, "*batch"]:
        """A Lipschitz constant of the map: sup ‖∇²L‖ or, where that depends on the dimension, its largest value."""

    @property
    def quadratic(self) -> bool:
        """Whether L is quadratic and the map affine, so that descent allows a damping up to 2."""
        return False

    @abstractmethod
    def _activate(self, x: Tensor) -> Tensor:
        """∇L(x)."""

    @abstractmethod
    def _lagrangian(self, x: Tensor) -> Tensor:
        """L(x)."""

    @abstractmethod
    def _conjugate(self, y: Tensor, rounding: float) -> Tensor:
        """L*(y), where `rounding` is that of a number of size one."""

    def _admit(self, x: Tensor) -> tuple[Self, Tensor, float]:
        """The map and x in one dtype of at least float32, and how far roundings may have moved a point of size one."""
        name = type(self).__name__
        if floating(f"x of {name}", x).ndim == 0:
            raise ValueError(f"{name} needs x of shape (*batch, *query, d), got a scalar")
        for parameter in self._tensors():
            # A single number is taken to the device of x, unless it is on `meta` and has no value to take.
            if parameter.numel() > 1 or parameter.is_meta:
                check_one_device(x=x, **{name: parameter})
        need_batch(name, "x", x.shape, *self._shape)
        activation, promoted = self._promoted(x, numbers_follow=True)
        rounding = max(torch.finfo(x.dtype).eps, torch.finfo(torch.float32).eps)
        return activation, promoted, _ROUNDINGS * rounding

    @property
    def _shape(self) -> tuple[torch.Size | tuple[int, ...], tuple[int | str]]:
        """The batch shape and the event shape, as `need_batch` takes them: the first tensor's shape, and any width "d"."""
        tensors = self._tensors()
        if not tensors:
            return (), ("d",)
        return tensors[0].shape, ("d",)


class MeasureActivation(Activation):
    """The mean map x ↦ ∇A(x) of a measure as an activation; its Lagrangian is the log-partition A.

    Any other potential serves too, such as `massieu.energy.SparseAtoms`, whose conjugate is not known. Functions that take an
    activation also take a measure, without this class.

    Attributes:
        measure: A measure, or another potential.

    Example:
        >>> import torch
        >>> from massieu.energy.activations import MeasureActivation
        >>> from massieu.measures import Gaussian
        >>> MeasureActivation(Gaussian.create(torch.zeros(2), torch.tensor([1.0, 2.0])))(torch.ones(2)).tolist()
        [1.0, 2.0]
    """

    measure: Any

    @classmethod
    @door(name=text)
    def of(cls, name: str, value: object) -> Activation:
        """An activation as it is, a measure or another potential as one.

        Raises:
            TypeError: it is neither; the message begins with `name`.
        """
        if isinstance(value, Activation):
            return value
        if is_potential(value):
            return cls(value)
        raise TypeError(f"{name} must be an activation or a measure, got {described(value)}")

    @property
    def lipschitz(self) -> Tensor:
        """The largest eigenvalue of the covariance for a `Gaussian`, 1 for a `Spin`, radius²/d for a `Sphere`.

        Raises:
            MissingFormError: the constant is not known, for any other measure.
        """
        measure = self.measure
        if isinstance(measure, Gaussian):
            return torch.linalg.matrix_norm(measure.fisher(torch.zeros_like(measure.location)), ord=2)
        if isinstance(measure, Spin):
            return torch.ones(measure.batch_shape, device=measure.field.device)
        if isinstance(measure, Sphere):
            # The covariance at eta = 0; longer eta concentrate the law.
            return measure.radius.square() / measure.dim
        raise MissingFormError(f"the Lipschitz constant of the mean of {type(measure).__name__} is not known")

    @property
    def quadratic(self) -> bool:
        return isinstance(self.measure, Gaussian)

    def _admit(self, x: Tensor) -> tuple[Self, Tensor, float]:
        # The measure checks x itself. Not promoted: from x's dtype its conjugate knows the rounding to allow for.
        return self, x, 0.0

    def _activate(self, x: Tensor) -> Tensor:
        return self.measure.mean(x)

    def _lagrangian(self, x: Tensor) -> Tensor:
        return self.measure.log_partition(x)

    def _conjugate(self, y: Tensor, rounding: float) -> Tensor:
        if not isinstance(self.measure, Measure):
            raise MissingFormError(f"the conjugate of {type(self.measure).__name__} is not known")
        return duality.conjugate(self.measure, y)
