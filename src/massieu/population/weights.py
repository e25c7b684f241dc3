"""An attention layer's weights and what it attends to: what they must be, and how they are applied."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from massieu.measures import Atoms, Measure
from massieu.measures.value import values_are_readable
from massieu.population.arguments import need_finite, need_tensors
from massieu.population.operator import Value


class Moving(Value):
    """The particles themselves are what is attended to."""


def split_heads(points: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Float[Tensor, "B H n K"]:
    """(*batch, n, d) through (H, K, d), batches flattened."""
    flat = points.reshape(points.shape[:-2].numel(), *points.shape[-2:])
    image = F.linear(flat, matrix.flatten(0, 1), None if bias is None else bias.flatten())
    return image.unflatten(-1, matrix.shape[:2]).transpose(1, 2)


def aligned(tensor: Tensor, batch: torch.Size, rest: int) -> Tensor:
    """A measure's tensor, whose batch is a prefix of `batch`, spread over it."""
    own = tensor.shape[: tensor.ndim - rest]
    if own != batch[: len(own)]:
        raise ValueError(
            f"a population of batch shape {tuple(own)} cannot be attended to by particles of {tuple(batch)}"
        )
    tail = tensor.shape[tensor.ndim - rest :]
    return tensor.reshape(*own, *[1] * (len(batch) - len(own)), *tail).expand(*batch, *tail)


def check_weights(query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
    named = {"query": query, "key": key, "value": value, "output": output}
    for name, weight in named.items():
        if not isinstance(weight, Tensor) or not weight.is_floating_point():
            kind = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
            raise TypeError(f"{name} must be a floating-point tensor, got {kind}")
    shapes = {name: tuple(weight.shape) for name, weight in named.items()}
    fits = (
        query.ndim == 3
        and key.shape == query.shape
        and value.ndim == 3
        and (len(value), value.shape[-1]) == (len(query), query.shape[-1])
        and output.shape == value.mT.shape
        and query.numel() > 0
    )
    if not fits:
        raise ValueError(
            "query and key must have shape (H, K, d), value (H, E, d) and output (H, d, E), got "
            + ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        )
    if values_are_readable(*named.values()) and not all(bool(weight.isfinite().all()) for weight in named.values()):
        raise ValueError("weights of a layer must be finite")


def filled(name: str, given: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor:
    if given is None:
        return like.new_zeros(shape)
    need_tensors(**{name: given})
    if tuple(given.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(given.shape)}")
    need_finite(**{name: given})
    return given.to(like)


def what_is_attended_to(population: Measure | Tensor | None, width: int) -> Measure | Moving:
    if population is None:
        return Moving()
    if isinstance(population, Tensor):
        population = Atoms.create(population)
    if not isinstance(population, Measure):
        raise TypeError(f"population must be a measure, a tensor of points or None, got {type(population).__name__}")
    if population.event_shape != (width,):
        raise ValueError(f"population must live in {width} dimensions, got {tuple(population.event_shape)}")
    return population
