"""Tutorials are run when the site is built: what a block prints stands below it, and the pictures that it draws.

A page of docs/tutorials is run as one script, in a process of its own: ``python scripts/tutorials.py < PAGE`` prints it
with its output. A block that fails ends the build.
"""

import base64
import contextlib
import io
import re
import subprocess
import sys

BLOCK = re.compile(r"```python\n(.*?)```\n", re.DOTALL)


def executed(page: str) -> str:
    """A page's Markdown, with the output of its blocks below them.

    Raises:
        RuntimeError: a block fails.
    """
    done = subprocess.run([sys.executable, __file__], input=page, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{page.splitlines()[0]}: a block fails\n{done.stderr[-3000:]}")
    return done.stdout


def run(markdown: str) -> str:
    """The same, in this process."""
    import matplotlib

    matplotlib.use("Agg")
    known: dict[str, object] = {"__name__": "__main__"}
    return BLOCK.sub(lambda block: block[0] + _output(block[1], known), markdown)


def _output(source: str, known: dict[str, object]) -> str:
    from matplotlib import pyplot

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(source, "tutorial", "exec"), known)
    shown = f"\n```text\n{said.getvalue()}```\n" if said.getvalue() else ""
    for number in pyplot.get_fignums():
        picture = io.BytesIO()
        pyplot.figure(number).savefig(picture, format="png", dpi=110, bbox_inches="tight")
        pyplot.close(number)
        shown += f"\n![what the block draws](data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()})\n"
    return shown


if __name__ == "__main__":
    print(run(sys.stdin.read()))
