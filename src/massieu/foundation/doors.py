"""Public doors: functions and methods whose arguments are checked by what their names mean, before anything is computed.

A word has one meaning in this package (see CONTRIBUTING.md), so that most arguments need no check written at each place:
`generator` is a torch.Generator everywhere. `NAMED` says so once, and `door` applies it to a function or to the public
methods of a class. Annotations are documentation and are not read. Functions themselves check bounds, shapes, and which
arguments go together.

Compiled code is not checked, and pays nothing. Elsewhere a call costs about half a microsecond, and each argument a fifth.
"""

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from numbers import Integral
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from massieu.errors import InputError
from massieu.foundation.arguments import (
    described,
    device,
    flag,
    floating,
    floating_dtype,
    generator,
    number_or_tensor,
    of_class,
    real,
    whole_number,
)

Target = TypeVar("Target", bound=Callable[..., Any])
Check = Callable[[str, Any], object]

MOST = 2**31 - 1
"""The largest count that is taken: so many steps would take years, and no memory holds such a size."""

count = partial(whole_number, most=MOST)


def function(name: str, value: object) -> Callable[..., Any]:
    """The value, if it can be called; else a TypeError."""
    if not callable(value):
        raise TypeError(f"{name} must be a function, got {described(value)}")
    return value


def path(name: str, value: object) -> str | os.PathLike[str]:
    """The value, if it is the name of a file or folder; else a TypeError."""
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name} must be a path, got {described(value)}")
    return value


