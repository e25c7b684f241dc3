"""Attention layers on particles and on Gaussian laws."""

import math

import pytest
import torch
import torch.nn.functional as F
from tests.population.cases import by_hand, covariance, draw, hermite, law, layer, weights
from tests.support.rows import every_row, some_slow
from torch.utils import _pytree as pytree

from massieu.energy.activations import Identity, LayerNorm, RMSNorm, Scalar, Tanh, Whitening
from massieu.measures import Atoms, Gaussian, MissingFormError, Sphere
from massieu.population import AttentionLayer, Composition, FeedForward, Normalisation, Operator


class Centred(Operator):
    """A map of a population that is not token-wise."""

    needs_all = True

    def _moved(self, particles, group):
        return particles - particles.mean(-2, keepdim=True)

    def gaussian(self, law_before):
        return Gaussian.create(torch.zeros_like(law_before.location), covariance(law_before))


# --- particles -------------------------------------------------------------------------------------------------------


def test_a_moving_population_is_softmax_attention_head_by_head():
    """Trap 14: biases of keys cancel, those of values add up."""
    attention = layer(step_size=0.3)
    x = draw(7, 4, seed=9)
    torch.testing.assert_close(attention(x), x + 0.3 * by_hand(attention, x, x), rtol=1e-12, atol=1e-12)
    both = torch.stack([x, draw(7, 4, seed=10)]).reshape(2, 1, 7, 4)
    torch.testing.assert_close(attention(both)[0, 0], attention(x), rtol=1e-13, atol=1e-13)


def test_no_residual():
    attention = layer(residual=False, step_size=2.0)
    x = draw(5, 4, seed=9)
    torch.testing.assert_close(attention(x), 2 * by_hand(attention, x, x), rtol=1e-12, atol=1e-12)


def test_frozen_atoms():
    x = draw(3, 4, seed=9)
    y = draw(6, 4, seed=10)
    log_weight = draw(6, seed=11)
    log_weight[2] = -math.inf
    attention = layer(population=Atoms.create(y, log_weight))
    torch.testing.assert_close(attention(x), x + by_hand(attention, x, y, log_weight), rtol=1e-12, atol=1e-12)
    attention = layer(population=y)
    torch.testing.assert_close(attention(x), x + by_hand(attention, x, y), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer(population=x)(x), layer()(x), rtol=1e-13, atol=1e-13)


