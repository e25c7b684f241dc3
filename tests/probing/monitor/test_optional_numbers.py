"""What a monitor records or does on request: norms by layer, tokens with extreme activations, an end of training at a NaN."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.probing import zoo
from tests.support.probing.monitor_work import explicit_norm
from tests.support.probing.plain import gpt
from tests.support.rows import every_row
from torch import Tensor, nn
from torch.nn import functional as F

from massieu import InputError, Monitor
from massieu.probing.monitor.record import MonitorRecord

IDS = torch.arange(24).reshape(2, 12) * 7 % 31
PLACES = {"layer0": "blocks.0.", "layer1": "blocks.1."}


def by_layer(model: nn.Module, gradients: bool) -> dict[str, float]:
    """Norms in float64, by the parameters' names."""
    parts: dict[str, list[Tensor]] = {"layer0": [], "layer1": [], "outside_layers": []}
    for name, parameter in model.named_parameters():
        layer = next((layer for layer, start in PLACES.items() if name.startswith(start)), "outside_layers")
        value = parameter.grad if gradients else parameter
        assert value is not None
        parts[layer].append(value.detach())
    return {layer: explicit_norm(*tensors) for layer, tensors in parts.items()}


def norms_of(record: MonitorRecord | None, kind: str) -> dict[str, float]:
    assert record is not None
    found = {key.split("/")[1]: value for key, value in record.items() if key.endswith(f"/{kind}_norm")}
    found.pop(f"{kind}_norm", None)  # of the whole model
    return found


@pytest.mark.medium
@pytest.mark.parametrize("bound", [None, 0.05])
@pytest.mark.parametrize("several", [False, True])
def test_norms_by_layer_are_those_of_the_gradients_and_of_the_weights(bound: float | None, several: bool):
    """With the norm before clipping beside the step, layers are before clipping too."""
    model: Any = gpt(fused=True)
    halves = ([*model.blocks.parameters()], [p for n, p in model.named_parameters() if not n.startswith("blocks")])
    groups = halves if several else ([*model.parameters()],)
    optimizers = [torch.optim.SGD(group, lr=1e-2) for group in groups]
    monitor = Monitor(model, IDS, every=2, optimizer=optimizers, norms=True)
    for step in range(1, 5):
        F.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten()).backward()
        expected = by_layer(model, gradients=True)
        beside = {}
        if bound is not None:
            beside = {"gradient_norm": nn.utils.clip_grad_norm_(model.parameters(), bound)}
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        record = monitor(step, **beside)
        if step % 2:
            assert record is None
            continue
        assert norms_of(record, "gradient") == pytest.approx(expected, rel=1e-5)
        assert record["massieu/gradient_norm"] == pytest.approx(math.hypot(*expected.values()), rel=1e-5)
        assert norms_of(record, "weight") == pytest.approx(by_layer(model, gradients=False), rel=1e-5)
        assert record["massieu/weight_norm"] == pytest.approx(
            explicit_norm(*(p.detach() for p in model.parameters())), rel=1e-5
        )


def test_gradients_without_an_optimiser_are_those_that_are_left():
    model = gpt(fused=True)
    monitor = Monitor(model, IDS, every=1, norms=True)
    assert not norms_of(monitor(0), "gradient")
    model(IDS).square().mean().backward()
    assert norms_of(monitor(1), "gradient") == pytest.approx(by_layer(model, gradients=True), rel=1e-5)


@pytest.mark.medium
@every_row(
    ("name", "layers"),
    [
        ("albert", {"layer0", "outside_layers"}),  # one module in every layer
        (
            "bart",
            {f"{side}/layer{layer}" for side in ("encoder", "decoder") for layer in range(2)} | {"outside_layers"},
        ),
    ],
)
def test_every_weight_counts_once(name: str, layers: set[str]):
    model = zoo.fresh(name)
    record = Monitor(model, zoo.inputs(name), norms=True)(0)
    assert record is not None
    norms = {
        key.removeprefix("massieu/").rpartition("/")[0]: value
        for key, value in record.items()
        if key.endswith("/weight_norm")
    }
    whole = norms.pop("")
    assert {layer.removeprefix("model/") for layer in norms} == layers
    assert whole == pytest.approx(math.hypot(*norms.values()), rel=1e-6)
    assert whole == pytest.approx(explicit_norm(*(p.detach() for p in model.parameters())), rel=1e-6)


