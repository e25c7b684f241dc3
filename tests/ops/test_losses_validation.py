"""Each wrong call of a loss gets one clear sentence that names what was given."""

import math

import pytest
import torch
from tests.support.rows import every_row

from massieu.ops.contrastive import FalseNegatives, info_nce, n_pairs, nca
from massieu.ops.documents import Documents
from massieu.ops.token_statistics import token_statistics
from massieu.ops.vocabulary import linear_cross_entropy

H, W, Y = torch.ones(2, 3, 4), torch.ones(7, 4), torch.zeros(2, 3, dtype=torch.int64)
VOCABULARY = {
    "list": (([1.0], W, Y), {}, TypeError, "hidden must be a floating-point tensor, got list"),
    "integers": ((H.int(), W, Y), {}, TypeError, "hidden must be a floating-point tensor, got a tensor of torch.int32"),
    "complex weight": ((H, W.to(torch.complex64), Y), {}, TypeError, "weight .*complex64"),
    "mixed dtypes": ((H, W.double(), Y), {}, TypeError, "float32 and torch.float64"),
    "mixed bias": ((H, W, Y), {"bias": torch.ones(7).half()}, TypeError, "float32 and torch.float16"),
    "devices": ((H, W.to("meta"), Y), {}, ValueError, "on cpu and .* on meta"),
    "weight of rank 1": ((H, W[0], Y), {}, ValueError, r"weight must have shape \(V, D\).*\(4,\)"),
    "weight transposed": ((H, W.mT, Y), {}, ValueError, r"\(\*lead, 7\) for weight \(4, 7\), got \(2, 3, 4\)"),
    "no word": ((H, W[:0], Y), {}, ValueError, r"at least one word.*\(0, 4\)"),
    "no dimension": ((H[..., :0], W[:, :0], Y), {}, ValueError, r"\(7, 0\)"),
    "hidden without dimensions": ((torch.tensor(1.0), W, Y), {}, ValueError, r"got \(\)"),
    "bias's shape": ((H, W, Y), {"bias": torch.ones(1, 7)}, ValueError, r"\(7,\), got \(1, 7\)"),
    "bias as list": ((H, W, Y), {"bias": [0.0] * 7}, TypeError, "bias must be a floating-point tensor, got list"),
    "target as list": ((H, W, [0]), {}, TypeError, "target must be a tensor of whole numbers, got list"),
    "float target": ((H, W, Y.float()), {}, ValueError, r"must have shape \(2, 3, 7\), a share .*got \(2, 3\)"),
    "complex target": ((H, W, Y.to(torch.complex64)), {}, TypeError, "whole numbers, got a tensor of torch.complex64"),
    "target's shares elsewhere": ((H, W, torch.ones(2, 3, 7, device="meta")), {}, ValueError, "on cpu and .* on meta"),
    "ignored shares": ((H, W, torch.ones(2, 3, 7)), {"ignore_index": 1}, ValueError, "not shares of words, got 1"),
    "factors as list": ((H, W, Y), {"class_weight": [1.0] * 7}, TypeError, "class_weight .*got list"),
    "integer factors": ((H, W, Y), {"class_weight": torch.arange(7)}, TypeError, "class_weight .*torch.int64"),
    "factors' shape": ((H, W, Y), {"class_weight": torch.ones(6)}, ValueError, r"class_weight .*\(7,\), got \(6,\)"),
    "factors' device": ((H, W, Y), {"class_weight": torch.ones(7, device="meta")}, ValueError, "on cpu and .* on meta"),
    "documents as list": ((H, W, Y), {"documents": [1, 2]}, TypeError, "documents must be a Documents, got list"),
    "documents of another length": (
        (H, W, Y),
        {"documents": Documents.of_lengths([1, 1])},
        ValueError,
        r"got 2 for hidden of leading shape \(2, 3\)",
    ),
    "documents of no row": (
        (H[0, 0], W, Y[0, 0]),
        {"documents": Documents.of_lengths([1])},
        ValueError,
        r"got 1 for .* leading shape \(\)",
    ),
    "documents without reduction": (
        (H, W, Y),
        {"documents": Documents.of_lengths([3]), "reduction": "none"},
        ValueError,
        "a sum or a mean as reduction",
    ),
    "soft cap 0": ((H, W, Y), {"softcap": 0.0}, ValueError, "softcap must be positive .*got 0.0"),
    "soft cap a tensor": ((H, W, Y), {"softcap": torch.tensor(30.0)}, TypeError, "softcap .*tensor"),
    "soft cap NaN": ((H, W, Y), {"softcap": math.nan}, ValueError, "softcap .*nan"),
    "boolean target": ((H, W, Y.bool()), {}, TypeError, "whole numbers, got a tensor of torch.bool"),
    "target's shape": ((H, W, Y[0]), {}, ValueError, r"\(2, 3\), got \(3,\)"),
    "target's device": ((H, W, Y.to("meta")), {}, ValueError, "on cpu and .* on meta"),
    "target too large": ((H, W, Y + 7), {}, ValueError, r"target must be in 0 … 6 or be ignore_index, -100, got 7"),
    "target negative": ((H, W, Y - 1), {}, ValueError, "got -1"),
    "another ignored index": ((H, W, Y - 100), {"ignore_index": -1}, ValueError, "got -100"),
    "ignore_index of None": ((H, W, Y), {"ignore_index": None}, TypeError, "ignore_index .*None"),
    "ignore_index of True": ((H, W, Y), {"ignore_index": True}, TypeError, "ignore_index"),
    "smoothing above 1": ((H, W, Y), {"label_smoothing": 1.5}, ValueError, "label_smoothing .*1.5"),
    "smoothing a tensor": ((H, W, Y), {"label_smoothing": torch.tensor(0.1)}, TypeError, "tensor"),
    "smoothing NaN": ((H, W, Y), {"label_smoothing": math.nan}, ValueError, "nan"),
    "negative z-loss": ((H, W, Y), {"z_loss": -1.0}, ValueError, "z_loss .*-1.0"),
    "infinite z-loss": ((H, W, Y), {"z_loss": math.inf}, ValueError, "z_loss .*inf"),
    "z-loss of a word": ((H, W, Y), {"z_loss": "1"}, TypeError, "got '"),
    "reduction": ((H, W, Y), {"reduction": "average"}, ValueError, "'average'"),
    "log partition of 1": ((H, W, Y), {"return_log_partition": 1}, TypeError, "return_log_partition"),
    "unknown keyword": ((H, W, Y), {"cap": 30.0}, TypeError, "cap"),
}


