"""What the processes of `test_sharded` do with the two losses, and the same by one process."""

import math
from functools import partial

import torch
from tests.support.ops.sharded_work import SIZE, draw, gradients, shards

from massieu.ops import sharded
from massieu.ops.contrastive import FalseNegatives, info_nce
from massieu.ops.token_statistics import token_statistics
from massieu.ops.vocabulary import linear_cross_entropy

WORDS = {2: (6, 5), 4: (3, 2, 2, 4)}
TOKENS = {2: (4, 2), 4: (1, 0, 3, 2)}
"""Of each process where they are sharded; one has none."""
PAIRS = {2: (4, 3), 4: (2, 1, 2, 2)}
NEGATIVES = {2: (0, 2), 4: (1, 0, 1, 0)}
KEYS = {2: (3, 2), 4: (1, 3, 0, 1)}
"""Where positives are told, keys are as many as they like."""

# --- a vocabulary ----------------------------------------------------------------------------------------------------

CROSS_ENTROPIES = {
    "mean": {},
    "sum, smoothed": {"reduction": "sum", "label_smoothing": 0.2},
    "none, all": {"reduction": "none", "label_smoothing": 0.1, "z_loss": 0.3},
}
TARGET = torch.tensor([[0, 5, 10], [6, -100, 3]])


def words():
    count = sum(WORDS[2])
    tensors = draw(2, 3, SIZE, seed=1), draw(count, SIZE, seed=2), draw(count, seed=3)
    return [tensor.requires_grad_() for tensor in tensors]


def cross_entropy(rank, size, options, loss):
    hidden, *rest = words()
    weight, bias = shards(rest, WORDS[size], rank, (0, 0))
    bias = None if options == {} else bias
    call = partial(sharded.linear_cross_entropy, return_log_partition=True, loss=loss, **options)
    nats, log_z = call(hidden, weight, TARGET, bias=bias)
    factor = 1 if loss == "replicated" else rank + 1
    objective = factor * (nats.square().sum() + (log_z.sin().sum() if rank != 1 or factor == 1 else 0.0))
    wanted = (hidden, weight) if bias is None else (hidden, weight, bias)
    return [nats.detach(), log_z.detach(), *gradients(objective, *wanted)]


def cross_entropy_alone(size, options, loss):
    hidden, weight, bias = words()
    bias = None if options == {} else bias
    nats, log_z = linear_cross_entropy(hidden, weight, TARGET, bias=bias, return_log_partition=True, **options)
    factors = [1] if loss == "replicated" else range(1, size + 1)
    objective = sum(factor * (nats.square().sum() + (log_z.sin().sum() if factor != 2 else 0.0)) for factor in factors)
    wanted = (hidden, weight) if bias is None else (hidden, weight, bias)
    return [nats, log_z, *gradients(objective, *wanted)]


def own_tokens(rank, size, options, loss):
    """Tokens sharded too; a sum or mean is replicated, the rest is the process's own."""
    hidden, *rest = words()
    (hidden,) = shards([hidden.flatten(0, 1)], TOKENS[size], rank, (0,))
    weight, bias = shards(rest, WORDS[size], rank, (0, 0))
    bias = None if options == {} else bias
    target = TARGET.flatten().split(TOKENS[size])[rank]
    call = partial(sharded.linear_cross_entropy, return_log_partition=True, tokens="sharded", loss=loss, **options)
    nats, log_z = call(hidden, weight, target, bias=bias)
    factor = 1 if loss == "replicated" else rank + 1
    objective = factor * nats.square().sum() + (rank + 1) * log_z.sin().sum()
    wanted = (hidden, weight) if bias is None else (hidden, weight, bias)
    return [nats.detach(), log_z.detach(), *gradients(objective, *wanted)]


def own_tokens_alone(size, options, loss):
    hidden, weight, bias = words()
    bias = None if options == {} else bias
    hidden = hidden.detach().flatten(0, 1).requires_grad_()
    result = linear_cross_entropy(hidden, weight, TARGET.flatten(), bias=bias, return_log_partition=True, **options)
    ranks = torch.repeat_interleave(torch.arange(size), torch.tensor(TOKENS[size])) + 1
    factor = ranks if result.loss.ndim else 1 if loss == "replicated" else size * (size + 1) // 2
    objective = (factor * result.loss.square()).sum() + (ranks * result.log_partition.sin()).sum()
    wanted = (hidden, weight) if bias is None else (hidden, weight, bias)
    return [*result, *gradients(objective, *wanted)]


