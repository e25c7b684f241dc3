"""Attention weights of models as they run, beside transformers' own eager ones in float64 and explicit matrices."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.probing import zoo
from tests.support.probing.plain import gpt
from torch import Tensor, nn

import massieu
from massieu.errors import InputError
from massieu.probing.capture.attention_call import explicit_weights
from massieu.probing.weights import weights_reading

IDS = torch.randint(3, 99, (1, 12), generator=torch.Generator().manual_seed(0))
CAPPED = ("gemma2", "gpt_oss")
"""Models whose caps and sinks the fused attention leaves out; they run eagerly."""
OF_TWO_SIDES = ("encoder_attentions", "decoder_attentions", "cross_attentions")
pytestmark = pytest.mark.medium  # models of transformers are imported and copied
ATOL = 2e-5
"""Scores of up to 60 nats in float32: 60 · 2⁻²³ of a weight, three layers deep."""


def eager(model: nn.Module, batch: dict[str, Tensor], dtype: torch.dtype = torch.float64) -> dict[str, list[Tensor]]:
    """The weights that transformers returns from eager attention, by the kind of attention."""
    doubled: Any = copy.deepcopy(model).to(dtype)
    doubled.set_attn_implementation("eager")
    wide = {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}
    with torch.no_grad():
        output = doubled(**wide, output_attentions=True)
    names = OF_TWO_SIDES if doubled.config.is_encoder_decoder else ("attentions",)
    return {name: list(output[name]) for name in names}


def by_kind(result: Any) -> dict[str, list[Tensor]]:
    """The weights of a result under the names that transformers has for them."""
    found: dict[str, list[Tensor]] = {}
    several = any(site.kind == "cross" for site in result)
    for site in result:
        name = "attentions"
        if several:
            side = "encoder" if site.name.startswith("encoder") else "decoder"
            name = "cross_attentions" if site.kind == "cross" else f"{side}_attentions"
        found.setdefault(name, []).append(site.weights)
    return found


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", sorted({*zoo.REQUIRED, "albert"} - {"vit", "modernbert"}))
def test_like_eager_attention(name, padded):
    model: Any = zoo.fresh(name)
    batch = zoo.inputs(name, padded=padded)
    if name in CAPPED:
        # In float64 transformers gives NaN to padding that sees no key in its window, which spreads to real tokens.
        model.set_attn_implementation("eager")
        expected = eager(model, batch, torch.float32)
    else:
        model = model.double()
        expected = eager(model, batch)
    found = by_kind(massieu.attention_weights(model, batch))
    assert found.keys() == expected.keys()
    real = batch["attention_mask"].bool()
    for kind, layers in expected.items():
        assert len(found[kind]) == len(layers)
        for weights, own in zip(found[kind], layers, strict=True):
            # Transformers forms the softmax in float32 also where the rest is in float64.
            mine, theirs = weights.transpose(1, 2)[real].double(), own.transpose(1, 2)[real].double()
            torch.testing.assert_close(mine, theirs, rtol=0, atol=ATOL)


def test_images():
    model = zoo.fresh("vit").double()
    batch = {name: value.double() for name, value in zoo.inputs("vit").items()}
    result = massieu.attention_weights(model, batch)
    for site, own in zip(result, eager(model, batch)["attentions"], strict=True):
        torch.testing.assert_close(site.weights, own.double(), rtol=0, atol=ATOL)
    assert result.sites[0].key_tokens is not None
    assert result.sites[0].key_tokens[0][:2] == ["[CLS]", "row 1, column 1"]


def test_a_model_in_plain_pytorch():
    model = gpt().double()
    seen: dict[str, Tensor] = {}
    x = torch.randint(0, 20, (2, 7), generator=torch.Generator().manual_seed(1))
    result = massieu.attention_weights(model, x)
    attention = nn.MultiheadAttention(8, 2, batch_first=True).double().eval()
    states = torch.randn(2, 5, 8, dtype=torch.float64)
    with torch.no_grad():
        _, seen["weights"] = attention(states, states, states, average_attn_weights=False)
    found = massieu.attention_weights(attention, (states, states, states))
    torch.testing.assert_close(found.sites[0].weights, seen["weights"], rtol=0, atol=1e-14)
    assert all(torch.equal(site.weights, site.weights.tril()) for site in result)


class Documents(nn.Module):
    """Causal attention within the documents of packed rows."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        from massieu import ops

        query, key, value = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.projections(x).chunk(3, -1))
        documents = ops.Documents.of_lengths([3, x.shape[1] - 3])
        output = ops.attention(query, key, value, documents=documents, is_causal=True).output
        return output.transpose(1, 2).flatten(2)


