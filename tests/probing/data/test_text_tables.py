"""Tables of text: each kind of file against the rows it was written from, packed and not, and what is wrong in them."""

import bz2
import csv
import gzip
import io
import json
import lzma
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.rows import every_row

import massieu
from massieu.errors import InputError
from massieu.probing.data.documents import check_sources, documents_of, read_documents

ROWS = ["one", 'a "word", and\nanother line', "", "tab\there; ümlaut 中文 🙂", "x" * 200_000]
PACKED = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


def _separated(rows: list[str], by: str) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, delimiter=by)
    writer.writerows([["id", "body"], *([str(i), text] for i, text in enumerate(rows))])
    return stream.getvalue()


WRITERS: dict[str, Any] = {
    ".jsonl": lambda rows: "\n".join(json.dumps({"id": i, "body": text}) for i, text in enumerate(rows)),
    "objects.json": lambda rows: json.dumps([{"id": i, "body": text} for i, text in enumerate(rows)]),
    "columns.json": lambda rows: json.dumps({"id": list(range(len(rows))), "body": rows}, ensure_ascii=False),
    ".csv": lambda rows: _separated(rows, ","),
    ".tsv": lambda rows: _separated(rows, "\t"),
}


@pytest.mark.parametrize("packing", PACKED)
@pytest.mark.parametrize("kind", WRITERS)
def test_every_kind_of_file_gives_the_rows_it_was_written_from(kind, packing, tmp_path):
    path = tmp_path / f"a{kind}{packing}"
    path.write_bytes(PACKED[packing](WRITERS[kind](ROWS).encode()))
    limit = csv.field_size_limit()
    check_sources([path], column="body")
    assert [document.text for document in read_documents([path], column="body")] == ROWS
    assert csv.field_size_limit() == limit


# A form feed or another line end of Unicode must not end a record; csv makes no difference between its own three.
characters = st.characters(exclude_categories=["Cs"], exclude_characters="\r\0")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.text(characters, max_size=12), min_size=1, max_size=5))
def test_any_characters_come_back(rows, tmp_path):
    for kind, write in WRITERS.items():
        path = tmp_path / f"a{kind}"
        path.write_bytes(b"\xef\xbb\xbf" + write(rows).encode())
        assert [document.text for document in read_documents([path], column="body")] == rows


def test_names_tell_where_a_text_stands(tmp_path):
    table, listed, packed = tmp_path / "a.csv", tmp_path / "b.json", tmp_path / "c.TXT.GZ"
    table.write_text('text,id\n"one\ntwo",1\n\nthree,2\n')
    listed.write_text('["one", "two"]')
    packed.write_bytes(gzip.compress(b"one\r\ntwo"))
    assert [(d.name, d.text) for d in read_documents([table])] == [(f"{table}:2", "one\ntwo"), (f"{table}:5", "three")]
    assert [(d.name, d.text) for d in read_documents([listed])] == [(f"{listed}:1", "one"), (f"{listed}:2", "two")]
    assert [(d.name, d.text) for d in read_documents([packed])] == [(str(packed), "one\ntwo")]


def test_folders_leave_settings_out_unless_a_column_is_named(tmp_path):
    for name, content in {"a.txt": "plain", "package.json": "{}", "b.csv": "body\nrow\n"}.items():
        (tmp_path / name).write_text(content)
    assert [d.text for d in read_documents([tmp_path])] == ["plain"]
    (tmp_path / "package.json").unlink()
    assert [d.text for d in read_documents([tmp_path], column="body")] == ["plain", "row"]
    (tmp_path / "a.txt").unlink()
    with pytest.raises(InputError, match=r"holds only \.json \.csv \.tsv files; name their column of text"):
        check_sources([tmp_path])


