"""The N-pair loss and neighbourhood components analysis against their published formulas, written out here."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.derivatives import check_derivatives

from massieu.ops import score_tiles
from massieu.ops.contrastive import FalseNegatives, n_pairs, nca


def points(number, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(number, 4, dtype=torch.float64, generator=generator).requires_grad_()


def test_n_pairs_is_the_published_form():
    query, key = points(5), points(5, seed=1)
    scores = query @ key.mT
    others = ~torch.eye(5, dtype=torch.bool)
    wanted = torch.log1p(((scores - scores.diagonal().unsqueeze(1)).exp() * others).sum(1)).mean()
    assert torch.allclose(n_pairs(query, key), wanted)
    regularised = n_pairs(query, key, norm_weight=0.1)
    assert torch.allclose(regularised, wanted + 0.1 * (query.square().sum(1) + key.square().sum(1)).mean())
    ids = torch.tensor([0, 1, 0, 2, 3])
    kept = others & (ids[:, None] != ids)
    wanted = torch.log1p(((scores - scores.diagonal().unsqueeze(1)).exp() * kept).sum(1)).mean()
    assert torch.allclose(n_pairs(query, key, log_weight=FalseNegatives(ids)), wanted)


def distances_loss(x, labels):
    """Goldberger's objective from all squared distances, without completing the square."""
    distance = (x.unsqueeze(1) - x).square().sum(-1)
    own = torch.eye(len(x), dtype=torch.bool)
    level = torch.logsumexp((-distance).masked_fill(own, -math.inf), 1)
    p = torch.softmax((-distance).masked_fill(own, -math.inf), 1)
    same = (p * ((labels.unsqueeze(1) == labels) & ~own)).sum(1)
    shared = same > 0
    return -same[shared].log().mean(), level


@pytest.mark.medium
@given(
    st.integers(2, 11),
    st.integers(1, 4),
    st.sampled_from([1e-3, 1.0, 3.0]),
    st.sampled_from([0.0, 1e4]),
    st.sampled_from([(12, 4), (1, 1), (1 << 20, 2048)]),
    st.integers(0, 9),
)
def test_nca_equals_the_distances(number, size, spread, offset, tile, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score_tiles, "TILE_PAIRS", tile[0])
        patch.setattr(score_tiles, "TILE_ROWS", tile[1])
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(number, size, generator=generator, dtype=torch.float64) * spread + offset
        x.requires_grad_()
        labels = torch.randint(3, (number,), generator=generator)
        labels[0] = labels[1]
        # A common offset leaves sixteen digits of the coordinates, not of their differences.
        bound = 1e-12 + 1e-13 * offset
        ours, theirs = nca(x, labels, return_log_partition=True), distances_loss(x, labels)
        for one, other in zip(ours, theirs, strict=True):
            assert torch.allclose(one, other, atol=bound)
        found, wanted = (torch.autograd.grad(loss + level.sin().sum(), x)[0] for loss, level in (ours, theirs))
        assert torch.allclose(found, wanted, atol=bound)


def test_nca_softmax_identity():
    """S23: exp(−‖x_i − x_j‖²) over j is dot-product attention with log w_j = −‖x_j‖² and inverse temperature 2."""
    x = points(7).detach()
    own = torch.eye(7, dtype=torch.bool)
    distance = torch.softmax(-(x.unsqueeze(1) - x).square().sum(-1).masked_fill(own, math.inf), 1)
    biased = torch.softmax((2 * x @ x.mT - x.square().sum(1)).masked_fill(own, -math.inf), 1)
    assert torch.allclose(distance, biased, atol=1e-12, rtol=0)
    # With classes of two the loss is A(q) − (q·k₊ + log w₊), the negative log-weight of the one peer.
    pairs = torch.arange(6) // 2
    six = torch.softmax((-(x[:6].unsqueeze(1) - x[:6]).square().sum(-1)).masked_fill(own[:6, :6], -math.inf), 1)
    peer = torch.arange(6) ^ 1
    assert torch.allclose(nca(x[:6], pairs), -six[torch.arange(6), peer].log().mean(), atol=1e-12, rtol=0)


def test_nca_without_peers():
    x = points(4)
    assert nca(x, torch.arange(4)).isnan()
    alone = nca(x, torch.tensor([0, 0, 1, 2]))
    assert torch.allclose(alone, distances_loss(x, torch.tensor([0, 0, 1, 2]))[0])
    first = torch.autograd.grad(alone, x, create_graph=True)[0]
    assert first.isfinite().all() and torch.autograd.grad(first.square().sum(), x)[0].isfinite().all()
    loss, level = nca(x[:1], torch.tensor([0]), return_log_partition=True)
    assert loss.isnan() and level == -math.inf
    assert nca(x[:0], torch.arange(0)).isnan()


@pytest.mark.medium
def test_derivatives_of_nca(monkeypatch):
    monkeypatch.setattr(score_tiles, "TILE_PAIRS", 12)
    monkeypatch.setattr(score_tiles, "TILE_ROWS", 4)
    labels = torch.tensor([0, 0, 1, 1, 2])
    function = lambda x: tuple(nca(x, labels, return_log_partition=True))  # noqa: E731
    check_derivatives(function, (points(5),), forward=True)
