"""Strategies of `massieu.nn.Attention`: what a call may ask for, where numbers start, who owns them."""

import copy
import math
import pickle

import pytest
import torch
from tests.support.rows import every_row
from torch import Tensor, nn

from massieu import measures
from massieu.nn import (
    Attention,
    ConditionalMeanHeads,
    CosineHeads,
    DualLinkHeads,
    EntmaxHeads,
    ImplicitHeads,
    MeasureHeads,
    NormalizedHeads,
    RandomFeatureHeads,
    ReLUHeads,
    SigmoidHeads,
    SoftmaxHeads,
    TAPHeads,
)
from massieu.nn.strategy import Heads, HeadsResult


def numbers() -> Tensor:
    return torch.tensor([0.5, 0.75])


STRATEGIES = {
    "SoftmaxHeads": lambda: SoftmaxHeads(
        scale=numbers(), sink=nn.Parameter(-numbers()), sink_value=nn.Parameter(torch.ones(4)), window=3
    ),
    "CosineHeads": lambda: CosineHeads(sink=numbers()),
    "MeasureHeads": lambda: MeasureHeads(measures.Atoms.create, scale=numbers()),
    "EntmaxHeads": lambda: EntmaxHeads(alpha=1 + numbers(), learn_alpha=True, scale=nn.Parameter(numbers())),
    "EntmaxHeads, given": lambda: EntmaxHeads(alpha=1 + numbers()),
    "NormalizedHeads": NormalizedHeads,
    "SigmoidHeads": lambda: SigmoidHeads(scale=nn.Parameter(numbers())),
    "ReLUHeads": lambda: ReLUHeads(scale=numbers()),
    "DualLinkHeads": lambda: DualLinkHeads("bernoulli", scale=numbers()),
    "DualLinkHeads, no divergence": lambda: DualLinkHeads("categorical", divergence=False),
    "RandomFeatureHeads": lambda: RandomFeatureHeads(scale=nn.Parameter(numbers())),
    "RandomFeatureHeads, relu": lambda: RandomFeatureHeads(kind="relu", features=64, seed=3),
    "ConditionalMeanHeads": lambda: ConditionalMeanHeads(ridge=0.5, width=2.0),
    "ImplicitHeads": lambda: ImplicitHeads(alpha=numbers(), learn_alpha=True, scale=numbers()),
    "TAPHeads": lambda: TAPHeads(strength=nn.Parameter(numbers()), scale=numbers()),
}


def made(name: str, **options) -> Attention:
    return Attention(8, 2, batch_first=True, heads=STRATEGIES[name](), **options)


@pytest.mark.parametrize("name", STRATEGIES)
def test_from_meta_to_memory_a_strategy_starts_as_it_was_given(name: str):
    wanted = made(name, dtype=torch.bfloat16).heads.state_dict()
    module = made(name, device="meta", dtype=torch.bfloat16)
    tensors = [*module.parameters(), *module.buffers()]
    assert all(tensor.is_meta and tensor.dtype == torch.bfloat16 for tensor in tensors)
    tokens = torch.zeros(2, 5, 8, device="meta", dtype=torch.bfloat16)
    output = module(tokens)[0]
    assert (output.shape, output.dtype, output.is_meta) == ((2, 5, 8), torch.bfloat16, True)
    module.to_empty(device="cpu")
    for tensor in (*module.parameters(), *module.buffers()):
        nn.init.constant_(tensor, math.nan)
    module.reset_parameters()
    assert set(wanted) == set(module.heads.state_dict())
    for part, start in wanted.items():
        assert torch.equal(module.heads.state_dict()[part], start), part
    assert not module.in_proj_bias.any()
    # Xavier's law: uniform within √(6/(fan in + fan out)).
    bound = math.sqrt(6 / sum(module.in_proj_weight.shape))
    assert 0.8 * bound < module.in_proj_weight.abs().max().item() < 1.01 * bound
    assert 0 < module.out_proj.weight.abs().max().item() < 1


@pytest.mark.parametrize("name", STRATEGIES)
def test_copies_have_copies(name: str):
    module, tokens = made(name).eval(), torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    wanted = module(tokens)[0]
    for other in copies:
        assert other.heads is not module.heads
        torch.testing.assert_close(other(tokens)[0], wanted)
        other.load_state_dict(module.state_dict())
    with pytest.raises(ValueError, match=rf"this {type(module.heads).__name__} is already bound to another module"):
        Attention(8, 2, heads=module.heads)


def test_a_parameter_stays_the_same_object():
    scale = nn.Parameter(numbers())
    assert Attention(8, 2, heads=SoftmaxHeads(scale=scale)).heads.scale is scale


