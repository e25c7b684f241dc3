"""From embeddings to logits: the direct effect of a token's embedding on each token's logit, without any layer."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from massieu.probing.model.forward import run
from massieu.probing.model.model import LoadedModel
from massieu.probing.model.model_inputs import model_inputs
from massieu.probing.model.packed import dense_weight
from massieu.probing.model.watching import hooked
from massieu.probing.stream.replay import norm_gain

_ROWS = 8_192
"""Tokens of the vocabulary that are multiplied at a time."""


def tokens_through(loaded: LoadedModel, inputs: dict[str, Any]) -> Float[Tensor, "D D"] | str:
    """W_Eᵀ W_U, summed over the vocabulary, with the gain of the last norm folded in; or one sentence that says why not.

    One forward pass shows which norm is the last: its output is the language head's input.

    Args:
        inputs: a few tokens.
    """
    head = _embeddings(loaded.whole, "get_output_embeddings")
    table = _embeddings(loaded.module, "get_input_embeddings")
    if not isinstance(head, nn.Linear) or not isinstance(table, nn.Embedding):
        return "the model has no language head that is one matrix, or no table of embeddings"
    if head.weight.is_meta or table.weight.is_meta:
        return "the weights of its embeddings or of its language head are elsewhere"
    if not table.weight.is_floating_point():
        return "its table of embeddings is packed"
    to_stream = dense_weight(table).detach()
    to_logits = dense_weight(head).detach()
    if to_logits.shape[1] != to_stream.shape[1]:
        return "its embeddings and its language head have different widths"
    norm, head_input = _last_norm(loaded.whole, head, inputs)
    if norm is None:
        return "what its language head is given does not come straight from a norm"
    width = head_input.shape[-1]
    gain = norm_gain(norm, width, head_input).float().cpu()
    total = torch.zeros(width, width, dtype=torch.float64)
    # Either table may have rows beyond the vocabulary, which pad it.
    for tokens in torch.arange(min(len(to_logits), len(to_stream))).split(_ROWS):
        embeddings = to_stream[tokens.to(to_stream.device)].float().cpu()
        readouts = to_logits[tokens.to(to_logits.device)].float().cpu()
        total += embeddings.mT @ (readouts * gain)
    return total


def _embeddings(model: Any, getter: str) -> Any:
    """The module that a getter returns; None if the model has none."""
    try:
        return getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None


def _last_norm(model: nn.Module, head: nn.Module, inputs: dict[str, Any]) -> tuple[nn.Module | None, Tensor]:
    """The norm whose output is the head's input, or None; and the head's input, empty if the head was not called."""
    last_norm: nn.Module | None = None
    norm_output: Tensor | None = None
    head_input: Tensor | None = None

    def after_norm(module: nn.Module, _: Any, __: Any, output: Any) -> None:
        nonlocal last_norm, norm_output
        if isinstance(output, Tensor):
            last_norm = module
            norm_output = output

    def before_head(_: nn.Module, arguments: tuple[Any, ...], __: Any) -> None:
        nonlocal head_input
        if arguments and isinstance(arguments[0], Tensor):
            head_input = arguments[0]

    norms = [module for module in model.modules() if "Norm" in type(module).__name__]
    with torch.no_grad(), hooked(norms, after=after_norm), hooked([head], before=before_head):
        run(model, model_inputs(model, inputs))
    if head_input is None:
        return None, torch.empty(0)
    if norm_output is None or norm_output.data_ptr() != head_input.data_ptr():
        return None, head_input
    return last_norm, head_input
