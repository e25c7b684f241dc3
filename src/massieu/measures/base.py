"""The contract every measure keeps.

A measure h on R^d has a log-partition A(eta) = log ∫ exp(x·eta) h(dx), and everything else follows from A. Its author
writes two shapes and one hook, `_log_partition`; mean, Fisher information, cumulants, entropy, KL divergence and tilt are
derived (`hooks.py`) with `torch.func`, and a closed form may replace any of the other hooks:

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
is abstract or final; variation is composition (`tilt`, `affine`, `mixture`, `product`, `convolve`, `power`).

Shapes: batch dimensions on the left, query dimensions in the middle, event dimensions on the right. `eta` has shape
``(*batch_shape, *query, *event_shape)`` with any number of query dimensions; anything else is a ValueError.
"""

import dataclasses
import inspect
from collections.abc import Iterable, Sequence
from typing import Any, dataclass_transform, final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils import _pytree as pytree

from massieu.measures.hooks import Hooks, MissingFormError
from massieu.measures.value import real_tensor, register, static_field, values_are_readable

__all__ = ["DomainError", "Measure", "MissingFormError", "longest_batch", "static_field", "values_are_readable"]

_HIGHEST_ORDER = 6


class DomainError(ValueError):
    """`eta` lies outside {eta : A(eta) < ∞}."""


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(static_field,))
class Measure(Hooks):
    """A measure h on R^d, known by its log-partition. See the module's docstring for the contract."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for parent in cls.__mro__[1:]:
            if issubclass(parent, Measure) and parent is not Measure and not inspect.isabstract(parent):
                raise TypeError(f"{parent.__name__} is final; compose measures instead of deriving {cls.__name__}")
        register(dataclasses.dataclass(frozen=True, eq=False)(cls))

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
        eta = real_tensor("eta", eta, self._some_leaf())
        if tuple(eta.shape) != expected:
            raise ValueError(f"tilt needs eta of shape {expected} (batch + event), got {tuple(eta.shape)}")
        measure, eta = self._admit(eta)
        if values_are_readable(eta) and bool((measure._log_partition(eta) == torch.inf).any()):
            raise ValueError(f"tilt: A(eta) of {type(self).__name__} is too large for {eta.dtype}; eta must be smaller")
        return measure._tilt(eta)

    @final
    def sample(
        self,
        eta: Float[Tensor, "*batch_query_event"],
        shape: Sequence[int] | int = (),
        *,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "*shape_batch_query_event"]:
        """Independent draws from p_eta, `shape` of them (a number or a shape) for each `eta`. No gradient flows through.

        Raises:
            ValueError, DomainError: as `log_partition`, and for a `shape` that is none.
            MissingFormError: the measure has no sampler.
        """
        size = _sample_shape(shape)
        measure, eta = self._admit(eta)
        known = type(measure)._sample is not Hooks._sample
        if known and (eta.is_meta or size.numel() * eta.numel() == 0):
            # There is nothing to draw.
            return eta.new_empty((*size, *eta.shape))
        if values_are_readable(eta) and bool(eta.isnan().any()):
            raise ValueError(f"{type(self).__name__}: no law to sample from, eta is NaN")
        with torch.no_grad():
            return measure._sample(eta, tuple(size), generator)

    @final
    def log_prob(
        self, eta: Float[Tensor, "*batch_query_event"], point: Float[Tensor, "*shape_batch_query_event"]
    ) -> Float[Tensor, "*shape_batch_query"]:
        """The log-probability (discrete h) or log-density of p_eta at `point`, in nats; −inf outside the support.

        `point` has the shape of what `sample` returns: eta's, after any number of sample dimensions. Densities are
        with respect to Lebesgue measure, or the surface area of a sphere. A measure with atoms and a density has a
        probability at its atoms and a density elsewhere (S4).

        Raises:
            ValueError, DomainError: as `log_partition`, and for a `point` whose last dimensions are not eta's.
            MissingFormError: the measure has no density, or none in closed form.
        """
        eta = real_tensor("eta", eta, self._some_leaf())
        point = real_tensor("point", point, eta)
        if point.shape[max(point.ndim - eta.ndim, 0) :] != eta.shape:
            raise ValueError(f"point must have shape (*shape, *{tuple(eta.shape)}), got {tuple(point.shape)}")
        measure, eta = self._admit(eta.to(torch.promote_types(eta.dtype, point.dtype)))
        shape, event = point.shape[: point.ndim - eta.ndim], len(self.event_shape)
        queries_end = eta.ndim - event
        # Sample dimensions become one more query dimension, since batch dimensions come first.
        points = point.reshape(shape.numel(), *eta.shape).movedim(0, queries_end)
        points = _on_support(measure, points.to(eta.dtype), point.dtype)
        value = measure._log_prob(eta.unsqueeze(queries_end), points)
        unknown = (points.isnan() | eta.unsqueeze(queries_end).isnan()).flatten(points.ndim - event).any(-1)
        # No law has anything at infinity, whatever a form makes of it.
        value = value.masked_fill(points.isinf().flatten(points.ndim - event).any(-1), -torch.inf)
        value = value.masked_fill(unknown, torch.nan)
        return value.movedim(queries_end, 0).reshape((*shape, *eta.shape[:queries_end]))

    @final
    def cumulants(
        self, eta: Float[Tensor, "*batch_query_event"], direction: Float[Tensor, "*batch_query_event"], order: int
    ) -> Float[Tensor, "*batch_query order"]:
        """κ_1 … κ_order of the projection x·direction under p_eta: derivatives of A along `direction` (S10, B3).

        κ_1 = mean·direction, κ_2 = directionᵀ F direction, and the third and fourth are the unnormalised skewness and
        excess kurtosis.

        Raises:
            ValueError, DomainError: as `log_partition`; `direction` has another shape; `order` is not in 1 … 6.
        """
        if not 1 <= order <= _HIGHEST_ORDER:
            raise ValueError(f"order must be between 1 and {_HIGHEST_ORDER}, got {order}")
        measure, eta, direction = self._admit(eta, direction=direction)
        return measure._cumulants(eta, direction, order)

    def _tilt(self, eta: Tensor) -> "Measure":
        """The tilted measure; override where it is of the same class."""
        from massieu.measures.combine import Tilted

        return Tilted(self, eta)

    def _some_leaf(self) -> Tensor | None:
        """One of the measure's tensors, for the device."""
        return next((leaf for leaf in pytree.tree_leaves(self) if isinstance(leaf, Tensor)), None)

    def _admit(self, eta: Tensor, **others: Tensor) -> tuple[Any, ...]:
        """Check shapes and domain; promote the measure and its arguments to one dtype of at least float32."""
        measure, eta, *rest = self._fit(eta=eta, **others)
        measure._check_domain(eta)
        return measure, eta, *rest

    def _fit(self, **tensors: Tensor) -> tuple[Any, ...]:
        """Check shapes; promote the measure and the tensors, all of eta's shape, to one dtype of at least float32."""
        batch, event = tuple(self.batch_shape), tuple(self.event_shape)
        leaves = [leaf for leaf in pytree.tree_leaves(self) if leaf.is_floating_point()]
        like = leaves[0] if leaves else None
        tensors = {name: real_tensor(name, tensor, like) for name, tensor in tensors.items()}
        (first, *_), shape = tensors, tuple(next(iter(tensors.values())).shape)
        if len(shape) < len(batch + event) or shape[: len(batch)] != batch or shape[-len(event) :] != event:
            raise ValueError(
                f"{type(self).__name__} needs {first} of shape {batch} + queries + {event} (batch + queries + event), "
                f"got {shape}"
            )
        for name, tensor in tensors.items():
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} must have {first}'s shape {shape}, got {tuple(tensor.shape)}")
        devices = {tensor.device for tensor in (*tensors.values(), *leaves) if tensor.ndim > 0}
        if len(devices) > 1:
            places = " and ".join(sorted(str(device) for device in devices))
            raise ValueError(f"{type(self).__name__} and {', '.join(tensors)} must be on one device, got {places}")
        dtype = torch.float32
        for tensor in (*tensors.values(), *leaves):
            dtype = torch.promote_types(dtype, tensor.dtype)
        measure = self if all(leaf.dtype == dtype for leaf in leaves) else self._to(dtype)
        return measure, *(tensor.to(dtype) for tensor in tensors.values())

    def _check_domain(self, eta: Tensor) -> None:
        inside = self._in_domain(eta) if values_are_readable(eta) else None
        if inside is not None and values_are_readable(inside) and not bool(inside.all()):
            raise DomainError(f"{type(self).__name__}: eta is outside the domain, {self._domain()}")


def _sample_shape(shape: Sequence[int] | int) -> torch.Size:
    given: Any = shape
    sizes: tuple[Any, ...] = tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(size, int) and size >= 0 for size in sizes):
        raise ValueError(f"shape must be a number of draws or a tuple of such numbers, none negative, got {shape!r}")
    return torch.Size(sizes)


def _on_support(measure: Measure, points: Tensor, given: torch.dtype) -> Tensor:
    """The points; in the place of those that are off the support by no more than the rounding to `given`, the nearest."""
    if given == points.dtype:
        return points
    nearest = measure._nearest(points)
    if nearest is None:
        return points
    limits = torch.finfo(given)
    near = (nearest - points).abs() <= limits.eps * (nearest.abs() + limits.tiny)
    event = len(measure.event_shape)
    hit = near.flatten(points.ndim - event).all(-1)
    return torch.where(hit.reshape(*hit.shape, *[1] * event), nearest, points)


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
