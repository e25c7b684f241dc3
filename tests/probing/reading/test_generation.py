"""What a model does while it writes, against one plain forward pass over the prompt and what was written."""

from typing import Any

import numpy as np
import pytest
import torch

import massieu
from massieu.errors import InputError
from massieu.probing.model.model import load_model

END, HEADS, WINDOW = 5, 4, 6
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 40,
    "eos_token_id": END,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
IDS = torch.randint(6, 40, (3, 9), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[1, 6:] = 0
BATCH = {"input_ids": IDS, "attention_mask": MASK}
NAMES = ["entropy", "largest_weight", "weight_first", "weight_previous", "weight_diagonal", "effective_sample_size"]


def writer(kind: str = "llama") -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    torch.manual_seed(1)
    if kind == "sliding":
        model: Any = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=WINDOW))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "self_attn" in name or "lm_head" in name:
                parameter.mul_(12)
    if kind == "static":
        model.generation_config.cache_implementation = "static"
    return model.eval()


def written(model: Any, row: int, most: int) -> torch.Tensor:
    """Prompt and greedy continuation of one row alone, up to the end token, by one forward pass a token and no cache."""
    ids = IDS[row][MASK[row].bool()]
    for _ in range(most):
        with torch.no_grad():
            new = model(ids[None], use_cache=False).logits[0, -1].argmax()
        ids = torch.cat([ids, new[None]])
        if new == END:
            break
    return ids


def expected(model: Any, texts: list[torch.Tensor]) -> dict[str, np.ndarray]:
    """Mean over all new tokens of what their queries' attention looks like: statistic → (layers, heads)."""
    model.set_attn_implementation("eager")
    rows: dict[str, list[np.ndarray]] = {name: [] for name in NAMES}
    for row, ids in enumerate(texts):
        start = int(MASK[row].sum())
        with torch.no_grad():
            given = model(ids[None, :-1], output_attentions=True, use_cache=False).attentions
        p = torch.stack(given)[:, 0, :, start - 1 :].double()  # layers, heads, new tokens, keys
        places = torch.arange(start - 1, len(ids) - 1)[None, None, :, None].expand(*p.shape[:3], 1)
        found = {
            "entropy": -torch.xlogy(p, p).sum(-1),
            "largest_weight": p.amax(-1),
            "weight_first": p[..., 0],
            "weight_previous": p.gather(-1, places - 1)[..., 0],
            "weight_diagonal": p.gather(-1, places)[..., 0],
            "effective_sample_size": 1 / p.square().sum(-1),
        }
        for name, value in found.items():
            rows[name].append(value.numpy())
    model.set_attn_implementation("sdpa")
    return {name: np.concatenate(values, -1).mean(-1) for name, values in rows.items()}


def measured(result: massieu.ProbeResult, name: str) -> np.ndarray:
    rows = result.heads.filter(result.heads["statistic"] == name).sort("layer", "head")
    return rows["value"].to_numpy().reshape(-1, HEADS)


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["llama", "static", "sliding"])
def test_each_new_token_is_one_query(kind):
    model, most = writer(kind), 4
    texts = [written(model, row, most) for row in range(len(IDS))]
    lengths = [len(ids) - int(MASK[row].sum()) for row, ids in enumerate(texts)]
    result = massieu.probe(model, massieu.Batches([BATCH], continue_for=most))
    sliding = {"weight_first"} if kind == "sliding" else set()
    for name, value in expected(model, texts).items():
        if name not in sliding:
            np.testing.assert_allclose(measured(result, name), value, rtol=2e-4, atol=1e-6, err_msg=name)
    assert set(result.heads.filter(result.heads["statistic"] == "entropy")["count"]) == {sum(lengths)}
    assert f"{sum(lengths)} tokens that the model wrote" in (result.run.text.source or "")
    if sliding:
        assert "weight_first" not in set(result.heads["statistic"])
        assert all("latest tokens" in site.unavailable["weight_first"] for site in result.run.sites)


@pytest.mark.medium
def test_texts_end_with_their_end_token():
    """What follows in a batch whose other texts go on is padding."""
    model = writer()
    first = int(written(model, 0, 1)[-1])
    model.generation_config.eos_token_id = [first, 39]
    ends = [written(model, row, 4)[-4:].tolist() for row in (0, 2)]
    counted = [next((i for i, t in enumerate(new, 1) if t in (first, 39)), 4) for new in ends]
    assert counted[0] == 1
    result = massieu.probe(model, massieu.Batches([{"input_ids": IDS[[0, 2]]}], continue_for=4))
    assert set(result.heads.filter(result.heads["statistic"] == "entropy")["count"]) == {sum(counted)}


