"""Tutorials as notebooks: the code of the pages, formulas as notebooks write them, and the form that Jupyter reads."""

import json
import re

import pytest
from scripts.notebooks import notebook, notebook_json, tutorials
from scripts.tutorials import BLOCK

PAGE = """# A title

Let $`a_1 = \\frac{1}{2}`$; see [the page](../how-to/ops.md#x) and [a site](https://example.org).

```math
\\log Z
```

```python
x = 1


print(x)
```

```console
$ massieu --version
massieu 0.1.0
$ ls
```

The end: ```python is no block.
"""


def test_a_page_becomes_cells() -> None:
    made = notebook(PAGE)
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in made["cells"]]
    assert cells == [
        (
            "markdown",
            "# A title\n\nLet $a_1 = \\frac{1}{2}$; see the page and [a site](https://example.org).\n\n$$\n\\log Z\n$$",
        ),
        ("code", "x = 1\n\n\nprint(x)"),
        ("code", "!massieu --version\n!ls"),
        ("markdown", "The end: ```python is no block."),
    ]


@pytest.mark.parametrize("path", tutorials(), ids=lambda path: path.stem)
def test_the_code_is_the_pages_own(path) -> None:
    page = path.read_text(encoding="utf-8")
    made = json.loads(notebook_json(page))
    assert (made["nbformat"], made["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in made["cells"]}) == len(made["cells"])
    code = ["".join(cell["source"]) for cell in made["cells"] if cell["cell_type"] == "code"]
    assert len(code) == len(BLOCK.findall(page)) > 0
    python = [source for source in code if not source.startswith("!")]
    assert python == [source.strip("\n") for kind, source in BLOCK.findall(page) if kind == "python"]
    for source in python:
        compile(source, str(path), "exec")
    prose = "".join("".join(cell["source"]) for cell in made["cells"] if cell["cell_type"] == "markdown")
    assert not re.search(r"\$`|```(python|console|math)|\]\((?!https?:)", prose)
    assert all(("outputs" in cell) == (cell["cell_type"] == "code") for cell in made["cells"])
