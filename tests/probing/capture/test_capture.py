"""The model's results stay its own, and what is captured reproduces its attention."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support.probing import zoo
from tests.support.rows import every_row

from massieu.errors import InputError
from massieu.probing.capture.attention_call import AttentionCall, AttentionSite
from massieu.probing.capture.interface import stock_implementations
from massieu.probing.capture.routes import capturing
from massieu.probing.checks.check import self_check_error
from massieu.probing.model.model_inputs import model_inputs


def run(name: str, padded: bool, observer=lambda call: None):
    model = zoo.model(name)
    batch = zoo.inputs(name, padded=padded)
    prepared = model_inputs(model, batch)
    with torch.no_grad():
        stock = model(**prepared)[0]
        with capturing(model, observer) as capture:
            probed = model(**prepared)[0]
    return batch, stock, probed, capture


@pytest.mark.medium
@every_row("padded", [False, True], ids=["full", "padded"])
@every_row("name", sorted(zoo.MAKERS))
def test_captured_tensors_reproduce_the_attention_and_the_output_is_unchanged(name, padded):
    """Softmax of the captured scores times the captured values, formed in the test, is the model's attention output."""
    calls = []
    batch, stock, probed, _ = run(name, padded, calls.append)
    real = zoo.real(batch, tuple(stock.shape[:2]))
    assert float((stock - probed)[real].abs().max()) <= 1e-5
    assert calls
    for call in calls:
        groups = call.query.shape[1] // call.key.shape[1]
        key, value = (t.double().repeat_interleave(groups, 1) for t in (call.key, call.value))
        scores = call.query.double() @ key.mT * call.scale
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        if call.log_weight is not None and call.log_weight.dtype != torch.bool:
            scores = scores + call.log_weight.double()
        scores = scores.masked_fill(~call.visible(), -torch.inf)
        weights = scores.exp()
        total = weights.sum(-1, keepdim=True)
        if call.sink is not None:
            total = total + call.sink.double().exp()[:, None, None]
        expected = (weights / total @ value).transpose(1, 2)
        known = zoo.real(batch, tuple(expected.shape[:2]))
        assert torch.allclose(expected[known], call.output.double()[known], atol=2e-5 * float(call.output.abs().max()))
        assert self_check_error(call, known) <= 1e-4


def test_the_self_check_can_fail():
    """A wrong scale, a lost mask and a lost bias are each far above the tolerance."""
    calls = []
    batch, *_ = run("bert", True, calls.append)
    call = calls[1]
    known = zoo.real(batch, tuple(call.output.shape[:2]))
    assert self_check_error(replace(call, scale=2 * call.scale), known) > 1e-2
    assert self_check_error(replace(call, log_weight=None), known) > 1e-2
    calls.clear()
    run("gemma2", False, calls.append)
    if calls[1].softcap is not None:
        assert self_check_error(replace(calls[1], softcap=None), torch.ones(3, 20, dtype=torch.bool)) > 1e-3


@pytest.mark.skipif(not zoo.T5_DISPATCHES, reason="this release of transformers does not dispatch T5's attention")
def test_the_self_check_sees_a_lost_position_bias():
    calls = []
    run("t5", False, calls.append)
    biased = next(c for c in calls if c.log_weight is not None and c.log_weight.dtype != torch.bool)
    everything = torch.ones(biased.output.shape[:2], dtype=torch.bool)
    assert self_check_error(replace(biased, log_weight=None), everything) > 1e-2


def test_the_mask_is_not_lost():
    """An attention function registered without a mask function is given no mask at all: the trap this guards against."""
    calls = []
    batch, *_ = run("bert", True, calls.append)
    for call in calls:
        assert not call.visible()[2, 0, 0, 9:].any()
        assert call.visible()[2, 0, 0, :9].all()
    calls.clear()
    run("modernbert", False, calls.append)
    distances = (torch.arange(20)[:, None] - torch.arange(20)).abs()
    windows = [int(distances[call.visible()[0, 0]].max()) for call in calls]
    assert min(windows) < 19  # some layers see a window only, and the capture says so


