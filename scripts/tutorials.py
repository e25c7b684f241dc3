"""Tutorials are run when the site is built: what a block prints stands below it, and the pictures that it draws.

A page of docs/tutorials is run as one script, in a process and an empty folder of its own: ``python scripts/tutorials.py
< PAGE`` prints it with its output. Blocks of `python` are executed, and so are the lines of a `console` block that begin
with a dollar. A block that fails ends the build.
"""

import base64
import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

BLOCK = re.compile(r"```(python|console)\n(.*?)```\n", re.DOTALL)
COMMAND = re.compile(r"^\$ (.*)$", re.MULTILINE)


def executed(page: str) -> str:
    """A page's Markdown, with the output of its blocks below them.

    Raises:
        RuntimeError: a block fails.
    """
    with TemporaryDirectory() as folder:
        asked = [sys.executable, str(Path(__file__).resolve())]
        done = subprocess.run(asked, input=page, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        raise RuntimeError(f"{page.splitlines()[0]}: a block fails\n{done.stderr[-3000:]}")
    return done.stdout


def run(markdown: str) -> str:
    """The same, in this process."""
    import matplotlib

    matplotlib.use("Agg")
    known: dict[str, object] = {"__name__": "__main__"}
    return BLOCK.sub(
        lambda block: block[0] + (_typed(block[2]) if block[1] == "console" else _output(block[2], known)), markdown
    )


def _typed(source: str) -> str:
    """What the commands print, where this Python's own commands come first."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    commands = "\n".join(COMMAND.findall(source))
    done = subprocess.run(
        ["bash", "-e", "-c", commands],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env=os.environ | {"PATH": path},
    )
    if done.returncode:
        raise RuntimeError(f"{commands}\n{done.stdout}")
    return _as_text(done.stdout)


def _as_text(said: str) -> str:
    return f"\n```text\n{said.rstrip()}\n```\n" if said.strip() else ""


def _output(source: str, known: dict[str, object]) -> str:
    from matplotlib import pyplot

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(source, "tutorial", "exec"), known)
    shown = _as_text(said.getvalue())
    for number in pyplot.get_fignums():
        picture = io.BytesIO()
        pyplot.figure(number).savefig(picture, format="png", dpi=110, bbox_inches="tight")
        pyplot.close(number)
        shown += f"\n![what the block draws](data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()})\n"
    return shown


if __name__ == "__main__":
    print(run(sys.stdin.read()))
