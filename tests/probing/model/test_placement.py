"""Models whose weights are offloaded or held in fewer bits: what is read is the same as of plain ones."""

import copy
import warnings
from typing import Any

import pytest
import torch
import transformers
from accelerate import cpu_offload
from polars.testing import assert_frame_equal
from tests.support.probing.packed_weights import dequantise, quantise
from torch import nn
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM, LlamaModel

import massieu
from massieu.errors import InputError
from massieu.probing.checks.nonfinite import in_weights, kind_of
from massieu.probing.model import packed
from massieu.probing.model.fresh import reinitialised
from massieu.probing.model.model import load_model
from massieu.probing.model.offload import execution_device, weights

WIDTH, HEADS = 64, 4
CONFIG = LlamaConfig(
    hidden_size=WIDTH,
    num_hidden_layers=2,
    num_attention_heads=HEADS,
    num_key_value_heads=2,
    intermediate_size=128,
    vocab_size=100,
)
IDS = torch.randint(0, 100, (4, 16), generator=torch.Generator().manual_seed(0))
BATCHES = [{"input_ids": IDS}]
ON_DISK = {"embed_tokens": "cpu", "layers.0": "cpu", "layers.1": "disk", "norm": "cpu", "rotary_emb": "cpu"}


def llama() -> Any:
    torch.manual_seed(0)
    model = LlamaModel(CONFIG).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "self_attn" in name:
                parameter.mul_(8)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("llama")
    llama().save_pretrained(place)
    return place


def without_control(frame):
    return frame.filter(~frame["statistic"].str.contains("/(reinitialised|p_value|q_value)$"))


@pytest.mark.slow
def test_offloaded_to_main_memory():
    """Weights are on the meta device until a module is called; no number may depend on it, the control's included."""
    plain, moved = llama(), llama()
    cpu_offload(moved, execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in moved.parameters())
    statistics = ["entropy", "maps", "climb", "expansion"]
    expected, found = (massieu.probe(each, BATCHES[:1], statistics=statistics) for each in (plain, moved))
    # Errors over two windows are differences of two numbers in float32.
    assert_frame_equal(found.heads, expected.heads, rel_tol=1e-4)
    assert_frame_equal(found.layers, expected.layers, rel_tol=1e-4)
    assert found.run.model.hash == expected.run.model.hash and not found.run.warnings
    assert all(parameter.is_meta for parameter in moved.parameters())


@pytest.mark.medium
def test_offloaded_to_disk(folder):
    """A copy of it would not fit into memory; its re-initialised control is drawn block by block, as of any other model."""
    statistics = ["entropy", "maps"]
    expected = massieu.probe(llama(), BATCHES, statistics=statistics)
    found = massieu.probe(AutoModel.from_pretrained(folder, device_map=ON_DISK).eval(), BATCHES, statistics=statistics)
    assert_frame_equal(found.heads, expected.heads)
    assert found.heads["statistic"].str.contains("/reinitialised").any() and not found.run.warnings
    assert found.run.model.device == "cpu, disk"


@pytest.mark.medium
def test_a_control_that_must_be_whole_is_not_made_of_a_model_on_disk(folder, monkeypatch):
    """A copy of it would not fit into memory, so the control alone is missing, and both are said."""
    monkeypatch.setattr("massieu.probing.session.draws.blueprint_of", lambda _: "its record is another model")
    expected = massieu.probe(llama(), BATCHES, statistics=["entropy"])
    found = massieu.probe(AutoModel.from_pretrained(folder, device_map=ON_DISK).eval(), BATCHES, statistics=["entropy"])
    assert_frame_equal(without_control(found.heads), without_control(expected.heads))
    assert len(found.heads) < len(expected.heads)
    assert any("offloaded to disk" in warning for warning in found.run.warnings)
    whole = "the re-initialised control takes the memory of a whole model: its record is another model"
    assert expected.run.warnings.count(whole) == found.run.warnings.count(whole) == 1


def test_a_device_map_is_handed_on(folder):
    loaded = load_model(massieu.Checkpoint(folder, device_map=ON_DISK), tokenizer=False)
    assert loaded.describe().device == "cpu, disk" and execution_device(loaded.module) == torch.device("cpu")
    expected = llama()(IDS).last_hidden_state
    assert torch.equal(loaded.module(IDS).last_hidden_state, expected)


def test_weights_are_fetched_to_be_looked_at(folder):
    model = AutoModel.from_pretrained(folder, device_map=ON_DISK)
    expected = dict(llama().named_parameters())
    found = {name: tensor.clone() for name, tensor, is_buffer in weights(model) if not is_buffer}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_nan_in_an_offloaded_weight_is_named():
    model = llama()
    with torch.no_grad():
        model.layers[1].self_attn.q_proj.weight[0, 0] = torch.nan
    cpu_offload(model, execution_device=torch.device("cpu"))
    trouble = in_weights(model)
    assert trouble is not None and trouble.sentence.endswith("NaN in the weight layers.1.self_attn.q_proj.weight")


def test_no_control_is_made_of_an_offloaded_module_of_ones_own():
    """Its hooks would fetch the learned weights, and a control of them would be none."""
    model = nn.Sequential(nn.Linear(3, 3))
    cpu_offload(model, execution_device=torch.device("cpu"))
    copy, why = reinitialised(model, 0)
    assert copy is None and why == "Sequential is offloaded, and only models of transformers are then built anew"


