"""The law of tokens through the depth: against NumPy and SciPy on hidden states that hooks catch, and clouds of known law."""

import itertools
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from tests.support.probing.groups import begun, rows_at, step_to, sublayer, window
from torch import Tensor

import massieu
from massieu.population.cloud_shape import random_directions
from massieu.probing.statistics.flow import (
    PROJECTIONS,
    FlowGroup,
    gaussian,
    stream_clusters,
    stream_cosine,
    stream_effective_rank,
    stream_fourth_cumulant,
    stream_gaussian_distance,
    stream_third_cumulant,
)
from massieu.probing.statistics.flow import REGISTER as FLOW_REGISTER
from massieu.probing.stream.wiring import Step
from massieu.probing.sums.units import Units

IDS = torch.stack([torch.randperm(40, generator=torch.Generator().manual_seed(i))[:16] for i in range(3)])
SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}


def model(kind: str, seed: int = 0, **settings: int) -> Any:
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

    torch.manual_seed(seed)
    if kind == "llama":
        return LlamaModel(LlamaConfig(**SIZES | settings, vocab_size=40)).eval()
    return BertModel(BertConfig(**SIZES | settings, vocab_size=40)).eval()


def explicit(cloud: np.ndarray) -> dict[str, float]:
    directions = random_directions(cloud.shape[1], PROJECTIONS, generator=torch.Generator().manual_seed(0)).numpy()
    along = (cloud - cloud.mean(0)) @ directions.T
    number = len(cloud)
    spectrum = np.linalg.eigvalsh(np.cov(cloud.T))
    share = spectrum[spectrum > 1e-12 * spectrum.max()] / spectrum.sum()
    second, third, fourth = (scipy.stats.kstat(along, n, axis=0) for n in (2, 3, 4))
    edges = scipy.stats.norm.ppf(np.linspace(0, 1, number + 1))
    # The mean of a standard normal variable over each share 1/n of its law, and the second moment over all of it is 1.
    centre = number * (scipy.stats.norm.pdf(edges[:-1]) - scipy.stats.norm.pdf(edges[1:]))
    scaled = np.sort(along, 0) / along.std(0)
    distance = (scaled**2).mean(0) + 1 - 2 * (scaled * centre[:, None]).mean(0)
    unit = cloud / np.linalg.norm(cloud, axis=1, keepdims=True)
    cosines = unit @ unit.T
    leaders: list[np.ndarray] = []
    for each in unit:
        if all(np.linalg.norm(each - leader) > 0.5 for leader in leaders):
            leaders.append(each)
    return {
        "stream_effective_rank": float(np.exp(-(share * np.log(share)).sum())),
        "stream_third_cumulant": float(np.abs(third / second**1.5).mean()),
        "stream_fourth_cumulant": float((fourth / second**2).mean()),
        "stream_gaussian_distance": float(np.sqrt(distance.mean())),
        "stream_cosine": float((cosines.sum() - number) / number / (number - 1)),
        "stream_clusters": float(len(leaders)),
    }


