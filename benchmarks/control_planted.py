"""Whether what is planted in a model is found, and alone.

`python benchmarks/control_planted.py 60 planted.jsonl` plants one head in each of 60 small decoders, and in 10 of MiniLM's
shape, for every kind in `KINDS`. A head is planted in a layer and place that go round, and asked for by one statistic that was
chosen beforehand: it is found if a head's number differs at a false discovery rate of 5 % and by the smallest effect, and alone
if no other head's does. One line is written for each run; a run that is there is not done again. Five minutes.
"""

import json
import sys
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from transformers import BertModel, GPT2Config, GPT2LMHeadModel

import massieu
from control_models import CHARACTERS, LENGTH, random_model, tokens
from massieu.probing.data.documents import reference_documents
from massieu.probing.data.text import TextBatches
from massieu.probing.model.model import load_model

LAYERS, HEADS, WIDTH, WINDOWS = 2, 4, 64, 40
STEPS, TRAINED = 250, 4
MINILM_RUNS = 10
Place = tuple[int, int]


def main() -> None:
    """Do the runs that are missing, and print how many heads were found."""
    torch.set_num_threads(1)
    number, path = int(sys.argv[1]), Path(sys.argv[2])
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(row["kind"], row["seed"]) for row in rows}
    with path.open("a") as file:
        for kind, planted_and_named in KINDS.items():
            for seed in range(MINILM_RUNS if "MiniLM" in kind else number):
                if (kind, seed) in done:
                    continue
                planted, named = planted_and_named(seed)
                rows.append({"kind": kind, "seed": seed, "planted": planted, "named": named})
                file.write(json.dumps(rows[-1]) + "\n")
                file.flush()
                print(rows[-1], flush=True)
    for kind in KINDS:
        of_kind = [
            (tuple(row["planted"]), [tuple(each) for each in row["named"]]) for row in rows if row["kind"] == kind
        ]
        found = sum(planted in named for planted, named in of_kind)
        alone = sum(named == [planted] for planted, named in of_kind)
        print(f"{kind}: found in {found} of {len(of_kind)}, alone in {alone}")


# --- what is planted, and what is named --------------------------------------------------------------------------------


def place_of(seed: int) -> Place:
    """Every layer and head in turn."""
    return seed % LAYERS, seed // LAYERS % HEADS


def first_token(seed: int) -> tuple[Place, list[Place]]:
    """A head that attends to the first token, in a random decoder."""
    model = random_decoder(seed)
    layer, head = place_of(seed)
    query, key = slices(head)
    attention = model.h[layer].attn.c_attn
    plant_first(attention.weight, attention.bias, query, key, model.wpe.weight[0])
    return (layer, head), named_beside_random_models(model, small_text(seed), "weight_first", seed)


def previous_token(seed: int) -> tuple[Place, list[Place]]:
    """A head that attends to the previous token, in a random decoder."""
    model = random_decoder(seed)
    layer, head = place_of(seed)
    plant_previous(model, layer, head)
    return (layer, head), named_beside_random_models(model, small_text(seed), "weight_previous", seed)


@torch.no_grad()
def copied(seed: int) -> tuple[Place, list[Place]]:
    """A trained head in a random decoder, with the embeddings that it reads: in layer 0, the one of the most weight on the
    previous token."""
    trained, model = trained_decoder(seed % TRAINED), random_decoder(seed)
    weights = massieu.probe(trained, small_text(seed), statistics=["weight_previous"], draws=0).matrix(
        "weight_previous"
    )
    head = int(weights[0].argmax())
    for name in ("wte", "wpe"):
        getattr(model, name).load_state_dict(getattr(trained, name).state_dict())
    own, other = model.h[0], trained.h[0]
    own.ln_1.load_state_dict(other.ln_1.state_dict())
    for part in slices(head, parts=3):
        own.attn.c_attn.weight[:, part] = other.attn.c_attn.weight[:, part]
        own.attn.c_attn.bias[part] = other.attn.c_attn.bias[part]
    (written, *_) = slices(head)
    own.attn.c_proj.weight[written] = other.attn.c_proj.weight[written]
    return (0, head), named_beside_random_models(model, small_text(seed), "weight_previous", seed)


@torch.no_grad()
def uniform(seed: int) -> tuple[Place, list[Place]]:
    """A head without queries in the last layer of a trained decoder, beside the decoder itself."""
    before = trained_decoder(seed % TRAINED)
    model, head = deepcopy(before), seed // TRAINED % HEADS
    query, _ = slices(head)
    model.h[-1].attn.c_attn.weight[:, query] = 0.0
    model.h[-1].attn.c_attn.bias[query] = 0.0
    return (LAYERS - 1, head), named_beside(before, model, small_text(seed), "entropy_fraction")


@torch.no_grad()
def first_token_in_minilm(seed: int) -> tuple[Place, list[Place]]:
    """A head that attends to the first token, in the first layer of a random encoder of MiniLM's shape."""
    torch.manual_seed(20_000 + seed)
    model, batches = BertModel(load_model().module.config).eval(), minilm_text(seed, 16)
    head = seed % model.config.num_attention_heads
    first = model.embeddings(input_ids=batches[0]["input_ids"][:1, :1])[0, 0]
    attention = model.encoder.layer[0].attention.self
    size = attention.attention_head_size
    rows = slice(head * size, (head + 1) * size)
    for linear, weight, bias in (
        (attention.query, torch.zeros(len(first), size), 40 * unit(size)),
        (attention.key, (first / first.norm())[:, None] * unit(size), torch.zeros(size)),
    ):
        linear.weight[rows] = weight.mT
        linear.bias[rows] = bias
    return (0, head), named_beside_random_models(model, batches, "weight_first", seed)


