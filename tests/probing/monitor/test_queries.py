"""Which queries a monitor counts: a maximum is over all of them, a mean over those that see several keys."""

import math
from typing import Any

import polars
import pytest
import torch
from tests.support.probing import zoo
from tests.support.rows import some_slow
from torch import Tensor, nn

import massieu
from massieu import Monitor
from massieu.nn import clip_logits
from massieu.probing.capture.attention_call import AttentionCall, AttentionSite
from massieu.probing.capture.routes import capturing
from massieu.probing.capture.tokens import BatchTokens, Tokens
from massieu.probing.model.forward import run
from massieu.probing.model.model_inputs import model_inputs
from massieu.probing.monitor.record import MonitorRecord
from massieu.probing.statistics.query_reading import QueryReading

pytestmark = pytest.mark.medium
HEADS, WIDTH = 2, 16


def record_of(model: nn.Module, batch: Any) -> MonitorRecord:
    record = Monitor(model, batch, per_head=True)(0)
    assert record is not None
    return record


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()


def logits_of_one_layer(model: Any, states: Tensor) -> Tensor:
    """All logits (B, H, L, L) of `encoder` in float64."""
    attention = model.layers[0].self_attn
    projected = states.double() @ attention.in_proj_weight.double().T + attention.in_proj_bias.double()
    query, key, _ = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in projected.chunk(3, -1))
    return query @ key.mT / math.sqrt(WIDTH // HEADS)


@torch.no_grad()
def test_the_first_query_has_the_largest_logit():
    model, states = encoder(), torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(1))
    states[:, 0] *= 30
    expected = logits_of_one_layer(model, states)
    assert bool((expected[:, :, 0].amax((0, 2)) == expected.amax((0, 2, 3))).all())
    found = record_of(model, states).largest_logits["layers.0.self_attn"]
    assert torch.allclose(found, expected.amax((0, 2, 3)), rtol=1e-5)


@torch.no_grad()
def test_class_tokens_are_counted():
    model, batch = zoo.fresh("vit", attn_implementation="eager"), zoo.inputs("vit")
    record = record_of(model, batch)
    for layer, weights in enumerate(model(**batch, output_attentions=True).attentions):
        expected = torch.special.entr(weights.double()).sum(-1).mean((0, 2))
        for head, entropy in enumerate(expected.tolist()):
            assert record[f"massieu/layer{layer}/head{head}/entropy"] == pytest.approx(entropy, rel=1e-4, abs=1e-5)


@torch.no_grad()
def test_the_largest_logit_is_that_before_a_soft_cap():
    """Keys along the queries, so that the logits are scale · |query|², where tanh would saturate."""
    model: Any = zoo.fresh("gemma2", num_hidden_layers=1, num_key_value_heads=4, sharpness=1.0)
    attention = model.layers[0].self_attn
    attention.k_proj.weight.copy_(attention.q_proj.weight.mul_(40))
    batch = zoo.inputs("gemma2")
    given: list[Tensor] = []
    with attention.register_forward_pre_hook(
        lambda _, __, named: given.append(named["hidden_states"]), with_kwargs=True
    ):
        model(**batch)
    states = given[0]
    query = attention.q_proj(states).unflatten(-1, (4, 12)).double()
    expected = query.square().sum(-1).amax((0, 1)) * 12**-0.5  # a query has its largest logit with itself
    assert float(expected.min()) > 100 > model.config.attn_logit_softcapping
    record = record_of(model, batch)
    found = record.largest_logits["layers.0.self_attn"]
    assert bool((found >= expected * (1 - 1e-5)).all())
    lengths = query.norm(dim=-1).amax(1, keepdim=True) * query.norm(dim=-1)
    assert bool((found <= lengths.amax((0, 1)) * 12**-0.5 * (1 + 1e-5)).all())  # Cauchy and Schwarz


