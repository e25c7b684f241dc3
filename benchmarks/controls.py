"""How often nothing is announced as something: simulations of the probe's errors, controls and tests.

    python benchmarks/controls.py [PART ...] [--models models.jsonl] [--planted planted.jsonl] [--trained trained.json]

Every row is a fact of which the truth is known, because the numbers were drawn: of the simple way that the probe's replaced
(one draw of a random model, errors from independent windows, the normal law), and of the probe's own. The files are what
`control_models.py`, `control_planted.py` and `control_trained.py` wrote. What is not asked for stays in
``benchmarks/controls.json`` as it is, and so do 60 random models that were probed with the simple tests, which are gone.
`scripts/controls_page.py` makes the tables and the picture of ``docs/explanation/controls.md`` from it. A few minutes.
"""

import argparse
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats

from massieu.papers.experiments.criterion import interval
from massieu.probing.capture.tokens import is_sampled
from massieu.probing.sums.comparisons import Arrangement, BesideRandom, with_their_tails
from massieu.probing.sums.random_heads import RandomHeads, Scale, unscaled
from massieu.probing.sums.significance import difference_p, other_heads, two_sided_p
from massieu.probing.sums.unit_errors import ratio_error
from massieu.probing.sums.units import BlockSums, Estimate, Units
from massieu.storage.record import Statistic

PATH = Path(__file__).with_suffix(".json")
RUNS = 4_000
NUMBER = Statistic("made up", scale="number", smallest=0.05)
Row = dict[str, Any]


def main() -> None:
    """Run the simulations that are asked for, all of them unless some are named, and store what came out."""
    simulations = {
        "facts": facts,
        "coverage": coverage,
        "families": families,
        "power": power,
        "sampled": sampled_coverage,
        "scales": on_scales,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(simulations))
    for name in ("models", "planted", "trained"):
        parser.add_argument(f"--{name}", type=Path)
    asked = parser.parse_args()
    found = json.loads(PATH.read_text())
    files = (asked.models, asked.planted, asked.trained)
    for part in asked.parts or ([] if any(files) else simulations):
        found[part] = simulations[part](np.random.default_rng(list(simulations).index(part)))
        for row in found[part]:
            print(part, row, flush=True)
    if asked.models is not None:
        found["models"][1:] = [models(lines(asked.models))]
    if asked.planted is not None:
        found["planted"] = planted(lines(asked.planted))
    if asked.trained is not None:
        found["trained"] = json.loads(asked.trained.read_text())
    PATH.write_text(json.dumps(found, indent=1) + "\n")


def lines(path: Path) -> list[Row]:
    """A row for each line of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def autoregressive(rng: np.random.Generator, correlation: float, windows: int, runs: int) -> np.ndarray:
    """Stationary series of unit variance, one a column."""
    series = rng.standard_normal((windows, runs))
    for time in range(1, windows):
        series[time] = correlation * series[time - 1] + np.sqrt(1 - correlation**2) * series[time]
    return series


def plain_error(totals: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ratio and its error as if units were independent, as it was."""
    value, units = totals.sum(0) / counts.sum(0), len(totals)
    return value, np.sqrt(units / (units - 1) * ((totals - value * counts) ** 2).sum(0)) / counts.sum(0)


