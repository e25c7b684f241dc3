"""Calls in which process 1 gives something else than process 0, for `test_sharded_agreement`."""

import torch
from tests.support.ops.sharded_work import SIZE, VALUE, draw

from massieu.ops import sharded
from massieu.ops.contrastive import FalseNegatives

Q, ROWS, TARGET, IDS = draw(1, 2, 3, SIZE), draw(3, SIZE), torch.tensor([0, 2, 1]), torch.tensor([0, 0, 1])
HALF, THIRD = torch.tensor(0.5, dtype=torch.float64), torch.tensor([0.5, 0.3], dtype=torch.float64)
WEIGHT = draw(4, seed=7)
PAIRS = draw(3, 12, seed=8)
OWN_PAIRS = {"queries": "sharded", "log_weight": PAIRS, "query": Q.clone().requires_grad_()}
SINGLE = {"query": Q.float(), "key": Q.float(), "value": draw(1, 2, 3, VALUE).float()}


def with_change(tensor, place, change):
    """One entry of a copy is moved."""
    tensor = tensor.clone()
    tensor.view(-1)[place] += change
    return tensor


def pick(rank, first, other):
    return other if rank == 1 else first


# What process 0 gives and what process 1 gives, by the argument's name in the error, and after a comma which case it is.
ATTENTION = {
    "scale": ({"scale": 0.5}, {"scale": 0.5 + 1e-16 * 2**3}),
    "scale, the default": ({"scale": 0.5}, {}),
    "scale, a tensor": ({"scale": 0.5}, {"scale": HALF}),
    "scale, of heads": ({"scale": THIRD}, {"scale": THIRD + 1e-6}),
    "shape of scale": ({"scale": HALF}, {"scale": THIRD}),
    "scale, of own queries": ({"scale": HALF, "queries": "sharded"}, {"scale": HALF + 1, "queries": "sharded"}),
    "presence of a log_weight": ({}, {"log_weight": WEIGHT}),
    "query": ({}, {"query": with_change(Q, 7, 1e-6)}),
    "query, NaN": ({}, {"query": with_change(Q, 7, torch.nan)}),
    "query, inf": ({}, {"query": with_change(Q, 7, torch.inf)}),
    "query, its order": ({}, {"query": Q.flip(2)}),
    "dtype": ({}, SINGLE),
    "is_causal": ({}, {"is_causal": True}),
    "queries": ({}, {"queries": "sharded"}),
    "window": ({"window": 1}, {"window": (1, 2)}),
    "query_offset": ({"is_causal": True, "query_offset": 1}, {"is_causal": True}),
    "softcap": ({"softcap": 2.0}, {"softcap": 3.0}),
    "sink, one without": ({}, {"sink": 0.0}),
    "sink": ({"sink": 0.0}, {"sink": 0.5}),
    "sink, of heads": ({"sink": THIRD}, {"sink": THIRD + 1e-6}),
    "sink_value": ({"sink": 0.0, "sink_value": draw(VALUE)}, {"sink": 0.0, "sink_value": draw(VALUE) + 1e-6}),
    "dtype of log_weight": (OWN_PAIRS, OWN_PAIRS | {"log_weight": PAIRS > 0}),
    "batch and heads of log_weight": (OWN_PAIRS, OWN_PAIRS | {"log_weight": PAIRS.expand(1, 2, 3, 12)}),
    "derivatives of log_weight": (OWN_PAIRS, OWN_PAIRS | {"log_weight": PAIRS.clone().requires_grad_()}),
}
CROSS_ENTROPY = {
    "label_smoothing": ({"label_smoothing": 0.1}, {"label_smoothing": 0.2}),
    "z_loss": ({"z_loss": 1e-4}, {}),
    "ignore_index": ({}, {"ignore_index": 0}),
    "reduction": ({}, {"reduction": "sum"}),
    "return_log_partition": ({}, {"return_log_partition": True}),
    "presence of a bias": ({"bias": draw(4)}, {}),
    "target": ({}, {"target": TARGET.flip(0)}),
    "shape of target": ({}, {"target": TARGET[:, None], "hidden": ROWS[:, None]}),
    "dtype of target": ({}, {"target": TARGET.int()}),
    "hidden": ({}, {"hidden": ROWS + 1}),
    "label_smoothing, of own tokens": (
        {"tokens": "sharded", "label_smoothing": 0.1},
        {"tokens": "sharded", "label_smoothing": 0.2},
    ),
}
STATISTICS = {
    "temperature": ({"temperature": 0.5}, {}),
    "softcap": ({"softcap": 30.0}, {}),
    "ignore_index": ({}, {"ignore_index": 0}),
    "tokens": ({}, {"tokens": "sharded"}),
    "loss": ({"loss": "replicated"}, {"loss": "sharded"}),
    "presence of a bias": ({"bias": draw(4)}, {}),
    "target": ({}, {"target": TARGET.flip(0)}),
    "hidden": ({}, {"hidden": ROWS + 1}),
}
CONTRAST = {
    "temperature": ({}, {"temperature": 0.6}),
    "temperature, tensors": ({"temperature": HALF}, {"temperature": HALF + 1e-6}),
    "temperature, one a tensor": ({}, {"temperature": HALF}),
    "symmetric": ({}, {"symmetric": True}),
    "kind of log_weight": ({"log_weight": WEIGHT[:3]}, {}),
    "kind of log_weight, ids": ({"log_weight": WEIGHT[:3]}, {"log_weight": FalseNegatives(IDS)}),
}
# What process 1 alone gives wrong, and what it and the others then say.
WRONG = {
    "scale": (ValueError, "scale must be finite", {"scale": float("inf")}),
    "query": (TypeError, "query must be a floating-point tensor, got list", {"query": [1.0]}),
    "queries": (ValueError, "queries must be 'replicated' or 'sharded', got 'split'", {"queries": "split"}),
    "log_weight": (ValueError, "log_weight must broadcast", {"log_weight": WEIGHT[:3]}),
    "no values": (ValueError, "query must be on a device that the group's backend gloo serves", {"query": "meta"}),
    "window": (ValueError, "window must not be negative, got -1", {"window": -1}),
    "a window of numbers": (TypeError, "window must be a whole number or a pair of them", {"window": 1.5}),
    "query_offset": (TypeError, "query_offset must be", {"query_offset": 1.5}),
    "a boolean query_offset": (TypeError, "query_offset must be", {"query_offset": True}),
    "softcap": (ValueError, "softcap must be", {"softcap": 0.0}),
    "sink": (ValueError, "sink must be one number, 2 (one a head)", {"sink": draw(3)}),
    "sink_value": (ValueError, "sink_value needs a sink", {"sink_value": draw(VALUE)}),
    "vmap": (RuntimeError, "sharded functions cannot be inside torch.func.vmap", {"vmap": True}),
}
# What processes may give differently, as the result is the same to rounding.
ALLOWED = {
    "a whole number": ({"scale": 1}, {"scale": 1.0}),
    "rounding": ({}, {"query": Q * (1 + 4 * torch.finfo(Q.dtype).eps)}),
    "the sign of 0": ({"query": Q * 0.0}, {"query": Q * -0.0}),
    "NaN": ({"query": with_change(Q, 7, torch.nan)}, {"query": with_change(Q * (1 + 1e-15), 7, torch.nan)}),
    "memory": ({}, {"query": Q.mT.contiguous().mT}),
    "four dimensions or five": ({}, {"query": Q.unflatten(1, (2, 1))}),
    "a scale of each own query": (
        {"queries": "sharded", "scale": draw(1, 2, 3, 1)},
        {"queries": "sharded", "scale": draw(1, 2, 3, 1, seed=1)},
    ),
}


