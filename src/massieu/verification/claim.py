"""A claim, checked: the statement, its source, and rows of numbers beside the bounds they must meet.

A row is a `Check`. Its bound comes from theory, never from the output: 1e-10·(1 + |b|) for closed forms in float64, five
standard errors for Monte Carlo, the order of the remainder for finite differences. The functions below make checks.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

SHIM = "Shim, A Probabilistic Interpretation of Transformers (arXiv 2205.01080)"
BAL = "Bal, Transformer Attention as an Implicit Mixture of Effective Energy-Based Models (2020)"
ZHANG = "Zhang et al., An Analysis of Attention via the Lens of Exchangeability and Latent Variable Models (arXiv 2212.14852)"
FOLLOW_UP = "Zhang et al., What and How does In-Context Learning Learn? (arXiv 2305.19420)"

Status = Literal["quoted", "reconstructed", "derived", "abstract only"]
Comparison = Literal["≤", "≥", "|z| ≤"]
Verdict = Literal["holds", "fails"]
Standing = Literal["asserted", "ambiguous", "assumption"]
"""How the source has the form that is not true: it asserts it; it can be read so; it assumes it."""

PublishedVerdict = Literal["none", "holds", "fails", "ambiguous", "assumption"]

_HEADINGS = {
    "quoted": "the paper says",
    "abstract only": "the abstract says",
    "reconstructed": "reconstructed as",
    "derived": "as published",
}
_STANDINGS = {"asserted": "", "ambiguous": "ambiguous: ", "assumption": "an assumption: "}
_NAMES = {"asserted": "the printed form", "ambiguous": "the other reading", "assumption": "what is assumed"}

CLOSED_FORM = 1e-10
"""Allowed difference of two exact ways to one number in float64, relative to 1 + |the number|."""

QUADRATURE = 1e-8
"""The same for an integral against its closed form."""

GRADIENT_BY_DIFFERENCES = 1e-8
"""The same for a central difference of step 1e-5·(1 + |x|) against a gradient."""

HESSIAN_BY_DIFFERENCES = 1e-6
"""The same for second differences of step 1e-4·(1 + |x|) against a Hessian."""

STANDARD_ERRORS = 5.0
"""Allowed distance of a Monte Carlo estimate from its expectation (two-sided probability 5.7e-7)."""


@dataclass(frozen=True)
class Check:
    """One number held against its bound.

    Attributes:
        name: What is compared, in words and symbols, after the case it is compared in and a colon, where there are
            several: "keys, γ = 0.5: A and its bound". The same in every run.
        measured: The number; one that is not a number meets no bound.
        comparison: How it must lie to the bound; "|z| ≤" where it is a distance in standard errors.
        bound: From theory.
        detail: The numbers behind it, such as "0.1224335 against 0.1224335".
        form: "published" for a row of the printed form, or of the reading, that is false; "corrected" for all others.
    """

    name: str
    measured: float
    comparison: Comparison
    bound: float
    detail: str = ""
    form: Literal["corrected", "published"] = "corrected"

    @property
    def holds(self) -> bool:
        """Whether the number meets its bound."""
        return self.measured >= self.bound if self.comparison == "≥" else self.measured <= self.bound

    @property
    def kind(self) -> str:
        """What is compared, without the case and with # for numbers: checks of one kind are shown as one row."""
        return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "#", self.name.rpartition(": ")[2])

    @property
    def strain(self) -> float:
        """How much of the bound is used: 1 at the bound, above 1 where it fails, 0 where no ratio is defined."""
        used, allowed = self.measured, self.bound
        if self.comparison == "≥":
            used, allowed = allowed, used
        if used > 0 and allowed > 0:
            return used / allowed
        return 0.0 if self.holds else math.inf


