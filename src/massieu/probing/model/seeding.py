"""Random numbers of one's own for code that draws from the global generator, as the initialisation of a model's weights.

The global generator belongs to the whole process: seeding it disturbs what other threads draw, and what they draw in
between changes the result. Here every operation that draws is given a generator instead, in the calling thread alone.
"""

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def seed_of(*parts: int | str) -> int:
    """A seed that depends on these parts alone, the same in every process and version of Python."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1  # PyTorch takes 63 bits


class OwnGenerator(TorchDispatchMode):
    """While it is active in a thread, what PyTorch draws there comes from a generator of its own.

    The numbers are those that the same code draws after ``torch.manual_seed(seed)`` in a process with one thread.

    Raises:
        RuntimeError: an operation draws, and cannot be given a generator.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = dict(kwargs or {})
        if not draws_numbers(func, args, keywords):
            return func(*args, **keywords)
        keywords["generator"] = self._generator(args, keywords)
        return with_generator(func)(*args, **keywords)

    def _generator(self, arguments: Any, keywords: dict[str, Any]) -> torch.Generator:
        of_tensor = next((argument.device for argument in arguments if isinstance(argument, Tensor)), None)
        device = torch.device(of_tensor or keywords.get("device") or "cpu")
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self._generators[device]


def draws_numbers(func: Any, args: Any, keywords: dict[str, Any]) -> bool:
    """Whether an operation draws from the global generator."""
    draws = torch.Tag.nondeterministic_seeded in func.tags and not _without_dropout(func, args, keywords)
    return draws and keywords.get("generator") is None


def _without_dropout(func: Any, args: Any, keywords: dict[str, Any]) -> bool:
    """Whether an operation would draw for dropout alone, and was given none, as attention in evaluation."""
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names:
        return False
    place = names.index("dropout_p")
    dropout = args[place] if place < len(args) else keywords.get("dropout_p", 0.0)
    return dropout == 0


def with_generator(func: Any) -> Any:
    """The same operation in the form that takes a generator."""
    others = _other_arguments(func)
    for name in (func._overloadname, *func.overloadpacket.overloads()):
        overload = getattr(func.overloadpacket, name)
        takes_generator = any(argument.name == "generator" for argument in overload._schema.arguments)
        if takes_generator and _other_arguments(overload) == others:
            return overload
    raise RuntimeError(f"{func} draws random numbers from the global generator, and takes no other")


def _other_arguments(func: Any) -> list[str]:
    """Names of an operation's arguments beside a generator."""
    return [argument.name for argument in func._schema.arguments if argument.name != "generator"]