def hidden_words(rank, size):
    """All words of process 0 have the bias −inf, the targets among them too: the loss is inf there, and no NaN."""
    hidden, *rest = words()
    weight, bias = shards(rest, WORDS[size], rank, (0, 0))
    bias = bias.detach() if rank else torch.full_like(bias, -math.inf)
    alike = sharded.linear_cross_entropy(hidden, weight, TARGET, bias=bias, reduction="none")
    mine = hidden.flatten(0, 1).split(TOKENS[size])[rank], TARGET.flatten().split(TOKENS[size])[rank]
    own = sharded.linear_cross_entropy(mine[0], weight, mine[1], bias=bias, reduction="none", tokens="sharded")
    return [alike.detach(), own.detach()]


def hidden_words_alone(size):
    hidden, weight, bias = (tensor.detach() for tensor in words())
    bias[: WORDS[size][0]] = -math.inf
    nats = torch.nn.functional.cross_entropy((hidden @ weight.mT + bias).mT, TARGET, reduction="none")
    return [nats, nats.flatten()]


STATISTICS = {
    "all words": {},
    "softly capped": {"softcap": 1.5, "temperature": 0.7},
    "words hidden": {"bias": "hidden"},
}


def statistics_inputs(options):
    """The bias of the first words may hide them: all of process 0, of two, one target among them."""
    hidden, weight, bias = words()
    if options.get("bias") == "hidden":
        bias = bias.detach().masked_fill(torch.arange(len(bias)) < WORDS[2][0] - 1, -math.inf)
    return hidden, weight, bias, {name: value for name, value in options.items() if name != "bias"}


def of_statistics(found, factor, wanted):
    """All five, and derivatives of an objective of the first three where they are finite."""
    parts = [part.masked_fill(part.detach().isinf(), 0.0) for part in found[:3]]
    objective = (factor * sum((index + 1) * part.sin() for index, part in enumerate(parts))).sum()
    return [*(part.detach().double() for part in found), *gradients(objective, *wanted)]


def statistics(rank, size, options, placement, loss):
    hidden, *rest, options = statistics_inputs(options)
    weight, bias = shards(rest, WORDS[size], rank, (0, 0))
    target, factor = TARGET, 1 if loss == "replicated" else rank + 1
    if placement == "sharded":
        (hidden,) = shards([hidden.flatten(0, 1)], TOKENS[size], rank, (0,))
        target = TARGET.flatten().split(TOKENS[size])[rank]
    given = {"bias": bias, "tokens": placement, "loss": loss, **options}
    return of_statistics(sharded.token_statistics(hidden, weight, target, **given), factor, (hidden, weight))


def statistics_alone(size, options, placement, loss):
    hidden, weight, bias, options = statistics_inputs(options)
    target, factor = TARGET, 1 if loss == "replicated" else size * (size + 1) // 2
    if placement == "sharded":
        hidden, target = hidden.detach().flatten(0, 1).requires_grad_(), TARGET.flatten()
        factor = torch.repeat_interleave(torch.arange(size), torch.tensor(TOKENS[size])) + 1
    return of_statistics(token_statistics(hidden, weight, target, bias=bias, **options), factor, (hidden, weight))


def sure_statistics(rank, size):
    """Nearly all on one word: gaps of 5, 15 and 40 between the first and the others, in float32."""
    weight = torch.zeros(sum(WORDS[2]), 1)
    weight[0] = 1.0
    hidden = torch.tensor([[5.0], [15.0], [40.0]])
    (part,) = shards([weight], WORDS[size], rank, (0,))
    return [found.detach() for found in sharded.token_statistics(hidden, part, torch.zeros(3, dtype=torch.int64))]


PLACED = (("replicated", "replicated"), ("replicated", "sharded"), ("sharded", "sharded"))

# --- pairs -----------------------------------------------------------------------------------------------------------

