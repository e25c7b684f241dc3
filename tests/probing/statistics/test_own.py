"""Statistics of the user's own: in the tables as explicit weights say, beside their controls, and known to one run alone."""

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars
import pytest
import torch
from scipy.stats import t as student
from tests.support.command_line import assert_bad, checkpoint, run
from tests.support.probing import oracle, zoo
from torch import Tensor

import massieu
from massieu.errors import InputError
from massieu.probing.statistics.own_files import named
from massieu.probing.statistics.registry import STATISTICS

__all__ = ["checkpoint"]  # a fixture

BATCHES = [zoo.inputs("gpt2", seed=seed) for seed in range(4)]


@massieu.statistic(formula="Σ p_j, |i − j| ≤ 3", scale="share")
def nearby(reading):
    """How much attention goes to the three nearest tokens?"""
    return reading.weight_where(lambda query, key: (query - key).abs() <= 3)


def windows(batches: Iterable[dict[str, Tensor]]) -> massieu.Batches:
    return massieu.Batches(batches, window=20)


def weights(name: str, batch: dict[str, Tensor]) -> list[Tensor]:
    """Of every layer, from scores in float64."""
    return [layer["scores"].softmax(-1) for layer in oracle.attention_of(name, batch)]


def near(ids: Tensor) -> Tensor:
    places = torch.arange(ids.shape[-1])
    return torch.where((places[:, None] - places).abs() <= 3, ids, 0.0).sum(-1)


def values(result, name: str) -> np.ndarray:
    table = result.heads.filter(polars.col("statistic") == name)
    return table.sort("layer", "head")["value"].to_numpy()


def explicit(batches, of=near, name="gpt2") -> np.ndarray:
    """Means over the real queries of all batches, a number for each head of each layer."""
    sums: Tensor | int = 0
    count: Tensor | int = 0
    for batch in batches:
        real = batch["attention_mask"].bool()[:, None]
        numbers = torch.stack([of(layer) for layer in weights(name, batch)])
        sums = sums + torch.where(real, numbers, 0.0).sum((1, 3))
        count = count + real.sum()
    return (sums / count).flatten().numpy()


@pytest.fixture(scope="module")
def probed():
    return massieu.probe(zoo.model("gpt2"), windows(BATCHES), statistics=["entropy", nearby], draws=4)


@pytest.mark.medium
def test_it_is_in_the_tables_beside_the_packages_own(probed):
    np.testing.assert_allclose(values(probed, "nearby"), explicit(BATCHES), rtol=1e-5)
    names = {*probed.heads["statistic"]}
    parts = ("first_half", "second_half", "reinitialised", "p_value", "q_value")
    assert {f"nearby/{part}" for part in parts} <= names
    (message,) = (each for each in probed.run.statistics if each.name == "nearby")
    assert (message.title, message.question) == ("Nearby", "How much attention goes to the three nearest tokens?")
    assert probed.run.settings["statistics"] == ["entropy", "nearby"]
    assert "Σ p_j, |i − j| ≤ 3" in probed._page()
    assert "nearby" not in STATISTICS


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_padding_and_a_sample_of_queries_change_no_mean(name):
    batch = zoo.inputs(name, padded=True)
    result = massieu.probe(zoo.model(name), windows([batch]), statistics=[nearby], draws=0)
    np.testing.assert_allclose(values(result, "nearby"), explicit([batch], name=name), rtol=1e-5)
    some = massieu.probe(zoo.model(name), windows([batch] * 32), statistics=[nearby], draws=0, query_sample=7)
    rows = some.heads.filter(polars.col("statistic") == "nearby").sort("layer", "head")
    assert (rows["count"] < 32 * int(batch["attention_mask"].sum())).all()
    bound = student.ppf(1 - 1e-6, some.run.error_unit.degrees)
    assert (np.abs(rows["value"] - values(result, "nearby")) < bound * rows["standard_error"]).all()


def other_heads_keys(reading):
    return replace(reading, call=replace(reading.call, key=reading.call.key.roll(1, dims=1)))


def flipped_values(window):
    return replace(window, call=replace(window.call, value=window.call.value.flip(2)))


@massieu.statistic(of="window", scale="positive", control=flipped_values)
def first_value(window):
    """How large is the value at the first place?"""
    return window.call.value[0, :, 0].norm(dim=-1), torch.ones(window.call.value.shape[1])


def nothing_happens(before, after):
    return before, before


@massieu.statistic(of="step", control=nothing_happens, scale="positive")
def moved(before, after):
    """How far does a token move?"""
    return (after - before).norm(dim=-1)


@massieu.statistic(scale="share", control=other_heads_keys, moments=["max_weight"])
def strongest(reading):
    """How large is the largest weight?"""
    return reading.moments.max_weight


