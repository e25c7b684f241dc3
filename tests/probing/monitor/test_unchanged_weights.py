"""The share of weights in half precision that an optimiser's step leaves as they were, and its alarm."""

import warnings
from typing import Any

import pytest
import torch
from tests.support.rows import every_row
from torch import Tensor, nn

from massieu import Monitor

BATCH = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))


def encoder(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).to(dtype)


def stepped(model: Any, optimizer: torch.optim.Optimizer) -> float:
    """Train one step, and count by hand which weights with a gradient stay as they were."""
    dtype = next(model.parameters()).dtype
    optimizer.zero_grad()
    model(BATCH.to(dtype)).square().mean().backward()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step()
    stayed = total = 0
    for old, parameter in zip(before, model.parameters(), strict=True):
        if parameter.grad is not None:
            has_gradient = parameter.grad != 0
            stayed += int((has_gradient & (old == parameter)).sum())
            total += int(has_gradient.sum())
    return stayed / total


@pytest.mark.medium
@every_row("rate", [1e-5, 1e-4, 1e-3, 1e-1])
@every_row("dtype", [torch.bfloat16, torch.float16])
def test_it_is_the_share_of_weights_that_the_step_leaves(dtype, rate):
    """Every weight of this model has fewer entries than the sample, so that all are counted."""
    model = encoder(dtype)
    optimizer = torch.optim.SGD(model.parameters(), rate)
    with Monitor(model, BATCH.to(dtype), every=1, optimizer=optimizer) as monitor:
        for step in range(3):
            expected = stepped(model, optimizer)
            record = monitor(step)
            assert record is not None
            assert ("massieu/unchanged_weights" in record) == (step > 0)
            if step == 0:  # whether the rate is rising is not known yet
                continue
            assert record["massieu/unchanged_weights"] == pytest.approx(expected, abs=1e-12)
            assert "massieu/unchanged_weights" in record.summary()
            assert len(record.summary()) <= 20


@pytest.mark.medium
@every_row(
    ("dtype", "rates"),
    [
        (torch.float32, (1e-3, 1e-3, 1e-3)),
        (torch.bfloat16, (0.0, 0.0, 0.0)),
        (torch.bfloat16, (1e-6, 2e-6, 3e-6)),  # a warm-up
    ],
)
def test_float32_weights_and_groups_that_do_not_train_or_warm_up_are_left_out(dtype, rates):
    model = encoder(dtype)
    optimizer = torch.optim.SGD(model.parameters(), rates[0])
    with Monitor(model, BATCH.to(dtype), every=1, optimizer=optimizer) as monitor:
        for step, rate in enumerate(rates):
            optimizer.param_groups[0]["lr"] = rate
            stepped(model, optimizer)
            record = monitor(step)
            assert record is not None
            assert "massieu/unchanged_weights" not in record


@pytest.mark.medium
@every_row("at_due_steps_alone", [False, True])
def test_only_the_step_before_a_record_counts(at_due_steps_alone):
    model = encoder(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 1e-5)
    with Monitor(model, BATCH.bfloat16(), every=3, optimizer=optimizer) as monitor:
        for step in range(7):
            optimizer.param_groups[0]["lr"] = 1e-5 if step % 3 else 1e-1 / (step + 1)
            expected = stepped(model, optimizer)
            if step % 3 == 0 or not at_due_steps_alone:
                record = monitor(step)
                assert (record is None) == (step % 3 > 0)
                if record is not None and step > 0:
                    assert record["massieu/unchanged_weights"] == pytest.approx(expected, abs=1e-12)


@pytest.mark.medium
def test_a_large_weight_is_sampled():
    """One half of it moves and the other half does not: 1,024 evenly spaced entries know that to one in a thousand."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = encoder(torch.bfloat16)
            self.table = nn.Parameter(torch.ones(100, 101, dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    model = Model()
    # In bfloat16 1 − 1/128 is another number, and 1 − 1/1024 is not.
    moves = torch.full((10100,), 1 / 1024)
    moves[5050:] = 1 / 128
    optimizer = torch.optim.SGD([model.table], 1.0)
    with Monitor(model, BATCH.bfloat16(), every=1, optimizer=optimizer) as monitor:
        records: list[Any] = []
        for step in range(2):
            model.table.data.fill_(1)
            model.table.grad = moves.view(100, 101).bfloat16()
            optimizer.step()
            records.append(monitor(step))
    assert records[1]["massieu/unchanged_weights"] == pytest.approx(0.5, abs=1e-3)


@pytest.mark.medium
@every_row(("rate", "rings"), [(1e-6, True), (1.0, False)])
def test_steps_that_are_lost_ring_the_alarm(rate, rings):
    model = encoder(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), rate)
    with (
        warnings.catch_warnings(record=True) as said,
        Monitor(model, BATCH.bfloat16(), every=1, optimizer=optimizer) as monitor,
    ):
        warnings.simplefilter("always")
        titles = []
        for step in range(6):
            stepped(model, optimizer)
            record = monitor(step)
            assert record is not None
            titles.append([alarm.rule.title for alarm in record.alarms if alarm.rule.title == "lost updates"])
    assert titles == ([[], [], []] + [["lost updates"]] * 3 if rings else [[]] * 6)
    sentences = [str(each.message) for each in said if "lost updates" in str(each.message)]
    assert len(sentences) == rings
    if rings:
        assert sentences[0].startswith("massieu.Monitor: lost updates, since step 2: unchanged weights is 0.")
        assert "at step 3, and an alarm from 0.5. First keep the weights" in sentences[0]
