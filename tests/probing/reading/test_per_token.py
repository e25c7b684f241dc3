"""A row for each token: its values against plain attention matrices, its means against the table, and its files."""

import copy
import gc
import itertools
import json
import os
import pickle
import shutil
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pytest
import torch
from tests.support.command_line import assert_bad, run
from tests.support.probing import oracle, zoo
from tests.support.rows import every_row

import massieu
from massieu.errors import InputError
from massieu.probing.model.model import as_loaded
from massieu.probing.reading import per_token as module
from massieu.probing.reading.options import Options
from massieu.probing.reading.per_token import TOKENS, TokenWriter, check_per_token, expected_size
from massieu.probing.result.result import ProbeResult
from massieu.probing.session.course import Course, forget
from massieu.probing.session.session import Input, Session
from massieu.probing.statistics.attention import REGISTER as ATTENTION_REGISTER
from massieu.probing.statistics.catalogue import Selection
from massieu.probing.statistics.extremes import Places
from massieu.probing.statistics.query_means import QueryResult
from massieu.probing.statistics.registry import ATTENTION
from massieu.probing.sums.units import Units
from massieu.report import page
from massieu.storage.folder import STORE
from massieu.storage.record import PerTokenRecord, json_value

# Pages are no matter of this file.
pytestmark = pytest.mark.usefixtures("blank_pages")
KEYS = ["window", "position", "token_id", "token", "site", "layer", "head"]
SOME = ["log_partition", "entropy", "weight_previous"]


def batches(name: str, number: int = 3, rows: int = 3) -> list[dict[str, Any]]:
    """Of BERT with padding, at the end of one row and at the beginning of another."""
    given = [zoo.inputs(name, rows=rows, seed=seed) for seed in range(number)]
    for each in given if name == "bert" else []:
        each["attention_mask"][0, 12:] = 0
        each["attention_mask"][-1, :3] = 0
    return given


@pytest.fixture
def blank_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "render", lambda *_: "")


def one_batch() -> list[dict[str, Any]]:
    return batches("gpt2", 1)


def two_layers(name: str) -> torch.nn.Module:
    """As many as tell layers apart; models of two stacks or of stages as they are."""
    keyword = {"gpt2": "n_layer", "bert": "num_hidden_layers", "llama": "num_hidden_layers"}.get(name)
    return zoo.model(name, **({keyword: 2} if keyword else {}))


def probed(name: str, given: Any = None, **how: Any) -> ProbeResult:
    """With the statistics that rows are asked for, and with no others."""
    how = {"per_token": True, "draws": 0} | how
    if isinstance(how["per_token"], list):
        how = {"statistics": how["per_token"]} | how
    data = massieu.Batches(batches(name) if given is None else given, window=20)
    return massieu.probe(two_layers(name), data, **{"statistics": "quick"} | how)


def often(folder: Path, **how: Any) -> massieu.Run:
    """A run that stores its sums after every batch."""
    return massieu.Run(folder, store_every=1e-9, **how)


@pytest.fixture(scope="module")
def result_with_rows() -> ProbeResult:
    """Of one batch, to be saved by a copy."""
    return probed("gpt2", one_batch(), per_token=["entropy"])


def rows_of(result: ProbeResult) -> "polars.DataFrame":
    """Those of all heads, in one order."""
    heads = [(site.layer, head) for site in result.run.sites for head in range(site.heads or 0)]
    return polars.concat(result.tokens(*each) for each in dict.fromkeys(heads))


# --- values ----------------------------------------------------------------------------------------------------------


