"""Hopfield networks of two-valued units, classical and modern, with asynchronous updates (B4)."""

from typing import Literal, Self

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.energy.base import Energy, promoted, times
from massieu.foundation.arguments import check_finite, check_shape, choice, floating, whole_number
from massieu.foundation.transforms import all_true
from massieu.foundation.values import align, need_batch, static_field

Values = Literal["spins", "bits"]
"""Units of ±1, or of 0 and 1."""
Rule = Literal["hebb", "pseudo_inverse"]
"""How patterns become couplings."""

_TIE_ROUNDINGS = 8
"""A difference of energies below this number of roundings of its terms counts as a tie."""
_FREE_ROUNDINGS = 64
"""A row of a projection without its diagonal is 0 up to this number of roundings of each entry."""
_ADVICE = "; for patterns of shape (*batch, N, d) call BinaryHopfieldEnergy.of_patterns"


class _TwoValued(Energy):
    """An energy of units with two values each: the field `values` names them, `bias` (*batch, d) gives the shape of states."""

    bias: Float[Tensor, "*batch d"]
    values: Values = static_field()

    @property
    def _dampings(self) -> str:
        return "{1}"

    @property
    def _low_and_high(self) -> tuple[float, float]:
        """The two values of a unit."""
        if self.values == "spins":
            return -1.0, 1.0
        return 0.0, 1.0

    def _two_valued(self, state: Tensor) -> Tensor:
        """The state in at least float32; or an error if it has another shape or other values."""
        state = promoted(state)
        low, high = self._low_and_high
        need_batch(type(self).__name__, "a state", state.shape, self.bias.shape[:-1], self.bias.shape[-1:])
        if not all_true((state == low) | (state == high)):
            raise ValueError(f"a state of {self.values} holds {low:g} and {high:g} alone")
        return state

    def _choose(self, gain: Tensor, size: Tensor, unit: Tensor) -> Tensor:
        """The value of lower energy for one unit: `high` where gain = E(low) − E(high) > 0; on a tie the unit does not change.

        `size` is the size of the terms of the gain, whose rounding decides what counts as a tie.
        """
        low, high = self._low_and_high
        tie = gain.abs() <= _TIE_ROUNDINGS * torch.finfo(gain.dtype).eps * size
        return torch.where(tie, unit, torch.where(gain > 0, high, low))


