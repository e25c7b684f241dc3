"""Products of one-dimensional measures: A is a sum over coordinates."""

from typing import Self

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from massieu.measures import stable
from massieu.measures.base import Measure, values_are_readable


class Spin(Measure):
    """Independent ±1 coordinates, P(x_i = ±1) ∝ exp(±field_i).

    A(eta) = Σ log cosh(eta_i + field_i) − log cosh(field_i). Without a field these are fair signs: A = Σ log cosh
    eta_i, ∇A = tanh eta (S2). A and its derivatives are finite and right at 0 and at the largest finite eta alike.

    Attributes:
        field: Half the log-odds of +1, shape (*batch, d).
    """

    field: Float[Tensor, "*batch d"]

    @classmethod
    def create(cls, field: Float[Tensor, "*batch d"] | int) -> Self:
        """Spins in a given field, or, from a dimension, that many fair signs.

        Raises:
            ValueError: no coordinate, or a field that is not finite.
            TypeError: a field that is not floating-point.
        """
        if isinstance(field, int):
            if field < 1:
                raise ValueError(f"Spin needs at least one coordinate, got {field}")
            return cls(torch.zeros(field))
        if not field.is_floating_point():
            raise TypeError(f"field must be a floating-point tensor, got {field.dtype}")
        if field.ndim == 0 or field.shape[-1] == 0:
            raise ValueError(f"field must have shape (*batch, d) with d ≥ 1, got {tuple(field.shape)}")
        if values_are_readable(field) and not bool(field.isfinite().all()):
            raise ValueError("field must be finite")
        return cls(field)

    @property
    def batch_shape(self) -> torch.Size:
        return self.field.shape[:-1]

    @property
    def event_shape(self) -> torch.Size:
        return self.field.shape[-1:]

    def _local_field(self, eta: Tensor) -> Tensor:
        return eta + self._align(self.field, eta)

    def _log_partition(self, eta: Tensor) -> Tensor:
        field = self._align(self.field, eta)
        local = eta + field
        start, end = _magnitude(field), _magnitude(local)
        # |eta + field| − |field| without cancellation where both have one sign.
        rise = torch.where((local < 0) == (field < 0), torch.where(field < 0, -eta, eta), end - start)
        return (rise + F.softplus(-2 * end) - F.softplus(-2 * start)).sum(-1)

    def _mean(self, eta: Tensor) -> Tensor:
        return torch.tanh(self._local_field(eta))

    def _variance(self, eta: Tensor) -> Tensor:
        local = self._local_field(eta)
        return 4 * torch.sigmoid(2 * local) * torch.sigmoid(-2 * local)

    def _fisher_vp(self, eta: Tensor, vector: Tensor) -> Tensor:
        return self._variance(eta) * vector

    def _fisher(self, eta: Tensor) -> Tensor:
        return torch.diag_embed(self._variance(eta))

    def _kl(self, eta: Tensor, delta: Tensor) -> Tensor:
        local = self._local_field(eta)
        up, down = F.logsigmoid(2 * local), F.logsigmoid(-2 * local)
        # delta·(x − tanh), x = ±1, in forms that keep their digits in the tails.
        centred = torch.stack([2 * delta * down.exp(), -2 * delta * up.exp()], -1)
        return stable.centred_log_mean_exp(torch.stack([up, down], -1), centred).sum(-1)

    def _tilt(self, eta: Tensor) -> "Spin":
        return Spin(self._local_field(eta))

    def _sample(self, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        probability = torch.sigmoid(2 * self._local_field(eta)).expand(*shape, *eta.shape)
        return 2 * torch.bernoulli(probability, generator=generator) - 1


def _magnitude(value: Tensor) -> Tensor:
    """|value| with derivative 1 at 0, where torch's own 0 would lose the second derivative of log cosh."""
    return torch.where(value < 0, -value, value)
