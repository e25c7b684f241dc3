"""The benchmarks' own arithmetic, that the sides of a comparison do the same work, and that the page says what was measured."""

import dataclasses
import importlib
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import scipy.stats
import torch
import transformers

from massieu import ops
from massieu.probing.sums import units

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks"


def _module(name: str) -> ModuleType:
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))


comparisons, explicit, fit, harness = map(_module, ("comparisons", "explicit_attention", "fit", "harness"))
lengths, losses, on_cuda, page, right = map(_module, ("lengths", "losses", "on_cuda", "page", "right"))
conditional_mean, how_long, scaling, sections = map(_module, ("conditional_mean", "how_long", "scaling", "sections"))
growth, hopfield, probe = map(_module, ("growth", "hopfield", "probe"))
RESULTS = page.read(FOLDER / "results")


# --- arithmetic ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "pairs"), [("MiniLM", 5 * 5), ("GPT-2 small, random weights", 1 + 2 + 3 + 4 + 5)])
def test_a_probe_is_counted_with_every_visible_pair_once(model: str, pairs: int) -> None:
    config = transformers.GPT2Config(n_layer=3, n_head=2, n_embd=8)
    found = probe.count(probe.Case(model, windows=7, length=5, rounds=1), config, windows=7)
    assert found.exponentials == 7 * 3 * 2 * pairs
    assert found.flops == 2 * 4 * found.exponentials  # a product and a sum for each of a head's four numbers


def test_quantiles_of_students_t():
    for freedom, quantile in fit.T_95.items():
        assert quantile == pytest.approx(scipy.stats.t.ppf(0.975, freedom), abs=1e-3)


def test_an_exponent_and_its_interval_are_those_of_linear_regression():
    sizes = [512, 1024, 2048, 4096, 8192]
    amounts = [3e-3, 1.3e-2, 4.6e-2, 0.19, 0.81]
    slope, _, _, _, error = scipy.stats.linregress(np.log(sizes), np.log(amounts))
    reach = scipy.stats.t.ppf(0.975, 3) * error
    found = fit.power(sizes, amounts)
    assert found.exponent == pytest.approx(slope, rel=1e-12)
    assert found.interval == pytest.approx((slope - reach, slope + reach), rel=1e-4)


def test_an_extrapolation_and_its_interval_are_those_of_the_design_matrix():
    sizes, amounts, at = np.array([4.0, 8, 12, 16]), np.array([0.4, 1.55, 3.6, 6.1]), 32.0
    design, point = np.stack([np.ones(4), np.log(sizes)], 1), np.array([1, np.log(at)])
    inverse = np.linalg.inv(design.T @ design)
    beta = inverse @ design.T @ np.log(amounts)
    variance = np.sum((np.log(amounts) - design @ beta) ** 2) / 2
    reach = scipy.stats.t.ppf(0.975, 2) * math.sqrt(variance * (1 + point @ inverse @ point))
    found = fit.power(sizes, amounts, at=at)
    assert found.extrapolated == pytest.approx(np.exp(point @ beta), rel=1e-12)
    assert found.extrapolated_interval == pytest.approx(np.exp(point @ beta + np.array([-reach, reach])), rel=1e-3)


def test_an_exact_power_law_is_found_without_doubt():
    found = fit.power([1, 2, 4, 8], [3.0, 12.0, 48.0, 192.0], at=16)
    assert found.exponent == pytest.approx(2)
    assert found.interval == pytest.approx((2, 2))
    assert found.extrapolated == pytest.approx(768)


@pytest.mark.parametrize(
    ("sizes", "amounts", "named"),
    [([1, 2], [1, 2], "got 2 and 2"), ([1, 2, 3], [1, 2], "got 3 and 2"), ([1, 2, 3], [1, 0, 2], "positive")],
)
def test_a_fit_names_what_it_cannot_take(sizes, amounts, named):
    with pytest.raises(ValueError, match=named):
        fit.power(sizes, amounts)


def test_pairing_takes_out_what_both_sides_share():
    drift = np.geomspace(1, 5, 9)
    found = harness.paired(np.stack([drift, 0.5 * drift], 1))
    assert (found.ratio, found.interval) == (0.5, (0.5, 0.5))


def test_an_interval_holds_its_ratio():
    noise = np.random.default_rng(0).lognormal(0, 0.1, size=(15, 2))
    found = harness.paired(noise)
    assert found.interval[0] < found.ratio < found.interval[1]
    assert found.ratio == np.median(noise[:, 1] / noise[:, 0])


