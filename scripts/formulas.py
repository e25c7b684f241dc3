"""Formulas of the site: written once, in LaTeX, and shown as MathML without a script and without a network.

In Markdown a formula in a line stands between ``$` `` and `` `$``, a displayed one in a fence called `math`. GitHub shows
both. The MathML carries its LaTeX as an annotation, which `docs/assets/formulas.js` copies. `mkdocs.yml` names this module as
an extension of Python's Markdown.
"""

import re
from typing import Any
from xml.etree.ElementTree import Element

from markdown import Extension, Markdown
from markdown.inlinepatterns import InlineProcessor
from math_core import LatexToMathML

IN_A_LINE = re.compile(r"\$`([^`\n]+)`\$")
DISPLAYED = re.compile(r"^```math\n(.*?)\n```$", re.DOTALL | re.MULTILINE)

_SIGNS_BEHIND = "([).,;:?!]*)"
"""Do not begin a line."""

_ABOVE_CODE = 195
"""Priority: code spans have 190."""

_MOST_SIGNS = 30
"""A formula in a line with more signs may be wider than a telephone, and scrolls; browsers do not break MathML."""

_CONVERTER = LatexToMathML(annotation=True, fancy_error=False)


def mathml(latex: str, *, displayed: bool = False) -> str:
    """A formula as MathML, annotated with its LaTeX. The site's search leaves the LaTeX out.

    Raises:
        LatexError: If the converter does not know a command; the build of the site then fails.
    """
    converted = _CONVERTER.convert_with_local_state(latex, displaystyle=displayed)
    return converted.replace("<annotation ", "<annotation data-search-exclude ")


def display(latex: str, *_: Any, **__: Any) -> str:
    """A fence called `math`, as pymdownx.superfences asks for it."""
    return f'<div class="formula">{mathml(latex, displayed=True)}</div>'


def formulas(markdown: str) -> list[str]:
    """The LaTeX of all formulas of a page: first those in a line, then the displayed ones."""
    return IN_A_LINE.findall(markdown) + DISPLAYED.findall(markdown)


class _InALine(InlineProcessor):
    """What stands between dollars and backticks, and the signs that close a sentence or a bracket behind it."""

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[Element | str, int, int]:  # noqa: N802  # pyright: ignore
        """A placeholder, in whose place Markdown puts the MathML at the end."""
        formula = mathml(m[1])
        shown = re.sub(r"<annotation.*</annotation>|<[^>]*>", "", formula)
        if len(shown) > _MOST_SIGNS:
            placed = f'<span class="long formula">{formula}</span>{m[2]}'
        else:
            placed = f'<span class="formula">{formula}{m[2]}</span>'
        return self.md.htmlStash.store(placed), m.start(), m.end()


class Formulas(Extension):
    """Reads formulas in a line before code spans are read."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        """Register the pattern."""
        md.inlinePatterns.register(_InALine(IN_A_LINE.pattern + _SIGNS_BEHIND, md), "formula", _ABOVE_CODE)


def makeExtension(**settings: Any) -> Formulas:  # noqa: N802
    """What Python's Markdown calls to load this module."""
    return Formulas(**settings)