@pytest.mark.medium
def test_a_control_of_ones_own_stands_beside_each_kind():
    batches = [zoo.inputs("gpt2", seed=seed, rows=2) for seed in range(2)]  # four windows, which are all sampled
    result = massieu.probe(zoo.model("gpt2"), windows(batches), statistics=[strongest, first_value, moved], draws=2)
    layers = [layer for batch in batches for layer in oracle.attention_of("gpt2", batch)]

    def over_batches(each: list[Tensor]) -> Tensor:
        """A number for each head of each layer, from (B, H) of each layer of each batch."""
        half = len(each) // 2
        return torch.stack([torch.cat(pair).mean(0) for pair in zip(each[:half], each[half:], strict=True)]).flatten()

    crossed = []
    for layer in layers:
        scores = layer["query"] @ layer["key"].roll(1, dims=1).mT / layer["key"].shape[-1] ** 0.5
        crossed.append(scores.masked_fill(layer["scores"].isneginf(), -torch.inf).softmax(-1).amax(-1).mean(-1))
    expected = {
        "strongest": [layer["scores"].softmax(-1).amax(-1).mean(-1) for layer in layers],
        "strongest/other_heads_keys": crossed,
        "first_value": [layer["value"][:, :, 0].norm(dim=-1) for layer in layers],
        "first_value/flipped_values": [layer["value"][:, :, -1].norm(dim=-1) for layer in layers],
    }
    for name, each in expected.items():
        np.testing.assert_allclose(values(result, name), over_batches(each), rtol=1e-5, err_msg=name)
    steps = {name: part["value"] for (name,), part in result.layers.partition_by("statistic", as_dict=True).items()}
    assert (steps["moved/nothing_happens"] == 0).all() and (steps["moved"] > 0).all()


def test_two_runs_may_have_two_functions_of_one_name():
    """As where a cell of a notebook is run again; and a later run knows of neither."""

    def half(reading):
        return 0.5 + 0 * reading.log_partition

    numbers = []
    for each in (massieu.statistic(name="mine")(half), massieu.statistic(name="mine")(lambda r: 0 * r.log_partition)):
        result = massieu.probe(zoo.model("bert"), [zoo.inputs("bert")], statistics=[each], draws=0)
        numbers.append(values(result, "mine"))
    assert (numbers[0] == 0.5).all() and (numbers[1] == 0).all()
    with pytest.raises(InputError, match="unknown statistic 'mine'"):
        massieu.probe(zoo.model("bert"), [zoo.inputs("bert")], statistics=["mine"])


def two_arguments(reading, more):
    return reading.log_partition


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: massieu.statistic(name="entropy")(near), "entropy is the name of one of the package's own statistics"),
        (
            lambda: massieu.statistic(name="a b")(near),
            "a statistic's name must be a valid name of a function, got 'a b'",
        ),
        (
            lambda: massieu.statistic(two_arguments),
            r"two_arguments\(reading, more\) is called with one argument, a Query",
        ),
        (
            lambda: massieu.statistic(of="step")(near),
            "is called with two arguments, the tokens before and after a step",
        ),
        (lambda: massieu.statistic(of="heads")(near), "of must be 'queries', 'window' or 'step', got 'heads'"),
        (
            lambda: massieu.statistic(scale="logit")(near),
            "scale must be 'share', 'positive' or 'number', got 'logit'",
        ),
        (lambda: massieu.statistic(smallest=0.0)(near), "smallest must be positive and finite, got 0.0"),
        (lambda: massieu.statistic(smallest=-1.0)(near), "smallest must be positive and finite, got -1.0"),
        (lambda: massieu.statistic(moments=["largest"])(near), "'largest' is not a moment; the moments are "),
        (lambda: massieu.statistic(of="window", moments=["entropy"])(near), "moments are for statistics of queries"),
        (
            lambda: massieu.statistic(control="shuffled")(near),
            "control must be 'reinitialised', None, or a named function",
        ),
        (
            lambda: massieu.statistic(control=lambda reading: reading)(near),
            "control must be 'reinitialised', None, or a",
        ),
        (
            lambda: massieu.statistic(3),
            "a statistic is a name, a function or what massieu.statistic makes of one, got int 3",
        ),
    ],
    ids=lambda each: None,
)
def test_an_invalid_statistic_is_refused_when_it_is_made(make, message):
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize(
    ("statistics", "message"),
    [
        ([nearby, nearby], "two statistics are called nearby; give one of them another name"),
        ([nearby, massieu.statistic(name="nearby")(near)], "two statistics are called nearby"),
        ([3], "a statistic is a name, a function or what massieu.statistic makes of one, got int 3"),
        ([massieu.Group], "the group Group needs a name, one word"),
        ([], "no statistic was named"),
        (iter(()), "no statistic was named"),
    ],
    ids=["twice", "one name", "a number", "no group", "nothing", "an empty iterator"],
)
def test_an_unknown_statistic_is_refused_before_the_model_is_read(statistics, message):
    with pytest.raises(InputError, match=message):
        massieu.probe(torch.nn.Linear(2, 2), [torch.ones(1, 2)], statistics=statistics)


