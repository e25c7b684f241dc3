"""The heads of cosine attention: normalised queries and keys, at a learned temperature."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from massieu.foundation.transforms import without_autocast
from massieu.nn.modules import Number, hold
from massieu.nn.softmax import SoftmaxHeads
from massieu.nn.strategy import HeadsResult, Request

_START_SCALE = 10.0
"""Where a learned inverse temperature starts, as in Swin Transformer V2."""


class CosineHeads(SoftmaxHeads):
    """Cosine attention: p ∝ exp(scale·cos(query, key_n) + log-weight_n), with a learned inverse temperature (Shim §2.1).

    Known today as QK-norm (Henry et al., 2020; Swin Transformer V2). All keys have length 1, so that log Z is that of
    points on a sphere: a von Mises–Fisher kernel density at the query's direction. No score exceeds `scale`, and log Z
    lies within `scale` of log n, however far training moves the projections. The lengths of queries and keys have no
    effect: scaling a projection changes nothing, and `clip_logits` has nothing to scale.

    A zero vector stays zero: such a query attends to all keys alike. Directions are formed in float32 at least. A call
    may ask for what `SoftmaxHeads` gives.

    Example:
        >>> import torch
        >>> from massieu.nn import Attention, CosineHeads
        >>> attention = Attention(2, 1, batch_first=True, heads=CosineHeads(scale=3.0))
        >>> _ = torch.nn.init.constant_(attention.in_proj_weight, 0.0)
        >>> _ = attention.in_proj_weight.data.copy_(
        ...     torch.eye(2).repeat(3, 1)
        ... )  # queries, keys and values are the tokens
        >>> _, weights = attention(torch.tensor([[[5.0, 0.0], [0.0, 0.1]]]))
        >>> round((weights[0, 0, 0] / weights[0, 0, 1]).log().item(), 4)  # cosines 1 and 0
        3.0
    """

    log_scale: nn.Parameter | None

    def __init__(
        self,
        *,
        scale: Number = None,
        sink: Number = None,
        sink_value: Tensor | None = None,
        window: int | tuple[int, int] | None = None,
    ) -> None:
        """Takes the inverse temperature, and what `SoftmaxHeads` takes.

        Args:
            scale: Inverse temperature, positive. None: learned, one a head, from 10; its logarithm `log_scale` is the
                parameter, so that it stays positive. A number or a tensor is a constant; a Parameter trains as it is.
            sink, sink_value, window: As for `SoftmaxHeads`.
        """
        super().__init__(scale=scale, sink=sink, sink_value=sink_value, window=window)
        self.log_scale = None

    def _create_tensors(self, device: torch.device, dtype: torch.dtype | None) -> None:
        super()._create_tensors(device, dtype)
        if self.scale is None:
            # The plain attribute would hide the parameter of the same name.
            del self.log_scale
            start = torch.full((self.num_heads,), math.log(_START_SCALE), device="cpu")
            hold(self, "log_scale", start, True, device, dtype)

    def _inverse_temperature(self) -> Tensor | float | None:
        if self.log_scale is None:
            return self.scale
        return self.log_scale.to(torch.promote_types(self.log_scale.dtype, torch.float32)).exp()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, request: Request) -> HeadsResult:
        with without_autocast(query.device):
            query = _directions(query)
            key = _directions(key)
        return super().forward(query, key, value, request)


def _directions(vectors: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H N D"]:
    """The vectors at length 1; zero vectors as they are, with a finite derivative."""
    wide = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
    # A direction does not depend on a constant factor, so that this one needs no derivative; with it no square overflows.
    largest = wide.detach().abs().amax(-1, keepdim=True)
    wide = wide / torch.where(largest > 0, largest, 1.0)
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return (wide / torch.where(largest > 0, length, 1.0)).to(vectors.dtype)
