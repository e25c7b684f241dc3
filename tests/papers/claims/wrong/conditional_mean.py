"""Wrong conditional means."""

from types import SimpleNamespace

from massieu import ops
from massieu.papers.claims.beyond import regression
from massieu.papers.claims.zhang import conditional_mean as conditional_mean_claims
from massieu.regression import conditional_mean_attention


def _with_keywords(change):
    """Conditional mean attention with its keywords changed."""
    return lambda *arguments, **keywords: conditional_mean_attention(*arguments, **(keywords | change(keywords)))


def _scaled_variance(*arguments, **keywords):
    result = conditional_mean_attention(*arguments, **keywords)
    if result.variance is None:
        return result
    return result._replace(variance=1.3 * result.variance)


def _warm_attention(*arguments, **keywords):
    return ops.attention(*arguments, **(keywords | {"scale": 0.8 * keywords["scale"]}))


def _operator_ridge_as_ridge(keywords):
    return {"ridge": keywords.get("operator_ridge") or keywords["ridge"], "operator_ridge": None}


WARM = SimpleNamespace(attention=_warm_attention)
"""`ops`, with a temperature that is too high."""

WRONG = {
    "Z4: the product of the variances": (
        "Z4",
        conditional_mean_claims,
        "ridge_from",
        lambda *, noise_variance, prior_variance: noise_variance * prior_variance,
    ),
    "Z4: the prior variance for the ridge (trap 19)": (
        "Z4",
        conditional_mean_claims,
        "ridge_from",
        lambda *, noise_variance, prior_variance: prior_variance,
    ),
    "Z4: too large a variance": ("Z4", conditional_mean_claims, "conditional_mean_attention", _scaled_variance),
    "Z5: the operator's ridge for the matrix's (trap 19)": (
        "Z5",
        conditional_mean_claims,
        "conditional_mean_attention",
        _with_keywords(_operator_ridge_as_ridge),
    ),
    "Z6: a ridge that grows with the length": (
        "Z6",
        conditional_mean_claims,
        "conditional_mean_attention",
        _with_keywords(lambda keywords: {"ridge": None, "operator_ridge": 0.3}),
    ),
    "Z8: another temperature": ("Z8", conditional_mean_claims, "ops", WARM),
    "Z8: a large ridge": (
        "Z8",
        conditional_mean_claims,
        "conditional_mean_attention",
        _with_keywords(lambda keywords: {"ridge": 300.0}),
    ),
    "N17: another temperature": ("N17", regression, "ops", WARM),
    "N17: twice the ridge": (
        "N17",
        regression,
        "conditional_mean_attention",
        _with_keywords(lambda keywords: {"ridge": 2 * keywords["ridge"]}),
    ),
}
