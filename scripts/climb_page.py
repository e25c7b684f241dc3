"""docs/explanation/climb.md and its eight figures, from stored numbers alone: ``python -m scripts.climb_page``."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

import numpy as np

from massieu.foundation.numbers import number
from massieu.papers.experiments.climb import HYPOTHESES, LEAST_CLIMB, LEAST_LOSS
from massieu.papers.experiments.climb_tasks import CHECKPOINTS, HALVES, TASKS
from massieu.papers.experiments.criterion import Judgement
from massieu.papers.experiments.hypotheses import StudentHolm
from massieu.papers.experiments.run import RESULTS, load
from massieu.papers.experiments.study import Study

ROOT = Path(__file__).parents[1]
TEMPLATE = ROOT / "scripts" / "climb_page.txt"
PAGE = ROOT / "docs" / "explanation" / "climb.md"
IMAGES = ROOT / "docs" / "images" / "climb"
_EXAMPLES = RESULTS / "climb" / "examples.json"
_WIDTH, _HEIGHT = 520, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 30, 40
"""Sizes of a figure, in pixels."""


# --- figures -----------------------------------------------------------------------------------------------------------


class Group(NamedTuple):
    """What stands above one label, a word on each line: points, and the interval of their mean if there is one."""

    label: str
    points: Sequence[float]
    interval: tuple[float, float] | None = None


class Figure(NamedTuple):
    """A figure, and what it shows in words."""

    name: str
    caption: str
    drawing: str


class Axis:
    """The vertical axis: from values to pixels."""

    def __init__(self, values: Sequence[float]) -> None:
        low, high = min(0.0, *values), max(0.0, *values)
        room = 0.05 * ((high - low) or 1.0)
        self.low, self.high = low - room, high + room

    def at(self, value: float) -> float:
        """The height of a value on the page, from above."""
        share = (value - self.low) / (self.high - self.low)
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)

    def ticks(self) -> list[float]:
        """Four to eight round values."""
        step = 10.0 ** np.floor(np.log10(self.high - self.low))
        for part in (1.0, 0.5, 0.2, 0.1):
            first, last = np.ceil(self.low / (step * part)), np.floor(self.high / (step * part))
            if last - first >= 3:
                break
        return [float(round(tick * step * part, 12)) for tick in np.arange(first, last + 1)]


def _frame(title: str, axis: Axis, least: float | None) -> Iterator[str]:
    """The title, the ticks, the line at 0, and the dashed line at the smallest effect."""
    yield f'<text x="{_LEFT}" y="18" font-weight="bold">{escape(title)}</text>'
    for tick in axis.ticks():
        y = axis.at(tick)
        yield f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}" stroke="#dfe1e3"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{f"{tick:g}".replace("-", "−")}</text>'
    marks = [(0.0, "")] if least is None else [(0.0, ""), (least, ' stroke-dasharray="4 3"')]
    for value, dashes in marks:
        y = axis.at(value)
        yield f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}" stroke="#5b626b"{dashes}/>'


def _whole(title: str, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'role="img" aria-label="{escape(title)}" font-family="sans-serif" font-size="12" fill="#1a1d21">\n'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def strips(title: str, groups: Sequence[Group], least: float | None = None) -> str:
    """The points of each group above its label, beside their interval."""
    ends = [end for group in groups if group.interval for end in group.interval]
    axis = Axis([value for group in groups for value in group.points] + ends)
    parts = list(_frame(title, axis, least))
    step = (_WIDTH - _LEFT - _RIGHT) / len(groups)
    for place, group in enumerate(groups):
        x = round(_LEFT + (place + 0.5) * step, 1)
        parts += [
            f'<circle cx="{x}" cy="{axis.at(value)}" r="3" fill="#005a9c" fill-opacity="0.5"/>'
            for value in group.points
        ]
        if group.interval is not None:
            low, high = map(axis.at, group.interval)
            parts.append(
                f'<line x1="{x + 10}" x2="{x + 10}" y1="{low}" y2="{high}" stroke="#a63603" stroke-width="2"/>'
            )
        for line, word in enumerate(group.label.split(" ")):
            y = _HEIGHT - 24 + 14 * line
            parts.append(f'<text x="{x}" y="{y}" text-anchor="middle">{escape(word)}</text>')
    return _whole(title, parts)


def course(title: str, own: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> str:
    """A line for each seed over the checkpoints: own writes, and other heads' writes dashed."""
    axis = Axis([value for line in (*own, *others) for value in line])
    parts = list(_frame(title, axis, LEAST_CLIMB))
    step = (_WIDTH - _LEFT - _RIGHT) / len(CHECKPOINTS)
    places = [round(_LEFT + (place + 0.5) * step, 1) for place in range(len(CHECKPOINTS))]
    for lines, look in ((own, 'stroke="#005a9c"'), (others, 'stroke="#a63603" stroke-dasharray="4 3"')):
        for line in lines:
            points = " ".join(f"{x},{axis.at(value)}" for x, value in zip(places, line, strict=True))
            parts.append(f'<polyline points="{points}" fill="none" {look}/>')
    for x, share in zip(places, CHECKPOINTS, strict=True):
        parts.append(f'<text x="{x}" y="{_HEIGHT - 16}" text-anchor="middle">{share} %</text>')
    return _whole(title, parts)


