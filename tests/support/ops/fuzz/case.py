"""A call of a kernel beside the same in float64 on explicit matrices, and their comparison."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from tests.support.ops.fuzz.arithmetic import Rounding
from tests.support.ops.fuzz.draws import View
from tests.support.rounding import FAST_EXPONENTIAL
from torch import Tensor

Tensors = dict[str, Tensor]

DRAWS = 6
GRADIENT = "gradient"
STAGES = 32
"""A kernel has a few more roundings on its way than the formula, adds up in another order, and equal numbers are rounded to
the same side, which draws seldom are."""


@dataclass(frozen=True)
class Case:
    """What is drawn, how the kernel is called with it, and how the results are computed from explicit matrices."""

    leaves: Tensors
    """On the CPU, in the dtypes that the kernel gets."""
    views: dict[str, View]
    kernel: Callable[[Tensors], Tensors]
    """From views of the leaves, on any device, to results by name."""
    explicit: Callable[[Tensors, Rounding], Tensors]
    """From views of the leaves, in float64 on the CPU, to the same results."""
    learned: tuple[str, ...] = ()
    """Leaves whose gradients are compared."""
    order: int = 1
    """Of the derivatives."""
    constant: tuple[str, ...] = ()
    """Results whose gradients are not compared."""
    check: Callable[[Tensors, Tensors], list[str]] = field(default=lambda views, results: [])
    """What is wrong with results that are no smooth function, such as a position: from views in float64."""
    unchecked: tuple[str, ...] = ()
    """These results, which only `check` looks at."""

    coarse: bool = False
    """Whether queries are multiplied by a scale before their scores are formed, and rounded to their dtype again."""

    steps: int = 1
    """How many times a running result is rounded, one block after the other."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the kernel's arguments."""
        return next(iter(self.leaves.values())).dtype


def errors(case: Case, device: str) -> list[str]:
    """What is wrong with the kernel's results and gradients; none if all is right."""
    found, cotangents = _evaluate(case, case.kernel, _leaves(case, lambda leaf: leaf.to(device)), None)
    checked = case.check(_views(case, _leaves(case, _exact)), {name: part.cpu() for name, part in found.items()})
    found = {name: part.detach().cpu() for name, part in found.items() if name not in case.unchecked}
    exact = {name: part.detach() for name, part in _explicit(case, Rounding(), cotangents).items()}
    roundings = {name: _rounding_of(name, part.dtype, case) for name, part in found.items()}
    spreads = {size: _spread(case, size, exact, cotangents) for size in set(roundings.values())}
    wrong = []
    for name, part in found.items():
        spread = spreads[roundings[name]][name]
        if name.startswith(f"{GRADIENT} 2"):
            # Sums of products of up to three of the numbers given, which may cancel entirely.
            spread = spread + STAGES * roundings[name] * _largest(case.leaves) ** 3
        wrong += _compare(name, part, exact[name], spread, case)
    return checked + wrong


def _rounding_of(name: str, dtype: torch.dtype, case: Case) -> float:
    """A result's own; a gradient's is the coarser one of the leaf's and the arguments', with which its cotangents come."""
    own, of_arguments = torch.finfo(dtype).eps, torch.finfo(case.dtype).eps
    return max(own, of_arguments) if case.coarse or name.startswith(GRADIENT) else own


def _largest(leaves: Tensors) -> float:
    """The largest finite number, at least 1."""
    sizes = [leaf.double().abs() for leaf in leaves.values() if leaf.is_floating_point()]
    return max([1.0, *(float(size.where(size.isfinite(), 0.0).max()) for size in sizes if size.numel() > 0)])


def _exact(leaf: Tensor) -> Tensor:
    return leaf.double() if leaf.is_floating_point() else leaf


def _leaves(case: Case, change: Callable[[Tensor], Tensor]) -> Tensors:
    """Copies, which require gradients where they are learned."""
    return {name: change(leaf).clone().requires_grad_(name in case.learned) for name, leaf in case.leaves.items()}


def _views(case: Case, leaves: Tensors) -> Tensors:
    return {name: case.views[name](leaf) for name, leaf in leaves.items()}


