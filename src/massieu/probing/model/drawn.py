"""A model with fresh random weights of which one block at a time is in memory.

Its modules are those that the constructor makes. Where one asks for a weight, the weight is computed from the record of the
constructor (`recorded.py`) and a seed, and kept until a weight of another block is asked for. What is outside the blocks,
such as a last norm, stays; of a table larger than a block the rows that are looked up are drawn, and no others. Every
weight depends on the seed and its own name alone, so that neither the order nor the number of the requests changes it.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from massieu.probing.model.recorded import ROWS, Operation, Record, UnrecordedError, View, rows
from massieu.probing.model.seeding import seed_of

_OWN_DICTIONARIES = {"_parameters", "_buffers", "_modules"}
_OF_VALUES = {"T", "H", "mT", "mH", "data", "real", "imag", "grad"}
_OF_SHAPE = {
    *("size", "dim", "numel", "nelement", "stride", "ndimension", "element_size", "storage_offset", "is_contiguous"),
    *("is_floating_point", "is_complex", "requires_grad_", "__len__", "__hash__", "untyped_storage", "data_ptr"),
}

DRAWING_DEVICES = frozenset({"cuda"})
"""Types of devices on which weights are drawn."""
_SCORED_ROWS = 64 * ROWS  # of a table, multiplied at once with what a head is given


@dataclass(frozen=True, eq=False)
class Weight:
    """A parameter of a recorded model, and how it is drawn.

    Attributes:
        block: the block to which it belongs; None outside of all.
        table: how its rows are made, where each of them is drawn apart from the others.
        by_element: it is made of functions of single elements, which every device has.
        by_rows: it is so large that rows of it are drawn where rows are enough.
    """

    name: str
    view: View
    block: str | None
    requires_grad: bool
    table: list[Operation] | None
    by_element: bool
    by_rows: bool


class DrawnWeights:
    """The weights of one draw.

    Attributes:
        seed: of all its random numbers.
        device, dtype: of the weights. They are drawn in the type that the constructor draws them in: on a GPU where each
            element is drawn by itself and by no table's rows, and else in main memory.
    """

    def __init__(self, record: Record, seed: int, device: torch.device | None, dtype: torch.dtype) -> None:
        self.record = record
        self.seed = seed
        self.device = device
        self.dtype = dtype
        self._block: str | None = None
        self._of_block: dict[str, nn.Parameter] = {}
        self._outside: dict[str, nn.Parameter] = {}

    def of(self, weight: Weight) -> nn.Parameter:
        """A weight; it stays what it is for whoever holds it, also when it is forgotten here."""
        if weight.block is not None and weight.block != self._block:
            self._block = weight.block
            self._of_block = {}
        parameters = self._outside if weight.block is None else self._of_block
        if weight.name not in parameters:
            with _computing():
                parameters[weight.name] = nn.Parameter(self._numbers(weight), weight.requires_grad)
        return parameters[weight.name]

    def at_work(self, weight: Weight) -> bool:
        """Whether weights of its block were the last to be asked for."""
        return weight.block is not None and weight.block == self._block

    def forget(self) -> None:
        """Keep no weight."""
        self._block = None
        self._of_block = {}
        self._outside = {}

    def tensor(self, tensor: Tensor) -> Tensor:
        """The numbers of any tensor of the recorded model, on the processor and in the type of the constructor."""
        if not self.record.knows(tensor):
            return tensor.detach().clone()
        with _computing():
            return self.record.numbers(self.record.view(tensor), self._generator)

    def placed(self, tensor: Tensor) -> Tensor:
        """On the device and, where it holds floating-point numbers, in the type of this draw."""
        return tensor.to(self.device, self.dtype if tensor.is_floating_point() else tensor.dtype)

    def rows(self, weight: Weight, numbers: Tensor) -> Tensor:
        """Some rows of a table, in the order of their numbers, no two of which are the same."""
        assert weight.table is not None
        parts_drawn: list[Tensor] = []
        with _computing():
            blocks, places = (numbers.cpu() // ROWS).unique_consecutive(return_counts=True)
            parts = (numbers.cpu() % ROWS).split(places.tolist())
            for block, part in zip(blocks.tolist(), parts, strict=True):
                block_rows = rows(weight.table, weight.view, block, self._generator)
                parts_drawn.append(self.placed(block_rows[part]))
        if not parts_drawn:
            return self.placed(torch.empty(0, *weight.view.size[1:]))
        return torch.cat(parts_drawn)

    def _numbers(self, weight: Weight) -> Tensor:
        if weight.table is not None:
            table = torch.empty(weight.view.size, dtype=weight.view.dtype)
            for block, part in enumerate(table.split(ROWS)):
                part.copy_(rows(weight.table, weight.view, block, self._generator))
            return self.placed(table)
        if weight.by_element and self.device is not None and self.device.type in DRAWING_DEVICES:
            generator = partial(self._generator, device=self.device)
            return self.placed(self.record.numbers_on(self.device, weight.view, generator))
        return self.placed(self.record.numbers(weight.view, self._generator))

    def _generator(self, operation: Operation, block: int, device: torch.device | None = None) -> torch.Generator:
        names = (self.record.names.get(storage) for storage in operation.writes)
        name = next(filter(None, names), f"operation {operation.number}")
        seed = seed_of(self.seed, name, operation.place, block)
        return torch.Generator(device or "cpu").manual_seed(seed)


@contextmanager
def _computing() -> Iterator[None]:
    """Nobody watches what is computed inside, and there are no gradients of it."""
    with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.no_grad():
        yield


class TableWeight(nn.Parameter):
    """A table of which rows are drawn when they are looked up; other functions are given the whole of it.

    Attributes:
        draw_all: gives the whole table.
        draw_rows: gives rows by their numbers.
    """

    draw_all: Callable[[], nn.Parameter]
    draw_rows: Callable[[Tensor], Tensor]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = dict(kwargs or {})
        if _of_shape(func):
            return super().__torch_function__(func, types, args, keywords)
        if func is nn.functional.embedding and keywords.get("max_norm") is None:
            return _looked_up(*args, **keywords)
        if func is nn.functional.linear and not torch.is_grad_enabled():
            return _scored(*args, **keywords)
        args, keywords = tree_map_only(TableWeight, lambda table: table.draw_all(), (args, keywords))
        return func(*args, **keywords)


def _of_shape(function: Any) -> bool:
    """Whether a function tells of a tensor what needs none of its numbers."""
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__"):
        return getattr(function.__self__, "__name__", "") not in _OF_VALUES
    return name in _OF_SHAPE


def _looked_up(input: Tensor, weight: TableWeight, *_: Any, **__: Any) -> Tensor:
    numbers, places = input.unique(return_inverse=True)
    table_rows = weight.draw_rows(numbers)
    if torch.is_grad_enabled():
        table_rows.requires_grad_(weight.requires_grad)
    return nn.functional.embedding(places, table_rows)


def _scored(input: Tensor, weight: TableWeight, bias: Tensor | None = None) -> Tensor:
    """The product with each row of a table, one block of rows after the other."""
    result = input.new_empty(*input.shape[:-1], len(weight))
    for numbers in torch.arange(len(weight)).split(_SCORED_ROWS):
        place = slice(int(numbers[0]), int(numbers[-1]) + 1)
        part_of_bias = None if bias is None else bias[place]
        result[..., place] = nn.functional.linear(input, weight.draw_rows(numbers), part_of_bias)
    return result


class _Parameters(dict[str, nn.Parameter | None]):
    """The parameters of a module, each drawn when it is asked for by its name.

    Whoever goes through all of them sees the numbers of the block at work. Elsewhere the parameters have their shapes,
    and NaN for numbers: to list the parameters of a model draws none of it.
    """

    def __init__(self, stand_ins: dict[str, nn.Parameter | None], weights: dict[str, Weight], drawn: DrawnWeights):
        super().__init__(stand_ins)
        self._stand_ins = dict(stand_ins)
        self._weights = weights
        self._drawn = drawn

    def __getitem__(self, name: str) -> nn.Parameter | None:
        stored = super().__getitem__(name)
        weight = self._weights.get(name)
        if weight is None or stored is not self._stand_ins[name]:
            return stored
        if weight.by_rows and torch._C._is_torch_function_enabled():
            return stored
        return self._drawn.of(weight)

    def get(self, name: str, default: Any = None) -> Any:
        """As of a dictionary."""
        if name not in self:
            return default
        return self[name]

    def items(self) -> Any:
        """As of a dictionary, in numbers where the block is at work."""
        return {name: self._listed(name) for name in self}.items()

    def values(self) -> Any:
        """As of a dictionary, in numbers where the block is at work."""
        return dict(self.items()).values()

    def _listed(self, name: str) -> nn.Parameter | None:
        weight = self._weights.get(name)
        if weight is not None and self._drawn.at_work(weight):
            return self[name]
        return super().__getitem__(name)


class Blueprint:
    """A model that was made in a record, from which models with fresh weights are drawn.

    Attributes:
        tree: its modules.
        record: how its tensors are made.
    """

    def __init__(self, tree: nn.Module, record: Record) -> None:
        """Name what was made.

        Raises:
            UnrecordedError: a module holds a weight elsewhere than among its parameters.
        """
        self.tree = tree
        self.record = record
        self._weights_by_blocks: dict[frozenset[str], dict[int, Weight]] = {}
        for name, tensor in (*tree.named_buffers(), *tree.named_parameters()):
            if record.knows(tensor):
                record.names[record.view(tensor).storage] = name
        for name, module in tree.named_modules():
            others = [value for place, value in vars(module).items() if place not in _OWN_DICTIONARIES]
            if any(isinstance(leaf, nn.Parameter) for leaf in tree_leaves(others)):
                raise UnrecordedError(f"{name or type(tree).__name__} holds weights beside its parameters")

    def draw(
        self, blocks: Collection[str], seed: int, device: torch.device | None, dtype: torch.dtype
    ) -> tuple[nn.Module, DrawnWeights]:
        """A model with fresh weights, and the weights.

        Args:
            blocks: names of the modules of which one at a time has its weights.
        """
        drawn = DrawnWeights(self.record, seed, device, dtype)
        weights = self._weights_of(frozenset(blocks))
        memo: dict[int, Any] = {}
        for tensor in self.tree.parameters():
            weight = weights.get(id(tensor))
            if weight is None:
                memo[id(tensor)] = nn.Parameter(drawn.placed(tensor.detach().clone()), tensor.requires_grad)
            else:
                memo[id(tensor)] = _stand_in(tensor, weight, drawn)
        for tensor in self.tree.buffers():
            memo[id(tensor)] = drawn.placed(drawn.tensor(tensor))
        fresh = copied(self.tree, memo, drawn.tensor)
        for module, made in zip(self.tree.modules(), fresh.modules(), strict=True):
            parameters = module._parameters.items()
            drawn_here = {name: weights[id(each)] for name, each in parameters if id(each) in weights}
            if drawn_here:
                made.__dict__["_parameters"] = _Parameters(dict(made._parameters), drawn_here, drawn)
        return fresh.eval(), drawn

    def _weights_of(self, blocks: frozenset[str]) -> dict[int, Weight]:
        """How each parameter is drawn, by its `id`: the same for every seed."""
        if blocks not in self._weights_by_blocks:
            self._weights_by_blocks[blocks] = {id(tensor): weight for tensor, weight in self._weights(blocks)}
        return self._weights_by_blocks[blocks]

    def _weights(self, blocks: Collection[str]) -> Iterator[tuple[Tensor, Weight]]:
        """Each parameter, and how it is drawn."""
        named = [(name, each) for name, each in self.tree.named_parameters() if self.record.knows(each)]
        longest_first = sorted(blocks, key=len, reverse=True)
        of_block = {
            name: next((b for b in longest_first if not b or name.startswith(f"{b}.")), None) for name, _ in named
        }
        sizes = dict.fromkeys(blocks, 0)
        for name, tensor in named:
            block = of_block[name]
            if block is not None:
                sizes[block] += tensor.numel()
        largest_block = max(sizes.values(), default=0)
        tables = {id(each.weight) for each in self.tree.modules() if isinstance(each, nn.Embedding)}
        for name, tensor in named:
            view = self.record.view(tensor)
            table = self.record.by_rows(view) if id(tensor) in tables else None
            by_rows = table is not None and tensor.numel() > largest_block
            by_element = self.record.by_element(view)
            yield tensor, Weight(name, view, of_block[name], tensor.requires_grad, table, by_element, by_rows)


def _stand_in(tensor: Tensor, weight: Weight, drawn: DrawnWeights) -> nn.Parameter:
    """A parameter of a weight's shape, type and place that has no numbers of its own."""
    nothing = torch.full((), torch.nan if tensor.is_floating_point() else 0, dtype=tensor.dtype)
    numbers = drawn.placed(nothing).expand(tensor.shape)
    if not weight.by_rows:
        return nn.Parameter(numbers, weight.requires_grad)
    table = TableWeight(numbers, weight.requires_grad)
    table.draw_all = lambda: drawn.of(weight)
    table.draw_rows = lambda numbers: drawn.rows(weight, numbers)
    return table


def copied(tree: nn.Module, memo: dict[int, Any], replacement: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of a module.

    Args:
        memo: what stands in the place of objects, by their `id`.
        replacement: what stands in the place of a tensor that is not among these, and no parameter.
    """

    class Copying(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is not Tensor.__deepcopy__:
                return func(*args, **(kwargs or {}))
            tensor, copies = args
            if id(tensor) not in copies:
                copies[id(tensor)] = replacement(tensor)
            return copies[id(tensor)]

    # A module has a dozen dictionaries of hooks, nearly all empty. New ones cost a tenth of what copying them does.
    for module in tree.modules():
        for hooks in vars(module).values():
            if type(hooks) is OrderedDict and not hooks:
                memo[id(hooks)] = OrderedDict()
    with Copying():
        return copy.deepcopy(tree, memo)
