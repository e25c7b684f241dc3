"""Reading the modules of hopfield-layers (`hflayers`): their state dicts, and the keywords they are made with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Keywords:
    """What `hflayers.Hopfield` is made with, and its defaults."""

    input_size: int | None = None
    hidden_size: int | None = None
    output_size: int | None = None
    pattern_size: int | None = None
    num_heads: int = 1
    scaling: float | Tensor | None = None
    update_steps_max: int | None = 0
    update_steps_eps: float = 1e-4
    normalize_stored_pattern: bool = True
    normalize_stored_pattern_affine: bool = True
    normalize_stored_pattern_eps: float = 1e-5
    normalize_state_pattern: bool = True
    normalize_state_pattern_affine: bool = True
    normalize_state_pattern_eps: float = 1e-5
    normalize_pattern_projection: bool = True
    normalize_pattern_projection_affine: bool = True
    normalize_pattern_projection_eps: float = 1e-5
    normalize_hopfield_space: bool = False
    normalize_hopfield_space_affine: bool = False
    normalize_hopfield_space_eps: float = 1e-5
    stored_pattern_as_static: bool = False
    state_pattern_as_static: bool = False
    pattern_projection_as_static: bool = False
    pattern_projection_as_connected: bool = False
    stored_pattern_size: int | None = None
    pattern_projection_size: int | None = None
    batch_first: bool = True
    association_activation: str | None = None
    dropout: float = 0.0
    input_bias: bool = True
    concat_bias_pattern: bool = False
    add_zero_association: bool = False
    disable_out_projection: bool = False

    @property
    def head_size(self) -> int:
        """Of queries and keys."""
        return self.hidden_size or (self.input_size or 0) // self.num_heads

    @property
    def static(self) -> dict[str, bool]:
        """Whether query, key and value are the patterns as they are."""
        return {
            "q": self.state_pattern_as_static,
            "k": self.stored_pattern_as_static,
            "v": self.pattern_projection_as_static,
        }

    @property
    def default_scaling(self) -> float | None:
        """1 for a module that changes no pattern, the head's size to the −½ for all others."""
        bare = not (
            self.pattern_projection_as_connected
            or self.normalize_hopfield_space
            or self.normalize_hopfield_space_affine
            or not self.disable_out_projection
        )
        return 1.0 if bare and all(self.static.values()) else None


@dataclass(frozen=True)
class PoolingKeywords(Keywords):
    """What `hflayers.HopfieldPooling` is made with."""

    quantity: int = 1
    trainable: bool = True


@dataclass(frozen=True)
class LayerKeywords(PoolingKeywords):
    """What `hflayers.HopfieldLayer` is made with."""

    lookup_weights_as_separated: bool = False
    lookup_targets_as_trainable: bool = True


def arguments(state_dict: Mapping[str, Tensor], keywords: Keywords) -> dict[str, Any]:
    """What `massieu.nn.Hopfield` is made with to be the same function.

    Raises:
        ValueError: tensors missing or left over, a number of steps per head, an unknown activation.
    """
    reader = _Reader(state_dict, keywords)
    steps, scaling = keywords.update_steps_max, keywords.scaling
    if not (steps is None or isinstance(steps, int)):
        raise ValueError(f"update_steps_max must be one number for all heads, or None, got {steps!r}")
    linear = {name: reader.linear(name) for name in ("q", "k", "v")}
    projection = linear["v"]
    if keywords.pattern_projection_as_connected and not keywords.stored_pattern_as_static:
        projection = linear["k"] if keywords.pattern_projection_as_static else nn.Sequential(linear["k"], projection)
    size = keywords.input_size
    stored_size, projection_size = keywords.stored_pattern_size or size, keywords.pattern_projection_size or size
    made = {
        "num_heads": keywords.num_heads,
        "state": nn.Sequential(reader.norm("state_pattern", size), linear["q"]),
        "stored": nn.Sequential(reader.norm("stored_pattern", stored_size), linear["k"]),
        "projection": nn.Sequential(reader.norm("pattern_projection", projection_size), projection),
        "space": reader.norm("hopfield_space", keywords.head_size),
        "output": reader.output(),
        "steps": None if steps is None else steps + 1,
        "scale": keywords.default_scaling if scaling is None else scaling,
        "sink": 0.0 if keywords.add_zero_association else None,
        "dropout": keywords.dropout,
        "batch_first": keywords.batch_first,
    }
    if reader.tensors:
        raise ValueError(f"the state dict has tensors that these keywords do not use: {', '.join(reader.tensors)}")
    return made


def wrapped(cls: Any, inner: Any, state_dict: Mapping[str, Tensor], keywords: PoolingKeywords) -> Any:
    """A pooling or lookup module around a `Hopfield`.

    Raises:
        ValueError: as `arguments`.
    """
    prefix = "hopfield."
    own = {name: tensor for name, tensor in state_dict.items() if not name.startswith(prefix)}
    rest = {name.removeprefix(prefix): tensor for name, tensor in state_dict.items() if name.startswith(prefix)}
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    module.hopfield = inner(**arguments(rest, keywords))
    if isinstance(keywords, LayerKeywords):
        names = {"lookup_weights": "patterns", "target_weights": "targets"}
        trainable = {"lookup_weights": keywords.trainable, "target_weights": keywords.lookup_targets_as_trainable}
        if not keywords.lookup_weights_as_separated:
            del names["target_weights"]
            module.register_parameter("targets", None)
    else:
        names, trainable = {"pooling_weights": "states"}, {"pooling_weights": keywords.trainable}
    _need(names, own)
    for theirs, ours in names.items():
        tensor = own[theirs] if keywords.batch_first else own[theirs].transpose(0, 1)
        module.register_parameter(ours, nn.Parameter(tensor.clone(), requires_grad=trainable[theirs]))
    return module


class _Reader:
    """Takes tensors out of a state dict, and knows which are left."""

    def __init__(self, state_dict: Mapping[str, Tensor], keywords: Keywords) -> None:
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
