"""The claims by their numbers: the decorator that registers one, and the settings a reader may change."""

import importlib
import inspect
import math
import pkgutil
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from massieu.errors import InputError
from massieu.papers.claims.claim import Check, Claim, Standing, Status

Setting = int | float
Body = Callable[..., Iterable[Check]]

_FAMILIES = "SBZXN"
"""In reading order: Shim, Bal, Zhang, bridges between them, beyond them."""

_REGISTERED: dict[str, "ClaimFunction"] = {}


@dataclass(frozen=True)
class ClaimFunction:
    """A registered claim: called with its parameters as keywords, it measures and returns a `Claim`."""

    id: str
    title: str
    statement: str
    source: str
    status: Status
    published: str | None
    standing: Standing
    corrected: str | None
    body: Body

    @property
    def parameters(self) -> dict[str, Setting]:
        """The parameters with their defaults; an int is a whole number, at least 1 (a seed: at least 0)."""
        return {name: entry.default for name, entry in inspect.signature(self.body).parameters.items()}

    @property
    def code(self) -> tuple[Path, int]:
        """The file of the function that checks it, and the line where the function begins."""
        return Path(self.body.__code__.co_filename), self.body.__code__.co_firstlineno

    def __call__(self, **settings: Setting | str) -> Claim:
        """Check the claim.

        Raises:
            InputError: there is no such parameter, or its value cannot be read.
        """
        parameters = self.read(settings)
        started = time.perf_counter()
        checks = tuple(self.body(**parameters))
        seconds = time.perf_counter() - started
        forms = {check.form for check in checks}
        if "corrected" not in forms:
            raise TypeError(f"claim {self.id} checks nothing that is true")
        if ("published" in forms) != (self.published is not None):
            raise TypeError(f"claim {self.id}: what is published and a check of it go together")
        return self._result(checks, parameters, seconds)

    def not_checked(self, reason: str, parameters: Mapping[str, Setting], seconds: float) -> Claim:
        """The claim without a number, and why."""
        return replace(self._result((), parameters, seconds), reason=reason)

    def _result(self, checks: tuple[Check, ...], parameters: Mapping[str, Setting], seconds: float) -> Claim:
        stated = (self.id, self.title, self.statement, self.source, self.status)
        return Claim(*stated, self.published, self.standing, self.corrected, checks, dict(parameters), seconds)

    def read(self, settings: Mapping[str, Setting | str]) -> dict[str, Setting]:
        """The claim's parameters with these in place of the defaults.

        Raises:
            InputError: there is no such parameter, or its value cannot be read.
        """
        return self.parameters | {name: self._read(name, value) for name, value in settings.items()}

    def _read(self, name: str, value: Setting | str) -> Setting:
        """A setting as a number of the parameter's kind."""
        known = self.parameters
        if name not in known:
            listed = ", ".join(f"{name}={default}" for name, default in known.items())
            raise InputError(
                f"claim {self.id} has no parameter {name!r}; it has {listed}"
                if known
                else f"claim {self.id} has no parameter {name!r}; it has none"
            )
        whole = isinstance(known[name], int)
        least = 0 if name == "seed" else 1 if whole else -math.inf
        number = _number(value, whole)
        if number is None or number < least:
            needed = f"a whole number, at least {least}" if whole else "a finite number"
            raise InputError(f"{name} of claim {self.id} must be {needed}, got {value!r}")
        return number


