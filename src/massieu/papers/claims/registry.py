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
        signature = inspect.signature(self.body)
        return {name: parameter.default for name, parameter in signature.parameters.items()}

    @property
    def code(self) -> tuple[Path, int]:
        """The file of the function that checks the claim, and the line where the function begins."""
        code = self.body.__code__
        return Path(code.co_filename), code.co_firstlineno

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
        return Claim(
            id=self.id,
            title=self.title,
            statement=self.statement,
            source=self.source,
            status=self.status,
            published=self.published,
            standing=self.standing,
            corrected=self.corrected,
            checks=checks,
            parameters=dict(parameters),
            seconds=seconds,
        )

    def read(self, settings: Mapping[str, Setting | str]) -> dict[str, Setting]:
        """The claim's parameters, with these settings in place of the defaults.

        Raises:
            InputError: there is no such parameter, or its value cannot be read.
        """
        values = {name: self._read(name, value) for name, value in settings.items()}
        return self.parameters | values

    def _read(self, name: str, value: Setting | str) -> Setting:
        """A setting as a whole number or a float, whichever the parameter is."""
        defaults = self.parameters
        if name not in defaults:
            listed = ", ".join(f"{name}={default}" for name, default in defaults.items()) or "none"
            raise InputError(f"claim {self.id} has no parameter {name!r}; it has {listed}")
        if isinstance(defaults[name], int):
            number = _whole_number(value)
            least = 1
            if name == "seed":
                least = 0
            if number is None or number < least:
                raise InputError(f"{name} of claim {self.id} must be a whole number, at least {least}, got {value!r}")
            return number
        number = _finite_number(value)
        if number is None:
            raise InputError(f"{name} of claim {self.id} must be a finite number, got {value!r}")
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
        published: What the source says, if that is not true or can be read as something that is not. The function then
            also checks the false form, or the false reading, in rows made with `as_published`.
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
        if id in _REGISTERED:
            earlier = _REGISTERED[id].body
            raise ValueError(f"claim {id} is registered twice: in {earlier.__module__} and {body.__module__}")
        _check_parameters(id, body)
        entry = ClaimFunction(id, title, statement, source, status, published, standing, corrected, body)
        _REGISTERED[id] = entry
        return entry

    return register


def _check_parameters(id: str, body: Body) -> None:
    """Raise unless every parameter of a claim is an int or float with a default."""
    for parameter in inspect.signature(body, eval_str=True).parameters.values():
        if parameter.annotation not in (int, float) or type(parameter.default) is not parameter.annotation:
            raise TypeError(f"claim {id}: parameter {parameter.name} needs an int or float as annotation and default")


def claims() -> dict[str, ClaimFunction]:
    """Every claim by its number, in reading order: by family, then by number."""
    _load()
    return {id: _REGISTERED[id] for id in sorted(_REGISTERED, key=_order)}


def find(id: str) -> ClaimFunction:
    """The claim of this number, in upper or lower case.

    Raises:
        InputError: there is none; the message lists those near it.
    """
    lower_case = id.strip().lower()
    by_lower_case = {entry.id.lower(): entry for entry in claims().values()}
    if lower_case in by_lower_case:
        return by_lower_case[lower_case]
    matches = get_close_matches(lower_case, by_lower_case, n=5, cutoff=0.5)
    if not matches:
        raise InputError(f"there is no claim {id!r}; known are {', '.join(claims())}")
    near_ids = sorted((by_lower_case[name].id for name in matches), key=_order)
    raise InputError(f"there is no claim {id!r}; near it are {', '.join(near_ids)}")


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
    """Import every module of the packages beside this file: each registers its claims when it is imported."""
    folder = str(Path(__file__).parent)
    for package in pkgutil.iter_modules([folder], f"{__package__}."):
        if not package.ispkg:
            continue
        path = importlib.import_module(package.name).__path__
        for module in pkgutil.walk_packages(path, f"{package.name}."):
            importlib.import_module(module.name)


def _order(id: str) -> tuple[int, int, str]:
    """Sort key of a claim's place in reading order."""
    parts = re.fullmatch(rf"([{_FAMILIES}])([1-9]\d*)([a-z]?)", id)
    if parts is None:
        raise ValueError(
            f"a claim's number is one of {', '.join(_FAMILIES)} and a number, such as S7 or X3b; got {id!r}"
        )
    family, number, suffix = parts.groups()
    return _FAMILIES.index(family), int(number), suffix


def _finite_number(value: Setting | str) -> float | None:
    """The value as a float; None if it is no finite number."""
    try:
        number = float(value)
    except (ValueError, OverflowError):  # no number, or larger than any float
        return None
    if not math.isfinite(number):
        return None
    return number


def _whole_number(value: Setting | str) -> int | None:
    """The value as an int, "2e5" included; None if it is no whole number."""
    number = _finite_number(value)
    if number is None:
        return None
    if re.fullmatch(r"[+-]?[\d_]+", str(value)):
        # Digits are read exactly: a float has only 53 bits.
        return int(value)
    if number != int(number):
        return None
    return int(number)
