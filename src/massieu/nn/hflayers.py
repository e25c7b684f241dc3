"""Modules from hopfield-layers (`hflayers`): from their state dicts and the keywords that created them."""

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

_PATTERNS = ("stored_pattern", "state_pattern", "pattern_projection")
_PATTERN_OF_PROJECTION = {"q": "state_pattern", "k": "stored_pattern", "v": "pattern_projection"}
"""The pattern that each projection (query, key, value) takes."""

HOPFIELD: dict[str, Any] = {
    **dict.fromkeys(("input_size", "hidden_size", "output_size", "pattern_size", "scaling"), None),
    **dict.fromkeys(("stored_pattern_size", "pattern_projection_size", "association_activation"), None),
    **{f"normalize_{name}{more}": True for name in _PATTERNS for more in ("", "_affine")},
    **dict.fromkeys(("normalize_hopfield_space", "normalize_hopfield_space_affine"), False),
    **{f"normalize_{name}_eps": 1e-5 for name in (*_PATTERNS, "hopfield_space")},
    **{f"{name}_as_static": False for name in _PATTERNS},
    **dict.fromkeys(("pattern_projection_as_connected", "concat_bias_pattern", "add_zero_association"), False),
    "disable_out_projection": False,
    "num_heads": 1,
    "update_steps_max": 0,
    "update_steps_eps": 1e-4,
    "batch_first": True,
    "dropout": 0.0,
    "input_bias": True,
}
"""Keywords of `hflayers.Hopfield` and their defaults."""
POOLING = HOPFIELD | {"quantity": 1, "trainable": True}
"""Keywords of `hflayers.HopfieldPooling` and their defaults."""
LAYER = POOLING | {"lookup_weights_as_separated": False, "lookup_targets_as_trainable": True}
"""Keywords of `hflayers.HopfieldLayer` and their defaults."""


class FromHflayers:
    """A module that can be created from the state dict of its namesake in hopfield-layers."""

    _keywords: ClassVar[Mapping[str, Any]]

    @classmethod
    def from_hflayers(cls, state_dict: Mapping[str, Tensor], **keywords: Any) -> Self:
        """The module that computes what its namesake in `hflayers` does, from that one's state dict and keywords.

        `update_steps_max=u` there makes u + 1 passes: `steps` here. Outputs agree to rounding, except where that module

        - stops early (`update_steps_eps`, once all items of the batch have settled),
        - mixes items of the batch (static patterns with several heads),
        - or applies a scaling per head to coordinates.

        Raises:
            ValueError: tensors that are missing or left over, a number of steps per head, an unknown activation.
            TypeError: an unknown keyword.
        """
        unknown = [name for name in keywords if name not in cls._keywords]
        if unknown:
            raise TypeError(f"from_hflayers got an unexpected keyword argument '{unknown[0]}'")
        settings = SimpleNamespace(**{**cls._keywords, **keywords})
        settings.head_size = settings.hidden_size or (settings.input_size or 0) // settings.num_heads
        settings.is_static = {
            name: getattr(settings, f"{pattern}_as_static") for name, pattern in _PATTERN_OF_PROJECTION.items()
        }
        if "quantity" not in cls._keywords:
            return cls(**_arguments(state_dict, settings))
        # Pooling and layer are a Hopfield module with trained patterns around it.
        prefix = "hopfield."
        inner = {name.removeprefix(prefix): tensor for name, tensor in state_dict.items() if name.startswith(prefix)}
        options = _arguments(inner, settings) | {"input_size": settings.input_size}
        # By the names of the patterns there: the names here, and whether they train.
        if "lookup_weights_as_separated" not in cls._keywords:
            names = {"pooling_weights": "states"}
            trainable = {"pooling_weights": settings.trainable}
        else:
            names = {"lookup_weights": "patterns"}
            trainable = {
                "lookup_weights": settings.trainable,
                "target_weights": settings.lookup_targets_as_trainable,
            }
            if settings.lookup_weights_as_separated:
                names["target_weights"] = "targets"
                options["separate_targets"] = True
                options["stored_pattern_size"] = settings.stored_pattern_size
                options["pattern_projection_size"] = settings.pattern_projection_size
        _check_present(names, state_dict)
        module: Any = cls(**options)
        for hflayers_name, name in names.items():
            tensor = state_dict[hflayers_name]
            if not settings.batch_first:
                tensor = tensor.transpose(0, 1)
            setattr(module, name, nn.Parameter(tensor.clone(), requires_grad=trainable[hflayers_name]))
        return module


def _arguments(state_dict: Mapping[str, Tensor], keywords: Any) -> dict[str, Any]:
    """The arguments that make `massieu.nn.Hopfield` the same function."""
    reader = _Reader(state_dict, keywords)
    steps = keywords.update_steps_max
    if not (steps is None or isinstance(steps, int)):
        raise ValueError(f"update_steps_max must be one number for all heads, or None, got {steps!r}")
    linear = {name: reader.linear(name) for name in _PATTERN_OF_PROJECTION}
    projection = linear["v"]
    if keywords.pattern_projection_as_connected and not keywords.stored_pattern_as_static:
        # Connected: the values are made from the keys.
        projection = linear["k"] if keywords.pattern_projection_as_static else nn.Sequential(linear["k"], projection)
    # A module that changes no pattern has scaling 1, all others the head's size to the −½.
    changes_patterns = (
        keywords.pattern_projection_as_connected
        or not keywords.disable_out_projection
        or keywords.normalize_hopfield_space
        or keywords.normalize_hopfield_space_affine
    )
    scale = keywords.scaling
    if scale is None and all(keywords.is_static.values()) and not changes_patterns:
        scale = 1.0
    size = keywords.input_size
    stored_size = keywords.stored_pattern_size or size
    projection_size = keywords.pattern_projection_size or size
    arguments = {
        "num_heads": keywords.num_heads,
        "hidden_size": keywords.head_size,
        "state": nn.Sequential(reader.norm("state_pattern", size), linear["q"]),
        "stored": nn.Sequential(reader.norm("stored_pattern", stored_size), linear["k"]),
        "projection": nn.Sequential(reader.norm("pattern_projection", projection_size), projection),
        "space": reader.norm("hopfield_space", keywords.head_size),
        "output": reader.output(),
        "steps": None if steps is None else steps + 1,
        "scale": scale,
        "sink": 0.0 if keywords.add_zero_association else None,
        "dropout": keywords.dropout,
        "batch_first": keywords.batch_first,
    }
    if reader.tensors:
        raise ValueError(f"the state dict has tensors that these keywords do not use: {', '.join(reader.tensors)}")
    return arguments


