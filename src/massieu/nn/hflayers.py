"""Reading the modules of hopfield-layers (`hflayers`): their state dicts, and the keywords they are made with."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

_PATTERNS = "stored_pattern", "state_pattern", "pattern_projection"
_STATIC = {"q": "state_pattern", "k": "stored_pattern", "v": "pattern_projection"}

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
"""What `hflayers.Hopfield` is made with, and its defaults."""
POOLING = HOPFIELD | {"quantity": 1, "trainable": True}
"""What `hflayers.HopfieldPooling` is made with."""
LAYER = POOLING | {"lookup_weights_as_separated": False, "lookup_targets_as_trainable": True}
"""What `hflayers.HopfieldLayer` is made with."""


class FromHflayers:
    """A module that can be read from the state dict of its namesake in hopfield-layers."""

    _keywords: ClassVar[Mapping[str, Any]]

    @classmethod
    def from_hflayers(cls, state_dict: Mapping[str, Tensor], **keywords: Any) -> Self:
        """The same function as the module of this name in `hflayers`, from its state dict and the keywords it was made with.

        `update_steps_max=u` there makes u + 1 passes: `steps` here. Outputs agree to rounding, but where that module stops
        early (`update_steps_eps`, once all items of the batch have settled), mixes items of the batch (static patterns
        with several heads), or deals a scaling per head out to coordinates.

        Raises:
            ValueError: tensors missing or left over, a number of steps per head, an unknown activation.
            TypeError: an unknown keyword.
        """
        unknown = [name for name in keywords if name not in cls._keywords]
        if unknown:
            raise TypeError(f"from_hflayers got an unexpected keyword argument '{unknown[0]}'")
        given = SimpleNamespace(**{**cls._keywords, **keywords})
        given.head_size = given.hidden_size or (given.input_size or 0) // given.num_heads
        given.static = {name: getattr(given, f"{pattern}_as_static") for name, pattern in _STATIC.items()}
        if "quantity" not in cls._keywords:
            return cls(**_arguments(state_dict, given))
        prefix = "hopfield."
        rest = {name.removeprefix(prefix): tensor for name, tensor in state_dict.items() if name.startswith(prefix)}
        options = _arguments(rest, given) | {"input_size": given.input_size}
        names, trainable = {"pooling_weights": "states"}, {"pooling_weights": given.trainable}
        if "lookup_weights_as_separated" in cls._keywords:
            names = {"lookup_weights": "patterns"}
            if given.lookup_weights_as_separated:
                names["target_weights"] = "targets"
                sizes = ("stored_pattern_size", "pattern_projection_size")
                options |= {"separate_targets": True, **{name: getattr(given, name) for name in sizes}}
            trainable = {"lookup_weights": given.trainable, "target_weights": given.lookup_targets_as_trainable}
        _need(names, state_dict)
        module: Any = cls(**options)
        for theirs, ours in names.items():
            tensor = state_dict[theirs] if given.batch_first else state_dict[theirs].transpose(0, 1)
            setattr(module, ours, nn.Parameter(tensor.clone(), requires_grad=trainable[theirs]))
        return module


def _arguments(state_dict: Mapping[str, Tensor], keywords: Any) -> dict[str, Any]:
    """What `massieu.nn.Hopfield` is made with to be the same function."""
    reader = _Reader(state_dict, keywords)
    steps, scaling = keywords.update_steps_max, keywords.scaling
    if not (steps is None or isinstance(steps, int)):
        raise ValueError(f"update_steps_max must be one number for all heads, or None, got {steps!r}")
    linear = {name: reader.linear(name) for name in _STATIC}
    projection = linear["v"]
    if keywords.pattern_projection_as_connected and not keywords.stored_pattern_as_static:
        projection = linear["k"] if keywords.pattern_projection_as_static else nn.Sequential(linear["k"], projection)
    # A module that changes no pattern has scaling 1, all others the head's size to the −½.
    changes = keywords.pattern_projection_as_connected or not keywords.disable_out_projection
    changes = changes or keywords.normalize_hopfield_space or keywords.normalize_hopfield_space_affine
    default = 1.0 if all(keywords.static.values()) and not changes else None
    size = keywords.input_size
    stored_size, projection_size = keywords.stored_pattern_size or size, keywords.pattern_projection_size or size
    made = {
        "num_heads": keywords.num_heads,
        "hidden_size": keywords.head_size,
        "state": nn.Sequential(reader.norm("state_pattern", size), linear["q"]),
        "stored": nn.Sequential(reader.norm("stored_pattern", stored_size), linear["k"]),
        "projection": nn.Sequential(reader.norm("pattern_projection", projection_size), projection),
        "space": reader.norm("hopfield_space", keywords.head_size),
        "output": reader.output(),
        "steps": None if steps is None else steps + 1,
        "scale": default if scaling is None else scaling,
        "sink": 0.0 if keywords.add_zero_association else None,
        "dropout": keywords.dropout,
        "batch_first": keywords.batch_first,
    }
    if reader.tensors:
        raise ValueError(f"the state dict has tensors that these keywords do not use: {', '.join(reader.tensors)}")
    return made


class _Reader:
    """Takes tensors out of a state dict, and knows which are left."""

    def __init__(self, state_dict: Mapping[str, Tensor], keywords: Any) -> None:
        self.keywords = keywords
        self.tensors = dict(state_dict)
        # Learned keys and values are in the state dict but not in the module's output.
        for name in ("bias_k", "bias_v"):
            self.tensors.pop(f"association_core.{name}", None)
        size, heads = keywords.head_size, keywords.num_heads
        self.rows = {"q": heads * size, "k": heads * size, "v": heads * (keywords.pattern_size or size)}
        moving = [name for name, fixed in keywords.static.items() if not fixed]
        self.weights = {name: self.take(f"association_core.{name}_proj_weight", needed=False) for name in moving}
        packed = self.take("association_core.in_proj_weight", needed=False)
        if packed is not None:
            self.weights = dict(zip(moving, self.split(packed, moving), strict=True))
        bias = self.take("association_core.in_proj_bias", needed=keywords.input_bias and bool(moving))
        # Of values there is a bias even where there is no weight.
        named = [name for name in ("q", "k", "v") if name in moving or name == "v"]
        self.biases = {} if bias is None else dict(zip(named, self.split(bias, named), strict=True))

    def take(self, name: str, *, needed: bool = True) -> Tensor | None:
        if needed:
            _need((name,), self.tensors)
        return self.tensors.pop(name, None)

    def split(self, tensor: Tensor, names: list[str]) -> tuple[Tensor, ...]:
        sizes = [self.rows[name] for name in names]
        if sum(sizes) != len(tensor):
            raise ValueError(
                f"a projection of {len(tensor)} rows does not split into {sizes}: check sizes and num_heads"
            )
        return tensor.split(sizes)

    def linear(self, name: str) -> nn.Module:
        """The projection to the heads; for static patterns, the pattern for each head."""
        if self.keywords.static[name]:
            return Repeat(self.keywords.num_heads)
        weight = self.weights[name]
        if weight is None:
            raise ValueError(f"the state dict lacks association_core.{name}_proj_weight, or in_proj_weight")
        return _linear(weight, self.biases.get(name))

    def norm(self, name: str, size: int | None) -> nn.Module:
        given = vars(self.keywords)
        if not given[f"normalize_{name}"]:
            return nn.Identity()
        if size is None:
            raise ValueError("normalised patterns need an input_size")
        affine = given[f"normalize_{name}_affine"]
        made = nn.LayerNorm(size, given[f"normalize_{name}_eps"], affine, device="meta")
        prefix = "association_core.p_norm_" if name == "hopfield_space" else f"norm_{name}."
        weight, bias = (self.take(f"{prefix}{kind}", needed=affine) for kind in ("weight", "bias"))
        if weight is not None and bias is not None:
            made.weight, made.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
        return made

    def output(self) -> nn.Module:
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


def _need(names: Any, tensors: Mapping[str, Tensor]) -> None:
    missing = [name for name in names if name not in tensors]
    if missing:
        raise ValueError(f"the state dict lacks {', '.join(missing)}: check the keywords")


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight.clone())
    if bias is not None:
        made.bias = nn.Parameter(bias.clone())
    return made
