"""What the processes of `test_sharded` do, and the same by one process: problems, calls, gradients."""

import math
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from massieu import ops
from massieu.ops import sharded

BATCH, HEADS, KEY_HEADS, LENGTH, SIZE, VALUE = 2, 4, 2, 3, 5, 6
KEYS = {2: (7, 4), 4: (3, 0, 5, 3)}
"""Keys of each process, by the number of processes; one has none."""
QUERIES = {2: (2, 3), 4: (1, 2, 0, 2)}
CAUSAL_QUERIES = {2: (4, 5), 4: (3, 4, 0, 2)}
"""So many that some come after the keys of a process, some before, and some between."""


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gradients(objective, *tensors):
    """First derivatives, and those of Σ of the squares of the first one."""
    first = torch.autograd.grad(objective, tensors, create_graph=True)
    second = torch.autograd.grad(first[0].square().sum(), tensors)
    return [part.detach() for part in (*first, *second)]


# --- attention -------------------------------------------------------------------------------------------------------


def keys(dtype=torch.float64):
    count = sum(KEYS[2])
    key, value = draw(BATCH, KEY_HEADS, count, SIZE, seed=1), draw(BATCH, KEY_HEADS, count, VALUE, seed=2) + 3
    weight = draw(count, seed=3)
    weight[5] = -math.inf
    return [tensor.to(dtype).requires_grad_() for tensor in (key, value, weight)]


def query(length, dtype=torch.float64):
    tensor = draw(BATCH, HEADS, length, SIZE, seed=4, dtype=dtype).requires_grad_()
    return tensor, torch.tensor([0.5, 0.3, -0.4, 1.0], dtype=torch.float64).to(dtype).requires_grad_()


def one_loss(result, factor=1.0):
    output, log_z = result
    return factor * (output.square().sum() + log_z.sin().sum())


def my_loss(result, rank):
    """Of which the first uses no log Z, the second no output."""
    output, log_z = result
    return log_z.sin().sum() if rank == 1 else (rank + 1) * (output.square() * draw(*output.shape, seed=rank)).sum()


def shards(tensors, sizes, rank, dims):
    """A process's parts, as leaves of their own."""
    parts = (tensor.detach().split(sizes, dim)[rank] for tensor, dim in zip(tensors, dims, strict=True))
    return [part.clone().requires_grad_() for part in parts]


def attention_alike(rank, size, loss):
    (q, scale), (k, v, w) = query(LENGTH), shards(keys(), KEYS[size], rank, (2, 2, 0))
    result = sharded.attention(q, k, v, log_weight=w, scale=scale, loss=loss)
    alone = sharded.log_partition(q, k, log_weight=w, scale=scale, loss=loss)
    objective = one_loss(result) if loss == "replicated" else my_loss(result, rank)
    objective = objective + (alone.square().sum() if loss == "replicated" else (rank + 1) * alone.square().sum())
    return [*(part.detach() for part in (*result, alone)), *gradients(objective, q, scale, k, v, w)]


def attention_alike_alone(size, loss):
    (q, scale), (k, v, w) = query(LENGTH), keys()
    result = ops.attention(q, k, v, log_weight=w, scale=scale)
    if loss == "replicated":
        objective = one_loss(result) + result.log_partition.square().sum()
    else:
        objective = sum(
            my_loss(result, rank) + (rank + 1) * result.log_partition.square().sum() for rank in range(size)
        )
    return [*result, result.log_partition, *gradients(objective, q, scale, k, v, w)]


def attention_of_nan(rank, size):
    """A query of NaN beside a finite one, on fewer keys than the kernel's vectors hold."""
    q, (k, v, _) = query(LENGTH)[0].detach().clone(), shards(keys(), KEYS[size], rank, (2, 2, 0))
    q[:, :, 1, 0] = math.nan
    q.requires_grad_()
    found = *sharded.attention(q, k, v), sharded.log_partition(q, k)
    (gradient,) = torch.autograd.grad(sum(part.sum() for part in found), q)
    return [*(part.detach().reshape(*q.shape[:3], -1) for part in found), gradient]


