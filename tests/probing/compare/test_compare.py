"""Two models beside each other, and many: against explicit attentions, and what cannot be compared."""

import copy
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pytest
import torch
from polars.testing import assert_frame_equal

import massieu
from massieu.errors import InputError
from massieu.probing.compare.changes import changes_of
from massieu.probing.compare.comparison import Comparison
from massieu.probing.compare.run import _named_model, _with_short_names, _with_stored_settings
from massieu.probing.compare.stored_results import key_of
from massieu.probing.data.text import Batch
from massieu.probing.data.text_digest import TextDigest
from massieu.probing.replaced.replacement import replacements
from massieu.probing.result.result import ProbeResult
from massieu.probing.run import Measurement
from massieu.probing.session.sharing import Sharing
from massieu.report import page
from massieu.storage.directory import Directory
from massieu.storage.folder import STORE

WINDOWS, LENGTH = 8, 12
ATTENTION = ["entropy", "largest_weight"]
SEVERAL = [*ATTENTION, "largest_score", "maps"]


@pytest.fixture(autouse=True)
def blank_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages of results are no matter of this file."""
    monkeypatch.setattr(page, "render", lambda *_: "")


def made(kind: str = "bert", seed: int = 0) -> torch.nn.Module:
    from tests.support.probing.zoo import MAKERS

    torch.manual_seed(seed)
    return MAKERS[kind](**({} if kind == "gpt2" else {"num_hidden_layers": 2})).eval()


def sharper(model: Any, layer: int, head: int, factor: float) -> Any:
    """The model with one head's scores multiplied."""
    changed = copy.deepcopy(model)
    attention = changed.encoder.layer[layer].attention.self
    part = slice(head * attention.attention_head_size, (head + 1) * attention.attention_head_size)
    with torch.no_grad():
        attention.query.weight[part] *= factor
        attention.query.bias[part] *= factor
    return changed


def ids(seed: int = 0, windows: int = WINDOWS) -> torch.Tensor:
    return torch.randint(3, 99, (windows, LENGTH), generator=torch.Generator().manual_seed(seed))


def batches(seed: int = 0, windows: int = WINDOWS, size: int = 5) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": part} for part in ids(seed, windows).split(size)]


def compared(*models: Any, **options: Any) -> Comparison:
    data = massieu.Batches(batches(), documents=True)  # the rows are independent
    return massieu.compare(*models, data=data, **{"statistics": ATTENTION} | options)


@pytest.fixture(scope="module")
def pair() -> tuple[ProbeResult, ProbeResult]:
    """Results of a model, and of one in which head 1 of the last layer is sharper. Not to be changed."""
    model = made()
    models = (model, sharper(model, 1, 1, 60.0))
    one, other = (
        massieu.probe(each, massieu.Batches(batches(), documents=True), statistics=SEVERAL) for each in models
    )
    return one, other


def of(pair: tuple[ProbeResult, ...]) -> Comparison:
    return Comparison.of(pair, ["a", "b"])


def heads(comparison: Comparison, statistic: str = "entropy") -> polars.DataFrame:
    table = comparison.differences
    return table.filter((table["scope"] == "head") & (table["statistic"] == statistic))


def window_entropies(model: Any) -> np.ndarray:
    """Mean entropy of each window, layer and head, from the model's own attentions in float64."""
    model = copy.deepcopy(model).double()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(ids(), output_attentions=True).attentions
    return np.stack([torch.special.entr(each).sum(-1).mean(-1).numpy() for each in attentions], 1)


def test_paired_errors_are_those_of_an_explicit_computation(pair):
    from scipy import stats

    model = made()
    other = sharper(model, 1, 1, 60.0)
    table = heads(of(pair)).sort("layer", "head")
    first, second = window_entropies(model), window_entropies(other)
    change = (second - first).reshape(WINDOWS, -1)
    scale = 2e-6 * np.log(LENGTH)  # float32 sums over keys
    assert np.allclose(table["difference"], change.mean(0), atol=scale)
    assert np.allclose(table["standard_error"], change.std(0, ddof=1) / np.sqrt(WINDOWS), atol=scale)
    assert np.allclose(table["first"], first.mean(0).ravel(), atol=scale)
    head = 1 * 4 + 1
    expected = stats.ttest_rel(second.reshape(WINDOWS, -1)[:, head], first.reshape(WINDOWS, -1)[:, head])
    assert np.isclose(table["p_value"][head], expected.pvalue, rtol=1e-3)
    assert np.allclose(table["degrees"], WINDOWS - 1, rtol=1e-12)


