"""Write `docs/benchmarks.md` from the numbers in `benchmarks/results/`.

python benchmarks/page.py
"""

import json
from pathlib import Path

import comparisons
import sections
from writing import Json, origin

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"

TITLES = {
    "ops": "Attention, log Z, moments",
    "half_precision": "Half precision",
    "lengths": "Growth with the length of a sequence",
    "losses": "Losses without the score matrix",
    "tokens": "Token statistics without logits",
    "policy": "Policies without logits",
    "packed": "Packed rows",
    "tap": "Reading hand-written attention",
    "measures": "Measures of atoms",
    "scaling": "Keys on disk",
    "hopfield": "Hopfield layers",
    "fixed_points": "Fixed points",
    "implicit": "Implicit gradients",
    "boltzmann": "Boltzmann machines",
    "population": "Populations of tokens",
    "conditional_mean": "Conditional mean attention",
    "probe": "The probe",
    "decoder": "The probe of a real decoder",
    "growth": "Growth of a probe with the text",
    "monitor": "The monitor",
    "alarms": "Alarms of the monitor",
    "on_cuda": "CUDA",
}
"""Sections in their order; a result of another name comes after them under its own name."""
SECTIONS = {
    "half_precision": sections.half_precision,
    "lengths": sections.lengths,
    "probe": sections.probe,
    "decoder": sections.decoder,
    "growth": sections.growth,
    "monitor": sections.monitor,
    "alarms": sections.alarms,
    "fixed_points": sections.fixed_points,
    "implicit": sections.implicit,
    "conditional_mean": sections.conditional_mean,
    "on_cuda": sections.on_cuda,
}
"""All others are tables of comparisons."""
MORE = {"scaling": "\nFor 10⁹ keys there is an [estimate](explanation/scaling.md) that starts from these numbers.\n"}

INTRODUCTION = """\
# Benchmarks

Time and memory of massieu, compared with PyTorch and other libraries on the same machine.

`python benchmarks/page.py` writes this page from the files in [`benchmarks/results/`](../benchmarks/results); do not edit
it. Each section names the command that repeats its measurements. `make bench` runs all of them and writes this page.

* **Time** is the CPU time of one thread, in float32 unless stated otherwise. In each row massieu and the reference take
  turns in one run. The ratio is the median of the rounds' ratios, since both sides of a round share what slows a machine for
  a while. Its 95 % interval comes from resampling the rounds: one or three if the work takes many seconds, up to 61 if it
  takes milliseconds.
* **Memory** is the growth of a fresh process's resident memory while it does the work once. Inputs are not included.
* **A bar** is an upper limit on a ratio, set for each row. It is met if the upper end of the interval, not only the
  median, is at or below it, in time and in memory.
* **The count** estimates the least time that our method can take. It sums the unavoidable operations, each at the peak
  rate that was measured for it alone. These are products, exponentials and, for eager tiles, the bytes that pass through
  the cache.

Sections of 2026-11-28 were measured on one of two processors while the other was at work, mostly on another benchmark. What
depends on the memory's bandwidth takes longer then, on either side of a ratio. Another processor meets other bars. On an Intel
Xeon with AVX-512, attention's memory and half precision missed theirs by a few per cent; the small Boltzmann machine and the
Gram matrix of 4,096 keys met theirs.
"""
NOT_MEASURED = """\
## CUDA: not measured

No number on this page was measured on a GPU. `python benchmarks/on_cuda.py` measures on one, and its rows then replace this
section. `massieu devices` checks results and times on your own machine.

| work | compared with | bar of time | of memory |
|---|---|---|---|
| attention and log Z, forward | the fastest of flash, efficient, cuDNN and FlexAttention | ≤ 1.05 | ≤ 1.2 |
| the same, forward and backward | the same | ≤ 1.1 | ≤ 1.2 |
| linear cross-entropy, both ways | the fastest of Liger, cut-cross-entropy, `F.linear_cross_entropy`, the logits | ≤ 1.1 | |

The planned rows are in bfloat16 and float16, for 1,024 to 65,536 queries and keys and heads of size 64 and 128, causal or
not, grouped or not. Errors may be up to twice PyTorch's own plus one rounding.
"""


def page(results: dict[str, Json]) -> str:
    """The page as Markdown, from the contents of the result files by their names without ``.json``."""
    names = [name for name in TITLES if name in results] + sorted(set(results) - set(TITLES))
    parts = [INTRODUCTION, _summary({name: results[name] for name in names})]
    for name in names:
        body = SECTIONS.get(name, comparisons.section)(results[name])
        parts += [f"## {TITLES.get(name, name)}\n", origin(name, results[name]), body + MORE.get(name, "")]
    return "\n".join([*parts, *([] if "on_cuda" in names else [NOT_MEASURED])])


def _summary(results: dict[str, Json]) -> str:
    found = [(name, *verdict) for name, content in results.items() for verdict in sections.verdicts(name, content)]
    missed = [f"* {TITLES.get(name, name)}: {what}" for name, what, met in found if not met]
    line = f"**{len(found) - len(missed)} of {len(found)} bars are met.**"
    if not missed:
        return line + "\n"
    return f"{line} These bars are missed; the sections say by how much:\n\n" + "\n".join(missed) + "\n"


def read(folder: Path) -> dict[str, Json]:
    """The contents of all result files in a folder, by their names without ``.json``."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def main() -> None:
    PAGE.write_text(page(read(RESULTS)))
    print(PAGE)


if __name__ == "__main__":
    main()
