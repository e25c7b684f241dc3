"""The parts of a conformance suite: named laws, the checks that they become for one case, and the comparison of numbers.

A suite is a table of `Law`s and a case class; `checks_of` turns them into checks, for a loop or for pytest's parameters.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from functools import cache
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from massieu.foundation.arguments import instance

EXACT = 1e-9
"""Relative tolerance, in float64, between two exact computations of one number."""


def no_values() -> AbstractContextManager[object]:
    """A context in which tensors have shapes and devices but no values: reading one, or mixing two devices, is an error."""
    return FakeTensorMode(allow_non_fake_inputs=True)


CaseT = TypeVar("CaseT")
SubjectT = TypeVar("SubjectT")


def _applies(case: object) -> None:
    """No reason to leave a law out: it applies to every case."""


@dataclass(frozen=True)
class Law(Generic[CaseT, SubjectT]):
    """A named law of a contract.

    `holds` raises an AssertionError if the subject breaks the law. `missing` returns None if the law applies to a case, and
    otherwise the reason why it does not. It is called while tests are collected, so it must be cheap.
    """

    name: str
    holds: Callable[[SubjectT], object]
    missing: Callable[[CaseT], str | None] = _applies


class Checks(Collection[tuple[str, Callable[[], None]]]):
    """The checks of one case: pairs of a name and a function without arguments that raises AssertionError.

    `left_out` names the laws that do not apply to the case, each with the reason. `checks["mean"]()` runs one check.
    Errors that the object itself raises pass through.
    """

    def __init__(self, checks: dict[str, Callable[[], None]], left_out: dict[str, str]) -> None:
        self._checks = checks
        self.left_out = left_out

    def __iter__(self) -> Iterator[tuple[str, Callable[[], None]]]:
        return iter(self._checks.items())

    def __len__(self) -> int:
        return len(self._checks)

    def __contains__(self, name: object) -> bool:
        return name in self._checks

    def __getitem__(self, name: str) -> Callable[[], None]:
        return self._checks[name]


def checks_of(case: CaseT, subject_of: Callable[[CaseT], SubjectT], laws: Iterable[Law[CaseT, SubjectT]]) -> Checks:
    """The laws as checks of `case`. The first check that runs builds the subject, which all share."""

    @cache
    def subject() -> SubjectT:
        return subject_of(case)

    def check_of(law: Law[CaseT, SubjectT]) -> Callable[[], None]:
        def check() -> None:  # pytest's id of a row is then "mean-check"
            law.holds(subject())

        return check

    checks = {}
    left_out = {}
    for law in laws:
        reason = law.missing(case)
        if reason is None:
            checks[law.name] = check_of(law)
        else:
            left_out[law.name] = reason
    return Checks(checks, left_out)


def check_case(case: object, kind: type, subject: type) -> None:
    """Raise a TypeError unless `case` is of this kind and its first field is of the type `subject`."""
    instance("case", case, kind, f"{_with_article(kind)}, which holds what is checked")
    name = next(entry.name for entry in fields(kind) if not entry.kw_only)
    instance(name, getattr(case, name), subject, _with_article(subject))


def _with_article(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'AEIO' else 'a'} {kind.__name__}"


def agree(law: str, points: Tensor, actual: Tensor, expected: Tensor, tolerance: Tensor | float) -> None:
    """Raise an AssertionError that names the worst entry unless the numbers agree within the tolerance.

    `points` (…, event) and the numbers share their leading (batch and query) dimensions.
    """
    if actual.shape != expected.shape:
        raise AssertionError(f"{law}: got shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    actual = actual.detach().double()
    expected = expected.detach().double()
    error = (actual - expected).abs()
    # NaN is an error, equal infinities are not: their difference is NaN.
    disagrees = ~(error <= tolerance) & (actual != expected)
    if not bool(disagrees.any()):
        return
    excess = torch.where(disagrees, (error / tolerance).nan_to_num(nan=torch.inf), -1.0)
    index = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
    allowed = torch.as_tensor(tolerance, dtype=error.dtype, device=error.device).expand_as(error)[index]
    point = points.detach()[index[: points.ndim - 1]]
    raise AssertionError(
        f"{law}: broken at {point.tolist()} (entry {index}): got {actual[index]:.12g}, "
        f"expected {expected[index]:.12g}, tolerance {allowed:.2g}"
    )


def at_most(law: str, points: Tensor, actual: Tensor, bound: Tensor, tolerance: Tensor | float) -> None:
    """As `agree`, for the law actual ≤ bound."""
    agree(law, points, actual, torch.minimum(actual, bound.expand_as(actual)), tolerance)


def expand(scalar: Tensor, like: Tensor) -> Tensor:
    """A tensor of one number per query, with singleton dimensions appended up to the number that `like` has."""
    return scalar.reshape((*scalar.shape, *[1] * (like.ndim - scalar.ndim)))
