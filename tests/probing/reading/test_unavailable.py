"""What cannot be computed is left out with its reason, and nothing else is; what can be replayed is."""

import functools
import sys
from typing import Any

import numpy as np
import polars
import pytest
import torch
from tests.support.probing import zoo
from tests.support.rows import every_row

import massieu
from massieu.errors import InputError
from massieu.probing.capture.routes import capturing
from massieu.probing.capture.sites import find_sites, first_pass
from massieu.probing.model.model_inputs import model_inputs
from massieu.probing.reading import reading as reading_file
from massieu.probing.statistics import attention as attention_file
from massieu.probing.statistics import climb as climb_file
from massieu.probing.statistics import flow as flow_file
from massieu.probing.statistics import maps as maps_file
from massieu.probing.statistics import memory as memory_file
from massieu.probing.statistics import values as values_file
from massieu.probing.statistics.registry import STATISTICS
from massieu.probing.stream.replay import Replay
from massieu.probing.stream.wiring import StreamTracer

_COMMON = {
    "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 99,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MAKERS = {
    "llama4_text": lambda hf: hf.Llama4TextModel(
        hf.Llama4TextConfig(
            **_COMMON, head_dim=12, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1,
            intermediate_size_mlp=96,
        )
    ),
    "deepseek_v2": lambda hf: hf.DeepseekV2Model(
        hf.DeepseekV2Config(
            **_COMMON, kv_lora_rank=16, q_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=12,
            n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=0,
            n_shared_experts=1, topk_group=1, n_group=1,
        )
    ),
    "dinov3_vit": lambda hf: hf.DINOv3ViTModel(
        hf.DINOv3ViTConfig(
            hidden_size=48, num_hidden_layers=1, num_attention_heads=4, intermediate_size=96, image_size=32,
            patch_size=8, num_register_tokens=2,
        )
    ),
    "umt5": lambda hf: hf.UMT5Model(
        hf.UMT5Config(
            d_model=48, d_kv=12, d_ff=96, num_layers=1, num_heads=4, vocab_size=99, decoder_start_token_id=0
        )
    ),
    "ctrl": lambda hf: hf.CTRLModel(
        hf.CTRLConfig(vocab_size=99, n_positions=64, n_embd=48, dff=96, n_layer=1, n_head=4)
    ),
}  # fmt: skip


@functools.cache
def made(name):
    """Not to be changed; None where this release of transformers does not dispatch the attention of such models."""
    import transformers

    torch.manual_seed(0)
    model = MAKERS[name](transformers).eval()
    if not hasattr(sys.modules[type(model).__module__], "eager_attention_forward"):
        return None
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(4)
    return model


def given(name, seed=1):
    return zoo.inputs("vit" if "vit" in name else "bert", seed=seed)


@pytest.mark.slow
@every_row("name", MAKERS)
def test_models_with_other_tables_of_positions_are_read_whole(name):
    model = made(name)
    if model is None:
        return
    result = massieu.probe(model, massieu.Batches([given(name)], window=20))
    assert result.run.self_check.passed
    assert result.run.unavailable == []
    assert result.trouble is None
    assert not any("climb" in site.unavailable for site in result.run.sites)
    for statistic in ("entropy", "update_slope_selective", "update_step_selective"):
        found = result.heads.filter(polars.col("statistic") == statistic)
        assert found.height == result.run.model.heads, statistic
        assert np.isfinite(found["value"].to_numpy()).all()


def reads(name):
    """Every way in which the model's attention modules read the stream, one item each."""
    model = made(name)
    if model is None:
        return
    prepared = model_inputs(model, {key: value[:1] for key, value in given(name).items()})
    steps = []
    with torch.no_grad():
        tracer = StreamTracer(model, find_sites(model, first_pass(model, prepared)), steps.append)
        with capturing(model, tracer.attention), tracer.watching():
            model(**prepared)
        with capturing(model, lambda call: None) as capture:
            yield from ((capture, step.read) for step in steps if step.read is not None)


@pytest.mark.medium
@every_row("whole", [False, True])
@every_row("name", MAKERS)
def test_queries_at_other_states_are_those_of_the_model(name, whole):
    """Moved states at some positions, asked for one by one, are what the module computes with all of them in place."""
    for capture, read in reads(name):
        positions = torch.tensor([0, 1, 4, 9, 16])
        moved = read.residual[:, positions] + torch.randn(3, 5, 48, generator=torch.Generator().manual_seed(1))
        found = Replay(capture, read, whole=whole).queries(moved, positions)
        for copy in range(3):
            everything = read.residual.clone()
            everything[:, positions] = moved[copy]
            state = everything if read.norm is None else read.norm(everything)
            keywords = dict(read.keywords)
            arguments = [state if a is not None and torch.is_tensor(a) and a.shape == state.shape else a
                         for a in read.arguments]  # fmt: skip
            if not arguments:
                keywords["hidden_states"] = state
            with capture.replaying() as recorded:
                try:
                    read.call.module(*arguments, **keywords)
                except Exception:
                    assert recorded
            expected = recorded[0][0][0, :, positions]
            torch.testing.assert_close(found[copy], expected, atol=1e-4 * float(expected.abs().max()), rtol=0)


