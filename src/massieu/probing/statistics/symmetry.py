"""How far is the model from treating its tokens as a set? (claim Z14)

A transformer is a function of the set of pairs (token, position) as far as its masks allow. The tokens of a window are put in
another order, while positions stay where they are. A token's state in the one order is compared with its state in the
other, in units of how much the states of different tokens differ: 0 where the order does not matter, 1 where a token in
the other order is like any other token. In the control the position numbers move with their tokens: a model whose tokens
all see each other must then give the same, and what is left shows its mask.
"""

from jaxtyping import Float, Int
from torch import Tensor

from massieu.probing.statistics.registry import SYMMETRY, ZHANG, statistic


@statistic(
    SYMMETRY,
    "Permutation gap",
    formula="Σ‖x_i − x'_i‖² / Σ‖x_i − x_j‖², x' the states in another order, j another token of the window",
    claim="Z14",
    paper=ZHANG,
    scope="layer",
    control="moved_positions",
    caveat="One random order of each window is tried; a few tokens of huge norm can decide it.",
    scale="positive",
)
def permutation_gap(
    states: Float[Tensor, "T D"], others: Float[Tensor, "T D"], apart: Int[Tensor, " T"]
) -> tuple[Tensor, Tensor]:
    """How much do the states change when the tokens are reordered, relative to how much tokens differ?"""
    return (states - others).square().sum(), (states - states[apart]).square().sum()
