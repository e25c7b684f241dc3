"""Functions with derivatives of every order that autograd could not take, or not in bounded memory.

`differentiable`: a fast function with a fast gradient; all other derivatives are its plain twin's. For second derivatives
the gradient is an `autograd.Function` itself, whose backward is the gradient of the twin's gradient. Forward mode, which
`torch.compile` does not accept in such a function, is added where nothing is compiled.

`BlockSum`, `recomputed`: functions that are computed again, block by block, for every derivative.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from massieu.foundation.derivatives import forward_derivative, is_differentiable, reverse_derivative
from massieu.foundation.transforms import in_functorch, in_nested_forward_mode, may_be_differentiated

Results = tuple[Tensor, ...]
VmapRule = Callable[[type[torch.autograd.Function], int, Sequence[Any], Sequence[Any]], tuple[Any, Any]]
"""(function, number of items, dimension of the items or None, arguments) ↦ results and their dimensions of items."""


def differentiable(
    fast: Callable[..., Results],
    gradient: Callable[..., Results],
    plain: Callable[..., Results],
    *,
    tensors: int,
    options: int,
    vmap: VmapRule,
) -> Callable[..., Results]:
    """`fast`, a function of tensors (or None) and then of options, with its derivatives in the first three tensors.

    Args:
        fast: ``(*tensors, *options)`` ↦ results, each a parameter of its own: the compiler counts them.
        gradient: ``(tensors, results, cotangents, options, wanted)`` ↦ gradients of those of the first three tensors that
            are wanted. A cotangent of None is zero.
        plain: The same function in plain operations.
        tensors, options: How many arguments are of either kind.
    """

    def split(arguments: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any], Sequence[Any]]:
        """Tensors, results, their cotangents, and options, from those one after the other and then which are wanted."""
        end = len(arguments) - options - 1
        middle = (tensors + end) // 2
        return arguments[:tensors], arguments[tensors:middle], arguments[middle:end], arguments[end:-1]

    def of_first_three(fixed: Sequence[Any]) -> Callable[..., Results]:
        return lambda first, second, third: plain(first, second, third, *fixed)

    def gradient_function(ctx: Any) -> tuple[Callable[..., Results], Sequence[Tensor | None]]:
        """The wanted gradients as the twin's function of the first three tensors and the cotangents; and those."""
        first, fixed, cotangents = ctx.saved_tensors[:3], ctx.saved_tensors[3:tensors], ctx.saved_tensors[tensors:]
        function, wanted = of_first_three((*fixed, *ctx.options)), ctx.wanted

        def gradients(*given: Tensor | None) -> Results:
            found = reverse_derivative(function, given[:3], given[3:], wanted)
            return tuple(one for one in found if one is not None)

        return gradients, (*first, *cotangents)

    def compute_gradient(*arguments: Any) -> Results:
        return gradient(*split(arguments), arguments[-1])

    class Backward(torch.autograd.Function):
        forward = staticmethod(compute_gradient)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
            given, _, cotangents, ctx.options = split(inputs)
            ctx.wanted = inputs[-1]
            ctx.save_for_backward(*given, *cotangents)
            ctx.save_for_forward(*given, *cotangents)
            ctx.set_materialize_grads(False)

        @staticmethod
        def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
            function, arguments = gradient_function(ctx)
            found = reverse_derivative(function, arguments, cotangents)
            results = len(arguments) - 3
            return *found[:3], *(None,) * (tensors - 3 + results), *found[3:], *(None,) * (options + 1)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
            return vmap(Backward, info.batch_size, in_dims, arguments)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Results:
            function, arguments = gradient_function(ctx)
            # The results are functions of the first three tensors here, so their tangents are not used.
            return forward_derivative(function, arguments, (*tangents[:3], *split(tangents)[2]))

    class Forward(torch.autograd.Function):
        forward = staticmethod(fast)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
            ctx.options = inputs[tensors:]
            ctx.save_for_backward(*inputs[:tensors], *output)
            ctx.save_for_forward(*inputs[:tensors], *output)
            ctx.set_materialize_grads(False)

        @staticmethod
        def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
            wanted = tuple(ctx.needs_input_grad[:3])
            saved = ctx.saved_tensors  # read once: under activation checkpointing each reading computes them again
            arguments = (*saved, *cotangents, *ctx.options, wanted)
            given = [tensor for tensor in (*saved, *cotangents) if tensor is not None]
            # Compiled code takes first derivatives alone, and so does most of the rest.
            last = torch.compiler.is_compiling() or not (in_functorch() or may_be_differentiated(*given))
            found = list((compute_gradient if last else Backward.apply)(*arguments))  # pyright: ignore[reportArgumentType]
            return *(found.pop(0) if one else None for one in wanted), *(None,) * (tensors - 3 + options)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
            return vmap(forward_class(), info.batch_size, in_dims, arguments)

    def compute(*arguments: Any) -> Results:
        return fast(*arguments)

    # `apply` asks for the signature at each call, which takes longer than a small call of a kernel.
    for function in (compute, compute_gradient):
        function.__signature__ = inspect.signature(function)  # pyright: ignore[reportFunctionMemberAccess]

    class ForwardForwardMode(Forward):
        forward = staticmethod(compute)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Results:
            function = of_first_three((*ctx.saved_tensors[3:tensors], *ctx.options))
            return forward_derivative(function, ctx.saved_tensors[:3], tangents[:3])

    def forward_class() -> type[Forward]:
        return Forward if torch.compiler.is_compiling() else ForwardForwardMode

    def call(*arguments: Any) -> Results:
        given = [tensor for tensor in arguments[:tensors] if tensor is not None]
        if torch.compiler.is_compiling() or in_functorch() or may_be_differentiated(*given):
            return forward_class().apply(*arguments)  # pyright: ignore[reportReturnType]
        return fast(*arguments)

    return call


