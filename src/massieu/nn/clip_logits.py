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
from massieu.foundation.shards import has_flat_shards
from massieu.nn.score_weights import Rows, score_weights

_rows_by_module: WeakKeyDictionary[nn.Module, tuple[object, tuple[Rows, ...]]] = WeakKeyDictionary()
"""The rows found for a module, after the number of heads, shapes and types that they were found for."""


class Logits(Protocol):
    """The largest logit of each head by the name of its attention module, as in a record of `massieu.Monitor`."""

    @property
    def largest_logits(self) -> Mapping[str, Float[Tensor, " H"]]: ...


def clip_logits(
    model: nn.Module, threshold: float, record: Mapping[str, Float[Tensor, " H"]] | Logits, *, frozen: bool = False
) -> dict[str, Float[Tensor, " H"]]:
    """Scale weights in place so that, on a layer's own input, no head's largest logit is above the threshold: QK-clip.

    Logits are scale·query·key before biases and soft caps. A head whose largest logit s is above the threshold gets
    γ = threshold/s: the rows of its queries and keys are multiplied by √γ, biases too. Where heads share keys (grouped,
    multi-query and latent attention), its queries alone are multiplied, by γ. A rotation commutes with that, so it is exact
    under rotary embeddings: on the same batch and input the layer's largest logit is then the threshold, to rounding. The input
    changes where layers below are scaled too. A record and a call in turn, at most as many as there are attention modules,
    bring the whole batch below it. Where queries are normalised, the norm's gain is scaled if heads have their own; if they
    share it, the module is refused. Other heads keep their bits, and optimisers their state.

    Rows are not found by names. A module other than `torch.nn.MultiheadAttention` and `Attention` is copied with random
    weights and called on a few random tokens, once, on the CPU. Gradients find the rows; a test with scaled rows then proves
    that scores scale as they should and nothing else changes. Sharded weights (FSDP2, tensor parallel) are scaled shard by
    shard, on every rank.

    Args:
        model: The model that was recorded. It is checked as a whole first: if a part is refused, nothing is changed.
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
            frozen, weights that ``FullyShardedDataParallel`` holds, scores that hold positions within the product.

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
    modules = _modules(model)
    largest = _largest_logits(record)
    recorded = {name: _module(modules, name) for name in largest}
    gammas: dict[str, Tensor] = {}
    # By id, since parameters have no equality of their own.
    parameters: dict[int, nn.Parameter] = {}
    factors: dict[int, Tensor] = {}
    for name, module in recorded.items():
        # A module with several names gets the largest logit of all of them.
        logits_of_names = [largest[other_name] for other_name, other in recorded.items() if other is module]
        if len({len(logits) for logits in logits_of_names}) > 1:
            raise ValueError(f"the record has several numbers of heads for {name or 'the model'}")
        logits = torch.stack(logits_of_names).amax(0)
        if not bool((logits > threshold).any()):
            continue
        gammas[name] = threshold / logits.clamp(min=threshold)
        try:
            _check_no_flat_shards(model)
            for rows in _rows(module, len(logits)):
                parameter = _scalable_parameter(module, rows.parameter_name, frozen)
                row_factors = rows.factors(gammas[name])
                # Modules that share a weight: the smallest factor keeps all of them below the threshold.
                factors[id(parameter)] = torch.minimum(factors.get(id(parameter), row_factors), row_factors)
                parameters[id(parameter)] = parameter
        except ValueError as error:
            raise ValueError(
                f"cannot clip the logits of {name or 'the model'} ({type(module).__name__}): {error}"
            ) from error
    _check_no_other_use(modules, list(recorded.values()), parameters)
    # Only now, after every check, are weights changed.
    with torch.no_grad():
        for parameter_id, parameter in parameters.items():
            _scale(parameter, factors[parameter_id])
    return gammas


def refusals(model: nn.Module, heads: Mapping[str, int], *, frozen: bool = False) -> dict[str, str]:
    """Of which modules `clip_logits` could not scale the logits, with the reason; nothing is changed.

    Modules of one kind are alike but for their weights: the rows that make scores are looked for in the first of each.

    Args:
        model: The model that is to be clipped.
        heads: The number of heads of each attention module, by its name.
        frozen: As for `clip_logits`.
    """
    modules = _modules(model)
    reasons: dict[str, str] = {}
    rows_by_kind: dict[object, tuple[Rows, ...]] = {}
    reason_by_kind: dict[object, str] = {}
    for name, count in heads.items():
        module = _module(modules, name)
        kind = type(module), *_fingerprint(module, count)
        if kind in reason_by_kind:
            reasons[name] = reason_by_kind[kind]
            continue
        try:
            if kind not in rows_by_kind:
                _check_no_flat_shards(model)
                rows_by_kind[kind] = _rows(module, count)
        except ValueError as error:
            reasons[name] = reason_by_kind[kind] = str(error)
            continue
        try:
            for rows in rows_by_kind[kind]:
                _scalable_parameter(module, rows.parameter_name, frozen)
        except ValueError as error:
            reasons[name] = str(error)
    return reasons


def _check_no_flat_shards(model: nn.Module) -> None:
    if has_flat_shards(model):
        raise ValueError(
            "FullyShardedDataParallel holds the model's weights in one row, whose parts cannot be scaled; shard with "
            "torch.distributed.fsdp.fully_shard"
        )


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules by name, after wrappers of data parallelism and compilation are taken off."""
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while isinstance(model, wrappers) or "_orig_mod" in model._modules:
        model = model.module if isinstance(model, wrappers) else model._modules["_orig_mod"]  # pyright: ignore
    return {name.replace("._orig_mod", ""): module for name, module in model.named_modules(remove_duplicate=False)}