class BinaryHopfieldEnergy(_TwoValued):
    """The classical Hopfield network: E(v) = −bias·v − ½ vᵀ couplings v over v ∈ {±1}^d or {0, 1}^d.

    One step visits every unit once, in order, and gives it the value of lower energy while the others stay. On a tie the
    unit stays too. So E never rises, and after finitely many steps nothing changes: a local minimum under single flips.
    For spins the diagonal of the couplings is a constant; for bits it shifts the bias by half of it, since v_i² = v_i.

    With couplings W Wᵀ it is what Gaussian hidden units N(0, 1) leave (B2). Use `create` for couplings, `of_patterns` for
    patterns.

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
            raise ValueError(
                f"couplings must have shape (*batch, d, d) with d ≥ 1, got {tuple(couplings.shape)}{_ADVICE}"
            )
        size = couplings.abs().amax((-2, -1), keepdim=True)
        if not all_true((couplings - couplings.mT).abs() <= 8 * torch.finfo(couplings.dtype).eps * size):
            raise ValueError(f"couplings must be symmetric: other networks have no energy{_ADVICE}")
        values = choice("values", values, "spins", "bits")
        return cls(_bias(bias, couplings.shape[:-1], couplings), values, couplings)

    @classmethod
    def of_patterns(
        cls,
        patterns: Float[Tensor, "*batch N d"],
        bias: Float[Tensor, "*batch d"] | None = None,
        *,
        values: Values = "spins",
        rule: Rule = "hebb",
    ) -> Self:
        """A network that stores patterns, by one of two rules.

        "hebb": couplings Σ_n x_n x_nᵀ. Of random patterns of ±1, about 0.138·d are recalled with few errors.

        "pseudo_inverse": couplings P, the projection on the span of the patterns (Personnaz, Guyon and Dreyfus 1985), for bits
        with a bias of −½ beside the given one. Without a given bias E(v) is half the squared distance ‖v − Pv‖² from the span,
        for spins less d/2. So every pattern is a minimum, however alike patterns are, and up to d − 1 of them are stored; how
        far around each the network still finds it shrinks with their number. Computed in float64, returned in at least
        float32; for numbers near d take float64, since differences of energies are small. Differentiable while the rank stays.

        Raises:
            ValueError: as `create`; no pattern; an unknown rule; patterns that span all d dimensions for "pseudo_inverse",
                for then every state would be stored.
            TypeError: a tensor is not floating-point.

        Example:
            >>> import torch
            >>> from massieu.energy import BinaryHopfieldEnergy
            >>> alike = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, -1.0], [1.0, 1.0, -1.0, 1.0]])
            >>> [
            ...     bool((BinaryHopfieldEnergy.of_patterns(alike, rule=rule).step(alike) == alike).all())
            ...     for rule in ("hebb", "pseudo_inverse")
            ... ]
            [False, True]
        """
        _check_patterns(patterns)
        rule = choice("rule", rule, "hebb", "pseudo_inverse")
        if rule == "hebb":
            return cls.create(patterns.mT @ patterns, bias, values=values)
        network = cls.create(_projection(promoted(patterns)), bias, values=values)
        if network.values == "spins":
            return network
        # For bits ½‖v‖² = ½ Σ v_i, a bias; for spins it is a constant.
        return cls(network.bias - 0.5, network.values, network.couplings)

    def _energy(self, state: Tensor) -> Tensor:
        state = self._two_valued(state)
        return -(state * (align(self.bias, state.ndim, 1) + 0.5 * self._coupling_field(state))).sum(-1)

    def _coupling_field(self, state: Tensor) -> Tensor:
        """couplings·v, (*batch, *query, d)."""
        return times(state, self.couplings.to(state.dtype))

    def _step(self, state: Tensor) -> Tensor:
        state = self._two_valued(state)
        couplings = self.couplings.to(state.dtype)
        bias = align(self.bias, state.ndim, 1)
        low, high = self._low_and_high
        field = self._coupling_field(state) + bias
        units = list(state.unbind(-1))
        for index, unit in enumerate(units):
            column = align(couplings[..., index], state.ndim, 1)
            self_coupling = column[..., index]
            # E(low) − E(high) = (high − low)·(field of the others) + ½(high² − low²)·J_ii.
            others_field = field[..., index] - self_coupling * unit
            gain = (high - low) * others_field + 0.5 * (high**2 - low**2) * self_coupling
            size = column.abs().sum(-1) + bias[..., index].abs()
            units[index] = self._choose(gain, size, unit)
            # One column updates the field, so that a sweep costs d² and not d³.
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
        state = self._two_valued(state)
        overlap = self._overlap(state)
        if self.degree is None:
            pattern_terms = overlap.exp()
        else:
            pattern_terms = overlap**self.degree
        return -(align(self.bias, state.ndim, 1) * state).sum(-1) - pattern_terms.sum(-1)

    def _overlap(self, state: Tensor) -> Tensor:
        """x_n·v, shape (*batch, *query, N)."""
        return times(state, self.patterns.to(state.dtype).mT)

    def _step(self, state: Tensor) -> Tensor:
        state = self._two_valued(state)
        patterns = self.patterns.to(state.dtype)
        bias = self.bias.to(state.dtype)
        low, high = self._low_and_high
        gain_of = self._gain_power if self.degree else _gain_exp
        # Overlaps with the patterns, (*batch, *query, N), are updated by one column of the patterns for each unit.
        overlap = self._overlap(state)
        units = list(state.unbind(-1))
        for index, unit in enumerate(units):
            column = align(patterns[..., index], overlap.ndim, 1)
            others_overlap = overlap - column * unit.unsqueeze(-1)
            bias_gain = (high - low) * align(bias[..., index], unit.ndim)
            gain, size = gain_of(others_overlap + low * column, others_overlap + high * column, bias_gain)
            units[index] = self._choose(gain, size, unit)
            overlap = others_overlap + column * units[index].unsqueeze(-1)
        return torch.stack(units, -1)

    def _gain_power(self, low_overlap: Tensor, high_overlap: Tensor, bias_gain: Tensor) -> tuple[Tensor, Tensor]:
        """bias_gain + Σ high_overlapⁿ − low_overlapⁿ, and the size of its terms."""
        assert self.degree is not None
        low = low_overlap**self.degree
        high = high_overlap**self.degree
        return bias_gain + (high - low).sum(-1), bias_gain.abs() + (high.abs() + low.abs()).sum(-1)


def _gain_exp(low_overlap: Tensor, high_overlap: Tensor, bias_gain: Tensor) -> tuple[Tensor, Tensor]:
    """bias_gain + Σ exp(high_overlap) − exp(low_overlap), and the size of its terms.

    Both are times a positive number that keeps them finite: only the sign of the gain, and ties, are decided by them.
    """
    peak = torch.maximum(low_overlap, high_overlap).detach().amax(-1).clamp_min(0.0)
    low = (low_overlap - peak.unsqueeze(-1)).exp()
    high = (high_overlap - peak.unsqueeze(-1)).exp()
    bias_gain = bias_gain * (-peak).exp()
    return bias_gain + (high - low).sum(-1), bias_gain.abs() + (high + low).sum(-1)


def _bias(bias: Tensor | None, shape: torch.Size, like: Tensor) -> Tensor:
    """The bias, zeros by default; or an error."""
    if bias is None:
        return like.new_zeros(shape)
    check_finite(bias=floating("bias", bias))
    check_shape("bias", bias, shape)
    return bias


def _projection(patterns: Tensor) -> Tensor:
    """The projection on the span of the patterns, (*batch, d, d)."""
    # In float64, so that rounding to float32 stays below what counts as a tie, also where patterns are nearly dependent. The
    # pseudo-inverse leaves out directions below the rounding of the largest one, so patterns may repeat.
    wide = patterns.double()
    projection = torch.linalg.pinv(wide) @ wide
    projection = 0.5 * (projection + projection.mT)
    width = patterns.shape[-1]
    # The trace of a projection is its rank, a whole number.
    if not all_true(projection.diagonal(dim1=-2, dim2=-1).sum(-1) < width - 0.5):
        raise ValueError(
            f"pseudo_inverse needs patterns that span fewer than their {width} dimensions, got {patterns.shape[-2]} patterns "
            "that span all of them: every state would be stored"
        )
    # A unit that is free within the span has the row of the unit matrix, and both its values have one energy. Rounding must
    # not decide between them; subtracted as a constant, it leaves derivatives as they are.
    identity = torch.eye(width, dtype=wide.dtype, device=wide.device)
    off_diagonal = torch.linalg.vector_norm(projection.detach() * (1 - identity), dim=-1)
    is_free = off_diagonal <= _FREE_ROUNDINGS * width**0.5 * torch.finfo(wide.dtype).eps
    rounding = torch.where(is_free.unsqueeze(-1) | is_free.unsqueeze(-2), projection - identity, 0.0)
    return (projection - rounding.detach()).to(patterns.dtype)


def _check_patterns(patterns: Tensor) -> None:
    check_finite(patterns=floating("patterns", patterns))
    if patterns.ndim < 2 or 0 in patterns.shape[-2:]:
        raise ValueError(f"patterns must have shape (*batch, N, d) with N, d ≥ 1, got {tuple(patterns.shape)}")
