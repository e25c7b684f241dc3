"""Calls that are read together give what each of them gives alone. On a GPU they are; here they are asked to be."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.support.probing import plain
from torch import Tensor, nn

import massieu
from massieu.probing.reading import joined_calls
from massieu.probing.sums import accumulate

SIZES = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2}


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Calls are joined on the processor too; how many sites and rows each time."""
    found: list[tuple[int, int]] = []
    take = joined_calls.WaitingCalls.take

    def noted(self: joined_calls.WaitingCalls) -> Iterator[joined_calls.JoinedCalls]:
        for each in take(self):
            found.append((len(each.sites), each.tokens.rows))
            yield each

    monkeypatch.setattr(joined_calls, "DEVICES", frozenset({"cpu"}))
    monkeypatch.setattr(joined_calls.WaitingCalls, "take", noted)
    return found


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    return transformers.GPT2Model(transformers.GPT2Config(n_layer=3, n_head=4, n_embd=32, **SIZES)).eval()


def llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaModel(transformers.LlamaConfig(**sizes, **heads, **SIZES)).eval()


def bart() -> nn.Module:
    torch.manual_seed(0)
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    config = transformers.BartConfig(d_model=32, encoder_layers=2, decoder_layers=2, pad_token_id=0, **heads, **SIZES)
    return transformers.BartModel(config).eval()


def ids(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 50, (rows, length), generator=torch.Generator().manual_seed(seed))


def padded(rows: int, length: int, seed: int) -> dict[str, Tensor]:
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, length // 2 :] = 0
    return {"input_ids": ids(rows, length, seed), "attention_mask": mask}


def probed(model: nn.Module, batches: Any, **options: Any) -> massieu.ProbeResult:
    return massieu.probe(model, batches, **options)


def check_alike(result: massieu.ProbeResult, expected: massieu.ProbeResult) -> None:
    """All numbers to the rounding of scores in float32, and all places exactly.

    A p-value of heads that differ by little more than rounding is itself hardly known.
    """
    keys = ["site", "head", "statistic"]
    assert result.heads.select(keys).equals(expected.heads.select(keys))
    is_p_value = result.heads["statistic"].str.contains("[pq]_value").to_numpy()
    for column in ("value", "standard_error", "count"):
        found, wanted = (each.heads[column].cast(float).to_numpy() for each in (result, expected))
        for chosen, allowed in ((is_p_value, 1e-3), (~is_p_value, 1e-6)):
            np.testing.assert_allclose(found[chosen], wanted[chosen], rtol=1e-5, atol=allowed, err_msg=column)
    places = ["site", "head", "statistic", "window", "query", "key", "query_token", "key_token"]
    assert result.extremes.select(places).equals(expected.extremes.select(places))
    assert result.details["histograms"] == expected.details["histograms"]


CASES: dict[str, tuple[Any, Any]] = {
    "causal, batches of several sizes": (
        gpt2,
        [ids(4, 12, 0), ids(4, 12, 1), ids(3, 12, 2), ids(4, 12, 3), ids(1, 5, 4)],
    ),
    "grouped queries, padding": (llama, [padded(3, 10, seed) for seed in range(4)]),
    "encoder and decoder": (
        bart,
        [{"input_ids": ids(2, 9, seed), "decoder_input_ids": ids(2, 6, seed + 10)} for seed in range(4)],
    ),
    "no transformers": (plain.encoder, [torch.randn(3, 6, 16) for _ in range(3)]),
}


@pytest.mark.parametrize("case", CASES)
def test_calls_that_are_read_together_give_what_each_gives_alone(case, joined, monkeypatch):
    make, batches = CASES[case]
    model = make()
    result = probed(model, batches, statistics=["attention"])
    assert joined and max(sites for sites, _ in joined) > 1 and max(rows for _, rows in joined) > len(batches)
    monkeypatch.setattr(joined_calls, "DEVICES", frozenset())
    joined.clear()
    check_alike(result, probed(model, batches, statistics=["attention"]))
    assert joined == []


