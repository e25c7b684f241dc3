"""Runs a function in several Gloo processes of this machine and brings back what it returns."""

import datetime
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Processes are forked off one that has loaded what takes seconds and has begun nothing: the first costs as much as a
# spawned one, the others next to nothing.
multiprocessing.set_forkserver_preload(["torch.distributed.device_mesh", "massieu.ops.sharded", "massieu.population"])


def run(function: Callable[[int, int], object], size: int, timeout: float = 30.0) -> list[Any]:
    """`function(rank, size)` of every process; it must be importable, and what it returns must be picklable."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _process, (function, size, folder, timeout), size, join=False, start_method="forkserver"
        )
        while not context.join():
            pass
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(size)]


def run_first(function: Callable[[int, int], object], size: int, timeout: float) -> object:
    """What `function` returns in process 0, whatever becomes of the others."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _process, (function, size, folder, timeout), size, join=False, start_method="forkserver"
        )
        for process in context.processes:
            process.join(60)
            if process.is_alive():
                process.kill()
        return torch.load(Path(folder) / "0.pt", weights_only=False)


def _process(rank: int, function: Callable[[int, int], object], size: int, folder: str, timeout: float) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size, timeout=limit)
    # Nobody begins before all have joined: one that dies at once would else be an error of joining.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"joined {rank}", "")
    store.wait([f"joined {other}" for other in range(size)], datetime.timedelta(seconds=30))
    result = function(rank, size)
    torch.save(result, Path(folder) / f"{rank}.pt")
