"""Example windows: every token's numbers, however many queries are formed at once."""

import numpy as np
import pytest
import torch
from tests.support.probing import zoo
from tests.support.rows import every_row
from torch import nn

from massieu.probing.capture.attention_call import AttentionCall, AttentionSite
from massieu.probing.capture.sites import SiteInfo
from massieu.probing.reading import examples
from massieu.probing.reading.examples import ExampleWindow, example_length
from massieu.probing.run import probe
from massieu.report.tables import sites_of

HEADS, LENGTH, KEYS, SIZE = 3, 11, 13, 4


@every_row(
    "heads, length, recorded, expected",
    [
        (72, 256, 0, 256),
        (72, 256, 256, 256),
        (270, 256, 256, 256),
        (1_024, 256, 0, 256),
        (1_024, 256, 256, 0),
        (10_000, 256, 0, 26),
        (10**6, 256, 0, 16),
        (10**6, 9, 0, 9),
        (72, 32_768, 0, 1_024),
        (72, 32_768, 1_024, 1_024),
        (0, 256, 0, 256),
    ],
)
def test_all_tokens_of_a_window_are_recorded_where_they_fit(heads, length, recorded, expected):
    assert example_length(heads, length, recorded) == expected


def _call(causal: bool) -> AttentionCall:
    generator = torch.Generator().manual_seed(3)
    query, key, value = (
        torch.randn(2, heads, length, SIZE, generator=generator)
        for heads, length in ((HEADS, LENGTH), (1, KEYS), (1, KEYS))
    )
    bias = torch.randn(1, HEADS, LENGTH, KEYS, generator=generator)
    bias[..., 1, :] = -torch.inf
    weight = None if causal else bias.masked_fill(torch.rand(bias.shape, generator=generator) < 0.2, -torch.inf)
    output = torch.zeros(2, LENGTH, HEADS, SIZE)
    return AttentionCall(AttentionSite("a"), nn.Identity(), query, key, value, weight, causal, 0.7, None, None, output)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("at_once", [1, 200, 10**6])
def test_numbers_are_those_of_explicit_attention_however_many_queries_are_formed_at_once(at_once, causal, monkeypatch):
    monkeypatch.setattr(examples, "_SCORES", at_once)
    call = _call(causal)
    window = ExampleWindow("a window", {}, 10, row=1)
    info = SiteInfo(4, call.site, "", 0, "self", HEADS, 1, SIZE, SIZE)
    window.add(info, call)
    assert window.recorded == 10
    scores = 0.7 * np.einsum("hld,nd->hln", call.query[1].double().numpy(), call.key[1, 0].double().numpy())
    if call.log_weight is None:
        prior = np.where(np.tri(LENGTH, KEYS, dtype=bool), 0.0, -np.inf)[None].repeat(HEADS, 0)
    else:
        prior = call.log_weight[0].double().numpy()
    for head in range(HEADS):
        for place in range(10):
            seen = prior[head, place] > -np.inf
            entry = {name: values[head][place] for name, values in window.sites["4"].items()}
            if not seen.any():
                assert np.isnan(entry["entropy"])
                continue
            score, log_weight = scores[head, place, seen], prior[head, place, seen]
            log_z, share = np.logaddexp.reduce(score + log_weight), np.exp(log_weight) / np.exp(log_weight).sum()
            weights = np.exp(score + log_weight - log_z)
            selective = log_z - np.logaddexp.reduce(log_weight) - share @ score
            close = {"rtol": 2e-5, "atol": 2e-5}
            np.testing.assert_allclose(entry["entropy"], -(weights * np.log(weights)).sum(), **close)
            np.testing.assert_allclose(entry["selective_log_partition"], selective, **close)
            kept = np.sort(weights)[::-1][:5]
            np.testing.assert_allclose(entry["top_weights"][: len(kept)], kept, **close)
            np.testing.assert_allclose(
                weights[np.searchsorted(np.flatnonzero(seen), entry["top_keys"][0])], kept[0], **close
            )


@pytest.mark.medium
def test_a_window_of_three_hundred_tokens_has_numbers_of_all():
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=50, max_position_embeddings=300)).eval()
    batch = {"input_ids": torch.randint(3, 50, (1, 300))}
    result = probe(model, [batch], statistics=["entropy"])
    (example,) = result.details["examples"]
    assert [len(row) for row in example["sites"]["0"]["entropy"]] == [300, 300]


@pytest.mark.medium
@pytest.mark.skipif(not zoo.T5_DISPATCHES, reason="this release of transformers does not dispatch T5's attention")
def test_the_attention_of_an_encoder_decoder_is_of_three_kinds():
    result = probe(zoo.model("t5", num_layers=1), [zoo.inputs("t5", rows=1)], statistics=["entropy"], draws=0)
    groups = {site.name: site.group for site in sites_of(result.run, result.heads)}
    found = {(site.split(".")[0], site.rsplit(".", 1)[1]): group for site, group in groups.items()}
    assert found == {
        ("encoder", "SelfAttention"): "encoder self-attention",
        ("decoder", "SelfAttention"): "decoder causal self-attention",
        ("decoder", "EncDecAttention"): "decoder cross-attention",
    }