def test_functions_are_the_explicit_ones():
    cloud = torch.randn(30, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 3 + 0.5
    for name, expected in explicit(cloud.numpy()).items():
        assert float(FLOW_REGISTER.functions[name](cloud)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_the_clouds_are_the_hidden_states_after_each_step(kind):
    network = model(kind)
    result = massieu.probe(network, [{"input_ids": IDS}], statistics=["flow"])
    caught: dict[str, Tensor] = {}
    steps = {}
    for layer in range(1):
        if kind == "llama":
            steps[f"layers.{layer} feed-forward"] = network.layers[layer]
        else:
            steps[f"encoder.layer.{layer}.output.LayerNorm"] = network.encoder.layer[layer]
    for name, module in steps.items():
        module.register_forward_hook(
            lambda _, __, output, name=name: caught.update({name: output[0] if isinstance(output, tuple) else output})
        )
    with torch.no_grad():
        network(input_ids=IDS)
    rows = result.layers
    for name, states in caught.items():
        here = rows.filter(rows["site"] == name)
        assert len(here), (name, rows["site"].unique().to_list())
        values = [explicit(window.double().numpy()) for window in states]
        sampled = int(here.filter(here["statistic"] == "stream_cosine")["count"][0])
        for statistic in FLOW_REGISTER.functions:
            expected = np.mean([value[statistic] for value in values[:sampled]])
            found = here.filter(here["statistic"] == statistic)["value"][0]
            assert found == pytest.approx(expected, rel=1e-3, abs=1e-3)
    names = {*rows["statistic"]}
    assert {f"{name}/reinitialised" for name in FLOW_REGISTER.functions} <= names
    assert {f"{name}/gaussian" for name in FLOW_REGISTER.functions if name != "stream_effective_rank"} <= names
    assert "stream_effective_rank/gaussian" not in names


def measured(clouds: list[Tensor]) -> dict[str, list[float]]:
    group = begun(FlowGroup, Units("document"), 0)  # clouds are drawn one by one
    for number, cloud in enumerate(clouds):
        drawn = torch.Generator().manual_seed(number)
        group.on_step(step_to(cloud, 0), window(torch.arange(len(cloud)), number, drawn))
    return rows_at(group, 0)


@pytest.mark.slow
def test_a_gaussian_cloud_is_inside_its_null_and_others_are_not():
    drawn = torch.Generator().manual_seed(0)
    laws = {
        "gaussian": lambda: torch.randn(64, 8, generator=drawn) @ torch.randn(8, 8, generator=drawn),
        "heavy": lambda: torch.randn(64, 8, generator=drawn) * torch.rand(64, 1, generator=drawn) ** -0.7,
        "clusters": lambda: (
            torch.eye(8)[torch.randint(3, (64,), generator=drawn)] + 0.05 * torch.randn(64, 8, generator=drawn)
        ),
    }
    by_law = {law: measured([draw() for _ in range(12)]) for law, draw in laws.items()}

    def apart(law: str, name: str) -> float:
        (own, error, *_), (null, other, *_) = by_law[law][name], by_law[law][f"{name}/gaussian"]
        return (own - null) / np.hypot(error, other)

    for name in ("stream_third_cumulant", "stream_fourth_cumulant", "stream_gaussian_distance"):
        assert abs(apart("gaussian", name)) < 4
        assert apart("heavy", name) > 5
    assert by_law["clusters"]["stream_clusters"][0] == 3 < by_law["gaussian"]["stream_clusters"][0]
    assert apart("clusters", "stream_gaussian_distance") > 5 and apart("clusters", "stream_fourth_cumulant") < -4


@pytest.mark.medium
def test_the_control_has_the_clouds_mean_and_covariance():
    cloud = torch.randn(500, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 3 + 5
    drawn = torch.cat([gaussian(cloud, torch.Generator().manual_seed(i)) for i in range(40)])
    spread = cloud.std(0) / len(drawn) ** 0.5
    assert ((drawn.mean(0) - cloud.mean(0)).abs() < 5 * spread).all()
    covariance, expected = (torch.cov(part.T, correction=0) for part in (drawn, cloud))
    torch.testing.assert_close(covariance, expected, rtol=0.1, atol=0.1 * float(expected.max()))
    assert abs(scipy.stats.kurtosis(drawn[:, 0].numpy())) < 0.2 < scipy.stats.kurtosis(cloud[:, 0].numpy())


def test_few_tokens_and_numbers_that_are_not_finite_count_nowhere():
    cloud = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    broken = cloud.clone()
    broken[3, 1] = torch.inf
    assert measured([cloud[:7]]) == {}
    assert measured([broken]) == {}
    assert measured([cloud, broken])["stream_cosine"][2] == 1


def test_sums_can_be_stored_and_merged():
    clouds = [torch.randn(20, 4, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    whole, *parts, again = (begun(FlowGroup, Units(), 3) for _ in range(4))
    for number, cloud in enumerate(clouds):
        for group in (whole, parts[number % 2]):
            drawn = torch.Generator().manual_seed(number)
            group.on_step(step_to(cloud, 3), window(torch.arange(20), number, drawn))
    again.restore(parts[0].state())
    again.merge(parts[1])
    expected, restored = rows_at(whole, 3), rows_at(again, 3)
    assert expected and expected.keys() == restored.keys()
    for name, cell in expected.items():
        assert cell == pytest.approx(restored[name], nan_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_two_models_drawn_alike_are_not_told_apart(kind):
    ids = torch.stack([torch.randperm(40, generator=torch.Generator().manual_seed(i))[:24] for i in range(6)])
    first, second = (
        massieu.probe(model(kind, seed, num_hidden_layers=2), [{"input_ids": ids}], statistics=["flow"]).layers
        for seed in (0, 1)
    )
    named = tested = 0
    for name in ("stream_third_cumulant", "stream_fourth_cumulant", "stream_gaussian_distance"):
        one, other = (rows.filter(rows["statistic"] == name) for rows in (first, second))
        error = np.hypot(one["standard_error"].to_numpy(), other["standard_error"].to_numpy())
        t = np.abs(one["value"].to_numpy() - other["value"].to_numpy()) / error
        p = 2 * scipy.stats.t.sf(t, 1)  # errors over six windows have one degree of freedom
        named += int((scipy.stats.false_discovery_control(p) < 0.05).sum())
        tested += len(p)
    assert named <= 0.2 * tested


def test_functions_are_those_that_are_registered():
    assert [*FLOW_REGISTER.functions.values()] == [
        stream_effective_rank, stream_third_cumulant, stream_fourth_cumulant, stream_gaussian_distance, stream_cosine,
        stream_clusters,
    ]  # fmt: skip


def halving(states: list[Tensor], positions: Tensor | None = None, kinds: str = "aa") -> dict[int, float]:
    """The statistic at each step of a stream that has these states, by the sublayer's number."""
    group = begun(FlowGroup, Units("document"), *range(len(states) - 1))
    positions = torch.arange(len(states[0])) if positions is None else positions
    for index, (before, after) in enumerate(itertools.pairwise(states)):
        kind = {"a": "attention", "f": "feed_forward"}[kinds[index % 2]]
        step = Step(sublayer(index, kind), before[None], after[None], None)
        group.on_step(step, window(positions, 0, torch.Generator().manual_seed(index)))
    found = {index: rows_at(group, index).get("stream_step_halving") for index in range(len(states) - 1)}
    return {index: row[0] for index, row in found.items() if row is not None}


def test_halving_the_steps_of_a_flow_changes_little_and_of_unrelated_layers_much():
    """Euler's steps of dx/dt = Ax: g = hAx, f = hA(x + hAx). Half the step makes a quarter of the squared difference."""
    drawn = torch.Generator().manual_seed(0)
    start, matrix = torch.randn(20, 4, generator=drawn).double(), torch.randn(4, 4, generator=drawn).double()
    numbers = {}
    for length in (0.02, 0.01):
        states = [start]
        for _ in range(2):
            states.append(states[-1] + length * states[-1] @ matrix.T)
        first, second = states[1] - states[0], states[2] - states[1]
        numbers[length] = halving(states)
        expected = float((second - first).norm() ** 2 / (second + first).norm() ** 2)
        assert numbers[length] == {1: pytest.approx(expected, rel=1e-9)}
    assert numbers[0.02][1] / numbers[0.01][1] == pytest.approx(4, rel=0.1)

    unrelated = [start, *(start + each for each in torch.randn(3, 20, 4, generator=drawn).double().cumsum(0))]
    assert halving(unrelated)[2] == pytest.approx(1, abs=0.5)
    turned = [
        torch.zeros(20, 4),
        torch.eye(4).repeat(5, 1),
        torch.eye(4).repeat(5, 1) + torch.eye(4).roll(1, 0).repeat(5, 1),
    ]
    assert halving(turned)[1] == pytest.approx(1)  # orthogonal updates of one length


def test_updates_are_compared_within_their_kind_and_their_tokens():
    drawn = torch.Generator().manual_seed(0)
    states = list(torch.randn(5, 20, 4, generator=drawn).double())
    updates = [after - before for before, after in itertools.pairwise(states)]
    found = halving(states, positions=torch.arange(3, 17), kinds="af")
    assert set(found) == {2, 3}
    for index in found:
        now, last = updates[index][3:17], updates[index - 2][3:17]
        assert found[index] == pytest.approx(float((now - last).norm() ** 2 / (now + last).norm() ** 2))
    # A second pass does not follow the first one.
    group = begun(FlowGroup, Units("document"), 0)
    for number in range(2):
        step = Step(sublayer(0), states[number][None], states[number + 1][None], None)
        group.on_step(step, window(torch.arange(20), number, drawn))
    assert "stream_step_halving" not in rows_at(group, 0)


@pytest.mark.medium
def test_halving_on_a_model_is_that_of_its_hidden_states():
    """Each block's last step adds what the feed-forward layer adds; layer 0 has no layer before."""
    network = model("llama", num_hidden_layers=2)
    inputs: dict[int, Tensor] = {}
    updates: dict[int, Tensor] = {}
    for number, layer in enumerate(network.layers):
        layer.mlp.register_forward_hook(lambda _, __, output, number=number: updates.update({number: output.double()}))
        layer.register_forward_hook(lambda _, given, __, number=number: inputs.update({number: given[0]}))
    result = massieu.probe(network, [{"input_ids": IDS[:1]}], statistics=["stream_step_halving"], draws=2)
    with torch.no_grad():
        network(input_ids=IDS[:1])
    rows = result.layers.filter(result.layers["statistic"] == "stream_step_halving")
    here = rows.filter(rows["site"] == "layers.1 feed-forward")
    expected = (updates[1] - updates[0]).norm() ** 2 / (updates[1] + updates[0]).norm() ** 2
    assert here["value"][0] == pytest.approx(float(expected), rel=1e-3)
    assert "layers.0 feed-forward" not in rows["site"].to_list()
    assert "stream_step_halving/reinitialised" in result.layers["statistic"].to_list()
