"""A digest of a module in memory: its weights, and the settings beside them that its numbers depend on."""

import dis
import hashlib
import inspect
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import chain
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from massieu.foundation.settings import OF_EVERY_MODULE, Visited, settings_of, tensor_bytes
from massieu.probing.model import packed
from massieu.probing.model.offload import at_hand


def module_hash(module: nn.Module, *, held: bool = False) -> str:
    """SHA-256 over the parameters and buffers of a module by name, and over each part's class and plain settings.

    Modules of one hash compute the same, unless they depend on attributes of kinds that are no settings.

    Args:
        held: also over tensors that are neither parameters nor buffers, in lists and dictionaries too; they may be what
            the last pass left.
    """
    tensors = _weights(module)
    if held:
        tensors = chain(tensors, _held(module))
    return _hash_of(tensors, settings_hash(module))


def hash_in_background(module: nn.Module) -> str | Future[str]:
    """`module_hash` of a module whose weights are not changed meanwhile; on a GPU another thread makes it.

    There its weights are first copied into main memory. A model is read in the time that its hash takes.
    """
    if not any(tensor.is_cuda for tensor in module.parameters()):
        return module_hash(module)
    buffers = dict(module.named_buffers())  # a forward pass may change them
    tensors = [(name, tensor.clone() if name in buffers else tensor) for name, tensor in _weights(module)]
    if not all(type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta for _, tensor in tensors):
        return module_hash(module)  # offloaded or sharded ones are fetched by this thread
    settings = settings_hash(module)
    copies = torch.cuda.Stream()
    copies.wait_stream(torch.cuda.current_stream())

    def hashed() -> str:
        with torch.cuda.stream(copies):
            return _hash_of(tensors, settings)

    thread = ThreadPoolExecutor(1)
    future = thread.submit(hashed)
    thread.shutdown(wait=False)
    return future


def _hash_of(tensors: Iterable[tuple[str, Tensor]], settings: str) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors:
        _add(digest, name, tensor)
    digest.update(settings.encode())
    return f"state sha256:{digest.hexdigest()}"


def _held(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors that are neither parameters nor buffers."""
    for name, part in module.named_modules():
        attributes = sorted(vars(part).items())
        of_class = {attribute: value for attribute, value in attributes if attribute not in OF_EVERY_MODULE}
        yield from _tensors(of_class, name, set())


def settings_hash(module: nn.Module) -> str:
    """SHA-256 over each part's class and plain settings: what a model's numbers depend on beside its weights.

    What a part's own forward assigns, as the length of the last batch or a count of passes, is no setting.
    """
    digest = hashlib.sha256()
    visited: Visited = {}
    for name, part in module.named_modules():
        digest.update(f"{name} {_class(part)}\n".encode())
        left_by_passes = _assigned_by(type(part), "forward")
        for attribute, value in settings_of(part, visited).items():
            if attribute not in left_by_passes:
                digest.update(f"{name}.{attribute} {value}\n".encode())
    return digest.hexdigest()


@cache
def _assigned_by(kind: type, method: str, callers: frozenset[str] = frozenset()) -> frozenset[str]:
    """Names of attributes that a method of a class assigns, by its byte code and that of the methods that it calls."""
    names: set[str] = set()
    callers |= {method}
    # A class's own version may call that of the class it derives from.
    versions = [inspect.unwrap(vars(base)[method]) for base in kind.__mro__ if method in vars(base)]
    for function in versions:
        if not isinstance(function, FunctionType):
            continue
        for instruction in dis.get_instructions(function):
            if instruction.opname == "STORE_ATTR":
                names.add(instruction.argval)
            elif instruction.opname.startswith(("LOAD_ATTR", "LOAD_METHOD")):
                called = instruction.argval
                if isinstance(getattr(kind, called, None), FunctionType) and called not in callers:
                    names |= _assigned_by(kind, called, callers)
    return frozenset(names)


def _tensors(value: Any, place: str, above: set[int]) -> Iterator[tuple[str, Tensor]]:
    """The tensors in lists and dictionaries, with their places; ``above`` are those that a list is in, itself perhaps."""
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, list | tuple | dict) and id(value) not in above:
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(entry, f"{place}.{key}", above | {id(value)})


def _weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, those too that are not stored; offloaded ones brought to hand."""
    entries = module.state_dict()
    for name, entry in {**entries, **dict(module.named_buffers())}.items():
        if not isinstance(entry, Tensor):  # what some modules keep beside their weights
            continue
        owner, _, last = name.rpartition(".")
        holder = module.get_submodule(owner) if entry.is_meta else nn.Identity()
        with at_hand(holder):
            yield name, getattr(holder, last, entry)


def _add(digest: Any, name: str, tensor: Tensor) -> None:
    whole: Tensor = getattr(tensor, "full_tensor", lambda: tensor)()  # sharded by FSDP2
    for number, part in enumerate(packed.parts(whole.detach())):
        digest.update(f"{name}{number or ''} {part.dtype} {tuple(part.shape)}".encode())
        if not part.is_meta:
            digest.update(tensor_bytes(part))


def _class(part: nn.Module) -> str:
    """The name of a part's class; of a sharded part, that of its class before it was sharded."""
    kind = next(base for base in type(part).__mro__ if not base.__module__.startswith("torch.distributed"))
    return f"{kind.__module__}.{kind.__qualname__}"