def test_the_head_that_was_changed_is_named_and_no_other(pair):
    comparison = of(pair)
    named = comparison.named().filter(polars.col("scope") == "head")
    assert set(named.select("layer", "head").rows()) == {(1, 1)}
    assert set(named["statistic"]) == set(ATTENTION)
    assert [(each.layer, each.head) for each in comparison.changed()] == [(1, 1)]
    assert heads(comparison).filter(polars.col("layer") < 1)["difference"].abs().max() == 0.0
    assert comparison.above({"entropy": 0.0}).select("layer", "head").rows() == [(1, 1)]
    assert comparison.above({"entropy": 3.0}).is_empty()


@pytest.mark.medium
def test_a_model_does_not_differ_from_itself():
    model = made()
    comparison = compared(model, copy.deepcopy(model), statistics=SEVERAL)
    assert comparison.paired
    assert comparison.differences["difference"].abs().max() == 0.0
    assert comparison.differences["p_value"].min() == 1.0
    assert comparison.named().is_empty()
    assert comparison.changed() == []
    gauge = comparison.differences.filter(polars.col("statistic") == "largest_score")
    maps = comparison.differences.filter(polars.col("statistic") == "symmetric_share")
    assert len(gauge) and len(maps) and gauge["p_value"].null_count() == len(gauge)
    assert maps["p_value"].null_count() == len(maps)


@pytest.mark.medium
def test_a_copy_in_bfloat16_is_beside_the_model_itself():
    model = made()
    comparison = compared(model, copy.deepcopy(model).bfloat16(), names=["float32", "bfloat16"])
    assert comparison.paired
    table = heads(comparison)
    largest = np.abs(table["difference"].to_numpy()).max()
    # Scores of size below 1 keep 8 bits; the entropy is flat around uniform attention.
    assert 0 < largest < 0.02 * np.log(LENGTH)
    assert [run.model.dtype for run in comparison.runs] == ["float32", "bfloat16"]


def test_statistics_without_a_test_are_not_named(pair):
    comparison = of(pair)
    for name in ("largest_score", "symmetric_share"):  # depends on the key origin; of the weights alone
        table = heads(comparison, name)
        assert table["p_value"].null_count() == table["q_value"].null_count() == len(table) == 8

    comparison.differences = comparison.differences.with_columns(polars.lit(0.5).alias("difference"))
    assert len(comparison.above({"symmetric_share": 0.4})) == 8  # every larger one counts
    assert comparison.above({"symmetric_share": 0.6}).is_empty()


def test_a_change_counts_in_deviations_over_the_first_models_heads():
    numbers = {"standard_error": 0.1, "q_value": [0.01, 0.5, 0.01, 0.01], "second": [9.0, 1.0, 5.0, 3.5]}
    numbers |= {"first": [1.0, 3.0, 5.0, 3.0], "statistic": ["a", "a", "a", "b"]}
    table = polars.DataFrame({"scope": "head", "site": "s", "layer": 0, "head": [0, 1, 2, 0], **numbers})
    table = table.with_columns((polars.col("second") - polars.col("first")).alias("difference"))
    other = polars.col("statistic") == "b"
    extra = table.filter(other).with_columns(first=polars.lit(2.0), q_value=polars.lit(1.0))  # b: 3 and 2, spread √½
    table = polars.concat([table, extra])
    table = table.with_columns((polars.col("q_value") < 0.05).alias("named"))
    changes = changes_of(table, {"a", "b"})
    assert [(each.head, each.statistic) for each in changes] == [(0, "a"), (2, "a")]
    assert changes[0].size == pytest.approx(8 / 2.0)
    assert changes_of(table, {"b"})[0].size == pytest.approx(0.5 / np.sqrt(0.5))


@pytest.mark.medium
def test_batch_size_changes_no_verdict():
    model = made()
    results = [massieu.probe(model, batches(size=size), statistics=ATTENTION, draws=0) for size in (3, WINDOWS)]
    comparison = Comparison.of(results, ["one", "many"])
    assert comparison.paired
    assert comparison.named().is_empty()
    assert (heads(comparison)["p_value"] > 0.05).all()


