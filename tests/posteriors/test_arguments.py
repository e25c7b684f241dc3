"""Arguments that no function of exchangeable tokens can use are named, and models of which no gap can be told."""

import math

import pytest
import torch
from tests.support.rows import every_row

from massieu.posteriors import averaging_regret, model_permutation_gap, permutation_gap, sufficiency

NAN, INF = math.nan, math.inf
ONE, TWO = torch.ones(1, dtype=torch.float64), torch.eye(2)


@every_row(
    ("call", "error", "named"),
    [
        (lambda: sufficiency(torch.tensor([NAN, 0]), TWO, 2), ValueError, "log_prior must be finite or -inf"),
        (lambda: sufficiency(torch.zeros(2), TWO, 2, label=-TWO), ValueError, "label must have rows of probabilities"),
        (lambda: averaging_regret(ONE * INF, torch.zeros(1, 2), torch.zeros(2)), ValueError, "log_predictive must be"),
        (lambda: averaging_regret(-ONE, torch.zeros(1, 2), torch.tensor([NAN, 0])), ValueError, "log_prior must be"),
        (
            lambda: permutation_gap(lambda x: torch.nn.functional.dropout(x, 0.5), torch.randn(2, 5, 3)),
            ValueError,
            "the function must be deterministic",
        ),
        (lambda: permutation_gap(3, torch.randn(2, 5, 3)), TypeError, "function must be a function, got 3"),
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
