"""Every tensor argument of a function, given as what it must not be: whatever happens, PyTorch's own error must not."""

import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

KINDS: dict[str, Callable[[Tensor], object]] = {
    "0-dimensional": lambda t: t.reshape(-1)[0],
    "on meta": lambda t: t.to("meta"),
    "an array": lambda t: t.numpy(),
    "a list": lambda t: t.tolist(),
    "integers": lambda t: (3 * t).round().long(),
    "complex": lambda t: t.to(torch.complex128),
    "empty": lambda t: t.new_zeros([0] * max(t.ndim, 1)),
    "no row": lambda t: t[:0] if t.ndim else t,
    "NaN": lambda t: t * torch.nan if t.is_floating_point() else t,
    "infinite": lambda t: t + torch.inf if t.is_floating_point() else t,
    "None": lambda t: None,
    "a word": lambda t: "x",
}
PARTS = 3


def raw_errors(function: Callable[..., object], arguments: Mapping[str, Any], part: int) -> list[str]:
    """Which kinds of which argument end in an error that no line of this package raises; the arguments are right ones.

    Of the kinds a third is tried, of each argument another one: `part` is 0, 1 or 2.
    """
    function(**arguments)
    found = []
    try:
        function(
            **{name: value.to("meta") if isinstance(value, Tensor) else value for name, value in arguments.items()}
        )
    except Exception as error:
        found += _raw("everything on meta", error)
    for place, (name, value) in enumerate(arguments.items()):
        if not isinstance(value, Tensor):
            continue
        for kind in list(KINDS)[(place + part) % PARTS :: PARTS]:
            try:
                function(**{**arguments, name: KINDS[kind](value)})
            except Exception as error:
                found += _raw(f"{name} {kind}", error)
    return found


def _raw(what: str, error: Exception) -> list[str]:
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = "/massieu/" in last.filename and (last.line or "").startswith("raise")
    return [] if ours else [f"{what}: {type(error).__name__}: {error}"]
