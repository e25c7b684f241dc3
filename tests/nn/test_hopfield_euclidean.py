"""Hopfield layers that retrieve by distance, beside matrices of distances: patterns of any length attract alike."""

import pytest
import torch
from tests.support.rows import every_row
from torch import Tensor, nn

from massieu.energy import HopfieldDensity
from massieu.energy.activations import RMSNorm
from massieu.nn import Hopfield, HopfieldLayer


def bare(heads: int = 1, **options) -> Hopfield:
    parts = {name: nn.Identity() for name in ("state", "stored", "projection", "output")}
    return Hopfield(num_heads=heads, **parts, euclidean=True, **options)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def inputs() -> tuple[Tensor, ...]:
    """Stored patterns of unlike lengths, states, projections."""
    lengths = torch.tensor([0.1, 0.5, 1.0, 2.0, 3.0], dtype=torch.float64).unsqueeze(-1)
    given = lengths * drawn(2, 5, 4) + 1.0, drawn(2, 3, 4, seed=1) + 1.0, drawn(2, 5, 4, seed=2)
    return tuple(tensor.requires_grad_() for tensor in given)


def explicit(
    stored: Tensor, state: Tensor, value: Tensor, scale: Tensor, steps: int, bias: Tensor | float = 0.0
) -> Tensor:
    """Repeated posterior means of a mixture of Gaussians of equal weights, then that of the values."""
    for step in range(steps):
        distance = (state.unsqueeze(-2) - stored.unsqueeze(-3)).square().sum(-1)
        posterior = torch.softmax(-0.5 * scale * distance + bias, -1)
        state = posterior @ (stored if step < steps - 1 else value)
    return state


@every_row("steps", [1, 2, 4])
def test_passes_are_posterior_means_with_their_gradients(steps):
    given, scale, bias = inputs(), torch.tensor(0.8).double().requires_grad_(), drawn(3, 5, seed=3)
    layer = bare(steps=steps, scale=nn.Parameter(scale.detach()))
    found, wanted = layer(given, association_mask=bias), explicit(*given, scale, steps, bias)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    for got, want in zip(
        torch.autograd.grad(found.square().sum(), [*given, layer.scale]),
        torch.autograd.grad(wanted.square().sum(), [*given, scale]),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)
    weights = layer.association_matrix(given, association_mask=bias)[:, 0]
    torch.testing.assert_close(weights @ given[2], wanted, rtol=1e-10, atol=1e-12)


def test_each_head_has_its_own_distances():
    stored, state, value = inputs()
    scale = torch.tensor([0.4, 2.0]).double()
    found = bare(2, steps=3, scale=scale)((stored, state, value))
    for head in range(2):
        part = slice(2 * head, 2 * head + 2)
        wanted = explicit(stored[..., part], state[..., part], value[..., part], scale[head], 3)
        torch.testing.assert_close(found[..., part], wanted, rtol=1e-10, atol=1e-12)


def test_at_rest_the_state_is_the_mean_of_its_posterior():
    stored, state, value = inputs()
    layer = bare(steps=None, scale=3.0)
    rest = explicit(stored, state, stored, torch.tensor(3.0), 400)
    torch.testing.assert_close(layer((stored, state, value)), explicit(stored, rest, value, torch.tensor(3.0), 1))
    slopes = [
        torch.autograd.grad(output.square().sum(), [stored, value])
        for output in (layer((stored, state, value)), explicit(stored, rest, value, torch.tensor(3.0), 1))
    ]
    for got, want in zip(*slopes, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-8)
    found = layer.memory(stored).retrieve(layer.query(state))
    torch.testing.assert_close(found.state.squeeze(1), rest, rtol=1e-7, atol=1e-8)
    weights = HopfieldDensity.create(layer.memory(stored)).log_pattern_weights
    torch.testing.assert_close(weights.exp(), torch.full_like(weights, 0.2))  # no pattern is likelier than another


@every_row("as_numbers", [False, True])
def test_hidden_patterns_do_not_count_whatever_they_hold(as_numbers):
    stored, state, value = (tensor.detach().float() for tensor in inputs())
    hidden = torch.tensor([[False, True, False, False, True], [False] * 4 + [True]])
    mask = torch.zeros(2, 5).masked_fill(hidden, -torch.inf) if as_numbers else hidden
    layer = bare(steps=3, scale=0.8)
    found = layer((stored.masked_fill(hidden.unsqueeze(-1), 1e12), state, value), mask)
    for item in range(2):
        kept = ~hidden[item]
        wanted = layer((stored[item : item + 1, kept], state[item : item + 1], value[item : item + 1, kept]))
        torch.testing.assert_close(found[item : item + 1], wanted, rtol=1e-5, atol=1e-5)
    assert layer((stored, state, value), torch.ones(2, 5, dtype=torch.bool)).eq(0).all()


def test_a_common_offset_costs_no_digits():
    """Whole numbers about 2¹⁴: exact in float32, their squares are not, and neither are differences of those."""
    near = torch.tensor([[[0.0, 0.0], [3.0, 1.0], [0.0, 2.0], [2.0, 3.0]]])
    state = torch.tensor([[[1.0, 1.0], [2.0, 1.0]]])
    layer = bare(scale=0.5)
    far = layer((near + 2**14, state + 2**14, near))
    torch.testing.assert_close(far, layer((near, state, near)), rtol=1e-5, atol=1e-5)


def test_squares_beyond_half_precision():
    """‖pattern‖² is 160 000 here, float16 ends at 65 504."""
    stored = torch.tensor([[[400.0, 0.0], [0.0, 400.0], [100.0, 0.0]]], dtype=torch.float16)
    found = bare(steps=2, scale=0.01)((stored, stored + 1, stored))
    assert found.dtype == torch.float16 and torch.equal(found, stored)


def test_trained_memories_take_distances():
    layer = HopfieldLayer(4, 2, quantity=3, euclidean=True, steps=2)
    loss = layer(torch.randn(2, 5, 4)).square().sum()
    loss.backward()
    assert layer.patterns.grad is not None and layer.patterns.grad.abs().sum() > 0


@every_row(
    "options, words, kind",
    [
        ({"sink": 0.0}, "sink depends on the origin", ValueError),
        ({"activation": RMSNorm.create()}, "activation depends on the origin", ValueError),
        ({"euclidean": 1}, "euclidean", TypeError),
    ],
)
def test_bad_options(options, words, kind):
    with pytest.raises(kind, match=words):
        Hopfield(4, **{"euclidean": True} | options)