def seed(name: str, value: object) -> int:
    """The value, if it is a whole number of at most 64 bits; else a TypeError or ValueError."""
    if not isinstance(value, int | Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be a whole number, got {described(value)}")
    whole = int(value)
    if not -(2**63) <= whole < 2**64:
        raise ValueError(f"{name} must be below 2⁶⁴, got {whole}")
    return whole


MEASURE = partial(of_class, kind="Measure")
MODULE = partial(of_class, kind="Module")

_FLAGS = (
    "add_bias_kv", "add_zero_attn", "average_attn_weights", "batch_first", "check_attraction", "clean_context", "divergence",
    "equivariant", "euclidean", "exact", "has_log_weight", "has_values", "is_causal", "learn_alpha", "need_energies",
    "need_log_partition", "need_potential", "need_variance", "need_weights", "residual", "return_log_partition",
    "separate_targets", "simplex", "standard_error", "symmetric", "throw", "tied_start",
)  # fmt: skip
_COUNTS = (
    "batch_size", "block_size", "chains", "count", "cycles", "degree", "dim", "dimension", "draws", "embed_dim", "epochs",
    "groups", "head_dim", "hidden_size", "input_size", "item_dims", "kdim", "length", "max_steps", "num_heads", "num_memories",
    "output_size",
    "pattern_projection_size", "preconditioner_rank", "products", "projections", "quantity", "rank",
    "stored_pattern_size", "sweeps", "times", "trials", "value_size", "vdim",
)  # fmt: skip
_NUMBERS = (
    "atol", "background_log_weight", "damping", "dropout", "duration", "eps", "label_smoothing", "max_lipschitz",
    "norm_weight", "other_softcap", "rtol", "softcap", "threshold", "tol", "tolerance", "z_loss",
)  # fmt: skip
_FUNCTIONS = (
    "kl", "lagrangian", "log_density", "log_prob", "map", "move", "preconditioner", "prepare", "product", "sample_hidden",
    "sample_visible",
)  # fmt: skip
_OBJECTS = {
    "atoms": "Atoms", "background": "Gaussian", "hopfield": "HopfieldEnergy", "likelihood": "Measure",
    "operator": "Operator", "output": "Module", "prior": "Posterior", "projection": "Module", "solver": "LinearSolver",
    "space": "Module", "store": "AtomStore",
}  # fmt: skip

NAMED: Mapping[str, Check] = {
    "device": device,
    "dtype": floating_dtype,
    "generator": generator,
    "query_offset": whole_number,
    "sequences": whole_number,  # no `count`: a bound is also asked for more sequences than any memory holds
    "alpha": number_or_tensor,
    "checkpoint": path,
    "ignore_index": whole_number,
    "log_partition": number_or_tensor,
    "left": floating,
    "right": floating,
    **dict.fromkeys(_FLAGS, flag),
    **dict.fromkeys(_COUNTS, count),
    **dict.fromkeys(_NUMBERS, real),
    **dict.fromkeys(_FUNCTIONS, function),
    **{name: partial(of_class, kind=kind) for name, kind in _OBJECTS.items()},
}
"""The check of every argument of this name, in all public functions. A value that is the argument's default is not checked."""


def sequence(name: str, value: object) -> Iterable[Any]:
    """The value, if it is an iterable, but no text and no tensor or array without dimensions; else a TypeError."""
    if (
        isinstance(value, str | bytes)
        or not isinstance(value, Iterable)
        or (isinstance(value, Tensor | np.ndarray) and not value.ndim)
    ):
        raise TypeError(f"{name} must be a list or another iterable, got {described(value)}")
    return value


def text(name: str, value: object) -> str:
    """The value, if it is a string; else a TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {described(value)}")
    return value


def any_of(words: str, *kinds: Any) -> Check:
    """A check that a value is an instance of one of `kinds`, which the error's message calls `words`."""

    def check(name: str, value: object) -> object:
        if not isinstance(value, kinds):
            raise TypeError(f"{name} must be {words}, got {described(value)}")
        return value

    return check


class _Argument(NamedTuple):
    """An argument of a door that has a check."""

    place: int
    """Its position among the positional arguments; `MOST` if it is taken by name alone."""
    name: str
    default: object
    check: Check


@overload
def door(target: Target, /) -> Target: ...
@overload
def door(**checks: Check | None) -> Callable[[Target], Target]: ...
def door(target: Any = None, /, **checks: Check | None) -> Any:
    """A function whose arguments are checked by their names, or a class whose public methods and constructor are.

    Args:
        target: The function or class; left out if `checks` are given, as in ``@door(order=whole_number)``.
        checks: Checks by argument name, beside those of `NAMED` or in their place; None leaves an argument unchecked.

    Raises:
        TypeError, ValueError: as the checks do, when the function is called.
    """
    if target is None:
        return partial(door, **checks)
    if not inspect.isclass(target):
        return _checked(target, {**NAMED, **checks})
    check_methods(target, {**NAMED, **checks}, ("__init__", "__call__"))
    return target


def input_door(**checks: Check | None) -> Callable[[Target], Target]:
    """As `door` for functions of the rooms where bad input is an `InputError`; only the arguments named here are checked.

    Raises:
        InputError: as the checks do, when the function is called.
    """

    input_checks = {name: _with_input_error(check) for name, check in checks.items() if check is not None}
    return lambda target: _checked(target, input_checks)


def check_fields(value: Any, **checks: Check) -> None:
    """Check the fields of a new dataclass by their names, except those that have their default.

    Raises:
        InputError: as the checks do.
    """
    for field in dataclasses.fields(value):
        check = checks.get(field.name)
        if check is None:
            continue
        field_value = getattr(value, field.name)
        if field_value is not field.default:
            _with_input_error(check)(field.name, field_value)


def _with_input_error(check: Check) -> Check:
    """The check, raising `InputError` in place of TypeError and ValueError."""

    def checked(name: str, value: Any) -> None:
        try:
            check(name, value)
        except (TypeError, ValueError) as error:
            raise InputError(str(error)) from None

    return checked


def check_methods(
    owner: type, checks: Mapping[str, Check | None] = NAMED, also: Collection[str] = ("__call__",)
) -> None:
    """Make a class check the arguments of the public methods that it defines itself, and of the special ones in `also`."""
    for name, member in list(vars(owner).items()):
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if inspect.isfunction(function) and (not name.startswith("_") or name in also):
            setattr(owner, name, _checked_member(member, checks))


def _checked_member(member: Any, checks: Mapping[str, Check | None]) -> Any:
    """`_checked` of a method; of a class or static method, the same kind of method again."""
    if isinstance(member, classmethod | staticmethod):
        return type(member)(_checked(member.__func__, checks))
    return _checked(member, checks)


def _checked(target: Target, checks: Mapping[str, Check | None]) -> Target:
    """The function, which first checks its arguments; the function itself if none has a check."""
    arguments = tuple(_arguments_of(target, checks))
    if not arguments:
        return target

    # A function of its own: the compiler may create classes with doors, and cannot hold checks in the closure of `call`.
    # Python's own error names an argument that is missing, so that an absent one is passed over.
    def check_arguments(positional: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        for place, name, default, check in arguments:
            if place < len(positional):
                value = positional[place]
            elif name in named:
                value = named[name]
            else:
                continue
            if value is not default:
                check(name, value)

    @functools.wraps(target)
    def call(*positional: Any, **named: Any) -> Any:
        if not torch.compiler.is_compiling():
            check_arguments(positional, named)
        return target(*positional, **named)

    return call  # pyright: ignore[reportReturnType]


def _arguments_of(target: Callable[..., Any], checks: Mapping[str, Check | None]) -> Iterator[_Argument]:
    """The arguments of a function that have a check."""
    for place, parameter in enumerate(inspect.signature(target).parameters.values()):
        check = checks.get(parameter.name)
        if check is None or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        by_name_only = parameter.kind is parameter.KEYWORD_ONLY
        yield _Argument(MOST if by_name_only else place, parameter.name, parameter.default, check)
