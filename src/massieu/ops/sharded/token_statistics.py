"""Token statistics with the words sharded over processes, and the tokens too if they are."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from massieu.foundation.arguments import choice, number
from massieu.foundation.numerics import logsumexp
from massieu.foundation.transforms import uncompiled, without_autocast
from massieu.ops import vocabulary
from massieu.ops.linear_scores import Direction, RowStatistics, check_places, compute
from massieu.ops.sharded import rows
from massieu.ops.sharded.agreement import Call, check_sendable, derivatives_wanted, together
from massieu.ops.sharded.collectives import Peers, gather, replicate, total
from massieu.ops.sharded.keys import Placement, Processes
from massieu.ops.token_statistics import (
    TokenStatisticsResult,
    check_options,
    logit_plan,
    statistics,
    tie_level,
    without_ignored,
)


@uncompiled
def token_statistics(
    hidden: Float[Tensor, "*lead D"],
    weight: Float[Tensor, "V D"],
    target: Int[Tensor, "*lead"],
    *,
    bias: Float[Tensor, "V"] | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    tokens: Placement = "replicated",
    loss: Placement | None = None,
    group: Processes = None,
) -> TokenStatisticsResult:
    """`massieu.ops.token_statistics` with the vocabulary sharded: each process has some of the words.

    Args:
        hidden, target: the same on all processes, or this process's own, as `tokens` says; their number may differ then.
            Targets number all words, those of process 0 first, then those of process 1, ….
        weight, bias: of this process's words, at least one; a bias on all processes or on none.
        temperature, softcap, ignore_index: as in `massieu.ops.token_statistics`; the temperature is a number.
        tokens: "replicated", or "sharded": each process has tokens of its own, and gets the results of those.
        loss: "replicated" if all processes use the same results in the same way: they count once. "sharded" if each makes its
            own loss of them, and the objective is their sum; see `massieu.ops.sharded`. By default it is what `tokens` is.
        group: as in `massieu.ops.sharded.attention`.

    For each token every process sends five numbers to each process that returns its results, and the target's score to all;
    sharded tokens are sent to all processes. Entropies merge exactly: H = Σ_k a_k·(H_k − log a_k), where process k's words
    have the probability a_k and among themselves the entropy H_k. Results and gradients equal those of one process to
    rounding.

    Raises:
        TypeError: as `massieu.ops.token_statistics`; a temperature that is no number.
        ValueError: the same, a target out of range on any device; processes differ in what must be alike.
        RuntimeError: another process refused its arguments, or it died; a call inside `torch.func.vmap`.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from massieu.ops import sharded
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> statistics = sharded.token_statistics(torch.zeros(3, 2), torch.zeros(5, 2), torch.tensor([0, 1, 4]))
        >>> round(float(statistics.entropy.exp().mean()), 3)  # five words alike
        5.0
        >>> dist.destroy_process_group()
    """
    shard = Peers.of(group)
    are_sharded = isinstance(tokens, str) and tokens == "sharded"

    def check() -> tuple[Tensor, Call]:
        words = vocabulary.check_shapes(hidden, weight, target, bias)
        number("temperature", temperature, above=0)
        check_options(hidden, temperature, softcap, ignore_index)
        choice("tokens", tokens, "replicated", "sharded")
        choice("loss", loss, "replicated", "sharded", None)
        if are_sharded and loss == "replicated":
            raise ValueError("statistics of sharded tokens are each process's own: loss must be 'sharded'")
        check_sendable(shard, hidden=hidden, weight=weight, target=target, bias=bias)
        alike = {
            "size of hidden": hidden.shape[-1],
            "dtype": hidden.dtype,
            "temperature": float(temperature),
            "softcap": None if softcap is None else float(softcap),
            "ignore_index": ignore_index,
            "tokens": tokens,
            "loss": loss,
            "presence of a bias": bias is not None,
        } | derivatives_wanted("hidden", [hidden], [weight, bias])
        numbers = {"words": len(weight)}
        token_count = {"number of tokens": target.numel()}
        if are_sharded:
            return words, Call("token_statistics", alike, {}, numbers | token_count)
        replicated = {"target": target, "hidden": hidden}
        return words, Call("token_statistics", alike | token_count, replicated, numbers)

    words, numbers_of = together(shard, check)
    word_counts = numbers_of["words"]
    lengths = numbers_of.get("number of tokens", [target.numel()] * shard.size)
    with without_autocast(hidden.device):
        # All tokens are here from now on: replicated ones are, and sharded ones are gathered.
        words = words.reshape(-1)
        row = hidden.reshape(-1, hidden.shape[-1])
        all_words = rows.gather_rows(words, lengths, shard) if are_sharded else words
        all_counts = all_words != ignore_index
        # Each process checks all targets, so that all raise.
        check_places("target", all_words[all_counts], sum(word_counts), f" or be ignore_index, {ignore_index}")
        row = rows.gather_rows(row, lengths, shard) if are_sharded else replicate(row, shard)
        # Zeros, so that a NaN of an ignored token reaches no gradient of the weights, which all tokens share.
        row = row.masked_fill(~all_counts.unsqueeze(1), 0.0)
        is_own, place = rows.own_places(all_words.where(all_counts, -1), word_counts, shard)
        plan = logit_plan(row, weight, bias, place, temperature, vocabulary.checked_softcap(softcap, hidden))
        # Only a token's holder knows its target's score: it is 0 elsewhere, and the sum goes to all.
        above = tie_level(plan).masked_fill(~is_own, 0.0)
        if are_sharded:
            own_above = rows.exchange_answers(above.unsqueeze(-1), lengths, shard)[..., 0].sum(0)
            above = rows.gather_rows(own_above, lengths, shard)
        else:
            above = total(above, shard)
        part = RowStatistics(*compute(plan._replace(above=above)))
        direction = Direction(part.excess, part.log_partition)
        excess = rows.holder_excess(direction, plan.row.to(plan.dtype), weight, plan.bias, is_own, place)
        answers = torch.stack(
            [excess, part.log_partition, part.entropy, part.surplus.detach(), part.larger.detach()], -1
        )
        # (processes, tokens, 5), for this process's tokens or for all.
        answers = rows.exchange_answers(answers, lengths, shard) if are_sharded else gather(answers, shard)
        counts = words != ignore_index
        result = statistics(_merged(answers, rows.holders(words.where(counts, 0), word_counts)))
        if not are_sharded and loss != "sharded":
            # All processes have computed the same result, which counts once: each takes one part of its gradient.
            result = (total(part / shard.size, shard, part.detach()) if part.requires_grad else part for part in result)
        result = without_ignored(result, counts)
    return TokenStatisticsResult(*(part.reshape(target.shape) for part in result))


def _merged(numbers: Tensor, holder: Tensor) -> RowStatistics:
    """The statistics over all words, from those over each process's words.

    Args:
        numbers: (processes, tokens, 5): `rows.holder_excess`, log Z, entropy, log Z − the largest score, and how many scores
            exceed the target's.
        holder: rank of the process that holds the target.
    """
    holder_excess, log_z, entropy, surplus, larger = numbers.unbind(-1)
    has_words = log_z != -torch.inf
    other_log_z = [logsumexp(torch.cat([log_z[:rank], log_z[rank + 1 :]]).mT) for rank in range(len(log_z))]
    # log Z over all words − that over the process's words: at least 0, exact to the last digit where the process has nearly all
    # the weight. exp(−lag) is the probability of the process's words.
    lag = F.softplus(torch.stack(other_log_z) - log_z.where(has_words, 0.0)).where(has_words, 0.0)
    share = (-lag).exp().where(has_words, 0.0)
    smallest_surplus = (surplus + lag).masked_fill(~has_words, torch.inf).amin(0)
    return RowStatistics(
        excess=(holder_excess + lag).gather(0, holder.unsqueeze(0)).squeeze(0),
        log_partition=logsumexp(log_z.mT),
        entropy=(share * (entropy + lag)).sum(0),
        surplus=smallest_surplus,
        largest=smallest_surplus,  # not used here: processes send the surplus, of which more digits are left
        larger=larger.sum(0),
    )
