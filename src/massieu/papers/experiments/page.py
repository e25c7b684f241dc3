"""An experiment as one HTML page: question, verdict, thresholds with what the seeds gave, every number. It runs no script."""

import math
from typing import Any

from massieu.papers.experiments.criterion import INTERVALS, Judgement
from massieu.papers.experiments.study import Study
from massieu.report.page import asset, template

_WIDTH, _HEIGHT, _EDGE = 320, 34, 8


def page_of(study: Study) -> str:
    """The page; it asks for nothing from outside, and every string is escaped.

    Raises:
        MissingExtraError: jinja2 is not installed.
    """
    return template("experiment.html.j2").render(
        asked=study.experiment,
        study=study,
        rows=[{"judgement": judgement, "strip": strip(judgement)} for judgement in study.judgements],
        intervals=INTERVALS,
        quantities=sorted({name for numbers in study.runs.values() for name in numbers}),
        seeds=sorted(study.runs),
        style=asset("page.css") + asset("claims.css"),
        undecided=study.verdict.startswith("undecided"),
    )


def strip(judgement: Judgement) -> dict[str, Any]:
    """Places on a line, in pixels: each seed, the interval, and what the threshold allows."""
    criterion = judgement.criterion
    finite = [value for value in (*judgement.values, judgement.low, judgement.high) if math.isfinite(value)]
    ends = [end for end in (criterion.least, criterion.most) if math.isfinite(end)]
    shown = finite + ends + ([0.0] if math.isinf(criterion.least) else [])
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0

    def place(value: float) -> float:
        inside = min(max(value, low), high)
        return round(_EDGE + (_WIDTH - 2 * _EDGE) * (inside - low) / span, 1)

    return {
        "width": _WIDTH,
        "height": _HEIGHT,
        "allowed": None if criterion.role == "description" else (place(criterion.least), place(criterion.most)),
        "interval": (place(judgement.low), place(judgement.high)) if math.isfinite(judgement.low) else None,
        "seeds": [place(value) for value in judgement.values if math.isfinite(value)],
    }
