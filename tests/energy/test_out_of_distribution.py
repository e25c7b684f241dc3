"""Scores of foreignness against SciPy, the identities between them, and what they refuse."""

import numpy as np
import pytest
import torch
from scipy.special import expit, logsumexp
from tests.energy.cases import F64, draw
from tests.support.derivatives import check_derivatives
from tests.support.rows import every_row

from massieu import measures
from massieu.energy import boosting_energy, ood_score

FEATURES, MEMORY, OUTLIERS = draw(9, 4), draw(6, 4, seed=1), draw(5, 4, seed=2)


def lse(memory, scale: float) -> np.ndarray:
    return logsumexp(scale * FEATURES.numpy() @ memory.numpy().T, -1) / scale


@every_row("scale", [0.3, 1, 5.0])
def test_scores_by_their_definitions(scale: float):
    np.testing.assert_allclose(
        ood_score(FEATURES, scale=scale), -logsumexp(scale * FEATURES.numpy(), -1) / scale, rtol=1e-12
    )
    np.testing.assert_allclose(ood_score(FEATURES, kind="she", memory=MEMORY, scale=scale), -lse(MEMORY, scale))
    np.testing.assert_allclose(
        ood_score(FEATURES, kind="hopfield_boosting", memory=MEMORY, outliers=OUTLIERS, scale=scale),
        lse(OUTLIERS, scale) - lse(MEMORY, scale),
        atol=1e-13,
    )
    label = torch.arange(9) % 6
    np.testing.assert_allclose(
        ood_score(FEATURES, kind="she", memory=MEMORY, label=label),
        -(FEATURES.numpy() * MEMORY.numpy()[label]).sum(-1),
        atol=1e-14,
    )


@every_row("scale", [0.3, 1.0, 5.0])
def test_boosting_energy_three_ways(scale: float):
    found = boosting_energy(FEATURES, MEMORY, OUTLIERS, scale=scale)
    both = lse(torch.cat([MEMORY, OUTLIERS]), scale)
    np.testing.assert_allclose(found, -2 * both + lse(MEMORY, scale) + lse(OUTLIERS, scale), atol=1e-13)
    gap = scale * (lse(MEMORY, scale) - lse(OUTLIERS, scale))
    np.testing.assert_allclose(found, np.log(expit(gap) * expit(-gap)) / scale, rtol=1e-12)  # p(1 − p)
    assert (found <= -np.log(4) / scale + 1e-12).all()


def test_a_linear_classifiers_energy_is_that_of_its_weights_as_memory():
    weight, bias, scale = MEMORY, draw(6, seed=3), 2.0
    logits = FEATURES @ weight.T + bias
    memory = measures.Atoms.create(weight, scale * bias)
    torch.testing.assert_close(
        ood_score(logits, scale=scale), ood_score(FEATURES, kind="she", memory=memory, scale=scale)
    )


def test_the_foreign_are_foreign():
    stored, far = draw(200, 16), draw(50, 16, seed=2)
    near = stored[:50] + 0.1 * draw(50, 16, seed=1)
    stored, near, far = (torch.nn.functional.normalize(part, dim=-1) for part in (stored, near, far))
    familiar, foreign = (ood_score(part, kind="she", memory=stored, scale=64.0) for part in (near, far))
    assert familiar.max() < foreign.min()


def test_masks_heads_and_low_precision():
    keep = torch.tensor([[True] * 6, [False] * 6])
    memory = measures.Atoms.create(MEMORY.expand(2, 6, 4), keep)
    found = ood_score(FEATURES.expand(2, 9, 4), kind="she", memory=memory, scale=torch.tensor([2.0, 3.0], dtype=F64))
    np.testing.assert_allclose(found[0], -lse(MEMORY, 2.0))
    assert found[1].isposinf().all()
    low = ood_score(FEATURES.bfloat16(), kind="she", memory=MEMORY.bfloat16())
    assert low.dtype == torch.float32
    torch.testing.assert_close(
        low.double(), ood_score(FEATURES.bfloat16().double(), kind="she", memory=MEMORY.bfloat16().double())
    )
    label = torch.zeros(2, 9, dtype=torch.long)
    found = ood_score(FEATURES.expand(2, 9, 4), kind="she", memory=memory, label=label)
    torch.testing.assert_close(found[0], -(FEATURES @ MEMORY[0]))


def test_gradients():
    inputs = (FEATURES[:2, :2], MEMORY[:3, :2], OUTLIERS[:2, :2])
    check_derivatives(lambda x, m, o: boosting_energy(x, m, o, scale=2.0), inputs)


REFUSED = {
    "kind": ({"kind": "softmax"}, ValueError, "softmax"),
    "no memory": ({"kind": "she"}, ValueError, "needs memory"),
    "no outliers": ({"kind": "hopfield_boosting", "memory": MEMORY}, ValueError, "needs outliers"),
    "a memory for logits": ({"memory": MEMORY}, ValueError, "does not use memory"),
    "a label for boosting": (
        {"kind": "hopfield_boosting", "memory": MEMORY, "outliers": OUTLIERS, "label": torch.zeros(9).long()},
        ValueError,
        "does not use label",
    ),
    "label's shape": ({"kind": "she", "memory": MEMORY, "label": torch.zeros(3).long()}, ValueError, r"\(9,\).*\(3,\)"),
    "label's range": ({"kind": "she", "memory": MEMORY, "label": torch.full((9,), 6)}, ValueError, "0 … 5"),
    "label of logits": ({"kind": "she", "memory": MEMORY, "label": torch.zeros(9)}, TypeError, "whole"),
    "no patterns": (
        {"kind": "she", "memory": measures.Spin.create(dim=4), "label": torch.zeros(9).long()},
        TypeError,
        "class means",
    ),
    "scale": ({"kind": "she", "memory": MEMORY, "scale": 0.0}, ValueError, "positive"),
    "scale of logits": ({"scale": -1.0}, ValueError, "positive"),
    "width": ({"kind": "she", "memory": draw(3, 5)}, ValueError, r"\(9, 4\)"),
}


@every_row("name", REFUSED)
def test_bad_input_is_one_clear_error(name: str):
    arguments, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        ood_score(FEATURES, **arguments)
