"""The reference of the site, a page per room, from the package's source: nothing of it is imported."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import griffe

ROOT = Path(__file__).parent.parent
PACKAGE = "massieu"

Uri = str
"""A page's path below docs/, as mkdocs calls it: `how-to/ops.md`."""


@cache
def modules() -> dict[str, griffe.Module]:
    """Every module of the package by its path, the package first."""
    package = griffe.load(PACKAGE, search_paths=[str(ROOT / "src")])
    assert isinstance(package, griffe.Module)
    found, left = {}, [package]
    while left:
        module = left.pop()
        found[module.path] = module
        left += [member for member in module.members.values() if isinstance(member, griffe.Module)]
    return found


def public_names(module: griffe.Module) -> dict[str, str]:
    """Each name of `__all__`, or without one each class, and the path where it is defined; in the order of the source."""
    listed = module.exports
    if listed is None:
        listed = [name for name, member in module.members.items() if isinstance(member, griffe.Class)]
    order = [*module.imports, *module.members]
    names = sorted(map(str, listed), key=order.index)
    return {name: module.imports.get(name, f"{module.path}.{name}") for name in names}


def rooms() -> list[griffe.Module]:
    """The package, its rooms, each followed by its public submodules, and the errors."""

    def walk(path: str) -> Iterator[griffe.Module]:
        yield modules()[path]
        for inner in sorted(public_names(modules()[path]).values()):
            if inner in modules():
                yield from walk(inner)

    return [*walk(PACKAGE), modules()[f"{PACKAGE}.errors"]]


def reference_uri(module: str) -> Uri:
    """The page of a room or public submodule: `reference/ops.sharded.md`."""
    return f"reference/{module.removeprefix(f'{PACKAGE}.')}.md"


def reference_page(module: griffe.Module) -> str:
    """The room's own docstring, then each of its names; what has its entry on another page is a link to it."""
    uri = reference_uri(module.path)
    parts = [
        f"# `{module.path}`",
        f"::: {module.path}\n    options: {{ members: false, show_root_heading: false, show_root_toc_entry: false }}",
    ]
    names = public_names(module)
    elsewhere = {path: reference_uri(path) for path in names.values() if path in modules()}
    entries = {path: places()[path] for path in names.values() if path not in modules()}
    elsewhere |= {path: entry for path, (_, entry) in entries.items() if entry.partition("#")[0] != uri}
    if elsewhere:
        links = ", ".join(f"[`{path}`]({entry.rpartition('/')[2]})" for path, entry in sorted(elsewhere.items()))
        parts.append(f"On other pages: {links}.")
    for name, path in names.items():
        if path not in elsewhere:
            parts.append(f"::: {path}\n    options: {{ heading: {name}, toc_label: {name} }}")
            parts.append(_source_link(path))
    return "\n\n".join(parts) + "\n"


def _source_link(path: str) -> str:
    """A link to the file in which a name is defined, as GitHub would follow it from the page; the site shows the file."""
    definition = modules()[PACKAGE][path.removeprefix(f"{PACKAGE}.")]
    file = Path(str(definition.filepath)).relative_to(ROOT).as_posix()
    return f"[source](../../{file}), line {definition.lineno}"


@cache
def places() -> dict[str, tuple[str, str]]:
    """For the path where a public name is defined: what users call it, such as `ops.attention`, and where its entry is."""
    found = {}
    for room in rooms():  # the errors come last: what the package shows too has its entry there
        for name, path in public_names(room).items():
            if path not in modules():
                short = f"{room.path}.{name}".removeprefix(f"{PACKAGE}.")
                found[path] = short, f"{reference_uri(room.path)}#{path}"
    return found
