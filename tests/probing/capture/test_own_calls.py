"""Massieu's own attention is seen by the probe and the monitor: every strategy, layer and option, beside explicit matrices.

Expected weights are formed in float64 from the modules' parameters by the formulas alone, never from what was captured.
"""

import math
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import massieu
from massieu import measures, ops, regression, solve
from massieu import nn as own
from massieu.errors import InputError
from massieu.nn.strategy import Heads, HeadsResult, Request
from massieu.probing.capture.attention_call import AttentionCall, explicit_attention
from massieu.probing.capture.routes import capturing

BATCH, LENGTH, WIDTH, HEADS = 2, 5, 8, 2
SIZE = WIDTH // HEADS
SCALE = SIZE**-0.5
ROUNDING = 1e4 * torch.finfo(torch.float64).eps  # hundreds of operations on numbers of order 1, and well-posed systems
SOLVED = 1e-7  # of fixed points: the residual is 1e-10 of the state, and contraction by a half or less doubles it
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
OTHERS = ~torch.eye(LENGTH, dtype=torch.bool)


def tokens(seed: int = 0, length: int = LENGTH) -> Tensor:
    return torch.randn(BATCH, length, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def masked(scores: Tensor, seen: Tensor) -> Tensor:
    return scores.masked_fill(~seen, -torch.inf)


@dataclass
class Expected:
    """What is expected of one call: the shares of keys, and the output; by the formulas."""

    shares: Tensor
    output: Tensor
    grade: str = "full"
    distribution: bool = True


# Strategies of nn.Attention ------------------------------------------------------------------------------------------------


def by_softmax(scores: Tensor, v: Tensor, **_) -> Expected:
    return Expected(scores.softmax(-1), scores.softmax(-1) @ v)


def of(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Expected]:
    """Softmax of other scores."""

    def expected(q: Tensor, k: Tensor, v: Tensor, heads: nn.Module) -> Expected:
        return by_softmax(function(q, k, SCALE * q @ k.mT), v)

    return expected


def by_cosines(q: Tensor, k: Tensor, v: Tensor, heads: nn.Module) -> Expected:
    cosine = torch.cosine_similarity(q.unsqueeze(-2), k.unsqueeze(-3), dim=-1)
    return by_softmax(heads.log_scale.exp()[:, None, None] * cosine, v)


def with_sink(value: Tensor | None) -> Callable[..., Expected]:
    def expected(q: Tensor, k: Tensor, v: Tensor, heads: nn.Module) -> Expected:
        scores = SCALE * q @ k.mT
        level = torch.as_tensor(heads.sink, dtype=q.dtype).reshape(-1, 1, 1)
        total = scores.exp().sum(-1, keepdim=True) + level.exp()
        output = scores.exp() / total @ v
        if value is not None:
            output = output + level.exp() / total * value.unsqueeze(-2)
        return Expected(scores.softmax(-1), output)  # the statistics are of the keys, the sink left out

    return expected


def by_entmax(alpha: float) -> Callable[..., Expected]:
    """By bisection of the threshold."""

    def expected(q: Tensor, k: Tensor, v: Tensor, heads: nn.Module) -> Expected:
        scaled = (alpha - 1) * SCALE * q @ k.mT
        low, high = scaled.amax(-1, keepdim=True) - 1, scaled.amax(-1, keepdim=True)
        for _ in range(80):
            middle = (low + high) / 2
            above = (scaled - middle).clamp_min(0).pow(1 / (alpha - 1)).sum(-1, keepdim=True) > 1
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        weights = (scaled - low).clamp_min(0).pow(1 / (alpha - 1))
        return Expected(weights, weights @ v, "scores")

    return expected


def by_weights(weights: Tensor, v: Tensor) -> Expected:
    """Weights of any sign and sum."""
    return Expected(weights.abs() / weights.abs().sum(-1, keepdim=True), weights @ v, "scores", distribution=False)


def by_normalised(q: Tensor, k: Tensor, v: Tensor, heads: nn.Module) -> Expected:
    scores = SCALE * q @ k.mT
    deviation = (scores.var(-1, correction=0, keepdim=True) + heads.eps).sqrt()
    return by_weights(((scores - scores.mean(-1, keepdim=True)) / deviation + 1) / LENGTH, v)


def by_logistic(q: Tensor, k: Tensor, v: Tensor, heads: nn.Module) -> Expected:
    return by_weights(torch.sigmoid(SCALE * q @ k.mT - math.log(LENGTH)), v)


def by_positive_part(q: Tensor, k: Tensor, v: Tensor, heads: nn.Module) -> Expected:
    weights = torch.relu(q @ k.mT)
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)
    return Expected(weights, weights @ v, "scores")


def by_ridge(q: Tensor, k: Tensor, v: Tensor, heads: nn.Module) -> Expected:
    gram = k @ k.mT + torch.eye(LENGTH, dtype=k.dtype)
    return by_weights(torch.linalg.solve(gram, k @ q.mT).mT, v)


def at_rest(q: Tensor, k: Tensor, v: Tensor, heads: nn.Module) -> Expected:
    point = q
    for _ in range(400):
        point = (q + (SCALE * point @ k.mT).softmax(-1) @ k) / 2
    return by_softmax(SCALE * point @ k.mT, k)


def of_spins(q: Tensor, k: Tensor, v: Tensor, heads: nn.Module) -> Expected:
    """θ = x + J m − m J²(1 − m²), damped."""
    shares, mean = masked(SCALE * q @ k.mT, OTHERS).softmax(-1), torch.zeros_like(v)
    coupling = shares / 2
    for _ in range(400):
        field = v + coupling @ mean - mean * (coupling.square() @ (1 - mean.square()))
        mean = (mean + field.tanh()) / 2
    return Expected(shares, shares @ mean)


def by_features(q: Tensor, k: Tensor, v: Tensor, heads: nn.Module) -> Expected:
    omega, (q, k) = heads.directions, (each * SCALE**0.5 for each in (q, k))
    of_query, of_key = ((x @ omega.mT - x.square().sum(-1, keepdim=True) / 2).exp() for x in (q, k))
    weights = of_query @ of_key.mT
    weights = weights / weights.sum(-1, keepdim=True)
    return Expected(weights, weights @ v, "scores")


