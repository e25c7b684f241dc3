"""The command `massieu verify`: what it prints, the page it writes, how it ends."""

import inspect
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.papers.samples import as_printed, false, noise, register
from typer.testing import CliRunner

from massieu.cli.commands import app
from massieu.errors import InputError
from massieu.foundation.numbers import bound
from massieu.papers.claims import registry
from massieu.papers.claims.claim import Check, as_published, at_most, close
from massieu.papers.claims.run import verify

pytestmark = pytest.mark.usefixtures("empty_registry")

KEYS = {
    "id", "title", "statement", "source", "status", "published", "corrected", "measured", "comparison", "bound", "verdict",
    "published_verdict", "reason", "false_alarm", "checks", "parameters", "seconds",
}  # fmt: skip
HOSTILE = "<script>alert('&')</script>"


def _run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


# --- what is printed -------------------------------------------------------------------------------------------------


def test_all_claims_in_a_table():
    register("S1")
    register("S7", as_printed, status="quoted", published="a falsehood", corrected="the truth")
    ran = _run()
    assert ran.exit_code == 0
    rows = [line.split() for line in ran.stdout.splitlines() if line.strip()]
    assert rows[0] == ["claim", "topic", "verdict", "published", "form"]
    assert rows[2] == ["S1", "Title", "of", "S1", "holds"]
    assert rows[3] == ["S7", "Title", "of", "S7", "holds", "wrong", "as", "printed"]
    assert ran.stdout.splitlines()[-1] == (
        "2 claims hold. 1 formula is wrong as printed; its check shows the printed form failing and the corrected one holding."
    )
    assert [line.split(" (")[0] for line in ran.stderr.splitlines()] == ["massieu: S1 holds", "massieu: S7 holds"]
    assert "\x1b" not in ran.output


def test_a_claim_that_fails_ends_with_one():
    register("S1")
    register("B2", false)
    ran = _run()
    assert ran.exit_code == 1
    assert ran.stdout.splitlines()[-1] == "1 of 2 claims hold, 1 fails (B2)."
    assert re.search(r"B2 +Title of B2 +fails", ran.stdout)
    assert re.search(r"^massieu: B2 fails \(2 of 2", ran.stderr, re.MULTILINE)
    ran = _run("B2")
    assert ran.exit_code == 1
    assert ran.stdout.startswith("B2  Title of B2  fails\n")
    assert re.search(r"one and two +1 +0\.333 +≤ 1e−10 +fails", ran.stdout)
    assert re.search(r"two and two .* holds", ran.stdout)
    assert re.search(r"one and two +1 against 2 +0\.333 +≤ 1e−10 +fails", _run("B2", "--all").stdout)
    assert not verify().ok
    assert repr(verify("B2")) == "Verification(0 of 1 claim holds, 1 fails (B2))"


def test_a_claim_says_where_its_code_is(tmp_path, monkeypatch):
    def body() -> Iterator[Check]:
        yield close("true", 1.0, 1.0)

    register("S1", body)
    line = inspect.getsourcelines(body)[1]
    here = Path(__file__)
    monkeypatch.chdir(here.parent)
    assert re.search(rf"code +{here.name}:{line} *$", _run("S1").stdout, re.MULTILINE)
    monkeypatch.chdir(tmp_path)  # elsewhere by its whole path, wrapped where it is long
    assert f"{here}:{line}" in re.sub(r"\s+", "", _run("S1").stdout)


def test_a_published_form_that_happens_to_hold_is_named():
    def body() -> Iterator[Check]:
        yield close("true", 1.0, 1.0)
        yield as_published(close("printed", 1.0, 1.0))

    register("S7", body, published="a falsehood", corrected="the truth")
    assert verify("S7")[0].published_verdict == "holds"
    assert "holds; the printed form holds, with these settings" in _run("S7").stdout
    assert _run().stdout.endswith("1 claim holds. With these settings the printed form holds too: S7.\n")


