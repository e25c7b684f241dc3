"""Spins that all move at once, under couplings that need not be symmetric: kinetic mean fields of two orders (B16).

Spin i at time t is drawn from its tilted measure in the field x_i + Σ_j J_ij S_j(t − 1). The mean fields follow its means by

    θ_i(t) = x_i + Σ_j J_ij m_j(t − 1) + echo_i,    m_i = ∇A(θ_i),

with no echo to first order, and to second order ½ A''(θ_i)⁻¹ A'''(θ_i)[Σ_j J_ij² Cov_j + v_i v_iᵀ], Cov_j the covariance of
spin j at t − 1 (trap 30) and v_i = −echo_i. A state is the spins' local fields θ. Without symmetric couplings there is no
equilibrium and no free energy, and none is claimed.
"""

import math
from abc import abstractmethod
from typing import ClassVar, Literal, NamedTuple, Self

import torch
from jaxtyping import Float
from torch import Tensor

from massieu import duality
from massieu.foundation.arguments import as_tensor, check_one_device, check_range, choice, expanded, floating
from massieu.foundation.transforms import all_true, unwrapped
from massieu.foundation.values import Value, need_batch, promoted_dtype, static_field
from massieu.measures import Sphere
from massieu.ops.bessel import sphere_slopes
from massieu.solve import Auto, Implicit, Method, fixed_point
from massieu.solve.adjoint import Adjoint
from massieu.solve.status import FixedPointResult, warn_unconverged

Order = Literal["first", "second"]
_AUTO = Auto()
_IMPLICIT = Implicit()


class Kinetic(Value):
    """The base of kinetic models: a drive, couplings, and a state that is moved by `step`.

    Methods raise a ValueError at a state of another shape than the drive's, or on another device, and a TypeError at one
    that is not floating-point, or of another dtype.

    Attributes:
        drive: x, (*batch, N) or (*batch, N, D).
        coupling: J, (*batch, N, N); J[i, j] is what spin j does to spin i.
    """

    _family = "models"

    drive: Tensor
    coupling: Float[Tensor, "*batch N N"]

    _spin_dims: ClassVar[int]

    @abstractmethod
    def mean(self, state: Tensor) -> Tensor:
        """m, the means of spins in the local fields `state`."""

    @abstractmethod
    def _echo(self, state: Tensor, before: Tensor, field: Tensor) -> Tensor:
        """The part of second order in θ, at θ = `state`.

        `before` are the local fields one time earlier, `field` is the mean field x_i + Σ_j J_ij m_j that follows from them.
        """

    @abstractmethod
    def _stiffness(self) -> Tensor:
        """An upper bound on the slope with which the echo falls in θ: (*batch, N), for vectors (*batch, N, 1)."""

    def field(self, state: Tensor) -> Tensor:
        """x_i + Σ_j J_ij m_j: the mean field on each spin, of spins with local fields `state`."""
        return self._field(self._checked(state))

    def _field(self, state: Tensor) -> Tensor:
        mean = self.mean(state)
        if self._spin_dims:
            return self.drive + self.coupling @ mean
        return self.drive + (self.coupling @ mean[..., None])[..., 0]

    def step(self, state: Tensor, order: Order = "first", *, max_steps: int = 200, throw: bool = True) -> Tensor:
        """θ one time later. To second order θ is on both sides of its equation, which is solved for each spin.

        From independent spins, the error of one step in the means falls as the square of the couplings to first order, as
        their cube to second.

        Raises:
            ValueError: another order.
            ConvergenceError: the equation of a spin was not solved, and `throw` is True. If it is False there is a warning;
                `second_order_step` returns the status of each spin.
        """
        if choice("order", order, "first", "second") == "first":
            return self.field(state)
        solution = self.second_order_step(state, max_steps=max_steps, throw=throw)
        if not throw:
            warn_unconverged(solution.status, solution.residual, f"{type(self).__name__}.step")
        return solution.value

    def second_order_step(
        self, state: Tensor, *, max_steps: int = 200, throw: bool = True, adjoint: Adjoint = _IMPLICIT
    ) -> FixedPointResult:
        """The step to second order, with status, residual and steps of each spin's equation. Raises as `step`.

        Options are those of `massieu.solve.fixed_point`.
        """
        field = self.field(state)
        return fixed_point(
            _echo_move,
            field,
            (self, state, field),
            item_dims=self._spin_dims,
            max_steps=max_steps,
            throw=throw,
            adjoint=adjoint,
        )

    def stationary(
        self,
        order: Order = "first",
        start: Tensor | None = None,
        *,
        method: Method = _AUTO,
        max_steps: int = 200,
        throw: bool = True,
        adjoint: Adjoint = _IMPLICIT,
    ) -> FixedPointResult:
        """θ = step(θ), with its derivatives by the implicit function theorem, and status, residual and steps (B12).

        The start is by default the drive; options are those of `massieu.solve.fixed_point`.

        Raises:
            ValueError: another order.
            ConvergenceError: no fixed point was found, and `throw` is True.
        """
        choice("order", order, "first", "second")
        if start is None:
            start = self.drive
        start = self._checked(start, "start")
        # The fixed point is one of all spins together: an item is a whole state.
        return fixed_point(
            _first_order if order == "first" else _second_order,
            start.detach(),
            (self,),
            item_dims=self._spin_dims + 1,
            method=method,
            max_steps=max_steps,
            throw=throw,
            adjoint=adjoint,
        )

    def _checked(self, state: Tensor, name: str = "state") -> Tensor:
        """The state as it is; or an error unless it has the shape, the dtype and the device of the drive."""
        if floating(name, state).shape != self.drive.shape:
            raise ValueError(f"{name} must have the drive's shape {tuple(self.drive.shape)}, got {tuple(state.shape)}")
        self._check_device(**{name: state})
        if state.dtype != self.drive.dtype:
            raise TypeError(f"{name} must be of the drive's dtype {self.drive.dtype}, got {state.dtype}")
        return state


