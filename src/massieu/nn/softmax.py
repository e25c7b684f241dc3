"""The heads of softmax attention, with log Z and moments, and those of any measure in place of the atoms."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from massieu import ops
from massieu.foundation.arguments import floating, number
from massieu.foundation.doors import door, function
from massieu.foundation.listening import Listeners, in_one_call, listeners
from massieu.foundation.transforms import without_autocast
from massieu.measures import Atoms, Measure
from massieu.nn.heads import added, attention_weights, per_head, with_positions
from massieu.nn.modules import Number, hold
from massieu.nn.strategy import Heads, HeadsResult, Request
from massieu.ops.observed import tell_attention
from massieu.ops.shapes import window_sides

MeasureOfPairs = Callable[[Float[Tensor, "B H N D+E"], Float[Tensor, "B H N"]], Measure]
"""A function from points (key, value), side by side, and their log-weights to a measure."""
_KEY_MASKS_ONLY = "a measure has one weight for each key, the same for all queries; mask by key_padding_mask"


class SoftmaxHeads(Heads):
    """Softmax attention by `massieu.ops.attention`, with log Z: p ∝ exp(scale·query·key_n + log-weight_n).

    The output is Σ_n p_n value_n, the mean of the atoms (key_n, value_n) at eta = (scale·query, 0), in its second half,
    and log Z is their log-partition (S3). Without weights and dropout, memory is linear in queries and keys, forward
    and backward; with them it is L×N. A call may ask for `need_log_partition` and for `need_moments`, the entropy of a
    query's attention and more.

    Example:
        >>> import torch
        >>> from massieu.nn import Attention, SoftmaxHeads
        >>> attention = Attention(4, 2, batch_first=True, heads=SoftmaxHeads(sink=0.0))
        >>> _, weights, log_partition = attention(torch.zeros(1, 3, 4), need_log_partition=True)
        >>> weights[0, 0].tolist(), round(float(log_partition[0, 0, 0].exp().detach()))  # 3 keys and the sink
        ([0.25, 0.25, 0.25], 4)
    """

    extras = ("log_partition", "moments")
    supports_query_offset = True
    supports_documents = True
    reports_attention = True
    scale: Tensor | float | None
    sink: Tensor | float | None
    sink_value: Tensor | None

    def __init__(
        self,
        *,
        scale: Number = None,
        sink: Number = None,
        sink_value: Tensor | None = None,
        window: int | tuple[int, int] | None = None,
        softcap: float | None = None,
    ) -> None:
        """Numbers that are tensors are saved with the module; Parameters train.

        Args:
            scale: Inverse temperature, positive; one, or one a head; by default the head's size to the −½.
            sink: Log-weight of one more key at the origin, with score and value 0; one, or one a head. The output is what it
                was, times Z/(Z + e^sink) (X4), and log Z and the moments count the sink.
            sink_value: The sink's value in a head, (head_dim,), or one a head (num_heads, head_dim): a prior worth e^sink
                tokens of it. The weights that a call returns are those of the keys.
            window: Query i sees keys i − left … i + right; one number is both.
            softcap: Scores are softcap·tanh(score/softcap).

        Raises:
            ValueError: a sink's value without a sink.
        """
        super().__init__(scale=scale, sink=sink)
        if sink_value is not None and sink is None:
            raise ValueError("sink_value is the value of a sink: give its log-weight as sink, got None")
        self.softcap = None if softcap is None else number("softcap", softcap, above=0)
        self.sink_value = None if sink_value is None else floating("sink_value", sink_value)
        self.window = window
        if window is not None:
            window_sides(window)
            reason = "a window needs positions, and added keys have none; use sink"
            self.unsupported = dict.fromkeys(("add_bias_kv", "add_zero_attn"), reason)

    def _create_tensors(self, device: torch.device, dtype: torch.dtype | None) -> None:
        value = self.sink_value
        if value is None:
            return
        shapes = ((self.head_dim,), (self.num_heads, self.head_dim))
        if tuple(value.shape) not in shapes:
            raise ValueError(f"sink_value must have shape {shapes[0]} or {shapes[1]}, got {tuple(value.shape)}")
        # The plain attribute would hide the parameter or buffer of the same name.
        del self.sink_value
        hold(self, "sink_value", value, isinstance(value, nn.Parameter), device, dtype)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, request: Request) -> HeadsResult:
        settings: dict[str, Any] = {"scale": self._inverse_temperature(), "sink": self.sink, "softcap": self.softcap}
        options: dict[str, Any] = settings | {
            "log_weight": request.log_weight,
            "is_causal": request.is_causal,
            "window": self.window,
            "query_offset": request.query_offset,
            "documents": request.documents,
        }
        if request.need_weights or request.dropout > 0:
            return self._forward_with_weights(query, key, value, request, settings, options)
        options["sink_value"] = self.sink_value
        if request.extra == "moments":
            moments = ops.attention_moments(query, key, value, moments=request.moments, **options)
            assert moments.output is not None  # values were passed
            return HeadsResult(moments.output, extra=moments._replace(output=None))
        output, log_partition = ops.attention(query, key, value, **options)
        return HeadsResult(output, extra=log_partition)

    def _inverse_temperature(self) -> Tensor | float | None:
        """The scale of the scores; None for the head's size to the −½."""
        return self.scale

    def _forward_with_weights(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        request: Request,
        settings: dict[str, Any],
        options: dict[str, Any],
    ) -> HeadsResult:
        """The result through the matrix of weights, reported to the listeners as one call of attention."""
        moments = None
        if request.extra == "moments":
            moments = ops.attention_moments(query, key, moments=request.moments, **options)
        audience = listeners()
        output, weights, log_partition = in_one_call(audience, self._with_weights, query, key, value, request, settings)
        if audience:
            options["sink_value"] = self.sink_value
            output = tell_attention(audience, output, query, key, value, **options)
        return HeadsResult(output, weights, log_partition if moments is None else moments)

    def _with_weights(
        self, query: Tensor, key: Tensor, value: Tensor, request: Request, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Output, weights (B, H, L, N) and log Z, computed through the matrix of weights."""
        log_weight = with_positions(
            request.log_weight, query, key, request.is_causal, self.window, request.query_offset, request.documents
        )
        with without_autocast(query.device):
            weights, log_partition = attention_weights(query, key, log_weight=log_weight, **options)
            output = request.dropped(weights) @ value.to(weights.dtype)
            if self.sink is not None and self.sink_value is not None:
                # The sink is one more key of log-weight `sink`, so its weight is e^sink/Z.
                share = (per_head(self.sink) - log_partition.unsqueeze(-1)).exp()
                output = output + share * self.sink_value.unsqueeze(-2).to(share.dtype)
        return output.to(query.dtype), weights.to(query.dtype), log_partition


@door(measure=function)
class MeasureHeads(Heads):
    """Heads that use any measure over pairs (key, value) in place of softmax: output its mean, with its log Z (S3).

    The mean is taken at eta = (scale·query, 0), and its second half is the output. Atoms make softmax attention; a
    Gaussian fitted to the pairs makes linear attention (X1). There are no weights, and masks are those of keys. A call
    may ask for `need_log_partition`.

    Example:
        >>> import torch
        >>> from massieu import measures
        >>> from massieu.nn import Attention, MeasureHeads
        >>> attention = Attention(4, 2, batch_first=True, heads=MeasureHeads(measures.Atoms.create))
        >>> _, _, log_partition = attention(torch.zeros(1, 3, 4), need_log_partition=True)
        >>> round(float(log_partition[0, 0, 0].exp().detach()))  # 3 keys
        3
    """

    extras = ("log_partition",)
    unsupported = MappingProxyType(
        {"dropout": "there are no weights to drop", "attn_mask": _KEY_MASKS_ONLY, "is_causal": _KEY_MASKS_ONLY}
    )
    scale: Tensor | float | None

    def __init__(self, measure: MeasureOfPairs, *, scale: Number = None) -> None:
        """Takes a function of points (key, value) and log-weights to a measure; `scale` as for `SoftmaxHeads`."""
        super().__init__(scale=scale)
        self.measure = measure

    def _measure(self, key: Tensor, value: Tensor, request: Request) -> Measure:
        """The measure over pairs, in float32 at the least."""
        points = torch.cat([key, value], -1).to(torch.promote_types(key.dtype, torch.float32))
        zeros = torch.zeros(key.shape[0], 1, 1, key.shape[2], dtype=points.dtype, device=points.device)
        # Masks are those of keys, so the dimension of queries has size 1 and goes: (B, 1, N).
        log_weight = added(request.log_weight, zeros).squeeze(2)
        return self.measure(points, log_weight.expand(points.shape[:-1]))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, request: Request) -> HeadsResult:
        dtype = torch.promote_types(query.dtype, torch.float32)
        with without_autocast(query.device):
            measure = self._measure(key, value, request)
            scale = self.head_dim**-0.5 if self.scale is None else per_head(self.scale)
            field = query.to(dtype) * scale
            # eta is 0 in the values' coordinates: a query weighs pairs by their keys alone.
            eta = torch.cat([field, torch.zeros_like(field)], -1)
            output = measure.mean(eta)[..., self.head_dim :]
            log_partition = measure.log_partition(eta) if request.extra else None
        return HeadsResult(output.to(query.dtype), extra=log_partition)

    def _report(
        self, audience: Listeners, result: HeadsResult, heads: tuple[Tensor, Tensor, Tensor], request: Request
    ) -> Tensor:
        query, key, value = heads
        with without_autocast(query.device):
            measure = self._measure(key, value, request)
            if not isinstance(measure, Atoms):
                self._refuse(audience, f"take the mean of a {type(measure).__name__}, which has no weights of keys")
                return result.output
            # The function may have moved the atoms, so what is reported are its keys and values, not those of the call.
            points = measure.points
            options = {"scale": self.scale, "log_weight": measure.log_weight.unsqueeze(2)}
            key = points[..., : self.head_dim]
            value = points[..., self.head_dim :]
            output = tell_attention(audience, result.output, query.to(points), key, value, **options)
        return output.to(query.dtype)
