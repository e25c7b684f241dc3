"""Every public function of `massieu.ops` refuses what it cannot take: one sentence that names it, before any work.

Each tensor argument of each function is replaced by everything that is not what is asked for; what is particular to a
function is listed by hand. Files on disk, positions and scales of attention are in the tests of those.
"""

import inspect
import math
import re

import pytest
import torch
from tests.support.rows import every_row
from torch.utils._python_dispatch import TorchDispatchMode

from massieu import ops
from massieu.ops import AtomBlock, AtomStore, FalseNegatives, Partial, streaming
from massieu.ops.attention import AttentionResult

Q, K, V = torch.ones(2, 4, 5, 8), torch.ones(2, 2, 7, 8), torch.ones(2, 2, 7, 3)
Q5 = Q.unflatten(1, (2, 2))
H, W, Y, PAIR = torch.ones(2, 3, 4), torch.ones(7, 4), torch.zeros(2, 3, dtype=torch.int64), torch.ones(5, 4)
IDS, PART = torch.arange(5), Partial(torch.zeros(2, 3), torch.zeros(2, 3, 4))
MASK = torch.ones(50, 50, dtype=torch.bool)
"""Given where an option is wanted, it must not be printed."""


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return AtomStore.write(tmp_path_factory.mktemp("stores") / "store", [AtomBlock(K[0], V[0])])


GENERATOR = torch.Generator()
CALLS = {
    "attention": (ops.attention, {"query": Q, "key": K, "value": V}),
    "log_partition": (ops.log_partition, {"query": Q, "key": K}),
    "attention_moments": (ops.attention_moments, {"query": Q, "key": K, "value": V}),
    "attention_received": (ops.attention_received, {"query": Q, "key": K}),
    "moments_backend": (ops.moments_backend, {"query": Q, "key": K, "value": V}),
    "fisher_vp": (ops.fisher_vp, {"query": Q, "key": K, "vector": Q}),
    "random_feature_log_partition": (
        ops.random_feature_log_partition,
        {"query": Q, "key": K, "generator": GENERATOR, "features": 2},
    ),
    "resample_attention": (ops.resample_attention, {"query": Q, "key": K, "value": V, "generator": GENERATOR}),
    "linear_cross_entropy": (
        ops.linear_cross_entropy, {"hidden": H, "weight": W, "target": Y, "bias": torch.ones(7)}
    ),
    "info_nce": (
        ops.info_nce,
        {"query": PAIR, "key": PAIR, "negatives": PAIR, "positive": IDS, "temperature": 1.0},
    ),
    "n_pairs": (ops.n_pairs, {"query": PAIR, "key": PAIR}),
    "nca": (ops.nca, {"embedding": PAIR, "labels": IDS}),
    "binary_nce": (
        ops.binary_nce,
        {f"{kind}_log_{law}": PAIR for kind in ("data", "noise") for law in ("density", "noise")},
    ),
    "streaming.attention": (streaming.attention, {"query": Q, "store": None}),
    "streaming.log_partition": (streaming.log_partition, {"query": Q, "store": None}),
}  # fmt: skip
SCORED = {name for name, (_, good) in CALLS.items() if "key" in good and good["query"] is Q}
OPTIONAL = {("attention_moments", "value"), ("moments_backend", "value"), ("linear_cross_entropy", "bias")} | {
    ("info_nce", "negatives"), ("info_nce", "positive")
}  # fmt: skip
LONELY = {("streaming.attention", "query"), ("streaming.log_partition", "query"), ("nca", "embedding")}
"""They have no fellow whose dtype or device could differ."""


