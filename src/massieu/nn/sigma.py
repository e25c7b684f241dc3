"""Weights whose spectral norm is a parameter, so that attention's scores stay bounded (Zhai et al., arXiv 2303.06296; N11)."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from massieu.foundation.arguments import floating, number
from massieu.nn.modules import Device, Resettable, hold, settings


class SigmaReparametrization(Resettable):
    """σReparam, W ↦ (gain/‖W‖₂)·W, for `torch.nn.utils.parametrize.register_parametrization(layer, "weight", …)`.

    The spectral norm of the weight in use is |gain|, one trained number, whatever training does to W; with those of queries and
    keys bounded, `massieu.energy.least_entropy` says how far attention can collapse. The norm is exact, from eigenvalues of the
    smaller Gram matrix, where power iteration would lag behind: min(m, n)³ operations in each forward pass, none of state, and
    one gradient in training and evaluation. A stack of matrices is scaled one by one, by one gain. A matrix of zeros stays.
    The gain is one number: it takes the dtype of each weight.

    Example:
        >>> import torch
        >>> from massieu import nn
        >>> nn.SigmaReparametrization(gain=3.0)(torch.diag(torch.tensor([4.0, 2.0]))).round(decimals=4).tolist()
        [[3.0, 0.0], [0.0, 1.5]]
    """

    gain: nn.Parameter

    def __init__(self, gain: float = 1.0, *, device: Device = None, dtype: torch.dtype | None = None) -> None:
        """The gain to start from, positive; the norm the weight has now keeps the layer as it is."""
        super().__init__()
        start = torch.tensor(float(number("gain", gain, above=0)), device="cpu")
        hold(self, "gain", start, True, device or torch.get_default_device(), dtype)

    def forward(self, weight: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch m n"]:
        """The weight in use, in the dtype of W; half precision is computed in float32.

        Raises:
            ValueError: W is no matrix, nor a stack of them.
            TypeError: it is not floating-point.
        """
        if floating("weight", weight).ndim < 2 or 0 in weight.shape[-2:]:
            raise ValueError(f"weight must have shape (*batch, m, n), got {tuple(weight.shape)}")
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        # Entries of size at most 1, so that the Gram matrix's squares neither overflow nor vanish.
        size = wide.detach().abs().amax((-2, -1), keepdim=True)
        unit = wide / torch.where(size > 0, size, 1.0)
        # `eigvalsh` raises at NaN: such entries are replaced, and the NaN comes back by `size` below.
        finite = torch.where(unit.isfinite(), unit, 0.0)
        is_wide = weight.shape[-2] <= weight.shape[-1]
        gram = finite @ finite.mT if is_wide else finite.mT @ finite
        # The largest eigenvalue of W Wᵀ is ‖W‖₂², (*batch, 1, 1).
        largest = torch.linalg.eigvalsh(gram)[..., -1, None, None]
        largest = torch.where(size == 0, 1.0, largest + 0.0 * size)
        return (self.gain.to(wide) * unit / largest.sqrt()).to(weight.dtype)

    def extra_repr(self) -> str:
        return settings(self, "gain")
