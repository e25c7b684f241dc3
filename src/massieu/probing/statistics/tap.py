"""The feed-forward layer as a correction of the mean field? (claims B13, B14, experiment E11)

In the mean field of Thouless, Anderson and Palmer each spin feels, beside the field of the others Σ_j J_ij m_j, the reaction
−m_i Σ_j J_ij² χ_j of the others to itself. Read on a transformer, J is the attention of the layer and the reaction is what the
feed-forward layer adds to a token. Spins that are vectors of fixed length have one χ, so the term is m_i Σ_j J_ij², and only
its coefficient is free. J is the mean of the heads' weights; m is the stream.
"""

from functools import partial

from massieu.probing.statistics.registry import BAL, TAP, statistic
from massieu.probing.statistics.regressions import Products, Sums, coefficient, explained, gain

UPDATE, STREAM, REACTION = range(3)
"""The vectors of a token."""
_of_update = partial(
    statistic,
    TAP,
    claim="B13, B14, E11",
    paper=BAL,
    scope="layer",
    control="permuted_couplings",
    signed=True,
    caveat="The reaction term assumes spins of one susceptibility; for Gaussian spins it cancels, so none is expected (B14).",
)


@_of_update("Gain from the reaction term", formula="held-out R² of f ≈ a m + b m Σ_j J_ij², less that of a m alone")
def reaction_gain(given: Products) -> Sums:
    """How much more of the feed-forward update does the Onsager reaction, from squared attention weights, explain?"""
    return gain(given, UPDATE, [STREAM], REACTION)


@_of_update("Coefficient of the reaction term", formula="b of f ≈ a m + b m Σ_j J_ij²")
def reaction_coefficient(given: Products) -> Sums:
    """Does the feed-forward update subtract the reaction (below 0), as the TAP mean field does?"""
    return coefficient(given, UPDATE, REACTION, [STREAM])


@_of_update("Share of the feed-forward update along the state", formula="held-out R² of f ≈ a m", control=None)
def feed_forward_stream_share(given: Products) -> Sums:
    """How much of the feed-forward update is a multiple of the state itself, with one coefficient for all tokens?"""
    return explained(given, UPDATE, [STREAM])
