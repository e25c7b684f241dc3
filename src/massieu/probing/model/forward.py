"""How a module is called with a batch: its arguments by name, which tokens are padding, and which tensor is its result.

Nothing here knows a model's class. A batch is a tensor (the one argument), a tuple (the arguments in order) or a mapping (by
name); from here on it is a dictionary by the names of the module's own forward.
"""

import dataclasses
import inspect
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from massieu.errors import InputError
from massieu.probing.model.checkpoint import sentence
from massieu.probing.model.offload import execution_device
from massieu.probing.model.signature import forward_signature, name_of_ids
from massieu.probing.model.target_labels import IGNORED, is_tokens

_BY_PLACE = "*"  # before the number of an argument that has no name of its own
# By whether they are of the decoder's tokens.
_MASKS_OF_REAL = {False: ("attention_mask",), True: ("decoder_attention_mask",)}
_MASKS_OF_PADDING = {False: ("src_key_padding_mask", "key_padding_mask"), True: ("tgt_key_padding_mask",)}
_DECODER_INPUTS = ("decoder_input_ids", "decoder_inputs_embeds", "tgt")
_LOCK = threading.Lock()
_STANCE = ExitStack()  # holds PyTorch's switch while a pass runs uncompiled
_num_uncompiled = 0  # forward passes under way that run uncompiled, of all threads


def named_inputs(module: nn.Module, batch: Any) -> dict[str, Any]:
    """A batch as a dictionary of what the module's forward is called with.

    Raises:
        InputError: the batch is no tensor, tuple or mapping, has no tensor in it, or the forward has no such arguments.
    """
    name = type(module).__name__
    arguments: tuple[Any, ...] = ()
    if isinstance(batch, Tensor):
        arguments = (batch,)
    elif isinstance(batch, tuple | list):
        arguments = tuple(batch)
    keywords = dict(batch) if isinstance(batch, Mapping) else {}
    if not any(isinstance(value, Tensor) for value in (*arguments, *keywords.values())):
        raise InputError(
            f"a batch must be a tensor, a tuple of tensors or a mapping of names to tensors, got {_described(batch)}"
        )
    for value in (*arguments, *keywords.values()):
        if isinstance(value, Tensor):
            _check_readable(module, value)
    signature = forward_signature(module)
    try:
        bound = signature.bind(*arguments, **_by_own_names(module, keywords))
    except TypeError as error:
        raise InputError(f"the forward of {name} does not take the batch {_described(batch)}: {error}") from error
    if not arguments:
        return keywords
    kinds = [signature.parameters[name].kind for name in bound.arguments]
    if all(kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for kind in kinds):
        return dict(bound.arguments)
    # An argument without a usable name, as of *args, is kept by its place.
    return {f"{_BY_PLACE}{place}": value for place, value in enumerate(arguments)}


def separable(inputs: Mapping[str, Any]) -> bool:
    """Whether all tensors of a batch have one first dimension; patches in a row have another than the grids of their images."""
    first_sizes = {value.shape[0] for value in inputs.values() if isinstance(value, Tensor) and value.dim()}
    return len(first_sizes) == 1


def _check_readable(module: nn.Module, tensor: Tensor) -> None:
    """Raise an InputError at a tensor of a batch that has no values, where the module has some."""
    device = device_of(module)
    if tensor.is_meta and device is not None and device.type != "meta":
        raise InputError(f"inputs must have values, got a tensor on the meta device for a module on {device}")


def called_with(module: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """What a forward that is about to run is given, by the names of its parameters; what has no name is left out."""
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = forward_signature(module).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind in by_place]
    return dict(zip(names, arguments, strict=False)) | dict(keywords)


def _by_own_names(module: nn.Module, keywords: dict[str, Any]) -> dict[str, Any]:
    """Arguments with the ids of tokens under the name that the module's forward has for them.

    Everywhere else they are called ``input_ids``, so that the tokens are known.
    """
    if "input_ids" not in keywords:
        return keywords
    name = name_of_ids(module)
    if name is None or name in keywords:
        return keywords
    others = {key: value for key, value in keywords.items() if key != "input_ids"}
    return {name: keywords["input_ids"], **others}


def _described(batch: Any) -> str:
    """A batch in a few words, for an error."""
    if isinstance(batch, Tensor):
        return f"of one tensor of shape {tuple(batch.shape)}"
    class_name = type(batch).__name__
    if isinstance(batch, Mapping):
        parts = [
            f"{name} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else str(name)
            for name, value in batch.items()
        ]
        return f"with {', '.join(parts) or 'no names'}"
    if isinstance(batch, tuple | list) and batch:
        return f"{class_name} of {', '.join(type(value).__name__ for value in batch)}"
    return class_name


