"""Where code runs: compiled, inside `torch.func` transforms, on meta, under autocast; and whether values can be read.

The rule: values can be read except while compiling, on the meta device, and of fake tensors. Inside eager transforms they
are read: a wrapped tensor wraps numbers, those of the whole batch where `vmap` shows one item. So a check raises inside
`vmap`, `grad` and `jvp` as it does outside, and never inside `torch.compile` or `torch.export`.

A caller writes ``if some(x.isnan()): raise …`` or ``if not every(x > 0): raise …``. Where values cannot be read, `some` is
False and `every` is True, so that nothing is raised. A plain `bool(mask.any())` fails inside `vmap`: use these two instead.
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

_ORDERS = 3
"""Orders of derivatives that are right wherever they are taken."""


def in_functorch() -> bool:
    """Whether this call is inside a `torch.func` transform."""
    return torch._C._functorch.get_dynamic_layer_stack_depth() > 0  # pyright: ignore[reportAttributeAccessIssue]


def in_nested_forward_mode() -> bool:
    """Whether this call is inside forward mode within forward mode, where a custom function's second tangent is lost.

    While compiling it is not known, and False.
    """
    return not torch.compiler.is_compiling() and _transforms().count("Jvp") > 1


def derivative_orders() -> int:
    """How many orders of derivatives a solution by plain operations has to make right, at least 3.

    One for each `torch.func` transform around this call that takes a derivative, and one for a plain backward pass around
    them all. While compiling the transforms are not known.
    """
    if torch.compiler.is_compiling():
        return _ORDERS
    taken = sum(name in ("Grad", "Jvp") for name in _transforms())
    return max(_ORDERS, taken + 1)


def may_be_differentiated(*tensors: Tensor) -> bool:
    """Whether a derivative with respect to these may be wanted.

    Yes for a floating-point tensor inside a transform that takes derivatives, or in forward mode, or if it requires a
    gradient at any layer. `vmap` alone takes none.
    """
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    if not floating:
        return False
    if torch.compiler.is_compiling():
        return in_functorch() or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in floating))
    if forward_ad._current_level >= 0 or {"Grad", "Jvp"} & set(_transforms()):
        return True
    # The item that `vmap` shows requires no gradient where its batch does.
    return torch.is_grad_enabled() and any(layer.requires_grad for tensor in floating for layer in layers(tensor))


def _transforms() -> list[str]:
    """The kinds of the `torch.func` transforms around this call."""
    stack = torch._C._functorch.get_interpreter_stack() or []  # pyright: ignore[reportAttributeAccessIssue]
    return [interpreter.key().name for interpreter in stack]


def layers(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor as each transform around this call sees it, the innermost first, and then the numbers themselves."""
    yield tensor
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
        yield tensor


def unwrapped(tensor: Tensor) -> Tensor:
    """The numbers themselves, of the whole batch where `torch.func.vmap` shows one item. Not for compiled code."""
    *_, last = layers(tensor)
    return last


def values_are_readable(*tensors: Tensor) -> bool:
    """Whether the values can be read, of all the tensors: by `some`, `every`, or from `unwrapped`."""
    if torch.compiler.is_compiling():
        return False
    numbers = [unwrapped(tensor) for tensor in tensors]
    return not any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in numbers)


def some(mask: Tensor) -> bool:
    """Whether any is true, in the whole batch; False where values cannot be read."""
    return values_are_readable(mask) and bool(unwrapped(mask).any())


def every(mask: Tensor) -> bool:
    """Whether all are true, in the whole batch; True where values cannot be read."""
    return not values_are_readable(mask) or bool(unwrapped(mask).all())


def in_autocast_dtype(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Under `torch.autocast`, what it casts an operation's arguments to, as it does for PyTorch's own attention.

    What is not a tensor to be cast is left for the checks to refuse.
    """
    kind = next((tensor.device.type for tensor in tensors if isinstance(tensor, Tensor)), "meta")
    if not autocasts(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)

    def cast(tensor: Tensor | None) -> Tensor | None:
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
            return tensor
        return tensor.to(dtype)

    return tuple(map(cast, tensors))


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Where operations keep the dtype they are written in."""
    return torch.autocast(device.type, enabled=False) if autocasts(device.type) else nullcontext()


def autocasts(kind: str) -> bool:
    """Whether `torch.autocast` is on for this kind of device."""
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def uncompiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """What `torch.compiler.disable` does, without its import of the compiler, which takes seconds, before it is used.

    For functions that read files, talk to other processes or draw random numbers.
    """

    name = f"{function.__module__}.{function.__name__}"

    @functools.wraps(function)
    def call(*positional: Arguments.args, **named: Arguments.kwargs) -> Result:
        if "torch._dynamo" not in sys.modules:
            return function(*positional, **named)
        if torch.compiler.is_compiling():
            # Where a break of the graph is an error (fullgraph=True), this is what it says.
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
    """``state = step(state, *constants)`` while any of ``running(state)``, at most `limit` times.

    `step` leaves alone what is not running, so that the loop may go on for others. Compiled, it is one loop of the graph;
    inside a transform or where the steps are differentiated, which such a loop does not allow, `limit` copies of its
    body. All tensors that a compiled `step` uses have to come as `state` or `constants`.
    """
    if not torch.compiler.is_compiling():
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
