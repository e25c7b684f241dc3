"""A model in another's attention: what is put in its place, which heads keep theirs, and what is refused by name."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AlbertConfig,
    AlbertModel,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5Model,
)

import massieu
from massieu.errors import InputError

SIZES: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 40}
IDS = torch.randint(1, 40, (3, 8), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[1, 5:] = 0


class Attention(nn.Module):
    """Attention of one's own, its heads merged in one of several ways."""

    def __init__(self, merge: str = "reshape") -> None:
        super().__init__()
        self.merge = merge
        self.projections = nn.Linear(16, 48)
        self.out_proj = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.projections(x).chunk(3, -1))
        p = torch.softmax(q @ k.mT / 2, -1)
        if self.merge == "einsum":
            weight = self.out_proj.weight.unflatten(1, (4, 4))
            return torch.einsum("bhld,ehd->ble", p @ v, weight) + self.out_proj.bias
        mixed = p @ v
        if self.merge == "gated":
            mixed = mixed * 2
        if self.merge == "dropout":
            mixed = nn.functional.dropout(mixed, 0.5, self.training)
        return self.out_proj(mixed.transpose(1, 2).reshape(x.shape))


def shuffled(model: Any) -> Any:
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.3)
    return model.eval()


def models() -> dict[str, tuple[Any, dict[str, Any]]]:
    text = {"input_ids": IDS, "attention_mask": MASK}
    llama = LlamaConfig(hidden_size=32, num_key_value_heads=2, **SIZES)
    t5 = T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=40)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    x = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(1))
    return {
        "llama": (LlamaForCausalLM(llama), text),
        "bert": (BertModel(BertConfig(hidden_size=32, **SIZES)), text),
        "t5": (T5Model(t5), {**text, "decoder_input_ids": IDS}),
        "encoder": (nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), {"src": x}),
        "tokens first": (nn.MultiheadAttention(16, 4), dict.fromkeys(("query", "key", "value"), x)),
        **{f"own, {merge}": (Attention(merge), {"x": x}) for merge in ("reshape", "einsum", "dropout")},
    }


def ran(model: Any, inputs: dict[str, Any]) -> Tensor:
    outputs = model(**inputs)
    return outputs if isinstance(outputs, Tensor) else outputs[0]


@pytest.mark.parametrize("name", list(models()))
def test_the_models_own_attention_is_its_own(name):
    model, inputs = models()[name]
    shuffled(model)
    with torch.enable_grad():  # without, PyTorch's encoder takes a path in C++, whose rounding differs
        stock = ran(model, inputs)
        with massieu.replaced(model, "identity"):
            assert torch.equal(ran(model, inputs), stock)
        with massieu.replaced(model, lambda call: call.output.clone()):
            assert torch.equal(ran(model, inputs), stock)
        with massieu.replaced(model, "scale(1)"):
            real = MASK.bool() if "attention_mask" in inputs else slice(None)
            torch.testing.assert_close(ran(model, inputs)[real], stock[real], rtol=1e-4, atol=1e-5)
        with massieu.replaced(model, "scale(3)"):
            assert (ran(model, inputs) - stock).abs().max() > 1e-3 * stock.abs().max()
        assert torch.equal(ran(model, inputs), stock)


def _deberta() -> tuple[Any, list[str]]:
    from transformers import DebertaV2Config, DebertaV2Model

    positions: dict[str, Any] = {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "max_position_embeddings": 24,
    }
    return DebertaV2Model(DebertaV2Config(hidden_size=32, **SIZES, **positions)), ["query_proj", "pos_query_proj"]


def _xlnet() -> tuple[Any, list[str]]:
    from transformers import XLNetConfig, XLNetModel

    config = XLNetConfig(vocab_size=40, d_model=32, n_layer=2, n_head=4, d_inner=48)
    return XLNetModel(config), ["rel_attn.q", "r_w_bias", "r_r_bias", "r_s_bias"]