def attention_own(rank, size):
    q, _ = query(sum(QUERIES[size]))
    (q,), (k, v, w) = shards([q], QUERIES[size], rank, (2,)), shards(keys(), KEYS[size], rank, (2, 2, 0))
    result = sharded.attention(q, k, v, log_weight=w, scale=0.4, queries="sharded")
    alone = sharded.log_partition(q, k, log_weight=w, queries="sharded")
    objective = one_loss(result, rank + 1) + (rank + 1) * alone.square().sum()
    return [*(part.detach() for part in (*result, alone)), *gradients(objective, q, k, v, w)]


def attention_own_alone(size):
    (q, _), (k, v, w) = query(sum(QUERIES[size])), keys()
    result = ops.attention(q, k, v, log_weight=w, scale=0.4)
    alone = ops.log_partition(q, k, log_weight=w)
    objective, start = 0.0, 0
    for rank, count in enumerate(QUERIES[size]):
        part = slice(start, start + count)
        objective += one_loss([tensor[:, :, part] for tensor in result], rank + 1)
        objective += (rank + 1) * alone[:, :, part].square().sum()
        start += count
    return [*result, alone, *gradients(objective, q, k, v, w)]


CAUSAL = (("replicated", "replicated"), ("replicated", "sharded"), ("sharded", "sharded"))


def causal(rank, size, queries, loss):
    """Both numbered over all processes. Replicated queries have a log-weight of each query and key too."""
    q, scale = query(sum(CAUSAL_QUERIES[size]))
    k, v, w = keys()
    if queries == "replicated":
        w = causal_weights(size)
    k, v, w = shards((k, v, w), KEYS[size], rank, (2, 2, w.ndim - 1))
    (q,) = shards([q], CAUSAL_QUERIES[size], rank, (2,)) if queries == "sharded" else [q]
    options = {"is_causal": True, "queries": queries, "loss": loss, "log_weight": w}
    result = sharded.attention(q, k, v, scale=scale, **options)
    alone = sharded.log_partition(q, k, **options)
    factor = 1 if loss == "replicated" else rank + 1
    objective = one_loss(result, factor) + factor * alone.square().sum()
    return [*(part.detach() for part in (*result, alone)), *gradients(objective, q, k, v, w)]


def causal_weights(size):
    return draw(sum(CAUSAL_QUERIES[size]), sum(KEYS[size]), seed=5).requires_grad_()


def causal_alone(size, queries, loss):
    (q, scale), (k, v, w) = query(sum(CAUSAL_QUERIES[size])), keys()
    if queries == "replicated":
        w = causal_weights(size)
    options = {"is_causal": True, "log_weight": w}
    output, log_z = ops.attention(q, k, v, scale=scale, **options)
    alone = ops.log_partition(q, k, **options)
    ranks = torch.repeat_interleave(torch.arange(size), torch.tensor(CAUSAL_QUERIES[size])) + 1
    factor = ranks if queries == "sharded" else 1 if loss == "replicated" else size * (size + 1) // 2
    squares = output.square().sum(-1) + log_z.sin() + alone.square()
    return [output, log_z, alone, *gradients((factor * squares).sum(), q, k, v, w)]


OPTIONS = {
    "a window": ({"window": (2, 1)}, "keys", False),
    "a window behind a cache": ({"window": 2, "is_causal": True, "query_offset": 4}, "pairs", False),
    "behind a cache": ({"is_causal": True, "query_offset": 3}, "pairs", False),
    "before the keys": ({"is_causal": True, "query_offset": -2}, "pairs", False),
    "a window that leaves the keys": ({"window": (1, 2), "query_offset": 8}, "none", False),
    "a capped sink": ({"softcap": 1.5}, "pairs", True),
    "all at once": ({"window": (3, 2), "query_offset": 2, "softcap": 1.5}, "mask", True),
}
"""What is asked for, what the log-weight is for, and whether there is a sink with a value."""


