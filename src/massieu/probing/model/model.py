"""Load a checkpoint for probing, or take a module in memory, and say exactly which one it is."""

from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from massieu.errors import InputError, require_extra
from massieu.interruption import interruptible
from massieu.probing.model import packed
from massieu.probing.model.checkpoint import (
    CheckpointFiles,
    file_hash,
    find_checkpoint,
    quiet,
    sentence,
    shortened,
    weights_are,
)
from massieu.probing.model.forward import device_of, dtype_of
from massieu.probing.model.given import DTYPES, Checkpoint
from massieu.probing.model.model_size import bounded, check_depth
from massieu.probing.model.module_hash import hash_in_background
from massieu.probing.model.source import ModelSource, find_source
from massieu.probing.model.tokenizers import embedded
from massieu.probing.model.trunk import readable_trunk, trunk_of
from massieu.probing.model.unwrap import is_pretrained, tokenizer_of, unwrapped
from massieu.storage.record import ModelRecord

_RANDOM = "not read from the checkpoint but random, and nothing here depends on them"
READABLE = (
    "BERT, RoBERTa, ModernBERT, GPT-2, GPT-NeoX, Llama, Mistral, Qwen, Gemma, Phi, T5, BART, Whisper, ViT and others"
)


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model ready to be probed, and where it came from.

    Attributes:
        found_hash: `hash`, or what another thread makes it of.
        tokenizer_problem: why there is no tokenizer, where one was looked for.
        from_files: whether it was loaded here, so that what follows is known; False for a model given in memory.
        weights: format of the files and the type that quantised ones were turned to; None where it is not known.
        missing: weights of the model that the checkpoint does not have: they are random numbers.
        reshaped: weights of another shape in the checkpoint (its shape, the model's): they too are random numbers.
        unexpected: weights of the checkpoint that the model does not have.
        stored_dtype: floating-point type of most weights in the files; None where it is not known or they are quantised.
        doubts: warnings about what was left out of the checkpoint.
        whole: the model with its head, where it has one here.
    """

    module: nn.Module
    name: str
    found_hash: str | Future[str]
    revision: str | None
    tokenizer: Any = None
    tokenizer_problem: str | None = None
    from_files: bool = False
    weights: str | None = None
    stored_dtype: str | None = None
    missing: tuple[str, ...] = ()
    reshaped: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    unexpected: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    whole: Any = None

    @property
    def hash(self) -> str:
        """Of its files, or of its weights and settings."""
        return self.found_hash if isinstance(self.found_hash, str) else self.found_hash.result()

    def describe(self) -> ModelRecord:
        """The ``model`` entry of ``run.json``; layers and heads are filled in once the sites are known."""
        config = getattr(self.module, "config", None)
        weights = [text for text in (self.weights, packed.described(self.module)) if text]
        return ModelRecord(
            name=self.name,
            hash=self.hash,
            revision=self.revision,
            weights="; ".join(weights) or None,
            architecture=type(self.module).__name__,
            parameters=packed.numbers_in(self.module),
            dtype=str(dtype_of(self.module)).removeprefix("torch."),
            stored_dtype=self.stored_dtype,
            device=self._devices(),
            hidden_size=getattr(config, "hidden_size", None),
            missing_weights=self._listed((*self.missing, *self.reshaped), _RANDOM),
            unexpected_weights=self._listed(self.unexpected, "in the checkpoint but not in the model, and not used"),
        )

    def _devices(self) -> str:
        """The devices that the layers are on, each once."""
        placement = getattr(self.module, "hf_device_map", {}).values()
        names = dict.fromkeys(map(str, placement))
        return ", ".join(names) or str(device_of(self.module) or "cpu")

    def _listed(self, names: Collection[str], what: str) -> str | None:
        """A sentence on weights of these names; None where it is not known which they are."""
        if not self.from_files:
            return None
        if not names:
            return "none"
        return f"{weights_are(names)} {what}: {shortened(names)}"


@dataclass(frozen=True, eq=False)
class AnnouncedModel:
    """A checkpoint before its weights are read: what its configuration and its tokenizer's files say.

    Attributes:
        tokenizer_problem: why there is no tokenizer, where one was looked for.
    """

    name: str
    config: Any
    tokenizer: Any
    tokenizer_problem: str | None


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "gpu":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            raise InputError(
                "device 'gpu' is not there: PyTorch sees no GPU; leave the option out to use the processor"
            )
        return accelerator
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {name!r} is not there: {str(error).splitlines()[0]}") from error
    return torch.device(name)


def load_model(
    named: Checkpoint | str | PathLike[str] | None = None,
    *,
    tokenizer: bool = True,
    head: bool | Literal["if any"] = False,
    check: Callable[[AnnouncedModel], None] | None = None,
) -> LoadedModel:
    """Load a model's trunk and its tokenizer; a name alone is a `Checkpoint` of which nothing else is said.

    A folder with an adapter is loaded onto the base model that it names, an adapter that the checkpoint names onto the model.

    What the checkpoint lacks is drawn at random by transformers: `missing` and `reshaped` of the result say what, and
    `massieu.probing.checks.weights` whether it matters.

    Args:
        tokenizer: whether to read the tokenizer too.
        head: whether to keep the head of a language model; "if any" where the checkpoint names one.
        check: called before the weights are read, and may refuse the model.

    Raises:
        InputError: no such model, adapter or device, or files that are not a model of ``transformers``.
        MissingExtraError: a GGUF file without the packages that read it; an adapter without `peft`; a device map without
            `accelerate`.
    """
    wanted = named if isinstance(named, Checkpoint) else Checkpoint(named)
    require_extra("transformers", "probe")
    if wanted.device_map is not None:
        require_extra("accelerate", "offload")
    device = _device(wanted.device)
    dtype = DTYPES[wanted.dtype or "float32"]
    with quiet():
        source = find_source(wanted)
        announced = _announce(source, with_tokenizer=tokenizer)
        if check is not None:
            check(announced)
        config = announced.config
        with _one_sentence(source.name), bounded(source.name, source.checkpoint.files):
            original_dtype = source.stored_dtype(config)
            keeps_head = _names_head(source, config) if head == "if any" else head
            read = _read_weights(source, config, dtype, device, keeps_head=keeps_head)
    module = read.model
    if is_pretrained(module) and (source.adapter is not None or keeps_head):
        module = trunk_of(module)
    if keeps_head:
        _check_head_read(source.name, read, module)
    if not read.is_placed:
        read.model.to(device)
    read.model.eval()
    names_in_trunk = _names_in(read.as_read, module)
    return LoadedModel(
        module,
        source.name,
        file_hash(source.files()) or hash_in_background(module),
        wanted.revision or getattr(config, "_commit_hash", None),
        announced.tokenizer,
        tokenizer_problem=announced.tokenizer_problem,
        from_files=True,
        weights=source.format_as(dtype),
        stored_dtype=original_dtype,
        missing=tuple(sorted(names_in_trunk(dict.fromkeys(read.report["missing_keys"])))),
        reshaped=names_in_trunk(_shapes(read.report["mismatched_keys"])),
        unexpected=tuple(sorted(read.report["unexpected_keys"])),
        doubts=() if source.checkpoint.gguf is None else source.checkpoint.gguf.doubts(module),
        whole=read.model,
    )


def _announce(source: ModelSource, *, with_tokenizer: bool) -> AnnouncedModel:
    """Read the configuration and, if it is wanted, the tokenizer."""
    transformers = require_extra("transformers", "probe")
    with _one_sentence(source.name):
        config = transformers.AutoConfig.from_pretrained(source.checkpoint.place, **source.options)
    check_depth(source.name, config)
    if not with_tokenizer:
        return AnnouncedModel(source.name, config, None, None)
    tokenizer, problem = _tokenizer(source.named_files, source.options)
    if tokenizer is None and source.adapter is not None:  # it is seldom saved beside an adapter
        tokenizer, problem = _tokenizer(source.checkpoint, source.options)
    return AnnouncedModel(source.name, config, tokenizer, problem)


@dataclass(frozen=True, eq=False)
class _ReadWeights:
    """A model with the weights of its files.

    Attributes:
        as_read: as transformers made it: it has the names that the report speaks of.
        model: the same with its adapter at work in it; of a class with a head that is not wanted, the trunk.
        report: transformers' report on missing, mismatched and unexpected weights.
        is_placed: it is on its devices already.
    """

    as_read: Any
    model: Any
    report: dict[str, Any]
    is_placed: bool


def _read_weights(
    source: ModelSource, config: Any, dtype: torch.dtype, device: torch.device, *, keeps_head: bool
) -> _ReadWeights:
    transformers = require_extra("transformers", "probe")
    with interruptible() as interruption, interruption.loading():
        require_extra("transformers.modeling_utils", "probe")
    options = {**source.options, "output_loading_info": True, "ignore_mismatched_sizes": True}
    device_map: Any = source.wanted.device_map
    if device_map is None and getattr(config, "quantization_config", None) is not None:
        device_map = {"": str(device)}  # packed weights are made where they are to stay
    if device_map is not None:
        options["device_map"] = device_map

    def read(kind: Any) -> tuple[Any, dict[str, Any]]:
        return kind.from_pretrained(source.checkpoint.place, config=config, dtype=dtype, **options)

    class_name = "AutoModel" if source.adapter is None else source.adapter.auto
    if keeps_head:
        class_name = "AutoModelForCausalLM"
    as_read, report = read(getattr(transformers, class_name))
    model = as_read
    if source.adapter is not None:
        model = source.adapter.applied(as_read)
    elif not keeps_head:
        class_with_head = _class_with_head(as_read, report["missing_keys"])
        if class_with_head is not None:
            as_read, report = read(class_with_head)
            model = trunk_of(as_read)
    return _ReadWeights(as_read, model, report, is_placed=device_map is not None)


def _names_head(source: ModelSource, config: Any) -> bool:
    """Whether a checkpoint names a class with the head of a language model; GGUF files hold no other models."""
    if source.adapter is not None:
        return False
    class_names = getattr(config, "architectures", None)
    if not class_names and source.checkpoint.gguf:
        return True
    return any(name.endswith(("CausalLM", "LMHeadModel")) for name in class_names or [])


def _check_head_read(name: str, read: _ReadWeights, trunk: nn.Module) -> None:
    """Raises:
    InputError: the files lack weights of the head, so that these would be random.
    """
    in_trunk = {f"{read.as_read.base_model_prefix}.{weight}" for weight in trunk.state_dict()}
    random = sorted(set(read.report["missing_keys"]) - in_trunk)
    if random:
        raise InputError(f"{name} does not generate text: its files have no language head ({shortened(random)})")


def _shapes(mismatched: Collection[Any]) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """The shape in the files and the model's, by the name of the weight."""
    return {name: (tuple(in_files), tuple(in_model)) for name, in_files, in_model in sorted(mismatched)}


def _class_with_head(trunk: Any, missing: Collection[str]) -> Any:
    """The class that reads a trunk's embeddings where the files hold them as the head's, to which they are tied; else None."""
    config = trunk.config
    if not getattr(config, "tie_word_embeddings", False) or embedded(trunk) is None:
        return None
    table = trunk.get_input_embeddings().weight
    names = {name for name, parameter in trunk.named_parameters(remove_duplicate=False) if parameter is table}
    if not names & set(missing):
        return None
    named_class = next(iter(getattr(config, "architectures", None) or ()), "")
    kind = getattr(require_extra("transformers", "probe"), named_class, None)
    return None if kind is type(trunk) else kind


def _names_in(whole: Any, trunk: nn.Module) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """From entries by a weight's name in a model to those by its name in the trunk, without those of the head."""
    prefix = f"{whole.base_model_prefix}."
    if trunk is whole or getattr(whole, whole.base_model_prefix, None) is not trunk:
        return lambda entries: entries
    return lambda entries: {k.removeprefix(prefix): entry for k, entry in entries.items() if k.startswith(prefix)}


@contextmanager
def _one_sentence(shown: str) -> Iterator[None]:
    """What transformers and the libraries below it raise about files they cannot use."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # whatever a configuration or files that are none make of them
        raise InputError(f"cannot load the model {shown}: {sentence(error)}") from error


def _tokenizer(checkpoint: CheckpointFiles, options: dict[str, Any]) -> tuple[Any, str | None]:
    """The model's tokenizer; or None, as for models that read something else than text, and why there is none."""
    transformers = require_extra("transformers", "probe")
    try:
        return transformers.AutoTokenizer.from_pretrained(checkpoint.place, **options), None
    except Exception as error:  # tokenizers raises Exception itself; the reason is told when text is to be read
        return None, sentence(error)


def load(
    given: Checkpoint | nn.Module,
    *,
    tokenizer: bool = False,
    head: bool | Literal["if any"] = False,
    check: Callable[[AnnouncedModel], None] | None = None,
) -> LoadedModel:
    """A model as it was given: `load_model` of a checkpoint, `as_loaded` of a module."""
    if not isinstance(given, Checkpoint):
        return as_loaded(given)
    return load_model(given, tokenizer=tokenizer, head=head, check=check)


def load_tokenizer(name: str | PathLike[str], *, trust_remote_code: bool = False) -> Any:
    """A tokenizer from its folder, the folder of a model, a GGUF file or a name on the hub.

    Raises:
        InputError: there is no such place, or no tokenizer in it.
    """
    place = Path(name)
    with quiet():
        if place.is_dir() and not list(place.glob("*.gguf")):
            checkpoint = CheckpointFiles(place)  # a tokenizer's own folder has no configuration of a model
        else:
            checkpoint = find_checkpoint(name, None)
        tokenizer, problem = _tokenizer(checkpoint, {**checkpoint.options, "trust_remote_code": trust_remote_code})
    if tokenizer is None:
        raise InputError(f"{name} has no tokenizer that can be loaded ({problem})")
    return tokenizer


def as_loaded(module: nn.Module) -> LoadedModel:
    """A module that is already in memory, without what wraps it; of a transformers model with a head, its trunk.

    Raises:
        InputError: as `readable_trunk`.
    """
    inner: Any = unwrapped(module)
    trunk: Any = readable_trunk(inner)
    config = getattr(trunk, "config", None)
    name = getattr(config, "_name_or_path", "") or type(inner).__name__
    revision = getattr(config, "_commit_hash", None)
    return LoadedModel(trunk, str(name), hash_in_background(trunk), revision, tokenizer_of(module), whole=inner)
