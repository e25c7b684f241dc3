"""What a feed-forward layer does to a token: little, something linear, a step along a gradient? (claim S21, experiment E7)

A layer adds f(z) to the stream x, where z is the output of the norm in front of the layer, or x itself without a norm. Each
function of `SampledTokens` gives for each sampled window a total, and what it is to be divided by. The control gives each
token another token's f.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from massieu.probing.capture.routes import capturing
from massieu.probing.capture.sites import SiteInfo
from massieu.probing.model.forward import run
from massieu.probing.model.packed import dense_inside
from massieu.probing.model.precision import relative_difference, tolerance
from massieu.probing.statistics.group import (
    HALVES,
    Event,
    Group,
    ModelReading,
    RatioParts,
    Row,
    RowPlace,
    SampledWindow,
)
from massieu.probing.statistics.layer_groups import rows_beside_control
from massieu.probing.statistics.query_means import Fence
from massieu.probing.statistics.registry import FEED_FORWARD, SHIM, STATISTICS, Register
from massieu.probing.stream.chains import chain_between, recording
from massieu.probing.stream.wiring import Step, StreamTracer
from massieu.probing.sums.accumulate import Ratio
from massieu.probing.sums.running import State
from massieu.probing.sums.units import Units

PROBES = 2
"""Random directions at each token in which the derivative is compared with its transpose."""
DERIVATIVE_TOKENS = 8
"""Of each window."""
_RIDGES = torch.logspace(-8, 4, 25, dtype=torch.float64)
WindowSums = tuple[Float64[Tensor, " windows"], Float64[Tensor, " windows"]]


@dataclass(frozen=True, eq=False)
class SampledTokens:
    """Sampled tokens of one feed-forward layer, and derivatives of the layer at a few of them.

    Attributes:
        stream: x.
        inputs: z, the layer's input.
        updates: f(z), which the layer adds to the stream.
        window: the window of each token.
        pushed, pulled: J u and Jᵀ u for random directions u.
        derivative_window: the window of each of these.
    """

    stream: Float[Tensor, "N D"]
    inputs: Float[Tensor, "N D"]
    updates: Float[Tensor, "N D"]
    window: Int[Tensor, " N"]
    pushed: Float[Tensor, "M D"]
    pulled: Float[Tensor, "M D"]
    derivative_window: Int[Tensor, " M"]

    def by_window(self, *values: Float[Tensor, " N"], window: Tensor | None = None) -> WindowSums:
        """Sums of the two values over the tokens of each window.

        Args:
            window: the window of each value; None where there is one value for each token.
        """
        window = self.window if window is None else window
        windows = int(self.window.max()) + 1
        total, count = (
            torch.zeros(windows, dtype=torch.float64).index_add_(0, window, value.double()) for value in values
        )
        return total, count


FeedForwardMeasure = Callable[[SampledTokens], WindowSums]
REGISTER = Register[FeedForwardMeasure](FEED_FORWARD)
_of_layer = partial(
    REGISTER.statistic,
    claim="S21, E7",
    paper=SHIM,
    scope="layer",
    caveat="Measured on the tokens of this text; other tokens may be treated differently.",
)


@_of_layer("Size of the feed-forward update", formula="E‖f‖² / E‖x‖²", control=None, scale="positive")
def feed_forward_size(tokens: SampledTokens) -> WindowSums:
    """How large is what the layer adds, relative to its input (0: it changes nothing)?"""
    return tokens.by_window(tokens.updates.square().sum(-1), tokens.stream.square().sum(-1))


@_of_layer("Direction of the feed-forward update", formula="mean cos(f, x)", control="shuffled_tokens", signed=True)
def feed_forward_cosine(tokens: SampledTokens) -> WindowSums:
    """Does what the layer adds point along (+) or against (−) the token's own vector?"""
    cosine = torch.cosine_similarity(tokens.updates.double(), tokens.stream.double(), dim=-1)
    return tokens.by_window(cosine, torch.ones_like(cosine))


