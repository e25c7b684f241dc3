"""The heads of attention as a spin model: values are fields, attention the couplings, the output the mean spins."""

from types import MappingProxyType
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import check_shape, choice, expanded, floating
from massieu.foundation.transforms import without_autocast
from massieu.nn.heads import Mask, attention_weights, merge_log_weights, per_head, with_positions
from massieu.nn.modules import Number
from massieu.nn.strategy import Request, Retrieval, SolvedHeads
from massieu.solve import GMRES, Auto, Method
from massieu.solve.status import FixedPointResult

_DAMPED = Auto(damping=0.5)


class TAPHeads(SolvedHeads):
    """Heads of tokens as spins coupled by attention: mean spins to first or second order in the couplings (B13, B14).

    In each head token i puts the field x_i, its value, on D spins and couples them to those of token j by J_ij =
    strength·p_ij, p the softmax over j ≠ i of scale·query_i·key_j. For sites of ±1 the mean spins m, the output, solve

        m_i = tanh(x_i + Σ_j J_ij m_j)                                        order="mean_field"
        m_i = tanh(x_i + Σ_j J_ij m_j − m_i Σ_j J_ij² (1 − m_j²))             order="tap"

    The last term, Onsager's, is what a feed-forward layer after attention is compared to (E11). For Gaussian sites of
    variance 1 it cannot change the means (B14): both orders are m = x + Jm, which is linear in the fields.

    Softmax couplings are not symmetric. There is then no equilibrium law and no free energy: m approximates the means in
    the stationary state of Glauber's dynamics, to second order for "tap" (Kappen and Spanjers, Phys. Rev. E 61, 5658
    (2000)), where the spread of the others' spins counts, J_ij², not an echo, J_ij·J_ji. With symmetric `coupling` given
    to `solve` they are one, and m is that of `massieu.energy.SpinModel`.

    Unique to first order where |strength| < 1, in the sup norm; it exists for spins of any strength. Gradients are those of the
    implicit function theorem: memory does not grow with steps. A token that sees no other keeps tanh(x_i), or x_i. Tokens
    attend to each other: a call has as many keys as queries. There are no weights to return.

    Example:
        >>> import torch
        >>> from massieu.nn import Attention, TAPHeads
        >>> attention = Attention(1, 1, batch_first=True, heads=TAPHeads(site="gaussian", strength=0.5))
        >>> one = torch.ones(1, 1, 2, 1)
        >>> [round(float(mean), 3) for mean in attention.heads.solve(one, one, one).value.flatten()]  # m = 1 + m/2
        [2.0, 2.0]
    """

    unsupported = MappingProxyType(
        {
            **SolvedHeads.unsupported,
            **dict.fromkeys(("add_bias_kv", "add_zero_attn"), "an added key would have no spin"),
        }
    )
    scale: Tensor | float | None
    strength: Tensor | float

    def __init__(
        self,
        *,
        order: Literal["mean_field", "tap"] = "tap",
        site: Literal["spin", "gaussian"] = "spin",
        strength: Number = 0.5,
        scale: Number = None,
        method: Method = _DAMPED,
        max_steps: int = 200,
        throw: bool = False,
    ) -> None:
        """Takes the spins, how strongly they couple, and how their means are found.

        Args:
            order: "mean_field", or "tap" for the second order in the couplings.
            site: "spin" for components of ±1, "gaussian" for normal ones of variance 1.
            strength: The sum of a token's couplings; a number, a tensor or a Parameter, one or one a head.
            scale: As for `SoftmaxHeads`.
            method, max_steps: As for `massieu.solve.fixed_point`. Where a head's fixed point is not found the last
                state is used; `convergence` tells of each head.
            throw: Raise a ConvergenceError instead, with the residual and what to try.
        """
        super().__init__(method, max_steps, throw, strength=strength, scale=scale)
        self.order = choice("order", order, "mean_field", "tap")
        self.site = choice("site", site, "spin", "gaussian")

    def solve(
        self,
        query: Float[Tensor, "B H L D"],
        key: Float[Tensor, "B H L D"],
        field: Float[Tensor, "B H L D"],
        *,
        log_weight: Mask | None = None,
        is_causal: bool = False,
        coupling: Float[Tensor, "#B #H L L"] | None = None,
    ) -> FixedPointResult:
        """The mean spins, (B, H, L, D), with status, steps and residual of each head, from what `Attention.project` returns.

        Args:
            query, key, field: Of the same length: each token is a query, a key and a spin.
            log_weight: As for `massieu.ops.attention`: in booleans True keeps.
            is_causal: Token i couples to tokens 0 … i − 1.
            coupling: J_ij/strength in place of the softmax's weights. Its diagonal is ignored. It cannot be combined with
                masks: set hidden couplings to 0.

        Raises:
            ValueError: lengths that differ, couplings of another shape or beside masks.
            ConvergenceError: with `throw`, a head found no fixed point, with its residual and what to try.
        """
        if query.shape != key.shape:
            raise ValueError(
                f"tokens couple to each other, so there must be as many keys as queries, {query.shape[2]}, got {key.shape[2]}"
            )
        with without_autocast(field.device):
            field = field.to(torch.promote_types(field.dtype, torch.float32))
            layout = (*field.shape[:3], field.shape[2])  # (B, H, L, L)
            if coupling is None:
                others = self._of_others(query, key, log_weight, is_causal)
                share, _ = attention_weights(query, key, scale=self.scale, log_weight=others)
            else:
                if log_weight is not None or is_causal:
                    raise ValueError("coupling does not go with log_weight or is_causal: set it to 0 there")
                check_shape("coupling", floating("coupling", coupling), ("1 or batch", "1 or heads", *layout[2:]))
                others = self._of_others(query, key, None, False)
                share = torch.where(others, expanded("coupling", coupling, layout, "the heads'").to(field), 0.0)
            couplings = (share * per_head(self.strength)).to(field.dtype).expand(layout)
            # Start at 0, but at NaN where a field is not finite, so that the result is not finite either.
            start = 0 * field.detach()
            return self._find_fixed_point(_EQUATIONS[self.site, self.order], start, (field, couplings), 2, GMRES())

    @staticmethod
    def _of_others(query: Tensor, key: Tensor, log_weight: Mask | None, is_causal: bool) -> Mask:
        """The log-weight without the diagonal: a token does not couple to itself."""
        is_other = ~torch.eye(key.shape[2], dtype=torch.bool, device=key.device)[None, None]
        merged = merge_log_weights(with_positions(log_weight, query, key, is_causal), is_other)
        assert merged is not None
        return merged

    def _retrieval(self, point: Tensor, *heads: Tensor, request: Request) -> Retrieval:
        query, key, field = (tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in heads)
        mean = point.to(field.dtype)
        strength = per_head(self.strength)
        options: dict[str, Any] = {"scale": self.scale}
        options["log_weight"] = self._of_others(query, key, request.log_weight, request.is_causal)
        if self.site == "gaussian":
            return Retrieval((query, key, mean), options, lambda retrieved: field + strength * retrieved)
        # The part of a spin's local field that a replacement of Σ_j p_ij m_j leaves alone.
        fixed_field = field
        if self.order == "tap":
            coupling = attention_weights(query, key, **options)[0] * strength
            fixed_field = field - mean * (coupling.square() @ (1 - mean.square()))
        return Retrieval((query, key, mean), options, lambda retrieved: torch.tanh(fixed_field + strength * retrieved))


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
