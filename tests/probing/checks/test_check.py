"""The self-check allows what the rounding of the forward pass explains, and no more."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.support.probing import zoo
from tests.support.probing.plain import Gpt, gpt
from tests.support.rows import every_row
from torch import Tensor, nn

import massieu
from massieu import InputError, Monitor
from massieu.probing.capture import capture
from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.checks.check import first_look

IDS = torch.arange(24).reshape(2, 12) * 7 % 31


class Half(nn.Module):
    """Computes in bfloat16 inside its own forward and gives float32, as a model that accelerate prepared does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(ids).float()


class HalfBlock(Gpt):
    """Its first block computes in bfloat16, its second in float32."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))  # type: ignore[operator]
        with torch.autocast("cpu", torch.bfloat16):
            x = self.blocks[0](x)
        return self.head(self.norm(self.blocks[1](x.float())))


class OwnScores(nn.Module):
    """Queries and keys are float32 parameters' products outside the autocast; scores and values are computed in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part(x).unflatten(2, (2, 4)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        with torch.autocast("cpu", torch.bfloat16):
            mixed = (query @ key.mT * 3).softmax(-1) @ value
        return mixed.transpose(1, 2).flatten(2).float()


def prepared_by_accelerate(model: nn.Module) -> nn.Module:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # it is one for the process, and knows one precision
    prepared = Accelerator(mixed_precision="bf16", cpu=True).prepare_model(model)
    AcceleratorState._reset_state(reset_partial_state=True)
    return prepared


def misread(monkeypatch: pytest.MonkeyPatch, wrong: Callable[[AttentionCall], AttentionCall]) -> None:
    """What the self-check is shown is not what the model computed."""
    honest = capture.Capture.observe
    monkeypatch.setattr(capture.Capture, "observe", lambda self, call: honest(self, wrong(call)))


@pytest.mark.medium
@every_row(("make", "fused"), [(Half, True), (Half, False), (prepared_by_accelerate, True)])
def test_a_forward_in_bfloat16_that_gives_float32(make, fused):
    model = make(gpt(fused=fused)).eval()
    assert model(IDS).dtype == torch.float32
    record = Monitor(model, IDS)(0)
    assert record is not None
    look = first_look(Monitor(model, IDS).model, {"ids": IDS})
    assert look.check.tolerance == 3e-2 and look.check.passed
    massieu.probe(model, [IDS], statistics=["entropy"], draws=0)


def test_scores_in_bfloat16_of_queries_in_float32():
    torch.manual_seed(0)
    look = first_look(OwnScores(), {"x": torch.randn(2, 6, 8)})
    assert look.check.tolerance == 3e-2 and look.check.passed


def test_a_float32_model_is_held_to_its_own_rounding(monkeypatch):
    look = first_look(gpt(), {"ids": IDS})
    assert look.check.tolerance == 1e-4 and look.check.error < 1e-5
    misread(monkeypatch, lambda call: replace(call, scale=1.002 * call.scale))
    with pytest.raises(InputError, match=r"self-check failed at blocks.*allowed 1e-04"):
        first_look(gpt(), {"ids": IDS})


@pytest.mark.medium
@pytest.mark.parametrize("name", ["llama", "modernbert", "gemma2"])
def test_a_float64_model_that_forms_its_softmax_in_float32_is_read(name, monkeypatch):
    model = zoo.fresh(name).double()
    model.set_attn_implementation("eager")
    batch = zoo.inputs(name)
    assert first_look(model, batch).check.passed
    misread(monkeypatch, lambda call: replace(call, scale=1.01 * call.scale))
    with pytest.raises(InputError, match="self-check failed"):
        first_look(model, batch)


def test_a_float32_block_beside_one_in_bfloat16_is_held_to_its_own_rounding(monkeypatch):
    torch.manual_seed(0)
    model = HalfBlock(fused=True).eval()
    assert first_look(model, {"ids": IDS}).check.passed

    def wrong(call: AttentionCall) -> AttentionCall:
        return replace(call, scale=1.01 * call.scale) if call.query.dtype == torch.float32 else call

    misread(monkeypatch, wrong)
    with pytest.raises(InputError, match=r"self-check failed at blocks\.1.*allowed 1e-04"):
        first_look(model, {"ids": IDS})
