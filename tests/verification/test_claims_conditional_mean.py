"""That wrong conditional mean attention fails its claims, and that settings are read."""

from types import SimpleNamespace

import pytest
from tests.support.rows import every_row
from tests.support.verification.small import SMALL

from massieu import ops
from massieu.errors import InputError
from massieu.regression import conditional_mean_attention
from massieu.verification.beyond import regression
from massieu.verification.run import verify
from massieu.verification.zhang import conditional_mean as claims


def _of(change):
    """Conditional mean attention with its keywords changed."""
    return lambda *arguments, **keywords: conditional_mean_attention(*arguments, **(keywords | change(keywords)))


def _scaled_variance(*arguments, **keywords):
    found = conditional_mean_attention(*arguments, **keywords)
    return found._replace(variance=None if found.variance is None else 1.3 * found.variance)


def _warm_attention(*arguments, **keywords):
    return ops.attention(*arguments, **(keywords | {"scale": 0.8 * keywords["scale"]}))


WARM = SimpleNamespace(attention=_warm_attention)
NEGLECTS = {"operator_ridge": None}
WRONG = {
    "Z4: the product of the variances": (
        "Z4",
        claims,
        "ridge_from",
        lambda *, noise_variance, prior_variance: noise_variance * prior_variance,
    ),
    "Z4: the prior variance for the ridge (trap 19)": (
        "Z4",
        claims,
        "ridge_from",
        lambda *, noise_variance, prior_variance: prior_variance,
    ),
    "Z4: too large a variance": ("Z4", claims, "conditional_mean_attention", _scaled_variance),
    "Z5: the operator's ridge for the matrix's (trap 19)": (
        "Z5",
        claims,
        "conditional_mean_attention",
        _of(lambda keywords: {"ridge": keywords.get("operator_ridge") or keywords["ridge"]} | NEGLECTS),
    ),
    "Z6: a ridge that grows with the length": (
        "Z6",
        claims,
        "conditional_mean_attention",
        _of(lambda keywords: {"ridge": None, "operator_ridge": 0.3}),
    ),
    "Z8: another temperature": ("Z8", claims, "ops", WARM),
    "Z8: a large ridge": ("Z8", claims, "conditional_mean_attention", _of(lambda keywords: {"ridge": 300.0})),
    "N17: another temperature": ("N17", regression, "ops", WARM),
    "N17: twice the ridge": (
        "N17",
        regression,
        "conditional_mean_attention",
        _of(lambda keywords: {"ridge": 2 * keywords["ridge"]}),
    ),
}


@pytest.mark.medium
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_conditional_mean_fails_its_claim(case: str, monkeypatch: pytest.MonkeyPatch):
    id, owner, name, replacement = WRONG[case]
    monkeypatch.setattr(owner, name, replacement)
    assert verify(id, settings=SMALL.get(id))[0].verdict == "fails"


def test_trap_21_the_proofs_ridge_is_worse_at_every_length():
    (claim,) = verify("Z6", settings=SMALL["Z6"])
    (check,) = [check for check in claim.checks if check.name.startswith("error with λ = σ²/λ₀ by that with L^{3/4}")]
    assert check.measured < 0.5


@every_row(
    ("id", "settings"),
    [
        ("Z4", {"keys": 1}),
        ("Z5", {"letters": 1}),
        ("Z5", {"tokens": 5}),
        ("Z6", {"repetitions": 10}),
        ("Z8", {"repetitions": 10}),
        ("N17", {"keys": 5}),
    ],
)
def test_too_few_to_check_anything(id: str, settings: dict[str, int]):
    with pytest.raises(InputError, match="must be at least"):
        verify(id, settings=settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("id", "settings"),
    [
        ("Z4", {"keys": 5, "dimensions": 1}),
        ("Z4", {"keys": 150, "dimensions": 5, "noise": 1.0, "prior_variance": 0.5}),
        ("Z5", {"tokens": 200, "dimensions": 4, "letters": 8}),
        ("Z6", {"repetitions": 20, "noise": 0.5}),
        ("Z8", {"scale": 1.0, "turn": -0.5}),
        ("N17", {"keys": 100, "dimensions": 8, "ridge": 10.0}),
    ],
)
def test_the_claim_holds_for_other_settings(id: str, settings: dict[str, float]):
    assert verify(id, settings=settings)[0].verdict == "holds"
