"""Sections of `benchmarks/page.py` that have tables of their own."""

from collections.abc import Callable

import comparisons
from writing import Json, at_most, duration, exponent, memory, ratio, table, verdict

Verdict = tuple[str, bool]
"""What had to meet a bar, and whether it does."""


def lengths(content: Json) -> str:
    curves = content["curves"]
    sizes = sorted({int(size) for curve in curves for size in curve["seconds"]["sizes"]})
    heads = [f"{size:,}" for size in sizes]

    def by_length(fit: Json, show: Callable[[float], str]) -> list[str]:
        known = dict(zip(map(int, fit["sizes"]), fit["amounts"], strict=True))
        return [show(known[size]) if size in known else "—" for size in sizes] + [exponent(fit)]

    times = [[curve["name"], *by_length(curve["seconds"], duration)] for curve in curves]
    peaks = [[curve["name"], *by_length(curve["mebibytes"], memory)] for curve in curves if curve["mebibytes"]]
    ratios = []
    for row in content["ratios"]:
        known = dict(zip(row["lengths"], zip(row["ratios"], row["intervals"], strict=True), strict=True))
        shown = [ratio(*known[size]) if size in known else "—" for size in sizes]
        ratios.append([row["name"], row["reference"], *shown])
    return "\n".join(
        [
            f"{content['heads']} heads of size {content['size']}, with as many queries as keys. The exponent is the slope of "
            "log time, or of log peak memory, on log length. Its 95 % interval includes the deviation from a straight line. "
            "The fixed cost of a call matters at short lengths and lowers the exponents of time. —: not measured, because "
            "the score matrix would take most of a small machine's memory.\n",
            "Time:\n\n" + table(["work", *heads, "exponent"], times),
            "Peak memory:\n\n" + table(["work", *heads, "exponent"], peaks),
            "Ratios of time:\n\n" + table(["work", "compared with", *heads], ratios),
        ]
    )


def half_precision(content: Json) -> str:
    def shown(row: Json, place: int) -> str:
        return f"{row['mean'][place]:.3f} ± {row['standard_error'][place]:.3f}"

    shares = content["shares"]
    cells = [[row["dtype"], f"{row['scale']:g}", shown(row, 0), shown(row, 1)] for row in shares]
    return "\n".join(
        [
            comparisons.section(content),
            "Which share of log Z's gradient is kept if it is computed together with the output's gradient (causal, "
            f"L = {shares[0]['length']:,}). The output's cotangent is standard normal, and log Z's is c times that. The "
            "share is the projection on the gradient in float64, and 1 if nothing is lost: "
            f"mean of {shares[0]['draws']} draws with its standard error.\n",
            table(["precision", "c", "for the query", "for the key"], cells),
        ]
    )


def probe(content: Json) -> str:
    peaks = [[f"{row['tokens']:,}", memory(row["peak_mib"])] for row in content["memory"]]
    return f"{comparisons.section(content)}\n{table(['tokens of text', 'peak resident memory'], peaks)}"


def decoder(content: Json) -> str:
    cache = "A forward pass of this model fills a cache of keys and values, which a probe does without: it takes less memory.\n"
    return f"{comparisons.section(content)}\n{cache}"


RESOLVED = 0.05
"""Of a probe's time: what is paid once is a difference, and a window's time at another time of the run differs by so much."""


def growth(content: Json) -> str:
    once = [[row["name"].partition(":")[0], _once(row)] for row in content["rows"]]
    return "\n".join(
        [
            "A probe of random tokens by a model with random weights, all default statistics with eight draws, each in a fresh "
            "process. Time is that of one more window, memory the peak of the process; the reference is a probe of half the "
            "windows. Each was run once, so no ratio has an interval.\n",
            comparisons.section(content),
            table(["work", "what is paid once, tables and page included"], once),
        ]
    )


def _once(row: Json) -> str:
    """What is not reading windows, where it is enough of the whole to be told."""
    least = RESOLVED * row["windows"] * row["seconds"]
    return duration(row["seconds_once"]) if row["seconds_once"] > least else f"below {duration(least)}, not resolved"


def monitor(content: Json) -> str:
    shares = [
        f"{row['name'].partition(':')[0]} {100 * (row['time_ratio'] - 1):.2f} % "
        f"[{100 * (row['time_interval'][0] - 1):.2f}, {100 * (row['time_interval'][1] - 1):.2f}]"
        for row in content["rows"]
        if row["time_bar"] is not None and "hundredth" in row["name"]
    ]
    return (
        f"{comparisons.section(content)}\nCalled every hundred steps, the monitor adds this share to a training step:\n\n"
        + "".join(f"* {share}\n" for share in shares)
    )


