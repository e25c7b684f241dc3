"""The claims on the Energy Transformer and on entropy collapse notice what is wrong."""

import math

import pytest
import torch
from tests.support.rows import every_row
from torch import Tensor

from massieu.energy import TransformerEnergy, least_entropy, transformer
from massieu.energy.mutual import mutual_attention
from massieu.errors import InputError
from massieu.nn import SigmaReparametrization
from massieu.verification.beyond import entropy_collapse
from massieu.verification.run import verify

_FORCE, _CURVATURE = TransformerEnergy._force, TransformerEnergy.curvature


def _with_itself(query: Tensor, key: Tensor, scale: Tensor, keep: Tensor | None) -> Tensor:
    return torch.logsumexp(scale[:, None, None] * query @ key.mT, -1)


def _as_queries_only(query: Tensor, key: Tensor, scale: Tensor, keep: Tensor | None):
    found = mutual_attention(query, key, scale, keep)
    return found._replace(of_queries=torch.zeros_like(found.of_queries))


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
    "N1: padding leaks": ("N1", TransformerEnergy, "_kept", lambda self, state: None),
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


@pytest.mark.slow
@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_fails_its_claim(case: str, monkeypatch: pytest.MonkeyPatch):
    id, owner, name, replacement = WRONG[case]
    monkeypatch.setattr(owner, name, replacement)
    assert verify(id)[0].verdict == "fails"


@every_row(
    ("id", "settings"),
    [("N1", {"tokens": 1}), ("N1", {"dimensions": 2}), ("N11", {"keys": 1}), ("N11", {"draws": 1})],
)
def test_too_few_to_check_anything(id: str, settings: dict[str, int]):
    with pytest.raises(InputError, match="must be at least"):
        verify(id, settings=settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("id", "settings"),
    [
        ("N1", {"tokens": 2, "dimensions": 3, "heads": 1, "memories": 1}),
        ("N1", {"tokens": 12, "dimensions": 16, "heads": 4, "memories": 60, "draws": 4}),
        ("N11", {"keys": 2, "dimensions": 2, "draws": 2}),
        ("N11", {"keys": 200, "dimensions": 32, "draws": 50}),
    ],
)
def test_the_claim_holds_for_other_settings(id: str, settings: dict[str, int]):
    assert verify(id, settings=settings)[0].verdict == "holds"