@every_row("name", VOCABULARY)
def test_wrong_calls_of_linear_cross_entropy(name):
    arguments, options, error, words = VOCABULARY[name]
    with pytest.raises(error, match=words) as caught:
        linear_cross_entropy(*arguments, **options)
    assert "\n" not in str(caught.value)


SHARED = set(VOCABULARY) - {
    "float target",
    "complex target",
    "target's shares elsewhere",
    "ignored shares",
    "unknown keyword",
}
STATISTICS = {
    name: row
    for name, row in VOCABULARY.items()
    if name in SHARED and set(row[1]) <= {"bias", "ignore_index", "softcap"}
} | {
    "float target": (
        (H, W, Y.float()),
        {},
        TypeError,
        "target must be a tensor of whole numbers, got a tensor of torch.float32",
    ),
    "temperature 0": ((H, W, Y), {"temperature": 0}, ValueError, "temperature must be positive .*got 0"),
    "temperature as text": ((H, W, Y), {"temperature": "1"}, TypeError, "temperature .*got '1'"),
    "temperatures": (
        (H, W, Y),
        {"temperature": torch.ones(2)},
        ValueError,
        r"temperature must be one number, got shape \(2,\)",
    ),
    "temperature of an integer tensor": (
        (H, W, Y),
        {"temperature": torch.tensor(1)},
        TypeError,
        "temperature .*torch.int64",
    ),
    "negative tensor": ((H, W, Y), {"temperature": torch.tensor(-1.0)}, ValueError, "temperature .*-1"),
    "temperature elsewhere": (
        (H, W, Y),
        {"temperature": torch.ones((), device="meta")},
        ValueError,
        "hidden on cpu and temperature on meta",
    ),
    "both tensors": (
        (H, W, Y),
        {"temperature": torch.tensor(1.0), "softcap": 2.0},
        ValueError,
        "number if there is a softcap",
    ),
    "unknown keyword": ((H, W, Y), {"label_smoothing": 0.1}, TypeError, "label_smoothing"),
}


