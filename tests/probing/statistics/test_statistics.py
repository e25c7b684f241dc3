"""Every per-query statistic against float64 attention matrices formed in the test, and the invariances they must have."""

import functools
import re
import runpy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars
import pytest
import torch
from tests.support.probing import oracle, zoo
from tests.support.probing.readings import attention_of
from tests.support.rows import every_row
from typer.testing import CliRunner

import massieu
from massieu.cli.commands import app
from massieu.probing.capture.attention_call import AttentionCall, AttentionSite
from massieu.probing.capture.tokens import Tokens
from massieu.probing.checks.check import first_look
from massieu.probing.reading.examples import _numbers
from massieu.probing.reading.options import Options
from massieu.probing.reading.reading import Reading
from massieu.probing.statistics import attention as attention_file
from massieu.probing.statistics.catalogue import PACKAGE, Selection
from massieu.probing.statistics.query_means import AttentionStatistics, query_statistics
from massieu.probing.statistics.query_reading import QueryReading
from massieu.probing.statistics.registry import ATTENTION, OPT_IN, STATISTICS, VALUES
from massieu.probing.statistics.registry import GROUPS as ALL_GROUPS
from massieu.probing.sums.units import Units

GROUPS = frozenset({ATTENTION, VALUES})


@functools.cache
def sites_of(name):
    return first_look(zoo.model(name), zoo.inputs(name, rows=2)).sites


def read(name, batches, special, **options) -> Reading:
    model, sites = zoo.model(name), sites_of(name)
    reading = Reading(model, sites, Options(GROUPS, Units(), 20, **options))
    for batch, marks in zip(batches, special, strict=True):
        reading.forward(batch, marks, sampled=(), windows=range(len(batch["input_ids"])))
    return reading


def values_of(reading: Reading, site: int) -> dict[str, np.ndarray]:
    rows = (row for row in reading.rows() if row.place.order == site and not row.part)
    return {row.statistic: row.estimate.value for row in rows if row.statistic != "write_norm_ratio"}


def marks(batch):
    special = torch.zeros_like(batch["attention_mask"], dtype=torch.bool)
    special[:, 0] = True
    special[:, 7] = True
    return special


def assert_agrees_with_explicit_matrices(name: str, padded: bool) -> None:
    batch = zoo.inputs(name, padded=padded)
    special = marks(batch)
    reading = read(name, [batch], [special])
    for site, layer in enumerate(oracle.attention_of(name, batch)):
        values = values_of(reading, site)
        for statistic, expected in oracle.expected(layer, batch, special).items():
            assert np.allclose(values[statistic], expected, atol=1e-5, rtol=1e-5), (statistic, site)


def test_statistics_agree_with_explicit_matrices():
    assert_agrees_with_explicit_matrices("gpt2", padded=True)


@pytest.mark.medium
@every_row("padded", [False, True], ids=["full", "padded"])
@every_row("name", ["bert", "gpt2", "llama"])
def test_statistics_of_other_models_agree_with_explicit_matrices(name, padded):
    assert_agrees_with_explicit_matrices(name, padded)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_batch_size_and_padding_change_nothing(name):
    """The same sequences together with padding, one by one without it, and one by one with more padding."""
    batch = zoo.inputs(name, padded=True)
    special = marks(batch)
    together = read(name, [batch], [special])
    lengths = batch["attention_mask"].sum(1).tolist()
    alone = [{k: v[i : i + 1, :n] for k, v in batch.items()} for i, n in enumerate(lengths)]
    apart = read(name, alone, [special[i : i + 1, :n] for i, n in enumerate(lengths)])
    for site in range(len(together.sites)):
        for statistic, value in values_of(together, site).items():
            other = values_of(apart, site)[statistic]
            assert np.allclose(value, other, atol=1e-5, rtol=1e-5, equal_nan=True), statistic


def shifted(call: AttentionCall, size: float) -> AttentionCall:
    direction = torch.linspace(-1, 1, call.key.shape[3]) * size
    return replace(call, key=call.key + direction)


