"""The tap: a function mode that follows scores from a product of two activations to their softmax and on to the values.

Each tensor on the way has a note of what it is: `Scores` (which product, what each dimension means, which steps were taken),
`Weights`, or `Output`. A note is held as long as its tensor lives. Once the output's heads are merged, or projected, it is
clear which dimensions are batch, heads and tokens, and the capture's observer gets an `AttentionCall`. What cannot be
followed is refused with its reason (`Capture.refused`), under the name of the innermost module around it that has parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from massieu.errors import InputError
from massieu.probing.capture.capture import Capture, StopAfterQuery, recomputing
from massieu.probing.capture.follow import functions as f
from massieu.probing.capture.follow.alive import WhileAlive
from massieu.probing.capture.follow.calls import CallPlace, HeadLayout, Output, layout_of, read_weights
from massieu.probing.capture.follow.contractions import (
    BADDBMM,
    CONTRACTIONS,
    EINSUMS,
    Contraction,
    contraction,
    contraction_dims,
)
from massieu.probing.capture.follow.dims import Dim, LabelledTensor, entries, labels_of, merged, unmerged, whole
from massieu.probing.capture.follow.functions import FunctionCall
from massieu.probing.capture.follow.fused import FOREIGN, FUSED, RUN_OPEN
from massieu.probing.capture.follow.origins import TensorOrigins, tensors_in
from massieu.probing.capture.follow.paths import Path, common_path, owner_of
from massieu.probing.capture.follow.scores import Reduction, ScoreProduct, Scores, Weights
from massieu.probing.capture.follow.steps import added, is_largest, reshaped, scores_after, weights_after
from massieu.probing.capture.functions_called import FunctionMode
from massieu.probing.model.watching import hooked, mapped

Note = Scores | Weights | Output | Reduction


@dataclass(frozen=True, eq=False)
class _NotedTensor:
    """An argument of a function, and what it is."""

    tensor: Tensor
    note: Note


@dataclass(frozen=True, eq=False)
class _ReplacedOutput:
    """An attention output, and what takes its place in the next functions."""

    output: Tensor
    replacement: Tensor

    def put_into(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of a function, with the replacement where they hold the output."""
        return mapped((tuple(args), kwargs), lambda tensor: self.replacement if tensor is self.output else tensor)


@dataclass(frozen=True)
class _Unread:
    """A product or a softmax of which nothing was read yet, and why not, if nothing ever is."""

    path: Path
    reason: str


