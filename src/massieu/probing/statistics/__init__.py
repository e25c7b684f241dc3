"""What the probe measures: a file for each group of statistics, which are listed in the order of `GROUPS`."""

from importlib import import_module

from massieu.probing.statistics.registry import GROUPS

for _group in GROUPS:
    import_module(f"{__name__}.{_group}")
