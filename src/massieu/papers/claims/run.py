"""Checking claims: `verify` runs them one by one and returns their results."""

import json
import os
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
        claims: The result of each claim.
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
        all_hold = all(claim.verdict == "holds" for claim in self.claims)
        return self.complete and all_hold

    @property
    def summary(self) -> str:
        """Sentences that count the claims that hold, and the published forms that do not."""
        sentences = [self._verdicts_sentence(), *self._published_sentences()]
        if not self.complete:
            sentences.append("Interrupted before the end.")
        return " ".join(sentences)

    def _verdicts_sentence(self) -> str:
        failing = [claim.id for claim in self.claims if claim.verdict == "fails"]
        unchecked = [claim.id for claim in self.claims if claim.verdict == "could not be checked"]
        num_holding = len(self) - len(failing) - len(unchecked)
        parts = [f"{counted(len(self), 'claim')} {_agreeing(len(self), 'holds', 'hold')}"]
        if failing or unchecked:
            parts[0] = f"{num_holding} of {parts[0]}"
        if failing:
            parts.append(f"{len(failing)} {_agreeing(len(failing), 'fails', 'fail')} ({', '.join(failing)})")
        if unchecked:
            parts.append(f"{len(unchecked)} could not be checked ({', '.join(unchecked)})")
        return f"{', '.join(parts)}."

    def _published_sentences(self) -> Iterator[str]:
        counts = Counter(claim.published_verdict for claim in self.claims)
        num_wrong = counts["fails"]
        if num_wrong:
            subject = f"{counted(num_wrong, 'formula')} {_agreeing(num_wrong, 'is', 'are')}"
            checks = _agreeing(num_wrong, "its check", "each check")
            yield f"{subject} wrong as printed; {checks} shows the printed form failing and the corrected one holding."
        readings = []
        num_ambiguous = counts["ambiguous"]
        if num_ambiguous:
            readings.append(f"{counted(num_ambiguous, 'reading')} {_agreeing(num_ambiguous, 'is', 'are')} ambiguous")
        num_assumed = counts["assumption"]
        if num_assumed:
            predicate = _agreeing(num_assumed, "is an assumption", "are assumptions")
            readings.append(f"{counted(num_assumed, 'statement')} {predicate}")
        if readings:
            yield f"{', '.join(readings)}."
        holding = [claim.id for claim in self.claims if claim.published_verdict == "holds"]
        if holding:
            yield f"With these settings the printed form holds too: {', '.join(holding)}."

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
    entries = _chosen(ids)
    if not entries:
        raise InputError("no claim was named in ids; leave it out to check all of them")
    # Every setting is read before the first claim runs, so that a mistake costs no time.
    parameters = [entry.read(_with_seed(entry, settings or {}, seed)) for entry in entries]
    results: list[Claim] = []
    try:
        for entry, values in zip(entries, parameters, strict=True):
            with one_thread(), warnings.catch_warnings():
                # Claims also try memories that do not retrieve what they hold.
                warnings.simplefilter("ignore", OverlapWarning)
                result = _check(entry, values)
            results.append(result)
            if progress is not None:
                progress(result, len(results), len(entries))
    except KeyboardInterrupt:
        return Verification(tuple(results), complete=False)
    return Verification(tuple(results))


def _chosen(ids: Iterable[str] | str | None) -> list[ClaimFunction]:
    """The claims of these numbers, each once; all claims for None.

    Raises:
        InputError: a number is unknown, or no string.
    """
    if ids is None:
        return list(claims().values())
    if isinstance(ids, str):
        ids = [ids]
    names = list(ids)
    for name in names:
        if not isinstance(name, str):
            raise InputError(f"ids must be names of claims, got {described(name)}")
    return list(dict.fromkeys(find(name) for name in names))


def _with_seed(
    entry: ClaimFunction, settings: Mapping[str, Setting | str], seed: int | None
) -> dict[str, Setting | str]:
    if seed is None or "seed" not in entry.parameters:
        return dict(settings)
    return {**settings, "seed": seed}


def _check(entry: ClaimFunction, parameters: Mapping[str, Setting]) -> Claim:
    """The claim with these parameters, or why it could not be checked with them.

    Raises:
        InputError: the claim refuses a setting that is not its default.
    """
    changed = {name: value for name, value in parameters.items() if value != entry.parameters[name] and name != "seed"}
    started = time.perf_counter()
    try:
        return entry(**parameters)
    except Exception as error:
        # A default cannot be the user's mistake: then the error is about what was drawn.
        if changed and isinstance(error, InputError):
            raise
        return entry.not_checked(_reason(error), parameters, time.perf_counter() - started)


def _reason(error: Exception) -> str:
    """The error that stopped a claim, and the line of the package where it was raised, in a sentence."""
    frames = traceback.extract_tb(error.__traceback__)
    package_frames = [frame for frame in frames if Path(frame.filename).is_relative_to(_PACKAGE)]
    last_frame = (package_frames or frames)[-1]
    message = " ".join(str(error).split()) or "no message"
    place = f"{Path(last_frame.filename).name}:{last_frame.lineno}"
    return f"{type(error).__name__}: {message.rstrip('.')} ({place})."


def _agreeing(count: int, singular: str, plural: str) -> str:
    """The word that agrees with a count."""
    if count == 1:
        return singular
    return plural
