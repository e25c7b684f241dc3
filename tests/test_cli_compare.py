"""`massieu compare`: what is passed on, what is printed, how it ends."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.command_line import COMMAND, ENVIRONMENT, checkpoint
from typer.testing import CliRunner

import massieu
from massieu.cli.commands import app
from massieu.probing.compare.comparison import Comparison
from massieu.probing.result.result import ProbeResult
from massieu.probing.run import probe

__all__ = ["checkpoint"]  # a fixture

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 99}


def _run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Stored results of a model, and of one in which head 0 of the last layer is sharper."""
    import transformers

    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**SMALL)).eval()
    batches = [{"input_ids": torch.randint(99, (10, 16))}]
    folder = tmp_path_factory.mktemp("stored")
    places = []
    for name in ("base", "tuned"):
        result = probe(model, massieu.Batches(batches, documents=True), statistics=["entropy", "weight_first"])
        places.append(result.save(folder / name))
        with torch.no_grad():
            model.encoder.layer[1].attention.self.query.weight[:8] *= 500
    return places[0], places[1]


@pytest.mark.medium
def test_two_results_are_compared_and_stored(stored: tuple[Path, Path], tmp_path: Path):
    ran = _run(*stored, "--out", tmp_path / "out")
    assert ran.exit_code == 0, ran.output
    assert "base and tuned read the same windows, and their errors are paired" in ran.output
    assert "entropy: 1 of 4 heads differ" in ran.output
    assert "layer 1 head 0: " in ran.output
    assert f"page: {tmp_path / 'out' / 'report.html'}" in ran.output
    names = {"comparison.json", "differences.parquet", "report.html", "values.parquet", ".massieu"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert Comparison.load(tmp_path / "out").models == ["base", "tuned"]


@pytest.mark.medium
def test_limits_decide_the_status(stored: tuple[Path, Path], tmp_path: Path):
    out = ("--out", tmp_path / "out")
    change = abs(Comparison.of([*map(ProbeResult.load, stored)], ["a", "b"]).changed()[0].difference)
    assert _run(*stored, *out, "--fail-above", "entropy=9").exit_code == 0
    above = _run(*stored, *out, "--fail-above", "weight_first=9, entropy=0")
    assert above.exit_code == 1
    assert "massieu: above the limit: tuned, layer 1 head 0, entropy differs by" in above.output
    assert change > 0
    # The same model twice: no difference is above 0.
    assert _run(stored[0], stored[0], *out, "--fail-above", "entropy=0,weight_first=0").exit_code == 0


@pytest.mark.medium
def test_json_is_the_comparison_and_nothing_else(stored: tuple[Path, Path], tmp_path: Path):
    ran = CliRunner().invoke(
        app, ["compare", *map(str, stored), "--out", str(tmp_path / "out"), "--json", "--fail-above", "entropy=0"]
    )
    assert ran.exit_code == 1
    said = json.loads(ran.stdout)
    assert said["models"] == ["base", "tuned"]
    assert said["paired"] is True
    assert [(row["layer"], row["head"], row["statistic"]) for row in said["above"]] == [(1, 0, "entropy")]
    assert said["changed"]["tuned"][0]["layer"] == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a"], "at least two models or results, got 1"),
        (["a", "b", "--fail-above", "entropy"], "needs a number, as in entropy=0.1, got 'entropy'"),
        (["a", "b", "--fail-above", "entropy=x"], "got 'entropy=x'"),
        (["a", "b", "--fail-above", "entropy=-1"], "0 or more, got 'entropy=-1'"),
        (["a", "b", "--fail-above", "entropy=nan"], "0 or more, got 'entropy=nan'"),
        (["a", "b", "--fail-above", "warmth=1"], "'warmth' is not one"),
        (["a", "b", "--fail-above", "effective_rank_change=1"], "'effective_rank_change' is not one"),
        (["a", "b", "--fail-above", ","], "needs NAME=X, as in entropy=0.1, got ','"),
        (["a", "b", "--statistics", "weight_first", "--fail-above", "entropy=1"], "--statistics leaves it out"),
        (["a", "b", "--revisions", "x,y"], "named once; 2 models were given"),
        (["no/such/model", "b"], "cannot load the model no/such/model"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], said: str, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("bad")
    ran = _run(*arguments, "--out", folder / "out")
    assert ran.exit_code == 2, ran.output
    assert said in ran.output
    assert ran.output.count("massieu: ") == ran.output.count("\n")
    assert not (folder / "out").exists()


@pytest.mark.slow
def test_revisions_are_read_one_after_the_other(checkpoint: Path, tmp_path: Path):
    """Of a model in the hub's cache: each revision is another snapshot; a revision that moved is read again."""
    import transformers

    cache = tmp_path / "hub" / "models--me--small"
    model = transformers.AutoModel.from_pretrained(checkpoint)
    for number, name in enumerate(("step1", "step10", "later")):
        snapshot = cache / "snapshots" / f"{number:040d}"
        with torch.no_grad():
            model.encoder.layer[1].attention.self.query.weight[:8] *= 50.0 if number else 1.0
        model.save_pretrained(snapshot)
        transformers.AutoTokenizer.from_pretrained(checkpoint).save_pretrained(snapshot)
        (cache / "refs").mkdir(exist_ok=True)
        (cache / "refs" / name).write_text(snapshot.name)
    given = ["me/small", "--revisions", "step1,step10", "--statistics", "entropy", "--max-tokens", "500"]
    program = _IN_ONE_PROCESS.format(
        given=["compare", *given, "--out", str(tmp_path / "out")], refs=str(cache / "refs")
    )
    environment = {**ENVIRONMENT, "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    first, second, moved = done.stdout.split("END OF COMMAND\n")[:3]
    assert "step1: reading" in first and "step10: reading" in first
    comparison = Comparison.load(tmp_path / "out")
    assert (comparison.models, comparison.steps) == (["step1", "step10"], [1.0, 10.0])
    assert set(comparison.named().filter(comparison.named()["scope"] == "head")["layer"]) == {1}
    assert "reading" not in second
    assert "step1: reading" not in moved and "step10: reading" in moved


# The command three times, before the last of which a revision moves. Where the hub's cache is, is found out on import.
_IN_ONE_PROCESS = """
from pathlib import Path
from typer.testing import CliRunner
from massieu.cli.commands import app

def told():
    ran = CliRunner().invoke(app, {given!r})
    assert ran.exit_code == 0, ran.output
    print(ran.stderr + "END OF COMMAND")

told()
told()
(Path({refs!r}) / "step10").write_text(f"{{2:040d}}")
told()
"""


@pytest.mark.medium
def test_numbers_that_are_none_end_with_3(tmp_path: Path):
    import transformers

    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**SMALL)).eval()
    batches = [{"input_ids": torch.randint(99, (4, 16))}]
    places = []
    for name in ("whole", "broken"):
        places.append(probe(model, batches, statistics=["entropy"]).save(tmp_path / name))
        with torch.no_grad():
            model.encoder.layer[1].attention.self.query.weight[0, 0] = torch.nan
    ran = _run(*places, "--out", tmp_path / "out")
    assert ran.exit_code == 3, ran.output
    assert "warning: broken: " in ran.output
    table = Comparison.load(tmp_path / "out").differences
    broken = table.filter((table["layer"] == 1) & (table["head"] == 0) & (table["statistic"] == "entropy"))
    assert broken["second"].to_list() in ([], [None])
    assert table["q_value"].drop_nulls().is_between(0, 1).all()


