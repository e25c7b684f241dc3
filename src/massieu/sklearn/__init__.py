"""Estimators for scikit-learn users: machines of any units, and attention as regression, density and memory.

Rows are tokens, arrays go in and come out, and all four work in a `Pipeline` and in `GridSearchCV`:

- `BoltzmannEstimator`: a Boltzmann machine of any two kinds of units: features, log-likelihoods, samples;
- `ConditionalMeanRegressor`: kernel ridge regression whose kernel and ridge are chosen by leave-one-out, with errors;
- `AttentionRegressor`: the Nadaraya–Watson estimate, which is softmax attention over the rows;
- `HopfieldMemory`: stored rows as a density, a denoiser and a detector of foreign rows.

scikit-learn comes with ``pip install "massieu[sklearn]"``; it is loaded when one of these names is first used.
"""

from typing import TYPE_CHECKING

from massieu.foundation.lazy_names import lazy_names

if TYPE_CHECKING:
    from massieu.sklearn.attention import AttentionRegressor
    from massieu.sklearn.boltzmann import BoltzmannEstimator
    from massieu.sklearn.conditional_mean import ConditionalMeanRegressor
    from massieu.sklearn.hopfield import HopfieldMemory

__all__ = ["AttentionRegressor", "BoltzmannEstimator", "ConditionalMeanRegressor", "HopfieldMemory"]

__getattr__, __dir__ = lazy_names(
    __name__,
    __all__,
    {
        "AttentionRegressor": "massieu.sklearn.attention:AttentionRegressor",
        "BoltzmannEstimator": "massieu.sklearn.boltzmann:BoltzmannEstimator",
        "ConditionalMeanRegressor": "massieu.sklearn.conditional_mean:ConditionalMeanRegressor",
        "HopfieldMemory": "massieu.sklearn.hopfield:HopfieldMemory",
    },
    extra="sklearn",
)