@every_row("name", ["bert", "llama"])
def test_each_value_is_that_of_plain_attention_matrices(name):
    (given,) = batches(name, 1, rows=2)
    result = massieu.probe(zoo.model(name), massieu.Batches([given], window=20), per_token=True, statistics="quick")
    layers = oracle.attention_of(name, given)
    real = given["attention_mask"].bool()
    for layer, head in itertools.product(range(len(layers)), range(4)):
        scores = layers[layer]["scores"][:, head]
        log_z = scores.logsumexp(-1)
        weights = torch.exp(scores - log_z[..., None])
        previous = torch.full_like(log_z, torch.nan)
        previous[:, 1:] = weights.diagonal(offset=-1, dim1=-2, dim2=-1)
        previous[range(len(real)), real.int().argmax(-1)] = torch.nan  # nothing is before the first
        expected = {
            "log_partition": log_z,
            "entropy": -torch.xlogy(weights, weights).sum(-1),
            "largest_weight": weights.amax(-1),
            "largest_score": scores.amax(-1),
            "weight_diagonal": weights.diagonal(dim1=-2, dim2=-1),
            "weight_previous": previous,
        }
        found = result.tokens(layer, head)
        window, position = real.nonzero(as_tuple=True)
        assert found["window"].to_list() == window.tolist()
        assert found["position"].to_list() == position.tolist()
        assert found["token_id"].to_list() == given["input_ids"][real].tolist()
        for statistic, values in expected.items():
            one, other = found[statistic].to_numpy(), values[real].numpy()
            # Scores are sums of 12 products in float32; the next line's factor is 40 roundings of the largest.
            scale = float(layers[layer]["scores"][torch.isfinite(layers[layer]["scores"])].abs().max()) + 1
            np.testing.assert_allclose(one, other, rtol=0, atol=40 * 2**-24 * scale, err_msg=statistic)


@pytest.mark.medium
@every_row("name", ["bert", "swin"])
def test_the_mean_over_rows_is_the_value_of_the_table(name):
    result = probed(name, batches(name, 1))
    for site in result.run.sites:
        for head in range(site.heads or 0):
            own = result.tokens(site.layer, head).filter(polars.col("site") == site.index)
            table = result.heads.filter((polars.col("site") == site.name) & (polars.col("head") == head))
            measured = {row["statistic"]: row for row in table.rows(named=True)}
            for statistic in ATTENTION_REGISTER.functions:
                column = own[statistic].drop_nulls()
                row = measured.get(statistic)
                assert len(column) == (row["count"] if row else 0), statistic
                if row:
                    # Each value was rounded to float32, which the mean of their sizes bounds.
                    bound = 2**-23 * column.abs().cast(polars.Float64).mean() + 1e-12
                    assert abs(column.cast(polars.Float64).mean() - row["value"]) <= bound, statistic


def test_there_is_a_row_for_each_real_token_head_and_site():
    given = batches("bert", 2)
    result = probed("bert", given, per_token=["entropy"])
    real = sum(int(each["attention_mask"].sum()) for each in given)
    assert 0 < real < sum(each["attention_mask"].numel() for each in given)  # there is padding
    assert result.run.per_token is not None
    assert result.run.per_token.rows == real * 2 * 4 == len(rows_of(result))
    found = result.tokens(1, 3)
    assert found.columns == [*KEYS, "entropy"] and found["entropy"].dtype == polars.Float32
    assert found.select("site", "layer", "head").unique().rows() == [(1, 1, 3)]
    assert result.tokens(1, 3, window=4).equals(found.filter(polars.col("window") == 4))
    assert result.tokens(1, 3, window=99).is_empty()


