"""Laws of every contract: a result depends neither on the batch, nor on the precision, nor on how the call is run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from massieu.testing.checks import EXACT, CaseT, Checks, Law, agree, checks_of, no_values

_STEP = 1e-4
"""Step of finite differences."""


@dataclass(frozen=True, eq=False)
class SuiteCase:
    """Fields of the cases of all suites except that of measures.

    Attributes:
        exempt: Names of laws that the object does not promise, each with the reason.
        compile_backend: Backend of `torch.compile`, such as "aot_eager" (seconds); None leaves "compiled" out.
    """

    exempt: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    compile_backend: str | None = field(default=None, kw_only=True)


@dataclass(frozen=True, eq=False)
class Trial(Generic[CaseT]):
    """A value, the points at which it is called, and its functions from points (*lead, *item) to results (*lead, …)."""

    case: CaseT
    value: Any  # in float64
    points: Tensor  # (*batch, *query, *item) with one or more query dimensions, in float64 or whole numbers
    functions: Mapping[str, Callable[[Any, Tensor], Tensor]]
    item: int  # Number of dimensions of one item.
    batch: int = 0  # Number of leading dimensions that the value's tensors have too.

    @property
    def query(self) -> int:
        """The last of the query dimensions."""
        return self.points.ndim - self.item - 1

    def at(self, points: Tensor) -> "Trial[CaseT]":
        return replace(self, points=points)

    def scaled(self, scales: Sequence[float]) -> "Trial[CaseT]":
        """The trial at the points times each of the scales."""
        return self.at(torch.cat([scale * self.points for scale in scales], self.query))

    def agree(self, law: str, actual: Tensor, expected: Tensor, tolerance: Tensor | float) -> None:
        agree(law, self.points.flatten(-self.item), actual, expected, tolerance)

    def at_most(self, law: str, actual: Tensor, bound: Tensor, tolerance: Tensor | float) -> None:
        self.agree(law, actual, torch.minimum(actual, bound.expand_as(actual)), tolerance)

    def same(self, law: str, actual: Tensor, expected: Any, tolerance: float = EXACT) -> None:
        """As `agree`, relative to the largest entry of each item and to one."""
        expected = torch.as_tensor(expected, dtype=actual.dtype, device=actual.device)
        if expected.shape != actual.shape:
            raise AssertionError(f"{law}: got shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
        rest = tuple(range(self.query + 1, expected.ndim))
        size = expected.detach().abs()
        if rest and expected.numel():
            size = size.amax(rest, keepdim=True)
        self.agree(law, actual, expected, tolerance * (1 + size.nan_to_num(posinf=0.0)))

    def drawn(self, like: Tensor | None = None, seed: int = 0) -> Tensor:
        """Normal draws of the shape of `like`, by default of the points."""
        like = self.points if like is None else like
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(like.shape, dtype=torch.float64, generator=generator).to(like.device)


def slope(function: Callable[[float], Tensor]) -> Tensor:
    """The derivative of a function at 0, by central five-point differences; error h⁴."""
    near = function(_STEP) - function(-_STEP)
    far = function(2 * _STEP) - function(-2 * _STEP)
    return (8 * near - far) / (12 * _STEP)


def check_structure(trial: Trial[Any]) -> None:
    value = trial.value
    leaves, structure = pytree.tree_flatten(value)
    again = pytree.tree_unflatten(leaves, structure)
    if type(again) is not type(value) or again is value:
        raise AssertionError(f"structure: {type(value).__name__} is no pytree")
    for name, function in trial.functions.items():
        whole = function(value, trial.points)
        trial.same(f"structure: {name} of the value put together again", function(again, trial.points), whole, 0.0)


def check_one_by_one(trial: Trial[Any]) -> None:
    value = trial.value
    points = trial.points
    query = trial.query
    leaves = value._tensors()
    sliced = trial.batch > 0 and all(leaf.shape[:1] == points.shape[:1] for leaf in leaves)
    for name, function in trial.functions.items():
        whole = function(value, points)
        alone = [function(value, point) for point in points.unbind(query)]
        trial.same(f"one by one: {name} of all queries", whole, torch.stack(alone, query))
        if sliced:
            parts = [
                pytree.tree_map(lambda leaf, i=i: leaf[i] if isinstance(leaf, Tensor) else leaf, value)
                for i in range(len(points))
            ]
            alone = [function(*pair) for pair in zip(parts, points, strict=True)]
            trial.same(f"one by one: {name} of the whole batch", whole, torch.stack(alone))


def check_vmap(trial: Trial[Any]) -> None:
    value = trial.value
    points = trial.points
    query = trial.query
    for name, function in trial.functions.items():
        mapped = torch.func.vmap(function, (None, query))(value, points).movedim(0, query)
        trial.same(f"vmap: {name}", mapped, function(value, points))


def _numbers(trial: Trial[Any]) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], tuple[Any, Tensor]]]:
    """The floating-point tensors of value and points, and the function that makes value and points of such tensors."""
    leaves, structure = pytree.tree_flatten((trial.value, trial.points))
    indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]

    def rebuild(numbers: Sequence[Tensor]) -> tuple[Any, Tensor]:
        all_leaves = list(leaves)
        for index, number in zip(indices, numbers, strict=True):
            all_leaves[index] = number
        return pytree.tree_unflatten(all_leaves, structure)

    return [leaves[index] for index in indices], rebuild


def _directions(trial: Trial[Any], numbers: Sequence[Tensor], seed: int) -> list[Tensor]:
    """A random change of each tensor of `_numbers` that keeps it valid."""
    directions = []
    for index, number in enumerate(numbers):
        direction = trial.drawn(number, seed + index)
        if number.ndim > 1 and number.shape[-1] == number.shape[-2]:
            # A square matrix may be a covariance, which must stay symmetric.
            direction = (direction + direction.mT) / 2
        directions.append(torch.where(number.isfinite(), direction, 0.0))
    points = trial.points
    if points.is_floating_point() and bool((points == points.round()).all()):
        # The function may be defined at whole numbers alone. The points are the last tensor.
        directions[-1] = torch.zeros_like(points)
    return directions


def _derivative(
    function: Callable[[Sequence[Tensor]], Tensor], numbers: Sequence[Tensor], directions: Sequence[Sequence[Tensor]]
) -> Tensor:
    """The derivative of a function of the numbers along the first direction, of that along the second, and so on."""
    leaves = [number.clone().requires_grad_() for number in numbers]
    value = function(leaves)
    for direction in directions:
        gradients = [None]
        if value.requires_grad:
            gradients = torch.autograd.grad(value, leaves, create_graph=True, allow_unused=True)
        value = value.new_zeros(())
        for gradient, part in zip(gradients, direction, strict=False):
            if gradient is not None:
                value = value + (gradient * part).sum()
    return value.detach()


def check_derivatives(trial: Trial[Any]) -> None:
    """First and second derivatives in points and in the value's tensors, by reverse mode, equal finite differences."""
    numbers, rebuild = _numbers(trial)
    first, second = (_directions(trial, numbers, seed) for seed in (1, 100))
    for name, function in trial.functions.items():
        result = function(trial.value, trial.points)
        weight = trial.drawn(result, 200)
        size = 1 + (weight * result).nan_to_num(posinf=0.0).abs().sum()

        def total(tensors: Sequence[Tensor], function: Any = function, weight: Tensor = weight) -> Tensor:
            result = function(*rebuild(tensors))
            return torch.where(result.isfinite(), weight * result, 0.0).sum()

        # The derivative along `first` of the function, and of its derivative along `second`.
        for law, earlier in (("derivatives", []), ("derivatives, twice", [second])):

            def moved(t: float, total: Any = total, earlier: Sequence[Sequence[Tensor]] = earlier) -> Tensor:
                return _derivative(total, [x + t * part for x, part in zip(numbers, first, strict=True)], earlier)

            actual = _derivative(total, numbers, [*earlier, first])
            agree(f"{law}: {name}", actual, actual, slope(moved), 1e-7 * (size + actual.abs()))


