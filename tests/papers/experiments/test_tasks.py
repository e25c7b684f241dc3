"""Tasks of sequences and what is measured on them: exact laws by enumeration, divergences and losses in closed form."""

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from scipy import stats

from massieu.nn import Attention
from massieu.papers.experiments import depth, dual_link, minimality, resampling, sufficiency
from massieu.papers.experiments.arms import Arms, masked_loss
from massieu.papers.experiments.contractions import BatchWhitening, SpinMap, alignment
from massieu.papers.experiments.tasks import Bijection, Chain, divergence, mean_loss
from massieu.papers.experiments.text import ReferenceText
from massieu.papers.experiments.transformer import Transformer, TransformerBlock


def test_the_next_token_of_a_bijection_is_counted_over_all_of_them():
    task, orders = Bijection(3), list(itertools.permutations(range(3)))
    every = [
        [token for key, value in zip(keys, values, strict=True) for token in (key, value + 3)]
        for keys, values in itertools.product(orders, orders)
    ]
    exact = task.exact(torch.tensor(every))
    for row, sequence in enumerate(every):
        for place in range(5):
            alike = [other[place + 1] for other in every if other[: place + 1] == sequence[: place + 1]]
            counted = torch.bincount(torch.tensor(alike), minlength=6) / len(alike)
            torch.testing.assert_close(exact[row, place].exp(), counted.double())
    drawn = task.sample(4000, torch.Generator().manual_seed(0))
    assert drawn.sort(-1).values.eq(torch.arange(6)).all()  # each key and each value once
    assert task.judged.tolist() == [True, False, True, False, True]


def test_the_next_symbol_of_a_chain_is_that_of_all_hidden_paths():
    task = Chain(3, 4, 3, torch.Generator().manual_seed(1), stay=1.0)
    moves, shown = task.chain.log_transition.exp(), task.log_emission.exp()
    torch.testing.assert_close(moves.sum(1), torch.ones(3, dtype=torch.float64))
    tokens = torch.tensor([[0, 3, 1, 2]])
    for length in (1, 2, 3):
        joint = torch.zeros(4, dtype=torch.float64)
        for path in itertools.product(range(3), repeat=length + 1):
            weight = torch.tensor(1 / 3, dtype=torch.float64)
            for place in range(length):
                weight = weight * shown[path[place], tokens[0, place]] * moves[path[place], path[place + 1]]
            joint += weight * shown[path[-1]]
        torch.testing.assert_close(task.exact(tokens)[0, length - 1].exp(), joint / joint.sum())
    drawn = task.sample(20_000, torch.Generator().manual_seed(2))
    expected = task.exact(drawn)[:, 2].exp().mean(0)
    share = torch.nn.functional.one_hot(drawn[:, 3], 4).double().mean(0)
    assert ((share - expected).abs() < 5 * (expected * (1 - expected) / 20_000).sqrt()).all()


def test_the_divergence_is_nothing_for_the_exact_law_and_known_for_the_uniform_one():
    task = Bijection(3)
    tokens = task.sample(50, torch.Generator().manual_seed(0))
    exact: Any = lambda shown: task.exact(tokens).clamp_min(-1e3)  # noqa: E731
    apart, entropy = divergence(exact, task, tokens)
    assert float(apart.abs().max()) < 1e-12 and float(entropy.abs().max()) < 1e-12
    uniform: Any = lambda shown: torch.zeros(50, 5, 6)  # noqa: E731
    apart, entropy = divergence(uniform, task, tokens)
    expected = torch.tensor([math.log(2), math.log(3), math.log(6)], dtype=torch.float64)  # 3, 2 and 1 of 6 are left
    torch.testing.assert_close(apart, expected.expand(50, 3))
    torch.testing.assert_close(entropy, expected.expand(50, 3))
    assert float(mean_loss(uniform, task.judged, tokens)) == pytest.approx(math.log(6))


