"""Training in several processes, through PyTorch's DistributedDataParallel."""

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def _group() -> tuple[int, int]:
    """This process's rank, and how many there are."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def leads() -> bool:
    """Whether this process writes."""
    return _group()[0] == 0


def share(contexts: int, drawn: torch.Generator) -> tuple[int, torch.Generator]:
    """How many of a batch's contexts this process draws, and with which numbers."""
    rank, number = _group()
    own = torch.Generator().manual_seed(int(torch.randint(2**31, (), generator=drawn)) + rank)
    return -(-contexts // number), own


class Placed(nn.Module):
    """A model on this process's GPU, where there is one, and joined with those of other processes; logits are on the CPU."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = model.to(self.device)
        self.inner = DistributedDataParallel(model) if _group()[1] > 1 else model

    def forward(self, tokens: Int[Tensor, "B L"]) -> Float[Tensor, "B L V"]:
        return self.inner(tokens.to(self.device)).cpu()
