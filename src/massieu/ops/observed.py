"""What the probe is told of an attention call: what attention was given, and what came of it.

The functions of this package that average values tell of themselves. Code that computes softmax attention in another way,
as by the matrix of weights, tells of it by `tell_attention`; code whose weights are no softmax by `tell`.
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
        problem: what it was given, values among it.
        output: what came of it, the sink included.
        moving: the log-weight follows from queries or keys; None where only who listens may know.
        exchanged: keys and queries have exchanged roles beside the call before: the same scores, read the other way.
        start: where an iteration over the same keys began whose end is the query; None where there was none.
    """

    problem: AttentionProblem
    output: Float[Tensor, "B Hk G L E"]
    moving: bool | None = None
    exchanged: bool = False
    start: Float[Tensor, "B H L D"] | None = None


@dataclass(frozen=True, eq=False)
class ObservedWeights:
    """An average of values under weights that are no softmax of scores, or of scores that are not known.

    Attributes:
        query, key: what the weights were made of.
        seen: which keys a query may have a weight for; None is all.
        weights: of any sign and sum.
        output: what came of it: weights · values.
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
    """``compute(*arguments)``, of which the first result is the problem's output, told to whoever listens."""
    told = listeners()
    if not told:
        return compute(*arguments)
    output, *others = in_one_call(told, compute, *arguments)
    return tell(told, ObservedAttention(problem, output)), *others


def tell_attention(
    told: Listeners,
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
    """Tell of softmax attention that was computed; its output itself, or what takes its place.

    Args:
        moving, exchanged, start: as `ObservedAttention` has them.
        options: of `massieu.ops.attention`.
    """
    problem = check_problem(query, key, value, **{"log_weight": None, "scale": None, "is_causal": False, **options})
    laid_out = output.reshape(*problem.query.shape[:-1], output.shape[-1])
    found = tell(told, ObservedAttention(problem, laid_out, moving, exchanged, start))
    return output if found is laid_out else problem.restore(found)


def tell(told: Listeners, call: ObservedAttention | ObservedWeights) -> Tensor:
    """Tell each listener of a call, the outermost first; the output, or what takes its place.

    What one has put in the output's place is the output that the next is told of.
    """
    for listener in told:
        with as_one_call([other for other in told if other is not listener]):
            output = listener.hear(call)
        if output is not None:
            call = replace(call, output=output)
    return call.output
