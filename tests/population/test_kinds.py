"""Whatever a tensor argument of populations is given as, PyTorch's own errors are not what the user sees."""

import pytest
import torch
from tests.kinds import raw_errors
from tests.rows import every_row

from massieu import population as p
from massieu.measures import Gaussian


def n(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


I3 = torch.eye(3, dtype=torch.float64)
C, H = n(10, 3), n(1, 1, 6, 3)
two = torch.tensor([0.3, 0.7], dtype=torch.float64)
one = torch.tensor(1.0, dtype=torch.float64)
LAW = Gaussian.create(torch.zeros(3).double(), I3)
dirs = p.random_directions(3, 4, generator=torch.Generator().manual_seed(0))
layer = p.AttentionLayer.from_score(I3, I3)

CASES = {
    "cluster_count": (p.cluster_count, {"points": C}),
    "pairwise_distance": (p.pairwise_distance, {"points": C}),
    "covariance_spectrum": (p.covariance_spectrum, {"points": C}),
    "log_determinant": (p.log_determinant, {"spectrum": two}),
    "effective_rank": (p.effective_rank, {"spectrum": two}),
    "participation_ratio": (p.participation_ratio, {"spectrum": two}),
    "projected_cumulants": (p.projected_cumulants, {"points": C, "directions": dirs}),
    "squared_gaussian_distance": (p.squared_gaussian_distance, {"points": C, "directions": dirs}),
    "self_attention_levels": (p.self_attention_levels, {"points": C}),
    "CloudMoments": (lambda points: p.CloudMoments()(points), {"points": C}),
    "CloudShape": (lambda points: p.CloudShape()(points), {"points": C}),
    "Clusters": (lambda points: p.Clusters()(points), {"points": C}),
    "SelfAttention": (lambda points: p.SelfAttention()(points), {"points": C}),
    "Flow.run": (lambda points: p.Flow(lambda z: z, depth=1, observables=[]).run(points), {"points": C}),
    "precision_alignment": (p.precision_alignment, {"score": I3 + 0.1 * n(3, 3), "covariance": I3}),
    "equilibrium": (p.equilibrium, {"location": n(3), "covariance": I3}),
    "key_law": (lambda matrix: p.key_law(LAW, matrix), {"matrix": I3}),
    "sample_error": (lambda eta: p.sample_error(LAW, eta, 10), {"eta": n(3)}),
    "equilibrium_report": (p.equilibrium_report, {"particles": C, "matrix": I3}),
    "expansion": (lambda points: p.expansion(LAW, points, 0.1), {"points": C}),
    "sinkhorn": (p.sinkhorn, {"query": H, "key": H, "log_weight": torch.zeros(6).double()}),
    "doubly_stochastic_attention": (p.doubly_stochastic_attention, {"query": H, "key": H, "value": H}),
    "gaussian_flow": (
        lambda value, score: p.gaussian_flow(LAW, value=value, score=score, time=0.1),
        {"value": I3, "score": I3},
    ),
    "layer.from_score": (p.AttentionLayer.from_score, {"score": I3, "write": I3}),
    "layer call": (lambda particles: layer(particles), {"particles": C}),
    "DSlayer call": (lambda particles: p.DoublyStochasticLayer()(particles), {"particles": C}),
    "Resampled call": (
        lambda particles: p.ResampledLayer(generator=torch.Generator().manual_seed(0))(particles),
        {"particles": C},
    ),
    "Renormalisation.create": (p.Renormalisation.create, {"mean": I3[0], "covariance": I3}),
    "Renormalisation call": (lambda particles: p.Renormalisation.create(I3[0], I3)(particles), {"particles": C}),
    "Trace call": (lambda particles: p.TraceRenormalisation.create(1.0)(particles), {"particles": C}),
    "Trace create": (lambda trace: p.TraceRenormalisation.create(trace), {"trace": torch.tensor(1.0)}),
    "FeedForward call": (lambda particles: p.FeedForward.create(lambda z: z * 0.5)(particles), {"particles": C}),
}


@pytest.mark.medium
@every_row("name", CASES)
def test_no_argument_ends_in_an_error_of_pytorchs(name):
    function, arguments = CASES[name]
    assert raw_errors(function, arguments) == []
