"""What a feed-forward layer does to a token: little, something linear, a step along a gradient? (claim S21, experiment E7)

A layer adds f(z) to the stream x, with z what the norm in front of it makes of x, or x itself. Each function of `Sampled`
gives for each sampled window a total, and what it is to be divided by. The control gives each token another token's f.
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
Sums = tuple[Float64[Tensor, " windows"], Float64[Tensor, " windows"]]


@dataclass(frozen=True, eq=False)
class Sampled:
    """Sampled tokens of one feed-forward layer.

    Attributes:
        stream: x.
        given: z, what the layer is given.
        added: f(z), which it adds.
        window: of each token.
        pushed, pulled: J u and Jᵀ u of some tokens for random directions u, with the window of each.
    """

    stream: Float[Tensor, "N D"]
    given: Float[Tensor, "N D"]
    added: Float[Tensor, "N D"]
    window: Int[Tensor, " N"]
    pushed: Float[Tensor, "M D"]
    pulled: Float[Tensor, "M D"]
    pushed_window: Int[Tensor, " M"]

    def by_window(self, *values: Float[Tensor, " N"], window: Tensor | None = None) -> Sums:
        """Sums of each over the tokens of each window."""
        window = self.window if window is None else window
        number = int(self.window.max()) + 1
        sums = [torch.zeros(number, dtype=torch.float64).index_add_(0, window, value.double()) for value in values]
        return sums[0], sums[1]


REGISTER = Register[Callable[[Sampled], Sums]](FEED_FORWARD)
_of_layer = partial(
    REGISTER.statistic,
    claim="S21, E7",
    paper=SHIM,
    scope="layer",
    caveat="Measured on the tokens of this text; other tokens may be treated differently.",
)


@_of_layer("Size of the feed-forward update", formula="E‖f‖² / E‖x‖²", control=None, scale="positive")
def feed_forward_size(tokens: Sampled) -> Sums:
    """How large is what the layer adds, relative to its input (0: it changes nothing)?"""
    return tokens.by_window(tokens.added.square().sum(-1), tokens.stream.square().sum(-1))


@_of_layer("Direction of the feed-forward update", formula="mean cos(f, x)", control="shuffled_tokens", signed=True)
def feed_forward_cosine(tokens: Sampled) -> Sums:
    """Does what the layer adds point along (+) or against (−) the token's own vector?"""
    cosine = torch.cosine_similarity(tokens.added.double(), tokens.stream.double(), dim=-1)
    return tokens.by_window(cosine, torch.ones_like(cosine))


@_of_layer(
    "Linear share of the feed-forward layer",
    formula="R² of the best affine map z → f, by ridge regression on the other half of the windows",
    control="shuffled_tokens",
    scale="number",
)
def feed_forward_linear_share(tokens: Sampled) -> Sums:
    """How much of what the layer adds does an affine map explain, on windows that it was not fitted to?"""
    explained, whole = (
        torch.zeros(len(tokens.window), dtype=torch.float64),
        torch.zeros(len(tokens.window), dtype=torch.float64),
    )
    given, added = tokens.given.double(), tokens.added.double()
    for half in (0, 1):
        held = tokens.window % 2 == half
        if not bool(held.any()) or bool(held.all()):
            continue
        centre, offset = given[~held].mean(0), added[~held].mean(0)
        slope = _ridge(given[~held] - centre, added[~held] - offset, tokens.window[~held])
        missed = (added[held] - offset - (given[held] - centre) @ slope).square().sum(-1)
        # The mean that the map is compared with is that of the windows it was fitted to, as the map is.
        whole[held] = (added[held] - offset).square().sum(-1)
        explained[held] = whole[held] - missed
    return tokens.by_window(explained, whole)


@_of_layer(
    "Antisymmetric share of the feed-forward Jacobian",
    formula="‖(J − Jᵀ)/2‖² / ‖J‖², J = ∂f/∂z, in random directions",
    control="shuffled_tokens",
)
def feed_forward_antisymmetric_share(tokens: Sampled) -> Sums:
    """Is what the layer adds the gradient of some function (0), or as antisymmetric as a random map (½)?"""
    odd, even = ((tokens.pushed + sign * tokens.pulled).double().square().sum(-1) / 4 for sign in (-1, 1))
    return tokens.by_window(odd, odd + even, window=tokens.pushed_window)


MEASURES: tuple[Callable[[Sampled], Sums], ...] = (
    feed_forward_size,
    feed_forward_cosine,
    feed_forward_linear_share,
    feed_forward_antisymmetric_share,
)


