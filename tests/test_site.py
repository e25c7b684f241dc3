"""The documentation as a site: links lead somewhere, every name and claim has its entry, nothing comes from a network."""

import importlib
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterable
from functools import cache
from html import unescape
from pathlib import Path

import pytest
from markdown import Markdown
from markdown_it import MarkdownIt
from mkdocs.config import load_config
from scripts.example_sections import as_markdown
from scripts.formulas import formulas
from scripts.papers import papers_page, standing, used_names
from scripts.reference import places, public_names, reference_page, reference_uri, rooms
from scripts.site_pages import bars
from tests import test_house as house
from tests.support.short_site import SHORTER
from tests.support.site_search import SITUATIONS, found_pages
from tests.test_formulas import ANNOTATION, annotations, prose

from massieu.papers.claims.registry import claims

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md")) + [
    ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "ARCHITECTURE", "CHANGELOG")
]
LINK = re.compile(r"\]\(([^)\s]+)\)")


# --- links -----------------------------------------------------------------------------------------------------------


def _prose(text: str) -> str:
    """Without code: what looks like a link there is none."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "code", text)


def _slug(heading: str) -> str:
    """The anchor that GitHub and the site both make of a heading."""
    return re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()).replace(" ", "-")


@cache
def _anchors(path: Path) -> frozenset[str]:
    text = path.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return frozenset([*map(_slug, headings), *re.findall(r'<a id="([^"]+)">', text)])


@cache
def _generated() -> frozenset[str]:
    """The pages that are made when the site is built, as the imported package tells them."""
    modules = [module for room in house.ROOMS for module in house._shown(importlib.import_module(f"massieu.{room}"))]
    shown = ["massieu", "massieu.errors", *(module.__name__ for module in modules)]
    return frozenset(["theory/papers.md", *map(reference_uri, shown)])


def _broken(path: Path, text: str, generated: Collection[str]) -> list[str]:
    """The links of a page that lead nowhere; `generated` are the pages that the site's build adds to docs/."""
    wrong = []
    for link in LINK.findall(_prose(text)):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        found = (path.parent / target).resolve() if target else path
        if found.is_relative_to(DOCS) and str(found.relative_to(DOCS)) in generated:
            continue
        if not found.exists() or (anchor and anchor not in _anchors(found)):
            wrong.append(link)
    return wrong


@pytest.mark.medium
def test_every_link_leads_somewhere():
    assert not _broken_by_page(PAGES, _generated())


def test_links_of_the_first_pages_lead_somewhere_in_a_clone():
    """Without the pages that exist on the site alone; so do the links of what README sends a newcomer to."""
    names = ("README", "ARCHITECTURE", "CONTRIBUTING")
    folders = [DOCS / name for name in ("decisions", "start", "tutorials")]
    pages = [ROOT / f"{name}.md" for name in names] + [
        page for folder in folders for page in sorted(folder.glob("*.md"))
    ]
    assert not _broken_by_page(pages, generated=())


def _broken_by_page(pages: Iterable[Path], generated: Collection[str]) -> dict[str, list[str]]:
    broken = {str(path.relative_to(ROOT)): _broken(path, path.read_text(encoding="utf-8"), generated) for path in pages}
    return {page: links for page, links in broken.items() if links}


@pytest.mark.medium
def test_a_link_that_leads_nowhere_is_seen():
    right = "[a](index.md) [b](theory/shim.md#s7) `[c](gone.md)` [d](theory/papers.md)"
    text = f"{right} [e](gone.md) [f](glossary.md#gone) [g](#gone)"
    assert _broken(DOCS / "index.md", text, _generated()) == ["gone.md", "glossary.md#gone", "#gone"]
    assert _broken(DOCS / "index.md", text, ()) == ["theory/papers.md", "gone.md", "glossary.md#gone", "#gone"]


# --- what is generated -----------------------------------------------------------------------------------------------

# The package's source is read for these, which takes seconds.