class ScoreFollower(FunctionMode):
    """Hands every attention call that it can follow to the capture while it is entered."""

    def __init__(self, model: nn.Module, capture: Capture) -> None:
        super().__init__()
        self.model = model
        self.capture = capture
        self._notes = _Notes()
        self._origins = TensorOrigins(model)
        self._running: list[nn.Module] = []
        self._unread: dict[int, _Unread] = {}
        self._latest_token = 0
        self._replaced: _ReplacedOutput | None = None

    def __enter__(self) -> "ScoreFollower":
        # Scripted modules take no such hooks.
        modules = [module for module in self.model.modules() if not isinstance(module, torch.jit.ScriptModule)]
        self._hooks = hooked(modules, before=self._enter, after=self._leave, elsewhere=self._disturbed)
        self._hooks.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.__exit__(*error)
        self._running.clear()
        self._notes.clear()
        self._origins.clear()

    def _disturbed(self) -> None:
        """Another thread runs a part of the model, where a function mode of this one sees nothing."""
        if not recomputing():
            self.capture.disturbed = True

    def _enter(self, module: nn.Module, *_: Any) -> None:
        self._running.append(module)

    def _leave(self, module: nn.Module, *_: Any) -> None:
        # Modules inside that ended with an error were not left.
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
            self._refuse_foreign(func)
        if func in RUN_OPEN:
            super().__enter__()  # its own code, step by step
            try:
                return RUN_OPEN[func](*args, **kwargs)
            finally:
                super().__exit__(None, None, None)
        inputs = list(tensors_in(*(args[:1] if func in f.SHAPED_LIKE else args), *kwargs.values()))
        noted = self._notes.noted(inputs)
        if noted and self._ends_output(func, args, noted):
            noted = [each for each in noted if not isinstance(each.note, Output)]
        replaced = self._take_replaced()
        if replaced is not None:
            args, kwargs = replaced.put_into(args, kwargs)
        result = func(*args, **kwargs)
        self._origins.note(func, inputs, result)
        call = FunctionCall(func, args, kwargs, result)
        if func in FUSED:
            self._read_fused(call)
        elif func in CONTRACTIONS:
            self._follow_product(call)
        elif noted and func not in f.UNRELATED:
            self._follow_step(call, noted)
        replaced = self._take_replaced()
        return result if replaced is None else replaced.replacement

    def _take_replaced(self) -> _ReplacedOutput | None:
        replaced = self._replaced
        self._replaced = None
        return replaced

    def _refuse_foreign(self, operator: Any) -> None:
        """A library's own operator that attends: its name says so, what it is given is its own affair."""
        name = str(getattr(operator, "_qualified_op_name", operator))
        library = name.partition("::")[0]
        if library in FOREIGN or any(library.startswith(f"{foreign}_") for foreign in FOREIGN):
            self.refuse(f"it attends by {name}, an operator that is not read")

    # Products --------------------------------------------------------------------------------------------------------

    def _follow_product(self, call: FunctionCall) -> None:
        """A product is scores, weights on values, or the end of what was followed."""
        product = contraction(call.func, call.args, call.kwargs)
        if product is None or not isinstance(call.result, Tensor):
            for tensor in tensors_in(*call.args, *call.kwargs.values()):
                self._break(tensor, call)
            return
        left_note, right_note = (self._notes.of(tensor) for tensor in product.factors)
        if isinstance(left_note, Weights) and not isinstance(right_note, Scores | Weights):
            self._apply(left_note, 0, product, call.result)
        elif isinstance(right_note, Weights) and not isinstance(left_note, Scores | Weights):
            self._apply(right_note, 1, product, call.result)
        elif isinstance(left_note, Scores | Weights) or isinstance(right_note, Scores | Weights):
            for tensor in product.factors:
                self._break(tensor, call)
        elif self._origins.are_activations(*product.factors):
            self._begin_scores(call, product)

    def _begin_scores(self, call: FunctionCall, product: Contraction) -> None:
        dims = contraction_dims(product)
        if call.result.shape != torch.Size([entries(dim) for dim in dims.result]):
            return
        left, right = (LabelledTensor(*each) for each in zip(product.factors, dims.factors, strict=True))
        scores = Scores(ScoreProduct(left, right, dims.summed(), self._path()), dims.result)
        if call.func in BADDBMM:
            scores = self._with_addend(scores, call)
        self._notes.keep(call.result, scores)

    def _with_addend(self, scores: Scores, call: FunctionCall) -> Scores:
        """``baddbmm``: beta · input + alpha · product."""
        beta = call.kwargs.get("beta", 1)
        alpha = call.kwargs.get("alpha", 1)
        if alpha != 1:
            scores = scores.then("mul", float(alpha))
        return added(scores, call.args[0], beta, self.is_moving) if beta else scores

    def _apply(self, weights: Weights, which: int, product: Contraction, result: Tensor) -> None:
        """Weights on values.

        Args:
            which: the factor that the weights are, 0 or 1.
        """
        dims = contraction_dims(product, weights.dims, which)
        value_factor = 1 - which
        if set(whole(dims.summed())) != set(whole(weights.keys)):
            self._lose(weights, "its weights are multiplied by something else than a value for each key")
            return
        value = LabelledTensor(product.factors[value_factor], dims.factors[value_factor])
        result_labels = labels_of(dims.result)
        weight_labels = labels_of(weights.dims)
        value_labels = tuple(label for label in value.labels() if label in result_labels and label not in weight_labels)
        scores = weights.scores.product
        path = common_path(scores.path, weights.path, self._path())
        self._unread.pop(weights.token, None)
        output = Output(
            read_weights(weights, value, self._place(path)),
            dims.result,
            values=value_labels,
            queries=_query_labels(weights),
            path=path,
        )
        self._begin_output(result, output)

    # Steps -----------------------------------------------------------------------------------------------------------

    def _follow_step(self, call: FunctionCall, noted: Sequence[_NotedTensor]) -> None:
        """What becomes of a tensor with a note in a function that is no product."""
        # Products that lost their way, as of queries with positions, are numbers like others beside scores.
        noted = sorted(noted, key=lambda each: _lostness(each.note))
        tensor = noted[0].tensor
        note = noted[0].note
        if isinstance(note, Output):
            self._follow_output(call, tensor, note)
        elif isinstance(note, Reduction):
            if call.func in f.REGROUPING or call.func in f.KEEPING or call.func in f.INDEXING:
                self._notes.keep(call.result, note)
        elif isinstance(note, Weights):
            weights = weights_after(call, tensor, note)
            if weights.broken is None:
                self._notes.keep(call.result, weights)
            else:
                self._lose(note, weights.broken)
        else:
            others = [each.note for each in noted[1:] if each.tensor is not tensor]
            self._follow_scores(call, tensor, note, others)

    def _follow_scores(self, call: FunctionCall, tensor: Tensor, scores: Scores, others: Sequence[Note]) -> None:
        after = scores_after(call, tensor, scores, others, self.is_moving)
        if call.func in f.SOFTMAX and isinstance(after, Scores):
            self._softmax(call, tensor, after)
        elif is_largest(call):
            for part in tensors_in(call.result):
                self._notes.keep(part, Reduction(scores))
        elif call.func in f.ASSIGNING:
            self._notes.keep(tensor, after)
        elif after is not None:
            self._notes.keep(call.result, after)

    def _softmax(self, call: FunctionCall, tensor: Tensor, scores: Scores) -> None:
        dim = call.argument(1, "dim")
        if not isinstance(dim, int):
            return
        path = common_path(scores.product.path, self._path())
        if scores.broken is not None:
            self._begin(path, scores.broken)
            return
        keys = whole(scores.dims[dim])
        if scores.extended is not None and keys == (scores.extended.label,):
            keys = scores.extended.keys
        left = set(scores.product.left.labels())
        right = set(scores.product.right.labels())
        if not (set(keys) <= left - right or set(keys) <= right - left):
            self._begin(path, "its softmax does not run over the keys alone")
            return
        token = self._begin(path, "its attention weights were not seen on values")
        weights = Weights(scores, scores.dims, keys, path, token)
        if not scores.affine:
            weights = replace(weights, taken=tensor, original=LabelledTensor(call.result, scores.dims))
        self._notes.keep(call.result, weights)

    def _begin(self, path: Path, reason: str) -> int:
        """Something that is refused for this reason unless it comes to an end."""
        self._latest_token += 1
        self._unread[self._latest_token] = _Unread(path, reason)
        return self._latest_token

    def _lose(self, note: Weights | Output, reason: str) -> None:
        """Why something will not be read, if it never is: weights that have met their values may be averaged as well."""
        if note.token in self._unread:
            self._unread[note.token] = _Unread(note.path, reason)

    def _break(self, tensor: Tensor, call: FunctionCall) -> None:
        """Scores or weights enter a function that is not followed."""
        note = self._notes.of(tensor)
        if isinstance(note, Scores):
            self._notes.keep(tensor, replace(note, broken=f"its scores go through {call.name()}"))
        elif isinstance(note, Weights):
            self._lose(note, f"its attention weights go through {call.name()}")

    # Outputs ---------------------------------------------------------------------------------------------------------

    def _read_fused(self, call: FunctionCall) -> None:
        path = self._path()
        output = FUSED[call.func](call.args, call.kwargs, self._place(path))
        if isinstance(output, Output):
            result = call.result[0] if isinstance(call.result, tuple) else call.result
            self._begin_output(result, output)
        else:
            self._refuse(path, output)

    def _begin_output(self, tensor: Tensor, output: Output) -> None:
        token = self._begin(output.path, "its output was not followed to a projection")
        self._notes.keep(tensor, replace(output, token=token))

    def _follow_output(self, call: FunctionCall, tensor: Tensor, output: Output) -> None:
        result = call.result
        if not isinstance(result, Tensor):
            return
        dims = reshaped(call, tensor, output.dims)
        if dims is not None:
            output = replace(output, dims=dims)
            last = whole(dims[-1]) if dims else ()
            if set(last) > set(whole(output.values)):
                self._deliver(output, result, None)
            else:
                self._notes.keep(result, output)
        elif result.shape == tensor.shape:
            # An elementwise change, as by a gate: the call keeps what attention gave.
            frozen = output.frozen or LabelledTensor(tensor, output.dims)
            self._notes.keep(result, replace(output, frozen=frozen))
        else:
            self._lose(output, f"its output goes through {call.name()}")

    def _ends_output(self, func: Any, args: Any, noted: Sequence[_NotedTensor]) -> bool:
        """Whether the function takes an output that is still followed as what it is: a projection, or another product."""
        if not (func in CONTRACTIONS or func in f.PROJECTING):
            return False
        tensor = output = None
        for each in noted:
            if isinstance(each.note, Output):
                tensor, output = each.tensor, each.note
                break
        if tensor is None or output is None:
            return False
        if func in EINSUMS and self._ends_in_einsum(contraction(func, args, {}), tensor, output):
            return True
        others = [other for other in tensors_in(*args) if other is not tensor]
        if all(self._origins.is_constant(other) for other in others):
            self._deliver(output, tensor, None)
        else:
            self._lose(output, "its output is multiplied by another activation")
        return True

    def _ends_in_einsum(self, product: Contraction | None, tensor: Tensor, output: Output) -> bool:
        """Whether an einsum projects an output whose heads are not merged: it sums over heads and values."""
        if product is None:
            return False
        which = 0 if product.factors[0] is tensor else 1
        if not self._origins.is_constant(product.factors[1 - which]):
            return False
        letters = zip(product.letters[which], output.dims, strict=True)
        summed = [dim for letter, dim in letters if letter not in product.result_letters]
        self._deliver(output, tensor, labels_of(summed))
        return True

    def _deliver(self, output: Output, tensor: Tensor, last: Dim | None) -> None:
        """Give the call to the observer, or refuse it."""
        layout = layout_of(output, last)
        self._unread.pop(output.token, None)
        self._notes.forget(tensor)
        if isinstance(layout, str):
            self._refuse(output.path, layout)
            return
        attended = output.frozen or LabelledTensor(tensor, output.dims)
        call = output.read(layout, merged(attended, (layout.batch, layout.tokens, layout.heads, layout.values)))
        if isinstance(call, str):
            self._refuse(output.path, call)
            return
        if self.capture.projections is not None:
            self.capture.projections.append((call.query, call.key, call.value))
            raise StopAfterQuery
        replacement = self.capture.observe(call)
        if replacement is not None:
            self._replaced = _ReplacedOutput(tensor, self._in_place_of(tensor, replacement, output, layout))

    def _in_place_of(self, tensor: Tensor, replacement: Tensor, output: Output, layout: HeadLayout) -> Tensor:
        """Another output, (B, L, H, Dv), in the layout that the output's tensor has."""
        groups = layout.batch, layout.tokens, layout.heads, layout.values
        if output.frozen is not None and not torch.equal(
            tensor, unmerged(merged(output.frozen, groups), groups, output.dims)
        ):
            name = self.capture.names.get(owner_of(output.path) or self.model, "")
            raise InputError(
                f"the attention of {name or 'the module'} cannot be replaced: its output is changed before its heads are merged"
            )
        return unmerged(replacement.to(tensor.dtype), groups, output.dims)

    # Modules ---------------------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether some part of the model is running."""
        return bool(self._running)

    def owner(self) -> nn.Module:
        """The module that is running, as a site has it."""
        return self._place(self._path()).owner

    def refuse(self, reason: str) -> None:
        """Say why the attention of the module that is running cannot be read."""
        self._refuse(self._path(), reason)

    def is_moving(self, value: Any) -> bool:
        """Whether something is a tensor that was computed from activations that were projected."""
        return self._origins.is_projected(value)

    def _path(self) -> Path:
        return tuple(self._running)

    def _place(self, path: Path) -> CallPlace:
        return CallPlace(owner_of(path) or self.model, path, self.capture)

    def _refuse(self, path: Path, reason: str) -> None:
        owner = owner_of(path) or self.model
        self.capture.refused.setdefault(self.capture.names.get(owner, ""), reason)

    def finish(self) -> None:
        """After the forward pass: what was begun and came to no end is refused."""
        for unread in self._unread.values():
            self._refuse(unread.path, unread.reason)
        self._unread.clear()