@pytest.mark.medium
def test_halves_of_a_text_are_compared_as_independent():
    model = made()
    one, other = (
        massieu.probe(model, massieu.Batches(batches(seed), documents=True), statistics=ATTENTION, draws=0)
        for seed in (0, 1)
    )
    comparison = Comparison.of([one, other], ["one", "other"])
    assert not comparison.paired
    assert "one model on two texts" in comparison.pairings[0].sentence
    table, errors = (
        heads(comparison),
        [result.heads.filter(result.heads["statistic"] == "entropy") for result in (one, other)],
    )
    expected = np.hypot(*(each["standard_error"].to_numpy() for each in errors))
    assert np.allclose(table["standard_error"], expected, rtol=1e-12)
    assert np.allclose(table["degrees"], WINDOWS - 1, rtol=1e-12)


@pytest.mark.slow
def test_halves_of_a_text_name_at_most_five_in_a_hundred():
    """Calibration: a random decoder, disjoint halves; windows are independent draws."""
    model = made("gpt2")
    shares = []
    for seed in range(6):
        results = [
            massieu.probe(model, batches(100 + 2 * seed + half, windows=16), statistics=["attention"])
            for half in (0, 1)
        ]
        table = Comparison.of(results, ["a", "b"]).differences.drop_nulls("p_value")
        shares.append(((table["p_value"] < 0.05).mean(), (table["q_value"] < 0.05).mean()))
    p, q = np.mean(shares, axis=0)
    assert q <= 0.05
    # Two errors of 2 degrees each, held against Student's law with 2: P(|T₄| > t₂) = .013. Heads of one text go together, so
    # that six splits vary.
    assert 0.001 < p < 0.05


@pytest.mark.medium
def test_documents_are_paired_by_blocks(tmp_path: Path):
    generator = torch.Generator().manual_seed(0)
    padded = torch.randint(3, 99, (70, LENGTH), generator=generator)
    mask = (torch.arange(LENGTH) < torch.randint(5, LENGTH, (70, 1), generator=generator)).long()
    model = made()
    results = []
    for each, size in ((model, 23), (sharper(model, 0, 0, 60.0), 35)):
        options = [
            {"input_ids": part, "attention_mask": real}
            for part, real in zip(padded.split(size), mask.split(size), strict=True)
        ]
        results.append(massieu.probe(each, massieu.Batches(options, documents=True), statistics=ATTENTION, draws=0))
    comparison = Comparison.of(results, ["a", "b"])
    assert comparison.paired
    assert (heads(comparison)["degrees"] < 34).all()  # 70 documents in blocks of two, which are not of one length
    assert (heads(comparison)["degrees"] > 25).all()
    assert (0, 0) in comparison.named().select("layer", "head").rows()
    assert np.allclose(
        heads(comparison)["difference"], heads(comparison)["second"] - heads(comparison)["first"], atol=1e-12
    )


@pytest.mark.medium
def test_many_models_stand_in_one_table():
    model = made()
    course = [
        massieu.probe(
            sharper(model, 1, 1, factor), massieu.Batches(batches(), documents=True), statistics=ATTENTION, draws=0
        )
        for factor in (1.0, 40.0, 80.0)
    ]
    comparison = compared(*course, names=["step10", "step20", "step40"])
    assert comparison.steps == [10.0, 20.0, 40.0]
    assert comparison.values["model"].unique(maintain_order=True).to_list() == ["step10", "step20", "step40"]
    assert comparison.values.columns[:3] == ["model", "step", "scope"]
    sizes = [comparison.changed(model=name)[0].difference for name in ("step20", "step40")]
    assert sizes[1] < sizes[0] < 0
    pair = compared(course[0], course[2], names=["step10", "step40"]).differences
    assert_frame_equal(comparison.differences.filter(polars.col("model") == "step40"), pair)


@pytest.mark.medium
def test_the_shared_control_is_the_one_that_each_would_have_had():
    model = made()
    other = sharper(model, 0, 2, 5.0)
    comparison = compared(model, other, names=["a", "b"])
    alone = massieu.probe(other, massieu.Batches(batches(), documents=True), statistics=ATTENTION).heads
    shared = comparison.values.filter((polars.col("model") == "b") & (polars.col("scope") == "head"))
    assert_frame_equal(shared.select(alone.columns), alone, check_exact=True)
    assert (alone["statistic"] == "entropy/reinitialised").any()
    assert ["re-initialised control" in run.timing for run in comparison.runs] == [True, False]


