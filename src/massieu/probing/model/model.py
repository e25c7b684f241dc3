"""Load a checkpoint for probing, or take a module in memory, and say exactly which one it is."""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from massieu.errors import InputError, require_extra
from massieu.probing.model import packed
from massieu.probing.model.adapter import Adapter, adapter_files, find_adapter
from massieu.probing.model.checkpoint import (
    CheckpointFiles,
    default_model,
    file_hash,
    find_checkpoint,
    quiet,
    sentence,
    shortened,
    stored_dtype,
    weights_are,
)
from massieu.probing.model.forward import decoder_given, device_of, dtype_of, separable
from massieu.probing.model.given import DTYPES, Checkpoint
from massieu.probing.model.model_size import bounded, check_depth
from massieu.probing.model.module_hash import module_hash
from massieu.probing.model.offload import offloaded
from massieu.probing.model.target_labels import IGNORED, is_tokens, predicts_labels, shifted_labels
from massieu.probing.model.tokenizers import embedded
from massieu.probing.model.unwrap import is_pretrained, tokenizer_of, unwrapped
from massieu.storage.record import ModelRecord

_RANDOM = "not read from the checkpoint but random, and nothing here depends on them"
_MORE_POSITIONS = 2  # rows that a table of positions may have beyond them, as OPT's
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
        stored_dtype: floating-point type of most weights in the files; None where it is not known or they are quantised.
        doubts: warnings about what was left out of the checkpoint.
        whole: the model with its head, where it has one here.
    """

    module: nn.Module
    name: str
    hash: str
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

    def describe(self) -> ModelRecord:
        """The ``model`` entry of ``run.json``; layers and heads are filled in once the sites are known."""
        config = getattr(self.module, "config", None)
        placement = getattr(self.module, "hf_device_map", {}).values()
        return ModelRecord(
            **{name: getattr(self, name) for name in ("name", "hash", "revision")},
            weights="; ".join(filter(None, (self.weights, packed.described(self.module)))) or None,
            architecture=type(self.module).__name__,
            parameters=packed.numbers_in(self.module),
            dtype=str(dtype_of(self.module)).removeprefix("torch."),
            stored_dtype=self.stored_dtype,
            device=", ".join(dict.fromkeys(map(str, placement))) or str(device_of(self.module) or "cpu"),
            hidden_size=getattr(config, "hidden_size", None),
            missing_weights=self._listed((*self.missing, *self.reshaped), _RANDOM),
            unexpected_weights=self._listed(self.unexpected, "in the checkpoint but not in the model, and not used"),
        )

    def _listed(self, names: Collection[str], what: str) -> str | None:
        if not self.from_files:
            return None
        return f"{weights_are(names)} {what}: {shortened(names)}" if names else "none"


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
    device_map: Any = wanted.device_map
    transformers = require_extra("transformers", "probe")
    if device_map is not None:
        require_extra("accelerate", "offload")
    target, kind = _device(wanted.device), DTYPES[wanted.dtype or "float32"]
    with quiet():
        given, adapter = found_files(wanted)
        if adapter is not None and device_map is not None:
            raise InputError(
                f"{adapter.folder} is an adapter, and a device map needs a whole model; merge the adapter into its base first"
            )
        checkpoint = given if adapter is None else adapter.base
        shown = _shown(wanted, checkpoint)
        options = {**checkpoint.options, "trust_remote_code": wanted.trust_remote_code}
        with _one_sentence(shown):
            config = transformers.AutoConfig.from_pretrained(checkpoint.place, **options)
        check_depth(shown, config)
        read, problem = _tokenizer(given, options) if tokenizer else (None, None)
        if tokenizer and read is None and adapter is not None:  # it is seldom saved beside an adapter
            read, problem = _tokenizer(checkpoint, options)
        if check is not None:
            check(AnnouncedModel(shown, config, read, problem))
        with _one_sentence(shown), bounded(shown, checkpoint.files):
            stored = _stored_dtype(checkpoint, config)
            options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
            if getattr(config, "quantization_config", None) is not None and device_map is None:
                device_map = {"": str(target)}  # packed weights are made where they are to stay
            if device_map is not None:
                options["device_map"] = device_map
            if head == "if any":
                named_classes = getattr(config, "architectures", None) or (["CausalLM"] if checkpoint.gguf else [])
                head = adapter is None and any(name.endswith(("CausalLM", "LMHeadModel")) for name in named_classes)
            kind_of_model = "AutoModelForCausalLM" if head else "AutoModel" if adapter is None else adapter.auto
            auto = getattr(transformers, kind_of_model)
            whole, report = auto.from_pretrained(checkpoint.place, config=config, dtype=kind, **options)
            tied = None if head or adapter is not None else _class_with_head(whole, report["missing_keys"])
            if tied is not None:
                whole, report = tied.from_pretrained(checkpoint.place, config=config, dtype=kind, **options)
                module = _trunk(whole)
            else:
                module = whole if adapter is None else adapter.applied(whole)
    whole_module: Any = module
    if is_pretrained(module) and (adapter is not None or head):
        module = _trunk(module)
    own = _names_in(whole, module)
    random = sorted(set(report["missing_keys"]) - {f"{whole.base_model_prefix}.{name}" for name in module.state_dict()})
    if head and random:
        raise InputError(f"{shown} does not generate text: its files have no language head ({shortened(random)})")
    files = tuple(dict.fromkeys((*given.files, *checkpoint.files)))
    if device_map is None:
        whole_module.to(target)
    whole_module.eval()
    return LoadedModel(
        module,
        shown,
        file_hash(files) or module_hash(module),
        wanted.revision or getattr(config, "_commit_hash", None),
        read,
        tokenizer_problem=problem,
        from_files=True,
        weights=checkpoint.format_as(kind) if adapter is None else f"{checkpoint.format_as(kind)}, with an adapter",
        stored_dtype=stored,
        missing=tuple(sorted(own(dict.fromkeys(report["missing_keys"])))),
        reshaped=own({key: (tuple(found), tuple(needed)) for key, found, needed in sorted(report["mismatched_keys"])}),
        unexpected=tuple(sorted(report["unexpected_keys"])),
        doubts=() if checkpoint.gguf is None else checkpoint.gguf.doubts(module),
        whole=whole_module,
    )


def found_files(wanted: Checkpoint) -> tuple[CheckpointFiles, Adapter | None]:
    """The files that a checkpoint's name, or else its adapter, stands for; and the adapter, with its base model.

    Raises:
        InputError: they are not there, or are no model or no adapter.
    """
    named = find_checkpoint(default_model() if wanted.name is None else wanted.name, wanted.revision)
    if wanted.adapter is None:
        return named, find_adapter(named)
    if named.adapter:
        raise InputError(
            f"{wanted.name} is an adapter itself, so {wanted.adapter} cannot be put on it; name its base model"
        )
    folder = adapter_files(wanted.adapter)
    return folder, find_adapter(folder, named)


def _shown(wanted: Checkpoint, files: CheckpointFiles) -> str:
    """What the model is called; of a folder with a GGUF file the file says which model it is."""
    name = "sentence-transformers/all-MiniLM-L6-v2 (the default model)" if wanted.name is None else str(wanted.name)
    name = name if files.gguf is None else files.files[0].name
    return name if wanted.adapter is None else f"{name} with the adapter {wanted.adapter}"


def _stored_dtype(checkpoint: CheckpointFiles, config: Any) -> str | None:
    """The type of a checkpoint's weights, of a name on the hub as its configuration says; None where they are quantised."""
    if checkpoint.gguf is not None or getattr(config, "quantization_config", None) is not None:
        return None
    said = getattr(config, "dtype", None)
    return stored_dtype(checkpoint.files) or (None if said is None else str(said).removeprefix("torch."))


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
    found = getattr(require_extra("transformers", "probe"), named_class, None)
    return None if found is type(trunk) else found


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
    if isinstance(given, nn.Module):
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
        InputError: as `unwrapped`; packed weights, or none at all: on the meta device, or lazy ones.
    """
    inner: Any = unwrapped(module)
    trunk: Any = readable_trunk(inner)
    config = getattr(trunk, "config", None)
    name = getattr(config, "_name_or_path", "") or type(inner).__name__
    revision = getattr(config, "_commit_hash", None)
    return LoadedModel(trunk, str(name), module_hash(trunk), revision, tokenizer_of(module), whole=inner)


def readable_trunk(module: nn.Module) -> nn.Module:
    """A module without what wraps it; of a transformers model with a head, its trunk.

    Raises:
        InputError: as `as_loaded`.
    """
    inner: Any = unwrapped(module)
    trunk: Any = _trunk(inner) if is_pretrained(inner) else inner
    kind = type(inner).__name__
    entries = trunk.state_dict()
    unread = [name for name, entry in entries.items() if _is_packed(name, entry)]
    if unread:
        raise InputError(
            f"{kind} has packed weights that cannot be read ({shortened(unread)}), as quantize_dynamic of "
            "torch makes them; give the model before quantisation"
        )
    check_loaded(trunk, kind)
    return trunk


def check_loaded(module: nn.Module, kind: str) -> None:
    """Raises:
    InputError: some of the module's weights have no numbers.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    fetched = {name for name, each in module.named_modules() if offloaded(each)}
    empty = [n for n, tensor in tensors if _is_empty(tensor) and n.rpartition(".")[0] not in fetched]
    if empty:
        raise InputError(
            f"{kind} is on the meta device or lazy, so it has no weights to read ({shortened(empty)}); load them first"
        )


