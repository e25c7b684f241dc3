"""`massieu.nn.clip_logits` of PyTorch's module, ours and those that users write: logits worked out again by hand."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.support.rows import every_row, one_in
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from massieu.nn import Attention, ConditionalMeanHeads, EntmaxHeads, SoftmaxHeads, clip_logits


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


TORCH = {
    "plain": {},
    "no bias": {"bias": False},
    "other sizes": {"kdim": 6, "vdim": 10},
    "extra keys": {"add_bias_kv": True, "add_zero_attn": True},
}


def explicit(module: nn.Module, query: Tensor, key: Tensor, gamma: Tensor | None = None) -> Tensor:
    """Scores (H, L, N) of PyTorch's weights, by hand; the learned key and the zero key last."""
    width = module.embed_dim
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight[:width], module.in_proj_weight[width : 2 * width]
    else:
        weights = module.q_proj_weight, module.k_proj_weight
    biases = (None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)[:2]
    queries, keys = (
        F.linear(each, *one) for each, one in zip((query, key), zip(weights, biases, strict=True), strict=True)
    )
    if module.bias_k is not None:
        keys = torch.cat([keys, module.bias_k[0], torch.zeros(1, width).double()])
    split = [each.view(-1, module.num_heads, module.head_dim).transpose(0, 1) for each in (queries, keys)]
    return split[0] @ split[1].mT * module.head_dim**-0.5


