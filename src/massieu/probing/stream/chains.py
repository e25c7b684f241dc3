"""The modules that lead from one tensor of a forward pass to another, found by watching it: no architecture is named."""

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
    """One call of a module that takes one tensor and returns one tensor."""

    module: nn.Module
    source: Tensor
    result: Tensor


@contextmanager
def recording(model: nn.Module) -> Iterator[list[ModuleCall]]:
    """Collects the calls of modules with one tensor. They hold the tensors, so that none takes another's place in memory."""
    calls: list[ModuleCall] = []

    def record(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any) -> None:
        if len(arguments) == 1 and not keywords and isinstance(arguments[0], Tensor) and isinstance(result, Tensor):
            calls.append(ModuleCall(module, arguments[0], result))

    with hooked(model.modules(), after=record):
        yield calls


def chain_between(before: Tensor, after: Tensor, calls: Sequence[ModuleCall]) -> list[nn.Module] | None:
    """The shortest chain of modules that leads from the stream to its update; None if there is none."""
    # Breadth first, so that the first chain found is the shortest.
    pending = deque([(before, list[nn.Module]())])
    visited = {memory(before)}
    while pending:
        tensor, chain = pending.popleft()
        if chain and tensor.shape == before.shape and torch.equal(before + tensor, after):
            return chain
        for call in calls:
            if memory(call.source) == memory(tensor) and memory(call.result) not in visited:
                visited.add(memory(call.result))
                pending.append((call.result, [*chain, call.module]))
    return None
