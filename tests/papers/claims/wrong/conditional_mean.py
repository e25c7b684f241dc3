"""Wrong conditional means."""

from types import SimpleNamespace

from massieu import ops
from massieu.papers.claims.beyond import regression
from massieu.papers.claims.zhang import conditional_mean as claims
from massieu.regression import conditional_mean_attention


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
