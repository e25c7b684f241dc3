"""Hopfield layers: attention over stored patterns, repeated until a pattern is retrieved."""

from collections.abc import Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from massieu import energy, ops
from massieu.foundation.arguments import check_shape, floating, number, whole_number
from massieu.foundation.transforms import without_autocast
from massieu.measures import Atoms, Measure
from massieu.nn import hflayers
from massieu.nn.activation import Activation, as_module
from massieu.nn.heads import Mask, added, attention_weights, log_weight_of, merge_heads, split_heads
from massieu.nn.modules import Iterating, Number, check_input, register_number
from massieu.solve import GMRES, ConjugateGradients, Implicit, Picard, fixed_point
from massieu.solve.status import FixedPointResult

START = 0.02
"""The standard deviation of weights and patterns at the start, hopfield-layers' own."""

Patterns = Float[Tensor, "B L d"]


class Hopfield(Iterating, nn.Module):
    """Heads that retrieve stored patterns and return what belongs to them (Ramsauer et al., arXiv 2008.02217).

    Of stored patterns Y, states R and projections V (all three may be one tensor), each head makes keys, a query and
    values. The query x descends the energy ½‖x‖² − log Z(scale·x)/scale by x ← Σ p_n key_n, which is attention with values
    = keys (B5, B11), and the last pass averages the values. One pass is ordinary attention; with `steps=None` the descent
    goes on to its end. No pass holds its weights: memory is linear in the number of patterns and of states.

    Where a descent ends does not depend on where in the basin it began: with `steps=None` states get no gradient (B12),
    `ImplicitAttention` gives them one. A state that sees no pattern retrieves 0.

    `memory(stored)` is the energy itself, without training too: `layer.memory(stored).retrieve(layer.query(states))`.
    """

    scale: Tensor | float | None
    sink: Tensor | float | None

    def __init__(
        self,
        input_size: int | None = None,
        num_heads: int = 1,
        *,
        hidden_size: int | None = None,
        output_size: int | None = None,
        stored_pattern_size: int | None = None,
        pattern_projection_size: int | None = None,
        state: nn.Module | None = None,
        stored: nn.Module | None = None,
        projection: nn.Module | None = None,
        space: nn.Module | None = None,
        output: nn.Module | None = None,
        steps: int | None = 1,
        scale: Number = None,
        sink: Number = None,
        activation: Activation | energy.activations.Activation | Measure | None = None,
        dropout: float = 0.0,
        batch_first: bool = True,
        max_steps: int = 1000,
        throw: bool = False,
    ) -> None:
        """Sizes, or modules in place of what the sizes make.

        Args:
            input_size: Of states, and by default of all else. Not needed where no module has to be made.
            hidden_size: Of a head; input_size/num_heads by default.
            state, stored, projection: Modules from patterns to heads side by side; by default a LayerNorm and a linear
                map, which starts from normal weights of deviation 0.02. `nn.Identity()` takes patterns as they are.
            space: What queries and keys go through by head, such as a LayerNorm of hidden_size. None by default.
            output: From the heads side by side to the output; by default a linear map.
            steps: Passes over the patterns; None: until retrieval has converged.
            scale: Inverse temperature; hidden_size^-½ by default. A number, a tensor or a Parameter, one or one a head.
            sink: Log-weight of a null pattern, 0 with value 0, of the same kinds.
            activation: What follows every pass but the last: the energy's reference, the identity by default. An
                `nn.Activation`, or what it is made of.
            dropout: Of the weights of the last pass, in training; takes memory L×N.
            max_steps: For `steps=None`, when to give up: the last state is used; `convergence` tells of each.
            throw: Raise instead.

        Raises:
            ValueError: a size is missing that a module is to be made of.
        """
        super().__init__()
        if steps is not None:
            whole_number("steps", steps, least=1)
        number("dropout", dropout, least=0, below=1)
        size = hidden_size
        if size is None and input_size is not None:
            if input_size % num_heads:
                raise ValueError(f"input_size must be a multiple of num_heads, got {input_size} and {num_heads}")
            size = input_size // num_heads
        sizes = {
            "input_size": input_size,
            "stored_pattern_size": stored_pattern_size or input_size,
            "pattern_projection_size": pattern_projection_size or input_size,
        }
        modules = [
            _projection(name, sizes[name], size, num_heads) if module is None else module
            for name, module in zip(sizes, (state, stored, projection), strict=True)
        ]
        self.state, self.stored, self.projection = modules
        self.space = nn.Identity() if space is None else space
        if output is None:
            if size is None or input_size is None:
                raise ValueError("input_size is needed to make the module `output`; or give that module")
            output = _linear(num_heads * size, output_size or input_size)
        self.output = output
        self.activation = as_module(activation)
        register_number(self, "scale", scale, num_heads)
        register_number(self, "sink", sink, num_heads)
        self.num_heads, self.steps, self.dropout, self.batch_first = num_heads, steps, dropout, batch_first
        self.max_steps, self.throw = max_steps, throw

    @classmethod
    def from_hflayers(cls, state_dict: Mapping[str, Tensor], **keywords: Any) -> Self:
        """The same function as an `hflayers.Hopfield`, from its state dict and the keywords it was made with.

        `update_steps_max=u` there makes u + 1 passes: `steps` here. Outputs agree to rounding, but where that module stops
        early (`update_steps_eps`, once all items of the batch have settled), mixes items of the batch (static patterns
        with several heads), or deals a scaling per head out to coordinates.

        Raises:
            ValueError: tensors missing or left over.
            TypeError: an unknown keyword.
        """
        return cls(**hflayers.arguments(state_dict, hflayers.Keywords(**keywords)))

    def forward(
        self,
        input: Patterns | tuple[Patterns, Patterns, Patterns],
        stored_pattern_padding_mask: Mask | None = None,
        association_mask: Mask | None = None,
    ) -> Float[Tensor, "B L output"]:
        """What belongs to the retrieved patterns.

        Args:
            input: One tensor, or stored patterns (B, N, ·), states (B, L, ·) and projections (B, N, ·). Length first
                with `batch_first=False`.
            stored_pattern_padding_mask: (B, N); booleans of which True hides a pattern, or log-weights.
            association_mask: (L, N) or (B·H, L, N); booleans of which True hides, or numbers added to the scores.

        Raises:
            ConvergenceError: with `throw`, `steps=None`: a descent has not ended after `max_steps`.
        """
        found = self._associate(*self._heads(input), stored_pattern_padding_mask, association_mask)
        return found if self.batch_first else found.transpose(0, 1)

    def association_matrix(
        self,
        input: Patterns | tuple[Patterns, Patterns, Patterns],
        stored_pattern_padding_mask: Mask | None = None,
        association_mask: Mask | None = None,
    ) -> Float[Tensor, "B H L N"]:
        """The weights of the last pass, in memory L×N."""
        query, key, _ = self._heads(input)
        log_weight = log_weight_of(stored_pattern_padding_mask, association_mask, query, key)
        state = self._descended(query, key, log_weight)
        return attention_weights(state, key, log_weight=log_weight, scale=self.scale, sink=self.sink)[0]

    def memory(self, stored: Patterns, stored_pattern_padding_mask: Mask | None = None) -> energy.HopfieldEnergy:
        """The energy of the keys of `stored`, one for each item and head, at the current parameters."""
        keys = self._keys(self._batch_first(stored, "stored", self.stored))
        padding = log_weight_of(stored_pattern_padding_mask, None, keys[:, :, :1], keys)
        log_weight = added(padding, keys.new_zeros(len(keys), 1, 1, keys.shape[2])).squeeze(2).expand(keys.shape[:3])
        if self.sink is not None:
            sink = torch.as_tensor(self.sink, dtype=keys.dtype, device=keys.device).reshape(-1, 1)
            keys = F.pad(keys, (0, 0, 0, 1))
            log_weight = torch.cat([log_weight, sink.expand(*log_weight.shape[:2], 1)], -1)
        scale = keys.shape[-1] ** -0.5 if self.scale is None else self.scale
        reference = None if self.activation is None else self.activation.activation()
        return energy.HopfieldEnergy.create(Atoms.create(keys, log_weight), scale=scale, reference=reference)

    def query(self, state: Patterns) -> Float[Tensor, "B H L D"]:
        """Where the descent of each state begins, by head."""
        return self.space(split_heads(self.state(self._batch_first(state, "states", self.state)), self.num_heads))

    def _keys(self, stored: Tensor) -> Tensor:
        return self.space(split_heads(self.stored(stored), self.num_heads))

    def _values(self, projection: Tensor) -> Tensor:
        return split_heads(self.projection(projection), self.num_heads)

    def _batch_first(self, tensor: Tensor, name: str, projection: nn.Module) -> Tensor:
        order = ("batch", "length") if self.batch_first else ("length", "batch")
        check_shape(name, floating(name, tensor), (*order, "size"))
        check_input(name, tensor, projection)
        return tensor if self.batch_first else tensor.transpose(0, 1)

    def _heads(self, input: Patterns | tuple[Patterns, Patterns, Patterns]) -> tuple[Tensor, Tensor, Tensor]:
        stored, state, projection = several("input", input, "stored, states, projections")
        keys = self._keys(self._batch_first(stored, "stored", self.stored))
        values = self._values(self._batch_first(projection, "projections", self.projection))
        query = self.query(state)
        if not len(query) == len(keys) == len(values) or keys.shape[2] != values.shape[2]:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (stored, state, projection))
            raise ValueError(
                "stored, states and projections must have one batch size, and stored and projections one length, got "
                f"shapes {shapes}"
            )
        return query, keys, values

    def _associate(
        self, query: Tensor, key: Tensor, value: Tensor, padding: Mask | None, association: Mask | None
    ) -> Tensor:
        """From the heads' queries, keys and values to the output."""
        log_weight = log_weight_of(padding, association, query, key)
        state = self._descended(query, key, log_weight)
        if self.training and self.dropout > 0:
            with without_autocast(query.device):
                weights, _ = attention_weights(state, key, log_weight=log_weight, scale=self.scale, sink=self.sink)
                found = (F.dropout(weights, self.dropout) @ value.to(weights.dtype)).to(value.dtype)
        else:
            found = ops.attention(state, key, value, log_weight=log_weight, scale=self.scale, sink=self.sink).output
        return self.output(merge_heads(found))

    def _descended(self, query: Tensor, key: Tensor, log_weight: Mask | None) -> Tensor:
        """The state before the last pass."""
        activation = None if self.activation is None else self.activation.activation()
        options = {"log_weight": log_weight, "scale": self.scale, "sink": self.sink}
        if self.steps is not None:
            return descend(query, key, self.steps - 1, activation, **options)
        found = settle(query, key, activation, self.max_steps, self.throw, **options)
        self._keep(found.status, found.residual)
        return found.value.to(query.dtype)


