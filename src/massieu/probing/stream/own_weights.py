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
    candidates = _Candidates(module, state)
    for result in results:
        match = next(candidates.matching(result.flatten()), None)
        if match is None:
            return None
        weight, bias = match
        maps.append((weight.unflatten(0, result.shape), bias.view(result.shape)))
    return maps


class _Candidates:
    """The weights and biases of a module that can be applied to a state.

    Attributes:
        matrices: weights, as they are or transposed.
        vectors: biases, by their size.
    """

    def __init__(self, module: nn.Module, state: Float[Tensor, " D"]) -> None:
        self.state = state
        self.matrices: list[Float[Tensor, "_ D"]] = []
        self.vectors: dict[int, list[Tensor]] = defaultdict(list)
        self._products: dict[int, Tensor] = {}
        for parameter in module.parameters():
            is_alike = (parameter.dtype, parameter.device) == (state.dtype, state.device)
            if type(parameter) is not nn.Parameter or not is_alike:
                continue
            weight = parameter.detach()
            if weight.dim() == 1:
                self.vectors[len(weight)].append(weight)
            elif weight.dim() == 2:
                self.matrices += [matrix for matrix in (weight, weight.mT) if matrix.shape[1] == len(state)]

    def matching(self, result: Float[Tensor, " N"]) -> Iterator[tuple[Float[Tensor, "N D"], Float[Tensor, " N"]]]:
        """Parts of the module's weights and biases that map the state to the result."""
        size = len(result)
        largest_error = _ROUNDING[self.state.dtype] * result.abs().max()
        for place, matrix in enumerate(self.matrices):
            if matrix.shape[0] % size:
                continue
            product = self._product(place)
            for bias in (product.new_zeros(len(product)), *self.vectors[len(product)]):
                # Every part of a fused weight at once: (parts, size) against the result.
                errors = (product + bias).view(-1, size).sub(result).abs().amax(1)
                for part in (errors <= largest_error).nonzero()[:, 0].tolist():
                    rows = slice(part * size, (part + 1) * size)
                    yield matrix[rows], bias[rows]

    def _product(self, place: int) -> Tensor:
        """A matrix times the state, computed for the first result that asks for it."""
        if place not in self._products:
            self._products[place] = self.matrices[place] @ self.state
        return self._products[place]


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