SINKS, VALUE = torch.tensor([0.3, -1.0]), torch.linspace(-1, 1, HEADS * SIZE, dtype=torch.float64).view(HEADS, SIZE)
SCALES = torch.tensor([0.4, 0.9], dtype=torch.float64)
NEAR = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs() <= 1

STRATEGIES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Expected], float]] = {
    "softmax": (own.SoftmaxHeads, of(lambda q, k, s: s), ROUNDING),
    "softcap": (lambda: own.SoftmaxHeads(softcap=0.5), of(lambda q, k, s: 0.5 * (s / 0.5).tanh()), ROUNDING),
    "window": (lambda: own.SoftmaxHeads(window=1), of(lambda q, k, s: masked(s, NEAR)), ROUNDING),
    "scales": (
        lambda: own.SoftmaxHeads(scale=nn.Parameter(SCALES)),
        of(lambda q, k, s: s / SCALE * SCALES[:, None, None]),
        ROUNDING,
    ),
    "sink": (lambda: own.SoftmaxHeads(sink=nn.Parameter(SINKS)), with_sink(None), ROUNDING),
    "sink with a value": (lambda: own.SoftmaxHeads(sink=0.5, sink_value=VALUE), with_sink(VALUE), ROUNDING),
    "squared distances": (
        lambda: own.DualLinkHeads("gaussian"),
        of(lambda q, k, s: -SCALE / 2 * (q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1)),
        ROUNDING,
    ),
    "directions": (
        own.CosineHeads,
        by_cosines,
        ROUNDING,
    ),
    "linked keys": (
        lambda: own.DualLinkHeads("spin", divergence=False),
        of(lambda q, k, s: SCALE * q @ k.tanh().mT),
        ROUNDING,
    ),
    "atoms": (lambda: own.MeasureHeads(measures.Atoms.create), of(lambda q, k, s: s), ROUNDING),
    "entmax": (lambda: own.EntmaxHeads(alpha=1.5), by_entmax(1.5), ROUNDING),
    "sparsemax": (lambda: own.EntmaxHeads(alpha=2.0), by_entmax(2.0), ROUNDING),
    "ReLU": (own.ReLUHeads, by_positive_part, ROUNDING),
    "random features": (lambda: own.RandomFeatureHeads(features=16), by_features, ROUNDING),
    "normalised": (own.NormalizedHeads, by_normalised, ROUNDING),
    "logistic": (own.SigmoidHeads, by_logistic, ROUNDING),
    "conditional mean": (lambda: own.ConditionalMeanHeads(kernel="linear"), by_ridge, ROUNDING),
    "implicit": (own.ImplicitHeads, at_rest, SOLVED),
    "TAP": (own.TAPHeads, of_spins, SOLVED),
}


NAMES = [pytest.param(name, marks=pytest.mark.medium) if name in ("implicit", "TAP") else name for name in STRATEGIES]


class Layer(nn.Module):
    """Attention behind a norm, on a residual stream."""

    def __init__(self, heads: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = own.Attention(WIDTH, HEADS, batch_first=True, heads=heads)
        nn.init.normal_(self.attention.in_proj_bias)

    def forward(self, x: Tensor, need_weights: bool = False) -> Tensor:
        return x + self.attention(self.norm(x), need_weights=need_weights)[0]

    def heads_of(self, x: Tensor) -> list[Tensor]:
        """Queries, keys and values, (B, H, L, D), from the parameters; of two projections, values are keys."""
        attention, state = self.attention, self.norm(x)
        count = len(attention.in_proj_bias) // WIDTH
        weights, biases = attention.in_proj_weight.chunk(count), attention.in_proj_bias.chunk(count)
        heads = [
            (state @ weight.mT + bias).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
            for weight, bias in zip(weights, biases, strict=True)
        ]
        return heads if count == 3 else [*heads, heads[1]]


def seen(module: nn.Module, *inputs: Tensor, **options) -> tuple[list[AttentionCall], Tensor]:
    """The module's calls; its output is what it is without a capture, bit for bit."""
    module.eval()
    calls: list[AttentionCall] = []
    with torch.no_grad():
        unread = module(*inputs, **options)
        with capturing(module, calls.append) as capture:
            read = module(*inputs, **options)
    assert torch.equal(unread, read)
    assert not capture.refused
    return calls, read


def shares_of(call: AttentionCall) -> Tensor:
    """The shares of keys that statistics are computed from."""
    scores, weight = explicit_attention(call, torch.float64)
    return (scores + weight).softmax(-1).nan_to_num()


def close(found: Tensor, expected: Tensor, error: float) -> bool:
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=error, atol=error)


@pytest.mark.parametrize("name", NAMES)
def test_each_strategy_gives_its_weights(name: str) -> None:
    make, formula, error = STRATEGIES[name]
    layer, x = Layer(make()).double(), tokens()
    (call,), _ = seen(layer, x)
    with torch.no_grad():
        expected = formula(*layer.heads_of(x), layer.attention.heads)
    assert (call.site.name, call.route, call.grade) == ("attention", "ops", expected.grade)
    assert call.no_distribution is not expected.distribution
    assert close(shares_of(call), expected.shares, error)
    assert close(call.output.transpose(1, 2), expected.output, error)


@pytest.mark.parametrize("name", NAMES)
def test_each_strategy_is_monitored(name: str) -> None:
    make, formula, error = STRATEGIES[name]
    layer, x = Layer(make()).double(), tokens()
    with torch.no_grad():
        shares = formula(*layer.heads_of(x), layer.attention.heads).shares
    attends = shares.sum(-1) > 0  # as the positive part of scores may not
    entropies = torch.special.entr(shares).sum(-1).sum((0, 2)) / attends.sum((0, 2))
    record = quiet_monitor(layer, x)(0)
    assert record is not None
    found = [record[f"massieu/layer0/head{head}/entropy"] for head in range(HEADS)]
    # Moments are formed in the model's precision; those of sixteen numbers of order 1.
    assert close(torch.tensor(found, dtype=torch.float64), entropies, max(error, 1e-6))


def quiet_monitor(model: nn.Module, batch: object) -> massieu.Monitor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return massieu.Monitor(model, batch, every=1, per_head=True)


