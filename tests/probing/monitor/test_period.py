"""How often a monitor measures, by a clock that the test sets."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from massieu.probing.monitor.period import FIRST, LONGEST, Period, PeriodProposal, agreed


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def followed(cost: float, seconds: float, budget: float, steps: int, compiled: float = 0.0) -> tuple[list[int], float]:
    """The steps of the records of a run, and the share of the time that they took."""
    clock = Clock()
    period = Period(None, budget, clock)
    records, spent = [], 0.0
    for step in range(steps):
        period.arrive(step)
        if period.is_due(step):
            period.every = period.affordable()
            clock.now += cost
            spent += cost
            period.add_record(step, cost)
            records.append(step)
        clock.now += seconds + (compiled if step == 0 else 0)
    return records, spent / clock.now


@given(cost=st.floats(1e-3, 2), seconds=st.floats(1e-2, 10), budget=st.sampled_from([0.002, 0.01, 0.05]))
def test_records_stay_within_their_budget(cost, seconds, budget):
    records, share = followed(cost, seconds, budget, 5000)
    periods = {after - before for before, after in pairwise(records[2:])}
    needed = cost * (1 / budget - 1) / seconds
    if needed <= LONGEST:
        assert all(each >= needed * (1 - 1e-9) for each in periods)
        first = 2 * cost  # records at 0 and at `FIRST`, before the cost is known
        assert share <= budget + first / (5000 * seconds)
    assert all(each <= max(2 * 2.5 * needed, FIRST) or each <= 1 for each in periods if needed >= 1)


@given(cost=st.floats(1e-3, 2), seconds=st.floats(1e-2, 10))
def test_the_period_is_regular(cost, seconds):
    records, _ = followed(cost, seconds, 0.01, 3000)
    last = records[-1] - records[-2] if len(records) > 3 else None
    assert last is None or str(last).rstrip("0") in {"1", "2", "5"}


def test_a_first_step_that_compiles_does_not_count():
    assert followed(0.1, 0.1, 0.01, 1000, compiled=60.0)[0] == followed(0.1, 0.1, 0.01, 1000)[0]


def test_a_fixed_period_stays():
    period = Period(7)
    period.add_record(0, 1e3)
    period.arrive(7)
    assert period.affordable() == period.every == 7


def test_only_multiples_are_due():
    period = Period(3)
    assert [step for step in range(8) if period.is_due(step)] == [0, 3, 6]


@pytest.mark.parametrize(("needed", "expected"), [(0.02, 1), (1.5, 2), (3, 5), (60, 100), (9e9, LONGEST)])
def test_periods_are_rounded_up(needed, expected):
    clock = Clock()
    period = Period(None, 0.5, clock)
    period.every = 1
    period.arrive(0)
    period.add_record(0, needed)
    clock.now += 1
    period.arrive(1)
    assert period.affordable() == expected


@given(cost=st.floats(1e-3, 2), seconds=st.floats(1e-2, 10))
def test_what_a_watched_step_takes_more_is_its_cost(cost, seconds):
    """As `followed`, but that records are made within a step."""
    clock = Clock()
    period = Period(None, 0.01, clock)
    records = []
    for step in range(3000):
        period.arrive(step)
        if period.is_due(step):
            period.adopt(period.proposal())
            clock.now += cost
            period.add_watched_record()
            records.append(step)
        clock.now += seconds
    needed = 99 * cost / seconds
    if needed <= LONGEST:
        assert all(after - before >= needed * (1 - 1e-6) for before, after in pairwise(records[3:]))


def test_processes_take_the_longest_period():
    assert agreed([PeriodProposal(20, 0.004), PeriodProposal(50, 0.01), PeriodProposal(10)]) == PeriodProposal(50, 0.01)
