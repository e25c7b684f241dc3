"""Numbers as a reader sees them."""

from hypothesis import given
from hypothesis import strategies as st
from tests.support.rows import every_row

from massieu.foundation.numbers import counted, number, whole, with_error


@every_row(
    ("value", "error", "expected"),
    [
        (0.123456, None, "0.123"), (1234.5, None, "1,234"), (0.0, None, "0"), (-0.31, 0.02, "−0.310 ± 0.020"),
        (4.31, 0.05, "4.31 ± 0.05"), (0.57, 0.0123, "0.570 ± 0.012"), (1234.0, 56.0, "1,230 ± 60"),
        (3.1e-7, None, "3.1e−7"), (None, 0.1, "undefined"), (float("nan"), None, "undefined"),
        (float("inf"), None, "∞"), (float("-inf"), None, "−∞"), (2.0, float("nan"), "2"), (72.0, None, "72"),
    ],
)  # fmt: skip
def test_numbers_have_the_digits_their_error_supports(value: float | None, error: float | None, expected: str) -> None:
    assert with_error(value, error) == expected


@given(st.floats(1e-6, 1e6), st.floats(1e-4, 1e3))
def test_a_written_number_is_within_a_sixth_of_its_error(value: float, error: float) -> None:
    # Half a unit of the last kept digit: at most 0.5/3 of an error that begins with 3.
    written = float(number(value, error).replace(",", "").replace("−", "-"))
    assert abs(written - value) <= error / 6 * (1 + 1e-9) + 1e-12 * abs(value)


def test_what_is_counted_is_one_or_several() -> None:
    counts = [counted(count, "head") for count in (0, 1, 2, 1234, None)]
    assert counts == ["0 heads", "1 head", "2 heads", "1\u202f234 heads", "unknown"]


def test_counts_have_thin_separators() -> None:
    assert whole(1234567) == "1\u202f234\u202f567"
    assert whole(None) == "unknown"
