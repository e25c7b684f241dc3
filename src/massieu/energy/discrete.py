"""Hopfield networks of two-valued units, classical and modern, with asynchronous updates (B4)."""

from typing import Literal, Self

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.energy.base import Energy, promoted, times
from massieu.foundation.arguments import check_finite, check_shape, choice, floating, whole_number
from massieu.foundation.transforms import every
from massieu.foundation.values import align, need_batch, static_field

Values = Literal["spins", "bits"]
"""Units of ±1, or of 0 and 1."""

_ROUNDINGS = 8
"""Differences of energy below so many roundings of their terms are none."""


class _TwoValued(Energy):
    """An energy of units with two values each: its fields `bias` (*batch, d) and `values` say what states are."""

    bias: Float[Tensor, "*batch d"]
    values: Values = static_field()

    @property
    def _dampings(self) -> str:
        return "{1}"

    @property
    def _pair(self) -> tuple[float, float]:
        return (-1.0, 1.0) if self.values == "spins" else (0.0, 1.0)

    def _checked(self, state: Tensor) -> Tensor:
        """The state, of two values and in at least float32."""
        state, (low, high) = promoted(state), self._pair
        need_batch(type(self).__name__, "a state", state.shape, self.bias.shape[:-1], self.bias.shape[-1:])
        if not every((state == low) | (state == high)):
            raise ValueError(f"a state of {self.values} holds {low:g} and {high:g} alone")
        return state

    def _choose(self, gain: Tensor, size: Tensor, unit: Tensor) -> Tensor:
        """The value of lower energy: high where gain = E(low) − E(high) > 0; on a tie, but for rounding, the unit as it is."""
        low, high = self._pair
        tie = gain.abs() <= _ROUNDINGS * torch.finfo(gain.dtype).eps * size
        return torch.where(tie, unit, torch.where(gain > 0, high, low))


class BinaryHopfieldEnergy(_TwoValued):
    """The classical Hopfield network: E(v) = −bias·v − ½ vᵀ couplings v over v ∈ {±1}^d or {0, 1}^d.

    One step visits every unit once, in order, and gives it the value of lower energy, the others as they are; on a tie it
    stays. So E never rises, and after finitely many steps nothing changes: a local minimum under single flips. For spins the
    diagonal of the couplings is a constant; for bits it shifts the bias by half of it, since v_i² = v_i.

    With couplings W Wᵀ it is what Gaussian hidden units N(0, 1) leave (B2). Of random patterns stored so, about 0.138·d are
    recalled with few errors. Use `create` or `of_patterns`.

    Attributes:
        couplings: Symmetric, shape (*batch, d, d).
        bias, values: Shape (*batch, d); "spins" or "bits".

    Example:
        >>> import torch
        >>> from massieu.energy import BinaryHopfieldEnergy
        >>> network = BinaryHopfieldEnergy.of_patterns(torch.tensor([[1.0, 1.0, -1.0, -1.0]]))
        >>> network.step(torch.tensor([1.0, 1.0, 1.0, -1.0])).tolist()
        [1.0, 1.0, -1.0, -1.0]
    """

    couplings: Float[Tensor, "*batch d d"]

    @classmethod
    def create(
        cls,
        couplings: Float[Tensor, "*batch d d"],
        bias: Float[Tensor, "*batch d"] | None = None,
        *,
        values: Values = "spins",
    ) -> Self:
        """From couplings, which must be symmetric: without that there is no energy.

        Raises:
            ValueError: couplings that are not square, symmetric and finite; a bias of another shape; unknown values.
            TypeError: a tensor is not floating-point.
        """
        check_finite(couplings=floating("couplings", couplings))
        if couplings.ndim < 2 or couplings.shape[-1] != couplings.shape[-2] or couplings.shape[-1] == 0:
            raise ValueError(f"couplings must have shape (*batch, d, d) with d ≥ 1, got {tuple(couplings.shape)}")
        size = couplings.abs().amax((-2, -1), keepdim=True)
        if not every((couplings - couplings.mT).abs() <= 8 * torch.finfo(couplings.dtype).eps * size):
            raise ValueError("couplings must be symmetric: other networks have no energy")
        values = choice("values", values, "spins", "bits")
        return cls(_bias(bias, couplings.shape[:-1], couplings), values, couplings)

    @classmethod
    def of_patterns(
        cls,
        patterns: Float[Tensor, "*batch N d"],
        bias: Float[Tensor, "*batch d"] | None = None,
        *,
        values: Values = "spins",
    ) -> Self:
        """Hebb's rule: couplings Σ_n x_n x_nᵀ of the patterns. Raises as `create`."""
        _check_patterns(patterns)
        return cls.create(patterns.mT @ patterns, bias, values=values)

    def _energy(self, state: Tensor) -> Tensor:
        state = self._checked(state)
        return -(state * (align(self.bias, state.ndim, 1) + 0.5 * self._couple(state))).sum(-1)

    def _couple(self, state: Tensor) -> Tensor:
        return times(state, self.couplings.to(state.dtype))

    def _step(self, state: Tensor) -> Tensor:
        state = self._checked(state)
        couplings, (low, high) = self.couplings.to(state.dtype), self._pair
        field = self._couple(state) + align(self.bias, state.ndim, 1)
        units = list(state.unbind(-1))
        for index, unit in enumerate(units):
            column = align(couplings[..., index], state.ndim, 1)
            # E(low) − E(high) = (high − low)·(field of the others) + ½(high² − low²)·J_ii.
            others = field[..., index] - column[..., index] * unit
            gain = (high - low) * others + 0.5 * (high**2 - low**2) * column[..., index]
            size = column.abs().sum(-1) + align(self.bias, state.ndim, 1)[..., index].abs()
            units[index] = self._choose(gain, size, unit)
            field = field + column * (units[index] - unit).unsqueeze(-1)
        return torch.stack(units, -1)


