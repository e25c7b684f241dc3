"""What tensors were computed from: from parameters alone, or from activations that were projected."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from massieu.probing.capture.follow import functions as f
from massieu.probing.capture.follow.alive import WhileAlive
from massieu.probing.capture.follow.contractions import CONTRACTIONS

# Bits, since a weight is a constant too; plain integers, since they are combined at every function of a forward pass.
CONSTANT = 1  # computed from parameters and buffers alone
WEIGHT = 2  # a parameter or a buffer itself, perhaps in another form
PROJECTED = 4  # computed from activations that met a weight

_KEEPING_WEIGHTS = f.REGROUPING | f.PERMUTING | f.KEEPING | f.INDEXING
_PROJECTING = CONTRACTIONS | f.PROJECTING


class TensorOrigins:
    """Origins of the tensors of a forward pass, each as long as its tensor lives."""

    def __init__(self, model: nn.Module) -> None:
        self._origins: WhileAlive[int] = WhileAlive()
        tensors = (*model.parameters(), *model.buffers())
        # A parameter is known by its class.
        self._buffers = {id(tensor) for tensor in tensors if not isinstance(tensor, nn.Parameter)}

    def of(self, tensor: Tensor) -> int:
        """The bits of a tensor; 0 where it is an activation that met no weight."""
        return CONSTANT | WEIGHT if self._is_weight(tensor) else self._origins.get(tensor) or 0

    def _is_weight(self, tensor: Tensor) -> bool:
        """Whether it is a weight or a buffer; weights of some models are made anew each time that they are asked for."""
        # Asked first for the class itself: `isinstance` asks the class of parameters, in Python.
        is_parameter = type(tensor) is not Tensor and isinstance(tensor, nn.Parameter)
        return is_parameter or id(tensor) in self._buffers

    def note(self, func: Any, inputs: Sequence[Tensor], result: Any) -> None:
        """Note the origin of what a function made of these tensors."""
        origins = [self.of(tensor) for tensor in inputs]
        if all(origin & CONSTANT for origin in origins):
            origin = CONSTANT
            if origins and func in _KEEPING_WEIGHTS:
                origin |= min(origins) & WEIGHT
        elif func in _PROJECTING or any(origin & PROJECTED for origin in origins):
            origin = PROJECTED
        else:
            origin = 0
        if origin:
            for tensor in tensors_in(result):
                if not self._is_weight(tensor):
                    self._origins.keep(tensor, origin)

    def are_activations(self, left: Tensor, right: Tensor) -> bool:
        """Whether a product of these two may be of queries and keys."""
        if not (left.is_floating_point() and right.is_floating_point()):
            return False
        origins = self.of(left), self.of(right)
        if any(origin & WEIGHT for origin in origins):
            return False
        # Learned queries are computed from parameters too; so are weights that are made ready first, but in two dimensions.
        is_matrix = [t.dim() < 3 for t, origin in zip((left, right), origins, strict=True) if origin & CONSTANT]
        return len(is_matrix) != 1 or not is_matrix[0]

    def is_projected(self, value: Any) -> bool:
        """Whether something is a tensor that was computed from activations that met a weight."""
        return isinstance(value, Tensor) and bool(self.of(value) & PROJECTED)

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether a tensor was computed from parameters and buffers alone."""
        return bool(self.of(tensor) & CONSTANT)

    def clear(self) -> None:
        """Forget all."""
        self._origins.clear()


def tensors_in(*values: Any) -> Iterator[Tensor]:
    """The tensors among arguments, and in lists and tuples among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from tensors_in(*value)
