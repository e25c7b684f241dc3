"""The laws of operators on populations: `operator_checks`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.measures import Gaussian, MissingFormError
from massieu.population import Operator
from massieu.population.operator import moments, moments_after
from massieu.testing.checks import Checks, Law, check_case
from massieu.testing.everywhere import EVERYWHERE, SuiteCase, Trial, checks_with_exemptions, without

_MANY = 2000
"""Number of particles that stand for infinitely many."""
_ERRORS = 8
"""Standard errors that are allowed."""


@dataclass(frozen=True, eq=False)
class OperatorCase(SuiteCase):
    """An operator, and populations to check it at.

    Attributes:
        operator: If its tensors have a batch, the populations' batch begins with it.
        particles: At least two populations, of more particles than dimensions.
        oracle: The particles after the operator for one population (n, d), by an independent computation.
        law: A Gaussian law for "law" and "many particles".
        kept: Numbers (*batch, …) of a population (*batch, n, d) that the operator promises to keep.
        prepare: Called before each call, for example to seed the generator of an operator that draws.
        exempt, compile_backend: Laws that are not promised, each with the reason; the backend of "compiled".

    Example:
        >>> import torch
        >>> from massieu.population import FeedForward
        >>> from massieu.testing import OperatorCase, operator_checks
        >>> case = OperatorCase(FeedForward.create(torch.relu), torch.eye(3).expand(2, 3, 3), oracle=lambda x: 2 * x)
        >>> operator_checks(case)["particles"]()
    """

    operator: Operator
    particles: Float[Tensor, "*batch n d"]
    oracle: Callable[[Tensor], Any] | None = None
    law: Gaussian | None = None
    kept: Callable[[Tensor], Tensor] | None = None
    prepare: Callable[[], object] | None = None


def operator_checks(case: OperatorCase) -> Checks:
    """Named checks of an operator: the laws of a map of populations.

    * particles: the moved particles against the oracle; kept: the operator keeps what it promises to keep;
    * permutation: particles in another order are moved alike; copies: so are they if each is there twice;
    * law: the Gaussian law after the operator has the moments after its affine map; many particles: draws from the law
      have these moments after the operator, within eight standard errors;
    * shared: an operator that needs the whole population refuses to share it; refusals: so it does other shapes and whole
      numbers;
    * and structure, one by one, vmap, derivatives, precision, half precision, no query, meta, not a number, compiled,
      where one query is a population.

    Example:
        >>> import torch
        >>> from massieu.population import TraceRenormalisation
        >>> from massieu.testing import OperatorCase, operator_checks
        >>> checks = operator_checks(OperatorCase(TraceRenormalisation.create(2.0), torch.eye(3).expand(2, 3, 3)))
        >>> checks["permutation"]()
        >>> checks.left_out["kept"]
        'no `kept` is given'
    """
    check_case(case, OperatorCase, Operator)
    return checks_with_exemptions(case, _trial, _LAWS)


def _trial(case: OperatorCase) -> Trial[OperatorCase]:
    def call(operator: Operator, particles: Tensor) -> Tensor:
        if case.prepare is not None:
            case.prepare()
        return operator(particles)

    return Trial(case, case.operator.to(torch.float64), case.particles.double(), {"call": call}, 2)


def _moved(trial: Trial[OperatorCase], particles: Tensor) -> Tensor:
    return trial.functions["call"](trial.value, particles)


def _particles(trial: Trial[OperatorCase]) -> None:
    assert trial.case.oracle is not None
    points = trial.points
    clouds = [torch.as_tensor(trial.case.oracle(one)) for one in points.reshape(-1, *points.shape[-2:])]
    trial.same("particles = oracle", _moved(trial, points), torch.stack(clouds).reshape(points.shape))


def _kept(trial: Trial[OperatorCase]) -> None:
    kept = trial.case.kept
    assert kept is not None
    trial.same("kept: after = before", kept(_moved(trial, trial.points)), kept(trial.points), 1e-7)


def _permutation(trial: Trial[OperatorCase]) -> None:
    points = trial.points
    order = torch.randperm(points.shape[-2], generator=torch.Generator().manual_seed(0)).to(points.device)
    expected = _moved(trial, points)[..., order, :]
    trial.same("permutation: particles in another order", _moved(trial, points[..., order, :]), expected)


def _copies(trial: Trial[OperatorCase]) -> None:
    once = _moved(trial, trial.points)
    twice = _moved(trial, torch.cat([trial.points, trial.points], -2))
    trial.same("copies: every particle twice", twice, torch.cat([once, once], -2), 1e-7)


def _law(trial: Trial[OperatorCase]) -> None:
    law = trial.case.law
    assert law is not None
    before = moments(law.to(torch.float64))
    after = moments(trial.value.gaussian(Gaussian.create(*before)))
    after_map = moments_after(trial.value.affine(before), before)
    for name, actual, expected in zip(before._fields, after, after_map, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"law: {name}: {m}")


def _many(trial: Trial[OperatorCase]) -> None:
    law = trial.case.law
    assert law is not None
    law = law.to(torch.float64)
    device = law.location.device
    generator = torch.Generator(device).manual_seed(0)
    drawn = law.sample(torch.zeros_like(law.location), (_MANY,), generator=generator).movedim(0, -2)
    after = _moved(trial, drawn)
    expected = moments(trial.value.gaussian(law))
    centred = after - after.mean(-2, keepdim=True)
    size = expected.covariance.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    errors = _ERRORS / _MANY**0.5
    mean = (after.mean(-2) - expected.mean).abs() / size[..., 0].sqrt()
    covariance = (centred.mT @ centred / _MANY - expected.covariance).abs() / size
    for name, error in (("mean", mean), ("covariance", covariance)):
        if not bool((error <= errors).all()):
            raise AssertionError(
                f"many particles: {name} of {_MANY} draws is off by {float(error.max()):.2g}, more than {errors:.2g}"
            )


def _shared(trial: Trial[OperatorCase]) -> None:
    try:
        trial.value.check_shared()
        refused = False
    except ValueError:
        refused = True
    if trial.value.needs_all and not refused:
        raise AssertionError("shared: it needs the whole population, and check_shared does not say so")


def _refusals(trial: Trial[OperatorCase]) -> None:
    points = trial.points
    width = trial.value._width
    wrong = [("whole numbers", points.long(), TypeError), ("one dimension", points.reshape(-1), ValueError)]
    if width is not None:
        wrong.append(("another width", torch.cat([points, points], -1), ValueError))
    for name, argument, error in wrong:
        try:
            trial.value(argument)
        except error:
            continue
        raise AssertionError(f"refusals: {name} raised no {error.__name__}")


def _missing_law(case: OperatorCase) -> str | None:
    if case.law is None:
        return "no `law` is given"
    try:
        case.operator.gaussian(case.law)
    except MissingFormError as error:
        return str(error)
    return None


def _missing_affine(case: OperatorCase) -> str | None:
    if reason := _missing_law(case):
        return reason
    assert case.law is not None
    try:
        case.operator.affine(moments(case.law))
    except MissingFormError as error:
        return str(error)
    return None


_LAWS: tuple[Law[Any, Any], ...] = (
    Law("particles", _particles, without("oracle")),
    Law("kept", _kept, without("kept")),
    Law("permutation", _permutation),
    Law("copies", _copies),
    Law("law", _law, _missing_affine),
    Law("many particles", _many, _missing_law),
    Law("shared", _shared),
    Law("refusals", _refusals),
    *EVERYWHERE.values(),
)