def test_masked_tokens_are_hidden_from_the_model_and_judged_alone():
    tokens = torch.randint(5, (400, 10), generator=torch.Generator().manual_seed(0))
    seen: list[torch.Tensor] = []

    def copies(shown: torch.Tensor) -> torch.Tensor:
        seen.append(shown)
        return 20.0 * torch.nn.functional.one_hot(shown.clamp_max(4), 6).float()

    model: Any = copies
    loss = float(masked_loss(model, tokens, torch.Generator().manual_seed(1), 5))
    hidden = seen[0] == 5
    assert abs(float(hidden.double().mean()) - 0.25) < 5 * math.sqrt(0.25 * 0.75 / 4000)
    assert (seen[0] == tokens)[~hidden].all()
    wrong = float((tokens[hidden] != 4).double().mean())  # a masked token is copied as 4: wrong costs 20 nats
    assert loss == pytest.approx(20 * wrong, rel=1e-3)


def test_arms_see_the_same_data_and_the_held_out_part_is_not_learned_from():
    text = ReferenceText(8)
    whole = torch.cat([text.training, text.held_out])
    assert len(whole) > 1e5 and len(text.held_out) == pytest.approx(0.1 * len(whole), rel=1e-3)
    make = lambda: Transformer(text.vocabulary, 8, width=8, heads=1, depth=1)  # noqa: E731
    arms = Arms(text, {"a": make, "b": make}, {"a": 1e-2, "b": 1e-2}, steps=5)
    losses = arms.losses(3, quick=True)
    assert losses["a"] == losses["b"]
    assert text.pair_loss(0) < math.log(text.vocabulary)


def test_a_block_without_attention_sees_its_token_alone_and_scales_its_residual():
    torch.manual_seed(0)
    tokens = torch.randn(1, 4, 8)
    alone = TransformerBlock(8, 2, None)
    torch.testing.assert_close(alone(tokens, True)[:, 2:3], alone(tokens[:, 2:3], True))
    dropped = TransformerBlock(8, 2, None, residual_scale=0.0)
    dropped.load_state_dict(alone.state_dict())
    torch.testing.assert_close(dropped(tokens, True), alone.feed_forward(alone.before_feed_forward(tokens)))


def test_alignment_is_that_of_the_gram_matrices():
    drawn = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 5, generator=drawn).double(), torch.randn(60, 7, generator=drawn).double()
    centring = torch.eye(60, dtype=torch.float64) - 1 / 60
    gram, other = (centring @ points @ points.mT @ centring for points in (x, y))
    expected = float((gram * other).sum() / (gram.norm() * other.norm()))
    assert alignment(x, y) == pytest.approx(expected)
    turn = torch.linalg.qr(torch.randn(5, 5, generator=drawn).double()).Q
    assert alignment(x, 3 * x @ turn + 1) == pytest.approx(1.0)


def test_whitened_tokens_have_no_covariance_and_spins_the_inverse_of_theory():
    cloud = torch.randn(2000, 4, generator=torch.Generator().manual_seed(0)) @ torch.randn(4, 4) + 2
    whitened = BatchWhitening(4)(cloud)
    torch.testing.assert_close(torch.cov(whitened.mT), torch.eye(4), atol=0.05, rtol=0)  # a ridge of 1e-3 is in it
    field = torch.randn(3, 32, dtype=torch.float64)
    spin = SpinMap(32).double()(field)
    square = 32 / 2 - 1
    torch.testing.assert_close(2 * square * spin / (2 * (square - spin.square().sum(-1, keepdim=True))), field)  # B16


