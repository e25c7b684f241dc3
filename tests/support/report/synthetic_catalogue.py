"""The statistics a synthetic result carries: what `run.json` says of each, as short rows.

Row: name, title, formula, claim, group, unit, flags, control, question, centre, spread between heads.
Flags: h headline, g gauge-dependent, s signed, l layer scope. Centre and spread steer the made-up numbers.
"""

SHIM = "Shim, attention as intrinsic measure"
ROWS: list[tuple[str, str, str, str, str, str, str, str | None, str, float, float]] = [
    ("selective_log_partition", "Selective log Z", "S = log Z − log n − mean_j s_j = KL(uniform ‖ p) ≥ 0", "S25",
     "sharpness", "nats", "h", "reinitialised", "How far is the head's attention from uniform?", 1.6, 0.8),
    ("log_partition", "Log Z, raw", "log Z = log Σ_j exp(s_j)", "S25", "sharpness", "nats", "gs", None,
     "What is the height of the log-partition for this key origin?", 5.0, 3.0),
    ("entropy", "Entropy", "H = −Σ_j p_j log p_j", "S8", "sharpness", "nats", "", "reinitialised",
     "Over how many keys, in nats, is the weight spread?", 2.9, 0.8),
    ("entropy_fraction", "Entropy as a fraction of log n", "H / log n", "S8", "sharpness", "", "h", "reinitialised",
     "How close to uniform is the attention, between 0 and 1?", 0.62, 0.18),
    ("effective_keys", "Effective number of keys", "exp(H)", "S8", "sharpness", "keys", "", "reinitialised",
     "How many equally weighted keys have this entropy?", 38.0, 22.0),
    ("effective_sample_size", "Effective sample size", "1 / Σ_j p_j²", "S15", "sharpness", "keys", "", "reinitialised",
     "How many keys carry the output's variance?", 21.0, 14.0),
    ("largest_weight", "Largest weight", "max_j p_j", "S15", "sharpness", "", "", "reinitialised",
     "How much weight has the strongest key?", 0.24, 0.15),
    ("largest_score_above_mean", "Largest score above the mean", "max_j s_j − mean_j s_j", "S25", "scores", "nats", "h",
     "reinitialised", "How far does the best score stand out?", 4.6, 1.4),
    ("largest_score", "Largest score, raw", "max_j s_j", "S25", "scores", "nats", "gs", None,
     "How large do the logits get for this key origin?", 6.0, 4.0),
    ("score_variance", "Variance of the scores", "Var_j s_j", "S10", "scores", "nats²", "", "reinitialised",
     "How different are the scores of the visible keys?", 2.6, 1.1),
    ("score_variance_attended", "Variance of the scores under p", "Σ_j p_j (s_j − s̄)²", "S10", "scores", "nats²", "",
     "reinitialised", "What is the second cumulant of the score?", 1.9, 0.9),
    ("weight_first", "Weight on the first token", "p_1", "X4", "where the weight goes", "", "h", "reinitialised",
     "Is the first token a sink?", 0.18, 0.2),
    ("weight_special", "Weight on special tokens", "Σ_{j special} p_j", "X4", "where the weight goes", "", "",
     "reinitialised", "How much weight lies on [CLS], [SEP] and their kin?", 0.27, 0.2),
    ("weight_diagonal", "Weight on the token itself", "p_ii", "X4", "where the weight goes", "", "", "reinitialised",
     "Does a token look at itself?", 0.06, 0.05),
    ("weight_previous", "Weight on the previous token", "p_{i,i−1}", "X4", "where the weight goes", "", "",
     "reinitialised", "Does a token look at the one before it?", 0.08, 0.09),
    ("first_value_norm_ratio", "Norm of the first token's value", "‖v_1‖ / mean_j ‖v_j‖", "X4",
     "where the weight goes", "", "", "reinitialised", "Does the sink carry a small value?", 0.8, 0.3),
    ("write_norm_ratio", "Norm of the write over the residual's", "‖Δ_h‖ / ‖x‖", "E2", "the write", "", "",
     "reinitialised", "How much does the head move the residual stream?", 0.11, 0.05),
    ("write_score_cosine", "Cosine of W_O W_V with W_QᵀW_K", "⟨W_O W_V, W_QᵀW_K⟩ / norms", "S3", "the write", "", "s",
     "mismatched", "Is the write aligned with the gradient of the head's own log Z?", 0.01, 0.05),
    ("symmetric_share", "Symmetric share of W_QᵀW_K", "‖M + Mᵀ‖² / 4‖M‖²", "S11", "the write", "", "", "rotation",
     "Is the score a similarity?", 0.55, 0.1),
    ("antisymmetric_share", "Antisymmetric share of W_QᵀW_K", "‖M − Mᵀ‖² / 4‖M‖²", "S11", "the write", "", "",
     "rotation", "Is the score directed?", 0.45, 0.1),
]  # fmt: skip

