"""Every public function of `massieu.ops`, given everything that one may give by mistake, answers or says what is wrong.

It may take what it is given; else it raises a `TypeError` or `ValueError` of one sentence, in words of this package and not of
PyTorch's inside. Where nothing is left to compute (no query, no key, no item), and on the meta device, results have the
shapes and dtypes that they have elsewhere.
"""

import math
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.support.rows import every_row, some_slow

from massieu import ops
from massieu.ops import AtomBlock, AtomStore, FalseNegatives, Partial, sharded, streaming
from massieu.ops.attention import AttentionResult

INSIDE = re.compile(
    r"Expected all|expected|mat1|mat2|out of range in self|out of bounds|_scaled_dot|aten::|NYI|data-dependent|item\(\)|"
    r"storage|size of tensor|Dimension out|has no attribute|dispatch|Cannot |unsupported operand|iterate over|shape '|"
    r"invalid for input|subscript|not supported|not implemented|dtype mismatch|verflow|positional|can't be|ambiguous|"
    r"0-d tensor|truth value|not iterable|combination of arguments|Promotion",
)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


Q, K, V = draw(2, 4, 5, 8), draw(2, 2, 7, 8), draw(2, 2, 7, 3)
H, W, Y, PAIR = draw(2, 3, 4), draw(7, 4), torch.zeros(2, 3, dtype=torch.int64), draw(5, 4)
IDS, PART = torch.arange(5), Partial(torch.zeros(2, 3), torch.zeros(2, 3, 4))
SCORED = {"query": Q, "key": K, "log_weight": None, "scale": None, "is_causal": False}
POSITIONED = SCORED | {"window": None, "sink": None, "backend": "auto"}
HEAD = {
    "hidden": H, "weight": W, "target": Y, "bias": draw(7), "ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0,
    "reduction": "mean", "return_log_partition": False,
}  # fmt: skip
TOLD = {"query": PAIR, "key": PAIR, "positive": IDS, "negatives": PAIR, "log_weight": None, "temperature": 1.0}
TWO_VIEWS = {"query": PAIR, "key": PAIR, "log_weight": FalseNegatives(IDS), "temperature": 1.0, "symmetric": True}


def calls(folder):
    """Each function with arguments that are right."""
    store = AtomStore.write(folder / "store", [AtomBlock(K[0], V[0])])
    generator = {"generator": torch.Generator()}
    on_disk = {"query": Q, "store": store, "scale": None, "block_size": 100, "progress": None}
    paths = (folder / str(number) for number in range(1 << 20))
    return {
        "attention": (ops.attention, POSITIONED | {"value": V, "softcap": None}),
        "attention with a sink": (ops.attention, SCORED | {"value": V, "sink": 0.5, "sink_value": V[0, 0, 0]}),
        "log_partition": (ops.log_partition, POSITIONED | {"softcap": None}),
        "attention_moments": (ops.attention_moments, POSITIONED | {"value": V, "softcap": None}),
        "attention_received": (ops.attention_received, POSITIONED | {"softcap": None}),
        "moments_backend": (ops.moments_backend, SCORED | {"value": V}),
        "fisher_vp": (ops.fisher_vp, POSITIONED | {"vector": Q}),
        "random_feature_log_partition": (
            ops.random_feature_log_partition,
            {"query": Q, "key": K, "log_weight": None, "scale": None, "features": 2, "standard_error": True} | generator,
        ),
        "resample_attention": (
            ops.resample_attention, SCORED | {"value": V, "draws": 1, "method": "multinomial"} | generator
        ),
        "linear_cross_entropy": (ops.linear_cross_entropy, HEAD),
        "info_nce": (ops.info_nce, TOLD | {"symmetric": False, "return_log_partition": False}),
        "info_nce of two views": (ops.info_nce, TWO_VIEWS),
        "n_pairs": (ops.n_pairs, {"query": PAIR, "key": PAIR, "log_weight": None, "norm_weight": 0.1}),
        "nca": (ops.nca, {"embedding": PAIR, "labels": IDS, "return_log_partition": False}),
        "streaming.attention": (streaming.attention, on_disk),
        "streaming.log_partition": (streaming.log_partition, on_disk),
        "Partial": (lambda **given: Partial(**given).merge(PART), PART._asdict()),
        "Partial.of": (
            lambda **given: Partial.of(AttentionResult(**given)), {"output": PART.mean, "log_partition": PART.log_partition}
        ),
        "Partial.empty": (Partial.empty, {"shape": (2, 3), "size": 4, "dtype": torch.float32, "device": None}),
        "Partial.reduce": (PART.reduce, {"dim": 0}),
        "Partial.unsqueeze": (PART.unsqueeze, {"dim": 0}),
        "FalseNegatives": (
            lambda **given: ops.info_nce(PAIR, PAIR, temperature=1.0, log_weight=FalseNegatives(**given)),
            {"query_ids": IDS, "key_ids": IDS},
        ),
        "AtomBlock": (
            lambda **given: AtomStore.write(next(paths), [AtomBlock(**given)]),
            {"points": K[0], "values": V[0], "log_weight": torch.zeros(2, 7)},
        ),
        "blocks": (lambda size: list(store.blocks(size)), {"size": 3}),
    }  # fmt: skip


