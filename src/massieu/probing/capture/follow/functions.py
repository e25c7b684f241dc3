"""What each function of PyTorch does to scores, weights and outputs: the vocabulary of the tap."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class FunctionCall:
    """One call of a function of PyTorch.

    Attributes:
        result: None as long as it has not run.
    """

    func: Any
    args: Any
    kwargs: dict[str, Any]
    result: Any = None

    def name(self) -> str:
        """What the function is called, for a sentence."""
        return getattr(self.func, "__name__", str(self.func)).strip("_")

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """One argument, by its name or else by its place."""
        by_place = self.args[place] if len(self.args) > place else default
        return self.kwargs.get(name, by_place)


def _all(*names: str) -> set[object]:
    """The functions of these names, and Tensor's methods of them, in place or not."""
    functions = set()
    for name in names:
        for namespace, attribute in ((torch, name), (Tensor, name), (Tensor, f"{name}_"), (F, name)):
            if hasattr(namespace, attribute):
                functions.add(getattr(namespace, attribute))
    return functions


def _read(*names: str) -> set[object]:
    """What hands Tensor's properties of these names to a function mode."""
    return {getattr(Tensor, name).__get__ for name in names}


REGROUPING = _all(
    "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as", "atleast_3d"
)
PERMUTING = _all("transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "adjoint")
PERMUTING |= _read("mT", "T", "mH", "H")
# Casts, copies, and bounds far outside what scores are: the check on the first batch tells where they are not.
KEEPING = _all("contiguous", "clone", "detach", "alias", "to", "float", "double", "half", "bfloat16", "type", "type_as")
KEEPING |= _all("nan_to_num", "requires_grad_", "cpu", "cuda") | _read("data") | {F.dropout, torch.dropout}
CLAMPING = _all("clamp", "clip", "clamp_min", "maximum", "minimum")
ADDING = _all("add") | {Tensor.__add__, Tensor.__radd__, Tensor.__iadd__}
SUBTRACTING = _all("sub", "subtract") | {Tensor.__sub__, Tensor.__isub__}
SUBTRACTED = {Tensor.__rsub__, torch.rsub}
MULTIPLYING = _all("mul", "multiply") | {Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__}
DIVIDING = _all("div", "divide", "true_divide") | {Tensor.__truediv__, Tensor.__itruediv__}
NEGATING = _all("neg", "negative") | {Tensor.__neg__}
FILLING = _all("masked_fill")
SELECTING = {torch.where, Tensor.where}
ASSIGNING = {Tensor.__setitem__}
INDEXING = {Tensor.__getitem__}
JOINING = {torch.cat, torch.concat, torch.concatenate}
MOVING = REGROUPING | PERMUTING | KEEPING | INDEXING
LARGEST = _all("max", "amax")
CAPPING = _all("tanh")
SOFTMAX = {torch.softmax, Tensor.softmax, F.softmax, torch.special.softmax}
ELEMENTWISE = _all("relu", "gelu", "sigmoid", "exp", "abs", "pow", "square", "sqrt", "log", "softplus", "leaky_relu")
ELEMENTWISE |= _all("elu", "silu", "erf", "log1p", "expm1", "reciprocal", "rsqrt") | {Tensor.__pow__}
PROJECTING = {F.linear, torch.addmm, Tensor.addmm, F.conv1d, F.conv2d, torch.conv1d, torch.conv2d, F.bilinear}
# They tell something of a tensor and give none of its numbers.
ASKING = _read("shape", "dtype", "device", "ndim", "is_cuda", "requires_grad", "is_nested", "layout", "is_quantized")
ASKING |= _read("is_sparse", "is_meta", "grad_fn", "is_leaf")
ASKING |= {
    Tensor.size, Tensor.dim, Tensor.is_floating_point, Tensor.numel, Tensor.stride, Tensor.is_contiguous, Tensor.data_ptr,
    Tensor.__len__, Tensor.element_size, Tensor.is_complex, Tensor.nelement, Tensor.get_device,
}  # fmt: skip
# Of scores they make something that is none: masks, indices, tensors of the same shape.
UNRELATED = _all(
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "eq", "ne", "lt", "le", "gt", "ge", "isnan"
)
UNRELATED |= _all("isinf", "isfinite", "argmax", "argmin", "any", "all", "equal", "allclose", "item", "tolist")
UNRELATED |= {getattr(Tensor, name) for name in dir(Tensor) if name.startswith("new_")}
UNRELATED |= {Tensor.__eq__, Tensor.__ne__, Tensor.__lt__, Tensor.__le__, Tensor.__gt__, Tensor.__ge__, Tensor.__bool__}
# The second tensor only says of which shape or type the result is to be.
SHAPED_LIKE = _all("expand_as", "view_as", "reshape_as", "type_as", "to")