@pytest.mark.medium
@pytest.mark.parametrize("make", [_deberta, _xlnet])
def test_a_scale_multiplies_what_relative_positions_add_to_the_scores(make):
    model, linear_in_the_scores = make()
    shuffled(model)
    with torch.no_grad(), massieu.replaced(model, "scale(1.5)"):
        output = model(IDS, attention_mask=MASK)[0]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(f"{part}." in f"{name}." for part in linear_in_the_scores):
                parameter *= 1.5
        expected = model(IDS, attention_mask=MASK)[0]
    torch.testing.assert_close(output[MASK.bool()], expected[MASK.bool()], rtol=1e-4, atol=1e-4)


def test_a_head_that_is_off_is_its_columns_of_the_projection_left_out():
    model, inputs = models()["bert"]
    shuffled(model)
    site = "encoder.layer.1.attention.self"
    with torch.no_grad():
        with massieu.replaced(model, "off", sites={site: [1, 3]}):
            output = ran(model, inputs)
        weight = model.encoder.layer[1].attention.output.dense.weight
        weight[:, 8:16] = 0
        weight[:, 24:32] = 0
        torch.testing.assert_close(output, ran(model, inputs), rtol=1e-5, atol=1e-6)


def test_heads_that_are_not_named_keep_their_own_bits():
    model, inputs = models()["own, reshape"]
    shuffled(model)
    seen: list[Tensor] = []
    handle = model.out_proj.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].clone()))
    with torch.no_grad():
        model(**inputs)
        with massieu.replaced(model, "off", sites={"": [2]}):
            model(**inputs)
    handle.remove()
    other_columns = [0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 14, 15]
    assert torch.equal(seen[0][..., other_columns], seen[1][..., other_columns]) and not seen[1][..., 8:12].any()


def test_a_head_is_found_by_its_number_in_bfloat16_which_has_no_number_257():
    model = nn.MultiheadAttention(300, 300, batch_first=True).bfloat16().eval()
    x = torch.randn(1, 4, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    seen: list[Tensor] = []
    with torch.no_grad():
        model.out_proj.weight.copy_(torch.eye(300))
        for rule in ("identity", "off"):
            with massieu.replaced(model, rule, sites={"": [257]}):
                seen.append(model(x, x, x)[0])
    changed = (seen[0] != seen[1]).any(1)[0].nonzero()[:, 0]
    assert changed.tolist() == [257]


def test_a_shared_module_has_several_calls():
    model = shuffled(AlbertModel(AlbertConfig(hidden_size=32, embedding_size=16, **SIZES)))
    site = massieu.describe(model).sites[1].name
    assert site.endswith("(call 2)")
    calls: list[str] = []

    def note(call: Any) -> Tensor:
        calls.append(call.site.name)
        return call.output

    for sites, expected in (([site], [site]), ([site.partition(" (call ")[0]], 2)):
        calls.clear()
        with torch.no_grad(), massieu.replaced(model, note, sites=sites):
            model(IDS)
            model(IDS)  # numbers its calls anew
        assert calls == expected * 2 if isinstance(expected, list) else len(calls) == 2 * expected


def test_gradients_pass_through_the_rule():
    model, inputs = models()["own, reshape"]
    shuffled(model.double())
    inputs = {"x": inputs["x"].double()}
    with massieu.replaced(model, "scale(2)"):
        ran(model, inputs).square().sum().backward()
    grown: Any = model.projections.weight
    gradient = grown.grad.clone()
    model.projections.weight.grad = None
    with torch.no_grad():  # twice the scale is twice the queries
        model.projections.weight[:16] *= 2
        model.projections.bias[:16] *= 2
    ran(model, inputs).square().sum().backward()
    expected = grown.grad.clone()
    expected[:16] *= 2
    torch.testing.assert_close(gradient, expected)


def test_it_holds_while_a_model_writes():
    model, _ = models()["llama"]
    shuffled(model)
    ids = IDS[:1]
    with torch.no_grad(), massieu.replaced(model, "window(2)"):
        written = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None)
        for length in range(ids.shape[1], written.shape[1]):
            assert written[0, length] == model(written[:, :length]).logits[0, -1].argmax()


