"""Weights of which a process has a share that no tensor tells of."""

import sys

from torch import nn


def has_flat_shards(model: nn.Module) -> bool:
    """Whether ``FullyShardedDataParallel`` holds weights of the model.

    It lays all weights of a part in one row, of which each process has a share. Weights that ``fully_shard`` shards are
    tensors that tell how.
    """
    # No import, which takes a second: a program with such a model has imported the module already.
    sharding = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(sharding, "FullyShardedDataParallel", None)
    return kind is not None and any(isinstance(module, kind) for module in model.modules())