MOVES = {
    "own_write": "the head's own write",
    "update": "the whole attention update",
    "update_without_bias": "the attention update without output bias",
}
for key, words in MOVES.items():
    ROWS += [
        (f"{key}_sharpens", f"Sharpened by {words} (share)", "share of queries with dS/dε > 0", "S25",
         f"{words} and its own log Z", "share of queries", "hs", "mismatched",
         f"Does {words} sharpen or flatten this head's attention?", 0.5, 0.2),
        (f"{key}_slope_selective", f"Slope of selective log Z along {words}", "⟨∇S, Δ⟩", "S25",
         f"{words} and its own log Z", "nats", "s", "mismatched", f"How fast does {words} sharpen?", 0.02, 0.2),
        (f"{key}_slope_common", f"Common slope along {words}", "⟨β k̄, Δ⟩", "S25", f"{words} and its own log Z", "nats",
         "s", "mismatched", f"How fast does {words} lift all scores alike?", -0.1, 0.4),
        (f"{key}_step_sharpens", f"Sharpened by {words}, full step (share)", "share of queries with S(q + Δ) > S(q)",
         "S12", f"{words} and its own log Z", "share of queries", "s", "random",
         f"Does the actual step of {words} sharpen?", 0.57, 0.15),
        (f"{key}_step_selective", f"Selective change, full step, {words}", "S(q + Δ) − S(q)", "S12",
         f"{words} and its own log Z", "nats", "s", "random", f"How much does {words} sharpen?", 0.05, 0.2),
        (f"{key}_step_common", f"Common change, full step, {words}", "β Δ·k̄", "S12", f"{words} and its own log Z",
         "nats", "s", "random", f"How much does {words} lift all scores alike?", -0.1, 0.4),
        (f"{key}_step_log_partition", f"Change of raw log Z, full step, {words}", "log Z(q + Δ) − log Z(q)", "S12",
         f"{words} and its own log Z", "nats", "gs", "random", "Does raw log Z rise for this key origin?", 0.1, 0.5),
    ]  # fmt: skip

LAYER_ROWS = [
    ("pairwise_distance", "Mean pairwise distance", "mean_{i<j} ‖x_i − x_j‖", "S12", "expansion", "", "", None,
     "How far apart are the tokens?", 0.0, 0.0),
    ("pairwise_distance_log_ratio", "Change of log pairwise distance", "log(after / before)", "S12", "expansion",
     "nats", "s", "reinitialised", "Do tokens move apart or together?", 0.0, 0.0),
    ("log_determinant", "Log-determinant of the token covariance", "log det C / d", "S12", "expansion",
     "nats per direction", "s", None, "What volume do the tokens fill?", 0.0, 0.0),
    ("log_determinant_change", "Change of the log-determinant", "Δ log det C / d", "S12", "expansion",
     "nats per direction", "s", "reinitialised", "Does the volume grow or shrink?", 0.0, 0.0),
    ("effective_rank", "Effective rank", "exp(entropy of the normalised spectrum)", "S12", "expansion", "directions",
     "", None, "How many directions are in use?", 0.0, 0.0),
    ("effective_rank_change", "Change of the effective rank", "after − before", "S12", "expansion", "directions", "s",
     "reinitialised", "Are directions gained or lost?", 0.0, 0.0),
]  # fmt: skip


def statistics() -> list[dict]:
    """`run["statistics"]` in the shape of `run.json`."""
    entries = []
    for rows, scope in ((ROWS, "head"), (LAYER_ROWS, "layer")):
        for name, title, formula, claim, group, unit, flags, control, question, *_ in rows:
            entry = {"name": name, "title": title, "formula": formula, "claim": claim, "paper": SHIM, "scope": scope}
            entry |= {"group": group, "unit": unit, "headline": "h" in flags, "gauge_dependent": "g" in flags}
            entry |= {"signed": "s" in flags, "control": control, "question": question}
            entry["caveat"] = "It describes this text and this model. Weight on a token is not information from it."
            entry["cost"] = "one pass over the scores" if scope == "head" else "one covariance per sublayer"
            entries.append(entry)
    return entries
