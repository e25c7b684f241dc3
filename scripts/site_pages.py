"""The pages of the site that no one writes by hand, as hooks of mkdocs (`mkdocs.yml` names this file).

- `reference/`: a page per room, from the docstrings (mkdocstrings);
- `theory/papers.md`: from the papers to the code;
- `tutorials/`: with what their blocks print and draw, and each as a notebook;
- `repository/`: what the pages link to outside docs/: scripts, results, how to contribute. In the repository pages link to
  these files by relative paths; on the site the same links lead to `repository/`.
"""

import os.path
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from scripts.notebooks import notebook_json, tutorials
from scripts.papers import papers_page
from scripts.reference import ROOT, Uri, reference_page, reference_uri, rooms
from scripts.tutorials import executed

LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=(?:#[^)\s]*)?\))")
"""The path of a link, where its target is not an anchor alone."""

ROW = re.compile(r"^\|.*\|$", re.MULTILINE)
CODE = re.compile(r"`[^`]+`")
BEHIND = {"decisions/": 0.1, "repository/": 0.1, "reference/": 0.3, "theory/": 0.5}
"""Factors on what the search thinks of these folders: who asks a question wants the pages that answer it before those."""


def generated_pages() -> dict[Uri, str]:
    """The pages of the reference and the map of the papers."""
    return {reference_uri(room.path): reference_page(room) for room in rooms()} | {"theory/papers.md": papers_page()}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The reference's pages enter the navigation."""
    (reference,) = (entry for entry in config.nav or [] if "Reference" in entry)
    reference["Reference"] = [{room.path: reference_uri(room.path)} for room in rooms()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The generated pages, and what all pages link to outside docs/."""
    for uri, text in generated_pages().items():
        files.append(File.generated(config, uri, content=text))
    for path in tutorials():
        content = notebook_json(path.read_text(encoding="utf-8"))
        files.append(File.generated(config, f"tutorials/{path.stem}.ipynb", content=content))
    left = [(f"docs/{file.src_uri}", file.content_string) for file in files.documentation_pages()]
    while left:
        for path in _outside(*left.pop()):
            if files.get_file_from_path(_uri(path)) is None:
                content = _content(ROOT / path)
                files.append(File.generated(config, _uri(path), content=content))
                if path.endswith(".md"):
                    left.append((path, content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as they are on the site, tables as its Markdown reads them, tutorials with their output."""
    uri = page.file.src_uri
    source = uri.removeprefix("repository/") if uri.startswith("repository/") else f"docs/{uri}"
    here = os.path.dirname(uri)

    def on_site(link: re.Match[str]) -> str:
        path = _resolved(source, link[1])
        return os.path.relpath(_uri(path), here) if _is_moved(source, path) else link[1]

    if uri.startswith(tuple(BEHIND)):
        page.meta.setdefault("search", {})["boost"] = min(
            boost for start, boost in BEHIND.items() if uri.startswith(start)
        )
    markdown = LINK.sub(on_site, bars(markdown))
    return _tutorial(markdown, Path(uri)) if uri.startswith("tutorials/") else markdown


def _tutorial(markdown: str, uri: Path) -> str:
    """A tutorial with its output and, below its title, a link to the notebook."""
    shown = executed(markdown)
    if uri.stem == "index":
        return shown
    title, rest = shown.split("\n", 1)
    link = f'<a href="{uri.stem}.ipynb" download>This page as a notebook</a>, which runs without a network.'
    return f"{title}\n\n{link}\n{rest}"


def bars(markdown: str) -> str:
    """GitHub takes a bar in a table's code for the end of a cell, unless it is escaped; Python's Markdown shows the escape."""
    return ROW.sub(lambda row: CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0]), markdown)


def _outside(source: str, markdown: str) -> set[str]:
    """The paths outside docs/ that a file of the repository links to."""
    paths = {_resolved(source, link) for link in LINK.findall(markdown)}
    return {path for path in paths if not path.startswith("docs/") and (ROOT / path).exists()}


def _is_moved(source: str, path: str) -> bool:
    """Whether a link from this file leads elsewhere on the site than in the repository."""
    return (ROOT / path).exists() and not (source.startswith("docs/") and path.startswith("docs/"))


def _resolved(source: str, link: str) -> str:
    return os.path.normpath(os.path.join(os.path.dirname(source), link))


def _uri(path: str) -> Uri:
    """Where a path of the repository is on the site; a script or folder becomes a page that shows it."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"repository/{path}/index.md"
    return f"repository/{path}.md" if path.endswith((".py", ".json")) else f"repository/{path}"


def _content(path: Path) -> str:
    if path.is_dir():
        entries = sorted(entry.name for entry in path.iterdir() if entry.is_file())
        return f"# {path.relative_to(ROOT)}\n\n" + "\n".join(f"- [{name}]({name}.md)" for name in entries) + "\n"
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    # The search would find every word of the code before the pages that explain it.
    left_out = "---\nsearch:\n  exclude: true\n---\n\n" if path.is_relative_to(ROOT / "src") else ""
    return f"{left_out}# {path.relative_to(ROOT)}\n\n```{path.suffix[1:]}\n{text}```\n"
