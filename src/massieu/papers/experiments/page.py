"""An experiment as one HTML page: question, verdict, thresholds and results, every number. It runs no script."""

import math
from typing import Any

from massieu.papers.experiments.criterion import Judgement
from massieu.papers.experiments.study import Study
from massieu.report.page import asset, template

_WIDTH = 320
_HEIGHT = 34
_MARGIN = 8
"""Sizes of a drawing, in pixels."""


def page_of(study: Study) -> str:
    """The page; it loads nothing from elsewhere, and every string is escaped.

    Raises:
        MissingExtraError: jinja2 is not installed.
    """
    return template("experiment.html.j2").render(
        experiment=study.experiment,
        study=study,
        rows=[{"judgement": judgement, "strip": strip(judgement)} for judgement in study.judgements],
        rule=study.experiment.rule,
        quantities=sorted({name for numbers in study.runs.values() for name in numbers}),
        seeds=sorted(study.runs),
        style=asset("page.css") + asset("claims.css"),
        undecided=study.verdict.startswith("undecided"),
    )


def strip(judgement: Judgement) -> dict[str, Any]:
    """Positions on a line, in pixels: each seed, the interval, and the allowed range."""
    criterion = judgement.criterion
    seeds = [value for value in judgement.values if math.isfinite(value)]
    ends = [judgement.low, judgement.high, criterion.least, criterion.most]
    shown = seeds + [end for end in ends if math.isfinite(end)]
    if math.isinf(criterion.least):
        shown.append(0.0)  # The line begins at 0, or below.
    low = min(shown)
    high = max(shown)
    span = (high - low) or 1.0

    def position(value: float) -> float:
        inside = min(max(value, low), high)
        return round(_MARGIN + (_WIDTH - 2 * _MARGIN) * (inside - low) / span, 1)

    allowed = None
    if criterion.role != "description":
        allowed = position(criterion.least), position(criterion.most)
    interval = None
    if math.isfinite(judgement.low):
        interval = position(judgement.low), position(judgement.high)
    return {
        "width": _WIDTH,
        "height": _HEIGHT,
        "allowed": allowed,
        "interval": interval,
        "seeds": [position(value) for value in seeds],
    }
