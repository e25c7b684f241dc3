"""What users' own statistics may do wrong: each is one sentence, or changes nothing but its own numbers."""

import importlib
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import polars
import pytest
import torch
from tests.support.probing import zoo
from tests.support.rows import every_row

import massieu
from massieu.errors import InputError
from massieu.probing import Ratio, RatioParts, RowPlace, Statistic, mean_over_queries, rows_of
from massieu.probing.reading import per_token
from massieu.probing.result import long_table
from massieu.probing.statistics import own as own_file
from massieu.probing.statistics.own_files import named

BATCHES = [zoo.inputs("gpt2", seed=seed) for seed in range(2)]
BERT = [zoo.inputs("bert")]


def values(result, name: str) -> np.ndarray:
    return result.heads.filter(polars.col("statistic") == name).sort("layer", "head")["value"].to_numpy()


def mine(function, **said: Any):
    return massieu.statistic(name="mine", **said)(function)


# --- calls -----------------------------------------------------------------------------------------------------------


def parts_of_a_ratio() -> RatioParts:
    ratio = Ratio((2,))
    ratio.update(np.ones((3, 2)), np.ones((3, 2)))
    return RatioParts(ratio)


PLACE = RowPlace("head", "attention", 0, 0)
GROUP: Any = massieu.Group()
CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "ratio": (lambda: RatioParts(object()), "ratio must be a massieu.probing.Ratio, got object"),
    "part": (
        lambda: parts_of_a_ratio().at(0, "third"),
        "part must be 'estimate', 'first_half' or 'second_half', got 'third'",
    ),
    "a word as index": (lambda: parts_of_a_ratio().at("x"), r"index must pick entries of .* shape \(2,\), got 'x'"),
    "a large index": (lambda: parts_of_a_ratio().tested(10**30), r"index must pick entries of .* shape \(2,\)"),
    "an index on meta": (lambda: parts_of_a_ratio().tested(torch.ones(2, device="meta")), "index must pick entries"),
    "place": (lambda: list(rows_of(7, "mine", parts_of_a_ratio(), 0)), "place must be a massieu.probing.RowPlace"),
    "statistic": (lambda: list(rows_of(PLACE, 7, parts_of_a_ratio(), 0)), "statistic must be a string, got 7"),
    "parts": (lambda: list(rows_of(PLACE, "mine", print, 0)), "parts must be a massieu.probing.RatioParts"),
    "values": (lambda: mean_over_queries(object()), "values must be a floating-point tensor, got object"),
    "begin": (lambda: GROUP.begin({}), "model must be what a group is begun with, got dict"),
    "measures": (lambda: GROUP.measures(np.zeros(2)), "name must be a string"),
    "missing": (lambda: GROUP.missing("here", "mine", 7), "reason must be a string, got 7"),
    "is_missing": (lambda: GROUP.is_missing(None, "mine"), "place must be a string"),
    "missing_at": (lambda: GROUP.missing_at(int), "place must be a string, got type"),
    "scale": (lambda: Statistic("mine", scale=None), "scale must be a string, got NoneType"),
    "signed": (lambda: Statistic("mine", signed=1), "signed must be True or False, got int"),
    "smallest": (lambda: Statistic("mine", smallest=True), "smallest must be a number, got bool"),
    "own signed": (lambda: massieu.statistic(signed=None), "signed must be True or False, got None"),
    "own unit": (lambda: massieu.statistic(unit=7), "unit must be a string, got 7"),
    "own of": (lambda: massieu.statistic(of=[1]), "of must be 'queries', 'window' or 'step', got list"),
    "own scale": (
        lambda: massieu.statistic(scale="logit"),
        "scale must be 'share', 'positive' or 'number', got 'logit'",
    ),
    "own smallest": (lambda: massieu.statistic(smallest=print), "smallest must be a number, got builtin"),
    "own control": (
        lambda: massieu.statistic(control=()),
        "control must be 'reinitialised', None, or a named function",
    ),
    "own moments": (lambda: massieu.statistic(moments=2.0), "moments must be a list or another iterable, got 2.0"),
}


@every_row(("call", "message"), CALLS.values(), ids=CALLS)
def test_arguments_of_the_wrong_kind_are_named(call, message):
    with pytest.raises(InputError, match=message):
        call()


# --- digests ---------------------------------------------------------------------------------------------------------

WIDTH = 3


