"""The colour scales of pages and notebook drawings. All are safe for colour-blind readers.

Sequential: Viridis. Diverging: blue to orange through a neutral that fits the theme.
"""

import numpy as np

from massieu.foundation.numbers import number

SEQUENTIAL = ["#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725"]
DIVERGING = {
    "light": ["#08519c", "#3182bd", "#8fc1e3", "#f3f3f0", "#fdbe85", "#e6772e", "#a63603"],
    "dark": ["#9fd0ff", "#4a9be0", "#2a5f92", "#2b3038", "#8f4a17", "#e0802f", "#ffcf9a"],
}
# Okabe and Ito's palette; each kind of sublayer has a marker shape too, so colour is never the only sign.
KINDS = {
    "attention": {"light": "#0072b2", "dark": "#56b4e9", "symbol": "circle", "sign": "●"},
    "feed_forward": {"light": "#c04a00", "dark": "#f0a030", "symbol": "square", "sign": "■"},
    "norm": {"light": "#00795a", "dark": "#2fc497", "symbol": "diamond", "sign": "◆"},
    "attention_and_feed_forward": {"light": "#a0518a", "dark": "#e09ac8", "symbol": "cross", "sign": "✚"},
}
OTHER_KIND = {"light": "#666666", "dark": "#aaaaaa", "symbol": "star", "sign": "★"}


def scale_of(values: np.ndarray, signed: bool, centre: float) -> tuple[list[str], float, float]:
    """A colour scale, and the numbers of its two ends; for signed numbers `centre` has the middle colour."""
    finite = values[np.isfinite(values)]
    if finite.size == 0:
        return SEQUENTIAL, 0.0, 1.0
    low = float(finite.min())
    high = float(finite.max())
    if signed:
        reach = max(high - centre, centre - low) or 1.0
        return DIVERGING["light"], centre - reach, centre + reach
    return SEQUENTIAL, low, high if high > low else low + 1.0


def meaning(signed: bool, centre: float) -> str:
    """What the colours of `scale_of` say, in words."""
    return f"Blue: below {number(centre)}. Orange: above it." if signed else "Dark: low. Bright: high."


def mix(scale: list[str], position: float) -> str:
    """The colour at ``position`` in [0, 1] of a scale of equally spaced hexadecimal colours."""
    place = min(max(position, 0.0), 1.0) * (len(scale) - 1)
    low = min(int(place), len(scale) - 2)
    ends = [[int(colour[start : start + 2], 16) for start in (1, 3, 5)] for colour in scale[low : low + 2]]
    return "#" + "".join(f"{round(a + (b - a) * (place - low)):02x}" for a, b in zip(*ends, strict=True))
