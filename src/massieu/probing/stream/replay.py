"""The queries of an attention module at other points of the residual stream, with keys and values held fixed.

The module's own code is called again on moved states and stopped as soon as its query is known. So rotary embeddings, query
norms and fused projections are the model's. In the same way the linear maps from stream to query, key and value are read off
any module in which they are linear. Each replay is checked on the states that the module really saw.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from massieu.probing.capture.capture import Capture, replayed
from massieu.probing.model.packed import dense_inside, dense_weight, packed_linears
from massieu.probing.model.precision import relative_difference, tolerance
from massieu.probing.model.watching import mapped, same_tensor
from massieu.probing.stream.own_weights import maps_among_weights, replaced_output
from massieu.probing.stream.wiring import AttentionRead, along_batch

# Masks act only after the query is formed; a cache must not receive the same tokens twice.
_LEFT_OUT = {"attention_mask", "mask", "position_bias", "encoder_attention_mask", "causal_mask"}
_LEFT_OUT |= {"attn_mask", "key_padding_mask"}
_LEFT_OUT |= {"past_key_values", "past_key_value", "layer_past"}
_STORED_MAPS = "stored maps"
"""Their name in `AttentionRead.known`."""


def _at_positions(value: Tensor, positions: Tensor, length: int) -> Tensor:
    """Position information (rotary tables, position indices) for some positions.

    A table of fewer rows than there are tokens is taken to be about the last of them, as where the first tokens (class
    and registers of an image model) have no position.
    """
    if value.dim() >= 2 and (value.is_floating_point() or value.is_complex()):
        rows = value.shape[-2]
        if rows == length:
            return value.index_select(-2, positions)
        if 1 < rows < length:
            return value.index_select(-2, positions[positions >= length - rows] - (length - rows))
    elif value.dim() <= 2 and value.shape[-1:] == (length,):
        return value.index_select(-1, positions)
    return value


def _between(value: Tensor, positions: Tensor) -> Tensor:
    """A bias of scores (…, L or 1, L) between some positions."""
    value = value[..., positions]
    return value if value.shape[-2] == 1 else value[..., positions, :]


def _repeated(value: Tensor, copies: int) -> Tensor:
    return value.repeat(copies, *([1] * (value.dim() - 1)))


class HeadProjection(NamedTuple):
    """An affine map of a module's input to each of its heads."""

    weight: Float[Tensor, "H Dh D"]
    bias: Float[Tensor, "H Dh"]


