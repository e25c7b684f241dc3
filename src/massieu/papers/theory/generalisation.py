"""A generalisation bound for one attention head that does not depend on the length of its sequences (Z10).

The chain: softmax is 1-Lipschitz from the largest logit's change to the total change of its weights; so a head's output moves
with its parameters by no more than a number free of L; so finitely many heads cover all of a norm; so the gap between mean loss
and empirical loss is bounded over all of them. The shape is that of Zhang et al. (arXiv 2212.14852) and its follow-up (arXiv
2305.19420), whose constants could not be recovered: those here are this project's own, with proof in the docstrings.

A number outside its documented range raises a ValueError, and anything that is no number a TypeError.
"""

import math
from typing import NamedTuple

from massieu.foundation.arguments import number, real, whole_number
from massieu.foundation.doors import count, door
from massieu.foundation.short_repr import fields_html, fields_repr


class AttentionLipschitzResult(NamedTuple):
    """Lipschitz constants of a head's output in the spectral norm of its parameters; the same for every length L."""

    value: float
    """R, in the value matrix."""
    score: float
    """βR³‖W‖, in the score matrix."""

    __repr__ = fields_repr
    _repr_html_ = fields_html


@door(radius=real, value_norm=real, scale=real)
def attention_lipschitz(radius: float, value_norm: float, scale: float = 1.0) -> AttentionLipschitzResult:
    """Lipschitz constants of attention in its parameters, for any number of tokens of norm at most R (Z10 ii).

    ‖out_{M,W} − out_{M',W'}‖ ≤ R‖W − W'‖ + βR³‖W'‖‖M − M'‖, with out = W Σ_j p_j x_j, p = softmax(β x_iᵀM x_j) and
    spectral norms. Proof: ‖Σ p_j x_j‖ ≤ R; the logits move by at most βR²‖M − M'‖, softmax's weights by no more than
    that in the 1-norm (the constant 1 is sharp), and their mean by R times it.

    Args:
        radius, scale: R > 0 and β > 0.
        value_norm: A bound of ‖W'‖, at least 0.

    Example:
        >>> from massieu.papers.theory import attention_lipschitz
        >>> attention_lipschitz(radius=1.0, value_norm=2.0).score  # β·R³·‖W‖
        2.0
    """
    radius = number("radius", radius, above=0)
    scale = number("scale", scale, above=0)
    value_norm = number("value_norm", value_norm, least=0)
    return AttentionLipschitzResult(value=radius, score=scale * radius**3 * value_norm)


@door(parameters=count, radius=real, lipschitz=real, accuracy=real)
def log_cover_size(parameters: int, radius: float, lipschitz: float, accuracy: float) -> float:
    """Logarithm of a covering number, P log(1 + 2B·Lip/ε) nats: of functions within ε of every one of a class (Z10 iii).

    A ball of radius B in P dimensions, of any norm, has a cover of that many balls of radius ε/Lip.

    Args:
        parameters, accuracy: P ≥ 1 and ε > 0.
        radius: B > 0, the radius of the parameters in the norm of `lipschitz`.
        lipschitz: Largest change of the output per unit of the parameters' norm.

    Example:
        >>> from massieu.papers.theory import log_cover_size
        >>> round(log_cover_size(parameters=1, radius=1.0, lipschitz=1.0, accuracy=2.0), 3)  # log 2
        0.693
    """
    number("radius", radius, above=0)
    number("lipschitz", lipschitz, above=0)
    number("accuracy", accuracy, above=0)
    parameters = whole_number("parameters", parameters, least=1)
    return parameters * math.log1p(2 * radius * lipschitz / accuracy)


@door(parameters=count, radius=real, lipschitz=real, loss_range=real, loss_lipschitz=real, failure=real)
def generalisation_bound(
    parameters: int,
    radius: float,
    sequences: int,
    *,
    lipschitz: float,
    loss_range: float = 1.0,
    loss_lipschitz: float = 1.0,
    failure: float = 0.05,
) -> float:
    """Generalisation bound: with probability 1 − δ, all mean losses over n sequences are this near their expectation (Z10 iii).

    2ℓε + b·√((P log(1 + 2B·Lip/ε) + log(2/δ))/(2n)) with ε = b/(ℓn): Hoeffding's inequality for each member of the cover.
    √(P log n/n) up to constants. The number of tokens of a sequence does not occur: at a fixed budget of norms, and with
    tokens of bounded norm. It is n, the number of independent *sequences*, that helps; tokens of one sequence share
    their latent. It bounds a gap, not what training finds, and for P of a real model it exceeds the loss's range unless
    n is far above P: it says what does not matter, not how well a model does.

    Args:
        parameters, radius, sequences: P ≥ 1, B > 0 and n ≥ 1.
        lipschitz: Of the output in the parameters, such as the sum of `attention_lipschitz`.
        loss_range: b > 0; the loss lies in an interval of this length.
        loss_lipschitz: ℓ > 0, of the loss in the output.
        failure: δ in (0, 1).

    Example:
        >>> from massieu.papers.theory import generalisation_bound
        >>> few, many = (generalisation_bound(10, 1.0, n, lipschitz=1.0) for n in (100, 10_000))
        >>> many < few
        True
    """
    whole_number("sequences", sequences, least=1)
    number("failure", failure, above=0, below=1)
    loss_lipschitz = number("loss_lipschitz", loss_lipschitz, above=0)
    loss_range = number("loss_range", loss_range, above=0)
    accuracy = loss_range / (loss_lipschitz * sequences)  # ε
    log_size = log_cover_size(parameters, radius, lipschitz, accuracy)
    # Hoeffding's deviation, with the union bound over the cover.
    deviation = loss_range * math.sqrt((log_size + math.log(2 / failure)) / (2 * sequences))
    return 2 * loss_lipschitz * accuracy + deviation
