"""Regressions from inner products against least squares on the vectors themselves, and the groups that are made of them."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.support.probing.groups import begun, rows_at
from torch import Tensor
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model

import massieu
from massieu.probing.statistics import regressions
from massieu.probing.statistics.regressions import Regressions, coefficient, explained, gain, random_like
from massieu.probing.statistics.residual import REGISTER as RESIDUAL_REGISTER
from massieu.probing.statistics.residual import (
    ResidualGroup,
    update_gradient_gain,
    update_stream_coefficient,
    update_stream_share,
)
from massieu.probing.statistics.tap import REGISTER as TAP_REGISTER
from massieu.probing.statistics.tap import TapGroup, reaction_coefficient, reaction_gain
from massieu.probing.sums.units import Units

WINDOWS, TOKENS, WIDTH = 6, 7, 5
IDS = torch.randint(1, 40, (8, 24), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[2, 16:] = 0


def vectors(seed: int = 0, count: int = 3) -> Tensor:
    """Of each window: (windows, vectors, tokens, width)."""
    return torch.randn(
        WINDOWS, count, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def products(tokens: Tensor) -> np.ndarray:
    flat = tokens.flatten(2)
    return (flat @ flat.mT).numpy()


def explicit_share(tokens: Tensor, target: int, features: list[int]) -> np.ndarray:
    flat = tokens.flatten(2).numpy()
    shares = np.zeros(WINDOWS)
    for half in (0, 1):
        fitted = np.concatenate(list(flat[1 - half :: 2]), 1)
        slope = np.linalg.lstsq(fitted[features].T, fitted[target], rcond=None)[0]
        for place in range(half, WINDOWS, 2):
            missed = flat[place, target] - slope @ flat[place, features]
            shares[place] = (flat[place, target] ** 2).sum() - (missed**2).sum()
    return shares


def test_shares_are_those_of_least_squares_on_the_other_windows():
    tokens = vectors()
    tokens[:, 0] += 2 * tokens[:, 1] - tokens[:, 2]
    for features in ([1], [1, 2]):
        shares, whole = explained(products(tokens), 0, features)
        np.testing.assert_allclose(shares, explicit_share(tokens, 0, features), rtol=1e-9)
        np.testing.assert_allclose(whole, tokens[:, 0].square().sum((1, 2)).numpy())
    shares, _ = gain(products(tokens), 0, [1], 2)
    np.testing.assert_allclose(shares, explicit_share(tokens, 0, [1, 2]) - explicit_share(tokens, 0, [1]), rtol=1e-8)


def test_a_coefficient_is_that_of_all_tokens_together():
    tokens = vectors()
    tokens[:, 0] += 2 * tokens[:, 1] - tokens[:, 2]
    flat = np.concatenate(list(tokens.flatten(2).numpy()), 1)
    slope = np.linalg.lstsq(flat[1:].T, flat[0], rcond=None)[0]
    for feature, others in ((1, [2]), (2, [1])):
        total, count = coefficient(products(tokens), 0, feature, others)
        assert total.sum() / count.sum() == pytest.approx(slope[feature - 1], rel=1e-9)


def test_windows_that_lean_against_the_rest_have_no_negative_weight():
    tokens = vectors()
    for window, lean in zip(tokens, torch.linspace(-3, 3, len(tokens)).tolist(), strict=True):
        window[2] = lean * window[1] + 0.01 * window[2]
    flat = np.concatenate(list(tokens.flatten(2).numpy()), 1)
    slope = np.linalg.lstsq(flat[1:].T, flat[0], rcond=None)[0]
    total, count = coefficient(products(tokens), 0, 1, [2])
    assert (count >= 0).all() and total.sum() / count.sum() == pytest.approx(slope[0], rel=1e-6)


def test_one_window_has_no_share_and_equal_features_are_no_trouble():
    inner_products = products(vectors())
    assert np.isnan(explained(inner_products[:1], 0, [1])[0]).all()
    twice = vectors()
    twice[:, 2] = twice[:, 1]
    (with_both, _), (with_one, _) = explained(products(twice), 0, [1, 2]), explained(products(twice), 0, [1])
    np.testing.assert_allclose(with_both, with_one, rtol=1e-6)


@pytest.mark.parametrize("weight", [-0.3, 0.0])
def test_a_quadratic_term_is_found_and_no_other(weight):
    group, drawn = begun(ResidualGroup, Units(), 0), torch.Generator().manual_seed(1)
    for number in range(16):
        stream, along, noise = torch.randn(3, 40, 32, generator=drawn)
        update = weight * stream + 0.5 * along + noise
        other = update, random_like(stream, drawn), random_like(along, drawn)
        group.regressions.collect(0, number, (update, stream, along), other)
    group.finish()
    numbers = rows_at(group, 0)
    for name, expected in (
        ("update_stream_coefficient", weight),
        ("update_stream_coefficient/random", 0.0),
        ("update_stream_share", weight**2 / (weight**2 + 1.25)),
        ("update_gradient_gain", 0.25 / (weight**2 + 1.25)),
        ("update_gradient_gain/random", 0.0),
    ):
        value, error, tokens = numbers[name]
        assert abs(value - expected) < 5 * error + 1e-4 and 0 < error < 0.05 and tokens == 640


def test_tokens_that_are_not_finite_are_left_out_and_sums_can_be_stored_and_merged():
    tokens = vectors(count=3)
    broken = tokens.clone()
    broken[1, 2, 3, 0] = torch.nan
    whole, *parts, again = (begun(ResidualGroup, Units(), 4) for _ in range(4))
    for number, each in enumerate(broken):
        for group in (whole, parts[number % 2]):
            group.regressions.collect(4, number, list(each), list(each))
    finite_tokens = torch.cat([broken[1, :, :3], broken[1, :, 4:]], 1).flatten(1)
    np.testing.assert_allclose(whole.regressions._products[4][1][0], (finite_tokens @ finite_tokens.mT).numpy())
    again.restore(parts[0].state())
    again.merge(parts[1])
    for group in (whole, again):
        group.finish()
    assert rows_at(whole, 4) and rows_at(whole, 4) == rows_at(again, 4)
    halves = [row for row in whole.rows() if row.part == "first_half"]
    assert halves[0].estimate.count[0] == whole.regressions.tokens[4] / 2


def test_random_directions_are_as_long():
    originals = torch.randn(5, 9)
    drawn = random_like(originals, torch.Generator().manual_seed(0))
    torch.testing.assert_close(drawn.norm(dim=1), originals.norm(dim=1))


def model(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "gpt2":
        network: Any = GPT2Model(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=40, n_positions=32))
    else:
        sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        network = BertModel(BertConfig(**sizes, intermediate_size=24, vocab_size=40))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(6) if parameter.dim() == 2 else None
    return network.eval()


def probed(network: Any, group: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[int, list[Any]]]:
    """The result, and by sublayer what was collected: (positions are those of the first sampled windows, in order)."""
    collected: dict[int, list[Any]] = {}
    collect = Regressions.collect

    def take(self: Regressions, index: int, number: int | None, own: Any, control: Any) -> None:
        collected.setdefault(index, []).append((number, own, control))
        collect(self, index, number, own, control)

    monkeypatch.setattr(regressions.Regressions, "collect", take)
    batches = [{"input_ids": IDS, "attention_mask": MASK}]
    return massieu.probe(network, batches, statistics=[group]), collected


def log_partition(network: Any, kind: str, layer: int, stream: Tensor, keys_from: Tensor, row: int) -> Tensor:
    """Σ over heads and positions of log Z, written from the module's weights; keys are those of ``keys_from``."""
    if kind == "gpt2":
        block = network.h[layer]
        weight, bias = block.attn.c_attn.weight, block.attn.c_attn.bias
        queries = (block.ln_1(stream) @ weight + bias)[..., :16]
        keys = (block.ln_1(keys_from) @ weight + bias)[..., 16:32]
    else:
        block = network.encoder.layer[layer].attention.self
        queries, keys = block.query(stream), block.key(keys_from)
    queries, keys = (part.unflatten(-1, (2, 8)).transpose(0, 1) for part in (queries, keys))
    scores = queries @ keys.mT / 8**0.5
    visible = MASK[row].bool()[None].expand(24, 24)
    if kind == "gpt2":
        visible = visible & torch.ones(24, 24, dtype=torch.bool).tril()
    return scores.masked_fill(~visible, -torch.inf).logsumexp(-1)[:, MASK[row].bool()].sum()


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_stream_update_and_gradient_are_the_explicit_ones(kind, monkeypatch):
    network = model(kind)
    result, collected = probed(network, "residual", monkeypatch)
    blocks = network.h if kind == "gpt2" else [layer.attention for layer in network.encoder.layer]
    written = [block.attn.c_proj if kind == "gpt2" else block.output.dense for block in blocks]
    streams: dict[int, Tensor] = {}
    updates: dict[int, Tensor] = {}
    for layer, (block, projection) in enumerate(zip(blocks, written, strict=True)):
        block.register_forward_pre_hook(lambda _, given, layer=layer: streams.update({layer: given[0]}))
        projection.register_forward_hook(lambda _, __, output, layer=layer: updates.update({layer: output}))
    with torch.no_grad():
        network(input_ids=IDS, attention_mask=MASK)
    assert len(collected) == 2
    for layer, (_, windows) in enumerate(sorted(collected.items())):
        for row, (number, model_vectors, _) in zip((0, 1, 2, 3), windows, strict=False):
            stream = streams[layer][row].detach().clone().requires_grad_()
            value = log_partition(network, kind, layer, stream, streams[layer][row].detach(), row)
            slope = torch.autograd.grad(value, stream)[0]
            real = MASK[row].bool()
            assert number == row and len(model_vectors[0]) == int(real.sum())
            for vectors_of_row, expected in zip(
                model_vectors, (updates[layer][row], streams[layer][row], slope), strict=True
            ):
                torch.testing.assert_close(vectors_of_row.float(), expected[real].detach(), rtol=1e-3, atol=1e-4)
    names = set(RESIDUAL_REGISTER.functions)
    assert names <= {*result.layers["statistic"]} and {f"{n}/random" for n in names} <= {*result.layers["statistic"]}
    assert {f"{name}/q_value" for name in names} <= {*result.layers["statistic"]}


