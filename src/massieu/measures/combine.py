"""Measures made from one other: tilted, and pushed through an affine map."""

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import real_tensor
from massieu.foundation.doors import MEASURE, door
from massieu.foundation.transforms import all_true, any_true
from massieu.foundation.values import longest_batch, spread
from massieu.measures import listed
from massieu.measures.base import Measure
from massieu.measures.hooks import Listed, MissingFormError, Reference


@door(measure=MEASURE)
def affine(
    measure: Measure, weight: Float[Tensor, "*batch e d"], bias: Float[Tensor, "*batch e"] | None = None
) -> Measure:
    """The law of W x + b for x under `measure`: log-partition A(Wᵀeta) + b·eta.

    A learned key projection is ``affine(keys, W, b)``; the hidden layer of a Boltzmann machine is ``affine(units, W)``.
    The longest of the batch shapes of measure, weight and bias is that of the result; the others must be its prefixes.

    Raises:
        ValueError: shapes that do not fit, or a measure whose points are not vectors.

    Example:
        >>> from massieu.measures import Spin, affine
        >>> affine(Spin.create(dim=2), [[3.0, 4.0]], [1.0]).fisher([0.0]).tolist()  # 3² + 4²
        [[25.0]]
    """
    if len(measure.event_shape) != 1:
        raise ValueError(f"affine needs a measure on vectors, got one with event shape {tuple(measure.event_shape)}")
    weight = real_tensor("weight", weight, bias if isinstance(bias, Tensor) else None)
    bias = None if bias is None else real_tensor("bias", bias, weight)
    if weight.ndim < 2 or weight.shape[-1] != measure.event_shape[0]:
        raise ValueError(
            f"affine needs weight of shape {('*batch', 'e', measure.event_shape[0])} for a measure on vectors of shape "
            f"{tuple(measure.event_shape)}, got {tuple(weight.shape)}"
        )
    if bias is not None and (bias.ndim < 1 or bias.shape[-1] != weight.shape[-2]):
        raise ValueError(
            f"affine needs bias of shape {('*batch', weight.shape[-2])} for weight of shape {tuple(weight.shape)}, "
            f"got {tuple(bias.shape)}"
        )
    pushed = Affine(measure, weight, weight.new_zeros(weight.shape[-2]) if bias is None else bias)
    longest_batch("affine", pushed._batch_shapes)
    return pushed


class Wrapped(Measure):
    """A measure made from one inner measure: A(eta) = c·A_inner(pulled eta), plus a linear part that subclasses add.

    A subclass overrides `_pull`, from its eta to the inner one, `_pull_along`, the same for a direction, or `_times`, the
    product with c. By default all three are the identity, and shapes are the inner measure's.
    """

    measure: Measure

    def _pull(self, eta: Tensor) -> Tensor:
        """The inner measure's natural parameter at eta."""
        return eta

    def _pull_along(self, vector: Tensor) -> Tensor:
        """The inner measure's direction when eta moves along a vector: the linear part of `_pull`."""
        return vector

    def _times(self, value: Tensor) -> Tensor:
        """c·value."""
        return value

    @property
    def batch_shape(self) -> torch.Size:
        return self.measure.batch_shape

    @property
    def event_shape(self) -> torch.Size:
        return self.measure.event_shape

    @property
    def _reference(self) -> Reference:
        return self.measure._reference

    def _in_domain(self, eta: Tensor) -> Tensor | None:
        return self.measure._in_domain(self._pull(eta))

    def _domain(self) -> str:
        return self.measure._domain()

    def _interior(self) -> Tensor | None:
        return self.measure._interior()

    def _support(self, direction: Tensor) -> Tensor | None:
        return self.measure._support(direction)

    def _range(self) -> tuple[Tensor, Tensor] | None:
        return self.measure._range()

    def _mean(self, eta: Tensor) -> Tensor:
        return self._times(self.measure._mean(self._pull(eta)))

    def _fisher_vp(self, eta: Tensor, vector: Tensor) -> Tensor:
        return self._times(self.measure._fisher_vp(self._pull(eta), self._pull_along(vector)))

    def _fisher(self, eta: Tensor) -> Tensor:
        return self._times(self.measure._fisher(self._pull(eta)))

    def _entropy(self, eta: Tensor) -> Tensor:
        return self._times(self.measure._entropy(self._pull(eta)))

    def _kl(self, eta: Tensor, delta: Tensor) -> Tensor:
        return self._times(self.measure._kl(self._pull(eta), self._pull_along(delta)))

    def _kl_to(self, eta: Tensor, other: Tensor, delta: Tensor) -> Tensor:
        return self._times(self.measure._kl_to(self._pull(eta), self._pull(other), self._pull_along(delta)))

    def _cumulants(self, eta: Tensor, direction: Tensor, order: int) -> Tensor:
        return self._times(self.measure._cumulants(self._pull(eta), self._pull_along(direction), order))

    def _log_density(self, point: Tensor) -> Tensor:
        origin = torch.zeros_like(point)
        return self._log_prob(origin, point) + self._log_partition(origin)


