"""Results of a comparison's models, stored as soon as they are there, so that a later call goes on from them."""

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
from massieu.probing.model.model import found_files
from massieu.probing.model.module_hash import module_hash
from massieu.probing.result.result import ProbeResult
from massieu.probing.run import Measurement
from massieu.storage.folder import save_or_elsewhere
from massieu.storage.record_files import RECORD

FOLDER = "models"
_SHOWN = 12
"""Characters of a key in the name of a folder."""
_NOT_OF_THE_NUMBERS = ("batch_size", "revision")
"""Settings that change no number, or are in the key with the weights."""
_SETTINGS = ("*config.json", "tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "*.model", "*.py")
"""Files of a checkpoint's folder that its numbers depend on, beside the weights."""


class Kept:
    """The folder ``models`` in a comparison's folder: a result for each model, named by it and by what was read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER

    def result(self, key: str) -> ProbeResult | None:
        """The complete result that is stored under a key; None where there is none.

        Raises:
            InputError: there is one that cannot be read, or a symbolic link.
        """
        for place in sorted(self._folder.glob(f"*-{key[:_SHOWN]}")):
            self._check_no_link(place)
            # A process that was killed may have made the folder and stored nothing.
            if (place / RECORD).is_file() and (found := ProbeResult.load(place)).complete:
                return found
        return None

    def keep(self, result: ProbeResult, name: str, key: str) -> None:
        """Store a result.

        Raises:
            InputError: it was not stored there; the message says where it is, and how to go on from it.
        """
        place = self._place(name, key)
        self._check_no_link(place)
        save_or_elsewhere(result.save, place, f"; move it to {place} and run the same again to go on from there")

    def _check_no_link(self, place: Path) -> None:
        for each in (self._folder, place):
            if each.is_symlink():
                raise InputError(f"{each} is a symbolic link, and no link in a comparison's folder is followed")

    def _place(self, name: str, key: str) -> Path:
        return self._folder / f"{re.sub('[^A-Za-z0-9._-]+', '-', name)[-60:].strip('.-') or 'model'}-{key[:_SHOWN]}"


def key_of(model: Checkpoint | nn.Module, data: Data, asked: Measurement) -> str:
    """All that the numbers of a probe depend on, as a digest: weights, data, options and the version of massieu.

    Raises:
        InputError: there is no such model or text; batches of something that has no digest.
    """
    loading = model if isinstance(model, Checkpoint) else Checkpoint()
    chosen = data.settings() | asked.settings() | loading.settings()
    usual = Text().settings() | Measurement().settings() | Checkpoint().settings()
    chosen = {name: value for name, value in chosen.items() if name not in _NOT_OF_THE_NUMBERS}
    chosen = {name: value for name, value in chosen.items() if value != usual.get(name)}
    chosen |= {"seed": asked.seed} if asked.seed else {}
    chosen |= {"replace": [[str(each.rule), each.per, each.windows] for each in asked.replace]} if asked.replace else {}
    said = [massieu.__version__, _weights(model), _data(data), chosen]
    if isinstance(data, Text | Pairs) and data.tokenizer is not None:
        said.append(_tokenizer(data.tokenizer))
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()


def _tokenizer(tokenizer: Any) -> str | None:
    """A digest of all that a tokenizer does; of one in plain Python, of its tokens alone."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return vocabulary_digest(tokenizer)
    # How it cuts and pads is what its latest call left behind.
    said = {
        name: value for name, value in json.loads(backend.to_str()).items() if name not in ("truncation", "padding")
    }
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def _weights(model: Checkpoint | nn.Module) -> list[str | None]:
    if isinstance(model, nn.Module):
        return [module_hash(model, held=True)]
    with quiet():
        given, adapter = found_files(model)
        base = given if adapter is None else adapter.base
        # A branch of the hub moves on; the commit says which of its states is meant.
        commit = None if base.files else _commit(str(base.place), base.options)
    places = [place for place in (Path(given.place), Path(base.place)) if place.is_dir()]
    found = [file for place in places for pattern in _SETTINGS for file in sorted(place.glob(pattern))]
    settings = filter(Path.is_file, found)
    files = file_hash(dict.fromkeys((*given.files, *base.files, *settings)))
    return [str(model.name), model.revision, commit, files]


def _commit(name: str, options: Mapping[str, Any]) -> str:
    """The folder of a hub's snapshot has the commit's name."""
    return Path(require_extra("huggingface_hub", "probe").hf_hub_download(name, "config.json", **options)).parent.name


def _data(data: Data) -> str:
    """A digest of the batches, documents, pairs or images."""
    if isinstance(data, Batches):
        return _of_batches(data)
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


def _of_batches(data: Batches) -> str:
    digest = TextDigest()
    for batch in data.batches:
        digest.add(batch if isinstance(batch, Mapping) else {"batch": batch}, None)
    if (found := digest.text()) is None:
        raise InputError("out needs batches of tensors and plain values, so that stored results can be recognised")
    return found
