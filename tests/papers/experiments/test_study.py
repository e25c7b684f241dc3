"""Thresholds, intervals and verdicts of experiments, on numbers that are made up, and how a study is run and kept."""

import json
import math
import runpy
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import torch
from scipy import stats
from tests.support.rows import some_slow

from massieu.cli.experiment import show
from massieu.errors import InputError
from massieu.papers.experiments import run as room
from massieu.papers.experiments.criterion import INTERVALS, Criterion, interval, judge
from massieu.papers.experiments.page import page_of, strip
from massieu.papers.experiments.run import load, run
from massieu.papers.experiments.study import Experiment, Study, experiments, find
from massieu.papers.experiments.training import minimise

ROOT = Path(__file__).parents[3]
FINDING = Criterion("error", "the error", most=1.0)
CRITERIA = (
    FINDING,
    Criterion("risk", "the risk", most=0.1, role="optimisation"),
    Criterion("null", "the error without it", most=1.0, role="control"),
)
GOOD = {"error": 0.5, "risk": 0.05, "null": 3.0}


def study_of(numbers: dict[str, float], seeds: int = 5, **options) -> Study:
    """Seeds that differ by a thousandth."""
    experiment = Experiment("made-up", "Is it so?", "E0", "Nothing.", CRITERIA, 1, lambda seed, quick: numbers)
    runs = {seed: {name: value * (1 + seed / 1000) for name, value in numbers.items()} for seed in range(seeds)}
    return Study(experiment, runs=runs, **options)


def percentiles(samples: np.ndarray) -> float:
    """The share of intervals by plain percentiles of resampled means that hold 0."""
    drawn = np.random.default_rng(1)
    means = [drawn.choice(values, (1000, len(values))).mean(1) for values in samples]
    ends = [np.quantile(each, [0.025, 0.975]) for each in means]
    return float(np.mean([low <= 0 <= high for low, high in ends]))


@pytest.mark.medium
@some_slow(("number", "trials"), [(5, 200), (8, 400)], 1)
def test_the_interval_covers_the_mean_of_gaussian_numbers(number: int, trials: int):
    drawn = np.random.default_rng(0)
    covered = 0
    for values in drawn.normal(size=(trials, number)):
        low, high = interval(values.tolist())
        covered += low <= 0 <= high
        # About as wide as Student's, for which the coverage is exact.
        half = stats.t.ppf(0.975, number - 1) * values.std(ddof=1) / math.sqrt(number)
        assert 0.6 * half < (high - low) / 2 < 1.2 * half
    # Measured on 20,000 draws: .929 for 5 numbers, .937 for 8. The expanded percentiles are those of Student's t, the
    # resamples' law is not, so that 95 % is not reached.
    assert abs(covered / trials - 0.93) < 5 * math.sqrt(0.07 * 0.93 / trials)
    plain = percentiles(drawn.normal(size=(trials, number)))
    assert plain < 0.93 - 2 * math.sqrt(0.07 * 0.93 / trials)


LAWS = {
    "normal": (lambda drawn: drawn.standard_normal(5), 0.0, (0.85, 0.95), "nine of ten cases"),
    "lognormal": (lambda drawn: np.exp(drawn.standard_normal(5)), math.exp(0.5), (0.75, 0.85), "eight of ten"),
    "one in ten diverges": (
        lambda drawn: drawn.standard_normal(5) + 20 * (drawn.random(5) < 0.1), 2.0, (0.0, 0.5), "half or fewer"
    ),
}  # fmt: skip


@pytest.mark.medium
@pytest.mark.parametrize("law", LAWS)
def test_intervals_are_called_what_they_are(law: str):
    """In so many of 300 cases an interval holds the mean as is said wherever intervals are shown."""
    draw, mean, (least, most), said = LAWS[law]
    drawn = np.random.default_rng(2)
    held = np.mean([low <= mean <= high for low, high in (interval(draw(drawn)) for _ in range(300))])
    assert least - 3 * math.sqrt(least * (1 - least) / 300) < held < most + 3 * math.sqrt(most * (1 - most) / 300)
    assert said in INTERVALS