IDS = torch.tensor([0, 1, 2, 0, 1, 5, 6])
NEGATIVE_IDS = torch.tensor([0, 9])


def pairs():
    count = sum(PAIRS[2])
    tensors = draw(count, SIZE, seed=1), draw(count, SIZE, seed=2), draw(2, SIZE, seed=3)
    return [tensor.requires_grad_() for tensor in tensors]


def contrast(rank, size, full, symmetric):
    *both, negatives = pairs()
    q, k = shards(both, PAIRS[size], rank, (0, 0))
    (m,) = shards([negatives], NEGATIVES[size], rank, (0,))
    temperature, options = torch.tensor(0.7, dtype=torch.float64, requires_grad=True), {}
    if full:
        own = IDS.split(PAIRS[size])[rank]
        others = torch.cat([own, NEGATIVE_IDS.split(NEGATIVES[size])[rank]])
        options = {"negatives": m, "log_weight": FalseNegatives(own, others)}
    result = sharded.info_nce(q, k, temperature=temperature, symmetric=symmetric, return_log_partition=True, **options)
    objective = result.loss.square() + result.log_partition.sin().sum()
    wanted = (q, k, temperature, m) if full else (q, k, temperature)
    return [*(part.detach() for part in result), *gradients(objective, *wanted)]


def contrast_alone(size, full, symmetric):
    q, k, m = pairs()
    temperature, options = torch.tensor(0.7, dtype=torch.float64, requires_grad=True), {}
    if full:
        options = {"negatives": m, "log_weight": FalseNegatives(IDS, torch.cat([IDS, NEGATIVE_IDS]))}
    result = info_nce(q, k, temperature=temperature, symmetric=symmetric, return_log_partition=True, **options)
    objective = result.loss.square() + result.log_partition.sin().sum()
    return [*result, *gradients(objective, *((q, k, temperature, m) if full else (q, k, temperature)))]


def told_positives(rank, size, loss):
    """Positives anywhere, and a log-weight of each key: −inf for all of process 0, positives among them."""
    q, k, m = pairs()
    (q,), (k,) = shards([q], PAIRS[size], rank, (0,)), shards([k[: sum(KEYS[size])]], KEYS[size], rank, (0,))
    (m,) = shards([m], NEGATIVES[size], rank, (0,))
    w = key_weights(rank, size).requires_grad_()
    positive = POSITIVE.split(PAIRS[size])[rank]
    options = {"positive": positive, "negatives": m, "log_weight": w, "temperature": 0.7, "loss": loss}
    result = sharded.info_nce(q, k, return_log_partition=True, **options)
    factor = 1 if loss == "replicated" else rank + 1
    objective = factor * result.loss.square() + result.log_partition.sin().sum()
    return [*(part.detach() for part in result), *gradients(objective, q, k, m, w)]


POSITIVE = torch.tensor([0, 4, 3, 0, 2, 1, 1])


def key_weights(rank, size):
    count = KEYS[size][rank] + NEGATIVES[size][rank]
    return draw(count, seed=10 + rank) if rank else torch.full((count,), -math.inf, dtype=torch.float64)


def told_positives_alone(size, loss):
    q, k, m = pairs()
    k = k[: sum(KEYS[size])].detach().requires_grad_()
    parts = [key_weights(rank, size).split([KEYS[size][rank], NEGATIVES[size][rank]]) for rank in range(size)]
    w, v = (torch.cat(some).requires_grad_() for some in zip(*parts, strict=True))
    options = {"positive": POSITIVE, "negatives": m, "log_weight": torch.cat([w, v]), "temperature": 0.7}
    result = info_nce(q, k, return_log_partition=True, **options)
    factor = 1 if loss == "replicated" else size * (size + 1) // 2
    objective = factor * result.loss.square() + result.log_partition.sin().sum()
    found = gradients(objective, q, k, m, w, v)
    return [*result, *found[:3], (found[3], found[4]), *found[5:8], (found[8], found[9])]


def mask_of_positives():
    """Those of equal ids but the query itself; queries 2, 5 and 6 have none."""
    return (IDS[:, None] == IDS) & ~torch.eye(7, dtype=torch.bool)