def figures(study: Study) -> list[Figure]:
    """The eight figures of the page."""
    by_quantity = {judgement.criterion.quantity: judgement for judgement in study.judgements}
    made = []
    for name, quantity, title in (
        ("random", "over_fresh", "own write, trained − random models, nats"),
        ("others", "over_others", "own write − other heads' writes, nats"),
        ("training", "gain", "own write, after − before training, nats"),
    ):
        groups = [
            _group(f"{task} {half}", by_quantity[f"{task}_{half}_{quantity}"]) for task in TASKS for half in HALVES
        ]
        caption = (
            f"Rise of selective log Z: {title}. Points are seeds, bars intervals, the dashed line the smallest effect."
        )
        made.append(Figure(name, caption, strips(title, groups, LEAST_CLIMB)))
    for task in TASKS:
        own, others = ([_along(run, task, kind) for run in _runs(study)] for kind in ("own", "others"))
        caption = (
            f"Course of training, {task}, half B: the rise along own writes (lines) and along other heads' writes (dashed), a "
            "line for each seed."
        )
        made.append(Figure(f"course_{task}", caption, course(f"{task}: rise of selective log Z, nats", own, others)))
    groups = [
        Group(f"{task} {label}", [value for run in _runs(study) for value in heads_of(run, task, kind)])
        for task in TASKS
        for kind, label in (("fresh_head", "random"), ("head", "trained"))
    ]
    caption = (
        "Single heads on half A: rise along the own write in one random model of each seed, and in the trained one."
    )
    made.append(Figure("heads", caption, strips("rise along the own write, single heads, nats", groups)))
    groups = [_group(task, by_quantity[f"{task}_loss_apart"]) for task in TASKS]
    title = "loss without the head that climbs − without its partner"
    caption = (
        "H3: nats, for the regression a share of the loss. Points are seeds, bars intervals, the dashed line is 0.005."
    )
    made.append(Figure("loss", caption, strips(title, groups, min(LEAST_LOSS.values()))))
    return made


def _group(label: str, judgement: Judgement) -> Group:
    return Group(label, judgement.values, (judgement.low, judgement.high))


def _runs(study: Study) -> list[dict[str, float]]:
    return [study.runs[seed] for seed in sorted(study.runs)]


def _along(run: dict[str, float], task: str, kind: str) -> list[float]:
    """The numbers of a seed at the checkpoints, on half B."""
    return [run[f"{task}_B_{kind}_{share}"] for share in CHECKPOINTS]


def heads_of(run: dict[str, float], task: str, kind: str) -> list[float]:
    """The heads of a seed on half A."""
    start = f"{task}_A_{kind}_"
    return [value for name, value in run.items() if name.startswith(start)]


# --- sentences -----------------------------------------------------------------------------------------------------------


def _ends(study: Study, quantity: str) -> tuple[str, str]:
    """The least and the greatest end of the intervals of a quantity, over tasks and halves."""
    found = [each for each in study.judgements if each.criterion.quantity.endswith(quantity)]
    return number(min(each.low for each in found)), number(max(each.high for each in found))


def _mean(study: Study, quantity: str) -> float:
    return float(np.mean([run[quantity] for run in _runs(study)]))


