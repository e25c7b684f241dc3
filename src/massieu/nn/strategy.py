"""What a strategy of `Attention` is: a module that makes outputs of the heads' queries, keys and values."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from massieu import ops
from massieu.foundation.arguments import instance, number_or_tensor
from massieu.foundation.listening import Listeners, in_one_call, listeners
from massieu.foundation.transforms import without_autocast
from massieu.nn.heads import Mask, with_positions
from massieu.nn.modules import Device, Iterating, Number, Resettable, register_number, settings
from massieu.ops import Documents
from massieu.ops.moments import MomentsResult
from massieu.ops.observed import ObservedWeights, tell, tell_attention
from massieu.solve import Implicit, LinearSolver, Method, fixed_point
from massieu.solve.status import FixedPointResult

_UNTOLD = {"training", "num_heads", "head_dim", "refused", "convergence"}


class Request(NamedTuple):
    """What a call wants of the heads."""

    log_weight: Mask | None
    """Boolean (True keeps) or a number, of N in its last dimension."""
    is_causal: bool
    need_weights: bool
    beside: str | None
    """What else: one of the strategy's `gives`."""
    dropout: float
    """The share of weights that are dropped now; 0 in evaluation."""
    query_offset: int = 0
    """Query i stands at position i + query_offset; 0 where the strategy has no `takes_offset`."""
    moments: Collection[str] | None = None
    """Which, where `beside` is "moments"; None: all."""
    documents: Documents | None = None
    """Of a packed row; None where the strategy has no `takes_documents`."""

    def dropped(self, weights: Tensor) -> Tensor:
        return F.dropout(weights, self.dropout) if self.dropout else weights


class HeadsResult(NamedTuple):
    """What the heads return; what was not asked for may be None."""

    output: Float[Tensor, "B H L E"]
    weights: Float[Tensor, "B H L N"] | None = None
    beside: Float[Tensor, "B H L"] | MomentsResult[Tensor] | MomentsResult[Tensor | None] | None = None


class Heads(Resettable, ABC):
    """A strategy: what the heads of `Attention` do. It owns its numbers and settings, the module projections and masks.

    The module that takes it tells it how many heads there are (`bind`). One strategy belongs to one module: copies of the
    module, as `torch.nn.TransformerEncoder` makes them, have copies of it.
    """

    projections: ClassVar[tuple[str, ...]] = ("query", "key", "value")
    """Which inputs the module projects to the heads. Without values, keys are the values."""
    gives: ClassVar[tuple[str, ...]] = ()
    """What a call may ask for by ``need_…=True``, beside weights."""
    takes_offset: ClassVar[bool] = False
    """Whether it reads `Request.query_offset`; else the module makes a mask of causality with an offset."""
    takes_documents: ClassVar[bool] = False
    """Whether it reads `Request.documents`."""
    tells: ClassVar[bool] = False
    """Whether `forward` computes its output by `massieu.ops.attention`, which tells a probe of it. Else a probe is told the
    weights that `forward` returns with `need_weights`."""
    refused: Mapping[str, str] = MappingProxyType({})
    """Arguments of the module and of its call that do not go with this strategy, each with the reason."""
    num_heads: int = 0
    """0 before it is bound."""

    def __init__(self, **numbers: Number) -> None:
        """Keep each number, to be one or one a head, as the attribute of its name."""
        super().__init__()
        self._numbers = tuple(numbers)
        for name, value in numbers.items():
            if value is not None:
                number_or_tensor(name, value)
        for name, value in numbers.items():
            setattr(self, name, value)

    def bind(self, num_heads: int, head_dim: int, device: Device = None, dtype: torch.dtype | None = None) -> None:
        """Make the strategy's parameters and buffers for so many heads of that size.

        Raises:
            ValueError: it is bound already; a number out of its range, or neither one nor one a head.
        """
        if self.num_heads:
            raise ValueError(
                f"heads must be new, and this {type(self).__name__} is another module's; make one for each module"
            )
        self.num_heads, self.head_dim = num_heads, head_dim
        device = torch.get_default_device() if device is None else torch.device(device)
        for name in self._numbers:
            value = getattr(self, name)
            delattr(self, name)
            or_none, above = name in ("scale", "sink"), 0.0 if name == "scale" else None
            register_number(self, name, value, num_heads, or_none=or_none, above=above, device=device, dtype=dtype)
        self._make(device, dtype)

    def _make(self, device: torch.device, dtype: torch.dtype | None) -> None:
        """Make what more there is, once the heads are known."""

    @abstractmethod
    def forward(
        self,
        query: Float[Tensor, "B H L D"],
        key: Float[Tensor, "B H N D"],
        value: Float[Tensor, "B H N D"],
        request: Request,
    ) -> HeadsResult:
        """What the heads do, the output in the query's dtype."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, request: Request) -> HeadsResult:
        """`forward`, of which whoever reads the model's attention is told."""
        told = listeners()
        if self.tells or not told:
            return self(query, key, value, request)
        found = in_one_call(told, self, query, key, value, request)
        return found._replace(output=self._told(told, found, (query, key, value), request))

    def _told(
        self, told: Listeners, found: HeadsResult, heads: tuple[Tensor, Tensor, Tensor], request: Request
    ) -> Tensor:
        """The output, or what takes its place, once the listeners were told of what the heads have done."""
        query, key, value = heads
        weights = found.weights
        if weights is None:
            # Of a second call, so that the output is what it is when nobody listens.
            kept = dict(vars(self))
            asked = request._replace(need_weights=True, beside=None, dropout=0.0)
            with torch.random.fork_rng([query.device] if query.is_cuda else []):
                weights = in_one_call(told, self.forward, *heads, asked).weights
            vars(self).update(kept)
        if weights is None:
            self._refuse(told, "return no weights")
            return found.output
        seen = with_positions(request.log_weight, query, key, request.is_causal)
        if seen is not None and seen.dtype != torch.bool:
            seen = seen > -torch.inf
        return tell(told, ObservedWeights(query, key, value, seen, weights, found.output))

    def _refuse(self, told: Listeners, reason: str) -> None:
        for listener in told:
            listener.refuse(f"its {type(self).__name__} {reason}")

    def extra_repr(self) -> str:
        names = (*vars(self), *self._parameters, *self._buffers)
        return settings(self, *(name for name in names if not name.startswith("_") and name not in _UNTOLD))


