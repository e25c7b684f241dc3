"""Whether what is planted in a random model is found, and alone.

`python benchmarks/control_planted.py 42` plants one head in each of 42 small random decoders, in turn one that attends to the
first token and one that attends to the previous one, and counts the runs in which it is announced or named, and no other head.
"""

import json
import sys
from typing import Any

import torch

import massieu
from control_models import random_model, tokens

LAYERS, HEADS, WIDTH, WINDOWS = 2, 4, 64, 40


def main() -> None:
    """Plant a head in each of so many models."""
    torch.set_num_threads(1)
    found = {"first token": [0, 0, 0], "previous token": [0, 0, 0]}
    for seed in range(int(sys.argv[1])):
        kind = ("first token", "previous token")[seed % 2]
        torch.manual_seed(20_000 + seed)
        model = random_model("gpt2", LAYERS, HEADS, WIDTH)
        layer, head = seed // 2 % LAYERS, seed // 4 % HEADS
        (plant_first if kind == "first token" else plant_previous)(model, layer, head)
        name = "weight_first" if kind == "first token" else "weight_previous"
        result = massieu.probe(model, tokens(seed, WINDOWS, True), statistics=["attention", "expansion"], seed=seed)
        named = differ(result, name)
        found[kind][0] += 1
        found[kind][1] += (layer, head) in named
        found[kind][2] += named == [(layer, head)]
        print(kind, (layer, head), named, [card.id for card in result.findings if card.value is not None], flush=True)
    print(json.dumps(found))


def differ(result: massieu.ProbeResult, name: str) -> list[tuple[int, int]]:
    """Heads whose number differs from random models', at a false discovery rate of 5 % and by the smallest effect."""
    value, law, q = (result.matrix(f"{name}{part}") for part in ("", "/reinitialised", "/q_value"))
    statistic = next(each for each in result.run.statistics if each.name == name)
    cells = (statistic.matters(value, law) & (q < 0.05)).nonzero()
    return [(int(layer), int(head)) for layer, head in zip(*cells, strict=True)]


def parts(model: Any, layer: int, head: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights and biases of one head's queries, and of its keys."""
    attention, size = model.h[layer].attn.c_attn, WIDTH // HEADS
    places = [slice(part * WIDTH + head * size, part * WIDTH + (head + 1) * size) for part in (0, 1)]
    weights = [each for place in places for each in (attention.weight[:, place], attention.bias[place])]
    return tuple(weights)  # pyright: ignore[reportReturnType]


@torch.no_grad()
def plant_first(model: Any, layer: int, head: int) -> None:
    """Every query asks for one direction, which the position vector of the first token alone gives."""
    query, query_bias, key, key_bias = parts(model, layer, head)
    direction = torch.zeros(WIDTH // HEADS)
    direction[0] = 1.0
    first = model.wpe.weight[0] / model.wpe.weight[0].norm()
    query.zero_()
    query_bias.copy_(40 * direction)
    key.copy_(first[:, None] * direction)
    key_bias.zero_()


@torch.no_grad()
def plant_previous(model: Any, layer: int, head: int) -> None:
    """Keys are codes of their positions, and queries of the positions before theirs."""
    query, query_bias, key, key_bias = parts(model, layer, head)
    positions = model.wpe.weight
    positions = positions / positions.norm(dim=1, keepdim=True) * WIDTH**0.5 / 2**0.5
    codes = torch.randn(len(positions), WIDTH // HEADS)
    codes = codes / codes.norm(dim=1, keepdim=True)
    inverse = positions.mT @ torch.linalg.inv(positions @ positions.mT + 3 * torch.eye(len(positions)))
    query.copy_(60 * inverse @ codes.roll(1, dims=0))
    key.copy_(8 * inverse @ codes)
    query_bias.zero_()
    key_bias.zero_()


if __name__ == "__main__":
    main()
