"""The same calls with keys, or a vocabulary, sharded over the processes of a `torch.distributed` group.

Every process calls with its own keys; together they are the keys. What is sent for each query does not depend on how many
there are. A process that dies makes the others' call raise `RuntimeError`, at the latest at the group's timeout.

**The objective.** Gradients are those of one objective. What it is, the caller says:

- queries="replicated", loss="replicated": all processes hold the same queries, compute the same loss from the same results,
  and that loss, counted once, is the objective.
- queries="replicated", loss="sharded": the same queries and results, but each process has a loss of its own, and their sum is
  the objective.
- queries="sharded": each process has queries of its own and gets their results; the sum of the losses is the objective.

Tokens of `linear_cross_entropy` and `token_statistics` are placed as queries are; queries of `info_nce` are always sharded.
A sum or mean over sharded ones is the same on all processes and counts once, or with loss="sharded" once for each process.

In all three a process's keys, values and log-weights, and queries of its own, get their gradient of the objective; a
replicated query (and scale) gets the same whole gradient on every process. All processes must call the same functions in
the same order, and the backward pass where one does.

What must be equal on all processes is compared before anything is computed, in one message of 64 bytes: numbers and options
exactly, replicated floating-point tensors to rounding. Where it is not, or where one process refuses its arguments, all raise.
(A wrong group cannot be told to the others: which processes would that be? They wait until the group's timeout.)

(`DistributedDataParallel` divides sums of gradients by the number of processes: where parameters before these calls are
synchronised that way, multiply the loss by it or, what is the same for a sum or mean over sharded queries, say
loss="sharded".)
"""

from massieu.ops.sharded.contrastive import info_nce
from massieu.ops.sharded.keys import attention, log_partition
from massieu.ops.sharded.token_statistics import token_statistics
from massieu.ops.sharded.vocabulary import linear_cross_entropy

__all__ = ["attention", "info_nce", "linear_cross_entropy", "log_partition", "token_statistics"]


def __dir__() -> list[str]:
    return __all__
