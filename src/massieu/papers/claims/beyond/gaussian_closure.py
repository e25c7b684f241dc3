"""N6: the flow of a Gaussian law."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from massieu.foundation.matrices import eigenvalues
from massieu.measures import Gaussian
from massieu.papers.claims.claim import Check, close
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.rates import has_exact_rate
from massieu.papers.claims.registry import claim
from massieu.papers.theory import BlowUpError, gaussian_flow
from massieu.population import AttentionLayer, Composition

_LAYERS = [8, 16, 32, 64, 128, 256]
_FLOW = 1e-8
"""Global error of a flow whose steps have relative errors of 1e-10."""


@claim(
    "N6",
    title="Gaussian closure",
    statement="To first order in a small step size γ, layers move a Gaussian law by ṁ = V(I + CBᵀ)m, Ċ = VCBᵀC + "
    "CBCVᵀ. The rank of C never changes. For V = 1, C⁻¹ falls at the constant rate B + Bᵀ, so C becomes infinite at "
    "the time 1/λmax(C(B + Bᵀ)) if that is positive, and never if B + Bᵀ ⪯ 0. Layers with a bias b_Q of queries and a "
    "bias b of what they write move the mean by ṁ = V(m + C(Bᵀm + b_Q)) + b, and C as before: a bias is a weight of a "
    "coordinate that is always 1.",
    source="Castin, Ablin, Carrillo, Peyré, arXiv 2501.18322; the time of the blow-up is derived",
    status="quoted",
)
def gaussian_laws_flow(dimensions: int = 3, laws: int = 24, seed: int = 0) -> Iterator[Check]:
    check_at_least(2, dimensions=dimensions)
    check_at_least(20, laws=laws)
    normal = normal_draws(seed)
    value = normal(dimensions, dimensions)
    score = normal(dimensions, dimensions)
    start = _law(normal, dimensions, dimensions, laws)
    thin_laws = [_law(normal, dimensions, rank) for rank in range(1, dimensions)]
    # d‖C‖/dt ≤ 2‖V‖‖B‖‖C‖², so that no law becomes infinite before the time 1/(2‖V‖‖B‖‖C‖): here twice the time asked for.
    value = 0.5 * value / _norm(value)
    score = score / _norm(score) / (2 * max(_norm(_covariance(law)).item() for law in [start, *thin_laws]))
    end = gaussian_flow(start, value=value, score=score, time=1.0)

    def layer(step_size: float) -> AttentionLayer:
        return AttentionLayer.from_score(score, value, step_size=step_size)

    errors = _errors_of_layers(layer, start, end.location, _covariance(end))
    yield has_exact_rate("1/γ layers and the flow: rate in 1/γ", _LAYERS, errors, -1.0)
    for rank, thin in enumerate(thin_laws, 1):
        flowed = gaussian_flow(thin, value=value, score=score, time=1.0)
        layered = AttentionLayer.from_score(score, value, step_size=0.5).gaussian(thin)
        for name, law in (("flow", flowed), ("layer", layered)):
            final_rank = torch.linalg.matrix_rank(_covariance(law), hermitian=True)
            yield close(f"rank of C after a {name} from rank {rank}", final_rank.double(), float(rank), 0.0)
    yield from _blow_up(normal, dimensions)
    yield from _biases(normal, value, score, start)


def _errors_of_layers(
    layer: Callable[[float], AttentionLayer], start: Gaussian, mean: Tensor, covariance: Tensor
) -> Tensor:
    """Distance of the law behind n layers of step size 1/n from the mean and the covariance, by n and law."""
    errors = []
    for layers in _LAYERS:
        layered = Composition.repeat(layer(1 / layers), layers).gaussian(start)
        mean_error = layered.location - mean
        covariance_error = _covariance(layered) - covariance
        errors.append(torch.cat([mean_error, covariance_error.flatten(1)], 1).norm(dim=1))
    return torch.stack(errors)


def _blow_up(normal: Normal, dimensions: int) -> Iterator[Check]:
    """For V = 1, C⁻¹ falls at the rate B + Bᵀ: C becomes infinite at 1/λmax(C(B + Bᵀ)), and never if B + Bᵀ ⪯ 0."""
    identity = torch.eye(dimensions).double()
    change = 0.5 * normal(dimensions, dimensions)
    # Of a trace that is not negative: B + Bᵀ has a positive eigenvalue, and the law a time at which it becomes infinite.
    score = identity + change * change.trace().sign()
    law = _law(normal, dimensions, dimensions)
    inverse = torch.linalg.inv(_covariance(law))
    blow_up_time = 1 / eigenvalues(_covariance(law) @ (score + score.T)).real.max().item()
    before = gaussian_flow(law, value=identity, score=score, time=0.8 * blow_up_time)
    expected = torch.linalg.inv(inverse - 0.8 * blow_up_time * (score + score.T))
    yield close(
        "V = 1: C at 0.8 of the time of the blow-up and (C⁻¹ − t(B + Bᵀ))⁻¹", _covariance(before), expected, _FLOW
    )
    # A flow that ends without an error is a time of 0, which fails.
    reported_time = 0.0
    try:
        gaussian_flow(law, value=identity, score=score, time=2 * blow_up_time)
    except BlowUpError as error:
        reported_time = error.time
    yield close("V = 1: time of the blow-up and 1/λmax(C(B + Bᵀ))", reported_time / blow_up_time, 1.0, 2 * _FLOW)
    falling = -score @ score.T
    end = gaussian_flow(law, value=identity, score=falling, time=5.0)
    expected = torch.linalg.inv(inverse - 5.0 * (falling + falling.T))
    yield close("V = 1, B + Bᵀ ≺ 0: C at time 5 and (C⁻¹ − t(B + Bᵀ))⁻¹", _covariance(end), expected, _FLOW)


def _biases(normal: Normal, value: Tensor, score: Tensor, start: Gaussian) -> Iterator[Check]:
    """Layers with biases, and the flow of the law of (x, 1), in which biases are weights of the last coordinate.

    With B' = (B 0; b_Qᵀ 0) and V' = (V b; 0 0), and C' = (C 0; 0 0), (x, 1) has the velocity (V(m + C(Bᵀx + b_Q)) + b, 0).
    """
    dimensions = len(value)
    query_bias = normal(dimensions)
    bias = normal(dimensions)
    identity = torch.eye(dimensions).double()

    def layer(step_size: float) -> AttentionLayer:
        return AttentionLayer.create(
            *(weight.unsqueeze(0) for weight in (score.T, identity, value, identity)),
            query_bias=query_bias.unsqueeze(0),
            bias=bias,
            scale=1.0,
            step_size=step_size,
        )

    wide_value = pad(torch.cat([value, bias.unsqueeze(-1)], -1), (0, 0, 0, 1))
    wide_score = pad(torch.cat([score, query_bias.unsqueeze(0)]), (0, 1))
    wide_law = Gaussian.create(pad(start.location, (0, 1), value=1.0), factor=pad(start.factor, (0, 0, 0, 1)))
    end = gaussian_flow(wide_law, value=wide_value, score=wide_score, time=1.0)
    errors = _errors_of_layers(layer, start, end.location[..., :-1], _covariance(end)[..., :-1, :-1])
    yield has_exact_rate("biases: 1/γ layers and the flow of (x, 1): rate in 1/γ", _LAYERS, errors, -1.0)


def _law(normal: Normal, dimensions: int, rank: int, *batch: int) -> Gaussian:
    return Gaussian.create(normal(*batch, dimensions), factor=normal(*batch, dimensions, rank) / dimensions**0.5)


def _norm(matrix: Tensor) -> Tensor:
    """The largest spectral norm of the batch."""
    return torch.linalg.matrix_norm(matrix, 2).max()


def _covariance(law: Gaussian) -> Tensor:
    return law.fisher(torch.zeros_like(law.location))
