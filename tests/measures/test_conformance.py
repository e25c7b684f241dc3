"""Every measure of the package obeys the laws of `measure_checks`, against oracles that share no code with it."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterable
from dataclasses import replace

import pytest
from tests.measures.cases import CASES, CONJUGATE, ONE_OF_EACH, VARIANTS
from tests.support.rows import some_slow

import massieu.measures
from massieu.measures import Measure
from massieu.testing import batching, measure_checks
from massieu.testing.subject import subject_of

CHECKS = {name: measure_checks(case) for name, case in CASES.items()}


@pytest.mark.medium
@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, id=f"{name}: {law}")
        for name, checks in CHECKS.items()
        if name not in VARIANTS
        for law, check in checks
    ],
)
def test_conforms(check):
    check()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_near_relatives_conform(name):
    every_check(CHECKS[name])


def every_check(checks: Iterable) -> None:
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


def test_nothing_else_is_left_out():
    for name, checks in CHECKS.items():
        has_domain = name.startswith(DOMAIN) and "to gaussian" not in name
        discrete = "frequencies" in checks
        expected = LEFT_OUT.get(name, {"normalisation"} if discrete else set()) | {"compiled"}
        expected |= set() if has_domain else {"domain"}
        expected |= set() if discrete else {"frequencies", "atoms as means"}
        assert set(checks.left_out) == expected, name


@pytest.mark.medium
@some_slow("name", ONE_OF_EACH, 2)
def test_compiles(name):
    """The functions that others are made of; all of them in the slow run."""
    case = replace(CASES[name], compile_backend="aot_eager")
    batching.check_compiled(subject_of(case), ("mean", "gradient", "gradient of the mean"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ONE_OF_EACH, *sorted(set(CONJUGATE) - set(ONE_OF_EACH))])
def test_conforms_compiled(name):
    """As graphs, where what may go wrong here would: tracing, and custom functions inside transforms."""
    measure_checks(replace(CASES[name], compile_backend="aot_eager"))["compiled"]()


@pytest.mark.slow
@pytest.mark.needs("compiler")
@pytest.mark.parametrize("name", ["atoms, batched and masked", "spin, in a field", "poisson", "kernel density"])
def test_conforms_compiled_to_machine_code(name):
    # One of each kind of code: the fused kernel, plain functions, special functions, a composition. (The sphere's
    # recurrences unroll to graphs that take minutes to become machine code.)
    measure_checks(replace(CASES[name], compile_backend="inductor"))["compiled"]()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_conforms_for_other_draws(name):
    every_check(measure_checks(replace(CASES[name], samples=50_000, seed=1)))


def concrete_measures() -> set[type[Measure]]:
    for module in pkgutil.walk_packages(massieu.measures.__path__, "massieu.measures."):
        importlib.import_module(module.name)
    found, queue = set(), [Measure]
    while queue:
        cls = queue.pop()
        queue.extend(cls.__subclasses__())
        if not inspect.isabstract(cls) and cls.__module__.startswith("massieu."):
            found.add(cls)
    return found


@pytest.mark.parametrize("names", [list(CASES), ONE_OF_EACH], ids=["cases", "compiled"])
def test_every_measure_has_a_case(names):
    missing = concrete_measures() - {type(CASES[name].measure) for name in names}
    assert not missing, f"no conformance case for {sorted(cls.__name__ for cls in missing)}"
