"""N14: scores of how foreign an input is."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from massieu.energy import boosting_energy, ood_score
from massieu.measures import Atoms
from massieu.papers.claims.claim import Check, at_most, close
from massieu.papers.claims.inputs import check_at_least, normal_draws
from massieu.papers.claims.registry import claim

_ROUNDING = 1e-12


@claim(
    "N14",
    title="Free-energy scores of foreign inputs",
    statement="Free energies score how foreign an input is. T·lse(f/T) of logits is lse of the last layer's weights "
    "as memory. The energy −2lse(β, (X,O)ξ) + lse(β, Xξ) + lse(β, Oξ) of Hopfield Boosting is β⁻¹ log[p(1 − p)], p "
    "the share of X, and is largest on the boundary p = ½.",
    source="Liu et al., arXiv 2010.03759; Zhang et al., ICLR 2023 (SHE); Hopfield Boosting, arXiv 2405.08766",
    status="quoted",
)
def scores_of_foreignness(atoms: int = 9, dimensions: int = 5, draws: int = 100, seed: int = 0) -> Iterator[Check]:
    check_at_least(2, atoms=atoms, dimensions=dimensions)
    normal = normal_draws(seed)
    familiar = normal(atoms, dimensions)
    outliers = normal(atoms + 3, dimensions)
    state = normal(draws, dimensions)
    for scale in (0.3, 1.0, 4.0):
        yield from _boosting(state, familiar, outliers, scale)
        score = ood_score(state, kind="she", memory=familiar, scale=scale)
        yield close(f"β = {scale}: Hopfield score and −lse(β, Xξ)", score, -_log_sum_exp(state, familiar, scale))
        bias = normal(atoms)
        last_layer = Atoms.create(familiar, scale * bias)
        score = ood_score(state @ familiar.T + bias, kind="energy", scale=scale)
        as_memory = ood_score(state, kind="she", memory=last_layer, scale=scale)
        yield close(f"β = {scale}: energy of the logits, and of the weights as memory", score, as_memory)
    # Far out in a pattern's direction lse is its dot product, to log(N)/β.
    cold = ood_score(state, kind="she", memory=familiar, scale=1e6)
    label = (state @ familiar.T).argmax(-1)
    linear = ood_score(state, kind="she", memory=familiar, label=label)
    yield at_most("β = 10⁶: |lse − largest dot product|·β/log N", (cold - linear).abs() * 1e6 / math.log(atoms), 1.0)


def _log_sum_exp(state: Tensor, memory: Tensor, scale: float) -> Tensor:
    """lse(β, Xξ)."""
    return torch.logsumexp(scale * state @ memory.T, -1) / scale


def _boosting(state: Tensor, familiar: Tensor, outliers: Tensor, scale: float) -> Iterator[Check]:
    """The energy of Hopfield Boosting is β⁻¹ log[p(1 − p)], at most at p = ½; its score is the log-odds."""
    familiar_lse = _log_sum_exp(state, familiar, scale)
    outlier_lse = _log_sum_exp(state, outliers, scale)
    joint_lse = _log_sum_exp(state, torch.cat([familiar, outliers]), scale)
    energy = boosting_energy(state, familiar, outliers, scale=scale)
    yield close(f"β = {scale}: E_b and its three terms", energy, -2 * joint_lse + familiar_lse + outlier_lse)
    p = (scale * (familiar_lse - joint_lse)).exp()
    complement = (scale * (outlier_lse - joint_lse)).exp()
    yield close(f"β = {scale}: E_b and β⁻¹ log[p(1 − p)]", energy, (p * complement).log() / scale)
    yield close(f"β = {scale}: p + (1 − p)", p + complement, 1.0)
    yield at_most(f"β = {scale}: E_b + β⁻¹ log 4", energy + math.log(4) / scale, _ROUNDING)
    score = ood_score(state, kind="hopfield_boosting", memory=familiar, outliers=outliers, scale=scale)
    yield close(f"β = {scale}: boosting score and β⁻¹ log[(1 − p)/p]", score, (complement / p).log() / scale)
