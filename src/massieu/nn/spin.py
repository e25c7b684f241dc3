"""Attention whose tokens are spins: attention couples them, and they all move at once."""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from massieu.energy import KineticSpins
from massieu.energy.kinetic import Order
from massieu.nn.arguments import check_input
from massieu.nn.convergence import Converging
from massieu.nn.heads import (
    Mask,
    Number,
    log_weight_of,
    merge_heads,
    merge_log_weights,
    position_mask,
    register_number,
    split_heads,
)
from massieu.nn.weights import attention_weights
from massieu.ops.shapes import without_autocast
from massieu.solve import Method
from massieu.solve.arguments import floating


class SpinAttention(Converging, nn.Module):
    """Kinetic mean-field spins: θ_i = x_i + Σ_j J_ij φ(θ_j) (+ echo_i), the output their means φ(θ) (B16).

    Each head is a system of its own, of one spin in R^D for each token, D the head's size. The drive x and the couplings
    J = softmax(coupling_scale·query_i·key_j) are projections of the tokens, and stay what they are while the spins move.
    J is not symmetric: there is no energy that falls. φ is a contraction to the ball of radius √(D/2 − 1), the mean of
    spins in the field θ at inverse temperature β.

    To first order this is attention between two residual connections and a normalisation. The echo of second order is a
    spin's reaction to itself by way of the others, which takes a feed-forward layer's place; it needs no parameter.

    Where β < 2 the first order has one fixed point, and a step brings all states nearer to it by a factor of β/2 or less.
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
        method: Method | Any = "auto",
        max_steps: int = 200,
        throw: bool = False,
    ) -> None:
        """Projections of tokens to drives, queries and keys, and of spins to the output: 4·embed_dim² weights.

        Args:
            order: "second" adds the echo.
            exact: Means by Bessel functions' ratios, in place of the form for many components.
            steps: How often the spins move, beginning at θ = x; None: to a fixed point, with implicit gradients.
            scale: β > 0; a number, a tensor or a Parameter, one or one a head.
            coupling_scale: Inverse temperature of the softmax, of the same kinds; by default D to the −½.
            method: As for `massieu.solve.fixed_point`, to the fixed point.
            max_steps: As there; of each step's own equation too, to second order. What is not found by then goes on with its
                last state; `convergence` has status and residual of each head, or of each spin's equation, the worst of all
                steps, and a warning says so once.
            throw: Raise instead.

        Raises:
            ValueError, TypeError: numbers out of their range; heads of fewer than three dimensions.
        """
        super().__init__()
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim must be a positive multiple of num_heads, got {embed_dim} and {num_heads}")
        if embed_dim // num_heads < 3:
            raise ValueError(f"spins need heads of at least 3 dimensions, got {embed_dim // num_heads}")
        if order not in ("first", "second"):
            raise ValueError(f"order must be 'first' or 'second', got {order!r}")
        if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
            raise ValueError(f"steps must be an int, at least 1, or None for a fixed point, got {steps!r}")
        if scale is None:
            raise TypeError("scale must be a number, a tensor or a Parameter, got None")
        register_number(self, "scale", scale, num_heads)
        register_number(self, "coupling_scale", coupling_scale, num_heads)
        given = torch.as_tensor(self.scale)
        if not bool(((given > 0) & (given < math.inf)).all()):
            raise ValueError(f"scale must be positive and finite, got {given.tolist()}")
        self.drive_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.query_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.key_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.embed_dim, self.num_heads, self.batch_first = embed_dim, num_heads, batch_first
        self.order: Order = order
        self.exact, self.steps = exact, steps
        self.method, self.max_steps, self.throw = method, max_steps, throw

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
            ValueError, TypeError: shapes that do not fit.
            ConvergenceError: with `throw`, there is no fixed point, with its residual and what to try.
        """
        model = self.model(tokens, key_padding_mask, attn_mask, is_causal)
        with without_autocast(tokens.device):
            spins = merge_heads(model.mean(self.state(model)))
        output = self.out_proj(spins.to(tokens.dtype))
        return output if self.batch_first else output.transpose(0, 1)

    def model(
        self,
        tokens: Float[Tensor, "B L embed_dim"],
        key_padding_mask: Mask | None = None,
        attn_mask: Mask | None = None,
        is_causal: bool = False,
    ) -> KineticSpins:
        """The spins before they move, of batch shape (B, H). Arguments and errors as for a call."""
        if floating("tokens", tokens).ndim != 3 or tokens.shape[-1] != self.embed_dim:
            order = "(batch, length, {})" if self.batch_first else "(length, batch, {})"
            raise ValueError(f"tokens must have shape {order.format(self.embed_dim)}, got {tuple(tokens.shape)}")
        check_input("tokens", tokens, self.drive_proj)
        if not self.batch_first:
            tokens = tokens.transpose(0, 1)
        drive, query, key = (
            split_heads(projection(tokens), self.num_heads)
            for projection in (self.drive_proj, self.query_proj, self.key_proj)
        )
        length = tokens.shape[1]
        log_weight = merge_log_weights(
            log_weight_of(key_padding_mask, attn_mask, (*query.shape[:3], length)),
            position_mask(length, length, is_causal, None, tokens.device),
        )
        with without_autocast(tokens.device):
            coupling, _ = attention_weights(query, key, scale=self.coupling_scale, log_weight=log_weight)
            return KineticSpins.create(drive, coupling, scale=self.scale, exact=self.exact)

    def state(self, model: KineticSpins) -> Float[Tensor, "B H L D"]:
        """θ, the spins' local fields once they have moved.

        Raises:
            ConvergenceError: as a call.
        """
        lost = "nan" if self.throw else "zero"
        options: dict[str, Any] = {"max_steps": self.max_steps, "throw": self.throw, "lost_derivative": lost}
        if self.steps is None:
            found = model.stationary(self.order, method=self.method, **options)
            self._keep(found.status, found.residual)
            return found.value
        state, steps = model.drive, []
        for _ in range(self.steps):
            if self.order == "first":
                state = model.step(state)
            else:
                steps.append(model.second_order_step(state, **options))
                state = steps[-1].value
        if steps:
            status, residual = (torch.stack([getattr(step, name) for step in steps]) for name in ("status", "residual"))
            self._keep(status.amax(0), residual.amax(0))
        return state
