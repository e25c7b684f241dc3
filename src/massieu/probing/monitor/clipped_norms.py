"""Gradient norms that look as if they were measured after clipping, and not before."""

import math

CLIPPED_RECORDS = 3
CLIPPED_WITHIN = 1e-4
"""Norms of so many records that equal the greatest to this share of it are taken for clipped.

`torch.nn.utils.clip_grad_norm_` with bound c leaves c·‖g‖/(‖g‖ + 1e-6), which is c to 1e-5 from ‖g‖ = .1 on, and rounding
adds some 1e-6. No norm exceeds c, so that clipped ones are the greatest. A norm that is not clipped and varies by a tenth is
so near the greatest by chance once in a thousand records, and two of three are once in a million.
"""


class ClippedNorms:
    """Notices gradient norms that were clipped: the greatest of them comes again and again."""

    def __init__(self) -> None:
        self._greatest = 0.0
        self._near_greatest = 0  # records
        self._noticed = False

    def notices(self, norm: float) -> bool:
        """Whether the norms so far, with this one, look clipped for the first time."""
        if self._noticed or not 0 < norm < math.inf:
            return False
        if norm > self._greatest * (1 + CLIPPED_WITHIN):
            self._near_greatest = 0
        self._greatest = max(self._greatest, norm)
        if norm >= self._greatest * (1 - CLIPPED_WITHIN):
            self._near_greatest += 1
        self._noticed = self._near_greatest == CLIPPED_RECORDS
        return self._noticed