@pytest.mark.medium
def test_neither_parts_nor_batches_change_a_row(monkeypatch):
    given = batches("gpt2", 2, rows=2)
    expected = rows_of(probed("gpt2", given, per_token=SOME))
    together = {name: torch.cat([each[name] for each in given]) for name in given[0]}
    found = rows_of(probed("gpt2", [together], per_token=SOME))
    assert found.select(KEYS).equals(expected.select(KEYS))
    for name in SOME:
        np.testing.assert_allclose(found[name].to_numpy(), expected[name].to_numpy(), rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(module, "AT_ONCE", 50)  # fewer than a batch's rows of one layer
    result = probed("gpt2", given, per_token=SOME)
    assert rows_of(result).equals(expected)
    assert result._token_table is not None and len(result._token_table.names) > 3


def test_a_sample_of_queries_has_rows_for_those_alone(result_with_rows):
    part = probed("gpt2", one_batch(), query_sample=5, per_token=["entropy"])
    found, expected = part.tokens(1, 2), result_with_rows.tokens(1, 2)
    assert found.group_by("window").len()["len"].max() == 5
    both = found.join(expected, on=KEYS[:3], how="left", nulls_equal=True)
    np.testing.assert_allclose(found["entropy"].to_numpy(), both["entropy_right"].to_numpy(), rtol=1e-4, atol=1e-5)


def test_a_window_with_nan_has_rows_of_nan_and_leaves_the_others_alone():
    given = {"inputs_embeds": torch.randn(3, 6, 48, generator=torch.Generator().manual_seed(0))}
    expected = probed("bert", [given], per_token=["entropy"]).tokens(1, 1)
    given["inputs_embeds"] = given["inputs_embeds"].clone()
    given["inputs_embeds"][1] = torch.nan
    found = probed("bert", [given], per_token=["entropy"]).tokens(1, 1)
    broken = polars.col("window") == 1
    assert found.filter(broken)["entropy"].is_nan().all() and len(found.filter(broken)) == 6
    assert found.filter(~broken)["entropy"].is_finite().all()
    np.testing.assert_allclose(found.filter(~broken)["entropy"], expected.filter(~broken)["entropy"], rtol=1e-4)
    assert found["token_id"].is_null().all() and found["token"].is_null().all()


def test_several_attentions_of_a_layer_are_told_apart():
    result = probed("bart", batches("bart", 1), per_token=["entropy"])
    with pytest.raises(InputError, match=r"attention must be one of 'encoder self-attention', .*none was named"):
        result.tokens(0, 0)
    cross = result.tokens(0, 0, attention="decoder cross-attention")
    sites = {site.index: site for site in result.run.sites}
    assert {sites[index].kind for index in cross["site"].unique()} == {"cross"}
    assert not cross["entropy"].equals(result.tokens(0, 0, attention="decoder causal self-attention")["entropy"])


# --- the writer by itself --------------------------------------------------------------------------------------------


class Words:
    """A tokenizer whose tokens are letters, and one that is no character."""

    added_tokens_decoder: dict[int, str] = {}

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return ["\ud800" if each == 3 else chr(97 + each) for each in ids]


def queries(values: torch.Tensor, defined: torch.Tensor, broken: torch.Tensor) -> QueryResult:
    return QueryResult({"entropy": values}, ~broken, {"entropy": defined & ~broken}, torch.ones(1, 1, 1).long(), broken)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_what_the_writer_is_given_is_in_its_file(tmp_path, dtype):
    """Two rows of two sequences each, such as image windows; one padding, one query undefined, one not finite."""
    values = torch.arange(24, dtype=torch.float64).reshape(4, 2, 3).to(dtype)
    values[0, 0, 1] = torch.inf
    real, nothing = torch.ones(4, 3, dtype=torch.bool), torch.zeros(4, 2, 3, dtype=torch.bool)
    real[3, 2], undefined, broken = False, nothing.clone(), nothing.clone()
    undefined[0, 0, 0] = broken[1, 1, 2] = True
    ids = torch.tensor([[0, 1, 2, 9], [3, 0, 0, 9], [1, 1, 1, 9], [2, 2, 2, 9]])
    site: Any = type("Site", (), {"index": 5, "layer": 2})()
    writer = TokenWriter(tmp_path, ["entropy", "largest_score"], Words())
    writer.batch = 7
    places = Places(torch.tensor([0, 1, 3]), [10, 11], 2, ids.clone())
    assert writer.add(site, queries(values, ~undefined, broken), places, real, 4) == 22
    assert not list(tmp_path.iterdir())
    writer.flush()
    writer.flush()
    assert [path.name for path in tmp_path.iterdir()] == ["part-00000007-000.parquet"]
    found = polars.read_parquet(tmp_path / "part-00000007-000.parquet")
    first = found.filter(polars.col("head") == 0)
    assert first["window"].to_list() == [10] * 6 + [11] * 5
    assert first["position"].to_list() == [0, 1, 3, 4, 5, 7, 0, 1, 3, 4, 5]
    assert first["token_id"].to_list() == [0, 1, 9, 3, 0, 9, 1, 1, 9, 2, 2]
    assert first["token"].to_list() == ["a", "b", "j", "?", "a", "j", "b", "b", "j", "c", "c"]
    assert first["entropy"].to_list() == [None, np.inf, 2, 6, 7, 8, 12, 13, 14, 18, 19]
    second = found.filter(polars.col("head") == 1)["entropy"].to_list()
    assert np.isnan(second[5]) and [*second[:5], *second[6:]] == [3, 4, 5, 9, 10, 15, 16, 17, 21, 22]
    assert found["largest_score"].is_null().all() and set(found["site"]) == {5} and set(found["layer"]) == {2}


def test_a_call_of_padding_alone_has_no_rows(tmp_path):
    nothing = torch.zeros(1, 2, 3, dtype=torch.bool)
    writer = TokenWriter(tmp_path, ["entropy"])
    site: Any = type("Site", (), {"index": 0, "layer": 0})()
    found = queries(torch.zeros(1, 2, 3), nothing, nothing)
    assert writer.add(site, found, Places(torch.arange(3), [0], 1), torch.zeros(1, 3, dtype=torch.bool), 3) == 0
    writer.flush()
    assert not list(tmp_path.iterdir())


def test_a_table_that_cannot_be_written_is_left_out_and_the_measurement_kept(tmp_path, monkeypatch):
    """The first part fits, the second does not; the first is then removed."""
    room, replacing = itertools.count(), module.replacing

    def full(path: Path, **how: Any) -> Any:
        if next(room):
            raise OSError(28, "No space left on device")
        return replacing(path, **how)

    expected = probed("gpt2", one_batch(), per_token=False)
    monkeypatch.setattr(module, "replacing", full)
    monkeypatch.setattr(module, "AT_ONCE", 200)
    result = probed("gpt2", one_batch(), run=tmp_path)
    assert next(room) == 2 and not list((tmp_path / TOKENS).iterdir())
    assert result.heads.equals(expected.heads) and result.run.per_token is None
    assert any("the per-token table could not be computed and is left out" in each for each in result.run.warnings)
    with pytest.raises(InputError, match="no per-token values"):
        result.tokens(0, 0)


def test_rows_that_are_missing_at_the_end_are_noticed(tmp_path):
    def lose(state: Any) -> None:
        for path in (tmp_path / TOKENS).glob("part-*"):
            path.unlink()

    result = probed("gpt2", one_batch(), run=often(tmp_path, progress=lose), per_token=["entropy"])
    assert result.run.per_token is None
    assert any(f"{tmp_path / TOKENS} holds 0 rows of" in each for each in result.run.warnings)


# --- its files -------------------------------------------------------------------------------------------------------


@pytest.mark.medium
def test_a_result_is_saved_with_its_rows_loaded_and_saved_again(tmp_path):
    result = probed("gpt2", one_batch(), per_token=["entropy"])
    expected, one, two = rows_of(result), tmp_path / "one", tmp_path / "two"
    result.save(one)
    stored = json.loads((one / "run.json").read_bytes())
    parts = [f"{TOKENS}/{path.name}" for path in (one / TOKENS).iterdir()]
    assert parts and set(parts) <= set(stored["files"])
    assert rows_of(result).equals(expected)
    loaded = ProbeResult.load(one)
    assert json_value(loaded.run.per_token) == json_value(result.run.per_token)
    loaded.save(two)
    loaded.save(two)  # over itself
    shutil.rmtree(one)
    assert rows_of(ProbeResult.load(two)).equals(expected)
    ProbeResult.redraw(two)
    assert rows_of(ProbeResult.load(two)).equals(expected)


@pytest.mark.medium
def test_a_result_without_rows_takes_those_of_the_earlier_away(result_with_rows, tmp_path):
    copy.copy(result_with_rows).save(tmp_path)
    (tmp_path / TOKENS / "mine.txt").write_text("a user's file")
    probed("gpt2", one_batch(), per_token=False, statistics=["entropy"]).save(tmp_path)
    assert [path.name for path in (tmp_path / TOKENS).iterdir()] == ["mine.txt"]
    assert ProbeResult.load(tmp_path).run.per_token is None


@pytest.mark.medium
def test_rows_that_were_removed_changed_or_lost_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "AT_ONCE", 50)
    probed("gpt2", one_batch(), per_token=["entropy"]).save(tmp_path)
    shutil.rmtree(tmp_path / STORE)
    parts = sorted((tmp_path / TOKENS).iterdir())
    content = parts[0].read_bytes()
    parts[0].write_bytes(parts[1].read_bytes())
    with pytest.raises(InputError, match=r"part-.* is not the file that the result was stored with"):
        ProbeResult.load(tmp_path).tokens(0, 0)
    with pytest.raises(InputError, match="is not the file that the result was stored with"):
        ProbeResult.load(tmp_path).save(tmp_path / "elsewhere")
    parts[0].unlink()
    with pytest.raises(InputError, match=r"part-.* is missing; restore it, or remove"):
        ProbeResult.load(tmp_path)
    parts[0].write_bytes(content)
    assert len(ProbeResult.load(tmp_path).tokens(0, 0))
    shutil.rmtree(tmp_path / TOKENS)
    with pytest.raises(InputError, match="no per-token values"):
        ProbeResult.load(tmp_path).tokens(0, 0)


