"""What the documentation shows runs: every Python block, and every script in examples/."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES_WITH_CODE = (
    "measures",
    "ops",
    "losses",
    "streaming",
    "duality",
    "verify",
    "solve",
    "energy",
    "sparse",
    "machines",
    "spins",
    "population",
    "nn",
    "energy_transformer",
)
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
    "tokens_as_particles.py",
}


def run(*arguments: str, **keywords) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, **keywords)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run_in_their_order(page, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    assert blocks
    script = tmp_path / "page.py"
    script.write_text("\n\n".join(blocks))
    run(str(script))


def test_the_readmes_python_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    blocks = [block for block in blocks if "path/to/model" not in block]
    assert len(blocks) == 3
    for block in blocks:
        script = tmp_path / "readme.py"
        script.write_text(block)
        run(str(script))


def test_every_example_is_tested():
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == EXAMPLES


def test_attention_over_ones_own_measure_trains():
    found = dict(re.findall(r"error of recall, (.*?): +([\d.]+)", run("examples/own_measure.py")))
    # Images whose colours are exchanged, half of the queries, cannot be recalled from atoms at the images alone.
    assert float(found["mirrored atoms"]) < 0.2 < 0.3 < float(found["softmax attention"]) < 1


def test_gradient_caching_changes_no_gradient_and_the_encoder_learns():
    found = run("examples/contrastive.py")
    assert float(re.search(r"uncached ones by: (\S+)", found).group(1)) < 1e-6
    before, after = (
        float(re.search(rf"accuracy {when} training: +(\S+)", found).group(1)) for when in ("before", "after")
    )
    assert before < 0.75
    assert after > 0.8


def numbers(pattern: str, text: str) -> list[tuple[str, ...]]:
    """The groups of each match."""
    found = [match.groups() for match in re.finditer(pattern, text)]
    assert found, text
    return found


def test_one_log_partition_is_one(tmp_path):
    found = run("examples/one_log_partition.py", "--picture", str(tmp_path / "picture.png"))
    rows = numbers(r" *(.+): A = +\S+, (\S+); image off by (\S+)", found)
    assert len(rows) == 5
    for name, level, image in rows:
        equal = abs(float(level)) < 1e-6 and float(image) < 1e-6
        assert equal == (name in ("attention", "one Hopfield step", "one hidden unit of ten states")), name
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_a_memory_of_digits_recalls_within_its_bound(tmp_path):
    found = run("examples/digits_memory.py", "--picture", str(tmp_path / "picture.png"))
    recalled = [int(count) for (count,) in numbers(r"(\d+) of 60 images recalled", found)]
    assert recalled[0] == 0  # all queries run together
    assert recalled[2] > 45
    assert all(float(rise) < 1e-12 for (rise,) in numbers(r"rise of the energy in a step (\S+)", found))
    assert all(float(excess) <= 0 for (excess,) in numbers(r"error − bound at most (\S+)", found))


@pytest.mark.slow
def test_machines_of_four_kinds_of_units_learn_digits(tmp_path):
    found = run("examples/digits_machine.py", "--picture", str(tmp_path / "picture.png"))
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
    found = run("examples/foreign_digits.py", "--picture", str(tmp_path / "picture.png"))
    areas = [float(area) for (area,) in numbers(r"AUROC (\S+) \[", found)]
    assert len(areas) == 18
    assert min(areas) > 0.55


@pytest.mark.slow
def test_pooling_finds_the_nine(tmp_path):
    printed = run("examples/bags_of_digits.py", "--seeds", "1", "--picture", str(tmp_path / "picture.png"))
    found = {name: float(accuracy) for name, accuracy in numbers(r" *(\S+ pooling): accuracy (\S+)", printed)}
    assert found["Hopfield pooling"] > 0.85
    assert found["mean pooling"] < found["Hopfield pooling"]


@pytest.mark.slow
def test_language_models_train(tmp_path):
    picture = str(tmp_path / "picture.png")
    found = run("examples/character_language_model.py", "--steps", "60", "--picture", picture)
    (alone,) = numbers(r"(\S+) by counts of characters", found)[0]
    rows = numbers(r" *(.+): (\S+) before training, (\S+) after", found)
    assert len(rows) == 3
    for _, before, after in rows:
        assert float(after) < float(alone) < float(before)
    assert "no ranking" in found


@pytest.mark.slow
def test_masked_digits_are_completed_down_an_energy(tmp_path):
    found = run("examples/masked_digits.py", "--picture", str(tmp_path / "picture.png"))
    (rise,) = numbers(r"largest change of an image's energy in a step: (\S+)", found)[0]
    assert float(rise) < 0
    error = {name: float(mean) for name, mean in numbers(r" *(.+): mean squared error of a missing pixel (\S+)", found)}
    assert error["Energy Transformer"] < error["ridge"] < error["mean image"]
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.mark.slow
def test_spins_attend(tmp_path):
    picture = tmp_path / "picture.png"
    found = run("examples/spin_attention.py", "--seeds", "1", "--steps", "60", "--picture", str(picture))
    rows = numbers(r" *(.+): accuracy (\S+) ± \S+ \((\d+) parameters", found)
    assert len(rows) == 5
    assert all(float(accuracy) > 0.5 for _, accuracy, _ in rows)  # 0.1 by chance
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


def test_tokens_are_particles(tmp_path):
    picture = tmp_path / "picture.png"
    found = run("examples/tokens_as_particles.py", "--particles", "500", "--picture", str(picture))
    ((mean, spread),) = numbers(r"500 particles after 8 layers: mean off by (\S+), covariance by (\S+) of", found)
    assert max(float(mean), float(spread)) < 0.2  # standard errors are 1/√500
    ratios = numbers(r"layer \d: diameter (\S+) of the last one's, at most (\S+)", found)
    assert len(ratios) == 4 and all(float(ratio) <= float(bound) for ratio, bound in ratios)
    lines = numbers(r"(.+): shares that are not of rank one (.+)", found)
    shares = {name: [float(share) for share in line.split()] for name, line in lines}
    assert {len(line) for line in shares.values()} == {7}
    assert shares["attention alone, no skip"][-1] < shares["attention alone"][-1] < shares["whole blocks"][-1]
    assert picture.stat().st_size > 10_000
