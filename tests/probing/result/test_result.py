"""The result object: what is stored is what is read, whole or not at all."""

import json
import os
import shutil
import warnings
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars
import pytest
from polars.testing import assert_frame_equal
from tests.support.power_loss import Disk

from massieu.errors import InputError, MissingExtraError
from massieu.probing.result import long_table
from massieu.probing.result.long_table import TableBuilder
from massieu.probing.result.result import ProbeResult
from massieu.probing.result.stored import run_of
from massieu.probing.session.course import forget
from massieu.probing.sums.running import packed
from massieu.report import page
from massieu.storage.folder import STORE
from massieu.storage.record import RunRecord, json_value

FILES = ["details.json", "heads.parquet", "layers.parquet", "report.html", "run.json"]


def made_up(scale: float = 1.0) -> ProbeResult:
    heads, layers = TableBuilder(), TableBuilder()
    for layer in range(2):
        site = f"encoder.layer.{layer}.attention.self"
        values = scale * np.array([np.pi, np.nan, 1 / 3])
        heads.add(site, layer, "entropy", values, values / 100, np.array([10.0, 0.0, 12.0]))
        heads.add(site, layer, "entropy/spread", values, None, 12)
        layers.add(f"encoder.layer.{layer} attention", layer, "effective_rank/before", scale * 2.5, None, 7)
        layers.add(f"encoder.layer.{layer} attention", layer, "log_determinant/before", -np.inf, 0.1, 7)
    run = {
        "schema_version": 1,
        "date": "2026-01-01T00:00:00+00:00",
        "complete": True,
        "model": {"name": "tiny <model>", "architecture": "BertModel", "layers": 2, "heads": 3},
        "text": {"source": "made-up words", "tokens": np.int64(100), "windows": 4},
        "error_unit": {"unit": "window", "count": 4},
        "self_check": {"error": 3e-7, "tolerance": 1e-4, "site": "encoder.layer.0", "passed": True},
        "findings": [
            {"id": "sink", "title": "Sink", "sentence": "No head & no sink.", "caveat": "Not <dead>.",
             "statistic": "weight_first", "value": np.float64(scale), "standard_error": float("nan")},
        ],
    }  # fmt: skip
    details = {
        "histograms": {"entropy": {"edges": np.linspace(0, 1, 4), "counts": {0: np.array([[1, 2, 3]])}}},
        "examples": [
            {"tokens": {"text": ["[CLS]", "\ud800", "é"]}, "sites": {"7": {"entropy": [[scale * 0.123456789]]}}}
        ],
    }
    return ProbeResult(run_of(json_value(run), "made up"), details, heads.frame(), layers.frame())


@pytest.fixture(autouse=True)
def drawings(monkeypatch):
    """Stand-ins for the drawings: what they are given is what is tested here."""
    figures = SimpleNamespace(
        head_html=lambda run, details, heads, layer, head: f"<b>{layer} {head} of {run.model.layers}</b>",
        head_map_html=lambda run, heads, statistic: f"<i>{len(run.findings)} finding, map of {statistic}</i>",
    )
    monkeypatch.setattr("massieu.report.figures", figures, raising=False)
    monkeypatch.setattr(page, "render", lambda run, details, heads, layers: f"<p>é\ud800 {run.findings[0].value}</p>")


def assert_same(first: ProbeResult, second: ProbeResult) -> None:
    assert first.run == second.run
    assert first.details == second.details
    assert_frame_equal(first.heads, second.heads, check_exact=True)
    assert_frame_equal(first.layers, second.layers, check_exact=True)


def as_copied(folder: Path) -> Path:
    """As results of earlier versions lie there, and copies without the folder of saves."""
    shutil.rmtree(folder / STORE)
    return folder


def forget_hashes(folder: Path) -> None:
    """As results were stored before the record had the other files' hashes."""
    run = json.loads((folder / "run.json").read_text())
    del run["files"]
    (folder / "run.json").write_text(json.dumps(run))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != STORE)


# --- Tables ------------------------------------------------------------------------------------------------------


