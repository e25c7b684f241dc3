"""A memory of rows: beside scikit-learn's kernel density, explicit attention, and refitting."""

import numpy as np
import pytest
from sklearn.datasets import make_blobs
from sklearn.neighbors import KernelDensity
from tests.support.rows import every_row

from massieu.errors import ConvergenceWarning
from massieu.sklearn import HopfieldMemory

TABLE = np.asarray(make_blobs(80, 3, centers=4, random_state=0)[0]) + 100.0
ASKED = TABLE[:30] + np.random.default_rng(1).normal(size=(30, 3))


def test_the_density_is_a_kernel_density():
    memory = HopfieldMemory(scale=0.7).fit(TABLE)
    wanted = KernelDensity(bandwidth=0.7**-0.5).fit(TABLE).score_samples(ASKED)
    assert np.allclose(memory.score_samples(ASKED), wanted, atol=1e-9)
    assert np.isclose(memory.score(ASKED), wanted.mean())


@pytest.mark.medium
def test_scale_and_threshold_are_those_of_leaving_each_row_out():
    memory = HopfieldMemory(false_alarm_rate=0.1).fit(TABLE)

    def alone(scale: float) -> np.ndarray:
        return np.array(
            [
                KernelDensity(bandwidth=scale**-0.5).fit(np.delete(TABLE, row, 0)).score_samples(TABLE[[row]])[0]
                for row in range(80)
            ]
        )

    scores = alone(memory.scale_)
    assert np.isclose(memory.leave_one_out_score_, scores.mean())
    assert all(alone(factor * memory.scale_).mean() < scores.mean() for factor in (0.25, 0.5, 2.0, 4.0))
    assert np.isclose(memory.offset_, np.quantile(scores, 0.1))


@pytest.mark.medium
def test_as_many_familiar_rows_are_called_foreign_as_were_asked_for():
    random = np.random.default_rng(2)
    shares = []
    for _ in range(10):
        rows = random.normal(size=(400, 2))
        shares.append((HopfieldMemory(false_alarm_rate=0.2).fit(rows[:200]).predict(rows[200:]) == -1).mean())
    assert abs(np.mean(shares) - 0.2) < 5 * np.std(shares) / 10**0.5
    assert (HopfieldMemory().fit(rows).predict(rows + 20) == -1).all()


def test_a_step_is_attention_and_many_steps_retrieve():
    memory = HopfieldMemory(scale=0.7).fit(TABLE)
    levels = -0.35 * np.square(ASKED[:, None] - TABLE).sum(-1)
    weights = np.exp(levels - levels.max(1, keepdims=True))
    assert np.allclose(memory.transform(ASKED), weights @ TABLE / weights.sum(1, keepdims=True), atol=1e-9)
    stored = np.random.default_rng(0).choice([-1.0, 1.0], (5, 40))
    damaged = stored.copy()
    damaged[:, :8] = 0.0
    found = HopfieldMemory(scale=2.0, n_steps=None).fit(stored).transform(damaged)
    assert np.allclose(found, stored, atol=1e-4)


def test_rows_that_never_rest_are_counted(monkeypatch):
    from massieu.sklearn import hopfield

    monkeypatch.setattr(hopfield, "_MOST_STEPS", 2)
    memory = HopfieldMemory(scale=0.1, n_steps=None).fit(TABLE)
    with pytest.warns(ConvergenceWarning, match="30 of 30 rows still moved after 2 steps"):
        memory.transform(ASKED)


@every_row(
    "settings, said",
    [
        ({"scale": 0.0}, "scale must be positive"),
        ({"n_steps": 0}, "n_steps must be a whole number"),
        ({"false_alarm_rate": 1.0}, "false_alarm_rate must be"),
    ],
)
def test_what_does_not_fit_is_one_sentence(settings, said: str):
    with pytest.raises(ValueError, match=said):
        HopfieldMemory(**settings).fit(TABLE)
