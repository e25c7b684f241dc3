"""What a feed-forward layer does to a token: little, something linear, a step along a gradient? (claim S21, experiment E7)

A layer adds f(z) to the stream x, with z what the norm in front of it makes of x, or x itself. Each function of `Sampled`
gives for each sampled window a total, and what it is to be divided by. The control gives each token another token's f.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from massieu.probing.statistics.registry import FEED_FORWARD, SHIM, statistic

PROBES = 2
"""Random directions at each token in which the derivative is compared with its transpose."""
DERIVATIVE_TOKENS = 8
"""Of each window."""
_RIDGES = torch.logspace(-8, 4, 25, dtype=torch.float64)
_of_layer = partial(
    statistic,
    FEED_FORWARD,
    claim="S21, E7",
    paper=SHIM,
    scope="layer",
    caveat="Measured on the tokens of this text; other tokens may be treated differently.",
)
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
