"""Every statistic of the probe: name, formula, claim, which question it answers, what it does not say, what it costs.

The command ``massieu statistics`` prints this table and the page's methods section is made from it. Statistics of one
group are computed together; naming any of them switches the group on.

Notation: one query sees n keys with scores s_j = β q·k_j and log-weights log w_j; h_j = w_j / Σw, p = softmax(s + log w),
log Z = log Σ w_j e^{s_j}. r is the residual stream, Δ what a head or a whole attention layer adds to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from massieu.errors import InputError

SHIM = "Shim, A Probabilistic Interpretation of Transformers (arXiv 2205.01080)"
BAL = "Bal, Transformer Attention as an Implicit Mixture of Effective Energy-Based Models (2020)"
OWN = "derived in docs/theory.md"

ATTENTION = "attention"
VALUES = "values"
CLIMB = "climb"
MAPS = "maps"
EXPANSION = "expansion"

COSTS = {
    ATTENTION: "every query: one more pass over the scores",
    VALUES: "every token: norms of the values; the sample: norms of the writes",
    CLIMB: "the sample: two gradients per head, one replay of the queries per head",
    MAPS: "once per attention site, from the weights",
    EXPANSION: "the sample: distances and one small spectrum per point of the residual stream",
}


@dataclass(frozen=True)
class Statistic:
    """One number the probe reports, and all that a reader must know about it.

    Attributes:
        headline: may be compared between heads; invariant under a constant added to a head's keys.
        gauge_dependent: changes with that constant, which softmax cannot see; never a headline.
        signed: zero or the control is the natural centre of its scale.
        control: the control its map is compared with (a qualifier of the result table), or None.
    """

    name: str
    title: str
    formula: str
    claim: str
    paper: str
    group: str
    question: str
    caveat: str
    unit: str = ""
    scope: str = "head"
    headline: bool = False
    gauge_dependent: bool = False
    signed: bool = False
    control: str | None = "reinitialised"

    @property
    def cost(self) -> str:
        return COSTS[self.group]


_RAW = "Depends on the key origin: adding one vector to all keys of a head moves it and leaves attention as it is."
_DESCRIPTIVE = "Describes this text and this model; weight on a token is not information from it."
_KEYS_FROZEN = "Keys and values are held fixed while the query moves; in the model they move too."

_ATTENTION = [
    Statistic(
        "selective_log_partition",
        "Selective log Z",
        "S = log Z − log Σw − Σ h_j s_j = KL(h‖p)",
        "S25",
        OWN,
        ATTENTION,
        "How far is this head's attention from attending to every visible key alike?",
        _DESCRIPTIVE,
        "nats",
        headline=True,
    ),
    Statistic(
        "log_partition",
        "log Z (raw)",
        "log Z = log Σ w_j e^{s_j} (a learned sink's term included)",
        "S1, S3",
        SHIM,
        ATTENTION,
        "What is the log-normaliser that the model computes?",
        _RAW,
        "nats",
        gauge_dependent=True,
    ),
    Statistic(
        "entropy",
        "Attention entropy",
        "H = −Σ p_j log p_j",
        "S8",
        SHIM,
        ATTENTION,
        "Over how many keys, in nats, does the head spread its attention?",
        "Grows with the number of visible keys; compare heads by the fraction of log n.",
        "nats",
        headline=True,
    ),
    Statistic(
        "entropy_fraction",
        "Entropy as a fraction of log n",
        "H / log n, for n ≥ 2 visible keys",
        "S8, N11",
        SHIM,
        ATTENTION,
        "How uniform is the attention, from 0 (one key) to 1 (all keys alike)?",
        _DESCRIPTIVE,
        headline=True,
    ),
    Statistic(
        "effective_keys",
        "Effective number of keys",
        "e^H",
        "S19",
        SHIM,
        ATTENTION,
        "To how many equally weighted keys is this attention equivalent?",
        _DESCRIPTIVE,
        "keys",
        headline=True,
    ),
    Statistic(
        "effective_sample_size",
        "Effective sample size",
        "1 / Σ p_j²",
        "S19",
        SHIM,
        ATTENTION,
        "Read as importance sampling, how many independent draws would estimate the output as well?",
        "Never above the effective number of keys.",
        "keys",
        headline=True,
    ),
    Statistic(
        "largest_weight",
        "Largest weight",
        "max_j p_j",
        "B5",
        BAL,
        ATTENTION,
        "How much of the attention goes to the single strongest key?",
        _DESCRIPTIVE,
        headline=True,
    ),
    Statistic(
        "largest_score_above_mean",
        "Largest score above the mean score",
        "max_j s_j − Σ h_j s_j",
        "S25, N11",
        OWN,
        ATTENTION,
        "How far does the strongest key stand out, in nats, before the softmax?",
        _DESCRIPTIVE,
        "nats",
        headline=True,
    ),
    Statistic(
        "largest_score",
        "Largest score (raw max logit)",
        "max_j s_j",
        "N11",
        OWN,
        ATTENTION,
        "What is the max logit that training monitors watch?",
        _RAW,
        "nats",
        gauge_dependent=True,
    ),
    Statistic(
        "score_variance",
        "Variance of the scores",
        "Σ h_j (s_j − s̄)²",
        "S10, X2",
        OWN,
        ATTENTION,
        "How much do the scores of the visible keys differ?",
        _DESCRIPTIVE,
        "nats²",
        headline=True,
    ),
    Statistic(
        "score_variance_attended",
        "Variance of the scores under the attention",
        "Σ p_j (s_j − E_p s)² = β² ∂²log Z/∂β²",
        "S10",
        SHIM,
        ATTENTION,
        "What is the second cumulant of the score under the attention (Fisher information in β)?",
        "It is zero both for uniform scores and for attention on one key.",
        "nats²",
        headline=True,
    ),
    Statistic(
        "weight_first",
        "Weight on the first token",
        "p at the first real key",
        "X4, N25",
        OWN,
        ATTENTION,
        "How much attention does the first position take (the attention sink)?",
        "Weight on a token is not information from it: look at the norm of its value.",
        headline=True,
    ),
    Statistic(
        "weight_special",
        "Weight on special tokens",
        "Σ p over the tokenizer's special tokens",
        "X4, N25",
        OWN,
        ATTENTION,
        "How much attention do tokens without content take?",
        "Weight on a token is not information from it.",
        headline=True,
    ),
    Statistic(
        "weight_diagonal",
        "Weight on itself",
        "p at the query's own position",
        "S12",
        OWN,
        ATTENTION,
        "How much does a token attend to itself?",
        "Defined for attention of a sequence to itself.",
        headline=True,
    ),
    Statistic(
        "weight_previous",
        "Weight on the previous token",
        "p at the position before the query",
        "S12",
        OWN,
        ATTENTION,
        "Does the head look one token back?",
        "Defined for attention of a sequence to itself.",
        headline=True,
    ),
    Statistic(
        "sink_weight",
        "Weight on the learned sink",
        "e^b / (Z + e^b), b the head's sink logit",
        "X4",
        OWN,
        ATTENTION,
        "How much attention goes to the model's own null slot?",
        "The other statistics describe the attention among keys, with the sink left out.",
        gauge_dependent=True,
    ),
]

_VALUES = [
    Statistic(
        "first_value_norm_ratio",
        "Norm of the first token's value",
        "‖v_first‖ / mean ‖v_j‖",
        "X4, N25",
        OWN,
        VALUES,
        "When the head attends to the first token, how much does it read there?",
        "A small norm makes the head a candidate no-op on that text, never a dead head.",
        headline=True,
    ),
    Statistic(
        "write_norm_ratio",
        "Norm of the head's write",
        "‖W_O,h o_h‖ / ‖r‖",
        "E3",
        OWN,
        VALUES,
        "How large is what the head adds, beside the residual stream?",
        "A large write need not matter downstream, a small one may.",
        headline=True,
    ),
]


def _climb(prefix: str, who: str, control: str) -> list[Statistic]:
    return [
        Statistic(
            f"{prefix}_sharpens", f"{who} sharpens attention (share of queries)", "share with dS(r + εΔ)/dε > 0 at ε = 0",
            "S12, S25, E2", SHIM, CLIMB, f"For how many queries does an infinitesimal step along {who.lower()} sharpen the head's attention?",
            _KEYS_FROZEN, headline=True, signed=True, control=control,
        ),
        Statistic(
            f"{prefix}_slope_selective", f"{who}: selective slope", "dS(r + εΔ)/dε at ε = 0", "S12, S25, E2", SHIM, CLIMB,
            "How fast does selective log Z rise along the step?", _KEYS_FROZEN, "nats", headline=True, signed=True, control=control,
        ),
        Statistic(
            f"{prefix}_slope_common", f"{who}: common slope", "d(Σ h_j s_j)/dε at ε = 0", "S25", OWN, CLIMB,
            "How fast do all scores rise alike, which leaves attention unchanged?", _RAW, "nats",
            gauge_dependent=True, signed=True, control=control,
        ),
        Statistic(
            f"{prefix}_step_sharpens", f"{who} sharpens attention, whole step (share of queries)", "share with S(r + Δ) > S(r)",
            "S12, S25, E2", SHIM, CLIMB, f"For how many queries does the actual step of {who.lower()} sharpen the head's attention?",
            "By convexity even a random step of this size sharpens more often than not: read it beside its control.",
            headline=True, signed=True, control=control,
        ),
        Statistic(
            f"{prefix}_step_selective", f"{who}: change of selective log Z", "S(r + Δ) − S(r)", "S12, S25, E2", SHIM, CLIMB,
            f"Does {who.lower()} sharpen (+) or flatten (−) the head's own attention, and by how much?", _KEYS_FROZEN, "nats",
            headline=True, signed=True, control=control,
        ),
        Statistic(
            f"{prefix}_step_common", f"{who}: common change of the scores", "Σ h_j (s_j(r + Δ) − s_j(r))", "S25", OWN, CLIMB,
            "By how much do all scores rise alike, which leaves attention unchanged?", _RAW, "nats",
            gauge_dependent=True, signed=True, control=control,
        ),
        Statistic(
            f"{prefix}_step_log_partition", f"{who}: change of raw log Z", "log Z(r + Δ) − log Z(r)", "S12, E2", SHIM, CLIMB,
            "Does the step raise the head's log-normaliser as the model computes it?", _RAW, "nats",
            gauge_dependent=True, signed=True, control=control,
        ),
    ]  # fmt: skip


_MAPS = [
    Statistic(
        "write_score_cosine", "Cosine of W_O W_V with W_QᵀW_K", "⟨W_O W_V, W_QᵀW_K⟩ / (‖W_O W_V‖ ‖W_QᵀW_K‖), norm gains folded in",
        "S3.2, S25, E2", SHIM, MAPS, "Are the head's weights those of a gradient step on its own log Z?",
        "The rotation null is far too easy; the other heads of the layer are the null to beat. Rotary models: at offset zero.",
        headline=True, signed=True, control="mismatched",
    ),
    Statistic(
        "symmetric_share", "Symmetric share of W_QᵀW_K", "‖(M + Mᵀ)/2‖² / ‖M‖², M = W_QᵀW_K with norm gains folded in",
        "S11, E6", SHIM, MAPS, "How much of the score is a mutual similarity of the two tokens?",
        "One half for a random matrix.", headline=True, control=None,
    ),
    Statistic(
        "antisymmetric_share", "Antisymmetric share of W_QᵀW_K", "‖(M − Mᵀ)/2‖² / ‖M‖² = 1 − symmetric share", "S11, E6",
        SHIM, MAPS, "How much of the score is directed, from one token to another?", "One half for a random matrix.",
        headline=True, control=None,
    ),
]  # fmt: skip

_POINTS = "Tokens of one window, at most 64 positions with distinct tokens."
_EXPANSION = [
    Statistic(
        "pairwise_distance_log_ratio", "Change of the mean pairwise distance", "log(d_after / d_before), d = mean ‖x_i − x_j‖",
        "S12, E3", SHIM, EXPANSION, "Do the tokens of a window move apart (+) or together (−)?", _POINTS, "nats", scope="layer",
        headline=True, signed=True,
    ),
    Statistic(
        "log_determinant_change", "Change of the log-determinant", "mean over directions of log λ_after − log λ_before, λ the spectrum of the token covariance",
        "S12, E3", SHIM, EXPANSION, "Does the volume that a window's tokens span grow (+) or shrink (−)?", _POINTS, "nats per direction",
        scope="layer", headline=True, signed=True,
    ),
    Statistic(
        "effective_rank_change", "Change of the effective rank", "e^H(λ/Σλ) after − before", "E1, N12", SHIM, EXPANSION,
        "In how many more (+) or fewer (−) directions do a window's tokens differ?", _POINTS, "directions", scope="layer",
        headline=True, signed=True,
    ),
]  # fmt: skip
_LEVELS = [
    Statistic(
        name, title, formula, "E3", SHIM, EXPANSION, "How spread are the tokens of a window along the depth?", _POINTS, unit,
        scope="layer",
    )
    for name, title, formula, unit in (
        ("pairwise_distance", "Mean pairwise distance", "mean over pairs of ‖x_i − x_j‖", ""),
        ("log_determinant", "Log-determinant of the token covariance", "mean over directions of log λ", "nats per direction"),
        ("effective_rank", "Effective rank of the token covariance", "e^H(λ/Σλ)", "directions"),
    )
]  # fmt: skip

STATISTICS: dict[str, Statistic] = {
    s.name: s
    for s in [
        *_ATTENTION, *_VALUES,
        *_climb("own_write", "The head's own write", "mismatched"),
        *_climb("update", "The whole attention update", "random"),
        *_climb("update_without_bias", "The attention update without output bias", "random"),
        *_MAPS, *_EXPANSION, *_LEVELS,
    ]
}  # fmt: skip

GROUPS = tuple(COSTS)


def select(names: Sequence[str] | None) -> tuple[frozenset[str], frozenset[str]]:
    """The statistics to report and the groups to compute. None selects everything; a group's name selects the group.

    Raises:
        InputError: a name is neither a statistic nor a group; the message lists the known ones.
    """
    if names is None:
        return frozenset(STATISTICS), frozenset(GROUPS)
    wanted: set[str] = set()
    for name in names:
        members = [s.name for s in STATISTICS.values() if name in (s.name, s.group)]
        if not members:
            known = ", ".join([*GROUPS, *STATISTICS])
            raise InputError(f"unknown statistic {name!r}; known are the groups and statistics: {known}")
        wanted.update(members)
    if not wanted:
        raise InputError("no statistic was named; leave the option out to compute all of them")
    return frozenset(wanted), frozenset(STATISTICS[name].group for name in wanted)
