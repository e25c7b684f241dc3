"""What may be given to read: one rule, and objects that check themselves."""

from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.rows import every_row

import massieu
from massieu.errors import InputError
from massieu.probing.data.given import given_data

BATCH = {"input_ids": torch.arange(6)[None]}


@every_row(
    "data, kind",
    [
        (None, massieu.Text),
        ("notes.md", massieu.Text),
        (Path("notes"), massieu.Text),
        (["notes.md", Path("notes")], massieu.Text),
        (("-",), massieu.Text),
        ([BATCH], massieu.Batches),
        ([], massieu.Batches),
        ((torch.zeros(1, 2), torch.zeros(1, 2)), massieu.Batches),
        ((batch for batch in [BATCH]), massieu.Batches),
        (torch.utils.data.DataLoader([BATCH], batch_size=None), massieu.Batches),
    ],
)
def test_a_path_names_text_and_every_other_iterable_holds_batches(data, kind):
    assert type(given_data(data)) is kind


def test_an_object_is_taken_as_it_is():
    for data in (massieu.Text(strings="a"), massieu.Pairs(strings=[("a", "b")]), massieu.Batches([BATCH])):
        assert given_data(data) is data


class DataSet:
    """As one of the package `datasets` looks."""

    column_names = ["text"]
    features = None

    def __iter__(self) -> Any:
        return iter([{"text": "a"}])


@every_row(
    "make, words",
    [
        (lambda: given_data(BATCH), "got dict; put one batch in a list"),
        (lambda: given_data(torch.zeros(2, 3)), "got a tensor of torch.float32; put one batch in a list"),
        (lambda: given_data(3), "batches must be an iterable of batches, got 3"),
        (lambda: given_data(str.split), r"give massieu.Text\(paths, tokenizer\) for a tokenizer"),
        (lambda: given_data(DataSet()), r"data is a data set: give massieu.Text\(strings=data, column=…\)"),
        (lambda: given_data(["a.txt", BATCH]), r"must not be strings: give massieu.Text\(strings=…\)"),
        (lambda: massieu.Batches("a.txt"), r"must not be strings: .* massieu.Text\(paths\)"),
        (lambda: massieu.Batches([BATCH], window=3), r"window \(--max-length\) must be at least 4, got 3"),
        (lambda: massieu.Batches([BATCH], documents=1), "documents must be True or False, got 1"),
        (lambda: massieu.Text(window=1.5), "window must be a whole number, got 1.5"),
        (lambda: massieu.Text(limit=0), r"limit \(--max-tokens\) must be at least 1, got 0"),
        (lambda: massieu.Text(continue_for=0), r"continue_for \(--generate\) must be at least 1, got 0"),
        (lambda: massieu.Text(limit=True), "limit must be a whole number, got True"),
        (lambda: massieu.Text(fill_windows="no"), "fill_windows must be True or False, got 'no'"),
        (lambda: massieu.Text(bos=1), "bos must be True or False, got 1"),
        (lambda: massieu.Text([]), "no text was given"),
        (lambda: massieu.Text(["a.txt", 3]), "paths must be files and folders, got 3"),
        (lambda: massieu.Text(BATCH), "paths must be files and folders, got dict"),
        (lambda: massieu.Text("a", [1]), "tokenizer must be a tokenizer or the name of one, got list"),
        (lambda: massieu.Text("a", strings="b"), "give either paths .* or strings"),
        (lambda: massieu.Text(strings=[("a", "b")]), r"got tuple at place 1; pairs of texts are massieu.Pairs\(strings=…\)"),
        (lambda: massieu.Text(strings=["a"], column="b"), r"a column \('b'\) was named, but strings holds texts"),
        (lambda: massieu.Text(column="b"), r"a column \('b'\) was named, but no table that has it"),
        (lambda: massieu.Text(column=3), "column must be a string, got 3"),
        (lambda: massieu.Images([torch.zeros(3, 8, 8)], captions=["a", "b"]), "got 2 captions and 1 images"),
        (lambda: massieu.Images([torch.zeros(3, 8, 8)], processor=3), "must be a processor of images or the name of one"),
    ],
)  # fmt: skip
def test_invalid_data_are_one_sentence(make: Callable[[], Any], words):
    with pytest.raises(InputError, match=words) as error:
        make()
    assert "\n" not in str(error.value)


def test_a_string_that_is_named_like_a_file_is_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("notes.md").write_text("what stands in the file")
    assert [document.text for document in massieu.Text(strings="notes.md").read()] == ["notes.md"]
    assert [document.text for document in massieu.Text("notes.md").read()] == ["what stands in the file"]


def test_iterators_are_stored_as_lists_that_can_be_read_again():
    text = massieu.Text(strings=(each for each in ("a", "b")))
    for each in (text, replace(text, window=8)):
        assert [[document.text for document in each.read()] for _ in range(2)] == [["a", "b"], ["a", "b"]]


def test_objects_do_not_change():
    text = massieu.Text(strings="a")
    with pytest.raises(FrozenInstanceError):
        text.window = 8  # pyright: ignore[reportAttributeAccessIssue]


def test_prompts_have_a_row_each():
    assert massieu.Text().filled and not massieu.Text(continue_for=2).filled
    assert massieu.Batches([BATCH]).filled and not massieu.Batches([BATCH], continue_for=2).filled


@every_row(
    "data, settings",
    [
        (massieu.Text(window=8, limit=9, bos=True), {"max_length": 8, "max_tokens": 9, "bos": True}),
        (massieu.Text("a", "words/", column="b"), {"column": "b", "tokenizer": "words/"}),
        (massieu.Text(fill_windows=False, continue_for=3), {"packing": False, "generate": 3}),
        (massieu.Pairs("a.csv", source="en", target="de"), {"source": "en", "target": "de"}),
        (massieu.Batches([BATCH], documents=True, window=8), {"packing": False, "max_length": 8}),
        (massieu.Images([torch.zeros(3, 8, 8)], "photos/"), {"tokenizer": "photos/"}),
    ],
)
def test_a_record_names_settings_as_those_that_are_stored_do(data, settings):
    defaults = {"column": None, "packing": True, "source": None, "target": None, "bos": None}
    defaults |= {"max_length": None, "max_tokens": None, "generate": None}
    assert data.settings() == defaults | settings