def attend(rank, **change):
    key, value = draw(1, 2, 4, SIZE, seed=rank), draw(1, 2, 4, VALUE, seed=rank + 5)
    arguments = {"query": Q, "key": key, "value": value} | change
    return sharded.attention(**arguments)


def classify(rank, **change):
    arguments = {"hidden": ROWS, "weight": draw(4, SIZE, seed=rank), "target": TARGET} | change
    return sharded.linear_cross_entropy(**arguments)


def measure(rank, **change):
    arguments = {"hidden": ROWS, "weight": draw(4, SIZE, seed=rank), "target": TARGET} | change
    return sharded.token_statistics(**arguments)


def contrast(rank, **change):
    arguments = {"query": ROWS, "key": draw(3, SIZE, seed=rank), "temperature": 0.5} | change
    return sharded.info_nce(**arguments)


def wrong(rank, change):
    if rank == 1 and change.get("vmap"):
        return torch.func.vmap(lambda q: sharded.attention(q, Q, Q))(torch.stack([Q, Q]))
    if rank == 1 and change.get("query") == "meta":
        return attend(rank, **{name: draw(1, 2, 3, SIZE).to("meta") for name in ("query", "key", "value")})
    return attend(rank, **(change if rank == 1 else {}))


def other_function(rank):
    return pick(rank, attend, lambda rank: sharded.log_partition(Q, draw(1, 2, 4, SIZE)))(rank)


def other_tangent(rank):
    if rank == 0:
        return attend(rank)
    return torch.func.jvp(lambda q: attend(rank, query=q), (Q,), (Q,))


def everything(rank, size):
    calls = {"function": lambda: other_function(rank), "presence of a tangent": lambda: other_tangent(rank)}
    for room, call, rows in (
        ("attention", attend, ATTENTION),
        ("words", classify, CROSS_ENTROPY),
        ("statistics", measure, STATISTICS),
        ("pairs", contrast, CONTRAST),
    ):
        for name, both in rows.items():
            calls[f"{room}: {name}"] = lambda call=call, both=both: call(rank, **pick(rank, *both))
    for name, (_, _, change) in WRONG.items():
        calls[f"wrong: {name}"] = lambda change=change: wrong(rank, change)
    found = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:
            found[name] = (type(error), str(error))
        # Nothing of the refused call is left under way, which the next would take for its own.
        attend(rank)
    for name, both in ALLOWED.items():
        # By results: which of two equal problems this process had.
        found[f"allowed: {name}"] = attend(rank, **pick(rank, *both)).output
    return found
