"""A monitor's numbers are those of explicit attention and of the probe, and training does not notice that it is there."""

import gc
import math
import random
import subprocess
import sys
import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.probing import plain, zoo
from tests.support.probing.plain import HEADS, WIDTH, gpt
from tests.support.rows import every_row, some_slow
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import massieu
from massieu import InputError, Monitor
from massieu.probing.capture.routes import capturing
from massieu.probing.monitor.record import MonitorRecord

IDS = torch.arange(24).reshape(2, 12) * 7 % 31


def recorded(monitor: Monitor, step: int = 0, **beside: Any) -> MonitorRecord:
    """The record of a step that is due."""
    record = monitor(step, **beside)
    assert record is not None
    return record


def record_of(model: nn.Module, batch: Any, **options: Any) -> MonitorRecord:
    """The record of a new monitor's first step."""
    return recorded(Monitor(model, batch, **options))


def explicit(model: Any, ids: torch.Tensor, layer: int) -> dict[str, torch.Tensor]:
    """The quantities of each head of a layer, in float64, written out; means are over queries with several keys."""
    x = model.tokens(ids) + model.places.weight[: ids.shape[1]]
    for block in model.blocks[:layer]:
        x = block(x)
    block = model.blocks[layer]
    state = block.first(x).double()
    packed = state @ block.attention.qkv.weight.double().T + block.attention.qkv.bias.double()
    query, key, _ = (p.view(*ids.shape, HEADS, -1).transpose(1, 2) for p in packed.split(WIDTH, dim=2))
    length = ids.shape[1]
    hidden = ~torch.ones(length, length, dtype=torch.bool).tril()
    scores = query @ key.mT / math.sqrt(WIDTH // HEADS)
    seen = scores.masked_fill(hidden, -torch.inf)
    weights, number = seen.softmax(-1), torch.arange(1, length + 1)
    mean = scores.masked_fill(hidden, 0).sum(-1) / number
    entropy = torch.special.entr(weights).sum(-1)
    every = {
        "selective_log_partition": seen.logsumexp(-1) - number.log() - mean,
        "largest_logit": seen.amax(-1),
        "largest_logit_above_mean": seen.amax(-1) - mean,
        "entropy": entropy,
        "entropy_fraction": entropy / number.clamp_min(2).log(),
        "weight_first": weights[..., 0],
    }
    later = {name: values[..., 1:] for name, values in every.items()}
    heads = {name: values.mean((0, 2)) for name, values in later.items()}
    heads["largest_logit"] = every["largest_logit"].amax((0, 2))
    heads["selective maximum"] = later["selective_log_partition"].amax((0, 2))
    return heads


@pytest.mark.parametrize("fused", [True, False])
@torch.no_grad()
def test_numbers_are_those_of_explicit_attention(fused):
    model: Any = gpt(fused=fused)
    record = record_of(model, IDS, per_head=True)
    largest = {}
    for layer in range(2):
        heads = explicit(model, IDS, layer)
        top = heads.pop("selective maximum")
        largest |= {(layer, h): float(v) for h, v in enumerate(heads["largest_logit"])}
        for name, expected in heads.items():
            key = f"massieu/layer{layer}/{name}"
            # float32 states, and logits of a size of up to 30: some 1e-5 of it
            near = {"rel": 1e-5, "abs": 1e-5}
            assert record[f"{key}_mean"] == pytest.approx(float(expected.mean()), **near)
            assert record[f"{key}_min"] == pytest.approx(float(expected.min()), **near)
            most = top if name == "selective_log_partition" else expected
            assert record[f"{key}_max"] == pytest.approx(float(most.max()), **near)
            for head in range(HEADS):
                own = record[f"massieu/layer{layer}/head{head}/{name}"]
                assert own == pytest.approx(float(expected[head]), **near)
        found = record.largest_logits[f"blocks.{layer}.attention"]
        assert torch.allclose(found, heads["largest_logit"], rtol=1e-5, atol=1e-5)
    layer, head = max(largest, key=largest.__getitem__)
    assert (record["massieu/largest_logit_layer"], record["massieu/largest_logit_head"]) == (layer, head)
    assert record["massieu/largest_logit_max"] == pytest.approx(max(largest.values()), rel=1e-5)


@pytest.mark.medium
@torch.no_grad()
def test_the_share_of_a_learned_sink():
    """1 less what transformers' eager weights of gpt-oss add up to, over queries with several keys."""
    model: Any = zoo.fresh("gpt_oss")
    model.set_attn_implementation("eager")
    batch = zoo.inputs("gpt_oss")
    record = record_of(model, batch, per_head=True)
    for layer, weights in enumerate(model(**batch, output_attentions=True).attentions):
        share = (1 - weights.double().sum(-1))[..., 1:].mean((0, 2))
        for head, expected in enumerate(share.tolist()):
            # Weights of float32 that add up to 1 − share, in a row of twenty.
            found = record[f"massieu/layer{layer}/head{head}/sink_weight"]
            assert found == pytest.approx(expected, abs=20 * torch.finfo(torch.float32).eps)
        assert record[f"massieu/layer{layer}/sink_weight_max"] == pytest.approx(float(share.max()), abs=1e-5)
    assert not any("sink_weight" in name for name in record_of(gpt(), IDS))


@torch.no_grad()
def test_a_summary_is_of_the_whole_model_with_the_names_of_the_worst_heads():
    """Numbers of explicit attention, and heads found in them."""
    model: Any = gpt(fused=False)
    record = record_of(model, IDS, prefix="run", per_head=True)
    summary = record.summary()
    assert len(summary) <= 20 and summary.keys() - record.keys() == {"run/effective_rank_min", "run/spread_min"}
    layers = [explicit(model, IDS, layer) for layer in range(2)]
    largest, entropy = (torch.stack([each[name] for each in layers]) for name in ("largest_logit", "entropy"))
    named = {
        "run/largest_logit_max": largest.max(),
        "run/entropy_min": entropy.min(),
        "run/entropy_mean": entropy.mean(),
        "run/weight_first_mean": torch.stack([each["weight_first"] for each in layers]).mean(),
    }
    for name, value in named.items():
        assert summary[name] == pytest.approx(float(value), rel=1e-5), name
    highest, lowest = (divmod(int(index), HEADS) for index in (largest.argmax(), entropy.argmin()))
    assert (summary["run/largest_logit_layer"], summary["run/largest_logit_head"]) == highest
    assert record.where == {
        "run/largest_logit_max": "layer{}/head{}".format(*highest),
        "run/entropy_min": "layer{}/head{}".format(*lowest),
    }
    for name in ("effective_rank", "spread"):
        assert summary[f"run/{name}_min"] == min(record[f"run/layer{layer}/{name}"] for layer in range(2))


def test_a_summary_of_names_without_a_prefix_has_what_is_beside_and_nan_where_one_is():
    model: Any = gpt(fused=False)
    model.blocks[1].attention.qkv.bias.data[2 * WIDTH // HEADS] = torch.nan  # a query of head 2
    with pytest.warns(UserWarning, match="NaN"):
        record = recorded(Monitor(model, IDS, prefix=""), loss=2.5)
    summary = record.summary()
    assert summary["loss"] == 2.5 and math.isnan(summary["entropy_min"]) and math.isnan(summary["spread_min"])
    assert record.where == {"largest_logit_max": "layer1/head2", "entropy_min": "layer1/head2"}


@pytest.mark.medium
@every_row("name", ["llama", "bart"])
def test_numbers_are_those_of_the_probe(name):
    """The probe's means are over all queries, the monitor's over those that see several keys."""
    model, batch = zoo.model(name), zoo.inputs(name, padded=True)
    record = record_of(model, batch, per_head=True)
    result = massieu.probe(model, [batch], statistics=["entropy", "weight_first"], draws=0)
    compared = 0
    for site in result.run.sites:
        kind = f"/{site.kind}" if f"massieu/decoder/layer0/{site.kind}/entropy_mean" in record else ""
        stack = ("decoder" if site.name.startswith("decoder") else "encoder") + "/" if name == "bart" else ""
        kind = kind if name == "bart" and stack == "decoder/" else ""
        for head in range(site.heads or 0):
            rows = {
                r["statistic"]: r for r in result.heads.rows(named=True) if (r["site"], r["head"]) == (site.name, head)
            }
            at = f"massieu/{stack}layer{site.layer}{kind}/head{head}"
            # Query 0 of a decoder has one key: its entropy and selective log Z are 0, its weight on the first is 1.
            if site.kind == "causal":
                count, rows_of = rows["entropy"]["count"], batch_rows(batch)
                share = count / (count - rows_of)
                assert record[f"{at}/entropy"] == pytest.approx(rows["entropy"]["value"] * share, rel=1e-5, abs=1e-6)
                first = (rows["weight_first"]["value"] * count - rows_of) / (count - rows_of)
                assert record[f"{at}/weight_first"] == pytest.approx(first, rel=1e-5, abs=1e-6)
                compared += 1
    assert compared


def batch_rows(batch):
    return next(iter(batch.values())).shape[0]


class Drawing(nn.Module):
    """A block with everything that a measurement could disturb: dropout, running means, draws of three kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.drop = gpt(fused=False), nn.BatchNorm1d(31), nn.Dropout(0.2)

    def forward(self, ids):
        logits = self.drop(self.inner(ids))
        logits = logits + 0.0 * (random.random() + np.random.rand() + torch.rand(()))  # noqa: NPY002
        return self.norm(logits.transpose(1, 2)).transpose(1, 2)


def trained(watch: str, steps: int = 4, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    model = Drawing().train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    monitor: Any = Monitor(model, IDS, every=3, optimizer=optimizer) if watch != "nobody" else None
    torch.manual_seed(1)
    for step in range(steps):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            if watch == "forward":
                with monitor.watch(step) as seen:
                    logits = model(IDS)
                assert (seen.record is not None) == (step % 3 == 0)
            else:
                logits = model(IDS)
            if watch == "inside":
                monitor(step)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), IDS.flatten())
            if watch == "before backward":
                monitor(step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if watch == "after":
            monitor(step, loss=loss)
    return [*model.parameters(), *model.buffers(), torch.rand(3), torch.tensor([random.random(), np.random.rand()])]  # noqa: NPY002


@pytest.mark.medium
@every_row(
    ("watch", "dtype"),
    [("after", None), ("inside", torch.bfloat16), ("before backward", torch.bfloat16), ("forward", torch.bfloat16)],
)
def test_training_is_the_same_bit_for_bit(watch, dtype):
    """Under autocast a cast that was made without gradients must not be found in the cache by the training step."""
    without, beside = trained("nobody", dtype=dtype), trained(watch, dtype=dtype)
    for one, other in zip(without, beside, strict=True):
        assert torch.equal(one, other)


def test_modes_gradients_and_hooks_are_left_as_they_were():
    model: Any = gpt().train()
    model.blocks[1].eval()
    before = [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    monitor = Monitor(model, IDS)
    monitor(0)
    assert [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == before
    assert all(p.grad is None for p in model.parameters())
    assert torch.overrides._len_torch_function_stack() == 0


def test_what_a_forward_pass_leaves_on_its_modules_is_put_back():
    """As a loss beside the output, which training reads after the forward pass that made it."""

    class Leaving(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.calls = gpt(), 0
            self.register_buffer("table", torch.zeros(1))

        def forward(self, ids):
            self.calls += 1
            self.beside = self.calls
            self.table = torch.full((1,), float(self.calls))
            return self.inner(ids)

    model = Leaving()
    monitor = Monitor(model, IDS, every=1)
    assert not hasattr(model, "beside") and model.calls == 0 and float(model.table) == 0
    model(IDS)
    table = model.table
    monitor(0)
    assert (model.beside, model.calls) == (1, 1) and model.table is table


def test_embeddings_that_a_look_up_renormalises_keep_their_numbers():
    class Renormalising(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner = nn.Embedding(31, 31, max_norm=0.5), gpt()

        def forward(self, ids):
            return self.inner(self.first(ids).argmax(-1))

    model = Renormalising()
    before, held = model.first.weight.detach().clone(), model.first.weight
    record_of(model, IDS)
    assert model.first.weight is held and torch.equal(held, before)


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_scripted_parts():
    """They take no hooks. A part that does not attend is none of the monitor's affair; attention in one cannot be seen."""
    model, batch = gpt(), torch.randn(1, 3, WIDTH)
    expected = record_of(model, IDS)
    model.blocks[0].feed = torch.jit.script(model.blocks[0].feed)
    record = record_of(model, IDS)
    assert record["massieu/layer1/entropy_mean"] == pytest.approx(expected["massieu/layer1/entropy_mean"], rel=1e-5)
    model.blocks[1].attention = torch.jit.trace(model.blocks[1].attention, batch, check_trace=False)
    with pytest.warns(UserWarning, match=r"not seen attending, so they are not measured: blocks\.1\.attention"):
        record = record_of(model, IDS)
    assert record["massieu/layer0/entropy_mean"] == expected["massieu/layer0/entropy_mean"]
    model.blocks[0].attention = torch.jit.trace(model.blocks[0].attention, batch, check_trace=False)
    with pytest.raises(InputError, match=r"called attention \(blocks\.0\.attention, blocks\.1\.attention\)"):
        Monitor(model, IDS)


@pytest.mark.parametrize("where", ["model", "hook"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_error_leaves_nothing_behind(where, error):
    model: Any = gpt().train()
    monitor = Monitor(model, IDS, every=1)

    def fail(*_):
        raise error("now")

    target = model.blocks[1].feed if where == "model" else model.blocks[1]
    handle = target.register_forward_hook(fail)
    state = torch.get_rng_state()
    with pytest.raises(error):
        monitor(0)
    handle.remove()
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training and all(m.training for m in model.modules())
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert torch.overrides._len_torch_function_stack() == 0 and torch.is_grad_enabled()
    assert monitor(1) is not None
    with capturing(model, lambda call: None):
        model(IDS)


def test_a_nan_is_named_with_layer_and_head_at_once():
    model: Any = gpt(fused=False)
    monitor = Monitor(model, IDS, every=1, per_head=True)
    with torch.no_grad():
        model.blocks[1].attention.qkv.bias[2 * WIDTH // HEADS] = torch.nan  # a query of head 2
    with pytest.warns(
        UserWarning, match=r"at step 3, layer1 head 2 \(blocks\.1\.attention\) has NaN in its queries"
    ) as said:
        record = recorded(monitor, 3)
    assert len(said) == 1
    assert math.isnan(record["massieu/layer1/head2/entropy"]) and math.isnan(record["massieu/layer1/largest_logit_max"])
    assert math.isfinite(record["massieu/layer1/head1/entropy"])
    assert math.isfinite(record["massieu/layer0/largest_logit_max"])
    assert math.isnan(record["massieu/largest_logit_max"])
    assert (record["massieu/largest_logit_layer"], record["massieu/largest_logit_head"]) == (1, 2)


def test_all_heads_of_a_deep_model_that_turn_nan_are_one_warning():
    """12 layers of 12 heads; at a later call only those that are new are named."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(24, 12, 24, batch_first=True)
    model: Any = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
    monitor = Monitor(model, torch.randn(2, 5, 24), every=1)
    bias = model.layers[11].self_attn.in_proj_bias
    for heads in ([4], [0, 1, 2, 4, 7]):
        with torch.no_grad():
            bias[[2 * head for head in heads]] = torch.nan  # of the queries; two numbers a head
        with pytest.warns(UserWarning, match="massieu.Monitor") as said:
            monitor(2)
        named = {1: "head 4", 5: "heads 0-2, 7"}[len(heads)]
        where = f"layer11 {named} (layers.11.self_attn) has NaN in its queries"
        assert [str(each.message) for each in said] == [f"massieu.Monitor: at step 2, {where}"]
    with torch.no_grad():
        model.layers[1].linear2.weight[0, 0] = torch.nan
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        monitor(3)
        monitor(4)
    assert [str(each.message) for each in said] == [
        "massieu.Monitor: at step 3, layer2 all 12 heads (layers.2.self_attn) has NaN in its queries; not finite either: "
        "layer3 to layer10 all 12 heads, layer11 heads 3, 5-6, 8-11"
    ]


def test_gradient_norm_and_learning_rates():
    model: Any = gpt()
    optimizer = torch.optim.SGD(
        [{"params": model.blocks.parameters(), "lr": 0.1}, {"params": model.head.parameters(), "lr": 0.2}]
    )
    monitor = Monitor(model, IDS, every=2, optimizer=optimizer)
    norms = {}
    for step in range(5):
        loss = model(IDS).logsumexp(-1).mean() * (step + 1)
        loss.backward()
        params = [*model.blocks.parameters(), *model.head.parameters()]
        norms[step] = math.sqrt(sum(float(p.grad.double().square().sum()) for p in params))
        optimizer.step()
        model.zero_grad(set_to_none=True)
        record = monitor(step, loss=loss)
        assert (record is None) == (step % 2 == 1)
        if record is not None:
            assert record["massieu/gradient_norm"] == pytest.approx(norms[step], rel=1e-5)
            assert (record["massieu/learning_rate"], record["massieu/learning_rate_1"]) == (0.1, 0.2)
            assert record["massieu/loss"] == loss.item()
    monitor.close()
    assert not optimizer._optimizer_step_pre_hooks
    assert "massieu/gradient_norm" not in recorded(monitor, 6)


def norm_of(parameters: Iterable[torch.Tensor]) -> float:
    """Of all gradients together, in float64."""
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters if p.grad is not None))


def test_several_optimisers_have_one_norm_and_all_their_learning_rates():
    model: Any = gpt(fused=False)
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if all(p is not each for each in matrices)]
    optimizers = torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-3)
    monitor = Monitor(model, IDS, every=2, optimizer=optimizers)
    for step in range(5):
        model(IDS).logsumexp(-1).mean().backward()
        whole, first, second = (norm_of(each) for each in (model.parameters(), matrices, others))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        record = monitor(step)
        if record is not None:
            assert record["massieu/gradient_norm"] == pytest.approx(whole, rel=1e-5)
            assert whole > 1.01 * max(first, second)
            assert (record["massieu/learning_rate"], record["massieu/learning_rate_1"]) == (0.02, 1e-3)
    monitor.close()
    assert not any(each._optimizer_step_pre_hooks for each in optimizers)


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
def test_with_a_loss_scale_the_norm_is_that_of_the_gradients_without_it():
    """Of the second optimiser too, whose gradients are unscaled only when it steps."""
    model: Any = gpt(fused=False)
    halves = [*model.blocks.parameters()], [*model.head.parameters()]
    optimizers = [torch.optim.SGD(each, lr=0.0) for each in halves]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    monitor = Monitor(model, IDS, optimizer=optimizers)
    model(IDS).logsumexp(-1).mean().backward()
    whole = norm_of([*halves[0], *halves[1]])
    model.zero_grad()
    scaler.scale(model(IDS).logsumexp(-1).mean()).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    assert recorded(monitor)["massieu/gradient_norm"] == pytest.approx(whole, rel=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("several", [False, True])
def test_optimisers_that_accelerate_has_prepared(several):
    accelerate = pytest.importorskip("accelerate")
    model: Any = gpt(fused=False)
    halves = ([*model.blocks.parameters()], [*model.head.parameters()]) if several else ([*model.parameters()],)
    accelerator = accelerate.Accelerator(cpu=True)
    model, *optimizers = accelerator.prepare(model, *(torch.optim.AdamW(each, lr=1e-3) for each in halves))
    monitor = Monitor(model, IDS, every=1, optimizer=optimizers if several else optimizers[0])
    for step in range(2):
        accelerator.backward(model(IDS).logsumexp(-1).mean())
        norm = norm_of(parameter for each in halves for parameter in each)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        record = recorded(monitor, step)
        assert record["massieu/gradient_norm"] == pytest.approx(norm, rel=1e-5)
        assert record["massieu/learning_rate"] == 1e-3
    monitor.close()
    assert not any(each.optimizer._optimizer_step_pre_hooks for each in optimizers)


def trained_with_clipping(bound: float, given: bool) -> tuple[list[float], list[float]]:
    """Norms before clipping, and those that the monitor recorded: a loop as most are written."""
    model: Any = gpt(fused=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = Monitor(model, IDS, every=2, optimizer=optimizer)
    before, recorded = [], []
    generator = torch.Generator().manual_seed(0)
    for step in range(11):
        ids = torch.randint(31, (4, 12), generator=generator)
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), bound)
        optimizer.step()
        optimizer.zero_grad()
        if record := monitor(step, **({"gradient_norm": norm} if given else {})):
            before.append(norm.item())
            recorded.append(record["massieu/gradient_norm"])
    return before, recorded


@pytest.mark.medium
def test_a_norm_that_was_taken_after_clipping_is_said_once_with_what_to_do():
    with pytest.warns(UserWarning, match="massieu.Monitor") as said:
        before, recorded = trained_with_clipping(0.1, given=False)
    assert min(before) > 0.2 and recorded == pytest.approx([0.1] * 6, rel=1e-4)
    assert [str(each.message) for each in said] == [
        "massieu.Monitor: the gradient norm is 0.1 again and again, as if it were measured after clipping; record the one "
        "before with monitor(step, gradient_norm=norm), where norm is what clip_grad_norm_ returned"
    ]


def test_gradients_that_are_left_are_not_taken_for_clipped_ones(recwarn):
    """Nothing steps between these records, so that each has the same norm."""
    model = gpt(fused=False)
    monitor = Monitor(model, IDS, every=1, optimizer=torch.optim.SGD(model.parameters()))
    model(IDS).logsumexp(-1).mean().backward()
    norms = {recorded(monitor, step)["massieu/gradient_norm"] for step in range(5)}
    assert len(norms) == 1 and not recwarn


@pytest.mark.medium
@pytest.mark.parametrize(("bound", "given"), [(0.1, True), (1e3, False)])
def test_a_norm_before_clipping_is_recorded_and_nothing_is_said(bound, given, recwarn):
    before, recorded = trained_with_clipping(bound, given)
    assert recorded == pytest.approx(before, rel=1e-6)
    assert not recwarn


def test_the_least_and_the_most_entropic_heads_are_named():
    record, every = (record_of(gpt(), IDS, **options) for options in ({"top_k": 1}, {"per_head": True}))
    entropies = {key: value for key, value in every.items() if key.endswith("/entropy")}
    named = {key: value for key, value in record.items() if "/head" in key}
    assert named == {k: v for k, v in entropies.items() if v in (min(entropies.values()), max(entropies.values()))}


def test_nothing_of_the_batch_is_held():
    model, kept = gpt(fused=False), []
    monitor = Monitor(model, IDS, every=1)

    def keep(_, __, output):
        kept.append(weakref.ref(output))

    handles = [m.register_forward_hook(keep) for m in model.modules() if isinstance(m, nn.Linear)]
    monitor(0)
    for handle in handles:
        handle.remove()
    gc.collect()
    assert kept and all(each() is None for each in kept)


def test_padding_and_a_batch_that_is_made_anew():
    model, batch = zoo.model("bert"), zoo.inputs("bert", padded=True)
    alone = {name: value[:1] for name, value in batch.items()}
    longer = {name: F.pad(value[:1], (0, 5)) for name, value in batch.items()}
    one, other = (record_of(model, given) for given in (alone, longer))
    assert one["massieu/entropy_mean"] == pytest.approx(other["massieu/entropy_mean"], rel=1e-5)
    asked = []
    monitor = Monitor(model, lambda: asked.append(0) or alone, every=5)
    assert recorded(monitor)["massieu/entropy_mean"] == pytest.approx(one["massieu/entropy_mean"], rel=1e-6)
    assert monitor(1) is None and len(asked) == 2  # once to look, once to measure


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks_are_measured(reentrant):
    class Checkpointed(plain.Gpt):
        def forward(self, ids):
            x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.head(self.norm(x))

    torch.manual_seed(0)
    model = plain.sharp(Checkpointed(fused=False))
    assert record_of(model.train(), IDS) == record_of(gpt(fused=False), IDS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_have_float32_numbers(dtype):
    exact, half = record_of(gpt(), IDS), record_of(gpt().to(dtype), IDS)
    bound = 40 * torch.finfo(dtype).eps  # of states that two layers rounded
    assert half["massieu/entropy_mean"] == pytest.approx(exact["massieu/entropy_mean"], rel=bound, abs=bound)


def test_a_single_query_counts_and_what_has_no_meaning_is_left_out():
    class Pooled(nn.Module):
        """One learned query gathers what a transformer made, as heads of image models do."""

        def __init__(self):
            super().__init__()
            self.inner, self.pool = gpt(), nn.MultiheadAttention(31, 1, batch_first=True)
            self.query = nn.Parameter(torch.randn(1, 1, 31))

        def forward(self, ids):
            states = self.inner(ids)
            return self.pool(self.query.expand(len(ids), -1, -1), states, states)[0]

    record = record_of(Pooled().eval(), IDS)
    assert all(math.isfinite(value) for value in record.values())
    assert any(name.startswith("massieu/pool") or "cross" in name for name in record) or len(record) > 60
    alone = record_of(gpt(), IDS[:, :1])  # one token sees itself alone: there is nothing to spread attention over
    assert "massieu/entropy_mean" not in alone and math.isfinite(alone["massieu/largest_logit_max"])


def test_a_model_that_changes_is_looked_at_anew():
    model: Any = gpt()
    monitor = Monitor(model, IDS, every=1)
    model.blocks = nn.ModuleList([model.blocks[1]])
    with pytest.warns(UserWarning, match="computes attention in other places"):
        record = recorded(monitor)
    assert "massieu/layer0/entropy_mean" in record and "massieu/layer1/entropy_mean" not in record


def test_what_is_watched_elsewhere_is_said_to_be_missing():
    model: Any = gpt()
    monitor = Monitor(model, IDS, every=1)
    model.blocks.append(gpt().blocks[0])
    with (
        pytest.warns(UserWarning, match="in other places than before, which watch and clip leave out"),
        monitor.watch(0) as seen,
    ):
        model(IDS)
    assert seen.record is not None
    assert "massieu/layer1/entropy_mean" in seen.record and "massieu/layer2/entropy_mean" not in seen.record
    with pytest.warns(UserWarning, match="its sites are found again"):
        monitor(0)
    with monitor.watch(0) as seen:
        model(IDS)
    assert seen.record is not None and "massieu/layer2/entropy_mean" in seen.record


def test_a_shared_module_has_its_own_name_and_its_largest_logits_of_all_calls():
    model = zoo.model("albert")
    record = record_of(model, zoo.inputs("albert"), per_head=True)
    (name,) = record.largest_logits
    assert model.get_submodule(name) is not None
    layers = [[record[f"massieu/layer{layer}/head{head}/largest_logit"] for head in range(4)] for layer in range(3)]
    assert torch.equal(record.largest_logits[name], torch.tensor(layers, dtype=torch.float64).amax(0))
    top = float(record.largest_logits[name].max())
    factors = massieu.nn.clip_logits(model, top / 2, record)
    assert float(factors[name].min()) == pytest.approx(0.5)


def without_training(record: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in record.items() if name != "massieu/gradient_norm"}


@pytest.mark.parametrize("fused", [True, False])
def test_what_is_watched_are_the_same_numbers(fused):
    model: Any = gpt(fused=fused).train()
    monitor = Monitor(model, IDS, every=5)
    with monitor.watch(5) as seen:
        loss = model(IDS).logsumexp(-1).mean()
    loss.backward()
    assert seen.record is not None
    assert dict(seen.record) == without_training(recorded(monitor, 5))
    with monitor.watch(6) as seen:
        model(IDS)
    assert seen.record is None


class Checkpointed(nn.Module):
    """A model whose blocks are computed again in the backward pass, and whose forward takes its padding by name."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.inner, self.reentrant = gpt(), reentrant

    def forward(self, ids, *, key_padding_mask):
        x = self.inner.tokens(ids) + self.inner.places.weight[: ids.shape[1]]
        for block in self.inner.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x.masked_fill(key_padding_mask[..., None], 0)


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "checkpointed", "reentrant"])
@pytest.mark.filterwarnings("error:massieu")
def test_micro_batches_that_are_watched_are_one_batch(reentrant, monkeypatch):
    """Their backward passes too are within the block; padding is at the end, where causal queries cannot see it."""
    monkeypatch.setattr("massieu.probing.monitor.measured_stream.CLOUD", 4)  # tokens are drawn, by the row's number
    model = Checkpointed(reentrant).train()
    padded = torch.zeros(2, 12, dtype=torch.bool)
    padded[1, 8:] = True
    whole = {"ids": IDS, "key_padding_mask": padded}
    expected = recorded(Monitor(model, whole))
    monitor = Monitor(model, whole)
    with monitor.watch(0) as seen:
        for row in range(2):
            model(IDS[row : row + 1], key_padding_mask=padded[row : row + 1]).square().mean().backward()
    assert seen.record is not None
    assert seen.record.keys() == without_training(expected).keys() | {"massieu/gradient_norm"}
    for name, value in without_training(seen.record).items():
        assert value == pytest.approx(expected[name], rel=1e-5), name


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings("error:massieu")
def test_what_the_interface_computes_again_is_not_counted_again(reentrant):
    """Attention of transformers is told of every call, those of the backward pass too."""
    model, batch = zoo.fresh("llama").train(), zoo.inputs("llama", padded=True)
    expected = recorded(Monitor(model, batch))
    monitor = Monitor(model, batch)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
    with monitor.watch(0) as seen:
        model(**batch).last_hidden_state.square().mean().backward()
    assert seen.record is not None
    for name, value in without_training(seen.record).items():
        assert value == pytest.approx(expected[name], rel=1e-5), name


def test_bad_calls():
    model: Any = gpt()
    for options, sentence in (
        ({"every": 0}, "every must be"),
        ({"every": 1.5}, "every must be"),
        ({"top_k": -1}, "top_k must be"),
        ({"per_head": 1}, "per_head must be"),
        ({"prefix": 3}, "prefix must be a string, got 3"),
        ({"optimizer": 3}, r"optimizer must be a torch\.optim\.Optimizer or a list of these, got 3"),
        ({"optimizer": [3]}, r"optimizer must be a torch\.optim\.Optimizer or a list of these, got 3"),
        ({"to": 3}, "to must be a path"),
        ({"alarms": 3}, "alarms must be True or False, got 3"),
    ):
        with pytest.raises((TypeError, ValueError, InputError), match=sentence):
            Monitor(model, IDS, **options)
    with pytest.raises(InputError, match="a batch must be"):
        Monitor(model, 3)
    with pytest.raises(InputError, match="the batch is empty"):
        Monitor(model, IDS[:0])
    with pytest.raises(InputError, match="Gpt is on the meta device or lazy"):
        Monitor(gpt().to("meta"), IDS)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(InputError, match="no attention"):
        Monitor(nn.Linear(2, 2), torch.zeros(1, 2), optimizer=optimizer)
    assert not optimizer._optimizer_step_pre_hooks
    monitor = Monitor(model, IDS)
    for step in (-1, 0.5, True):
        with pytest.raises((TypeError, ValueError), match="step must be"):
            monitor(step)
    with pytest.raises(InputError, match=r"loss must be one number, got .*\(2,\)"):
        monitor(0, loss=torch.zeros(2))
    with pytest.raises(InputError, match="loss must be a number, got 'low'"):
        monitor(0, loss="low")


@pytest.mark.slow
def test_no_transformers_and_no_tables_are_loaded():
    code = (
        "import sys, torch, massieu\n"
        "layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)\n"
        "model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)\n"
        "assert massieu.Monitor(model, torch.randn(2, 5, 8))(0)\n"
        "print([n for n in ('transformers', 'polars', 'plotly', 'jinja2') if n in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.medium
@some_slow("way", ["torch.compile", "module.compile"], 1)
def test_a_compiled_training_step_is_not_compiled_again(way):
    """Nor broken into pieces: the monitor runs the same modules uncompiled, between two steps and inside a step's autocast."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model: Any = gpt().train()
    compiled = torch.compile(model, backend="eager", fullgraph=True) if way == "torch.compile" else model
    if way == "module.compile":
        model.compile(backend="eager", fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step():
        F.cross_entropy(compiled(IDS).flatten(0, 1), IDS.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    monitor = Monitor(compiled, IDS, every=1, optimizer=optimizer)
    step()
    before = dict(torch._dynamo.utils.counters["stats"]), dict(torch._dynamo.utils.counters["frames"])
    for number in range(2):
        record = recorded(monitor, number)
        with torch._dynamo.config.patch(error_on_recompile=True):
            step()
    assert (dict(torch._dynamo.utils.counters["stats"]), dict(torch._dynamo.utils.counters["frames"])) == before
    assert not torch._dynamo.utils.counters["graph_break"]
    assert "massieu/layer1/entropy_mean" in record
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with monitor.watch(4) as seen:
            compiled(IDS)
    assert seen.record is not None
    assert seen.record["massieu/layer1/entropy_mean"] == pytest.approx(
        recorded(monitor, 5)["massieu/layer1/entropy_mean"]
    )


def test_warnings_name_the_line_of_the_program():
    """Of a call, of a block that is watched and of one that is clipped, each once."""
    model: Any = gpt(fused=False)
    monitor = Monitor(model, IDS, every=1)
    with torch.no_grad():
        model.blocks[1].attention.qkv.weight[0] = math.nan
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor(0)
        with torch.no_grad():
            model.blocks[0].attention.qkv.weight[-1] = math.nan
        with monitor.watch(1):
            model(IDS)
        with monitor.clip(2, 1.0):
            model(IDS)
    assert len(caught) == 3
    assert {warning.filename for warning in caught} == {__file__}
