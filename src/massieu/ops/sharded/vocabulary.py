"""The language-model head with its words sharded over processes, and its tokens too if they are."""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from massieu.foundation.arguments import choice
from massieu.foundation.transforms import uncompiled, without_autocast
from massieu.ops import vocabulary
from massieu.ops.linear_scores import Direction, check_places, log_partitions
from massieu.ops.score_tiles import ScorePlan
from massieu.ops.shapes import working_dtype
from massieu.ops.sharded import rows
from massieu.ops.sharded.agreement import Call, check_sendable, derivatives_wanted, together
from massieu.ops.sharded.collectives import Peers, replicate, total
from massieu.ops.sharded.keys import Placement, Processes, merge, only
from massieu.ops.vocabulary import CrossEntropyResult


@uncompiled
def linear_cross_entropy(
    hidden: Float[Tensor, "*lead D"],
    weight: Float[Tensor, "V D"],
    target: Int[Tensor, "*lead"],
    *,
    bias: Float[Tensor, "V"] | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Literal["none", "sum", "mean"] = "mean",
    return_log_partition: bool = False,
    tokens: Placement = "replicated",
    loss: Placement | None = None,
    group: Processes = None,
) -> Tensor | CrossEntropyResult:
    """`massieu.ops.linear_cross_entropy` with the vocabulary sharded: each process has some of the words.

    Args:
        hidden, target: the same on all processes, or this process's own, of any number; see `tokens`. Targets number all
            words, those of process 0 first, then those of process 1, ….
        weight, bias: of this process's words, at least one; a bias on all processes or on none.
        ignore_index, label_smoothing, z_loss, reduction, return_log_partition: as in `massieu.ops.linear_cross_entropy`.
        tokens: "replicated", or "sharded": each process has tokens of its own. A sum or mean is then over the tokens of all
            processes and the same on all; losses and log-partitions of single tokens are those of this process's.
        loss: "replicated" where every process goes on with the same result, which counts once; "sharded" where what they
            make of it differs, and the objective is the sum; see `massieu.ops.sharded`. "replicated" by default, but where
            tokens are sharded and nothing is reduced: losses are then this process's own, and only "sharded" has a meaning.
        group: as in `massieu.ops.sharded.attention`.

    Whatever the number of words, of replicated tokens some five numbers each are summed over processes, and in the backward
    pass the gradient of `hidden`; sharded ones are sent to all processes, which send two or three numbers back. Results and
    gradients equal those of one process to rounding.

    Raises:
        TypeError: as `massieu.ops.linear_cross_entropy`.
        ValueError: the same, a target out of range on any device; processes differ in what must be alike.
        RuntimeError: another process refused its arguments, or it died; a call inside `torch.func.vmap`.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from massieu.ops import sharded
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> loss = sharded.linear_cross_entropy(torch.zeros(3, 2), torch.zeros(5, 2), torch.tensor([0, 1, 4]))
        >>> round(float(loss.exp()), 3)
        5.0
        >>> dist.destroy_process_group()
    """
    shard = Peers.of(group)
    own = isinstance(tokens, str) and tokens == "sharded"

    def check() -> tuple[Tensor, Call]:
        words = vocabulary.check_shapes(hidden, weight, target, bias)
        vocabulary.check_options(ignore_index, label_smoothing, z_loss, reduction, return_log_partition)
        choice("tokens", tokens, "replicated", "sharded")
        choice("loss", loss, "replicated", "sharded", None)
        if own and reduction == "none" and loss == "replicated":
            raise ValueError(
                "losses of sharded tokens are each process's own: without a reduction loss must be 'sharded'"
            )
        check_sendable(shard, hidden=hidden, weight=weight, target=target, bias=bias)
        alike = {
            "size of hidden": hidden.shape[-1],
            "dtype": hidden.dtype,
            "ignore_index": ignore_index,
            "label_smoothing": float(label_smoothing),
            "z_loss": float(z_loss),
            "reduction": reduction,
            "return_log_partition": return_log_partition,
            "tokens": tokens,
            "loss": loss,
            "presence of a bias": bias is not None,
        } | derivatives_wanted("hidden", [hidden], [weight, bias])
        free, count = {"words": len(weight)}, {"number of tokens": target.numel()}
        if own:
            return words, Call("linear_cross_entropy", alike, {}, free | count)
        return words, Call("linear_cross_entropy", alike | count, {"target": target, "hidden": hidden}, free)

    words, numbers_of = together(shard, check)
    counts = numbers_of["words"]
    lengths = numbers_of.get("number of tokens", [target.numel()] * shard.size)
    dtype = working_dtype(hidden)
    with without_autocast(hidden.device):
        words = words.reshape(-1)
        all_words = rows.everyone(words, lengths, shard) if own else words
        counted = all_words != ignore_index
        # Each process looks at all tokens, so each raises.
        check_places("target", all_words[counted], sum(counts), f" or be ignore_index, {ignore_index}")
        row = hidden.reshape(-1, hidden.shape[-1])
        row = (rows.everyone(row, lengths, shard) if own else replicate(row, shard)).to(dtype)
        mine, place = rows.places(all_words.where(counted, -1), counts, shard)
        (found,) = log_partitions(ScorePlan(row, weight, bias, place, bias_in_score=True))
        numbers = [found.log_partition, rows.held(found, row, weight, bias, mine, place)]
        if label_smoothing:
            scores = row @ weight.sum(0, dtype=dtype)
            numbers.append(scores if bias is None else scores + bias.sum(dtype=dtype))
        own_counted = words != ignore_index
        if own:
            direction, score = _of_own_tokens(numbers, words.where(own_counted, 0), lengths, counts, shard)
        else:
            direction, score = _of_all_tokens(numbers, mine, shard)
        level = direction.log_partition
        smooth = label_smoothing * (level - score / sum(counts)) if label_smoothing else None
        nats = vocabulary.token_losses(direction, smooth, own_counted, None, label_smoothing, z_loss)
        if loss == "sharded" and not own:
            nats, level = replicate(torch.stack([nats, level]), shard)
        if reduction == "none":
            nats = nats.reshape(target.shape)
        else:
            nats = total(nats.sum(), shard) if own else nats.sum()
            nats = replicate(nats, shard) if own and loss == "sharded" else nats
            nats = nats / counted.sum() if reduction == "mean" else nats
    return CrossEntropyResult(nats, level.reshape(target.shape)) if return_log_partition else nats


def _of_all_tokens(numbers: list[Tensor], mine: Tensor, group: Peers) -> tuple[Direction, Tensor]:
    """Log Z over all words, its excess, and the sum of the scores if it is wanted, of replicated tokens."""
    own, excess, *scores = numbers
    level = merge(only(own), group).log_partition
    # Where a process holds the word: log Z − score = (its own log Z − score) + (log Z − its own log Z).
    excess = excess + (replicate(level, group) - rows.seen_level(own))
    sums = total(torch.stack([excess.masked_fill(~mine, 0.0), *scores]), group)
    return Direction(sums[0], level), sums[-1]


def _of_own_tokens(
    numbers: list[Tensor], words: Tensor, lengths: list[int], counts: list[int], group: Peers
) -> tuple[Direction, Tensor]:
    """The same of this process's tokens."""
    found = rows.answers(torch.stack(numbers, -1), lengths, group)
    return rows.settled(found, words, counts), found[..., -1].sum(0)
