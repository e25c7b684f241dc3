"""A wrong Energy Transformer, and wrong bounds of collapsing entropy."""

import math

import torch
from torch import Tensor

from massieu.energy import TransformerEnergy, least_entropy, transformer
from massieu.energy.mutual import mutual_attention
from massieu.nn import SigmaReparametrization
from massieu.papers.claims.beyond import entropy_collapse

_FORCE = TransformerEnergy._force
_CURVATURE = TransformerEnergy.curvature


def _with_itself(query: Tensor, key: Tensor, scale: Tensor, keep: Tensor | None) -> Tensor:
    return torch.logsumexp(scale[:, None, None] * query @ key.mT, -1)


def _as_queries_only(query: Tensor, key: Tensor, scale: Tensor, keep: Tensor | None):
    terms = mutual_attention(query, key, scale, keep)
    return terms._replace(of_queries=torch.zeros_like(terms.of_queries))


def _first_term(sigma: Tensor, keys: int) -> Tensor:
    return torch.log1p((keys - 1) * (-sigma * math.sqrt(keys / (keys - 1))).exp())


def _by_the_frobenius_norm(self: SigmaReparametrization, weight: Tensor) -> Tensor:
    return self.gain * weight / torch.linalg.matrix_norm(weight).reshape(-1, 1, 1)


WRONG = {
    "N1: a token attends to itself": ("N1", transformer, "mutual_log_partition", _with_itself),
    "N1: parallel self-attention for the gradient": ("N1", transformer, "mutual_attention", _as_queries_only),
    "N1: energy and force differ by the number of tokens": (
        "N1",
        TransformerEnergy,
        "_force",
        lambda self, state: _FORCE(self, state) / (state.shape[0] * state.shape[-2]),
    ),
    "N1: padding leaks": ("N1", TransformerEnergy, "_token_mask", lambda self, state: None),
    "N1: a bound ten times too small": (
        "N1",
        TransformerEnergy,
        "curvature",
        lambda self, state: _CURVATURE(self, state) / 10,
    ),
    "N11: the first term alone": ("N11", entropy_collapse, "least_entropy", _first_term),
    "N11: the norm of T scores for that of T − 1": (
        "N11",
        entropy_collapse,
        "least_entropy",
        lambda sigma, keys: least_entropy(sigma * math.sqrt((keys - 1) / keys), keys),
    ),
    "N11: the Frobenius norm for the spectral norm": ("N11", SigmaReparametrization, "forward", _by_the_frobenius_norm),
}
