"""Keys, words and negatives sharded over Gloo processes of this machine, against one process that has all of them."""

import os
import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from tests.support import processes
from tests.support.ops import sharded_losses as losses
from tests.support.ops import sharded_work as work
from tests.support.rows import every_row, one_in

from massieu import ops
from massieu.ops import sharded
from massieu.ops.sharded.agreement import MESSAGE_LENGTH
from massieu.ops.sharded.collectives import Peers

pytestmark = pytest.mark.medium  # processes


def everything(rank, size):
    return work.everything(rank, size) | losses.everything(rank, size)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def found(request):
    """What each process found."""
    return request.param, processes.run(everything, request.param)


ROUNDINGS = 64
"""By which replicated results may differ between processes: each is a sum of some dozens of numbers."""


def same(found, expected, tolerance=1e-12):
    """Equal in units of 1 + the largest entry; equal infinities are equal."""
    for index, (actual, wanted) in enumerate(zip(found, expected, strict=True)):
        assert actual.shape == wanted.shape
        error = torch.where(actual == wanted, 0.0, (actual.double() - wanted.double()).abs())
        size = wanted.detach().nan_to_num(0.0, 0.0, 0.0).abs().max()
        assert error.max() < tolerance * (1 + size), index


def joined(results, name, dims) -> Iterator[torch.Tensor]:
    """Each result of all processes: side by side along a dimension; or, where that is None, the same for all."""
    columns = zip(*(result[name] for result in results), strict=True)
    for parts, dim in zip(columns, dims, strict=True):
        if dim == "sum":
            yield torch.stack(parts).sum(0)
        elif dim is not None:
            yield torch.cat(parts, dim)
        else:
            # Memory of two processes is aligned differently, and vectorised sums with it: not bit for bit the same.
            for part in parts[1:]:
                same([part], [parts[0]], ROUNDINGS * torch.finfo(part.dtype).eps)
            yield parts[0]


def test_a_query_of_nan(found):
    """It is NaN on every process, and those beside it are finite."""
    for result in found[1]:
        for part in result["attention of NaN"]:
            assert part[:, :, 1].isnan().all() and part[:, :, [0, 2]].isfinite().all()


@pytest.mark.parametrize("loss", ["replicated", "sharded"])
def test_replicated_queries(found, loss):
    """Both results, and first and second derivatives; not multiplied by the number of processes."""
    size, results = found
    dims = [None, None, None, *2 * [None, None, 2, 2, 0]]
    same(joined(results, f"attention, {loss} loss", dims), work.attention_alike_alone(size, loss), 1e-11)


def test_own_queries(found):
    size, results = found
    dims = [2, 2, 2, *2 * [2, 2, 2, 0]]
    name = "attention, own queries"
    expected = work.attention_own_alone(size)
    same(joined(results, name, dims), expected, 1e-10)


@every_row("kind", work.CAUSAL)
def test_causal_queries_and_keys_are_numbered_over_all_processes(found, kind):
    size, results = found
    along = 2 if kind[0] == "sharded" else None
    gradients = [along, 2, 2, 1 if along is None else 0]
    expected = work.causal_alone(size, *kind)
    same(joined(results, f"causal, {kind}", [along, along, along, *gradients, *gradients]), expected, 1e-10)


@one_in(2, {"kind": work.CAUSAL, "name": work.OPTIONS})
def test_windows_caches_caps_sinks_and_weights_of_pairs(found, name, kind):
    """The sink is one key in all, and with sharded queries its gradient is the sum over processes."""
    size, results = found
    _, weight, has_sink = work.OPTIONS[name]
    own = kind[0] == "sharded"
    along = 2 if own else None
    gradients = [along, 2, 2, *{"keys": [0], "pairs": [0 if own else 1]}.get(weight, [])]
    gradients += 2 * ["sum" if own else None] if has_sink else []
    expected = work.with_options_alone(size, name, *kind)
    found = joined(results, f"{name}, {kind}", [along, along, along, *gradients, *gradients])
    same(found, expected, 1e-10)


def test_one_query_on_each_process(found):
    size, results = found
    same(joined(results, "one query each", [2, 2, 2, 2]), work.one_query_each_alone(size))


@every_row("loss", losses.PLACEMENTS)
@every_row("name", losses.CROSS_ENTROPIES)
def test_a_sharded_vocabulary(found, name, loss):
    size, results = found
    options = losses.CROSS_ENTROPIES[name]
    gradients = [None, 0] if options == {} else [None, 0, 0]
    expected = losses.cross_entropy_alone(size, options, loss)
    same(joined(results, f"cross-entropy, {name}, {loss} loss", [None, None, *gradients, *gradients]), expected, 1e-11)


