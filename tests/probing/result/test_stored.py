"""Edited, cut and mixed-up records: each is read, or refused in one sentence."""

import copy
import json
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from plotly import offline
from tests.support.report.synthetic_results import encoder
from tests.support.rows import every_row
from typer.testing import CliRunner

from massieu.cli.commands import app
from massieu.errors import InputError
from massieu.probing.result.result import ProbeResult
from massieu.probing.result.stored import DEEPEST, hashes_of, parse, run_of

FILES = ("run.json", "details.json")


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Path:
    """A result with everything a page shows, small, stored without hashes: so nothing but the records' checks sees an edit."""
    made = encoder(layers=2, heads=2, tokens=7, examples=2)
    folder = tmp_path_factory.mktemp("stored")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offline, "get_plotlyjs", str)
        ProbeResult(run_of(made.run, "made"), made.details, made.heads, made.layers).save(folder)
    run = json.loads((folder / "run.json").read_text())
    del run["files"]
    (folder / "run.json").write_text(json.dumps(run))
    return folder


@pytest.fixture(autouse=True)
def small_pages(monkeypatch):
    """Pages without the drawing library, which takes most of the time."""
    monkeypatch.setattr(offline, "get_plotlyjs", str)


def _use(folder: Path) -> ProbeResult:
    """Everything that is made of a stored result."""
    result = ProbeResult.load(folder)
    repr(result)
    result._repr_html_()
    rows = result.heads.select("layer", "head").unique().rows()
    for layer, head in rows[:2]:
        result.show(layer, head)
    result.report()
    return result


def _works(folder: Path, name: str, content: bytes, use: Callable[[Path], object]) -> bool:
    """Whether a file's new content can be used; any error but one sentence fails."""
    path = folder / name
    before = path.read_bytes()
    path.write_bytes(content)
    try:
        # What numpy or another library would warn of is a number gone wrong in silence.
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            use(folder)
    except InputError as error:
        said = str(error)
    else:
        said = None
    finally:
        path.write_bytes(before)
    assert said is None or ("\n" not in said and str(path.parent) in said and len(said) < 600)
    return said is None


# --- every entry, every edit -----------------------------------------------------------------------------------------


