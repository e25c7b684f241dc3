"""Derivatives of every order for functions that autograd cannot differentiate, or not in bounded memory.

`differentiable`: a fast function with a fast gradient. All other derivatives are those of the same function in plain
operations, its reference. For second derivatives the gradient is itself an `autograd.Function`, whose backward is the
gradient of the reference's gradient. Forward mode, which `torch.compile` does not accept in such a function, is added
outside compiled code.

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
    reference: Callable[..., Results],
    *,
    tensors: int,
    options: int,
    vmap: VmapRule,
) -> Callable[..., Results]:
    """`fast`, a function of tensors (or None) and then of options, with its derivatives in the first three tensors.

    Args:
        fast: ``(*tensors, *options)`` ↦ results. Each argument is a parameter of its own, as the compiler counts them.
        gradient: ``(tensors, results, cotangents, options, wanted)`` ↦ gradients of those of the first three tensors that
            are wanted. A cotangent of None is zero.
        reference: the same function in plain operations.
        tensors, options: number of arguments of either kind.
        vmap: the rule of vmap for both passes.
    """

    def split(arguments: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any], Sequence[Any]]:
        """Tensors, results, cotangents and options, from these one after the other and then `wanted`.

        There are as many cotangents as results.
        """
        end = len(arguments) - options - 1
        middle = (tensors + end) // 2
        return arguments[:tensors], arguments[tensors:middle], arguments[middle:end], arguments[end:-1]

    def of_first_three(fixed: Sequence[Any]) -> Callable[..., Results]:
        """The reference as a function of the first three tensors."""
        return lambda first, second, third: reference(first, second, third, *fixed)

    def gradient_function(ctx: Any) -> tuple[Callable[..., Results], Sequence[Tensor | None]]:
        """The reference's wanted gradients as a function of the first three tensors and the cotangents; and its arguments."""
        first_three = ctx.saved_tensors[:3]
        fixed = ctx.saved_tensors[3:tensors]
        cotangents = ctx.saved_tensors[tensors:]
        function = of_first_three((*fixed, *ctx.options))
        wanted = ctx.wanted

        def gradients(*arguments: Tensor | None) -> Results:
            results = reverse_derivative(function, arguments[:3], arguments[3:], wanted)
            return tuple(result for result in results if result is not None)

        return gradients, (*first_three, *cotangents)

    def compute_gradient(*arguments: Any) -> Results:
        return gradient(*split(arguments), arguments[-1])

    # (*tensors, *results, *cotangents, *options, wanted) ↦ gradients. It is differentiated for second derivatives.
    class Backward(torch.autograd.Function):
        forward = staticmethod(compute_gradient)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
            given_tensors, _, cotangents, ctx.options = split(inputs)
            ctx.wanted = inputs[-1]
            ctx.save_for_backward(*given_tensors, *cotangents)
            ctx.save_for_forward(*given_tensors, *cotangents)
            ctx.set_materialize_grads(False)

        @staticmethod
        def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
            function, arguments = gradient_function(ctx)
            gradients = reverse_derivative(function, arguments, cotangents)
            num_results = len(arguments) - 3
            # None for the other tensors and the results, which are functions of the first three; then for options and wanted.
            return *gradients[:3], *(None,) * (tensors - 3 + num_results), *gradients[3:], *(None,) * (options + 1)

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
            inputs = [tensor for tensor in (*saved, *cotangents) if tensor is not None]
            # A custom function costs time, and is needed only where the gradient is differentiated; compiled code never does.
            is_last = torch.compiler.is_compiling() or not (in_functorch() or may_be_differentiated(*inputs))
            function = compute_gradient if is_last else Backward.apply
            gradients = list(function(*arguments))  # pyright: ignore[reportArgumentType]
            return *(gradients.pop(0) if needed else None for needed in wanted), *(None,) * (tensors - 3 + options)

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
        inputs = [tensor for tensor in arguments[:tensors] if tensor is not None]
        if torch.compiler.is_compiling() or in_functorch() or may_be_differentiated(*inputs):
            return forward_class().apply(*arguments)  # pyright: ignore[reportReturnType]
        return fast(*arguments)

    return call


