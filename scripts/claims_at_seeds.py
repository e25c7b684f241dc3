"""Do the claims hold at seeds that nobody chose? Each claim at many seeds, in several processes, as a table.

    python scripts/claims_at_seeds.py                       # every claim at 40 seeds
    python scripts/claims_at_seeds.py S20 B13 --first 100   # two claims, at the seeds 100 to 139
    python scripts/claims_at_seeds.py --false-alarms        # the table in docs/theory/false_alarms.md, from one seed

A claim without a seed runs once. What was computed is kept in a folder named after the code, so that an interrupted run
goes on where it was, and a change of the code starts anew. The exit status is 1 if a claim fails or could not be checked.

"Nearest" is the share of a bound that the check nearest to it used: an inequality that is attained may use all of it. "By
draws" is the same for the checks that leave something to chance.
"""

import argparse
import hashlib
import json
import math
import os
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "massieu"
RESULTS = ROOT / "massieu-results" / "claims"
PAGE = ROOT / "docs" / "theory" / "false_alarms.md"
PAGES = {"S": "shim", "B": "bal", "Z": "zhang", "X": "bridges", "N": "beyond"}
"""Where claims are stated, by the first letter of their numbers."""
_MARKS = re.compile(
    r"(<!-- checks of draws, by scripts/claims_at_seeds.py -->\n).*?(?=<!-- end of checks of draws -->)", re.DOTALL
)
_VERDICTS = ("holds", "fails", "could not be checked")


class Task(NamedTuple):
    """One claim at one seed; no seed for a claim that draws nothing."""

    id: str
    seed: int | None

    @property
    def file(self) -> str:
        return f"{self.id}.json" if self.seed is None else f"{self.id}-{self.seed}.json"


def check(task: Task) -> dict:
    """The claim at that seed, as `massieu verify --json` tells it."""
    from massieu.papers import verify

    return verify(task.id, seed=task.seed).to_dicts()[0]


def tasks_of(ids: Iterable[str], seeds: range) -> list[Task]:
    """Seed by seed, so that an interrupted run has seen every claim."""
    from massieu.papers.claims.registry import claims, find

    entries = [find(id) for id in ids] or list(claims().values())
    without_seed = [Task(entry.id, None) for entry in entries if "seed" not in entry.parameters]
    return without_seed + [Task(entry.id, seed) for seed in seeds for entry in entries if "seed" in entry.parameters]


