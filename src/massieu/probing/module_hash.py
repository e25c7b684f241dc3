"""A digest of a module in memory: its weights, and the settings beside them that its numbers depend on."""

import dataclasses
import hashlib
from argparse import Namespace
from collections.abc import Iterator, Mapping
from enum import Enum
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from massieu.probing import packed
from massieu.probing.offload import at_hand

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
_Known = dict[int, tuple[Any, str]]
"""Objects that have been put into words, by their identity; held, so that no other object takes it."""


def module_hash(module: nn.Module, *, held: bool = False) -> str:
    """SHA-256 over the parameters and buffers of a module by name, and over each part's class and plain settings.

    Settings are attributes that are numbers, strings, functions, configurations, or lists and dictionaries of these: the number
    of heads, a scale, which adapters are active. Modules of one hash compute the same, unless they depend on attributes
    of other kinds.

    Args:
        held: also over tensors that are neither parameters nor buffers; they may be what the last pass left.
    """
    digest = hashlib.sha256()
    for name, tensor in _weights(module):
        _add(digest, name, tensor)
    known: _Known = {}
    for name, part in module.named_modules():
        digest.update(f"{name} {_class(part)}\n".encode())
        for attribute, value in sorted(vars(part).items()):
            if attribute in _OF_EVERY_MODULE | _OF_NO_NUMBER or attribute.startswith(_OF_SHARDING):
                continue
            if isinstance(value, Tensor):
                if held:
                    _add(digest, f"{name}.{attribute}", value)
            # Not a method that a library has replaced, and not an object of which nothing is known.
            elif not (callable(value) and hasattr(type(part), attribute)) and (said := _plain(value, known)):
                digest.update(f"{name}.{attribute} {said}\n".encode())
    return f"state sha256:{digest.hexdigest()}"


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
            digest.update(part.cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def _class(part: nn.Module) -> str:
    """The name of a part's class; of a sharded part, that of its class before it was sharded."""
    own = next(each for each in type(part).__mro__ if not each.__module__.startswith("torch.distributed"))
    return f"{own.__module__}.{own.__qualname__}"


def _plain(value: Any, known: _Known) -> str:
    """A setting in words that are the same in every process; nothing for an object of another kind."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | Enum):
        return str(value) if isinstance(value, Enum) else repr(value)
    if isinstance(value, FunctionType | BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    if id(value) not in known:
        known[id(value)] = (value, "")  # for an object that holds itself
        known[id(value)] = (value, _contents(value, known))
    return known[id(value)][1]


def _contents(value: Any, known: _Known) -> str:
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
    return ""
