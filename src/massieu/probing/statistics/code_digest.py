"""A digest of the user's own code, with what it takes from around it: sums of two codes must never be added.

Functions are told by what they were compiled to, so that comments, and the file that they stand in, change nothing.
"""

import functools
import hashlib
import inspect
import sys
from collections.abc import Collection, Sequence
from enum import Enum
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PACKAGES = {"torch", "numpy", "massieu", "jaxtyping"}
"""What their functions do is told by the versions in the record."""
_PLAIN = (bool, int, float, complex, str, bytes, range, slice, Enum, torch.dtype, torch.device, type(None), type(...))
"""Values whose words are the same in every process."""


def digest_of(code: Sequence[Any], said: str) -> str:
    """Of functions, classes and other values, and of what is said of them.

    Functions and classes of the user's are told with the values that they take from around them: numbers, words, tensors,
    arrays, containers of these, and other functions and classes of theirs. Theirs are all that are in no installed package,
    and those of the package that the given ones are in; of any other package a name is told.
    """
    told = _Told({_top(getattr(each, "__module__", None)) for each in code})
    return hashlib.sha256("\0".join([said, *map(told.value, code)]).encode()).hexdigest()


class _Told:
    """Values in words. What was told once, or is being told, is not told again."""

    def __init__(self, own: Collection[str]) -> None:
        self._own = own
        self._known: dict[int, Any] = {}  # kept, so that no number is used twice

    def value(self, value: Any) -> str:
        """Any value; of one of an unknown kind its class, and its attributes."""
        if isinstance(value, _PLAIN):
            return repr(value)
        if id(value) in self._known:
            return f"{type(value).__qualname__} as before"
        self._known[id(value)] = value
        if isinstance(value, list | tuple):
            return f"{type(value).__name__}({', '.join(map(self.value, value))})"
        if isinstance(value, set | frozenset):
            return f"set({', '.join(sorted(map(self.value, value)))})"
        if isinstance(value, dict):
            return f"dict({', '.join(sorted(f'{self.value(k)}: {self.value(v)}' for k, v in value.items()))})"
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray | np.generic) and value.dtype.hasobject:
            return f"{value.dtype} {value.shape} {self.value(value.tolist())}"
        if isinstance(value, np.ndarray | np.generic):
            return f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
        if isinstance(value, functools.partial):
            return f"partial({self.value(value.func)}, {self.value(value.args)}, {self.value(value.keywords)})"
        if isinstance(value, ModuleType):
            return value.__name__  # what is taken of it is told by its name: see `_taken`
        if isinstance(value, MethodType):
            return f"{self.value(value.__func__)} of {self.value(value.__self__)}"
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, type):
            return self._class(value)
        return f"{self.value(type(value))} with {self.value(getattr(value, '__dict__', None))}"

    @staticmethod
    def _tensor(value: Tensor) -> str:
        kind = f"{value.dtype} {tuple(value.shape)}"
        if value.is_meta:
            return kind
        dense = (value.detach().to_dense() if value.layout != torch.strided else value.detach()).cpu()
        held = dense.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
        return f"{kind} {hashlib.sha256(held.tobytes()).hexdigest()}"

    def _function(self, value: FunctionType) -> str:
        if _is_installed(value.__module__, self._own):
            return f"{value.__module__}.{value.__qualname__}"
        around = [value.__defaults__, value.__kwdefaults__, self._taken(value)]
        return f"{value.__name__} {self._code(value.__code__)} {self.value(around)}"

    def _taken(self, value: FunctionType) -> dict[str, Any]:
        """What a function, and those that are made inside it, take from around them, by name."""
        taken = {name: value.__globals__[name] for name in _names(value.__code__) if name in value.__globals__}
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                taken[name] = cell.cell_contents
            except ValueError:  # not filled yet
                taken[name] = None
        modules = {
            name: each
            for name, each in taken.items()
            if isinstance(each, ModuleType) and not _is_installed(each.__name__, self._own)
        }
        for name, module in modules.items():  # of a module of the user's, what is named
            taken |= {f"{name}.{part}": vars(module)[part] for part in _names(value.__code__) if part in vars(module)}
        return taken

    def _class(self, value: type) -> str:
        if _is_installed(value.__module__, self._own):
            return f"{value.__module__}.{value.__qualname__}"
        own = {
            name: each for name, each in vars(value).items() if name not in ("__dict__", "__weakref__", "__module__")
        }
        plain = {name: inspect.unwrap(getattr(each, "__func__", each)) for name, each in own.items()}
        return f"class {value.__qualname__} {self.value(list(value.__bases__))} {self.value(plain)}"

    def _code(self, code: CodeType) -> str:
        constants = (self._code(each) if isinstance(each, CodeType) else self.value(each) for each in code.co_consts)
        return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} ({', '.join(constants)})"


def _names(code: CodeType) -> set[str]:
    inner = (_names(each) for each in code.co_consts if isinstance(each, CodeType))
    return {*code.co_names}.union(*inner)


def _top(module: str | None) -> str:
    """The package that a module is in."""
    return (module or "").partition(".")[0]


def _is_installed(module: str | None, own: Collection[str]) -> bool:
    """Whether a module is in Python or in an installed package other than these, so that a name tells what it holds."""
    top = _top(module)
    if top == "__main__":  # a notebook's, or a script's
        return False
    if top in sys.stdlib_module_names or top in _PACKAGES:
        return True
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    return top not in own and ("site-packages" in file or "dist-packages" in file)
