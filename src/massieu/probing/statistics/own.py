"""A statistic of the user's own: a function, and what is said of it. Nothing is registered anywhere: a probe is given it."""

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
"""What a function is called with: a `QueryReading`, a `HeadWindow`, or the tokens before and after a step of the stream."""
Function = Callable[..., object]
"""What it takes is checked when it is made a statistic, and what it returns whenever it is called."""
_GROUPS: dict[Of, str] = {"queries": ATTENTION, "window": OWN_WINDOWS, "step": OWN_STEPS}
_PARAMETERS: dict[Of, int] = {"queries": 1, "window": 1, "step": 2}
_GIVEN: dict[Of, str] = {
    "queries": "one argument, a QueryReading",
    "window": "one argument, a HeadWindow",
    "step": "two arguments, the tokens before and after a step",
}
COLUMNS = ("window", "position", "token_id", "token", "site", "layer", "head", "scope", "statistic", "value", "count")
"""Names that the tables have for something else."""
PARTS = ("first_half", "second_half", "p_value", "q_value", "spread", "reinitialised", "minimum", "maximum")
"""What stands behind a statistic's name in other rows of the tables."""
_SCALES: tuple[Scale, ...] = ("share", "positive", "number")


@dataclass(frozen=True, eq=False)
class OwnStatistic:
    """A function with what is said of it; `statistic` makes it. It may still be called as the function that it is.

    Attributes:
        of: what the function is given.
        said: as the tables and the page have it.
        control: its own control, where that is a function.
        moments: those of `massieu.ops.attention_moments` that it reads.
        needs_scores: it has no meaning where scores are not known apart from log-weights.
    """

    function: Function
    of: Of
    said: Statistic
    control: Function | None = None
    moments: tuple[str, ...] = ()
    needs_scores: bool = False

    def __call__(self, *given: Any) -> Any:
        """What the function gives."""
        return self.function(*given)

    @property
    def name(self) -> str:
        """By which the statistic is found in the tables."""
        return self.said.name

    def digest(self) -> str:
        """Of its code and its control's, with what they take from around them, and of all that is said of it."""
        code = [function for function in (self.function, self.control) if function is not None]
        return digest_of(code, repr((self.said, self.of, self.moments, self.needs_scores)))


def _a_kind(name: str, value: object) -> object:
    return choice(name, value, *_GROUPS)


def _a_scale(name: str, value: object) -> object:
    return choice(name, value, *_SCALES)


def _a_control(name: str, value: Any) -> None:
    if value is None or (isinstance(value, str) and value == "reinitialised"):
        return
    if not inspect.isfunction(value) or not value.__name__.isidentifier():
        raise TypeError(
            f"{name} must be 'reinitialised', None, or a named function of what the statistic is given, got {described(value)}"
        )
    if value.__name__ in PARTS:
        raise ValueError(f"{value.__name__} is what another row of the tables is called; rename the {name}")


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
    of=_a_kind, scale=_a_scale, control=_a_control, smallest=partial(number, above=0), moments=sequence,
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
        function: where nothing else is said: ``@massieu.statistic`` without brackets.
        of: what the function is given.
        name: in the tables; the function's name, unless one is given.
        title: on the page; the name with spaces, unless one is given.
        question: that it answers; the function's docstring, unless one is given.
        formula, claim, paper: what else the page's methods say of it.
        unit: of its numbers, such as "nats".
        caveat: what it does not say.
        control: what its numbers are compared with. "reinitialised": models of the same shape with random weights. A function
            of what the statistic is given, which returns the same without the property in question, or None where there is no
            such thing. None: nothing.
        scale: on which it is compared with random models: a "share" (between 0 and 1) by its logit, a "positive" number by its
            logarithm, a "number" as it is.
        signed: whether zero is the middle of its scale; the page draws it in two colours.
        smallest: the smallest difference from the control that is announced: 0.05 of a share or of a number without a unit,
            0.1 of a number with one, a tenth of a positive number, unless it is given.
        depends_on_key_origin: whether adding one vector to all keys of a head changes it, which attention does not see. Such
            a number is not compared with random models.
        needs_scores: whether it reads scores or log Z apart from log-weights; a few models do not let them be told apart.
        moments: those of `massieu.ops.attention_moments` that it reads beside log Z and entropy. One that it reads without
            saying so costs a second pass over the scores, and a warning.

    Raises:
        InputError: the function does not take what it would be given, the name is one of the package's own, or an argument is
            none of the above.

    Example:
        How much attention goes to the ten nearest tokens?

        >>> import massieu
        >>> @massieu.statistic(formula="Σ p_j, |i − j| ≤ 10", scale="share")
        ... def nearby(reading):
        ...     return reading.weight_where(lambda query, key: (query - key).abs() <= 10)
        >>> nearby.name, nearby.said.control
        ('nearby', 'reinitialised')
    """

    read = tuple(moments)
    _check_moments(of, read)

    def made(function: Function) -> OwnStatistic:
        own = _checked_name(name, function)
        _check_parameters(own, function, of)
        said = Statistic(
            name=own,
            title=title or own.replace("_", " ").capitalize(),
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
        return OwnStatistic(function, of, said, control if callable(control) else None, read, needs_scores)

    return made if function is None else made(_function(function))


def as_own(given: object) -> OwnStatistic:
    """What was given as a statistic: as it is, or a plain function with nothing else said of it.

    Raises:
        InputError: it is neither.
    """
    if isinstance(given, OwnStatistic):
        return given
    return statistic(_function(given))


def _function(given: object) -> Function:
    if inspect.isfunction(given) or inspect.ismethod(given):
        return given
    raise InputError(
        f"a statistic is a name, a function or what massieu.statistic makes of one, got {type(given).__name__} {given!r}"
    )


def _checked_name(name: str | None, function: Function) -> str:
    own = name or function.__name__
    if not own.isidentifier():
        raise InputError(f"a statistic's name is a word as a function's, got {own!r}; give one by name=")
    if own in STATISTICS or own in GROUPS:
        raise InputError(f"{own} is the name of one of the package's own statistics; give another one by name=")
    if own in COLUMNS:
        raise InputError(f"{own} is the name of a column of the tables; give the statistic another one by name=")
    return own


def _check_moments(of: Of, moments: tuple[str, ...]) -> None:
    if moments and of != "queries":
        raise InputError(f"moments are for statistics of queries, and this one is of a {of}")
    if unknown := [each for each in moments if each not in NAMES]:
        raise InputError(f"{unknown[0]!r} is no moment; known are {', '.join(NAMES)}")


def _check_parameters(own: str, function: Function, of: Of) -> None:
    try:
        inspect.signature(function).bind(*[None] * _PARAMETERS[of])
    except TypeError:
        raise InputError(
            f"statistic {own}{inspect.signature(function)} is called with {_GIVEN[of]}; of= says with what"
        ) from None