def _explicit(case: Case, rounding: Rounding, cotangents: Tensors) -> Tensors:
    def function(views: Tensors) -> Tensors:
        return case.explicit(views, rounding)

    return _evaluate(case, function, _leaves(case, _exact), cotangents)[0]


def _spread(case: Case, size: float, exact: Tensors, cotangents: Tensors) -> Tensors:
    """How far rounding may move each number: the largest of a few moves, and their typical size, since one may be lucky."""
    largest = {name: torch.zeros_like(part, dtype=torch.float64) for name, part in exact.items()}
    for seed in range(DRAWS):
        for name, part in _explicit(case, Rounding(size, seed), cotangents).items():
            move = (part.detach() - exact[name]).nan_to_num(0.0).abs()
            largest[name] = torch.maximum(largest[name], move)
    stages = STAGES * case.steps**0.5
    return {name: stages * (move + _typical(move)) for name, move in largest.items()}


def _typical(moves: Tensor) -> Tensor:
    """Root mean square of those that are not 0, as all are of a leaf that is not in the view."""
    return moves.square().sum().div((moves > 0).sum().clamp_min(1)).sqrt()


def _evaluate(
    case: Case, function: Callable[[Tensors], Tensors], leaves: Tensors, cotangents: Tensors | None
) -> tuple[Tensors, Tensors]:
    """Results, and gradients of their sum with unlike factors, by name; the factors."""
    results = function(_views(case, leaves))
    kept = {} if cotangents is None else cotangents
    total = dict(results)
    learned = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    parts = {name: part for name, part in results.items() if name not in (*case.constant, *case.unchecked)}
    for order in range(1, 1 + case.order if learned else 1):
        loss = _loss(parts, kept, f"{order}", cotangents is None)
        gradients = [torch.zeros_like(leaf) for leaf in learned.values()]
        if loss.requires_grad:
            gradients = torch.autograd.grad(
                loss, list(learned.values()), create_graph=order < case.order, allow_unused=True, materialize_grads=True
            )
        parts = {f"{GRADIENT} {order} of {name}": part for name, part in zip(learned, gradients, strict=True)}
        total |= parts
    return total, kept


def _loss(parts: Tensors, cotangents: Tensors, order: str, draw: bool) -> Tensor:
    """Σ factor·result over results that are finite and have gradients."""
    loss = torch.zeros((), dtype=torch.float64)
    for place, (name, part) in enumerate(parts.items()):
        if draw:
            generator = torch.Generator().manual_seed(place)
            factor = torch.randn(part.shape, generator=generator, dtype=torch.float64).to(part.dtype)
            cotangents[f"{order} {name}"] = factor
        factor = cotangents[f"{order} {name}"].to(part.device, part.dtype)
        if part.requires_grad:
            finite = part.where(part.detach().isfinite(), 0.0)
            loss = loss.to(part.device) + (finite * factor).sum().double()
    return loss


def _compare(name: str, found: Tensor, exact: Tensor, spread: Tensor, case: Case) -> list[str]:
    if found.shape != exact.shape:
        return [f"{name} has shape {tuple(found.shape)}, right {tuple(exact.shape)}"]
    floor = torch.finfo(found.dtype).smallest_normal * torch.finfo(found.dtype).eps
    bound = spread + 4 * floor
    if case.dtype.itemsize == 2 and found.dtype.itemsize > 2:
        # In half precision the processor's fused attention has an exponential of its own.
        bound = bound + 2 * FAST_EXPONENTIAL * (1 + exact.abs().where(exact.isfinite(), 0.0))
    # What its dtype cannot hold is infinite.
    exact = torch.where(exact.abs() > torch.finfo(found.dtype).max, exact.sign() * torch.inf, exact)
    found = found.double()
    error = torch.where((found == exact) | (found.isnan() & exact.isnan()), 0.0, (found - exact).abs())
    wrong = ~(error <= bound)
    if not bool(wrong.any()):
        return []
    place = int(torch.where(error.isnan(), torch.inf, error - bound).flatten().argmax())
    numbers = [float(part.expand_as(error).flatten()[place]) for part in (found, exact, error, bound)]
    wrong_numbers = "{:.9g} for {:.9g}, off by {:.2g} where rounding is {:.2g}".format(*numbers)
    return [f"{name}: {int(wrong.sum())} of {wrong.numel()} wrong, {wrong_numbers}"]
