"""Regression in context: a small transformer sees pairs of features and target, and predicts the target of new features."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from massieu.papers.experiments.training import minimise
from massieu.papers.experiments.transformer import TransformerBlock, VectorTransformer

Pairs = tuple[Float[Tensor, "B L p"], Float[Tensor, "B L"]]
"""Features, and their targets."""


def tokens(pairs: Pairs) -> Float[Tensor, "B L 2*p+2"]:
    """At each place the pair before it, whether there is one, and the features that are asked about."""
    features, targets = pairs
    before = torch.cat([features, targets.unsqueeze(-1), torch.ones_like(targets).unsqueeze(-1)], -1)
    return torch.cat([F.pad(before[:, :-1], (0, 0, 1, 0)), features], -1)


def predicted(model: VectorTransformer, pairs: Pairs) -> Float[Tensor, "B L"]:
    """Each target by the pairs before it and its own features."""
    return model(tokens(pairs)).squeeze(-1)


def trained(
    sample: Callable[[], Pairs],
    drawn: torch.Generator,
    *,
    steps: int,
    depth: int,
    step_size: float,
    shuffled: bool = False,
    with_attention: bool = True,
) -> VectorTransformer:
    """A causal transformer of width 32 and 4 heads, without positions, that learned by squared error from samples alone.

    Args:
        sample: Draws a batch of contexts.
        drawn: Its start.
        shuffled: The targets to predict are those of other contexts.
        with_attention: Without it, a place sees itself alone.
    """
    features, _ = sample()
    block = TransformerBlock if with_attention else lambda width, heads: TransformerBlock(width, heads, None)
    with torch.random.fork_rng():
        torch.manual_seed(int(torch.randint(2**31, (), generator=drawn)))
        model = VectorTransformer(2 * features.shape[-1] + 2, 1, depth=depth, block=block)

    def loss() -> Tensor:
        features, targets = sample()
        wanted = targets.roll(1, 0) if shuffled else targets
        return (predicted(model, (features, targets)) - wanted).square().mean()

    minimise(loss, list(model.parameters()), steps=steps, step_size=step_size, averaged=0.1)
    return model