def test_a_machine_that_is_slow_in_some_rounds_changes_no_ratio():
    """With slow rounds around the middle, one side's median is that of a slow round and the other's that of a quick one."""
    slow = np.where(np.arange(15) % 2, 3.0, 1.0)
    noise = np.random.default_rng(0).lognormal(0, 0.02, size=(15, 2))
    found = harness.paired(slow[:, None] * noise * [1.0, 1.2])
    assert found.ratio == pytest.approx(1.2, rel=0.03)
    assert found.interval[1] < 1.26


def test_a_count_is_time_one_after_the_other():
    rates = {"flops": 10.0, "exponentials": 5.0, "memory_bytes": 4.0, "cache_bytes": 8.0}
    counted = harness.Count(flops=20, exponentials=5) * 2 + harness.Count(memory_bytes=4, cache_bytes=4)
    assert counted.seconds(rates) == pytest.approx(4 + 2 + 1 + 0.5)


def _comparison(**changes):
    plain = {
        "name": "work",
        "reference": "peer",
        "reference_seconds": 1.0,
        "seconds": 1.0,
        "time_ratio": 1.0,
        "time_interval": (0.9, 1.1),
        "time_bar": None,
    }
    return harness.Comparison(**(plain | changes))


@pytest.mark.parametrize(
    ("changes", "met"),
    [
        ({}, None),
        ({"time_bar": 1.05}, False),  # the median is under it, the upper end is not
        ({"time_bar": 1.1}, True),
        ({"time_bar": 1.2, "memory_ratio": 0.5, "memory_bar": 0.4}, False),
        ({"time_bar": 1.2, "memory_ratio": 0.4, "memory_bar": 0.5}, True),
        ({"memory_ratio": 0.4, "memory_bar": 0.5, "memory_interval": (0.3, 0.6)}, False),
        ({"time_bar": 1.2, "memory_bar": 0.5}, True),
    ],
)
def test_a_bar_is_met_by_the_upper_end(changes, met):
    row = _comparison(**changes)
    assert row.met is met
    assert comparisons.met(vars(row)) is met


def test_a_fresh_process_that_fails_is_an_error_with_its_own_words(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit('no such side')")
    with pytest.raises(RuntimeError, match=r"ended with status 1\nno such side"):
        harness.run_fresh(script)


@pytest.mark.slow
def test_peak_memory_is_what_the_work_takes(tmp_path):
    script = tmp_path / "work.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import harness, numpy\n"
        "harness.print_peak(lambda share: lambda: numpy.ones(int(share * 2**23)))"
    )
    _, mebibytes = harness.run_fresh(script)
    assert 63.9 < mebibytes < 66  # 64, but for a page


# --- the sides of a comparison do the same work ----------------------------------------------------------------------


@pytest.mark.parametrize("passes", [1, 3])
def test_explicit_attention_is_fused_attention(passes):
    found = [explicit.layer(way, 40, passes)() for way in (explicit.explicit, explicit.fused)]
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