DETECTORS = ("massieu.Monitor", "gradient norm", "loss spike", "Spectral Alignment", "spectral entropy")
"""Whole detectors; the others are single rules of the monitor."""


def alarms(content: Json) -> str:
    return (
        f"{alarm_table(content)}\nThe first row counts false alarms: healthy runs in which a detector rang. The others "
        "count the damaged runs in which it rang early, that is, before the loss had risen by 0.3 nats, or although it never "
        "rose so far. In brackets: the median lead in steps, over the runs in which both it and the loss's own rule rang. "
        "[Alarms](how-to/alarms.md#measured) says what was done.\n\n"
        f"The same for each rule of the monitor by itself:\n\n{alarm_table(content, rules=True)}"
    )


def alarm_table(content: Json, rules: bool = False) -> str:
    """Kinds of runs by detectors, or by the monitor's rules."""
    kinds = content["kinds"]
    columns = [name for name in kinds[0]["detectors"] if (name in DETECTORS) is not rules]
    rows = []
    for kind in kinds:
        cells = [_rang(kind, kind["detectors"][name]) for name in columns]
        rows.append([kind["kind"], str(kind["runs"]), str(kind["hurt"]), str(kind["loss_rises"]), *cells])
    return table(["runs", "number", "hurt", "loss rises", *columns], rows)


def _rang(kind: Json, numbers: Json) -> str:
    if kind["kind"] == "healthy":
        return f"{numbers['rang']} of {kind['runs']}"
    if not kind["hurt"]:
        return "—"
    lead = numbers["median_lead"]
    return f"{numbers['early']} of {kind['hurt']}" + ("" if lead is None else f" ({lead:+.0f})")


def fixed_points(content: Json) -> str:
    def mean(row: Json, solver: str) -> str:
        found = row["evaluations"].get(solver)
        return "—" if found is None else f"{found:.1f}"

    cells = [
        [
            row["name"],
            mean(row, "auto"),
            f"{row['best']}: {mean(row, row['best'])}",
            ratio(row["ratio"]),
            at_most(row["bar"]),
            verdict(row["met"]),
        ]
        for row in content["rows"]
    ]
    return "Evaluations of the map until convergence, mean over starts; fewer is better.\n\n" + table(
        ["map", "ours (`auto`)", "best of the others", "ratio", "bar", ""], cells
    )


def implicit(content: Json) -> str:
    peaks = [
        [
            str(row["moves"]),
            memory(row["implicit_mebibytes"]),
            memory(row["unrolled_mebibytes"]),
            duration(row["implicit_seconds"]),
            duration(row["unrolled_seconds"]),
            ratio(row["growth"]),
            at_most(row["bar"]),
            verdict(row["growth"] <= row["bar"]),
        ]
        for row in content["memory"]
    ]
    errors = [
        [row["name"], row["dtype"], f"{row['error']:.1e}", at_most(row["bar"]), verdict(row["error"] <= row["bar"])]
        for row in content["accuracy"]
    ]
    head = ["moves", "memory", "unrolled", "time", "unrolled", "memory / memory with the fewest moves", "bar", ""]
    return table(head, peaks) + "\n" + table(["derivative", "dtype", "relative error", "bar", ""], errors)


def conditional_mean(content: Json) -> str:
    cells = [
        [name, f"{error:.1e}", f"{content['accuracy'][f'{name}, bound']:.1e}"]
        for name, error in content["accuracy"].items()
        if not name.endswith(", bound")
    ]
    head = ["method, L = 4096", "largest ‖difference‖ from the Gram matrix's output", "largest error bound it reported"]
    return comparisons.compared(content["rows"]) + "\nAll numbers are in float64.\n\n" + table(head, cells)


