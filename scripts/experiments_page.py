"""The gallery in docs/how-to/experiments.md, made from what was found last: ``python scripts/experiments_page.py``."""

import re
from pathlib import Path

from massieu.experiments.run import RESULTS, load
from massieu.experiments.study import Study, experiments

_MARKS = re.compile(
    r"(<!-- what was found, by scripts/experiments_page.py -->\n).*?(?=<!-- end of what was found -->)", re.DOTALL
)
_HEAD = "| what | role | mean | 95 % interval | threshold | outcome |\n|---|---|---|---|---|---|\n"
_OUTCOMES = {"met": "met", "missed": "not met", "open": "open", "described": "–"}


def _plain(text: str) -> str:
    """Signs that Markdown would read as emphasis or as the edge of a cell."""
    return re.sub(r"([*_|])", r"\\\1", text)


def section(study: Study) -> str:
    """One experiment: question, verdict, setting, thresholds."""
    asked, seeds = study.experiment, ", ".join(map(str, sorted(study.runs)))
    rows = []
    for found in study.judgements:
        criterion = found.criterion
        cells = (
            _plain(criterion.title),
            criterion.role,
            *found.told,
            criterion.threshold,
            _OUTCOMES[found.outcome],
        )
        rows.append(f"| {' | '.join(cells)} |\n")
    made, table = study.made, _HEAD + "".join(rows)
    return (
        f"### `{asked.name}`: {study.verdict}\n\n{asked.question} ({asked.claims})\n\n{_plain(asked.setting)}\n\n{table}\n"
        f"Seeds {seeds}; {sum(study.seconds.values()) / 60:.0f} minutes of one core, {made['date']}, torch {made['torch']}.\n\n"
    )


def gallery() -> str:
    """Every experiment that was run at default size."""
    return "\n" + "".join(
        section(load(RESULTS / f"{name}.json")) for name in experiments() if (RESULTS / f"{name}.json").exists()
    )


def with_gallery(page: str) -> str:
    """The page, with what was found last between its marks."""
    return _MARKS.sub(lambda found: found[1] + gallery(), page)


if __name__ == "__main__":
    path = Path(__file__).parents[1] / "docs" / "how-to" / "experiments.md"
    path.write_text(with_gallery(path.read_text(encoding="utf-8")), encoding="utf-8")
