"""Scale queries and keys of the heads whose largest logit is above a threshold: the rescaling known as QK-clip."""

import sys
from collections.abc import Mapping
from itertools import chain
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn

from massieu.foundation.arguments import FLOATS, check_values, described, flag, floating, instance, number
from massieu.nn.score_weights import Rows, score_weights

_known: WeakKeyDictionary[nn.Module, tuple[object, tuple[Rows, ...]]] = WeakKeyDictionary()
"""What was proved of a module, and of which number of heads, parts and shapes."""


class Logits(Protocol):
    """What holds the largest logit of each head by the name of the attention module, as what `massieu.Monitor` returns."""

    @property
    def largest_logits(self) -> Mapping[str, Float[Tensor, " H"]]: ...


def clip_logits(
    model: nn.Module, threshold: float, record: Mapping[str, Float[Tensor, " H"]] | Logits, *, frozen: bool = False
) -> dict[str, Float[Tensor, " H"]]:
    """Scale weights in place so that the largest logit of every head is at most the threshold: QK-clip.

    Logits are scale·query·key, before masks, biases and soft caps. A head whose largest logit s is above the threshold gets
    γ = threshold/s: the rows of its queries and keys are multiplied by √γ, biases too. Where heads share keys (grouped,
    multi-query and latent attention), its queries alone are multiplied, by γ. A rotation commutes with that, so it is exact
    under rotary embeddings: on the same batch and input the layer's largest logit is then the threshold, to rounding. Where
    queries are normalised, the norm's gain is scaled if heads have their own; if they share it, the module is refused. Other
    heads keep their bits, and optimisers their state.

    Rows are not found by names. Of a module other than `torch.nn.MultiheadAttention` and `Attention`, a copy with random
    weights is called on a few random tokens, once, on the CPU. Gradients find the rows, and numbers prove them: scores scale
    as they should, and nothing else changes. Sharded weights (FSDP2, tensor parallel) are scaled shard by shard, on every rank.

    Args:
        model: What the record is of. It is checked as a whole first: where a part is refused, nothing is changed.
        threshold: Positive.
        record: What `massieu.Monitor` returned, or the largest logit of each head by the name of the attention module. Modules
            that share a weight get the smallest of their factors.
        frozen: scale weights that do not train (``requires_grad=False``) too, as those below an adapter. Under LoRA the rows of
            the base weight W and of B get one factor, and so does W + BA. An adapter that is then saved alone does not fit the
            base model that it began from: save the two merged.

    Returns:
        The factor γ of each head, by the name of each module in which a head was above the threshold; empty where none was.

    Raises:
        TypeError: an argument of another kind.
        ValueError: a logit that is NaN or infinite, a name or number of heads that the model does not have, or a module whose
            logits its weights do not scale, with the reason: shared gains, parametrisations, packed weights, weights that are
            frozen, scores that hold positions within the product.

    Source:
        Kimi Team, arXiv 2507.20534, section 2.1.

    Example:
        >>> import torch
        >>> from massieu import nn
        >>> attention = nn.Attention(4, 2)
        >>> nn.clip_logits(attention, 100.0, {"": torch.tensor([50.0, 400.0])})
        {'': tensor([1.0000, 0.2500], dtype=torch.float64)}
    """
    instance("model", model, nn.Module, "a torch.nn.Module")
    number("threshold", threshold, above=0)
    flag("frozen", frozen)
    modules, largest = _modules(model), _largest(record)
    named = {name: _module(modules, name) for name in largest}
    gammas: dict[str, Tensor] = {}
    parts: dict[int, tuple[Tensor, nn.Parameter]] = {}
    for name, module in named.items():
        # Of a module with several names, the largest of all.
        of_one = [largest[other] for other, one in named.items() if one is module]
        if len({len(logits) for logits in of_one}) > 1:
            raise ValueError(f"the record has several numbers of heads for {name or 'the model'}")
        logits = torch.stack(of_one).amax(0)
        if not bool((logits > threshold).any()):
            continue
        gammas[name] = threshold / logits.clamp(min=threshold)
        try:
            for rows in _rows(module, len(logits)):
                parameter, factors = _parameter(module, rows.part, frozen), rows.factors(gammas[name])
                before = parts.get(id(parameter), (factors, parameter))[0]
                parts[id(parameter)] = torch.minimum(before, factors), parameter
        except ValueError as error:
            raise ValueError(
                f"cannot clip the logits of {name or 'the model'} ({type(module).__name__}): {error}"
            ) from error
    _check_held(modules, list(named.values()), {key: parameter for key, (_, parameter) in parts.items()})
    with torch.no_grad():
        for factors, parameter in parts.values():
            _scale(parameter, factors)
    return gammas


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules by name, of a model without what data parallelism and compilation put around it."""
    around = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while isinstance(model, around) or "_orig_mod" in model._modules:
        model = model.module if isinstance(model, around) else model._modules["_orig_mod"]  # pyright: ignore
    return {name.replace("._orig_mod", ""): module for name, module in model.named_modules(remove_duplicate=False)}


def _module(modules: dict[str, nn.Module], name: str) -> nn.Module:
    """The module of that name; or the one whose name ends so, where the record is of a part of the model."""
    if name in modules:
        return modules[name]
    ends = {id(module): module for other, module in modules.items() if other.endswith(f".{name}")}
    if len(ends) != 1:
        raise ValueError(f"the record names {name!r}, and the model has {len(ends) or 'no'} modules of that name")
    return next(iter(ends.values()))


def _largest(record: object) -> dict[str, Tensor]:
    given = getattr(record, "largest_logits", record)
    if not isinstance(given, Mapping):
        raise TypeError(f"record must be what massieu.Monitor returns or a mapping of tensors, got {described(record)}")
    largest = {}
    for name, logits in given.items():
        told = f"the largest logits of {name or 'the model'}"
        if not isinstance(name, str):
            raise TypeError(f"record must have names of modules as keys, got {described(name)}")
        check_values(**{told: floating(told, logits)})
        if logits.ndim != 1 or not len(logits):
            raise ValueError(f"{told} must have shape (heads,), got {tuple(logits.shape)}")
        wrong = (~logits.isfinite()).nonzero().flatten().tolist()
        if wrong:
            raise ValueError(f"{told} must be finite, got {float(logits[wrong[0]])} in head {wrong[0]}")
        largest[name] = logits.detach().to("cpu", torch.float64)
    return largest


def _rows(module: nn.Module, heads: int) -> tuple[Rows, ...]:
    if any(one.is_meta for one in chain(module.parameters(), module.buffers())):
        raise ValueError("it is on meta, where there are no numbers to scale")
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())
    about = heads, shapes, tuple((name, type(part)) for name, part in module.named_modules())
    found = _known.get(module)
    if found is None or found[0] != about:
        found = _known[module] = about, score_weights(module, heads)
    return found[1]


def _parameter(module: nn.Module, name: str, frozen: bool) -> nn.Parameter:
    """The parameter, if it can be scaled in place."""
    parameter = module.get_parameter(name)
    if parameter.dtype not in FLOATS:
        raise ValueError(f"its {name} is packed ({parameter.dtype})")
    if not (parameter.requires_grad or frozen):
        raise ValueError(f"its {name} is frozen (requires_grad=False); frozen=True scales it too")
    if type(parameter) is nn.Parameter:
        return parameter
    placements = _placements(parameter)
    if placements is None:
        raise ValueError(f"its {name} is a {type(parameter).__name__}, not a plain Parameter")
    if unknown := [str(one) for one in placements if not (one.is_replicate() or type(one).__name__ == "Shard")]:
        raise ValueError(f"its {name} is sharded in a way that is not known ({', '.join(unknown)})")
    return parameter


def _check_held(modules: dict[str, nn.Module], known: list[nn.Module], parameters: dict[int, nn.Parameter]) -> None:
    """Raise a ValueError where a parameter makes something else too, outside of the modules of the record."""
    inside = {id(part) for module in known for part in module.modules()}
    for name, module in modules.items():
        for key, parameter in module._parameters.items():
            if id(parameter) in parameters and id(module) not in inside:
                raise ValueError(
                    f"cannot clip logits: {name}.{key} is a weight of attention too, but {name} is not in the record"
                )


def _placements(parameter: Any) -> tuple[Any, ...] | None:
    """How a tensor lies on several ranks; None where it does not."""
    # Importing it takes a second, and who has sharded tensors has done so.
    sharded = sys.modules.get("torch.distributed.tensor")
    return parameter.placements if sharded is not None and isinstance(parameter, sharded.DTensor) else None


def _scale(parameter: Tensor, factors: Tensor) -> None:
    """Multiply in place; half precision is multiplied in float32 and rounded once."""
    if (placements := _placements(parameter)) is not None:
        from torch.distributed.tensor import Replicate, distribute_tensor

        # A dimension of one factor for all is whole on every rank.
        places = [Replicate() if one.is_shard() and factors.shape[one.dim] == 1 else one for one in placements]
        mesh = parameter.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
        factors = distribute_tensor(factors.to(mesh.device_type), mesh, places, src_data_rank=None).to_local()
        parameter = parameter.to_local()  # pyright: ignore[reportAttributeAccessIssue]
    wide = torch.promote_types(parameter.dtype, torch.float32)
    parameter.copy_(parameter.to(wide) * factors.to(parameter.device, wide))
