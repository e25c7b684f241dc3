"""What differs between arms: ties, steps, energies; transfer and length-free by other routes; prompts; several processes."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import torch

from massieu.errors import InputError
from massieu.papers.experiments import collective, implicit, landscape, length_free, transfer
from massieu.papers.experiments.conservative import TiedAttention
from massieu.papers.experiments.prompts import elimination, read_prompts, save_readings, urn
from massieu.papers.experiments.run import run, tune


def test_a_write_of_heads_with_both_ties_is_the_gradient_of_their_log_partition():
    torch.manual_seed(0)
    layer = TiedAttention(48, "all").double()
    tokens = torch.randn(1, 5, 48, dtype=torch.float64)
    write, _ = layer(tokens, tokens, tokens, need_weights=False, is_causal=True)
    keys = layer.queries_and_keys(tokens)[1].detach()

    def log_partitions(querying: torch.Tensor) -> torch.Tensor:
        queries = layer.queries_and_keys(querying)[0]
        scores = queries @ keys.mT / math.sqrt(queries.shape[-1])
        hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, -torch.inf).logsumexp(-1).sum() * math.sqrt(queries.shape[-1])

    querying = tokens.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(log_partitions(querying), querying)
    torch.testing.assert_close(write, gradient)
    for tie, number in (("untied", 4 * 3), ("values", 3 * 4), ("outputs", 3 * 4), ("all", 2 * 6)):
        maps = sum(p.numel() for name, p in TiedAttention(48, tie).named_parameters() if name != "gain")
        assert maps == number * 16 * 48


def test_arms_of_collective_have_equally_many_weights():
    models = {name: make_model() for name, make_model in collective._arms().models.items()}
    counts = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    assert all(abs(count / counts["softmax"] - 1) < 2e-3 for name, count in counts.items() if name != "absent")


def test_many_steps_are_the_fixed_point_and_its_gradient():
    torch.manual_seed(0)
    tokens = torch.randn(2, 6, 16, dtype=torch.float64)
    outputs, gradients = [], []
    for steps in (2, 60, None):
        torch.manual_seed(1)
        layer = implicit.PulledAttention(16, 2, steps).double()
        output, _ = layer(tokens, tokens, tokens)
        outputs.append(output)
        gradients.append(torch.autograd.grad(output.square().sum(), layer.query.weight)[0])
    torch.testing.assert_close(outputs[1], outputs[2], rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(gradients[1], gradients[2], rtol=1e-6, atol=1e-8)
    assert not torch.allclose(outputs[0], outputs[2], rtol=1e-4)


def test_the_energy_of_queries_that_ask_for_nothing_is_zero_and_of_one_key_its_score():
    torch.manual_seed(0)
    layer = TiedAttention(48, "untied")
    model = torch.nn.Sequential(torch.nn.Embedding(7, 48), _Alone(layer))
    tokens = torch.randint(7, (3, 1))
    queries, keys = layer.queries_and_keys(model[0](tokens))
    score = float((queries * keys).sum(-1).mean()) / 4
    assert landscape.energy(model, tokens) == pytest.approx(-score, rel=1e-4)
    with torch.no_grad():
        layer.query.weight.zero_()
    assert landscape.energy(model, torch.randint(7, (3, 9))) == pytest.approx(0.0, abs=1e-6)


class _Alone(torch.nn.Module):
    def __init__(self, attention: TiedAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.attention(tokens, tokens, tokens, need_weights=False, is_causal=True)[0]


def test_ranks_are_scipys_and_a_masked_mean_is_that_of_the_posterior():
    drawn = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 9, generator=drawn).tolist()
    expected: Any = scipy.stats.spearmanr(x, y)
    assert transfer._rank_correlation(x, y) == pytest.approx(expected.statistic)
    task = transfer._Task(drawn)
    tokens, latent = task.sample(20_000)
    posterior = task.posterior(tokens)
    likelihood = task.emission[:, tokens].sum(-1).mT  # (B, k)
    torch.testing.assert_close(posterior, likelihood.softmax(-1))
    right = float(posterior.gather(1, latent.unsqueeze(1)).mean())
    assert right == pytest.approx(float(posterior.square().sum(1).mean()), abs=5 / math.sqrt(20_000))  # calibrated
    sizes = torch.linalg.svdvals(task.targets(0.25))
    torch.testing.assert_close(sizes, torch.tensor([1.0, 1.0, 1.0, 0.25], dtype=torch.float64))


class _OneNumber(length_free._Task):
    """Every output is the head's one number; the last copy learns 0, the others 2."""

    def fit(self, batch: length_free._Batch) -> length_free._Parameters:
        parameters = torch.full((length_free._COPIES, 1, 1, 1), 2.0, dtype=torch.float64)
        parameters[-1] = 0
        return [parameters]


def test_gap_error_and_excess_of_heads_are_those_by_hand():
    def sample(copies: int, number: int, length: int) -> length_free._Batch:
        """The two sequences to learn have the targets 1 and 3, all others 0."""
        targets = torch.zeros(number, dtype=torch.float64)
        if number == 2:
            targets = torch.tensor([1.0, 3.0], dtype=torch.float64)
        return length_free._Batch(
            tokens=torch.zeros(copies, number, length, 1),
            queries=torch.zeros(copies, number, 1, 1),
            targets=targets[:, None].expand(copies, -1, 1),
        )

    def output(heads: length_free._Parameters, batch: length_free._Batch) -> torch.Tensor:
        return heads[0][:, 0].expand_as(batch.targets)

    task = _OneNumber("toy", sample, output, lambda length: [], 0)
    fits = length_free._Fits(task, [torch.ones(1, 1, 1, dtype=torch.float64)], 2, 5)
    # Squared errors of the heads 2, 0 and the best one, 1: 1, 5 and 2 on their own sequences, 4, 0 and 1 on others.
    assert fits.gap == pytest.approx((7 * (4 - 1 + 2 - 1) + (0 - 1 + 2 - 5)) / 8)
    assert fits.above_best == pytest.approx(5 / 2 - 1)
    assert (fits.error, fits.distance) == (pytest.approx(1), pytest.approx(1))
    assert fits.gap_over_bound == pytest.approx((4 - 1) / length_free._bound(2))