def several_positives(rank, size, symmetric, full, loss):
    """A mask of positives anywhere; with `full`, weights of pairs that hide each view from itself, and negatives."""
    *both, negatives = pairs()
    q, k = shards(both, PAIRS[size], rank, (0, 0))
    (m,) = shards([negatives], NEGATIVES[size], rank, (0,))
    temperature = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    options = {"positive": mask_of_positives().split(PAIRS[size])[rank], "loss": loss, "temperature": temperature}
    if full:
        own = (~torch.eye(7, dtype=torch.bool)).split(PAIRS[size], 1)[rank]
        options |= {"negatives": m, "log_weight": torch.cat([own, own.new_ones(7, len(m))], 1)}
    result = sharded.info_nce(q, k, symmetric=symmetric, return_log_partition=True, **options)
    factor = 1 if loss == "replicated" else rank + 1
    objective = factor * result.loss.square() + result.log_partition.sin().sum()
    wanted = (q, k, temperature, m) if full else (q, k, temperature)
    return [*(part.detach() for part in result), *gradients(objective, *wanted)]


def several_positives_alone(size, symmetric, full, loss):
    q, k, m = pairs()
    temperature = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    options = {"positive": mask_of_positives(), "temperature": temperature}
    if full:
        own = ~torch.eye(7, dtype=torch.bool)
        options |= {"negatives": m, "log_weight": torch.cat([own, own.new_ones(7, len(m))], 1)}
    result = info_nce(q, k, symmetric=symmetric, return_log_partition=True, **options)
    factor = 1 if loss == "replicated" else size * (size + 1) // 2
    objective = factor * result.loss.square() + result.log_partition.sin().sum()
    return [*result, *gradients(objective, *((q, k, temperature, m) if full else (q, k, temperature)))]


def uncounted(rank, size):
    """A query without a positive and a key that nobody sees hold NaN; ids hide keys, but not the positives."""
    q, k, _ = (tensor.detach().clone() for tensor in pairs())
    q[2], k[5] = math.nan, math.nan
    q, k = ([part.clone().requires_grad_() for part in tensor.split(PAIRS[size])][rank] for tensor in (q, k))
    seen = (torch.arange(7) != 5).split(PAIRS[size])[rank]
    positive = mask_of_positives().split(PAIRS[size])[rank]
    loss = sharded.info_nce(q, k, positive=positive, log_weight=seen, temperature=0.7)
    ids = IDS.split(PAIRS[size])[rank]
    by_ids = sharded.info_nce(
        *(draw(7, SIZE, seed=seed).split(PAIRS[size])[rank] for seed in (1, 2)),
        positive=positive,
        log_weight=FalseNegatives(ids),
        temperature=0.7,
    )
    return [loss.detach(), *(part.detach() for part in torch.autograd.grad(loss, (q, k))), by_ids]


def uncounted_alone():
    """The same without the query and the key."""
    q, k, _ = pairs()
    kept = torch.arange(7) != 5
    positive = mask_of_positives()
    loss = info_nce(q[torch.arange(7) != 2], k[kept], positive=positive[torch.arange(7) != 2][:, kept], temperature=0.7)
    by_ids = info_nce(q, k, positive=positive, log_weight=FalseNegatives(IDS), temperature=0.7)
    return [loss, *torch.autograd.grad(loss, (q, k)), by_ids]


def by_process(pair, size):
    """Numbers of keys and of negatives in the order of the processes."""
    keys, negatives = pair[0].split(KEYS[size]), pair[1].split(NEGATIVES[size])
    return torch.cat([torch.cat(both) for both in zip(keys, negatives, strict=True)])


def weighed_pairs(rank, size, symmetric, boolean):
    """A log-weight of each query of all processes and key of this one."""
    *both, _ = pairs()
    q, k = shards(both, PAIRS[size], rank, (0, 0))
    (w,) = shards([pair_weights(boolean)], PAIRS[size], rank, (1,)) if not boolean else [None]
    mine = pair_weights(boolean).split(PAIRS[size], 1)[rank] if boolean else w
    result = sharded.info_nce(q, k, log_weight=mine, temperature=0.7, symmetric=symmetric, return_log_partition=True)
    objective = result.loss.square() + (0.0 if boolean else result.log_partition.sin().sum())
    return [*(part.detach() for part in result), *gradients(objective, *((q, k) if boolean else (q, k, w)))]


