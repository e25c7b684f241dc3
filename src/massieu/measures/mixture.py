"""Mixtures: the log-partition of a weighted sum of measures is a log-sum-exp of theirs."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import check_log_probabilities, check_shape, real_tensor
from massieu.foundation.doors import MEASURE, sequence
from massieu.foundation.numerics import log_softmax, logsumexp
from massieu.foundation.transforms import some, values_are_readable
from massieu.foundation.values import longest_batch, spread
from massieu.measures import listed
from massieu.measures.base import Measure
from massieu.measures.hooks import Listed, Reference
from massieu.measures.moments import centred_log_mean_exp, cumulants_of_moments, moments_of_cumulants
from massieu.measures.sums import all_known, first_inside, one_reference


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
        parts, count = components, components.batch_shape[-1]
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
        """Σ_k r_k A_k(eta) − KL(r ‖ w) ≤ A(eta) for fixed weights r, w the mixture's own (not normalised): S14.

        Its gradient is Σ r_k ∇A_k: heads added with fixed weights, as multi-head attention adds them. The gap to A is
        KL(r ‖ responsibilities), which is zero for r = responsibilities(eta).

        Args:
            eta: Where.
            weights: r, non-negative with sum one over the last dimension; the mixture's normalised weights by default.

        Raises:
            ValueError: weights of another shape than ``log_weight``.
        """
        if weights is None:
            weights = log_softmax(self.log_weight).exp()
        check_shape("weights", weights, self.log_weight.shape)
        measure, eta = self._admit(eta)
        share = measure._spread(weights.to(eta.dtype), eta)
        taken = share > 0
        gain = torch.where(taken, measure._log_terms(eta), 0.0) - torch.where(taken, share, 1.0).log()
        return (share * gain).sum(measure._axis)

    def _each(self, function: Callable[..., Tensor], *tensors: Tensor, leading: int = 0) -> Tensor:
        """``function(component, *tensors)`` for every component, stacked behind the batch dimensions.

        The tensors have shape (*batch, *query, *event); the results have `leading` dimensions more, in front.
        """
        axis = self._axis + leading
        if not isinstance(self.components, Measure):
            return torch.stack([function(part, *tensors) for part in self.components], axis)
        spread = [self._seen_by(self.components, tensor) for tensor in tensors]
        return function(self.components, *spread).movedim(len(self.components.batch_shape) - 1 + leading, axis)

    def _seen_by(self, part: Measure, tensor: Tensor) -> Tensor:
        """What `_each` gives to a component: with a batch of them, a copy each behind the component's own batch."""
        if part is not self.components:
            return tensor
        own = len(part.batch_shape) - 1
        return tensor.unsqueeze(own).expand(*tensor.shape[:own], part.batch_shape[-1], *tensor.shape[own:])

    def _spread(self, weights: Tensor, eta: Tensor) -> Tensor:
        """(*batch, K) as (*batch, K, *query of ones), which broadcasts against a scalar result of `_each`."""
        return self._align(weights, eta).movedim(-1, self._axis)

    @property
    def _axis(self) -> int:
        """Where `_each` puts the components."""
        return len(self.batch_shape)

    def _log_terms(self, eta: Tensor) -> Tensor:
        """log_weight_k + A_k(eta), shape (*batch, K, *query)."""
        return self._each(lambda part, x: part._log_partition(x), eta) + self._spread(self.log_weight, eta)

    def _log_share(self, eta: Tensor) -> Tensor:
        """The responsibilities' logarithms, shape (*batch, K, *query).

        Terms too large for the dtype are all there is; which of several such terms is larger cannot be told.
        """
        terms = self._log_terms(eta)
        _refuse((terms == torch.inf).sum(self._axis) > 1, terms.dtype)
        return self._share_of(terms)

    def _share_of(self, terms: Tensor) -> Tensor:
        """`_log_share`; terms that are too large share alike, and the caller finds out whether that matters."""
        axis = self._axis
        infinite = terms == torch.inf
        alone = torch.where(infinite, 0.0, -torch.inf)
        scores = torch.where(infinite.any(axis, keepdim=True), alone, terms)
        return log_softmax(scores.movedim(axis, -1)).movedim(-1, axis)

    def _unless_tied(self, terms: Tensor, parts: Tensor, value: Tensor) -> Tensor:
        """`value`, and NaN where it depends on the shares of terms that are too large, since their `parts` differ."""
        axis, tied = self._axis, terms == torch.inf
        if values_are_readable(tied) and not some(tied):
            return value
        several = tied.sum(axis) > 1
        tied = tied.reshape((*tied.shape, *[1] * (parts.ndim - tied.ndim)))
        least, most = parts.masked_fill(~tied, torch.inf).amin(axis), parts.masked_fill(~tied, -torch.inf).amax(axis)
        several = several.reshape((*several.shape, *[1] * (value.ndim - several.ndim)))
        return torch.where(several & (least != most), torch.nan, value)

    def _defined(self, eta: Tensor, value: Tensor) -> Tensor:
        """`value`, unless log-partitions that are too large leave it undefined."""
        if some(value.isnan()):
            infinite = (self._log_terms(eta) == torch.inf).any(self._axis)
            _refuse(infinite & value.isnan().reshape(*infinite.shape, -1).any(-1), value.dtype)
        return value

    def _log_partition(self, eta: Tensor) -> Tensor:
        return logsumexp(self._log_terms(eta).movedim(self._axis, -1))

    def _shares_and_means(self, eta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Log-terms and responsibilities (*batch, K, *query), means less the mixture's with *event behind, and its mean."""
        axis = self._axis
        terms = self._log_terms(eta)
        share = self._share_of(terms).exp()
        means = self._each(lambda part, x: part._mean(x), eta)
        # About the likeliest component's mean, so that means far from the origin keep their digits.
        chosen = self._eventwise(share.argmax(axis, keepdim=True))
        base = means.take_along_dim(chosen, axis)
        offsets = torch.where(means.isinf() & (means == base), 0.0, means - base)
        offsets = torch.where((self._eventwise(share) == 0) & ~offsets.isfinite(), 0.0, offsets)
        base = base.squeeze(axis)
        shift = (self._eventwise(share) * offsets).sum(axis)
        return terms, share, offsets - shift.unsqueeze(axis), self._unless_tied(terms, means, base + shift)

    def _eventwise(self, scalar: Tensor) -> Tensor:
        return scalar.reshape(*scalar.shape, *[1] * len(self.event_shape))

    def _mean(self, eta: Tensor) -> Tensor:
        return self._defined(eta, self._shares_and_means(eta)[3])

    def _entropy(self, eta: Tensor) -> Tensor:
        """Σ r_k (log w_k − log r_k + the entropy of component k): A and eta·mean, which may be too large, cancel."""
        terms = self._log_terms(eta)
        log_share = self._share_of(terms)
        lost = log_share == -torch.inf
        own = self._each(lambda part, x: part._entropy(x), eta)
        parts, own = own, own + self._spread(self.log_weight, eta)
        gain = torch.where(lost, 0.0, own) - torch.where(lost, 0.0, log_share)
        entropy = (log_share.exp() * gain).sum(self._axis)
        entropy = entropy.masked_fill(lost.all(self._axis), -torch.inf)
        return self._defined(eta, self._unless_tied(terms, parts, entropy))

    def _fisher_vp(self, eta: Tensor, vector: Tensor) -> Tensor:
        axis = self._axis
        terms, share, offsets, _ = self._shares_and_means(eta)
        within = self._each(lambda part, x, v: part._fisher_vp(x, v), eta, vector)
        # A share of 0 takes away an offset whose square would overflow.
        between = offsets * self._eventwise(share * self._dot(offsets, vector.unsqueeze(axis)))
        weight = self._eventwise(share)
        within = torch.where((weight == 0) & ~within.isfinite(), 0.0, within)
        product = (weight * within + between).sum(axis)
        return self._defined(eta, self._unless_tied(terms, within, product))

    def _fisher(self, eta: Tensor) -> Tensor:
        return self._defined(eta, super()._fisher(eta))

    def _kl(self, eta: Tensor, delta: Tensor) -> Tensor:
        """That of the shares, and the components' by their shares: of component and point, only the point sees eta.

        In float64, where no difference of two log-partitions is taken.
        """
        measure, point, delta = self.to(torch.float64), eta.double(), delta.double()
        axis = measure._axis
        _, _, offsets, _ = measure._shares_and_means(point)
        log_share = measure._log_share(point).movedim(axis, -1)
        within = measure._each(lambda part, x, v: part._kl(x, v), point, delta).movedim(axis, -1)
        # A_k(eta + delta) − A_k(eta), up to what all have in common.
        gain = measure._dot(offsets, delta.unsqueeze(axis)).movedim(axis, -1) + within
        gain = torch.where(log_share > -torch.inf, gain, 0.0)
        # The likeliest's is taken off first, to keep the digits as its share tends to 1.
        gain = gain - gain.gather(-1, log_share.argmax(-1, keepdim=True))
        share = log_share.exp()
        ratio = gain - (share * gain).sum(-1, keepdim=True)
        between = centred_log_mean_exp(log_share, ratio)
        within = torch.where(share > 0, within, 0.0)
        divergence = torch.where(within.isinf().any(-1), torch.inf, between + (share * within).sum(-1))
        return self._defined(eta, divergence.to(eta.dtype))

    def _cumulants(self, eta: Tensor, direction: Tensor, order: int) -> Tensor:
        axis = self._axis
        terms, share, offsets, mean = self._shares_and_means(eta)
        parts = self._each(lambda part, x, v: part._cumulants(x, v, order), eta, direction)
        # About the mixture's mean, the components' moments mix linearly.
        first = self._dot(offsets, direction.unsqueeze(axis)).unsqueeze(-1)
        moments = moments_of_cumulants(torch.cat([first, parts[..., 1:]], -1))
        mixed = cumulants_of_moments((share.unsqueeze(-1) * moments).sum(axis))
        cumulants = torch.cat([self._dot(mean, direction).unsqueeze(-1), mixed[..., 1:]], -1)
        return self._defined(eta, self._unless_tied(terms, parts, cumulants))

    def _parts(self) -> tuple[Measure, ...]:
        return (self.components,) if isinstance(self.components, Measure) else self.components

    def _in_domain(self, eta: Tensor) -> Tensor | None:
        if all(part._in_domain(self._seen_by(part, eta)) is None for part in self._parts()):
            return None

        def inside(part: Measure, x: Tensor) -> Tensor:
            found = part._in_domain(x)
            return x.new_ones(x.shape[: x.ndim - len(self.event_shape)], dtype=torch.bool) if found is None else found

        return self._each(inside, eta).all(self._axis)

    def _interior(self) -> Tensor | None:
        """A component's interior point that lies in all domains."""
        known = [inside for part in self._parts() if (inside := part._interior()) is not None]
        if not known:
            return None
        batch, event = self.batch_shape, len(self.event_shape)
        if isinstance(self.components, Measure):
            points = spread("mixture", known[0], batch, event + 1)
        else:
            points = torch.stack([spread("mixture", point, batch, event) for point in known], len(batch))
        return first_inside(self, points)

    def _domain(self) -> str:
        return " and ".join(dict.fromkeys(part._domain() for part in self._parts()))

    def _support(self, direction: Tensor) -> Tensor | None:
        if any(part._support(self._seen_by(part, direction)) is None for part in self._parts()):
            return None

        def support(part: Measure, x: Tensor) -> Tensor:
            found = part._support(x)
            assert found is not None
            return found

        left_out = self._spread(self.log_weight, direction) == -torch.inf
        return self._each(support, direction).masked_fill(left_out, -torch.inf).amax(self._axis)

    @property
    def _reference(self) -> Reference:
        return one_reference(self._parts())

    def _log_density(self, point: Tensor) -> Tensor:
        terms = self._each(lambda part, x: part._log_density(x), point) + self._spread(self.log_weight, point)
        return self._united(terms.movedim(self._axis, -1))

    def _log_prob(self, eta: Tensor, point: Tensor) -> Tensor:
        share = self._log_share(eta)
        terms = self._each(lambda part, e, x: part._log_prob(e, x), eta, point)
        return self._united(torch.where(share == -torch.inf, share, share + terms).movedim(self._axis, -1))

    def _united(self, terms: Tensor) -> Tensor:
        """The log-sum-exp of the components' terms, the last dimension."""
        if self._reference != "mixed":
            return logsumexp(terms)
        # Where an atom sits, a density is nothing against its mass.
        discrete = torch.tensor([part._reference == "counting" for part in self._parts()], device=terms.device)
        masses = logsumexp(terms.masked_fill(~discrete, -torch.inf))
        densities = logsumexp(terms.masked_fill(discrete, -torch.inf))
        return torch.where(masses == -torch.inf, densities, masses)

    def _nearest(self, point: Tensor) -> Tensor | None:
        """Of the components without a density: those with one hold every point."""
        if isinstance(self.components, Measure):
            axis = len(self.components.batch_shape) - 1
            stacked = self.components._nearest(self._seen_by(self.components, point))
            if stacked is None:
                return None
            stacked = stacked.movedim(axis, 0)
        else:
            thin = [part for part in self.components if part._reference != "lebesgue"] or self.components
            known = all_known([part._nearest(point) for part in thin])
            if known is None:
                return None
            stacked = torch.stack(known)
        distance = (stacked - point).abs().flatten(stacked.ndim - len(self.event_shape)).amax(-1)
        index = self._eventwise(distance.argmin(0, keepdim=True))
        return stacked.take_along_dim(index, 0).squeeze(0)

    def _listed(self) -> Listed | None:
        if not isinstance(self.components, Measure):
            known = all_known([part._listed() for part in self.components])
            return None if known is None else listed.together(known, self.log_weight, self.batch_shape)
        part = self.components._listed()
        if part is None or self.log_weight.shape[-1] * part.size.shape[-2] > listed.MOST_LISTED:
            return None
        own, points, log_weight, size = (
            spread("mixture", tensor, self.batch_shape, rest)
            for tensor, rest in zip((self.log_weight, *part), (1, 3, 2, 3), strict=True)
        )
        return Listed(points.flatten(-3, -2), (own.unsqueeze(-1) + log_weight).flatten(-2), size.flatten(-3, -2))

    def _sample(self, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        axis, leading = self._axis, len(shape)
        share = self._log_share(eta).exp().movedim(axis, -1)
        count = torch.Size(shape).numel()
        chosen = torch.multinomial(share.reshape(-1, share.shape[-1]), count, replacement=True, generator=generator)
        chosen = chosen.T.reshape((*shape, *share.shape[:-1]))
        everyone = self._each(lambda part, x: part._sample(x, shape, generator), eta, leading=leading)
        index = self._eventwise(chosen.unsqueeze(axis + leading))
        return everyone.take_along_dim(index.expand_as(everyone.narrow(axis + leading, 0, 1)), axis + leading).squeeze(
            axis + leading
        )


def _refuse(undefined: Tensor, dtype: torch.dtype) -> None:
    if some(undefined):
        advice = "a smaller eta" if dtype == torch.float64 else "a smaller eta, or float64"
        raise ValueError(
            f"Mixture: log-partitions of its components are too large for {dtype} at this eta, so that their shares, or "
            f"this result, cannot be told; use {advice}"
        )
