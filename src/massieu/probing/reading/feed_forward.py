"""A model's feed-forward layers, found by watching one forward pass, and tokens that came past them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from massieu.probing.capture.routes import capturing
from massieu.probing.capture.sites import SiteInfo
from massieu.probing.model.forward import run
from massieu.probing.statistics.feed_forward import DERIVATIVE_TOKENS, MEASURES, PROBES, Sampled, shuffled
from massieu.probing.statistics.layer_groups import Row, rows_beside_control
from massieu.probing.statistics.registry import STATISTICS
from massieu.probing.stream.chains import chain_between, recording
from massieu.probing.stream.replay import relative_difference, tolerance
from massieu.probing.stream.wiring import Step, StreamTracer
from massieu.probing.sums.accumulate import Ratio
from massieu.probing.sums.running import State
from massieu.probing.sums.units import Units

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

    def measure(self) -> None:
        """Measure every layer; one that cannot be is said in `failed`."""
        for index, part in self.parts.items():
            try:
                self._measure(index, part)
            except Exception as error:  # of whatever class a module raises when it is differentiated
                kind = type(error).__name__
                self.failed[index] = f"the layer cannot be run and differentiated on single tokens ({kind})"

    def _measure(self, index: int, part: FeedForwardPart) -> None:
        numbers = sorted(self._tokens[index])
        if not numbers:
            return
        tokens = _sampled(part, [torch.from_numpy(self._tokens[index][n]) for n in numbers], self.seed + index)
        control = shuffled(tokens, torch.Generator().manual_seed(self.seed + index))
        totals, counts = torch.zeros(2, len(numbers), len(MEASURES), 2, dtype=torch.float64)
        for place, measure in enumerate(MEASURES):
            for which, given in enumerate((tokens, control)):
                if which == 0 or STATISTICS[measure.__name__].control is not None:
                    totals[:, place, which], counts[:, place, which] = measure(given)
        finite = totals.isfinite() & counts.isfinite()
        self.results[index] = Ratio((len(MEASURES), 2), self.units)
        self.results[index].update(torch.where(finite, totals, 0.0), torch.where(finite, counts, 0.0), numbers)

    def rows(self, index: int, part: str) -> Iterator[Row]:
        """As `LayerGroup.rows`."""
        if index in self.results:
            tokens = float(sum(map(len, self._tokens[index].values()))) / (1 if part == "estimate" else 2)
            yield from rows_beside_control(self.results[index], [each.__name__ for each in MEASURES], tokens, part)

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
    pushed = torch.func.jvp(lambda z: part(z[None])[0], (points,), (directions,))[1]
    pulled = torch.func.vjp(lambda z: part(z[None])[0], points)[1](directions)[0]
    moved = [each.detach().float().cpu() for each in (stream, given, added, pushed, pulled)]
    return Sampled(moved[0], moved[1], moved[2], window, moved[3], moved[4], window[few].repeat(PROBES))
