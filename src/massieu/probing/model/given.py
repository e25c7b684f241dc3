"""Which model is meant: a checkpoint, by its name and how it is loaded, or a module in memory."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from massieu.errors import InputError
from massieu.foundation.arguments import described, flag
from massieu.foundation.doors import any_of, check_fields, path, text
from massieu.probing.model.unwrap import check_in_reach, holds_model, module_in

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
_SHORT_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


@dataclass(frozen=True)
class Checkpoint:
    """A model that is loaded by its name, and how. Wherever a model is asked for, a name alone will do too.

    Args:
        name: a folder (of a model, or of an adapter to one), a GGUF file or a name on the hub; None is the MiniLM sentence
            encoder.
        revision: a branch, tag or commit on the hub.
        dtype: "float32", "bfloat16", "float16" or "float64", or "fp32", "bf16", "fp16"; None is float32.
        device: where the model runs, such as "cpu", "cuda:1" or "gpu"; None is a GPU where there is one.
        device_map: in place of ``device``, for a model that is larger than one: "auto" spreads its layers over the devices,
            main memory and the disk; needs `accelerate`. A mapping from names of modules to devices is taken too.
        adapter: the folder of a PEFT adapter, which is put on the model ``name``.
        trust_remote_code: whether Python code that comes with the model, its tokenizer or its processor may run.

    Raises:
        InputError: a field of another type; an empty name; an unknown dtype; both a device and a device map. That there is
            no such model is known when it is loaded.

    Example:
        >>> import massieu
        >>> massieu.Checkpoint("org/model", revision="step1000", dtype="bfloat16").revision
        'step1000'
        >>> massieu.Checkpoint("org/model", dtype="int8")
        Traceback (most recent call last):
        massieu.errors.InputError: unknown dtype 'int8'; known are float32, bfloat16, float16, float64
    """

    name: str | PathLike[str] | None = None
    _: KW_ONLY
    revision: str | None = None
    dtype: str | None = None
    device: str | None = None
    device_map: str | Mapping[str, Any] | None = None
    adapter: str | PathLike[str] | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        check_fields(
            self,
            name=path,
            revision=text,
            dtype=text,
            device=text,
            device_map=any_of('"auto" or a mapping from modules to devices', str, Mapping),
            adapter=path,
            trust_remote_code=flag,
        )
        if isinstance(self.name, str) and not self.name.strip():
            raise InputError("the model's name is empty; leave it out for the default model")
        object.__setattr__(self, "dtype", _SHORT_NAMES.get(self.dtype or "", self.dtype))
        if self.dtype is not None and self.dtype not in DTYPES:
            raise InputError(f"unknown dtype {self.dtype!r}; known are {', '.join(DTYPES)}")
        if self.device is not None and self.device_map is not None:
            raise InputError(f"give either a device or a device map, got {self.device!r} and {self.device_map!r}")

    def settings(self) -> dict[str, Any]:
        """How the model is loaded, as a result's record holds it."""
        settings: dict[str, Any] = {
            "device": self.device,
            "dtype": self.dtype,
            "revision": self.revision,
            "trust_remote_code": self.trust_remote_code,
            "device_map": self.device_map,
        }
        if self.adapter is not None:
            settings["adapter"] = str(self.adapter)
        return settings


Model = str | Path | PathLike[str] | nn.Module | Checkpoint | None
"""What is taken for a model: a name, a module, or a `Checkpoint`; None is the default model.

Objects of other libraries that hold a module are taken too: `massieu.probing.model.unwrap.HOLDERS`.
"""


def given_model(model: Any) -> Checkpoint | nn.Module:
    """A model as a caller gives it: a checkpoint, a module, or what `unwrapped` takes for one.

    Raises:
        InputError: it is something else.
    """
    if isinstance(model, Checkpoint | nn.Module):
        return model
    if holds_model(model):
        module_in(model)  # raises where it cannot be read
        return model  # with the tokenizer that it holds beside the module
    if model is None or isinstance(model, str | PathLike):
        return Checkpoint(model)
    check_in_reach(model)
    raise InputError(f"model must be a name, a path, a torch.nn.Module or a massieu.Checkpoint, got {described(model)}")