@pytest.mark.medium
def test_stored_results_and_models_stand_beside_each_other(pair, tmp_path: Path):
    stored = pair[0].save(tmp_path / "stored")
    comparison = compared(stored, sharper(made(), 1, 1, 60.0), names=["a", "b"], statistics=SEVERAL)
    assert_frame_equal(comparison.differences, of(pair).differences)


def without_sums(result: ProbeResult) -> ProbeResult:
    return ProbeResult(copy.deepcopy(result.run), result.details, result.heads, result.layers)


def test_a_result_without_sums_is_compared_on_the_careful_side(pair):
    comparison = of(tuple(map(without_sums, pair)))
    assert "no sums by unit of the text were stored for a and b" in comparison.pairings[0].sentence
    assert (heads(comparison)["standard_error"] > heads(of(pair))["standard_error"]).all()
    assert (1, 1) in comparison.named().select("layer", "head").rows()


@pytest.mark.medium
def test_sums_are_stored_with_the_result_and_may_be_missing(pair, tmp_path: Path):
    result = pair[0]
    folder = result.save(tmp_path / "result")
    hashes = json.loads((folder / "run.json").read_text())["files"]
    assert "units.safetensors" in hashes
    read = ProbeResult.load(folder)
    assert read.units is not None and result.units is not None
    assert read.units.text == result.units.text
    content = (folder / "units.safetensors").read_bytes()
    (folder / "units.safetensors").write_bytes(content[:-1] + b"\1")
    with pytest.raises(InputError, match=r"units\.safetensors is not the file"):
        ProbeResult.load(folder)
    for place in (folder, *(folder / STORE).iterdir()):
        (place / "units.safetensors").unlink()
    again = ProbeResult.load(folder)
    assert again.units is None
    again.save(folder)
    assert "units.safetensors" not in json.loads((folder / "run.json").read_text())["files"]


@pytest.mark.medium
def test_a_stored_comparison_is_read_back(pair, tmp_path: Path):
    comparison = of(pair)
    assert comparison.save(tmp_path / "new") == tmp_path / "new"
    read = Comparison.load(tmp_path / "new")
    assert_frame_equal(read.differences, comparison.differences)
    assert_frame_equal(read.values, comparison.values)
    for name in ("models", "steps", "runs", "pairings", "notes", "examples", "date"):
        assert getattr(read, name) == getattr(comparison, name), name
    assert read.to_dict() == comparison.to_dict()
    assert read.changed() == comparison.changed()
    json.dumps(comparison.to_dict(), allow_nan=False)
    assert "layer 1 head 1" in repr(read)
    assert "layer 1 head 1" in read._repr_html_() and read._repr_html_().count("<li>") == repr(read).count("\n")


@pytest.mark.medium
def test_folders_that_are_no_comparison_are_refused(pair, tmp_path: Path):
    comparison = of(pair)
    with pytest.raises(InputError, match="is missing; a comparison is a folder"):
        Comparison.load(tmp_path / "none")
    with pytest.raises(InputError, match=r"has no comparison\.json"):
        Comparison.load(tmp_path)
    folder = comparison.save(tmp_path / "one")
    record = (folder / "comparison.json").read_text()
    for old, new, message in (
        ('"schema_version": 1', '"schema_version": 7', "schema_version 7"),
        ('"steps"', '"stops"', "steps"),
        ('"paired"', '"impaired"', "not the record of a comparison"),
    ):
        (folder / "comparison.json").write_text(record.replace(old, new, 1))
        with pytest.raises(InputError, match=message):
            Comparison.load(folder)
    (folder / "comparison.json").write_text(record)
    (folder / "values.parquet").write_bytes((folder / "differences.parquet").read_bytes())
    with pytest.raises(InputError, match=r"values\.parquet is not the file"):
        Comparison.load(folder)
    pair[0].save(tmp_path / "result")
    with pytest.raises(InputError, match="a folder of its own"):
        comparison.save(tmp_path / "result")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        comparison.save(tmp_path / "file")


