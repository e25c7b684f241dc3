"""Prompts whose next word has an exact law, and how far a language model's prediction is from it, in bits."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from massieu.errors import InputError
from massieu.papers.experiments.run import write_json
from massieu.papers.experiments.tasks import BIT
from massieu.posteriors import DirichletMultinomial

NextWord = Callable[[Int[Tensor, "1 L"]], Float[Tensor, "1 L V"]]
"""From the tokens of one prompt to logits of the token after each."""
_NAMES = ("Anna", "Ben", "Carol", "David", "Emma", "Frank")
_COLOURS = ("red", "blue", "green", "black", "white", "yellow")
_DRAWS = 24
"""Draws from the urn in a prompt."""
_READ_DRAWS = (0, 1, 2, 4, 8, 16, _DRAWS - 1)
"""The numbers of draws after which the urn's next colour is predicted."""
PROMPTS = 50
"""Prompts of each task."""


@dataclass(frozen=True)
class Prompt:
    """Words, and at some positions among them the exact law of the next word.

    Attributes:
        words: The words, with the spaces before them.
        candidates: The words that may follow.
        places: For each such position, the number of words before it, and log p of each candidate there, in nats.
    """

    words: tuple[str, ...]
    candidates: tuple[str, ...]
    places: tuple[tuple[int, Float[Tensor, " C"]], ...]


@dataclass(frozen=True)
class PromptReading:
    """How far a model's law is from the exact one after a number of examples: at one position, or the mean over prompts.

    Attributes:
        task: The task's name.
        seen: The number of examples before the position.
        divergence: KL(exact ‖ model) in bits; the model's law is conditional on the candidates.
        of_uniform: KL(exact ‖ uniform over the candidates) in bits: that of a model that does not read its prompt.
        entropy_error: |entropy of the model's law − that of the exact one| in bits, the figure of arXiv 2512.22471.
        mass: The model's probability of all candidates together; the rest is that of other words.
    """

    task: str
    seen: int
    divergence: float
    of_uniform: float
    entropy_error: float
    mass: float


def elimination(generator: torch.Generator) -> Prompt:
    """Six people hold balls of six colours: a colour that was named is nobody else's, the others are equally likely."""
    holders = torch.randperm(6, generator=generator).tolist()
    colours = torch.randperm(6, generator=generator).tolist()
    words = [f"{', '.join(_NAMES)} each hold one ball. The balls are {', '.join(_COLOURS)}; no two are alike.\n"]
    places = []
    for seen, (holder, colour) in enumerate(zip(holders, colours, strict=True)):
        words.append(f"{_NAMES[holder]}:")
        remaining = colours[seen:]
        log_weight = torch.tensor([0.0 if c in remaining else -math.inf for c in range(6)], dtype=torch.float64)
        places.append((len(words), log_weight.log_softmax(0)))
        words += [f" {_COLOURS[colour]}", "\n"]
    return Prompt(tuple(words), tuple(f" {colour}" for colour in _COLOURS), tuple(places))


def urn(generator: torch.Generator) -> Prompt:
    """Draws with replacement from an urn whose shares of three colours are unknown and uniform: Laplace's rule."""
    # Exponential variables divided by their sum, as `multinomial` does, are uniform on the simplex.
    shares = torch.rand(3, generator=generator, dtype=torch.float64).log().neg()
    colours = torch.multinomial(shares, _DRAWS, replacement=True, generator=generator)
    prior = DirichletMultinomial.create(torch.ones(3, dtype=torch.float64))
    words = ["An urn holds balls of three colours in unknown shares. A ball is drawn and put back, again and again:"]
    places = []
    for seen in range(_DRAWS):
        if seen in _READ_DRAWS:
            law = prior.posterior(colours[:seen]) if seen else prior
            places.append((len(words), law.mean.log()))
        words.append(f" {_COLOURS[int(colours[seen])]}")
    return Prompt(tuple(words), tuple(f" {colour}" for colour in _COLOURS[:3]), tuple(places))


