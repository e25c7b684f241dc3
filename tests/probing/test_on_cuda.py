"""What a GPU reads and draws is what the processor does. Without one these tests do not run."""

from concurrent.futures import Future

import numpy as np
import pytest
import torch
import transformers

import massieu
from massieu.probing.model.blueprint import blueprint_of
from massieu.probing.model.drawn import Blueprint
from massieu.probing.model.module_hash import hash_in_background, module_hash
from massieu.probing.reading import joined_calls

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=3, n_head=4, n_embd=64, vocab_size=200, bos_token_id=1, eos_token_id=2)
    return transformers.GPT2Model(config).eval()


def batches() -> list[torch.Tensor]:
    return [torch.randint(3, 200, (4, 32), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


def check_alike(result: massieu.ProbeResult, expected: massieu.ProbeResult) -> None:
    """To the rounding of float32, of which products on a GPU have more."""
    keys = ["site", "head", "statistic"]
    assert result.heads.select(keys).equals(expected.heads.select(keys))
    values = (each.heads["value"].to_numpy() for each in (result, expected))
    np.testing.assert_allclose(*values, rtol=1e-3, atol=1e-4)


def test_calls_that_are_read_together_give_what_each_gives_alone(monkeypatch):
    on_cuda = model().cuda()
    result = massieu.probe(on_cuda, batches(), statistics="quick")
    check_alike(result, massieu.probe(model(), batches(), statistics="quick"))
    monkeypatch.setattr(joined_calls, "DEVICES", frozenset())
    check_alike(result, massieu.probe(on_cuda, batches(), statistics="quick"))
    assert result.run.model.hash == module_hash(on_cuda)


def test_a_hash_is_made_in_the_background():
    on_cuda = model().cuda()
    found = hash_in_background(on_cuda)
    assert isinstance(found, Future) and found.result() == module_hash(on_cuda) == module_hash(model())


def test_weights_are_drawn_from_the_laws_that_the_constructor_draws_from():
    made = blueprint_of(model())
    assert isinstance(made, Blueprint)
    blocks = {"h.0", "h.1", "h.2"}
    _, weights = made.draw(blocks, 3, torch.device("cuda"), torch.float32)
    _, expected = made.draw(blocks, 3, torch.device("cpu"), torch.float32)
    for _, weight in made._weights(blocks):
        found, wanted = weights.of(weight), expected.of(weight)
        assert found.is_cuda and found.shape == wanted.shape
        spread = float(wanted.std()) if wanted.numel() > 1 else 0.0
        # Five standard errors of a mean of normal numbers; constants are the same.
        allowed = 5 * spread / wanted.numel() ** 0.5
        assert abs(float(found.mean()) - float(wanted.mean())) <= 2 * allowed, weight.name
        assert abs(float(found.std()) - spread) <= allowed if spread else torch.equal(found.cpu(), wanted), weight.name


def test_infinite_weights_are_named():
    broken = model().cuda()
    with torch.no_grad():
        broken.get_parameter("h.1.mlp.c_fc.weight")[0, 0] = torch.inf
    result = massieu.probe(broken, batches(), statistics="quick")
    assert result.trouble == "the model is broken: infinity in the weight h.1.mlp.c_fc.weight"