class Tilted(Wrapped):
    """A measure tilted by `eta`, normalised. Made by `Measure.tilt`."""

    eta: Float[Tensor, "*batch_event"]

    def _pull(self, eta: Tensor) -> Tensor:
        return eta + self._align(self.eta, eta, len(self.event_shape))

    def _domain(self) -> str:
        return f"{self.measure._domain()} (after adding the tilt)"

    def _log_normaliser(self, eta: Tensor) -> Tensor:
        """A of the inner measure at the tilt, to broadcast against a number for each query."""
        return self._align(self.measure._log_partition(self.eta), eta, 0)

    def _log_partition(self, eta: Tensor) -> Tensor:
        normaliser = self._log_normaliser(eta)
        # A zero measure stays zero: −inf is not subtracted from −inf.
        return self.measure._log_partition(self._pull(eta)) - normaliser.masked_fill(normaliser == -torch.inf, 0.0)

    def _entropy(self, eta: Tensor) -> Tensor:
        # The tilted measure h is a probability unless it is zero, so that the entropy is −KL(p_eta ‖ h).
        return torch.where(self._log_normaliser(eta) == -torch.inf, -torch.inf, -self._kl(eta, -eta))

    def _tilt(self, eta: Tensor) -> "Tilted":
        return Tilted(self.measure, self.eta + eta)

    def _interior(self) -> Tensor | None:
        point = self.measure._interior()
        return None if point is None else point - self.eta

    def _log_density(self, point: Tensor) -> Tensor:
        return self._log_prob(torch.zeros_like(point), point)

    def _log_prob(self, eta: Tensor, point: Tensor) -> Tensor:
        return self.measure._log_prob(self._pull(eta), point)

    def _unit_sizes(self) -> list[int]:
        return self.measure._unit_sizes()

    def _log_partition_of_units(self, eta: Tensor) -> Tensor:
        start = self.measure._log_partition_of_units(self._pull(torch.zeros_like(eta)))
        return self.measure._log_partition_of_units(self._pull(eta)) - start

    def _log_prob_of_units(self, eta: Tensor, point: Tensor) -> Tensor:
        return self.measure._log_prob_of_units(self._pull(eta), point)

    def _nearest(self, point: Tensor) -> Tensor | None:
        return self.measure._nearest(point)

    def _listed(self) -> Listed | None:
        part = self.measure._listed()
        return None if part is None else part._replace(log_weight=listed.as_atoms(part)._log_probability(self.eta))

    def _sample(self, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return self.measure._sample(self._pull(eta), shape, generator)


Measure._tilted = Tilted


class Affine(Wrapped):
    """The image of a measure under x ↦ weight x + bias. Made by `affine`."""

    weight: Float[Tensor, "*batch e d"]
    bias: Float[Tensor, "*batch e"]

    @property
    def _batch_shapes(self) -> list[torch.Size]:
        return [self.measure.batch_shape, self.weight.shape[:-2], self.bias.shape[:-1]]

    @property
    def batch_shape(self) -> torch.Size:
        return max(self._batch_shapes, key=len)

    @property
    def event_shape(self) -> torch.Size:
        return self.weight.shape[-2:-1]

    def _pull(self, eta: Tensor) -> Tensor:
        """Wᵀ eta."""
        return (eta.unsqueeze(-2) @ self._align(self.weight, eta, 2)).squeeze(-2)

    def _pull_along(self, vector: Tensor) -> Tensor:
        return self._pull(vector)

    def _push(self, points: Tensor) -> Tensor:
        """W x for x of shape (*batch, *query, d)."""
        return _times(self._align(self.weight, points, 2), points)

    def _domain(self) -> str:
        return f"{self.measure._domain()} (after multiplying by the weight's transpose)"

    def _log_partition(self, eta: Tensor) -> Tensor:
        return self.measure._log_partition(self._pull(eta)) + self._dot(eta, self._align(self.bias, eta))

    def _mean(self, eta: Tensor) -> Tensor:
        return self._push(super()._mean(eta)) + self._align(self.bias, eta)

    def _fisher_vp(self, eta: Tensor, vector: Tensor) -> Tensor:
        return self._push(super()._fisher_vp(eta, vector))

    def _fisher(self, eta: Tensor) -> Tensor:
        weight = self._align(self.weight, eta, 2)
        fisher = super()._fisher(eta)
        image = weight @ fisher @ weight.mT
        if not any_true(image.isnan()):
            return image
        # Some entries overflow, and ∞·0 gave NaN: `_push` skips weights of 0. First on rows, then on columns.
        return self._push(self._push(fisher).mT)

    def _cumulants(self, eta: Tensor, direction: Tensor, order: int) -> Tensor:
        cumulants = super()._cumulants(eta, direction, order)
        shift = self._dot(direction, self._align(self.bias, direction)).unsqueeze(-1)
        return torch.cat([cumulants[..., :1] + shift, cumulants[..., 1:]], -1)

    def _interior(self) -> Tensor | None:
        point = self.measure._interior()
        if point is None:
            return None
        # The eta of least norm with Wᵀeta nearest to the point.
        return (torch.linalg.pinv(self.weight.mT) @ point.unsqueeze(-1)).squeeze(-1)

    def _support(self, direction: Tensor) -> Tensor | None:
        support = self.measure._support(self._pull(direction))
        if support is None:
            return None
        return support + self._dot(direction, self._align(self.bias, direction))

    def _range(self) -> tuple[Tensor, Tensor] | None:
        # By `_support` along each axis, not the inner measure's.
        return Measure._range(self)

    def _listed(self) -> Listed | None:
        part = self.measure._listed()
        if part is None:
            return None
        points, log_weight, size = listed.spread_over(part, self.batch_shape)
        weight = spread("affine", self.weight, self.batch_shape, 2)
        bias = spread("affine", self.bias, self.batch_shape, 1)
        # A matrix product may add its terms in any order: one more rounding for each.
        size = (1 + weight.shape[-1] / listed.ROUNDINGS) * (size @ weight.abs().mT) + bias.unsqueeze(-2).abs()
        return Listed(points @ weight.mT + bias.unsqueeze(-2), log_weight, size)

    def _log_prob(self, eta: Tensor, point: Tensor) -> Tensor:
        """By the change of variables; for a weight of more rows than columns, per area of the image."""
        is_discrete = self._reference == "counting"
        part = self._listed() if is_discrete else None
        if part is not None:
            return listed.log_prob(part, eta, point)
        if not is_discrete and self._reference != "lebesgue":
            raise MissingFormError(f"affine: the image of {type(self.measure).__name__} has no density in closed form")
        source = self._source(point)
        centred = point - self._align(self.bias, point)
        # A point is on the image if the image of its source is the point itself, within rounding.
        image = self._push(source)
        if is_discrete:
            size = self._align(self.weight.abs(), point, 2) @ source.abs().unsqueeze(-1)
            sizes = (point, self._align(self.bias, point), (1 + self.weight.shape[-1]) * size.squeeze(-1))
            is_off = ~listed.is_close(centred, image, *sizes).all(-1)
        else:
            is_off = (image - centred).norm(dim=-1) > self._rounding(centred)
        density = self.measure._log_prob(self._pull(eta), source)
        if not is_discrete:
            # The volume factor √det WᵀW is the product of the singular values.
            density = density - self._align(torch.linalg.svdvals(self.weight).log().sum(-1), point, 0)
        return density.masked_fill(is_off, -torch.inf)

    def _source(self, point: Tensor) -> Tensor:
        """The x of the inner measure's support whose image is `point`, or nearest to it.

        Raises:
            MissingFormError: the weight is not one-to-one, or the inner measure does not know its nearest point.
        """
        values = torch.linalg.svdvals(self.weight)
        is_wide = self.weight.shape[-1] > self.weight.shape[-2]
        if is_wide or not all_true(values > 0):
            raise MissingFormError("affine: the image under a weight that is not one-to-one has no density here")
        centred = point - self._align(self.bias, point)
        source = (self._align(torch.linalg.pinv(self.weight), point, 2) @ centred.unsqueeze(-1)).squeeze(-1)
        nearest = self.measure._nearest(source)
        if nearest is None:
            raise MissingFormError(
                f"affine: the image of {type(self.measure).__name__}, whose points are not known, has no density here"
            )
        if self._reference == "counting":
            return nearest
        # Rounding may have moved the source slightly off the support.
        distance = (self._push(nearest) - centred).norm(dim=-1, keepdim=True)
        return torch.where(distance <= self._rounding(centred).unsqueeze(-1), nearest, source)

    def _rounding(self, centred: Tensor) -> Tensor:
        """The distance from the image that rounding may cause, for each point."""
        return 64 * centred.shape[-1] * torch.finfo(centred.dtype).eps * centred.norm(dim=-1)

    def _nearest(self, point: Tensor) -> Tensor | None:
        if self._reference == "lebesgue" and self.weight.shape[-2] <= self.weight.shape[-1]:
            return point
        part = self._listed()
        if part is not None:
            return listed.as_atoms(part)._nearest(point)
        try:
            return self._push(self._source(point)) + self._align(self.bias, point)
        except MissingFormError:
            return None

    def _sample(self, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        points = self.measure._sample(self._pull(eta), shape, generator)
        weight = self._align(self.weight, eta, 2)
        return _times(weight, points) + self._align(self.bias, eta)


def _times(weight: Tensor, points: Tensor) -> Tensor:
    """weight @ point, where 0·∞ is 0: an infinite entry does not count in a row that has weight 0 for it."""
    image = (weight @ points.unsqueeze(-1)).squeeze(-1)
    if not any_true(image.isnan()):
        return image
    # The product of the finite entries, replaced by the sign of the infinite ones: NaN if they have both signs.
    infinite = points.isinf()
    finite = (weight @ points.masked_fill(infinite, 0.0).unsqueeze(-1)).squeeze(-1)
    signs = weight * torch.where(infinite, points.sign(), 0.0).unsqueeze(-2)
    has_positive = (signs > 0).any(-1)
    has_negative = (signs < 0).any(-1)
    infinity = torch.where(has_positive, torch.where(has_negative, torch.nan, torch.inf), -torch.inf)
    return torch.where(has_positive | has_negative, infinity, finite)