@every_row("loss", losses.PLACEMENTS)
@every_row("name", losses.CROSS_ENTROPIES)
def test_sharded_words_and_tokens(found, name, loss):
    size, results = found
    options = losses.CROSS_ENTROPIES[name]
    gradients = [0, 0] if options == {} else [0, 0, 0]
    nats = 0 if options.get("reduction") == "none" else None
    expected = losses.own_tokens_alone(size, options, loss)
    same(joined(results, f"own tokens, {name}, {loss} loss", [nats, 0, *gradients, *gradients]), expected, 1e-11)


def test_words_that_are_all_hidden(found):
    size, results = found
    expected = losses.hidden_words_alone(size)
    assert expected[0].isinf().any()
    same(joined(results, "hidden words", [None, 0]), expected)


@every_row("kind", losses.PLACED)
@every_row("name", losses.STATISTICS)
def test_statistics_of_a_sharded_vocabulary(found, name, kind):
    size, results = found
    along = 0 if kind[0] == "sharded" else None
    expected = losses.statistics_alone(size, losses.STATISTICS[name], *kind)
    dims = [*5 * [along], along, 0, along, 0]
    same(joined(results, f"statistics, {name}, {kind}", dims), expected, 1e-11)


def test_statistics_that_are_nearly_all_on_one_word(found):
    """Merged, entropies and log-probabilities keep their digits, however small."""
    gap = torch.tensor([5.0, 15.0, 40.0], dtype=torch.float64)
    rest = (sum(losses.WORDS[2]) - 1) * (-gap).exp()
    for log_probability, entropy, _, rank, _ in (result["sure statistics"] for result in found[1]):
        torch.testing.assert_close(log_probability.double(), -rest.log1p(), rtol=2e-6, atol=0.0)
        torch.testing.assert_close(entropy.double(), rest.log1p() + rest * gap / (1 + rest), rtol=2e-6, atol=0.0)
        assert (rank == 0).all()


@every_row("symmetric", [False, True])
@every_row("full", [False, True])
def test_negatives_of_all_processes(found, full, symmetric):
    size, results = found
    gradients = [0, 0, "sum", 0] if full else [0, 0, "sum"]
    expected = losses.contrast_alone(size, full, symmetric)
    dims = [None, 1 if symmetric else 0, *gradients, *gradients]
    same(joined(results, f"contrast, {full}, {symmetric}", dims), expected, 1e-11)


@pytest.mark.parametrize("loss", losses.PLACEMENTS)
def test_positives_anywhere_and_weights_of_keys(found, loss):
    """Those of process 0 have weight 0: a positive among them is left out of log Z and still attracts."""
    size, results = found
    expected = losses.told_positives_alone(size, loss)
    expected = [losses.by_process(part, size) if isinstance(part, tuple) else part for part in expected]
    dims = [None, 0, *2 * [0, 0, 0, 0]]
    same(joined(results, f"told positives, {loss} loss", dims), expected, 1e-11)


@every_row("boolean", [False, True])
@every_row("symmetric", [False, True])
def test_weights_of_pairs(found, symmetric, boolean):
    size, results = found
    expected = losses.weighed_pairs_alone(size, symmetric, boolean)
    gradients = [0, 0] if boolean else [0, 0, 1]
    dims = [None, 1 if symmetric else 0, *gradients, *gradients]
    same(joined(results, f"weights of pairs, {symmetric}, {boolean}", dims), expected, 1e-11)


@every_row(
    "symmetric, full, loss",
    [(False, False, ""), (False, True, ""), (True, False, ""), (True, True, ""), (False, True, "sharded")],
)
def test_a_mask_of_positives_anywhere(found, symmetric, full, loss):
    """The supervised contrastive loss; three of seven queries have no positive, on either process."""
    size, results = found
    name = "several positives, sharded loss" if loss else f"several positives, {symmetric}, {full}"
    expected = losses.several_positives_alone(size, symmetric, full, loss or "replicated")
    gradients = [0, 0, "sum", 0] if full else [0, 0, "sum"]
    dims = [None, 1 if symmetric else 0, *gradients, *gradients]
    same(joined(results, name, dims), expected, 1e-11)


def test_nan_that_a_mask_does_not_count_has_no_gradient(found):
    _, results = found
    actual = list(joined(results, "uncounted", [None, 0, 0, None]))
    same(actual, losses.uncounted_alone())
    assert not actual[1][2].any() and not actual[2][5].any()