def replaced_tensors():
    """(function, argument, what it is replaced by, the error, words of the message)."""
    for name, (_, good) in CALLS.items():
        for argument, tensor in good.items():
            if not isinstance(tensor, torch.Tensor):
                continue
            wrong = {
                "list": ([1.0], TypeError, "got list"),
                "int": (3, TypeError, "got 3"),
                "array": (tensor.numpy(), TypeError, "got ndarray"),
                "complex": (tensor.to(torch.complex64), TypeError, "torch.complex64"),
                "booleans": (tensor.bool(), TypeError, "torch.bool"),
            }
            if (name, argument) not in OPTIONAL:
                wrong["None"] = None, TypeError, "got None"
            if tensor.is_floating_point():
                wrong["integers"] = tensor.long(), TypeError, "torch.int64"
            else:
                if name != "linear_cross_entropy":  # where floats are shares of words
                    wrong["floats"] = tensor.float(), TypeError, "torch.float32"
            if (name, argument) == ("info_nce", "positive"):  # booleans are a mask of several positives
                wrong["booleans"] = tensor.bool(), ValueError, "(5, 5), got (5,)"
            if (name, argument) not in LONELY:
                wrong["device"] = tensor.to("meta"), ValueError, "meta"
                if tensor.is_floating_point():
                    wrong["dtype"] = tensor.double(), TypeError, "torch.float64"
            for kind, (thing, error, words) in wrong.items():
                yield pytest.param(
                    name, {argument: thing}, error, (argument, words), id=f"{name}: {argument} as {kind}"
                )


def scored_calls():
    """What all functions of queries and keys share."""
    wrong = {
        "query of rank 1": ({"query": Q[0, 0, 0]}, ValueError, ("query", "(8,)")),
        "key of rank 5": ({"key": K[None]}, ValueError, ("key", "(1, 2, 2, 7, 8)")),
        "head sizes": ({"key": K[..., :6]}, ValueError, ("query", "key", "8 in", "6 in")),
        "head size 0": ({"query": Q[..., :0], "key": K[..., :0]}, ValueError, ("key", "head size", "(2, 2, 7, 0)")),
        "batches": ({"query": Q[:1]}, ValueError, ("query", "batch", "(1,) in (1, 4, 5, 8)", "(2,) in (2, 2, 7, 8)")),
        "heads": ({"query": Q[:, :3]}, ValueError, ("heads", "multiple", "3 in (2, 3, 5, 8)")),
        "grouped heads": ({"query": Q5[:, :1]}, ValueError, ("key's 2 heads", "(2, 1, 2, 5, 8)")),
        "weight of keys": ({"log_weight": torch.ones(6)}, ValueError, ("log_weight", "(2, 4, 5, 7)", "(6,)")),
        "weight of rank 6": (
            {"log_weight": torch.ones(1, 1, 1, 1, 1, 7)},
            ValueError,
            ("log_weight", "(1, 1, 1, 1, 1, 7)"),
        ),
        "vague weight": (
            {"query": Q5, "log_weight": torch.ones(1, 1, 7)},
            ValueError,
            ("(1, 1, 7)", "give all 5 dimensions"),
        ),
        "weight of integers": ({"log_weight": torch.ones(7).int()}, TypeError, ("log_weight", "torch.int32")),
        "weight as array": ({"log_weight": torch.ones(7).numpy()}, TypeError, ("log_weight", "ndarray")),
        "weight's device": ({"log_weight": torch.ones(7, device="meta")}, ValueError, ("log_weight", "meta")),
        "scale as word": ({"scale": "1"}, TypeError, ("scale", "got '")),
        "scale as list": ({"scale": [1.0]}, TypeError, ("scale", "list")),
        "scale True": ({"scale": True}, TypeError, ("scale", "True")),
        "scale inf": ({"scale": math.inf}, ValueError, ("scale", "finite", "inf")),
        "scale -inf": ({"scale": -math.inf}, ValueError, ("scale", "finite", "-inf")),
        "scale NaN": ({"scale": math.nan}, ValueError, ("scale", "finite", "nan")),
        "unknown keyword": ({"attn_mask": None}, TypeError, ("attn_mask",)),
    }
    tensors = {
        "scale of integers": ({"scale": torch.tensor(2)}, TypeError, ("scale", "torch.int64")),
        "scale of keys": ({"scale": torch.ones(7)}, ValueError, ("scale", "4 (one a head)", "(7,)")),
        "scale of pairs": ({"scale": torch.ones(2, 4, 5, 7)}, ValueError, ("scale", "(2, 4, 5, 7)")),
        "scale's device": ({"scale": torch.ones(4, device="meta")}, ValueError, ("scale", "meta")),
        "causal as None": ({"is_causal": None}, TypeError, ("is_causal", "None")),
        "causal as number": ({"is_causal": 1}, TypeError, ("is_causal", "1")),
        "causal as mask": ({"is_causal": MASK}, TypeError, ("is_causal", "tensor")),
        "backend as tensor": ({"backend": MASK}, ValueError, ("backend", "tensor")),
        "eight bits": ({"query": Q.to(torch.float8_e5m2)}, TypeError, ("query", "torch.float8_e5m2")),
        "sparse key": ({"key": K.to_sparse()}, TypeError, ("key", "sparse_coo")),
        "sparse weight": ({"log_weight": torch.ones(5, 7).to_sparse()}, TypeError, ("log_weight", "sparse_coo")),
        "nested query": (
            {"query": torch.nested.nested_tensor([Q[0]], layout=torch.jagged)},
            TypeError,
            ("query", "nested"),
        ),
        "window as number": ({"window": 2.5}, TypeError, ("window", "2.5")),
        "window of True": ({"window": True}, TypeError, ("window", "True")),
        "window of three": ({"window": (1, 2, 3)}, TypeError, ("window", "(1, 2, 3)")),
        "window of a None": ({"window": (1, None)}, TypeError, ("window",)),
        "window below 0": ({"window": -1}, ValueError, ("window", "-1")),
        "window's right": ({"window": (4, -2)}, ValueError, ("window", "(4, -2)")),
        "sink as word": ({"sink": "none"}, TypeError, ("sink", "got '")),
        "sink True": ({"sink": True}, TypeError, ("sink", "True")),
        "sink +inf": ({"sink": math.inf}, ValueError, ("sink", "inf")),
        "sink NaN": ({"sink": math.nan}, ValueError, ("sink", "nan")),
        "sink of integers": ({"sink": torch.zeros(4).int()}, TypeError, ("sink", "torch.int32")),
        "sink of key heads": ({"sink": torch.zeros(2)}, ValueError, ("sink", "4 (one a head)", "(2,)")),
        "sink's device": ({"sink": torch.zeros(4, device="meta")}, ValueError, ("sink", "meta")),
    }
    for name in sorted(SCORED):
        options = inspect.signature(CALLS[name][0]).parameters
        for kind, (change, error, words) in (wrong | ({} if "random" in name else tensors)).items():
            if not (change.keys() <= {*options, "attn_mask"}):
                continue
            change = change | ({"vector": change["query"]} if name == "fisher_vp" and "query" in change else {})
            yield pytest.param(name, change, error, words, id=f"{name}: {kind}")
        if "value" in CALLS[name][1]:
            for shape in ((2, 2, 7), (2, 2, 6, 3), (2, 1, 7, 3), (1, 2, 7, 3), (2, 2, 7, 0)):
                yield pytest.param(
                    name, {"value": torch.ones(shape)}, ValueError, ("value", str(shape)), id=f"{name}: value {shape}"
                )


