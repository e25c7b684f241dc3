"""The largest numbers of all heads on one prompt, ranked; the weights of one site at a time are held."""

import heapq
import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.probing.model.given import Model
from massieu.probing.weights.site_weights import SiteAttention, StrongWeight
from massieu.probing.weights.weights_reading import WeightsReading

RANKED = 10
"""Heads that are listed for each number."""


@dataclass(frozen=True)
class HeadNumber:
    """One number of one head."""

    site: str
    layer: int
    head: int
    value: float


@dataclass(frozen=True)
class PromptSummary:
    """The largest numbers of a prompt, the largest first, each of another head.

    Attributes:
        model: what the model is called.
        tokens: in the prompt, special ones included.
        heads: of all attention sites.
        refused: modules whose attention could not be read, with the reason.
        has_several_sites: a layer's number does not name its attention module, as of an encoder and a decoder.
        weights: the largest weight of a head, on another token than the first.
        on_first: mean weight on the first token.
        distance: mean distance in tokens between query and key.
    """

    model: str
    tokens: int
    heads: int
    refused: dict[str, str]
    has_several_sites: bool
    weights: list[StrongWeight]
    on_first: list[HeadNumber]
    distance: list[HeadNumber]


@torch.inference_mode(False)
def summarise_prompt(model: Model, prompt: Any, tokenizer: Any = None) -> PromptSummary:
    """The largest numbers of all heads on one prompt; as for `massieu.attention_weights`."""
    reading = WeightsReading.create(model, prompt, tokenizer)
    weights: list[StrongWeight] = []
    on_first: list[HeadNumber] = []
    distance: list[HeadNumber] = []

    def receive(site: SiteAttention) -> None:
        weights.extend(site.strongest_of_each_head(first=False))
        on_first.extend(_numbers(site, site.weight_on_first()))
        distance.extend(_numbers(site, site.mean_distance()))

    reading.read(reading.chosen(None, None), receive)
    return PromptSummary(
        model=reading.name,
        tokens=reading.inputs["input_ids"].shape[1],
        heads=sum(info.heads for info in reading.sites),
        refused=reading.refused,
        has_several_sites=len({info.layer for info in reading.sites}) < len(reading.sites),
        weights=heapq.nlargest(RANKED, weights, key=lambda each: each.weight),
        on_first=heapq.nlargest(RANKED, on_first, key=lambda each: each.value),
        distance=heapq.nlargest(RANKED, distance, key=lambda each: each.value),
    )


def _numbers(site: SiteAttention, values: Float[Tensor, " H"]) -> list[HeadNumber]:
    """What is known of each head; NaN is not."""
    pairs = zip(site.heads, values.tolist(), strict=True)
    return [HeadNumber(site.name, site.layer, head, value) for head, value in pairs if not math.isnan(value)]