def inside(reading):
    return reading.weight_where(lambda query, key: (query - key).abs() <= WIDTH)


class Within:
    def __init__(self, width: int) -> None:
        self.width = width

    def measure(self, reading):
        return reading.weight_where(lambda query, key: (query - key).abs() <= self.width)


def by_default(width: int):
    def function(reading, width=width):
        return reading.weight_where(lambda query, key: (query - key).abs() <= width)

    return function


def taking(value: object):
    def function(reading):
        return reading.weight_on(value)

    return mine(function).digest()


def test_a_digest_depends_on_inner_functions_and_on_the_objects_of_methods(monkeypatch):
    before = mine(inside).digest()
    monkeypatch.setitem(globals(), "WIDTH", 8)
    assert mine(inside).digest() != before
    assert mine(Within(1).measure).digest() != mine(Within(2).measure).digest()
    assert mine(Within(1).measure).digest() == mine(Within(1).measure).digest()
    assert mine(by_default(1)).digest() != mine(by_default(2)).digest()
    first, second = (lambda reading: reading.moments.entropy), (lambda reading: 2 * reading.moments.entropy)
    assert mine(lambda reading: first(reading)).digest() != mine(lambda reading: second(reading)).digest()


def test_a_digest_tells_values_of_every_kind_apart():
    kinds = (
        np.arange(3),
        np.arange(4),
        range(3),
        slice(3),
        np.float32(1),
        {"a": 1},
        torch.float16,
        Within(1),
        Within(2),
    )
    assert len({taking(each) for each in kinds}) == len(kinds)
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    complex_numbers = torch.ones(2, dtype=torch.cfloat)
    for odd in (cyclic, torch.ones(2).to_sparse(), torch.ones(2, device="meta"), complex_numbers.conj()):
        assert taking(odd) == taking(odd)


def test_the_code_of_a_statistic_is_told_wherever_it_is_installed(monkeypatch, tmp_path):
    """A package's own functions, beside those of other packages, of which a name is told; and a notebook's."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    digests = []
    for width in (3, 4):
        (folder / "installed_heads.py").write_text(f"def inner(r): return {width}\ndef measure(r): return inner(r)\n")
        importlib.invalidate_caches()
        monkeypatch.delitem(sys.modules, "installed_heads", raising=False)
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        digests.append(mine(importlib.import_module("installed_heads").measure).digest())
    assert digests[0] != digests[1]
    notebook: dict[str, Any] = {"__name__": "__main__"}
    exec("def measure(r): return 1", notebook)
    before = mine(notebook["measure"]).digest()
    exec("def measure(r): return 2", notebook)
    assert mine(notebook["measure"]).digest() != before


def test_moments_may_be_given_by_an_iterator():
    statistic = mine(lambda reading: reading.moments.max_weight, moments=iter(["max_weight"]))
    assert statistic.moments == ("max_weight",)


def test_the_names_that_are_refused_are_those_of_the_tables():
    """Of the table for each token, of the long tables, and what stands behind a statistic's name in them."""
    assert {*per_token._KEYS, *long_table.COLUMNS} <= {*own_file.COLUMNS, "standard_error"}
    result = massieu.probe(
        zoo.model("gpt2"), massieu.Batches(BATCHES * 2, window=20), statistics=["attention"], draws=2
    )
    parts = {name.partition("/")[2] for name in result.table["statistic"]} - {""}
    assert {part for part in parts if not part.startswith(("position_", "visible_keys_"))} <= {*own_file.PARTS}


# --- numbers that would be wrong without a word ----------------------------------------------------------------------


@pytest.mark.medium
def test_documents_of_a_row_have_a_first_token_each():
    """Two documents in one row, told apart by their positions, beside each by itself."""
    model = zoo.model("llama")
    ids = zoo.inputs("llama", rows=1)["input_ids"]
    places = torch.cat([torch.arange(8), torch.arange(12)])[None]
    batch = {"input_ids": ids, "position_ids": places, "use_cache": False}
    first = mine(lambda reading: reading.weight_at_first(), scale="share")
    result = massieu.probe(model, [batch], statistics=[first, "weight_first"], draws=0)
    apart = [{"input_ids": part} for part in ids.split([8, 12], dim=1)]
    alone = [massieu.probe(model, [each], statistics=["weight_first"], draws=0) for each in apart]
    expected = (8 * values(alone[0], "weight_first") + 12 * values(alone[1], "weight_first")) / 20
    np.testing.assert_allclose(values(result, "weight_first"), expected, rtol=1e-4)
    np.testing.assert_allclose(values(result, "mine"), expected, rtol=1e-4)