def test_the_cloud_drawn_at_eta_has_the_posterior_of_its_likelihoods():
    for family, log_mass in (
        ("bernoulli", lambda count, eta: stats.binom.logpmf(count, dual_link.OBSERVATIONS, 1 / (1 + math.exp(-eta)))),
        ("poisson", lambda count, eta: stats.poisson.logpmf(count, dual_link.OBSERVATIONS * math.exp(eta))),
    ):
        task = dual_link.Clouds(family, torch.Generator().manual_seed(0))
        batch = task.batch(3)
        eta = batch.queries
        keys = batch.keys.double()
        mean = keys.sigmoid() if family == "bernoulli" else keys.exp()
        sums = (mean * (dual_link.OBSERVATIONS + 1) - 0.5).round()
        for row in range(3):
            ratios = [
                sum(
                    log_mass(float(count), float(at)) - log_mass(float(count), 0.0)
                    for count, at in zip(cloud, eta[row, 0], strict=True)
                )
                for cloud in sums[row]
            ]
            expected = torch.tensor(ratios, dtype=torch.float64).log_softmax(0)
            torch.testing.assert_close(
                batch.log_posterior[row], expected, atol=1e-4, rtol=1e-4
            )  # η was rounded to float32


def test_what_ridge_regression_leaves_is_what_least_squares_leaves():
    drawn = torch.Generator().manual_seed(0)
    inputs, noise = torch.randn(4000, 3, generator=drawn).double(), torch.randn(4000, 1, generator=drawn).double()
    expected = inputs @ torch.tensor([[1.0], [2.0], [0.0]], dtype=torch.float64) + 0.5 * noise
    # The variance of what is left is σ²·(1 + p/n), of its estimate 2σ⁴/n.
    assert minimality.residual_square(inputs, expected) == pytest.approx(0.25, abs=5 * 0.25 * math.sqrt(2 / 2000))
    assert minimality.residual_square(inputs, inputs @ torch.randn(3, 2, generator=drawn).double()) < 1e-9


def test_tokens_gather_in_one_cluster_and_cosines_are_of_pairs():
    drawn = torch.Generator().manual_seed(0)
    points = torch.nn.functional.normalize(torch.randn(20, 3, generator=drawn).double(), dim=-1)
    pairs = [float(points[i] @ points[j]) for i, j in itertools.permutations(range(20), 2)]
    assert depth.mean_cosine(points) == pytest.approx(sum(pairs) / len(pairs))
    scores = (4.0 * points @ points.mT).softmax(-1)
    torch.testing.assert_close(depth.self_attention(points, 4.0), scores @ points)


def test_the_predicted_cost_of_drawing_is_half_the_curvature_by_finite_differences():
    drawn = torch.Generator().manual_seed(0)
    task = Chain(3, 4, 6, drawn)
    layers: list[Any] = []

    def block(width: int, num_heads: int) -> TransformerBlock:
        layers.append(resampling._DrawingHeads(drawn))
        return TransformerBlock(width, num_heads, partial(Attention, batch_first=True, heads=layers[-1]))

    torch.manual_seed(0)
    model = Transformer(4, 6, width=8, heads=2, depth=1, block=block).double().requires_grad_(False)
    tokens = task.sample(4, drawn)
    losses = resampling._Losses(model, layers, tokens[:, :-1], task.exact(tokens))
    drawn.manual_seed(7)
    prediction = losses.predicted_excess(layers, rounds=1)

    def loss(error_scale: float) -> float:
        drawn.manual_seed(7)  # the same errors
        for layer in layers:
            layer.error_scale = torch.full((4, 1, 1, 1), error_scale, dtype=torch.float64)
        total = float(losses._loss().sum())
        for layer in layers:
            layer.error_scale = None
        return total

    step = 1e-3
    second = (loss(step) - 2 * loss(0.0) + loss(-step)) / step**2
    assert prediction * tokens[:, :-1].numel() == pytest.approx(second / 2, rel=1e-4, abs=1e-7)


def test_the_prior_of_sufficiency_is_drawn_from_its_own_generator():
    drawn = []
    for seed in (0, 1, 2):
        torch.manual_seed(seed)
        drawn.append(sufficiency._Task(torch.Generator().manual_seed(5)).concentration)
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2])
