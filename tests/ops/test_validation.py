"""Each wrong call gets one clear sentence that names what was given."""

import pytest
import torch
from tests.support.rows import every_row

from massieu import ops

Q, K, V = torch.ones(2, 4, 5, 8), torch.ones(2, 2, 7, 8), torch.ones(2, 2, 7, 3)
Q5 = Q.unflatten(1, (2, 2))

WRONG = {
    "query of rank 3": ((Q[0], K, V), {}, ValueError, r"\(4, 5, 8\)"),
    "query of rank 6": ((Q5[None], K, V), {}, ValueError, r"\(1, 2, 2, 2, 5, 8\)"),
    "key of rank 3": ((Q, K[0], V), {}, ValueError, r"key .*\(2, 7, 8\)"),
    "value of rank 3": ((Q, K, V[0]), {}, ValueError, r"value .*\(2, 7, 3\)"),
    "head sizes": ((Q, K[..., :6], V), {}, ValueError, r"8 in .* and 6 in"),
    "batch sizes": ((Q[:1], K, V), {}, ValueError, r"\(1,\) in \(1, 4, 5, 8\) and \(2,\) in"),
    "heads no multiple": ((Q[:, :3], K, V), {}, ValueError, "multiple of the key's 2, got 3"),
    "fewer query heads": ((Q[:, :1], K, V), {}, ValueError, "multiple"),
    "grouped heads": ((Q5[:, :1], K, V), {}, ValueError, "key's 2 heads"),
    "value length": ((Q, K, V[:, :, :6]), {}, ValueError, r"\(2, 2, 7\).*\(2, 2, 6, 3\)"),
    "value heads": ((Q, K, V[:, :1]), {}, ValueError, r"\(2, 1, 7, 3\)"),
    "value batch": ((Q, K, V[:1]), {}, ValueError, r"\(1, 2, 7, 3\)"),
    "value of size 0": ((Q, K, V[..., :0]), {}, ValueError, "value must have a head size"),
    "head size 0": ((Q[..., :0], K[..., :0], V), {}, ValueError, "head size of at least 1"),
    "no key head": ((Q, K[:, :0], V[:, :0]), {}, ValueError, "at least one head"),
    "list": (([1.0], K, V), {}, TypeError, "query must be a floating-point tensor, got list"),
    "no value": ((Q, K, None), {}, TypeError, "value must be a tensor"),
    "integers": ((Q.int(), K.int(), V.int()), {}, TypeError, "floating-point tensor, got a tensor of torch.int32"),
    "complex": ((Q.to(torch.complex64), K, V), {}, TypeError, "complex64"),
    "mixed dtypes": ((Q, K.double(), V), {}, TypeError, "float32 and torch.float64"),
    "mixed value": ((Q, K, V.half()), {}, TypeError, "float32 and torch.float16"),
    "float8": ([t.to(torch.float8_e5m2) for t in (Q, K, V)], {}, TypeError, "32- or 64-bit.*float8_e5m2"),
    "sparse": ((Q.to_sparse(), K, V), {}, TypeError, "query must be a floating-point tensor, got a sparse_coo tensor"),
    "nested": ((Q, torch.nested.nested_tensor(list(K)), V), {}, TypeError, "key must be .* got a nested"),
    "sparse mask": (
        (Q, K, V),
        {"log_weight": torch.ones(5, 7).to_sparse()},
        TypeError,
        "log_weight must be .* got a sparse",
    ),
    "sparse scale": ((Q, K, V), {"scale": torch.ones(4).to_sparse()}, TypeError, "scale must be .* got a sparse"),
    "float8 sink": ((Q, K, V), {"sink": torch.ones(4).to(torch.float8_e5m2)}, TypeError, "sink must be a 16-"),
    "causal mask": ((Q, K, V), {"is_causal": torch.ones(9, 9)}, TypeError, "is_causal must be.*got a tensor"),
    "backend of tensors": ((Q, K, V), {"backend": torch.ones(9, 9)}, ValueError, "backend must be.*got a tensor"),
    "devices": ((Q, K.to("meta"), V), {}, ValueError, "on cpu and .* on meta"),
    "integer mask": ((Q, K, V), {"log_weight": torch.ones(7, dtype=torch.int64)}, TypeError, "int64"),
    "mask as list": ((Q, K, V), {"log_weight": [True] * 7}, TypeError, "list"),
    "mask's keys": ((Q, K, V), {"log_weight": torch.ones(6)}, ValueError, r"\(2, 4, 5, 7\).*\(6,\)"),
    "mask's queries": ((Q, K, V), {"log_weight": torch.ones(1, 1, 4, 7)}, ValueError, r"\(1, 1, 4, 7\)"),
    "mask's key heads": ((Q, K, V), {"log_weight": torch.ones(2, 2, 5, 7)}, ValueError, r"\(2, 2, 5, 7\)"),
    "mask (B, L, N)": ((Q, K, V), {"log_weight": torch.ones(2, 5, 7)}, ValueError, r"\(2, 5, 7\)"),
    "mask of rank 5": ((Q, K, V), {"log_weight": torch.ones(2, 2, 2, 5, 7)}, ValueError, r"\(2, 2, 2, 5, 7\)"),
    "vague mask": ((Q5, K, V), {"log_weight": torch.ones(2, 1, 1, 7)}, ValueError, "give all 5 dimensions"),
    "mask's device": ((Q, K, V), {"log_weight": torch.ones(7, device="meta")}, ValueError, "on cpu and .* on meta"),
    "scale of a word": ((Q, K, V), {"scale": "8"}, TypeError, "got '"),
    "scale of True": ((Q, K, V), {"scale": True}, TypeError, "True"),
    "infinite scale": (
        (Q, K, V),
        {"scale": float("inf")},
        ValueError,
        "finite, got inf",
    ),
    "integer scale": ((Q, K, V), {"scale": torch.tensor(1)}, TypeError, "int64"),
    "scale's heads": ((Q, K, V), {"scale": torch.ones(2)}, ValueError, r"4 \(one a head\).*\(2,\)"),
    "scale's shape": ((Q, K, V), {"scale": torch.ones(2, 4, 5, 7)}, ValueError, r"\(2, 4, 5, 1\)"),
    "scale's device": ((Q, K, V), {"scale": torch.ones(4, device="meta")}, ValueError, "on cpu and .* on meta"),
    "causal of 1": ((Q, K, V), {"is_causal": 1}, TypeError, "is_causal"),
    "backend": ((Q, K, V), {"backend": "cuda"}, ValueError, "'cuda'"),
    "fused elsewhere": ([t.to("meta") for t in (Q, K, V)], {"backend": "fused"}, ValueError, "meta.*'reference'"),
    "fused with gradient per pair": (
        (Q, K, V),
        {"backend": "fused", "log_weight": torch.ones(2, 4, 5, 7, requires_grad=True)},
        ValueError,
        "no gradient for a log_weight",
    ),
    "fused without keys": ((Q, K[:, :, :0], V[:, :, :0]), {"backend": "fused"}, ValueError, "at least one"),
}


