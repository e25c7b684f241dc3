"""A model's blocks as operators on populations, against the model's own hidden states."""

import copy

import pytest
import torch
from tests.support.probing import zoo
from tests.support.rows import every_row, some_slow

import massieu
from massieu.errors import InputError
from massieu.measures import Gaussian, MissingFormError
from massieu.population import AttentionLayer, FeedForward
from massieu.probing.model.model import load_model


@pytest.mark.medium
@some_slow(("dtype", "tolerance"), [("float64", 1e-10), ("float32", 1e-5)], 1)
def test_minilm_is_the_composition_of_its_blocks(dtype, tolerance):
    """A trained model on real text: after every block, and all six composed."""
    loaded = load_model(massieu.Checkpoint(dtype=dtype))
    layers = massieu.population_layers(loaded.module)
    text = loaded.tokenizer(["Tokens are particles, and a layer moves them all at once."], return_tensors="pt")
    with torch.no_grad():
        states = loaded.module(**text, output_hidden_states=True).hidden_states
        found = list(layers.path(states[0]))
    assert len(found) == 6
    for ours, expected in zip(found, states[1:], strict=True):
        assert ours.dtype == expected.dtype
        assert (ours - expected).abs().max() < tolerance * expected.abs().max()
    one = massieu.population_layers(loaded.module, layer=2)
    with torch.no_grad():
        torch.testing.assert_close(one(states[2]), layers.operators[2](states[2]))
    with pytest.raises(MissingFormError, match="LayerNorm is not affine"):
        layers.gaussian(Gaussian.create(torch.zeros(384), torch.ones(())))


def _with_gains(name: str) -> torch.nn.Module:
    """Norms with random gains and biases."""
    model = copy.deepcopy(zoo.fresh(name, 2.0)).double()
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if "Norm" in type(module).__name__:
            for parameter in module.parameters():
                parameter.data = 1 + 0.5 * torch.randn(parameter.shape, generator=generator).double()
    return model


@every_row(("name", "norm_first"), [("bert", False), ("vit", True), ("albert", False)])
def test_norms_before_and_behind_with_gains_of_their_own(name, norm_first):
    """Trap 35: gains and biases of norms, in float64."""
    model = _with_gains(name)
    layers = massieu.population_layers(model)
    for block in layers.operators:
        attention, feed_forward = block.operators
        assert isinstance(attention, AttentionLayer) and isinstance(feed_forward, FeedForward)
        for part in (attention, feed_forward):
            assert (type(part.normalisation).__name__ == "Normalisation") == norm_first
            assert (type(part.activation).__name__ == "Normalisation") != norm_first
    batch = {key: value.double() if value.is_floating_point() else value for key, value in zoo.inputs(name).items()}
    with torch.no_grad():
        states = model(**batch, output_hidden_states=True).hidden_states
        for ours, expected in zip(layers.path(states[0]), states[1:], strict=True):
            assert (ours - expected).abs().max() < 1e-10 * expected.abs().max()


def test_half_precision():
    model = copy.deepcopy(zoo.fresh("bert", 1.0)).bfloat16()
    layers = massieu.population_layers(model)
    with torch.no_grad():
        states = model(**zoo.inputs("bert"), output_hidden_states=True).hidden_states
        found = layers(states[0])
    assert found.dtype == torch.float32
    assert (found - states[-1]).abs().max() < 0.1 * states[-1].abs().max()


def test_an_encoder_of_two_stacks_alone():
    layers = massieu.population_layers(zoo.model("bart").encoder)
    assert len(layers.operators) == 2


@every_row(
    ("name", "named"),
    [
        ("gpt2", "layer 0 of GPT2Model .* attention is causal"),
        ("llama", "attention is causal"),
        ("modernbert", r"queries depend on the position \(rotary embeddings\)"),  # trap 35
        ("gpt_neox", "added to the tokens in one step"),
        ("bart", "causal"),
        ("swin", "is no operator on a population"),
    ],
)
def test_what_is_no_operator_on_a_population_says_why(name, named):
    with pytest.raises(InputError, match=named):
        massieu.population_layers(zoo.model(name))


@pytest.mark.skipif("t5" not in zoo.MAKERS, reason="this release of transformers does not dispatch T5's attention")
def test_positions_in_scores():
    with pytest.raises(InputError, match="scores have a bias by position"):
        massieu.population_layers(zoo.model("t5").encoder)


def test_padding_and_layers_that_are_not_there():
    model = zoo.model("bert")
    with pytest.raises(InputError, match="tokens do not all see each other"):
        massieu.population_layers(model, data=zoo.inputs("bert", padded=True))
    with pytest.raises(InputError, match=r"layer must be in 0 … 2, got 3"):
        massieu.population_layers(model, layer=3)
    with pytest.raises(InputError, match="Linear does not say what its inputs are; give data"):
        massieu.population_layers(torch.nn.Linear(2, 2).eval())


def test_a_wrong_reading_is_found_out(monkeypatch):
    create = AttentionLayer.create.__func__
    monkeypatch.setattr(
        AttentionLayer,
        "create",
        classmethod(lambda cls, *args, **keywords: create(cls, *args, **(keywords | {"scale": 1.0}))),
    )
    with pytest.raises(InputError, match=r"differs from the module's own output by \d"):
        massieu.population_layers(zoo.model("bert"))


@every_row("name", ["gpt2", "llama", "modernbert"])
def test_one_token_shows_no_order(name):
    with pytest.raises(InputError, match="one token shows neither positions nor an order"):
        massieu.population_layers(zoo.model(name), data={"input_ids": torch.tensor([[5]])})


def test_models_that_are_not_ready():
    with pytest.raises(InputError, match="in training mode"):
        massieu.population_layers(copy.deepcopy(zoo.model("bert")).train())
    with pytest.raises(InputError, match="is on the meta device"):
        massieu.population_layers(copy.deepcopy(zoo.model("bert")).to("meta"))
    for layer in (1.0, True):
        with pytest.raises(InputError, match="layer must be in 0 … 2, got"):
            massieu.population_layers(zoo.model("bert"), layer=layer)
