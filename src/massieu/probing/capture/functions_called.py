"""Which functions of PyTorch a forward pass calls: one that calls those of another, in its order, attends where that does."""

from typing import Any, Self

from torch._C import _len_torch_function_stack  # pyright: ignore[reportAttributeAccessIssue]
from torch.overrides import TorchFunctionMode

from massieu.probing.capture.capture import Capture


class FunctionMode(TorchFunctionMode):
    """A function mode that is left even where Ctrl-C came while it was at work."""

    def __enter__(self) -> Self:
        self._depth = _len_torch_function_stack()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        # PyTorch takes a mode off the stack while it is at work: Ctrl-C in that moment leaves it off.
        if _len_torch_function_stack() > self._depth:
            super().__exit__(*error)


class FunctionsCalled(FunctionMode):
    """Listens to a forward pass of the model that a capture reads.

    Attributes:
        code: one number for all functions that were called, the classes of their arguments, and their order. Those of
            attention that was read are left out.
    """

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self.capture = capture
        self.code = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.capture.claimed:
            # The classes too: a product with a weight is no product of activations.
            self.code = hash((self.code, func, *map(type, args)))
        return func(*args, **(kwargs or {}))