@pytest.mark.parametrize(
    ("ours", "reference"),
    [
        (ops.attention, lengths._matrix),
        (lengths._log_partition, lengths._matrix_log_partition),
        (lengths._moments("blocks"), lengths._matrix_moments),
        (lengths._window, lengths._masked),
        (ops.attention, lengths._fused),
    ],
)
def test_sides_of_the_lengths_agree(ours, reference):
    first, second = (lengths._forward(function)(600)() for function in (ours, reference))
    for found, expected in zip(first, second, strict=False):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("ours", "reference"),
    [(ops.attention, lengths._matrix), (lengths._log_partition, lengths._matrix_log_partition)],
)
def test_gradients_of_the_lengths_agree(ours, reference):
    first, second = (lengths._forward_backward(function)(600)() for function in (ours, reference))
    for found, expected in zip(first, second, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("name", list(losses.CASES))
def test_sides_of_the_losses_agree(name, monkeypatch):
    monkeypatch.setattr(losses, "WORDS", 301)
    monkeypatch.setattr(losses, "ROWS", 16)
    reference, ours = (work() for work in losses.CASES[name].prepare(48))
    for expected, found in zip(reference, ours, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


# The search has no output: its two sides try different numbers.
@pytest.mark.parametrize("name", [name for name in conditional_mean.CASES if name != conditional_mean.SEARCH])
def test_sides_of_conditional_means_agree(name):
    reference, ours = (work() for work in conditional_mean.CASES[name].prepare(60))
    for expected, found in zip(reference, ours, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


# --- the page --------------------------------------------------------------------------------------------------------


def test_the_page_is_what_the_results_say():
    assert (ROOT / "docs" / "benchmarks.md").read_text() == page.page(RESULTS), "run python benchmarks/page.py"


@pytest.mark.parametrize("name", [name for name, content in RESULTS.items() if "rows" in content])
def test_stored_verdicts_are_those_of_the_stored_numbers(name):
    for row in RESULTS[name]["rows"]:
        if "time_interval" in row:
            assert row["met"] is comparisons.met(row)


def test_each_result_has_its_place_and_its_command():
    scripts = {path.stem for path in FOLDER.glob("*.py")}
    commands = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("BENCHMARKS :="))
    for name in RESULTS:
        assert name in scripts, f"benchmarks/{name}.py is missing"
        assert name == "on_cuda" or name in commands.split(), f"make bench leaves out benchmarks/{name}.py"
        assert f"`python benchmarks/{name}.py`" in page.page(RESULTS)


def _fixture() -> dict:
    machine = {"processor": "Some processor", "threads": 1, "torch": "9.9"}
    missed = _comparison(time_bar=1.0, counted_seconds=0.25, why="of the weather")
    row = vars(missed) | {"met": missed.met}
    good = vars(_comparison(name="other work", time_bar=2.0))
    return {
        "ops": {
            "date": "2030-01-02T03:04:05+00:00",
            "machine": machine,
            "rows": [row, good | {"counted_seconds": None}],
            "rates": {"flops": 2e11, "exponentials": 5e9, "memory_bytes": 14e9, "cache_bytes": 1e11},
        },
        "new": {"date": "2030-01-03T03:04:05+00:00", "machine": machine, "rows": [good]},
    }


def test_the_page_of_a_fixture():
    text = page.page(_fixture())
    assert "**2 of 3 bars are met.**" in text
    assert "* Attention, log Z, moments: work, beside peer" in text
    assert "`python benchmarks/ops.py`, 2030-01-02, Some processor, 1 thread, torch 9.9" in text
    assert "| work | peer | 1 s / 1 s | 1.00 [0.90, 1.10] | ≤ 1 |  |  |  | **missed** |" in text
    assert (
        "* **work**, compared with peer: time ratio up to 1.1, 10.0 % above the bar of 1. The count is 250 ms, 0.25 of the "
        "reference's time. Why: of the weather." in text
    )
    assert "| work | 250 ms | 1 s | 4.00 |" in text
    assert text.index("## Attention, log Z, moments") < text.index("## new") < text.index("## CUDA: not measured")


@pytest.mark.parametrize("divided_by", [1, 7, 10**6])
def test_texts_double_and_are_whole_batches(divided_by):
    for part in growth.PARTS.values():
        half, whole = part.texts(divided_by)
        assert whole == 2 * half
        assert half % part.batch_size == 0
        assert whole <= max(part.windows // divided_by, 2 * growth.FEWEST_BATCHES * part.batch_size)


def test_the_shorter_text_fills_the_sums_room():
    """Of sampled windows too, which come last to their most error units."""
    for part in growth.PARTS.values():
        assert part.texts(1)[0] * units.SAMPLE_SHARE > units.WINDOWS.capacity


def test_growth_is_one_more_window_beside_one_of_half_the_text(monkeypatch, tmp_path):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    half = growth.Read(windows=50, seconds_per_window=0.1, seconds_once=3.0, peak_mib=400.0)
    grown = growth.Read(windows=100, seconds_per_window=0.105, seconds_once=3.5, peak_mib=480.0)
    row = growth.row("windows", half, grown)
    assert row.time_ratio == pytest.approx(1.05)
    assert row.memory_ratio == pytest.approx(1.2)
    assert row.met is False  # a fifth more memory
    harness.write("growth", [row, growth.row("heads", half, half)])
    assert growth.stored_rows(without=["heads"]) == [dataclasses.replace(row, time_interval=list(row.time_interval))]
    text = page.page(page.read(tmp_path))
    assert "| 100 windows of 16, 4 layers of 4 heads | 3.5 s |" in text
    # Less than a twentieth of 100 windows of 0.105 s, and less than nothing.
    for seconds in (0.5, -2.0):
        harness.write("growth", [dataclasses.replace(row, seconds_once=seconds)])
        text = page.page(page.read(tmp_path))
        assert "| 100 windows of 16, 4 layers of 4 heads | below 525 ms, not resolved |" in text


def test_a_small_text_is_read_as_a_large_one():
    part = growth.Part(layers=1, heads=2, width=8, windows=8, length=6, batch_size=2)
    read = growth.read(part, windows=8)
    assert read.windows == 8
    assert read.seconds_per_window > 0
    assert read.peak_mib > 0


def test_what_a_run_takes_is_stored_and_said_before_the_next(monkeypatch, tmp_path):
    for module in (harness, how_long):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(harness, "_STARTED", time.perf_counter() - 90)
    harness.save("one", rows=[])
    harness.save("two", rows=[])
    (tmp_path / "old.json").write_text("{}", encoding="utf-8")
    assert how_long.stored_minutes("one") == pytest.approx(1.5, abs=0.5)
    assert how_long.sentence(["one", "two"]) == "2 benchmarks take about 3 minutes, as when they were last run"
    assert how_long.sentence(["old", "new"]) == "no time is stored of old, new"


# --- CUDA ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def few(monkeypatch, tmp_path) -> dict:
    """A case of each kind at a size for the CPU, timed once, written elsewhere."""
    monkeypatch.setattr(harness, "RESULTS", tmp_path)

    def once(works: dict, device: torch.device, seconds: float) -> dict[str, list[float]]:
        for work in works.values():
            work()
        return {name: [1.0 if name == on_cuda.OURS else 1.02] * 3 for name in works}

    monkeypatch.setattr(on_cuda, "turns", once)

    def fifth(works: dict, device: torch.device, rounds: int) -> dict[str, float]:
        for work in works.values():
            work()
        return dict.fromkeys(works, 0.5) | ({"probe": 1.5} if "probe" in works else {"a call of the monitor": 4.0})

    monkeypatch.setattr(on_cuda, "walls", fifth)
    monkeypatch.setattr(on_cuda, "TOKENS_AT_ONCE", 64)
    monkeypatch.setattr(on_cuda, "PROBES", (("quick", {"statistics": "quick"}, 3),))
    monkeypatch.setattr(on_cuda, "WINDOW", 8)
    monkeypatch.setattr(on_cuda, "TRAINED", (1, 8))
    monkeypatch.setattr(on_cuda, "TRAINED_MODEL", SMALL_MODEL)
    monkeypatch.setattr(on_cuda, "PROBED", SMALL_MODEL)
    monkeypatch.setattr(right, "LENGTH", 12)
    monkeypatch.setattr(right, "SIZE", 8)
    monkeypatch.setattr(right, "DTYPES", ("bfloat16",))
    shapes = on_cuda.Shape(64, 64), on_cuda.Shape(64, 64, is_causal=False, key_heads=4)
    chosen = {
        f"{shape.key_heads} key heads": on_cuda.Case(partial(on_cuda._attention, shape, backward), 1.05, 1.2)
        for shape, backward in zip(shapes, (False, True), strict=True)
    }
    chosen["six moments"] = on_cuda.Case(partial(on_cuda._moments, shapes[0], on_cuda.SIX), 1.7)
    return chosen | {"loss": on_cuda.Case(partial(on_cuda._losses, torch.bfloat16, 8, 16, 32), 1.1)}


SMALL_MODEL = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 32}


@pytest.mark.medium
def test_the_cases_of_cuda_run(few):
    assert on_cuda.measure(torch.device("cpu"), "some device", few, 0.0) == 0
    found = page.read(harness.RESULTS)["on_cuda"]
    assert [row["name"] for row in found["rows"]] == list(few)
    assert [row["reference"] for row in found["rows"][:3]] == ["SDPA"] * 3
    assert all(row["met"] and row["rounds"] == 3 for row in found["rows"])
    assert set(found["lost"]) <= {"liger_kernel", "cut_cross_entropy"}
    kinds = [
        row["kind"] for row in found["accuracy"] if (row["function"], row["backend"]) == ("attention", "reference")
    ]
    assert kinds == list(right.problems("bfloat16"))
    assert all(row["met"] for row in found["accuracy"])
    text = page.page(_fixture() | {"on_cuda": found})
    assert "## CUDA\n" in text
    assert "CUDA: not measured" not in text
    assert "On one some device" in text
    assert "| a call of the monitor | 4 s | 8.00 |" in text
    assert "| quick | 3 | 1.5 s | 500 ms | 3.00 |" in text
    assert "| attention | `reference` | bfloat16 | plain, causal, " in text
    assert "| 16 key heads | SDPA | 1 s / 1.02 s | 0.98 [0.98, 0.98] | ≤ 1.05 |" in text
    assert "planned rows" not in text
    # Of the fixture two of three, four rows, and the errors of three backends of attention and two of moments.
    assert "**11 of 12 bars are met.**" in text


def test_an_interrupted_run_on_cuda_goes_on(few, monkeypatch, capsys):
    turns, places = on_cuda.turns, iter(range(9))

    def interrupted(*given):
        if next(places) == 1:
            raise KeyboardInterrupt
        return turns(*given)

    monkeypatch.setattr(on_cuda, "turns", interrupted)
    for module, part in ((right, "accuracy"), (on_cuda, "training"), (on_cuda, "probes"), (on_cuda, "fixed_costs")):
        monkeypatch.setattr(module, part, lambda device: [])
    assert on_cuda.measure(torch.device("cpu"), "some device", few, 0.0) == 130
    assert capsys.readouterr().err == "interrupted: 1 of 4 cases are kept\n"
    kept = page.read(harness.RESULTS)["on_cuda"]
    assert (len(kept["rows"]), kept["complete"]) == (1, False)
    assert "Some planned rows were not measured" in page.page({"on_cuda": kept})
    assert on_cuda._earlier(harness.RESULTS / "on_cuda.json", "another device") == {}
    assert on_cuda.measure(torch.device("cpu"), "some device", few, 0.0) == 0
    done = page.read(harness.RESULTS)["on_cuda"]
    assert [row["name"] for row in done["rows"]] == list(few)
    assert (done["complete"], next(places)) == (True, 5)
    assert on_cuda._earlier(harness.RESULTS / "on_cuda.json", "some device") == {}


@pytest.mark.parametrize(("sides", "passes"), [("_steps", 1), ("_steps", 3), ("_pooling", 2)])
def test_both_sides_of_the_hopfield_benchmark_do_the_same_work(sides, passes):
    dense, ours = getattr(hopfield, sides)(passes, 12)
    for found, expected in zip(ours(), dense(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def test_a_part_that_broke_off_is_measured_again(monkeypatch, tmp_path):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    parts = {"accuracy": right, "training": on_cuda, "probes": on_cuda, "fixed_costs": on_cuda}
    for part, module in parts.items():
        monkeypatch.setattr(module, part, lambda device, part=part: [{"of": part}])

    def broken(device: torch.device):
        yield {"of": "half"}
        raise KeyboardInterrupt

    monkeypatch.setattr(on_cuda, "training", broken)
    device = torch.device("cpu")
    assert on_cuda.measure(device, "some device", {}, 0.0) == 130
    kept = page.read(tmp_path)["on_cuda"]
    assert (kept["finished"], kept["fixed"], kept["training"]) == (["fixed"], [{"of": "fixed_costs"}], [{"of": "half"}])
    monkeypatch.setattr(on_cuda, "fixed_costs", broken)
    monkeypatch.setattr(on_cuda, "training", lambda device: [{"of": "all"}])
    assert on_cuda.measure(device, "some device", {}, 0.0) == 0
    done = page.read(tmp_path)["on_cuda"]
    assert (done["training"], done["complete"]) == ([{"of": "all"}], True)


def test_the_cases_of_cuda_are_those_of_the_bars():
    names = on_cuda.cases()
    assert len(names) == 2 * len(on_cuda.SHAPES) + len(on_cuda.MOMENT_SHAPES) + 1 + 2
    assert {case.time_bar for name, case in names.items() if name.endswith("forward")} == {1.05}
    assert {case.time_bar for name, case in names.items() if name.endswith("backward")} == {1.1}
    assert {case.time_bar for name, case in names.items() if name.endswith("six moments")} == {1.7}


@pytest.mark.parametrize("kind", right.problems("float32"))
def test_an_error_beyond_rounding_misses_its_bar(kind):
    problem = right.problems("float32")[kind]
    exact = right.exact_attention(problem)
    assert max(exact[part].abs().max() for part in exact if part != "log_partition") < 1e3
    moved = exact | {"output": exact["output"] * (1 + 1e-4)}
    found = right.attention_errors(problem, moved, "reference", torch.device("cpu"))
    assert found["output"] == pytest.approx(1e-4, rel=0.05)
    assert found["output"] > right.bar("output", "float32")
    assert all(error <= right.bar(part, "float32") for part, error in found.items() if part != "output")


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run")
def test_without_cuda_the_benchmark_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["on_cuda.py"])
    assert on_cuda.main() == 2
    assert capsys.readouterr().err == "benchmarks/on_cuda.py needs a CUDA device, and PyTorch finds none here\n"


def test_the_page_says_what_is_extrapolated():
    content = _fixture()
    power = vars(fit.power([1024, 2048, 4096], [1024.0, 4096.0, 16384.0], at=8192))
    ours = vars(_comparison(name="pairs, 8192", mebibytes=64.0, reference_mebibytes=128.0)) | {"counted_seconds": None}
    content["ops"]["rows"].append(ours)
    content["ops"]["matrix"] = {"pairs": 8192, "mebibytes": power, "seconds": power}
    text = page.page(content)
    assert "**8,192 pairs.** Ours takes 1 s and 64 MiB, measured." in text
    assert "extrapolated from 1,024, 2,048, 4,096 pairs" in text
    assert "64 GiB [64, 64] (exponent 2.00 [2.00, 2.00])" in text


def test_the_estimate_for_many_keys_is_of_the_measured_numbers():
    """What `docs/explanation/scaling.md` says was measured, and what follows from it, from the file that it names."""
    results = RESULTS["scaling"]
    text, rates = (FOLDER.parent / "docs" / "explanation" / "scaling.md").read_text(), results["ceilings"]
    names = {(1, False): "1 query, forwards", (1, True): "1 query, both ways"}
    names |= {(64, False): "64 queries, forwards", (64, True): "64 queries, both ways"}
    over, wanted = [], []
    for (queries, backward), name in names.items():
        rows = [row for row in results["rows"] if (row["queries"], row["backward"]) == (queries, backward)]
        assert [row["keys"] for row in rows] == [400_000, 800_000, 1_600_000, 3_200_000]
        times = " | ".join(f"{1000 * row['seconds']:,.0f} ms" for row in rows)
        ratios = [row["seconds"] / row["predicted_seconds"] for row in rows]
        over += ratios
        wanted.append(f"| {name} | {times} | {rows[0]['exponent']:.2f} | {min(ratios):.2f}–{max(ratios):.2f} |")
        count, expected = scaling.predicted(10**9, queries, backward, rates), rows[-1]["seconds"] * 10**9 / 3_200_000
        wanted.append(f"| {name} | {count:.0f} s | {expected:.0f} s |")
    memory = [row["mebibytes"] for row in results["rows"] if row["mebibytes"] is not None]
    wanted.append("both ways | " + " | ".join(f"{each:.0f} MiB" for each in memory))
    wanted.append(f"is a factor of {min(over):.2f} to {max(over):.2f} that")
    wanted += [
        f"read and summed | {rates['memory_bytes'] / 1e9:.1f} GB/s",
        f"$`B`$ | {rates['mapped_bytes'] / 1e9:.1f} GB/s",
    ]
    wanted += [f"$`F`$ | {rates['flops'] / 1e9:.0f} GFlop/s", f"$`X`$ | {rates['exponentials'] / 1e9:.1f}·10⁹/s"]
    missing = [words for words in wanted if words not in text]
    assert missing == []


def _row(name: str, title: str) -> dict:
    return next(row for row in RESULTS[name]["rows"] if row["name"] == title)


def _range(values: list[float], digits: int) -> str:
    ends = [f"{each:.{digits}f}" for each in (min(values), max(values))]
    return " to ".join(dict.fromkeys(ends))


def _said_of_losses() -> list[str]:
    beside = {"F.cross_entropy(h @ W.T, y)": [], "InfoNCE": []}
    for row in RESULTS["losses"]["rows"]:
        if row["name"].startswith("InfoNCE"):
            beside["InfoNCE"].append(row)
        elif row["reference"] in beside and "ignored" not in row["name"]:
            beside[row["reference"]].append(row)
    words, pairs = (
        [[row[part] for row in rows] for part in ("time_ratio", "memory_ratio")] for rows in beside.values()
    )
    tokens = _row("tokens", "forward and backward, 8192 × 1024 × 50257")
    return [
        f"cross-entropy takes {_range(words[0], 2)} times the time of the logits and {words[1][0]:.2f} of their memory",
        f"InfoNCE takes {_range(pairs[0], 2)} of the time and {_range(pairs[1], 3)} of the memory",
        f"take {tokens['time_ratio']:.2f} of the time and {tokens['memory_ratio']:.3f} of the memory of",
    ]


def _said_of_fixed_points() -> list[str]:
    rows = RESULTS["fixed_points"]["rows"]
    sides = ["auto", "plain iteration", "torchdeq broyden", "torchdeq anderson"]
    names = [f"Hopfield, β = {beta}, 64 × 32" for beta in (4, 8, 16, 32)]
    names += [f"linear attention, ρ = {radius}, general, 256 × 64" for radius in (0.5, 0.9, 0.99)]
    said = []
    for row in (row for row in rows if row["name"] in (*names, "linear attention, ρ = 0.99, symmetric, 256 × 64")):
        cells = ["–" if (found := row["evaluations"][side]) is None else f"{found:.1f}" for side in sides]
        said.append(f"| {row['name']} | {' | '.join(cells)} | {row['ratio']:.2f} |")
    most = max(row["ratio"] for row in rows)
    other_points = sum(row["elsewhere"] for row in rows)
    assert all(row["converged"]["auto"] == 24 for row in rows)
    return [
        *said,
        f"The benchmark has {len(rows)} maps",
        f"at most {most:.2f}",
        f"for {other_points} of the {24 * len(rows):,} items",
    ]


def _said_of_attention() -> list[str]:
    plain, both = (
        _row("ops", f"attention and log Z, {way}")["time_ratio"] for way in ("forward", "forward and backward")
    )
    half = [row["time_ratio"] for row in RESULTS["half_precision"]["rows"] if row["name"].startswith("bfloat16")]
    on_card = _row("on_cuda", "bfloat16, causal, L = 16384, D = 64, forward")["time_ratio"]
    return [
        f"{plain:.2f}× the time of PyTorch's fused attention in float32 and, with the backward pass, {both:.2f}×",
        f"{min(half):.2f}–{max(half):.2f}× in bfloat16",
        f"On one {RESULTS['on_cuda']['device']}, causal in bfloat16 at 16,384 tokens, it takes {on_card:.2f}×",
    ]


def _said_of_probes() -> list[str]:
    rows = [row for row in RESULTS["probe"]["rows"] if "GPT-2" in row["name"]]
    quick, attention, everything = (row["time_ratio"] for row in rows)
    processor = RESULTS["probe"]["machine"]["processor"]
    return [
        f"takes {quick:.1f}, {attention:.1f} and {everything:.1f} times its forward passes (64 windows of 512 tokens in "
        f"float32, one thread of an {processor})"
    ]


def _said_of_populations() -> list[str]:
    flow = RESULTS["population"]["flow"]
    return [f"takes {flow['seconds'] / flow['layers'] / flow['attention_seconds']:.2f} times attention's time"]


def _said_of_hopfield_layers() -> list[str]:
    row = _row("hopfield", "Hopfield, 4 passes, L = 4096, forward and backward")
    return [f"take {row['time_ratio']:.2f} of the time and {row['memory_ratio']:.3f} of the memory"]


def _said_of_the_monitor() -> list[str]:
    rows = [row for row in RESULTS["monitor"]["rows"] if row["name"].startswith("character model, context")]
    rows = [row for row in rows if "compiled" not in row["name"]]
    watched, clipped = (
        [row["time_ratio"] for row in rows if row["name"].endswith(end)] for end in ("a watched step", "with clip")
    )
    on_card = {row["name"]: row["steps"] for row in RESULTS["on_cuda"]["training"]}
    return [
        f"a watched step took {_range(watched, 1)} times a step's time, and one with `clip` {_range(clipped, 1)} times",
        f"One measurement on an {RESULTS['on_cuda']['device']} took",
        f"a call took {on_card['a call of the monitor']:.1f} training steps, a watched step "
        f"{on_card['a watched step']:.1f} and a clipped step {on_card['a clipped step']:.1f}",
    ]


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("README.md", _said_of_attention),
        ("CHANGELOG.md", _said_of_probes),
        ("docs/how-to/losses.md", _said_of_losses),
        ("docs/how-to/solve.md", _said_of_fixed_points),
        ("docs/how-to/flow.md", _said_of_populations),
        ("docs/how-to/nn.md", _said_of_hopfield_layers),
        ("docs/how-to/monitor.md", _said_of_the_monitor),
    ],
)
def test_what_pages_say_was_measured_is_what_is_stored(page: str, said: Callable[[], list[str]]) -> None:
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert [words for words in said() if words not in text] == []


# --- alarms ----------------------------------------------------------------------------------------------------------

alarm_published, alarm_runs, alarm_benchmark = map(_module, ("alarm_published", "alarm_runs", "alarms"))


def _run_of(losses: list[float], norms: list[float] | None = None):
    return alarm_runs.Run(np.array(losses), np.array(norms or [1.0] * len(losses)), np.arange(0), [], np.zeros((0, 0)))


def test_the_losss_own_rule_and_the_simple_detectors():
    # A loss at 1 that is 2 from step 50 on: the mean of ten steps is above 1.3 once four of them are.
    assert alarm_benchmark.loss_rises(_run_of([1.0] * 50 + [2.0] * 10)) == 53
    assert alarm_benchmark.loss_rises(_run_of(list(np.linspace(3, 1, 100)))) is None
    assert alarm_benchmark.loss_rises(_run_of([1.0] * 50 + [math.nan] * 10)) == 50
    assert alarm_benchmark.gradient_rule(_run_of([1.0] * 40, [1.0] * 30 + [2.9, 3.1] + [1.0] * 8)) == 31
    # Mean 1.05 and standard deviation .05: the limit is 1.3.
    assert alarm_benchmark.loss_spike(_run_of([1.0, 1.1] * 20 + [1.29])) is None
    assert alarm_benchmark.loss_spike(_run_of([1.0, 1.1] * 20 + [1.31])) == 40


def test_spectral_alignment_is_the_diversity_of_signs_along_the_leading_singular_vector():
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 3, bias=False)
    inputs = torch.randn(5, 7, 8)
    leading = np.linalg.svd(layer.weight.detach().double().numpy())[2][0]
    signs = np.sign(inputs.double().numpy() @ leading)
    [(_, found)] = alarm_published.spectral_alignment(torch.nn.Sequential(layer), (inputs,)).items()
    assert found == pytest.approx(1 - abs(signs.mean()), abs=1e-6)
    aligned = torch.from_numpy(leading).float().expand(5, 7, 8) + 0.01 * inputs
    [(_, found)] = alarm_published.spectral_alignment(torch.nn.Sequential(layer), (aligned,)).items()
    assert found == pytest.approx(0, abs=1e-6)