def planted() -> tuple[nn.TransformerEncoder, Tensor, Tensor]:
    """An encoder that normalises first, rows of tokens of which some are huge, and which tokens are padding."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    states = 0.01 * torch.randn(7, 10, 16)
    states[0, 3, 5] = 2000.0
    states[0, 4, 5] = -3000.0
    states[1, 2, 1] = 90.0  # too small
    states[2] += 10.0
    states[2, 6, 2] = 900.0  # not so much larger than the others of its row
    states[6, 9, 0] = 2000.0  # of a row whose spread is not measured
    padding = torch.zeros(7, 10, dtype=torch.bool)
    states[3, 8, 0] = 2000.0
    padding[3, 8:] = True
    return model, states, padding


def test_extreme_activations_are_the_share_of_real_tokens_beyond_100_and_1000_medians():
    model, states, padding = planted()
    batch = {"src": states, "src_key_padding_mask": padding}
    record = Monitor(model, batch, extreme_activations=True)(0)
    assert record is not None
    for layer in range(2):
        with torch.no_grad():
            states = model.layers[layer](states, src_key_padding_mask=padding)
        extreme = 0
        for row, real in zip(states.double().numpy(), ~padding.numpy(), strict=True):
            magnitudes = np.abs(row[real])
            beyond = (magnitudes > 100) & (magnitudes >= 1000 * np.median(magnitudes))
            extreme += beyond.any(1).sum()
        assert extreme == 3
        assert record[f"massieu/layer{layer}/extreme_activations"] == pytest.approx(extreme / 68)


def with_nan(model: Any) -> Any:
    with torch.no_grad():
        model.blocks[1].attention.qkv.bias[0] = math.nan  # a query of the first head
    return model


@pytest.mark.filterwarnings("ignore:massieu.Monitor")
def test_a_function_is_called_with_every_record_that_has_a_nan_after_it_was_written(tmp_path: Path):
    called: list[tuple[int, int]] = []
    path = tmp_path / "run.jsonl"
    model = gpt(fused=True)

    def stop(record: MonitorRecord) -> None:
        called.append((record.step, json.loads(path.read_text().splitlines()[-1])["step"]))

    monitor = Monitor(model, IDS, every=1, to=path, on_nan=stop)
    monitor(0, loss=2.0)
    assert not called
    monitor(1, loss=math.nan)
    with_nan(model)
    monitor(2, loss=2.0)
    assert called == [(1, 1), (2, 2)]


@pytest.mark.filterwarnings("ignore:massieu.Monitor")
def test_training_stops_with_what_is_not_finite_and_where(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    model = gpt(fused=True)
    monitor = Monitor(model, IDS, every=1, to=path, on_nan="raise")
    monitor(0, loss=2.0)
    with pytest.raises(FloatingPointError) as error:
        monitor(1, loss=math.inf)
    assert str(error.value) == "at step 1, not finite: massieu/loss"
    with_nan(model)
    with pytest.raises(FloatingPointError) as error:
        monitor(2, loss=2.0)
    assert str(error.value) == "at step 2, layer1 head 0 (blocks.1.attention) has NaN in its queries"
    assert len(path.read_text().splitlines()) == 4  # the header and three records


@every_row(
    ("options", "message"),
    [
        ({"on_nan": "stop"}, "on_nan must be a function or \"raise\", got 'stop'"),
        ({"norms": 1}, "norms must be True or False"),
        ({"extreme_activations": None}, "extreme_activations must be True or False"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str):
    with pytest.raises((InputError, TypeError), match=message):
        Monitor(gpt(fused=True), IDS, **options)
