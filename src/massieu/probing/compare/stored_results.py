"""Results of a comparison's models, stored as soon as each is measured, so that a later call continues from them."""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

import massieu
from massieu.errors import InputError, require_extra
from massieu.probing.data.documents import beginning
from massieu.probing.data.given import Batches, Data, Images, Pairs, Text
from massieu.probing.data.text_digest import TextDigest, vocabulary_digest
from massieu.probing.model.checkpoint import file_hash, quiet
from massieu.probing.model.given import Checkpoint
from massieu.probing.model.module_hash import module_hash
from massieu.probing.model.source import source_files
from massieu.probing.model.unwrap import module_in
from massieu.probing.result.result import ProbeResult
from massieu.probing.run import Measurement
from massieu.storage.folder import save_or_elsewhere
from massieu.storage.record_files import RECORD

FOLDER = "models"
_KEY_LENGTH = 12
"""Characters of a key in the name of a folder."""
_IGNORED_SETTINGS = ("batch_size", "revision")
"""Settings that change no number, or are in the key with the weights."""
_SETTINGS_FILES = ("*config.json", "tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "*.model", "*.py")
"""Files of a checkpoint's folder, besides the weights, on which its numbers depend."""


class StoredResults:
    """The folder ``models`` in a comparison's folder: a result for each model, in a folder named by model and key."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER

    def load(self, key: str) -> ProbeResult | None:
        """The complete result that is stored under a key; None if there is none.

        Raises:
            InputError: the stored result cannot be read, or is a symbolic link.
        """
        for place in sorted(self._folder.glob(f"*-{key[:_KEY_LENGTH]}")):
            self._check_no_link(place)
            # A process that was killed may have made the folder and stored nothing.
            if (place / RECORD).is_file():
                result = ProbeResult.load(place)
                if result.complete:
                    return result
        return None

    def save(self, result: ProbeResult, name: str, key: str) -> None:
        """Store a result.

        Raises:
            InputError: it could not be stored in its folder; the message says where it is, and how to continue from it.
        """
        place = self._place(name, key)
        self._check_no_link(place)
        save_or_elsewhere(result.save, place, f"; move it to {place} and run the same again to go on from there")

    def _check_no_link(self, place: Path) -> None:
        for path in (self._folder, place):
            if path.is_symlink():
                raise InputError(f"{path} is a symbolic link, and no link in a comparison's folder is followed")

    def _place(self, name: str, key: str) -> Path:
        """The folder of a result; characters that a file system may refuse become hyphens."""
        readable = re.sub("[^A-Za-z0-9._-]+", "-", name)[-60:].strip(".-") or "model"
        return self._folder / f"{readable}-{key[:_KEY_LENGTH]}"


def key_of(model: Checkpoint | nn.Module, data: Data, measurement: Measurement) -> str:
    """A digest of all on which the numbers of a probe depend: weights, data, options and the version of massieu.

    Raises:
        InputError: there is no such model or text; batches of something that has no digest.
    """
    checkpoint = model if isinstance(model, Checkpoint) else Checkpoint()
    settings = data.settings() | measurement.settings() | checkpoint.settings()
    defaults = Text().settings() | Measurement().settings() | Checkpoint().settings()
    # Only the settings that differ from the defaults.
    options = {
        name: value for name, value in settings.items() if name not in _IGNORED_SETTINGS and value != defaults.get(name)
    }
    if measurement.seed:
        options["seed"] = measurement.seed
    if measurement.replace:
        options["replace"] = [[str(rule.rule), rule.per, rule.windows] for rule in measurement.replace]
    parts = [massieu.__version__, _weights(model), _data(data), options]
    if isinstance(data, Text | Pairs) and data.tokenizer is not None:
        parts.append(_tokenizer(data.tokenizer))
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _tokenizer(tokenizer: Any) -> str | None:
    """A digest of a tokenizer's whole configuration; for one in plain Python, of its tokens alone."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return vocabulary_digest(tokenizer)
    # Truncation and padding are only what the latest call left behind.
    configuration = {
        name: value for name, value in json.loads(backend.to_str()).items() if name not in ("truncation", "padding")
    }
    return hashlib.sha256(json.dumps(configuration).encode()).hexdigest()


def _weights(model: Checkpoint | nn.Module) -> list[str | None]:
    """What identifies a model's weights: a hash, and for a checkpoint also its name, revision and commit."""
    if not isinstance(model, Checkpoint):
        return [module_hash(module_in(model), held=True)]
    with quiet():
        checkpoint, adapter = source_files(model)
        base = checkpoint if adapter is None else adapter.base
        # A branch of the hub moves on; the commit identifies its state.
        commit = None if base.files else _commit(str(base.place), base.options)
    folders = [folder for folder in (Path(checkpoint.place), Path(base.place)) if folder.is_dir()]
    matches = [file for folder in folders for pattern in _SETTINGS_FILES for file in sorted(folder.glob(pattern))]
    settings_files = filter(Path.is_file, matches)
    files = file_hash(dict.fromkeys((*checkpoint.files, *base.files, *settings_files)))
    return [str(model.name), model.revision, commit, files]


def _commit(name: str, options: Mapping[str, Any]) -> str:
    """The commit of a checkpoint on the hub, which is the name of its snapshot's folder."""
    return Path(require_extra("huggingface_hub", "probe").hf_hub_download(name, "config.json", **options)).parent.name


def _data(data: Data) -> str:
    """A digest of the batches, documents, pairs or images."""
    if isinstance(data, Batches):
        return _digest_of_batches(data)
    digest = hashlib.sha256()
    if isinstance(data, Pairs):
        for pair in data.read():
            digest.update(json.dumps([pair.source, pair.target]).encode())
    elif isinstance(data, Text):
        for document in beginning(data.read(), data.limit):
            digest.update(f"{document.continues}{len(document.text)}:".encode())
            digest.update(document.text.encode("utf-8", "replace"))
    elif isinstance(data, Images):
        for picture in data.pictures:
            values = np.asarray(picture.read())
            digest.update(f"{values.dtype}{values.shape}".encode() + values.tobytes())
        digest.update(json.dumps(data.captions).encode())
    return digest.hexdigest()


def _digest_of_batches(data: Batches) -> str:
    digest = TextDigest()
    for batch in data.batches:
        digest.add(batch if isinstance(batch, Mapping) else {"batch": batch}, None)
    text = digest.text()
    if text is None:
        raise InputError("out needs batches of tensors and plain values, so that stored results can be recognised")
    return text