def check_precision(trial: Trial[Any]) -> None:
    """Float32 and float64 differ by what a few roundings of the points and of the value's tensors do to each result."""
    numbers, rebuild = _numbers(trial)
    small = [number.float() for number in numbers]
    eps = torch.finfo(torch.float32).eps
    nudge = 1e-6
    value, points = rebuild([number.double() for number in small])
    for name, function in trial.functions.items():
        actual = function(*rebuild(small))
        expected = function(value, points)
        if actual.dtype != torch.float32:
            raise AssertionError(f"precision: {name} of float32 is {actual.dtype}")
        moved = torch.zeros_like(expected)
        for seed in range(3):
            directions = _directions(trial, numbers, 10 * seed)
            nudged = [x.double() * (1 + nudge * part) for x, part in zip(small, directions, strict=True)]
            moved = torch.maximum(moved, (function(*rebuild(nudged)) - expected).abs().nan_to_num(0.0, 0.0))
        rest = tuple(range(trial.query + 1, expected.ndim))
        # moved/nudge is how much a result changes per relative change of the tensors: its condition.
        size = (expected.abs() + moved / nudge).nan_to_num(posinf=0.0)
        size = size.amax(rest, keepdim=True) if rest and size.numel() else size
        trial.agree(f"precision: {name} in float32", actual, expected, 64 * eps * (1 + size))


