"""The number of threads for small problems."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """A context in which PyTorch computes on the calling thread alone; afterwards it has as many threads as before.

    If a problem takes microseconds, waking a second thread costs more time than it saves. If another process occupies that
    thread's core, the first thread waits for it at full load: twice the time on two cores, minutes instead of seconds on
    more. Numbers agree with those of several threads to rounding.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
