"""The contract every energy keeps.

An energy E is a function of a state, with a map that walks down it: E(step(x)) ≤ E(x), for every x and every damping that
`step` accepts. It is built as potential − log Z, so its map is attention, or attention followed by an activation. An author
writes two hooks, `_energy` and `_step`; the force −∇E and the Hessian are derived with `torch.func`.

Like a measure, an energy is a value (`massieu.foundation.values`): rebuilt in every forward pass, it owns no parameter, and
checks go into a `create` classmethod.

Shapes: batch dimensions on the left, query dimensions in the middle, event dimensions on the right, as for measures. Energies
drop the event dimensions; they are in nats/scale and at least float32, states in half precision are promoted.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeGuard, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from massieu.energy.gradients import jacobian
from massieu.foundation.arguments import floating, number, whole_number
from massieu.foundation.short_repr import fields_html, fields_repr
from massieu.foundation.values import Value, promoted_dtype
from massieu.solve import Picard, Status, fixed_point
from massieu.solve.methods import default_tolerance
from massieu.solve.status import warn_unconverged

_DAMPINGS: dict[str, Callable[[float], bool]] = {
    "(0, 2)": lambda damping: 0 < damping < 2,
    "(0, 1]": lambda damping: 0 < damping <= 1,
    "{1}": lambda damping: damping == 1,
}


class Potential(Protocol):
    """A convex function and its gradient, of eta of shape (*batch, *query, *event): a measure, or a `PatternPotential`."""

    @property
    def batch_shape(self) -> torch.Size: ...

    @property
    def event_shape(self) -> torch.Size: ...

    def log_partition(self, eta: Float[Tensor, "*batch_query_event"]) -> Float[Tensor, "*batch_query"]: ...

    def mean(self, eta: Float[Tensor, "*batch_query_event"]) -> Float[Tensor, "*batch_query_event"]: ...


def is_potential(value: object) -> TypeGuard[Potential]:
    """Whether `value` has the attributes of a `Potential`; `isinstance` of a protocol does not work in compiled code."""
    return all(hasattr(value, name) for name in ("batch_shape", "event_shape", "log_partition", "mean"))


class DescentResult(NamedTuple):
    """The path of a descent, its start included."""

    states: Float[Tensor, "steps+1 *batch_query_event"]
    energies: Float[Tensor, "steps+1 *batch_query"]

    __repr__ = fields_repr
    _repr_html_ = fields_html


class RetrievalResult(NamedTuple):
    """Where a descent ended.

    `residual` is ‖T(state) − state‖ of the very `state` returned, T the undamped step; `status` holds values of
    `massieu.solve.Status`.
    """

    state: Float[Tensor, "*batch_query_event"]
    energy: Float[Tensor, "*batch_query"]
    residual: Float[Tensor, "*batch_query"]
    steps: Int[Tensor, "*batch_query"]
    status: Int[Tensor, "*batch_query"]

    __repr__ = fields_repr
    _repr_html_ = fields_html


class Energy(Value):
    """A function of a state that its own `step` never raises. See the module's docstring for the contract.

    Every method raises a ValueError at a state of another shape than the energy's or on another device, and a TypeError at
    one that is not floating-point.

    Example:
        >>> import torch
        >>> from massieu.energy import HopfieldEnergy
        >>> energy = HopfieldEnergy.create(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), scale=8.0)
        >>> state = torch.tensor([0.8, 0.3])
        >>> bool(energy(energy.step(state)) < energy(state))
        True
    """

    _family = "energies"

    # What an author writes.

    @abstractmethod
    def _energy(self, state: Tensor) -> Tensor:
        """E(state), shape (*batch, *query), at least float32."""

    @abstractmethod
    def _step(self, state: Tensor) -> Tensor:
        """The descent map."""

    @property
    def _event_dims(self) -> int:
        """Number of dimensions of one state."""
        return 1

    @property
    def _dampings(self) -> str:
        """The dampings with which E never rises, one of `_DAMPINGS`: (0, 2) where E is quadratic but for a concave part."""
        return "(0, 1]"

    # What everybody calls.

    @final
    def __call__(self, state: Float[Tensor, "*batch_query_event"]) -> Float[Tensor, "*batch_query"]:
        """E(state), in nats/scale and at least float32; +inf outside the potential's domain."""
        return self._energy(self._checked_state(state))

    @final
    def step(
        self, state: Float[Tensor, "*batch_query_event"], *, damping: float = 1.0
    ) -> Float[Tensor, "*batch_query_event"]:
        """state + damping·(T(state) − state), T the descent map. The energy never rises.

        `damping` lies in (0, 1]; in (0, 2) where the reference is quadratic (B5.4), as a Gaussian is; it is 1 for two-valued
        units. Raises a ValueError where it lies outside.
        """
        self._check_damping(damping)
        target = self._step(self._checked_state(state))
        # An undamped step is returned as it is: state + (target − state) would add rounding.
        if damping == 1:
            return target
        return state + damping * (target - state)

    @final
    def force(self, state: Float[Tensor, "*batch_query_event"]) -> Float[Tensor, "*batch_query_event"]:
        """−∇E(state)."""
        return self._force(promoted(self._checked_state(state)))

    @final
    def hessian(self, state: Float[Tensor, "*batch_query event"]) -> Float[Tensor, "*batch_query event event"]:
        """∇²E(state): its eigenvalues are positive at a strict local minimum, one is negative at a saddle."""
        return self._hessian(promoted(self._checked_state(state)))

    @final
    def descend(self, state: Float[Tensor, "*batch_query_event"], *, steps: int, damping: float = 1.0) -> DescentResult:
        """The states and energies along `steps` steps, the start included. Differentiable through all of them."""
        self._check_damping(damping)
        whole_number("steps", steps, least=0)
        states = [self._widened(state)]
        for _ in range(steps):
            states.append(self.step(states[-1], damping=damping))
        path = torch.stack(states)
        return DescentResult(path, torch.stack([self._energy(point) for point in states]))

    @final
    def retrieve(
        self,
        state: Float[Tensor, "*batch_query_event"],
        *,
        steps: int | None = None,
        tol: float | None = None,
        damping: float = 1.0,
        max_steps: int = 1000,
        throw: bool = True,
    ) -> RetrievalResult:
        """The state after `steps` steps, or, without a number of steps, where the descent ends.

        After a fixed number of steps gradients are those of the steps. At the end of the descent they are those of the fixed
        point, by the implicit function theorem, at the memory of one step; the query's is zero, since where a descent
        ends does not depend on where in the basin it began (B12). An item stops on its own, whatever its batch mates do.

        Args:
            tol: Stop at ‖T(x) − x‖ ≤ tol·(1 + ‖x‖); by default 2e-6, in float64 1e-10. Not together with `steps`.
            max_steps: Where a descent to the end gives up.
            throw: Raise if a descent has not ended. If False, see `status` and `residual` of each item. In compiled code,
                where nothing can be raised, such items are NaN; a number of steps never raises.

        Raises:
            ValueError: `steps` and `tol` are both given; one of them is negative; `damping` is outside its interval.
            ConvergenceError: a descent has not ended, with its residual and what to try.
        """
        self._check_damping(damping)
        if steps is not None and tol is not None:
            raise ValueError("retrieve takes a number of steps or a tolerance, not both")
        if tol is not None:
            number("tol", tol, above=0)
        start = self._widened(state)
        if steps is None:
            # Only unaccelerated steps are known to descend.
            solution = fixed_point(
                lambda point, energy: energy.step(point),
                start,
                (self,),
                method=Picard(damping=damping),
                item_dims=self._event_dims,
                max_steps=max_steps,
                rtol=tol,
                atol=tol,
                throw=throw,
            )
            energy = self._energy(solution.value)
            return RetrievalResult(solution.value, energy, solution.residual, solution.steps, solution.status)
        whole_number("steps", steps, least=0)
        end = start
        for _ in range(steps):
            end = self.step(end, damping=damping)
        # The same test of convergence as the solver's, which reports but does not stop these steps.
        with torch.no_grad():
            residual = self._size(self._step(end) - end)
            settled = residual <= default_tolerance(end.dtype).relative * (1 + self._size(end))
            finite = residual.isfinite() & self._size(end).isfinite()
            status = torch.where(settled, int(Status.CONVERGED), int(Status.MAX_STEPS))
            status = torch.where(finite, status, int(Status.NOT_FINITE))
        warn_unconverged(status, residual, f"{type(self).__name__}.retrieve", only=Status.NOT_FINITE)
        return RetrievalResult(end, self._energy(end), residual, torch.full_like(status, steps), status)

    # What follows from the energy; a closed form may replace it.

    def _force(self, state: Tensor) -> Tensor:
        return -torch.func.grad(lambda point: self._energy(point).sum())(state)

    def _hessian(self, state: Tensor) -> Tensor:
        return -jacobian(self._force, state, self._event_dims)

    # Helpers for authors.

    def _size(self, state: Tensor) -> Tensor:
        """The Euclidean norm of each item."""
        return torch.linalg.vector_norm(state, dim=tuple(range(-self._event_dims, 0)))

    def _widened(self, state: Tensor) -> Tensor:
        """The state in the dtype that a step returns."""
        return self._checked_state(state).to(promoted_dtype(state, *self._leaves()))

    def _checked_state(self, state: Tensor) -> Tensor:
        """The state as it is; or an error if it is not floating-point or on another device."""
        self._check_device(state=floating("state", state))
        return state

    def _check_damping(self, damping: float) -> None:
        if not _DAMPINGS[self._dampings](number("damping", damping)):
            raise ValueError(f"damping must lie in {self._dampings} for this {type(self).__name__}, got {damping}")


def promoted(tensor: Tensor) -> Tensor:
    """The tensor in at least float32."""
    return tensor.to(promoted_dtype(tensor))


def times(
    vectors: Float[Tensor, "*batch_query n"], matrix: Float[Tensor, "*batch n m"]
) -> Float[Tensor, "*batch_query m"]:
    """Each query's vector times the matrix of its batch item."""
    # All query dimensions become one, so that each batch item is one product of matrices: (*batch, queries, n).
    flat = vectors.reshape(*matrix.shape[:-2], -1, matrix.shape[-2])
    return (flat @ matrix).reshape(*vectors.shape[:-1], matrix.shape[-1])
