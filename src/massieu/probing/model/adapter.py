"""A folder with an adapter: its base model is loaded, and `peft` puts the adapter to work in it."""

import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from massieu.errors import InputError, MissingExtraError, require_extra
from massieu.probing.model.checkpoint import ADAPTER, CheckpointFiles, find_checkpoint, sentence, shortened
from massieu.probing.model.unwrap import unwrapped

_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_CLASSES = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
}
"""What an adapter's task says of the class that its base model was loaded with; `AutoModel` for every other."""


@dataclass(frozen=True)
class Adapter:
    """An adapter's files and what they say of its base model.

    Attributes:
        base: where the base model is.
        auto: the class of transformers that loads it, so that its weights have the names that the adapter knows.
    """

    folder: Path
    file: Path
    base: CheckpointFiles
    auto: str

    def applied(self, module: nn.Module) -> nn.Module:
        """The base model with the adapter at work in it.

        Raises:
            InputError: the adapter's weights are not those that it has in this model.
        """
        peft: Any = require_extra("peft", "peft")
        model = peft.PeftModel.from_pretrained(module, str(self.folder))
        expected = set(peft.get_peft_model_state_dict(model, save_embedding_layers=False))
        in_file = {name for name in _names(self.file) if name in expected or not _is_embedding(name)}
        if expected != in_file:
            missing = sorted(expected - in_file)
            unexpected = sorted(in_file - expected)
            parts = []
            if missing:
                parts.append(f"lacks {shortened(missing)}")
            if unexpected:
                parts.append(f"has {shortened(unexpected)}, which the model has no place for")
            raise InputError(f"the adapter {self.folder} does not fit its base model: it {' and '.join(parts)}")
        return unwrapped(model)


def adapter_files(folder: str | os.PathLike[str]) -> CheckpointFiles:
    """The files of an adapter's folder.

    Raises:
        InputError: it is no such folder.
    """
    if not Path(folder, ADAPTER).is_file():
        raise InputError(f"adapter must be the folder of an adapter, and {folder} has no {ADAPTER}")
    return find_checkpoint(folder, None)


def find_adapter(checkpoint: CheckpointFiles, base: CheckpointFiles | None = None) -> Adapter | None:
    """The adapter in a checkpoint's folder; None where there is none.

    Args:
        base: the model that it is put on; None is the one that its files name.

    Raises:
        MissingExtraError: there is one, and `peft` is not installed.
        InputError: its files are not there or cannot be read, or its base model cannot be found.
    """
    folder = Path(checkpoint.place)
    if not checkpoint.adapter:
        return None
    if importlib.util.find_spec("peft") is None:
        raise MissingExtraError(
            f"{folder} holds an adapter ({ADAPTER}), which peft puts into its base model, and peft is not installed; "
            'install it with: pip install "massieu[peft]"'
        )
    files = [folder / name for name in _FILES if (folder / name).is_file()]
    if not files:
        raise InputError(f"{folder} holds an adapter ({ADAPTER}) without its weights ({' or '.join(_FILES)})")
    try:
        settings = json.loads((folder / ADAPTER).read_text())
        task = settings.get("task_type")
        mapping = settings.get("auto_mapping")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise InputError(f"{folder / ADAPTER} cannot be read: {sentence(error)}") from error
    if base is None:
        base = _base_of(folder, settings)
    base_class = mapping.get("base_model_class") if isinstance(mapping, dict) else None
    return Adapter(folder, files[0], base, base_class or _CLASSES.get(task, "AutoModel"))


def _base_of(folder: Path, settings: dict[str, Any]) -> CheckpointFiles:
    """The model that an adapter's files name."""
    name = settings.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise InputError(f"{folder / ADAPTER} does not say by base_model_name_or_path which model it belongs to")
    try:
        return find_checkpoint(name, settings.get("revision"))
    except InputError as error:
        raise InputError(f"the base model of the adapter {folder} is not there: {error}") from error


def _names(file: Path) -> set[str]:
    """The names of the weights in a file."""
    if file.suffix == ".safetensors":
        safetensors: Any = require_extra("safetensors", "probe")
        try:
            with safetensors.safe_open(file, framework="pt") as opened:
                return set(opened.keys())
        except (safetensors.SafetensorError, OSError) as error:
            raise InputError(f"{file} cannot be read: {sentence(error)}") from error
    return set(torch.load(file, map_location="meta", weights_only=True))


def _is_embedding(name: str) -> bool:
    """A table of embeddings that was saved along, as where its vocabulary was extended."""
    return ".embed_tokens." in name or ".lm_head." in name
