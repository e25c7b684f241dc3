"""The page docs/models.md, made from the rows of `model_survey.py`: ``python -m scripts.models_page``."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs"
_FAMILIES = {
    "text": "Text",
    "text, encoder and decoder": "Text, encoder and decoder",
    "images": "Images and video",
    "sound": "Sound and speech",
    "several": "Several kinds of input",
    "other": "Time series and others",
}
_REASONS = {
    "has no attention": "no attention",
    "none was seen attending": "no softmax was seen that leads from scores to values",
    "is random": "its output is random, so that nothing can be compared",
    "self-check failed": "the self-check finds it misread",
}
_HEAD = "| architecture | route | grade | sites | error | {older} | remarks |\n|---|---|---|---|---|---|---|\n"
_TEXT = """# Models that can be read

This page is written by a run over every architecture of transformers' registry that `AutoModel` knows. Each is
built small from its configuration, with random weights, and read by `massieu.describe`. A check of the page's
own compares what was read with the model's results, its heads with the configuration's, and its items with the
batch's. Of {total} architectures of transformers {newest}, {built} were built, and {read} are read. {refused}
are refused with a reason, of which {without} have no attention at all. None is wrong, and none crashes.

- **Route.** `interface`: attention passes through transformers' attention interface, where it is read. `tap`:
  scores are followed to their softmax in the model's own code, as in any PyTorch module.
- **Grade.** `full`: queries, keys, scale and log-weights are known, and give the model's scores exactly. `scores`:
  the scores and weights are exact, but they are no known function of queries and keys alone. What needs that is
  left out: selective log Z, the largest score, the climb and the maps.
- **Sites.** How many attention calls one forward pass of the small model has. It has two layers where its
  configuration allows.
- **Error.** The largest difference between attention recomputed in float64 from what was read and the model's own
  result, over all sites, relative to the largest entry. It is rounded up to a power of ten.
- **{older}.** The same on the oldest supported release of transformers: `same`, what differs, or `–` where that
  release does not have the architecture.

Weights are random and four times their usual size, so that attention is far from uniform. Where the model takes a
mask, the second of two rows has padding. A model with several towers is given text alone where that suffices; the
towers that did not run are no part of the row.

Large checkpoints of a family use the code that was run here, yet options of a configuration can take another path
in it. `massieu.probe` compares its reading with the model on the first batch of every run, and refuses where they
differ.

Made again by:

```bash
python -m scripts.model_survey --out docs/models/transformers-{newest}.json
python -m scripts.models_page
```

The survey runs for about ten minutes on two cores, and reads nothing from the hub.

"""


def stored(release: str | None = None) -> dict[str, Any]:
    """The rows of one release of transformers, or of the newest one that is stored."""
    releases = sorted(FOLDER.glob("models/transformers-*.json"), key=_release)
    path = releases[-1] if release is None else FOLDER / "models" / f"transformers-{release}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def _release(path: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in path.stem.rpartition("-")[2].split("."))


def _cell(parts: list[str]) -> str:
    return ", ".join(parts) if parts else "–"


def power_of_ten(error: float) -> str:
    """An error rounded up to a power of ten."""
    return "0" if error == 0 else f"1e{math.ceil(math.log10(error)):+03d}".replace("e-", "e−").replace("e+", "e")


def _short(row: dict[str, Any]) -> str:
    """What became of an architecture, in a word or two."""
    if row["outcome"] == "read":
        return f"{_cell(row['routes'])}, {_cell(row['grades'])}"
    return row["outcome"]


def _beside(row: dict[str, Any], older: dict[str, Any] | None) -> str:
    if older is None:
        return "–"
    return "same" if _short(older) == _short(row) else _short(older)


def _remarks(row: dict[str, Any]) -> str:
    said = [f"`{name}`: {reason}" for name, reason in row.get("refused", {}).items()]
    if row["outcome"] == "refused" and not said:
        said = [next((short for part, short in _REASONS.items() if part in row["reason"]), row["reason"])]
    if row.get("unread"):
        said.append(f"not read: {', '.join(f'`{name}`' for name in row['unread'])}")
    return "; ".join(said).replace("|", "\\|")


def _line(row: dict[str, Any], older: dict[str, Any] | None) -> str:
    if row["outcome"] == "read":
        cells = [_cell(row["routes"]), _cell(row["grades"]), str(row["sites"]), power_of_ten(row["error"])]
    else:
        cells = [row["outcome"], "–", "–", "–"]
    return f"| `{row['architecture']}` | {' | '.join([*cells, _beside(row, older), _remarks(row)])} |\n"


def page(newest: dict[str, Any], oldest: dict[str, Any]) -> str:
    """The whole page."""
    rows, older = newest["architectures"], {row["architecture"]: row for row in oldest["architectures"]}
    built = [row for row in rows if row["outcome"] != "not built"]
    count = Counter(row["outcome"] for row in rows)
    without = sum("has no attention" in row.get("reason", "") for row in built)
    names = {"newest": newest["transformers"], "older": oldest["transformers"]}
    numbers = {
        "total": len(rows),
        "built": len(built),
        "read": count["read"],
        "refused": count["refused"],
        "without": without,
    }
    text = _TEXT.format(**names, **numbers)
    for kind, title in _FAMILIES.items():
        of_kind = [row for row in built if row["kind"] == kind]
        if of_kind:
            text += f"## {title}\n\n{_HEAD.format(**names)}"
            text += "".join(_line(row, older.get(row["architecture"])) for row in of_kind) + "\n"
    text += "## Not built\n\nThe rules that shrink a configuration, or make inputs, do not suit these.\n\n"
    text += " · ".join(f"`{row['architecture']}`" for row in rows if row["outcome"] == "not built") + ".\n"
    return text


def main() -> None:
    releases = sorted(FOLDER.glob("models/transformers-*.json"), key=_release)
    newest, oldest = (json.loads(path.read_text(encoding="utf-8")) for path in (releases[-1], releases[0]))
    (FOLDER / "models.md").write_text(page(newest, oldest), encoding="utf-8")


if __name__ == "__main__":
    main()
