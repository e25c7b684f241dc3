"""Whatever a tensor argument of a posterior is given as, PyTorch's own errors are not what the user sees."""

import pytest
import torch
from tests.support.kinds import PARTS, raw_errors
from tests.support.rows import some_slow

from massieu import posteriors
from massieu.measures import Bernoulli


def n(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


I3 = torch.eye(3, dtype=torch.float64)
C = n(10, 3)
two = torch.tensor([0.3, 0.7], dtype=torch.float64)
one = torch.tensor(1.0, dtype=torch.float64)
T = torch.log(torch.tensor([[0.2, 0.8], [0.5, 0.5]], dtype=torch.float64))
TOKENS = torch.tensor([0, 1])
LR = posteriors.BayesianLinearRegression.create(n(3, 2), I3, one)

CASES = {
    "Concepts.create": (posteriors.DiscreteLatent.create, {"log_weight": two.log(), "log_likelihood": T}),
    "Concepts.posterior": (
        lambda tokens: posteriors.DiscreteLatent.create(two.log(), T).posterior(tokens),
        {"tokens": TOKENS},
    ),
    "Concepts.pred": (
        lambda tokens: posteriors.DiscreteLatent.create(two.log(), T).log_predictive(tokens),
        {"tokens": torch.tensor(0)},
    ),
    "DM.create": (posteriors.DirichletMultinomial.create, {"concentration": two}),
    "DM.posterior": (lambda tokens: posteriors.DirichletMultinomial.create(two).posterior(tokens), {"tokens": TOKENS}),
    "DM.posterior mask": (
        lambda mask: posteriors.DirichletMultinomial.create(two).posterior(TOKENS, mask),
        {"mask": torch.tensor([True, False])},
    ),
    "HM.create": (posteriors.HiddenMarkov.create, {"log_weight": two.log(), "log_transition": T, "log_likelihood": T}),
    "GM.create": (lambda **k: posteriors.GaussianMean.create(**k), {"mean": n(3), "strength": one, "variance": one}),
    "GM.posterior": (lambda tokens: posteriors.GaussianMean.create(n(3), one, one).posterior(tokens), {"tokens": C}),
    "EF.create": (
        lambda **k: posteriors.ExponentialFamily.create(Bernoulli.create(torch.tensor([0.5]).double()), **k),
        {"chi": torch.tensor([0.5]).double(), "strength": one},
    ),
    "LR.create": (posteriors.BayesianLinearRegression.create, {"mean": n(3, 2), "precision": I3, "noise": one}),
    "LR.posterior": (lambda tokens: LR.posterior(tokens), {"tokens": n(4, 5)}),
    "LR.predict": (lambda features: LR.predict(features), {"features": n(4, 3)}),
    "NLR.create": (
        posteriors.NoisyLinearRegression.create,
        {"mean": n(3, 2), "precision": I3, "shape": one, "rate": one},
    ),
    "permutation_gap": (
        lambda tokens: posteriors.permutation_gap(lambda t: t.double() if not t.is_floating_point() else t, tokens),
        {"tokens": n(2, 4, 3)},
    ),
    "averaging_regret": (
        posteriors.averaging_regret,
        {"log_predictive": -n(4).abs(), "log_likelihoods": -n(4, 2).abs(), "log_prior": two.log()},
    ),
    "sufficiency": (
        lambda **k: posteriors.sufficiency(length=2, **k),
        {"log_prior": two.log(), "log_likelihood": T, "label": torch.eye(2)},
    ),
}


@pytest.mark.medium
@some_slow("part", range(PARTS), 1)
@pytest.mark.parametrize("name", CASES)
def test_no_argument_ends_in_an_error_of_pytorchs(name, part):
    function, arguments = CASES[name]
    assert raw_errors(function, arguments, part) == []