def _table(study: Study) -> str:
    """The one table: what is described without a verdict, by task, as means over seeds on half B."""
    head = (
        "| task | own write, random | own write, trained | other heads' writes, trained | retrieval slope, random | trained | "
        "cosine with the conditional mean, random | trained | pairs |\n" + "|---" * 9 + "|\n"
    )
    rows = []
    for task in TASKS:
        cells = [
            *(f"{task}_B_{name}" for name in ("own_0", "own_100", "others_100")),
            *(f"{task}_retrieval_slope_{share}" for share in (0, 100)),
            *(f"{task}_output_along_conditional_mean_{share}" for share in (0, 100)),
        ]
        pairs = sum(run[f"{task}_pairs"] for run in _runs(study))
        values = " | ".join(f"{_mean(study, cell):.3f}".replace("-", "−") for cell in cells)
        rows.append(f"| {task} | {values} | {pairs:.0f} |\n")
    return head + "".join(rows)


def _of_heads(study: Study) -> str:
    """How many heads climb although their mean does not."""
    said = []
    for task in TASKS:
        trained, random = (
            [value for run in _runs(study) for value in heads_of(run, task, kind)] for kind in ("head", "fresh_head")
        )
        above = [sum(value > LEAST_CLIMB for value in values) for values in (trained, random)]
        said.append(f"* {task}: {above[0]} of {len(trained)} trained heads, {above[1]} of {len(random)} random ones\n")
    return "".join(said)


def _of_course(study: Study) -> str:
    """At which checkpoint the rise is farthest from 0."""
    said = []
    for task in TASKS:
        means = [_mean(study, f"{task}_B_own_{share}") for share in CHECKPOINTS]
        place = int(np.argmax(np.abs(means)))
        said.append(f"{task} at {CHECKPOINTS[place]} % ({number(means[place], 0.01)} nats)")
    return ", ".join(said)


def _of_examples() -> str:
    """What pretrained models show; nothing if none was read."""
    if not _EXAMPLES.exists():
        return "No pretrained model was read.\n"
    lines = []
    for row in json.loads(_EXAMPLES.read_text(encoding="utf-8")):
        own, others, random = (number(row[name], 0.01) for name in ("own", "others", "random_models"))
        lines.append(
            f"* {row['model']}, {row['text']}: {own} nats along own writes, {others} along other heads' writes, {random} in "
            f"random models. It is larger along the own write in {row['above_others']} of {row['heads']} heads.\n"
        )
    return "".join(lines)


def page(study: Study) -> str:
    """The page."""
    low, high = _ends(study, "_over_fresh")
    other_low, other_high = _ends(study, "_over_others")
    gain_low, gain_high = _ends(study, "_gain")
    pictures = "\n\n".join(
        f"![{each.caption}](../images/climb/{each.name}.svg)\n\n{each.caption}" for each in figures(study)
    )
    verdicts = StudentHolm(HYPOTHESES).verdicts(_runs(study))
    lines = "".join(f"* {line}\n" for line in study.lines)
    loss = [each for each in study.judgements if each.criterion.quantity.endswith("_loss_apart")]
    losses = ", ".join(
        f"{task} {number(each.low, 0.01)} to {number(each.high, 0.01)}" for task, each in zip(TASKS, loss, strict=True)
    )
    return TEMPLATE.read_text(encoding="utf-8").format(
        verdict=study.verdict,
        verdict_of_loss=verdicts["H3"],
        least=LEAST_CLIMB,
        low=low,
        high=high,
        other_low=other_low,
        other_high=other_high,
        gain_low=gain_low,
        gain_high=gain_high,
        losses=losses,
        lines=lines,
        heads=_of_heads(study),
        course=_of_course(study),
        pictures=pictures,
        table=_table(study),
        examples=_of_examples(),
    )


def main() -> None:
    """Write the page and the figures."""
    study = load(RESULTS / "climb.json")
    IMAGES.mkdir(parents=True, exist_ok=True)
    for figure in figures(study):
        (IMAGES / f"{figure.name}.svg").write_text(figure.drawing, encoding="utf-8")
    PAGE.write_text(page(study), encoding="utf-8")


if __name__ == "__main__":
    main()