def test_table_has_the_stated_columns_and_null_where_undefined():
    result = made_up()
    assert result.heads.schema == {
        "site": polars.String, "layer": polars.Int32, "head": polars.Int32, "statistic": polars.String,
        "value": polars.Float64, "standard_error": polars.Float64, "count": polars.Int64,
    }  # fmt: skip
    assert result.layers.schema == result.heads.schema
    assert result.heads.rows()[:4] == [
        ("encoder.layer.0.attention.self", 0, 0, "entropy", np.pi, np.pi / 100, 10),
        ("encoder.layer.0.attention.self", 0, 1, "entropy", None, None, 0),
        ("encoder.layer.0.attention.self", 0, 2, "entropy", 1 / 3, 1 / 3 / 100, 12),
        ("encoder.layer.0.attention.self", 0, 0, "entropy/spread", np.pi, None, 12),
    ]
    assert result.layers["head"].null_count() == len(result.layers) == 4
    table = result.table
    assert table.columns == ["scope", *result.heads.columns]
    assert table["scope"].to_list() == ["head"] * 12 + ["layer"] * 4
    assert_frame_equal(table.filter(polars.col("scope") == "head").drop("scope"), result.heads)


def test_empty_table_has_the_columns():
    assert TableBuilder().frame().schema == made_up().heads.schema


def test_table_refuses_blocks_of_different_lengths():
    with pytest.raises(ValueError, match="broadcast"):
        TableBuilder().add("site", 0, "entropy", np.zeros(3), np.zeros(2), 1)
    with pytest.raises(ValueError, match="shape"):
        TableBuilder().add("site", 0, "entropy", np.zeros((3, 1)), None, 1)


def test_without_polars_the_pip_command_is_said(monkeypatch):
    def missing(name: str, extra: str) -> Any:
        raise MissingExtraError(f'{name}: pip install "massieu[{extra}]"')

    monkeypatch.setattr(long_table, "require_extra", missing)
    with pytest.raises(MissingExtraError, match=r"massieu\[probe\]"):
        TableBuilder().frame()


# --- Storing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["parquet", "csv"])
def test_what_is_saved_is_what_is_loaded(tmp_path, format):
    result = made_up()
    folder = result.save(tmp_path / "a" / "b", format)
    assert names(folder) == sorted(name.replace("parquet", format) for name in FILES)
    assert_same(ProbeResult.load(folder), result)
    assert (folder / "report.html").read_text(encoding="utf-8") == "<p>é? 1.0</p>"
    assert (folder / "report.html").stat().st_mode == (folder / "run.json").stat().st_mode
    assert result.save(str(folder), format) == folder  # a second time, over the first


def test_records_are_strict_json_with_undefined_numbers_as_null(tmp_path):
    folder = made_up().save(tmp_path)

    def refuse(name: str) -> None:
        raise AssertionError(name)

    run = json.loads((folder / "run.json").read_text("ascii"), parse_constant=refuse)
    details = json.loads((folder / "details.json").read_text("ascii"), parse_constant=refuse)
    assert run["findings"][0]["standard_error"] is None
    assert run["text"]["tokens"] == 100
    assert details["histograms"]["entropy"] == {"edges": [0.0, 0.3333, 0.6667, 1.0], "counts": {"0": [[1, 2, 3]]}}
    assert details["examples"][0]["sites"]["7"]["entropy"] == [[0.1235]]
    assert details["examples"][0]["tokens"]["text"] == ["[CLS]", "\ud800", "é"]


def test_another_format_replaces_the_tables_and_leaves_other_files_alone(tmp_path):
    (tmp_path / "notes.csv").write_text("mine")
    made_up().save(tmp_path)
    newer = made_up(2.0)
    newer.save(tmp_path, "csv")
    assert names(tmp_path) == sorted([*(name.replace("parquet", "csv") for name in FILES), "notes.csv"])
    assert_same(ProbeResult.load(tmp_path), newer)
    newest = made_up(3.0)
    newest.save(tmp_path)
    assert names(tmp_path) == sorted([*FILES, "notes.csv"])
    assert_same(ProbeResult.load(tmp_path), newest)


class Crash(BaseException):
    """Nothing may catch it."""


@pytest.mark.medium
@pytest.mark.parametrize("format", ["parquet", "csv"])
@pytest.mark.parametrize("survived", range(6))
def test_a_crash_while_files_are_moved_leaves_one_result_or_the_other(tmp_path, monkeypatch, survived, format):
    """First the new files are moved, all at once, then the record, then links to the files."""
    made_up(1.0).save(tmp_path)
    moved = []

    def replace(source: Any, target: Any, **folders: Any) -> None:
        if len(moved) == survived:
            raise Crash
        moved.append(target)
        os.rename(source, target, **folders)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(Crash):
            made_up(2.0).save(tmp_path, format)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of links that were not made yet
        assert_same(ProbeResult.load(tmp_path), made_up(1.0 if survived < 2 else 2.0))
    made_up(3.0).save(tmp_path)
    assert names(tmp_path) == FILES
    assert_same(ProbeResult.load(tmp_path), made_up(3.0))