def check_half_precision(trial: Trial[Any]) -> None:
    """Half precision is promoted: the result is that of the same numbers in float32."""
    numbers, rebuild = _numbers(trial)
    for dtype in (torch.bfloat16, torch.float16):
        half = [number.to(dtype) for number in numbers]
        for name, function in trial.functions.items():
            actual = function(*rebuild(half))
            expected = function(*rebuild([number.float() for number in half]))
            if actual.dtype != torch.float32:
                raise AssertionError(f"half precision: {name} of {dtype} is {actual.dtype}")
            # Rounding to half precision may have moved a point out of the domain.
            is_finite = expected.isfinite()
            actual, expected = (torch.where(is_finite, number, 0.0) for number in (actual, expected))
            trial.same(f"half precision: {name} of {dtype}", actual, expected, 1e-4)


def check_no_query(trial: Trial[Any]) -> None:
    for name, function in trial.functions.items():
        expected = function(trial.value, trial.points)
        none = function(trial.value, trial.points.narrow(trial.query, 0, 0))
        shape = (*expected.shape[: trial.query], 0, *expected.shape[trial.query + 1 :])
        if none.shape != shape or none.dtype != expected.dtype:
            raise AssertionError(f"no query: {name} gave {none.dtype} of shape {tuple(none.shape)}, expected {shape}")


def check_meta(trial: Trial[Any]) -> None:
    """On the meta device results and gradients have the right shapes, and no two devices are mixed."""
    results = {name: function(trial.value, trial.points) for name, function in trial.functions.items()}
    with no_values():
        value = trial.value.to("meta")
        points = trial.points.to("meta")
        for name, function in trial.functions.items():
            expected = results[name]
            argument = points.clone()
            if argument.is_floating_point():
                argument.requires_grad_()
            actual = function(value, argument)
            if (actual.device.type, actual.shape, actual.dtype) != ("meta", expected.shape, expected.dtype):
                raise AssertionError(
                    f"meta: {name} gave {actual.dtype} of shape {tuple(actual.shape)} on {actual.device}"
                )
            if actual.requires_grad:
                actual.sum().backward()


def check_not_a_number(trial: Trial[Any]) -> None:
    """NaN in an item gives NaN or a ValueError, never a number, and leaves the results of the others as they are."""
    points = trial.points.clone()
    points.select(trial.query, 0).flatten(-trial.item)[..., 0] = torch.nan
    for name, function in trial.functions.items():
        try:
            actual = function(trial.value, points)
        except ValueError:
            continue
        of_nan = actual.select(trial.query, 0)
        if actual.ndim > trial.query + 1:
            # One NaN among the entries of a result is enough, which the sum shows.
            of_nan = of_nan.flatten(trial.query).sum(-1)
        if not bool(of_nan.isnan().all()):
            raise AssertionError(f"not a number: {name} of NaN is a number")
        others = actual.movedim(trial.query, 0)[1:]
        expected = function(trial.value, trial.points).movedim(trial.query, 0)[1:]
        if not torch.allclose(others, expected, rtol=1e-9, atol=1e-9):
            raise AssertionError(f"not a number: NaN in one item changes {name} of the others")


def check_compiled(trial: Trial[Any]) -> None:
    for name, function in trial.functions.items():
        expected = function(trial.value, trial.points)
        torch.compiler.reset()
        compiled = torch.compile(function, fullgraph=True, backend=trial.case.compile_backend)
        trial.same(f"compiled: {name}", compiled(trial.value, trial.points), expected)


def _missing_backend(case: Any) -> str | None:
    return None if case.compile_backend else "no backend is given"


EVERYWHERE: dict[str, Law[Any, Trial[Any]]] = {
    law.name: law
    for law in (
        Law("structure", check_structure),
        Law("one by one", check_one_by_one),
        Law("vmap", check_vmap),
        Law("derivatives", check_derivatives),
        Law("precision", check_precision),
        Law("half precision", check_half_precision),
        Law("no query", check_no_query),
        Law("meta", check_meta),
        Law("not a number", check_not_a_number),
        Law("compiled", check_compiled, _missing_backend),
    )
}
"""The laws, by their names."""


def without(field: str) -> Callable[[Any], str | None]:
    """The reason to leave a law out if the case does not have this field."""
    return lambda case: None if getattr(case, field) is not None else f"no `{field}` is given"


def checks_with_exemptions(case: Any, trial_of: Callable[[Any], Any], laws: Sequence[Law[Any, Any]]) -> Checks:
    """The checks of a case, without the laws from which it is exempt.

    Raises:
        ValueError: the case is exempt from a law that the suite does not have.
    """
    if unknown := set(case.exempt) - {law.name for law in laws}:
        raise ValueError(f"exempt names no law of this suite: {min(unknown)}; it has {[law.name for law in laws]}")

    def with_exemption(law: Law[Any, Any]) -> Law[Any, Any]:
        return replace(law, missing=lambda case: case.exempt.get(law.name) or law.missing(case))

    return checks_of(case, trial_of, [with_exemption(law) for law in laws])
