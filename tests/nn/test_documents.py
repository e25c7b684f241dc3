"""`nn.Attention` of packed rows: one call a document."""

from typing import Any

import pytest
import torch
from tests.support.rows import one_in

from massieu import nn, ops


@one_in(
    2,
    {
        "options": [{}, {"is_causal": True}, {"is_causal": True, "query_offset": 1}],
        "asked": [{}, {"need_log_partition": True}, {"need_moments": True}],
        "need_weights": [False, True],
    },
)
def test_one_call_a_document(options: dict[str, Any], asked: dict[str, bool], need_weights: bool) -> None:
    torch.manual_seed(0)
    lengths = [3, 1, 6]
    heads = nn.SoftmaxHeads(sink=0.5, window=3)
    attention = nn.Attention(8, 2, batch_first=True, dtype=torch.float64, heads=heads)
    row = torch.randn(2, 10, 8, dtype=torch.float64)
    found: Any = attention(
        row, need_weights=need_weights, documents=ops.Documents.of_lengths(lengths), **options, **asked
    )
    apart: list[Any] = [
        attention(part, need_weights=need_weights, **options, **asked) for part in row.split(lengths, 1)
    ]
    torch.testing.assert_close(found[0], torch.cat([one[0] for one in apart], 1))
    if need_weights:
        blocks = torch.stack([torch.block_diag(*(one[1][item] for one in apart)) for item in range(2)])
        torch.testing.assert_close(found[1], blocks)
    if "need_log_partition" in asked:
        torch.testing.assert_close(found[2], torch.cat([one[2] for one in apart], 2))
    if "need_moments" in asked:
        torch.testing.assert_close(found[2].entropy, torch.cat([one[2].entropy for one in apart], 2))


def test_bad_calls() -> None:
    row, documents = torch.zeros(1, 3, 4), ops.Documents.of_lengths([1, 2])
    for module, given, kind, words in (
        (nn.Attention(4, 2, batch_first=True), [1, 2], TypeError, "documents must be what .* got list"),
        (nn.Attention(4, 2, batch_first=True), ops.Documents.of_lengths([2]), ValueError, "got 2 for 3 queries"),
        (nn.Attention(4, 2, batch_first=True, add_zero_attn=True), documents, ValueError, "use a sink"),
        (
            nn.Attention(4, 2, batch_first=True, heads=nn.EntmaxHeads()),
            documents,
            ValueError,
            "EntmaxHeads does not support",
        ),
    ):
        with pytest.raises(kind, match=words):
            module(row, documents=given)
