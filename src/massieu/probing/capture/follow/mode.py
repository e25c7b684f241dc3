"""The tap: a function mode that follows scores from a product of two activations to their softmax and on to the values.

Each tensor on the way has a note of what it is: `Scores` (which product, what each dimension means, which steps were taken),
`Weights`, or `Output`. A note is held as long as its tensor lives. Once the output's heads are merged, or projected, it is
clear which dimensions are batch, heads and tokens, and the capture's observer gets an `AttentionCall`. What cannot be
followed is refused with its reason (`Capture.refused`), under the name of the innermost module around it that has parameters.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _len_torch_function_stack  # pyright: ignore[reportAttributeAccessIssue]
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from massieu.errors import InputError
from massieu.nn.strategy import Heads
from massieu.probing.capture.capture import Capture, StopAfterQuery, recomputing
from massieu.probing.capture.follow import functions as f
from massieu.probing.capture.follow.calls import HeadLayout, Output, layout_of, read_weights
from massieu.probing.capture.follow.dims import Dim, entries, merged, of, unmerged, whole
from massieu.probing.capture.follow.fused import FOREIGN, FUSED, RUN_OPEN
from massieu.probing.capture.follow.scores import (
    BADDBMM,
    CONTRACTIONS,
    EINSUMS,
    Path,
    Reduction,
    ScoreProduct,
    Scores,
    Weights,
    contracted,
    contraction,
    labelled,
)
from massieu.probing.capture.follow.steps import added, is_largest, named, reshaped, scores_after, weights_after
from massieu.probing.model.watching import hooked, mapped

_CONSTANT, _WEIGHT, _MIXED = 1, 2, 4  # computed from parameters alone; a parameter itself; of activations, projected


class Tap(TorchFunctionMode):
    """Hands every attention call that it can follow to the capture while it is entered."""

    def __init__(self, model: nn.Module, capture: Capture) -> None:
        super().__init__()
        self.model, self.capture = model, capture
        self._notes: Any = WeakIdKeyDictionary()
        self._kinds: Any = WeakIdKeyDictionary()
        tensors = (*model.parameters(), *model.buffers())
        self._own = {id(tensor) for tensor in tensors if not isinstance(tensor, nn.Parameter)}
        self._running: list[nn.Module] = []
        self._open: dict[int, tuple[Path, str]] = {}  # products and softmaxes that nothing was read of yet
        self._begun = 0
        self._replaced: tuple[Tensor, Tensor] | None = None  # an output, and what takes its place

    def __enter__(self) -> "Tap":
        self._depth = _len_torch_function_stack()
        modules = [
            m for m in self.model.modules() if not isinstance(m, torch.jit.ScriptModule)
        ]  # these take no such hooks
        self._hooks = hooked(modules, before=self._enter, after=self._leave, elsewhere=self._disturbed)
        self._hooks.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        # PyTorch takes a mode off the stack while it is at work: Ctrl-C in that moment leaves it off.
        if _len_torch_function_stack() > self._depth:
            super().__exit__(*error)
        self._hooks.__exit__(*error)
        self._running.clear()
        self._notes.clear()
        self._kinds.clear()

    def _disturbed(self) -> None:
        """Another thread runs a part of the model, where a function mode of this one sees nothing."""
        if not recomputing():
            self.capture.disturbed = True

    def _enter(self, module: nn.Module, *_: Any) -> None:
        self._running.append(module)

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if module in self._running:
            while self._running.pop() is not module:
                pass

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.capture.claimed or func in f.ASKING or recomputing():
            return func(*args, **kwargs)
        if not self._running and self.capture.projections is None:
            return func(*args, **kwargs)  # of another model, such as a teacher, or of the loss
        if isinstance(func, torch._ops.OpOverloadPacket | torch._ops.OpOverload):
            self._foreign(func)
        opened = RUN_OPEN.get(func)
        if opened is not None:
            super().__enter__()  # its own code, step by step
            try:
                return opened(*args, **kwargs)
            finally:
                super().__exit__(None, None, None)
        given = list(_tensors(args[:1] if func in f.SHAPED_LIKE else args, kwargs))
        noted = [(tensor, note) for tensor in given if (note := self._note(tensor)) is not None]
        if noted and self._ends_output(func, args, noted):
            noted = [(tensor, note) for tensor, note in noted if not isinstance(note, Output)]
        if (replaced := self._take_replaced()) is not None:
            old, new = replaced
            args, kwargs = mapped((tuple(args), kwargs), lambda value: new if value is old else value)
        result = func(*args, **kwargs)
        self._keep_kind(func, given, result)
        if func in FUSED:
            self._fused(func, args, kwargs, result)
        elif func in CONTRACTIONS:
            self._contract(func, args, kwargs, result)
        elif noted and func not in f.UNRELATED:
            self._follow(func, args, kwargs, noted, result)
        replaced = self._take_replaced()
        return result if replaced is None else replaced[1]

    def _take_replaced(self) -> tuple[Tensor, Tensor] | None:
        found, self._replaced = self._replaced, None
        return found

    def _foreign(self, func: Any) -> None:
        """A library's own operator that attends: its name says so, what it is given is its own affair."""
        name = str(getattr(func, "_qualified_op_name", func))
        library = name.partition("::")[0]
        if library in FOREIGN or any(library.startswith(f"{each}_") for each in FOREIGN):
            self._refuse(self._path(), f"it attends by {name}, an operator that is not read")

    # Notes -----------------------------------------------------------------------------------------------------------

    def _note(self, tensor: Tensor) -> Any:
        found = self._notes.get(tensor)
        if found is None:
            return None
        version, note = found
        return note if version == _version(tensor) else None

    def _keep(self, tensor: Any, note: Any) -> None:
        if isinstance(tensor, Tensor):
            self._notes[tensor] = (_version(tensor), note)

    def _kind(self, tensor: Tensor) -> int:
        return _CONSTANT | _WEIGHT if self._is_own(tensor) else self._kinds.get(tensor, 0)

    def _is_own(self, tensor: Tensor) -> bool:
        """Whether it is a weight or a buffer; weights of some models are made anew each time that they are asked for."""
        return isinstance(tensor, nn.Parameter) or id(tensor) in self._own

    def _keep_kind(self, func: Any, given: Sequence[Tensor], result: Any) -> None:
        kinds = [self._kind(tensor) for tensor in given]
        if all(kind & _CONSTANT for kind in kinds):
            kind = _CONSTANT
            if kinds and (func in f.REGROUPING or func in f.PERMUTING or func in f.KEEPING or func in f.INDEXING):
                kind |= min(kinds) & _WEIGHT
        elif func in CONTRACTIONS or func in f.PROJECTING:
            kind = _MIXED
        else:
            kind = _MIXED if any(kind & _MIXED for kind in kinds) else 0
        if kind:
            for tensor in _tensors((result,), {}):
                if not self._is_own(tensor):
                    self._kinds[tensor] = kind

    # Products --------------------------------------------------------------------------------------------------------

    def _contract(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        found = contraction(func, args, kwargs)
        if found is None or not isinstance(result, Tensor):
            for tensor in _tensors(args, kwargs):
                self._break(tensor, func)
            return
        left, right, letters = found
        notes = self._note(left), self._note(right)
        which = 0 if isinstance(notes[0], Weights) else 1
        if isinstance(notes[which], Weights) and not isinstance(notes[1 - which], Scores | Weights):
            self._apply(notes[which], which, (left, right), letters, result)
        elif any(isinstance(note, Scores | Weights) for note in notes):
            for tensor in (left, right):
                self._break(tensor, func)
        elif self._are_activations(left, right):
            dims = labelled(left, right, letters, None, 0)
            if dims is None or result.shape != torch.Size([entries(d) for d in dims[2]]):
                return
            summed = contracted(*dims)
            scores = Scores(ScoreProduct(left, right, dims[0], dims[1], summed, self._path()), dims[2])
            if func in BADDBMM:
                scores = self._with_addend(scores, args, kwargs)
            self._keep(result, scores)

    def _with_addend(self, scores: Scores, args: Any, kwargs: Any) -> Scores:
        """``baddbmm``: beta · input + alpha · product."""
        beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
        scores = scores.then("mul", float(alpha)) if alpha != 1 else scores
        return added(scores, args[0], beta, self._moves) if beta else scores

    def _are_activations(self, left: Tensor, right: Tensor) -> bool:
        kinds = self._kind(left), self._kind(right)
        floating = left.is_floating_point() and right.is_floating_point()
        # Learned queries are computed from parameters too; so are weights that are made ready first, but in two dimensions.
        made = [tensor.dim() < 3 for tensor, kind in zip((left, right), kinds, strict=True) if kind & _CONSTANT]
        return floating and not any(k & _WEIGHT for k in kinds) and (len(made) != 1 or not made[0])

    def _apply(self, weights: Weights, which: int, factors: Any, letters: Any, result: Tensor) -> None:
        """Weights on values."""
        value = factors[1 - which]
        dims = labelled(factors[0], factors[1], letters, weights.dims, which)
        if dims is None:
            return self._lose(weights, "its weights meet values in an unknown layout")
        summed = contracted(dims[0], dims[1], dims[2])
        own = dims[1 - which]
        if set(whole(summed)) != set(whole(weights.keys)):
            return self._lose(weights, "its weights are multiplied by something else than a value for each key")
        values = tuple(label for label in of(own) if label in of(dims[2]) and label not in of(weights.dims))
        product = weights.scores.product
        sides = of(product.left_dims), of(product.right_dims)
        side = 0 if set(whole(weights.keys)) <= set(sides[1]) else 1
        queries = tuple(label for label in sides[side] if label not in sides[1 - side])
        path = _common(product.path, weights.path, self._path())
        owner = _owner(path) or self.model
        self._open.pop(weights.token, None)
        output = Output(read_weights(weights, value, own, owner, self.capture), dims[2], values, queries, path)
        self._follow_from(result, output)
        return None

    # Steps -----------------------------------------------------------------------------------------------------------

    def _follow(self, func: Any, args: Any, kwargs: Any, noted: Any, result: Any) -> None:
        # Products that lost their way, as of queries with positions, are numbers like others beside scores.
        noted = sorted(noted, key=lambda each: _lostness(each[1]))
        tensor, note = noted[0]
        if isinstance(note, Output):
            self._follow_output(func, args, tensor, note, result)
        elif isinstance(note, Reduction):
            if func in f.REGROUPING or func in f.KEEPING or func in f.INDEXING:
                self._keep(result, note)
        elif isinstance(note, Weights):
            after = weights_after(func, args, kwargs, tensor, note, result)
            if after.broken is None:
                self._keep(result, after)
            else:
                self._lose(note, after.broken)
        else:
            others = [other for given, other in noted[1:] if given is not tensor]
            after = scores_after(func, args, kwargs, tensor, note, others, result, self._moves)
            if func in f.SOFTMAX and isinstance(after, Scores):
                self._softmax(args, kwargs, tensor, after, result)
            elif is_largest(func, args):
                for part in _tensors((result,), {}):
                    self._keep(part, Reduction(note))
            elif func in f.ASSIGNING:
                self._keep(tensor, after)
            elif after is not None:
                self._keep(result, after)

    def _moves(self, value: Any) -> bool:
        return isinstance(value, Tensor) and bool(self._kind(value) & _MIXED)

    def _softmax(self, args: Any, kwargs: Any, tensor: Tensor, note: Scores, result: Tensor) -> None:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if not isinstance(dim, int):
            return
        path = _common(note.product.path, self._path())
        if note.broken is not None:
            self._begin(path, note.broken)
            return
        keys = whole(note.dims[dim])
        if note.extended is not None:
            whole_keys, plain = note.extended
            keys = plain if keys == (whole_keys,) else keys
        product = note.product
        sides = set(of(product.left_dims)), set(of(product.right_dims))
        if not any(set(keys) <= own - other for own, other in (sides, sides[::-1])):
            self._begin(path, "its softmax does not run over the keys alone")
            return
        taken = None if note.affine else tensor
        original = None if note.affine else (result, note.dims)
        token = self._begin(path, "its attention weights were not seen on values")
        self._keep(result, Weights(note, note.dims, keys, path, token, taken, original))

    def _begin(self, path: Path, reason: str) -> int:
        """Something that is refused for this reason unless it comes to an end."""
        self._begun += 1
        self._open[self._begun] = path, reason
        return self._begun

    # Outputs ---------------------------------------------------------------------------------------------------------

    def _fused(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        path = self._path()
        owner = _owner(path) or self.model
        found = FUSED[func](args, kwargs, owner, path, self.capture)
        if isinstance(found, Output):
            self._follow_from(result[0] if isinstance(result, tuple) else result, found)
        elif isinstance(found, str):
            self._refuse(path, found)

    def _lose(self, note: Weights | Output, reason: str) -> None:
        """Why something will not be read, if it never is: weights that have met their values may be averaged as well."""
        if note.token in self._open:
            self._open[note.token] = note.path, reason

    def _follow_from(self, tensor: Tensor, output: Output) -> None:
        token = self._begin(output.path, "its output was not followed to a projection")
        self._keep(tensor, replace(output, token=token))

    def _follow_output(self, func: Any, args: Any, tensor: Tensor, note: Output, result: Any) -> None:
        if not isinstance(result, Tensor):
            return
        dims = reshaped(func, args, {}, tensor, note.dims, result)
        if dims is not None:
            note = replace(note, dims=dims)
            last = whole(dims[-1]) if dims else ()
            if set(last) > set(whole(note.values)):
                self._deliver(note, result, None)
            else:
                self._keep(result, note)
        elif result.shape == tensor.shape:
            self._keep(result, note if note.frozen else replace(note, frozen=(tensor, note.dims)))
        else:
            self._lose(note, f"its output goes through {named(func)}")

    def _ends_output(self, func: Any, args: Any, noted: Any) -> bool:
        """Whether the function takes an output that is still followed as what it is: a projection, or another product."""
        found = [(tensor, note) for tensor, note in noted if isinstance(note, Output)]
        if not found or not (func in CONTRACTIONS or func in f.PROJECTING):
            return False
        tensor, note = found[0]
        if func in EINSUMS:
            spelled = contraction(func, args, {})
            if spelled is not None and self._kind(spelled[1] if spelled[0] is tensor else spelled[0]) & _CONSTANT:
                letters = spelled[2][0 if spelled[0] is tensor else 1]
                gone = [dim for letter, dim in zip(letters, note.dims, strict=True) if letter not in spelled[2][2]]
                self._deliver(note, tensor, whole(label for dim in gone for label in dim))
                return True
        others = [other for other in _tensors(args, {}) if other is not tensor]
        if any(not self._kind(other) & _CONSTANT for other in others):
            self._lose(note, "its output is multiplied by another activation")
        else:
            self._deliver(note, tensor, None)
        return True

    def _deliver(self, note: Output, tensor: Tensor, last: Dim | None) -> None:
        """Give the call to the observer, or refuse it."""
        layout = layout_of(note, last)
        self._open.pop(note.token, None)
        self._notes.pop(tensor, None)
        if isinstance(layout, HeadLayout):
            output, dims = (tensor, note.dims) if note.frozen is None else note.frozen
            output = merged(output, dims, (layout.batch, layout.tokens, layout.heads, layout.values))
            call = note.read(layout, output)
        else:
            call = layout
        if isinstance(call, str):
            self._refuse(note.path, call)
        elif self.capture.projections is not None:
            self.capture.projections.append((call.query, call.key, call.value))
            raise StopAfterQuery
        else:
            replaced = self.capture.observe(call)
            if replaced is not None and isinstance(layout, HeadLayout):
                self._replaced = tensor, self._in_place_of(tensor, replaced, note, layout)

    def _in_place_of(self, tensor: Tensor, replaced: Tensor, note: Output, layout: HeadLayout) -> Tensor:
        """Another output, (B, L, H, Dv), in the layout that the output's tensor has."""
        groups = layout.batch, layout.tokens, layout.heads, layout.values
        if note.frozen is not None and not torch.equal(
            tensor, unmerged(merged(*note.frozen, groups), groups, note.dims)
        ):
            name = self.capture.names.get(_owner(note.path) or self.model, "")
            raise InputError(
                f"the attention of {name or 'the module'} cannot be replaced: its output is changed before its heads are merged"
            )
        return unmerged(replaced.to(tensor.dtype), groups, note.dims)

    # Modules ---------------------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether some part of the model is running."""
        return bool(self._running)

    def owner(self) -> nn.Module:
        """The module that is running, as a site has it."""
        return _owner(self._path()) or self.model

    def refuse(self, reason: str) -> None:
        """Say why the attention of the module that is running cannot be read."""
        self._refuse(self._path(), reason)

    def is_moving(self, tensor: Tensor) -> bool:
        """Whether a tensor was computed from activations that were projected."""
        return self._moves(tensor)

    def _path(self) -> Path:
        return tuple(self._running)

    def _break(self, tensor: Tensor, func: Any) -> None:
        note = self._note(tensor)
        if isinstance(note, Scores):
            self._keep(tensor, replace(note, broken=f"its scores go through {named(func)}"))
        elif isinstance(note, Weights):
            self._lose(note, f"its attention weights go through {named(func)}")

    def _refuse(self, path: Path, reason: str) -> None:
        owner = _owner(path) or self.model
        self.capture.refused.setdefault(self.capture.names.get(owner, ""), reason)

    def finish(self) -> None:
        """After the forward pass: what was begun and came to no end is refused."""
        for path, reason in self._open.values():
            self._refuse(path, reason)
        self._open.clear()


def _lostness(note: Any) -> int:
    """How far a product is from scores: 0 where it may be scores itself, more the less is known of what became of it."""
    if not isinstance(note, Scores):
        return 0
    if note.broken is not None:
        return 2
    return 0 if note.affine else 1


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _tensors(args: Any, kwargs: Any) -> Iterator[Tensor]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value, {})


def _common(*paths: Path) -> Path:
    """The modules around all of these places."""
    found = []
    for modules in zip(*paths, strict=False):
        if any(module is not modules[0] for module in modules):
            break
        found.append(modules[0])
    return tuple(found)


def _owner(path: Path) -> nn.Module | None:
    """The innermost module that has parameters; heads belong to their module, whose projections make the scores."""
    modules = (module for module in reversed(path) if not isinstance(module, Heads))
    return next((module for module in modules if next(module.parameters(), None) is not None), None)
