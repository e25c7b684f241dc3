"""A digest of the user's own code and of the values that it uses: sums of two different codes must never be added.

Functions are described by their compiled code, so that comments, and the file that they stand in, change nothing.
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
"""Packages whose functions are identified by the versions in the record."""
_SAME_REPR = (
    bool, int, float, complex, str, bytes, range, slice, Enum, torch.dtype, torch.device, type(None), type(...)
)  # fmt: skip
"""Types whose `repr` is the same in every process."""


def digest_of(code: Sequence[Any], metadata: str) -> str:
    """Digest of functions, classes and other values, and of their metadata.

    Functions and classes of the user's are described with the values that they use from outside: numbers, strings, tensors,
    arrays, containers of these, and other functions and classes of the user's. The user's are all that are in no installed
    package, and those of the package that ``code`` is in. Those of any other package are described by their name.
    """
    describer = _Describer({_top_package(getattr(value, "__module__", None)) for value in code})
    return hashlib.sha256("\0".join([metadata, *map(describer.value, code)]).encode()).hexdigest()


class _Describer:
    """Describes values as strings. A value that was described, or is being described, is only referred to.

    Args:
        own_packages: packages whose functions and classes are described in full though they are installed.
    """

    def __init__(self, own_packages: Collection[str]) -> None:
        self._own_packages = own_packages
        self._described: dict[int, Any] = {}  # holds the values, so that no `id` is used twice

    def value(self, value: Any) -> str:
        """Any value; one of an unknown type by its class and its attributes."""
        if isinstance(value, _SAME_REPR):
            return repr(value)
        if id(value) in self._described:
            return f"{type(value).__qualname__} as before"
        self._described[id(value)] = value
        if isinstance(value, list | tuple):
            return f"{type(value).__name__}({', '.join(map(self.value, value))})"
        if isinstance(value, set | frozenset):
            return f"set({', '.join(sorted(map(self.value, value)))})"
        if isinstance(value, dict):
            entries = sorted(f"{self.value(key)}: {self.value(entry)}" for key, entry in value.items())
            return f"dict({', '.join(entries)})"
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray | np.generic) and value.dtype.hasobject:
            return f"{value.dtype} {value.shape} {self.value(value.tolist())}"
        if isinstance(value, np.ndarray | np.generic):
            return f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
        if isinstance(value, functools.partial):
            return f"partial({self.value(value.func)}, {self.value(value.args)}, {self.value(value.keywords)})"
        if isinstance(value, ModuleType):
            return value.__name__  # the attributes that are used are described one by one: see `_used_values`
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
        data = dense.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
        return f"{kind} {hashlib.sha256(data.tobytes()).hexdigest()}"

    def _function(self, value: FunctionType) -> str:
        if _is_installed(value.__module__, self._own_packages):
            return f"{value.__module__}.{value.__qualname__}"
        inputs = [value.__defaults__, value.__kwdefaults__, self._used_values(value)]
        return f"{value.__name__} {self._code(value.__code__)} {self.value(inputs)}"

    def _used_values(self, value: FunctionType) -> dict[str, Any]:
        """Globals and closure variables of a function, and of the functions that it defines, by name."""
        names = _names(value.__code__)
        used = {name: value.__globals__[name] for name in names if name in value.__globals__}
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                used[name] = cell.cell_contents
            except ValueError:  # the cell is still empty
                used[name] = None
        own_modules = {
            name: module
            for name, module in used.items()
            if isinstance(module, ModuleType) and not _is_installed(module.__name__, self._own_packages)
        }
        for module_name, module in own_modules.items():
            attributes = vars(module)
            used |= {f"{module_name}.{name}": attributes[name] for name in names if name in attributes}
        return used

    def _class(self, value: type) -> str:
        if _is_installed(value.__module__, self._own_packages):
            return f"{value.__module__}.{value.__qualname__}"
        implicit = ("__dict__", "__weakref__", "__module__")
        # Static and class methods, and wrapped functions, by the function that they hold.
        attributes = {
            name: inspect.unwrap(getattr(attribute, "__func__", attribute))
            for name, attribute in vars(value).items()
            if name not in implicit
        }
        return f"class {value.__qualname__} {self.value(list(value.__bases__))} {self.value(attributes)}"

    def _code(self, code: CodeType) -> str:
        constants = (
            self._code(constant) if isinstance(constant, CodeType) else self.value(constant)
            for constant in code.co_consts
        )
        return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} ({', '.join(constants)})"


def _names(code: CodeType) -> set[str]:
    """Names of globals and attributes in a function's code, and in the functions that it defines."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names}.union(*inner)


def _top_package(module: str | None) -> str:
    """The package that a module is in."""
    return (module or "").partition(".")[0]


def _is_installed(module: str | None, own_packages: Collection[str]) -> bool:
    """Whether a module is in Python or in an installed package other than these, so that its name identifies its content."""
    package = _top_package(module)
    if package == "__main__":  # a notebook or a script
        return False
    if package in sys.stdlib_module_names or package in _PACKAGES:
        return True
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return package not in own_packages and ("site-packages" in file or "dist-packages" in file)