OWN = [
    ("attention", {"backend": "math"}, ValueError, ("backend", "'math'")),
    ("attention", {"backend": None}, ValueError, ("backend", "None")),
    ("attention", {"backend": "fused", "key": K[:, :, :0], "value": V[:, :, :0]}, ValueError, ("'fused'", "key")),
    ("log_partition", {"value": V}, TypeError, ("value",)),
    ("attention", {"softcap": 0.0}, ValueError, ("softcap", "0.0")),
    ("log_partition", {"softcap": "30"}, TypeError, ("softcap", "got '")),
    ("fisher_vp", {"softcap": 30.0}, TypeError, ("softcap",)),
    ("log_partition", {"backend": "tiles"}, ValueError, ("backend", "'tiles'")),
    ("attention_moments", {"backend": "fused"}, ValueError, ("backend", "'fused'")),
    ("attention_moments", {"softcap": 0}, ValueError, ("softcap", "0")),
    ("attention_moments", {"softcap": -3.5}, ValueError, ("softcap", "-3.5")),
    ("attention_moments", {"softcap": math.nan}, ValueError, ("softcap", "nan")),
    ("attention_moments", {"softcap": math.inf}, ValueError, ("softcap", "inf")),
    ("attention_moments", {"softcap": False}, TypeError, ("softcap", "False")),
    ("attention_moments", {"softcap": torch.tensor(3.0)}, TypeError, ("softcap", "tensor")),
    ("attention_moments", {"query": Q.clone().requires_grad_(), "backend": "blocks"}, ValueError, ("'blocks'",)),
    ("fisher_vp", {"vector": Q[..., :7]}, ValueError, ("vector", "(2, 4, 5, 8)", "(2, 4, 5, 7)")),
    ("fisher_vp", {"vector": Q5}, ValueError, ("vector", "(2, 2, 2, 5, 8)")),
    ("fisher_vp", {"backend": "compiled"}, ValueError, ("backend", "'compiled'")),
    ("random_feature_log_partition", {"generator": None}, TypeError, ("generator", "None")),
    ("random_feature_log_partition", {"generator": 7}, TypeError, ("generator", "7")),
    ("random_feature_log_partition", {"features": 0}, ValueError, ("feature", "0")),
    ("random_feature_log_partition", {"features": -4}, ValueError, ("feature", "-4")),
    ("random_feature_log_partition", {"features": 2.0}, TypeError, ("features", "2.0")),
    ("random_feature_log_partition", {"features": True}, TypeError, ("features", "True")),
    ("random_feature_log_partition", {"features": MASK}, TypeError, ("features",)),
    ("random_feature_log_partition", {"scale": torch.ones(4)}, TypeError, ("scale", "tensor")),
    ("random_feature_log_partition", {"log_weight": torch.ones(5, 7)}, ValueError, ("log_weight", "(1, 5)")),
    ("random_feature_log_partition", {"log_weight": torch.ones(2, 4, 1, 7)}, ValueError, ("log_weight", "(2, 1)")),
    ("resample_attention", {"generator": "seed"}, TypeError, ("generator", "got '")),
    ("resample_attention", {"draws": 0}, ValueError, ("draw", "0")),
    ("resample_attention", {"draws": -1}, ValueError, ("draw", "-1")),
    ("resample_attention", {"draws": None}, TypeError, ("draws", "None")),
    ("resample_attention", {"draws": MASK}, TypeError, ("draws",)),
    ("resample_attention", {"method": "stratified"}, ValueError, ("method", "'stratified'")),
    ("resample_attention", {"method": MASK}, ValueError, ("method",)),
    ("linear_cross_entropy", {"weight": W.mT}, ValueError, ("hidden", "(2, 3, 4)", "weight (4, 7)")),
    ("linear_cross_entropy", {"weight": W.to_sparse()}, TypeError, ("weight", "sparse_coo")),
    ("linear_cross_entropy", {"target": Y.to_sparse()}, TypeError, ("target", "sparse_coo")),
    ("linear_cross_entropy", {"weight": W[0]}, ValueError, ("weight", "(4,)")),
    ("linear_cross_entropy", {"weight": W[:0]}, ValueError, ("weight", "(0, 4)")),
    ("linear_cross_entropy", {"hidden": torch.tensor(1.0)}, ValueError, ("hidden", "()")),
    ("linear_cross_entropy", {"hidden": H[..., :0], "weight": W[:, :0]}, ValueError, ("weight", "(7, 0)")),
    ("linear_cross_entropy", {"bias": torch.ones(4)}, ValueError, ("bias", "(4,)")),
    ("linear_cross_entropy", {"target": Y[0]}, ValueError, ("target", "(2, 3)", "(3,)")),
    ("linear_cross_entropy", {"target": Y + 7}, ValueError, ("target", "6", "7")),
    ("linear_cross_entropy", {"target": Y - 1}, ValueError, ("target", "-1")),
    ("linear_cross_entropy", {"target": (Y + 255).to(torch.uint8)}, ValueError, ("target", "255")),
    ("linear_cross_entropy", {"ignore_index": 1.0}, TypeError, ("ignore_index", "1.0")),
    ("linear_cross_entropy", {"label_smoothing": -0.1}, ValueError, ("label_smoothing", "-0.1")),
    ("linear_cross_entropy", {"label_smoothing": "a bit"}, TypeError, ("label_smoothing", "got '")),
    ("linear_cross_entropy", {"z_loss": math.nan}, ValueError, ("z_loss", "nan")),
    ("linear_cross_entropy", {"z_loss": -1e-4}, ValueError, ("z_loss", "-0.0001")),
    ("linear_cross_entropy", {"reduction": "batchmean"}, ValueError, ("reduction", "'batchmean'")),
    ("linear_cross_entropy", {"reduction": MASK}, ValueError, ("reduction",)),
    ("linear_cross_entropy", {"return_log_partition": MASK}, TypeError, ("return_log_partition",)),
    ("linear_cross_entropy", {"class_weight": W}, ValueError, ("class_weight", "(7,)", "(7, 4)")),
    ("linear_cross_entropy", {"target": Y.float()}, ValueError, ("target", "(2, 3, 7)", "(2, 3)")),
    ("info_nce", {"temperature": 0}, ValueError, ("temperature", "0")),
    ("info_nce", {"temperature": -0.5}, ValueError, ("temperature", "-0.5")),
    ("info_nce", {"temperature": math.nan}, ValueError, ("temperature", "nan")),
    ("info_nce", {"temperature": math.inf}, ValueError, ("temperature", "inf")),
    ("info_nce", {"temperature": None}, TypeError, ("temperature", "None")),
    ("info_nce", {"temperature": torch.ones(2)}, ValueError, ("temperature", "(2,)")),
    ("info_nce", {"temperature": torch.tensor(1)}, TypeError, ("temperature", "torch.int64")),
    ("info_nce", {"key": PAIR.to_sparse()}, TypeError, ("key", "sparse_coo")),
    ("info_nce", {"log_weight": torch.ones(5, 10).to_sparse()}, TypeError, ("log_weight", "sparse_coo")),
    ("info_nce", {"query": PAIR[0]}, ValueError, ("query", "(4,)")),
    ("info_nce", {"key": PAIR[:, :3]}, ValueError, ("key", "(5, 3)")),
    ("info_nce", {"negatives": PAIR[:, :3]}, ValueError, ("negatives", "(5, 3)")),
    ("info_nce", {"positive": IDS[:4]}, ValueError, ("positive", "(5,)", "(4,)")),
    ("info_nce", {"positive": IDS + 1}, ValueError, ("positive", "4", "5")),
    ("info_nce", {"positive": (IDS + 1).to(torch.uint16)}, ValueError, ("positive", "4", "5")),
    ("info_nce", {"positive": IDS - 1}, ValueError, ("positive", "-1")),
    ("info_nce", {"positive": None, "key": PAIR[:4]}, ValueError, ("5", "4")),
    ("info_nce", {"symmetric": True}, ValueError, ("symmetric", "positive")),
    ("info_nce", {"symmetric": MASK}, TypeError, ("symmetric",)),
    ("info_nce", {"log_weight": MASK}, ValueError, ("log_weight", "(10,)", "(5, 10)", "(50, 50)")),
    ("info_nce", {"log_weight": torch.ones(5)}, ValueError, ("log_weight", "(10,)", "(5,)")),
    ("info_nce", {"log_weight": (IDS, IDS)}, TypeError, ("log_weight", "tuple")),
    ("info_nce", {"log_weight": FalseNegatives(IDS)}, ValueError, ("key_ids", "negatives included", "(10,)", "(5,)")),
    ("info_nce", {"label_smoothing": 0.1}, TypeError, ("label_smoothing",)),
    ("n_pairs", {"key": PAIR[:3]}, ValueError, ("5", "3")),
    ("n_pairs", {"norm_weight": None}, TypeError, ("norm_weight", "None")),
    ("n_pairs", {"norm_weight": -0.1}, ValueError, ("norm_weight", "-0.1")),
    ("n_pairs", {"norm_weight": math.nan}, ValueError, ("norm_weight", "nan")),
    ("n_pairs", {"temperature": 1.0}, TypeError, ("temperature",)),
    ("nca", {"embedding": PAIR[:, :0]}, ValueError, ("embedding", "(5, 0)")),
    ("nca", {"embedding": PAIR[None]}, ValueError, ("embedding", "(1, 5, 4)")),
    ("nca", {"labels": IDS[:, None]}, ValueError, ("labels", "(5,)", "(5, 1)")),
    ("nca", {"return_log_partition": "yes"}, TypeError, ("return_log_partition", "'yes'")),
    ("streaming.attention", {"query": Q[0]}, ValueError, ("query", "(4, 5, 8)")),
    ("streaming.attention", {"query": Q[..., :6]}, ValueError, ("6 in (2, 4, 5, 6)",)),
    ("streaming.attention", {"query": Q[:, :3]}, ValueError, ("3 in (2, 3, 5, 8)",)),
    ("streaming.attention", {"query": torch.tensor(1.0)}, ValueError, ("query", "()")),
    ("streaming.attention", {"store": "atoms/"}, TypeError, ("store", "got '")),
    ("streaming.attention", {"store": K}, TypeError, ("store", "tensor")),
    ("streaming.attention", {"scale": math.nan}, ValueError, ("scale", "nan")),
    ("streaming.attention", {"block_size": 0}, ValueError, ("block", "0")),
    ("streaming.attention", {"block_size": 2.0}, TypeError, ("block", "2.0")),
    ("streaming.attention", {"block_size": True}, TypeError, ("block", "True")),
    ("streaming.attention", {"block_size": MASK}, TypeError, ("block",)),
    ("streaming.attention", {"progress": True}, TypeError, ("progress", "True")),
    ("streaming.attention", {"is_causal": True}, TypeError, ("is_causal",)),
    ("streaming.log_partition", {"store": {}}, TypeError, ("store", "dict")),
    ("streaming.log_partition", {"block_size": -1}, ValueError, ("block", "-1")),
    ("streaming.log_partition", {"progress": "bar"}, TypeError, ("progress", "got '")),
]  # fmt: skip
OTHERS = {
    "Partial.of(tuple)": (lambda: Partial.of((Q, K)), TypeError, ("Attention", "tuple")),
    "Partial.of(None)": (lambda: Partial.of(None), TypeError, ("Attention", "None")),
    "Partial.of(half log Z)": (
        lambda: Partial.of(AttentionResult(torch.ones(2, 3), torch.ones(2).half())), TypeError, ("log_partition", "float16")
    ),
    "Partial.of(swapped)": (lambda: Partial.of(AttentionResult(torch.ones(2), torch.ones(2, 3))), ValueError, ("(2, 3)",)),
    "Partial.empty(-1)": (lambda: Partial.empty((2, -1), 3), ValueError, ("shape", "-1")),
    "Partial.empty(number)": (lambda: Partial.empty(3, 2), TypeError, ("shape", "3")),
    "Partial.empty(size)": (lambda: Partial.empty((3,), -2), ValueError, ("size", "-2")),
    "Partial.empty(word)": (lambda: Partial.empty((3,), "2"), TypeError, ("size", "'2'")),
    "Partial.empty(half)": (lambda: Partial.empty((3,), 2, dtype=torch.float16), TypeError, ("torch.float16",)),
    "Partial.empty(integers)": (lambda: Partial.empty((3,), 2, dtype=torch.int64), TypeError, ("torch.int64",)),
    "merge with None": (lambda: PART.merge(None), TypeError, ("Partial", "None")),
    "merge with Attention": (lambda: PART.merge(AttentionResult(Q, K)), TypeError, ("Partial", "Attention")),
    "merge of shapes": (lambda: PART.merge(Partial.empty((2, 2), 4)), ValueError, ("(2, 3, 4)", "(2, 2, 4)")),
    "merge of dtypes": (lambda: PART.merge(Partial.empty((2, 3), 4, dtype=torch.float64)), TypeError, ("float64",)),
    "merge of devices": (lambda: PART.merge(Partial.empty((2, 3), 4, device="meta")), ValueError, ("cpu", "meta")),
    "merge of lists": (lambda: Partial([0.0], [[0.0]]).merge(), TypeError, ("log_partition", "list")),
    "reduce of no dimension": (lambda: PART.reduce(2), ValueError, ("dim", "(2, 3)", "2")),
    "reduce below": (lambda: PART.reduce(-3), ValueError, ("dim", "-3")),
    "reduce by word": (lambda: PART.reduce("query"), TypeError, ("dim", "'query'")),
    "reduce by mask": (lambda: PART.reduce(MASK), TypeError, ("dim",)),
    "unsqueeze beyond": (lambda: PART.unsqueeze(3), ValueError, ("dim", "3")),
    "unsqueeze from the end": (lambda: PART.unsqueeze(-1), ValueError, ("dim", "-1")),
    "FalseNegatives of a list": (lambda: FalseNegatives([1, 2]), TypeError, ("query_ids", "list")),
    "unsqueeze by word": (lambda: PART.unsqueeze("0"), TypeError, ("dim", "'0'")),
}  # fmt: skip
BLOCKS = {
    "nothing": (None, TypeError, ("blocks", "NoneType")),
    "one block": (AtomBlock(K[0]), TypeError, ("blocks", "AtomBlock")),
    "no block": ([], ValueError, ("at least one block",)),
    "tensors": ([K[0]], TypeError, ("AtomBlock", "tensor")),
    "list": ([AtomBlock([1.0])], TypeError, ("points", "list")),
    "values as array": ([AtomBlock(K[0], V[0].numpy())], TypeError, ("values", "ndarray")),
    "booleans": ([AtomBlock(K[0], None, K[0, ..., 0].bool())], TypeError, ("log_weight", "torch.bool")),
    "rank": ([AtomBlock(K)], ValueError, ("points", "(2, 2, 7, 8)")),
    "no head": ([AtomBlock(K[0, :0])], ValueError, ("points", "(0, 7, 8)")),
    "points of size 0": ([AtomBlock(K[0, ..., :0])], ValueError, ("points", "(2, 7, 0)")),
    "values of size 0": ([AtomBlock(K[0], V[0, ..., :0])], ValueError, ("values", "(2, 7, 0)")),
    "values": ([AtomBlock(K[0], V[0, :, :6])], ValueError, ("values", "(2, 6, 3)", "(2, 7, 8)")),
    "weights": ([AtomBlock(K[0], None, torch.ones(2, 7, 1))], ValueError, ("log_weight", "(2, 7, 1)")),
    "unlike": ([AtomBlock(K[0]), AtomBlock(K[0, :, :, :4])], ValueError, ("(2, 7, 8)", "(2, 7, 4)")),
    "no data": ([AtomBlock(K[0].to("meta"))], ValueError, ("points", "meta")),
    "sparse": ([AtomBlock(K[0].to_sparse())], TypeError, ("points", "sparse")),
}