@_of_layer(
    "Linear share of the feed-forward layer",
    formula="R² of the best affine map z → f, by ridge regression on the other half of the windows",
    control="shuffled_tokens",
    scale="number",
)
def feed_forward_linear_share(tokens: SampledTokens) -> WindowSums:
    """How much of what the layer adds does an affine map explain, on windows that it was not fitted to?"""
    explained = torch.zeros(len(tokens.window), dtype=torch.float64)
    total = torch.zeros(len(tokens.window), dtype=torch.float64)
    inputs = tokens.inputs.double()
    updates = tokens.updates.double()
    for half in (0, 1):
        scored = tokens.window % 2 == half
        fitted = ~scored
        if not bool(scored.any()) or bool(scored.all()):
            continue
        mean_input = inputs[fitted].mean(0)
        mean_update = updates[fitted].mean(0)
        slope = _ridge(inputs[fitted] - mean_input, updates[fitted] - mean_update, tokens.window[fitted])
        residuals = updates[scored] - mean_update - (inputs[scored] - mean_input) @ slope
        # The map is compared with the mean of the windows to which both were fitted.
        total[scored] = (updates[scored] - mean_update).square().sum(-1)
        explained[scored] = total[scored] - residuals.square().sum(-1)
    return tokens.by_window(explained, total)


@_of_layer(
    "Antisymmetric share of the feed-forward Jacobian",
    formula="‖(J − Jᵀ)/2‖² / ‖J‖², J = ∂f/∂z, in random directions",
    control="shuffled_tokens",
)
def feed_forward_antisymmetric_share(tokens: SampledTokens) -> WindowSums:
    """Is what the layer adds the gradient of some function (0), or as antisymmetric as a random map (½)?"""
    # For u of unit covariance, E‖A u‖² = ‖A‖², of A = (J ∓ Jᵀ)/2. The two parts are orthogonal: their squares add up to ‖J‖².
    odd, even = ((tokens.pushed + sign * tokens.pulled).double().square().sum(-1) / 4 for sign in (-1, 1))
    return tokens.by_window(odd, odd + even, window=tokens.derivative_window)


MEASURES: tuple[FeedForwardMeasure, ...] = (
    feed_forward_size,
    feed_forward_cosine,
    feed_forward_linear_share,
    feed_forward_antisymmetric_share,
)


def _ridge(
    inputs: Float64[Tensor, "N D"], targets: Float64[Tensor, "N E"], window: Int[Tensor, " N"]
) -> Float64[Tensor, "D E"]:
    """The map of least squares with the penalty that does best on windows that it was not fitted to.

    Every second window is scored, then the others; zeros if there is only one window. Generalised cross-validation would need
    no split, but the few tokens of huge norm that models have mislead it.
    """
    errors = torch.zeros(len(_RIDGES), dtype=torch.float64)
    scale = inputs.square().sum() / inputs.shape[1]
    rank = torch.unique(window, return_inverse=True)[1]  # of each token's window, counted without gaps
    for half in (0, 1):
        scored = rank % 2 == half
        if not bool(scored.any()) or bool(scored.all()):
            return torch.zeros(inputs.shape[1], targets.shape[1], dtype=torch.float64)
        # One decomposition Z = U S Vᵀ serves every penalty λ: (ZᵀZ + λ)⁻¹ Zᵀ Y = V S/(S² + λ) Uᵀ Y.
        left, sizes, right = torch.linalg.svd(inputs[~scored], full_matrices=False)
        coefficients = left.mT @ targets[~scored]
        scored_inputs = inputs[scored] @ right.mT
        for place, ridge in enumerate((_RIDGES * scale).tolist()):
            predictions = scored_inputs @ ((sizes / (sizes.square() + ridge))[:, None] * coefficients)
            errors[place] += (targets[scored] - predictions).square().sum()
    left, sizes, right = torch.linalg.svd(inputs, full_matrices=False)
    penalty = float(_RIDGES[errors.argmin()] * scale)
    return right.mT @ ((sizes / (sizes.square() + penalty))[:, None] * (left.mT @ targets))


def shuffled(tokens: SampledTokens, generator: torch.Generator) -> SampledTokens:
    """Each token with the update of another, and each J u with the Jᵀ u of another."""
    token_order = torch.randperm(len(tokens.window), generator=generator)
    derivative_order = torch.randperm(len(tokens.derivative_window), generator=generator)
    return replace(tokens, updates=tokens.updates[token_order], pulled=tokens.pulled[derivative_order])


_MOST_WINDOWS = 32
_MOST_NUMBERS = 1 << 26
"""Numbers that are stored of all layers together: 256 MiB."""


