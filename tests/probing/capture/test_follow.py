"""The tap reads attention that is written out by hand, in any layout, as it is; and refuses what is something else."""

import gc
import math
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any

import polars
import pytest
import torch
from tests.support.rows import every_row
from torch import Tensor, nn
from torch.nn import functional as F

import massieu
from massieu.errors import InputError
from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.capture.capture import Capture
from massieu.probing.capture.routes import capturing
from massieu.probing.checks.check import first_look

BATCH, LENGTH, WIDTH, HEADS = 2, 7, 24, 4
SIZE = WIDTH // HEADS
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
ALIBI = (
    -torch.tensor([0.5, 2.0, 40.0, 0.1])[:, None, None] * (torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]).abs()
)
Mixed = Callable[..., Tensor]
"""Of queries, keys and values; those in `OWN` are given the module first."""


class Attention(nn.Module):
    """Projections around one way of mixing, which is given queries, keys and values as (B, H, L, D)."""

    def __init__(self, mix: Mixed, key_heads: int = HEADS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix, self.key_heads = mix, key_heads
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key, self.value = (nn.Linear(WIDTH, key_heads * SIZE) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.temperature = nn.Parameter(torch.tensor([0.5, 1.0, 2.0, 3.0]).view(HEADS, 1, 1))
        self.sink = nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 0.0]))

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        layers = (self.query, self.key, self.value)
        return tuple(layer(x).view(*x.shape[:2], -1, SIZE).transpose(1, 2) for layer in layers)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mix(self, *self.heads(x)) if self.mix in OWN else self.mix(*self.heads(x))
        return self.out(mixed)


def merged(output: Tensor) -> Tensor:
    """(B, H, L, D) as (B, L, H·D)."""
    return output.transpose(1, 2).contiguous().view(BATCH, LENGTH, WIDTH)


def by(change: Callable[[Tensor], Tensor], scale: float = 0.3) -> Mixed:
    """Softmax of scores that were changed."""
    return lambda q, k, v: merged(F.softmax(change(q @ k.transpose(-2, -1) * scale), dim=-1) @ v)


def in_place(scores: Tensor) -> Tensor:
    scores *= 2
    scores += ALIBI
    return scores.masked_fill_(~CAUSAL, -torch.inf)


def assigned(scores: Tensor) -> Tensor:
    scores[~CAUSAL.expand_as(scores)] = -torch.inf
    return scores


def additive(value: float) -> Tensor:
    return torch.zeros(LENGTH, LENGTH).masked_fill(~CAUSAL, value)


def folded(q, k, v):
    """One batch of all heads, as bmm and baddbmm take it."""
    q, k, v = (t.reshape(BATCH * HEADS, LENGTH, SIZE) for t in (q, k, v))
    bias = ALIBI.repeat(BATCH, 1, 1)
    scores = bias.baddbmm(batch1=q, batch2=k.transpose(1, 2), beta=0.5, alpha=0.3)
    scores = scores.view(BATCH, HEADS, LENGTH, LENGTH) + additive(torch.finfo(torch.float32).min)
    weights = F.dropout(scores.softmax(-1), 0.1, False).view(BATCH * HEADS, LENGTH, LENGTH)
    return merged(torch.bmm(weights, v).view(BATCH, HEADS, LENGTH, SIZE))


def einsum(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(SIZE)
    weights = scores.masked_fill(~CAUSAL, -1e9).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).reshape(BATCH, LENGTH, WIDTH)


def head_last(q, k, v):
    q, k, v = (t.permute(0, 2, 3, 1) for t in (q, k, v))  # (B, L, D, H)
    weights = torch.einsum("bqdh,bkdh->bqkh", q, k).softmax(2)
    return torch.einsum("bqkh,bkdh->bqhd", weights, v).flatten(2)


def over_rows(q, k, v):
    """Keys by queries, with the softmax over the second last dimension."""
    weights = (k @ q.mT * 0.2).softmax(-2)
    return (v.mT @ weights).permute(0, 3, 1, 2).reshape(BATCH, LENGTH, WIDTH)


def repeated_keys(q, k, v):
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    return merged((q @ k.mT * 0.4).softmax(-1) @ v)


