"""Which model is meant: a name, a checkpoint or a module."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.rows import every_row

import massieu
from massieu.errors import InputError
from massieu.probing.model.given import given_model


def test_a_name_is_a_checkpoint_of_which_nothing_else_is_said():
    assert given_model(None) == massieu.Checkpoint()
    assert given_model("gpt2") == massieu.Checkpoint("gpt2")
    assert given_model(Path("gpt2")) == massieu.Checkpoint(Path("gpt2"))
    given = massieu.Checkpoint("gpt2", dtype="bfloat16")
    assert given_model(given) is given
    module = torch.nn.Linear(2, 2)
    assert given_model(module) is module


@every_row(
    "make, words",
    [
        (lambda: given_model(3), "model must be a name, a path, a torch.nn.Module or a massieu.Checkpoint, got 3"),
        (lambda: massieu.Checkpoint(3), "name must be a path, got 3"),
        (lambda: massieu.Checkpoint("a", revision=3), "revision must be a string, got 3"),
        (lambda: massieu.Checkpoint("a", dtype=torch.float32), "dtype must be a string, got dtype"),
        (lambda: massieu.Checkpoint("a", dtype="int8"), "unknown dtype 'int8'; known are float32, bfloat16"),
        (lambda: massieu.Checkpoint(" "), "the model's name is empty; leave it out for the default model"),
        (lambda: massieu.Checkpoint("a", device=1), "device must be a string, got 1"),
        (lambda: massieu.Checkpoint("a", device_map=3), "device_map must be \"auto\" or a mapping"),
        (lambda: massieu.Checkpoint("a", device="cpu", device_map={"": "cpu"}), "either a device or a device map"),
        (lambda: massieu.Checkpoint("a", adapter=3), "adapter must be a path, got 3"),
        (lambda: massieu.Checkpoint("a", trust_remote_code="yes"), "trust_remote_code must be True or False"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_one_sentence(make: Callable[[], Any], words):
    with pytest.raises(InputError, match=words):
        make()


def test_a_record_says_how_a_model_was_loaded():
    said = {"device": None, "dtype": "bfloat16", "revision": "a", "trust_remote_code": False, "device_map": None}
    assert massieu.Checkpoint("gpt2", dtype="bfloat16", revision="a").settings() == said
    assert massieu.Checkpoint("gpt2", dtype="bfloat16", revision="a", adapter=Path("b")).settings() == said | {
        "adapter": "b"
    }