@every_row(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float16, 0.02)])
def test_precision(found, dtype, tolerance):
    _, results = found
    actual = list(joined(results, str(dtype), [None, None, None, None, None, 2, 2]))
    for index in (1, 3):
        assert actual[index].dtype == torch.float32  # log Z
    for part, wanted in zip(actual, work.precision_alone(), strict=True):
        assert (part.double() - wanted).abs().max() < tolerance * (1 + wanted.abs().max())


def test_forward_mode(found):
    _, results = found
    same(joined(results, "forward mode", [None, None]), work.forward_mode_alone())


def test_groups_masks_and_a_mesh(found):
    _, results = found
    actual = list(joined(results, "grouped", [None, None]))
    same(actual, work.grouped_and_masked_alone())
    assert not actual[0][:, :, :, 0].any() and (actual[1][:, :, :, 0] == -torch.inf).all()


def test_what_is_sent_does_not_depend_on_the_number_of_keys(found):
    size, results = found
    query, answer, agreed = 8 * 3 * work.SIZE, 8 * 3 * (work.VALUE + 1), 8 * MESSAGE_LENGTH
    numbers = 8 * 3  # one for each query or token
    # First what is compared; forwards; backwards.
    own = [agreed, query, size * answer, size * answer, size * query]
    label, two = numbers, size * 2 * numbers
    expected = {
        "replicated": [agreed, numbers, answer, query],
        "sharded": own,
        "causal": own,
        "words": [agreed, numbers, numbers, numbers, numbers, query],
        "words and tokens": [agreed, label, query, two, 8, two, size * query],
        "statistics": [agreed, numbers, 5 * numbers, size * 5 * numbers, query],
        "statistics of own tokens": [agreed, label, query, two // 2, numbers, 5 * two // 2, 5 * two // 2, size * query],
        "keys": [agreed, label, query, two, 8, two, size * query],
        "both": [agreed, label, query, two, 16, two, size * query],
    }
    for result in results:
        for (name, count), sizes in result["messages"].items():
            assert sizes == expected[name], (name, count)


def test_refusals(found):
    size, results = found
    for rank, result in enumerate(results):
        refused = result["refusals"]
        for name, words in {
            "other length": "the same number of queries, got 3 on process 0 and 2 on process 1",
            "other loss": "the same loss, got 'replicated' on process 0 and 'sharded' on process 1",
            "other gradient": "the same requires_grad of the query, got True on process 0 and False on process 1",
            "weights of own queries": f"or for each query the {4 * size} keys of all processes, got 4 on process 0 for its 3",
            "weights of two kinds": "got 4 on process 1 for its 3 queries",
            "loss of own queries": "loss must be 'sharded'",
            "placement": "queries must be 'replicated' or 'sharded', got 'split'",
            "target": f"target must be in 0 … {4 * size - 1} or be ignore_index, -100, got {4 * size}",
            "weights of pairs": f"log_weight must be for the {3 * size} queries of all processes, got 3",
            "positive": f"positive must be in 0 … {4 * size - 1}, got -1",
            "losses of own tokens": "without a reduction loss must be 'sharded'",
            "statistics of own tokens": "each process's own: loss must be 'sharded'",
            "other causality": "the same is_causal, got True on process 0 and False on process 1",
            "counts": "query and key must have equal length unless positive= gives each query's key, got 3 and 4",
        }.items():
            assert refused[name][0] is ValueError and words in refused[name][1], name
        if rank == 1:
            assert refused["one wrong"][0] is ValueError and "(1, 2, 2, 5)" in refused["one wrong"][1]
        else:
            assert refused["one wrong"][0] is RuntimeError
            assert refused["one wrong"][1].startswith("process 1 refused its arguments: ValueError: value must")
        assert refused["temperature"] == (TypeError, "temperature must be a number, got a tensor of torch.float32")
        assert refused["group"] == (TypeError, "group must be a ProcessGroup, a DeviceMesh or None, got str")
        assert refused["vmap"][0] is RuntimeError and "vmap" in refused["vmap"][1]


def test_where_a_group_wants_integers():
    """A group that serves no CPU, as NCCL's, on the device it is bound to."""

    class Handle:
        _device_types = (torch.device("cuda"),)
        bound_device_id = torch.device("cuda", 3)

    assert Peers(Handle(), 0, 1).device == torch.device("cuda", 3)
    Handle._device_types = (torch.device("cuda"), torch.device("cpu"))
    assert Peers(Handle(), 0, 1).device == torch.device("cpu")


def test_without_a_process_group():
    tensor = torch.zeros(1, 1, 1, 1)
    with pytest.raises(ValueError, match="call init_process_group first"):
        sharded.log_partition(tensor, tensor)


def test_a_group_of_one(tmp_path):
    """As without processes; a group leaves this process again afterwards."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        (q, scale), (k, v, w) = work.query(3), work.keys()
        for options in ({}, {"loss": "sharded"}, {"queries": "sharded"}):
            ours = sharded.attention(q, k, v, log_weight=w, scale=scale, **options)
            same(ours, ops.attention(q, k, v, log_weight=w, scale=scale))
        single = [tensor.detach().float() for tensor in (q, k, v)]
        with torch.autocast("cpu", torch.bfloat16):
            ours, wanted = sharded.attention(*single), ops.attention(*single)
        assert ours.output.dtype == wanted.output.dtype
        same(ours, wanted, 1e-2)
        hidden, weight, target = q[0, 0].bfloat16(), k[0, 0].bfloat16(), torch.tensor([0, 3, 5])
        for options in ({}, {"tokens": "sharded"}, {"tokens": "sharded", "reduction": "none"}):
            given = {"label_smoothing": 0.1, "reduction": options.get("reduction", "mean")}
            loss = sharded.linear_cross_entropy(hidden, weight, target, **(given | options))
            same([loss], [ops.linear_cross_entropy(hidden, weight, target, **given)], 1e-5)
        given = {"positive": target, "log_weight": w, "temperature": 0.5}
        same([sharded.info_nce(hidden, weight, **given)], [ops.info_nce(hidden, weight, **given)], 1e-5)
        doubled = torch.compile(lambda q: 2 * sharded.log_partition(2 * q, k), backend="eager")
        same([doubled(q)], [2 * ops.log_partition(2 * q, k)])
    finally:
        dist.destroy_process_group()


def call(name, rank, size):
    (q, _), (k, v, _) = work.query(3), work.shards(work.keys(), work.KEYS[size], rank, (2, 2, 0))
    if name == "attention":
        return work.one_loss(sharded.attention(q, k, v))
    if name == "words and tokens":
        return sharded.linear_cross_entropy(q[0, 0], k[0, 0], torch.arange(3), tokens="sharded")
    return sharded.info_nce(q[0, 0], k[0, 0, :3], temperature=1.0)


def dies(rank, size, name, backward):
    """Process 1 dies before the collective of the forward or the backward pass; the others say what they saw and when."""
    if rank == 1 and not backward:
        os._exit(0)
    started = time.monotonic()
    try:
        loss = call(name, rank, size)
        if rank == 1:
            os._exit(0)
        loss.backward()
    except RuntimeError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return None


def hangs(rank, size):
    """Process 1 lives, but never calls; the other's wait ends at the group's timeout."""
    started = time.monotonic()
    if rank == 1:
        time.sleep(3)
        return None
    try:
        call("attention", rank, size)
    except RuntimeError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return None


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(partial(dies, name="attention", backward=False), id="forward", marks=pytest.mark.slow),
        pytest.param(partial(dies, name="attention", backward=True), id="backward"),
        pytest.param(partial(dies, name="words and tokens", backward=True), id="tokens", marks=pytest.mark.slow),
        pytest.param(partial(dies, name="pairs", backward=True), id="pairs", marks=pytest.mark.slow),
        pytest.param(hangs, id="hangs", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_dies_is_an_error_of_the_others(what):
    seen = processes.run_first(what, 2, timeout=1.0)
    assert isinstance(seen, tuple), "the process that lives saw no error"
    kind, message, seconds = seen
    assert message and kind.endswith("Error")
    assert seconds < 10  # a bound on a hang, not a timing: the group's timeout is 1 s


@pytest.mark.slow
def test_the_gradients_of_an_encoder_under_ddp():
    """With loss="sharded" they are those of one process with the whole batch; with the default half of them."""
    model, views = losses.encoder()
    query, key = model(views.reshape(-1, 5)).chunk(2)
    ops.info_nce(query, key, temperature=0.5, symmetric=True).backward()
    other, items, positive, others = losses.supervised_batch(2)
    point = other(items)
    ops.info_nce(point, point, positive=positive, log_weight=others, temperature=0.5).backward()
    for result in processes.run(losses.trained_with_ddp, 2):
        for prefix, wanted in (("", model.weight.grad), ("supervised, ", other.weight.grad)):
            torch.testing.assert_close(result[f"{prefix}sharded"], wanted, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(result[f"{prefix}replicated"], wanted / 2, rtol=1e-12, atol=1e-12)
