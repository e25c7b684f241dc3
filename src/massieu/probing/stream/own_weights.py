"""A linear map of a module, found among the weights that it holds instead of being read off with basis vectors.

Reading off a map takes as many tokens as the stream is wide, and memory for the result. Most modules hold the map itself: a
projection's weight, or equal parts of the weight of a fused one. So each part of each weight is applied to one random state.
If the result is the module's, the part is the map: by accident that happens with probability zero.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn

_ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-11}
"""Relative error that counts as rounding. In half precision, a small adapter could not be distinguished from rounding."""


def maps_among_weights(
    module: nn.Module, state: Float[Tensor, " D"], results: Sequence[Float[Tensor, "H Dh"]]
) -> list[tuple[Float[Tensor, "H Dh D"], Float[Tensor, "H Dh"]]] | None:
    """For each result, the weight and the bias of the module that map ``state`` to it; None unless all are found.

    Args:
        state: a random input of the module.
        results: the module's query, key and value for it.

    Returns:
        Views of the module's own parameters, and zeros where there is no bias.
    """
    if state.dtype not in _ROUNDING:
        return None
    maps: list[tuple[Tensor, Tensor]] = []
    for result in results:
        match = next(_matching(module, state, result.flatten()), None)
        if match is None:
            return None
        weight, bias = match
        maps.append((weight.unflatten(0, result.shape), bias.view(result.shape)))
    return maps


def _matching(
    module: nn.Module, state: Float[Tensor, " D"], result: Float[Tensor, " N"]
) -> Iterator[tuple[Float[Tensor, "N D"], Float[Tensor, " N"]]]:
    """Parts of the module's weights and biases that map the state to the result."""
    size = len(result)
    largest_error = _ROUNDING[state.dtype] * result.abs().max()
    matrices, vectors = _parameters(module, state)
    for matrix in matrices:
        if matrix.shape[0] % size:
            continue
        product = matrix @ state
        for bias in (product.new_zeros(len(product)), *vectors[len(product)]):
            # Every part of a fused weight at once: (parts, size) against the result.
            errors = (product + bias).view(-1, size).sub(result).abs().amax(1)
            for part in (errors <= largest_error).nonzero()[:, 0].tolist():
                rows = slice(part * size, (part + 1) * size)
                yield matrix[rows], bias[rows]


def _parameters(module: nn.Module, like: Tensor) -> tuple[list[Float[Tensor, "_ D"]], dict[int, list[Tensor]]]:
    """Matrices that can be applied to a state, as they are or transposed, and vectors by their size."""
    matrices: list[Tensor] = []
    vectors: dict[int, list[Tensor]] = defaultdict(list)
    for parameter in module.parameters():
        if type(parameter) is not nn.Parameter or (parameter.dtype, parameter.device) != (like.dtype, like.device):
            continue
        weight = parameter.detach()
        if weight.dim() == 1:
            vectors[len(weight)].append(weight)
        elif weight.dim() == 2:
            matrices += [matrix for matrix in (weight, weight.mT) if matrix.shape[1] == len(like)]
    return matrices, vectors


@contextmanager
def replaced_output(layer: nn.Module, output: Tensor) -> Iterator[None]:
    """Inside, a layer returns ``output`` in place of its own.

    Raises:
        ValueError: from the layer's call, if its own output has another shape.
    """

    def replace_output(_: nn.Module, __: object, own_output: Tensor) -> Tensor:
        if own_output.shape != output.shape:
            raise ValueError(f"the output has shape {tuple(own_output.shape)}, not {tuple(output.shape)}")
        return output

    handle = layer.register_forward_hook(replace_output)
    try:
        yield
    finally:
        handle.remove()