@pytest.mark.slow
def test_a_layer_that_steps_along_its_gradient_is_found_and_a_random_one_is_not(monkeypatch):
    tied, free = model("bert"), model("bert")
    with torch.no_grad():
        for layer in tied.encoder.layer:
            attention, out = layer.attention.self, layer.attention.output.dense
            attention.value.weight.copy_(attention.key.weight)
            attention.value.bias.copy_(attention.key.bias)
            out.weight.copy_(attention.query.weight.T / 8**0.5)
            out.bias.zero_()
    for network, is_gradient in ((tied, True), (free, False)):
        result, _ = probed(network, "residual", monkeypatch)
        rows = result.layers.filter(result.layers["statistic"] == "update_gradient_gain")
        share = result.layers.filter(result.layers["statistic"] == "update_stream_share")["value"]
        total = np.array(rows["value"].to_list()) + np.array(share.to_list())
        assert (total > 0.999).all() if is_gradient else (np.array(rows["value"].to_list()) < 0.5).all()
        if is_gradient:
            names = result.layers["statistic"] == "update_stream_coefficient"
            np.testing.assert_allclose(result.layers.filter(names)["value"].to_numpy(), 0, atol=1e-3)


def test_the_reaction_is_the_square_of_the_heads_mean_weights(monkeypatch):
    network = model("gpt2")
    result, collected = probed(network, "tap", monkeypatch)
    eager = GPT2Model(network.config)
    eager.load_state_dict(network.state_dict())
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        weights = eager.eval()(input_ids=IDS, attention_mask=MASK, output_attentions=True).attentions
    for layer, (_, windows) in enumerate(sorted(collected.items())):
        for row, (_, model_vectors, control) in enumerate(windows[:4]):
            squares = weights[layer][row].mean(0).square().sum(-1)[MASK[row].bool()].double()
            update, stream, reaction = model_vectors
            torch.testing.assert_close(reaction, stream * squares[:, None], rtol=1e-4, atol=1e-5)
            factor = (control[2] / stream)[:, 0]
            torch.testing.assert_close(factor.sort().values, squares.sort().values, rtol=1e-4, atol=1e-5)
            assert update.shape == stream.shape
    assert {*TAP_REGISTER.functions} <= {*result.layers["statistic"]}


