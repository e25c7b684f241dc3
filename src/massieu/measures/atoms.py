"""Weighted points: the measure whose mean is attention."""

from typing import Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from massieu import ops
from massieu.foundation.arguments import check_finite, check_log_probabilities, check_shape, described, real_tensor
from massieu.foundation.numerics import log_softmax, logsumexp
from massieu.measures.base import Measure
from massieu.measures.hooks import Listed, Reference
from massieu.measures.moments import centred_log_mean_exp, cumulants_of_moments

ROUNDINGS = 8
"""How far a point may be from an atom and still be that atom, in roundings of the numbers it was computed from."""


class Atoms(Measure):
    """Weighted points h = Σ_n w_n δ_{x_n}, such as keys: ∇A is softmax attention over keys = values (S3).

    A(eta) = log Σ_n w_n exp(x_n·eta). With a query of inverse temperature β, eta is β·query. Masks, position biases and
    padding are log-weights. If all log-weights are −inf this is the zero measure: A = −inf, mean, Fisher information and KL
    are 0, entropy is −inf, no gradient flows, and it cannot be sampled. Use `create`, which checks its arguments.

    Attributes:
        points: Shape (*batch, N, d).
        log_weight: log w, shape (*batch, N); −inf leaves a point out.

    Example:
        >>> from massieu.measures import Atoms
        >>> keys = Atoms.create([[1.0, 0.0], [0.0, 1.0]])
        >>> keys.mean([[0.0, 0.0], [9.0, 9.0]]).tolist()  # softmax attention: both keys alike
        [[0.5, 0.5], [0.5, 0.5]]
    """

    points: Float[Tensor, "*batch N d"]
    log_weight: Float[Tensor, "*batch N"]

    @classmethod
    def create(
        cls,
        points: Float[Tensor, "*batch N d"],
        log_weight: Float[Tensor, "*batch N"] | Bool[Tensor, "*batch N"] | float | None = None,
    ) -> Self:
        """Atoms at `points`, each of weight one unless `log_weight` says otherwise.

        Args:
            points: Finite points, at least one.
            log_weight: Float log-weights below +inf, one number for all points, or booleans of which True keeps a point.

        Raises:
            ValueError, TypeError: see `Measure`; −inf is a log-weight.
        """
        points = real_tensor("points", points, log_weight if isinstance(log_weight, Tensor) else None)
        if points.ndim < 2 or 0 in points.shape[-2:]:
            raise ValueError(f"points must have shape (*batch, N, d) with N, d ≥ 1, got {tuple(points.shape)}")
        if not isinstance(log_weight, Tensor):
            try:
                log_weight = torch.as_tensor(0.0 if log_weight is None else log_weight, device=points.device)
            except (TypeError, ValueError, RuntimeError):
                raise TypeError(f"log_weight must be numbers or booleans, got {described(log_weight)}") from None
        if log_weight.dtype == torch.bool:
            log_weight = torch.where(log_weight, 0.0, -torch.inf).to(points.dtype)
        log_weight = real_tensor("log_weight", log_weight)
        if log_weight.ndim == 0:
            log_weight = log_weight.to(points.dtype).expand(points.shape[:-1])
        check_shape("log_weight", log_weight, points.shape[:-1])
        check_finite(points=points)
        check_log_probabilities(log_weight=log_weight)
        return cls(points, log_weight)

    @property
    def batch_shape(self) -> torch.Size:
        return self.points.shape[:-2]

    @property
    def event_shape(self) -> torch.Size:
        return self.points.shape[-1:]

    def expectation(
        self, eta: Float[Tensor, "*batch_query d"], values: Float[Tensor, "*batch N v"]
    ) -> Float[Tensor, "*batch_query v"]:
        """Σ_n p_n v_n with p the weights of p_eta: attention whose values are not its keys. No gradient of A in general (S3).

        Raises:
            ValueError: `eta` or `values` has a shape that does not fit.
        """
        values = real_tensor("values", values, self.points)
        eta = real_tensor("eta", eta, self.points)
        if values.shape[:-1] != self.points.shape[:-1]:
            raise ValueError(
                f"values must have shape {(*self.points.shape[:-1], 'v')} for points of shape "
                f"{tuple(self.points.shape)}, got {tuple(values.shape)}"
            )
        measure, eta = self._admit(eta.to(torch.promote_types(eta.dtype, values.dtype)))
        return measure._attend(eta, values.to(eta.dtype))

    def _log_probability(self, eta: Tensor) -> Tensor:
        return log_softmax(_scores(eta, self.points) + self._align(self.log_weight, eta))

    def _log_partition(self, eta: Tensor) -> Tensor:
        if eta.numel() == 0:
            return eta.sum(-1)
        query, key, log_weight = self._as_heads(eta)
        log_partition = ops.log_partition(query, key, log_weight=log_weight, scale=1.0)
        return log_partition.reshape(eta.shape[:-1])

    def _attend(self, eta: Tensor, values: Tensor) -> Tensor:
        if eta.numel() == 0:
            return eta.new_empty(*eta.shape[:-1], values.shape[-1])
        query, key, log_weight = self._as_heads(eta)
        value = values.reshape(*key.shape[:-1], values.shape[-1])
        output = ops.attention(query, key, value, log_weight=log_weight, scale=1.0).output
        return output.reshape(*eta.shape[:-1], values.shape[-1])

    def _as_heads(self, eta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query (B, H, L, d), key (B, H, N, d) and log-weight (B, H, 1, N): the last batch dimension is the heads."""
        batch = self.batch_shape
        batch_and_heads = (batch[:-1].numel(), batch[-1:].numel())
        num_points = self.points.shape[-2]
        query = eta.reshape(*batch_and_heads, eta.shape[len(batch) : -1].numel(), eta.shape[-1])
        key = self.points.reshape(*batch_and_heads, num_points, eta.shape[-1])
        return query, key, self.log_weight.reshape(*batch_and_heads, 1, num_points)

    def _centred(self) -> "Atoms":
        """The measure shifted by its mean: centred quantities are unchanged and lose fewer digits (S25)."""
        weights = log_softmax(self.log_weight).exp()
        return Atoms(self.points - weights.unsqueeze(-2) @ self.points, self.log_weight)

    def _mean(self, eta: Tensor) -> Tensor:
        return self._attend(eta, self.points)

    def _fisher_vp(self, eta: Tensor, vector: Tensor) -> Tensor:
        if eta.numel() == 0:
            return torch.empty_like(eta)
        query, key, log_weight = self._as_heads(eta)
        product = ops.fisher_vp(query, key, vector.reshape(query.shape), log_weight=log_weight, scale=1.0)
        return product.reshape(eta.shape)

    def _fisher(self, eta: Tensor) -> Tensor:
        centred = self._centred()
        weights = centred._log_probability(eta).exp()
        mean = _weighted_sum(weights, centred.points)
        deviations = self._align(centred.points, eta, 2) - mean.unsqueeze(-2)
        return (weights.unsqueeze(-1) * deviations).mT @ deviations

    def _entropy(self, eta: Tensor) -> Tensor:
        """−Σ p log(p/w)."""
        log_probability = self._log_probability(eta)
        has_no_weight = log_probability == -torch.inf
        log_ratio = torch.where(has_no_weight, 0.0, log_probability - self._align(self.log_weight, eta))
        entropy = -(log_probability.exp() * log_ratio).sum(-1)
        return entropy.masked_fill(has_no_weight.all(-1), -torch.inf)

    def _kl(self, eta: Tensor, delta: Tensor) -> Tensor:
        centred = self._centred()
        log_probability = centred._log_probability(eta)
        # KL = log E exp(c) for the centred gain of scores c = x·delta − E x·delta. The likeliest point's is subtracted
        # first, to keep digits as its weight tends to 1.
        gain = _scores(delta, centred.points)
        gain = gain - gain.gather(-1, log_probability.argmax(-1, keepdim=True))
        gain = gain - (log_probability.exp() * gain).sum(-1, keepdim=True)
        return centred_log_mean_exp(log_probability, gain)

    def _cumulants(self, eta: Tensor, direction: Tensor, order: int) -> Tensor:
        # Moments about the mean: those about zero would cancel.
        centred = self._centred()
        weights = centred._log_probability(eta).exp()
        projection = _scores(direction, centred.points)
        mean = (weights * projection).sum(-1, keepdim=True)
        powers = torch.stack([(projection - mean) ** n for n in range(1, order + 1)], -1)
        cumulants = cumulants_of_moments((weights.unsqueeze(-1) * powers).sum(-2))
        first = self._dot(direction, self._mean(eta))
        return torch.cat([first.unsqueeze(-1), cumulants[..., 1:]], -1)

    def _support(self, direction: Tensor) -> Tensor:
        is_masked = self.log_weight == -torch.inf
        scores = _scores(direction, self.points.masked_fill(is_masked.unsqueeze(-1), 0.0))
        return scores.masked_fill(self._align(is_masked, direction), -torch.inf).amax(-1)

    @property
    def _reference(self) -> Reference:
        return "counting"

    def _equals_atom(self, point: Tensor) -> Tensor:
        """Whether `point` is each of the atoms, shape (*lead, N)."""
        atoms = self._align(self.points, point, 2)
        # An atom computed in another order of operations is still that atom.
        rounding = ROUNDINGS * torch.finfo(point.dtype).eps * atoms.abs().amax((-2, -1), keepdim=True)
        return ((point.unsqueeze(-2) - atoms).abs() <= rounding).all(-1)

    def _log_density(self, point: Tensor) -> Tensor:
        log_weight = self._align(self.log_weight, point)
        return logsumexp(torch.where(self._equals_atom(point), log_weight, -torch.inf))

    def _log_prob(self, eta: Tensor, point: Tensor) -> Tensor:
        return logsumexp(torch.where(self._equals_atom(point), self._log_probability(eta), -torch.inf))

    def _nearest(self, point: Tensor) -> Tensor:
        atoms = self._align(self.points, point, 2)
        distance = (point.unsqueeze(-2) - atoms).abs().amax(-1)
        is_masked = self._align(self.log_weight == -torch.inf, point)
        index = distance.masked_fill(is_masked, torch.inf).argmin(-1)[..., None, None]
        lead = point.shape[:-1]
        return atoms.expand(*lead, *atoms.shape[-2:]).gather(-2, index.expand(*lead, 1, point.shape[-1])).squeeze(-2)

    def _listed(self) -> Listed:
        return Listed(self.points, self.log_weight, self.points.abs())

    def _tilt(self, eta: Tensor) -> "Atoms":
        return Atoms(self.points, self._log_probability(eta))

    def _sample(self, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        weights = self._log_probability(eta).exp()
        if not bool(weights.any(-1).all()):
            raise ValueError("Atoms: the zero measure (all log-weights −inf) cannot be sampled")
        count = torch.Size(shape).numel()
        # Draws (rows, count) of a point's number, one row for each eta; transposed, the sample dimensions come first.
        chosen = torch.multinomial(weights.reshape(-1, weights.shape[-1]), count, replacement=True, generator=generator)
        lead = (*shape, *eta.shape[:-1])
        points = self._align(self.points, eta, 2).expand(*lead, *self.points.shape[-2:])
        index = chosen.T.reshape(*lead, 1, 1).expand(*lead, 1, eta.shape[-1])
        return points.gather(-2, index).squeeze(-2)


def _scores(eta: Tensor, points: Tensor) -> Tensor:
    """x_n·eta, shape (*batch, *query, N)."""
    return _weighted_sum(eta, points.mT)


def _weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """Σ_n weights_n values_n, shape (*batch, *query, v)."""
    # All query dimensions as one, so that it is one matrix product per batch item.
    flat = weights.reshape(*values.shape[:-2], weights.shape[values.ndim - 2 : -1].numel(), weights.shape[-1])
    return (flat @ values).reshape(*weights.shape[:-1], values.shape[-1])
