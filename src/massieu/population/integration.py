"""Layers as the velocity of an ordinary differential equation, integrated between times."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import described, floating, number, whole_number
from massieu.foundation.doors import door, sequence

Layer = Callable[[Tensor], Tensor]
"""particles (*batch, n, d) ↦ particles of the same shape: an `Operator`, a module, a function."""

_ORDERS = (1, 2, 4)
_MOST_STEPS = 10**7


@door(steps=whole_number, order=whole_number, times=None)
def integrate(
    layers: Layer | Sequence[Layer],
    particles: Float[Tensor, "*batch n d"],
    times: Sequence[float],
    *,
    steps: int = 1,
    order: int = 1,
) -> Float[Tensor, "times *batch n d"]:
    """The particles at each of the times, if layers are the velocity of a flow: dx/dt = layer_⌊t⌋(x) − x (Shim §2.3).

    A residual network is Euler's method for this equation, with one step a layer: at whole times the defaults return what
    the layers themselves return. More steps or a higher order approach the flow. If that is another result, the network is
    no discretised flow. A single layer is the velocity at all times. Differentiable; all steps are kept for that.

    Args:
        layers: Residual layers x ↦ x + f(x), the first for times 0 to 1; or one. Without the residual term, f(x) alone, write
            ``lambda x: x + f(x)``.
        particles: At the first of the times.
        times: Where the particles are returned, in their order; they may fall, which integrates backwards. Of L layers
            between 0 and L.
        steps: Of each unit of time; at least one between two times and within each layer.
        order: 1: Euler's method; 2: the midpoint rule; 4: the classical Runge–Kutta method.

    Raises:
        TypeError: layers that cannot be called, or that return no tensor; times that are no numbers.
        ValueError: no time, a time that is not finite or outside the layers; another order; a layer that changes the shape.

    Example:
        >>> import torch
        >>> from massieu.population import integrate
        >>> grow = lambda x: x + x  # dx/dt = x
        >>> one = torch.ones(1, 1)
        >>> [round(integrate(grow, one, [0.0, 1.0], steps=n, order=4)[-1].item(), 4) for n in (1, 8)]  # e = 2.7183
        [2.7083, 2.7183]
    """
    layers = [layers] if callable(layers) else list(sequence("layers", layers))
    for layer in layers:
        if not callable(layer):
            raise TypeError(f"each of layers must be callable, got {described(layer)}")
    if order not in _ORDERS:
        raise ValueError(f"order must be 1, 2 or 4, got {order}")
    whole_number("steps", steps, least=1, most=_MOST_STEPS)
    last = len(layers) if len(layers) > 1 else None
    moments = _times(times, last)
    if not layers:
        raise ValueError("layers must be one or more, got none")
    state = floating("particles", particles)
    states = [state]
    for begin, end in pairwise(moments):
        for start, stop, index in _pieces(begin, end, None if last is None else last - 1):
            # Rounding must not add a step: three tenths of ten steps are three.
            count = max(1, math.ceil(abs(stop - start) * steps - 1e-9))
            for _ in range(count):
                state = _step(layers[index], state, (stop - start) / count, order)
        states.append(state)
    # A layer may compute in a wider dtype than that of the particles.
    return torch.stack([each.to(states[-1].dtype) for each in states])


def _times(times: Sequence[float], last: int | None) -> list[float]:
    """The checked times; `last` is the largest one allowed, None for any time."""
    moments = [float(number("each of times", time)) for time in sequence("times", times)]
    if not moments:
        raise ValueError("times must name at least one time, got none")
    for time in moments:
        if last is not None and not 0 <= time <= last:
            raise ValueError(f"times must lie between 0 and {last}, the number of layers, got {time:g}")
    return moments


def _pieces(begin: float, end: float, highest: int | None) -> Iterator[tuple[float, float, int]]:
    """The way from one time to another, cut where one layer follows another: start, stop and the layer of each piece.

    Args:
        highest: The number of the last layer; None where one layer is the velocity at all times, which is never cut.
    """
    if highest is None:
        if begin != end:
            yield begin, end, 0
        return
    low, high = sorted((begin, end))
    cuts = [low, *(float(time) for time in range(math.floor(low) + 1, math.ceil(high))), high]
    if begin > end:
        cuts.reverse()
    for start, stop in pairwise(cuts):
        if start != stop:
            yield start, stop, min(math.floor(min(start, stop)), highest)


def _step(layer: Layer, state: Tensor, length: float, order: int) -> Tensor:
    """One step of an explicit Runge–Kutta method."""
    first = _velocity(layer, state)
    if order == 1:
        return state + length * first
    second = _velocity(layer, state + length / 2 * first)
    if order == 2:
        return state + length * second
    third = _velocity(layer, state + length / 2 * second)
    fourth = _velocity(layer, state + length * third)
    return state + length / 6 * (first + 2 * second + 2 * third + fourth)


def _velocity(layer: Layer, state: Tensor) -> Tensor:
    """layer(x) − x; raises TypeError or ValueError if the layer returns something else than particles."""
    moved = layer(state)
    if not isinstance(moved, Tensor):
        raise TypeError(f"each of layers must return a tensor, got {described(moved)}")
    if moved.shape != state.shape:
        raise ValueError(f"each of layers must keep the shape {tuple(state.shape)}, got {tuple(moved.shape)}")
    return moved - state
