"""Hopfield layers: attention over stored patterns, repeated until a pattern is retrieved."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from massieu import energy, ops
from massieu.foundation.arguments import flag, instance, number, whole_number
from massieu.foundation.listening import in_one_call, listeners
from massieu.foundation.transforms import without_autocast
from massieu.measures import Atoms, Measure
from massieu.nn import hflayers
from massieu.nn.activation import Activation, as_module
from massieu.nn.descent import as_distances, descend, last_move, settle
from massieu.nn.heads import Mask, added, attention_weights, log_weight_of, merge_heads, split_heads
from massieu.nn.modules import Device, Iterating, Number, Resettable, check_tokens, register_number, settings
from massieu.ops.observed import tell_attention

START = 0.02
"""The standard deviation of weights and patterns at the start, as in hopfield-layers."""

Patterns = Float[Tensor, "B L d"]


class Hopfield(hflayers.FromHflayers, Iterating, Resettable):
    """Hopfield retrieval with heads: queries retrieve stored patterns and return their values (Ramsauer et al., 2008.02217).

    Of stored patterns Y, states R and projections V (all three may be one tensor), each head makes keys, a query and
    values. The query x descends the energy ½‖x‖² − log Z(scale·x)/scale by x ← Σ p_n key_n, which is attention with values
    = keys (B5, B11), and the last pass averages the values. One pass is ordinary attention; with `steps=None` the descent
    goes on to its end. No pass holds its weights: memory is linear in the number of patterns and of states.

    The end of a descent does not depend on where in its basin it began: with `steps=None` states get no gradient (B12);
    `ImplicitHeads` give them one. A state that sees no pattern retrieves 0.

    `memory(stored)` is the energy itself, trained or not: `layer.memory(stored).retrieve(layer.query(states))`.

    `convergence` has status and residual of each state and head at the end of the descent. With `steps=K` the residual is
    the length of the last move, and there is no warning; with one pass nothing moves, and `convergence` is None.

    Example:
        >>> import torch
        >>> from massieu import nn
        >>> bare = {part: torch.nn.Identity() for part in ("state", "stored", "projection", "output")}
        >>> stored, noisy = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]), torch.tensor([[[0.8, 0.3]]])
        >>> nn.Hopfield(**bare, steps=3, scale=20.0)((stored, noisy, stored)).round(decimals=3).tolist()
        [[[1.0, 0.0]]]
    """

    scale: Tensor | float | None
    sink: Tensor | float | None
    _keywords = hflayers.HOPFIELD

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
        euclidean: bool = False,
        activation: Activation | energy.activations.Activation | Measure | None = None,
        dropout: float = 0.0,
        batch_first: bool = True,
        max_steps: int = 1000,
        throw: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Sizes, or modules in place of what the sizes make.

        Args:
            input_size: Of states, and by default of all else. Not needed where no module has to be made.
            hidden_size: Of a head; input_size/num_heads by default.
            state, stored, projection: Modules from patterns to heads side by side; by default a LayerNorm and a linear
                map, which starts from normal weights of deviation 0.02. `nn.Identity()` takes patterns as they are.
            space: A module for each head's queries and keys, such as a LayerNorm of hidden_size; by default the identity.
            output: A module from the heads side by side to the output; by default a linear map.
            steps: Number of passes over the patterns; None repeats them until retrieval has converged.
            scale: Inverse temperature, above 0: number, tensor or Parameter, one or one a head; hidden_size^-½ by default.
            sink: Log-weight of a null pattern, 0 with value 0, of the same kinds.
            euclidean: Scores are −scale·‖x − key‖²/2, for patterns of unlike lengths: a long one attracts no more than a
                short one. A pass is then the mean of the keys given one of them and noise of variance 1/scale (B6).
            activation: The map after every pass but the last, the energy's reference; by default the identity. An
                `nn.Activation`, or an argument for it.
            dropout: Dropout of the last pass's weights in training, which takes memory L×N.
            max_steps: The most passes for `steps=None`. Then the last state is used; `convergence` has the status of each.
            throw: Raise a ConvergenceError instead.
            device, dtype: Of the modules that are made here; modules that are passed stay as they are.

        Raises:
            ValueError: a size is missing that a module needs; `euclidean` with a sink or an activation, which depend on the
                origin, while distances do not.
        """
        super().__init__()
        self.euclidean = flag("euclidean", euclidean)
        for name, argument in (("sink", sink), ("activation", activation)):
            if euclidean and argument is not None:
                raise ValueError(f"{name} depends on the origin, and distances do not: it needs euclidean=False")
        if steps is not None:
            whole_number("steps", steps, least=1)
        number("dropout", dropout, least=0, below=1)
        for name, module in (("state", state), ("stored", stored)):
            if module is not None:
                instance(name, module, nn.Module, "a torch.nn.Module")
        head_size = hidden_size
        if head_size is None and input_size is not None:
            whole_number("num_heads", num_heads, least=1)
            head_size, remainder = divmod(input_size, num_heads)
            if remainder:
                raise ValueError(f"input_size must be a multiple of num_heads, got {input_size} and {num_heads}")
        sizes = {
            "input_size": input_size,
            "hidden_size": hidden_size,
            "output_size": output_size,
            "stored_pattern_size": stored_pattern_size,
            "pattern_projection_size": pattern_projection_size,
        }
        for name, size in sizes.items():
            if size is not None:
                whole_number(name, size, least=0)
        place: dict[str, Any] = {"device": device, "dtype": dtype}

        def projection_of(name: str) -> nn.Module:
            return _projection(name, sizes[name] or input_size, head_size, num_heads, place)

        self.state = projection_of("input_size") if state is None else state
        self.stored = projection_of("stored_pattern_size") if stored is None else stored
        self.projection = projection_of("pattern_projection_size") if projection is None else projection
        self.space = nn.Identity() if space is None else space
        if output is None:
            if head_size is None or input_size is None:
                raise ValueError("input_size is needed to make the module `output`; or give that module")
            output = SmallLinear(num_heads * head_size, output_size or input_size, **place)
        self.output = output
        self.activation = as_module(activation, **place)
        register_number(self, "scale", scale, num_heads, above=0, **place)
        register_number(self, "sink", sink, num_heads, **place)
        self.num_heads = num_heads
        self.steps = steps
        self.dropout = dropout
        self.batch_first = batch_first
        self.max_steps = max_steps
        self.throw = throw

    def forward(
        self,
        input: Patterns | tuple[Patterns, Patterns, Patterns],
        stored_pattern_padding_mask: Mask | None = None,
        association_mask: Mask | None = None,
    ) -> Float[Tensor, "B L output"]:
        """The values of the retrieved patterns, mapped to the output.

        Args:
            input: One tensor for all three, or stored patterns (B, N, ·), states (B, L, ·) and projections (B, N, ·).
                Length first with `batch_first=False`.
            stored_pattern_padding_mask: (B, N); booleans of which True hides a pattern, or log-weights.
            association_mask: (L, N) or (B·H, L, N); booleans of which True hides, or numbers added to the scores.

        Raises:
            ConvergenceError: with `throw`, `steps=None`: a descent has not ended after `max_steps`.
        """
        return self._associate(self._heads(input), stored_pattern_padding_mask, association_mask)

    def association_matrix(
        self,
        input: Patterns | tuple[Patterns, Patterns, Patterns],
        stored_pattern_padding_mask: Mask | None = None,
        association_mask: Mask | None = None,
    ) -> Float[Tensor, "B H L N"]:
        """The weights of the last pass, in memory L×N."""
        query, key, _ = self._heads(input)
        query, key, log_weight = self._scored(query, key, stored_pattern_padding_mask, association_mask)
        state = self._descended(query, key, log_weight)
        return attention_weights(state, key, log_weight=log_weight, scale=self.scale, sink=self.sink)[0]

    def memory(self, stored: Patterns, stored_pattern_padding_mask: Mask | None = None) -> energy.HopfieldEnergy:
        """The energy of the keys of `stored` at the current parameters, one for each item and head."""
        keys = self._part("stored", stored)
        # The masks' function asks for queries too: one of any kind does, and the log-weight is (B, 1, 1, N).
        padding = log_weight_of(stored_pattern_padding_mask, None, keys[:, :, :1], keys)
        log_weight = added(padding, keys.new_zeros(len(keys), 1, 1, keys.shape[2])).squeeze(2).expand(keys.shape[:3])
        if self.sink is not None:
            # The sink is one more pattern, at the origin.
            sink = torch.as_tensor(self.sink, dtype=keys.dtype, device=keys.device).reshape(-1, 1)
            keys = F.pad(keys, (0, 0, 0, 1))
            log_weight = torch.cat([log_weight, sink.expand(*log_weight.shape[:2], 1)], -1)
        scale = keys.shape[-1] ** -0.5 if self.scale is None else self.scale
        if self.euclidean:
            return energy.HopfieldEnergy.euclidean(keys, log_weight, scale=scale)
        reference = None if self.activation is None else self.activation.activation()
        return energy.HopfieldEnergy.create(Atoms.create(keys, log_weight), scale=scale, reference=reference)

    def query(self, state: Patterns) -> Float[Tensor, "B H L D"]:
        """The queries of the states, by head: the points from which their descent starts."""
        return self._part("states", state)

    def extra_repr(self) -> str:
        shown = f"{settings(self, 'num_heads', 'scale', 'sink', 'dropout')}, steps={self.steps}"
        return f"{shown}, euclidean=True" if self.euclidean else shown

    def _part(
        self, name: str, tensor: Tensor, batch_first: bool | None = None, argument: str | None = None
    ) -> Float[Tensor, "B H L D"]:
        """The heads of stored patterns, states or projections, checked; errors name `argument` if it is given."""
        module = {"stored": self.stored, "states": self.state, "projections": self.projection}[name]
        if batch_first is None:
            batch_first = self.batch_first
        tokens = check_tokens(argument or name, tensor, module, batch_first)
        heads = split_heads(module(tokens), self.num_heads)
        return heads if name == "projections" else self.space(heads)

    def _heads(self, input: Patterns | tuple[Patterns, ...], query: Tensor | None = None) -> tuple[Tensor, ...]:
        """Queries, keys and values of an input. With `query`, the same for every item, the input has no states."""
        names = ("stored", "states", "projections") if query is None else ("stored", "projections")
        tensors: Any = (input,) * len(names) if isinstance(input, Tensor) else input
        if not isinstance(tensors, tuple | list) or len(tensors) != len(names):
            kind = f"{len(input)} of them" if isinstance(input, tuple | list) else type(input).__name__
            raise TypeError(f"input must be a floating-point tensor or ({', '.join(names)}), got {kind}")
        argument = "input" if isinstance(input, Tensor) else None
        heads = {name: self._part(name, tensor, argument=argument) for name, tensor in zip(names, tensors, strict=True)}
        keys = heads["stored"]
        values = heads["projections"]
        if any(part.shape[0] != keys.shape[0] for part in heads.values()) or keys.shape[2] != values.shape[2]:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
            raise ValueError(
                f"{', '.join(names[:-1])} and {names[-1]} must have one batch size, and stored and projections "
                f"one length, got shapes {shapes}"
            )
        queries = heads["states"] if query is None else query.expand(keys.shape[0], -1, -1, -1)
        return queries, keys, values

    def _associate(self, heads: tuple[Tensor, ...], padding: Mask | None, association: Mask | None) -> Tensor:
        """The output of the heads' queries, keys and values."""
        query, key, value = heads
        query, key, log_weight = self._scored(query, key, padding, association)
        state = self._descended(query, key, log_weight)
        options: dict[str, Any] = {"log_weight": log_weight, "scale": self.scale, "sink": self.sink}
        audience = listeners()
        if self.training and self.dropout > 0:
            with without_autocast(query.device):
                weights, _ = attention_weights(state, key, **options)
                retrieved = (F.dropout(weights, self.dropout) @ value.to(weights.dtype)).to(value.dtype)
        else:
            retrieved = in_one_call(audience, ops.attention, state, key, value, **options).output
        if audience:
            start = query if self.steps is None else None
            retrieved = tell_attention(audience, retrieved, state, key, value, start=start, **options)
        output = self.output(merge_heads(retrieved))
        return output if self.batch_first else output.transpose(0, 1)

    def _scored(
        self, query: Tensor, key: Tensor, padding: Mask | None, association: Mask | None
    ) -> tuple[Tensor, Tensor, Mask | None]:
        """Queries, keys and log-weights of the passes; with `euclidean`, those that make scores of distances."""
        log_weight = log_weight_of(padding, association, query, key)
        if self.euclidean:
            return as_distances(query, key, log_weight, self.scale)
        return query, key, log_weight

    def _descended(self, query: Tensor, key: Tensor, log_weight: Mask | None) -> Tensor:
        """The state before the last pass."""
        activation = None if self.activation is None else self.activation.activation()
        options = {"log_weight": log_weight, "scale": self.scale, "sink": self.sink}
        if self.steps == 1:
            return query
        if self.steps is not None:
            before = descend(query, key, self.steps - 2, activation, **options)
            state = descend(before, key, 1, activation, **options)
            self._keep(*last_move(before, state), warn=False)
            return state
        # The number of steps depends on the data, so listeners hear of none of them: only of the last pass, at the fixed point.
        solution = in_one_call(listeners(), settle, query, key, activation, self.max_steps, self.throw, **options)
        self._keep(solution.status, solution.residual)
        return solution.value.to(query.dtype)


