"""Loops that stop on values, wherever they run."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor  # pyright: ignore[reportMissingModuleSource]
from torch._higher_order_ops.while_loop import while_loop
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree


def in_functorch() -> bool:
    """Whether this call is inside a `torch.func` transform."""
    return torch._C._functorch.get_dynamic_layer_stack_depth() > 0  # pyright: ignore[reportAttributeAccessIssue]


def in_nested_forward_mode() -> bool:
    """Whether this call is inside forward mode within forward mode, where a custom function's second tangent is lost."""
    return _transforms().count("Jvp") > 1


def may_be_differentiated(*tensors: Tensor) -> bool:
    """Whether a derivative with respect to these may be wanted; inside a transform that takes some, yes."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return True
    if torch.compiler.is_compiling():
        return in_functorch()
    return forward_ad._current_level >= 0 or bool({"Grad", "Jvp"} & set(_transforms()))


def _transforms() -> list[str]:
    """The kinds of the `torch.func` transforms around this call."""
    stack = torch._C._functorch.get_interpreter_stack() or []  # pyright: ignore[reportAttributeAccessIssue]
    return [interpreter.key().name for interpreter in stack]


def readable() -> bool:
    """Whether values can be read. Inside eager transforms they can: a wrapped tensor wraps numbers."""
    return not torch.compiler.is_compiling()


def layers(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor as each transform around this call sees it, the innermost first, and then the numbers themselves."""
    yield tensor
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
        yield tensor


def unwrapped(tensor: Tensor) -> Tensor:
    """The numbers themselves, of the whole batch where `torch.func.vmap` shows one item."""
    *_, last = layers(tensor)
    return last


def some(mask: Tensor) -> bool:
    """Whether any is true, in the whole batch; of shapes without values, on the meta device, nothing is."""
    numbers = unwrapped(mask)
    return not numbers.is_meta and bool(numbers.any())


def repeat(
    step: Callable[..., Any],
    state: Any,
    running: Callable[[Any], Tensor],
    limit: int,
    constants: Sequence[Tensor] = (),
    differentiable: bool = False,
) -> Any:
    """``state = step(state, *constants)`` while any of ``running(state)``, at most `limit` times.

    `step` leaves alone what is not running, so that the loop may go on for others. Compiled, it is one loop of the graph;
    inside a transform or where the steps are differentiated, which such a loop does not allow, `limit` copies of its
    body. All tensors that a compiled `step` uses have to come as `state` or `constants`.
    """
    if readable():
        for _ in range(limit):
            if not some(running(state)):
                break
            state = step(state, *constants)
        return state
    if differentiable or in_functorch():
        for _ in range(limit):
            state = step(state, *constants)
        return state
    leaves, structure = pytree.tree_flatten(state)
    count = len(leaves)

    def own(tensors: Sequence[Tensor]) -> list[Tensor]:
        # What a loop carries must not share memory.
        return [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]

    def unfinished(turn: Tensor, *tensors: Tensor) -> Tensor:
        return (turn < limit) & running(pytree.tree_unflatten(tensors[:count], structure)).any()

    def body(turn: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        moved = step(pytree.tree_unflatten(tensors[:count], structure), *tensors[count:])
        return turn + 1, *own(pytree.tree_leaves(moved)), *own(tensors[count:])

    turn = torch.zeros((), dtype=torch.int64, device=leaves[0].device)
    found = while_loop(unfinished, body, (turn, *own(leaves), *own(constants)))
    return pytree.tree_unflatten(found[1 : count + 1], structure)
