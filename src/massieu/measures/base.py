"""The contract every measure keeps.

A measure h on R^d has a log-partition A(eta) = log ∫ exp(x·eta) h(dx), and everything else follows from A. Its author
writes two shapes and one hook, `Measure._log_partition`; mean, Fisher information, entropy, KL divergence and tilt are
derived here with `torch.func`, and a closed form may replace any of the other underscored methods:

    class Poisson(Measure):
        rate: Tensor  # (*batch, d)

        @property
        def batch_shape(self):
            return self.rate.shape[:-1]

        @property
        def event_shape(self):
            return self.rate.shape[-1:]

        def _log_partition(self, eta):
            return (self._align(self.rate, eta) * torch.expm1(eta)).sum(-1)

A measure is a value: a frozen dataclass of tensors and measures (deriving from `Measure` makes it one), and a pytree,
so that `torch.func` transforms take and return it. It is rebuilt in every forward pass and owns no parameter. Its
constructor checks nothing, since transforms call it again; checks go into a `create` classmethod. A class of measures
is abstract or final; variation is composition (`tilt`, `affine`).

Shapes: batch dimensions on the left, query dimensions in the middle, event dimensions on the right. `eta` has shape
``(*batch_shape, *query, *event_shape)`` with any number of query dimensions; anything else is a ValueError.
"""

import dataclasses
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self, dataclass_transform, final

import torch
from jaxtyping import Float
from numpy.polynomial.legendre import leggauss
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor  # pyright: ignore[reportMissingModuleSource]
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    pass

_GAUSS_LEGENDRE = [(float(0.5 * (x + 1)), float(0.5 * w)) for x, w in zip(*leggauss(8), strict=True)]
"""Nodes and weights of the eight-point rule on [0, 1]."""


class DomainError(ValueError):
    """`eta` lies outside {eta : A(eta) < ∞}."""


def static_field(**keywords: Any) -> Any:
    """A dataclass field of a measure that is neither tensor nor measure: part of its structure, not of its values."""
    return dataclasses.field(metadata={"static": True}, **keywords)