@pytest.mark.parametrize("name", NAMES)
def test_each_strategy_is_replaced(name: str) -> None:
    layer, x = Layer(STRATEGIES[name][0]()).double().eval(), tokens()
    with torch.no_grad():
        expected = layer(x)
        with massieu.replaced(layer, "identity"):
            assert torch.equal(layer(x), expected)
        with massieu.replaced(layer, lambda call: call.output.clone()):
            assert torch.equal(layer(x), expected)
        with massieu.replaced(layer, lambda call: call.output.clone(), sites={"attention": [1]}):
            assert torch.equal(layer(x), expected)
        with massieu.replaced(layer, "off"):
            off = layer(x)
    assert not torch.allclose(off, expected, atol=1e-3)
    if name not in ("implicit", "TAP"):
        assert close(off, x + layer.attention.out_proj.bias, ROUNDING)


class Masked(Layer):
    """The same, causal or with padding."""

    def __init__(self, heads: nn.Module, **masks: Tensor | bool) -> None:
        super().__init__(heads)
        self.masks = masks

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x), need_weights=False, **self.masks)[0]


PADDING = torch.tensor([[False] * LENGTH, [False, False, False, True, True]])


@pytest.mark.parametrize("masks", [{"is_causal": True}, {"key_padding_mask": PADDING}], ids=["causal", "padding"])
@pytest.mark.parametrize("name", NAMES)
def test_masks_of_each_strategy_are_read(name: str, masks: dict[str, Tensor | bool]) -> None:
    if name == "atoms" and "is_causal" in masks:
        return  # a measure's weights are those of keys, one for all queries
    layer, x = Masked(STRATEGIES[name][0](), **masks).double(), tokens()
    (call,), _ = seen(layer, x)
    expected = CAUSAL[None] if "is_causal" in masks else ~PADDING[:, None]
    if name == "TAP":
        expected = expected & OTHERS
    if name == "window":
        expected = expected & NEAR
    shares, visible = shares_of(call), call.visible().expand(BATCH, HEADS, LENGTH, LENGTH)
    expected = expected[:, None].expand_as(visible)
    attends = shares.sum(-1, keepdim=True) > 0  # as the positive part of scores may not
    assert torch.equal(visible, expected & attends if name == "ReLU" else expected)
    assert not bool(shares[~expected].any())
    record = quiet_monitor(layer, x)(0)  # which holds recomputed attention against the module's
    assert record is not None


@pytest.mark.parametrize(("name", "alone"), [("implicit", lambda q, v: q / 2), ("TAP", None)])
def test_attention_at_a_fixed_point_enters_one_more_step(name: str, alone: Callable[..., Tensor] | None) -> None:
    layer, x = Layer(STRATEGIES[name][0]()).double().eval(), tokens()
    with torch.no_grad():
        q, k, v = layer.heads_of(x)
        if alone is None:
            coupling, mean = masked(SCALE * q @ k.mT, OTHERS).softmax(-1) / 2, torch.zeros_like(v)
            for _ in range(400):
                echo = mean * (coupling.square() @ (1 - mean.square()))
                mean = (mean + (v + coupling @ mean - echo).tanh()) / 2
            heads = (v - echo).tanh()
        else:
            heads = alone(q, v)
        with massieu.replaced(layer, "off"):
            found = layer(x)
        expected = x + layer.attention.out_proj(heads.transpose(1, 2).flatten(2))
    assert close(found, expected, SOLVED)


@pytest.mark.parametrize("name", ["normalised", "logistic", "conditional mean"])
def test_rules_that_average_values_name_weights_that_are_no_distribution(name: str) -> None:
    layer = Layer(STRATEGIES[name][0]()).double().eval()
    with torch.no_grad(), massieu.replaced(layer, "top_k(2)"), pytest.raises(InputError, match="do not add up to 1"):
        layer(tokens())


def test_a_key_of_weight_zero_is_visible_all_the_same() -> None:
    layer, x = Layer(own.EntmaxHeads(alpha=2.0)).double(), 10 * tokens()
    (call,), _ = seen(layer, x)
    assert bool((shares_of(call) == 0).any())
    assert bool(call.visible().all())


def test_weights_that_are_asked_for_change_nothing_that_is_seen() -> None:
    layer, x = Layer(own.SoftmaxHeads(softcap=2.0, sink=0.1, sink_value=VALUE)).double(), tokens()
    (call,), _ = seen(layer, x)
    (other,), _ = seen(layer, x, need_weights=True)
    assert torch.equal(call.query, other.query)
    assert close(other.output, call.output, ROUNDING)
    assert close(shares_of(other), shares_of(call), ROUNDING)


def test_a_measure_without_weights_is_refused_by_name() -> None:
    heads = own.MeasureHeads(lambda points, weight: measures.Gaussian.create(points.mean(-2), 1.0))
    with pytest.raises(InputError, match="its MeasureHeads take the mean of a Gaussian, which has no weights"):
        massieu.Monitor(Layer(heads), tokens().float())


class Uniform(Heads):
    """A strategy of a user's own."""

    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.weights = weights

    def forward(self, query: Tensor, key: Tensor, value: Tensor, request: Request) -> HeadsResult:
        shares = query.new_full((*query.shape[:3], key.shape[2]), 1 / key.shape[2])
        return HeadsResult(shares @ value, shares if self.weights and request.need_weights else None)


def test_a_strategy_of_ones_own_is_seen_by_the_weights_that_it_returns() -> None:
    layer, x = Layer(Uniform(weights=True)).double(), tokens()
    (call,), _ = seen(layer, x)
    assert call.grade == "scores"
    assert not call.no_distribution
    assert close(shares_of(call), torch.full_like(shares_of(call), 1 / LENGTH), ROUNDING)


def test_a_strategy_that_draws_is_called_twice_and_draws_once() -> None:
    class Noisy(Uniform):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, request: Request) -> HeadsResult:
            found = super().forward(query, key, value, request)
            return found._replace(output=found.output + torch.randn(()))

    layer, x, calls = Layer(Noisy(weights=True)), tokens().float(), []
    torch.manual_seed(0)
    alone = layer(x), torch.randn(())
    torch.manual_seed(0)
    with capturing(layer, calls.append):
        read = layer(x)
    assert torch.equal(read, alone[0])
    assert torch.equal(torch.randn(()), alone[1])


