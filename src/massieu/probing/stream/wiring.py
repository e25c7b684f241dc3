"""Find the residual stream of a model by watching one forward pass, and report every step along it.

No architecture is named here. The stream enters the first block of a stack; an addition with one operand on the stream
is a residual step, its other operand the update; a norm module fed by the stream is a normalisation step. What fired
between two additions says whether the update came from attention or from the feed-forward part. Only the last few
stream tensors are held, so the memory of a trace does not grow with depth.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.capture.sites import SiteInfo, hidden_state, inside
from massieu.probing.model.packed import packed_linears, plain, projection_of
from massieu.probing.model.watching import Place, hooked, mapped, memory
from massieu.storage.record import Sublayer

_ADD_IN_PLACE = {Tensor.add_, Tensor.__iadd__}
_ADD = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, *_ADD_IN_PLACE}
_MATMUL = {torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__}
_OF_MULTI_HEAD = inspect.signature(torch.nn.functional.multi_head_attention_forward)
_HELD = 6  # stream tensors, norm outputs and projections remembered at a time


@dataclass(frozen=True, eq=False)
class AttentionRead:
    """How an attention module read the stream, and how its result is written back.

    Attributes:
        state: what the attention module was given.
        residual: the stream where it was read (before ``norm``); None when the module reads something that is neither
            the stream nor a norm of it (windows cut out of an image, say).
        norm: the norm module between stream and attention module; None when the module reads the stream itself.
        arguments, keywords: what the attention module's forward was called with.
        projection: weight (D, H·Dv) of the output projection; None when none was seen.
        bias: bias of the output projection.
        update: result of the output projection, bias included.
        tokens_first: the module is given and gives (L, B, D), so that arguments and keywords hold the tokens that way round.
        along_heads: the module is given a tensor as scores are where batch and heads are one dimension (BLOOM's bias by
            position). It is told by the number of items, which item by item can no longer be seen.
        writes_linearly: the projection's result enters the stream as it is (no norm, gate or scale in between), so
            that it is the sum of what each head writes.
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

    def item(self, row: int) -> "AttentionRead":
        """The same read for one item of the batch."""
        batch, part = self.state.shape[0], slice(row, row + 1)

        def pick(value: Tensor) -> Tensor:
            if self.has_heads(value):
                return value.unflatten(0, (batch, -1))[row]
            value = self.turned(value)
            return self.turned(value[part] if along_batch(value, batch) else value)

        parts: dict[str, Any] = {
            n: mapped(getattr(self, n), lambda v: v[part]) for n in ("state", "residual", "update")
        }
        parts["arguments"] = mapped(self.arguments, pick)
        keywords = {name: mapped(value, pick) for name, value in self.keywords.items()}
        call = self.call.rows(part) if self.call.query.shape[0] == batch else self.call
        return replace(self, call=call, keywords=keywords, **parts)

    def has_heads(self, value: Tensor) -> bool:
        """Whether a tensor's first dimension is that of each item's heads."""
        return self.along_heads and _has_heads(self.call, value)

    def turned(self, value: Tensor) -> Tensor:
        """From the way round that the module has its tokens to (B, L, D), and back."""
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
    """Whether a tensor has a row for each item of the batch; a table of numbers by position has two dimensions too."""
    rows = value.dim() > 2 or (value.dim() == 2 and not (value.is_floating_point() or value.is_complex()))
    return rows and value.shape[0] == batch


def _has_heads(call: AttentionCall, value: Tensor) -> bool:
    """Whether a tensor is as scores are where batch and heads are one dimension: (batch · heads, 1 or L, L)."""
    batch, heads, length = call.query.shape[:3]
    if call.key.shape[2] != length or heads == 1 or value.dim() != 3:
        return False
    return value.shape[0] == batch * heads and value.shape[1] in (1, length) and value.shape[2] == length