@every_row("name", STATISTICS)
def test_wrong_calls_of_token_statistics(name):
    arguments, options, error, words = STATISTICS[name]
    with pytest.raises(error, match=words) as caught:
        token_statistics(*arguments, **options)
    assert "\n" not in str(caught.value)


Q, K, N, I = torch.ones(5, 4), torch.ones(5, 4), torch.ones(3, 4), torch.arange(5)  # noqa: E741
T = {"temperature": 1.0}
PAIRS = {
    "no temperature": ((Q, K), {}, TypeError, "temperature"),
    "list": (([1.0], K), T, TypeError, "query must be a floating-point tensor, got list"),
    "integers": ((Q.int(), K), T, TypeError, "query must be a floating-point tensor, got a tensor of torch.int32"),
    "mixed dtypes": ((Q, K.double()), T, TypeError, "float32 and torch.float64"),
    "devices": ((Q, K.to("meta")), T, ValueError, "on cpu and .* on meta"),
    "query of rank 1": ((Q[0], K), T, ValueError, r"got \(4,\) and \(5, 4\)"),
    "key of rank 3": ((Q, K[None]), T, ValueError, r"got \(5, 4\) and \(1, 5, 4\)"),
    "widths": ((Q, K[:, :3]), T, ValueError, r"got \(5, 4\) and \(5, 3\)"),
    "width 0": ((Q[:, :0], K[:, :0]), T, ValueError, r"\(5, 0\)"),
    "numbers of pairs": ((Q, K[:4]), T, ValueError, "got 5 and 4"),
    "negatives' width": ((Q, K), T | {"negatives": N[:, :3]}, ValueError, r"\(M, 4\) for query \(5, 4\), got \(3, 3\)"),
    "negatives of rank 1": ((Q, K), T | {"negatives": N[0]}, ValueError, r"got \(4,\)"),
    "negatives' dtype": ((Q, K), T | {"negatives": N.half()}, TypeError, "query and negatives .*float16"),
    "negatives as list": ((Q, K), T | {"negatives": [1.0]}, TypeError, "negatives must be a floating-point tensor, got list"),
    "float positive": ((Q, K), T | {"positive": I.float()}, TypeError, "positive .*float32"),
    "positive's shape": ((Q, K), T | {"positive": I[:4]}, ValueError, r"positive must have shape \(5,\).*\(4,\)"),
    "positive too large": ((Q, K), T | {"positive": I + 1}, ValueError, "positive must be in 0 … 4, got 5"),
    "positive a negative": (
        (Q, K), T | {"positive": I + 3, "negatives": N}, ValueError, "positive must be in 0 … 4, got 5"
    ),
    "positive below 0": ((Q, K), T | {"positive": I - 1}, ValueError, "got -1"),
    "symmetric with positive": ((Q, K), T | {"positive": I, "symmetric": True}, ValueError, r"key\[positive\]"),
    "symmetric of 1": ((Q, K), T | {"symmetric": 1}, TypeError, "symmetric must be True or False, got 1"),
    "log partition of None": ((Q, K), T | {"return_log_partition": None}, TypeError, "return_log_partition"),
    "temperature 0": ((Q, K), {"temperature": 0.0}, ValueError, "positive and finite, got 0.0"),
    "negative temperature": ((Q, K), {"temperature": -1}, ValueError, "positive and finite, got -1"),
    "infinite temperature": ((Q, K), {"temperature": math.inf}, ValueError, "finite"),
    "temperature of a word": ((Q, K), {"temperature": "cold"}, TypeError, "got '"),
    "temperature of True": ((Q, K), {"temperature": True}, TypeError, "True"),
    "integer temperature": ((Q, K), {"temperature": torch.tensor(1)}, TypeError, "int64"),
    "temperatures": ((Q, K), {"temperature": torch.ones(5)}, ValueError, r"one number, got shape \(5,\)"),
    "temperature's device": ((Q, K), {"temperature": torch.ones(1, device="meta")}, ValueError, "on cpu and .* on meta"),
    "weights as list": ((Q, K), T | {"log_weight": [0.0] * 5}, TypeError, "tensor or FalseNegatives, got list"),
    "integer weights": ((Q, K), T | {"log_weight": I}, TypeError, "int64"),
    "weights' shape": ((Q, K), T | {"log_weight": torch.ones(4)}, ValueError, r"\(5,\) or \(5, 5\), got \(4,\)"),
    "weights without negatives": (
        (Q, K), T | {"log_weight": torch.ones(5, 5), "negatives": N}, ValueError, r"\(8,\) or \(5, 8\), got \(5, 5\)"
    ),
    "weights' device": ((Q, K), T | {"log_weight": torch.ones(5, device="meta")}, ValueError, "on cpu and .* on meta"),
    "ids' number": ((Q, K), T | {"log_weight": FalseNegatives(I[:4])}, ValueError, r"query_ids .*\(5,\).*\(4,\)"),
    "ids of negatives": (
        (Q, K), T | {"log_weight": FalseNegatives(I), "negatives": N}, ValueError, r"key_ids .*\(8,\), got \(5,\)"
    ),
    "unknown keyword": ((Q, K), T | {"ids": I}, TypeError, "ids"),
}  # fmt: skip


