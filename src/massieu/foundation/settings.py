"""What the numbers of an object depend on, as texts that are the same in every process: a module's settings, fingerprints."""

import dataclasses
import hashlib
import logging
from argparse import Namespace
from collections.abc import Mapping
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

OF_EVERY_MODULE = frozenset({*vars(nn.Module()), "_compiled_call_impl"})
"""Attributes that every module has: its mode, hooks, and the dictionaries of its weights and parts."""
_OF_NO_NUMBER = frozenset(
    {
        *("name_or_path", "_name_or_path", "base_model_name_or_path", "_commit_hash", "hf_device_map", "_hf_hook"),
        *("transformers_version", "peft_version", "warnings_issued", "_is_hf_initialized"),
    }
)
"""Attributes on which no number depends: where a model came from, where it lies, and notes of libraries."""
_OF_SHARDING = ("__composable_api", "_fsdp", "_is_fsdp")
"""Beginnings of the names of attributes that PyTorch's sharding leaves on every part."""
Visited = dict[tuple[int, bool], tuple[Any, str]]
"""Descriptions by (identity, whether deep), each with its object: while that is held, no other has its identity."""


def settings_of(module: nn.Module, visited: Visited) -> dict[str, str]:
    """A module's own settings as texts, by name: the number of heads, a scale, which adapters are active.

    They are numbers, arrays, strings, functions, configurations, and lists and dictionaries of these. Attributes of other
    kinds are left out: tensors, submodules, and what libraries add that train, move or shard a model.

    Args:
        module: The module, without its parts.
        visited: The descriptions made for other parts of the model; a configuration that all parts hold is described once.
    """
    settings: dict[str, str] = {}
    for name, value in sorted(vars(module).items()):
        if name in OF_EVERY_MODULE | _OF_NO_NUMBER or name.startswith(_OF_SHARDING):
            continue
        if callable(value) and hasattr(type(module), name):  # a method that a library has replaced
            continue
        description = _described(value, visited, deep=False)
        if description:  # empty for an object of another kind
            settings[name] = description
    return settings


def fingerprint(*things: object) -> str:
    """A short hash of what things are: numbers, tensors, modules, and functions with what they hold; not of generators."""
    return hashlib.sha256(_described(things, {}, deep=True).encode()).hexdigest()[:16]


def _described(thing: Any, visited: Visited, deep: bool) -> str:
    """A thing as text; empty for tensors, modules and objects of unknown kinds, unless `deep`."""
    if isinstance(thing, Enum):
        return str(thing)
    if thing is None or isinstance(thing, bool | int | float | complex | str | bytes | torch.dtype):
        return repr(thing)
    key = (id(thing), deep)
    if key not in visited:
        # An entry before the contents are read: an object that holds itself finds it, and the recursion ends.
        visited[key] = (thing, "")
        visited[key] = (thing, _contents(thing, visited, deep))
    _, description = visited[key]
    return description


def _contents(thing: Any, visited: Visited, deep: bool) -> str:
    """The text of a thing that is no single value, by its kind."""
    if isinstance(thing, set | frozenset):
        return "[" + ", ".join(sorted(_described(entry, visited, deep) for entry in thing)) + "]"
    if isinstance(thing, list | tuple):
        return "[" + ", ".join([_described(entry, visited, deep) for entry in thing]) + "]"
    if isinstance(thing, Mapping):
        pairs = [
            f"{_described(name, visited, deep)}: {_described(entry, visited, deep)}"
            for name, entry in thing.items()
            if name not in _OF_NO_NUMBER
        ]
        return "{" + ", ".join(sorted(pairs)) + "}"
    if isinstance(thing, np.ndarray | np.generic) and not thing.dtype.hasobject:
        return f"{thing.dtype} {thing.shape} {thing.tobytes().hex()}"
    if isinstance(thing, ModuleType):
        return thing.__name__
    if isinstance(thing, type | BuiltinFunctionType):
        return f"{thing.__module__}.{thing.__qualname__}"
    if isinstance(thing, FunctionType):
        # All that its result depends on, besides the arguments: code, defaults and closure.
        closure = [_cell_contents(cell) for cell in thing.__closure__ or ()]
        parts = [thing.__code__, thing.__defaults__, thing.__kwdefaults__, closure]
        return f"{thing.__module__}.{thing.__qualname__} {_described(parts, visited, deep=True)}"
    if isinstance(thing, CodeType):
        return _described([thing.co_code, thing.co_names, thing.co_consts], visited, deep)
    if isinstance(thing, partial):
        return _described([thing.func, thing.args, thing.keywords], visited, deep)
    if isinstance(thing, SimpleNamespace | Namespace):
        return _described(vars(thing), visited, deep)
    other: Any = thing
    if hasattr(type(other), "to_diff_dict"):  # a configuration of transformers
        return _described(other.to_dict(), visited, deep)
    dataclass_options: Any = getattr(type(other), "__dataclass_params__", None)
    if dataclass_options is not None:
        fields = {field.name: getattr(other, field.name) for field in dataclasses.fields(other)}
        # The tensors of a frozen dataclass cannot change, so that they are settings too.
        return f"{_class_name(thing)} {_described(fields, visited, deep or dataclass_options.frozen)}"
    return _deep_contents(thing, visited) if deep else ""


def _deep_contents(thing: Any, visited: Visited) -> str:
    """The text of a tensor, a module, a method, or an object of an unknown kind."""
    if isinstance(thing, torch.Generator | logging.Logger):
        return ""
    if isinstance(thing, torch.device):
        return str(thing)
    if isinstance(thing, Tensor):
        digest = "" if thing.is_meta else hashlib.sha256(tensor_bytes(thing)).hexdigest()
        return f"{thing.dtype} {tuple(thing.shape)} {digest}"
    if isinstance(thing, MethodType):
        return _described([thing.__func__, thing.__self__], visited, deep=True)
    parts: Any = vars(thing) if hasattr(thing, "__dict__") else None
    if isinstance(thing, nn.Module):
        # The state dict lacks buffers that are not persistent.
        tensors = [thing.state_dict(), dict(thing.named_buffers())]
        parts = [thing.training, thing.extra_repr(), settings_of(thing, visited), tensors, dict(thing.named_children())]
    return f"{_class_name(thing)} {_described(parts, visited, deep=True)}"


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor's numbers, in row-major order."""
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    contiguous = dense.resolve_conj().resolve_neg().cpu().contiguous()
    # Not a view by shape: dimensions of one entry may have any stride. No copy either: a vocabulary's table is large.
    flat = contiguous.as_strided((contiguous.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def _cell_contents(cell: CellType) -> Any:
    """The value of a closure's variable; None if nothing was assigned to it yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _class_name(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
