"""The blocks of a model as operators on populations of tokens, checked against the model itself.

The stream is followed as in `wiring`, attention's maps are read as in `replay`, and the feed-forward part is the chain of the
model's own modules that leads from the stream to what is added to it. No architecture is named; what was read must
reproduce the block's own output.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from massieu.energy.activations import LayerNorm, RMSNorm
from massieu.errors import InputError
from massieu.foundation.arguments import described
from massieu.population import AttentionLayer, Composition, FeedForward, Normalisation
from massieu.probing.capture.routes import capturing
from massieu.probing.capture.sites import SiteInfo, find_sites, first_pass
from massieu.probing.checks.check import check_evaluating
from massieu.probing.model.forward import named_inputs, run
from massieu.probing.model.given import Model, given_model
from massieu.probing.model.model import load
from massieu.probing.model.model_inputs import dummy_inputs, model_inputs
from massieu.probing.model.precision import relative_difference
from massieu.probing.model.watching import memory
from massieu.probing.stream.chains import ModuleCall, chain_between, recording
from massieu.probing.stream.replay import HeadProjection, affine_projections, output_maps
from massieu.probing.stream.wiring import Step, StreamTracer

_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Largest difference that rounding explains, relative to the largest entry; half precisions: 3e-2."""
_NO_STEP = {
    "cross_attention": "it attends to another sequence",
    "attention_and_feed_forward": "attention and feed-forward part are added to the tokens in one step",
}


def population_layers(model: Model, data: Any = None, *, layer: int | None = None) -> Composition:
    """The blocks of a model as operators on its tokens, each a composition of attention and feed-forward part.

    Attention's maps and all norms are copies, in at least float32; the feed-forward part calls the model's own modules.
    Tokens are particles: operators know no positions and no mask. A model's positions that are added to its tokens before the
    first block are part of them.

    Args:
        model: An encoder whose tokens all attend to each other: a name, a `massieu.Checkpoint`, or a module of
            `transformers` or any other in evaluation mode.
        data: What the check runs on: one batch of unpadded inputs as for `massieu.describe`; for a model of `transformers` a
            made-up one of 16 tokens by default. A window that is wider than they are does not show.
        layer: One block only, counted from 0.

    Returns:
        A composition of the blocks, which are compositions; or with `layer` that block.

    Raises:
        InputError: the block is no function of the set of its tokens (causal, windows, positions in queries and keys or in
            scores), or of no form that is known, and why; it differs from the module's own output, and by how much; there is
            no such layer; the model does not say what it reads and no batch is given; it is in training mode, or
            without weights (on the meta device).

    Example:
        Eight tokens at one place stay together: a block is a function of each token and of the set of all.

        >>> import massieu
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> small = BertConfig(
        ...     hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9
        ... )
        >>> model = BertModel(small).eval()
        >>> moved = massieu.population_layers(model, layer=0)(torch.ones(8, 8))
        >>> torch.allclose(moved, moved[0].expand(8, 8), atol=1e-6)
        True
    """
    trunk = load(given_model(model)).module
    check_evaluating(trunk.modules())
    blocks = _blocks(_forward_pass(trunk, data))
    if layer is not None and (isinstance(layer, bool) or not isinstance(layer, int) or layer not in blocks):
        raise InputError(f"layer must be in 0 … {len(blocks) - 1}, got {described(layer)}")
    with torch.no_grad():
        found = {number: blocks[number].operator() for number in (blocks if layer is None else [layer])}
    return Composition.create(found.values()) if layer is None else found[layer]


class _Chain(nn.Sequential):
    """Modules one after the other, in their own dtype."""

    def forward(self, input: Tensor) -> Tensor:
        own = next((parameter.dtype for parameter in self.parameters()), input.dtype)
        return super().forward(input.to(own)).to(input.dtype)


@dataclass(frozen=True, eq=False)
class _ForwardPass:
    """One forward pass: the steps along the stream, where attention sits, and what each module made of what."""

    name: str
    modules: dict[str, nn.Module]
    steps: list[Step]
    sites: dict[str, SiteInfo]
    calls: list[ModuleCall]
    projections: dict[int, list[HeadProjection] | str]
    """By a step's index, `affine_projections` of its attention."""


