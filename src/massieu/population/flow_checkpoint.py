"""A flow's checkpoints: one file for each process, written under another name and then renamed, with the flow's settings."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from massieu.errors import InputError
from massieu.foundation.files import remove_left, replacing
from massieu.foundation.settings import tensor_bytes
from massieu.ops.sharded.collectives import Peers, largest
from massieu.population.flow_result import FlowRow

_FORMAT = 2
_NAME = re.compile(r"process-(\d+)-layer-(\d+)\.safetensors")
_ENTRY = "massieu flow"


class State(NamedTuple):
    """A flow after some of its layers."""

    done: int
    particles: Tensor
    rows: tuple[FlowRow, ...]
    lineage: Tensor | None
    """For each particle the number of the particle of layer 0 that it descends from; None while no layer has drawn."""


class StoredFlow(NamedTuple):
    """What a checkpoint holds."""

    state: State
    settings: dict[str, Any]
    """Of the flow and of the cloud that it began with."""
    generator_states: list[Tensor]


def write(
    folder: Path, state: State, settings: dict[str, Any], generators: Sequence[torch.Generator], group: Peers | None
) -> None:
    """Write a state; earlier ones are removed once every process has written this one.

    Raises:
        InputError: this process or another cannot write its file.
    """
    tensors = {f"generator.{index}": each.get_state() for index, each in enumerate(generators)}
    tensors["particles"] = state.particles.detach().contiguous()
    if state.lineage is not None:
        tensors["lineage"] = state.lineage
    record = {"format": _FORMAT, "settings": settings, "done": state.done, "rows": [astuple(row) for row in state.rows]}
    text = json.dumps(record)
    entries = {_ENTRY: text, "sha256": _checksum(text, tensors)}
    rank = 0 if group is None else group.rank
    mark = f"process-{rank:05d}"
    path = folder / f"{mark}-layer-{state.done:05d}.safetensors"
    failure = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_left(folder, mark)
        with replacing(path, mark=mark) as aside:
            aside.write_bytes(save(tensors, entries))
    except OSError as error:
        failure = f"cannot write the checkpoint {path}: {error.strerror}"
    _all_or_none(failure, group)
    for done, earlier in _present(folder, group).items():
        if done < state.done:
            earlier.unlink(missing_ok=True)


def read(folder: Path, group: Peers | None, settings: dict[str, Any]) -> StoredFlow:
    """The latest checkpoint that every process has.

    Args:
        settings: Those of the flow that is to be resumed which no layer changes.

    Raises:
        InputError: for this process or another there is no checkpoint, it cannot be read, it is damaged, or it is of
            another flow.
    """
    paths = _present(folder, group)
    last = max(paths, default=-1)
    if group is not None:
        # The smallest over the processes, by the largest of the negatives.
        last = -int(largest(torch.tensor(-last, device=group.device), group))
    if last not in paths:
        raise InputError(f"{folder} has no checkpoint of a flow; run the flow with checkpoint= first")
    failure = None
    stored = None
    try:
        stored = _loaded(paths[last], last, settings)
    except InputError as error:
        failure = str(error)
    _all_or_none(failure, group)
    assert stored is not None
    return stored


def _all_or_none(failure: str | None, group: Peers | None) -> None:
    """Raise an error on every process if one has failed, so that none waits for one that has stopped."""
    failed = failure is not None
    if group is not None:
        failed = bool(largest(torch.tensor(float(failed), device=group.device), group))
    if failed:
        raise InputError(failure or "another process cannot write or read its checkpoint, and its own error says why")


def _loaded(path: Path, done: int, settings: dict[str, Any]) -> StoredFlow:
    """One file, checked: undamaged, of this version, of the flow with these settings, and true to its own name."""
    try:
        with safe_open(path, framework="pt") as file:
            entries = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        record = json.loads(entries[_ENTRY])
        version = record["format"]
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is damaged or no checkpoint of a flow: {error}") from error
    if version != _FORMAT:
        raise InputError(
            f"{path} is a checkpoint of format {version}, and this version of massieu reads format {_FORMAT}: run the flow anew"
        )
    if entries.get("sha256") != _checksum(entries[_ENTRY], tensors):
        raise InputError(f"{path} is damaged: its content is not what was written, by its checksum; run the flow anew")
    stored_settings = record["settings"]
    if differing := [name for name in settings if settings[name] != stored_settings.get(name)]:
        raise InputError(
            f"{path.parent} has a checkpoint of another flow: {' and '.join(differing)} differ from this one's"
        )
    if (record["done"], len(tensors["particles"])) != (done, stored_settings["tokens"]):
        raise InputError(
            f"{path} has {len(tensors['particles'])} tokens after {record['done']} layers; by its name and its start they "
            f"are {stored_settings['tokens']} after {done}"
        )
    device = stored_settings["device"]
    particles = _on(path, device, tensors["particles"])
    lineage = _on(path, device, tensors["lineage"]) if "lineage" in tensors else None
    rows = tuple(FlowRow(*row) for row in record["rows"])
    generator_states = [tensors[f"generator.{index}"] for index in range(len(stored_settings["generators"]))]
    return StoredFlow(State(done, particles, rows, lineage), stored_settings, generator_states)


def _on(path: Path, device: str, tensor: Tensor) -> Tensor:
    try:
        return tensor.to(device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"{path} is of a flow on the device {device}, which cannot be used here") from error


def _checksum(record: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the record and of every tensor with its name, dtype and shape."""
    digest = hashlib.sha256(record.encode())
    for name in sorted(tensors):
        digest.update(f"\n{name} {tensors[name].dtype} {tuple(tensors[name].shape)}\n".encode())
        digest.update(tensor_bytes(tensors[name]))
    return digest.hexdigest()


def exists(folder: Path, group: Peers | None) -> bool:
    """Whether the folder has a checkpoint of this process."""
    return bool(_present(folder, group))


def _present(folder: Path, group: Peers | None) -> dict[int, Path]:
    """The files of this process, by the number of layers done."""
    rank = 0 if group is None else group.rank
    paths = {}
    for path in folder.glob("process-*.safetensors"):
        match = _NAME.fullmatch(path.name)
        if match and int(match[1]) == rank:
            paths[int(match[2])] = path
    return paths
