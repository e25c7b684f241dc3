"""How often a model that has learned nothing is announced: random models, probed as if they were trained.

`python benchmarks/control_models.py 200 models.jsonl` probes 200 small random models of three kinds, of several shapes, on
text and on random tokens, in 40 to 400 windows, and counts the runs with a card and with a verdict of each question. One line
is written for each run, and a run that is there is not done again. Ten minutes.
"""

import json
import random
import sys
import time
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, ViTConfig, ViTModel

import massieu
from massieu.probing.result.result import ProbeResult

CHARACTERS = 128
LENGTH = 24
QUESTIONS = ("memory", "conditional_mean", "joint", "uncertainty", "metric", "flow", "residual", "symmetry")
"""Groups that every fourth run has beside the usual statistics."""


def main() -> None:
    """Probe the random models that are missing and write what was announced."""
    number, path = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    done = {json.loads(line)["seed"] for line in path.read_text().splitlines()} if path.exists() else set()
    with path.open("a") as file:
        for seed in sorted(set(range(number)) - done):
            started = time.process_time()
            run = announced(*random_run(seed)) | {"seed": seed, "seconds": round(time.process_time() - started, 2)}
            file.write(json.dumps(run) + "\n")
            file.flush()
            print(run, flush=True)


def random_run(seed: int, questions: bool = True) -> tuple[ProbeResult, bool]:
    """The result of one random model, and whether its questions were measured, as they are of every fourth if wanted."""
    drawn = random.Random(seed)
    kind, layers, heads = drawn.choice(("gpt2", "bert", "vit")), drawn.choice((1, 2, 3)), drawn.choice((2, 4, 8))
    windows, as_text, asked = drawn.choice((40, 80, 160, 400)), drawn.random() < 0.5, questions and seed % 4 == 0
    torch.manual_seed(10_000 + seed)
    batches = images(seed, windows) if kind == "vit" else tokens(seed, windows, as_text)
    groups = ["attention", "values", "climb", "maps", "expansion", *(QUESTIONS if asked else ())]
    return massieu.probe(random_model(kind, layers, heads), batches, statistics=groups, seed=seed), asked


def random_model(kind: str, layers: int, heads: int, width: int = 32) -> Any:
    """A freshly initialised model of a few thousand weights."""
    if kind == "gpt2":
        size = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": LENGTH, "vocab_size": CHARACTERS}
        return GPT2Model(GPT2Config(**size, bos_token_id=None, eos_token_id=None)).eval()
    size = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    size |= {"intermediate_size": 2 * width}
    if kind == "bert":
        return BertModel(BertConfig(**size, vocab_size=CHARACTERS, max_position_embeddings=LENGTH)).eval()
    return ViTModel(ViTConfig(**size, image_size=20, patch_size=4, num_channels=1)).eval()


def tokens(seed: int, windows: int, as_text: bool, batch: int = 8) -> list[dict[str, torch.Tensor]]:
    """Windows of one English text, character by character, or of characters drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    text = "\n".join(topics.topics.values()).encode("ascii", "ignore")
    start = int(torch.randint(len(text) - windows * LENGTH, (), generator=generator))
    ids = torch.tensor(list(text[start : start + windows * LENGTH]))
    if not as_text:
        ids = torch.randint(CHARACTERS, ids.shape, generator=generator)
    return [{"input_ids": rows} for rows in ids.view(windows, LENGTH).split(batch)]


def images(seed: int, windows: int, batch: int = 8) -> list[dict[str, torch.Tensor]]:
    """Images of smooth noise."""
    noise = torch.randn(windows, 1, 5, 5, generator=torch.Generator().manual_seed(seed))
    pixels = torch.nn.functional.interpolate(noise, size=(20, 20), mode="bilinear")
    return [{"pixel_values": rows} for rows in pixels.split(batch)]


def announced(result: ProbeResult, asked: bool) -> dict[str, Any]:
    """Which cards and questions of a run are announced, and how many of its tests have q < 0.05."""
    q_values = result.heads.filter(result.heads["statistic"].str.ends_with("/q_value"))["value"].drop_nulls()
    named = {question.group: sum(each.named for each in question.answers) for question in result.questions}
    cards = [finding.id for finding in result.findings if finding.value is not None]
    found = {"cards": cards, "tests": len(q_values), "named": int((q_values < 0.05).sum())}
    return found | ({"questions": named} if asked else {})


if __name__ == "__main__":
    main()
