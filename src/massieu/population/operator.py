"""What acts on a population of tokens, and what follows for a Gaussian law of tokens."""

import dataclasses
from typing import Any, NamedTuple, Protocol, dataclass_transform, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils import _pytree as pytree

from massieu.energy.contraction import Contraction
from massieu.measures import Gaussian, MissingFormError
from massieu.measures.value import register, static_field
from massieu.ops.sharded.agreement import Call, need_values, together
from massieu.ops.sharded.collectives import Group


@runtime_checkable
class Operator(Protocol):
    """A map of populations: of particles, and, where a Gaussian law stays one, of that law.

    Where an operator is token-wise, or can communicate, a method ``sharded(particles, *, group=None)`` applies it to a
    population spread over processes. Where it is affine for a population of a given law, a method ``affine(law)`` says so, and
    it may stand before attention as well without costing the layer its Gaussian law.
    """

    def __call__(self, particles: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """The particles after it."""
        ...

    def gaussian(self, law: Gaussian) -> Gaussian:
        """The law after it, of infinitely many particles of that law."""
        ...


Map = Contraction | Operator


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(static_field,))
class Value:
    """A frozen dataclass and pytree, which is what deriving from it makes of a class."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        register(dataclasses.dataclass(frozen=True, eq=False)(cls))


class AffineMap(NamedTuple):
    """x ↦ matrix·x + offset."""

    matrix: Float[Tensor, "*batch d d"]
    offset: Float[Tensor, "*batch d"]


class ParticleMoments(NamedTuple):
    """Mean and covariance of a Gaussian law."""

    mean: Float[Tensor, "*batch d"]
    covariance: Float[Tensor, "*batch d d"]


def moments(law: Gaussian) -> ParticleMoments:
    """Mean and covariance, in at least float32."""
    origin = torch.zeros_like(law.location)
    return ParticleMoments(law.mean(origin), law.fisher(origin))


def pushed(affine: AffineMap, law: ParticleMoments) -> ParticleMoments:
    """The moments after an affine map."""
    matrix, offset = affine
    mean = (matrix @ law.mean.unsqueeze(-1)).squeeze(-1) + offset
    covariance = matrix @ law.covariance @ matrix.mT
    return ParticleMoments(mean, 0.5 * (covariance + covariance.mT))


def affine_of(any_map: Map, law: ParticleMoments) -> AffineMap:
    """A map as the affine one that it is for a population of that law.

    Raises:
        MissingFormError: it is not affine.
    """
    if isinstance(any_map, Contraction):
        if not any_map.quadratic:
            raise MissingFormError(
                f"{type(any_map).__name__} is not affine: a Gaussian law does not stay Gaussian under it; "
                "Identity, Scalar and Whitening are"
            )
        batch, size = law.mean.shape[:-1], law.mean.shape[-1]
        basis = torch.eye(size, dtype=law.mean.dtype, device=law.mean.device)
        points = torch.cat([basis.new_zeros(1, size), basis]).expand(*batch, size + 1, size)
        images = any_map.mean(points).to(basis.dtype)
        return AffineMap((images[..., 1:, :] - images[..., :1, :]).mT, images[..., 0, :])
    found: Any = getattr(any_map, "affine", None)
    if found is None:
        raise MissingFormError(
            f"{type(any_map).__name__} has no method affine: what it does to a law is not known here"
        )
    return found(law)


def apply(any_map: Map, particles: Tensor) -> Tensor:
    """The particles after a contraction or an operator."""
    return any_map.mean(particles) if isinstance(any_map, Contraction) else any_map(particles)


def apply_to_law(any_map: Map, law: ParticleMoments) -> ParticleMoments:
    """The law after a contraction or an operator.

    Raises:
        MissingFormError: it is Gaussian no more.
    """
    if isinstance(any_map, Contraction):
        return pushed(affine_of(any_map, law), law)
    return moments(any_map.gaussian(Gaussian.create(*law)))


def admit_share(
    owner: object, particles: Tensor, width: int | None, weights: torch.dtype, group: Group, **alike: object
) -> Tensor:
    """`admit` for this process's particles of a population that is spread over a group, which must have one operator.

    Raises:
        TypeError, ValueError: as `admit`; the operator, or what must be alike of the particles, differs between processes.
        RuntimeError: another process refused its arguments.
    """

    def check() -> tuple[Tensor, Call]:
        admitted = admit(owner, particles, width, weights)
        need_values(group, particles=particles)
        leaves = [leaf for leaf in pytree.tree_leaves(owner) if isinstance(leaf, Tensor)]
        told = {"batch": tuple(admitted.shape[:-2]), "dimension": admitted.shape[-1], "dtype": admitted.dtype}
        told["number of parameters"] = len(leaves)
        return admitted, Call(
            type(owner).__name__, told | alike, {f"parameter {place}": leaf for place, leaf in enumerate(leaves)}
        )

    return together(group, check)[0]


def apply_sharded(any_map: Map, particles: Tensor, group: Any) -> Tensor:
    """`apply` to this process's particles of a population that is spread over a group."""
    if isinstance(any_map, Contraction):
        return any_map.mean(particles)
    sharded: Any = getattr(any_map, "sharded")  # noqa: B009 - optional in the protocol; `need_sharded` has looked
    return sharded(particles, group=group)