def padded(side: str) -> dict[str, Tensor]:
    """Texts of 12 and 7 tokens."""
    ids = torch.randint(3, 99, (2, 12), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    if side == "left":
        ids[1], mask[1] = ids[1].roll(5), mask[1].roll(5)
    return {"input_ids": ids * mask, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_side_of_the_padding_makes_no_difference(name):
    right, left = (record_of(zoo.model(name), padded(side)) for side in ("right", "left"))
    assert right.keys() == left.keys()
    for key in right:
        if not key.endswith(("spread", "effective_rank")):  # of drawn tokens
            assert left[key] == pytest.approx(right[key], rel=1e-4, abs=1e-5), key


def test_documents_in_one_row_are_as_if_alone():
    ids = torch.randint(3, 99, (4, 10), generator=torch.Generator().manual_seed(3))
    model = zoo.model("llama")
    alone = record_of(model, {"input_ids": ids})
    packed = {"input_ids": ids.view(1, 40), "position_ids": torch.arange(10).repeat(4)[None]}
    together = record_of(model, packed)
    for key in alone:
        if not key.endswith(("spread", "effective_rank")):
            assert together[key] == pytest.approx(alone[key], rel=1e-4, abs=1e-5), key


def test_documents_that_see_each_other_are_one():
    """Where positions go back and the mask does not, the first token is the row's."""
    ids = torch.arange(5, 25)[None]
    batch = {"input_ids": ids, "position_ids": torch.arange(10).repeat(2)[None], "attention_mask": torch.ones_like(ids)}
    model = zoo.fresh("llama", attn_implementation="eager")
    with torch.no_grad():
        weights = model(**batch, output_attentions=True).attentions[0]
    assert float(weights[0, 0, -1, 0]) > 0
    expected = weights[0, :, 1:, 0].mean(-1)
    record = record_of(model, batch)
    for head, weight in enumerate(expected.tolist()):
        assert record[f"massieu/layer0/head{head}/weight_first"] == pytest.approx(weight, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@torch.no_grad()
def test_logits_beyond_a_type_are_named(dtype):
    model: Any = encoder().to(dtype)
    states = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    attention = model.layers[0].self_attn
    attention.in_proj_weight[:8] *= 400  # the queries of head 0
    attention.in_proj_weight[16:24] *= 400  # its keys
    expected = logits_of_one_layer(model, states).amax((0, 2, 3))
    assert expected[0] > torch.finfo(torch.float16).max > expected[1]
    monitor = Monitor(model, states, every=1)
    if dtype == torch.float16:
        with pytest.warns(UserWarning, match=r"layer0 has logits up to .* in head 0, and its type holds 6\.55e\+04"):
            record = monitor(0)
    else:
        record = monitor(0)
    assert record is not None
    found = record.largest_logits["layers.0.self_attn"]
    # Queries, keys and their difference from the mean key are rounded, each entry by eps/2 of it.
    assert torch.allclose(found, expected, rtol=4 * torch.finfo(dtype).eps)
    assert monitor(1) is not None  # said once: a second warning would fail this test


@pytest.mark.parametrize(("name", "padded"), [("gemma2", False), ("bert", True)])
def test_the_probe_and_the_monitor_have_the_same_maxima(name, padded):
    model, batch = zoo.model(name), zoo.inputs(name, padded=padded)
    largest = record_of(model, batch).largest_logits
    result = massieu.probe(model, [batch], statistics=["largest_score"], draws=0)
    rows = result.extremes.filter(polars.col("statistic") == "largest_score/maximum").rows(named=True)
    assert len(rows) == sum(len(heads) for heads in largest.values())
    for row in rows:
        assert row["value"] == pytest.approx(float(largest[row["site"]][row["head"]]), rel=1e-5)


def test_keys_of_float16_may_have_any_mean():
    """Their sum, 2·10⁵ an entry, is not a number of float16."""
    generator = torch.Generator().manual_seed(4)
    key = (100 + torch.randn(1, 1, 2000, 4, generator=generator)).half()
    query = torch.randn(1, 1, 3, 4, generator=generator).half()
    output = torch.zeros(1, 3, 1, 4)
    call = AttentionCall(AttentionSite("site"), nn.Identity(), query, key, key, None, False, 1.0, None, None, output)
    real = torch.ones(1, 2000, dtype=torch.bool)
    reading = QueryReading(call, Tokens(real[:, :3], None), Tokens(real, None), torch.arange(3), itself=False)
    scores = query.double() @ key.double().mT
    rounding = 2 * torch.finfo(torch.float16).eps * (query.double().abs() @ key.double().abs().mT).amax(-1)
    assert bool(((reading.raw_log_partition - scores.logsumexp(-1)).abs() <= rounding).all())
    assert bool(((reading.largest_logit - scores.amax(-1)).abs() <= rounding).all())


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("documents", [1, 2])
def test_scores_of_half_precision_keys_with_a_large_mean_are_not_rounded(autocast: bool, documents: int):
    """Whole numbers that bfloat16 holds, and whose mean it holds: nothing but a rounded score could be off."""
    generator = torch.Generator().manual_seed(5)
    centre = torch.tensor([97, -83, 61, 45])
    moved = torch.randint(-30, 31, (1, 1, 8, 4), generator=generator)
    key = torch.cat([centre + moved, centre - moved], dim=2).bfloat16()
    query = torch.randint(-30, 31, (1, 1, 16, 4), generator=generator).bfloat16()
    begins = torch.zeros(1, 16, dtype=torch.bool)
    begins[0, [0, 11][:documents]] = True
    row = begins.cumsum(1)
    visible = (row[:, :, None] == row[:, None]) & torch.ones(16, 16, dtype=torch.bool).tril()
    call = AttentionCall(
        AttentionSite("a"), nn.Identity(), query, key, key, visible[:, None], False, 2**-7, None, None,
        torch.zeros(1, 16, 1, 4),
    )  # fmt: skip
    tokens = Tokens(torch.ones(1, 16, dtype=torch.bool), None, restarts=begins if documents > 1 else None)
    scores = (2**-7 * query.double() @ key.double().mT).masked_fill(~visible, -torch.inf)
    weights = scores.softmax(-1)[0, 0]
    positions = torch.arange(16)
    first = torch.where(positions < 11, 0, 11) if documents > 1 else torch.zeros(16, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        reading = QueryReading(call, tokens, tokens, positions, itself=True)
        assert reading.largest_logit[0, 0].tolist() == scores.amax(-1)[0, 0].tolist()
        assert reading.raw_log_partition[0, 0].tolist() == pytest.approx(scores.logsumexp(-1)[0, 0].tolist(), rel=1e-6)
        for part, expected in (
            (reading.weight_at_first()[0, 0], weights[positions, first]),
            (reading.weight_at(torch.tensor([[2, 3]]))[0, 0], weights[:, 2:4]),
            (reading.weight_before(1)[0, 0], weights[positions, (positions - 1).clamp_min(0)]),
        ):
            torch.testing.assert_close(part.double(), expected, rtol=1e-5, atol=1e-7)


def true_largest(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The largest logit of each head by module, over real queries and the keys they see: explicit, in float64."""
    found: dict[str, Tensor] = {}
    inputs = model_inputs(model, batch)

    def look(call: AttentionCall) -> None:
        key = call.key.double().repeat_interleave(call.query.shape[1] // call.key.shape[1], 1)
        logits = call.scale * call.query.double() @ key.mT
        decoder = "decoder" in call.site.module_name
        real = BatchTokens(inputs).of(call, decoder=decoder).real
        seen = call.visible() & real[:, None, :, None]
        largest = logits.masked_fill(~seen, -torch.inf).amax((0, 2, 3))
        name = call.site.module_name
        found[name] = torch.maximum(found[name], largest) if name in found else largest

    with torch.no_grad(), capturing(model, look):
        run(model, inputs)
    return found


CLIPPED: dict[str, tuple[str, dict[str, Any], dict[str, Tensor]]] = {
    "soft caps, windows, grouped keys": ("gemma2", {}, {}),
    "gains for each head": ("cohere", {"use_qk_norm": True}, {}),
    "left padding": ("llama", {}, padded("left")),
    "cross-attention": ("bart", {}, zoo.inputs("bart", padded=True)),
    "learned sinks": ("gpt_oss", {}, {}),
    "absolute positions": ("gpt2", {}, {}),
    "fused projections, partial rotation": ("gpt_neox", {}, {}),
    "padding": ("bert", {}, zoo.inputs("bert", padded=True)),
    "class token": ("vit", {}, {}),
    "local and global attention": ("modernbert", {}, {}),
    "one module in every layer": ("albert", {}, {}),
    "a norm over all heads": ("olmo2", {}, {}),
}
"""Name in the zoo, changes of its settings, and batch; without one the zoo's own."""


@some_slow("name", CLIPPED, 4)
def test_after_clipping_no_logit_of_the_batch_is_above_the_bound(name):
    """A layer's input changes while layers below it are scaled, so each call makes one more layer final."""
    architecture, changes, batch = CLIPPED[name]
    batch = batch or zoo.inputs(architecture)
    model = zoo.fresh(architecture, **changes)
    before = true_largest(model, batch)
    bound = 0.5 * max(float(largest.max()) for largest in before.values())
    # A module that all layers share is scaled for each of them anew.
    most = 8 if architecture == "albert" else len(before)
    monitor = Monitor(model, batch, every=1, alarms=False)
    for step in range(most):
        record = monitor(step)
        assert record is not None
        if not clip_logits(model, bound * (1 - 1e-5), record):
            break
    clipped = true_largest(model, batch)
    assert max(float(largest.max()) for largest in clipped.values()) <= bound
    assert min(float(largest.max()) for largest in clipped.values()) > 0
