"""What an object's numbers depend on, in words that are the same in every process: a module's settings, and fingerprints."""

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
"""Mode, hooks, and the dictionaries in which weights and parts are."""
_OF_NO_NUMBER = frozenset(
    {
        *("name_or_path", "_name_or_path", "base_model_name_or_path", "_commit_hash", "hf_device_map", "_hf_hook"),
        *("transformers_version", "peft_version", "warnings_issued", "_is_hf_initialized"),
    }
)
"""Where a model came from, where it lies, and notes of libraries."""
_OF_SHARDING = ("__composable_api", "_fsdp", "_is_fsdp")
"""What the names of attributes begin with that PyTorch's sharding leaves on every part."""
Known = dict[tuple[int, bool], tuple[Any, str]]
"""Objects that have been put into words, by their identity; held, so that no other object takes it."""


def settings_of(module: nn.Module, known: Known) -> dict[str, str]:
    """A module's own plain attributes in words, by name: the number of heads, a scale, which adapters are active.

    They are numbers, arrays, strings, functions, configurations, and lists and dictionaries of these. Attributes of other
    kinds are left out: tensors, modules inside, and what libraries put there that train, move or shard a model.

    Args:
        known: what other parts of the model had in words; a configuration that all parts hold is put into words once.
    """
    found: dict[str, str] = {}
    for name, value in sorted(vars(module).items()):
        if name in OF_EVERY_MODULE | _OF_NO_NUMBER or name.startswith(_OF_SHARDING):
            continue
        if callable(value) and hasattr(type(module), name):  # a method that a library has replaced
            continue
        if said := _words(value, known, deep=False):  # nothing is known of an object of another kind
            found[name] = said
    return found


def fingerprint(*things: object) -> str:
    """A short hash of what things are: numbers, tensors, modules, and functions with what they hold; not of generators."""
    return hashlib.sha256(_words(things, {}, deep=True).encode()).hexdigest()[:16]


def _words(thing: Any, known: Known, deep: bool) -> str:
    """What a thing is; of tensors, modules and objects of unknown kinds nothing, unless deep."""
    if isinstance(thing, Enum):
        return str(thing)
    if thing is None or isinstance(thing, bool | int | float | complex | str | bytes | torch.dtype):
        return repr(thing)
    key = id(thing), deep
    if key not in known:
        known[key] = thing, ""  # for an object that holds itself
        known[key] = thing, _contents(thing, known, deep)
    return known[key][1]


def _contents(thing: Any, known: Known, deep: bool) -> str:
    if isinstance(thing, list | tuple | set | frozenset):
        entries = [_words(entry, known, deep) for entry in thing]
        return "[" + ", ".join(sorted(entries) if isinstance(thing, set | frozenset) else entries) + "]"
    if isinstance(thing, Mapping):
        pairs = [(name, entry) for name, entry in thing.items() if name not in _OF_NO_NUMBER]
        return "{" + ", ".join(sorted(f"{_words(n, known, deep)}: {_words(e, known, deep)}" for n, e in pairs)) + "}"
    if isinstance(thing, np.ndarray | np.generic) and not thing.dtype.hasobject:
        return f"{thing.dtype} {thing.shape} {thing.tobytes().hex()}"
    if isinstance(thing, ModuleType):
        return thing.__name__
    if isinstance(thing, type | BuiltinFunctionType):
        return f"{thing.__module__}.{thing.__qualname__}"
    if isinstance(thing, FunctionType):
        held = [
            thing.__code__,
            thing.__defaults__,
            thing.__kwdefaults__,
            [_inside(cell) for cell in thing.__closure__ or ()],
        ]
        return f"{thing.__module__}.{thing.__qualname__} {_words(held, known, deep=True)}"
    if isinstance(thing, CodeType):
        return _words([thing.co_code, thing.co_names, thing.co_consts], known, deep)
    if isinstance(thing, partial):
        return _words([thing.func, thing.args, thing.keywords], known, deep)
    if isinstance(thing, SimpleNamespace | Namespace):
        return _words(vars(thing), known, deep)
    other: Any = thing
    if hasattr(type(other), "to_diff_dict"):  # a configuration of transformers
        return _words(other.to_dict(), known, deep)
    of_dataclass: Any = getattr(type(other), "__dataclass_params__", None)
    if of_dataclass is not None:
        entries = {field.name: getattr(other, field.name) for field in dataclasses.fields(other)}
        # The tensors of one that cannot change are settings too.
        return f"{_class(thing)} {_words(entries, known, deep or of_dataclass.frozen)}"
    return _held(thing, known) if deep else ""


def _held(thing: Any, known: Known) -> str:
    """What is in a tensor, a module, a method, or an object of a kind that is not known."""
    if isinstance(thing, torch.Generator | logging.Logger):
        return ""
    if isinstance(thing, torch.device):
        return str(thing)
    if isinstance(thing, Tensor):
        held = "" if thing.is_meta else hashlib.sha256(tensor_bytes(thing)).hexdigest()
        return f"{thing.dtype} {tuple(thing.shape)} {held}"
    if isinstance(thing, MethodType):
        return _words([thing.__func__, thing.__self__], known, deep=True)
    parts: Any = vars(thing) if hasattr(thing, "__dict__") else None
    if isinstance(thing, nn.Module):
        tensors = [thing.state_dict(), dict(thing.named_buffers())]  # those too that are not stored
        parts = [thing.training, thing.extra_repr(), settings_of(thing, known), tensors, dict(thing.named_children())]
    return f"{_class(thing)} {_words(parts, known, deep=True)}"


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The numbers of a tensor as they are in memory."""
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    # A copy: what is contiguous may still have strides that cannot be viewed as bytes.
    copy = dense.resolve_conj().resolve_neg().cpu().clone(memory_format=torch.contiguous_format)
    return copy.reshape(-1).view(torch.uint8).numpy().data


def _inside(cell: CellType) -> Any:
    """What a function holds; None where it is not there yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _class(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
