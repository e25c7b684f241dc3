"""What a statistic of queries may ask of a reading, and the ten scores of the page, against explicit weights in float64."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import massieu
from massieu.probing.capture.attention_call import AttentionCall, AttentionSite
from massieu.probing.capture.tokens import Tokens
from massieu.probing.statistics import query_reading
from massieu.probing.statistics.query_reading import QueryReading

B, H, HK, N, D, DV = 2, 4, 2, 11, 6, 5
IDS = torch.randint(10, 16, (B, N), generator=torch.Generator().manual_seed(2))
PADDED = torch.arange(N) < torch.tensor([[N], [N - 3]])
KINDS = ("all", "causal", "padded", "biased", "capped", "shut")


def call_of(kind: str, dtype: torch.dtype = torch.float32) -> AttentionCall:
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    weight: Tensor | None = None
    if kind == "padded":
        weight = PADDED[:, None, None].expand(B, 1, N, N)
    if kind == "biased":
        weight = -0.3 * (torch.arange(N)[:, None] - torch.arange(N)).abs()[None, None].float()
    if kind == "shut":  # the first query sees no key
        weight = torch.arange(N)[:, None].expand(N, N)[None, None] > 0
    return AttentionCall(
        AttentionSite("a"), nn.Identity(), drawn(B, H, N, D), drawn(B, HK, N, D), drawn(B, HK, N, DV), weight,
        kind == "causal", 0.7, 1.5 if kind == "capped" else None, None, drawn(B, N, H, DV),
    )  # fmt: skip


def reading_of(call: AttentionCall, kind: str = "all", places: Tensor | None = None) -> QueryReading:
    real = PADDED if kind == "padded" else torch.ones(B, N, dtype=torch.bool)
    special = torch.arange(N).expand(B, N) % 5 == 0
    keys = Tokens(real, special, IDS)
    if places is None:
        return QueryReading(call, keys, keys, torch.arange(N), True)
    queries = Tokens(real[:, places], special[:, places], IDS[:, places])
    return QueryReading(call.at(places), queries, keys, places, True)


def explicit(call: AttentionCall) -> Tensor:
    """Weights (B, H, L, N) in float64; 0 where a query sees no key."""
    key = call.key.double().repeat_interleave(H // HK, 1)
    scores = call.scale * call.query.double() @ key.mT
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.is_causal:
        scores = scores.masked_fill(torch.ones(N, N).triu(1).bool(), -torch.inf)
    elif call.log_weight is not None and call.log_weight.dtype == torch.bool:
        scores = scores.masked_fill(~call.log_weight, -torch.inf)
    elif call.log_weight is not None:
        scores = scores + call.log_weight
    return scores.softmax(-1).nan_to_num(0.0)


PLACES = torch.arange(N)
APART = (PLACES[:, None] - PLACES).abs()


def close(numbers: Tensor | None, expected: Tensor) -> None:
    """Weights of float32 scores: rounding is that of a few scores of size 10."""
    assert numbers is not None
    torch.testing.assert_close(numbers.double(), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("tile", [1, 10**9], ids=["a query at a time", "all at once"])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_over_keys_are_those_of_explicit_weights(kind, tile, monkeypatch):
    monkeypatch.setattr(query_reading, "TILE", tile)
    call = call_of(kind)
    reading, weights = reading_of(call, kind), explicit(call)
    close(reading.weight_where(lambda query, key: (query - key).abs() <= 2), weights.mul(APART <= 2).sum(-1))
    close(reading.expected(lambda query, key: (query - key).abs()), (weights * APART).sum(-1))
    same = IDS[:, None, :, None] == IDS[:, None, None]
    close(reading.weight_where_tokens(lambda query, key: query == key), (weights * same).sum(-1))
    chosen = IDS > 12
    close(reading.weight_on(chosen), (weights * chosen[:, None, None]).sum(-1))
    numbers = torch.randn(B, H, N, generator=torch.Generator().manual_seed(5))
    close(reading.expected_of_keys(numbers), (weights * numbers[:, :, None]).sum(-1))
    value = call.value.double().repeat_interleave(H // HK, 1)
    close(reading.weighted_value(), weights @ value)
    close(reading.value_norms, value.norm(dim=-1))
    close(reading.output_norm(), call.output.double().norm(dim=-1).transpose(1, 2))
    assert torch.equal(reading.strongest_key(), weights.argmax(-1))


@pytest.mark.parametrize("kind", KINDS)
def test_some_of_the_queries_have_the_numbers_that_they_have_among_all(kind):
    call, places = call_of(kind), torch.tensor([1, 4, 9])
    whole, part = reading_of(call, kind), reading_of(call, kind, places)
    for function in (
        lambda r: r.weight_where(lambda query, key: key == query - 1),
        lambda r: r.weight_where_tokens(lambda query, key: query == key),
        lambda r: r.expected_of_keys(r.value_norms),
    ):
        torch.testing.assert_close(function(part), function(whole)[:, :, places])


def test_numbers_of_keys_that_no_query_sees_may_be_infinite():
    reading = reading_of(call_of("causal"))
    numbers = reading.expected(lambda query, key: torch.where(key > query, torch.inf, 1.0))
    close(numbers, torch.ones(B, H, N, dtype=torch.float64))


def test_without_tokens_there_is_no_number():
    reading = reading_of(call_of("all"))
    unknown = replace(reading.keys, ids=None)
    assert replace(reading, keys=unknown).weight_where_tokens(lambda query, key: query == key) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gives_the_weights_of_its_own_numbers(dtype):
    call = call_of("causal", dtype)
    weights = explicit(call)
    numbers = reading_of(call).weight_where(lambda query, key: key == query)
    # Keys are centred in their own precision: a rounding of each entry, times a query of some units.
    assert float((numbers - weights.diagonal(dim1=-2, dim2=-1)).abs().max()) < 8 * torch.finfo(dtype).eps


# --- the ten scores of the page --------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "own_statistics.md"


@pytest.fixture(scope="module")
def scores() -> dict[str, Any]:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    (block,) = (each for each in blocks if "SCORES = [" in each)
    scope: dict[str, Any] = {"massieu": massieu}
    exec(compile(block.partition("SCORES = [")[0], str(PAGE), "exec"), scope)
    scope |= {"DELIMITERS": torch.tensor([10, 11]), "RARE": torch.tensor([15]), "DETERMINERS": torch.tensor([13])}
    return scope


def by_hand(name: str, weights: Tensor, call: AttentionCall) -> Tensor:
    """Each score by loops over single weights; NaN where it is not defined."""
    numbers = torch.full((B, H, N), torch.nan, dtype=torch.float64)
    norms = call.value.double().norm(dim=-1).repeat_interleave(H // HK, 1)
    ids = IDS.tolist()
    for b in range(B):
        for h in range(H):
            for i in range(N):
                p = weights[b, h, i].tolist()
                seen = [j for j in range(N) if p[j] > 0]
                total = sum(p[j] * float(norms[b, h, j]) for j in seen)
                numbers[b, h, i] = {
                    "previous_token": lambda i=i, p=p: p[i - 1] if i else 0.0,
                    "induction": lambda i=i, p=p, b=b: sum(p[j] for j in range(1, N) if ids[b][j - 1] == ids[b][i]),
                    "distance": lambda i=i, p=p: sum(p[j] * abs(i - j) for j in range(N)),
                    "sink": lambda p=p: p[0],
                    "positional": lambda i=i, p=p: float(p.index(max(p)) == i - 1),
                    "rare_words": lambda p=p, b=b: sum(p[j] for j in range(N) if ids[b][j] == 15),
                    "delimiter": lambda p=p, b=b: sum(p[j] for j in range(N) if ids[b][j] in (10, 11)),
                    "syntactic_offset": lambda i=i, p=p, b=b: (
                        torch.nan if ids[b][i] != 13 else (p[i + 1] if i + 1 < N else 0.0)
                    ),
                    "value_weighted_first": lambda p=p, b=b, h=h, t=total: p[0] * float(norms[b, h, 0]) / t,
                    "copying": lambda i=i, p=p, b=b: (
                        torch.nan if i + 1 == N else sum(p[j] for j in range(N) if ids[b][j] == ids[b][i + 1])
                    ),
                }[name]()
    return numbers


TEN = (
    *("previous_token", "induction", "distance", "sink", "positional"),
    *("rare_words", "delimiter", "syntactic_offset", "value_weighted_first", "copying"),
)


@pytest.mark.parametrize("kind", ["all", "causal"])
@pytest.mark.parametrize("name", TEN)
def test_a_published_score_is_what_its_name_says(name, kind, scores):
    call = call_of(kind)
    numbers = scores[name](reading_of(call))
    values, defined = numbers if isinstance(numbers, tuple) else (numbers, torch.ones(B, 1, N, dtype=torch.bool))
    close(
        torch.where(defined, values, torch.nan).nan_to_num(-1.0), by_hand(name, explicit(call), call).nan_to_num(-1.0)
    )


def test_each_score_of_the_page_has_at_most_eight_lines():
    page = PAGE.read_text(encoding="utf-8")
    for name in TEN:
        body = re.search(rf"^def {name}\(reading\):\n((?:    .*\n)+)", page, flags=re.MULTILINE)
        assert body is not None
        assert len(body[1].splitlines()) + 2 <= 8
