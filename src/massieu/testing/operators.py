"""The laws of operators on populations: `operator_checks`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.measures import Gaussian, MissingFormError
from massieu.population import Operator
from massieu.population.operator import moments, pushed
from massieu.testing.checks import Checks, Law
from massieu.testing.everywhere import EVERYWHERE, Subject, checks_with_exemptions, without

_MANY = 2000
_ERRORS = 8


@dataclass(frozen=True)
class OperatorCase:
    """An operator, and populations to check it at.

    Attributes:
        operator: Of a batch of its own, if it has one, that populations begin with.
        particles: At least two populations, of more particles than dimensions.
        oracle: Where one population (n, d) goes, found in another way.
        law: A Gaussian law for "law" and "many particles".
        kept: What the operator promises to keep of a population (*batch, n, d), as numbers (*batch, …).
        prepare: Run before each call, such as to seed the generator of an operator that draws.
        exempt: Laws that the operator does not promise, by name, each with the reason.
        compile_backend: Of `torch.compile`, such as "aot_eager" (seconds); None leaves "compiled" out.
    """

    operator: Operator
    particles: Float[Tensor, "*batch n d"]
    oracle: Callable[[Tensor], Any] | None = None
    law: Gaussian | None = None
    kept: Callable[[Tensor], Tensor] | None = None
    prepare: Callable[[], object] | None = None
    exempt: Mapping[str, str] = field(default_factory=dict)
    compile_backend: str | None = None


def operator_checks(case: OperatorCase) -> Checks:
    """The laws of a map of populations, as named checks.

    * particles: where they go, against the oracle; kept: what the operator promises to keep;
    * permutation: particles in another order go to the same places; copies: so do they where each is there twice;
    * law: what becomes of a Gaussian law is what the affine map makes of its moments; many particles: and what becomes of
      draws from it, within eight standard errors;
    * shared: an operator that needs the whole population refuses to share it; refusals: other shapes and whole numbers;
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
    return checks_with_exemptions(case, _subject, _LAWS)


def _subject(case: OperatorCase) -> Subject[OperatorCase]:
    def call(operator: Operator, particles: Tensor) -> Tensor:
        if case.prepare is not None:
            case.prepare()
        return operator(particles)

    return Subject(case, case.operator.to(torch.float64), case.particles.double(), {"call": call}, 2)


def _moved(subject: Subject[OperatorCase], particles: Tensor) -> Tensor:
    return subject.functions["call"](subject.value, particles)


def _particles(subject: Subject[OperatorCase]) -> None:
    assert subject.case.oracle is not None
    points = subject.points
    clouds = [torch.as_tensor(subject.case.oracle(one)) for one in points.reshape(-1, *points.shape[-2:])]
    subject.same("particles = oracle", _moved(subject, points), torch.stack(clouds).reshape(points.shape))


def _kept(subject: Subject[OperatorCase]) -> None:
    kept = subject.case.kept
    assert kept is not None
    subject.same("kept: after = before", kept(_moved(subject, subject.points)), kept(subject.points), 1e-7)


def _permutation(subject: Subject[OperatorCase]) -> None:
    points = subject.points
    order = torch.randperm(points.shape[-2], generator=torch.Generator().manual_seed(0)).to(points.device)
    expected = _moved(subject, points)[..., order, :]
    subject.same("permutation: particles in another order", _moved(subject, points[..., order, :]), expected)


def _copies(subject: Subject[OperatorCase]) -> None:
    once = _moved(subject, subject.points)
    twice = _moved(subject, torch.cat([subject.points, subject.points], -2))
    subject.same("copies: every particle twice", twice, torch.cat([once, once], -2), 1e-7)


def _law(subject: Subject[OperatorCase]) -> None:
    law = subject.case.law
    assert law is not None
    before = moments(law.to(torch.float64))
    found = moments(subject.value.gaussian(Gaussian.create(*before)))
    for name, actual, expected in zip(before._fields, found, pushed(subject.value.affine(before), before), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"law: {name}: {m}")


def _many(subject: Subject[OperatorCase]) -> None:
    law = subject.case.law
    assert law is not None
    law = law.to(torch.float64)
    device = law.location.device
    generator = torch.Generator(device).manual_seed(0)
    drawn = law.sample(torch.zeros_like(law.location), (_MANY,), generator=generator).movedim(0, -2)
    after, expected = _moved(subject, drawn), moments(subject.value.gaussian(law))
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


def _shared(subject: Subject[OperatorCase]) -> None:
    try:
        subject.value.check_shared()
        refused = False
    except ValueError:
        refused = True
    if subject.value.needs_all and not refused:
        raise AssertionError("shared: it needs the whole population, and check_shared does not say so")


def _refusals(subject: Subject[OperatorCase]) -> None:
    points, width = subject.points, subject.value._width
    wrong = [("whole numbers", points.long(), TypeError), ("one dimension", points.reshape(-1), ValueError)]
    if width is not None:
        wrong.append(("another width", torch.cat([points, points], -1), ValueError))
    for name, given, error in wrong:
        try:
            subject.value(given)
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
