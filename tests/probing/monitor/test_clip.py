"""QK-clip within the training loop, by the largest logits of the training step's own forward passes."""

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from massieu import InputError, Monitor

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


@torch.no_grad()
def largest(model: Any, *batches: Tensor) -> Tensor:
    """The largest logit of each head, written out in float64."""
    attention = model.layers[0].self_attn
    found = []
    for states in batches:
        projected = states.double() @ attention.in_proj_weight.double().T + attention.in_proj_bias.double()
        query, key, _ = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in projected.chunk(3, -1))
        found.append((query @ key.mT / math.sqrt(WIDTH // HEADS)).amax((0, 2, 3)))
    return torch.stack(found).amax(0)


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


def test_bad_calls():
    monitor = Monitor(torch.compile(encoder()), BATCHES[0])
    with pytest.raises(InputError, match="a compiled model cannot be watched"), monitor.clip(0, 1.0):
        pass
    for wrong, error in ((0.0, ValueError), ("high", TypeError)):
        with pytest.raises(error, match="bound must be"), monitor.clip(0, wrong):  # type: ignore[arg-type]
            pass
