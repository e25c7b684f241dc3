"""The frame of the claims: checks, the registry, settings, what `verify` returns."""

import math
import re
from collections.abc import Iterator

import pytest
import torch
from tests.support.papers.samples import as_printed, false, noise, register

from massieu.errors import InputError
from massieu.papers.claims import registry
from massieu.papers.claims.claim import (
    Check,
    all_raise,
    as_published,
    at_least,
    at_most,
    close,
    near_in_standard_errors,
)
from massieu.papers.claims.inputs import check_at_least
from massieu.papers.claims.oracles import differences, log_integral, spin_states
from massieu.papers.claims.run import verify

pytestmark = pytest.mark.usefixtures("empty_registry")


# --- checks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "holds"),
    [
        (at_most("", 1.0, 1.0), True),
        (at_most("", torch.tensor([0.5, 1.1]), 1.0), False),
        (at_most("", math.nan, 1.0), False),
        (at_least("", torch.tensor([1.0, 2.0]), 1.0), True),
        (at_least("", torch.tensor([0.9, 2.0]), 1.0), False),
        (at_least("", torch.tensor([math.nan, 2.0]), 1.0), False),
        (at_least("", -1e-13, -1e-12), True),
        (close("", 1e6 + 0.9e-4, 1e6), True),
        (close("", 1e6 + 1.1e-4, 1e6), False),
        (close("", torch.tensor([1.0, math.inf]), torch.tensor([1.0, math.inf])), True),
        (close("", math.inf, 1.0), False),
        (close("", 1.0, math.inf), False),
        (close("", torch.tensor([1.0, math.nan]), torch.ones(2)), False),
        (near_in_standard_errors("", 1.0, 0.0, 0.2), True),
        (near_in_standard_errors("", -1.05, 0.0, 0.2), False),
        (near_in_standard_errors("", 0.0, 0.0, 0.0), False),
        (all_raise("", ValueError, lambda: int("x"), lambda: int("y")), True),
        (all_raise("", ValueError, lambda: int("x"), lambda: int("1")), False),
    ],
)
def test_a_check_holds_on_its_side_of_the_bound(check: Check, holds: bool):
    assert check.holds is holds


def test_a_check_reads_the_entry_nearest_to_its_bound():
    assert at_most("", torch.tensor([0.5, -3.0]), 1.0).measured == 0.5
    assert at_least("", torch.tensor([0.5, -3.0]), 1.0).measured == -3.0
    assert near_in_standard_errors("", torch.tensor([1.0, -2.0]), 0.0, 0.5).measured == 4.0
    assert close("", torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0])).measured == 1.0