def test_a_strategy_of_ones_own_without_weights_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="its Uniform return no weights"):
        massieu.Monitor(Layer(Uniform(weights=False)), tokens().float())


# ops.attention in a module of one's own ------------------------------------------------------------------------------------


class Module(nn.Module):
    """Projections around a function of queries, keys and values, (B, H, L, D)."""

    def __init__(self, mix: Callable[..., Tensor], key_heads: int = HEADS) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.mix = mix
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = (nn.Linear(WIDTH, key_heads * SIZE) for _ in range(2))

    def heads_of(self, x: Tensor) -> list[Tensor]:
        return [layer(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for layer in (self.query, self.key, self.value)]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.mix(*self.heads_of(x)).transpose(1, 2).flatten(2))


DRAWN = torch.Generator().manual_seed(3)
PAIRS = torch.randn(BATCH, HEADS, LENGTH, LENGTH, dtype=torch.float64, generator=DRAWN)
KEYS = torch.randn(LENGTH, dtype=torch.float64, generator=DRAWN)
KEPT = torch.tensor([True, True, False, True, True])
QUERIES = torch.rand(BATCH, HEADS, LENGTH, 1, dtype=torch.float64, generator=DRAWN)
DOCUMENTS = ops.Documents.of_lengths([2, 3])
TOGETHER = torch.block_diag(torch.ones(2, 2), torch.ones(3, 3)).bool()


@dataclass
class Option:
    """Arguments of `ops.attention`, and what they make of the scores."""

    arguments: dict[str, object]
    scores: Callable[[Tensor], Tensor] = lambda scores: scores
    key_heads: int = HEADS
    sink: Tensor | float = -torch.inf
    sink_value: Tensor | float = 0.0


OPTIONS: dict[str, Option] = {
    "nothing": Option({}),
    "causal": Option({"is_causal": True}, lambda s: masked(s, CAUSAL)),
    "window": Option({"window": 1}, lambda s: masked(s, NEAR)),
    "causal window": Option({"window": 1, "is_causal": True}, lambda s: masked(s, NEAR & CAUSAL)),
    "offset": Option(
        {"query_offset": 2, "is_causal": True}, lambda s: masked(s, torch.ones(LENGTH, LENGTH).tril(2).bool())
    ),
    "documents": Option({"documents": DOCUMENTS}, lambda s: masked(s, TOGETHER)),
    "causal documents with a window": Option(
        {"documents": DOCUMENTS, "is_causal": True, "window": 1}, lambda s: masked(s, TOGETHER & CAUSAL & NEAR)
    ),
    "booleans": Option({"log_weight": KEPT}, lambda s: masked(s, KEPT)),
    "weights of keys": Option({"log_weight": KEYS}, lambda s: s + KEYS),
    "weights of pairs": Option({"log_weight": PAIRS}, lambda s: s + PAIRS),
    "causal weights": Option({"log_weight": KEYS, "is_causal": True}, lambda s: masked(s + KEYS, CAUSAL)),
    "softcap": Option({"softcap": 0.5}, lambda s: 0.5 * (s / 0.5).tanh()),
    "a scale": Option({"scale": 0.3}, lambda s: s / SCALE * 0.3),
    "a negative scale": Option({"scale": -0.3}, lambda s: s / SCALE * -0.3),
    "scales of heads": Option({"scale": SCALES}, lambda s: s / SCALE * SCALES[:, None, None]),
    "scales of queries": Option({"scale": QUERIES}, lambda s: s / SCALE * QUERIES),
    "a sink": Option({"sink": 0.5}, sink=0.5),
    "sinks of heads": Option({"sink": SINKS.double(), "sink_value": VALUE}, sink=SINKS, sink_value=VALUE[:, None]),
    "sinks of queries": Option({"sink": QUERIES}, sink=QUERIES),
    "shared keys": Option({"log_weight": PAIRS, "softcap": 1.0}, lambda s: s.tanh() + PAIRS, key_heads=1),
    "the reference": Option({"backend": "reference", "is_causal": True}, lambda s: masked(s, CAUSAL)),
    "tiles": Option({"backend": "blocks", "window": 1}, lambda s: masked(s, NEAR)),
}
FUNCTIONS = {
    "attention": lambda *heads, **options: ops.attention(*heads, **options).output,
    "moments": lambda *heads, **options: ops.attention_moments(*heads, moments={"entropy"}, **options).output,
}


@pytest.mark.parametrize(
    ("function", "name"),
    [*(("attention", name) for name in OPTIONS), ("moments", "causal window"), ("moments", "sinks of heads")],
)
def test_each_option_is_read(function: str, name: str) -> None:
    option, x = OPTIONS[name], tokens()
    module = Module(lambda *heads: FUNCTIONS[function](*heads, **option.arguments), option.key_heads).double()
    (call,), _ = seen(module, x)
    with torch.no_grad():
        q, k, v = module.heads_of(x)
        scores = option.scores(SCALE * q @ k.mT)
        level = torch.as_tensor(option.sink).double()
        level = level if level.dim() == 4 else level.reshape(-1, 1, 1)
        total = scores.exp().sum(-1, keepdim=True) + level.exp()
        output = scores.exp() / total @ v + level.exp() / total * option.sink_value
    assert (call.route, call.grade, call.moving) == ("ops", "full", False)
    assert close(shares_of(call), scores.softmax(-1), ROUNDING)
    assert close(call.output.transpose(1, 2), output, ROUNDING)
    assert torch.equal(call.visible().expand_as(scores), scores > -torch.inf)


