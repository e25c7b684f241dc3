"""Numbers and pictures of the pages: each number of an example is in its stored output, each picture is made by a script."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from scripts import controls_page
from scripts.example_outputs import names, printed
from scripts.pictures import PICTURES, main

ROOT = Path(__file__).parent.parent
DOCS, IMAGES = ROOT / "docs", ROOT / "docs" / "images"
PAGE = DOCS / "start" / "examples.md"

NUMBER = re.compile(r"(?<![\w.^])[−+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?: ± \d+\.\d+)?(?: %)?(?![\w])")
NOT_PRINTED = {
    "A language model of characters": {"1.5": "the α of entmax"},
    "entropy_collapse.md": {"217": "thousand weights", "64": "width and context", "600": "steps", "10": "calls"},
    "flow.md": {
        "512": "tokens of a text",
        "384": "dimensions",
        "68": "68.460",
        "75": "75.061",
        "55": "54.887",
        **dict.fromkeys(("0.001", "0.033", "0.023"), "another softening, not the example's"),
    },
}
"""Numbers of a section, or of a paragraph on another page, that no run prints, each with what it is."""


def sections(page: str) -> dict[str, str]:
    """The sections of the page that name an example, by their title."""
    parts = re.split(r"^## (.+)\n", page, flags=re.MULTILINE)[1:]
    found = dict(zip(parts[::2], parts[1::2], strict=True))
    return {title: text for title, text in found.items() if re.search(r"`python examples/\w+\.py`", text)}


def paragraphs(page: str) -> list[tuple[str, str]]:
    """The paragraphs of another page that say what an example printed, with its name; a list belongs to the line before."""
    blocks = re.split(r"\n\n(?![*-] )", re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE))
    found = [(re.findall(r"`python examples/(\w+)\.py", block), block) for block in blocks if "\n|" not in block]
    return [(given[0], block) for given, block in found if len(given) == 1]


def stated(text: str) -> list[str]:
    """The numbers in a section's prose: without code, links' targets, claims and pictures."""
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)|`[^`]*`|\[[SBZXNE]\d+b?\]\([^)]*\)|\]\([^)]*\)", " ", text)
    return NUMBER.findall(re.sub(r"[LN]\^\([^)]*\)", " ", text))


def missing(text: str, output: str) -> list[str]:
    """The numbers of a section that the output does not have, to the digits that are shown."""
    output = output.replace("−", "-")
    pairs = [(a, b) for a, b in re.findall(r"(-?[\d.]+) ± ([\d.]+)", output)]
    alone = [each.rstrip(".") for each in re.findall(r"(?<![\w.])[-+]?\d[\d.]*(?:e[+-]?\d+)?", output)]
    wrong = []
    for number in stated(text):
        parts = number.replace("−", "-").removesuffix(" %").split(" ± ")
        rounded = number.endswith(" %") or "." in parts[0]
        if len(parts) == 2:
            found = any(all(map(_same, parts, pair, (True, True))) for pair in pairs)
        else:
            found = any(_same(parts[0], each, rounded) for each in alone)
        wrong += [] if found else [number]
    return wrong


def _same(shown: str, measured: str, rounded: bool) -> bool:
    """Whether a number is what is shown of another one; a whole number is not the rounding of one with digits."""
    _, _, digits = shown.partition(".")
    return abs(float(shown) - float(measured)) <= (0.5000001 * 10.0 ** -len(digits) if rounded else 0.0)


def test_every_example_has_its_section_its_stored_output_and_its_pictures():
    page = PAGE.read_text(encoding="utf-8")
    gallery = page[: page.index("\n## ")]
    told = [name for text in sections(page).values() for name in re.findall(r"`python examples/(\w+)\.py`", text)]
    assert sorted(told) == names()
    for name in names():
        assert f"](../images/small/{name}.png)" in gallery, name
        assert f"](../images/{name}.png)" in page, name
        assert printed(name).endswith(f"picture: docs/images/{name}.png\n"), name


def test_the_numbers_of_the_page_are_those_of_the_stored_runs():
    wrong = {}
    for title, text in sections(PAGE.read_text(encoding="utf-8")).items():
        (name,) = re.findall(r"`python examples/(\w+)\.py`", text)
        wrong[title] = [each for each in missing(text, printed(name)) if each not in NOT_PRINTED.get(title, {})]
    assert not {title: numbers for title, numbers in wrong.items() if numbers}


def test_numbers_of_examples_on_other_pages_are_those_of_the_stored_runs():
    wrong, seen = {}, set()
    for path in DOCS.rglob("*.md"):
        for name, text in [] if path == PAGE else paragraphs(path.read_text(encoding="utf-8")):
            left = [each for each in missing(text, printed(name)) if each not in NOT_PRINTED.get(path.name, {})]
            wrong |= {f"{path.name}: {name}": left} if left else {}
            seen |= {path.name} if stated(text) else set()
    assert not wrong
    assert {"smoothing.md", "transfer.md", "energy_transformer.md"} <= seen


def test_the_table_of_alarms_is_that_of_the_stored_run():
    page = (DOCS / "how-to" / "entropy_collapse.md").read_text(encoding="utf-8")
    table = page[page.index("| quantity | normalisation before") :].split("\n\n")[0]
    rows = {cells[0]: cells[1:] for cells in (re.split(r" *\| *", line.strip("| ")) for line in table.splitlines()[2:])}
    before, after, _ = re.split(r"\n\n(?=\S.*the loss is in alarm)", printed("watch_training"))[1:]
    row = re.compile(r"^  (\S.*?) {2,}(\d of \d) +(\d+ steps|-) +(\d of \d) +(\d of \d)$", re.MULTILINE)
    measured = {name: [alone, nothing] for name, _, _, alone, nothing in row.findall(before)}
    for name, early, lead, _, nothing in row.findall(after):
        measured[name] += [early, lead.removesuffix(" steps").replace("-", ""), nothing]
    assert rows == measured


@pytest.mark.medium
def test_the_page_on_controls_has_the_stored_numbers():
    page = controls_page.PAGE.read_text(encoding="utf-8")
    stored = json.loads(controls_page.RESULTS.read_text(encoding="utf-8"))
    assert controls_page.with_tables(page, stored) == page, "run python -m scripts.controls_page"
    # The rates that the page promises: of random models, of their numbers, and of heads that were planted.
    _, random_models = stored["models"]
    assert all(value[2] <= 0.05 for value in random_models.values() if isinstance(value, list))
    error = np.sqrt(0.05 * 0.95 / 2_000)
    assert max(row["after"] for part in ("families", "scales") for row in stored[part]) < 0.05 + 3 * error
    assert all(row["alone"][0] >= 0.95 * row["alone"][1] for row in stored["planted"])


def test_a_number_that_was_not_printed_is_seen():
    output = "accuracy 0.938 ± 0.010 (3 seeds), 53 of 60, share 82.9 %, error -4.565, off 7.2"
    right = "0.938 ± 0.010, 0.94, 53 of 60, 83 %, −4.565, `12`, ![9](a.png), [S7](x.md#s7), L^(-1/3)"
    assert missing(right, output) == []
    assert missing("0.939 ± 0.010, 0.938 ± 0.011, 0.95, 54, 7, 84 %, 4.565", output) == [
        *("0.939 ± 0.010", "0.938 ± 0.011", "0.95", "54", "7", "84 %", "4.565")
    ]


def test_every_picture_is_used_and_is_made_by_a_script():
    pages = "\n".join(path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *DOCS.rglob("*.md")])
    used = {path.rsplit("images/", 1)[1] for path in re.findall(r"\]\(((?:\.\./|docs/)*images/[\w/]+\.png)\)", pages)}
    kept = {str(path.relative_to(IMAGES)) for path in IMAGES.rglob("*.png")}
    made = {*names(), *PICTURES, "page", "controls"}  # scripts/page_picture.py, scripts/controls_page.py
    assert kept == used
    assert {Path(path).stem for path in kept} == made
    assert not [path for path in kept if (IMAGES / path).stat().st_size > 150_000]


def test_the_sample_report_is_small_whole_and_of_no_machine():
    page = (DOCS / "samples" / "smollm2.html").read_text(encoding="utf-8")
    assert len(page.encode()) < 3_000_000
    assert "SmolLM2" in page and "✓ passed" in page and "✓ complete" in page
    assert not re.search(r"site-packages|/home/|/root/|(?:src|href)=[\"']?https?://(?!arxiv\.org)", page)


@pytest.mark.slow
@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_drawn(name, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["pictures.py", "--out", str(tmp_path), name])
    monkeypatch.setattr("scripts.pictures.CAPACITY_TRIALS", 1)
    monkeypatch.setattr("scripts.pictures.CAPACITY_LOADS", (0.03, 0.14, 0.5))
    main()
    assert 10_000 < (tmp_path / f"{name}.png").stat().st_size < 150_000