@pytest.mark.slow
def test_stored_results_are_not_measured_again(tmp_path: Path):
    model = made()
    models = [model, sharper(model, 1, 1, 60.0)]
    stages: list[str] = []
    first = compared(*models, out=tmp_path, names=["a", "b"], progress=lambda state: stages.append(state.stage))
    assert {stage.partition(":")[0] for stage in stages} == {"a", "b"}
    stages.clear()
    again = compared(*models, out=tmp_path, names=["a", "b"], progress=lambda state: stages.append(state.stage))
    assert stages == []
    assert_frame_equal(again.differences, first.differences)
    third = sharper(model, 0, 1, 3.0)
    compared(*models, third, out=tmp_path, names=["a", "b", "c"], progress=lambda state: stages.append(state.stage))
    assert {stage.partition(":")[0] for stage in stages} == {"c"}
    folders = sorted((tmp_path / "models").iterdir())
    assert len(folders) == 3
    shutil.rmtree(folders[0])  # as a process leaves it that was killed before it had stored anything
    folders[0].mkdir()
    stages.clear()
    compared(*models, out=tmp_path, names=["a", "b"], progress=lambda state: stages.append(state.stage))
    assert {stage.partition(":")[0] for stage in stages} == {"a"}


@pytest.mark.medium
def test_a_disk_that_fills_costs_no_model_s_result(tmp_path: Path, monkeypatch):
    """What was stored stays; what could not be stored is saved elsewhere, and put in its place it is gone on from."""
    model, out, spare = made(), tmp_path / "out", tmp_path / "spare"
    spare.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(spare))
    models = [model, sharper(model, 1, 1, 20.0)]
    write = Directory.write

    def full(directory: Directory, name: str, content: bytes) -> None:
        if f"{out}/models/b-" in str(directory.path):
            raise OSError(28, "No space left on device")
        write(directory, name, content)

    monkeypatch.setattr(Directory, "write", full)
    with pytest.raises(InputError, match=r"No space left on device; it was saved in .* instead; move it to") as error:
        compared(*models, out=out, names=["a", "b"])
    monkeypatch.setattr(Directory, "write", write)
    source, target = re.search(r"saved in (\S+) instead; move it to (\S+) and", str(error.value)).groups()  # pyright: ignore[reportOptionalMemberAccess]
    shutil.move(source, target)
    stages: list[str] = []
    comparison = compared(*models, out=out, names=["a", "b"], progress=lambda state: stages.append(state.stage))
    assert stages == []
    assert_frame_equal(comparison.differences, compared(*models, names=["a", "b"]).differences)


@pytest.mark.skipif(os.name == "nt", reason="links of POSIX")
def test_links_among_stored_results_are_refused(tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "models").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(
        InputError, match=r"models is a symbolic link, and no link in a comparison's folder is followed"
    ):
        compared(made(), made(seed=1), out=tmp_path / "out")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_another_text_or_option_is_another_result():
    model = made()
    data, measurement = massieu.Batches(batches()), Measurement(ATTENTION)
    key = key_of(model, data, measurement)
    assert key == key_of(copy.deepcopy(model), massieu.Batches(batches()), Measurement(ATTENTION, batch_size=3))
    others: list[tuple[Any, massieu.Batches, Measurement]] = [
        (sharper(model, 0, 0, 1.01), data, measurement),
        (model, massieu.Batches(batches(1)), measurement),
        (model, massieu.Batches(batches(), documents=True), measurement),
        (model, data, Measurement(ATTENTION, seed=1)),
        (model, data, Measurement(ATTENTION, draws=0)),
        (model, data, Measurement(ATTENTION, replacements("top_k(2)"))),
        (model, data, Measurement(ATTENTION, replacements(massieu.Replacement("top_k(2)", windows=4)))),
        (model, data, Measurement(["entropy"])),
        (model, data, Measurement("quick")),
        (model, data, Measurement()),
    ]
    assert len({key, *(key_of(*other) for other in others)}) == 1 + len(others)
    with pytest.raises(InputError, match="out needs batches"):
        key_of(model, massieu.Batches([{"input_ids": object()}]), measurement)


def test_another_setting_in_a_checkpoint_s_folder_is_another_result(tmp_path: Path):
    made().save_pretrained(tmp_path)
    model, data = massieu.Checkpoint(tmp_path), massieu.Batches(batches())
    key = key_of(model, data, Measurement())
    (tmp_path / "notes.json").write_text("{}")
    (tmp_path / "tokenizer").mkdir()
    assert key_of(model, data, Measurement()) == key
    assert key_of(massieu.Checkpoint(tmp_path, dtype="bfloat16"), data, Measurement()) != key
    configuration = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(configuration | {"num_attention_heads": 1}))
    assert key_of(model, data, Measurement()) != key