@pytest.mark.parametrize("step", ["write_parquet", "render", "replace"])
def test_a_crash_while_files_are_written_leaves_the_former_result(tmp_path, monkeypatch, step):
    made_up(1.0).save(tmp_path)
    places = {
        "write_parquet": polars.DataFrame,
        "render": page,
        "replace": os,
    }

    def crash(*given: Any, **named: Any) -> None:
        raise Crash

    newer = made_up(2.0)
    with monkeypatch.context() as patch:
        patch.setattr(places[step], step, crash)
        with pytest.raises(Crash):
            newer.save(tmp_path)
    assert names(tmp_path) == FILES
    assert_same(ProbeResult.load(tmp_path), made_up(1.0))


@pytest.mark.parametrize("format", ["parquet", "csv"])
def test_a_users_files_are_left_alone_whatever_their_names(tmp_path, format):
    other = {"parquet": "csv", "csv": "parquet"}[format]
    mine = ["tokens/part-00000.npy", "tokens/part-00001.bin", f"heads.{other}", "units.safetensors", ".massieu-mine"]
    (tmp_path / "tokens").mkdir()
    for name in mine:
        (tmp_path / name).write_text("mine")
    made_up(1.0).save(tmp_path, format)
    made_up(2.0).save(tmp_path, format)
    ProbeResult.redraw(tmp_path)
    assert {name: (tmp_path / name).read_text() for name in mine} == dict.fromkeys(mine, "mine")


