"""Rows of which some visible units are missing: the law of these, and of the hidden units, given the others.

Given the hidden units the visible ones are independent of each other, so the missing ones leave their log-partition alone:

    p(h, v_o) ∝ b(h)·exp(v_o·(Wh)_o + Σ_m A_m((Wh)_m))·a_o(v_o),

o the observed units and m the missing ones. Where the hidden units have few states this is summed over them; elsewhere Gibbs
sampling draws missing and hidden units in turn, while the observed ones stay.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from massieu.energy import sites
from massieu.energy.boltzmann import BoltzmannMachine
from massieu.measures import Measure

MAX_STATES = 1 << 16
"""The most states of the hidden units over which is summed; beyond, missing units are sampled."""
_PAIRS_PER_BLOCK = 1 << 22
"""Pairs of a row and a state in a block, at most."""


class Completion(NamedTuple):
    """What a machine knows of rows of which it sees some units."""

    visible: Float[Tensor, "rows V"]
    """The observed units, and the mean of the missing ones given these."""
    hidden: Float[Tensor, "rows H"]
    """The mean of the hidden units given the observed ones."""
    log_density: Float[Tensor, "rows"] | None
    """log p(observed units) but for the machine's log-partition, nats; None if it was sampled."""


def missing_units(measure: Measure, is_missing: Bool[Tensor, "rows V"]) -> Bool[Tensor, "rows units"]:
    """Which units of each row are missing, from the coordinates that are.

    Raises:
        ValueError: a part of a unit's coordinates is missing.
    """
    by_unit = is_missing.split(measure._unit_sizes(), -1)
    whole = torch.stack([part.all(-1) for part in by_unit], -1)
    some = torch.stack([part.any(-1) for part in by_unit], -1)
    if bool((some & ~whole).any()):
        row, unit = (some & ~whole).nonzero()[0].tolist()
        raise ValueError(
            f"the coordinates of visible unit {unit} depend on each other, so all of them are missing or none, "
            f"got a part of them in row {row}"
        )
    return whole


def is_enumerable(machine: BoltzmannMachine) -> bool:
    """Whether the hidden units have at most `MAX_STATES` states."""
    count = sites.num_states(machine.hidden)
    return count is not None and count <= MAX_STATES


@torch.no_grad()
def complete_exactly(
    machine: BoltzmannMachine, data: Float[Tensor, "rows V"], is_missing: Bool[Tensor, "rows V"]
) -> Completion:
    """By a sum over the states of the hidden units, in float64. Numbers in missing places are not read."""
    dtype = data.dtype
    machine = machine.to(torch.float64)
    data = data.double().masked_fill(is_missing, 0.0)
    unit_is_missing = missing_units(machine.visible, is_missing)
    num_states = sites.num_states(machine.hidden)
    assert num_states is not None
    rows_at_once = max(1, _PAIRS_PER_BLOCK // num_states)
    parts = [
        _sum_over_states(machine, *block)
        for block in zip(
            data.split(rows_at_once), is_missing.split(rows_at_once), unit_is_missing.split(rows_at_once), strict=True
        )
    ]
    visible, hidden, log_density = (torch.cat(part) for part in zip(*parts, strict=True))
    return Completion(visible.to(dtype), hidden.to(dtype), log_density.to(dtype))


def _sum_over_states(
    machine: BoltzmannMachine, data: Tensor, is_missing: Tensor, unit_is_missing: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Visible and hidden means, and the log-density, of a block of rows."""
    largest = data.new_full((len(data),), -torch.inf)
    total = data.new_zeros(len(data))
    visible_sum = torch.zeros_like(data)
    hidden_sum = data.new_zeros(len(data), machine.weight.shape[1])
    for states, field in _states(machine):
        rise = machine.visible._log_partition_of_units(field)
        rise = rise - machine.visible._log_partition_of_units(torch.zeros_like(field[:1]))
        log_state = machine.hidden.log_prob(torch.zeros_like(states), states)
        score = log_state + data @ field.mT + unit_is_missing.to(rise) @ rise.mT
        # Sums relative to the largest score so far, so that exponentials neither overflow nor all vanish.
        level = torch.maximum(largest, score.amax(1))
        shrink = (largest - level).exp()
        weight = (score - level.unsqueeze(1)).exp()
        total = shrink * total + weight.sum(1)
        visible_sum = shrink.unsqueeze(1) * visible_sum + weight @ machine.visible.mean(field)
        hidden_sum = shrink.unsqueeze(1) * hidden_sum + weight @ states
        largest = level
    by_unit = machine.visible._log_prob_of_units(torch.zeros_like(data), data)
    log_observed = by_unit.masked_fill(unit_is_missing, 0.0).sum(-1)
    visible = torch.where(is_missing, visible_sum / total.unsqueeze(1), data)
    return visible, hidden_sum / total.unsqueeze(1), largest + total.log() + log_observed


def _states(machine: BoltzmannMachine) -> Iterator[tuple[Tensor, Tensor]]:
    """The states of the hidden units in blocks, with the fields that they make."""
    for states in sites.state_blocks(machine.hidden, machine.weight):
        yield states, machine.visible_field(states)


@torch.no_grad()
def complete_by_gibbs(
    machine: BoltzmannMachine,
    data: Float[Tensor, "rows V"],
    is_missing: Bool[Tensor, "rows V"],
    *,
    sweeps: int,
    generator: torch.Generator | None,
) -> Completion:
    """By a chain for each row: means over `sweeps` sweeps, after a tenth as many that are not counted.

    Averaged are the conditional means of the missing units, not their draws, which has the smaller error.
    """
    missing_units(machine.visible, is_missing)
    visible = machine.visible.sample(torch.zeros_like(data), generator=generator)
    visible = torch.where(is_missing, visible, data)
    visible_sum = torch.zeros_like(data)
    hidden_sum = data.new_zeros(len(data), machine.weight.shape[1])
    burn_in = -(-sweeps // 10)
    for sweep in range(burn_in + sweeps):
        hidden_field = machine.hidden_field(visible)
        hidden = machine.hidden.sample(hidden_field, generator=generator)
        visible_field = machine.visible_field(hidden)
        if sweep >= burn_in:
            hidden_sum += machine.hidden.mean(hidden_field)
            visible_sum += machine.visible.mean(visible_field)
        drawn = machine.visible.sample(visible_field, generator=generator)
        visible = torch.where(is_missing, drawn, data)
    return Completion(torch.where(is_missing, visible_sum / sweeps, data), hidden_sum / sweeps, None)