@pytest.mark.slow
def test_every_public_name_has_its_entry_in_the_reference():
    pages = {reference_uri(room.path): reference_page(room) for room in rooms()}
    assert pages.keys() == _generated() - {"theory/papers.md"}
    entries = Counter(path for page in pages.values() for path in re.findall(r"^::: (\S+)$", page, re.MULTILINE))
    assert set(entries.values()) == {1}
    assert {path for path in entries if path in places()} == set(places())
    listed = {f"{room.path}.{name}".removeprefix("massieu.") for room in rooms() for name in public_names(room)}
    assert set(house._public_names()) <= listed


@pytest.mark.slow
def test_every_entry_is_followed_by_a_link_to_the_line_that_defines_it():
    (page,) = (reference_page(room) for room in rooms() if room.path == "massieu.measures")
    entries = re.findall(
        r"^::: (massieu\S+)\n    options: .*heading.*\n\n\[source\]\(../../(\S+)\), line (\d+)$", page, re.MULTILINE
    )
    assert len(entries) == page.count(" heading: ") > 20
    for path, file, line in entries:
        lines = (ROOT / file).read_text(encoding="utf-8").splitlines()[int(line) - 1 :]
        definition = next(each for each in lines if re.match("class |def ", each))  # below its decorators
        assert re.split(r"\W+", definition)[1] == path.rpartition(".")[2]


@pytest.mark.slow
def test_entries_stand_in_the_order_of_the_source():
    (ops,) = (reference_page(room) for room in rooms() if room.path == "massieu.ops")
    named = re.findall(r"heading: (\w+)", ops)
    assert (
        named.index("attention")
        < named.index("fisher_vp")
        < named.index("Partial")
        < named.index("linear_cross_entropy")
    )


@pytest.mark.slow
def test_every_claim_is_on_the_map_with_what_it_uses():
    page = papers_page()
    rows = re.findall(r"^\|.*?\| \[([A-Z]\d+[a-z]?)\]\((\w+\.md)#", page, flags=re.MULTILINE)
    assert sorted(claims()) == sorted(id for id, _ in rows)
    assert not re.findall(r"^.* \| – \|$", page, flags=re.MULTILINE)  # a claim that names nothing
    assert _broken(DOCS / "theory" / "papers.md", page, _generated()) == []
    assert "errors." not in page  # every claim raises them
    anchors = {entry.partition("#")[2] for _, entry in places().values()}
    assert set(re.findall(r"reference/[\w.]+\.md#([\w.]+)", page)) <= anchors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("id", "names", "stands"),
    [
        ("S7", ["massieu.measures.base.Measure"], "quoted; **corrected**: the printed form fails"),
        ("X4", ["massieu.ops.attention.attention", "massieu.ops.attention.log_partition"], "derived; holds"),
        (
            "N23",
            ["massieu.energy.hopfield.HopfieldEnergy", "massieu.papers.theory.newton.newton_step"],
            "quoted; holds",
        ),
        ("B12", ["massieu.solve.fixed_point.fixed_point"], "quoted; made precise"),
        ("Z10", ["massieu.papers.theory.generalisation.generalisation_bound"], "abstract only; holds"),
    ],
)
def test_a_claim_names_what_it_uses_and_how_it_stands(id, names, stands):
    entry = claims()[id]
    used = used_names(entry)
    assert used[0] == names[0]  # what a claim is about comes first
    assert set(names) <= set(used)
    assert standing(entry) == stands


def test_stars_of_shapes_are_no_emphasis_in_the_reference():
    docstring = (
        "Of shape (*batch, d) and (*batch); *not* A*(mu) + B*(mu), but `(*batch)`.\n\n"
        "Example:\n    >>> f(*given)\n    3\n"
    )
    text = as_markdown(docstring)
    assert text.startswith("Of shape (\\*batch, d) and (\\*batch); *not* A\\*(mu) + B\\*(mu), but `(*batch)`.")
    assert "Examples:\n    >>> f(*given)" in text
    shown = Markdown().convert(text.partition("\n")[0])
    assert "<em>not</em>" in shown and shown.count("<em>") == 1
    assert "(*batch, d) and (*batch)" in shown


