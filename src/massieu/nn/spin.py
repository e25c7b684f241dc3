"""Attention whose tokens are spins: attention gives the couplings, and all spins move at once."""

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
from massieu.solve.status import FixedPointResult

_AUTO = Auto()


class _Scores(NamedTuple):
    """The queries, keys and log-weights whose softmax the couplings are."""

    query: Float[Tensor, "B H L D"]
    key: Float[Tensor, "B H L D"]
    log_weight: Mask | None


@door(bias=flag)
class SpinAttention(Iterating, Resettable):
    """Tokens as kinetic mean-field spins coupled by attention: θ_i = x_i + Σ_j J_ij φ(θ_j), output φ(θ) (B16).

    Each head is a system of its own, of one spin in R^D for each token, D the head's size. The drive x and the couplings
    J = softmax(query_i·key_j/√D) are projections of the tokens, and stay what they are while the spins move.
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

    def __init__(
        self,
        embed_dim: int,
        num_heads: int = 1,
        *,
        order: Order = "first",
        exact: bool = False,
        steps: int | None = 1,
        scale: Number = 1.0,
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
            steps: Number of moves of the spins from θ = x; None moves them to a fixed point, with implicit gradients.
            scale: β > 0; a number, a tensor or a Parameter, one or one a head.
            method: As for `massieu.solve.fixed_point`, for the fixed point.
            max_steps: As there, and for each step's own equation to second order. An item that has not converged by then goes
                on with its last state: `convergence` has each head, or each spin's equation, at its worst step.
            throw: Raise a ConvergenceError instead.
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
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.batch_first = batch_first
        self.order: Order = choice("order", order, "first", "second")
        self.exact = exact
        self.steps = steps
        instance("method", method, Method, "a Method, such as Auto(), Picard(), Anderson() or Newton()")
        self.method = method
        self.max_steps = max_steps
        self.throw = throw

    def extra_repr(self) -> str:
        shown = settings(self, "embed_dim", "num_heads", "order", "exact", "scale")
        return f"{shown}, steps={self.steps}"

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
            key_padding_mask, attn_mask, is_causal: As for `Attention`: which tokens act on which. A spin on which no token
                acts follows its drive alone.

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
        """The spins, and the scores whose softmax their couplings are."""
        batch = check_tokens("tokens", tokens, self.drive_proj, self.batch_first)
        drive = split_heads(self.drive_proj(batch), self.num_heads)
        query = split_heads(self.query_proj(batch), self.num_heads)
        key = split_heads(self.key_proj(batch), self.num_heads)
        masks = log_weight_of(key_padding_mask, attn_mask, query, key)
        log_weight = with_positions(masks, query, key, is_causal)
        with without_autocast(tokens.device):
            coupling, _ = attention_weights(query, key, scale=None, log_weight=log_weight)
            model = KineticSpins.create(drive, coupling, scale=self.scale, exact=self.exact)
        return model, _Scores(query, key, log_weight)

    @door(model=partial(of_class, kind="KineticSpins"))
    def state(self, model: KineticSpins) -> Float[Tensor, "B H L D"]:
        """θ, the spins' local fields once they have moved; a ConvergenceError as for a call."""
        return self._state(model, None)

    def _state(self, model: KineticSpins, scores: _Scores | None) -> Float[Tensor, "B H L D"]:
        """θ, reported to listeners if there are scores: at each step, or once, in the stationary state, if `steps` is None."""
        audience = () if scores is None else listeners()
        if audience and scores is not None:
            # Converted once: a listener recognises the steps' common scores by the identity of these tensors.
            scores = scores._replace(query=scores.query.to(model.drive), key=scores.key.to(model.drive))
        if self.steps is None:
            return self._stationary_state(model, scores, audience)
        state = model.drive
        solutions: list[FixedPointResult] = []
        for _ in range(self.steps):
            driven = self._report(audience, model, scores, state)
            if self.order == "first":
                state = driven.step(state)
            else:
                # To second order, a step is itself a fixed point.
                solutions.append(
                    driven.second_order_step(state, max_steps=self.max_steps, throw=self.throw, adjoint=self._adjoint())
                )
                state = solutions[-1].value
        if solutions:
            # Of each equation the worst of all steps.
            status = torch.stack([solution.status for solution in solutions]).amax(0)
            residual = torch.stack([solution.residual for solution in solutions]).amax(0)
            self._keep(status, residual)
        return state

    def _stationary_state(
        self, model: KineticSpins, scores: _Scores | None, audience: Listeners
    ) -> Float[Tensor, "B H L D"]:
        """The fixed point. A listener's replacement moves it by as much as it moves one step from there."""
        options: dict[str, Any] = {"max_steps": self.max_steps, "throw": self.throw}
        solution = in_one_call(
            audience, model.stationary, self.order, method=self.method, adjoint=self._adjoint(), **options
        )
        self._keep(solution.status, solution.residual)
        state = solution.value
        driven = self._report(audience, model, scores, state)
        if driven is model:
            return state
        step_before = model.step(state, self.order, **options)
        step_after = driven.step(state, self.order, **options)
        return state + (step_after - step_before)

    def _adjoint(self) -> Implicit:
        """Implicit derivatives; without `throw`, an equation that diverged has derivative 0, so that the others train on."""
        return Implicit(lost="nan" if self.throw else "zero")

    def _report(
        self, audience: Listeners, model: KineticSpins, scores: _Scores | None, state: Float[Tensor, "B H L D"]
    ) -> KineticSpins:
        """The spins after the listeners have heard of Σ_j J_ij φ(θ_j); the drive takes up what a replacement adds to it."""
        if not audience or scores is None:
            return model
        mean = model.mean(state)
        retrieved = model.coupling @ mean
        replaced = tell_attention(audience, retrieved, scores.query, scores.key, mean, log_weight=scores.log_weight)
        if replaced is retrieved:
            return model
        return replace(model, drive=model.drive + (replaced - retrieved))