class Retrieval(NamedTuple):
    """The attention in one step towards a fixed point."""

    arguments: tuple[Tensor, Tensor, Tensor]
    """Query, key and value."""
    options: dict[str, Any]
    """Of `massieu.ops.attention`."""
    step: Callable[[Tensor], Tensor]
    """From what attention gives to the step's end."""
    moves_query: bool = False
    """Whether the fixed point is of queries; else of values."""


class SolvedHeads(Iterating, Heads, ABC):
    """Heads whose outputs are fixed points: `solve` finds them of what `Attention.project` returns. No weights are returned."""

    refused = MappingProxyType({"dropout": "there are no weights to drop"})
    solve: Callable[..., FixedPointResult]

    def __init__(self, method: Method, max_steps: int, throw: bool, **numbers: Number) -> None:
        super().__init__(**numbers)
        instance("method", method, Method, "a Method, such as Auto(), Picard(), Anderson() or Newton()")
        self.method, self.max_steps, self.throw = method, max_steps, throw

    def forward(self, query: Tensor, key: Tensor, value: Tensor, request: Request) -> HeadsResult:
        heads = (query, key, value)[: len(self.projections)]
        found = self.solve(*heads, log_weight=request.log_weight, is_causal=request.is_causal)
        self._keep(found.status, found.residual)
        return HeadsResult(found.value.to(query.dtype))

    def _told(
        self, told: Listeners, found: HeadsResult, heads: tuple[Tensor, Tensor, Tensor], request: Request
    ) -> Tensor:
        """Attention is told as it is at the fixed point, since the number of steps to it follows from the data.

        What takes its place enters one more step; the output moves by as much as that step does.
        """
        with without_autocast(found.output.device):
            retrieval = self._retrieval(found.output, *heads[: len(self.projections)], request=request)
            retrieved = in_one_call(told, ops.attention, *retrieval.arguments, **retrieval.options).output
            start = heads[0] if retrieval.moves_query else None
            replaced = tell_attention(told, retrieved, *retrieval.arguments, start=start, **retrieval.options)
            if replaced is retrieved:
                return found.output
            moved = retrieval.step(replaced) - retrieval.step(retrieved)
        return found.output + moved.to(found.output.dtype)

    @abstractmethod
    def _retrieval(self, point: Tensor, *heads: Tensor, request: Request) -> Retrieval:
        """The attention in a step from the fixed point."""

    def _solved(
        self, function: Callable[..., Tensor], start: Tensor, parameters: Any, item_dims: int, solver: LinearSolver
    ) -> FixedPointResult:
        options: dict[str, Any] = {"method": self.method, "max_steps": self.max_steps, "throw": self.throw}
        adjoint = Implicit(solver, lost="nan" if self.throw else "zero")
        return fixed_point(function, start, parameters, item_dims=item_dims, adjoint=adjoint, **options)