@pytest.mark.parametrize(
    ("standing", "outcome", "heading", "summary"),
    [
        ("ambiguous", "ambiguous", "; ambiguous: the other reading fails, as it should", "1 reading is ambiguous."),
        ("assumption", "an assumption", "; an assumption: what is assumed fails, as", "1 statement is an assumption."),
    ],
)
def test_what_is_not_asserted_is_not_called_wrong(standing, outcome, heading, summary):
    registry._REGISTERED.clear()
    register("S7", as_printed, status="quoted", published="It seems.", standing=standing, corrected="It is.")
    assert verify("S7")[0].published_verdict == standing
    assert re.search(rf"S7 +Title of S7 +holds +{outcome}", _run().stdout)
    assert heading in _run("S7").stdout
    assert verify().summary == f"1 claim holds. {summary}"
    assert "wrong" not in _run().stdout + _run("S7").stdout


def test_rows_of_one_kind_are_one_row_with_the_worst():
    def body() -> Iterator[Check]:
        for size, error in ((1, 0.5), (20, 0.7), (3.5, 0.6)):
            yield at_most(f"keys, N = {size}: error at {size} steps", error, 1.0)
        yield at_most("keys: error", 0.9, 1.0)
        yield as_published(at_most("N = 1: bound", 3.0, 1.0))
        yield as_published(at_most("N = 2: bound", 2.0, 1.0))

    register("S7", body, published="A falsehood.", corrected="The truth.")
    short, full = _run("S7").stdout, _run("S7", "--all").stdout
    assert re.search(r"N = 20: error at 20 steps +3 +0\.700", short)
    assert re.search(r"keys: error +1 +0\.900", short)
    assert re.search(r"N = 2: bound +2 +2 ", short)
    assert "6 checks; 'massieu verify S7 --all' shows all of them" in short
    assert all(f"N = {size}: error" in full for size in (1, 20, 3.5))
    assert "--all" not in full


def test_a_quotation_in_full():
    register("S7", as_printed, status="quoted", published="A [b]falsehood[/b].", corrected="The truth.")
    ran = _run("s7", "--all")
    lines = [" ".join(line.split()) for line in ran.stdout.splitlines() if line.strip()]
    assert lines[0] == "S7 Title of S7 holds; the printed form fails, as it should"
    assert lines[1:5] == [
        "what is true Statement of S7.",
        "the paper says A [b]falsehood[/b].",
        "corrected The truth.",
        "source a paper, §1 (quoted)",
    ]
    assert lines[-3:] == [
        "true form 3 against 3 0 ≤ 1e−10 holds",
        "the printed form:",
        "printed form 3 against 4 0.200 ≤ 1e−10 fails",
    ]
    assert ran.stderr == ""


def test_parameters_and_seed_are_printed():
    register("S15", noise)
    ran = _run("S15", "--set", "N=1024", "--seed", 3)
    assert ran.exit_code == 0
    assert "parameters  N=1024, width=1.0, seed=3\n" in re.sub(" +\n", "\n", ran.stdout)
    assert "|z| ≤ 5.2" in ran.stdout


@pytest.mark.parametrize("status", ["reconstructed", "derived"])
def test_only_a_quotation_is_what_the_paper_says(status, tmp_path):
    register("Z7", as_printed, status=status, standing="ambiguous", published="A falsehood.", corrected="The truth.")
    page = tmp_path / "claims.html"
    overview = _run().stdout
    in_full = _run("Z7", "--html", page).stdout
    json_text = _run("Z7", "--json").stdout
    page_text = page.read_text()
    assert all("paper says" not in text.lower() for text in (overview, in_full, json_text, page_text))
    assert "A falsehood." in in_full
    if status == "reconstructed":
        for text in (overview, in_full, page_text):
            assert "as published" not in text.lower()
            assert "the printed form" not in text
        assert "wrong" not in overview
        assert "reconstructed as" in in_full
        assert "Reconstructed as" in page_text


