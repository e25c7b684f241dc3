"""Hopfield networks of two-valued units, classical and modern, with asynchronous updates (B4)."""

from collections.abc import Callable
from typing import Literal, Self

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.energy.base import Energy, promoted, static_field
from massieu.energy.contraction.base import align
from massieu.measures.value import values_are_readable
from massieu.solve.arguments import floating

Values = Literal["spins", "bits"]
"""Units of ±1, or of 0 and 1."""

_ROUNDINGS = 8
"""Differences of energy below so many roundings of their terms are none."""


class BinaryHopfieldEnergy(Energy):
    """E(v) = −bias·v − ½ vᵀ couplings v over v ∈ {±1}^d or {0, 1}^d: the classical network.

    One step visits every unit once, in order, and gives it the value of lower energy, the others as they are; on a tie it
    stays. So E never rises, and after finitely many steps nothing changes: a local minimum under single flips. For spins the
    diagonal of the couplings is a constant; for bits it shifts the bias by half of it, since v_i² = v_i.

    With couplings W Wᵀ it is what Gaussian hidden units N(0, 1) leave (B2). Of random patterns stored so, about 0.138·d are
    recalled with few errors. Use `create` or `of_patterns`.

    Attributes:
        couplings: Symmetric, shape (*batch, d, d).
        bias: Shape (*batch, d).
        values: "spins" or "bits".
    """

    couplings: Float[Tensor, "*batch d d"]
    bias: Float[Tensor, "*batch d"]
    values: Values = static_field()

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
        _check_values(values)
        _check_floating(couplings=couplings)
        if couplings.ndim < 2 or couplings.shape[-1] != couplings.shape[-2] or couplings.shape[-1] == 0:
            raise ValueError(f"couplings must have shape (*batch, d, d) with d ≥ 1, got {tuple(couplings.shape)}")
        if values_are_readable(couplings):
            size = couplings.abs().amax((-2, -1), keepdim=True)
            uneven = (couplings - couplings.mT).abs() > 8 * torch.finfo(couplings.dtype).eps * size
            if bool(uneven.any()):
                raise ValueError("couplings must be symmetric: other networks have no energy")
        return cls(couplings, _bias(bias, couplings.shape[:-1], couplings), values)

    @classmethod
    def of_patterns(
        cls,
        patterns: Float[Tensor, "*batch N d"],
        bias: Float[Tensor, "*batch d"] | None = None,
        *,
        values: Values = "spins",
    ) -> Self:
        """Hebb's rule: couplings Σ_n x_n x_nᵀ of the patterns.

        Raises:
            ValueError, TypeError: as `create`; no pattern.
        """
        _check_patterns(patterns)
        return cls.create(patterns.mT @ patterns, bias, values=values)

    @property
    def _dampings(self) -> str:
        return "{1}"

    def _energy(self, state: Tensor) -> Tensor:
        state = promoted(state)
        _need_state(self, self.bias, state)
        return -(state * (align(self.bias, state.ndim, 1) + 0.5 * self._couple(state))).sum(-1)

    def _couple(self, state: Tensor) -> Tensor:
        flat = state.reshape(*self.couplings.shape[:-2], -1, state.shape[-1])
        return (flat @ self.couplings.to(state.dtype)).reshape(state.shape)

    def _step(self, state: Tensor) -> Tensor:
        state = promoted(state)
        _need_state(self, self.bias, state)
        couplings = self.couplings.to(state.dtype)
        field = self._couple(state) + align(self.bias, state.ndim, 1)
        low, high = _pair(self.values)
        units = list(state.unbind(-1))
        for index, unit in enumerate(units):
            column = align(couplings[..., index], state.ndim, 1)
            # E(low) − E(high) = (high − low)·(field of the others) + ½(high² − low²)·J_ii.
            others = field[..., index] - column[..., index] * unit
            gain = (high - low) * others + 0.5 * (high**2 - low**2) * column[..., index]
            size = column.abs().sum(-1) + align(self.bias, state.ndim, 1)[..., index].abs()
            units[index] = _choose(gain, size, unit, low, high)
            field = field + column * (units[index] - unit).unsqueeze(-1)
        return torch.stack(units, -1)


