"""Regressions of what a step of the stream adds, token by token, on a few vectors of the same token.

All that they need of a window are the inner products of these vectors, summed over its tokens: ‖y − Σ c_i x_i‖² is
y·y − 2 Σ c_i x_i·y + Σ c_i c_j x_i·x_j. So memory grows neither with the width nor with the tokens. Coefficients are fitted
on every second sampled window and scored on the rest.
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
WindowSums = tuple[Float64[np.ndarray, " windows"], Float64[np.ndarray, " windows"]]
RegressionMeasure = Callable[[Products], WindowSums]
"""A statistic of such inner products: for each window a total, and what it is to be divided by."""


class Regressions:
    """Inner products of one group at each sublayer, by sampled window: of the model's vectors, and of the control's.

    Attributes:
        tokens: how many tokens the products of each sublayer are summed over.
        results: by sublayer; filled by `measure`.
    """

    def __init__(self, functions: Mapping[str, RegressionMeasure], units: Units) -> None:
        self.functions = functions
        self.units = units
        self._products: dict[int, dict[int, Float64[np.ndarray, "2 vectors vectors"]]] = {}
        self.tokens: dict[int, int] = {}
        self.results: dict[int, Ratio] = {}

    def collect(
        self,
        index: int,
        number: int | None,
        model_vectors: Sequence[Float[Tensor, "S D"]],
        control_vectors: Sequence[Float[Tensor, "S D"]],
    ) -> None:
        """Add a window of one sublayer; tokens that are not finite are left out.

        Args:
            index: of the sublayer.
            number: the window's place among the sampled ones; None where windows come in the order of the text.
        """
        vectors = torch.stack([torch.stack(list(part)) for part in (model_vectors, control_vectors)]).double()
        # A token counts for the model and for the control, or for neither, so that both are of the same tokens.
        finite = vectors.isfinite().all(-1).all(0).all(0)
        vectors = vectors[:, :, finite].flatten(2)  # (2, vectors, tokens · D)
        windows = self._products.setdefault(index, {})
        windows[len(windows) if number is None else number] = (vectors @ vectors.mT).cpu().numpy()
        self.tokens[index] = self.tokens.get(index, 0) + int(finite.sum())

    def measure(self, fence: Fence = nullcontext) -> None:
        """Fit and score every sublayer; what fails in the fence costs the statistic of its name alone."""
        for index, windows in self._products.items():
            numbers = sorted(windows)
            products = np.stack([windows[number] for number in numbers], 1)  # (2, windows, vectors, vectors)
            totals, counts = torch.zeros(2, len(numbers), len(self.functions), 2, dtype=torch.float64)
            for place, (name, measure) in enumerate(self.functions.items()):
                with fence(name):
                    for side in range(1 + has_own_control(STATISTICS[name])):  # 0: the model, 1: the control
                        total, count = (torch.from_numpy(part) for part in measure(products[side]))
                        usable = total.isfinite() & count.isfinite()
                        totals[:, place, side] = torch.where(usable, total, 0.0)
                        counts[:, place, side] = torch.where(usable, count, 0.0)
            self.results[index] = Ratio((len(self.functions), 2), self.units)
            self.results[index].update(totals, counts, numbers)

    def state(self) -> State:
        """All inner products."""
        products = {
            str(index): {str(number): product for number, product in windows.items()}
            for index, windows in self._products.items()
        }
        return {"products": products, "tokens": {str(index): tokens for index, tokens in self.tokens.items()}}

    def restore(self, state: State) -> None:
        """Continue from stored products, which replace those held here."""
        self._products = {
            int(index): {int(number): product for number, product in windows.items()}
            for index, windows in state["products"].items()
        }
        self.tokens = {int(index): int(tokens) for index, tokens in state["tokens"].items()}

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
            self.failed[self.name] = self.why_no_numbers()

    @abstractmethod
    def why_no_numbers(self) -> str:
        """Why no sublayer has numbers."""

    def rows(self) -> Iterator[Row]:
        """The statistics of each sublayer with their controls; the count is of tokens."""
        for sublayer in self.model.sublayers:
            ratio = self.regressions.results.get(sublayer.index)
            if ratio is not None:
                tokens = float(self.regressions.tokens[sublayer.index])
                counts = {"estimate": tokens} | dict.fromkeys(HALVES, tokens / 2)
                statistics = [STATISTICS[name] for name in self.register.functions]
                yield from rows_beside_control(RowPlace.of_sublayer(sublayer), RatioParts(ratio), statistics, counts)


def explained(products: Products, target: int, features: Sequence[int]) -> WindowSums:
    """For each window, the explained and the total square of the target; their ratio is R² about 0.

    The even windows are scored with coefficients that are fitted on the odd ones, and the other way round.
    """
    target_squares = products[:, target, target].copy()
    explained_squares = np.full(len(products), np.nan)
    columns = list(features)
    for half in (0, 1):
        scored = products[half::2]
        fitted = products[1 - half :: 2].sum(0)
        if not len(scored) or not fitted.any():
            continue
        # The normal equations; `lstsq` bears features that are multiples of each other.
        slope = np.linalg.lstsq(fitted[np.ix_(columns, columns)], fitted[columns, target], rcond=1e-10)[0]
        # ‖y‖² − ‖y − Xc‖² = 2 c·Xᵀy − c·XᵀX c.
        along_target = scored[:, columns, target] @ slope
        prediction_squares = np.einsum("i,wij,j->w", slope, scored[:, columns][:, :, columns], slope)
        explained_squares[half::2] = 2 * along_target - prediction_squares
    return explained_squares, target_squares


def gain(products: Products, target: int, features: Sequence[int], extra: int) -> WindowSums:
    """How much more of the target's square is explained with one extra feature."""
    explained_with_extra, target_squares = explained(products, target, [*features, extra])
    explained_without, _ = explained(products, target, features)
    return explained_with_extra - explained_without, target_squares


def coefficient(products: Products, target: int, feature: int, others: Sequence[int]) -> WindowSums:
    """The coefficient of a feature in a regression of the target on it and the others.

    It is the product of the target with the feature's residual, over the residual's square (Frisch–Waugh–Lovell): the
    residual is what is left of the feature after its own regression on the others, over all windows.
    """
    summed = products.sum(0)
    columns = list(others)
    slope = np.linalg.lstsq(summed[np.ix_(columns, columns)], summed[columns, feature], rcond=1e-10)[0]
    total = products[:, feature, target] - products[:, columns, target] @ slope
    # The residual's square in full: its product with the feature is equal to it only in the sum over all windows.
    square = products[:, feature, feature] - 2 * products[:, columns, feature] @ slope
    square += np.einsum("i,wij,j->w", slope, products[:, columns][:, :, columns], slope)
    return total, square.clip(min=0.0)


def random_like(vectors: Float[Tensor, "S D"], generator: torch.Generator) -> Float[Tensor, "S D"]:
    """Random directions, each with the length of the vector that it replaces."""
    directions = torch.randn(vectors.shape, generator=generator).to(vectors)
    return directions / directions.norm(dim=-1, keepdim=True) * vectors.norm(dim=-1, keepdim=True)
