"""The parameters of a module's forward."""

import inspect

from torch import nn


def forward_signature(module: nn.Module) -> inspect.Signature:
    """The parameters of a module's forward, without the module itself.

    nnsight puts a wrapper of the class's function in the place of the bound forward: it names the module as an argument.
    """
    of_class = type(module).forward
    if inspect.unwrap(module.forward) is inspect.unwrap(of_class):
        return inspect.signature(of_class.__get__(module))
    return inspect.signature(module.forward)


def name_of_ids(module: nn.Module) -> str | None:
    """What a forward without ``input_ids`` calls its one argument without a default, as TransformerLens' does; else None."""
    parameters = forward_signature(module).parameters
    by_name = [each for each in parameters.values() if each.kind is each.POSITIONAL_OR_KEYWORD]
    takes_any_name = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    required = [each.name for each in by_name if each.default is each.empty]
    if "input_ids" in parameters or takes_any_name or len(required) != 1:
        return None
    return required[0]