class HopfieldPooling(nn.Module):
    """A set of patterns to a vector: trained states retrieve from it."""

    def __init__(self, input_size: int, num_heads: int = 1, *, quantity: int = 1, **options: Any) -> None:
        """`quantity` states of `input_size`; all else is `Hopfield`'s."""
        super().__init__()
        self.hopfield = Hopfield(input_size, num_heads, **options)
        self.states = nn.Parameter(START * torch.randn(1, quantity, input_size))

    @classmethod
    def from_hflayers(cls, state_dict: Mapping[str, Tensor], **keywords: Any) -> Self:
        """The same function as an `hflayers.HopfieldPooling`; see `Hopfield.from_hflayers`."""
        return hflayers.wrapped(cls, Hopfield, state_dict, hflayers.PoolingKeywords(**keywords))

    def forward(
        self,
        input: Patterns | tuple[Patterns, Patterns],
        stored_pattern_padding_mask: Mask | None = None,
        association_mask: Mask | None = None,
    ) -> Float[Tensor, "B quantity*output"]:
        """What belongs to the retrieved patterns, all states side by side.

        Args:
            input: One tensor, or stored patterns and projections.
            stored_pattern_padding_mask, association_mask: As for `Hopfield`, with states for queries; so are errors.
        """
        layer = self.hopfield
        stored, projection = several("input", input, "stored, projections")
        keys = layer._keys(layer._batch_first(stored, "stored", layer.stored))
        values = layer._values(layer._batch_first(projection, "projections", layer.projection))
        if keys.shape[0] != values.shape[0] or keys.shape[2] != values.shape[2]:
            shapes = f"{tuple(stored.shape)} and {tuple(projection.shape)}"
            raise ValueError(f"stored and projections must have one batch size and length, got shapes {shapes}")
        states = self.states if layer.batch_first else self.states.transpose(0, 1)
        query = layer.query(states).expand(len(keys), -1, -1, -1)
        return layer._associate(query, keys, values, stored_pattern_padding_mask, association_mask).flatten(1)


