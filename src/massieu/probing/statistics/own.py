"""A statistic of the user's own: a function and its metadata. It is registered nowhere, but passed to each probe."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, overload

from massieu.errors import InputError
from massieu.foundation.arguments import choice, described, flag, number
from massieu.foundation.doors import input_door, sequence, text
from massieu.ops.moments import NAMES
from massieu.probing.statistics.code_digest import digest_of
from massieu.probing.statistics.registry import (
    ATTENTION,
    GROUPS,
    OWN_STEPS,
    OWN_WINDOWS,
    STATISTICS,
    caveat_of,
    smallest_of,
)
from massieu.probing.sums.random_heads import Scale
from massieu.storage.record import Statistic

Of = Literal["queries", "window", "step"]
"""The argument of a function: a `QueryReading`, a `HeadWindow`, or the tokens before and after a step of the stream."""
Function = Callable[..., object]
"""Its parameters are checked when it is made a statistic, and its result whenever it is called."""
_GROUPS: dict[Of, str] = {"queries": ATTENTION, "window": OWN_WINDOWS, "step": OWN_STEPS}
_PARAMETERS: dict[Of, int] = {"queries": 1, "window": 1, "step": 2}
_ARGUMENTS: dict[Of, str] = {
    "queries": "one argument, a QueryReading",
    "window": "one argument, a HeadWindow",
    "step": "two arguments, the tokens before and after a step",
}
COLUMNS = ("window", "position", "token_id", "token", "site", "layer", "head", "scope", "statistic", "value", "count")
"""Names of columns of the tables, which a statistic cannot have."""
PARTS = ("first_half", "second_half", "p_value", "q_value", "spread", "reinitialised", "minimum", "maximum")
"""Suffixes of a statistic's name in other rows of the tables, which a control cannot have as its name."""
_SCALES: tuple[Scale, ...] = ("share", "positive", "number")


@dataclass(frozen=True, eq=False)
class OwnStatistic:
    """A function with its metadata; `statistic` makes it. It can still be called as the function that it is.

    Attributes:
        of: the kind of argument that the function takes.
        metadata: name, title, formula and so on, as in the tables and on the page.
        control: the function that makes its control; None if it has no control of its own.
        moments: those of `massieu.ops.attention_moments` that it reads.
        needs_scores: it has no meaning where scores are not known apart from log-weights.
    """

    function: Function
    of: Of
    metadata: Statistic
    control: Function | None = None
    moments: tuple[str, ...] = ()
    needs_scores: bool = False

    def __call__(self, *arguments: Any) -> Any:
        """Call the function."""
        return self.function(*arguments)

    @property
    def name(self) -> str:
        """The statistic's name in the tables."""
        return self.metadata.name

    def digest(self) -> str:
        """Digest of its code and its control's, with the values that they take from around them, and of its metadata."""
        code = [function for function in (self.function, self.control) if function is not None]
        return digest_of(code, repr((self.metadata, self.of, self.moments, self.needs_scores)))


def _check_kind(name: str, value: object) -> object:
    return choice(name, value, *_GROUPS)


def _check_scale(name: str, value: object) -> object:
    return choice(name, value, *_SCALES)


def _check_control(name: str, value: Any) -> None:
    if value is None or (isinstance(value, str) and value == "reinitialised"):
        return
    if not inspect.isfunction(value) or not value.__name__.isidentifier():
        raise TypeError(
            f"{name} must be 'reinitialised', None, or a named function of what the statistic is given, got {described(value)}"
        )
    if value.__name__ in PARTS:
        raise ValueError(f"{value.__name__} is the name of another row of the tables; rename the {name}")


