"""Attention whose tokens are spins: attention couples them, and they all move at once."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.energy import KineticSpins
from massieu.energy.kinetic import Order
from massieu.foundation.arguments import check_range, choice, whole_number
from massieu.foundation.transforms import without_autocast
from massieu.nn.heads import Mask, attention_weights, log_weight_of, with_positions
from massieu.nn.modules import HeadsOfTokens, Number, register_number
from massieu.solve import Auto, Implicit, Method

_AUTO = Auto()


class SpinAttention(HeadsOfTokens):
    """Kinetic mean-field spins: θ_i = x_i + Σ_j J_ij φ(θ_j) (+ echo_i), the output their means φ(θ) (B16).

    Each head is a system of its own, of one spin in R^D for each token, D the head's size. The drive x and the couplings
    J = softmax(coupling_scale·query_i·key_j) are projections of the tokens, and stay what they are while the spins move.
    J is not symmetric: there is no energy that falls. φ is an activation into the ball of radius √(D/2 − 1), the mean of
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
        method: Method = _AUTO,
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
                last state: `convergence` tells of each head, or of each spin's equation, at its worst step.
            throw: Raise instead.
        """
        super().__init__(embed_dim, num_heads, bias, batch_first, drive=embed_dim, query=embed_dim, key=embed_dim)
        if embed_dim // num_heads < 3:
            raise ValueError(f"spins need heads of at least 3 dimensions, got {embed_dim // num_heads}")
        if steps is not None:
            whole_number("steps", steps, least=1)
        register_number(self, "scale", scale, num_heads, or_none=False)
        register_number(self, "coupling_scale", coupling_scale, num_heads)
        check_range("scale", self.scale, above=0)
        self.order: Order = choice("order", order, "first", "second")
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
            ConvergenceError: with `throw`, there is no fixed point, with its residual and what to try.
        """
        model = self.model(tokens, key_padding_mask, attn_mask, is_causal)
        with without_autocast(tokens.device):
            spins = model.mean(self.state(model))
        return self._output(spins, tokens.dtype)

    def model(
        self,
        tokens: Float[Tensor, "B L embed_dim"],
        key_padding_mask: Mask | None = None,
        attn_mask: Mask | None = None,
        is_causal: bool = False,
    ) -> KineticSpins:
        """The spins before they move, of batch shape (B, H). Arguments and errors as for a call."""
        drive, query, key = self._heads("tokens", tokens, "drive", "query", "key")
        masks = log_weight_of(key_padding_mask, attn_mask, query, key)
        log_weight = with_positions(masks, query, key, is_causal)
        with without_autocast(tokens.device):
            coupling, _ = attention_weights(query, key, scale=self.coupling_scale, log_weight=log_weight)
            return KineticSpins.create(drive, coupling, scale=self.scale, exact=self.exact)

    def state(self, model: KineticSpins) -> Float[Tensor, "B H L D"]:
        """θ, the spins' local fields once they have moved; a ConvergenceError as for a call."""
        adjoint = Implicit(lost="nan" if self.throw else "zero")
        options: dict[str, Any] = {"max_steps": self.max_steps, "throw": self.throw, "adjoint": adjoint}
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