def _paths(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """The place of every entry; of a list the first and the last items."""
    if path:
        yield path
    if isinstance(value, dict):
        for name in value:
            yield from _paths(value[name], (*path, name))
    elif isinstance(value, list):
        for place in sorted({0, len(value) - 1} if value else ()):
            yield from _paths(value[place], (*path, place))


def _deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


ANYTHING = [
    None, True, False, 0, 1, -1, 7, 2.5, -0.0, 1e-320, 1e308, -1e308, 10**15, 10**30, "", "text", "1", "\ud800", "<b>",
    "x" * 5000, [], [None], [1, 2], ["a"], [[]], [[1]], [[1, 2], [3]], [[[1, 2]]], {}, {"a": 1}, {"": None},
    {"0": [[1]]}, _deep(DEEPEST), _deep(200),
]  # fmt: skip


def _edited(value: Any, path: tuple, edit: Any) -> bytes:
    changed = copy.deepcopy(value)
    place = changed
    for step in path[:-1]:
        place = place[step]
    if edit is Ellipsis:
        del place[path[-1]]
    elif edit == "twice" and isinstance(place, list):
        place.append(place[path[-1]])
    else:
        place[path[-1]] = edit
    return json.dumps(changed).encode()


def _all_edits(folder: Path) -> list[tuple[str, tuple, Any]]:
    found = []
    for name in FILES:
        value = json.loads((folder / name).read_text())
        found += [(name, path, edit) for path in _paths(value) for edit in (*ANYTHING, ..., "twice")]
    return found


def _try_edits(folder: Path, edits: list[tuple[str, tuple, Any]], use: Callable[[Path], object]) -> int:
    """How many of the edited results can be used."""
    values = {name: json.loads((folder / name).read_text()) for name in FILES}
    failed, works = [], 0
    for name, path, edit in edits:
        try:
            works += _works(folder, name, _edited(values[name], path, edit), use)
        except Exception as error:
            error.add_note(f"{name}: {'.'.join(map(str, path))} = {str(edit)[:60]!r}")
            failed.append(error)
    if failed:
        raise ExceptionGroup(f"{len(failed)} of {len(edits)} edits", failed[:20])
    return works


@pytest.mark.slow
def test_the_stored_result_works_as_it_is(stored):
    _use(stored)


def test_no_edit_of_an_entry_ends_a_load_in_a_traceback(stored):
    edits = random.Random(0).sample(_all_edits(stored), 20)
    assert 0 < _try_edits(stored, edits, ProbeResult.load) < len(edits)


@pytest.mark.slow
def test_no_edit_of_an_entry_ends_a_page_in_a_traceback(stored):
    edits = random.Random(1).sample(_all_edits(stored), 20)
    assert 0 < _try_edits(stored, edits, _use) < len(edits)


@pytest.mark.slow
def test_no_edit_of_many_ends_in_a_traceback(stored):
    edits = random.Random(2).sample(_all_edits(stored), 100)
    assert 0 < _try_edits(stored, edits, _use) < len(edits)


# --- files that are no records ---------------------------------------------------------------------------------------


def _spoiled(whole: bytes, random_numbers: random.Random) -> Iterator[bytes]:
    yield from (b"", b"\0", b"null", b"[]", b"{}", b'"text"', b"1", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000)
    yield whole.decode().encode("utf-16")
    yield b"\xef\xbb\xbf" + whole
    yield whole + whole
    for number in (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"1" * 400, b"1" * 6000, b"-1e999"):
        yield b'{"number": ' + number + b", " + whole[1:]
    for _ in range(8):
        place = random_numbers.randrange(len(whole))
        yield whole[:place]
        yield whole[:place] + bytes([random_numbers.randrange(256)]) + whole[place + 1 :]


@pytest.mark.medium
@every_row("name", FILES)
def test_no_spoiled_file_ends_in_a_traceback(stored, name):
    whole = (stored / name).read_bytes()
    for content in _spoiled(whole, random.Random(0)):
        _works(stored, name, content, ProbeResult.load)


@every_row(
    "name, path, edit, said",
    [
        ("run.json", ("complete",), ..., r"run\.json: lacks 'complete'"),
        ("run.json", ("sites", 0, "heads"), 2000, r"says 2000 heads at .*, the heads' table 2"),
        ("run.json", ("sites", 1, "index"), 0, r"two attention sites have the index 0"),
        ("run.json", ("text", "tokens"), "many", r"run\.json: text\.tokens must be a whole number, at least 0, not many"),
        ("run.json", ("text", "tokens"), -1, r"run\.json: text\.tokens must be a whole number, at least 0, not -1"),
        ("run.json", ("findings", 0, "heads"), [[1]], r"findings\[0\]\.heads\[0\] must be a layer and a head, not \[1\]"),
        ("run.json", ("complete",), None, r"run\.json: complete must be true or false, not null"),
        ("run.json", ("sites", 0, "unavailable"), {"maps": 3}, r"sites\[0\]\.unavailable\.maps must be a text, not 3"),
        ("run.json", ("settings",), _deep(DEEPEST + 1), r"nested too deeply"),
        ("run.json", ("seed",), 10**40, r"a whole number that is too large"),
        ("details.json", ("examples", 0, "sites", "0", "entropy", 0), [1.0], r"entropy\[1\] has 7 numbers, but the first"),
        ("details.json", ("histograms", "entropy_fraction", "counts", "0"), [[1] * 30], r"has 1 heads at .*, not 2"),
    ],
)  # fmt: skip
def test_the_sentence_names_the_entry_and_what_it_must_be(stored, name, path, edit, said):
    value = json.loads((stored / name).read_text())
    before = (stored / name).read_bytes()
    (stored / name).write_bytes(_edited(value, path, edit))
    try:
        with pytest.raises(InputError, match=said):
            ProbeResult.load(stored)
    finally:
        (stored / name).write_bytes(before)


def test_a_record_of_the_first_release_is_read_into_attributes_and_written_as_it_was():
    path = Path(__file__).with_name("stored_run.json")  # as the release before typed records wrote it
    value = parse(path.read_bytes(), "it")
    hashes = hashes_of(value, "it")
    assert hashes is not None
    assert set(hashes) == {"heads.parquet", "layers.parquet", "details.json", "report.html"}
    run = run_of(value, "it")
    assert (run.model.architecture, run.text.tokens, run.self_check.passed) == ("BertModel", 8, True)
    assert [site.kind for site in run.sites] == ["self"]
    assert [finding.id for finding in run.findings] == ["sink", "sharpness", "climb", "collapse"]
    for site in value["sites"]:  # what that release could not say, since there was no other way to read
        site |= {"route": "interface", "grade": "full"}
    value["text"] |= {"bos": None, "window": None}
    value["model"] |= {"stored_dtype": None}
    for part in ("error_unit", "sample"):
        value[part] |= {"degrees": None}
    for statistic in value["statistics"]:
        statistic |= {"scale": "number", "smallest": 0.0, "sampled": False}
    value |= {"replacements": [], "per_token": None}
    assert list(run.to_dict().items()) == list(value.items())


def test_what_a_record_says_beside_its_fields_is_kept_and_null_is_as_missing():
    value = {"complete": True, "findings": [], "sites": None, "model": {"name": "a", "layers": 1, "heads": 2, "of": 3}}
    run = run_of(value | {"note": [1]}, "it")
    assert run.sites == []
    assert run.text.source is None
    assert run.to_dict()["note"] == [1]
    assert run.to_dict()["model"]["of"] == 3


def test_the_command_prints_the_sentence(stored, tmp_path):
    for path in filter(Path.is_file, stored.iterdir()):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "run.json").write_bytes(b"[" * 100_000)
    ran = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert ran.exit_code == 2
    assert ran.stderr == f"massieu: {tmp_path / 'run.json'} cannot be read: it is nested too deeply\n"


def test_a_site_of_another_layer_than_the_table_says_is_refused(stored):
    record = stored / "run.json"
    before = record.read_bytes()
    content = json.loads(before)
    content["sites"][0]["layer"] += 7
    try:
        record.write_text(json.dumps(content))
        with pytest.raises(InputError, match=r"run\.json says layer 7 of .*, the heads' table 0$"):
            ProbeResult.load(stored)
    finally:
        record.write_bytes(before)