def normal_p(difference: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Two-sided p-values by the normal law."""
    return 2 * scipy.stats.norm.sf(np.abs(difference) / error)


def student_p(difference: np.ndarray, error: np.ndarray, degrees: Any) -> np.ndarray:
    """Two-sided p-values by Student's law."""
    return 2 * scipy.stats.t.sf(np.abs(difference) / error, degrees)


def rate(p_values: np.ndarray, level: float = 0.05) -> float:
    """The share of p-values below a level."""
    return round(float((p_values < level).mean()), 4)


# --- errors ----------------------------------------------------------------------------------------------------------


def coverage(rng: np.random.Generator) -> list[Row]:
    """In what share of texts a 95 % interval holds the truth, by the correlation of neighbouring windows."""
    rows = []
    for correlation, windows in product((0.0, 0.3, 0.5, 0.8), (4, 5, 8, 16, 32, 64, 300)):
        series = autoregressive(rng, correlation, windows, RUNS)
        sums = BlockSums((RUNS,), Units())
        sums.add(np.stack([series, np.ones_like(series)], 1))
        totals, counts = np.moveaxis(sums.sums[: len(sums.rows)], 1, 0)
        value, error = plain_error(totals, counts)
        today = sums.estimate()
        reach = scipy.stats.t.ppf(0.975, today.degrees) * today.standard_error
        rows.append(
            {
                "correlation": correlation,
                "windows": windows,
                "before": round(float((np.abs(value) < 1.96 * error).mean()), 3),
                "after": round(float((np.abs(today.value) < reach).mean()), 3),
                "degrees": float(np.max(today.degrees)),
            }
        )
    return rows


def sampled_coverage(rng: np.random.Generator) -> list[Row]:
    """The same for what is measured on the sampled windows of a text alone, by how many windows the text has."""
    rows = []
    for correlation, windows in product((0.0, 0.3, 0.5, 0.8), (40, 200, 600)):
        chosen = [window for window in range(windows) if is_sampled(window)]
        series = autoregressive(rng, correlation, windows, RUNS)[chosen]
        sums = BlockSums((RUNS,), Units(sampled=True))
        sums.add(np.stack([series, np.ones_like(series)], 1))
        found = sums.estimate()
        reach = scipy.stats.t.ppf(0.975, found.degrees) * found.standard_error
        share = round(float((np.abs(found.value) < reach).mean()), 3)
        rows.append(
            {
                "correlation": correlation,
                "windows": windows,
                "sampled": len(chosen),
                "after": share,
                "degrees": float(np.max(found.degrees)),
            }
        )
    return rows


def facts(rng: np.random.Generator) -> list[Row]:
    """What was found wrong, one by one."""
    rows: list[Row] = []

    def add(fact: str, before: float, after: float, bound: str) -> None:
        rows.append({"fact": fact, "before": round(before, 4), "after": round(after, 4), "bound": bound})

    drawn = rng.standard_normal((7, 50_000))
    sides = [(part.mean(0), part.std(0, ddof=1) / np.sqrt(len(part))) for part in (drawn[:5], drawn[5:])]
    difference, error = sides[0][0] - sides[1][0], np.hypot(sides[0][1], sides[1][1])
    degrees = [np.full(50_000, float(each)) for each in (4, 1)]
    welch = difference_p(*sides[0], degrees[0], *sides[1], degrees[1])
    add("5 windows against 2: p < 0.05", rate(normal_p(difference, error)), rate(welch), "≤ 0.06")
    add("5 windows against 2: p < 1e−6", rate(normal_p(difference, error), 1e-6), rate(welch, 1e-6), "")
    two = rng.standard_normal((2, 50_000))
    value, error = plain_error(two, np.ones_like(two))
    _, now, freedom = ratio_error(two, np.ones_like(two), 2)
    add(
        "2 windows, beyond two errors (now p < 0.05)",
        float((np.abs(value) > 2 * error).mean()),
        rate(student_p(value, now, freedom)),
        "≤ 0.06",
    )
    for correlation in (0.5, 0.8):
        add(f"stated error over the true one, correlation {correlation}, 64 windows", *stated(rng, correlation), "≈ 1")
    add("picked on one half, printed from the other: bias in errors, correlation 0.5", *halves(rng, 0.5), "≈ 0")
    for windows in (4, 16, 64):
        series = autoregressive(rng, 0.3, windows, 50_000)
        value, error = plain_error(series, np.ones_like(series))
        _, now, freedom = ratio_error(series, np.ones_like(series), windows)
        before, after = rate(student_p(value, error, windows - 1)), rate(student_p(value, now, freedom))
        add(f"two models that do not differ, {windows} windows with correlation 0.3: p < 0.05", before, after, "≤ 0.06")
    for documents in (4, 5, 16, 64):
        lengths = np.exp(rng.standard_normal((documents, 50_000)))
        totals = lengths * rng.standard_normal(lengths.shape)
        value, error = plain_error(totals, lengths)
        _, now, freedom = ratio_error(totals, lengths, None)
        before, after = rate(student_p(value, error, documents - 1)), rate(student_p(value, now, freedom))
        add(
            f"two models that do not differ, {documents} documents of lognormal lengths: p < 0.05",
            before,
            after,
            "≤ 0.06",
        )
    for windows in (4, 16, 64):
        add(
            f"a number and its control over {windows} windows each with correlation 0.3: p < 0.05",
            *control_windows(rng, windows),
            "≤ 0.06",
        )
    add(
        "“n of m heads differ” where 20 of 100 do, 64 windows with correlation 0.3: share of wrong ones among them",
        *wrongly_counted(rng),
        "≤ 0.05",
    )
    for name, law in STEPS.items():
        add(f"a model of 6 layers of 12 exchangeable heads, “{name}”: any head named", *mismatched(rng, law), "≤ 0.06")
    uniform = rng.standard_normal((500, 12, 12))
    p = np.array([own_p(each)[0] for each in uniform])
    add(
        "heads beside other heads' writes, 500 runs: Kolmogorov–Smirnov p of uniform p-values",
        scipy.stats.kstest(p, "uniform").pvalue,
        scipy.stats.kstest(p, "uniform").pvalue,
        "> 0.001",
    )
    for name, noise in EXPERIMENTS.items():
        held = np.mean([low <= noise.mean <= high for low, high in (interval(noise.draw(rng)) for _ in range(2_000))])
        add(
            f"an experiment's bootstrap interval over 5 seeds holds the mean, {name}",
            float(held),
            float(held),
            "is told",
        )
    return rows


def control_windows(rng: np.random.Generator, windows: int) -> tuple[float, float]:
    """How often a number differs from a control over other windows that has the same law, as it was and as it is."""
    sides = [autoregressive(rng, 0.3, windows, 20_000) for _ in range(2)]
    (value, error), (other, other_error) = (plain_error(each, np.ones_like(each)) for each in sides)
    one, two = (ratio_error(each, np.ones_like(each), windows) for each in sides)
    return rate(normal_p(value - other, np.hypot(error, other_error))), rate(difference_p(*one, *two))


def wrongly_counted(rng: np.random.Generator, runs: int = 500) -> tuple[float, float]:
    """The mean share of heads that do not differ among those that are counted, at a false discovery rate of 5 %."""
    heads, differing, windows = 100, 20, 64
    series = autoregressive(rng, 0.3, windows, runs * heads)
    series += 8 * series.mean(0).std() * (np.arange(runs * heads) % heads < differing)
    value, error = plain_error(series, np.ones_like(series))
    _, now, degrees = ratio_error(series, np.ones_like(series), windows)
    shares = []
    for p in (normal_p(value, error), student_p(value, now, degrees)):
        named = np.apply_along_axis(scipy.stats.false_discovery_control, 1, p.reshape(runs, heads)) < 0.05
        shares.append(float((named[:, differing:].sum(1) / np.maximum(named.sum(1), 1)).mean()))
    return shares[0], shares[1]


def stated(rng: np.random.Generator, correlation: float) -> tuple[float, float]:
    """The mean stated error over the true one, as it was and as it is."""
    series = autoregressive(rng, correlation, 64, 20_000)
    value, error = plain_error(series, np.ones_like(series))
    _, now, _ = ratio_error(series, np.ones_like(series), 64)
    return tuple(float(np.sqrt((each**2).mean()) / value.std()) for each in (error, now))  # pyright: ignore[reportReturnType]


def halves(rng: np.random.Generator, correlation: float) -> tuple[float, float]:
    """How far the number printed of the best of 50 heads lies above the truth, in its true errors; 32 windows."""
    series = autoregressive(rng, correlation, 32, 500 * 50)
    sums = BlockSums((500 * 50,), Units())
    sums.add(np.stack([series, np.ones_like(series)], 1))
    found = []
    for parts in ((slice(0, None, 2), slice(1, None, 2)), sums.halves()):
        first, second = (sums.estimate(part).value.reshape(500, 50) for part in parts)
        printed = np.take_along_axis(second, first.argmax(1)[:, None], 1)
        found.append(float(printed.mean() / second.std()))
    return found[0], found[1]


STEPS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {
    "step_selective": lambda rng, shape: (
        rng.standard_normal(shape) ** 2 * np.exp(rng.standard_normal((*shape[:-1], 1)))
    ),
    "sharpens": lambda rng, shape: rng.binomial(40, 0.6, shape) / 40,
}
"""Effects of head g's write as head h sees it: squares of normal numbers times the size of the write; shares of 40 queries."""


def own_p(matrix: np.ndarray) -> np.ndarray:
    """Each head's effect beside those of the other heads."""
    mean, deviation, number = other_heads(matrix)
    heads, zeros = len(matrix), np.zeros(len(matrix))
    return two_sided_p(np.diag(matrix), zeros, mean, deviation, np.full(heads, number), np.full(heads, np.inf))


def mismatched(rng: np.random.Generator, law: Callable[..., np.ndarray], runs: int = 2_000) -> tuple[float, float]:
    """How often any head is named, against other heads' writes alone and against random models too."""
    layers, heads, named = 6, 12, np.zeros(2)
    for _ in range(runs):
        effects = law(rng, (9, layers, heads, heads))  # the model's own and eight draws
        p = np.stack([own_p(each) for each in effects[0]])
        own = np.einsum("dlhh->dlh", effects)
        exact = np.zeros(heads), np.ones(heads), np.full(heads, np.inf)
        compared = [
            BesideRandom.of(Estimate(own[0, layer], *exact), own[1:, layer], NUMBER, Arrangement(heads))
            for layer in range(layers)
        ]
        both = np.maximum(p, np.stack(with_their_tails(compared)))
        named += [(scipy.stats.false_discovery_control(each.ravel()) < 0.05).any() for each in (p, both)]
    return float(named[0] / runs), float(named[1] / runs)


class Experiment:
    """Five numbers of one law."""

    def __init__(self, draw: Callable[[np.random.Generator], np.ndarray], mean: float) -> None:
        self.draw, self.mean = draw, mean


EXPERIMENTS = {
    "normal": Experiment(lambda rng: rng.standard_normal(5), 0.0),
    "lognormal": Experiment(lambda rng: np.exp(rng.standard_normal(5)), float(np.exp(0.5))),
    "one in ten runs diverges": Experiment(lambda rng: rng.standard_normal(5) + 20 * (rng.random(5) < 0.1), 2.0),
}


# --- the law of random heads -----------------------------------------------------------------------------------------

NOISE: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "heavy tails (t, 4 degrees)": lambda rng, shape: rng.standard_t(4, shape) / np.sqrt(2),
    "skew (lognormal)": lambda rng, shape: (np.exp(0.5 * rng.standard_normal(shape)) - np.exp(0.125)) / 0.604,
}
DESIGNS = {
    "8 draws of 12 heads": (8, 12, 1),
    "8 draws of 2 heads": (8, 2, 1),
    "8 draws, each head by itself": (8, 1, 1),
    "8 draws of 3 groups of 3 heads": (8, 3, 3),
    "4 draws of 12 heads": (4, 12, 1),
    "2 draws of 12 heads": (2, 12, 1),
}