ALONE = {"queries": "replicated", "loss": None, "group": None}
SHARDED = {
    "attention": (sharded.attention, SCORED | {"value": V} | ALONE),
    "attention of own queries": (sharded.attention, SCORED | {"value": V} | ALONE | {"queries": "sharded"}),
    "log_partition": (sharded.log_partition, SCORED | ALONE),
    "linear_cross_entropy": (sharded.linear_cross_entropy, HEAD | {"tokens": "replicated", "loss": None}),
    "linear_cross_entropy of own tokens": (sharded.linear_cross_entropy, HEAD | {"tokens": "sharded", "loss": None}),
    "info_nce": (sharded.info_nce, TOLD | {"loss": "replicated"}),
    "info_nce of two views": (sharded.info_nce, TWO_VIEWS | {"loss": "replicated"}),
}


class Odd:
    pass


def mistakes(good):
    """What may be given in place of something."""
    numbers = [True, 0, -1, 3, 2.5, math.nan, math.inf, -math.inf, 1j, 10**30, -(10**30), 1e300, 1 << 63]
    others = [None, "word", b"bytes", [1.0], (1, 2), (1, 2, 3), {}, Odd(), torch.float32, torch.device("meta")]
    arrays = [np.float32(2), np.int64(2), np.ones(3), np.array(2.0)]
    single = [torch.tensor(number) for number in (1.0, 1, True, 1j, math.nan)]
    shapes = [torch.ones(shape) for shape in ((1,), (0,), (0, 0), (1,) * 4, (1,) * 6, (7,))]
    kinds = [torch.ones(4, dtype=kind) for kind in (torch.float64, torch.bfloat16, torch.int64, torch.uint16)]
    kinds += [torch.ones(2, device="meta"), torch.tensor(1.0, device="meta"), torch.ones(2, 2).to_sparse()]
    kinds += [torch.ones(4).to(torch.float8_e4m3fn), torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)]
    given = [*numbers, *others, *arrays, *single, *shapes, *kinds]
    if isinstance(good, torch.Tensor):
        given += [good.to("meta"), good.numpy(), good.tolist(), good.to_sparse(), good[None], good[0], good[..., None]]
        given += [good[:0], good[..., :0], good[1:], good[..., 1:], good.expand(2, *good.shape)]
        given += [
            good.to(kind)
            for kind in (
                torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.bool,
                torch.int8, torch.int64, torch.uint8, torch.uint16, torch.uint64,
            )
        ]  # fmt: skip
    return given