def grouped(q, k, v):
    """Five dimensions: the heads that share keys beside each other."""
    scores = q.reshape(BATCH, 2, 2, LENGTH, SIZE) @ k[:, :, None].mT * SIZE**-0.5
    output = scores.masked_fill(~CAUSAL, -torch.inf).softmax(-1) @ v[:, :, None]
    return merged(output.reshape(BATCH, HEADS, LENGTH, SIZE))


def tokens_before_batch(q, k, v):
    """Merged as PyTorch's own module does, and turned back behind."""
    output = ((q @ k.mT).softmax(-1) @ v).permute(2, 0, 1, 3).reshape(LENGTH * BATCH, WIDTH)
    return output.view(LENGTH, BATCH, WIDTH).transpose(0, 1)


def by_temperature(module, q, k, v):
    return merged((q @ k.mT * module.temperature).softmax(-1) @ v)


def with_sink(module, q, k, v):
    scores = (q @ k.mT).masked_fill(~CAUSAL, -torch.inf)
    scores = torch.cat([scores, module.sink.view(1, HEADS, 1, 1).expand(BATCH, -1, LENGTH, -1)], dim=-1)
    scores = scores - scores.max(dim=-1, keepdim=True).values
    return merged(F.softmax(scores, dim=-1)[..., :-1] @ v)


def capped(q, k, v):
    scores = 5 * torch.tanh(q @ k.mT * 0.3 / 5)
    return merged(scores.masked_fill(CAUSAL == 0, -torch.inf).softmax(-1) @ v)


OWN = {by_temperature, with_sink}
HIDING = (-math.inf, -3.4028234663852886e38, -1e30, -1e6, -1e4, -100.0)
MASKED = ("mask", "where", "place", "assigned", "away", "below", "einsum", "folded", "grouped", "sink", "cap")
READ: dict[str, tuple[Mixed, int]] = {
    "plain": (by(lambda s: s), HEADS),
    "boolean mask": (by(lambda s: s.masked_fill(~CAUSAL, -torch.inf)), HEADS),
    **{f"added mask of {v:.3g}": (by(lambda s, v=v: s + additive(v)), HEADS) for v in HIDING},
    "where": (by(lambda s: torch.where(CAUSAL, s, -1e30)), HEADS),
    "in place": (by(in_place), HEADS),
    "assigned": (by(assigned), HEADS),
    "linear biases": (by(lambda s: s + ALIBI), HEADS),
    "taken away": (by(lambda s: s - 1e4 * (~CAUSAL).float()), HEADS),
    "times a mask": (by(lambda s: s * CAUSAL - 1e4 * (~CAUSAL).float()), HEADS),
    "a bound below": (by(lambda s: torch.clamp(s + additive(-1e30), min=-5e4)), HEADS),
    "folded": (folded, HEADS),
    "einsum": (einsum, HEADS),
    "heads last": (head_last, HEADS),
    "softmax over rows": (over_rows, HEADS),
    "repeated keys": (repeated_keys, 2),
    "grouped": (grouped, 2),
    "tokens before batch": (tokens_before_batch, HEADS),
    "temperature": (by_temperature, HEADS),
    "sink": (with_sink, HEADS),
    "cap": (capped, HEADS),
    "fused": (lambda q, k, v: merged(F.scaled_dot_product_attention(q, k, v, is_causal=True)), HEADS),
    "fused, masked": (lambda q, k, v: merged(F.scaled_dot_product_attention(q, k, v, additive(-1e30), scale=0.7)), HEADS),
    "fused, grouped": (lambda q, k, v: merged(F.scaled_dot_product_attention(q, k, v, enable_gqa=True)), 2),
}  # fmt: skip


def read(module: nn.Module, *inputs: Tensor) -> tuple[list[AttentionCall], Capture, Tensor]:
    calls: list[AttentionCall] = []
    with torch.no_grad():
        stock = module(*inputs)
        with capturing(module, calls.append) as capture:
            output = module(*inputs)
    assert torch.equal(stock, output)
    return calls, capture, output