# --- the site --------------------------------------------------------------------------------------------------------


def test_what_is_made_shorter_stands_in_a_tutorial():
    pages = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "tutorials").glob("*.md"))
    assert not [printed for printed in SHORTER if printed not in pages]


def test_every_page_that_is_searched_for_exists():
    assert not [page for page in SITUATIONS.values() if not (DOCS / f"{page}.md").exists()]


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_fetches_nothing(tmp_path):
    command = [sys.executable, "-m", "tests.support.short_site", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = {path.relative_to(tmp_path): path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")}
    fetched = re.compile(
        r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(?:https?:)?//|<link\b(?![^>]*rel=\"?canonical)[^>]*https?://"
    )
    assert not [page for page, text in pages.items() if fetched.search(text)]
    tutorials = {path.stem for path in (DOCS / "tutorials").glob("*.md")} - {"index"}
    shown = {name: pages[Path(f"tutorials/{name}.html")] for name in tutorials}
    assert {name for name, text in shown.items() if 'src="data:image/png' in text} == tutorials  # they were run
    for name in tutorials:
        assert re.search(rf'href="?{name}\.ipynb', pages[Path(f"tutorials/{name}.html")])
        assert json.loads((tmp_path / "tutorials" / f"{name}.ipynb").read_text(encoding="utf-8"))["nbformat"] == 4
    for sheet in tmp_path.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import\s+)[\"']?(?:https?:)?//", sheet.read_text(encoding="utf-8")), sheet
    for path, (_, entry) in places().items():
        assert f'id="{path}"' in pages[Path(entry.partition("#")[0]).with_suffix(".html")], path
    for page in DOCS.rglob("*.md"):
        shown = pages[page.relative_to(DOCS).with_suffix(".html")]
        assert annotations(shown) == Counter(formulas(page.read_text(encoding="utf-8"))), page
        assert not re.findall(r"\$`|\\[a-z]{2}", prose(shown)), page
    found = dict(zip(SITUATIONS, found_pages(tmp_path, list(SITUATIONS)), strict=True))
    assert not {words: found[words][:4] for words, page in SITUATIONS.items() if page not in found[words][:3]}
    searched = (tmp_path / "search" / "search_index.js").read_text(encoding="utf-8")
    assert "Cov" in searched
    assert "operatorname" not in searched
    assert "&gt;&gt;&gt; " not in re.sub(
        r"<(pre|code)\b.*?</\1>", "", pages[Path("reference/ops.html")], flags=re.DOTALL
    )


@pytest.mark.slow
def test_the_site_shows_what_github_shows():
    """Two readings of Markdown, one of lists and tables that the other takes for text."""
    config = load_config(str(ROOT / "mkdocs.yml"))
    ours = Markdown(extensions=config.markdown_extensions, extension_configs=config.mdx_configs)
    github = MarkdownIt("commonmark").enable("table")
    differ = []
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        if path.is_relative_to(DOCS) or path.name in ("CONTRIBUTING.md", "ARCHITECTURE.md"):
            differ += [path.name] * (_shown(ours.reset().convert(bars(text))) != _shown(github.render(text)))
    assert not differ


def _shown(page: str) -> tuple[Counter[str], str]:
    """How many lists, cells and emphases a page has, and its text. Formulas are their LaTeX, as plain Markdown has it."""
    page = re.sub(r"<math\b.*?</math>", _latex, page, flags=re.DOTALL)
    page = re.sub(
        r'\$(<code>.*?</code>)\$|<pre><code class="language-math">(.*?)</code></pre>', r"\1\2", page, flags=re.DOTALL
    )
    tags = Counter(re.findall(r"<(li|ul|ol|td|th|h\d|pre|em|strong|img|table)\b", page))
    return tags, re.sub(r"[\s¶]+", "", unescape(re.sub(r"<[^>]*>", "", page)))


def _latex(formula: re.Match[str]) -> str:
    (latex,) = ANNOTATION.findall(formula[0])
    return latex