def test_an_interval_is_shown_as_a_bootstrap(capsys: pytest.CaptureFixture[str]):
    study = study_of(GOOD)
    show(study)
    printed = " ".join(capsys.readouterr().out.split())
    for text in (printed, page_of(study)):
        assert INTERVALS in text
        assert "95 % interval" not in text


def test_an_interval_needs_two_finite_numbers():
    assert all(math.isnan(end) for end in (*interval([]), *interval([1.0]), *interval([1.0, math.nan])))
    assert interval([2.0] * 5) == (2.0, 2.0)


def test_an_interval_of_more_than_six_numbers_is_about_students():
    """Of normal quantiles, whose mean is 0; drawn resamples in place of all."""
    values = [NormalDist().inv_cdf((place + 0.5) / 9) for place in range(9)]
    low, high = interval(values)
    half = stats.t.ppf(0.975, 8) * np.std(values, ddof=1) / 3
    assert abs(low + high) < 0.05 * half
    assert abs((high - low) / (2 * half) - 1) < 0.15


@pytest.mark.parametrize(
    ("values", "outcome"),
    [
        ([0.5, 0.6, 0.4, 0.5, 0.5], "met"),
        ([1.5, 1.6, 1.4, 1.5, 1.5], "missed"),
        ([0.1, 1.9, 0.2, 1.5, 0.9], "open"),  # vague: the mean is below, the interval is not
        ([0.5] * 4, "open"),
        ([0.5, 0.5, 0.5, 0.5, math.nan], "open"),
    ],
)
def test_a_threshold_is_met_by_the_whole_interval(values, outcome):
    assert judge(FINDING, values).outcome == outcome


def test_both_ends_of_an_equivalence_count():
    near = Criterion("slope", "the slope", least=-1.02, most=-0.98)
    for centre, outcome in ((-1.0, "met"), (-0.97, "missed"), (-1.03, "missed"), (-0.98, "open")):
        assert judge(near, [centre + step / 1000 for step in (-2, -1, 0, 1, 2)]).outcome == outcome
    assert near.threshold == "−1.02 … −0.98"
    assert (FINDING.threshold, Criterion("n", "n", least=3).threshold) == ("≤ 1", "≥ 3")


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({}, "confirmed"),
        ({"error": 2.0}, "refuted"),
        ({"error": 0.998}, "undecided"),
        ({"risk": 0.2}, "undecided: optimisation"),
        ({"risk": 0.2, "error": 2.0}, "undecided: optimisation"),
        ({"risk": math.nan}, "undecided: optimisation"),
        ({"null": 0.5}, "undecided: control"),
        ({"null": 0.5, "error": 2.0}, "refuted"),
    ],
)
def test_the_verdict_says_no_more_than_the_outcomes(changed, verdict):
    assert study_of(GOOD | changed).verdict == verdict


