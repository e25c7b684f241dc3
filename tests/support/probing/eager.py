"""Small models of transformers beside their own eager attentions in float64: what the probe reads of them has to agree."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.capture.routes import capturing


def create(name: str, settings: dict[str, Any], attention: str = "eager") -> nn.Module:
    """A small model of transformers with random weights."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings)
    made = getattr(transformers, f"{name}Model")._from_config(config, attn_implementation=attention).eval()
    for parameter in made.parameters():
        parameter.data.normal_(std=0.2)  # tables of biases begin as zeros
    return made


def calls(model: nn.Module, batch: dict[str, Tensor]) -> list[AttentionCall]:
    """Every attention call of one forward pass, none of them refused."""
    seen: list[AttentionCall] = []
    with torch.no_grad(), capturing(model, seen.append) as capture:
        model(**batch)
    assert not capture.refused
    return seen


def attentions(model: nn.Module, batch: dict[str, Tensor], kind: str, **settings: Any) -> list[Tensor]:
    """The weights that modules of this kind return, of the model in float64; settings of its forward beside the batch."""
    doubled, found = copy.deepcopy(model).double(), []
    for module in doubled.modules():
        if type(module).__name__ == kind:
            module.register_forward_hook(lambda _, __, output: found.append(output[1]))
    with torch.no_grad():
        doubled(**{n: v.double() if v.is_floating_point() else v for n, v in batch.items()}, **settings)
    return found