def test_the_masked_head_and_the_supervised_one_are_as_written_down():
    supervised, masked, positional = length_free._tasks(torch.Generator().manual_seed(0), 10)
    batch = supervised.sample(2, 3, 5)
    tokens, queries, targets = batch
    assert supervised.truth is not None and float(tokens.norm(dim=-1).max()) <= length_free.RADIUS + 1e-12
    score, value = supervised.truth
    weights = ((queries @ score) @ tokens.mT).softmax(-1)
    by_hand = (weights @ tokens @ value).squeeze(-2)
    torch.testing.assert_close(supervised.output(supervised.truth, batch), by_hand)
    assert float((targets - by_hand).square().mean()) == pytest.approx(length_free.NOISE**2, rel=0.8)
    weights, value = (parameter.squeeze(0).squeeze(0) for parameter in positional.start(5))
    output = positional.output(positional.start(5), batch)
    torch.testing.assert_close(output, (weights @ tokens @ value).squeeze(-2))
    precision_shown = masked.sample(2, 50, 5).tokens[..., 2]
    assert precision_shown.min() == 0 and precision_shown.max() > 0.5


class _Words:
    """A tokenizer of whole words, and of one that it does not have."""

    def __init__(self, missing: str = "") -> None:
        self.ids: dict[str, int] = {}
        self.missing = missing

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        if not text:
            return {"input_ids": [0]}
        pieces = [text[:1], text[1:]] if text.strip() == self.missing else [text]
        return {"input_ids": [self.ids.setdefault(piece, len(self.ids) + 1) for piece in pieces]}


def test_prompts_have_the_laws_of_elimination_and_of_laplace():
    prompt = elimination(torch.Generator().manual_seed(0))
    for num_seen, (before, law) in enumerate(prompt.places):
        seen = {word for word in prompt.words[:before] if word in prompt.candidates}
        left = [float(p) for p, word in zip(law.exp(), prompt.candidates, strict=True) if word not in seen]
        assert len(seen) == num_seen and left == pytest.approx([1 / (6 - num_seen)] * (6 - num_seen))
        assert prompt.words[before] in set(prompt.candidates) - seen
    prompt = urn(torch.Generator().manual_seed(0))
    for before, law in prompt.places:
        counts = [prompt.words[:before].count(word) for word in prompt.candidates]
        assert law.exp().tolist() == pytest.approx([(count + 1) / (sum(counts) + 3) for count in counts])


def test_a_model_of_equal_logits_is_as_far_as_the_uniform_law_and_other_words_are_counted(tmp_path: Path):
    model: Any = lambda ids: torch.zeros(1, ids.shape[1], 60)  # noqa: E731
    readings = read_prompts(model, _Words(), seeds=range(3))
    for row in readings:
        assert row.divergence == pytest.approx(row.of_uniform) == pytest.approx(row.entropy_error)
        assert row.mass == pytest.approx((6 if row.task == "elimination" else 3) / 60)
    last = next(row for row in readings if (row.task, row.seen) == ("elimination", 5))
    assert last.of_uniform == pytest.approx(math.log2(6))
    stored = json.loads(save_readings(readings, "equal", tmp_path).read_text())
    assert stored["readings"][0]["task"] == "elimination" and stored["unit"] == "bits"
    with pytest.raises(InputError, match="' yellow' to be one token"):
        read_prompts(model, _Words("yellow"), seeds=range(1))


def test_tuning_is_on_seeds_of_no_verdict_and_large_runs_are_where_there_are_some(tmp_path: Path):
    with pytest.raises(InputError, match="is used for verdicts"):
        tune("normaliser", seed=5)
    with pytest.raises(InputError, match="has no settings to tune; of experiments collective"):
        tune("sink")
    with pytest.raises(InputError, match="no large size; of experiments wind-tunnel"):
        run("sink", large=True)


@pytest.mark.slow
def test_tuning_stores_each_loss(tmp_path: Path):
    losses = tune("conservative", quick=True, out=tmp_path)
    stored = json.loads((tmp_path / "conservative.tuning.json").read_text())
    assert stored["losses"] == losses and "all at 0.024" in losses and stored["seed"] == 0


# The large experiment's command with models of default size, which learn as much in as many steps.
_OF_SMALL_SIZE = """
from massieu.cli import main
from massieu.papers.experiments import wind_tunnel

wind_tunnel._LARGE = wind_tunnel._DEFAULT
main()
"""


@pytest.mark.slow
def test_two_processes_train_one_model(tmp_path: Path):
    (tmp_path / "small.py").write_text(_OF_SMALL_SIZE)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", str(tmp_path / "small.py")]
    done = subprocess.run(
        [*command, "experiment", "wind-tunnel", "--large", "--quick", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=1800,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("verdict:") == 1 and done.stderr.count("seed 5 (1 of 1") == 1
    numbers = json.loads((tmp_path / "wind-tunnel.large.quick.json").read_text())["seeds"]["5"]["numbers"]
    assert numbers["chain"] < numbers["chain_without"]
