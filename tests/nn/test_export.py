"""Exported modules: one graph for every batch and length, and one of PyTorch's own operators alone."""

import functools

import pytest
import torch
from tests.nn.test_every_module import CASES, SIZE, made
from tests.support.rows import some_slow
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from massieu import nn as modules
from massieu import ops

FIXED_LENGTH = {
    "SoftmaxHeads": "a window makes as many chunks as fit the length",
    "TAPHeads": "all tokens are one item, and as many directions of it are tried as it has numbers",
    "EnergyTransformer": "one block of queries as long as it fits, which is a bound on the length",
    "EnergyTransformerStack": "the same",
}
"""Of these the length stays that of the example."""
NO_TOKENS = ("RestrictedBoltzmannMachine", "StackedBoltzmannMachine", "DeepBoltzmannMachine", "SigmaReparametrization")
SAME_GRAPH = ("EntmaxHeads, learned", "ImplicitHeads, learned", "Hopfield, to its end", "SpinAttention, to its end")
"""They are solved as "EntmaxHeads", "ImplicitHeads" and "TAPHeads" are, in graphs that take long."""
QUICK = ("HopfieldLayer",)
NAMES = [*QUICK, *(name for name in CASES if name not in (*QUICK, *NO_TOKENS, *SAME_GRAPH))]


class OfTokens(nn.Module):
    """A module of one tensor, as its first result."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, tokens: Tensor) -> Tensor:
        given = (tokens, tokens, tokens) if isinstance(self.module, modules.Attention) else (tokens,)
        return next(leaf for leaf in pytree.tree_leaves(self.module(*given)) if isinstance(leaf, Tensor))


@functools.cache
def exported(name: str) -> tuple[nn.Module, torch.export.ExportedProgram]:
    """A module and its graph, made once for all tests of it."""
    module = OfTokens(made(name).eval())
    sizes = {0: torch.export.Dim("batch")}
    if name not in FIXED_LENGTH:
        sizes[1] = torch.export.Dim("length")
    return module, torch.export.export(module, (torch.rand(2, 5, SIZE),), dynamic_shapes=(sizes,))


@pytest.mark.medium
@some_slow("name", NAMES, 1)
def test_an_exported_module_takes_any_batch_and_length(name: str):
    module, program = exported(name)
    for sizes in ((3, 5), (4, 5)) if name in FIXED_LENGTH else ((3, 7), (4, 11)):
        given = torch.rand(*sizes, SIZE, generator=torch.Generator().manual_seed(2))
        torch.testing.assert_close(program.module()(given), module(given))


@pytest.mark.slow
def test_the_fused_operator_can_be_taken_apart():
    """What is left is PyTorch's own, so that a saved program loads without massieu."""

    def plain(query, key, value, mask, scale, is_causal):
        how = {"log_weight": mask, "scale": scale, "is_causal": is_causal, "backend": "reference"}
        return tuple(ops.attention(query, key, value, **how))

    module, program = exported("HopfieldLayer")
    operator = torch.ops.massieu.fused_attention.default
    assert operator in {node.target for node in program.graph.nodes}
    apart = program.run_decompositions({operator: plain})
    assert not [node for node in apart.graph.nodes if "massieu" in str(node.target)]
    given = torch.rand(3, 7, SIZE)
    torch.testing.assert_close(apart.module()(given), module(given))
