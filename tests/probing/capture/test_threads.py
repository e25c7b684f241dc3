"""A probe beside other threads: its random numbers are its own, and nobody else uses the model meanwhile."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from tests.support.probing import zoo
from tests.support.rows import every_row

import massieu
from massieu.errors import InputError
from massieu.probing.capture.interface import stock_implementations
from massieu.probing.capture.routes import capturing
from massieu.probing.model.fresh import reinitialised
from massieu.probing.model.seeding import OwnGenerator


def batches(name="bert", number=4):
    return [zoo.inputs(name, seed=10 + i) for i in range(number)]


@contextmanager
def beside(work) -> Iterator[None]:
    """Does some work over and over in another thread, and has done it once before the block begins."""
    end, begun = threading.Event(), threading.Event()

    def repeat() -> None:
        while not end.is_set():
            work()
            begun.set()
            end.wait(1e-4)  # many times within each part of a probe, and not all of a processor

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        assert begun.wait(60)
        yield
    finally:
        end.set()
        thread.join()


def draw() -> None:
    torch.randn(100)
    random.random()
    np.random.standard_normal(100)  # noqa: NPY002 - the process's own generator is what this is about


DRAWS = {
    "normal": lambda: torch.randn(5),
    "uniform": lambda: torch.rand(2, 3),
    "whole numbers": lambda: torch.randint(9, (4,)),
    "from one number to another": lambda: torch.randint(3, 9, (4,)),
    "order": lambda: torch.randperm(7),
    "like another tensor": lambda: torch.randn_like(torch.ones(3)),
    "in place": lambda: torch.empty(5).normal_(2, 3),
    "coins": lambda: torch.bernoulli(torch.full((9,), 0.3)),
    "choices": lambda: torch.multinomial(torch.ones(6), 3),
    "half precision": lambda: torch.randn(4, dtype=torch.bfloat16),
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(20)),
    "a layer": lambda: torch.nn.Linear(3, 4).weight.detach(),
    "truncated": lambda: torch.nn.init.trunc_normal_(torch.empty(4, 4)),
    "orthogonal": lambda: torch.nn.init.orthogonal_(torch.empty(4, 4)),
}


@every_row("name", list(DRAWS))
def test_a_generator_of_its_own_draws_what_a_seeded_process_does(name):
    before = torch.get_rng_state()
    with OwnGenerator(5):
        found = [DRAWS[name](), torch.randn(2)]
    assert torch.equal(torch.get_rng_state(), before), "the global generator is left as it is"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        expected = [DRAWS[name](), torch.randn(2)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.medium
@every_row("name", sorted(zoo.MAKERS))
def test_the_control_is_the_model_that_one_thread_alone_would_draw(name):
    model = zoo.model(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        expected = type(model)(model.config).state_dict()
    with beside(draw):
        copy, _ = reinitialised(model, 3)
    assert copy is not None
    found = copy.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.medium
def test_threads_that_draw_change_no_row_and_are_not_changed():
    model = zoo.model("bert", num_hidden_layers=1)
    before = torch.get_rng_state()
    alone = massieu.probe(model, massieu.Batches(batches(number=1), window=20))
    assert torch.equal(torch.get_rng_state(), before), "no seed is set that another thread would draw from"
    with beside(draw):
        beside_others = massieu.probe(model, massieu.Batches(batches(number=1), window=20))
    assert alone.table.equals(beside_others.table)


@pytest.mark.medium
def test_a_model_that_another_thread_uses_is_not_read():
    model = zoo.fresh("gpt2")
    other = zoo.inputs("gpt2", seed=99, rows=2, length=12)
    with torch.no_grad():
        expected = model(**other)[0]
    found = []

    def call() -> None:
        with torch.no_grad():
            found.append(model(**other)[0])

    def read_often() -> None:
        for _ in range(20):
            massieu.probe(model, massieu.Batches(batches("gpt2", 2), window=20), statistics="quick")

    with beside(call), pytest.raises(InputError, match="another thread used the model") as caught:
        read_often()
    assert "\n" not in str(caught.value)
    for output in found:  # the other thread has the model's own results
        torch.testing.assert_close(output, expected)
    assert stock_implementations(model) == ["sdpa"]
    massieu.probe(
        model, massieu.Batches(batches("gpt2", 1), window=20), statistics="quick"
    )  # alone again, it can be read


def test_one_call_by_another_thread_is_noticed():
    model = zoo.model("bert")
    calls = []

    def read() -> None:
        with torch.no_grad(), capturing(model, calls.append):
            model(**zoo.inputs("bert"))
            thread = threading.Thread(target=lambda: model(**zoo.inputs("bert", rows=1)))
            thread.start()
            thread.join()

    with pytest.raises(InputError, match="another thread"):
        read()
    assert len(calls) == 3, "and its calls are not taken for ours"


def test_a_model_is_probed_once_at_a_time():
    model = zoo.model("bert")
    with capturing(model, lambda call: None), pytest.raises(InputError, match="is being probed already"):
        massieu.probe(model, batches())
    assert stock_implementations(model) == ["sdpa"]


@pytest.mark.slow
def test_two_models_can_be_probed_in_two_threads():
    names = ("bert", "llama")
    how = {"statistics": ["entropy", "climb"]}
    models = {name: zoo.model(name, num_hidden_layers=1) for name in names}
    data = {name: massieu.Batches(batches(name, 1), window=20) for name in names}
    expected = {name: massieu.probe(models[name], data[name], **how) for name in names}
    found = {}
    threads = [
        threading.Thread(target=lambda n=name: found.update({n: massieu.probe(models[n], data[n], **how)}))
        for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in names:
        one, other = expected[name].table, found[name].table
        kept = ~one["statistic"].str.contains("sharpens|q_value")  # shares jump where a sign is at rounding
        assert one.drop("value", "standard_error").equals(other.drop("value", "standard_error"))
        a, b = (table.filter(kept)["value"].to_numpy() for table in (one, other))
        # The number of threads that a product runs on may differ meanwhile, so the last digits may.
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4)
