"""Tokens as readable text: words, with the spaces and line ends that the tokenizer's markers stand for."""

import re
from functools import cache
from typing import TypedDict

BYTE_LEVEL = frozenset("ĠĊĉ")
SENTENCE_PIECE_SPACE = "▁"
CONTINUATION = "##"
VISIBLE = {"\n": "↵", "\r": "↵", "\t": "⇥"}


class Readable(TypedDict):
    """A readable token: its text, whether a space precedes it, and whether a line ends after it."""

    text: str
    space: bool
    line_end: bool


@cache
def _bytes_of_characters() -> dict[str, int]:
    # Byte-level BPE writes each byte as a printable character: printable bytes as themselves, the rest from U+0100 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _from_byte_level(token: str) -> str:
    table = _bytes_of_characters()
    if any(character not in table for character in token):
        return token
    try:
        return bytes(table[character] for character in token).decode("utf-8")
    except UnicodeDecodeError:  # A part of a character, of which only the coded bytes can be shown.
        return token.replace("Ġ", " ")


def _show(character: str) -> str:
    if character in VISIBLE:
        return VISIBLE[character]
    if not character.isprintable():
        return f"⟨U+{ord(character):04X}⟩"
    return character


def readable(tokens: list[str]) -> list[Readable]:
    """Turn a tokenizer's tokens into readable text.

    Understands byte-level BPE (``Ġ``, ``Ċ``), WordPiece (``##``), SentencePiece (``▁``, ``<0x0A>``) and plain text. The
    style is determined from the whole list, since a single token may fit several. Invisible characters are shown by their
    code.

    Args:
        tokens: One window's tokens, in order.

    Returns:
        One entry per token.
    """
    byte_level = any(BYTE_LEVEL & set(token) for token in tokens)
    sentence_piece = any(SENTENCE_PIECE_SPACE in token for token in tokens)
    word_piece = any(token.startswith(CONTINUATION) for token in tokens)
    marks_spaces = byte_level or sentence_piece
    readable_tokens: list[Readable] = []
    for token in tokens:
        text = _from_byte_level(token) if byte_level else token.replace(SENTENCE_PIECE_SPACE, " ")
        byte_match = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", text)
        if byte_match and int(byte_match[1], 16) < 128:
            text = chr(int(byte_match[1], 16))
        continues = word_piece and text.startswith(CONTINUATION)
        if continues:
            text = text.removeprefix(CONTINUATION)
        has_space = text.startswith(" ")
        if not has_space and not marks_spaces:
            # Without markers every token is a word of its own, unless it continues one.
            has_space = not continues
        line_end = "\n" in text
        stripped = text.strip(" ")
        # A token of nothing but spaces shows them; an empty token shows the sign of the empty set.
        shown = "".join(map(_show, stripped)) if stripped else "␣" * len(text) or "∅"
        readable_tokens.append({"text": shown, "space": has_space, "line_end": line_end})
    return readable_tokens