def test_packed_documents():
    torch.manual_seed(0)
    model, x = Documents().double().eval(), torch.randn(1, 7, 8, dtype=torch.float64)
    with torch.no_grad():
        query, key, _ = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in model.projections(x).chunk(3, -1))
    seen = torch.ones(7, 7).tril().bool()
    seen[3:, :3] = False
    expected = (query @ key.mT / 2).masked_fill(~seen, -torch.inf).softmax(-1)
    torch.testing.assert_close(massieu.attention_weights(model, x).sites[0].weights, expected, rtol=0, atol=1e-14)


def test_weights_that_are_no_softmax():
    from massieu.nn import Attention, EntmaxHeads, NormalizedHeads

    torch.manual_seed(0)
    x = 8 * torch.randn(1, 6, 8, dtype=torch.float64)
    sparse = Attention(8, 2, heads=EntmaxHeads(), batch_first=True).double().eval()
    with torch.no_grad():
        own = sparse(x, need_weights=True, average_attn_weights=False)[1]
    found = massieu.attention_weights(sparse, x).sites[0]
    torch.testing.assert_close(found.weights, own, rtol=0, atol=1e-12)
    assert bool((found.weights == 0).any())
    assert not found.no_distribution
    signed = massieu.attention_weights(Attention(8, 2, heads=NormalizedHeads(), batch_first=True).double().eval(), x)
    assert signed.sites[0].no_distribution
    with pytest.raises(InputError, match="rollout needs weights that add up to 1"):
        signed.rollout()


def test_layers_and_heads_that_are_asked_for():
    model, batch = zoo.model("llama"), zoo.inputs("llama")
    whole = massieu.attention_weights(model, batch)
    part = massieu.attention_weights(model, batch, layers=[2], heads=[3, 1])
    assert [(site.layer, site.heads) for site in part] == [(2, (3, 1))]
    assert torch.equal(part.of_head(2, 3), whole.of_head(2, 3))
    assert torch.equal(part.sites[0].weights[:, 1], whole.sites[2].weights[:, 1])


def test_a_sink_takes_its_share():
    model: Any = zoo.fresh("gpt_oss")
    model.set_attn_implementation("eager")
    for site in massieu.attention_weights(model, zoo.inputs("gpt_oss")):
        assert site.sink is not None
        torch.testing.assert_close(site.weights.sum(-1) + site.sink, torch.ones_like(site.sink))


@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
def test_half_precision(autocast):
    """Exact weights of the queries and keys that half precision has rounded."""
    torch.manual_seed(0)
    model, x = Documents().eval(), 3 * torch.randn(1, 7, 8)
    if not autocast:
        model, x = model.bfloat16(), x.bfloat16()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        parts = model.projections(x).double().chunk(3, -1)
        found = massieu.attention_weights(model, x).sites[0].weights
    query, key, _ = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in parts)
    seen = torch.ones(7, 7).tril().bool()
    seen[3:, :3] = False
    assert found.dtype == torch.float32
    expected = (query @ key.mT / 2).masked_fill(~seen, -torch.inf).softmax(-1)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=torch.finfo(torch.float32).eps)


def test_weights_that_are_not_asked_for_are_never_formed(monkeypatch):
    formed: list[tuple[int, ...]] = []

    def recorded(call: Any) -> Any:
        formed.append(tuple(call.query.shape[:3]))
        return explicit_weights(call)

    monkeypatch.setattr(weights_reading, "explicit_weights", recorded)
    monkeypatch.setattr(weights_reading, "SCORES", 2 * 12 * 5)  # of two heads, five queries at a time
    model, batch = zoo.model("llama"), {"input_ids": IDS}
    part = massieu.attention_weights(model, batch, layers=[1], heads=[0, 2])
    assert formed == [(1, 2, 5), (1, 2, 5), (1, 2, 2)]
    whole = massieu.attention_weights(model, batch).of_head(1, 2)
    torch.testing.assert_close(part.of_head(1, 2), whole, rtol=0, atol=1e-7)


def test_rollout_and_distance():
    model, batch = zoo.fresh("gpt2").double(), {"input_ids": IDS}
    result = massieu.attention_weights(model, batch)
    layers = eager(model, batch)["attentions"]
    product = torch.eye(12, dtype=torch.float64)
    for layer in layers:
        product = 0.5 * (layer[0].mean(0) + torch.eye(12, dtype=torch.float64)) @ product
    torch.testing.assert_close(result.rollout()[0].double(), product, rtol=0, atol=ATOL)
    places = torch.arange(12, dtype=torch.float64)
    apart = (places[:, None] - places).abs()
    distance = (layers[1][0] * apart).sum(-1)[:, 1:].mean(-1)  # the first token sees itself alone
    torch.testing.assert_close(result.mean_distance()["h.1.attn"].double(), distance, rtol=0, atol=12 * ATOL)
    with pytest.raises(InputError, match=r"rollout needs all 3 layers, and has \[0, 2\]"):
        massieu.attention_weights(model, batch, layers=[0, 2]).rollout()
    with pytest.raises(InputError, match=r"rollout needs all 4 heads of h.0.attn, and has 1"):
        massieu.attention_weights(model, batch, heads=0).rollout()


