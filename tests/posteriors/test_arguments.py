"""Arguments that no function of exchangeable tokens can use are named, and models of which no gap can be told."""

import math

import pytest
import torch
from tests.rows import every_row

from massieu.posteriors import (
    averaging_regret,
    model_permutation_gap,
    permutation_gap,
    sufficiency,
)
from massieu.theory import (
    GaussianTokens,
    attention_lipschitz,
    deconvolution,
    excess_risk_bound,
    harmonic_count,
    masked_gaussian_mean,
    masked_mean,
    masked_token_probabilities,
    optimal_scale,
    smoothing_error,
    softmax_limit,
    sphere_multipliers,
    transfer,
    urn_total_variation,
)

NAN, INF = math.nan, math.inf
ONE, TWO = torch.ones(1, dtype=torch.float64), torch.eye(2)
Q = torch.zeros(1, 1, 2, 2)


@every_row(
    ("call", "error", "named"),
    [
        (lambda: masked_mean(TWO, torch.full((2,), -INF), torch.zeros(2)), ValueError, "every latent excludes"),
        (lambda: masked_mean([1.0], torch.zeros(2), torch.zeros(2)), TypeError, "targets must be a tensor"),
        (
            lambda: masked_mean(TWO, torch.tensor([NAN, 0]), torch.zeros(2)),
            ValueError,
            "log_likelihood must be finite or",
        ),
        (lambda: masked_gaussian_mean(TWO * NAN, torch.zeros(2), 1.0), ValueError, "observed must be finite, got nan"),
        (lambda: masked_gaussian_mean(TWO, torch.zeros(2), "a"), TypeError, "prior_weight must be a number, got str"),
        (
            lambda: masked_token_probabilities(torch.tensor([INF, 1]), torch.ones(2)),
            ValueError,
            "counts must be finite",
        ),
        (lambda: transfer([[1.0]], TWO), TypeError, "self_supervised must be a tensor"),
        (lambda: transfer(TWO, TWO, tolerance="a"), TypeError, "tolerance must be a number, got str"),
        (lambda: excess_risk_bound("a", 1.0), TypeError, "condition_number must be a number, got str"),
        (lambda: attention_lipschitz("a", 1.0), TypeError, "radius must be a number, got str"),
        (lambda: harmonic_count(1.5, 3), TypeError, "degree must be a whole number, got float"),
        (lambda: sphere_multipliers(1, 3.0, 1.0), TypeError, "dimension must be a whole number, got float"),
        (lambda: sphere_multipliers(1, 3, "a"), TypeError, "scale must be a number or a tensor, got str"),
        (lambda: softmax_limit(torch.tensor(1.0), 3, 1.0), ValueError, r"parts must have shape \(\*lead, degrees\)"),
        (lambda: smoothing_error(-3, ONE, 0.1, 3, 1.0), ValueError, "keys must be finite and at least 1, got -3"),
        (lambda: optimal_scale(NAN, ONE, 0.1, 3), ValueError, "keys must be finite and at least 1, got nan"),
        (lambda: deconvolution([1.0], 0), TypeError, "multipliers must be a tensor"),
        (lambda: urn_total_variation([1.5, 2], 2), TypeError, "every count must be a whole number, got float"),
        (lambda: sufficiency(torch.tensor([NAN, 0]), TWO, 2), ValueError, "log_prior must be finite or −inf"),
        (lambda: sufficiency(torch.zeros(2), TWO, 2, label=-TWO), ValueError, "label must have rows of probabilities"),
        (lambda: averaging_regret(ONE * INF, torch.zeros(1, 2), torch.zeros(2)), ValueError, "log_predictive must be"),
        (lambda: averaging_regret(-ONE, torch.zeros(1, 2), torch.tensor([NAN, 0])), ValueError, "log_prior must be"),
        (lambda: GaussianTokens.create([0.0], ONE, ONE, ONE, ONE), TypeError, "key_mean must be a floating-point"),
        (lambda: GaussianTokens.create(ONE * NAN, ONE, *(ONE[None],) * 3), ValueError, "key_mean must be finite"),
        (
            lambda: GaussianTokens.create(*(torch.zeros(2),) * 2, TWO, 0 * TWO, TWO + torch.tensor([[0, 0.9], [0, 0]])),
            ValueError,
            "value_covariance must be symmetric",
        ),
        (
            lambda: permutation_gap(lambda x: torch.nn.functional.dropout(x, 0.5), torch.randn(2, 5, 3)),
            ValueError,
            "the function must be deterministic",
        ),
        (lambda: permutation_gap(3, torch.randn(2, 5, 3)), TypeError, "function must be callable, got int"),
        (lambda: permutation_gap(abs, torch.randn(2, 5, 3), positions=[1]), TypeError, "positions must be a tensor"),
    ],
)
def test_bad_arguments_are_named(call, error, named):
    with pytest.raises(error, match=named):
        call()


def test_models_of_which_no_gap_can_be_told():
    transformers = pytest.importorskip("transformers")
    ids = torch.randint(5, 50, (2, 6), generator=torch.Generator().manual_seed(0))
    small = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = transformers.BertConfig(**small, intermediate_size=32)
    partly = transformers.BertModel(bert).eval()
    partly.encoder.train()
    t5 = transformers.T5Model(
        transformers.T5Config(vocab_size=60, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    ).eval()
    whole = transformers.BertModel(bert).eval()
    for model, tokens, error, named in (
        (partly, ids, ValueError, "must be in evaluation mode"),
        (t5, ids, ValueError, "T5Model has an encoder and a decoder"),
        (transformers.BertForQuestionAnswering(bert).eval(), ids, TypeError, "last_hidden_state or logits"),
        (whole, ids.float(), TypeError, "input_ids must be a tensor of whole numbers, got a tensor of torch.float32"),
        (whole, ids.tolist(), TypeError, "input_ids must be a tensor of whole numbers, got list"),
    ):
        with pytest.raises(error, match=named):
            model_permutation_gap(model, tokens, draws=2)
    found = model_permutation_gap(t5.get_encoder(), ids, draws=2)  # relative positions, which cannot be passed
    assert found.with_positions is None and found.content > found.rounding
