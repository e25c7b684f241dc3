"""The experiment climb: its registration, its numbers on made-up heads, and heads that climb or do not."""

import hashlib
import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from scripts import climb_page

import massieu
from massieu.nn import Attention
from massieu.papers.experiments import climb
from massieu.papers.experiments.climb_reading import (
    HeadRises,
    attention_sites,
    loss_differences,
    pairs_of_equal_norm,
    read_heads,
    switched_off,
    write_norms,
)
from massieu.papers.experiments.climb_tasks import CHECKPOINTS, HALVES, TASKS, HalvedTask, fresh_model, trained_models
from massieu.papers.experiments.hypotheses import StudentHolm
from massieu.papers.experiments.run import RESULTS, SEEDS, load, run
from massieu.papers.experiments.study import Numbers, find
from massieu.papers.experiments.transformer import VectorTransformer

ROOT = Path(__file__).parents[3]
REGISTRATION = re.compile(r"<!-- registration of climb -->\n(.*?)<!-- end of the registration -->", re.DOTALL)


def test_the_registration_is_the_one_that_results_name():
    page = (ROOT / "docs" / "theory" / "experiments.md").read_text(encoding="utf-8")
    (text,) = REGISTRATION.findall(page)
    registered = find("climb").registration
    assert hashlib.sha256(text.encode()).hexdigest() == registered["registration"]
    assert re.fullmatch("[0-9a-f]{40}", registered["registered"])


# --- what is read of a model -------------------------------------------------------------------------------------------


def small_model(*, is_causal: bool, depth: int = 2) -> VectorTransformer:
    """A model whose weights are large enough for heads to differ."""
    model = VectorTransformer(3, 2, width=16, depth=depth, is_causal=is_causal).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.mark.medium
@pytest.mark.parametrize("is_causal", [True, False])
def test_rises_are_the_probes(is_causal: bool):
    torch.manual_seed(0)
    model, inputs = small_model(is_causal=is_causal), torch.randn(4, 12, 3)
    found = read_heads(model, inputs)
    name = "own_write_step_selective"
    table = massieu.probe(model, [inputs], statistics=[name], draws=0).heads
    expected = [row["value"] for row in table.rows(named=True) if row["statistic"] == name]
    assert np.abs(found.own - expected).max() < 1e-5 * np.abs(expected).max()
    # Other heads' writes: one head of one query by hand, in float64.
    other = by_hand(model.double(), inputs.double(), layer=1, head=2)
    assert abs(read_heads(model, inputs.double()).others[4 + 2] - other) < 1e-10


