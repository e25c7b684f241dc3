"""The lemma's sharp constant, the head's Lipschitz bound at every length, and a bound that covers what it says it covers."""

import math

import pytest
import torch
from tests.support.rows import every_row, one_in

from massieu.papers.theory import attention_lipschitz, generalisation_bound, log_cover_size


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def head(tokens: torch.Tensor, score: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.softmax(scale * tokens @ score @ tokens.mT, -1) @ tokens @ value.mT


def test_the_weights_are_one_lipschitz_and_no_less():
    a = torch.tensor([8.0, 8.0], dtype=torch.float64) + torch.tensor([1e-3, -1e-3], dtype=torch.float64)
    b = torch.tensor([8.0, 8.0], dtype=torch.float64) - torch.tensor([1e-3, -1e-3], dtype=torch.float64)
    ratio = (torch.softmax(a, 0) - torch.softmax(b, 0)).abs().sum() / (a - b).abs().max()
    assert 1 - 1e-6 < ratio <= 1


@one_in(2, {"length": [2, 16, 512], "scale": [0.3, 2.0]})
def test_a_head_moves_no_further_than_its_bound(length, scale):
    radius = 1.7
    for seed in range(20):
        tokens = normal(length, 3, seed=seed)
        tokens = radius * tokens / tokens.norm(dim=-1).max()
        (m, m2), (w, w2) = normal(2, 3, 3, seed=seed + 50), normal(2, 2, 3, seed=seed + 90)
        moved = (head(tokens, m, w, scale) - head(tokens, m2, w2, scale)).norm(dim=-1).max()
        norm = lambda x: torch.linalg.matrix_norm(x, 2).item()  # noqa: E731
        bound = attention_lipschitz(radius, norm(w2), scale)
        assert moved <= bound.value * norm(w - w2) + bound.score * norm(m - m2)


def test_the_bounds_parts_are_nearly_attained():
    # Two opposite tokens with even weights: small changes of the score move the output by βR³‖W‖ a unit.
    radius, scale = 1.5, 0.8
    tokens = torch.tensor([[radius, 0], [-radius, 0]], dtype=torch.float64)
    value, small = 2.0 * torch.eye(2, dtype=torch.float64), 1e-6 * torch.eye(2, dtype=torch.float64)
    moved = (head(tokens, small, value, scale) - head(tokens, 0 * small, value, scale)).norm(dim=-1).max()
    assert moved.item() == pytest.approx(attention_lipschitz(radius, 2.0, scale).score * 1e-6, rel=1e-9)


@every_row("length", [1, 4, 9])
def test_equal_tokens_attain_the_value_constant(length):
    """All tokens at x of norm R: out = Wx, which moves by R a unit of ‖W − W'‖ along x; the score has no say."""
    radius = 1.5
    tokens = torch.tensor([0.0, radius, 0.0], dtype=torch.float64).expand(length, 3)
    value, score = normal(2, 3), normal(3, 3, seed=1)
    step = 0.3 * torch.outer(torch.tensor([0.6, 0.8], dtype=torch.float64), tokens[0] / radius)
    moved = (head(tokens, score, value + step, 0.8) - head(tokens, score, value, 0.8)).norm(dim=-1).max()
    bound = attention_lipschitz(radius, torch.linalg.matrix_norm(value, 2).item(), 0.8)
    assert moved.item() == pytest.approx(bound.value * 0.3, rel=1e-12)


def test_a_cover_of_the_interval_is_as_large_as_needed_and_no_larger_than_said():
    for accuracy in (0.5, 0.1, 0.003):
        needed = math.ceil(2.0 * 3.0 / (2 * accuracy))  # intervals of length 2ε/Lip over [−B, B]
        assert math.log(needed) <= log_cover_size(1, 2.0, 1.5, accuracy)


@pytest.mark.slow
def test_the_bound_covers_the_largest_gap():
    """A class of one parameter: loss |clip(θx) − y| with θ in [−1, 1], mean loss known by a large sample."""
    theta = torch.linspace(-1, 1, 81, dtype=torch.float64)

    def losses(count: int, seed: int) -> torch.Tensor:
        x = normal(count, seed=seed).clamp(-1, 1)
        y = (0.5 * x + 0.3 * normal(count, seed=seed + 1)).clamp(-1, 1)
        return (theta[:, None] * x - y).abs().mean(-1) / 2

    mean = losses(100_000, 10)
    bound = generalisation_bound(1, 1.0, 200, lipschitz=1.0, loss_lipschitz=0.5, failure=0.1)
    gaps = torch.tensor([(losses(200, 100 + 2 * i) - mean).abs().max() for i in range(100)])
    assert (gaps <= bound).double().mean() >= 0.9
    assert bound < 1


def test_more_sequences_help_as_their_root():
    small, large = (generalisation_bound(10, 1.0, n, lipschitz=2.0) for n in (10**4, 10**6))
    assert 8 < small / large < 10
    assert generalisation_bound(1000, 1.0, 100, lipschitz=2.0) > 1  # it says nothing for few sequences


@every_row(
    ("call", "message"),
    [
        (lambda: attention_lipschitz(0.0, 1.0), "radius must be positive"),
        (lambda: attention_lipschitz(1.0, -1.0), "value_norm must be finite"),
        (lambda: attention_lipschitz(1.0, 1.0, math.inf), "scale must be positive and finite"),
        (lambda: log_cover_size(0, 1.0, 1.0, 0.1), "parameters must be a whole number, at least 1"),
        (
            lambda: generalisation_bound(1, 1.0, 10, lipschitz=1.0, failure=1.0),
            "failure must be finite, above 0 and below 1",
        ),
        (lambda: generalisation_bound(1, 1.0, 0, lipschitz=1.0), "sequences must be a whole number, at least 1"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
