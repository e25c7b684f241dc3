"""Multi-head attention that takes PyTorch's place, returns log Z, and is the mean of any measure."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from massieu import ops
from massieu.foundation.arguments import floating
from massieu.foundation.transforms import without_autocast
from massieu.measures import Measure
from massieu.nn.heads import Mask, added, attention_weights, per_head, with_positions
from massieu.nn.modules import Number, register_number
from massieu.nn.multihead import HeadsResult, MultiHead, Request

MeasureOfPairs = Callable[[Float[Tensor, "B H N D+E"], Float[Tensor, "B H N"]], Measure]
"""From points (key, value), side by side, and their log-weights to a measure."""


class Attention(MultiHead):
    """`torch.nn.MultiheadAttention`, call and state dict alike, on `massieu.ops.attention`.

    Σ_n p_n value_n with p ∝ exp(scale·query·key_n + log-weight_n): the mean of the atoms (key_n, value_n) at eta =
    (scale·query, 0), in its second half; log Z is their log-partition (S3). A query that sees no key gets 0 from
    the heads, not NaN. Without weights and dropout, memory is linear in queries and keys, forward and backward.

    What it has beyond the original:

    - `need_log_partition=True` in the call returns log Z;
    - `scale`, the inverse temperature, may be a number, a tensor, or a Parameter, which trains; one, or one a head;
    - `sink`: the log-weight of one more key at the origin, with score and value 0, of the same kinds: with it, the output
      is what it was, times Z/(Z + e^sink) (X4), and log Z counts the sink;
    - `sink_value`: the sink's value in a head, a tensor or Parameter (head_dim,), or one a head (num_heads, head_dim): a
      prior worth e^sink tokens of it. The weights that a call returns are those of the keys;
    - `window`: query i sees keys i − left … i + right;
    - `softcap`: scores are softcap·tanh(score/softcap);
    - `measure`: another measure over pairs (key, value) in place of the atoms. The output is the second half of its
      mean, log Z its log-partition. A Gaussian fitted to the pairs makes linear attention (X1). There are then no
      weights, and masks are those of keys.
    """

    scale: Tensor | float | None
    sink: Tensor | float | None
    sink_value: Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        scale: Number = None,
        sink: Number = None,
        sink_value: Tensor | None = None,
        window: int | tuple[int, int] | None = None,
        softcap: float | None = None,
        measure: MeasureOfPairs | None = None,
    ) -> None:
        """The arguments of `torch.nn.MultiheadAttention`, and the keywords that the class describes.

        Dropout is of weights, and then takes memory L×N in training. The weights returned are those before it.

        Raises:
            ValueError: options that exclude each other.
        """
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        if window is not None and (add_bias_kv or add_zero_attn):
            raise ValueError(
                "window does not go with add_bias_kv or add_zero_attn, whose keys have no position: use sink"
            )
        if measure is not None and not (window is softcap is sink is None and dropout == 0):
            raise ValueError("measure does not go with window, softcap, sink or dropout, which are made for atoms")
        register_number(self, "scale", scale, num_heads)
        register_number(self, "sink", sink, num_heads)
        if sink_value is not None:
            if sink is None:
                raise ValueError("sink_value is the value of a sink: give its log-weight as sink, got None")
            if tuple(floating("sink_value", sink_value).shape) not in ((self.head_dim,), (num_heads, self.head_dim)):
                shapes = f"{(self.head_dim,)} or {(num_heads, self.head_dim)}"
                raise ValueError(f"sink_value must have shape {shapes}, got {tuple(sink_value.shape)}")
        if isinstance(sink_value, torch.nn.Parameter):
            self.register_parameter("sink_value", sink_value)
        else:
            self.register_buffer("sink_value", sink_value)
        self.window, self.softcap, self.measure = window, softcap, measure

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
        need_log_partition: bool = False,
    ) -> tuple[Tensor | None, ...]:
        """`MultiHead`'s call; the potential is log Z in nats, −inf for a query that sees no key."""
        options = need_weights, attn_mask, average_attn_weights, is_causal
        return super().forward(query, key, value, key_padding_mask, *options, need_potential=need_log_partition)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, request: Request) -> HeadsResult:
        if self.measure is not None:
            return self._through_measure(query, key, value, request)
        if request.need_weights or self._drops:
            return self._with_weights(query, key, value, request)
        found = ops.attention(
            query,
            key,
            value,
            log_weight=request.log_weight,
            scale=self.scale,
            is_causal=request.is_causal,
            window=self.window,
            softcap=self.softcap,
            sink=self.sink,
            sink_value=self.sink_value,
        )
        return HeadsResult(found.output, None, found.log_partition)

    def _with_weights(self, query: Tensor, key: Tensor, value: Tensor, request: Request) -> HeadsResult:
        """The same by the matrix of weights."""
        log_weight = with_positions(request.log_weight, query, key, request.is_causal, self.window)
        with without_autocast(query.device):
            weights, log_partition = attention_weights(
                query, key, scale=self.scale, log_weight=log_weight, sink=self.sink, softcap=self.softcap
            )
            output = self._dropped(weights) @ value.to(weights.dtype)
            if self.sink is not None and self.sink_value is not None:
                share = (per_head(self.sink) - log_partition.unsqueeze(-1)).exp()
                output = output + share * self.sink_value.unsqueeze(-2).to(share.dtype)
        return HeadsResult(output.to(query.dtype), weights.to(query.dtype), log_partition)

    def _through_measure(self, query: Tensor, key: Tensor, value: Tensor, request: Request) -> HeadsResult:
        assert self.measure is not None
        given = request.log_weight
        if request.is_causal or (given is not None and (given.shape[1], given.shape[2]) != (1, 1)):
            raise ValueError(
                "a measure holds weights of keys, one for all queries: with `measure`, mask by key_padding_mask, not by "
                "attn_mask or is_causal"
            )
        dtype = torch.promote_types(query.dtype, torch.float32)
        with without_autocast(query.device):
            points = torch.cat([key, value], -1).to(dtype)
            weight = added(given, points.new_zeros(key.shape[0], 1, 1, key.shape[2])).squeeze(2)
            measure = self.measure(points, weight.expand(points.shape[:-1]))
            field = query.to(dtype) * (self.head_dim**-0.5 if self.scale is None else per_head(self.scale))
            eta = torch.cat([field, torch.zeros_like(field)], -1)
            output = measure.mean(eta)[..., self.head_dim :]
            log_partition = measure.log_partition(eta) if request.need_potential else None
        return HeadsResult(output.to(query.dtype), None, log_partition)
