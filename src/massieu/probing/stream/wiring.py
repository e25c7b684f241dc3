"""Find the residual stream of a model by watching one forward pass, and report every step along it.

No architecture is named here. The stream enters the first block of a stack. An addition with one operand on the stream is a
residual step, and its other operand the update. A norm module fed by the stream is a normalisation step. Whether attention
was computed between two additions tells if the update came from it or from the feed-forward part. The tensors of the stream
are recognised while they live, and not held: a trace keeps no more in memory than the model does.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.capture.sites import SiteInfo, hidden_state, inside
from massieu.probing.model.packed import dequantised, packed_linears, projection_of
from massieu.probing.model.watching import LatestTensors, Place, hooked, mapped, memory
from massieu.storage.record import Sublayer

_ADD_IN_PLACE = {Tensor.add_, Tensor.__iadd__}
_ADD = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, *_ADD_IN_PLACE}
_MATMUL = {torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__}
_MULTI_HEAD_SIGNATURE = inspect.signature(torch.nn.functional.multi_head_attention_forward)
_ATTENTION_LABELS = {
    "attention": "attention",
    "cross_attention": "cross-attention",
    "attention_and_feed_forward": "attention and feed-forward",
}
"""By the kind of a sublayer, the last word of its name."""
_MOST_REMEMBERED = 6
"""Stream tensors, norm outputs and projections that are each remembered at a time."""


@dataclass(frozen=True, eq=False)
class AttentionRead:
    """How an attention module read the stream, and how its result is written back.

    Attributes:
        state: the attention module's input.
        residual: the stream where it was read (before ``norm``); None when the module reads something that is neither
            the stream nor a norm of it (windows cut out of an image, say).
        norm: the norm module between stream and attention module; None when the module reads the stream itself.
        arguments, keywords: of the call of the attention module's forward.
        projection: weight (D, H·Dv) of the output projection; None when none was seen.
        bias: bias of the output projection.
        update: result of the output projection, bias included.
        tokens_first: the module's inputs and outputs are (L, B, D), and so are the tensors in arguments and keywords.
        along_heads: an argument has the shape of scores whose batch and heads are one dimension (BLOOM's bias by position).
            The size of the batch shows that; once a single item is picked, it could no longer be seen.
        writes_linearly: the projection's result enters the stream unchanged (no norm, gate or scale in between), so that it
            is the sum of the heads' writes.
        known: what was found out about the module in this step, by name; the reads of single items share it.
    """

    call: AttentionCall
    state: Float[Tensor, "B L D"]
    residual: Float[Tensor, "B L D"] | None
    norm: nn.Module | None
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    projection: Float[Tensor, "D HDv"] | None = None
    bias: Float[Tensor, " D"] | None = None
    update: Float[Tensor, "B L D"] | None = None
    writes_linearly: bool = False
    tokens_first: bool = False
    along_heads: bool = False
    known: dict[str, Any] = field(default_factory=dict)

    def item(self, row: int) -> "AttentionRead":
        """The same read for one item of the batch."""
        batch = self.state.shape[0]
        rows = slice(row, row + 1)

        def pick(value: Tensor) -> Tensor:
            if self.has_heads(value):
                return value.unflatten(0, (batch, -1))[row]
            value = self.batch_first(value)
            return self.batch_first(value[rows] if along_batch(value, batch) else value)

        return replace(
            self,
            call=self.call.rows(rows) if self.call.query.shape[0] == batch else self.call,
            state=self.state[rows],
            residual=None if self.residual is None else self.residual[rows],
            update=None if self.update is None else self.update[rows],
            arguments=mapped(self.arguments, pick),
            keywords={name: mapped(value, pick) for name, value in self.keywords.items()},
        )

    def has_heads(self, value: Tensor) -> bool:
        """Whether a tensor's first dimension runs over the heads of every item."""
        return self.along_heads and _has_heads(self.call, value)

    def batch_first(self, value: Tensor) -> Tensor:
        """Swap the batch and token dimensions for modules that put tokens first; a second call swaps them back."""
        return value.transpose(0, 1) if self.tokens_first and value.dim() == 3 else value


@dataclass(frozen=True, eq=False)
class Step:
    """One residual step as it happened: the stream before and after, and for attention how it was read."""

    sublayer: Sublayer
    before: Float[Tensor, "B L D"]
    after: Float[Tensor, "B L D"]
    read: AttentionRead | None
    in_decoder: bool = False

    def item(self, row: int) -> "Step":
        """The same step for one item of the batch."""
        part = slice(row, row + 1)
        read = None if self.read is None else self.read.item(row)
        return Step(self.sublayer, self.before[part], self.after[part], read, self.in_decoder)


def along_batch(value: Tensor, batch: int) -> bool:
    """Whether a tensor has a row for each item of the batch."""
    # A floating-point matrix is taken for a table by position, such as rotary angles, even if it has as many rows.
    may_have_rows = value.dim() > 2 or (value.dim() == 2 and not (value.is_floating_point() or value.is_complex()))
    return may_have_rows and value.shape[0] == batch


def _has_heads(call: AttentionCall, value: Tensor) -> bool:
    """Whether a tensor has the shape of scores whose batch and heads are one dimension: (batch · heads, 1 or L, L)."""
    batch, heads, length = call.query.shape[:3]
    if call.key.shape[2] != length or heads == 1 or value.dim() != 3:
        return False
    return value.shape[0] == batch * heads and value.shape[1] in (1, length) and value.shape[2] == length


@dataclass(frozen=True, eq=False)
class _Norm:
    """A call of a norm module with the stream."""

    module: nn.Module
    source: Tensor


class StreamTracer(TorchFunctionMode):
    """Watches a forward pass and calls ``observer`` with a `Step` for each residual addition and each norm on the way.

    The observer runs in the middle of the forward pass and may call modules of the model again; that is not traced.
    Whoever uses the tracer must call `attention` with every `AttentionCall`.
    """

    def __init__(self, model: nn.Module, sites: Sequence[SiteInfo], observer: Callable[[Step], None]) -> None:
        super().__init__()
        self.model = model
        self.sites = {info.site: info for info in sites}
        self.observer = observer
        self.sublayers: list[Sublayer] = []
        self._names = {module: name for name, module in model.named_modules()}
        self._blocks = {info.block for info in sites}
        self._paused = False
        self.start_forward()

    def start_forward(self) -> None:
        """Forget the previous forward pass; sublayers found so far keep their names and numbers."""
        self._position = 0  # index of the next sublayer
        self._block: SiteInfo | None = None  # the latest attention site
        self._pending: AttentionRead | None = None  # its read, until its result is added to the stream
        self._stream = LatestTensors[None](_MOST_REMEMBERED)
        self._normed = LatestTensors[_Norm](_MOST_REMEMBERED)  # outputs of norms
        self._carriers = LatestTensors[None](_MOST_REMEMBERED)  # the projection's result, and sums with it
        self._mixed = LatestTensors[None](_MOST_REMEMBERED)  # carriers that hold another update too
        self._called: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}  # attention modules that are running

    @contextmanager
    def watching(self) -> Iterator["StreamTracer"]:
        """Install the hooks and the function mode for the duration of a block."""
        attention_modules = {self.model.get_submodule(site.module_name) for site in self.sites}
        blocks = {module for name in self._blocks for module in _called_modules(self.model.get_submodule(name))}
        norms = [module for module in self._names if "Norm" in type(module).__name__]
        with (
            hooked(attention_modules, before=self._before_attention, after=self._after_attention),
            hooked(blocks, before=self._before_block),
            hooked(norms, after=self._after_norm),
            hooked(packed_linears(self.model), after=self._after_packed),
            self,
        ):
            try:
                yield self
            finally:
                self.start_forward()

    # What the hooks see --------------------------------------------------------------------------------------------

    def _before_block(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        state = hidden_state(arguments, keywords)
        if not self._paused and state is not None and memory(state) not in self._normed:
            self._stream.add(state, None)

    def _before_attention(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if not self._paused:
            self._called[module] = (arguments, keywords)

    def _after_attention(self, module: nn.Module, *_: Any) -> None:
        if not self._paused:
            self._called.pop(module, None)

    def _after_packed(self, module: nn.Module, arguments: tuple[Any, ...], _: dict[str, Any], output: Any) -> None:
        """Project by a packed weight, whose kernel may be none of PyTorch's functions, so that the mode does not see it."""
        read = self._pending
        if self._paused or read is None or read.projection is not None or not arguments:
            return
        with self.unobserved():
            if not _is_output(arguments[0], read):
                return
            weight = projection_of(module, arguments[0], output)
        if weight is not None:
            self._project(arguments[0], weight, getattr(module, "bias", None), output)

    def _after_norm(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        source = arguments[0] if arguments else None
        if self._paused or not isinstance(output, Tensor) or not isinstance(source, Tensor):
            return
        if memory(source) not in self._stream:
            return
        self._normed.add(output, _Norm(module, source))
        # Whether the stream continues behind this norm (post-norm wiring) is known when something is added to it.
        name = self._names[module]
        block = self._block
        sites_around = [info for info in self.sites.values() if inside(name, info.block)]
        if block is not None and inside(name, block.block):
            layer = block.layer  # a block that is called several times has several layers: this call's
        else:
            layer = sites_around[0].layer if sites_around else None
        # Outside every block the stream is that of the latest attention.
        info = sites_around[0] if sites_around else block
        self._report("norm", name, info, layer, source, output, None)

    @contextmanager
    def unobserved(self) -> Iterator[None]:
        """Inside, nothing is traced, and nothing costs tracing."""
        paused_before = self._paused
        self._paused = True
        try:
            with torch._C.DisableTorchFunction():
                yield
        finally:
            self._paused = paused_before

    def attention(self, call: AttentionCall) -> None:
        """Tell the tracer that an attention site has just been computed."""
        self._block = self.sites[call.site]
        arguments, keywords = self._called.get(call.module, ((), {}))
        state = hidden_state(arguments, keywords)
        if state is None:
            self._pending = None
            return
        self._carriers.clear()
        self._mixed.clear()
        place = memory(state) or (0, 0)
        norm = self._normed.get(place)
        if norm is not None:
            residual = norm.source
        else:
            residual = state if place in self._stream else None
        batch_first = self._batch_first(self._block)
        tokens_first = bool(self._block.tokens_first)
        values = (*arguments, *keywords.values())
        self._pending = AttentionRead(
            call=call,
            state=batch_first(state),
            residual=None if residual is None else batch_first(residual),
            norm=None if norm is None else norm.module,
            arguments=arguments,
            keywords=keywords,
            tokens_first=tokens_first,
            along_heads=not tokens_first
            and any(isinstance(value, Tensor) and _has_heads(call, value) for value in values),
        )

    # What the function mode sees -----------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if func in _ADD:
            return self._add(func, args, kwargs)
        result = func(*args, **kwargs)
        if self._pending is not None and self._pending.projection is None:
            if func is torch.nn.functional.linear:
                inputs = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
                self._project(inputs["input"], inputs["weight"], inputs.get("bias"), result)
            elif func is torch.addmm:  # Conv1D of the GPT-2 family: addmm(bias, input, weight)
                self._project(args[1], dequantised(args[2]).mT, args[0], result)
            elif func in _MATMUL and args[1].dim() == 2:
                self._project(args[0], dequantised(args[1]).mT, None, result)
            elif func is torch.nn.functional.multi_head_attention_forward:  # projects inside, tokens first
                inputs = _MULTI_HEAD_SIGNATURE.bind(*args, **kwargs).arguments
                output = result[0] if result[0].dim() == 3 else result[0][:, None]
                self._set_projection(
                    inputs["out_proj_weight"], inputs["out_proj_bias"], result[0], output.transpose(0, 1)
                )
        return result

    def _project(self, source: Tensor, weight: Tensor, bias: Tensor | None, result: Tensor) -> None:
        """Take ``result`` for the output projection, if its source is the attention's output."""
        read = self._pending
        if read is None or not _is_output(source, read):
            return
        shape = (*read.batch_first(read.state).shape[:-1], weight.shape[0])
        update = None
        if result.numel() == weight.shape[0] * shape[0] * shape[1]:
            update = read.batch_first(result.view(shape))
        self._set_projection(weight, bias, result, update)

    def _set_projection(self, weight: Tensor, bias: Tensor | None, result: Tensor, update: Tensor | None) -> None:
        assert self._pending is not None
        self._pending = replace(self._pending, projection=dequantised(weight), bias=bias, update=update)
        self._carriers.add(result, None)

    def _add(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An addition: a residual step, if one of its operands alone is on the stream."""
        operands = [memory(operand) for operand in args[:2]]
        on_stream = [place is not None and (place in self._stream or place in self._normed) for place in operands]
        if kwargs.get("alpha", 1) != 1 or len(operands) < 2 or sum(on_stream) != 1:
            result = func(*args, **kwargs)
            if any(place in self._carriers for place in operands) and isinstance(result, Tensor):
                self._carriers.add(result, None)
                self._add_to_carrier(args[0] if operands[1] in self._carriers else args[1], result)
            return result
        before, update = (args[0], args[1]) if on_stream[0] else (args[1], args[0])
        if not isinstance(update, Tensor) or update.shape != before.shape:
            return func(*args, **kwargs)
        update_place = memory(update)
        if func in _ADD_IN_PLACE:  # which overwrites the stream
            before = before.clone()
        result = func(*args, **kwargs)
        self._stream.add(result, None)
        self._residual_step(before, result, update_place)
        return result

    def _add_to_carrier(self, addend: Tensor, result: Tensor) -> None:
        """Something was added to the projection's result on its way to the stream: its bias, or another update."""
        read = self._pending
        if read is not None and read.bias is None and addend.dim() == 1 and result.dim() == 3:
            self._pending = replace(read, bias=addend, update=read.batch_first(result))
        else:
            self._mixed.add(result, None)

    def _residual_step(self, before: Tensor, after: Tensor, update_place: Place | None) -> None:
        """Report the addition of the update at a place in memory."""
        read = self._pending
        self._pending = None
        block = self._block
        if block is None:
            self._report("feed_forward", "stream feed-forward", None, None, before, after, None)
            return
        if read is None:
            name = f"{block.block} feed-forward"
            self._report("feed_forward", name, block, block.layer, before, after, None)
            return
        if memory(before) == memory(read.state):  # post-norm wiring: what the module read is the stream itself
            read = replace(read, residual=read.batch_first(before), norm=None)
        if update_place in self._mixed:
            kind = "attention_and_feed_forward"
        else:
            kind = "cross_attention" if block.kind == "cross" else "attention"
        read = replace(read, writes_linearly=update_place in self._carriers)
        ordinal = f" (call {block.site.ordinal + 1})" if block.site.ordinal else ""
        name = f"{block.block}{ordinal} {_ATTENTION_LABELS[kind]}"
        self._report(kind, name, block, block.layer, before, after, read)

    def _batch_first(self, info: SiteInfo | None) -> Callable[[Tensor], Tensor]:
        """Swaps the batch and token dimensions, if tokens come first at this site, or else at the first one."""
        info = next(iter(self.sites.values())) if info is None else info
        if info.tokens_first:
            return lambda value: value.transpose(0, 1)
        return lambda value: value

    def _report(
        self,
        kind: str,
        name: str,
        info: SiteInfo | None,
        layer: int | None,
        before: Tensor,
        after: Tensor,
        read: AttentionRead | None,
    ) -> None:
        """Call the observer with a step; the first forward pass names it, and later ones find it by its position.

        Args:
            info: the site near the step.
        """
        name = name.strip()
        if self._position == len(self.sublayers):
            same = sum(
                sublayer.name == name or sublayer.name.startswith(f"{name} (call ") for sublayer in self.sublayers
            )
            unique = name if not same else f"{name} (call {same + 1})"
            self.sublayers.append(Sublayer(self._position, unique, kind, layer))
        sublayer = self.sublayers[self._position]
        self._position += 1
        batch_first = self._batch_first(info)
        in_decoder = info is not None and info.in_decoder
        with self.unobserved():
            self.observer(Step(sublayer, batch_first(before), batch_first(after), read, in_decoder))


def _is_output(source: Tensor, read: AttentionRead) -> bool:
    """Whether a projection's source is the attention's output with its heads side by side.

    This package's own functions report an output before its heads are merged, which copies it: then numbers are compared.
    """
    output = read.call.output
    if memory(source) == memory(output):
        return True
    if read.call.route != "ops" or source.numel() != output.numel() or source.dtype != output.dtype:
        return False
    merged = output.flatten(2)
    return any(torch.equal(source, output.reshape(source.shape)) for output in (merged, merged.transpose(0, 1)))


def _called_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The module itself; for a list or dictionary, which is never called, the modules in it."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        yield module
        return
    for child in module.children():
        yield from _called_modules(child)