def one_by_one(
    function: type[torch.autograd.Function], size: int, in_dims: Sequence[Any], arguments: Sequence[Any]
) -> tuple[Any, Any]:
    """The rule of vmap that does one item after the other."""
    results = []
    for item in range(size):
        chosen = (
            argument.select(dim, item) if isinstance(argument, Tensor) and dim is not None else argument
            for argument, dim in zip(arguments, in_dims, strict=True)
        )
        results.append(function.apply(*chosen))
    stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


@dataclass(frozen=True)
class BlockSum:
    """tensors ↦ Σ_block term(*block, *tensors), whose derivatives of every order, reverse and forward, are such sums too.

    Nothing is kept but the tensors: blocks are gone through again for each derivative.
    """

    term: Callable[..., Results]
    blocks: Iterable[Sequence[Any]] = ((),)
    gradient: Callable[..., Results] | None = None
    """(*block, *tensors, *cotangents) ↦ the gradients of one term, where there is a quicker way than its own derivative."""

    def __call__(self, *tensors: Tensor | None, known: Sequence[Tensor] = ()) -> Results:
        """The sum.

        Args:
            known: its value, if it is known; then the blocks are first gone through for a derivative.
        """
        return _BlockSum.apply(self, len(known), *known, *tensors)  # pyright: ignore[reportReturnType]


class _BlockSum(torch.autograd.Function):
    """(sum, number of known results, known results, tensors) ↦ results."""

    generate_vmap_rule = True

    @staticmethod
    def forward(blocks: BlockSum, known: int, *tensors: Tensor | None) -> Results:
        if known:
            return tuple(tensor.clone() for tensor in tensors[:known] if tensor is not None)
        total: Results | None = None
        for block in blocks.blocks:
            found = blocks.term(*block, *tensors)
            total = found if total is None else tuple(a + b for a, b in zip(total, found, strict=True))
        assert total is not None
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
        ctx.sum, ctx.known, *tensors = inputs
        ctx.save_for_backward(*tensors[ctx.known :])
        ctx.save_for_forward(*tensors[ctx.known :])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors, none = ctx.saved_tensors, (None,) * (2 + ctx.known)
        if all(cotangent is None for cotangent in cotangents):
            return *none, *(None for _ in tensors)
        term = partial(_gradients, ctx.sum, len(tensors), len(cotangents))
        found = iter(BlockSum(term, ctx.sum.blocks)(*tensors, *cotangents))
        return *none, *(next(found) if is_differentiable(tensor) else None for tensor in tensors)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Results:
        term = partial(_tangents, ctx.sum.term, len(ctx.saved_tensors))
        return BlockSum(term, ctx.sum.blocks)(*ctx.saved_tensors, *tangents[2 + ctx.known :])


def _gradients(blocks: BlockSum, count: int, results: int, *arguments: Any) -> Results:
    """The cotangents of one term's `count` tensors, those that are floating-point."""
    if blocks.gradient is not None and not in_functorch():
        return blocks.gradient(*arguments)
    given, cotangents = arguments[:-results], arguments[-results:]
    found = reverse_derivative(partial(blocks.term, *given[:-count]), given[-count:], cotangents)
    return tuple(gradient for gradient in found if gradient is not None)


def _tangents(term: Callable[..., Results], count: int, *arguments: Any) -> Results:
    given = arguments[:-count]
    return forward_derivative(partial(term, *given[:-count]), given[-count:], arguments[-count:])


def recomputed(function: Callable[..., Results], *tensors: Tensor | None) -> Results:
    """``function(*tensors)`` that keeps nothing but its arguments for the backward pass."""
    if torch.compiler.is_compiling() or in_nested_forward_mode():
        # The compiler chooses itself what to keep; and a custom function has one forward derivative only.
        return function(*tensors)
    return BlockSum(function)(*tensors)