def option_tensors(size, name):
    """All queries, keys and values, the log-weight, and the sink and its value, each or None."""
    _, kind, has_sink = OPTIONS[name]
    length, count = sum(CAUSAL_QUERIES[size]), sum(KEYS[size])
    pairs = causal_weights(size)
    weight = {"keys": keys()[2], "pairs": pairs, "mask": pairs.detach() > -0.8, "none": None}[kind]
    sink = (draw(HEADS, seed=6), draw(HEADS, VALUE, seed=7)) if has_sink else (None, None)
    sink = [part if part is None else part.requires_grad_() for part in sink]
    assert weight is None or weight.shape in ((count,), (length, count))
    return [query(length)[0], *keys()[:2], weight, *sink]


def with_options(rank, size, name, queries, loss):
    q, k, v, w, *sink = option_tensors(size, name)
    own = queries == "sharded"
    k, v = shards((k, v), KEYS[size], rank, (2, 2))
    (q,) = shards([q], CAUSAL_QUERIES[size], rank, (2,)) if own else [q]
    if w is not None:
        sizes, dim = (CAUSAL_QUERIES[size], 0) if own and w.ndim == 2 else (KEYS[size], w.ndim - 1)
        w = w.detach().split(sizes, dim)[rank].clone().requires_grad_(w.requires_grad)
    factor = 1 if loss == "replicated" else rank + 1
    return option_results(sharded, (q, k, v, w, *sink), name, factor, queries=queries, loss=loss)


def with_options_alone(size, name, queries, loss):
    ranks = torch.repeat_interleave(torch.arange(size), torch.tensor(CAUSAL_QUERIES[size])) + 1
    factor = ranks if queries == "sharded" else 1 if loss == "replicated" else size * (size + 1) // 2
    return option_results(ops, option_tensors(size, name), name, factor)


def one_query_each(rank, size):
    """Process 0 has all keys: weights of its one query and all keys look like weights of its keys."""
    q, k, v, w = one_query_each_tensors(size)
    q, k, v = q[:, :, [rank]], *(part if rank == 0 else part[:, :, :0] for part in (k, v))
    pairs = sharded.attention(q, k, v, log_weight=w[[rank]], queries="sharded")
    of_keys = sharded.attention(q, k, v, log_weight=w[:1, : k.shape[2]], queries="sharded")
    return [*pairs, *of_keys]


def one_query_each_tensors(size):
    k, v = (part.detach() for part in keys()[:2])
    return draw(BATCH, HEADS, size, SIZE), k, v, draw(size, k.shape[2], seed=1)


def one_query_each_alone(size):
    q, k, v, w = one_query_each_tensors(size)
    return [*ops.attention(q, k, v, log_weight=w), *ops.attention(q, k, v, log_weight=w[0])]


def option_results(functions, tensors, name, factor, **placement):
    """Of queries that may see nothing: e to the log Z, not log Z, is in the objective."""
    q, k, v, w, sink, sink_value = tensors
    options = OPTIONS[name][0] | {"log_weight": w, "sink": sink} | placement
    output, log_z = functions.attention(q, k, v, sink_value=sink_value, **options)
    alone = functions.log_partition(q, k, **options)
    objective = (factor * (output.square().sum(-1) + log_z.exp() + alone.exp().square())).sum()
    wanted = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
    return [*(part.detach() for part in (output, log_z, alone)), *gradients(objective, *wanted)]


# --- the rest --------------------------------------------------------------------------------------------------------


