"""How attention sites are called in a monitor's records."""

from collections import Counter
from collections.abc import Sequence

from massieu.probing.capture.sites import SiteInfo, stack_of


def places(sites: Sequence[SiteInfo]) -> list[str]:
    """``layer3``; with the stack before it where there are several, and the kind or the module behind it where layers have
    several sites.
    """
    stacks = [_stack_name(site) for site in sites]
    has_several_stacks = len(set(stacks)) > 1
    layers: list[str] = []
    for site, stack in zip(sites, stacks, strict=True):
        layer = f"layer{site.layer}"
        layers.append(f"{stack}/{layer}" if has_several_stacks and stack else layer)
    num_of_layer = Counter(layers)
    kinds: list[str] = []
    for site, layer in zip(sites, layers, strict=True):
        kinds.append(f"{layer}/{site.kind}" if num_of_layer[layer] > 1 else layer)
    num_of_kind = Counter(kinds)
    names: list[str] = []
    for site, layer, kind in zip(sites, layers, kinds, strict=True):
        name = kind
        if num_of_kind[kind] > 1:
            module = site.site.name.rsplit(".", 1)[-1].replace(" ", "_")
            name = f"{layer}/{module}"
        while name in names:
            name += "_"
        names.append(name)
    return names


def layer_place(place: str, info: SiteInfo) -> str:
    """The name of a site's layer, from the place of the site: with the stack, without kind and module."""
    stack = place.partition("layer")[0]
    return f"{stack}layer{info.layer}"


def _stack_name(site: SiteInfo) -> str:
    """Where the stack is in the model, without the name of the list that it is: ``encoder`` of ``encoder.layer``."""
    return stack_of(site.block).rpartition(".")[0].replace(".", "/")