class DenseHopfieldEnergy(Energy):
    """E(v) = −bias·v − Σ_n F(x_n·v) over v ∈ {±1}^d or {0, 1}^d: dense associative memory.

    F is z^degree, or exp. As in `BinaryHopfieldEnergy`, a step visits every unit once and never raises E. Degree n stores of
    the order of d^(n−1) random patterns, exp 2^(d/2) (Demircigil et al., arXiv 1702.01929). With F = exp it is what Poisson(1)
    hidden units leave: minus the log-partition of N of them at x_n·v is −Σ exp(x_n·v) + N. No prior leaves a polynomial of
    degree 3 or more (Marcinkiewicz).

    exp overflows at overlaps of 88 in float32 and 709 in float64; there E is −inf, but steps are still right. Use `create`.

    Attributes:
        patterns: Shape (*batch, N, d).
        bias: Shape (*batch, d).
        degree: 2 or more; None stands for exp.
        values: "spins" or "bits".
    """

    patterns: Float[Tensor, "*batch N d"]
    bias: Float[Tensor, "*batch d"]
    degree: int | None = static_field()
    values: Values = static_field()

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
        _check_values(values)
        _check_patterns(patterns)
        if degree is not None and (not isinstance(degree, int) or degree < 2):
            raise ValueError(f"degree must be a whole number, at least 2, or None for exp, got {degree!r}")
        shape = torch.Size((*patterns.shape[:-2], patterns.shape[-1]))
        return cls(patterns, _bias(bias, shape, patterns), degree, values)

    @property
    def _dampings(self) -> str:
        return "{1}"

    def _energy(self, state: Tensor) -> Tensor:
        state = promoted(state)
        _need_state(self, self.bias, state)
        overlap = self._overlap(state)
        total = overlap.exp() if self.degree is None else overlap**self.degree
        return -(align(self.bias, state.ndim, 1) * state).sum(-1) - total.sum(-1)

    def _overlap(self, state: Tensor) -> Tensor:
        """x_n·v, shape (*batch, *query, N)."""
        flat = state.reshape(*self.patterns.shape[:-2], -1, state.shape[-1])
        product = flat @ self.patterns.to(state.dtype).mT
        return product.reshape(*state.shape[:-1], self.patterns.shape[-2])

    def _step(self, state: Tensor) -> Tensor:
        state = promoted(state)
        _need_state(self, self.bias, state)
        patterns, bias = self.patterns.to(state.dtype), self.bias.to(state.dtype)
        low, high = _pair(self.values)
        gain_of: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = (
            self._gain_power if self.degree else _gain_exp
        )
        overlap, units = self._overlap(state), list(state.unbind(-1))
        for index, unit in enumerate(units):
            column = align(patterns[..., index], overlap.ndim, 1)
            others = overlap - column * unit.unsqueeze(-1)
            pull = (high - low) * align(bias[..., index], unit.ndim)
            gain, size = gain_of(others + low * column, others + high * column, pull)
            units[index] = _choose(gain, size, unit, low, high)
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


def _choose(gain: Tensor, size: Tensor, unit: Tensor, low: float, high: float) -> Tensor:
    """The value of lower energy: high where gain = E(low) − E(high) > 0; on a tie, but for rounding, the unit as it is."""
    tie = gain.abs() <= _ROUNDINGS * torch.finfo(gain.dtype).eps * size
    return torch.where(tie, unit, torch.where(gain > 0, high, low))


def _pair(values: Values) -> tuple[float, float]:
    return (-1.0, 1.0) if values == "spins" else (0.0, 1.0)


def _need_state(energy: "BinaryHopfieldEnergy | DenseHopfieldEnergy", bias: Tensor, state: Tensor) -> None:
    batch, width = tuple(bias.shape[:-1]), bias.shape[-1]
    shape = tuple(state.shape)
    if len(shape) <= len(batch) or shape[: len(batch)] != batch or shape[-1] != width:
        raise ValueError(f"{type(energy).__name__} needs a state of shape {batch} + queries + {(width,)}, got {shape}")
    low, high = _pair(energy.values)
    if values_are_readable(state) and not bool(((state == low) | (state == high)).all()):
        raise ValueError(f"a state of {energy.values} holds {low:g} and {high:g} alone")


def _bias(bias: Tensor | None, shape: torch.Size, like: Tensor) -> Tensor:
    if bias is None:
        return like.new_zeros(shape)
    _check_floating(bias=bias)
    if bias.shape != shape:
        raise ValueError(f"bias must have shape {tuple(shape)}, got {tuple(bias.shape)}")
    return bias


def _check_patterns(patterns: Tensor) -> None:
    _check_floating(patterns=patterns)
    if patterns.ndim < 2 or 0 in patterns.shape[-2:]:
        raise ValueError(f"patterns must have shape (*batch, N, d) with N, d ≥ 1, got {tuple(patterns.shape)}")


def _check_floating(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        floating(name, tensor)
        if values_are_readable(tensor) and not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} must be finite")


def _check_values(values: str) -> None:
    if values not in ("spins", "bits"):
        raise ValueError(f'values must be "spins" or "bits", got {values!r}')
