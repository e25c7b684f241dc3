"""Measures made from one other: tilted, and pushed through an affine map."""

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import real_tensor
from massieu.foundation.doors import MEASURE, door
from massieu.foundation.transforms import every, some
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
    """A measure made from one other, whose A, at what it sees of eta, it has a number of times.

    Unless it says otherwise: `_pull` is what the other sees of a point eta, `_pull_along` of a direction, and `_times`
    multiplies. Shapes are the other's, and what is linear in eta is added by those that have it.
    """

    measure: Measure

    def _pull(self, eta: Tensor) -> Tensor:
        return eta

    def _pull_along(self, vector: Tensor) -> Tensor:
        return vector

    def _times(self, value: Tensor) -> Tensor:
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

    def _start(self, eta: Tensor) -> Tensor:
        return self._align(self.measure._log_partition(self.eta), eta, 0)

    def _log_partition(self, eta: Tensor) -> Tensor:
        start = self._start(eta)
        # A zero measure stays one: its −inf is not subtracted from itself.
        return self.measure._log_partition(self._pull(eta)) - start.masked_fill(start == -torch.inf, 0.0)

    def _entropy(self, eta: Tensor) -> Tensor:
        # −KL from the tilted measure itself, a probability unless it is zero.
        return torch.where(self._start(eta) == -torch.inf, -torch.inf, -self._kl(eta, -eta))

    def _tilt(self, eta: Tensor) -> "Tilted":
        return Tilted(self.measure, self.eta + eta)

    def _interior(self) -> Tensor | None:
        inside = self.measure._interior()
        return None if inside is None else inside - self.eta

    def _log_density(self, point: Tensor) -> Tensor:
        return self._log_prob(torch.zeros_like(point), point)

    def _log_prob(self, eta: Tensor, point: Tensor) -> Tensor:
        return self.measure._log_prob(self._pull(eta), point)

    def _nearest(self, point: Tensor) -> Tensor | None:
        return self.measure._nearest(point)

    def _listed(self) -> Listed | None:
        part = self.measure._listed()
        return None if part is None else part._replace(log_weight=listed.atoms(part)._log_probability(self.eta))

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
        weight, fisher = self._align(self.weight, eta, 2), super()._fisher(eta)
        image = weight @ fisher @ weight.mT
        if not some(image.isnan()):
            return image
        # Entries too large to hold, row by row.
        return self._push(self._push(fisher).mT)

    def _cumulants(self, eta: Tensor, direction: Tensor, order: int) -> Tensor:
        cumulants = super()._cumulants(eta, direction, order)
        shift = self._dot(direction, self._align(self.bias, direction)).unsqueeze(-1)
        return torch.cat([cumulants[..., :1] + shift, cumulants[..., 1:]], -1)

    def _interior(self) -> Tensor | None:
        inside = self.measure._interior()
        return None if inside is None else (torch.linalg.pinv(self.weight.mT) @ inside.unsqueeze(-1)).squeeze(-1)

    def _support(self, direction: Tensor) -> Tensor | None:
        support = self.measure._support(self._pull(direction))
        return None if support is None else support + self._dot(direction, self._align(self.bias, direction))

    def _range(self) -> tuple[Tensor, Tensor] | None:
        return Measure._range(self)

    def _listed(self) -> Listed | None:
        part = self.measure._listed()
        if part is None:
            return None
        points, log_weight, size = listed.spread_over(part, self.batch_shape)
        weight, bias = (spread("affine", t, self.batch_shape, n) for t, n in ((self.weight, 2), (self.bias, 1)))
        # Matrix products in another order: one rounding for each term.
        size = (1 + weight.shape[-1] / listed.ROUNDINGS) * (size @ weight.abs().mT) + bias.unsqueeze(-2).abs()
        return Listed(points @ weight.mT + bias.unsqueeze(-2), log_weight, size)

    def _log_prob(self, eta: Tensor, point: Tensor) -> Tensor:
        """By the change of variables; on the image of a taller weight, per area of that image."""
        discrete = self._reference == "counting"
        part = self._listed() if discrete else None
        if part is not None:
            return listed.log_prob(part, eta, point)
        if not discrete and self._reference != "lebesgue":
            raise MissingFormError(f"affine: the image of {type(self.measure).__name__} has no density in closed form")
        source = self._source(point)
        centred = point - self._align(self.bias, point)
        image = self._push(source)
        if discrete:
            size = self._align(self.weight.abs(), point, 2) @ source.abs().unsqueeze(-1)
            sizes = (point, self._align(self.bias, point), (1 + self.weight.shape[-1]) * size.squeeze(-1))
            missed = ~listed.is_close(centred, image, *sizes).all(-1)
        else:
            missed = (image - centred).norm(dim=-1) > self._forgiven(centred)
        density = self.measure._log_prob(self._pull(eta), source)
        if not discrete:
            density = density - self._align(torch.linalg.svdvals(self.weight).log().sum(-1), point, 0)
        return density.masked_fill(missed, -torch.inf)

    def _source(self, point: Tensor) -> Tensor:
        """The x in the support of which `point` is the image, or the nearest to it; the weight must be one-to-one."""
        values = torch.linalg.svdvals(self.weight)
        flat = self.weight.shape[-1] > self.weight.shape[-2]
        if flat or not every(values > 0):
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
        # Rounding may have put it a little beside the support.
        off = (self._push(nearest) - centred).norm(dim=-1, keepdim=True)
        return torch.where(off <= self._forgiven(centred).unsqueeze(-1), nearest, source)

    def _forgiven(self, centred: Tensor) -> Tensor:
        return 64 * centred.shape[-1] * torch.finfo(centred.dtype).eps * centred.norm(dim=-1)

    def _nearest(self, point: Tensor) -> Tensor | None:
        if self._reference == "lebesgue" and self.weight.shape[-2] <= self.weight.shape[-1]:
            return point
        part = self._listed()
        if part is not None:
            return listed.atoms(part)._nearest(point)
        try:
            return self._push(self._source(point)) + self._align(self.bias, point)
        except MissingFormError:
            return None

    def _sample(self, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        points = self.measure._sample(self._pull(eta), shape, generator)
        weight = self._align(self.weight, eta, 2)
        return _times(weight, points) + self._align(self.bias, eta)


def _times(weight: Tensor, points: Tensor) -> Tensor:
    """weight @ point, where an entry too large to hold is nothing to a row that has a weight of 0 for it."""
    image = (weight @ points.unsqueeze(-1)).squeeze(-1)
    if not some(image.isnan()):
        return image
    infinite = points.isinf()
    finite = (weight @ points.masked_fill(infinite, 0.0).unsqueeze(-1)).squeeze(-1)
    drift = weight * torch.where(infinite, points.sign(), 0.0).unsqueeze(-2)
    rising, falling = (drift > 0).any(-1), (drift < 0).any(-1)
    far = torch.where(rising, torch.where(falling, torch.nan, torch.inf), -torch.inf)
    return torch.where(rising | falling, far, finite)