@pytest.mark.parametrize("weight", [-3.0, 0.0])
def test_a_reaction_is_found_where_there_is_one(weight):
    group, drawn = begun(TapGroup, Units(), 0), torch.Generator().manual_seed(1)
    for number in range(16):
        stream, noise = torch.randn(2, 40, 32, generator=drawn)
        squares = torch.rand(40, 1, generator=drawn)
        update = 0.2 * stream + weight * stream * squares + noise
        other = squares[torch.randperm(40, generator=drawn)]
        model_vectors = update, stream, stream * squares
        group.regressions.collect(0, number, model_vectors, (update, stream, stream * other))
    group.finish()
    numbers = rows_at(group, 0)
    value, error, *_ = numbers["reaction_coefficient"]
    assert abs(value - weight) < 5 * error
    (model_vectors, own_error, *_), (null, null_error, *_) = (
        numbers["reaction_gain"],
        numbers["reaction_gain/permuted_couplings"],
    )
    assert (model_vectors - null > 5 * np.hypot(own_error, null_error)) == (weight != 0)
    assert abs(null) < 5 * null_error + 1e-3


@pytest.mark.slow
def test_batches_change_nothing():
    whole = [{"input_ids": IDS[:4], "attention_mask": MASK[:4]}]
    apart = [{"input_ids": IDS[i : i + 2], "attention_mask": MASK[i : i + 2]} for i in (0, 2)]
    groups = ["residual", "tap", "flow"]
    one, other = (massieu.probe(model("gpt2"), data, statistics=groups).layers for data in (whole, apart))
    assert one["statistic"].to_list() == other["statistic"].to_list()
    np.testing.assert_allclose(one["value"].to_numpy(), other["value"].to_numpy(), rtol=1e-2, atol=1e-3)


def test_functions_are_those_that_are_registered():
    assert list(RESIDUAL_REGISTER.functions.values()) == [
        update_stream_coefficient,
        update_stream_share,
        update_gradient_gain,
    ]
    assert list(TAP_REGISTER.functions.values())[:2] == [reaction_gain, reaction_coefficient]
