"""The page that sets other libraries beside massieu: it shows what was stored, and massieu's part of it is still so."""

import json
import re

import pytest
import torch
from scripts import side_by_side
from tests.support.printed import differing

PAGE = side_by_side.PAGE.read_text(encoding="utf-8")
STORED = json.loads(side_by_side.STORED.read_text(encoding="utf-8"))
OUTPUTS = STORED["outputs"]


def test_the_page_shows_the_calls_and_what_they_printed():
    assert side_by_side.with_calls(PAGE, STORED) == PAGE, "python -m scripts.side_by_side page"
    shown = re.findall(r"<!-- call (\w+) -->", PAGE)
    assert sorted(shown) == sorted(OUTPUTS) == sorted(side_by_side._CALLS)


def numbers(name: str) -> list[str]:
    return re.findall(r"-?\d+\.\d+", OUTPUTS[name])


def test_the_libraries_agree_where_the_page_says_so():
    of_cat = {numbers(f"encoder_{library}")[0] for library in ("transformer_lens", "nnsight", "massieu")}
    assert of_cat == {"0.747"}
    assert numbers("text_transformer_lens")[0] == numbers("text_massieu")[0]
    assert numbers("head_entmax")[:3] == numbers("head_massieu")[:3]
    assert numbers("memory_hamux") == numbers("memory_massieu")[:3]
    assert "layer 23 head 4" in OUTPUTS["decoder_transformer_lens"] and "L23.H4" in OUTPUTS["decoder_interpkit"]
    before, after = numbers("decoder_transformer_lens")[0], numbers("decoder_massieu")[-1]
    assert float(after) < float(before) / 2


@pytest.mark.medium
@pytest.mark.parametrize("name", ["encoder_massieu", "head_massieu", "memory_massieu"])
def test_what_massieu_printed_is_what_it_prints(name):
    query, key = STORED["query"], STORED["key"]
    given = {
        "encoder": lambda: (*side_by_side.encoder(), side_by_side.SENTENCE),
        "head": lambda: side_by_side.head_inputs(*side_by_side.encoder()),
        "memory": lambda: (query, key),
    }[name.partition("_")[0]]()
    if name == "head_massieu":
        assert given[0][2] == pytest.approx(query, abs=1e-5)
        given = tuple(map(torch.tensor, given))
    assert differing(side_by_side.printed(side_by_side._CALLS[name], *given), OUTPUTS[name]) == []


def test_of_a_scan_the_summary_is_kept():
    def scan() -> None:
        print("table\n\x1b[1mScan Summary\x1b[0m ━━━━\n\n  1  finding  \n")

    assert side_by_side.printed(scan) == "  1  finding\n"
