"""Which rows of weights make a head's scores: read from the layout of PyTorch's modules, found by gradients in others.

A module of any library is copied without its values, hooks and device, and called on a few random tokens. The gradient of a
single score with respect to a layer's output is non-zero only in the rows that make this query and this key of the head. The
rows found so are then tested: with the rows scaled, each head's scores must be multiplied by its factor, and the module's
output from fixed scores must not change.
"""

import copy
import inspect
import itertools
import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from massieu.foundation.listening import listening
from massieu.nn.attention import Attention
from massieu.nn.softmax import SoftmaxHeads
from massieu.nn.sparse import EntmaxHeads
from massieu.ops.attention import attend
from massieu.ops.observed import ObservedAttention, ObservedWeights

_NUM_TOKENS = 5
_TOKEN_SIZES = (1.0, 1e3)
"""Factors of the trial's tokens: scores that are clipped, capped or normalised are not proportional at both."""
_TOLERANCE = 1e-5
"""Relative to the largest score or output: parts of a module may compute in float32."""
_LARGEST_SCORE = 1e30
"""Scores of a larger size are those of masks, which are added as the least number of a dtype."""
_KEY_ARGUMENTS = ("key", "k", "value", "v", "key_value_states", "encoder_hidden_states", "context", "memory")
"""Names of a forward's arguments for the sequence whose keys are attended to."""
_FIRST_FUNCTIONS_OF_SCORES = {F.softmax, torch.softmax, Tensor.softmax, torch.tanh, F.tanh, Tensor.tanh}
"""The functions that scores enter first: a softmax, or the soft cap before it."""


class Rows(NamedTuple):
    """The rows of a parameter that are multiplied by γ^power, γ the factor of the row's head."""

    parameter_name: str
    """Name of the parameter within the attention module."""
    shape: tuple[int, ...]
    """Shape of the factors, which broadcasts to the parameter's."""
    head: Int[Tensor, " R"]
    """The head of each row; −1 for a row that keeps its numbers."""
    power: Float[Tensor, " R"]
    """½ where queries and keys are both scaled, 1 where queries alone are."""

    def factors(self, gamma: Float[Tensor, " H"]) -> Tensor:
        """The factor of each row, in the shape to multiply the parameter with."""
        scaled = gamma[self.head.clamp(min=0)] ** self.power
        return torch.where(self.head >= 0, scaled, 1.0).view(self.shape)


def score_weights(module: nn.Module, heads: int) -> tuple[Rows, ...]:
    """The rows that multiply the scores of each head by its factor, and change nothing else.

    Raises:
        ValueError: there are none, with the reason.
    """
    if isinstance(module, nn.MultiheadAttention | Attention):
        return _rows_by_layout(module, heads)
    with torch.inference_mode(False), torch.enable_grad():
        return _Trial(module, heads).rows()


def _rows_by_layout(module: nn.MultiheadAttention | Attention, heads: int) -> tuple[Rows, ...]:
    """The rows of PyTorch's module and of ours, whose parameters are known: queries and keys each scale by √γ."""
    base = Attention if isinstance(module, Attention) else nn.MultiheadAttention
    if type(module).forward is not base.forward or "forward" in vars(module):
        raise ValueError(f"it is a {type(module).__name__} with a forward of its own")
    if isinstance(module, Attention) and type(module.heads) not in (SoftmaxHeads, EntmaxHeads):
        raise ValueError(f"{type(module.heads).__name__} do not multiply queries and keys alone")
    if module.num_heads != heads:
        raise ValueError(f"it has {module.num_heads} heads, and the record {heads}")
    # The head of each row: of one projection, and of the packed projections of queries, keys and values (which stay).
    head = torch.arange(heads).repeat_interleave(module.head_dim)
    packed_head = torch.cat([head, head, torch.full_like(head, -1)])
    # By parameter: the head of each row, and the shape of the factors.
    layout: dict[str, tuple[Tensor, tuple[int, ...]]] = {}
    if module.in_proj_weight is not None:
        layout["in_proj_weight"] = (packed_head, (len(packed_head), 1))
    else:
        layout["q_proj_weight"] = (head, (len(head), 1))
        layout["k_proj_weight"] = (head, (len(head), 1))
    if module.in_proj_bias is not None:
        layout["in_proj_bias"] = (packed_head, (len(packed_head),))
    if module.bias_k is not None:
        layout["bias_k"] = (head, (1, 1, len(head)))
    missing = set(layout) - set(module._parameters)
    if missing:
        raise ValueError(
            f"{', '.join(sorted(missing))} is no plain parameter, as pruning and parametrisations leave it"
        )
    return tuple(
        Rows(name, shape, row_heads, torch.full(row_heads.shape, 0.5, dtype=torch.float64))
        for name, (row_heads, shape) in layout.items()
    )


