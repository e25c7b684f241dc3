"""Whether what a block prints is what its page shows, on another make of processor too."""

import re

NUMBER = re.compile(r"[-−+]?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")
UNITS, SHARE, ROUNDING = 2, 0.01, 1e-6
"""Two numbers with a point are alike within so many units of their last digit, or this share of them, or below rounding."""


def differing(printed: str, shown: str) -> list[tuple[str, str]]:
    """What differs between two texts: words, whole numbers, and numbers with a point that are not alike.

    A last digit is another one on another processor, and so is the width of a column; a word or a count is not.
    """
    texts = [" ".join(NUMBER.sub("#", text).split()) for text in (printed, shown)]
    if texts[0] != texts[1]:
        return [(texts[0], texts[1])]
    pairs = zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True)
    return [(one, other) for one, other in pairs if not _alike(one, other)]


def _alike(one: str, other: str) -> bool:
    if one == other:
        return True
    (first, unit), (second, same_unit) = _read(one), _read(other)
    if not (unit < 1 and same_unit < 1):
        return False
    if max(abs(first), abs(second)) < ROUNDING:
        return True
    return abs(first - second) <= max(UNITS * max(unit, same_unit), SHARE * abs(second)) * (1 + 1e-9)


def _read(text: str) -> tuple[float, float]:
    """A number, and the unit of its last digit: 1 or more for whole numbers."""
    plain = text.replace("−", "-").replace(",", "")
    digits, _, exponent = plain.partition("e")
    places = len(digits.partition(".")[2])
    if not places and not exponent:
        return float(plain), 1.0
    return float(plain), 10.0 ** (int(exponent or 0) - places)
