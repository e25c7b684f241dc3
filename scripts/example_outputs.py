"""The numbers and pictures of the examples that the documentation shows, from one stored run of each.

Runs examples/NAME.py as a reader does, on one thread. What it prints goes to examples/results/NAME.txt, below the command and
the versions; its picture to docs/images/NAME.png, with a thumbnail in docs/images/small. Each is stored when it has ended: a
run that was broken off goes on where it was. `tests/test_example_outputs.py` compares the pages with what is stored.

Run: python -m scripts.example_outputs [NAME ...]. Without names: the examples that have no stored output.
"""

import argparse
import datetime
import os
import platform
import resource
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parent.parent
EXAMPLES, RESULTS, IMAGES = ROOT / "examples", ROOT / "examples" / "results", ROOT / "docs" / "images"
THUMBNAIL = (220, 130)


def names() -> list[str]:
    """The examples that draw a picture: the others have no numbers that the documentation shows."""
    return sorted(path.stem for path in EXAMPLES.glob("*.py") if "--picture" in path.read_text(encoding="utf-8"))


def printed(name: str) -> str:
    """What an example printed in its stored run."""
    return (RESULTS / f"{name}.txt").read_text(encoding="utf-8").split("\n\n", 1)[1]


def run(name: str) -> None:
    """One example: its output and its picture, stored once both are there."""
    picture = IMAGES / f"{name}.png"
    command = ["python", f"examples/{name}.py", "--picture", str(picture.relative_to(ROOT))]
    before = _processor_seconds()
    done = subprocess.run(
        [sys.executable, *command[1:]],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    header = (
        f"$ OMP_NUM_THREADS=1 {' '.join(command)}\n"
        f"massieu {version('massieu')}, torch {version('torch')}, Python {platform.python_version()}, {_processor()}; "
        f"{_processor_seconds() - before:.0f} s of processor time; {datetime.date.today()}\n"
    )
    shrink(picture)
    thumbnail(picture)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.txt").write_text(f"{header}\n{done.stdout}", encoding="utf-8")


def shrink(picture: Path) -> None:
    """A picture of 256 colours in place of millions, which takes a third of the bytes."""
    Image.open(picture).convert("RGB").quantize(256).save(picture, optimize=True)


def thumbnail(picture: Path) -> None:
    """A small copy in the folder `small` beside the picture."""
    image = Image.open(picture).convert("RGB")
    image.thumbnail(THUMBNAIL, Image.Resampling.LANCZOS)
    small = picture.parent / "small" / picture.name
    small.parent.mkdir(exist_ok=True)
    image.quantize(64).save(small, optimize=True)


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*names(), []], metavar="NAME")
    chosen = parser.parse_args().names or [name for name in names() if not (RESULTS / f"{name}.txt").exists()]
    for number, name in enumerate(chosen, 1):
        print(f"{number} of {len(chosen)}: {name}", flush=True)
        run(name)


if __name__ == "__main__":
    main()