def scaled(factor: float):
    def control(window):
        return replace(window, call=replace(window.call, value=window.call.value * factor))

    return control


@pytest.mark.medium
def test_controls_of_one_name_are_each_ones_own():
    def size(window):
        return window.call.value[0, :, 0].norm(dim=-1), torch.ones(4)

    statistic = [
        massieu.statistic(of="window", name=name, control=scaled(f))(size) for name, f in (("a", 2.0), ("b", 5.0))
    ]
    result = massieu.probe(zoo.model("gpt2"), massieu.Batches(BATCHES, window=20), statistics=statistic, draws=2)
    np.testing.assert_allclose(values(result, "a/control"), 2 * values(result, "a"), rtol=1e-6)
    np.testing.assert_allclose(values(result, "b/control"), 5 * values(result, "b"), rtol=1e-6)


@pytest.mark.parametrize(
    ("statistic", "message"),
    [
        (mine(lambda r: r.moments.entropy.mul_(2)), "it changed a tensor that it was given, in place"),
        (mine(lambda r: r.weight_where(lambda q, k: 2 * (q >= k))), "keys are chosen by True and False"),
        (
            mine(lambda r: r.expected_of_keys(torch.ones(3, 20))),
            r"numbers of keys have shape \(B, H, N\) = \(3, 4, 20\)",
        ),
        (
            mine(lambda w: (w.call.value.mul_(2)[0, :, 0, 0], torch.ones(4)), of="window"),
            "changed a tensor that it was given",
        ),
        (mine(lambda w: (3 * torch.ones(4), torch.ones(4)), of="window", scale="share"), "outside of 0 to 1"),
        (mine(lambda w: (torch.ones(4), -torch.ones(4)), of="window"), "what its sum is divided by is negative"),
        (mine(lambda w: torch.ones(4), of="window"), "needed is a sum and what it is divided by, two tensors"),
        (mine(lambda before, after: -3.0, of="step", scale="share"), "outside of 0 to 1"),
        (mine(lambda before, after: before[:2, 0], of="step"), "needed is one number, or one for each of the"),
    ],
    ids=[
        "in place",
        "numbers",
        "shape",
        "window in place",
        "window share",
        "divisor",
        "no pair",
        "step share",
        "some tokens",
    ],
)
def test_numbers_that_would_be_wrong_without_a_word_are_refused(statistic, message):
    with pytest.raises(InputError, match="does not work on the first batch: .*" + message):
        massieu.probe(zoo.model("bert"), BERT, statistics=["entropy", statistic], draws=0)


def test_each_function_of_a_step_has_tokens_of_its_own():
    def spoiling(before, after):
        return after.sub_(before).norm(dim=-1)

    def honest(before, after):
        return (after - before).norm(dim=-1)

    statistic = [massieu.statistic(of="step")(each) for each in (spoiling, honest)]
    layers = massieu.probe(zoo.model("bert"), BERT, statistics=statistic, draws=0).layers
    steps = {name: part["value"].to_list() for (name,), part in layers.partition_by("statistic", as_dict=True).items()}
    assert steps["spoiling"] == steps["honest"]


def test_a_share_is_looked_at_where_tokens_are_real():
    def of_length(reading):
        return reading.expected(lambda query, key: query) / (reading.keys.real.sum(1)[:, None, None] - 1)

    batch = zoo.inputs("bert", padded=True)
    result = massieu.probe(zoo.model("bert"), [batch], statistics=[mine(of_length, scale="share")], draws=0)
    assert (values(result, "mine") <= 1).all()


def test_a_statistic_that_is_defined_nowhere_is_reported():
    nowhere = mine(lambda reading: torch.nan * reading.log_partition)
    result = massieu.probe(zoo.model("bert"), BERT, statistics=["entropy", nowhere], draws=0)
    assert any("mine has no number: it was defined nowhere" in warning for warning in result.run.warnings)


@pytest.mark.parametrize("name", ["layer", "head", "token_id", "position", "window"])
def test_names_of_columns_are_refused(name):
    with pytest.raises(InputError, match=f"{name} is the name of a column of the tables"):
        massieu.statistic(name=name)(inside)


