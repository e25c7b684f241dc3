"""How long benchmarks take: `python benchmarks/how_long.py NAME ...` says it by what they took when they were last run."""

import argparse
import json

from harness import RESULTS


def stored_minutes(name: str) -> float | None:
    """What the last run took; None where no run, or none with its time, is stored."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")).get("minutes") if path.exists() else None


def sentence(names: list[str]) -> str:
    """The sum of the known times, and the names without one."""
    minutes = {name: stored_minutes(name) for name in names}
    known = [value for value in minutes.values() if value is not None]
    unknown = [name for name, value in minutes.items() if value is None]
    parts = []
    if known:
        parts.append(
            f"{len(known)} benchmarks take about {max(1, round(sum(known)))} minutes, as when they were last run"
        )
    if unknown:
        parts.append(f"no time is stored of {', '.join(unknown)}")
    return "; ".join(parts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", metavar="NAME")
    print(sentence(parser.parse_args().names))
