"""How a constructor makes each tensor of a model: recorded without any memory, and computed anew for some tensors alone.

The constructor itself runs, on PyTorch's meta device, where tensors have shapes and no numbers. What it does to each piece of
memory is written down. A tensor's numbers are then what those operations give: the law of every parameter is the
constructor's because it is the constructor's own code, whatever it initialises and in whichever order.
"""

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from massieu.probing.model.seeding import draws_numbers, with_generator

_aten = torch.ops.aten
_META = torch.device("meta")
_TRUNCATED_NORMAL = torch.nn.init._no_grad_trunc_normal_
_OF_NUMBERS = {_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default}
_EXCHANGING = {"aten::set_", "aten::resize_", "aten::resize_as_"}
# Small tensors without anything random, which constructors ask for their numbers.
_AT_ONCE = {
    _aten.arange.default,
    _aten.arange.start,
    _aten.arange.start_step,
    _aten.linspace.default,
    _aten.scalar_tensor.default,
}
_CONSTANT = {_aten.fill_.Scalar, _aten.zero_.default}
_OVERWRITING = {_aten.normal_.default, _aten.uniform_.default, _aten.copy_.default} | _CONSTANT
_BY_ELEMENT = {
    _TRUNCATED_NORMAL,
    _aten.normal_.default,
    _aten.uniform_.default,
    _aten.erfinv_.default,
    _aten.clamp_.default,
    _aten.mul_.Scalar,
    _aten.div_.Scalar,
    _aten.add_.Scalar,
    _aten.mul_.Tensor,
    _aten.div_.Tensor,
    _aten.add_.Tensor,
} | _CONSTANT
_OF_A_SIZE = {_aten.empty.memory_format, _aten.zeros.default, _aten.ones.default, _aten.full.default}
_LOCK = threading.Lock()
ROWS = 16
"""Rows of a table that one generator draws: of so many of which one is used, all are drawn."""

GeneratorOf = Callable[["Operation", int], torch.Generator]
"""The generator of an operation that draws, and of a block of a table's rows (0 for a whole tensor)."""


class UnrecordedError(Exception):
    """A constructor does what cannot be recorded, for the reason that it holds."""


@dataclass(frozen=True)
class View:
    """Where a tensor lies in a piece of memory."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    covers: bool
    """It is contiguous, and all of the memory."""

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor in a piece of memory that has numbers."""
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(
            storage, self.offset, self.size, self.stride
        )


@dataclass(frozen=True, eq=False)
class Operation:
    """What a constructor did to memory once.

    Attributes:
        number: its place among all.
        arguments, keywords: tensors in them are views.
        created: of its results in order, those in new memory.
        reads, writes: pieces of memory; what it writes it may read too.
        draws: it takes random numbers.
        whole: all that was in the memory before is overwritten.
        place: how many operations wrote its memory before.
    """

    number: int
    function: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    created: dict[int, View]
    reads: frozenset[int]
    writes: frozenset[int]
    draws: bool
    whole: bool
    place: int

    def run(self, storages: dict[int, torch.UntypedStorage], generator_of: GeneratorOf) -> None:
        """Do it again to memory that has numbers."""
        arguments = [_in_memory(argument, storages) for argument in self.arguments]
        keywords = {name: _in_memory(argument, storages) for name, argument in self.keywords.items()}
        if self.draws:
            keywords["generator"] = generator_of(self, 0)
        results = tree_leaves(self.function(*arguments, **keywords))
        for place, view in self.created.items():
            result = results[place]
            layout = (tuple(result.shape), result.stride(), result.storage_offset())
            if layout != (view.size, view.stride, view.offset):
                raise UnrecordedError(f"{self.function} lays its result out in another way than on the meta device")
            storages[view.storage] = result.untyped_storage()

    @property
    def target(self) -> View | None:
        """What an operation in place works on."""
        return self.arguments[0] if self.arguments and isinstance(self.arguments[0], View) else None