class _Layer(NamedTuple):
    """A layer whose output is proportional to the rows of its weight."""

    name: str
    module: nn.Module
    shape: tuple[int, ...]
    """Shape of the factors, which broadcasts to the weight's."""
    num_rows: int


class _LayerRows(NamedTuple):
    """The rows of a layer that make the queries, and the keys, of each head."""

    query: Bool[Tensor, "H R"]
    key: Bool[Tensor, "H R"]


class _ScoreRecorder(TorchFunctionMode):
    """Records the first scores that a call computes; with `fixed_inputs` the call goes on from those instead.

    It sees the scores of PyTorch's functions as a function mode, and those of `massieu.ops` as a listener.
    """

    def __init__(self, heads: int, fixed_inputs: tuple[Tensor, ...] | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.fixed_inputs = fixed_inputs
        self.inputs: tuple[Tensor, ...] = ()
        """What the recorded function took: the scores, or query and key."""
        self.scores: Float[Tensor, "H L N"] | None = None
        self.has_other_scores = False
        """Whether a later call of attention had scores other than the first."""
        self._is_claimed = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        names: tuple[str, ...] = ()
        if func is F.scaled_dot_product_attention:
            names = ("query", "key")
        elif func in _FIRST_FUNCTIONS_OF_SCORES:
            names = ("input",)
        # Arguments may be given by their names.
        inputs = (*args[: len(names)], *(kwargs.get(name) for name in names[len(args) :]))
        is_done = self._is_claimed or self.scores is not None
        if not names or is_done or not all(isinstance(tensor, Tensor) for tensor in inputs):
            return func(*args, **kwargs)
        scores = inputs[0] if len(names) == 1 else self._of_pair(inputs[0], inputs[1], kwargs.get("scale"))
        if not self._are_of_heads(scores):
            return func(*args, **kwargs)
        self.scores = scores.reshape(self.heads, *scores.shape[-2:])
        self.inputs = inputs
        used_inputs = inputs if self.fixed_inputs is None else self.fixed_inputs
        other_options = {name: value for name, value in kwargs.items() if name not in names}
        return func(*used_inputs, *args[len(names) :], **other_options)

    def listens(self) -> bool:
        """Whether the next call is not part of another."""
        return not self._is_claimed

    @contextmanager
    def claiming(self) -> Iterator[None]:
        """Inside, calls are part of one that is reported as a whole, so their scores are not recorded."""
        was_claimed = self._is_claimed
        self._is_claimed = True
        try:
            yield
        finally:
            self._is_claimed = was_claimed

    def refusing(self, reason: str) -> AbstractContextManager[None]:
        """Inside, attention cannot be read, as where the number of steps follows from the data."""
        return self.claiming()

    def refuse(self, reason: str) -> None:
        """Do nothing: attention that cannot be read leaves `scores` None."""

    def hear(self, call: ObservedAttention | ObservedWeights) -> Tensor | None:
        """Record the scores of softmax attention; return the output from `fixed_inputs`, if there are any."""
        if not isinstance(call, ObservedAttention):
            return None
        problem = call.problem
        key = problem.key.to(problem.dtype)
        # A dimension for the queries of a group, which share their keys: (B, Hk, G, L, D) by (B, Hk, 1, D, N).
        scores = problem.scaled_query() @ key.unsqueeze(2).mT
        if self.scores is None:
            if not self._are_of_heads(scores):
                return None
            self.scores = scores.reshape(self.heads, *scores.shape[-2:])
            self.inputs = (problem.query, problem.key)
        elif scores.numel() != self.scores.numel() or not torch.equal(scores.flatten(), self.scores.flatten()):
            self.has_other_scores = True
            return None
        if self.fixed_inputs is None:
            return None
        fixed_query, fixed_key = self.fixed_inputs
        with self.claiming():
            return attend(replace(problem, query=fixed_query, key=fixed_key))[0]

    def _are_of_heads(self, scores: Tensor) -> bool:
        """Whether the tensor has the size (H, L, N) of all heads' scores for all tokens."""
        if scores.ndim < 2 or scores.shape[-2] != _NUM_TOKENS:
            return False
        return scores.numel() == self.heads * scores.shape[-2:].numel()

    def _of_pair(self, query: Tensor, key: Tensor, scale: float | None) -> Tensor:
        """The scores of `scaled_dot_product_attention`, whose keys may be shared by groups of heads."""
        if query.ndim == key.ndim == 4 and key.shape[1] != query.shape[1]:
            key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        return query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)


