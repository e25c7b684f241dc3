"""Numbers as text: as many digits as the standard error supports, and a word for a number that is undefined."""

import math

MINUS = "−"


def number(value: float | None, error: float | None = None) -> str:
    """Write a value with three significant digits, or with the digits its standard error supports.

    Args:
        value: The number; None and NaN mean that it is undefined.
        error: Its standard error, in the same unit; it sets the decimals: two digits of an error that begins with
            1 or 2, one digit of any other.

    Returns:
        The text, with a true minus sign; "undefined" when there is no value.
    """
    if value is None or math.isnan(value):
        return "undefined"
    if math.isinf(value):
        return "∞" if value > 0 else f"{MINUS}∞"
    if error is not None and math.isfinite(error) and error > 0:
        decimals = _decimals_of_error(error)
    else:
        # Three significant digits; a number of more than three before the point is rounded to a whole one.
        value = float(f"{value:.2e}") if abs(value) < 1000 else round(value)
        decimals = 0 if float(value).is_integer() else 2 - math.floor(math.log10(abs(value)))
    if abs(value) < 1e-3 and decimals > 5:
        # Python writes e-07: without the zero it reads as in print.
        text = f"{value:.1e}".replace("e-0", "e-")
    else:
        text = f"{round(value, decimals):,.{max(decimals, 0)}f}"
    return text.replace("-", MINUS)


def _decimals_of_error(error: float) -> int:
    """Decimals that show two digits of an error beginning with 1 or 2, and one digit of any other."""
    power = math.floor(math.log10(error))
    num_digits = 2 if error < 3 * 10.0**power else 1
    return num_digits - 1 - power


def bound(value: float | None) -> str:
    """Write a bound as it was set, such as 1e−10 or 5; "undefined" when there is none."""
    if value is None:
        return "undefined"
    return f"{value:.6g}".replace("e-0", "e-").replace("-", MINUS)


def with_error(value: float | None, error: float | None) -> str:
    """Write ``value ± standard error``; without a standard error, the value alone."""
    if value is None or error is None or math.isnan(value) or not math.isfinite(error):
        return number(value)
    return f"{number(value, error)} ± {number(error, error)}"


def counted(count: int | None, word: str) -> str:
    """Write a count and what is counted: "1 head", "2 heads"; "unknown" for a count of None."""
    if count is None:
        return whole(count)
    plural = "" if count == 1 else "s"
    return f"{whole(count)} {word}{plural}"


def whole(count: int | None) -> str:
    """Write a count with thin spaces between thousands; "unknown" for None."""
    if count is None:
        return "unknown"
    return f"{count:,}".replace(",", "\u202f")
