"""The heads of attention that estimates the conditional mean of a value given a key, without the bias of softmax."""

import math
from types import MappingProxyType
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from massieu.foundation.arguments import choice, described, number
from massieu.nn.modules import Iterating, hold
from massieu.nn.strategy import Heads, HeadsResult, Request
from massieu.regression import ExponentialKernel, GaussianKernel, Kernel, LinearKernel, conditional_mean_attention
from massieu.regression.conditional_mean import Method, check_method

_ONE_SYSTEM = "hiding keys from some queries alone would take a system of equations for each; mask by key_padding_mask"


class ConditionalMeanHeads(Iterating, Heads):
    """Heads that do kernel ridge regression of values on keys within the sequence, Vᵀ(G + λI)⁻¹κ(K, q) (Z4).

    One ridge λ a head, and one width, are trained, kept as logarithms. Weights, the smoother's (G + λI)⁻¹κ(K, q), may be
    negative, do not sum to one, and cost memory L×N. Masks are those of keys, booleans or log-weights, and `is_causal`.
    A call may ask by `need_variance` for what is left of κ(q, q): the posterior variance in units of the prior's.

    Example:
        >>> import torch
        >>> from massieu.nn import Attention, ConditionalMeanHeads
        >>> attention = Attention(1, 1, batch_first=True, heads=ConditionalMeanHeads(kernel="linear", ridge=1.0))
        >>> _ = torch.nn.init.ones_(attention.in_proj_weight)  # queries, keys and values are the tokens
        >>> _, weights = attention(torch.tensor([[[1.0], [1.0]]]))
        >>> weights[0, 0].round(decimals=2).tolist()  # kq/(Σk² + 1)
        [0.33..., 0.33...]
    """

    extras = ("variance",)
    unsupported = MappingProxyType(
        {"dropout": "weights of a regression are not dropped", "attn_mask": _ONE_SYSTEM}
        | dict.fromkeys(("add_bias_kv", "add_zero_attn"), "an added key is no token to regress on")
    )
    log_ridge: nn.Parameter
    log_width: nn.Parameter | None

    def __init__(
        self,
        *,
        kernel: Literal["gaussian", "exponential", "linear"] = "gaussian",
        width: float | None = None,
        ridge: float = 1.0,
        method: Method = None,
        preconditioner_rank: int = 256,
        throw: bool = False,
    ) -> None:
        """Takes the kernel, where its numbers start, and how systems of equations are solved.

        Args:
            kernel: "gaussian", of lengthscale `width`; "exponential", softmax's, of scale 1/width²; "linear", which has no
                width: in-context ridge regression.
            width: Each head's width at the start. By default √head_dim, about a distance of keys of unit variance; for the
                exponential kernel head_dim^¼, so that its scale is head_dim^-½, as attention's.
            ridge: Each head's λ at the start.
            method, preconditioner_rank: As for `massieu.regression.conditional_mean_attention`. Where conjugate gradients
                stop above their tolerance the last iterate is used; `convergence` tells of each value column.
            throw: Raise a ConvergenceError instead.
        """
        super().__init__()
        self.kernel_name = choice("kernel", kernel, "gaussian", "exponential", "linear")
        if kernel == "linear" and width is not None:
            raise ValueError(f"the linear kernel has no width, got {described(width)}")
        self._width_start = None if width is None else number("width", width, above=0)
        self._ridge_start = number("ridge", ridge, above=0)
        self.method: Method = None if method is None else check_method(method)
        self.preconditioner_rank = preconditioner_rank
        self.throw = throw

    def _create_tensors(self, device: torch.device, dtype: torch.dtype | None) -> None:
        starts = {"log_ridge": self._ridge_start}
        if self.kernel_name == "linear":
            self.log_width = None
        elif self._width_start is not None:
            starts["log_width"] = self._width_start
        else:
            starts["log_width"] = self.head_dim ** (0.25 if self.kernel_name == "exponential" else 0.5)
        for name, start in starts.items():
            numbers = torch.full((self.num_heads,), math.log(start), dtype=dtype, device="cpu")
            hold(self, name, numbers, True, device)

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

    def forward(self, query: Tensor, key: Tensor, value: Tensor, request: Request) -> HeadsResult:
        value_size = value.shape[-1]
        if request.need_weights:
            # The output is linear in the values: for unit vectors as values it is the weights.
            length = key.shape[2]
            units = torch.eye(length, dtype=value.dtype, device=key.device).expand(*key.shape[:2], length, length)
            value = torch.cat([value, units], -1)
        estimates = conditional_mean_attention(
            query,
            key,
            value,
            kernel=self.kernel,
            ridge=self.ridge,
            log_weight=request.log_weight,
            is_causal=request.is_causal,
            need_variance=request.extra == "variance",
            method=self.method,
            preconditioner_rank=self.preconditioner_rank,
            throw=self.throw,
        )
        if estimates.convergence is not None:
            self._keep(*estimates.convergence)
        weights = estimates.output[..., value_size:] if request.need_weights else None
        return HeadsResult(estimates.output[..., :value_size], weights, estimates.variance)