@pytest.fixture(scope="module")
def two_batches():
    return [zoo.inputs("gpt2", seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def whole(two_batches):
    return massieu.probe(zoo.model("gpt2", n_layer=2), massieu.Batches(two_batches, window=20))


@pytest.mark.medium
@pytest.mark.parametrize(
    ("file", "name", "lost"),
    [
        (reading_file, "query_statistics", "attention"),
        (reading_file, "head_maps", "maps"),
        (climb_file, "measure_climb", "climb"),
    ],
    ids=["attention", "maps", "climb"],
)
def test_a_group_that_fails_is_left_out_with_its_reason(file, name, lost, two_batches, whole):
    """In the second batch, when some of it has been computed: nothing of it stays, the others are as they were."""
    honest, calls = getattr(file, name), []

    def failing(*arguments, **keywords):
        calls.append(None)
        if len(calls) > (1 if name == "head_maps" else 2):
            raise ArithmeticError("this one cannot be\ncomputed here")
        return honest(*arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file, name, failing)
        result = massieu.probe(zoo.model("gpt2", n_layer=2), massieu.Batches(two_batches, window=20))
    reasons = {e.statistic: e.reason for e in result.run.unavailable if e.of == "model"}
    said = "an error that was not foreseen and is worth a report: ArithmeticError: this one cannot be computed here"
    assert reasons[lost] == said
    assert any(w.startswith(f"{lost} could not be computed") for w in result.run.warnings)
    gone = {s.name for s in whole.run.statistics} - {s.name for s in result.run.statistics}
    groups = {s.name: s.group for s in whole.run.statistics}
    assert {groups[n] for n in gone} == {lost}
    base = polars.col("statistic").str.split("/").list.first()
    assert result.table.filter(base.is_in(list(gone))).height == 0
    own = polars.col("statistic").str.contains("/reinitialised|/q_value").not_()
    assert result.table.filter(own).equals(whole.table.filter(own & base.is_in(list(gone)).not_()))
    assert "this one cannot be computed here" in result._page()


@pytest.mark.medium
@pytest.mark.parametrize("group", [attention_file.AttentionGroup, values_file.ValuesGroup, climb_file.ClimbGroup])
def test_a_group_that_cannot_begin_is_left_out_with_its_reason(group, two_batches, whole, monkeypatch):
    def failing(*_):
        raise ArithmeticError("this one cannot begin here")

    monkeypatch.setattr(group, "begin", failing)
    result = massieu.probe(zoo.model("gpt2", n_layer=2), massieu.Batches(two_batches, window=20))
    reasons = {entry.statistic: entry.reason for entry in result.run.unavailable if entry.of == "model"}
    assert reasons[group.name].endswith("this one cannot begin here")
    gone = {each.group for each in whole.run.statistics} - {each.group for each in result.run.statistics}
    assert gone == {group.name}


@pytest.mark.medium
@pytest.mark.parametrize(
    ("name", "functions"),
    [
        ("entropy", attention_file.REGISTER.functions),
        ("first_value_norm_ratio", values_file.OF_CALLS.functions),
        ("symmetric_share", maps_file.REGISTER.functions),
        ("keys_in_use", memory_file.REGISTER.functions),
        ("stream_cosine", flow_file.REGISTER.functions),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_function_that_fails_costs_its_own_statistic_alone(name, functions, two_batches, monkeypatch):
    group = STATISTICS[name].group
    asked = [each.name for each in STATISTICS.values() if each.group == group]
    whole = massieu.probe(
        zoo.model("gpt2", n_layer=2), massieu.Batches(two_batches, window=20), statistics=asked, draws=2
    )
    honest, calls = functions[name], []

    def failing(*arguments):
        calls.append(None)
        if len(calls) > 1:  # some of it has been computed
            raise ArithmeticError("not this one")
        return honest(*arguments)

    monkeypatch.setitem(functions, name, failing)
    if name == "first_value_norm_ratio":
        failing.__name__ = name
        monkeypatch.setattr(values_file, name, failing)
    result = massieu.probe(
        zoo.model("gpt2", n_layer=2), massieu.Batches(two_batches, window=20), statistics=asked, draws=2
    )
    assert {s.name for s in whole.run.statistics} - {s.name for s in result.run.statistics} == {name}
    assert any(each.statistic == name and "not this one" in each.reason for each in result.run.unavailable)
    base = polars.col("statistic").str.split("/").list.first() != name
    own = base & polars.col("statistic").str.contains("/reinitialised|/q_value|/p_value").not_()
    for before, after in ((whole.heads, result.heads), (whole.layers, result.layers)):
        assert after.filter(own).equals(before.filter(own))


@pytest.mark.medium
@every_row(
    "switch",
    [lambda m: m.encoder.layer[1].output.dropout, lambda m: m.encoder.layer[1].attention.self],
    ids=["stream", "attention"],
)
def test_a_model_whose_output_is_random_is_called_that(switch):
    model: Any = zoo.fresh("bert")
    switch(model).train()
    with pytest.raises(InputError, match="in training mode"):
        massieu.probe(model, [zoo.inputs("bert")])
    model.eval()
    model.encoder.layer[0].register_forward_hook(lambda module, given, output: output + torch.rand(()))
    with pytest.raises(InputError, match="the output of BertModel is random: two passes over the same batch differ by"):
        massieu.probe(model, [zoo.inputs("bert")])


@pytest.mark.medium
def test_a_probe_in_inference_mode_is_the_same_probe():
    statistics = ["entropy", "climb", "maps"]
    llama, vit = (zoo.model(name, num_hidden_layers=1) for name in ("llama", "vit"))
    expected = massieu.probe(llama, massieu.Batches([zoo.inputs("llama")], window=20), statistics=statistics)
    with torch.inference_mode():
        found = massieu.probe(llama, massieu.Batches([zoo.inputs("llama")], window=20), statistics=statistics)
        images = massieu.probe(vit, [zoo.inputs("vit")], statistics=statistics)
        assert torch.is_inference_mode_enabled()
    assert found.table.equals(expected.table)
    assert images.run.unavailable == []