@pytest.mark.medium
def test_sampling_belongs_to_the_seed():
    model = writer()
    model.generation_config.do_sample = True
    state = torch.random.get_rng_state()
    first, again, other = (
        massieu.probe(model, massieu.Batches([BATCH], continue_for=3), seed=seed, statistics=["entropy"])
        for seed in (0, 0, 1)
    )
    assert torch.equal(torch.random.get_rng_state(), state)
    assert np.array_equal(measured(first, "entropy"), measured(again, "entropy"))
    assert not np.array_equal(measured(first, "entropy"), measured(other, "entropy"))


@pytest.mark.medium
def test_errors_are_over_prompts_and_there_is_no_control():
    result = massieu.probe(writer(), massieu.Batches([BATCH], continue_for=5), statistics=["entropy", "weight_first"])
    assert result.run.error_unit.count == 3
    statistics = {name.partition("/")[2] for name in result.heads["statistic"].unique()}
    assert "reinitialised" not in statistics and not any(name.startswith("position") for name in statistics)


@pytest.mark.medium
def test_what_does_not_write_is_refused(tmp_path):
    from transformers import BertConfig, BertLMHeadModel, BertModel

    head_missing, both_ways = (
        BertModel(BertConfig(**{**SIZES, "is_decoder": True})),
        BertLMHeadModel(BertConfig(**SIZES)),
    )
    head_missing.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="its files have no language head"):
        load_model(tmp_path, tokenizer=False, head=True)
    with pytest.raises(InputError, match="attends to later tokens too"):
        massieu.probe(both_ways.eval(), massieu.Batches([BATCH], continue_for=3))
    bert = BertModel(BertConfig(**{**SIZES, "num_attention_heads": 4})).eval()
    for model, keywords, match in (
        (bert, {}, r"BertModel\) does not generate text"),
        (writer(), {"statistics": ["maps"]}, "only statistics of attention are measured, not"),
        (writer(), {"replace": "off"}, "replace and continue_for do not work together"),
    ):
        with pytest.raises(InputError, match=match):
            massieu.probe(model, massieu.Batches([BATCH], continue_for=3), **keywords)
    with pytest.raises(InputError, match=r"continue_for \(--generate\) must be at least 1, got 0"):
        massieu.Batches([BATCH], continue_for=0)
    embedded = {"inputs_embeds": torch.randn(2, 4, 32)}
    with pytest.raises(
        InputError, match=r"continue_for needs batches of input_ids as prompts for .*, and these have inputs_embeds"
    ):
        massieu.probe(writer(), massieu.Batches([embedded], continue_for=3))
    speculating = writer()
    speculating.generation_config.prompt_lookup_num_tokens = 3
    with pytest.raises(InputError, match="does not read one token a pass"):
        massieu.probe(speculating, massieu.Batches([{"input_ids": IDS[:1].repeat(1, 3)}], continue_for=9))


def test_nan_while_writing_is_said():
    model = writer()
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0, 0] = torch.nan
    result = massieu.probe(model, massieu.Batches([BATCH], continue_for=2))
    assert result.trouble is not None and "v_proj" in result.trouble


@pytest.mark.medium
def test_a_model_that_has_no_positions_left_says_how_many_it_has():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 40, "n_positions": 12}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=39)).eval()
    model.generation_config.eos_token_id = None
    assert model.generate(IDS[:1], max_new_tokens=4, do_sample=False).shape[1] == 13
    with pytest.raises(IndexError):
        model.generate(IDS[:1], max_new_tokens=5, do_sample=False)
    how: Any = {"statistics": ["entropy"]}
    assert massieu.probe(model, massieu.Batches([BATCH], continue_for=4), **how).run.text.tokens == 24
    with pytest.raises(InputError, match="has 12 positions: after a prompt of 9 tokens there is room for 4 new ones"):
        massieu.probe(model, massieu.Batches([BATCH], continue_for=5), **how)
    llama = writer()  # rotary positions have no end
    llama.config.max_position_embeddings = 12
    assert massieu.probe(llama, massieu.Batches([BATCH], continue_for=5), **how).complete
