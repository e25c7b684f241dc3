"""Every measure of the package obeys the laws of `measure_checks`, against oracles that share no code with it."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from tests.measures.cases import CASES, VARIANTS
from tests.support.suites import SHARED_LAWS, every_check, first_of_each_class, without_a_case

from massieu.measures import Measure
from massieu.testing import batching, measure_checks
from massieu.testing.subject import subject_of

SLOW = [
    # By Newton's method on the boundary, which is not the classes' own; closed forms and atoms are in the fast tier.
    *[
        f"{name}: {law}"
        for name in ("affine", "tilted", "mixture of atoms and spins")
        for law in ("atoms as means", "saturated means")
    ],
    # The fast tests of spheres hold them against oracles in mpmath.
    *[f"sphere: {law}" for law in ("cumulants", "samples", "second derivatives")],
]


DISTINCT = {name: case for name, case in CASES.items() if name not in VARIANTS}


@every_check(
    measure_checks,
    DISTINCT,
    medium=CASES,
    slow=SLOW,
    representatives=("spin, in a field", "exponential", "affine"),
)
def test_conforms(check):
    check()


def all_hold(checks: Iterable[tuple[str, Callable[[], None]]]) -> None:
    """All that fail are told together."""
    failed = []
    for name, check in checks:
        try:
            check()
        except Exception as error:
            error.add_note(f"check: {name}")
            failed.append(error)
    if failed:
        raise ExceptionGroup(f"{len(failed)} checks fail", failed)


DOMAIN = ("exponential", "gamma", "laplace", "conjugate", "affine, of a density", "tilted density", "product")
"""The first words of cases that name a domain; of conjugate priors, the Gaussian's has none."""
DENSITY = {"possible draws", "log_prob", "log_prob oracle", "NaN in log_prob"}
LEFT_OUT = {
    "gaussian, rank one": {"kl oracle", "normalisation", *DENSITY},
    "sum of uniforms": {"normalisation", *DENSITY},
    "gamma, wide": {"log_partition", "kl oracle", "log_prob oracle"},
    "mixture of spins and a Gaussian, in a batch": {"log_partition", "kl oracle", "log_prob oracle", "normalisation"},
    **{name: {"kl oracle", "log_prob oracle"} for name in CASES if name.endswith("strong")},
    **{name: {"normalisation"} for name in CASES if name.startswith(("sphere", "circle", "hybrid", "product"))},
}
"""What else is left out than domain and compilation, and one of the two ways to hold a density against the draws."""


@pytest.mark.medium
def test_nothing_else_is_left_out():
    for name, case in CASES.items():
        checks = measure_checks(case)
        has_domain = name.startswith(DOMAIN) and "to gaussian" not in name
        discrete = "frequencies" in checks
        expected = LEFT_OUT.get(name, {"normalisation"} if discrete else set()) | {"compiled"}
        expected |= set() if has_domain else {"domain"}
        expected |= set() if discrete else {"frequencies", "atoms as means"}
        assert set(checks.left_out) == expected, f"{name}: write the hooks, or change LEFT_OUT and DOMAIN"


@pytest.mark.slow
@pytest.mark.parametrize("name", first_of_each_class(DISTINCT))
def test_conforms_compiled(name):
    """As graphs, where what may go wrong here would: tracing, and custom functions inside transforms.

    The derivative that passes through all a class computes; every function for one measure in closed form.
    """
    case = replace(CASES[name], compile_backend="aot_eager")
    if name == "gamma":
        measure_checks(case)["compiled"]()
    else:
        batching.check_compiled(subject_of(case), ["gradient of the mean"])


@pytest.mark.slow
@pytest.mark.needs("compiler")
def test_conforms_compiled_to_machine_code():
    """Of a measure with an operator of its own, the fused kernel. (The sphere's recurrences would take minutes.)"""
    case = replace(CASES["atoms, batched and masked"], compile_backend="inductor")
    batching.check_compiled(subject_of(case), ("kl", "gradient of the mean"))


OTHER_DRAWS = ("poisson", "gamma", "mixture of atoms and spins")
"""Of each kind of sampler one that the fast tier has with fewer draws: of counts, of a density, of a composition."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [*(name for name in CASES if name in VARIANTS), *OTHER_DRAWS])
def test_conforms_for_other_draws(name):
    """Near relatives of other cases are tried here alone; shapes without values depend on the class and not on draws."""
    checks = measure_checks(replace(CASES[name], samples=10_000, seed=1))
    left_out = {"meta"} if name in VARIANTS else SHARED_LAWS
    all_hold((law, check) for law, check in checks if law not in left_out)


@pytest.mark.medium
def test_every_measure_has_a_case():
    assert not without_a_case(Measure, [case.measure for case in CASES.values()])
