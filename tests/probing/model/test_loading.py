"""Checkpoints that are not what they seem: each is refused in one sentence, or what is odd about it is said."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.support.probing import zoo
from tests.support.rows import every_row, some_slow
from torch import Tensor, nn

import massieu
from massieu.errors import InputError, MissingExtraError
from massieu.probing.checks.check import first_look
from massieu.probing.checks.weights import check_weights
from massieu.probing.model import checkpoint, model_size
from massieu.probing.model.model import LoadedModel, load_model

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "mat", "##s"]
Weights = dict[str, Tensor]
TABLE = "model.safetensors"
SIZES = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 99,
    "max_position_embeddings": 64,
}  # fmt: skip


def bert(layers: int = 2) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**SIZES | {"num_hidden_layers": layers}))


def gpt2(layers: int = 1) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 16, "n_layer": layers, "n_head": 2, "vocab_size": 99, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


def llama(layers: int = 1, **settings: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES | {"num_hidden_layers": layers}, num_key_value_heads=1, **settings))


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=99))


@pytest.fixture
def save(tmp_path) -> Callable[..., Path]:
    """Saves a model, its weights and configuration changed."""

    def saved(model: Any, change: Callable[[Weights], Weights] | None = None, **configuration: object) -> Path:
        folder = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
        model.save_pretrained(folder)
        if change is not None:
            changed = change(safetensors.torch.load_file(folder / TABLE))
            safetensors.torch.save_file({k: v.clone() for k, v in changed.items()}, folder / TABLE, {"format": "pt"})
        if configuration:
            file = folder / "config.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), **configuration}))
        return folder

    return saved


def command(*arguments: object) -> Any:
    """What the command line says and its exit status, in this process."""
    from typer.testing import CliRunner

    from massieu.cli.commands import app

    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def without(part: str) -> Callable[[Weights], Weights]:
    return lambda weights: {name: tensor for name, tensor in weights.items() if part not in name}


def renamed(old: str, new: str) -> Callable[[Weights], Weights]:
    return lambda weights: {name.replace(old, new): tensor for name, tensor in weights.items()}


def behind(prefix: str) -> Callable[[Weights], Weights]:
    return lambda weights: {prefix + name: tensor for name, tensor in weights.items()}


# --- weights that are missing ----------------------------------------------------------------------------------------


@pytest.mark.slow
@every_row(
    "make, change, configuration, words",
    [
        (bert, without("layer.1."), {}, ["16 weights are missing", "encoder.layer.1.", "random numbers"]),
        (bert, without("word_embeddings"), {}, ["1 weight is missing", "embeddings.word_embeddings.weight"]),
        (bert, behind("foo."), {}, ["weights are missing", "with 'foo.bert.' in front"]),
        (gpt2, behind("module."), {}, ["weights are missing", "with 'module.transformer.' in front"]),
        (gpt2, without("ln_f"), {}, ["2 weights are missing", "ln_f.bias, ln_f.weight"]),
        (llama, renamed("layers", "blocks"), {}, ["9 weights are missing", "model.blocks.0.input_layernorm.weight"]),
        (bert, None, {"num_hidden_layers": 3}, ["16 weights are missing", "encoder.layer.2."]),
        (bert, None, {"intermediate_size": 24}, ["6 weights are of another shape", "(32,), not (24,)"]),
        (bert, None, {"vocab_size": 98}, ["1 weight is of another shape", "(99, 16), not (98, 16)"]),
    ],
)
def test_weights_that_the_measurement_needs_must_be_there(save, make, change, configuration, words):
    folder = save(make(), change, **configuration)
    with pytest.raises(InputError) as raised:
        massieu.describe(folder)
    assert str(folder) in str(raised.value)
    for word in words:
        assert word in str(raised.value), raised.value


@pytest.mark.medium
@every_row(
    "make, table, head",
    [
        (bert, "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
        (gpt2, "transformer.wte.weight", "lm_head.weight"),
        (lambda: llama(tie_word_embeddings=True), "model.embed_tokens.weight", "lm_head.weight"),
        (t5, "shared.weight", "lm_head.weight"),
    ],
)
def test_embeddings_that_are_stored_as_the_tied_heads_are_read(save, make, table, head):
    model = make().eval()
    loaded = load_model(save(model, renamed(table, head)), tokenizer=False)
    assert table.partition(".")[2] not in loaded.missing
    ids = torch.arange(6)[None]
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if make is t5 else {})
    with torch.no_grad():
        assert torch.equal(loaded.module(**inputs)[0], model.base_model(**inputs)[0])
    check_weights(loaded, first_look(loaded.module, inputs).sites, inputs)


@pytest.mark.medium
def test_missing_weights_stop_the_probe_too(save):
    folder = save(bert(), without("layer.1."))
    tokenizer(folder)
    with pytest.raises(InputError, match="16 weights are missing"):
        massieu.probe(folder, massieu.Text(strings="the cat sat on the mats", window=8))


@pytest.mark.medium
def test_weights_off_the_way_may_be_missing_and_are_named(save):
    found = massieu.describe(save(bert()))  # a masked language model has a head, and no pooler
    assert "2 weights are not read" in found.model.missing_weights
    assert "pooler.dense.bias, pooler.dense.weight" in found.model.missing_weights
    assert "5 weights are in the checkpoint but not in the model" in found.model.unexpected_weights
    assert "cls.predictions.bias" in found.model.unexpected_weights
    assert found.model.weights == "safetensors"
    assert not found.warnings
    assert massieu.describe(save(gpt2())).model.missing_weights == "none"
    assert massieu.describe(gpt2().eval()).model.missing_weights is None  # in memory: not known


@pytest.mark.medium
def test_layers_that_the_configuration_leaves_out_are_warned_of(save):
    found = massieu.describe(save(bert(), num_hidden_layers=1))
    assert found.model.layers == 1
    assert len(found.warnings) == 1
    assert "16 weights in layers like those measured" in found.warnings[0]
    assert "bert.encoder.layer.1." in found.warnings[0]
    biases = {f"model.layers.{i}.self_attn.q_proj.bias": torch.ones(16) for i in range(2)}
    assert "2 weights in layers" in massieu.describe(save(llama(2), lambda weights: weights | biases)).warnings[0]
    # What older releases stored beside the weights is no such sign.
    masks = {f"transformer.h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(2)}
    assert not massieu.describe(save(gpt2(2), lambda weights: weights | masks)).warnings


_SAVED_OTHERWISE = {"bert", "gpt2", "llama", "gpt_oss", "t5", "bart", "swin", "albert"}
"""These tie or share weights, have buffers, or stack their layers' weights; the others are stored as one of them is."""


