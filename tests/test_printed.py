"""Texts are the same but for what another processor rounds."""

import pytest
from tests.support.printed import differing


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("loss 0.1234\n", "loss 0.1235\n"),
        ("  12.10  7\n", " 12.12 7\n"),  # 1 % of it
        ("off by 3.1e-17", "off by 0.0e+00"),
        ("-0.000", "0.000"),
        ("1,024 keys, 1.5e-01", "1,024 keys, 1.6e-01"),
        ("−2.31 nats", "−2.30 nats"),
    ],
)
def test_last_digits_may_differ(printed, shown):
    assert differing(printed, shown) == []


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("loss 0.1234\n", "loss 0.1254\n"),
        ("53 of 60", "54 of 60"),
        ("1,024 keys", "1,025 keys"),
        ("-2.31", "2.31"),
        ("True", "False"),
        ("a 1.0", "b 1.0"),
        ("1.0 2.0", "1.0"),
        ("3.1e-03", "3.1e-04"),
        ("1.00", "nan"),
    ],
)
def test_all_else_may_not(printed, shown):
    assert differing(printed, shown) != []
