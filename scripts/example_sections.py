"""An extension of griffe: our docstrings say `Example:` where it knows `Examples:`."""

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Makes the section `Example:` one of code and output."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Read the section under the name that griffe knows."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