def test_several_claims_in_full_end_with_the_count():
    register("S1")
    register("S7", as_printed, published="a falsehood", corrected="the truth")
    assert _run("S1", "S7").stdout.splitlines()[-1].startswith("2 claims hold. 1 formula is wrong as printed; ")


def _without_flow(seed: int = 0) -> Iterator[Check]:
    raise ArithmeticError(f"no flow to time 1 at {HOSTILE}")
    yield


def test_a_claim_that_could_not_be_checked_ends_with_one(tmp_path):
    register("S1")
    register("N6", _without_flow)
    page = tmp_path / "claims.html"
    ran = _run("--html", page)
    assert ran.exit_code == 1
    assert re.search(r"N6 +Title of N6 +could not be checked", ran.stdout)
    assert "\n1 of 2 claims hold, 1 could not be checked (N6).\n" in ran.stdout
    assert "Traceback" not in ran.output
    assert re.search(r"^massieu: N6 could not be checked \(2 of 2", ran.stderr, re.MULTILINE)
    text = page.read_text(encoding="utf-8")
    assert "Could not be checked: ArithmeticError: no flow to time 1 at &lt;script&gt;" in text
    assert "<script" not in text
    assert text.count('<table class="numbers">') == 1  # of the claim that holds
    ran = _run("N6")
    assert ran.exit_code == 1
    assert "not checked  ArithmeticError: no flow to time 1" in ran.stdout
    (claim,) = json.loads(_run("N6", "--json").stdout)
    assert set(claim) == KEYS
    assert (claim["verdict"], claim["checks"], claim["measured"], claim["bound"]) == (
        "could not be checked",
        [],
        None,
        None,
    )
    assert claim["reason"].startswith("ArithmeticError: ")


def test_json_has_nothing_beside_it():
    register("S7", as_printed, status="quoted", published="a falsehood", corrected="the truth")

    def beyond() -> Iterator[Check]:
        yield at_most("error", math.inf, 1.0)

    register("S9", beyond)
    ran = _run("--json")
    assert ran.exit_code == 1
    first, second = json.loads(ran.stdout)
    assert set(first) == set(second) == KEYS
    assert (first["verdict"], first["published_verdict"]) == ("holds", "fails")
    assert (second["verdict"], second["published_verdict"], second["measured"]) == ("fails", "none", None)
    assert [check["form"] for check in first["checks"]] == ["corrected", "published"]
    assert first["checks"][1] == {
        "name": "printed form", "form": "published", "measured": 0.2, "comparison": "≤", "bound": 1e-10,
        "verdict": "fails", "detail": "3 against 4", "false_alarm": 0.0, "basis": "",
    }  # fmt: skip
    assert json.loads(verify().to_json())[0].keys() == KEYS


@pytest.mark.parametrize(
    ("value", "text"), [(1e-10, "1e−10"), (-1e-8, "−1e−8"), (5.0, "5"), (0.25, "0.25"), (0.0, "0")]
)
def test_a_bound_is_written_as_it_was_set(value, text):
    assert bound(value) == text
    assert bound(None) == "undefined"


# --- the page --------------------------------------------------------------------------------------------------------


def test_the_page_is_self_contained_and_escaped(tmp_path):
    def body() -> Iterator[Check]:
        yield close(HOSTILE, 1.0, 1.0)
        yield at_most("error", math.inf, 1.0, HOSTILE)
        yield as_published(close(HOSTILE, 1.0, 2.0))

    register("S7", body, statement=HOSTILE, source=HOSTILE, status="quoted", published=HOSTILE, corrected=HOSTILE)
    register("X3b", status="abstract only")
    page = tmp_path / "new" / "claims.html"
    ran = _run("--html", page)
    assert (ran.exit_code, ran.stdout.splitlines()[-1]) == (1, f"page: {page}")
    text = page.read_text(encoding="utf-8")
    assert "<script" not in text
    assert text.count("&lt;script&gt;") >= 7
    assert "default-src 'none'; style-src 'unsafe-inline'" in text
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!#)|url\(|@import|https?://""", text)
    for part in ('id="S7"', 'href="#X3b"', "The paper says", "∞", "1 of 2 claims hold, 1 fails (S7)."):
        assert part in text
    assert list(page.parent.iterdir()) == [page]


