"""Pairs of texts for encoder–decoders, against batches that are made by hand from the same tokenizer."""

import gzip
import json
from pathlib import Path
from typing import Any

import polars
import pytest
import torch
import transformers as hf
from tests.support.rows import every_row
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import massieu
from massieu.errors import InputError
from massieu.probing.capture.tokens import BatchTokens
from massieu.probing.compare.stored_results import key_of
from massieu.probing.data.pair_batches import PairBatches, check_pair_model, decoder_tokens
from massieu.probing.data.pairs import Pair
from massieu.probing.run import Measurement

PAIRS = [
    ("the cat sat", "die Katze sass auf der Matte"),
    ("a dog ran to the house on the hill", "ein Hund"),
    ("the", "der"),
    ("on the mat sat a dog", "auf der Matte sass ein Hund ."),
    ("the cat ran", "die Katze lief"),
]
WORDS = sorted({word for pair in PAIRS for side in pair for word in side.split()})
PAD, END, UNKNOWN, LANGUAGE = 0, 1, 2, 3
WORD_IDS = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", "<de>", *WORDS])}


def tokenizer(after: str = "</s>") -> Any:
    """A word a token, with special tokens behind the text."""
    built = Tokenizer(models.WordLevel(WORD_IDS, unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    behind = [(token, WORD_IDS[token]) for token in after.split()]
    built.post_processor = processors.TemplateProcessing(single=f"$A {after}", special_tokens=behind)
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=built, eos_token="</s>", unk_token="<unk>", pad_token="<pad>",
        additional_special_tokens=["<de>"],
    )  # fmt: skip


_BART: dict[str, Any] = {
    "vocab_size": len(WORD_IDS), "d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "max_position_embeddings": 16,
    "pad_token_id": PAD, "eos_token_id": END, "forced_eos_token_id": None,
}  # fmt: skip
_T5: dict[str, Any] = {
    "vocab_size": len(WORD_IDS), "d_model": 16, "d_kv": 8, "d_ff": 8, "num_layers": 1, "num_decoder_layers": 2,
    "num_heads": 2, "decoder_start_token_id": PAD, "pad_token_id": PAD, "eos_token_id": END,
}  # fmt: skip
MODELS: dict[str, Any] = {
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**_T5)),
    "bart": lambda: hf.BartForConditionalGeneration(hf.BartConfig(**_BART, decoder_start_token_id=END)),
    "marian": lambda: hf.MarianMTModel(hf.MarianConfig(**_BART, decoder_start_token_id=PAD)),
    "mbart": lambda: hf.MBartForConditionalGeneration(hf.MBartConfig(**_BART)),
}
BEHIND = {"mbart": "</s> <de>"}
STATISTICS = ["entropy", "weight_special", "largest_score"]


def model(name: str) -> Any:
    """A random one, whose scores differ enough to be told apart."""
    torch.manual_seed(3)
    network = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(0, 0.5)
    return network


def by_hand(network: Any, tokens: Any, pairs: Any = PAIRS, max_length: int = 16, size: int = 2) -> list[dict[str, Any]]:
    """Batches as training makes them: labels of −100 at padding, shifted by the model's own method."""
    batches = []
    for start in range(0, len(pairs), size):
        sources, targets = zip(*pairs[start : start + size], strict=True)
        how = {"padding": True, "truncation": True, "max_length": max_length, "return_tensors": "pt"}
        source = tokens(list(sources), **how)
        target = tokens(text_target=list(targets), **how)
        labels = target["input_ids"].masked_fill(target["attention_mask"] == 0, -100)
        batches.append(
            {
                "input_ids": source["input_ids"],
                "attention_mask": source["attention_mask"],
                "decoder_input_ids": network.prepare_decoder_input_ids_from_labels(labels),
                "decoder_attention_mask": target["attention_mask"],
            }
        )
    return batches


def values(result: Any, statistic: str) -> torch.Tensor:
    return torch.tensor([row["value"] for row in result.heads.rows(named=True) if row["statistic"] == statistic])


@pytest.mark.slow
@every_row("name", MODELS)
def test_the_numbers_are_those_of_batches_made_by_hand(name):
    network, tokens = model(name), tokenizer(BEHIND.get(name, "</s>"))
    options: dict[str, Any] = {"statistics": ["entropy", "largest_score"], "draws": 0}
    few_pairs = PAIRS[:3]  # a whole batch, and a part of one
    result = massieu.probe(
        network, massieu.Pairs(strings=few_pairs, tokenizer=tokens, window=16), batch_size=2, **options
    )
    expected = massieu.probe(network, massieu.Batches(by_hand(network, tokens, few_pairs), window=16), **options)
    assert len(result.heads) == len(expected.heads) > 0
    for statistic in options["statistics"]:
        torch.testing.assert_close(values(result, statistic), values(expected, statistic), rtol=1e-5, atol=1e-6)
    assert result.run.text.tokens == expected.run.text.tokens
    assert result.run.text.windows == len(few_pairs)