def test_a_shared_module_is_several_sites():
    calls = []
    run("albert", False, calls.append)
    assert [call.site.ordinal for call in calls] == [0, 1, 2]
    assert len({call.site.name for call in calls}) == 3


def test_rows_and_queries_of_a_call_are_the_same_numbers():
    calls = []
    run("llama", False, calls.append)
    call = calls[0]
    chosen = torch.tensor([0, 3, 19])
    part = call.rows(slice(1, 2)).at(chosen)
    assert torch.equal(part.query, call.query[1:2, :, chosen])
    assert torch.equal(part.output, call.output[1:2, chosen])
    assert torch.equal(part.visible().expand(1, 1, 3, 20), call.visible()[:, :, chosen])
    assert not part.is_causal


def test_the_implementation_is_restored_even_after_an_error():
    model = zoo.model("bert")
    before = stock_implementations(model)

    def broken(call):
        raise RuntimeError("observer failed")

    with (
        pytest.raises(RuntimeError, match="observer failed"),
        torch.no_grad(),
        capturing(model, broken),
    ):
        model(**zoo.inputs("bert"))
    assert stock_implementations(model) == before
    with torch.no_grad():
        model(**zoo.inputs("bert"))  # and runs as before


def test_composite_models_keep_each_parts_own_implementation():
    import transformers

    config = transformers.CLIPConfig(
        text_config={"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
                     "vocab_size": 99},
        vision_config={"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
                       "image_size": 16, "patch_size": 8},
    )  # fmt: skip
    model = transformers.CLIPModel(config).eval()
    model.vision_model.config._attn_implementation_internal = "eager"
    seen = []
    with torch.no_grad(), capturing(model, lambda call: seen.append(call.site.name)):
        model(input_ids=torch.randint(3, 90, (1, 5)), pixel_values=torch.randn(1, 3, 16, 16))
    assert any("text" in name for name in seen)
    assert any("vision" in name for name in seen)
    assert stock_implementations(model) == ["eager", "sdpa"]


def test_other_implementations_are_refused_in_one_sentence():
    model = zoo.fresh("bert")
    model.config._attn_implementation_internal = "flex_attention"
    with pytest.raises(InputError, match="flex_attention"), capturing(model, lambda call: None):
        pass


def test_unknown_keywords_are_listed():
    model = zoo.model("llama")
    with torch.no_grad(), capturing(model, lambda call: None) as capture:
        model(**zoo.inputs("llama"), use_cache=False, my_score_modification=torch.ones(1))
    assert capture.unexplained == {"my_score_modification"}


def test_the_self_check_is_the_textbook_formula_with_bias_cap_and_sink():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 6, 5, generator=generator) for heads in (4, 2, 2))
    bias, sink = torch.randn(1, 4, 6, 6, generator=generator), torch.randn(4, generator=generator)
    bias[..., 4] = -torch.inf
    output = torch.zeros(2, 6, 4, 5, dtype=torch.float64)
    for b, h, i in np.ndindex(2, 4, 6):
        scores = 0.7 * (key[b, h // 2] @ query[b, h, i]).double()
        weights = (3 * torch.tanh(scores / 3) + bias[0, h, i]).exp()
        output[b, i, h] = weights @ value[b, h // 2].double() / (weights.sum() + sink[h].double().exp())
    call = AttentionCall(
        AttentionSite("a"), torch.nn.Identity(), query, key, value, bias, False, 0.7, 3.0, sink, output.float()
    )
    real = torch.ones(2, 6, dtype=torch.bool)
    assert self_check_error(call, real) < 1e-6
    for wrong in ({"log_weight": -bias}, {"softcap": None}, {"sink": None}, {"scale": -0.7}, {"key": key.flip(1)}):
        assert not self_check_error(replace(call, **wrong), real) < 1e-2, wrong
