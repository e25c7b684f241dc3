"""A language model from its files, as a function from tokens to the law of the next one."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from massieu.errors import InputError


def next_word(name: str) -> tuple[Callable[[Int[Tensor, "1 L"]], Float[Tensor, "1 L V"]], Any, str]:
    """The function from tokens to logits, the tokenizer, and the model's name.

    Raises:
        InputError: there is no such model, it has no language head, or no tokenizer.
    """
    from massieu.probing.model.model import load_model

    loaded = load_model(name, head=True)
    if loaded.tokenizer is None:
        raise InputError(f"{loaded.name} has no tokenizer: {loaded.tokenizer_problem}")
    device = next(loaded.whole.parameters()).device

    def logits_of(ids: Int[Tensor, "1 L"]) -> Float[Tensor, "1 L V"]:
        return loaded.whole(ids.to(device)).logits.float().cpu()

    return logits_of, loaded.tokenizer, loaded.name
