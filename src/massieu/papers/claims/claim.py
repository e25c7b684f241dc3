"""A claim and its checks: the statement, its source, and rows of numbers beside the bounds they must meet.

A row is a `Check`. Its bound comes from theory, never from the output: 1e-10·(1 + |b|) for closed forms in float64, a
quantile of the normal or Student's law for Monte Carlo, the order of the remainder for finite differences. The functions
below make checks.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.papers.claims.false_alarms import allowed_distance, skewness_of_mean

SHIM = "Shim, A Probabilistic Interpretation of Transformers (arXiv 2205.01080)"
BAL = "Bal, Transformer Attention as an Implicit Mixture of Effective Energy-Based Models (2020)"
ZHANG = "Zhang et al., An Analysis of Attention via the Lens of Exchangeability and Latent Variable Models (arXiv 2212.14852)"
FOLLOW_UP = "Zhang et al., What and How does In-Context Learning Learn? (arXiv 2305.19420)"

Status = Literal["quoted", "reconstructed", "derived", "abstract only"]
Comparison = Literal["≤", "≥", "|z| ≤"]
Verdict = Literal["holds", "fails", "could not be checked"]
Standing = Literal["asserted", "ambiguous", "assumption"]
"""How the source has the form that is not true: it asserts that form; it can be read so; it assumes it."""

PublishedVerdict = Literal["none", "holds", "fails", "ambiguous", "assumption", "could not be checked"]

_PUBLISHED_HEADINGS = {
    "quoted": "the paper says",
    "abstract only": "the abstract says",
    "reconstructed": "reconstructed as",
    "derived": "as published",
}
_STANDING_PREFIXES = {"asserted": "", "ambiguous": "ambiguous: ", "assumption": "an assumption: "}
_PUBLISHED_NAMES = {"asserted": "the printed form", "ambiguous": "the other reading", "assumption": "what is assumed"}

CLOSED_FORM = 1e-10
"""Allowed difference of two exact ways to one number in float64, relative to 1 + |the number|."""

QUADRATURE = 1e-8
"""The same for an integral against its closed form."""

GRADIENT_BY_DIFFERENCES = 1e-8
"""The same for a central difference of step 1e-5·(1 + |x|) against a gradient."""

HESSIAN_BY_DIFFERENCES = 1e-6
"""The same for second differences of step 1e-4·(1 + |x|) against a Hessian."""


@dataclass(frozen=True)
class Check:
    """One number held against its bound.

    Attributes:
        name: What is compared, in words and symbols, after the case it is compared in and a colon, where there are
            several: "keys, γ = 0.5: A and its bound". The same in every run.
        measured: The number; NaN meets no bound.
        comparison: How the number must lie to the bound; "|z| ≤" for a distance in standard errors.
        bound: From theory.
        detail: The numbers that were compared, such as "0.1224335 against 0.1224335".
        form: "published" for a row of the printed form, or of the reading, that is false; "corrected" for all others.
        false_alarm: Probability that draws fail the check though what it checks is true; 0 where nothing is left to chance.
        basis: The law that gives this probability, in a few words; empty where nothing is left to chance.
    """

    name: str
    measured: float
    comparison: Comparison
    bound: float
    detail: str = ""
    form: Literal["corrected", "published"] = "corrected"
    false_alarm: float = 0.0
    basis: str = ""

    @property
    def holds(self) -> bool:
        """Whether the number meets its bound."""
        if self.comparison == "≥":
            return self.measured >= self.bound
        return self.measured <= self.bound

    @property
    def verdict(self) -> Literal["holds", "fails"]:
        """The same in a word."""
        if self.holds:
            return "holds"
        return "fails"

    @property
    def kind(self) -> str:
        """The name without its case and with # for numbers: checks of one kind are shown as one row."""
        compared_things = self.name.rpartition(": ")[2]
        return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "#", compared_things)

    @property
    def strain(self) -> float:
        """Share of the bound that is used: 1 at the bound, above 1 where it fails, 0 where no ratio is defined."""
        if self.comparison == "≥":
            smaller = self.bound
            larger = self.measured
        else:
            smaller = self.measured
            larger = self.bound
        if smaller > 0 and larger > 0:
            return smaller / larger
        if self.holds:
            return 0.0
        return math.inf

    def to_dict(self) -> dict[str, Any]:
        """The check as a dictionary of strings and numbers."""
        return {
            "name": self.name,
            "form": self.form,
            "measured": self.measured,
            "comparison": self.comparison,
            "bound": self.bound,
            "verdict": self.verdict,
            "detail": self.detail,
            "false_alarm": self.false_alarm,
            "basis": self.basis,
        }