@pytest.mark.medium
def test_a_temporary_folder_lives_as_long_as_the_result(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = probed("gpt2", one_batch(), per_token=["entropy"])
    copied = copy.deepcopy(result)
    assert len(list(tmp_path.iterdir())) == 1
    del result
    gc.collect()
    assert len(copied.tokens(0, 0))
    assert len(pickle.loads(pickle.dumps(copied)).tokens(0, 0))
    del copied
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_where_files_cannot_be_linked_they_are_copied(result_with_rows, tmp_path, monkeypatch):
    def unable(*_: Any, **__: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    expected = rows_of(result_with_rows)
    monkeypatch.setattr(os, "link", unable)
    copy.copy(result_with_rows).save(tmp_path)
    assert rows_of(ProbeResult.load(tmp_path)).equals(expected)


@pytest.mark.slow
def test_a_save_that_is_killed_leaves_the_former_rows_or_the_new_ones(tmp_path, monkeypatch):
    """Killed before each move of a file; then what is there is loaded, and a later save settles it."""

    class Killed(BaseException):
        pass

    monkeypatch.setattr(module, "AT_ONCE", 80)  # some files each: of 80 rows of each of 2 layers, and of 160
    results = [probed("gpt2", batches("gpt2", 1, rows), per_token=["entropy"]) for rows in (2, 1)]
    expected = [result.tokens(1, 1) for result in results]
    move, seen = os.replace, set()
    for after in range(40):
        results[0].save(folder := tmp_path / str(after))
        left = itertools.count()

        def fragile(source: Any, target: Any, left: Any = left, after: int = after, **folders: Any) -> None:
            if next(left) == after:
                raise Killed
            move(source, target, **folders)

        monkeypatch.setattr(os, "replace", fragile)
        try:
            copy.copy(results[1]).save(folder)
            ended = True
        except Killed:
            ended = False
        monkeypatch.setattr(os, "replace", move)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of links that were not made yet
            found = ProbeResult.load(folder).tokens(1, 1)
        (which,) = [place for place, each in enumerate(expected) if found.equals(each)]
        seen.add(which)
        results[1].save(folder)
        assert ProbeResult.load(folder).tokens(1, 1).equals(expected[1])
        if ended:
            break
    assert ended and seen == {0, 1}


# --- broken off, shared ----------------------------------------------------------------------------------------------


class Killed(BaseException):
    """What a process that is killed does not live to see."""


def broken_off(after: int) -> Any:
    seen = itertools.count(1)

    def tell(state: Any) -> None:
        if state.stage == "reading" and next(seen) == after:
            raise Killed

    return tell


@pytest.fixture(scope="module")
def rows_without_a_break() -> tuple[list[dict[str, Any]], "polars.DataFrame"]:
    """Some batches, and the rows of them all."""
    given = batches("gpt2", 4, rows=1)
    return given, rows_of(probed("gpt2", given, per_token=["entropy"]))


@pytest.mark.medium
@pytest.mark.parametrize(("after", "at_once"), [(1, 10_000), (2, 100)])
def test_a_resumed_run_has_the_rows_of_one_without_a_break(after, at_once, rows_without_a_break, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "AT_ONCE", at_once)
    given, expected = rows_without_a_break
    how: dict[str, Any] = {"per_token": ["entropy"]}
    with pytest.raises(Killed):
        probed("gpt2", given, run=often(tmp_path / "r", progress=broken_off(after)), **how)
    monkeypatch.setattr(Course, "store", lambda *_, **__: None)
    with pytest.raises(Killed):  # goes on, and is killed before it stores again: with more rows than sums
        probed("gpt2", given, run=often(tmp_path / "r", progress=broken_off(after + 1), resume=True), **how)
    monkeypatch.undo()
    resumed = probed("gpt2", given, run=often(tmp_path / "r", resume=True), **how)
    assert rows_of(resumed).equals(expected)
    resumed.save(tmp_path / "saved")
    forget(tmp_path / "r")
    assert not (tmp_path / "r").exists()
    assert rows_of(ProbeResult.load(tmp_path / "saved")).equals(expected)


def test_rows_that_are_not_those_of_the_stored_sums_are_refused(tmp_path):
    given = batches("gpt2", 3, rows=1)
    how: dict[str, Any] = {"per_token": ["entropy"], "statistics": ["entropy", "log_partition"]}
    with pytest.raises(Killed):
        probed("gpt2", given, run=often(tmp_path / "r", progress=broken_off(2)), **how)
    parts = sorted((tmp_path / "r" / TOKENS).iterdir())
    whole = parts[0].read_bytes()
    parts[0].write_bytes(whole[:40] + bytes([whole[40] ^ 1]) + whole[41:])
    with pytest.raises(InputError, match=r"part-.* is not as it was when the running sums were stored; begin without"):
        probed("gpt2", given, run=often(tmp_path / "r", resume=True), **how)
    for part in parts:
        part.unlink()
    with pytest.raises(InputError, match=r"holds 0 per-token rows, and the stored sums are of [\d,]+; begin without"):
        probed("gpt2", given, run=often(tmp_path / "r", resume=True), **how)
    with pytest.raises(InputError, match="another per_token"):
        probed(
            "gpt2",
            given,
            run=often(tmp_path / "r", resume=True),
            **how | {"per_token": ["log_partition"]},
        )
    assert len(rows_of(probed("gpt2", given, run=often(tmp_path / "r"), **how)))  # from the beginning


def write_rows(path: Path) -> None:
    """A part with no rows."""
    polars.DataFrame({name: [] for name in module._KEYS}).write_parquet(path)


def test_a_file_of_a_parts_name_that_is_none_is_in_the_way(tmp_path):
    running = tmp_path / "r"
    (running / TOKENS).mkdir(parents=True)
    part = running / TOKENS / "part-00000000-000.parquet"
    polars.DataFrame({"mine": [1]}).write_parquet(part)
    before = part.read_bytes()
    with pytest.raises(InputError, match=r"part-.* is in the way: it holds no per-token rows; move it"):
        probed("gpt2", batches("gpt2", 1), per_token=["entropy"], statistics=["entropy"], run=running)
    forget(running)
    assert part.read_bytes() == before


class _Sent(Exception):  # noqa: N818 - nothing is wrong
    """A process has sent its sums."""


def session(rank: int, processes: int, given: list[dict[str, Any]], folder: Path) -> Session:
    options = Options(frozenset({ATTENTION}), Units(), 20, examples=False, draws=0, per_token=("entropy",))
    course = Course(rank, processes, folder)
    source = Input(given, "batches", True, 20, None)
    return Session(as_loaded(two_layers("gpt2")), source, options, lambda _: None, None, course=course)


@pytest.mark.medium
@pytest.mark.parametrize("processes", [2, 5])
def test_processes_write_each_window_once(processes, rows_without_a_break, tmp_path, monkeypatch):
    (given, expected), sent = rows_without_a_break, []

    def exchange(course: Course, own: bytes) -> list[bytes]:
        sent.insert(0, own)
        if course.rank:
            raise _Sent
        return sent

    monkeypatch.setattr(Course, "_exchange", exchange)
    (tmp_path / TOKENS).mkdir()
    for left in (0, 7):  # of an earlier run
        write_rows(tmp_path / TOKENS / f"part-{left:08d}-004.parquet")
    for rank in range(processes - 1, 0, -1):
        with pytest.raises(_Sent):
            session(rank, processes, given, tmp_path).read_all(threading.Event())
    first = session(0, processes, given, tmp_path)
    assert first.read_all(threading.Event())
    together = first.result(frozenset({"entropy"}), {}, True)
    assert rows_of(together).equals(expected)


# --- bad calls -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("entropy", "per_token must be True or a list of names of statistics, got 'entropy'"),
        (3, "per_token must be True or a list of names of statistics, got 3"),
        ([], "per_token must be True or a list of names of statistics, got an empty list"),
        (["entrop"], r"one value for each query of the statistics .*; 'entrop' is not among them"),
        (["symmetric_share"], "'symmetric_share' is not among them"),
        ([None], "None is not among them"),
    ],
)
def test_bad_names_of_columns(asked, message):
    with pytest.raises(InputError, match=message):
        massieu.probe(zoo.model("gpt2"), batches("gpt2"), per_token=asked)


