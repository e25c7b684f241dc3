"""Every registered claim holds, what is false as published is shown to fail, and a library that is wrong is noticed."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from tests.papers.claims.wrong import WRONG
from tests.support.papers.small import SMALL
from typer.testing import CliRunner

from massieu.cli.commands import app
from massieu.errors import InputError
from massieu.papers.claims.claim import Claim
from massieu.papers.claims.registry import claims
from massieu.papers.claims.run import verify

THEORY = Path(__file__).parents[3] / "docs" / "theory"


def _wrong(claim: Claim) -> list[str]:
    """The rows that are not as they should be, or why there are none."""
    if claim.reason is not None:
        return [claim.reason]
    wrong = [check for check in claim.checks if check.holds != (check.form == "corrected")]
    return [f"{check.name}: {check.measured} {check.comparison} {check.bound} ({check.form})" for check in wrong]


def _failing(id: str, settings: Mapping[str, int | float | str] | None = None) -> list[str]:
    (claim,) = verify(id, settings=settings)
    return _wrong(claim)


@pytest.mark.medium
@pytest.mark.parametrize("id", claims())
def test_the_claim_holds(id: str):
    """At small settings, and with another seed than its own. Before a release, 40 seeds: `scripts/claims_at_seeds.py`."""
    seed = {"seed": 1} if "seed" in claims()[id].parameters else {}
    assert _failing(id, {**SMALL.get(id, {}), **seed}) == []


@pytest.mark.slow
@pytest.mark.parametrize("id", claims())
def test_the_claim_holds_with_its_own_settings_and_chance_fails_it_less_than_once_in_ten_thousand_runs(id: str):
    (claim,) = verify(id)
    assert _wrong(claim) == []
    assert claim.false_alarm < 1e-4
    assert all(check.basis for check in claim.checks if check.false_alarm > 0)


TOO_FEW: list[tuple[str, dict[str, int]]] = [
    ("S2", {"samples": 1}),
    ("S3", {"dimensions": 1}),
    ("S6", {"atoms": 1}),
    ("S8", {"atoms": 4}),
    ("S11", {"dimensions": 1}),
    ("S11", {"tokens": 10}),
    ("S12", {"pairs": 1}),
    ("S13", {"dimensions": 1}),
    ("S13", {"repetitions": 19}),
    ("S14", {"heads": 1}),
    ("S15", {"repetitions": 10}),
    ("S17", {"examples": 12, "learners": 12}),
    ("S20", {"particles": 10}),
    ("S20", {"repetitions": 5}),
    ("B1", {"machines": 1}),
    ("B7", {"patterns": 1}),
    ("B8", {"chains": 100}),
    ("B8", {"sweeps": 3}),
    ("B9", {"samples": 100}),
    ("B13", {"spins": 2}),
    ("B14", {"spins": 1}),
    ("B15", {"spins": 1}),
    ("B16", {"components": 2}),
    ("B18", {"atoms": 4, "dimensions": 4}),
    ("B19", {"dimensions": 1}),
    ("B21", {"spins": 1}),
    ("Z1", {"length": 1}),
    ("Z2", {"concepts": 1}),
    ("Z3", {"repetitions": 5}),
    ("Z4", {"keys": 1}),
    ("Z5", {"letters": 1}),
    ("Z5", {"tokens": 5}),
    ("Z6", {"repetitions": 10}),
    ("Z7", {"keys": 10}),
    ("Z8", {"repetitions": 10}),
    ("Z9", {"repetitions": 5}),
    ("Z10", {"repetitions": 2}),
    ("Z11", {"concepts": 1}),
    ("Z12", {"sequences": 10}),
    ("Z13", {"pairs": 10}),
    ("Z14", {"tokens": 1}),
    ("S23", {"atoms": 1}),
    ("X1", {"repetitions": 3}),
    ("X2", {"keys": 5}),
    ("X4", {"repetitions": 5}),
    ("X6", {"draws": 1}),
    ("X8", {"draws": 1}),
    ("N1", {"tokens": 1}),
    ("N1", {"dimensions": 2}),
    ("N6", {"dimensions": 1}),
    ("N8", {"tokens": 3}),
    ("N8", {"dimensions": 1}),
    ("N8", {"nodes": 100}),
    ("N9", {"tokens": 1}),
    ("N11", {"keys": 1}),
    ("N11", {"draws": 1}),
    ("N12", {"tokens": 1}),
    ("N17", {"keys": 5}),
]
"""Settings with which a claim could check nothing."""

OTHER_SETTINGS: list[tuple[str, dict[str, int | float]]] = [
    ("S11", {"dimensions": 2, "rank": 2, "heads": 20, "tokens": 40}),
    ("S11", {"dimensions": 24, "rank": 8, "heads": 20}),
    ("S12", {"pairs": 20, "dimensions": 2}),
    ("S12", {"pairs": 50, "dimensions": 12}),
    ("S13", {"dimensions": 2, "repetitions": 200}),
    ("S13", {"dimensions": 12}),
    ("S14", {"heads": 2, "tokens": 2, "dimensions": 1}),
    ("S14", {"heads": 12, "tokens": 32, "dimensions": 32}),
    ("S15", {"N": 1, "repetitions": 2000}),
    ("S15", {"N": 1024, "seed": 3, "repetitions": 2000}),
    ("S16", {"draws": 100, "observations": 60}),
    ("S17", {"examples": 3, "learners": 1, "rounds": 1}),
    ("S17", {"examples": 100, "learners": 30, "rounds": 60}),
    ("S18", {"atoms": 1, "dimensions": 1}),
    ("S18", {"atoms": 32, "dimensions": 64}),
    ("S20", {"particles": 2000, "populations": 5000}),
    ("S23", {"atoms": 2, "samples": 20000}),
    ("S23", {"atoms": 40, "dimensions": 2, "samples": 20000}),
    ("S23", {"dimensions": 30, "seed": 5, "samples": 20000}),
    ("B1", {"machines": 100, "seed": 7}),
    ("B8", {"chains": 5000, "seed": 3}),
    ("B10", {"seed": 9}),
    ("B13", {"spins": 3}),
    ("B13", {"spins": 12}),
    ("B14", {"spins": 2, "size": 1}),
    ("B14", {"spins": 20, "size": 4}),
    ("B15", {"spins": 20, "components": 3, "scale": 2.0, "strength": 1.5}),
    ("B15", {"spins": 2, "components": 2, "scale": 0.1, "strength": 0.2}),
    ("B16", {"spins": 3, "components": 3, "scale": 0.5}),
    ("B16", {"spins": 10, "components": 30, "scale": 2.0}),
    ("B18", {"atoms": 50, "dimensions": 32, "draws": 4}),
    ("B19", {"atoms": 50, "dimensions": 32, "draws": 4}),
    ("B21", {"spins": 5, "components": 10, "scale": 2.0}),
    ("Z1", {"balls": 2, "drawn": 2, "length": 2}),
    ("Z1", {"balls": 60, "drawn": 4, "length": 20}),
    ("Z2", {"concepts": 6, "tokens": 3, "length": 4}),
    ("Z3", {"tokens": 200, "dimensions": 1, "repetitions": 1000}),
    ("Z4", {"keys": 5, "dimensions": 1}),
    ("Z4", {"keys": 150, "dimensions": 5, "noise": 1.0, "prior_variance": 0.5}),
    ("Z5", {"tokens": 200, "dimensions": 4, "letters": 8}),
    ("Z6", {"repetitions": 20, "noise": 0.5}),
    ("Z8", {"scale": 1.0, "turn": -0.5}),
    ("Z11", {"models": 3, "concepts": 40, "length": 200}),
    ("Z14", {"tokens": 20, "width": 30, "layers": 4}),
    ("X4", {"tokens": 100, "dimensions": 1}),
    ("X6", {"draws": 5, "dimensions": 2}),
    ("X6", {"draws": 20, "dimensions": 10}),
    ("N1", {"tokens": 2, "dimensions": 3, "heads": 1, "memories": 1}),
    ("N1", {"tokens": 12, "dimensions": 16, "heads": 4, "memories": 60, "draws": 4}),
    ("N6", {"dimensions": 5}),
    ("N9", {"tokens": 100, "dimensions": 8, "noise": 1.5}),
    ("N11", {"keys": 2, "dimensions": 2, "draws": 2}),
    ("N11", {"keys": 200, "dimensions": 32, "draws": 50}),
    ("N12", {"tokens": 2, "dimensions": 2, "layers": 2}),
    ("N12", {"tokens": 30, "dimensions": 12}),
    ("N17", {"keys": 100, "dimensions": 8, "ridge": 10.0}),
]
"""Smaller, larger and skewed problems, at which a claim must hold too."""


def _named(row: tuple[str, dict[str, int | float]]) -> str:
    id, settings = row
    return "-".join([id, *(f"{name}={value}" for name, value in settings.items())])


@pytest.mark.parametrize("row", TOO_FEW, ids=_named)
def test_too_few_to_check_anything(row: tuple[str, dict[str, int]]):
    id, settings = row
    with pytest.raises(InputError, match="must be at least"):
        verify(id, settings=settings)


@pytest.mark.slow
@pytest.mark.parametrize("row", OTHER_SETTINGS, ids=_named)
def test_the_claim_holds_for_other_settings(row: tuple[str, dict[str, int | float]]):
    id, settings = row
    assert _failing(id, settings) == []


NOT_SEEN_WHEN_SMALL = {"N5: clusters of no width", "N6: layers that add to every direction"}
"""What the small settings do not tell from chance or from the right number."""


def _cases() -> Iterator[ParameterSet]:
    """One for each claim that takes no time is tried in every run; the others are slow tests."""
    seen = set(SMALL)
    for case, (id, *_) in WRONG.items():
        yield pytest.param(case, marks=pytest.mark.slow if id in seen else pytest.mark.medium, id=case)
        seen.add(id)


@pytest.mark.parametrize("case", list(_cases()))
def test_what_is_wrong_fails_its_claim(case: str, monkeypatch: pytest.MonkeyPatch):
    id, owner, name, replacement = WRONG[case]
    monkeypatch.setattr(owner, name, replacement)
    settings = None if case in NOT_SEEN_WHEN_SMALL else SMALL.get(id)
    assert verify(id, settings=settings)[0].verdict == "fails"


@pytest.mark.medium
def test_a_real_claim_by_the_command():
    ran = CliRunner().invoke(app, ["verify", "s7", "--json", "--seed", "3"])
    assert ran.exit_code == 0, ran.stderr
    (claim,) = json.loads(ran.stdout)
    assert (claim["id"], claim["verdict"], claim["published_verdict"]) == ("S7", "holds", "fails")
    assert claim["parameters"]["seed"] == 3


@pytest.mark.medium
def test_a_claim_in_a_pipe_is_as_wide_as_100_columns():
    ran = CliRunner().invoke(app, ["verify", "S7", "--set", "draws=2"])
    assert ran.exit_code == 0, ran.stderr
    assert 90 < max(map(len, ran.stdout.splitlines())) <= 100


@pytest.fixture(scope="module")
def pages() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted(THEORY.glob("*.md"))]


@pytest.mark.parametrize("id", claims())
def test_the_documentation_has_the_claim_with_its_status(id: str, pages: list[str]):
    number = id.lower()
    if not any(f'<a id="{number}">' in text for text in pages):
        number = number.rstrip("abcdefgh")  # a lettered claim may be a part of its number's entry
    found = []
    for text in pages:
        found += re.findall(rf'<a id="{number}"></a>\n##+ .*\n\n\*\*Status:\*\* (abstract only|\w+)', text)
        if f'\n* <a id="{number}"></a>**{number.upper()}. ' in text:  # a list says its entries' status once
            found += re.findall(r"Status of all entries: \*\*(\w+)\*\*", text)
    assert found == [claims()[id].status]


def test_the_theory_page_lists_what_verify_runs():
    (line,) = re.findall(r"runs (.+) and prints the numbers", (THEORY / "index.md").read_text(encoding="utf-8"))
    listed = set()
    for first, last in re.findall(r"([A-Z]\d+[a-h]?)(?:–[A-Z](\d+))?", line):
        end = int(last or 0)
        listed |= {f"{first[0]}{number}" for number in range(int(first[1:]), end + 1)} if end else {first}
    assert listed == set(claims())


def test_the_readme_counts_the_claims():
    (count,) = re.findall(r"(\d+) claims hold", (THEORY.parents[1] / "README.md").read_text(encoding="utf-8"))
    assert int(count) == len(claims())


@pytest.mark.parametrize("id", claims())
def test_the_claim_is_told_in_sentences(id: str):
    entry = claims()[id]
    assert len(entry.title) <= 47  # a line of a terminal with 80 columns
    for text in (entry.statement, entry.published, entry.corrected):
        assert text is None or text.endswith(".")
    assert not entry.source.endswith(".")


@pytest.mark.parametrize(
    ("id", "name"),
    [("B15", "strength"), ("B16", "scale"), ("B18", "g"), ("B21", "scale"), ("N2", "beta"), ("N4", "beta")],
)
def test_a_setting_is_used_as_it_is_given_or_refused(id: str, name: str):
    with pytest.raises(InputError, match=rf"^{name} must be at least 0\.\d+ here, got -3\.0$"):
        verify(id, settings={name: -3.0})
