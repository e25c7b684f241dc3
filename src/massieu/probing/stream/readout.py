"""From embeddings to logits: what a token's embedding says of each token's logit, past all layers."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from massieu.probing.model.forward import run
from massieu.probing.model.model import LoadedModel, model_inputs
from massieu.probing.model.packed import dense_weight
from massieu.probing.model.watching import hooked
from massieu.probing.stream.replay import norm_gain

_ROWS = 8_192


def tokens_through(loaded: LoadedModel, inputs: dict[str, Any]) -> Float[Tensor, "D D"] | str:
    """W_Eᵀ W_U, summed over the vocabulary, the gain of the last norm folded in; or one sentence that says why not.

    Which norm it is, one forward pass shows: the one whose output the language head is given as it is.

    Args:
        inputs: a few tokens.
    """
    head = _of(loaded.whole, "get_output_embeddings")
    table = _of(loaded.module, "get_input_embeddings")
    if not isinstance(head, nn.Linear) or not isinstance(table, nn.Embedding):
        return "the model has no language head that is one matrix, or no table of embeddings"
    if head.weight.is_meta or table.weight.is_meta:
        return "the weights of its embeddings or of its language head are elsewhere"
    if not table.weight.is_floating_point():
        return "its table of embeddings is packed"
    to_stream, to_logits = (dense_weight(each).detach() for each in (table, head))
    if to_logits.shape[1] != to_stream.shape[1]:
        return "its embeddings and its language head have different widths"
    norm, last = _last_norm(loaded.whole, head, inputs)
    if norm is None:
        return "what its language head is given does not come straight from a norm"
    gain = norm_gain(norm, last.shape[-1], last).float().cpu()
    total = torch.zeros(2 * (last.shape[-1],), dtype=torch.float64)
    for rows in torch.arange(min(len(to_logits), len(to_stream))).split(_ROWS):
        read, written = (each[rows.to(each.device)].float().cpu() for each in (to_stream, to_logits))
        total += read.mT @ (written * gain)
    return total


def _of(model: Any, getter: str) -> Any:
    try:
        return getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None


def _last_norm(model: nn.Module, head: nn.Module, inputs: dict[str, Any]) -> tuple[nn.Module | None, Tensor]:
    """The norm whose output the head is given, and that."""
    normed: list[tuple[nn.Module, Tensor]] = []
    given: list[Tensor] = []

    def after(module: nn.Module, _: Any, __: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            normed[:] = [(module, output)]

    def before(_: nn.Module, arguments: tuple[Any, ...], __: Any) -> None:
        given.extend(each for each in arguments[:1] if isinstance(each, Tensor))

    norms = [module for module in model.modules() if "Norm" in type(module).__name__]
    with torch.no_grad(), hooked(norms, after=after), hooked([head], before=before):
        run(model, model_inputs(model, inputs))
    if not given or not normed or normed[0][1].data_ptr() != given[-1].data_ptr():
        return None, given[-1] if given else torch.empty(0)
    return normed[0][0], given[-1]
