"""`massieu devices`: what is measured, what is said of it, and how it ends."""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.command_line import COMMAND, ENVIRONMENT, assert_bad, run

from massieu.ops import reference
from massieu.ops import survey as room
from massieu.ops.measure import DTYPES, PARTS, turns
from massieu.ops.survey import Measured, Survey, survey

REGISTRY = sys.modules["massieu.ops.attention"]


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Each work is done once, and takes a second; PyTorch's takes two."""

    def seconds(works: dict, device: torch.device, budget: float) -> dict[str, list[float]]:
        for work in works.values():
            work()
        return {name: [2.0 if name == "SDPA" else 1.0] * 3 for name in works}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "turns", seconds)
        yield


@pytest.fixture(scope="module")
def stages() -> list[str]:
    """What the survey tells of its progress."""
    return []


@pytest.fixture(scope="module")
def surveyed(quick: None, stages: list[str]) -> Survey:
    """Every backend in every dtype."""
    return survey("cpu", True, stages.append)


@pytest.fixture
def one_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of the work, where dtypes change nothing of what is asked."""
    monkeypatch.setattr(room, "DTYPES", {"float32": torch.float32})


def broken(monkeypatch, damage):
    """A first backend whose output and log Z are the reference's with a fault."""
    backend: Any = reference.Reference(lambda problem: damage(*reference.attention(problem)))
    object.__setattr__(backend, "name", "broken")
    for place in (room, REGISTRY):
        monkeypatch.setattr(place, "BACKENDS", (backend, *REGISTRY.BACKENDS))


@pytest.mark.medium
def test_every_backend_is_measured(surveyed: Survey, stages: list[str]):
    result = surveyed
    assert len(stages) == 7
    assert result.ok
    assert result.complete
    missing = {True: set(), False: {"log_partition"}}
    names = ["SDPA", "fused", "blocks", "reference"]
    assert [(row.dtype, row.name) for row in result.rows] == [(dtype, name) for dtype in DTYPES for name in names]
    for row in result.rows:
        assert set(row.errors) == set(PARTS[:2] if row.name == "blocks" else PARTS) - missing[row.own]
        assert (row.share is None) == (row.name in ("SDPA", "blocks"))
        assert (row.forward_ratio, row.mebibytes) == (0.5 if row.own else 1.0, None)
        # Rounding, and not nothing.
        assert 0 < row.errors["output"] < torch.finfo(DTYPES[row.dtype]).eps * 4
        assert not row.excess


@pytest.mark.medium
def test_what_auto_takes(surveyed: Survey):
    result = {(each.kind, each.dtype): each for each in surveyed.choices}
    assert len(result) == 7 * 4
    for (kind, dtype), each in result.items():
        capped = kind == "soft-capped"
        assert (each.training, each.inference) == (("reference", "blocks") if capped else ("fused", "fused")), (
            kind,
            dtype,
        )
    assert result["soft-capped", "bfloat16"].refused == {
        "fused": "it has no soft cap",
        **dict.fromkeys(("cudnn", "flash", "efficient", "flex"), "it runs on CUDA, got cpu"),
        "blocks": "it has no derivative, which may be needed here",
    }


DAMAGES = {
    "share": lambda output, log_z: (output, 0.5 * (log_z + log_z.detach())),
    "log_partition": lambda output, log_z: (output, log_z / math.log(2)),
    "grad_query": lambda output, log_z: (output.detach() + 1.1 * (output - output.detach()), log_z),
    "output": lambda output, log_z: (output * math.nan, log_z),
}


@pytest.mark.medium
@pytest.mark.usefixtures("one_dtype")
@pytest.mark.parametrize("part", DAMAGES)
def test_a_wrong_backend_is_found(monkeypatch, part):
    broken(monkeypatch, DAMAGES[part])
    ran = run("devices", "--quick", "--device", "cpu", "--json")
    told = json.loads(ran.stdout)
    assert ran.exit_code == 1
    row = next(row for row in told["rows"] if row["name"] == "broken")
    assert part in row["excess"]
    assert row["taken"]
    assert not told["ok"]
    assert part != "output" or row["errors"]["output"] is None


