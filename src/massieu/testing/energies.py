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
"""Relative rounding of an energy in float64."""
_ASCENT = 8
"""Steps towards states at which a step raises the energy most."""
_INSIDE = {"(0, 2)": (0.3, 1.0, 1.9), "(0, 1]": (0.3, 1.0), "{1}": (1.0,)}
_OUTSIDE = {"(0, 2)": (0.0, 2.0), "(0, 1]": (0.0, 1.1), "{1}": (0.5, 1.5)}


@dataclass(frozen=True, eq=False)
class EnergyCase(SuiteCase):
    """An energy, and states to check it at.

    Attributes:
        energy: E and its step.
        states: At least two queries, of ordinary size.
        oracle: E of states (*batch, query, *event), by an independent computation.
        scales: Factors of the states for the laws "energy" and "descent"; the products must be in the domain.
        batch: Number of leading dimensions that the energy's tensors have too.
        exempt, compile_backend: Laws that are not promised, each with the reason, such as "force", "derivatives", "fixed
            points" and "worst" for discrete states; the backend of "compiled".

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

    * energy: E against the oracle; force: −∇E by finite differences within the range of a step, and its derivative is
      −`hessian`, which is symmetric;
    * descent: no step of an allowed damping raises E, from the states at every scale; other dampings are refused;
    * worst: nor does one from states that were moved to where a step raises E most;
    * fixed points: a descent ends at a fixed point of the step, no higher than it began, where E is stationary within the
      range of a step;
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
    # If E is finite only on the range of a step, it is evaluated there.
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
    oracle = trial.case.oracle
    trial = trial.scaled(trial.case.scales)
    assert oracle is not None
    trial.same("energy = oracle", trial.value(trial.points), oracle(trial.points))


def _force(trial: Trial[EnergyCase]) -> None:
    energy = trial.value
    direction = trial.drawn()
    dims = tuple(range(-trial.item, 0))
    # Along a line, and along its image under a step, on which E is finite in any case.
    for path in (lambda t: trial.points + t * direction, lambda t: energy.step(trial.points + t * direction)):
        here = path(0.0)
        speed = slope(path)
        along = (energy.force(here) * speed).sum(dims)
        difference = slope(lambda t, path=path: -energy(path(t)))
        inside = difference.isfinite()
        law = "force = −finite difference of the energy"
        trial.same(law, torch.where(inside, along, 0.0), torch.where(inside, difference, 0.0), 1e-7)
    lead = here.shape[: -trial.item]
    size = here.shape[-trial.item :].numel()
    hessian = energy.hessian(here).reshape(*lead, size, size)
    trial.same("force: the Hessian is symmetric", hessian, hessian.mT, 1e-8)
    product = (hessian @ speed.reshape(*lead, size, 1)).reshape(here.shape)
    trial.same("force: its derivative is −Hessian", product, slope(lambda t: -energy.force(path(t))), 1e-6)


def _rise(trial: Trial[EnergyCase], states: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """How much a step raises the energy (−1 where it was infinite), and the rounding of that difference."""
    before = trial.value(states)
    after = trial.value(trial.value.step(states, damping=damping))
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
    energy = trial.value
    dims = tuple(range(-trial.item, 0))
    damping = _INSIDE[energy._dampings][-1]
    state = energy.step(trial.points)
    length = 0.2 * (1e-3 + torch.linalg.vector_norm(state, dim=dims, keepdim=True))
    for _ in range(_ASCENT):
        leaf = state.detach().requires_grad_()
        rise, rounding = _rise(trial, leaf, damping)
        trial.at_most(f"worst: a step of damping {damping} raises E", rise, 0 * rise, rounding)
        (gradient,) = torch.autograd.grad(rise.sum(), leaf)
        size = torch.linalg.vector_norm(gradient, dim=dims, keepdim=True)
        uphill = state + length * gradient / torch.where(size > 0, size, 1.0)
        inside = energy(uphill).isfinite().reshape(*uphill.shape[: -trial.item], *[1] * trial.item)
        state = torch.where(inside, uphill, energy.step(uphill))


def _fixed_points(trial: Trial[EnergyCase]) -> None:
    energy = trial.value
    start = trial.value.step(trial.points)
    retrieval = energy.retrieve(start, max_steps=5000, throw=False)
    ended = retrieval.status == Status.CONVERGED
    if not bool(ended.any()):
        raise AssertionError(
            f"fixed points: no descent ended; the residuals are {retrieval.residual.flatten().tolist()}"
        )
    rise = retrieval.energy - energy(start)
    trial.at_most("fixed points: a descent ends no higher", rise, 0 * rise, _ROUNDING * (1 + retrieval.energy.abs()))
    trial.same("fixed points: energy of where it ended", retrieval.energy, energy(retrieval.state))
    leaf = retrieval.state.detach().requires_grad_()
    after = energy.step(leaf)
    residual = torch.linalg.vector_norm((after - leaf).detach().flatten(-trial.item), dim=-1)
    trial.same("fixed points: residual of where it ended", retrieval.residual, residual)
    (along,) = torch.autograd.grad((after * energy.force(retrieval.state).detach()).sum(), leaf)
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