def test_bad_calls_of_a_probe_with_rows():
    model, given = zoo.model("gpt2"), batches("gpt2")
    with pytest.raises(InputError, match="per_token needs statistics of the attention, and none is measured"):
        massieu.probe(model, given, statistics=["maps"], per_token=True)
    with pytest.raises(InputError, match="of the statistics entropy; 'log_partition' is not among them"):
        massieu.probe(model, given, statistics=["entropy"], per_token=["log_partition"])
    with pytest.raises(InputError, match="per_token and continue_for do not work together"):
        massieu.probe(model, massieu.Batches(given, continue_for=3), per_token=True)
    with pytest.raises(InputError, match="per_token with distributed=True needs a folder"):
        massieu.probe(model, given, per_token=True, run=massieu.Run(distributed=True))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"layer": 3, "head": 0}, "the result has no attention in layer 3; its layers are 0 to 1"),
        ({"layer": 0, "head": 4}, "layer 0 has no head 4; its heads are 0 to 3"),
        ({"layer": 0, "head": -1}, "layer 0 has no head -1"),
        ({"layer": "0", "head": 0}, "layer must be a whole number, got '0'"),
        ({"layer": 0, "head": True}, "head must be a whole number, got True"),
        ({"layer": 0, "head": 0, "window": -1}, "window must be the number of a window, 0 or more, got -1"),
        ({"layer": 0, "head": 0, "window": 1.5}, "window must be the number of a window, 0 or more, got 1.5"),
        ({"layer": 0, "head": 0, "attention": "cross"}, "attention must be one of .*; got 'cross'"),
    ],
)
def test_bad_calls_for_rows(result_with_rows, call, message):
    with pytest.raises(InputError, match=message):
        result_with_rows.tokens(**call)