def _ridge(
    given: Float64[Tensor, "N D"], wanted: Float64[Tensor, "N E"], window: Int[Tensor, " N"]
) -> Float64[Tensor, "D E"]:
    """The map of least squares with the penalty that does best on windows that it was not fitted to.

    These are every second of the given windows, and then the others. Generalised cross-validation would need no split, and
    is deceived by the few tokens of huge norm that models have.
    """
    errors = torch.zeros(len(_RIDGES), dtype=torch.float64)
    scale = given.square().sum() / given.shape[1]
    order = torch.unique(window, return_inverse=True)[1]
    for half in (0, 1):
        held = order % 2 == half
        if not bool(held.any()) or bool(held.all()):
            return torch.zeros(given.shape[1], wanted.shape[1], dtype=torch.float64)
        left, sizes, right = torch.linalg.svd(given[~held], full_matrices=False)
        coefficients, along = left.mT @ wanted[~held], given[held] @ right.mT
        for place, ridge in enumerate((_RIDGES * scale).tolist()):
            found = along @ ((sizes / (sizes.square() + ridge))[:, None] * coefficients)
            errors[place] += (wanted[held] - found).square().sum()
    left, sizes, right = torch.linalg.svd(given, full_matrices=False)
    penalty = float(_RIDGES[errors.argmin()] * scale)
    return right.mT @ ((sizes / (sizes.square() + penalty))[:, None] * (left.mT @ wanted))


def shuffled(tokens: Sampled, generator: torch.Generator) -> Sampled:
    """Each token with what the layer adds to another, and each pull with another token's push."""
    order, others = (torch.randperm(len(part), generator=generator) for part in (tokens.window, tokens.pushed_window))
    return replace(tokens, added=tokens.added[order], pulled=tokens.pulled[others])


_WINDOWS = 32
_NUMBERS = 1 << 26
"""Numbers that are kept of all layers together: 256 MiB."""