@pytest.mark.medium
@some_slow(
    "name",
    sorted(zoo.MAKERS, key=_SAVED_OTHERWISE.__contains__, reverse=True),
    len(_SAVED_OTHERWISE & zoo.MAKERS.keys()),
)
def test_a_model_that_was_saved_lacks_nothing(name, save):
    """Tied and shared weights and buffers are stored once or not at all."""
    loaded = load_model(save(zoo.model(name)), tokenizer=False)
    assert (loaded.missing, dict(loaded.reshaped), loaded.unexpected) == ((), {}, ())
    for key, tensor in zoo.model(name).state_dict().items():
        assert torch.equal(loaded.module.state_dict()[key], tensor), key


@pytest.mark.medium
@some_slow("name", ["bert", "bart", "gpt2", "vit", "swin", "albert"], 2)
def test_what_matters_is_what_the_last_hidden_states_have_a_gradient_in(name):
    """Another route to the same verdict, for each weight alone: differentiation."""
    model, inputs = zoo.fresh(name), zoo.inputs(name, rows=1, length=6)
    sites = first_look(model, inputs).sites
    last = model(**inputs).last_hidden_state
    weights = dict(model.named_parameters())
    direction = torch.randn(last.shape, generator=torch.Generator().manual_seed(0))
    gradients = torch.autograd.grad((last * direction).sum(), list(weights.values()), allow_unused=True)
    seen = set()
    for weight, gradient in zip(weights, gradients, strict=True):
        needed = gradient is not None and bool(gradient.any())
        seen.add(needed)
        loaded = LoadedModel(model, "m", "", None, missing=(weight,))
        if needed:
            with pytest.raises(InputError, match="1 weight is missing"):
                check_weights(loaded, sites, inputs)
        elif not any(weight.startswith(f"{site.site.module_name}.") for site in sites):
            check_weights(loaded, sites, inputs)
    assert True in seen
    assert all(torch.equal(a, b) for a, b in zip(zoo.fresh(name).parameters(), model.parameters(), strict=True))


# --- files that cannot be read ---------------------------------------------------------------------------------------


