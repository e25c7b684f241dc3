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
        hidden, target: the same on all processes, or this process's own, as `tokens` says; their number may differ then.
            Targets number all words, those of process 0 first, then those of process 1, ….
        weight, bias: of this process's words, at least one; a bias on all processes or on none.
        ignore_index, label_smoothing, z_loss, reduction, return_log_partition: as in `massieu.ops.linear_cross_entropy`.
        tokens: "replicated", or "sharded": each process has tokens of its own. A sum or mean is then over the tokens of all
            processes and the same on all; losses and log-partitions of single tokens are those of this process's.
        loss: "replicated" if all processes use the same result in the same way: it counts once. "sharded" if each makes its
            own loss of it, and the objective is their sum; see `massieu.ops.sharded`. By default "replicated", except for
            sharded tokens without a reduction: their losses are this process's own, so that only "sharded" is possible.
        group: as in `massieu.ops.sharded.attention`.

    What is sent does not depend on the number of words. For replicated tokens about five numbers each are summed over
    processes, and in the backward pass the gradient of `hidden`. Sharded tokens are sent to all processes, which send two or
    three numbers back. Results and gradients equal those of one process to rounding.

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
    are_sharded = isinstance(tokens, str) and tokens == "sharded"

    def check() -> tuple[Tensor, Call]:
        words = vocabulary.check_shapes(hidden, weight, target, bias)
        vocabulary.check_options(ignore_index, label_smoothing, z_loss, reduction, return_log_partition)
        choice("tokens", tokens, "replicated", "sharded")
        choice("loss", loss, "replicated", "sharded", None)
        if are_sharded and reduction == "none" and loss == "replicated":
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
        numbers = {"words": len(weight)}
        token_count = {"number of tokens": target.numel()}
        if are_sharded:
            return words, Call("linear_cross_entropy", alike, {}, numbers | token_count)
        replicated = {"target": target, "hidden": hidden}
        return words, Call("linear_cross_entropy", alike | token_count, replicated, numbers)

    words, numbers_of = together(shard, check)
    word_counts = numbers_of["words"]
    lengths = numbers_of.get("number of tokens", [target.numel()] * shard.size)
    dtype = working_dtype(hidden)
    with without_autocast(hidden.device):
        # All tokens are here from now on: replicated ones are, and sharded ones are gathered.
        words = words.reshape(-1)
        row = hidden.reshape(-1, hidden.shape[-1])
        if are_sharded:
            all_words = rows.gather_rows(words, lengths, shard)
            row = rows.gather_rows(row, lengths, shard).to(dtype)
        else:
            all_words = words
            row = replicate(row, shard).to(dtype)
        all_counts = all_words != ignore_index
        # Each process checks all targets, so that all raise.
        check_places("target", all_words[all_counts], sum(word_counts), f" or be ignore_index, {ignore_index}")
        is_own, place = rows.own_places(all_words.where(all_counts, -1), word_counts, shard)
        (own_direction,) = log_partitions(ScorePlan(row, weight, bias, place, bias_in_score=True))
        excess = rows.holder_excess(own_direction, row, weight, bias, is_own, place)
        answers = [own_direction.log_partition, excess]
        if label_smoothing:
            # The sum of the scores over this process's words, from the sum of the words' vectors.
            score_sum = row @ weight.sum(0, dtype=dtype)
            answers.append(score_sum if bias is None else score_sum + bias.sum(dtype=dtype))
        counts = words != ignore_index
        if are_sharded:
            direction, score_sum = _merge_for_own_tokens(answers, words.where(counts, 0), lengths, word_counts, shard)
        else:
            direction, score_sum = _merge_for_all_tokens(answers, is_own, shard)
        log_z = direction.log_partition
        soft_loss = label_smoothing * (log_z - score_sum / sum(word_counts)) if label_smoothing else None
        losses = vocabulary.token_losses(direction, soft_loss, counts, None, label_smoothing, z_loss)
        if loss == "sharded" and not are_sharded:
            losses, log_z = replicate(torch.stack([losses, log_z]), shard)
        if reduction == "none":
            result = losses.reshape(target.shape)
        else:
            result = losses.sum()
            if are_sharded:
                result = total(result, shard)
            if are_sharded and loss == "sharded":
                result = replicate(result, shard)
            if reduction == "mean":
                result = result / all_counts.sum()
    return CrossEntropyResult(result, log_z.reshape(target.shape)) if return_log_partition else result


def _merge_for_all_tokens(answers: list[Tensor], is_own: Tensor, group: Peers) -> tuple[Direction, Tensor]:
    """Log Z over all words and its excess, and the last of the answers summed over processes, of replicated tokens.

    Args:
        answers: log Z over this process's words, `rows.holder_excess` and, with smoothing, the sum of the scores.
        is_own: whether this process holds the token's word.
    """
    own_log_z, excess, *score_sums = answers
    log_z = merge(only(own_log_z), group).log_partition
    # On the holder: log Z − score = (its own log Z − score) + (log Z − its own log Z).
    excess = excess + (replicate(log_z, group) - rows.finite_level(own_log_z))
    sums = total(torch.stack([excess.masked_fill(~is_own, 0.0), *score_sums]), group)
    return Direction(sums[0], log_z), sums[-1]


def _merge_for_own_tokens(
    answers: list[Tensor], words: Tensor, lengths: list[int], word_counts: list[int], group: Peers
) -> tuple[Direction, Tensor]:
    """The same of this process's tokens, from answers for those of all processes."""
    received = rows.exchange_answers(torch.stack(answers, -1), lengths, group)
    return rows.merge_answers(received, words, word_counts), received[..., -1].sum(0)
