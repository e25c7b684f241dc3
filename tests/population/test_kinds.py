"""Whatever a tensor argument of populations is given as, PyTorch's own errors are not what the user sees."""

import pytest
import torch
from tests.support.kinds import PARTS, raw_errors
from tests.support.rows import some_slow

from massieu import population
from massieu.measures import Gaussian
from massieu.papers import theory
from massieu.population import cloud_shape, clusters, self_attention


def n(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


I3 = torch.eye(3, dtype=torch.float64)
C = n(10, 3)
H = n(1, 1, 6, 3)
two = torch.tensor([0.3, 0.7], dtype=torch.float64)
one = torch.tensor(1.0, dtype=torch.float64)
LAW = Gaussian.create(torch.zeros(3).double(), I3)
dirs = cloud_shape.random_directions(3, 4, generator=torch.Generator().manual_seed(0))
layer = population.AttentionLayer.from_score(I3, I3)

CASES = {
    "cluster_count": (clusters.cluster_count, {"points": C}),
    "pairwise_distance": (population.pairwise_distance, {"points": C}),
    "covariance_spectrum": (population.covariance_spectrum, {"points": C}),
    "log_determinant": (population.log_determinant, {"spectrum": two}),
    "effective_rank": (population.effective_rank, {"spectrum": two}),
    "projected_cumulants": (cloud_shape.projected_cumulants, {"points": C, "directions": dirs}),
    "squared_gaussian_distance": (cloud_shape.squared_gaussian_distance, {"points": C, "directions": dirs}),
    "self_attention_levels": (self_attention.self_attention_levels, {"points": C}),
    "CloudMoments": (lambda points: population.CloudMoments()(points), {"points": C}),
    "CloudShape": (lambda points: population.CloudShape()(points), {"points": C}),
    "Clusters": (lambda points: population.Clusters()(points), {"points": C}),
    "SelfAttention": (lambda points: population.SelfAttention()(points), {"points": C}),
    "Flow.run": (lambda points: population.Flow(lambda z: z, depth=1, observables=[]).run(points), {"points": C}),
    "precision_alignment": (population.precision_alignment, {"score": I3 + 0.1 * n(3, 3), "covariance": I3}),
    "equilibrium": (theory.equilibrium, {"location": n(3), "covariance": I3}),
    "key_law": (lambda matrix: theory.key_law(LAW, matrix), {"matrix": I3}),
    "sample_error": (lambda eta: theory.sample_error(LAW, eta, 10), {"eta": n(3)}),
    "equilibrium_report": (theory.equilibrium_report, {"particles": C, "matrix": I3}),
    "expansion": (lambda points: theory.expansion(LAW, points, 0.1), {"points": C}),
    "sinkhorn": (population.sinkhorn, {"query": H, "key": H, "log_weight": torch.zeros(6).double()}),
    "doubly_stochastic_attention": (population.doubly_stochastic_attention, {"query": H, "key": H, "value": H}),
    "gaussian_flow": (
        lambda value, score: theory.gaussian_flow(LAW, value=value, score=score, time=0.1),
        {"value": I3, "score": I3},
    ),
    "layer.from_score": (population.AttentionLayer.from_score, {"score": I3, "write": I3}),
    "layer call": (lambda particles: layer(particles), {"particles": C}),
    "DSlayer call": (lambda particles: population.DoublyStochasticLayer.create()(particles), {"particles": C}),
    "Resampled call": (
        lambda particles: population.ResampledLayer.create(generator=torch.Generator().manual_seed(0))(particles),
        {"particles": C},
    ),
    "Renormalisation.create": (population.Renormalisation.create, {"mean": I3[0], "covariance": I3}),
    "Renormalisation call": (
        lambda particles: population.Renormalisation.create(I3[0], I3)(particles),
        {"particles": C},
    ),
    "Trace call": (lambda particles: population.TraceRenormalisation.create(1.0)(particles), {"particles": C}),
    "Trace create": (lambda trace: population.TraceRenormalisation.create(trace), {"trace": torch.tensor(1.0)}),
    "FeedForward call": (
        lambda particles: population.FeedForward.create(lambda z: z * 0.5)(particles),
        {"particles": C},
    ),
}


@pytest.mark.medium
@some_slow("part", range(PARTS), 1)
@pytest.mark.parametrize("name", CASES)
def test_no_argument_ends_in_an_error_of_pytorchs(name, part):
    function, arguments = CASES[name]
    assert raw_errors(function, arguments, part) == []