def by_hand(model: VectorTransformer, inputs: torch.Tensor, *, layer: int, head: int) -> float:
    """The mean rise of a head's selective log Z along the writes of the other heads, query by query."""
    tokens = model.embedding(inputs)
    rises = []
    with torch.no_grad():
        for earlier in model.blocks[:layer]:
            tokens = earlier(tokens, model.is_causal)
        block: torch.nn.Module = model.blocks[layer]
        norm, attention = block.before_attention, block.attention
        query, key, value = attention.in_proj_weight.view(3, 4, 4, 16)
        query_bias, key_bias, value_bias = attention.in_proj_bias.view(3, 4, 4)

        def scores(of: int, state: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
            keys = norm(seen) @ key[of].T + key_bias[of]
            return keys @ (query[of] @ norm(state) + query_bias[of]) / 2

        def selective(state: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
            found = scores(head, state, seen)
            return found.logsumexp(0) - found.mean()

        for row, place in np.ndindex(*tokens.shape[:2]):
            here, seen = tokens[row, place], tokens[row, : place + 1] if model.is_causal else tokens[row]
            for other in {0, 1, 2, 3} - {head}:
                values = norm(seen) @ value[other].T + value_bias[other]
                mean = scores(other, here, seen).softmax(0) @ values
                write = attention.out_proj.weight[:, 4 * other : 4 * other + 4] @ mean
                rises.append(selective(here + write, seen) - selective(here, seen))
    return float(torch.stack(rises).mean())


def test_norms_are_those_of_what_a_head_adds():
    torch.manual_seed(1)
    model, inputs = small_model(is_causal=True, depth=1), torch.randn(5, 6, 3)
    block: torch.nn.Module = model.blocks[0]
    whole = block.attention(*[block.before_attention(model.embedding(inputs))] * 3, is_causal=True)[0]
    norms = write_norms(model, inputs)
    for head in range(4):
        with switched_off(model, head):
            without = block.attention(*[block.before_attention(model.embedding(inputs))] * 3, is_causal=True)[0]
        expected = (whole - without).square().sum(-1).mean().sqrt()
        assert abs(norms[head] - float(expected)) < 1e-5 * float(expected)


def test_pairs_are_of_a_high_and_a_low_head_with_equal_norms():
    own = np.array([0.0, 5.0, 1.0, 4.0, 2.0, 3.0])  # high: 1, 3, 5
    norms = np.array([1.00, 1.02, 1.05, 1.30, 2.00, 1.09])
    assert pairs_of_equal_norm(own, norms) == [(1, 0), (5, 2)]  # 3 has no partner within 10 %
    assert pairs_of_equal_norm(own, np.array([1.0, 1.0, 1.0, 1.0, 1.0, 1.0])) == [(1, 0), (3, 2), (5, 4)]
    assert pairs_of_equal_norm(own, np.zeros(6)) == [] and pairs_of_equal_norm(own[:1], norms[:1]) == []
    assert pairs_of_equal_norm(np.array([1.0, 0.0]), np.array([1.0, 1.1000001])) == []
    assert pairs_of_equal_norm(np.array([1.0, 0.0]), np.array([1.0, 1.0999999])) == [(0, 1)]


def vector_task(name: str = "digits") -> HalvedTask:
    """Sums of the numbers in a few vectors."""

    def batch(generator: torch.Generator, count: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(count, 6, 3, generator=generator)
        return inputs, inputs.sum((1, 2))

    def loss(model: torch.nn.Module, given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return (model(given[0]).mean((1, 2)) - given[1]).square().mean()

    drawn = torch.Generator().manual_seed(0)
    return HalvedTask(
        name=name,
        make=lambda: VectorTransformer(3, 2, width=16, depth=2, is_causal=False),
        draw=batch,
        loss=loss,
        excess=lambda model, given: float(loss(model, given)),
        steps=20,
        step_size=1e-2,
        held_out={half: batch(drawn, 24) for half in HALVES},
    )


@pytest.mark.medium
def test_checkpoints_are_the_course_of_one_training():
    task = vector_task()
    models = trained_models(task, torch.Generator().manual_seed(3), 100)
    assert tuple(models) == CHECKPOINTS
    start = fresh_model(task, torch.Generator().manual_seed(3))
    assert all(torch.equal(a, b) for a, b in zip(start.parameters(), models[0].parameters(), strict=True))
    with torch.no_grad():
        losses = [float(task.loss(model, task.held_out["B"])) for model in models.values()]
    assert losses[-1] < 0.5 * losses[0] and losses[1] != losses[0] and len({id(each) for each in models.values()}) == 6


def test_the_loss_without_a_head_is_that_of_a_model_whose_output_ignores_it():
    task, torch_model = vector_task(), small_model(is_causal=False)
    batch = task.held_out["B"]
    (difference,) = loss_differences(task, torch_model, batch, [(6, 1)])
    losses = {}
    for head in (6, 1):
        site: Attention = attention_sites(torch_model)[head // 4][1]
        columns = slice(4 * (head % 4), 4 * (head % 4) + 4)
        kept = site.out_proj.weight.detach().clone()
        with torch.no_grad():
            site.out_proj.weight[:, columns] = 0
            losses[head] = float(task.loss(torch_model, batch))
            site.out_proj.weight.copy_(kept)
    assert abs(difference - (losses[6] - losses[1])) < 1e-5 * abs(losses[6])


# --- random models are not announced, and planted heads are --------------------------------------------------------------


def planted(model: VectorTransformer) -> VectorTransformer:
    """One head writes along the gradient of its own log Z: queries, keys and values are the same four directions."""
    block: torch.nn.Module = model.blocks[0]
    attention = block.attention
    with torch.no_grad():
        directions = torch.linalg.qr(torch.randn(16, 4))[0]
        attention.in_proj_weight.view(3, 4, 4, 16)[:, 0] = directions.T
        attention.out_proj.weight[:, :4] = directions
    return model


def halves_of(model: VectorTransformer, data: torch.Tensor) -> dict[str, HeadRises]:
    """The heads of a model on both halves of the data."""
    return {half: read_heads(model, inputs) for half, inputs in zip(HALVES, data.chunk(2), strict=True)}


def numbers_of(models: dict[str, VectorTransformer], fresh: dict[str, list[dict]], data: torch.Tensor) -> Numbers:
    """The numbers of one seed whose trained models are these."""
    numbers: Numbers = {}
    for task, model in models.items():
        course = {(share, half): heads for half, heads in halves_of(model, data).items() for share in (0, 100)}
        of_fresh = {half: [each[half] for each in fresh[task]] for half in HALVES}
        numbers |= {f"{task}_{name}": value for name, value in climb.hypotheses_numbers(course, of_fresh).items()}
    return numbers


@pytest.mark.slow
def test_random_models_are_not_announced_and_planted_heads_are():
    torch.manual_seed(0)
    rule, data = StudentHolm(climb.HYPOTHESES), torch.randn(8, 6, 16)

    def draw() -> VectorTransformer:
        return VectorTransformer(16, 2, width=16, depth=1, is_causal=False).eval()

    # Each seed of a task has two random models of its own; the twenty studies share them.
    fresh = [{task: [halves_of(draw(), data) for _ in range(2)] for task in TASKS} for _ in SEEDS]
    found = {"random": 0, "planted": 0}
    for _ in range(20):
        seeds = [{task: draw() for task in TASKS} for _ in SEEDS]
        random = [numbers_of(models, law, data) for models, law in zip(seeds, fresh, strict=True)]
        found["random"] += rule.verdicts(random)["H1"] == "confirmed"
        for models in seeds:
            models |= {task: planted(model) for task, model in models.items()}
        with_planted = [numbers_of(models, law, data) for models, law in zip(seeds, fresh, strict=True)]
        found["planted"] += rule.verdicts(with_planted)["H1"] == "confirmed"
    assert found["random"] <= 3 and found["planted"] >= 19, found


# --- a study that is stopped and continued ---------------------------------------------------------------------------------


def test_a_study_that_was_stopped_three_times_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls = 0
    stops: set[int] = set()

    def measured(task: HalvedTask, generator: torch.Generator, size: climb.Size) -> Numbers:
        nonlocal calls
        calls += 1
        if calls in stops:
            raise KeyboardInterrupt
        return {"loss": float(torch.rand((), generator=generator)), "pairs": float(size.fresh), "loss_apart": math.nan}

    monkeypatch.setattr(climb, "measure_task", measured)
    monkeypatch.setattr(climb, "task_of", lambda name, seed: vector_task(name))

    def stored(folder: Path) -> dict:
        content = json.loads((folder / "climb.json").read_text(encoding="utf-8"))
        for entry in content["seeds"].values():
            del entry["seconds"]  # of the machine, not of the study
        return content

    run("climb", out=tmp_path / "whole")
    assert calls == 15
    calls, stops = 0, {2, 8, 13}
    finished = [run("climb", out=tmp_path / "parts", resume=True)[1] for _ in range(4)]
    assert finished == [False, False, False, True]
    whole = stored(tmp_path / "whole")
    assert stored(tmp_path / "parts") == whole
    assert whole["made"]["registration"] == find("climb").registration["registration"]


# --- the page ----------------------------------------------------------------------------------------------------------------


def test_the_page_and_its_figures_are_made_from_the_stored_numbers():
    study = load(RESULTS / "climb.json")
    assert climb_page.PAGE.read_text(encoding="utf-8") == climb_page.page(study), "run python -m scripts.climb_page"
    figures = climb_page.figures(study)
    assert {f"{figure.name}.svg" for figure in figures} == {path.name for path in climb_page.IMAGES.iterdir()}
    for figure in figures:
        drawn = (climb_page.IMAGES / f"{figure.name}.svg").read_text(encoding="utf-8")
        assert drawn == figure.drawing and len(drawn) < 40_000
        ElementTree.fromstring(drawn)
    assert len(figures) == 8


def test_a_figure_has_its_points_and_intervals_where_their_values_are():
    group = climb_page.Group("heads <A>", [-1.0, 0.0, 1.0], (-0.5, 0.5))
    svg = "{http://www.w3.org/2000/svg}"
    drawing = ElementTree.fromstring(climb_page.strips("of heads & tasks", [group], 0.25))
    heights = [float(circle.attrib["cy"]) for circle in drawing.iter(f"{svg}circle")]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2) and heights[0] > heights[1]
    (bar,) = [line for line in drawing.iter(f"{svg}line") if line.attrib["stroke"] == "#a63603"]
    low, high = (heights[1] + side * (heights[0] - heights[1]) / 2 for side in (1, -1))
    assert float(bar.attrib["y1"]) == pytest.approx(low, abs=0.2)
    assert float(bar.attrib["y2"]) == pytest.approx(high, abs=0.2)
    assert [text.text for text in drawing.iter(f"{svg}text")][-2:] == ["heads", "<A>"]
    assert drawing.attrib["aria-label"] == "of heads & tasks"
    climb_page.strips("one number", [climb_page.Group("", [0.0])])  # an axis without length