def _is_empty(tensor: Tensor) -> bool:
    return tensor.is_meta or nn.parameter.is_lazy(tensor)


def _is_packed(name: str, entry: Any) -> bool:
    if isinstance(entry, Tensor):
        return not nn.parameter.is_lazy(entry) and entry.is_quantized
    return not name.endswith("_extra_state")


def _trunk(module: Any) -> nn.Module:
    """A model without its head; the model itself where what its class calls the base cannot be given the model's input."""
    trunk = module.base_model
    parameters = inspect.signature(trunk.forward).parameters.values()
    needed = {p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    return trunk if needed <= {str(module.main_input_name)} else module


def model_inputs(module: nn.Module, inputs: Mapping[str, Any], items: int | None = None) -> dict[str, Any]:
    """What the model's forward is called with: on its device, without a cache, with decoder tokens where it needs them.

    Those are the labels behind a start token where the batch holds labels that the decoder is to predict, as in training;
    else the source text behind it.

    Args:
        items: at most so many of the batch, where its first dimension is theirs: a model of transformers. None is all.

    Raises:
        InputError: a decoder has nothing to read, or it is not known what it reads of labels.
    """
    config: Any = getattr(module, "config", None)
    items = items if hasattr(module, "main_input_name") and separable(inputs) else None
    device = device_of(module)
    ready = {k: (v[:items] if v.dim() else v).to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    accepted = inspect.signature(module.forward).parameters
    if config is not None and "use_cache" in accepted:
        ready.setdefault("use_cache", False)
    ready = with_target(module, ready)
    # Labels that are no tokens, as of several codebooks, are the model's own forward's to shift.
    decodes = _decodes(module) and not predicts_labels(module, ready)
    if decodes and not decoder_given(ready) and "input_ids" in ready:
        ready["decoder_input_ids"] = _shifted(ready["input_ids"], config)
        if "attention_mask" in ready:
            ready["decoder_attention_mask"] = ready["attention_mask"]
    elif decodes and not decoder_given(ready) and ready.get("labels") is None:
        raise InputError(
            f"{type(module).__name__} has a decoder beside its encoder, and the batch holds no tokens for it; "
            "give decoder_input_ids too"
        )
    return ready


def with_target(module: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs, with what the decoder reads where they hold labels that it is to predict, and no tokens for it.

    A trunk takes no labels; in their place it is given a mask that hides their padding.

    Raises:
        InputError: as `shifted_labels`.
    """
    if not _decodes(module) or not predicts_labels(module, inputs) or not is_tokens(inputs["labels"]):
        return inputs
    targets, labels = dict(inputs), inputs["labels"]
    if not decoder_given(targets):
        targets["decoder_input_ids"] = shifted_labels(module, labels, type(module).__name__)
    if "labels" not in inspect.signature(module.forward).parameters:
        del targets["labels"]
        if targets.get("decoder_attention_mask") is None:
            targets["decoder_attention_mask"] = (labels != IGNORED).long()
    return targets


def _decodes(module: nn.Module) -> bool:
    """Whether a model has a decoder beside its encoder that can be given tokens."""
    config: Any = getattr(module, "config", None)
    accepted = inspect.signature(module.forward).parameters
    return getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted


def longest(module: nn.Module) -> int | None:
    """Positions an absolute position table has for tokens; None where there is no such table."""
    config: Any = getattr(module, "config", None)
    table = getattr(getattr(module, "embeddings", None), "position_embeddings", None)
    padding = getattr(table, "padding_idx", None)  # of the RoBERTa family, whose tokens' positions come behind it
    positions = longest_by(config)
    return positions if positions is None or padding is None else positions - padding - 1


def table_of_positions(module: nn.Module) -> int | None:
    """As `longest`, for models that look positions up in a table, beyond which they cannot read; None for all others."""
    rows = longest_by(getattr(module, "config", None))
    if rows is None:
        return None
    tokens = _token_table(module)
    tables = [each for each in module.modules() if isinstance(each, nn.Embedding) and each is not tokens]
    sizes = {each.num_embeddings for each in tables}
    return longest(module) if any(rows <= size <= rows + _MORE_POSITIONS for size in sizes) else None


def _token_table(module: Any) -> nn.Module | None:
    return module.get_input_embeddings() if embedded(module) is not None else None


_POSITIONS = (
    ("max_position_embeddings",),
    ("n_positions",),
    ("max_seq_len",),  # of MPT's biases by position
    ("max_encoder_position_embeddings", "max_decoder_position_embeddings"),  # LED: both sides read the same text
)


def longest_by(config: Any) -> int | None:
    """Rows of the position table that a configuration names; a few of them may be no token's. None without such a table."""
    for names in _POSITIONS:
        rows = [getattr(config, name, None) for name in names]
        lengths = [each for each in rows if isinstance(each, int) and each > 0]
        if lengths:
            return min(lengths)
    return None


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
        InputError: the model reads neither tokens nor images, or does not say what it reads.
    """
    config: Any = getattr(module, "config", None)
    main = getattr(module, "main_input_name", None)
    if config is None or main is None:
        raise InputError(
            f"{type(module).__name__} does not say what its inputs are; give data, a batch that its forward accepts"
        )
    generator = torch.Generator().manual_seed(0)
    if main == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = vision.image_size
        height, width = (size, size) if isinstance(size, int) else size
        return {"pixel_values": torch.randn(1, vision.num_channels, height, width, generator=generator)}
    vocabulary = getattr(config, "vocab_size", None)
    if main != "input_ids" or vocabulary is None:
        raise InputError(f"{type(module).__name__} reads {main!r}; give batches of it to probe or describe the model")
    if vocabulary < 1:
        raise InputError(
            f"the configuration of {type(module).__name__} says vocab_size = {vocabulary}: it reads no token"
        )
    length = max(min(16, getattr(config, "max_position_embeddings", 16) or 16), 1)
    ids = torch.randint(0, vocabulary, (1, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
