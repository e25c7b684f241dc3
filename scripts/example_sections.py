"""An extension of griffe: what our docstrings write otherwise than it, or Markdown, reads it."""

import re
from typing import Any

import griffe

_STAR = re.compile(r"(?<=[( ])\*(?=[a-z]+[,)])|(?<=[A-ZΩ])\*(?=\()")
"""The star of a shape, `(*batch, d)`, or of a conjugate, `A*(mu)`: a pair of them is no emphasis."""
_CODE = re.compile(r"(`[^`]+`|^ *(?:>>>|\.\.\.) .*$)", re.MULTILINE)


def as_markdown(docstring: str) -> str:
    """The section `Example:` under the name that griffe knows, and stars that Markdown would take for emphasis escaped."""
    docstring = re.sub(r"^Example:$", "Examples:", docstring, flags=re.MULTILINE)
    parts = _CODE.split(docstring)  # every second one is code
    return "".join(part if place % 2 else _STAR.sub(r"\\*", part) for place, part in enumerate(parts))


class ExampleSections(griffe.Extension):
    """Gives griffe every docstring `as_markdown`."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object that was read."""
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