def _module(modules: dict[str, nn.Module], name: str) -> nn.Module:
    """The module of that name, or the only one whose name ends in it, for a record of a part of the model."""
    if name in modules:
        return modules[name]
    matches = {id(module): module for other_name, module in modules.items() if other_name.endswith(f".{name}")}
    if len(matches) != 1:
        raise ValueError(f"the record names {name!r}, and the model has {len(matches) or 'no'} modules of that name")
    return next(iter(matches.values()))


def _largest_logits(record: object) -> dict[str, Float[Tensor, " H"]]:
    """The largest logits by the names of modules, checked, on the CPU in float64."""
    by_name = getattr(record, "largest_logits", record)
    if not isinstance(by_name, Mapping):
        raise TypeError(f"record must be what massieu.Monitor returns or a mapping of tensors, got {described(record)}")
    largest = {}
    for name, logits in by_name.items():
        description = f"the largest logits of {name or 'the model'}"
        if not isinstance(name, str):
            raise TypeError(f"record must have names of modules as keys, got {described(name)}")
        check_values(**{description: floating(description, logits)})
        if logits.ndim != 1 or not len(logits):
            raise ValueError(f"{description} must have shape (heads,), got {tuple(logits.shape)}")
        not_finite = (~logits.isfinite()).nonzero().flatten().tolist()
        if not_finite:
            head = not_finite[0]
            raise ValueError(f"{description} must be finite, got {float(logits[head])} in head {head}")
        largest[name] = logits.detach().to("cpu", torch.float64)
    return largest


def _rows(module: nn.Module, heads: int) -> tuple[Rows, ...]:
    """The rows that make the module's scores, found once for each number of heads, shapes and types of its parts."""
    if any(tensor.is_meta for tensor in chain(module.parameters(), module.buffers())):
        raise ValueError("it is on meta, where there are no numbers to scale")
    fingerprint = _fingerprint(module, heads)
    entry = _rows_by_module.get(module)
    if entry is None or entry[0] != fingerprint:
        entry = (fingerprint, score_weights(module, heads))
        _rows_by_module[module] = entry
    return entry[1]


def _fingerprint(module: nn.Module, heads: int) -> tuple[object, ...]:
    """Equal for modules with the same heads, shapes and types of parts."""
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())
    types = tuple((name, type(part)) for name, part in module.named_modules())
    return heads, shapes, types


def _scalable_parameter(module: nn.Module, name: str, frozen: bool) -> nn.Parameter:
    """The parameter of that name; a ValueError if it cannot be scaled in place."""
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
    unknown = [str(one) for one in placements if not (one.is_replicate() or type(one).__name__ == "Shard")]
    if unknown:
        raise ValueError(f"its {name} is sharded in a way that is not known ({', '.join(unknown)})")
    return parameter


def _check_no_other_use(
    modules: dict[str, nn.Module], recorded: list[nn.Module], parameters: dict[int, nn.Parameter]
) -> None:
    """Raise a ValueError if a module that is not in the record shares a parameter that is to be scaled."""
    inside = {id(part) for module in recorded for part in module.modules()}
    for name, module in modules.items():
        for key, parameter in module._parameters.items():
            if id(parameter) in parameters and id(module) not in inside:
                raise ValueError(
                    f"cannot clip logits: {name}.{key} is a weight of attention too, but {name} is not in the record"
                )


def _placements(parameter: Any) -> tuple[Any, ...] | None:
    """The placements of a sharded tensor on its ranks; None for a tensor that is not sharded."""
    # No import, which takes a second: a program with sharded tensors has imported the module already.
    sharded = sys.modules.get("torch.distributed.tensor")
    return parameter.placements if sharded is not None and isinstance(parameter, sharded.DTensor) else None


def _scale(parameter: Tensor, factors: Tensor) -> None:
    """Multiply in place; half precision is multiplied in float32 and rounded once."""
    placements = _placements(parameter)
    if placements is not None:
        from torch.distributed.tensor import Replicate, distribute_tensor

        # Factors are sharded as the parameter is, but a dimension of size 1 broadcasts: each rank needs it whole.
        places = [Replicate() if one.is_shard() and factors.shape[one.dim] == 1 else one for one in placements]
        mesh = parameter.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
        factors = distribute_tensor(factors.to(mesh.device_type), mesh, places, src_data_rank=None).to_local()
        parameter = parameter.to_local()  # pyright: ignore[reportAttributeAccessIssue]
    wide = torch.promote_types(parameter.dtype, torch.float32)
    parameter.copy_(parameter.to(wide) * factors.to(parameter.device, wide))
