"""Whether the weights that a checkpoint lacks matter: what is measured must not depend on random numbers."""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from massieu.errors import InputError
from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.capture.sites import SiteInfo, first_pass, inside
from massieu.probing.model.checkpoint import shortened, weights_are
from massieu.probing.model.forward import output_tensor
from massieu.probing.model.model import LoadedModel
from massieu.probing.model.model_inputs import model_inputs

_LAYER = re.compile(r"(.*\.)?\d+(?=\.|$)")
_CONSTANTS = re.compile(r"(masked_bias|inv_freq|position_ids|num_batches_tracked)$")
"""Not learned: what older releases of transformers stored beside the weights."""


def check_weights(loaded: LoadedModel, sites: Iterable[SiteInfo], inputs: dict[str, Any]) -> list[str]:
    """Check that nothing measured depends on weights that the checkpoint does not have in the model's shape.

    Such weights are random numbers. One in a layer that holds attention matters. Any other is given other values, and
    matters where this changes an attention's queries, keys or values or the last hidden states: a pooler's does not.

    Returns:
        Warnings: what is doubtful about the checkpoint, and weights in such layers that the model does not use.

    Raises:
        InputError: something measured depends on such weights; they are named.
    """
    layers = {match.group() for info in sites if (match := _LAYER.match(info.site.module_name))}
    random = [name for name in (*loaded.missing, *loaded.reshaped) if not _is_computed(loaded.module, name)]
    needed = {name for name in random if any(inside(name, layer) for layer in layers)}
    outside: dict[str, list[str]] = defaultdict(list)
    for name in random:
        if name not in needed:
            outside[name.rpartition(".")[0]].append(name)
    for names in outside.values():
        if _matters(loaded.module, names, inputs):
            needed.update(names)
    if needed:
        raise InputError(_why_not(loaded, [name for name in random if name in needed]))
    kinds = {f".{_generic(layer)}" for layer in layers}
    unused = [
        name
        for name in loaded.unexpected
        if any(f".{_generic(name)}".endswith(kind) for kind in kinds) and not _CONSTANTS.search(name)
    ]
    warnings = [*loaded.doubts]
    if unused:
        warnings.append(
            f"the checkpoint has {len(unused):,} weights in layers like those measured that the model does not use, as if "
            f"its config.json were of another model: {shortened(unused)}"
        )
    return warnings


def _generic(name: str) -> str | None:
    """The layer that a weight is in, whichever number it has; None where it is in none."""
    match = _LAYER.match(name)
    return re.sub(r"\d+", "#", match.group()) if match else None


def _tensor(model: nn.Module, name: str) -> Tensor | None:
    module, _, last = name.rpartition(".")
    try:
        entry = getattr(model.get_submodule(module), last)
    except AttributeError:
        return None
    return entry if isinstance(entry, Tensor) else None


def _is_computed(model: nn.Module, name: str) -> bool:
    """Integers, such as positions: no weights but what the model's own code works out from its configuration."""
    tensor = _tensor(model, name)
    return tensor is not None and not (tensor.is_floating_point() or tensor.is_complex())


def _matters(model: nn.Module, names: list[str], inputs: dict[str, Any]) -> bool:
    """Whether other values of these weights change anything that is measured on these inputs."""
    tensors = [tensor for name in names if (tensor := _tensor(model, name)) is not None]
    if len(tensors) < len(names):
        return True  # a weight that the model does not have under its name cannot be tried
    before = _measured(model, inputs)
    with _other_values(tensors):
        after = _measured(model, inputs)
    return len(before) != len(after) or any(not _same(a, b) for a, b in zip(before, after, strict=True))


@contextmanager
def _other_values(tensors: list[Tensor]) -> Iterator[None]:
    """Random values in place of the tensors' own inside; the own ones are put back, errors or not."""
    own_values = [tensor.detach().clone() for tensor in tensors]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        try:
            yield
        finally:
            for tensor, values in zip(tensors, own_values, strict=True):
                tensor.copy_(values)


def _measured(model: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    """The queries, keys and values of every attention call, then the last hidden states."""
    seen = first_pass(model, model_inputs(model, inputs, items=2), look=_tensors_of)
    last = getattr(seen.output, "last_hidden_state", None)
    last = output_tensor(model, seen.output) if last is None else last
    return [*(tensor for tensors in seen.noted for tensor in tensors), last]


def _tensors_of(call: AttentionCall) -> list[Tensor]:
    """A call's queries, keys and values; also its scores, where they do not follow from queries and keys."""
    tensors = [call.query, call.key, call.value]
    if call.grade == "scores" and call.log_weight is not None:
        tensors.append(call.log_weight)
    return tensors


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


# --- saying it ---------------------------------------------------------------------------------------------------------


def _why_not(loaded: LoadedModel, names: list[str]) -> str:
    shapes = [name for name in names if name in loaded.reshaped]
    absent = [name for name in names if name not in loaded.reshaped]
    parts = []
    if absent:
        parts.append(f"{weights_are(absent)} missing from its files ({shortened(absent)})")
    if shapes:
        in_files, in_model = loaded.reshaped[shapes[0]]
        parts.append(
            f"{weights_are(shapes)} of another shape there ({shortened(shapes)}; the first {in_files}, not {in_model})"
        )
    problem = f"{loaded.name} cannot be measured: {' and '.join(parts)}, so random numbers would stand in their place"
    clue = _clue(absent, loaded.unexpected)
    return f"{problem}; {clue}" if clue else problem


def _clue(missing: Collection[str], unexpected: Collection[str]) -> str | None:
    """What the checkpoint has in place of missing weights: their names with or without a prefix, or other names."""
    if not missing or not unexpected:
        return None
    longer = _prefix(missing, unexpected)
    if longer:
        return f"its files have them with {longer!r} in front: take that off the names"
    shorter = _prefix(unexpected, missing)
    if shorter:
        return f"its files have them without {shorter!r} in front: add that to the names"
    if len(unexpected) < len(missing):
        return None
    return f"its files have {len(unexpected):,} weights that the model does not know ({shortened(unexpected)})"


def _prefix(names: Collection[str], longer: Collection[str]) -> str | None:
    """What most of the longer names have in front of one of the names."""
    wanted = set(names)
    counts = Counter[str]()
    for name in longer:
        ends = [i + 1 for i, character in enumerate(name) if character == "."]
        counts.update(name[:end] for end in ends if name[end:] in wanted)
    if not counts:
        return None
    prefix, count = counts.most_common(1)[0]
    # A prefix explains the checkpoint where at least half of the names have it.
    return prefix if 2 * count >= min(len(names), len(longer)) else None