def _right(rows: list[Json]) -> str:
    """Backends by dtype: what they take, and their largest errors over all of it."""
    groups: dict[tuple[str, str, str], list[Json]] = {}
    for row in rows:
        groups.setdefault((row["function"], row["backend"], row["dtype"]), []).append(row)
    cells = []
    for (function, backend, dtype), own in sorted(groups.items(), key=lambda item: item[0][0]):
        parts = {"output": [], "log_partition": [], "": []}
        for row in own:
            for part, error in row["errors"].items():
                parts[part if part in parts else ""].append(error)
        largest = [f"{max(errors):.1e}" if errors else "—" for errors in parts.values()]
        share = max(row["of_bar"] for row in own)
        wrong = [row["kind"] for row in own if not row["met"]]
        kinds = ", ".join(row["kind"] for row in own)
        cells.append(
            [function, f"`{backend}`", dtype, kinds, *largest, ratio(share), ", ".join(wrong) or verdict(not wrong)]
        )
    head = ["", "backend", "dtype", "kinds of problem", "output", "log Z", "gradients, or moments", "of its bar", ""]
    return table(head, cells)


def _further_windows(rows: list[Json]) -> list[str]:
    """What one more window costs, of each probe that was measured at several lengths of text."""
    sentences = []
    for name in dict.fromkeys(row["name"] for row in rows):
        own = sorted((row for row in rows if row["name"] == name), key=lambda row: row["windows"])
        probe, forward = (own[-1][part] - own[0][part] for part in ("seconds", "forward_seconds"))
        if len(own) > 1 and forward > 0:
            sentences.append(f"Each further window takes {ratio(probe / forward)} of its forward pass ({name}).\n")
    return sentences


def on_cuda(content: Json) -> str:
    whole = "" if content["complete"] else " Some planned rows were not measured."
    beside = "compared with the fastest of PyTorch's own kernels or of the libraries"
    parts = [
        f"On one {content['device']}, {beside}. Times are measured on the device by CUDA events, while "
        f"earlier calls keep it busy.{whole}\n",
        comparisons.compared(content["rows"]),
    ]
    if content["fixed"]:
        costs = [
            [
                "forward and backward" if row["backward"] else "forward",
                duration(row["seconds"]),
                duration(row["reference_seconds"]),
            ]
            for row in content["fixed"]
        ]
        parts += [
            "Time of the host for a call of 16 tokens, which matters only if the device would otherwise be idle:\n",
            table(["attention and log Z", "ours", "PyTorch's"], costs),
        ]
    if content["training"]:
        steps = [[row["name"], duration(row["seconds"]), ratio(row["steps"])] for row in content["training"]]
        parts += [
            "Training a model of GPT-2 small's shape in bfloat16 autocast, 8 rows of 1,024 tokens, with `massieu.Monitor`:\n",
            table(["", "time", "beside a step"], steps),
        ]
    if content["probes"]:
        parts += [
            "Probing a model of GPT-2 small's shape in float32, 8 windows of 512 tokens a batch, compared with forward "
            "passes of the same windows:\n",
            table(
                ["probe", "windows", "time", "forward passes", "ratio"],
                [
                    [
                        row["name"],
                        str(row["windows"]),
                        duration(row["seconds"]),
                        duration(row["forward_seconds"]),
                        ratio(row["seconds"] / row["forward_seconds"]),
                    ]
                    for row in content["probes"]
                ],
            ),
            *_further_windows(content["probes"]),
        ]
    if content["accuracy"]:
        parts += [
            "Errors relative to explicit matrices in float64. For output, log Z and gradients it is the norm of the error over "
            "the norm of the result; for a moment, the largest error over the largest value. Each is the worst over the "
            "kinds of problem that the backend takes. A bar is what rounding explains: for the output, four roundings of "
            "its dtype.\n",
            _right(content["accuracy"]),
        ]
    parts += [f"* Not measured: {name}: {reason}" for name, reason in content["lost"].items()]
    return "\n".join(parts) + "\n"


def verdicts(name: str, content: Json) -> list[Verdict]:
    """Every bar of a result file, and whether it is met."""
    if name == "fixed_points":
        return [(row["name"], row["met"]) for row in content["rows"]]
    if name == "implicit":
        grown = [(f"memory of {row['moves']} moves", row["growth"] <= row["bar"]) for row in content["memory"]]
        return grown + [(f"{row['name']}, {row['dtype']}", row["error"] <= row["bar"]) for row in content["accuracy"]]
    rows = content.get("rows", [])
    right: dict[str, bool] = {}
    for row in content.get("accuracy", []) if name == "on_cuda" else []:
        what = f"errors of {row['function']} by {row['backend']}, {row['dtype']}"
        right[what] = right.get(what, True) and row["met"]
    found = [(f"{row['name']}, beside {row['reference']}", comparisons.met(row)) for row in rows]
    return [*right.items()] + [(what, met) for what, met in found if met is not None]
