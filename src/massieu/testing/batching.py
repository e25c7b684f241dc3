"""Batched, one by one, under `vmap` and compiled: four ways to the same numbers."""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from massieu.measures.base import Measure
from massieu.testing.checks import agree
from massieu.testing.subject import DERIVED, FUNCTIONS, Subject


def check_shapes(subject: Subject) -> None:
    measure = subject.measure
    eta = subject.eta
    event = subject.measure.event_shape
    # One query dimension; none, which shows a tensor of too many dimensions; and two.
    for points in (eta, eta.select(subject.queries, 0), torch.stack([eta, eta], subject.queries)):
        batch = points.shape[: points.ndim - len(event)]
        shapes = batch, points.shape, (*points.shape, *event), batch
        for name, shape in zip(DERIVED, shapes, strict=True):
            actual = tuple(getattr(measure, name)(points).shape)
            if actual != tuple(shape):
                raise AssertionError(
                    f"shape of {name}: got {actual}, expected {tuple(shape)} for eta of shape {tuple(points.shape)}"
                )
    try:
        measure.log_partition(torch.cat([eta, eta], -1))
    except ValueError:
        return
    raise AssertionError(f"shapes: eta with an event shape other than {tuple(event)} did not raise ValueError")


def check_batching(subject: Subject) -> None:
    measure = subject.measure
    eta = subject.eta
    other = subject.middle
    queries = subject.queries
    pairs = list(zip(eta.unbind(queries), other.unbind(queries), strict=True))
    sliced = can_be_sliced(measure)
    parts = [pytree.tree_map(lambda leaf, i=i: leaf[i], measure) for i in range(len(eta))] if sliced else []
    for name, function in FUNCTIONS.items():
        whole = subject.results[name]
        tolerance = 1e-12 * (1 + whole.abs())
        alone = [function(measure, point, second) for point, second in pairs]
        agree(f"{name}: all queries at once = one by one", eta, whole, torch.stack(alone, queries), tolerance)
        # The mapped dimension is moved afterwards: vmap with another out_dims fails on results that do not depend on eta.
        mapped = torch.func.vmap(function, (None, queries, queries))(measure, eta, other).movedim(0, queries)
        agree(f"{name}: vmap over queries", eta, whole, mapped, tolerance)
        if sliced:
            alone = [function(*one) for one in zip(parts, eta, other, strict=True)]
            agree(f"{name}: whole batch = one by one", eta, whole, torch.stack(alone), tolerance)
            mapped = torch.func.vmap(function)(measure, eta, other)
            agree(f"{name}: vmap over the batch", eta, whole, mapped, tolerance)


def can_be_sliced(measure: Measure) -> bool:
    """Whether every tensor of the measure carries its first batch dimension (in compositions some may not)."""
    batch = measure.batch_shape
    return len(batch) > 0 and all(leaf.shape[: len(batch)] == batch for leaf in pytree.tree_leaves(measure))


def _gradient(measure: Measure, eta: Tensor, other: Tensor) -> Tensor:
    return torch.func.grad(lambda point: measure.log_partition(point).sum())(eta)


def _gradient_of_the_mean(measure: Measure, eta: Tensor, other: Tensor) -> Tensor:
    return torch.func.grad(lambda point: measure._dot(other, measure.mean(point)).sum())(eta)


COMPILED = {**FUNCTIONS, "gradient": _gradient, "gradient of the mean": _gradient_of_the_mean}
"""The functions that are compiled."""


def check_compiled(subject: Subject, names: Iterable[str] = COMPILED) -> None:
    eta = subject.eta
    other = subject.middle
    backend = subject.case.compile_backend
    assert backend is not None
    for name in names:
        function = partial(COMPILED[name], subject.measure)
        expected = function(eta, other)
        torch.compiler.reset()
        actual = torch.compile(function, fullgraph=True, backend=backend)(eta, other)
        agree(f"{name}: compiled = eager", eta, actual, expected, 1e-10 * (1 + expected.abs()))