def _forward_pass(model: nn.Module, data: Any) -> _ForwardPass:
    prepared = model_inputs(model, dummy_inputs(model) if data is None else named_inputs(model, data))
    steps: list[Step] = []
    seen = first_pass(model, prepared)
    if not seen.calls:
        raise InputError(f"{type(model).__name__} computes no attention that can be read")
    sites = find_sites(model, seen)
    with torch.no_grad():
        tracer = StreamTracer(model, sites, steps.append)
        with capturing(model, tracer.attention), tracer.watching(), recording(model) as made:
            run(model, prepared)
        with capturing(model, lambda _: None) as capture:
            projections = {
                index: affine_projections(capture, step.read)
                for index, step in enumerate(steps)
                if step.read is not None and tracer.sites[step.read.call.site].kind == "self"
            }
    known = {info.site.name: info for info in sites}
    return _ForwardPass(type(model).__name__, dict(model.named_modules()), steps, known, made, projections)


def _blocks(watched: _ForwardPass) -> dict[int, "_Block"]:
    """By layer, the residual steps of each block and the norms behind them."""
    steps, found = watched.steps, {}
    residual = [index for index, step in enumerate(steps) if step.sublayer.kind != "norm"]
    for place, index in enumerate(residual):
        step = steps[index]
        later = residual[place + 1] if place + 1 < len(residual) else None
        goes_on = None if later is None else memory(steps[later].before)
        # A norm of the sum is behind the step if the stream goes on from its result.
        behind = None
        for norm in steps[index + 1 : later]:
            last = later is None and norm.sublayer.layer == step.sublayer.layer
            if memory(norm.before) == memory(step.after) and (last or memory(norm.after) == goes_on):
                behind = norm
        layer = step.sublayer.layer
        if layer is not None:
            found.setdefault(layer, _Block(watched, layer, [])).parts.append((index, behind))
    return found


