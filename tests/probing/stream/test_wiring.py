"""The residual stream found by watching equals the one the architecture's own code describes."""

import pytest
import torch
from tests.support.probing import zoo
from tests.support.rows import every_row

from massieu.probing.capture.routes import capturing
from massieu.probing.capture.sites import find_sites, first_pass
from massieu.probing.model.model_inputs import model_inputs
from massieu.probing.stream.wiring import StreamTracer

A, F, N, X, B = "attention", "feed_forward", "norm", "cross_attention", "attention_and_feed_forward"
PRE, POST = [N, A, N, F] * 3 + [N], [A, N, F, N] * 3
WIRING = {
    "bert": POST,
    "albert": POST,
    "gpt2": PRE,
    "llama": PRE,
    "qwen3": PRE,
    "gpt_oss": PRE,
    "vit": PRE,
    "gemma2": PRE,
    "modernbert": [A, N, F, *[N, A, N, F] * 2, N],
    "olmo2": [A, F] * 3 + [N],
    "cohere": [N, A, F] * 3 + [N],
    "gpt_neox": [N, N, B] * 3 + [N],
    "t5": [N, A, N, F] * 3 + [N] + [N, A, N, X, N, F] * 3 + [N],
    "bart": [A, N, F, N] * 2 + [A, N, X, N, F, N] * 2,
}


def trace(name, batch=None):
    model = zoo.model(name)
    prepared = model_inputs(model, zoo.inputs(name) if batch is None else batch)
    steps = []
    with torch.no_grad():
        sites = find_sites(model, first_pass(model, prepared))
        tracer = StreamTracer(model, sites, steps.append)
        with capturing(model, tracer.attention), tracer.watching():
            final = model(**prepared)[0]
    return sites, steps, tracer, final


@pytest.mark.medium
@every_row("name", sorted(WIRING.keys() & zoo.MAKERS.keys()))
def test_order_of_steps(name):
    _, steps, tracer, _ = trace(name)
    assert [step.sublayer.kind for step in steps] == WIRING[name]
    assert [s.index for s in tracer.sublayers] == list(range(len(tracer.sublayers)))
    assert len({s.name for s in tracer.sublayers}) == len(tracer.sublayers)


@every_row("name", ["bert", "gpt2", "llama", "bart", "vit", "gemma2"])
def test_the_stream_is_what_the_blocks_return(name):
    """Hooks on the blocks, an independent route, see the same tensors as the last residual step of each block."""
    model = zoo.model(name)
    blocks = [m for n, m in model.named_modules() if (n.rsplit(".", 1)[-1].isdigit() and "ayer" in type(m).__name__)
              or type(m).__name__.endswith("Block")]  # fmt: skip
    returned = []
    handles = [
        b.register_forward_hook(lambda m, a, o: returned.append(o if torch.is_tensor(o) else o[0])) for b in blocks
    ]
    try:
        _, steps, _, _ = trace(name)
    finally:
        for handle in handles:
            handle.remove()
    last_run = returned[-len(blocks) :]
    states = [step.after for step in steps]
    assert blocks
    for state in last_run:
        assert any(f.shape == state.shape and torch.equal(f, state) for f in states)


@every_row("name", sorted({"bert", "gpt2", "llama", "modernbert", "bart", "t5", "vit"} & zoo.MAKERS.keys()))
def test_the_update_is_the_sum_of_what_the_heads_write(name):
    """after − before = Σ_h W_O,h o_h + b, formed here from the projection's weight; an update is the sum of its heads."""
    _, steps, _, _ = trace(name)
    reads = [s for s in steps if s.read is not None]
    assert reads
    for step in reads:
        read = step.read
        assert read.writes_linearly
        heads = read.call.output.flatten(2)
        update = heads.double() @ read.projection.double().mT
        if read.bias is not None:
            update = update + read.bias.double()
        scale = float(step.after.abs().max())
        assert torch.allclose(update, (step.after - step.before).double(), atol=1e-5 * scale)


def test_post_norm_reads_the_stream_and_pre_norm_reads_behind_a_norm():
    _, steps, _, _ = trace("bert")
    assert all(s.read.norm is None for s in steps if s.read is not None)
    _, steps, _, _ = trace("gpt2")
    for step in steps:
        if step.read is not None:
            assert torch.equal(step.read.residual, step.before)
            assert torch.equal(step.read.norm(step.read.residual), step.read.state)


@pytest.mark.parametrize("name", ["gemma2", "olmo2"])
def test_a_normalised_write_is_not_called_linear(name):
    _, steps, _, _ = trace(name)
    assert not any(s.read.writes_linearly for s in steps if s.read is not None)


def test_kinds_and_layers_of_sites():
    sites, *_ = trace("bart")
    assert [(s.layer, s.kind) for s in sites] == [
        (0, "self"), (1, "self"), (0, "causal"), (0, "cross"), (1, "causal"), (1, "cross"),
    ]  # fmt: skip
    sites, *_ = trace("swin")
    assert [s.layer for s in sites] == [0, 1, 2, 3]
    sites, *_ = trace("llama")
    assert {(s.heads, s.key_heads, s.head_size) for s in sites} == {(4, 2, 12)}


def test_norms_belong_to_the_block_around_them():
    _, _, tracer, _ = trace("gpt2")
    layers = {s.name: s.layer for s in tracer.sublayers if s.kind == "norm"}
    assert layers == {
        "h.0.ln_1": 0,
        "h.0.ln_2": 0,
        "h.1.ln_1": 1,
        "h.1.ln_2": 1,
        "h.2.ln_1": 2,
        "h.2.ln_2": 2,
        "ln_f": None,
    }


def test_tracing_changes_nothing():
    for name in ("bert", "llama", "bart"):
        model = zoo.model(name)
        with torch.no_grad():
            plain = model(**model_inputs(model, zoo.inputs(name)))[0]
        assert torch.equal(trace(name)[3], plain)