@dataclass(frozen=True, eq=False)
class FeedForwardPart:
    """What a layer adds to the stream: a chain of modules, with or without a norm in front."""

    norm: nn.Module | None
    chain: Sequence[nn.Module]

    def inputs(self, stream: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """z, the input of the first module behind the norm."""
        return stream if self.norm is None else self.norm(stream)

    def __call__(self, inputs: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """f(z)."""
        output = inputs
        for module in self.chain:
            output = module(output)
        return output


def feed_forward_parts(
    model: nn.Module, sites: Sequence[SiteInfo], prepared: Mapping[str, Any]
) -> dict[int, FeedForwardPart | str]:
    """By a sublayer's index its part, or one sentence that says why it has none, from one forward pass.

    A part must reproduce what the model itself added, token by token: a layer that mixes tokens does not.
    """
    steps: list[Step] = []
    with torch.no_grad():
        tracer = StreamTracer(model, list(sites), steps.append)
        with capturing(model, tracer.attention), tracer.watching(), recording(model) as calls:
            run(model, prepared)
        feed_forward_steps = [step for step in steps if step.sublayer.kind == "feed_forward"]
        return {step.sublayer.index: _part(step, calls) for step in feed_forward_steps}


def _part(step: Step, calls: Sequence[Any]) -> FeedForwardPart | str:
    if step.before.dim() != 3:
        return "items and tokens are one dimension where feed-forward layers add to the stream"
    chain = chain_between(step.before, step.after, calls)
    if chain is None:
        return "it is no chain of modules of one input each"
    norm = chain[0] if "Norm" in type(chain[0]).__name__ else None
    part = FeedForwardPart(norm, chain if norm is None else chain[1:])
    # Run on single tokens: a layer that mixes tokens gives something else.
    tokens = step.before[:1, : min(8, step.before.shape[1])]
    updates = torch.cat([part(part.inputs(tokens[:, place : place + 1])) for place in range(tokens.shape[1])], 1)
    error = relative_difference(updates + tokens, step.after[:1, : tokens.shape[1]])
    if not error <= tolerance(tokens.dtype):
        return f"what it adds to a token depends on the others (by {error:.1e})"
    return part


class FeedForwardStatistics:
    """Stream states before each feed-forward layer on some sampled windows; measured once the text was read.

    Attributes:
        parts: by the sublayer's index.
        failed: by the sublayer's index, why it has no numbers.
        results: by the sublayer's index; filled by `measure`.
    """

    def __init__(self, parts: Mapping[int, FeedForwardPart | str], units: Units, seed: int) -> None:
        self.parts = {index: part for index, part in parts.items() if isinstance(part, FeedForwardPart)}
        self.failed = {index: part for index, part in parts.items() if isinstance(part, str)}
        self.units = units
        self.seed = seed
        self._tokens: dict[int, dict[int, np.ndarray]] = {index: {} for index in self.parts}
        self.results: dict[int, Ratio] = {}

    def collect(self, step: Step, row: int, positions: Tensor, number: int | None) -> None:
        """Store some tokens of a window.

        Args:
            row: of the batch.
            number: the window's place among the sampled ones; None where windows come in the order of the text.
        """
        windows = self._tokens.get(step.sublayer.index)
        if windows is None or not len(positions):
            return
        number = len(windows) if number is None else number
        most_tokens = _MOST_NUMBERS // (step.before.shape[-1] * len(self.parts))  # of each layer
        # Whether a window is stored depends on its number alone, so that several processes store the same windows as one.
        if number < _MOST_WINDOWS and number * len(positions) < most_tokens:
            windows[number] = step.before[row, positions].float().cpu().numpy()

    def tokens(self, index: int) -> int:
        """How many tokens of a layer were stored."""
        return sum(map(len, self._tokens[index].values()))

    def measure(self, fence: Fence) -> None:
        """Measure every layer; `failed` names layers that cannot be measured, the fence such statistics."""
        for index, part in self.parts.items():
            try:
                self._measure(index, part, fence)
            except Exception as error:  # a module may raise any class when it is differentiated
                kind = type(error).__name__
                self.failed[index] = f"the layer cannot be run and differentiated on single tokens ({kind})"

    def _measure(self, index: int, part: FeedForwardPart, fence: Fence) -> None:
        numbers = sorted(self._tokens[index])
        if not numbers:
            return
        windows = [torch.from_numpy(self._tokens[index][number]) for number in numbers]
        tokens = _sampled_tokens(part, windows, self.seed + index)
        control = shuffled(tokens, torch.Generator().manual_seed(self.seed + index))
        totals, counts = torch.zeros(2, len(numbers), len(MEASURES), 2, dtype=torch.float64)
        for place, measure in enumerate(MEASURES):
            with fence(measure.__name__):
                totals[:, place, 0], counts[:, place, 0] = measure(tokens)
                if STATISTICS[measure.__name__].control is not None:
                    totals[:, place, 1], counts[:, place, 1] = measure(control)
        finite = totals.isfinite() & counts.isfinite()
        self.results[index] = Ratio((len(MEASURES), 2), self.units)
        self.results[index].update(torch.where(finite, totals, 0.0), torch.where(finite, counts, 0.0), numbers)

    def state(self) -> State:
        """All tokens that were stored."""
        return {
            str(index): {str(number): tokens for number, tokens in windows.items()}
            for index, windows in self._tokens.items()
        }

    def restore(self, state: State) -> None:
        """Continue from stored tokens, which replace those held here."""
        self._tokens = {
            int(index): {int(number): tokens for number, tokens in windows.items()} for index, windows in state.items()
        }

    def merge(self, other: "FeedForwardStatistics") -> None:
        """Add the tokens of other windows."""
        for index, windows in self._tokens.items():
            windows.update(other._tokens.get(index, {}))


class FeedForwardGroup(Group):
    """What each feed-forward layer does to some tokens of the sampled windows."""

    name = FEED_FORWARD
    events = frozenset({Event.STEPS})

    def begin(self, model: ModelReading) -> None:
        """Find the layers, in one pass over one item of a batch."""
        super().begin(model)
        self.layers = FeedForwardStatistics({}, model.sampled_units, model.seed)  # should the search below fail
        parts = feed_forward_parts(model.model, model.sites, model.one_item)
        if not parts:
            self.failed[FEED_FORWARD] = "no feed-forward layer was seen on the way of the stream"
        self.layers = FeedForwardStatistics(parts, model.sampled_units, model.seed)

    def on_step(self, step: Step, window: SampledWindow) -> None:
        """Store some tokens."""
        self.layers.collect(step, window.row, window.positions(step), window.number)

    def finish(self) -> None:
        """Measure what was stored."""
        self.layers.measure(self.fence)
        if self.layers.failed and not self.layers.results:
            self.failed[FEED_FORWARD] = next(iter(self.layers.failed.values()))

    def rows(self) -> Iterator[Row]:
        """The statistics of each layer with their control; the count is of tokens."""
        for sublayer in self.model.sublayers:
            ratio = self.layers.results.get(sublayer.index)
            if ratio is not None:
                tokens = float(self.layers.tokens(sublayer.index))
                counts = {"estimate": tokens} | dict.fromkeys(HALVES, tokens / 2)
                statistics = [STATISTICS[measure.__name__] for measure in MEASURES]
                yield from rows_beside_control(RowPlace.of_sublayer(sublayer), RatioParts(ratio), statistics, counts)


def _sampled_tokens(part: FeedForwardPart, windows: Sequence[Float[Tensor, "S D"]], seed: int) -> SampledTokens:
    """Run and differentiate one layer on the stored states."""
    weight = next(iter(part.chain[0].parameters()), torch.empty(0))
    dtype = weight.dtype if weight.is_floating_point() else torch.float32
    stream = torch.cat(list(windows)).to(weight.device, dtype)
    window = torch.cat([torch.full((len(tokens),), place) for place, tokens in enumerate(windows)])
    with torch.no_grad():
        inputs = part.inputs(stream[None])[0]
        updates = part(inputs[None])[0]
    # The first tokens of each window, once for each random direction.
    few = torch.cat([(window == place).nonzero()[:DERIVATIVE_TOKENS, 0] for place in range(len(windows))])
    points = inputs[few].repeat(PROBES, 1)
    directions = torch.randn(points.shape, generator=torch.Generator().manual_seed(seed)).to(points)
    with dense_inside(nn.ModuleList(part.chain), unrounded=True):
        pushed = torch.func.jvp(lambda z: part(z[None])[0], (points,), (directions,))[1]
        pulled = torch.func.vjp(lambda z: part(z[None])[0], points)[1](directions)[0]
    return SampledTokens(
        stream=_on_cpu(stream),
        inputs=_on_cpu(inputs),
        updates=_on_cpu(updates),
        window=window,
        pushed=_on_cpu(pushed),
        pulled=_on_cpu(pulled),
        derivative_window=window[few].repeat(PROBES),
    )


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().float().cpu()
