"""The base class of the strategies of `Attention`: modules that compute the heads' outputs from queries, keys and values."""

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
from massieu.foundation.short_repr import fields_html, fields_repr
from massieu.foundation.transforms import without_autocast
from massieu.nn.heads import Mask, with_positions
from massieu.nn.modules import Device, Iterating, Number, Resettable, register_number, settings
from massieu.ops import Documents
from massieu.ops.moments import MomentsResult
from massieu.ops.observed import ObservedWeights, tell, tell_attention
from massieu.solve import Implicit, LinearSolver, Method, fixed_point
from massieu.solve.status import FixedPointResult

_NOT_IN_REPR = {"training", "num_heads", "head_dim", "unsupported", "convergence"}


class Request(NamedTuple):
    """The settings of one call: masks, and which results are needed."""

    log_weight: Mask | None
    """Booleans (True keeps a key) or log-weights, broadcast to (B, H, L, N); the last dimension is N already."""
    is_causal: bool
    need_weights: bool
    extra: str | None
    """The one further result that is requested, a name in the strategy's `extras`; None without one."""
    dropout: float
    """The probability that a weight is dropped; 0 in evaluation."""
    query_offset: int = 0
    """Query i stands at position i + query_offset; always 0 for a strategy without `supports_query_offset`."""
    moments: Collection[str] | None = None
    """Names of the moments to compute if `extra` is "moments"; None for all of them."""
    documents: Documents | None = None
    """The documents of a packed row; always None for a strategy without `supports_documents`."""

    def dropped(self, weights: Tensor) -> Tensor:
        """The weights after dropout."""
        return F.dropout(weights, self.dropout) if self.dropout else weights


def same_for_queries(request: Request) -> bool:
    """Whether every query of an item sees the same keys with the same log-weights, in every head."""
    if request.is_causal:
        return False
    log_weight = request.log_weight
    return log_weight is None or log_weight.shape[1] == log_weight.shape[2] == 1


class HeadsResult(NamedTuple):
    """The heads' output, with the weights and the extra result if the request needs them."""

    output: Float[Tensor, "B H L E"]
    weights: Float[Tensor, "B H L N"] | None = None
    extra: Float[Tensor, "B H L"] | MomentsResult[Tensor] | MomentsResult[Tensor | None] | None = None

    __repr__ = fields_repr
    _repr_html_ = fields_html


class Heads(Resettable, ABC):
    """A strategy: how the heads of `Attention` compute. It owns numbers and settings; the module owns projections and masks.

    `Attention` calls `bind` with the number of heads. One strategy belongs to one module: copies of the module, as
    `torch.nn.TransformerEncoder` makes them, have copies of it.
    """

    projections: ClassVar[tuple[str, ...]] = ("query", "key", "value")
    """The inputs that the module projects to the heads. Without "value", keys are the values."""
    extras: ClassVar[tuple[str, ...]] = ()
    """Names of the further results that a call can request by ``need_…=True``, one at a time."""
    supports_query_offset: ClassVar[bool] = False
    """Whether it reads `Request.query_offset`; otherwise the module puts offset and causality into the mask."""
    supports_documents: ClassVar[bool] = False
    """Whether it reads `Request.documents`."""
    reports_attention: ClassVar[bool] = False
    """Whether `forward` itself reports to a probe, as `massieu.ops.attention` does. Otherwise `attend` reports the weights
    that `forward` returns with `need_weights`."""
    unsupported: Mapping[str, str] = MappingProxyType({})
    """Arguments of the module and of its call that this strategy does not support, each with the reason."""
    num_heads: int = 0
    """The number of heads; 0 before `bind`."""

    def __init__(self, **numbers: Number) -> None:
        """Keep each number, which is one for all heads or one for each, as the attribute of its name."""
        super().__init__()
        self._numbers = tuple(numbers)
        for name, value in numbers.items():
            if value is not None:
                number_or_tensor(name, value)
        for name, value in numbers.items():
            setattr(self, name, value)

    def bind(self, num_heads: int, head_dim: int, device: Device = None, dtype: torch.dtype | None = None) -> None:
        """Create the strategy's parameters and buffers for `num_heads` heads of size `head_dim`.

        Raises:
            ValueError: the strategy is bound already; a number is out of its range, or is neither one nor one a head.
        """
        if self.num_heads:
            raise ValueError(
                f"this {type(self).__name__} is already bound to another module; give each module heads of its own"
            )
        self.num_heads = num_heads
        self.head_dim = head_dim
        device = torch.get_default_device() if device is None else torch.device(device)
        for name in self._numbers:
            value = getattr(self, name)
            # The plain attribute would hide a parameter or buffer of the same name.
            delattr(self, name)
            or_none = name in ("scale", "sink")
            above = 0.0 if name == "scale" else None
            register_number(self, name, value, num_heads, or_none=or_none, above=above, device=device, dtype=dtype)
        self._create_tensors(device, dtype)

    def _create_tensors(self, device: torch.device, dtype: torch.dtype | None) -> None:
        """Create further parameters and buffers; `num_heads` and `head_dim` are known by now."""

    @abstractmethod
    def forward(
        self,
        query: Float[Tensor, "B H L D"],
        key: Float[Tensor, "B H N D"],
        value: Float[Tensor, "B H N D"],
        request: Request,
    ) -> HeadsResult:
        """The heads' result, with the output in the query's dtype."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, request: Request) -> HeadsResult:
        """The result of `forward`, reported to the listeners, such as a probe that reads the model's attention."""
        audience = listeners()
        if self.reports_attention or not audience:
            return self(query, key, value, request)
        result = in_one_call(audience, self, query, key, value, request)
        return result._replace(output=self._report(audience, result, (query, key, value), request))

    def _report(
        self, audience: Listeners, result: HeadsResult, heads: tuple[Tensor, Tensor, Tensor], request: Request
    ) -> Tensor:
        """The output after the listeners have heard of it: a listener may put another in its place."""
        query, key, value = heads
        weights = result.weights
        if weights is None:
            weights = self._weights_of_second_call(audience, heads, request)
        if weights is None:
            self._refuse(audience, "return no weights")
            return result.output
        visible = with_positions(request.log_weight, query, key, request.is_causal)
        if visible is not None and visible.dtype != torch.bool:
            visible = visible > -torch.inf
        return tell(audience, ObservedWeights(query, key, value, visible, weights, result.output))

    def _weights_of_second_call(
        self, audience: Listeners, heads: tuple[Tensor, Tensor, Tensor], request: Request
    ) -> Tensor | None:
        """The weights by another call of `forward`, which leaves the random state and the module's attributes alone.

        The output is still that of the first call, so that listening changes no bit of it.
        """
        attributes = dict(vars(self))
        weights_request = request._replace(need_weights=True, extra=None, dropout=0.0)
        query = heads[0]
        with torch.random.fork_rng([query.device] if query.is_cuda else []):
            weights = in_one_call(audience, self.forward, *heads, weights_request).weights
        vars(self).update(attributes)
        return weights

    def _refuse(self, audience: Listeners, reason: str) -> None:
        for listener in audience:
            listener.refuse(f"its {type(self).__name__} {reason}")

    def extra_repr(self) -> str:
        names = (*vars(self), *self._parameters, *self._buffers)
        return settings(self, *(name for name in names if not name.startswith("_") and name not in _NOT_IN_REPR))


