"""What a case is drawn from: sizes, choices, and tensors in any layout of memory."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from tests.support.ops.layouts import LAYOUTS
from torch import Tensor

Choice = TypeVar("Choice")
View = Callable[[Tensor], Tensor]

DTYPES = (torch.float64, torch.float64, torch.float32, torch.float32, torch.bfloat16, torch.float16)


class Draws:
    """The random numbers of one case, and the tensors that were drawn from them, by name."""

    def __init__(self, seed: int, index: int) -> None:
        self._random = random.Random(f"{seed}/{index}")
        self._generator = torch.Generator().manual_seed(self._random.getrandbits(62))
        self.leaves: dict[str, Tensor] = {}
        self.views: dict[str, View] = {}
        self.words: list[str] = []
        """What was drawn, for the line of a case that fails."""

    def choice(self, values: Sequence[Choice]) -> Choice:
        return self._random.choice(values)

    def chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def whole(self, least: int, most: int) -> int:
        return self._random.randint(least, most)

    def seed(self) -> int:
        return self._random.getrandbits(31)

    def say(self, **options: Any) -> None:
        self.words += [f"{name}={value}" for name, value in options.items() if value is not None]

    def length(self) -> int:
        """A number of queries or keys: mostly few, seldom none, and sometimes more than one block."""
        return self.choice([0, 1, 2, 3, 3, 4, 5, 7, 9, 16, 17, 33])

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64)

    def whole_numbers(self, least: int, end: int, *shape: int) -> Tensor:
        return torch.randint(least, end, shape, generator=self._generator)

    def add(self, name: str, shape: Sequence[int], make: Callable[..., Tensor], plain: bool = False) -> None:
        """Draw a tensor of this shape as a view of a leaf in some layout of memory."""
        shape = tuple(shape)
        layout = "plain" if plain else self.choice(["plain", "plain", *LAYOUTS])
        of_leaf, view = LAYOUTS[layout]
        self.leaves[name] = make(*of_leaf(shape))
        self.views[name] = lambda leaf: view(leaf, shape)
        dtype = str(self.leaves[name].dtype).removeprefix("torch.")
        self.words.append(f"{name}:{list(shape)},{dtype},{layout}")

    def add_numbers(self, name: str, shape: Sequence[int], dtype: torch.dtype, spread: float | None = None) -> None:
        """Normal numbers of a drawn spread; sometimes with repeated entries, sometimes all 0."""
        size = self.choice([0.01, 0.3, 1.0, 1.0, 1.0, 3.0]) if spread is None else spread
        kind = self.choice(["normal"] * 8 + ["far", "zero"])

        def make(*of_leaf: int) -> Tensor:
            numbers = size * self.normal(*of_leaf)
            if kind == "far":
                numbers = numbers + 2 * size
            return (numbers * (kind != "zero")).to(dtype)

        self.add(name, shape, make)

    def add_log_weight(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Booleans, or log-weights of which some are −inf."""
        boolean, kept = self.chance(0.5), self.choice([0.2, 0.6, 0.6, 0.9, 1.0])
        dtype = self.choice([dtype, dtype, torch.float32])
        spread = self.choice([0.0, 0.5, 3.0])

        def make(*of_leaf: int) -> Tensor:
            keep = self.normal(*of_leaf) < math.sqrt(2) * _inverse_error(2 * kept - 1)
            if boolean:
                return keep
            return (spread * self.normal(*of_leaf)).to(dtype).masked_fill(~keep, -math.inf)

        self.add(name, shape, make)

    def broadcasting(self, shape: Sequence[int]) -> tuple[int, ...]:
        """A shape of as many dimensions that broadcasts to this one."""
        return tuple(1 if self.chance(0.5) else size for size in shape)

    def parts(self, total: int, count: int) -> list[int]:
        """Lengths, 0 among them, that add to the total."""
        cuts = sorted(self.whole(0, total) for _ in range(count - 1))
        return [end - start for start, end in zip([0, *cuts], [*cuts, total], strict=True)]


def _inverse_error(number: float) -> float:
    return float(torch.erfinv(torch.tensor(number, dtype=torch.float64)))
