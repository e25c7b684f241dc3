"""Every measure of the package obeys the laws of `check_measure`, against oracles that share no code with it."""

import importlib
import inspect
import pkgutil

import pytest
from tests.measures.cases import CASES, ONE_OF_EACH, VARIANTS
from tests.rows import some_slow

import massieu.measures
from massieu.measures import Measure
from massieu.testing.batching import check_compiled
from massieu.testing.subject import subject_of


@pytest.mark.medium
@pytest.mark.parametrize("name", [name for name in CASES if name not in VARIANTS])
def test_conforms(name):
    CASES[name].check(samples=5_000)


@pytest.mark.medium
@some_slow("name", ONE_OF_EACH, 2)
def test_compiles(name):
    """The functions that others are made of; all of them in the slow run."""
    case = CASES[name]
    names = ("mean", "gradient", "gradient of the mean")
    check_compiled(subject_of(case.measure, case.eta, case.scales, seed=0), "aot_eager", names)


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_conforms_compiled(name):
    """As graphs, where what may go wrong here would: tracing, and custom functions inside transforms."""
    CASES[name].check(compile_backend="aot_eager", samples=100)


@pytest.mark.slow
@pytest.mark.needs("compiler")
@pytest.mark.parametrize("name", ["atoms, batched and masked", "spin, in a field", "poisson", "kernel density"])
def test_conforms_compiled_to_machine_code(name):
    # One of each kind of code: the fused kernel, plain functions, special functions, a composition. (The sphere's
    # recurrences unroll to graphs that take minutes to become machine code.)
    CASES[name].check(compile_backend="inductor", samples=100)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_conforms_for_other_draws(name):
    CASES[name].check(samples=50_000, seed=1)


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
