# pyright: reportArgumentType=false, reportCallIssue=false
"""Packed rows: one call with documents is one call a document."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.memory import LargestTensor
from tests.support.ops import explicit
from tests.support.rows import one_in
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from massieu import ops
from massieu.ops import packed_rows

LENGTHS = {
    "equal": ([4, 4, 4], None),
    "mixed": ([1, 40, 3, 5, 0, 17, 2, 33], None),
    "keys of their own": ([3, 2, 0, 5, 0, 1], [4, 0, 3, 6, 0, 30]),
    "one": ([6], [9]),
    "long and short": ([3, 90, 90, 5, 0, 70, 4, 2], None),
    "long and short keys": ([3, 90, 4, 60, 2], [50, 80, 0, 60, 3]),
    "no queries": ([0, 0], [2, 3]),
    "no keys": ([2, 3], [0, 0]),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window": (2, 1)},
    "causal window": {"window": 3, "is_causal": True},
    "offset": {"is_causal": True, "query_offset": 2},
    "offset window": {"window": (1, 4), "query_offset": 1},
    "cap": {"softcap": 2.0},
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 4e-3}


def made(lengths: str, dtype: torch.dtype = torch.float64, batch: int = 2) -> tuple[ops.Documents, list[Tensor]]:
    """Documents, and query, key and value with two query heads a key head."""
    torch.manual_seed(0)
    documents = ops.Documents.of_lengths(*LENGTHS[lengths])
    queries, keys = documents.query_boundaries[-1], documents.key_boundaries[-1]
    shapes = (batch, 4, queries, 6), (batch, 2, keys, 6), (batch, 2, keys, 5)
    return documents, [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def per_document(
    documents: ops.Documents, function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor, **along: Tensor
) -> list[Tensor]:
    """The oracle: `function` of each document's slices; of `along`, both last dimensions are cut where they are long."""
    found = []
    for number in range(len(documents)):
        rows, keys = (
            slice(*boundaries[number : number + 2])
            for boundaries in (documents.query_boundaries, documents.key_boundaries)
        )
        query, *others = (tensor[..., rows if place == 0 else keys, :] for place, tensor in enumerate(tensors))
        own = {}
        for name, tensor in along.items():
            tensor = tensor[..., rows, :] if tensor.shape[-2] > 1 else tensor
            own[name] = tensor[..., keys] if name == "log_weight" and tensor.shape[-1] > 1 else tensor
        found.append(function(query, *others, **own))
    return [torch.cat(parts, 2) for parts in zip(*found, strict=True)]