@pytest.mark.parametrize("name", ["report.html", "heads.parquet", "run.json"])
def test_a_users_file_in_the_place_of_a_results_file_is_named_before_anything_is_written(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(InputError, match=rf"{name} is in the way: no earlier save has left it"):
        made_up().save(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: "mine"}


@pytest.mark.skipif(os.name == "nt", reason="links of POSIX")
@pytest.mark.parametrize("place", [".massieu_lock", "report.html", "tokens"])
def test_drawing_a_strangers_result_again_reaches_nothing_outside_it(tmp_path, place):
    folder, outside = made_up().save(tmp_path / "theirs"), tmp_path / "outside"
    if place == "tokens":
        outside.mkdir()
        (outside / "part-1").write_text("mine")
        (folder / ".massieu_arrived" / "tokens").mkdir(parents=True)
        (folder / ".massieu_arrived" / "tokens" / "part-.gone").touch()
    else:
        outside.write_text("mine")
        (folder / place).unlink(missing_ok=True)
    (folder / place).symlink_to(outside)
    if place == "tokens":  # of which this result has none
        ProbeResult.redraw(folder)
    else:
        with pytest.raises(InputError, match="is a symbolic link"):
            ProbeResult.redraw(folder)
    assert (outside / "part-1" if place == "tokens" else outside).read_text() == "mine"


def test_bad_places_to_save_are_one_sentence(tmp_path):
    taken = tmp_path / "taken"
    taken.write_text("")
    with pytest.raises(InputError, match="taken is a file"):
        made_up().save(taken)
    with pytest.raises(InputError, match=r"below cannot be made: .*taken is a file"):
        made_up().save(taken / "below")
    with pytest.raises(InputError, match="parquet and csv"):
        made_up().save(tmp_path, "feather")  # pyright: ignore[reportArgumentType]


def test_bad_folders_to_load_are_one_sentence(tmp_path):
    with pytest.raises(InputError, match="is missing"):
        ProbeResult.load(tmp_path / "none")
    folder = as_copied(made_up().save(tmp_path / "result"))
    with pytest.raises(InputError, match="is a file"):
        ProbeResult.load(folder / "run.json")

    def broken(name: str, content: bytes | None, message: str) -> None:
        path = folder / name
        whole = path.read_bytes()
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(InputError, match=message) as raised:
            ProbeResult.load(folder)
        assert "\n" not in str(raised.value)
        path.write_bytes(whole)

    broken("run.json", None, r"has no run\.json")
    broken("run.json", b'{"schema_version": 1', r"run\.json cannot be read")
    broken("run.json", b"\xff\xfe", r"run\.json cannot be read")
    broken("run.json", b"[1]", "no record")
    broken("run.json", b'{"schema_version": 2}', "schema_version 2")
    broken("run.json", b"{}", "schema_version None")
    broken("details.json", None, r"has no details\.json")
    broken("heads.parquet", None, r"has no heads\.parquet;")
    broken("layers.parquet", b"PAR1", r"layers\.parquet is not the file that run\.json was stored with")
    broken("details.json", b"{}", r"details\.json is not the file that run\.json was stored with")
    assert_same(ProbeResult.load(folder), made_up())
    forget_hashes(folder)
    broken("heads.parquet", None, r"has no heads\.parquet or heads\.csv")
    broken("layers.parquet", b"PAR1", r"layers\.parquet is not a table")
    broken("layers.parquet", (folder / "layers.parquet").read_bytes()[:-30], r"layers\.parquet is not a table")
    made_up().heads.drop("value").write_parquet(folder / "lacking")
    broken("heads.parquet", (folder / "lacking").read_bytes(), r"heads\.parquet is not a table")
    made_up().heads.with_columns(site=None).write_parquet(folder / "lacking")
    broken("heads.parquet", (folder / "lacking").read_bytes(), r"names no site")
    assert_same(ProbeResult.load(folder), made_up())


# --- Together ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("format", ["parquet", "csv"])
@pytest.mark.parametrize("read_before", [1, 2])
def test_a_save_in_the_midst_of_a_load_mixes_nothing(tmp_path, monkeypatch, read_before, format, copied):
    """Another result arrives once so many of the former one's records were read."""
    made_up(1.0).save(tmp_path)
    if copied:
        as_copied(tmp_path)
    read, newer, loads = [], made_up(2.0), json.loads

    def loads_then_arrives(text: Any, **named: Any) -> Any:
        read.append(loads(text, **named))
        if len(read) == read_before:
            monkeypatch.setattr(json, "loads", loads)
            newer.save(tmp_path, format)
        return read[-1]

    monkeypatch.setattr(json, "loads", loads_then_arrives)
    assert_same(ProbeResult.load(tmp_path), made_up(2.0))


@pytest.mark.parametrize("name", ["heads", "layers"])
def test_the_table_of_another_run_is_noticed(tmp_path, name):
    mine, other = made_up(1.0).save(tmp_path / "mine"), made_up(2.0).save(tmp_path / "other")
    (mine / f"{name}.parquet").write_bytes((other / f"{name}.parquet").read_bytes())
    with pytest.raises(InputError, match=rf"{name}\.parquet is not the file that run\.json was stored with"):
        ProbeResult.load(mine)


@pytest.mark.parametrize("copied", [True, False])
def test_the_page_of_another_run_is_warned_of_until_it_is_drawn_again(tmp_path, monkeypatch, copied):
    folder = made_up(1.0).save(tmp_path / "mine")
    if copied:
        as_copied(folder)
    (folder / "report.html").write_text("another")
    with pytest.warns(UserWarning, match="mine/report.html is not the file that this result was stored with; move it"):
        ProbeResult.load(folder)
    monkeypatch.setattr(page, "render", lambda *given: "<p>another version's drawing</p>")
    with pytest.raises(InputError, match=r"mine/report\.html is in the way"):
        ProbeResult.redraw(folder)
    assert (folder / "report.html").read_text() == "another"
    (folder / "report.html").unlink()
    assert ProbeResult.redraw(folder).read_text() == "<p>another version's drawing</p>"
    assert_same(ProbeResult.load(folder), made_up(1.0))  # any warning would be an error of this test
    assert ProbeResult.redraw(folder).read_text() == "<p>another version's drawing</p>"
    (folder / "report.html").unlink()
    assert_same(ProbeResult.load(folder), made_up(1.0))
    assert names(folder) == [name for name in FILES if name != "report.html"]


def test_a_result_stored_without_hashes_is_read_and_not_replaced(tmp_path):
    folder = made_up().save(tmp_path)
    forget_hashes(folder)
    before = {name: (folder / name).read_bytes() for name in FILES}
    assert_same(ProbeResult.load(folder), made_up())
    with pytest.raises(InputError, match=r"kept no hashes, so nothing in it is replaced; write its page elsewhere"):
        ProbeResult.redraw(folder)
    with pytest.raises(InputError, match=r"is in the way: no earlier save has left it"):
        made_up(2.0).save(folder)
    assert {name: (folder / name).read_bytes() for name in FILES} == before


def test_a_page_that_cannot_be_drawn_costs_no_table(tmp_path, monkeypatch):
    made_up(1.0).save(tmp_path)
    newer = made_up(2.0)

    def fail(*given: Any) -> str:
        raise ZeroDivisionError("ours to mend")

    with monkeypatch.context() as patch:
        patch.setattr(page, "render", fail)
        with pytest.raises(ZeroDivisionError) as raised:
            newer.save(tmp_path)
    assert raised.value.__notes__ == [f"(all but the page was saved in {tmp_path})"]
    assert_same(ProbeResult.load(tmp_path), made_up(2.0))
    assert "report.html" not in names(tmp_path)


# --- Looking -----------------------------------------------------------------------------------------------------


def test_the_page_is_written_aside_or_returned(tmp_path, monkeypatch):
    result = made_up()
    (tmp_path / "page.html").write_text("former")
    assert result.report(str(tmp_path / "page.html")) == tmp_path / "page.html"
    assert (tmp_path / "page.html").read_text("utf-8") == "<p>é? 1.0</p>"
    shown = result.report()
    assert not isinstance(shown, Path)
    assert 'srcdoc="&lt;p&gt;é\ud800 1.0&lt;/p&gt;"' in shown._repr_html_()
    with pytest.raises(InputError, match="is a folder"):
        result.report(tmp_path)
    with pytest.raises(InputError, match="cannot write the page"):
        result.report(tmp_path / "page.html" / "below.html")
    assert names(tmp_path) == ["page.html"]
    assert result.report(tmp_path / "new" / "page.html").is_file()


def test_one_head_is_shown():
    assert made_up().show(1, 2)._repr_html_() == "<b>1 2 of 2</b>"


def test_notebooks_show_the_findings_and_one_map_of_what_was_measured():
    result = made_up()
    assert result._repr_html_() == "<i>1 finding, map of entropy</i>"
    heads = TableBuilder()
    for statistic in ("entropy", "selective_log_partition", "weight_first"):
        heads.add("site", 0, statistic, np.zeros(3), None, 1)
    result.heads = heads.frame()
    assert result._repr_html_() == "<i>1 finding, map of weight_first</i>"
    result.run.findings = []
    assert result._repr_html_() == "<i>0 finding, map of selective_log_partition</i>"
    result.heads = TableBuilder().frame()
    assert result._repr_html_() == f"<pre>{escape(repr(result))}</pre>"


def test_the_plain_form_says_what_was_measured_and_found():
    result = made_up()
    assert repr(result).splitlines() == [
        "ProbeResult",
        "  model: tiny <model>, 2 layers, 3 heads in all",
        "  text: made-up words, 100 tokens in 4 windows",
        "  error unit: window, 4 of them",
        "  self-check: error 3.0e-07, tolerance 1e-04",
        "  Sink: No head & no sink.",
    ]
    assert result.complete
    assert result.findings == result.run.findings
    result.run = RunRecord(complete=False, findings=[])
    assert repr(result) == "ProbeResult (interrupted: incomplete)"


def test_a_matrix_holds_values_or_their_standard_errors():
    values = np.array([[np.pi, np.nan, 1 / 3]] * 2)
    np.testing.assert_allclose(made_up().matrix("entropy"), values)
    np.testing.assert_allclose(made_up().matrix("entropy", error=True), values / 100)
    without_errors = made_up()
    without_errors.heads = without_errors.heads.with_columns(standard_error=float("nan"))
    with pytest.warns(UserWarning, match="no head has a standard error of 'entropy': .* two windows"):
        assert np.isnan(without_errors.matrix("entropy", error=True)).all()
    np.testing.assert_allclose(without_errors.matrix("entropy"), values)


# --- Power failures ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("former", [True, False])
def test_after_a_power_failure_there_is_a_result_or_the_sums_it_is_made_of(tmp_path, former):
    """What was written and not waited for may be lost, and what was removed may be gone before it."""
    folder, running = tmp_path / "disk" / "out", tmp_path / "disk" / "out" / "running"
    running.mkdir(parents=True)
    share = running / "share-1-of-1.safetensors"
    sums = packed({"sums": np.arange(3.0)})
    share.write_bytes(sums)
    if former:
        made_up(1.0).save(folder)
    newer, disk = made_up(2.0), Disk(tmp_path / "disk")
    with disk.watching():
        newer.save(folder)
        saved = len(disk.moments)
        forget(running)
    found = set()
    for moment, state in disk.states(tmp_path / "state"):
        kept = state / "out" / "running" / share.name
        has_sums = kept.is_file() and kept.read_bytes() == sums
        value = _value_of(state / "out")
        assert value == 2.0 or (has_sums and value == (1.0 if former else None)), moment
        if moment >= saved:
            assert value == 2.0
        found.add((value, has_sums))
    assert found >= {(1.0 if former else None, True), (2.0, True), (2.0, False)}


def _value_of(folder: Path) -> float | None:
    """What the result's first finding says; None where there is no result."""
    if not (folder / "run.json").exists():
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of links that were not made yet
        return ProbeResult.load(folder).findings[0].value
