"""What a stored record has to hold: a file that lacks it is refused in a sentence, whatever else it says."""

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from decimal import ROUND_HALF_EVEN, Context, Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from massieu.probing.result import stored
from massieu.storage.record import Entry, json_value

NULL_BUT_THERE = {
    "ModelRecord": {"name", "layers", "heads"},
    "TextRecord": {"source", "tokens", "windows"},
    "ErrorUnitRecord": {"unit", "count"},
    "SelfCheckRecord": {"error", "tolerance"},
}
"""What every version has written, if only as null."""


def _entries(base: type[Entry] = Entry) -> Iterator[tuple[str, list[Field]]]:
    for kind in base.__subclasses__():
        yield kind.__name__, [each for each in fields(kind) if each.init]
        yield from _entries(kind)


def _needed(each: Field) -> bool:
    return "needed" in each.metadata


def test_a_field_without_a_default_has_to_be_in_a_file():
    """A file that lacks it would else end in a traceback."""
    assert stored.Entry is Entry  # its entries are among those here
    wrong = []
    for name, parts in _entries():
        without_default = [each for each in parts if each.default is MISSING and each.default_factory is MISSING]
        wrong += [f"{name}.{each.name}" for each in without_default if not _needed(each)]
    assert not wrong


def test_what_every_version_has_written_has_to_be_there():
    result = {}
    for name, parts in _entries():
        if with_default := {each.name for each in parts if _needed(each) and each.default is not MISSING}:
            result[name] = with_default
    assert result == NULL_BUT_THERE


@pytest.mark.medium
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1), st.integers(1, 17))
def test_an_array_is_rounded_to_digits_as_decimal_numbers_are(values, digits):
    """By decimal arithmetic; near a tie to either side, as the products of an array are rounded themselves."""
    for value, rounded in zip(values, json_value(np.array(values), digits), strict=True):
        context = Context(prec=digits, rounding=ROUND_HALF_EVEN)
        nearest = float(context.create_decimal(Decimal(value)))
        if rounded != nearest:
            step = Decimal(1).scaleb(Decimal(value).adjusted() - digits + 1)
            off = abs(Decimal(value) - Decimal(rounded))
            assert off <= step / 2 * (1 + Decimal("1e-12")) + Decimal(abs(value)) * Decimal(2) ** -52


def test_numbers_that_json_cannot_hold_are_null_in_an_array():
    assert json_value(np.array([[1.26, np.nan], [np.inf, -0.001234]]), 2) == [[1.3, None], [None, -0.0012]]
    assert json_value(np.array([1, 2])) == [1, 2]


def test_no_finite_number_is_rounded_to_infinity():
    largest = np.finfo(np.float64).max  # 1.7977e308, which two digits would make 1.8e308
    for sign in (1, -1):
        assert json_value(sign * largest, 2) == sign * largest
        assert json_value(np.array([sign * largest, 1.26]), 2) == [sign * largest, 1.3]
    assert json_value(1.73e308, 2) == 1.7e308