def run(tasks: list[Task], processes: int, folder: Path) -> Iterator[tuple[Task, dict]]:
    """What each task gave, from the folder where it is there already."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = []
    for task in tasks:
        path = folder / task.file
        if path.exists():
            yield task, json.loads(path.read_text(encoding="utf-8"))
        else:
            missing.append(task)
    started = time.perf_counter()
    with ProcessPoolExecutor(processes) as pool:
        waiting = {pool.submit(check, task): task for task in missing}
        for done, future in enumerate(as_completed(waiting), 1):
            task, result = waiting[future], future.result()
            write(folder / task.file, json.dumps(result, ensure_ascii=False))
            left = (time.perf_counter() - started) / done * (len(missing) - done)
            told = f"{task.id} at seed {task.seed}: {result['verdict']} ({done} of {len(missing)}, {left / 60:.0f} min left)"
            print(told, file=sys.stderr, flush=True)
            yield task, result


def write(path: Path, text: str) -> None:
    """The file is there whole or not at all."""
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def used(row: dict) -> float:
    """The share of its bound that a check used; 0 where there is no ratio."""
    measured, bound = row["measured"], row["bound"]
    if row["verdict"] == "fails":
        return math.inf
    if row["comparison"] == "≥":
        measured, bound = bound, measured
    return measured / bound if measured > 0 and bound > 0 else 0.0


def nearest(results: Iterable[dict], by_draws: bool) -> str:
    """The largest share of a bound that was used, and by which check."""
    rows = [row for result in results for row in result["checks"] if row["form"] == "corrected"]
    rows = [row for row in rows if row["false_alarm"] > 0 or not by_draws]
    if not rows:
        return "–"
    worst = max(rows, key=used)
    return f"{used(worst):.2f} ({worst['name'].rpartition(': ')[2].replace('|', '∣')})"


def table(results: dict[Task, dict]) -> str:
    """A line for each claim."""
    head = "| claim | seeds | fail | not checked | seconds | chance of a false alarm | nearest | nearest, by draws |\n"
    lines = [head, "|---|---|---|---|---|---|---|---|\n"]
    for id in dict.fromkeys(task.id for task in results):
        own = [result for task, result in results.items() if task.id == id]
        verdicts = Counter(result["verdict"] for result in own)
        seconds = statistics.fmean(result["seconds"] for result in own)
        chance = max(result["false_alarm"] for result in own)
        cells = (id, len(own), verdicts["fails"], verdicts["could not be checked"], f"{seconds:.2f}", f"{chance:.1g}")
        lines.append(f"| {' | '.join(map(str, (*cells, nearest(own, False), nearest(own, True))))} |\n")
    return "".join(lines)


def troubles(results: dict[Task, dict]) -> Iterator[str]:
    """A line for each claim and seed that is not as it should be: a printed form that holds is one, too."""
    for task, result in results.items():
        if result["verdict"] == "could not be checked":
            yield f"{task.id} at seed {task.seed} could not be checked: {result['reason']}"
        for row in result["checks"]:
            if (row["verdict"] == "holds") != (row["form"] == "corrected"):
                told = f"{row['measured']} {row['comparison']} {row['bound']} ({row['form']}: {row['verdict']})"
                yield f"{task.id} at seed {task.seed}, {row['name']}: {told} {row['detail']}"


def false_alarms(results: dict[Task, dict]) -> str:
    """The checks that leave something to chance: how large a part, and how that is known."""
    lines = [
        "| claim | check | numbers like it | bound | known by | chance of a false alarm |\n",
        "|---|---|---|---|---|---|\n",
    ]
    for task, result in results.items():
        kinds: dict[str, list[dict]] = {}
        for row in result["checks"]:
            if row["false_alarm"] > 0 and row["form"] == "corrected":
                kind = re.sub(r"\d+(\.\d+)?(e-?\d+)?", "#", row["name"].rpartition(": ")[2])
                kinds.setdefault(f"{kind} {row['comparison']}", []).append(row)
        for alike in kinds.values():
            worst = max(alike, key=lambda row: row["false_alarm"])
            name = worst["name"].rpartition(": ")[2].replace("|", "∣")
            bound = f"{worst['comparison'].replace('|', '∣')} {worst['bound']:.3g}"
            chance = max(worst["false_alarm"], 1e-12)
            cells = (
                f"[{task.id}]({PAGES[task.id[0]]}.md#{task.id.lower()})",
                name,
                len(alike),
                bound,
                worst["basis"],
                f"{'<' if chance == 1e-12 else ''}{chance:.1g}",
            )
            lines.append(f"| {' | '.join(map(str, cells))} |\n")
    total = sum(result["false_alarm"] for result in results.values())
    return "".join(lines) + f"\nAll of them together: {total:.1g}.\n\n"


def fingerprint() -> str:
    """Of the code that the results come from."""
    digest = hashlib.sha256()
    for path in sorted(SOURCE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", nargs="*", metavar="ID", help="claims, such as S20; all without any")
    parser.add_argument("--seeds", type=int, default=40, help="how many [40]")
    parser.add_argument("--first", type=int, default=300, help="the first of them [300]")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="how many at once [one a core]")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where results are kept [massieu-results/claims]")
    parser.add_argument(
        "--false-alarms", action="store_true", help="write the table of checks of draws into the documentation"
    )
    arguments = parser.parse_args()
    seeds = range(1) if arguments.false_alarms else range(arguments.first, arguments.first + arguments.seeds)
    tasks, folder = tasks_of(arguments.ids, seeds), arguments.out / fingerprint()
    unordered = dict(run(tasks, arguments.processes, folder))
    results = {task: unordered[task] for task in tasks}
    if arguments.false_alarms:
        page = PAGE.read_text(encoding="utf-8")
        write(PAGE, _MARKS.sub(lambda match: match[1] + false_alarms(results), page))
        return 0
    by_claim = table(results)
    write(folder / "table.md", by_claim)
    print(by_claim)
    for line in troubles(results):
        print(line)
    counts = Counter(result["verdict"] for result in results.values())
    print(", ".join(f"{counts[verdict]} {verdict}" for verdict in _VERDICTS), f"(in {folder})")
    return 0 if counts["holds"] == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
