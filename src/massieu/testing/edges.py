"""Where callers go that no average case leads to: nothing, no values, half precision, and the boundary of the means."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from massieu.duality import conjugate, natural
from massieu.errors import ConvergenceError
from massieu.measures.base import Measure
from massieu.measures.hooks import MissingFormError
from massieu.testing.batching import DERIVED, FUNCTIONS
from massieu.testing.checks import EXACT, agree, at_most, expand
from massieu.testing.distribution import has_density
from massieu.testing.subject import Subject

_FAR = 1e3
_POINTS = 4
"""Draws whose conjugate is held against their probability."""


def check_draws_in_other_precisions(subject: Subject) -> None:
    """What is drawn in single precision is possible; so it is when it has been rounded to half."""
    if not has_density(subject):
        return
    measure = subject.measure.to(torch.float32)
    eta = subject.eta.float()
    eta = _kept(subject, measure, eta)
    try:
        draws = measure.sample(eta, 50, generator=torch.Generator(eta.device).manual_seed(0))
    except MissingFormError:
        return
    for name, points in (("float32", draws), ("bfloat16", draws.bfloat16())):
        found = measure.log_prob(eta, points)
        possible = (found > -torch.inf).to(eta).mean(0)
        agree(f"log_prob: what is drawn is possible, rounded to {name}", eta, possible, torch.ones_like(possible), 0.0)


def _kept(subject: Subject, measure: Measure, eta: Tensor) -> Tensor:
    """The points that rounding has left inside the domain."""
    inside = measure._in_domain(eta)
    if inside is None:
        return eta
    held = inside.reshape(-1, inside.shape[-1]).all(0)
    return eta.index_select(subject.queries, held.nonzero().squeeze(-1))


def check_empty(subject: Subject) -> None:
    """No query, and no measure: an empty result of the right shape."""
    measure, queries = subject.measure, subject.queries
    _check_shapes("no query", measure, subject.eta, subject.eta.narrow(queries, 0, 0), measure)
    leaves = pytree.tree_leaves(measure)
    if queries and all(leaf.shape[:queries] == measure.batch_shape for leaf in leaves):
        nothing = pytree.tree_map(lambda leaf: leaf[:0], measure)
        _check_shapes("an empty batch", measure, subject.eta, subject.eta[:0], nothing)


def check_meta(subject: Subject) -> None:
    """Shapes without values: on the meta device every function gives the shape that it gives elsewhere."""
    measure = pytree.tree_map(lambda leaf: leaf.to("meta"), subject.measure)
    _check_shapes("meta device", subject.measure, subject.eta, subject.eta.to("meta"), measure)


def _check_shapes(law: str, measure: Measure, eta: Tensor, other: Tensor, variant: Measure) -> None:
    """The shapes of `variant` at `other` are those of `measure` at `eta`, but for the batch and the queries."""
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
            actual = call(variant, other)
        except Exception as error:
            raise AssertionError(f"{law}: {name} raised {type(error).__name__}: {error}") from error
        shape = (*other.shape[:lead], *expected.shape[lead:])
        if tuple(actual.shape) != shape or actual.device != other.device or actual.dtype != expected.dtype:
            raise AssertionError(
                f"{law}: {name} gave {actual.dtype} of shape {tuple(actual.shape)} on {actual.device}, expected "
                f"{expected.dtype} of shape {shape} on {other.device}"
            )


def check_boundary(subject: Subject, draws: Tensor | None) -> None:
    """The conjugate where means saturate is −entropy, and at a discrete law's own points at most −log h.

    The means of the far eta lie on the boundary of the support's hull to rounding, in single precision still more.
    """
    eta = subject.far
    for dtype in (torch.float64, torch.float32):
        measure = subject.measure.to(dtype)
        points = _kept(subject, measure, eta.to(dtype))
        mean, entropy = measure.mean(points), measure.entropy(points)
        # Means a long way out are not those that have come to a bound.
        nearby = measure.mean(points.narrow(subject.queries, 0, 1))
        held = (subject.norm(mean) <= _FAR * (1 + subject.norm(nearby))) & entropy.isfinite()
        value = _conjugate(measure, torch.where(expand(held, mean), mean, nearby))
        value, expected = (torch.where(held, number, 0.0) for number in (value, -entropy))
        # A rounding of the mean moves the conjugate by eta times that; far out, by all that it still gains.
        rounding = 64 * torch.finfo(dtype).eps * (1 + subject.norm(points)) * (1 + subject.norm(mean))
        law = f"conjugate of a saturated mean = −entropy, in {dtype}"
        agree(law, points, value, expected, rounding + torch.finfo(dtype).eps ** 0.5 * (1 + expected.abs()))
    measure = subject.measure
    if draws is None or measure._reference != "counting" or not has_density(subject):
        return
    eta = subject.eta
    for point in draws[:_POINTS]:
        value = _conjugate(measure, point)
        mass = measure.log_prob(eta, point) + measure.log_partition(eta) - measure._dot(eta, point)
        at_most("conjugate(x) ≤ −log h({x}) at a drawn x", eta, value, -mass, 1e-6 * (1 + mass.abs()))
        below = measure._dot(eta, point) - measure.log_partition(eta)
        at_most("conjugate(x) ≥ eta·x − A(eta) at a drawn x", eta, below, value, 1e-6 * (1 + below.abs()))


def _conjugate(measure: Measure, mu: Tensor) -> Tensor:
    try:
        return conjugate(measure, mu)
    except (ValueError, ConvergenceError) as error:
        raise AssertionError(f"conjugate at the boundary: {error}") from error


def check_numbers(subject: Subject) -> None:
    """Lists of numbers and NumPy arrays are what tensors are, for eta as for a point."""
    measure, eta = subject.measure, subject.eta
    for name in DERIVED:
        function = partial(getattr(measure, name))
        expected = function(eta)
        for kind, given in (("a list", eta.tolist()), ("an array", eta.numpy(force=True))):
            if eta.numel():
                agree(f"{name} of {kind} = of a tensor", eta, function(given), expected, EXACT * (1 + expected.abs()))