@every_row("name", PAIRS)
def test_wrong_calls_of_info_nce(name):
    arguments, options, error, words = PAIRS[name]
    with pytest.raises(error, match=words) as caught:
        info_nce(*arguments, **options)
    assert "\n" not in str(caught.value)


OTHERS = {
    "ids of floats": (FalseNegatives, (I.float(),), {}, TypeError, "query_ids .*float32"),
    "n_pairs: numbers": (n_pairs, (Q, K[:4]), {}, ValueError, "got 5 and 4"),
    "n_pairs: negative weight": (n_pairs, (Q, K), {"norm_weight": -1.0}, ValueError, "norm_weight .*-1.0"),
    "n_pairs: infinite weight": (n_pairs, (Q, K), {"norm_weight": math.inf}, ValueError, "inf"),
    "n_pairs: a word": (n_pairs, (Q, K), {"norm_weight": "1"}, TypeError, "got '"),
    "nca: list": (nca, ([1.0], I), {}, TypeError, "embedding must be a floating-point tensor, got list"),
    "nca: integers": (nca, (Q.int(), I), {}, TypeError, "int32"),
    "nca: rank": (nca, (Q[0], I), {}, ValueError, r"\(N, D\) with D at least 1, got \(4,\)"),
    "nca: width 0": (nca, (Q[:, :0], I), {}, ValueError, r"got \(5, 0\)"),
    "nca: float labels": (nca, (Q, I.float()), {}, TypeError, "labels .*float32"),
    "nca: number of labels": (nca, (Q, I[:4]), {}, ValueError, r"\(5,\), got \(4,\)"),
    "nca: device": (nca, (Q, I.to("meta")), {}, ValueError, "on cpu and .* on meta"),
    "nca: log partition of 1": (nca, (Q, I), {"return_log_partition": 1}, TypeError, "return_log_partition"),
}


@every_row("name", OTHERS)
def test_wrong_calls_of_the_others(name):
    function, arguments, options, error, words = OTHERS[name]
    with pytest.raises(error, match=words) as caught:
        function(*arguments, **options)
    assert "\n" not in str(caught.value)
