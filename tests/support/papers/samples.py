"""Small claims to try the frame on."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from massieu.papers.claims import registry
from massieu.papers.claims.claim import Check, as_published, close, near_in_standard_errors
from massieu.papers.claims.registry import ClaimFunction


def register(id: str, body: Callable[..., Iterator[Check]] | None = None, **stated: Any) -> ClaimFunction:
    """A claim of this number; it holds unless a body is given."""

    def holds() -> Iterator[Check]:
        yield close("one and one", 1.0, 1.0)

    text = {"title": f"Title of {id}", "statement": f"Statement of {id}.", "source": "a paper, §1", "status": "derived"}
    return registry.claim(id, **(text | stated))(body or holds)


def noise(N: int = 100, width: float = 1.0, seed: int = 0) -> Iterator[Check]:
    draws = width * torch.randn(N, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    yield near_in_standard_errors("mean and 0", draws.mean(), 0.0, width / math.sqrt(N))


def false() -> Iterator[Check]:
    yield close("two and two", 2.0, 2.0)
    yield close("one and two", 1.0, 2.0)


def as_printed() -> Iterator[Check]:
    yield close("true form", 3.0, 3.0)
    yield as_published(close("printed form", 3.0, 4.0))
