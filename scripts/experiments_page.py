"""The gallery of experiments and the theory's verdicts, from what was found last: ``python scripts/experiments_page.py``."""

import json
import re
from pathlib import Path

from massieu.foundation.numbers import counted
from massieu.papers.experiments.run import RESULTS, load
from massieu.papers.experiments.study import Study, experiments

_MARKS = re.compile(
    r"(<!-- what was found, by scripts/experiments_page.py -->\n).*?(?=<!-- end of what was found -->)", re.DOTALL
)
_VERDICTS = re.compile(
    r"(<!-- verdicts, by scripts/experiments_page.py -->\n).*?(?=<!-- end of the verdicts -->)", re.DOTALL
)
_PROMPTS = re.compile(r"(<!-- prompts, by the same script -->\n).*?(?=<!-- end of the prompts -->)", re.DOTALL)
_PROMPTS_HEAD = (
    "| task | examples | KL(exact ‖ model), bits | KL(exact ‖ uniform) | other words |\n|---|---|---|---|---|\n"
)
_HEAD = "| what | role | mean | {interval} | threshold | outcome |\n|---|---|---|---|---|---|\n"
_OUTCOMES = {"met": "met", "missed": "not met", "open": "open", "described": "–"}


def _plain(text: str) -> str:
    """Signs that Markdown would read as emphasis or as the edge of a cell."""
    return re.sub(r"([*_|])", r"\\\1", text)


def _minutes(seconds: float) -> str:
    return counted(round(seconds / 60), "minute") if seconds >= 60 else "less than a minute"


def section(study: Study) -> str:
    """One experiment: question, verdict, setting, thresholds."""
    asked, seeds = study.experiment, ", ".join(map(str, sorted(study.runs)))
    rows = []
    for found in study.judgements:
        criterion = found.criterion
        cells = (
            _plain(criterion.title),
            criterion.role,
            *found.mean_and_interval,
            criterion.threshold,
            _OUTCOMES[found.outcome],
        )
        rows.append(f"| {' | '.join(cells)} |\n")
    made, table = study.made, _HEAD.format(interval=asked.rule.interval) + "".join(rows)
    lines = "".join(f"{_plain(line)}\n\n" for line in study.lines)
    return (
        f"### `{asked.name}`: {study.verdict}\n\n{asked.question} ({asked.claims})\n\n{_plain(asked.setting)}\n\n"
        f"{lines}{table}\n"
        f"Seeds {seeds}; {_minutes(sum(study.seconds.values()))} of one core, {made['date']}, torch {made['torch']}.\n\n"
    )


def gallery() -> str:
    """Every experiment that was run at default size."""
    return "\n" + "".join(
        section(load(RESULTS / f"{name}.json")) for name in experiments() if (RESULTS / f"{name}.json").exists()
    )


def prompts() -> str:
    """A language model beside the exact laws."""
    stored = json.loads((RESULTS / "prompts" / "wind-tunnel.json").read_text(encoding="utf-8"))
    rows = "".join(
        f"| {row['task']} | {row['seen']} | {row['divergence']:.2f} | {row['of_uniform']:.2f} | {1 - row['mass']:.0%} |\n"
        for row in stored["readings"]
    )
    return f"\n{_PROMPTS_HEAD}{rows}\n"


def with_gallery(page: str) -> str:
    """The page, with what was found last between its marks."""
    page = _PROMPTS.sub(lambda found: found[1] + prompts(), page)
    return _MARKS.sub(lambda found: found[1] + gallery(), page)


def with_verdicts(page: str) -> str:
    """The theory's page, with a row for each experiment between its marks."""
    rows = []
    for name, asked in experiments().items():
        if (RESULTS / f"{name}.json").exists():
            found = load(RESULTS / f"{name}.json")
            rows.append(f"| {asked.claims} | {_plain(asked.question)} | `{name}` | {found.verdict} |\n")
    table = "\n| claims | question | experiment | verdict |\n|---|---|---|---|\n" + "".join(rows) + "\n"
    return _VERDICTS.sub(lambda found: found[1] + table, page)


if __name__ == "__main__":
    docs = Path(__file__).parents[1] / "docs"
    for path, made in (
        (docs / "how-to" / "experiments.md", with_gallery),
        (docs / "theory" / "experiments.md", with_verdicts),
    ):
        path.write_text(made(path.read_text(encoding="utf-8")), encoding="utf-8")
