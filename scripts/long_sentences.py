"""Sentences of more than 35 words in Markdown: `python scripts/long_sentences.py README.md docs`.

A heading, a table's cell and an item of a list end a sentence too. Code or a formula in a line is one word, a link's target
none. Blocks of code are not read.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

MOST_WORDS = 35
MARKDOWN = MarkdownIt("commonmark").enable("table")
SHORT = re.compile(r"\b(?:e\.g|i\.e|et al|eqs?|vs|cf|Thm|Prop|Cor|Fig|no)\.$")
END = re.compile(r"(?: ·|[.!?…][\"'”’)]*)\s+(?=[\"'“‘(]*[^\Wa-z]|\([a-z]+\) )")
"""A point and what closes with it, before what may begin a sentence: a capital, a number, (b). Or a dot · between items."""


def sentences(markdown: str) -> Iterator[tuple[int, str]]:
    """Each sentence and the line where its paragraph begins."""
    for token in MARKDOWN.parse(markdown):
        if token.type == "inline":
            yield from ((_line(token), sentence) for sentence in _split(_text(token)))


def long_sentences(markdown: str) -> list[tuple[int, int, str]]:
    """Line, number of words and text of every sentence that is too long."""
    counted = ((line, _words(sentence), sentence) for line, sentence in sentences(markdown))
    return [found for found in counted if found[1] > MOST_WORDS]


def _line(token: Token) -> int:
    return token.map[0] + 1 if token.map else 0


def _text(token: Token) -> str:
    """A paragraph as it is read; code in it, a formula and an image are a word each."""
    kinds = {"code_inline": "CODE", "image": "IMAGE", "softbreak": " ", "hardbreak": " "}
    text = "".join(part.content if part.type == "text" else kinds.get(part.type, "") for part in token.children or ())
    return text.replace("$CODE$", "CODE")  # a formula


def _split(paragraph: str) -> Iterator[str]:
    start = 0
    for end in END.finditer(paragraph):
        if not SHORT.search(paragraph[start : end.start() + 1]):
            yield paragraph[start : end.end()].strip()
            start = end.end()
    yield paragraph[start:].strip()


def _words(sentence: str) -> int:
    return sum(any(sign.isalnum() for sign in word) for word in sentence.split())


def main(arguments: list[str]) -> int:
    """Print what is too long; 1 if there is any."""
    paths = [
        page for path in map(Path, arguments) for page in (sorted(path.rglob("*.md")) if path.is_dir() else [path])
    ]
    found = [(path, *long) for path in paths for long in long_sentences(path.read_text(encoding="utf-8"))]
    for path, line, words, sentence in found:
        print(f"{path}:{line}: {words} words: {sentence}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
