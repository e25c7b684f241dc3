"""Repeated tokens: circuits built by hand, the stock model's own attention weights, and eigenvalues of the whole matrix."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.support.rows import some_slow
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5Model,
)

import massieu
from massieu.probing.statistics.repeated import LENGTH, SEQUENCES, RepeatedTokens

WORDS = 60
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
IDS = torch.randint(3, WORDS, (3, 12), generator=torch.Generator().manual_seed(0))
NAMES = ["induction_weight", "duplicate_token_weight", "previous_token_weight"]


def shuffled(model: Any, scale: float = 0.4) -> Any:
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=scale)
            else:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def llama(**other: Any) -> Any:
    return shuffled(LlamaForCausalLM(LlamaConfig(**SIZES | other)))


def rows(result: Any, name: str) -> dict[tuple[str, int], tuple[float, float, float]]:
    table_rows = result.heads.filter(result.heads["statistic"] == name).rows(named=True)
    return {(r["site"], r["head"]): (r["value"], r["standard_error"], r["count"]) for r in table_rows}


def sequences(model: Any, batches: Any, monkeypatch: Any, **options: Any) -> tuple[Any, RepeatedTokens]:
    """A result, and the tokens that were read for it."""
    drawn_sequences: list[RepeatedTokens] = []
    draw = RepeatedTokens.drawn

    def drawn(*given: Any) -> Any:
        drawn_sequences.append(draw(*given))  # pyright: ignore[reportArgumentType]
        return drawn_sequences[-1]

    monkeypatch.setattr(RepeatedTokens, "drawn", drawn)
    result = massieu.probe(model, batches, **{"statistics": ["repeated"], **options})
    return result, drawn_sequences[0]


# --- the tokens --------------------------------------------------------------------------------------------------------


def test_tokens_are_repeated_between_the_first_and_last_tokens_of_rows():
    repeated = RepeatedTokens.drawn(range(10, 80), [1], [2, 3], None, 0)
    assert isinstance(repeated, RepeatedTokens) and repeated.length == LENGTH
    assert repeated.ids.shape == (SEQUENCES, 1 + 2 * LENGTH + 2)
    first, second = repeated.ids[:, 1 : 1 + LENGTH], repeated.ids[:, 1 + LENGTH : 1 + 2 * LENGTH]
    assert torch.equal(first, second) and int(first.min()) >= 10 and int(first.max()) < 80
    assert all(len(set(row)) == LENGTH for row in first.tolist())
    assert (repeated.ids[:, 0] == 1).all() and (repeated.ids[:, -2:] == torch.tensor([2, 3])).all()
    again, other = (RepeatedTokens.drawn(range(10, 80), [1], [2, 3], None, seed) for seed in (0, 1))
    assert torch.equal(again.ids, repeated.ids) and not torch.equal(other.ids, repeated.ids)  # pyright: ignore


@pytest.mark.parametrize(
    ("words", "longest", "length"), [(60, None, 50), (7, None, 7), (60, 32, 15), (60, 33, 15), (4, None, 4)]
)
def test_they_fit_the_model(words, longest, length):
    repeated = RepeatedTokens.drawn(range(words), [1], [2] if longest == 33 else [], longest, 0)
    assert isinstance(repeated, RepeatedTokens) and repeated.length == length
    assert longest is None or repeated.ids.shape[1] <= longest


def test_too_few_words_or_places_are_a_reason():
    for words, longest in ((3, None), (60, 8)):
        reason = RepeatedTokens.drawn(range(words), [1], [], longest, 0)
        assert reason == "repeated tokens need room for twice 4 tokens and as many words, and there are 3"


# --- circuits built by hand --------------------------------------------------------------------------------------------


class Circuit(nn.Module):
    """Two layers of attention, whose first head looks one place back and whose second looks tokens up by it."""

    main_input_name = "input_ids"

    def __init__(self, sharp: float) -> None:
        super().__init__()
        longest = 2 * LENGTH + 1
        self.sharp = sharp
        self.embedding = nn.Embedding.from_pretrained(torch.eye(WORDS))
        self.places = nn.Parameter(torch.eye(longest))
        self.first, self.second = _Looking(longest), _Looking(WORDS)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def forward(self, input_ids: Tensor) -> Tensor:
        token = self.embedding(input_ids)
        place = self.places[: input_ids.shape[1]].expand(len(token), -1, -1)
        before = torch.cat([place[:, :1], place[:, :-1]], 1)
        earlier = self.first(torch.cat([self.sharp * before, place, token], -1))
        return self.second(torch.cat([self.sharp * token, earlier, token], -1))


class _Looking(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.out_proj = nn.Linear(WORDS, WORDS, bias=False)
        nn.init.eye_(self.out_proj.weight)

    def forward(self, state: Tensor) -> Tensor:
        query, key, value = (part[:, None] for part in state.split([self.size, self.size, WORDS], -1))
        hidden = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).triu(1)
        p = torch.softmax((query @ key.mT).masked_fill(hidden, -torch.inf), -1)
        return self.out_proj((p @ value)[:, 0])


def test_a_head_that_looks_tokens_up_scores_one_and_a_flat_one_its_share(monkeypatch):
    result, repeated = sequences(Circuit(sharp=60.0).eval(), [{"input_ids": IDS}], monkeypatch)
    assert repeated.length == LENGTH and repeated.ids.shape[1] == 2 * LENGTH
    previous, induction = (rows(result, name) for name in ("previous_token_weight", "induction_weight"))
    assert previous["first", 0][0] == pytest.approx(1, abs=1e-6) and induction["first", 0][0] < 1e-6
    # The last token of the second time looks up what follows it the first time: the first token, said again.
    assert induction["second", 0][0] > 0.99 and previous["second", 0][0] < 0.01
    flat, _ = sequences(Circuit(sharp=0.0).eval(), [{"input_ids": IDS}], monkeypatch)
    share = np.mean([1 / (place + 1) for place in range(LENGTH, 2 * LENGTH)])
    for name in NAMES:
        for site in ("first", "second"):
            value, error, count = rows(flat, name)[site, 0]
            assert value == pytest.approx(share, rel=1e-5) and error == pytest.approx(0, abs=1e-7)
            assert count == SEQUENCES * LENGTH


# --- the stock model's own weights -------------------------------------------------------------------------------------


def explicit(weights: Tensor, ids: Tensor, length: int) -> dict[str, Tensor]:
    """Per sequence and head, means over the second time of the weights (B, H, L, L)."""
    places = [t for t in range(length, ids.shape[1]) if bool((ids[:, t] == ids[:, t - length]).all())]
    weights = weights.double()
    offsets = dict(zip(NAMES, (length - 1, length, 1), strict=True))
    return {name: torch.stack([weights[:, :, t, t - o] for t in places]).mean(0) for name, o in offsets.items()}


@pytest.mark.medium
@some_slow("kind", ["gpt2", "sliding", "bert", "llama"], 2)
def test_weights_are_the_models_own(kind, monkeypatch):
    if kind == "gpt2":
        config = GPT2Config(
            vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=40, bos_token_id=1, eos_token_id=2
        )
        model: Any = shuffled(GPT2LMHeadModel(config))
    elif kind == "bert":
        sizes = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
        model = shuffled(BertModel(BertConfig(**sizes)))
    elif kind == "sliding":
        from transformers import MistralConfig, MistralForCausalLM

        model = shuffled(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=20)))
    else:
        model = llama()
    ids = IDS.clone()
    ids[:, 0] = 1  # every row begins with it
    result, repeated = sequences(model, [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}], monkeypatch)
    assert repeated.length == (19 if kind == "gpt2" else 50) and (repeated.ids[:, 0] == 1).all()
    eager = type(model)(model.config)
    eager.load_state_dict(model.state_dict())
    eager.eval().set_attn_implementation("eager")
    with torch.no_grad():
        attentions = eager(repeated.ids, output_attentions=True).attentions
    sites = list(dict.fromkeys(result.heads["site"]))
    for layer, site in enumerate(sites):
        for name, expected in explicit(attentions[layer], repeated.ids, repeated.length).items():
            numbers = rows(result, name)
            for head in range(4):
                value, error, _ = numbers[site, head]
                assert value == pytest.approx(float(expected[:, head].mean()), rel=1e-4, abs=1e-6)
                spread = float(expected[:, head].std() / SEQUENCES**0.5)
                assert error == pytest.approx(spread, rel=1e-3, abs=1e-7)
    if kind == "sliding":
        assert all(value == 0 for value, _, _ in rows(result, "induction_weight").values())
    assert {*rows(result, "induction_weight/reinitialised")} == {*rows(result, "induction_weight")}


@pytest.mark.slow
def test_cross_attention_has_none_and_the_decoders_own_has_one(monkeypatch):
    config = T5Config(
        vocab_size=WORDS, d_model=32, d_kv=8, num_layers=1, num_heads=4, d_ff=48, decoder_start_token_id=0
    )
    model = shuffled(T5Model(config), 0.2)
    result, repeated = sequences(model, [{"input_ids": IDS}], monkeypatch)
    numbers = rows(result, "induction_weight")
    assert {site.split(".")[0] for site, _ in numbers} == {"encoder", "decoder"}
    assert not any("EncDec" in site for site, _ in numbers)
    eager = type(model)(model.config)
    eager.load_state_dict(model.state_dict())
    eager.eval().set_attn_implementation("eager")
    started = torch.cat([torch.zeros(SEQUENCES, 1, dtype=torch.long), repeated.ids[:, :-1]], 1)
    with torch.no_grad():
        weights = eager(input_ids=repeated.ids, decoder_input_ids=started, output_attentions=True).decoder_attentions[0]
    expected = explicit(weights, started, repeated.length)["induction_weight"].mean(0)
    values = [value for (site, _), (value, _, _) in numbers.items() if "decoder" in site]
    np.testing.assert_allclose(values, expected.numpy(), rtol=1e-4, atol=1e-6)
    (cross,) = (site for site in result.run.sites if site.kind == "cross")
    assert "not the same made-up tokens" in cross.unavailable["induction_weight"]


# --- copying -----------------------------------------------------------------------------------------------------------


@pytest.mark.medium
@some_slow("kind", ["gpt2", "qwen3", "llama"], 2)
def test_copying_is_the_share_of_all_eigenvalues(kind):
    """Against the eigenvalues of the matrix between all words."""
    if kind == "gpt2":
        config = GPT2Config(
            vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=40, bos_token_id=1, eos_token_id=2
        )
        model: Any = shuffled(GPT2LMHeadModel(config))
        layers, last = model.transformer.h, model.transformer.ln_f.weight
        parts = [(b.ln_1.weight, b.attn.c_attn.weight[:, 64:].T, b.attn.c_proj.weight.T) for b in layers]
        table = model.transformer.wte.weight
    else:
        sizes = SIZES | {"tie_word_embeddings": False}
        model = (
            llama(tie_word_embeddings=False)
            if kind == "llama"
            else shuffled(Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=8)))
        )
        layers, last = model.model.layers, model.model.norm.weight
        parts = [
            (
                b.input_layernorm.weight,
                b.self_attn.v_proj.weight.unflatten(0, (2, 8)).repeat_interleave(2, 0).flatten(0, 1),
                b.self_attn.o_proj.weight,
            )
            for b in layers
        ]
        table = model.model.embed_tokens.weight
    head = model.get_output_embeddings().weight
    result = massieu.probe(model, [{"input_ids": IDS}], statistics=["copying_score"])
    numbers = rows(result, "copying_score")
    for layer, (gain, value, output) in enumerate(parts):
        site = list(dict.fromkeys(result.heads["site"]))[layer]
        for h in range(4):
            part = slice(8 * h, 8 * h + 8)
            step = output[:, part].double() @ value[part].double() * gain.double()
            words = (head.double() * last.double()) @ step @ table.double().T
            eigenvalues = torch.linalg.eigvals(words.detach())
            expected = float(eigenvalues.real.sum() / eigenvalues.abs().sum())
            assert numbers[site, h][0] == pytest.approx(expected, abs=1e-4)


def test_a_head_that_writes_what_it_reads_copies():
    model = llama(tie_word_embeddings=True, num_key_value_heads=4)
    signs = 1.0, -1.0
    with torch.no_grad():
        model.model.norm.weight.fill_(1.0)
        for sign, block in zip(signs, model.model.layers, strict=True):
            block.input_layernorm.weight.fill_(1.0)
            block.self_attn.o_proj.weight.copy_(sign * block.self_attn.v_proj.weight.T)
    numbers = rows(massieu.probe(model, [{"input_ids": IDS}], statistics=["copying_score"]), "copying_score")
    # V WᵀW Vᵀ is symmetric and has no negative eigenvalue.
    assert [value for value, _, _ in numbers.values()] == pytest.approx([1.0] * 4 + [-1.0] * 4, abs=1e-5)


# --- what it is not measured on ----------------------------------------------------------------------------------------


class Pictures(nn.Module):
    main_input_name = "x"

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


def test_a_model_without_words_or_a_head_has_a_reason():
    result = massieu.probe(Pictures().eval(), [{"x": torch.randn(3, 5, 16)}], statistics=["repeated", "entropy"])
    assert [(each.statistic, each.reason) for each in result.run.unavailable if each.of == "model"] == [
        ("repeated", "the model is not given tokens of a vocabulary")
    ]
    assert rows(result, "entropy") and not rows(result, "induction_weight")
    bare = llama().model
    result = massieu.probe(bare, [{"input_ids": IDS}], statistics=["repeated"])
    (unavailable,) = result.run.unavailable
    assert unavailable.statistic == "copying_score" and "no language head" in unavailable.reason
    assert rows(result, "induction_weight") and not rows(result, "copying_score")


def test_a_model_that_breaks_on_them_keeps_the_rest(monkeypatch):
    model = llama()

    def broken(self: Any, *given: Any) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(RepeatedTokens, "inputs", broken)
    result = massieu.probe(model, [{"input_ids": IDS}], statistics=["repeated", "entropy"])
    reasons = {entry.statistic: entry.reason for entry in result.run.unavailable}
    assert reasons["repeated"].endswith("report: RuntimeError: no room")
    assert rows(result, "entropy")


def test_weights_that_are_not_finite_are_in_no_mean(monkeypatch):
    model = llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = torch.nan
    result, _ = sequences(model, [{"input_ids": torch.full((1, 6), 9)}], monkeypatch)
    for value, _, count in rows(result, "previous_token_weight").values():
        assert 0 <= value <= 1 and 0 < count < SEQUENCES * LENGTH


@pytest.mark.medium
@some_slow("dtype", [torch.bfloat16, torch.float64], 1)
def test_other_precisions(dtype, monkeypatch):
    single = rows(sequences(llama(), [{"input_ids": IDS}], monkeypatch)[0], "induction_weight")
    numbers = rows(sequences(llama().to(dtype), [{"input_ids": IDS}], monkeypatch)[0], "induction_weight")
    for key, (value, _, _) in numbers.items():
        assert value == pytest.approx(single[key][0], abs=0.05 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.slow
def test_it_is_opt_in_and_needs_no_control():
    data = [{"input_ids": IDS}]
    for statistics in (None, "quick"):
        assert not rows(massieu.probe(llama(), data, statistics=statistics), "induction_weight")
    result = massieu.probe(llama(), data, statistics=["repeated"], draws=0)
    assert rows(result, "induction_weight") and not rows(result, "induction_weight/reinitialised")