@overload
def statistic(function: Function, /) -> OwnStatistic: ...
@overload
def statistic(
    *,
    of: Of = "queries",
    name: str | None = None,
    title: str | None = None,
    question: str | None = None,
    formula: str = "",
    claim: str = "",
    paper: str = "",
    unit: str = "",
    caveat: str | None = None,
    control: Literal["reinitialised"] | Function | None = "reinitialised",
    scale: Scale = "number",
    signed: bool = False,
    smallest: float | None = None,
    depends_on_key_origin: bool = False,
    needs_scores: bool = False,
    moments: Iterable[str] = (),
) -> Callable[[Function], OwnStatistic]: ...
@input_door(
    of=_check_kind, scale=_check_scale, control=_check_control, smallest=partial(number, above=0), moments=sequence,
    name=text, title=text, question=text, formula=text, claim=text, paper=text, unit=text, caveat=text,
    signed=flag, depends_on_key_origin=flag, needs_scores=flag,
)  # fmt: skip
def statistic(
    function: Function | None = None,
    /,
    *,
    of: Of = "queries",
    name: str | None = None,
    title: str | None = None,
    question: str | None = None,
    formula: str = "",
    claim: str = "",
    paper: str = "",
    unit: str = "",
    caveat: str | None = None,
    control: Literal["reinitialised"] | Function | None = "reinitialised",
    scale: Scale = "number",
    signed: bool = False,
    smallest: float | None = None,
    depends_on_key_origin: bool = False,
    needs_scores: bool = False,
    moments: Iterable[str] = (),
) -> OwnStatistic | Callable[[Function], OwnStatistic]:
    """Make a statistic of a function, to be given to `massieu.probe`, `massieu.compare` or `massieu.Monitor`.

    A statistic of queries is given a `massieu.probing.QueryReading`, one attention call of the model, and returns a number for
    each query, (B, H, L); a pair of these and of where they are defined; or None where it has no meaning. NaN means that it is
    not defined at this query. A statistic of a window is given a `massieu.probing.HeadWindow`, one sampled window at one
    attention site, and returns for each head a sum and what it is divided by, each (H,). A statistic of a step is given the
    tokens of a sampled window before and after one step of the residual stream, each (T, D) in float64, and returns one
    number, or one a token.

    Args:
        function: for ``@massieu.statistic`` without brackets.
        of: the kind of argument that the function takes.
        name: in the tables; by default the function's name.
        title: on the page; by default the name with spaces.
        question: the question that it answers; by default the first paragraph of the function's docstring.
        formula, claim, paper: further entries of the page's methods.
        unit: of its numbers, such as "nats".
        caveat: what it does not say.
        control: what its numbers are compared with. "reinitialised": models of the same shape with random weights. A function:
            it takes the statistic's arguments and returns the same without the property in question, or None where that does
            not exist. None: the numbers are compared with nothing.
        scale: on which it is compared with random models: a "share" (between 0 and 1) by its logit, a "positive" number by its
            logarithm, a "number" as it is.
        signed: whether zero is the middle of its scale; the page draws it in two colours.
        smallest: the smallest difference from the control that is announced. By default 0.05 for a share or a number without a
            unit, 0.1 for a number with one, a tenth for a positive number.
        depends_on_key_origin: whether adding one vector to all keys of a head changes it, which leaves attention unchanged.
            Such a number is not compared with random models.
        needs_scores: whether it reads scores or log Z apart from log-weights; a few models do not let them be told apart.
        moments: those of `massieu.ops.attention_moments` that it reads besides log Z and entropy. An undeclared one costs a
            second pass over the scores, and a warning.

    Raises:
        InputError: the function does not take the arguments of its kind, the name is one of the package's own, or an argument
            is none of the above.

    Example:
        How much attention goes to the ten nearest tokens?

        >>> import massieu
        >>> @massieu.statistic(formula="Σ p_j, |i − j| ≤ 10", scale="share")
        ... def nearby(reading):
        ...     return reading.weight_where(lambda query, key: (query - key).abs() <= 10)
        >>> nearby.name, nearby.metadata.control
        ('nearby', 'reinitialised')
    """

    moment_names = tuple(moments)
    _check_moments(of, moment_names)

    def make(function: Function) -> OwnStatistic:
        statistic_name = _checked_name(name, function)
        _check_parameters(statistic_name, function, of)
        metadata = Statistic(
            name=statistic_name,
            title=title or statistic_name.replace("_", " ").capitalize(),
            formula=formula,
            claim=claim,
            paper=paper,
            group=_GROUPS[of],
            question=question or inspect.cleandoc(function.__doc__ or "").partition("\n\n")[0].replace("\n", " "),
            caveat=caveat or caveat_of(depends_on_key_origin),
            unit=unit,
            scope="layer" if of == "step" else "head",
            headline=not depends_on_key_origin,
            gauge_dependent=depends_on_key_origin,
            signed=signed,
            control=control.__name__ if callable(control) else control,
            cost="a function of the user's own",
            scale=scale,
            smallest=smallest or smallest_of(unit, scale),
            sampled=of != "queries",
        )
        own_control = control if callable(control) else None
        return OwnStatistic(function, of, metadata, own_control, moment_names, needs_scores)

    return make if function is None else make(_checked_function(function))


def as_own(value: object) -> OwnStatistic:
    """A statistic, or a function made into one with the default metadata.

    Raises:
        InputError: the value is neither.
    """
    if isinstance(value, OwnStatistic):
        return value
    return statistic(_checked_function(value))


def _checked_function(value: object) -> Function:
    if inspect.isfunction(value) or inspect.ismethod(value):
        return value
    raise InputError(
        f"a statistic is a name, a function or what massieu.statistic makes of one, got {type(value).__name__} {value!r}"
    )


def _checked_name(name: str | None, function: Function) -> str:
    """The statistic's name; by default the function's."""
    name = name or function.__name__
    if not name.isidentifier():
        raise InputError(f"a statistic's name must be a valid name of a function, got {name!r}; give one by name=")
    if name in STATISTICS or name in GROUPS:
        raise InputError(f"{name} is the name of one of the package's own statistics; give another one by name=")
    if name in COLUMNS:
        raise InputError(f"{name} is the name of a column of the tables; give the statistic another one by name=")
    return name


def _check_moments(of: Of, moments: tuple[str, ...]) -> None:
    if moments and of != "queries":
        raise InputError(f"moments are for statistics of queries, and this one is of a {of}")
    if unknown := [moment for moment in moments if moment not in NAMES]:
        raise InputError(f"{unknown[0]!r} is not a moment; the moments are {', '.join(NAMES)}")


def _check_parameters(name: str, function: Function, of: Of) -> None:
    """Check that the function can be called with the arguments of its kind."""
    try:
        inspect.signature(function).bind(*[None] * _PARAMETERS[of])
    except TypeError:
        raise InputError(
            f"statistic {name}{inspect.signature(function)} is called with {_ARGUMENTS[of]}; of= says with what"
        ) from None
