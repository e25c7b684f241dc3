"""Attention as a spin model: tokens are fields, heads couple them, the output is how the spins settle."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import choice, floating
from massieu.foundation.transforms import without_autocast
from massieu.nn.heads import Mask, attention_weights, log_weight_of, merge_log_weights, per_head, with_positions
from massieu.nn.modules import HeadsOfTokens, Number, register_number
from massieu.solve import Auto, Implicit, Method, fixed_point
from massieu.solve.status import FixedPointResult

_DAMPED = Auto(damping=0.5)


class TAPAttention(HeadsOfTokens):
    """Mean spins of tokens that couple by attention, to first or second order in the couplings (B13, B14).

    In each head token i puts the field x_i on D spins and couples them to those of token j by J_ij = strength·p_ij, p the
    softmax over j ≠ i of scale·query_i·key_j. For sites of ±1 the mean spins m, the output of the head, solve

        m_i = tanh(x_i + Σ_j J_ij m_j)                                        order="mean_field"
        m_i = tanh(x_i + Σ_j J_ij m_j − m_i Σ_j J_ij² (1 − m_j²))             order="tap"

    The last term, Onsager's, is what a feed-forward layer after attention is compared to (E11). For Gaussian sites of
    variance 1 it cannot change the means (B14): both orders are m = x + Jm, which is linear in the fields.

    Softmax couplings are not symmetric. There is then no equilibrium law and no free energy: m approximates the means in
    the stationary state of Glauber's dynamics, to second order for "tap" (Kappen and Spanjers, Phys. Rev. E 61, 5658
    (2000)), where the spread of the others' spins counts, J_ij², not an echo, J_ij·J_ji. With symmetric `coupling` given
    in the call they are one, and m is that of `massieu.energy.SpinModel`.

    Unique to first order where |strength| < 1, in the sup norm; it exists for spins of any strength. Gradients are those of the
    implicit function theorem: memory does not grow with steps. A token that sees no other keeps tanh(x_i), or x_i.
    """

    scale: Tensor | float | None
    strength: Tensor | float

    def __init__(
        self,
        embed_dim: int,
        num_heads: int = 1,
        *,
        order: Literal["mean_field", "tap"] = "tap",
        site: Literal["spin", "gaussian"] = "spin",
        strength: Number = 0.5,
        scale: Number = None,
        bias: bool = True,
        batch_first: bool = True,
        method: Method = _DAMPED,
        max_steps: int = 200,
        throw: bool = False,
    ) -> None:
        """Projections of tokens to fields, queries and keys of heads, and of mean spins to the output.

        Args:
            order: "mean_field", or "tap" for the second order in the couplings.
            site: "spin" for components of ±1, "gaussian" for normal ones of variance 1.
            strength: What a token's couplings add up to; a number, a tensor or a Parameter, one or one a head.
            scale: Inverse temperature of the softmax, of the same kinds; by default the head's size to the −½.
            method, max_steps: As for `massieu.solve.fixed_point`. Where a head's fixed point is not found the last
                state is used; `convergence` tells of each head.
            throw: Raise instead.
        """
        super().__init__(embed_dim, num_heads, bias, batch_first, field=embed_dim, query=embed_dim, key=embed_dim)
        self.order = choice("order", order, "mean_field", "tap")
        self.site = choice("site", site, "spin", "gaussian")
        register_number(self, "strength", strength, num_heads, or_none=False)
        register_number(self, "scale", scale, num_heads)
        self.method, self.max_steps, self.throw = method, max_steps, throw

    def forward(
        self,
        tokens: Float[Tensor, "B L embed_dim"],
        key_padding_mask: Mask | None = None,
        attn_mask: Mask | None = None,
        is_causal: bool = False,
        *,
        coupling: Float[Tensor, "#B #H L L"] | None = None,
    ) -> Float[Tensor, "B L embed_dim"]:
        """The projected mean spins, in the tokens' dtype.

        Args:
            tokens: Batch first, or (L, B, ·) with `batch_first=False`.
            key_padding_mask, attn_mask, is_causal: As for `Attention`.
            coupling: J_ij/strength in place of the softmax's weights. Its diagonal is left out; masks are not taken beside
                it: put zeros there.

        Raises:
            ConvergenceError: with `throw`, a head found no fixed point, with its residual and what to try.
        """
        found = self.solve(tokens, key_padding_mask, attn_mask, is_causal, coupling=coupling)
        self._keep(found.status, found.residual)
        return self._output(found.value, tokens.dtype)

    def solve(
        self,
        tokens: Float[Tensor, "B L embed_dim"],
        key_padding_mask: Mask | None = None,
        attn_mask: Mask | None = None,
        is_causal: bool = False,
        *,
        coupling: Float[Tensor, "#B #H L L"] | None = None,
    ) -> FixedPointResult:
        """The mean spins of the heads, (B, H, L, D), with status, steps and residual of each head. Arguments as for a call."""
        field, query, key = self._heads("tokens", tokens, "field", "query", "key")
        apart = ~torch.eye(field.shape[2], dtype=torch.bool, device=tokens.device)[None, None]
        with without_autocast(tokens.device):
            field = field.to(torch.promote_types(field.dtype, torch.float32))
            layout = (*field.shape[:3], field.shape[2])
            if coupling is None:
                masks = with_positions(log_weight_of(key_padding_mask, attn_mask, query, key), query, key, is_causal)
                weight = merge_log_weights(masks, apart)
                share = attention_weights(query, key, scale=self.scale, log_weight=weight)[0]
            else:
                if key_padding_mask is not None or attn_mask is not None or is_causal:
                    raise ValueError(
                        "coupling does not go with key_padding_mask, attn_mask or is_causal: set it to 0 there"
                    )
                share = torch.where(apart, _checked(coupling, layout).to(field), 0.0)
            couplings = (share * per_head(self.strength)).to(field.dtype).expand(layout)
            return fixed_point(
                _EQUATIONS[self.site, self.order],
                # 0, but NaN where a field is: what is not finite is not to be returned as if it were.
                0 * field.detach(),
                (field, couplings),
                item_dims=2,
                method=self.method,
                max_steps=self.max_steps,
                throw=self.throw,
                adjoint=Implicit(lost="nan" if self.throw else "zero"),
            )


def _mean_field(mean: Tensor, field: Tensor, coupling: Tensor) -> Tensor:
    return torch.tanh(field + coupling @ mean)


def _tap(mean: Tensor, field: Tensor, coupling: Tensor) -> Tensor:
    return torch.tanh(field + coupling @ mean - mean * (coupling.square() @ (1 - mean.square())))


def _gaussian(mean: Tensor, field: Tensor, coupling: Tensor) -> Tensor:
    return field + coupling @ mean


_EQUATIONS = {
    ("spin", "mean_field"): _mean_field,
    ("spin", "tap"): _tap,
    ("gaussian", "mean_field"): _gaussian,
    # With the Onsager term −V_i m_i the variance becomes 1/(1 − V_i), and V_i drops out.
    ("gaussian", "tap"): _gaussian,
}


def _checked(coupling: object, layout: tuple[int, ...]) -> Tensor:
    """Couplings given in place of a softmax."""
    given = floating("coupling", coupling)
    batch, heads, *lengths = layout
    if (
        given.ndim != 4
        or len(given) not in (1, batch)
        or given.shape[1] not in (1, heads)
        or [*given.shape[2:]] != lengths
    ):
        raise ValueError(f"coupling must have shape {layout}, or 1 for batch or heads, got {tuple(given.shape)}")
    return given
