"""From the papers to the code: each section's statements, the claim that checks each, and what it is about in the package.

Everything comes from the claim registry; the functions are those public names that the claim's code uses.
"""

import ast
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from scripts.reference import PACKAGE, ROOT, modules, places, public_names

from massieu.papers.claims.claim import BAL, FOLLOW_UP, SHIM, ZHANG
from massieu.papers.claims.registry import ClaimFunction, claims

PAPERS = {
    "S": (
        "Shim",
        "shim.md",
        "A. Shim, [A Probabilistic Interpretation of Transformers](https://arxiv.org/abs/2205.01080), arXiv 2205.01080.",
    ),
    "B": (
        "Bal",
        "bal.md",
        "M. Bal, [Transformer Attention as an Implicit Mixture of Effective Energy-Based Models]("
        "https://mcbal.github.io/post/transformer-attention-as-an-implicit-mixture-of-effective-energy-based-models/), "
        "December 2020, and later posts such as [Transformers Are Secretly Collectives of Spin Systems]("
        "https://mcbal.github.io/post/transformers-are-secretly-collectives-of-spin-systems/), November 2021.",
    ),
    "Z": (
        "Zhang et al.",
        "zhang.md",
        "Y. Zhang, B. Liu, Q. Cai, L. Wang, Z. Wang, [An Analysis of Attention via the Lens of Exchangeability and Latent "
        "Variable Models](https://arxiv.org/abs/2212.14852), arXiv 2212.14852. Its abstract alone was available. Where the "
        "follow-up is named, that is [arXiv 2305.19420](https://arxiv.org/abs/2305.19420).",
    ),
    "X": ("Bridges", "bridges.md", "What joins the papers to each other; derived here."),
    "N": ("Beyond", "beyond.md", "What later literature adds."),
}
"""Heading, page of the theory and description of each family of claims."""

SHORT = {
    f"{SHIM}, ": "",
    f"{BAL}, ": "",
    f"{ZHANG}, ": "",
    SHIM: "Shim",
    BAL: "Bal",
    ZHANG: "Zhang",
    FOLLOW_UP: "follow-up",
}

STANDINGS = {
    "asserted": "**corrected**: the printed form fails",
    "ambiguous": "made precise: one reading fails",
    "assumption": "made precise: what is assumed fails",
}

HEAD = """---
hide: [toc]
---

# From the papers to the code

Each row is a statement of a paper, where it stands, the claim that checks it, and the public names that the check uses.
Ask for the numbers of one with `massieu verify S7`. The page is made from the claim registry when the site is built.

*Holds* means that the checks find the statement true and nothing had to be changed.
*Corrected* means that the paper asserts something else, which the checks show to fail.
*Made precise* means that it needed a condition, a constant or a choice between readings.
Statuses, such as *quoted* or *reconstructed*, are explained with [the claims](index.md#statuses).
"""


ERRORS = f"{PACKAGE}.errors."


# --- the functions of a claim ----------------------------------------------------------------------------------------


def used_names(entry: ClaimFunction) -> list[str]:
    """The paths of the public names that a claim's code uses, with its helpers in the same file, in reading order.

    Code that takes what a helper of another file makes names it by its annotations alone: those count where nothing else
    is found.
    """
    imports, definitions = _scope(entry.body.__module__)
    for strip in (_without_annotations, lambda node: node):
        found: dict[str, None] = {}
        left = [entry.body.__name__]
        for name in left:  # grows as helpers are met
            for dotted in _dotted_names(strip(definitions[name])):
                first, _, rest = dotted.partition(".")
                if first in definitions:
                    left += [first] * (first not in left)
                elif path := _public(f"{imports.get(first, '')}.{rest}".strip(".")):
                    found[path] = None
        if shown := [path for path in found if not path.startswith(ERRORS)]:
            return shown
    return []


def _without_annotations(node: ast.AST) -> ast.AST:
    """An argument's type says little of what is computed."""
    node = ast.parse(ast.unparse(node))
    for part in ast.walk(node):
        if isinstance(part, ast.arg):
            part.annotation = None
        elif isinstance(part, ast.FunctionDef):
            part.returns = None
            part.decorator_list = []
    return node


def _dotted_names(node: ast.AST) -> list[str]:
    return [name for part in ast.walk(node) if isinstance(part, ast.Name | ast.Attribute) and (name := _dotted(part))]


@cache
def _scope(module: str) -> tuple[dict[str, str], dict[str, ast.AST]]:
    """What a module imports of the package, name → path, and its own functions and classes."""
    path = Path(str(modules()[module].filepath))
    imports: dict[str, str] = {}
    definitions: dict[str, ast.AST] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE:
            imports |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            imports |= {alias.name: alias.name for alias in node.names if alias.name == PACKAGE}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            definitions[node.name] = node
    return imports, definitions


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    inner = _dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{inner}.{node.attr}" if isinstance(node, ast.Attribute) and inner else ""


def _public(path: str) -> str | None:
    """The path where it is defined, if that, or what it is an attribute of, is a public name."""
    while path and path not in places():
        parent, _, name = path.rpartition(".")
        if parent in modules() and name in (names := public_names(modules()[parent])):
            path = names[name] if names[name] != path else ""
        else:
            path = parent
    return path or None


# --- the page --------------------------------------------------------------------------------------------------------


def papers_page() -> str:
    """The page, in Markdown: a table for each paper, in the order of its sections."""
    parts = [HEAD]
    for letter, (heading, page, description) in PAPERS.items():
        entries = sorted((entry for entry in claims().values() if entry.id[0] == letter), key=_section)
        parts.append(f"## {heading}\n\n{description}\n")
        parts.append("| where | claim | statement | how it stands | public names |\n|---|---|---|---|---|")
        parts += [_row(entry, page) for entry in entries]
        parts.append("")
    return "\n".join(parts)


def _row(entry: ClaimFunction, page: str) -> str:
    anchor = entry.id.lower()
    if f'id="{anchor}"' not in (ROOT / "docs" / "theory" / page).read_text(encoding="utf-8"):
        anchor = anchor.rstrip("abcdefgh")  # a part of its number's entry
    links = [f"[`{places()[path][0]}`](../{places()[path][1]})" for path in used_names(entry)]
    cells = [where(entry), f"[{entry.id}]({page}#{anchor})", entry.statement, standing(entry), ", ".join(links) or "–"]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def where(entry: ClaimFunction) -> str:
    """The place in the paper, without the paper's name."""
    text = entry.source
    for long, short in SHORT.items():
        text = text.replace(long, short)
    return re.sub(r"^(?:reconstructed from )?Bal (?=§)", "", text)


def standing(entry: ClaimFunction) -> str:
    """How the statement stands in its source: its status, and whether it had to be corrected."""
    if entry.published is not None:
        return f"{entry.status}; {STANDINGS[entry.standing]}"
    return f"{entry.status}; made precise" if entry.corrected else f"{entry.status}; holds"


def _section(entry: ClaimFunction) -> tuple[Iterable[int], ...]:
    """By the first section that the place names; what names none stands last, as it is derived here."""
    numbers = re.search(r"§(\d+)(?:\.(\d+))?", where(entry)) if entry.id[0] in "SB" else None
    return (tuple(int(number or 0) for number in numbers.groups()) if numbers else (99,),)
