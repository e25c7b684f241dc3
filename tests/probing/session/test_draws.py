"""The re-initialised control: which windows its draws read, and that neither batches, processes nor breaks change them."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from polars.testing import assert_frame_equal
from tests.support.probing import zoo
from tests.support.probing.drawn import in_memory
from tests.support.probing.draws import draw_by_default
from tests.support.rows import every_row, some_slow

import massieu
from massieu.errors import InputError
from massieu.probing.model.blueprint import blueprint_of
from massieu.probing.model.drawn import Blueprint, DrawnWeights
from massieu.probing.model.fresh import reinitialised
from massieu.probing.model.seeding import seed_of
from massieu.probing.reading.reading import Reading
from massieu.probing.session import draws as control
from massieu.probing.session import session_record
from massieu.probing.session.session_record import NO_CONTROL

VOCABULARY, LENGTH = 60, 12
STATISTICS = ["attention", "climb", "maps", "expansion"]


def gpt2(seed: int = 0) -> Any:
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(seed)
    size = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": LENGTH, "vocab_size": VOCABULARY}
    return GPT2Model(GPT2Config(**size, initializer_range=0.3, bos_token_id=None, eos_token_id=None)).eval()


def batches(windows: int, size: int) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(VOCABULARY, (windows, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": part} for part in ids.split(size)]


def numbers(result: massieu.ProbeResult, part: str = "reinitialised") -> dict[Any, tuple[float, float]]:
    table = result.table.filter(result.table["statistic"].str.ends_with(f"/{part}"))
    return {row[:5]: row[5:7] for row in table.iter_rows()}


def assert_alike(one: massieu.ProbeResult, other: massieu.ProbeResult) -> None:
    first, second = numbers(one), numbers(other)
    assert first.keys() == second.keys() and first
    # Windows in other batches are summed in another order, and a law's deviation is a difference of such numbers.
    for key, pair in first.items():
        np.testing.assert_allclose(
            np.array(pair, float), np.array(second[key], float), rtol=1e-3, atol=2e-6, err_msg=str(key)
        )


@pytest.fixture(scope="module")
def whole() -> massieu.ProbeResult:
    return massieu.probe(gpt2(), batches(6, 4), statistics=STATISTICS, draws=8)


def entropies(model: Any, ids: torch.Tensor) -> np.ndarray:
    model = model.double()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found = model(input_ids=ids[None], output_attentions=True).attentions
    return np.stack([torch.special.entr(each[0]).sum(-1).mean(-1).numpy() for each in found])


@pytest.mark.slow
def test_the_law_is_that_of_eight_models_each_on_its_window(whole):
    """Four of the six windows are sampled, so that draw 4 reads the first one again."""
    given, model = batches(6, 1), gpt2()
    drawn = []
    blueprint = blueprint_of(model)
    assert isinstance(blueprint, Blueprint)
    for draw in range(8):
        fresh, _ = blueprint.draw(["h.0", "h.1"], seed_of(0, draw), torch.device("cpu"), torch.float32)
        drawn.append(entropies(in_memory(model, fresh), given[draw % 4]["input_ids"][0]))
    own, law = np.stack(drawn), numbers(whole)
    for layer, heads in enumerate(np.moveaxis(own, 1, 0)):
        between = 4 * heads.mean(1).var(ddof=1)
        within = heads.var(1, ddof=1).mean()
        deviation = np.sqrt(between * (9 / 8) / 4 + within * 3 / 4)
        for head in range(4):
            found = law["head", f"h.{layer}.attn", layer, head, "entropy/reinitialised"]
            np.testing.assert_allclose(found, (heads.mean(), deviation), rtol=2e-3)


@pytest.mark.slow
@every_row("size", [1, 3, 6])
def test_the_size_of_batches_changes_no_draw(whole, size):
    assert_alike(whole, massieu.probe(gpt2(), batches(6, size), statistics=STATISTICS, draws=8))


@pytest.mark.slow
def test_processes_share_the_draws(whole):
    """Each takes every second draw of all windows, whoever reads them, and their numbers are put together."""
    taken: list[list[int]] = []

    class Shared(control.Draws):
        def take(self, process: int, processes: int, whole: bool) -> None:
            for part in range(2):
                before = set(self.read)
                super().take(part, 2, whole)
                taken.extend([sorted(new)] if (new := set(self.read) - before) else [])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("massieu.probing.session.session.Draws", Shared)
        assert_alike(whole, massieu.probe(gpt2(), batches(6, 4), statistics=STATISTICS, draws=8))
    assert taken == [[0, 2], [1, 3], [4, 6], [5, 7]]


class BrokenError(Exception):
    """The run is killed."""


@pytest.mark.slow
def test_a_run_that_was_broken_off_draws_the_same(whole, tmp_path):
    def broken(state: Any) -> None:
        if state.windows >= 4:
            raise BrokenError

    how: dict[str, Any] = {"statistics": STATISTICS, "draws": 8}
    run = massieu.Run(tmp_path, store_every=1e-9, progress=broken)
    with pytest.raises(BrokenError):
        massieu.probe(gpt2(), batches(6, 2), run=run, **how)
    again = massieu.Run(tmp_path, store_every=1e-9, resume=True)
    assert_alike(whole, massieu.probe(gpt2(), batches(6, 2), run=again, **how))


def test_no_draw_keeps_weights_for_the_next(monkeypatch):
    made: list[DrawnWeights] = []
    own = Blueprint.draw

    def watched(*given: Any) -> Any:
        assert not any(each._of_block or each._outside for each in made)
        fresh, weights = own(*given)
        made.append(weights)
        return fresh, weights

    monkeypatch.setattr(Blueprint, "draw", watched)
    massieu.probe(gpt2(), batches(6, 4), statistics=["entropy"], draws=5)
    assert len(made) == 5


@pytest.mark.slow
def test_controls_that_a_draw_leaves_out_change_none_of_its_numbers(whole, monkeypatch):
    def with_controls(*arguments: Any, is_draw: bool, **others: Any) -> Any:
        assert is_draw
        return Reading(*arguments, **others)

    monkeypatch.setattr(control, "Reading", with_controls)
    complete = massieu.probe(gpt2(), batches(6, 4), statistics=STATISTICS, draws=8)
    law, complete_law = numbers(whole), numbers(complete)
    assert law.keys() == complete_law.keys()
    for key, pair in law.items():
        np.testing.assert_allclose(
            np.array(pair, float), np.array(complete_law[key], float), rtol=1e-5, err_msg=str(key)
        )


@pytest.mark.medium
@some_slow("name", ["gpt2", "bert", "t5", "llama", "albert", "vit", "swin"], 1)
def test_steps_and_replays_see_the_weights_of_their_block(name, monkeypatch):
    """Beside draws of which all weights are in memory at once: no number may depend on when a block was dropped."""
    model, batch = zoo.fresh(name), zoo.inputs(name)
    statistics = ["attention", "values", "climb", "maps", "expansion", "feed_forward", "response", "residual"]
    found = massieu.probe(model, [batch], statistics=statistics, draws=2)
    own = Blueprint.draw
    monkeypatch.setattr(Blueprint, "draw", lambda self, blocks, *given: own(self, [""], *given))
    expected = massieu.probe(model, [batch], statistics=statistics, draws=2)
    assert numbers(found).keys() == numbers(expected).keys() and numbers(found)
    assert_alike(found, expected)
    assert found.run.warnings == expected.run.warnings


def test_one_whole_model_at_a_time_is_in_memory_where_it_must_be_whole(monkeypatch):
    """When the next one is made, those before it have no weights any more."""
    monkeypatch.setattr(control, "blueprint_of", lambda _: "it is another model")
    made: list[torch.nn.Module] = []

    def watched(*given: Any) -> Any:
        assert all(each.device.type == "meta" for model in made for each in model.parameters())
        fresh, said = reinitialised(*given)
        made.append(fresh)
        return fresh, said

    monkeypatch.setattr(control, "reinitialised", watched)
    massieu.probe(gpt2(), batches(6, 4), statistics=["entropy"], draws=5)
    assert len(made) == 5


@pytest.mark.slow
def test_from_fewer_than_four_windows_nothing_is_announced():
    for windows, tested in ((3, False), (4, True)):
        result = massieu.probe(gpt2(), batches(windows, 4), statistics=STATISTICS, draws=4)
        of_text = [key for key in numbers(result, "p_value") if "cosine" not in key[4]]  # which is of the weights alone
        assert bool(of_text) == tested
        assert tested or all(finding.value is None for finding in result.findings)


def test_a_model_is_no_finding_beside_models_like_it():
    result = massieu.probe(gpt2(3), batches(40, 8), statistics=["attention", "climb", "expansion"], draws=8)
    assert [finding.value for finding in result.findings] == [None] * 4


@every_row("draws", [1, -3, True, 2.0, "8"])
def test_draws_are_a_whole_number_from_two_on(draws):
    with pytest.raises(InputError, match="draws must be a whole number"):
        massieu.probe(gpt2(), batches(1, 1), draws=draws)


def test_without_draws_nothing_is_compared(whole):
    """The numbers are those of a run with a control, and a warning says what is missing."""
    result = massieu.probe(gpt2(), batches(6, 4), statistics=STATISTICS, draws=0)
    tested = r"/(reinitialised|p_value|q_value)$"  # of some statistics, by another control than this one
    one, other = (each.table.filter(~each.table["statistic"].str.contains(tested)) for each in (result, whole))
    assert_frame_equal(one, other.select(one.columns))
    assert not result.table["statistic"].str.contains("/reinitialised").any()
    assert result.run.warnings.count(NO_CONTROL) == 1 and "re-initialised control" not in result.run.timing


def alibi() -> Any:
    from transformers import BloomConfig, BloomModel

    torch.manual_seed(0)
    return BloomModel(BloomConfig(hidden_size=16, n_layer=1, n_head=4, vocab_size=VOCABULARY)).eval()


def grouped() -> Any:
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaModel(LlamaConfig(**size, intermediate_size=16, vocab_size=VOCABULARY)).eval()


@every_row(
    "make, apart, clusters", [(gpt2, False, 4), (alibi, True, 4), (grouped, False, 2)], ids=["gpt2", "alibi", "grouped"]
)
def test_heads_with_other_log_weights_are_apart_and_those_that_share_keys_together(make, apart, clusters, monkeypatch):
    seen = []
    arrangement = session_record.arrangement_of
    monkeypatch.setattr(session_record, "arrangement_of", lambda info: seen.append(arrangement(info)) or seen[-1])
    massieu.probe(make(), batches(4, 4), statistics=["entropy"], draws=2)
    assert {(each.alone, each.clusters) for each in seen} == {(apart, clusters)}


@pytest.mark.slow
def test_few_random_models_are_announced(monkeypatch):
    """20 small random models, probed as if they were trained: at 5 % each, four with a card happen in 1.6 % of cases."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    models = importlib.import_module("control_models")
    draw_by_default(8, monkeypatch)
    assert sum(bool(models.announced(*models.random_run(seed, questions=False))["cards"]) for seed in range(20)) < 4