def test_sites_that_cannot_be_replaced_are_named():
    gated = shuffled(Attention("gated"))
    x = torch.randn(2, 5, 16)
    stacked = nn.Sequential(shuffled(Attention()), gated)
    for model, sites in ((gated, None), (stacked, ["1"])):
        match = "cannot be replaced: its output is changed before its heads are merged"
        with pytest.raises(InputError, match=match), massieu.replaced(model, "off", sites=sites):
            model(x)
    with torch.no_grad(), massieu.replaced(stacked, "off", sites=["0"]):
        stacked(x)
    with pytest.raises(InputError, match=match), massieu.replaced(stacked, "off", sites=["1"]):
        stacked[1](x)  # a part alone, so that no pass of the whole model ends
    nothing = nn.Linear(16, 3)
    match = r"attention cannot be replaced: Linear \(it was not seen attending\)"
    with pytest.raises(InputError, match=match), massieu.replaced(nothing, "off"):
        nothing(x)


def test_bad_calls():
    model, inputs = models()["bert"]
    model.eval()
    before: Any = (
        (3, None, "rule must be the name of a rule, a function of an AttentionCall or a massieu.Replacement, got 3"),
        (massieu.Replacement("off", per="head"), None, "at once; got per='head'"),
        ("off(mean)", None, r"off\(mean\) needs each head's mean output over a text"),
        ("top_k", None, "top_k needs a number of keys"),
        ("off", "encoder", "sites must be a list of names, or a mapping of names to heads, got the text 'encoder'"),
        ("off", 3, "sites must be names of sites, or a dictionary of heads by name, got 3"),
        ("off", [], r"sites must name at least one attention site, got \[\]; None means all sites"),
        ("off", {"encoder": []}, "sites must name at least one attention site"),
        ("off", {"encoder": 3}, "heads of encoder must be a list of whole numbers from 0, got 3"),
        ("off", {"encoder": [True]}, r"heads of encoder must be whole numbers from 0, got \['True'\]"),
        ("off", ["nowhere"], "BertModel has no module 'nowhere' to replace the attention of"),
        ("off", {"encoder": [-1]}, r"heads of encoder must be whole numbers from 0, got \['-1'\]"),
    )
    for rule, sites, match in before:
        with pytest.raises(InputError, match=match), massieu.replaced(model, rule, sites=sites):
            pass
    site = "encoder.layer.0.attention.self"
    during: Any = (
        ("off", {site: [4]}, f"{site} has heads 0 to 3, and head 4 was to be replaced"),
        ("off", ["embeddings"], r"attention cannot be replaced: embeddings \(it was not seen attending\)"),
        (lambda call: call.query, None, r"a rule must return outputs of shape \(3, 8, 4, 8\)"),
        (lambda call: None, None, "got NoneType"),
    )
    for rule, sites, match in during:
        with pytest.raises(InputError, match=match), massieu.replaced(model, rule, sites=sites):
            model(**inputs)
    match, again = "is being probed already", massieu.replaced(model, "off")
    with massieu.replaced(model, "off"), pytest.raises(InputError, match=match), again:
        pass


def test_an_error_in_the_rule_leaves_the_model_as_it_was():
    model, inputs = models()["t5"]
    shuffled(model)
    with torch.no_grad():
        stock = ran(model, inputs)
        with pytest.raises(ZeroDivisionError), massieu.replaced(model, lambda call: call.output / (1 // 0)):
            ran(model, inputs)
        assert torch.equal(ran(model, inputs), stock)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_another_thread_does_not_get_the_rule_without_a_word():
    model, inputs = models()["bert"]
    model.eval()
    thread = threading.Thread(target=lambda: model(**inputs))
    with pytest.raises(InputError, match="another thread used the model"), massieu.replaced(model, "off"):
        _run(thread)


def _run(thread: threading.Thread) -> None:
    thread.start()
    thread.join()
