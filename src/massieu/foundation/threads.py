"""How many threads small problems take."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Everything inside runs on the calling thread alone; afterwards there are as many threads as before.

    Where a problem takes microseconds, waking a second thread costs more than it computes. And where another process
    has its core, the first thread burns its own in waiting for it: twice the time on two cores, minutes for seconds
    on more. Numbers agree to rounding.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
