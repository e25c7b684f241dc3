"""What the documentation shows runs: every Python block, and every script in examples/."""

import contextlib
import importlib.util
import io
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from scripts.tutorials import executed
from scripts.tutorials import run as run_blocks
from tests.support.printed import differing
from tests.support.probing.draws import draw_by_default
from tests.support.rows import every_row

from massieu.probing.statistics.registry import STATISTICS

ROOT = Path(__file__).parent.parent
PAGES_WITH_CODE = (
    "start/index",
    "start/tasks",
    "how-to/measures",
    "how-to/large_models",
    "how-to/compare",
    "how-to/results",
    "how-to/experiments",
    "how-to/many_machines",
    "how-to/monitor",
    "how-to/attention_weights",
    "how-to/replacing_attention",
    "how-to/monitor_logging",
    "how-to/alarms",
    "how-to/ops",
    "how-to/losses",
    "how-to/policy_optimisation",
    "how-to/streaming",
    "how-to/duality",
    "how-to/verify",
    "how-to/solve",
    "how-to/energy",
    "how-to/sparse",
    "how-to/machines",
    "how-to/spins",
    "how-to/flow",
    "how-to/population",
    "how-to/nn",
    "how-to/energy_transformer",
    "explanation/equilibrium",
    "how-to/posterior",
    "explanation/smoothing",
    "explanation/transfer",
    "explanation/capacity",
    "how-to/conditional_mean",
    "how-to/entropy_collapse",
    "how-to/attention_sinks",
    "how-to/largest_logit",
    "how-to/own_model",
    "how-to/adapters",
    "how-to/no_convergence",
    "how-to/compile_export",
    "how-to/from_hopfield_layers",
    "how-to/from_transformer_lens",
    "how-to/from_sdpa",
    "how-to/bal_in_code",
    "how-to/reading_numbers",
    "how-to/questions",
    "how-to/memory_hops",
    "how-to/own_statistics",
)
SLOW_PAGES = {
    *("how-to/compile_export", "how-to/experiments", "how-to/flow", "how-to/machines", "how-to/attention_sinks"),
    *("how-to/adapters", "how-to/population", "how-to/compare", "how-to/results", "how-to/large_models"),
    *("how-to/many_machines", "how-to/measures", "how-to/own_model", "how-to/replacing_attention"),
    *("how-to/monitor_logging", "how-to/monitor", "how-to/own_statistics", "start/tasks"),
}
"""Pages whose blocks compile, train, read a model or start processes; the others take a fraction of a second each."""
TUTORIALS = sorted(set((ROOT / "docs" / "tutorials").glob("*.md")) - {ROOT / "docs" / "tutorials" / "index.md"})
PAGES = [f"docs/{name}.md" for name in PAGES_WITH_CODE]
EXAMPLES = {
    "own_measure.py",
    "contrastive.py",
    "one_log_partition.py",
    "digits_memory.py",
    "digits_machine.py",
    "foreign_digits.py",
    "bags_of_digits.py",
    "character_language_model.py",
    "masked_digits.py",
    "spin_attention.py",
    "equilibrium.py",
    "posterior_attention.py",
    "smoothing.py",
    "transfer.py",
    "condition_number.py",
    "flow.py",
    "in_context_regression.py",
    "tokens_as_particles.py",
    "model_flow.py",
    "watch_training.py",
    "training_loops.py",
}


@pytest.fixture(scope="module", autouse=True)
def eight_draws() -> Iterator[None]:
    """Pages print what users see: the numbers of eight re-initialised models."""
    with pytest.MonkeyPatch.context() as patch:
        draw_by_default(8, patch)
        yield


