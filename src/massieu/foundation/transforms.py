"""The context that code runs in: compiled, inside `torch.func` transforms, on meta, under autocast; and readable values.

The rule: values can be read except while compiling, on the meta device, and of fake tensors. Inside eager transforms they
can: a wrapped tensor wraps numbers, those of the whole batch where `vmap` shows one item. So a check raises inside `vmap`,
`grad` and `jvp` as it does outside, and never inside `torch.compile` or `torch.export`.

A caller writes ``if any_true(x.isnan()): raise …`` or ``if not all_true(x > 0): raise …``. Where values cannot be read,
`any_true` is False and `all_true` is True, so that nothing is raised. `bool(mask.any())` fails inside `vmap`: use these
two in its place.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor  # pyright: ignore[reportMissingModuleSource]
from torch._higher_order_ops.while_loop import while_loop
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_LEAST_ORDERS = 3
"""Derivatives are correct up to this order everywhere."""


def in_functorch() -> bool:
    """Whether this call is inside a `torch.func` transform."""
    return torch._C._functorch.get_dynamic_layer_stack_depth() > 0  # pyright: ignore[reportAttributeAccessIssue]


def in_nested_forward_mode() -> bool:
    """Whether this call is inside forward mode within forward mode, where a custom function's second tangent is lost.

    False while compiling, when the transforms are unknown.
    """
    return not torch.compiler.is_compiling() and _transforms().count("Jvp") > 1


def derivative_orders() -> int:
    """How many orders of derivatives the steps from a solution must make correct: at least 3.

    One for each `torch.func` transform around this call that takes a derivative, and one for a backward pass around them
    all. Three while compiling, when the transforms are unknown.
    """
    if torch.compiler.is_compiling():
        return _LEAST_ORDERS
    num_transforms = sum(name in ("Grad", "Jvp") for name in _transforms())
    return max(_LEAST_ORDERS, num_transforms + 1)


def may_be_differentiated(*tensors: Tensor) -> bool:
    """Whether a derivative with respect to any of these tensors may be taken.

    True for a floating-point tensor inside a transform that takes derivatives, in forward mode, or if it requires a
    gradient in any layer of transforms. `vmap` alone takes none.
    """
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    if not floating:
        return False
    if torch.compiler.is_compiling():
        return in_functorch() or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in floating))
    transforms = _transforms()
    if forward_ad._current_level >= 0 or "Grad" in transforms or "Jvp" in transforms:
        return True
    if not torch.is_grad_enabled():
        return False
    for tensor in floating:
        if tensor.requires_grad:
            return True
        # Every layer, since the item that `vmap` shows requires no gradient even if its batch does.
        if is_functorch_wrapped_tensor(tensor) and any(layer.requires_grad for layer in layers(tensor)):
            return True
    return False


def _transforms() -> list[str]:
    """The kinds of the `torch.func` transforms around this call."""
    stack = torch._C._functorch.get_interpreter_stack() or []  # pyright: ignore[reportAttributeAccessIssue]
    return [interpreter.key().name for interpreter in stack]


def layers(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor as each transform around this call sees it, the innermost first, and last the tensor of the numbers."""
    yield tensor
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
        yield tensor


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor of the numbers, with the whole batch where `torch.func.vmap` shows one item. Not for compiled code."""
    *_, innermost = layers(tensor)
    return innermost


def values_are_readable(*tensors: Tensor) -> bool:
    """Whether the values of all the tensors can be read, by `any_true`, `all_true` or from `unwrapped`."""
    if torch.compiler.is_compiling():
        return False
    numbers = [unwrapped(tensor) for tensor in tensors]
    return not any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in numbers)


def any_true(mask: Tensor) -> bool:
    """Whether any entry of the whole batch is true; False if values cannot be read."""
    return values_are_readable(mask) and bool(unwrapped(mask).any())


def all_true(mask: Tensor) -> bool:
    """Whether all entries of the whole batch are true; True if values cannot be read."""
    return not values_are_readable(mask) or bool(unwrapped(mask).all())


def in_autocast_dtype(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The arguments of an operation, under `torch.autocast` in its dtype: as it casts those of PyTorch's own attention.

    Anything else than a tensor to be cast is returned as it is, for the operation's checks to refuse.
    """
    device_type = next((tensor.device.type for tensor in tensors if isinstance(tensor, Tensor)), "meta")
    if not autocasts(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)

    def cast(tensor: Tensor | None) -> Tensor | None:
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
            return tensor
        return tensor.to(dtype)

    return tuple(map(cast, tensors))


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context in which operations keep the dtype of their arguments."""
    return torch.autocast(device.type, enabled=False) if autocasts(device.type) else nullcontext()


def autocasts(device_type: str) -> bool:
    """Whether `torch.autocast` is on for devices of this type, such as "cuda"."""
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def uncompiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`torch.compiler.disable`, which imports the compiler (seconds) only once compiled code exists.

    For functions that read files, talk to other processes or draw random numbers.
    """

    name = f"{function.__module__}.{function.__name__}"

    @functools.wraps(function)
    def call(*positional: Arguments.args, **named: Arguments.kwargs) -> Result:
        if "torch._dynamo" not in sys.modules:
            return function(*positional, **named)
        if torch.compiler.is_compiling():
            # The message of the error, if breaks of the graph are errors (fullgraph=True).
            torch._dynamo.graph_break(
                msg=f"{name} cannot be compiled: call it outside, or compile without fullgraph=True"
            )
        return torch.compiler.disable(function)(*positional, **named)  # pyright: ignore[reportCallIssue]

    return call


def repeat(
    step: Callable[..., Any],
    state: Any,
    running: Callable[[Any], Tensor],
    limit: int,
    constants: Sequence[Tensor] = (),
    differentiable: bool = False,
) -> Any:
    """``state = step(state, *constants)`` while any entry of ``running(state)`` is true, at most `limit` times.

    `step` must not change items that are no longer running, since the loop goes on for the others. Compiled, this is one
    loop of the graph. Such a loop allows neither transforms nor derivatives: there it becomes `limit` copies of its body.
    All tensors that a compiled `step` uses have to come in `state` or `constants`.
    """
    if not torch.compiler.is_compiling():
        for _ in range(limit):
            if not any_true(running(state)):
                break
            state = step(state, *constants)
        return state
    if differentiable or in_functorch():
        for _ in range(limit):
            state = step(state, *constants)
        return state
    # `while_loop` carries a flat list of tensors: the number of steps made, the state's leaves, the constants.
    leaves, structure = pytree.tree_flatten(state)
    num_leaves = len(leaves)

    def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
        # The tensors that a loop carries must not share memory.
        return [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]

    def unfinished(num_steps: Tensor, *tensors: Tensor) -> Tensor:
        return (num_steps < limit) & running(pytree.tree_unflatten(tensors[:num_leaves], structure)).any()

    def body(num_steps: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        next_state = step(pytree.tree_unflatten(tensors[:num_leaves], structure), *tensors[num_leaves:])
        return num_steps + 1, *copies(pytree.tree_leaves(next_state)), *copies(tensors[num_leaves:])

    num_steps = torch.zeros((), dtype=torch.int64, device=leaves[0].device)
    carried = while_loop(unfinished, body, (num_steps, *copies(leaves), *copies(constants)))
    return pytree.tree_unflatten(carried[1 : num_leaves + 1], structure)
