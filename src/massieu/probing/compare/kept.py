"""Results of a comparison's models, stored as soon as they are there, so that a later call goes on from them."""

import hashlib
import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

import massieu
from massieu.errors import InputError, require_extra
from massieu.probing.data.documents import beginning, given_documents, read_documents, reference_documents
from massieu.probing.data.pairs import given_pairs
from massieu.probing.data.text_digest import TextDigest
from massieu.probing.model.adapter import find_adapter
from massieu.probing.model.checkpoint import default_model, file_hash, find_checkpoint, quiet
from massieu.probing.model.module_hash import module_hash
from massieu.probing.result.result import ProbeResult
from massieu.probing.run import probe
from massieu.report.folder import save_or_elsewhere
from massieu.report.record_files import RECORD

FOLDER = "models"
_SHOWN = 12
"""Characters of a key in the name of a folder."""
_NOT_OF_THE_NUMBERS = ("text", "texts", "batch_size")
"""Options that are in the key by their content, or change no number."""
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


def key_of(model: str | Path | nn.Module | None, revision: str | None, data: Any, options: Mapping[str, Any]) -> str:
    """All that the numbers of a probe depend on, as a digest: weights, data, options and the version of massieu.

    Raises:
        InputError: there is no such model or text; batches of something that has no digest.
    """
    defaults = {name: each.default for name, each in inspect.signature(probe).parameters.items()}
    chosen = {name: value for name, value in options.items() if name not in _NOT_OF_THE_NUMBERS}
    chosen = {name: value for name, value in chosen.items() if value != defaults[name]}
    said = [massieu.__version__, _weights(model, revision), _data(data, options), chosen]
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()


def _weights(model: str | Path | nn.Module | None, revision: str | None) -> list[str | None]:
    if isinstance(model, nn.Module):
        return [module_hash(model, held=True)]
    with quiet():
        given = find_checkpoint(default_model() if model is None else model, revision)
        adapter = find_adapter(given)
        base = given if adapter is None else adapter.base
        # A branch of the hub moves on; the commit says which of its states is meant.
        commit = None if base.files else _commit(str(base.place), base.options)
    places = [place for place in (Path(given.place), Path(base.place)) if place.is_dir()]
    found = [file for place in places for pattern in _SETTINGS for file in sorted(place.glob(pattern))]
    settings = filter(Path.is_file, found)
    return [str(model), revision, commit, file_hash(dict.fromkeys((*given.files, *base.files, *settings)))]


def _commit(name: str, options: Mapping[str, Any]) -> str:
    """The folder of a hub's snapshot has the commit's name."""
    return Path(require_extra("huggingface_hub", "probe").hf_hub_download(name, "config.json", **options)).parent.name


def _data(data: Any, options: Mapping[str, Any]) -> str:
    """A digest of the batches, or of the documents."""
    if data is not None and not callable(data):
        digest = TextDigest()
        for batch in data:
            digest.add(batch if isinstance(batch, Mapping) else {"batch": batch}, None)
        if (found := digest.text()) is None:
            raise InputError("out needs batches of tensors and plain values, so that stored results can be recognised")
        return found
    text, texts = options.get("text"), options.get("texts")
    pairs = given_pairs(text, texts, options.get("source"), options.get("target"))
    if pairs is not None:
        digest = hashlib.sha256()
        for pair in pairs[1]():
            digest.update(json.dumps([pair.source, pair.target]).encode())
        return digest.hexdigest()
    if texts is not None:
        documents = given_documents(texts, options.get("column"))[1]()
    elif text is None:
        documents = reference_documents()
    else:
        documents = read_documents([text] if isinstance(text, str | Path) else list(text), column=options.get("column"))
    digest = hashlib.sha256()
    for document in beginning(documents, options.get("max_tokens")):
        digest.update(f"{document.continues}{len(document.text)}:".encode() + document.text.encode("utf-8", "replace"))
    return digest.hexdigest()
