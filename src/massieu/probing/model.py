"""Load a checkpoint for probing, say exactly which one it is, and make a re-initialised copy of it as a control."""

import copy
import hashlib
import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from massieu.errors import InputError, require_extra
from massieu.probing.checkpoint import (
    Checkpoint,
    default_model,
    file_hash,
    find_checkpoint,
    quiet,
    sentence,
    some,
    weights_are,
)
from massieu.probing.seeding import OwnGenerator
from massieu.report.record import ModelRecord

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
_RANDOM = "not read from the checkpoint but random, and nothing here depends on them"
READABLE = (
    "BERT, RoBERTa, ModernBERT, GPT-2, GPT-NeoX, Llama, Mistral, Qwen, Gemma, Phi, T5, BART, Whisper, ViT and others"
)


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model ready to be probed, and where it came from.

    Attributes:
        tokenizer_problem: why there is no tokenizer, where one was looked for.
        from_files: whether it was loaded here, so that what follows is known; False for a model given in memory.
        weights: format of the files and the type that quantised ones were turned to; None where it is not known.
        missing: weights of the model that the checkpoint does not have: they are random numbers.
        reshaped: weights of another shape in the checkpoint (its shape, the model's): they too are random numbers.
        unexpected: weights of the checkpoint that the model does not have.
        doubts: warnings about what was left out of the checkpoint.
    """

    module: nn.Module
    name: str
    hash: str
    revision: str | None
    tokenizer: Any = None
    tokenizer_problem: str | None = None
    from_files: bool = False
    weights: str | None = None
    missing: tuple[str, ...] = ()
    reshaped: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    unexpected: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()

    def describe(self) -> ModelRecord:
        """The ``model`` entry of ``run.json``; layers and heads are filled in once the sites are known."""
        first = next(self.module.parameters())
        config = getattr(self.module, "config", None)
        return ModelRecord(
            **{name: getattr(self, name) for name in ("name", "hash", "revision", "weights")},
            architecture=type(self.module).__name__,
            parameters=sum(p.numel() for p in self.module.parameters()),
            dtype=str(first.dtype).removeprefix("torch."),
            device=str(first.device),
            hidden_size=getattr(config, "hidden_size", None),
            missing_weights=self._listed((*self.missing, *self.reshaped), _RANDOM),
            unexpected_weights=self._listed(self.unexpected, "in the checkpoint but not in the model, and not used"),
        )

    def _listed(self, names: Collection[str], what: str) -> str | None:
        if not self.from_files:
            return None
        return f"{weights_are(names)} {what}: {some(names)}" if names else "none"


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {name!r} is not there: {str(error).splitlines()[0]}") from error
    return torch.device(name)


def load_model(
    name: str | Path | None = None,
    *,
    device: str | None = None,
    dtype: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    tokenizer: bool = True,
) -> LoadedModel:
    """Load a model's trunk and its tokenizer from a folder, a GGUF file or a hub name; None is the default model.

    What the checkpoint lacks is drawn at random by transformers: `missing` and `reshaped` of the result say what, and
    `massieu.probing.weights` whether it matters.

    Args:
        device: where to run; None picks a GPU where there is one.
        dtype: the parameters' type; None is float32.
        tokenizer: whether to read the tokenizer too.

    Raises:
        InputError: no such model or device, unknown dtype, or files that are not a model of ``transformers``.
        MissingExtraError: a GGUF file without the packages that read it.
    """
    transformers = require_extra("transformers", "probe")
    target, kind = _device(device), DTYPES.get(dtype or "float32")
    if kind is None:
        raise InputError(f"unknown dtype {dtype!r}; known are {', '.join(DTYPES)}")
    shown = "sentence-transformers/all-MiniLM-L6-v2 (the default model)" if name is None else str(name)
    with quiet():
        checkpoint = find_checkpoint(default_model() if name is None else name, revision)
        # Of a folder with a GGUF file the file says which model it is.
        shown = shown if checkpoint.gguf is None else checkpoint.files[0].name
        named = {**checkpoint.options, "trust_remote_code": trust_remote_code}
        with _one_sentence(shown):
            config = transformers.AutoConfig.from_pretrained(checkpoint.place, **named)
            options = {**named, "output_loading_info": True, "ignore_mismatched_sizes": True}
            module, report = transformers.AutoModel.from_pretrained(
                checkpoint.place, config=config, dtype=kind, **options
            )
        read, problem = _tokenizer(checkpoint, named) if tokenizer else (None, None)
    module = module.to(target).eval()
    return LoadedModel(
        module,
        shown,
        file_hash(checkpoint.files) or weights_hash(module),
        revision or getattr(config, "_commit_hash", None),
        read,
        tokenizer_problem=problem,
        from_files=True,
        weights=checkpoint.format_as(kind),
        missing=tuple(sorted(report["missing_keys"])),
        reshaped={key: (tuple(found), tuple(needed)) for key, found, needed in sorted(report["mismatched_keys"])},
        unexpected=tuple(sorted(report["unexpected_keys"])),
        doubts=() if checkpoint.gguf is None else checkpoint.gguf.doubts(module),
    )


@contextmanager
def _one_sentence(shown: str) -> Iterator[None]:
    """What transformers and the libraries below it raise about files they cannot use."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RuntimeError, ImportError) as error:
        raise InputError(f"cannot load the model {shown}: {sentence(error)}") from error


def _tokenizer(checkpoint: Checkpoint, options: dict[str, Any]) -> tuple[Any, str | None]:
    """The model's tokenizer; or None, as for models that read something else than text, and why there is none."""
    transformers = require_extra("transformers", "probe")
    try:
        return transformers.AutoTokenizer.from_pretrained(checkpoint.place, **options), None
    except Exception as error:  # tokenizers raises Exception itself; the reason is told when text is to be read
        return None, sentence(error)


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
    packed = [name for name, entry in trunk.state_dict().items() if not isinstance(entry, Tensor) or entry.is_quantized]
    if packed:
        raise InputError(
            f"{type(module).__name__} has packed weights that cannot be read ({some(packed)}), as quantize_dynamic of "
            "torch makes them; give the model as it was before"
        )
    empty = [name for name, tensor in [*trunk.named_parameters(), *trunk.named_buffers()] if tensor.is_meta]
    if empty:
        raise InputError(
            f"{type(module).__name__} is on the meta device, so it has no weights to read ({some(empty)}); load them first"
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
    with torch.device("cpu"), OwnGenerator(seed), quiet():
        fresh = type(module)(copy.deepcopy(module.config))  # type: ignore[call-arg]
    return fresh.to(device=first.device, dtype=first.dtype).eval()


def model_inputs(module: nn.Module, inputs: Mapping[str, Any], items: int | None = None) -> dict[str, Any]:
    """What the model's forward is called with: on its device, without a cache, with decoder tokens where it needs them.

    Args:
        items: at most so many of the batch; None is all.
    """
    device = next(module.parameters()).device
    ready = {k: (v[:items] if v.dim() else v).to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    accepted = inspect.signature(module.forward).parameters
    if "use_cache" in accepted:
        ready.setdefault("use_cache", False)
    config: Any = module.config
    decodes = getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted
    if decodes and not decoder_given(ready) and "input_ids" in ready:
        ready["decoder_input_ids"] = _shifted(ready["input_ids"], config)
        if "attention_mask" in ready:
            ready["decoder_attention_mask"] = ready["attention_mask"]
    return ready


def decoder_given(inputs: Mapping[str, Any]) -> bool:
    """Whether a model is given tokens for a decoder beside those for its encoder."""
    return any(inputs.get(name) is not None for name in ("decoder_input_ids", "decoder_inputs_embeds"))


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
