"""What the experiment climb reads of a model: each head's own write against its log Z, and what a head's absence costs."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64
from torch import Tensor, nn

from massieu.nn import Attention
from massieu.papers.experiments.climb_tasks import Batch, HalvedTask
from massieu.papers.experiments.transformer import TransformerBlock

WINDOWS = 128
"""The windows that are read of each half."""
DESCRIBED = ("retrieval_slope", "keys_in_use", "output_along_conditional_mean", "value_by_attention")
"""Statistics of fixed points and of conditional means that stand beside the question, without a verdict."""
SAME_NORM = 1.1
"""The norms of two heads' writes are equal if neither is larger than the other by this factor."""


@dataclass(frozen=True)
class HeadRises:
    """The heads of a model on one half of the data, layer after layer.

    Attributes:
        own: By how much each head's own write raises its selective log Z, nats.
        others: The same for the writes of the other heads of its layer, their mean, as this head sees them.
    """

    own: Float64[np.ndarray, " heads"]
    others: Float64[np.ndarray, " heads"]


def read_heads(model: nn.Module, inputs: Tensor, windows: int = WINDOWS) -> HeadRises:
    """Read all heads of a model of this room on all queries of the first windows.

    A head's own number is the probe's `own_write_step_selective`. The probe takes other heads' writes on fewer queries, which
    in short causal windows see fewer keys; here both are taken on the same queries.
    """
    with torch.no_grad():
        rises = [_rises(block, is_causal) for block, is_causal in _blocks_read(model, inputs[:windows])]
    own = [np.diagonal(rise) for rise in rises]
    others = [(rise.sum(0) - np.diagonal(rise)) / (len(rise) - 1) for rise in rises]
    return HeadRises(np.concatenate(own), np.concatenate(others))


class _BlockRead(NamedTuple):
    """How a block's attention read the stream, and what its heads returned."""

    stream: Float[Tensor, "B L D"]
    results: Float[Tensor, "B L HDv"]
    norm: nn.Module
    attention: Attention


def _blocks_read(model: nn.Module, inputs: Tensor) -> list[tuple[_BlockRead, bool]]:
    """What each block read in one forward pass, and whether it is causal."""
    streams: list[Tensor] = []
    results: list[Tensor] = []
    parts: list[tuple[nn.Module, Attention]] = []
    hooks = []
    for block in model.modules():
        if isinstance(block, TransformerBlock):
            norm, attention = block.before_attention, block.attention
            assert norm is not None and isinstance(attention, Attention)
            parts.append((norm, attention))
            hooks.append(norm.register_forward_pre_hook(lambda _, given: streams.append(given[0])))
            hooks.append(attention.out_proj.register_forward_pre_hook(lambda _, given: results.append(given[0])))
    model(inputs)
    for hook in hooks:
        hook.remove()
    is_causal = bool(model.is_causal)
    return [
        (_BlockRead(stream, result, norm, attention), is_causal)
        for stream, result, (norm, attention) in zip(streams, results, parts, strict=True)
    ]