@dataclass(frozen=True, eq=False)
class _Block:
    """One block: the indices of its residual steps, with the norm behind each."""

    watched: _ForwardPass
    layer: int
    parts: list[tuple[int, Step | None]]

    def operator(self) -> Composition:
        """The block's operators, checked one by one."""
        operators = []
        for index, behind in self.parts:
            step = self.watched.steps[index]
            kind = step.sublayer.kind
            if kind == "attention":
                operator = self._attention(index, behind)
            elif kind == "feed_forward":
                operator = self._feed_forward(step, behind)
            else:
                raise self._cannot(_NO_STEP[kind])
            self._check(operator, step, behind)
            operators.append(operator)
        return Composition.create(operators)

    def _attention(self, index: int, behind: Step | None) -> AttentionLayer:
        step = self.watched.steps[index]
        read = step.read
        assert read is not None
        call = read.call
        if call.key.shape[-2] < 2:
            raise self._cannot("its one token shows neither positions nor an order; inputs of several tokens do")
        if self.watched.sites[call.site.name].kind == "causal":
            raise self._cannot("attention is causal, so a token moves by its place in the order")
        if not bool(call.visible().all()):
            raise self._cannot("tokens do not all see each other (a window, or padding in the inputs of the check)")
        if call.log_weight is not None and call.log_weight.dtype != torch.bool and bool(call.log_weight.any()):
            raise self._cannot("scores have a bias by position")
        if call.softcap is not None or call.sink is not None:
            raise self._cannot("its scores are capped, or it has a sink")
        projections, output = self.watched.projections[index], output_maps(read, call.query.shape[1])
        if isinstance(projections, str):
            raise self._cannot(projections)
        if isinstance(output, str):
            raise self._cannot(output)
        (query, query_bias), (key, key_bias), (value, value_bias) = projections
        self._check_no_positions("queries", call.query, read.state, query, query_bias)
        self._check_no_positions("keys", call.key, read.state, key, key_bias)
        dtype = torch.promote_types(torch.float32, read.state.dtype)
        bias = (output @ value_bias.unsqueeze(-1)).sum((0, -1))
        if read.bias is not None:
            bias = bias + read.bias.detach().cpu().double()
        weights = (each.to(read.state.device, dtype) for each in (query, key, value, output))
        return AttentionLayer.create(
            *weights,
            query_bias=query_bias,
            bias=bias,
            scale=call.scale,
            normalisation=None if read.norm is None else self._norm(read.norm, read.state.shape[-1], dtype),
            activation=self._behind(behind),
        )

    def _check_no_positions(self, name: str, actual: Tensor, state: Tensor, matrix: Tensor, offset: Tensor) -> None:
        """Raise unless the map at position zero gives what the module has at all positions (trap 35)."""
        groups = len(matrix) // actual.shape[1]
        expected = torch.einsum("bnd,hkd->bhnk", state.double().cpu(), matrix) + offset.unsqueeze(1)
        error = relative_difference(actual.double().cpu().repeat_interleave(groups, 1), expected)
        if not error <= max(1e-4, 10 * _allowed(state.dtype)):
            raise self._cannot(f"its {name} depend on the position (rotary embeddings): they differ by {error:.1e}")

    def _feed_forward(self, step: Step, behind: Step | None) -> FeedForward:
        chain = self._chain(step)
        normalisation = None
        if "Norm" in type(chain[0]).__name__:
            dtype = torch.promote_types(torch.float32, step.before.dtype)
            normalisation, chain = self._norm(chain[0], step.before.shape[-1], dtype), chain[1:]
        return FeedForward.create(_Chain(*chain), normalisation=normalisation, activation=self._behind(behind))

    def _chain(self, step: Step) -> list[nn.Module]:
        """The fewest modules that lead from the stream to what is added to it."""
        chain = chain_between(step.before, step.after, self.watched.calls)
        if chain is not None:
            return chain
        raise self._cannot("its feed-forward part is no chain of modules of one input each")

    def _behind(self, behind: Step | None) -> Normalisation | None:
        if behind is None:
            return None
        module = self.watched.modules[behind.sublayer.name.partition(" (call ")[0]]
        return self._norm(module, behind.before.shape[-1], torch.promote_types(torch.float32, behind.before.dtype))

    def _norm(self, module: nn.Module, width: int, dtype: torch.dtype) -> Normalisation:
        """A norm module as a normalisation with a gain for each coordinate."""
        device = next(module.parameters()).device
        eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
        kinds = {"LayerNorm": LayerNorm.create(eps=eps), "RMSNorm": RMSNorm.create(eps=eps)} if eps is not None else {}
        own = next(module.parameters()).dtype
        origin = module(torch.zeros(1, 1, width, dtype=own, device=device))[0, 0]
        # The norms of these alternating signs are nowhere near 0, so that dividing by them costs no digits.
        signs = torch.ones(width, dtype=own, device=device)
        signs[1::2] = -1
        gained = (module(signs[None, None])[0, 0] - origin).double()
        tests = torch.randn(1, 8, width, generator=torch.Generator().manual_seed(0)).to(device, own)
        expected = module(tests)
        for kind in kinds.values():
            norm = Normalisation.create(kind, (gained / kind(signs.double())).to(dtype), origin.to(dtype))
            if relative_difference(norm(tests).to(own), expected) <= 10 * _allowed(own):
                return norm
        raise self._cannot(f"its {type(module).__name__} is neither a LayerNorm nor an RMSNorm")

    def _check(self, operator: AttentionLayer | FeedForward, step: Step, behind: Step | None) -> None:
        expected = step.after if behind is None else behind.after
        error = relative_difference(operator(step.before).double(), expected.double())
        if not error <= _allowed(expected.dtype):
            raise self._cannot(
                f"{step.sublayer.name}: what was read differs from the module's own output by {error:.1e}"
            )

    def _cannot(self, reason: str) -> InputError:
        return InputError(
            f"layer {self.layer} of {self.watched.name} is no operator on a population of tokens: {reason}"
        )


def _allowed(dtype: torch.dtype) -> float:
    return _TOLERANCE.get(dtype, 3e-2)