class _Reader:
    """Takes tensors out of a state dict; `tensors` are those that are left."""

    def __init__(self, state_dict: Mapping[str, Tensor], keywords: Any) -> None:
        self.keywords = keywords
        self.tensors = dict(state_dict)
        # Learned keys and values are in the state dict but not in the module's output.
        for name in ("bias_k", "bias_v"):
            self.tensors.pop(f"association_core.{name}", None)
        head_size = keywords.head_size
        heads = keywords.num_heads
        self.num_rows = {
            "q": heads * head_size,
            "k": heads * head_size,
            "v": heads * (keywords.pattern_size or head_size),
        }
        projected = [name for name, is_static in keywords.is_static.items() if not is_static]
        self.weights = {name: self.take(f"association_core.{name}_proj_weight", needed=False) for name in projected}
        packed_weight = self.take("association_core.in_proj_weight", needed=False)
        if packed_weight is not None:
            self.weights = dict(zip(projected, self.split(packed_weight, projected), strict=True))
        packed_bias = self.take("association_core.in_proj_bias", needed=keywords.input_bias and bool(projected))
        # The packed bias has rows for the values even if they have no weight.
        biased = [name for name in ("q", "k", "v") if name in projected or name == "v"]
        self.biases: dict[str, Tensor] = {}
        if packed_bias is not None:
            self.biases = dict(zip(biased, self.split(packed_bias, biased), strict=True))

    def take(self, name: str, *, needed: bool = True) -> Tensor | None:
        """The tensor of that name, taken out; a ValueError if it is needed and missing."""
        if needed:
            _check_present((name,), self.tensors)
        return self.tensors.pop(name, None)

    def split(self, tensor: Tensor, names: list[str]) -> tuple[Tensor, ...]:
        """A packed weight or bias, cut into those of the named projections."""
        sizes = [self.num_rows[name] for name in names]
        if sum(sizes) != len(tensor):
            raise ValueError(
                f"a projection of {len(tensor)} rows does not split into {sizes}: check sizes and num_heads"
            )
        return tensor.split(sizes)

    def linear(self, name: str) -> nn.Module:
        """The projection to the heads; for static patterns, the pattern for each head."""
        if self.keywords.is_static[name]:
            return Repeat(self.keywords.num_heads)
        weight = self.weights[name]
        if weight is None:
            raise ValueError(f"the state dict lacks association_core.{name}_proj_weight, or in_proj_weight")
        return _linear(weight, self.biases.get(name))

    def norm(self, name: str, size: int | None) -> nn.Module:
        """The LayerNorm of a pattern or of the Hopfield space; the identity if the keywords ask for none."""
        keywords = vars(self.keywords)
        if not keywords[f"normalize_{name}"]:
            return nn.Identity()
        if size is None:
            raise ValueError("normalised patterns need an input_size")
        is_affine = keywords[f"normalize_{name}_affine"]
        # On meta nothing is allocated for the numbers that are replaced at once.
        norm = nn.LayerNorm(size, keywords[f"normalize_{name}_eps"], is_affine, device="meta")
        prefix = "association_core.p_norm_" if name == "hopfield_space" else f"norm_{name}."
        weight = self.take(f"{prefix}weight", needed=is_affine)
        bias = self.take(f"{prefix}bias", needed=is_affine)
        if weight is not None and bias is not None:
            norm.weight = nn.Parameter(weight.clone())
            norm.bias = nn.Parameter(bias.clone())
        return norm

    def output(self) -> nn.Module:
        """The output projection and the activation, as far as the keywords ask for them."""
        parts = []
        if not self.keywords.disable_out_projection:
            weight = self.take("association_core.out_proj.weight")
            bias = self.take("association_core.out_proj.bias", needed=self.keywords.input_bias)
            assert weight is not None
            parts.append(_linear(weight, bias))
        if self.keywords.association_activation is not None:
            parts.append(Pointwise(self.keywords.association_activation))
        return nn.Sequential(*parts)


class Repeat(nn.Module):
    """The pattern once for each head."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, patterns: Tensor) -> Tensor:
        return patterns.repeat(1, 1, self.times)


class Pointwise(nn.Module):
    """A function of `torch`, by name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        if not callable(getattr(torch, name, None)):
            raise ValueError(f"association_activation must be the name of a function in torch, got {name!r}")
        self.name = name

    def forward(self, tensor: Tensor) -> Tensor:
        return getattr(torch, self.name)(tensor)


def _check_present(names: Iterable[str], tensors: Mapping[str, Tensor]) -> None:
    missing = [name for name in names if name not in tensors]
    if missing:
        raise ValueError(f"the state dict lacks {', '.join(missing)}: check the keywords")


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.clone())
    if bias is not None:
        linear.bias = nn.Parameter(bias.clone())
    return linear