@pytest.mark.medium
@pytest.mark.usefixtures("one_dtype")
def test_a_backend_that_is_not_taken_may_be_wrong(monkeypatch):
    broken(monkeypatch, lambda output, log_z: (output, 2 * log_z))
    monkeypatch.setattr(room, "choose", lambda asked, registry, problem: registry[1])
    ran = run("devices", "--quick", "--device", "cpu")
    assert ran.exit_code == 0
    assert "; auto does not choose it" in " ".join(ran.stdout.split())


@pytest.mark.medium
@pytest.mark.usefixtures("one_dtype")
def test_the_tables_fit_a_narrow_terminal():
    ran = run("devices", "--quick", "--device", "cpu")
    assert ran.exit_code == 0
    assert max(map(len, ran.stdout.splitlines())) <= 80
    assert "\x1b" not in ran.output
    assert "not measured" in ran.stdout
    assert ran.stdout.rstrip().endswith("Every backend that auto chooses is within its error bounds.")
    assert "massieu: choosing backends for float32" in ran.stderr


@pytest.mark.medium
@pytest.mark.usefixtures("one_dtype")
def test_json_is_what_the_page_says():
    told = json.loads(run("devices", "--quick", "--json", "--device", "cpu").stdout)
    page = (Path(__file__).parent.parent / "docs" / "how-to" / "ops.md").read_text()
    for name in {*told, *told["rows"][0], *told["choices"][0]}:
        assert f"`{name}`" in page, name


def test_interrupted(monkeypatch):
    def stop(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(room, "_measure", stop)
    result = survey("cpu", True)
    assert (len(result.choices), result.rows, result.complete) == (28, (), False)
    ran = run("devices", "--quick", "--device", "cpu")
    assert ran.exit_code == 130
    assert "soft-capped" in ran.stdout
    assert ran.stderr.splitlines()[-1] == "massieu: interrupted: the remaining backends were not measured"


@pytest.mark.parametrize(("device", "message"), [
    ("abacus", "device 'abacus' is not there"), ("cuda:99", "device 'cuda:99' is not there"),
    ("meta", "device must be the CPU or CUDA, got 'meta'"),
])  # fmt: skip
def test_no_such_device(device, message):
    assert_bad(run("devices", "--device", device), message)
    with pytest.raises(ValueError, match=message):
        survey(device)


def test_bars_are_met_or_not():
    def row(**changes):
        given = {
            "errors": {"output": 1.0},
            "bars": {"output": 2.0, "share": 0.1},
            "share": 1.05,
            "taken": True,
        } | changes
        return Measured(
            "a", "float32", True, forward_seconds=1, both_seconds=1, forward_ratio=1, both_ratio=1, mebibytes=1, **given
        )

    assert row().excess == []
    assert row(errors={"output": 2.5}).excess == ["output"]
    assert row(errors={"output": math.nan}).excess == ["output"]
    assert row(share=0.85).excess == row(share=math.nan).excess == ["share"]
    whole = Survey("cpu", "a", "2", {}, rows=(row(), row(share=0.0, taken=False)))
    assert whole.ok
    assert not Survey("cpu", "a", "2", {}, rows=(row(share=0.0),)).ok


def test_works_are_timed_in_turns():
    done: list[str] = []
    works = {name: partial(done.append, name) for name in ("first", "second")}
    seconds = turns(works, torch.device("cpu"), budget=0.0)
    assert done == ["first", "second"] * 4  # once for nothing, then three rounds
    assert [len(each) for each in seconds.values()] == [3, 3]
    assert all(each > 0 for each in seconds["first"] + seconds["second"])


@pytest.mark.slow
def test_in_a_process_of_its_own():
    command = [*COMMAND, "devices", "--quick", "--device", "cpu", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120, check=True)
    told = json.loads(ran.stdout)
    assert told["ok"]
    assert all(row["forward_seconds"] > 0 for row in told["rows"])