def need_sharded(*maps: Map) -> None:
    """Raise where a map cannot be applied to a population that is spread over processes.

    Raises:
        ValueError: it has no method `sharded`.
    """
    for each in maps:
        if not isinstance(each, Contraction) and not hasattr(each, "sharded"):
            raise ValueError(
                f"{type(each).__name__} has no method sharded: it needs the whole population, which is spread over "
                "processes here"
            )


def need_map(name: str, given: object) -> None:
    """Raise unless it is a contraction or an operator.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(given, (Contraction, Operator)):
        raise TypeError(
            f"{name} must be a Contraction, or an operator with a call and a method gaussian, got {type(given).__name__}"
        )


def admit(owner: object, particles: Tensor, width: int | None, weights: torch.dtype) -> Tensor:
    """The particles in the dtype that they are moved in, at least float32.

    Raises:
        TypeError: they are not floating-point.
        ValueError: they have another shape than (*batch, n, width).
    """
    name = type(owner).__name__
    if not isinstance(particles, Tensor) or not particles.is_floating_point():
        given = f"a tensor of {particles.dtype}" if isinstance(particles, Tensor) else type(particles).__name__
        raise TypeError(f"{name} needs a floating-point tensor of particles, got {given}")
    if particles.ndim < 2 or (width is not None and particles.shape[-1] != width):
        size = "d" if width is None else width
        raise ValueError(f"{name} needs particles of shape (*batch, n, {size}), got {tuple(particles.shape)}")
    own = next((each for each in pytree.tree_leaves(owner) if isinstance(each, Tensor) and each.ndim), particles)
    if own.device != particles.device:
        raise ValueError(
            f"{name} is on {own.device} and its particles on {particles.device}: they must be on one device"
        )
    return particles.to(torch.promote_types(torch.promote_types(torch.float32, particles.dtype), weights))


def need_law(owner: object, law: object, width: int | None, weights: torch.dtype) -> ParticleMoments:
    """The moments of a law, in the dtype that they are moved in.

    Raises:
        TypeError: it is not Gaussian.
        ValueError: it lives in another number of dimensions.
    """
    name = type(owner).__name__
    if not isinstance(law, Gaussian):
        raise TypeError(f"{name}.gaussian needs a massieu.measures.Gaussian, got {type(law).__name__}")
    if width is not None and law.event_shape != (width,):
        raise ValueError(f"{name}.gaussian needs a law in {width} dimensions, got {tuple(law.event_shape)}")
    found = moments(law)
    dtype = torch.promote_types(found.mean.dtype, weights)
    return ParticleMoments(*(part.to(dtype) for part in found))