def values_are_readable(*tensors: Tensor) -> bool:
    """Whether an `if` may look at the values: not while compiling, and not inside a `torch.func` transform."""
    if torch.compiler.is_compiling():
        return False
    return not any(is_functorch_wrapped_tensor(tensor) for tensor in tensors)


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(static_field,))
class Measure(ABC):
    """A measure h on R^d, known by its log-partition. See the module's docstring for the contract."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for parent in cls.__mro__[1:]:
            if issubclass(parent, Measure) and parent is not Measure and not inspect.isabstract(parent):
                raise TypeError(f"{parent.__name__} is final; compose measures instead of deriving {cls.__name__}")
        _register(dataclasses.dataclass(frozen=True, eq=False)(cls))

    # What an author writes.

    @property
    @abstractmethod
    def batch_shape(self) -> torch.Size:
        """Shape of the batch of measures this value holds."""

    @property
    @abstractmethod
    def event_shape(self) -> torch.Size:
        """Shape of one point; at least one dimension."""

    @abstractmethod
    def _log_partition(self, eta: Tensor) -> Tensor:
        """A(eta), twice differentiable; `eta` and the measure's tensors are at least float32 and of one dtype."""

    def _in_domain(self, eta: Tensor) -> Tensor | None:
        """Where A(eta) is finite, shape ``(*batch, *query)``; None where that is all of R^d."""
        return None

    def _domain(self) -> str:
        """The domain in words, for the error's message."""
        return "all of R^d"

    # What follows from it. Override with a closed form only.

    def _mean(self, eta: Tensor) -> Tensor:
        return torch.func.grad(lambda point: self._log_partition(point).sum())(eta)

    def _fisher_vp(self, eta: Tensor, vector: Tensor) -> Tensor:
        # The Hessian is symmetric, so the transposed product is the product.
        return torch.func.vjp(self._mean, eta)[1](vector)[0]

    def _fisher(self, eta: Tensor) -> Tensor:
        event = self.event_shape
        basis = torch.eye(event.numel(), dtype=eta.dtype, device=eta.device).reshape(-1, *event)
        columns = torch.func.vmap(lambda vector: self._fisher_vp(eta, vector.expand_as(eta)))(basis)
        return columns.movedim(0, -1).reshape(*eta.shape, *event)

    def _entropy(self, eta: Tensor) -> Tensor:
        return self._log_partition(eta) - self._dot(eta, self._mean(eta))

    def _kl(self, eta: Tensor, delta: Tensor) -> Tensor:
        """KL(p_eta ‖ p_{eta+delta}), accurate for any size of `delta`.

        By default in float64: the Bregman difference where that keeps ten digits, else its integral form
        ∫₀¹ (1 − t) deltaᵀ F(eta + t·delta) delta dt, whose terms are non-negative.
        """
        dtype, measure, eta, delta = eta.dtype, self._to(torch.float64), eta.double(), delta.double()
        start, end = measure._log_partition(eta), measure._log_partition(eta + delta)
        slope = self._dot(measure._mean(eta), delta)
        difference = end - start - slope
        integral = torch.zeros_like(difference)
        for t, weight in _GAUSS_LEGENDRE:
            integral = integral + weight * (1 - t) * self._dot(delta, measure._fisher_vp(eta + t * delta, delta))
        close = difference < 1e-6 * (1 + start.abs() + end.abs() + slope.abs())
        return torch.where(close, integral, difference).to(dtype)

    def _tilt(self, eta: Tensor) -> "Measure":
        from massieu.measures.combine import Tilted

        return Tilted(self, eta)

    def _sample(self, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no sampler")

    # What a user calls.

    @final
    def log_partition(self, eta: Float[Tensor, "*batch_query_event"]) -> Float[Tensor, "*batch_query"]:
        """A(eta) = log ∫ exp(x·eta) h(dx), in nats and at least float32. Twice differentiable (S1).

        Raises:
            ValueError: `eta` has not the shape ``(*batch_shape, *query, *event_shape)``.
            DomainError: A(eta) = ∞ for some `eta` (not noticed while compiling or inside a `torch.func` transform).
        """
        measure, eta = self._admit(eta)
        return measure._log_partition(eta)

    @final
    def mean(self, eta: Float[Tensor, "*batch_query_event"]) -> Float[Tensor, "*batch_query_event"]:
        """∇A(eta), the mean of p_eta = exp(x·eta − A(eta)) h: attention's output when h is a set of keys (S3).

        Raises:
            ValueError, DomainError: as `log_partition`.
        """
        measure, eta = self._admit(eta)
        return measure._mean(eta)

    @final
    def fisher(self, eta: Float[Tensor, "*batch_query_event"]) -> Float[Tensor, "*batch_query_event_event"]:
        """∇²A(eta), the covariance of p_eta: its Fisher information in eta. Centred (S10).

        Raises:
            ValueError, DomainError: as `log_partition`.
        """
        measure, eta = self._admit(eta)
        return measure._fisher(eta)

    @final
    def fisher_vp(
        self, eta: Float[Tensor, "*batch_query_event"], vector: Float[Tensor, "*batch_query_event"]
    ) -> Float[Tensor, "*batch_query_event"]:
        """∇²A(eta)·vector, without the matrix; `vector` has the shape of `eta`.

        Raises:
            ValueError, DomainError: as `log_partition`, and for a `vector` of another shape.
        """
        measure, eta, vector = self._admit(eta, vector=vector)
        return measure._fisher_vp(eta, vector)

    @final
    def entropy(self, eta: Float[Tensor, "*batch_query_event"]) -> Float[Tensor, "*batch_query"]:
        """−E log(dp_eta/dh) = A(eta) − eta·∇A(eta), in nats: relative to h (S8).

        For unweighted atoms that is Shannon's entropy of the weights; for a probability h it is −KL(p_eta ‖ h) ≤ 0.

        Raises:
            ValueError, DomainError: as `log_partition`.
        """
        measure, eta = self._admit(eta)
        return measure._entropy(eta)

    @final
    def kl(
        self, eta_p: Float[Tensor, "*batch_query_event"], eta_q: Float[Tensor, "*batch_query_event"]
    ) -> Float[Tensor, "*batch_query"]:
        """KL(p_{eta_p} ‖ p_{eta_q}) = A(eta_q) − A(eta_p) − ∇A(eta_p)·(eta_q − eta_p), in nats (S7).

        This is the Bregman divergence B_A(eta_q, eta_p): the arguments change places. It is computed in forms that do
        not subtract nearly equal numbers: relative error 1e-5 in float32 down to ‖eta_p − eta_q‖ = 1e-6.

        Raises:
            ValueError, DomainError: as `log_partition`, and for an `eta_q` of another shape than `eta_p`.
        """
        measure, eta_p, eta_q = self._admit(eta_p, eta_q=eta_q)
        measure._check_domain(eta_q)
        return measure._kl(eta_p, eta_q - eta_p)

    @final
    def tilt(self, eta: Float[Tensor, "*batch_event"]) -> "Measure":
        """The probability p_eta as a measure: log-partition A(· + eta) − A(eta).

        ``tilt(a).tilt(b)`` is ``tilt(a + b)``. `eta` has exactly the shape ``batch_shape + event_shape``.

        Raises:
            ValueError, DomainError: as `log_partition`.
        """
        expected = (*self.batch_shape, *self.event_shape)
        if tuple(eta.shape) != expected:
            raise ValueError(f"tilt needs eta of shape {expected} (batch + event), got {tuple(eta.shape)}")
        measure, eta = self._admit(eta)
        return measure._tilt(eta)

    @final
    def sample(
        self,
        eta: Float[Tensor, "*batch_query_event"],
        shape: Sequence[int] = (),
        *,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "*shape_batch_query_event"]:
        """Independent draws from p_eta, `shape` of them for each `eta`. No gradient flows through them.

        Raises:
            ValueError, DomainError: as `log_partition`.
            NotImplementedError: the measure has no sampler.
        """
        measure, eta = self._admit(eta)
        with torch.no_grad():
            return measure._sample(eta, tuple(shape), generator)

    # Helpers for authors.

    def _align(self, tensor: Tensor, eta: Tensor, rest: int = 1) -> Tensor:
        """`tensor` (*batch, *rest) with singleton query dimensions, so that it broadcasts against `eta`.

        Its batch may be a prefix of the measure's; `rest` is the number of its dimensions that are not batch.
        """
        own = tensor.ndim - rest
        missing = eta.ndim - len(self.event_shape) - own
        return tensor.reshape((*tensor.shape[:own], *[1] * missing, *tensor.shape[own:]))

    def _dot(self, left: Tensor, right: Tensor) -> Tensor:
        """Sum of products over the event dimensions."""
        return (left * right).sum(tuple(range(-len(self.event_shape), 0)))

    def _to(self, dtype: torch.dtype) -> Self:
        """The measure with all floating tensors in `dtype`."""
        return pytree.tree_map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, self)

    def _admit(self, eta: Tensor, **others: Tensor) -> tuple[Any, ...]:
        """Check shapes and domain; promote the measure and its arguments to one dtype of at least float32."""
        batch, event = tuple(self.batch_shape), tuple(self.event_shape)
        for name, tensor in {"eta": eta, **others}.items():
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                raise TypeError(f"{name} must be a floating-point tensor, got {_kind(tensor)}")
        shape = tuple(eta.shape)
        if len(shape) < len(batch + event) or shape[: len(batch)] != batch or shape[-len(event) :] != event:
            raise ValueError(
                f"{type(self).__name__} needs eta of shape {batch} + queries + {event} (batch + queries + event), "
                f"got {shape}"
            )
        for name, tensor in others.items():
            if tensor.shape != eta.shape:
                raise ValueError(f"{name} must have eta's shape {shape}, got {tuple(tensor.shape)}")
        leaves = [leaf for leaf in pytree.tree_leaves(self) if leaf.is_floating_point()]
        dtype = torch.float32
        for tensor in (eta, *others.values(), *leaves):
            dtype = torch.promote_types(dtype, tensor.dtype)
        measure = self if all(leaf.dtype == dtype for leaf in leaves) else self._to(dtype)
        eta = eta.to(dtype)
        measure._check_domain(eta)
        return measure, eta, *(tensor.to(dtype) for tensor in others.values())

    def _check_domain(self, eta: Tensor) -> None:
        inside = self._in_domain(eta) if values_are_readable(eta) else None
        if inside is not None and values_are_readable(inside) and not bool(inside.all()):
            raise DomainError(f"{type(self).__name__}: eta is outside the domain, {self._domain()}")


def _register(cls: Any) -> None:
    """Make `cls` a pytree of which the static fields are structure."""
    static = [field.name for field in dataclasses.fields(cls) if field.metadata.get("static", False)]
    dynamic = [field.name for field in dataclasses.fields(cls) if field.name not in static]

    def flatten(measure: Measure) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(measure, name) for name in dynamic], tuple(getattr(measure, name) for name in static)

    def unflatten(values: Iterable[Any], context: tuple[Any, ...]) -> Measure:
        return cls(**dict(zip(dynamic, values, strict=True)), **dict(zip(static, context, strict=True)))

    pytree.register_pytree_node(cls, flatten, unflatten)


def _kind(value: object) -> str:
    return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def longest_batch(owner: str, shapes: Iterable[torch.Size]) -> torch.Size:
    """The longest of the batch shapes of a composition's parts, of which the others must be prefixes.

    Raises:
        ValueError: one of them is no prefix.
    """
    shapes = list(shapes)
    longest = max(shapes, key=len)
    for shape in shapes:
        if longest[: len(shape)] != shape:
            raise ValueError(f"{owner}: batch shape {tuple(shape)} is not a prefix of {tuple(longest)}")
    return longest
