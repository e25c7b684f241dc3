"""The first hour of four readers, typed and timed: `python scripts/first_hours.py` in a clean checkout.

Each section of docs/start/first_hour.md is run in a fresh clone, block after block: a block of Python is the file that the line
before it names, a block of sh is typed into one shell. The minutes of the sections are then written into the page. A command
that fails ends the run with what it said.
"""

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "start" / "first_hour.md"
SET_UP = "Set-up"
BLOCK = re.compile(r"```(sh|python)\n(.*?)```", re.DOTALL)
MINUTES = re.compile(r"(<!-- the minutes, .*? -->\n).*?(<!-- end of the minutes -->)", re.DOTALL)


class Section(NamedTuple):
    """A heading of the page, the files that its reader writes, and what is typed."""

    title: str
    files: dict[str, str]
    typed: str


def sections(page: str) -> list[Section]:
    """The sections of the page that have something to type, the set-up first.

    Raises:
        ValueError: a block of Python is no file that the text before it names.
    """
    found = []
    for part in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        title, _, text = part.partition("\n")
        files, typed, before = {}, [], 0
        for block in BLOCK.finditer(text):
            kind, content = block.groups()
            if kind == "sh":
                typed.append(content)
            elif named := re.findall(r"`(\w+\.py)`", text[before : block.start()]):
                files[named[-1]] = content
            else:
                raise ValueError(f"{title}: the text before a block of Python must name its file, such as `train.py`")
            before = block.end()
        if typed:
            found.append(Section(title, files, "".join(typed)))
    return found


def typed(section: Section, folder: Path, environment: dict[str, str] | None = None) -> float:
    """Write the section's files and type its commands in a folder; returns the seconds.

    Raises:
        RuntimeError: a command fails.
    """
    for name, content in section.files.items():
        (folder / name).write_text(content, encoding="utf-8")
    started = time.perf_counter()
    shell = ["bash", "-e", "-o", "pipefail", "-c", section.typed]
    done = subprocess.run(shell, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"{section.title}: exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        )
    return time.perf_counter() - started


def timed(page: str, folder: Path, wanted: Iterable[str], say: Callable[[str], None] = print) -> dict[str, float]:
    """Minutes of each section in a clone: the set-up once, then every wanted reader."""
    set_up, *readers = sections(page)
    if set_up.title != SET_UP:
        raise ValueError(f"the page begins with {set_up.title!r}, not with {SET_UP!r}")
    chosen = [reader for reader in readers if any(word.lower() in reader.title.lower() for word in wanted)]
    active = {**os.environ, "PATH": f"{folder / '.venv' / 'bin'}:{os.environ['PATH']}"}
    minutes = {}
    for section in (set_up, *chosen):
        say(f"{section.title} …")
        minutes[section.title] = typed(section, folder, None if section is set_up else active) / 60
        say(f"  {minutes[section.title]:.1f} minutes")
    return minutes


def table(minutes: dict[str, float]) -> str:
    """Markdown: minutes by reader, and on what machine."""
    rows = [
        f"| {title} | {value:.1f} |" if value >= 1 else f"| {title} | {value:.2f} |" for title, value in minutes.items()
    ]
    machine = f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}"
    return "\n".join(
        ["", "| section | minutes |", "|---|---|", *rows, "", f"{machine}, {datetime.now(UTC):%Y-%m-%d}.", ""]
    )


def main(arguments: list[str]) -> int:
    """Clone, type, time, and write the minutes into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("readers", nargs="*", default=[""], help="words of the titles to run; by default all")
    parser.add_argument("--into", type=Path, help="clone into this folder and leave it there")
    chosen = parser.parse_args(arguments)
    page = PAGE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.into or Path(temporary) / "massieu"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
        minutes = timed(page, folder, chosen.readers)
    written, count = MINUTES.subn(lambda found: found[1] + table(minutes) + "\n" + found[2], page)
    if count != 1:
        raise ValueError(f"{PAGE} has no place for the minutes")
    if chosen.readers == [""]:
        PAGE.write_text(written, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
