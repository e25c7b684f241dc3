"""What a head's attention looks like: log Z, entropy, weights and scores of every real query (claims S1, S8, S10, S25).

Keys are first centred on the mean of the real keys of their sequence. Softmax cannot see it, every headline number is
unchanged by it (S25), and the difference log Z − mean score then loses no digits; raw log Z gets the shift back.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from massieu import ops
from massieu.probing.accumulate import Histogram, Ratio, Spread
from massieu.probing.capture import AttentionCall
from massieu.probing.units import Units

PER_QUERY = (
    "selective_log_partition", "log_partition", "entropy", "entropy_fraction", "effective_keys",
    "effective_sample_size", "largest_weight", "largest_score_above_mean", "largest_score", "score_variance",
    "score_variance_attended", "weight_first", "weight_special", "weight_diagonal", "weight_previous", "sink_weight",
)  # fmt: skip
_SPREADS = ("selective_log_partition", "entropy")
_POSITION_BINS = 8
_VISIBLE_BINS = 24  # 1, 2, 3–4, 5–8, … keys
HISTOGRAM_EDGES = {
    "selective_log_partition": np.linspace(0.0, 10.0, 41),
    "entropy_fraction": np.linspace(0.0, 1.0, 26),
}


@dataclass(frozen=True, eq=False)
class Tokens:
    """What is known of the tokens of one batch.

    Attributes:
        real: False at padding.
        special: the tokenizer's special tokens; None where they are not known.
    """

    real: Bool[Tensor, "B L"]
    special: Bool[Tensor, "B L"] | None

    def first(self) -> Int[Tensor, " B"]:
        """Position of the first real token of each sequence."""
        return self.real.int().argmax(dim=1)


@dataclass(frozen=True, eq=False)
class Queries:
    """Per-query numbers of one attention call, and which of them count."""

    values: dict[str, Float[Tensor, "B H L"]]
    valid: Bool[Tensor, "B H L"]
    defined: dict[str, Bool[Tensor, "B H L"]]
    visible: Int[Tensor, "B_or_1 H_or_1 L"]
    broken: Bool[Tensor, "B H L"]


def _grouped(query: Tensor, key: Tensor) -> Tensor:
    """Query with its heads split into (key head, query heads of that group)."""
    return query.unflatten(1, (key.shape[1], -1))


def _score(call: AttentionCall, product: Float[Tensor, "B H L S"]) -> Float[Tensor, "B H L S"]:
    """From q·k to the score."""
    scores = call.scale * product
    return scores if call.softcap is None else call.softcap * torch.tanh(scores / call.softcap)


def _weighted(
    call: AttentionCall, scores: Float[Tensor, "B H L S"], index: Int[Tensor, "B L_or_1 S"]
) -> Float[Tensor, "B H L S"]:
    """Scores of chosen keys plus their log-weights; −inf where a key cannot be seen."""
    batch, _, length, _ = call.query.shape
    if call.is_causal:
        seen = index <= torch.arange(length, device=index.device)[:, None]
        return scores.masked_fill(~seen[:, None], -torch.inf)
    if call.log_weight is None:
        return scores
    weight = call.log_weight.expand(batch, -1, length, -1)
    weight = weight.gather(3, index[:, None].expand(batch, weight.shape[1], length, -1))
    return scores.masked_fill(~weight, -torch.inf) if weight.dtype == torch.bool else scores + weight


def _at_keys(call: AttentionCall, key: Tensor, index: Int[Tensor, "B S"]) -> Float[Tensor, "B H L S"]:
    """Scores plus log-weights of the same few keys for every query of a sequence."""
    chosen = key.gather(2, index[:, None, :, None].expand(-1, key.shape[1], -1, key.shape[3]))
    product = (_grouped(call.query, key) @ chosen[:, :, None].mT).flatten(1, 2)
    return _weighted(call, _score(call, product), index[:, None])


def _at_offset(call: AttentionCall, key: Tensor, positions: Int[Tensor, " L"], offset: int) -> Float[Tensor, "B H L"]:
    """Score plus log-weight of the key ``offset`` places before each query; position 0 stands in where there is none."""
    index = (positions - offset).clamp_min(0)
    query = _grouped(call.query, key)
    if len(positions) == key.shape[2]:  # every query in order: a shift instead of a gather
        product = query.new_zeros(query.shape[:-1])
        product[..., offset:] = (query[..., offset:, :] * key[:, :, None, : key.shape[2] - offset]).sum(-1)
        product[..., :offset] = (query[..., :offset, :] * key[:, :, None, :1]).sum(-1)
        product = product.flatten(1, 2)
    else:
        product = (query * key[:, :, None, index]).sum(-1).flatten(1, 2)
    places = index[None, :, None].expand(call.query.shape[0], -1, -1)
    return _weighted(call, _score(call, product)[..., None], places)[..., 0]


def _special_weight(
    call: AttentionCall, key: Tensor, log_z: Tensor, special: Bool[Tensor, "B N"]
) -> Float[Tensor, "B H L"]:
    """Attention on all special tokens together."""
    slots = int(special.sum(1).max()) if special.numel() else 0
    if slots == 0:
        return torch.zeros_like(log_z)
    order = special.int().argsort(dim=1, descending=True, stable=True)[:, :slots]
    scores = _at_keys(call, key, order).masked_fill(~special.gather(1, order)[:, None, None], -torch.inf)
    return torch.exp(scores - log_z[..., None]).sum(-1)


def _visible_keys(call: AttentionCall) -> Int[Tensor, "B_or_1 H_or_1 L"]:
    if call.is_causal:
        return torch.arange(1, call.query.shape[2] + 1, device=call.query.device)[None, None]
    if call.log_weight is None:
        return torch.full((1, 1, call.query.shape[2]), call.key.shape[2], device=call.query.device)
    return call.visible().sum(-1)


def query_statistics(
    call: AttentionCall, queries: Tokens, keys: Tokens, positions: Int[Tensor, " L"], itself: bool
) -> Queries:
    """Every per-query statistic of one attention call.

    Args:
        queries, keys: the tokens asked about and those attended to (the same for self-attention).
        positions: where in the sequence the call's queries are.
        itself: a sequence attends to itself, so that "diagonal" and "previous" mean something.
    """
    key, shift = call.key, None
    if call.softcap is None:
        weight = keys.real[:, None, None].to(key.dtype)
        centre = (weight @ key) / weight.sum(-1, keepdim=True).clamp_min(1)
        key = key - centre
        shift = (call.scale * _grouped(call.query, key) @ centre[:, :, None].mT).flatten(1, 2)[..., 0].float()
    moments = ops.attention_moments(
        call.query, key, None, log_weight=call.log_weight, scale=call.scale, is_causal=call.is_causal,
        softcap=call.softcap,
    )  # fmt: skip
    log_z, mean = moments.log_partition, moments.prior_mean_score
    visible = _visible_keys(call)
    real = queries.real[:, None].expand_as(log_z) & (visible > 0)
    broken = real & ~(log_z.isfinite() & moments.entropy.isfinite())
    shift = torch.zeros_like(log_z) if shift is None else shift
    raw = log_z + shift
    first = _at_keys(call, key, keys.first()[:, None])[..., 0]
    values = {
        "selective_log_partition": log_z - moments.prior_log_partition - mean,
        "log_partition": raw if call.sink is None else torch.logaddexp(raw, call.sink[:, None]),
        "entropy": moments.entropy,
        "entropy_fraction": moments.entropy / visible.clamp_min(2).log(),
        "effective_keys": moments.entropy.exp(),
        "effective_sample_size": 1 / moments.collision,
        "largest_weight": moments.max_weight,
        "largest_score_above_mean": moments.max_score - mean,
        "largest_score": moments.max_score + shift,
        "score_variance": moments.prior_score_variance,
        "score_variance_attended": moments.score_variance,
        "weight_first": torch.exp(first - log_z),
    }
    if keys.special is not None:
        values["weight_special"] = _special_weight(call, key, log_z, keys.special)
    valid = real & ~broken
    defined = {"entropy_fraction": valid & (visible >= 2)}
    if itself:
        values["weight_diagonal"] = torch.exp(_at_offset(call, key, positions, 0) - log_z)
        values["weight_previous"] = torch.exp(_at_offset(call, key, positions, 1) - log_z)
        has_previous = (positions > 0) & keys.real[:, (positions - 1).clamp_min(0)]
        defined["weight_previous"] = valid & has_previous[:, None]
    if call.sink is not None:
        values["sink_weight"] = torch.sigmoid(call.sink[:, None] - raw)
    return Queries(values, valid, defined, visible, broken)


class AttentionStatistics:
    """Running per-query statistics of one site.

    Rows of a batch are the error unit's rows; a model that cuts each item into several sequences (image windows) has
    its sequences added up.
    """

    def __init__(self, heads: int, units: Units, max_length: int) -> None:
        self.heads = heads
        self.max_length = max_length
        self.ratio = Ratio((len(PER_QUERY), heads), units)
        self.by_position = Ratio((_POSITION_BINS, heads), units)
        self.by_visible = Ratio((_VISIBLE_BINS, heads), units)
        self.spreads = {name: Spread((heads,)) for name in _SPREADS}
        self.histograms = {name: Histogram(edges, heads) for name, edges in HISTOGRAM_EDGES.items()}
        self.broken = np.zeros(heads, dtype=np.int64)

    def update(self, found: Queries, positions: Int[Tensor, " L"], rows: int) -> None:
        """Add one batch of ``rows`` items."""
        shape = found.valid.shape
        totals = torch.zeros(shape[0], len(PER_QUERY), self.heads, dtype=torch.float64, device=found.valid.device)
        counts = torch.zeros_like(totals)
        by_mask: dict[Tensor, list[str]] = {}
        for name in found.values:
            by_mask.setdefault(found.defined.get(name, found.valid), []).append(name)
        for mask, names in by_mask.items():
            places = [PER_QUERY.index(name) for name in names]
            stacked = torch.stack([found.values[name] for name in names], dim=1)
            totals[:, places] = torch.where(mask[:, None], stacked, 0.0).sum(-1, dtype=torch.float64)
            counts[:, places] = mask.sum(-1, dtype=torch.float64)[:, None]
        self.ratio.update(_by_item(totals, rows), _by_item(counts, rows))
        self._update_bins(found, positions, rows)
        for name, spread in self.spreads.items():
            spread.update(found.values[name], found.valid)
        for name, histogram in self.histograms.items():
            histogram.update(found.values[name], found.defined.get(name, found.valid))
        self.broken += found.broken.sum((0, 2)).cpu().numpy()

    def _update_bins(self, found: Queries, positions: Int[Tensor, " L"], rows: int) -> None:
        width = -(-self.max_length // _POSITION_BINS)
        by_position = (positions // width).clamp_max(_POSITION_BINS - 1)
        valid = found.valid.double()
        for ratio, name, bins in (
            (self.by_position, "selective_log_partition", by_position[None, None]),
            (self.by_visible, "entropy", _visible_bin(found.visible)),
        ):
            values = torch.where(found.valid, found.values[name], 0.0).double()
            chosen = torch.nn.functional.one_hot(bins, ratio.shape[0]).double()
            if chosen.shape[1] == 1:  # the same bins for all heads: one matrix product
                totals, counts = values @ chosen[:, 0], valid @ chosen[:, 0]
            else:
                totals, counts = ((x[..., None] * chosen).sum(2) for x in (values, valid))
            ratio.update(_by_item(totals.mT, rows), _by_item(counts.mT, rows))

    def bins(self) -> list[tuple[str, Ratio, int]]:
        """Name, accumulator and index of each bin."""
        width = -(-self.max_length // _POSITION_BINS)
        named = [
            (f"selective_log_partition/position_{i * width}_{(i + 1) * width - 1}", self.by_position, i)
            for i in range(_POSITION_BINS)
        ]
        edges = [(1, 1), (2, 2), *((2**k + 1, 2 ** (k + 1)) for k in range(1, _VISIBLE_BINS - 1))]
        named += [(f"entropy/visible_keys_{a}_{b}", self.by_visible, i) for i, (a, b) in enumerate(edges)]
        return named


def _visible_bin(visible: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """0 for one key, 1 for two, 2 for three or four, 3 for five to eight, …"""
    exponent = (visible.clamp_min(1).double()).log2().ceil().long()
    return exponent.clamp_max(_VISIBLE_BINS - 1)


def _by_item(values: Tensor, rows: int) -> Tensor:
    """Add up the sequences that one item was cut into."""
    return values if values.shape[0] == rows else values.unflatten(0, (rows, -1)).sum(1)