def one_by_one(
    function: type[torch.autograd.Function], size: int, in_dims: Sequence[Any], arguments: Sequence[Any]
) -> tuple[Any, Any]:
    """The rule of vmap that computes one item after the other."""

    def select(argument: Any, dim: int | None, item: int) -> Any:
        if isinstance(argument, Tensor) and dim is not None:
            return argument.select(dim, item)
        return argument

    results = []
    for item in range(size):
        item_arguments = (select(argument, dim, item) for argument, dim in zip(arguments, in_dims, strict=True))
        results.append(function.apply(*item_arguments))
    stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


@dataclass(frozen=True)
class BlockSum:
    """tensors ↦ Σ_block term(*block, *tensors), whose derivatives of every order, reverse and forward, are such sums too.

    Only the tensors are kept for the backward pass: each derivative is a new pass over the blocks.
    """

    term: Callable[..., Results]
    blocks: Iterable[Sequence[Any]] = ((),)
    gradient: Callable[..., Results] | None = None
    """(*block, *tensors, *cotangents) ↦ the gradients of one term; None: by automatic differentiation of the term."""

    def __call__(self, *tensors: Tensor | None, known: Sequence[Tensor] = ()) -> Results:
        """The sum.

        Args:
            known: its value, if it is known; then the first pass over the blocks is that for a derivative.
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
            term = blocks.term(*block, *tensors)
            total = term if total is None else tuple(a + b for a, b in zip(total, term, strict=True))
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
        tensors = ctx.saved_tensors
        no_gradients = (None,) * (2 + ctx.known)
        if all(cotangent is None for cotangent in cotangents):
            return *no_gradients, *(None for _ in tensors)
        # The gradient of a sum is the sum of its terms' gradients: another `BlockSum`, to be differentiated in its turn.
        term = partial(_gradients, ctx.sum, len(tensors), len(cotangents))
        gradients = iter(BlockSum(term, ctx.sum.blocks)(*tensors, *cotangents))
        return *no_gradients, *(next(gradients) if is_differentiable(tensor) else None for tensor in tensors)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Results:
        term = partial(_tangents, ctx.sum.term, len(ctx.saved_tensors))
        return BlockSum(term, ctx.sum.blocks)(*ctx.saved_tensors, *tangents[2 + ctx.known :])


def _gradients(blocks: BlockSum, num_tensors: int, num_results: int, *arguments: Any) -> Results:
    """The gradients of one term in its floating-point tensors, from (*block, *tensors, *cotangents)."""
    if blocks.gradient is not None and not in_functorch():
        return blocks.gradient(*arguments)
    inputs = arguments[:-num_results]
    cotangents = arguments[-num_results:]
    block = inputs[:-num_tensors]
    gradients = reverse_derivative(partial(blocks.term, *block), inputs[-num_tensors:], cotangents)
    return tuple(gradient for gradient in gradients if gradient is not None)


def _tangents(term: Callable[..., Results], num_tensors: int, *arguments: Any) -> Results:
    """The tangents of one term, from (*block, *tensors, *tangents)."""
    inputs = arguments[:-num_tensors]
    block = inputs[:-num_tensors]
    return forward_derivative(partial(term, *block), inputs[-num_tensors:], arguments[-num_tensors:])


def recomputed(function: Callable[..., Results], *tensors: Tensor | None) -> Results:
    """``function(*tensors)`` that keeps nothing but its arguments for the backward pass."""
    if torch.compiler.is_compiling() or in_nested_forward_mode():
        # The compiler decides itself what to keep; and a custom function has only one forward derivative.
        return function(*tensors)
    return BlockSum(function)(*tensors)