class _Trained(hflayers.FromHflayers, Resettable):
    """A `Hopfield` with trained patterns."""

    def reset_parameters(self) -> None:
        """Draw patterns and weights with standard deviation 0.02; restore the numbers passed at creation."""
        super().reset_parameters()
        for patterns in self.parameters(recurse=False):
            nn.init.normal_(patterns, std=START)


class HopfieldPooling(_Trained):
    """Pools a set of patterns to one vector: trained queries retrieve from the set.

    Example:
        >>> import torch
        >>> from massieu import nn
        >>> pooling = nn.HopfieldPooling(8, num_heads=2, quantity=3)
        >>> pooling(torch.randn(5, 100, 8)).shape  # three states side by side
        torch.Size([5, 24])
    """

    _keywords = hflayers.POOLING

    def __init__(self, input_size: int, num_heads: int = 1, *, quantity: int = 1, **options: Any) -> None:
        """A layer with `quantity` trained states of `input_size`; the other arguments are those of `Hopfield`."""
        super().__init__()
        self.hopfield = Hopfield(input_size, num_heads, **options)
        self.states = _patterns(quantity, input_size, options)

    def forward(
        self,
        input: Patterns | tuple[Patterns, Patterns],
        stored_pattern_padding_mask: Mask | None = None,
        association_mask: Mask | None = None,
    ) -> Float[Tensor, "B quantity*output"]:
        """The values that the states retrieve, mapped to the output, side by side.

        Args:
            input: One tensor for both, or stored patterns and projections.
            stored_pattern_padding_mask, association_mask: As for `Hopfield`, as are errors; the states are the queries.
        """
        layer = self.hopfield
        heads = layer._heads(input, layer._part("states", self.states, batch_first=True))
        output = layer._associate(heads, stored_pattern_padding_mask, association_mask)
        if not layer.batch_first:
            output = output.transpose(0, 1)
        return output.flatten(1)

    def extra_repr(self) -> str:
        return f"quantity={self.states.shape[1]}"


