"""The command line: what it passes on, what it says, how it ends."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.support.command_line import (
    ENVIRONMENT,
    FILES,
    StandInResult,
    assert_bad,
    checkpoint,
    probed,
    process,
    run,
)
from typer.testing import CliRunner

import massieu
from massieu import cli
from massieu.cli.commands import app
from massieu.errors import InputError, MissingExtraError, require_extra
from massieu.probing import run as run_module
from massieu.probing.result import result as result_module
from massieu.probing.statistics.registry import GROUPS, OPT_IN, STATISTICS

__all__ = ["checkpoint", "probed"]  # fixtures


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("The cat sat on the mat, and the dog did not. " * 40)
    return path


def said(value: object) -> dict[str, object]:
    """The fields of a frozen object that are not at their defaults, but for what is made of them."""
    fields = {
        field.name: (getattr(value, field.name), field.default) for field in dataclasses.fields(value) if field.init
    }  # pyright: ignore[reportArgumentType]
    return {name: held for name, (held, default) in fields.items() if held != default}


def test_everything_is_passed_on(probed, tmp_path):
    arguments = (
        "probe", "some/model", "--text", "a.txt", "b", "-", "--column", "body", "--out", tmp_path / "out",
        "--max-length", 64, "--max-tokens", 1000, "--batch-size", 4, "--query-sample", 16, "--no-packing", "--no-bos",
        "--device", "cpu", "--dtype", "bfloat16", "--statistics", "entropy", "--statistics", "climb, maps", "--draws", 3,
        "--seed", 7, "--revision", "v1", "--trust-remote-code", "--format", "csv", "--generate", 9, "--resume",
        "--store-every", 0.5, "--replace", "off", "--replace", "top_k(8)", "--replace-per", "head", "--replace-windows", 3,
        "--tokenizer", "words/", "--per-token", "entropy, largest_score",
    )  # fmt: skip
    ran = run(*arguments)
    assert ran.exit_code == 0, ran.output
    assert said(probed.model) == {
        "name": "some/model", "device": "cpu", "dtype": "bfloat16", "revision": "v1", "trust_remote_code": True,
    }  # fmt: skip
    assert said(probed.data) == {
        "paths": ("a.txt", "b", "-"), "tokenizer": "words/", "column": "body", "window": 64, "limit": 1000,
        "fill_windows": False, "bos": False, "continue_for": 9,
    }  # fmt: skip
    assert said(probed.options.pop("run")) == {
        "folder": tmp_path / "out" / "running", "resume": True, "store_every": 0.5, "progress": probed.progress,
    }  # fmt: skip
    assert probed.options == {
        "statistics": ["entropy", "climb", "maps"], "draws": 3, "batch_size": 4, "query_sample": 16, "seed": 7,
        "replace": [massieu.Replacement(rule, per="head", windows=3) for rule in ("off", "top_k(8)")],
        "per_token": ["entropy", "largest_score"],
    }  # fmt: skip
    assert probed.result.saved == [(tmp_path / "out", "csv")]


def test_what_is_not_said_is_left_to_the_probe(probed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("probe").exit_code == 0
    assert said(probed.model) == said(probed.data) == {}
    assert isinstance(probed.data, massieu.Text)
    folder = Path("massieu-results/all-MiniLM-L6-v2/running")
    assert said(probed.options.pop("run")) == {"folder": folder, "progress": probed.progress}
    assert probed.options == {
        "statistics": None, "batch_size": 8, "query_sample": None, "seed": 0, "replace": [], "per_token": False,
    }  # fmt: skip


def test_pairs_and_a_device_map_are_passed_on(probed, tmp_path):
    pairs = ("--text", "a.csv", "--source", "en", "--target", "de", "--max-length", 64, "--max-tokens", 9)
    ran = run("probe", "m", *pairs, "--device-map", "auto", "--out", tmp_path)
    assert ran.exit_code == 0, ran.output
    assert said(probed.model) == {"name": "m", "device_map": "auto"}
    assert isinstance(probed.data, massieu.Pairs)
    assert said(probed.data) == {"paths": ("a.csv",), "source": "en", "target": "de", "window": 64, "limit": 9}


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (("--quick",), {"statistics": "quick"}),
        (("--quick", "--statistics", "entropy"), {"statistics": ["entropy"], "draws": 0}),
        (("--draws", 0), {"statistics": None, "draws": 0}),
    ],
)
def test_runs_without_a_control(probed, tmp_path, arguments, options):
    assert run("probe", "--out", tmp_path, *arguments).exit_code == 0
    assert {name: probed.options[name] for name in ("statistics", "draws") if name in probed.options} == options


def test_the_heads_means_are_replaced_on_as_many_windows_as_rules(probed, tmp_path):
    assert run("probe", "--out", tmp_path, "--statistics", "replacement", "--replace-windows", 3).exit_code == 0
    assert probed.options["replace"] == [massieu.Replacement("off(mean)", per="head", windows=3)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--images", "photos", "--text", "a", "--max-tokens", 9), "in place of text: leave out --text, --max-tokens"),
        (("--images", "photos", "--generate", 9, "--no-packing"), "leave out --generate, --no-packing"),
        (("--text", "a.csv", "--source", "en", "--target", "de", "--column", "fr"), "of pairs: leave out --column"),
        (("--text", "a.csv", "--source", "en", "--target", "de", "--bos"), "of pairs: leave out --bos"),
        (("--source", "en", "--target", "de"), "no text was given; name a table with --text"),
        (("--text", "a.csv", "--source", "en"), "only source was given; pairs need both columns"),
        (("--max-length", 2), r"window \(--max-length\) must be at least 4, got 2"),
        (("--max-tokens", 0), r"limit \(--max-tokens\) must be at least 1, got 0"),
        (("--device", "cpu", "--device-map", "auto"), "either a device or a device map"),
        (("--dtype", "int8"), "unknown dtype 'int8'; known are float32"),
        (("--replace", "softmax"), "unknown rule 'softmax'"),
        (("--store-every", 0), "store_every must be a positive number of minutes"),
    ],
)
def test_options_that_do_not_go_together_are_one_sentence(probed, tmp_path, arguments, message):
    assert_bad(run("probe", "--out", tmp_path / "out", *arguments), message)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (None, "all-MiniLM-L6-v2"), ("gpt2", "gpt2"), ("org/name", "name"), ("./folder/", "folder"), (".", "here"),
        ("folder/small.Q4_1.gguf", "small.Q4_1"),
    ],
)  # fmt: skip
def test_the_default_folder_is_named_after_the_model(probed, tmp_path, monkeypatch, model, name):
    here = tmp_path / "here"
    (here / "folder").mkdir(parents=True)
    monkeypatch.chdir(here)
    assert run("probe", *([] if model is None else [model])).exit_code == 0
    assert probed.result.saved == [(Path("massieu-results", name), "parquet")]


@pytest.mark.parametrize(
    ("arguments", "model", "text"),
    [
        (["m", "--text", "a", "--text", "b"], "m", ["a", "b"]),
        (["m", "--text", "a", "b", "--seed", "1"], "m", ["a", "b"]),
        (["--text", "a", "b"], None, ["a", "b"]),
        (["--text", "a", "--seed", "1", "m"], "m", ["a"]),
        (["--text=a", "m"], "m", ["a"]),
        (["--text", "a", "--", "m"], "m", ["a"]),
        (["m", "--text", "-"], "m", ["-"]),
    ],
)
def test_several_paths_may_follow_one_text_option(probed, tmp_path, arguments, model, text):
    ran = run("probe", "--out", tmp_path, *arguments)
    assert ran.exit_code == 0, ran.output
    assert (probed.model.name, probed.data.paths) == (model, tuple(text))


def test_a_model_taken_for_text_is_noticed(probed, checkpoint, text):
    ran = run("probe", "--text", text, checkpoint)
    assert ran.exit_code == 2
    assert ran.stderr == f"massieu: {checkpoint}, given after --text, is a model; put MODEL before --text\n"


def test_the_summary_names_the_findings_and_the_page(probed, tmp_path):
    ran = run("probe", "--out", tmp_path)
    assert ran.stdout.splitlines() == [
        "a model: 12,345 tokens in 48 windows of text.txt",
        "note: the last 3 tokens were left out",
        "",
        "Attention on the first token",
        "  3 of 72 heads look at [CLS].",
        "",
        "Sharpest heads",
        "  Layer 0 head 1.",
        "",
        "Is a head a memory?",
        "  Slope: median 2.01 (0.500 to 5.38); mismatched keys 1.35; above its control in places",
        "",
        f"page: {tmp_path / 'report.html'}",
    ]
    lines = ran.stderr.splitlines()
    assert lines[0] == "massieu: loading the model"
    assert lines[1] == "massieu: reading (100 tokens)"
    assert lines[-1] == "massieu: warning: 2 queries had NaN"
    assert "\x1b" not in ran.output


def test_a_terminal_gets_a_bar_with_tokens_per_second(probed, tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # For rich, which takes standard error for a terminal then.
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("massieu.foundation.watching.watched", lambda: "terminal")
    ran = run("probe", "--out", tmp_path)
    assert re.search(r"300 tokens, [\d,]+ per second", ran.stderr)
    assert "\x1b" in ran.stderr


# --- endings ---------------------------------------------------------------------------------------------------------


def test_an_interrupted_run_is_saved_and_says_so(probed, tmp_path):
    probed.result = StandInResult(complete=False)
    ran = run("probe", "--out", tmp_path)
    assert ran.exit_code == 130
    assert probed.result.saved == [(tmp_path, "parquet")]
    assert "page:" in ran.stdout
    assert "incomplete" in ran.stderr.splitlines()[-1]


def test_an_interrupted_run_names_what_can_be_done(probed, tmp_path):
    """With `--replace` a run cannot be gone on from, so that `--resume` would be refused."""
    probed.result = StandInResult(complete=False)
    last = run("probe", "--out", tmp_path).stderr.splitlines()[-1]
    assert last.endswith("run the same command with --resume to continue")
    with_replace = ["probe", "--out", tmp_path, "--replace", "off(mean)"]
    last = run(*with_replace).stderr.splitlines()[-1]
    assert last.endswith("run the same command to begin again: with --replace, no run is continued")
    probed.result = StandInResult()
    assert run(*with_replace).exit_code == 0


def test_numbers_that_are_not_finite_are_said_first_and_end_with_3(probed, tmp_path):
    probed.result.trouble = "the model is broken: NaN in the weight a.b"
    ran = run("probe", "--out", tmp_path)
    assert ran.exit_code == 3
    assert probed.result.saved == [(tmp_path, "parquet")], "the result is written all the same"
    said = [line for line in ran.stderr.splitlines() if "warning" in line or "broken" in line]
    assert said[0] == "massieu: the model is broken: NaN in the weight a.b"


def test_an_interrupt_elsewhere_ends_with_the_same_code(probed, tmp_path):
    probed.result = StandInResult(broken=KeyboardInterrupt())
    ran = run("probe", "--out", tmp_path)
    assert (ran.exit_code, ran.stderr.splitlines()[-1]) == (130, "massieu: interrupted")
    probed.error = KeyboardInterrupt()
    ran = run("probe", "--out", tmp_path)
    assert (ran.exit_code, ran.stderr) == (130, "massieu: interrupted\n")


def test_bad_input_is_one_line(probed, tmp_path):
    probed.error = InputError("a message\nin two\n  lines")
    ran = run("probe", "--out", tmp_path)
    assert (ran.exit_code, ran.stderr, ran.stdout) == (2, "massieu: a message in two lines\n", "")
    probed.error = MissingExtraError('install it with: pip install "massieu[probe]"')
    ran = run("probe", "--out", tmp_path)
    assert (ran.exit_code, ran.stderr) == (2, 'massieu: install it with: pip install "massieu[probe]"\n')


@pytest.mark.parametrize("error", [ValueError("ours to mend"), RuntimeError("out of memory")])
def test_an_unexpected_error_keeps_its_traceback(probed, tmp_path, error):
    probed.error = error
    ran = run("probe", "--out", tmp_path)
    assert ran.exit_code == 1
    assert ran.exception is error


def test_a_missing_extra_names_the_command_that_installs_it():
    with pytest.raises(MissingExtraError, match=re.escape('pip install "massieu[probe]"')):
        require_extra("no_such_module.inside", "probe")
    assert require_extra("json", "probe") is json


def test_an_import_that_fails_inside_a_module_is_not_taken_for_a_missing_extra(tmp_path, monkeypatch):
    (tmp_path / "half_installed.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        require_extra("half_installed", "probe")


# --- bad input, through to the end -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, r"there is no text .*missing\.txt"),
        ("empty.txt", b"", r"the text is empty: there is nothing to read in .*empty\.txt"),
        ("latin.txt", b"caf\xe9", r"latin\.txt is not UTF-8 text: the byte at offset 3"),
        ("paper.pdf", b"x", r"paper\.pdf is of an unknown kind; files that can be read end in \.txt \.md"),
        ("broken.jsonl", b"{", r"broken\.jsonl:1 is not valid JSON"),
        ("other.jsonl", b'{"body": ""}', r"other\.jsonl:1 has no column 'text'; its columns are 'body'"),
    ],
)
def test_bad_text(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert_bad(run("probe", "--out", tmp_path / "out", "--text", tmp_path / name), message)
    assert not (tmp_path / "out").exists()


def test_a_folder_without_text(tmp_path):
    (tmp_path / "image.png").touch()
    assert_bad(run("probe", "--out", tmp_path / "out", "--text", tmp_path), r"holds no text; .* \.txt .* \.parquet")


def test_a_misspelt_statistic_is_answered_with_those_like_it(tmp_path, text):
    ran = run("probe", "--out", tmp_path / "out", "--text", text, "--statistics", "entropy,largest_wieght")
    assert_bad(ran, r"'largest_wieght'; did you mean largest_weight\b.*'massieu statistics' lists them")


def test_an_output_folder_that_cannot_be(probed, tmp_path):
    taken = tmp_path / "file"
    taken.touch()
    for out in (taken, taken / "below", taken / "far" / "below"):
        assert_bad(run("probe", "--out", out), r"the output folder .* cannot be made: .*/file is a file")
    dangling = tmp_path / "link"
    dangling.symlink_to(tmp_path / "nowhere")
    assert_bad(run("probe", "--out", dangling), r"the output folder .*link cannot be made")
    assert probed.options == {}  # nothing was loaded


def test_a_device_that_is_not_there(tmp_path, checkpoint, text):
    for device in ("cuda:99", "abacus", *([] if torch.accelerator.is_available() else ["gpu"])):
        ran = run("probe", checkpoint, "--text", text, "--out", tmp_path / "out", "--device", device)
        assert_bad(ran, re.escape(repr(device)))


def test_no_such_model(tmp_path, text):
    out = tmp_path / "out"
    (tmp_path / "folder").mkdir()
    assert_bad(run("probe", tmp_path / "folder", "--text", text, "--out", out), "folder is not a model")
    assert_bad(run("describe", tmp_path / "folder"), "folder is not a model")
    assert_bad(run("probe", "no-such-org/no-such-model", "--text", text, "--out", out), "no-such-org/no-such-model")
    assert not out.exists()


def test_no_such_result(tmp_path):
    assert_bad(run("report", tmp_path / "nothing"), "nothing is missing; a result is a folder")
    assert_bad(run("report", tmp_path), r"has no run\.json")


@pytest.mark.parametrize(("option", "value"), [("--max-length", 0), ("--max-tokens", 0), ("--batch-size", -1)])
def test_numbers_out_of_range(tmp_path, text, option, value):
    assert_bad(run("probe", "--text", text, "--out", tmp_path, option, value), f"must be at least ., got {value}")


@pytest.mark.parametrize(
    "arguments", [["probe", "--nonsense"], ["prob"], ["probe", "--seed", "x"], ["report"], []], ids=" ".join
)
def test_wrong_usage_ends_with_two(arguments):
    assert run(*arguments).exit_code == 2


# --- the other commands ----------------------------------------------------------------------------------------------


def test_statistics_are_a_line_each_with_group_and_meaning():
    ran = run("statistics")
    assert ran.exit_code == 0
    lines = ran.stdout.splitlines()
    for statistic, line in zip(STATISTICS.values(), lines, strict=False):
        assert line.split() == [statistic.name, statistic.group, *statistic.question.split()]
    assert lines[len(STATISTICS) :] == [
        "", f"{len(STATISTICS)} statistics; 'massieu statistics NAME' explains one, or all of a group",
        "groups that are measured only where they are named: " + ", ".join(
            sorted({each.group for each in STATISTICS.values() if each.group in OPT_IN})
        ),
    ]  # fmt: skip


def test_a_statistic_is_told_in_full_by_its_name_or_its_group():
    for names in (list(STATISTICS), GROUPS):
        ran = run("statistics", *names)
        assert ran.exit_code == 0
        for each in STATISTICS.values():
            for fact in (
                each.name,
                each.title,
                each.formula,
                each.claim,
                each.paper,
                each.caveat,
                each.question,
                each.cost,
            ):
                assert fact in ran.stdout
    one = run("statistics", "entropy").stdout
    assert STATISTICS["entropy"].formula in one
    assert STATISTICS["log_partition"].formula not in one
    assert_bad(run("statistics", "entropy", "temper"), "unknown statistic 'temper'; 'massieu statistics' lists them")


def test_the_version():
    assert run("--version").stdout == f"massieu {massieu.__version__}\n"


def test_describe_draws_tables(monkeypatch):
    result = {
        "model": {"name": "a [b]model[/b]", "revision": None, "hidden_size": 48},
        "route": "by [hand]",
        "sites": [
            {
                "index": 0,
                "layer": 3,
                "name": "site.[0]",
                "kind": "cross",
                "heads": 12,
                "key_heads": 4,
                "head_size": 32,
                "route": "tap",
                "grade": "scores",
            }
        ],
        "sublayers": [{"index": 0, "layer": None, "name": "last norm", "kind": "norm"}],
        "unavailable": ["climb: [no] projection"],
        "warnings": ["1 module was not seen"],
    }
    monkeypatch.setattr(run_module, "describe", lambda model, **_: SimpleNamespace(to_dict=lambda: result))
    ran = run("describe", "some/model")
    assert ran.exit_code == 0, ran.output
    for shown in (
        "a [b]model[/b]",
        "by [hand]",
        "site.[0]",
        "cross",
        "tap",
        "scores",
        "last norm",
        "climb: [no] projection",
        "–",
    ):
        assert shown in ran.stdout
    assert "1 module was not seen" in ran.stderr
    assert "\x1b" not in ran.output
    plain = run("describe", "some/model", "--json")
    assert plain.exit_code == 0 and json.loads(plain.stdout) == result


@pytest.mark.parametrize(
    "command", [[], ["probe"], ["describe"], ["report"], ["statistics"], ["verify"], ["experiment"]], ids=" ".join
)
def test_help_is_plain_and_short(command):
    ran = run(*command, "--help")
    assert ran.exit_code == 0
    whole = re.sub(r"PATH \.\.\.|NAME,\.\.\.|\[ARGS\]\.\.\.|(ID|NAME) \.\.\.", "", ran.stdout)
    assert "..." not in whole
    assert "\x1b" not in ran.stdout
    assert not re.search(r"<(str|int|float|bool|path)>|list\[|\{", ran.stdout)  # no types of Python


def test_the_help_of_a_probe_has_its_options_under_headings():
    shown = run("probe", "--help").stdout
    assert shown.splitlines()[0].endswith("probe [OPTIONS] [MODEL] [PROMPT]")
    lines = [line for line in shown.splitlines() if re.match(r"\w[\w ]*:$|  --", line)]
    sections: dict[str, list[str]] = {}
    heading = ""
    for line in lines:
        if line.endswith(":") and not line.startswith(" "):
            heading = line[:-1]
            sections[heading] = []
        else:
            sections[heading].append(line.split()[0])
    assert list(sections) == ["Arguments", "Model", "What is read", "What is measured", "Output", "Options"]
    assert {"--device", "--dtype", "--tokenizer"} <= set(sections["Model"])
    assert {"--text", "--max-tokens", "--images"} <= set(sections["What is read"])
    assert {"--statistics", "--draws", "--replace", "--seed"} <= set(sections["What is measured"])
    assert {"--out", "--json", "--resume"} <= set(sections["Output"])
    assert not sections["Options"]  # --help alone, which begins with -h


def test_the_help_names_the_groups_that_are_measured_by_default():
    shown = " ".join(run("probe", "--help").stdout.split())
    *groups, last = [name for name in GROUPS if name not in OPT_IN]
    assert f"[default: the groups {', '.join(groups)} and {last}]" in shown


@pytest.mark.parametrize(("given", "dtype"), [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_short_names_of_precisions(probed, tmp_path, given, dtype):
    assert run("probe", "--out", tmp_path, "--dtype", given).exit_code == 0
    assert probed.model.dtype == dtype


def test_a_probe_as_json(probed, tmp_path):
    ran = run("probe", "--out", tmp_path, "--json")
    assert ran.exit_code == 0
    summary = json.loads(ran.stdout)
    assert (summary["model"], summary["tokens"], summary["windows"]) == ("a model", 12345, 48)
    assert [finding["statistic"] for finding in summary["findings"]] == ["weight_first", "entropy"]
    assert summary["questions"][0]["answers"] == [
        "Slope: median 2.01 (0.500 to 5.38); mismatched keys 1.35; above its control in places"
    ]
    assert (summary["folder"], summary["warnings"]) == (str(tmp_path), ["2 queries had NaN"])


@pytest.mark.parametrize(
    ("given", "set_to"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)]
)
def test_waiting_threads_soon_sleep_unless_the_user_says_otherwise(given, set_to, monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        # Set first, so that what `main` sets is taken back, too.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cli, "_run", lambda: None)
    cli.main()
    assert os.environ.get("GOMP_SPINCOUNT") == set_to


# --- in processes of its own -----------------------------------------------------------------------------------------


@pytest.mark.medium
def test_help_and_version_import_no_torch():
    heavy = ("torch", "numpy", "transformers", "polars", "plotly", "rich", "massieu.probing", "massieu.papers.claims")
    code = (
        "import sys\nfrom massieu.cli import main\n"
        f"try: main()\nexcept SystemExit: print([m for m in {heavy} if m in sys.modules], file=sys.stderr)"
    )
    for argument in ("--help", "--version"):
        ran = subprocess.run(
            [sys.executable, "-c", code, argument], capture_output=True, text=True, check=True, env=ENVIRONMENT
        )
        assert "massieu" in ran.stdout
        assert ran.stderr == "[]\n"


@pytest.mark.medium
def test_bad_input_from_a_shell(tmp_path):
    """Of a command that loads no torch, which would take most of the time; other commands end in the same place."""
    ran = process("monitor", tmp_path / "missing.jsonl")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == f"massieu: cannot read {tmp_path / 'missing.jsonl'}: No such file or directory\n"


@pytest.mark.slow
def test_standard_input_from_a_shell(tmp_path, checkpoint):
    out = tmp_path / "out"
    empty = CliRunner().invoke(app, ["probe", str(checkpoint), "--text", "-", "--out", str(out)], input="")
    assert_bad(empty, "the text is empty: there is no token in it")
    assert not out.exists()
    ran = process("probe", checkpoint, "--text", "-", "--out", out, "--quick", input="The cat sat on the mat. " * 40)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == f"page: {out / 'report.html'}"
    assert "\x1b" not in ran.stdout + ran.stderr


@pytest.mark.medium
def test_from_text_to_page(tmp_path, checkpoint, text):
    out = tmp_path / "out"
    ran = run("probe", checkpoint, "--text", text, "--out", out, "--max-length", 32, "--batch-size", 2)
    assert ran.exit_code == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == f"page: {out / 'report.html'}"
    assert "\x1b" not in ran.stdout + ran.stderr
    assert {path.name for path in out.iterdir()} == FILES
    stored = json.loads((out / "run.json").read_text())
    # 13 tokens in a sentence, 30 of the text in a window
    assert (stored["text"]["windows"], stored["text"]["tokens"]) == (520 // 30, 520 // 30 * 32)
    assert stored["complete"]

    (out / "report.html").unlink()
    again = run("report", out)
    assert (again.exit_code, again.stdout) == (0, f"page: {out / 'report.html'}\n")
    assert (out / "report.html").stat().st_size > 10_000
    assert result_module.ProbeResult.load(out).complete