@dataclass(frozen=True)
class Claim:
    """The result of checking a claim of the papers: statement, source, checks and verdict.

    Attributes:
        id: Such as S7; docs/theory has the entry of this number.
        title: What it is about, in a few words.
        statement: The claim, as it is true, in one sentence.
        source: Paper with section or equation, or where it is derived.
        status: "quoted" from the paper, "reconstructed" because the paper's own form was not available, "abstract only"
            where no more of the paper is known, or "derived".
        published: What the source says, where that is not what is true or may be read so; else None.
        standing: Whether the source asserts that, may be read so, or assumes it.
        corrected: What was corrected or made precise, or None.
        checks: The rows of numbers, those of the published form among them.
        parameters: What the claim ran with, its seed included.
        seconds: How long that took.

    Example:
        >>> import massieu
        >>> claim = massieu.verify("S3")[0]
        >>> claim.title, claim.verdict
        ('Attention is the gradient of log Z', 'holds')
    """

    id: str
    title: str
    statement: str
    source: str
    status: Status
    published: str | None
    standing: Standing
    corrected: str | None
    checks: tuple[Check, ...]
    parameters: dict[str, int | float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def worst(self) -> Check:
        """The check of the true form that comes closest to its bound, or lies farthest beyond it."""
        return max((check for check in self.checks if check.form == "corrected"), key=lambda check: check.strain)

    @property
    def measured(self) -> float:
        """The number of the worst check."""
        return self.worst.measured

    @property
    def bound(self) -> float:
        """The bound of the worst check."""
        return self.worst.bound

    @property
    def verdict(self) -> Verdict:
        """Whether every check of the true form holds."""
        return _verdict(self.checks, "corrected")

    @property
    def published_verdict(self) -> PublishedVerdict:
        """What became of the form that is not true: "holds" or "fails" only where the source asserts it; "none" without one."""
        if self.published is None:
            return "none"
        return _verdict(self.checks, "published") if self.standing == "asserted" else self.standing

    @property
    def published_name(self) -> str:
        """What that form is called: only what is asserted is called printed."""
        return "the reconstructed form" if self.status == "reconstructed" else _NAMES[self.standing]

    @property
    def published_heading(self) -> str:
        """What introduces it: only a quotation is what the paper says."""
        return _HEADINGS[self.status]

    @property
    def outcome(self) -> str:
        """What became of that form, in words; empty where there is none."""
        if self.published is None:
            return ""
        rows = _verdict(self.checks, "published")
        expected = "as it should" if rows == "fails" else "with these settings"
        return f"{_STANDINGS[self.standing]}{self.published_name} {rows}, {expected}"

    def to_dict(self) -> dict[str, Any]:
        """The claim as plain values."""
        return {
            "id": self.id,
            "title": self.title,
            "statement": self.statement,
            "source": self.source,
            "status": self.status,
            "published": self.published,
            "corrected": self.corrected,
            "measured": self.measured,
            "comparison": self.worst.comparison,
            "bound": self.bound,
            "verdict": self.verdict,
            "published_verdict": self.published_verdict,
            "checks": [
                {
                    "name": check.name,
                    "form": check.form,
                    "measured": check.measured,
                    "comparison": check.comparison,
                    "bound": check.bound,
                    "verdict": "holds" if check.holds else "fails",
                    "detail": check.detail,
                }
                for check in self.checks
            ],
            "parameters": self.parameters,
            "seconds": self.seconds,
        }


def _verdict(checks: tuple[Check, ...], form: str) -> Verdict:
    return "holds" if all(check.holds for check in checks if check.form == form) else "fails"


# --- checks ----------------------------------------------------------------------------------------------------------


def at_most(name: str, measured: Tensor | float, bound: float, detail: str = "") -> Check:
    """The largest entry of `measured` is at most `bound`."""
    return Check(name, _double(measured).max().item(), "≤", bound, detail)


def at_least(name: str, measured: Tensor | float, bound: float, detail: str = "") -> Check:
    """The smallest entry of `measured` is at least `bound`."""
    return Check(name, _double(measured).min().item(), "≥", bound, detail)


def close(name: str, actual: Tensor | float, expected: Tensor | float, tolerance: float = CLOSED_FORM) -> Check:
    """|actual − expected| ≤ tolerance·(1 + |expected|) in every entry; infinities must be equal.

    The default tolerance is for two exact ways to one number in float64; `QUADRATURE` and its kin are for the others.
    """
    left, right = _double(actual), _double(expected)
    _same_shape(name, left, right)
    error = torch.where(left == right, 0.0, (left - right).abs() / (1 + right.abs()))
    return Check(name, error.max().item(), "≤", tolerance, _compared(left, right))


def near_in_standard_errors(
    name: str, estimate: Tensor | float, expected: Tensor | float, standard_error: Tensor | float
) -> Check:
    """A Monte Carlo estimate lies within five of its standard errors of its expectation, in every entry."""
    left, right, error = _double(estimate), _double(expected), _double(standard_error)
    _same_shape(name, left, right)
    _same_shape(name, left, error)
    detail = f"{left.item():.5g} ± {error.item():.2g} against {right.item():.5g}" if left.numel() == 1 else ""
    return Check(name, ((left - right) / error).abs().max().item(), "|z| ≤", STANDARD_ERRORS, detail)


def all_raise(name: str, error: type[Exception], *calls: Callable[[], object]) -> Check:
    """Every call raises `error`; any other exception passes through. Measured: the calls that raised nothing."""
    accepted = 0
    for call in calls:
        try:
            call()
        except error:
            continue
        accepted += 1
    return Check(name, float(accepted), "≤", 0.0, f"{len(calls) - accepted} of {len(calls)} raised {error.__name__}")


def as_published(check: Check) -> Check:
    """The check as a row of the form, or of the reading, that is false: it is meant to fail."""
    return replace(check, form="published")


def _double(value: Tensor | float) -> Float[Tensor, "..."]:
    return torch.as_tensor(value, dtype=torch.float64).detach()


def _same_shape(name: str, left: Tensor, right: Tensor) -> None:
    # A single number may stand for all entries; any other broadcast is a mistake.
    if left.shape != right.shape and right.ndim:
        raise ValueError(f"{name}: shapes {tuple(left.shape)} and {tuple(right.shape)} differ")


def _compared(left: Tensor, right: Tensor) -> str:
    if left.numel() == 1 and right.numel() == 1:
        return f"{left.item():.7g} against {right.item():.7g}"
    return f"{left.numel()} numbers"
