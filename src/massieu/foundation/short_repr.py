"""Values and results as one line, in a notebook as a table: of a tensor shape, dtype and range, or its few numbers."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import torch
from torch import Tensor

from massieu.foundation.printable import visible
from massieu.foundation.transforms import is_functorch_wrapped_tensor, values_are_readable

WRITTEN_OUT = 6
"""Entries of a tensor that are written as numbers."""
RANGED = 2**20
"""Entries of a tensor up to which its smallest and largest number are looked for."""
_RANGED_TYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64),
)
_ENTRIES = 4
"""Entries of a list or dictionary that are written."""
_LONGEST = 120
"""Characters of anything else."""


def fields_repr(self: Any) -> str:
    """The class of a dataclass or named tuple with its fields, the ``__repr__`` of values and results."""
    # A value that a transform rebuilds may hold placeholders, or have no fields yet.
    parts = [f"{name}={short_repr(getattr(self, name, None))}" for name in _shown_fields(self)]
    return f"{type(self).__name__}({', '.join(parts)})"


def fields_html(self: Any) -> str:
    """The same as a table, a row for each field: the ``_repr_html_`` by which a notebook shows values and results."""
    rows = [(name, short_repr(getattr(self, name, None))) for name in _shown_fields(self)]
    return html_table(("field", "value"), rows, title=type(self).__name__)


def html_table(header: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> str:
    """A table of HTML, with its text escaped and control characters written out.

    Example:
        >>> from massieu.foundation.short_repr import html_table
        >>> html_table(("layer", "kind"), [(0, "self")])
        '<table><tr><th>layer</th><th>kind</th></tr><tr><td>0</td><td>self</td></tr></table>'
    """
    caption = f"<p><strong>{escape(visible(title))}</strong></p>" if title else ""
    lines = ["".join(f"<th>{escape(visible(name))}</th>" for name in header)]
    lines += ["".join(f"<td>{escape(visible(str(cell)))}</td>" for cell in row) for row in rows]
    return f"{caption}<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _shown_fields(value: Any) -> Sequence[str]:
    """The names of the fields that a repr shows."""
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value) if field.repr]
    return value._fields


def short_repr(thing: Any) -> str:
    """A tensor, value, sequence, mapping or other object in at most some hundred characters."""
    if isinstance(thing, Tensor):
        return tensor_repr(thing)
    if type(thing).__repr__ is fields_repr:
        return _cut(repr(thing), 4 * _LONGEST)
    if isinstance(thing, Mapping):
        entries = [f"{key!r}: {short_repr(value)}" for key, value in list(thing.items())[:_ENTRIES]]
        return f"{{{', '.join(entries)}{_more(len(thing))}}}"
    if isinstance(thing, list | tuple):
        entries = [short_repr(each) for each in thing[:_ENTRIES]]
        start, end = "[]" if isinstance(thing, list) else "()"
        return f"{start}{', '.join(entries)}{_more(len(thing))}{end}"
    return _cut(repr(thing), _LONGEST)


def tensor_repr(tensor: Tensor) -> str:
    """A tensor's shape, dtype, and device if it is not main memory; its numbers or their range if they are at hand.

    Numbers on a GPU are not waited for, those on the meta device and inside a transform do not exist.

    Example:
        >>> import torch
        >>> from massieu.foundation.short_repr import tensor_repr
        >>> tensor_repr(torch.linspace(0, 1, 1000).view(10, 100))
        'tensor((10, 100), float32, 0 to 1)'
        >>> tensor_repr(torch.tensor([0.25, 0.75]))
        'tensor([0.25, 0.75])'
        >>> tensor_repr(torch.zeros(3, 4, device="meta"))
        'tensor((3, 4), float32, meta)'
    """
    if tensor.is_nested:
        return f"nested tensor({str(tensor.dtype).removeprefix('torch.')})"
    shape = f"({', '.join(map(str, tensor.shape))}{',' if tensor.dim() == 1 else ''})"
    parts = [shape, str(tensor.dtype).removeprefix("torch.")]
    if tensor.device.type != "cpu":
        parts.append(str(tensor.device))
    if not _is_at_hand(tensor):
        return f"tensor({', '.join(parts)})"
    numbers = tensor.detach()
    if numbers.numel() <= WRITTEN_OUT:
        others = [] if numbers.dtype in (torch.float32, torch.int64, torch.bool) else parts[1:]
        return f"tensor({', '.join([_written(numbers.tolist()), *others])})"
    if numbers.numel() <= RANGED and numbers.dtype in _RANGED_TYPES:
        parts += _range(numbers)
    return f"tensor({', '.join(parts)})"


def _is_at_hand(tensor: Tensor) -> bool:
    """Whether numbers can be read without waiting: a dense real tensor in main memory, in no transform."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not tensor.is_complex()
        and not tensor.is_quantized
        and not is_functorch_wrapped_tensor(tensor)
        and values_are_readable(tensor)
        and tensor.numel() > 0
    )


def _range(numbers: Tensor) -> list[str]:
    """The smallest and the largest number, NaN apart."""
    is_nan = numbers.isnan()
    has_nan = bool(is_nan.any())
    known = numbers[~is_nan] if has_nan else numbers
    texts = []
    if known.numel():
        low, high = torch.aminmax(known)
        texts.append(f"{_number(low.item())} to {_number(high.item())}")
    if has_nan:
        texts.append(f"{int(is_nan.sum())} NaN")
    return texts


def _written(numbers: Any) -> str:
    """Numbers in the nested lists in which they stand."""
    if isinstance(numbers, list):
        return f"[{', '.join(map(_written, numbers))}]"
    return _number(numbers)


def _number(value: float) -> str:
    """Four significant digits, as Python reads them."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _more(count: int) -> str:
    return f", … {count - _ENTRIES} more" if count > _ENTRIES else ""


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
