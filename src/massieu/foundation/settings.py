"""Settings of a module: what its numbers depend on beside its weights, in words that are the same in every process."""

import dataclasses
from argparse import Namespace
from collections.abc import Mapping
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_OF_EVERY_MODULE = frozenset({*vars(nn.Module()), "_compiled_call_impl"})
"""Mode, hooks, and the dictionaries in which weights and parts are."""
_OF_NO_NUMBER = frozenset(
    {
        *("name_or_path", "_name_or_path", "_commit_hash", "transformers_version", "hf_device_map", "_hf_hook"),
        *("warnings_issued", "_is_hf_initialized"),
    }
)
"""Where a model came from, where it lies, and notes of libraries."""
_OF_SHARDING = ("__composable_api", "_fsdp", "_is_fsdp")
"""What the names of attributes begin with that PyTorch's sharding leaves on every part."""
Known = dict[int, tuple[Any, str]]
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
        if name in _OF_EVERY_MODULE | _OF_NO_NUMBER or name.startswith(_OF_SHARDING) or isinstance(value, Tensor):
            continue
        if callable(value) and hasattr(type(module), name):  # a method that a library has replaced
            continue
        if said := _plain(value, known):  # nothing is known of an object of another kind
            found[name] = said
    return found


def _plain(value: Any, known: Known) -> str:
    """A setting in words that are the same in every process; nothing for an object of another kind."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | Enum):
        return str(value) if isinstance(value, Enum) else repr(value)
    if isinstance(value, FunctionType | BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    if id(value) not in known:
        known[id(value)] = (value, "")  # for an object that holds itself
        known[id(value)] = (value, _contents(value, known))
    return known[id(value)][1]


def _contents(value: Any, known: Known) -> str:
    if hasattr(value, "to_diff_dict") and not isinstance(value, type):  # a configuration of transformers
        value = value.to_dict()
    elif isinstance(value, SimpleNamespace | Namespace) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    ):
        value = vars(value)
    if isinstance(value, Mapping):
        entries = sorted(
            f"{_plain(name, known)}: {_plain(entry, known)}"
            for name, entry in value.items()
            if name not in _OF_NO_NUMBER
        )
        return "{" + ", ".join(entries) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_plain(entry, known) for entry in value) + "]"
    if isinstance(value, set | frozenset):
        return "[" + ", ".join(sorted(_plain(entry, known) for entry in value)) + "]"
    if isinstance(value, partial):
        return _plain([value.func, value.args, value.keywords], known)
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        return f"{value.dtype} {value.shape} {value.tobytes().hex()}"
    return ""
