"""Pages are told in sentences that can be read: none has more than 35 words."""

from pathlib import Path

import pytest
from scripts.long_sentences import long_sentences, main, sentences

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.medium
def test_no_page_has_a_long_sentence():
    found = {str(page.relative_to(ROOT)): long_sentences(page.read_text(encoding="utf-8")) for page in PAGES}
    assert not {page: long for page, long in found.items() if long}


def test_a_sentence_ends_where_a_reader_ends_it():
    page = (
        "# One head\n\nTwo words, e.g. these by Ramsauer et al. (2020), eq. 3. Three `a. b. C`? "
        "$`d. E`$ is a formula. [Four](five.md)\n"
        "lines. (b) Seven.\n\n| eight | nine |\n|---|---|\n| ten | N1 one · N2 two |\n\n"
        "```python\neleven. Twelve\n```\n- log. 13!\n"
    )
    assert [sentence for _, sentence in sentences(page)] == [
        "One head",
        "Two words, e.g. these by Ramsauer et al. (2020), eq. 3.",
        "Three CODE?",
        "CODE is a formula.",
        "Four lines.",
        "(b) Seven.",
        "eight",
        "nine",
        "ten",
        "N1 one ·",
        "N2 two",
        "log.",
        "13!",
    ]


def test_words_are_counted_and_signs_are_not(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("Short.\n\n" + "word " * 34 + "= − `code = 1` more.\n")
    ((line, words, _),) = long_sentences(page.read_text())
    assert (line, words) == (3, 36)
    assert main([str(tmp_path)]) == 1
    assert "page.md:3: 36 words: word" in capsys.readouterr().out
    page.write_text("word " * 35 + "= −.\n")
    assert main([str(page)]) == 0
