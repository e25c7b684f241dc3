"""What pretrained models show of the experiment climb, as examples: ``python -m scripts.climb_examples NAME=PATH …``.

Each model is read on two texts, which are never mixed: the reference text that ships with Python, and the docstrings of SciPy.
The numbers go into ``results/climb/examples.json`` of the experiments; what is stored there is not measured again.
"""

import importlib
import inspect
import json
import pkgutil
import sys
from collections.abc import Iterator

import scipy

import massieu
from massieu.papers.experiments.run import RESULTS, write_json

EXAMPLES = RESULTS / "climb" / "examples.json"
_WINDOW = 128
_WINDOWS = 608
"""The probe replays queries in every tenth window and in the first four: 64 of these."""
_STATISTIC = "own_write_step_selective"
_PARTS = {"own": "", "others": "/mismatched", "random_models": "/reinitialised"}


def docstrings() -> str:
    """The docstrings of the public names of SciPy's public subpackages, in order of name, each once."""
    packages = sorted(module.name for module in pkgutil.iter_modules(scipy.__path__) if not module.name.startswith("_"))
    found = {f"scipy.{package}.{name}": value for package in packages for name, value in _public(package)}
    texts = {inspect.getdoc(found[name]): None for name in sorted(found)}
    return "\n\n".join(text for text in texts if text)


def _public(package: str) -> Iterator[tuple[str, object]]:
    """The functions and classes that a subpackage exports."""
    module = importlib.import_module(f"scipy.{package}")
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name, None)
        if callable(value):
            yield name, value


TEXTS = {"pydoc topics": lambda: None, "docstrings of SciPy": docstrings}


def read(path: str, text: str | None) -> dict[str, float]:
    """Means over all heads of a model, and over how many heads and windows they are."""
    data = massieu.Text(strings=None if text is None else [text], window=_WINDOW, limit=_WINDOW * _WINDOWS)
    result = massieu.probe(path, data, statistics=[_STATISTIC])
    values = {
        name: [row["value"] for row in result.heads.rows(named=True) if row["statistic"] == _STATISTIC + ending]
        for name, ending in _PARTS.items()
    }
    above = sum(own > others for own, others in zip(values["own"], values["others"], strict=True))
    means = {name: sum(of_heads) / len(of_heads) for name, of_heads in values.items()}
    return means | {"heads": len(values["own"]), "above_others": above, "windows": result.run.sample.windows}


def main() -> None:
    """Read what is not stored yet, and store it after each text."""
    stored = json.loads(EXAMPLES.read_text(encoding="utf-8")) if EXAMPLES.exists() else []
    done = {(row["model"], row["text"]) for row in stored}
    EXAMPLES.parent.mkdir(exist_ok=True)
    for argument in sys.argv[1:]:
        model, _, path = argument.partition("=")
        for text, make in TEXTS.items():
            if (model, text) not in done:
                stored.append({"model": model, "text": text, "scipy": scipy.__version__, **read(path, make())})
                write_json(EXAMPLES, stored, "the examples")


if __name__ == "__main__":
    main()
