"""Does a token answer to others as its weights say, one by one, or collectively? (claims B14, B21, experiment E14)

The response of an output at token i to token j is χ_ij = ‖∂out_i/∂in_j‖, the Frobenius norm, estimated by the gradient of one
random projection of the output: its expected square is χ_ij². It is compared, over the tokens j ≠ i that i sees, with the
heads' mean weights J_ij, and with the response (I − J)⁻¹ of a system whose tokens answer to each other in turn (J has no
diagonal). That is asked of what an attention layer adds, and of the last state with the mean of J from this depth on.
"""

from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.probing.statistics.registry import BAL, RESPONSE, statistic

LOCAL, DEEP = "", "deep_"
"""What a statistic's name begins with: of one layer's output, or of the last state."""
_LINES = "One linear relation is fitted over the tokens that a token sees; a token that all attend to can decide it."
_asked = partial(statistic, RESPONSE, paper=BAL, scope="layer", control="shuffled_positions", caveat=_LINES)


@dataclass(frozen=True, eq=False)
class Response:
    """How one token answers to the other tokens that it sees.

    Attributes:
        others: χ_ij for j ≠ i.
        itself: χ_ii.
        weights: J_ij.
        collective: [(I − J)⁻¹]_ij.
    """

    others: Float[Tensor, " K"]
    itself: Float[Tensor, ""]
    weights: Float[Tensor, " K"]
    collective: Float[Tensor, " K"]


def explained(outcome: Float[Tensor, " K"], *given: Float[Tensor, " K"]) -> Tensor:
    """R² of a linear regression with a constant; NaN where the outcome is constant, 0 where the given are."""
    centred = outcome - outcome.mean()
    columns = torch.stack([each - each.mean() for each in given], 1)
    sizes = columns.norm(dim=0)
    kept = columns[:, sizes > 0] / sizes[sizes > 0]
    if not kept.shape[1]:
        return centred.square().sum() / centred.square().sum() * 0
    basis, lengths, _ = torch.linalg.svd(kept, full_matrices=False)
    along = basis[:, lengths > 1e-10 * lengths[0]].mT @ centred
    return along.square().sum() / centred.square().sum()


def by_weights(own: Response, compared: Response) -> Tensor:
    """R² of the response on the weights; in the control on ``compared``'s."""
    return explained(own.others, compared.weights)


def collective_gain(own: Response, compared: Response) -> Tensor:
    """What (I − J)⁻¹ adds to the R² of the weights."""
    return explained(own.others, own.weights, compared.collective) - explained(own.others, own.weights)


for _depth, _title, _what in (
    (LOCAL, "", "what an attention layer adds to a token"),
    (DEEP, " of the last state", "a token's last state"),
):
    _asked(
        f"Response{_title} by the weights",
        name=f"{_depth}response_by_weights",
        formula="R² of χ_ij on J_ij over the tokens j ≠ i that i sees",
        claim="E14, B21",
        question=f"How well do the mean attention weights explain the response of {_what} to other tokens?",
    )(by_weights)
    _asked(
        f"Collective response{_title}",
        name=f"{_depth}response_collective_gain",
        formula="R² of χ_ij on J_ij and [(I − J)⁻¹]_ij, less that on J_ij alone",
        claim="E14, B14",
        question="How much more of that response does (I − J)⁻¹ explain, in which tokens influence each other?",
    )(collective_gain)


@_asked(
    "Response to other tokens",
    formula="Σ_{j≠i} χ_ij² / Σ_j χ_ij², of the last state",
    claim="E14, B21",
    control=None,
    caveat="It describes a small change of the state at this depth, not a large one.",
)
def deep_response_to_others(own: Response, compared: Response) -> Tensor:
    """How much of a token's last state's response to the states at this depth comes from other tokens?"""
    del compared
    return own.others.square().sum() / (own.others.square().sum() + own.itself.square())