@dataclass(frozen=True, eq=False)
class Replay:
    """The query of one attention module as a function of the residual stream, for the sequences of one batch.

    Attributes:
        affine: the result of `query_map`, which replaces the module: the same numbers at a third of the cost, since keys and
            values are not computed again. With ``linear``, the map is only the first part of the way.
        linear: the layer of the module that computes ``affine``, if the module continues from there head by head (rotary
            embeddings, normalised queries); see `in_two_parts`.
        whole: the module is called on the whole sequence, with the moved states in their places. This is slower, and possible
            where the module cannot be called on some of the positions.
    """

    capture: Capture
    read: AttentionRead
    affine: HeadProjection | None = None
    whole: bool = False
    linear: nn.Linear | None = None

    def projections(
        self, states: Float[Tensor, "R S D"], positions: Int[Tensor, " S"]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of the module's input ``states`` (behind the norm) at ``positions``; R = copies × batch.

        Raises:
            Exception: of any class, from a module that cannot be called on part of a sequence.
        """
        state = self.read.state
        batch, length = state.shape[:2]
        copies = max(states.shape[0] // batch, 1)
        if self.whole:
            states = _repeated(state, copies).index_copy(1, positions, states)

        def moved_input(value: Tensor) -> Tensor:
            """An input of the module's call for the moved states, repeated for every copy."""
            if self.read.has_heads(value):
                return _repeated(value if self.whole else _between(value, positions), copies)
            value = self.read.batch_first(value)
            if same_tensor(value, state):  # as query, key and value, in some models
                return self.read.batch_first(states)
            by_item = along_batch(value, batch)
            value = value if self.whole else _at_positions(value, positions, length)
            return self.read.batch_first(_repeated(value, copies) if by_item else value)

        keywords = {
            name: None if name in _LEFT_OUT else mapped(value, moved_input)
            for name, value in self.read.keywords.items()
        }
        if keywords.get("is_causal"):  # nn.MultiheadAttention requires the mask with it
            keywords["is_causal"] = False
        # A positional tensor of four dimensions is a mask.
        without_masks = (
            None if isinstance(argument, Tensor) and argument.dim() == 4 else argument
            for argument in self.read.arguments
        )
        arguments = mapped(tuple(without_masks), moved_input)
        query, key, value = replayed(self.capture, self.read.call.module, arguments, keywords)
        return query[:, :, positions] if self.whole else query, key, value

    def queries(self, residual: Float[Tensor, "R S D"], positions: Int[Tensor, " S"]) -> Float[Tensor, "R H S Dh"]:
        """Queries at points of the residual stream, through the norm in front of the module if there is one."""
        states = self.normalised(residual)
        if self.affine is None or self.linear is not None:
            return self.projections(states, positions)[0]
        weight, bias = self.affine
        queries = torch.nn.functional.linear(states, weight.flatten(0, 1), bias.flatten())
        return queries.unflatten(-1, bias.shape).transpose(1, 2)

    def own_queries(
        self, residual: Float[Tensor, "H B S D"], positions: Int[Tensor, " S"]
    ) -> Float[Tensor, "B H S Dh"]:
        """Query of head h at the h-th of H points of the residual stream."""
        heads = range(residual.shape[0])
        if self.affine is None:
            queries = self.queries(residual.flatten(0, 1), positions).unflatten(0, (len(heads), -1))
            return queries[heads, :, heads].transpose(0, 1)
        weight, bias = self.affine
        results = torch.einsum("hbsd,hkd->bhsk", self.normalised(residual), weight) + bias[:, None]
        return results if self.linear is None else self._queries_from_linear(results, positions)

    def _queries_from_linear(
        self, results: Float[Tensor, "B H S Dh"], positions: Int[Tensor, " S"]
    ) -> Float[Tensor, "B H S Dh"]:
        """The module's queries if its layer ``linear`` had these results."""
        assert self.linear is not None
        with replaced_output(self.linear, results.transpose(1, 2).flatten(2)):
            return self.projections(self.read.state[:, positions], positions)[0]

    def normalised(self, residual: Float[Tensor, "*batch S D"]) -> Float[Tensor, "*batch S D"]:
        """The attention module's input at points of the residual stream."""
        return residual if self.read.norm is None else self.read.norm(residual)

    def query_map(self, positions: Int[Tensor, " S"]) -> HeadProjection | None:
        """The query as an affine function of the module's input, if it is the same one at every position.

        It is found among the module's weights, or read off with basis vectors, and checked on the queries that the module
        really computed. None where that check fails (rotary embeddings, normalised queries).
        """
        try:
            stored = self.stored_maps()
            affine = stored[0] if stored is not None else _projection_from(self.read_off(None)[0])
        except Exception:  # the module may raise any class; then there is no such map, and it is replayed itself
            return None
        trial = replace(self, affine=affine)
        return affine if trial.why_not(positions) is None else None

    def in_two_parts(self, positions: Int[Tensor, " S"]) -> "Replay":
        """The same replay through the linear layer that computes the query, if the module has such a layer.

        What follows the layer must act on each head separately. Then one call of the module serves all heads, each at its own
        point of the stream, and so does one derivative. This is tried on moved states of two positions: queries and
        derivatives must agree with those of the whole module, head by head. Otherwise the replay stays as it is.
        """
        call = self.read.call
        two_positions = positions[[len(positions) // 2, -1]]
        if self.affine is not None or self.whole or call.query.dtype not in (torch.float32, torch.float64):
            return self
        _, heads, _, size = call.query.shape
        for linear in call.module.modules():
            if type(linear) is nn.Linear and linear.weight.shape == (heads * size, self.read.state.shape[-1]):
                weight = dense_weight(linear).detach().to(call.query.dtype).unflatten(0, (heads, size))
                bias = weight.new_zeros(heads, size) if linear.bias is None else linear.bias.detach().view(heads, size)
                trial = replace(self, affine=HeadProjection(weight, bias), linear=linear)
                if trial._agrees_with(self, two_positions):
                    return trial
        return self

    def _agrees_with(self, other: "Replay", positions: Int[Tensor, " S"]) -> bool:
        """Whether two replays give each head the same query and the same derivative at moved states."""
        assert self.read.residual is not None
        residual = self.read.residual[:, positions]
        heads = self.read.call.query.shape[1]
        generator = torch.Generator().manual_seed(0)
        # Each head at a point of its own, about as far from the stream's as the stream is long.
        draws = torch.randn((heads, *residual.shape), generator=generator).to(residual)
        moved = residual + draws * residual.norm(dim=-1, keepdim=True) / residual.shape[-1] ** 0.5
        slope = torch.randn(self.read.call.query[:, :, positions].shape, generator=generator).to(residual)
        try:
            queries = self.own_queries(moved, positions)
            gradients = self.pulled_back([slope], positions)
            other_queries = other.own_queries(moved, positions)
            other_gradients = other.pulled_back([slope], positions)
        except Exception:  # the module may raise any class
            return False
        pairs = zip([queries, *gradients], [other_queries, *other_gradients], strict=True)
        return all(relative_difference(first, second) <= tolerance(residual.dtype) for first, second in pairs)

    def stored_maps(self) -> list[HeadProjection] | None:
        """Query, key and value of a sequence of one token as maps among the module's weights; None if they are not there.

        They are looked for once in each step of the stream.

        Raises:
            Exception: as `projections`.
        """
        if packed_linears(self.read.call.module):  # how these are read depends on who asks; see `dense_inside`
            return self._find_stored_maps()
        if _STORED_MAPS not in self.read.known:
            self.read.known[_STORED_MAPS] = self._find_stored_maps()
        return self.read.known[_STORED_MAPS]

    def _find_stored_maps(self) -> list[HeadProjection] | None:
        one = self._of_one_token()
        like = one.read.state
        state = torch.randn(1, 1, like.shape[-1], generator=torch.Generator().manual_seed(0)).to(like)
        results = one.projections(state, torch.zeros(1, dtype=torch.long, device=state.device))
        maps = maps_among_weights(self.read.call.module, state[0, 0], [result[0, :, 0] for result in results])
        return None if maps is None else [HeadProjection(weight, bias) for weight, bias in maps]

    def _of_one_token(self) -> "Replay":
        """A replay of sequences of one token, without the norm in front."""
        return Replay(self.capture, replace(self.read.item(0), norm=None))

    def read_off(self, test: Float[Tensor, "1 1 D"] | None) -> list[Float[Tensor, "R H_or_Hk Dh"]]:
        """Query, key and value of zero, of every basis vector and of a test vector, each a sequence of one token.

        Raises:
            Exception: as `projections`.
        """
        like = self.read.state
        size = like.shape[-1]
        basis = torch.cat([torch.zeros(1, 1, size), torch.eye(size)[:, None]]).to(like)
        states = basis if test is None else torch.cat([basis, test])
        results = self._of_one_token().projections(states, torch.zeros(1, dtype=torch.long, device=like.device))
        return [result[:, :, 0] for result in results]

    def pulled_back(
        self, slopes: Sequence[Float[Tensor, "B H S Dh"]], positions: Int[Tensor, " S"]
    ) -> list[Float[Tensor, "H B S D"]]:
        """For each slope and each head h, the gradient of slope_h · query_h with respect to the residual stream.

        Returns:
            One item for each slope.
        """
        residual = self.read.residual
        assert residual is not None
        residual = residual[:, positions].detach()
        if self.affine is None:
            return self._pulled_back_through_module(slopes, residual, positions)
        weight = self.affine.weight
        if self.linear is not None:
            slopes = self._pulled_to_linear(slopes, residual, positions)
        # All slopes of a head in one product: (H, slopes, B, S, D), in the order in which it is computed.
        by_head = torch.stack(list(slopes)).permute(2, 0, 1, 3, 4)
        input_gradients = (by_head.flatten(1, 3) @ weight).unflatten(1, by_head.shape[1:4])
        if self.read.norm is None:
            return list(input_gradients.unbind(1))
        # One copy of the stream for each slope and head, so that one derivative of the norm serves all of them.
        with torch.enable_grad():
            copies = residual.expand(input_gradients.shape).clone().requires_grad_()
            gradients = torch.autograd.grad(self.normalised(copies), copies, input_gradients)[0]
        return list(gradients.unbind(1))

    def _pulled_to_linear(self, slopes: Sequence[Tensor], residual: Tensor, positions: Tensor) -> list[Tensor]:
        """For each slope, the gradient of Σ_h slope_h · query_h with respect to the results of ``linear``, (B, H, S, Dh)."""
        assert self.affine is not None
        weight, bias = self.affine
        results = torch.einsum("bsd,hkd->bhsk", self.normalised(residual), weight) + bias[:, None]
        with torch.enable_grad():
            results.requires_grad_()
            query = self._queries_from_linear(results, positions)
            return [torch.autograd.grad(query, results, slope, retain_graph=True)[0] for slope in slopes]

    def _pulled_back_through_module(
        self, slopes: Sequence[Tensor], residual: Tensor, positions: Tensor
    ) -> list[Tensor]:
        with torch.enable_grad():
            residual = residual.requires_grad_()
            query = self.queries(residual, positions)

            def gradient(slope: Tensor, head: int) -> Tensor:
                return torch.autograd.grad(query[:, head], residual, slope[:, head], retain_graph=True)[0]

            return [torch.stack([gradient(slope, head) for head in range(query.shape[1])]) for slope in slopes]

    def why_not(self, positions: Int[Tensor, " S"]) -> str | None:
        """One sentence that says why the replay does not reproduce the queries that the module computed; None if it does."""
        if self.read.residual is None:
            return "the module reads neither the residual stream nor a norm of it"
        expected = self.read.call.query[:, :, positions]
        try:
            queries = self.queries(self.read.residual[:, positions], positions)
        except Exception as error:  # the module may raise any class
            return f"the module cannot be replayed at other states ({type(error).__name__})"
        if queries.shape != expected.shape:
            return "the replayed queries have another shape"
        error = relative_difference(queries, expected)
        # Kernels for packed weights may round their inputs to half precision.
        rounding_dtype = torch.bfloat16 if packed_linears(self.read.call.module) else expected.dtype
        return None if error <= tolerance(rounding_dtype) else f"the replayed queries differ by {error:.1e}"


@dataclass(frozen=True, eq=False)
class HeadMaps:
    """The linear maps of an attention module's heads, as functions of the normalised stream (norm gains folded in).

    For rotary models they are the maps at offset zero.

    Attributes:
        score_norm: ‖M‖ of M = W_QᵀW_K, by which several statistics are divided.
        score_symmetry: ⟨M, Mᵀ⟩.
    """

    query: Float[Tensor, "*batch H Dh D"]
    key: Float[Tensor, "*batch H Dh D"]
    value: Float[Tensor, "*batch H Dv D"]
    output: Float[Tensor, "*batch H D Dv"]

    def apart(self) -> "HeadMaps":
        """Each head for itself: a batch of heads, (H, 1, …)."""
        return HeadMaps(*(maps.unsqueeze(-3) for maps in (self.query, self.key, self.value, self.output)))

    @cached_property
    def score_norm(self) -> Float64[Tensor, "*batch H"]:
        # ‖QᵀK‖² = ⟨Q Qᵀ, K Kᵀ⟩: no D × D matrix is formed.
        return ((self.query @ self.query.mT) * (self.key @ self.key.mT)).sum((-2, -1)).sqrt()

    @cached_property
    def score_symmetry(self) -> Float64[Tensor, "*batch H"]:
        # ⟨M, Mᵀ⟩ = tr((K Qᵀ)²).
        cross = self.key @ self.query.mT
        return (cross * cross.mT).sum((-2, -1))


def norm_gain(norm: nn.Module | None, size: int, like: Tensor) -> Float[Tensor, " D"]:
    """Per-channel gain g of a norm module: norm(x) = g · normalised(x) + offset. Ones when there is no norm.

    It is read off a vector of alternating signs, which every common norm (LayerNorm, RMSNorm, gains stored as 1 + w) leaves
    unchanged before its gain; it is exact up to the norm's own epsilon.
    """
    if norm is None:
        return torch.ones(size, dtype=torch.float64)
    signs = torch.ones(size, dtype=like.dtype, device=like.device)
    signs[1::2] = -1
    with torch.no_grad():
        offset = norm(torch.zeros_like(signs)[None, None])[0, 0]
        return ((norm(signs[None, None])[0, 0] - offset) * signs).double()


def affine_projections(capture: Capture, read: AttentionRead) -> list[HeadProjection] | str:
    """Query, key and value as affine maps of the attention module's input, or one sentence that says why they are not.

    They are found among the module's weights (`maps_among_weights`), or else read off the module: zero, every basis vector
    and one random vector, each as a sequence of one token at position zero. If the random vector does not agree, the maps are
    not affine (normalised queries and keys). Packed weights count as the numbers that they stand for, without the rounding in
    some kernels. Keys and values have as many heads as queries: grouped ones are repeated.
    """
    like = read.state
    test = torch.randn(1, 1, like.shape[-1], generator=torch.Generator().manual_seed(0)).to(like)
    try:
        with dense_inside(read.call.module, unrounded=True):
            stored = Replay(capture, read).stored_maps()
            projections = Replay(capture, read).read_off(test) if stored is None else []
    except Exception as error:  # the module may raise any class
        return f"the module cannot be replayed on single tokens ({type(error).__name__})"
    if stored is not None:
        heads = len(stored[0].weight)
        return [_of_every_head(affine, heads) for affine in stored]
    heads = projections[0].shape[1]
    maps: list[HeadProjection] = []
    for result in projections:
        affine = _checked_projection(result, test, heads)
        if affine is None:
            return "queries, keys or values are not linear in the stream (normalised queries and keys)"
        maps.append(affine)
    return maps


def _projection_from(values: Float[Tensor, "R H Dh"]) -> HeadProjection:
    """The affine map with these values at zero and at every basis vector."""
    return HeadProjection((values[1:] - values[0]).permute(1, 2, 0).contiguous(), values[0].contiguous())


def _checked_projection(
    result: Float[Tensor, "R Hk Dh"], test: Float[Tensor, "1 1 D"], heads: int
) -> HeadProjection | None:
    """The map from one result of `Replay.read_off`, for this many heads; None if it does not hold at the test vector."""
    values = result.double().repeat_interleave(heads // result.shape[1], 1)  # (D + 2, heads, size of a head)
    linear = values[1:-1] - values[0]
    expected = torch.einsum("d,dhk->hk", test[0, 0].double(), linear) + values[0]
    if not relative_difference(expected, values[-1]) <= tolerance(test.dtype):
        return None
    return HeadProjection(linear.permute(1, 2, 0).cpu(), values[0].cpu())


def _of_every_head(affine: HeadProjection, heads: int) -> HeadProjection:
    """A copy in float64 for every query head: grouped heads are repeated."""
    weight, bias = (part.to("cpu", torch.float64, copy=True) for part in affine)
    if len(weight) == heads:
        return HeadProjection(weight, bias)
    group = heads // len(weight)
    return HeadProjection(weight.repeat_interleave(group, 0), bias.repeat_interleave(group, 0))


def why_no_writes(read: AttentionRead) -> str | None:
    """Why a module's update of the stream is not a sum over its heads; None if it is."""
    if read.projection is None:
        return "no output projection was found"
    if not read.writes_linearly:
        return "what the heads write is normalised, scaled or gated before it enters the stream"
    return None


def output_maps(read: AttentionRead, heads: int) -> Float[Tensor, "H D Dv"] | str:
    """The output projection's map of each head's result, or one sentence that says why it is not defined."""
    reason = why_no_writes(read)
    if reason is not None or read.projection is None:
        return reason or ""
    size = read.state.shape[-1]
    return read.projection.detach().double().cpu().reshape(size, heads, -1).transpose(0, 1)


def write_maps(capture: Capture, read: AttentionRead) -> tuple[Float[Tensor, "H Dv D"], Float[Tensor, "H D Dv"]] | str:
    """The value and output maps W_V and W_O of each head, with norm gains folded in; or why they are not defined.

    Queries and keys may be normalised or gated.
    """
    heads = read.call.query.shape[1]
    like = read.state
    output = output_maps(read, heads)
    if isinstance(output, str):
        return output
    test = torch.randn(1, 1, like.shape[-1], generator=torch.Generator().manual_seed(0)).to(like)
    try:
        with dense_inside(read.call.module, unrounded=True):
            stored = Replay(capture, read).stored_maps()
            if stored is not None:
                value = _of_every_head(stored[2], heads)
            else:
                value = _checked_projection(Replay(capture, read).read_off(test)[2], test, heads)
    except Exception as error:  # the module may raise any class
        return f"the module cannot be replayed on single tokens ({type(error).__name__})"
    if value is None:
        return "the values are not linear in the stream"
    return value.weight * norm_gain(read.norm, like.shape[-1], like).cpu(), output


def head_maps(capture: Capture, read: AttentionRead) -> HeadMaps | str:
    """The maps of a self-attention module, or one sentence that says why they are not defined."""
    output = output_maps(read, read.call.query.shape[1])
    if isinstance(output, str):
        return output
    projections = affine_projections(capture, read)
    if isinstance(projections, str):
        return projections
    gain = norm_gain(read.norm, read.state.shape[-1], read.state).cpu()
    query, key, value = (affine.weight * gain for affine in projections)
    return HeadMaps(query, key, value, output)
