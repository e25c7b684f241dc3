"""The page as a file: self-contained, harmless, complete in words, small enough; the numbers in it are the table's."""

import base64
import dataclasses
import gzip
import hashlib
import itertools
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import polars
import pytest
from plotly import offline
from tests.report.conftest import Made
from tests.support.report.synthetic_results import HOSTILE, Results, encoder

from massieu.errors import MissingExtraError
from massieu.probing.result.stored import run_of
from massieu.report import page as page_module
from massieu.report.colours import SEQUENTIAL
from massieu.report.overview import overview_of
from massieu.report.page import render
from massieu.report.tables import catalogue_of, head_columns, sites_of
from massieu.report.terms import TERMS, explained

ROOT = Path(__file__).parents[2]
WITH_EXPLANATION = ("page.html.j2", "compare.html.j2", "curves.html.j2", "claims.html.j2")
SMALL_KINDS = ("encoder", "encoder_decoder", "bare", "hostile")
LOADING_ATTRIBUTES = {
    "src",
    "srcset",
    "href",
    "xlink:href",
    "data",
    "action",
    "formaction",
    "poster",
    "background",
    "ping",
}
EXECUTABLE = {None, "text/javascript", "module"}


class Parsed(HTMLParser):
    """Tags, attributes, script and style bodies, and the visible text of a page, by Python's own parser."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.bodies: list[tuple[str, dict[str, str | None], str]] = []
        self.text = ""
        self._open: tuple[str, dict[str, str | None]] | None = None
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = (tag, dict(attrs)) if tag in ("script", "style") else None

    def handle_endtag(self, tag: str) -> None:
        if self._open and tag == self._open[0]:
            self._open = None

    def handle_data(self, data: str) -> None:
        if self._open:
            self.bodies.append((*self._open, data))
        else:
            self.text += data

    def scripts(self) -> list[str]:
        return [
            body for tag, attributes, body in self.bodies if tag == "script" and attributes.get("type") in EXECUTABLE
        ]

    def data(self) -> dict:
        return json.loads("".join(body for _, attributes, body in self.bodies if attributes.get("id") == "report-data"))

    def block(self, name: str) -> bytes:
        text = "".join(body for _, attributes, body in self.bodies if attributes.get("data-block") == name)
        return gzip.decompress(base64.b64decode(text))

    def plotly(self) -> str:
        (text,) = [body for _, attributes, body in self.bodies if attributes.get("id") == "plotly"]
        return gzip.decompress(base64.b64decode(text)).decode()

    def array(self, reference: list) -> np.ndarray:
        block, offset, length, kind = reference
        return np.frombuffer(self.block(block), dtype=f"<{kind}", count=length, offset=offset)


@pytest.fixture(scope="module")
def parsed(pages: dict[str, str]) -> dict[str, Parsed]:
    return Made(lambda kind: Parsed(pages[kind]))


@pytest.mark.medium
@pytest.mark.parametrize("kind", SMALL_KINDS)
def test_nothing_is_loaded_from_outside(kind: str, parsed: dict[str, Parsed]) -> None:
    page = parsed[kind]
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base", "img"), f"a {tag} element"
        for name in LOADING_ATTRIBUTES & set(attributes):
            assert (attributes[name] or "").startswith("#"), f"{tag} {name}={attributes[name]}"
        assert not any(name.startswith("on") for name in attributes), f"{tag} has an inline handler"
        assert "url(" not in (attributes.get("style") or "")
    for tag, _, body in page.bodies:
        if tag == "style":
            assert "url(" not in body
            assert "@import" not in body
    (own,) = page.scripts()
    assert not re.search(r"https?:|\bfetch\(|XMLHttpRequest|WebSocket|\bimport\b|innerHTML|document\.write", own)


@pytest.mark.parametrize("kind", SMALL_KINDS)
def test_only_the_two_known_scripts_may_run(kind: str, parsed: dict[str, Parsed]) -> None:
    page = parsed[kind]
    scripts = [*page.scripts(), page.plotly()]
    assert len(scripts) == 2
    (policy,) = [
        a["content"] for tag, a in page.tags if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy is not None
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert directives["default-src"] == "'none'"
    hashes = {"'sha256-" + base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() + "'" for body in scripts}
    assert set(directives["script-src"].split()) == hashes


def test_the_drawing_library_is_packed_whole(parsed: dict[str, Parsed], pages: dict[str, str]) -> None:
    library = offline.get_plotlyjs()
    assert parsed["encoder"].plotly() == library
    assert len(pages["bare"].encode()) < 0.5 * len(library.encode())


@pytest.mark.medium
def test_what_does_not_fit_is_named(
    results: dict[str, Results], parsed: dict[str, Parsed], pages: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "leaves out" not in parsed["encoder"].text
    room = len(pages["encoder"].encode()) - 80_000  # more than the second example takes
    monkeypatch.setattr("massieu.report.page.PAGE_BYTES", room)
    page = render(*results["encoder"])
    assert "To keep this page under 8 MB, it leaves out: the numbers of “window 12” after its first" in page
    assert "the example “window 29”" in page
    assert len(page.encode()) < room


@pytest.mark.slow
def test_the_page_of_a_large_model_stays_under_eight_megabytes(
    results: dict[str, Results], parsed: dict[str, Parsed], pages: dict[str, str]
) -> None:
    assert len(pages["large"].encode()) < 8_000_000
    assert "it leaves out: the numbers of “window 12” after its first" in parsed["large"].text
    packed_numbers_are_those_of_the_table("large", parsed, results)


def test_hostile_strings_stay_text(parsed: dict[str, Parsed]) -> None:
    page = parsed["hostile"]
    assert page.text.count(HOSTILE[0] + HOSTILE[1]) > 300
    assert page.data()["examples"][0]["raw"]["text"][: len(HOSTILE)] == [
        token.replace("\ud800", "?") for token in HOSTILE
    ]
    assert {tag for tag, _ in page.tags}.isdisjoint({"img", "x"})


def packed_numbers_are_those_of_the_table(kind: str, parsed: dict[str, Parsed], results: dict) -> None:
    page = parsed[kind]
    heads = results[kind].heads
    data = page.data()
    order = {site["name"]: site["first"] for site in data["sites"]}
    assert set(data["columns"]) == set(heads["statistic"])
    for name in (
        "selective_log_partition",
        "write_score_cosine/mismatched",
        "own_write_sharpens/q_value",
        "entropy/spread",
    ):
        rows = heads.filter(polars.col("statistic") == name)
        cells = np.array([order[site] + head for site, head in rows.select("site", "head").iter_rows()])
        packed = data["columns"][name]
        # 15 bits of mantissa, rounded: relative error at most 2^-16; half precision: 2^-11.
        np.testing.assert_allclose(page.array(packed["value"])[cells], rows["value"], rtol=2**-16)
        if rows["standard_error"].is_not_null().all():
            np.testing.assert_allclose(page.array(packed["error"])[cells], rows["standard_error"], rtol=2**-11)
        else:
            assert "error" not in packed
        assert packed["count"] == rows["count"][0]


@pytest.mark.parametrize("kind", ["encoder", "encoder_decoder"])
def test_packed_numbers_are_those_of_the_table(kind: str, parsed: dict[str, Parsed], results: dict) -> None:
    packed_numbers_are_those_of_the_table(kind, parsed, results)


def test_examples_and_histograms_are_those_of_the_details(parsed: dict[str, Parsed], results: dict) -> None:
    page = parsed["encoder_decoder"]
    details = results["encoder_decoder"].details
    data = page.data()
    for example, packed in zip(details["examples"], data["examples"], strict=True):
        assert packed["raw"] == example["tokens"]
        for site, entry in example["sites"].items():
            reference = packed["sites"][site]
            shape = (4, reference["queries"], reference["strongest"])
            np.testing.assert_array_equal(page.array(reference["top_keys"]).reshape(shape), entry["top_keys"])
            weights = (page.array(reference["top_weights"]).reshape(shape) / 255) ** 2
            np.testing.assert_allclose(weights, entry["top_weights"], atol=1 / 255)
            entropy = page.array(reference["entropy"]).reshape(shape[:2])
            np.testing.assert_allclose(entropy, entry["entropy"], rtol=2**-11)
    histogram = details["histograms"]["entropy_fraction"]["counts"]["3"]
    packed = data["histograms"]["entropy_fraction"]["sites"]["3"]
    expected = np.array(histogram) / np.sum(histogram, axis=1, keepdims=True)
    assert packed["totals"] == np.sum(histogram, axis=1).tolist()
    np.testing.assert_allclose(page.array(packed["shares"]).reshape(expected.shape), expected, rtol=2**-11, atol=2**-25)


def test_first_screen_holds_strip_and_cards(parsed: dict[str, Parsed], results: dict) -> None:
    text = parsed["encoder"].text
    run = results["encoder"].run
    for finding in run.findings:
        for part in ("title", "sentence", "control", "caveat", "unit"):
            assert getattr(finding, part) in text
    assert "4.31 ± 0.05 nats" in " ".join(text.split())
    for part in ("all-MiniLM-L6-v2", "b3f1c9a04d7e5512", "pydoc_data.topics", "60 units", "✓ passed", "✓ complete"):
        assert part in text
    assert "INCOMPLETE" not in text


def test_a_picture_stands_before_the_findings_and_provenance_is_folded(pages: dict[str, str]) -> None:
    page = pages["encoder"]
    marks = (
        '<a class="skip" href="#findings">',
        '<details class="provenance">',
        '<figure class="overview">',
        'class="card"',
    )
    places = [page.index(mark) for mark in marks]
    assert places == sorted(places)
    assert "Self-check passed" in page
    assert '<figure class="overview">' not in pages["bare"]


@pytest.mark.parametrize("kind", SMALL_KINDS)
def test_no_heading_skips_a_level(kind: str, pages: dict[str, str]) -> None:
    levels = [int(level) for level in re.findall(r"<h([1-6])\b", pages[kind].partition("<script")[0])]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_every_page_names_the_one_that_explains_it(pages: dict[str, str]) -> None:
    """In words: a page has no address to link, as the documentation is on no public site."""
    assert page_of_explanation(pages["encoder"]) == "docs/how-to/probe.md"
    templates = Path(page_module.__file__).parent / "templates"
    names = {name: page_of_explanation((templates / name).read_text(encoding="utf-8")) for name in WITH_EXPLANATION}
    assert {name for name, path in names.items() if not (ROOT / path).is_file()} == set()


def page_of_explanation(page: str) -> str:
    (path,) = re.findall(r"How to read it: <code>(\S+)</code>", page)
    return path


def test_the_picture_has_a_square_for_every_number_of_a_head(results: dict[str, Results]) -> None:
    run, _, heads, _ = results["encoder"]
    sites = sites_of(run, heads)
    columns = head_columns(sites, heads)
    overview = overview_of(sites, columns, catalogue_of(run, columns, "head"), [{"statistic": "entropy_fraction"}])
    assert overview is not None
    values = heads.filter(polars.col("statistic") == "entropy_fraction")["value"]
    assert (overview.low, overview.high) == (values.min(), values.max())
    assert sum(path.count("M") for path in overview.paths.values()) == len(values)
    row = heads.filter((polars.col("statistic") == "entropy_fraction") & (polars.col("value") == values.max()))
    assert f"M{row['head'][0]} {row['layer'][0]}h" in overview.paths[SEQUENTIAL[-1]]


def test_a_failed_self_check_is_unfolded(results: dict[str, Results]) -> None:
    run, *tables = results["encoder"]
    failed = dataclasses.replace(run, self_check=dataclasses.replace(run.self_check, passed=False))
    page = render(failed, *tables)
    assert '<details class="provenance" open>' in page
    assert "Self-check FAILED" in page


def test_a_head_that_several_sites_have_is_not_linked(parsed: dict[str, Parsed]) -> None:
    assert [len(finding["cells"]) for finding in parsed["encoder"].data()["findings"]] == [3, 2, 2, 0]
    assert all(not finding["cells"] for finding in parsed["encoder_decoder"].data()["findings"])


def test_methods_name_every_statistic(parsed: dict[str, Parsed], results: dict) -> None:
    text = " ".join(parsed["encoder"].text.split())
    for entry in results["encoder"].run.statistics:
        for part in ("title", "name", "formula", "paper", "caveat", "cost"):
            assert getattr(entry, part) in text
    assert text.count("depends on the key origin") >= 5
    for guard in ("candidate no-op", "not information from it", "no equilibrium is claimed", "this text", "this model"):
        assert guard in text
    assert "dead" not in text


def test_missing_parts_are_said_in_a_sentence(parsed: dict[str, Parsed]) -> None:
    text = " ".join(parsed["bare"].text.split())
    for sentence in (
        "INCOMPLETE",
        "No findings were stored",
        "not run",
        "no unit: standard errors are missing",
        "Not recorded.",
    ):
        assert sentence in text
    assert "None" not in text.split()
    assert "300 warnings" in parsed["hostile"].text


@pytest.mark.medium
def test_the_same_result_gives_the_same_page(pages: dict[str, str]) -> None:
    made = encoder()
    assert render(run_of(made.run, "made up"), *made[1:]) == pages["encoder"]


@pytest.mark.medium
def test_a_run_that_lacks_optional_parts_is_drawn() -> None:
    result = encoder(layers=1, heads=2)
    run = {"model": None, "complete": False, "findings": [], "sites": [], "sublayers": []}
    page = Parsed(render(run_of(run, "made up"), {}, result.heads, result.layers))
    assert page.data()["sites"][0]["heads"] == 2
    assert len(page.data()["layers"]["sublayers"]) == 4


@pytest.mark.parametrize("package", ["plotly.offline", "jinja2", "polars"])
def test_a_missing_package_names_the_command(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = encoder(layers=1, heads=1)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=r'pip install "massieu\[probe\]"'):
        render(run_of(result.run, "made up"), *result[1:])


@pytest.mark.medium
def test_counts_stand_with_their_words() -> None:
    made = encoder(layers=1, heads=1)
    run = made.run | {"error_unit": {"unit": "window", "count": 1}}
    run["text"] = run["text"] | {"windows": 1}
    text = " ".join(Parsed(render(run_of(run, "made up"), *made[1:])).text.split())
    for said in ("1 window of up to 256 tokens", "1 unit, a window", "1 attention site, 4 sublayers", "self, 1 head"):
        assert said in text
    assert not re.search(r"(?<![.,\d\u202f])1 (heads|windows|units|sites|tokens|warnings)", text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("How far selective log Z rises.", ["selective log Z"]),
        ("Raw log Z, and selective log Z beside it.", ["selective log Z", "log Z"]),
        ("The effective number of keys, in nats", ["effective number of keys", "nats"]),
        ("DEPENDS ON THE KEY ORIGIN", ["key origin"]),
        ("Nothing that is coined", []),
        (None, []),
    ],
)
def test_coined_words_are_explained_once(text: str | None, expected: list[str]) -> None:
    assert [entry["term"] for entry in explained([text])] == expected


def test_every_statistic_of_the_registry_is_explained_where_it_stands(parsed: dict[str, Parsed]) -> None:
    for entry in parsed["encoder"].data()["statistics"]:
        coined = [term for term in TERMS if term.lower() in f"{entry['title']} {entry['question']}".lower()]
        told = " ".join(each["term"] for each in entry["terms"])
        assert all(term in told for term in coined)
