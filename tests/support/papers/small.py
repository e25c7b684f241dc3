"""The smallest settings with which an expensive claim still holds and still notices what is wrong: for the fast tests.

A claim that is not named here takes about a tenth of a second with its own settings, or has none. The slow tests check every
claim with its own settings.
"""

SMALL: dict[str, dict[str, int | float | str]] = {
    "B4": {"units": 4, "patterns": 2, "networks": 20},
    "B5": {"cases": 50, "atoms": 3, "dimensions": 2},
    "B8": {"chains": 2000, "sweeps": 20},
    "B9": {"samples": 20_000},
    "B12": {"n": 4, "d": 2, "queries": 2},
    "B13": {"spins": 3},
    "B15": {"spins": 2, "components": 3, "draws": 3},
    "B16": {"spins": 3, "components": 4, "draws": 30},
    "B17": {"features": 4, "estimates": 200, "atoms": 3},
    "B20": {"draws": 2, "steps": 20, "memories": 2, "dimensions": 2},
    "N1": {"draws": 3, "tokens": 4, "dimensions": 3, "heads": 2, "memories": 4},
    "N2": {"patterns": 5, "dimensions": 3, "draws": 20},
    "N5": {"draws": 5},
    "N6": {"laws": 20, "dimensions": 2},
    "N8": {"tokens": 10, "nodes": 401},
    "N11": {"draws": 20, "keys": 6, "dimensions": 4},
    "N23": {"draws": 5},
    "S2": {"draws": 5, "samples": 5000},
    "S9": {"atoms": 5, "draws": 2, "dimensions": 2},
    "S13": {"dimensions": 2, "repetitions": 200, "layers": 20},
    "S15": {"N": 32, "repetitions": 2000},
    "S19": {"tokens": 3, "resamples": 2000, "dimensions": 2},
    "S20": {"particles": 5000, "repetitions": 250, "populations": 2000},
    "X1": {"keys": 3000, "repetitions": 20},
    "X2": {"keys": 500, "repetitions": 400},
    "X5": {"layers": 3, "draws": 3},
    "X6": {"draws": 50, "dimensions": 2},
    "Z6": {"repetitions": 20},
    "Z7": {"keys": 5000, "repetitions": 200},
    "Z8": {"repetitions": 150},
    "Z9": {"repetitions": 250},
    "Z10": {"pairs": 1000, "repetitions": 60},
}