def _cut(folder: Path) -> None:
    file = folder / TABLE
    file.write_bytes(file.read_bytes()[:-100])


def _other(name: str, content: bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / TABLE).unlink()
        (folder / name).write_bytes(content)

    return change


def _shard_gone(folder: Path) -> None:
    bert().save_pretrained(folder, max_shard_size="5KB")
    (folder / TABLE).unlink(missing_ok=True)
    next(folder.glob("model-00002-of-*.safetensors")).unlink()


def _without_type(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "model_type"}))


def _adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "gpt2"}')


DAMAGES = [
    (_cut, f"{TABLE} .* cannot be read as weights"),
    (_other(TABLE, b"12345"), f"{TABLE} .* cannot be read as weights"),
    (_other("pytorch_model.bin", b"no weights file " * 50), "pytorch_model.bin .* cannot be read as weights"),
    (_other("pytorch_model.bin", b""), "pytorch_model.bin .* cannot be read as weights: EOF|may be cut off"),
    (_other(f"{TABLE}.index.json", b"[1]"), "index.json cannot be read as the list"),
    (_other("model.gguf", b"GGUF\3\0\0\0"), "model.gguf .* cannot be read as weights"),
    (lambda folder: (folder / TABLE).unlink(), "cannot load the model .*no file named model.safetensors"),
    (_shard_gone, "1 of the .* files with the weights of .* are missing: model-00002-of-"),
    (_without_type, "cannot load the model .*model_type"),
    (lambda folder: (folder / "config.json").write_text("{"), "cannot load the model .*not a valid JSON"),
    (lambda folder: (folder / "config.json").unlink(), "is not a model"),
    (_adapter, "holds an adapter"),
]


@pytest.mark.medium
def test_files_that_cannot_be_read_are_named_in_one_sentence(save):
    whole = save(bert())
    for place, (damage, words) in enumerate(DAMAGES):
        folder = whole.with_name(f"damaged-{place}")
        shutil.copytree(whole, folder)
        damage(folder)
        with pytest.raises(InputError, match=words) as raised:
            massieu.describe(folder)
        assert "\n" not in str(raised.value), place
        assert str(folder) in str(raised.value), place


CRAFTED: dict[str, tuple[str, object, str]] = {
    "layers": ("num_hidden_layers", 10**7, r"num_hidden_layers = 10,000,000, and at most 10,000 layers can be read"),
    "parameters": (
        "intermediate_size",
        10**12,
        r"asks for more than 100,000,000 parameters, and its files .* hold [0-9,]+ b",
    ),
    "kind": ("hidden_act", 3, "hidden_act"),
    "type": ("dtype", "x", "has no attribute 'x'"),
    "padding": ("pad_token_id", 10**7, "Padding_idx"),
    "positions": ("max_position_embeddings", 0, "the forward of BertModel fails at the batch"),
    "heads": ("num_attention_heads", -1, "the forward of BertModel fails at the batch"),
    "vocabulary": ("vocab_size", 0, "cannot load the model"),
    "text": ("num_hidden_layers", "x", "num_hidden_layers"),
}


@pytest.mark.medium
@pytest.mark.parametrize(("name", "value", "words"), CRAFTED.values(), ids=CRAFTED)
def test_a_crafted_configuration_is_one_sentence(save, name, value, words):
    folder = save(bert(), **{name: value})
    with pytest.raises(InputError, match=words) as raised:
        massieu.describe(folder)
    assert "\n" not in str(raised.value)


def test_a_mark_beyond_every_integer_of_a_tensor_is_no_token(save):
    folder = save(bert(), eos_token_id=10**19)
    assert len(massieu.describe(folder).sites) == SIZES["num_hidden_layers"]


def test_a_model_of_countless_modules_is_stopped_while_it_is_made(monkeypatch):
    monkeypatch.setattr(model_size, "MOST_MODULES", 10)
    made: list[nn.Module] = []

    def make() -> None:
        made.extend(nn.Sequential(nn.Identity()) for _ in range(1000))

    with pytest.raises(InputError, match="asks for more than 10 modules"), model_size.bounded("it", ()):
        make()
    assert len(made) == 10
    make()  # the bound ends with the block


@pytest.mark.medium
def test_the_command_ends_with_one_line_and_exit_status_2(save):
    folder = save(bert())
    _cut(folder)
    ran = command("describe", folder)
    assert ran.exit_code == 2
    assert len(ran.stderr.splitlines()) == 1
    assert ran.stderr.startswith(f"massieu: {folder}")