def explicit(call: AttentionCall) -> Tensor:
    """The output, in float64, of what was captured; −inf hides."""
    groups = call.query.shape[1] // call.key.shape[1]
    query, key, value = call.query.double(), *(t.double().repeat_interleave(groups, 1) for t in (call.key, call.value))
    scores = query @ key.mT * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.is_causal:
        scores = scores.masked_fill(~CAUSAL, -torch.inf)
    if call.log_weight is not None:
        weight = call.log_weight
        scores = scores.masked_fill(~weight, -torch.inf) if weight.dtype == torch.bool else scores + weight
    if call.sink is not None:
        scores = torch.cat([scores, call.sink.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : key.shape[2]] @ value).transpose(1, 2)


def batch(seed: int = 1) -> Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))


@every_row("name", list(READ))
def test_hand_written_attention_is_read_as_it_is(name):
    mix, key_heads = READ[name]
    module, x = Attention(mix, key_heads).eval(), batch()
    calls, capture, _ = read(module, x)
    (call,) = calls
    assert not capture.refused and (call.grade, call.route, call.site.module_name) == ("full", "tap", "")
    query, key, value = module.heads(x)
    assert call.query.shape == (BATCH, HEADS, LENGTH, SIZE)
    assert call.value.shape[2:] == (LENGTH, SIZE)
    own = value.repeat_interleave(call.value.shape[1] // key_heads, 1)
    assert torch.equal(call.value, own)
    # Rounding of the module's own float32 products, of numbers of order 1
    assert torch.allclose(call.output.double(), explicit(call), rtol=1e-5, atol=2e-6)
    if name != "temperature":
        assert torch.equal(call.query, query)
    hidden = None if call.log_weight is None else ~call.visible().expand(BATCH, HEADS, -1, -1)
    if any(word in name for word in MASKED) and name != "fused, grouped":
        assert hidden is not None and torch.equal(hidden, (~CAUSAL).expand(BATCH, HEADS, -1, -1))
    if name == "linear biases":
        assert call.log_weight is not None and torch.equal(call.log_weight.expand(BATCH, -1, -1, -1)[0], ALIBI)


@every_row("name", ["plain", "folded", "heads last", "fused", "sink"])
def test_another_batch_is_read_anew(name):
    module = Attention(*READ[name]).eval()
    for seed in (1, 2):
        calls, *_ = read(module, batch(seed))
        assert torch.allclose(calls[0].output.double(), explicit(calls[0]), rtol=1e-5, atol=2e-6)


def test_scores_that_are_no_affine_function_are_taken_as_they_are():
    module, x = Attention(by(lambda s: (s * 2) ** 3 + ALIBI)).eval(), batch()
    calls, *_ = read(module, x)
    (call,) = calls
    query, key, _ = module.heads(x)
    scores = (query @ key.mT * 0.3 * 2) ** 3 + ALIBI
    assert call.grade == "scores" and torch.allclose(call.log_weight, scores)
    assert torch.equal(call.weights, scores.softmax(-1))
    assert torch.allclose(call.output.double(), explicit(call), rtol=1e-5, atol=2e-6)


def test_a_product_with_itself_is_no_scale():
    (call,) = read(Attention(by(lambda s: s * s)).eval(), batch())[0]
    assert call.grade == "scores"


def test_one_head_and_one_sequence():
    class Single(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.value, self.out = (nn.Linear(6, 6) for _ in range(4))

        def forward(self, x):
            return self.out((self.query(x) @ self.key(x).mT).softmax(-1) @ self.value(x))

    for shape in ((5, 6), (3, 5, 6)):
        (call,) = read(Single(), torch.randn(shape))[0]
        assert call.query.shape == (shape[0] if len(shape) == 3 else 1, 1, 5, 6)
        assert torch.allclose(call.output.double(), explicit(call), atol=1e-6)


def test_weights_on_two_sets_of_values_are_one_site():
    def twice(q, k, v):
        weights = (q @ k.mT).softmax(-1)
        return merged(weights @ v) + merged(weights @ v.flip(2))

    calls, capture, _ = read(Attention(twice).eval(), batch())
    assert [call.repeated for call in calls] == [False, True] and len({call.site for call in calls}) == 1
    assert capture.fired == {"": 1}


class Mixing(Attention):
    """Talking heads: scores go through a layer over the heads."""

    def __init__(self) -> None:
        super().__init__(None)
        self.talk = nn.Linear(HEADS, HEADS)

    def forward(self, x):
        q, k, v = self.heads(x)
        scores = self.talk((q @ k.mT).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.out(merged(scores.softmax(-1) @ v))


def landmarks(q, k, v):
    few_q, few_k = q[:, :, :3], k[:, :, :3]
    middle = torch.linalg.inv((few_q @ few_k.mT).softmax(-1) + torch.eye(3))
    return merged((q @ few_k.mT).softmax(-1) @ middle @ ((few_q @ k.mT).softmax(-1) @ v))


def pieces(q, k, v):
    parts = [(part @ k.mT).softmax(-1) @ v for part in q.split(4, dim=2)]
    return merged(torch.cat(parts, dim=2))


REFUSED = {
    "talking heads": (lambda: Mixing(), "its scores go through linear"),
    "channels": (lambda: Attention(lambda q, k, v: ((q.mT @ k).softmax(-1) @ v.mT).permute(0, 3, 1, 2).flatten(2)), "channels"),
    "landmarks": (lambda: Attention(landmarks), "weights|activation|values"),
    "pieces": (lambda: Attention(pieces), "its output goes through cat"),
    "weights without values": (lambda: Attention(lambda q, k, v: merged(v) * (q @ k.mT).softmax(-1).mean()), "weights"),
    "two softmaxes": (lambda: Attention(by(lambda s: s.softmax(-1))), "softmax"),
    "shuffled keys": (lambda: Attention(by(lambda s: s.roll(1, -1))), "its scores go through roll"),
}  # fmt: skip


@every_row("name", list(REFUSED))
def test_what_is_something_else_is_refused_with_the_reason(name):
    make, reason = REFUSED[name]
    module = make().eval()
    _, capture, _ = read(module, batch())
    assert re.search(reason, capture.refused.get("", "nothing")), capture.refused
    with pytest.raises(InputError, match="can be read"):
        first_look(module, {"x": batch()})


class Router(Attention):
    """A softmax of a plain projection, and a product of it with experts: no attention."""

    def __init__(self) -> None:
        super().__init__(READ["plain"][0])
        self.choose, self.experts = nn.Linear(WIDTH, 3), nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x):
        return super().forward(x) + self.choose(x).softmax(-1) @ self.experts


@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=())
def _foreign_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT).softmax(-1) @ value


