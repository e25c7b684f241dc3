"""Which weights make a head's scores: of PyTorch's modules by their layout, of others by gradients, and then by proof.

A module of any library is copied without its values, hooks and device, and called on a few random tokens. Gradients of single
scores say which rows of its layers make the queries and the keys of a head. That is then proved by numbers: with the rows
scaled, each head's scores are multiplied by its factor, and the module's output from given scores does not change.
"""

import copy
import inspect
import itertools
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from massieu.foundation.listening import listening
from massieu.nn.attention import Attention
from massieu.nn.softmax import SoftmaxHeads
from massieu.nn.sparse import EntmaxHeads
from massieu.ops.attention import attend
from massieu.ops.observed import ObservedAttention, ObservedWeights

_TOKENS = 5
_SIZES = 1.0, 1e3
"""Of the tokens: what is clipped, capped or normalised is not in proportion at both."""
_CLOSE = 1e-5
"""Relative to the largest: parts of a module may compute in float32."""
_OTHER = "key", "k", "value", "v", "key_value_states", "encoder_hidden_states", "context", "memory"
"""Names of arguments for the sequence whose keys are attended to."""
_SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax, torch.tanh, F.tanh, Tensor.tanh}
"""What scores go into first: a softmax, or the soft cap before it."""


class Rows(NamedTuple):
    """The rows of a parameter that scale with a head's factor γ, as γ^power."""

    part: str
    """Name of the parameter, within the attention module."""
    shape: tuple[int, ...]
    """Of the factors, to be multiplied with the parameter."""
    head: Int[Tensor, " R"]
    """−1: the row stays."""
    power: Float[Tensor, " R"]

    def factors(self, gamma: Float[Tensor, " H"]) -> Tensor:
        scaled = gamma[self.head.clamp(min=0)] ** self.power
        return torch.where(self.head >= 0, scaled, 1.0).view(self.shape)


def score_weights(module: nn.Module, heads: int) -> tuple[Rows, ...]:
    """The rows that multiply the scores of each head by its factor, and change nothing else.

    Raises:
        ValueError: there are none, with the reason.
    """
    if isinstance(module, nn.MultiheadAttention | Attention):
        return _known(module, heads)
    with torch.inference_mode(False), torch.enable_grad():
        return _Trial(module, heads).rows()


def _known(module: nn.MultiheadAttention | Attention, heads: int) -> tuple[Rows, ...]:
    own = Attention if isinstance(module, Attention) else nn.MultiheadAttention
    if type(module).forward is not own.forward or "forward" in vars(module):
        raise ValueError(f"it is a {type(module).__name__} with a forward of its own")
    if isinstance(module, Attention) and type(module.heads) not in (SoftmaxHeads, EntmaxHeads):
        raise ValueError(f"{type(module.heads).__name__} do not multiply queries and keys alone")
    if module.num_heads != heads:
        raise ValueError(f"it has {module.num_heads} heads, and the record {heads}")
    of_head = torch.arange(heads).repeat_interleave(module.head_dim)
    both = torch.cat([of_head, of_head, torch.full_like(of_head, -1)])
    wanted = {"in_proj_weight": (both, 1)} if module.in_proj_weight is not None else {}
    wanted = wanted or {"q_proj_weight": (of_head, 1), "k_proj_weight": (of_head, 1)}
    wanted |= {"in_proj_bias": (both, 0)} if module.in_proj_bias is not None else {}
    wanted |= {"bias_k": (of_head, -2)} if module.bias_k is not None else {}
    if lacking := set(wanted) - set(module._parameters):
        raise ValueError(
            f"{', '.join(sorted(lacking))} is no plain parameter, as pruning and parametrisations leave it"
        )
    shapes = {1: lambda rows: (rows, 1), 0: lambda rows: (rows,), -2: lambda rows: (1, 1, rows)}
    return tuple(
        Rows(name, shapes[kind](len(head)), head, torch.full(head.shape, 0.5, dtype=torch.float64))
        for name, (head, kind) in wanted.items()
    )


class _Leaf(NamedTuple):
    """A layer whose output is in proportion to the rows of its weight, in the trial, and the shape of factors for it."""

    name: str
    layer: nn.Module
    shape: tuple[int, ...]
    rows: int