def test_spectral_entropy_is_that_of_the_whole_bilinear_form():
    torch.manual_seed(0)
    attention = alarm_runs.Attention(causal=False)
    found = alarm_published.spectral_entropy(torch.nn.Sequential(attention), alarm_runs.HEADS)
    query, key = (linear.weight.detach().double().numpy() for linear in (attention.query, attention.key))
    size = alarm_runs.WIDTH // alarm_runs.HEADS
    for head in range(alarm_runs.HEADS):
        rows = slice(head * size, (head + 1) * size)
        power = np.linalg.svd(query[rows].T @ key[rows], compute_uv=False)[:size] ** 2
        assert found[f"bilinear/0/head{head}"] == pytest.approx(scipy.stats.entropy(power), rel=1e-4)


def test_broken_runs_have_healthy_twins():
    settings = alarm_runs.settings(7, 4, {"ramped rate": 5, "no warm-up": 3})
    assert len(settings) == len(set(settings))
    twins = {(setting.model, setting.seed) for setting in settings if setting.fault is None}
    assert {(setting.model, setting.seed) for setting in settings if setting.fault} <= twins
    assert [setting.seed for setting in settings if setting.fault == "no warm-up"] == [8, 11, 14]
    assert {setting.model for setting in settings if setting.fault == "no warm-up"} == {"encoder-decoder"}