@pytest.mark.parametrize("names", ["entrop", "", "entropy,maps"])
def test_bad_names_on_the_command_line(names, tmp_path):
    ran = run("probe", "--per-token", names, "--out", tmp_path / "out")
    assert_bad(ran, "per_token")
    assert not (tmp_path / "out").exists()


def test_names_of_columns():
    assert check_per_token(False, Selection.of(["entropy"])) == ()
    assert check_per_token(True, Selection.of(["maps", "entropy", "log_partition"])) == ("log_partition", "entropy")
    assert check_per_token(["entropy"], Selection.of(["entropy", "log_partition"])) == ("entropy",)


def test_the_size_is_said_beforehand(monkeypatch):
    assert expected_size(10, 4, None) == (
        "per-token values: 10 rows for each token, up to 1 MB for each 1,000 tokens",
        0.0,
    )
    said, size = expected_size(1_000, 16, 1_000_000)
    assert said.startswith("per-token values: 1,000 rows for each token, up to ") and size > module.LARGE
    told: list[str] = []
    monkeypatch.setattr("massieu.probing.session.session.LARGE", -1.0)
    run = massieu.Run(progress=lambda state: told.append(state.stage))
    result = probed("gpt2", one_batch(), per_token=["entropy"], run=run)
    assert any("rows for each token, up to" in each for each in told)
    assert any("name fewer statistics in per_token" in each for each in result.run.warnings)


def test_the_record_says_what_there_is(result_with_rows):
    said = result_with_rows.run.per_token
    assert isinstance(said, PerTokenRecord)
    assert said.statistics == ["entropy"] and said.bytes > 1000
    assert result_with_rows.run.settings["per_token"] == said.statistics
