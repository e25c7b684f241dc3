"""The largest and smallest over the text and where they stand, against every query of a plain model's own attentions."""

from typing import Any

import numpy as np
import polars
import pytest
import torch
from torch import Tensor, nn

import massieu
from massieu.probing.capture.attention_call import AttentionCall, AttentionSite
from massieu.probing.capture.tokens import Tokens
from massieu.probing.statistics.catalogue import PACKAGE
from massieu.probing.statistics.extremes import EXTREMES, PLACES, Extremes, Places
from massieu.probing.statistics.query_means import query_statistics
from massieu.probing.statistics.query_reading import QueryReading

HEADS, LENGTH, WINDOWS = 4, 12, 6
IDS = torch.randint(3, 40, (WINDOWS, LENGTH), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[2, 8:] = 0


def llama() -> Any:
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 48}
    model = LlamaModel(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=40)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "self_attn" in name:
                parameter.mul_(12)
    return model


def batches(size: int) -> list[dict[str, Tensor]]:
    return [{"input_ids": IDS[i : i + size], "attention_mask": MASK[i : i + size]} for i in range(0, WINDOWS, size)]


def entropies(model: Any) -> Tensor:
    """(layers, windows, heads, queries) from the model's own attentions; NaN at padding."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        p = torch.stack(model(IDS, attention_mask=MASK, output_attentions=True).attentions).double()
    model.set_attn_implementation("sdpa")
    numbers = -torch.xlogy(p, p).sum(-1)
    return numbers.masked_fill(~MASK.bool()[None, :, None], torch.nan)


@pytest.mark.parametrize("end", ["maximum", "minimum"])
def test_the_entropy_of_each_head(end):
    model = llama()
    result = massieu.probe(model, batches(3), statistics=["entropy"], draws=0)
    expected, extremes = entropies(model).numpy(), result.extremes
    for row in extremes.filter(polars.col("statistic") == f"entropy/{end}").rows(named=True):
        head_entropies = expected[row["layer"], :, row["head"]]
        best = np.nanmax(head_entropies) if end == "maximum" else np.nanmin(head_entropies)
        assert row["value"] == pytest.approx(best, rel=1e-4, abs=1e-6)
        assert head_entropies[row["window"], row["query"]] == pytest.approx(best, rel=1e-4, abs=1e-6)
        assert 0 <= row["key"] <= row["query"] and MASK[row["window"], row["query"]]
    assert len(extremes) == 2 * 2 * HEADS and extremes["query_token"].is_null().all()  # there is no tokenizer


def test_the_largest_score_is_that_of_its_key():
    """Nothing else gives the number that logits are clipped by: a mean over queries does not."""
    model = llama()
    calls: dict[str, list[AttentionCall]] = {}

    def keep(call: AttentionCall) -> Tensor:
        calls.setdefault(call.site.name, []).append(call)
        return call.output

    with torch.no_grad(), massieu.replaced(model, keep):
        model(IDS, attention_mask=MASK)
    result = massieu.probe(model, batches(4), statistics=["largest_score"], draws=0)
    for row in result.extremes.rows(named=True):
        (call,) = calls[row["site"]]
        key = call.key.double().repeat_interleave(2, 1)[:, row["head"]]
        scores = call.scale * call.query[:, row["head"]].double() @ key.mT
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1) | ~MASK.bool()[:, None]
        scores = scores.masked_fill(hidden | ~MASK.bool()[:, :, None], -torch.inf)
        assert row["value"] == pytest.approx(float(scores.max()), rel=1e-4)
        assert float(scores[row["window"], row["query"], row["key"]]) == pytest.approx(float(scores.max()), rel=1e-5)
    mean = result.heads.filter(polars.col("statistic") == "largest_score").sort("site", "head")["value"]
    assert (result.extremes.sort("site", "head")["value"] > mean + 0.1).all()


@pytest.mark.medium
def test_batches_change_nothing():
    model = llama()
    first, other = (massieu.probe(model, batches(size), statistics=["attention"], draws=0).extremes for size in (2, 6))
    columns = ["site", "head", "statistic", "window", "query", "key"]
    assert first.select(columns).equals(other.select(columns))


@pytest.mark.medium
def test_places_of_extremes_name_their_tokens(tmp_path):
    from transformers import BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "rivers", "and", "cities"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tokenizer = BertTokenizer(str(tmp_path / "vocab.txt"))
    result = massieu.probe(
        llama(), massieu.Text(tokenizer=tokenizer, strings=["rivers and cities"], window=8), statistics=["entropy"]
    )
    read = [words[number] for number in tokenizer("rivers and cities")["input_ids"]]
    for row in result.extremes.rows(named=True):
        assert (row["query_token"], row["key_token"]) == (read[row["query"]], read[row["key"]])
    result.save(tmp_path / "out")
    assert massieu.ProbeResult.load(tmp_path / "out").extremes.equals(result.extremes)


def call_of(query: Tensor, key: Tensor) -> AttentionCall:
    value, output = torch.zeros_like(key), torch.zeros(*query.shape[:1], query.shape[2], query.shape[1], key.shape[3])
    return AttentionCall(
        AttentionSite("site"), nn.Identity(), query, key, value, None, True, 1.0, None, None, output
    )  # fmt: skip


def updated(into: Extremes, query: Tensor, key: Tensor, windows: list[int]) -> None:
    call = call_of(query, key)
    real = torch.ones(query.shape[0], query.shape[2], dtype=torch.bool)
    positions = torch.arange(query.shape[2])
    reading = QueryReading(call, Tokens(real, None), Tokens(real, None), positions, itself=True)
    into.update(query_statistics(reading, PACKAGE.query_functions), call, Places(positions, windows, len(windows)))


def test_any_split_in_any_order_gives_the_whole():
    """Equal extremes too: the first in the text is kept, whoever has read it."""
    generator = torch.Generator().manual_seed(3)
    query, key = (torch.randint(-1, 2, (6, 2, 5, 3), generator=generator).float() for _ in range(2))
    whole = Extremes(2)
    updated(whole, query, key, list(range(6)))
    for parts in ([[0, 1, 2], [3, 4, 5]], [[5, 1], [0, 4], [2, 3]], [[3], [0, 1, 2, 4, 5]]):
        merged = Extremes(2)
        for part in parts:
            own = Extremes(2)
            for window in sorted(part):
                updated(own, query[[window]], key[[window]], [window])
            restored = Extremes(2)
            restored.restore(own.state())
            merged.merge(restored)
        assert np.array_equal(merged.best, whole.best) and np.array_equal(merged.places, whole.places)
    assert whole.places.shape == (len(EXTREMES), 2, len(PLACES))


def test_numbers_that_are_not_finite_are_not_extremes():
    query, key = torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2)
    query[0, 0, 1] = torch.nan
    found = Extremes(1)
    updated(found, query, key, [7])
    assert found.places[0, 0, 0] == 7 and np.isfinite(found.best[:, 0]).all()
    nothing = Extremes(1)
    updated(nothing, torch.full_like(query, torch.nan), key, [0])
    assert np.isnan([nothing.value(row) for row in range(len(EXTREMES))]).all() and (nothing.places == -1).all()


def test_long_windows_form_no_array_of_all_pairs(monkeypatch):
    """A mask of 32,768 tokens by as many would take a gigabyte: what is read of a sample of queries must not need one."""
    length, visible = 256, AttentionCall.visible

    def seen(call: AttentionCall) -> Tensor:
        assert call.query.shape[2] < length, "a mask of all pairs"
        return visible(call)

    monkeypatch.setattr(AttentionCall, "visible", seen)
    ids = torch.randint(3, 40, (2, length), generator=torch.Generator().manual_seed(1))
    result = massieu.probe(llama(), [{"input_ids": ids}], query_sample=16, statistics="quick")
    assert result.complete and not result.run.unavailable  # examples, which a quick run leaves out, are cut in pieces