@pytest.mark.medium
def test_an_interrupted_comparison_continues_from_stored_results(pair, tmp_path: Path):
    model = made()
    models = [model, sharper(model, 1, 1, 60.0)]
    how: dict[str, Any] = {"out": tmp_path, "names": ["a", "b"], "statistics": SEVERAL}

    def end(state: Any) -> None:
        if state.stage.startswith("b: reading"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compared(*models, **how, progress=end)
    stages: list[str] = []
    comparison = compared(*models, **how, progress=lambda state: stages.append(state.stage))
    assert {stage.partition(":")[0] for stage in stages} == {"b"}
    assert_frame_equal(comparison.differences, of(pair).differences)


def test_models_that_cannot_be_compared(pair):
    one = pair[0]
    small = massieu.probe(made("albert"), batches(), statistics=["entropy"], draws=0)
    with pytest.raises(InputError, match="different shapes, so their heads cannot be matched"):
        of((one, small))
    elsewhere = massieu.probe(made(seed=1), batches(1), statistics=["entropy"], draws=0)
    with pytest.raises(InputError, match="two models that read different texts"):
        of((one, elsewhere))
    written = without_sums(one)
    written.run.settings["generate"] = 4
    with pytest.raises(InputError, match="each read what it wrote itself"):
        of((one, written))
    elsewhere.units = None
    elsewhere.run.text.source = "another"
    with pytest.raises(InputError, match="nothing shows that they read the same text"):
        of((one, elsewhere))


def test_bad_calls_are_one_sentence(pair):
    model, result = made(), pair[0]
    pair = of(pair)
    generated = (batch for batch in batches())
    calls: list[tuple[str, Any]] = [
        ("at least two models or results, got 1", lambda: massieu.compare(result)),
        ("at least two models, got 0", lambda: Comparison.of([], [])),
        (
            "must be a name, a module, a massieu.Checkpoint or a ProbeResult, got int",
            lambda: massieu.compare(result, 3),
        ),
        ("names must be 2 different names", lambda: massieu.compare(result, result, names=["a"])),
        ("names must be 2 different names", lambda: massieu.compare(result, result, names=["a", "a"])),
        ("models are compared on one text", lambda: massieu.compare("a", "b", data=massieu.Text(continue_for=2))),
        ("read once for each model", lambda: massieu.compare(model, model, data=generated)),
        ("standard input can be read once", lambda: massieu.compare(model, model, data="-")),
        ("level must be between 0 and 1, got 1", lambda: pair.named(1)),
        ("number must be at least 1, got 0", lambda: pair.changed(0)),
        ("no model named 'a' was compared", lambda: pair.changed(model="a")),
        ("no statistic named 'x' was compared", lambda: pair.above({"x": 1.0})),
        ("must be 0 or more, got nan", lambda: pair.above({"entropy": float("nan")})),
    ]
    for message, call in calls:
        with pytest.raises(InputError) as refused:
            call()
        assert message in str(refused.value), (message, str(refused.value))


class _Words:
    """As much of a tokenizer as tells whether two are one."""

    def __init__(self, **words: int) -> None:
        self.words = words

    def get_vocab(self) -> dict[str, int]:
        return self.words


def test_tokenizers_must_mean_the_same_tokens():
    sharing, first = Sharing(), _Words(a=0, b=1)
    assert sharing.tokenizer(first, "one") is first
    assert sharing.tokenizer(_Words(a=0, b=1, added=2), "tuned") is first
    with pytest.raises(InputError, match="one and other have different tokenizers"):
        sharing.tokenizer(_Words(a=0, b=2), "other")


def test_a_known_text_is_checked_before_it_is_read():
    class Batches:
        def __iter__(self):
            return iter([Batch({"input_ids": ids()}, torch.zeros(WINDOWS, LENGTH, dtype=torch.bool), ("",) * WINDOWS)])

    counted_batches: Any = Batches()
    digest, sharing = TextDigest(), Sharing()
    digest.add({"input_ids": ids()}, WINDOWS)
    sharing.check(counted_batches)
    sharing.expect_text(digest.text(), "base")
    sharing.check(counted_batches)
    sharing.expect_text("sha256:another", "base")
    with pytest.raises(InputError, match="the text is not what base was read on"):
        sharing.check(counted_batches)


def test_the_digest_is_of_rows_in_their_order_without_padding():
    def digest(*given: dict[str, Any], rows: Sequence[int | None]) -> str | None:
        text_digest = TextDigest()
        for each, number in zip(given, rows, strict=True):
            text_digest.add(each, number)
        return text_digest.text()

    whole = ids()
    mask = torch.ones_like(whole)
    one = digest({"input_ids": whole, "attention_mask": mask}, rows=[WINDOWS])
    parts = [{"input_ids": whole[i : i + 1], "attention_mask": mask[i : i + 1]} for i in range(WINDOWS)]
    assert digest(*parts, rows=[1] * WINDOWS) == one
    padded = {
        "input_ids": torch.nn.functional.pad(whole, (0, 3)),
        "attention_mask": torch.nn.functional.pad(mask, (0, 3)),
    }
    assert digest(padded, rows=[WINDOWS]) == one
    assert digest({"input_ids": whole.flip(0), "attention_mask": mask}, rows=[WINDOWS]) != one
    changed = whole.clone()
    changed[-1, -1] += 1
    assert digest({"input_ids": changed, "attention_mask": mask}, rows=[WINDOWS]) != one
    images = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    assert digest({"pixels": images}, rows=[2]) == digest({"pixels": images.bfloat16()}, rows=[2])
    assert digest({"nested": {"a": [1, None, images]}}, rows=[None]) != digest(
        {"nested": {"a": [2, None, images]}}, rows=[None]
    )
    assert digest({"input_ids": whole, "odd": object()}, rows=[None]) is None


@pytest.mark.medium
def test_images_are_recognised_by_their_pixels(tmp_path: Path):
    image = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(0))
    model = made()
    key = key_of(model, massieu.Images([image]), Measurement())
    assert key == key_of(model, massieu.Images([image.clone()]), Measurement())
    assert key != key_of(model, massieu.Images([image + 1]), Measurement())
    assert key != key_of(model, massieu.Images([image], captions=["a"]), Measurement())