class DenseHopfieldEnergy(_TwoValued):
    """Dense associative memory of binary states: E(v) = −bias·v − Σ_n F(x_n·v) over v ∈ {±1}^d or {0, 1}^d.

    F is z^degree, or exp. As in `BinaryHopfieldEnergy`, a step visits every unit once and never raises E. Degree n stores of
    the order of d^(n−1) random patterns, exp 2^(d/2) (Demircigil et al., arXiv 1702.01929). With F = exp it is what Poisson(1)
    hidden units leave: minus the log-partition of N of them at x_n·v is −Σ exp(x_n·v) + N. No prior leaves a polynomial of
    degree 3 or more (Marcinkiewicz).

    exp overflows at overlaps of 88 in float32 and 709 in float64; there E is −inf, but steps are still right. Use `create`.

    Attributes:
        patterns: Shape (*batch, N, d).
        bias, values: Shape (*batch, d); "spins" or "bits".
        degree: 2 or more; None stands for exp.

    Example:
        >>> import torch
        >>> from massieu.energy import DenseHopfieldEnergy
        >>> network = DenseHopfieldEnergy.create(torch.tensor([[1.0, 1.0, -1.0, -1.0], [1.0, -1.0, 1.0, -1.0]]))
        >>> network.step(torch.tensor([1.0, 1.0, -1.0, 1.0])).tolist()
        [1.0, 1.0, -1.0, -1.0]
    """

    patterns: Float[Tensor, "*batch N d"]
    degree: int | None = static_field()

    @classmethod
    def create(
        cls,
        patterns: Float[Tensor, "*batch N d"],
        bias: Float[Tensor, "*batch d"] | None = None,
        *,
        degree: int | None = None,
        values: Values = "spins",
    ) -> Self:
        """From patterns of any real values, as those of a restricted Boltzmann machine have.

        Raises:
            ValueError: no pattern, or one that is not finite; a bias of another shape; a degree below 2; unknown values.
            TypeError: a tensor is not floating-point.
        """
        _check_patterns(patterns)
        if degree is not None:
            whole_number("degree (None stands for exp)", degree, least=2)
        shape = torch.Size((*patterns.shape[:-2], patterns.shape[-1]))
        values = choice("values", values, "spins", "bits")
        return cls(_bias(bias, shape, patterns), values, patterns, degree)

    def _energy(self, state: Tensor) -> Tensor:
        state = self._checked(state)
        overlap = self._overlap(state)
        total = overlap.exp() if self.degree is None else overlap**self.degree
        return -(align(self.bias, state.ndim, 1) * state).sum(-1) - total.sum(-1)

    def _overlap(self, state: Tensor) -> Tensor:
        """x_n·v, shape (*batch, *query, N)."""
        return times(state, self.patterns.to(state.dtype).mT)

    def _step(self, state: Tensor) -> Tensor:
        state = self._checked(state)
        patterns, bias, (low, high) = self.patterns.to(state.dtype), self.bias.to(state.dtype), self._pair
        gain_of = self._gain_power if self.degree else _gain_exp
        overlap, units = self._overlap(state), list(state.unbind(-1))
        for index, unit in enumerate(units):
            column = align(patterns[..., index], overlap.ndim, 1)
            others = overlap - column * unit.unsqueeze(-1)
            pull = (high - low) * align(bias[..., index], unit.ndim)
            gain, size = gain_of(others + low * column, others + high * column, pull)
            units[index] = self._choose(gain, size, unit)
            overlap = others + column * units[index].unsqueeze(-1)
        return torch.stack(units, -1)

    def _gain_power(self, low: Tensor, high: Tensor, pull: Tensor) -> tuple[Tensor, Tensor]:
        assert self.degree is not None
        below, above = low**self.degree, high**self.degree
        return pull + (above - below).sum(-1), pull.abs() + (above.abs() + below.abs()).sum(-1)


def _gain_exp(low: Tensor, high: Tensor, pull: Tensor) -> tuple[Tensor, Tensor]:
    """pull + Σ exp(high) − exp(low) and the size of its terms, both times a positive number that keeps them finite."""
    peak = torch.maximum(low, high).detach().amax(-1).clamp_min(0.0)
    below, above = (low - peak.unsqueeze(-1)).exp(), (high - peak.unsqueeze(-1)).exp()
    pull = pull * (-peak).exp()
    return pull + (above - below).sum(-1), pull.abs() + (above + below).sum(-1)


def _bias(bias: Tensor | None, shape: torch.Size, like: Tensor) -> Tensor:
    if bias is None:
        return like.new_zeros(shape)
    check_finite(bias=floating("bias", bias))
    check_shape("bias", bias, shape)
    return bias


def _check_patterns(patterns: Tensor) -> None:
    check_finite(patterns=floating("patterns", patterns))
    if patterns.ndim < 2 or 0 in patterns.shape[-2:]:
        raise ValueError(f"patterns must have shape (*batch, N, d) with N, d ≥ 1, got {tuple(patterns.shape)}")