@pytest.mark.parametrize("name", OPTIONS)
def test_with_each_option_a_model_is_monitored_and_replaced(name: str) -> None:
    option, x = OPTIONS[name], tokens()
    module = Module(lambda *heads: ops.attention(*heads, **option.arguments).output, option.key_heads).double().eval()
    with torch.no_grad():
        q, k, v = module.heads_of(x)
        scores = option.scores(SCALE * q @ k.mT)
        expected = module(x)
        with massieu.replaced(module, "identity"):
            assert torch.equal(module(x), expected)
        with massieu.replaced(module, "scale(1)"):
            assert close(module(x), expected, ROUNDING)
        with massieu.replaced(module, "entmax(1)"):  # softmax, by explicit weights
            assert close(module(x), expected, ROUNDING)
    record = quiet_monitor(module, x)(0)
    assert record is not None
    choice = (scores > -torch.inf).sum(-1) > 1
    entropy = torch.special.entr(scores.softmax(-1)).sum(-1)
    for head in range(HEADS):
        of_head = choice[:, head] if choice.shape[0] == BATCH else choice[0, head].expand(BATCH, -1)
        expected_entropy = float(entropy[:, head][of_head].mean())
        assert record[f"massieu/layer0/head{head}/entropy"] == pytest.approx(expected_entropy, rel=1e-6)


def test_queries_in_groups_and_batches_of_any_shape_are_read() -> None:
    generator = torch.Generator().manual_seed(4)
    query = torch.randn(3, 2, 1, 2, LENGTH, SIZE, generator=generator)  # batch (3, 2), one key head, two queries of it
    key, value = (torch.randn(3, 2, 1, LENGTH, SIZE, generator=generator) for _ in range(2))

    class Grouped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return ops.attention(query, key, value, is_causal=True).output + x

    (call,), _ = seen(Grouped(), torch.zeros(1))
    assert (call.query.shape, call.key.shape) == ((6, 2, LENGTH, SIZE), (6, 1, LENGTH, SIZE))
    scores = masked(SCALE * query.double() @ key.double().unsqueeze(-3).mT, CAUSAL)
    expected = (scores.softmax(-1) @ value.double().unsqueeze(-3)).flatten(0, 1).squeeze(1)
    assert close(call.output.double().transpose(1, 2), expected, 1e4 * torch.finfo(torch.float32).eps)


def test_log_weights_that_follow_from_the_keys_are_known_to_move() -> None:
    module = Module(lambda q, k, v: ops.attention(q, k, v, log_weight=-k.square().sum(-1).unsqueeze(-2)).output)
    (call,), _ = seen(module, tokens().float())
    assert call.moving


HALVES = {
    "a scale": lambda *heads: ops.attention(*heads).output,
    "scales of heads": lambda *heads: ops.attention(*heads, scale=SCALES.to(heads[0])).output,
    "scales by hand": lambda q, k, v: (q * SCALES.to(q).view(-1, 1, 1) @ k.mT).softmax(-1) @ v,
    "scales of scores": lambda q, k, v: ((q @ k.mT) * SCALES.to(q).view(-1, 1, 1)).softmax(-1) @ v,
}


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_read(dtype: torch.dtype, name: str) -> None:
    module, x = Module(HALVES[name]).to(dtype), tokens().to(dtype)
    (call,), _ = seen(module, x)
    assert call.query.dtype == call.key.dtype == call.value.dtype == dtype
    expected = (call.scale * call.query.double() @ call.key.double().mT).softmax(-1)
    # Weights are exponentials of scores of order 1: a rounding of a score is one of its weight.
    assert close(shares_of(call), expected, ROUNDING)
    assert close(call.output.double().transpose(1, 2), expected @ call.value.double(), 16 * torch.finfo(dtype).eps)
    assert quiet_monitor(module, x)(0) is not None


def test_a_query_that_sees_no_key_is_left_out() -> None:
    keep = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    keep[2] = False
    module, x = Module(lambda *heads: ops.attention(*heads, log_weight=keep).output).double(), tokens()
    (call,), _ = seen(module, x)
    assert not bool(call.visible()[..., 2, :].any())
    assert not bool(call.output[:, 2].any())
    record = quiet_monitor(module, x)(0)
    with torch.no_grad():
        q, k, _ = module.heads_of(x)
    entropy = torch.special.entr((SCALE * q @ k.mT).softmax(-1)).sum(-1)[:, :, [0, 1, 3, 4]].mean((0, 2))
    assert record is not None
    found = [record[f"massieu/layer0/head{head}/entropy"] for head in range(HEADS)]
    assert close(torch.tensor(found, dtype=torch.float64), entropy, 1e-6)