def test_what_waits_is_read_as_soon_as_it_takes_its_share_of_memory(joined, monkeypatch):
    model, batches = gpt2(), [ids(4, 12, seed) for seed in range(4)]
    expected = probed(model, batches, statistics="quick")
    assert joined == [(3, 16)]
    joined.clear()
    a_call = 2 * batches[0].numel() * 32 * 4  # bytes of queries and keys
    monkeypatch.setattr(joined_calls, "SHARE", 2**33 // (3 * a_call))
    check_alike(probed(model, batches, statistics="quick"), expected)
    # The fourth call is the first of the second batch: the first site has two batches then, the others one.
    assert joined[:2] == [(1, 8), (2, 4)]
    joined.clear()
    monkeypatch.setattr(joined_calls, "SHARE", 2**33)
    check_alike(probed(model, batches, statistics="quick"), expected)
    assert joined == [], "a call for which there is no room is read alone"


class ChangedLater(nn.Module):
    """Queries and keys are overwritten once attention has been computed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.projections = nn.ModuleList([nn.Linear(8, 24) for _ in range(2)])

    def forward(self, states: Tensor) -> Tensor:
        for projection in self.projections:
            parts = projection(states).unflatten(-1, (3, 2, 4)).transpose(1, 3)
            query, key, value = (part.contiguous() for part in parts.unbind(2))
            output = nn.functional.scaled_dot_product_attention(query, key, value)
            states = states + output.transpose(1, 2).flatten(2)
            query.zero_()
            key.fill_(torch.nan)
        return states


def test_what_the_model_does_to_queries_and_keys_later_is_not_seen(joined, monkeypatch):
    model = ChangedLater().eval()
    batches = [torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    result = probed(model, batches, statistics=["attention"])
    assert joined and result.trouble is None
    monkeypatch.setattr(joined_calls, "DEVICES", frozenset())
    check_alike(result, probed(model, batches, statistics=["attention"]))


class OneMaskForAll(nn.Module):
    """A mask that is written anew for each layer, and by each batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.projections = nn.ModuleList([nn.Linear(8, 24) for _ in range(2)])
        self.register_buffer("mask", torch.zeros(1, 1, 6, 6, dtype=torch.bool), persistent=False)

    def forward(self, states: Tensor, width: Tensor) -> Tensor:
        places = torch.arange(6)
        for layer, projection in enumerate(self.projections):
            self.mask.copy_((places[:, None] - places).abs() <= int(width[0]) + layer)
            query, key, value = projection(states).unflatten(-1, (3, 2, 4)).transpose(1, 3).unbind(2)
            output = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=self.mask)
            states = states + output.transpose(1, 2).flatten(2)
        return states


