"""Passes that call known functions are not followed; one that goes another way through the code is, and nothing is lost."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

import massieu
from massieu.probing.reading import reading as reading_of
from massieu.probing.reading.reading import KnownWays, Reading


class OtherWay(nn.Module):
    """A GPT-2 whose first block attends by its own code, beside transformers' interface, in texts that begin with a token."""

    def __init__(self, token: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, bos_token_id=1, eos_token_id=2)
        self.model = transformers.GPT2Model(config)
        self.config = config
        self.token = token

    def forward(self, input_ids: Tensor, **options: Any) -> Any:
        if bool((input_ids[:, 0] == self.token).any()):
            self.model.h[0].attn.forward = self._by_hand
        try:
            return self.model(input_ids, **options)
        finally:
            self.model.h[0].attn.__dict__.pop("forward", None)

    def _by_hand(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        layer: Any = self.model.h[0].attn
        query, key, value = (
            part.unflatten(-1, (2, 8)).transpose(1, 2) for part in layer.c_attn(hidden_states).split(16, dim=2)
        )
        length = query.shape[2]
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = (query @ key.mT * 8**-0.5).masked_fill(hidden, -torch.inf)
        output = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        return layer.c_proj(output), None


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """How often a pass was followed, and whether it was of a draw."""
    found: list[bool] = []
    original = Reading._followed

    def noted(self: Reading, *arguments: Any, **options: Any) -> Any:
        found.append(self._is_draw)
        return original(self, *arguments, **options)

    monkeypatch.setattr(Reading, "_followed", noted)
    return found


def batches(*firsts: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, 50, (3, 8), generator=generator) for _ in firsts]
    for text, first in zip(texts, firsts, strict=True):
        text[1, 0] = first
    return texts


def check_alike(result: massieu.ProbeResult, expected: massieu.ProbeResult) -> None:
    columns = ["site", "head", "statistic", "count"]
    assert result.heads.select(columns).equals(expected.heads.select(columns))
    values = (each.heads["value"].to_numpy() for each in (result, expected))
    np.testing.assert_allclose(*values, rtol=1e-5, atol=1e-6)


def test_only_the_first_pass_of_a_model_is_followed(followed):
    model = OtherWay().eval()
    massieu.probe(model, batches(3, 4, 5, 6), statistics="quick")
    assert followed == [False]


def test_draws_go_a_way_of_their_own_that_the_first_of_them_shows(followed):
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, bos_token_id=1, eos_token_id=2)
    model = transformers.GPT2Model(config).eval()
    massieu.probe(model, batches(3, 4, 5, 6), statistics=["attention"])
    assert followed == [False, True]


@pytest.mark.parametrize("firsts", [(3, 2, 4, 2, 5), (3, 4, 5, 2)])
def test_a_pass_that_goes_another_way_is_followed_and_loses_nothing(followed, monkeypatch, firsts):
    model = OtherWay().eval()
    result = massieu.probe(model, batches(*firsts), statistics="quick")
    assert len(followed) == 1 + firsts.count(2), "the first pass, and each that goes the other way"
    # All passes followed, as those of a model that does not attend by the interface alone.
    monkeypatch.setattr(reading_of, "KnownWays", lambda: None)
    followed.clear()
    check_alike(result, massieu.probe(model, batches(*firsts), statistics="quick"))
    assert len(followed) == len(firsts)


def test_a_module_that_is_called_twice_is_followed_in_every_pass(followed):
    """Its calls are numbered by all of them: one that the interface does not tell of would shift the others."""
    model = OtherWay()
    model.model.h[1] = model.model.h[0]
    massieu.probe(model.eval(), batches(3, 4, 5), statistics="quick")
    assert len(followed) == 3


class WeightsOrStates(nn.Module):
    """Attention by transformers' interface; beside it a product, softmax and product of weights, or of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.model = OtherWay().model
        self.config = self.model.config
        self.query = nn.Linear(16, 16)
        self.table = nn.Parameter(torch.randn(8, 16))

    def forward(self, input_ids: Tensor, **options: Any) -> Any:
        states = self.model(input_ids, **options).last_hidden_state
        query = self.query(states)
        key = states if bool((input_ids[:, 0] == 2).any()) else self.table
        return self.query((query @ key.mT).softmax(-1) @ key)


def test_the_same_functions_of_something_else_are_another_way(followed):
    model = WeightsOrStates().eval()
    assert massieu.probe(model, batches(3, 4, 5), statistics="quick").complete
    with pytest.raises(massieu.InputError, match="computed attention in this batch but not in the first one"):
        massieu.probe(model, batches(3, 4, 2), statistics="quick")


def test_where_every_pass_goes_a_way_of_its_own_all_are_followed(followed, monkeypatch):
    monkeypatch.setattr(reading_of, "MOST_MISSES", 1)
    model = OtherWay().eval()
    massieu.probe(model, batches(3, 4, 2, 5, 6), statistics="quick")
    assert followed == [False, False, False, False], "the first, the other way, and all behind it"


def test_ways_are_given_up_after_some_misses_in_a_row():
    ways = KnownWays()
    assert not ways.are_usable()
    ways.codes.add(1)
    for _ in range(reading_of.MOST_MISSES - 1):
        assert not ways.has(2) and ways.are_usable()
    assert ways.has(1) and ways.misses == 0
    for _ in range(reading_of.MOST_MISSES):
        assert ways.are_usable() and not ways.has(2)
    assert not ways.are_usable()