def test_what_modules_and_strategies_tell_of_themselves():
    told = repr(Attention(8, 2, 0.1, heads=SoftmaxHeads(scale=0.3, sink=nn.Parameter(numbers()), window=(2, 0))))
    for part in ("embed_dim=8", "num_heads=2", "dropout=0.1", "scale=0.3", "sink=[0.5, 0.75] trained", "window=(2, 0)"):
        assert part in told
    assert "alpha=1.5" in repr(Attention(8, 2, heads=EntmaxHeads()))
    assert "max_lipschitz=0.8" in repr(ImplicitHeads(max_lipschitz=0.8))
    assert "strength=0.5" in repr(TAPHeads())


def explicit_moments(scores: Tensor, seen: Tensor, sink: float | None) -> dict[str, Tensor]:
    """By the matrix of weights, the sink one more key of score 0."""
    log_weight = torch.zeros_like(scores).masked_fill(~seen, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, torch.zeros_like(scores[..., :1])], -1)
        log_weight = torch.cat([log_weight, torch.full_like(log_weight[..., :1], sink)], -1)
    level = scores + log_weight
    weights = level.softmax(-1)
    mean = (weights * scores).sum(-1)
    return {
        "log_partition": level.logsumexp(-1),
        "entropy": -torch.special.xlogy(weights, weights).sum(-1),
        "mean_score": mean,
        "score_variance": (weights * scores.square()).sum(-1) - mean.square(),
        "max_weight": weights.amax(-1),
        "collision": weights.square().sum(-1),
        "prior_log_partition": log_weight.logsumexp(-1),
    }


@every_row("options", [{}, {"need_weights": False}, {"training": True}])
@every_row("sink", [None, 0.3])
def test_moments_are_those_of_the_matrix_of_weights(options: dict[str, bool], sink: float | None):
    torch.manual_seed(0)
    value = None if sink is None else torch.ones(4).double()
    heads = SoftmaxHeads(scale=0.8, sink=sink, sink_value=value, window=2)
    module = Attention(8, 2, 0.5, batch_first=True, dtype=torch.float64, heads=heads)
    module.train(options.get("training", False))
    tokens = torch.randn(2, 6, 8).double().requires_grad_()
    padding = torch.arange(6) >= torch.tensor([[6], [4]])
    masks = {"key_padding_mask": padding, "is_causal": True, "need_weights": options.get("need_weights", True)}
    output, weights, moments = module(tokens, need_moments=True, **masks)
    behind = torch.arange(6)[:, None] - torch.arange(6)
    seen = (behind >= 0) & (behind <= 2) & ~padding[:, None, None]
    query, key = (
        (tokens @ weight.T).unflatten(-1, (2, 4)).transpose(1, 2) for weight in module.in_proj_weight.chunk(3)[:2]
    )
    rows = seen[:, 0].any(-1)
    for name, wanted in explicit_moments(0.8 * query @ key.mT, seen, sink).items():
        found = getattr(moments, name)
        assert found.shape == (2, 2, 6)
        for head in range(2):
            torch.testing.assert_close(found[:, head][rows], wanted[:, head][rows], rtol=1e-9, atol=1e-10)
    assert moments.output is None
    if not module.training:
        plain = module(tokens, **masks)
        torch.testing.assert_close(output, plain[0], rtol=1e-10, atol=1e-12)
        assert (weights is None) == (not masks["need_weights"])
    assert bool(torch.autograd.grad(moments.entropy.sum(), tokens)[0].any())
    some = module(tokens, need_moments=("entropy", "max_position"), **masks)[2]
    assert torch.equal(some.entropy, moments.entropy) and torch.equal(some.max_position, moments.max_position)
    assert some.log_partition is None and some.output is None
    alone = module(tokens[0], need_moments=True, is_causal=True)[2]
    assert alone.entropy.shape == (2, 6)


def test_what_a_strategy_has_not_is_one_sentence():
    tokens = torch.zeros(1, 3, 8)
    for name, asked, message in (
        (
            "EntmaxHeads",
            ["moments"],
            "EntmaxHeads can return only need_potential besides output and weights; got need_moments",
        ),
        ("MeasureHeads", ["moments"], "can return only need_log_partition besides"),
        ("SoftmaxHeads", ["variance"], "can return at most one of need_log_partition, need_moments; got need_variance"),
        ("SoftmaxHeads", ["log_partition", "moments"], "got need_log_partition and need_moments"),
        ("TAPHeads", ["potential"], "can return no result besides"),
    ):
        with pytest.raises(ValueError, match=message):
            made(name)(tokens, **{f"need_{word}": True for word in asked})


class Uniform(Heads):
    """A user's own: the mean of the values."""

    def forward(self, query, key, value, request):
        return HeadsResult(value.mean(2, keepdim=True).expand_as(query))


def test_a_strategy_of_ones_own():
    module, tokens = Attention(8, 2, batch_first=True, heads=Uniform()), torch.randn(2, 5, 8)
    output, weights = module(tokens)
    assert weights is None
    torch.testing.assert_close(
        output, module.out_proj(tokens.mean(1, keepdim=True) @ module.in_proj_weight[16:].T).expand(2, 5, 8)
    )
