"""A linear map of a module, found among the weights that it holds instead of read off with basis vectors.

Reading a map off takes as many tokens as the stream is wide and memory for the result. Most modules hold the map as it is:
a projection's weight, or equal parts of the weight of a fused one. So each part of each weight is tried on one random
state. Where it gives what the module gave, it is the map: by accident that happens with probability zero.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn

_ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-11}  # half precisions cannot tell a small adapter from rounding


def maps_among_weights(
    module: nn.Module, state: Float[Tensor, " D"], results: Sequence[Float[Tensor, "H Dh"]]
) -> list[tuple[Float[Tensor, "H Dh D"], Float[Tensor, "H Dh"]]] | None:
    """For each result, the weight and the bias of the module that make it of ``state``; None unless all are found.

    Args:
        state: a random input of the module.
        results: what the module makes of it.

    Returns:
        Views of the module's own parameters, and zeros where there is no bias.
    """
    if state.dtype not in _ROUNDING:
        return None
    found: list[tuple[Tensor, Tensor]] = []
    for result in results:
        affine = next(_matching(module, state, result.flatten()), None)
        if affine is None:
            return None
        found.append((affine[0].unflatten(0, result.shape), affine[1].view(result.shape)))
    return found


def _matching(
    module: nn.Module, state: Float[Tensor, " D"], result: Float[Tensor, " N"]
) -> Iterator[tuple[Float[Tensor, "N D"], Float[Tensor, " N"]]]:
    size = len(result)
    allowed = _ROUNDING[state.dtype] * result.abs().max()
    matrices, vectors = _parameters(module, state)
    for matrix in matrices:
        if matrix.shape[0] % size:
            continue
        product = matrix @ state
        for bias in (product.new_zeros(len(product)), *vectors[len(product)]):
            errors = (product + bias).view(-1, size).sub(result).abs().amax(1)
            for part in (errors <= allowed).nonzero()[:, 0].tolist():
                place = slice(part * size, (part + 1) * size)
                yield matrix[place], bias[place]


def _parameters(module: nn.Module, like: Tensor) -> tuple[list[Float[Tensor, "_ D"]], dict[int, list[Tensor]]]:
    """Matrices that can be applied to a state, either way round, and vectors by their size."""
    matrices: list[Tensor] = []
    vectors: dict[int, list[Tensor]] = defaultdict(list)
    for parameter in module.parameters():
        if type(parameter) is not nn.Parameter or (parameter.dtype, parameter.device) != (like.dtype, like.device):
            continue
        weight = parameter.detach()
        if weight.dim() == 1:
            vectors[len(weight)].append(weight)
        elif weight.dim() == 2:
            matrices += [turned for turned in (weight, weight.mT) if turned.shape[1] == len(like)]
    return matrices, vectors


@contextmanager
def replaced_output(layer: nn.Module, output: Tensor) -> Iterator[None]:
    """Inside, a layer gives this in place of what it computes.

    Raises:
        ValueError: from the layer, where its own output has another shape.
    """

    def given(_: nn.Module, __: object, own: Tensor) -> Tensor:
        if own.shape != output.shape:
            raise ValueError(f"the output has shape {tuple(own.shape)}, not {tuple(output.shape)}")
        return output

    handle = layer.register_forward_hook(given)
    try:
        yield
    finally:
        handle.remove()