@dataclass(frozen=True)
class Claim:
    """The result of checking a claim of the papers: statement, source, checks and verdict.

    Attributes:
        id: Such as S7; docs/theory has the entry of this number.
        title: What it is about, in a few words.
        statement: The claim, as it is true, in a few sentences.
        source: Paper with section or equation, or where it is derived.
        status: "quoted" from the paper, "reconstructed" because the paper's own form was not available, "abstract only"
            where no more of the paper is known, or "derived".
        published: What the source says, where that is not what is true or may be read so; else None.
        standing: Whether the source asserts that, may be read so, or assumes it.
        corrected: What was corrected or made precise, or None.
        checks: The rows of numbers, those of the published form among them.
        parameters: What the claim ran with, its seed included.
        seconds: How long that took.
        reason: Why it could not be checked, in a sentence; None where it was.

    Example:
        >>> from massieu.papers import verify
        >>> claim = verify("S3")[0]
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
    reason: str | None = None

    @property
    def worst(self) -> Check | None:
        """The check of the true form that comes closest to its bound, or lies farthest beyond it; None without checks."""
        corrected_checks = [check for check in self.checks if check.form == "corrected"]
        return max(corrected_checks, key=lambda check: check.strain, default=None)

    @property
    def measured(self) -> float:
        """The number of the worst check; NaN without checks."""
        if self.worst is None:
            return math.nan
        return self.worst.measured

    @property
    def bound(self) -> float:
        """The bound of the worst check; NaN without checks."""
        if self.worst is None:
            return math.nan
        return self.worst.bound

    @property
    def false_alarm(self) -> float:
        """Probability, at most, that chance alone makes the claim fail: the sum over its checks."""
        return sum(check.false_alarm for check in self.checks if check.form == "corrected")

    @property
    def verdict(self) -> Verdict:
        """Whether every check of the true form holds."""
        if self.reason is not None:
            return "could not be checked"
        return _verdict(self.checks, "corrected")

    @property
    def published_verdict(self) -> PublishedVerdict:
        """Verdict on the form that is not true: "holds" or "fails" only if the source asserts it; "none" without one."""
        if self.published is None:
            return "none"
        if self.reason is not None:
            return "could not be checked"
        if self.standing != "asserted":
            return self.standing
        return _verdict(self.checks, "published")

    @property
    def published_name(self) -> str:
        """Name of the form that is not true: only what is asserted is called printed."""
        if self.status == "reconstructed":
            return "the reconstructed form"
        return _PUBLISHED_NAMES[self.standing]

    @property
    def published_heading(self) -> str:
        """Words that introduce the form that is not true: only a quotation is what the paper says."""
        return _PUBLISHED_HEADINGS[self.status]

    @property
    def outcome(self) -> str:
        """Verdict on the form that is not true, in words; empty where there is none or nothing was checked."""
        if self.published is None or self.reason is not None:
            return ""
        verdict = _verdict(self.checks, "published")
        remark = "with these settings"
        if verdict == "fails":
            remark = "as it should"
        return f"{_STANDING_PREFIXES[self.standing]}{self.published_name} {verdict}, {remark}"

    def to_dict(self) -> dict[str, Any]:
        """The claim as a dictionary of strings, numbers and lists."""
        comparison = None
        if self.worst is not None:
            comparison = self.worst.comparison
        return {
            "id": self.id,
            "title": self.title,
            "statement": self.statement,
            "source": self.source,
            "status": self.status,
            "published": self.published,
            "corrected": self.corrected,
            "measured": self.measured,
            "comparison": comparison,
            "bound": self.bound,
            "verdict": self.verdict,
            "published_verdict": self.published_verdict,
            "reason": self.reason,
            "false_alarm": self.false_alarm,
            "checks": [check.to_dict() for check in self.checks],
            "parameters": self.parameters,
            "seconds": self.seconds,
        }


def _verdict(checks: tuple[Check, ...], form: str) -> Literal["holds", "fails"]:
    if all(check.holds for check in checks if check.form == form):
        return "holds"
    return "fails"


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
    actual_values = _double(actual)
    expected_values = _double(expected)
    _check_same_shape(name, actual_values, expected_values)
    relative_error = (actual_values - expected_values).abs() / (1 + expected_values.abs())
    # Of equal infinities the difference is NaN.
    error = torch.where(actual_values == expected_values, 0.0, relative_error)
    return Check(name, error.max().item(), "≤", tolerance, _compared(actual_values, expected_values))


def near_in_standard_errors(
    name: str,
    estimate: Tensor | float,
    expected: Tensor | float,
    standard_error: Tensor | float,
    *,
    bias: Tensor | float = 0.0,
    degrees_of_freedom: float = math.inf,
    skewness: float = 0.0,
) -> Check:
    """Every entry of a Monte Carlo estimate lies as near to its expectation as its standard error says.

    The bound is the distance that chance exceeds with the probability `FALSE_ALARM`: see
    `massieu.papers.claims.false_alarms`. `mean_of_draws` is for the mean of independent draws.

    Args:
        bias: How far the estimate's own expectation may lie from what is expected.
        degrees_of_freedom: Of the standard error, where it comes from draws as well.
        skewness: Of the estimate, for one that is divided by a standard error from the same draws.
    """
    estimates = _double(estimate)
    expectations = _double(expected)
    errors = _double(standard_error)
    _check_same_shape(name, estimates, expectations)
    _check_same_shape(name, estimates, errors)
    count = estimates.numel()
    detail = ""
    if count == 1:
        detail = f"{estimates.item():.5g} ± {errors.item():.2g} against {expectations.item():.5g}"
    allowed = allowed_distance(count, degrees_of_freedom, skewness)
    difference = (estimates - expectations).abs() - _double(bias)
    # A NaN stays NaN through clamp_min and max, and meets no bound.
    distance = (difference.clamp_min(0) / errors).max().item()
    basis = _basis(count, degrees_of_freedom, skewness)
    return Check(name, distance, "|z| ≤", allowed.distance, detail, false_alarm=allowed.false_alarm, basis=basis)


def mean_of_draws(
    name: str, draws: Float[Tensor, "draws *event"], expected: Tensor | float, bias: Tensor | float = 0.0
) -> Check:
    """Every entry of the mean of independent draws lies as near to its expectation as the draws' spread says.

    `bias` is how far the draws' own expectation may lie from what is expected.
    """
    sample = _double(draws)
    count = len(sample)
    error = sample.std(0) / math.sqrt(count)
    skewness = skewness_of_mean(sample)
    return near_in_standard_errors(
        name, sample.mean(0), expected, error, bias=bias, degrees_of_freedom=count - 1.0, skewness=skewness
    )


def not_below(name: str, draws: Float[Tensor, "draws"], least: float) -> Check:
    """The mean of independent draws lies at `least` or above it, but for the error of that mean."""
    two_sided = mean_of_draws(name, draws, least)
    sample = _double(draws)
    error = sample.std() / math.sqrt(len(sample))
    distance = (sample.mean() - least) / error
    return replace(two_sided, measured=distance.item(), comparison="≥", bound=-two_sided.bound)


def differs(name: str, draws: Float[Tensor, "draws *event"], value: float, expected: Tensor | float) -> Check:
    """At least one entry of the mean of independent draws lies farther from a value than chance brings it.

    Args:
        expected: Expectation of the mean: from it follows how often draws lie nearer to the value all the same.
    """
    near_check = mean_of_draws(name, draws, value)
    sample = _double(draws)
    error = sample.std(0) / math.sqrt(len(sample))
    # The check fails if chance moves the mean from its expectation back to within the bound of the value.
    effect = ((_double(expected) - value) / error).abs().max().item()
    margin = effect - near_check.bound
    false_alarm = 0.5 * math.erfc(margin / math.sqrt(2))
    basis = f"normal law, {margin:.1f} standard errors from its mean"
    return replace(near_check, comparison="≥", false_alarm=false_alarm, basis=basis)


def all_raise(name: str, error: type[Exception], *calls: Callable[[], object]) -> Check:
    """Every call raises `error`; any other exception passes through. Measured: the calls that raised nothing."""
    raised = 0
    for call in calls:
        try:
            call()
        except error:
            raised += 1
    accepted = len(calls) - raised
    return Check(name, float(accepted), "≤", 0.0, f"{raised} of {len(calls)} raised {error.__name__}")


def as_published(check: Check) -> Check:
    """The check as a row of the form, or of the reading, that is false: such a row is meant to fail."""
    return replace(check, form="published")


def _double(value: Tensor | float) -> Float[Tensor, "..."]:
    return torch.as_tensor(value, dtype=torch.float64).detach()


def _check_same_shape(name: str, values: Tensor, others: Tensor) -> None:
    # A single number may stand for all entries; any other broadcast is a mistake.
    if values.shape != others.shape and others.ndim:
        raise ValueError(f"{name}: shapes {tuple(values.shape)} and {tuple(others.shape)} differ")


def _compared(actual: Tensor, expected: Tensor) -> str:
    if actual.numel() == 1 and expected.numel() == 1:
        return f"{actual.item():.7g} against {expected.item():.7g}"
    return f"{actual.numel()} numbers"


def _basis(numbers: int, degrees_of_freedom: float, skewness: float) -> str:
    """The law of which a bound in standard errors is a quantile, in words."""
    if math.isinf(degrees_of_freedom):
        parts = ["normal law"]
    else:
        parts = [f"Student's law, {degrees_of_freedom:.0f} degrees of freedom"]
    if numbers > 1:
        parts.append(f"{numbers} numbers")
    if skewness > 0:
        parts.append(f"skewness {skewness:.2g}")
    return ", ".join(parts)
