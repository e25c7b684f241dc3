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
    of_counted,
    scores,
    statistics,
    tie_level,
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
        hidden, target: the same on all processes, or this process's own, of any number; see `tokens`. Targets number all
            words, those of process 0 first, then those of process 1, ….
        weight, bias: of this process's words, at least one; a bias on all processes or on none.
        temperature, softcap, ignore_index: as in `massieu.ops.token_statistics`; the temperature is a number.
        tokens: "replicated", or "sharded": each process has tokens of its own, and gets the results of those.
        loss: "replicated" where every process goes on with the same results, which count once; "sharded" where what they
            make of them differs, and the objective is the sum; see `massieu.ops.sharded`. By default what `tokens` is.
        group: as in `massieu.ops.sharded.attention`.

    Five numbers a token go from each process to each that wants its results, and the target's score to all; sharded tokens
    are sent to all processes. Entropies merge exactly: H = Σ_k a_k·(H_k − log a_k), where process k's words have the
    probability a_k and among themselves the entropy H_k. Results and gradients equal those of one process to rounding.

    Raises:
        TypeError: as `massieu.ops.token_statistics`; a temperature that is no number.
        ValueError: the same, a target out of range on any device; processes differ in what must be alike.
        RuntimeError: another process refused its arguments, or it died; a call inside `torch.func.vmap`.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from massieu.ops import sharded
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> found = sharded.token_statistics(torch.zeros(3, 2), torch.zeros(5, 2), torch.tensor([0, 1, 4]))
        >>> round(float(found.entropy.exp().mean()), 3)  # five words alike
        5.0
        >>> dist.destroy_process_group()
    """
    shard = Peers.of(group)
    own = isinstance(tokens, str) and tokens == "sharded"

    def check() -> tuple[Tensor, Call]:
        words = vocabulary.check_shapes(hidden, weight, target, bias)
        number("temperature", temperature, above=0)
        check_options(hidden, temperature, softcap, ignore_index)
        choice("tokens", tokens, "replicated", "sharded")
        choice("loss", loss, "replicated", "sharded", None)
        if own and loss == "replicated":
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
        free, count = {"words": len(weight)}, {"number of tokens": target.numel()}
        if own:
            return words, Call("token_statistics", alike, {}, free | count)
        return words, Call("token_statistics", alike | count, {"target": target, "hidden": hidden}, free)

    words, numbers_of = together(shard, check)
    counts = numbers_of["words"]
    lengths = numbers_of.get("number of tokens", [target.numel()] * shard.size)
    with without_autocast(hidden.device):
        words, row = words.reshape(-1), hidden.reshape(-1, hidden.shape[-1])
        all_words = rows.everyone(words, lengths, shard) if own else words
        counted = all_words != ignore_index
        # Each process looks at all tokens, so each raises.
        check_places("target", all_words[counted], sum(counts), f" or be ignore_index, {ignore_index}")
        row = (rows.everyone(row, lengths, shard) if own else replicate(row, shard)).masked_fill(
            ~counted.unsqueeze(1), 0.0
        )
        mine, place = rows.places(all_words.where(counted, -1), counts, shard)
        plan = scores(row, weight, bias, place, temperature, vocabulary.checked_softcap(softcap, hidden))
        above = tie_level(plan).masked_fill(~mine, 0.0)
        if own:
            above = rows.everyone(rows.answers(above.unsqueeze(-1), lengths, shard)[..., 0].sum(0), lengths, shard)
        else:
            above = total(above, shard)
        part = RowStatistics(*compute(plan._replace(above=above)))
        held = rows.held(Direction(*part[:2]), plan.row.to(plan.dtype), weight, plan.bias, mine, place)
        numbers = [held, part.log_partition, part.entropy, part.surplus.detach(), part.larger.detach()]
        numbers = torch.stack(numbers, -1)
        numbers = rows.answers(numbers, lengths, shard) if own else gather(numbers, shard)
        counted = words != ignore_index
        result = statistics(_merged(numbers, rows.holders(words.where(counted, 0), counts)))
        if not own and loss != "sharded":
            # Every process has computed the same; of its gradient each takes one part.
            result = (total(part / shard.size, shard, part.detach()) if part.requires_grad else part for part in result)
        result = of_counted(result, counted)
    return TokenStatisticsResult(*(part.reshape(target.shape) for part in result))


def _merged(numbers: Tensor, holder: Tensor) -> RowStatistics:
    """The statistics over all words, from what each process says of its own.

    Args:
        numbers: (processes, tokens, 5): held excess, log Z, entropy, log Z less the largest score, count.
        holder: Which process has the target.
    """
    held, level, entropy, surplus, count = numbers.unbind(-1)
    seen = level != -torch.inf
    others = [logsumexp(torch.cat([level[:own], level[own + 1 :]]).mT) for own in range(len(level))]
    # log Z less the process's own log Z: at least 0, and where that is nearly all, to its last digit.
    lag = F.softplus(torch.stack(others) - level.where(seen, 0.0)).where(seen, 0.0)
    share = (-lag).exp().where(seen, 0.0)
    excess = (held + lag).gather(0, holder.unsqueeze(0)).squeeze(0)
    largest = (surplus + lag).masked_fill(~seen, torch.inf).amin(0)
    return RowStatistics(excess, logsumexp(level.mT), (share * (entropy + lag)).sum(0), largest, largest, count.sum(0))