class HopfieldLayer(nn.Module):
    """A trained memory: the input retrieves from stored patterns that are parameters.

    Patterns are projected once for a whole batch.
    """

    targets: nn.Parameter | None

    def __init__(
        self,
        input_size: int,
        num_heads: int = 1,
        *,
        quantity: int = 1,
        separate_targets: bool = False,
        stored_pattern_size: int | None = None,
        pattern_projection_size: int | None = None,
        **options: Any,
    ) -> None:
        """`quantity` patterns; with `separate_targets` what belongs to them is trained apart; all else is `Hopfield`'s."""
        super().__init__()
        stored, target = stored_pattern_size or input_size, pattern_projection_size or input_size
        if stored != target and not separate_targets:
            raise ValueError(f"patterns of {stored} and targets of {target} numbers need separate_targets=True")
        self.hopfield = Hopfield(
            input_size, num_heads, stored_pattern_size=stored, pattern_projection_size=target, **options
        )
        self.patterns = nn.Parameter(START * torch.randn(1, quantity, stored))
        self.targets = nn.Parameter(START * torch.randn(1, quantity, target)) if separate_targets else None

    @classmethod
    def from_hflayers(cls, state_dict: Mapping[str, Tensor], **keywords: Any) -> Self:
        """The same function as an `hflayers.HopfieldLayer`; see `Hopfield.from_hflayers`."""
        return hflayers.wrapped(cls, Hopfield, state_dict, hflayers.LayerKeywords(**keywords))

    def forward(
        self, input: Patterns, stored_pattern_padding_mask: Mask | None = None, association_mask: Mask | None = None
    ) -> Float[Tensor, "B L output"]:
        """What belongs to the patterns that the states in `input` retrieve. Masks and errors are those of `Hopfield`."""
        layer = self.hopfield
        query = layer.query(input)
        targets = self.patterns if self.targets is None else self.targets
        keys, values = (
            heads.expand(len(query), -1, -1, -1) for heads in (layer._keys(self.patterns), layer._values(targets))
        )
        found = layer._associate(query, keys, values, stored_pattern_padding_mask, association_mask)
        return found if layer.batch_first else found.transpose(0, 1)