def forward_mode(rank, size):
    """The derivative along a direction of the queries and all keys."""
    (q, _), (k, v, _) = query(LENGTH), shards(keys(), KEYS[size], rank, (2, 2, 0))
    change = draw(*q.shape, seed=8), draw(*keys()[0].shape, seed=9).split(KEYS[size], 2)[rank]

    def call(q, k):
        return sharded.attention(q, k, v.detach())

    with torch.no_grad():
        return torch.func.jvp(call, (q.detach(), k.detach()), change)[1]


def forward_mode_alone():
    (q, _), (k, v, _) = query(LENGTH), keys()
    change = draw(*q.shape, seed=8), draw(*k.shape, seed=9)
    call = lambda q, k: ops.attention(q, k, v.detach())  # noqa: E731
    return torch.func.jvp(call, (q.detach(), k.detach()), change)[1]


def precision(rank, size, dtype):
    (q, _), (k, v, _) = query(LENGTH, dtype), shards(keys(dtype), KEYS[size], rank, (2, 2, 0))
    result = sharded.attention(q, k, v)
    found = torch.autograd.grad(one_loss(result), (q, k, v))
    own = sharded.attention(q, k, v, queries="sharded")
    return [*(part.detach() for part in (*result, *own)), *found]


def precision_alone():
    (q, _), (k, v, _) = query(LENGTH), keys()
    result = ops.attention(q, k, v)
    return [*result, *result, *torch.autograd.grad(one_loss(result), (q, k, v))]


def grouped_and_masked(rank, size):
    """Five dimensions, booleans per query, rows that see nothing or only what one process has, and a mesh."""
    q, (k, v, _) = query(LENGTH)[0].unflatten(1, (KEY_HEADS, 2)), shards(keys(), KEYS[size], rank, (2, 2, 0))
    mask = MASK.split(KEYS[size], -1)[rank]
    mesh = init_device_mesh("cpu", (size,))
    return [part.detach() for part in sharded.attention(q, k, v, log_weight=mask, group=mesh)]


MASK = torch.ones(BATCH, 1, 1, LENGTH, sum(KEYS[2]), dtype=torch.bool)
MASK[:, :, :, 0] = False
MASK[:, :, :, 1, :7] = False


def grouped_and_masked_alone():
    q, (k, v, _) = query(LENGTH)[0].unflatten(1, (KEY_HEADS, 2)), keys()
    return ops.attention(q, k, v, log_weight=MASK)


def messages(rank, size):
    """Bytes that this process hands to the group for 3 queries or tokens, by call and how many keys or words there are."""
    q, target = draw(1, 1, 3, SIZE).requires_grad_(), torch.arange(3)

    def attention(k, **options):
        v = draw(1, 1, len(k), VALUE, seed=rank)
        return one_loss(sharded.attention(q, k[None, None], v, **options))

    calls = {
        "replicated": attention,
        "sharded": lambda k: attention(k, queries="sharded"),
        "causal": lambda k: attention(k, queries="sharded", is_causal=True),
        "words": lambda k: sharded.linear_cross_entropy(q[0, 0], k, target),
        "words and tokens": lambda k: sharded.linear_cross_entropy(q[0, 0], k, target, tokens="sharded"),
        "statistics": lambda k: sum(map(torch.sum, sharded.token_statistics(q[0, 0], k, target)[:3])),
        "statistics of own tokens": lambda k: sum(
            map(torch.sum, sharded.token_statistics(q[0, 0], k, target, tokens="sharded")[:3])
        ),
        "keys": lambda k: sharded.info_nce(q[0, 0], k, positive=target, temperature=1.0),
        "both": lambda k: sharded.info_nce(q[0, 0], k[:3], negatives=k[3:], temperature=1.0, symmetric=True),
    }
    sent = {}
    for name, call in calls.items():
        for count in (4, 400):
            k = draw(count, SIZE, seed=rank).requires_grad_()
            with recorded() as sizes:
                call(k).backward()
            sent[name, count] = sizes
    return sent