def test_a_librarys_own_operator_is_refused_by_name():
    def flash(q, k, v):
        return merged(torch.ops.flash_attn._flash_attn_forward(q, k, v))

    calls, capture, _ = read(Attention(flash).eval(), batch())
    assert not calls and "flash_attn::_flash_attn_forward" in capture.refused[""]


def test_a_part_that_runs_in_another_thread_is_said():
    class Apart(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (Attention(READ["plain"][0]) for _ in range(2))

        def forward(self, x):
            found = []
            thread = threading.Thread(target=lambda: found.append(self.second(x)))
            thread.start()
            thread.join()
            return self.first(x) + found[0]

    with pytest.raises(InputError, match="another thread used the model"):
        read(Apart().eval(), batch())


def test_routers_are_no_attention():
    calls, capture, _ = read(Router().eval(), batch())
    assert len(calls) == 1 and not capture.refused


def test_positions_times_queries_are_a_bias_that_moves():
    places = nn.Parameter(torch.randn(LENGTH, SIZE))

    def relative(q, k, v):
        return merged(((q @ k.mT + q @ places.mT) * 0.3).softmax(-1) @ v)

    module = Attention(relative).eval()
    module.register_parameter("places", places)
    (call,) = read(module, batch())[0]
    assert (call.grade, call.moving) == ("full", True)
    assert torch.allclose(call.output.double(), explicit(call), rtol=1e-5, atol=2e-6)
    (still,) = read(Attention(READ["linear biases"][0]).eval(), batch())[0]
    assert not still.moving


@pytest.mark.parametrize(
    "change",
    [
        lambda scores, bias: scores + bias,
        lambda scores, bias: scores - bias,
        lambda scores, bias: bias - scores,
        lambda scores, bias: torch.add(scores, bias, alpha=2),
        lambda scores, bias: torch.sub(scores, bias, alpha=2),
    ],
    ids=["plus", "minus", "from", "twice", "less twice"],
)
def test_a_bias_computed_from_keys_moves_however_it_is_added(change):
    def with_bias(q, k, v):
        return merged(change(q @ k.mT * 0.3, k.sum(-1)[:, :, None]).softmax(-1) @ v)

    (call,) = read(Attention(with_bias).eval(), batch())[0]
    assert (call.grade, call.moving) == ("full", True)
    assert torch.allclose(call.output.double(), explicit(call), rtol=1e-5, atol=2e-6)


def test_an_output_transposed_by_the_names_of_its_dimensions():
    def by_name(q, k, v):
        output = (q @ k.mT * 0.3).softmax(-1) @ v
        return output.transpose(dim0=1, dim1=2).contiguous().view(BATCH, LENGTH, WIDTH)

    (call,) = read(Attention(by_name).eval(), batch())[0]
    assert call.grade == "full"
    assert torch.allclose(call.output.double(), explicit(call), rtol=1e-5, atol=2e-6)


def test_a_view_that_was_changed_behind_is_not_trusted():
    """Scores changed in place by another name: what was noted of them is no longer true."""

    def changed(q, k, v):
        scores = q @ k.mT
        scores.view(-1)[:3].fill_(1.0)
        return merged(scores.softmax(-1) @ v)

    calls, capture, _ = read(Attention(changed).eval(), batch())
    assert all(torch.allclose(call.output.double(), explicit(call), atol=2e-6) for call in calls)


def test_nothing_of_a_call_is_held():
    held: list[weakref.ref] = []

    def noted(q, k, v):
        scores = q @ k.mT
        weights = scores.softmax(-1)
        held.extend(weakref.ref(t) for t in (scores, weights))
        return merged(weights @ v)

    module = Attention(noted).eval()
    with torch.no_grad(), capturing(module, lambda call: None):
        module(batch())
        gc.collect()
        assert all(ref() is None for ref in held)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    module = Attention(READ["boolean mask"][0]).eval().to(dtype)
    (call,) = read(module, batch().to(dtype))[0]
    assert torch.allclose(call.output.double(), explicit(call), atol=8 * torch.finfo(dtype).eps)


def test_an_error_in_the_model_leaves_no_mode_behind():
    def fail(q, k, v):
        (q @ k.mT).softmax(-1)
        raise RuntimeError("now")

    module = Attention(fail).eval()
    with pytest.raises(RuntimeError, match="now"), capturing(module, print):
        module(batch())
    assert torch.overrides._len_torch_function_stack() == 0
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


class Watching(torch.overrides.TorchFunctionMode):
    """A mode of the caller's own."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def _interrupt():
    torch._C._pop_torch_function_stack()
    raise KeyboardInterrupt


def test_an_interruption_while_the_tap_is_off_the_stack_leaves_the_callers_modes():
    """PyTorch takes a mode off its stack while the mode is at work, and Ctrl-C may come in that moment."""
    module = Attention(READ["plain"][0]).eval()
    with Watching() as outer:
        with pytest.raises(KeyboardInterrupt), capturing(module, print):
            _interrupt()
        assert torch.overrides._get_current_function_mode() is outer
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


@pytest.mark.medium
@pytest.mark.parametrize("architecture", ["Deberta", "DebertaV2"])
@pytest.mark.parametrize("terms", [["c2p"], ["p2c"], ["p2c", "c2p"]], ids="+".join)
def test_relative_positions_in_one_term_or_two_are_a_bias(architecture, terms):
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 30,
        "max_position_embeddings": 24, "relative_attention": True, "position_biased_input": False,
    }  # fmt: skip
    config = getattr(transformers, f"{architecture}Config")(**sizes, pos_att_type=terms, initializer_range=1.0)
    model = getattr(transformers, f"{architecture}Model")(config).eval()
    ids = torch.randint(3, 30, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions[0].double()
    heads = massieu.probe(model, [{"input_ids": ids}], statistics=["entropy"], draws=0).heads
    found = heads.filter(polars.col("statistic") == "entropy").sort("head")["value"].to_numpy()
    expected = torch.special.entr(weights).sum(-1).mean((0, 2))
    assert found == pytest.approx(expected.numpy(), rel=1e-5)