def test_the_strongest_leave_out_single_keys():
    result = massieu.attention_weights(zoo.model("gpt2"), {"input_ids": IDS})
    strongest = result.strongest(5)
    assert all(each.visible >= 2 for each in strongest)
    largest = torch.stack([site.weights[0, :, 1:] for site in result]).max()
    assert strongest[0].weight == pytest.approx(float(largest))
    assert all(each.key > 0 for each in result.strongest(5, first=False))


def test_the_model_is_left_as_it_was():
    model: Any = zoo.fresh("gpt2")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    with torch.no_grad():
        output = model(IDS).last_hidden_state
    for layers in (None, 7):
        try:
            massieu.attention_weights(model, {"input_ids": IDS}, layers=layers)
        except InputError:
            assert layers == 7
    with pytest.raises(InputError, match="bytes, more than max_bytes"):
        massieu.attention_weights(model, {"input_ids": IDS}, max_bytes=100)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(model(IDS).last_hidden_state, output)


def test_the_model_is_left_as_it_was_after_an_error_within_it():
    model: Any = zoo.fresh("gpt2")
    runs: list[int] = []

    def fail(*_: Any) -> None:
        runs.append(1)
        if len(runs) == 3:  # the stock pass and the first look have passed: while weights are read
            raise RuntimeError("within the model")

    handle = model.h[1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="within the model"):
        massieu.attention_weights(model, {"input_ids": IDS})
    handle.remove()
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    massieu.attention_weights(model, {"input_ids": IDS})


def test_no_more_is_held_than_allowed():
    model, batch = zoo.model("gpt2"), {"input_ids": IDS}
    with pytest.raises(
        InputError, match=r"the weights of 12 heads on 12 queries and 12 keys, with what is held, take 6,912 bytes"
    ):
        massieu.attention_weights(model, batch, max_bytes=12 * 12 * 12 * 4 - 1)
    massieu.attention_weights(model, batch, max_bytes=12 * 12 * 12 * 4)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "layer": ({"layers": 3}, "GPT2Model has no layer 3; its layers are 0 to 2"),
    "head": ({"heads": [0, 4]}, "h.0.attn has no head 4; its heads are 0 to 3"),
    "negative": ({"layers": -1}, "layers must be whole numbers from 0, got -1"),
    "none": ({"heads": []}, "heads must name at least one"),
    "word": ({"heads": "all"}, "heads must be a whole number or a list of them, got 'all'"),
    "no inputs": ({"inputs": None}, "give a text, a list of messages, or a batch of tensors"),
    "several": ({"inputs": ["a", "b"]}, "one prompt is read at a time, got 2 texts"),
    "no tokenizer": ({"inputs": "a"}, "GPT2Model has no tokenizer to read a prompt with"),
}


@pytest.mark.parametrize("row", WRONG)
def test_what_is_refused(row):
    given, sentence = WRONG[row]
    with pytest.raises(InputError, match=sentence.replace("(", r"\(").replace("[", r"\[")):
        massieu.attention_weights(zoo.model("gpt2"), **{"inputs": {"input_ids": IDS}} | given)


def test_models_that_cannot_be_read():
    with pytest.raises(InputError, match="training mode"):
        massieu.attention_weights(zoo.fresh("gpt2").train(), {"input_ids": IDS})
    with torch.device("meta"):
        empty = nn.MultiheadAttention(8, 2)
    with pytest.raises(InputError, match="is on the meta device or lazy, so it has no weights to read"):
        massieu.attention_weights(empty.eval(), (torch.ones(3, 1, 8),) * 3)


def test_a_picture(tmp_path):
    from matplotlib.figure import Figure

    result = massieu.attention_weights(zoo.model("gpt2"), {"input_ids": IDS}, layers=1)
    axes = Figure().subplots()
    assert result.plot(1, 2, ax=axes) is axes
    drawn = axes.images[0].get_array()
    assert drawn is not None
    torch.testing.assert_close(torch.tensor(drawn), result.of_head(1, 2)[0])
    result.plot(1, 3).figure.savefig(tmp_path / "head.png")
    assert (tmp_path / "head.png").stat().st_size > 1000
    with pytest.raises(InputError, match="there are weights of several heads; name one"):
        result.plot()
    with pytest.raises(InputError, match="there are no weights of layer 0; there are those of layers"):
        result.plot(0, 0)