def _first_order(state: Tensor, model: Kinetic) -> Tensor:
    return model._field(state)


def _second_order(state: Tensor, model: Kinetic) -> Tensor:
    return _echo_move(state, model, state, model._field(state))


def _echo_move(state: Tensor, model: Kinetic, before: Tensor, field: Tensor) -> Tensor:
    """A move towards θ = field + echo(θ), damped so that it does not overshoot.

    The slope of the echo lies between −L and 0, L = `_stiffness`. A move of 1/(1 + L) of the way then has a slope between 0
    and L/(1 + L), and contracts.
    """
    target = field + model._echo(state, before, field)
    return state + (target - state) / (1 + model._stiffness())


class _Radial(NamedTuple):
    """The factor c in m = c(s)θ, s = ‖θ‖², and its derivatives, each with a last dimension of size 1."""

    value: Tensor
    """c."""
    slope: Tensor
    """dc/ds."""
    bend: Tensor
    """d²c/ds²."""


class KineticSpins(Kinetic):
    """Kinetic model of vector spins on the sphere of radius R, R² = D/2 − 1, in R^D (B16). Use `create`.

    If `exact`, m is the mean of von Mises and Fisher's law, R·A_D(βR‖θ‖)·θ/‖θ‖, A_D a ratio of Bessel functions. If not, m is
    its limit for many components, βθ/(1 + γ) with γ = √(1 + β²‖θ‖²/R²), which is off by O(1/D). Both have ‖m‖ < R and slopes
    of at most β/2.

    Attributes:
        scale: β, shaped like the batch or broadcasting to it.
        exact: Whether means are exact, or those of the limit of many components.

    Example:
        >>> import torch
        >>> from massieu.energy import KineticSpins
        >>> spins = KineticSpins.create(torch.zeros(2, 4), torch.tensor([[0.0, 0.4], [0.4, 0.0]]))
        >>> spins.radius, spins.mean(spins.stationary().value).abs().max().item()
        (1.0, 0.0)
    """

    scale: Float[Tensor, "*#batch"]
    exact: bool = static_field(default=False)

    _spin_dims = 1

    @classmethod
    def create(
        cls,
        drive: Float[Tensor, "*batch N D"],
        coupling: Float[Tensor, "*batch N N"],
        *,
        scale: Float[Tensor, "*#batch"] | float = 1.0,
        exact: bool = False,
    ) -> Self:
        """N spins of D ≥ 3 components; half precision is promoted to float32.

        Raises a TypeError at tensors that are not floating-point, a ValueError at shapes that do not fit and at a scale that
        is not positive and finite.
        """
        check_drive_and_coupling(drive, coupling, spin_dims=1)
        dtype = promoted_dtype(drive, coupling)
        scale = as_tensor("scale", scale, drive, dtype)
        check_range("scale", scale, above=0)
        expanded("scale", scale, drive.shape[:-2])
        return cls(drive.to(dtype), coupling.to(dtype), scale, exact)

    @property
    def radius(self) -> float:
        """R."""
        return math.sqrt(self.drive.shape[-1] / 2 - 1)

    @property
    def lipschitz(self) -> Float[Tensor, "*batch"]:
        """(β/2) max_i Σ_j |J_ij|: the Lipschitz constant of a step of first order, in the norm max_i ‖Δθ_i‖.

        Below 1 the step has one fixed point. It is β/2 for couplings that are softmax weights, whose rows sum to 1.
        """
        return self.scale / 2 * self.coupling.abs().sum(-1).amax(-1)

    def mean(self, state: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch N D"]:
        return self._radial(self._vectors("state", state)).value * state

    def state(self, mean: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch N D"]:
        """θ of given means, ‖m‖ < R: 2R²m/(β(R² − ‖m‖²)), or the inverse of the Bessel functions' ratio.

        Raises:
            ValueError: a mean is as long as R, or longer.
        """
        self._vectors("mean", mean)
        # R² − ‖m‖², (*, 1).
        variance = self.radius**2 - mean.square().sum(-1, keepdim=True)
        if not all_true(variance > 0):
            longest = unwrapped(mean.detach().norm(dim=-1)).amax().item()
            raise ValueError(f"means must be shorter than the radius {self.radius:.6g}, got a length of {longest:.6g}")
        if not self.exact:
            return 2 * self.radius**2 * mean / (self._beta * variance)
        sphere = Sphere.create(torch.as_tensor(self.radius, dtype=mean.dtype, device=mean.device), dim=mean.shape[-1])
        return duality.natural(sphere, mean) / self._beta

    def covariance(self, state: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch N D D"]:
        """Cov_i of each spin in its local field; ∂m_i/∂θ_i = β Cov_i, of eigenvalues at most β/2."""
        radial = self._radial(self._vectors("state", state))
        identity = torch.eye(state.shape[-1], dtype=state.dtype, device=state.device)
        # ∂m/∂θ = c·I + 2c′·θθᵀ is β times the covariance.
        isotropic = (radial.value / self._beta).unsqueeze(-1) * identity
        along = (2 * radial.slope / self._beta).unsqueeze(-1)
        return isotropic + along * state.unsqueeze(-1) * state.unsqueeze(-2)

    def entropy_production(self, state: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch"]:
        """(β²/2) Σ_ij (J_ij − J_ji)² Tr(Cov_i Cov_j): a proxy of the housekeeping entropy of a step, nats (N31).

        0 if and only if the couplings are symmetric. It is right to second order in the couplings, and not a bound.
        """
        value, slope, _ = self._radial(self._checked(state))
        square = state.square().sum(-1, keepdim=True)
        # β² Tr(Cov_i Cov_j), (*batch, N, N), of matrices c·I + 2c′·θθᵀ: D·c_i c_j, two mixed terms, and (θ_i·θ_j)².
        own_trace = state.shape[-1] * value + 2 * slope * square
        trace = own_trace * value.mT + 2 * value * (slope * square).mT
        trace = trace + 4 * slope * slope.mT * (state @ state.mT).square()
        return 0.5 * ((self.coupling - self.coupling.mT).square() * trace).sum((-2, -1))

    def _vectors(self, name: str, vectors: Tensor) -> Tensor:
        """The vectors as they are; or an error unless their last dimension is that of the spins."""
        need_batch("KineticSpins", name, floating(name, vectors).shape, (), self.drive.shape[-1:])
        self._check_device(**{name: vectors})
        return vectors

    @property
    def _beta(self) -> Tensor:
        """β as (*batch, 1, 1), to multiply vectors of spins."""
        return self.scale[..., None, None]

    def _radial(self, state: Tensor) -> _Radial:
        square = state.square().sum(-1, keepdim=True)
        if self.exact:
            return _exact_radial(square, self._beta, state.shape[-1])
        # c = β/(1 + γ) with γ² = 1 + 2ks, so that dγ/ds = k/γ.
        k = self._beta.square() / (2 * self.radius**2)
        gamma = (1 + 2 * k * square).sqrt()
        value = self._beta / (1 + gamma)
        slope = -value * k / (gamma * (1 + gamma))
        bend = -slope * k * (1 + 3 * gamma) / (gamma.square() * (1 + gamma))
        return _Radial(value, slope, bend)

    def _echo(self, state: Tensor, before: Tensor, field: Tensor) -> Tensor:
        value, slope, bend = self._radial(state)
        value_before, slope_before, _ = self._radial(before)
        squared_coupling = self.coupling.square()
        # v = −echo, at the θ of the iteration.
        v = field - state
        # Let Q = v vᵀ + Σ_j J_ij² Cov_j. First its trace: a spin's length is fixed, so Tr Cov_j = R² − ‖m_j‖², which holds
        # for the limit of many components too.
        variance = self.radius**2 - (value_before * before).square().sum(-1, keepdim=True)
        trace = v.square().sum(-1, keepdim=True) + squared_coupling @ variance
        # Then Qθ_i, with Cov_j = (c_j·I + 2c′_j·θ_jθ_jᵀ)/β of the fields before.
        product = v * (v * state).sum(-1, keepdim=True)
        along = squared_coupling * (state @ before.mT) * slope_before.mT
        product = product + (squared_coupling @ value_before * state + 2 * along @ before) / self._beta
        # A‴[Q] = (2c′ Tr Q + 4c″ θᵀQθ) θ + 4c′ Qθ, from the derivatives of c(‖θ‖²)θ.
        quadratic = (state * product).sum(-1, keepdim=True)
        third = (2 * slope * trace + 4 * bend * quadratic) * state + 4 * slope * product
        # ½ A″⁻¹ of it: the inverse of c·I + 2c′·θθᵀ by Sherman and Morrison's formula.
        axis = 2 * slope / (value + 2 * slope * state.square().sum(-1, keepdim=True))
        return 0.5 / value * (third - axis * (state * third).sum(-1, keepdim=True) * state)

    def _stiffness(self) -> Tensor:
        # The slope at θ = 0 and m = 0 in the limit of many components, where the echo is steepest.
        squared = self.coupling.square().sum(-1, keepdim=True)
        return self._beta.square() / 4 * (1 + 1 / self.radius**2) * squared


def _exact_radial(square: Tensor, beta: Tensor, dimension: int) -> _Radial:
    """c = βR²·A(κ)/κ with κ² = β²R²s, s = `square`, and its derivatives in s."""
    factor = beta * (dimension / 2 - 1)  # βR²
    rate = beta * factor  # dκ²/ds = β²R²
    kappa_square = rate * square
    slopes = sphere_slopes(kappa_square, dimension)
    bend_slope = torch.func.grad(lambda point: sphere_slopes(point, dimension).bend.sum())(kappa_square)
    # d(A/κ)/dκ² = −bend/2; each derivative in s has a further factor dκ²/ds.
    value = factor * slopes.chord
    slope = -0.5 * factor * rate * slopes.bend
    bend = -0.5 * factor * rate**2 * bend_slope
    return _Radial(value, slope, bend)


def check_drive_and_coupling(drive: Tensor, coupling: Tensor, *, spin_dims: int) -> None:
    """Raise an error unless drive and couplings fit each other; a vector spin has `spin_dims` = 1, a sign 0."""
    check_one_device(drive=floating("drive", drive), coupling=floating("coupling", coupling))
    lead = drive.shape[: drive.ndim - spin_dims]
    if not lead or coupling.shape != (*lead, lead[-1]) or (spin_dims and drive.shape[-1] < 3):
        drive_shape = "(*batch, N, D), D at least 3," if spin_dims else "(*batch, N)"
        shapes = f"{tuple(drive.shape)} and {tuple(coupling.shape)}"
        raise ValueError(f"drive must have shape {drive_shape} and coupling (*batch, N, N), got {shapes}")
