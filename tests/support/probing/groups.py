"""Groups of statistics on made-up sublayers, without a model: what begins them, and windows that they are told of."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from massieu.probing.statistics.group import Group, ModelReading, SampledWindow
from massieu.probing.stream.wiring import Step
from massieu.probing.sums.units import Units
from massieu.storage.record import Sublayer

AnyGroup = TypeVar("AnyGroup", bound=Group)


def sublayer(index: int, kind: str = "attention") -> Sublayer:
    """One step of a made-up stream."""
    return Sublayer(index, f"layer {index} {kind}", kind, index)


def begun(kind: Callable[[], AnyGroup], units: Units, *indices: int) -> AnyGroup:
    """A new group of a model that has these sublayers."""
    group = kind()
    group.begin(ModelReading(nn.Identity(), [], [sublayer(index) for index in indices], units, 64))
    return group


def step_to(cloud: Tensor, index: int) -> Step:
    """A step of one row that ends at these tokens."""
    return Step(sublayer(index), cloud[None], cloud[None], None)


def window(positions: Tensor, number: int | None, drawn: torch.Generator) -> SampledWindow:
    """A sampled window, the first row of its batch, with these positions sampled."""

    def never(*_: Any) -> Any:
        raise AssertionError("nothing is replayed or run again here")

    return SampledWindow(0, number, lambda _: positions, lambda _: positions, lambda _: drawn, never, never)


def rows_at(group: Group, index: int) -> dict[str, list[float]]:
    """Value, standard error and count of the whole text, by the rows' names."""
    return {
        row.name: [float(each[0]) for each in row.estimate]
        for row in group.rows()
        if row.place.order == index and row.part not in ("first_half", "second_half")
    }
