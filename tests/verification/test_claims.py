"""Every registered claim holds, and what is false as published is shown to fail."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.support.rows import every_row
from tests.support.verification.small import SMALL
from typer.testing import CliRunner

from massieu.cli.commands import app
from massieu.errors import InputError
from massieu.verification.registry import claims
from massieu.verification.run import verify

THEORY = Path(__file__).parents[2] / "docs" / "theory"


def _failing(id: str, settings: Mapping[str, int | float | str] | None = None) -> list[str]:
    """The rows that are not as they should be."""
    (claim,) = verify(id, settings=settings)
    wrong = [check for check in claim.checks if check.holds != (check.form == "corrected")]
    return [f"{check.name}: {check.measured} {check.comparison} {check.bound} ({check.form})" for check in wrong]


@pytest.mark.medium
@pytest.mark.parametrize("id", claims())
def test_the_claim_holds(id: str):
    assert _failing(id, SMALL.get(id)) == []


@pytest.mark.slow
@pytest.mark.parametrize("id", SMALL)
def test_the_claim_holds_with_its_own_settings(id: str):
    assert _failing(id) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("id", [id for id, entry in claims().items() if "seed" in entry.parameters])
def test_the_claim_holds_for_other_seeds(id: str, seed: int):
    assert _failing(id, {"seed": seed}) == []


@pytest.mark.medium
def test_a_real_claim_by_the_command():
    ran = CliRunner().invoke(app, ["verify", "s7", "--json", "--seed", "3"])
    assert ran.exit_code == 0, ran.stderr
    (claim,) = json.loads(ran.stdout)
    assert (claim["id"], claim["verdict"], claim["published_verdict"]) == ("S7", "holds", "fails")
    assert claim["parameters"]["seed"] == 3


@pytest.fixture(scope="module")
def pages() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted(THEORY.glob("*.md"))]


@every_row("id", claims())
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


@every_row("id", claims())
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