@every_row("options", TORCH.values(), ids=TORCH)
@every_row("kind", [nn.MultiheadAttention, Attention])
def test_pytorchs_module_and_ours(kind, options):
    torch.manual_seed(0)
    module = kind(12, 3, batch_first=True, dtype=torch.float64, **options)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=1.0)
    query, key, value = draw(5, 12), draw(6, module.kdim, seed=1), draw(6, module.vdim, seed=2)
    before = explicit(module, query, key).detach()
    logits = before.amax((1, 2))
    threshold = float(logits.median()) * 0.9
    state = copy.deepcopy(module.state_dict())
    gamma = clip_logits(nn.ModuleDict({"a": module}), threshold, {"a": logits})["a"]
    after = explicit(module, query, key).detach()
    torch.testing.assert_close(after, before * gamma.view(-1, 1, 1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(after.amax((1, 2)), logits.clamp(max=threshold))
    keys = [("in_proj_weight", 24), ("in_proj_bias", 24), ("v_proj_weight", 0), ("bias_v", 0), ("out_proj.weight", 0)]
    for name, begin in keys:  # values, and what makes the output of them
        assert name not in state or torch.equal(module.state_dict()[name][begin:], state[name][begin:])
    _, weights = module(query, key, value, average_attn_weights=False)
    torch.testing.assert_close(
        weights, torch.softmax(before * gamma.view(-1, 1, 1), -1)[..., : weights.shape[-1]], rtol=1e-9, atol=1e-12
    )


class Plain(nn.Module):
    """A decoder's attention, as many write it: one layer for all, eager or fused."""

    def __init__(self, fused: bool = True, cap: float | None = None, size: int = 4, norm: bool = False) -> None:
        super().__init__()
        self.qkv, self.out, self.heads, self.fused, self.cap = nn.Linear(16, 48), nn.Linear(16, 16), size, fused, cap
        self.register_buffer("bias", torch.randn(size, 32, 32))
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        query, key, value = (
            part.view(rows, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(width, -1)
        )
        if self.norm:
            query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
        if self.fused:
            found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
            scores = scores if self.cap is None else self.cap * torch.tanh(scores / self.cap)
            scores = scores + self.bias[:, :length, :length].to(scores)
            hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
            found = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value
        return self.out(found.transpose(1, 2).reshape(rows, length, width))


def logits_of(module: Plain, x: Tensor) -> Tensor:
    query, key, _ = (part.view(*x.shape[:2], module.heads, -1) for part in module.qkv(x).double().split(16, -1))
    return (torch.einsum("blhd,bnhd->bhln", query, key) * query.shape[-1] ** -0.5).amax((0, 2, 3)).detach()


@one_in(
    3,
    {
        "options": [{}, {"fused": False}, {"fused": False, "cap": 5.0}, {"size": 1}, {"size": 16}],
        "dtype": [torch.float64, torch.float32, torch.bfloat16, torch.float16],
    },
)
def test_modules_that_users_write_in_every_precision(options, dtype):
    torch.manual_seed(0)
    module = Plain(**options).to(dtype)
    nn.init.normal_(module.qkv.weight, std=0.7)
    x = draw(2, 9, 16).to(dtype)
    logits, before, weight = logits_of(module, x), copy.deepcopy(module), module.qkv.weight
    threshold = float(logits.median()) / 2
    gamma = clip_logits(nn.Sequential(module), threshold, {"0": logits})["0"]
    factors = torch.cat(
        [gamma.sqrt().repeat_interleave(16 // module.heads)] * 2 + [torch.ones(16, dtype=torch.float64)]
    )
    wide = torch.promote_types(dtype, torch.float32)
    wanted = (before.qkv.weight.to(wide) * factors.unsqueeze(-1).to(wide)).to(dtype)  # rounded once
    assert module.qkv.weight is weight
    torch.testing.assert_close(weight.detach(), wanted, rtol=1e-15 if dtype == torch.float64 else 0, atol=0)
    # Rounding of the weights, and of the products that make the scores.
    close = 4 * torch.finfo(dtype).eps * float(logits.abs().max() + 16)
    torch.testing.assert_close(logits_of(module, x), logits.clamp(max=threshold), rtol=0, atol=max(close, 1e-9))


class Named(Plain):
    """Gives the functions of attention their arguments by name."""

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = (part.view(rows, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(width, -1))
        query, key, value = parts
        if self.fused:
            mixed = F.scaled_dot_product_attention(query=query, key=key, value=value, is_causal=True)
        else:
            scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
            mixed = torch.softmax(input=scores, dim=-1) @ value
        return self.out(mixed.transpose(1, 2).reshape(rows, length, width))


@pytest.mark.parametrize("fused", [True, False])
def test_functions_that_are_given_their_arguments_by_name(fused):
    module, x = Named(fused).double(), draw(2, 9, 16)
    logits = logits_of(module, x)
    threshold = float(logits.median())
    clip_logits(module, threshold, {"": logits})
    torch.testing.assert_close(logits_of(module, x), logits.clamp(max=threshold))


class Relative(Plain):
    """Adds queries times embedded positions to the scores, and keys times others, as Transformer-XL does."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(4, 4, 32))
        self.content = nn.Parameter(torch.randn(4, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.view(*x.shape[:2], self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(16, -1)
        )
        scores = query @ key.mT + (query @ self.positions[..., : x.shape[1]]) + self.content @ key.mT
        return self.out((scores.softmax(-1) @ value).transpose(1, 2).reshape(x.shape))


class KeysAreValues(Plain):
    def forward(self, x: Tensor) -> Tensor:
        query, key, _ = (part.view(*x.shape[:2], 4, -1).transpose(1, 2) for part in self.qkv(x).split(16, -1))
        return self.out(F.scaled_dot_product_attention(query, key, key).transpose(1, 2).reshape(x.shape))


class Gated(Plain):
    """Queries open a gate too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.sigmoid(self.qkv(x)[..., :16])


def spoiled(change: Callable[[Plain], object]) -> Plain:
    module = Plain()
    change(module)
    return module


WRONG: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "normalised": (lambda: Plain(norm=True), "not in proportion"),
    "positions in the product": (Relative, "not in proportion"),
    "a gate of the queries": (Gated, "not in proportion"),
    "weight norm": (lambda: spoiled(lambda m: parametrizations.weight_norm(m.qkv)), "no layer with a plain weight"),
    "frozen": (lambda: spoiled(lambda m: m.qkv.requires_grad_(False)), "qkv.weight is frozen"),
    "meta": (lambda: Plain().to("meta"), "no numbers to scale"),
    "packed": (
        lambda: spoiled(lambda m: setattr(m.qkv, "weight", nn.Parameter(torch.ones(48, 16, dtype=torch.int8), False))),
        "packed",
    ),
    "another forward": (lambda: spoiled(lambda m: setattr(m, "forward", lambda x: x)), "its forward was changed"),
    "heads": (lambda: Plain(size=2), "by itself produced no attention scores with 4 heads"),
    "nothing that attends": (lambda: nn.Linear(16, 16), "by itself produced no attention scores"),
    "no input": (lambda: _Empty(), "its forward takes no input"),
    "no layer": (lambda: nn.LayerNorm(16), "no linear layer"),
    "pruned": (lambda: _pruned(), "in_proj_weight is no plain parameter"),
    "a subclass": (lambda: _Own(16, 4), "forward of its own"),
    "another strategy": (
        lambda: Attention(16, 4, heads=ConditionalMeanHeads()),
        "do not multiply queries and keys alone",
    ),
    "other heads": (lambda: nn.MultiheadAttention(16, 2), "2 heads, and the record 4"),
}


class _Empty(Plain):
    def forward(self) -> None:
        pass


class _Own(nn.MultiheadAttention):
    def forward(self, *given, **options):
        return super().forward(*given, **options)


def _pruned() -> nn.Module:
    module = nn.MultiheadAttention(16, 4)
    prune.identity(module, "in_proj_weight")
    return module


@every_row("name", WRONG)
def test_what_cannot_be_scaled_is_refused_with_the_reason_and_nothing_is_changed(name):
    make, reason = WRONG[name]
    torch.manual_seed(0)
    model = nn.ModuleDict({"good": nn.MultiheadAttention(16, 4), "bad": make()})
    before = copy.deepcopy(model["good"].state_dict())
    logits = torch.full((4,), 200.0)
    with pytest.raises(ValueError, match=rf"cannot clip the logits of bad \(\w+\): .*{reason}"):
        clip_logits(model, 100.0, {"good": logits, "bad": logits})
    assert all(torch.equal(before[key], tensor) for key, tensor in model["good"].state_dict().items())


def adapted() -> tuple[nn.Module, Plain]:
    """A model with a LoRA adapter that is not zero, and the module in it whose queries and keys the adapter changes."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    module = Plain().double()
    settings = peft.LoraConfig(target_modules=["qkv"], r=3, lora_alpha=12, init_lora_weights=False)
    return peft.get_peft_model(nn.Sequential(module), settings), module


def effective_weight(module: Plain) -> Tensor:
    """W + (alpha / r) B A, by hand."""
    layer = module.qkv
    low_rank = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    return (layer.base_layer.weight + 12 / 3 * low_rank).detach()


@pytest.mark.medium
def test_what_is_frozen_below_an_adapter_is_refused_by_name():
    model, module = adapted()
    before = effective_weight(module)
    told = r"\(Plain\): its qkv.base_layer.weight is frozen \(requires_grad=False\); frozen=True scales it too"
    with pytest.raises(ValueError, match=told):
        clip_logits(model, 1.0, {"0": torch.full((4,), 2.0)})
    assert torch.equal(effective_weight(module), before)


@pytest.mark.medium
def test_the_base_weight_and_the_adapter_get_one_factor():
    model, module = adapted()
    module.eval()
    x, before = draw(2, 9, 16), effective_weight(module)
    logits = logits_of(module, x)
    threshold = float(logits.median())
    low_rank = module.qkv.lora_A["default"].weight.detach().clone()
    gamma = clip_logits(model, threshold, {"0": logits}, frozen=True)["0"]
    assert bool((gamma < 1).any() and (gamma == 1).any())
    factors = torch.cat([gamma.sqrt().repeat_interleave(4)] * 2 + [torch.ones(16, dtype=torch.float64)])
    # Two products of a few terms and one sum, each rounded in float64.
    torch.testing.assert_close(effective_weight(module), factors.unsqueeze(-1) * before, rtol=1e-13, atol=1e-14)
    assert torch.equal(module.qkv.lora_A["default"].weight, low_rank)
    torch.testing.assert_close(logits_of(module, x), logits.clamp(max=threshold))
    assert not module.qkv.base_layer.weight.requires_grad


def test_keys_that_are_values_too_are_left_alone():
    torch.manual_seed(0)
    module = KeysAreValues()
    before = module.qkv.weight.detach().clone()
    clip_logits(module, 1.0, {"": torch.tensor([4.0, 1.0, 1.0, 1.0])})
    assert torch.equal(module.qkv.weight[4:], before[4:])
    torch.testing.assert_close(module.qkv.weight[:4], before[:4] / 4)


def test_other_strategies_with_a_scale_and_what_else_they_hold():
    for heads in (SoftmaxHeads(scale=nn.Parameter(torch.tensor(2.0)), sink=1.0, softcap=3.0), EntmaxHeads()):
        module = Attention(8, 2, heads=heads)
        scaled = copy.deepcopy(module)
        clip_logits(scaled, 1.0, {"": torch.tensor([4.0, 0.5])})
        torch.testing.assert_close(scaled.in_proj_weight[:4], module.in_proj_weight[:4] / 2)
        assert torch.equal(scaled.in_proj_weight[4:8], module.in_proj_weight[4:8])
        held = zip(scaled.heads.state_dict().values(), module.heads.state_dict().values(), strict=True)
        assert all(torch.equal(one, other) for one, other in held)


def test_modules_that_share_weights_are_scaled_once_by_the_smallest_factor():
    one, other = nn.MultiheadAttention(8, 2), nn.MultiheadAttention(8, 2)
    other.in_proj_weight = one.in_proj_weight
    model = nn.ModuleDict({"one": one, "other": other, "again": one})
    before = one.in_proj_weight.detach().clone()
    record = {"one": [1.0, 9.0], "other": [16.0, 1.0], "again": [2.0, 4.0]}
    found = clip_logits(model, 1.0, {name: torch.tensor(logits) for name, logits in record.items()})
    assert found["one"].tolist() == found["again"].tolist() == pytest.approx([1 / 2, 1 / 9])
    assert found["other"].tolist() == [1 / 16, 1]
    torch.testing.assert_close(one.in_proj_weight[:8], before[:8] * torch.tensor([4 * [1 / 4] + 4 * [1 / 3]]).T)


class Tied(nn.Module):
    """Queries and keys of one weight; with `divided`, of keys of one length."""

    def __init__(self, divided: bool = False) -> None:
        super().__init__()
        self.query, self.key, self.value, self.divided = *(nn.Linear(16, 16, bias=False) for _ in range(3)), divided
        self.key.weight = self.query.weight

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).view(*x.shape[:2], 4, -1).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        key = F.normalize(key, dim=-1) if self.divided else key
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(x.shape)


@every_row("divided, power", [(False, 0.5), (True, 1.0)])
def test_one_weight_of_queries_and_keys(divided, power):
    torch.manual_seed(0)
    module = Tied(divided)
    before = module.query.weight.detach().clone()
    with torch.inference_mode():
        clip_logits(module, 1.0, {"": torch.tensor([4.0, 1.0, 1.0, 1.0])})
    torch.testing.assert_close(module.query.weight[:4], before[:4] * 4**-power)
    assert torch.equal(module.query.weight[4:], before[4:])


def test_a_weight_that_something_else_has_is_left_alone():
    model = nn.ModuleDict({"a": nn.MultiheadAttention(8, 2), "b": nn.Linear(8, 24)})
    model["b"].weight = model["a"].in_proj_weight
    with pytest.raises(ValueError, match=r"b.weight is a weight of attention too, but b is not in the record"):
        clip_logits(model, 1.0, {"a": torch.tensor([4.0, 1.0])})


def test_names_of_a_part_and_of_wrapped_models():
    model = nn.ModuleDict({"trunk": nn.ModuleDict({"attention": nn.MultiheadAttention(4, 1)})})
    weight = model["trunk"]["attention"].in_proj_weight
    for wrapped in (model, nn.DataParallel(model)):
        before = weight.detach().clone()
        clip_logits(wrapped, 1.0, {"attention": torch.tensor([4.0])})
        torch.testing.assert_close(weight[:8], before[:8] / 2)
    model["twin"] = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 1)})
    with pytest.raises(ValueError, match="the record names 'attention', and the model has 2 modules of that name"):
        clip_logits(model, 1.0, {"attention": torch.tensor([4.0])})


@pytest.mark.slow
def test_names_of_compiled_models():
    inner = nn.Sequential(nn.MultiheadAttention(4, 1))
    inner[0] = torch.compile(inner[0])
    before = inner[0].in_proj_weight.detach().clone()
    clip_logits(torch.compile(inner), 1.0, {"0": torch.tensor([4.0])})
    torch.testing.assert_close(inner[0].in_proj_weight[:8], before[:8] / 2)


def test_a_record_of_the_monitor_is_read_by_its_largest_logits():
    class Record(dict):
        largest_logits = {"0": torch.tensor([4.0, 2.0, 2.0, 2.0])}

    found = clip_logits(nn.Sequential(Plain()), 2.0, Record({"massieu/largest_logit_max": 4.0}))
    assert found["0"].tolist() == [0.5, 1, 1, 1]
    assert clip_logits(nn.Sequential(Plain()), 5.0, Record()) == {}


def test_optimisers_hooks_and_random_numbers_are_left_alone():
    model, called = nn.Sequential(Plain()), []
    optimiser = torch.optim.AdamW(model.parameters())
    model(draw(2, 5, 16).float()).square().sum().backward()
    optimiser.step()
    state, gradient = copy.deepcopy(optimiser.state_dict()), model[0].qkv.weight.grad.clone()
    for part in model.modules():
        part.register_forward_hook(lambda *_: called.append(1))
    random = torch.get_rng_state()
    clip_logits(model, 1.0, {"0": torch.full((4,), 2.0)})
    assert called == []
    assert torch.equal(random, torch.get_rng_state())
    assert torch.equal(model[0].qkv.weight.grad, gradient)
    for found, wanted in zip(optimiser.state_dict()["state"].values(), state["state"].values(), strict=True):
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_a_module_that_changes_is_looked_at_again():
    model = nn.Sequential(Plain())
    record = {"0": torch.full((4,), 2.0)}
    clip_logits(model, 1.0, record)
    parametrizations.weight_norm(model[0].qkv)
    with pytest.raises(ValueError, match="no layer with a plain weight"):
        clip_logits(model, 1.0, record)


def test_bad_calls():
    model = nn.Sequential(nn.MultiheadAttention(8, 2))
    good = {"0": torch.tensor([1.0, 2.0])}
    calls = [
        (("model", 1.0, good), TypeError, "model must be a torch.nn.Module"),
        ((model, "1", good), TypeError, "threshold must be a number"),
        ((model, torch.tensor(1.0), good), TypeError, "threshold must be a number, got a tensor"),
        ((model, 0.0, good), ValueError, "threshold must be positive and finite, got 0"),
        ((model, math.nan, good), ValueError, "threshold must be positive and finite, got nan"),
        ((model, 1.0, None), TypeError, "record must be what massieu.Monitor returns .* got None"),
        ((model, 1.0, {0: good["0"]}), TypeError, "record must have names of modules as keys, got 0"),
        ((model, 1.0, {"0": 3.0}), TypeError, "the largest logits of 0 must be a floating-point tensor, got 3.0"),
        ((model, 1.0, {"0": torch.tensor([1, 2])}), TypeError, "must be a floating-point tensor"),
        ((model, 1.0, {"0": torch.ones(1, 2)}), ValueError, r"must have shape \(heads,\), got \(1, 2\)"),
        ((model, 1.0, {"0": torch.ones(0)}), ValueError, r"must have shape \(heads,\), got \(0,\)"),
        ((model, 1.0, {"0": torch.ones(2, device="meta")}), ValueError, "must have values"),
        ((model, 1.0, {"0": torch.tensor([1.0, math.nan])}), ValueError, "of 0 must be finite, got nan in head 1"),
        ((model, 1.0, {"0": torch.tensor([math.inf, 1.0])}), ValueError, "of 0 must be finite, got inf in head 0"),
        ((model, 1.0, {"1": good["0"]}), ValueError, "the record names '1', and the model has no modules of that name"),
        ((model, 1.0, {"0": torch.ones(3) * 2}), ValueError, "it has 2 heads, and the record 3"),
    ]
    before = model[0].in_proj_weight.clone()
    for arguments, kind, words in calls:
        with pytest.raises(kind, match=words):
            clip_logits(*arguments)
    assert torch.equal(model[0].in_proj_weight, before)
