"""Which models are drawn block by block: those of which a small one is bit for bit what its constructor makes."""

import copy
import json
import re
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from massieu.probing.model.checkpoint import quiet, sentence
from massieu.probing.model.drawn import Blueprint, copied
from massieu.probing.model.recorded import recording
from massieu.probing.model.seeding import OwnGenerator
from massieu.probing.model.unwrap import is_pretrained

SMALL = 2**22
"""Weights of a model that is compared as it is; a larger one is compared with fewer layers and a smaller vocabulary."""
_LAYERS = 2
_TOKENS = 1000
_EXPERTS = 8
_NARROWER = 8
_WIDE = 512
_WIDTH = re.compile(r"(?:hidden_size|intermediate_size|d_model|d_ff|d_inner|n_embd|ffn_dim|ffn_hidden_size)$")
_DEPTH = re.compile(r"(?:^|_)(?:layers?|depths?|blocks)$|^n_layers?$")
_verdicts: dict[tuple[type, str], str | None] = {}


@dataclass(frozen=True)
class _Made:
    """What was found for a model, and the settings under which it was."""

    config: Any
    dtype: torch.dtype
    result: Blueprint | str


_made: WeakKeyDictionary[nn.Module, _Made] = WeakKeyDictionary()
"""By the model in memory: a second probe of it records nothing anew. The record goes when the model goes."""


def blueprint_of(module: nn.Module) -> Blueprint | str:
    """From what models like this one are drawn block by block; or why they cannot be, in a few words.

    A model of transformers is made from its configuration while what its constructor does is recorded. Then a small model of
    the same class is made in both ways, from the same random numbers. Unless all parameters and buffers are bit for bit the
    same, the record is not used.
    """
    if not is_pretrained(module):
        return f"{type(module).__name__} has no configuration from which it could be built"
    try:
        return _made_for(module)
    except Exception as error:  # of whatever class the constructor raises that finds tensors without numbers
        return f"the constructor of {type(module).__name__} cannot be recorded ({sentence(error)})"


def _made_for(module: Any) -> Blueprint | str:
    """The record of a model's constructor, made once for as long as the model and its configuration stay."""
    config = module.config
    dtype = torch.get_default_dtype()
    made = _made.get(module)
    if made is None or made.dtype != dtype or vars(made.config) != vars(config):
        made = _Made(copy.deepcopy(config), dtype, _checked_record(type(module), config))
        _made[module] = made
    return made.result


def _checked_record(kind: Any, config: Any) -> Blueprint | str:
    blueprint = _recorded(kind, config)
    num_weights = sum(parameter.numel() for parameter in blueprint.tree.parameters())
    example, recorded = config, blueprint
    if num_weights > SMALL:
        example, recorded = _small_example(kind, config)
    key = (kind, json.dumps(example.to_dict(), sort_keys=True, default=str))
    if key not in _verdicts:
        _verdicts[key] = _difference(kind, example, recorded)
    return _verdicts[key] or blueprint


def _recorded(kind: Any, config: Any) -> Blueprint:
    with torch.device("cpu"), quiet(), recording() as record:
        tree = kind(copy.deepcopy(config))
    return Blueprint(tree, record)


def _small_example(kind: Any, config: Any) -> tuple[Any, Blueprint]:
    """A small configuration of a class and the record of its constructor; a narrow one where the class can be narrow."""
    try:
        narrow = smaller(config, _NARROWER)
        return narrow, _recorded(kind, narrow)
    except Exception:  # of whatever class the constructor raises at sizes that do not go together
        shallow = smaller(config)
        return shallow, _recorded(kind, shallow)


def _difference(kind: Any, config: Any, blueprint: Blueprint) -> str | None:
    """Where what the constructor makes and what its record makes are not the same; None where they are."""
    with torch.device("cpu"), OwnGenerator(0), quiet():
        whole = kind(copy.deepcopy(config))
    numbers = blueprint.record.all_numbers(torch.Generator().manual_seed(0))
    constructed = _tensors(whole)
    recorded = _tensors(blueprint.tree)
    if constructed.keys() != recorded.keys():
        return f"the record of the constructor of {kind.__name__} has other tensors than the model"
    for name, tensor in constructed.items():
        redrawn = numbers(recorded[name])
        is_same_kind = redrawn.dtype == tensor.dtype and redrawn.requires_grad <= tensor.requires_grad
        if not is_same_kind or not torch.equal(tensor.detach().nan_to_num(), redrawn.detach().nan_to_num()):
            return f"{name} of {kind.__name__} is not what the record of its constructor makes"
    return None


def _tensors(tree: nn.Module) -> dict[str, Tensor]:
    """All tensors of a module: its parameters and buffers, and the others in the order in which a copy finds them."""
    named = dict(tree.named_parameters()) | dict(tree.named_buffers())
    others: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        others.append(tensor)
        return tensor

    copied(tree, {id(tensor): tensor for tensor in named.values()}, keep)
    return named | {f"tensor {place}": tensor for place, tensor in enumerate(others)}


def smaller(config: Any, narrower: int = 1) -> Any:
    """A configuration of the same model with few layers in a row, few experts and a small vocabulary.

    Args:
        narrower: large widths are divided by it.
    """
    config = copy.deepcopy(config)
    depths = {value for name, value in vars(config).items() if _DEPTH.search(name) and type(value) is int}
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            setattr(config, name, smaller(value, narrower))
        elif type(value) is int:
            setattr(config, name, _smaller_number(name, value, narrower))
        elif isinstance(value, list) and _DEPTH.search(name) and all(type(each) is int for each in value):
            setattr(config, name, [min(each, _LAYERS) for each in value])
        elif isinstance(value, list) and len(value) in depths:  # one item for each layer
            setattr(config, name, value[:_LAYERS])
    return config


def _smaller_number(name: str, value: int, narrower: int) -> int:
    if _DEPTH.search(name):
        return min(value, _LAYERS)
    if name.endswith("experts"):
        return min(value, _EXPERTS)
    if name.endswith("vocab_size"):
        return min(value, _TOKENS)
    if name.endswith("_token_id"):
        return value if value < _TOKENS else 0
    if _WIDTH.search(name) and value >= _WIDE and value % narrower == 0:
        return value // narrower
    return value