def _rises(read: _BlockRead, is_causal: bool) -> Float64[np.ndarray, "H H"]:
    """Entry (g, h): by how much the write of head g raises the selective log Z of head h, mean over all queries."""
    attention = read.attention
    heads, width = attention.num_heads, attention.embed_dim
    weight, bias = attention.in_proj_weight, attention.in_proj_bias
    assert weight is not None and bias is not None
    keys = F.linear(read.norm(read.stream), weight[width : 2 * width], bias[width : 2 * width])
    keys = keys.unflatten(2, (heads, -1)).transpose(1, 2).double()  # (B, H, L, Dh)
    length = keys.shape[2]
    visible = torch.ones(length, length, dtype=torch.bool)
    if is_causal:
        visible = visible.tril()

    def selective(stream: Float[Tensor, "B L D"]) -> Float64[Tensor, "B H L"]:
        queries = F.linear(read.norm(stream), weight[:width], bias[:width])
        queries = queries.unflatten(2, (heads, -1)).transpose(1, 2).double()
        scores = queries @ keys.mT / math.sqrt(width // heads)
        log_partition = scores.masked_fill(~visible, -math.inf).logsumexp(-1)
        return log_partition - (scores * visible).sum(-1) / visible.sum(-1)

    before = selective(read.stream)
    writes = head_writes(attention, read.results)
    rises = [(selective(read.stream + writes[:, :, head]) - before).mean((0, 2)) for head in range(heads)]
    return torch.stack(rises).numpy()


def head_writes(attention: Attention, results: Float[Tensor, "B L HDv"]) -> Float[Tensor, "B L H D"]:
    """What each head adds to the stream, without the output's bias."""
    heads = attention.num_heads
    maps = attention.out_proj.weight.unflatten(1, (heads, -1))  # (D, H, Dv)
    return torch.einsum("blhv,dhv->blhd", results.unflatten(2, (heads, -1)), maps)


def read_described(model: nn.Module, inputs: Tensor, windows: int = WINDOWS) -> dict[str, float]:
    """Means over heads of the statistics of fixed points and of conditional means."""
    table = _table(model, inputs[:windows], DESCRIBED)
    return {name: float(np.nanmean(_of_heads(table, name))) for name in DESCRIBED}


def _table(model: nn.Module, windows: Tensor, statistics: Sequence[str]) -> Any:
    """The probe's table of heads."""
    import massieu  # Not above: the names of experiments are listed without the probe.

    return massieu.probe(model, [windows], statistics=statistics, draws=0).heads


def _of_heads(table: Any, statistic: str) -> Float64[np.ndarray, " heads"]:
    """One number for each head, layer after layer; NaN where there is none."""
    rows = [row for row in table.rows(named=True) if row["statistic"] == statistic]
    rows.sort(key=lambda row: (row["layer"], row["head"]))
    return np.array([np.nan if row["value"] is None else row["value"] for row in rows], dtype=np.float64)


def write_norms(model: nn.Module, inputs: Tensor) -> Float64[np.ndarray, " heads"]:
    """Root mean square, over all tokens, of the norm of what each head adds to the stream."""
    with torch.no_grad():
        writes = [head_writes(read.attention, read.results) for read, _ in _blocks_read(model, inputs)]
    return torch.cat([each.double().square().sum(-1).mean((0, 1)).sqrt() for each in writes]).numpy()


def attention_sites(model: nn.Module) -> list[tuple[str, Attention]]:
    """Names and modules of the attention layers, from the first one on."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, Attention)]


def pairs_of_equal_norm(
    own: Float64[np.ndarray, " heads"], norms: Float64[np.ndarray, " heads"]
) -> list[tuple[int, int]]:
    """Pairs of a head of the upper half by `own` and one of the lower half whose writes have equal norms.

    The pair whose norms are nearest comes first; no head is in two pairs. Of heads with equal numbers the first is lower.
    """
    order = np.argsort(own, kind="stable")
    low, high = order[: len(own) // 2], order[(len(own) + 1) // 2 :]
    # A head that writes nothing has no partner.
    apart = {
        (int(above), int(below)): abs(float(np.log(norms[above] / norms[below])))
        for above in high
        for below in low
        if norms[above] > 0 and norms[below] > 0
    }
    pairs: list[tuple[int, int]] = []
    for (above, below), distance in sorted(apart.items(), key=lambda item: (item[1], item[0])):
        taken = {head for pair in pairs for head in pair}
        if distance <= np.log(SAME_NORM) and not {above, below} & taken:
            pairs.append((above, below))
    return pairs


@contextmanager
def switched_off(model: nn.Module, head: int) -> Iterator[None]:
    """The model without one of its heads, counted layer after layer."""
    import massieu

    sites = attention_sites(model)
    heads = sites[0][1].num_heads
    with massieu.replaced(model, "off", sites={sites[head // heads][0]: [head % heads]}):
        yield


def loss_differences(task: HalvedTask, model: nn.Module, batch: Batch, pairs: Sequence[tuple[int, int]]) -> list[float]:
    """Of each pair, the loss without the first head minus the loss without the second."""
    losses = {}
    for head in sorted({head for pair in pairs for head in pair}):
        with torch.no_grad(), switched_off(model, head):
            losses[head] = float(task.loss(model, batch))
    return [losses[above] - losses[below] for above, below in pairs]