def run(script: str, *arguments: object, **constants: object) -> str:
    """What an example prints; in this process, since loading all libraries once more takes longer than most examples.

    `constants` of the script get other values: what a shorter run shows too need not be shown by the whole one.
    """
    printed = io.StringIO()
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    spec = importlib.util.spec_from_file_location(Path(script).stem, ROOT / script)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng(devices=[]):
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", [script, *map(str, arguments)])
        patch.setitem(sys.modules, spec.name, example)  # where processes that the example starts look for it
        with contextlib.redirect_stdout(printed):
            spec.loader.exec_module(example)
            for name, value in constants.items():
                patch.setattr(example, name, value)
            example.main()
    torch.set_num_threads(threads)
    assert torch.get_default_dtype() == dtype
    return printed.getvalue()


def run_here(source: str, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a script of its own, but without loading everything once more; what it writes lies beside it."""
    script.write_text(source)
    monkeypatch.chdir(script.parent)
    with torch.random.fork_rng(devices=[]):
        runpy.run_path(str(script), run_name="__main__")
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(f"docs/{name}.md", marks=pytest.mark.slow if name in SLOW_PAGES else pytest.mark.medium)
        for name in PAGES_WITH_CODE
    ],
)
def test_the_blocks_of_a_page_run_in_their_order(page, tmp_path, monkeypatch, capsys):
    """A block of text right below a block of Python is what that block prints."""
    found = re.finditer(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", (ROOT / page).read_text(), flags=re.DOTALL)
    blocks = [each.groups() for each in found]
    assert blocks
    run_here("\nprint('END OF BLOCK')\n".join(str(block) for block, _ in blocks), tmp_path / "page.py", monkeypatch)
    printed = capsys.readouterr().out.split("END OF BLOCK\n")
    assert len(printed) == len(blocks)
    for shown, (_, expected) in zip(printed, blocks, strict=True):
        assert expected is None or differing(shown, expected) == []


@pytest.mark.slow
def test_the_blocks_on_the_probe_run(tmp_path, monkeypatch):
    """Where the page says `notes.md`, a file of that name stands: the blocks write beside it."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/how-to/probe.md").read_text(), flags=re.DOTALL)
    (tmp_path / "notes.md").write_text("Attention is the gradient of its log-partition. " * 40)
    (tmp_path / "page.py").write_text("\n\n".join(blocks))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("massieu.probing.run.DRAWS", 2)  # no number of these blocks is on the page
    found = runpy.run_path("page.py")
    assert found["again"].table.equals(found["frame"])
    assert len(found["sharpest"]) == 3
    assert (tmp_path / "page.html").stat().st_size > 10_000


def test_every_page_with_code_is_run():
    """The probe's blocks have a test of their own; the README's and those on extending it too."""
    pages = {path for path in (ROOT / "docs").rglob("*.md") if "```python" in path.read_text(encoding="utf-8")}
    assert {str(path.relative_to(ROOT)) for path in pages} == {
        *PAGES,
        "docs/how-to/probe.md",
        "docs/how-to/extending.md",
        "docs/start/first_hour.md",  # tests/test_first_hours.py
        "docs/how-to/papers_questions.md",  # tests/test_papers_map.py
        *(f"docs/tutorials/{path.name}" for path in TUTORIALS),  # run as the site is built: tests/test_site.py
    }


@pytest.mark.medium
def test_a_block_of_a_tutorial_has_its_output_below_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = run_blocks(
        "# One\n\n```python\na = 2\nopen('a.txt', 'w').write('two')\nprint(a)\n```\n\n"
        "Then.\n\n```python\nb = a + 1\n```\n\n```console\n$ ls\n$ massieu --version\n```\n"
    )
    assert "print(a)\n```\n\n```text\n2\n```\n" in shown and shown.count("```text") == 2
    assert "--version\n```\n\n```text\na.txt\nmassieu " in shown
    with pytest.raises(RuntimeError, match="no-such-folder"):
        run_blocks("```console\n$ ls no-such-folder\n$ ls\n```\n")


