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
from massieu.population.reading import Processes, agreed


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

    An author writes `_moved`, what becomes of particles. An operator that is affine for the population of a given law
    overrides `affine`; then `gaussian` follows, and it may stand before attention without costing the layer its law.
    One that keeps a law Gaussian in another way overrides `gaussian`. Attention in it or an operator within takes part
    in `sharded` by the group that `_moved` gets; an operator that cannot sets `needs_all`.

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
        """The particles after it, each batch a population of its own; at least float32.

        Raises:
            TypeError: they are not floating-point.
            ValueError: they have another shape, or are on another device.
        """
        return self._moved(self._admitted(particles), None)

    def sharded(
        self, particles: Float[Tensor, "*batch n d"], *, group: Processes = None
    ) -> Float[Tensor, "*batch n d"]:
        """The same for this process's particles, of any number, of a population spread over a group of processes.

        Equal to one process with all particles, to rounding. The objective is the sum of the processes' losses
        (`massieu.ops.sharded`, queries="sharded"): particles get their gradient of it, and the operator's tensors the
        part that comes through this process's particles.

        Args:
            particles: This process's.
            group: Who shares the population; None: all processes.

        Raises:
            TypeError, ValueError: as the call; it needs the whole population; there is no process group; the operator,
                or what must be alike of the particles, differs between processes.
            RuntimeError: another process refused its arguments, or it died.
        """
        self.check_shared()
        processes, tensors = Peers.of(group), self._tensors()
        alike = {"number of parameters": len(tensors)}
        for field in dataclasses.fields(self):
            # A function may hold what belongs to its process.
            if field.metadata.get("static") and not callable(getattr(self, field.name)):
                alike[field.name] = getattr(self, field.name)
        replicated = {f"parameter {place}": tensor for place, tensor in enumerate(tensors)}
        check = partial(self._admitted, particles)
        admitted = agreed(processes, type(self).__name__, particles, check, replicated, alike)
        return self._moved(admitted, processes)

    def gaussian(self, law: Gaussian) -> Gaussian:
        """The law after it, of infinitely many particles of that law.

        Raises:
            MissingFormError: it is Gaussian no more, or not known.
            TypeError: another measure.
            ValueError: a law in another number of dimensions.
        """
        before = self._moments(law)
        return Gaussian.create(*pushed(self.affine(before), before))

    def affine(self, law: ParticleMoments) -> AffineMap:
        """The operator as the affine map that it is for a population of that law.

        Raises:
            MissingFormError: it is not affine.
        """
        raise MissingFormError(
            f"{type(self).__name__} is not affine: a Gaussian law does not stay Gaussian under it, or not in a way "
            "that is known"
        )

    def check_shared(self) -> None:
        """Raise a ValueError if it, or an operator that it consists of, needs the whole population in one process."""
        if self.needs_all:
            raise ValueError(f"{type(self).__name__} needs the whole population, which is spread over processes here")
        for part in vars(self).values():
            for each in part if isinstance(part, tuple) else (part,):
                if isinstance(each, Operator):
                    each.check_shared()

    @abstractmethod
    def _moved(self, particles: Tensor, group: Peers | None) -> Tensor:
        """The particles after it, given in at least float32; of processes that share a population, this one's."""

    @property
    def _like(self) -> Tensor | None:
        """A tensor of the operator's dtype whose last dimension is d; None where it takes every d and dtype."""
        return None

    @property
    def _width(self) -> int | None:
        return None if self._like is None else self._like.shape[-1]

    def _dtype(self, given: Tensor) -> torch.dtype:
        return promoted_dtype(given) if self._like is None else promoted_dtype(given, self._like)

    def _admitted(self, particles: Tensor) -> Tensor:
        """The particles in the dtype that they are moved in."""
        name, width = type(self).__name__, self._width
        shape = floating(f"the particles of {name}", particles).shape
        if len(shape) < 2 or (width is not None and shape[-1] != width):
            size = "d" if width is None else width
            raise ValueError(f"{name} needs particles of shape (*batch, n, {size}), got {tuple(shape)}")
        self._check_device(particles=particles)
        return particles.to(self._dtype(particles))

    def _moments(self, law: object) -> ParticleMoments:
        """The moments of a law in the dtype that they are moved in."""
        name, width = type(self).__name__, self._width
        found = moments(instance(f"the law of {name}.gaussian", law, Gaussian, "a massieu.measures.Gaussian"))
        if width not in (None, found.mean.shape[-1]):
            raise ValueError(f"{name}.gaussian needs a law in {width} dimensions, got {found.mean.shape[-1]}")
        dtype = self._dtype(found.mean)
        return ParticleMoments(*(part.to(dtype) for part in found))


Map = Activation | Operator


def moments(law: Gaussian) -> ParticleMoments:
    """Mean and covariance, in at least float32."""
    origin = torch.zeros_like(law.location)
    return ParticleMoments(law.mean(origin), law.fisher(origin))


def pushed(affine: AffineMap, law: ParticleMoments) -> ParticleMoments:
    """The moments after an affine map."""
    matrix, offset = affine
    covariance = matrix @ law.covariance @ matrix.mT
    return ParticleMoments((matrix @ law.mean.unsqueeze(-1)).squeeze(-1) + offset, 0.5 * (covariance + covariance.mT))


def as_map(name: str, given: object) -> Map:
    """An activation or an operator as it is, a measure as an activation; None is the identity.

    Raises:
        TypeError: it is something else.
    """
    if given is None:
        return Identity()
    if isinstance(given, Measure):
        return MeasureActivation(given)
    if not isinstance(given, (Activation, Operator)):
        raise TypeError(f"{name} must be an Activation, or an operator or a measure, got {described(given)}")
    return given


def apply(any_map: Map, particles: Tensor, group: Peers | None) -> Tensor:
    """The particles after an activation or an operator; this process's, where a group shares them."""
    if group is None or isinstance(any_map, Activation):
        return any_map(particles)
    return any_map.sharded(particles, group=group.handle)


def affine_of(any_map: Map, law: ParticleMoments) -> AffineMap:
    """A map as the affine one that it is for a population of that law.

    Raises:
        MissingFormError: it is not affine.
    """
    if isinstance(any_map, Operator):
        return any_map.affine(law)
    if not any_map.quadratic:
        raise MissingFormError(
            f"{type(any_map).__name__} is not affine: a Gaussian law does not stay Gaussian under it; "
            "Identity, Scalar and Whitening are"
        )
    batch, size = law.mean.shape[:-1], law.mean.shape[-1]
    basis = torch.eye(size, dtype=law.mean.dtype, device=law.mean.device)
    points = torch.cat([basis.new_zeros(1, size), basis]).expand(*batch, size + 1, size)
    images = any_map(points).to(basis.dtype)
    return AffineMap((images[..., 1:, :] - images[..., :1, :]).mT, images[..., 0, :])


def law_after(any_map: Map, law: ParticleMoments) -> Gaussian:
    """The law after an activation or an operator.

    Raises:
        MissingFormError: it is Gaussian no more.
    """
    if isinstance(any_map, Operator):
        return any_map.gaussian(Gaussian.create(*law))
    return Gaussian.create(*pushed(affine_of(any_map, law), law))


def one_number(name: str, value: Any, like: Tensor) -> Tensor:
    """A finite number as a tensor of no dimension, with the dtype and device of the other.

    Raises:
        TypeError, ValueError: it is no number, not one, or not finite.
    """
    found = as_tensor(name, value, like)
    if found.ndim:
        raise ValueError(f"{name} must be one number, got shape {tuple(found.shape)}")
    check_finite(**{name: found})
    return found
