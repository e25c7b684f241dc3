"""A flow's checkpoints: one file a process, written beside its place and then moved there, and what flow it belongs to."""

import hashlib
import json
import os
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from massieu.errors import InputError
from massieu.ops.sharded.collectives import Group, largest
from massieu.population.flow_result import Row

_FORMAT = 1
_NAME = re.compile(r"process-(\d+)-layer-(\d+)\.safetensors")


class State(NamedTuple):
    """A flow after some of its layers."""

    done: int
    particles: Tensor
    rows: tuple[Row, ...]
    lineage: Tensor | None
    """Of each particle the first one it descends from; None while no layer has drawn."""


def write(
    folder: Path, state: State, settings: dict[str, Any], generators: Sequence[torch.Generator], group: Group | None
) -> None:
    """Write a state; the ones before are removed once every process has written this one.

    Raises:
        InputError: it cannot be written there.
    """
    tensors = {f"generator.{index}": each.get_state() for index, each in enumerate(generators)}
    tensors["particles"] = state.particles.detach().contiguous()
    if state.lineage is not None:
        tensors["lineage"] = state.lineage
    record = {"format": _FORMAT, "settings": settings, "done": state.done, "rows": [astuple(row) for row in state.rows]}
    path = folder / _name(group, state.done)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            save_file(tensors, aside, {"massieu flow": json.dumps(record)})
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"cannot write the checkpoint {path}: {error.strerror}") from error
    if group is not None:
        dist.barrier(group.handle)
    for done, earlier in _present(folder, group).items():
        if done < state.done:
            earlier.unlink()


def read(folder: Path, group: Group | None) -> tuple[State, dict[str, Any], list[Tensor]]:
    """The latest state that every process has, the flow's settings, and the states of its generators.

    Raises:
        InputError: there is none, or it cannot be read.
    """
    present = _present(folder, group)
    last = max(present, default=-1)
    if group is not None:
        last = -int(largest(torch.tensor(-last, device=group.device), group))
    if last not in present:
        raise InputError(f"{folder} has no checkpoint of a flow; run the flow with checkpoint= first")
    path = present[last]
    try:
        with safe_open(path, framework="pt") as file:
            record = json.loads((file.metadata() or {})["massieu flow"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        rows = tuple(Row(*row) for row in record["rows"])
        settings = record["settings"]
        on_device = {name: tensors[name].to(settings["device"]) for name in ("particles", "lineage") if name in tensors}
        state = State(record["done"], on_device["particles"], rows, on_device.get("lineage"))
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} is no checkpoint of a flow: {error}") from error
    states = [tensors[f"generator.{index}"] for index in range(sum(name.startswith("generator.") for name in tensors))]
    return state, settings, states


def exists(folder: Path, group: Group | None) -> bool:
    """Whether the folder has a checkpoint of this process."""
    return bool(_present(folder, group))


def _name(group: Group | None, done: int) -> str:
    return f"process-{0 if group is None else group.rank:05d}-layer-{done:05d}.safetensors"


def _present(folder: Path, group: Group | None) -> dict[int, Path]:
    """This process's files by the layers done."""
    rank, found = 0 if group is None else group.rank, {}
    for path in folder.glob("process-*.safetensors"):
        if (match := _NAME.fullmatch(path.name)) and int(match[1]) == rank:
            found[int(match[2])] = path
    return found


# --- what flow it is -------------------------------------------------------------------------------------------------


def fingerprint(*things: object) -> str:
    """A short hash of what things are: types, numbers, tensors and functions with what they hold; not of generators."""
    digest = hashlib.sha256()
    _feed(digest, things, set())
    return digest.hexdigest()[:16]


def _feed(digest: Any, thing: object, seen: set[int]) -> None:
    digest.update(f"<{type(thing).__module__}.{type(thing).__qualname__}>".encode())
    if isinstance(thing, (str, bytes, int, float, complex, type(None), torch.dtype, torch.device)):
        digest.update(repr(thing).encode())
        return
    if isinstance(thing, torch.Generator) or id(thing) in seen:
        return
    if isinstance(thing, Tensor):
        # A copy: what is contiguous may still have strides that cannot be viewed as bytes.
        raw = thing.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
        digest.update(f"{thing.dtype}{tuple(thing.shape)}".encode() + raw.numpy().tobytes())
        return
    parts = _parts(thing)
    seen = seen | {id(thing)}
    for part in parts:
        _feed(digest, part, seen)


def _parts(thing: object) -> Sequence[object]:
    """What it consists of."""
    if isinstance(thing, nn.Module):
        return [thing.training, thing.extra_repr(), thing.state_dict(), list(thing.children())]
    if isinstance(thing, Mapping):
        return [part for pair in thing.items() for part in pair]
    if isinstance(thing, (list, tuple)):
        return thing
    if isinstance(thing, partial):
        return [thing.func, thing.args, thing.keywords]
    if isinstance(thing, types.MethodType):
        return [thing.__func__, thing.__self__]
    if isinstance(thing, types.FunctionType):
        cells = [cell.cell_contents for cell in thing.__closure__ or ()]
        return [thing.__module__, thing.__qualname__, thing.__code__, thing.__defaults__, cells]
    if isinstance(thing, types.CodeType):
        return [thing.co_code, thing.co_names, thing.co_consts]
    if is_dataclass(thing) and not isinstance(thing, type):
        return [getattr(thing, field.name) for field in fields(thing)]
    if isinstance(thing, (type, types.BuiltinFunctionType)):
        return [thing.__module__, thing.__qualname__]
    return [vars(thing)] if hasattr(thing, "__dict__") else []
