"""Samplers: each is an `init` and a `step` on plain functions, and takes its noise or generator as an argument.

- `langevin_init`, `langevin_noise`, `langevin_step`: Langevin dynamics with Metropolis correction;
- `gibbs_init`, `gibbs_step`, `contrastive_divergence`: two groups of units that are independent given each other;
- `anneal`: log Z with its standard error, by annealed importance sampling or sequential Monte Carlo;
- `evidence_bounds`: the ELBO and the importance-weighted bound of log Z, with their standard errors;
- `resample`, `effective_sample_size`: of weighted particles.
"""

from massieu.inference.annealed import anneal
from massieu.inference.evidence import evidence_bounds
from massieu.inference.gibbs import contrastive_divergence, gibbs_init, gibbs_step
from massieu.inference.langevin import langevin_init, langevin_noise, langevin_step
from massieu.inference.resampling import effective_sample_size, resample

__all__ = [
    "anneal",
    "contrastive_divergence",
    "effective_sample_size",
    "evidence_bounds",
    "gibbs_init",
    "gibbs_step",
    "langevin_init",
    "langevin_noise",
    "langevin_step",
    "resample",
]


def __dir__() -> list[str]:
    return __all__
