"""Small models trained where the truth is known: the studies that the papers call for, each with a verdict.

`study` is read first: what an experiment is, what its seeds gave, and what that allows to say. `criterion` has thresholds,
which stand before a run, and intervals over seeds. `training` is the one loop over steps, `run` the one over seeds. Each
experiment is a file with one function: from a seed to numbers.
"""
