"""Cyclic garbage, for tests of what is held: collected without a look at everything that the process has loaded."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def of_the_block() -> Iterator[None]:
    """Within the block `gc.collect()` looks at what was made in it alone, which takes a millisecond and not a second."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
