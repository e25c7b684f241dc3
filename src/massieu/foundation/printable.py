"""Foreign text, such as names of models, keys and tokens, made safe for a terminal."""

import re

# Control characters except line ends and tabs, and the marks that change the direction of the text after them.
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    r"""The text with characters that a terminal would obey written as escapes: the escape character becomes ``\u001b``.

    Line ends and tabs stay. JSON stays JSON of the same content.
    """
    return _INVISIBLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
