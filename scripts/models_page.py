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
_HEAD = (
    "| architecture | route | grade | sites | error | float64 | odd masks | caps | {older} | remarks |\n"
    "|---|---|---|---|---|---|---|---|---|---|\n"
)
LARGEST = 1e-6
"""Error in float64 beyond which an architecture is not read under a mask or a cap."""
_TEXT = """# Models that can be read

This page lists which architectures of transformers `massieu.probe` can read, and how well. Look up your model's
class here before you probe it.

A script wrote the page. It takes every architecture that `AutoModel` knows, builds a small model from its
configuration with random weights, and reads it with `massieu.describe`. It then checks three things: the recomputed
attention against the model's results, the heads against the configuration, and the items against the batch. Of
{total} architectures of transformers {newest}, {built} were built, and {read} are read. {refused} are refused with a
reason; {without} of them have no attention at all. None is read wrongly, and none crashes.

- **Route** says how the attention is read. `interface`: through transformers' attention interface. `tap`: by
  following the scores to their softmax in the model's own code, as in any PyTorch module.
- **Grade** says how much is known. `full`: queries, keys, scale and log-weights, which give the model's scores
  exactly. `scores`: the scores and weights are exact, but not as a known function of queries and keys alone.
  Statistics that need this are left out: selective log Z, the largest score, the climb and the maps.
- **Sites** is the number of attention calls in one forward pass of the small model. The model has two layers if its
  configuration allows it.
- **Error** is the largest difference between attention recomputed in float64 and the model's own result, over all
  sites, relative to the largest entry. It is rounded up to a power of ten.
- **float64** is the error of the model in float64, where softmax and norms that its code forms in float32 are formed in
  float64 too. The model's own choice of attention and eager attention are both read; the larger error stands here.
- **Odd masks** is that error under two more masks of the second row: a hole in the middle, and padding on both sides.
  Decoder's tokens, sound and images have such masks too if the model takes them. Of the architectures that are read,
  {masked} take a mask, and {read_masked} of these are read to {largest} under both; remarks say why the rest are not.
- **Caps** is that error with low soft caps of the scores, under all three masks, for the {capped} architectures whose
  configuration has such caps. {read_capped} of these are read to {largest}.
- **{older}** is the route and grade on the oldest supported release of transformers: `same`, what differs, or `–` if that
  release does not have the architecture.

Weights are random and four times their usual size, so that attention is far from uniform. If the model takes a mask,
the second of two rows has padding. A model with several towers gets only text if that is enough; towers that did not
run are not part of the row.

Large checkpoints of a family use the code that was run here, but options of a configuration can take another path in
it. `massieu.probe` therefore compares its reading with the model on the first batch of every run, and raises an error
if they differ.

These commands make the page again:

```bash
python -m scripts.model_survey --out docs/models/transformers-{newest}.json
python -m scripts.models_page
```

The survey takes about twenty minutes on two cores, and downloads nothing from the hub.

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
    """The status of an architecture, in a word or two."""
    if row["outcome"] == "read":
        return f"{_cell(row['routes'])}, {_cell(row['grades'])}"
    return row["outcome"]


def _beside(row: dict[str, Any], older: dict[str, Any] | None) -> str:
    if older is None:
        return "–"
    return "same" if _short(older) == _short(row) else _short(older)


def _odd(row: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What a row has of the usual mask in float64, of odd masks, and of caps: errors, or sentences, by name."""
    given = row.get("odd", {})
    usual = {name: value for name, value in given.items() if name == "usual mask"}
    caps = {name: value for name, value in given.items() if name.startswith("caps")}
    masks = {name: value for name, value in given.items() if name not in usual and name not in caps}
    return usual, masks, caps


def within(errors: dict[str, Any]) -> bool:
    """Whether there are errors, and all of them are read and small."""
    return bool(errors) and all(not isinstance(error, str) and error <= LARGEST for error in errors.values())


def _largest(errors: dict[str, Any]) -> str:
    numbers = [error for error in errors.values() if not isinstance(error, str)]
    if len(numbers) < len(errors):
        return "not read"
    return power_of_ten(max(numbers)) if numbers else "–"


def _remarks(row: dict[str, Any]) -> str:
    said = [f"`{name}`: {reason}" for name, reason in row.get("refused", {}).items()]
    if row["outcome"] == "refused" and not said:
        said = [next((short for part, short in _REASONS.items() if part in row["reason"]), row["reason"])]
    if row.get("unread"):
        said.append(f"not read: {', '.join(f'`{name}`' for name in row['unread'])}")
    said += [f"{name}: {why}" for errors in _odd(row) for name, why in errors.items() if isinstance(why, str)]
    return "; ".join(said).replace("|", "\\|")


def _line(row: dict[str, Any], older: dict[str, Any] | None) -> str:
    if row["outcome"] == "read":
        cells = [_cell(row["routes"]), _cell(row["grades"]), str(row["sites"]), power_of_ten(row["error"])]
        cells += [_largest(errors) for errors in _odd(row)]
    else:
        cells = [row["outcome"], *["–"] * 6]
    return f"| `{row['architecture']}` | {' | '.join([*cells, _beside(row, older), _remarks(row)])} |\n"


def page(newest: dict[str, Any], oldest: dict[str, Any]) -> str:
    """The whole page."""
    rows, older = newest["architectures"], {row["architecture"]: row for row in oldest["architectures"]}
    built = [row for row in rows if row["outcome"] != "not built"]
    count = Counter(row["outcome"] for row in rows)
    without = sum("has no attention" in row.get("reason", "") for row in built)
    _, masks, caps = zip(*(_odd(row) for row in rows if row["outcome"] == "read"), strict=True)
    names = {"newest": newest["transformers"], "older": oldest["transformers"]}
    numbers = {
        "total": len(rows),
        "built": len(built),
        "read": count["read"],
        "refused": count["refused"],
        "without": without,
        "masked": sum(map(bool, masks)),
        "read_masked": sum(map(within, masks)),
        "capped": sum(map(bool, caps)),
        "read_capped": sum(map(within, caps)),
        "largest": power_of_ten(LARGEST),
    }
    text = _TEXT.format(**names, **numbers)
    for kind, title in _FAMILIES.items():
        of_kind = [row for row in built if row["kind"] == kind]
        if of_kind:
            text += f"## {title}\n\n{_HEAD.format(**names)}"
            text += "".join(_line(row, older.get(row["architecture"])) for row in of_kind) + "\n"
    text += "## Not built\n\nThe script could not shrink the configurations of these, or make inputs for them.\n\n"
    text += " · ".join(f"`{row['architecture']}`" for row in rows if row["outcome"] == "not built") + ".\n"
    return text


def main() -> None:
    releases = sorted(FOLDER.glob("models/transformers-*.json"), key=_release)
    newest, oldest = (json.loads(path.read_text(encoding="utf-8")) for path in (releases[-1], releases[0]))
    (FOLDER / "models.md").write_text(page(newest, oldest), encoding="utf-8")


if __name__ == "__main__":
    main()