@every_row("name", MODELS)
def test_rows_are_what_training_reads(name):
    network, tokens = model(name), tokenizer(BEHIND.get(name, "</s>"))
    trunk = network.base_model  # what a model loaded by name is, without a head that shifts labels
    batches = list(PairBatches(tokens, lambda: pairs(), trunk, name, window=5, batch_size=2))
    for batch, expected in zip(batches, by_hand(network, tokens, max_length=5), strict=True):
        for side in ("", "decoder_"):
            real = expected[f"{side}attention_mask"]
            assert torch.equal(batch.inputs[f"{side}attention_mask"], real)
            ids = batch.inputs[f"{side}input_ids"]
            assert torch.equal(ids * real, expected[f"{side}input_ids"] * real)
        assert batch.target_special is not None
        assert bool(batch.target_special[:, 0].all())
        assert bool(batch.inputs["decoder_attention_mask"][:, 0].all())
        special = batch.inputs["input_ids"] <= LANGUAGE
        assert batch.special is not None and torch.equal(batch.special & real_of(batch), special & real_of(batch))


def real_of(batch: Any) -> torch.Tensor:
    return batch.inputs["attention_mask"].bool()


class OfLanguages(hf.PreTrainedTokenizerFast):
    """Marks the target with its language, as those of multilingual checkpoints do."""

    def _switch_to_target_mode(self) -> None:
        self._put("</s> <de>")

    def _switch_to_input_mode(self) -> None:
        self._put("</s>")

    def _put(self, after: str) -> None:
        self.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {after}", special_tokens=[(token, WORD_IDS[token]) for token in after.split()]
        )


def test_the_target_is_tokenised_as_a_target():
    tokens = OfLanguages(
        tokenizer_object=tokenizer().backend_tokenizer, eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )
    strings = [("the cat", "der"), ("a dog", "ein Hund")]
    batches = PairBatches(tokens, lambda: pairs(strings), model("mbart"), "it", window=8, batch_size=1)
    rows = [(batch.inputs["input_ids"][0].tolist(), batch.inputs["decoder_input_ids"][0].tolist()) for batch in batches]
    ids = WORD_IDS
    assert rows == [
        ([ids["the"], ids["cat"], END], [LANGUAGE, ids["der"], END]),
        ([ids["a"], ids["dog"], END], [LANGUAGE, ids["ein"], ids["Hund"], END]),
    ]


def pairs(strings: Any = PAIRS) -> list[Pair]:
    return [Pair(f"pair {i}", *pair) for i, pair in enumerate(strings)]


def test_the_weight_on_special_tokens_is_known_on_both_sides():
    network, tokens = model("t5"), tokenizer()
    result = massieu.probe(
        network, massieu.Pairs(tokenizer=tokens, strings=PAIRS, window=16), statistics=["weight_special"], draws=0
    )
    batches = by_hand(network, tokens, size=1)
    sums: dict[Any, Any] = {}
    counts = 0
    with torch.no_grad():
        stock = model("t5")
        stock.set_attn_implementation("eager")
        for batch in batches:
            output = stock(**batch, output_attentions=True)
            special = {"text": batch["input_ids"] <= LANGUAGE, "decoder": batch["decoder_input_ids"] <= LANGUAGE}
            read = {"encoder": (output.encoder_attentions, "text"), "decoder": (output.decoder_attentions, "decoder")}
            read["cross"] = output.cross_attentions, "text"
            for part, (weights, side) in read.items():
                on = torch.stack([w[0][..., special[side][0]].sum((-1, -2)) for w in weights])  # (layers, heads)
                sums[part] = sums.get(part, 0) + on.double()
                sums[part, "queries"] = sums.get((part, "queries"), 0) + weights[0].shape[2]
            counts += 1
    assert counts == len(PAIRS)
    expected = {part: sums[part] / sums[part, "queries"] for part in ("encoder", "decoder", "cross")}
    by_kind: dict[Any, str] = {"self": "encoder", "causal": "decoder", "cross": "cross"}
    rows = [row for row in result.heads.rows(named=True) if row["statistic"] == "weight_special"]
    assert len(rows) == 2 * len(result.run.sites) == 10
    for site in result.run.sites:
        got = [row["value"] for row in rows if row["site"] == site.name]
        of_layer = expected[by_kind[site.kind]][site.layer]
        assert got == pytest.approx(of_layer.tolist(), rel=1e-5)


# --- where pairs come from --------------------------------------------------------------------------------------------

FIELDS = [{"id": i, "en": source, "de": target} for i, (source, target) in enumerate(PAIRS)]


