"""Feed-forward layers: explicit Jacobians and regressions, and layers built to have a property or to lack it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor, nn

import massieu
from massieu.probing.statistics.feed_forward import REGISTER as FEED_FORWARD_REGISTER
from massieu.probing.statistics.feed_forward import FeedForwardStatistics, SampledTokens, _ridge

NAMES = tuple(FEED_FORWARD_REGISTER.functions)
WIDTH, LENGTH = 12, 40
IDS = torch.randint(1, 60, (8, LENGTH), generator=torch.Generator().manual_seed(0))
BATCHES = [{"input_ids": IDS[:4]}, {"input_ids": IDS[4:]}]


def model(kind: str) -> Any:
    from transformers import (
        BertConfig,
        BertModel,
        GPT2Config,
        GPT2Model,
        LlamaConfig,
        LlamaModel,
        Qwen3MoeConfig,
        Qwen3MoeModel,
    )

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    if kind == "llama":
        network: Any = LlamaModel(LlamaConfig(**sizes, vocab_size=60))
    elif kind == "bert":
        network = BertModel(BertConfig(**sizes, vocab_size=60))
    elif kind == "moe":
        config = Qwen3MoeConfig(
            **sizes, vocab_size=60, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, num_key_value_heads=2
        )
        network = Qwen3MoeModel(config)
    else:
        network = GPT2Model(GPT2Config(vocab_size=60, n_embd=WIDTH, n_layer=2, n_head=2, n_positions=LENGTH))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(std=0.4) if parameter.dim() == 2 else parameter.add_(0.2 * torch.randn_like(parameter))
    return network.eval()


def rows(result: Any, name: str) -> dict[int, tuple[float, float]]:
    table_rows = result.layers.filter(result.layers["statistic"] == name).rows(named=True)
    return {r["layer"]: (r["value"], r["standard_error"]) for r in table_rows}


def parts_of(network: Any, kind: str, layer: int) -> tuple[Any, Any]:
    """The norm in front and the layer behind it, as this architecture names them."""
    if kind == "llama":
        block = network.layers[layer]
        return block.post_attention_layernorm, block.mlp
    if kind == "gpt2":
        block = network.h[layer]
        return block.ln_2, block.mlp
    block = network.encoder.layer[layer]
    return nn.Identity(), lambda z: block.output.dense(block.intermediate(z))


def jacobian_norms(mlp: Any, points: Tensor) -> tuple[float, float]:
    """‖(J − Jᵀ)/2‖² and ‖J‖², summed over the points."""
    found: list[Any] = [
        torch.autograd.functional.jacobian(lambda z: mlp(z[None, None])[0, 0], point) for point in points
    ]
    jacobians = torch.stack(found).double()
    return float((jacobians - jacobians.mT).square().sum()) / 4, float(jacobians.square().sum())


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_numbers_are_the_explicit_ones(kind, monkeypatch):
    measured: list[FeedForwardStatistics] = []
    measure = FeedForwardStatistics.measure
    monkeypatch.setattr(
        FeedForwardStatistics, "measure", lambda self, fence: (measured.append(self), measure(self, fence))[1]
    )
    network = model(kind)
    result = massieu.probe(network, BATCHES, statistics=["feed_forward"])
    found = measured[-1]  # after those of the re-initialised models
    assert not found.failed and len(found.parts) == 2
    for layer, (_, tokens) in enumerate(sorted(found._tokens.items())):
        windows = [torch.from_numpy(tokens[number]) for number in sorted(tokens)]
        norm, mlp = parts_of(network, kind, layer)
        streams = torch.cat(windows)
        with torch.no_grad():
            added = mlp(norm(streams[None]))[0].double()
        x = streams.double()
        assert rows(result, "feed_forward_size")[layer][0] == pytest.approx(
            float(added.square().sum() / x.square().sum()), rel=1e-4
        )
        cosine = torch.cosine_similarity(added, x, dim=-1)
        assert rows(result, "feed_forward_cosine")[layer][0] == pytest.approx(float(cosine.mean()), abs=1e-5)
        points = torch.cat([norm(window[None])[0, :8] for window in windows]).detach()
        odd, whole = jacobian_norms(mlp, points)
        value, error = rows(result, "feed_forward_antisymmetric_share")[layer]
        # Two random directions at each of some points, in place of all: a stochastic trace.
        assert abs(value - odd / whole) < 5 * max(error, 0.02)
    assert {f"{name}/first_half" for name in NAMES} <= {*result.layers["statistic"]}


def test_ridge_is_the_penalised_solution_with_the_least_error_on_other_windows():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(60, 20, generator=generator, dtype=torch.float64)
    truth = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    clean, window = inputs @ truth, torch.arange(60) // 10 * 2 + 1
    torch.testing.assert_close(_ridge(inputs, clean, window), truth, rtol=1e-4, atol=1e-4)
    noisy = clean + 4 * torch.randn(60, 3, generator=generator, dtype=torch.float64)
    penalties = torch.logspace(-8, 4, 25, dtype=torch.float64) * inputs.square().sum() / 20

    def fitted(rows: Tensor, penalty: Tensor) -> Tensor:
        x, y = inputs[rows], noisy[rows]
        return torch.linalg.solve(x.mT @ x + penalty * torch.eye(20, dtype=torch.float64), x.mT @ y)

    def error(penalty: Tensor) -> float:
        halves = torch.arange(60) // 10 % 2 == 0, torch.arange(60) // 10 % 2 == 1
        return sum(float((noisy[b] - inputs[b] @ fitted(a, penalty)).square().sum()) for a, b in (halves, halves[::-1]))

    best = min(penalties, key=error)
    torch.testing.assert_close(_ridge(inputs, noisy, window), fitted(torch.ones(60, dtype=torch.bool), best))


def test_a_few_huge_tokens_do_not_make_a_map_that_is_worse_than_none():
    generator = torch.Generator().manual_seed(4)
    tokens = sampled(lambda x: torch.tanh(4 * x), width=60, windows=8)
    stream = tokens.stream.clone()
    updates = tokens.updates.clone()
    huge = torch.randperm(len(stream), generator=generator)[:6]
    stream[huge] *= 300
    updates[huge] *= 300
    with_huge = replace(tokens, stream=stream, inputs=stream, updates=updates)
    assert value("feed_forward_linear_share", with_huge) > -0.05


def sampled(function: Any, width: int = 10, windows: int = 12, tokens: int = 40) -> SampledTokens:
    generator = torch.Generator().manual_seed(1)
    stream = torch.randn(windows * tokens, width, generator=generator)
    window = torch.arange(windows).repeat_interleave(tokens)
    few = stream[::5]
    directions = torch.randn(few.shape, generator=generator)
    pushed = torch.func.jvp(function, (few,), (directions,))[1]
    pulled = torch.func.vjp(function, few)[1](directions)[0]
    updates = function(stream).detach()
    return SampledTokens(stream, stream, updates, window, pushed.detach(), pulled.detach(), window[::5])


def value(name: str, tokens: SampledTokens) -> float:
    total, count = FEED_FORWARD_REGISTER.functions[name](tokens)
    return float(total.sum() / count.sum())


def test_linear_layers_gradients_and_other_layers_differ_in_their_shares():
    generator = torch.Generator().manual_seed(2)
    matrix = torch.randn(10, 10, generator=generator)
    patterns = 2 * torch.randn(30, 10, generator=generator)
    linear = sampled(lambda x: x @ matrix.mT + 1)
    gradient = sampled(lambda x: torch.tanh(x @ patterns.mT) @ patterns)  # tied: the gradient of Σ log cosh
    assert value("feed_forward_linear_share", linear) == pytest.approx(1, abs=1e-4)
    assert value("feed_forward_linear_share", gradient) < 0.99
    assert value("feed_forward_antisymmetric_share", gradient) < 1e-6
    rotation = sampled(lambda x: x @ (matrix - matrix.mT))
    assert value("feed_forward_antisymmetric_share", rotation) == pytest.approx(1, abs=1e-5)
    assert value("feed_forward_antisymmetric_share", linear) == pytest.approx(
        float((matrix - matrix.mT).square().sum() / 4 / matrix.square().sum()), abs=0.05
    )
    shrinking = sampled(lambda x: -0.3 * x)
    assert value("feed_forward_size", shrinking) == pytest.approx(0.09, rel=1e-5)
    assert value("feed_forward_cosine", shrinking) == pytest.approx(-1, abs=1e-6)


def test_noise_has_no_linear_share():
    """Held out, so that a regression on as many tokens as directions does not explain what it was fitted to."""
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(480, 10, generator=generator)
    tokens = sampled(lambda x: x)
    assert abs(value("feed_forward_linear_share", replace(tokens, updates=noise))) < 0.05


@pytest.fixture(scope="module")
def probed() -> massieu.ProbeResult:
    """What is measured of a GPT-2 in two batches."""
    return massieu.probe(model("gpt2"), BATCHES, statistics=["feed_forward", "expansion"])


@pytest.mark.medium
def test_the_control_is_another_tokens_update(probed):
    result = probed
    share, control = (rows(result, f"feed_forward_linear_share{suffix}") for suffix in ("", "/shuffled_tokens"))
    for layer in (0, 1):
        assert share[layer][0] > 0.3 > control[layer][0]
    assert not rows(result, "feed_forward_size/shuffled_tokens")


def test_sublayers_are_tested_with_false_discovery_control_over_a_question(probed):
    name = probed.layers["statistic"]
    for family in ("feed_forward", "effective_rank_change"):
        p, q = (
            probed.layers.filter(name.str.starts_with(family) & name.str.ends_with(part))["value"].to_numpy()
            for part in ("/p_value", "/q_value")
        )
        assert len(p) >= 2
        np.testing.assert_allclose(q, scipy.stats.false_discovery_control(p), rtol=1e-9)
    assert "feed_forward_size/q_value" not in {*probed.layers["statistic"]}


@pytest.mark.medium
def test_batches_change_nothing(probed):
    other = massieu.probe(model("gpt2"), [{"input_ids": IDS}], statistics=["feed_forward", "expansion"])
    np.testing.assert_allclose(
        probed.layers["value"].to_numpy(), other.layers["value"].to_numpy(), rtol=1e-3, atol=1e-5
    )
    assert probed.layers["statistic"].to_list() == other.layers["statistic"].to_list()


class Mixing(nn.Module):
    """Its second step adds to each token what the others are."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.mixing = Average()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), self.norm(x), self.norm(x))[0]
        return x + self.mixing(x)


