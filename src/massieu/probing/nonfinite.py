"""NaN and infinities in a model: noticed in every batch, and traced to the first place where they arise."""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from massieu.probing.attention_call import AttentionCall
from massieu.probing.watching import hooked
from massieu.report.record import Trouble


def kind_of(tensor: Tensor) -> str | None:
    """ "NaN" or "infinity" where a tensor holds one, NaN first; None where all its numbers are finite."""
    tensor = tensor.detach()
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta or bool(tensor.isfinite().all()):
        return None
    return "NaN" if bool(tensor.isnan().any()) else "infinity"


def in_weights(model: nn.Module) -> Trouble | None:
    """The weights that are not finite. Buffers may hold infinities, as masks do, but no NaN."""
    parameters = [(name, kind_of(tensor)) for name, tensor in model.named_parameters()]
    buffers = [(name, kind_of(tensor)) for name, tensor in model.named_buffers()]
    found = [(n, what) for n, what in parameters if what] + [(n, what) for n, what in buffers if what == "NaN"]
    if not found:
        return None
    first, what = found[0]
    others = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return Trouble(f"the model is broken: {what} in the weight {first}{others}", what, first)


def in_batch(model: nn.Module, inputs: dict[str, Any], real: Tensor | None, batch: str) -> Trouble | None:
    """The first place at which a pass over one batch gives something that is not finite, padding left out.

    Args:
        inputs: what the model's forward is called with.
        real: which tokens are no padding.
        batch: what to call the batch.
    """
    for name, value in inputs.items():
        what = kind_of(value) if isinstance(value, Tensor) else None
        if what:
            return Trouble(f"the input is broken: {what} in {name!r} of {batch}", what, name)
    found: list[tuple[str, str]] = []
    names = {module: name for name, module in model.named_modules()}

    def look(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        if not found:
            kinds = (kind_of(at_real(tensor, real)) for tensor in _tensors(output))
            found.extend((names[module] or type(module).__name__, what) for what in kinds if what)

    with torch.no_grad(), hooked(names, after=look):
        model(**inputs)
    if not found:
        return None
    first, what = found[0]
    dtype = next(model.parameters()).dtype
    half = dtype in (torch.float16, torch.bfloat16)
    cause = f"; {str(dtype).removeprefix('torch.')} may overflow where float32 does not" if half else ""
    return Trouble(f"the model's numbers break down: {what} first in {first}, in {batch}{cause}", what, first)


def in_call(call: AttentionCall, queries: Bool[Tensor, "B L"], keys: Bool[Tensor, "B N"]) -> bool:
    """Whether one attention call has numbers that are not finite, padding and queries that see no key left out."""
    asked = (call.query.transpose(1, 2), call.output)
    attended = (call.key.transpose(1, 2), call.value.transpose(1, 2))
    if all(kind_of(tensor) is None for tensor in (*asked, *attended)):
        return False
    queries = queries & call.visible().any(-1).all(1)
    known = [kind_of(at_real(tensor, queries)) for tensor in asked]
    return any(known) or any(kind_of(at_real(tensor, keys)) for tensor in attended)


def at_real(tensor: Tensor, real: Tensor | None) -> Tensor:
    """A tensor's entries at real tokens, where its first two dimensions are items and tokens; else all of it."""
    if real is None or tensor.dim() < 2 or tensor.shape[:2] != real.shape:
        return tensor
    return tensor[real.to(tensor.device)]


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict | list | tuple):
        for part in output.values() if isinstance(output, dict) else output:
            yield from _tensors(part)
