"""The files that a model is read from: those of a checkpoint, and of an adapter to it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from massieu.errors import InputError
from massieu.probing.model.adapter import Adapter, adapter_files, find_adapter
from massieu.probing.model.checkpoint import CheckpointFiles, default_model, find_checkpoint, stored_dtype
from massieu.probing.model.given import Checkpoint


@dataclass(frozen=True, eq=False)
class ModelSource:
    """The files that a model is read from.

    Attributes:
        name: what the model is called.
        named_files: what the name stands for: the model, or the adapter to it.
        adapter: None where there is none.
        checkpoint: the model, without the adapter.
        options: further arguments of ``from_pretrained``.
    """

    wanted: Checkpoint
    name: str
    named_files: CheckpointFiles
    adapter: Adapter | None
    checkpoint: CheckpointFiles
    options: dict[str, Any]

    def files(self) -> tuple[Path, ...]:
        """The files with the weights, of the adapter first."""
        return tuple(dict.fromkeys((*self.named_files.files, *self.checkpoint.files)))

    def format_as(self, dtype: torch.dtype) -> str | None:
        """What the weights are stored as, and what quantised ones are turned to."""
        form = self.checkpoint.format_as(dtype)
        return form if self.adapter is None else f"{form}, with an adapter"

    def stored_dtype(self, config: Any) -> str | None:
        """The type of most weights, of a name on the hub as its configuration says; None where they are quantised."""
        if self.checkpoint.gguf is not None or getattr(config, "quantization_config", None) is not None:
            return None
        in_files = stored_dtype(self.checkpoint.files)
        if in_files:
            return in_files
        config_dtype = getattr(config, "dtype", None)
        return None if config_dtype is None else str(config_dtype).removeprefix("torch.")


def find_source(wanted: Checkpoint) -> ModelSource:
    """The files of a checkpoint, and of its adapter.

    Raises:
        InputError: as `source_files`; an adapter with a device map.
    """
    named_files, adapter = source_files(wanted)
    if adapter is not None and wanted.device_map is not None:
        raise InputError(
            f"{adapter.folder} is an adapter, and a device map needs a whole model; merge the adapter into its base first"
        )
    checkpoint = named_files if adapter is None else adapter.base
    options = {**checkpoint.options, "trust_remote_code": wanted.trust_remote_code}
    return ModelSource(wanted, _name_of(wanted, checkpoint), named_files, adapter, checkpoint, options)


def source_files(wanted: Checkpoint) -> tuple[CheckpointFiles, Adapter | None]:
    """The files that a checkpoint's name, or else its adapter, stands for; and the adapter, with its base model.

    Raises:
        InputError: they are not there, or are no model or no adapter.
    """
    name = default_model() if wanted.name is None else wanted.name
    named = find_checkpoint(name, wanted.revision)
    if wanted.adapter is None:
        return named, find_adapter(named)
    if named.adapter:
        raise InputError(
            f"{wanted.name} is an adapter itself, so {wanted.adapter} cannot be put on it; name its base model"
        )
    folder = adapter_files(wanted.adapter)
    return folder, find_adapter(folder, named)


def _name_of(wanted: Checkpoint, files: CheckpointFiles) -> str:
    """What the model is called; of a folder with a GGUF file the file says which model it is."""
    if files.gguf is not None:
        name = files.files[0].name
    elif wanted.name is None:
        name = "sentence-transformers/all-MiniLM-L6-v2 (the default model)"
    else:
        name = str(wanted.name)
    return name if wanted.adapter is None else f"{name} with the adapter {wanted.adapter}"
