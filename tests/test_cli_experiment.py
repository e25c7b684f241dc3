"""`massieu experiment`: what it lists, prints and stores, and how it ends."""

import json
import math
from pathlib import Path

import pytest
from tests.support.command_line import run

from massieu.papers.experiments.run import RESULTS, load
from massieu.papers.experiments.study import experiments


@pytest.mark.medium
def test_the_list_has_each_question_and_what_was_found_last():
    ran = run("experiment", "list")
    assert ran.exit_code == 0 and not ran.stderr
    for name in ("precision", "temperature", "sink"):
        assert f"\n{name} " in ran.stdout
    assert "E22" in ran.stdout and "confirmed" in ran.stdout


@pytest.mark.medium
def test_the_list_as_json_has_what_the_table_has():
    ran = run("experiment", "list", "--json")
    assert ran.exit_code == 0 and not ran.stderr
    entries = {entry["experiment"]: entry for entry in json.loads(ran.stdout)}
    assert {"precision", "temperature", "sink"} <= entries.keys()
    stored = json.loads((RESULTS / "sink.json").read_text(encoding="utf-8"))
    assert entries["sink"]["verdict"] == stored["verdict"]
    assert entries["sink"]["date"] == stored["made"]["date"]
    assert entries["sink"]["question"] == experiments()["sink"].question
    assert entries["sink"].keys() == {"experiment", "question", "claims", "minutes", "verdict", "date"}


@pytest.mark.medium
def test_a_run_and_tuning_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    study = load(RESULTS / "sink.json")
    monkeypatch.setattr("massieu.papers.experiments.run.run", lambda name, **settings: (study, True))
    ran = run("experiment", "sink", "--json", "--out", tmp_path)
    assert ran.exit_code == 0
    printed, stored = (json.loads(text) for text in (ran.stdout, (RESULTS / "sink.json").read_text(encoding="utf-8")))
    assert printed.keys() >= stored.keys()
    for name in ("experiment", "verdict", "seeds", "made"):
        assert printed[name] == stored[name]
    monkeypatch.setattr("massieu.papers.experiments.run.tune", lambda name, **settings: {"at 1": 0.5, "at 2": math.nan})
    assert json.loads(run("experiment", "sink", "--tune", "--json").stdout) == {"at 1": 0.5, "at 2": None}


@pytest.mark.medium
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sinks"], "did you mean sink"),
        (["sink", "--seeds", "1,x"], "--seeds needs different whole numbers"),
        (["sink", "--seeds", "1,1"], "got '1,1'"),
        (["wind-tunnel", "--tune", "--large"], "exclude each other"),
        (["sink", "--model", "gpt2"], "--model works with the experiment wind-tunnel only"),
        (["wind-tunnel", "--model", "no/such/folder"], "no/such/folder"),
        (["normaliser", "--tune", "--seeds", "0,1"], "--tune takes one seed, got 2"),
        (["normaliser", "--tune", "--seeds", "6"], "seed 6 is used for verdicts"),
        (["sink", "--large"], "sink has no large size"),
        (["normaliser", "--tune", "--resume"], "--resume continues a run of seeds; it does not go with --tune"),
        (["list", "--resume"], "does not go with list"),
        (["wind-tunnel", "--model", "gpt2", "--seeds", "5"], "--seeds chooses the seeds of a run"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], said: str, tmp_path: Path):
    ran = run("experiment", *arguments, "--out", tmp_path / "new")
    assert ran.exit_code == 2 and said in ran.stderr and ran.stderr.count("\n") == 1
    assert ran.stderr.startswith("massieu: ") and isinstance(ran.exception, SystemExit)
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_quick_run_prints_thresholds_and_writes_page_and_numbers(tmp_path: Path):
    command = ("experiment", "temperature", "--quick", "--out", tmp_path)
    ran = run(*command)
    assert ran.exit_code == 0 and "verdict: undecided (a quick run gives no verdict)" in ran.stdout
    stored = json.loads((tmp_path / "temperature.quick.json").read_text())
    assert stored["quick"] and list(stored["seeds"]) == ["5"] and len(stored["criteria"]) == 4
    assert "seed 5 (1 of 1" in ran.stderr and (tmp_path / "temperature.quick.html").exists()
    again = run(*command, "--resume")
    assert json.loads((tmp_path / "temperature.quick.json").read_text())["seeds"] == stored["seeds"]
    assert again.exit_code == 0


@pytest.mark.medium
def test_tuning_is_given_the_seed_the_size_and_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls = []

    def tune(name: str, **settings: object) -> dict[str, float]:
        calls.append((name, settings))
        return {"all at 0.024": 0.5}

    monkeypatch.setattr("massieu.papers.experiments.run.tune", tune)
    ran = run("experiment", "conservative", "--tune", "--quick", "--seeds", "3", "--out", tmp_path)
    assert ran.exit_code == 0, ran.stderr
    assert calls == [("conservative", {"seed": 3, "quick": True, "out": tmp_path})]
    assert "all at 0.024" in ran.stdout and f"numbers: {tmp_path / 'conservative.tuning.json'}" in ran.stdout