@pytest.mark.parametrize("causal", [False, True])
def test_a_constant_added_to_the_keys_moves_no_headline(causal):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 40, 16) for _ in range(3))
    call = AttentionCall(
        AttentionSite("a"),
        torch.nn.Identity(),
        query,
        key,
        value,
        None,
        causal,
        0.25,
        None,
        None,
        torch.empty(2, 40, 3, 16),
    )
    tokens = Tokens(torch.ones(2, 40, dtype=torch.bool), torch.zeros(2, 40, dtype=torch.bool))
    positions = torch.arange(40)
    plain = query_statistics(QueryReading(call, tokens, tokens, positions, True), PACKAGE.query_functions)
    moved = query_statistics(QueryReading(shifted(call, 5.0), tokens, tokens, positions, True), PACKAGE.query_functions)
    for name, value in plain.values.items():
        difference = float((value - moved.values[name]).abs().max())
        if STATISTICS[name].headline:
            assert difference <= 1e-5 * (1 + float(value.abs().max())), name
    for name in ("log_partition", "largest_score"):
        assert float((plain.values[name] - moved.values[name]).abs().max()) > 1


@pytest.mark.parametrize("causal", [False, True])
@every_row(
    "size, dtype",
    [(1e2, torch.float32), *((n, t) for n in (3e4, 3e6, 3e8) for t in (torch.float32, torch.bfloat16, torch.float16))],
)
def test_weights_of_single_keys_are_right_where_scores_are_huge(size, dtype, causal):
    """Queries and keys as large as training has broken them: the scores' rounding in float32 is up to 30 nats."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 4, 24, 16, generator=generator).to(dtype) for _ in range(3))
    restarts = torch.zeros(2, 24, dtype=torch.bool)
    restarts[1, 9] = True
    special = torch.rand(2, 24, generator=generator) < 0.3
    scale = size / 16
    call = AttentionCall(
        AttentionSite("a"), torch.nn.Identity(), query, key, value, None, causal, scale, None, None,
        torch.empty(2, 24, 4, 16),
    )  # fmt: skip
    scores = scale * query.double() @ key.double().mT
    p = torch.softmax(scores + (torch.full((24, 24), -torch.inf).triu(1) if causal else 0.0), -1)
    begin = torch.zeros(2, 24, dtype=torch.long)
    begin[1, 9:] = 9
    expected = {
        "weight_first": p.gather(3, begin[:, None, :, None].expand(-1, 4, -1, -1))[..., 0],
        "weight_special": (p * special[:, None, None]).sum(-1),
        "weight_diagonal": p.diagonal(dim1=-2, dim2=-1),
    }
    tokens = Tokens(torch.ones(2, 24, dtype=torch.bool), special, None, restarts)
    values = query_statistics(
        QueryReading(call, tokens, tokens, torch.arange(24), True), PACKAGE.query_functions
    ).values
    for name, right in expected.items():
        assert float(values[name].max()) <= 1, name
        assert torch.allclose(values[name].double(), right, atol=1e-5), name
    assert torch.allclose(values["weight_previous"][..., 1:].double(), p.diagonal(-1, dim1=-2, dim2=-1), atol=1e-5)


def test_the_strongest_keys_of_an_example_have_weights_of_one_at_most():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 4, 24, 16, generator=generator) for _ in range(3))
    call = AttentionCall(
        AttentionSite("a"), torch.nn.Identity(), query, key, value, None, False, 3e7, None, None,
        torch.empty(1, 24, 4, 16),
    )  # fmt: skip
    right = torch.softmax(3e7 * query.double() @ key.double().mT, -1).topk(3)
    numbers = _numbers(call)
    assert np.allclose(numbers["top_weights"][..., :3], right.values[0], atol=1e-5)
    assert (numbers["top_keys"][..., 0] == right.indices[0, ..., 0].numpy()).all()


def test_every_statistic_is_either_headline_or_says_why_not():
    for statistic in STATISTICS.values():
        assert not (statistic.headline and statistic.gauge_dependent), statistic.name
        assert statistic.question.endswith("?")
        assert statistic.caveat
        assert statistic.cost
        if statistic.gauge_dependent and statistic.name != "sink_weight":
            assert "key origin" in statistic.caveat


@pytest.mark.medium
def test_sampled_queries_estimate_the_same_means():
    """A random half of the queries, many times: the average over samples is the mean over all (each query is as likely)."""
    batch = zoo.inputs("gpt2", rows=2, length=12)
    special = marks(batch)
    everything = values_of(read("gpt2", [batch], [special]), 1)
    samples = [values_of(read("gpt2", [batch], [special], query_sample=6, seed=s), 1) for s in range(12)]
    for name in ("entropy", "selective_log_partition", "weight_first"):
        drawn = np.stack([s[name] for s in samples])
        error = drawn.std(0, ddof=1) / np.sqrt(len(samples))
        assert (np.abs(drawn.mean(0) - everything[name]) <= 5 * error + 1e-6).all(), name


def test_bins_add_up_to_the_whole():
    batch = zoo.inputs("gpt2", padded=True)
    reading = read("gpt2", [batch], [marks(batch)])
    results = attention_of(reading)[0]
    whole = results.ratio.estimate()
    for ratio, name in ((results.by_position, "selective_log_partition"), (results.by_visible, "entropy")):
        part = ratio.estimate()
        count = part.count.sum(0)
        total = np.nansum(part.value * part.count, axis=0)
        index = results.names.index(name)
        assert np.allclose(count, whole.count[index])
        assert np.allclose(total / count, whole.value[index], atol=1e-12)


def test_entropy_bins_are_bins_of_the_number_of_visible_keys():
    """In a causal model query i sees i + 1 keys: bin (3, 4) holds exactly the third and the fourth query."""
    batch = zoo.inputs("gpt2", rows=2)
    reading = read("gpt2", [batch], [marks(batch)])
    bins = {name: ratio.estimate().count[index] for name, ratio, index in attention_of(reading)[0].bins()}
    assert (bins["entropy/visible_keys_1_1"] == 2).all()
    assert (bins["entropy/visible_keys_3_4"] == 4).all()
    assert (bins["entropy/visible_keys_9_16"] == 16).all()
    assert (bins["entropy/visible_keys_17_32"] == 8).all()


def test_nan_is_reported_and_left_out():
    results = AttentionStatistics(tuple(PACKAGE.query_functions), 2, Units(), 8)
    query, key = torch.randn(1, 2, 8, 4), torch.randn(1, 2, 8, 4)
    query[0, 1, 3] = torch.nan
    call = AttentionCall(
        AttentionSite("a"), torch.nn.Identity(), query, key, key, None, False, 0.5, None, None, torch.empty(1, 8, 2, 4)
    )
    tokens = Tokens(torch.ones(1, 8, dtype=torch.bool), torch.zeros(1, 8, dtype=torch.bool))
    result = query_statistics(QueryReading(call, tokens, tokens, torch.arange(8), True), PACKAGE.query_functions)
    results.update(result, torch.arange(8), 1)
    assert results.broken.counts.tolist() == [0, 1]
    estimate = results.ratio.estimate()
    assert np.isfinite(estimate.value[results.names.index("entropy")]).all()
    assert estimate.count[results.names.index("entropy")].tolist() == [8, 7]


def test_learned_sink_takes_its_share_of_z():
    """gpt-oss: sink weight = e^b / (e^b + Σ e^s), from explicitly formed scores; raw log Z includes it."""
    calls = []
    from massieu.probing.capture.routes import capturing

    model = zoo.model("gpt_oss")
    batch = zoo.inputs("gpt_oss")
    with torch.no_grad(), capturing(model, calls.append):
        model(**batch, use_cache=False)
    call = calls[0]
    tokens = Tokens(batch["attention_mask"].bool(), torch.zeros(3, 20, dtype=torch.bool))
    result = query_statistics(QueryReading(call, tokens, tokens, torch.arange(20), True), PACKAGE.query_functions)
    key = call.key.double().repeat_interleave(2, 1)
    z = (call.query.double() @ key.mT * call.scale).masked_fill(~call.visible(), -torch.inf).exp().sum(-1)
    b = call.sink.double()[:, None].exp()
    assert torch.allclose(result.values["sink_weight"].double(), b / (b + z), atol=1e-6)
    assert torch.allclose(result.values["log_partition"].double(), (b + z).log(), atol=1e-5)


def test_selection_of_statistics():
    every = Selection.of(None)
    everything, groups = every.names, every.groups
    assert everything == {name for name, each in STATISTICS.items() if each.group not in OPT_IN}
    assert groups == set(ALL_GROUPS) - OPT_IN and Selection.of(ALL_GROUPS).names == set(STATISTICS)
    some = Selection.of(["entropy", "maps"])
    names, groups = some.names, some.groups
    assert groups == {"attention", "maps"}
    assert names == {"entropy", "write_score_cosine", "symmetric_share", "antisymmetric_share"}
    with pytest.raises(ValueError, match=r"unknown statistic 'entropie'; did you mean entropy"):
        Selection.of(["entropie"])


def test_first_value_against_the_mean_of_all():
    batch = zoo.inputs("llama", padded=True)
    reading = read("llama", [batch], [marks(batch)])
    for site, layer in enumerate(oracle.attention_of("llama", batch)):
        expected = oracle.expected(layer, batch, marks(batch))["first_value_norm_ratio"]
        np.testing.assert_allclose(values_of(reading, site)["first_value_norm_ratio"], expected, rtol=1e-5)


def test_sampled_queries_belong_to_their_window_however_windows_come():
    batch = zoo.inputs("llama", rows=2)
    special = marks(batch)
    together, apart = (
        read("llama", [batch], [special], query_sample=7),
        read("llama", [], [], query_sample=7),
    )
    for row in range(2):
        part = {key: value[row : row + 1] for key, value in batch.items()}
        apart.forward(part, special[row : row + 1], sampled=(), windows=[row])
    for site in range(len(together.sites)):
        assert (attention_of(together)[site].ratio.estimate().count[0] == 14).all()
        for statistic, value in values_of(together, site).items():
            np.testing.assert_allclose(value, values_of(apart, site)[statistic], atol=1e-5, err_msg=statistic)


@pytest.fixture
def own_statistic() -> Iterator[str]:
    """All that somebody writes who adds a statistic of a query: a function, and what is said of it."""

    @attention_file.REGISTER.statistic("Twice the entropy", formula="2 H (of a test)", claim="S8", unit="nats")
    def twice_entropy(reading: QueryReading) -> torch.Tensor:
        """How much is twice the entropy?"""
        return 2 * reading.moments.entropy

    yield twice_entropy.__name__
    del STATISTICS[twice_entropy.__name__], attention_file.REGISTER.functions[twice_entropy.__name__]


TABLES = Path(__file__).parents[3] / "scripts" / "statistics_table.py"


def test_a_new_statistic_is_in_the_tables_the_page_and_the_lists(own_statistic):
    result = massieu.probe(
        zoo.model("gpt2"), massieu.Batches([zoo.inputs("gpt2")] * 2, window=20), statistics=[own_statistic, "entropy"]
    )
    values = {
        name: part["value"].to_numpy() for (name,), part in result.heads.partition_by("statistic", as_dict=True).items()
    }
    for suffix in ("", "/reinitialised", "/first_half"):
        np.testing.assert_allclose(values[own_statistic + suffix], 2 * values["entropy" + suffix], rtol=1e-6)
    assert own_statistic + "/q_value" in values
    assert "2 H (of a test)" in result._page()
    assert own_statistic in CliRunner().invoke(app, ["statistics"]).stdout
    assert "How much is twice the entropy?" in runpy.run_path(str(TABLES))["table"]("head")


@pytest.fixture
def statistic_of_the_recipe() -> Iterator[str]:
    """The code that CONTRIBUTING.md shows for a new statistic, run in the file that it names."""
    page = (Path(__file__).parents[3] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    match = re.search(r"\*\*a statistic\.\*\*.*?```python\n(.*?)```", page, re.DOTALL)
    assert match is not None
    scope = vars(attention_file).copy()
    before = set(STATISTICS)
    exec(compile(match[1], "CONTRIBUTING.md", "exec"), scope)
    (name,) = set(STATISTICS) - before
    yield name
    del STATISTICS[name], attention_file.REGISTER.functions[name]


def test_the_recipe_of_a_statistic_works(statistic_of_the_recipe):
    """max s − log Z of explicit scores in float64, query by query, and beside it the random models."""
    model, batch = zoo.model("gpt2"), zoo.inputs("gpt2", rows=2)
    result = massieu.probe(
        model, massieu.Batches([batch] * 2, window=20), statistics=[statistic_of_the_recipe], draws=2
    )
    values = result.heads.filter(polars.col("statistic") == statistic_of_the_recipe)["value"].to_numpy()
    expected = []
    for layer in oracle.attention_of("gpt2", batch):
        scores = layer["scores"].double()
        expected.append((scores.amax(-1) - scores.logsumexp(-1)).mean((0, 2)).numpy())
    np.testing.assert_allclose(values, np.concatenate(expected), rtol=1e-5)
    assert f"{statistic_of_the_recipe}/reinitialised" in result.heads["statistic"].to_list()


def test_a_name_that_is_taken_and_a_headline_that_depends_on_the_key_origin_are_refused(own_statistic):
    with pytest.raises(ValueError, match="the name is taken"):
        attention_file.REGISTER.statistic("", formula="", claim="", name=own_statistic)(len)
    with pytest.raises(ValueError, match="cannot be a headline"):
        attention_file.REGISTER.statistic("", formula="", claim="", name="new", gauge_dependent=True, headline=True)(
            len
        )


def test_the_page_on_the_probe_has_the_tables_of_now():
    page = next((TABLES.parents[1] / "docs").rglob("probe.md")).read_text(encoding="utf-8")
    assert runpy.run_path(str(TABLES))["with_tables"](page) == page, "run python scripts/statistics_table.py"
