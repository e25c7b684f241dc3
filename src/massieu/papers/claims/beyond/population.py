"""N6, N12: the flow of a Gaussian law, and tokens that collapse onto one."""

from collections.abc import Iterator

import torch
from torch import Tensor

from massieu.foundation.matrices import eigenvalues
from massieu.measures import Gaussian
from massieu.papers.claims.claim import Check, at_least, at_most, close
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.rates import has_exact_rate
from massieu.papers.claims.registry import claim
from massieu.papers.theory import BlowUpError, gaussian_flow
from massieu.population import AttentionLayer, Composition

_LAYERS = [8, 16, 32, 64, 128, 256]
_FLOW = 1e-8
"""Global error of a flow whose steps have relative errors of 1e-10."""


# --- N6 --------------------------------------------------------------------------------------------------------------


@claim(
    "N6",
    title="Gaussian closure",
    statement="To first order in a small step size γ, layers move a Gaussian law by ṁ = V(I + CBᵀ)m, Ċ = VCBᵀC + "
    "CBCVᵀ. The rank of C never changes. For V = 1, C⁻¹ falls at the constant rate B + Bᵀ, so C becomes infinite at "
    "the time 1/λmax(C(B + Bᵀ)) if that is positive, and never if B + Bᵀ ⪯ 0.",
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
    errors = []
    for layers in _LAYERS:
        layer = AttentionLayer.from_score(score, value, step_size=1 / layers)
        found = Composition.repeat(layer, layers).gaussian(start)
        off = torch.cat([(found.location - end.location), (_covariance(found) - _covariance(end)).flatten(1)], 1)
        errors.append(off.norm(dim=1))
    yield has_exact_rate("1/γ layers and the flow: rate in 1/γ", _LAYERS, torch.stack(errors), -1.0)
    for rank, thin in enumerate(thin_laws, 1):
        flowed = gaussian_flow(thin, value=value, score=score, time=1.0)
        layered = AttentionLayer.from_score(score, value, step_size=0.5).gaussian(thin)
        for name, law in (("flow", flowed), ("layer", layered)):
            found = torch.linalg.matrix_rank(_covariance(law), hermitian=True)
            yield close(f"rank of C after a {name} from rank {rank}", found.double(), float(rank), 0.0)
    yield from _blow_up(normal, dimensions)


def _blow_up(normal: Normal, dimensions: int) -> Iterator[Check]:
    same = torch.eye(dimensions).double()
    change = 0.5 * normal(dimensions, dimensions)
    # Of a trace that is not negative: B + Bᵀ has a positive eigenvalue, and the law a time at which it becomes infinite.
    score = same + change * change.trace().sign()
    law = _law(normal, dimensions, dimensions)
    inverse = torch.linalg.inv(_covariance(law))
    last = 1 / eigenvalues(_covariance(law) @ (score + score.T)).real.max().item()
    before = gaussian_flow(law, value=same, score=score, time=0.8 * last)
    expected = torch.linalg.inv(inverse - 0.8 * last * (score + score.T))
    yield close(
        "V = 1: C at 0.8 of the time of the blow-up and (C⁻¹ − t(B + Bᵀ))⁻¹", _covariance(before), expected, _FLOW
    )
    found = 0.0
    try:
        gaussian_flow(law, value=same, score=score, time=2 * last)
    except BlowUpError as error:
        found = error.time
    yield close("V = 1: time of the blow-up and 1/λmax(C(B + Bᵀ))", found / last, 1.0, 2 * _FLOW)
    falling = -score @ score.T
    end = gaussian_flow(law, value=same, score=falling, time=5.0)
    expected = torch.linalg.inv(inverse - 5.0 * (falling + falling.T))
    yield close("V = 1, B + Bᵀ ≺ 0: C at time 5 and (C⁻¹ − t(B + Bᵀ))⁻¹", _covariance(end), expected, _FLOW)


def _law(normal: Normal, dimensions: int, rank: int, *batch: int) -> Gaussian:
    return Gaussian.create(normal(*batch, dimensions), factor=normal(*batch, dimensions, rank) / dimensions**0.5)


def _norm(matrix: Tensor) -> Tensor:
    """The largest spectral norm of the batch."""
    return torch.linalg.matrix_norm(matrix, 2).max()


def _covariance(law: Gaussian) -> Tensor:
    return law.fisher(torch.zeros_like(law.location))


# --- N12 -------------------------------------------------------------------------------------------------------------


@claim(
    "N12",
    title="Rank collapse",
    statement="Without a skip connection, attention X ← PX makes all tokens equal. With ‖xᵢ‖ ≤ R and scores βxᵢ·xⱼ, "
    "each layer multiplies the diameter by at most 1 − e^(−2βR²). Near the end each layer cubes the distance to "
    "rank one, so that it falls doubly exponentially in depth. With a skip connection no two tokens come nearer to "
    "each other.",
    source="Dong, Cordonnier, Loukas, arXiv 2103.03404; the bound by Dobrushin's coefficient is derived (S12)",
    status="quoted",
)
def rank_collapse(
    tokens: int = 12, dimensions: int = 4, draws: int = 24, layers: int = 6, seed: int = 0
) -> Iterator[Check]:
    check_at_least(2, tokens=tokens, dimensions=dimensions, layers=layers)
    check_at_least(20, draws=draws)
    normal = normal_draws(seed)
    same = torch.eye(dimensions).double()
    for scale in (0.05, 0.3, 1.0):
        state = skipping = normal(draws, tokens, dimensions)
        plain, skip = (AttentionLayer.from_score(same, same, scale=scale, residual=each) for each in (False, True))
        beyond = []
        shrunk = []
        for _ in range(layers):
            radius = state.norm(dim=-1).amax(-1)
            after = plain(state)
            bound = -torch.expm1(-2 * scale * radius.square())
            beyond.append(_apart(after).amax((-2, -1)) - bound * _apart(state).amax((-2, -1)))
            state = after
            apart = _apart(skipping)
            skipping = skip(skipping)
            shrunk.append((_apart(skipping) - apart) / apart.amax((-2, -1), keepdim=True))
        yield at_most(f"β = {scale}: diameter beyond (1 − e^(−2βR²)) of the last", torch.stack(beyond), 1e-12)
        yield at_least(f"β = {scale}, with skip: change of two tokens' distance, relative", torch.stack(shrunk), -1e-12)
    yield from _cubes(normal, tokens, dimensions, draws)


def _cubes(normal: Normal, tokens: int, dimensions: int, draws: int) -> Iterator[Check]:
    """Any weights, tokens within ε of a common one: the distance to rank one behind a layer is of the order ε³."""
    sizes = [32, 64, 128, 256, 512, 1024]
    weights = (normal(dimensions, dimensions) / dimensions**0.5 for _ in range(2))
    layer = AttentionLayer.from_score(*weights, residual=False)
    common = normal(draws, 1, dimensions)
    around = normal(draws, tokens, dimensions)
    behind = torch.stack([_from_rank_one(layer(common + around / size)) for size in sizes])
    yield has_exact_rate("distance to rank one after a layer: rate in 1/ε", sizes, behind, -3.0)


def _apart(state: Tensor) -> Tensor:
    """Distances of all pairs."""
    return (state.unsqueeze(-2) - state.unsqueeze(-3)).norm(dim=-1)


def _from_rank_one(state: Tensor) -> Tensor:
    """min over x of ‖X − 1xᵀ‖."""
    return (state - state.mean(-2, keepdim=True)).flatten(1).norm(dim=1)