class StreamTracer(TorchFunctionMode):
    """Watches a forward pass and calls ``observer`` with a `Step` for each residual addition and each norm on the way.

    The observer runs in the middle of the forward pass and may call modules of the model again; what it does is not
    traced. `attention` is to be called with every `AttentionCall`.
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
        self._position = 0
        self._block: SiteInfo | None = None
        self._pending: AttentionRead | None = None
        self._stream: OrderedDict[Place, Tensor] = OrderedDict()
        self._normed: OrderedDict[Place, tuple[nn.Module, Tensor, Tensor]] = OrderedDict()
        self._carriers: OrderedDict[Place, Tensor] = OrderedDict()
        self._mixed: set[Place] = set()
        self._called: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    @contextmanager
    def watching(self) -> Iterator["StreamTracer"]:
        """Install the hooks and the function mode for the duration of a block."""
        attention_modules = {self.model.get_submodule(site.module_name) for site in self.sites}
        blocks = {each for name in self._blocks for each in _called(self.model.get_submodule(name))}
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
            _remember(self._stream, state, state)

    def _before_attention(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if not self._paused:
            self._called[module] = (arguments, keywords)

    def _after_attention(self, module: nn.Module, *_: Any) -> None:
        if not self._paused:
            self._called.pop(module, None)

    def _after_packed(self, module: nn.Module, arguments: tuple[Any, ...], _: dict[str, Any], output: Any) -> None:
        """A kernel of few bits may be none of PyTorch's functions, so that the function mode does not see it."""
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
        _remember(self._normed, output, (module, source, output))
        # Whether the stream continues behind this norm (post-norm wiring) is known when something is added to it.
        name, block = self._names[module], self._block
        around = [info for info in self.sites.values() if inside(name, info.block)]
        if block is not None and inside(
            name, block.block
        ):  # of a block that is called several times, this call's layer
            layer = block.layer
        else:
            layer = around[0].layer if around else None
        # Outside every block the stream is that of the latest attention.
        of = around[0] if around else block
        self._report("norm", name, of, layer, source, output, None)

    @contextmanager
    def unobserved(self) -> Iterator[None]:
        """What runs inside is not traced and costs no tracing."""
        paused, self._paused = self._paused, True
        try:
            with torch._C.DisableTorchFunction():
                yield
        finally:
            self._paused = paused

    def attention(self, call: AttentionCall) -> None:
        """Tell the tracer that an attention site has just computed."""
        self._block = self.sites[call.site]
        arguments, keywords = self._called.get(call.module, ((), {}))
        state = hidden_state(arguments, keywords)
        if state is None:
            self._pending = None
            return
        key = memory(state) or (0, 0)
        norm, residual, _ = self._normed.get(key, (None, state, None))
        known = norm is not None or key in self._stream
        self._carriers.clear()
        self._mixed.clear()
        turn = self._turn(self._block)
        residual = turn(residual) if known else None
        turned = bool(self._block.tokens_first)
        values = (*arguments, *keywords.values())
        with_heads = not turned and any(isinstance(value, Tensor) and _has_heads(call, value) for value in values)
        self._pending = AttentionRead(
            *(call, turn(state), residual, norm, arguments, keywords), tokens_first=turned, along_heads=with_heads
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
                given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
                self._project(given["input"], given["weight"], given.get("bias"), result)
            elif func is torch.addmm:  # Conv1D of the GPT-2 family: addmm(bias, input, weight)
                self._project(args[1], plain(args[2]).mT, args[0], result)
            elif func in _MATMUL and args[1].dim() == 2:
                self._project(args[0], plain(args[1]).mT, None, result)
            elif func is torch.nn.functional.multi_head_attention_forward:  # projects inside, tokens first
                given = _OF_MULTI_HEAD.bind(*args, **kwargs).arguments
                written = result[0] if result[0].dim() == 3 else result[0][:, None]
                self._written(given["out_proj_weight"], given["out_proj_bias"], result[0], written.transpose(0, 1))
        return result

    def _project(self, source: Tensor, weight: Tensor, bias: Tensor | None, result: Tensor) -> None:
        read = self._pending
        if read is None or not _is_output(source, read):
            return
        shape = (*read.turned(read.state).shape[:-1], weight.shape[0])
        update = read.turned(result.view(shape)) if result.numel() == weight.shape[0] * shape[0] * shape[1] else None
        self._written(weight, bias, result, update)

    def _written(self, weight: Tensor, bias: Tensor | None, result: Tensor, update: Tensor | None) -> None:
        assert self._pending is not None
        self._pending = replace(self._pending, projection=plain(weight), bias=bias, update=update)
        _remember(self._carriers, result, result)

    def _add(self, func: Any, args: Any, kwargs: Any) -> Any:
        operands = [memory(a) for a in args[:2]]
        on_stream = [k is not None and (k in self._stream or k in self._normed) for k in operands]
        if kwargs.get("alpha", 1) != 1 or len(operands) < 2 or sum(on_stream) != 1:
            result = func(*args, **kwargs)
            if any(k in self._carriers for k in operands) and isinstance(result, Tensor):
                _remember(self._carriers, result, result)
                bias, read = args[0] if operands[1] in self._carriers else args[1], self._pending
                if read is not None and read.bias is None and bias.dim() == 1 and result.dim() == 3:
                    self._pending = replace(read, bias=bias, update=read.turned(result))
                else:
                    self._mixed.add(memory(result) or (0, 0))
            return result
        before, update = (args[0], args[1]) if on_stream[0] else (args[1], args[0])
        if not isinstance(update, Tensor) or update.shape != before.shape:
            return func(*args, **kwargs)
        carried = memory(update)
        if func in _ADD_IN_PLACE:
            before, update = before.clone(), update.clone()
        result = func(*args, **kwargs)
        _remember(self._stream, result, result)
        self._residual_step(before, result, carried)
        return result

    def _residual_step(self, before: Tensor, after: Tensor, carried: Place | None) -> None:
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
            read = replace(read, residual=read.turned(before), norm=None)
        kind, label = ("cross_attention", "cross-attention") if block.kind == "cross" else ("attention", "attention")
        if carried in self._mixed:
            kind, label = "attention_and_feed_forward", "attention and feed-forward"
        read = replace(read, writes_linearly=carried in self._carriers)
        ordinal = f" (call {block.site.ordinal + 1})" if block.site.ordinal else ""
        self._report(kind, f"{block.block}{ordinal} {label}", block, block.layer, before, after, read)

    def _turn(self, info: SiteInfo | None) -> Callable[[Tensor], Tensor]:
        """From the way round that tokens are at a site, or else at the first one, to (B, L, D)."""
        info = next(iter(self.sites.values())) if info is None else info
        return (lambda value: value.transpose(0, 1)) if info.tokens_first else (lambda value: value)

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
        """Give the observer a step near a site."""
        name, turn = name.strip(), self._turn(info)
        if self._position == len(self.sublayers):
            taken = sum(s.name == name or s.name.startswith(f"{name} (call ") for s in self.sublayers)
            unique = name if not taken else f"{name} (call {taken + 1})"
            self.sublayers.append(Sublayer(self._position, unique, kind, layer))
        sublayer = self.sublayers[self._position]
        self._position += 1
        with self.unobserved():
            self.observer(Step(sublayer, turn(before), turn(after), read, info is not None and info.in_decoder))


def _is_output(source: Tensor, read: AttentionRead) -> bool:
    """Whether what is projected is the attention's output with its heads side by side.

    Our own functions tell of an output before its heads are merged, which copies it: then the numbers are compared.
    """
    output = read.call.output
    if memory(source) == memory(output):
        return True
    if read.call.route != "ops" or source.numel() != output.numel() or source.dtype != output.dtype:
        return False
    merged = output.flatten(2)
    return any(torch.equal(source, each.reshape(source.shape)) for each in (merged, merged.transpose(0, 1)))


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """A module that is called; of a list, which is not, what is in it."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        yield module
        return
    for child in module.children():
        yield from _called(child)


def _remember(store: OrderedDict[Place, Any], tensor: Tensor, value: Any) -> None:
    """Hold ``value`` under the tensor's identity; holding it keeps its memory from being reused while it is known."""
    key = memory(tensor)
    if key is None:
        return
    store.pop(key, None)
    store[key] = value
    while len(store) > _HELD:
        store.popitem(last=False)
