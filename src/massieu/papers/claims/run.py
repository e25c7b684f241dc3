"""Checking claims: `verify` runs them one by one and keeps what came out."""

import json
import os
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from massieu.errors import InputError, OverlapWarning
from massieu.foundation.arguments import described
from massieu.foundation.doors import any_of, function, input_door
from massieu.foundation.doors import seed as check_seed
from massieu.foundation.numbers import counted
from massieu.foundation.threads import one_thread
from massieu.papers.claims.claim import Claim
from massieu.papers.claims.registry import ClaimFunction, Setting, claims, find
from massieu.report.encode import encodable

_PACKAGE = Path(__file__).parents[2]


@dataclass(frozen=True, repr=False)
class Verification(Sequence[Claim]):
    """The claims that were checked, in order; a sequence of `Claim`.

    Attributes:
        claims: What came out of each.
        complete: False when the run was interrupted: the later claims are missing.
    """

    claims: tuple[Claim, ...]
    complete: bool = True

    @overload
    def __getitem__(self, index: int) -> Claim: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Claim, ...]: ...
    def __getitem__(self, index: int | slice) -> Claim | tuple[Claim, ...]:
        return self.claims[index]

    def __len__(self) -> int:
        return len(self.claims)

    @property
    def ok(self) -> bool:
        """Whether every claim was checked and holds."""
        return self.complete and all(claim.verdict == "holds" for claim in self.claims)

    @property
    def summary(self) -> str:
        """How many claims hold, and what became of what was printed, in sentences."""
        failing = [claim.id for claim in self.claims if claim.verdict == "fails"]
        unchecked = [claim.id for claim in self.claims if claim.verdict == "could not be checked"]
        holding = len(self) - len(failing) - len(unchecked)
        parts = [f"{holding} of {_hold(len(self), 'claim')}" if failing or unchecked else _hold(holding, "claim")]
        if failing:
            parts.append(f"{_fail(len(failing))} ({', '.join(failing)})")
        if unchecked:
            parts.append(f"{len(unchecked)} could not be checked ({', '.join(unchecked)})")
        sentences = [f"{', '.join(parts)}."]
        verdicts = Counter(claim.published_verdict for claim in self.claims)
        if wrong := verdicts["fails"]:
            shown = "its check shows" if wrong == 1 else "each check shows"
            sentences.append(
                f"{_are(wrong, 'formula')} wrong as printed; {shown} the printed form failing and the corrected one holding."
            )
        readings = [f"{_are(verdicts['ambiguous'], 'reading')} ambiguous"] * bool(verdicts["ambiguous"])
        if assumed := verdicts["assumption"]:
            readings.append(f"{_are(assumed, 'statement')} {'an assumption' if assumed == 1 else 'assumptions'}")
        if readings:
            sentences.append(f"{', '.join(readings)}.")
        if right := [claim.id for claim in self.claims if claim.published_verdict == "holds"]:
            sentences.append(f"With these settings the printed form holds too: {', '.join(right)}.")
        if not self.complete:
            sentences.append("Interrupted before the end.")
        return " ".join(sentences)

    def __repr__(self) -> str:
        return f"Verification({self.summary.rstrip('.')})"

    def to_dicts(self) -> list[dict[str, Any]]:
        """A dictionary for each claim, as ``massieu verify --json`` prints them; see `Claim.to_dict`."""
        return [claim.to_dict() for claim in self.claims]

    def to_json(self) -> str:
        """A JSON list of objects; a number that is not finite is null."""
        return json.dumps(encodable(self.to_dicts()), indent=1, ensure_ascii=False, allow_nan=False)

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write one HTML page that needs nothing but a browser; it replaces an earlier one at once.

        Raises:
            InputError: the page cannot be written there.
            MissingExtraError: jinja2 is not installed.
        """
        from massieu.papers.claims.page import write_page

        return write_page(self.claims, self.summary, Path(path))


@input_door(
    ids=any_of("the name of a claim, or a list of such names", str, list, tuple, set),
    settings=any_of("a dictionary of numbers by name", Mapping),
    progress=function,
    seed=check_seed,
)
def verify(
    ids: Iterable[str] | str | None = None,
    *,
    seed: int | None = None,
    settings: Mapping[str, Setting | str] | None = None,
    progress: Callable[[Claim, int, int], None] | None = None,
) -> Verification:
    """Check the papers' claims with numbers.

    Ctrl-C ends it early: what was checked until then is returned and marked incomplete. A claim that cannot be computed
    has the verdict "could not be checked" and a reason, and the others are checked all the same.

    Each claim runs on one thread: its problems are small, and threads that wait for each other on busy cores take minutes
    for seconds.

    Args:
        ids: Numbers such as "S7", in any case; all claims in reading order without it.
        seed: For every claim that draws something.
        settings: Other values for the claims' parameters; only with `ids`, and every one of them must have it.
        progress: Called after each claim with it, how many are done, and how many there are.

    Raises:
        InputError: a number is unknown; settings without `ids`; a claim has no such parameter, or its value cannot
            be read or is refused.

    Example:
        >>> from massieu.papers import verify
        >>> verify(["S3", "B1"], seed=3).ok
        True
    """
    if ids is None and settings:
        raise InputError(
            f"{', '.join(settings)}: settings belong to a claim; name it, as in: massieu verify S15 --set N=1024"
        )
    if seed is not None and settings and "seed" in settings:
        raise InputError(f"the seed is set twice: to {seed} and to {settings['seed']}")
    named = [ids] if isinstance(ids, str) else [] if ids is None else list(ids)
    for name in named:
        if not isinstance(name, str):
            raise InputError(f"ids must be names of claims, got {described(name)}")
    chosen = list(claims().values()) if ids is None else [find(name) for name in named]
    chosen = list(dict.fromkeys(chosen))
    if not chosen:
        raise InputError("no claim was named in ids; leave it out to check all of them")
    wanted = [entry.read(_with_seed(entry, settings or {}, seed)) for entry in chosen]
    done: list[Claim] = []
    try:
        for entry, parameters in zip(chosen, wanted, strict=True):
            with one_thread(), warnings.catch_warnings():
                # Claims also try memories that do not retrieve what they hold.
                warnings.simplefilter("ignore", OverlapWarning)
                done.append(_check(entry, parameters))
            if progress is not None:
                progress(done[-1], len(done), len(chosen))
    except KeyboardInterrupt:
        return Verification(tuple(done), complete=False)
    return Verification(tuple(done))


def _with_seed(
    entry: ClaimFunction, settings: Mapping[str, Setting | str], seed: int | None
) -> dict[str, Setting | str]:
    return dict(settings) if seed is None or "seed" not in entry.parameters else {**settings, "seed": seed}


def _check(entry: ClaimFunction, parameters: Mapping[str, Setting]) -> Claim:
    """The claim with these parameters, or why it could not be checked with them.

    Raises:
        InputError: it refuses a setting that is not its own.
    """
    changed = {name: value for name, value in parameters.items() if value != entry.parameters[name] and name != "seed"}
    started = time.perf_counter()
    try:
        return entry(**parameters)
    except Exception as error:
        # One of its own settings cannot be the user's mistake: with those the sentence is about what was drawn.
        if changed and isinstance(error, InputError):
            raise
        return entry.not_checked(_reason(error), parameters, time.perf_counter() - started)


def _reason(error: Exception) -> str:
    """What stopped a claim, and where: for its reader, and for whoever mends it."""
    frames = traceback.extract_tb(error.__traceback__)
    own_frames = [frame for frame in frames if Path(frame.filename).is_relative_to(_PACKAGE)]
    last = (own_frames or frames)[-1]
    message = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {message.rstrip('.')} ({Path(last.filename).name}:{last.lineno})."


def _hold(number: int, thing: str) -> str:
    return f"{counted(number, thing)} {'holds' if number == 1 else 'hold'}"


def _fail(number: int) -> str:
    return f"{number} {'fails' if number == 1 else 'fail'}"


def _are(number: int, thing: str) -> str:
    return f"{counted(number, thing)} {'is' if number == 1 else 'are'}"
