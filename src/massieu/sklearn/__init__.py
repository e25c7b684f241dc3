"""Estimators for scikit-learn users: machines of any units, and attention as regression, density and memory.

Rows are tokens, arrays go in and come out, and all four work in a `Pipeline` and in `GridSearchCV`:

- `BoltzmannEstimator`: a Boltzmann machine of any two kinds of units: features, log-likelihoods, samples;
- `ConditionalMeanRegressor`: kernel ridge regression whose kernel and ridge are chosen by leave-one-out, with errors;
- `AttentionRegressor`: the Nadaraya–Watson estimate, which is softmax attention over the rows;
- `HopfieldMemory`: stored rows as a density, a denoiser and a detector of foreign rows.

scikit-learn comes with ``pip install "massieu[sklearn]"``; it is loaded when one of these names is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from massieu.errors import require_extra

if TYPE_CHECKING:
    from massieu.sklearn.attention import AttentionRegressor
    from massieu.sklearn.boltzmann import BoltzmannEstimator
    from massieu.sklearn.conditional_mean import ConditionalMeanRegressor
    from massieu.sklearn.hopfield import HopfieldMemory

_PLACES = {
    "AttentionRegressor": "attention",
    "BoltzmannEstimator": "boltzmann",
    "ConditionalMeanRegressor": "conditional_mean",
    "HopfieldMemory": "hopfield",
}

__all__ = ["AttentionRegressor", "BoltzmannEstimator", "ConditionalMeanRegressor", "HopfieldMemory"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'massieu.sklearn' has no attribute {name!r}")
    require_extra("sklearn", "sklearn")
    return getattr(importlib.import_module(f"massieu.sklearn.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