WORK = re.compile(r"mm|exp|softmax|attention|rand|matmul|dot|cumsum|sort|tanh|log_sigmoid")


class Worked(TorchDispatchMode):
    """Notes operations that are no part of looking at arguments."""

    def __init__(self):
        super().__init__()
        self.done = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        if WORK.search(name.replace("expand", "")):
            self.done.append(name)
        return func(*args, **(kwargs or {}))


def refuses(call, error, words):
    with Worked() as worked, pytest.raises((TypeError, ValueError)) as caught:
        call()
    message = str(caught.value)
    assert caught.type is error, message
    assert "\n" not in message and len(message) < 300, message
    for word in words:
        assert word in message, (word, message)
    assert worked.done == [], message


def test_the_good_calls_are_good_and_do_work(store):
    for name, (function, good) in CALLS.items():
        with Worked() as worked:
            function(**(good | ({"store": store} if "store" in good else {})))
        assert worked.done or name == "moments_backend", name


@pytest.mark.medium
@every_row(("name", "change", "error", "words"), [*replaced_tensors(), *scored_calls(), *OWN])
def test_refused(name, change, error, words, store):
    function, good = CALLS[name]
    arguments = good | ({"store": store} if "store" in good else {}) | change
    state = GENERATOR.get_state()
    refuses(lambda: function(**arguments), error, words)
    assert torch.equal(GENERATOR.get_state(), state)


@every_row(("call", "error", "words"), OTHERS.values(), ids=OTHERS)
def test_refused_parts(call, error, words):
    refuses(call, error, words)


@pytest.mark.parametrize(("blocks", "error", "words"), BLOCKS.values(), ids=BLOCKS)
def test_refused_blocks(blocks, error, words, tmp_path):
    refuses(lambda: AtomStore.write(tmp_path / "folder" / "store", blocks), error, words)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@every_row("path", [None, 3, ["store"]])
def test_refused_paths(path):
    for call in (lambda: AtomStore.open(path), lambda: AtomStore.write(path, [AtomBlock(K[0])])):
        refuses(call, TypeError, ("path", "list" if isinstance(path, list) else repr(path)))


def test_a_store_without_a_name_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refuses(lambda: AtomStore.write("", [AtomBlock(K[0])]), ValueError, ("path must name a file or folder",))


@every_row("size", [0, -1, 1.0, True, "all", None])
def test_refused_sizes_of_blocks(size, store):
    refuses(lambda: next(store.blocks(size)), ValueError if type(size) is int else TypeError, (repr(size),))
