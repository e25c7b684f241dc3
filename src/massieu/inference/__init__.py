"""Samplers. They know functions only; a sampler is an `init` and a `step`, and noise or its generator is an argument.

- `langevin_init`, `langevin_noise`, `langevin_step`: Langevin dynamics with Metropolis correction;
- `gibbs_init`, `gibbs_step`, `contrastive_divergence`: two groups of units that are independent given each other;
- `anneal` (`anneal_init`, `anneal_step`, `anneal_result`): log Z with its standard error, by annealed importance
  sampling or sequential Monte Carlo;
- `resample`, `effective_sample_size`: of weighted particles.
"""

from massieu.inference.annealed import (
    AnnealHistory,
    AnnealResult,
    AnnealState,
    anneal,
    anneal_init,
    anneal_result,
    anneal_step,
)
from massieu.inference.gibbs import GibbsState, contrastive_divergence, gibbs_init, gibbs_step
from massieu.inference.langevin import (
    LangevinNoise,
    LangevinResult,
    LangevinState,
    langevin_init,
    langevin_noise,
    langevin_step,
)
from massieu.inference.resampling import effective_sample_size, resample

__all__ = [
    "AnnealHistory",
    "AnnealResult",
    "AnnealState",
    "GibbsState",
    "LangevinNoise",
    "LangevinResult",
    "LangevinState",
    "anneal",
    "anneal_init",
    "anneal_result",
    "anneal_step",
    "contrastive_divergence",
    "effective_sample_size",
    "gibbs_init",
    "gibbs_step",
    "langevin_init",
    "langevin_noise",
    "langevin_step",
    "resample",
]
