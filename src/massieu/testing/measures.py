"""All laws of a measure, by their names."""

from collections.abc import Callable

import torch
from torch import Tensor

from massieu.measures.base import Measure
from massieu.measures.hooks import MissingFormError
from massieu.testing import batching, derivatives, distribution, divergence, edges, inverse, precision
from massieu.testing.checks import Checks, Law, check_case, checks_of
from massieu.testing.subject import MeasureCase, Subject, subject_of

Missing = Callable[[MeasureCase], str | None]


def _needs_field(name: str) -> Missing:
    """A law needs this field of the case."""
    return lambda case: f"the case has no {name}" if getattr(case, name) is None else None


def _needs_form(form: str, evaluate: Callable[[Measure, Tensor], object]) -> Missing:
    """A law needs a form of the measure; without it `evaluate` returns None or raises a `MissingFormError`."""

    def missing(case: MeasureCase) -> str | None:
        try:
            value = evaluate(case.measure.to(torch.float64), case.start)
        except MissingFormError as error:
            return str(error)
        except Exception:  # The form is there; whatever else is wrong, the law itself reports.
            return None
        return f"{type(case.measure).__name__} names no {form}" if value is None else None

    return missing


def _needs_reference(*kinds: str) -> Missing:
    """A law needs a density with respect to one of these reference measures."""

    def missing(case: MeasureCase) -> str | None:
        kind = case.measure._reference
        return None if kind in kinds else f"the density is with respect to a {kind} measure"

    return missing


def _all(*needs: Missing) -> Missing:
    """The first reason of several."""
    return lambda case: next((reason for need in needs if (reason := need(case)) is not None), None)


_DOMAIN = _needs_form("domain", lambda measure, eta: measure._in_domain(eta))
_SUPPORT = _needs_form("support", lambda measure, eta: measure._support(eta))
_SAMPLER = _needs_form("sampler", lambda measure, eta: measure.sample(eta, generator=torch.Generator(eta.device)))
_DENSITY = _all(_SAMPLER, _needs_form("density", lambda measure, eta: measure.log_prob(eta, eta)))

LAWS: tuple[Law[MeasureCase, Subject], ...] = (
    Law("shapes", batching.check_shapes),
    Law("domain", edges.check_domain, _DOMAIN),
    Law("log_partition", divergence.check_log_partition, _needs_field("log_partition")),
    Law("mean", derivatives.check_mean),
    Law("fisher", derivatives.check_fisher),
    Law("second derivatives", derivatives.check_second_derivatives),
    Law("parameters", derivatives.check_parameters),
    Law("convexity", derivatives.check_convexity),
    Law("cumulants", derivatives.check_cumulants),
    Law("kl", divergence.check_kl),
    Law("kl oracle", divergence.check_kl_oracle, _needs_field("kl")),
    Law("kl of close parameters", divergence.check_kl_of_close_parameters),
    Law("entropy", divergence.check_fenchel_young),
    Law("tilt", divergence.check_tilt),
    Law("draws", distribution.check_draws, _SAMPLER),
    Law("samples", distribution.check_samples, _SAMPLER),
    Law("independence", distribution.check_independence, _SAMPLER),
    Law("possible draws", distribution.check_possible, _DENSITY),
    Law("log_prob", distribution.check_log_prob, _DENSITY),
    Law("log_prob oracle", distribution.check_log_prob_oracle, _all(_needs_field("log_prob"), _DENSITY)),
    Law("frequencies", distribution.check_frequencies, _all(_needs_reference("counting"), _DENSITY)),
    Law("normalisation", distribution.check_normalisation, _all(_needs_reference("lebesgue"), _DENSITY)),
    Law("support", distribution.check_support, _SUPPORT),
    Law("support of samples", distribution.check_support_of_samples, _all(_SAMPLER, _SUPPORT)),
    Law("natural", inverse.check_natural),
    Law("outside the support", inverse.check_outside, _SUPPORT),
    Law("saturated means", inverse.check_saturated),
    Law("atoms as means", inverse.check_atoms, _all(_needs_reference("counting"), _DENSITY)),
    Law("batching", batching.check_batching),
    Law("compiled", batching.check_compiled, _needs_field("compile_backend")),
    Law("single precision", precision.check_single),
    Law("half precision", precision.check_half),
    Law("empty", edges.check_empty),
    Law("meta", edges.check_meta),
    Law("lists and arrays", edges.check_numbers),
    Law("NaN", edges.check_nan),
    Law("NaN in log_prob", edges.check_nan_in_log_prob, _DENSITY),
)


def measure_checks(case: MeasureCase) -> Checks:
    """Named checks of a measure: the laws that the log-partition of an exponential family obeys.

    Each check is one item for pytest, ``@pytest.mark.parametrize(("name", "check"), measure_checks(case))``, or for a loop.
    They compare the measure with the case's oracles, with automatic and finite differences, with its own draws within five
    standard errors, and with itself: divergences, tilts, inverse and conjugate, batches, compilation, precisions. They
    compute in float64 unless a law says otherwise; KL in float32 is exact to 1e-5 down to distance 1e-6.

    Returns:
        The checks. Their `left_out` names, with reasons, the laws that need an oracle, a backend, a sampler, a density, a
        domain or a support which the case does not have. A check raises an AssertionError, which names the law, the point
        and the two numbers, or a ValueError if the case has no `eta` and none could be drawn inside the domain.

    Example:
        >>> from massieu.measures import Spin
        >>> from massieu.testing import MeasureCase, measure_checks
        >>> checks = measure_checks(MeasureCase(Spin.create(dim=2)))
        >>> for name, check in checks:
        ...     check()
        >>> checks.left_out["domain"]
        'Spin names no domain'
    """
    check_case(case, MeasureCase, Measure)
    return checks_of(case, subject_of, LAWS)