@torch.no_grad()
def uniform_in_minilm(seed: int) -> tuple[Place, list[Place]]:
    """A head without queries in MiniLM's last layer, beside MiniLM itself."""
    before = load_model().module
    model, batches = deepcopy(before), minilm_text(seed, 64)
    attention, head = model.encoder.layer[-1].attention.self, seed % model.config.num_attention_heads
    rows = slice(head * attention.attention_head_size, (head + 1) * attention.attention_head_size)
    attention.query.weight[rows] = 0.0
    attention.query.bias[rows] = 0.0
    return (len(model.encoder.layer) - 1, head), named_beside(before, model, batches, "entropy_fraction")


KINDS: dict[str, Callable[[int], tuple[Place, list[Place]]]] = {
    "first token, random decoder": first_token,
    "previous token, random decoder": previous_token,
    "copy of a trained head, random decoder": copied,
    "uniform head, trained decoder": uniform,
    "first token, random MiniLM": first_token_in_minilm,
    "uniform head, MiniLM": uniform_in_minilm,
}


def named_beside_random_models(model: Any, batches: list[Any], name: str, seed: int) -> list[Place]:
    """Heads that differ from random models."""
    result = massieu.probe(model, batches, statistics=["attention"], seed=seed)
    value, law, q = (result.matrix(f"{name}{part}") for part in ("", "/reinitialised", "/q_value"))
    statistic = next(each for each in result.run.statistics if each.name == name)
    cells = (statistic.matters(value, law) & (q < 0.05)).nonzero()
    return [(int(layer), int(head)) for layer, head in zip(*cells, strict=True)]


def named_beside(before: Any, model: Any, batches: list[Any], name: str) -> list[Place]:
    """Heads that differ from those of the model before something was planted."""
    found = massieu.compare(before, model, data=batches, statistics=[name], draws=0).named()
    return sorted((row["layer"], row["head"]) for row in found.iter_rows(named=True) if row["scope"] == "head")


# --- models, texts and weights -----------------------------------------------------------------------------------------


def random_decoder(seed: int) -> Any:
    """A freshly initialised decoder."""
    torch.manual_seed(20_000 + seed)
    return random_model("gpt2", LAYERS, HEADS, WIDTH)


@cache
@torch.enable_grad()
def trained_decoder(seed: int) -> Any:
    """A decoder that has learned to predict the next character of an English text, a little."""
    torch.manual_seed(30_000 + seed)
    size = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": LENGTH, "vocab_size": CHARACTERS}
    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=None, eos_token_id=None))
    text = torch.tensor(list("\n".join(topics.topics.values()).encode("ascii", "ignore")))
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        starts = torch.randint(len(text) - LENGTH, (32, 1), generator=generator)
        windows = text[starts + torch.arange(LENGTH)]
        optimiser.zero_grad()
        model(input_ids=windows, labels=windows).loss.backward()
        optimiser.step()
    return model.transformer.eval()


def small_text(seed: int) -> list[dict[str, torch.Tensor]]:
    """Windows of characters."""
    return tokens(seed, WINDOWS, True)


def minilm_text(seed: int, windows: int) -> list[dict[str, torch.Tensor]]:
    """Windows of 48 tokens, of another part of Python's help for each seed."""
    limit, size = 48 * windows * MINILM_RUNS, 8
    batches = list(TextBatches(load_model().tokenizer, reference_documents, window=48, limit=limit, batch_size=size))
    return [dict(batch.inputs) for batch in batches[seed * windows // size : (seed + 1) * windows // size]]


def slices(head: int, parts: int = 2) -> list[slice]:
    """Where a head's queries, keys and values are in the decoder's one map of all three."""
    size = WIDTH // HEADS
    return [slice(part * WIDTH + head * size, part * WIDTH + (head + 1) * size) for part in range(parts)]


def unit(size: int) -> torch.Tensor:
    """The first unit vector."""
    direction = torch.zeros(size)
    direction[0] = 1.0
    return direction


@torch.no_grad()
def plant_first(weight: torch.Tensor, bias: torch.Tensor, query: slice, key: slice, first: torch.Tensor) -> None:
    """Every query asks for one direction, which the vector of the first position alone gives."""
    direction = unit(query.stop - query.start)
    weight[:, query] = 0.0
    bias[query] = 40 * direction
    weight[:, key] = (first / first.norm())[:, None] * direction
    bias[key] = 0.0


@torch.no_grad()
def plant_previous(model: Any, layer: int, head: int) -> None:
    """Keys are codes of their positions, and queries of the positions before theirs."""
    attention = model.h[layer].attn.c_attn
    query, key = slices(head)
    positions = model.wpe.weight
    positions = positions / positions.norm(dim=1, keepdim=True) * WIDTH**0.5 / 2**0.5
    codes = torch.randn(len(positions), WIDTH // HEADS)
    codes = codes / codes.norm(dim=1, keepdim=True)
    inverse = positions.mT @ torch.linalg.inv(positions @ positions.mT + 3 * torch.eye(len(positions)))
    attention.weight[:, query] = 60 * inverse @ codes.roll(1, dims=0)
    attention.weight[:, key] = 8 * inverse @ codes
    attention.bias[query] = 0.0
    attention.bias[key] = 0.0


if __name__ == "__main__":
    main()
