"""Rare input: points outside the domain, empty tensors, tensors without values, NaN, lists in place of tensors."""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from massieu.duality import conjugate, natural
from massieu.measures.base import DomainError, Measure
from massieu.measures.hooks import MissingFormError
from massieu.testing.batching import can_be_sliced
from massieu.testing.checks import EXACT, agree, expand, no_values
from massieu.testing.subject import DERIVED, FUNCTIONS, Subject

_OUTSIDE = 1e8
"""A distance along an axis that counts as outside the domain."""
_HALVINGS = 120
"""Halvings of that distance that end at neighbouring numbers."""


def check_domain(subject: Subject) -> None:
    """Finite inside, `DomainError` in the measure's own words outside."""
    measure = subject.measure
    eta = subject.eta
    inside = measure._in_domain(eta)
    assert inside is not None
    if inside.shape != subject.lead or inside.dtype != torch.bool:
        raise AssertionError(
            f"domain: _in_domain is {inside.dtype} of shape {tuple(inside.shape)}, not bool for each eta"
        )
    for points in (eta, subject.far):
        values = measure.log_partition(points)
        if not bool(values.isfinite().all()):
            worst = points[~values.isfinite()][0]
            raise AssertionError(f"domain: A is not finite at eta = {worst.tolist()}, which is said to be inside")
    for distance in (1.0, 1e2, 1e4, 1e8):
        for sign in (1, -1):
            points = eta + sign * distance * subject.direction
            is_inside = measure._in_domain(points)
            assert is_inside is not None
            if not bool(is_inside.all()):
                _must_raise(subject, torch.where(expand(is_inside, points), eta, points))
                _check_boundary(subject)
                return


def _check_boundary(subject: Subject) -> None:
    """A is finite at the last points inside, along each axis; otherwise these points do not belong to the domain."""
    measure = subject.measure
    eta = subject.eta
    for axis in subject.basis():
        for sign in (1, -1):
            inside = eta.new_zeros(subject.lead)
            outside = eta.new_full(subject.lead, _OUTSIDE)
            for _ in range(_HALVINGS):
                middle = (inside + outside) / 2
                is_inside = measure._in_domain(eta + sign * expand(middle, eta) * axis)
                assert is_inside is not None
                inside = torch.where(is_inside, middle, inside)
                outside = torch.where(is_inside, outside, middle)
            points = eta + sign * expand(inside, eta) * axis
            try:
                values = measure.log_partition(points)
            except DomainError as error:
                raise AssertionError(f"domain: A of what is said to be inside raised DomainError: {error}") from error
            if bool((values == torch.inf).any()):
                last = points[values == torch.inf][0]
                raise AssertionError(
                    f"domain: A is infinite at eta = {last.tolist()}, the last that is said to be inside; a boundary "
                    "where it is infinite is no part of the domain"
                )


def _must_raise(subject: Subject, points: Tensor) -> None:
    measure = subject.measure
    for name in DERIVED:
        try:
            getattr(measure, name)(points)
        except DomainError as error:
            if measure._domain() not in str(error):
                raise AssertionError(f"domain: the error does not say {measure._domain()!r}: {error}") from error
            continue
        raise AssertionError(f"domain: {name} outside the domain ({measure._domain()}) did not raise DomainError")


def check_empty(subject: Subject) -> None:
    """Without a query, and for an empty batch of measures, results are empty and of the right shape."""
    measure = subject.measure
    queries = subject.queries
    _check_shapes("no query", measure, subject.eta, subject.eta.narrow(queries, 0, 0), measure)
    if can_be_sliced(measure):
        nothing = pytree.tree_map(lambda leaf: leaf[:0], measure)
        _check_shapes("an empty batch", measure, subject.eta, subject.eta[:0], nothing)


def check_meta(subject: Subject) -> None:
    """On the meta device functions return the same shapes as elsewhere, and create no tensor on another device."""
    measure = pytree.tree_map(lambda leaf: leaf.to("meta"), subject.measure)
    _check_shapes("meta device", subject.measure, subject.eta, subject.eta.to("meta"), measure)