def of_reading(function):
    return massieu.statistic(name="mine", scale="share")(function)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda reading: reading.nowhere,
            r"it raised AttributeError: 'QueryReading' object has no attribute 'nowhere' \(test_own",
        ),
        (lambda reading: 1.0, r"it returned 1.0; needed is a tensor of shape \(B, H, L\) = \(3, 4, 20\)"),
        (lambda reading: reading.log_partition[0], r"it returned a tensor of shape \(4, 20\); needed is"),
        (lambda reading: reading.log_partition, "outside of 0 to 1, and its scale is 'share'"),
        (lambda reading: (1, 2), r"it returned \(1, 2\); needed is"),
        (lambda reading: torch.complex(reading.log_partition, reading.log_partition), "it returned complex numbers"),
        (lambda reading: reading.weight_where(lambda query, key: query.nowhere), r"AttributeError.*line \d+\)"),
    ],
    ids=["raises", "a float", "no batch", "no share", "no tensors", "complex", "inside"],
)
def test_a_function_that_does_not_work_ends_the_run_with_the_first_batch(function, message):
    read = []

    def batches():
        for _ in range(3):
            read.append(None)
            yield zoo.inputs("bert")

    with pytest.raises(InputError, match="the statistic mine does not work on the first batch: .*" + message):
        massieu.probe(zoo.model("bert"), batches(), statistics=[of_reading(function)], draws=0)
    assert len(read) == 1


def test_a_function_that_fails_later_costs_its_own_numbers_alone():
    calls = []

    def failing(reading):
        calls.append(None)
        if len(calls) > 4:
            raise ArithmeticError("no more")
        return reading.moments.entropy

    batches = [zoo.inputs("bert", seed=seed) for seed in range(3)]
    result = massieu.probe(zoo.model("bert"), batches, statistics=["entropy", failing], draws=0)
    alone = massieu.probe(zoo.model("bert"), batches, statistics=["entropy"], draws=0)
    assert result.heads.equals(alone.heads)
    (lost,) = result.run.unavailable
    assert lost.statistic == "failing" and "it raised ArithmeticError: no more (test_own.py, line" in lost.reason
    assert any("failing could not be computed and is left out" in warning for warning in result.run.warnings)


def test_not_a_number_says_that_it_is_not_defined():
    def odd(reading):
        return torch.where(reading.positions % 2 == 1, reading.moments.entropy, torch.nan)

    batch = zoo.inputs("gpt2")
    result = massieu.probe(zoo.model("gpt2"), windows([batch]), statistics=[odd], draws=0)
    expected = []
    for layer in weights("gpt2", batch):
        entropy = torch.special.entr(layer).sum(-1)[:, :, 1::2]
        expected.append(entropy.mean((0, 2)))
    np.testing.assert_allclose(values(result, "odd"), torch.cat(expected).numpy(), rtol=1e-5)
    counts = result.heads.filter(polars.col("statistic") == "odd")["count"]
    assert (counts == 30).all()


@pytest.mark.medium
def test_every_token_and_a_comparison_have_it():
    result = massieu.probe(zoo.model("gpt2"), windows(BATCHES[:2]), statistics=[nearby], draws=0, per_token=True)
    rows = result.tokens(1, 2)
    np.testing.assert_allclose(rows["nearby"].mean(), explicit(BATCHES[:2])[4 + 2], rtol=1e-5)
    sharper = zoo.fresh("gpt2", sharpness=8.0)
    comparison = massieu.compare(zoo.model("gpt2"), sharper, data=windows(BATCHES), statistics=[nearby], draws=2)
    differences = comparison.differences.filter(polars.col("statistic") == "nearby")
    assert differences.height == 12 and differences["standard_error"].is_finite().all()


