"""Hopfield pooling learns the two tasks of hopfield-layers from the start that it makes: bit patterns and latched signals."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from massieu.nn import HopfieldPooling

pytestmark = pytest.mark.slow


def bit_patterns(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """2048 bags of 16 instances of 8 bits; one instance of every second bag is one of eight signals, which no other is."""
    signals = torch.randperm(255, generator=generator)[:8] + 1
    others = torch.tensor([code for code in range(1, 256) if code not in signals.tolist()])
    codes = others[torch.randint(len(others), (2048, 16), generator=generator)]
    target = torch.arange(2048) % 2
    place = torch.randint(16, (2048, 1), generator=generator)
    chosen = signals[torch.randint(8, (2048, 1), generator=generator)]
    codes = torch.where(target.unsqueeze(1) == 1, codes.scatter(1, place, chosen), codes)
    return ((codes.unsqueeze(-1) >> torch.arange(8)) & 1).float(), target.float()


def latched(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """2048 sequences of 32 characters: the first is one of two signals, to be told at the end."""
    characters = torch.randint(2, 20, (2048, 32), generator=generator)
    target = torch.randint(2, (2048,), generator=generator)
    characters[:, 0] = target
    return F.one_hot(characters, 20).float(), target.float()


def accuracy(data: Tensor, target: Tensor, epochs: int) -> float:
    """On the last quarter, after training on the rest."""
    torch.manual_seed(0)
    size, count = data.shape[-1], 3 * len(data) // 4
    pooling = HopfieldPooling(size, 8, hidden_size=8, steps=4, scale=0.25, dropout=0.5)
    network = nn.Sequential(pooling, nn.Linear(size, 1), nn.Flatten(0))
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-3)
    for _ in range(epochs):
        for batch in torch.randperm(count).split(32):
            optimiser.zero_grad()
            F.binary_cross_entropy_with_logits(network(data[batch]), target[batch]).backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimiser.step()
    network.eval()
    with torch.no_grad():
        return float(((network(data[count:]) > 0) == target[count:].bool()).float().mean())


def test_bit_patterns():
    """Better than guessing by more than five standard errors of 512 guesses."""
    data, target = bit_patterns(torch.Generator().manual_seed(0))
    assert accuracy(data, target, epochs=24) > 0.5 + 5 * 0.5 / 512**0.5


def test_latched_signals():
    """There is no noise: all but 1 % are right."""
    data, target = latched(torch.Generator().manual_seed(0))
    assert accuracy(data, target, epochs=4) > 0.99
