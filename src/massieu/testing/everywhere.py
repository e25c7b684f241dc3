"""Laws of every contract: what a call gives depends on neither the batch, nor the precision, nor the way it is run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from massieu.testing.checks import EXACT, CaseT, Checks, Law, agree, checks_of, no_values

_STEP = 1e-4


@dataclass(frozen=True, eq=False)
class SuiteCase:
    """What the cases of all suites but the measures' share.

    Attributes:
        exempt: Laws that the object does not promise, by name, each with the reason.
        compile_backend: Of `torch.compile`, such as "aot_eager" (seconds); None leaves "compiled" out.
    """

    exempt: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    compile_backend: str | None = field(default=None, kw_only=True)


@dataclass(frozen=True, eq=False)
class Trial(Generic[CaseT]):
    """A value, the points that it is called at, and its functions, each of which gives (*lead, …) of points (*lead, *item)."""

    case: CaseT
    value: Any  # in float64
    points: Tensor  # (*batch, *query, *item): of one query dimension or more, in float64 or whole numbers
    functions: Mapping[str, Callable[[Any, Tensor], Tensor]]
    item: int  # how many dimensions one item has
    batch: int = 0  # how many of the leading dimensions are the value's own

    @property
    def query(self) -> int:
        """The last of the query dimensions."""
        return self.points.ndim - self.item - 1

    def at(self, points: Tensor) -> "Trial[CaseT]":
        return replace(self, points=points)

    def scaled(self, scales: Sequence[float]) -> "Trial[CaseT]":
        """At the points times each of the scales."""
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
        size = (
            expected.detach().abs().amax(rest, keepdim=True) if rest and expected.numel() else expected.detach().abs()
        )
        self.agree(law, actual, expected, tolerance * (1 + size.nan_to_num(posinf=0.0)))

    def drawn(self, like: Tensor | None = None, seed: int = 0) -> Tensor:
        """Normal draws, of the points' shape or another's."""
        like = self.points if like is None else like
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(like.shape, dtype=torch.float64, generator=generator).to(like.device)


def slope(function: Callable[[float], Tensor]) -> Tensor:
    """Its derivative at 0, by central five-point differences; error h⁴."""
    near, far = function(_STEP) - function(-_STEP), function(2 * _STEP) - function(-2 * _STEP)
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
    value, points, query = trial.value, trial.points, trial.query
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
    value, points, query = trial.value, trial.points, trial.query
    for name, function in trial.functions.items():
        mapped = torch.func.vmap(function, (None, query))(value, points).movedim(0, query)
        trial.same(f"vmap: {name}", mapped, function(value, points))


def _numbers(trial: Trial[Any]) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], tuple[Any, Tensor]]]:
    """The floating-point tensors of value and points, and the way back."""
    leaves, structure = pytree.tree_flatten((trial.value, trial.points))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]

    def back(numbers: Sequence[Tensor]) -> tuple[Any, Tensor]:
        whole = list(leaves)
        for place, number in zip(places, numbers, strict=True):
            whole[place] = number
        return pytree.tree_unflatten(whole, structure)

    return [leaves[place] for place in places], back


def _directions(trial: Trial[Any], numbers: Sequence[Tensor], seed: int) -> list[Tensor]:
    """A draw for every finite number, symmetric for square matrices, which may have to be; 0 for points of whole numbers,
    which may be all that there is."""
    drawn = [trial.drawn(number, seed + place) for place, number in enumerate(numbers)]
    square = [number.ndim > 1 and number.shape[-1] == number.shape[-2] for number in numbers]
    drawn = [(way + way.mT) / 2 if even else way for way, even in zip(drawn, square, strict=True)]
    drawn = [torch.where(number.isfinite(), way, 0.0) for way, number in zip(drawn, numbers, strict=True)]
    points = trial.points
    if points.is_floating_point() and bool((points == points.round()).all()):
        drawn[-1] = torch.zeros_like(points)
    return drawn


def _derivative(
    function: Callable[[Sequence[Tensor]], Tensor], numbers: Sequence[Tensor], ways: Sequence[Sequence[Tensor]]
) -> Tensor:
    """The derivative of a function of the numbers along the first way, of that along the second, and so on."""
    leaves = [number.clone().requires_grad_() for number in numbers]
    value = function(leaves)
    for way in ways:
        slopes = [None]
        if value.requires_grad:
            slopes = torch.autograd.grad(value, leaves, create_graph=True, allow_unused=True)
        value = value.new_zeros(())
        for one, direction in zip(slopes, way, strict=False):
            value = value if one is None else value + (one * direction).sum()
    return value.detach()


def check_derivatives(trial: Trial[Any]) -> None:
    """Reverse mode, once and twice, in the points and in all that the value holds, against finite differences."""
    numbers, back = _numbers(trial)
    first, second = (_directions(trial, numbers, seed) for seed in (1, 100))
    for name, function in trial.functions.items():
        result = function(trial.value, trial.points)
        weight = trial.drawn(result, 200)
        size = 1 + (weight * result).nan_to_num(posinf=0.0).abs().sum()

        def total(given: Sequence[Tensor], function: Any = function, weight: Tensor = weight) -> Tensor:
            found = function(*back(given))
            return torch.where(found.isfinite(), weight * found, 0.0).sum()

        for law, ways in (("derivatives", []), ("derivatives, twice", [second])):

            def moved(t: float, total: Any = total, ways: Sequence[Sequence[Tensor]] = ways) -> Tensor:
                return _derivative(total, [x + t * way for x, way in zip(numbers, first, strict=True)], ways)

            found = _derivative(total, numbers, [*ways, first])
            agree(f"{law}: {name}", found, found, slope(moved), 1e-7 * (size + found.abs()))


def check_precision(trial: Trial[Any]) -> None:
    """Float32 is float64, but for what a few roundings of the points and of what the value holds do to each number."""
    numbers, back = _numbers(trial)
    small = [number.float() for number in numbers]
    eps, nudge = torch.finfo(torch.float32).eps, 1e-6
    value, points = back([number.double() for number in small])
    for name, function in trial.functions.items():
        actual, expected = function(*back(small)), function(value, points)
        if actual.dtype != torch.float32:
            raise AssertionError(f"precision: {name} of float32 is {actual.dtype}")
        moved = torch.zeros_like(expected)
        for seed in range(3):
            ways = _directions(trial, numbers, 10 * seed)
            there = function(*back([x.double() * (1 + nudge * way) for x, way in zip(small, ways, strict=True)]))
            moved = torch.maximum(moved, (there - expected).abs().nan_to_num(0.0, 0.0))
        rest = tuple(range(trial.query + 1, expected.ndim))
        size = (expected.abs() + moved / nudge).nan_to_num(posinf=0.0)
        size = size.amax(rest, keepdim=True) if rest and size.numel() else size
        trial.agree(f"precision: {name} in float32", actual, expected, 64 * eps * (1 + size))


def check_half_precision(trial: Trial[Any]) -> None:
    """What is given in half precision is promoted: the result is that of the same numbers in float32."""
    numbers, back = _numbers(trial)
    for dtype in (torch.bfloat16, torch.float16):
        half = [number.to(dtype) for number in numbers]
        for name, function in trial.functions.items():
            actual, expected = function(*back(half)), function(*back([number.float() for number in half]))
            if actual.dtype != torch.float32:
                raise AssertionError(f"half precision: {name} of {dtype} is {actual.dtype}")
            # The roundings that may have moved a point out of a domain are those of its dtype.
            held = expected.isfinite()
            actual, expected = (torch.where(held, number, 0.0) for number in (actual, expected))
            trial.same(f"half precision: {name} of {dtype}", actual, expected, 1e-4)


def check_no_query(trial: Trial[Any]) -> None:
    for name, function in trial.functions.items():
        expected = function(trial.value, trial.points)
        none = function(trial.value, trial.points.narrow(trial.query, 0, 0))
        shape = (*expected.shape[: trial.query], 0, *expected.shape[trial.query + 1 :])
        if none.shape != shape or none.dtype != expected.dtype:
            raise AssertionError(f"no query: {name} gave {none.dtype} of shape {tuple(none.shape)}, expected {shape}")


def check_meta(trial: Trial[Any]) -> None:
    """Shapes without values, those of the gradient too; what would mix two devices, as a GPU's and the CPU's, raises."""
    results = {name: function(trial.value, trial.points) for name, function in trial.functions.items()}
    with no_values():
        value, points = trial.value.to("meta"), trial.points.to("meta")
        for name, function in trial.functions.items():
            expected, given = results[name], points.clone()
            found = function(value, given.requires_grad_() if given.is_floating_point() else given)
            if (found.device.type, found.shape, found.dtype) != ("meta", expected.shape, expected.dtype):
                raise AssertionError(f"meta: {name} gave {found.dtype} of shape {tuple(found.shape)} on {found.device}")
            if found.requires_grad:
                found.sum().backward()


def check_not_a_number(trial: Trial[Any]) -> None:
    """NaN in an item is NaN in its results, or a ValueError, and never a number; the others' results stay."""
    points = trial.points.clone()
    points.select(trial.query, 0).flatten(-trial.item)[..., 0] = torch.nan
    for name, function in trial.functions.items():
        try:
            found = function(trial.value, points)
        except ValueError:
            continue
        ill = found.select(trial.query, 0).flatten(trial.query) if found.ndim > trial.query + 1 else None
        ill = found.select(trial.query, 0) if ill is None else ill.sum(-1)
        if not bool(ill.isnan().all()):
            raise AssertionError(f"not a number: {name} of NaN is a number")
        rest = slice(1, None)
        well = function(trial.value, trial.points).movedim(trial.query, 0)[rest]
        if not torch.allclose(found.movedim(trial.query, 0)[rest], well, rtol=1e-9, atol=1e-9):
            raise AssertionError(f"not a number: NaN in one item changes {name} of the others")


