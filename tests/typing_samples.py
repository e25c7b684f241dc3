"""What type checkers know of the results: checked by pyright and by mypy in its strict mode, and run.

Each `assert_type` fails where a result is Any or a union.
"""

from typing import assert_type

import torch
from torch import Tensor

import massieu
from massieu import measures, nn, ops
from massieu.ops.contrastive import ContrastResult
from massieu.ops.vocabulary import CrossEntropyResult


def losses(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    loss = ops.linear_cross_entropy(hidden, weight, target, label_smoothing=0.1, reduction="sum")
    assert_type(loss, Tensor)
    ops.linear_cross_entropy(hidden, weight, target).backward()
    both = ops.linear_cross_entropy(hidden, weight, target, z_loss=1e-4, return_log_partition=True)
    assert_type(both, CrossEntropyResult)
    assert_type(both.log_partition, Tensor)
    contrast = ops.info_nce(hidden, hidden, temperature=0.1, symmetric=True)
    assert_type(contrast, Tensor)
    assert_type(ops.info_nce(hidden, hidden, temperature=0.1, return_log_partition=True), ContrastResult)
    assert_type(ops.n_pairs(hidden, hidden), Tensor)
    assert_type(ops.nca(hidden, target), Tensor)
    assert_type(ops.nca(hidden, target, return_log_partition=True).loss, Tensor)
    return loss + both.loss + contrast


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    found = ops.attention(query, key, value, is_causal=True)
    assert_type(found.output, Tensor)
    assert_type(found.log_partition, Tensor)
    assert_type(ops.attention_moments(query, key).entropy, Tensor)
    assert_type(ops.attention_moments(query, key, moments={"entropy"}).entropy, Tensor | None)
    assert_type(ops.attention_received(query, key).total, Tensor)
    return massieu.ops.attention(query, key, value).output


def values(points: Tensor, eta: Tensor) -> Tensor:
    atoms = measures.Atoms.create(points)
    assert_type(atoms, measures.Atoms)
    assert_type(atoms.mean(eta), Tensor)
    return atoms.log_partition(eta)


def modules(tokens: Tensor) -> Tensor:
    block = nn.EnergyTransformer(8, 2, steps=1)
    assert_type(block.forward(tokens, need_energies=True), tuple[Tensor, Tensor])
    hopfield = nn.Hopfield(8, 2, steps=3)
    assert_type(hopfield.forward(tokens), Tensor)
    assert hopfield.convergence is not None
    assert_type(hopfield.convergence.residual, Tensor)
    return block.forward(tokens)


def heads(tokens: Tensor) -> Tensor:
    module = nn.Attention(8, 2, batch_first=True)
    output, weights = module(tokens, tokens, tokens, need_weights=False)
    assert_type(output, Tensor)
    assert_type(weights, Tensor | None)
    assert_type(module(tokens, need_moments=True)[2].entropy, Tensor)
    assert_type(module(tokens, need_log_partition=True)[2], Tensor)
    return output


if __name__ == "__main__":
    draw = torch.randn(4, 8, requires_grad=True)
    assert heads(draw.detach().reshape(1, 4, 8)).isfinite().all()
    assert losses(draw, torch.randn(5, 8), torch.tensor([0, 1, 0, 1])).isfinite()
    assert attention(*(torch.randn(1, 2, 5, 8) for _ in range(3))).shape == (1, 2, 5, 8)
    assert values(torch.randn(5, 8), torch.randn(8)).isfinite()
    assert modules(torch.randn(2, 5, 8)).shape == (2, 5, 8)
    assert massieu.__version__
