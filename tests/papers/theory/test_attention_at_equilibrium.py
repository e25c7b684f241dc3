"""Attention with a renormalisation behind it: the equilibrium theorem, the layer's law and its particles are one."""

import pytest
import torch
from tests.population import cases

from massieu.measures import Gaussian
from massieu.papers.claims.rates import has_rate, rate
from massieu.papers.theory import after_layer, equilibrium, key_law, whitened_map
from massieu.population import AttentionLayer, Composition, Flow, Renormalisation, TraceRenormalisation

F64 = torch.float64
COVARIANCE = torch.tensor([[1.0, 0.3], [0.3, 0.5]], dtype=F64)
LAW = equilibrium(torch.tensor([0.3, -0.2], dtype=F64), COVARIANCE)


def renormalised(matrix, step, law=LAW):
    whole = Renormalisation.create(law.location, law.covariance)
    return AttentionLayer.from_score(matrix, matrix, step_size=step, activation=whole)


def assert_equal(one, other, tolerance=1e-11):
    torch.testing.assert_close(one.location, other.location, rtol=0, atol=tolerance)
    torch.testing.assert_close(cases.covariance(one), cases.covariance(other), rtol=0, atol=tolerance)


@pytest.mark.parametrize("step", [0.2, 1.0])
def test_the_layers_law_is_the_theorems(step):
    bare = AttentionLayer.from_score(COVARIANCE, COVARIANCE, step_size=step)
    assert_equal(bare.gaussian(LAW), after_layer(LAW, key_law(LAW, COVARIANCE), step))
    assert_equal(Composition.repeat(renormalised(COVARIANCE, step), 6).gaussian(LAW), LAW)
    held = AttentionLayer.from_score(
        COVARIANCE, COVARIANCE, step_size=step, activation=TraceRenormalisation.create(2.0)
    ).gaussian(LAW)
    spread = cases.covariance(after_layer(LAW, key_law(LAW, COVARIANCE), step))
    torch.testing.assert_close(cases.covariance(held), 2 * spread / spread.trace())


def test_a_law_that_does_not_commute_returns_and_its_particles_turn():
    other = Gaussian.create(LAW.location, torch.tensor([[0.4, 0.0], [0.0, 2.0]], dtype=F64))
    layer = renormalised(COVARIANCE, 0.7, other)
    assert_equal(layer.gaussian(other), other)
    # Particles whose own moments are exactly the law's, so that only the softmax is a sample.
    root = torch.linalg.cholesky(cases.covariance(other))
    turn = torch.linalg.inv(root) @ _linear_part(layer, other) @ root
    torch.testing.assert_close(turn @ turn.T, torch.eye(2, dtype=F64))
    predicted = whitened_map(other, key_law(other, COVARIANCE), 0.7)
    # The same map in coordinates that differ by an orthogonal one: its trace is that of the turn.
    torch.testing.assert_close(turn.trace(), predicted.trace())
    assert (predicted - torch.eye(2, dtype=F64)).norm() > 1e-3


def _linear_part(layer, law):
    """Of the layer over a frozen law: what it does to each particle, renormalised by the law's own moments."""
    moved = AttentionLayer.from_score(COVARIANCE, COVARIANCE, step_size=0.7, population=law)
    points = torch.cat([torch.zeros(1, 2, dtype=F64), torch.eye(2, dtype=F64)])
    images = moved(points)
    matrix = layer.activation.matrix(cases.covariance(after_layer(law, key_law(law, COVARIANCE), 0.7)))
    return matrix @ (images[1:] - images[0]).T


def test_a_renormalisation_before_attention_keeps_laws_too():
    """Pre-norm: attention reads the renormalised law, whose closure is the one of an affine map."""
    whole = Renormalisation.create(LAW.location, LAW.covariance)
    law = cases.law(seed=4)
    result = AttentionLayer.from_score(COVARIANCE, COVARIANCE, step_size=0.5, normalisation=whole).gaussian(law)
    root = whole.matrix(cases.covariance(law))
    keys = cases.covariance(LAW)  # attended: COVARIANCE (m* + C*·COVARIANCE z), z renormalised
    matrix = torch.eye(2, dtype=F64) + 0.5 * COVARIANCE @ keys @ COVARIANCE @ root
    mean = law.location + 0.5 * COVARIANCE @ (LAW.location + keys @ COVARIANCE @ LAW.location)
    torch.testing.assert_close(result.location, mean)
    torch.testing.assert_close(cases.covariance(result), matrix @ cases.covariance(law) @ matrix.T)


@pytest.mark.slow
def test_particles_stay_up_to_the_error_of_their_number():
    """No particle of the equilibrium moves; N particles move by O(N^−½) in three layers.

    With half of the theorem's M the covariances still commute, and E e^(ηᵀKη), which the mean square of S15 is proportional
    to, is finite.
    """
    layer, sizes, repetitions = renormalised(COVARIANCE / 2, 0.5), [2**each for each in range(5, 11)], 80
    generator = torch.Generator().manual_seed(0)
    moved = []
    for size in sizes:
        cloud = LAW.sample(torch.zeros(2, dtype=F64), (repetitions, size), generator=generator)
        after = Composition.repeat(layer, 3)(cloud)
        moved.append((after - cloud).square().sum(-1).mean(-1).sqrt())
    check = has_rate("particles stay", rate(sizes, torch.stack(moved)), -0.5)
    assert check.measured <= check.bound, check.detail


def test_a_flow_holds_the_moments_that_it_is_renormalised_to():
    cloud = LAW.sample(torch.zeros(2, dtype=F64), (300,), generator=torch.Generator().manual_seed(1))
    # One head, whose scale is an expanded number: a flow can tell layers of that, too, from others.
    result = Flow(renormalised(COVARIANCE, 0.5), depth=4).run(cloud, progress=False)
    spectrum = torch.linalg.eigvalsh(LAW.covariance).flip(-1)
    torch.testing.assert_close(result.values("covariance_spectrum")[1:], spectrum.expand(4, 2))
    torch.testing.assert_close(result.values("length_of_mean")[1:], LAW.location.norm().expand(4))