@pytest.mark.slow
def test_no_library_adds_a_line_to_what_the_process_says(save):
    folder = save(bert())
    _cut(folder)
    ran = subprocess.run([sys.executable, "-m", "massieu.cli", "describe", folder], capture_output=True, text=True,
                         timeout=120)  # fmt: skip
    assert ran.returncode == 2
    assert len(ran.stderr.splitlines()) == 1
    assert ran.stderr.startswith(f"massieu: {folder}")


@every_row(
    "name, words",
    [
        ("no/such/folder", "no such folder or file, and it is no name"),
        ("x" * 5000, "no such folder or file, and it is no name"),
        ("a\0b", "no such folder or file, and it is no name"),
        (__file__, "is not a model: a folder with a config.json or a .gguf file is needed"),
    ],
)
def test_names_that_are_no_model(name, words):
    with pytest.raises(InputError, match=words):
        checkpoint.find_checkpoint(name, None)


# --- the hub ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_hub_that_is_out_of_reach_is_asked_once_and_gives_one_line(tmp_path):
    """Not six times, with two lines each and half a minute of waiting."""
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    ran = subprocess.run([sys.executable, "-m", "massieu.cli", "describe", "nosuchmodel"], capture_output=True,
                         text=True, env=environment, timeout=120)  # fmt: skip
    assert ran.returncode == 2
    assert len(ran.stderr.splitlines()) == 1, ran.stderr
    assert (
        "cannot load the model nosuchmodel: there is no such folder or file, and the hub cannot be reached"
        in ran.stderr
    )


def test_what_the_hub_answers_is_said(monkeypatch, tmp_path):
    import huggingface_hub as hub
    from huggingface_hub import errors

    asked: list[str] = []
    monkeypatch.setattr(hub, "is_offline_mode", lambda: False)
    cached: dict[str, str] = {}
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda name, file, revision=None: cached.get(file))

    def answering(error: Exception | None) -> None:
        def ask(url: str, timeout: float) -> None:
            asked.append(url)
            if error is not None:
                raise error

        monkeypatch.setattr(hub, "get_hf_file_metadata", ask)

    def answer(kind: type[Exception]) -> Exception:
        error = kind.__new__(kind)
        Exception.__init__(error, "details")
        return error

    for kind, words in (
        (errors.GatedRepoError, "accepted its terms"),
        (errors.RepositoryNotFoundError, "no model of that name on the hub"),
        (errors.RevisionNotFoundError, "no revision 'v9'"),
        (errors.RemoteEntryNotFoundError, "has no config.json"),
        (ConnectionError, "the hub cannot be reached"),
    ):
        asked.clear()
        answering(answer(kind))
        with pytest.raises(InputError, match=words):
            checkpoint.find_checkpoint("some/model", "v9")
        assert asked == ["https://huggingface.co/some/model/resolve/v9/config.json"]
    cached["config.json"] = str(tmp_path)
    found = checkpoint.find_checkpoint("some/model", None)  # out of reach, but on this machine
    assert found.options == {"local_files_only": True}
    monkeypatch.setattr(hub, "is_offline_mode", lambda: True)
    assert checkpoint.find_checkpoint("some/model", "v1").options == {"revision": "v1"}
    cached.clear()
    with pytest.raises(InputError, match="not in the hub's cache on this machine"):
        checkpoint.find_checkpoint("some/model", None)


def test_a_download_is_said(monkeypatch, caplog):
    import huggingface_hub as hub

    cached: set[str] = set()
    monkeypatch.setattr(hub, "is_offline_mode", lambda: False)
    monkeypatch.setattr(hub, "get_hf_file_metadata", lambda url, timeout: None)
    monkeypatch.setattr(
        hub, "try_to_load_from_cache", lambda name, file, revision=None: "x" if file in cached else None
    )
    checkpoint.find_checkpoint("some/model", None)
    assert "downloading some/model from the hub" in caplog.text
    caplog.clear()
    cached.add(TABLE)
    checkpoint.find_checkpoint("some/model", None)
    assert not caplog.text


# --- tokenizers ------------------------------------------------------------------------------------------------------


def tokenizer(folder: Path, words: list[str] = WORDS) -> None:
    from transformers import BertTokenizer

    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)


