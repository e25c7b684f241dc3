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
    "measures": "Measures of atoms",
    "scaling": "Keys on disk",
    "hopfield": "Hopfield layers",
    "fixed_points": "Fixed points",
    "implicit": "Implicit gradients",
    "boltzmann": "Boltzmann machines",
    "population": "Populations of tokens",
    "conditional_mean": "Conditional mean attention",
    "probe": "The probe",
    "monitor": "The monitor",
    "on_cuda": "CUDA",
}
"""Sections in their order; a result of another name comes after them under its own name."""
SECTIONS = {
    "half_precision": sections.half_precision,
    "lengths": sections.lengths,
    "probe": sections.probe,
    "monitor": sections.monitor,
    "fixed_points": sections.fixed_points,
    "implicit": sections.implicit,
    "conditional_mean": sections.conditional_mean,
    "on_cuda": sections.on_cuda,
}
"""All others are tables of comparisons."""
MORE = {"scaling": "\nWhat follows from it for 10⁹ keys, on paper: [estimate](explanation/scaling.md).\n"}

INTRODUCTION = """\
# Benchmarks

Written by `python benchmarks/page.py` from the files in [`benchmarks/results/`](../benchmarks/results); do not edit. Each
section names the command that measures its numbers again; `make bench` runs all and writes this page.

* **Time** is CPU time of one thread, in float32 where nothing else is said. Two sides take turns in one run. Ratios are
  ours divided by the reference's, of medians, with the 95 % interval of resampled rounds: three of works of many
  seconds, up to 41 of works of milliseconds.
* **Memory** is what the resident set of a fresh process grows by while the work is done once, beyond its inputs.
* **A bar is met** when the upper ends of the intervals are at or under it, in time and in memory; the median alone
  does not count.
* **The count** is the time of what our way cannot do without, one after the other, at the rates that a thread reaches on
  each alone. Counted are products, exponentials, and for eager tiles the bytes that their operations take through the cache.
"""
NOT_MEASURED = """\
## CUDA: not measured

No number of this page is from a GPU. `python benchmarks/on_cuda.py` measures there, and its rows then take the place of this
section. `massieu devices` tells what is right and how fast on a machine of one's own.

| work | beside | bar of time | of memory |
|---|---|---|---|
| attention and log Z, forward | the fastest of flash, efficient, cuDNN and FlexAttention | ≤ 1.05 | ≤ 1.2 |
| the same, forward and backward | the same | ≤ 1.1 | ≤ 1.2 |
| linear cross-entropy, both ways | the fastest of Liger, cut-cross-entropy, `F.linear_cross_entropy`, the logits | ≤ 1.1 | |

In bfloat16 and float16, 1,024 to 65,536 queries and keys, heads of size 64 and 128, causal or not, grouped or not. Errors
may be twice PyTorch's own, and one rounding.
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
    return (
        line + "\n" if not missed else f"{line} Missed, and by how much in the sections:\n\n" + "\n".join(missed) + "\n"
    )


def read(folder: Path) -> dict[str, Json]:
    """The contents of all result files in a folder, by their names without ``.json``."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def main() -> None:
    PAGE.write_text(page(read(RESULTS)))
    print(PAGE)


if __name__ == "__main__":
    main()