@every_row(
    "name, content",
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": null}\n{"text": "b"}\n'),
        ("a.json", b'[{"text": "a"}, {"text": null}, {"text": "b"}]'),
        ("a.json", b'["a", null, "b"]'),
        ("a.json", b'{"text": ["a", null, "b"]}'),
    ],
)
def test_rows_whose_text_is_null_are_passed_over_as_in_parquet(name, content, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    rows_read = [(document.name.rpartition(":")[2], document.text) for document in read_documents([path])]
    assert rows_read == [("1", "a"), ("3", "b")]


BAD: dict[str, tuple[str, bytes, str | None, str]] = {
    "csv column": ("a.csv", b"id,body\n1,x\n", None, r"a\.csv has no column 'text'; its columns are 'id', 'body'"),
    "csv twice": ("a.csv", b"text,text\n1,x\n", None, r"a\.csv has 2 columns 'text'; one is needed"),
    "csv empty": ("a.csv", b"", None, r"has no column 'text'; its columns are none"),
    "csv header alone": ("a.csv", b"text\n", None, r"the text is empty"),
    "csv fields": ("a.csv", b"id,text\n1,a\n2,a, b\n", None, r"a\.csv:3 has 3 fields where the first line names 2"),
    "csv quote": ("a.csv", b'text\n"one\ntwo\n', None, r"a\.csv:2 cannot be read as fields in double quotes"),
    "csv bytes": ("a.csv", b"text\none\n\xff\n", None, r"a\.csv is not UTF-8 text: the byte at offset 9"),
    "json": ("a.json", b'["a"', None, r"a\.json is not valid JSON"),
    "json deep": ("a.json", b"[" * 200_000, None, r"a\.json is not valid JSON"),
    "json form": ("a.json", b'"one"', None, r"a list of strings, a list of objects or an object of columns is needed"),
    "json no list": ("a.json", b'{"text": {"0": "a"}}', None, r"whose column 'text' is no list"),
    "json column": ("a.json", b'{"body": ["a"]}', None, r"has no column 'text'; its columns are 'body'"),
    "json field": ("a.json", b'[{"body": "a"}]', "text", r"a\.json:1 has no column 'text'; its columns are 'body'"),
    "json strings": ("a.json", b'["a"]', "body", r"a\.json:1 is a string, so it has no column 'body'"),
    "json number": ("a.json", b'["a", 3]', None, r"a\.json:2 is not a JSON object"),
    "json null": ("a.json", b'{"text": [null, null]}', None, r"the text is empty"),
    "json half pair": ("a.json", b'["\\ud800"]', None, r"half of a surrogate pair"),
    "json bytes": ("a.json", b'["a\xff"]', None, r"not UTF-8 text: the byte at offset 3"),
    "json bytes behind a mark": ("a.json", b'\xef\xbb\xbf["a\xff"]', None, r"the byte at offset 6"),
    "no gzip": ("a.txt.gz", b"plain", None, r"a\.txt\.gz cannot be unpacked"),
    "cut gzip": ("a.csv.gz", gzip.compress(b"text\n" + b"one\n" * 999)[:-9], None, r"a\.csv\.gz cannot be unpacked"),
    "no bzip2": ("a.txt.bz2", b"plain", None, r"a\.txt\.bz2 cannot be unpacked"),
    "no xz": ("a.txt.xz", b"plain", None, r"a\.txt\.xz cannot be unpacked"),
    "packed parquet": ("a.parquet.gz", b"", None, r"a\.parquet\.gz is of an unknown kind.*all but \.parquet also"),
    "packed unknown": ("a.gz", gzip.compress(b"text"), None, r"a\.gz is of an unknown kind"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_in_a_table_are_named(case, tmp_path):
    name, content, column, message = BAD[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        check_sources([tmp_path / name], column=column)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [".csv", ".jsonl.gz", ".tsv.xz"])
def test_memory_does_not_grow_with_the_file(kind, tmp_path):
    def peak(rows: int) -> int:
        path = tmp_path / f"{rows}{kind}"
        pack = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
        with pack(path, "wt", encoding="utf-8") as stream:
            stream.write("" if "jsonl" in kind else "text\n")
            for i in range(rows):
                stream.write((f'{{"text": "{i:099}"}}' if "jsonl" in kind else f"{i:099}") + "\n")
        tracemalloc.start()
        try:
            assert sum(1 for _ in read_documents([path])) == rows
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    small, large = peak(5_000), peak(50_000)  # half a MB and 5 MB of text
    assert large < small + (1 << 20)


# --- data sets -------------------------------------------------------------------------------------------------------


class _Dataset:
    """What the classes of `datasets` offer, as far as it is used."""

    features = None

    def __init__(self, rows: list[dict[str, Any]], names: list[str] | None) -> None:
        self._rows, self.column_names, self.taken = rows, names, 0

    def __iter__(self) -> Any:
        for row in self._rows:
            self.taken += 1
            yield row

    def select_columns(self, names: list[str]) -> "_Dataset":
        return _Dataset([{name: row[name] for name in names} for row in self._rows], names)


@pytest.mark.parametrize("names", [["id", "body"], None])
def test_a_dataset_is_read_row_by_row(names):
    rows = [{"id": i, "body": text} for i, text in enumerate(["one", None, "three"])]
    description, read = documents_of(_Dataset(rows, names), "body")
    assert description == "column 'body' of a data set"
    for _ in range(2):
        assert [(d.name, d.text) for d in read()] == [("data set:1", "one"), ("data set:3", "three")]
    streamed = _Dataset(rows, None)
    assert next(iter(documents_of(streamed, "body")[1]())).text == "one"
    assert streamed.taken == 1


def test_bad_data_sets_are_named():
    class Splits(dict):
        column_names = {"train": ["text"]}

    with pytest.raises(InputError, match=r"a dictionary of data sets; give one of them: 'train'"):
        documents_of(Splits(train=_Dataset([], ["text"])))
    with pytest.raises(InputError, match=r"the data set has no column 'text'; its columns are 'body'"):
        documents_of(_Dataset([{"body": "a"}], ["body"]))
    for rows, message in (
        ([{"body": "a"}], r"row 1 of the data set has no column 'text'; its columns are 'body'"),
        ([{"text": "a"}, {"text": 3}], r"row 2 of the data set: the column 'text' does not hold text but int"),
        ([{"text": "\ud800"}], r"half of a surrogate pair"),
        ([{"text": " "}, {"text": None}], r"the data set is empty: there is no text in its column 'text'"),
    ):
        with pytest.raises(InputError, match=message):
            list(documents_of(_Dataset(rows, None))[1]())
    with pytest.raises(InputError, match=r"a column \('body'\) was named, but strings holds texts"):
        documents_of(["a"], "body")


@pytest.mark.medium
def test_the_package_datasets_gives_the_numbers_of_the_strings(tmp_path):
    datasets = pytest.importorskip("datasets")
    from tests.probing.data.test_text import _bert
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    small = BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=14,
        max_position_embeddings=8,
    )  # fmt: skip
    model, texts = BertModel(small).eval(), ["the cat sat on a mat.", "a mat.", "the cat."] * 3
    table = datasets.table.InMemoryTable.from_pydict({"id": list(range(9)), "body": texts})
    built = datasets.Dataset(table, fingerprint="built")  # without one it is pickled, which some versions cannot do

    def probed(texts: Any, column: str | None) -> Any:
        data = massieu.Text(strings=texts, tokenizer=_bert(), window=8, column=column)
        return massieu.probe(model, data, statistics=["entropy"]).heads

    expected = probed(texts, None)
    for form in (built, built.to_iterable_dataset(), built.with_format("torch"), built.select([*range(9)])):
        assert probed(form, "body").equals(expected)
    assert massieu.Text(strings=built, column="body").description == "column 'body' of a data set"
    with pytest.raises(InputError, match=r"give one of them: 'train'"):
        probed(datasets.DatasetDict(train=built), "body")


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["a.csv.gz", "a.json"])
def test_a_packed_table_gives_the_numbers_of_the_strings(kind, tmp_path):
    from tests.probing.data.test_text import _bert
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    small = BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=14,
        max_position_embeddings=8,
    )  # fmt: skip
    model, texts = BertModel(small).eval(), ["the cat sat on a mat.", "a mat.", "the cat."] * 3
    path = Path(tmp_path, kind)
    content = (_separated(texts, ",") if "csv" in kind else json.dumps({"body": texts})).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    result = massieu.probe(model, massieu.Text(path, _bert(), window=8, column="body"), statistics=["entropy"])
    strings = massieu.Text(strings=texts, tokenizer=_bert(), window=8)
    assert result.heads.equals(massieu.probe(model, strings, statistics=["entropy"]).heads)
