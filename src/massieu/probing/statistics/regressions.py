"""Regressions of what a step of the stream adds, token by token, on a few vectors of the same token.

All that they need of a window are the inner products of these vectors, summed over its tokens. So memory grows neither with
the width nor with the tokens, and coefficients are fitted on every second sampled window and scored on the rest.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from massieu.probing.statistics.group import HALVES, Event, Group, ModelReading, RatioParts, Row, RowPlace
from massieu.probing.statistics.layer_groups import has_own_control, rows_beside_control
from massieu.probing.statistics.query_means import Fence
from massieu.probing.statistics.registry import STATISTICS, Register
from massieu.probing.sums.accumulate import Ratio
from massieu.probing.sums.running import State
from massieu.probing.sums.units import Units

Products = Float64[np.ndarray, "windows vectors vectors"]
Sums = tuple[Float64[np.ndarray, " windows"], Float64[np.ndarray, " windows"]]
RegressionMeasure = Callable[[Products], Sums]
"""A statistic of such inner products."""


class Regressions:
    """Inner products of one group at each sublayer, by sampled window: of the vectors themselves, and of the control's."""

    def __init__(self, functions: Mapping[str, RegressionMeasure], units: Units) -> None:
        self.functions, self.units = functions, units
        self._products: dict[int, dict[int, Float64[np.ndarray, "2 vectors vectors"]]] = {}
        self.tokens: dict[int, int] = {}
        self.results: dict[int, Ratio] = {}

    def collect(
        self,
        index: int,
        number: int | None,
        own: Sequence[Float[Tensor, "S D"]],
        control: Sequence[Float[Tensor, "S D"]],
    ) -> None:
        """Add a window of one sublayer, which stands at this place among the sampled ones; tokens that are not finite are
        left out."""
        vectors = torch.stack([torch.stack(list(part)) for part in (own, control)]).double()
        kept = vectors.isfinite().all(-1).all(0).all(0)
        vectors = vectors[:, :, kept].flatten(2)
        windows = self._products.setdefault(index, {})
        windows[len(windows) if number is None else number] = (vectors @ vectors.mT).cpu().numpy()
        self.tokens[index] = self.tokens.get(index, 0) + int(kept.sum())

    def measure(self, fence: Fence = nullcontext) -> None:
        """Fit and score every sublayer; what fails in the fence costs the statistic of its name alone."""
        for index, windows in self._products.items():
            numbers = sorted(windows)
            given = np.stack([windows[number] for number in numbers], 1)
            totals, counts = torch.zeros(2, len(numbers), len(self.functions), 2, dtype=torch.float64)
            for place, (name, measure) in enumerate(self.functions.items()):
                with fence(name):
                    for which in range(1 + has_own_control(STATISTICS[name])):
                        total, count = (torch.from_numpy(part) for part in measure(given[which]))
                        usable = total.isfinite() & count.isfinite()
                        totals[:, place, which] = torch.where(usable, total, 0.0)
                        counts[:, place, which] = torch.where(usable, count, 0.0)
            self.results[index] = Ratio((len(self.functions), 2), self.units)
            self.results[index].update(totals, counts, numbers)

    def state(self) -> State:
        """All inner products."""
        products = {str(i): {str(n): each for n, each in windows.items()} for i, windows in self._products.items()}
        return {"products": products, "tokens": {str(i): tokens for i, tokens in self.tokens.items()}}

    def restore(self, state: State) -> None:
        """Go on from such products in place of one's own."""
        self._products = {int(i): {int(n): each for n, each in w.items()} for i, w in state["products"].items()}
        self.tokens = {int(i): int(tokens) for i, tokens in state["tokens"].items()}

    def merge(self, other: "Regressions") -> None:
        """Add the products of other windows."""
        for index, windows in other._products.items():
            self._products.setdefault(index, {}).update(windows)
            self.tokens[index] = self.tokens.get(index, 0) + other.tokens[index]


class RegressionGroup(Group):
    """A group that regresses what a step adds on vectors of the same token."""

    events = frozenset({Event.STEPS})
    register: ClassVar[Register[RegressionMeasure]]

    def begin(self, model: ModelReading) -> None:
        """Inner products of no window yet."""
        super().begin(model)
        self.regressions = Regressions(self.register.functions, model.sampled_units)

    def finish(self) -> None:
        """Fit and score, or say why there is nothing to fit."""
        self.regressions.measure(self.fence)
        if not self.regressions.results:
            self.failed[self.name] = self.nothing()

    @abstractmethod
    def nothing(self) -> str:
        """Why no sublayer has numbers."""

    def rows(self) -> Iterator[Row]:
        """The statistics of each sublayer beside their controls; the count is of tokens."""
        for sublayer in self.model.sublayers:
            ratio = self.regressions.results.get(sublayer.index)
            if ratio is not None:
                tokens = float(self.regressions.tokens[sublayer.index])
                counts = {"estimate": tokens} | dict.fromkeys(HALVES, tokens / 2)
                statistics = [STATISTICS[name] for name in self.register.functions]
                yield from rows_beside_control(RowPlace.of_sublayer(sublayer), RatioParts(ratio), statistics, counts)


def explained(given: Products, target: int, features: Sequence[int]) -> Sums:
    """For each window how much of the target's square is explained by the features, fitted on every second other window.

    The second sum is the target's square, so that their ratio is R² about 0.
    """
    whole, found = given[:, target, target].copy(), np.full(len(given), np.nan)
    chosen = list(features)
    for half in (0, 1):
        fitted, scored = given[1 - half :: 2].sum(0), given[half::2]
        if not len(scored) or not fitted.any():
            continue
        slope = np.linalg.lstsq(fitted[np.ix_(chosen, chosen)], fitted[chosen, target], rcond=1e-10)[0]
        along = scored[:, chosen, target] @ slope
        found[half::2] = 2 * along - np.einsum("i,wij,j->w", slope, scored[:, chosen][:, :, chosen], slope)
    return found, whole


def gain(given: Products, target: int, features: Sequence[int], more: int) -> Sums:
    """How much more of the target's square is explained with one feature more."""
    (with_it, whole), (without, _) = explained(given, target, [*features, more]), explained(given, target, features)
    return with_it - without, whole


def coefficient(given: Products, target: int, feature: int, others: Sequence[int]) -> Sums:
    """The coefficient of a feature beside the others: what is left of it once they are taken out, along the target."""
    whole, chosen = given.sum(0), list(others)
    slope = np.linalg.lstsq(whole[np.ix_(chosen, chosen)], whole[chosen, feature], rcond=1e-10)[0]
    total = given[:, feature, target] - given[:, chosen, target] @ slope
    # Of each window the square of what is left: with one slope for all windows, only their sum is the product with the feature.
    square = given[:, feature, feature] - 2 * given[:, chosen, feature] @ slope
    square += np.einsum("i,wij,j->w", slope, given[:, chosen][:, :, chosen], slope)
    return total, square.clip(min=0.0)


def random_like(vectors: Float[Tensor, "S D"], generator: torch.Generator) -> Float[Tensor, "S D"]:
    """Random directions, each as long as the vector in whose place it stands."""
    drawn = torch.randn(vectors.shape, generator=generator).to(vectors)
    return drawn / drawn.norm(dim=-1, keepdim=True) * vectors.norm(dim=-1, keepdim=True)
