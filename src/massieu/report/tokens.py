"""Tokens as a reader wants them: words, with spaces and line ends where the tokenizer's markers say so."""

import re
from functools import cache
from typing import TypedDict

BYTE_LEVEL = frozenset("ĠĊĉ")
SENTENCE_PIECE_SPACE = "▁"
CONTINUATION = "##"
VISIBLE = {"\n": "↵", "\r": "↵", "\t": "⇥"}


class Readable(TypedDict):
    """A token to show: its text, whether a space stands before it, whether a line ends after it."""

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
    except UnicodeDecodeError:  # part of a character: only the coded bytes can be shown
        return token.replace("Ġ", " ")


def _show(character: str) -> str:
    if character in VISIBLE:
        return VISIBLE[character]
    if not character.isprintable():
        return f"⟨U+{ord(character):04X}⟩"
    return character


def readable(tokens: list[str]) -> list[Readable]:
    """Turn a tokenizer's tokens into text to show.

    Understands byte-level BPE (``Ġ``, ``Ċ``), WordPiece (``##``), SentencePiece (``▁``, ``<0x0A>``) and plain text. The
    style is read from the whole list, since a token alone does not tell. Invisible characters are shown by their code.

    Args:
        tokens: One window's tokens, in order.

    Returns:
        One entry per token.
    """
    byte_level = any(BYTE_LEVEL & set(token) for token in tokens)
    sentence_piece = any(SENTENCE_PIECE_SPACE in token for token in tokens)
    word_piece = any(token.startswith(CONTINUATION) for token in tokens)
    marked = byte_level or sentence_piece
    shown: list[Readable] = []
    for token in tokens:
        text = _from_byte_level(token) if byte_level else token.replace(SENTENCE_PIECE_SPACE, " ")
        if code := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", text):
            byte = int(code[1], 16)
            text = chr(byte) if byte < 128 else text
        continues = word_piece and text.startswith(CONTINUATION)
        body = text.removeprefix(CONTINUATION) if continues else text
        space = body.startswith(" ") if marked or body.startswith(" ") else not continues
        line_end = "\n" in body
        stripped = body.strip(" ")
        body = "".join(map(_show, stripped)) if stripped else "␣" * len(body) or "∅"
        shown.append({"text": body, "space": space, "line_end": line_end})
    return shown
