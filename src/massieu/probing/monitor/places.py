"""How attention sites are called in a monitor's records."""

from collections import Counter
from collections.abc import Sequence

from massieu.probing.capture.sites import SiteInfo, stack_of


def places(sites: Sequence[SiteInfo]) -> list[str]:
    """``layer3``; with the stack before it where there are several, and the kind or the module behind it where layers have
    several sites.
    """
    stacks = {site.index: _stack_name(site) for site in sites}
    several = len(set(stacks.values())) > 1
    layers = {
        site.index: f"{stacks[site.index]}/layer{site.layer}"
        if several and stacks[site.index]
        else f"layer{site.layer}"
        for site in sites
    }
    shared = Counter(layers.values())
    named = {
        site.index: f"{layers[site.index]}/{site.kind}" if shared[layers[site.index]] > 1 else layers[site.index]
        for site in sites
    }
    alike = Counter(named.values())
    found: list[str] = []
    for site in sites:
        name = named[site.index]
        if alike[name] > 1:
            name = f"{layers[site.index]}/{site.site.name.rsplit('.', 1)[-1].replace(' ', '_')}"
        while name in found:
            name += "_"
        found.append(name)
    return found


def _stack_name(site: SiteInfo) -> str:
    """Where the stack is in the model, without the name of the list that it is: ``encoder`` of ``encoder.layer``."""
    return stack_of(site.block).rpartition(".")[0].replace(".", "/")