class _Notes:
    """What tensors are, each as long as its tensor lives and is not changed in place."""

    def __init__(self) -> None:
        self._notes: WhileAlive[tuple[int, Note | None]] = WhileAlive()

    def of(self, tensor: Tensor) -> Note | None:
        """The note of a tensor; None where it has none, or was changed since."""
        entry = self._notes.get(tensor)
        if entry is None:
            return None
        version, note = entry
        return note if version == _version(tensor) else None

    def noted(self, tensors: Sequence[Tensor]) -> list[_NotedTensor]:
        """Those of the tensors that have a note."""
        notes = ((tensor, self.of(tensor)) for tensor in tensors)
        return [_NotedTensor(tensor, note) for tensor, note in notes if note is not None]

    def keep(self, tensor: Any, note: Note | None) -> None:
        """Note what a tensor is; of anything else nothing."""
        if isinstance(tensor, Tensor):
            self._notes.keep(tensor, (_version(tensor), note))

    def forget(self, tensor: Tensor) -> None:
        self._notes.forget(tensor)

    def clear(self) -> None:
        self._notes.clear()


def _query_labels(weights: Weights) -> Dim:
    """The labels that queries have and keys have not."""
    left = weights.scores.product.left.labels()
    right = weights.scores.product.right.labels()
    # The softmax runs over the labels of the key.
    query, key = (left, right) if set(whole(weights.keys)) <= set(right) else (right, left)
    return tuple(label for label in query if label not in key)


def _lostness(note: Note) -> int:
    """How far a product is from scores: 0 where it may be scores itself, more the less is known of what became of it."""
    if not isinstance(note, Scores):
        return 0
    if note.broken is not None:
        return 2
    return 0 if note.affine else 1


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