class WithoutAutocast(nn.Module):
    """Its attention is computed in float32, whatever is said outside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.projections = nn.ModuleList([nn.Linear(8, 24) for _ in range(2)])

    def forward(self, states: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            for projection in self.projections:
                query, key, value = projection(3 * states).unflatten(-1, (3, 2, 4)).transpose(1, 3).unbind(2)
                output = nn.functional.scaled_dot_product_attention(query, key, value)
                states = states + output.transpose(1, 2).flatten(2)
        return states


def states_of(seed: int) -> Tensor:
    return torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(seed))


def test_a_mask_that_is_written_anew_is_read_as_each_call_had_it(joined, monkeypatch):
    model = OneMaskForAll().eval()
    batches = [{"states": states_of(seed), "width": torch.full((3,), seed)} for seed in range(4)]
    result = probed(model, batches, statistics="quick")
    assert joined
    monkeypatch.setattr(joined_calls, "DEVICES", frozenset())
    check_alike(result, probed(model, batches, statistics="quick"))


def test_what_waits_is_read_as_precisely_as_it_was_computed(joined, monkeypatch):
    model, batches = WithoutAutocast().eval(), [states_of(seed) for seed in range(3)]
    with torch.autocast("cpu", torch.bfloat16):
        result = probed(model, batches, statistics="quick")
        assert joined
        monkeypatch.setattr(joined_calls, "DEVICES", frozenset())
        check_alike(result, probed(model, batches, statistics="quick"))


def test_a_loader_may_fill_one_batch_again_and_again(joined, monkeypatch):
    def batches() -> Iterator[dict[str, Tensor]]:
        tokens = torch.empty(3, 8, dtype=torch.long)
        mask = torch.ones(3, 8, dtype=torch.bool)
        for seed in range(4):
            tokens.copy_(ids(3, 8, seed))
            mask.fill_(True)
            mask[0, 2 + seed :] = False
            yield {"input_ids": tokens, "attention_mask": mask}

    model = gpt2()
    result = probed(model, batches(), statistics="quick")
    assert joined
    monkeypatch.setattr(joined_calls, "DEVICES", frozenset())
    check_alike(result, probed(model, batches(), statistics="quick"))


def test_nothing_waits_where_nobody_reads_queries(joined):
    assert probed(gpt2(), [ids(4, 12, 0)], statistics=["stream_cosine"], draws=0).complete
    assert joined == []


class BrokenFor(nn.Module):
    """NaN in the values of one head, in texts that begin with one token."""

    def __init__(self, model: Any, token: int) -> None:
        super().__init__()
        self.model = model
        self.config = model.config
        self.token = token

    def forward(self, input_ids: Tensor, **options: Any) -> Any:
        states = self.model.wte(input_ids)
        broken = (input_ids[:, :1] == self.token)[..., None]
        return self.model(inputs_embeds=torch.where(broken, torch.inf, states), **options)


@pytest.mark.parametrize("at", [0, 1, 3])
def test_the_first_batch_with_numbers_that_are_not_finite_is_named(joined, monkeypatch, at):
    model = BrokenFor(gpt2(), token=2).eval()
    batches = [ids(4, 12, seed) for seed in range(4)]
    batches[at][1, 0] = 2
    result = probed(model, batches, statistics="quick")
    assert joined
    monkeypatch.setattr(joined_calls, "DEVICES", frozenset())
    expected = probed(model, batches, statistics="quick")
    assert result.trouble == expected.trouble
    assert result.trouble is not None and f"windows {4 * at} to {4 * at + 3}" in result.trouble
    check_alike(result, expected)


class InfinitePadding(nn.Module):
    """The queries of padding are infinite."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.projection = nn.Linear(8, 24)

    def forward(self, states: Tensor, attention_mask: Tensor) -> Tensor:
        query, key, value = self.projection(states).unflatten(-1, (3, 2, 4)).transpose(1, 3).unbind(2)
        query = torch.where(attention_mask[:, None, :, None] == 0, torch.inf, query)
        seen = attention_mask[:, None, None].bool()
        output = nn.functional.scaled_dot_product_attention(query, key, value, seen)
        return output.transpose(1, 2).flatten(2)


def test_padding_that_is_infinite_is_no_trouble(joined):
    """The sums of all numbers are not finite then, so every batch is looked at again."""
    batches = [{"states": torch.randn(3, 10, 8), **padded(3, 10, seed)} for seed in range(3)]
    for batch in batches:
        del batch["input_ids"]
    result = probed(InfinitePadding().eval(), batches, statistics="quick")
    assert joined and result.trouble is None


def test_a_result_is_the_same_however_often_its_sums_are_stored(joined, tmp_path):
    model, batches = gpt2(), [ids(4, 12, seed) for seed in range(4)]
    expected = probed(model, batches, statistics="quick")
    joined.clear()
    stored = probed(model, batches, statistics="quick", run=tmp_path / "run")
    check_alike(stored, expected)


def test_sums_of_some_heads_are_those_of_all():
    numbers = np.random.default_rng(0)
    values = numbers.normal(size=(5, 3, 6, 4))
    whole = accumulate.Ratio((3, 6)), accumulate.Spread((6,)), accumulate.Histogram(np.linspace(-1, 1, 5), 6)
    parts = accumulate.Ratio((3, 2)), accumulate.Spread((2,)), accumulate.Histogram(np.linspace(-1, 1, 5), 2)
    chosen = slice(2, 4)
    valid = np.ones((5, 6, 4), dtype=bool)
    for sums, heads in ((whole, slice(None)), (parts, chosen)):
        ratio, spread, histogram = sums
        ratio.update(values[:, :, heads].sum(-1), np.full((5, 3, 1), 4.0))
        spread.update(values[:, 0, heads], valid[:, heads])
        histogram.update(values[:, 0, heads], valid[:, heads])
    assert whole[0].of_heads(chosen).estimate().value.tolist() == parts[0].estimate().value.tolist()
    assert whole[1].of_heads(chosen).value() == pytest.approx(parts[1].value(), rel=1e-14)
    assert whole[2].of_heads(chosen).counts.tolist() == parts[2].counts.tolist()
