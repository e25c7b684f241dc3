"""What some tests need beside Python: a C++ compiler, a browser. Where it is, and what to install where it is not."""

import functools
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

_APPLICATIONS = Path("/Applications")
_BROWSERS = {
    "chrome": (
        "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome",
        _APPLICATIONS / "Google Chrome.app/Contents/MacOS/Google Chrome",
        _APPLICATIONS / "Chromium.app/Contents/MacOS/Chromium",
    ),
    "edge": (
        "microsoft-edge", "microsoft-edge-stable", "msedge",
        _APPLICATIONS / "Microsoft Edge.app/Contents/MacOS/Microsoft Edge",
    ),
}  # fmt: skip
_DRIVERS = {
    "chrome": ("chromedriver", "/usr/lib/chromium/chromedriver", "/usr/lib/chromium-browser/chromedriver"),
    "edge": ("msedgedriver",),
}


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
        for kind, names in _BROWSERS.items()
        if (program := _first(names))
    ]
    return next((each for each in found if each.driver), found[0] if found else None)


@functools.cache
def compiler() -> str | None:
    """The C++ compiler that `torch.compile` would take."""
    return _first((os.environ.get("CXX", ""), "g++", "clang++"))


INSTALL = {
    "compiler": "a C++ compiler (Debian: apt-get install g++; macOS: xcode-select --install)",
    "browser": "Chromium, Chrome or Edge with its driver (Debian: apt-get install chromium chromium-driver)",
}
"""What to install for each."""

FOUND = {"compiler": compiler, "browser": browser}

REASON = "needs "
"""How the reason of a skipped test begins."""


def leave_out(tool: str) -> NoReturn:
    """Skip the test that runs, and say what it needs; where CI runs, it fails: nothing is skipped there."""
    reason = REASON + INSTALL[tool]
    if os.environ.get("CI", "").lower() in ("1", "true", "yes"):
        pytest.fail(f"CI runs every test, and this one {reason}", pytrace=False)
    pytest.skip(reason)


def _first(names: tuple[str | Path, ...]) -> str | None:
    return next((path for name in names if name and (path := shutil.which(name))), None)