class _Scores(TorchFunctionMode):
    """Keeps the first scores that a call makes; with `held`, puts those in their place.

    Scores of PyTorch's functions are seen as a function mode, those of `massieu.ops` as a listener.
    """

    def __init__(self, heads: int, held: tuple[Tensor, ...] | None = None) -> None:
        super().__init__()
        self.heads, self.held = heads, held
        self.taken: tuple[Tensor, ...] = ()
        self.scores: Tensor | None = None
        self.several = False
        """Whether attention was told of that has other scores than the first."""
        self._claimed = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        count = 2 if func is F.scaled_dot_product_attention else 1 if func in _SOFTMAX else 0
        if (
            not count
            or self._claimed
            or self.scores is not None
            or not all(isinstance(one, Tensor) for one in args[:count])
        ):
            return func(*args, **kwargs)
        scores = args[0] if count == 1 else self._of_pair(args[0], args[1], kwargs.get("scale"))
        if not self._are_of_heads(scores):
            return func(*args, **kwargs)
        self.scores, self.taken = scores.reshape(self.heads, *scores.shape[-2:]), args[:count]
        return func(*(args[:count] if self.held is None else self.held), *args[count:], **kwargs)

    def listens(self) -> bool:
        """Whether the next call is not part of another."""
        return not self._claimed

    @contextmanager
    def claiming(self) -> Iterator[None]:
        """Inside, scores are those of a call that is told as a whole."""
        before, self._claimed = self._claimed, True
        try:
            yield
        finally:
            self._claimed = before

    def refusing(self, reason: str) -> AbstractContextManager[None]:
        """Inside, the number of steps may follow from the data."""
        return self.claiming()

    def refuse(self, reason: str) -> None:
        """Attention that is not told: no scores are seen."""

    def hear(self, call: ObservedAttention | ObservedWeights) -> Tensor | None:
        """Keep the scores of softmax attention; what they would give with those that are held."""
        if not isinstance(call, ObservedAttention):
            return None
        problem = call.problem
        query, key = problem.scaled_query(), problem.key.to(problem.dtype)
        scores = query @ key.unsqueeze(2).mT
        if self.scores is None and not self._are_of_heads(scores):
            return None
        if self.scores is None:
            self.scores, self.taken = scores.reshape(self.heads, *scores.shape[-2:]), (problem.query, problem.key)
        elif scores.numel() != self.scores.numel() or not torch.equal(scores.flatten(), self.scores.flatten()):
            self.several = True
            return None
        if self.held is None:
            return None
        query, key = self.held
        with self.claiming():
            return attend(replace(problem, query=query, key=key))[0]

    def _are_of_heads(self, scores: Tensor) -> bool:
        """Whether they are those of all heads, for each token."""
        if scores.ndim < 2 or scores.shape[-2] != _TOKENS:
            return False
        return scores.numel() == self.heads * scores.shape[-2:].numel()

    def _of_pair(self, query: Tensor, key: Tensor, scale: float | None) -> Tensor:
        if query.ndim == key.ndim == 4 and key.shape[1] != query.shape[1]:
            key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        return query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)