def compare(
    found: tuple[Tensor, ...], wanted: list[Tensor], leaves: list[Tensor], dtype: torch.dtype = torch.float64
) -> None:
    """Results and the gradients of a random cotangent for all of them."""
    tolerance = TOLERANCE[dtype]
    torch.manual_seed(1)
    cotangents = [torch.randn_like(one) for one in found]
    slopes = []
    for results in (found, wanted):
        # −∞ of queries without keys has no product with a cotangent.
        total = sum(
            (one.masked_fill(one == -torch.inf, 0) * c).sum() for one, c in zip(results, cotangents, strict=True)
        )
        slopes.append(torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True))
    for one, other in zip((*found, *slopes[0]), (*wanted, *slopes[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_which_keys_are_seen_and_how_far_behind_they_are(lengths: str) -> None:
    seen, behind = ops.Documents.of_lengths(*LENGTHS[lengths]).seen(torch.device("cpu"))
    queries, keys = LENGTHS[lengths]
    rows, columns = (
        [(number, place) for number, count in enumerate(counts) for place in range(count)]
        for counts in (queries, queries if keys is None else keys)
    )
    assert seen.tolist() == [[one == other for other, _ in columns] for one, _ in rows]
    assert behind.tolist() == [[row - place for _, place in columns] for _, row in rows]


@one_in(2, {"options": OPTIONS, "lengths": LENGTHS})
def test_attention_is_one_call_a_document(lengths: str, options: str) -> None:
    documents, leaves = made(lengths)
    given = OPTIONS[options]
    found = ops.attention(*leaves, documents=documents, **given)
    compare(found, per_document(documents, lambda *t: ops.attention(*t, backend="reference", **given), *leaves), leaves)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_every_precision(dtype: torch.dtype, is_causal: bool) -> None:
    documents, leaves = made("mixed", dtype)
    found = ops.attention(*leaves, documents=documents, is_causal=is_causal)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wanted = per_document(documents, lambda *t: ops.attention(*t, is_causal=is_causal, backend="reference"), *wide)
    torch.testing.assert_close(found.output.double(), wanted[0], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    slope = torch.autograd.grad(found.output.sum() + found.log_partition.nan_to_num(neginf=0.0).sum(), leaves)
    exact = torch.autograd.grad(wanted[0].sum() + wanted[1].nan_to_num(neginf=0.0).sum(), wide)
    for one, other in zip(slope, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=4 * TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])


@one_in(
    2,
    {
        "lengths": ["equal", "mixed", "keys of their own"],
        "form": [(2, 4, True, True), (1, 1, True, True), (1, 1, False, True), (2, 1, True, False)],
    },
)
def test_log_weights_scales_and_sinks_by_position_in_the_row(lengths: str, form: tuple[int, int, bool, bool]) -> None:
    documents, leaves = made(lengths)
    batch, heads, rows, keys = form
    shape = (batch, heads, leaves[0].shape[2] if rows else 1, leaves[1].shape[2] if keys else 1)
    weight = torch.randn(shape, dtype=torch.float64).masked_fill(torch.rand(shape) < 0.2, -torch.inf).requires_grad_()
    scale, sink = (torch.rand(2, 4, leaves[0].shape[2], 1, dtype=torch.float64, requires_grad=True) for _ in range(2))
    sink_value = torch.randn(1, 1, leaves[0].shape[2], 5, dtype=torch.float64, requires_grad=True)
    along = {"log_weight": weight, "scale": scale, "sink": sink, "sink_value": sink_value}
    found = ops.attention(*leaves, documents=documents, **along)
    compare(found, per_document(documents, ops.attention, *leaves, **along), [*leaves, *along.values()])


@pytest.mark.parametrize("rows", [False, True])
def test_booleans_hide_keys(rows: bool) -> None:
    documents, leaves = made("keys of their own")
    keep = torch.rand(2, 1, leaves[0].shape[2] if rows else 1, leaves[1].shape[2]) < 0.6
    found = ops.attention(*leaves, documents=documents, log_weight=keep, is_causal=True)
    attention = lambda *t, **o: ops.attention(*t, is_causal=True, **o)  # noqa: E731
    compare(found, per_document(documents, attention, *leaves, log_weight=keep), leaves)


@pytest.mark.parametrize("backend", ["fused", "reference", "blocks"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_every_backend(lengths: str, backend: str) -> None:
    documents, leaves = made(lengths)
    if backend != "reference" and leaves[0].shape[2] * leaves[1].shape[2] == 0:
        pytest.skip("the row has no query or no key, which the backend refuses with or without documents")
    with torch.no_grad():
        found = ops.attention(*leaves, documents=documents, backend=backend)
        wanted = per_document(documents, lambda *t: ops.attention(*t, backend="reference"), *leaves)
    torch.testing.assert_close(list(found), wanted, rtol=1e-12, atol=1e-12)


@one_in(2, {"options": ["plain", "causal", "causal window"], "lengths": ["equal", "mixed", "keys of their own"]})
def test_log_partition_and_fisher(lengths: str, options: str) -> None:
    documents, (query, key, _) = made(lengths)
    given, vector = OPTIONS[options], torch.randn_like(query, requires_grad=True)
    found = (ops.log_partition(query, key, documents=documents, **given),)
    compare(found, per_document(documents, lambda *t: (ops.log_partition(*t, **given),), query, key), [query, key])
    both = torch.cat([query, vector], -1)

    def fisher(pair: Tensor, own: Tensor) -> tuple[Tensor]:
        part, change = pair.chunk(2, -1)
        return (ops.fisher_vp(part, own, change, sink=0.3, **given),)

    found = (ops.fisher_vp(query, key, vector, documents=documents, sink=0.3, **given),)
    compare(found, per_document(documents, fisher, both, key), [query, key, vector])


def test_fisher_keeps_its_digits_far_from_the_origin() -> None:
    documents, (query, key, _) = made("mixed", torch.float32)
    vector, far = torch.randn_like(query), key.detach() + 1000
    with torch.no_grad():
        found = ops.fisher_vp(query / 100, far, vector, documents=documents, is_causal=True)
        wanted = per_document(
            documents,
            lambda q, k: (ops.fisher_vp(q[..., :6], k, q[..., 6:], is_causal=True),),
            torch.cat([query.double() / 100, vector.double()], -1),
            far.double(),
        )
    torch.testing.assert_close(found.double(), wanted[0], rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("lengths", ["equal", "mixed", "keys of their own"])
def test_moments(lengths: str) -> None:
    documents, leaves = made(lengths)
    for options in ({"sink": 0.5}, {"is_causal": True}):
        moments = lambda *t, o=options: ops.attention_moments(*t, **o)  # noqa: E731
        found = ops.attention_moments(*leaves, documents=documents, **options)
        # Positions are those in the row (test_received.py).
        for one, other in zip(found[:-1], per_document(documents, moments, *leaves)[:-1], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_documents_do_not_touch_each_other() -> None:
    documents, leaves = made("mixed")
    start, end = documents.query_boundaries[1:3]
    spoilt = [leaf.detach().clone() for leaf in leaves]
    for tensor in spoilt:
        tensor[:, :, start:end] = torch.nan
        tensor.requires_grad_()
    results, slopes = [], []
    for tensors in (leaves, spoilt):
        results.append(ops.attention(*tensors, documents=documents, is_causal=True))
        total = (results[-1].output + results[-1].log_partition.nan_to_num(neginf=0.0).unsqueeze(-1)).square().sum()
        slopes.append(torch.autograd.grad(total, tensors))
    for one, other in zip((*results[0], *slopes[0]), (*results[1], *slopes[1]), strict=True):
        assert other[:, :, start:end].isnan().all()
        for kept in (slice(0, start), slice(end, None)):
            torch.testing.assert_close(one[:, :, kept], other[:, :, kept], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["fused", "reference"])
def test_memory_follows_the_documents(backend: str) -> None:
    documents = ops.Documents.of_lengths([16, 20, 9, 1, 30] * 30)
    length = documents.query_boundaries[-1]
    query, key, value = (torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3))
    with LargestTensor() as largest:
        output, log_z = ops.attention(query, key, value, documents=documents, is_causal=True, backend=backend)
        (output.sum() + log_z.sum()).backward()
    # Padding at most about doubles a length, and scores of documents are at most 38 numbers a query.
    assert largest.numbers <= 2 * 38 * 2 * length < length**2 / 2


def test_buckets_pad_little_and_keep_long_documents_apart() -> None:
    short = packed_rows.buckets(ops.Documents.of_lengths([5, 9, 6, 8] * 100), 1, packed_rows.MOVED)
    assert [(len(bucket.members), bucket.rows) for bucket in short] == [(400, 9)]
    long = ops.Documents.of_lengths([1000, 900, 1000, 1000])
    assert [bucket.members for bucket in packed_rows.buckets(long, 8, packed_rows.MOVED)] == [(0,), (1,), (2, 3)]
    # Where moving costs nothing, all equal ones are done together.
    assert [bucket.members for bucket in packed_rows.buckets(long, 8, 0)] == [(0, 2, 3), (1,)]


class _Moves(TorchDispatchMode):
    """How many numbers are copied by their places."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.index_select.default:
            self.numbers += result.numel()
        return result


def test_long_documents_stay_where_they_are() -> None:
    """Beside short ones, which are moved."""
    lengths = [3, 300, 5, 4, 200, 300, 300, 2]
    documents = ops.Documents.of_lengths(lengths)
    tensors = [torch.randn(1, 8, sum(lengths), 4, requires_grad=True) for _ in range(3)]
    with _Moves() as moves:
        output, log_z = ops.attention(*tensors, documents=documents, is_causal=True)
        (output.sum() + log_z.sum()).backward()
    # Five short ones of at most 5: queries, keys, values, outputs, log Z, there and back.
    assert 0 < moves.numbers <= 2 * 8 * (4 * 4 + 1) * 5 * 5


def test_transforms_and_second_derivatives() -> None:
    documents, leaves = made("mixed", batch=1)
    leaves = [leaf.detach()[:, :2] for leaf in leaves]

    def total(query: Tensor, key: Tensor, value: Tensor, given: ops.Documents | None = documents) -> Tensor:
        if given is None:
            output, log_z = per_document(documents, ops.attention, query, key, value)
        else:
            output, log_z = ops.attention(query, key, value, documents=given)
        return output.square().sum() + log_z.nan_to_num(neginf=0.0).sin().sum()

    apart = lambda *t: total(*t, given=None)  # noqa: E731
    steps = tuple(torch.randn_like(leaf) for leaf in leaves)
    product = lambda f: torch.func.jvp(torch.func.grad(f, (0, 1, 2)), tuple(leaves), steps)[1]  # noqa: E731
    torch.testing.assert_close(product(total), product(apart), rtol=1e-10, atol=1e-10)
    found = torch.func.jvp(total, tuple(leaves), steps)[1]
    torch.testing.assert_close(found, torch.func.jvp(apart, tuple(leaves), steps)[1])
    many = tuple(torch.stack([leaf, 2 * leaf], 1) for leaf in leaves)
    mapped = torch.func.vmap(torch.func.grad(total, (0, 1, 2)), 1)(*many)
    for place, factor in enumerate((1, 2)):
        wanted = torch.func.grad(apart, (0, 1, 2))(*(factor * leaf for leaf in leaves))
        for one, other in zip(mapped, wanted, strict=True):
            torch.testing.assert_close(one[place], other, rtol=1e-10, atol=1e-10)
    inputs = [leaf.requires_grad_() for leaf in leaves]
    (slope,) = torch.autograd.grad(total(*inputs), inputs[:1], create_graph=True)
    twice = torch.autograd.grad((slope * steps[0]).sum(), inputs)
    (slope,) = torch.autograd.grad(apart(*inputs), inputs[:1], create_graph=True)
    torch.testing.assert_close(twice, torch.autograd.grad((slope * steps[0]).sum(), inputs), rtol=1e-10, atol=1e-10)


def test_autocast() -> None:
    documents, leaves = made("mixed", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        output, log_z = ops.attention(*leaves, documents=documents)
        wanted = per_document(documents, ops.attention, *leaves)
    assert output.dtype == torch.bfloat16 and log_z.dtype == torch.float32
    torch.testing.assert_close(output, wanted[0], rtol=4e-2, atol=4e-2)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", ["equal", "mixed", "long and short keys"])
def test_compiled(lengths: str) -> None:
    documents, leaves = made(lengths, torch.float32)
    compiled = torch.compile(
        lambda *t: ops.attention(*t, documents=documents, is_causal=True), fullgraph=True, backend="aot_eager"
    )
    compare(compiled(*leaves), list(ops.attention(*leaves, documents=documents, is_causal=True)), leaves, torch.float32)


def test_boundaries_are_lengths_summed() -> None:
    wanted = ops.Documents((0, 2, 2, 5), (0, 1, 1, 2))
    assert ops.Documents.of_lengths([2, 0, 3], torch.tensor([1, 0, 1], dtype=torch.int32)) == wanted
    assert ops.Documents.of_boundaries(torch.tensor([0, 2, 2, 5]), (0, 1, 1, 2)) == wanted
    assert (len(wanted), wanted.lengths, wanted.key_lengths) == (3, (2, 0, 3), (1, 0, 1))
    assert hash(wanted) == hash(ops.Documents.of_boundaries([0, 2, 2, 5], [0, 1, 1, 2]))


OFFSETS = {
    "lower right": ("keys of their own", "lower_right"),
    "own": ("mixed", [2, -1, 0, 3, -4, 1, 2, 2]),
    "long": ("long and short keys", [-5, 1, 0, 40, 0]),
}


@pytest.mark.parametrize("options", ["plain", "causal", "offset window", "negative"])
@pytest.mark.parametrize("name", OFFSETS)
def test_each_document_has_an_offset(name: str, options: str) -> None:
    """Against one call a document, of explicit matrices in float64."""
    lengths, offsets = OFFSETS[name]
    queries, keys = LENGTHS[lengths]
    _, leaves = made(lengths)
    given: dict[str, Any] = {"is_causal": True, "query_offset": -2} if options == "negative" else OPTIONS[options]
    documents = ops.Documents.of_lengths(queries, keys, query_offsets=offsets)
    if offsets == "lower_right":
        offsets = [n - length for length, n in zip(queries, keys or queries, strict=True)]
    found = ops.attention(*leaves, documents=documents, **given)
    moments = ops.attention_moments(*leaves, documents=documents, moments=("log_partition", "max_position"), **given)
    numbers = iter(offsets)

    def one(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        own = given | {"query_offset": given.get("query_offset", 0) + next(numbers)}
        return explicit.attention(query, key, value, **own)

    wanted = per_document(documents, one, *leaves)
    compare(found, wanted, leaves)
    torch.testing.assert_close(moments.log_partition, wanted[1], rtol=1e-12, atol=1e-12)
    total = ops.attention_received(*leaves[:2], documents=documents, **given).total
    seen, behind = documents.seen(torch.device("cpu"))
    ahead = -behind - given.get("query_offset", 0)
    if given.get("is_causal"):
        seen = seen & (ahead <= 0)
    if "window" in given:
        left, right = given["window"]
        seen = seen & (-left <= ahead) & (ahead <= right)
    matrix = ops.attention_received(*leaves[:2], log_weight=seen).total
    torch.testing.assert_close(total, matrix, rtol=1e-10, atol=1e-10)


HIDDEN_BY_OFFSETS_ALONE: dict[str, tuple[list[int], list[int], Any, dict[str, Any]]] = {
    "one document, lower right": ([2], [4], "lower_right", {"is_causal": True, "window": 2}),
    "one document, behind": ([8], [3], [-5], {"is_causal": True, "query_offset": 5}),
    "two documents": ([4, 1], [0, 2], [0, -4], {"window": (3, 4), "query_offset": -1}),
    "no query sees past the window": ([3, 2], [9, 2], "lower_right", {"window": 4}),
}
"""Bands that would hide no key of the whole row, if the documents had no offsets."""


@pytest.mark.parametrize("name", HIDDEN_BY_OFFSETS_ALONE)
def test_a_band_that_hides_keys_through_the_offsets_alone(name: str) -> None:
    lengths, key_lengths, given_offsets, given = HIDDEN_BY_OFFSETS_ALONE[name]
    documents = ops.Documents.of_lengths(lengths, key_lengths, query_offsets=given_offsets)
    shapes = [(1, 2, sum(lengths), 6), (1, 2, sum(key_lengths), 6), (1, 2, sum(key_lengths), 5)]
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    offsets = iter([documents.query_offset(number) for number in range(len(documents))])

    def one(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        own = given | {"query_offset": given.get("query_offset", 0) + next(offsets)}
        return explicit.attention(query, key, value, **own)

    wanted = per_document(documents, one, *leaves)
    compare(ops.attention(*leaves, documents=documents, **given), wanted, leaves)
    # Keys of a document receive 1 in all from each of its queries that sees a key.
    seeing = documents.sums((wanted[1] != -torch.inf).double()).sum(-1)
    received = ops.attention_received(*leaves[:2], documents=documents, **given).total
    torch.testing.assert_close(received.sum(-1), seeing, rtol=1e-12, atol=1e-12)


def test_offsets_of_documents_that_are_wrong() -> None:
    with pytest.raises(ValueError, match="query_offsets must be one a document, got 1 for 2 documents"):
        ops.Documents.of_lengths([1, 2], query_offsets=[0])
    with pytest.raises(ValueError, match="query_offsets must be 'lower_right', got 'upper'"):
        ops.Documents.of_lengths([1, 2], query_offsets="upper")
    assert ops.Documents.of_lengths([1, 2], query_offsets="lower_right") == ops.Documents.of_lengths([1, 2])


def test_sums() -> None:
    documents = ops.Documents.of_lengths([2, 0, 3])
    numbers = torch.tensor([[1.0, 2.0, torch.nan, 4.0, 5.0], [1.0, 2.0, 3.0, 4.0, 5.0]], requires_grad=True)
    found = documents.sums(numbers)
    torch.testing.assert_close(found, torch.tensor([[3.0, 0.0, torch.nan], [3.0, 0.0, 12.0]]), equal_nan=True)
    (slope,) = torch.autograd.grad((found[1] * torch.tensor([1.0, 7.0, 3.0])).sum(), numbers)
    assert slope[1].tolist() == [1.0, 1.0, 3.0, 3.0, 3.0]


def test_bad_documents() -> None:
    for make, kind, words in [
        (lambda: ops.Documents.of_lengths([]), ValueError, "lengths must be one or more numbers"),
        (lambda: ops.Documents.of_lengths([2, -1]), ValueError, r"at least 0, got \[2, -1\]"),
        (lambda: ops.Documents.of_lengths([2.0]), TypeError, "lengths must be whole numbers, got 2.0"),
        (lambda: ops.Documents.of_lengths([True]), TypeError, "got True"),
        (lambda: ops.Documents.of_lengths([torch.nan]), TypeError, "got nan"),
        (lambda: ops.Documents.of_lengths("12"), TypeError, "in a sequence or a tensor, got '12'"),
        (lambda: ops.Documents.of_lengths(torch.tensor([1.0])), TypeError, "torch.float32"),
        (lambda: ops.Documents.of_lengths(torch.tensor([True])), TypeError, "torch.bool"),
        (
            lambda: ops.Documents.of_lengths(torch.ones(1, 1, dtype=int)),
            ValueError,
            r"one dimension, got shape \(1, 1\)",
        ),
        (lambda: ops.Documents.of_lengths([1], [1, 2]), ValueError, "the same number of documents, got 1 and 2"),
        (lambda: ops.Documents.of_boundaries([1, 2]), ValueError, r"the first 0 .* got \[1, 2\]"),
        (lambda: ops.Documents.of_boundaries([0]), ValueError, "two or more"),
        (lambda: ops.Documents.of_boundaries([0, 3, 2]), ValueError, "must not fall, got 3 before 2"),
        (lambda: ops.Documents.of_boundaries([0, 3], [0, 3, 4]), ValueError, "got 1 and 2"),
        (lambda: ops.Documents.of_boundaries([0, 3], None).sums(torch.zeros(2)), ValueError, "dimension of 3"),
        (lambda: ops.Documents.of_boundaries([0, 3], None).sums([1, 2, 3]), TypeError, "per_token"),
    ]:
        with pytest.raises(kind, match=words):
            make()


def test_bad_calls() -> None:
    query, key = torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 4, 2)
    for function in (
        lambda documents: ops.attention(query, key, key, documents=documents),
        lambda documents: ops.log_partition(query, key, documents=documents),
        lambda documents: ops.attention_moments(query, key, documents=documents),
        lambda documents: ops.fisher_vp(query, key, query, documents=documents),
    ):
        with pytest.raises(TypeError, match=r"documents must be what .* makes, got list"):
            function([3])
        with pytest.raises(ValueError, match="row of queries does, got 2 for 3 queries"):
            function(ops.Documents.of_lengths([2], [4]))
        with pytest.raises(ValueError, match="row of keys does, got 3 for 4 keys"):
            function(ops.Documents.of_lengths([3]))


@pytest.mark.parametrize("symmetric", [False, True])
def test_info_nce_is_one_call_a_document(symmetric: bool) -> None:
    torch.manual_seed(0)
    lengths = [3, 1, 5]
    documents = ops.Documents.of_lengths(lengths)
    query, key = (torch.randn(9, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    ids = torch.tensor([0, 0, 1, 0, 2, 2, 3, 3, 4])
    for weight in (None, torch.randn(9, dtype=torch.float64), ops.FalseNegatives(ids)):
        found = ops.info_nce(
            query,
            key,
            temperature=0.5,
            log_weight=weight,
            symmetric=symmetric,
            documents=documents,
            return_log_partition=True,
        )
        wanted = []
        for start, end in ((0, 3), (3, 4), (4, 9)):
            own = weight
            if weight is not None:
                own = weight[start:end] if isinstance(weight, Tensor) else ops.FalseNegatives(ids[start:end])
            wanted.append(
                ops.info_nce(
                    query[start:end],
                    key[start:end],
                    temperature=0.5,
                    log_weight=own,
                    symmetric=symmetric,
                    return_log_partition=True,
                )
            )
        both = torch.stack([one.loss for one in wanted]), torch.cat([one.log_partition for one in wanted], -1)
        compare(found, list(both), [query, key])
    found = ops.n_pairs(query, key, documents=documents, norm_weight=0.1)
    apart = [ops.n_pairs(query[a:b], key[a:b], norm_weight=0.1) for a, b in ((0, 3), (3, 4), (4, 9))]
    torch.testing.assert_close(found, torch.stack(apart))
    positive = torch.tensor([2, 0, 1, 0, 4, 3, 2, 1, 0])
    found = ops.info_nce(query, key, temperature=1.0, positive=positive, documents=documents)
    torch.testing.assert_close(found[2], ops.info_nce(query[4:], key[4:], temperature=1.0, positive=positive[4:]))


def test_bad_losses() -> None:
    rows = torch.zeros(3, 2)
    documents = ops.Documents.of_lengths([1, 2])
    for options, kind, words in (
        ({"documents": [1, 2]}, TypeError, "documents must be what .* got list"),
        ({"documents": ops.Documents.of_lengths([2])}, ValueError, "row of queries does, got 2 for 3"),
        ({"documents": documents, "negatives": rows}, ValueError, "negatives belong to no document"),
        ({"documents": documents, "log_weight": torch.zeros(3, 3)}, ValueError, r"shape \(3,\) with documents"),
    ):
        with pytest.raises(kind, match=words):
            ops.info_nce(rows, rows, temperature=1.0, **options)
