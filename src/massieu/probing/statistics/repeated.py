"""What a head does with a text that repeats itself: made-up tokens, drawn at random and said twice.

Nothing but the order tells such tokens apart, so a head that finds the token behind the earlier occurrence has looked it up.
Each function of a reading gives the weight of every query on the key so many places before it. The names are those of
Elhage et al. and of Olsson et al.; the definitions are stated in full here.
"""

from dataclasses import dataclass
from functools import partial

from jaxtyping import Float, Float64
from torch import Tensor

from massieu.foundation.matrices import eigenvalues
from massieu.probing.statistics.query_reading import QueryReading
from massieu.probing.statistics.registry import REPEATED, statistic
from massieu.probing.sums.accumulate import Ratio

CIRCUITS = "Elhage et al., A Mathematical Framework for Transformer Circuits (2021)"
INDUCTION = "Olsson et al., In-context Learning and Induction Heads (arXiv 2209.11895)"

_on_repeated = partial(
    statistic,
    REPEATED,
    claim="",
    caveat="Measured on random tokens. A head may attend to a token without copying it: see the copying score.",
)


@_on_repeated("Induction weight", formula="mean p of the key behind the token's earlier occurrence", paper=INDUCTION)
def induction_weight(reading: QueryReading, length: int) -> Float[Tensor, "B H L"]:
    """When a token is repeated, how much does the head attend to the token that followed it the first time?"""
    return reading.weight_before(length - 1)


@_on_repeated(
    "Weight on the same token's earlier place", formula="mean p of the token's earlier occurrence", paper=CIRCUITS
)
def duplicate_token_weight(reading: QueryReading, length: int) -> Float[Tensor, "B H L"]:
    """When a token is repeated, how much does the head attend to its first occurrence?"""
    return reading.weight_before(length)


@_on_repeated("Weight on the previous token, random text", formula="mean p of the key one place before", paper=CIRCUITS)
def previous_token_weight(reading: QueryReading, length: int) -> Float[Tensor, "B H L"]:
    """How much does the head attend to the previous token in random text, where content does not help?"""
    return reading.weight_before(1)


WEIGHTS = (induction_weight, duplicate_token_weight, previous_token_weight)
NAMES = tuple(weight.__name__ for weight in WEIGHTS)


@dataclass(frozen=True, eq=False)
class RepeatedWeights:
    """`WEIGHTS` at one site: a row for each, an error unit for each sequence.

    It is no running result: whoever reads the text has all of it.
    """

    ratio: Ratio


@statistic(
    REPEATED,
    "Copying score",
    formula="Σλ / Σ|λ|, λ the eigenvalues of W_U W_O W_V W_E, norm gains folded in",
    claim="",
    paper=CIRCUITS,
    caveat="It describes the direct path from a token's embedding through this head to the logits, without other layers.",
    control=None,
    signed=True,
)
def copying_score(
    value: Float[Tensor, "H Dv D"], output: Float[Tensor, "H D Dv"], tokens: Float[Tensor, "D D"]
) -> Float64[Tensor, " H"]:
    """Does the head raise (1) or lower (−1) the logits of the tokens that it attends to?"""
    # Dv × Dv matrices have the same eigenvalues but for zeros; `tokens` is W_Eᵀ W_U, summed over the vocabulary.
    value, output = (part.to(tokens) for part in (value, output))
    values = eigenvalues((value @ tokens @ output).double())
    return values.real.sum(-1) / values.abs().sum(-1)