class _Trial:
    """A copy of a module with random weights, and a call of it that makes scores."""

    def __init__(self, module: nn.Module, heads: int) -> None:
        if "forward" in vars(module):
            raise ValueError("its forward was changed, as offloading does")
        self.heads, self.generator = heads, torch.Generator().manual_seed(0)
        self._same: dict[int, nn.Parameter] = {}
        self.copy = self._bare(module)
        self.weights = dict(self.copy.named_parameters(remove_duplicate=False))
        self.start = {id(weight): weight.data for weight in self.weights.values()}
        self.call, self.failed = {}, ""
        if not any(self._works(call, kind) for call, kind in self._calls()):
            more = f" ({self.failed})" if self.failed else ""
            raise ValueError(f"no call of it alone showed the scores of {heads} heads{more}")

    def _bare(self, module: nn.Module) -> Any:
        """The module in evaluation, without hooks, on the CPU in float64, with random weights; the module stays."""
        bare = object.__new__(type(module))
        state = vars(bare)
        for name, value in vars(module).items():
            state[name] = (
                type(value)() if name.endswith(("_hooks", "_with_kwargs", "_always_called")) else _plain(value)
            )
        state |= {"training": False, "_compiled_call_impl": None}
        state["_buffers"] = {name: _plain(value) for name, value in module._buffers.items()}
        state["_parameters"] = {name: self._random(name, value) for name, value in module._parameters.items()}
        state["_modules"] = {name: part and self._bare(part) for name, part in module._modules.items()}
        return bare

    def _random(self, name: str, like: nn.Parameter | None) -> nn.Parameter | None:
        if like is None:
            return None
        if not like.is_floating_point():
            raise ValueError(f"its {name} is packed ({like.dtype})")
        if id(like) not in self._same:
            numbers = torch.rand(like.shape, generator=self.generator, dtype=torch.float64)
            drawn = numbers + 0.5 if like.ndim < 2 else (numbers - 0.5) * (12 / like.shape[-1]) ** 0.5
            self._same[id(like)] = nn.Parameter(drawn, requires_grad=False)
        return self._same[id(like)]

    def _tokens(self, width: int) -> Tensor:
        return torch.randn(1, _TOKENS, width, generator=self.generator, dtype=torch.float64)

    def _calls(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Arguments that a module may take, by their names, and transformers' implementation to call."""
        layers = [layer for layer in self.copy.modules() if _is_linear(layer)]
        if not layers:
            raise ValueError("it has no linear layer of its own")
        widths = list(dict.fromkeys(layer.weight.shape[0 if _transposed(layer) else 1] for layer in layers))
        taken = list(inspect.signature(type(self.copy).forward).parameters.values())[1:]
        if not taken:
            raise ValueError("its forward takes no input")
        first, *others = taken
        named = {one.name: one for one in others if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
        given = {name: None for name, one in named.items() if one.default is one.empty and name not in _OTHER}
        place = torch.arange(_TOKENS).unsqueeze(0)
        known = {"residual": torch.zeros(1, _TOKENS, widths[0], dtype=torch.float64), "position_ids": place}
        known |= {"alibi": torch.zeros(self.heads, 1, _TOKENS, dtype=torch.float64), "cache_position": place[0]}
        given |= {name: value for name, value in known.items() if name in named} | {first.name: self._tokens(widths[0])}
        needed = [name for name, one in named.items() if name in _OTHER and one.default is one.empty]
        maybe = [name for name in named if name in _OTHER and name not in needed]
        kinds = ["sdpa", "eager"] if hasattr(getattr(self.copy, "config", None), "_attn_implementation") else [""]
        rotations = [*self._rotations(), {}] if "position_embeddings" in named else [{}]
        visible = torch.zeros(1, 1, _TOKENS, _TOKENS, dtype=torch.float64)
        masks = [{}, {"attention_mask": visible}] if "attention_mask" in named else [{}]
        pairs = list(itertools.product([[], maybe] if maybe else [[]], widths))
        for kind, mask, rotation, (names, width) in itertools.product(kinds, masks, rotations, pairs):
            yield {**given, **dict.fromkeys((*needed, *names), self._tokens(width)), **rotation, **mask}, kind

    def _rotations(self) -> Iterator[dict[str, Any]]:
        """Angles of positions, in the layouts of transformers: one for all pairs of coordinates, or as many as a head has."""
        sizes = [getattr(self.copy, name, None) for name in ("head_dim", "head_size", "qk_rope_head_dim")]
        sizes = [size for size in sizes if isinstance(size, int)]
        angles = torch.linspace(0, 1, _TOKENS, dtype=torch.float64).view(1, -1, 1)
        for turn in dict.fromkeys([1, *sizes, *(size // 2 for size in sizes)]):
            yield {"position_embeddings": tuple(one.expand(1, -1, turn) for one in (angles.cos(), angles.sin()))}
        yield {"position_embeddings": torch.polar(torch.ones_like(angles), angles)}

    def _works(self, call: dict[str, Any], kind: str) -> bool:
        """Whether a call makes scores; what it raises is told where no call does."""
        if kind:
            config = copy.deepcopy(self.copy.config)
            config._attn_implementation = kind
            for part in self.copy.modules():
                if hasattr(part, "config"):
                    part.config = config
        self.call = call
        try:
            return self.run()[0].scores is not None
        except ValueError as error:
            self.failed = self.failed or str(error)
            return False

    def run(self, size: float = 1.0, held: tuple[Tensor, ...] | None = None) -> tuple[_Scores, Tensor | None]:
        """The scores of a call with tokens of that size, and its output."""
        call = {
            name: value * size if isinstance(value, Tensor) and value.is_floating_point() else value
            for name, value in self.call.items()
        }
        seen = _Scores(self.heads, held)
        try:
            with (
                torch.device("cpu"),
                torch.random.fork_rng(devices=[]),
                torch.autocast("cpu", enabled=False),
                seen,
                listening(seen),
            ):
                output = self.copy(**call)
        except Exception as error:  # foreign code, of any kind: the reason is told
            told = str(error).partition(chr(10))[0][:100]
            raise ValueError(f"a call of it alone raised {type(error).__name__}: {told}") from error
        return seen, next((one for one in pytree.tree_leaves(output) if isinstance(one, Tensor)), None)

    def rows(self) -> tuple[Rows, ...]:
        """The rows that are found, and proved."""
        if self.run()[0].several:
            raise ValueError("it attends several times, by other scores each time")
        found = self._found()
        query = {name: rows[0].sum(0) for name, rows in found.items()}
        alone = {name: rows[0] & (query[name] == 1) for name, rows in found.items()}
        if not all(any(bool(rows[head].any()) for rows in alone.values()) for head in range(self.heads)):
            shared = [leaf.name for leaf in found if bool((query[leaf] > 1).any())]
            if shared:
                raise ValueError(f"its queries come from {' and '.join(shared)}, whose numbers all heads share")
            raise ValueError("its queries come from no layer with a plain weight")
        keyed = {leaf: rows[1] & ~alone[leaf] for leaf, rows in found.items()}
        own = all(bool((rows[1].sum(0) <= 1).all()) for rows in found.values())
        own = own and all(any(bool(rows[1][head].any()) for rows in found.values()) for head in range(self.heads))
        both = {leaf: alone[leaf] | keyed[leaf] for leaf in found}
        for chosen, power in ([(both, 0.5)] if own else []) + [(alone, 1.0)]:
            rows = tuple(one for leaf, mask in chosen.items() for one in self._as_rows(leaf, mask, power))
            if self._proved(rows):
                return rows
        norms = [leaf.name for leaf in found if "norm" in type(leaf.layer).__name__.lower()]
        told = f", which {' and '.join(norms)} make" if norms else ""
        raise ValueError(f"its scores are not in proportion to its weights{told}")

    def _found(self) -> dict[_Leaf, tuple[Tensor, Tensor]]:
        """For each layer which rows make the queries, and the keys, of which heads: two masks (H, R)."""
        outputs: list[tuple[_Leaf, Tensor]] = []
        with self._leaves(outputs):
            scores = self.run()[0].scores
        found: dict[_Leaf, tuple[Tensor, Tensor]] = {}
        if scores is None or not scores.requires_grad:
            return found
        for leaf, _ in outputs:
            mask = torch.zeros(self.heads, leaf.rows).bool()
            found.setdefault(leaf, (mask, mask.clone()))
        leaves = [output for _, output in outputs]
        for head in range(self.heads):
            # One query and two keys: what moves both scores is the query's.
            pair = [
                torch.autograd.grad(scores[head, 2, key], leaves, retain_graph=True, allow_unused=True)
                for key in (1, 0)
            ]
            for (leaf, _), *moved in zip(outputs, *pair, strict=True):
                one, other = (
                    torch.zeros(1, leaf.rows) if each is None else each.reshape(-1, leaf.rows) for each in moved
                )
                found[leaf][0][head] |= ((one != 0) & (other != 0)).any(0)
                found[leaf][1][head] |= ((one != 0) & (other == 0)).any(0)
        return found

    @contextmanager
    def _leaves(self, outputs: list[tuple[_Leaf, Tensor]]) -> Iterator[None]:
        """Make each layer's output a start of gradients, so that these end at the last layers before the scores."""

        def cut(name: str, layer: nn.Module, output: Any) -> Tensor | None:
            shape = _factor_shape(layer, output) if isinstance(output, Tensor) else None
            if shape is None:
                return None
            outputs.append((_Leaf(name, layer, shape, math.prod(shape)), output.detach().requires_grad_()))
            return outputs[-1][1].clone()  # which may be changed in place

        handles = [
            layer.register_forward_hook(lambda layer, _, output, name=name: cut(name, layer, output))
            for name, layer in self.copy.named_modules()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _as_rows(self, leaf: _Leaf, mask: Tensor, power: float) -> Iterator[Rows]:
        head = torch.where(mask.any(0), mask.int().argmax(0), -1)
        if bool((head >= 0).any()):
            powers = torch.full(head.shape, power, dtype=torch.float64)
            yield Rows(f"{leaf.name}.weight", leaf.shape, head, powers)
            if getattr(leaf.layer, "bias", None) is not None:
                yield Rows(f"{leaf.name}.bias", tuple(leaf.layer.get_parameter("bias").shape), head, powers)

    def _scaled(self, rows: tuple[Rows, ...], gamma: Tensor, *of: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Scores and output with scaled weights, which may have several names."""
        factors: dict[int, Tensor] = {}
        for one in rows:
            weight, own = id(self.weights[one.part]), one.factors(gamma)
            factors[weight] = torch.minimum(factors.get(weight, own), own)
        try:
            for weight in {id(weight): weight for weight in self.weights.values()}.values():
                weight.data = self.start[id(weight)] * factors.get(id(weight), 1.0)
            seen, output = self.run(*of, **options)
        finally:
            for weight in self.weights.values():
                weight.data = self.start[id(weight)]
        assert seen.scores is not None
        return seen.scores, output

    def _proved(self, rows: tuple[Rows, ...]) -> bool:
        """Whether each head's scores, less what is added to them, are multiplied by its factor, and nothing else moves."""
        gamma = torch.linspace(0.3, 0.9, self.heads, dtype=torch.float64)
        added = []
        for size in _SIZES:
            whole, output = self.run(size)
            assert whole.scores is not None
            scaled, _ = self._scaled(rows, gamma, size)
            rest, _ = self._scaled(rows, torch.zeros_like(gamma), size)
            held = self._scaled(rows, gamma, size, held=whole.taken)[1]
            seen = whole.scores.isfinite() & (whole.scores.abs() < 1e30)
            product, found = (torch.where(seen, one - rest, 0.0) for one in (whole.scores, scaled))
            largest = product.abs().amax((1, 2), keepdim=True)
            wanted = gamma.view(-1, 1, 1) * product
            if not bool((largest > 0).all() & ((found - wanted).abs() <= _CLOSE * largest).all()):
                return False
            if (
                output is None
                or held is None
                or not torch.allclose(held, output, rtol=_CLOSE, atol=_CLOSE * float(output.abs().max()))
            ):
                return False
            added.append((torch.where(seen, rest, 0.0), largest))
        # What is added depends on positions alone.
        return bool(((added[0][0] - added[1][0]).abs() <= _CLOSE * torch.minimum(added[0][1], added[1][1])).all())


def _plain(value: Any) -> Any:
    """A tensor on the CPU, in float64 where it is floating-point; else what it is."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().to("cpu", torch.float64 if value.is_floating_point() else None)


def _transposed(layer: nn.Module) -> bool:
    """Whether it is the Conv1D of the GPT-2 family, whose weight is (in, out)."""
    return type(layer).__name__ == "Conv1D"


def _weight(layer: nn.Module) -> nn.Parameter | None:
    return layer._parameters.get("weight")


def _is_linear(layer: nn.Module) -> bool:
    weight = _weight(layer)
    return weight is not None and weight.ndim == 2 and (isinstance(layer, nn.Linear) or _transposed(layer))


def _factor_shape(layer: nn.Module, output: Tensor) -> tuple[int, ...] | None:
    """The shape of factors of a weight that multiply the output's last dimensions; None: no such layer."""
    weight = _weight(layer)
    if weight is None or not output.is_floating_point():
        return None
    if _is_linear(layer):
        shape = (1, weight.shape[1]) if _transposed(layer) else (weight.shape[0], 1)
        return shape if output.shape[-1] == math.prod(shape) else None
    normed = "norm" in type(layer).__name__.lower() and weight.shape == output.shape[-weight.ndim :]
    return tuple(weight.shape) if normed else None
