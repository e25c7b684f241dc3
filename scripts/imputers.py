"""How near imputers come to cells that were taken out: the numbers of docs/how-to/machines.md, in a minute.

    python -m scripts.imputers

A tenth of the cells of two tables is missing, in three draws. A guess is off by the mean distance of the missing cells, in
standard deviations of their columns.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn.datasets import load_iris, load_wine
from sklearn.experimental import enable_iterative_imputer  # noqa: F401  # it makes the next import possible
from sklearn.impute import IterativeImputer, KNNImputer
from sklearn.preprocessing import StandardScaler

from massieu.sklearn import BoltzmannEstimator

MISSING = 0.1
DRAWS = 3
TABLES = {"wines": load_wine(return_X_y=True)[0], "irises": load_iris(return_X_y=True)[0]}


def machine(holes: np.ndarray) -> np.ndarray:
    """Conditional means of a machine of 8 hidden units."""
    return BoltzmannEstimator(8, n_iter=200, random_state=0).fit(holes).impute(holes)


def of_scikit_learn(imputer: Any) -> Callable[[np.ndarray], np.ndarray]:
    """An imputer of scikit-learn, on columns in units of their deviation."""

    def fill(holes: np.ndarray) -> np.ndarray:
        scaler = StandardScaler().fit(holes)
        return scaler.inverse_transform(imputer.fit_transform(scaler.transform(holes)))

    return fill


IMPUTERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "machine": machine,
    "IterativeImputer": of_scikit_learn(IterativeImputer(max_iter=100, random_state=0)),
    "KNNImputer": of_scikit_learn(KNNImputer()),
}


def error(fill: Callable[[np.ndarray], np.ndarray], table: np.ndarray, seed: int) -> float:
    """How far off an imputer is, with the cells of one draw missing."""
    lost = np.random.default_rng(seed).random(table.shape) < MISSING
    distance = np.abs(fill(np.where(lost, np.nan, table)) - table) / table.std(0)
    return float(distance[lost].mean())


def main() -> None:
    for name, table in TABLES.items():
        for imputer, fill in IMPUTERS.items():
            errors = ", ".join(f"{error(fill, table, seed):.2f}" for seed in range(DRAWS))
            print(f"{name}, {imputer}: {errors}")


if __name__ == "__main__":
    main()
