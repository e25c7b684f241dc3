"""How attention calls are shown to listeners such as the probe: the arguments of a call and its output.

The functions of this package that average values show their calls themselves. Code that computes softmax attention in another
way, such as by the matrix of weights, calls `tell_attention`; code whose weights are no softmax calls `tell`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from massieu.foundation.listening import Listeners, as_one_call, in_one_call, listeners
from massieu.ops.shapes import AttentionProblem, check_problem


@dataclass(frozen=True, eq=False)
class ObservedAttention:
    """Softmax attention as it was computed.

    Attributes:
        problem: the arguments, values included.
        output: the result, the sink included.
        moving: whether the log-weight is computed from queries or keys; None if only the listener can know.
        exchanged: whether keys and queries have exchanged roles since the call before, with the same scores.
        start: first state of an iteration over the same keys that ended at the query; None without an iteration.
    """

    problem: AttentionProblem
    output: Float[Tensor, "B Hk G L E"]
    moving: bool | None = None
    exchanged: bool = False
    start: Float[Tensor, "B H L D"] | None = None


@dataclass(frozen=True, eq=False)
class ObservedWeights:
    """An average of values under weights that are not a softmax of scores, or of unknown scores.

    Attributes:
        query, key: the tensors from which the weights were computed.
        seen: True where a query may have a weight for a key; None if it may everywhere.
        weights: of any sign and sum.
        output: weights · values.
    """

    query: Float[Tensor, "B H L D"]
    key: Float[Tensor, "B H N D"]
    value: Float[Tensor, "B H N E"]
    seen: Bool[Tensor, "#B #H #L N"] | None
    weights: Float[Tensor, "B H L N"]
    output: Float[Tensor, "B H L E"]


def observed(
    problem: AttentionProblem, compute: Callable[..., tuple[Tensor, ...]], *arguments: Any
) -> tuple[Tensor, ...]:
    """``compute(*arguments)``, whose first result is the problem's output; listeners may replace it."""
    audience = listeners()
    if not audience:
        return compute(*arguments)
    output, *others = in_one_call(audience, compute, *arguments)
    return tell(audience, ObservedAttention(problem, output)), *others


def tell_attention(
    audience: Listeners,
    output: Float[Tensor, "*query E"],
    query: Float[Tensor, "*query D"],
    key: Float[Tensor, "*batch Hk N D"],
    value: Float[Tensor, "*batch Hk N E"],
    *,
    moving: bool | None = None,
    exchanged: bool = False,
    start: Float[Tensor, "B H L D"] | None = None,
    **options: Any,
) -> Float[Tensor, "*query E"]:
    """Show a call of softmax attention to listeners; its output, or what the last of them put in its place.

    Args:
        audience: the listeners.
        moving, exchanged, start: as in `ObservedAttention`.
        options: of `massieu.ops.attention`.
    """
    problem = check_problem(query, key, value, **{"log_weight": None, "scale": None, "is_causal": False, **options})
    laid_out = output.reshape(*problem.query.shape[:-1], output.shape[-1])
    shown = tell(audience, ObservedAttention(problem, laid_out, moving, exchanged, start))
    # The caller's own tensor, if no listener has replaced it.
    return output if shown is laid_out else problem.restore(shown)


def tell(audience: Listeners, call: ObservedAttention | ObservedWeights) -> Tensor:
    """Show a call to each listener, the outermost first; its output, or what the last of them put in its place.

    A listener is shown the output that the one before it has put in place.
    """
    for listener in audience:
        # What a listener computes is not shown to the others.
        with as_one_call([other for other in audience if other is not listener]):
            output = listener.hear(call)
        if output is not None:
            call = replace(call, output=output)
    return call.output