def bart() -> Any:
    from transformers import BartConfig, BartModel

    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    return BartModel(BartConfig(**sizes, **heads, vocab_size=99, max_position_embeddings=64))


@pytest.mark.medium
def test_a_folder_without_the_tokenizers_files_is_refused(save):
    for make in (bert, gpt2, bart):
        with pytest.raises(InputError, match=r"has no vocabulary .* are missing"):
            massieu.probe(save(make()), massieu.Text(strings="the cat sat on the mat", window=16))


@pytest.mark.medium
def test_a_tokenizer_that_cannot_be_the_models_is_refused(save):
    folder = save(bert())
    tokenizer(folder, WORDS + [f"w{i}" for i in range(100)])
    with pytest.raises(InputError, match=r"cannot be that of .*: it has 111 tokens, and the model embeds 99"):
        massieu.probe(folder, massieu.Text(strings="the cat sat"))
    (folder / "tokenizer.json").write_text("{")
    (folder / "vocab.txt").unlink(missing_ok=True)
    with pytest.raises(InputError, match=r"has no tokenizer \(.+\), so it cannot read text"):
        massieu.probe(folder, massieu.Text(strings="the cat sat"))
    with pytest.raises(InputError, match="is not a tokenizer"):
        massieu.probe(zoo.model("bert"), massieu.Text(tokenizer=lambda text: text, strings="the cat sat"))


@every_row("strange", [99, -1, 2**40])
def test_tokens_beyond_the_embeddings_are_named(strange):
    batch = {"input_ids": torch.tensor([[5, strange, 7, 8]])}
    with pytest.raises(InputError, match=f"hold the token {strange}, and BertModel embeds tokens 0 to 98"):
        massieu.probe(zoo.model("bert"), [batch])


@pytest.mark.medium
def test_an_added_token_beyond_the_embeddings_is_refused_only_where_the_text_has_it(save):
    from transformers import AutoModel, AutoTokenizer

    folder = save(bert(1))
    tokenizer(folder, WORDS + [f"w{i}" for i in range(88)])  # 99 words, as many as the model embeds
    added = AutoTokenizer.from_pretrained(folder)
    added.add_tokens(["<picture>"])
    model = AutoModel.from_pretrained(folder).eval()
    plain = massieu.Text(strings="the cat sat on the mat " * 3, tokenizer=added, window=16)
    assert massieu.probe(model, plain, statistics=["entropy"], draws=0).complete
    strange = massieu.Text(strings="the <picture> sat on the mat", tokenizer=added, window=16)
    with pytest.raises(InputError, match="hold the token 99"):
        massieu.probe(model, strange, statistics=["entropy"], draws=0)


@pytest.mark.medium
def test_the_share_of_unknown_tokens_is_said_and_above_a_twentieth_warned_of(save, tmp_path):
    folder = save(bert(1))
    tokenizer(folder)
    for known, unknown, warning in ((38, 2, None), (37, 3, "(9 of 120)")):
        text = " ".join(["cat"] * known + ["qwertz"] * unknown)
        data = massieu.Text(strings=[text] * 3, window=64, fill_windows=False)
        result = massieu.probe(folder, data, statistics=["entropy"], draws=0)
        assert result.run.text is not None
        assert result.run.text.unknown_share == pytest.approx(unknown / 40)
        warned = [each for each in result.run.warnings if "unknown to the tokenizer" in each]
        if warning is None:
            assert not warned
        else:
            assert len(warned) == 1 and warning in warned[0]
    page = result.save(tmp_path / "out") / "report.html"
    assert "unknown share" in page.read_text()


@pytest.mark.medium
def test_the_terminal_says_it(save, tmp_path):
    folder = save(bert(1))
    tokenizer(folder)
    text = tmp_path / "text.txt"
    text.write_text("cat qwertz " * 40)
    settings = ("--max-length", 16, "--statistics", "entropy", "--out", tmp_path / "out")
    ran = command("probe", folder, "--text", text, *settings)
    assert ran.exit_code == 0, ran.stderr
    assert "50 % of them unknown to the tokenizer" in ran.stdout
    assert "note: 2 weights are not read from the checkpoint" in ran.stdout
    assert "note: 5 weights are in the checkpoint but not in the model" in ran.stdout
    assert "warning: 50 % of the text's tokens" in ran.stderr