REFUSED = {
    "draws": (
        lambda q, k, v: ops.resample_attention(q, k, v, generator=torch.Generator().manual_seed(0)).sample[..., 0, :],
        "resample_attention, which draws keys at random",
    ),
    "fixed points": (
        lambda q, k, v: solve.fixed_point(lambda z, k: ops.attention(z, k, k).output, q, (k,)).value,
        "massieu.solve.fixed_point, where the number of steps follows from the data",
    ),
    "transforms": (
        lambda q, k, v: torch.vmap(lambda *item: ops.attention(*item).output)(q, k, v),
        "inside a transform of torch.func",
    ),
    "regression": (
        lambda q, k, v: (
            regression.conditional_mean_attention(q, k, v, kernel=regression.LinearKernel.create(), ridge=1.0).output
        ),
        "conditional_mean_attention; massieu.nn.ConditionalMeanHeads shows its weights",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_by_name(name: str) -> None:
    mix, reason = REFUSED[name]
    with pytest.raises(InputError, match=reason):
        massieu.Monitor(Module(mix), tokens().float())


def test_keys_on_disk_are_refused_by_name(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    block = ops.AtomBlock(torch.randn(HEADS, 7, SIZE, generator=generator))
    store = ops.AtomStore.write(tmp_path / "store", [block])
    model = Module(lambda q, k, v: ops.streaming.attention(q, store).output)
    with pytest.raises(InputError, match=r"massieu.ops.streaming, whose keys are on disk"):
        massieu.Monitor(model, tokens().float())


def test_one_part_that_cannot_be_read_leaves_the_others(recwarn: pytest.WarningsRecorder) -> None:
    model = nn.Sequential(Module(FUNCTIONS["attention"]), Module(REFUSED["fixed points"][0]))
    record = massieu.Monitor(model, tokens().float())(0)
    assert record is not None
    assert set(record.largest_logits) == {"0"}
    assert any(
        "1 is not measured: it attends inside massieu.solve.fixed_point" in str(each.message) for each in recwarn
    )


# Layers with several steps -------------------------------------------------------------------------------------------------


def hopfield(steps: int | None, **options: object) -> own.Hopfield:
    torch.manual_seed(5)
    layer = own.Hopfield(WIDTH, HEADS, steps=steps, scale=2.0, **options).double().eval()
    for module in (layer.state, layer.stored, layer.projection):
        nn.init.normal_(module[1].weight)
    return layer


@pytest.mark.parametrize("steps", [1, 2, 3, None])
def test_a_hopfield_layer_is_one_site_a_step_and_at_rest_one(steps: int | None) -> None:
    layer, x = hopfield(steps), tokens()
    calls, _ = seen(layer, x)
    with torch.no_grad():
        state, key, value = (
            part(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
            for part in (layer.state, layer.stored, layer.projection)
        )
    expected = []
    for step in range(steps or 400):
        shares = (2.0 * state @ key.mT).softmax(-1)
        last = step == (steps or 400) - 1
        expected.append((shares, shares @ (value if last else key)))
        state = shares @ key
    expected = expected if steps else expected[-1:]
    names = ["(the module itself)", *(f"(the module itself) (call {step + 1})" for step in range(1, steps or 1))]
    assert [call.site.name for call in calls] == names
    for call, (shares, output) in zip(calls, expected, strict=True):
        assert close(shares_of(call), shares, SOLVED)
        assert close(call.output.transpose(1, 2), output, SOLVED)


@pytest.mark.parametrize("make", [
    pytest.param(lambda: hopfield(3, sink=0.5), id="sink"),
    pytest.param(lambda: hopfield(2, euclidean=True), id="euclidean"),
    pytest.param(lambda: hopfield(None, euclidean=True), id="euclidean at rest", marks=pytest.mark.slow),
    pytest.param(lambda: own.HopfieldPooling(WIDTH, HEADS, quantity=3, steps=2).double(), id="pooling"),
    pytest.param(lambda: own.HopfieldLayer(WIDTH, HEADS, quantity=7, steps=2).double(), id="layer"),
    pytest.param(lambda: own.EnergyTransformer(WIDTH, HEADS, steps=3).double(), id="Energy Transformer"),
    pytest.param(lambda: own.SpinAttention(WIDTH, HEADS, steps=3).double(), id="spins"),
    pytest.param(
        lambda: own.SpinAttention(WIDTH, HEADS, steps=1, order="second").double(),
        id="spins, second order",
        marks=pytest.mark.slow,
    ),
    pytest.param(lambda: own.SpinAttention(WIDTH, HEADS, steps=None).double(), id="spins at rest"),
])  # fmt: skip
@pytest.mark.medium
def test_layers_are_seen_monitored_and_replaced(make: Callable[[], nn.Module]) -> None:
    layer, x = make().eval(), tokens()
    calls, expected = seen(layer, x)
    for call in calls:
        value = call.value.double()
        weights = shares_of(call)
        if call.sink is not None:
            raw = sum(explicit_attention(call, torch.float64))
            weights = raw.exp() / (raw.exp().sum(-1, keepdim=True) + call.sink.exp()[:, None, None])
        assert close(call.output.transpose(1, 2), weights @ value, SOLVED)
    record = quiet_monitor(layer, x)(0)
    assert record is not None
    with torch.no_grad():
        for rule in ("identity", lambda call: call.output.clone()):
            with massieu.replaced(layer, rule):
                assert torch.equal(layer(x), expected)
        with massieu.replaced(layer, "off"):
            assert not torch.allclose(layer(x), expected, rtol=0, atol=1e-6)


def test_gradients_of_a_replaced_energy_transformer_with_padding_are_finite() -> None:
    block, x = own.EnergyTransformer(WIDTH, HEADS, steps=2).double(), tokens()
    padding = torch.tensor([[False] * LENGTH, [False, False, True, True, True]])
    with massieu.replaced(block, "scale(2)"):
        block(x, padding).square().sum().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in block.parameters())


def energy_steps(block: own.EnergyTransformer, x: Tensor, attention: float) -> tuple[list[Tensor], Tensor]:
    """Weights of each step, (B, H, n, n), and the tokens at the end, with so much of the attention's force."""
    found = []
    for _ in range(block.steps):
        g = block.normalisation(x)
        q, k = (torch.einsum("bnd,hzd->bhnz", g, weight) for weight in (block.query_weight, block.key_weight))
        others = ~torch.eye(x.shape[1], dtype=torch.bool)
        shares = masked(SCALE * q @ k.mT, others).softmax(-1)
        found.append(shares)
        force = torch.einsum("bhnz,hzd->bnd", shares @ k, block.query_weight)
        force = attention * (force + torch.einsum("bhnz,hzd->bnd", shares.mT @ q, block.key_weight))
        force = force + torch.relu(g @ block.memories.mT) @ block.memories
        x = x + block.step_size * force
    return found, x


@pytest.mark.parametrize("length", [LENGTH, pytest.param(260, marks=pytest.mark.medium)])  # explicit, and by kernels
def test_the_energy_transformer_is_one_site_a_step_read_both_ways(length: int) -> None:
    torch.manual_seed(6)
    block, x = own.EnergyTransformer(WIDTH, HEADS, steps=2).double().eval(), tokens(length=length)
    calls, output = seen(block, x)
    with torch.no_grad():
        shares, expected = energy_steps(block, x, 1.0)
        _, off = energy_steps(block, x, 0.0)
    assert close(output, expected, ROUNDING)
    names = ["(the module itself)", "(the module itself) (call 2)"]
    assert [(call.site.name, call.repeated) for call in calls] == [(n, again) for n in names for again in (False, True)]
    for step, weights in enumerate(shares):
        of_keys, of_queries = calls[2 * step : 2 * step + 2]
        received = weights.mT / weights.mT.sum(-1, keepdim=True)
        assert close(shares_of(of_keys), weights, ROUNDING)
        assert close(shares_of(of_queries), received, ROUNDING)
    with torch.no_grad(), massieu.replaced(block, "off"):
        assert close(block(x), off, ROUNDING)


def test_spins_are_one_site_of_as_many_values_as_steps() -> None:
    torch.manual_seed(7)
    spins, x = own.SpinAttention(WIDTH, HEADS, steps=3).double().eval(), tokens()
    calls, _ = seen(spins, x)
    assert [call.repeated for call in calls] == [False, True, True]
    with torch.no_grad():
        q, k, drive = (
            layer(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
            for layer in (spins.query_proj, spins.key_proj, spins.drive_proj)
        )
        shares = (SCALE * q @ k.mT).softmax(-1)
        assert close(shares_of(calls[0]), shares, ROUNDING)
        radius = SIZE / 2 - 1
        mean = drive / (1 + (1 + drive.square().sum(-1, keepdim=True) / radius).sqrt())
        assert close(calls[0].output.transpose(1, 2), shares @ mean, ROUNDING)
        with massieu.replaced(spins, "off"):
            found = spins(x)
        assert close(found, spins.out_proj(mean.transpose(1, 2).flatten(2)), ROUNDING)


# Beside other code ---------------------------------------------------------------------------------------------------------


def encoder(layers: int = 3, **options: object) -> nn.TransformerEncoder:
    torch.manual_seed(8)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True, **options)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def test_a_mixed_model_has_all_its_sites_in_order() -> None:
    model = encoder().eval()
    massieu.replace_attention(model.layers[1])
    sites = massieu.describe(model, tokens().float()).sites
    assert [(site.name, site.layer, site.route) for site in sites] == [
        ("layers.0.self_attn", 0, "tap"),
        ("layers.1.self_attn", 1, "ops"),
        ("layers.2.self_attn", 2, "tap"),
    ]


class Crossing(nn.Module):
    """Attention of one sequence to another of the same length, by massieu's modules."""

    def __init__(self) -> None:
        super().__init__()
        for name, heads in (("softmax", None), ("entmax", own.EntmaxHeads()), ("implicit", own.ImplicitHeads())):
            self.add_module(name, own.Attention(WIDTH, HEADS, batch_first=True, heads=heads))
        self.hopfield, self.at_rest = own.Hopfield(WIDTH, HEADS), own.Hopfield(WIDTH, HEADS, steps=None)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        for attention in (self.softmax, self.entmax, self.implicit):
            x = x + attention(x, memory)[0]
        return x + self.hopfield((memory, x, memory)) + self.at_rest((memory, x, memory))


@pytest.mark.slow
def test_attention_to_another_sequence_is_told_from_attention_to_itself() -> None:
    found = massieu.describe(Crossing().eval(), {"x": tokens(0).float(), "memory": tokens(1).float()}).sites
    assert [(site.name, site.kind) for site in found] == [
        (name, "cross") for name in ("softmax", "entmax", "implicit", "hopfield", "at_rest")
    ]
    assert [site.kind for site in massieu.describe(own.Hopfield(WIDTH, HEADS).eval(), tokens().float()).sites] == [
        "self"
    ]


@pytest.mark.medium
def test_queries_that_an_iteration_over_the_keys_has_moved_are_not_replayed() -> None:
    """The climb moves queries among frozen keys, and such queries move with the keys."""
    model = nn.Sequential(Layer(own.ImplicitHeads()), nn.Identity()).eval()
    result = massieu.probe(model, [tokens().float()], statistics=["update_sharpens"], draws=2)
    assert "the replayed queries differ" in result.run.sites[0].unavailable["climb"]


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_replaced_model_has_the_numbers_that_it_had(batch_first: bool) -> None:
    model, x = encoder(2).eval(), tokens().float()
    if not batch_first:
        model = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 16), 2, enable_nested_tensor=False
        ).eval()
        x = x.transpose(0, 1)
    before = quiet_monitor(model, x)(0)
    after = quiet_monitor(massieu.replace_attention(model), x)(0)
    assert before is not None
    assert after is not None
    assert before.keys() == after.keys()
    for name in before:
        if "monitor" not in name:
            assert after[name] == pytest.approx(before[name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("make", [
    pytest.param(lambda: massieu.replace_attention(encoder(2, dropout=0.2)), id="softmax"),
    pytest.param(lambda: Layer(own.EntmaxHeads(alpha=1.5)), id="entmax"),
    pytest.param(lambda: Layer(own.ConditionalMeanHeads()), id="conditional mean", marks=pytest.mark.slow),
    pytest.param(lambda: Layer(own.NormalizedHeads()), id="normalised", marks=pytest.mark.slow),
    pytest.param(lambda: Layer(own.ImplicitHeads()), id="implicit", marks=pytest.mark.slow),
    pytest.param(lambda: Layer(own.TAPHeads()), id="TAP", marks=pytest.mark.slow),
    pytest.param(lambda: own.Hopfield(WIDTH, HEADS, steps=2, dropout=0.2), id="Hopfield"),
    pytest.param(lambda: own.EnergyTransformer(WIDTH, HEADS, steps=2), id="Energy Transformer"),
    pytest.param(lambda: own.SpinAttention(WIDTH, HEADS, steps=2), id="spins"),
])  # fmt: skip
@pytest.mark.medium
def test_training_is_the_same_with_a_monitor_bit_for_bit(make: Callable[[], nn.Module]) -> None:
    def trained(watched: bool) -> tuple[dict[str, Tensor], list[object]]:
        torch.manual_seed(9)
        model, records = make().train(), []
        monitor = quiet_monitor(model, tokens().float()) if watched else None
        torch.manual_seed(10)
        for step in range(2):
            x = tokens(20 + step).float()
            model.zero_grad()
            if monitor is None:
                model(x).square().mean().backward()
            else:
                with monitor.watch(step) as watch:
                    model(x).square().mean().backward()
                records += [watch.record, monitor(step)]
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
        return model.state_dict(), records

    alone, _ = trained(watched=False)
    watched, records = trained(watched=True)
    assert all(torch.equal(alone[name], watched[name]) for name in alone)
    assert all(record is not None for record in records)


def test_gradients_pass_through_what_takes_an_outputs_place() -> None:
    layer, x = Layer().double().eval(), tokens().requires_grad_()
    with massieu.replaced(layer, "scale(2)"):
        layer(x).sum().backward()
    found = layer.attention.in_proj_weight.grad.clone()
    other = Layer(own.SoftmaxHeads(scale=2 * SCALE)).double().eval()
    other(x).sum().backward()
    assert close(found, other.attention.in_proj_weight.grad, ROUNDING)


@pytest.mark.medium
def test_what_is_computed_again_in_the_backward_pass_is_not_told_again() -> None:
    layer, calls = Layer().train(), []
    x = tokens().float().requires_grad_()
    with capturing(layer, calls.append):
        torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert len(calls) == 1


@pytest.mark.parametrize("replace", [False, True], ids=["PyTorch's", "massieu's"])
def test_another_model_that_runs_beside_is_not_taken_for_the_models_own_attention(replace: bool) -> None:
    student, teacher, x, calls = encoder(1).eval(), encoder(1).eval(), tokens().float(), []
    if replace:
        student, teacher = massieu.replace_attention(student), massieu.replace_attention(teacher)
    with capturing(student, calls.append) as capture:  # with gradients, since PyTorch's layer then takes its plain path
        student(x)
        teacher(x)
    assert [call.site.name for call in calls] == ["layers.0.self_attn"]
    assert not capture.refused


def test_of_two_captures_each_sees_the_calls_of_its_own_model_and_the_inner_one_what_the_outer_has_made() -> None:
    layer, x = Layer().double().eval(), tokens()
    calls: list[AttentionCall] = []
    with torch.no_grad(), massieu.replaced(layer, "off"), capturing(layer, calls.append):
        layer(x)
    (call,) = calls
    assert not bool(call.output.any())


def test_an_observer_that_attends_itself_is_not_seen() -> None:
    layer, x = Layer().double().eval(), tokens()
    outer: list[AttentionCall] = []

    def inner(call: AttentionCall) -> None:
        ops.attention(call.query, call.key, call.value)

    with torch.no_grad(), capturing(layer, outer.append), capturing(layer, inner):
        layer(x)
    assert len(outer) == 1


def test_another_thread_that_uses_the_model_is_noticed() -> None:
    layer, x, calls = Layer().eval(), tokens().float(), []

    def read() -> None:
        thread = threading.Thread(target=lambda: layer(x))
        with capturing(layer, calls.append):
            thread.start()
            thread.join()

    with pytest.raises(InputError, match="another thread used the model"):
        read()
    assert not calls


def test_another_thread_with_a_model_of_its_own_is_left_alone() -> None:
    layer, other, x, calls, outputs = Layer().eval(), Layer().eval(), tokens().float(), [], []
    thread = threading.Thread(target=lambda: outputs.append(other(x)))
    with torch.no_grad(), capturing(layer, calls.append):
        thread.start()
        thread.join()
        layer(x)
    assert len(calls) == len(outputs) == 1


@pytest.mark.medium
def test_what_the_heads_write_and_the_maps_between_stream_and_head_are_known() -> None:
    model = encoder(2).eval()
    massieu.replace_attention(model)
    batches = [tokens(seed, length=6).float() for seed in range(2)]
    result = massieu.probe(model, batches, statistics=["write_norm_ratio"], draws=2)
    unavailable = {site.name: site.unavailable for site in result.run.sites}
    values = [row for row in result.heads.to_dicts() if row["statistic"] == "write_norm_ratio"]
    assert len(values) == 2 * HEADS, unavailable


def test_logits_of_massieus_attention_are_clipped_from_the_training_step() -> None:
    layer = Layer()
    monitor = quiet_monitor(layer, tokens().float())
    with monitor.clip(0, 0.05) as clipping:
        layer(tokens().float())
    assert set(clipping.factors) == {"attention"}
    record = monitor(1)
    assert record is not None
    assert record["massieu/largest_logit_max"] == pytest.approx(0.05, rel=1e-5)


CLIPPED = {
    "softmax": lambda: own.Attention(WIDTH, HEADS, batch_first=True),
    "shared keys": lambda: Module(lambda *heads: ops.attention(*heads, is_causal=True).output, key_heads=1),
    "softcap and sink": lambda: Module(lambda *heads: ops.attention(*heads, softcap=1.0, sink=0.5).output),
    "moments": lambda: Module(FUNCTIONS["moments"]),
    "Hopfield": lambda: own.Hopfield(WIDTH, HEADS),
    "spins": lambda: own.SpinAttention(WIDTH, HEADS, steps=2),
}


@pytest.mark.parametrize("name", CLIPPED)
def test_logits_are_clipped_to_the_threshold(name: str) -> None:
    model, x = CLIPPED[name]().eval(), 3 * tokens().float()
    monitor = quiet_monitor(model, (x,))
    record = monitor(0)
    assert record is not None
    threshold = 0.6 * float(record.largest_logits[""].max())
    with torch.no_grad():
        own.clip_logits(model, threshold, record)
    record = monitor(1)
    assert record is not None
    assert float(record.largest_logits[""].max()) == pytest.approx(threshold, rel=1e-5)


NOT_CLIPPED = {
    "linked keys": (lambda: own.Attention(WIDTH, HEADS, heads=own.DualLinkHeads()), "do not multiply queries and keys"),
    "implicit": (lambda: own.Attention(WIDTH, HEADS, heads=own.ImplicitHeads()), "do not multiply queries and keys"),
    "several steps": (lambda: own.Hopfield(WIDTH, HEADS, steps=2), "attends several times, by other scores each time"),
    "Energy Transformer": (lambda: own.EnergyTransformer(WIDTH, HEADS, steps=1), "no linear layer"),
}


@pytest.mark.parametrize("name", NOT_CLIPPED)
def test_logits_that_weights_do_not_scale_are_refused(name: str) -> None:
    make, reason = NOT_CLIPPED[name]
    with pytest.raises(ValueError, match=reason):
        own.clip_logits(make(), 1.0, {"": torch.full((HEADS,), 2.0)})


@pytest.mark.parametrize("export", [False, True], ids=["compiled", "exported"])
@pytest.mark.slow
def test_nothing_is_traced_and_no_graph_is_broken(export: bool) -> None:
    layer, x, calls = Layer().eval(), tokens().float(), []
    with torch.no_grad():
        expected = layer(x)
        if export:
            with capturing(layer, calls.append):
                program = torch.export.export(layer, (x,))
            found = program.module()(x)
        else:
            compiled = torch.compile(layer, backend="eager", fullgraph=True)
            found = compiled(x)
    assert close(found, expected, 1e-6)
    assert not calls
