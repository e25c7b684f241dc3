"""The contract every measure keeps.

A measure h on R^d has a log-partition A(eta) = log ∫ exp(x·eta) h(dx), and everything else follows from A. Its author
writes one hook, `_log_partition`, and two shapes if they are not those of the first tensor. Mean, Fisher information,
cumulants, entropy, KL divergence and tilt are derived (`hooks.py`) with `torch.func`, and a closed form may replace any of
these. The docstring of `Measure` shows an example.

A measure is a value: a frozen dataclass of tensors and measures (deriving from `Measure` makes it one), and a pytree,
so that `torch.func` transforms take and return it. It is rebuilt in every forward pass and owns no parameter. Its
constructor checks nothing, since transforms call it again; checks go into a `create` classmethod. A class of measures
is abstract or final; variation is composition (`tilt`, `affine`, `mixture`, `product`, `convolve`, `power`).

Shapes: batch dimensions on the left, query dimensions in the middle, event dimensions on the right. `eta` has shape
``(*batch_shape, *query, *event_shape)`` with any number of query dimensions; anything else is a ValueError.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import check_shape, real_tensor, whole_number
from massieu.foundation.doors import door
from massieu.foundation.transforms import all_true, any_true, values_are_readable
from massieu.foundation.values import need_batch
from massieu.measures.hooks import Hooks

_HIGHEST_ORDER = 6


class DomainError(ValueError):
    """The natural parameter `eta` lies outside the domain {eta : A(eta) < ∞}.

    Example:
        >>> from massieu.measures import DomainError, Exponential
        >>> try:
        ...     Exponential.create(1.0).mean([2.0])
        ... except DomainError as error:
        ...     print(error)
        Exponential: eta is outside the domain, eta < rate = 1 in every coordinate
    """


def _parameter(name: str, value: object) -> object:
    """The value, if it is no measure; else a TypeError that says how two families are compared."""
    if isinstance(value, Measure):
        raise TypeError(
            f"kl compares two parameters of one measure, got the measure {type(value).__name__} for {name}; two families "
            "are compared by draws: measures.sampled_kl(p, eta_p, q, eta_q)"
        )
    return value


class Measure(Hooks):
    """A measure h on R^d, known by its log-partition. See the module's docstring for the contract.

    `create` of every class takes tensors, numbers, nested lists and NumPy arrays. Integers become torch's default dtype;
    half precision is kept until something is computed. A number stands for every coordinate; how many there are, the other
    parameters or ``dim=`` determine, and otherwise there is one. Complex numbers and objects without numbers are a
    TypeError. Shapes that do not fit, no coordinate, NaN and infinities are a ValueError.

    Every method takes `eta` of shape ``(*batch_shape, *query, *event_shape)``, as a tensor or as numbers, and raises a
    ValueError for another shape, and a `DomainError` where A(eta) = ∞ (not noticed while compiling).

    Example:
        >>> import torch
        >>> from massieu.measures import Measure
        >>> class Counts(Measure):
        ...     rate: torch.Tensor  # (*batch, d)
        ...
        ...     def _log_partition(self, eta):
        ...         return (self._align(self.rate, eta) * torch.expm1(eta)).sum(-1)
        >>> Counts(torch.tensor([2.0, 3.0])).mean(torch.zeros(2)).tolist()
        [2.0, 3.0]
    """

    _family: ClassVar[str] = "measures"
    _tilted: ClassVar[Callable[["Measure", Tensor], "Measure"]]
    """`combine.Tilted`, the default class of tilted measures. That module sets it, as it imports this one."""

    @final
    def log_partition(self, eta: Float[Tensor, "*batch_query_event"]) -> Float[Tensor, "*batch_query"]:
        """A(eta) = log ∫ exp(x·eta) h(dx), in nats and at least float32. Twice differentiable (S1)."""
        measure, eta = self._admit(eta)
        return measure._log_partition(eta)

    @final
    def mean(self, eta: Float[Tensor, "*batch_query_event"]) -> Float[Tensor, "*batch_query_event"]:
        """∇A(eta), the mean of p_eta = exp(x·eta − A(eta)) h: attention's output when h is a set of keys (S3)."""
        measure, eta = self._admit(eta)
        return measure._mean(eta)

    @final
    def fisher(self, eta: Float[Tensor, "*batch_query_event"]) -> Float[Tensor, "*batch_query_event_event"]:
        """∇²A(eta), the covariance of p_eta: its Fisher information in eta. Centred (S10)."""
        measure, eta = self._admit(eta)
        return measure._fisher(eta)

    @final
    def fisher_vp(
        self, eta: Float[Tensor, "*batch_query_event"], vector: Float[Tensor, "*batch_query_event"]
    ) -> Float[Tensor, "*batch_query_event"]:
        """∇²A(eta)·vector, without the matrix; `vector` has the shape of `eta`."""
        measure, eta, vector = self._admit(eta, vector=vector)
        return measure._fisher_vp(eta, vector)

    @final
    def entropy(self, eta: Float[Tensor, "*batch_query_event"]) -> Float[Tensor, "*batch_query"]:
        """−E log(dp_eta/dh) = A(eta) − eta·∇A(eta), in nats: relative to h (S8).

        For unweighted atoms that is Shannon's entropy of the weights; for a probability h it is −KL(p_eta ‖ h) ≤ 0.
        """
        measure, eta = self._admit(eta)
        return measure._entropy(eta)

    @final
    @door(eta_p=_parameter, eta_q=_parameter)
    def kl(
        self, eta_p: Float[Tensor, "*batch_query_event"], eta_q: Float[Tensor, "*batch_query_event"]
    ) -> Float[Tensor, "*batch_query"]:
        """KL(p_{eta_p} ‖ p_{eta_q}) = A(eta_q) − A(eta_p) − ∇A(eta_p)·(eta_q − eta_p), in nats (S7).

        This is the Bregman divergence B_A(eta_q, eta_p): the arguments change places. It is computed in forms that do
        not subtract nearly equal numbers: relative error 1e-5 in float32 down to ‖eta_p − eta_q‖ = 1e-6.
        """
        measure, eta_p, eta_q = self._admit(eta_p, eta_q=eta_q)
        measure._check_domain(eta_q)
        return measure._kl_to(eta_p, eta_q, eta_q - eta_p)

    @final
    def tilt(self, eta: Float[Tensor, "*batch_event"]) -> "Measure":
        """The probability p_eta as a measure: log-partition A(· + eta) − A(eta).

        ``tilt(a).tilt(b)`` is ``tilt(a + b)``: tilting is a group action. `eta` has exactly the shape
        ``batch_shape + event_shape``. Tilted atoms, Gaussians, spins and others are measures of the same class; for all
        other measures the result is a composition.
        """
        expected = (*self.batch_shape, *self.event_shape)
        eta = real_tensor("eta", eta, self._some_leaf())
        if tuple(eta.shape) != expected:
            raise ValueError(f"tilt needs eta of shape {expected} (batch + event), got {tuple(eta.shape)}")
        measure, eta = self._admit(eta)
        if values_are_readable(eta) and any_true(measure._log_partition(eta) == torch.inf):
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
        """Independent draws from p_eta, `shape` of them (a number or a shape) for each `eta`, without a gradient.

        If the generator is on another device than `eta`, they are drawn there and moved to the device of `eta`.

        Raises:
            ValueError: `shape` is no shape, or `eta` has a NaN.
            MissingFormError: the measure has no sampler.
        """
        sample_shape = _sample_shape(shape)
        measure, eta = self._admit(eta)
        has_sampler = type(measure)._sample is not Hooks._sample
        if has_sampler and (eta.is_meta or sample_shape.numel() * eta.numel() == 0):
            # No number to draw: samplers of PyTorch fail for empty and meta tensors.
            return eta.new_empty((*sample_shape, *eta.shape))
        if any_true(eta.isnan()):
            raise ValueError(f"{type(self).__name__}: no law to sample from, eta is NaN")
        eta_device = eta.device
        if generator is not None and generator.device != eta_device:
            measure = measure.to(generator.device)
            eta = eta.to(generator.device)
        with torch.no_grad():
            return measure._sample(eta, tuple(sample_shape), generator).to(eta_device)

    @final
    def log_prob(
        self, eta: Float[Tensor, "*batch_query_event"], point: Float[Tensor, "*shape_batch_query_event"]
    ) -> Float[Tensor, "*shape_batch_query"]:
        """The log-probability (discrete h) or log-density of p_eta at `point`, in nats; −inf outside the support.

        `point` has the shape of what `sample` returns: sample dimensions, of any number, and then those of eta. Densities
        are with respect to Lebesgue measure, or the surface area of a sphere. A measure with atoms and a density has a
        probability at its atoms and a density elsewhere (S4).

        Raises:
            ValueError: the last dimensions of `point` are not those of eta.
            MissingFormError: the measure has no density, or none in closed form.
        """
        eta = real_tensor("eta", eta, self._some_leaf())
        point = real_tensor("point", point, eta)
        if point.shape[max(point.ndim - eta.ndim, 0) :] != eta.shape:
            raise ValueError(f"point must have shape (*shape, *{tuple(eta.shape)}), got {tuple(point.shape)}")
        measure, eta = self._admit(eta.to(torch.promote_types(eta.dtype, point.dtype)))
        sample_shape = point.shape[: point.ndim - eta.ndim]
        event_ndim = len(self.event_shape)
        lead_ndim = eta.ndim - event_ndim
        # Sample dimensions become one more query dimension, since batch dimensions come first: (*lead, samples, *event).
        points = point.reshape(sample_shape.numel(), *eta.shape).movedim(0, lead_ndim)
        points = measure._on_support(points.to(eta.dtype), point.dtype)
        log_prob = measure._log_prob(eta.unsqueeze(lead_ndim), points)
        # No law has mass or density at infinity, whatever its formula gives there; NaN stays NaN.
        is_infinite = points.isinf().flatten(points.ndim - event_ndim).any(-1)
        is_nan = (points.isnan() | eta.unsqueeze(lead_ndim).isnan()).flatten(points.ndim - event_ndim).any(-1)
        log_prob = log_prob.masked_fill(is_infinite, -torch.inf)
        log_prob = log_prob.masked_fill(is_nan, torch.nan)
        return log_prob.movedim(lead_ndim, 0).reshape((*sample_shape, *eta.shape[:lead_ndim]))

    @final
    def cumulants(
        self, eta: Float[Tensor, "*batch_query_event"], direction: Float[Tensor, "*batch_query_event"], order: int
    ) -> Float[Tensor, "*batch_query order"]:
        """κ_1 … κ_order of the projection x·direction under p_eta: derivatives of A along `direction` (S10, B3).

        κ_1 = mean·direction, κ_2 = directionᵀ F direction, and the third and fourth are the unnormalised skewness and
        excess kurtosis.

        Raises:
            ValueError: `direction` has another shape than `eta`, or `order` is not in 1 … 6.
        """
        if not 1 <= whole_number("order", order) <= _HIGHEST_ORDER:
            raise ValueError(f"order must be between 1 and {_HIGHEST_ORDER}, got {order}")
        measure, eta, direction = self._admit(eta, direction=direction)
        return measure._cumulants(eta, direction, order)

    # Hooks that return a measure.

    def _tilt(self, eta: Tensor) -> "Measure":
        """The tilted measure; override it if that is of the same class."""
        return self._tilted(self, eta)

    def _power(self, exponent: float) -> "Measure | None":
        """The measure of log-partition exponent·A in closed form, or None."""
        return None

    def _some_leaf(self) -> Tensor | None:
        """One of the measure's tensors, for the device."""
        return next(iter(self._tensors()), None)

    def _admit(self, eta: Tensor, **others: Tensor) -> tuple[Any, ...]:
        """Check shapes and domain; promote the measure and its arguments to one dtype of at least float32."""
        measure, eta, *rest = self._fit(eta=eta, **others)
        measure._check_domain(eta)
        return measure, eta, *rest

    def _fit(self, **arguments: Tensor) -> tuple[Any, ...]:
        """Check shapes; promote the measure and the arguments, all of eta's shape, to one dtype of at least float32."""
        leaves = self._tensors()
        like = next((leaf for leaf in leaves if leaf.is_floating_point()), None)
        tensors = {name: real_tensor(name, argument, like) for name, argument in arguments.items()}
        first, *others = tensors.values()
        need_batch(type(self).__name__, next(iter(tensors)), first.shape, self.batch_shape, self.event_shape)
        if any(other.shape != first.shape for other in others):
            for name, other in tensors.items():
                check_shape(name, other, first.shape)
        # The full checks are slow: they run only if a quick look finds a difference.
        if any(tensor.device != first.device for tensor in (*others, *leaves)):
            self._check_device(**tensors)
        is_wide = first.dtype in (torch.float32, torch.float64)
        if is_wide and all(t.dtype == first.dtype or not t.is_floating_point() for t in (*others, *leaves)):
            return self, first, *others
        return self._promoted(first, *others)

    def _check_domain(self, eta: Tensor) -> None:
        inside = self._in_domain(eta) if values_are_readable(eta) else None
        if inside is not None and not all_true(inside):
            raise DomainError(f"{type(self).__name__}: eta is outside the domain, {self._domain()}")


def _sample_shape(shape: Sequence[int] | int) -> torch.Size:
    """The sample dimensions as a shape; a number stands for one dimension."""
    unchecked: Any = shape
    sizes: tuple[Any, ...] = tuple(unchecked) if isinstance(unchecked, Iterable) else (unchecked,)
    if not all(isinstance(size, int) and size >= 0 for size in sizes):
        raise ValueError(f"shape must be a number of draws or a tuple of such numbers, none negative, got {shape!r}")
    return torch.Size(sizes)