def random_model(rng: np.random.Generator, noise: str, design: tuple[int, int, int]) -> np.ndarray:
    """Numbers of the heads of a model and of its draws: effects of the draw, of groups and of heads."""
    draws, clusters, heads = design
    law = NOISE[noise]
    model = 0.5 * law(rng, (draws + 1, 1, 1)) + law(rng, (draws + 1, clusters, 1))
    return (model + (0.5 * law(rng, (draws + 1, clusters, heads)) if heads > 1 else 0.0)).reshape(draws + 1, -1)


def measured(rng: np.random.Generator, values: np.ndarray) -> Estimate:
    """The model's heads over a text: errors of 0.2 with 5 degrees of freedom."""
    error = 0.2 * np.sqrt(rng.chisquare(5, values.shape) / 5)
    noise = 0.2 * rng.standard_normal(values.shape)
    return Estimate(values + noise, error, np.ones_like(values), np.full(values.shape, 5.0))


def tested(own: Estimate, draws: np.ndarray, clusters: int) -> dict[str, np.ndarray]:
    """p-values of a model's heads: against one draw by the normal law, by the components alone, and with the draws' tails."""
    compared = BesideRandom.of(own, draws, NUMBER, Arrangement(clusters))
    law = RandomHeads.of(Arrangement(clusters).of(draws))
    former = normal_p(own.value - draws[0], np.hypot(own.standard_error, 0.2))
    return {
        "before": former,
        "components": law.p_value(own.value, own.standard_error, own.degrees),
        "after": with_their_tails([compared])[0],
    }