@pytest.mark.slow
@every_row(
    "stored, flags, sentence",
    [
        (torch.bfloat16, [], "the checkpoint's weights are bfloat16, and were read and measured in float32"),
        (
            torch.float32,
            ["--dtype", "bfloat16"],
            "the checkpoint's weights are float32, and were read and measured in bfloat16",
        ),
        (torch.bfloat16, ["--dtype", "bfloat16"], None),
        (torch.float32, [], None),
    ],
)
def test_a_checkpoint_that_is_read_in_another_type_is_said(stored, flags, sentence, tmp_path):
    model = bert(1).to(stored)
    folder = tmp_path / f"{stored}{len(flags)}"
    model.save_pretrained(folder)
    tokenizer(folder)
    file = folder / "config.json"  # what the configuration says is not what counts
    file.write_text(json.dumps({**json.loads(file.read_text()), "dtype": "float16"}))
    text, out = tmp_path / "text.txt", folder / "out"
    text.write_text("the cat sat on " * 10)
    ran = command("probe", folder, "--text", text, "--max-length", 8, "--quick", *flags, "--out", out)
    assert ran.exit_code == 0, ran.stderr
    page = (out / "report.html").read_text()
    if sentence is None:
        assert "read and measured in" not in ran.stdout + page
    else:
        assert f"note: {sentence}" in ran.stdout
        assert "The checkpoint&#39;s" + sentence.removeprefix("the checkpoint's") in page
    (folder / TABLE).unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    assert load_model(folder).stored_dtype == str(stored).removeprefix("torch.")


def words_alone(folder: Path, **special: str) -> None:
    """A tokenizer that puts nothing around a text."""
    import tokenizers
    import transformers

    built = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    built.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=built, unk_token="[UNK]", **special).save_pretrained(folder)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ([], "rows begin without the BOS token [CLS], which the tokenizer does not add (bos=True adds it)"),
        (["--bos"], "rows begin with the BOS token [CLS] (bos=True)"),
        (["--no-bos"], "rows begin without the BOS token [CLS] (bos=False)"),
    ],
)
def test_the_page_and_the_terminal_say_whether_rows_begin_with_a_bos_token(flags, sentence, save, tmp_path):
    folder = save(gpt2())
    words_alone(folder, bos_token="[CLS]")
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on " * 10)
    ran = command("probe", folder, "--text", text, "--max-length", 8, "--quick", *flags, "--out", tmp_path / "out")
    assert ran.exit_code == 0, ran.stderr
    assert f"note: {sentence}" in ran.stdout
    page = (tmp_path / "out" / "report.html").read_text()
    assert sentence[0].upper() + sentence[1:] in page


# --- what is said before the weights are read ------------------------------------------------------------------------


@pytest.mark.medium
def test_the_default_window_is_as_long_as_the_model_allows_and_that_is_said(save, tmp_path):
    folder = save(bert(1))  # of 64 positions
    tokenizer(folder)
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on " * 100)
    ran = command("probe", folder, "--text", text, "--quick", "--out", tmp_path / "out")
    assert ran.exit_code == 0, ran.stderr
    sentence = "windows have 64 tokens in place of the default 256: the model has no more positions"
    assert f"note: {sentence}" in ran.stdout
    assert sentence.capitalize() in (tmp_path / "out" / "report.html").read_text()
    assert massieu.ProbeResult.load(tmp_path / "out").run.settings["max_length"] == 64


@pytest.mark.medium
def test_what_the_configuration_decides_is_said_before_the_weights_are_read(save, tmp_path, monkeypatch):
    import transformers

    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", read)
    folder, bare = save(bert(1)), save(bert(1))
    tokenizer(folder)
    for model, data, words in (
        (folder, massieu.Text(strings="cat", window=65), "a window of 65 tokens is more than the 64 positions"),
        (folder, massieu.Pairs(strings=[("cat", "cat")]), "pairs of texts need an encoder–decoder"),
        (bare, massieu.Text(strings="cat"), "has no vocabulary beside its special tokens"),
    ):
        with pytest.raises(InputError, match=words):
            massieu.probe(model, data)


