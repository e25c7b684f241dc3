"""NaN and infinities in a model: noticed in every batch, and traced to the first place where they arise."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.capture.routes import capturing
from massieu.probing.capture.sites import SiteInfo
from massieu.probing.model.forward import dtype_of, run, tensors_of
from massieu.probing.model.model_inputs import model_inputs
from massieu.probing.model.offload import weights
from massieu.probing.model.watching import hooked
from massieu.probing.stream.wiring import StreamTracer
from massieu.probing.sums.running import State
from massieu.storage.record import Trouble


def kind_of(tensor: Tensor) -> str | None:
    """ "NaN" or "infinity" where a tensor holds one, NaN first; None where all its numbers are finite."""
    tensor = tensor.detach()
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta:
        return None
    if tensor.dtype.itemsize == 1:
        return _kind_of_few_bits(tensor)
    # A finite sum has finite terms, and takes neither a copy nor a second pass; one that overflows proves nothing.
    if bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all()):
        return None
    return "NaN" if bool(tensor.isnan().any()) else "infinity"


def finite_sum(tensor: Tensor) -> Float[Tensor, ""]:
    """A number that is finite only where all numbers of a tensor are; nobody waits for it."""
    half = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.detach().sum(dtype=torch.float32 if half else None).double()


class LaterFinite:
    """Whether sums are finite. It is asked of a GPU at once, and known before what the GPU is given afterwards."""

    def __init__(self, sums: Sequence[Float[Tensor, ""]]) -> None:
        flag = torch.stack([each.to(sums[-1].device) for each in sums]).sum().isfinite()
        self._is_known: torch.cuda.Event | None = None
        self._flag = flag
        if flag.is_cuda:
            self._flag = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(flag, non_blocking=True)
            self._is_known = torch.cuda.Event()
            self._is_known.record(torch.cuda.current_stream(flag.device))

    def __bool__(self) -> bool:
        if self._is_known is not None:
            self._is_known.synchronize()
        return bool(self._flag)


def _kind_of_few_bits(tensor: Tensor) -> str | None:
    """The same of numbers of 8 bits, which PyTorch does not sum; those of one type alone may be infinite."""
    if bool(tensor.isnan().any()):
        return "NaN"
    if tensor.dtype == torch.float8_e5m2 and bool(tensor.isinf().any()):
        return "infinity"
    return None


def in_weights(model: nn.Module) -> Trouble | None:
    """The weights that are not finite. Buffers may hold infinities, as masks do, but no NaN."""
    if _are_finite_on_a_gpu(model):
        return None
    kinds = [(name, kind_of(tensor), is_buffer) for name, tensor, is_buffer in weights(model)]
    kinds.sort(key=lambda entry: entry[2])  # parameters first, then buffers
    broken = [(name, what) for name, what, is_buffer in kinds if what and (what == "NaN" or not is_buffer)]
    if not broken:
        return None
    first, what = broken[0]
    others = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
    return Trouble(f"the model is broken: {what} in the weight {first}{others}", what, first)


def _are_finite_on_a_gpu(model: nn.Module) -> bool:
    """Whether all weights lie on one GPU and are finite, which it is asked once for all of them."""
    tensors = [*model.parameters(), *model.buffers()]
    devices = {tensor.device for tensor in tensors}
    numbers = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.dtype.itemsize > 1]
    if len(devices) != 1 or next(iter(devices)).type != "cuda" or not numbers:
        return False
    if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors):
        return False
    others = [
        tensor for tensor in tensors if tensor.is_complex() or (tensor.is_floating_point() and tensor.itemsize == 1)
    ]
    return not others and bool(LaterFinite([finite_sum(tensor) for tensor in numbers]))


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
    broken: list[tuple[str, str]] = []  # a module's name and what its output holds
    names = {module: name for name, module in model.named_modules()}

    # A module's hook runs after those of the modules inside it, so the innermost one is named.
    def look(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        if broken:
            return
        name = names[module] or type(module).__name__
        for tensor in tensors_of(output):
            what = kind_of(at_real(tensor, real))
            if what is not None:
                broken.append((name, what))

    with torch.no_grad(), hooked(names, after=look):
        run(model, inputs)
    if not broken:
        return None
    first, what = broken[0]
    dtype = dtype_of(model)
    half = dtype in (torch.float16, torch.bfloat16)
    cause = f"; {str(dtype).removeprefix('torch.')} may overflow where float32 does not" if half else ""
    return Trouble(f"the model's numbers break down: {what} first in {first}, in {batch}{cause}", what, first)


def in_call(call: AttentionCall, queries: Bool[Tensor, "B L"], keys: Bool[Tensor, "B N"]) -> bool:
    """Whether one attention call has numbers that are not finite, padding and queries that see no key left out."""
    # (B, tokens, …), so that real tokens can be taken out of all of them alike.
    of_queries = [call.query.transpose(1, 2), call.output]
    of_keys = [call.key.transpose(1, 2), call.value.transpose(1, 2)]
    if call.grade == "scores" and call.log_weight is not None:
        # The log-weights hold the scores here; −∞ in them hides a key and is no trouble.
        scores = torch.where(call.log_weight.isneginf(), 0.0, call.log_weight)
        of_queries.append(scores.transpose(1, 2))
    if all(kind_of(tensor) is None for tensor in (*of_queries, *of_keys)):
        return False
    queries = queries & call.visible().any(-1).all(1)
    kinds = [kind_of(at_real(tensor, queries)) for tensor in of_queries]
    kinds += [kind_of(at_real(tensor, keys)) for tensor in of_keys]
    return any(kinds)


def at_real(tensor: Tensor, real: Tensor | None) -> Tensor:
    """A tensor's entries at real tokens, where its first two dimensions are items and tokens, or the reverse; else all."""
    if real is None or tensor.dim() < 2:
        return tensor
    for places in (real, real.mT):
        if tensor.shape[:2] == places.shape:
            return tensor[places.to(tensor.device)]
    return tensor


def shows_nan(model: nn.Module, sites: Sequence[SiteInfo], inputs: dict[str, Any]) -> bool:
    """Whether an attention call or a step along the residual stream has NaN, in one pass over a batch."""
    kinds: list[str | None] = []

    def attend(call: AttentionCall) -> None:
        tensors = (call.query, call.key, call.value, call.output, call.log_weight)
        kinds.extend(kind_of(tensor) for tensor in tensors if tensor is not None)
        tracer.attention(call)

    tracer = StreamTracer(model, sites, lambda step: kinds.append(kind_of(step.after)))
    with torch.no_grad(), capturing(model, attend), tracer.watching():
        run(model, model_inputs(model, inputs, items=2))
    return "NaN" in kinds


@dataclass
class FirstTrouble:
    """The first trouble of a reading, and the window in which it was."""

    trouble: Trouble | None = None
    window: int = 0

    def merge(self, other: "FirstTrouble") -> None:
        """Keep what comes first in the text."""
        if other.trouble is not None and (self.trouble is None or other.window < self.window):
            self.trouble = other.trouble
            self.window = other.window

    def state(self) -> State:
        """The trouble as a list of its fields, or None, and its window."""
        trouble = self.trouble
        entries = None if trouble is None else [trouble.sentence, trouble.what, trouble.first]
        return {"found": entries, "window": self.window}

    def restore(self, state: State) -> None:
        """Replace this trouble by that of a stored state."""
        self.trouble = None if state["found"] is None else Trouble(*state["found"])
        self.window = state["window"]