def families(rng: np.random.Generator) -> list[Row]:
    """How often any head of a random model is named at 5 %."""
    rows = []
    for (noise, _), (name, design) in product(NOISE.items(), DESIGNS.items()):
        named = dict.fromkeys(("before", "components", "after"), 0)
        for _ in range(2_000):
            model = random_model(rng, noise, design)
            p = tested(measured(rng, model[0]), model[1:], design[1])
            for kind, each in p.items():
                named[kind] += each.min() * len(each) < 0.05
        rows.append({"noise": noise, "design": name} | {kind: count / 2_000 for kind, count in named.items()})
    return rows


SCALES: dict[str, tuple[Scale, float, float]] = {
    "a share about 0.02": ("share", -4.0, 0.5),
    "a share about 0.5": ("share", 0.0, 0.5),
    "a share about 0.98": ("share", 4.0, 0.5),
    "a share about 0.157 ± 0.001": ("share", -1.68, 0.006),
    "a positive number about 1": ("positive", 0.0, 0.5),
}
"""Where the heads of random models lie on a scale: centre, and width of the heads' part there."""


def on_scales(rng: np.random.Generator, runs: int = 2_000) -> list[Row]:
    """How often any of 12 heads of a random model is named at 5 %, of statistics that are compared on a scale."""
    rows = []
    for (name, (scale, centre, width)), noise, relative in product(SCALES.items(), NOISE, (0.2, 1.0)):
        statistic, named = Statistic("made up", scale=scale, smallest=0.05), 0
        step = width * (unscaled(np.array(centre + 1e-3), scale) - unscaled(np.array(centre - 1e-3), scale)) / 2e-3
        for _ in range(runs):
            model = unscaled(centre + width * random_model(rng, noise, (8, 12, 1)), scale)
            error = relative * step * np.sqrt(rng.chisquare(5, 12) / 5)
            value = model[0] + relative * step * rng.standard_normal(12)
            own = Estimate(value, error, np.ones(12), np.full(12, 5.0))
            (p,) = with_their_tails([BesideRandom.of(own, model[1:], statistic, Arrangement(12))])
            named += p.min() * 12 < 0.05
        rows.append({"numbers": name, "noise": noise, "text": relative, "after": named / runs})
    return rows