@pytest.mark.medium
def test_a_run_is_gone_on_with_by_the_same_code_alone(tmp_path):
    batches = [zoo.inputs("gpt2", seed=seed) for seed in range(6)]
    whole = massieu.probe(zoo.model("gpt2"), windows(batches), statistics=[nearby], draws=2)

    def stopped():
        for number, batch in enumerate(batches):
            if number == 4:
                raise ConnectionError("the text ends here")
            yield batch

    run, again = (massieu.Run(tmp_path, resume=resume, store_every=1e-9) for resume in (False, True))
    with pytest.raises(ConnectionError):
        massieu.probe(zoo.model("gpt2"), windows(stopped()), statistics=[nearby], draws=2, run=run)
    other = massieu.statistic(name="nearby", scale="share")(lambda reading: reading.weight_at_first())
    with pytest.raises(InputError, match="is of a run in which the code of nearby was another; give the"):
        massieu.probe(zoo.model("gpt2"), windows(batches), statistics=[other], draws=2, run=again)
    result = massieu.probe(zoo.model("gpt2"), windows(batches), statistics=[nearby], draws=2, run=again)
    assert result.table.equals(whole.table)


def test_a_digest_depends_on_code_and_on_the_values_that_it_uses():
    def within(number, chosen=(), *, factor=1.0):
        def inside(reading):
            return factor * reading.weight_where(lambda query, key: (query - key).abs() <= number)

        def other(reading):
            return inside(reading) + reading.weight_on(chosen)

        return massieu.statistic(name="mine")(other).digest()

    ten, ids = within(10, torch.tensor([1, 2])), torch.tensor([1, 3])
    assert ten == within(10, torch.tensor([1, 2]))
    assert (
        len({ten, within(11, torch.tensor([1, 2])), within(10, ids), within(10, ids, factor=2.0), within(10, {3})}) == 5
    )
    unread = {"massieu": massieu}
    codes = []
    for text in ("p in {'a', 'b'}", "p in {'b', 'a'}", "p in {'a', 'c'}"):
        exec(f"def mine(p): return {text}", unread)  # no source to read
        codes.append(massieu.statistic(unread["mine"]).digest())
    assert codes[0] == codes[1] != codes[2]


@pytest.mark.medium
def test_new_tokens_have_it():
    """Of one new token after a prompt: the query that it came of is the prompt's last, beside explicit weights."""
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel(zoo.model("gpt2").config).eval()
    model.transformer.load_state_dict(zoo.fresh("gpt2").state_dict())
    batch = {name: value[:1] for name, value in zoo.inputs("gpt2").items()}
    result = massieu.probe(model, massieu.Batches([batch], continue_for=1), statistics=[nearby])
    expected = torch.stack([near(layer)[0, :, -1] for layer in weights("gpt2", batch)]).flatten()
    np.testing.assert_allclose(values(result, "nearby"), expected, rtol=1e-5)


HEADS = """
import massieu

@massieu.statistic(scale="share")
def nearby(reading):
    return reading.weight_where(lambda query, key: (query - key).abs() <= 3)

def plain(reading):
    return reading.moments.entropy

number = 3
"""


@pytest.fixture
def heads(tmp_path) -> Path:
    (tmp_path / "heads.py").write_text(HEADS)
    return tmp_path / "heads.py"


def test_the_command_line_takes_a_function_of_a_file(heads):
    ran = run("statistics", f"{heads}:nearby", "entropy")
    assert ran.exit_code == 0, ran.output
    assert "nearby" in ran.output and "entropy" in ran.output


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("heads.py:absent", "has nothing called absent; its statistics are nearby"),
        ("heads.py:number", "a statistic is a name, a function or what massieu.statistic makes of one, got int 3"),
        ("heads.py", "a statistic of a file is named FILE.py:NAME, got '"),
        ("nowhere.py:nearby", "there is no file "),
        ("broken.py:nearby", "cannot be run: SyntaxError: invalid syntax (broken.py, line 1)"),
        ("raising.py:nearby", "cannot be run: KeyError: 'x' (raising.py, line 2)"),
    ],
    ids=["no such name", "no function", "no name", "no file", "no Python", "raises"],
)
def test_a_name_that_a_file_does_not_have_is_one_sentence(heads, name, message):
    (heads.parent / "broken.py").write_text("def (:")
    (heads.parent / "raising.py").write_text("\n{}['x']\n")
    with pytest.raises(InputError, match=re.escape(message)):
        named([f"{heads.parent}/{name}"])
    assert_bad(run("statistics", f"{heads.parent}/{name}"), re.escape(message))


@pytest.mark.medium
def test_the_command_probes_with_it(heads, tmp_path, checkpoint):
    out = tmp_path / "result"
    arguments = ["probe", checkpoint, "--statistics", f"entropy,{heads}:nearby", "--out", out]
    ran = run(*arguments, "--max-tokens", 200, "--max-length", 20, "--draws", 2)
    assert ran.exit_code == 0, ran.output
    message = json.loads((out / "run.json").read_text())
    assert message["settings"]["statistics"] == ["entropy", "nearby"]
    assert "nearby" in (out / "report.html").read_text()