def _check_shapes(law: str, measure: Measure, eta: Tensor, other: Tensor, variant: Measure) -> None:
    """`variant` at `other` returns the shapes of `measure` at `eta`, except for the batch and the queries."""
    lead = eta.ndim - len(measure.event_shape)
    calls: dict[str, Callable[[Measure, Tensor], Tensor]] = {
        **{name: lambda at, x, function=function: function(at, x, x) for name, function in FUNCTIONS.items()},
        "sample": lambda at, x: at.sample(x, 2).movedim(0, -1),
        "log_prob": lambda at, x: at.log_prob(x, x.unsqueeze(0)).movedim(0, -1),
        "natural": natural,
        "conjugate": conjugate,
    }
    for name, call in calls.items():
        at = measure.mean(eta) if name in ("natural", "conjugate") else eta
        try:
            expected = call(measure, at)
        except MissingFormError:
            continue
        try:
            with no_values() if other.is_meta else nullcontext():
                actual = call(variant, other)
        except Exception as error:
            raise AssertionError(f"{law}: {name} raised {type(error).__name__}: {error}") from error
        shape = (*other.shape[:lead], *expected.shape[lead:])
        if tuple(actual.shape) != shape or actual.device != other.device or actual.dtype != expected.dtype:
            raise AssertionError(
                f"{law}: {name} gave {actual.dtype} of shape {tuple(actual.shape)} on {actual.device}, expected "
                f"{expected.dtype} of shape {shape} on {other.device}"
            )


def check_numbers(subject: Subject) -> None:
    """Lists of numbers and NumPy arrays give the same results as tensors."""
    measure = subject.measure
    eta = subject.eta
    for name in DERIVED:
        expected = subject.results[name]
        for kind, argument in (("a list", eta.tolist()), ("an array", eta.numpy(force=True))):
            actual = getattr(measure, name)(argument)
            agree(f"{name} of {kind} = of a tensor", eta, actual, expected, EXACT * (1 + expected.abs()))


def check_nan(subject: Subject) -> None:
    """NaN in one coordinate of one eta makes its results NaN, and leaves those of the other eta as they are.

    A `DomainError` will do as well, since NaN lies in no domain.
    """
    queries = subject.queries
    count = subject.eta.shape[subject.queries]
    moves = subject.fisher(subject.eta).select(queries, 0)[..., -1, -1] > 0
    for dtype in (torch.float64, torch.float32):
        measure = subject.measure.to(dtype)
        eta = subject.eta.to(dtype)
        other = subject.middle.to(dtype)
        spoiled = eta.clone()
        spoiled.select(queries, 0).flatten(queries)[..., -1] = torch.nan
        for name, function in FUNCTIONS.items():
            try:
                result = function(measure, spoiled, other)
                expected = function(measure, eta, other)
            except DomainError:
                continue
            first = result.select(queries, 0)
            rest = result.narrow(queries, 1, count - 1)
            expected = expected.narrow(queries, 1, count - 1)
            allowed = 4 * torch.finfo(dtype).eps * (1 + expected.double().abs())
            agree(f"NaN in one eta leaves {name} of the others", rest, rest, expected, allowed)
            number = moves & ~first.reshape(*first.shape[:queries], -1).isnan().any(-1)
            # Second derivatives may be constant.
            if name not in ("fisher", "fisher_vp") and bool(number.any()):
                raise AssertionError(f"NaN in eta: {name} in {dtype} is a number: {first[number][0].tolist()}")


def check_nan_in_log_prob(subject: Subject) -> None:
    """The log-probability of NaN is NaN and that of infinity −inf; sampling at an eta of NaN is a ValueError."""
    measure = subject.measure
    eta = subject.eta
    point = subject.draws[0]
    nan = torch.full_like(eta, torch.nan)
    infinite = torch.full_like(eta, torch.inf)
    if not bool(measure.log_prob(eta, nan).isnan().all()):
        raise AssertionError("log_prob of NaN is a number")
    if not bool((measure.log_prob(eta, infinite) == -torch.inf).all()):
        raise AssertionError("log_prob of infinity is not −inf")
    try:
        if not bool(measure.log_prob(nan, point).isnan().all()):
            raise AssertionError("log_prob at an eta of NaN is a number")
        measure.sample(nan)
    except ValueError:  # A DomainError is one too.
        return
    raise AssertionError("sample at an eta of NaN did not raise ValueError")
