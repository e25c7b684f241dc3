"""How many tokens have an activation that is extreme: huge by itself, and compared with all others of its row."""

import torch
from jaxtyping import Float
from torch import Tensor

LEAST_MAGNITUDE = 100.0
LEAST_RATIO = 1000.0
"""Sun, Chen, Kolter and Liu 2024 (arXiv 2402.17762, section 2): massive activations exceed 100 in magnitude and are about 1,000
times as large as the median magnitude of their hidden state, or larger.
"""


def extreme_tokens(states: Float[Tensor, "n d"]) -> int:
    """How many tokens of a row have at least one such activation; the median is over all entries of the row's tokens."""
    magnitudes = states.abs()
    largest = magnitudes.amax(-1)
    # The median costs far more than the maximum, and few rows need it.
    if not bool((largest > LEAST_MAGNITUDE).any()):
        return 0
    # In half precision a thousand times the median may overflow.
    precision = torch.promote_types(states.dtype, torch.float32)
    least = LEAST_RATIO * magnitudes.flatten().to(precision).median()
    is_extreme = (largest > LEAST_MAGNITUDE) & (largest >= least)
    return int(is_extreme.sum())
