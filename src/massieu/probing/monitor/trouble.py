"""The sentence that names every head whose numbers are not finite, however many there are."""

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby

from massieu.probing.model.checkpoint import shortened
from massieu.probing.monitor.site_numbers import SiteNumbers

SHOWN = 5
"""So many groups of heads are named after the first; of the others, how many there are."""


def trouble(sites: Sequence[SiteNumbers], broken: Mapping[str, Collection[int]]) -> str:
    """Where the forward pass first met what is not finite, with what it is, and then which other heads are not finite.

    Args:
        sites: all sites in the order of the forward pass.
        broken: the heads to be named, by the place of their site; at least one.
    """
    first = next(site for site in sites if broken[site.place])
    module = first.module or "the model"
    sentence = f"{first.place} {_heads(first, broken)} ({module}) has {first.first_nonfinite}"
    behind = sites[sites.index(first) + 1 :]
    groups: list[str] = []
    for heads, group in groupby(behind, lambda site: _heads(site, broken)):
        if not heads:
            continue
        places = [site.place for site in group]
        range_of_places = f"{places[0]} to {places[-1]}" if len(places) > 1 else places[0]
        groups.append(f"{range_of_places} {heads}")
    return f"{sentence}; not finite either: {shortened(groups, SHOWN)}" if groups else sentence


def _heads(site: SiteNumbers, broken: Mapping[str, Collection[int]]) -> str:
    """Such as ``head 2``, ``heads 0-3, 5`` or ``all 12 heads``; empty without one."""
    heads = sorted(broken[site.place])
    if not heads:
        return ""
    if len(heads) == site.heads > 1:
        return f"all {site.heads} heads"
    # Heads that follow each other have the same distance from their position in the list.
    runs = [[head for _, head in run] for _, run in groupby(enumerate(heads), lambda entry: entry[1] - entry[0])]
    numbers = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"{'heads' if len(heads) > 1 else 'head'} {numbers}"