def several(name: str, given: Any, parts: str) -> tuple[Tensor, ...]:
    """The tensors of a tuple, or one tensor in each one's place."""
    count = parts.count(",") + 1
    if isinstance(given, Tensor):
        return (given,) * count
    if not isinstance(given, tuple | list) or len(given) != count:
        kind = f"{len(given)} of them" if isinstance(given, tuple | list) else type(given).__name__
        raise TypeError(f"{name} must be a floating-point tensor or ({parts}), got {kind}")
    return tuple(given)


def descend(
    state: Float[Tensor, "B H L D"],
    key: Float[Tensor, "B H N D"],
    steps: int,
    activation: energy.activations.Activation | None,
    **options: Any,
) -> Float[Tensor, "B H L D"]:
    """The state after so many steps x ↦ ∇L(Σ p_n key_n). Its backward pass keeps states, not weights: memory steps·(L + N)."""
    for _ in range(steps):
        state = ops.attention(state, key, key, **options).output.contiguous()
        if activation is not None:
            state = activation(state).to(state.dtype)
    return state


def settle(
    state: Float[Tensor, "B H L D"],
    key: Float[Tensor, "B H N D"],
    activation: energy.activations.Activation | None,
    max_steps: int,
    throw: bool,
    **options: Any,
) -> FixedPointResult:
    """Where the descent ends, in at least float32; gradients by the implicit function theorem, none for the start (B12).

    Plain steps: each lowers the energy, so that the end is in the basin of the start (B5.5).
    """
    given = {name: value for name, value in options.items() if value is not None}
    hidden = given.get("log_weight")
    if hidden is not None and hidden.dtype == torch.bool:
        given["log_weight"] = added(hidden, state.new_zeros((), dtype=torch.promote_types(state.dtype, torch.float32)))
    behind = () if activation is None else (activation,)

    def step(
        point: Tensor, key: Tensor, options: dict[str, Any], behind: tuple[energy.activations.Activation, ...]
    ) -> Tensor:
        return descend(point, key, 1, behind[0] if behind else None, **options)

    with without_autocast(state.device):
        return fixed_point(
            step,
            state,
            (key, given, behind),
            method=Picard(),
            max_steps=max_steps,
            # β times a covariance is symmetric; an activation after it is not.
            adjoint=Implicit(GMRES() if behind else ConjugateGradients(), lost="nan" if throw else "zero"),
            throw=throw,
        )


def _projection(name: str, size: int | None, hidden: int | None, heads: int) -> nn.Module:
    """A LayerNorm and a linear map to the heads."""
    if size is None or hidden is None:
        raise ValueError(f"input_size or {name} and hidden_size are needed to make a projection; or give its module")
    return nn.Sequential(nn.LayerNorm(size), _linear(size, heads * hidden))


def _linear(size: int, output: int) -> nn.Linear:
    """Weights that start small and normal: all patterns begin with nearly one weight, and training parts them."""
    made = nn.Linear(size, output)
    nn.init.normal_(made.weight, std=START)
    nn.init.zeros_(made.bias)
    return made