def test_bad_device_maps(folder, tmp_path):
    with pytest.raises(InputError, match="either a device or a device map, got 'cpu' and 'auto'"):
        massieu.Checkpoint(folder, device="cpu", device_map="auto")
    with pytest.raises(InputError, match=r"cannot load the model .*nowhere"):
        load_model(massieu.Checkpoint(folder, device_map="nowhere"))
    with pytest.raises(InputError, match="name must be a path, got LlamaModel"):
        massieu.Checkpoint(llama(), device_map="auto")


# --- fewer bits --------------------------------------------------------------------------------------------------------


def quantised(folder, kind: str) -> Any:
    if kind.startswith("bitsandbytes"):
        pytest.importorskip("bitsandbytes")
        config = transformers.BitsAndBytesConfig(load_in_4bit=kind.endswith("4"), load_in_8bit=kind.endswith("8"))
    else:
        torchao = pytest.importorskip("torchao.quantization")
        config = transformers.TorchAoConfig(torchao.Int8WeightOnlyConfig())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModel.from_pretrained(folder, quantization_config=config, device_map="cpu").eval()


OF_WEIGHTS = ["attention", "climb", "maps", "values", "memory", "residual", "feed_forward", "response", "copying_score"]
"""Groups that read weights, or that need derivatives of modules."""


def assert_nothing_is_missing(found, expected):
    """A quantised model has the statistics of the plain one, and the same reasons where that has none."""
    assert found.run.unavailable == expected.run.unavailable
    assert [site.unavailable for site in found.run.sites] == [site.unavailable for site in expected.run.sites]
    for table in ("heads", "layers"):
        names = (set(getattr(result, table)["statistic"]) for result in (found, expected))
        assert next(names) == next(names)


@pytest.mark.slow
def test_packed_weights_that_refuse_to_be_viewed_are_read_as_their_numbers():
    """Of a model with the same numbers in full every statistic is the same, up to the order in which products are added."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval()
    plain = copy.deepcopy(model)
    quantise(model)
    quantise(plain)
    dequantise(plain)
    found, expected = (massieu.probe(each, BATCHES, statistics=OF_WEIGHTS, draws=0) for each in (model, plain))
    assert_nothing_is_missing(found, expected)
    assert not expected.run.unavailable
    for table in ("heads", "layers"):
        ours, theirs = (getattr(result, table) for result in (found, expected))
        assert_frame_equal(ours, theirs, rel_tol=1e-4, abs_tol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz], ids=str)
def test_numbers_of_8_bits_that_are_not_finite(dtype):
    numbers = torch.ones(3)
    assert kind_of(numbers.to(dtype)) is None
    assert kind_of(numbers.log().log().to(dtype).fill_(torch.nan)) == "NaN"
    if dtype == torch.float8_e5m2:  # the others have no infinity
        assert kind_of((numbers / 0).to(dtype)) == "infinity"


BOUNDS = {"entropy": 0.02, "weight_first": 0.05, "write_norm_ratio": 0.05, "own_write_slope_selective": 0.2}
"""Of differences, relative to the largest value: some kernels round what they multiply to 8 bits."""
KINDS = ["bitsandbytes 4", "bitsandbytes 8", "torchao"]


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_that_packed_weights_stand_for(folder, kind):
    """Its rounding is of the weights alone or of what is multiplied too; the plain weights are within it."""
    model, plain = quantised(folder, kind), llama()
    for name in ("q_proj", "o_proj"):
        module, own = model.layers[1].self_attn.get_submodule(name), plain.layers[1].self_attn.get_submodule(name)
        before, source = packed.dense_weight(module), torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
        result, weight = module(source), packed.dense_weight(module)  # a first call may change its layout
        assert torch.equal(before, weight) and (source @ weight.mT - result).norm() <= 0.02 * result.norm()
        assert 0 < (weight - own.weight).norm() <= 0.15 * own.weight.norm()
    assert packed.numbers_in(model) == packed.numbers_in(plain) == sum(p.numel() for p in plain.parameters())


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_quantised_models_are_read_whole(folder, kind):
    """Against a plain model that is given the very numbers of the packed weights."""
    model, plain = quantised(folder, kind), llama()
    with torch.no_grad():
        for name, module in model.named_modules():
            if packed.is_packed(getattr(module, "weight", None)):
                plain.get_submodule(name).weight.copy_(packed.dense_weight(module))
    found, expected = (massieu.probe(each, BATCHES, statistics=OF_WEIGHTS, draws=0) for each in (model, plain))
    assert "14 matrices held in fewer bits" in (found.run.model.weights or "")
    assert found.run.model.parameters == expected.run.model.parameters
    assert_nothing_is_missing(found, expected)
    both = expected.heads.join(found.heads, on=["site", "layer", "head", "statistic"], suffix="_packed")
    for statistic, bound in BOUNDS.items():
        rows = both.filter(both["statistic"] == statistic)
        assert len(rows) == 8
        value, of_packed = rows["value"].to_numpy(), rows["value_packed"].to_numpy()
        assert abs(value - of_packed).max() <= bound * abs(value).max(), statistic
