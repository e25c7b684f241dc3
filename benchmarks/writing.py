"""Numbers and tables as Markdown, for `benchmarks/page.py`."""

from typing import Any

from massieu.foundation.numbers import counted

Json = dict[str, Any]


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def memory(mebibytes: float) -> str:
    return f"{mebibytes:,.0f} MiB" if mebibytes >= 10 else f"{mebibytes:.1f} MiB"


def ratio(value: float, interval: list[float] | None = None) -> str:
    digits = 2 if value >= 0.2 else 3
    shown = f"{value:.{digits}f}"
    return shown if interval is None else f"{shown} [{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"


def at_most(bar: float | None) -> str:
    return "" if bar is None else f"≤ {bar:g}"


def verdict(met: bool | None) -> str:
    return "" if met is None else "met" if met else "**missed**"


def exponent(fit: Json) -> str:
    """Of a stored `fit.Power`."""
    low, high = fit["interval"]
    return f"{fit['exponent']:.2f} [{low:.2f}, {high:.2f}]"


RATIOS_OF_ROUNDS_SINCE = "2026-11-27T21:50"
"""Results from before have ratios of medians."""


def origin(name: str, content: Json) -> str:
    """Which command measured a result file, when and where, and how its ratios were formed."""
    machine = content.get("machine", content)
    facts = [
        f"`python benchmarks/{name}.py`",
        content.get("date", "")[:10],
        machine.get("processor", ""),
        counted(machine["threads"], "thread"),
        f"torch {machine['torch']}",
    ]
    found = f"{', '.join(filter(None, facts))}; numbers in [`{name}.json`](../benchmarks/results/{name}.json).\n"
    has_ratios = any("time_ratio" in row for row in content.get("rows", []))
    if has_ratios and content.get("date", "") < RATIOS_OF_ROUNDS_SINCE:
        found += "\nMeasured before the others: a ratio of times is here that of the medians.\n"
    return found
