"""Attention whose tokens are spins: attention couples them, and they all move at once."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from massieu.energy import KineticSpins
from massieu.energy.kinetic import Order
from massieu.foundation.arguments import choice, flag, instance, of_class, whole_number
from massieu.foundation.doors import door
from massieu.foundation.listening import Listeners, in_one_call, listeners
from massieu.foundation.transforms import without_autocast
from massieu.nn.heads import Mask, attention_weights, log_weight_of, merge_heads, split_heads, with_positions
from massieu.nn.modules import (
    Device,
    Iterating,
    Number,
    Resettable,
    check_heads,
    check_tokens,
    register_number,
    settings,
)
from massieu.ops.observed import tell_attention
from massieu.solve import Auto, Implicit, Method

_AUTO = Auto()


class _Scores(NamedTuple):
    """What couplings are a softmax of."""

    query: Float[Tensor, "B H L D"]
    key: Float[Tensor, "B H L D"]
    log_weight: Mask | None


@door(bias=flag)
class SpinAttention(Iterating, Resettable):
    """Tokens as kinetic mean-field spins coupled by attention: θ_i = x_i + Σ_j J_ij φ(θ_j), output φ(θ) (B16).

    Each head is a system of its own, of one spin in R^D for each token, D the head's size. The drive x and the couplings
    J = softmax(coupling_scale·query_i·key_j) are projections of the tokens, and stay what they are while the spins move.
    J is not symmetric: there is no energy that falls. φ is an activation into the ball of radius √(D/2 − 1), the mean of
    spins in the field θ at inverse temperature β.

    To first order this is attention between two residual connections and a normalisation. The echo of second order is a
    spin's reaction to itself by way of the others, which takes a feed-forward layer's place; it needs no parameter.

    Where β < 2 the first order has one fixed point, and a step brings all states nearer to it by a factor of β/2 or less.

    Example:
        >>> import torch
        >>> from massieu import nn
        >>> spins, tokens = nn.SpinAttention(8, 2, steps=3), torch.randn(5, 10, 8)
        >>> mean = spins.model(tokens).mean(spins.state(spins.model(tokens)))
        >>> spins(tokens).shape, bool((mean.norm(dim=-1) < 1).all())  # within the ball of radius √(4/2 − 1)
        (torch.Size([5, 10, 8]), True)
    """

    scale: Tensor | float
    coupling_scale: Tensor | float | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int = 1,
        *,
        order: Order = "first",
        exact: bool = False,
        steps: int | None = 1,
        scale: Number = 1.0,
        coupling_scale: Number = None,
        bias: bool = True,
        batch_first: bool = True,
        method: Method = _AUTO,
        max_steps: int = 200,
        throw: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Projections of tokens to drives, queries and keys, and of spins to the output: 4·embed_dim² weights.

        Args:
            order: "second" adds the echo.
            exact: Means by Bessel functions' ratios, in place of the form for many components.
            steps: How often the spins move, beginning at θ = x; None: to a fixed point, with implicit gradients.
            scale: β > 0; a number, a tensor or a Parameter, one or one a head.
            coupling_scale: Inverse temperature of the softmax, above 0, of the same kinds; by default D to the −½.
            method: As for `massieu.solve.fixed_point`, to the fixed point.
            max_steps: As there; of each step's own equation too, to second order. What is not found by then goes on with its
                last state: `convergence` tells of each head, or of each spin's equation, at its worst step.
            throw: Raise instead.
        """
        super().__init__()
        check_heads(embed_dim, num_heads)
        if embed_dim // num_heads < 3:
            raise ValueError(f"spins need heads of at least 3 dimensions, got {embed_dim // num_heads}")
        if steps is not None:
            whole_number("steps", steps, least=1)
        self.drive_proj, self.query_proj, self.key_proj, self.out_proj = (
            nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype) for _ in range(4)
        )
        register_number(self, "scale", scale, num_heads, or_none=False, above=0, device=device, dtype=dtype)
        register_number(self, "coupling_scale", coupling_scale, num_heads, above=0, device=device, dtype=dtype)
        self.embed_dim, self.num_heads, self.batch_first = embed_dim, num_heads, batch_first
        self.order: Order = choice("order", order, "first", "second")
        self.exact, self.steps = exact, steps
        instance("method", method, Method, "a Method, such as Auto(), Picard(), Anderson() or Newton()")
        self.method, self.max_steps, self.throw = method, max_steps, throw

    def extra_repr(self) -> str:
        told = settings(self, "embed_dim", "num_heads", "order", "exact", "scale", "coupling_scale")
        return f"{told}, steps={self.steps}"

    def forward(
        self,
        tokens: Float[Tensor, "B L embed_dim"],
        key_padding_mask: Mask | None = None,
        attn_mask: Mask | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "B L embed_dim"]:
        """The projected means, in the tokens' dtype; half precision is computed in float32.

        Args:
            tokens: Batch first, or (L, B, embed_dim) with `batch_first=False`.
            key_padding_mask, attn_mask, is_causal: As for `Attention`: which tokens act on which. A spin on which none
                acts is alone with its drive.

        Raises:
            ConvergenceError: with `throw`, there is no fixed point, with its residual and what to try.
        """
        model, scores = self._model(tokens, key_padding_mask, attn_mask, is_causal)
        with without_autocast(tokens.device):
            spins = model.mean(self._state(model, scores))
        output = self.out_proj(merge_heads(spins).to(tokens.dtype))
        return output if self.batch_first else output.transpose(0, 1)

    def model(
        self,
        tokens: Float[Tensor, "B L embed_dim"],
        key_padding_mask: Mask | None = None,
        attn_mask: Mask | None = None,
        is_causal: bool = False,
    ) -> KineticSpins:
        """The spins before they move, of batch shape (B, H). Arguments and errors as for a call."""
        return self._model(tokens, key_padding_mask, attn_mask, is_causal)[0]

    def _model(
        self, tokens: Tensor, key_padding_mask: Mask | None, attn_mask: Mask | None, is_causal: bool
    ) -> tuple[KineticSpins, _Scores]:
        """The spins, and what their couplings are a softmax of."""
        given = check_tokens("tokens", tokens, self.drive_proj, self.batch_first)
        projections = (self.drive_proj, self.query_proj, self.key_proj)
        drive, query, key = (split_heads(projection(given), self.num_heads) for projection in projections)
        masks = log_weight_of(key_padding_mask, attn_mask, query, key)
        log_weight = with_positions(masks, query, key, is_causal)
        with without_autocast(tokens.device):
            coupling, _ = attention_weights(query, key, scale=self.coupling_scale, log_weight=log_weight)
            model = KineticSpins.create(drive, coupling, scale=self.scale, exact=self.exact)
        return model, _Scores(query, key, log_weight)

    @door(model=partial(of_class, kind="KineticSpins"))
    def state(self, model: KineticSpins) -> Float[Tensor, "B H L D"]:
        """θ, the spins' local fields once they have moved; a ConvergenceError as for a call."""
        return self._state(model, None)

    def _state(self, model: KineticSpins, scores: _Scores | None) -> Float[Tensor, "B H L D"]:
        """The same, with attention told where the scores are known: of each step, or of the stationary state alone."""
        told = () if scores is None else listeners()
        if told and scores is not None:
            # Once, since steps are known to have the same scores by their tensors.
            scores = scores._replace(query=scores.query.to(model.drive), key=scores.key.to(model.drive))
        adjoint = Implicit(lost="nan" if self.throw else "zero")
        step_options: dict[str, Any] = {"max_steps": self.max_steps, "throw": self.throw}
        options: dict[str, Any] = step_options | {"adjoint": adjoint}
        if self.steps is None:
            found = in_one_call(told, model.stationary, self.order, method=self.method, **options)
            self._keep(found.status, found.residual)
            moved = self._told(told, model, scores, found.value)
            if moved is model:
                return found.value
            before, after = (each.step(found.value, self.order, **step_options) for each in (model, moved))
            return found.value + (after - before)
        state, steps = model.drive, []
        for _ in range(self.steps):
            moved = self._told(told, model, scores, state)
            if self.order == "first":
                state = moved.step(state)
            else:
                steps.append(moved.second_order_step(state, **options))
                state = steps[-1].value
        if steps:
            status, residual = (torch.stack([getattr(step, name) for step in steps]) for name in ("status", "residual"))
            self._keep(status.amax(0), residual.amax(0))
        return state

    def _told(
        self, told: Listeners, model: KineticSpins, scores: _Scores | None, state: Float[Tensor, "B H L D"]
    ) -> KineticSpins:
        """The spins themselves, or, where something takes the place of Σ_j J_ij φ(θ_j), driven by as much more."""
        if not told or scores is None:
            return model
        mean = model.mean(state)
        retrieved = model.coupling @ mean
        options = {"scale": self.coupling_scale, "log_weight": scores.log_weight}
        after = tell_attention(told, retrieved, scores.query, scores.key, mean, **options)
        return model if after is retrieved else replace(model, drive=model.drive + (after - retrieved))