class Average(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True).expand_as(x)


@pytest.mark.medium
def test_a_layer_that_mixes_tokens_and_experts():
    """A layer of experts has numbers or says why not; one that mixes tokens is none."""
    result = massieu.probe(Mixing().eval(), [torch.randn(4, 6, 8)], statistics=["feed_forward", "entropy"])
    assert not rows(result, "feed_forward_size")
    (reason,) = (each.reason for each in result.run.unavailable if each.statistic == "feed_forward")
    assert reason == "no feed-forward layer was seen on the way of the stream"
    result = massieu.probe(model("moe"), BATCHES[:1], statistics=["feed_forward", "entropy"])
    reasons = [each.reason for each in result.run.unavailable if each.statistic == "feed_forward"]
    assert rows(result, "feed_forward_size") or reasons
    assert len(result.heads)


@pytest.mark.medium
def test_it_is_opt_in():
    assert not {*NAMES} & {*massieu.probe(model("bert"), [{"input_ids": IDS[:1, :8]}]).layers["statistic"]}


@pytest.mark.medium
def test_layers_whose_items_and_tokens_are_one_dimension_have_a_reason_in_words():
    from transformers import OPTConfig, OPTModel

    torch.manual_seed(0)
    config = OPTConfig(
        hidden_size=WIDTH,
        word_embed_proj_dim=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=24,
        vocab_size=60,
    )
    result = massieu.probe(OPTModel(config).eval(), BATCHES, statistics=["entropy", "feed_forward"], draws=0)
    reasons = {each.statistic: each.reason for each in result.run.unavailable}
    assert reasons == {"feed_forward": "items and tokens are one dimension where feed-forward layers add to the stream"}
