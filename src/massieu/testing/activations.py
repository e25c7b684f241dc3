"""The laws of activations: `activation_checks`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.energy.activations import Activation
from massieu.measures import MissingFormError
from massieu.testing.checks import EXACT, Checks, Law, check_case
from massieu.testing.everywhere import (
    EVERYWHERE,
    SuiteCase,
    Trial,
    check_not_a_number,
    checks_with_exemptions,
    slope,
    without,
)

_SCALES = (0.0, 1e-4, 1.0, 15.0)
_BEYOND = (1.0, 1e2, 1e4, 1e6)


@dataclass(frozen=True, eq=False)
class ActivationCase(SuiteCase):
    """An activation, and points to check it at.

    Attributes:
        activation: ∇L.
        points: At least two queries, of ordinary size.
        lagrangian: Oracle: L of points (*batch, query, d).
        steepest: Points at which the Lipschitz constant is attained, if the activation promises that it is.
        batch: Number of leading dimensions that the activation's tensors have too.
        exempt, compile_backend: Laws that are not promised, each with the reason; the backend of "compiled".

    Example:
        >>> import torch
        >>> from massieu.energy.activations import Tanh
        >>> from massieu.testing import ActivationCase, activation_checks
        >>> case = ActivationCase(Tanh.create(), torch.eye(3), lambda x: x.cosh().log().sum(-1))
        >>> activation_checks(case)["lagrangian"]()
    """

    activation: Activation
    points: Float[Tensor, "*batch_query d"]
    lagrangian: Callable[[Tensor], Any] | None = None
    steepest: Float[Tensor, "*batch_query d"] | None = None
    batch: int = 0


def activation_checks(case: ActivationCase) -> Checks:
    """Named checks of an activation: it is a gradient ∇L of a convex L, with the right conjugate.

    * lagrangian: L against the oracle; gradient: the map is ∇L by finite differences and by automatic ones;
    * convex: the Jacobian is symmetric and positive semi-definite, L lies below its chords;
    * conjugate: L(x) + L*(y) ≥ x·y, with equality at y = ∇L(x); L* is infinite where the supremum is;
    * range: numbers are finite at 0 and far away, and L* is finite at the map's values;
    * lipschitz: no Jacobian's norm exceeds the constant; attained: it is reached at `steepest`;
    * quadratic: the map is affine if and only if it says so;
    * and structure, one by one, vmap, derivatives, precision, half precision, no query, meta, not a number, compiled.

    Example:
        >>> import torch
        >>> from massieu.energy.activations import Tanh
        >>> from massieu.testing import ActivationCase, activation_checks
        >>> case = ActivationCase(Tanh.create(), torch.eye(3), steepest=torch.zeros(1, 3))
        >>> for name, check in activation_checks(case):
        ...     check()
    """
    check_case(case, ActivationCase, Activation)
    return checks_with_exemptions(case, _trial, _LAWS)


def _trial(case: ActivationCase) -> Trial[ActivationCase]:
    functions = {
        "the map": lambda activation, x: activation(x),
        "lagrangian": lambda activation, x: activation.lagrangian(x),
        "conjugate": lambda activation, x: activation.conjugate(0.9 * activation(x)),
    }
    if "conjugate" in case.exempt:
        del functions["conjugate"]
    return Trial(case, case.activation.to(torch.float64), case.points.double(), functions, 1, case.batch)


def _lagrangian(trial: Trial[ActivationCase]) -> None:
    trial = trial.scaled(_SCALES)
    assert trial.case.lagrangian is not None
    oracle = trial.case.lagrangian(trial.points)
    trial.same("lagrangian = oracle", trial.value.lagrangian(trial.points), oracle)


def _gradient(trial: Trial[ActivationCase]) -> None:
    activation = trial.value
    points = trial.points
    direction = trial.drawn()
    along = (activation(points) * direction).sum(-1)
    difference = slope(lambda t: activation.lagrangian(points + t * direction))
    trial.same("gradient: the map = finite difference of the Lagrangian", along, difference, 1e-7)
    leaf = points.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(activation.lagrangian(leaf).sum(), leaf)
    trial.same("gradient: the map = ∇L", activation(points), gradient)


def _jacobian(activation: Activation, points: Tensor) -> Tensor:
    leaf = points.clone().requires_grad_()
    rows = [torch.autograd.grad(part.sum(), leaf, retain_graph=True)[0] for part in activation(leaf).unbind(-1)]
    return torch.stack(rows, -2)


def _convex(trial: Trial[ActivationCase]) -> None:
    trial = trial.scaled(_SCALES[1:])
    activation = trial.value
    points = trial.points
    jacobian = _jacobian(activation, points)
    trial.same("convex: the Jacobian is symmetric", jacobian, jacobian.mT)
    least = torch.linalg.eigvalsh(jacobian)[..., 0]
    size = jacobian.abs().amax((-2, -1))
    trial.at_most("convex: the Jacobian is positive semi-definite", -least, 0 * least, EXACT * (1 + size))
    other = points.roll(1, trial.query)
    chord = (activation.lagrangian(points) + activation.lagrangian(other)) / 2
    middle = activation.lagrangian((points + other) / 2)
    trial.at_most("convex: L lies below its chords", middle, chord, EXACT * (1 + chord.abs()))


def _conjugate(trial: Trial[ActivationCase]) -> None:
    activation = trial.value
    points = trial.points
    image = activation(points)
    expected = (points * image).sum(-1) - activation.lagrangian(points)
    trial.same("conjugate: L(x) + L*(y) = x·y at y = ∇L(x)", activation.conjugate(image), expected, 1e-7)
    for y in (image, 0.5 * (image + image.roll(1, trial.query)), 3 * image, 10 + trial.drawn().abs()):
        value = activation.conjugate(y)
        for scale in _BEYOND:
            # Far out towards y − ∇L(x): if y is outside the range of the map, the supremum over x is infinite.
            for x in (scale * points, scale * (y - activation(scale * y)), scale * (y - image)):
                below = (x * y).sum(-1) - activation.lagrangian(x)
                law = "conjugate: L*(y) ≥ x·y − L(x)"
                trial.at_most(law, below, value, 1e-7 * (1 + below.abs() + (x * y).abs().sum(-1)))


def _range(trial: Trial[ActivationCase]) -> None:
    trial = trial.scaled((*_SCALES, 1e4))
    image = trial.value(trial.points)
    numbers = {"the map": image, "L": trial.value.lagrangian(trial.points)}
    if "conjugate" not in trial.case.exempt:
        numbers["L* of the map"] = trial.value.conjugate(image)
    for name, number in numbers.items():
        if not bool(number.isfinite().all()):
            raise AssertionError(f"range: {name} is not finite at {trial.points[~number.isfinite()][0].tolist()}")


def _norm_and_bound(trial: Trial[ActivationCase], points: Tensor) -> tuple[Tensor, Tensor]:
    """The spectral norm of the Jacobian at each point, and the Lipschitz constant in the same shape."""
    norm = torch.linalg.matrix_norm(_jacobian(trial.value, points), ord=2)
    bound = trial.value.lipschitz.to(norm.dtype)
    return norm, bound.reshape(*bound.shape, *[1] * (norm.ndim - bound.ndim)).expand_as(norm)


def _lipschitz(trial: Trial[ActivationCase]) -> None:
    trial = trial.scaled(_SCALES[1:])
    norm, bound = _norm_and_bound(trial, trial.points)
    trial.at_most("lipschitz: ‖∇²L‖ ≤ the constant", norm, bound, EXACT * (1 + norm))


def _attained(trial: Trial[ActivationCase]) -> None:
    assert trial.case.steepest is not None
    trial = trial.at(trial.case.steepest.double())
    norm, bound = _norm_and_bound(trial, trial.points)
    trial.agree("attained: ‖∇²L‖ = the Lipschitz constant", norm, bound, 1e-6 * bound)


def _quadratic(trial: Trial[ActivationCase]) -> None:
    activation = trial.value
    points = trial.points
    origin = activation(0 * points)
    image = activation(points)
    errors = [(activation(t * points) - origin - t * (image - origin)).abs().amax() for t in (-1, 2)]
    if bool(max(errors) < EXACT) != activation.quadratic:
        raise AssertionError(
            f"quadratic is {activation.quadratic}; the map is off an affine one by {float(max(errors)):.2g}"
        )


def _not_a_number(trial: Trial[ActivationCase]) -> None:
    # NaN is not in the map's range, so that its conjugate may be +inf, as it is outside.
    functions = {name: function for name, function in trial.functions.items() if name != "conjugate"}
    check_not_a_number(replace(trial, functions=functions))


def _missing_lipschitz(case: ActivationCase) -> str | None:
    try:
        return None if bool(case.activation.lipschitz.isfinite().all()) else "the constant is infinite"
    except MissingFormError as error:
        return str(error)


_LAWS: tuple[Law[Any, Any], ...] = (
    Law("lagrangian", _lagrangian, without("lagrangian")),
    Law("gradient", _gradient),
    Law("convex", _convex),
    Law("conjugate", _conjugate),
    Law("range", _range),
    Law("lipschitz", _lipschitz, _missing_lipschitz),
    Law("attained", _attained, without("steepest")),
    Law("quadratic", _quadratic),
    *[law for name, law in EVERYWHERE.items() if name != "not a number"],
    Law("not a number", _not_a_number),
)