@dataclass(frozen=True, eq=False)
class FeedForwardPart:
    """What a layer adds to the stream: modules one after the other, behind a norm or none."""

    norm: nn.Module | None
    chain: Sequence[nn.Module]

    def given(self, stream: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """z, what the first module behind the norm is given."""
        return stream if self.norm is None else self.norm(stream)

    def __call__(self, given: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        for module in self.chain:
            given = module(given)
        return given


def feed_forward_parts(
    model: nn.Module, sites: Sequence[SiteInfo], prepared: Mapping[str, Any]
) -> dict[int, FeedForwardPart | str]:
    """By a sublayer's index its part, or one sentence that says why it is none, from one forward pass.

    Each must give what the model itself added, token by token: a layer that mixes tokens does not.
    """
    steps: list[Step] = []
    with torch.no_grad():
        tracer = StreamTracer(model, list(sites), steps.append)
        with capturing(model, tracer.attention), tracer.watching(), recording(model) as calls:
            run(model, prepared)
        return {s.sublayer.index: _part(s, calls) for s in steps if s.sublayer.kind == "feed_forward"}


def _part(step: Step, calls: Sequence[Any]) -> FeedForwardPart | str:
    if step.before.dim() != 3:
        return "items and tokens are one dimension where feed-forward layers add to the stream"
    chain = chain_between(step.before, step.after, calls)
    if chain is None:
        return "it is no chain of modules of one input each"
    norm = chain[0] if "Norm" in type(chain[0]).__name__ else None
    part = FeedForwardPart(norm, chain if norm is None else chain[1:])
    tokens = step.before[:1, : min(8, step.before.shape[1])]
    alone = torch.cat([part(part.given(tokens[:, i : i + 1])) for i in range(tokens.shape[1])], 1)
    error = relative_difference(alone + tokens, step.after[:1, : tokens.shape[1]])
    if not error <= tolerance(tokens.dtype):
        return f"what it adds to a token depends on the others (by {error:.1e})"
    return part


class FeedForwardStatistics:
    """Tokens that came past each feed-forward layer on some sampled windows; measured once the text was read.

    Attributes:
        parts: by sublayer.
        failed: by sublayer, why it has no numbers.
    """

    def __init__(self, parts: Mapping[int, FeedForwardPart | str], units: Units, seed: int) -> None:
        self.parts = {index: part for index, part in parts.items() if isinstance(part, FeedForwardPart)}
        self.failed = {index: part for index, part in parts.items() if isinstance(part, str)}
        self.units, self.seed = units, seed
        self._tokens: dict[int, dict[int, np.ndarray]] = {index: {} for index in self.parts}
        self.results: dict[int, Ratio] = {}

    def collect(self, step: Step, row: int, positions: Tensor, number: int | None) -> None:
        """Keep some tokens of a window, which stands at this place among the sampled ones."""
        kept = self._tokens.get(step.sublayer.index)
        if kept is None or not len(positions):
            return
        number = len(kept) if number is None else number
        room = _NUMBERS // (step.before.shape[-1] * len(self.parts))  # tokens of each layer
        if number < _WINDOWS and number * len(positions) < room:
            kept[number] = step.before[row, positions].float().cpu().numpy()

    def tokens(self, index: int) -> int:
        """How many tokens of a layer were kept."""
        return sum(map(len, self._tokens[index].values()))

    def measure(self, fence: Fence) -> None:
        """Measure every layer; one that cannot be is said in `failed`, a statistic that cannot be by the fence."""
        for index, part in self.parts.items():
            try:
                self._measure(index, part, fence)
            except Exception as error:  # of whatever class a module raises when it is differentiated
                kind = type(error).__name__
                self.failed[index] = f"the layer cannot be run and differentiated on single tokens ({kind})"

    def _measure(self, index: int, part: FeedForwardPart, fence: Fence) -> None:
        numbers = sorted(self._tokens[index])
        if not numbers:
            return
        tokens = _sampled(part, [torch.from_numpy(self._tokens[index][n]) for n in numbers], self.seed + index)
        control = shuffled(tokens, torch.Generator().manual_seed(self.seed + index))
        totals, counts = torch.zeros(2, len(numbers), len(MEASURES), 2, dtype=torch.float64)
        for place, measure in enumerate(MEASURES):
            with fence(measure.__name__):
                for which, given in enumerate((tokens, control)):
                    if which == 0 or STATISTICS[measure.__name__].control is not None:
                        totals[:, place, which], counts[:, place, which] = measure(given)
        finite = totals.isfinite() & counts.isfinite()
        self.results[index] = Ratio((len(MEASURES), 2), self.units)
        self.results[index].update(torch.where(finite, totals, 0.0), torch.where(finite, counts, 0.0), numbers)

    def state(self) -> State:
        """All tokens that were kept."""
        return {str(i): {str(n): tokens for n, tokens in kept.items()} for i, kept in self._tokens.items()}

    def restore(self, state: State) -> None:
        """Go on from such tokens in place of one's own."""
        self._tokens = {int(i): {int(n): tokens for n, tokens in kept.items()} for i, kept in state.items()}

    def merge(self, other: "FeedForwardStatistics") -> None:
        """Add the tokens of other windows."""
        for index, kept in self._tokens.items():
            kept.update(other._tokens.get(index, {}))


class FeedForwardGroup(Group):
    """What each feed-forward layer does to some tokens of the sampled windows."""

    name = FEED_FORWARD
    events = frozenset({Event.STEPS})

    def begin(self, model: ModelReading) -> None:
        """Find the layers, in one pass over one item of a batch."""
        super().begin(model)
        self.layers = FeedForwardStatistics({}, model.sampled_units, model.seed)
        parts = feed_forward_parts(model.model, model.sites, model.one_item)
        if not parts:
            self.failed[FEED_FORWARD] = "no feed-forward layer was seen on the way of the stream"
        self.layers = FeedForwardStatistics(parts, model.sampled_units, model.seed)

    def on_step(self, step: Step, window: SampledWindow) -> None:
        """Keep some tokens."""
        self.layers.collect(step, window.row, window.positions(step), window.number)

    def finish(self) -> None:
        """Measure what was kept."""
        self.layers.measure(self.fence)
        if self.layers.failed and not self.layers.results:
            self.failed[FEED_FORWARD] = next(iter(self.layers.failed.values()))

    def rows(self) -> Iterator[Row]:
        """The statistics of each layer beside their control; the count is of tokens."""
        for sublayer in self.model.sublayers:
            ratio = self.layers.results.get(sublayer.index)
            if ratio is not None:
                tokens = float(self.layers.tokens(sublayer.index))
                counts = {"estimate": tokens} | dict.fromkeys(HALVES, tokens / 2)
                statistics = [STATISTICS[each.__name__] for each in MEASURES]
                yield from rows_beside_control(RowPlace.of_sublayer(sublayer), RatioParts(ratio), statistics, counts)


def _sampled(part: FeedForwardPart, windows: Sequence[Float[Tensor, "S D"]], seed: int) -> Sampled:
    own = next(iter(part.chain[0].parameters()), torch.empty(0))
    stream = torch.cat(list(windows)).to(own.device, own.dtype if own.is_floating_point() else torch.float32)
    window = torch.cat([torch.full((len(tokens),), place) for place, tokens in enumerate(windows)])
    with torch.no_grad():
        given = part.given(stream[None])[0]
        added = part(given[None])[0]
    few = torch.cat([(window == place).nonzero()[:DERIVATIVE_TOKENS, 0] for place in range(len(windows))])
    points = given[few].repeat(PROBES, 1)
    directions = torch.randn(points.shape, generator=torch.Generator().manual_seed(seed)).to(points)
    with dense_inside(nn.ModuleList(part.chain), unrounded=True):
        pushed = torch.func.jvp(lambda z: part(z[None])[0], (points,), (directions,))[1]
        pulled = torch.func.vjp(lambda z: part(z[None])[0], points)[1](directions)[0]
    moved = [each.detach().float().cpu() for each in (stream, given, added, pushed, pulled)]
    return Sampled(moved[0], moved[1], moved[2], window, moved[3], moved[4], window[few].repeat(PROBES))
