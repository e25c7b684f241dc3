"""Models that other libraries hold: each is given as it is, and read as the module inside.

`make bridges` runs them with TransformerLens and nnsight, which are in an environment of their own.
"""

import copy
import math
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

import massieu
from massieu.errors import InputError
from massieu.probing.model.unwrap import tokenizer_of, unwrapped

PAGE = Path(__file__).parents[3] / "docs/how-to/from_transformer_lens.md"
PROMPT = "the cat sat on the mat because it was tired"
WORDS = ["<unk>", "<eos>", *dict.fromkeys(PROMPT.split()), "dog", "ran"]
BATCH = {"input_ids": torch.randint(2, len(WORDS), (2, 12), generator=torch.Generator().manual_seed(0))}


def make_tokenizer() -> Any:
    """A tokenizer of whole words."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "<unk>", "eos_token": "<eos>", "bos_token": "<eos>", "pad_token": "<eos>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GPT-2 with sharp heads, and its tokenizer."""
    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    size = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}
    config = transformers.GPT2Config(vocab_size=len(WORDS), **size, bos_token_id=1, eos_token_id=1)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def loaded(checkpoint: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, **options).eval()


def eager_weights(checkpoint: Path, inputs: dict[str, Tensor]) -> Tensor:
    """What transformers' own eager attention gives: (layers, B, H, L, N)."""
    with torch.no_grad():
        output = loaded(checkpoint, attn_implementation="eager")(**inputs, output_attentions=True)
    return torch.stack(output.attentions)


def check_reads(model: Any, checkpoint: Path) -> None:
    """That weights of a batch are transformers' own, and that probe, describe and Monitor take the object too."""
    expected = eager_weights(checkpoint, BATCH)
    result = massieu.attention_weights(model, BATCH)
    for site, weights in zip(result, expected, strict=True):
        torch.testing.assert_close(site.weights, weights, rtol=1e-4, atol=1e-5)
    probed = massieu.probe(model, [BATCH], statistics=["attention"], draws=0)
    entropy = torch.special.entr(expected).sum(-1).mean((1, 3))  # layers, heads
    torch.testing.assert_close(torch.from_numpy(probed.matrix("entropy")).float(), entropy, rtol=1e-4, atol=1e-5)
    assert len(massieu.describe(model, BATCH).sites) == 2
    record = massieu.Monitor(model, BATCH)(0)
    of_module = massieu.Monitor(loaded(checkpoint), BATCH)(0)
    name = "massieu/layer1/entropy_mean"
    assert record is not None and of_module is not None and record[name] == pytest.approx(of_module[name], rel=1e-4)


def check_reads_prompt(model: Any, checkpoint: Path) -> None:
    """That a prompt needs no tokenizer beside the object."""
    result = massieu.attention_weights(model, PROMPT)
    length = result.sites[0].weights.shape[-1]
    ids = make_tokenizer()(PROMPT, return_tensors="pt")["input_ids"]
    if length == ids.shape[1] + 1:  # TransformerLens begins with a BOS token
        ids = torch.cat([torch.ones(1, 1, dtype=torch.long), ids], dim=1)
    expected = eager_weights(checkpoint, {"input_ids": ids})
    torch.testing.assert_close(result.of_head(1, 2), expected[1, :, 2], rtol=1e-4, atol=1e-5)
    tokens = result.sites[0].query_tokens
    assert tokens is not None and tokens[0][-1] == "tired"


# --- transformers and accelerate -------------------------------------------------------------------------------------


@pytest.mark.medium
def test_a_pipeline(checkpoint: Path) -> None:
    pipeline = transformers.pipeline("text-generation", model=str(checkpoint))
    check_reads(pipeline, checkpoint)
    check_reads_prompt(pipeline, checkpoint)
    text = massieu.Text(strings=[PROMPT] * 8, window=8)
    assert massieu.probe(pipeline, text, statistics=["entropy"], draws=0).run.model.architecture == "GPT2Model"
    compared = massieu.compare(pipeline, pipeline.model, data=[BATCH] * 4, statistics=["entropy"], draws=0)
    assert len(compared.models) == 2


