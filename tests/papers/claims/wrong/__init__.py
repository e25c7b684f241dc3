"""What a wrong library does to the claims: `WRONG` names the claim, the part of the library, and what is put in its place."""

from tests.papers.claims.wrong import (
    conditional_mean,
    energy_transformer,
    engine,
    equilibrium,
    exchangeability,
    flow,
    machines,
    mixtures,
    of_the_library,
    population,
    shim,
    smoothing,
    spherical_spins,
    spins,
)

_PARTS = (
    conditional_mean, energy_transformer, engine, equilibrium, exchangeability, flow, machines, mixtures,
    of_the_library, population, shim, smoothing, spherical_spins, spins,
)  # fmt: skip
WRONG = {case: row for part in _PARTS for case, row in part.WRONG.items()}
assert len(WRONG) == sum(len(part.WRONG) for part in _PARTS), "two cases share a name"
