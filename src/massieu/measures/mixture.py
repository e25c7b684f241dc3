"""Mixtures: the log-partition of a weighted sum of measures is a log-sum-exp of theirs."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import check_log_probabilities, check_shape, real_tensor
from massieu.foundation.doors import MEASURE, sequence
from massieu.foundation.numerics import log_softmax, logsumexp
from massieu.foundation.transforms import any_true, values_are_readable
from massieu.foundation.values import longest_batch, spread
from massieu.measures import listed
from massieu.measures.base import Measure
from massieu.measures.hooks import Listed, Reference
from massieu.measures.moments import centred_log_mean_exp, cumulants_of_moments, moments_of_cumulants
from massieu.measures.sums import all_or_none, first_inside, one_reference


def mixture(log_weight: Float[Tensor, "*batch K"], components: Sequence[Measure] | Measure) -> "Mixture":
    """A mixture Σ_k exp(log_weight_k) h_k of measures: A(eta) = log Σ_k exp(log_weight_k + A_k(eta)) (S2, S14).

    Args:
        log_weight: One log-weight for each component, below +inf; they need not add up to one.
        components: K measures on one event shape, the longest of whose batch shapes the others are prefixes of; or one
            measure whose last batch dimension is K, which is as fast as one measure.

    Raises:
        ValueError: no component, shapes that do not fit, a NaN or infinite log-weight.
        TypeError: `log_weight` is not floating-point.

    Example:
        >>> from massieu.measures import Constant, Gaussian, mixture
        >>> both = mixture([0.0, 0.0], [Constant.create(4.0), Gaussian.create(0.0, 1.0)])
        >>> both.mean([0.0]).tolist(), both.responsibilities([0.0]).tolist()
        ([2.0], [0.5, 0.5])
    """
    if isinstance(components, Measure):
        if not components.batch_shape:
            raise ValueError("mixture needs several measures, or one with a batch dimension that counts the components")
        parts = components
        count = components.batch_shape[-1]
    else:
        parts = tuple(sequence("components", components))
        for part in parts:
            MEASURE("components", part)
        count = len(parts)
        events = {tuple(part.event_shape) for part in parts}
        if len(events) > 1:
            raise ValueError(f"mixture needs components on one event shape, got {sorted(events)}")
    log_weight = real_tensor("log_weight", log_weight)
    if log_weight.ndim == 0:
        log_weight = log_weight.expand(count)
    if count == 0 or log_weight.shape[-1] != count:
        raise ValueError(
            f"mixture needs log_weight of shape {('*batch', count)} for {count} components, got "
            f"{tuple(log_weight.shape)}"
        )
    check_log_probabilities(log_weight=log_weight)
    mixed = Mixture(log_weight, parts)
    longest_batch("mixture", mixed._batch_shapes)
    return mixed


class Mixture(Measure):
    """A weighted sum of measures. Made by `mixture`; with the heads of an attention layer as components, S14.

    Attributes:
        log_weight: Shape (*batch, K).
        components: K measures, or one whose last batch dimension is K.
    """

    log_weight: Float[Tensor, "*batch K"]
    components: Measure | tuple[Measure, ...]

    @property
    def _batch_shapes(self) -> list[torch.Size]:
        if isinstance(self.components, Measure):
            return [self.log_weight.shape[:-1], self.components.batch_shape[:-1]]
        return [self.log_weight.shape[:-1], *(part.batch_shape for part in self.components)]

    @property
    def batch_shape(self) -> torch.Size:
        return max(self._batch_shapes, key=len)

    @property
    def event_shape(self) -> torch.Size:
        return self.components.event_shape if isinstance(self.components, Measure) else self.components[0].event_shape

    def responsibilities(self, eta: Float[Tensor, "*batch_query_event"]) -> Float[Tensor, "*batch_query K"]:
        """Each component's share of Z(eta): r_k ∝ exp(log_weight_k + A_k(eta)), the gate of head k (S14)."""
        measure, eta = self._admit(eta)
        return measure._log_share(eta).exp().movedim(measure._axis, -1)

    def lower_bound(
        self, eta: Float[Tensor, "*batch_query_event"], weights: Float[Tensor, "*batch K"] | None = None
    ) -> Float[Tensor, "*batch_query"]:
        """Σ_k r_k A_k(eta) − KL(r ‖ w) ≤ A(eta) for fixed weights r, where w are the mixture's own, not normalised (S14).

        Its gradient is Σ r_k ∇A_k: heads added with fixed weights, as multi-head attention adds them. The gap to A is
        KL(r ‖ responsibilities), which is zero for r = responsibilities(eta).

        Args:
            eta: The natural parameter, shared by all components.
            weights: r, non-negative with sum one over the last dimension; the mixture's normalised weights by default.

        Raises:
            ValueError: weights of another shape than ``log_weight``.
        """
        if weights is None:
            weights = log_softmax(self.log_weight).exp()
        check_shape("weights", weights, self.log_weight.shape)
        measure, eta = self._admit(eta)
        weight = measure._spread(weights.to(eta.dtype), eta)
        # Σ r (log w + A − log r); a component of weight 0 adds nothing, even if its A is infinite.
        is_positive = weight > 0
        gain = torch.where(is_positive, measure._log_terms(eta), 0.0) - torch.where(is_positive, weight, 1.0).log()
        return (weight * gain).sum(measure._axis)

    def _each(self, function: Callable[..., Tensor], *tensors: Tensor, leading: int = 0) -> Tensor:
        """``function(component, *tensors)`` for every component, stacked behind the batch dimensions.

        The tensors have shape (*batch, *query, *event); the results have `leading` dimensions more, in front.
        """
        axis = self._axis + leading
        if not isinstance(self.components, Measure):
            return torch.stack([function(part, *tensors) for part in self.components], axis)
        # One call for all components. Their dimension is the last of the measure's batch, which may be shorter than the
        # mixture's; the results have it where it was, after the leading dimensions.
        copies = [self._for_component(self.components, tensor) for tensor in tensors]
        return function(self.components, *copies).movedim(len(self.components.batch_shape) - 1 + leading, axis)

    def _for_component(self, part: Measure, tensor: Tensor) -> Tensor:
        """What `_each` hands to a component; for one measure with a batch of K, K copies in its last batch dimension."""
        if part is not self.components:
            return tensor
        place = len(part.batch_shape) - 1
        return tensor.unsqueeze(place).expand(*tensor.shape[:place], part.batch_shape[-1], *tensor.shape[place:])

    def _spread(self, weights: Tensor, eta: Tensor) -> Tensor:
        """Weights (*batch, K) as (*batch, K, *ones), which broadcast against a scalar result of `_each`."""
        return self._align(weights, eta).movedim(-1, self._axis)

    @property
    def _axis(self) -> int:
        """The dimension of the components in the results of `_each`."""
        return len(self.batch_shape)

    def _log_terms(self, eta: Tensor) -> Tensor:
        """log_weight_k + A_k(eta), shape (*batch, K, *query)."""
        return self._each(lambda part, x: part._log_partition(x), eta) + self._spread(self.log_weight, eta)

    def _log_share(self, eta: Tensor) -> Tensor:
        """The responsibilities' logarithms, shape (*batch, K, *query).

        Raises:
            ValueError: several terms overflow, so that nobody knows which is larger. A single one has share 1.
        """
        terms = self._log_terms(eta)
        _check_defined((terms == torch.inf).sum(self._axis) > 1, terms.dtype)
        return self._log_share_of(terms)

    def _log_share_of(self, terms: Tensor) -> Tensor:
        """`_log_share` from the log-terms. Terms that overflow get equal shares; `_nan_if_tied` says where that matters."""
        axis = self._axis
        overflows = terms == torch.inf
        equal_shares = torch.where(overflows, 0.0, -torch.inf)
        scores = torch.where(overflows.any(axis, keepdim=True), equal_shares, terms)
        return log_softmax(scores.movedim(axis, -1)).movedim(-1, axis)

    def _nan_if_tied(self, terms: Tensor, parts: Tensor, value: Tensor) -> Tensor:
        """`value`; NaN where several terms overflow and their `parts` differ, so that it depends on unknown shares."""
        axis = self._axis
        overflows = terms == torch.inf
        if values_are_readable(overflows) and not any_true(overflows):
            return value
        are_several = overflows.sum(axis) > 1
        # Dimensions of one for the event, or the order of a cumulant, that parts and value have more than a term.
        overflows = overflows.reshape((*overflows.shape, *[1] * (parts.ndim - overflows.ndim)))
        are_several = are_several.reshape((*are_several.shape, *[1] * (value.ndim - are_several.ndim)))
        least = parts.masked_fill(~overflows, torch.inf).amin(axis)
        most = parts.masked_fill(~overflows, -torch.inf).amax(axis)
        return torch.where(are_several & (least != most), torch.nan, value)

    def _check_value(self, eta: Tensor, value: Tensor) -> Tensor:
        """The value; a ValueError if it is NaN because log-partitions of components overflow."""
        if any_true(value.isnan()):
            overflows = (self._log_terms(eta) == torch.inf).any(self._axis)
            _check_defined(overflows & value.isnan().reshape(*overflows.shape, -1).any(-1), value.dtype)
        return value

    def _log_partition(self, eta: Tensor) -> Tensor:
        return logsumexp(self._log_terms(eta).movedim(self._axis, -1))

    def _mixed_means(self, eta: Tensor) -> "_MixedMeans":
        axis = self._axis
        terms = self._log_terms(eta)
        share = self._log_share_of(terms).exp()
        means = self._each(lambda part, x: part._mean(x), eta)
        # Relative to the likeliest component's mean, so that means far from the origin keep their digits.
        likeliest = self._eventwise(share.argmax(axis, keepdim=True))
        base = means.take_along_dim(likeliest, axis)
        offsets = torch.where(means.isinf() & (means == base), 0.0, means - base)
        offsets = torch.where((self._eventwise(share) == 0) & ~offsets.isfinite(), 0.0, offsets)
        base = base.squeeze(axis)
        shift = (self._eventwise(share) * offsets).sum(axis)
        mean = self._nan_if_tied(terms, means, base + shift)
        return _MixedMeans(terms, share, offsets - shift.unsqueeze(axis), mean)

    def _eventwise(self, scalar: Tensor) -> Tensor:
        """A number for each query with dimensions of one for the event, which broadcasts against points."""
        return scalar.reshape(*scalar.shape, *[1] * len(self.event_shape))

    def _mean(self, eta: Tensor) -> Tensor:
        return self._check_value(eta, self._mixed_means(eta).mean)

    def _entropy(self, eta: Tensor) -> Tensor:
        """Σ r_k (log w_k − log r_k + the entropy of component k), without A and eta·mean, which may overflow."""
        terms = self._log_terms(eta)
        log_share = self._log_share_of(terms)
        has_no_share = log_share == -torch.inf
        parts = self._each(lambda part, x: part._entropy(x), eta)
        weighted_parts = parts + self._spread(self.log_weight, eta)
        gain = torch.where(has_no_share, 0.0, weighted_parts) - torch.where(has_no_share, 0.0, log_share)
        entropy = (log_share.exp() * gain).sum(self._axis)
        # The zero measure: no component has a share.
        entropy = entropy.masked_fill(has_no_share.all(self._axis), -torch.inf)
        return self._check_value(eta, self._nan_if_tied(terms, parts, entropy))

    def _fisher_vp(self, eta: Tensor, vector: Tensor) -> Tensor:
        """By the law of total variance: the components' covariances by their shares, and the covariance of their means."""
        axis = self._axis
        mixed = self._mixed_means(eta)
        within = self._each(lambda part, x, v: part._fisher_vp(x, v), eta, vector)
        # The share is multiplied first: a share of 0 removes an offset whose square would overflow.
        between = mixed.offsets * self._eventwise(mixed.share * self._dot(mixed.offsets, vector.unsqueeze(axis)))
        weight = self._eventwise(mixed.share)
        within = torch.where((weight == 0) & ~within.isfinite(), 0.0, within)
        product = (weight * within + between).sum(axis)
        return self._check_value(eta, self._nan_if_tied(mixed.terms, within, product))

    def _fisher(self, eta: Tensor) -> Tensor:
        return self._check_value(eta, super()._fisher(eta))

    def _kl(self, eta: Tensor, delta: Tensor) -> Tensor:
        """The divergence of the shares plus the mean of the components' divergences (the chain rule).

        In float64, and without a difference of two log-partitions.
        """
        measure = self.to(torch.float64)
        point = eta.double()
        delta = delta.double()
        axis = measure._axis
        offsets = measure._mixed_means(point).offsets
        log_share = measure._log_share(point).movedim(axis, -1)
        within = measure._each(lambda part, x, v: part._kl(x, v), point, delta).movedim(axis, -1)
        # A_k(eta + delta) − A_k(eta) = ∇A_k·delta + KL_k, less a constant, which drops out of a ratio of shares.
        gain = measure._dot(offsets, delta.unsqueeze(axis)).movedim(axis, -1) + within
        gain = torch.where(log_share > -torch.inf, gain, 0.0)
        # The likeliest component's gain is subtracted first, to keep digits as its share tends to 1.
        gain = gain - gain.gather(-1, log_share.argmax(-1, keepdim=True))
        share = log_share.exp()
        centred_gain = gain - (share * gain).sum(-1, keepdim=True)
        between = centred_log_mean_exp(log_share, centred_gain)
        within = torch.where(share > 0, within, 0.0)
        divergence = torch.where(within.isinf().any(-1), torch.inf, between + (share * within).sum(-1))
        return self._check_value(eta, divergence.to(eta.dtype))

    def _cumulants(self, eta: Tensor, direction: Tensor, order: int) -> Tensor:
        axis = self._axis
        mixed = self._mixed_means(eta)
        parts = self._each(lambda part, x, v: part._cumulants(x, v, order), eta, direction)
        # Moments mix linearly, cumulants do not. They are taken about the mixture's mean: about zero they would cancel.
        first = self._dot(mixed.offsets, direction.unsqueeze(axis)).unsqueeze(-1)
        moments = moments_of_cumulants(torch.cat([first, parts[..., 1:]], -1))
        centred = cumulants_of_moments((mixed.share.unsqueeze(-1) * moments).sum(axis))
        cumulants = torch.cat([self._dot(mixed.mean, direction).unsqueeze(-1), centred[..., 1:]], -1)
        return self._check_value(eta, self._nan_if_tied(mixed.terms, parts, cumulants))

    def _component_measures(self) -> tuple[Measure, ...]:
        """The components' measures; a single one with a batch of K counts as one."""
        return (self.components,) if isinstance(self.components, Measure) else self.components

    def _in_domain(self, eta: Tensor) -> Tensor | None:
        if all(part._in_domain(self._for_component(part, eta)) is None for part in self._component_measures()):
            return None

        def inside(part: Measure, x: Tensor) -> Tensor:
            mask = part._in_domain(x)
            if mask is None:
                return x.new_ones(x.shape[: x.ndim - len(self.event_shape)], dtype=torch.bool)
            return mask

        return self._each(inside, eta).all(self._axis)

    def _interior(self) -> Tensor | None:
        """A component's interior point that lies in all domains."""
        candidates = [point for part in self._component_measures() if (point := part._interior()) is not None]
        if not candidates:
            return None
        batch = self.batch_shape
        event_ndim = len(self.event_shape)
        if isinstance(self.components, Measure):
            points = spread("mixture", candidates[0], batch, event_ndim + 1)
        else:
            points = torch.stack([spread("mixture", point, batch, event_ndim) for point in candidates], len(batch))
        return first_inside(self, points)

    def _domain(self) -> str:
        return " and ".join(dict.fromkeys(part._domain() for part in self._component_measures()))

    def _support(self, direction: Tensor) -> Tensor | None:
        if any(part._support(self._for_component(part, direction)) is None for part in self._component_measures()):
            return None

        def support(part: Measure, x: Tensor) -> Tensor:
            bound = part._support(x)
            assert bound is not None
            return bound

        left_out = self._spread(self.log_weight, direction) == -torch.inf
        return self._each(support, direction).masked_fill(left_out, -torch.inf).amax(self._axis)

    @property
    def _reference(self) -> Reference:
        return one_reference(self._component_measures())

    def _log_density(self, point: Tensor) -> Tensor:
        terms = self._each(lambda part, x: part._log_density(x), point) + self._spread(self.log_weight, point)
        return self._log_sum(terms.movedim(self._axis, -1))

    def _log_prob(self, eta: Tensor, point: Tensor) -> Tensor:
        log_share = self._log_share(eta)
        log_prob = self._each(lambda part, e, x: part._log_prob(e, x), eta, point)
        terms = torch.where(log_share == -torch.inf, log_share, log_share + log_prob)
        return self._log_sum(terms.movedim(self._axis, -1))

    def _log_sum(self, terms: Tensor) -> Tensor:
        """The log-sum-exp of the components' log-densities, the last dimension; at an atom that of the atoms alone."""
        if self._reference != "mixed":
            return logsumexp(terms)
        # A density is a mass of zero beside the mass of an atom at the same point.
        is_discrete = torch.tensor(
            [part._reference == "counting" for part in self._component_measures()], device=terms.device
        )
        log_mass = logsumexp(terms.masked_fill(~is_discrete, -torch.inf))
        log_density = logsumexp(terms.masked_fill(is_discrete, -torch.inf))
        return torch.where(log_mass == -torch.inf, log_density, log_mass)

    def _nearest(self, point: Tensor) -> Tensor | None:
        """The nearest point of the components without a Lebesgue density, as those with one contain every point."""
        if isinstance(self.components, Measure):
            axis = len(self.components.batch_shape) - 1
            candidates = self.components._nearest(self._for_component(self.components, point))
            if candidates is None:
                return None
            candidates = candidates.movedim(axis, 0)
        else:
            singular = [part for part in self.components if part._reference != "lebesgue"] or self.components
            nearest = all_or_none([part._nearest(point) for part in singular])
            if nearest is None:
                return None
            candidates = torch.stack(nearest)
        # Candidates (component, *lead, *event): the one of least distance in the maximum norm.
        distance = (candidates - point).abs().flatten(candidates.ndim - len(self.event_shape)).amax(-1)
        index = self._eventwise(distance.argmin(0, keepdim=True))
        return candidates.take_along_dim(index, 0).squeeze(0)

    def _listed(self) -> Listed | None:
        if not isinstance(self.components, Measure):
            lists = all_or_none([part._listed() for part in self.components])
            return None if lists is None else listed.united(lists, self.log_weight, self.batch_shape)
        part = self.components._listed()
        if part is None or self.log_weight.shape[-1] * part.size.shape[-2] > listed.MOST_LISTED:
            return None
        # The components' dimension K, the last of their batch, becomes one with that of the points.
        weight_of_part = spread("mixture", self.log_weight, self.batch_shape, 1).unsqueeze(-1)
        points = spread("mixture", part.points, self.batch_shape, 3)
        log_weight = spread("mixture", part.log_weight, self.batch_shape, 2)
        size = spread("mixture", part.size, self.batch_shape, 3)
        return Listed(points.flatten(-3, -2), (weight_of_part + log_weight).flatten(-2), size.flatten(-3, -2))

    def _sample(self, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        axis = self._axis + len(shape)
        share = self._log_share(eta).exp().movedim(self._axis, -1)
        count = torch.Size(shape).numel()
        # Draws (rows, count) of a component's number, one row for each eta; then as (*shape, *lead).
        chosen = torch.multinomial(share.reshape(-1, share.shape[-1]), count, replacement=True, generator=generator)
        chosen = chosen.T.reshape((*shape, *share.shape[:-1]))
        # Every component draws, and one draw is kept of each.
        draws = self._each(lambda part, x: part._sample(x, shape, generator), eta, leading=len(shape))
        index = self._eventwise(chosen.unsqueeze(axis)).expand_as(draws.narrow(axis, 0, 1))
        return draws.take_along_dim(index, axis).squeeze(axis)


class _MixedMeans(NamedTuple):
    """Shares and means of the components of a mixture at eta."""

    terms: Tensor
    """log_weight_k + A_k(eta), shape (*batch, K, *query)."""
    share: Tensor
    """The responsibilities, shape (*batch, K, *query)."""
    offsets: Tensor
    """The components' means less the mixture's, shape (*batch, K, *query, *event)."""
    mean: Tensor
    """The mixture's mean, shape (*batch, *query, *event)."""


def _check_defined(undefined: Tensor, dtype: torch.dtype) -> None:
    if any_true(undefined):
        advice = "a smaller eta" if dtype == torch.float64 else "a smaller eta, or float64"
        raise ValueError(
            f"Mixture: log-partitions of components overflow {dtype} at this eta, so that the responsibilities are "
            f"undefined; use {advice}"
        )
