"""Regression in context: a small transformer sees pairs of features and target, and predicts the target of new features."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from massieu.papers.experiments.training import minimise
from massieu.papers.experiments.transformer import TransformerBlock, VectorTransformer

Pairs = tuple[Float[Tensor, "B L p"], Float[Tensor, "B L"]]
"""Features, and their targets."""


def tokens_of(pairs: Pairs) -> Float[Tensor, "B L 2*p+2"]:
    """At each position: the pair before it, 1 if there is one and 0 if not, and the features whose target is predicted."""
    features, targets = pairs
    marked_pairs = torch.cat([features, targets.unsqueeze(-1), torch.ones_like(targets).unsqueeze(-1)], -1)
    pairs_before = F.pad(marked_pairs[:, :-1], (0, 0, 1, 0))  # one position later, zeros first
    return torch.cat([pairs_before, features], -1)


def predict(model: VectorTransformer, pairs: Pairs) -> Float[Tensor, "B L"]:
    """Each target, predicted from the pairs before it and its own features."""
    return model(tokens_of(pairs)).squeeze(-1)


def train_in_context(
    next_batch: Callable[[], Pairs],
    generator: torch.Generator,
    *,
    steps: int,
    depth: int,
    step_size: float,
    shuffled: bool = False,
    with_attention: bool = True,
) -> VectorTransformer:
    """Train a causal transformer of width 32 and 4 heads, without positions, by squared error on samples alone.

    Args:
        next_batch: Draws a batch of contexts.
        generator: Draws the seed of the initial weights.
        steps: The number of steps.
        depth: The number of layers.
        step_size: The step size at the start.
        shuffled: Whether the targets to predict are those of other contexts.
        with_attention: Without it, each position sees itself alone.
    """
    features, _ = next_batch()
    block = TransformerBlock if with_attention else partial(TransformerBlock, attention=None)
    with torch.random.fork_rng():
        torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
        model = VectorTransformer(2 * features.shape[-1] + 2, 1, depth=depth, block=block)

    def loss() -> Tensor:
        features, targets = next_batch()
        targets_to_predict = targets.roll(1, 0) if shuffled else targets
        return (predict(model, (features, targets)) - targets_to_predict).square().mean()

    minimise(loss, list(model.parameters()), steps=steps, step_size=step_size, averaged_share=0.1)
    return model