@pytest.mark.medium
def test_a_trainer(checkpoint: Path, tmp_path: Path) -> None:
    arguments = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    model = loaded(checkpoint)
    trainer = transformers.Trainer(model=model, args=arguments, processing_class=make_tokenizer())
    check_reads(trainer, checkpoint)
    check_reads_prompt(trainer, checkpoint)
    model.train()
    with pytest.raises(InputError, match="training mode"):
        massieu.attention_weights(trainer, BATCH)


@pytest.mark.medium
def test_a_model_that_accelerate_prepared(checkpoint: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    prepared = accelerate.Accelerator(cpu=True).prepare_model(loaded(checkpoint), evaluation_mode=True)
    check_reads(prepared, checkpoint)
    check_reads(accelerate.dispatch_model(loaded(checkpoint), {"": "cpu"}), checkpoint)


def test_what_holds_no_model() -> None:
    class LLM:
        """Of the name of vLLM's class, and not of vLLM."""

    for thing in (LLM(), 3, object()):
        with pytest.raises(
            InputError, match=r"model must be a name, a path, a torch\.nn\.Module or a massieu\.Checkpoint"
        ):
            massieu.attention_weights(thing, BATCH)
        with pytest.raises(InputError, match=r"model must be a torch\.nn\.Module, got"):
            massieu.Monitor(thing, BATCH)


@pytest.mark.parametrize("call", [massieu.attention_weights, massieu.probe, massieu.describe, massieu.Monitor])
def test_vllm_is_refused_in_one_sentence(call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    class LLM:
        """In the place of vLLM's own, which needs a GPU."""

    vllm = types.ModuleType("vllm")
    vllm.LLM = LLM
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    data = [BATCH] if call is massieu.probe else BATCH
    with pytest.raises(
        InputError, match="vLLM attends in kernels of another process, where no score can be seen; give"
    ):
        call(LLM(), data)


def test_a_processor_holds_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Trainer of a model that also sees images has a processor, whose tokenizer reads the text."""
    trainer = object.__new__(transformers.Trainer)
    trainer.processing_class = types.SimpleNamespace(tokenizer=make_tokenizer())
    assert tokenizer_of(trainer).get_vocab()["cat"] > 1
    trainer.processing_class = None
    assert tokenizer_of(trainer) is None
    assert tokenizer_of(nn.Linear(1, 1)) is None


# --- as TransformerLens 1 to 3 write attention -----------------------------------------------------------------------


class HookedBlock(nn.Module):
    """Attention with a norm for each of queries, keys and values, and zeros in the place of NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attn = HookedAttention()

    def forward(self, state: Tensor) -> Tensor:
        return state + self.attn(self.norm(state), self.norm(state), self.norm(state))


class HookedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(4, 2, 8, 4, generator=torch.Generator().manual_seed(1))
        self.query_weight, self.key_weight, self.value_weight, self.output_weight = map(nn.Parameter, weight)

    def forward(self, query_input: Tensor, key_input: Tensor, value_input: Tensor) -> Tensor:
        query = torch.einsum("bld,hde->blhe", query_input, self.query_weight)
        key = torch.einsum("bld,hde->blhe", key_input, self.key_weight)
        value = torch.einsum("bld,hde->blhe", value_input, self.value_weight)
        scores = torch.einsum("blhe,bnhe->bhln", query, key) / math.sqrt(4)
        length = scores.shape[-1]
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        pattern = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        pattern = torch.where(torch.isnan(pattern), torch.zeros_like(pattern), pattern)
        self.pattern = pattern.detach()
        mixed = torch.einsum("bhln,bnhe->blhe", pattern, value)
        return torch.einsum("blhe,hde->bld", mixed, self.output_weight)


class HookedModel(nn.Module):
    """Its forward takes token ids under another name, and has options beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(WORDS), 8)
        self.blocks = nn.ModuleList([HookedBlock() for _ in range(2)])

    def forward(self, input: Tensor, return_type: str = "logits", attention_mask: Tensor | None = None) -> Tensor:
        state = self.embed(input)
        for block in self.blocks:
            state = block(state)
        return state


def test_zeros_for_nan_and_a_norm_for_each_input_are_self_attention() -> None:
    torch.manual_seed(0)
    model = HookedModel().eval()
    for inputs in (BATCH, BATCH["input_ids"], {"input": BATCH["input_ids"]}):
        result = massieu.attention_weights(model, inputs)
        for site, block in zip(result, model.blocks, strict=True):
            torch.testing.assert_close(site.weights, block.attn.pattern, rtol=1e-5, atol=1e-6)
            assert site.kind == "causal"
        assert result.rollout().shape == (2, 12, 12)
    prompted = massieu.attention_weights(model, PROMPT, tokenizer=make_tokenizer())
    assert prompted.sites[0].query_tokens == [PROMPT.split()]
    probed = massieu.probe(model, massieu.Text(strings=[PROMPT] * 8, tokenizer=make_tokenizer(), window=8), draws=0)
    assert probed.matrix("entropy").shape == (2, 2)
    assert massieu.Monitor(model, BATCH)(0)


class ZeroedAfterwards(nn.Module):
    """Weights of which some are zero although their keys are seen."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(8, 8)

    def forward(self, state: Tensor) -> Tensor:
        weights = (state @ state.mT).softmax(-1)
        weights = torch.where(weights < 0.2, 0.0, weights)
        return self.output(weights @ state)


def test_weights_that_are_cut_are_still_refused() -> None:
    state = torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(0))
    with pytest.raises(InputError):
        massieu.attention_weights(ZeroedAfterwards().eval(), state)


# --- TransformerLens and nnsight -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("compatibility", [False, True])
def test_a_transformer_bridge(checkpoint: Path, compatibility: bool) -> None:
    bridges = pytest.importorskip("transformer_lens.model_bridge")
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    options = {"hf_model": loaded(checkpoint), "tokenizer": tokenizer, "device": "cpu"}
    bridge = bridges.TransformerBridge.boot_transformers("gpt2", **options).eval()
    if compatibility:
        bridge.enable_compatibility_mode()
    check_reads(bridge, checkpoint)
    check_reads_prompt(bridge, checkpoint)
    # Its own cache, of the same tokens.
    _, cache = bridge.run_with_cache(BATCH["input_ids"])
    weights = massieu.attention_weights(bridge, BATCH).of_head(1, 2)
    torch.testing.assert_close(weights, cache["blocks.1.attn.hook_pattern"][:, 2], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_page_for_its_users_says_the_same_twice(checkpoint: Path) -> None:
    """A block of TransformerLens (`py`) names its result `theirs`, the block of massieu (`python`) after it `ours`."""
    bridges = pytest.importorskip("transformer_lens.model_bridge")
    blocks = re.findall(r"```(py|python)\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert [kind for kind, _ in blocks] == ["python"] + ["py", "python"] * 8
    (_, set_up), *pairs = blocks
    names: dict[str, Any] = {}
    exec(set_up, names)
    options = {"tokenizer": transformers.AutoTokenizer.from_pretrained(checkpoint), "device": "cpu"}
    model = copy.deepcopy(names["model"])
    names["bridge"] = bridges.TransformerBridge.boot_transformers("gpt2", hf_model=model, **options)
    names["bridge"].enable_compatibility_mode(no_processing=True)
    for (_, there), (_, here) in zip(pairs[::2], pairs[1::2], strict=True):
        exec(there, names)
        exec(here, names)
        torch.testing.assert_close(names.pop("ours"), names.pop("theirs"), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:LanguageModel is deprecated")
def test_an_nnsight_language_model(checkpoint: Path) -> None:
    nnsight = pytest.importorskip("nnsight")
    model = nnsight.LanguageModel(str(checkpoint), device_map="cpu", dispatch=True)
    check_reads(model, checkpoint)
    check_reads_prompt(model, checkpoint)
    assert unwrapped(model) is model._module
    wrapped = nnsight.NNsight(loaded(checkpoint))
    check_reads(wrapped, checkpoint)
    with pytest.raises(InputError, match="GPT2LMHeadModel has no tokenizer to read a prompt with"):
        massieu.attention_weights(wrapped, PROMPT)
    # What it changes is not undone: a trace works as before.
    with wrapped.trace(**BATCH):
        logits = wrapped.lm_head.output.save()
    assert logits.shape == (2, 12, len(WORDS))