def run(module: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """The module's own result for the inputs, compiled parts of it run as they were written.

    Raises:
        InputError: its forward does not take them.
    """
    arguments = [value for name, value in inputs.items() if name.startswith(_BY_PLACE)]
    keywords = {name: value for name, value in inputs.items() if not name.startswith(_BY_PLACE)}
    keywords = _by_own_names(module, keywords)
    with uncompiled():
        try:
            return module(*arguments, **keywords)
        except TypeError as error:
            raise InputError(
                f"the forward of {type(module).__name__} does not take the batch {_described(inputs)}: {sentence(error)}"
            ) from error


def run_first(module: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """As `run` for inputs that nothing has tried: what the forward says of them is one sentence that names them.

    Raises:
        InputError: as `run`; or the forward fails, and not for want of memory.
    """
    try:
        return run(module, inputs)
    except (InputError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise InputError(
            f"the forward of {type(module).__name__} fails at the batch {_described(inputs)}: {sentence(error)}"
        ) from error


@contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, nothing runs compiled: compiled code shows no attention, and cannot run while a model is watched.

    It is PyTorch's own switch, for the whole process; the last of several threads to leave turns it back.
    """
    # Where neither stands, nothing compiles, and the first takes a second to import; FlexAttention compiles by itself.
    if {"torch._dynamo", "torch.nn.attention.flex_attention"}.isdisjoint(sys.modules):
        yield
        return
    global _num_uncompiled
    with _LOCK:
        _num_uncompiled += 1
        if _num_uncompiled == 1:
            _STANCE.enter_context(torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        with _LOCK:
            _num_uncompiled -= 1
            if _num_uncompiled == 0:
                _STANCE.close()


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors of a result, in order: of tuples, lists, dictionaries and data classes too."""
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, Mapping):
        value = value.values()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif not isinstance(value, list | tuple):
        return
    for part in value:
        yield from tensors_of(part)


def output_tensor(module: nn.Module, output: Any) -> Tensor:
    """The first tensor of floating-point numbers in what a module gave.

    Raises:
        InputError: there is none.
    """
    for tensor in tensors_of(output):
        if tensor.is_floating_point() or tensor.is_complex():
            return tensor
    raise InputError(
        f"{type(module).__name__} gave {type(output).__name__} without a tensor of floating-point numbers, so its output "
        "cannot be compared"
    )


def main_input(module: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """The tensor that a batch's items are counted in: what the model calls its main input, or else the first one."""
    main = inputs.get(str(getattr(module, "main_input_name", None)))
    if isinstance(main, Tensor):
        return main
    tensors = [value for value in inputs.values() if isinstance(value, Tensor)]
    return next((tensor for tensor in tensors if tensor.dim()), tensors[0])


def decoder_given(inputs: Mapping[str, Any]) -> bool:
    """Whether a model is given tokens for a decoder beside those for its encoder."""
    return any(inputs.get(name) is not None for name in _DECODER_INPUTS)


def real_mask(inputs: Mapping[str, Any], *, decoder: bool) -> Bool[Tensor, "B L"] | None:
    """Which tokens of a batch are no padding; None where no mask says so.

    In ``attention_mask`` 1 or True is a real token, as in transformers; in ``key_padding_mask`` and its kin True is
    padding, as in PyTorch. Negative numbers of either are added to scores, and mark padding. Where no mask is given of a
    decoder's tokens, padding is where their labels are left out of the loss: collators pad labels, and give no such mask.
    """
    for name in _MASKS_OF_REAL[decoder]:
        mask = inputs.get(name)
        if isinstance(mask, Tensor) and mask.dim() == 2:
            is_added = mask.is_floating_point() and bool((mask < 0).any())
            return mask >= 0 if is_added else mask.bool()
    for name in _MASKS_OF_PADDING[decoder]:
        mask = inputs.get(name)
        if isinstance(mask, Tensor) and mask.dim() == 2:
            return mask >= 0 if mask.is_floating_point() else ~mask.bool()
    labels = inputs.get("labels") if decoder else None
    if labels is not None and is_tokens(labels):
        return labels != IGNORED
    return None


def device_of(module: nn.Module) -> torch.device | None:
    """The device of a module's first parameter, or else buffer, that is not offloaded; None where it has neither."""
    # Mostly the first parameter of all answers.
    for tensor in chain(module.parameters(), module.buffers()):
        if not tensor.is_meta:
            return tensor.device
    nowhere = next((tensor.device for tensor in chain(module.parameters(), module.buffers())), None)
    return execution_device(module) or nowhere


def dtype_of(module: nn.Module) -> torch.dtype:
    """The type of a module's first floating-point parameter; PyTorch's default where it has none."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    return torch.get_default_dtype()
