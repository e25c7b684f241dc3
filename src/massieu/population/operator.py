"""What acts on a population of tokens, and what follows for a Gaussian law of tokens."""

import dataclasses
from abc import abstractmethod
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.energy.activations import Activation, Identity, MeasureActivation
from massieu.foundation.arguments import as_tensor, check_finite, described, floating, instance
from massieu.foundation.values import Value, promoted_dtype
from massieu.measures import Gaussian, Measure, MissingFormError
from massieu.ops.sharded.collectives import Peers
from massieu.population.reading import Processes, check_agreement


class AffineMap(NamedTuple):
    """x ↦ matrix·x + offset."""

    matrix: Float[Tensor, "*batch d d"]
    offset: Float[Tensor, "*batch d"]


class ParticleMoments(NamedTuple):
    """Mean and covariance of a Gaussian law of particles."""

    mean: Float[Tensor, "*batch d"]
    covariance: Float[Tensor, "*batch d d"]


class Operator(Value):
    """A map of populations of tokens, and, where a Gaussian law stays one, of that law. A value and a pytree.

    An author writes `_moved`, which returns the particles after the operator. An operator that is affine for the
    population of a given law overrides `affine`; `gaussian` follows from it, and attention behind such an operator still
    has a law. An operator that keeps a law Gaussian in another way overrides `gaussian`. Attention or operators inside an
    operator take part in `sharded` by the group that `_moved` gets; an operator that cannot do so sets `needs_all`.

    Example:
        >>> import torch
        >>> from massieu.population import Operator
        >>> class Halve(Operator):
        ...     def _moved(self, particles, group):
        ...         return 0.5 * particles
        >>> Halve()(torch.ones(1, 2)).tolist()
        [[0.5, 0.5]]
    """

    _family = "operators"

    needs_all: ClassVar[bool] = False
    """Whether one process must have the whole population."""

    def __call__(self, particles: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """The particles after the operator, in at least float32; each item of the batch is a population of its own.

        Raises:
            TypeError: the particles are not floating-point.
            ValueError: the particles have another shape, or are on another device than the operator.
        """
        return self._moved(self._admitted(particles), None)

    def sharded(
        self, particles: Float[Tensor, "*batch n d"], *, group: Processes = None
    ) -> Float[Tensor, "*batch n d"]:
        """The same for a population that is spread over processes; each gives and gets any number of its own particles.

        Equal to one process with all particles, to rounding. The objective is the sum of the processes' losses
        (`massieu.ops.sharded`, queries="sharded"): particles get their gradient of it, and the operator's tensors the
        part that comes through this process's particles.

        Args:
            particles: Those of this process.
            group: The processes that share the population; None: all processes.

        Raises:
            TypeError, ValueError: as the call; the operator needs the whole population; there is no process group; the
                operator, or the particles' batch, dimension or dtype, differ between processes.
            RuntimeError: another process refused its arguments, or it died.
        """
        self.check_shared()
        processes = Peers.of(group)
        tensors = self._tensors()
        alike = {"number of parameters": len(tensors)}
        for field in dataclasses.fields(self):
            # A function may hold what belongs to its process alone, so functions are not compared.
            if field.metadata.get("static") and not callable(getattr(self, field.name)):
                alike[field.name] = getattr(self, field.name)
        replicated = {f"parameter {place}": tensor for place, tensor in enumerate(tensors)}
        check = partial(self._admitted, particles)
        admitted = check_agreement(processes, type(self).__name__, particles, check, replicated, alike)
        return self._moved(admitted, processes)

    def gaussian(self, law: Gaussian) -> Gaussian:
        """The law of the particles after the operator, for infinitely many particles of the given law.

        Raises:
            MissingFormError: the law after the operator is not Gaussian, or not known.
            TypeError: the law is no Gaussian.
            ValueError: the law is in another number of dimensions.
        """
        before = self._moments(law)
        return Gaussian.create(*moments_after(self.affine(before), before))

    def affine(self, law: ParticleMoments) -> AffineMap:
        """The affine map by which the operator acts on a population of this law.

        Raises:
            MissingFormError: the operator is not affine.
        """
        raise MissingFormError(
            f"{type(self).__name__} is not affine: a Gaussian law does not stay Gaussian under it, or not in a way "
            "that is known"
        )

    def check_shared(self) -> None:
        """Raise a ValueError if the operator, or one that it consists of, needs the whole population in one process."""
        if self.needs_all:
            raise ValueError(f"{type(self).__name__} needs the whole population, which is spread over processes here")
        for value in vars(self).values():
            parts = value if isinstance(value, tuple) else (value,)
            for part in parts:
                if isinstance(part, Operator):
                    part.check_shared()

    @abstractmethod
    def _moved(self, particles: Tensor, group: Peers | None) -> Tensor:
        """The particles after the operator, given in at least float32; of a shared population those of this process."""

    @property
    def _like(self) -> Tensor | None:
        """A tensor with the operator's dtype and d as its last dimension; None if every d and dtype will do."""
        return None

    @property
    def _width(self) -> int | None:
        return None if self._like is None else self._like.shape[-1]

    def _dtype(self, tensor: Tensor) -> torch.dtype:
        return promoted_dtype(tensor) if self._like is None else promoted_dtype(tensor, self._like)

    def _admitted(self, particles: Tensor) -> Tensor:
        """The checked particles, in the dtype that the operator computes in."""
        name = type(self).__name__
        width = self._width
        shape = floating(f"the particles of {name}", particles).shape
        if len(shape) < 2 or (width is not None and shape[-1] != width):
            size = "d" if width is None else width
            raise ValueError(f"{name} needs particles of shape (*batch, n, {size}), got {tuple(shape)}")
        self._check_device(particles=particles)
        return particles.to(self._dtype(particles))

    def _moments(self, law: object) -> ParticleMoments:
        """The moments of a checked law, in the dtype that the operator computes in."""
        name = type(self).__name__
        width = self._width
        law_moments = moments(instance(f"the law of {name}.gaussian", law, Gaussian, "a massieu.measures.Gaussian"))
        dimension = law_moments.mean.shape[-1]
        if width not in (None, dimension):
            raise ValueError(f"{name}.gaussian needs a law in {width} dimensions, got {dimension}")
        dtype = self._dtype(law_moments.mean)
        return ParticleMoments(*(moment.to(dtype) for moment in law_moments))


Map = Activation | Operator


def moments(law: Gaussian) -> ParticleMoments:
    """Mean and covariance, in at least float32."""
    # They are the first two derivatives of the log-partition at 0, where nothing is tilted.
    origin = torch.zeros_like(law.location)
    return ParticleMoments(law.mean(origin), law.fisher(origin))


def moments_after(affine: AffineMap, law: ParticleMoments) -> ParticleMoments:
    """The moments of the particles after an affine map."""
    matrix, offset = affine
    mean = (matrix @ law.mean.unsqueeze(-1)).squeeze(-1) + offset
    covariance = matrix @ law.covariance @ matrix.mT
    # Rounding makes A C Aᵀ slightly asymmetric, and a Gaussian's covariance must be symmetric.
    return ParticleMoments(mean, 0.5 * (covariance + covariance.mT))


def as_map(name: str, value: object) -> Map:
    """An activation or an operator as it is, a measure as an activation; None is the identity.

    Raises:
        TypeError: the value is something else.
    """
    if value is None:
        return Identity()
    if isinstance(value, Measure):
        return MeasureActivation(value)
    if not isinstance(value, (Activation, Operator)):
        raise TypeError(f"{name} must be an Activation, or an operator or a measure, got {described(value)}")
    return value


def apply(any_map: Map, particles: Tensor, group: Peers | None) -> Tensor:
    """The particles after an activation or an operator; if a group shares them, those of this process."""
    if group is None or isinstance(any_map, Activation):
        return any_map(particles)
    return any_map.sharded(particles, group=group.handle)


def affine_of(any_map: Map, law: ParticleMoments) -> AffineMap:
    """The affine map by which an activation or an operator acts on a population of this law.

    Raises:
        MissingFormError: the activation or operator is not affine.
    """
    if isinstance(any_map, Operator):
        return any_map.affine(law)
    if not any_map.quadratic:
        raise MissingFormError(
            f"{type(any_map).__name__} is not affine: a Gaussian law does not stay Gaussian under it; "
            "Identity, Scalar and Whitening are"
        )
    *batch, size = law.mean.shape
    basis = torch.eye(size, dtype=law.mean.dtype, device=law.mean.device)
    # An affine map is known from its values at 0 and at the unit vectors: the offset, and offset plus each column.
    points = torch.cat([basis.new_zeros(1, size), basis]).expand(*batch, size + 1, size)
    images = any_map(points).to(basis.dtype)
    offset = images[..., 0, :]
    columns = images[..., 1:, :] - images[..., :1, :]
    return AffineMap(columns.mT, offset)


def law_after(any_map: Map, law: ParticleMoments) -> Gaussian:
    """The law after an activation or an operator.

    Raises:
        MissingFormError: the law after it is not Gaussian.
    """
    if isinstance(any_map, Operator):
        return any_map.gaussian(Gaussian.create(*law))
    return Gaussian.create(*moments_after(affine_of(any_map, law), law))


def one_number(name: str, value: Any, like: Tensor) -> Tensor:
    """A finite number as a tensor of no dimension, with the dtype and device of `like`.

    Raises:
        TypeError, ValueError: the value is no number, more than one, or not finite.
    """
    scalar = as_tensor(name, value, like)
    if scalar.ndim:
        raise ValueError(f"{name} must be one number, got shape {tuple(scalar.shape)}")
    check_finite(**{name: scalar})
    return scalar