def _in_memory(argument: Any, storages: dict[int, torch.UntypedStorage]) -> Any:
    """An argument of an operation, with tensors for its views."""
    if isinstance(argument, View):
        return argument.of(storages[argument.storage])
    if isinstance(argument, list | tuple):  # of tensors, as of `torch.cat`
        return tree_map_only(View, lambda view: view.of(storages[view.storage]), argument)
    return argument


@dataclass(eq=False)
class Record:
    """All that a constructor did to memory.

    Attributes:
        constants: numbers that came from elsewhere, by their memory.
        writers: the operations that write each piece of memory, in order.
        names: of the memory of named tensors: what is drawn for them depends on these, and not on what else there is.
    """

    operations: list[Operation] = field(default_factory=list)
    constants: dict[int, Tensor] = field(default_factory=dict)
    writers: dict[int, list[Operation]] = field(default_factory=lambda: defaultdict(list))
    names: dict[int, str] = field(default_factory=dict)
    _held: dict[int, torch.UntypedStorage] = field(default_factory=dict)  # else another would be given its number

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in memory that was recorded."""
        return tensor.is_meta and _number(tensor) in self._held

    def view(self, tensor: Tensor) -> View:
        """Where a recorded tensor lies.

        Raises:
            UnrecordedError: it was made where nothing is recorded.
        """
        if not self.knows(tensor):
            raise UnrecordedError(f"a tensor of shape {tuple(tensor.shape)} comes from what is not recorded")
        covers = tensor.is_contiguous() and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        offset = int(tensor.storage_offset())
        return View(_number(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), offset, covers)

    def hold(self, tensor: Tensor) -> None:
        """Know the memory of a tensor from here on."""
        self._held[_number(tensor)] = tensor.untyped_storage()

    def add(self, operation: Operation) -> None:
        """Write down one more operation."""
        self.operations.append(operation)
        for storage in operation.writes:
            self.writers[storage].append(operation)

    def history(self, storage: int) -> list[Operation]:
        """The operations on which the numbers in a piece of memory depend, in order."""
        needed: dict[int, Operation] = {}
        open_ends = [(storage, len(self.operations))]
        while open_ends:
            memory, before = open_ends.pop()
            earlier = [each for each in self.writers[memory] if each.number < before]
            for operation in reversed(earlier):
                if operation.number not in needed:
                    needed[operation.number] = operation
                    others = (operation.reads | operation.writes) - {memory}
                    open_ends += [(other, operation.number) for other in others]
                if operation.whole:
                    break
        return [needed[number] for number in sorted(needed)]

    def numbers(self, view: View, generator_of: GeneratorOf) -> Tensor:
        """A tensor's numbers, alone in main memory."""
        history = self.history(view.storage)
        touched = {view.storage}.union(*(each.reads | each.writes for each in history))
        created = {made.storage for each in history for made in each.created.values()}
        storages = {storage: self._memory(storage) for storage in touched - created}
        for operation in history:
            operation.run(storages, generator_of)
        return view.of(storages[view.storage])

    def numbers_on(self, device: torch.device, view: View, generator_of: GeneratorOf) -> Tensor:
        """`numbers` of a tensor that is drawn element by element, on a device."""
        storages = {view.storage: torch.UntypedStorage(self._held[view.storage].nbytes(), device=device)}
        for operation in self.history(view.storage):
            if not operation.created:
                operation.run(storages, generator_of)
            elif operation.function is not _aten.empty.memory_format:
                made = operation.function(*operation.arguments, **operation.keywords, device=device)
                for created in operation.created.values():  # there is memory for it already
                    created.of(storages[view.storage]).copy_(made)
        return view.of(storages[view.storage])

    def by_element(self, view: View) -> bool:
        """Whether nothing but functions of each element by itself makes a tensor, which are the same on every device."""
        history = self.history(view.storage)
        return view.storage not in self.constants and all(
            each.writes == {view.storage} and not each.reads and each.function in _BY_ELEMENT | _OF_A_SIZE
            for each in history
        )

    def _memory(self, storage: int) -> torch.UntypedStorage:
        """Memory as it was when it came from elsewhere, or that is about to be filled."""
        if storage in self.constants:
            return self.constants[storage].clone().untyped_storage()
        return torch.UntypedStorage(self._held[storage].nbytes())

    def all_numbers(self, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        """The numbers of every tensor, drawn in the order in which the constructor draws them."""
        storages = {storage: numbers.clone().untyped_storage() for storage, numbers in self.constants.items()}
        for operation in self.operations:
            operation.run(storages, lambda *_: generator)

        def numbers(tensor: Tensor) -> Tensor:
            return self.view(tensor).of(storages[_number(tensor)]) if self.knows(tensor) else tensor

        return numbers

    def by_rows(self, view: View) -> list[Operation] | None:
        """The operations that make a table, where each of its rows is drawn apart from the others; else None."""
        history = self.history(view.storage)
        if not view.covers or len(view.size) < 2 or view.storage in self.constants:
            return None
        is_drawn_by_rows = all(
            each.writes == {view.storage}
            and not each.reads
            and (each.function in _OF_A_SIZE or _of_all_rows(each, view) or _row_of(each, view) is not None)
            for each in history
        )
        return history if is_drawn_by_rows else None


def rows(history: Sequence[Operation], view: View, block: int, generator_of: GeneratorOf) -> Tensor:
    """One block of `ROWS` rows of a table, made by the operations of `Record.by_rows`."""
    first = block * ROWS
    size = [min(ROWS, view.size[0] - first), *view.size[1:]]
    table_rows = torch.empty(size, dtype=view.dtype)
    for operation in history:
        row = None if _of_all_rows(operation, view) else _row_of(operation, view)
        if operation.created:
            table_rows = operation.function(size, *operation.arguments[1:], **operation.keywords)
        elif row is None or first <= row < first + len(table_rows):
            keywords = operation.keywords
            if operation.draws:
                keywords = keywords | {"generator": generator_of(operation, block)}
            target = table_rows if row is None else table_rows[row - first]
            operation.function(target, *operation.arguments[1:], **keywords)
    return table_rows


def _of_all_rows(operation: Operation, table: View) -> bool:
    return operation.target == table and operation.function in _BY_ELEMENT


def _row_of(operation: Operation, table: View) -> int | None:
    """The row to which an operation writes one number everywhere; None where it does something else."""
    target = operation.target
    width = math.prod(table.size[1:])
    if target is None or operation.function not in _CONSTANT or target.size != table.size[1:]:
        return None
    if target.offset % width != 0 or target.stride != table.stride[1:]:
        return None
    return target.offset // width


class Recording(TorchDispatchMode):
    """While it is active, tensors are made on the meta device, and what is done to their memory is written down.

    Attributes:
        record: all of it.

    Raises:
        UnrecordedError: something that was drawn is asked for its numbers, or memory is exchanged.
    """

    def __init__(self) -> None:
        super().__init__()
        self.record = Record()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = dict(kwargs or {})
        if func._schema.name in _EXCHANGING:
            raise UnrecordedError(f"{func} exchanges the memory of a tensor")
        if func in _OF_NUMBERS:
            return func(*tree_map_only(Tensor, self._constant, args), **keywords)
        tensors = [leaf for leaf in tree_leaves((args, keywords)) if isinstance(leaf, Tensor)]
        draws = draws_numbers(func, args, keywords)
        if not draws and not any(tensor.is_meta for tensor in tensors) and (tensors or func in _AT_ONCE):
            return func(*args, **keywords)  # nothing of it is random: it has its numbers at once
        return self._recorded(func, args, keywords, draws)

    def _recorded(self, function: Any, arguments: Any, keywords: dict[str, Any], draws: bool) -> Any:
        written = list(_written(function, arguments, keywords))
        if any(not tensor.is_meta for tensor in written):
            raise UnrecordedError(f"{function} changes a tensor that has numbers already")
        arguments, keywords = tree_map_only(Tensor, self._on_meta, (arguments, keywords))
        described = tree_map_only(Tensor, self.record.view, (arguments, keywords))
        names = [argument.name for argument in function._schema.arguments]
        if "device" in names:
            keywords["device"] = _META
        results = function(*arguments, **keywords)
        created = self._created(results)
        if "dtype" in names and created:  # the default when it was recorded, whatever it is later
            described[1]["dtype"] = next(iter(created.values())).dtype
        if written or created:
            self._add(function, described, [self.record.view(each) for each in written], created, draws)
        return results

    def _add(self, function: Any, described: Any, written: list[View], created: dict[int, View], draws: bool) -> None:
        record = self.record
        arguments, keywords = described
        keywords = {name: value for name, value in keywords.items() if name != "device"}
        views = [leaf for leaf in tree_leaves(described) if isinstance(leaf, View)]
        writes = frozenset(view.storage for view in (*written, *created.values()))
        reads = frozenset(view.storage for view in views) - writes
        reads_only_others = all(view.storage not in writes for view in views[1:])
        whole = function in _OVERWRITING and views[0].covers and reads_only_others
        place = max(len(record.writers[storage]) for storage in writes)
        function = with_generator(function) if draws else function
        operation = Operation(
            len(record.operations), function, arguments, keywords, created, reads, writes, draws, whole, place
        )
        record.add(operation)

    def record_truncated_normal(self, tensor: Tensor, *settings: float) -> Tensor:
        """Write down that a tensor is drawn from a truncated normal law, which is done by trial and error."""
        record = self.record
        view = record.view(tensor)
        operation = Operation(
            number=len(record.operations),
            function=_TRUNCATED_NORMAL,
            arguments=(view, *settings),
            keywords={},
            created={},
            reads=frozenset(),
            writes=frozenset({view.storage}),
            draws=True,
            whole=view.covers,
            place=len(record.writers[view.storage]),
        )
        record.add(operation)
        return tensor

    def _created(self, results: Any) -> dict[int, View]:
        """The results that lie in new memory, by their place."""
        created: dict[int, View] = {}
        for place, result in enumerate(tree_leaves(results)):
            if isinstance(result, Tensor) and not self.record.knows(result):
                if not result.is_meta:
                    raise UnrecordedError(f"a tensor is made on {result.device}")
                self.record.hold(result)
                created[place] = self.record.view(result)
        return created

    def _on_meta(self, tensor: Tensor) -> Tensor:
        """A tensor that comes from elsewhere as one of the record, with the numbers that it has now."""
        if tensor.is_meta:
            return tensor
        numbers = tensor.detach().clone(memory_format=torch.contiguous_format)
        recorded = torch.empty_like(numbers, device=_META)
        self.record.hold(recorded)
        self.record.constants[_number(recorded)] = numbers
        return recorded

    def _constant(self, tensor: Tensor) -> Tensor:
        """A tensor's numbers, where they depend on no random ones."""
        return self.record.numbers(self.record.view(tensor), _refused) if tensor.is_meta else tensor


@contextmanager
def recording() -> Iterator[Record]:
    """Inside, what constructors do to memory is written down in place of done.

    PyTorch draws truncated normal numbers by trial and error, and on the meta device not at all. So this one function is
    another one meanwhile in this thread, and the same as ever in all others.
    """
    thread = threading.get_ident()
    mode = Recording()

    def truncated_normal(tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None) -> Tensor:
        if threading.get_ident() != thread or not tensor.is_meta:
            return _TRUNCATED_NORMAL(tensor, mean, std, a, b, generator=generator)
        if generator is not None:
            raise UnrecordedError("its constructor draws from a generator of its own")
        return mode.record_truncated_normal(tensor, mean, std, a, b)

    with _LOCK:
        torch.nn.init._no_grad_trunc_normal_ = truncated_normal
        try:
            with mode:
                yield mode.record
        finally:
            torch.nn.init._no_grad_trunc_normal_ = _TRUNCATED_NORMAL


def _refused(operation: Operation, _: int) -> torch.Generator:
    raise UnrecordedError(f"its constructor asks for numbers that {operation.function} has drawn")


def _written(function: Any, arguments: Any, keywords: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operation changes."""
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = arguments[place] if place < len(arguments) else keywords.get(argument.name)
        yield from (each for each in tree_leaves(value) if isinstance(each, Tensor))


def _number(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
