"""`watch` and `clip` of models that `torch.compile` has compiled: numbers of the training step's own forward passes."""

import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.support.probing.logits import largest_logits
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from massieu import InputError, Monitor

pytestmark = pytest.mark.medium
HEADS, WIDTH = 2, 16
BATCHES = torch.randn(3, 2, 6, WIDTH, generator=torch.Generator().manual_seed(1))
PADDING = torch.zeros(2, 6, dtype=torch.bool)
PADDING[1, 4:] = True
BACKEND = "aot_eager"
"""Traces forward and backward passes as every compiler does, and generates no machine code."""

STREAM_LEFT_OUT = (
    "massieu.Monitor: in compiled code watch sees attention alone: "
    "rank and spread of the stream are left out of its records"
)


@pytest.fixture(autouse=True)
def nothing_is_compiled_yet() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Layer(nn.TransformerEncoderLayer):
    """PyTorch does not compile the forward of its own modules in place, but that of a subclass."""

    def forward(self, *tokens: Any, **settings: Any) -> Tensor:
        return super().forward(*tokens, **settings)


class Encoder(nn.TransformerEncoder):
    def forward(self, *tokens: Any, **settings: Any) -> Tensor:
        return super().forward(*tokens, **settings)


def encoder() -> Any:
    """One layer, whose second head has logits of a hundred."""
    torch.manual_seed(0)
    layer = Layer(WIDTH, HEADS, 32, batch_first=True, dropout=0.3)
    model: Any = Encoder(layer, 1, enable_nested_tensor=False)
    with torch.no_grad():
        model.layers[0].self_attn.in_proj_weight[8:16].mul_(60)
    return model.train()


def largest(model: Any, *batches: Tensor) -> Tensor:
    """The largest logit of each head over queries and keys that are no padding."""
    unseen = (PADDING[:, :, None] | PADDING[:, None, :])[:, None]
    return torch.stack([largest_logits(model.layers[0].self_attn, each, unseen) for each in batches]).amax(0)


def compiled(model: Any, form: str, backend: str = BACKEND) -> Any:
    """A model that is compiled as a whole, in place, or in its layers alone."""
    if form == "whole":
        return torch.compile(model, backend=backend, fullgraph=True)
    if form == "in place":
        model.compile(backend=backend, fullgraph=True)
    if form == "layers":
        for layer in model.layers:
            layer.compile(backend=backend, fullgraph=True)
    return model


def trained(form: str, watched: str = "", backend: str = BACKEND) -> tuple[Any, list[Any], int]:
    """Three steps; the model, what was found at each, and how many graphs were compiled."""
    torch._dynamo.reset()
    counters.clear()
    model = encoder()
    called = compiled(model, form, backend)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    monitor = Monitor(called, {"src": BATCHES[0], "src_key_padding_mask": PADDING}, every=2)
    torch.manual_seed(3)
    found = []

    def step(states: Tensor) -> None:
        optimizer.zero_grad()
        called(states, src_key_padding_mask=PADDING).square().mean().backward()
        optimizer.step()

    for number, states in enumerate(BATCHES):
        if watched == "clip":
            with monitor.clip(number, 1e9, every=2) as clipped:
                step(states)
            found.append(clipped)
        elif watched == "watch":
            with monitor.watch(number) as seen:
                step(states)
            found.append(seen.record)
        else:
            step(states)
    return model, found, counters["stats"]["unique_graphs"]


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["whole", "in place", "layers"])
@pytest.mark.filterwarnings("ignore:massieu.Monitor. in compiled code watch sees")
def test_training_is_the_same_bit_for_bit_and_compiled_once_more(form):
    alone, _, graphs = trained(form)
    for watched in ("clip", "watch"):
        model, found, more_graphs = trained(form, watched)
        assert torch.equal(weights(alone), weights(model))
        assert more_graphs == graphs + 1
        if watched == "clip":
            logits = [each.largest_logits.get("layers.0.self_attn") for each in found]
        else:
            logits = [record and record.largest_logits["layers.0.self_attn"] for record in found]
        assert logits[1] is None
        assert torch.allclose(logits[0], largest(encoder(), BATCHES[0]), rtol=1e-5)


@pytest.mark.slow
def test_no_logit_of_the_steps_micro_batches_is_above_the_bound():
    model = encoder()
    called, before = compiled(model, "whole"), largest(model, *BATCHES)
    monitor = Monitor(called, {"src": BATCHES[0], "src_key_padding_mask": PADDING})
    with monitor.clip(0, 20.0) as found:
        for states in BATCHES:
            called(states, src_key_padding_mask=PADDING).square().mean().backward()
    assert torch.allclose(found.largest_logits["layers.0.self_attn"], before, rtol=1e-5)
    after = largest(model, *BATCHES)
    assert before[1] > 20 > before[0] == after[0]
    assert after[1] == pytest.approx(20, rel=1e-5)


