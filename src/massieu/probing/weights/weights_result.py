"""The attention weights of a model on a prompt or a batch, site by site."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import PurePath
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.errors import InputError
from massieu.foundation.arguments import whole_number
from massieu.foundation.doors import input_door
from massieu.foundation.printable import visible
from massieu.probing.weights.site_weights import SiteAttention, StrongWeight
from massieu.report.weights import draw_weights

SHOWN = 6
"""Attention modules that are written out."""
STRONGEST = 5
"""Weights that a notebook shows."""


@dataclass(frozen=True, eq=False)
class AttentionWeightsResult:
    """Attention weights by site, in the order in which the model computes them; ``result["layers.0.self_attn"]`` is one.

    Attributes:
        model: what the model is called.
        sites: the attention modules that were asked for.
        refused: modules whose attention could not be read, with the reason.
        layers_of: how many layers with self-attention each stack of the model has.
    """

    model: str
    sites: tuple[SiteAttention, ...]
    refused: dict[str, str]
    layers_of: dict[str, int]

    def __repr__(self) -> str:
        heads = sum(len(site.heads) for site in self.sites)
        modules = f"{len(self.sites)} attention modules" if len(self.sites) != 1 else "1 attention module"
        lines = [f"AttentionWeightsResult of {self.model}: {heads} heads of {modules}"]
        lines += [f"  {site!r}" for site in self.sites[:SHOWN]]
        if len(self.sites) > SHOWN:
            lines.append(f"  … {len(self.sites) - SHOWN} more")
        lines += [f"  not read: {name}, {reason}" for name, reason in list(self.refused.items())[:SHOWN]]
        return visible("\n".join(lines))

    def _repr_html_(self) -> str:
        rows = [
            f"<tr><td>{each.layer}</td><td>{each.head}</td><td>{escape(_token(each.query_token, each.query))}</td>"
            f"<td>{escape(_token(each.key_token, each.key))}</td><td>{each.weight:.3f}</td></tr>"
            for each in self.strongest(STRONGEST)
        ]
        heading = "<tr><th>layer</th><th>head</th><th>query</th><th>key</th><th>weight</th></tr>"
        return f"<pre>{escape(repr(self))}</pre><table>{heading}{''.join(rows)}</table>"

    def __getitem__(self, name: str) -> SiteAttention:
        for site in self.sites:
            if site.name == name:
                return site
        names = ", ".join(each.name for each in self.sites)
        raise KeyError(f"there are no weights of {name!r}; there are those of {names}")

    def __iter__(self) -> Iterator[SiteAttention]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def of_head(self, layer: int, head: int, site: str | None = None) -> Float[Tensor, "B L N"]:
        """The weights of one head.

        Args:
            site: name of the attention module, where a layer has several: an encoder, a decoder and its cross-attention.

        Raises:
            InputError: there are no weights of this head, or of several sites.
        """
        return self.site_of(layer, head, site).of_head(head)

    def site_of(self, layer: int, head: int, site: str | None = None) -> SiteAttention:
        """The site of one head, as `of_head` takes it."""
        of_layer = [each for each in self.sites if each.layer == layer]
        if not of_layer:
            layers = sorted({each.layer for each in self.sites})
            raise InputError(f"there are no weights of layer {layer}; there are those of layers {layers}")
        matches = [each for each in of_layer if site is None or each.name == site]
        names = ", ".join(each.name for each in of_layer)
        if not matches:
            raise InputError(f"layer {layer} has no attention site {site!r}; it has {names}")
        if len(matches) > 1:
            names = ", ".join(each.name for each in matches)
            raise InputError(f"layer {layer} has {len(matches)} attention sites; name one with site=: {names}")
        matches[0].of_head(head)  # raises where there are none
        return matches[0]

    def mean_distance(self) -> dict[str, Float[Tensor, " H"]]:
        """Mean distance in tokens between a query and the keys that it attends to, by site and head.

        See `SiteAttention.mean_distance`.
        """
        return {site.name: site.mean_distance() for site in self.sites}

    def rollout(self, stack: str | None = None) -> Float[Tensor, "B L L"]:
        """Attention rollout (Abnar and Zuidema 2020, section 3): ∏_l (Ā_l + 1)/2, with Ā_l the mean over layer l's heads.

        Rows are made to add up to 1 again, which matters where a sink takes a share. It treats each head's output as its
        mean of tokens, and knows nothing of values and feed-forward networks: it is no measure of what a token contributes.

        Args:
            stack: name of the stack of blocks, where the model has several, such as an encoder and a decoder.

        Raises:
            InputError: layers or heads are left out; a stack without self-attention; sequences of several lengths; weights
                that are no distribution.
        """
        sites = self._of_stack(stack)
        product: Tensor | None = None
        for site in sites:
            batch, _, length, _ = site.weights.shape
            mixed = (site.weights.mean(1).double() + torch.eye(length, dtype=torch.float64)) / 2
            mixed = mixed / mixed.sum(-1, keepdim=True)
            if product is not None and product.shape != mixed.shape:
                raise InputError(
                    f"rollout needs one length in all layers, and {site.name} has {batch} × {length} tokens"
                )
            product = mixed if product is None else mixed @ product
        assert product is not None
        return product.to(sites[0].weights.dtype)

    def _of_stack(self, stack: str | None) -> list[SiteAttention]:
        """The self-attention of one stack, whole."""
        self_attention = [site for site in self.sites if site.same_tokens]
        stacks = list(dict.fromkeys(site.stack for site in self_attention))
        if not self_attention:
            raise InputError("rollout needs self-attention, and there are weights of other attention alone")
        if stack is None and len(stacks) > 1:
            raise InputError(f"the model has several stacks; name one with stack=: {', '.join(map(repr, stacks))}")
        chosen = [site for site in self_attention if stack is None or site.stack == stack]
        if not chosen:
            raise InputError(f"there is no stack {stack!r}; there are {', '.join(map(repr, stacks))}")
        for site in chosen:
            if len(site.heads) != site.num_heads:
                raise InputError(f"rollout needs all {site.num_heads} heads of {site.name}, and has {len(site.heads)}")
            if site.no_distribution:
                raise InputError(f"rollout needs weights that add up to 1, and those of {site.name} do not")
        layers = sorted({site.layer for site in chosen})
        num_layers = self.layers_of[chosen[0].stack]
        if layers != list(range(num_layers)):
            raise InputError(f"rollout needs all {num_layers} layers, and has {layers}")
        return chosen

    @input_door(count=partial(whole_number, least=0))
    def strongest(self, count: int = 10, *, first: bool = True) -> list[StrongWeight]:
        """The largest weights of all heads, the largest first, with their tokens.

        Queries that see a single key are left out, as their weight is 1 whatever a head does, and so are weights of NaN.

        Args:
            first: whether weights on the first token of a sequence are among them; in many models they are the largest.
        """
        candidates = (weight for site in self.sites for weight in site.strongest(count, first=first))
        return heapq.nlargest(count, candidates, key=lambda each: each.weight)

    @input_door(row=partial(whole_number, least=0))
    def plot(
        self,
        layer: int | None = None,
        head: int | None = None,
        *,
        site: str | None = None,
        row: int = 0,
        ax: Any = None,
    ) -> Any:
        """A picture of one head's weights: queries from top to bottom, keys from left to right, tokens beside them.

        Args:
            layer, head: may be left out where there are weights of one head alone.
            site: as for `of_head`.
            row: which sequence of the batch.
            ax: axes of matplotlib to draw in; None makes a new figure.

        Returns:
            The axes, whose ``figure`` has ``savefig``.

        Raises:
            InputError: as `of_head`; no head is named and there are several; no such row.
            MissingExtraError: matplotlib is not installed.
        """
        if layer is None or head is None:
            if len(self.sites) != 1 or len(self.sites[0].heads) != 1:
                raise InputError("there are weights of several heads; name one with layer= and head=")
            layer = self.sites[0].layer
            head = self.sites[0].heads[0]
        attention = self.site_of(layer, head, site)
        rows = len(attention.weights)
        if row >= rows:
            raise InputError(f"row must be a number from 0 to {rows - 1}, got {row!r}")
        query_tokens = None if attention.query_tokens is None else attention.query_tokens[row]
        key_tokens = None if attention.key_tokens is None else attention.key_tokens[row]
        title = f"{PurePath(self.model).name}: layer {layer}, head {head}"
        return draw_weights(attention.of_head(head)[row].numpy(), query_tokens, key_tokens, title, ax)


def _token(text: str | None, place: int) -> str:
    """A token with its place, or the place alone."""
    return f"{place}" if text is None else f"{visible(text)} ({place})"
