"""`massieu monitor`: the page of one run or several, a reference beside them, alarms, and what is one sentence."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from massieu.cli.commands import app


def _run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["monitor", *map(str, arguments)])


def _written(path: Path, factor: float = 1.0, layers: int = 2) -> Path:
    header = {"massieu": "0.1.0", "monitor": {"prefix": "massieu", "layers": layers, "every": 100}}
    records = [
        {"step": step, "massieu/loss": 2.0, "massieu/entropy_min": 1.0 / (factor if step >= 200 else 1.0)}
        for step in range(0, 600, 100)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in [header, *records]))
    return path


def test_a_page_is_written_beside_the_run(tmp_path: Path):
    ran = _run(_written(tmp_path / "run.jsonl"))
    assert ran.exit_code == 0
    assert ran.output == f"page: {tmp_path / 'run.html'}\n"
    page = (tmp_path / "run.html").read_text()
    assert "<title>run · massieu monitor</title>" in page
    assert "No alarm is recorded." in page


def test_a_page_for_a_device_goes_to_the_device(tmp_path: Path):
    link = tmp_path / "page.html"
    link.symlink_to("/dev/null")
    ran = _run(_written(tmp_path / "run.jsonl"), "--out", link)
    assert ran.output == f"page: {link}\n"
    assert link.is_char_device()


def test_a_page_keeps_its_mode_and_a_link_its_target(tmp_path: Path):
    page = tmp_path / "inner" / "page.html"
    link = tmp_path / "link.html"
    page.parent.mkdir()
    page.write_text("old")
    page.chmod(0o600)
    link.symlink_to(page)
    assert _run(_written(tmp_path / "run.jsonl"), "--out", link).exit_code == 0
    assert link.is_symlink()
    assert "massieu monitor</title>" in page.read_text()
    assert page.stat().st_mode & 0o7777 == 0o600


def test_other_runs_and_a_reference_beside_a_run_with_alarms(tmp_path: Path):
    run, other, healthy = (
        _written(tmp_path / f"{name}.jsonl", factor) for name, factor in (("a", 5), ("b", 1), ("c", 1))
    )
    header, *lines = map(json.loads, run.read_text().splitlines())
    for line in lines[3:]:
        line["alarms"] = ["massieu/entropy_min"]
    run.write_text("".join(json.dumps(line) + "\n" for line in [header, *lines]))
    ran = _run(run, other, "--reference", healthy, "--out", tmp_path / "new" / "page.html")
    assert ran.exit_code == 0
    assert "massieu: in alarm from step 300: massieu/entropy_min\n" in ran.output
    page = (tmp_path / "new" / "page.html").read_text()
    assert (
        '<code>massieu/entropy_min</code></th><td data-label="From step">300</td><td data-label="To step">500</td>'
        in page
    )
    # A reference is drawn, and no more: the other run, five times as far from it, is in no alarm.
    assert _run(other, "--reference", run).output == f"page: {tmp_path / 'b.html'}\n"
    assert "No alarm is recorded." in (tmp_path / "b.html").read_text()


def test_json_has_the_latest_numbers_and_every_alarm(tmp_path: Path):
    run = _written(tmp_path / "run.jsonl")
    header, *lines = map(json.loads, run.read_text().splitlines())
    lines[-1]["massieu/loss"] = "NaN"
    for line in lines[3:]:
        line["alarms"] = ["massieu/loss"]
    run.write_text("".join(json.dumps(line) + "\n" for line in [header, *lines]))
    ran = _run(run, "--json")
    assert ran.exit_code == 0
    assert json.loads(ran.stdout) == {
        "page": str(tmp_path / "run.html"),
        "runs": [
            {
                "name": "run",
                "settings": {"prefix": "massieu", "layers": 2, "every": 100},
                "records": 6,
                "first_step": 0,
                "last_step": 500,
                "latest": {"massieu/loss": None, "massieu/entropy_min": 1.0},
                "alarms": [{"step": step, "keys": ["massieu/loss"]} for step in (300, 400, 500)],
                "notes": [],
            }
        ],
    }
    assert ran.stderr == "massieu: in alarm from step 300: massieu/loss\n"
    assert (tmp_path / "run.html").exists()


def test_keys_of_others_cannot_steer_the_terminal(tmp_path: Path):
    run = _written(tmp_path / "run.jsonl")
    key = "massieu/layer\x1b]0;owned\x07\x9b2J"
    with run.open("a") as file:
        file.write(json.dumps({"step": 600, key: 1.0, "alarms": [key]}) + "\n")
    ran = _run(run)
    assert ran.exit_code == 0
    assert r"in alarm from step 600: massieu/layer\u001b]0;owned\u0007\u009b2J" in ran.output
    assert not set("\x1b\x07\x9b") & set(ran.output)


def test_a_line_that_was_cut_off_is_left_out_with_one_sentence(tmp_path: Path):
    run = _written(tmp_path / "run.jsonl")
    with run.open("a") as file:
        file.write('{"step": 600, "massieu/lo')
    ran = _run(run)
    assert ran.exit_code == 0
    assert "massieu: line 8 of run.jsonl was cut off and is left out\n" in ran.output
    assert "Line 8 of run.jsonl was cut off and is left out." in (tmp_path / "run.html").read_text()


def test_a_reference_of_another_model_is_said_on_the_page(tmp_path: Path):
    assert (
        _run(_written(tmp_path / "run.jsonl"), "--reference", _written(tmp_path / "big.jsonl", layers=12)).exit_code
        == 0
    )
    said = "Big cannot be compared with run: it had layers 12 in place of 2."
    assert said in (tmp_path / "run.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{tmp}/none.jsonl"], "massieu: cannot read {tmp}/none.jsonl: No such file or directory"),
        (["{tmp}/empty.jsonl"], "massieu: {tmp}/empty.jsonl holds no record of a monitor: it is empty"),
        (
            ["{tmp}/prose.jsonl"],
            "massieu: {tmp}/prose.jsonl, line 1: it must hold a JSON object, as a monitor writes it",
        ),
        (["{tmp}/good.jsonl", "{tmp}/none.jsonl"], "massieu: cannot read {tmp}/none.jsonl"),
        (["{tmp}/good.jsonl", "--reference", "{tmp}/empty.jsonl"], "massieu: {tmp}/empty.jsonl holds no record"),
        (["{tmp}/good.jsonl", "--out", "{tmp}"], "massieu: {tmp} is a folder; the page needs the name of a file"),
        (["{tmp}/good.jsonl", "--out", "{tmp}/good.jsonl"], "massieu: the page cannot be written to {tmp}/good.jsonl"),
        (["{tmp}/good.jsonl", "--out", "{tmp}/x/../good.jsonl"], "massieu: the page cannot be written to {tmp}/x/../"),
        (
            ["{tmp}/good.jsonl", "--out", "{tmp}/good.jsonl/page.html"],
            "massieu: the output folder {tmp}/good.jsonl cannot be made",
        ),
        (["{tmp}"], "massieu: cannot read {tmp}: Is a directory"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], said: str, tmp_path: Path):
    _written(tmp_path / "good.jsonl")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "x").mkdir(exist_ok=True)
    (tmp_path / "prose.jsonl").write_text("It was a dark night.\n")
    ran = _run(*(argument.replace("{tmp}", str(tmp_path)) for argument in arguments))
    assert ran.exit_code == 2
    assert ran.output.startswith(said.replace("{tmp}", str(tmp_path)))
    assert ran.output.count("\n") == 1
    assert len((tmp_path / "good.jsonl").read_text().splitlines()) == 7


def test_help_is_short_and_a_run_is_needed():
    ran = _run("--help")
    assert ran.exit_code == 0
    assert all(len(line) <= 80 for line in ran.output.splitlines())
    assert _run().exit_code == 2


def test_jinja_and_plotly_are_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    ran = _run(_written(tmp_path / "run.jsonl"))
    assert ran.exit_code == 2
    assert 'is not installed; install it with: pip install "massieu[probe]"' in ran.output


@pytest.mark.medium
def test_the_command_loads_no_torch(tmp_path: Path):
    run = _written(tmp_path / "run.jsonl", 5)
    healthy = _written(tmp_path / "healthy.jsonl")
    code = (
        "import sys; from massieu.cli.commands import app; app(sys.argv[1:], standalone_mode=False); "
        "print([name for name in ('torch', 'transformers', 'polars') if name in sys.modules])"
    )
    arguments = ["monitor", str(run), "--reference", str(healthy)]
    ran = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"
