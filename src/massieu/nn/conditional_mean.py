"""Multi-head attention that estimates the conditional mean of a value given a key, without the bias of softmax."""

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from massieu.foundation.arguments import choice, number
from massieu.nn.heads import Mask
from massieu.nn.modules import Iterating
from massieu.nn.multihead import HeadsResult, MultiHead, Request
from massieu.regression import ExponentialKernel, GaussianKernel, Kernel, LinearKernel, conditional_mean_attention
from massieu.regression.conditional_mean import Method


class ConditionalMeanAttention(Iterating, MultiHead):
    """In each head Vᵀ(G + λI)⁻¹κ(K, q), kernel ridge regression of values on keys within the sequence (Z4).

    Call and state dict are `torch.nn.MultiheadAttention`'s, with one ridge λ a head, and one width, as further parameters,
    kept as logarithms. Weights may be negative and do not sum to one. Masks are those of keys, booleans or log-weights, and
    `is_causal`; a mask of pairs is refused. A query that sees no key gets 0 from the heads.

    `need_variance=True` in the call returns what is left of κ(q, q): the posterior variance in units of the prior's.
    """

    log_width: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        kernel: Literal["gaussian", "exponential", "linear"] = "gaussian",
        width: float | None = None,
        ridge: float = 1.0,
        method: Method = None,
        preconditioner_rank: int = 256,
        throw: bool = False,
    ) -> None:
        """The arguments of `torch.nn.MultiheadAttention` that apply, and:

        Args:
            kernel: "gaussian", of lengthscale `width`; "exponential", softmax's, of scale 1/width²; "linear", which has no
                width: in-context ridge regression.
            width: What each head's starts from. By default √head_dim, of keys of unit variance about a distance; for the
                exponential kernel head_dim^¼, so that its scale is head_dim^-½, as attention's.
            ridge: What each head's λ starts from.
            method, preconditioner_rank: As for `massieu.regression.conditional_mean_attention`. Where conjugate gradients
                stop above their tolerance the last iterate is used; `convergence` tells of each value column.
            throw: Raise instead.
        """
        super().__init__(
            embed_dim, num_heads, bias=bias, kdim=kdim, vdim=vdim, batch_first=batch_first, device=device, dtype=dtype
        )
        choice("kernel", kernel, "gaussian", "exponential", "linear")
        if kernel == "linear" and width is not None:
            raise ValueError(f"the linear kernel has no width, got {width}")
        power = 0.25 if kernel == "exponential" else 0.5
        width = number("width", self.head_dim**power if width is None else width, above=0)
        number("ridge", ridge, above=0)
        self.kernel_name = kernel
        self.method: Method = method
        self.preconditioner_rank = preconditioner_rank
        self.throw = throw
        start = torch.ones(num_heads, device=device, dtype=dtype)
        self.log_ridge = nn.Parameter(math.log(ridge) * start)
        self.log_width = None if kernel == "linear" else nn.Parameter(math.log(width) * start)

    @property
    def ridge(self) -> Float[Tensor, "H"]:
        """λ of each head."""
        return self.log_ridge.exp()

    @property
    def kernel(self) -> Kernel:
        """The heads' kernel."""
        if self.log_width is None:
            return LinearKernel.create()
        width = self.log_width.exp()
        return GaussianKernel(width) if self.kernel_name == "gaussian" else ExponentialKernel(width**-2)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        query: Float[Tensor, "*batch L embed_dim"],
        key: Float[Tensor, "*batch N kdim"],
        value: Float[Tensor, "*batch N vdim"],
        key_padding_mask: Mask | None = None,
        need_weights: bool = True,
        attn_mask: Mask | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        need_variance: bool = False,
    ) -> tuple[Tensor | None, ...]:
        """`torch.nn.MultiheadAttention`'s call, with the variance on request.

        Returns:
            The output, in the query's shape; the smoother's weights (G + λI)⁻¹κ(K, q), or None; and, asked for, the
            variance, (B, H, L), float32 or float64. Weights cost memory L×N.

        Raises:
            ValueError: a mask of pairs.
            ConvergenceError: with `throw`, conjugate gradients stopped above their tolerance.
        """
        if attn_mask is not None:
            raise ValueError(
                "attn_mask hides keys from some queries alone, which would take a system of equations for each: mask by "
                "key_padding_mask and is_causal"
            )
        # The frame passes on what the heads return beside output and weights, whatever it is.
        options = need_weights, None, average_attn_weights, is_causal
        return super().forward(query, key, value, key_padding_mask, *options, need_potential=need_variance)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, request: Request) -> HeadsResult:
        width = value.shape[-1]
        if request.need_weights:
            # The weights are what attention returns for values that are unit vectors.
            length = key.shape[2]
            units = torch.eye(length, dtype=value.dtype, device=key.device).expand(*key.shape[:2], length, length)
            value = torch.cat([value, units], -1)
        found = conditional_mean_attention(
            query,
            key,
            value,
            kernel=self.kernel,
            ridge=self.ridge,
            log_weight=request.log_weight,
            is_causal=request.is_causal,
            need_variance=request.need_potential,
            method=self.method,
            preconditioner_rank=self.preconditioner_rank,
            throw=self.throw,
        )
        if found.convergence is not None:
            self._keep(*found.convergence)
        weights = found.output[..., width:] if request.need_weights else None
        return HeadsResult(found.output[..., :width], weights, found.variance)
