"""What `harness.Comparison` stores, as tables, and what is missed and why; for `benchmarks/page.py`."""

from writing import Json, at_most, duration, exponent, memory, ratio, table, verdict


def met(row: Json) -> bool | None:
    """Whether the upper ends of both intervals are under their bars; see `harness.Comparison.met`."""
    return all(high <= bar for _, high, bar in _limits(row)) if _limits(row) else None


def section(content: Json) -> str:
    """Everything a result file with comparisons has to say."""
    rows = content["rows"]
    parts = [compared(rows)]
    if "eager_operations" in content:
        found = content["eager_operations"]
        of = next(row for row in rows if row["name"] == f"moments and output, L = {found['length']}, blocks")
        share = ratio(found["total"] / of["reference_seconds"])
        parts.append(
            f"The least time of the eager moments at L = {found['length']:,}: {sum(found['times'].values())} operations on a "
            f"tile. If each is timed alone on a tile in the cache, they add up to {duration(found['total'])} over all tiles, "
            f"{share} times the time of fused attention. Run together they take {duration(of['seconds'])}.\n"
        )
    if "flex_attention" in content:
        answers = content["flex_attention"]
        parts.append(
            "On a CPU, compiled FlexAttention returns only the output. A request for the log-sum-exp raises: "
            f"“{answers['log-sum-exp']}”. A request for a gradient raises: “{answers['backward']}”.\n"
        )
    if "matrix" in content:
        parts.append(_extrapolated(content["matrix"], rows))
    if "flow" in content:
        flow = content["flow"]
        share = ratio(flow["mebibytes"] / flow["matrix_mebibytes"])
        beside = ratio(flow["seconds"] / flow["layers"] / flow["attention_seconds"])
        parts.append(
            f"**{flow['particles']:,} particles × {flow['width']} through {flow['layers']} layers**, with the default "
            f"observables after each layer, run once: {duration(flow['seconds'])}. A layer takes {beside} times as long as "
            f"`ops.attention` of the same sizes (bar 1.5). The peak memory is {memory(flow['mebibytes'])}; one score matrix "
            f"would take {memory(flow['matrix_mebibytes'])}, so this is {share} of it.\n"
        )
    if any(row["counted_seconds"] is not None for row in rows):
        parts.append(_counts(rows, content["rates"]))
    return "\n".join(parts)


def compared(rows: list[Json]) -> str:
    """The table, and a sentence for each bar that is missed."""
    head = ["work", "compared with", "time: ours / theirs", "ratio", "bar", "memory: ours / theirs", "ratio", "bar", ""]
    cells = []
    for row in rows:
        peak = ["", "", ""]
        if row["mebibytes"] is not None:
            before = row["reference_mebibytes"]
            peak[0] = memory(row["mebibytes"]) + ("" if before is None else f" / {memory(before)}")
        if row["memory_ratio"] is not None:
            peak[1:] = [ratio(row["memory_ratio"], row.get("memory_interval")), at_most(row["memory_bar"])]
        time = [
            f"{duration(row['seconds'])} / {duration(row['reference_seconds'])}",
            ratio(row["time_ratio"], row["time_interval"]),
            at_most(row["time_bar"]),
        ]
        cells.append([row["name"], row["reference"], *time, *peak, verdict(met(row))])
    missed = [_miss(row) for row in rows if met(row) is False]
    return table(head, cells) + ("\nMissed:\n\n" + "\n".join(missed) + "\n" if missed else "")


def _limits(row: Json) -> list[tuple[str, float, float]]:
    """Upper end of the interval and bar, of time and of memory, where there is a bar."""
    interval = row.get("memory_interval") or [row["memory_ratio"]]
    found = ("time", row["time_interval"][1], row["time_bar"]), ("memory", interval[-1], row["memory_bar"])
    return [limit for limit in found if limit[1] is not None and limit[2] is not None]


def _miss(row: Json) -> str:
    """By how much a bar is missed, what the count says, and why."""
    over = [
        f"{kind} ratio up to {high:.3g}, {100 * (high / bar - 1):.1f} % above the bar of {bar:g}"
        for kind, high, bar in _limits(row)
        if high > bar
    ]
    line = f"* **{row['name']}**, compared with {row['reference']}: {'. Also: '.join(over)}."
    if row.get("counted_seconds") is not None:
        share = ratio(row["counted_seconds"] / row["reference_seconds"])
        line += f" The count is {duration(row['counted_seconds'])}, {share} of the reference's time."
    return f"{line} Why: {row['why']}." if row.get("why") else line


def _counts(rows: list[Json], rates: Json) -> str:
    cells = [
        [
            row["name"],
            duration(row["counted_seconds"]),
            duration(row["seconds"]),
            ratio(row["seconds"] / row["counted_seconds"]),
        ]
        for row in rows
        if row["counted_seconds"] is not None
    ]
    return (
        f"Peak rates of one thread, measured in this run: {rates['flops'] / 1e9:.0f} GFlop/s in products of 2,048 × 2,048 "
        "matrices, "
        f"{rates['exponentials'] / 1e9:.1f}·10⁹ exponentials per second, {rates['memory_bytes'] / 1e9:.1f} GB/s from memory, "
        f"{rates['cache_bytes'] / 1e9:.0f} GB/s from the second-level cache.\n\n"
        + table(["work", "count", "ours", "ours / count"], cells)
    )


def _extrapolated(matrix: Json, rows: list[Json]) -> str:
    """What is measured of ours where the score matrix is too large, and what the matrix would take."""
    ours = next(row for row in rows if str(matrix["pairs"]) in row["name"])
    peak, time = matrix["mebibytes"], matrix["seconds"]
    low, high = (end / 1024 for end in peak["extrapolated_interval"])
    early, late = time["extrapolated_interval"]
    sizes = ", ".join(f"{size:,.0f}" for size in peak["sizes"])
    return (
        f"**{matrix['pairs']:,} pairs.** Ours takes {duration(ours['seconds'])} and {memory(ours['mebibytes'])}, measured. The "
        f"whole score matrix is too large to run at this size. Its cost is extrapolated from {sizes} pairs, with 95 % "
        f"intervals for a measurement: {peak['extrapolated'] / 1024:.3g} GiB [{low:.3g}, {high:.3g}] "
        f"(exponent {exponent(peak)}) and {time['extrapolated']:.3g} s [{early:.3g}, {late:.3g}] (exponent {exponent(time)}). "
        f"Ours takes {ratio(ours['mebibytes'] / peak['extrapolated'])} of the memory and "
        f"{ratio(ours['seconds'] / time['extrapolated'])} of the time.\n"
    )
