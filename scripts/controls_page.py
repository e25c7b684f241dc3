"""The tables and the picture of docs/explanation/controls.md: ``python -m scripts.controls_page``.

Rates and coverage are from ``benchmarks/controls.json``; the sentences are those that the cards and the questions print, from
tables whose numbers are made up.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import polars

from massieu.probing.result.findings import findings
from massieu.probing.result.long_table import TableBuilder
from massieu.report.questions import UNCOMPARED, verdict

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "explanation" / "controls.md", ROOT / "benchmarks" / "controls.json"
PICTURE = ROOT / "docs" / "images" / "controls.png"
_MARKS = re.compile(r"(<!-- (\w+), by scripts/controls_page.py -->\n).*?(?=<!-- end -->)", re.DOTALL)
EMPTY = TableBuilder().frame()
Found = dict[str, Any]


def rows(head: list[str], cells: list[list[str]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def share(value: float) -> str:
    """A probability as a percentage."""
    return f"{value:.1%}".replace("%", " %")


def facts(found: Found) -> str:
    """Facts of which the truth is known, the simple way and here."""

    def number(row: Found, name: str) -> str:
        counted = any(word in row["fact"] for word in ("p <", "named", "interval", "share of"))
        return share(row[name]) if counted else f"{row[name]:.3g}".replace("-", "−")

    head = ["what is drawn", "simple", "here", "meant"]
    return rows(
        head,
        [[row["fact"], number(row, "before"), number(row, "after"), row["bound"] or "–"] for row in found["facts"]],
    )


def coverage(found: Found) -> str:
    """How often a 95 % interval holds the truth."""
    windows = sorted({row["windows"] for row in found["coverage"]})
    known = {(row["correlation"], row["windows"]): row for row in found["coverage"]}
    head = ["correlation of neighbours", "", *(f"{each} windows" for each in windows)]
    cells = []
    for correlation in sorted({row["correlation"] for row in found["coverage"]}):
        for name, said in (("before", "simple"), ("after", "here")):
            cells.append([f"{correlation}", said, *(share(known[correlation, each][name]) for each in windows)])
    degrees = [f"{known[0.0, each]['degrees']:.0f}" for each in windows]
    return rows(head, [*cells, ["", "degrees of freedom", *degrees]])


def sampled(found: Found) -> str:
    """The same of what is measured on sampled windows alone."""
    correlations = sorted({row["correlation"] for row in found["sampled"]})
    cells = []
    for windows in sorted({row["windows"] for row in found["sampled"]}):
        of_text = {row["correlation"]: row for row in found["sampled"] if row["windows"] == windows}
        first = of_text[correlations[0]]
        held = [share(of_text[each]["after"]) for each in correlations]
        cells.append([f"{windows}", f"{first['sampled']}", f"{first['degrees']:.0f}", *held])
    named = [f"correlation {each}" for each in correlations]
    return rows(["windows of the text", "of these sampled", "degrees of freedom", *named], cells)


def families(found: Found) -> str:
    """How often any head of a random model is named."""
    head = ["numbers", "heads", "one draw, normal law", "components alone", "with the draws' tails (here)"]
    kinds = ("before", "components", "after")
    return rows(
        head, [[row["noise"], row["design"], *(share(row[kind]) for kind in kinds)] for row in found["families"]]
    )


def scales(found: Found) -> str:
    """The same of statistics that are compared by their logit or logarithm, by how large the error over the text is."""
    known = {(row["numbers"], row["noise"], row["text"]): share(row["after"]) for row in found["scales"]}
    noises = list(dict.fromkeys(row["noise"] for row in found["scales"]))
    cells = [
        [numbers, f"{text:g}", *(known[numbers, noise, text] for noise in noises)]
        for numbers in dict.fromkeys(row["numbers"] for row in found["scales"])
        for text in sorted({row["text"] for row in found["scales"]})
    ]
    return rows(["random heads have", "error over the text, in deviations of heads", *noises], cells)


def counted_of(value: list[Any]) -> str:
    """How many of how many, with the interval of the probability."""
    count, number, low, high = value
    return f"{count} of {number} ({share(low)} to {share(high)})"


def models(found: Found) -> str:
    """Random models, probed as if they were trained."""
    before, after = found["models"]

    def said(value: Any) -> str:
        return counted_of(value) if isinstance(value, list) else share(value)

    table = rows(
        ["announced", "simple", "here"],
        [[name, *(said(each.get(name, 0.0)) for each in (before, after))] for name in after if name != "runs"],
    )
    opening = f"{before['runs']} models were probed with the simple tests, and {after['runs']} with these."
    return f"{opening}\n\n{table}"


def planted(found: Found) -> str:
    """Heads that were planted."""
    return rows(
        ["planted", "found", "found, and no other head"],
        [[row["kind"], counted_of(row["found"]), counted_of(row["alone"])] for row in found["planted"]],
    )


def trained(found: Found) -> str:
    """What stays of the findings of trained models."""
    parts = []
    for name, model in sorted(found["trained"].items()):
        windows, announced = (
            model["tokens"] // model["window"],
            [row["card"] for row in model["cards"] if row["announced"]],
        )
        cards = f" Cards that are announced: {'; '.join(announced)}." if announced else " No card is announced."
        opening = f"**{name}**, {model['tokens']:,} tokens of Python's help in {windows} windows.{cards}"
        ordered = sorted(model["statistics"], key=lambda row: (-row["large"], -row["here"], row["statistic"]))
        counts = ("heads", "simple", "here", "large")
        cells = [[f"`{row['statistic']}`", *(f"{row[each]}" for each in counts)] for row in ordered]
        parts.append(f"{opening}\n\n{rows(['statistic', 'heads', 'simple', 'here', 'and large enough'], cells)}")
    return "\n".join(parts)


def table(name: str, value: float, **said: Any) -> polars.DataFrame:
    """The rows of one statistic of two heads, or of one sublayer; what is said takes the place of the usual numbers."""
    given = {"error": 0.01, "random": 0.05, "p_value": 1e-9, "q_value": 1e-9} | said
    made, heads = TableBuilder(), "change" not in name
    numbers = np.array([value, 0.3 * value]) if heads else value
    for part in ("", "/first_half", "/second_half"):
        made.add("layers.3 attention", 3, f"{name}{part}", numbers, given["error"], 9_216)
    for part in ("random", "p_value", "q_value", "mismatched", "entropy"):
        if given.get(part) is not None:
            suffix = "reinitialised" if part == "random" else part
            made.add(
                "layers.3 attention", 3, f"{name}/{suffix}", np.broadcast_to(given[part], np.shape(numbers)), 0.004, 8
            )
    return made.frame()


SINK, SHARP, CLIMB, RANK, VOLUME = (
    *("weight_first", "entropy_fraction", "own_write_step_selective"),
    *("effective_rank_change", "log_determinant_change"),
)
CASES: dict[str, tuple[int, polars.DataFrame]] = {
    "first token": (0, table(SINK, 0.9)),
    "sharpest and flattest": (1, table(SHARP, 0.9, random=0.6)),
    "own write": (2, table(CLIMB, 0.4, random=0.01, mismatched=0.02)),
    "rank falls": (3, table(RANK, -12.0, random=-1.0)),
    "rank rises": (3, table(RANK, 4.0, random=9.0)),
    "volume": (3, polars.concat([table(RANK, -0.2, random=-0.1), table(VOLUME, -0.8, random=-0.1)])),
    "no control": (0, table(SINK, 0.9, random=None, p_value=None)),
    "one window": (0, table(SINK, 0.9, error=np.nan)),
    "few windows": (0, table(SINK, 0.9, p_value=None)),
    "small": (0, table(SINK, 0.06)),
    "as random heads": (0, table(SINK, 0.3, random=0.2, p_value=0.03)),
    "two heads": (2, table(CLIMB, 0.4, random=0.01, mismatched=np.nan)),
    "not clear of 0": (3, table(RANK, -12.0, error=8.0, random=40.0)),
    "not measured": (0, EMPTY),
}


def sentences(_: Found) -> str:
    """Every sentence that a card or a verdict can print."""
    cells = []
    for name, (place, made) in CASES.items():
        heads, layers = (EMPTY, made) if place == 3 else (made, EMPTY)
        cells.append([name, findings(heads, layers, (30.0, 30.0))[place].sentence])
    for name, (tested, named, above) in VERDICTS.items():
        flags = [np.arange(12) < count for count in (tested, named, above)]
        cells.append([name, verdict(*flags, "heads")])
    return rows(["case", "sentence"], [*cells, ["verdict: no random models", UNCOMPARED]])


VERDICTS = {
    "verdict: above": (12, 5, 5),
    "verdict: below": (12, 5, 0),
    "verdict: both ways": (12, 6, 3),
    "verdict: none": (12, 0, 0),
    "verdict: one head": (1, 1, 1),
    "verdict: untested": (0, 0, 0),
}
TABLES = {
    each.__name__: each for each in (facts, coverage, sampled, families, scales, models, planted, trained, sentences)
}


def with_tables(page: str, found: Found) -> str:
    """The page, with the tables as they are now between its marks."""
    return _MARKS.sub(lambda mark: mark[1] + "\n" + TABLES[mark[2]](found) + "\n", page)


def draw(found: Found) -> None:
    """Power curves beside the former test, and coverage by correlation."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.4), layout="constrained")
    colours = ("#2a6f97", "#c8553d", "#4f8a3d")
    for noise, colour in zip(dict.fromkeys(row["noise"] for row in found["power"]), colours, strict=True):
        known = [row for row in found["power"] if row["noise"] == noise]
        distance = [row["distance"] for row in known]
        axes[0].plot(distance, [row["after"] for row in known], "o-", color=colour, label=noise)
        axes[0].plot(distance, [row["before"] for row in known], ":", color=colour)
    axes[0].set(xlabel="distance from random heads, standard deviations", ylabel="share of runs in which it is named")
    axes[0].legend(title="solid: here, dotted: simple", fontsize=7, title_fontsize=7)
    for correlation, colour in zip((0.0, 0.3, 0.5, 0.8), ("#777777", *colours), strict=True):
        known = [row for row in found["coverage"] if row["correlation"] == correlation]
        windows = [row["windows"] for row in known]
        axes[1].plot(windows, [row["after"] for row in known], "o-", color=colour, label=f"{correlation}")
        axes[1].plot(windows, [row["before"] for row in known], ":", color=colour)
    axes[1].set(xscale="log", xlabel="windows", ylabel="share of 95 % intervals that hold the truth", ylim=(0.4, 1))
    axes[1].axhline(0.9, color="black", linewidth=0.5)
    axes[1].legend(title="correlation of neighbours", fontsize=7, title_fontsize=7)
    figure.savefig(PICTURE, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
    draw(results)
    from scripts.example_outputs import shrink

    shrink(PICTURE)
