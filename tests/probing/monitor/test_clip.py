"""QK-clip within the training loop, by the largest logits of the training step's own forward passes."""

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from tests.support.probing import zoo
from tests.support.probing.logits import largest_logits
from torch import Tensor, nn

from massieu import Monitor

pytestmark = pytest.mark.medium
HEADS, WIDTH = 2, 16
BATCHES = torch.randn(3, 2, 6, WIDTH, generator=torch.Generator().manual_seed(1))


def encoder() -> Any:
    """One layer, whose second head has logits of a hundred."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True, dropout=0.3)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    with torch.no_grad():
        model.layers[0].self_attn.in_proj_weight[8:16].mul_(60)
    return model.train()


def largest(model: Any, *batches: Tensor) -> Tensor:
    """The largest logit of each head."""
    return torch.stack([largest_logits(model.layers[0].self_attn, each) for each in batches]).amax(0)


def test_no_logit_of_the_steps_micro_batches_is_above_the_bound():
    model = encoder()
    monitor, before = Monitor(model, BATCHES[0]), largest(model, *BATCHES)
    assert before[1] > 20 > before[0] > 0
    with monitor.clip(0, 20.0) as found:
        for states in BATCHES:
            model(states).square().mean().backward()
    (name,) = found.largest_logits
    assert torch.allclose(found.largest_logits[name], before, rtol=1e-5)
    assert torch.allclose(found.factors[name], (20 / before).clamp(max=1), rtol=1e-5)
    after = largest(model, *BATCHES)
    assert after[0] == before[0]
    assert after[1] == pytest.approx(20, rel=1e-5)


def test_the_optimisers_step_is_within_the_block():
    """The heads are scaled as they are after the step, by what the step's forward pass had: to first order in the rate."""
    model, plain = encoder(), encoder()
    for each, clipped in ((model, True), (plain, False)):
        optimizer = torch.optim.SGD(each.parameters(), 1e-4)
        torch.manual_seed(5)
        with Monitor(each, BATCHES[0]).clip(0, 20.0 if clipped else 1e9) as found:
            each(BATCHES[0]).square().mean().backward()
            optimizer.step()
        assert bool(found.factors) == clipped
    assert largest(model, BATCHES[0])[1] == pytest.approx(20, rel=1e-3)
    factor = largest(model, BATCHES[0])[1] / largest(plain, BATCHES[0])[1]
    assert factor == pytest.approx(float(20 / largest(encoder(), BATCHES[0])[1]), rel=1e-5)


def test_below_the_bound_training_is_the_same_bit_for_bit():
    trained = []
    for clips in (True, False):
        model = encoder()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        monitor = Monitor(model, BATCHES[0])
        torch.manual_seed(3)
        for step, states in enumerate(BATCHES):
            with monitor.clip(step, 1e6, every=1 if clips else 1000):
                optimizer.zero_grad()
                model(states).square().mean().backward()
                optimizer.step()
        trained.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.equal(*trained)


def test_queries_of_padding_are_left_out():
    """Their logits are above all others."""
    model, states = encoder(), BATCHES[0].clone()
    states[1, 4:] *= 100
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    given = {"src": states, "src_key_padding_mask": padding}
    with Monitor(model, given).clip(0, 1e9) as found:
        model(**given)
    expected = torch.maximum(largest(model, states[:1]), largest(model, states[1:, :4]))
    assert torch.allclose(found.largest_logits["layers.0.self_attn"], expected, rtol=1e-5)
    assert bool((largest(model, states) > 2 * expected).any())


def test_only_steps_that_are_due_are_clipped():
    model = encoder()
    monitor, before = Monitor(model, BATCHES[0]), copy.deepcopy(model.state_dict())
    with monitor.clip(3, 1.0, every=2) as found:
        model(BATCHES[0])
    assert found.largest_logits == found.factors == {}
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_what_is_not_finite_is_said_and_nothing_is_changed():
    model = encoder()
    monitor, before = Monitor(model, BATCHES[0]), copy.deepcopy(model.state_dict())
    told = "at step 0 the largest logits of layers.0.self_attn are not finite"
    with pytest.warns(UserWarning, match=told), monitor.clip(0, 1.0) as found:
        model(BATCHES[0] * torch.nan)
    assert found.factors == {}
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_what_is_not_finite_again_is_not_said_again():
    monitor = Monitor(encoder(), BATCHES[0])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(3):
            with monitor.clip(step, 1.0):
                monitor.model(BATCHES[0] * torch.nan)
    assert len([each for each in said if "not finite" in str(each.message)]) == 1


@pytest.mark.filterwarnings("error:massieu")
def test_heads_without_a_real_query_have_no_logit_to_clip():
    model = encoder()
    monitor = Monitor(model, BATCHES[0])
    with monitor.clip(0, 1.0) as found:
        model(BATCHES[0], src_key_padding_mask=torch.ones(2, 6, dtype=torch.bool))
    assert bool(found.largest_logits["layers.0.self_attn"].isneginf().all())
    assert found.factors == {}