@pytest.mark.slow
def test_an_interrupted_command_goes_on(checkpoint: Path, tmp_path: Path):
    """Ctrl-C while the second model is read: the first one is stored, and the same command ends as if alone."""
    import transformers

    text = tmp_path / "text.txt"
    text.write_text("the words of a text that is long enough " * 1500)
    other = tmp_path / "other"
    model = transformers.AutoModel.from_pretrained(checkpoint)
    with torch.no_grad():
        next(model.parameters()).mul_(1.01)
    model.save_pretrained(other)
    transformers.AutoTokenizer.from_pretrained(checkpoint).save_pretrained(other)
    given = [checkpoint, other, "--text", text, "--out", tmp_path / "out", "--max-length", 32]
    given += ["--statistics", "entropy", "--draws", 2]
    process = subprocess.Popen(
        [*COMMAND, "compare", *map(str, given)], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "other: reading" in line:
            os.kill(process.pid, signal.SIGINT)
            break
    rest = process.stderr.read()
    assert process.wait(60) == 130, rest
    assert "1 results of models are stored" in rest
    assert len(list((tmp_path / "out" / "models").iterdir())) == 1
    assert not (tmp_path / "out" / "comparison.json").exists()
    again = _run(*given)
    assert again.exit_code == 0, again.stderr
    assert f"{checkpoint.name}: reading" not in again.stderr
    assert "other: reading" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["--quick"], {"statistics": "quick"}),
        (["--quick", "--statistics", "entropy"], {"statistics": ["entropy"], "draws": 0}),
        (["--draws", "3"], {"draws": 3}),
    ],
    ids=["quick", "quick and named", "draws"],
)
def test_a_quick_comparison_has_no_controls(monkeypatch, tmp_path, arguments, options):
    class ReachedError(Exception):
        """The command has made its request."""

    def run(request: Any, interruption: Any) -> Any:
        data = request.options.pop("data")
        assert isinstance(data, massieu.Text)
        assert request.options == options
        raise ReachedError

    monkeypatch.setattr("massieu.cli.compare.run", run)
    ran = _run("a", "b", "--out", tmp_path, *arguments)
    assert isinstance(ran.exception, ReachedError), ran.output