def check_compiled(trial: Trial[Any]) -> None:
    for name, function in trial.functions.items():
        expected = function(trial.value, trial.points)
        torch.compiler.reset()
        compiled = torch.compile(function, fullgraph=True, backend=trial.case.compile_backend)
        trial.same(f"compiled: {name}", compiled(trial.value, trial.points), expected)


def _uncompiled(case: Any) -> str | None:
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
        Law("compiled", check_compiled, _uncompiled),
    )
}
"""The laws, by their names."""


def without(field: str) -> Callable[[Any], str | None]:
    """That a law needs this field of a case."""
    return lambda case: None if getattr(case, field) is not None else f"no `{field}` is given"


def checks_with_exemptions(case: Any, trial_of: Callable[[Any], Any], laws: Sequence[Law[Any, Any]]) -> Checks:
    """The checks of a case but for those laws that it is exempt from.

    Raises:
        ValueError: it is exempt from a law that the suite does not have.
    """
    if unknown := set(case.exempt) - {law.name for law in laws}:
        raise ValueError(f"exempt names no law of this suite: {min(unknown)}; it has {[law.name for law in laws]}")

    def excused(law: Law[Any, Any]) -> Law[Any, Any]:
        return replace(law, missing=lambda case: case.exempt.get(law.name) or law.missing(case))

    return checks_of(case, trial_of, [excused(law) for law in laws])
