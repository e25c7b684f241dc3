"""What the tests themselves stand on: tables of rows, bounds from rounding, programs that may be missing."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from scripts import mutants, test_table
from tests import conftest
from tests.support import cpu_times, needs, release
from tests.support.rounding import FAST_EXPONENTIAL, rounding_error
from tests.support.rows import every_row, one_in, some_slow

ROOT = Path(__file__).parent.parent


def test_every_row_that_fails_is_told():
    seen = []

    @every_row(("number", "square"), [(1, 1), (2, 5), pytest.param(3, 8, id="three")])
    def table(number: int, square: int, given: list) -> None:
        given.append(number)
        if number == 3:
            with pytest.raises(ValueError, match="never"):
                pass
        assert number**2 == square

    with pytest.raises(BaseExceptionGroup, match="2 of 3 rows fail") as caught:
        table(given=seen)
    assert seen == [1, 2, 3]
    notes = [error.__notes__ for error in caught.value.exceptions]
    assert notes == [["row: 1: (2, 5)"], ["row: three"]]


@pytest.mark.parametrize("wrong", ["nothing", "twice"])
def test_a_table_that_cannot_be_one_is_refused(wrong):
    with pytest.raises(AssertionError, match="no row" if wrong == "nothing" else "takes no other"):
        every_row("number" if wrong == "nothing" else "other", [] if wrong == "nothing" else [1])(lambda number: None)


def test_a_row_that_skips_does_not_hide_the_next():
    @every_row("number", [1, 2])
    def table(number: int) -> None:
        pytest.skip("no")

    with pytest.raises(BaseExceptionGroup, match="2 of 2 rows fail"):
        table()


def test_some_values_are_slow():
    _, values = some_slow("number", [5, 6, 7], 1, ids=["a", "b", "c"]).args
    assert [(value.values, [mark.name for mark in value.marks], value.id) for value in values] == [
        ((5,), [], "a"),
        ((6,), ["slow"], "b"),
        ((7,), ["slow"], "c"),
    ]


def test_one_combination_in_so_many_is_quick_and_every_value_is_in_one():
    names, values = one_in(2, {"letter": "abc", "number, square": [(1, 1), (2, 4)]}).args
    assert names == ["letter", "number", "square"]
    quick = [tuple(value.values) for value in values if not value.marks]
    assert quick == [("a", 1, 1), ("b", 2, 4), ("c", 1, 1)]
    assert len(values) == 6
    with pytest.raises(AssertionError, match="one in 3 leaves out a value altogether"):
        one_in(3, {"letter": "ab", "number": [1, 2]})


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_float32_stays_within_the_bound_and_a_wrong_factor_does_not(size):
    generator = torch.Generator().manual_seed(0)
    matrix, vector = (size * torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((9, 9), (9,)))
    allowed = rounding_error(torch.mv, matrix, vector, dtype=torch.float32)
    error = (torch.mv(matrix.float(), vector.float()).double() - torch.mv(matrix, vector)).abs()
    assert bool((error <= allowed).all())
    assert bool((1e-4 * torch.mv(matrix, vector).abs() > allowed).any())


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["chromium", "chromedriver"], ("chrome", "chromium", "chromedriver")),
        (["google-chrome"], ("chrome", "google-chrome", None)),
        (["google-chrome", "microsoft-edge", "msedgedriver"], ("edge", "microsoft-edge", "msedgedriver")),
        ([], None),
    ],
)
def test_browsers_are_found_by_their_names(names, found, tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    for name in names:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(folder))
        patch.setattr(needs, "_ELSEWHERE", {})
        browser = needs.browser.__wrapped__()
    if found is None:
        assert browser is None
    else:
        kind, program, driver = found
        assert browser == needs.Browser(kind, str(folder / program), driver and str(folder / driver))


@pytest.mark.slow
def test_a_program_that_is_missing_is_named_in_the_closing_lines_and_fails_where_ci_runs(tmp_path):
    test = tmp_path / "test_needy.py"
    test.write_text("import pytest\n\n@pytest.mark.needs('browser')\ndef test_it():\n    pass\n")
    code = (
        "import os, sys\nsys.path.insert(0, '.')\nimport pytest\nfrom tests.support import needs; from tests import conftest\n"
        "needs.FOUND['browser'] = lambda: None\n"
        "for os.environ['CI'] in ('', 'true'):\n"
        f"    print('status', pytest.main(['-c', 'pyproject.toml', '--rootdir', '.', {str(test)!r}], plugins=[conftest]))"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    elsewhere, _, in_ci = ran.stdout.partition("status 0\n")
    *_, told, test, closing = elsewhere.splitlines()
    assert told == f"not run, for want of {needs.INSTALL['browser']}:"
    assert test.endswith("::test_it")
    assert "1 skipped" in closing
    assert f"CI runs every test, and this one needs {needs.INSTALL['browser']}" in in_ci
    assert in_ci.endswith("status 1\n")


@pytest.mark.medium
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="living processes are looked up in /proc")
def test_processor_time_of_processes_counts_while_they_live_and_after():
    clock = cpu_times.Clock()
    before = clock.seconds()
    code = "for _ in range(2_000_000): pass\nprint(flush=True)\ninput()"
    busy = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert busy.stdin is not None and busy.stdout is not None
    busy.stdout.readline()
    alive = clock.seconds()
    busy.communicate("\n")
    assert before + 0.01 < alive <= clock.seconds() + 0.02


@pytest.mark.parametrize(
    ("mark", "keyword", "args", "found"),
    [
        ("", "", ["tests/ops"], conftest.QUICK),
        ("slow", "", ["tests/ops"], "slow"),
        ("", "S7", ["tests"], ""),
        ("", "", ["tests/ops/test_window.py::test_compiled_with_any_length"], ""),
    ],
)
def test_what_is_not_asked_for_is_the_quick_tests(mark, keyword, args, found):
    config = SimpleNamespace(option=SimpleNamespace(markexpr=mark, keyword=keyword), args=args)
    conftest.pytest_configure(config)
    assert config.option.markexpr == found


def test_the_best_cubic_for_a_power_of_two_is_off_by_what_the_fast_exponential_allows():
    """As a linear program: four coefficients and the largest error, which bounds the error at every place."""
    places = np.linspace(0, 1, 1_001)
    powers = np.vander(places, 4)
    largest = np.ones((len(places), 1))
    conditions = np.block([[powers, -largest], [-powers, -largest]])
    bounds = np.concatenate([np.exp2(places), -np.exp2(places)])
    best = linprog([0, 0, 0, 0, 1], A_ub=conditions, b_ub=bounds, bounds=[(None, None)] * 5)
    exponent_rounding = 64 / 2**23
    assert 0.9 * FAST_EXPONENTIAL < best.fun + exponent_rounding < FAST_EXPONENTIAL


def test_mutants_are_other_formulas_and_leave_messages_and_annotations_alone(tmp_path):
    source = tmp_path / "formula.py"
    source.write_text(
        "def f(x: Tensor = 1 + 1) -> Tensor:\n"
        '    raise ValueError("a" + f"{x - 1}")\n'
        "    é = -g(x) + 2 * x.sum(-1, keepdim=True)\n"
        '    return "a" + "b"\n'
    )
    found = {(mutant.kind, mutant.before, mutant.after) for mutant in mutants.mutants_of(source)}
    assert found == {
        ("sign", "-g(x) + 2 * x.sum(-1, keepdim=True)", "((-g(x)) - (2 * x.sum(-1, keepdim=True)))"),
        ("dropped term", "-g(x) + 2 * x.sum(-1, keepdim=True)", "(-g(x))"),
        ("sign", "-g(x)", "(g(x))"),
        ("factor", "2 * x.sum(-1, keepdim=True)", "(2)"),
        ("forgotten argument", "x.sum(-1, keepdim=True)", "x.sum(-1)"),
        ("axis", "x.sum(-1, keepdim=True)", "x.sum(-2, keepdim=True)"),
    }


def test_a_mutant_is_tried_by_the_tests_of_its_claims_or_of_its_file_and_of_its_folder():
    claim = mutants.mutants_of(mutants.SOURCE / "papers" / "claims" / "shim" / "population.py")[0]
    _, option, names = mutants._tests_of_file(claim)
    assert (option, names) == ("-k", "[S20] or [S20: or [S20-")
    assert mutants._tests_of_folder(claim) == ["tests/papers/claims"]
    bessel = mutants.mutants_of(mutants.SOURCE / "ops" / "bessel.py")[0]
    assert "tests/ops/test_bessel.py" in mutants._tests_of_file(bessel)
    assert mutants._tests_of_folder(bessel) == []


def test_the_table_adds_up_rooms():
    times = {
        "tests/ops/test_a.py::test_x[1]": 1.0,
        "tests/ops/test_b.py::test_y": 2.0,
        "tests/test_cli.py::test_z": 4.0,
    }
    rooms = test_table.times_by_room(times | {"collection": 8.0})
    assert rooms == {"ops": (2, 3.0), "test_cli": (1, 4.0), "collection": (0, 8.0), "all": (3, 15.0)}
    summaries = {"ops/a.py": (3, 1, 4, 2), "ops/b.py": (1, 0, 4, 0), "errors.py": (5, 0, 5, 0)}
    names = ("covered_lines", "covered_branches", "num_statements", "num_branches")
    files = {f"src/massieu/{name}": {"summary": dict(zip(names, row, strict=True))} for name, row in summaries.items()}
    assert test_table.coverage_by_room({"files": files}) == {"ops": 50.0, "errors": 100.0, "all": 1000 / 15}


@pytest.mark.slow
def test_what_ci_leaves_out_exists_and_another_form_of_it_stays():
    root = Path(__file__).parent.parent
    files = sorted({test.partition("::")[0] for test in release.FORMS} | {release.SHARDED})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *files, "-m"]

    def collected(mark: str) -> list[str]:
        done = subprocess.run([*command, mark], cwd=root, capture_output=True, text=True, check=True)
        return [line for line in done.stdout.splitlines() if line.startswith("tests/")]

    expected = [f"{test}[{case}]" for test, cases in release.FORMS.items() for case in cases]
    expected += [test for test, cases in release.FORMS.items() if not cases]
    left_out, staying = collected("release"), collected("not release")
    by_four = [test for test in left_out if test.startswith(release.SHARDED)]
    wholly = {test for test, cases in release.FORMS.items() if not cases}
    named = {test.partition("[")[0] if test.partition("[")[0] in wholly else test for test in left_out}
    assert named == {*expected, *by_four}
    assert by_four
    assert {test.replace("[4", "[2", 1) for test in by_four} <= set(staying)
    assert {test for test, cases in release.FORMS.items() if cases} <= {test.partition("[")[0] for test in staying}