@pytest.mark.medium
@pytest.mark.parametrize("model", alarm_runs.MODELS)
def test_a_run_records_what_every_detector_looks_at(model: str):
    run = alarm_runs.train(alarm_runs.Setting(model, "rounded attention", 3), steps=6)
    assert run.steps.tolist() == [0, 5]
    assert len(run.losses) == len(run.norms) == 6
    quantities = alarm_benchmark.watched(run)
    layers = 2 if model == "encoder-decoder" else 3  # the monitor counts encoder and decoder of this model together
    sites = 6 if model == "encoder-decoder" else 3
    counts = {name: len(places) for name, (places, _) in quantities.items()}
    assert counts["largest_logit"] == counts["entropy"] == sites * alarm_runs.HEADS
    assert counts["spread"] == counts["effective_rank"] == layers
    assert counts["gradient_norm"] == 1
    assert alarm_benchmark.bilinear(run).shape == (2, sites * alarm_runs.HEADS)
    assert alarm_benchmark.alignment(run).shape == (2, 1)


def test_the_page_of_alarms_has_the_stored_table():
    text = (ROOT / "docs" / "how-to" / "alarms.md").read_text()
    assert sections.alarm_table(RESULTS["alarms"]) in text
    rang = [row["rang"] for row in RESULTS["alarms"]["simulated"]]
    assert f"at most {max(rang)} of 30 runs" in text