# --- models in memory, and strings -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_tokenizer_may_be_named(save, tmp_path):
    folder, words = save(bert(1)), tmp_path / "words"
    tokenizer(folder)
    words.mkdir()
    tokenizer(words)
    (words / "vocab.txt").unlink()
    bare = save(bert(1))  # as Trainer saves checkpoints that it was given no tokenizer for
    model = load_model(folder, tokenizer=False).module
    how: dict[str, Any] = {"statistics": ["entropy"], "draws": 0}

    def data(tokenizer: Any = None) -> massieu.Text:
        return massieu.Text(strings="the cat sat on the mat " * 9, tokenizer=tokenizer, window=16)

    expected = massieu.probe(folder, data(), **how).heads
    for given in (words, str(words), str(folder)):
        assert massieu.probe(model, data(given), **how).heads.equals(expected)
    compared = massieu.compare(model, model, data=data(str(words)), **how)
    assert compared.differences["difference"].abs().max() == 0
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat " * 9)
    shared = ("--text", text, "--max-length", 16, "--quick", "--statistics", "entropy")
    ran = command("probe", bare, *shared, "--tokenizer", words, "--out", tmp_path / "out")
    assert ran.exit_code == 0, ran.stderr
    ran = command("compare", bare, bare, *shared[:4], "--tokenizer", words, "--out", tmp_path / "compared")
    assert ran.exit_code == 0, ran.stderr
    with pytest.raises(InputError, match="has no tokenizer that can be loaded"):
        massieu.probe(model, data(tmp_path / "out"), **how)
    with pytest.raises(InputError, match="there is no such folder or file"):
        massieu.probe(model, data("no/such"), **how)


def test_a_buffer_on_the_meta_device_is_named():
    model = zoo.fresh("llama")
    model.rotary_emb.inv_freq = model.rotary_emb.inv_freq.to("meta")  # not part of its state: loading leaves it behind
    with pytest.raises(InputError, match=r"meta device.*rotary_emb.inv_freq"):
        massieu.probe(model, [zoo.inputs("llama")])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_dynamically_quantised_models_are_refused():
    quantised = torch.ao.quantization.quantize_dynamic(zoo.fresh("bert"), {nn.Linear}, dtype=torch.qint8)
    for call in (lambda: massieu.probe(quantised, [zoo.inputs("bert")]), lambda: massieu.describe(quantised)):
        with pytest.raises(InputError, match=r"BertModel has packed weights .* quantize_dynamic"):
            call()


@every_row(
    "options, words",
    [
        ({"paths": "a long string " * 500}, r"there is no text a long string .* …: .*massieu.Text\(strings=…\)"),
        ({"paths": ["one sentence", "and another " * 500]}, "there is no text one sentence: .*strings="),
        ({"paths": "a\0b"}, "there is no text"),
        ({"strings": []}, "strings is empty"),
        ({"strings": ["", " \n"]}, "strings is empty"),
        ({"strings": ["a", 3]}, "got int at place 2"),
        ({"strings": ["a", b"b"]}, "got bytes at place 2"),
        ({"strings": "\ud800"}, "half of a surrogate pair"),
        ({"paths": "a.txt", "strings": "b"}, "either paths .* or strings"),
    ],
)
def test_strings_are_no_files(options, words, monkeypatch):
    monkeypatch.setattr(
        "massieu.probing.model.model.load_model", lambda *a, **k: pytest.fail("a model was loaded first")
    )
    with pytest.raises(InputError, match=words):
        massieu.probe(data=massieu.Text(**options))


@pytest.mark.medium
def test_strings_are_read_as_files_are(save, tmp_path):
    folder = save(bert(1))
    tokenizer(folder)
    strings = ["the cat sat on the mats " * 4, "the mat sat on the cat " * 5]
    for place, string in enumerate(strings):
        (tmp_path / f"{place}.txt").write_text(string)
    options: dict[str, Any] = {"statistics": ["entropy"], "draws": 0}
    paths = [tmp_path / "0.txt", tmp_path / "1.txt"]
    files = massieu.probe(folder, massieu.Text(paths, window=16), **options)
    given = massieu.probe(folder, massieu.Text(strings=strings, window=16), **options)
    assert given.heads.equals(files.heads)
    assert given.run.text is not None
    assert given.run.text.documents == 2
    assert given.run.text.source == "2 strings"
    one = massieu.probe(folder, massieu.Text(strings=strings[0], window=16), **options)
    assert one.run.text is not None
    assert one.run.text.source == "1 string"


# --- GGUF ------------------------------------------------------------------------------------------------------------


@every_row("package", ["gguf", "accelerate"])
def test_gguf_files_need_packages_that_are_named(package, tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, package, None)
        with pytest.raises(MissingExtraError, match=rf'{package} is not installed.*pip install "massieu\[gguf\]"'):
            checkpoint.find_checkpoint(file, None)