def sweep(function, good):
    """What of the mistakes is answered by anything but a result or one sentence of this package."""
    function(**good)
    for name, argument in good.items():
        for thing in mistakes(argument):
            try:
                function(**(good | {name: thing}))
            except Exception as error:
                clear = isinstance(error, TypeError | ValueError) and not INSIDE.search(str(error))
                if not clear or "\n" in str(error) or len(str(error)) > 300:
                    yield f"{name} as {type(thing).__name__} {thing!r:.80}: {type(error).__name__} {error!s:.200}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_one_sentence_for_every_mistake(tmp_path):
    found = {name: list(sweep(*call)) for name, call in calls(tmp_path).items()}
    assert {name: told for name, told in found.items() if told} == {}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_one_sentence_for_every_mistake_in_a_sharded_call(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        found = {name: list(sweep(*call)) for name, call in SHARDED.items()}
    finally:
        dist.destroy_process_group()
    assert {name: told for name, told in found.items() if told} == {}


NUMBER = torch.tensor(1.0, device="meta")
MISTAKES = {
    "scale without a value": ("attention", {"scale": NUMBER}, ValueError, "query on cpu and scale on meta"),
    "sink without a value": ("log_partition", {"sink": NUMBER}, ValueError, "query on cpu and sink on meta"),
    "sink beyond float32": ("attention", {"sink": 1e300}, ValueError, "sink must be finite in torch.float32, got 1e+300"),
    "sink beyond integers": ("attention", {"sink": -(10**50)}, ValueError, "sink must be finite in torch.float32"),
    "scale beyond float32": ("attention", {"scale": 1e300}, ValueError, "scale must be finite in torch.float32"),
    "cap beyond float32": ("attention", {"softcap": 1e300}, ValueError, "softcap must be finite in torch.float32"),
    "sparse vector": ("fisher_vp", {"vector": Q.to_sparse()}, TypeError, "vector must be a floating-point tensor, got a"),
    "error asked by a tensor": (
        "random_feature_log_partition", {"standard_error": Q}, TypeError, "standard_error must be True or False, got a tensor"
    ),
    "features": ("random_feature_log_partition", {"features": 10**30}, ValueError, "features must be below 2⁶³"),
    "draws": ("resample_attention", {"draws": 1 << 63}, ValueError, "draws must be below 2⁶³"),
    "method as array": ("resample_attention", {"method": np.ones(3)}, ValueError, "method must be 'multinomial' or"),
    "reduction as array": ("linear_cross_entropy", {"reduction": np.ones(3)}, ValueError, "reduction must be 'none'"),
    "ignore_index": ("linear_cross_entropy", {"ignore_index": 1 << 63}, ValueError, "ignore_index must be below 2⁶³"),
    "target": ("linear_cross_entropy", {"target": Y + 9}, ValueError, "target must be in 0 … 6 or be ignore_index, -100"),
    "temperature without a value": ("info_nce", {"temperature": NUMBER}, ValueError, "query on cpu and temperature on meta"),
    "temperature below 0": ("info_nce", {"temperature": torch.tensor(-2.0)}, ValueError, "positive and finite, got -2"),
    "temperature of NaN": ("info_nce", {"temperature": torch.tensor(math.nan)}, ValueError, "must be positive and finite"),
    "quantized query": (
        "streaming.attention",
        {"query": torch.quantize_per_tensor(Q, 0.1, 0, torch.qint8)},
        TypeError,
        "query must be a floating-point tensor, got a tensor of torch.qint8",
    ),
    "output as list": ("Partial.of", {"output": [1.0]}, TypeError, "output must be a floating-point tensor, got list"),
    "output of integers": ("Partial.of", {"output": PART.mean.long()}, TypeError, "output must be a floating-point tensor"),
    "level as array": ("Partial.of", {"log_partition": np.ones(2)}, TypeError, "log_partition must be a floating-point tensor"),
    "sparse mean": ("Partial", {"mean": PART.mean.to_sparse()}, TypeError, "mean must be a floating-point tensor, got a"),
    "shape of bytes": ("Partial.empty", {"shape": b"ab"}, TypeError, "shape must be of whole numbers"),
    "size": ("Partial.empty", {"size": 1 << 63}, ValueError, "size must be below 2⁶³"),
    "dtype": ("Partial.empty", {"dtype": np.ones(3)}, TypeError, "dtype must be torch.float32 or torch.float64, got nd"),
    "device": ("Partial.empty", {"device": "word"}, ValueError, "device must name one of this machine, got 'word'"),
}  # fmt: skip


@every_row("name", MISTAKES)
def test_what_was_said_in_words_of_pytorch(name, tmp_path_factory):
    function, change, error, words = MISTAKES[name]
    call, good = calls(tmp_path_factory.mktemp("stores"))[function]
    with pytest.raises(error) as caught:
        call(**(good | change))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def shape_of(result):
    """Shapes and dtypes, of every tensor of a result."""
    if isinstance(result, torch.Tensor):
        return tuple(result.shape), result.dtype
    return tuple(map(shape_of, result)) if isinstance(result, tuple) else result


def devices(result):
    if isinstance(result, torch.Tensor):
        return {result.device.type}
    return set().union(*map(devices, result)) if isinstance(result, tuple) else set()


def answers(device, dtype, batch, length, keys):
    """Every function on a device, by a name."""
    torch.manual_seed(0)

    def on(*shape):
        return torch.randn(*shape).to(device, dtype)

    query, key, value, rows, words = (
        on(batch, 4, length, 8),
        on(batch, 2, keys, 8),
        on(batch, 2, keys, 3),
        on(length, 4),
        on(7, 4),
    )
    target, ids = torch.zeros(length, dtype=torch.int64, device=device), torch.arange(length, device=device)
    options = {"": {}, "causal": {"is_causal": True}, "per key": {"log_weight": on(keys)}, "cap": {"softcap": 2.0},
        "pairs": {"log_weight": on(length, keys) > 0}, "window": {"window": 2}, "sink": {"sink": 0.5},
        "scale": {"scale": torch.ones(4, device=device, dtype=torch.float64)}}  # fmt: skip
    drawn = {"generator": torch.Generator().manual_seed(0)}
    for name, some in options.items():
        yield f"attention {name}", lambda some=some: ops.attention(query, key, value, **some)
        yield f"log_partition {name}", lambda some=some: ops.log_partition(query, key, **some)
        yield f"moments {name}", lambda some=some: ops.attention_moments(query, key, value, **some)
        if name != "cap":
            yield f"fisher_vp {name}", lambda some=some: ops.fisher_vp(query, key, query, **some)
        if name not in ("cap", "window", "sink"):
            yield f"draws {name}", lambda some=some: ops.resample_attention(query, key, value, draws=2, **drawn, **some)
        if name in ("", "per key"):
            yield (
                f"features {name}",
                lambda some=some: ops.random_feature_log_partition(query, key, features=2, **drawn, **some),
            )
    for reduction in ("mean", "sum", "none"):
        yield (
            f"words {reduction}",
            lambda reduction=reduction: ops.linear_cross_entropy(
                rows, words, target, reduction=reduction, label_smoothing=0.1, return_log_partition=True
            ),
        )
    yield (
        "pairs",
        lambda: ops.info_nce(rows, rows, temperature=torch.tensor(0.5), return_log_partition=True, symmetric=True),
    )
    yield (
        "ids",
        lambda: ops.info_nce(
            rows,
            rows,
            negatives=words,
            temperature=0.5,
            log_weight=FalseNegatives(ids, torch.zeros(length + 7, dtype=torch.int64, device=device)),
        ),
    )
    yield "n_pairs", lambda: ops.n_pairs(rows, rows, norm_weight=0.1)
    yield "nca", lambda: ops.nca(rows, ids, return_log_partition=True)
    yield (
        "parts",
        lambda: Partial.of(ops.attention(query, key, value)).merge(Partial.of(ops.attention(query, key, value))),
    )


SIZES = {
    "some of all": (2, 5, 7),
    "no query": (2, 0, 7),
    "no key": (2, 5, 0),
    "no item": (0, 5, 7),
    "nothing": (0, 0, 0),
}


@pytest.mark.medium
@some_slow(
    ("sizes", "dtype"),
    [
        ("some of all", torch.float32),
        ("no query", torch.float32),
        ("no key", torch.float32),
        ("nothing", torch.bfloat16),
        ("some of all", torch.bfloat16),
        ("some of all", torch.float64),
        ("no item", torch.float32),
    ],
    quick=2,
    ids=lambda one: str(one).removeprefix("torch."),
)
def test_shapes_where_nothing_is_left_and_on_the_meta_device(sizes, dtype):
    """The meta device says, without a value, what the processor gives: shape, dtype and device of everything."""
    for (name, real), (_, told) in zip(
        answers("cpu", dtype, *SIZES[sizes]), answers("meta", dtype, *SIZES[sizes]), strict=True
    ):
        found = told()
        assert shape_of(found) == shape_of(real()), (name, sizes)
        assert devices(found) == {"meta"}, name


def test_gradients_on_the_meta_device():
    query, key, value = (tensor.to("meta").requires_grad_() for tensor in (Q, K, V))
    hidden, weight = H.to("meta").requires_grad_(), W.to("meta").requires_grad_()
    rows = PAIR.to("meta").requires_grad_()
    loss = ops.linear_cross_entropy(hidden, weight, Y.to("meta")) + ops.info_nce(rows, rows, temperature=1.0)
    output, level = ops.attention(query, key, value)
    (output.sum() + level.sum() + ops.fisher_vp(query, key, query).sum() + loss).backward()
    for tensor in (query, key, value, hidden, weight, rows):
        assert tensor.grad is not None and tensor.grad.shape == tensor.shape


@every_row("backend", ["reference", "fused"])
def test_a_scale_of_another_dtype(backend):
    """A scale of each head in float64 for queries in float32 is the same in float32."""
    scale = draw(4, seed=3)
    for wide in (scale.double(), scale.bfloat16().double()):
        found = ops.attention(Q, K, V, scale=wide, backend=backend)
        wanted = ops.attention(Q, K, V, scale=wide.float(), backend=backend)
        torch.testing.assert_close(found, wanted)
    blocks = ops.attention_moments(Q, K, V, scale=scale.double(), backend="blocks")
    torch.testing.assert_close(blocks, ops.attention_moments(Q, K, V, scale=scale, backend="reference"))


@every_row("place", ["query", "log_weight", "scale"])
def test_a_law_of_nan_has_no_draw(place):
    """Neither the first key nor an index beyond the last, and no value that looks like one."""
    query, weight, scale = Q.clone(), torch.zeros(5, 7), torch.ones(4)
    query[0, 0, 1] = math.nan if place == "query" else query[0, 0, 1]
    weight[1] = math.nan if place == "log_weight" else weight[1]
    scale[0] = math.nan if place == "scale" else scale[0]
    drawn = ops.resample_attention(
        query, K, V, generator=torch.Generator().manual_seed(0), draws=3, log_weight=weight, scale=scale
    )
    wrong = ops.log_partition(query, K, log_weight=weight, scale=scale, backend="reference").isnan()
    assert wrong.any() and not wrong.all()
    assert (drawn.indices[wrong] == -1).all() and drawn.sample[wrong].isnan().all()
    assert (drawn.indices[~wrong] >= 0).all() and drawn.sample[~wrong].isfinite().all()
