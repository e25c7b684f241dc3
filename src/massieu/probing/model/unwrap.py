"""A module without what wraps it: what trains, compiles or adapts a model is taken off, and its names with it."""

import sys
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from massieu.errors import InputError

_MOST_WRAPPERS = 10  # around each other


@dataclass(frozen=True)
class Holder:
    """A class of another library whose objects hold a model and its tokenizer, as attributes of these names."""

    library: str
    name: str
    model: str
    tokenizer: str


HOLDERS = (
    Holder("transformers.pipelines.base", "Pipeline", "model", "tokenizer"),
    Holder("transformers.trainer", "Trainer", "model", "processing_class"),
    Holder("nnsight.intervention.envoy", "Envoy", "_module", "tokenizer"),
    Holder("transformer_lens.model_bridge.bridge_core", "BridgeCore", "original_model", "tokenizer"),
    Holder("sentence_transformers", "SentenceTransformer", "", "tokenizer"),
    Holder("transformer_lens.HookedTransformer", "HookedTransformer", "", "tokenizer"),
)
"""The model of a SentenceTransformer is in its first module, and a HookedTransformer is a model itself."""


def unwrapped(module: nn.Module) -> nn.Module:
    """The module whose own forward attends, with the parameters in place and its names free of wrappers' prefixes.

    Taken off are ``DistributedDataParallel``, ``torch.compile``, a ``PeftModel`` (its adapters stay at work in the base
    model), a ``SentenceTransformer`` and a ``LightningModule`` that has no forward of its own around its one model. A module
    that FSDP2 shards, that accelerate prepared, or that was compiled in place, is the module itself. Objects that hold a
    model are taken too: a pipeline or Trainer of transformers, an nnsight model, a TransformerBridge of TransformerLens.

    Raises:
        InputError: no module; a ``DataParallel``, whose threads cannot be read; a scripted or traced module.

    Example:
        >>> import torch
        >>> from massieu.probing.model.unwrap import unwrapped
        >>> layer = torch.nn.Linear(2, 2)
        >>> unwrapped(torch.compile(layer)) is layer
        True
    """
    module = module_in(module)
    for _ in range(_MOST_WRAPPERS):
        inner = _inside(module)
        if inner is module:
            break
        module = inner
    if _is(module, "torch.jit", "ScriptModule"):
        raise InputError(
            f"{type(module).__name__} is a scripted or traced module, whose attention cannot be seen; give the module it "
            "was made from"
        )
    return module


def module_in(model: Any) -> nn.Module:
    """The module that an object of another library holds; a module itself where it holds none.

    Raises:
        InputError: neither is the case.
    """
    holder = _holder_of(model)
    module = model if holder is None or not holder.model else getattr(model, holder.model)
    if isinstance(module, nn.Module):
        return module
    check_in_reach(model)
    raise InputError(f"model must be a torch.nn.Module, got {type(model).__name__}")


def check_in_reach(model: Any) -> None:
    """Raises:
    InputError: the model is one of vLLM, which another process runs.
    """
    if _is(model, "vllm", "LLM"):
        raise InputError(
            "a model of vLLM attends in kernels of another process, where no score can be seen; give the name of its "
            "checkpoint, which transformers loads"
        )


def holds_model(model: Any) -> bool:
    """Whether an object is no module and holds one."""
    return not isinstance(model, nn.Module) and _holder_of(model) is not None


def is_pretrained(module: nn.Module) -> bool:
    """Whether a module is a model of transformers."""
    return _is(module, "transformers.modeling_utils", "PreTrainedModel")


def prompt_tokens(module: Any) -> int:
    """Learned tokens that a ``PeftModel`` puts before the text, as prompt tuning does; 0 where it puts none.

    Prefix tuning puts keys there, and no tokens.
    """
    if not _is(module, "peft", "PeftModel"):
        return 0
    settings = module.active_peft_config
    if not settings.is_prompt_learning or settings.peft_type == "PREFIX_TUNING":
        return 0
    return settings.num_virtual_tokens


def tokenizer_of(model: Any) -> Any:
    """The tokenizer that a model brings with it, as a pipeline and a ``SentenceTransformer`` do; None where it brings none."""
    holder = _holder_of(model)
    if holder is None:
        return None
    processor = getattr(model, holder.tokenizer, None)
    # A Trainer's may be a processor of text and images.
    return processor if hasattr(processor, "get_vocab") else getattr(processor, "tokenizer", None)


def _holder_of(model: Any) -> Holder | None:
    return next((holder for holder in HOLDERS if _is(model, holder.library, holder.name)), None)


def _inside(module: Any) -> nn.Module:
    """The module that one wrapper is around; the module itself where it is no wrapper."""
    if isinstance(module, DataParallel):
        raise InputError("DataParallel runs its copies in threads of their own, which cannot be read; give its .module")
    if isinstance(module, DistributedDataParallel):
        return module.module
    if _is(module, "torch._dynamo", "OptimizedModule"):
        return module._orig_mod
    if _is(module, "peft", "PeftModel") and not module.active_peft_config.is_prompt_learning:
        return module.get_base_model()
    if _is(module, "sentence_transformers", "SentenceTransformer"):
        return _text_model(module)
    holder = _holder_of(module)
    if holder is not None and holder.model:
        return getattr(module, holder.model)
    for library in ("lightning", "pytorch_lightning"):
        if not _is(module, library, "LightningModule"):
            continue
        has_no_forward = type(module).forward is _class(library, "LightningModule").forward
        if has_no_forward:
            return _only_model(module)
    return module


def _text_model(module: Any) -> nn.Module:
    first = next(iter(module.children()), None)
    inner = getattr(first, "auto_model", None)
    if not isinstance(inner, nn.Module):
        raise InputError(f"the first module of this SentenceTransformer is {type(first).__name__}, not a transformer")
    return inner


def _only_model(module: nn.Module) -> nn.Module:
    """The one submodule with parameters.

    Raises:
        InputError: there are none, or several.
    """
    children = [child for child in module.children() if next(child.parameters(), None) is not None]
    has_own_parameters = next(module.parameters(recurse=False), None) is not None
    if len(children) == 1 and not has_own_parameters:
        return children[0]
    raise InputError(
        f"{type(module).__name__} has no forward of its own and {len(children)} submodules with parameters, so it cannot be "
        "called; give the one to read"
    )


def _class(library: str, name: str) -> Any:
    """A class of a library; None where the library was not imported, so that nothing can be of that class."""
    return getattr(sys.modules.get(library), name, None)


def _is(module: Any, library: str, name: str) -> bool:
    """Whether a module is of a library's class."""
    kind = _class(library, name)
    return kind is not None and isinstance(module, kind)
