"""The heads of softmax attention whose keys go through the link of an exponential family before the dot product."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from massieu.foundation.arguments import choice, flag
from massieu.foundation.transforms import without_autocast
from massieu.measures import Bernoulli, Categorical, Gaussian, Measure, Poisson, Spin
from massieu.nn.heads import merge_log_weights, per_head
from massieu.nn.modules import Number
from massieu.nn.softmax import SoftmaxHeads
from massieu.nn.strategy import HeadsResult, Request

Family = Literal["gaussian", "spin", "bernoulli", "poisson", "categorical"]
_FAMILIES: dict[str, Callable[[int], Measure]] = {
    "gaussian": lambda size: Gaussian.create(0.0, 1.0, dim=size),
    "spin": lambda size: Spin.create(dim=size),
    "bernoulli": lambda size: Bernoulli.create(0.5, dim=size),
    "poisson": lambda size: Poisson.create(1.0, dim=size),
    "categorical": lambda size: Categorical.create(torch.full((size,), 1 / size)),
}


class DualLinkHeads(SoftmaxHeads):
    """Softmax attention of queries to ∇A(key): keys are parameters of an exponential family (Shim §6; X8, E6b).

    With `divergence` the entropy of the key's distribution is added to the score, and the weights are
    p_n ∝ exp(−scale·KL(p_key_n ‖ p_query)): a kernel smoother by divergence, `massieu.measures.divergence_kernel`. Of the
    Gaussian that is squared distance. Without it, weights are exp(scale·query·∇A(key_n)), the non-linear activation
    before the dot product that Shim proposes. Links: the identity ("gaussian"), tanh ("spin"), σ ("bernoulli"), exp
    ("poisson"), softmax ("categorical").

    All is computed in float32 at least. A key whose link is beyond that ("poisson": a coordinate above 88) is infinitely far
    by divergence and has no weight; without `divergence` its score is infinite and the output NaN.

    A call may ask for what `SoftmaxHeads` gives; log Z is then log Σ exp(scale·(query·∇A(key_n) + entropy_n)), with
    `divergence` scale·A(query) above the logarithm of the sum of the kernel.

    Example:
        >>> import torch
        >>> from massieu.nn import Attention, DualLinkHeads
        >>> attention = Attention(1, 1, batch_first=True, heads=DualLinkHeads("gaussian"))
        >>> _ = torch.nn.init.ones_(attention.in_proj_weight)  # queries, keys and values are the tokens
        >>> _, weights = attention(torch.tensor([[[0.0], [1.0]]]))
        >>> (weights[0, 0, 1] / weights[0, 0, 0]).log().item()  # −½·(0 − 1)²
        -0.5
    """

    def __init__(
        self,
        family: Family | Callable[[int], Measure] = "spin",
        *,
        divergence: bool = True,
        scale: Number = None,
        window: int | tuple[int, int] | None = None,
    ) -> None:
        """Takes the family, by name or as a function from the head's size to a measure over as many coordinates.

        Args:
            divergence: Add the keys' entropies, so that weights go by divergence.
            scale, window: As for `SoftmaxHeads`.
        """
        super().__init__(scale=scale, window=window)
        self.family = family if callable(family) else choice("family", family, *_FAMILIES)
        self.divergence = flag("divergence", divergence)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, request: Request) -> HeadsResult:
        dtype = query.dtype
        with without_autocast(query.device):
            query, eta, value = (tensor.to(torch.promote_types(dtype, torch.float32)) for tensor in (query, key, value))
            create = self.family if callable(self.family) else _FAMILIES[self.family]
            measure = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(eta), create(self.head_dim))
            mean = measure.mean(eta)
            log_weight = request.log_weight
            if self.divergence:
                # A key whose mean overflows is infinitely far: it gets the log-weight −∞, and a finite mean at eta = 0, since
                # even a weight of 0 times an infinite score would be NaN.
                overflows = ~mean.isfinite().all(-1, keepdim=True)
                eta = torch.where(overflows, 0.0, eta)
                mean = measure.mean(eta)
                entropy = measure.entropy(eta).masked_fill(overflows.squeeze(-1), -torch.inf)
                scale = self.head_dim**-0.5 if self.scale is None else per_head(self.scale)
                # −KL(p_key ‖ p_query) = query·∇A(key) + entropy(key) − A(query): the last is the same for all keys.
                log_weight = merge_log_weights(log_weight, scale * entropy.unsqueeze(-2))
            result = super().forward(query, mean, value, request._replace(log_weight=log_weight))
        weights = None if result.weights is None else result.weights.to(dtype)
        return result._replace(output=result.output.to(dtype), weights=weights)