class _Trial:
    """A copy of a module with random weights, and a call of it that computes scores."""

    def __init__(self, module: nn.Module, heads: int) -> None:
        if "forward" in vars(module):
            raise ValueError("its forward was changed, as offloading does")
        self.heads = heads
        self.generator = torch.Generator().manual_seed(0)
        self._random_by_id: dict[int, nn.Parameter] = {}
        self.copy = self._bare(module)
        # By all names, since a weight may have several; `start` has the numbers of each weight, by its id.
        self.weights = dict(self.copy.named_parameters(remove_duplicate=False))
        self.start = {id(weight): weight.data for weight in self.weights.values()}
        self.arguments: dict[str, Any] = {}
        self.first_error = ""
        if not any(self._makes_scores(arguments, implementation) for arguments, implementation in self._calls()):
            reason = f" ({self.first_error})" if self.first_error else ""
            raise ValueError(f"calling the module by itself produced no attention scores with {heads} heads{reason}")

    def _bare(self, module: nn.Module) -> Any:
        """The module in evaluation, without hooks, on the CPU in float64, with random weights; the original is unchanged.

        Not by `copy.deepcopy`, which would copy the weights' memory and what the hooks hold.
        """
        bare = object.__new__(type(module))
        state = vars(bare)
        for name, value in vars(module).items():
            is_hooks = name.endswith(("_hooks", "_with_kwargs", "_always_called"))
            state[name] = type(value)() if is_hooks else _in_double(value)
        state["training"] = False
        state["_compiled_call_impl"] = None
        state["_buffers"] = {name: _in_double(value) for name, value in module._buffers.items()}
        state["_parameters"] = {name: self._random(name, value) for name, value in module._parameters.items()}
        state["_modules"] = {name: part and self._bare(part) for name, part in module._modules.items()}
        return bare

    def _random(self, name: str, weight: nn.Parameter | None) -> nn.Parameter | None:
        """A random parameter of the weight's shape, the same one for a weight that occurs again."""
        if weight is None:
            return None
        if not weight.is_floating_point():
            raise ValueError(f"its {name} is packed ({weight.dtype})")
        if id(weight) not in self._random_by_id:
            uniform = torch.rand(weight.shape, generator=self.generator, dtype=torch.float64)
            if weight.ndim < 2:
                # Gains and biases, away from 0.
                numbers = uniform + 0.5
            else:
                # Of variance 1/width, since uniform numbers have 1/12: outputs are about as large as inputs.
                numbers = (uniform - 0.5) * (12 / weight.shape[-1]) ** 0.5
            self._random_by_id[id(weight)] = nn.Parameter(numbers, requires_grad=False)
        return self._random_by_id[id(weight)]

    def _tokens(self, width: int) -> Tensor:
        return torch.randn(1, _NUM_TOKENS, width, generator=self.generator, dtype=torch.float64)

    def _calls(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Arguments that the forward may take, by their names, each with an implementation of attention in transformers.

        The implementation is "" for modules that have no such choice.
        """
        layers = [layer for layer in self.copy.modules() if _is_linear(layer)]
        if not layers:
            raise ValueError("it has no linear layer of its own")
        widths = list(dict.fromkeys(layer.weight.shape[0 if _is_conv1d(layer) else 1] for layer in layers))
        parameters = list(inspect.signature(type(self.copy).forward).parameters.values())[1:]
        if not parameters:
            raise ValueError("its forward takes no input")
        first, *others = parameters
        named = {one.name: one for one in others if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
        required = [name for name, one in named.items() if one.default is one.empty]
        required_keys = [name for name in required if name in _KEY_ARGUMENTS]
        optional_keys = [name for name in named if name in _KEY_ARGUMENTS and name not in required_keys]

        constant: dict[str, Any] = dict.fromkeys(name for name in required if name not in _KEY_ARGUMENTS)
        constant |= {name: value for name, value in self._neutral_arguments(widths[0]).items() if name in named}
        constant[first.name] = self._tokens(widths[0])

        has_choice = hasattr(getattr(self.copy, "config", None), "_attn_implementation")
        implementations = ["sdpa", "eager"] if has_choice else [""]
        rotations = [*self._rotations(), {}] if "position_embeddings" in named else [{}]
        visible = torch.zeros(1, 1, _NUM_TOKENS, _NUM_TOKENS, dtype=torch.float64)
        masks = [{}, {"attention_mask": visible}] if "attention_mask" in named else [{}]
        # Without the optional keys first: self-attention is the usual case.
        key_choices = [[], optional_keys] if optional_keys else [[]]
        pairs = list(itertools.product(key_choices, widths))
        for choice in itertools.product(implementations, masks, rotations, pairs):
            implementation, mask, rotation, (key_names, width) = choice
            keys = dict.fromkeys((*required_keys, *key_names), self._tokens(width))
            yield {**constant, **keys, **rotation, **mask}, implementation

    def _neutral_arguments(self, width: int) -> dict[str, Any]:
        """Values for arguments that add nothing to scores or output, or count positions, by their usual names."""
        position = torch.arange(_NUM_TOKENS)
        return {
            "residual": torch.zeros(1, _NUM_TOKENS, width, dtype=torch.float64),
            "position_ids": position.unsqueeze(0),
            "alibi": torch.zeros(self.heads, 1, _NUM_TOKENS, dtype=torch.float64),
            "cache_position": position,
        }

    def _rotations(self) -> Iterator[dict[str, Any]]:
        """Angles of positions, in the layouts of transformers: one for all pairs of coordinates, or as many as a head has."""
        head_sizes = [getattr(self.copy, name, None) for name in ("head_dim", "head_size", "qk_rope_head_dim")]
        head_sizes = [size for size in head_sizes if isinstance(size, int)]
        angles = torch.linspace(0, 1, _NUM_TOKENS, dtype=torch.float64).view(1, -1, 1)
        for size in dict.fromkeys([1, *head_sizes, *(size // 2 for size in head_sizes)]):
            yield {"position_embeddings": tuple(one.expand(1, -1, size) for one in (angles.cos(), angles.sin()))}
        # Llama 4 takes complex numbers.
        yield {"position_embeddings": torch.polar(torch.ones_like(angles), angles)}

    def _makes_scores(self, arguments: dict[str, Any], implementation: str) -> bool:
        """Whether the call computes scores; the first error is kept for the case that no call does."""
        if implementation:
            # A copy, since the configuration is shared with the user's module.
            config = copy.deepcopy(self.copy.config)
            config._attn_implementation = implementation
            for part in self.copy.modules():
                if hasattr(part, "config"):
                    part.config = config
        self.arguments = arguments
        try:
            return self.run()[0].scores is not None
        except ValueError as error:
            self.first_error = self.first_error or str(error)
            return False

    def run(
        self, size: float = 1.0, fixed_inputs: tuple[Tensor, ...] | None = None
    ) -> tuple[_ScoreRecorder, Tensor | None]:
        """The scores of a call, with floating-point arguments multiplied by `size`, and the first tensor that it returns."""
        arguments = {
            name: value * size if isinstance(value, Tensor) and value.is_floating_point() else value
            for name, value in self.arguments.items()
        }
        recorder = _ScoreRecorder(self.heads, fixed_inputs)
        try:
            with (
                torch.device("cpu"),
                torch.random.fork_rng(devices=[]),
                torch.autocast("cpu", enabled=False),
                recorder,
                listening(recorder),
            ):
                output = self.copy(**arguments)
        except Exception as error:  # the module may be anybody's and raise anything: the reason is passed on
            reason = str(error).partition(chr(10))[0][:100]
            raise ValueError(f"a call of it alone raised {type(error).__name__}: {reason}") from error
        return recorder, next((leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)), None)

    def rows(self) -> tuple[Rows, ...]:
        """The rows that gradients find, tested by `_scales_scores_alone`.

        Raises:
            ValueError: no rows pass, with the reason.
        """
        if self.run()[0].has_other_scores:
            raise ValueError("it attends several times, by other scores each time")
        layers = self._rows_of_layers()
        # A row that makes the queries of several heads cannot be scaled for one of them.
        num_heads_of_row = {layer: rows.query.sum(0) for layer, rows in layers.items()}
        queries = {layer: rows.query & (num_heads_of_row[layer] == 1) for layer, rows in layers.items()}
        if not _covers_all_heads(queries.values()):
            shared = [layer.name for layer in layers if bool((num_heads_of_row[layer] > 1).any())]
            if shared:
                raise ValueError(f"its queries come from {' and '.join(shared)}, whose numbers all heads share")
            raise ValueError("its queries come from no layer with a plain weight")
        # Where each head has keys of its own, queries and keys each take √γ; else the queries alone take γ.
        keys_are_separate = all(bool((rows.key.sum(0) <= 1).all()) for rows in layers.values())
        candidates = [(queries, 1.0)]
        if keys_are_separate and _covers_all_heads(rows.key for rows in layers.values()):
            candidates.insert(0, ({layer: queries[layer] | rows.key for layer, rows in layers.items()}, 0.5))
        for masks, power in candidates:
            rows = tuple(one for layer, mask in masks.items() for one in self._as_rows(layer, mask, power))
            if self._scales_scores_alone(rows):
                return rows
        norms = [layer.name for layer in layers if "norm" in type(layer.module).__name__.lower()]
        made_by = f", which {' and '.join(norms)} make" if norms else ""
        raise ValueError(f"its scores are not in proportion to its weights{made_by}")

    def _rows_of_layers(self) -> dict[_Layer, _LayerRows]:
        """The rows of each layer that make queries and keys, by gradients of single scores."""
        outputs: list[tuple[_Layer, Tensor]] = []
        with self._cut_layers(outputs):
            scores = self.run()[0].scores
        layers: dict[_Layer, _LayerRows] = {}
        if scores is None or not scores.requires_grad:
            return layers
        for layer, _ in outputs:
            mask = torch.zeros(self.heads, layer.num_rows).bool()
            layers.setdefault(layer, _LayerRows(mask, mask.clone()))
        tensors = [output for _, output in outputs]
        for head in range(self.heads):
            # One query and two keys: a row that moves both scores makes the query, one that moves only the first makes a key.
            first = torch.autograd.grad(scores[head, 2, 1], tensors, retain_graph=True, allow_unused=True)
            second = torch.autograd.grad(scores[head, 2, 0], tensors, retain_graph=True, allow_unused=True)
            for (layer, _), first_gradient, second_gradient in zip(outputs, first, second, strict=True):
                moves_first = _is_not_zero(first_gradient, layer.num_rows)
                moves_second = _is_not_zero(second_gradient, layer.num_rows)
                layers[layer].query[head] |= (moves_first & moves_second).any(0)
                layers[layer].key[head] |= (moves_first & ~moves_second).any(0)
        return layers

    @contextmanager
    def _cut_layers(self, outputs: list[tuple[_Layer, Tensor]]) -> Iterator[None]:
        """Inside, gradients start anew at each layer's output, so that those of scores end at the last layers before them."""

        def cut(name: str, module: nn.Module, output: Any) -> Tensor | None:
            shape = _factor_shape(module, output) if isinstance(output, Tensor) else None
            if shape is None:
                return None
            leaf = output.detach().requires_grad_()
            outputs.append((_Layer(name, module, shape, math.prod(shape)), leaf))
            # A clone, since the caller may change the output in place, which a leaf forbids.
            return leaf.clone()

        handles = [
            module.register_forward_hook(lambda module, _, output, name=name: cut(name, module, output))
            for name, module in self.copy.named_modules()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _as_rows(self, layer: _Layer, mask: Bool[Tensor, "H R"], power: float) -> Iterator[Rows]:
        """The rows of the layer's weight, and of its bias if it has one; none if the mask is empty."""
        head = torch.where(mask.any(0), mask.int().argmax(0), -1)
        if bool((head >= 0).any()):
            powers = torch.full(head.shape, power, dtype=torch.float64)
            yield Rows(f"{layer.name}.weight", layer.shape, head, powers)
            if getattr(layer.module, "bias", None) is not None:
                bias_shape = tuple(layer.module.get_parameter("bias").shape)
                yield Rows(f"{layer.name}.bias", bias_shape, head, powers)

    def _run_scaled(
        self, rows: tuple[Rows, ...], gamma: Tensor, size: float, fixed_inputs: tuple[Tensor, ...] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Scores and output of a call with the rows scaled; a weight with several names takes the smallest of its factors."""
        factors: dict[int, Tensor] = {}
        for one in rows:
            weight_id = id(self.weights[one.parameter_name])
            row_factors = one.factors(gamma)
            factors[weight_id] = torch.minimum(factors.get(weight_id, row_factors), row_factors)
        try:
            for weight in self.weights.values():
                weight.data = self.start[id(weight)] * factors.get(id(weight), 1.0)
            recorder, output = self.run(size, fixed_inputs)
        finally:
            for weight in self.weights.values():
                weight.data = self.start[id(weight)]
        assert recorder.scores is not None
        return recorder.scores, output

    def _scales_scores_alone(self, rows: tuple[Rows, ...]) -> bool:
        """Whether scaling the rows multiplies each head's query·key product by its factor, and changes nothing else.

        Scores are product + addend, the addend a mask or a position's bias. γ = 0 leaves the addend alone, and subtracting it
        gives the product.
        """
        gamma = torch.linspace(0.3, 0.9, self.heads, dtype=torch.float64)
        addends = []
        for size in _TOKEN_SIZES:
            unscaled, output = self.run(size)
            assert unscaled.scores is not None
            scaled_scores, _ = self._run_scaled(rows, gamma, size)
            addend, _ = self._run_scaled(rows, torch.zeros_like(gamma), size)
            visible = unscaled.scores.isfinite() & (unscaled.scores.abs() < _LARGEST_SCORE)
            product = torch.where(visible, unscaled.scores - addend, 0.0)
            scaled_product = torch.where(visible, scaled_scores - addend, 0.0)
            largest = product.abs().amax((1, 2), keepdim=True)
            error = (scaled_product - gamma.view(-1, 1, 1) * product).abs()
            _, output_of_same_scores = self._run_scaled(rows, gamma, size, unscaled.inputs)
            if not bool((largest > 0).all() & (error <= _TOLERANCE * largest).all()):
                return False
            # From the unscaled scores the output must be the unscaled one: the rows make nothing but scores.
            if output is None or output_of_same_scores is None:
                return False
            atol = _TOLERANCE * float(output.abs().max())
            if not torch.allclose(output_of_same_scores, output, rtol=_TOLERANCE, atol=atol):
                return False
            addends.append((torch.where(visible, addend, 0.0), largest))
        # The addend must depend on positions alone, so be the same for tokens of another size.
        (addend, largest), (other_addend, other_largest) = addends
        return bool(((addend - other_addend).abs() <= _TOLERANCE * torch.minimum(largest, other_largest)).all())


def _covers_all_heads(masks: Iterable[Bool[Tensor, "H R"]]) -> bool:
    """Whether each head has a row in one of the masks."""
    heads = [mask.any(1) for mask in masks]
    return bool(heads) and bool(torch.stack(heads).any(0).all())


def _is_not_zero(gradient: Tensor | None, num_rows: int) -> Bool[Tensor, "items R"]:
    """Where a gradient is not zero, one row of the result for each vector of the output; None counts as zero."""
    if gradient is None:
        return torch.zeros(1, num_rows, dtype=torch.bool)
    return gradient.reshape(-1, num_rows) != 0


def _in_double(value: Any) -> Any:
    """A tensor on the CPU, in float64 if it is floating-point; any other value unchanged."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().to("cpu", torch.float64 if value.is_floating_point() else None)


def _is_conv1d(layer: nn.Module) -> bool:
    """Whether it is the Conv1D of the GPT-2 family, whose weight has the shape (in, out)."""
    return type(layer).__name__ == "Conv1D"


def _weight(layer: nn.Module) -> nn.Parameter | None:
    return layer._parameters.get("weight")


def _is_linear(layer: nn.Module) -> bool:
    weight = _weight(layer)
    return weight is not None and weight.ndim == 2 and (isinstance(layer, nn.Linear) or _is_conv1d(layer))


def _factor_shape(layer: nn.Module, output: Tensor) -> tuple[int, ...] | None:
    """The shape of factors of the weight that scale the output's last dimensions; None for a layer that is not proportional."""
    weight = _weight(layer)
    if weight is None or not output.is_floating_point():
        return None
    if _is_linear(layer):
        shape = (1, weight.shape[1]) if _is_conv1d(layer) else (weight.shape[0], 1)
        return shape if output.shape[-1] == math.prod(shape) else None
    # A norm's gain scales its output coordinate by coordinate, also a gain for each head, (H, D).
    is_norm = "norm" in type(layer).__name__.lower() and weight.shape == output.shape[-weight.ndim :]
    return tuple(weight.shape) if is_norm else None
