"""Attention as a spin model: tokens are fields, heads couple them, the output is how the spins settle."""

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from massieu.nn.arguments import check_input
from massieu.nn.convergence import Converging
from massieu.nn.heads import (
    Mask,
    Number,
    log_weight_of,
    merge_heads,
    merge_log_weights,
    per_head,
    position_mask,
    register_number,
    split_heads,
)
from massieu.nn.weights import attention_weights
from massieu.ops.shapes import without_autocast
from massieu.solve import FixedPointResult, Method, fixed_point
from massieu.solve.arguments import floating

Order = Literal["mean_field", "tap"]
Site = Literal["spin", "gaussian"]


class TAPAttention(Converging, nn.Module):
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
        order: Order = "tap",
        site: Site = "spin",
        strength: Number = 0.5,
        scale: Number = None,
        bias: bool = True,
        batch_first: bool = True,
        method: Method | Any = "auto",
        damping: float = 0.5,
        max_steps: int = 200,
        throw: bool = False,
    ) -> None:
        """Projections of tokens to fields, queries and keys of heads, and of mean spins to the output.

        Args:
            order: "mean_field", or "tap" for the second order in the couplings.
            site: "spin" for components of ±1, "gaussian" for normal ones of variance 1.
            strength: What a token's couplings add up to; a number, a tensor or a Parameter, one or one a head.
            scale: Inverse temperature of the softmax, of the same kinds; by default the head's size to the −½.
            method, damping, max_steps: As for `massieu.solve.fixed_point`. Where a head's fixed point is not found the last
                state is used, `convergence` has status and residual of each head, and a warning says so once.
            throw: Raise instead.

        Raises:
            ValueError, TypeError: numbers out of their range.
        """
        super().__init__()
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim must be a positive multiple of num_heads, got {embed_dim} and {num_heads}")
        if order not in ("mean_field", "tap"):
            raise ValueError(f"order must be 'mean_field' or 'tap', got {order!r}")
        if site not in ("spin", "gaussian"):
            raise ValueError(f"site must be 'spin' or 'gaussian', got {site!r}")
        if strength is None:
            raise TypeError("strength must be a number, a floating-point tensor or a Parameter, got None")
        register_number(self, "strength", strength, num_heads)
        register_number(self, "scale", scale, num_heads)
        self.field_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.query_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.key_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.num_heads, self.order, self.site, self.batch_first = num_heads, order, site, batch_first
        self.method, self.damping, self.max_steps, self.throw = method, damping, max_steps, throw

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
            ValueError, TypeError: shapes that do not fit.
            ConvergenceError: with `throw`, a head found no fixed point, with its residual and what to try.
        """
        found = self.solve(tokens, key_padding_mask, attn_mask, is_causal, coupling=coupling)
        self._keep(found.status, found.residual)
        output = self.out_proj(merge_heads(found.value).to(tokens.dtype))
        return output if self.batch_first else output.transpose(0, 1)

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
        size = self.field_proj.in_features
        if floating("tokens", tokens).ndim != 3 or tokens.shape[-1] != size:
            shape = tuple(tokens.shape)
            raise ValueError(f"tokens must have three dimensions, batch, length and size {size}, got {shape}")
        check_input("tokens", tokens, self.field_proj)
        if not self.batch_first:
            tokens = tokens.transpose(0, 1)
        field, query, key = (
            split_heads(projection(tokens), self.num_heads)
            for projection in (self.field_proj, self.query_proj, self.key_proj)
        )
        layout = (*field.shape[:3], field.shape[2])
        apart = ~torch.eye(layout[2], dtype=torch.bool, device=tokens.device)[None, None]
        with without_autocast(tokens.device):
            field = field.to(torch.promote_types(field.dtype, torch.float32))
            if coupling is None:
                masks = log_weight_of(key_padding_mask, attn_mask, layout)
                seen = position_mask(layout[2], layout[3], is_causal, None, tokens.device)
                weight = merge_log_weights(masks, seen, apart)
                share = attention_weights(query, key, scale=self.scale, log_weight=weight)[0]
            else:
                given = (key_padding_mask, attn_mask, is_causal or None)
                share = torch.where(apart, _checked(coupling, layout, given).to(field), 0.0)
            couplings = (share * per_head(self.strength)).to(field.dtype).expand(layout)
            return fixed_point(
                _EQUATIONS[self.site, self.order],
                # 0, but NaN where a field is: what is not finite is not to be returned as if it were.
                0 * field.detach(),
                (field, couplings),
                item_dims=2,
                method=self.method,
                damping=self.damping,
                max_steps=self.max_steps,
                throw=self.throw,
                lost_derivative="nan" if self.throw else "zero",
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


def _checked(coupling: object, layout: tuple[int, ...], masks: tuple[object, ...]) -> Tensor:
    """Couplings given in place of a softmax."""
    if not isinstance(coupling, Tensor) or not coupling.is_floating_point():
        kind = coupling.dtype if isinstance(coupling, Tensor) else type(coupling).__name__
        raise TypeError(f"coupling must be a floating-point tensor, got {kind}")
    fits = coupling.ndim == 4 and all(
        given in (1, full) if place < 2 else given == full
        for place, (given, full) in enumerate(zip(coupling.shape, layout, strict=True))
    )
    if not fits:
        raise ValueError(f"coupling must have shape {layout}, or 1 for batch or heads, got {tuple(coupling.shape)}")
    if any(mask is not None for mask in masks):
        raise ValueError("coupling does not go with key_padding_mask, attn_mask or is_causal: set it to 0 there")
    return coupling
