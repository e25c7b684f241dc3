"""Prompts whose next word has an exact law, for language models of one's own: how far the model is from it, in bits."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from massieu.errors import InputError
from massieu.papers.experiments.tasks import BIT
from massieu.posteriors import DirichletMultinomial
from massieu.report.encode import encodable
from massieu.storage.writing import write_whole

NextWord = Callable[[Int[Tensor, "1 L"]], Float[Tensor, "1 L V"]]
"""From the tokens of one prompt to logits of the token after each."""
_NAMES = ("Anna", "Ben", "Carol", "David", "Emma", "Frank")
_COLOURS = ("red", "blue", "green", "black", "white", "yellow")
_DRAWS = 24
PROMPTS = 50
"""Of each task."""


@dataclass(frozen=True)
class Prompt:
    """Words, and at some places between them the exact law of the word that follows.

    Attributes:
        candidates: The words that may follow.
        places: How many words come before each place, and log p of each candidate there, in nats.
    """

    words: tuple[str, ...]
    candidates: tuple[str, ...]
    places: tuple[tuple[int, Float[Tensor, " C"]], ...]


@dataclass(frozen=True)
class PromptReading:
    """How far a model is from the exact law after so many examples; means over prompts, in bits.

    Attributes:
        seen: How many examples came before.
        divergence: KL(exact ‖ model), the model's law over the candidates alone.
        of_uniform: KL(exact ‖ uniform over the candidates): of a model that does not read its prompt.
        entropy_error: |entropy of the model's law − that of the exact one|, the figure of arXiv 2512.22471.
        mass: What the model gives to the candidates together; the rest goes to other words.
    """

    task: str
    seen: int
    divergence: float
    of_uniform: float
    entropy_error: float
    mass: float


def elimination(drawn: torch.Generator) -> Prompt:
    """Six people hold balls of six colours: a colour that was told is nobody else's, the others are equally likely."""
    holders, colours = (torch.randperm(6, generator=drawn).tolist() for _ in range(2))
    words = [f"{', '.join(_NAMES)} each hold one ball. The balls are {', '.join(_COLOURS)}; no two are alike.\n"]
    places = []
    for told, (holder, colour) in enumerate(zip(holders, colours, strict=True)):
        words.append(f"{_NAMES[holder]}:")
        left = torch.tensor([0.0 if c in colours[told:] else -math.inf for c in range(6)], dtype=torch.float64)
        places.append((len(words), left.log_softmax(0)))
        words += [f" {_COLOURS[colour]}", "\n"]
    return Prompt(tuple(words), tuple(f" {colour}" for colour in _COLOURS), tuple(places))


def urn(drawn: torch.Generator) -> Prompt:
    """Draws with replacement from an urn whose shares of three colours are unknown and uniform: Laplace's rule."""
    shares = torch.rand(3, generator=drawn, dtype=torch.float64).log().neg()
    colours = torch.multinomial(shares, _DRAWS, replacement=True, generator=drawn)
    prior = DirichletMultinomial.create(torch.ones(3, dtype=torch.float64))
    words, places = (
        ["An urn holds balls of three colours in unknown shares. A ball is drawn and put back, again and again:"],
        [],
    )
    for seen in range(_DRAWS):
        if seen in (0, 1, 2, 4, 8, 16, _DRAWS - 1):
            law = prior.posterior(colours[:seen]) if seen else prior
            places.append((len(words), law.mean.log()))
        words.append(f" {_COLOURS[int(colours[seen])]}")
    return Prompt(tuple(words), tuple(f" {colour}" for colour in _COLOURS[:3]), tuple(places))


TASKS: Mapping[str, Callable[[torch.Generator], Prompt]] = {"elimination": elimination, "urn": urn}


@torch.no_grad()
def read_prompts(
    model: NextWord, tokenizer: Any, *, seeds: range, progress: Callable[[int, int], None] | None = None
) -> list[PromptReading]:
    """Hold a language model's next word against the exact law, on a prompt of each task for each seed.

    Args:
        tokenizer: As those of transformers: called with a text and ``add_special_tokens``, it gives ``input_ids``.
        progress: Called after each prompt with how many are done and how many there are.

    Raises:
        InputError: a candidate is not one token for this tokenizer, so that the model's law over them cannot be read.
    """
    found: dict[tuple[str, int], list[tuple[float, ...]]] = {}
    for done, seed in enumerate(seeds):
        for name, made in TASKS.items():
            prompt = made(torch.Generator().manual_seed(seed))
            for seen, numbers in _read(model, tokenizer, prompt):
                found.setdefault((name, seen), []).append(numbers)
        if progress is not None:
            progress(done + 1, len(seeds))
    return [
        PromptReading(task, seen, *(math.fsum(column) / len(rows) for column in zip(*rows, strict=True)))
        for (task, seen), rows in sorted(found.items())
    ]


def save_readings(readings: Sequence[PromptReading], model: str, folder: Path) -> Path:
    """Write wind-tunnel.prompts.json, which replaces an earlier one at once.

    Raises:
        InputError: it cannot be written there.
    """
    path = folder / "wind-tunnel.prompts.json"
    stored = {"model": model, "unit": "bits", "readings": [asdict(reading) for reading in readings]}
    write_whole(
        path, json.dumps(encodable(stored), indent=1, ensure_ascii=False, allow_nan=False) + "\n", "the readings"
    )
    return path


def _read(model: NextWord, tokenizer: Any, prompt: Prompt) -> Iterator[tuple[int, tuple[float, ...]]]:
    """At each place: how many examples came before; divergence, that of the uniform law, error of the entropy, mass."""
    candidates = [_one_token(tokenizer, word) for word in prompt.candidates]
    start = list(tokenizer("")["input_ids"])
    pieces = [_ids(tokenizer, word) for word in prompt.words]
    ids = start + [token for piece in pieces for token in piece]
    ends = torch.tensor([len(piece) for piece in pieces]).cumsum(0) + len(start)
    logits = model(torch.tensor([ids]))[0].double().log_softmax(-1)
    for words, exact in prompt.places:
        law = logits[int(ends[words - 1]) - 1, candidates].cpu()
        mass = law.logsumexp(0)
        own, share = law - mass, exact.exp()
        entropy = -(own.exp() * own).sum(), -torch.where(share > 0, share * exact, 0.0).sum()
        apart = torch.where(share > 0, share * (exact - own), 0.0).sum()
        seen = sum(word in prompt.candidates for word in prompt.words[:words])
        uniform = math.log(len(candidates)) - float(entropy[1])
        yield seen, (float(apart) / BIT, uniform / BIT, abs(float(entropy[0] - entropy[1])) / BIT, float(mass.exp()))


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _one_token(tokenizer: Any, word: str) -> int:
    ids = _ids(tokenizer, word)
    if len(ids) != 1:
        raise InputError(
            f"the prompts need {word!r} to be one token, and this tokenizer makes {len(ids)} of it; read a model whose "
            "vocabulary has whole words"
        )
    return ids[0]
