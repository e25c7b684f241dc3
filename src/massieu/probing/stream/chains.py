"""Which modules lead from one tensor of a forward pass to another, seen by watching it: no architecture is named."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from massieu.probing.model.watching import hooked, memory


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """One call of a module with one tensor, to one tensor."""

    module: nn.Module
    source: Tensor
    result: Tensor


@contextmanager
def recording(model: nn.Module) -> Iterator[list[ModuleCall]]:
    """Collects the calls of modules with one tensor. They hold the tensors, so that none takes another's place in memory."""
    made: list[ModuleCall] = []

    def look(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any) -> None:
        if len(arguments) == 1 and not keywords and isinstance(arguments[0], Tensor) and isinstance(result, Tensor):
            made.append(ModuleCall(module, arguments[0], result))

    with hooked(model.modules(), after=look):
        yield made


def chain_between(before: Tensor, after: Tensor, calls: Sequence[ModuleCall]) -> list[nn.Module] | None:
    """The fewest modules that lead from the stream to what is added to it; None where there is no such chain."""
    pending = deque([(before, list[nn.Module]())])
    seen = {memory(before)}
    while pending:
        tensor, chain = pending.popleft()
        if chain and tensor.shape == before.shape and torch.equal(before + tensor, after):
            return chain
        for call in calls:
            if memory(call.source) == memory(tensor) and memory(call.result) not in seen:
                seen.add(memory(call.result))
                pending.append((call.result, [*chain, call.module]))
    return None
