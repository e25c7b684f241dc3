"""What a terminal would obey is written out, and nothing else is changed."""

import json
import sys
import unicodedata

import pytest

from massieu.foundation.printable import visible


def test_no_control_character_is_left_but_line_ends_and_tabs():
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    kinds = {character for character in visible(every) if unicodedata.category(character) == "Cc"}
    assert kinds == {"\n", "\t"}


def test_no_mark_of_direction_is_left():
    directions = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    left = [
        one for one in map(chr, range(0x3000)) if visible(one) == one and unicodedata.bidirectional(one) in directions
    ]
    assert not left


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", r"\u001b[31mred\u001b[0m"),
        ("\x9b2J", r"\u009b2J"),
        ("a\rb\x08\x7f", r"a\u000db\u0008\u007f"),
        ("\u202egpj", r"\u202egpj"),
        ("Grüße, Ω ▁ 東京 👩‍👩‍👧\n\tπ ≈ 3", "Grüße, Ω ▁ 東京 👩‍👩‍👧\n\tπ ≈ 3"),
    ],
    ids=["escape", "eight bits", "return", "direction", "text"],
)
def test_visible(text, shown):
    assert visible(text) == shown


def test_json_stays_the_same_json():
    value = {"key \x1b]0;title\x07": ["\x9b", "\u202e", "\\u001b", "\x7f"]}
    assert json.loads(visible(json.dumps(value, ensure_ascii=False, indent=1))) == value