@pytest.mark.parametrize(
    ("settings", "user_settings", "expected"),
    [
        ({"max_length": 64, "max_tokens": 9, "packing": False, "bos": True}, {}, (64, 9, False, True)),
        ({"max_length": 64, "max_tokens": 9, "packing": True, "bos": None}, {"window": 32}, (32, 9, True, None)),
        ({"max_length": 64, "max_tokens": 9}, {"limit": 5, "fill_windows": False, "bos": False}, (64, 5, False, False)),
    ],
)
def test_settings_of_a_stored_result_hold_where_none_are_given(pair, settings, user_settings, expected):
    stored = without_sums(pair[0])
    stored.run.settings = settings
    data = _with_stored_settings(stored, massieu.Text("a.txt", **user_settings))
    assert isinstance(data, massieu.Text)
    assert (data.window, data.limit, data.fill_windows, data.bos) == expected
    assert data.paths == ("a.txt",)


def test_columns_of_a_stored_result_make_pairs(pair):
    stored = without_sums(pair[0])
    stored.run.settings = {"max_length": 64, "packing": True, "source": "en", "target": "de"}
    data = _with_stored_settings(stored, massieu.Text("a.csv"))
    assert isinstance(data, massieu.Pairs)
    assert (data.paths, data.source, data.target, data.window) == (("a.csv",), "en", "de", 64)
    stored.run.settings = {"max_length": 64, "packing": False}
    batches = _with_stored_settings(stored, massieu.Batches([1]))
    assert isinstance(batches, massieu.Batches)
    assert (batches.window, batches.documents) == (64, True)


def test_revisions_of_one_model_have_names_of_their_own():
    named_models = [_named_model(massieu.Checkpoint("org/model", revision=each)) for each in ("step1", "step2")]
    assert [each.name for each in _with_short_names(named_models, None)] == ["model@step1", "model@step2"]


@pytest.mark.medium
def test_a_comparison_in_inference_mode_is_the_same_comparison():
    """Slopes along the stream are derivatives."""
    model = made()
    models = (model, sharper(model, 1, 1, 60.0))
    expected = compared(*models, statistics=["climb"])
    with torch.inference_mode():
        comparison = compared(*models, statistics=["climb"])
    assert_frame_equal(comparison.differences, expected.differences)