def test_shapes_are_not_broadcast_and_other_errors_are_not_hidden():
    with pytest.raises(ValueError, match=r"a and b: shapes \(2, 1\) and \(2,\) differ"):
        close("a and b", torch.ones(2, 1), torch.ones(2))
    with pytest.raises(ZeroDivisionError):
        all_raise("", ValueError, lambda: 1 // 0)


def test_the_worst_check_speaks_for_the_claim():
    def body() -> Iterator[Check]:
        yield at_most("small", 1e-12, 1e-10)
        yield at_least("near", 4.0, 3.0)
        yield at_most("nothing allowed", 0.0, 0.0)
        yield as_published(close("printed", 1.0, 2.0))

    claim = register("S1", body, published="…", corrected="…")()
    assert (claim.worst.name, claim.measured, claim.bound, claim.verdict) == ("near", 4.0, 3.0, "holds")

    def failing() -> Iterator[Check]:
        yield at_most("just", 1.1, 1.0)
        yield at_most("far", 7.0, 1.0)

    assert register("S2", failing)().worst.name == "far"


# --- second ways to a number -----------------------------------------------------------------------------------------


def test_differences_give_gradient_and_hessian():
    point = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    matrix = torch.tensor([[2.0, 1.0, 0.0], [1.0, 3.0, -1.0], [0.0, -1.0, 4.0]], dtype=torch.float64)

    def quadratic(x: torch.Tensor) -> torch.Tensor:
        return ((x @ matrix) * x).sum(-1) / 2

    torch.testing.assert_close(differences(quadratic, point), point @ matrix, rtol=0, atol=1e-8)
    hessian = differences(lambda x: differences(quadratic, x, 1e-4), point, 1e-4)
    torch.testing.assert_close(hessian, matrix.expand(5, 3, 3), rtol=0, atol=1e-6)


def test_quadrature_and_enumeration():
    shift = torch.tensor([0.0, 500.0], dtype=torch.float64)[:, None]  # overflows without the maximum taken out
    log_integrals = log_integral(lambda x: shift - x**2 / 2, -12.0, 12.0)
    torch.testing.assert_close(log_integrals, shift[:, 0] + math.log(2 * math.pi) / 2, rtol=1e-13, atol=0)
    assert sorted(map(tuple, spin_states(2).tolist())) == [(-1, -1), (-1, 1), (1, -1), (1, 1)]


# --- the registry ----------------------------------------------------------------------------------------------------


def test_claims_stand_in_reading_order():
    order = ["S1", "S2", "S10", "B2", "B10", "Z1", "X3", "X3b", "X8", "X10", "N4"]
    for id in sorted(order, reverse=True):
        register(id)
    assert list(registry.claims()) == order
    assert [claim.id for claim in verify()] == order
    assert [claim.id for claim in verify(["x3B", "s2", "S2"])] == ["X3b", "S2"]


def test_a_number_is_taken_once():
    register("S7")
    with pytest.raises(ValueError, match="claim S7 is registered twice"):
        register("S7")


@pytest.mark.parametrize("id", ["S", "7", "s7", "S07", "Q7", "S7bc", "S 7", ""])
def test_a_malformed_number(id):
    with pytest.raises(ValueError, match="such as S7 or X3b"):
        register(id)


def test_a_badly_made_claim_is_refused():
    def without_default(N: int) -> Iterator[Check]:
        yield close("", N, N)

    def with_a_flag(fast: bool = True) -> Iterator[Check]:
        yield close("", 1.0, 1.0)

    def without_annotation(N=3) -> Iterator[Check]:
        yield close("", N, N)

    for body in (without_default, with_a_flag, without_annotation):
        with pytest.raises(TypeError, match="needs an int or float as annotation and default"):
            register("S1", body)
    with pytest.raises(ValueError, match="say what is corrected"):
        register("S1", published="a falsehood")
    for status in ("reconstructed", "abstract only"):
        with pytest.raises(ValueError, match="a source that was not read asserts nothing"):
            register("S1", as_printed, status=status, published="a falsehood", corrected="the truth")
    with pytest.raises(TypeError, match="go together"):
        register("S2", published="a falsehood", corrected="the truth")()
    with pytest.raises(TypeError, match="go together"):
        register("S3", as_printed)()
    with pytest.raises(TypeError, match="checks nothing that is true"):
        register("S4", lambda: iter(()))()


def _square_root(scale: float = 1.0, seed: int = 0) -> Iterator[Check]:
    yield at_least("root", math.sqrt(scale), 0.0)


def _refuses(scale: float = 1.0) -> Iterator[Check]:
    check_at_least(0.5, scale=scale)
    yield at_least("root", math.sqrt(scale), 0.0)


def _draws_outside(seed: int = 0) -> Iterator[Check]:
    """Not the user's mistake, though the error is one of bad input."""
    raise InputError("the covariance\nis not positive definite.")
    yield


def test_a_claim_that_cannot_be_computed_says_why_and_the_rest_run():
    register("S4", _draws_outside)
    register("S5", _square_root)
    register("S6")
    first, second, third = verify()
    assert [claim.verdict for claim in (first, second, third)] == ["could not be checked", "holds", "holds"]
    assert first.reason is not None
    # In one sentence, with the place where it happened.
    assert re.fullmatch(r"InputError: the covariance is not positive definite \(\w+\.py:\d+\)\.", first.reason)
    assert (first.checks, first.worst, first.parameters) == ((), None, {"seed": 0})
    assert math.isnan(first.measured)
    assert (second.reason, third.reason) == (None, None)
    result = verify()
    assert (result.ok, result.complete) == (False, True)
    assert result.summary == "2 of 3 claims hold, 1 could not be checked (S4)."
    with pytest.raises(InputError):  # called by itself, it is an error as any
        registry.claims()["S4"]()


def test_a_setting_that_a_claim_refuses_is_an_error_and_one_that_it_cannot_do_is_a_reason():
    register("S5", _square_root)
    (claim,) = verify("S5", settings={"scale": -1})
    assert claim.verdict == "could not be checked"
    assert claim.reason is not None
    assert claim.reason.startswith("ValueError: ")
    register("S6", _refuses)
    with pytest.raises(InputError, match=r"^scale must be at least 0\.5 here, got -1\.0$"):
        verify("S6", settings={"scale": -1})


def test_a_claim_that_could_not_be_checked_says_nothing_of_what_was_published():
    register("S7", _draws_outside, published="A falsehood.", corrected="The truth.")
    (claim,) = verify("S7")
    assert (claim.published_verdict, claim.outcome) == ("could not be checked", "")
    assert verify().summary == "0 of 1 claim holds, 1 could not be checked (S7)."


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [("7", 7), ("2e5", 200_000), ("200_000", 200_000), ("3.0", 3), (" 12 ", 12), (5, 5), (2**53 + 1, 2**53 + 1)],
)
def test_a_whole_number_is_read(text, value):
    parameters = register("S15", noise).read({"N": text})
    assert parameters == {"N": value, "width": 1.0, "seed": 0}
    assert type(parameters["N"]) is int