def test_the_page_beside_json_and_in_place_of_an_earlier_one(tmp_path):
    register("S1")
    page = tmp_path / "claims.html"
    page.write_text("earlier")
    ran = _run("--json", "--html", page)
    assert json.loads(ran.stdout)[0]["id"] == "S1"
    assert ran.stderr.splitlines()[-1] == f"page: {page}"
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_a_page_that_cannot_be_written(tmp_path):
    register("S1", lambda: pytest.fail("it ran"))
    taken = tmp_path / "file"
    taken.touch()
    for page, message in ((tmp_path, "is a folder; the page needs"), (taken / "page.html", "cannot be made")):
        ran = _run("--html", page)
        assert ran.exit_code == 2
        assert message in ran.stderr
    with pytest.raises(InputError, match="is a folder"):
        verify(register("S2").id).report(tmp_path)
    with pytest.raises(InputError, match="cannot write the page"):
        verify("S2").report(taken / "page.html")


# --- endings ---------------------------------------------------------------------------------------------------------


def test_an_interrupt_keeps_what_was_checked():
    def interrupted() -> Iterator[Check]:
        yield close("", 1.0, 1.0)
        raise KeyboardInterrupt

    register("S1")
    register("S2", interrupted)
    register("S3", lambda: pytest.fail("it ran"))
    result = verify()
    assert ([claim.id for claim in result], result.complete, result.ok) == (["S1"], False, False)
    ran = _run()
    assert ran.exit_code == 130
    assert ran.stdout.endswith("1 claim holds. Interrupted before the end.\n")
    assert ran.stderr.splitlines()[-1].startswith("massieu: interrupted")
    ran = _run("S2")
    assert (ran.exit_code, ran.stdout) == (130, "\n0 claims hold. Interrupted before the end.\n")


def test_a_claim_runs_on_one_thread_and_leaves_the_others():
    """On a machine whose cores are busy, threads that wait for each other take minutes for seconds."""
    seen = []

    def body() -> Iterator[Check]:
        seen.append(torch.get_num_threads())
        yield close("", 1.0, 1.0)
        raise ArithmeticError

    register("S1", body)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert verify()[0].verdict == "could not be checked"
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == [1]


def test_help_shows_examples():
    ran = _run("--help")
    assert "massieu verify S15 --set N=1024 --seed 3" in ran.stdout


# --- wrong usage ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "N=3"], "N: settings belong to a claim; name it, as in: massieu verify S15 --set N=1024"),
        (["S15", "--set", "N"], "a setting is NAME=VALUE, such as N=1024; got 'N'"),
        (["S15", "--set", "N="], "a setting is NAME=VALUE, such as N=1024; got 'N='"),
        (["S15", "--set", "N=1", "--set", "N=2"], "N is set twice: to 1 and to 2"),
        (["S15", "--set", "seed=1", "--seed", "2"], "the seed is set twice: to 2 and to 1"),
        (["S15", "S1", "--set", "N=3"], "claim S1 has no parameter 'N'; it has none"),
        (["S16"], "there is no claim 'S16'; near it are S1, S15"),
        (["S15", "--set", "N=0"], "N of claim S15 must be a whole number, at least 1, got '0'"),
        (["zeta"], "there is no claim 'zeta'; known are S1, S15"),
        (["S15", "--seed", "-3"], "seed of claim S15 must be a whole number, at least 0, got -3"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, message):
    register("S1")
    register("S15", noise)
    ran = _run(*arguments)
    assert (ran.exit_code, ran.stdout, ran.stderr) == (2, "", f"massieu: {message}\n")