def test_frozen_atoms_of_a_batch():
    x = draw(2, 3, 5, 4, seed=9)
    y = draw(2, 6, 4, seed=10)
    attention = layer(population=Atoms.create(y))
    for first in range(2):
        for second in range(3):
            alone = layer(population=y[first])(x[first, second])
            torch.testing.assert_close(attention(x)[first, second], alone, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("batch", [(), (2,)])
def test_a_frozen_measure_is_attended_to_exactly(batch):
    """By the gradient of its log-partition with respect to eta, head by head."""
    x = draw(*batch, 3, 4, seed=9)
    for measure in (law(4), Sphere(torch.tensor(1.5).double(), 4)):
        attention = layer(population=measure)
        expected = x + attention.bias
        for h in range(3):
            eta = (
                attention.scale[h]
                * (x @ attention.query_weight[h].T + attention.query_bias[h])
                @ attention.key_weight[h]
            )
            eta = eta.requires_grad_()
            (mean,) = torch.autograd.grad(measure.log_partition(eta).sum(), eta)
            expected = expected + mean @ attention.value_weight[h].T @ attention.output_weight[h].T
        torch.testing.assert_close(attention(x), expected, rtol=1e-11, atol=1e-11)


def test_a_sampled_population_tends_to_its_measure():
    """Five standard errors of the self-normalised estimate (trap 34)."""
    measure = law(4, seed=3)
    x = 0.5 * draw(3, 4, seed=9)
    y = measure.sample(torch.zeros(4).double(), (200_000,), generator=torch.Generator().manual_seed(0))
    score = 0.3 * draw(4, 4, seed=1)
    write = draw(4, 4, seed=2)
    frozen, sampled = (AttentionLayer.from_score(score, write, population=each) for each in (measure, y))
    share = torch.softmax(x @ score @ y.T, -1)
    values = y @ write.T
    deviation = values - (share @ values).unsqueeze(1)
    error = (share.square().unsqueeze(-1) * deviation.square()).sum(1).sqrt()
    assert ((sampled(x) - frozen(x)).abs() / error).max() < 5


def test_from_score_is_s20():
    score = draw(4, 4, seed=1)
    write = draw(4, 4, seed=2)
    x = draw(5, 4, seed=3)
    shares = torch.softmax(x @ score @ x.T, -1)
    expected = x + 0.5 * shares @ x @ write.T
    attention = AttentionLayer.from_score(score, write, step_size=0.5)
    torch.testing.assert_close(attention(x), expected, rtol=1e-12, atol=1e-12)
    two = AttentionLayer.from_score(torch.stack([score, score]), torch.stack([write, 2 * write]), step_size=0.5)
    torch.testing.assert_close(two(x), expected + shares @ x @ write.T, rtol=1e-12, atol=1e-12)


def test_norms_before_and_behind():
    x = draw(2, 5, 4, seed=9)
    gain = draw(4, seed=10)
    bias = draw(4, seed=11)
    norm = Normalisation.create(LayerNorm.create(eps=1e-5), gain, bias)
    normed = F.layer_norm(x, (4,), gain, bias, 1e-5)
    torch.testing.assert_close(norm(x), normed, rtol=1e-12, atol=1e-12)
    plain = layer()
    moved = x + (plain(normed) - normed)
    torch.testing.assert_close(layer(normalisation=norm)(x), moved, rtol=1e-12, atol=1e-12)
    behind = layer(normalisation=norm, activation=RMSNorm.create(eps=1e-6))(x)
    torch.testing.assert_close(behind, F.rms_norm(moved, (4,), eps=1e-6), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer(activation=Tanh.create())(x), plain(x).tanh(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer(activation=Centred())(x).mean(-2), torch.zeros(2, 4).double(), atol=1e-12, rtol=0)


def test_feed_forward_and_composition():
    x = draw(3, 4, seed=9)
    step = FeedForward.create(torch.sin, step_size=0.5, normalisation=Tanh.create(), activation=Scalar.create(2.0))
    torch.testing.assert_close(step(x), 2 * (x + 0.5 * torch.sin(torch.tanh(x))), rtol=1e-13, atol=1e-13)
    tied = Composition.repeat(step, 3)
    torch.testing.assert_close(tied(x), step(step(step(x))))
    states = list(tied.path(x))
    assert len(states) == 3
    torch.testing.assert_close(states[-1], tied(x))
    assert torch.equal(Composition.repeat(step, 0)(x), x)
    for each in (step, tied, layer(), Normalisation.create(Identity(), torch.ones(4))):
        assert isinstance(each, Operator)


# --- derivatives, transforms, precision ------------------------------------------------------------------------------


@pytest.mark.slow
@some_slow("population", [None, Atoms.create(draw(3, 4, seed=20)), law(4)], 1)
def test_compiled_and_batched(population):
    attention = layer(population=population, normalisation=LayerNorm.create())
    x = draw(2, 6, 4, seed=9)
    # By graphs alone: making machine code of them takes most of the time, and what they call is compiled in its own room.
    compiled = torch.compile(attention.__call__, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), attention(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.func.vmap(attention)(x), attention(x), rtol=1e-12, atol=1e-12)
    both = pytree.tree_map(lambda leaf: torch.stack([leaf, 0.5 * leaf]), attention)
    each = torch.func.vmap(lambda one, points: one(points))(both, x)
    torch.testing.assert_close(
        each[1], pytree.tree_map(lambda leaf: 0.5 * leaf, attention)(x[1]), rtol=1e-12, atol=1e-12
    )


@every_row(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_precision(dtype, tolerance):
    exact = AttentionLayer.random(8, 2, generator=torch.Generator().manual_seed(0))
    x = draw(5, 8, seed=9).to(dtype)
    assert exact(x).dtype == torch.float32
    double = pytree.tree_map(lambda leaf: leaf.double(), exact)
    assert double(x).dtype == torch.float64
    low = pytree.tree_map(lambda leaf: leaf.to(dtype), exact)
    assert low(x).dtype == torch.float32
    assert (low(x).double() - double(x)).abs().max() < tolerance * double(x).abs().max()


# --- Gaussian laws ---------------------------------------------------------------------------------------------------


def _by_quadrature(attention: AttentionLayer, before: Gaussian, population: Gaussian | None) -> tuple:
    """Mean and covariance behind the layer: attention at each node is an integral over the nodes of the population."""
    x, weight = hermite(before, 40)
    z = attention.normalisation(x)
    y, share = (z, weight) if population is None else hermite(population, 40)
    move = attention.bias.expand_as(x)
    for h in range(len(attention.query_weight)):
        scores = (
            attention.scale[h]
            * (z @ attention.query_weight[h].T + attention.query_bias[h])
            @ attention.key_weight[h]
            @ y.T
        )
        move = (
            move
            + torch.softmax(scores + share.log(), -1) @ y @ attention.value_weight[h].T @ attention.output_weight[h].T
        )
    moved = attention.activation(attention.residual * x + attention.step_size * move)
    mean = weight @ moved
    return mean, (weight.unsqueeze(-1) * (moved - mean)).T @ (moved - mean)


_WHITE = Whitening.create(draw(2, seed=30), torch.tensor([[1.3, 0.4], [0.4, 0.8]]).double())


@some_slow(
    "options",
    [
        {},
        {"residual": False},
        {"activation": Scalar.create(0.5), "step_size": 2.0},
        {"activation": _WHITE},
        {"normalisation": _WHITE, "activation": Scalar.create(2.0)},
        {"population": law(2, seed=7)},
        {"population": law(2, seed=7), "normalisation": _WHITE, "residual": False},
    ],
    4,
)
def test_a_gaussian_law_stays_gaussian(options):
    attention = AttentionLayer.create(**weights(2, 3, 2, 3), scale=torch.tensor([0.5, 1.0, -0.7]), **options)
    before = law(2)
    after = attention.gaussian(before)
    mean, spread = _by_quadrature(attention, before, options.get("population"))
    torch.testing.assert_close(after.location, mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(covariance(after), spread, rtol=1e-8, atol=1e-8)


def test_the_closed_form_of_s20():
    score = draw(3, 3, seed=1)
    write = draw(3, 3, seed=2)
    before = law(3, batch=(4,))
    mean = before.location.unsqueeze(-1)
    spread = covariance(before)
    after = AttentionLayer.from_score(score, write, step_size=0.3).gaussian(before)
    torch.testing.assert_close(after.location, (mean + 0.3 * write @ (mean + spread @ score.T @ mean)).squeeze(-1))
    matrix = torch.eye(3).double() + 0.3 * write @ spread @ score.T
    torch.testing.assert_close(covariance(after), matrix @ spread @ matrix.mT)
    assert torch.equal(AttentionLayer.from_score(score, write).gaussian(law(3, rank=1)).factor, torch.zeros(3, 0))


def test_laws_through_compositions_and_population_maps():
    before = law(4)
    attention = layer(activation=Centred())
    after = attention.gaussian(before)
    torch.testing.assert_close(after.location, torch.zeros(4).double())
    torch.testing.assert_close(covariance(after), covariance(layer().gaussian(before)))
    gain = draw(4, seed=1)
    bias = draw(4, seed=2)
    norm = Normalisation.create(Scalar.create(2.0), gain, bias)
    twice = Composition.create([attention, norm, Composition.repeat(layer(), 2)]).gaussian(before)
    scaled = Gaussian.create(bias, 4 * gain[:, None] * covariance(after) * gain)
    expected = layer().gaussian(layer().gaussian(scaled))
    torch.testing.assert_close(twice.location, expected.location)
    torch.testing.assert_close(covariance(twice), covariance(expected))


@every_row(
    ("operator", "named"),
    [
        (layer(activation=LayerNorm.create()), "LayerNorm is not affine"),
        (layer(normalisation=RMSNorm.create()), "RMSNorm is not affine"),
        (layer(normalisation=Centred()), "Centred is not affine"),
        (layer(population=draw(3, 4)), "a frozen Atoms is not affine"),
        (FeedForward.create(torch.tanh), "FeedForward is not affine"),
        (Normalisation.create(Tanh.create(), torch.ones(4)), "Tanh is not affine"),
        (Composition.create([layer(), FeedForward.create(torch.tanh)]), "FeedForward is not affine"),
    ],
)
def test_what_keeps_no_law_gaussian_says_so(operator, named):
    with pytest.raises(MissingFormError, match=named):
        operator.gaussian(law(4))


# --- bad calls -------------------------------------------------------------------------------------------------------


@every_row(
    ("call", "error", "named"),
    [
        (lambda: layer()(torch.zeros(4)), ValueError, r"shape \(\*batch, n, 4\), got \(4,\)"),
        (lambda: layer()(torch.zeros(3, 5)), ValueError, r"got \(3, 5\)"),
        (lambda: layer()(torch.zeros(0, 4)), ValueError, "at least one particle"),
        (lambda: layer()(torch.zeros(3, 4, dtype=torch.long)), TypeError, "floating-point"),
        (
            lambda: Normalisation.create(Identity(), [1.0, 2.0], torch.zeros(2)),
            TypeError,
            "gain must be a floating-point",
        ),
        (
            lambda: Normalisation.create(Identity(), torch.ones(2).long(), torch.zeros(2)),
            TypeError,
            "gain must be a float",
        ),
        (lambda: layer(scale=torch.ones(2)), ValueError, "one for each of 3 heads"),
        (lambda: layer(step_size=torch.ones(2)), ValueError, "step_size must be one number"),
        (lambda: layer(population=draw(3, 5)), ValueError, "live in 4 dimensions"),
        (lambda: layer(population=3), TypeError, "must be a measure"),
        (lambda: layer(activation=torch.tanh), TypeError, "activation must be an Activation"),
        (lambda: layer(normalisation=3), TypeError, "normalisation must be an Activation"),
        (lambda: layer(population=Atoms.create(draw(3, 6, 4)))(draw(2, 5, 4)), ValueError, r"batch shape \(3,\)"),
        (lambda: AttentionLayer.create(*draw(4, 1, 2, 3)), ValueError, r"output \(1, 2, 3\)"),
        (lambda: AttentionLayer.create(*(draw(4, 1, 2, 2) / 0)), ValueError, "finite"),
        (lambda: AttentionLayer.create(**(weights() | {"bias": draw(3)})), ValueError, r"bias must have shape \(4,\)"),
        (lambda: AttentionLayer.from_score(draw(2, 3), draw(2, 3)), ValueError, r"got \(2, 3\)"),
        (lambda: AttentionLayer.random(5, 2), ValueError, "multiple of heads"),
        (lambda: layer().gaussian(law(3)), ValueError, "law in 4 dimensions"),
        (lambda: layer().gaussian(Atoms.create(draw(3, 4))), TypeError, "got Atoms"),
        (lambda: FeedForward.create(3), TypeError, "callable"),
        (lambda: FeedForward.create(lambda x: x[..., :1])(draw(3, 4)), ValueError, "must keep the shape"),
        (lambda: Composition.create([torch.tanh]), TypeError, "must be an Operator"),
        (lambda: Composition.repeat(layer(), -1), ValueError, "at least 0, got -1"),
        (lambda: Normalisation.create(Tanh.create(), draw(2, 2)), ValueError, "vectors"),
        (lambda: Normalisation.create(torch.tanh, draw(2)), TypeError, "must be an Activation"),
        (lambda: layer(activation=Centred()).sharded(draw(3, 4)), ValueError, "Centred needs the whole population"),
        (lambda: Composition.create([Centred()]).sharded(draw(3, 4)), ValueError, "Centred needs the whole population"),
    ],
)
def test_bad_calls(call, error, named):
    with pytest.raises(error, match=named):
        call()
