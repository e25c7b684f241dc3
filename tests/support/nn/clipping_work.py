"""What each process of `test_clip_logits_sharded` does.

Sharded tensors are imported where they are used: pytest imports this module to collect tests, in every process of a run.
"""

import copy

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from massieu.nn import Attention, clip_logits

RECORD = {"0": torch.tensor([4.0, 1.0, 9.0]), "1": torch.tensor([1.0, 2.0, 5.0]), "2": torch.tensor([1.0, 7.0, 3.0])}


class Apart(nn.Module):
    """Attention with a layer for each of queries, keys and values; under tensor parallelism each rank has some heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = [layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.query, self.key, self.value)]
        found = nn.functional.scaled_dot_product_attention(*heads)
        return self.out(found.transpose(1, 2).flatten(2))


def model(dtype: torch.dtype) -> nn.Module:
    """Three kinds of attention with weights of that dtype, the same in every process."""
    torch.manual_seed(0)
    first = nn.MultiheadAttention(15, 3, add_bias_kv=True)  # 45 rows: of two ranks, one has 23
    made = nn.Sequential(first, Attention(12, 3), Apart()).to(dtype)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


def whole(of: nn.Module) -> dict[str, Tensor]:
    """The state with each sharded tensor put together."""
    from torch.distributed.tensor import DTensor

    state = of.state_dict()
    return {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in state.items()}


def shard_and_clip(rank: int, size: int) -> list[list[str]]:
    """Names of tensors that differ from those of one process: fully sharded, tensor parallel, split by columns."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    del rank
    mesh, wrong = init_device_mesh("cpu", (size,)), []
    for dtype in (torch.float32, torch.bfloat16):
        alone = model(dtype)
        sharded, parallel, columns = (copy.deepcopy(alone) for _ in range(3))
        clip_logits(alone, 2.0, RECORD)
        for part in (*sharded, sharded):  # pyright: ignore[reportGeneralTypeIssues]
            fully_shard(part, mesh=mesh)
        plan = {name: ColwiseParallel() for name in ("query", "key", "value")} | {"out": RowwiseParallel()}
        parallelize_module(parallel[2], mesh, plan)
        weight = columns[1].in_proj_weight
        columns[1].in_proj_weight = nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(1)]))
        bias = columns[1].in_proj_bias
        columns[1].in_proj_bias = nn.Parameter(distribute_tensor(bias.detach(), mesh, [Replicate()]))
        for made in (sharded, parallel, columns):
            clip_logits(made, 2.0, RECORD)
            found = whole(made)
            wrong.append([name for name, one in whole(alone).items() if not torch.equal(one, found[name])])
    return wrong
