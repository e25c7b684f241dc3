"""Training in several processes, through PyTorch's DistributedDataParallel."""

import math

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def _rank_and_world_size() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def is_rank_zero() -> bool:
    """Whether this process writes the results."""
    rank, _ = _rank_and_world_size()
    return rank == 0


def share_of_contexts(contexts: int, generator: torch.Generator) -> tuple[int, torch.Generator]:
    """How many of a batch's contexts this process draws, and the generator of its own that it draws them with."""
    rank, world_size = _rank_and_world_size()
    seed = int(torch.randint(2**31, (), generator=generator)) + rank
    return math.ceil(contexts / world_size), torch.Generator().manual_seed(seed)


class DistributedModel(nn.Module):
    """A model on this process's GPU if it has one, with gradients averaged over the processes; logits are on the CPU."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = model.to(self.device)
        _, world_size = _rank_and_world_size()
        self.model = DistributedDataParallel(model) if world_size > 1 else model

    def forward(self, tokens: Int[Tensor, "B L"]) -> Float[Tensor, "B L V"]:
        return self.model(tokens.to(self.device)).cpu()