class HopfieldLayer(_Trained):
    """A trained memory: inputs retrieve from stored patterns that are parameters of the module.

    Patterns are projected once for a whole batch.

    Example:
        >>> import torch
        >>> from massieu import nn
        >>> memory = nn.HopfieldLayer(8, num_heads=2, quantity=50, steps=2)
        >>> memory.patterns.shape, memory(torch.randn(5, 10, 8)).shape
        (torch.Size([1, 50, 8]), torch.Size([5, 10, 8]))
    """

    targets: nn.Parameter | None
    _keywords = hflayers.LAYER

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
        """A layer with `quantity` trained patterns; the other arguments are those of `Hopfield`.

        With `separate_targets` the patterns' values are made from other trained vectors, the targets.
        """
        super().__init__()
        stored_size = stored_pattern_size or input_size
        target_size = pattern_projection_size or input_size
        if stored_size != target_size and not separate_targets:
            raise ValueError(
                f"patterns of {stored_size} and targets of {target_size} numbers need separate_targets=True"
            )
        sizes = {"stored_pattern_size": stored_size, "pattern_projection_size": target_size}
        self.hopfield = Hopfield(input_size, num_heads, **sizes, **options)
        self.patterns = _patterns(quantity, stored_size, options)
        self.targets = _patterns(quantity, target_size, options) if separate_targets else None

    def forward(
        self, input: Patterns, stored_pattern_padding_mask: Mask | None = None, association_mask: Mask | None = None
    ) -> Float[Tensor, "B L output"]:
        """The values that the states in `input` retrieve, mapped to the output. Masks and errors are those of `Hopfield`."""
        layer = self.hopfield
        targets = self.patterns if self.targets is None else self.targets
        query = layer.query(input)
        # The patterns have shape (1, N, ·) and are projected once; every item of the batch sees the same heads.
        batch = query.shape[0]
        key = layer._part("stored", self.patterns, batch_first=True).expand(batch, -1, -1, -1)
        value = layer._part("projections", targets, batch_first=True).expand(batch, -1, -1, -1)
        return layer._associate((query, key, value), stored_pattern_padding_mask, association_mask)

    def extra_repr(self) -> str:
        return f"quantity={self.patterns.shape[1]}, separate_targets={self.targets is not None}"


class SmallLinear(nn.Linear):
    """Small normal weights at the start: all patterns begin with nearly equal attention weights."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=START)
        nn.init.zeros_(self.bias)


def _projection(name: str, size: int | None, head_size: int | None, heads: int, place: dict[str, Any]) -> nn.Module:
    """A LayerNorm and a linear map to the heads."""
    if size is None or head_size is None:
        raise ValueError(f"input_size or {name} and hidden_size are needed to make a projection; or give its module")
    return nn.Sequential(nn.LayerNorm(size, **place), SmallLinear(size, heads * head_size, **place))


def _patterns(quantity: int, size: int, options: dict[str, Any]) -> nn.Parameter:
    """Trained patterns (1, quantity, size)."""
    whole_number("quantity", quantity, least=0)
    place = {name: options.get(name) for name in ("device", "dtype")}
    return nn.Parameter(nn.init.normal_(torch.empty(1, quantity, size, **place), std=START))