def _separated(by: str) -> str:
    return "\n".join(by.join(map(str, row)) for row in [FIELDS[0].keys(), *(row.values() for row in FIELDS)])


WRITERS: dict[str, Any] = {
    "a.jsonl": "\n".join(map(json.dumps, FIELDS)),
    "objects.json": json.dumps(FIELDS),
    "columns.json": json.dumps({name: [row[name] for row in FIELDS] for name in FIELDS[0]}),
    "a.csv": _separated(","),
    "a.tsv": _separated("\t"),
}


def read(*given: Any, **named: Any) -> list[tuple[str | None, str | None]]:
    data = massieu.Pairs(*given, **{"source": "en", "target": "de"} | named)
    return [(pair.source, pair.target) for pair in data.read()]


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("name", WRITERS)
def test_every_table_gives_its_pairs(name, packed, tmp_path):
    content = WRITERS[name].encode()
    path = tmp_path / f"{name}{packed}"
    path.write_bytes(gzip.compress(content) if packed else content)
    assert read(path) == PAIRS
    (tmp_path / "readme.txt").write_text("plain text beside a table in a folder")
    assert read(str(tmp_path)) == PAIRS


def test_parquet_and_values_in_memory_give_their_pairs(tmp_path):
    polars.DataFrame(FIELDS).write_parquet(tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == PAIRS
    assert read(strings=FIELDS) == PAIRS
    assert read(strings=iter(FIELDS)) == PAIRS
    assert read(strings=[list(pair) for pair in PAIRS], source=None, target=None) == PAIRS
    assert read(strings=iter(PAIRS), source=None, target=None) == PAIRS


def test_rows_without_one_side_and_tokens_that_are_cut_are_reported():
    strings = [("the cat", ""), (None, "der"), ("the", "  "), *PAIRS]
    batches = PairBatches(tokenizer(), lambda: pairs(strings), model("bart"), "bart", window=5, batch_size=4)
    tokens = sum(int(batch.inputs[f"{side}attention_mask"].sum()) for batch in batches for side in ("", "decoder_"))
    report = batches.report
    assert (report.documents, report.windows, report.tokens) == (5, 5, tokens)
    # Sources of 3 9 1 6 3 words and targets of 6 2 1 7 3, each with one end, in 5 tokens.
    assert report.dropped == (
        "7 source tokens and 5 target tokens of 3 pairs, beyond a length of 5, were left out; "
        "3 rows without a source or a target were left out"
    )
    assert report.words == tokens - 5 - 5  # less the ends of the sources, and what the decoders start with


def test_pairs_are_read_while_batches_are_made():
    seen: list[int] = []

    def endless() -> Any:
        while True:
            seen.append(len(seen))
            yield Pair(f"pair {len(seen)}", *PAIRS[len(seen) % len(PAIRS)])

    batches = iter(PairBatches(tokenizer(), endless, model("bart"), "bart", window=16, batch_size=4))
    assert [len(next(batches).names) for _ in range(3)] == [4, 4, 4]
    assert len(seen) <= 3 * 4 + 1


def test_max_tokens_counts_both_sides():
    batches = PairBatches(tokenizer(), pairs, model("bart"), "bart", window=16, limit=12, batch_size=4)
    assert [len(batch.names) for batch in batches] == [2]  # 4 + 7 tokens are less than 12
    assert batches.report.tokens == 4 + 7 + 10 + 3
    assert batches.report.dropped == "text after the first 24 tokens was not read (the limit)"


@pytest.mark.medium
def test_batch_size_changes_no_number_and_not_the_digest():
    network, tokens = model("t5"), tokenizer()
    data = massieu.Pairs(strings=PAIRS, tokenizer=tokens, window=16)
    one, many = (massieu.probe(network, data, batch_size=size, statistics=STATISTICS, draws=0) for size in (1, 5))
    for statistic in STATISTICS:
        torch.testing.assert_close(values(one, statistic), values(many, statistic), rtol=1e-5, atol=1e-6)
    assert one.units is not None
    assert many.units is not None
    assert one.units.text == many.units.text is not None


def test_a_decoders_tokens_are_counted_beside_the_text():
    ids = torch.ones(2, 3, dtype=torch.long)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    assert BatchTokens({"input_ids": ids, "decoder_input_ids": ids, "decoder_attention_mask": mask}).counted() == 6 + 4
    assert BatchTokens({"input_ids": ids, "attention_mask": mask}).counted() == 4


def test_a_model_without_a_shift_of_its_own_reads_behind_its_start():
    class Plain(torch.nn.Module):
        config = hf.BartConfig(**_BART, decoder_start_token_id=7)

    assert decoder_tokens(Plain(), [4, 5, 1], "it") == [7, 4, 5]
    Plain.config = hf.BartConfig(**_BART, decoder_start_token_id=None)
    Plain.config.decoder_start_token_id = None
    with pytest.raises(InputError, match="names no decoder_start_token_id"):
        decoder_tokens(Plain(), [4, 5, 1], "it")


def test_a_comparison_knows_its_pairs_again():
    network = model("t5")

    def key(strings: Any, words: Any = None, **options: Any) -> str:
        data = massieu.Pairs(strings=strings, tokenizer=tokenizer() if words is None else words, **options)
        return key_of(network, data, Measurement())

    columns = {"source": "en", "target": "de"}
    assert key(FIELDS, **columns) == key(list(FIELDS), **columns)
    others = {key(FIELDS, **columns), key(FIELDS[1:], **columns), key(PAIRS)}
    others |= {key(FIELDS, source="de", target="en"), key(PAIRS, tokenizer("</s> <de>"))}
    assert len(others) == 5


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"paths": "a.csv", "target": None}, "only source was given; pairs need both columns"),
        ({"paths": "a.csv", "source": None}, "only target was given; pairs need both columns"),
        ({"paths": "a.csv", "target": "en"}, "source and target must be two columns, and both are 'en'"),
        ({"paths": "a.csv", "source": 3}, "source must be a string, got 3"),
        ({}, "either paths .* or strings"),
        ({"paths": "a.csv", "strings": FIELDS}, "either paths .* or strings"),
        ({"strings": "words"}, "strings is a string, which has none"),
        ({"strings": ["words"]}, "item 1 of strings is a string, which has none"),
        ({"strings": [{"en": "a"}]}, "at place 1 of strings has no column 'de'; its columns are 'en'"),
        ({"strings": [{"en": "a", "de": 3}]}, "the column 'de' does not hold text but 3"),
        ({"paths": []}, "no text was given"),
        ({"paths": "-"}, "standard input is plain text"),
        ({"paths": "a.csv", "source": None, "target": None}, "pairs need the names of their columns"),
        ({"strings": "words", "source": None, "target": None}, "pairs need the names of their columns"),
        ({"strings": [], "source": None, "target": None}, "strings is empty"),
        ({"paths": "a.txt"}, "a.txt has none: .jsonl .json .csv .tsv .parquet have columns"),
        ({"paths": "a.csv", "target": "fr"}, "a.csv has no column 'fr'; its columns are 'id', 'en', 'de'"),
        ({"paths": "empty.csv"}, "no pairs: there is no row in it"),
        ({"paths": "null.jsonl"}, "no pairs: no row has both a source and a target"),
        ({"paths": "uneven.json"}, "'en' and 'de' are not lists of one length"),
        ({"paths": "number.json"}, "holds JSON of another form"),
        ({"strings": [("a", "b"), "c"], "source": None, "target": None}, "must hold pairs of strings, but item 2 is str"),
        ({"strings": [("a", "b", "c")], "source": None, "target": None}, "item 1 is a tuple of 3"),
    ],
)  # fmt: skip
def test_bad_pairs_are_refused(named, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("words")
    Path("a.csv").write_text(WRITERS["a.csv"])
    Path("empty.csv").write_text("en,de\n")
    Path("null.jsonl").write_text('{"en": null, "de": "a"}\n{"en": "a", "de": ""}\n{"en": " ", "de": "a"}\n')
    Path("uneven.json").write_text('{"en": ["a"], "de": []}')
    Path("number.json").write_text("3")
    with pytest.raises(InputError, match=message):
        massieu.Pairs(**{"source": "en", "target": "de"} | named).check()


def test_a_bad_call_of_probe_with_pairs_is_refused():
    network, tokens = model("bart"), tokenizer()
    with pytest.raises(InputError, match="tokenizer must be a tokenizer or the name of one, got list"):
        massieu.Pairs(strings=FIELDS, tokenizer=by_hand(network, tokens), source="en", target="de")
    with pytest.raises(InputError, match="has no tokenizer"):
        massieu.probe(network, massieu.Pairs(strings=FIELDS, source="en", target="de", window=16))
    with pytest.raises(InputError, match="does not work with an encoder–decoder"):
        massieu.probe(network, massieu.Text(strings="the cat", tokenizer=tokens, window=16, continue_for=3))
    alone = hf.BartModel(hf.BartConfig(**_BART)).encoder
    with pytest.raises(InputError, match="need an encoder–decoder that reads text on both sides"):
        check_pair_model(alone, tokens, "it")
    tokens.tgt_lang = None
    with pytest.raises(InputError, match="with its language, and the target's is not set"):
        check_pair_model(network, tokens, "it")
    narrow = PairBatches(tokenizer("</s> <de> </s> <de>"), pairs, network, "it", window=4)
    with pytest.raises(InputError, match="a window of 4 tokens leaves no room for the source of pair 0"):
        list(narrow)
