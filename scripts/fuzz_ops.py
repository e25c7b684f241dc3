"""Hold random calls of every kernel of `massieu.ops` against float64 on explicit matrices.

    python scripts/fuzz_ops.py --cases 3000 --seed 7 [--device cuda] [--seconds 400] [--compiled]

Run it from the checkout. Each case that is wrong is a line that begins with the arguments that repeat it; the exit status
is 1 if there is one. `tests/support/ops/fuzz` says what is drawn and how large a rounding error may be.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.ops.fuzz.command import main

if __name__ == "__main__":
    sys.exit(main())