def power(rng: np.random.Generator) -> list[Row]:
    """How often the one head that differs is named among 12, by its distance in standard deviations of random heads."""
    rows = []
    for noise, distance in product(NOISE, (0, 2, 3, 4, 5, 6, 8, 10)):
        named = dict.fromkeys(("before", "components", "after"), 0)
        for _ in range(1_000):
            model = random_model(rng, noise, (8, 12, 1))
            model[0, 3] += distance * np.sqrt(1.25)
            for kind, each in tested(measured(rng, model[0]), model[1:], 12).items():
                named[kind] += each[3] * 12 < 0.05
        rows.append({"noise": noise, "distance": distance} | {kind: count / 1_000 for kind, count in named.items()})
    return rows


# --- random models ---------------------------------------------------------------------------------------------------


def models(runs: list[Row]) -> Row:
    """The shares of runs with a card, and with a verdict of each question, with 95 % intervals."""
    asked = [run["questions"] for run in runs if "questions" in run]
    found: Row = {"runs": len(runs), "any card": share([bool(run["cards"]) for run in runs])}
    for card in ("sink", "sharpness", "climb", "collapse"):
        found[card] = share([card in run["cards"] for run in runs])
    found["tests with q < 0.05"] = round(sum(run["named"] for run in runs) / sum(run["tests"] for run in runs), 4)
    groups = sorted({group for each in asked for group in each})
    return found | {f"question {group}": share([bool(each.get(group)) for each in asked]) for group in groups}


def planted(runs: list[Row]) -> list[Row]:
    """Of each kind of planted head, in how many runs it was named, and in how many it and no other."""
    rows = []
    for kind in dict.fromkeys(run["kind"] for run in runs):
        of_kind = [run for run in runs if run["kind"] == kind]
        found = share([run["planted"] in run["named"] for run in of_kind])
        rows.append(
            {"kind": kind, "found": found, "alone": share([run["named"] == [run["planted"]] for run in of_kind])}
        )
    return rows


def share(happened: list[bool]) -> list[float]:
    """How many, of how many, and the exact 95 % interval of the probability."""
    count, number = sum(happened), len(happened)
    low, high = scipy.stats.binomtest(count, number).proportion_ci(0.95)
    return [count, number, round(float(low), 4), round(float(high), 4)]


if __name__ == "__main__":
    main()