def pair_weights(boolean):
    """Booleans of which one query and one key see nothing."""
    weight = draw(7, 7, seed=20)
    if boolean:
        weight = weight > -0.5
        weight[2], weight[:, 5] = False, False
    return weight


def weighed_pairs_alone(size, symmetric, boolean):
    q, k, _ = pairs()
    w = pair_weights(boolean) if boolean else pair_weights(boolean).requires_grad_()
    result = info_nce(q, k, log_weight=w, temperature=0.7, symmetric=symmetric, return_log_partition=True)
    objective = result.loss.square() + (0.0 if boolean else result.log_partition.sin().sum())
    return [*result, *gradients(objective, *((q, k) if boolean else (q, k, w)))]


# --- all -------------------------------------------------------------------------------------------------------------

PLACEMENTS = ("replicated", "sharded")


def everything(rank, size):
    found = {}
    for name, options in CROSS_ENTROPIES.items():
        for loss in PLACEMENTS:
            found[f"cross-entropy, {name}, {loss} loss"] = cross_entropy(rank, size, options, loss)
            own = "sharded" if options.get("reduction") == "none" else loss
            found[f"own tokens, {name}, {loss} loss"] = own_tokens(rank, size, options, own)
    found["hidden words"] = hidden_words(rank, size)
    for name, options in STATISTICS.items():
        for kind in PLACED:
            found[f"statistics, {name}, {kind}"] = statistics(rank, size, options, *kind)
    found["sure statistics"] = sure_statistics(rank, size)
    for symmetric in (False, True):
        for full in (False, True):
            found[f"contrast, {full}, {symmetric}"] = contrast(rank, size, full, symmetric)
            found[f"weights of pairs, {symmetric}, {full}"] = weighed_pairs(rank, size, symmetric, full)
            found[f"several positives, {symmetric}, {full}"] = several_positives(
                rank, size, symmetric, full, "replicated"
            )
    for loss in PLACEMENTS:
        found[f"told positives, {loss} loss"] = told_positives(rank, size, loss)
    found["several positives, sharded loss"] = several_positives(rank, size, False, True, "sharded")
    found["uncounted"] = uncounted(rank, size)
    return found


def encoder():
    """A small model whose gradients `DistributedDataParallel` averages, and the batch of all processes."""
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3, dtype=torch.float64)
    return model, torch.randn(2, 6, 5, dtype=torch.float64)


LABELS = torch.tensor([0, 1, 0, 2, 1, 0])


def supervised_batch(size):
    """Two views of each item in the order of the processes, and the mask of the other views of its label."""
    model, views = encoder()
    parts = range(0, 6, 6 // size)
    items = torch.cat([views[:, first : first + 6 // size].reshape(-1, 5) for first in parts])
    labels = torch.cat([LABELS[first : first + 6 // size].repeat(2) for first in parts])
    others = ~torch.eye(12, dtype=torch.bool)
    return model, items, (labels[:, None] == labels) & others, others


def trained_with_ddp(rank, size):
    """Gradients of an encoder under DDP, by the placement of the loss; also of the supervised contrastive loss."""
    found = {}
    for loss in ("replicated", "sharded"):
        model, views = encoder()
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        own = slice(rank * 6 // size, (rank + 1) * 6 // size)
        query, key = wrapped(views[:, own].reshape(-1, 5)).chunk(2)
        sharded.info_nce(query, key, temperature=0.5, symmetric=True, loss=loss).backward()
        found[loss] = model.weight.grad
        model, items, positive, others = supervised_batch(size)
        own = slice(rank * 12 // size, (rank + 1) * 12 // size)
        # It must live until the backward pass, in which it adds gradients up.
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        point = wrapped(items[own])
        options = {"positive": positive[own], "log_weight": others[:, own], "temperature": 0.5, "loss": loss}
        sharded.info_nce(point, point, **options).backward()
        found[f"supervised, {loss}"] = model.weight.grad
    return found