def test_nan_is_said_and_other_weights_are_still_ranked():
    """One token's embedding is NaN: in the first layer, queries before it are as they were."""
    model = zoo.fresh("gpt2")
    ids = torch.arange(3, 9)[None]
    sound = massieu.attention_weights(model, ids)
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = torch.nan  # the token at place 4
    with pytest.warns(UserWarning, match=r"attention weights of h\.0\.attn and 2 more are NaN; .*NaN first in wte"):
        broken = massieu.attention_weights(model, ids)
    kept = sound["h.0.attn"].weights[:, :, 1:4, :].flatten().topk(3).values.tolist()
    assert [each.weight for each in broken["h.0.attn"].strongest(3)] == pytest.approx(kept, rel=1e-6)
    of_heads = sound["h.0.attn"].weights[0, :, 1:4].flatten(1).amax(-1).tolist()
    found = broken["h.0.attn"].strongest_of_each_head()
    assert [each.weight for each in found] == pytest.approx(of_heads, rel=1e-6)
    assert len(broken.strongest(3)) == 3


def test_numbers_of_other_libraries_name_layers_and_heads():
    model, batch = zoo.model("gpt2"), zoo.inputs("gpt2")
    expected = massieu.attention_weights(model, batch, layers=1, heads=[0, 2]).sites[0].weights
    found = massieu.attention_weights(model, batch, layers=np.int64(1), heads=np.array([0, 2]))
    assert torch.equal(found.sites[0].weights, expected)
    found = massieu.attention_weights(model, batch, layers=torch.tensor(1), heads=torch.tensor([0, 2]))
    assert torch.equal(found.sites[0].weights, expected)


BAD_READINGS = {
    "head": (
        lambda result: result.sites[0].of_head(9),
        r"no weights of head 9 of h\.0\.attn; there are \[0, 1, 2, 3\]",
    ),
    "site": (lambda result: result.of_head(0, 0, "nope"), r"layer 0 has no attention site 'nope'; it has h\.0\.attn"),
    "number": (lambda result: result.strongest(2.5), "count must be a whole number, got 2.5"),
    "negative": (lambda result: result.strongest(-1), "count must be a whole number, at least 0"),
    "of a site": (lambda result: result.sites[0].strongest(-1), "count must be a whole number, at least 0"),
    "a row by a name": (lambda result: result.plot(0, 0, row="a"), "row must be a whole number, got 'a'"),
    "a row beyond": (lambda result: result.plot(0, 0, row=99), r"row must be a number from 0 to \d+, got 99"),
}


@pytest.mark.parametrize("row", BAD_READINGS)
def test_what_a_result_refuses(row):
    call, sentence = BAD_READINGS[row]
    with pytest.raises(InputError, match=sentence):
        call(massieu.attention_weights(zoo.model("gpt2"), zoo.inputs("gpt2")))


def test_a_list_of_one_prompt():
    with pytest.raises(InputError, match="a prompt is given as a text by itself, got a list of one text"):
        massieu.attention_weights(zoo.model("gpt2"), ["a cat"])


def test_a_long_encoder_does_not_count_for_a_short_decoder():
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True).eval()
    inputs = torch.randn(1, 50, 8), torch.randn(1, 2, 8)
    needed = 2 * 4 * (50 * 50 + 2 * 2 + 2 * 50)  # two heads, float32; encoder, decoder, and one on the other
    assert len(massieu.attention_weights(model, inputs, max_bytes=needed)) == 3
    with pytest.raises(InputError, match=f"take {needed:,} bytes, more than max_bytes={needed - 1:,}"):
        massieu.attention_weights(model, inputs, max_bytes=needed - 1)


class WithSpareAttention(nn.Module):
    """Of its two attention modules one is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.MultiheadAttention(8, 2, batch_first=True)
        self.spare = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x, x, x)[0]


def test_attention_that_was_not_seen_is_named():
    result = massieu.attention_weights(WithSpareAttention().eval(), torch.randn(1, 5, 8))
    assert [site.name for site in result] == ["used"]
    assert result.refused == {"spare": "it looks like attention, and was not seen attending"}


def test_a_result_prints_shortly_and_a_notebook_shows_its_strongest_weights() -> None:
    model = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    tokens = torch.randn(1, 200, 8)
    result = massieu.attention_weights(model, (tokens, tokens, tokens))
    assert len(repr(result)) < 400
    assert "2 heads of 1 attention module" in repr(result) and "1 × 200 queries over 200 keys" in repr(result)
    assert result._repr_html_().count("<tr>") == 6
    hostile = replace(result.sites[0], query_tokens=[["<script>"] * 200], key_tokens=[["</td>\x1b"] * 200])
    shown = replace(result, sites=(hostile,))._repr_html_()
    assert "<script" not in shown and "&lt;script&gt;" in shown and "\x1b" not in shown