def test_few_seeds_and_quick_runs_decide_nothing():
    assert study_of(GOOD, seeds=4).verdict == "undecided"
    assert study_of(GOOD, quick=True).verdict == "undecided"


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An experiment that counts which seeds it was asked for, and is interrupted at seed 13."""
    measured_seeds: list[int] = []

    def measure(seed: int, quick: bool) -> dict[str, float]:
        measured_seeds.append(seed)
        if seed == 13:
            raise KeyboardInterrupt
        return GOOD | {"quick": float(quick), "odd": math.nan}

    entry = Experiment("made-up", "Is it <so>?", "E0", "Nothing.", CRITERIA, 1, measure)
    monkeypatch.setattr(room, "find", lambda name: entry)
    return measured_seeds


def test_what_is_done_is_kept_and_a_resumed_run_does_the_rest(registered: list[int], tmp_path: Path):
    progress_calls = []
    study, complete = run("made-up", seeds=[11, 12, 13, 14], out=tmp_path)
    assert (sorted(study.runs), complete) == ([11, 12], False)
    assert sorted(load(tmp_path / "made-up.json").runs) == [11, 12]
    study, complete = run(
        "made-up", seeds=[11, 12, 15], out=tmp_path, resume=True, progress=lambda *a: progress_calls.append(a[:3])
    )
    assert complete and registered == [11, 12, 13, 15] and progress_calls == [(11, 1, 3), (12, 2, 3), (15, 3, 3)]
    stored = json.loads((tmp_path / "made-up.json").read_text())
    assert list(stored["seeds"]) == ["11", "12", "15"] and stored["seeds"]["15"]["numbers"]["odd"] is None
    assert load(tmp_path / "made-up.json").to_dict()["criteria"] == study.to_dict()["criteria"]


def test_seeds_that_are_stored_are_neither_lost_nor_joined_with_others(registered: list[int], tmp_path: Path):
    run("made-up", seeds=[1, 2], out=tmp_path)
    path = tmp_path / "made-up.json"
    before = path.read_text()
    with pytest.raises(InputError, match=r"holds 2 seeds already; continue with --resume, or choose another --out"):
        run("made-up", seeds=[3], out=tmp_path)
    assert path.read_text() == before and registered == [1, 2]
    path.write_text(before.replace(torch.__version__, "1.0"))
    with pytest.raises(InputError, match=r"was made with torch 1\.0 and now .*; a verdict needs one version"):
        run("made-up", seeds=[3], out=tmp_path, resume=True)
    assert registered == [1, 2]


def test_a_run_that_was_stopped_before_its_first_seed_is_begun_again(registered: list[int], tmp_path: Path):
    run("made-up", seeds=[13], out=tmp_path)
    study, _ = run("made-up", seeds=[1], out=tmp_path)
    assert sorted(study.runs) == [1]
    run("made-up", quick=True, out=tmp_path)
    run("made-up", quick=True, out=tmp_path)  # a quick run is made again
    assert registered == [13, 1, 5, 5]
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    run("made-up", quick=True, seeds=[13], out=tmp_path)  # until it is done, the former one stays
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_quick_run_is_one_seed_and_leaves_the_other_files(registered: list[int], tmp_path: Path):
    run("made-up", seeds=[1, 2], out=tmp_path)
    before = (tmp_path / "made-up.json").read_text()
    study, _ = run("made-up", quick=True, out=tmp_path)
    assert study.runs[5]["quick"] == 1.0 and registered == [1, 2, 5]
    assert (tmp_path / "made-up.json").read_text() == before and (tmp_path / "made-up.quick.html").exists()


def test_files_that_are_no_study_are_named(registered: list[int], tmp_path: Path):
    for text in ("", "[]", '{"experiment": "made-up"}', '{"experiment": "made-up", "seeds": {"x": 1}}'):
        (tmp_path / "made-up.json").write_text(text)
        with pytest.raises(InputError, match=r"made-up\.json holds no experiment"):
            run("made-up", out=tmp_path, resume=True)
    assert not registered
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(InputError, match=r"cannot be made: .*file is a file"):
        run("made-up", out=blocked)
    (tmp_path / "new" / "made-up.html").mkdir(parents=True)
    with pytest.raises(InputError, match=r"made-up\.html is a folder, where a file is to be written"):
        run("made-up", out=tmp_path / "new")
    assert not registered  # what is in the way was found first


def test_the_page_escapes_and_draws_each_seed():
    study = study_of(GOOD | {"odd": math.nan})
    study.experiment.__dict__["question"] = "Is it <so>?"
    page = page_of(study)
    assert "Is it &lt;so&gt;?" in page and "<so>" not in page and page.count("<circle") == 15
    assert "Verdict: confirmed." in page and "<script" not in page
    drawn = strip(study.judgements[0])
    assert drawn["allowed"][0] == 8.0 and drawn["allowed"][1] == drawn["width"] - 8 and len(drawn["seeds"]) == 5
    assert 8.0 < drawn["interval"][0] <= drawn["interval"][1] < drawn["allowed"][1]
    assert strip(judge(FINDING, []))["interval"] is None


def test_every_experiment_declares_a_finding_a_training_rule_and_a_control():
    for name, experiment in experiments().items():
        roles = {criterion.role for criterion in experiment.criteria} - {"description"}
        assert roles in ({"finding", "optimisation", "control"}, set()), name
        assert experiment.question.endswith("?") and experiment.setting and experiment.minutes <= 20
        for criterion in experiment.criteria:
            limited = math.isfinite(criterion.least) or math.isfinite(criterion.most)
            assert limited == (criterion.role != "description"), (name, criterion.quantity)
    assert sum(experiment.minutes for experiment in experiments().values()) / 2 <= 150  # on two cores


def test_descriptions_have_numbers_and_no_verdict():
    alone = Criterion("size", "the size", role="description")
    experiment = Experiment("made-up", "How large?", "E0", "Nothing.", (alone,), 1, lambda seed, quick: {"size": 2.0})
    study = Study(experiment, runs={seed: {"size": 2.0 + seed} for seed in range(5)})
    (result,) = study.judgements
    assert study.verdict == "described" and result.outcome == "described" and result.criterion.threshold == "–"
    assert result.low < result.mean == 4.0 < result.high
    assert strip(result)["allowed"] is None and "Verdict: described." in page_of(study)
    assert Study(experiment, quick=True, runs={0: {"size": 2.0}}).verdict == "undecided"
    mixed = Experiment("made-up", "Is it so?", "E0", "Nothing.", (*CRITERIA, alone), 1, lambda seed, quick: {})
    assert (
        Study(mixed, runs={seed: GOOD | {"size": 1.0, "null": 3.0 + seed} for seed in range(5)}).verdict == "confirmed"
    )


def test_unknown_names_get_a_hint():
    with pytest.raises(InputError, match="did you mean sink"):
        find("sinks")


def test_the_loop_finds_the_minimum_of_a_noisy_square():
    drawn = torch.Generator().manual_seed(0)
    minimum, parameters = torch.tensor([1.0, -2.0]), torch.zeros(2, requires_grad=True)
    losses = minimise(
        lambda: (parameters - minimum - 0.3 * torch.randn(2, generator=drawn)).square().sum(),
        [parameters],
        steps=800,
        step_size=0.05,
        averaged_share=0.5,
    )
    # The mean of n noisy minimisers is off by σ/√n at best; here n is 400.
    assert len(losses) == 800 and float((parameters - minimum).norm()) < 5 * 0.3 * math.sqrt(2 / 400)


@pytest.mark.medium
def test_the_page_has_what_was_found_last():
    page = (ROOT / "docs" / "how-to" / "experiments.md").read_text(encoding="utf-8")
    script = runpy.run_path(str(ROOT / "scripts" / "experiments_page.py"))
    assert script["with_gallery"](page) == page, "run python scripts/experiments_page.py"
    page = (ROOT / "docs" / "theory" / "experiments.md").read_text(encoding="utf-8")
    assert script["with_verdicts"](page) == page, "run python scripts/experiments_page.py"


def test_what_was_found_last_is_of_the_default_seeds_and_decided():
    stored = {path.stem: load(path) for path in room.RESULTS.glob("*.json")}
    assert stored and stored.keys() <= experiments().keys()
    for study in stored.values():
        assert not study.quick and tuple(sorted(study.runs)) == room.SEEDS
        assert json.loads((room.RESULTS / f"{study.stem}.json").read_text())["verdict"] == study.verdict