@every_row("name", WRONG)
def test_wrong_calls(name):
    arguments, options, error, words = WRONG[name]
    with pytest.raises(error, match=words) as caught:
        ops.attention(*arguments, **options)
    assert "\n" not in str(caught.value)


def test_one_number_is_one_number():
    """A parameter of shape (1,) is the usual learned temperature."""
    wanted = ops.attention(Q, K, V, scale=0.3, sink=0.1)
    for shape in ((), (1,), (1, 1, 1, 1)):
        found = ops.attention(Q, K, V, scale=torch.full(shape, 0.3), sink=torch.full(shape, 0.1))
        for a, b in zip(found, wanted, strict=True):
            assert torch.allclose(a, b)


def test_unknown_keywords_raise():
    for function in (ops.attention, ops.log_partition, ops.attention_moments):
        with pytest.raises(TypeError, match="dropout"):
            function(Q, K, V, dropout=0.1) if function is not ops.log_partition else function(Q, K, dropout=0.1)


@every_row("softcap", [0.0, -1.0, float("nan"), float("inf")])
def test_softcap_is_positive(softcap):
    with pytest.raises(ValueError, match="softcap"):
        ops.attention_moments(Q, K, softcap=softcap)


def test_softcap_is_a_number():
    with pytest.raises(TypeError, match="softcap"):
        ops.attention_moments(Q, K, softcap=True)
