"""Modules read from hopfield-layers compute what those did: outputs and gradients stored by `data/make_hflayers.py`."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tests.support.rounding import rounding_error
from tests.support.rows import every_row

from massieu import nn

PATH = Path(__file__).parent / "data" / "hflayers.safetensors"


def cases():
    with safe_open(PATH, "pt") as stored:
        keywords = json.loads(stored.metadata()["keywords"])
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    return {name: (given, part(tensors, name)) for name, given in keywords.items()}


def part(tensors, prefix):
    return {name.removeprefix(f"{prefix}/"): t for name, t in tensors.items() if name.startswith(f"{prefix}/")}


CASES = cases()


def read(given, state):
    keywords = {name: value for name, value in given.items() if name != "module"}
    return getattr(nn, given["module"]).from_hflayers(state, **keywords)


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_theirs(name):
    given, tensors = CASES[name]
    module = read(given, part(tensors, "state"))
    inputs = [tensor.requires_grad_() for _, tensor in sorted(part(tensors, "input").items())]
    output = module(inputs[0] if len(inputs) == 1 else tuple(inputs), **part(tensors, "mask"))
    # What converged did so to 1e-10 here and 1e-14 there.
    accuracy = (
        {"rtol": 1e-7, "atol": 1e-7} if given.get("update_steps_max", 0) is None else {"rtol": 1e-9, "atol": 1e-11}
    )
    torch.testing.assert_close(output, tensors["output"], **accuracy)
    gradients = torch.autograd.grad(output.square().sum(), inputs, materialize_grads=True)
    for place, gradient in enumerate(gradients):
        torch.testing.assert_close(gradient, tensors[f"gradient/{place}"], **accuracy)


@every_row("name", ["all sizes differ", "normalised space", "layer with targets", "pooling"])
def test_float32_agrees_to_its_rounding(name):
    given, tensors = CASES[name]
    state, mask = part(tensors, "state"), part(tensors, "mask")
    inputs = [tensor.detach() for _, tensor in sorted(part(tensors, "input").items())]

    def output(*numbers):
        module = read(given, dict(zip(state, numbers, strict=False))).to(numbers[0].dtype)
        rest = numbers[len(state) :]
        return module(rest[0] if len(rest) == 1 else tuple(rest), **mask)

    found = output(*(tensor.float() for tensor in (*state.values(), *inputs)))
    allowed = rounding_error(output, *state.values(), *inputs, dtype=torch.float32)
    error = (found.double() - tensors["output"]).abs()
    assert bool((error <= allowed).all()), (error / allowed).max()


def test_every_parameter_is_read_and_trains():
    given, tensors = CASES["all sizes differ"]
    state = part(tensors, "state")
    module = read(given, state)
    assert sum(p.numel() for p in module.parameters()) == sum(t.numel() for t in state.values())
    assert all(parameter.requires_grad for parameter in module.parameters())
    given, tensors = CASES["layer"]
    assert not read({**given, "trainable": False}, part(tensors, "state")).patterns.requires_grad


def test_a_saved_module_loads_again():
    given, tensors = CASES["connected"]
    state = part(tensors, "state")
    module, other = read(given, state), read(given, {name: torch.zeros_like(t) for name, t in state.items()})
    other.load_state_dict(module.state_dict())
    inputs = tuple(tensor.detach() for _, tensor in sorted(part(tensors, "input").items()))
    assert torch.equal(module(inputs), other(inputs))


BAD = {
    "missing": (lambda state: {}, {}, "lacks association_core.in_proj_bias"),
    "left over": (
        lambda state: state,
        {"normalize_state_pattern": False},
        "do not use: norm_state_pattern.bias, norm_",
    ),
    "heads": (lambda state: state, {"hidden_size": 5}, "18 rows does not split into"),
    "steps": (lambda state: state, {"update_steps_max": torch.ones(2)}, "update_steps_max must be one number"),
    "unknown": (lambda state: state, {"steps": 3}, "unexpected keyword argument 'steps'"),
    "activation": (lambda state: state, {"association_activation": "gulp"}, "name of a function in torch, got 'gulp'"),
}


@every_row(("change", "keywords", "message"), BAD.values(), ids=BAD)
def test_what_does_not_fit_is_named(change, keywords, message):
    given, tensors = CASES["one input"]
    with pytest.raises((ValueError, TypeError), match=message):
        read({**given, **keywords}, change(part(tensors, "state")))
