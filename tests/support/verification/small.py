"""The smallest settings with which an expensive claim still holds and still notices what is wrong: for the fast tests.

A claim that is not named here takes about a tenth of a second with its own settings, or has none. The slow tests check every
claim with its own settings.
"""

SMALL: dict[str, dict[str, int | float | str]] = {
    "B4": {"units": 5, "patterns": 3, "networks": 40},
    "B5": {"cases": 100, "atoms": 4, "dimensions": 3},
    "B8": {"chains": 4000, "sweeps": 20},
    "B9": {"samples": 20_000},
    "B12": {"n": 5, "d": 3, "queries": 2},
    "B13": {"spins": 5},
    "B15": {"spins": 3, "components": 3, "draws": 10},
    "B16": {"spins": 3, "components": 4, "draws": 30},
    "B17": {"features": 8, "estimates": 300, "atoms": 3},
    "B20": {"draws": 4, "steps": 40, "memories": 3, "dimensions": 3},
    "N2": {"patterns": 5, "dimensions": 3, "draws": 20},
    "N5": {"draws": 5},
    "N6": {"laws": 20, "dimensions": 2},
    "N8": {"tokens": 10, "nodes": 401},
    "N11": {"draws": 20, "keys": 6, "dimensions": 4},
    "N23": {"draws": 5},
    "S9": {"atoms": 6, "draws": 3},
    "S13": {"dimensions": 2, "repetitions": 200, "layers": 20},
    "S15": {"N": 32, "repetitions": 2000},
    "S19": {"tokens": 4, "resamples": 5000},
    "S20": {"particles": 5000, "repetitions": 250, "populations": 2000},
    "X1": {"keys": 3000, "repetitions": 20},
    "X2": {"keys": 500, "repetitions": 400},
    "X5": {"layers": 4, "draws": 5},
    "Z6": {"repetitions": 20},
    "Z7": {"keys": 5000, "repetitions": 200},
    "Z8": {"repetitions": 150},
    "Z9": {"repetitions": 250},
    "Z10": {"pairs": 1000, "repetitions": 60},
}
