"""Two modules of one hash compute the same: what is in the hash beside the weights, and what is not."""

import argparse
import copy
import dataclasses
import functools
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import massieu
from massieu.probing.model.module_hash import module_hash


@dataclasses.dataclass
class Settings:
    heads: int = 2
    scale: float = 0.5


class Own(nn.Module):
    """A module whose numbers depend on each of its attributes."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("angles", torch.arange(4.0), persistent=False)
        self.settings, self.more = Settings(), SimpleNamespace(windows=[3, {"left": 2}])
        self.activation, self.heads, self.causal, self._active = functional.gelu, 2, True, set("several")
        self.table, self.arguments = torch.ones(3), argparse.Namespace(heads=2)
        for name, value in changes.items():
            setattr(self, name, value)


@pytest.mark.parametrize(
    "changes",
    [
        {"heads": 4},
        {"heads": 2.0},
        {"causal": False},
        {"activation": functional.relu},
        {"settings": Settings(scale=0.25)},
        {"more": SimpleNamespace(windows=[3, {"left": 1}])},
        {"_active": set("other")},
        {"angles": None},
        {"arguments": argparse.Namespace(heads=3)},
        {"angles": torch.arange(4.0) / 2},
        {"second": nn.Linear(4, 4, bias=False)},
    ],
    ids=[
        "heads",
        "type",
        "causal",
        "activation",
        "settings",
        "nested",
        "active",
        "no_angles",
        "arguments",
        "angles",
        "bias",
    ],
)
def test_a_setting_is_in_the_hash(changes):
    assert module_hash(Own(**changes)) != module_hash(Own()) == module_hash(copy.deepcopy(Own()))


def test_a_weight_and_a_class_are_in_the_hash():
    class Other(Own):
        pass

    changed = Own()
    with torch.no_grad():
        changed.first.weight[2, 1] += 1e-7
    assert len({module_hash(each) for each in (Own(), Other(), changed, Own().double())}) == 4


def test_what_changes_no_number_is_not_in_the_hash():
    model = Own()
    model.train()
    model.first.register_forward_hook(lambda *_: None)
    model.forward = functools.partial(model.first.forward)  # as libraries replace it that move weights
    model.name_or_path, model.logger, model.itself = "elsewhere", object(), [model]
    model.more.base_model_name_or_path, model.more.peft_version = (
        "elsewhere",
        "0.1",
    )  # as an adapter's configuration has
    fresh = Own()
    fresh.logger, fresh.itself = object(), [fresh]
    assert module_hash(model) == module_hash(fresh)


class Counting(nn.Module):
    """Its passes leave numbers on it, and one of its numbers is a setting."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.length, self.passes, self.scale, self.window = nn.Linear(4, 4), 0, 0, 1.0, 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.length = x.shape[0]
        self.count()
        return self.linear(x) * self.scale

    def count(self) -> None:
        self.passes += 1

    def stretch(self, scale: float) -> None:
        self.scale = scale


def test_what_a_pass_leaves_is_no_setting_and_what_a_caller_sets_is():
    torch.manual_seed(0)
    model = Counting()
    before = module_hash(model)
    model(torch.ones(2, 4))
    assert (model.length, model.passes) == (2, 1)
    assert module_hash(model) == before
    model.stretch(2.0)
    assert module_hash(model) != before
    model.stretch(1.0)
    model.window = 4
    assert module_hash(model) != before


@pytest.mark.parametrize("kept", [lambda one: one, lambda one: [3, (one, 2)], lambda one: {"left": [one]}])
def test_tensors_that_are_no_buffers_are_in_it_if_asked_for(kept):
    one, other = Own(table=kept(torch.ones(3))), Own(table=kept(torch.zeros(3)))
    assert module_hash(one, held=True) == module_hash(copy.deepcopy(one), held=True)
    assert module_hash(one) == module_hash(other)
    assert module_hash(one, held=True) != module_hash(other, held=True)


def test_lists_that_hold_themselves_have_an_end():
    loop: list[Any] = [1]
    loop.append(loop)
    for held in (False, True):
        assert module_hash(Own(more=loop), held=held) != module_hash(Own(more=[2]), held=held)


def test_the_order_of_a_set_is_not_in_the_hash():
    """Sets of strings have another order in another process; of 0 and 8, which have one place, the first stands first."""
    one, other = {0, 8}, {8, 0}
    assert list(one) != list(other)
    assert module_hash(Own(_active=one)) == module_hash(Own(_active=other)) != module_hash(Own())


@pytest.mark.slow
def test_another_process_has_the_same_hash():
    code = (
        "from tests.probing.model.test_module_hash import Own; from massieu.probing.model.module_hash import module_hash; "
        "print(module_hash(Own()))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == module_hash(Own())


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_pass_leaves_the_hash(kind):
    from tests.support.probing.zoo import MAKERS

    torch.manual_seed(0)
    model = MAKERS[kind]().eval()
    before = module_hash(model, held=True)
    model(input_ids=torch.arange(3, 35)[None])
    assert module_hash(model, held=True) == before


def _gpt(**settings: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=1, n_head=4, n_embd=16, vocab_size=50, n_positions=32, bos_token_id=0, eos_token_id=0, **settings
    )
    return GPT2Model(config).eval()


def _adapted(active: bool) -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    adapted = peft.get_peft_model(_gpt(), peft.LoraConfig(target_modules=["c_attn"], init_lora_weights=False)).eval()
    if not active:
        adapted.base_model.disable_adapter_layers()
    return adapted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(_gpt, functools.partial(_gpt, scale_attn_weights=False), id="scale"),
        pytest.param(functools.partial(_adapted, True), functools.partial(_adapted, False), id="adapters"),
    ],
)
def test_models_of_the_same_weights_are_measured_each(
    first: Callable[[], nn.Module], second: Callable[[], nn.Module], tmp_path
):
    """The results of one were taken for those of the other."""
    data = [{"input_ids": torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(0))}]
    options: dict[str, Any] = {"data": data, "names": ["first", "second"], "statistics": ["entropy"]}
    stored = massieu.compare(first(), second(), out=tmp_path, **options)
    expected = massieu.compare(first(), second(), **options)
    assert stored.values.equals(expected.values)
    assert not (expected.differences["difference"] == 0).all()