def claim(
    id: str,
    *,
    title: str,
    statement: str,
    source: str,
    status: Status,
    published: str | None = None,
    standing: Standing = "asserted",
    corrected: str | None = None,
) -> Callable[[Body], ClaimFunction]:
    """Register a function as a claim.

    The function yields checks. Its parameters are keywords with a default each, annotated int or float: a reader may
    change them. One named ``seed`` starts the claim's own `torch.Generator`; no claim touches the global one.

    Args:
        id: Family and number, such as S7 or X3b.
        title: What it is about, in a few words.
        statement: What is true, in a few sentences.
        source: Paper with section or equation, or where it is derived.
        status: Whether the source is quoted, reconstructed, known by its abstract only, or derived.
        published: What the source says, where that is not what is true or may be read so: the function then checks the
            form, or the reading, that is false too, in rows made with `as_published`.
        standing: Only what the source asserts in its own words and meaning counts as wrong. What is a matter of reading,
            hedged, or in another text of the author is "ambiguous": `published` says which reading does what. What the
            source assumes is an "assumption".
        corrected: What was corrected or made precise.

    Raises:
        ValueError: the number is malformed or taken; something is published wrong and nothing is corrected; or a source
            that was not read is said to assert something.
        TypeError: a parameter has no default, or is no int or float.
    """
    _order(id)
    if published is not None and corrected is None:
        raise ValueError(f"claim {id}: where the published form is wrong, say what is corrected")
    if published is not None and standing == "asserted" and status in ("reconstructed", "abstract only"):
        raise ValueError(f"claim {id} is {status}: a source that was not read asserts nothing")

    def register(body: Body) -> ClaimFunction:
        if (taken := _REGISTERED.get(id)) is not None:
            raise ValueError(f"claim {id} is registered twice: in {taken.body.__module__} and {body.__module__}")
        for parameter in inspect.signature(body, eval_str=True).parameters.values():
            if parameter.annotation not in (int, float) or type(parameter.default) is not parameter.annotation:
                raise TypeError(
                    f"claim {id}: parameter {parameter.name} needs an int or float as annotation and default"
                )
        _REGISTERED[id] = ClaimFunction(id, title, statement, source, status, published, standing, corrected, body)
        return _REGISTERED[id]

    return register


def claims() -> dict[str, ClaimFunction]:
    """Every claim by its number, in reading order: by family, then by number."""
    _load()
    return {id: _REGISTERED[id] for id in sorted(_REGISTERED, key=_order)}


def find(id: str) -> ClaimFunction:
    """The claim of this number, in upper or lower case.

    Raises:
        InputError: there is none; the message lists those near it.
    """
    known = {entry.id.lower(): entry for entry in claims().values()}
    if (found := known.get(id.strip().lower())) is not None:
        return found
    near = [known[name].id for name in get_close_matches(id.strip().lower(), known, n=5, cutoff=0.5)]
    listed = f"near it are {', '.join(sorted(near, key=_order))}" if near else f"known are {', '.join(claims())}"
    raise InputError(f"there is no claim {id!r}; {listed}")


def read_settings(assignments: Iterable[str]) -> dict[str, str]:
    """``["N=1024", "d=3"]`` as a mapping.

    Raises:
        InputError: one of them is not of the form NAME=VALUE, or a name comes twice.
    """
    settings: dict[str, str] = {}
    for assignment in assignments:
        name, equals, value = (part.strip() for part in assignment.partition("="))
        if not (name and equals and value):
            raise InputError(f"a setting is NAME=VALUE, such as N=1024; got {assignment!r}")
        if name in settings:
            raise InputError(f"{name} is set twice: to {settings[name]} and to {value}")
        settings[name] = value
    return settings


@cache
def _load() -> None:
    """Import every module of the packages beside this file, which registers their claims."""
    for package in pkgutil.iter_modules([str(Path(__file__).parent)], f"{__package__}."):
        if package.ispkg:
            path = importlib.import_module(package.name).__path__
            for module in pkgutil.walk_packages(path, f"{package.name}."):
                importlib.import_module(module.name)


def _order(id: str) -> tuple[int, int, str]:
    """Where the claim stands in reading order."""
    parts = re.fullmatch(rf"([{_FAMILIES}])([1-9]\d*)([a-z]?)", id)
    if parts is None:
        raise ValueError(
            f"a claim's number is one of {', '.join(_FAMILIES)} and a number, such as S7 or X3b; got {id!r}"
        )
    family, number, suffix = parts.groups()
    return _FAMILIES.index(family), int(number), suffix


def _number(value: Setting | str, whole: bool) -> Setting | None:
    """The value as a finite number, whole if need be ("2e5" is); None if it is none."""
    try:
        number = int(value) if whole and re.fullmatch(r"[+-]?[\d_]+", str(value)) else float(value)
        if not math.isfinite(number) or (whole and number != int(number)):
            return None
    except (ValueError, OverflowError):  # no number, or larger than any float
        return None
    return int(number) if whole else number
