"""Prompts, as text and as messages, and what the commands print of them."""

import json
from typing import Any

import pytest
import torch
from tests.support.command_line import checkpoint, run
from tests.support.probing import zoo

import massieu
from massieu.errors import InputError
from massieu.probing.weights.prompt_summary import summarise_prompt

__all__ = ["checkpoint"]  # a fixture
pytestmark = pytest.mark.medium

PROMPT = "The cat sat on the mat"
TOKENS = ["[CLS]", "the", "cat", "sat", "on", "the", "mat", "[SEP]"]
TEMPLATE = (
    "{% for each in messages %}{{ each.role }}: {{ each.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(checkpoint) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint)


def test_a_checkpoint_on_a_prompt(checkpoint):
    from transformers import AutoModel, AutoTokenizer

    result = massieu.attention_weights(checkpoint, PROMPT, layers=1)
    (site,) = result
    assert site.query_tokens == [TOKENS]
    assert site.key_tokens == [TOKENS]
    model = AutoModel.from_pretrained(checkpoint, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = model(
            **AutoTokenizer.from_pretrained(checkpoint)(PROMPT, return_tensors="pt"), output_attentions=True
        )
    torch.testing.assert_close(site.weights, expected.attentions[1], rtol=0, atol=1e-6)


def test_the_default_model():
    """MiniLM, a trained model, beside what transformers returns of it from eager attention."""
    from transformers import AutoModel

    from massieu.probing.model.checkpoint import default_model

    result = massieu.attention_weights(inputs=PROMPT)
    assert [site.layer for site in result] == list(range(6))
    model = AutoModel.from_pretrained(default_model(), attn_implementation="eager").eval()
    ids = torch.tensor([[101, 1996, 4937, 2938, 2006, 1996, 13523, 102]])
    with torch.no_grad():
        expected = model(ids, output_attentions=True).attentions
    for site, own in zip(result, expected, strict=True):
        torch.testing.assert_close(site.weights, own, rtol=0, atol=1e-5)


def test_messages_are_written_by_the_template(checkpoint, tokenizer):
    messages = [{"role": "user", "content": "the cat"}]
    with pytest.raises(InputError, match="has no chat template"):
        massieu.attention_weights(checkpoint, messages)
    tokenizer.chat_template = TEMPLATE
    found = massieu.attention_weights(checkpoint, messages, tokenizer=tokenizer, layers=0).sites[0]
    # The template writes all special tokens, so that no [CLS] stands before them.
    assert found.query_tokens == [["user", ":", "the", "cat", "assistant", ":"]]
    answered = [*messages, {"role": "assistant", "content": "sat"}]
    found = massieu.attention_weights(checkpoint, answered, tokenizer=tokenizer, layers=0).sites[0]
    assert found.query_tokens == [["user", ":", "the", "cat", "assistant", ":", "sat"]]


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_prompt(checkpoint, prompt):
    with pytest.raises(InputError, match="the prompt is empty"):
        massieu.attention_weights(checkpoint, prompt)


def test_a_prompt_that_is_too_long(checkpoint):
    with pytest.raises(InputError, match=r"the prompt has 602 tokens, and .* has 512 positions"):
        massieu.attention_weights(checkpoint, "cat " * 600)


def test_another_models_tokenizer(tokenizer):
    with pytest.raises(InputError, match="the tokenizer cannot be that of BertModel: it has 30,522 tokens"):
        massieu.attention_weights(zoo.model("bert"), PROMPT, tokenizer=tokenizer)


def test_the_summary_ranks_what_it_says(checkpoint):
    found = summarise_prompt(checkpoint, PROMPT)
    result = massieu.attention_weights(checkpoint, PROMPT)
    weights = torch.stack([site.weights[0] for site in result])  # layers, heads, queries, keys
    largest = weights[..., 1:].flatten(2).amax(-1).flatten().sort(descending=True).values
    assert [each.weight for each in found.weights] == pytest.approx(largest.tolist())
    assert len({(each.layer, each.head) for each in found.weights}) == 8
    on_first = weights[:, :, 1:, 0].mean(-1).flatten().sort(descending=True).values
    assert [each.value for each in found.on_first] == pytest.approx(on_first.tolist())
    places = torch.arange(8.0)
    distance = (weights * (places[:, None] - places).abs()).sum(-1).mean(-1).flatten().sort(descending=True).values
    assert [each.value for each in found.distance] == pytest.approx(distance.tolist())


def test_the_picture_of_a_head(checkpoint, tmp_path):
    picture = tmp_path / "new" / "head.svg"
    ran = run("attention", checkpoint, PROMPT, "--head", "1.2", "--out", picture)
    assert ran.exit_code == 0, ran.output
    strongest = massieu.attention_weights(checkpoint, PROMPT, layers=1, heads=2).strongest(1)[0]
    assert f"{strongest.weight:.3f}  '{strongest.query_token}' {strongest.query} → " in ran.output
    assert f"picture: {picture}" in ran.output
    assert picture.read_text(encoding="utf-8").startswith("<?xml")
    assert [path.name for path in picture.parent.iterdir()] == ["head.svg"]


def test_weights_as_json(checkpoint, tmp_path):
    ran = run("attention", checkpoint, PROMPT, "--head", "0.3", "--out", tmp_path / "head.png", "--json")
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert found["query_tokens"] == TOKENS
    own = massieu.attention_weights(checkpoint, PROMPT, layers=0, heads=3).of_head(0, 3)[0]
    torch.testing.assert_close(torch.tensor(found["weights"]), own, rtol=0, atol=1e-6)


def test_a_sentence_alone_is_read_by_the_default_model(tmp_path):
    ran = run("attention", PROMPT, "--head", "5.1", "--out", tmp_path / "head.png", "--json")
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert "the default model" in found["model"]
    own = massieu.attention_weights(inputs=PROMPT, layers=5, heads=1).of_head(5, 1)[0]
    torch.testing.assert_close(torch.tensor(found["weights"]), own, rtol=0, atol=1e-6)


def test_a_sentence_without_a_model_in_python_is_told_from_a_name():
    with pytest.raises(InputError, match="'The cat sat' was taken for the model, so write inputs= before it"):
        massieu.attention_weights("The cat sat", layers=5)


def test_a_probe_of_one_prompt(checkpoint, tmp_path):
    ran = run("probe", checkpoint, PROMPT)
    assert ran.exit_code == 0, ran.output
    assert "one prompt of 8 tokens, 8 heads" in ran.output
    assert "One prompt has no error" in ran.output
    strongest = summarise_prompt(checkpoint, PROMPT).weights[0]
    assert f"{strongest.layer}.{strongest.head}     {strongest.weight:.3f}" in ran.output


REFUSED = {
    "no head": (("attention", "gpt2", "a b", "--head", "five"), "a head is LAYER.HEAD, counted from 0, such as 5.1"),
    "long head": (("attention", "gpt2", "a b", "--head", "0." + "9" * 5000), "a head is LAYER.HEAD"),
    "ending": (("attention", "gpt2", "a b", "--head", "5.1", "--out", "head.txt"), "ends in .png, .svg, .pdf"),
    "no weight": (("attention", "gpt2", "a b", "--head", "5.1", "--top", "0"), "--top must be at least 1, got 0"),
    "nothing": (("attention", "--head", "5.1"), "there is no prompt: put one behind MODEL, or give a sentence alone"),
    "a model alone": (
        ("attention", "gpt2", "--head", "5.1"),
        "put one behind MODEL, which is 'gpt2', or give a sentence",
    ),
    "a file": (("probe", "gpt2", __file__), "is a file or folder; to read it, put --text before it"),
    "both": (("probe", "gpt2", "a b", "--text", "x.txt", "--quick"), "by itself: leave out --text, --quick"),
    "chat": (("probe", "gpt2", "--chat"), "--chat is about a prompt; give one behind MODEL"),
}


@pytest.mark.parametrize("row", REFUSED)
def test_what_the_commands_refuse(row):
    arguments, sentence = REFUSED[row]
    ran = run(*arguments)
    assert ran.exit_code == 2
    assert sentence in ran.output


def test_half_a_character(checkpoint):
    with pytest.raises(InputError, match=r"holds half a character \(a surrogate\)"):
        massieu.attention_weights(checkpoint, "a\ud800")


def test_an_encoder_and_a_decoder_name_their_sites(tmp_path, tokenizer):
    import transformers

    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": len(tokenizer)}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    ran = run("probe", tmp_path, PROMPT)
    assert ran.exit_code == 0, ran.output
    for site in ("encoder.block.0.layer.0.SelfAttention", "decoder.block.0.layer.1.EncDecAttention"):
        assert f"  {site}\n" in ran.output