def test_what_cannot_be_clipped_is_said_before_a_logit_is_too_large():
    """Qwen 3 has one gain for all its normalised queries. An error in a later step would cost the run."""
    pytest.importorskip("transformers")
    model, batch = zoo.fresh("qwen3"), zoo.inputs("qwen3")
    monitor, before = Monitor(model, batch), copy.deepcopy(model.state_dict())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(2):
            with monitor.clip(step, 1e9) as found:
                model(**batch)
            assert len(found.largest_logits) == 3 and found.factors == {}
    sentences = [str(each.message) for each in said if "massieu" in str(each.message)]
    assert len(sentences) == 1
    names = ", ".join(f"layers.{layer}.self_attn" for layer in range(3))
    told = f"massieu.Monitor: clip cannot scale the heads of {names}, and raises an error once a logit there is above"
    assert sentences[0].startswith(told)
    assert "of layers.0.self_attn: " in sentences[0] and "q_norm, whose numbers all heads share" in sentences[0]
    with pytest.raises(ValueError, match="q_norm, whose numbers all heads share"), monitor.clip(2, 1e-3):
        model(**batch)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.filterwarnings("error:massieu")
def test_nothing_is_said_of_what_can_be_clipped():
    model, batch = zoo.fresh("llama"), zoo.inputs("llama")
    with Monitor(model, batch).clip(0, 1e9) as found:
        model(**batch)
    assert len(found.largest_logits) == 3


def test_bad_calls():
    monitor = Monitor(encoder(), BATCHES[0])
    for wrong, error in ((0.0, ValueError), ("high", TypeError)):
        with pytest.raises(error, match="bound must be"), monitor.clip(0, wrong):  # type: ignore[arg-type]
            pass


def llama_with_lora() -> tuple[Any, Any]:
    """A Llama of two layers and grouped keys, and the same with an adapter on queries and keys that is not zero."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=50))
    settings = peft.LoraConfig(target_modules=["q_proj", "k_proj"], r=4, lora_alpha=64, init_lora_weights=False)
    return base, peft.get_peft_model(base, settings)


class LlamaLogits:
    """The largest raw logit of each head that queries and keys of a Llama give, rotated and masked by hand in float64."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @torch.no_grad()
    def of(self, ids: Tensor) -> Tensor:
        inputs: list[Tensor] = []
        layers = self.model.model.layers
        handles = [
            layer.self_attn.register_forward_pre_hook(
                lambda _, __, keywords: inputs.append(keywords["hidden_states"]), with_kwargs=True
            )
            for layer in layers
        ]
        self.model(input_ids=ids)
        for handle in handles:
            handle.remove()
        return torch.stack(
            [self._of_layer(layer.self_attn, states) for layer, states in zip(layers, inputs, strict=True)]
        )

    def _of_layer(self, attention: Any, states: Tensor) -> Tensor:
        query, key = (
            projection(states).double().unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj)
        )
        half = attention.head_dim // 2
        angles = torch.arange(states.shape[1])[:, None] * 10000.0 ** (-torch.arange(half) / half)
        turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex128)
        query, key = (torch.complex(each[..., :half], each[..., half:]) * turn for each in (query, key))
        logits = (query @ key.repeat_interleave(2, 1).conj().mT).real / math.sqrt(attention.head_dim)
        hidden = torch.ones(states.shape[1], states.shape[1]).triu(1).bool()
        return logits.masked_fill(hidden, -torch.inf).amax((0, 2, 3))


def test_lora_is_clipped_with_the_base_weights_below_it():
    base, model = llama_with_lora()
    ids = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(2))
    logits = LlamaLogits(base)
    monitor, before = Monitor(model, {"input_ids": ids}), logits.of(ids)
    bound = float(before[0].median())
    frozen = r"q_proj\.base_layer\.weight is frozen"
    with pytest.warns(UserWarning, match=frozen), pytest.raises(ValueError, match=frozen), monitor.clip(0, bound):
        model(input_ids=ids)
    assert torch.equal(logits.of(ids), before)
    with monitor.clip(1, bound, frozen=True) as found:
        model(input_ids=ids)
    seen = torch.stack(list(found.largest_logits.values()))
    # Products of 8 terms of float32 numbers, which came from sums of 32.
    assert torch.allclose(seen, before, rtol=1e-4)
    assert bool((before[0] > bound).any())
    assert torch.allclose(logits.of(ids)[0], before[0].clamp(max=bound), rtol=1e-4)
    with torch.no_grad():
        merged = model.merge_and_unload()
    assert torch.allclose(LlamaLogits(merged).of(ids)[0], before[0].clamp(max=bound), rtol=1e-4)