@pytest.mark.slow
def test_a_tutorial_is_run_in_an_empty_folder_and_a_block_that_fails_ends_the_build():
    assert "$ ls -A\n```\n\nThe end" in executed("```console\n$ ls -A\n```\n\nThe end\n")
    with pytest.raises(RuntimeError, match="ValueError: so"):
        executed("```python\nraise ValueError('so')\n```\n")


@pytest.mark.medium
def test_the_readmes_python_prints_what_stands_below_it(tmp_path, monkeypatch, capsys):
    readme = (ROOT / "README.md").read_text()
    ((block, printed),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", readme, flags=re.DOTALL)
    assert readme.count("```python") == 1
    run_here(block, tmp_path / "readme.py", monkeypatch)
    assert differing(capsys.readouterr().out, printed) == []


def test_every_example_is_tested():
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == EXAMPLES


def test_the_table_of_experiments_names_what_there_is():
    """Each experiment of the page has its row; commands are examples that are tested, statistics are the probe's."""
    page = (ROOT / "docs/theory/experiments.md").read_text()
    table = re.findall(r"^\| \[(E\d+b?)\]\(#(e\d+b?)\) \|(.*)\|$", page, flags=re.MULTILINE)
    rows = [(name, anchor, *(cell.strip() for cell in cells.split("|"))) for name, anchor, cells in table]
    assert [name for name, *_ in rows] == re.findall(r"^## (E\d+b?)\.", page, flags=re.MULTILINE)
    known = set(STATISTICS)
    for name, anchor, runs, command, missing in rows:
        assert name.lower() == anchor and f'<a id="{anchor}">' in page
        assert runs in ("yes", "in part", "related", "no")
        assert bool(command) == (runs != "no") and (missing == "–") == (runs == "yes"), name
        assert set(re.findall(r"python examples/(\w+\.py)", command)) <= EXAMPLES, name
        for part in command.split("; "):
            if part.startswith("`massieu probe MODEL`:"):
                named = set(re.findall(r"`(\w+)`", part))
                assert named and named <= known, (name, named - known)


def test_numbers_of_benchmarks_are_told_on_their_page_alone():
    """An interval of a ratio is a measurement: typed again it would stay as it is when the next is made."""
    interval = re.compile(r"\d\.\d+ \[\d\.\d+, \d\.\d+\]")
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        if path.name != "benchmarks.md":
            assert interval.search(path.read_text()) is None, path.name


@pytest.mark.slow
def test_attention_over_ones_own_measure_trains(tmp_path):
    picture = tmp_path / "picture.png"
    printed = run("examples/own_measure.py", "--picture", picture)
    found = dict(re.findall(r"error of recall, (.*?): +([\d.]+)", printed))
    # Images whose colours are exchanged, half of the queries, cannot be recalled from atoms at the images alone.
    assert float(found["mirrored atoms"]) < 0.2 < 0.3 < float(found["softmax attention"]) < 1
    assert picture.stat().st_size > 10_000


@pytest.mark.slow
def test_gradient_caching_changes_no_gradient_and_the_encoder_learns(tmp_path):
    picture = tmp_path / "picture.png"
    found = run("examples/contrastive.py", "--picture", picture, STEPS=24)
    assert float(re.search(r"uncached ones by: (\S+)", found).group(1)) < 1e-6
    before, after = (
        float(re.search(rf"accuracy {when} training: +(\S+)", found).group(1)) for when in ("before", "after")
    )
    assert after > before + 0.05  # five standard errors of an accuracy among 1,747 images
    assert picture.stat().st_size > 10_000


def numbers(pattern: str, text: str) -> list[tuple[str, ...]]:
    """The groups of each match."""
    found = [match.groups() for match in re.finditer(pattern, text)]
    assert found, text
    return found


@pytest.mark.slow
def test_one_log_partition_is_one(tmp_path):
    found = run("examples/one_log_partition.py", "--picture", tmp_path / "picture.png")
    rows = numbers(r" *(.+): A = +\S+, (\S+); image off by (\S+)", found)
    assert len(rows) == 5
    for name, level, image in rows:
        equal = abs(float(level)) < 1e-6 and float(image) < 1e-6
        assert equal == (name in ("attention", "one Hopfield step", "one hidden unit of ten states")), name
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_memory_of_digits_recalls_within_its_bound(tmp_path):
    found = run("examples/digits_memory.py", "--picture", tmp_path / "picture.png")
    recalled = [int(count) for (count,) in numbers(r"(\d+) of 60 images recalled", found)]
    assert recalled[0] == 0  # all queries run together
    assert recalled[2] > 45
    assert all(float(rise) < 1e-12 for (rise,) in numbers(r"rise of the energy in a step (\S+)", found))
    assert all(float(excess) <= 0 for (excess,) in numbers(r"error − bound at most (\S+)", found))


@pytest.mark.slow
def test_machines_of_four_kinds_of_units_learn_digits(tmp_path):
    small = {"HIDDEN": 40, "TRAINED": 600, "TEMPERATURES": 200, "SWEEPS": 50}
    found = run("examples/digits_machine.py", "--picture", tmp_path / "picture.png", **small)
    held_out = {name: float(score) for name, score in numbers(r" *(\S+): log-likelihood .* on, +(\S+) held out", found)}
    independent = -24.4  # of the best product of 64 independent bits
    for name in ("bits", "spins", "Gaussian", "Poisson"):
        assert independent + 4 < held_out[name] < -10
    assert held_out["bits"] > held_out["scikit-learn"]
    near_and_far = numbers(r": coupling of neighbours (\S+), of pixels more than 3 apart (\S+)", found)
    assert len(near_and_far) == 4
    assert all(float(near) > 1.5 * float(far) for near, far in near_and_far)


@pytest.mark.slow
def test_foreign_digits_are_told_apart(tmp_path):
    found = run("examples/foreign_digits.py", "--picture", tmp_path / "picture.png", STEPS=100, BOOTSTRAPS=50)
    areas = [float(area) for (area,) in numbers(r"AUROC (\S+) \[", found)]
    assert len(areas) == 18
    assert min(areas) > 0.55


@pytest.mark.slow
def test_pooling_finds_the_nine(tmp_path):
    printed = run("examples/bags_of_digits.py", "--seeds", "1", "--picture", tmp_path / "picture.png")
    found = {name: float(accuracy) for name, accuracy in numbers(r" *(\S+ pooling): accuracy (\S+)", printed)}
    assert found["Hopfield pooling"] > 0.85
    assert found["mean pooling"] < found["Hopfield pooling"]


@pytest.mark.slow
def test_language_models_train(tmp_path):
    picture = tmp_path / "picture.png"
    small = {"CONTEXT": 32, "BATCH": 8}
    found = run("examples/character_language_model.py", "--steps", "20", "--picture", picture, **small)
    (alone,) = numbers(r"(\S+) by counts of characters", found)[0]
    rows = numbers(r" *(.+): (\S+) before training, (\S+) after", found)
    assert len(rows) == 3
    for _, before, after in rows:
        assert float(after) < float(alone) < float(before)
    assert "no ranking" in found


@pytest.mark.slow
def test_masked_digits_are_completed_down_an_energy(tmp_path):
    easy = {"TRAINED": 1600, "HIDDEN": 4, "STEPS": 2}
    found = run("examples/masked_digits.py", "--updates", "300", "--picture", tmp_path / "picture.png", **easy)
    (rise,) = numbers(r"largest change of an image's energy in a step: (\S+)", found)[0]
    assert float(rise) < 0
    row = r" *(.+): mean squared error of a missing pixel (\S+)"
    error = {name: float(mean) for name, mean in numbers(row, found)}
    # With six steps and after all 2,500 updates it is below the ridge too: the page has that run.
    assert error["Energy Transformer"] < 0.8 * error["mean image"]
    assert error["ridge"] < error["mean image"]
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.mark.slow
def test_spins_attend(tmp_path):
    picture = tmp_path / "picture.png"
    found = run("examples/spin_attention.py", "--seeds", "1", "--steps", "30", "--picture", picture)
    rows = numbers(r" *(.+): accuracy (\S+) ± \S+ \((\d+) parameters", found)
    assert len(rows) == 5
    assert all(float(accuracy) > 0.3 for _, accuracy, _ in rows)  # 0.1 by chance
    assert len({size for _, _, size in rows}) == 1
    errors = {
        name: (float(without), float(echo))
        for name, without, echo in numbers(r"(\S+) sites, .* means (\S+) without the echo, (\S+) with it", found)
    }
    assert max(errors["Gaussian"]) < 1e-9
    assert 1e-6 < errors["two-valued"][1] < 0.2 * errors["two-valued"][0]
    first, second = re.findall(r"magnetisation (\S+) of the radius", found)
    assert float(second) < float(first)
    assert picture.stat().st_size > 10_000


@pytest.mark.slow
def test_the_equilibrium_theorem_in_pictures(tmp_path):
    found = run("examples/equilibrium.py", "--picture", tmp_path / "picture.png")
    spread = [float(gain) for (gain,) in numbers(r"\(a\) .*: entropy after 6 layers (\S+) nats", found)]
    assert spread[0] > 1
    assert abs(spread[1]) < 1e-12
    moves = [float(move) for (move,) in numbers(r"farthest move in a layer (\S+);", found)]
    assert moves[0] < 1e-12
    assert moves[1] > 0.1
    assert "eigenvalues 3.0000, 0.0000, 0.0000" in found
    ((worst,),) = numbers(r"measured and predicted differ by (\S+) at most", found)
    assert float(worst) < 1e-3
    errors = numbers(r"(\S+) of 8192 \((\S+)\)", found)
    assert all(abs(float(error) / float(limit) - 1) < 0.25 for error, limit in errors)
    rates = numbers(r"the mean grows by (\S+) a layer at first, predicted (\S+);", found)
    assert all(abs(float(rate) - float(expected)) < 0.01 for rate, expected in rates)
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.mark.slow
def test_posteriors_are_attention(tmp_path):
    picture = tmp_path / "picture.png"
    found = run("examples/posterior_attention.py", "--picture", picture)
    counts = numbers(r" *(\w+): truth \S+, after 256 tokens \S+ ± \S+, count (\S+)", found)
    assert [count for _, count in counts] == ["260"] * 3
    assert all(float(off) < 0.15 for (off,) in numbers(r"by (\S+)\n(?=sink|regret)", found))
    worst, bound = numbers(r"regret: at most (\S+), bound (\S+)", found)[0]
    assert float(worst) <= float(bound)
    alone, filtered, smoothed = numbers(r"token alone (\S+), filtered (\S+), smoothed (\S+)", found)[0]
    assert float(smoothed) < float(filtered) < float(alone)
    rows = {name: [float(part) for part in row] for name, *row in numbers(
        r" *(\S.*): log-probability of .* words (\S+) ± \S+, (\S+) ± \S+, (\S+) ±", found
    )}  # fmt: skip
    assert len(rows) == 4
    assert rows["uniform, 1% overall law"][0] < -7 < rows["Dirichlet (sink)"][0]
    assert max(rows, key=lambda name: rows[name][-1]) == "Dirichlet (sink)"
    assert picture.stat().st_size > 10_000


@pytest.mark.slow
def test_softmax_stops_at_its_floor_and_others_do_not(tmp_path):
    picture = tmp_path / "picture.png"
    found = run("examples/smoothing.py", "--picture", picture, LENGTHS=(64, 128, 256, 512, 1024))
    slope = {name: float(value) for name, value in numbers(r" *(.+): errors .* slope (\S+)", found)}
    assert len(slope) == 4
    assert slope["softmax, β = 4"] > -0.1
    assert slope["softmax, best β"] < -0.3
    assert slope["deconvolved"] < -0.4
    assert slope["ridge"] < -0.3
    variances = [float(variance) for (variance,) in numbers(r"variance of the logits (\S+)", found)]
    assert max(variances) < 9.21
    assert picture.stat().st_size > 10_000


@pytest.mark.slow
def test_masks_of_digits_transfer_as_their_condition_number_says(tmp_path):
    picture = tmp_path / "picture.png"
    found = run("examples/transfer.py", "--picture", picture)
    ((share,),) = numbers(r"\(κ²·error of pixels\): (\S+)", found)
    assert float(share) <= 1
    (ratio,), (accuracy,) = numbers(r"rank correlation of κ and the .*: (\S+)", found)
    assert float(ratio) > 0.8
    assert float(accuracy) < -0.7
    assert "κ = inf" in found
    assert picture.stat().st_size > 10_000


@pytest.mark.slow
def test_what_a_worse_prediction_costs_is_below_the_bound_of_the_condition_number(tmp_path):
    found = run("examples/condition_number.py", "--picture", tmp_path / "picture.png", WINDOWS=400)
    rows = numbers(r"excess at the labels (\S+) ± (\S+), bound (\S+)", found)
    assert len(rows) == 3
    assert all(float(excess) < float(bound) + 3 * float(error) for excess, error, bound in rows)


@pytest.mark.slow
def test_tokens_flow_as_they_should(tmp_path):
    picture, page = tmp_path / "picture.png", tmp_path / "page.html"
    found = run("examples/flow.py", "--picture", picture, "--page", page)
    rows = numbers(
        r"(.+): log-determinant (\S+) nats, effective rank (\S+), entropy of attention (\S+) nats, clusters (\d+)",
        found,
    )
    ends = {name: tuple(map(float, each)) for name, *each in rows}
    assert ends["attention"][0] > 10 and ends["attention"][2] < 1e-6  # expands, and sharpens
    for name in ("attention, sphere", "doubly stochastic, sphere"):
        assert ends[name][3] < 20 < 300 == ends["attention"][3]
    (moved, kept) = numbers(r"softmax attention (\S+), by doubly stochastic (\S+)", found)[0]
    assert float(kept) < 1e-10 < 1e-3 < float(moved)
    assert picture.stat().st_size > 10_000
    assert "<svg" in page.read_text()


@pytest.mark.slow
def test_patients_in_the_context_are_a_regression(tmp_path):
    picture = tmp_path / "picture.png"
    found = run("examples/in_context_regression.py", "--splits", "3", "--picture", picture)
    errors = {name: float(last) for name, last in numbers(r"(.+): error .* (\S+) with 20", found)}
    assert len(errors) == 4
    ours, theirs = ([error for name, error in errors.items() if name.startswith(kind)] for kind in ("cond", "soft"))
    assert max(ours) < min(theirs)
    assert all(50 < error < 80 for error in errors.values())  # 77 is the spread of the values
    (shares,) = numbers(r"90 % intervals hold (.*)", found)
    assert all(75 < float(share) < 97 for share in re.findall(r"(\S+) %", shares[0]))
    assert picture.stat().st_size > 10_000


@pytest.mark.slow
def test_tokens_are_particles(tmp_path):
    picture = tmp_path / "picture.png"
    found = run("examples/tokens_as_particles.py", "--particles", "500", "--picture", picture)
    ((mean, spread),) = numbers(r"500 particles after 8 layers: mean off by (\S+), covariance by (\S+) of", found)
    assert max(float(mean), float(spread)) < 0.2  # standard errors are 1/√500
    ratios = numbers(r"layer \d: diameter (\S+) of the last one's, at most (\S+)", found)
    assert len(ratios) == 4 and all(float(ratio) <= float(bound) for ratio, bound in ratios)
    lines = numbers(r"(.+): shares that are not of rank one (.+)", found)
    shares = {name: [float(share) for share in line.split()] for name, line in lines}
    assert {len(line) for line in shares.values()} == {7}
    assert shares["attention alone, no skip"][-1] < shares["attention alone"][-1] < shares["whole blocks"][-1]
    assert picture.stat().st_size > 10_000


@pytest.mark.slow
def test_a_models_flow_is_told_beside_its_nulls(tmp_path):
    picture = tmp_path / "picture.png"
    found = run("examples/model_flow.py", "--texts", "1", "--picture", picture, TOKENS=256, DRAWS=9)
    ((off,),) = numbers(r"the model's own last states, up to (\S+)", found)
    assert float(off) < 1e-5
    rows = numbers(r"(\w+): ([\d. ]+); of Gaussian tokens (\S+)", found)
    assert {name for name, _, _ in rows} == {"gaussian_distance", "fourth_cumulant"}
    assert all(min(map(float, values.split())) > float(null) for _, values, null in rows)
    blocks = numbers(r"correlates (\S+) .* precision (\S+), turned at random (\S+) … (\S+)", found)
    assert len(blocks) == 6
    assert all(0.2 < float(correlation) < 1 for correlation, *_ in blocks)
    assert all(abs(float(cosine)) < 0.3 and float(low) < float(high) for _, cosine, low, high in blocks)
    assert picture.stat().st_size > 10_000


@pytest.mark.slow
def test_training_runs_are_watched(tmp_path):
    """Short runs tell nothing of leads; the tables and the picture are there, and a second call repeats no run."""
    picture = tmp_path / "runs.png"
    arguments = ("examples/watch_training.py", "--quick", "--folder", tmp_path, "--picture", picture)
    small = {"LAYERS": 1, "WIDTH": 16, "CONTEXT": 16, "BATCH": 4}
    found = run(*arguments, **small)
    assert found.count("the loss is in alarm in") == 3 and " 9 of 9" in found
    assert picture.stat().st_size > 10_000
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.jsonl")}
    assert len(kept) == 9
    again = run(*arguments, **small)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.jsonl")} == kept
    assert again.split("\n\n")[1:] == found.split("\n\n")[1:]


@pytest.mark.medium
def test_a_training_loop_prints_its_records():
    """What the loops compute: tests/probing/monitor/test_training_loops.py."""
    lines = run("examples/training_loops.py", "--loop", "vit").splitlines()
    row = r"step (\d+): loss \d\.\d{3}, gradient norm \d+\.\d{3}, largest logit \d+\.\d{3} in layer\d/head\d"
    matches = [re.fullmatch(row, line) for line in lines]
    assert [match and match[1] for match in matches] == ["4", "8", "12"]


SYMPTOMS = (
    *("output_attentions", "rollout", "left padding", "SimCLR", "NT-Xent", "supervised contrastive"),
    *(
        "activation checkpointing",
        "gradient accumulation",
        "heavy hitters",
        "vLLM",
        "Theorem 1",
        "W&B",
        "pandas",
        "attn_mask",
        "enable_gqa",
        "score_mod",
        "return_lse",
        "run_with_cache",
        "fold_ln",
        *("hook_pattern", "run_with_hooks", "TransformerLens", "nnsight", "InterpKit", "captum", "hamux", "entmax"),
        *("FlexAttention", "causal_lower_right", "dropout_p", "restricted Boltzmann machine", "fully masked"),
    ),
)
"""Words with which people search: each is on a page of its own or on the page by question."""


@every_row("word", SYMPTOMS)
def test_the_words_of_a_symptom_are_on_a_page(word):
    pages = [page for page in (ROOT / "docs").rglob("*.md") if "decisions" not in page.parts]
    assert any(word.lower() in page.read_text().lower() for page in pages), word