@contextmanager
def recorded():
    """The bytes of each message while this lasts."""
    sizes: list[int] = []
    names = ["all_reduce", "all_gather_single", "reduce_scatter_single", "all_to_all_single"]
    originals = {name: getattr(dist, name) for name in names}

    def recording(name):
        def send(*given, **options):
            tensor = given[0 if name == "all_reduce" else 1]
            sizes.append(tensor.numel() * tensor.element_size())
            return originals[name](*given, **options)

        return send

    for name in names:
        setattr(dist, name, recording(name))
    try:
        yield sizes
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def refusals(rank, size):
    """The error of each call that this process makes wrong, or that differs between processes."""
    q, k = draw(1, 2, 3, SIZE), draw(1, 2, 4, SIZE)
    calls = {
        "other length": lambda: sharded.log_partition(q[:, :, : 3 - min(rank, 1)], k),
        "other loss": lambda: sharded.attention(q, k, k, loss="sharded" if rank else "replicated"),
        "other gradient": lambda: sharded.attention(q.clone().requires_grad_(rank == 0), k, k),
        "one wrong": lambda: sharded.attention(q, k, k[..., :2, :] if rank == 1 else k),
        "weights of own queries": lambda: sharded.attention(q, k, k, log_weight=draw(3, 4), queries="sharded"),
        "weights of two kinds": lambda: sharded.attention(
            q, k, k, log_weight=draw(4) if rank else draw(3, 4 * size), queries="sharded"
        ),
        "loss of own queries": lambda: sharded.attention(q, k, k, queries="sharded", loss="replicated"),
        "placement": lambda: sharded.attention(q, k, k, queries="split"),
        "group": lambda: sharded.attention(q, k, k, group="world"),
        "target": lambda: sharded.linear_cross_entropy(q[0, 0], k[0, 0], torch.tensor([0, 1, 4 * size])),
        "counts": lambda: sharded.info_nce(q[0, 0], k[0, 0], temperature=1.0),
        "weights of pairs": lambda: sharded.info_nce(q[0, 0], q[0, 0], log_weight=draw(3, 3), temperature=1.0),
        "positive": lambda: sharded.info_nce(q[0, 0], k[0, 0], positive=torch.tensor([0, 1, -1]), temperature=1.0),
        "losses of own tokens": lambda: sharded.linear_cross_entropy(
            q[0, 0], k[0, 0], torch.tensor([0, 1, 2]), tokens="sharded", reduction="none", loss="replicated"
        ),
        "statistics of own tokens": lambda: sharded.token_statistics(
            q[0, 0], k[0, 0], torch.tensor([0, 1, 2]), tokens="sharded", loss="replicated"
        ),
        "temperature": lambda: sharded.token_statistics(
            q[0, 0], k[0, 0], torch.tensor([0, 1, 2]), temperature=torch.tensor(1.0)
        ),
        "other causality": lambda: sharded.log_partition(q, k, is_causal=rank == 0),
        "vmap": lambda: torch.func.vmap(lambda q: sharded.log_partition(q, k))(q.expand(2, 1, 2, 3, SIZE)),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except (TypeError, ValueError, RuntimeError) as error:
            found[name] = (type(error), str(error))
    return found


def everything(rank, size):
    found = {f"attention, {loss} loss": attention_alike(rank, size, loss) for loss in ("replicated", "sharded")} | {
        "attention, own queries": attention_own(rank, size),
        "attention of NaN": attention_of_nan(rank, size),
    }
    for kind in CAUSAL:
        found[f"causal, {kind}"] = causal(rank, size, *kind)
        for name in OPTIONS:
            found[f"{name}, {kind}"] = with_options(rank, size, name, *kind)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found[str(dtype)] = precision(rank, size, dtype)
    found["one query each"] = one_query_each(rank, size)
    found["forward mode"] = forward_mode(rank, size)
    found["grouped"] = grouped_and_masked(rank, size)
    found["messages"] = messages(rank, size)
    found["refusals"] = refusals(rank, size)
    return found