def llama(attention: str = "sdpa") -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=50, attn_implementation=attention)
    return transformers.LlamaForCausalLM(config).train()


@pytest.mark.slow
def test_a_watched_step_has_the_record_of_a_model_that_is_not_compiled():
    """Grouped keys, rotary positions and padding; the whole graph in one piece."""
    ids = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(2))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    records = []
    for backend in ("", BACKEND):
        model = llama()
        if backend:
            model.compile(backend=backend, fullgraph=True)
        monitor = Monitor(model, batch)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for step in (0, 100):
                with monitor.watch(step) as seen:
                    model(**batch, use_cache=False).logits.square().mean().backward()
        assert seen.record is not None
        records.append(seen.record)
        sentences = [str(each.message) for each in said if "massieu" in str(each.message)]
        assert sentences == ([STREAM_LEFT_OUT] if backend else [])
    plain, of_compiled = records
    stream = {f"massieu/layer{layer}/{name}" for layer in range(2) for name in ("effective_rank", "spread")}
    training = {"massieu/monitor_every", "massieu/monitor_share"}
    assert plain.keys() - of_compiled.keys() - training == stream
    for name in of_compiled.keys() - training:
        assert of_compiled[name] == pytest.approx(plain[name], rel=1e-5, abs=1e-6), name


class Checkpointed(nn.Module):
    """The encoder, computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.encoder, x, use_reentrant=False)


@pytest.mark.slow
def test_what_is_computed_again_counts_once():
    model = Checkpointed()
    called: Any = torch.compile(model, backend=BACKEND, fullgraph=True)
    monitor = Monitor(called, BATCHES[0])
    with monitor.clip(0, 1e9) as found:
        called(BATCHES[0]).square().mean().backward()
    assert list(found.largest_logits) == ["encoder.layers.0.self_attn"]
    with torch.no_grad():
        attention = model.encoder.layers[0].self_attn
        projected = BATCHES[0].double() @ attention.in_proj_weight.double().T + attention.in_proj_bias.double()
    query, key, _ = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in projected.chunk(3, -1))
    expected = (query @ key.mT / math.sqrt(WIDTH // HEADS)).amax((0, 2, 3))
    assert torch.allclose(found.largest_logits["encoder.layers.0.self_attn"], expected, rtol=1e-5)


class Turns(nn.Module):
    """Attends once or twice, as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.turns = encoder(), 2

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.turns):
            x = self.encoder(x)
        return x


@pytest.mark.slow
def test_nothing_is_clipped_where_it_is_not_known_which_call_is_whose():
    model = Turns()
    called = compiled(model, "whole")
    monitor, before = Monitor(called, BATCHES[0]), weights(model)
    with monitor.clip(0, 1e9) as found:
        called(BATCHES[0])
    assert set(found.largest_logits) == {"encoder.layers.0.self_attn"}
    model.turns = 1
    with (
        pytest.warns(UserWarning, match="computes attention in other places than before"),
        monitor.clip(1, 1.0) as found,
    ):
        called(BATCHES[0])
    assert found.largest_logits == {}
    assert torch.equal(weights(model), before)


class Explicit(nn.Module):
    """Attention that is written out: compiled code has no function that shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).split(WIDTH, -1))
        weights = (query @ key.mT / math.sqrt(WIDTH // HEADS)).softmax(-1)
        return self.out((weights @ value).transpose(1, 2).flatten(2))


def test_attention_that_is_written_out_is_refused_before_the_step():
    monitor = Monitor(compiled(Explicit(), "whole"), BATCHES[0])
    for watching in (monitor.watch(0), monitor.clip(0, 1.0)):
        with pytest.raises(InputError, match="this compiled Explicit cannot be watched: compiled code shows"), watching:
            raise AssertionError("the step was begun")


@pytest.mark.slow
def test_a_part_that_is_written_out_is_left_out_and_named_once():
    model = nn.Sequential(Explicit(), encoder())
    called = compiled(model, "whole")
    monitor = Monitor(called, BATCHES[0], every=1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(2):
            with monitor.clip(step, 1e9) as found:
                called(BATCHES[0])
            assert list(found.largest_logits) == ["1.layers.0.self_attn"]
    sentences = [str(each.message) for each in said if "massieu" in str(each.message)]
    assert sentences == [
        "massieu.Monitor: watch and clip leave out 1 attention modules of the compiled Sequential (0 is the first), which "
        "compute attention in another way than by scaled_dot_product_attention"
    ]


@pytest.mark.slow
@pytest.mark.needs("compiler")
@pytest.mark.filterwarnings("ignore:massieu.Monitor. in compiled code watch sees")
def test_machine_code_trains_the_same_bit_for_bit():
    """With dropout, whose draws depend on how the graph is cut."""
    alone, _, _ = trained("whole", backend="inductor")
    for watched in ("clip", "watch"):
        model, found, _ = trained("whole", watched, backend="inductor")
        assert torch.equal(weights(alone), weights(model))
        assert found[2]
