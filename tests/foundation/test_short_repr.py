"""Values and results as one line: bounded, right about the numbers, and safe where there are none to read."""

import importlib
import pkgutil
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

import massieu
from massieu import energy, measures, ops
from massieu.foundation.short_repr import fields_html, fields_repr, html_table, short_repr, tensor_repr


def test_a_small_tensor_is_written_out() -> None:
    assert tensor_repr(torch.tensor([[0.5, -2.0], [1e-9, float("nan")]])) == "tensor([[0.5, -2], [1e-09, nan]])"
    assert tensor_repr(torch.tensor(2.0, dtype=torch.float64)) == "tensor(2, float64)"
    assert tensor_repr(torch.tensor([True, False])) == "tensor([True, False])"


@given(st.lists(st.floats(width=32), min_size=7, max_size=30))
def test_the_range_is_that_of_the_numbers(numbers: list[float]) -> None:
    known = [number for number in numbers if number == number]
    text = tensor_repr(torch.tensor(numbers))
    expected = [f"({len(numbers)},), float32"]
    if known:
        low, high = (f"{value:.4g}" for value in (min(known), max(known)))
        expected.append(f"{low} to {high}".replace("-0 ", "0 "))
    if len(known) < len(numbers):
        expected.append(f"{len(numbers) - len(known)} NaN")
    # Of 0 and −0 either may be the smallest.
    assert re.sub(r"-0\b(?!\.)", "0", text) == re.sub(r"-0\b(?!\.)", "0", f"tensor({', '.join(expected)})")


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.zeros(3, 4, device="meta"), "tensor((3, 4), float32, meta)"),
        (torch.zeros(0, 3), "tensor((0, 3), float32)"),
        (torch.full((9,), torch.nan), "tensor((9,), float32, 9 NaN)"),
        (torch.zeros(9, dtype=torch.bool), "tensor((9,), bool)"),
        (torch.zeros(9, dtype=torch.complex64), "tensor((9,), complex64)"),
        (torch.zeros(9, dtype=torch.bfloat16), "tensor((9,), bfloat16, 0 to 0)"),
        (torch.zeros(9).to(torch.float8_e4m3fn), "tensor((9,), float8_e4m3fn)"),
        (torch.zeros(9, dtype=torch.uint16), "tensor((9,), uint16)"),
        (torch.arange(9, dtype=torch.int8), "tensor((9,), int8, 0 to 8)"),
        (torch.eye(3).to_sparse(), "tensor((3, 3), float32)"),
        (torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]), "nested tensor(float32)"),
        (torch.zeros(1).expand(2**12, 2**12), "tensor((4096, 4096), float32)"),  # too many to look through
    ],
    ids=str,
)
def test_every_kind_of_tensor(tensor: torch.Tensor, expected: str) -> None:
    assert tensor_repr(tensor) == expected


def test_numbers_that_nobody_has_are_not_read() -> None:
    with FakeTensorMode():
        assert tensor_repr(torch.zeros(3)) == "tensor((3,), float32)"
    texts: list[str] = []

    def remember(row: torch.Tensor) -> torch.Tensor:
        texts.append(tensor_repr(row))
        return row

    torch.func.vmap(remember)(torch.zeros(2, 3))
    assert texts == ["tensor((3,), float32)"]


def test_a_long_structure_is_cut() -> None:
    parts = [measures.Gaussian.create(torch.zeros(300), torch.ones(300)) for _ in range(50)]
    text = repr(measures.mixture([1 / 50] * 50, parts))
    assert len(text) < 1_000 and "… 46 more" in text
    assert short_repr(list(range(1000))) == "[0, 1, 2, 3, … 996 more]"
    assert short_repr({"a": torch.zeros(100)}) == "{'a': tensor((100,), float32, 0 to 0)}"
    assert len(short_repr("x" * 10_000)) < 200


def test_values_and_results() -> None:
    memory = energy.HopfieldEnergy.create(torch.eye(64), scale=20.0)
    assert len(repr(memory)) < 300
    assert "points=tensor((64, 64), float32, 0 to 1)" in repr(memory)
    assert repr(memory.to("meta")).count("meta") >= 2
    query = torch.zeros(1, 1, 8, 4)
    result = ops.attention(query, query, query)
    assert repr(result) == (
        "AttentionResult(output=tensor((1, 1, 8, 4), float32, 0 to 0), "
        f"log_partition=tensor((1, 1, 8), float32, {torch.tensor(8.0).log():.4g} to {torch.tensor(8.0).log():.4g}))"
    )


def test_a_notebook_shows_a_table_of_the_fields() -> None:
    query = torch.zeros(1, 1, 8, 4)
    result = ops.attention(query, query, query)
    html = result._repr_html_()
    assert html.startswith("<p><strong>AttentionResult</strong></p><table><tr><th>field</th>")
    assert "<tr><td>output</td><td>tensor((1, 1, 8, 4), float32, 0 to 0)</td></tr>" in html
    assert html.count("<tr>") == 1 + len(result._fields)
    memory = energy.HopfieldEnergy.create(torch.eye(2), scale=20.0)
    assert memory._repr_html_().count("<tr>") == 4  # memory, reference, scale


def test_a_table_shows_foreign_text_as_text() -> None:
    table = html_table(("<b>",), [("a\x1b[2J & <script>",)], title="<i>")
    assert table == (
        "<p><strong>&lt;i&gt;</strong></p><table><tr><th>&lt;b&gt;</th></tr>"
        "<tr><td>a\\u001b[2J &amp; &lt;script&gt;</td></tr></table>"
    )


@pytest.mark.medium
def test_every_result_that_is_a_named_tuple_prints_so() -> None:
    whole = []
    for module in pkgutil.walk_packages(massieu.__path__, "massieu."):
        if ".cuda" in module.name or module.name.endswith("__main__"):
            continue
        for name, member in vars(importlib.import_module(module.name)).items():
            is_result = isinstance(member, type) and issubclass(member, tuple) and hasattr(member, "_fields")
            if (
                is_result
                and name.endswith("Result")
                and not name.startswith("_")
                and not (member.__repr__ is fields_repr and member._repr_html_ is fields_html)
            ):
                whole.append(f"{module.name}.{name}")
    assert whole == []
