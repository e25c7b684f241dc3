"""Text of others, such as names of models, keys and tokens, made safe for a terminal."""

import re

# Control characters but line ends and tabs, and the marks that turn the direction of what follows.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    r"""The text with what a terminal would obey written out: the escape character becomes ``\u001b``.

    Line ends and tabs stay. JSON stays the same JSON.
    """
    return _UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
