"""Tokens as a reader sees them, the packing of arrays, and labels of sites."""

import gzip
import json
import re
from base64 import b64decode

import numpy as np
import polars
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tests.support.report.synthetic_results import encoder_decoder
from tokenizers import pre_tokenizers

from massieu.probing.result.stored import run_of
from massieu.report.colours import DIVERGING, SEQUENTIAL, mix
from massieu.report.encode import Block, script_json
from massieu.report.tables import sites_of
from massieu.report.tokens import readable
from massieu.storage.record import RunRecord, json_value


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["Ġthe", "Ġhouse", "s"], " the house|s"),
        (["The", "Ċ", "Ġend"], "The|↵/ end"),
        (["▁Das", "▁Haus", "bar", "<0x0A>"], " Das Haus|bar|↵/"),
        (["[CLS]", "ev", "##alu", "[SEP]"], " [CLS] ev|alu [SEP]"),
        (["\n", "\t", "  ", ""], " ↵/ ⇥ ␣␣ ∅"),
        (["a\u202eb", "\u0000", "\u2028"], " a⟨U+202E⟩b ⟨U+0000⟩ ⟨U+2028⟩"),
        (["Ġ", "Ġâ"], " ␣ â"),
        (["Ġ0", "ĠâĸģĠ"], " 0 ▁"),
        ([], ""),
    ],
)
def test_tokens_are_shown_with_spaces_and_line_ends(tokens: list[str], expected: str) -> None:
    shown = "".join(
        (" " if token["space"] else "|" if place else "") + token["text"] + ("/" if token["line_end"] else "")
        for place, token in enumerate(readable(tokens))
    )
    assert shown == expected


@given(
    st.lists(st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1, max_size=8), min_size=2, max_size=6)
)
def test_byte_level_tokens_decode_to_the_words_that_were_encoded(words: list[str]) -> None:
    # The oracle is the tokenizers library's own byte-level coding.
    coder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens = ["".join(piece for piece, _ in coder.pre_tokenize_str(f" {word}")) for word in words]
    shown = readable(tokens)
    json_value = [entry["text"] for entry in shown if not re.search(r"⟨U\+", entry["text"])]
    assert json_value == [
        word for word, entry in zip(words, shown, strict=True) if not re.search(r"⟨U\+", entry["text"])
    ]
    assert all(entry["space"] for entry in shown)


@given(st.lists(st.text(max_size=6), max_size=8))
def test_any_tokens_become_one_visible_text_each(tokens: list[str]) -> None:
    shown = readable(tokens)
    assert len(shown) == len(tokens)
    assert all(entry["text"].strip() for entry in shown)
    assert all(character.isprintable() for entry in shown for character in entry["text"])


@given(st.lists(st.floats(width=32), min_size=1, max_size=40), st.integers(0, 3))
def test_packed_floats_keep_sixteen_bits_and_every_special_value(values: list[float], others: int) -> None:
    block = Block("any")
    for _ in range(others):
        block.add(np.arange(3), "u1")
    _, offset, length, _ = block.add(np.array(values), "f4")
    raw = gzip.decompress(b64decode(block.text()))
    assert offset % 4 == 0
    back = np.frombuffer(raw, "<f4", count=length, offset=offset)
    exact = np.array(values, dtype=np.float32)
    special = ~np.isfinite(exact) | (np.abs(exact) > 3e38)
    np.testing.assert_array_equal(np.isnan(back), np.isnan(exact))
    np.testing.assert_allclose(back[~special], exact[~special], rtol=2**-16, atol=2**-141)


@pytest.mark.medium
@given(
    st.recursive(st.none() | st.floats() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))
)
def test_script_json_cannot_leave_its_element(value: object) -> None:
    text = script_json(value)
    assert not set("<>&\u2028\u2029") & set(text)
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_sites_of_one_layer_get_different_labels() -> None:
    results = encoder_decoder()
    labels = [site.label for site in sites_of(run_of(results.run, "made up"), results.heads)]
    assert labels[:3] == ["enc 0", "enc 1", "enc 2"]
    assert labels[3:5] == ["dec 0 causal", "dec 0 cross"]
    assert len(set(labels)) == len(labels)


def test_sites_of_one_stack_and_kind_are_a_group() -> None:
    results = encoder_decoder()
    groups = {site.name: site.group for site in sites_of(run_of(results.run, "made up"), results.heads)}
    assert groups["encoder.block.1.self_attn"] == "encoder self-attention"
    assert groups["decoder.block.1.self_attn"] == "decoder causal self-attention"
    assert groups["decoder.block.2.encoder_attn"] == "decoder cross-attention"
    assert len(set(groups.values())) == 3


def test_a_site_that_only_the_table_knows_gets_a_row() -> None:
    table = polars.DataFrame({"site": ["a", "a", "b"], "layer": [0, 0, 0], "head": [0, 1, 0], "statistic": ["x"] * 3})
    sites = sites_of(RunRecord(complete=True, findings=[]), table)
    assert [(site.name, site.label, site.heads, site.first) for site in sites] == [
        ("a", "0", 2, 0),
        ("b", "0 #2", 1, 2),
    ]


def test_colour_scales_hit_their_ends_and_are_monotone_in_lightness() -> None:
    def lightness(colour: str) -> float:
        return sum(
            weight * int(colour[at : at + 2], 16) for weight, at in zip((0.299, 0.587, 0.114), (1, 3, 5), strict=True)
        )

    assert mix(SEQUENTIAL, 0) == SEQUENTIAL[0]
    assert mix(SEQUENTIAL, 1) == SEQUENTIAL[-1]
    assert mix(["#000000", "#ffffff"], 0.5) == "#808080"
    assert np.all(np.diff([lightness(colour) for colour in SEQUENTIAL]) > 0)
    for theme, sign in (("light", 1), ("dark", -1)):
        steps = sign * np.diff([lightness(colour) for colour in DIVERGING[theme]])
        assert np.all(steps[:3] > 0)
        assert np.all(steps[3:] < 0)


@given(
    arrays(
        np.float64,
        st.integers(0, 20),
        elements=st.floats(allow_nan=True, allow_infinity=True)
        | st.floats(-1e4, 1e4)
        | st.integers(-9999, 9999).map(float),
    ),
    st.integers(1, 6),
)
def test_arrays_are_written_as_their_numbers_are(values, digits):
    """An array at once, and its numbers one by one: the same decimals, but for ties that a product may round the other way."""
    result = json_value(values.reshape(1, -1), digits)[0]
    for one, number in zip(result, values.tolist(), strict=True):
        expected = json_value(number, digits)
        if one != expected:
            assert one is not None and expected is not None
            assert one == float(f"{one:.{digits}g}")
            assert abs(one - number) <= abs(expected - number) * (1 + 1e-9)


def test_arrays_of_other_kinds_are_lists():
    assert json_value(np.array([[1, 2], [3, 4]])) == [[1, 2], [3, 4]]
    assert json_value({"a": np.float32(0.5), "b": np.array(np.nan), "c": np.array([True])}) == {
        "a": 0.5,
        "b": None,
        "c": [True],
    }
    assert json_value(np.array([0.1234567, -0.0, 1e300, 1e-300, np.inf], dtype=np.float64), 3) == [
        0.123,
        0.0,
        1e300,
        1e-300,
        None,
    ]
    assert json_value(np.array([0.1], dtype=np.float32)) == [float(np.float32(0.1))]
