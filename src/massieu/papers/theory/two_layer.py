"""Two layers of neurons that drive each other: the dynamics behind the Hopfield energies, hidden units not yet eliminated.

τ_v v̇ = W g_h − v, τ_h ḣ = Wᵀ g_v − h, with activations g = ∇L of Lagrangians L (Krotov and Hopfield, arXiv 2008.06996; B20).
"""

import math
from typing import Literal, Self

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.energy.activations import Activation, Identity, MeasureActivation
from massieu.energy.base import DescentResult, Energy, Potential, promoted, times
from massieu.foundation.arguments import check_finite, choice, floating, number, whole_number
from massieu.foundation.values import need_batch, static_field
from massieu.measures import Atoms

Method = Literal["split", "runge_kutta"]


class TwoLayer(Energy):
    """The energy of a two-layer memory network (Krotov and Hopfield) on visible and hidden states, joined along the last dim.

    ℰ(v, h) = [v·g_v − L_v(v)] + [h·g_h − L_h(h)] − g_v·W g_h. Along the dynamics dℰ/dt = −τ_v v̇ᵀ∇²L_v v̇ − τ_h ḣᵀ∇²L_h
    ḣ ≤ 0, since Lagrangians are convex. The descent map is both limits in turn, h ← Wᵀg_v, then v ← W g_h: each is the
    exact minimum of ℰ in its layer. With L_v = ½‖v‖², L_h = log Σ exp and h at its limit ℰ is the energy of
    `HopfieldEnergy` and the map is attention. `flow` follows the dynamics in time.

    `step` takes no other damping than 1: the segment to the map's value may climb; shorten `flow` instead. Use `create`.

    Attributes:
        coupling: W, shape (*batch, n_v, n_h).
        visible, hidden: The activations ∇L_v and ∇L_h.
        visible_time, hidden_time: τ_v and τ_h.

    Example:
        >>> import torch
        >>> from massieu.papers.theory import TwoLayer
        >>> network = TwoLayer.create(8 * torch.eye(2))
        >>> visible, _ = network.split(network.step(network.join(torch.tensor([0.9, 0.1]))))
        >>> [round(x, 2) for x in visible.tolist()]
        [7.99, 0.01]
    """

    coupling: Float[Tensor, "*batch n_v n_h"]
    visible: Activation
    hidden: Activation
    visible_time: float = static_field()
    hidden_time: float = static_field()

    @classmethod
    def create(
        cls,
        coupling: Float[Tensor, "*batch n_v n_h"],
        *,
        visible: Activation | Potential | None = None,
        hidden: Activation | Potential | None = None,
        visible_time: float = 1.0,
        hidden_time: float = 1.0,
    ) -> Self:
        """Two layers.

        Args:
            coupling: W; its columns are the memories of the hidden units.
            visible: g_v, an activation, a measure or another potential; the identity, of L_v = ½‖v‖², by default.
            hidden: g_h, likewise; the softmax, of L_h = log Σ exp, by default.
            visible_time, hidden_time: Positive.

        Raises:
            ValueError: the coupling is no matrix or not finite, or a time is not positive.
            TypeError: the coupling is not floating-point, or a layer is given no activation.
        """
        if floating("coupling", coupling).ndim < 2 or 0 in coupling.shape[-2:]:
            raise ValueError(f"coupling must have shape (*batch, n_v, n_h), got {tuple(coupling.shape)}")
        check_finite(coupling=coupling)
        number("visible_time", visible_time, above=0)
        number("hidden_time", hidden_time, above=0)
        coupling = promoted(coupling)
        units = torch.eye(coupling.shape[-1], dtype=coupling.dtype, device=coupling.device)
        if hidden is None:
            hidden = Atoms.create(units)  # L_h = log Σ exp
        return cls(
            coupling,
            Identity() if visible is None else MeasureActivation.of("visible", visible),
            MeasureActivation.of("hidden", hidden),
            float(visible_time),
            float(hidden_time),
        )

    def join(
        self, visible: Float[Tensor, "*batch_query n_v"], hidden: Float[Tensor, "*batch_query n_h"] | None = None
    ) -> Float[Tensor, "*batch_query n"]:
        """The state (v, h); if h is not given, it is its limit Wᵀg_v."""
        *batch, num_visible, num_hidden = self.coupling.shape
        need_batch("TwoLayer", "visible", floating("visible", visible).shape, batch, (num_visible,))
        if hidden is None:
            hidden = self._drive_on_hidden(visible)
        else:
            need_batch("TwoLayer", "hidden", floating("hidden", hidden).shape, batch, (num_hidden,))
        return torch.cat([visible, hidden], -1)

    def split(
        self, state: Float[Tensor, "*batch_query n"]
    ) -> tuple[Float[Tensor, "*batch_query n_v"], Float[Tensor, "*batch_query n_h"]]:
        """v and h of a state."""
        *batch, num_visible, num_hidden = self.coupling.shape
        need_batch("TwoLayer", "a state", self._checked_state(state).shape, batch, (num_visible + num_hidden,))
        visible, hidden = promoted(state).split((num_visible, num_hidden), -1)
        return visible, hidden

    def flow(
        self, state: Float[Tensor, "*batch_query n"], duration: float, *, steps: int, method: Method = "split"
    ) -> DescentResult:
        """The path of the dynamics over `duration`, in equal steps, the start included.

        Args:
            duration: How long, in the unit of the times τ.
            method: "split" moves one layer while the other stands still, v for half of the step, h, then v again, each along
                its exact exponential: second order, and ℰ never rises, however long the step. "runge_kutta" is the
                classical method: fourth order; ℰ may rise by O(dt⁵) in a step, and for dt > 2.8 τ the path may diverge.

        Raises:
            ValueError: the duration is negative or not finite, `steps` is not at least 1, or there is no such method.
        """
        number("duration", duration, least=0)
        whole_number("steps", steps, least=1)
        choice("method", method, "split", "runge_kutta")
        advance = self._advance_split if method == "split" else self._advance_runge_kutta
        self.split(state)
        states = [promoted(state)]
        for _ in range(steps):
            states.append(advance(states[-1], duration / steps))
        return DescentResult(torch.stack(states), torch.stack([self._energy(state) for state in states]))

    @property
    def _dampings(self) -> str:
        return "{1}"

    def _energy(self, state: Tensor) -> Tensor:
        visible, hidden = self.split(state)
        active_v = self.visible(visible)
        active_h = self.hidden(hidden)
        conjugates = _conjugate(self.visible, visible, active_v) + _conjugate(self.hidden, hidden, active_h)
        return conjugates - (active_v * self._times_coupling(active_h, transposed=False)).sum(-1)

    def _step(self, state: Tensor) -> Tensor:
        visible, _ = self.split(state)
        hidden = self._drive_on_hidden(visible)
        return self.join(self._drive_on_visible(hidden), hidden)

    def _drive_on_hidden(self, visible: Tensor) -> Tensor:
        """Wᵀg_v."""
        return self._times_coupling(self.visible(visible), transposed=True)

    def _drive_on_visible(self, hidden: Tensor) -> Tensor:
        """W g_h."""
        return self._times_coupling(self.hidden(hidden), transposed=False)

    def _times_coupling(self, activation: Tensor, transposed: bool) -> Tensor:
        matrix = self.coupling.to(torch.promote_types(self.coupling.dtype, activation.dtype))
        # `times` multiplies rows from the left: g W is Wᵀg.
        return times(activation.to(matrix.dtype), matrix if transposed else matrix.mT)

    def _velocity(self, state: Tensor) -> Tensor:
        visible, hidden = self.split(state)
        visible_change = (self._drive_on_visible(hidden) - visible) / self.visible_time
        hidden_change = (self._drive_on_hidden(visible) - hidden) / self.hidden_time
        return torch.cat([visible_change, hidden_change], -1)

    def _advance_split(self, state: Tensor, time: float) -> Tensor:
        visible, hidden = self.split(state)
        visible = self._relax(visible, self._drive_on_visible(hidden), 0.5 * time / self.visible_time)
        hidden = self._relax(hidden, self._drive_on_hidden(visible), time / self.hidden_time)
        visible = self._relax(visible, self._drive_on_visible(hidden), 0.5 * time / self.visible_time)
        return self.join(visible, hidden)

    @staticmethod
    def _relax(layer: Tensor, drive: Tensor, time: float) -> Tensor:
        """The layer after a time, in units of its τ, for a constant drive; ℰ falls, as −(x − drive)ᵀ∇²L(x − drive) ≤ 0."""
        return layer - math.expm1(-time) * (drive - layer)

    def _advance_runge_kutta(self, state: Tensor, time: float) -> Tensor:
        first = self._velocity(state)
        second = self._velocity(state + 0.5 * time * first)
        third = self._velocity(state + 0.5 * time * second)
        fourth = self._velocity(state + time * third)
        return state + time / 6 * (first + 2 * second + 2 * third + fourth)


def _conjugate(activation: Activation, x: Tensor, active: Tensor) -> Tensor:
    """L*(g) = x·g − L(x), at g = ∇L(x)."""
    return (x * active).sum(-1) - activation.lagrangian(x)