def p_value(reading):
    return reading


def test_names_of_other_rows_and_of_the_monitors_quantities_are_refused():
    with pytest.raises(InputError, match="p_value is the name of another row of the tables"):
        mine(inside, control=p_value)
    statistic = massieu.statistic(name="largest_logit")(inside)
    with pytest.raises(InputError, match="largest_logit is the name of one of the monitor's own quantities"):
        massieu.Monitor(zoo.model("gpt2"), BATCHES[0], statistics=[statistic])
    with pytest.raises(InputError, match="statistics must be a list of names and functions"):
        massieu.Monitor(zoo.model("gpt2"), BATCHES[0], statistics=inside)  # pyright: ignore[reportArgumentType]


# --- groups ----------------------------------------------------------------------------------------------------------


def group_of(**parts: Any) -> type[massieu.Group]:
    message = (massieu.probing.Statistic("mine", group="own_group", scope="head"),)
    attributes = {
        "name": "own_group",
        "statistics": message,
        "events": frozenset({massieu.probing.Event.CALLS}),
    } | parts
    return type("Own", (massieu.Group,), attributes)


def rows_named(name: str, times: int = 1):
    def rows(self):
        for info in self.model.sites:
            for _ in range(times):
                mean = massieu.probing.Ratio((info.heads,), self.model.units)
                mean.update(np.ones((1, info.heads)), np.ones((1, info.heads)))
                parts = massieu.probing.RatioParts(mean)
                yield from massieu.probing.rows_of(massieu.probing.RowPlace.of_site(info), name, parts, slice(None))

    return rows


def failing_rows(self):
    raise ArithmeticError("no rows")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (rows_named("entropy"), "it has a row of entropy, which is none of its statistics"),
        (rows_named("mine", times=2), "it has two rows of mine at"),
        (failing_rows, r"it raised ArithmeticError: no rows \(test_own_hostile.py, line"),
        (lambda self: None, "it raised TypeError"),
    ],
    ids=["another's", "twice", "raises", "nothing"],
)
def test_a_group_whose_rows_are_wrong_costs_itself_alone(rows, message):
    result = massieu.probe(zoo.model("bert"), BERT, statistics=["entropy", group_of(rows=rows)], draws=0)
    assert len(values(result, "entropy")) == result.run.model.heads
    (lost,) = result.run.unavailable
    assert lost.statistic == "own_group"
    assert re.search(message, lost.reason)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"events": {"calls"}}, "needs events, a frozenset of massieu.probing.Event"),
        ({"name": "two words"}, "needs a name, one word"),
        ({"statistics": ()}, r"needs statistics, a tuple of massieu\.probing\.Statistic"),
    ],
    ids=["events", "name", "statistics"],
)
def test_a_group_that_says_too_little_is_refused(parts, message):
    with pytest.raises(InputError, match=message):
        massieu.probe(zoo.model("bert"), BERT, statistics=[group_of(**parts)])


def test_a_group_that_fails_in_the_first_batch_ends_the_run():
    def on_call(self, call, tokens):
        raise KeyError("x")

    with pytest.raises(
        InputError, match="the statistic own_group does not work on the first batch: it raised KeyError"
    ):
        massieu.probe(zoo.model("bert"), BERT, statistics=[group_of(on_call=on_call)])


def test_two_groups_with_one_statistic_are_refused():
    message = (massieu.probing.Statistic("mine", group="another", scope="head"),)
    with pytest.raises(InputError, match="two statistics are called mine"):
        massieu.probe(zoo.model("bert"), BERT, statistics=[group_of(), group_of(name="another", statistics=message)])


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_file_may_import_its_neighbours(tmp_path):
    (tmp_path / "beside_heads.py").write_text("WIDTH = 3")
    (tmp_path / "importing.py").write_text("from beside_heads import WIDTH\ndef found(reading): return WIDTH")
    (given,) = named([f"{tmp_path}/importing.py:found"])
    assert isinstance(given, type(mine(inside))) and given.name == "found"


def test_a_file_that_ends_python_is_one_sentence(tmp_path):
    (tmp_path / "ending.py").write_text("raise SystemExit(0)")
    with pytest.raises(InputError, match=r"ending.py cannot be run: it asks Python to end"):
        named([f"{tmp_path}/ending.py:found"])
