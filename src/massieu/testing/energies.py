"""The laws of energies: `energy_checks`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.energy import Energy
from massieu.solve import Status
from massieu.testing.checks import Checks, Law, check_case
from massieu.testing.everywhere import EVERYWHERE, SuiteCase, Trial, checks_with_exemptions, slope, without

_ROUNDING = 1e-11
_ASCENT = 8
_INSIDE = {"(0, 2)": (0.3, 1.0, 1.9), "(0, 1]": (0.3, 1.0), "{1}": (1.0,)}
_OUTSIDE = {"(0, 2)": (0.0, 2.0), "(0, 1]": (0.0, 1.1), "{1}": (0.5, 1.5)}


@dataclass(frozen=True, eq=False)
class EnergyCase(SuiteCase):
    """An energy, and states to check it at.

    Attributes:
        energy: E and its step.
        states: At least two queries, of ordinary size.
        oracle: E of states (*batch, query, *event), found in another way.
        scales: What the states are multiplied by, too, where E and its step are tried; the domain must hold them.
        batch: How many leading dimensions are the energy's own.
        exempt, compile_backend: Laws that are not promised, each with the reason, as "force", "derivatives", "fixed points"
            and "worst" are not where states are discrete; what "compiled" compiles with.

    Example:
        >>> import torch
        >>> from massieu.energy import HopfieldEnergy
        >>> from massieu.testing import EnergyCase, energy_checks
        >>> one = HopfieldEnergy.create(torch.ones(1, 2))  # of one pattern: half the squared distance from it
        >>> case = EnergyCase(one, torch.eye(2), lambda states: 0.5 * (states - 1).square().sum(-1))
        >>> energy_checks(case)["energy"]()
    """

    energy: Energy
    states: Float[Tensor, "*batch_query_event"]
    oracle: Callable[[Tensor], Any] | None = None
    scales: Sequence[float] = (1e-4, 1.0, 15.0)
    batch: int = 0


def energy_checks(case: EnergyCase) -> Checks:
    """Named checks of an energy: derivatives, and a step that never raises it.

    * energy: E against the oracle; force: −∇E by finite differences along what a step can reach, and its derivative is
      −`hessian`, which is symmetric;
    * descent: no step raises E, with any damping that is taken, from the states at every scale; others are refused;
    * worst: nor from states that were moved to where a step raises E most;
    * fixed points: a descent ends where a step stays, no higher than it began, and along no step does E change there;
    * and structure, one by one, vmap, derivatives, precision, half precision, no query, meta, not a number, compiled.

    Example:
        >>> import torch
        >>> from massieu.energy import HopfieldEnergy
        >>> from massieu.testing import EnergyCase, energy_checks
        >>> checks = energy_checks(EnergyCase(HopfieldEnergy.create(torch.eye(3)), torch.eye(3) - 0.2))
        >>> checks["descent"]()
        >>> sorted(checks.left_out)
        ['compiled', 'energy']
    """
    check_case(case, EnergyCase, Energy)
    return checks_with_exemptions(case, _trial, _LAWS)


def _trial(case: EnergyCase) -> Trial[EnergyCase]:
    trial = Trial(case, case.energy.to(torch.float64), case.states.double(), {}, case.energy._event_dims, case.batch)
    discrete = "force" in case.exempt
    # Where E is finite on the range of the step alone, it is asked there.
    free = discrete or bool(trial.value(trial.points + 1e-3 * trial.drawn()).isfinite().all())
    functions = {
        "energy": lambda energy, state: energy(state if free else energy.step(state)),
        "step": lambda energy, state: energy.step(state),
        "force": lambda energy, state: energy.force(state if free else energy.step(state)),
    }
    if discrete:
        del functions["force"]
    return replace(trial, functions=functions)


def _energy(trial: Trial[EnergyCase]) -> None:
    oracle, trial = trial.case.oracle, trial.scaled(trial.case.scales)
    assert oracle is not None
    trial.same("energy = oracle", trial.value(trial.points), oracle(trial.points))


def _force(trial: Trial[EnergyCase]) -> None:
    energy, way = trial.value, trial.drawn()
    dims = tuple(range(-trial.item, 0))
    # Along a line, and along what steps make of it: all that there is where E is finite on their range alone.
    for path in (lambda t: trial.points + t * way, lambda t: energy.step(trial.points + t * way)):
        here, speed = path(0.0), slope(path)
        found, difference = (energy.force(here) * speed).sum(dims), slope(lambda t, path=path: -energy(path(t)))
        inside = difference.isfinite()
        law = "force = −finite difference of the energy"
        trial.same(law, torch.where(inside, found, 0.0), torch.where(inside, difference, 0.0), 1e-7)
    lead, size = here.shape[: -trial.item], here.shape[-trial.item :].numel()
    hessian = energy.hessian(here).reshape(*lead, size, size)
    trial.same("force: the Hessian is symmetric", hessian, hessian.mT, 1e-8)
    found = (hessian @ speed.reshape(*lead, size, 1)).reshape(here.shape)
    trial.same("force: its derivative is −Hessian", found, slope(lambda t: -energy.force(path(t))), 1e-6)


def _rise(trial: Trial[EnergyCase], states: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """How much a step raises the energy, which was finite, and the rounding of it."""
    before, after = trial.value(states), trial.value(trial.value.step(states, damping=damping))
    finite = before.isfinite()
    rise = torch.where(finite, after - torch.where(finite, before, 0.0), -1.0)
    return rise, _ROUNDING * (1 + torch.where(finite, before.detach().abs(), 0.0))


def _descent(trial: Trial[EnergyCase]) -> None:
    trial = trial.scaled(trial.case.scales)
    energy = trial.value
    for damping in _INSIDE[energy._dampings]:
        state = trial.points
        for _ in range(3):
            rise, rounding = _rise(trial, state, damping)
            trial.at_most(f"descent: a step of damping {damping} raises E", rise, 0 * rise, rounding)
            state = energy.step(state, damping=damping)
    for damping in _OUTSIDE[energy._dampings]:
        try:
            energy.step(trial.points, damping=damping)
        except ValueError:
            continue
        raise AssertionError(f"descent: damping {damping} lies outside {energy._dampings} and was taken")


def _worst(trial: Trial[EnergyCase]) -> None:
    energy, dims = trial.value, tuple(range(-trial.item, 0))
    damping = _INSIDE[energy._dampings][-1]
    state = energy.step(trial.points)
    length = 0.2 * (1e-3 + torch.linalg.vector_norm(state, dim=dims, keepdim=True))
    for _ in range(_ASCENT):
        leaf = state.detach().requires_grad_()
        rise, rounding = _rise(trial, leaf, damping)
        trial.at_most(f"worst: a step of damping {damping} raises E", rise, 0 * rise, rounding)
        (way,) = torch.autograd.grad(rise.sum(), leaf)
        size = torch.linalg.vector_norm(way, dim=dims, keepdim=True)
        there = state + length * way / torch.where(size > 0, size, 1.0)
        inside = energy(there).isfinite().reshape(*there.shape[: -trial.item], *[1] * trial.item)
        state = torch.where(inside, there, energy.step(there))


def _fixed_points(trial: Trial[EnergyCase]) -> None:
    energy, start = trial.value, trial.value.step(trial.points)
    found = energy.retrieve(start, max_steps=5000, throw=False)
    ended = found.status == Status.CONVERGED
    if not bool(ended.any()):
        raise AssertionError(f"fixed points: no descent ended; the residuals are {found.residual.flatten().tolist()}")
    rise = found.energy - energy(start)
    trial.at_most("fixed points: a descent ends no higher", rise, 0 * rise, _ROUNDING * (1 + found.energy.abs()))
    trial.same("fixed points: energy of where it ended", found.energy, energy(found.state))
    leaf = found.state.detach().requires_grad_()
    after = energy.step(leaf)
    residual = torch.linalg.vector_norm((after - leaf).detach().flatten(-trial.item), dim=-1)
    trial.same("fixed points: residual of where it ended", found.residual, residual)
    (along,) = torch.autograd.grad((after * energy.force(found.state).detach()).sum(), leaf)
    along = torch.where(ended.reshape(*ended.shape, *[1] * trial.item), along, 0.0)
    trial.same("fixed points: E is stationary along what a step can reach", along, 0 * along, 1e-6)


_LAWS: tuple[Law[Any, Any], ...] = (
    Law("energy", _energy, without("oracle")),
    Law("force", _force),
    Law("descent", _descent),
    Law("worst", _worst),
    Law("fixed points", _fixed_points),
    *EVERYWHERE.values(),
)
