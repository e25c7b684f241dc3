"""How a number is written: as many digits as its error allows, and a plain word when there is none."""

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
        power = math.floor(math.log10(error))
        decimals = (1 if error < 3 * 10.0**power else 0) - power
    else:
        value = float(f"{value:.2e}") if abs(value) < 1000 else round(value)
        decimals = 0 if float(value).is_integer() else 2 - math.floor(math.log10(abs(value)))
    if abs(value) < 1e-3 and decimals > 5:
        text = f"{value:.1e}".replace("e-0", "e-")
    else:
        text = f"{round(value, decimals):,.{max(decimals, 0)}f}"
    return text.replace("-", MINUS)


def bound(value: float | None) -> str:
    """Write a bound as it was set, such as 1e−10 or 5; "undefined" when there is none."""
    return "undefined" if value is None else f"{value:.6g}".replace("e-0", "e-").replace("-", MINUS)


def with_error(value: float | None, error: float | None) -> str:
    """Write ``value ± standard error``; without a standard error, the value alone."""
    if value is None or error is None or math.isnan(value) or not math.isfinite(error):
        return number(value)
    return f"{number(value, error)} ± {number(error, error)}"


def counted(count: int | None, word: str) -> str:
    """Write a count and what is counted: "1 head", "2 heads"; "unknown" when there is none."""
    return whole(count) if count is None else f"{whole(count)} {word}{'' if count == 1 else 's'}"


def whole(count: int | None) -> str:
    """Write a count with thin thousands separators; "unknown" when there is none."""
    return "unknown" if count is None else f"{count:,}".replace(",", "\u202f")
