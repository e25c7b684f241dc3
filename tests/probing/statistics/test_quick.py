"""A quick run, and statistics that are named one by one."""

import math

import pytest
import torch
from transformers import GPT2Config, GPT2Model

import massieu
from massieu.errors import InputError
from massieu.probing.checks.nonfinite import kind_of
from massieu.probing.statistics import registry
from massieu.probing.statistics.attention import REGISTER as ATTENTION_REGISTER

CONFIG = {"vocab_size": 61, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "attn_implementation": "sdpa"}


def small_model() -> GPT2Model:
    torch.manual_seed(0)
    return GPT2Model(GPT2Config(**CONFIG, bos_token_id=0, eos_token_id=0)).eval()


def batches(number: int = 2) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(1, 61, (3, 24), generator=generator)} for _ in range(number)]


def rows(result) -> dict[tuple[str, int, str], tuple[float, float, float]]:
    """Value, error and count of every row of the heads' table."""
    by_row = {}
    for row in result.heads.rows(named=True):
        numbers = (row[name] for name in ("value", "standard_error", "count"))
        by_row[row["site"], row["head"], row["statistic"]] = tuple(math.nan if n is None else n for n in numbers)
    return by_row


def same(expected: dict) -> dict:
    """Up to float32's rounding: fewer moments may be summed in another order."""
    return {key: pytest.approx(numbers, rel=2e-5, abs=1e-6, nan_ok=True) for key, numbers in expected.items()}


@pytest.fixture(scope="module")
def whole():
    return rows(massieu.probe(small_model(), massieu.Batches(batches(), window=24)))


def test_a_quick_run_has_the_attention_statistics_of_a_whole_one_with_their_errors(whole):
    result = massieu.probe(small_model(), massieu.Batches(batches(), window=24), statistics="quick")
    quick = rows(result)
    compared = ("/reinitialised", "/p_value", "/q_value")
    group = ATTENTION_REGISTER.functions
    assert quick == same(
        {k: v for k, v in whole.items() if k[2].split("/")[0] in group and not k[2].endswith(compared)}
    )
    assert result.run.settings["quick"] is True
    assert any("quick run" in warning for warning in result.run.warnings)
    assert "re-initialised control" not in result.run.timing and not result.details["examples"]


@pytest.mark.parametrize("name", ATTENTION_REGISTER.functions)
def test_a_statistic_by_itself_is_what_it_is_among_all(name, whole):
    by_itself = rows(massieu.probe(small_model(), massieu.Batches(batches(), window=24), statistics=[name], draws=0))
    alone = {key: value for key, value in whole.items() if key[2] == name}
    assert alone or name in ("weight_special", "sink_weight")  # this model has neither
    assert {key: value for key, value in by_itself.items() if key[2] == name} == same(alone)
    assert all(key[2].split("/")[0] == name for key in by_itself)


def test_only_the_moments_that_are_needed_are_computed(monkeypatch):
    requested = []
    compute = massieu.ops.attention_moments
    monkeypatch.setattr(
        massieu.ops, "attention_moments", lambda *a, **k: (requested.append(k["moments"]), compute(*a, **k))[1]
    )
    monkeypatch.setattr("massieu.probing.session.session.EXAMPLES", 0)
    massieu.probe(small_model(), massieu.Batches(batches(1), window=24), statistics=["largest_weight"], draws=0)
    assert {*requested} == {("log_partition", "entropy", "max_weight")}


def test_a_moment_that_no_statistic_declared_costs_a_second_pass_and_no_number(monkeypatch):
    data, options = massieu.Batches(batches(1), window=24), {"draws": 0, "statistics": ["largest_weight"]}
    expected = massieu.probe(small_model(), data, **options)
    monkeypatch.setitem(registry.MOMENTS, "largest_weight", ())
    with pytest.warns(
        UserWarning, match=r"the moment 'max_weight' without declaring it: moments=\('max_weight',\) saves"
    ):
        result = massieu.probe(small_model(), data, **options)
    assert result.heads.equals(expected.heads) and result.run.unavailable == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_sum_that_overflows_is_no_infinity(dtype):
    huge = torch.full((3, 1000), torch.finfo(dtype).max, dtype=dtype)
    huge[:, ::2] *= -1
    assert kind_of(huge) is None and kind_of(huge.abs()) is None
    for value, what in ((torch.inf, "infinity"), (-torch.inf, "infinity"), (torch.nan, "NaN")):
        broken = huge.clone()
        broken[1, 7] = value
        assert kind_of(broken) == what
    broken[2, 2], broken[2, 4], broken[1, 7] = torch.inf, -torch.inf, 0  # their sum is NaN
    assert kind_of(broken) == "infinity"


def test_bad_calls():
    model = small_model()
    with pytest.raises(InputError, match="statistics must be a list of names, or \"quick\", got 'entropy'"):
        massieu.probe(model, batches(1), statistics="entropy")
    with pytest.raises(InputError, match="unknown statistic 'entrpy'"):
        massieu.probe(model, batches(1), statistics=["entrpy"], draws=0)