class Retrieval(NamedTuple):
    """The attention within one step of a fixed-point iteration."""

    arguments: tuple[Tensor, Tensor, Tensor]
    """Query, key and value of `massieu.ops.attention`."""
    options: dict[str, Any]
    """Keyword arguments of `massieu.ops.attention`."""
    step: Callable[[Tensor], Tensor]
    """The rest of the step: from attention's output to the next state."""
    moves_query: bool = False
    """Whether the iteration moves the queries; otherwise it moves the values."""


class SolvedHeads(Iterating, Heads, ABC):
    """Heads whose outputs are fixed points, which `solve` finds from the result of `Attention.project`; without weights."""

    unsupported = MappingProxyType({"dropout": "there are no weights to drop"})
    solve: Callable[..., FixedPointResult]

    def __init__(self, method: Method, max_steps: int, throw: bool, **numbers: Number) -> None:
        super().__init__(**numbers)
        instance("method", method, Method, "a Method, such as Auto(), Picard(), Anderson() or Newton()")
        self.method = method
        self.max_steps = max_steps
        self.throw = throw

    def forward(self, query: Tensor, key: Tensor, value: Tensor, request: Request) -> HeadsResult:
        heads = (query, key, value)[: len(self.projections)]
        solution = self.solve(*heads, log_weight=request.log_weight, is_causal=request.is_causal)
        self._keep(solution.status, solution.residual)
        return HeadsResult(solution.value.to(query.dtype))

    def _report(
        self, audience: Listeners, result: HeadsResult, heads: tuple[Tensor, Tensor, Tensor], request: Request
    ) -> Tensor:
        """Report the attention at the fixed point, the one call that does not depend on the number of steps.

        A listener's replacement enters one more step from there; the output changes by as much as that step's end does.
        """
        output = result.output
        with without_autocast(output.device):
            retrieval = self._retrieval(output, *heads[: len(self.projections)], request=request)
            retrieved = in_one_call(audience, ops.attention, *retrieval.arguments, **retrieval.options).output
            start = heads[0] if retrieval.moves_query else None
            replaced = tell_attention(audience, retrieved, *retrieval.arguments, start=start, **retrieval.options)
            if replaced is retrieved:
                return output
            # The difference of two steps: adding one step alone would also add the solver's residual.
            change = retrieval.step(replaced) - retrieval.step(retrieved)
        return output + change.to(output.dtype)

    @abstractmethod
    def _retrieval(self, point: Tensor, *heads: Tensor, request: Request) -> Retrieval:
        """The attention within a step that starts at the fixed point."""

    def _find_fixed_point(
        self, function: Callable[..., Tensor], start: Tensor, parameters: Any, item_dims: int, solver: LinearSolver
    ) -> FixedPointResult:
        """The fixed point of `function`, with implicit derivatives by `solver`.

        Without `throw` an item that diverged has derivative 0 (`lost="zero"`), so that it cannot spoil the others' gradients.
        """
        options: dict[str, Any] = {"method": self.method, "max_steps": self.max_steps, "throw": self.throw}
        adjoint = Implicit(solver, lost="nan" if self.throw else "zero")
        return fixed_point(function, start, parameters, item_dims=item_dims, adjoint=adjoint, **options)