def test_a_number_is_read():
    assert register("S15", noise).read({"width": "1e-3"})["width"] == 1e-3
    assert register("S16", noise).read({"width": 2})["width"] == 2.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"M": "3"}, r"claim S15 has no parameter 'M'; it has N=100, width=1\.0, seed=0"),
        ({"N": "many"}, "N of claim S15 must be a whole number, at least 1, got 'many'"),
        ({"N": "2.5"}, "N of claim S15 must be a whole number, at least 1, got '2.5'"),
        ({"N": "0"}, "N of claim S15 must be a whole number, at least 1, got '0'"),
        ({"N": "inf"}, "N of claim S15 must be a whole number"),
        ({"N": "9" * 400}, "N of claim S15 must be a whole number"),
        ({"N": 10**400}, "N of claim S15 must be a whole number"),
        ({"seed": "-1"}, "seed of claim S15 must be a whole number, at least 0, got '-1'"),
        ({"width": "nan"}, "width of claim S15 must be a finite number, got 'nan'"),
        ({"width": "wide"}, "width of claim S15 must be a finite number, got 'wide'"),
    ],
)
def test_settings_that_cannot_be_read(settings, message):
    register("S15", noise)
    with pytest.raises(InputError, match=message):
        verify("S15", settings=settings)


def test_nothing_runs_before_every_setting_was_read():
    def body(M: int = 1) -> Iterator[Check]:
        pytest.fail("it ran")
        yield

    register("S1", body)
    register("S15", noise)
    with pytest.raises(InputError, match="claim S15 has no parameter 'M'"):
        verify(["S1", "S15"], settings={"M": 2})
    with pytest.raises(InputError, match="no claim was named"):
        verify([])


def test_a_seed_gives_the_same_numbers_and_touches_no_global_state():
    register("S1")
    register("S15", noise)
    state = torch.get_rng_state()
    first, again, other = (verify(seed=seed) for seed in (3, 3, 4))
    assert first[1].measured == again[1].measured != other[1].measured
    assert (first[0].parameters, first[1].parameters) == ({}, {"N": 100, "width": 1.0, "seed": 3})
    assert torch.equal(state, torch.get_rng_state())


def test_progress_is_called_after_each_claim():
    register("S1")
    register("S2", false)
    seen = []
    result = verify(progress=lambda claim, done, total: seen.append((claim.id, claim.verdict, done, total)))
    assert seen == [("S1", "holds", 1, 2), ("S2", "fails", 2, 2)]
    assert (len(result), result[0], result[-1:]) == (2, result.claims[0], result.claims[1:])
