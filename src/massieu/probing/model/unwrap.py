"""A module without what wraps it: what trains, compiles or adapts a model is taken off, and its names with it."""

import sys
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from massieu.errors import InputError

_MOST_WRAPPERS = 10  # around each other


def unwrapped(module: nn.Module) -> nn.Module:
    """The module whose own forward attends, with the parameters in place and its names free of wrappers' prefixes.

    Taken off are ``DistributedDataParallel``, ``torch.compile``, a ``PeftModel`` (its adapters stay at work in the base
    model), a ``SentenceTransformer`` and a ``LightningModule`` that has no forward of its own around its one model. A module
    that FSDP2 shards, or that was compiled in place, is the module itself.

    Raises:
        InputError: no module; a ``DataParallel``, whose threads cannot be read; a scripted or traced module.

    Example:
        >>> import torch
        >>> from massieu.probing.model.unwrap import unwrapped
        >>> layer = torch.nn.Linear(2, 2)
        >>> unwrapped(torch.compile(layer)) is layer
        True
    """
    if not isinstance(module, nn.Module):
        raise InputError(f"model must be a torch.nn.Module, got {type(module).__name__}")
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


def tokenizer_of(module: Any) -> Any:
    """The tokenizer that a ``SentenceTransformer`` brings; None for every other module."""
    return module.tokenizer if _is(module, "sentence_transformers", "SentenceTransformer") else None


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