TASKS: Mapping[str, Callable[[torch.Generator], Prompt]] = {"elimination": elimination, "urn": urn}


@torch.no_grad()
def read_prompts(
    model: NextWord, tokenizer: Any, *, seeds: range, progress: Callable[[int, int], None] | None = None
) -> list[PromptReading]:
    """Compare a language model's next word with the exact law, on a prompt of each task for each seed.

    Args:
        model: The language model.
        tokenizer: Like those of transformers: called with a text and ``add_special_tokens``, it returns ``input_ids``.
        seeds: The seeds that prompts are drawn with.
        progress: Called after each seed with how many are done and how many there are.

    Raises:
        InputError: a candidate is not one token for this tokenizer, so that the model's law over them cannot be read.
    """
    readings: dict[tuple[str, int], list[PromptReading]] = {}
    for num_done, seed in enumerate(seeds, start=1):
        for task, make_prompt in TASKS.items():
            prompt = make_prompt(torch.Generator().manual_seed(seed))
            for reading in _read_prompt(model, tokenizer, task, prompt):
                readings.setdefault((task, reading.seen), []).append(reading)
        if progress is not None:
            progress(num_done, len(seeds))
    return [_mean_reading(same_place) for _, same_place in sorted(readings.items())]


def _mean_reading(readings: Sequence[PromptReading]) -> PromptReading:
    """The mean of readings of one task after one number of examples."""
    return PromptReading(
        task=readings[0].task,
        seen=readings[0].seen,
        divergence=fmean(reading.divergence for reading in readings),
        of_uniform=fmean(reading.of_uniform for reading in readings),
        entropy_error=fmean(reading.entropy_error for reading in readings),
        mass=fmean(reading.mass for reading in readings),
    )


def content_of(readings: Sequence[PromptReading], model: str) -> dict[str, Any]:
    """The readings of a model with their unit, as they are stored."""
    return {"model": model, "unit": "bits", "readings": [asdict(reading) for reading in readings]}


def save_readings(readings: Sequence[PromptReading], model: str, folder: Path) -> Path:
    """Write wind-tunnel.prompts.json, which replaces an earlier file in one step.

    Raises:
        InputError: it cannot be written there.
    """
    path = folder / "wind-tunnel.prompts.json"
    write_json(path, content_of(readings, model), "the readings")
    return path


def _read_prompt(model: NextWord, tokenizer: Any, task: str, prompt: Prompt) -> Iterator[PromptReading]:
    """A reading at each place of a prompt."""
    candidates = [_one_token(tokenizer, word) for word in prompt.candidates]
    start_ids = list(tokenizer("")["input_ids"])
    # Word by word, so that the last token of each word is known.
    word_ids = [_ids(tokenizer, word) for word in prompt.words]
    word_ends = torch.tensor([len(ids) for ids in word_ids]).cumsum(0) + len(start_ids)
    prompt_ids = start_ids + [token for ids in word_ids for token in ids]
    log_law = model(torch.tensor([prompt_ids]))[0].double().log_softmax(-1)  # (L, V)
    for num_words, log_exact in prompt.places:
        last_token = int(word_ends[num_words - 1]) - 1
        log_candidates = log_law[last_token, candidates].cpu()
        log_mass = log_candidates.logsumexp(0)
        log_model = log_candidates - log_mass
        exact = log_exact.exp()
        # The exact law excludes candidates: 0·log 0 is 0.
        kl = torch.where(exact > 0, exact * (log_exact - log_model), 0.0).sum()
        exact_entropy = -torch.where(exact > 0, exact * log_exact, 0.0).sum()
        model_entropy = -(log_model.exp() * log_model).sum()
        yield PromptReading(
            task=task,
            seen=sum(word in prompt.candidates for word in prompt.words[:num_words]),
            divergence=float(kl) / BIT,
            of_uniform=(math.log(len(candidates)) - float(exact_entropy)) / BIT,
            entropy_error=abs(float(model_entropy - exact_entropy)) / BIT,
            mass=float(log_mass.exp()),
        )


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
